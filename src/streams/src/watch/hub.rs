//! The state machine of a client's Watch stream, without I/O: inputs and the time in, outputs out.
//!
//! Owns: the client's watches and watch ids, the order of answers, and the assignment of watches to upstream
//! streams.
//! Must not know: sockets, tokens, members, clocks (`now` is an argument).
//! Invariants, whatever happens upstream:
//! - every watch delivers whole revisions, in order, without gap or duplicate, and no event before the
//!   Created;
//! - each create gets exactly one Created, in request order; ids assigned by the hub are never reused,
//!   neither upstream nor downstream;
//! - a progress response is sent only after all events up to its revision were sent, for every watch covered
//!   by the response;
//! - the header of an event response is never ahead of the delivered events, and every response has a header;
//! - a watch "from now" does not begin below a revision shown before its create; the watch may begin below a
//!   revision shown since (docs/decisions.md#d50).
//!
//! The client's half-close is not an input: as in etcd, the watches go on.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;

use keyward_etcd::identity::Revision;
use keyward_etcd::refusal::Refusal;

use self::inline_map::InlineMap;
use super::cursor::WatchCursor;
use super::watch_messages::{
    self, ClientWatchCreate, ClientWatchRequest, NO_WATCH, NewestHeader, SplicedWatchResponse,
    WatchResponseHeader,
};

mod client_requests;
mod direct_delivery;
mod feed_watches;
mod inline_map;
mod member_responses;
mod progress;
mod stream_assignment;
mod watch_list;
mod watch_traits;

pub use feed_watches::FeedPosition;
pub use watch_list::{ListedWatch, WatchStreamReport};
pub use watch_traits::WatchTraits;

#[cfg(test)]
mod model;
#[cfg(test)]
mod tests;

/// Maximum number of upstream streams per client stream. A further stream is opened for each credential found
/// stale under live watches; past the limit, the watches of the oldest stream move to the newest.
const MAX_STREAMS: usize = 4;

/// Limits of one hub.
#[derive(Debug)]
struct HubLimits {
    /// Maximum number of unanswered creates of resumed watches per upstream stream. Each create makes etcd
    /// scan its history: the number is high enough to keep the connection busy, and low enough that a new
    /// watch of the client does not wait behind thousands.
    restoring: usize,
    /// Maximum bytes of events per fragment for a client that asked for fragments.
    fragment: usize,
    /// Maximum bytes held back of an unfinished revision; a larger revision cannot be delivered whole. etcd's
    /// own limits keep a transaction far below, but a deletion with prev_kv may reach any size.
    held: usize,
}

/// A fragment has etcd's default request limit plus its overhead.
static LIMITS: HubLimits = HubLimits { restoring: 32, fragment: 2 << 20, held: 256 << 20 };

/// Time without a lost stream after which the next loss counts as the first again. Longer than any driver's
/// backoff.
const SETTLED: Duration = Duration::from_secs(30);

/// Maximum number of client requests in the queue before the driver should stop reading requests.
const MAX_PENDING: usize = 1024;

/// Maximum bytes of the requests taken in while some are unanswered. Far above the size of usual keys.
const MAX_PENDING_BYTES: usize = 4 << 20;

/// An upstream Watch stream. Assigned by the hub, never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct UpstreamStreamId(u64);

/// A watch inside a hub. Assigned by the hub, never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WatchKey(u64);

/// Intervals chosen by the driver.
#[derive(Clone, Copy, Debug)]
pub struct HubTiming {
    /// Interval at which the hub requests progress for idle watches; `None` for never. Drawn at random for
    /// each hub, to spread the requests of many hubs.
    pub idle_progress: Option<Duration>,
    /// How long a client's progress request waits for upstream before the hub answers from its own knowledge.
    pub progress_grace: Duration,
}

