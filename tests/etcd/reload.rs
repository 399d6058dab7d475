//! Files change while Keyward runs: it follows without a signal, keeps what it had where the new is bad, and no stream ends.

use std::collections::BTreeSet;
use std::fs;
use std::net::SocketAddr;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use keyward::pb::etcdserverpb::MemberListRequest;
use keyward::pb::etcdserverpb::cluster_client::ClusterClient;
use keyward::pb::etcdserverpb::watch_client::WatchClient;
use keyward::pb::etcdserverpb::watch_request::RequestUnion;
use keyward::pb::etcdserverpb::{WatchCreateRequest, WatchRequest, WatchResponse};
use keyward::tasks::Tasks;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio_rustls::TlsConnector;
use tonic::{Code, Streaming};

use crate::caller::Caller;
use crate::harness::keyward::{Keyward, Site};
use crate::harness::relay::Relay;
use crate::harness::{Auth, Cluster, Options, versions, wait};
use crate::operating::status;

const LIMIT: Duration = Duration::from_secs(60);

/// A folder as Kubernetes mounts a secret, and the certificate in it.
struct Mounted {
    folder: String,
    shown: CertificateDer<'static>,
}

fn mounted(root: &Path, folder: &str) -> Mounted {
    let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).expect("a name");
    fs::create_dir(root.join(folder)).expect("the folder is ours");
    fs::write(root.join(folder).join("tls.crt"), made.cert.pem()).expect("written");
    fs::write(root.join(folder).join("tls.key"), made.signing_key.serialize_pem()).expect("written");
    Mounted { folder: folder.to_owned(), shown: made.cert.der().clone() }
}

/// Puts another folder behind the same names, at once.
fn swap(root: &Path, to: &str) {
    symlink(to, root.join("..new")).expect("the folder is ours");
    fs::rename(root.join("..new"), root.join("..data")).expect("the folder is ours");
}

/// The certificate that a new connection is shown; none that is not among these.
async fn shown(address: SocketAddr, trusted: &[&Mounted]) -> Option<CertificateDer<'static>> {
    let mut roots = RootCertStore::empty();
    trusted.iter().for_each(|one| roots.add(one.shown.clone()).expect("a certificate"));
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let mut config = config.expect("ring has them").with_root_certificates(roots).with_no_client_auth();
    config.alpn_protocols = vec![b"h2".to_vec()];
    let tcp = tokio::net::TcpStream::connect(address).await.ok()?;
    let name = ServerName::try_from("localhost").expect("a name");
    let stream = TlsConnector::from(Arc::new(config)).connect(name, tcp).await.ok()?;
    stream.get_ref().1.peer_certificates()?.first().cloned().map(CertificateDer::into_owned)
}

/// A watch of `/a/k` that stands.
async fn watching(alice: &Caller) -> Streaming<WatchResponse> {
    let create = WatchCreateRequest { key: "/a/k".into(), ..WatchCreateRequest::default() };
    let create = WatchRequest { request_union: Some(RequestUnion::CreateRequest(create)) };
    let asked =
        futures_util::StreamExt::chain(futures_util::stream::iter([create]), futures_util::stream::pending());
    let mut watch = WatchClient::new(alice.channel.clone());
    let mut watch = watch.watch(alice.request(asked)).await.expect("admitted").into_inner();
    assert!(watch.message().await.expect("admitted").expect("created").created);
    watch
}

