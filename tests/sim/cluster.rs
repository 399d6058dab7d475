//! The cluster behind the addresses: members that lag, their Watch streams, tokens and rights.
//!
//! Owns: what a member answers, and when; the model says what. Must not know: clients, Keyward's insides, which fault
//! comes next. Invariants: a stream knows the token that it was opened with, for ever; what was popped from the model
//! goes out in order or not at all.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::rc::Rc;

use bytes::Bytes;
use h2::Reason;
use keyward::pb::etcdserverpb::watch_request::RequestUnion;
use keyward::pb::etcdserverpb::{
    AuthenticateResponse, RangeRequest, RangeResponse, TxnResponse, WatchCreateRequest, WatchRequest,
    WatchResponse,
};
use keyward::refusal::{Code, Status};
use keyward::rpc::frame::encode;
use keyward::tasks::TaskHandle;
use prost::Message as _;
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::checker::{Asked, DUPLICATE, EMPTY_RANGE, Refused};
use crate::counts::{Counts, What};
use crate::dice::Dice;
use crate::model::flavor::Flavor;
use crate::model::interval::Interval;
use crate::model::member::Member;
use crate::model::send::Selected;
use crate::model::stream::{Limits, Refusal, WatchStream};
use crate::rig::Address;
use crate::truth::Truth;
use crate::wire::{Request, Responder};

pub(crate) type Shared = Rc<RefCell<Cluster>>;

/// Responses that lie on a stream unsent before its member's sendLoop waits.
const OUT: usize = 4;
/// The kinds of moves of a stream.
pub(crate) const MOVES: usize = 5;
/// Where the numbers of creates begin among their filters: etcd passes over values that it does not know.
pub(crate) const SERIALS: i32 = 1000;

/// A member, its version, and whether it is well.
pub(crate) struct Node {
    pub(crate) model: Member,
    pub(crate) flavor: Flavor,
    pub(crate) address: Address,
    pub(crate) up: bool,
    pub(crate) leaderless: bool,
    /// Tokens below it are unknown there.
    pub(crate) valid_from: u64,
}

/// One Watch stream on a member.
pub(crate) struct Carried {
    pub(crate) node: usize,
    pub(crate) connection: u64,
    model: WatchStream,
    token: Option<u64>,
    respond: Responder,
    out: VecDeque<Bytes>,
    /// The creates whose answers are on the way, in order.
    creating: VecDeque<u64>,
    /// Whose watch has which id.
    ids: BTreeMap<i64, u64>,
    /// Cut after so many more responses.
    pub(crate) cut: Option<(usize, Cut)>,
    /// The last thing that was sent was a fragment with more to come.
    mid_revision: bool,
    /// Creates whose acceptance went out.
    let_in: Vec<u64>,
    /// When it was opened, as proofs are counted.
    opened: u64,
}

/// How a stream ends before its time.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Cut {
    Reset(Reason),
    Status(Code, &'static str),
    NoStatus,
    /// With the first half of its next message.
    HalfMessage,
}

/// A connection to a member.
pub(crate) struct Connected {
    pub(crate) node: usize,
    pub(crate) task: Option<TaskHandle>,
    pub(crate) go_away: Rc<Notify>,
    pub(crate) budget: Rc<Cell<Option<usize>>>,
}

/// A unary call that waits for its answer.
pub(crate) struct Call {
    pub(crate) node: usize,
    pub(crate) connection: u64,
    pub(crate) request: Request,
    pub(crate) message: Bytes,
    pub(crate) respond: Responder,
}

