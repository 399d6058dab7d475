//! The unanswered requests of a client's keepalive stream. Pure.
//!
//! Owns: the order of the requests, the requests already sent on the open upstream stream, the meaning of
//! each answer or end. Must not know: streams, clocks, the membership.
//! Invariants: each request gets one answer, in request order, as in etcd
//! (server/etcdserver/api/v3rpc/lease.go); after a loss all unanswered requests are sent again, safely, since
//! a renewal is idempotent; a TTL is never invented; a TTL of 0 from a version known for false zeros (3.5.0
//! to 3.5.2, and up to 3.4.19) is relayed only after a second zero (docs/decisions.md#d26).

use std::collections::VecDeque;

use bytes::Bytes;

use keyward_etcd::identity::MemberId;

/// Limit on the unanswered requests of a client stream.
const MOST: usize = 1024;
/// Limit on the bytes of unanswered requests: a request is a single number, but padding must not fill the
/// memory.
const MOST_BYTES: usize = 64 * 1024;

/// The treatment of a TTL of 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ZeroTtl {
    /// The lease is gone.
    Final,
    /// The zero may be false, right after a grant through a follower: the request is sent once more after a
    /// linearizable read.
    Confirm,
}

/// The treatment of an answer.
#[derive(Debug, PartialEq, Eq)]
pub enum RenewalVerdict {
    /// Relay the answer to the client.
    Deliver,
    /// Make a linearizable read at the member, then send the request again.
    Confirm,
    /// No request matches the answer: not relayed.
    Stray,
}

/// An unanswered request.
#[derive(Debug)]
struct RenewalRequest {
    message: Bytes,
    confirmed: bool,
    refused_by: Vec<MemberId>,
}

/// The unanswered requests of a client stream.
#[derive(Debug, Default)]
pub struct PendingRenewals {
    requests: VecDeque<RenewalRequest>,
    /// Requests from the front already sent on the open upstream stream.
    asked: usize,
    /// The request answered last.
    answered: Option<Bytes>,
    /// Bytes of all unanswered requests.
    bytes: usize,
}

impl PendingRenewals {
    /// Adds a request of the client.
    pub fn push(&mut self, message: Bytes) {
        self.bytes += message.len();
        self.requests.push_back(RenewalRequest { message, confirmed: false, refused_by: Vec::new() });
    }

    /// The next message to be sent on the upstream stream, returned once. etcd answers requests singly, but
    /// accepts requests at any time.
    pub fn next_to_ask(&mut self) -> Option<Bytes> {
        let request = self.requests.get(self.asked)?;
        self.asked += 1;
        Some(request.message.clone())
    }

    /// Notes the loss of the upstream stream: all unanswered requests are to be sent again.
    pub fn lost(&mut self) {
        self.asked = 0;
    }

    /// Judges an answer with `ttl`.
    pub fn answered(&mut self, ttl: i64, zero: ZeroTtl) -> RenewalVerdict {
        if self.asked == 0 {
            return RenewalVerdict::Stray;
        }
        if let (ZeroTtl::Confirm, true, Some(head)) = (zero, ttl <= 0, self.requests.front_mut())
            && !head.confirmed
        {
            head.confirmed = true;
            return RenewalVerdict::Confirm;
        }
        self.answered = self.take_front();
        self.asked -= 1;
        RenewalVerdict::Deliver
    }

    /// Notes that the stream ended because `member` refused the credential or the permission of the front
    /// request. Returns true if the member had refused the request before: each member has tokens of its own,
    /// so a first refusal may be due to an old token.
    pub fn refused(&mut self, member: MemberId) -> bool {
        self.asked = 0;
        let Some(head) = self.requests.front_mut() else { return false };
        let again = head.refused_by.contains(&member);
        head.refused_by.push(member);
        again
    }

