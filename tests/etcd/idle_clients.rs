//! Must show 3 of identities: clients that never log in twice (and one that does) log in through Keyward, idle for three lives of
//! etcd's tokens, and then read, write, watch and renew their lease without an error. All the while they are sent pings, and answer them.

use std::time::Duration;

use futures_util::future::{join, join_all};

use crate::chaos::run::keyward_with;
use crate::harness::binary::Version;
use crate::harness::client::lifetime;
use crate::harness::{Auth, Cluster, Options, Tls, ports, versions};
use crate::rewatch::local;
use crate::rounds::{Application, Did, FAMILIES, Family};
use crate::steady::TTL;

/// Etcd forgets a token up to a second after its end.
const IDLE: Duration = Duration::from_secs(3 * TTL as u64 + 1);

/// Whoever did not answer would be gone before the end of that.
const PINGS: &str = "limits.client_ping_interval = \"1s\"\nlimits.client_ping_timeout = \"5s\"\n";

/// Whether it sends no token with calls about leases and members, for which newer servers and Keyward ask.
fn silent(family: &Family) -> bool {
    family.name == "etcd-client 0.19.0"
}

async fn idles(version: &Version, tls: Tls) {
    FAMILIES.iter().for_each(|family| drop(family.program()));
    let auth = Auth::On { extra_users: 0 };
    let options = Options { members: 3, auth, tls, token_ttl: Some(TTL), ..Options::default() };
    let cluster = Cluster::start(version, options).await;
    let lending = ports::free();
    let lends = format!(" }}, {{ name = \"lending\", address = \"{lending}\", lend_login_identity = true");
    let (keyward, through) = keyward_with(&cluster, &lends, PINGS).await;
    let front = if tls == Tls::Off { through.plain } else { through.tls };
    let here = FAMILIES.iter().filter(|family| family.tls == (tls == Tls::Server));
    let mut doors: Vec<_> = here.map(|family| (family, front)).collect();
    doors.extend(doors.iter().find(|(family, _)| silent(family)).map(|(family, _)| (*family, lending)));
    let start = |(family, door): &(&'static Family, _)| Application::start(family, *door, &cluster);
    let all = join_all(doors.iter().map(start)).await;
    lifetime(IDLE).await;
    let rounds = join_all(all.iter().map(|one| one.round(&cluster))).await;
    for ((family, door), did) in doors.iter().zip(rounds) {
        let lent = if *door == lending { ", to which its login is lent" } else { "" };
        let name = format!("{}{lent}", family.name);
        let shown: Vec<String> = did.iter().map(Did::to_string).collect();
        println!("{version}, {name}, after {IDLE:?}: {}", shown.join("; "));
        assert_eq!(did.len(), 6, "{version}, {name}: {did:?}");
        for did in did {
            let lease = ["keepalive", "grant"].contains(&did.op.as_str());
            if lease && silent(family) && *door != lending {
                assert_eq!(did.message, "etcdserver: user name is empty", "{version}, {name}: {did}");
            } else {
                assert!(did.ok(), "{version}, {name}: {did}");
            }
        }
    }
    let silent = [("reason", "no_answer")];
    let gone = keyward.metric("keyward_downstream_connections_ended_total", &silent).await;
    assert_eq!(gone, 0.0, "{version}: every client answers pings");
}

#[test]
fn clients_that_log_in_once_go_on_after_idling_for_three_lives_of_a_token() {
    local(async {
        for version in versions() {
            join(idles(&version, Tls::Off), idles(&version, Tls::Server)).await;
        }
    });
}
