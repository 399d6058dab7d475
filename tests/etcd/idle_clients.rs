//! Must show 3 of identities: clients that never log in twice (and one that does) log in through Keyward, idle for three lives of
//! etcd's tokens, and then read, write, watch and renew their lease without an error.

use std::time::Duration;

use futures_util::future::{join, join_all};

use crate::chaos::run::keyward;
use crate::harness::binary::Version;
use crate::harness::client::lifetime;
use crate::harness::{Auth, Cluster, Options, Tls, versions};
use crate::rewatch::local;
use crate::rounds::{Application, Did, FAMILIES};
use crate::steady::TTL;
use crate::way_out::guards_leases;

/// Etcd forgets a token up to a second after its end.
const IDLE: Duration = Duration::from_secs(3 * TTL as u64 + 1);

async fn idles(version: &Version, tls: Tls) {
    FAMILIES.iter().for_each(|family| drop(family.program()));
    let auth = Auth::On { extra_users: 0 };
    let options = Options { members: 3, auth, tls, token_ttl: Some(TTL), ..Options::default() };
    let cluster = Cluster::start(version, options).await;
    let (keyward, through) = keyward(&cluster).await;
    let front = if tls == Tls::Off { through.plain } else { through.tls };
    let families = FAMILIES.iter().filter(|family| family.tls == (tls == Tls::Server));
    let all = join_all(families.map(|family| Application::start(family, front, &cluster))).await;
    lifetime(IDLE).await;
    for (application, did) in all.iter().zip(join_all(all.iter().map(|one| one.round(&cluster))).await) {
        let name = application.family.name;
        let shown: Vec<String> = did.iter().map(Did::to_string).collect();
        println!("{version}, {name}, after {IDLE:?}: {}", shown.join("; "));
        assert_eq!(did.len(), 6, "{version}, {name}: {did:?}");
        for did in did {
            // 0.19 sends no token with Lease calls, and newer servers ask for one.
            let lease = ["keepalive", "grant"].contains(&did.op.as_str());
            if lease && name == "etcd-client 0.19.0" && guards_leases(version) {
                assert_eq!(did.message, "etcdserver: user name is empty", "{version}, {name}: {did}");
            } else {
                assert!(did.ok(), "{version}, {name}: {did}");
            }
        }
    }
    drop(keyward);
}

#[test]
fn clients_that_log_in_once_go_on_after_idling_for_three_lives_of_a_token() {
    local(async {
        for version in versions() {
            join(idles(&version, Tls::Off), idles(&version, Tls::Server)).await;
        }
    });
}
