//! The peers that a connection proves by itself: the client's certificate, and the listener.
//!
//! Owns: the choice of these peers beside a call whose own evidence does not tell who calls. Must not know:
//! rules. Invariants (docs/decisions.md#d09): a verified certificate is a peer of every call that shows no
//! other proof, whatever `identify` and the rules about etcd users say; a login that no password proved is no
//! peer, and adds nothing to the connection's.

use std::sync::Arc;

use crate::ClientConnection;
use keyward_cluster::membership::AuthSetting;
use keyward_config::Identify;
use keyward_downstream::session::{Session, SessionProof};
use keyward_etcd::identity::Peer;

/// The peers proved by a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ConnectionPeers {
    /// The peer that gives the caller its name: the certificate, or else the listener.
    pub(super) peer: Peer,
    /// The listener beside a certificate that no way of identification takes.
    pub(super) also: Option<Peer>,
}

impl ConnectionPeers {
    /// The peers of a connection to a listener with these ways of identification.
    pub(super) fn of(ways: &[Identify], client: &ClientConnection) -> Self {
        let listener = Peer::Listener(Arc::clone(&client.listener.name));
        match &client.certificate {
            None => Self { peer: listener, also: None },
            Some(certificate) => {
                let also = (!ways.contains(&Identify::Certificate)).then_some(listener);
                Self { peer: certificate.clone(), also }
            }
        }
    }

    /// The peers of a call identified by nothing but the listener; `None` without a certificate.
    pub(super) fn beside_listener(ways: &[Identify], client: &ClientConnection) -> Option<Self> {
        client.certificate.as_ref().map(|_| Self::of(ways, client))
    }
}

/// True if no password proved the session's user (docs/decisions.md#d11). With auth on, etcd sees the
/// password before it serves the call.
pub(super) fn is_claim(session: &Session, auth: AuthSetting) -> bool {
    matches!(session.proof, SessionProof::None) && auth != AuthSetting::On
}