/// An input to the hub.
#[derive(Clone, Debug)]
pub enum HubInput {
    /// A WatchRequest message of the client.
    Client(Bytes),
    /// A WatchRequest message of the client with a create that is refused, and the reason.
    DeniedClient(Bytes, Refusal),
    /// The stream's member is chosen and the request is on its way: messages may be sent. Do not wait for the
    /// response headers: etcd sends headers only together with the first message of a Watch.
    Opened {
        /// The stream named in [`HubOutput::Open`].
        stream: UpstreamStreamId,
        /// Traits of the chosen member.
        traits: WatchTraits,
    },
    /// The answer to [`HubOutput::Check`].
    Checked {
        /// The watch named in the output.
        watch: WatchKey,
        /// The stream named in the output.
        stream: UpstreamStreamId,
        /// The raw ResponseHeader of the read.
        header: Bytes,
        /// The revision read.
        revision: Revision,
    },
    /// The read of [`HubOutput::Check`] failed.
    CheckFailed {
        /// The watch named in the output.
        watch: WatchKey,
        /// The stream named in the output.
        stream: UpstreamStreamId,
        /// The reason for the failure.
        why: StreamLoss,
    },
    /// A WatchResponse message.
    Upstream {
        /// The stream on which the message arrived.
        stream: UpstreamStreamId,
        /// The message, without the gRPC frame.
        message: Bytes,
    },
    /// The stream ended, or could not be opened.
    Lost {
        /// The lost stream.
        stream: UpstreamStreamId,
        /// The reason for the loss.
        why: StreamLoss,
    },
    /// The time of [`Hub::next_deadline`] has come.
    Tick,
}

/// The reason why a stream or a read was lost.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StreamLoss {
    /// A transport error, no leader, a shutdown, or any status that another attempt may cure.
    Upstream,
    /// The member refused the credential.
    Credential,
    /// No credential can be obtained for this client's user. The text is etcd's own, in the form of a
    /// cancel_reason.
    Denied(String),
}

/// The credential needed by a new stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamCredential {
    /// The credential at hand.
    Current,
    /// A credential proven or obtained after this output.
    Fresh,
}

/// An action for the driver. Actions are carried out in order.
#[derive(Clone, Debug)]
pub enum HubOutput {
    /// Open an upstream stream with the client's identity.
    Open {
        /// The new stream's id.
        stream: UpstreamStreamId,
        /// The credential needed by the stream.
        credential: StreamCredential,
        /// Number of losses without a quiet time before this open. The driver's backoff grows with the
        /// number; 0 means no backoff.
        attempt: u32,
        /// True if a watch already known to the client waits for the stream.
        resumes: bool,
    },
    /// End the stream. The hub ignores all later inputs for the stream.
    Close {
        /// The stream to end.
        stream: UpstreamStreamId,
    },
    /// Send a WatchRequest message on an open stream.
    Send {
        /// The stream to send on.
        stream: UpstreamStreamId,
        /// The message, without the gRPC frame.
        message: Bytes,
    },
    /// Make a linearizable read of the cluster's revision with the client's identity, to tell a history that
    /// went back from a lagging member.
    Check {
        /// The watch to name in the answer.
        watch: WatchKey,
        /// The stream to name in the answer. The read goes to the stream's member.
        stream: UpstreamStreamId,
        /// The watch's key, readable by every client with permission to watch the key.
        key: Bytes,
    },
    /// A watch, by its WatchCreateRequest, is refused, or ends for want of permission. For the records alone.
    Refused(Bytes, Refusal),
    /// A WatchResponse message for the client.
    Emit(Bytes),
    /// End the client's stream, and every upstream stream. No output follows.
    End(WatchStreamEnd),
}

/// The reason for ending a client's stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WatchStreamEnd {
    /// The client's bytes are no WatchRequest, or are ambiguous to protobuf decoders.
    InvalidRequest,
    /// A single revision exceeds the limit of bytes held back for one watch.
    RevisionTooLarge,
    /// No credential can be obtained. The text is etcd's own.
    Denied(String),
}

impl WatchStreamEnd {
    /// The refusal for the client.
    #[must_use]
    pub fn refusal(&self) -> Refusal {
        match self {
            Self::InvalidRequest => Refusal::not_canonical("not a WatchRequest"),
            Self::RevisionTooLarge => Refusal::REVISION_TOO_LARGE,
            Self::Denied(_) => Refusal::INVALID_AUTH_TOKEN,
        }
    }
}

