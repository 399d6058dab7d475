//! Certificates and JWTs that prove nothing, or somebody who is no etcd user: refused as etcd would, and nothing arrives.

use rcgen::{ExtendedKeyUsagePurpose, date_time_ymd};
use serde_json::Value;

use super::{arrived, cluster, log_in, password, put, started, told};
use crate::{
    bad_input::Scene,
    harness::{
        Tls, every_version,
        issuer::{ISSUER, Issuer, claims},
        keyward::{Keyward, Site},
        pki::{Pair, Pki},
    },
    raw::{Answer, Endpoint},
};

/// A listener that asks for certificates, and takes JWTs, in front of one member.
async fn scene(version: &crate::harness::binary::Version, issuer: &Issuer) -> Scene {
    let cluster = cluster(version, Tls::Off).await;
    let (site, pki) = (Site::new(), cluster.pki());
    let (server, keys) = (pki.server(), site.write("ci.pem", &issuer.public_key()));
    let fields = format!(
        ", tls.cert = {:?}, tls.key = {:?}, tls.client_ca = {:?}, tls.client_ca_name = \"staff\", \
         tls.client_crl = {:?}, tls.client_auth = \"optional\"",
        server.cert,
        server.key,
        pki.ca,
        pki.revoke(&[666])
    );
    let alice = site.write("alice-password", &password("alice"));
    let config = site.listening(&cluster, &fields)
        + &format!(
            "log.level = \"debug\"\n\
             [[user]]\nname = \"alice\"\npassword_file = {alice:?}\n\
             [[jwt]]\nissuer = \"{ISSUER}\"\naudience = \"etcd\"\nkeys = {keys:?}\n\
             [[map]]\npeer = \"cert:staff:CN=*\"\nas = \"same\"\n\
             [[map]]\npeer = \"jwt:{ISSUER}:*\"\nas = \"same\"\n"
        );
    let keyward = Keyward::start(site, &config).await;
    let (etcd, through) = (cluster.endpoint(0), Endpoint::tls(keyward.site().listen, pki, None));
    let secrets = ["root", "alice", "bob"].map(password).to_vec();
    Scene { cluster, keyward, etcd, through, secrets }
}

