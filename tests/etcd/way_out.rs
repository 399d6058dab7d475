//! Rules 36, the way out: clients that hold a Keyward token and are pointed back at etcd; and the way in, the other way round. What
//! `docs/remove-keyward.md` says of each client library is what is seen here.

use std::time::Instant;

use futures_util::future::{join, join_all};
use keyward::pb::etcdserverpb::watch_request::RequestUnion;
use keyward::pb::etcdserverpb::{
    AuthenticateRequest, AuthenticateResponse, LeaseGrantRequest, LeaseKeepAliveRequest, PutRequest,
    RangeRequest, WatchCreateRequest, WatchRequest, WatchResponse,
};
use keyward::pb::v3lockpb::LockRequest;
use keyward::tasks::Tasks;
use prost::Message;

use crate::chaos::run::keyward;
use crate::harness::binary::{Version, full};
use crate::harness::relay::Relay;
use crate::harness::{Auth, Cluster, Options, Tls, every_version, password};
use crate::raw::{Call, End, Endpoint, Shape};
use crate::rewatch::local;
use crate::rounds::{Application, Did, FAMILIES};

const INVALID: &str = "etcdserver: invalid auth token";
const DENIED: &str = "rpc error: code = PermissionDenied desc = etcdserver: permission denied";
const UNAUTHENTICATED: &str = "rpc error: code = Unauthenticated desc = etcdserver: invalid auth token";

/// Whether a server looks at the token of a keepalive, and gives no lease to who shows none.
pub(crate) fn guards_leases(version: &Version) -> bool {
    let lines = [("3.7", "3.8"), ("3.6.9", "3.7"), ("3.5.28", "3.6"), ("3.4.42", "3.5")];
    lines.iter().any(|(from, to)| version.at_least(from) && !version.at_least(to))
}

/// What etcd says to a token of Keyward's: method, code and text; of a watch the reason of its end.
async fn shown(etcd: &Endpoint, token: &str) -> Vec<(&'static str, Option<u32>, String)> {
    let key = || b"/a/k".to_vec().into();
    let watch = WatchCreateRequest { key: key(), ..Default::default() };
    let watch = WatchRequest { request_union: Some(RequestUnion::CreateRequest(watch)) };
    let login = AuthenticateRequest { name: "alice".into(), password: password("alice") };
    let stream = Shape::Stream { at_least: 1 };
    let calls = [
        ("KV/Range", RangeRequest { key: key(), ..Default::default() }.encode_to_vec(), Shape::Once),
        ("KV/Put", PutRequest { key: key(), ..Default::default() }.encode_to_vec(), Shape::Once),
        ("Lease/LeaseGrant", LeaseGrantRequest { ttl: 60, id: 0 }.encode_to_vec(), Shape::Once),
        ("Lease/LeaseKeepAlive", LeaseKeepAliveRequest { id: 1 }.encode_to_vec(), stream),
        ("Watch/Watch", watch.encode_to_vec(), stream),
        ("Lock/Lock", LockRequest { name: key(), lease: 0 }.encode_to_vec(), Shape::Once),
        ("Auth/Authenticate", login.encode_to_vec(), Shape::Once),
    ];
    let mut all = Vec::new();
    for (method, message, shape) in calls {
        let package = if method.starts_with("Lock") { "v3lockpb" } else { "etcdserverpb" };
        let call = Call { shape, ..Call::unary(&format!("/{package}.{method}"), &message) };
        let begun = Instant::now();
        let answer = etcd.call(&call.with("token", token)).await;
        let took = begun.elapsed();
        assert!(matches!(answer.end, End::Ended | End::Open), "{method} is not answered: {answer:?}");
        let ended = answer.messages().first().and_then(|message| WatchResponse::decode(message.clone()).ok());
        let ended = ended.filter(|_| method == "Watch/Watch").map(|response| response.cancel_reason);
        let text = ended.unwrap_or_else(|| answer.message());
        // A stream that is left open is watched for more.
        let open = if answer.end == End::Open { ", 300 ms of them for more" } else { "" };
        println!("  {method}: {:?} {text:?} in {} ms{open}", answer.code(), took.as_millis());
        all.push((method, answer.code(), text));
    }
    all
}