/// Everything upstream.
pub(crate) struct Cluster {
    pub(crate) truth: Truth,
    pub(crate) nodes: Vec<Node>,
    pub(crate) streams: BTreeMap<u64, Carried>,
    pub(crate) connections: BTreeMap<u64, Connected>,
    pub(crate) calls: Vec<Call>,
    pub(crate) limits: Limits,
    pub(crate) auth: bool,
    pub(crate) tokens: u64,
    pub(crate) denied: BTreeSet<u8>,
    pub(crate) term: u64,
    pub(crate) asked: BTreeMap<u64, Asked>,
    pub(crate) refusals: BTreeMap<u64, Refused>,
    /// Events that a member sent without the previous value that was asked for: create and revision. (It sends those
    /// so that come between the two halves of a create.)
    pub(crate) without_previous: BTreeSet<(u64, i64)>,
    let_in: BTreeSet<u64>,
    /// Whether watches of one form may share an upstream watch. Who of them was refused, nobody can tell then.
    pub(crate) shares: bool,
    next_number: u64,
    pub(crate) counts: Counts,
    pub(crate) violation: Option<String>,
    pub(crate) trace: Vec<String>,
    /// Counts whatever happens but questions for progress and their answers, which may go on for ever.
    pub(crate) activity: u64,
    /// When a token was last seen to be good on a node, counted in refusals and proofs.
    proven: BTreeMap<(usize, u64), u64>,
    proofs: u64,
    began: Instant,
}

/// The answer to a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reply {
    /// As a member that is well answers.
    Honest,
    /// A status that another attempt may cure.
    Unavailable,
    /// Nothing: the stream is reset.
    Reset,
}

impl Cluster {
    pub(crate) fn new(truth: Truth, nodes: Vec<Node>, limits: Limits, auth: bool) -> Self {
        Self {
            truth,
            nodes,
            streams: BTreeMap::new(),
            connections: BTreeMap::new(),
            calls: Vec::new(),
            limits,
            auth,
            tokens: 0,
            denied: BTreeSet::new(),
            term: 2,
            asked: BTreeMap::new(),
            refusals: BTreeMap::new(),
            without_previous: BTreeSet::new(),
            let_in: BTreeSet::new(),
            shares: false,
            next_number: 0,
            counts: Counts::default(),
            violation: None,
            trace: Vec::new(),
            activity: 0,
            proven: BTreeMap::new(),
            proofs: 0,
            began: Instant::now(),
        }
    }

    pub(crate) fn number(&mut self) -> u64 {
        self.next_number += 1;
        self.next_number
    }

    pub(crate) fn note(&mut self, line: impl FnOnce() -> String) {
        self.line(line());
    }

    fn line(&mut self, line: String) {
        self.trace.push(format!("{:>6} {line}", self.began.elapsed().as_millis()));
    }

    fn violated(&mut self, why: String) {
        self.violation.get_or_insert(why);
    }

    // ---- what Keyward does

    /// A Watch stream reached a member.
    pub(crate) fn opened(
        &mut self,
        node: usize,
        connection: u64,
        request: &Request,
        mut respond: Responder,
    ) -> Option<u64> {
        if request.header("hasleader") != Some("true") {
            self.violated("a watch stream went up without hasleader".to_owned());
        }
        if self.nodes[node].leaderless {
            respond.refuse(Code::Unavailable, "etcdserver: no leader");
            return None;
        }
        let token = token_of(request);
        if self.auth != token.is_some() {
            self.violated(format!("a stream with token {token:?}, and auth is {}", self.auth));
        }
        let number = self.number();
        self.activity += 1;
        self.note(|| format!("stream {number} opened on {} with token {token:?}", node + 1));
        let carried = Carried {
            node,
            connection,
            model: WatchStream::new(self.nodes[node].flavor, self.limits),
            token,
            respond,
            out: VecDeque::new(),
            creating: VecDeque::new(),
            ids: BTreeMap::new(),
            cut: None,
            mid_revision: false,
            let_in: Vec::new(),
            opened: self.proofs,
        };
        self.streams.insert(number, carried);
        Some(number)
    }

