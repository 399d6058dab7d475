//! One client's Watch stream, as a machine without I/O: what arrived in, what to do out.
//!
//! Owns: the client's watches and their ids, the order of answers, and which upstream stream carries which watch.
//! Must not know: sockets, tokens, members, clocks (`now` is an argument).
//! Invariants, whatever happens upstream:
//! - every watch delivers whole revisions, in order, without gap or double; none before its Created;
//! - one Created per create, in request order; ids that we assign are never used twice, upstream or downstream;
//! - a progress is sent only when everything up to it was sent before, for every watch that it speaks of;
//! - an event's header is never ahead of what was delivered, and no answer lacks a header.
//!
//! A client's half-close is no input: as in etcd, its watches go on.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;

use crate::identity::Revision;

use super::cursor::Cursor;
use super::wire::{self, Create, Header, NO_WATCH, Request, Response};

mod client;
mod place;
mod progress;
mod upstream;

#[cfg(test)]
mod model;
#[cfg(test)]
mod tests;

/// The most upstream streams that one client stream holds. One more is opened for each credential that went stale under
/// live watches; past this, the watches of the oldest move to the newest.
const MAX_STREAMS: usize = 4;

/// How many watches that are resumed are unanswered on one stream. Each makes etcd look through its history: enough to
/// keep the wire busy, few enough that a client's new watch does not wait behind thousands. Small in tests, so that every
/// run of the model waits.
const MAX_RESTORING: usize = if cfg!(test) { 3 } else { 32 };

/// After so long without a lost stream, the next loss counts as the first. Longer than any back-off of a driver.
const SETTLED: Duration = Duration::from_secs(30);

/// How many of the client's requests may wait for their turn before the driver should stop reading more.
const MAX_PENDING: usize = 1024;

/// How many bytes of requests may be taken in before all of them were answered. Far above what keys need.
const MAX_PENDING_BYTES: usize = 4 << 20;

/// An upstream Watch stream; ours, never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StreamId(u64);

/// A watch inside a hub; ours, never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WatchKey(u64);

/// What the version of a member says about its Watch service. The numbers are rows of `watch-and-lease.md` §0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Traits {
    /// V2 and V3: manual progress never runs ahead of events, and is answered to caught-up watches.
    pub progress_trusted: bool,
    /// V6 and V7: "permission denied" means just that.
    pub exact_refusals: bool,
    /// V5 and V4 (one commit): Created of a watch "from now" may be later than its start, and a watch from the future
    /// gets no progress. (Where a watch begins does not depend on it: never before what its Created told.)
    pub late_created: bool,
    /// V8: a watch from a negative revision is refused; elsewhere it costs other watches their events.
    pub refuses_negative_start: bool,
}

impl Traits {
    /// A member of unknown version: nothing is taken on trust.
    pub const UNKNOWN: Self = Self {
        progress_trusted: false,
        exact_refusals: false,
        late_created: true,
        refuses_negative_start: false,
    };
}

/// Times that a driver chooses.
#[derive(Clone, Copy, Debug)]
pub struct Timing {
    /// How often idle watches are refreshed by a progress of our own, if at all: drawn per hub, so that hubs do not march
    /// in step.
    pub idle_progress: Option<Duration>,
    /// How long a client's progress request waits for upstream before what is known already may answer it.
    pub progress_grace: Duration,
}

/// What reached the hub.
#[derive(Clone, Debug)]
pub enum Input {
    /// One WatchRequest message of the client.
    Client(Bytes),
    /// The stream's member is chosen and its request is on the way: messages may be sent. (etcd answers a Watch with
    /// headers only together with its first message: do not wait for them.)
    Opened {
        /// As in [`Output::Open`].
        stream: StreamId,
        /// Of the member chosen.
        traits: Traits,
    },
    /// The answer to [`Output::Check`].
    Checked {
        /// As in the output.
        watch: WatchKey,
        /// As in the output.
        stream: StreamId,
        /// The raw ResponseHeader of the read.
        header: Bytes,
        /// The revision read.
        revision: Revision,
    },
    /// The read of [`Output::Check`] failed.
    CheckFailed {
        /// As in the output.
        watch: WatchKey,
        /// As in the output.
        stream: StreamId,
        /// Why.
        why: Loss,
    },
    /// One WatchResponse message.
    Upstream {
        /// Where it came from.
        stream: StreamId,
        /// The message, without its gRPC frame.
        message: Bytes,
    },
    /// The stream ended, or could not be opened.
    Lost {
        /// Which.
        stream: StreamId,
        /// Why.
        why: Loss,
    },
    /// [`Hub::next_deadline`] has come.
    Tick,
}

