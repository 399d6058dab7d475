//! What a step of a run may do: write, ask, break, mend.
//!
//! Owns: how often each happens, and what makes sense when. Must not know what comes of it.

use std::sync::atomic::Ordering;

use bytes::Bytes;
use h2::Reason;
use keyward::pb::etcdserverpb::watch_request::RequestUnion;
use keyward::pb::etcdserverpb::{WatchCancelRequest, WatchCreateRequest, WatchProgressRequest, WatchRequest};
use keyward::refusal::Code;
use prost::Message as _;

use crate::checker::Asked;
use crate::cluster::{Cut, SERIALS};
use crate::counts::What;
use crate::model::store::{Op, is_delete};
use crate::run::World;
use crate::truth::{KEYS, Wanted, key};

/// Three values of this size are more than one fragment holds.
const LARGE: usize = 1 << 20;
/// More watches than this on one stream are not asked for.
const WATCHES: usize = 6;

impl World {
    /// One step.
    pub(crate) async fn act(&mut self) -> Result<(), String> {
        let watcher = self.dice.below(self.watchers.len().max(1));
        let has = watcher < self.watchers.len();
        let mut step = self.dice.below(100);
        // Watches come to share an upstream watch between two faults.
        if self.cluster.borrow().shares && (52..87).contains(&step) && !self.dice.one_in(4) {
            step = 0;
        }
        match step {
            0..28 => self.write(),
            28..38 if has => self.ask_create(watcher),
            38..43 if has => self.ask_cancel(watcher),
            43..49 if has => self.ask_progress(watcher),
            49..51 if has => self.slow(watcher),
            51 if has && self.dice.one_in(4) => self.half_close(watcher),
            52..64 => self.cut_one(),
            64..67 => self.cut_connection(),
            67..70 => self.expire(),
            70..72 => self.change_rights(),
            72..76 => self.compact(),
            76..79 => self.down_or_up(),
            79..81 => self.leader_lost_or_found(),
            81..83 => self.go_away(),
            83..86 => self.timed_progress(),
            86 if self.dice.one_in(3) => tokio::time::sleep(std::time::Duration::from_secs(40)).await,
            87..89 => {
                let pause = std::time::Duration::from_millis(self.dice.next() % 1500);
                tokio::time::sleep(pause).await;
            }
            89..96 => self.probe(false),
            96 if self.step > 20 && !self.exchanged && self.dice.one_in(2) => self.exchange().await?,
            _ => {}
        }
        Ok(())
    }

    // ---- writers

    pub(crate) fn write(&mut self) {
        let mut keys = KEYS.to_vec();
        let mut ops = Vec::new();
        let large = self.large && self.step > 30;
        self.large &= !large;
        let count = if large { 3 } else { 1 + self.dice.below(4) };
        for _ in 0..count {
            let at = self.dice.below(keys.len());
            let byte = keys.remove(at);
            if !large && self.dice.one_in(4) {
                ops.push(Op::Delete { key: key(byte), range_end: Bytes::new() });
            } else {
                self.value += 1;
                let size = if large { LARGE } else { self.dice.pick(&[0, 8, 40, 150]) };
                let value = format!("{}{}", self.value, "x".repeat(size));
                ops.push(Op::Put { key: key(byte), value: value.into(), lease: self.dice.int(0, 2) });
            }
        }
        let mut cluster = self.cluster.borrow_mut();
        if cluster.nodes.iter().filter(|node| node.up && !node.leaderless).count() < 2 {
            return; // No quorum.
        }
        if cluster.truth.now_mut().write(ops) {
            cluster.counts.one(What::Revisions);
            let head = cluster.truth.now().head();
            cluster.note(|| format!("revision {head}"));
        }
    }

    fn compact(&mut self) {
        let back = self.dice.int(0, 8);
        let mut cluster = self.cluster.borrow_mut();
        let at = cluster.truth.now().head() - back;
        // A version that loses the tombstones of a compacted revision loses them without us, too.
        let careless = self.flavors.iter().any(|flavor| !flavor.keeps_compacted_tombstone);
        let tombstone = cluster.truth.now().store.at(at).iter().any(is_delete);
        if at >= 1 && !(careless && tombstone) && cluster.truth.now_mut().compact(at) {
            cluster.note(|| format!("compacted at {at}"));
        }
    }

