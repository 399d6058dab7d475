//! HTTP/2 streams as both ends of these tests use them.
//!
//! Owns: sending with respect for flow control, reading gRPC messages, and how a stream ended. Must not know who asks
//! whom.

use bytes::Bytes;
use h2::{Reason, RecvStream, SendStream};
use http::HeaderMap;
use keyward::refusal::{Code, Status};
use keyward::rpc::frame::{FrameReader, encode};

const LARGEST: usize = 256 << 20;

/// How a stream ended, as its reader sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// With a status, and whether it stood in the header (Trailers-Only).
    Status(Status, Form),
    /// Without one.
    NoStatus,
    /// Reset by the peer.
    Reset(Reason),
    /// The connection went away.
    Gone,
}

/// Where a status stood.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    Header,
    Trailers,
}

impl End {
    pub(crate) fn code(&self) -> Option<Code> {
        match self {
            Self::Status(status, _) => Some(status.code),
            _ => None,
        }
    }

    /// Code and text.
    pub(crate) fn told(&self) -> (Code, &str) {
        match self {
            Self::Status(status, _) => (status.code, &status.message),
            other => panic!("no status but {other:?}"),
        }
    }
}

pub(crate) fn end_of(error: &h2::Error) -> End {
    match error.reason() {
        Some(reason) if error.is_reset() => End::Reset(reason),
        _ => End::Gone,
    }
}

/// The receiving half of a stream.
pub(crate) struct Messages {
    body: RecvStream,
    reader: FrameReader,
    end: Option<End>,
}

impl Messages {
    pub(crate) fn new(body: RecvStream) -> Self {
        Self { body, reader: FrameReader::new(LARGEST), end: None }
    }

    /// The next message; `Err` is the end.
    pub(crate) async fn next(&mut self) -> Result<Bytes, End> {
        loop {
            if let Some(message) = self.reader.next() {
                return Ok(message.expect("frames are sound"));
            }
            if let Some(end) = &self.end {
                return Err(end.clone());
            }
            match self.body.data().await {
                Some(Ok(data)) => {
                    // The window may be gone with its connection.
                    drop(self.body.flow_control().release_capacity(data.len()));
                    self.reader.push(data);
                }
                Some(Err(error)) => self.end = Some(end_of(&error)),
                None => self.end = Some(self.trailers().await),
            }
        }
    }

    async fn trailers(&mut self) -> End {
        match self.body.trailers().await {
            Ok(Some(trailers)) => of_headers(&trailers, Form::Trailers),
            Ok(None) => End::NoStatus,
            Err(error) => end_of(&error),
        }
    }
}

pub(crate) fn of_headers(headers: &HeaderMap, form: Form) -> End {
    Status::from_headers(headers).map_or(End::NoStatus, |status| End::Status(status, form))
}

/// Sends a message, waiting for the peer's window. `Err` when the peer reset the stream or is gone.
pub(crate) async fn say(stream: &mut SendStream<Bytes>, message: &[u8]) -> Result<(), End> {
    say_framed(stream, encode(message), false).await
}

/// Sends bytes as they are.
pub(crate) async fn say_framed(stream: &mut SendStream<Bytes>, mut framed: Bytes, last: bool) -> Result<(), End> {
    while !framed.is_empty() {
        stream.reserve_capacity(framed.len());
        let granted = std::future::poll_fn(|cx| stream.poll_capacity(cx)).await;
        let granted = granted.ok_or(End::Gone)?.map_err(|error| end_of(&error))?;
        let part = framed.split_to(granted.min(framed.len()));
        let end = last && framed.is_empty();
        stream.send_data(part, end).map_err(|error| end_of(&error))?;
    }
    Ok(())
}
