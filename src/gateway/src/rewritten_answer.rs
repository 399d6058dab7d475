//! Unary answers rewritten for a client that reads another form than protobuf.
//!
//! Owns: the room for an answer held whole and for its rewritten form. Must not know: the form.
//! Invariants: an answer is rewritten whole or not shown; a rewritten answer is counted in the buffer of
//! unread answers until its client has read the answer.

use bytes::{Bytes, BytesMut};

use crate::call::{AnswerRewrite, Call, REWRITTEN_COPIES};
use crate::pipeline_result::PipelineResult;
use crate::unread_answers::UnreadRoom;
use crate::unread_need::UnreadRoomNeed;
use crate::whole_answer::hold_whole;
use keyward_etcd::refusal::Refusal;
use keyward_etcd::rpc::frame::{PREFIX, pieces, write_prefix};
use keyward_etcd::rpc::method::{Lane, StreamingSides};
use keyward_upstream::answer::MemberReply;

/// Rewrites the message of a unary answer; the prefix before the rewritten message stays gRPC's. Streams and
/// refusals stay as they are.
///
/// # Errors
/// The answer is too large to be held whole, breaks off, or cannot be read.
pub async fn rewritten(
    call: &Call<'_>,
    result: PipelineResult,
    rewrite: AnswerRewrite,
) -> Result<PipelineResult, Refusal> {
    if call.method.stream != StreamingSides::Unary {
        return Ok(result);
    }
    match result {
        PipelineResult::Ours(framed) => rewritten_frame(call, &framed, rewrite).map(PipelineResult::Ours),
        PipelineResult::Stream(_) => Ok(result),
        PipelineResult::Member(mut answer, in_use, registration, room) => {
            let room = hold_whole(call, &mut answer, room, REWRITTEN_COPIES).await?;
            if !answer.is_success() {
                return Ok(PipelineResult::Member(answer, in_use, registration, room));
            }
            let framed = answer.message().ok_or(Refusal::UNREADABLE_ANSWER)?;
            answer.data.clear();
            let written = rewritten_frame(call, &framed, rewrite)?;
            drop(framed);
            answer.data = pieces(written);
            let room = room_of(call, &answer, room).await?;
            Ok(PipelineResult::Member(answer, in_use, registration, room))
        }
    }
}

fn rewritten_frame(call: &Call<'_>, framed: &Bytes, rewrite: AnswerRewrite) -> Result<Bytes, Refusal> {
    let message = framed.get(PREFIX..).ok_or(Refusal::UNREADABLE_ANSWER)?;
    let mut written = BytesMut::zeroed(PREFIX);
    if !rewrite(call.method, message, &mut written) {
        tracing::warn!(method = call.method.path, "a member's answer cannot be rewritten");
        return Err(Refusal::UNREADABLE_ANSWER);
    }
    write_prefix(&mut written);
    Ok(written.freeze())
}

/// The room for the answer until the client has read the answer; `None` for a small answer. `room` is what
/// the answer has so far: bytes between two rooms would be counted nowhere.
async fn room_of(
    call: &Call<'_>,
    answer: &MemberReply,
    room: Option<UnreadRoom>,
) -> Result<Option<UnreadRoom>, Refusal> {
    let unread = &call.client.unread;
    let Some(need) = UnreadRoomNeed::of(answer, call.method, Lane::Unary) else { return Ok(None) };
    if let Some(room) = room.map(|room| room.resized(need)).or_else(|| unread.take(need)) {
        return Ok(Some(room));
    }
    unread.wait_beyond(need).await.ok_or(Refusal::TOO_MANY_REQUESTS).map(Some)
}