    // ---- clients

    /// The era of the highest revision that the client's connection was shown, if a watch from `start` on may rely on it.
    fn heard_era(&self, at: usize, start: i64) -> usize {
        let (era, revision) = self.shown[self.watchers[at].connection];
        if start <= revision + 1 { era } else { usize::MAX }
    }

    pub(crate) fn ask_create(&mut self, at: usize) {
        if self.watchers[at].checker.open() >= WATCHES || self.watchers[at].stream.is_half_closed() {
            return;
        }
        let cluster = self.cluster.borrow();
        let head = cluster.truth.now().head();
        let era = cluster.truth.index();
        let known = self.watchers[at].checker.known_era(&cluster.truth);
        drop(cluster);
        let start = match self.dice.below(12) {
            0..6 => 0,
            6 => -1,
            7 => head + self.dice.int(1, 4),
            8 => self.dice.int(1, 6),
            _ => (head - self.dice.int(0, 12)).max(1),
        };
        let low = self.dice.below(KEYS.len());
        let single = self.dice.one_in(3);
        let open_end = !single && self.dice.one_in(6);
        let inverted = !single && !open_end && self.dice.one_in(25);
        let high = if single { low } else { low + self.dice.below(KEYS.len() - low) };
        // Whoever is told of the large revision gets most of it.
        let (low, high) = if self.wide && !single { (0, KEYS.len() - 1) } else { (low, high) };
        self.serial += 1;
        let range_end = match (single, open_end, inverted) {
            (true, ..) => Bytes::new(),
            (_, true, _) => Bytes::from_static(b"\0"),
            (.., true) => key(KEYS[low]),
            _ => key(KEYS[high] + 1),
        };
        let filtered = self.dice.below(8);
        let mut asked = Asked {
            serial: self.serial,
            form: self.serial,
            range_end,
            wanted: Wanted {
                low: KEYS[low],
                high: if open_end { 0xff } else { KEYS[high] },
                no_put: filtered == 0,
                no_delete: filtered == 1,
            },
            // Not -1: etcd takes it, and a client cannot tell its progress from that of all.
            id: if self.dice.one_in(4) { self.dice.pick(&[-3, -2, 1, 2, 3, 4, 5, 9]) } else { 0 },
            start,
            fragment: self.dice.one_in(3) || self.wide,
            notify: self.dice.one_in(3),
            prev_kv: self.dice.one_in(2),
            inverted,
            era,
            shown: self.watchers[at].checker.shown_in(era),
            known,
            heard: self.heard_era(at, start),
        };
        self.take_form(&mut asked);
        let create = create_of(&asked);
        let mut cluster = self.cluster.borrow_mut();
        cluster.asked.insert(asked.form, asked.clone());
        let name = self.watchers[at].name;
        cluster.note(|| format!("client {name} < {asked:?}"));
        drop(cluster);
        self.watchers[at].checker.creates(asked);
        self.say(at, RequestUnion::CreateRequest(create));
    }

    /// Where watches may share an upstream watch, most ask for what others have asked for.
    fn take_form(&mut self, asked: &mut Asked) {
        let cluster = self.cluster.borrow();
        if !cluster.shares || self.dice.one_in(4) {
            return;
        }
        let forms: Vec<u64> = cluster.asked.keys().copied().collect();
        if let Some(like) = self.dice.maybe_pick(&forms).and_then(|form| cluster.asked.get(&form)) {
            asked.form = like.form;
            asked.range_end = like.range_end.clone();
            asked.wanted = like.wanted.clone();
            asked.prev_kv = like.prev_kv;
            asked.inverted = like.inverted;
        }
    }

    fn ask_cancel(&mut self, at: usize) {
        if self.watchers[at].stream.is_half_closed() {
            return;
        }
        let checker = &mut self.watchers[at].checker;
        let untold = checker.cancelable_untold().filter(|_| self.dice.one_in(2));
        let told = checker.cancelable();
        let id = if let Some((id, serial)) = untold {
            checker.cancels_untold(id, serial);
            id
        } else if let Some(id) = self.dice.maybe_pick(&told) {
            checker.cancels(id);
            id
        } else {
            return;
        };
        let mut cluster = self.cluster.borrow_mut();
        if cluster.streams.is_empty() {
            cluster.counts.one(What::CancelsRaced);
        }
        let name = self.watchers[at].name;
        cluster.note(|| format!("client {name} < cancel {id}"));
        drop(cluster);
        self.say(at, RequestUnion::CancelRequest(WatchCancelRequest { watch_id: id }));
        if self.dice.one_in(3) {
            // Etcd answers an unknown id with nothing at all.
            self.say(at, RequestUnion::CancelRequest(WatchCancelRequest { watch_id: 77 }));
        }
    }

