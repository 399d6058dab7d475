//! Who was revoked is refused on every replica, streams too; and while nobody knows who was, nobody is admitted (rules 13).

use std::process::Stdio;
use std::time::{Duration, Instant};

use keyward::pb::etcdserverpb::watch_client::WatchClient;
use keyward::pb::etcdserverpb::watch_request::RequestUnion;
use keyward::pb::etcdserverpb::{
    AuthenticateRequest, AuthenticateResponse, PutRequest, RangeRequest, WatchCreateRequest, WatchRequest,
    WatchResponse,
};
use prost::Message as _;
use tonic::transport::Channel;
use tonic::{Code, Request, Status, Streaming};

use crate::harness::keyward::{Keyward, Site};
use crate::harness::{Auth, Cluster, Options, evidence, password, versions, wait};
use crate::raw::{Call, Endpoint};

const REFUSED: (u32, &str) = (16, "etcdserver: invalid auth token");
const LIMIT: Duration = Duration::from_secs(30);

fn options() -> Options {
    Options { auth: Auth::On { extra_users: 0 }, ..Options::default() }
}

/// A replica with an admin socket and this of the configuration.
async fn start(cluster: &Cluster, keys: &Site, lines: &str) -> Keyward {
    let site = Site::new();
    let config = config(&site, cluster, keys, lines);
    Keyward::start(site, &config).await
}

fn config(site: &Site, cluster: &Cluster, keys: &Site, lines: &str) -> String {
    let key = keys.write("session.key", &"0123456789abcdef".repeat(4));
    let base = site.in_front_of(cluster);
    format!("{base}admin.socket = \"admin.sock\"\nsession.key_files = [{key:?}]\n{lines}")
}

async fn log_in(keyward: &Keyward, user: &str) -> Result<String, (u32, String)> {
    let request = AuthenticateRequest { name: user.into(), password: password(user) };
    let call = Call::unary("/etcdserverpb.Auth/Authenticate", &request.encode_to_vec());
    let answer = Endpoint::plain(keyward.site().listen).call(&call).await;
    match answer.code() {
        Some(0) => {
            let reply = AuthenticateResponse::decode(answer.messages().remove(0)).expect("etcd's message");
            Ok(reply.token)
        }
        code => Err((code.expect("a status"), answer.message())),
    }
}

async fn put(keyward: &Keyward, token: &str) -> (u32, String) {
    let request = PutRequest { key: "/a/k".into(), value: "v".into(), ..PutRequest::default() };
    let call = Call::unary("/etcdserverpb.KV/Put", &request.encode_to_vec()).with("token", token);
    let answer = Endpoint::plain(keyward.site().listen).call(&call).await;
    (answer.code().expect("a status"), answer.message())
}

fn ok() -> (u32, String) {
    (0, String::new())
}

fn refused() -> (u32, String) {
    (REFUSED.0, REFUSED.1.to_owned())
}

/// Runs the replica's own build with these arguments and the replica's socket; its code and all that it said.
pub(crate) async fn command(keyward: &Keyward, arguments: &[&str]) -> (Option<i32>, String) {
    let mut command = tokio::process::Command::new(keyward.program());
    command.args(arguments).arg("--config").arg(keyward.site().file("keyward.toml")).stdin(Stdio::null());
    let output = command.kill_on_drop(true).output().await.expect("keyward runs");
    let said = String::from_utf8([output.stdout, output.stderr].concat()).expect("UTF-8");
    evidence::text(&format!("keyward {}", arguments.join(" ")), &said);
    (output.status.code(), said)
}

/// Asks until it is done, as an operator does who is told that etcd did not answer in time: on a busy machine it may not.
/// Returns the answer.
pub(crate) async fn done(keyward: &Keyward, arguments: &[&str]) -> String {
    let ask = async || {
        let (code, said) = command(keyward, arguments).await;
        if code != Some(0) {
            println!("{arguments:?}: {said}");
        }
        (code == Some(0)).then_some(said)
    };
    wait::until(LIMIT, &format!("{arguments:?} is done"), ask).await
}

