//! The linearizable read that tells a history that went back from a lagging member.
//!
//! Owns: the read, and its translation into an input of the hub. Must not know: the reason for the read, the
//! consequence of its outcome. Invariant: the revision floor of the client's connection is lowered only by a
//! read that succeeded.

use std::sync::Arc;

use bytes::Bytes;

use crate::watch::hub::{HubInput, StreamLoss, UpstreamStreamId, WatchKey};
use crate::watch::upstream_stream::{WatchRoute, login_loss, refuses_credential};
use keyward_cluster::membership::Member;
use keyward_etcd::identity::Revision;
use keyward_upstream::own_requests::{MemberRevision, ReadError, linearizable_revision};

/// The outcome of a read: a connection was available, or a limit left no room.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum CheckConnection {
    Found,
    None,
}

/// A check of the cluster's revision for the hub.
pub(super) struct RevisionCheck {
    /// The watch to name in the answer.
    pub(super) watch: WatchKey,
    /// The stream to name in the answer.
    pub(super) stream: UpstreamStreamId,
    /// The key to read.
    pub(super) key: Bytes,
    /// The stream's member, which is asked.
    pub(super) member: Arc<Member>,
}

impl RevisionCheck {
    /// Reads the revision as the user of `route`.
    pub(super) async fn read(self, route: WatchRoute) -> (HubInput, CheckConnection) {
        let Self { watch, stream, key, member } = self;
        let WatchRoute { stream: route, floor, .. } = route;
        let shown = floor.revision();
        let revealed = linearizable_revision(&route.upstream, &route.user, &member, &key).await;
        if let Ok(whole) = &revealed {
            floor.lower_to(shown, whole.revision);
        }
        let room = match revealed {
            Err(ReadError::NoRoom) => CheckConnection::None,
            _ => CheckConnection::Found,
        };
        let failed = |why| HubInput::CheckFailed { watch, stream, why };
        let input = match revealed {
            Ok(MemberRevision { header, revision }) => {
                HubInput::Checked { watch, stream, header, revision: Revision(revision) }
            }
            Err(ReadError::Login(failure)) => failed(login_loss(&failure)),
            Err(ReadError::Refused(status)) if refuses_credential(&status) => {
                failed(StreamLoss::Denied(status.cancel_reason()))
            }
            Err(ReadError::Refused(_) | ReadError::Lost | ReadError::TooLarge | ReadError::NoRoom) => {
                failed(StreamLoss::Upstream)
            }
        };
        (input, room)
    }
}
