//! Certificates and JWTs that prove nothing, or somebody who is no etcd user: refused as etcd would, and nothing arrives.

use std::time::{SystemTime, UNIX_EPOCH};

use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use rcgen::{ExtendedKeyUsagePurpose, date_time_ymd};
use ring::{
    rand::SystemRandom,
    signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair},
};
use serde_json::{Value, json};

use super::{arrived, cluster, direct, password, put, started, told};
use crate::{
    bad_input::Scene,
    harness::{
        Tls,
        keyward::{Keyward, Site},
        pki::{Pair, Pki},
        versions,
    },
    raw::{Answer, Endpoint},
};

const ISSUER: &str = "https://ci.test";

/// Signs JWTs.
struct Issuer(rcgen::KeyPair);

impl Issuer {
    fn new() -> Issuer {
        Issuer(rcgen::KeyPair::generate().expect("a key can be made"))
    }

    fn sign(&self, alg: &str, claims: &Value) -> String {
        let part = |value: &Value| URL_SAFE_NO_PAD.encode(value.to_string());
        let signed = format!("{}.{}", part(&json!({ "alg": alg })), part(claims));
        let (random, pkcs8) = (SystemRandom::new(), self.0.serialize_der());
        let key = EcdsaKeyPair::from_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, &pkcs8, &random).expect("P-256");
        let signature = key.sign(&random, signed.as_bytes()).expect("the key signs");
        format!("{signed}.{}", URL_SAFE_NO_PAD.encode(signature))
    }
}

/// What a JWT says that ends so many seconds from now.
fn claims(subject: &str, left: i64) -> Value {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_secs();
    let end = i64::try_from(now).expect("this age") + left;
    json!({ "iss": ISSUER, "aud": "etcd", "sub": subject, "exp": end })
}

/// A listener that asks for certificates, and takes JWTs, in front of one member.
async fn scene(version: &crate::harness::binary::Version, issuer: &Issuer) -> Scene {
    let cluster = cluster(version, Tls::Off).await;
    let (site, pki) = (Site::new(), cluster.pki());
    let (server, keys) = (pki.server(), site.write("ci.pem", &issuer.0.public_key_pem()));
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
    let (etcd, through) = (direct(&cluster), Endpoint::tls(keyward.site().listen, pki, None));
    let secrets = ["root", "alice", "bob"].map(password).to_vec();
    Scene { cluster, keyward, etcd, through, secrets }
}

async fn shown(scene: &Scene, pair: &Pair, key: &str) -> Answer {
    let endpoint = Endpoint::tls(scene.keyward.site().listen, scene.cluster.pki(), Some(pair));
    endpoint.call(&put(key)).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_certificate_that_makes_no_user_is_refused_and_nothing_is_sent() {
    for version in versions() {
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
        ] {
            let answer = shown(&scene, &pair, "/a/refused").await;
            assert_eq!(answer.code(), None, "{version} {what}: {:?}", told(&answer));
        }
        assert_eq!(started(&scene.cluster, "Put").await, before, "{version}: something arrived");
        assert!(!arrived(&scene.cluster, "/a/refused"));
        scene.is_unharmed().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_jwt_that_is_not_genuine_or_makes_no_user_is_refused_and_nothing_is_sent() {
    for version in versions() {
        let issuer = Issuer::new();
        let mut scene = scene(&version, &issuer).await;
        let good = issuer.sign("ES256", &claims("alice", 600));
        scene.secrets.push(good.clone());
        let answer = scene.through.call(&put("/a/jwt").with("token", &good)).await;
        assert_eq!(told(&answer), (Some(0), String::new()), "{version}");
        assert!(arrived(&scene.cluster, "/a/jwt"), "what arrives is seen");
        let before = started(&scene.cluster, "Put").await;

        let (unsigned, _) = good.rsplit_once('.').expect("three parts");
        let mut nobody = claims("alice", 600);
        nobody.as_object_mut().expect("claims").remove("sub");
        for (what, token) in [
            ("no signature", format!("{unsigned}.")),
            ("none", issuer.sign("none", &claims("alice", 600))),
            ("HS256", issuer.sign("HS256", &claims("alice", 600))),
            ("ES384", issuer.sign("ES384", &claims("alice", 600))),
            ("a foreign key", Issuer::new().sign("ES256", &claims("alice", 600))),
            ("expired", issuer.sign("ES256", &claims("alice", -60))),
            ("no subject", issuer.sign("ES256", &nobody)),
        ] {
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
