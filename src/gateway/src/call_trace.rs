//! The trace of a call under way.
//!
//! Owns: the choice of the calls with a trace, the ids of their spans, and the times of their parts. Must not
//! know: the form of spans, their way to a collector. Invariants: a call without a trace costs a comparison;
//! the number of parts is bounded; a client's wish for a trace is bounded by a rate.

use std::cell::Cell;
use std::fmt;
use std::mem;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use prometheus_client::metrics::counter::Counter;
use tokio::time::Instant;

use keyward_cluster::membership::Member;
use keyward_etcd::identity::MemberId;
use keyward_etcd::refusal::Code;
use keyward_etcd::rpc::trace_id::{TraceId, TraceParent};
use keyward_telemetry::call_span::{CallSpan, SpanFact, SpanPart};
use keyward_telemetry::export_queue::ExportQueue;
use keyward_telemetry::trace_sampling::{TraceDecision, TraceSampling};

/// Parts of a call in its trace; a Lock that waits for hours makes attempts again and again.
const MOST_PARTS: usize = 32;
const SECOND: Duration = Duration::from_secs(1);

/// The queue of finished calls with a trace.
pub type SpanQueue = Arc<ExportQueue<CallSpan>>;

/// Chooses the calls of a shard that have a trace.
pub struct CallTracer {
    queue: SpanQueue,
    /// The settings, as configured now.
    pub settings: Cell<TraceSampling>,
    dice: Cell<u64>,
    /// The begin of a second, and the number of calls in it that have a trace because their client wants one.
    followed: Cell<(Instant, u32)>,
    not_followed: Counter,
}

/// A wait of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallWait {
    /// For the request message.
    Body,
    /// For a credential of the call's user.
    Credential,
    /// For an in-flight slot at a member.
    Turn,
}

impl CallWait {
    fn name(self) -> &'static str {
        match self {
            Self::Body => "wait for body",
            Self::Credential => "wait for credential",
            Self::Turn => "wait for turn",
        }
    }
}

/// The trace of a call.
pub struct CallTrace {
    /// The id of the trace.
    pub id: TraceId,
    parent: Option<u64>,
    /// The id of the call's span. The ids of parts follow.
    span: u64,
    begun: SystemTime,
    parts: Vec<OpenPart>,
}

/// A part of a call, perhaps under way.
struct OpenPart {
    kind: PartKind,
    begun: Instant,
    ended: Option<Instant>,
    code: Option<Code>,
}

enum PartKind {
    Wait(CallWait),
    Attempt { member: MemberId, host: String, port: u16 },
}

impl fmt::Debug for CallTracer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CallTracer").finish_non_exhaustive()
    }
}

impl CallTracer {
    /// A tracer whose finished calls go to `queue`. Counts in `not_followed` the calls without a trace whose
    /// client wants one.
    #[must_use]
    pub fn new(queue: SpanQueue, settings: TraceSampling, not_followed: Counter) -> Self {
        let seed = getrandom::u64().unwrap_or(1);
        let followed = Cell::new((Instant::now(), 0));
        Self { queue, settings: Cell::new(settings), dice: Cell::new(seed), followed, not_followed }
    }

    /// Begins the trace of a call that arrived at `now`, if the call is to have one.
    #[must_use]
    pub fn begin(&self, parent: Option<TraceParent>, now: Instant) -> Option<Box<CallTrace>> {
        let settings = self.settings.get();
        match settings.decide(parent.map(|parent| parent.is_sampled), || self.draw()) {
            TraceDecision::Untraced => return None,
            TraceDecision::TracedWithinRate if !self.follow(settings.parents_per_second, now) => {
                self.not_followed.inc();
                return None;
            }
            TraceDecision::Traced | TraceDecision::TracedWithinRate => {}
        }
        let id = match parent {
            Some(parent) => parent.id,
            None => TraceId::from(random_bits().filter(|id| *id != 0)?.to_be_bytes()),
        };
        // Neither the id nor the ids that follow are 0, which is no id.
        let span = u64::try_from(random_bits()? >> 66).ok()? | 1 << 62;
        let parent = parent.map(|parent| parent.span);
        Some(Box::new(CallTrace { id, parent, span, begun: SystemTime::now(), parts: Vec::new() }))
    }

    /// True if the rate has room for a call whose client wants a trace.
    fn follow(&self, per_second: u32, now: Instant) -> bool {
        let (second, count) = self.followed.get();
        let is_over = now.saturating_duration_since(second) >= SECOND;
        let (second, count) = if is_over { (now, 0) } else { (second, count) };
        let has_room = count < per_second;
        self.followed.set((second, count + u32::from(has_room)));
        has_room
    }