#[tokio::test]
async fn a_keyward_token_shown_to_etcd_is_refused_at_once() {
    for version in every_version() {
        for tls in [Tls::Off, Tls::Server] {
            let auth = Auth::On { extra_users: 0 };
            let cluster =
                Cluster::start(&version, Options { auth, tls, strangers: true, ..Options::default() }).await;
            let (keyward, through) = keyward(&cluster).await;
            let (etcd, front) = match tls {
                Tls::Off => (Endpoint::plain(cluster.address(0)), Endpoint::plain(through.plain)),
                _ => (
                    Endpoint::tls(cluster.address(0), cluster.pki(), None),
                    Endpoint::tls(through.tls, cluster.pki(), None),
                ),
            };
            let login = AuthenticateRequest { name: "alice".into(), password: password("alice") };
            let login = Call::unary("/etcdserverpb.Auth/Authenticate", &login.encode_to_vec());
            let answer = front.call(&login).await.messages().remove(0);
            let token = AuthenticateResponse::decode(answer).expect("etcd's message").token;
            assert!(token.starts_with("kw1_"), "Keyward's own token");
            println!("{version}, {tls:?}, auth on:");
            let guarded = guards_leases(&version);
            let watch = if version == Version::parse("3.5.1") { DENIED } else { UNAUTHENTICATED };
            let unmapped = |code| (code, INVALID.to_owned());
            for (method, code, text) in shown(&etcd, &token).await {
                let expected = match method {
                    "Lease/LeaseKeepAlive" if !guarded => (None, String::new()),
                    "Watch/Watch" => (None, watch.into()),
                    "Lock/Lock" => unmapped(Some(2)),
                    "Auth/Authenticate" if version.at_least("3.5") => (Some(0), String::new()),
                    _ => unmapped(Some(16)),
                };
                assert_eq!((code, text), expected, "{version}, {tls:?}: {method}");
            }
            // With auth off nobody asks who calls, but old servers look at a token all the same.
            cluster.ctl_as_root().ok(&["auth", "disable"]).await;
            println!("{version}, {tls:?}, auth off:");
            let ignores =
                version.at_least("3.5.10") || (version.at_least("3.4.28") && !version.at_least("3.5"));
            for (method, code, text) in shown(&etcd, &token).await {
                if ["KV/Range", "KV/Put", "Lease/LeaseGrant"].contains(&method) {
                    let expected = if ignores { (Some(0), String::new()) } else { unmapped(Some(16)) };
                    assert_eq!((code, text), expected, "{version}, {tls:?}, auth off: {method}");
                }
            }
            drop(keyward);
        }
    }
}

/// What a library makes of a token that is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Manner {
    /// It logs in again by itself, also for its watches.
    Heals,
    /// It logs in again when a call is refused; a watch that comes first ends, and later ones say nothing.
    HealsCalls,
    /// It never logs in again.
    Restart,
    /// It tries to, without end and without a pause, and shows the token that it wants to be rid of, which this server refuses.
    Stuck,
}

fn manner(way: Way, version: &Version, family: &str) -> Manner {
    match family.split(' ').next() {
        _ if way == Way::Out && family == "clientv3 3.6.16" && !version.at_least("3.5") => Manner::Stuck,
        Some("clientv3") => Manner::Heals,
        Some("npm") => Manner::HealsCalls,
        _ => Manner::Restart,
    }
}

/// Which way the endpoint of the applications is turned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    In,
    Out,
}