/// The state machine of a client stream. See the module's invariants.
#[derive(Debug)]
pub struct Hub {
    timing: HubTiming,
    limits: &'static HubLimits,
    watches: InlineMap<WatchKey, HubWatch>,
    streams: InlineMap<UpstreamStreamId, HubStream>,
    /// Watches without a stream, and new watches not sent yet. Key order is request order.
    unsent: BTreeSet<WatchKey>,
    /// Ids known to the client.
    client_ids: HashMap<i64, ClientWatchIdState>,
    /// Ids of watches denied after Created and not yet reached by `assign_id`. The hub does not assign an id
    /// of the set, since a cancel already on its way means the denied watch; the client may still choose the
    /// id.
    denied_ids: BTreeSet<i64>,
    /// The client's requests waiting for their turn, in request order.
    pending: VecDeque<PendingClientRequest>,
    /// Total bytes of the requests taken in since the pending queue was last empty.
    pending_bytes: usize,
    last_key: u64,
    last_stream: u64,
    last_upstream_id: i64,
    next_client_id: i64,
    attempts: u32,
    last_trouble: Option<Instant>,
    cluster_view: HubClusterView,
    /// Bytes held back in the cursors of all watches.
    held_bytes: usize,
    round: Option<progress::ProgressRound>,
    refresh_at: Option<Instant>,
    ended: bool,
    /// True once progress could not be told because of feeds, see [`feed_watches`].
    avoids_feeds: bool,
    out: Vec<HubOutput>,
}

/// The hub's knowledge of the cluster, and how much of the cluster's history was told to the client.
#[derive(Debug, Default)]
struct HubClusterView {
    cluster: Option<u64>,
    /// The newest upstream header, for answers made by the hub.
    header: NewestHeader,
    /// The highest revision known to have been reached by the cluster.
    reached: i64,
    /// The highest header.revision shown to the client.
    shown: i64,
    /// The highest revision told to the client by an event or a progress.
    delivered: i64,
}

#[derive(Debug)]
struct HubWatch {
    create: ClientWatchCreate,
    /// The downstream id, once the Created was told.
    id: Option<i64>,
    /// Upstream's answer to the create, until the turn of the create comes.
    answer: Option<CreateAnswer>,
    cursor: WatchCursor,
    /// Events delivered to the client.
    events: u64,
    place: WatchPlacement,
    requirement: StreamRequirement,
    /// The revision after which a watch "from now" begins, once fixed: by the first Created from upstream, or
    /// by a write that overtook the create.
    begins_after: Option<i64>,
    /// Resume exactly at the next revision: the last proven revision is compacted.
    resumes_exactly: bool,
    /// The highest revision shown to the client before the create: the watch does not begin below. Lowered if
    /// the history goes back.
    shown_before: i64,
    /// The first refusal of a create now being tried once more.
    refusal: Option<Box<SplicedWatchResponse>>,
    /// The create named a revision of a history that has ended: the watch ends as compacted at this revision.
    compacted_at: Option<i64>,
    /// The watch was covered by a progress of the current progress round.
    confirmed: bool,
}

/// A watch's requirements on its next stream.
#[derive(Clone, Copy, Debug)]
struct StreamRequirement {
    newer_than: UpstreamStreamId,
    credential: StreamCredential,
}

const ANY_STREAM: StreamRequirement =
    StreamRequirement { newer_than: UpstreamStreamId(0), credential: StreamCredential::Current };

#[derive(Debug)]
enum CreateAnswer {
    Created(Box<SplicedWatchResponse>),
    Refused(Box<SplicedWatchResponse>),
}

#[derive(Debug)]
enum WatchPlacement {
    /// Needs a stream.
    Nowhere,
    /// Will be sent on this stream.
    Assigned(UpstreamStreamId),
    /// Sent.
    Upstream(UpstreamStreamId, WatchRegistration),
    /// Answered, and not registered upstream until the client was told the answer.
    Parked,
    /// This stream's member reported a revision below the highest revision already seen by the watch or the
    /// client. A linearizable read decides between a lagging member and a history that went back.
    Doubtful(UpstreamStreamId),
}

