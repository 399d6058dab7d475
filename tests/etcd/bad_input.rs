//! Bad input: each gets etcd's own answer, or a clear line of ours; nothing of it reaches etcd, nothing panics, no secret is logged.
//!
//! Owns: the scene that the tests of `bad_input/` share. Invariant: a test that says "nothing arrived" also shows that it would have
//! seen it arrive.

mod foreign_tokens;
mod members;
mod peers;
mod requests;
mod tokens;

use std::{fs, path::PathBuf};

use keyward::pb::etcdserverpb::{AuthenticateRequest, AuthenticateResponse, PutRequest};
use prost::Message;

use crate::{
    harness::{
        Auth, Cluster, Options, Tls,
        binary::Version,
        keyward::{Keyward, Site},
        password,
    },
    raw::{Answer, Call, Endpoint},
};

const PUT: &str = "/etcdserverpb.KV/Put";
const AUTHENTICATE: &str = "/etcdserverpb.Auth/Authenticate";

/// One member with auth, a Keyward in front of it, and a way to each.
struct Scene {
    cluster: Cluster,
    keyward: Keyward,
    etcd: Endpoint,
    through: Endpoint,
    /// What must not be in the log: passwords and tokens.
    secrets: Vec<String>,
}

impl Scene {
    async fn start(version: &Version, tls: Tls) -> Scene {
        let cluster = cluster(version, tls).await;
        let site = Site::new();
        // At debug, so that what must not be logged would be.
        let config = site.in_front_of(&cluster) + "log.level = \"debug\"\n";
        let keyward = Keyward::start(site, &config).await;
        let etcd = cluster.endpoint(0);
        let through = Endpoint::plain(keyward.site().listen);
        let secrets = ["root", "alice", "bob"].map(password).to_vec();
        Scene { cluster, keyward, etcd, through, secrets }
    }

    /// Logs in through Keyward.
    async fn session(&mut self, user: &str) -> String {
        let token = log_in(&self.through, user, &password(user)).await.expect("the password is right");
        self.secrets.push(token.clone());
        token
    }

    /// It lives, serves, said what is wrong without a panic and without a secret.
    async fn is_unharmed(&mut self) {
        let token = self.session("alice").await;
        let answer = self.through.call(&put("/a/alive").with("token", &token)).await;
        assert_eq!(told(&answer), (Some(0), String::new()), "keyward does not serve any more");
        assert_eq!(self.keyward.admin("/livez").await.0, 200);
        let log = self.keyward.log();
        assert!(!log.is_empty(), "keyward logs nothing");
        assert!(!log.contains("panicked"), "something panicked: {log}");
        for secret in &self.secrets {
            assert!(!log.contains(secret), "the log holds {secret:?}");
        }
    }
}

async fn cluster(version: &Version, tls: Tls) -> Cluster {
    let flags = vec!["--log-level=debug".into()];
    let auth = Auth::On { extra_users: 0 };
    Cluster::start(version, Options { auth, tls, flags, ..Options::default() }).await
}

/// Whether etcd saw a request with this key. At debug it logs the keys of all requests that it could read.
fn arrived(cluster: &Cluster, key: &str) -> bool {
    let log = log_of(cluster);
    assert!(log.contains("request stats"), "etcd does not log requests");
    log.contains(key)
}

/// How often etcd was asked for this, by its own count.
async fn started(cluster: &Cluster, method: &str) -> f64 {
    cluster.counter(0, "grpc_server_started_total", &[("grpc_method", method)]).await
}

/// What the members of a cluster logged.
fn log_of(cluster: &Cluster) -> String {
    let logs = fs::read_dir(cluster.folder())
        .expect("the cluster has a folder")
        .map(|entry| entry.expect("an entry").path());
    let logs: Vec<PathBuf> =
        logs.filter(|path| path.extension().is_some_and(|ending| ending == "log")).collect();
    assert!(!logs.is_empty(), "the cluster has no log");
    logs.iter()
        .map(|path| String::from_utf8_lossy(&fs::read(path).expect("a log can be read")).into_owned())
        .collect()
}

/// The token, or how it was refused.
async fn log_in(endpoint: &Endpoint, user: &str, password: &str) -> Result<String, (Option<u32>, String)> {
    let request = AuthenticateRequest { name: user.into(), password: password.into() };
    let answer = endpoint.call(&Call::unary(AUTHENTICATE, &request.encode_to_vec())).await;
    match (answer.code(), answer.messages().into_iter().next()) {
        (Some(0), Some(message)) => {
            Ok(AuthenticateResponse::decode(message).expect("an AuthenticateResponse").token)
        }
        _ => Err(told(&answer)),
    }
}

fn put_request(key: &str) -> Vec<u8> {
    PutRequest { key: key.to_owned().into(), value: "x".into(), ..PutRequest::default() }.encode_to_vec()
}

fn put(key: &str) -> Call {
    Call::unary(PUT, &put_request(key))
}

/// Code and text of an answer.
fn told(answer: &Answer) -> (Option<u32>, String) {
    (answer.code(), answer.message())
}