/// What an application sees of each thing that it does behind a turn, and that restarting it is enough.
async fn turned(way: Way, version: &Version, tls: Tls) {
    FAMILIES.iter().for_each(|family| drop(family.program()));
    let auth = Auth::On { extra_users: 0 };
    let cluster = Cluster::start(version, Options { auth, tls, strangers: true, ..Options::default() }).await;
    let tasks = Tasks::default();
    let (keyward, through) = keyward(&cluster).await;
    let relay = Relay::start(&tasks).await;
    let front = if tls == Tls::Off { through.plain } else { through.tls };
    let (from, to) = if way == Way::Out { (front, cluster.address(0)) } else { (cluster.address(0), front) };
    relay.open(from);
    let families = || FAMILIES.iter().filter(|family| family.tls == (tls == Tls::Server));
    let mut all =
        join_all(families().map(|family| Application::start(family, relay.address, &cluster))).await;
    for (application, did) in all.iter().zip(join_all(all.iter().map(|one| one.round(&cluster))).await) {
        judge(version, (way == Way::Out, application.family.name), &did, None);
    }
    relay.turn_to(to);
    for at in ["turned", "once more"] {
        let after = join_all(all.iter().map(|application| application.round(&cluster))).await;
        for (application, after) in all.iter().zip(after) {
            let name = application.family.name;
            let failed: Vec<String> = after.iter().filter(|did| !did.ok()).map(Did::to_string).collect();
            println!("{way:?}, {version}, {name}, {at}: {} failed: {}", failed.len(), failed.join("; "));
            judge(version, (way == Way::In, name), &after, Some(manner(way, version, name)));
        }
        // One that is stuck takes a processor from all others for as long as it lives; that it stays so is seen at full length.
        all.retain(|application| full() || manner(way, version, application.family.name) != Manner::Stuck);
    }
    let anew = join_all(families().map(|family| Application::start(family, relay.address, &cluster))).await;
    for application in anew {
        let through_keyward = way == Way::In;
        let round = application.round(&cluster).await;
        judge(version, (through_keyward, application.family.name), &round, None);
    }
    drop(keyward);
}

/// `None`: the token is good, and all succeeds.
fn judge(version: &Version, (keyward, family): (bool, &str), all: &[Did], refused: Option<Manner>) {
    assert_eq!(all.len(), 6, "{version}, {family}: {all:?}");
    // It sends no token with these; Keyward requires an identity in front of every version.
    let nobody = family == "etcd-client 0.19.0" && (keyward || guards_leases(version));
    for did in all {
        let fine = match (did.op.as_str(), refused) {
            // The stream of before the turn is gone.
            ("keepalive", Some(_)) if nobody => !did.ok(),
            ("keepalive" | "grant", _) if nobody => did.message == "etcdserver: user name is empty",
            (_, None | Some(Manner::Heals)) => did.ok(),
            ("watch" | "new watch", Some(Manner::HealsCalls)) => true,
            (_, Some(Manner::HealsCalls)) => did.ok(),
            ("read" | "write", Some(Manner::Restart)) => {
                (did.code.as_str(), did.message.as_str()) == ("Unauthenticated", INVALID)
            }
            ("watch" | "new watch", Some(Manner::Restart)) => !did.ok(),
            (op, Some(Manner::Stuck)) => !did.ok() || op == "keepalive",
            // Older servers look at no token of a keepalive, and 0.19 sends none with a grant.
            _ => true,
        };
        assert!(fine, "{version}, {family}: {did}");
    }
}

/// The oldest, a middle one and the newest: what a library makes of a refusal depends on the server little, and one of them differs on
/// the oldest alone.
fn few_versions() -> Vec<Version> {
    every_version().into_iter().step_by(2).collect()
}

#[test]
fn each_library_pointed_back_at_etcd_heals_by_itself_or_by_a_restart() {
    local(async {
        for version in few_versions() {
            join(turned(Way::Out, &version, Tls::Off), turned(Way::Out, &version, Tls::Server)).await;
        }
    });
}

#[test]
fn each_library_pointed_at_keyward_heals_by_itself_or_by_a_restart() {
    local(async {
        for version in few_versions() {
            join(turned(Way::In, &version, Tls::Off), turned(Way::In, &version, Tls::Server)).await;
        }
    });
}