/// A watch that has been created.
async fn watch(keyward: &Keyward, token: &str) -> Streaming<WatchResponse> {
    let create = WatchCreateRequest { key: "/a/k".into(), ..WatchCreateRequest::default() };
    let create = WatchRequest { request_union: Some(RequestUnion::CreateRequest(create)) };
    let asked =
        futures_util::StreamExt::chain(futures_util::stream::iter([create]), futures_util::stream::pending());
    let mut request = Request::new(asked);
    request.metadata_mut().insert("token", token.parse().expect("a header"));
    let channel = Channel::from_shared(keyward.url()).expect("a URL").connect().await;
    let mut client = WatchClient::new(channel.expect("it listens"));
    let mut stream = client.watch(request).await.expect("admitted").into_inner();
    assert!(stream.message().await.expect("admitted").expect("created").created);
    stream
}

/// How the stream ends, within the limit.
pub(crate) async fn end(mut stream: Streaming<WatchResponse>, within: Duration) -> Status {
    let ending = async {
        loop {
            match stream.message().await {
                Ok(Some(_)) => {}
                Ok(None) => panic!("it ended well"),
                Err(status) => return status,
            }
        }
    };
    tokio::time::timeout(within, ending).await.expect("it ends")
}

#[tokio::test]
async fn every_replica_obeys_and_streams_end() {
    for version in versions() {
        let cluster = Cluster::start(&version, options()).await;
        let keys = Site::new();
        let lines = "revocation.etcd_prefix = \"/keyward/revocations/\"\n";
        let (a, b) = (start(&cluster, &keys, lines).await, start(&cluster, &keys, lines).await);
        let alice = log_in(&a, "alice").await.expect("admitted");
        let root = log_in(&b, "root").await.expect("admitted");
        assert_eq!(put(&b, &alice).await, ok());
        let (on_a, on_b) = (watch(&a, &alice).await, watch(&b, &alice).await);
        let mut other = watch(&b, &root).await;

        let began = Instant::now();
        let said = done(&a, &["revoke", "alice"]).await;
        assert!(said.contains("ended on this replica: 1 session, 1 stream or waiting call"), "{said}");
        let said = done(&a, &["revoke", "nosuchuser"]).await;
        assert!(
            said.contains("no session and no stream on this replica has ended; those on other replicas"),
            "{said}"
        );
        let said = done(&a, &["unblock", "nosuchuser"]).await;
        assert!(said.contains("the user was not blocked"), "{said}");
        assert_eq!(put(&a, &alice).await, refused(), "where it was said it is in force at once");
        for stream in [on_a, on_b] {
            let status = end(stream, LIMIT).await;
            assert_eq!((status.code(), status.message()), (Code::Unauthenticated, REFUSED.1));
        }
        println!("{version}: both replicas obeyed {:?} after the command began", began.elapsed());
        assert_eq!(put(&b, &alice).await, refused());
        assert_eq!(put(&b, &root).await, ok(), "nobody else is touched");
        assert_eq!(other.message().await.expect("it goes on").expect("it goes on").events.len(), 1);

        let again = log_in(&b, "alice").await.expect("a new login is good");
        assert_eq!((put(&a, &again).await, put(&b, &again).await), (ok(), ok()));

        // A block on one replica, a session's end on the other, at the same time: neither is lost.
        let listed = command(&b, &["sessions"]).await.1;
        let row = listed.lines().find(|line| line.ends_with("password:root")).expect("it was seen there");
        let id = row.split_whitespace().next().expect("the id comes first");
        let (blocking, revoking) = (["block", "alice"], ["revoke", "--session", id]);
        tokio::join!(done(&a, &blocking), done(&b, &revoking));
        let all = async || {
            let states = [put(&a, &again).await, put(&b, &again).await, put(&a, &root).await];
            (states == [refused(), refused(), refused()]).then_some(())
        };
        wait::until(LIMIT, "both are obeyed on both", all).await;
        for replica in [&a, &b] {
            let (code, text) = log_in(replica, "alice").await.expect_err("blocked");
            assert_eq!((code, &*text), (3, "etcdserver: authentication failed, invalid user ID or password"));
        }
        done(&b, &["unblock", "alice"]).await;
        wait::until(LIMIT, "alice may log in", async || log_in(&a, "alice").await.ok()).await;
        let late = start(&cluster, &keys, lines).await;
        assert_eq!(put(&late, &again).await, refused(), "a replica that starts later knows it too");
    }
}

