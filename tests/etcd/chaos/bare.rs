//! Watches on bare gRPC streams: what no library offers, or not all. Ids that the client chooses, progress on request, half-close,
//! pipelined creates, watches that come and go on a living stream.
//!
//! Owns: the streams and what every client may hold etcd to: answers in the order of the creates, pieces of a response in one row,
//! nothing after a cancel was answered. Must not know what events are right.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use futures_util::stream::unfold;
use keyward::pb::etcdserverpb::watch_request::RequestUnion;
use keyward::pb::etcdserverpb::{WatchCancelRequest, WatchProgressRequest, WatchRequest, WatchResponse};
use tokio::sync::mpsc;
use tokio::time::{interval, sleep};
use tonic::{Status, Streaming};

use super::door::Door;
use super::families::{BARE, User};
use super::oracle::Oracle;
use super::plan::Plan;
use super::program::note;
use super::record::{Event, Line, Record, Seen, Watch};
use crate::steady::unix_ms;

/// The id of a progress that was asked for.
const EVERY_WATCH: i64 = -1;
/// Chosen ids begin here.
const CHOSEN: i64 = 1_000;
/// Requests that may wait to be sent; a stream has fewer watches than that.
const WAITING: usize = 64;
/// Between two things that a stream does by itself.
const TURN: Duration = Duration::from_millis(500);
/// Before a refused watch is asked for again.
const AGAIN: Duration = Duration::from_millis(200);
/// How many watches that come and go are open at a time.
const GUESTS: usize = 6;

/// How a stream behaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Manner {
    /// Its ids are chosen by itself, and it asks for progress all the time.
    Asking,
    /// Its request ends when all watches are asked for.
    HalfClosed,
    /// Its watches come and go.
    Guests,
}

/// A stream and its watches.
pub(crate) struct Group {
    pub(crate) user: User,
    pub(crate) manner: Manner,
    held: Mutex<Held>,
}

/// What a stream has seen.
#[derive(Default)]
pub(crate) struct Held {
    pub(crate) watches: Vec<(Watch, Record)>,
    /// What no client may be shown.
    pub(crate) strange: Vec<String>,
    /// When a header was higher than all before, and how high.
    pub(crate) highest: Vec<(i64, i64)>,
}

/// What watches that come and go are made from.
pub(crate) struct Source {
    pub(crate) plan: Plan,
    pub(crate) oracle: Arc<Oracle>,
    /// The newest compaction that was asked for.
    pub(crate) compacted: Arc<AtomicI64>,
}

/// One stream while it lives.
struct Talk<'a> {
    group: &'a Group,
    requests: Option<mpsc::Sender<WatchRequest>>,
    /// Asked for, and with which id, where that was chosen.
    creating: VecDeque<(usize, i64)>,
    live: HashMap<i64, usize>,
    /// Live ones in the order in which they came.
    order: VecDeque<i64>,
    /// Cancelled, and not yet answered.
    closing: HashSet<i64>,
    closed: HashSet<i64>,
    partial: Option<(i64, Vec<Event>)>,
    next_id: i64,
    /// A watch must be asked for again and the request has ended.
    over: bool,
}

impl Group {
    pub(crate) fn new(user: User, manner: Manner, watches: Vec<Watch>) -> Group {
        let opened = |watch: Watch| {
            let line = Line { at: unix_ms(), seen: Seen::Opened { start: watch.start } };
            (watch, vec![line])
        };
        let watches = watches.into_iter().map(opened).collect();
        Group { user, manner, held: Mutex::new(Held { watches, ..Held::default() }) }
    }

    pub(crate) fn held(&self) -> MutexGuard<'_, Held> {
        self.held.lock().expect("no holder panics")
    }

    /// Whether all watches stand.
    pub(crate) fn ready(&self) -> bool {
        let stands = |(_, record): &(Watch, Record)| {
            record.iter().any(|line| matches!(line.seen, Seen::Created { .. }))
        };
        self.held().watches.iter().all(stands)
    }

    /// Keeps its watches open on one stream after the other, until it is told to stop.
    pub(crate) async fn run(
        self: Arc<Group>,
        door: Door,
        mut source: Option<Source>,
        watching: Arc<AtomicBool>,
    ) {
        while watching.load(Ordering::Relaxed) {
            self.stream(&door, source.as_mut(), &watching).await;
            sleep(AGAIN).await;
        }
    }

    /// One stream, to its end.
    async fn stream(&self, door: &Door, source: Option<&mut Source>, watching: &AtomicBool) {
        let (requests, waiting) = mpsc::channel(WAITING);
        let mut talk = Talk {
            group: self,
            requests: Some(requests),
            creating: VecDeque::new(),
            live: HashMap::new(),
            order: VecDeque::new(),
            closing: HashSet::new(),
            closed: HashSet::new(),
            partial: None,
            next_id: CHOSEN,
            over: false,
        };
        if self.manner != Manner::Guests {
            let count = self.held().watches.len();
            for watch in 0..count {
                talk.create(watch).await;
            }
        }
        if self.manner == Manner::HalfClosed {
            talk.requests = None;
        }
        let Err(status) = talk.converse(door, waiting, source, watching).await else { return };
        let (code, message) = (format!("{:?}", status.code()), status.message().to_owned());
        let asked = talk.creating.iter().map(|(watch, _)| watch);
        for watch in talk.live.values().chain(asked) {
            talk.note(*watch, Seen::Ended { code: code.clone(), message: message.clone() });
        }
    }
}