#[tokio::test]
async fn certificates_are_followed_and_a_bad_one_is_not() {
    let version = versions().pop().expect("one is pinned");
    let options = Options { auth: Auth::On { extra_users: 0 }, ..Options::default() };
    let cluster = Cluster::start(&version, options).await;
    let (site, tls) = (Site::new(), Site::new().listen);
    let root = site.file("secret");
    fs::create_dir(&root).expect("the folder is ours");
    let (one, two) = (mounted(&root, "..v1"), mounted(&root, "..v2"));
    swap(&root, &one.folder);
    for name in ["tls.crt", "tls.key"] {
        symlink(Path::new("..data").join(name), root.join(name)).expect("the folder is ours");
    }
    let second = format!(
        " }}, {{ name = \"tls\", address = \"{tls}\", tls = {{ cert = \"secret/tls.crt\", key = \"secret/tls.key\" }} }}]"
    );
    let config = site.in_front_of(&cluster).replacen(" }]", &second, 1);
    let keyward = Keyward::start(site, &config).await;
    let both = [&one, &two];
    let shows = async |wanted: &Mounted| {
        let look = async || (shown(tls, &both).await.as_ref() == Some(&wanted.shown)).then_some(());
        wait::until(LIMIT, &format!("{} is shown", wanted.folder), look).await;
    };
    shows(&one).await;

    let alice = Caller::log_in(keyward.site().listen, "alice").await;
    let mut watch = watching(&alice).await;

    swap(&root, &two.folder);
    shows(&two).await;

    // The certificate of one and the key of the other.
    fs::create_dir(root.join("..v3")).expect("the folder is ours");
    for (from, name) in [(&one, "tls.crt"), (&two, "tls.key")] {
        fs::copy(root.join(&from.folder).join(name), root.join("..v3").join(name)).expect("copied");
    }
    let refused = async || {
        let count = keyward.metric("keyward_config_reloads_refused_total", &[]).await;
        (count > 0.0).then_some(())
    };
    swap(&root, "..v3");
    wait::until(LIMIT, "the bad pair is read", refused).await;
    let is_refusal = |line: &str| line.contains("configuration not reloaded");
    let log = keyward.logged("the refusal of the bad pair", is_refusal).await;
    let said = log.lines().find(|line| is_refusal(line)).expect("it is said");
    assert!(said.contains("listener[1].tls.key"), "{said}");
    assert!(!log.contains("PRIVATE KEY"), "no secret is told");
    shows(&two).await;

    swap(&root, &one.folder);
    shows(&one).await;
    alice.put("/a/k", b"v".to_vec(), 0).await.expect("put");
    let event = watch.message().await.expect("no stream has ended").expect("no stream has ended");
    assert_eq!(event.events.len(), 1);
}

#[tokio::test]
async fn a_password_of_keywards_own_is_changed_without_a_restart() {
    let version = versions().pop().expect("one is pinned");
    let options = Options { auth: Auth::On { extra_users: 0 }, ..Options::default() };
    let cluster = Cluster::start(&version, options).await;
    let ctl = cluster.ctl_as_root();
    ctl.ok(&["user", "add", "keeper:first-secret"]).await;
    ctl.ok(&["user", "grant-role", "keeper", "ra"]).await;
    let site = Site::new();
    let file = site.write("keeper-password", "first-secret");
    let lines = format!(
        "revocation = {{ etcd_prefix = \"/a/revoked/\", user = \"keeper\", max_age = \"5s\" }}\n\
         [[user]]\nname = \"keeper\"\npassword_file = {file:?}\n"
    );
    let config = site.in_front_of(&cluster) + &lines;
    let keyward = Keyward::start(site, &config).await;
    let changed = ctl.run_with(&["user", "passwd", "keeper", "--interactive=false"], "second-secret\n").await;
    assert_eq!(changed.code, Some(0), "{changed:?}");
    let too_old =
        async || keyward.admin("/readyz").await.1.contains("revocations are not known").then_some(());
    wait::until(LIMIT, "revocations cannot be read any more", too_old).await;

    keyward.site().write("keeper-password", "second-secret");
    keyward.ready().await;
    let changed = |line: &str| line.contains("revocation.user: another user or password");
    let log = keyward.logged("the change of the password", changed).await;
    assert!(!log.contains("-secret"), "no secret is told");
}

/// The configuration with these listeners in place of its own.
fn with_listeners(config: &str, listeners: &[String]) -> String {
    let (first, rest) = config.split_once('\n').expect("lines");
    assert!(first.starts_with("listener = "));
    format!("listener = [{}]\n{rest}", listeners.join(", "))
}

fn plain(name: &str, address: SocketAddr) -> String {
    format!("{{ name = \"{name}\", address = \"{address}\" }}")
}

