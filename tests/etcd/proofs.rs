//! A password that was changed at etcd itself ends its sessions on every replica, their streams too, and nobody else's; while
//! nothing was changed, a session costs no replica a bcrypt (rules 12).

use std::cell::{Cell, RefCell};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use keyward::pb::etcdserverpb::watch_client::WatchClient;
use keyward::pb::etcdserverpb::watch_request::RequestUnion;
use keyward::pb::etcdserverpb::{WatchCreateRequest, WatchRequest, WatchResponse};
use tonic::{Code, Status, Streaming};

use crate::caller::Caller;
use crate::harness::binary::Version;
use crate::harness::keyward::{ALL_CALLS, Keyward, Site};
use crate::harness::{Auth, Cluster, Options, Tls, versions, wait};
use crate::revocations::end;

const USERS: usize = 50;
/// Whose password is changed, and somebody beside.
const CHANGED: usize = 7;
const BESIDE: usize = 8;
const INVALID: &str = "etcdserver: invalid auth token";
const LIMIT: Duration = Duration::from_secs(60);
/// How often a login is tried whether another replica takes it as it is.
const PACE: Duration = Duration::from_millis(500);

fn user(n: usize) -> String {
    format!("u{n:02}")
}

fn key(n: usize) -> String {
    format!("/u/{n}")
}

fn options() -> Options {
    Options {
        auth: Auth::On { extra_users: USERS + 30 },
        tls: Tls::Mutual,
        bcrypt_cost: 4,
        ..Options::default()
    }
}

/// A replica that proves every user upstream with a certificate of its own making: nobody there looks at passwords.
async fn replica(cluster: &Cluster, keys: &Site) -> Keyward {
    let site = Site::new();
    let key = keys.write("session.key", &"0123456789abcdef".repeat(4));
    let mint = cluster.pki().mint();
    let config = format!(
        "{}session.key_files = [{key:?}]\n[[user]]\nname = \"*\"\nmint = true\n\
         [mint]\nca = {:?}\nkey = {:?}\n",
        site.in_front_of(cluster).replace(ALL_CALLS, "log.access = 'off'"),
        mint.cert,
        mint.key
    );
    Keyward::start(site, &config).await
}

/// Checks of passwords that etcd has answered.
async fn checks(cluster: &Cluster) -> f64 {
    let method = [("grpc_method", "Authenticate")];
    let each = (0..cluster.len()).map(|i| cluster.counter(i, "grpc_server_handled_total", &method));
    join_all(each).await.iter().sum()
}

/// One session, on both replicas.
struct Session {
    on: [Caller; 2],
    n: usize,
}

impl Session {
    async fn begin(replicas: [&Keyward; 2], n: usize) -> Session {
        let first = Caller::log_in(replicas[0].site().listen, &user(n)).await;
        let second = first.at(replicas[1].site().listen).await;
        Session { on: [first, second], n }
    }

    async fn put(&self, replica: usize) -> Result<(), Status> {
        self.on[replica].put(&key(self.n), b"x".to_vec(), 0).await.map(drop)
    }

    async fn watch(&self, replica: usize) -> Streaming<WatchResponse> {
        let create = WatchCreateRequest { key: key(self.n).into(), ..WatchCreateRequest::default() };
        let create = WatchRequest { request_union: Some(RequestUnion::CreateRequest(create)) };
        let asked = futures_util::stream::iter([create]);
        let asked = futures_util::StreamExt::chain(asked, futures_util::stream::pending());
        let caller = &self.on[replica];
        let opened = WatchClient::new(caller.channel.clone()).watch(caller.request(asked)).await;
        let mut stream = opened.expect("admitted").into_inner();
        assert!(stream.message().await.expect("admitted").expect("created").created);
        stream
    }
}