    /// A random number, for choosing calls only.
    fn draw(&self) -> u32 {
        // xorshift64*: the upper half of the product is well distributed.
        let mut dice = self.dice.get() | 1;
        dice ^= dice >> 12;
        dice ^= dice << 25;
        dice ^= dice >> 27;
        self.dice.set(dice);
        u32::try_from(dice.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32).unwrap_or_default()
    }

    /// Queues a finished call.
    pub fn finish(&self, span: CallSpan) {
        let weight = span.weight();
        self.queue.push(span, weight);
    }
}

/// 128 random bits; `None` if the system gives none.
fn random_bits() -> Option<u128> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).ok()?;
    Some(u128::from_ne_bytes(bytes))
}

impl CallTrace {
    /// True if the trace is the client's.
    #[must_use]
    pub fn is_of_client(&self) -> bool {
        self.parent.is_some()
    }

    /// Notes the begin of a wait.
    pub fn begin_wait(&mut self, wait: CallWait) {
        _ = self.begin_part(PartKind::Wait(wait), Instant::now());
    }

    /// Notes the end of a wait.
    pub fn end_wait(&mut self, wait: CallWait) {
        let is_same = |kind: &PartKind| matches!(kind, PartKind::Wait(begun) if *begun == wait);
        self.end_part(is_same, None);
    }

    /// Notes the begin of an attempt at `member`. Returns the trace as sent to the member.
    #[must_use]
    pub fn begin_attempt(&mut self, member: &Member, now: Instant) -> TraceParent {
        let (host, port) = (member.endpoint.host.clone(), member.endpoint.port);
        let place = self.begin_part(PartKind::Attempt { member: member.id, host, port }, now);
        let span = place.map_or(self.span, |place| self.part_id(place));
        TraceParent { id: self.id, span, is_sampled: true }
    }

    /// Notes the end of an attempt at a member, with the code of the member's answer.
    pub fn end_attempt(&mut self, member: MemberId, code: Option<Code>) {
        let is_same = |kind: &PartKind| matches!(kind, PartKind::Attempt { member: at, .. } if *at == member);
        self.end_part(is_same, code);
    }

    /// Returns the place of the part; `None` if the trace has all its parts.
    fn begin_part(&mut self, kind: PartKind, begun: Instant) -> Option<usize> {
        let place = self.parts.len();
        (place < MOST_PARTS).then(|| self.parts.push(OpenPart { kind, begun, ended: None, code: None }))?;
        Some(place)
    }

    fn end_part(&mut self, is_same: impl Fn(&PartKind) -> bool, code: Option<Code>) {
        let mut open = self.parts.iter_mut().rev().filter(|part| part.ended.is_none());
        if let Some(part) = open.find(|part| is_same(&part.kind)) {
            (part.ended, part.code) = (Some(Instant::now()), code);
        }
    }

    /// The id of the part at this place.
    fn part_id(&self, place: usize) -> u64 {
        self.span + 1 + place as u64
    }

    /// The finished call. `started` is the call's arrival, `facts` what else is known of the call.
    #[must_use]
    pub fn finish(&mut self, started: Instant, took: Duration, facts: FinishedCall) -> CallSpan {
        let since = |at: Instant| at.saturating_duration_since(started).min(took);
        let answered = self.parts.iter().filter(|part| part.code.is_some()).filter_map(|part| part.ended);
        let delivery = answered.max().map(since);
        let open = mem::take(&mut self.parts);
        let mut parts: Vec<_> = open
            .into_iter()
            .enumerate()
            .map(|(place, part)| SpanPart {
                id: self.part_id(place),
                name: part.kind.name(),
                begun: since(part.begun),
                ended: part.ended.map_or(took, since),
                // An attempt under way ends with its client, which is no failure.
                is_failed: matches!(part.kind, PartKind::Attempt { .. })
                    && part.ended.is_some()
                    && part.code.is_none_or(is_failure_of_server),
                code: part.code.map(|code| code as u8),
                facts: part.kind.facts(),
            })
            .collect();
        parts.extend(delivery.map(|begun| SpanPart {
            id: self.part_id(MOST_PARTS),
            name: Some("delivery"),
            begun,
            ended: took,
            code: None,
            is_failed: false,
            facts: Vec::new(),
        }));
        let FinishedCall { path, code, reason, facts } = facts;
        let error = code.filter(|code| is_failure_of_server(*code)).map(|_| reason.unwrap_or_default());
        CallSpan {
            trace: self.id.bytes(),
            parent: self.parent,
            id: self.span,
            path,
            begun: self.begun,
            took,
            code: code.map(|code| code as u8),
            error,
            facts,
            parts,
        }
    }

