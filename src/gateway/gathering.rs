//! Gathering the message of a unary request.
//!
//! Owns: how long and how large it may be. Must not know: which call it is. Invariant: every byte that is kept counts as held by its request
//! from when it came.

use std::future::poll_fn;
use std::pin::Pin;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http_body::Body as _;
use tokio::time::timeout;

use crate::downstream::request_memory::Held;
use crate::downstream::requests::RequestBody;
use crate::gateway::inflating::inflate;
use crate::gateway::{ANYBODYS, Gateway};
use crate::refusal::{Code, Refusal};
use crate::rpc::frame::{self, Payload};
use crate::rpc::inflate::Encoding;

/// How long the message of a request may take to come whole.
const ARRIVAL: Duration = Duration::from_secs(30);

/// The whole body of a request whose message is at most as large as allowed, and comes within 30 seconds.
///
/// # Errors
/// It did not come whole, is too large, or there is no room for it.
pub(super) async fn collect(gateway: &Gateway, body: RequestBody) -> Result<(Bytes, Held), Refusal> {
    let limit = gateway.config.load().limits.request_size;
    // What is held is everybody's: who does not end a request gives it back.
    let gathered = gather(body, limit).await;
    gathered.map_err(|refusal| match refusal.code() {
        Code::InvalidArgument => {
            gateway.metrics.not_canonical.inc();
            refusal
        }
        _ => refusal,
    })
}

/// The same of a request that is answered whoever makes it: a little.
///
/// # Errors
/// As [`collect`].
pub(super) async fn collect_of_anybody(body: RequestBody) -> Result<(Bytes, Held), Refusal> {
    gather(body, ANYBODYS).await
}

async fn gather(body: RequestBody, limit: usize) -> Result<(Bytes, Held), Refusal> {
    timeout(ARRIVAL, gathered(body, limit)).await.unwrap_or(Err(Refusal::NOTHING_SENT))
}

async fn gathered(body: RequestBody, limit: usize) -> Result<(Bytes, Held), Refusal> {
    let RequestBody { mut frames, encoding, mut held } = body;
    let mut first = Bytes::new();
    let mut more = BytesMut::new();
    while let Some(frame) = poll_fn(|cx| Pin::new(&mut frames).poll_frame(cx)).await {
        // The client went away: nobody reads this refusal.
        let Ok(data) = frame.map_err(|_| Refusal::CANCELED)?.into_data() else { continue };
        if !held.more(data.len()) {
            return Err(Refusal::TOO_MANY_REQUESTS);
        }
        match (first.is_empty(), more.is_empty()) {
            (true, _) => first = data,
            (false, true) => {
                more.extend_from_slice(&first);
                more.extend_from_slice(&data);
            }
            (false, false) => more.extend_from_slice(&data),
        }
        let so_far = if more.is_empty() { &first[..] } else { &more[..] };
        if let Some(got) = frame::announced(so_far).filter(|got| *got > limit) {
            return Err(Refusal::too_large(got, limit));
        }
        if so_far.len() > limit + frame::PREFIX {
            return Err(Refusal::not_canonical("bytes after the only frame"));
        }
    }
    let whole = if more.is_empty() { first } else { more.freeze() };
    if encoding == Encoding::Identity {
        return Ok((whole, held));
    }
    match frame::unary_payload(&whole, encoding).map_err(|fault| fault.refusal(None))? {
        Payload::Plain(_) => Ok((whole, held)),
        Payload::Gzip(compressed) => {
            drop(whole);
            // Boxed: few requests are compressed, and every request's future would be as large.
            Box::pin(inflate(compressed, limit, held)).await
        }
    }
}