#[tokio::test]
async fn without_etcd_the_last_copy_is_good_for_a_while_and_none_for_nothing() {
    let version = versions().pop().expect("one is pinned");
    let mut cluster = Cluster::start(&version, options()).await;
    let keys = Site::new();
    let lines = "revocation.etcd_prefix = \"/keyward/revocations/\"\nrevocation.max_age = \"5s\"\n";
    let keyward = start(&cluster, &keys, lines).await;
    let alice = log_in(&keyward, "alice").await.expect("admitted");
    let bob = log_in(&keyward, "bob").await.expect("admitted");
    done(&keyward, &["block", "bob"]).await;
    cluster.kill(0);
    let last = async || (keyward.metric("keyward_revocation_age_seconds", &[]).await > 2.0).then_some(());
    wait::until(LIMIT, "the copy ages", last).await;
    assert_eq!(put(&keyward, &bob).await, refused(), "what was known stays in force");
    let (code, said) = command(&keyward, &["revoke", "alice"]).await;
    assert_eq!(code, Some(1), "{said}");

    let gone = async || keyward.admin("/readyz").await.1.contains("revocations are not known").then_some(());
    wait::until(LIMIT, "it says that it does not know", gone).await;
    for token in [&alice, &bob] {
        assert_eq!(put(&keyward, token).await.0, 14, "no word on the token itself");
    }
    let (_, site) = keyward.terminate().await;
    let config = config(&site, &cluster, &keys, lines);
    let keyward = Keyward::start_unready(site, &config).await;
    assert_eq!(put(&keyward, &alice).await.0, 14);

    cluster.restart(0).await;
    keyward.ready().await;
    assert_eq!((put(&keyward, &alice).await, put(&keyward, &bob).await), (ok(), refused()));
}

/// A read of the key from the store of the member that answers.
async fn local_read(keyward: &Keyward, token: &str) -> (u32, String) {
    let request = RangeRequest { key: "/a/k".into(), serializable: true, ..RangeRequest::default() };
    let call = Call::unary("/etcdserverpb.KV/Range", &request.encode_to_vec()).with("token", token);
    let answer = Endpoint::plain(keyward.site().listen).call(&call).await;
    (answer.code().expect("a status"), answer.message())
}

