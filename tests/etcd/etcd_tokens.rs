//! Clients that bring tokens signed with etcd's own key (`etcdctl --auth-jwt-token`), in front of members that only verify them, and
//! of members that sign too.

use std::net::SocketAddr;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use keyward::pb::etcdserverpb::RangeRequest;
use keyward::pb::etcdserverpb::kv_client::KvClient;
use serde_json::{Value, json};
use tonic::{Code, Status};

use crate::caller::Caller;
use crate::harness::ctl::Ctl;
use crate::harness::issuer::Issuer;
use crate::harness::keyward::{Keyward, Site};
use crate::harness::{Auth, Cluster, Options, every_version, newest, password, wait};

const LIMIT: Duration = Duration::from_secs(30);
const OLD: (Code, &str) = (Code::InvalidArgument, "etcdserver: revision of auth store is old");
const INVALID: (Code, &str) = (Code::Unauthenticated, "etcdserver: invalid auth token");
const DENIED: (Code, &str) = (Code::PermissionDenied, "etcdserver: permission denied");

/// What etcd says, whatever the version: 3.5.1 tells an old revision raw.
fn told(outcome: Result<i64, Status>) -> Result<(), (Code, String)> {
    outcome.map(drop).map_err(|status| match (status.code(), status.message()) {
        (Code::Unknown, "auth: revision in header is old") => (OLD.0, OLD.1.to_owned()),
        (code, text) => (code, text.to_owned()),
    })
}

async fn get(caller: &Caller, key: &str) -> Result<i64, Status> {
    let range = RangeRequest { key: key.to_owned().into(), ..RangeRequest::default() };
    let answer = KvClient::new(caller.channel.clone()).range(caller.request(range)).await?;
    Ok(answer.into_inner().header.expect("a header").revision)
}

fn refused(expected: (Code, &str)) -> Result<(), (Code, String)> {
    Err((expected.0, expected.1.to_owned()))
}

fn claims(user: &str, revision: i64, left: i64) -> Value {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_secs();
    json!({ "username": user, "revision": revision, "exp": i64::try_from(now).expect("this age") + left })
}

async fn revision(cluster: &Cluster) -> i64 {
    let metric = cluster.counter(0, "etcd_debugging_auth_revision", &[]).await;
    format!("{metric}").parse().expect("a whole number")
}

/// A member that takes tokens of this issuer; with the private key it makes some too.
async fn cluster(
    version: &crate::harness::binary::Version,
    site: &Site,
    issuer: &Issuer,
    signs: bool,
) -> Cluster {
    let public = site.write("etcd.pub", &issuer.public_key());
    let mut flag = format!("--auth-token=jwt,sign-method=ES256,pub-key={}", public.display());
    if signs {
        let private = site.write("etcd.key", &issuer.private_key());
        flag += &format!(",priv-key={},ttl=60s", private.display());
    }
    let auth = if signs { Auth::On { extra_users: 0 } } else { Auth::Off };
    let options = Options { auth, strangers: true, flags: vec![flag], ..Options::default() };
    Cluster::start(version, options).await
}

/// Of a member that cannot make tokens, nobody can log in: users are made before.
async fn turn_auth_on(cluster: &Cluster) {
    let ctl = cluster.ctl();
    for args in [
        &["role", "add", "root"][..],
        &["role", "add", "ra"],
        &["role", "grant-permission", "ra", "readwrite", "/a/", "--prefix"],
        &["user", "add", "root:root-secret"],
        &["user", "grant-role", "root", "root"],
        &["user", "add", "alice:alice-secret"],
        &["user", "grant-role", "alice", "ra"],
        &["auth", "enable"],
    ] {
        ctl.ok(args).await;
    }
}

/// Both, told apart: directly, and through Keyward.
struct Two {
    direct: SocketAddr,
    through: SocketAddr,
}

impl Two {
    async fn put(&self, token: &str, key: &str) -> [Result<(), (Code, String)>; 2] {
        let (direct, through) = self.callers(token).await;
        [told(direct.put(key, b"1".to_vec(), 0).await), told(through.put(key, b"1".to_vec(), 0).await)]
    }

    async fn get(&self, token: &str, key: &str) -> [Result<(), (Code, String)>; 2] {
        let (direct, through) = self.callers(token).await;
        [told(get(&direct, key).await), told(get(&through, key).await)]
    }

