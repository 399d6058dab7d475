//! The room that an answer needs in the buffer of unread answers.
//!
//! Owns: the size of the need, by what is known of the answer. Must not know: the room that is free, or who
//! waits for room. Invariant: a need covers all bytes that Keyward and the member's stream may hold of the
//! answer at once.

use bytes::Bytes;

use keyward_etcd::refusal::Refusal;
use keyward_etcd::rpc::method::{Lane, Method, StreamingSides};
use keyward_upstream::answer::{MemberReply, ReplyRemainder};
use keyward_upstream::connection_load::stream_window;

/// Answers up to this size are not counted: the stream carrying such an answer costs about as much.
const SMALL: usize = 4 * 1024;

/// The size in bytes of a unit of room.
pub(super) const UNIT: usize = 1024;

/// The room needed by an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnreadRoomNeed {
    /// In units of [`UNIT`].
    pub(super) units: u32,
    /// The length of the whole answer in bytes, if announced.
    pub(super) length: Option<usize>,
}

impl UnreadRoomNeed {
    /// The room for a stream of unknown length on `lane`.
    #[must_use]
    pub fn of_stream(lane: Lane) -> Self {
        Self { units: units(stream_window(lane) as usize), length: None }
    }

    /// The room for `bytes` of an answer held whole.
    #[must_use]
    pub fn of_whole(bytes: usize) -> Self {
        Self { units: units(bytes), length: Some(bytes) }
    }

    /// The room for `copies` of a unary answer that is to be held whole; `None` for a small answer.
    ///
    /// # Errors
    /// The answer does not announce its length.
    pub fn of_copies(answer: &MemberReply, copies: usize) -> Result<Option<Self>, Refusal> {
        let length = match &answer.rest {
            ReplyRemainder::Whole(_) => answer.data.iter().map(Bytes::len).sum(),
            ReplyRemainder::More(_) => answer.announced().ok_or(Refusal::UNREADABLE_ANSWER)?,
        };
        let need = Self::of_whole(length.saturating_mul(copies));
        Ok((length > SMALL).then_some(need))
    }

    /// The room for an answer to `method` on `lane`; `None` for a small answer.
    #[must_use]
    pub fn of(answer: &MemberReply, method: &Method, lane: Lane) -> Option<Self> {
        let held: usize = answer.data.iter().map(Bytes::len).sum();
        let length = match (&answer.rest, method.stream) {
            (ReplyRemainder::Whole(_), _) => Some(held),
            // Only a unary answer is a single message, with a prefix announcing the length.
            (ReplyRemainder::More(_), StreamingSides::Unary) => answer.announced(),
            (ReplyRemainder::More(_), _) => None,
        };
        let largest = held + stream_window(lane) as usize;
        let bytes = length.map_or(largest, |length| length.min(largest));
        (bytes > SMALL).then(|| Self { units: units(bytes), length })
    }
}

/// Bytes in units of [`UNIT`], rounded up.
pub(super) fn units(bytes: usize) -> u32 {
    u32::try_from(bytes.div_ceil(UNIT)).unwrap_or(u32::MAX)
}
