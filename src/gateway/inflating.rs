//! Inflating a unary request whose message is compressed.
//!
//! Owns: the accounting of inflated bytes. Must not know: which call it is. Invariant: the inflated bytes are counted in
//! the same budgets as the compressed ones, before the next step inflates more.

use bytes::Bytes;
use tokio::task::yield_now;

use crate::downstream::request_memory::Held;
use crate::refusal::Refusal;
use crate::rpc::frame::PREFIX;
use crate::rpc::inflate::{InflateFault, Inflater, Step};

/// The uncompressed frame of a compressed message. `held` counts the compressed bytes until the message is complete;
/// the returned one counts the inflated bytes.
///
/// # Errors
/// The inflated message is larger than `limit`, is not gzip, or a budget has no room for it.
pub async fn inflate(compressed: Bytes, limit: usize, held: Held) -> Result<(Bytes, Held), Refusal> {
    let mut inflater = Inflater::new(compressed, limit);
    let mut inflated = held.beside();
    let mut counted = 0;
    loop {
        match inflater.step().map_err(InflateFault::refusal)? {
            Step::Added(count) => {
                if !inflated.more(count) {
                    return Err(Refusal::TOO_MANY_REQUESTS);
                }
                counted += count;
                // Other calls of this thread go on between the steps of a large message.
                yield_now().await;
            }
            Step::Complete(frame) => {
                let rest = frame.len() - PREFIX - counted;
                let room = inflated.more(rest);
                return if room { Ok((frame, inflated)) } else { Err(Refusal::TOO_MANY_REQUESTS) };
            }
        }
    }
}
