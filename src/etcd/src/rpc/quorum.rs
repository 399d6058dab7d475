//! Calls answered by a member from its own store, without a leader or a quorum.
//!
//! Owns: the classification, from the method's row and the request's body. Must not know: members, versions.
//! Invariant: a call is listed here only if real servers of every supported version were seen to answer it
//! without a leader. `LeaseLeases` is left out although etcd answers it: the answer does not tell its age, so
//! a client could see fewer leases than before.

use super::body_shape;
use super::method::Method;
use super::scan::{WireFields, WireValue};
use super::schema::MessageId;

/// A call's need for a quorum of the cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QuorumNeed {
    /// The call is proposed to raft, or waits for the leader's read index.
    Always,
    /// The member's own store is enough.
    Never,
    /// The member's own store is enough only before etcd 3.5, where every member list is the member's own
    /// view.
    SinceLinearizableList,
}

/// Returns the need of a call for a quorum.
#[must_use]
pub fn need(method: &Method, body: &[u8]) -> QuorumNeed {
    match method.body {
        MessageId::RangeRequest | MessageId::TxnRequest if body_shape::is_local(method, body) => {
            QuorumNeed::Never
        }
        MessageId::SnapshotRequest
        | MessageId::StatusRequest
        | MessageId::HashRequest
        | MessageId::HashKVRequest => QuorumNeed::Never,
        MessageId::MemberListRequest if is_linearizable_list(body) => QuorumNeed::SinceLinearizableList,
        MessageId::MemberListRequest => QuorumNeed::Never,
        _ => QuorumNeed::Always,
    }
}

/// Returns `MemberListRequest.linearizable`; true for an unreadable body.
fn is_linearizable_list(body: &[u8]) -> bool {
    WireFields::new(body)
        .any(|field| field.map_or(true, |field| field.number == 1 && field.value != WireValue::Varint(0)))
}

#[cfg(test)]
mod tests {
    use prost::Message as _;

    use super::*;
    use crate::pb::etcdserverpb::{MemberListRequest, RangeRequest};
    use crate::rpc::method::{METHODS, lookup};

    #[test]
    fn only_calls_on_a_members_own_store_need_no_quorum() {
        let of = |path: &str, body: &[u8]| need(lookup(path).unwrap(), body);
        let range = |serializable| RangeRequest { key: "k".into(), serializable, ..RangeRequest::default() };
        for path in ["/etcdserverpb.KV/Range", "/etcdserverpb.KV/RangeStream"] {
            assert_eq!(of(path, &range(true).encode_to_vec()), QuorumNeed::Never, "{path}");
            assert_eq!(of(path, &range(false).encode_to_vec()), QuorumNeed::Always, "{path}");
        }
        let list = |linearizable| MemberListRequest { linearizable }.encode_to_vec();
        assert_eq!(of("/etcdserverpb.Cluster/MemberList", &list(false)), QuorumNeed::Never);
        assert_eq!(of("/etcdserverpb.Cluster/MemberList", &list(true)), QuorumNeed::SinceLinearizableList);
        assert_eq!(of("/etcdserverpb.Cluster/MemberList", &[9]), QuorumNeed::SinceLinearizableList);
        let alone: Vec<&str> = METHODS
            .iter()
            .filter(|method| method.body != MessageId::TxnRequest && need(method, b"") == QuorumNeed::Never)
            .map(|method| method.name)
            .collect();
        assert_eq!(alone, ["MemberList", "Status", "Hash", "HashKV", "Snapshot"]);
    }
}