/// Why a stream or a read is gone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Loss {
    /// Transport, no leader, shutdown, or any status that another attempt may cure.
    Upstream,
    /// The member refused the credential.
    Credential,
    /// No credential can be had for this client's user; the text is etcd's own, in the form of a cancel_reason.
    Denied(String),
}

/// The credential that a new stream needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Credential {
    /// The one at hand.
    Current,
    /// One that was proven or obtained after this output.
    Fresh,
}

/// What the driver is to do, in order.
#[derive(Clone, Debug)]
pub enum Output {
    /// Open an upstream stream with the client's identity.
    Open {
        /// Its name from now on.
        stream: StreamId,
        /// The credential that it needs.
        credential: Credential,
        /// How many losses came before it without a quiet time: back off by it (none for 0 and 1).
        attempt: u32,
        /// Whether a watch that the client knows waits for it.
        resumes: bool,
    },
    /// End the stream; inputs that name it are ignored from now on.
    Close {
        /// Which.
        stream: StreamId,
    },
    /// Send one WatchRequest message on an open stream.
    Send {
        /// Which.
        stream: StreamId,
        /// The message, without its gRPC frame.
        message: Bytes,
    },
    /// Make a linearizable read of the cluster's revision with the client's identity: has the cluster's history gone back, or is
    /// the member only behind?
    Check {
        /// For the answer.
        watch: WatchKey,
        /// The stream on whose member to read; for the answer too.
        stream: StreamId,
        /// The watch's key, which the client may read if it may watch.
        key: Bytes,
    },
    /// One WatchResponse message for the client.
    Emit(Bytes),
    /// End the client's stream, and every upstream stream. Nothing follows.
    End(End),
}

/// Why a client's stream is ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    /// The client's bytes are no WatchRequest, or could be read in two ways.
    InvalidRequest,
    /// A single revision is larger than what is held back for one watch.
    RevisionTooLarge,
    /// No credential can be had; etcd's text.
    Denied(String),
}

/// The machine. See the module's invariants.
#[derive(Debug)]
pub struct Hub {
    timing: Timing,
    /// Boxed, as the streams are: a map keeps room for eleven of its entries, and most hubs have one.
    watches: BTreeMap<WatchKey, Box<Watch>>,
    streams: BTreeMap<StreamId, Box<Stream>>,
    /// Watches that need a stream, and new ones that are to be sent; key order is request order.
    moving: BTreeSet<WatchKey>,
    /// Ids that the client may name.
    told: HashMap<i64, Told>,
    /// Ids of watches that were denied while they lived, as far as we might give them: the client may choose one again, but
    /// a cancel that is on its way means the old watch.
    denied: BTreeSet<i64>,
    /// The client's requests whose turn has not come, in request order.
    pending: VecDeque<Pending>,
    /// Bytes of the requests since none waited.
    pending_bytes: usize,
    last_key: u64,
    last_stream: u64,
    last_upstream_id: i64,
    next_client_id: i64,
    attempts: u32,
    last_trouble: Option<Instant>,
    known: Known,
    /// Bytes in all cursors.
    held: usize,
    round: Option<progress::Round>,
    refresh_at: Option<Instant>,
    ended: bool,
    out: Vec<Output>,
}

/// What was learnt about the cluster, and what the client was told of it.
#[derive(Debug, Default)]
struct Known {
    cluster: Option<u64>,
    /// The newest upstream header, for answers that are ours.
    header: Option<Header>,
    /// The highest revision that the cluster is known to have reached.
    reached: i64,
    /// The highest header.revision that the client was shown.
    shown: i64,
    /// The highest revision that an event or a progress told the client.
    delivered: i64,
}