/// From some moment on logins are noted with the auth revision: then the other replica asks nobody about them. That of this one
/// user, each of another, is what tells.
async fn until_noted(cluster: &Cluster, replicas: [&Keyward; 2]) -> usize {
    let (next, last) = (Cell::new(0), RefCell::new(None::<Instant>));
    let look = async || {
        if last.borrow().is_some_and(|last| last.elapsed() < PACE) {
            return None;
        }
        last.replace(Some(Instant::now()));
        let n = next.replace((next.get() + 1) % (USERS + 30));
        let session = Session::begin(replicas, n).await;
        let before = checks(cluster).await;
        session.put(1).await.expect("admitted");
        (checks(cluster).await == before).then_some(())
    };
    wait::until(LIMIT, "a session costs the other replica nothing", look).await;
    next.get()
}

#[tokio::test]
async fn a_changed_password_ends_its_sessions_on_every_replica_and_nobody_elses() {
    for version in versions() {
        let cluster = Cluster::start(&version, options()).await;
        let keys = Site::new();
        let (a, b) = (replica(&cluster, &keys).await, replica(&cluster, &keys).await);
        let tried = until_noted(&cluster, [&a, &b]).await;
        let sessions = join_all((0..USERS).map(|n| Session::begin([&a, &b], n))).await;

        // B knows those who came to it before; the others it has never seen, and a third replica has seen nobody.
        let before = checks(&cluster).await;
        let c = replica(&cluster, &keys).await;
        let started = checks(&cluster).await;
        for (n, session) in sessions.iter().enumerate() {
            session.put(0).await.expect("admitted");
            session.put(1).await.expect("admitted");
            let third = session.on[0].at(c.site().listen).await;
            third.put(&key(n), b"x".to_vec(), 0).await.expect("admitted");
        }
        let cost = checks(&cluster).await - started;
        println!(
            "{version}: {tried} users until logins were noted with the auth revision; {USERS} sessions on two more \
             replicas: {cost} checks of passwords ({} while the third began)",
            started - before
        );
        assert_eq!(cost, 0.0, "{version}: nothing was changed");
        drop(c);

        let (hers, his) = (&sessions[CHANGED], &sessions[BESIDE]);
        let ends = [hers.watch(0).await, hers.watch(1).await];
        let mut go_on = [his.watch(0).await, his.watch(1).await];
        let ctl = cluster.ctl_as_root().to(vec![cluster.url(0)]);
        let name = user(CHANGED);
        let ended = ctl.run_with(&["user", "passwd", &name, "--interactive=false"], "new\n").await;
        assert_eq!(ended.code, Some(0), "{version}: {ended:?}");
        let changed = Instant::now();
        for replica in [0, 1] {
            let last = Cell::new(Duration::ZERO);
            let refused = async || match hers.put(replica).await {
                Ok(()) => {
                    last.set(changed.elapsed());
                    None
                }
                Err(status) => Some(status),
            };
            let status = wait::until(LIMIT, "her session is refused", refused).await;
            assert_eq!((status.code(), status.message()), (Code::Unauthenticated, INVALID), "{version}");
            println!(
                "{version}: replica {replica} admitted her session until {:?} after the change",
                last.get()
            );
        }
        for stream in ends {
            let status = end(stream, LIMIT).await;
            assert_eq!((status.code(), status.message()), (Code::Unauthenticated, INVALID), "{version}");
        }
        println!("{version}: her streams had ended {:?} after the change", changed.elapsed());

        the_others_go_on(&version, &sessions).await;
        for stream in &mut go_on {
            let heard = stream.message().await.expect("it goes on").expect("it goes on");
            assert!(!heard.canceled && !heard.events.is_empty(), "{version}");
        }
    }
}

async fn the_others_go_on(version: &Version, sessions: &[Session]) {
    for session in sessions.iter().filter(|session| session.n != CHANGED) {
        for replica in [0, 1] {
            let put = session.put(replica).await;
            put.unwrap_or_else(|status| panic!("{version}: {}: {status}", session.n));
        }
    }
}