    pub(crate) fn ask_progress(&mut self, at: usize) {
        let name = self.watchers[at].name;
        self.cluster.borrow_mut().note(|| format!("client {name} < progress"));
        self.say(at, RequestUnion::ProgressRequest(WatchProgressRequest {}));
    }

    fn half_close(&mut self, at: usize) {
        if !self.watchers[at].stream.is_half_closed() {
            self.cluster.borrow_mut().counts.one(What::HalfCloses);
            self.watchers[at].stream.half_close();
        }
    }

    fn slow(&mut self, at: usize) {
        let until = self.step + 10 + self.dice.below(30);
        self.watchers[at].slow_until = until;
    }

    fn say(&mut self, at: usize, request: RequestUnion) {
        let message = WatchRequest { request_union: Some(request) }.encode_to_vec();
        self.watchers[at].stream.say(&message);
    }

    // ---- faults

    fn cut_one(&mut self) {
        let cut = match self.dice.below(8) {
            0 => Cut::Reset(Reason::CANCEL),
            1 => Cut::Reset(Reason::INTERNAL_ERROR),
            2 => Cut::Status(Code::Unavailable, "etcdserver: no leader"),
            3 => Cut::Status(Code::Canceled, "etcdserver: watch canceled"),
            4 => Cut::NoStatus,
            5 => Cut::HalfMessage,
            6 => Cut::Reset(Reason::REFUSED_STREAM),
            _ => Cut::Status(Code::Unavailable, "transport is closing"),
        };
        let after = self.dice.below(5);
        let mut cluster = self.cluster.borrow_mut();
        let numbers: Vec<u64> = cluster.streams.keys().copied().collect();
        let Some(number) = self.dice.maybe_pick(&numbers) else { return };
        if let Some(stream) = cluster.streams.get_mut(&number) {
            stream.cut = Some((after, cut));
        }
        cluster.send_out(number);
    }

    fn cut_connection(&mut self) {
        let mut cluster = self.cluster.borrow_mut();
        let numbers: Vec<u64> = cluster.connections.keys().copied().collect();
        let Some(number) = self.dice.maybe_pick(&numbers) else { return };
        if self.dice.one_in(2) {
            return cluster.cut_connection(number);
        }
        let budget = self.dice.below(800);
        cluster.counts.one(What::ByteCuts);
        cluster.note(|| format!("connection {number} has {budget} bytes left"));
        if let Some(connected) = cluster.connections.get(&number) {
            connected.budget.set(Some(budget));
        }
    }

    fn expire(&mut self) {
        let mut cluster = self.cluster.borrow_mut();
        let from = cluster.tokens + 1;
        let all = self.dice.one_in(2);
        let one = self.dice.below(cluster.nodes.len());
        for (at, node) in cluster.nodes.iter_mut().enumerate() {
            if all || at == one {
                node.valid_from = from;
            }
        }
        cluster.note(|| {
            format!(
                "tokens below {from} expired on {}",
                if all { "all".into() } else { (one + 1).to_string() }
            )
        });
    }

    fn change_rights(&mut self) {
        let byte = self.dice.pick(KEYS);
        let mut cluster = self.cluster.borrow_mut();
        if !cluster.denied.remove(&byte) && cluster.denied.len() < 2 {
            cluster.denied.insert(byte);
        }
        let denied = cluster.denied.clone();
        cluster.note(|| format!("denied: {denied:?}"));
    }

    fn down_or_up(&mut self) {
        let mut cluster = self.cluster.borrow_mut();
        let at = self.dice.below(cluster.nodes.len());
        let up = !cluster.nodes[at].up;
        cluster.nodes[at].up = up;
        cluster.nodes[at].address.listens.store(up, Ordering::Relaxed);
        cluster.note(|| format!("member {} up: {up}", at + 1));
        if !up {
            cluster.cut_connections_of(at);
        }
        drop(cluster);
        if self.dice.one_in(2) {
            self.probe(true);
        }
    }