    /// Keyward said something on a stream.
    pub(crate) fn requested(&mut self, number: u64, message: Bytes) {
        let Ok(request) = WatchRequest::decode(message) else {
            return self.violated("no WatchRequest went upstream".to_owned());
        };
        self.line(format!("stream {number} < {:?}", request.request_union));
        let Some(carried) = self.streams.get_mut(&number) else { return };
        self.activity += u64::from(!matches!(request.request_union, Some(RequestUnion::ProgressRequest(_))));
        if let Some(RequestUnion::CreateRequest(create)) = &request.request_union {
            let serial = serial_of(create);
            carried.creating.push_back(serial);
            let before = carried.ids.insert(create.watch_id, serial);
            if before.is_some() || create.watch_id < 1 {
                self.violated(format!("upstream id {} used again on stream {number}", create.watch_id));
            } else if create.start_revision < 0 && !self.nodes[carried.node].flavor.refuses_negative_start {
                self.violated(format!("a start that costs other watches their events: {create:?}"));
            } else if let Err(why) = self.check_create(serial, create) {
                self.violated(why);
            }
        }
        if let Some(carried) = self.streams.get_mut(&number) {
            carried.model.request(request);
        }
    }

    /// What the client asked goes up as it was, but for what is ours.
    fn check_create(&self, serial: u64, create: &WatchCreateRequest) -> Result<(), String> {
        let asked = self.asked.get(&serial).ok_or_else(|| format!("nobody asked for {create:?}"))?;
        if !create.fragment || !create.progress_notify {
            return Err(format!("fragments and progress are always asked upstream: {create:?}"));
        }
        let filter = |value: i32, set: bool| create.filters.contains(&value) == set;
        let kept = create.prev_kv == asked.prev_kv
            && filter(0, asked.wanted.no_put)
            && filter(1, asked.wanted.no_delete);
        if kept { Ok(()) } else { Err(format!("{create:?} is not what was asked: {asked:?}")) }
    }

    /// The reader of a stream saw its end.
    pub(crate) fn gone(&mut self, number: u64) {
        if self.streams.remove(&number).is_some() {
            self.note(|| format!("stream {number} left"));
        }
    }

    pub(crate) fn connection_ended(&mut self, connection: u64) {
        if self.connections.remove(&connection).is_some() {
            self.note(|| format!("connection {connection} ended"));
        }
        self.forget_connection(connection);
    }

    fn forget_connection(&mut self, connection: u64) {
        let gone: Vec<u64> =
            self.streams.iter().filter(|(_, c)| c.connection == connection).map(|(n, _)| *n).collect();
        for number in gone {
            self.lost(number);
        }
        self.calls.retain(|call| call.connection != connection);
    }

    /// A stream ends in the middle of things.
    fn lost(&mut self, number: u64) {
        if let Some(carried) = self.streams.remove(&number)
            && carried.mid_revision
        {
            self.counts.one(What::Held);
        }
    }

    // ---- moves of the members

    /// A member applies one entry and tells its streams.
    pub(crate) fn apply(&mut self, node: usize) -> bool {
        let store = &self.truth.now().store;
        let streams = self.streams.values_mut().filter(|carried| carried.node == node);
        let member = &mut self.nodes[node].model;
        let applied = member.apply(store, streams.map(|carried| &mut carried.model)).is_some();
        self.activity += u64::from(applied);
        applied
    }

    /// One move of a stream, by its number; whether there was one.
    pub(crate) fn move_one(&mut self, number: u64, which: usize) -> bool {
        let Some(carried) = self.streams.get_mut(&number) else { return false };
        let node = &self.nodes[carried.node];
        let store = &self.truth.now().store;
        let member = &node.model;
        let token_good = !self.auth || carried.token.is_some_and(|token| token >= node.valid_from);
        let denied = &self.denied;
        let auth = self.auth;
        let permit = |range: &Interval| {
            if !token_good {
                Err(Refusal::InvalidToken)
            } else if auth && denied.iter().any(|key| range.contains(&[*key])) {
                Err(Refusal::Denied)
            } else {
                Ok(())
            }
        };
        let model = &mut carried.model;
        let room = model.unread() + carried.out.len() < OUT;
        match which {
            0 => model.receive(store, member, &permit),
            1 => model.behind().next().is_some() && model.sync(store, member),
            2 => model.flush(member),
            3 => room && model.send(store, member, Selected::Control),
            _ => room && model.send(store, member, Selected::Channel),
        }
    }

