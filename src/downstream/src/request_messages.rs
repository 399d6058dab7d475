//! The client's side of a call: the request body, and the messages of a stream terminated by Keyward.
//!
//! Owns: splitting the body into messages, and inflating compressed messages. Must not know the messages'
//! meaning.
//! Invariants: [`RequestMessages::next`] is cancel-safe; bytes read but not returned stay. A message is at
//! most as large as allowed, compressed and inflated. The bytes of an incomplete message count as held by the
//! request. A stream with many messages yields to other tasks regularly.

use std::future::poll_fn;
use std::pin::Pin;

use bytes::Bytes;
use http::HeaderMap;
use http_body::Body as _;
use tokio::task::yield_now;

use crate::client_body::{ClientBody, ClientBodyError};
use crate::request_memory::RequestMemoryCharge;
use keyward_etcd::refusal::Refusal;
use keyward_etcd::rpc::encoding::Encoding;
use keyward_etcd::rpc::frame::{FrameReader, PREFIX, Payload};
use keyward_etcd::rpc::inflate::{InflateStep, Inflater};

/// The body of a request, and the encoding of its messages.
pub struct RequestBody {
    /// The body's frames.
    pub frames: ClientBody,
    /// The call's encoding.
    pub encoding: Encoding,
    /// Accounts for the memory of bytes read from the body.
    pub held: RequestMemoryCharge,
}

/// Messages returned in a row before the stream yields to other tasks.
const IN_A_ROW: usize = 64;

impl RequestBody {
    /// The body `frames` of a request with the given headers. `held` is empty at first.
    ///
    /// # Errors
    /// The client's message encoding is not supported by etcd.
    pub fn of(headers: &HeaderMap, frames: ClientBody, held: RequestMemoryCharge) -> Result<Self, Refusal> {
        Ok(Self { frames, encoding: Encoding::of(headers)?, held })
    }
}

/// One item of a client's request stream.
#[derive(Debug)]
pub enum ClientRequestItem {
    /// A message, without its frame header.
    Message(Bytes),
    /// Half-close: no more messages follow.
    End,
    /// The received bytes are not a valid message.
    Bad(Refusal),
    /// The client disconnected or reset the stream.
    Gone,
}

/// A client's stream of messages.
pub struct RequestMessages {
    body: ClientBody,
    reader: FrameReader,
    largest: usize,
    /// A compressed message, completely received and being inflated.
    inflater: Option<Box<Inflater>>,
    held: RequestMemoryCharge,
    /// Messages returned since the last yield.
    in_a_row: usize,
}

impl RequestMessages {
    /// The messages in `body`, of at most `largest` bytes each.
    #[must_use]
    pub fn new(body: RequestBody, largest: usize) -> Self {
        let reader = FrameReader::with_encoding(largest, body.encoding);
        Self { body: body.frames, reader, largest, inflater: None, held: body.held, in_a_row: 0 }
    }

    /// The next item of the stream. Cancel-safe.
    pub async fn next(&mut self) -> ClientRequestItem {
        if self.in_a_row >= IN_A_ROW {
            self.in_a_row = 0;
            yield_now().await;
        }
        let asked = self.next_without_yield().await;
        self.in_a_row += 1;
        asked
    }

    /// Same as [`RequestMessages::next`] without yielding to other tasks: for messages already received.
    /// Cancel-safe.
    pub async fn next_without_yield(&mut self) -> ClientRequestItem {
        loop {
            if let Some(inflater) = &mut self.inflater {
                match inflater.step() {
                    Ok(InflateStep::Added(count)) => {
                        if !self.held.charge(count) {
                            return ClientRequestItem::Bad(Refusal::TOO_MANY_REQUESTS);
                        }
                        yield_now().await;
                    }
                    Ok(InflateStep::Complete(frame)) => {
                        self.inflater = None;
                        self.held.shrink(self.reader.held());
                        return ClientRequestItem::Message(frame.slice(PREFIX..));
                    }
                    Err(fault) => return ClientRequestItem::Bad(fault.refusal()),
                }
                continue;
            }
            match self.reader.next_payload() {
                Some(Ok(Payload::Plain(message))) => return ClientRequestItem::Message(message),
                Some(Ok(Payload::Gzip(compressed))) => {
                    self.inflater = Some(Box::new(Inflater::new(compressed, self.largest)));
                    continue;
                }
                Some(Err(fault)) => return ClientRequestItem::Bad(fault.refusal(None)),
                None => {}
            }
            match poll_fn(|cx| Pin::new(&mut self.body).poll_frame(cx)).await {
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data() {
                        // Bytes held before and consumed by now no longer count.
                        self.held.shrink(self.reader.held());
                        if !self.held.charge(data.len()) {
                            return ClientRequestItem::Bad(Refusal::TOO_MANY_REQUESTS);
                        }
                        self.reader.push(data);
                    }
                }
                Some(Err(ClientBodyError::ClientGone)) => return ClientRequestItem::Gone,
                Some(Err(ClientBodyError::Refused(refusal))) => return ClientRequestItem::Bad(refusal),
                None => {
                    let whole = self.reader.finish();
                    return whole.map_or_else(
                        |fault| ClientRequestItem::Bad(fault.refusal(None)),
                        |()| ClientRequestItem::End,
                    );
                }
            }
        }
    }
}