/// The next answer. Cancel-safe.
async fn next(answers: &mut Option<Streaming<WatchResponse>>) -> Result<Option<WatchResponse>, Status> {
    match answers {
        Some(answers) => answers.message().await,
        None => std::future::pending().await,
    }
}

impl Talk<'_> {
    /// Ok where it is for us to open another stream, or none.
    async fn converse(
        &mut self,
        door: &Door,
        waiting: mpsc::Receiver<WatchRequest>,
        mut source: Option<&mut Source>,
        watching: &AtomicBool,
    ) -> Result<(), Status> {
        let sent =
            unfold(waiting, |mut waiting| async { waiting.recv().await.map(|request| (request, waiting)) });
        let mut watch = door.watch();
        let opening = watch.watch(sent);
        tokio::pin!(opening);
        let mut answers: Option<Streaming<WatchResponse>> = None;
        let mut turns = interval(TURN);
        while watching.load(Ordering::Relaxed) && !self.over {
            tokio::select! {
                opened = &mut opening, if answers.is_none() => answers = Some(opened?.into_inner()),
                answer = next(&mut answers), if answers.is_some() => match answer? {
                    Some(answer) => self.take(answer).await,
                    None => return Err(Status::ok("the stream ended")),
                },
                _ = turns.tick() => self.turn(source.as_deref_mut()).await,
            }
        }
        Ok(())
    }

    /// Asks for a watch from where its record says.
    async fn create(&mut self, watch: usize) {
        let request = {
            let held = self.group.held();
            let (watch, record) = &held.watches[watch];
            let start = record.iter().rev().find_map(|line| match line.seen {
                Seen::Opened { start } => Some(start),
                _ => None,
            });
            let id = if self.group.manner == Manner::Asking { self.next_id } else { 0 };
            watch.request(id, start.unwrap_or(watch.start))
        };
        self.next_id += 1;
        self.creating.push_back((watch, request.watch_id));
        self.send(RequestUnion::CreateRequest(request)).await;
    }

    async fn send(&mut self, request: RequestUnion) {
        match &self.requests {
            // A stream that takes nothing more says why by its end.
            Some(requests) => drop(requests.send(WatchRequest { request_union: Some(request) }).await),
            None => self.over = true,
        }
    }

    /// What a stream does by itself.
    async fn turn(&mut self, source: Option<&mut Source>) {
        match (self.group.manner, source) {
            (Manner::Asking, _) => {
                self.send(RequestUnion::ProgressRequest(WatchProgressRequest {})).await;
            }
            (Manner::Guests, Some(source)) => {
                if self.order.len() >= GUESTS
                    && let Some(id) = self.order.pop_front()
                {
                    self.closing.insert(id);
                    self.send(RequestUnion::CancelRequest(WatchCancelRequest { watch_id: id })).await;
                }
                if self.creating.is_empty() {
                    let watch = source.watch(self.group.user);
                    let at = {
                        let mut held = self.group.held();
                        let opened = Line { at: unix_ms(), seen: Seen::Opened { start: watch.start } };
                        held.watches.push((watch, vec![opened]));
                        held.watches.len() - 1
                    };
                    self.create(at).await;
                }
            }
            _ => {}
        }
    }

    fn strange(&self, why: &str, answer: &WatchResponse) {
        let shown: String = format!("{answer:?}").chars().take(300).collect();
        self.group.held().strange.push(format!("{:?}: {why}: {shown}", self.group.manner));
    }

    fn note(&self, watch: usize, seen: Seen) {
        note(&mut self.group.held().watches[watch].1, unix_ms(), seen);
    }

    async fn take(&mut self, answer: WatchResponse) {
        let id = answer.watch_id;
        if self.partial.as_ref().is_some_and(|(of, _)| *of != id || answer.events.is_empty()) {
            self.strange("between the pieces of another response", &answer);
        }
        match &answer.header {
            None => self.strange("without a header", &answer),
            Some(header) => {
                let highest = &mut self.group.held().highest;
                if highest.last().is_none_or(|(_, revision)| *revision < header.revision) {
                    highest.push((unix_ms(), header.revision));
                }
            }
        }
        if answer.created {
            return self.created(&answer).await;
        }
        let revision = answer.header.as_ref().map_or(0, |header| header.revision);
        if id == EVERY_WATCH && !answer.canceled && answer.events.is_empty() {
            if self.group.manner != Manner::Asking {
                self.strange("progress that nobody asked for", &answer);
            }
            let live: Vec<usize> = self.live.values().copied().collect();
            return live.into_iter().for_each(|watch| self.note(watch, Seen::Progress { revision }));
        }
        if answer.canceled {
            return self.canceled(&answer).await;
        }
        if self.closed.contains(&id) {
            return self.strange("after its cancel was answered", &answer);
        }
        let Some(watch) = self.live.get(&id).copied() else {
            return self.strange("of a watch that does not stand", &answer);
        };
        if answer.events.is_empty() {
            if !self.group.held().watches[watch].0.progress_notify {
                self.strange("progress that this watch did not ask for", &answer);
            }
            return self.note(watch, Seen::Progress { revision });
        }
        if answer.fragment && !self.group.held().watches[watch].0.fragment {
            self.strange("a piece for one that takes no pieces", &answer);
        }
        let (_, mut events) = self.partial.take().unwrap_or_default();
        events.extend(answer.events.iter().map(Event::of));
        if answer.fragment {
            self.partial = Some((id, events));
        } else {
            self.note(watch, Seen::Events { header: Some(revision), events });
        }
    }

    async fn created(&mut self, answer: &WatchResponse) {
        let Some((watch, asked)) = self.creating.pop_front() else {
            return self.strange("nobody asked for it", answer);
        };
        if answer.canceled {
            let (code, message) = (String::new(), answer.cancel_reason.clone());
            self.note(watch, Seen::Ended { code, message });
            return self.again(watch).await;
        }
        let id = answer.watch_id;
        if (asked != 0 && id != asked) || self.closed.contains(&id) || self.live.insert(id, watch).is_some() {
            self.strange("an id that was not asked for, or used before", answer);
        }
        self.order.push_back(id);
        let revision = answer.header.as_ref().map(|header| header.revision);
        self.note(watch, Seen::Created { revision });
    }

    async fn canceled(&mut self, answer: &WatchResponse) {
        let id = answer.watch_id;
        let cancelled = self.closing.remove(&id);
        let Some(watch) = self.live.remove(&id) else {
            if !cancelled {
                self.strange("the end of a watch that does not stand", answer);
            }
            return;
        };
        self.closed.insert(id);
        self.order.retain(|other| *other != id);
        if answer.compact_revision != 0 {
            self.note(watch, Seen::Compacted { revision: Some(answer.compact_revision) });
            // As etcd has it, its id stays taken until it is cancelled, which is answered.
            self.closing.insert(id);
            if !cancelled {
                self.send(RequestUnion::CancelRequest(WatchCancelRequest { watch_id: id })).await;
            }
            self.again(watch).await;
        } else if !cancelled {
            let (code, message) = (String::new(), answer.cancel_reason.clone());
            self.note(watch, Seen::Ended { code, message });
            self.again(watch).await;
        }
    }

    /// Opens a watch again; where the request has ended, the others with it on another stream.
    async fn again(&mut self, watch: usize) {
        if self.group.manner == Manner::Guests {
            return;
        }
        sleep(AGAIN).await;
        if self.requests.is_some() {
            return self.create(watch).await;
        }
        self.over = true;
        let mut held = self.group.held();
        for other in self.live.values() {
            let record = &mut held.watches[*other].1;
            let start = next_revision(record);
            record.push(Line { at: unix_ms(), seen: Seen::Opened { start } });
        }
    }
}

impl Source {
    fn watch(&mut self, user: User) -> Watch {
        self.plan.now = self.oracle.newest();
        let compacted = self.compacted.load(Ordering::Relaxed);
        self.plan.guest(user, BARE, compacted)
    }
}

/// From where a watch that is let go must begin again.
fn next_revision(record: &Record) -> i64 {
    let mut next = 0;
    for line in record {
        match &line.seen {
            Seen::Opened { start } => next = *start,
            Seen::Created { revision: Some(revision) } if next == 0 => next = revision + 1,
            Seen::Events { events, .. } => {
                next = next.max(events.last().map_or(0, |event| event.revision) + 1);
            }
            Seen::Progress { revision } => next = next.max(revision + 1),
            _ => {}
        }
    }
    next
}