    /// Withholds the front request, which then stays unanswered, so the stream's other leases are still
    /// renewed. False if the stream knows no other lease, so the stream itself must end.
    pub fn withhold(&mut self) -> bool {
        let Some(head) = self.requests.front() else { return false };
        let beside_others = self.has_other_lease(&head.message);
        if beside_others {
            self.take_front();
        }
        beside_others
    }

    /// True if the stream knows a lease other than the lease of `message`: a request waits, or was answered
    /// last.
    #[must_use]
    pub fn has_other_lease(&self, message: &Bytes) -> bool {
        let waiting = self.requests.iter().map(|request| &request.message);
        waiting.chain(&self.answered).any(|known| known != message)
    }

    /// The request to be answered next.
    #[must_use]
    pub fn first(&self) -> Option<&Bytes> {
        self.requests.front().map(|request| &request.message)
    }

    fn take_front(&mut self) -> Option<Bytes> {
        let message = self.requests.pop_front()?.message;
        self.bytes -= message.len();
        Some(message)
    }

    /// True if no request is unanswered.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// True if no further request should be read; HTTP/2 flow control then holds the client back.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.requests.len() >= MOST || self.bytes >= MOST_BYTES
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pending(messages: &[&'static [u8]]) -> PendingRenewals {
        let mut pending = PendingRenewals::default();
        messages.iter().for_each(|message| pending.push(Bytes::from_static(message)));
        pending
    }

    fn asked(pending: &mut PendingRenewals) -> Vec<Bytes> {
        std::iter::from_fn(|| pending.next_to_ask()).collect()
    }

    #[test]
    fn everything_unanswered_is_asked_again_in_order() {
        let mut pending = pending(&[b"a", b"b", b"c"]);
        assert_eq!(asked(&mut pending), ["a", "b", "c"]);
        assert_eq!(pending.answered(5, ZeroTtl::Final), RenewalVerdict::Deliver);
        pending.lost();
        assert_eq!(
            pending.answered(5, ZeroTtl::Final),
            RenewalVerdict::Stray,
            "nothing was asked of this stream"
        );
        assert_eq!(asked(&mut pending), ["b", "c"]);
        assert_eq!(pending.answered(5, ZeroTtl::Final), RenewalVerdict::Deliver);
        assert_eq!(pending.answered(0, ZeroTtl::Final), RenewalVerdict::Deliver);
        assert!(pending.is_empty());
    }

    #[test]
    fn a_doubtful_zero_is_asked_once_more_and_then_believed() {
        let mut pending = pending(&[b"a"]);
        assert_eq!(asked(&mut pending), ["a"]);
        assert_eq!(pending.answered(0, ZeroTtl::Confirm), RenewalVerdict::Confirm);
        pending.lost();
        assert_eq!(asked(&mut pending), ["a"]);
        assert_eq!(pending.answered(0, ZeroTtl::Confirm), RenewalVerdict::Deliver);
        assert!(pending.is_empty());
    }

    #[test]
    fn a_forbidden_lease_is_withheld_only_beside_others() {
        let mut pending = pending(&[b"forbidden", b"mine"]);
        assert_eq!(asked(&mut pending).len(), 2);
        assert!(!pending.refused(MemberId(1)));
        assert!(!pending.refused(MemberId(2)));
        assert!(pending.refused(MemberId(1)));
        assert!(pending.withhold());
        assert_eq!(asked(&mut pending), ["mine"]);
        assert!(!pending.withhold());

        // No request is unanswered, but the stream renewed another lease just before.
        assert_eq!(pending.answered(5, ZeroTtl::Final), RenewalVerdict::Deliver);
        pending.push(Bytes::from_static(b"forbidden"));
        pending.push(Bytes::from_static(b"forbidden"));
        assert!(pending.withhold());
        assert!(pending.withhold());
        assert!(pending.is_empty());
        pending.push(Bytes::from_static(b"mine"));
        assert!(!pending.withhold(), "what is refused now is the only lease that there was");
    }
}