    /// What wants to move still, or lies unsent.
    pub(crate) fn busy(&self) -> Option<String> {
        let store = &self.truth.now().store;
        let behind = self.nodes.iter().find(|node| !node.model.is_current(store));
        let moving = |carried: &Carried| !carried.model.is_at_rest() || carried.model.unread() > 0;
        let stream = self.streams.iter().find(|(_, carried)| moving(carried) || !carried.out.is_empty());
        let call = self.calls.first();
        behind
            .map(|node| format!("member {} is behind", node.model.id))
            .or_else(|| {
                stream.map(|(number, carried)| {
                    format!("stream {number}: {:?}, unsent {:?}", carried.model, carried.out)
                })
            })
            .or_else(|| call.map(|call| call.request.path.clone()))
    }

    pub(crate) fn timed_progress(&mut self, number: u64) {
        let Some(carried) = self.streams.get_mut(&number) else { return };
        carried.model.timed_progress(&self.nodes[carried.node].model);
    }

    /// Sends what the model has said, as far as the peer takes it. Whether anything went out.
    pub(crate) fn send_out(&mut self, number: u64) -> bool {
        let mut moved = false;
        loop {
            let Some(carried) = self.streams.get_mut(&number) else { return moved };
            if carried.respond.was_reset() {
                self.line(format!("stream {number} was reset"));
                self.streams.remove(&number);
                return true;
            }
            while let Some(front) = carried.out.front_mut() {
                if !carried.respond.say(front) {
                    return moved;
                }
                moved = true;
                if !front.is_empty() {
                    self.activity += 1;
                    return moved;
                }
                carried.out.pop_front();
            }
            if let Some((0, cut)) = carried.cut {
                self.cut(number, cut);
                return true;
            }
            let Some(response) = carried.model.pop() else { return moved };
            moved = true;
            if let Some((left, _)) = &mut carried.cut {
                *left -= 1;
            }
            carried.mid_revision = response.fragment;
            carried.out.push_back(encode(&response.encode_to_vec()));
            self.said(number, &response);
        }
    }

    fn said(&mut self, number: u64, response: &WatchResponse) {
        self.line(format!("stream {number} > {}", words(response)));
        let progress = response.events.is_empty() && !response.created && !response.canceled;
        self.activity += u64::from(!progress);
        self.counts.more(What::Fragments, u64::from(response.fragment));
        let Some(carried) = self.streams.get_mut(&number) else { return };
        if let Some(serial) = carried.ids.get(&response.watch_id) {
            let bare = response.events.iter().filter(|event| event.prev_kv.is_none());
            let revisions = bare.filter_map(|event| event.kv.as_ref()).map(|kv| (*serial, kv.mod_revision));
            self.without_previous.extend(revisions);
        }
        if !response.created {
            return;
        }
        let Some(serial) = carried.creating.pop_front() else { return };
        if !response.canceled {
            carried.let_in.push(serial);
            if !self.let_in.insert(serial) {
                self.counts.one(What::Resumes);
            }
        } else if response.cancel_reason != DUPLICATE && response.cancel_reason != EMPTY_RANGE {
            let exact = self.nodes[carried.node].flavor.exact_refusals;
            self.counts.one(if exact { What::RefusedExact } else { What::RefusedOld });
            let token = carried.token.map(|token| (carried.node, token));
            let proof = token.and_then(|token| self.proven.get(&token)).copied().unwrap_or(0);
            let opened = carried.opened;
            let unseen = || Refused { first: opened, ..Refused::default() };
            let refused = self.refusals.entry(serial).or_insert_with(unseen);
            refused.times += 1;
            // Where watches share creates, those of another stream may be refused in between.
            refused.is_proven |= refused.times > 1 && proof > refused.first;
            refused.first = if self.shares { opened.min(refused.first) } else { refused.first };
            // Whether Keyward ever heard that it was let in before, nobody knows.
            for carried in self.streams.values_mut() {
                carried.let_in.retain(|let_in| *let_in != serial);
            }
            refused.proof = proof;
            refused.reason.clone_from(&response.cancel_reason);
            refused.reasons.insert(response.cancel_reason.clone());
            refused.exact = exact || (self.shares && refused.exact);
        }
    }

