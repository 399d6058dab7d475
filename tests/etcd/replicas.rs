//! Must show 6: two replicas with one key file are one: a session of either is good on both, over restarts and while the key changes.

use std::path::PathBuf;
use std::time::Duration;

use keyward::pb::etcdserverpb::{AuthenticateRequest, AuthenticateResponse, PutRequest};
use prost::Message;

use crate::harness::keyward::{Keyward, Site};
use crate::harness::{Auth, Cluster, Options, password, versions, wait};
use crate::raw::{Call, Endpoint};

const REFUSED: (u32, &str) = (16, "etcdserver: invalid auth token");
const LIMIT: Duration = Duration::from_secs(10);

/// One replica, and where its keys are.
struct Replica {
    keyward: Keyward,
    base: String,
    keys: Vec<PathBuf>,
}

impl Replica {
    async fn start(site: Site, cluster: &Cluster, keys: &[PathBuf]) -> Replica {
        let base = site.in_front_of(cluster);
        let keyward = Keyward::start(site, &config(&base, keys)).await;
        Replica { keyward, base, keys: keys.to_vec() }
    }

    /// Changes the key files while it runs, and returns when it uses them.
    async fn rekey(&mut self, keys: &[PathBuf]) {
        let old = self.key_ids().await;
        self.keyward.reload(&config(&self.base, keys));
        let changed = async || (self.key_ids().await != old).then_some(());
        wait::until(LIMIT, "the keys are read", changed).await;
        assert_eq!(self.key_ids().await.len(), keys.len());
        self.keys = keys.to_vec();
    }

    /// The ids of its keys; the first seals.
    async fn key_ids(&self) -> Vec<String> {
        let text = self.keyward.admin("/metrics").await.1;
        let ids = text.lines().filter_map(|line| line.strip_prefix("keyward_sessions_opened_total{key=\""));
        ids.filter_map(|rest| Some(rest.split_once('"')?.0.to_owned())).collect()
    }

    fn endpoint(&self) -> Endpoint {
        Endpoint::plain(self.keyward.site().listen)
    }

    async fn log_in(&self) -> String {
        let request = AuthenticateRequest { name: "alice".into(), password: password("alice") };
        let call = Call::unary("/etcdserverpb.Auth/Authenticate", &request.encode_to_vec());
        let answer = self.endpoint().call(&call).await;
        assert_eq!((answer.code(), answer.message()), (Some(0), String::new()), "the password is right");
        let reply = AuthenticateResponse::decode(answer.messages().remove(0)).expect("etcd's message");
        assert!(!reply.token.is_empty());
        reply.token
    }

    async fn put(&self, token: &str) -> (u32, String) {
        let request = PutRequest { key: "/a/k".into(), value: "v".into(), ..PutRequest::default() };
        let call = Call::unary("/etcdserverpb.KV/Put", &request.encode_to_vec()).with("token", token);
        let answer = self.endpoint().call(&call).await;
        (answer.code().expect("a status"), answer.message())
    }
}

fn config(base: &str, keys: &[PathBuf]) -> String {
    format!("{base}session.key_files = {keys:?}\n")
}

/// Every token is good on every replica.
async fn all_good(when: &str, replicas: [&Replica; 2], tokens: &[String]) {
    for (i, replica) in replicas.into_iter().enumerate() {
        for (n, token) in tokens.iter().enumerate() {
            assert_eq!(replica.put(token).await, (0, String::new()), "{when}: token {n} on replica {i}");
        }
    }
}

async fn all_refused(when: &str, replica: &Replica, tokens: &[String]) {
    for (n, token) in tokens.iter().enumerate() {
        assert_eq!(replica.put(token).await, (REFUSED.0, REFUSED.1.into()), "{when}: token {n}");
    }
}

#[tokio::test]
async fn a_session_is_good_on_every_replica_over_restarts_and_key_changes() {
    for version in versions() {
        let auth = Auth::On { extra_users: 0 };
        let cluster = Cluster::start(&version, Options { auth, ..Options::default() }).await;
        let shared = Site::new();
        let [old, new, foreign] =
            ["a", "b", "c"].map(|name| shared.write(name, &format!("{name}0123456789bcdef").repeat(4)));
        let mut a = Replica::start(Site::new(), &cluster, std::slice::from_ref(&old)).await;
        let mut b = Replica::start(Site::new(), &cluster, std::slice::from_ref(&old)).await;
        let mut first = vec![a.log_in().await, b.log_in().await];
        all_good("at first", [&a, &b], &first).await;

        // One is asked to end, the other is killed; both begin with nothing but the key file.
        let (status, site) = a.keyward.terminate().await;
        assert_eq!(status.code(), Some(0));
        a = Replica::start(site, &cluster, &a.keys).await;
        b = Replica::start(b.keyward.kill(), &cluster, &b.keys).await;
        all_good("after restarts", [&a, &b], &first).await;

        let stranger = Replica::start(Site::new(), &cluster, &[foreign]).await;
        let strange = [stranger.log_in().await];
        all_refused("of a foreign key", &a, &strange).await;
        all_refused("on a foreign replica", &stranger, &first).await;

        // Opens everywhere first.
        let both = [old.clone(), new.clone()];
        a.rekey(&both).await;
        first.extend([a.log_in().await, b.log_in().await]);
        all_good("new key appended on A", [&a, &b], &first).await;
        b.rekey(&both).await;
        first.extend([a.log_in().await, b.log_in().await]);
        all_good("new key appended on both", [&a, &b], &first).await;

        // Seals then: A with the new one, B still with the old one.
        let both = [new.clone(), old];
        a.rekey(&both).await;
        let mut second = vec![a.log_in().await];
        first.push(b.log_in().await);
        all_good("new key in front on A", [&a, &b], &[&first[..], &second].concat()).await;
        b.rekey(&both).await;
        second.extend([a.log_in().await, b.log_in().await]);
        all_good("new key in front on both", [&a, &b], &[&first[..], &second].concat()).await;

        // The old one goes, and with it what it sealed, there and only there.
        a.rekey(std::slice::from_ref(&new)).await;
        second.extend([a.log_in().await, b.log_in().await]);
        all_refused("old key gone on A", &a, &first).await;
        for token in &first {
            assert_eq!(b.put(token).await, (0, String::new()), "B still has the old key");
        }
        all_good("old key gone on A", [&a, &b], &second).await;
        b.rekey(std::slice::from_ref(&new)).await;
        all_refused("old key gone on both", &a, &first).await;
        all_refused("old key gone on both", &b, &first).await;
        all_good("old key gone on both", [&a, &b], &second).await;
        println!("{version}: {} sessions of the old key, {} of the new one", first.len(), second.len());
    }
}
