//! Ordering writes behind the watches "from now" created earlier on the same connection.
//!
//! Owns: the selection of waiting calls, and the revision reported to a watch overtaken by a write. Must not
//! know: how a watch is registered, or how a call is sent. Invariants: reads and grants never wait,
//! streams do not come here, and a write waits no longer than
//! [`LONGEST`](keyward_downstream::watch_starts::LONGEST).

use crate::call::Call;
use crate::{ClientConnection, Gateway};
use keyward_etcd::identity::Revision;
use keyward_etcd::rpc::method::{Class, Effect, Method};
use keyward_etcd::rpc::schema::MessageId;

/// Waits until the call may go upstream. Returns true if the call had to wait.
pub async fn wait(call: &Call<'_>, effect: Effect) -> bool {
    let starts = &call.client.watch_starts;
    if starts.is_empty() || !makes_events(call.method, effect) {
        return false;
    }
    // Boxed, since few writes wait.
    Box::pin(starts.wait(|| known_revision(call.gateway, call.client))).await
}

/// True if the call may cause watch events. LeaseRevoke deletes keys; LeaseGrant has no keys yet.
fn makes_events(method: &Method, effect: Effect) -> bool {
    effect != Effect::ReadOnly
        && matches!(method.class, Class::Write | Class::Lock | Class::Lease)
        && method.body != MessageId::LeaseGrantRequest
}

/// The highest revision known to be reached by the cluster; 0 if no member has reported a revision.
fn known_revision(gateway: &Gateway, client: &ClientConnection) -> Revision {
    let members = gateway.upstream.members.snapshot.load();
    let told = members.members.iter().map(|member| member.known_revision());
    told.chain([client.floor.revision()]).max().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use keyward_etcd::rpc::method::METHODS;

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