    /// Everything that was sent has been read by now, and the clients have all that came of it.
    pub(crate) fn settled(&mut self) {
        for carried in self.streams.values_mut().filter(|carried| carried.out.is_empty()) {
            for serial in carried.let_in.drain(..) {
                if !self.shares && self.refusals.remove(&serial).is_some() {
                    self.counts.one(What::Healed);
                }
            }
        }
    }

    // ---- faults

    /// Ends a stream.
    pub(crate) fn cut(&mut self, number: u64, cut: Cut) {
        let Some(carried) = self.streams.get_mut(&number) else { return };
        match cut {
            Cut::Reset(reason) => carried.respond.reset(reason),
            Cut::Status(code, text) => carried.respond.end(code, text),
            Cut::NoStatus => carried.respond.end_without_status(),
            Cut::HalfMessage => {
                let half = encode(b"the beginning of something long");
                carried.respond.say(&mut half.slice(..half.len() / 2));
                carried.respond.end_without_status();
            }
        }
        self.line(format!("stream {number} cut: {cut:?}"));
        self.counts.one(What::StreamCuts);
        self.lost(number);
    }

    /// Ends a connection, as a kill would.
    pub(crate) fn cut_connection(&mut self, connection: u64) {
        if let Some(mut connected) = self.connections.remove(&connection) {
            self.counts.one(What::ConnectionCuts);
            self.line(format!("connection {connection} to {} cut", connected.node + 1));
            drop(connected.task.take());
            self.forget_connection(connection);
        }
    }

    pub(crate) fn cut_connections_of(&mut self, node: usize) {
        let all = self.connections.iter().filter(|(_, connected)| connected.node == node);
        for connection in all.map(|(connection, _)| *connection).collect::<Vec<_>>() {
            self.cut_connection(connection);
        }
    }

    /// The processes are others now: another cluster's, or this one's from a backup.
    pub(crate) fn restart_all(&mut self) {
        for node in 0..self.nodes.len() {
            self.cut_connections_of(node);
            let id = self.nodes[node].model.id;
            self.nodes[node].model = Member::new(id, self.term);
        }
    }

    // ---- calls

    /// Answers a call that waits.
    pub(crate) fn answer(&mut self, at: usize, reply: Reply) {
        let Call { node, request, message, mut respond, .. } = self.calls.remove(at);
        let path = request.path.clone();
        if is_touch(&path, &message) {
            return self.touched(node, &request, respond);
        }
        self.activity += 1;
        self.line(format!("{path} on {} answered: {reply:?}", node + 1));
        match reply {
            Reply::Reset => return respond.reset(Reason::INTERNAL_ERROR),
            Reply::Unavailable => return respond.refuse(Code::Unavailable, "etcdserver: leader changed"),
            Reply::Honest => {}
        }
        if path.ends_with("/Authenticate") {
            if self.nodes[node].leaderless {
                return respond.refuse(Code::Unavailable, "etcdserver: request timed out");
            }
            self.tokens += 1;
            self.prove(node, Some(self.tokens));
            let token = format!("sim.{}", self.tokens);
            return respond.reply(&AuthenticateResponse { header: None, token }.encode_to_vec());
        }
        let token = token_of(&request);
        if self.auth && token.is_none_or(|token| token < self.nodes[node].valid_from) {
            return respond.refuse_somehow(Code::Unauthenticated, "etcdserver: invalid auth token");
        }
        self.prove(node, token);
        if path.ends_with("/Txn") {
            let header = self.header(node);
            return respond
                .reply(&TxnResponse { header: Some(header), ..TxnResponse::default() }.encode_to_vec());
        }
        if self.nodes[node].leaderless {
            return respond.refuse(Code::Unavailable, "etcdserver: request timed out");
        }
        // Linearizable: the member has everything that was acknowledged.
        while self.apply(node) {}
        let header = self.header(node);
        respond.reply(&RangeResponse { header: Some(header), ..RangeResponse::default() }.encode_to_vec());
    }

