//! A user goes upstream with what its row names, and its client does not notice: a password, a certificate of its own, one that
//! Keyward mints, a token that Keyward signs; over expiry, and over changes of users and roles.
//!
//! Prints the table of must show 2.

use std::fmt;
use std::path::Path;
use std::time::Duration;

use futures_util::{Stream, StreamExt as _, stream};
use keyward::pb::etcdserverpb::cluster_client::ClusterClient;
use keyward::pb::etcdserverpb::lease_client::LeaseClient;
use keyward::pb::etcdserverpb::watch_client::WatchClient;
use keyward::pb::etcdserverpb::watch_request::RequestUnion;
use keyward::pb::etcdserverpb::{
    LeaseKeepAliveRequest, LeaseKeepAliveResponse, MemberPromoteRequest, WatchRequest, WatchResponse,
};
use tokio::sync::mpsc;
use tokio::time::timeout;
use tonic::{Status, Streaming};

use crate::bench::{LEASE, Open};
use crate::caller::{Caller, Kind};
use crate::harness::binary::Version;
use crate::harness::client::lifetime;
use crate::harness::keyward::{Keyward, Site};
use crate::harness::{Auth, Cluster, Options, Tls, every_version, password, side_by_side, wait};
use crate::steady::of_each;
use crate::streams::watch_of;

const LIMIT: Duration = Duration::from_secs(60);
/// How long any token, certificate or JWT is good here, in seconds.
const TTL: u32 = 3;
/// etcd's secret for its tokens, where they are signed.
const SECRET: &str = "a secret that etcd and Keyward share\n";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kept {
    Password,
    Certificate,
    Minted,
    Signed,
}

impl Kept {
    const ALL: [Kept; 4] = [Kept::Password, Kept::Certificate, Kept::Minted, Kept::Signed];

    /// The row of `user`.
    fn row(self, site: &Site, cluster: &Cluster, user: &str) -> String {
        let credential = match self {
            Kept::Password => {
                format!("password_file = {:?}", site.write(&format!("{user}-password"), &password(user)))
            }
            Kept::Certificate => {
                let pair = cluster.pki().client(user);
                format!("cert = {:?}\nkey = {:?}", pair.cert, pair.key)
            }
            Kept::Minted => "mint = true".into(),
            Kept::Signed => "jwt = true".into(),
        };
        format!("[[user]]\nname = {user:?}\n{credential}\n")
    }

    /// What its rows refer to.
    fn table(self, site: &Site, cluster: &Cluster) -> String {
        match self {
            Kept::Password | Kept::Certificate => String::new(),
            Kept::Minted => {
                let pair = cluster.pki().mint();
                format!("[mint]\nca = {:?}\nkey = {:?}\nlifetime = \"{TTL}s\"\n", pair.cert, pair.key)
            }
            Kept::Signed => {
                let key = site.write("jwt-secret", SECRET);
                format!("[sign_jwt]\nmethod = \"HS256\"\nkey = {key:?}\nlifetime = \"{TTL}s\"\n")
            }
        }
    }
}

/// One member, which the learners join, with client certificates, or with signed tokens too.
fn options(secret: Option<&Path>) -> Options {
    let signed = |secret: &Path| {
        format!("--auth-token=jwt,sign-method=HS256,priv-key={},ttl={TTL}s", secret.display())
    };
    let flags = secret.map(signed).into_iter().collect();
    Options {
        members: 1,
        auth: Auth::On { extra_users: 0 },
        tls: Tls::Mutual,
        token_ttl: Some(TTL),
        flags,
        ..Options::default()
    }
}

async fn in_front_of(cluster: &Cluster, kept: Kept) -> Keyward {
    let site = Site::new();
    let rows = ["alice", "root"].map(|user| kept.row(&site, cluster, user)).concat();
    let config = site.in_front_of(cluster) + &rows + &kept.table(&site, cluster);
    Keyward::start(site, &config).await
}

/// A stream in both directions.
struct Talk<Q, A> {
    asks: mpsc::Sender<Q>,
    says: Streaming<A>,
}

fn spoken<Q: Send + 'static>() -> (mpsc::Sender<Q>, impl Stream<Item = Q> + Send + 'static) {
    let (asks, asked) = mpsc::channel(8);
    (asks, stream::unfold(asked, async |mut asked| asked.recv().await.map(|next| (next, asked))))
}

impl<Q, A> Talk<Q, A> {
    async fn ask(&mut self, question: Q) -> A {
        self.asks.send(question).await.expect("the stream takes it");
        self.next().await
    }

    async fn next(&mut self) -> A {
        let next = timeout(LIMIT, self.says.next()).await.expect("something comes");
        next.expect("the stream goes on").expect("no error")
    }
}

fn create(key: &str) -> WatchRequest {
    WatchRequest { request_union: Some(RequestUnion::CreateRequest(watch_of(key, false, 0))) }
}

