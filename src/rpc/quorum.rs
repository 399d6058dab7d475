//! Which calls a member answers from its own store, with no leader and no quorum.
//!
//! Owns: that question, answered from the method's row and the request's body. Must not know: members, versions. Invariant: a call is
//! named here only if real servers of every supported version were seen to answer it without a leader. `LeaseLeases` is left
//! out though etcd answers it: its answer does not tell how old it is, so a client could see fewer leases than it was shown.

use super::method::Method;
use super::scan::{Fields, Value};
use super::schema::MessageId;
use super::shape;

/// Whether a member needs a quorum of the cluster to answer a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QuorumNeed {
    /// The call is proposed to raft, or waits for the leader's read index.
    Always,
    /// The member's own store is enough.
    Never,
    /// The member's own store is enough only before etcd 3.5, where every member list is the member's own view.
    SinceLinearizableList,
}

/// What this very call needs.
#[must_use]
pub fn need(method: &Method, body: &[u8]) -> QuorumNeed {
    match method.body {
        MessageId::RangeRequest | MessageId::TxnRequest if shape::is_local(method, body) => QuorumNeed::Never,
        MessageId::SnapshotRequest
        | MessageId::StatusRequest
        | MessageId::HashRequest
        | MessageId::HashKVRequest => QuorumNeed::Never,
        MessageId::MemberListRequest if is_linearizable_list(body) => QuorumNeed::SinceLinearizableList,
        MessageId::MemberListRequest => QuorumNeed::Never,
        _ => QuorumNeed::Always,
    }
}

/// `MemberListRequest.linearizable`; a body that cannot be read is taken for linearizable.
fn is_linearizable_list(body: &[u8]) -> bool {
    Fields::new(body)
        .any(|field| field.map_or(true, |field| field.number == 1 && field.value != Value::Varint(0)))
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