#[derive(Debug)]
struct Watch {
    create: Create,
    /// Its id downstream, once its Created was told.
    id: Option<i64>,
    /// Upstream's answer to its create, until its turn comes.
    answer: Option<Answer>,
    cursor: Cursor,
    place: Place,
    want: Want,
    /// The revision after which a watch "from now" begins, once that is fixed: by the first Created that upstream gave it, or
    /// because a write overtook its create.
    begins_after: Option<i64>,
    /// Resume exactly at the next revision, do not reach back.
    exact: bool,
    /// What the client had been shown when it asked.
    shown_before: i64,
    /// The first refusal of a create that is being tried once more.
    refusal: Option<Box<Response>>,
    /// Asked for a revision of another cluster's history, which ended since: compacted at this revision.
    stale: Option<i64>,
    /// Has spoken in the current round of progress.
    confirmed: bool,
}

/// What a watch needs of the stream that it goes to.
#[derive(Clone, Copy, Debug)]
struct Want {
    newer_than: StreamId,
    credential: Credential,
}

const ANY_STREAM: Want = Want { newer_than: StreamId(0), credential: Credential::Current };

#[derive(Debug)]
enum Answer {
    Created(Box<Response>),
    Refused(Box<Response>),
}

#[derive(Debug)]
enum Place {
    /// Needs a stream.
    Nowhere,
    /// Will be sent on this stream.
    Assigned(StreamId),
    /// Sent.
    Upstream(StreamId, Incarnation),
    /// Answered, and not upstream until its turn to be told comes.
    Parked,
    /// This stream's member knew less than it had delivered: is it behind, or has history gone back?
    Doubtful(StreamId),
}

/// A watch as one upstream stream knows it.
#[derive(Debug)]
struct Incarnation {
    id: i64,
    start: i64,
    /// Created's header.revision, once it came.
    created: Option<i64>,
    /// How many progress requests were sent on the stream before this create.
    asked_before: u64,
    /// Whether it told anything of its own.
    heard: bool,
}

#[derive(Debug)]
struct Stream {
    credential: Credential,
    /// Known once open.
    traits: Option<Traits>,
    ids: HashMap<i64, WatchKey>,
    /// Watches that are resumed here and wait for room.
    waiting: BTreeSet<WatchKey>,
    /// Creates without an answer, in the order sent: etcd answers in that order.
    creating: VecDeque<Creating>,
    /// Of those, how many are resumed watches.
    restoring: usize,
    /// Progress requests sent.
    asked: u64,
    /// Of those, how many are certainly answered or dropped.
    answered: u64,
    /// The highest header.revision that came with events or progress.
    highest: i64,
    /// The highest revision of a linearizable read made for this stream.
    verified: i64,
    /// That read, while it is under way.
    checking: Option<Checking>,
}

/// A linearizable read: has the cluster's history gone back, or is the member only behind?
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Checking {
    /// In whose name.
    watch: WatchKey,
    /// What the client had been shown when it began.
    shown: i64,
    /// Another watch came to need it after it had begun.
    joined: bool,
}