#[tokio::test]
async fn listeners_come_go_and_change_and_whoever_is_at_the_others_does_not_notice() {
    let version = versions().pop().expect("one is pinned");
    let options = Options { auth: Auth::On { extra_users: 0 }, ..Options::default() };
    let cluster = Cluster::start(&version, options).await;
    let site = Site::new();
    let [gone, new] = [Site::new().listen, Site::new().listen];
    let base = site.in_front_of(&cluster);
    let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).expect("a name");
    let (cert, key) =
        (site.write("a.crt", &made.cert.pem()), site.write("a.key", &made.signing_key.serialize_pem()));
    let stays = plain("main", site.listen);
    let keyward = Keyward::start(site, &with_listeners(&base, &[stays.clone(), plain("gone", gone)])).await;
    let main = keyward.site().listen;
    let (alice, other) = (Caller::log_in(main, "alice").await, Caller::log_in(gone, "alice").await);
    let (mut watch, mut ends) = (watching(&alice).await, watching(&other).await);

    keyward.reload(&with_listeners(&base, &[stays.clone(), plain("new", new)]));
    let status = ends.message().await.expect_err("its listener is gone");
    assert_eq!((status.code(), status.message()), (Code::Unavailable, "etcdserver: server stopped"));
    let refused = async || tokio::net::TcpStream::connect(gone).await.is_err().then_some(());
    wait::until(LIMIT, "nobody listens there any more", refused).await;
    let listens = async || tokio::net::TcpStream::connect(new).await.is_ok().then_some(());
    wait::until(LIMIT, "the new one listens", listens).await;
    let newcomer = Caller::log_in(new, "alice").await;
    newcomer.put("/a/k", b"1".to_vec(), 0).await.expect("put");
    assert_eq!(watch.message().await.expect("it goes on").expect("it goes on").events.len(), 1);

    // One that cannot be bound, and one that would go: neither happens.
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let taken = taken.local_addr().map(|address| (taken, address)).expect("bound");
    let before = keyward.metric("keyward_config_reloads_refused_total", &[]).await;
    keyward.reload(&with_listeners(&base, &[stays, plain("taken", taken.1)]));
    let refused = async || {
        let now = keyward.metric("keyward_config_reloads_refused_total", &[]).await;
        (now > before).then_some(())
    };
    wait::until(LIMIT, "it is refused", refused).await;
    let why = format!("listener taken: cannot listen on {}", taken.1);
    keyward.logged(&why, |line| line.contains(&why)).await;
    newcomer.put("/a/k", b"2".to_vec(), 0).await.expect("it is still there");
    Caller::log_in(new, "alice").await;
    assert_eq!(watch.message().await.expect("it goes on").expect("it goes on").events.len(), 1);

    // Where TLS comes, the socket stays and its clients leave.
    let tls =
        format!("{{ name = \"main\", address = \"{main}\", tls = {{ cert = {cert:?}, key = {key:?} }} }}");
    keyward.reload(&with_listeners(&base, &[tls, plain("new", new)]));
    let status = watch.message().await.expect_err("it was plaintext");
    assert_eq!((status.code(), status.message()), (Code::Unavailable, "etcdserver: server stopped"));
    let mounted = Mounted { folder: String::new(), shown: made.cert.der().clone() };
    assert_eq!(shown(main, &[&mounted]).await.as_ref(), Some(&mounted.shown));
    newcomer.put("/a/k", b"3".to_vec(), 0).await.expect("the other goes on");
}

#[tokio::test]
async fn limits_and_what_is_advertised_change_under_open_connections() {
    let version = versions().pop().expect("one is pinned");
    let options = Options { auth: Auth::On { extra_users: 0 }, ..Options::default() };
    let cluster = Cluster::start(&version, options).await;
    let site = Site::new();
    let base = site.in_front_of(&cluster);
    let keyward = Keyward::start(site, &base).await;
    let alice = Caller::log_in(keyward.site().listen, "alice").await;
    let mut watch = watching(&alice).await;
    alice.put("/a/k", vec![b'v'; 4096], 0).await.expect("put");

    let reloads = keyward.metric("keyward_config_reloads_total", &[]).await;
    let url = "http://elsewhere.example.com:2379";
    keyward.reload(&format!(
        "{base}limits.request_size = \"1KiB\"\nlimits.connections = 1\nadvertise.client_urls = [{url:?}]\n"
    ));
    let reloaded =
        async || (keyward.metric("keyward_config_reloads_total", &[]).await > reloads).then_some(());
    wait::until(LIMIT, "it is read", reloaded).await;
    let refused = alice.put("/a/k", vec![b'v'; 4096], 0).await.expect_err("it is larger than may be");
    assert_eq!(refused.code(), Code::ResourceExhausted, "{refused}");
    alice.put("/a/k", b"small".to_vec(), 0).await.expect("put");
    let over = keyward.metric("keyward_downstream_connections_refused_total", &[]).await;
    // It is closed as soon as it is accepted.
    let closed = async || {
        drop(tokio::net::TcpStream::connect(keyward.site().listen).await);
        let now = keyward.metric("keyward_downstream_connections_refused_total", &[]).await;
        (now > over).then_some(())
    };
    wait::until(LIMIT, "one connection is all", closed).await;
    let list = alice.request(MemberListRequest { linearizable: false });
    let list =
        ClusterClient::new(alice.channel.clone()).member_list(list).await.expect("listed").into_inner();
    assert_eq!(list.members[0].client_ur_ls, [url]);
    let mut seen = Vec::new();
    while seen.len() < 2 {
        let told = watch.message().await.expect("it goes on").expect("it goes on");
        seen.extend(told.events.iter().map(|event| event.kv.as_ref().expect("a put").value.len()));
    }
    assert_eq!(seen, [4096, 5]);
    let log = keyward.logged("the change of limits", |line| line.contains("limits: changed")).await;
    assert!(!log.contains("at the next start"), "{log}");
}