    /// When the call ended that took so long.
    #[must_use]
    pub fn ended(&self, took: Duration) -> SystemTime {
        self.begun + took
    }
}

/// The facts of a finished call beside its times.
pub struct FinishedCall {
    /// The method's path.
    pub path: &'static str,
    /// The code; `None` for a stream that goes on.
    pub code: Option<Code>,
    /// The reason of a failure.
    pub reason: Option<String>,
    /// Further facts.
    pub facts: Vec<(&'static str, SpanFact)>,
}

impl PartKind {
    fn name(&self) -> Option<&'static str> {
        match self {
            Self::Wait(wait) => Some(wait.name()),
            Self::Attempt { .. } => None,
        }
    }

    fn facts(self) -> Vec<(&'static str, SpanFact)> {
        match self {
            Self::Wait(_) => Vec::new(),
            Self::Attempt { member, host, port } => vec![
                ("server.address", SpanFact::Text(host)),
                ("server.port", SpanFact::Number(port.into())),
                ("keyward.member", SpanFact::Text(member.to_string())),
            ],
        }
    }
}

/// The codes that OpenTelemetry counts as errors of a server: the other failures are the client's.
fn is_failure_of_server(code: Code) -> bool {
    matches!(
        code,
        Code::Unknown
            | Code::DeadlineExceeded
            | Code::Unimplemented
            | Code::Internal
            | Code::Unavailable
            | Code::DataLoss
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tracer(settings: TraceSampling) -> (CallTracer, Counter) {
        let not_followed = Counter::default();
        (CallTracer::new(Arc::new(ExportQueue::new(1 << 20)), settings, not_followed.clone()), not_followed)
    }

    fn parent(is_sampled: bool) -> Option<TraceParent> {
        Some(TraceParent { id: TraceId::from([7; 16]), span: 9, is_sampled })
    }

    #[test]
    fn clients_cannot_have_more_traces_than_the_rate() {
        let settings = TraceSampling { parents_per_second: 3, ..TraceSampling::default() };
        let (tracer, not_followed) = tracer(settings);
        let begin = Instant::now();
        let traced = |at: Duration| tracer.begin(parent(true), begin + at).is_some();
        let of_second = |at| (0..10).filter(|_| traced(at)).count();
        assert_eq!((of_second(SECOND), not_followed.get()), (3, 7));
        assert_eq!(of_second(SECOND * 3 / 2), 0, "the second is not over");
        assert_eq!((of_second(SECOND * 2), not_followed.get()), (3, 24));
    }

    #[test]
    fn a_share_of_the_calls_has_a_trace_of_its_own() {
        let (tracer, _) = tracer(TraceSampling { share: 0.25, ..TraceSampling::default() });
        let now = Instant::now();
        let traces: Vec<_> = (0..4000).filter_map(|_| tracer.begin(None, now)).collect();
        assert!((800..1200).contains(&traces.len()), "{}", traces.len());
        assert!(traces.iter().all(|trace| trace.parent.is_none() && trace.span >> 62 == 1));
        assert_ne!(traces[0].id, traces[1].id);
        assert!(tracer.begin(parent(false), now).is_none(), "the client decided against a trace");
    }

    #[test]
    fn a_finished_call_has_its_waits_in_order_within_its_time() {
        let (tracer, _) = tracer(TraceSampling { share: 1.0, ..TraceSampling::default() });
        let started = Instant::now();
        let mut trace = tracer.begin(parent(true), started).unwrap();
        trace.begin_wait(CallWait::Turn);
        trace.begin_wait(CallWait::Credential);
        trace.end_wait(CallWait::Credential);
        trace.end_wait(CallWait::Turn);
        trace.begin_wait(CallWait::Body);
        let facts =
            FinishedCall { path: "/a/B", code: Some(Code::Canceled), reason: None, facts: Vec::new() };
        let span = trace.finish(started, Duration::from_secs(1), facts);
        assert_eq!((span.trace, span.parent, span.code), ([7; 16], Some(9), Some(1)));
        let names: Vec<_> = span.parts.iter().filter_map(|part| part.name).collect();
        assert_eq!(names, ["wait for turn", "wait for credential", "wait for body"]);
        assert_eq!(span.parts[2].ended, span.took, "an open wait ends with the call");
        assert!(span.parts.iter().all(|part| part.begun <= part.ended && part.ended <= span.took));
        assert!(span.error.is_none(), "a client that leaves is no error of the server");
    }
}