/// Two of three members are dead for longer than the copy is good. The third one gives what it gives without Keyward: reads of its
/// own store, and the snapshot.
#[tokio::test]
async fn without_a_quorum_local_reads_go_on_past_the_age_and_whoever_was_revoked_stays_out() {
    for version in versions() {
        let mut cluster = Cluster::start(&version, Options { members: 3, ..options() }).await;
        let keys = Site::new();
        let lines = "revocation.etcd_prefix = \"/keyward/revocations/\"\nrevocation.max_age = \"5s\"\n";
        let keyward = start(&cluster, &keys, lines).await;
        let through = cluster.ctl_as_root().to(vec![keyward.url()]);
        through.ok(&["get", "k"]).await;
        let alice = log_in(&keyward, "alice").await.expect("admitted");
        let bob = log_in(&keyward, "bob").await.expect("admitted");
        assert_eq!(put(&keyward, &alice).await, ok());
        assert_eq!(local_read(&keyward, &bob).await.0, 7, "{version}: admitted, by etcd without a role");
        done(&keyward, &["block", "bob"]).await;
        for member in 0..3 {
            cluster.ctl_as_root().to(vec![cluster.url(member)]).ok(&["get", "/a/k"]).await;
        }
        cluster.kill(1);
        cluster.kill(2);
        let old = async || (keyward.metric("keyward_revocation_age_seconds", &[]).await > 12.0).then_some(());
        wait::until(LIMIT, "the last copy of a quorum is older than it may be", old).await;
        let readyz = keyward.admin("/readyz").await;
        assert_eq!(readyz, (200, "degraded: local reads only\n".to_owned()), "{version}");
        assert_eq!(keyward.metric("keyward_degraded", &[]).await, 1.0, "the alert can fire");
        assert_eq!(local_read(&keyward, &alice).await, ok(), "{version}");
        let file = keyward.site().file("through.db").display().to_string();
        through.ok(&["snapshot", "save", &file]).await;
        assert_eq!(local_read(&keyward, &bob).await, refused(), "{version}: it knew that he is blocked");
        assert!(log_in(&keyward, "bob").await.is_err());
        let refused_put = put(&keyward, &alice).await;
        assert_eq!(refused_put, (14, "etcdserver: no leader".to_owned()), "{version}: it needs a quorum");
        let (_, doctor) = command(&keyward, &["doctor"]).await;
        assert!(doctor.contains("quorum_lost") && !doctor.contains("revocation_unknown"), "{doctor}");

        // A replica that never knew the revocations says what it lacks, and asks for nothing that needs a quorum.
        let site = Site::new();
        let config = config(&site, &cluster, &keys, lines);
        let late = Keyward::start_unready(site, &config).await;
        let reason = "the revocations are not known: the cluster has no quorum: a login needs a quorum\n";
        let told = async || (late.admin("/readyz").await == (503, reason.to_owned())).then_some(());
        wait::until(LIMIT, "a replica that starts now names the lost quorum", told).await;
        let (_, doctor) = command(&late, &["doctor"]).await;
        assert!(doctor.contains("revocation_unknown") && doctor.contains("KeywardQuorumLost.md"), "{doctor}");
        assert!(!doctor.contains("etcdctl role add"), "a role needs a quorum: {doctor}");
        assert_eq!(local_read(&late, &alice).await.0, 14, "{version}: nobody is admitted there");

        cluster.restart(1).await;
        cluster.restart(2).await;
        let ready = async || (keyward.admin("/readyz").await == (200, "ok\n".to_owned())).then_some(());
        wait::until(LIMIT, "the quorum is back", ready).await;
        let goes_on = async || (put(&keyward, &alice).await == ok()).then_some(());
        wait::until(LIMIT, "alice writes", goes_on).await;
        assert_eq!(put(&keyward, &bob).await, refused());
        done(&keyward, &["revoke", "alice"]).await;
        assert_eq!(put(&keyward, &alice).await, refused(), "{version}: a new revocation");
    }
}

#[tokio::test]
async fn a_state_file_outlives_the_process() {
    let version = versions().pop().expect("one is pinned");
    let cluster = Cluster::start(&version, options()).await;
    let keys = Site::new();
    let lines = "revocation.state_file = \"state\"\n";
    let keyward = start(&cluster, &keys, lines).await;
    let (alice, root) = (log_in(&keyward, "alice").await, log_in(&keyward, "root").await);
    let (alice, root) = (alice.expect("admitted"), root.expect("admitted"));
    let stream = watch(&keyward, &alice).await;
    done(&keyward, &["revoke", "alice"]).await;
    assert_eq!(end(stream, LIMIT).await.code(), Code::Unauthenticated);
    assert_eq!(put(&keyward, &alice).await, refused());

    let site = keyward.kill();
    let again = config(&site, &cluster, &keys, lines);
    let keyward = Keyward::start(site, &again).await;
    assert_eq!((put(&keyward, &alice).await, put(&keyward, &root).await), (refused(), ok()));

    let new = log_in(&keyward, "alice").await.expect("admitted");
    let stream = watch(&keyward, &new).await;
    // The break-glass: a moment that has passed for every session so far.
    let soon = "2999-01-01T00:00:00Z";
    keyward.reload(&format!("{again}session.not_before = \"{soon}\"\n"));
    assert_eq!(end(stream, LIMIT).await.code(), Code::Unauthenticated);
    assert_eq!(put(&keyward, &root).await, refused());
    keyward.reload(&again);
    wait::until(LIMIT, "it is taken back", async || (put(&keyward, &new).await == ok()).then_some(())).await;
}