    fn leader_lost_or_found(&mut self) {
        let mut cluster = self.cluster.borrow_mut();
        let lost = !cluster.nodes.iter().any(|node| node.leaderless);
        let all = self.dice.one_in(2);
        let one = self.dice.below(cluster.nodes.len());
        for (at, node) in cluster.nodes.iter_mut().enumerate() {
            node.leaderless = lost && (all || at == one);
        }
        cluster.note(|| format!("leader lost: {lost}"));
        if lost {
            cluster.counts.one(What::LeaderLosses);
            let cut = Cut::Status(Code::Unavailable, "etcdserver: no leader");
            let there: Vec<u64> = cluster
                .streams
                .iter()
                .filter(|(_, stream)| cluster.nodes[stream.node].leaderless)
                .map(|(number, _)| *number)
                .collect();
            for number in there {
                cluster.cut(number, cut);
            }
        } else {
            cluster.term += 1;
            let term = cluster.term;
            for node in &mut cluster.nodes {
                node.model.raft_term = term;
            }
        }
        drop(cluster);
        if self.dice.one_in(2) {
            self.probe(true);
        }
    }

    fn go_away(&mut self) {
        let mut cluster = self.cluster.borrow_mut();
        let numbers: Vec<u64> = cluster.connections.keys().copied().collect();
        let Some(number) = self.dice.maybe_pick(&numbers) else { return };
        cluster.counts.one(What::GoAways);
        cluster.note(|| format!("connection {number} says GOAWAY"));
        if let Some(connected) = cluster.connections.get(&number) {
            connected.go_away.notify_one();
        }
    }

    fn timed_progress(&mut self) {
        let mut cluster = self.cluster.borrow_mut();
        let numbers: Vec<u64> = cluster.streams.keys().copied().collect();
        if let Some(number) = self.dice.maybe_pick(&numbers) {
            cluster.timed_progress(number);
        }
    }

    /// Another history behind the same addresses.
    async fn exchange(&mut self) -> Result<(), String> {
        self.exchanged = true;
        let swap = self.dice.one_in(2);
        self.exchange_history(swap);
        if swap {
            for _ in 0..self.dice.below(30) {
                self.write();
            }
        }
        self.probe(true);
        if !swap {
            // Who comes back later than the new history reaches the old one's length cannot know: etcd does not tell.
            for watcher in &mut self.watchers {
                watcher.slow_until = watcher.slow_until.min(self.step);
            }
            self.rest(false).await?;
        }
        Ok(())
    }

    fn exchange_history(&mut self, swap: bool) {
        let mut cluster = self.cluster.borrow_mut();
        if swap {
            cluster.counts.one(What::Swaps);
            cluster.truth.swap(0xc2);
        } else {
            cluster.counts.one(What::Restored);
            let base = (cluster.truth.now().head() - self.dice.int(0, 10)).max(1);
            cluster.truth.restore(base);
        }
        let head = cluster.truth.now().head();
        cluster.note(|| format!("another history, swap: {swap}, at {head}"));
        let tokens = cluster.tokens + 1;
        for node in &mut cluster.nodes {
            node.up = true;
            node.leaderless = false;
            node.address.listens.store(true, Ordering::Relaxed);
            node.valid_from = tokens;
        }
        cluster.restart_all();
    }

    pub(crate) fn cut_everything(&mut self) {
        let mut cluster = self.cluster.borrow_mut();
        for number in cluster.streams.keys().copied().collect::<Vec<_>>() {
            cluster.cut(number, Cut::Status(Code::Unavailable, "transport is closing"));
        }
    }
}

fn create_of(asked: &Asked) -> WatchCreateRequest {
    let mut filters = vec![SERIALS + i32::try_from(asked.form).unwrap_or(0)];
    filters.extend(asked.wanted.no_put.then_some(0));
    filters.extend(asked.wanted.no_delete.then_some(1));
    WatchCreateRequest {
        key: key(asked.wanted.low),
        range_end: asked.range_end.clone(),
        start_revision: asked.start,
        progress_notify: asked.notify,
        filters,
        prev_kv: asked.prev_kv,
        watch_id: asked.id,
        fragment: asked.fragment,
    }
}
