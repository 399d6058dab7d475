//! Inflating a compressed unary request.
//!
//! Owns: the accounting of inflated bytes. Must not know: the method of the call. Invariant: inflated bytes
//! are charged to the same budgets as the compressed bytes, before the next step inflates more.

use bytes::Bytes;
use tokio::task::yield_now;

use keyward_downstream::request_memory::RequestMemoryCharge;
use keyward_etcd::refusal::Refusal;
use keyward_etcd::rpc::frame::PREFIX;
use keyward_etcd::rpc::inflate::{InflateFault, InflateStep, Inflater};

/// Inflates a compressed message into an uncompressed frame. `held` counts the compressed bytes until the
/// message is complete; the returned guard counts the inflated bytes.
///
/// # Errors
/// The inflated message is larger than `limit`, is not gzip, or a budget has no room for the message.
pub async fn inflate(
    compressed: Bytes,
    limit: usize,
    held: RequestMemoryCharge,
) -> Result<(Bytes, RequestMemoryCharge), Refusal> {
    let mut inflater = Inflater::new(compressed, limit);
    let mut inflated = held.sibling();
    let mut counted = 0;
    loop {
        match inflater.step().map_err(InflateFault::refusal)? {
            InflateStep::Added(count) => {
                if !inflated.charge(count) {
                    return Err(Refusal::TOO_MANY_REQUESTS);
                }
                counted += count;
                // Yield to other calls of this thread between the steps of a large message.
                yield_now().await;
            }
            InflateStep::Complete(frame) => {
                let rest = frame.len() - PREFIX - counted;
                let room = inflated.charge(rest);
                return if room { Ok((frame, inflated)) } else { Err(Refusal::TOO_MANY_REQUESTS) };
            }
        }
    }
}
