//! One script: its steps on both sides, each to its rest.
//!
//! Owns: the order of things within a script. Must not know what is drawn (`dice`). Invariants: a step begins when both sides are at rest; a
//! script leaves nothing that the next one sees, but a higher revision. What proves rest, since silence proves nothing:
//!
//! - Requests end with a probe, a watch that is made and cancelled: its ack comes after the answers to all that was asked before.
//! - A watch that is behind and has nothing to be told is passed over once a second one, made later, got its event.
//! - At the end each stream has a sentinel, whose event comes after all that was given to the stream before.

use bytes::Bytes;
use keyward::pb::{
    etcdserverpb::{WatchCancelRequest, WatchCreateRequest, WatchResponse, watch_request::RequestUnion},
    mvccpb::{Event, KeyValue},
};
use prost::Message as _;

use crate::model::{interval::Interval, store::Op};

use super::{
    Counts,
    dice::{Dice, HEAVY_KEYS, Scene, Theme},
    pair::{Behind, Pair},
    server::{Server, Who},
};

/// The watch that ends a stream's script.
const SENTINEL: i64 = 999_999;
/// From here on ids are those of probes.
const PROBES: i64 = 1_000_000;
/// Never written.
const PROBE_KEY: &str = "/a/probe";
/// Written to make a pass over the watches that are behind visible.
const PASS_KEY: &str = "/a/pass";
/// Above the 1,000 revisions of one answer.
const LONG: usize = 1_030;

/// Large values short of one more making an answer that is cut.
const EDGE_KEYS: usize = 11;

struct Run<'a> {
    server: &'a mut Server,
    counts: &'a mut Counts,
    dice: Dice,
    scene: Scene,
    /// The first is root's, and is never half-closed.
    pairs: Vec<Pair>,
    probes: i64,
}

/// Runs the script of a seed; the error says at which step the two sides differ, and how.
pub(super) async fn replay(server: &mut Server, seed: u64, counts: &mut Counts) -> Result<(), String> {
    let mut dice = Dice::new(seed);
    let theme = dice.theme();
    let (base, compacted) = (server.store.revision(), server.store.compacted());
    let scene = Scene { seed, theme, base, current: base, compacted, lease: 0 };
    let mut run = Run { server, counts, dice, scene, pairs: Vec::new(), probes: 0 };
    run.begin().await.map_err(|what| format!("beginning ({theme:?}): {what}"))?;
    let steps = 20 + run.dice.below(20);
    for step in 0..steps {
        let mut told = String::new();
        let done = run.step(&mut told).await;
        done.map_err(|what| format!("step {step} of {steps} ({theme:?}), {told}: {what}"))?;
        *run.counts.entry("steps").or_default() += 1;
    }
    run.end().await.map_err(|what| format!("end ({theme:?}): {what}"))
}

