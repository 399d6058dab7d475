//! The slowest calls of the last five minutes.
//!
//! Owns: the memory of slow calls of one shard. Must not know: how a call is made. Invariants: a call faster
//! than [`SLOW`] costs one comparison; a bounded number of calls is kept for each minute, the slowest; Lock
//! and Campaign, which wait by their nature, and streams are no slow calls; keys are kept, values never.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::fmt::Write as _;
use std::ops::ControlFlow;
use std::time::Duration;

use tokio::time::Instant;

use crate::shard_rows::{key_text, range_text};
use keyward_etcd::identity::{MemberId, UserName};
use keyward_etcd::refusal::Code;
use keyward_etcd::rpc::key_range::RangeEnd;
use keyward_etcd::rpc::method::{Handler, Method, StreamingSides};
use keyward_etcd::rpc::touch::{self, TouchTarget};

/// Calls that take at least this long are remembered.
pub const SLOW: Duration = Duration::from_millis(100);
/// Minutes remembered, beside the present one.
const MINUTES: u64 = 5;
/// Calls remembered of one minute.
const PER_MINUTE: usize = 32;
/// Slow calls with an answer and without an end: an answer on its way to its client.
const ANSWERED: usize = 256;
/// Ranges of one call that are named; a Txn may touch many.
const RANGES: usize = 4;

/// The slow calls of a shard.
#[derive(Debug, Default)]
pub struct SlowCalls {
    calls: RefCell<Vec<SlowCall>>,
    /// Slow calls with an answer and without an end so far. Kept here, because every call would pay for a
    /// field of its record.
    answered: RefCell<VecDeque<(SlowCallKey, SlowParts)>>,
}

/// Tells the calls under way apart: client connection, and time of arrival. Two calls of one connection and
/// one moment may show each other's parts.
type SlowCallKey = (u64, Instant);

/// A slow call.
#[derive(Clone, Debug)]
pub struct SlowCall {
    /// The method.
    pub method: &'static Method,
    /// Number of the client connection.
    pub client: u64,
    /// The etcd user.
    pub user: Option<UserName>,
    /// The member that answered last.
    pub member: Option<MemberId>,
    /// Attempts at members.
    pub attempts: u32,
    /// The status code.
    pub code: Code,
    /// The whole time.
    pub took: Duration,
    /// The parts of the time; `None` if no member answered, or if the call was slow in its delivery only.
    pub parts: Option<SlowParts>,
    /// When the call ended.
    pub ended: Instant,
}

/// The time until a slow call's answer, and the ranges of the call.
#[derive(Clone, Debug)]
pub struct SlowParts {
    /// From the arrival to the last attempt: waiting for the message, the credential, a turn at a member, and
    /// earlier attempts.
    pub before: Duration,
    /// From the begin of the last attempt to the member's answer.
    pub member: Duration,
    /// The ranges, escaped.
    pub ranges: String,
}

impl SlowParts {
    /// The parts of a call of `method` that arrived at `started`, was sent at `sent`, and was answered at
    /// `now`.
    #[must_use]
    pub fn new(method: &Method, message: &[u8], started: Instant, sent: Instant, now: Instant) -> Self {
        Self {
            before: sent.saturating_duration_since(started),
            member: now.saturating_duration_since(sent),
            ranges: ranges_of(method, message),
        }
    }
}

impl SlowCalls {
    /// True if a call of `method` that took so long is remembered.
    #[must_use]
    pub fn wants(method: &Method, took: Duration) -> bool {
        took >= SLOW && may_be_slow(method)
    }

    /// Notes a member's answer to a slow call, until the call's end.
    pub fn note_answered(&self, key: SlowCallKey, parts: SlowParts) {
        let mut answered = self.answered.borrow_mut();
        answered.retain(|(known, _)| *known != key);
        if answered.len() >= ANSWERED {
            answered.pop_front();
        }
        answered.push_back((key, parts));
    }

    /// The last answer noted of a call.
    #[must_use]
    pub fn take_answered(&self, key: SlowCallKey) -> Option<SlowParts> {
        let mut answered = self.answered.borrow_mut();
        let at = answered.iter().position(|(known, _)| *known == key)?;
        answered.remove(at).map(|(_, parts)| parts)
    }

    /// Remembers a call, in place of a faster call of the same minute if there are many.
    pub fn note(&self, call: SlowCall) {
        let mut calls = self.calls.borrow_mut();
        let now = call.ended;
        calls.retain(|known| minute_age(known, now) <= MINUTES);
        let of_minute = calls.iter().enumerate().filter(|(_, known)| minute_age(known, now) == 0);
        let fastest =
            of_minute.clone().min_by_key(|(_, known)| known.took).map(|(at, known)| (at, known.took));
        match fastest {
            Some((at, took)) if of_minute.count() >= PER_MINUTE => {
                if took < call.took {
                    calls[at] = call;
                }
            }
            _ => calls.push(call),
        }
    }

