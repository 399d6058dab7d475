//! Credentials that prove nothing, and headers that a client may not set.

use super::{Scene, arrived, log_in, log_of, password, put, put_request, started, told};
use crate::{
    harness::{
        Cluster, Tls, every_version,
        keyward::{Keyward, Site},
        newest,
    },
    raw::{Call, Endpoint, frame},
};

const INVALID: (Option<u32>, &str) = (Some(16), "etcdserver: invalid auth token");
const FAILED: (u32, &str) = (3, "etcdserver: authentication failed, invalid user ID or password");

fn is(told: &(Option<u32>, String), expected: (Option<u32>, &str)) -> bool {
    (told.0, told.1.as_str()) == expected
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_token_that_proves_nothing_is_refused_and_not_sent() {
    for version in every_version() {
        let mut scene = Scene::start(&version, Tls::Off).await;
        let (alice, foreign) = (scene.session("alice").await, foreign_session(&scene).await);
        let etcds = log_in(&scene.etcd, "alice", &password("alice")).await.expect("the password is right");
        scene.secrets.extend([foreign.clone(), etcds.clone()]);
        let mut changed = alice.clone().into_bytes();
        let last = changed.len() / 2;
        changed[last] = if changed[last] == b'A' { b'B' } else { b'A' };
        let bad = [
            String::new(),
            "nobody-issued-this".into(),
            "Bearer".into(),
            // etcd's own form; the last would make etcd wait until the deadline.
            "abcdefghijklmnop.12".into(),
            "x.999999999".into(),
            "eyJhbGciOiJSUzI1NiJ9.eyJleHAiOjF9.c2lnbmF0dXJl".into(),
            // A valid one of etcd's is not one of ours.
            etcds,
            foreign,
            alice[..alice.len() - 1].to_owned(),
            format!("{alice}A"),
            String::from_utf8(changed).expect("still ASCII"),
            "k".repeat(8_000),
        ];
        let before = started(&scene.cluster, "Put").await;
        for token in &bad {
            for name in ["token", "authorization"] {
                let answer = scene.through.call(&put("/a/refused").with(name, token)).await;
                assert!(is(&told(&answer), INVALID), "{name} {token:?}: {:?}", told(&answer));
            }
        }
        assert_eq!(started(&scene.cluster, "Put").await, before, "something arrived");
        assert!(!arrived(&scene.cluster, "/a/refused"));
        scene.is_unharmed().await;
    }
}

/// A session for alice, issued by another Keyward, which has another key.
async fn foreign_session(scene: &Scene) -> String {
    let site = Site::new();
    let config = site.in_front_of(&scene.cluster);
    let other = Keyward::start(site, &config).await;
    log_in(&Endpoint::plain(other.site().listen), "alice", &password("alice"))
        .await
        .expect("the password is right")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn which_of_several_tokens_counts_is_as_in_etcd() {
    for version in every_version() {
        let mut scene = Scene::start(&version, Tls::Off).await;
        let ours = scene.session("alice").await;
        let etcds = log_in(&scene.etcd, "alice", &password("alice")).await.expect("the password is right");
        // With `VALID` for a valid token. The forms with Bearer, which etcd refuses, follow.
        let headers: &[&[(&'static str, &str)]] = &[
            &[("token", "VALID")],
            &[("authorization", "VALID")],
            &[("token", "VALID"), ("authorization", "bad")],
            &[("token", "bad"), ("authorization", "VALID")],
            &[("authorization", "bad"), ("token", "VALID")],
            // As python etcd3 sends it over TLS, and as a client might that names both.
            &[("token", "VALID"), ("token", "VALID")],
            &[("token", "VALID"), ("authorization", "VALID")],
            &[("token", "VALID"), ("token", "bad")],
            &[("token", "bad"), ("token", "VALID")],
            &[("token", ""), ("authorization", "VALID")],
            &[("authorization", "VALID"), ("authorization", "bad")],
            &[],
        ];
        for headers in headers {
            let with = |token: &str| {
                let set = |call: Call, (name, value): &(&'static str, &str)| {
                    call.with(name, &value.replace("VALID", token))
                };
                headers.iter().fold(put("/a/several"), set)
            };
            let (direct, through) =
                (scene.etcd.call(&with(&etcds)).await, scene.through.call(&with(&ours)).await);
            assert_eq!(told(&through), told(&direct), "etcd {version}: {headers:?}");
        }
        for value in [format!("Bearer {ours}"), format!("bearer {ours}")] {
            for name in ["authorization", "token"] {
                let twice = put("/a/bearer").with(name, &value).with(name, &value);
                for call in [put("/a/bearer").with(name, &value), twice] {
                    let answer = scene.through.call(&call).await;
                    assert_eq!(told(&answer), (Some(0), String::new()), "etcd {version}: {name} with Bearer");
                }
            }
        }
        scene.is_unharmed().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_login_that_fails_says_what_etcd_says_and_shows_nothing() {
    for version in every_version() {
        let mut scene = Scene::start(&version, Tls::Off).await;
        let logins = [
            ("alice", "Wrong-Password-1"),
            ("alice", ""),
            ("alice", "alice-secret "),
            ("nobody", "Wrong-Password-2"),
            ("Alice", "alice-secret"),
            ("root", "Wrong-Password-3"),
            ("", ""),
        ];
        for (user, password) in logins {
            let through = log_in(&scene.through, user, password).await.expect_err("it must fail");
            let direct = log_in(&scene.etcd, user, password).await.expect_err("it must fail");
            assert_eq!(through, direct, "etcd {version}: {user:?}");
            assert_eq!(direct.0, Some(3), "etcd {version}: {user:?}");
        }
        // Right before and after: what is kept of a good login does not let a bad one in.
        scene.session("alice").await;
        let failed = log_in(&scene.through, "alice", "Wrong-Password-4").await.expect_err("it must fail");
        assert!(is(&failed, (Some(FAILED.0), FAILED.1)), "{failed:?}");
        scene.secrets.push("Wrong-Password".into());
        scene.is_unharmed().await;
    }
}

/// etcd counts the versions that clients say they have: a client's own text must not become a label there.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_client_says_of_its_version_is_not_passed_on() {
    let mut scene = Scene::start(&newest("3.5"), Tls::Off).await;
    let token = scene.session("alice").await;
    let etcds = log_in(&scene.etcd, "alice", &password("alice")).await.expect("the password is right");
    let said = |version: &'static str| [("client_api_version", version)];
    let call = |token: &str, version: &str| {
        put("/a/version").with("token", token).with("client-api-version", version)
    };
    assert_eq!(told(&scene.through.call(&call(&token, "8.8")).await).0, Some(0));
    assert_eq!(told(&scene.etcd.call(&call(&etcds, "9.9")).await).0, Some(0));
    let counted =
        async |version| scene.cluster.counter(0, "etcd_server_client_requests_total", &said(version)).await;
    assert_eq!((counted("8.8").await, counted("9.9").await), (0.0, 1.0));
    scene.is_unharmed().await;
}

/// etcd 3.4 and 3.5 make a metric's label of it, which must be text, and newer ones refuse the call.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_version_that_is_no_text_reaches_no_member() {
    for version in every_version() {
        let mut scene = Scene::start(&version, Tls::Off).await;
        let token = scene.session("alice").await;
        let before = started(&scene.cluster, "Put").await;
        for bad in [&b"\xff\xfe"[..], b"3.5\xc3", b"\x80"] {
            let call = put("/a/text").with("token", &token).with_bytes("client-api-version", bad);
            let through = scene.through.call(&call).await;
            assert_eq!(told(&through), (Some(0), String::new()), "etcd {version}: {bad:?}");
        }
        // Each was served, so what no member takes was not passed on; and none has died of it.
        assert_eq!(started(&scene.cluster, "Put").await, before + 3.0, "etcd {version}");
        assert!(!log_of(&scene.cluster).contains("panic"), "etcd {version}");
        scene.is_unharmed().await;
    }
}

/// With client certificates, etcd takes the header for a sign that its own gateway calls, and then ignores the certificate.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_cannot_make_etcd_ignore_the_certificate() {
    let cluster = super::cluster(&newest("3.5"), Tls::Mutual).await;
    let alice = cluster.pki().client("alice");
    let as_alice = Endpoint::tls(cluster.address(0), cluster.pki(), Some(&alice));
    let gateway = put("/a/gateway").with("grpcgateway-accept", "application/json");
    assert_eq!(told(&as_alice.call(&put("/a/gateway")).await), (Some(0), String::new()));
    let ignored = told(&as_alice.call(&gateway).await);
    assert!(is(&ignored, (Some(3), "etcdserver: user name is empty")), "etcd answers {ignored:?}");

    let (keyward, through) = showing_alice(&cluster).await;
    let (without, with) = (told(&through.call(&put("/a/x")).await), told(&through.call(&gateway).await));
    assert_eq!(with, without, "the header made a difference");
    drop(keyward);
}

/// The certificate that Keyward shows to members is Keyward's: nobody becomes its user by showing no token.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_shows_nothing_is_not_whom_keywards_certificate_names() {
    let cluster = super::cluster(&newest("3.5"), Tls::Mutual).await;
    let (keyward, through) = showing_alice(&cluster).await;
    let anonymous = told(&through.call(&put("/a/anonymous")).await);
    assert!(is(&anonymous, (Some(3), "etcdserver: user name is empty")), "{anonymous:?}");
    drop(keyward);
}

/// A Keyward whose certificate towards the members names alice.
async fn showing_alice(cluster: &Cluster) -> (Keyward, Endpoint) {
    let site = Site::new();
    let (nobody, alice) = (cluster.pki().nobody(), cluster.pki().client("alice"));
    let config = site.in_front_of(cluster);
    let config = config.replace(&format!("{:?}", nobody.cert), &format!("{:?}", alice.cert));
    let config = config.replace(&format!("{:?}", nobody.key), &format!("{:?}", alice.key));
    assert!(config.contains(&format!("{:?}", alice.key)), "the configuration shows another certificate");
    let keyward = Keyward::start(site, &config).await;
    let through = Endpoint::plain(keyward.site().listen);
    (keyward, through)
}

/// A request that is refused for its token is refused before its body is looked at, as in etcd.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bad_token_on_every_kind_of_stream_is_refused() {
    let scene = Scene::start(&newest("3.5"), Tls::Off).await;
    for path in [
        "/etcdserverpb.Maintenance/Snapshot",
        "/etcdserverpb.KV/RangeStream",
        "/v3electionpb.Election/Observe",
    ] {
        let call = Call { path: path.into(), body: vec![frame(&put_request("/a/k"))], ..Call::default() };
        let answer = scene.through.call(&call.clone().with("token", "nobody-issued-this")).await;
        let etcds = scene.etcd.call(&call.with("token", "nobody-issued-this")).await;
        assert!(is(&told(&answer), INVALID) || told(&answer) == told(&etcds), "{path}: {:?}", told(&answer));
    }
}