impl Run<'_> {
    /// A base of its own, some history, and the streams.
    async fn begin(&mut self) -> Result<(), String> {
        self.server.let_alice_read_c(false).await?;
        self.change(vec![put("/a/begin", "1")]).await?;
        self.compact(self.server.store.revision()).await?;
        self.scene.base = self.server.store.revision();
        match self.scene.theme {
            Theme::Plain => {}
            Theme::Heavy => self.edge().await?,
            Theme::Long => {
                let puts = (0..LONG).map(|n| (self.scene.key(n % 4), n.to_string().into()));
                self.server.write_many(puts.collect()).await?;
                self.apply();
            }
        }
        let others = [Who::Root, Who::Alice, Who::Alice, Who::Alice, Who::Alice, Who::Bob];
        let others = [&others[..], &[Who::Stale, Who::Garbage, Who::NoToken]].concat();
        let streams = 1 + self.dice.below(3);
        for n in 0..streams {
            let who = if n == 0 { Who::Root } else { self.dice.pick(&others) };
            self.pairs.push(Pair::open(self.server, who));
            if self.dice.one_in(4) {
                self.sentinel(n);
            }
            self.settle().await?;
            if self.scene.theme != Theme::Plain {
                self.watch_whole(n).await?;
            }
        }
        Ok(())
    }

    async fn step(&mut self, told: &mut String) -> Result<(), String> {
        self.scene.current = self.server.store.revision();
        self.scene.compacted = self.server.store.compacted();
        let stream = self.dice.below(self.pairs.len());
        match self.dice.below(20) {
            0..7 => self.write(told).await,
            7 => self.several_writes(told).await,
            8 => {
                let revision = self.dice.compaction(&self.scene);
                *told = format!("compaction at {revision}");
                self.compact(revision).await
            }
            9 => self.lease(told).await,
            10 if self.dice.one_in(3) => {
                let may = self.dice.one_in(2);
                *told = format!("alice may read /c/: {may}");
                self.server.let_alice_read_c(may).await
            }
            11 if stream > 0 && self.dice.one_in(3) && !self.pairs[stream].is_half_closed() => {
                *told = format!("stream {stream} half-closes");
                self.half_close(stream).await
            }
            _ if self.pairs[stream].is_half_closed() => self.write(told).await,
            _ => self.ask(stream, told).await,
        }
    }

    /// Watches from the beginning. Their ids are of zero, two and three bytes, as far as an answer at the edge varies.
    async fn watch_whole(&mut self, stream: usize) -> Result<(), String> {
        for watch_id in [0, 100, 200] {
            let whole = self.dice.whole(&self.scene, watch_id);
            self.pairs[stream].ask(whole);
            self.settle().await?;
        }
        Ok(())
    }

    /// Large values in all keys: together more than one answer that may be cut.
    async fn refill(&mut self) -> Result<(), String> {
        for n in 0..HEAVY_KEYS {
            self.change(vec![self.scene.large(n)]).await?;
        }
        Ok(())
    }

    /// Large values that a watch from the beginning is told in one answer, or in one fragment, that is as large as the limit, or a few bytes
    /// off it.
    async fn edge(&mut self) -> Result<(), String> {
        for n in 0..EDGE_KEYS {
            self.change(vec![self.scene.large(n)]).await?;
        }
        let more = self.dice.one_in(2);
        let size = Server::limits().fragment.saturating_add_signed(self.dice.pick(&[-3, -2, -1, 0]));
        let value = self.edge_value(size, more);
        self.change(vec![Op::Put { key: self.scene.key(EDGE_KEYS), value, lease: 0 }]).await?;
        if more {
            self.change(vec![put(&String::from_utf8_lossy(&self.scene.key(EDGE_KEYS + 1)), "more")]).await?;
        }
        Ok(())
    }

    /// The value of one more key that makes the answer exactly so large; `more` is a further event behind it.
    fn edge_value(&self, size: usize, more: bool) -> Bytes {
        let store = &self.server.store;
        let revision = store.revision() + 1;
        let header = self.server.member.header(store, revision + i64::from(more));
        let (key, range_end) = (self.scene.prefix(), self.scene.prefix_end());
        let events = store.events(self.scene.base, revision, &key, &range_end);
        let mut answer = WatchResponse {
            header: Some(header),
            fragment: more,
            events: events.map(|(_, event)| event.clone()).collect(),
            ..WatchResponse::default()
        };
        let others = answer.events.len();
        let mut length = 0;
        // Lengths are varints, so one look may not do.
        for _ in 0..4 {
            let kv = KeyValue {
                key: self.scene.key(EDGE_KEYS),
                create_revision: revision,
                mod_revision: revision,
                version: 1,
                value: vec![b'z'; length].into(),
                lease: 0,
            };
            let value = kv.value.clone();
            answer.events.truncate(others);
            answer.events.push(Event { kv: Some(kv), ..Event::default() });
            let there = answer.encoded_len();
            if there == size {
                return value;
            }
            length = length + size - there;
        }
        panic!("no value makes an answer of {size} bytes")
    }

    async fn write(&mut self, told: &mut String) -> Result<(), String> {
        if self.scene.theme == Theme::Heavy && self.dice.one_in(4) {
            *told = "refill, and delete all".into();
            self.refill().await?;
            let range_end = self.scene.prefix_end();
            return self.change(vec![Op::Delete { key: self.scene.prefix(), range_end }]).await;
        }
        let ops = self.dice.write(&self.scene);
        *told = format!("write {}", named(&ops));
        self.change(ops).await
    }

    async fn several_writes(&mut self, told: &mut String) -> Result<(), String> {
        for _ in 0..2 + self.dice.below(3) {
            let ops = self.dice.write(&self.scene);
            *told += &format!("write {} ", named(&ops));
            self.server.write(&ops).await?;
            self.apply();
        }
        self.settle().await
    }

    /// Grants a lease for later puts, or ends it.
    async fn lease(&mut self, told: &mut String) -> Result<(), String> {
        if self.scene.lease == 0 {
            // A lease's id is used once in a server's life; revisions never come again.
            self.scene.lease = self.scene.current * 1000 + 7;
            *told = format!("grant {}", self.scene.lease);
            return self.server.grant(self.scene.lease).await;
        }
        *told = format!("revoke {}", self.scene.lease);
        self.server.revoke(self.scene.lease).await?;
        self.scene.lease = 0;
        self.apply();
        self.settle().await
    }

    async fn ask(&mut self, stream: usize, told: &mut String) -> Result<(), String> {
        let taken: Vec<i64> = self.pairs[stream].model.ids().filter(|id| *id < SENTINEL).collect();
        let requests = self.dice.requests(&self.scene, &taken);
        *told = format!("stream {stream} asks {requests:?}");
        let progress = matches!(requests.last(), Some(RequestUnion::ProgressRequest(_)));
        for request in requests {
            let open = matches!(&request, RequestUnion::CreateRequest(create) if create.range_end == "\0");
            if open && self.pairs[stream].who == Who::Alice {
                *self.counts.entry("open end, asked by alice").or_default() += 1;
            }
            self.pairs[stream].ask(request);
        }
        self.probe(stream);
        let before = self.counts.get("progress").copied();
        let behind = self.settle_all().await?;
        if progress && before == self.counts.get("progress").copied() {
            *self.counts.entry("progress, unanswered").or_default() += 1;
        }
        self.passes(behind).await
    }

    /// Waits for the passes over watches that are behind which no answer has shown.
    async fn passes(&mut self, behind: Behind) -> Result<(), String> {
        let passes = match (self.scene.theme, behind) {
            // Each may need two.
            (Theme::Long, Behind::Told | Behind::Silent) => 2,
            (_, Behind::Silent) => 1,
            _ => 0,
        };
        for _ in 0..passes {
            self.pass().await?;
        }
        Ok(())
    }

    /// Waits until etcd has passed over all watches that are behind now.
    async fn pass(&mut self) -> Result<(), String> {
        self.change(vec![put(PASS_KEY, "1")]).await?;
        self.probes += 1;
        let watch_id = PROBES + self.probes;
        let start_revision = self.server.store.revision();
        let create = WatchCreateRequest {
            key: PASS_KEY.into(),
            start_revision,
            watch_id,
            ..WatchCreateRequest::default()
        };
        self.pairs[0].ask(RequestUnion::CreateRequest(create));
        self.settle().await?;
        self.pairs[0].ask(RequestUnion::CancelRequest(WatchCancelRequest { watch_id }));
        self.settle().await
    }

    /// A watch that is made and cancelled. Where it is refused, that is the answer; the cancel then has none.
    fn probe(&mut self, stream: usize) {
        self.probes += 1;
        let watch_id = PROBES + self.probes;
        let create = WatchCreateRequest { key: PROBE_KEY.into(), watch_id, ..WatchCreateRequest::default() };
        self.pairs[stream].ask(RequestUnion::CreateRequest(create));
        self.pairs[stream].ask(RequestUnion::CancelRequest(WatchCancelRequest { watch_id }));
    }

    /// A watch on the script's sentinel key, once for each stream that may have one.
    fn sentinel(&mut self, stream: usize) {
        let pair = &mut self.pairs[stream];
        let key = format!("/a/{}/sentinel", self.scene.seed);
        let asked = Interval::new(&key.clone().into(), &"".into());
        let there = pair.model.ids().any(|id| id == SENTINEL);
        if there || pair.is_half_closed() || self.server.permit(pair.who, &asked).is_err() {
            return;
        }
        let create =
            WatchCreateRequest { key: key.into(), watch_id: SENTINEL, ..WatchCreateRequest::default() };
        pair.ask(RequestUnion::CreateRequest(create));
    }

    async fn half_close(&mut self, stream: usize) -> Result<(), String> {
        self.sentinel(stream);
        self.probe(stream);
        self.settle().await?;
        self.pairs[stream].half_close();
        *self.counts.entry("half-closed streams").or_default() += 1;
        Ok(())
    }

    /// Proves that nothing is on the way that the model does not know.
    async fn end(&mut self) -> Result<(), String> {
        for stream in 0..self.pairs.len() {
            self.sentinel(stream);
        }
        self.settle().await?;
        self.pass().await?;
        let key = format!("/a/{}/sentinel", self.scene.seed);
        self.change(vec![put(&key, "end")]).await?;
        for stream in 0..self.pairs.len() {
            if !self.pairs[stream].is_half_closed() {
                self.probe(stream);
            }
        }
        self.settle().await?;
        let muted: usize = self.pairs.iter().map(|pair| pair.model.parked()).sum();
        *self.counts.entry("muted answers").or_default() += muted as u64;
        // Streams end before the keys go, so that no watch is told of it.
        self.pairs.clear();
        if self.scene.theme == Theme::Heavy {
            let range_end = self.scene.prefix_end();
            self.change(vec![Op::Delete { key: self.scene.prefix(), range_end }]).await?;
        }
        Ok(())
    }

    async fn change(&mut self, ops: Vec<Op>) -> Result<(), String> {
        self.server.write(&ops).await?;
        self.apply();
        self.settle().await
    }

    async fn compact(&mut self, revision: i64) -> Result<(), String> {
        if self.server.compact(revision).await? {
            self.apply();
        }
        Ok(())
    }

    /// The model's member applies what the server has applied.
    fn apply(&mut self) {
        let streams = &mut self.pairs;
        while self
            .server
            .member
            .apply(&self.server.store, streams.iter_mut().map(|pair| &mut pair.model))
            .is_some()
        {}
    }

    async fn settle(&mut self) -> Result<(), String> {
        self.settle_all().await.map(drop)
    }

    async fn settle_all(&mut self) -> Result<Behind, String> {
        let mut behind = Behind::Nobody;
        for (stream, pair) in self.pairs.iter_mut().enumerate() {
            let settled = pair.settle(self.server, self.counts).await;
            behind = behind.max(settled.map_err(|what| format!("stream {stream}: {what}"))?);
        }
        Ok(behind)
    }
}

fn put(key: &str, value: &str) -> Op {
    Op::Put { key: key.to_owned().into(), value: value.to_owned().into(), lease: 0 }
}

/// Operations without their values.
fn named(ops: &[Op]) -> String {
    let one = |op: &Op| match op {
        Op::Put { key, lease, .. } => format!("+{}/{lease}", String::from_utf8_lossy(key)),
        Op::Delete { key, range_end } => {
            format!("-{}..{}", String::from_utf8_lossy(key), String::from_utf8_lossy(range_end))
        }
    };
    ops.iter().map(one).collect::<Vec<_>>().join(" ")
}