    async fn callers(&self, token: &str) -> (Caller, Caller) {
        (Caller::with_token(self.direct, token).await, Caller::with_token(self.through, token).await)
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_clients_own_token_counts_as_at_members_that_only_verify() {
    for version in every_version() {
        let (site, issuer) = (Site::new(), Issuer::new());
        let cluster = cluster(&version, &site, &issuer, false).await;
        turn_auth_on(&cluster).await;
        let private = site.write("sign.key", &issuer.private_key());
        let config =
            site.in_front_of(&cluster) + &format!("[sign_jwt]\nmethod = \"ES256\"\nkey = {private:?}\n");
        let keyward = Keyward::start(site, &config).await;
        let two = Two { direct: cluster.address(0), through: keyward.site().listen };
        let now = revision(&cluster).await;
        let sign = |claims: &Value| issuer.sign("ES256", claims);
        let alice = sign(&claims("alice", now, 60));
        // Until Keyward has heard that auth is on.
        let served = async || two.put(&alice, "/a/x").await[1].is_ok().then_some(());
        wait::until(LIMIT, "alice is served", served).await;
        assert_eq!(two.put(&alice, "/a/x").await, [Ok(()), Ok(())], "{version}");
        assert_eq!(two.get(&alice, "/a/x").await, [Ok(()), Ok(())], "{version}");
        assert_eq!(two.put(&alice, "/b/x").await, [refused(DENIED), refused(DENIED)], "{version}");
        let endless = sign(&json!({ "username": "root", "revision": now }));
        assert_eq!(two.put(&endless, "/b/x").await, [Ok(()), Ok(())], "{version}: root, without an end");
        for (what, token) in [
            ("another key", Issuer::new().sign("ES256", &claims("root", now, 60))),
            ("expired", sign(&claims("root", now, -1))),
            ("another method", issuer.sign("ES384", &claims("root", now, 60))),
            ("no method", issuer.sign("none", &claims("root", now, 60))),
        ] {
            assert_eq!(
                two.get(&token, "/a/x").await,
                [refused(INVALID), refused(INVALID)],
                "{version}: {what}"
            );
        }
        for token in issuer.confused(&claims("root", now, 60)) {
            assert_eq!(
                two.get(&token, "/a/x").await,
                [refused(INVALID), refused(INVALID)],
                "{version}: confused"
            );
        }
        // Upon this one, etcd before 3.4.25 and 3.5.8 panics: Keyward keeps it away.
        let without = Caller::with_token(two.through, &sign(&json!({ "username": "root" }))).await;
        assert_eq!(told(get(&without, "/a/x").await), refused(INVALID), "{version}");
        let (past, future) = (sign(&claims("alice", now - 1, 60)), sign(&claims("alice", now + 5, 60)));
        assert_eq!(two.get(&past, "/a/x").await, [refused(OLD), refused(OLD)], "{version}");
        assert_eq!(two.get(&future, "/a/x").await, [refused(OLD), refused(OLD)], "{version}");
        let [direct, through] = two.put(&future, "/a/x").await;
        println!(
            "etcd {version}: a put at a later auth revision, directly {direct:?}, through Keyward {through:?}"
        );
        assert_eq!(through, refused(OLD), "{version}");

        // etcdctl has the flag from 3.7 on.
        let ctl = Ctl::new(&newest("3.7"), vec![keyward.url()]);
        let args = ["--auth-jwt-token", &endless, "user", "list"];
        assert_eq!(ctl.ok(&args).await, ctl.to(vec![cluster.url(0)]).ok(&args).await, "{version}");

        // Any change of users or roles ends every token, here within a second or so.
        ctl.ok(&["--auth-jwt-token", &endless, "role", "add", "another"]).await;
        let ended = async || (two.get(&alice, "/a/x").await[1] == refused(OLD)).then_some(());
        wait::until(LIMIT, "the token is old", ended).await;
        assert_eq!(two.get(&alice, "/a/x").await, [refused(OLD), refused(OLD)], "{version}");
        let renewed = sign(&claims("alice", revision(&cluster).await, 60));
        assert_eq!(two.get(&renewed, "/a/x").await, [Ok(()), Ok(())], "{version}");
        let signed = keyward.metric("keyward_upstream_credentials_made_total", &[("kind", "token")]).await;
        println!("etcd {version}: {signed} tokens of Keyward's own; no client's went upstream");
        assert!(signed >= 2.0, "{version}: alice's and root's");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn where_only_the_public_key_is_known_a_row_must_prove_the_user() {
    for version in every_version() {
        let (site, issuer) = (Site::new(), Issuer::new());
        let cluster = cluster(&version, &site, &issuer, true).await;
        let (public, secret) = (site.file("etcd.pub"), site.write("alice", &password("alice")));
        let config = site.in_front_of(&cluster)
            + &format!("[etcd_jwt]\nmethod = \"ES256\"\npublic_key = {public:?}\n")
            + &format!("[[user]]\nname = \"alice\"\npassword_file = {secret:?}\n")
            + "[[map]]\npeer = \"etcd_jwt:mallory\"\ndeny = true\n";
        let keyward = Keyward::start(site, &config).await;
        let two = Two { direct: cluster.address(0), through: keyward.site().listen };
        let now = revision(&cluster).await;
        let token = |user: &str| issuer.sign("ES256", &claims(user, now, 60));
        let served = async || two.put(&token("alice"), "/a/x").await[1].is_ok().then_some(());
        wait::until(LIMIT, "alice is served", served).await;
        assert_eq!(two.get(&token("alice"), "/a/x").await, [Ok(()), Ok(())], "{version}");
        // Directly they are who they say; their tokens do not go upstream, and Keyward has nothing else for them.
        assert_eq!(two.get(&token("root"), "/a/x").await, [Ok(()), refused(DENIED)], "{version}");
        assert_eq!(two.get(&token("mallory"), "/a/x").await[1], refused(DENIED), "{version}");
        let other = Issuer::new().sign("ES256", &claims("alice", now, 60));
        assert_eq!(two.get(&other, "/a/x").await, [refused(INVALID), refused(INVALID)], "{version}");
    }
}