async fn shown(scene: &Scene, pair: &Pair, key: &str) -> Answer {
    let endpoint = Endpoint::tls(scene.keyward.site().listen, scene.cluster.pki(), Some(pair));
    endpoint.call(&put(key)).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_certificate_that_makes_no_user_is_refused_and_nothing_is_sent() {
    for version in every_version() {
        let mut scene = scene(&version, &Issuer::new()).await;
        let folder = tempfile::tempdir().expect("a temporary folder");
        let (pki, another) = (scene.cluster.pki(), Pki::new(folder.path()));
        let good = shown(&scene, &pki.client("alice"), "/a/certificate").await;
        assert_eq!(told(&good), (Some(0), String::new()), "{version}");
        assert!(arrived(&scene.cluster, "/a/certificate"), "what arrives is seen");
        let before = started(&scene.cluster, "Put").await;

        // Who is known, and is nobody: bob has no [[user]], and a pattern never makes root.
        for user in ["bob", "root"] {
            let answer = shown(&scene, &pki.client(user), "/a/refused").await;
            let expected = (Some(7), "etcdserver: permission denied".to_owned());
            assert_eq!(told(&answer), expected, "{version} {user}");
        }
        // Who is not let in.
        let usage = vec![ExtendedKeyUsagePurpose::ServerAuth];
        for (what, pair) in [
            ("expired", pki.changed("expired", "alice", |cert| cert.not_after = date_time_ymd(2026, 1, 1))),
            ("early", pki.changed("early", "alice", |cert| cert.not_before = date_time_ymd(2090, 1, 1))),
            ("server", pki.changed("purpose", "alice", |cert| cert.extended_key_usages = usage)),
            ("revoked", pki.changed("revoked", "alice", |cert| cert.serial_number = Some(666.into()))),
            ("another authority", another.client("alice")),
            ("its own authority", another.self_signed("alice")),
        ] {
            let answer = shown(&scene, &pair, "/a/refused").await;
            assert_eq!(answer.code(), None, "{version} {what}: {:?}", told(&answer));
        }
        assert_eq!(started(&scene.cluster, "Put").await, before, "{version}: something arrived");
        assert!(!arrived(&scene.cluster, "/a/refused"));
        scene.is_unharmed().await;
    }
}

/// Every way in which a token of alice's is none, beside `good`, which is one.
fn forged(issuer: &Issuer, good: &str) -> Vec<(String, String)> {
    let (unsigned, _) = good.rsplit_once('.').expect("three parts");
    let alice = claims("alice", 600);
    let with = |name: &str, value: Value| {
        let mut claims = alice.clone();
        claims[name] = value;
        issuer.sign("ES256", &claims)
    };
    let soon = alice["exp"].as_i64().expect("a number") - 300;
    let mut all: Vec<(String, String)> = [
        ("no signature", format!("{unsigned}.")),
        ("none", issuer.sign("none", &alice)),
        ("HS256, signed as before", issuer.sign("HS256", &alice)),
        ("ES384", issuer.sign("ES384", &alice)),
        ("RS256", issuer.sign("RS256", &alice)),
        ("a foreign key", Issuer::new().sign("ES256", &alice)),
        ("expired", issuer.sign("ES256", &claims("alice", -60))),
        ("not yet valid", with("nbf", soon.into())),
        ("another audience", with("aud", "etcd-of-others".into())),
        ("another issuer", with("iss", "https://ci.test/".into())),
    ]
    .map(|(what, token)| (what.to_owned(), token))
    .into();
    // What is public is no secret, in whatever form it is taken for one.
    all.extend(
        issuer.confused(&alice).into_iter().map(|token| ("HS256 with the public key".to_owned(), token)),
    );
    for name in ["iss", "aud", "exp", "sub"] {
        let mut without = alice.clone();
        without.as_object_mut().expect("claims").remove(name);
        all.push((format!("no {name}"), issuer.sign("ES256", &without)));
    }
    all
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_jwt_that_is_not_genuine_or_makes_no_user_is_refused_and_nothing_is_sent() {
    for version in every_version() {
        let issuer = Issuer::new();
        let mut scene = scene(&version, &issuer).await;
        let good = issuer.sign("ES256", &claims("alice", 600));
        scene.secrets.push(good.clone());
        let answer = scene.through.call(&put("/a/jwt").with("token", &good)).await;
        assert_eq!(told(&answer), (Some(0), String::new()), "{version}");
        assert!(arrived(&scene.cluster, "/a/jwt"), "what arrives is seen");
        let before = started(&scene.cluster, "Put").await;

        for (what, token) in forged(&issuer, &good) {
            let expected = (Some(16), "etcdserver: invalid auth token".to_owned());
            for name in ["token", "authorization"] {
                let answer = scene.through.call(&put("/a/refused").with(name, &token)).await;
                assert_eq!(told(&answer), expected, "{version} {what}");
            }
            // A certificate beside it is no way out.
            let alice = scene.cluster.pki().client("alice");
            let both = Endpoint::tls(scene.keyward.site().listen, scene.cluster.pki(), Some(&alice));
            let answer = both.call(&put("/a/refused").with("token", &token)).await;
            assert_eq!(told(&answer), expected, "{version} {what} beside a certificate");
        }
        for subject in ["bob", "root"] {
            let token = issuer.sign("ES256", &claims(subject, 600));
            let answer = scene.through.call(&put("/a/refused").with("token", &token)).await;
            let expected = (Some(7), "etcdserver: permission denied".to_owned());
            assert_eq!(told(&answer), expected, "{version} {subject}");
        }
        assert_eq!(started(&scene.cluster, "Put").await, before, "{version}: something arrived");
        assert!(!arrived(&scene.cluster, "/a/refused"));
        scene.is_unharmed().await;
    }
}

/// alice of the password, who is somebody, and alice of partners' certificate, of whom no rule speaks, are two.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_name_under_another_authority_is_not_the_user_who_logs_in_by_it() {
    for version in every_version() {
        let cluster = cluster(&version, Tls::Off).await;
        let folder = tempfile::tempdir().expect("a temporary folder");
        let (site, staff, partners) = (Site::new(), cluster.pki(), Pki::new(folder.path()));
        let (server, second) = (staff.server(), Site::new().listen);
        let tls = |ca: &std::path::Path| {
            format!(
                "tls.cert = {:?}, tls.key = {:?}, tls.client_ca = {ca:?}, tls.client_auth = \"optional\"",
                server.cert, server.key
            )
        };
        let listeners = format!(
            ", {} }}, {{ name = \"partners\", address = \"{second}\", {}",
            tls(&staff.ca),
            tls(&partners.ca)
        );
        let alice = site.write("alice-password", &password("alice"));
        let config = site.listening(&cluster, &listeners)
            + &format!("log.level = \"debug\"\n[[user]]\nname = \"alice\"\npassword_file = {alice:?}\n")
            + "[[map]]\npeer = \"cert:main:CN=*\"\nas = \"same\"\n";
        let keyward = Keyward::start(site, &config).await;
        let to = |address, pair: Option<&Pair>| Endpoint::tls(address, staff, pair);
        let main = keyward.site().listen;
        // Who both are: alice of the staff's authority, and alice of the password, by either listener.
        let own = to(main, Some(&staff.client("alice"))).call(&put("/a/own")).await;
        assert_eq!(told(&own), (Some(0), String::new()), "{version}");
        let token = log_in(&to(second, None), "alice", &password("alice")).await.expect("her password");
        let before = started(&cluster, "Put").await;
        let theirs = partners.client("alice");
        let refused = to(second, Some(&theirs)).call(&put("/a/refused")).await;
        assert_eq!(told(&refused), (Some(7), "etcdserver: permission denied".to_owned()), "{version}");
        let elsewhere = to(main, Some(&theirs)).call(&put("/a/refused")).await;
        assert_eq!(elsewhere.code(), None, "{version}: {:?}", told(&elsewhere));
        assert_eq!(started(&cluster, "Put").await, before, "{version}: something arrived");
        assert!(!arrived(&cluster, "/a/refused"), "{version}");
        // Her token counts whoever's certificate is beside it.
        let both = to(second, Some(&theirs)).call(&put("/a/token").with("token", &token)).await;
        assert_eq!(told(&both), (Some(0), String::new()), "{version}");
        assert!(!keyward.log().contains("panicked"));
    }
}
