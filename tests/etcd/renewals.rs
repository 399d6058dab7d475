//! What proves users upstream is renewed on disk, under the same names: Keyward follows without a signal, new connections show the
//! new one, and no call or stream notices.
//!
//! That new connections do not show the old one is seen by etcd refusing it (`--client-crl-file`, which it reads at each handshake) once
//! all connections must be made anew.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use keyward::pb::etcdserverpb::watch_client::WatchClient;
use keyward::pb::etcdserverpb::watch_request::RequestUnion;
use keyward::pb::etcdserverpb::{WatchCreateRequest, WatchRequest, WatchResponse};
use rcgen::SerialNumber;
use tempfile::TempDir;
use tonic::Streaming;

use crate::caller::Caller;
use crate::harness::binary::{Version, full};
use crate::harness::keyward::{ALL_CALLS, Keyward, Site};
use crate::harness::pki::{Pair, Pki};
use crate::harness::{Auth, Cluster, Options, Tls, password, versions, wait};

const LIMIT: Duration = Duration::from_secs(60);
/// Calls that pass while the renewal is awaited, and after it.
const CALLS: usize = 20;

/// One is enough for CI: etcd's part is the same in all.
fn some() -> Vec<Version> {
    let mut versions = versions();
    if full() { versions } else { versions.split_off(versions.len() - 1) }
}

/// What etcd takes no more.
struct Revoked {
    folder: TempDir,
    pki: Pki,
}

impl Revoked {
    fn nothing() -> Revoked {
        let folder = TempDir::new().expect("a temporary folder");
        let pki = Pki::new(&folder.path().join("lists"));
        let revoked = Revoked { folder, pki };
        revoked.these(&[1]);
        revoked
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("revoked.crl")
    }

    fn these(&self, serials: &[u64]) {
        let new = self.folder.path().join("new");
        fs::write(&new, self.pki.revoked_der(serials)).expect("the folder is ours");
        fs::rename(new, self.path()).expect("the folder is ours");
    }

    async fn cluster(&self, version: &Version) -> Cluster {
        let auth = Auth::On { extra_users: 0 };
        let flags = vec![format!("--client-crl-file={}", self.path().display())];
        Cluster::start(version, Options { auth, tls: Tls::Mutual, flags, ..Options::default() }).await
    }
}

/// Everybody is alice. There are many calls.
fn before(site: &Site, cluster: &Cluster) -> String {
    site.listening(cluster, ", default_user = \"alice\"").replace(ALL_CALLS, "log.access = \"off\"")
}

/// Puts the pair where the configuration has it.
fn install(site: &Site, name: &str, pair: &Pair) -> Pair {
    let text = |path: &Path| fs::read_to_string(path).expect("the harness wrote it");
    let cert = site.write(&format!("{name}.crt"), &text(&pair.cert));
    Pair { cert, key: site.write(&format!("{name}.key"), &text(&pair.key)) }
}

fn serial(pki: &Pki, user: &str, number: u64) -> Pair {
    pki.changed(&format!("{user}-{number}"), user, |params| {
        params.serial_number = Some(SerialNumber::from(number));
    })
}

/// A client that never stops, and a watch.
struct Client {
    alice: Caller,
    watch: Streaming<WatchResponse>,
    events: usize,
}

impl Client {
    async fn of(keyward: &Keyward) -> Client {
        let alice = Caller::anybody(keyward.site().listen).await;
        let create = WatchCreateRequest { key: "/a/w".into(), ..WatchCreateRequest::default() };
        let create = WatchRequest { request_union: Some(RequestUnion::CreateRequest(create)) };
        let asked = futures_util::StreamExt::chain(
            futures_util::stream::iter([create]),
            futures_util::stream::pending(),
        );
        let watch = WatchClient::new(alice.channel.clone()).watch(alice.request(asked)).await;
        let mut watch = watch.expect("admitted").into_inner();
        assert!(watch.message().await.expect("admitted").expect("created").created);
        Client { alice, watch, events: 0 }
    }

    /// Calls without an end while `change` is awaited, and a little longer.
    async fn calls_while(&self, change: impl Future<Output = ()>) {
        let (done, calls) = (AtomicBool::new(false), AtomicUsize::new(0));
        let passed = async || {
            let (seen, more) = (calls.load(Ordering::Relaxed), CALLS);
            let look = async || (calls.load(Ordering::Relaxed) >= seen + more).then_some(());
            wait::until(LIMIT, "calls pass", look).await;
        };
        let calling = async {
            while !done.load(Ordering::Relaxed) {
                self.alice.put("/a/x", b"1".to_vec(), 0).await.expect("no call notices");
                calls.fetch_add(1, Ordering::Relaxed);
            }
        };
        let changing = async {
            passed().await;
            change.await;
            passed().await;
            done.store(true, Ordering::Relaxed);
        };
        tokio::join!(calling, changing);
    }

    /// Until calls pass again, where something was in the way.
    async fn calls_pass(&self) {
        let look = async || self.alice.put("/a/x", b"1".to_vec(), 0).await.ok();
        wait::until(LIMIT, "calls pass again", look).await;
    }

    /// The watch goes on.
    async fn watches(&mut self) {
        self.alice.put("/a/w", b"1".to_vec(), 0).await.expect("a write");
        let told = tokio::time::timeout(LIMIT, self.watch.message()).await.expect("the event comes");
        let told = told.expect("no stream ends").expect("no stream ends");
        assert_eq!(told.events.len(), 1, "{told:?}");
        self.events += 1;
        assert_eq!(
            told.events[0].kv.as_ref().expect("a key").version,
            i64::try_from(self.events).expect("few")
        );
    }
}

