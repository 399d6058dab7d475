//! What a client says: the body of its request, and the messages of a stream that we answer ourselves.
//!
//! Owns: taking its body apart into messages, and inflating those that are compressed. Must not know what they mean.
//! Invariants: [`Requests::next`] is cancel-safe; what was read and not taken stays. A message is at most as large as
//! allowed, compressed and inflated; what is read of one that is not whole counts as held by its request. A stream that says much at once
//! gives other tasks their turn in between.

use std::future::poll_fn;
use std::pin::Pin;

use bytes::Bytes;
use http::HeaderMap;
use http_body::Body as _;
use hyper::body::Incoming;
use tokio::task::yield_now;

use crate::downstream::request_memory::Held;
use crate::refusal::Refusal;
use crate::rpc::frame::{FrameReader, PREFIX, Payload};
use crate::rpc::inflate::{Encoding, Inflater, Step};

/// The body of a request, and how its messages are compressed.
pub struct RequestBody {
    /// The frames.
    pub frames: Incoming,
    /// The call's encoding.
    pub encoding: Encoding,
    /// Counts what is read of it.
    pub held: Held,
}

/// Messages that a stream says in a row before other tasks have their turn.
const IN_A_ROW: usize = 64;

impl RequestBody {
    /// The body `frames` of a request with these headers. `held` holds nothing yet.
    ///
    /// # Errors
    /// The client compresses its messages in a way that etcd does not take.
    pub fn of(headers: &HeaderMap, frames: Incoming, held: Held) -> Result<Self, Refusal> {
        Ok(Self { frames, encoding: Encoding::of(headers)?, held })
    }
}

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
    largest: usize,
    /// A compressed message that was received whole and is being inflated.
    inflater: Option<Inflater>,
    held: Held,
    /// Messages since others had their turn.
    in_a_row: usize,
}

impl Requests {
    /// The messages in `body`, of at most `largest` bytes each.
    #[must_use]
    pub fn new(body: RequestBody, largest: usize) -> Self {
        let reader = FrameReader::with_encoding(largest, body.encoding);
        Self { body: body.frames, reader, largest, inflater: None, held: body.held, in_a_row: 0 }
    }

    /// What it says next. Cancel-safe.
    pub async fn next(&mut self) -> Asked {
        if self.in_a_row >= IN_A_ROW {
            self.in_a_row = 0;
            yield_now().await;
        }
        let asked = self.next_at_once().await;
        self.in_a_row += 1;
        asked
    }

    /// The same, whoever waits: for what has arrived already. Cancel-safe.
    pub async fn next_at_once(&mut self) -> Asked {
        loop {
            if let Some(inflater) = &mut self.inflater {
                match inflater.step() {
                    Ok(Step::Added(count)) => {
                        if !self.held.more(count) {
                            return Asked::Bad(Refusal::TOO_MANY_REQUESTS);
                        }
                        yield_now().await;
                    }
                    Ok(Step::Complete(frame)) => {
                        self.inflater = None;
                        self.held.shrink(self.reader.held());
                        return Asked::Message(frame.slice(PREFIX..));
                    }
                    Err(fault) => return Asked::Bad(fault.refusal()),
                }
                continue;
            }
            match self.reader.next_payload() {
                Some(Ok(Payload::Plain(message))) => return Asked::Message(message),
                Some(Ok(Payload::Gzip(compressed))) => {
                    self.inflater = Some(Inflater::new(compressed, self.largest));
                    continue;
                }
                Some(Err(fault)) => return Asked::Bad(fault.refusal(None)),
                None => {}
            }
            match poll_fn(|cx| Pin::new(&mut self.body).poll_frame(cx)).await {
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data() {
                        // What was held before and is read by now counts no more.
                        self.held.shrink(self.reader.held());
                        if !self.held.more(data.len()) {
                            return Asked::Bad(Refusal::TOO_MANY_REQUESTS);
                        }
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