async fn watch(caller: &Caller, key: &str) -> Talk<WatchRequest, WatchResponse> {
    let (asks, asked) = spoken();
    asks.send(create(key)).await.expect("room");
    let opened = WatchClient::new(caller.channel.clone()).watch(caller.request(asked)).await;
    let mut talk = Talk { asks, says: opened.expect("a watch").into_inner() };
    let created = talk.next().await;
    assert!(created.created && !created.canceled, "{created:?}");
    talk
}

async fn keep_alive(caller: &Caller, id: i64) -> Talk<LeaseKeepAliveRequest, LeaseKeepAliveResponse> {
    let (asks, asked) = spoken();
    asks.send(LeaseKeepAliveRequest { id }).await.expect("room");
    let opened = LeaseClient::new(caller.channel.clone()).lease_keep_alive(caller.request(asked)).await;
    let mut talk = Talk { asks, says: opened.expect("a stream").into_inner() };
    assert!(talk.next().await.ttl > 0);
    talk
}

/// One line of the table: what each call came to.
struct Line {
    version: Version,
    kept: Kept,
    cells: Vec<(&'static str, Result<(), String>)>,
    logins: f64,
}

impl Line {
    fn cell<T>(&mut self, name: &'static str, outcome: Result<T, Status>) {
        let outcome = outcome.map(drop).map_err(|status| format!("{:?} {}", status.code(), status.message()));
        self.cells.push((name, outcome));
    }

    fn is(&mut self, name: &'static str, good: bool, otherwise: impl fmt::Debug) {
        self.cells.push((name, if good { Ok(()) } else { Err(format!("{otherwise:?}")) }));
    }
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "| {} | {:?} |", self.version, self.kept)?;
        for (_, outcome) in &self.cells {
            write!(f, " {} |", outcome.as_ref().map_or_else(String::as_str, |()| "ok"))?;
        }
        write!(f, " {} |", self.logins)
    }
}

async fn logins(cluster: &Cluster) -> f64 {
    of_each(cluster, "grpc_server_started_total", &[("grpc_method", "Authenticate")]).await.iter().sum()
}

/// The calls of the table, by a client that logs in with its password once.
async fn line(cluster: &mut Cluster, kept: Kept) -> Line {
    let mut line = Line { version: cluster.version().clone(), kept, cells: Vec::new(), logins: 0.0 };
    let learner = cluster.add_learner().await;
    let learner = cluster.member_id(learner).await;
    let keyward = in_front_of(cluster, kept).await;
    let before = logins(cluster).await;
    let listen = keyward.site().listen;
    let alice = Caller::log_in(listen, "alice").await;

    line.cell("put", alice.put("/a/x", b"1".to_vec(), 0).await);
    let keys = alice.keys("/a/x").await;
    line.is("get", keys == ["/a/x"], keys);
    let mut watched = watch(&alice, "/a/w1").await;
    let (mine, held, awaited) =
        (alice.grant(LEASE).await, alice.grant(LEASE).await, alice.grant(LEASE).await);
    alice.put("/a/leased", b"1".to_vec(), mine).await.expect("a key with a lease");
    let mut kept_alive = keep_alive(&alice, mine).await;
    // Who was here before holds another lock, for as long as its lease lives.
    let lock = format!("/a/l-{kept:?}");
    let holder = alice.queue(Kind::Lock, &lock, held, "v").await.expect("nobody else is in line");
    let waiter = Open::queue(&alice, Kind::Lock, &lock, awaited, "v");

    // Over the life of whatever proved her so far.
    lifetime(Duration::from_secs(2 * u64::from(TTL))).await;
    let second = watched.ask(create("/a/w2")).await;
    line.is("watch after expiry", second.created && !second.canceled, &second);
    let ttl = kept_alive.ask(LeaseKeepAliveRequest { id: mine }).await.ttl;
    line.is("keepalive after expiry", ttl > 0, ttl);

    // Users and roles change; the first call after each change must pass.
    // Not to the learner, which knows nobody.
    let root = cluster.ctl_as_root().to(vec![cluster.url(0)]);
    for turn in 0..3 {
        let place = format!("/r{turn}/");
        root.ok(&["role", "grant-permission", "ra", "readwrite", &place, "--prefix"]).await;
        root.ok(&["role", "add", &format!("other-{kept:?}-{turn}")]).await;
        let key = format!("{place}k");
        let put = alice.put(&key, b"1".to_vec(), 0).await;
        if turn == 0 || put.is_err() {
            line.cell("put after role change", put);
        }
        assert_eq!(alice.keys(&key).await, [key], "{kept:?}");
    }
    let third = watched.ask(create("/a/w3")).await;
    line.is("watch after role change", third.created && !third.canceled, &third);
    let ttl = kept_alive.ask(LeaseKeepAliveRequest { id: mine }).await.ttl;
    line.is("keepalive after role change", ttl > 0, ttl);

    alice.delete(holder).await;
    line.cell("lock", waiter.ended().await);
    let mut told = Vec::new();
    for key in ["/a/w1", "/a/w2", "/a/w3"] {
        alice.put(key, b"news".to_vec(), 0).await.expect("a write");
        told.extend(watched.next().await.events.into_iter().filter_map(|event| event.kv).map(|kv| kv.key));
    }
    line.is("events", told == ["/a/w1", "/a/w2", "/a/w3"], told);

    let promote = async || {
        let root = Caller::log_in(listen, "root").await;
        let asked = root.request(MemberPromoteRequest { id: learner });
        let done = ClusterClient::new(root.channel.clone()).member_promote(asked).await;
        // The learner has a last step to go: etcd's own words, not the credential's.
        let behind = done.as_ref().err().is_some_and(|status| status.message().contains("in sync"));
        (!behind).then_some(done)
    };
    line.cell("promote", wait::until(LIMIT, "the learner is in sync", promote).await);
    line.logins = logins(cluster).await - before;
    let made =
        async |kind| keyward.metric("keyward_upstream_credentials_made_total", &[("kind", kind)]).await;
    let (minted, signed) = (made("certificate").await, made("token").await);
    let shown = keyward.metric("keyward_upstream_certificate_connections", &[]).await;
    assert_eq!(shown > 0.0, matches!(kept, Kept::Certificate | Kept::Minted), "{kept:?}: {shown}");
    match kept {
        Kept::Password | Kept::Certificate => assert_eq!((minted, signed), (0.0, 0.0)),
        // One at least for each of the three lives that passed.
        Kept::Minted => assert!(minted >= 3.0 && signed == 0.0, "{minted} certificates"),
        Kept::Signed => assert!(signed >= 6.0 && minted == 0.0, "{signed} tokens"),
    }
    line
}

