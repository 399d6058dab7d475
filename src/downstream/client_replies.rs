//! Replies of a stream terminated by Keyward.
//!
//! Owns: the channel from the stream's task to the response body. Must not know the messages' meaning.
//! Invariants: the queue is short, so a client that does not read delays only the client's own stream. The
//! task is notified when the client disconnects.

use std::any::Any;

use bytes::Bytes;
use tokio::sync::mpsc;

use crate::refusal::Status;

/// Messages queued between a stream's task and HTTP/2's own buffer. With a full queue the task waits and
/// stops reading upstream.
const WAITING: usize = 4;

/// An item of the reply stream.
#[derive(Debug)]
pub enum ClientReply {
    /// A framed message, and a guard kept until HTTP/2 has taken the message.
    Message(Bytes, TakenGuard),
    /// The end of the stream, with the final status: a member's, or a refusal of Keyward's.
    End(Status),
}

/// A guard; dropping the guard signals that the message was taken.
pub type TakenGuard = Option<Box<dyn Any>>;

/// The client has disconnected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the client is gone")]
pub struct ClientGone;

/// Reserved space in the queue for a message.
pub struct ReplySlot<'a>(mpsc::Permit<'a, ClientReply>);

impl ReplySlot<'_> {
    /// Sends a framed message.
    pub fn send(self, framed: Bytes, keep: TakenGuard) {
        self.0.send(ClientReply::Message(framed, keep));
    }
}

/// The sending side of the stream.
#[derive(Clone, Debug)]
pub struct ReplySender(mpsc::Sender<ClientReply>);

impl ReplySender {
    /// A sender and a receiver.
    #[must_use]
    pub fn channel() -> (Self, mpsc::Receiver<ClientReply>) {
        let (sender, receiver) = mpsc::channel(WAITING);
        (Self(sender), receiver)
    }

    /// Sends a framed message, waiting for queue space. The message is not sent if the future is dropped
    /// first.
    ///
    /// # Errors
    /// [`ClientGone`].
    pub async fn say(&self, framed: Bytes) -> Result<(), ClientGone> {
        self.0.send(ClientReply::Message(framed, None)).await.map_err(|_| ClientGone)
    }

    /// Waits until the queue has space for a message. Cancel-safe.
    ///
    /// # Errors
    /// [`ClientGone`].
    pub async fn room(&self) -> Result<ReplySlot<'_>, ClientGone> {
        self.0.reserve().await.map(ReplySlot).map_err(|_| ClientGone)
    }

    /// True if a sent message has not been taken yet.
    #[must_use]
    pub fn is_behind(&self) -> bool {
        self.0.capacity() < WAITING
    }

    /// Waits until all sent messages have been taken. Cancel-safe.
    ///
    /// # Errors
    /// [`ClientGone`].
    pub async fn all_taken(&self) -> Result<(), ClientGone> {
        self.0.reserve_many(WAITING).await.map(drop).map_err(|_| ClientGone)
    }

    /// Sends the end of the stream.
    pub async fn end(self, status: Status) {
        if self.0.send(ClientReply::End(status)).await.is_err() {
            tracing::trace!("nobody heard a stream's end");
        }
    }

    /// Waits until the client disconnects. Cancel-safe.
    pub async fn gone(&self) {
        self.0.closed().await;
    }
}