/// Waits until `keyward` has read what was written, and said `change` of it.
async fn reloaded(keyward: &Keyward, change: &str) {
    let escaped = change.replace('"', "\\\"");
    let look = async || {
        let log = keyward.log();
        log.lines()
            .any(|line| line.contains("configuration reloaded") && line.contains(&escaped))
            .then_some(())
    };
    wait::until(LIMIT, &format!("it is said: {change}"), look).await;
}

/// All connections are made anew.
async fn anew(cluster: &mut Cluster, keyward: &Keyward) {
    cluster.kill(0);
    cluster.restart(0).await;
    keyward.ready().await;
}

#[tokio::test]
async fn certificates_that_are_renewed_on_disk_are_shown_by_new_connections() {
    for version in some() {
        let revoked = Revoked::nothing();
        let mut cluster = revoked.cluster(&version).await;
        let site = Site::new();
        let alice = install(&site, "alice", &serial(cluster.pki(), "alice", 101));
        let own = install(&site, "own", &serial(cluster.pki(), "keyward", 201));
        let nobody = cluster.pki().nobody();
        let config = before(&site, &cluster)
            + &format!("[[user]]\nname = \"alice\"\ncert = {:?}\nkey = {:?}\n", alice.cert, alice.key);
        let config = config
            .replace(&format!("{:?}", nobody.cert), &format!("{:?}", own.cert))
            .replace(&format!("{:?}", nobody.key), &format!("{:?}", own.key));
        let keyward = Keyward::start(site, &config).await;
        let mut client = Client::of(&keyward).await;
        let renewed = async {
            install(keyward.site(), "alice", &serial(cluster.pki(), "alice", 102));
            install(keyward.site(), "own", &serial(cluster.pki(), "keyward", 202));
            reloaded(&keyward, "user \"alice\": another certificate").await;
            reloaded(&keyward, "cluster.tls: ").await;
            revoked.these(&[101, 201]);
        };
        client.calls_while(renewed).await;
        client.watches().await;
        anew(&mut cluster, &keyward).await;
        client.calls_pass().await;
        client.watches().await;
        // Nothing of it waits for a restart.
        assert!(!keyward.log().contains("takes effect at the next start"), "{version}");
    }
}

#[tokio::test]
async fn a_minting_authority_that_is_renewed_on_disk_mints_at_once() {
    for version in some() {
        let revoked = Revoked::nothing();
        let mut cluster = revoked.cluster(&version).await;
        let site = Site::new();
        let mint = install(&site, "mint", &cluster.pki().another_mint("mint-1", Some(301)));
        let config = before(&site, &cluster)
            + &format!(
                "[[user]]\nname = \"*\"\nmint = true\n[mint]\nca = {:?}\nkey = {:?}\n",
                mint.cert, mint.key
            );
        let keyward = Keyward::start(site, &config).await;
        let mut client = Client::of(&keyward).await;
        let renewed = async {
            install(keyward.site(), "mint", &cluster.pki().another_mint("mint-2", Some(302)));
            reloaded(&keyward, "[mint] changed").await;
            revoked.these(&[301]);
        };
        client.calls_while(renewed).await;
        client.watches().await;
        anew(&mut cluster, &keyward).await;
        client.calls_pass().await;
        client.watches().await;
    }
}

#[tokio::test]
async fn a_password_that_is_changed_at_etcd_and_in_its_file_is_used_at_once() {
    for version in some() {
        let options = Options { auth: Auth::On { extra_users: 0 }, ..Options::default() };
        let cluster = Cluster::start(&version, options).await;
        let site = Site::new();
        let file = site.write("alice-password", &password("alice"));
        let config =
            before(&site, &cluster) + &format!("[[user]]\nname = \"alice\"\npassword_file = {file:?}\n");
        let keyward = Keyward::start(site, &config).await;
        let mut client = Client::of(&keyward).await;
        client.watches().await;
        let renewed = password("alice-renewed");
        let root = cluster.ctl_as_root();
        let changed = root.run_with(&["user", "passwd", "alice", "--interactive=false"], &renewed).await;
        assert_eq!(changed.code, Some(0), "{version}: {}", changed.stderr);
        keyward.site().write("alice-password", &renewed);
        reloaded(&keyward, "user \"alice\": another password").await;
        client.calls_pass().await;
        client.calls_while(async {}).await;
        client.watches().await;
        assert!(!keyward.log().contains(&renewed), "{version}: it is told by its user alone");
    }
}

#[tokio::test]
async fn a_key_for_tokens_that_is_renewed_at_etcd_and_on_disk_signs_at_once() {
    for version in some() {
        let shared = TempDir::new().expect("a temporary folder");
        let (etcds, secret) =
            (shared.path().join("secret"), |number: u8| format!("secret number {number} of two"));
        fs::write(&etcds, secret(1)).expect("the folder is ours");
        let flags = vec![format!("--auth-token=jwt,sign-method=HS256,priv-key={},ttl=60s", etcds.display())];
        let options = Options { auth: Auth::On { extra_users: 0 }, flags, ..Options::default() };
        let mut cluster = Cluster::start(&version, options).await;
        let site = Site::new();
        let key = site.write("jwt-key", &secret(1));
        let config = before(&site, &cluster)
            + "[[user]]\nname = \"alice\"\njwt = true\n"
            + &format!("[sign_jwt]\nmethod = \"HS256\"\nkey = {key:?}\n");
        let keyward = Keyward::start(site, &config).await;
        let mut client = Client::of(&keyward).await;
        client.watches().await;
        fs::write(&etcds, secret(2)).expect("the folder is ours");
        keyward.site().write("jwt-key", &secret(2));
        reloaded(&keyward, "[sign_jwt] changed").await;
        anew(&mut cluster, &keyward).await;
        client.calls_pass().await;
        client.calls_while(async {}).await;
        client.watches().await;
    }
}