/// Waits until three members are ready, at these.
async fn found_at(keyward: &Keyward, urls: &[String; 3]) {
    let look = async || {
        let (serves, told) = status(keyward).await;
        let rows = told["members"].as_array()?;
        let at: BTreeSet<_> = rows.iter().filter_map(|row| row["endpoint"].as_str()).collect();
        let ready = rows.iter().filter(|row| row["ready"] == true).count();
        (serves && ready == 3 && at == urls.iter().map(String::as_str).collect()).then_some(())
    };
    wait::until(LIMIT, &format!("members are found at {urls:?}"), look).await;
}

/// Where members are found first is replaced: by other names for the same addresses, then another address for one member. The
/// member list has none of them.
#[tokio::test]
async fn endpoints_change_and_streams_to_members_that_are_still_there_stay() {
    const WATCHES: usize = 6;
    let changed = Box::pin(async {
        let version = versions().pop().expect("one is pinned");
        let tasks = Tasks::default();
        let options = Options { members: 3, auth: Auth::On { extra_users: 0 }, ..Options::default() };
        let cluster = Cluster::start(&version, options).await;
        let mut relays = Vec::new();
        for i in 0..3 {
            let relay = Relay::start(&tasks).await;
            relay.open(cluster.address(i));
            relays.push(relay);
        }
        let by = |host: &str| [0, 1, 2].map(|i: usize| format!("http://{host}:{}", relays[i].address.port()));
        let site = Site::new();
        let base = site.in_front_of(&cluster);
        let base =
            base.lines().filter(|line| !line.starts_with("cluster.endpoints")).collect::<Vec<_>>().join("\n");
        let with = |urls: &[String]| {
            format!("{base}\nadmin.socket = \"admin.sock\"\ncluster.endpoints = {urls:?}\n")
        };
        let keyward = Keyward::start(site, &with(&by("127.0.0.1"))).await;
        found_at(&keyward, &by("127.0.0.1")).await;
        let mut watches = Vec::new();
        for _ in 0..WATCHES {
            let alice = Caller::log_in(keyward.site().listen, "alice").await;
            watches.push((watching(&alice).await, alice));
        }
        let mut puts = 0;
        let mut all_hear = async || {
            puts += 1;
            let value = vec![b'v'; puts];
            watches[0].1.put("/a/k", value.clone(), 0).await.expect("put");
            for (watch, _) in &mut watches {
                let told = watch.message().await.expect("no stream has ended").expect("no stream has ended");
                let heard: Vec<_> =
                    told.events.iter().map(|event| &event.kv.as_ref().expect("a put").value).collect();
                assert_eq!(heard, [&value]);
            }
        };
        all_hear().await;
        let resumes = async || keyward.metric("keyward_watch_resumes_total", &[]).await;
        assert_eq!(resumes().await, 0.0);

        let mut urls = by("localhost");
        keyward.reload(&with(&urls));
        found_at(&keyward, &urls).await;
        all_hear().await;
        assert_eq!(resumes().await, 0.0, "they are where they were");

        urls[0] = cluster.url(0);
        keyward.reload(&with(&urls));
        found_at(&keyward, &urls).await;
        let left = async || (relays[0].live() == 0).then_some(());
        wait::until(LIMIT, "nothing is left where that one was", left).await;
        all_hear().await;
        let resumed = resumes().await;
        println!(
            "{version}: {resumed} of {WATCHES} watch streams were at the member that is found elsewhere now"
        );
        assert!(resumed > 0.0 && resumed < WATCHES as f64, "{resumed}");
        let log = keyward.log();
        assert!(!log.contains("at the next start"), "{log}");
        drop((keyward, relays));
    });
    tokio::task::LocalSet::new().run_until(changed).await;
}
