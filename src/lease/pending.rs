//! What a client asked on its keepalive stream and etcd has not answered yet. Pure.
//!
//! Owns: the order of requests, which of them the open upstream stream has seen, and what each answer or end means for
//! them. Must not know: streams, clocks, who the members are.
//! Invariants (watch-and-lease B.1): one answer per request, in request order; after a loss everything unanswered is
//! asked again, which is safe since a renewal is idempotent; a TTL is never invented: a lease is told as gone only when
//! a member said so twice where its version is known to say it falsely (rules 26).

use std::collections::VecDeque;

use bytes::Bytes;

use crate::identity::MemberId;

/// Unanswered requests of one client stream.
const MOST: usize = 1024;
/// Their bytes: a request is one number, but whoever pads it must not fill our memory.
const MOST_BYTES: usize = 64 * 1024;

/// How a request that etcd answers with TTL 0 is treated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Zero {
    /// It is the truth.
    Final,
    /// It may be false right after a grant through a follower: asked once more after a linearizable read.
    Confirm,
}

/// What to do with an answer.
#[derive(Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It is for the client.
    Deliver,
    /// Read linearizably on that member, then ask again.
    Confirm,
    /// It answers nothing that was asked: not passed on.
    Stray,
}

/// A request that waits for its answer.
#[derive(Debug)]
struct Request {
    message: Bytes,
    confirmed: bool,
    refused_by: Vec<MemberId>,
}

/// The unanswered requests of one client stream.
#[derive(Debug, Default)]
pub struct Pending {
    requests: VecDeque<Request>,
    /// How many of them, from the front, the open upstream stream was given.
    asked: usize,
    /// The request that was answered last.
    answered: Option<Bytes>,
    /// Bytes of all of them.
    bytes: usize,
}

impl Pending {
    /// A request of the client.
    pub fn push(&mut self, message: Bytes) {
        self.bytes += message.len();
        self.requests.push_back(Request { message, confirmed: false, refused_by: Vec::new() });
    }

    /// The next message for the upstream stream, once. etcd answers one by one, but takes them as they come.
    pub fn next_to_ask(&mut self) -> Option<Bytes> {
        let request = self.requests.get(self.asked)?;
        self.asked += 1;
        Some(request.message.clone())
    }

    /// The upstream stream is gone: everything unanswered is to be asked again.
    pub fn lost(&mut self) {
        self.asked = 0;
    }

    /// An answer with `ttl` came.
    pub fn answered(&mut self, ttl: i64, zero: Zero) -> Verdict {
        if self.asked == 0 {
            return Verdict::Stray;
        }
        if let (Zero::Confirm, true, Some(head)) = (zero, ttl <= 0, self.requests.front_mut())
            && !head.confirmed
        {
            head.confirmed = true;
            return Verdict::Confirm;
        }
        self.answered = self.take_front();
        self.asked -= 1;
        Verdict::Deliver
    }

    /// The stream ended since `member` refused a credential or permission for the request in front. Whether it had done
    /// so before: each member knows tokens of its own, and the first that is refused there may just be old.
    pub fn refused(&mut self, member: MemberId) -> bool {
        self.asked = 0;
        let Some(head) = self.requests.front_mut() else { return false };
        let again = head.refused_by.contains(&member);
        head.refused_by.push(member);
        again
    }

    /// Withholds the request in front, so that the other leases of the stream go on: it is never answered. False where
    /// the stream knows no other lease: then the stream itself has to tell.
    pub fn withhold(&mut self) -> bool {
        let Some(head) = self.requests.front() else { return false };
        let waiting = self.requests.iter().map(|request| &request.message);
        let alone = waiting.chain(&self.answered).all(|message| *message == head.message);
        if !alone {
            self.take_front();
        }
        !alone
    }

    fn take_front(&mut self) -> Option<Bytes> {
        let message = self.requests.pop_front()?.message;
        self.bytes -= message.len();
        Some(message)
    }

    /// Whether nothing waits for an answer.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// Whether so much waits that no more should be read: HTTP/2 then holds the client back.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.requests.len() >= MOST || self.bytes >= MOST_BYTES
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pending(messages: &[&'static [u8]]) -> Pending {
        let mut pending = Pending::default();
        messages.iter().for_each(|message| pending.push(Bytes::from_static(message)));
        pending
    }

    fn asked(pending: &mut Pending) -> Vec<Bytes> {
        std::iter::from_fn(|| pending.next_to_ask()).collect()
    }

    #[test]
    fn everything_unanswered_is_asked_again_in_order() {
        let mut pending = pending(&[b"a", b"b", b"c"]);
        assert_eq!(asked(&mut pending), ["a", "b", "c"]);
        assert_eq!(pending.answered(5, Zero::Final), Verdict::Deliver);
        pending.lost();
        assert_eq!(pending.answered(5, Zero::Final), Verdict::Stray, "nothing was asked of this stream");
        assert_eq!(asked(&mut pending), ["b", "c"]);
        assert_eq!(pending.answered(5, Zero::Final), Verdict::Deliver);
        assert_eq!(pending.answered(0, Zero::Final), Verdict::Deliver);
        assert!(pending.is_empty());
    }

    #[test]
    fn a_doubtful_zero_is_asked_once_more_and_then_believed() {
        let mut pending = pending(&[b"a"]);
        assert_eq!(asked(&mut pending), ["a"]);
        assert_eq!(pending.answered(0, Zero::Confirm), Verdict::Confirm);
        pending.lost();
        assert_eq!(asked(&mut pending), ["a"]);
        assert_eq!(pending.answered(0, Zero::Confirm), Verdict::Deliver);
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

        // Nobody waits, but the stream kept another lease alive just before.
        assert_eq!(pending.answered(5, Zero::Final), Verdict::Deliver);
        pending.push(Bytes::from_static(b"forbidden"));
        pending.push(Bytes::from_static(b"forbidden"));
        assert!(pending.withhold());
        assert!(pending.withhold());
        assert!(pending.is_empty());
        pending.push(Bytes::from_static(b"mine"));
        assert!(!pending.withhold(), "what is refused now is the only lease that there was");
    }
}
