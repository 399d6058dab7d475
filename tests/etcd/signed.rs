//! Tokens that Keyward signs with etcd's own key: each kind of key at real members, and what changes of users and roles, which
//! end every token at once, cost.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::future::join_all;
use rcgen::KeyPair;

use crate::caller::Caller;
use crate::harness::binary::{Version, full};
use crate::harness::keyward::{Keyward, Site};
use crate::harness::{Auth, Cluster, Options, every_version, wait};
use crate::steady::of_each;

const LIMIT: Duration = Duration::from_secs(60);
/// Nothing here can make an RSA key. It signs nothing else.
const RSA: &str = include_str!("../rsa-key.base64");

/// A private key and its public one.
struct Keys {
    private: PathBuf,
    public: PathBuf,
}

impl Keys {
    fn new(site: &Site, method: &str) -> Keys {
        let of = match method {
            "ES256" => &rcgen::PKCS_ECDSA_P256_SHA256,
            "ES384" => &rcgen::PKCS_ECDSA_P384_SHA384,
            "EdDSA" => &rcgen::PKCS_ED25519,
            _ => &rcgen::PKCS_RSA_SHA256,
        };
        let rsa = format!("-----BEGIN PRIVATE KEY-----\n{RSA}-----END PRIVATE KEY-----\n");
        let (pair, private) = if of == &rcgen::PKCS_RSA_SHA256 {
            (KeyPair::from_pem_and_sign_algo(&rsa, of).expect("a key"), rsa)
        } else {
            let pair = KeyPair::generate_for(of).expect("a key");
            let private = pair.serialize_pem();
            (pair, private)
        };
        let public = site.write("jwt.pub", &pair.public_key_pem());
        Keys { private: site.write("jwt.key", &private), public }
    }
}

/// Members that sign with it too.
async fn cluster(version: &Version, method: &str, keys: &Keys, members: usize) -> Cluster {
    let (public, private) = (keys.public.display(), keys.private.display());
    let token = format!("--auth-token=jwt,sign-method={method},pub-key={public},priv-key={private},ttl=60s");
    let auth = Auth::On { extra_users: 0 };
    Cluster::start(version, Options { members, auth, flags: vec![token], ..Options::default() }).await
}

/// Everybody is alice.
async fn keyward(site: Site, cluster: &Cluster, method: &str, keys: &Keys) -> Keyward {
    let config = site.listening(cluster, ", default_user = \"alice\"")
        + "[[user]]\nname = \"alice\"\njwt = true\n"
        + &format!("[sign_jwt]\nmethod = \"{method}\"\nkey = {:?}\n", keys.private);
    Keyward::start(site, &config).await
}

/// etcd knows EdDSA from 3.6 on.
#[tokio::test]
async fn members_accept_what_is_signed_by_each_kind_of_key() {
    let every = ["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384"];
    let few = ["RS256", "PS256", "ES256", "ES384"];
    let methods = if full() { &every[..] } else { &few };
    let mut wanted: Vec<(Version, &str)> = Vec::new();
    for version in every_version() {
        wanted.extend(methods.iter().map(|method| (version.clone(), *method)));
        if version.at_least("3.6") {
            wanted.push((version, "EdDSA"));
        }
    }
    for (version, method) in wanted {
        let site = Site::new();
        let keys = Keys::new(&site, method);
        let cluster = cluster(&version, method, &keys, 1).await;
        let keyward = keyward(site, &cluster, method, &keys).await;
        let alice = Caller::anybody(keyward.site().listen).await;
        alice
            .put("/a/x", b"1".to_vec(), 0)
            .await
            .unwrap_or_else(|refused| panic!("{version} {method}: {refused}"));
        cluster.ctl_as_root().ok(&["role", "add", "another"]).await;
        assert_eq!(alice.keys("/a/").await, ["/a/x"], "{version} {method}: the auth revision moved");
        println!("{version}: {method}");
    }
}

/// Rules 19: one question for all, and nobody notices.
#[tokio::test]
async fn a_change_of_roles_costs_one_question_however_many_call() {
    const CALLERS: usize = 64;
    const CHANGES: usize = 10;
    // 3.4 has no such call: there the revision stands among the metrics.
    for version in every_version().into_iter().filter(|version| version.at_least("3.5")) {
        let site = Site::new();
        let keys = Keys::new(&site, "ES256");
        let cluster = cluster(&version, "ES256", &keys, 1).await;
        let keyward = keyward(site, &cluster, "ES256", &keys).await;
        let questions = async || -> f64 {
            of_each(&cluster, "grpc_server_started_total", &[("grpc_method", "AuthStatus")])
                .await
                .iter()
                .sum()
        };
        let before = questions().await;
        let (done, calls) = (AtomicBool::new(false), AtomicUsize::new(0));
        let listen = keyward.site().listen;
        let calling = join_all((0..CALLERS).map(async |number| {
            let alice = Caller::anybody(listen).await;
            while !done.load(Ordering::Relaxed) {
                let key = format!("/a/{number:02}");
                alice.put(&key, b"1".to_vec(), 0).await.unwrap_or_else(|error| panic!("{version}: {error}"));
                assert_eq!(alice.keys(&key).await, [key]);
                calls.fetch_add(1, Ordering::Relaxed);
            }
        }));
        let changing = async {
            let root = cluster.ctl_as_root();
            for number in 0..CHANGES {
                root.ok(&["role", "add", &format!("role-{number}")]).await;
                // Everybody has called since.
                let (seen, enough) = (calls.load(Ordering::Relaxed), 2 * CALLERS);
                let more = async || (calls.load(Ordering::Relaxed) >= seen + enough).then_some(());
                wait::until(LIMIT, "all have called", more).await;
            }
            done.store(true, Ordering::Relaxed);
        };
        tokio::join!(calling, changing);
        let asked = questions().await - before;
        let healed = keyward.metric("keyward_calls_healed_total", &[]).await;
        println!("{version}: {CALLERS} callers, {CHANGES} changes: {asked} questions, {healed} calls healed");
        // The first, and one for each change.
        let most = f64::from(u32::try_from(CHANGES + 1).expect("small"));
        assert!((2.0..=most).contains(&asked), "{version}: {asked} questions");
        assert!(healed >= most - 1.0, "{version}: each change was noticed by somebody: {healed}");
    }
}

/// Members take up a change one after the other: what one calls too old another calls too new.
#[tokio::test]
async fn members_that_lag_behind_each_other_are_told_the_truth_in_the_end() {
    for version in every_version() {
        let site = Site::new();
        let keys = Keys::new(&site, "PS256");
        let cluster = cluster(&version, "PS256", &keys, 3).await;
        let keyward = keyward(site, &cluster, "PS256", &keys).await;
        let (done, listen) = (AtomicBool::new(false), keyward.site().listen);
        let calling = join_all((0..16).map(async |number| {
            let alice = Caller::anybody(listen).await;
            while !done.load(Ordering::Relaxed) {
                let key = format!("/a/{number:02}");
                alice.put(&key, b"1".to_vec(), 0).await.unwrap_or_else(|error| panic!("{version}: {error}"));
                assert_eq!(alice.keys(&key).await, [key]);
            }
        }));
        let changing = async {
            let root = cluster.ctl_as_root();
            for number in 0..if full() { 40 } else { 10 } {
                root.ok(&["role", "add", &format!("role-{number}")]).await;
            }
            done.store(true, Ordering::Relaxed);
        };
        tokio::join!(calling, changing);
    }
}