    fn prove(&mut self, node: usize, token: Option<u64>) {
        self.proofs += 1;
        if let Some(token) = token {
            self.proven.insert((node, token), self.proofs);
        }
    }

    /// A token is being kept alive: no part of a run's story.
    fn touched(&self, node: usize, request: &Request, mut respond: Responder) {
        let token = token_of(request);
        if token.is_none_or(|token| token < self.nodes[node].valid_from) {
            return respond.refuse(Code::Unauthenticated, "etcdserver: invalid auth token");
        }
        let header = Some(self.header(node));
        respond.reply(&RangeResponse { header, ..RangeResponse::default() }.encode_to_vec());
    }

    fn header(&self, node: usize) -> keyward::pb::etcdserverpb::ResponseHeader {
        let member = &self.nodes[node].model;
        member.header(&self.truth.now().store, member.applied())
    }

    /// Everything moves, without choice, until nothing does.
    pub(crate) fn move_all(&mut self, dice: &mut Dice) {
        for node in 0..self.nodes.len() {
            while self.apply(node) {}
        }
        while !self.calls.is_empty() {
            self.answer(0, Reply::Honest);
        }
        for number in self.streams.keys().copied().collect::<Vec<_>>() {
            let mut again = true;
            while again {
                again = false;
                let first = dice.below(MOVES);
                for which in 0..MOVES {
                    again |= self.move_one(number, (first + which) % MOVES);
                }
                again |= self.send_out(number);
            }
        }
    }
}

fn token_of(request: &Request) -> Option<u64> {
    request.header("token").and_then(|token| token.strip_prefix("sim.")?.parse().ok())
}

fn is_touch(path: &str, message: &Bytes) -> bool {
    path.ends_with("/Range") && RangeRequest::decode(message.clone()).is_ok_and(|range| range.serializable)
}

fn serial_of(create: &WatchCreateRequest) -> u64 {
    let serial = create.filters.iter().find(|filter| **filter >= SERIALS);
    serial.map_or(0, |serial| u64::try_from(serial - SERIALS).unwrap_or(0))
}

/// A response on one line.
pub(crate) fn words(response: &WatchResponse) -> String {
    let revision = response.header.as_ref().map_or(-9, |header| header.revision);
    let mut words = format!("id {} at {revision}", response.watch_id);
    for (said, word) in
        [(response.created, " created"), (response.canceled, " canceled"), (response.fragment, " fragment")]
    {
        if said {
            words.push_str(word);
        }
    }
    if response.compact_revision != 0 {
        words.push_str(&format!(" compacted {}", response.compact_revision));
    }
    if !response.cancel_reason.is_empty() {
        words.push_str(&format!(" {:?}", response.cancel_reason));
    }
    for event in &response.events {
        let kv = event.kv.as_ref();
        let key = kv.map_or_else(String::new, |kv| String::from_utf8_lossy(&kv.key).into_owned());
        words.push_str(&format!(
            " {}{key}@{}",
            if event.r#type == 1 { "-" } else { "+" },
            kv.map_or(0, |kv| kv.mod_revision)
        ));
    }
    words
}

/// What a status looks like on the way out.
pub(crate) fn status(code: Code, text: &'static str) -> Status {
    Status { code, message: text.into() }
}