/// A registration of a watch on an upstream stream.
#[derive(Debug)]
struct WatchRegistration {
    id: i64,
    start: i64,
    /// The Created's header.revision, once received.
    created: Option<i64>,
    /// Number of progress requests sent on the stream before this create.
    asked_before: u64,
    /// True once the member sent an event or a progress for the registration.
    has_messages: bool,
}

#[derive(Debug)]
struct HubStream {
    credential: StreamCredential,
    /// True for a feed, see [`feed_watches`].
    is_feed: bool,
    /// Traits of the member, known once the stream is open.
    traits: Option<WatchTraits>,
    ids: direct_delivery::WatchesByUpstreamId,
    /// Resumed watches assigned to the stream, waiting for a free slot ([`HubLimits::restoring`]).
    waiting: BTreeSet<WatchKey>,
    /// Unanswered creates in sending order, the order of etcd's answers.
    creating: VecDeque<UnansweredCreate>,
    /// Number of unanswered creates of resumed watches.
    restoring: usize,
    /// Number of progress requests sent.
    progress_requests: u64,
    /// Number of progress requests certainly answered or dropped.
    progress_settled: u64,
    /// The highest header.revision received with events or progress.
    highest: i64,
    /// The highest revision of the linearizable reads made for the stream.
    verified: i64,
    /// The linearizable read in flight for the stream.
    checking: Option<RevisionCheck>,
}

/// A linearizable read that tells a history that went back from a lagging member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct RevisionCheck {
    /// The watch named in the read's output and answer.
    watch: WatchKey,
    /// The highest revision shown to the client when the read began.
    shown: i64,
    /// Another watch came to need the read after the read had begun.
    joined: bool,
}

