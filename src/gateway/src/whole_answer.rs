//! Holding a large answer whole, for a decision on what stands at its end, or before its keys.
//!
//! Owns: the room for the answer in the buffer of unread answers. Must not know: the decision. Invariant: an
//! answer held whole is counted in the buffer, with its copies, until its room goes on with the answer.

use crate::call::Call;
use crate::unread_answers::UnreadRoom;
use crate::unread_need::UnreadRoomNeed;
use keyward_etcd::refusal::Refusal;
use keyward_upstream::answer::{MemberReply, ReplyRemainder};

/// Reads the rest of an answer. The returned room counts `copies` of the answer: `room`, if that is enough,
/// else other room. An answer held whole before keeps its room.
///
/// # Errors
/// The answer is too large to be held whole, or breaks off.
pub async fn hold_whole(
    call: &Call<'_>,
    answer: &mut MemberReply,
    room: Option<UnreadRoom>,
    copies: usize,
) -> Result<Option<UnreadRoom>, Refusal> {
    let ReplyRemainder::More(_) = answer.rest else { return Ok(room) };
    let bytes = answer.announced().ok_or(Refusal::UNREADABLE_ANSWER)?;
    let need = UnreadRoomNeed::of_whole(bytes.saturating_mul(copies));
    if !call.client.unread.has_limit_above(need) {
        return Err(Refusal::ANSWER_TOO_LARGE);
    }
    let room = match room.filter(|room| room.covers(need)) {
        Some(room) => room,
        None => call.client.unread.wait_beyond(need).await.ok_or(Refusal::TOO_MANY_REQUESTS)?,
    };
    if let Err(lost) = answer.read_rest().await {
        let on_loss = answer.on_loss.take().filter(|_| lost.with_connection);
        return Err(on_loss.map_or(Refusal::REQUEST_TIMED_OUT_CONNECTION_LOST, |on_loss| on_loss()));
    }
    Ok(Some(room))
}