    /// The calls of the last five minutes.
    #[must_use]
    pub fn recent(&self, now: Instant) -> Vec<SlowCall> {
        let calls = self.calls.borrow();
        calls.iter().filter(|call| minute_age(call, now) < MINUTES).cloned().collect()
    }
}

/// Whole minutes between the end of a call and now.
fn minute_age(call: &SlowCall, now: Instant) -> u64 {
    now.saturating_duration_since(call.ended).as_secs() / 60
}

fn may_be_slow(method: &Method) -> bool {
    method.stream == StreamingSides::Unary && method.handler != Handler::Lock
}

/// The ranges touched by a request, escaped.
fn ranges_of(method: &Method, message: &[u8]) -> String {
    let (mut text, mut count) = (String::new(), 0);
    let visited = touch::visit(method, message, &mut |touch| {
        let TouchTarget::Keys(range) = touch.target else { return ControlFlow::Continue(()) };
        count += 1;
        if count > RANGES {
            text.push_str(", …");
            return ControlFlow::Break(());
        }
        let range = match range.end {
            RangeEnd::StartKey => key_text(range.start),
            RangeEnd::Before(end) => range_text(range.start, end),
            RangeEnd::Unbounded => range_text(range.start, &[0]),
        };
        let separator = if count > 1 { ", " } else { "" };
        // Writing to a string cannot fail.
        _ = write!(text, "{separator}{} {range}", touch.action.name());
        ControlFlow::Continue(())
    });
    if visited.is_err() { String::new() } else { text }
}

#[cfg(test)]
mod tests {
    use prost::Message as _;

    use super::*;
    use keyward_etcd::pb::etcdserverpb::RangeRequest;
    use keyward_etcd::rpc::method::lookup;

    fn call(took: u64, ended: Instant) -> SlowCall {
        SlowCall {
            method: lookup("/etcdserverpb.KV/Range").expect("etcd's"),
            client: 1,
            user: None,
            member: None,
            attempts: 1,
            code: Code::Ok,
            took: Duration::from_millis(took),
            parts: None,
            ended,
        }
    }

    #[test]
    fn the_slowest_of_each_minute_are_remembered_for_five_minutes() {
        let (calls, start) = (SlowCalls::default(), Instant::now());
        for took in 0..1000 {
            calls.note(call(took, start));
        }
        let recent = calls.recent(start);
        assert_eq!(recent.len(), PER_MINUTE);
        assert!(recent.iter().all(|call| call.took >= Duration::from_millis(1000 - PER_MINUTE as u64)));
        let later = start + Duration::from_secs(240);
        calls.note(call(1, later));
        assert_eq!(calls.recent(later).len(), PER_MINUTE + 1, "another minute has places of its own");
        assert_eq!(calls.recent(start + Duration::from_secs(300)).len(), 1);
        calls.note(call(2, start + Duration::from_secs(3600)));
        assert_eq!(calls.calls.borrow().len(), 1, "old calls are forgotten");
    }

    #[test]
    fn a_slow_call_tells_where_its_time_went_and_what_it_touched() {
        let method = lookup("/etcdserverpb.KV/Range").expect("etcd's");
        let range = RangeRequest { key: "/a/".into(), range_end: "/a0".into(), ..RangeRequest::default() };
        let message = range.encode_to_vec();
        let start = Instant::now();
        let at = |millis: u64| start + Duration::from_millis(millis);
        let parts = SlowParts::new(method, &message, start, at(30), at(130));
        assert_eq!((parts.before, parts.member), (Duration::from_millis(30), Duration::from_millis(100)));
        assert_eq!(parts.ranges, "read /a/*");
        let calls = SlowCalls::default();
        calls.note_answered((7, start), SlowParts::new(method, &[], start, at(1), at(2)));
        calls.note_answered((7, start), parts);
        assert!(calls.take_answered((8, start)).is_none());
        let kept = calls.take_answered((7, start)).map(|parts| parts.ranges);
        assert_eq!(kept.as_deref(), Some("read /a/*"));
        assert!(calls.take_answered((7, start)).is_none(), "a call ends once");
        assert!(!SlowCalls::wants(method, SLOW - Duration::from_millis(1)));
        let lock = lookup("/v3lockpb.Lock/Lock").expect("etcd's");
        assert!(!SlowCalls::wants(lock, 2 * SLOW) && SlowCalls::wants(method, SLOW));
    }
}
