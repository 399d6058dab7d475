//! What a client says on a stream that we answer ourselves.
//!
//! Owns: taking its body apart into messages. Must not know what they mean. Invariant: [`Requests::next`] is
//! cancel-safe; what was read and not taken stays.

use std::future::poll_fn;
use std::pin::Pin;

use bytes::Bytes;
use http_body::Body as _;
use hyper::body::Incoming;

use crate::refusal::Refusal;
use crate::rpc::frame::FrameReader;

/// One thing that a client said.
#[derive(Debug)]
pub enum Asked {
    /// A message, without its frame.
    Message(Bytes),
    /// It will say nothing more: a half-close.
    End,
    /// What it sent is no message.
    Bad(Refusal),
    /// It went away.
    Gone,
}

/// A client's stream of messages.
pub struct Requests {
    body: Incoming,
    reader: FrameReader,
}

impl Requests {
    /// The messages in `body`, of at most `largest` bytes each.
    #[must_use]
    pub fn new(body: Incoming, largest: usize) -> Self {
        Self { body, reader: FrameReader::new(largest) }
    }

    /// What it says next. Cancel-safe.
    pub async fn next(&mut self) -> Asked {
        loop {
            match self.reader.next() {
                Some(Ok(message)) => return Asked::Message(message),
                Some(Err(fault)) => return Asked::Bad(fault.refusal(None)),
                None => {}
            }
            match poll_fn(|cx| Pin::new(&mut self.body).poll_frame(cx)).await {
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data() {
                        self.reader.push(data);
                    }
                }
                Some(Err(_)) => return Asked::Gone,
                None => {
                    let whole = self.reader.finish();
                    return whole.map_or_else(|fault| Asked::Bad(fault.refusal(None)), |()| Asked::End);
                }
            }
        }
    }
}
