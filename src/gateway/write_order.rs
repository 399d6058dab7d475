//! A write goes upstream behind the watches "from now" that its client asked for before it on the same connection.
//!
//! Owns: which calls are such writes, and how far the cluster is known to be when one goes ahead all the same. Must not know: how a
//! watch is registered, or how a call is sent. Invariants: reads, keepalives and grants never wait; a write waits no longer than
//! [`LONGEST`](crate::downstream::watch_starts::LONGEST), nor past its own deadline.

use tokio::time::{Instant, timeout_at};

use crate::gateway::{Client, Gateway};
use crate::identity::Revision;
use crate::rpc::method::{Class, Effect, Method};
use crate::rpc::schema::MessageId;

/// Waits until the call may go upstream. Whether there was anything to wait for.
pub async fn wait(
    gateway: &Gateway,
    client: &Client,
    method: &Method,
    effect: Effect,
    deadline: Option<Instant>,
) -> bool {
    if !makes_events(method, effect) {
        return false;
    }
    let waiting = client.watch_starts.wait(|| known_revision(gateway, client));
    match deadline {
        None => waiting.await,
        // A call that is too late is refused in its own place.
        Some(deadline) => timeout_at(deadline, waiting).await.unwrap_or(true),
    }
}

/// Whether a watch may see what the call does. A revoked lease deletes its keys; a granted one has none.
fn makes_events(method: &Method, effect: Effect) -> bool {
    effect != Effect::ReadOnly
        && matches!(method.class, Class::Write | Class::Lock | Class::Lease)
        && method.body != MessageId::LeaseGrantRequest
}

/// The highest revision that the cluster is known to have reached; 0 where no member has told.
fn known_revision(gateway: &Gateway, client: &Client) -> Revision {
    let members = gateway.door.members.snapshot.load();
    let told = members.members.iter().map(|member| member.known_revision());
    told.chain([client.floor.revision()]).max().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use crate::rpc::method::METHODS;

    use super::*;

    #[test]
    fn only_what_changes_keys_waits() {
        let waiting = METHODS.iter().filter(|method| makes_events(method, method.effect));
        let names: Vec<&str> = waiting.map(|method| method.name).collect();
        assert_eq!(
            names,
            [
                "Put",
                "Txn",
                "DeleteRange",
                "LeaseKeepAlive",
                "LeaseRevoke",
                "Lock",
                "Unlock",
                "Campaign",
                "Proclaim",
                "Resign"
            ]
        );
    }
}