#[tokio::test]
async fn every_credential_carries_every_call() {
    let secret = tempfile::NamedTempFile::new().expect("a temporary file");
    std::fs::write(secret.path(), SECRET).expect("it can be written");
    let of_version = async |version: &Version| {
        let mut lines = Vec::new();
        let mut cluster = Cluster::start(version, options(None)).await;
        for kept in [Kept::Password, Kept::Certificate, Kept::Minted] {
            lines.push(line(&mut cluster, kept).await);
        }
        drop(cluster);
        let mut cluster = Cluster::start(version, options(Some(secret.path()))).await;
        lines.push(line(&mut cluster, Kept::Signed).await);
        lines
    };
    let versions = every_version();
    let lines: Vec<Line> = side_by_side(&versions, of_version).await.into_iter().flatten().collect();
    let names: Vec<_> = lines[0].cells.iter().map(|(name, _)| *name).collect();
    println!("| etcd | upstream | {} | logins at etcd |", names.join(" | "));
    lines.iter().for_each(|line| println!("{line}"));
    assert_eq!(lines.len(), Kept::ALL.len() * versions.len());
    for line in &lines {
        assert!(line.cells.len() >= 10 && line.cells.iter().all(|(_, outcome)| outcome.is_ok()), "{line}");
    }
}

/// etcd checks no password of its own: there is none.
#[tokio::test]
async fn a_user_without_a_password_is_served_and_its_roles_are_etcds() {
    let of_version = async |version: &Version| {
        let cluster = Cluster::start(version, options(None)).await;
        let root = cluster.ctl_as_root();
        root.ok(&["user", "add", "carol", "--no-password"]).await;
        root.ok(&["user", "grant-role", "carol", "ra"]).await;
        let site = Site::new();
        let config = site.listening(&cluster, ", default_user = \"carol\"")
            + "[[user]]\nname = \"*\"\nmint = true\n"
            + &Kept::Minted.table(&site, &cluster);
        let keyward = Keyward::start(site, &config).await;
        let carol = Caller::anybody(keyward.site().listen).await;
        carol.put("/a/x", b"1".to_vec(), 0).await.expect("her role allows it");
        let beyond = carol.put("/b/x", b"1".to_vec(), 0).await.expect_err("her role does not");
        assert_eq!(beyond.message(), "etcdserver: permission denied", "{version}");
        // Past the life of the certificate, on the connection that showed it and on new ones.
        lifetime(Duration::from_secs(u64::from(TTL) + 1)).await;
        carol.put("/a/x", b"2".to_vec(), 0).await.expect("another certificate");
        root.ok(&["user", "revoke-role", "carol", "ra"]).await;
        let revoked = carol.put("/a/x", b"3".to_vec(), 0).await.expect_err("she has no role any more");
        assert_eq!(revoked.message(), "etcdserver: permission denied", "{version}");
    };
    side_by_side(&every_version(), of_version).await;
}
