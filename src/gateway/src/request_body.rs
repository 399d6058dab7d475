//! Collecting the message of a unary request.
//!
//! Owns: the time and size limits of the message. Must not know: the method of the call. Invariant: every
//! buffered byte is charged to the request's memory account on arrival.

use std::future::poll_fn;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use futures_util::TryFutureExt as _;
use http_body::Body as _;
use tokio::time::{Instant, Sleep, sleep, timeout_at};

use crate::UNIDENTIFIED_REQUEST_SIZE;
use crate::call::Call;
use crate::inflating::inflate;
use keyward_downstream::client_body::ClientBodyError;
use keyward_downstream::request_memory::RequestMemoryCharge;
use keyward_downstream::request_messages::RequestBody;
use keyward_etcd::refusal::{Code, Refusal};
use keyward_etcd::rpc::encoding::Encoding;
use keyward_etcd::rpc::frame::{self, Payload};

/// How long a request's message may take to arrive completely.
const ARRIVAL: Duration = Duration::from_secs(30);

/// Collects the whole body of a request. The message must respect `limits.request_size` and arrive within 30
/// seconds.
///
/// # Errors
/// The message is incomplete or too large, or the memory budget has no room for the message.
pub(super) fn collect(
    call: &Call<'_>,
    body: RequestBody,
) -> impl Future<Output = Result<(Bytes, RequestMemoryCharge), Refusal>> {
    let limit = call.snapshot().config.limits.request_size;
    // Buffered bytes come from a shared budget, so an unfinished request must end after `ARRIVAL`.
    gather(body, limit).map_err(|refusal| match refusal.code() {
        Code::InvalidArgument => call.count_not_canonical(refusal),
        _ => refusal,
    })
}

/// Collects the body of a request answered without identifying the caller, up to 64 KiB.
///
/// # Errors
/// As [`collect`].
pub(super) async fn collect_of_anybody(body: RequestBody) -> Result<(Bytes, RequestMemoryCharge), Refusal> {
    gather(body, UNIDENTIFIED_REQUEST_SIZE).await
}

/// A compact copy of the request of a call that waits without limit, charged to the budget of waiting
/// requests.
///
/// # Errors
/// The budget has no room.
pub(super) fn hold_while_waiting(
    call: &Call<'_>,
    request: &[u8],
) -> Result<(Bytes, RequestMemoryCharge), Refusal> {
    let held = call.gateway.hold_waiting(call.client, request.len()).ok_or(Refusal::TOO_MANY_REQUESTS)?;
    // A slice of the read buffer would keep the whole buffer in memory.
    Ok((Bytes::copy_from_slice(request), held))
}

async fn gather(body: RequestBody, limit: usize) -> Result<(Bytes, RequestMemoryCharge), Refusal> {
    let RequestBody { mut frames, encoding, mut held } = body;
    let mut first = Bytes::new();
    let mut more = BytesMut::new();
    // Most requests have arrived with their header and need no timer.
    let mut too_late: Option<Pin<Box<Sleep>>> = None;
    let mut next = |cx: &mut Context<'_>| {
        if let Poll::Ready(frame) = Pin::new(&mut frames).poll_frame(cx) {
            return Poll::Ready(Ok(frame));
        }
        let too_late = too_late.get_or_insert_with(|| Box::pin(sleep(ARRIVAL)));
        too_late.as_mut().poll(cx).map(|()| Err(Refusal::NOTHING_SENT))
    };
    while let Some(frame) = poll_fn(&mut next).await? {
        let Ok(data) = frame.map_err(ClientBodyError::refusal)?.into_data() else { continue };
        if !held.charge(data.len()) {
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
            // Boxed: few requests are compressed, and an unboxed future would enlarge every request's future.
            let until = too_late.map_or_else(|| Instant::now() + ARRIVAL, |timer| timer.deadline());
            let inflated = timeout_at(until, Box::pin(inflate(compressed, limit, held)));
            inflated.await.unwrap_or(Err(Refusal::NOTHING_SENT))
        }
    }
}
