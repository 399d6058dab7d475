//! The ids of a namespace's leases: the namespace can be told from the id, without a store.
//!
//! Owns: the form of an id, and drawing ids. Must not know: requests, callers. Invariants
//! (docs/decisions.md#d56): every replica finds the same namespace for an id; an id that is drawn cannot be
//! guessed; one id of each namespace is never a lease.
//!
//! The upper 35 of 63 bits are of a hash of the prefix, the lower 28 bits are random. etcd's own ids are
//! counters below 15 bits of the member's id, so that an id drawn by etcd looks like an id of one given
//! namespace with a chance of one in 2^35 for each start of a member.
//! <https://github.com/etcd-io/etcd/blob/main/pkg/idutil/id.go>

use bytes::{BufMut as _, Bytes, BytesMut};
use sha2::{Digest as _, Sha256};

use super::Namespace;
use crate::rpc::frame;
use crate::rpc::scan::{ScanFault, WireFields, append_varint_field};

/// The random bits of an id.
const RANDOM: u32 = 28;
/// The bits of an id: etcd's own ids are positive too.
const BITS: u32 = 63;
/// The field with the lease in LeaseGrantRequest, LockRequest and CampaignRequest.
const LEASE: u32 = 2;

/// The leases that a caller in a namespace can name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LeaseScope {
    /// The leases of its namespace.
    #[default]
    Own,
    /// All leases, for as long as leases granted before have no id of a namespace.
    Any,
}

/// The id that is never a lease of the namespace of `prefix`: the bits of the hash, and no others.
pub(super) fn no_lease(prefix: &[u8]) -> i64 {
    let mut hash = Sha256::new();
    hash.update(b"lease ids of the namespace ");
    hash.update(prefix);
    let mut first = [0; 8];
    first.copy_from_slice(&hash.finalize()[..8]);
    let tag = u64::from_be_bytes(first) >> (u64::BITS - (BITS - RANDOM));
    // etcd takes the id 0 for no lease.
    (tag.max(1) << RANDOM).cast_signed()
}

impl Namespace {
    /// True if the id is one of the namespace's leases, by its bits.
    #[must_use]
    pub fn has_lease(&self, id: i64) -> bool {
        id >> RANDOM == self.no_lease >> RANDOM && id != self.no_lease
    }

    /// An id for a new lease.
    ///
    /// # Errors
    /// The operating system has no random bytes.
    pub fn draw_lease(&self) -> Result<i64, getrandom::Error> {
        let random = getrandom::u64()? & ((1 << RANDOM) - 1);
        Ok(self.no_lease | random.max(1).cast_signed())
    }

    /// The bits that all ids of the namespace have: equal for two namespaces that ids do not tell apart.
    #[must_use]
    pub fn lease_bits(&self) -> i64 {
        self.no_lease
    }
}

/// The lease named by a LeaseGrantRequest, LockRequest or CampaignRequest; 0 for none, `None` if unreadable.
#[must_use]
pub fn named_lease(message: &[u8]) -> Option<i64> {
    let mut lease = 0;
    for field in WireFields::new(message) {
        let field = field.ok()?;
        if field.number == LEASE {
            lease = field.value.signed()?;
        }
    }
    Some(lease)
}

/// The framed LeaseGrantRequest, LockRequest or CampaignRequest with `lease` in place of the named lease.
///
/// # Errors
/// The message cannot be read.
pub fn with_lease(message: &[u8], lease: i64) -> Result<Bytes, ScanFault> {
    let mut framed = BytesMut::zeroed(frame::PREFIX);
    for field in WireFields::new(message) {
        let field = field?;
        if field.number != LEASE {
            framed.put_slice(&message[field.range]);
        }
    }
    append_varint_field(&mut framed, LEASE, lease.cast_unsigned());
    frame::write_prefix(&mut framed);
    Ok(framed.freeze())
}

/// The lease of a request on its way to a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestLease {
    /// As named by the client, or none.
    AsSent,
    /// The id of a new lease, drawn by Keyward.
    Drawn,
    /// The client named this lease, which is not of its namespace.
    Foreign(i64),
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use prost::Message as _;

    use super::*;
    use crate::pb::etcdserverpb::LeaseGrantRequest;
    use crate::pb::v3electionpb::CampaignRequest;

    fn namespace(prefix: &str) -> Namespace {
        Namespace::new(prefix.as_bytes()).expect("a prefix")
    }

    #[test]
    fn an_id_tells_its_namespace_and_no_other() {
        let all = ["/a/", "/b/", "/a/b/", "/a"].map(namespace);
        for own in &all {
            for _ in 0..100 {
                let id = own.draw_lease().expect("random bytes");
                assert!(id > 0, "{id:x}");
                assert_eq!(all.iter().filter(|other| other.has_lease(id)).count(), 1, "{id:x}");
                assert!(own.has_lease(id));
            }
            assert!(!own.has_lease(own.no_lease) && own.no_lease > 0, "never a lease");
            for other in [0, 1, -1, i64::MIN, i64::MAX, own.no_lease | i64::MIN, own.no_lease - 1] {
                assert!(!own.has_lease(other), "{other:x}");
            }
        }
    }

    /// Other bits would take the leases from running clients, and replicas of two versions would disagree.
    #[test]
    fn the_bits_of_a_namespace_never_change() {
        assert_eq!(no_lease(b"/a/"), 0x78f9_f2b3_b000_0000);
        assert_eq!(no_lease(b"/tenants/alice/"), 0x391a_4962_8000_0000);
    }

    #[test]
    fn ids_are_not_drawn_twice() {
        let own = namespace("/a/");
        let drawn: HashSet<_> = (0..1000).map(|_| own.draw_lease().expect("random bytes")).collect();
        // Two of a thousand are equal with a chance of 1 in 500, four with none.
        assert!(drawn.len() >= 998, "{}", drawn.len());
    }

    #[test]
    fn a_lease_is_replaced_and_all_else_stays() {
        let grant = LeaseGrantRequest { ttl: 5, id: 0 };
        for (id, sent) in
            [(0, grant.encode_to_vec()), (0, b"\x08\x05\x10\x00".to_vec()), (9, b"\x10\x09\x08\x05".to_vec())]
        {
            assert_eq!(named_lease(&sent), Some(id));
            let framed = with_lease(&sent, 77).expect("readable");
            let read = LeaseGrantRequest::decode(&framed[frame::PREFIX..]).expect("a grant");
            assert_eq!(read, LeaseGrantRequest { ttl: 5, id: 77 });
            assert_eq!(framed.len() - frame::PREFIX, 4);
        }
        let campaign = CampaignRequest { name: "n".into(), lease: 0, value: "v".into() };
        let framed = with_lease(&campaign.encode_to_vec(), 77).expect("readable");
        let read = CampaignRequest::decode(&framed[frame::PREFIX..]).expect("a campaign");
        assert_eq!(read, CampaignRequest { lease: 77, ..campaign });
        assert_eq!(named_lease(b"\x12\x01a"), None);
        assert!(with_lease(b"\x10", 77).is_err());
    }
}
