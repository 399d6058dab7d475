//! A member for tests, of this room and of others.

use std::sync::Arc;

use keyward_config::{Endpoint, Scheme};
use keyward_etcd::identity::MemberId;

use crate::membership::{Member, Readiness, Role};

/// A voter with arbitrary values in all fields but id and readiness.
pub fn member(id: u64, readiness: Readiness) -> Arc<Member> {
    Arc::new(Member {
        id: MemberId(id),
        name: "m".into(),
        endpoint: Endpoint { scheme: Scheme::Http, host: "127.0.0.1".into(), port: 1 },
        resolved_ip: None,
        role: Role::Voter,
        version: None,
        readiness,
        term: 1,
        store_status: None,
        client_urls: Arc::default(),
        suspicion: Arc::default(),
        maintenance: Arc::default(),
        load: Arc::default(),
    })
}
