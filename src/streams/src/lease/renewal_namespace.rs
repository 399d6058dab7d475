//! The renewals of a caller in a namespace: a lease outside of the namespace is gone, in etcd's own words.
//!
//! Owns: the request sent in place of a client's, and the answer shown in place of a member's. Must not know:
//! streams, the order of renewals. Invariants (docs/decisions.md#d56): a foreign lease is never renewed, and
//! costs the stream's other leases nothing; the client reads the id that it named.

use std::rc::Rc;
use std::sync::Arc;

use bytes::Bytes;
use prost::Message as _;

use keyward_access::policy::live_permits::LivePermits;
use keyward_etcd::pb::etcdserverpb::{LeaseKeepAliveRequest, LeaseKeepAliveResponse};
use keyward_etcd::rpc::frame::PREFIX;
use keyward_etcd::rpc::namespace::{Namespace, SplicedRequest};
use keyward_etcd::rpc::schema::MessageId;
use keyward_telemetry::policy_metrics::PolicyMetrics;

/// The namespace of a keepalive stream.
pub struct RenewalNamespace {
    /// The caller's namespace.
    pub namespace: Arc<Namespace>,
    /// The caller's permissions, with the leases that the caller can name now.
    pub permits: Option<Rc<LivePermits>>,
    /// Metrics of decisions.
    pub metrics: PolicyMetrics,
}

impl RenewalNamespace {
    /// The lease that is renewed for a client's request, which is counted if it names a foreign lease; `None`
    /// if the request cannot be read.
    pub(super) fn admit(&self, message: &[u8]) -> Option<i64> {
        let spliced = self.splice(message)?;
        if spliced.foreign_lease.is_some() {
            self.metrics.foreign_leases.inc();
        }
        LeaseKeepAliveRequest::decode(spliced.framed.get(PREFIX..)?).ok().map(|request| request.id)
    }

    /// The request for a member in place of a client's request.
    pub(super) fn request(&self, message: Bytes) -> Bytes {
        let spliced = self.splice(&message);
        // A request that cannot be read was refused before.
        spliced.map_or_else(Bytes::new, |spliced| spliced.framed.slice(PREFIX..))
    }

    /// The answer for the client to its request `asked`, in place of a member's answer.
    pub(super) fn answer(asked: &Bytes, answer: &LeaseKeepAliveResponse, message: Bytes) -> Bytes {
        match LeaseKeepAliveRequest::decode(asked.clone()) {
            Ok(LeaseKeepAliveRequest { id }) if id != answer.id => {
                LeaseKeepAliveResponse { id, ..*answer }.encode_to_vec().into()
            }
            _ => message,
        }
    }

    fn splice(&self, message: &[u8]) -> Option<SplicedRequest> {
        let scope = self.permits.as_ref().map(|permits| permits.now().lease_scope).unwrap_or_default();
        self.namespace.splice_request(MessageId::LeaseKeepAliveRequest, message, usize::MAX, scope).ok()?
    }
}
