//! What a stream that we answer ourselves says to its client.
//!
//! Owns: the channel between the stream's task and the reply's body. Must not know what is said. Invariants: few
//! messages wait, so that a client that does not read holds its own stream back and nobody else's; the task learns
//! when the client is gone.

use std::any::Any;

use bytes::Bytes;
use tokio::sync::mpsc;

use crate::refusal::Status;

/// Messages between a stream's task and HTTP/2's own buffer. When full, the task waits: it stops reading upstream.
const WAITING: usize = 4;

/// One thing said.
#[derive(Debug)]
pub enum Said {
    /// A framed message, and what is kept until HTTP/2 has taken it.
    Message(Bytes, Keep),
    /// The end, with its status.
    End(Status),
}

/// Something whose drop tells that a message was taken.
pub type Keep = Option<Box<dyn Any>>;

/// The client is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the client is gone")]
pub struct Gone;

/// Room for one message.
pub struct Room<'a>(mpsc::Permit<'a, Said>);

impl Room<'_> {
    /// Says a framed message.
    pub fn say(self, framed: Bytes, keep: Keep) {
        self.0.send(Said::Message(framed, keep));
    }
}

/// The stream's side.
#[derive(Clone, Debug)]
pub struct Speaker(mpsc::Sender<Said>);

impl Speaker {
    /// A pair of ends.
    #[must_use]
    pub fn channel() -> (Self, mpsc::Receiver<Said>) {
        let (sender, receiver) = mpsc::channel(WAITING);
        (Self(sender), receiver)
    }

    /// Says a framed message, waiting until there is room. Not said when dropped before.
    ///
    /// # Errors
    /// [`Gone`].
    pub async fn say(&self, framed: Bytes) -> Result<(), Gone> {
        self.0.send(Said::Message(framed, None)).await.map_err(|_| Gone)
    }

    /// Waits until there is room for one more. Cancel-safe.
    ///
    /// # Errors
    /// [`Gone`].
    pub async fn room(&self) -> Result<Room<'_>, Gone> {
        self.0.reserve().await.map(Room).map_err(|_| Gone)
    }

    /// Whether something that was said was not taken yet.
    #[must_use]
    pub fn is_behind(&self) -> bool {
        self.0.capacity() < WAITING
    }

    /// Waits until all that was said was taken. Cancel-safe.
    ///
    /// # Errors
    /// [`Gone`].
    pub async fn taken(&self) -> Result<(), Gone> {
        self.0.reserve_many(WAITING).await.map(drop).map_err(|_| Gone)
    }

    /// Says the end.
    pub async fn end(self, status: Status) {
        if self.0.send(Said::End(status)).await.is_err() {
            tracing::trace!("nobody heard a stream's end");
        }
    }

    /// Waits until the client is gone. Cancel-safe.
    pub async fn gone(&self) {
        self.0.closed().await;
    }
}