#[derive(Clone, Copy, Debug)]
struct Creating {
    id: i64,
    resumed: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Told {
    Watch(WatchKey),
    /// Ended by compaction: the id stays taken until the client cancels it, as in etcd.
    Compacted,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pending {
    Create(WatchKey),
    Cancel(i64),
    Progress,
}

impl Hub {
    /// A hub for a client stream that begins now.
    #[must_use]
    pub fn new(now: Instant, timing: Timing) -> Self {
        Self {
            timing,
            watches: BTreeMap::new(),
            streams: BTreeMap::new(),
            moving: BTreeSet::new(),
            told: HashMap::new(),
            denied: BTreeSet::new(),
            pending: VecDeque::new(),
            pending_bytes: 0,
            last_key: 0,
            last_stream: 0,
            last_upstream_id: 0,
            next_client_id: 0,
            attempts: 0,
            last_trouble: None,
            known: Known::default(),
            held: 0,
            round: None,
            refresh_at: timing.idle_progress.map(|idle| now + idle),
            ended: false,
            out: Vec::new(),
        }
    }

    /// Takes one input and appends what is to be done. Outputs must be carried out in order.
    pub fn handle(&mut self, now: Instant, input: Input, out: &mut Vec<Output>) {
        if self.ended {
            return;
        }
        let result = match input {
            Input::Client(message) => self.client(&message),
            Input::Opened { stream, traits } => {
                self.opened(stream, traits);
                Ok(())
            }
            Input::Checked { watch, stream, header, revision } => {
                self.check_answered(now, watch, stream, &header, revision);
                Ok(())
            }
            Input::CheckFailed { watch, stream, why } => {
                self.check_failed(now, watch, stream, why);
                Ok(())
            }
            Input::Upstream { stream, message } => self.upstream(now, stream, &message),
            Input::Lost { stream, why } => self.lost(now, stream, why),
            Input::Tick => {
                self.tick(now);
                Ok(())
            }
        };
        match result {
            Ok(()) => self.settle(now),
            Err(end) => {
                self.ended = true;
                self.out.push(Output::End(end));
            }
        }
        out.append(&mut self.out);
    }

    /// When to call with [`Input::Tick`] at the latest.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Instant> {
        if self.ended || self.watches.is_empty() {
            return None;
        }
        let round = self.round.as_ref().and_then(progress::Round::deadline);
        round.into_iter().chain(self.refresh_at).min()
    }

    /// Whether the client's next request should be read now. While not, its stream is left unread, as etcd leaves it
    /// while a request is being worked on.
    #[must_use]
    pub fn accepts_client(&self) -> bool {
        self.pending.len() < MAX_PENDING && self.pending_bytes < MAX_PENDING_BYTES
    }

    /// Whether everything that this stream is to carry is upstream, and answered.
    #[must_use]
    pub fn stands(&self, stream: StreamId) -> bool {
        self.streams.get(&stream).is_none_or(|stream| {
            stream.traits.is_some() && stream.waiting.is_empty() && stream.creating.is_empty()
        })
    }

    /// Bytes of revisions that have begun to arrive and have not ended, over all watches.
    #[must_use]
    pub fn held(&self) -> usize {
        self.held
    }

    /// Brings everything as far as it can go.
    fn settle(&mut self, now: Instant) {
        self.answer_in_turn();
        self.find_places(now);
        self.send_creates();
        self.close_unused();
        self.go_round(now);
    }

    fn emit(&mut self, response: &Response) {
        if let Some(header) = &response.header {
            self.known.shown = self.known.shown.max(header.revision);
        }
        self.out.push(Output::Emit(response.write()));
    }

    fn send(&mut self, stream: StreamId, message: Bytes) {
        self.out.push(Output::Send { stream, message });
    }

    /// The newest header known, at no lower a revision than the client was shown.
    fn header_at_least(&self, revision: i64) -> Header {
        self.header_at(revision.max(self.known.shown))
    }

    /// The header of an answer that waited for its turn: as it came, or, where the cluster is another by now, what is
    /// known of that.
    fn of_this_cluster(&self, header: Option<Header>) -> Header {
        let known = || self.known.header.clone().unwrap_or_default();
        header
            .filter(|header| header.cluster == 0 || Some(header.cluster) == self.known.cluster)
            .unwrap_or_else(known)
    }

    fn header_at(&self, revision: i64) -> Header {
        self.known.header.clone().unwrap_or_default().with_revision(revision)
    }
}

impl Place {
    fn stream(&self) -> Option<StreamId> {
        match self {
            Self::Nowhere | Self::Parked => None,
            Self::Assigned(stream) | Self::Upstream(stream, _) | Self::Doubtful(stream) => Some(*stream),
        }
    }
}

impl Watch {
    /// Whether upstream has answered the create of its present incarnation.
    fn is_live(&self) -> bool {
        matches!(&self.place, Place::Upstream(_, incarnation) if incarnation.created.is_some())
    }
}

impl Stream {
    fn new(credential: Credential) -> Self {
        Self {
            credential,
            traits: None,
            ids: HashMap::new(),
            waiting: BTreeSet::new(),
            creating: VecDeque::new(),
            restoring: 0,
            asked: 0,
            answered: 0,
            highest: 0,
            verified: 0,
            checking: None,
        }
    }

    fn trusts_progress(&self) -> bool {
        self.traits.is_some_and(|traits| traits.progress_trusted)
    }
}
