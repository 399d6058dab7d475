//! Ends bindings of the policy at their time.
//!
//! Owns: waiting for the next end. Must not know: rules. Invariant: at the end of a binding the rules are
//! published again, without the binding, so that every live stream is decided again.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::time::sleep;

use crate::config::Config;
use crate::credentials::Credentials;
use crate::gateway::caller::Identities;
use crate::published::Published;

/// The clock of the system may be set back: the wait for an end is divided.
const LONGEST_WAIT: Duration = Duration::from_secs(60);

/// Publishes the rules again at the end of each binding, for ever.
pub(super) async fn end_bindings(
    config: Arc<Published<Config>>,
    identities: Arc<Published<Identities>>,
    credentials: Arc<Credentials>,
) {
    let mut changes = identities.changes();
    loop {
        let end = identities.load().next_end();
        let left = end.map(|end| end.duration_since(SystemTime::now()).unwrap_or_default());
        if left == Some(Duration::ZERO) {
            let made = Identities::of(&config.load(), &credentials, SystemTime::now());
            identities.publish(made);
            tracing::info!("a binding of the policy has ended");
            continue;
        }
        let wait = async {
            match left {
                Some(left) => sleep(left.min(LONGEST_WAIT)).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = wait => {}
            changed = changes.changed() => if changed.is_err() { return },
        }
    }
}
