//! The result of the pipeline, and its form as a response.
//!
//! Must not know: how a call is served.

use bytes::Bytes;

use crate::access_log::AccessRecord;
use crate::active_streams::Registration;
use crate::reply::{self, DownstreamResponse};
use crate::unread_answers::UnreadRoom;
use keyward_downstream::client_replies::ReplyReceiver;
use keyward_etcd::refusal::Refusal;
use keyward_upstream::answer::MemberReply;
use keyward_upstream::credentials::TokenUseGuard;

/// The result of the pipeline.
pub enum PipelineResult {
    /// A member's answer.
    Member(Box<MemberReply>, Option<TokenUseGuard>, Registration, Option<UnreadRoom>),
    /// A framed message produced by Keyward.
    Ours(Bytes),
    /// A stream produced by Keyward.
    Stream(ReplyReceiver),
}

impl PipelineResult {
    /// Returns the response; its end completes `record`.
    pub fn reply(self, record: AccessRecord) -> DownstreamResponse {
        match self {
            Self::Member(answer, in_use, registration, room) => {
                let broken = Refusal::REQUEST_TIMED_OUT_CONNECTION_LOST;
                reply::deliver(*answer, broken, in_use, registration, room, record)
            }
            Self::Ours(message) => reply::message(message, record),
            Self::Stream(said) => reply::stream(said, Refusal::SHUTTING_DOWN, record),
        }
    }
}