#[derive(Clone, Copy, Debug)]
struct UnansweredCreate {
    id: i64,
    resumed: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ClientWatchIdState {
    Watch(WatchKey),
    /// Ended by compaction: as in etcd, the id stays taken until the client cancels the watch.
    Compacted,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PendingClientRequest {
    Create(WatchKey),
    Cancel(i64),
    Progress,
}

impl Hub {
    /// Returns a hub for a client stream that begins now.
    #[must_use]
    pub fn new(now: Instant, timing: HubTiming) -> Self {
        Self {
            timing,
            limits: &LIMITS,
            watches: InlineMap::new(),
            streams: InlineMap::new(),
            unsent: BTreeSet::new(),
            client_ids: HashMap::new(),
            denied_ids: BTreeSet::new(),
            pending: VecDeque::new(),
            pending_bytes: 0,
            last_key: 0,
            last_stream: 0,
            last_upstream_id: 0,
            next_client_id: 0,
            attempts: 0,
            last_trouble: None,
            cluster_view: HubClusterView::default(),
            held_bytes: 0,
            round: None,
            refresh_at: timing.idle_progress.map(|idle| now + idle),
            ended: false,
            avoids_feeds: false,
            out: Vec::new(),
        }
    }

    /// Takes an input and appends the resulting outputs. The driver must carry out the outputs in order.
    pub fn handle(&mut self, now: Instant, input: HubInput, out: &mut Vec<HubOutput>) {
        if self.ended {
            return;
        }
        let result = match input {
            HubInput::Client(message) => self.client(&message),
            HubInput::DeniedClient(message, reason) => self.denied_client(&message, &reason),
            HubInput::Opened { stream, traits } => {
                self.opened(stream, traits);
                Ok(())
            }
            HubInput::Checked { watch, stream, header, revision } => {
                self.check_answered(now, watch, stream, &header, revision);
                Ok(())
            }
            HubInput::CheckFailed { watch, stream, why } => {
                self.check_failed(now, watch, stream, why);
                Ok(())
            }
            HubInput::Upstream { stream, message } if self.emit_directly(stream, &message) => Ok(()),
            HubInput::Upstream { stream, message } => self.upstream(now, stream, &message),
            HubInput::Lost { stream, why } => self.lost(now, stream, why),
            HubInput::Tick => {
                self.tick(now);
                Ok(())
            }
        };
        match result {
            Ok(()) => self.advance(now),
            Err(end) => {
                self.ended = true;
                self.out.push(HubOutput::End(end));
            }
        }
        out.append(&mut self.out);
    }

    /// The latest time for the next [`HubInput::Tick`]; `None` if no tick is needed.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Instant> {
        if self.ended || self.watches.is_empty() {
            return None;
        }
        let round = self.round.as_ref().and_then(progress::ProgressRound::deadline);
        round.into_iter().chain(self.refresh_at).min()
    }

    /// True if the driver should read the client's next request now. Otherwise the client's stream is left
    /// unread, as etcd does while working on a request.
    #[must_use]
    pub fn accepts_client(&self) -> bool {
        self.pending.len() < MAX_PENDING && self.pending_bytes < MAX_PENDING_BYTES
    }

    /// True if all watches of the stream were sent upstream and answered.
    #[must_use]
    pub fn is_restored(&self, stream: UpstreamStreamId) -> bool {
        self.streams.get(&stream).is_none_or(|stream| {
            stream.traits.is_some() && stream.waiting.is_empty() && stream.creating.is_empty()
        })
    }

    /// Total bytes of revisions that have begun to arrive and have not ended, over all watches.
    #[must_use]
    pub fn held(&self) -> usize {
        self.held_bytes
    }

    /// Advances all pending work as far as possible.
    fn advance(&mut self, now: Instant) {
        self.answer_in_turn();
        self.assign_streams(now);
        self.send_creates();
        self.close_unused();
        self.advance_progress_round(now);
    }

    fn emit(&mut self, response: &SplicedWatchResponse) {
        if let Some(header) = &response.header {
            self.cluster_view.shown = self.cluster_view.shown.max(header.revision);
        }
        self.out.push(HubOutput::Emit(response.write()));
    }

    fn send(&mut self, stream: UpstreamStreamId, message: Bytes) {
        self.out.push(HubOutput::Send { stream, message });
    }

    /// The newest known header, at `revision` or at the highest revision shown to the client if that is
    /// higher.
    fn header_at_least(&self, revision: i64) -> WatchResponseHeader {
        self.header_at(revision.max(self.cluster_view.shown))
    }

    /// The header for an answer that waited for its turn: unchanged, or the newest header of the current
    /// cluster if the answer came from another cluster.
    fn of_this_cluster(&self, header: Option<WatchResponseHeader>) -> WatchResponseHeader {
        let known = || self.cluster_view.header.read().unwrap_or_default();
        header
            .filter(|header| header.cluster == 0 || Some(header.cluster) == self.cluster_view.cluster)
            .unwrap_or_else(known)
    }

    fn header_at(&self, revision: i64) -> WatchResponseHeader {
        self.cluster_view.header.read().unwrap_or_default().with_revision(revision)
    }
}

impl WatchPlacement {
    fn stream(&self) -> Option<UpstreamStreamId> {
        match self {
            Self::Nowhere | Self::Parked => None,
            Self::Assigned(stream) | Self::Upstream(stream, _) | Self::Doubtful(stream) => Some(*stream),
        }
    }
}

impl HubWatch {
    /// True if upstream has answered the create of the present incarnation.
    fn is_live(&self) -> bool {
        matches!(&self.place, WatchPlacement::Upstream(_, incarnation) if incarnation.created.is_some())
    }
}

impl HubStream {
    fn new(credential: StreamCredential) -> Self {
        Self {
            credential,
            is_feed: false,
            traits: None,
            ids: direct_delivery::WatchesByUpstreamId::default(),
            waiting: BTreeSet::new(),
            creating: VecDeque::new(),
            restoring: 0,
            progress_requests: 0,
            progress_settled: 0,
            highest: 0,
            verified: 0,
            checking: None,
        }
    }

    fn trusts_progress(&self) -> bool {
        self.traits.is_some_and(|traits| traits.progress_trusted)
    }
}
