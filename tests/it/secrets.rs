//! What is logged at the most talkative level, counted, told to a client, or shown by `Debug`, holds no secret. The search of what
//! whole processes wrote is `tests/hygiene`; here is what no process prints of itself.

use std::fmt::Debug;
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{SystemTime, UNIX_EPOCH};

use data_encoding::{BASE64_NOPAD, BASE64URL_NOPAD, HEXLOWER};
use keyward::config::{self, Config};
use keyward::credentials::{CallCredential, UpstreamUser};
use keyward::downstream::session::{RevocationChange, Revocations};
use keyward::gateway::caller::Identities;
use keyward::identity::MemberId;
use keyward::members::membership::AuthSetting;
use keyward::pb::etcdserverpb::{AuthenticateRequest, AuthenticateResponse};
use keyward::policy::rules_in_force::RulesInForce;
use keyward::refusal::Code;
use keyward::secret::Secret;
use keyward::tasks::Tasks;
use keyward::users::{self, Cost};
use prost::Message as _;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair, KeyUsagePurpose,
};
use ring::rand::SystemRandom;
use ring::signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair};
use serde_json::json;
use tracing::Level;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt as _;

use crate::client::Outcome;
use crate::member::Member;
use crate::rig::{Keyward, paused, settled};
use crate::words::{INVALID_TOKEN, RANGE, range, ranged};

const AUTHENTICATE: &str = "/etcdserverpb.Auth/Authenticate";
const AT_ETCD: &str = "alices-password-at-etcd";
const IN_THE_FILE: &str = "fionas-password-in-the-file";
const WRONG: &str = "a-guess-that-is-wrong";
const SESSION_KEY: &str = "8f1d0c6b5a4938271605f4e3d2c1b0a98f1d0c6b5a4938271605f4e3d2c1b0a9";
const SIGNING: &str = "what-etcd-and-keyward-sign-tokens-with";
const ISSUER: &str = "https://ci.test";
const STRANGE: &str = "AbCdEfGhIjKlMnOp.42";

/// The first secret that `text` shows, in whatever form.
fn shown<'a>(text: &str, secrets: &'a [(&str, Vec<u8>)]) -> Option<&'a str> {
    let found = |(_, raw): &&(&str, Vec<u8>)| {
        let hex = HEXLOWER.encode(raw);
        let decimal = format!("{raw:?}");
        let forms = [
            String::from_utf8_lossy(raw).into_owned(),
            BASE64_NOPAD.encode(raw),
            BASE64URL_NOPAD.encode(raw),
            hex.to_uppercase(),
            hex,
            decimal.trim_matches(['[', ']']).to_owned(),
            format!("{:?}", bytes::Bytes::copy_from_slice(raw)).trim_matches(['b', '"']).to_owned(),
        ];
        forms.iter().any(|form| text.contains(form))
    };
    secrets.iter().find(found).map(|(name, _)| *name)
}

fn secret(name: &'static str, value: &str) -> (&'static str, Vec<u8>) {
    (name, value.as_bytes().to_vec())
}

/// What makes a P-256 key this one, and its lines in PEM.
fn key(pair: &KeyPair) -> Vec<(&'static str, Vec<u8>)> {
    let pem = pair.serialize_pem();
    let lines = pem.lines().filter(|line| !line.starts_with('-')).map(|line| secret("a line of a key", line));
    lines.chain([("a key", pair.serialize_der()[36..68].to_vec())]).collect()
}

fn line(user: &str, password: &str) -> String {
    let hash = users::hash(&Secret::new(password.to_owned()), Cost { memory: 8, passes: 1 });
    format!("{user}:{}\n", hash.expect("hashed"))
}

fn write(folder: &Path, name: &str, text: &str) {
    std::fs::write(folder.join(name), text).expect("written");
}

/// Everything that was logged on this thread.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().expect("no holder panics").write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Log {
    /// From now on, as `log.level = "trace"` has it: the libraries below say warnings at most.
    fn listen(&self) -> tracing::subscriber::DefaultGuard {
        let log = self.clone();
        let lines = tracing_subscriber::fmt::layer().with_ansi(false).with_writer(move || log.clone());
        let levels = Targets::new().with_default(Level::WARN).with_target("keyward", Level::TRACE);
        tracing::subscriber::set_default(tracing_subscriber::registry().with(levels).with(lines))
    }

    fn text(&self) -> String {
        String::from_utf8(self.0.lock().expect("no holder panics").clone()).expect("UTF-8")
    }
}

/// A JWT for `subject`, by a key of its own.
fn jwt(key: &KeyPair, subject: &str) -> String {
    let end = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_secs() + 600;
    let claims = json!({ "iss": ISSUER, "aud": "etcd", "sub": subject, "exp": end });
    let part = |text: String| BASE64URL_NOPAD.encode(text.as_bytes());
    let signed = format!("{}.{}", part(json!({ "alg": "ES256" }).to_string()), part(claims.to_string()));
    let (random, by) = (SystemRandom::new(), &ECDSA_P256_SHA256_FIXED_SIGNING);
    let signing = EcdsaKeyPair::from_pkcs8(by, &key.serialize_der(), &random).expect("P-256");
    let signature = signing.sign(&random, signed.as_bytes()).expect("signed");
    format!("{signed}.{}", BASE64URL_NOPAD.encode(signature.as_ref()))
}

/// Keyward that takes sessions of both password sources, and JWTs; and what must not be shown.
struct Scene {
    member: Member,
    keyward: Keyward,
    issuer: KeyPair,
    /// What clients were told, and what is shown of Keyward itself.
    told: String,
    secrets: Vec<(&'static str, Vec<u8>)>,
}

impl Scene {
    fn new(folder: &Path) -> Self {
        let issuer = KeyPair::generate().expect("a key");
        let users = line("fiona", IN_THE_FILE);
        for (name, text) in [
            ("users", users.as_str()),
            ("session.key", SESSION_KEY),
            ("app", AT_ETCD),
            ("ci.pem", &issuer.public_key_pem()),
        ] {
            write(folder, name, text);
        }
        let member = Member::new(1, &Tasks::default());
        member.change_password(AT_ETCD);
        let keyward = Keyward::at(&[&member], AuthSetting::On, folder, "", &Self::lines());
        let (_, hash) = users.trim().split_once(':').expect("a line");
        let secrets = vec![
            secret("a password at etcd", AT_ETCD),
            secret("a password of the file", IN_THE_FILE),
            secret("a wrong password", WRONG),
            secret("a session key", SESSION_KEY),
            secret("a hash", hash),
            secret("etcd's token", "alice.1"),
            secret("a strange token", STRANGE),
        ];
        Self { member, keyward, issuer, told: String::new(), secrets }
    }

    fn lines() -> String {
        format!(
            "[session]\nkey_files = ['session.key']\n\
             [login]\nsources = ['file', 'etcd']\nusers_file = 'users'\n\
             [[user]]\nname = 'app'\npassword_file = 'app'\n\
             [[jwt]]\nissuer = '{ISSUER}'\naudience = 'etcd'\nkeys = 'ci.pem'\n\
             [[map]]\npeer = 'file:*'\nas = 'app'\n\
             [[map]]\npeer = 'jwt:{ISSUER}:*'\nas = 'app'\n"
        )
    }

    async fn log_in(&self, user: &str, password: &str) -> Outcome {
        let request = AuthenticateRequest { name: user.into(), password: password.into() };
        self.keyward.client().await.call(AUTHENTICATE, request.encode_to_vec()).await
    }

    async fn session(&mut self, user: &str, password: &str) -> String {
        let answer = self.log_in(user, password).await;
        let token = AuthenticateResponse::decode(answer.message().clone()).expect("an answer").token;
        self.secrets.push(secret("a session", &token));
        token
    }

    /// A call that a member answers.
    async fn serves(&self, name: &'static str, value: &str) {
        let caller = self.keyward.client().await.header(name, value);
        let script = async { self.member.called(RANGE).await.reply(&ranged(1)).await };
        tokio::join!(caller.call(RANGE, range("k")), script).0.message();
    }

    /// A call of which the member sees nothing.
    async fn refuses(&mut self, name: &'static str, value: &str) {
        let caller = self.keyward.client().await.header(name, value);
        self.told += &format!("{:?}", caller.call(RANGE, range("k")).await.end);
    }

    /// A call whose token the member refuses, and another one too.
    async fn is_refused_there(&mut self, token: &str) {
        let caller = self.keyward.client().await.header("token", token);
        let script = async {
            for _ in 0..2 {
                self.member.called(RANGE).await.refuse(Code::Unauthenticated, INVALID_TOKEN);
            }
        };
        self.told += &format!("{:?}", tokio::join!(caller.call(RANGE, range("k")), script).0.end);
    }
}

#[test]
fn nothing_that_is_logged_counted_or_told_shows_a_secret() {
    let log = Log::default();
    let listening = log.listen();
    paused(async {
        let folder = tempfile::tempdir().expect("a folder");
        let mut scene = Scene::new(folder.path());
        let (alice, fiona) =
            (scene.session("alice", AT_ETCD).await, scene.session("fiona", IN_THE_FILE).await);
        let good = jwt(&scene.issuer, "ci");
        let forged = jwt(&KeyPair::generate().expect("a key"), "ci");
        scene.secrets.extend([secret("a JWT", &good), secret("a forged JWT", &forged)]);
        for (name, value) in [
            ("token", &alice),
            ("token", &fiona),
            ("token", &good),
            ("authorization", &format!("Bearer {good}")),
        ] {
            scene.serves(name, value).await;
        }
        for (name, value) in [
            ("token", forged),
            // A character too few: another last one may be the same.
            ("token", alice[..alice.len() - 1].to_owned()),
            ("token", "kw1_".to_owned() + &"Ab0-".repeat(40)),
            ("token", STRANGE.to_owned()),
            ("authorization", format!("Basic {WRONG}")),
            ("authorization", format!("Bearer {WRONG}")),
        ] {
            scene.refuses(name, &value).await;
        }
        for user in ["alice", "fiona", "nobody"] {
            let end = scene.log_in(user, WRONG).await.end;
            scene.told += &format!("{end:?}");
        }
        scene.is_refused_there(&alice).await;
        let none = Revocations::default();
        let revoked = none.with(none.entry(&RevocationChange::Revoke("alice".into()), SystemTime::now()));
        scene.keyward.sealer.apply_revocations(Some(&Arc::new(revoked.expect("there is room"))));
        scene.refuses("token", &alice).await;
        scene.keyward.publish_rules(folder.path(), "", &Scene::lines());
        settled().await;
        let Scene { keyward, told, secrets, .. } = &mut scene;
        *told += &keyward.metrics.text().expect("a String takes all");
        *told +=
            &format!("{:?}{:?}{:?}", keyward.sealer, keyward.sealer.listed_sessions(), keyward.credentials);

        let text = log.text();
        for said in ["session issued", "a session token was refused", "a JWT was refused", "DEBUG"] {
            assert!(text.contains(said), "it does not say {said:?}: {text}");
        }
        assert_eq!(shown(&text, secrets), None, "{text}");
        assert_eq!(shown(told, secrets), None, "{told}");
        // It would have been seen.
        for (name, value) in &*secrets {
            let planted = format!("{text} {:?}", String::from_utf8_lossy(value));
            assert_eq!(shown(&planted, &[(*name, value.clone())]), Some(*name));
        }
    });
    drop(listening);
}

/// An authority that clients' certificates may be minted from.
fn authority() -> (String, KeyPair) {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.distinguished_name.push(DnType::CommonName, "mint");
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
    let key = KeyPair::generate().expect("a key");
    (params.self_signed(&key).expect("signed").pem(), key)
}

fn certificate(name: &str) -> (String, KeyPair) {
    let mut params = CertificateParams::new(vec!["keyward.test".to_owned()]).expect("a name");
    params.distinguished_name.push(DnType::CommonName, name);
    let key = KeyPair::generate().expect("a key");
    (params.self_signed(&key).expect("signed").pem(), key)
}

/// A configuration with a secret of every kind, and those secrets.
fn everything(folder: &Path) -> (Config, Vec<(&'static str, Vec<u8>)>) {
    let ((mint, mint_key), (own, own_key), (server, server_key)) =
        (authority(), certificate("operator"), certificate("server"));
    let users = line("fiona", IN_THE_FILE);
    for (name, text) in [
        ("mint.crt", mint.as_str()),
        ("mint.key", &mint_key.serialize_pem()),
        ("own.crt", &own),
        ("own.key", &own_key.serialize_pem()),
        ("server.crt", &server),
        ("server.key", &server_key.serialize_pem()),
        ("session.key", SESSION_KEY),
        ("password", AT_ETCD),
        ("signing", SIGNING),
        ("users", &users),
        ("keyward.toml", EVERYTHING),
    ] {
        write(folder, name, text);
    }
    let loaded = config::load(&folder.join("keyward.toml"));
    let (config, warnings) = loaded.unwrap_or_else(|faults| panic!("{faults}"));
    let (_, hash) = users.trim().split_once(':').expect("a line");
    let mut secrets = vec![
        secret("a password", AT_ETCD),
        secret("a session key", SESSION_KEY),
        secret("a signing key", SIGNING),
        secret("a token", TOKEN),
        secret("a hash", hash),
    ];
    let digit = |two: &[u8]| u8::from_str_radix(str::from_utf8(two).expect("hex"), 16).expect("hex");
    secrets.push(("a session key's bytes", SESSION_KEY.as_bytes().chunks(2).map(digit).collect()));
    secrets.extend([&mint_key, &own_key, &server_key].into_iter().flat_map(key));
    assert_eq!(shown(&format!("{warnings:?}"), &secrets), None, "{warnings:?}");
    (config, secrets)
}

const TOKEN: &str = "the-token-of-somebody";
const EVERYTHING: &str = "\
    [[listener]]\nname = 'clients'\naddress = '127.0.0.1:2379'\n\
    tls = { cert = 'server.crt', key = 'server.key', client_ca = 'server.crt' }\n\
    [cluster]\nendpoints = ['https://127.0.0.1:1']\n\
    tls = { ca = 'server.crt', cert = 'own.crt', key = 'own.key' }\n\
    probe = { user = 'probe', password_file = 'password' }\n\
    [session]\nkey_files = ['session.key']\n\
    [revocation]\netcd_prefix = '/k/'\n\
    [login]\nsources = ['file', 'etcd']\nusers_file = 'users'\n\
    [mint]\nca = 'mint.crt'\nkey = 'mint.key'\n\
    [sign_jwt]\nmethod = 'HS256'\nkey = 'signing'\n\
    [[user]]\nname = '*'\nmint = true\n\
    [[user]]\nname = 'probe'\npassword_file = 'password'\n\
    [[user]]\nname = 'operator'\ncert = 'own.crt'\nkey = 'own.key'\n\
    [[user]]\nname = 'signed'\njwt = true\n";

#[test]
fn debug_of_whatever_has_a_secret_shows_none() {
    paused(async {
        let folder = tempfile::tempdir().expect("a folder");
        let (config, secrets) = everything(folder.path());
        let member = Member::new(1, &Tasks::default());
        let keyward = Keyward::with_auth(&[&member]);
        let credentials = &keyward.credentials;
        let acting = credentials.build_acting(&config.users, &config.cluster, keyward.pages());
        credentials.publish_acting(acting.expect("users that can be proved"));
        let password = Secret::new(AT_ETCD.to_owned());
        let identities = Identities::of(&config, &RulesInForce::Configured, credentials, SystemTime::now());
        let login = AuthenticateRequest { name: "alice".into(), password: AT_ETCD.into() };
        let answer = AuthenticateResponse { token: TOKEN.into(), ..Default::default() };
        let users = ["probe", "operator", "signed", "minted"];
        let acting: Vec<UpstreamUser> =
            users.map(|user| credentials.act_as(&user.into()).expect(user)).into();
        let keys = keyward::reload::session_keys(&config).expect("there is one");
        let identity = credentials.identity(&"alice".into(), &password);
        let all: [&dyn Debug; 9] =
            [&config, &credentials, &identities, &acting, &login, &answer, &password, &keys, &identity];
        for each in all {
            for text in [format!("{each:?}"), format!("{each:#?}")] {
                let flat = text.split_whitespace().collect::<Vec<_>>().join(" ");
                assert_eq!(shown(&text, &secrets), None, "{text}");
                assert_eq!(shown(&flat, &secrets), None, "{flat}");
            }
        }
        // What is minted nobody knows beforehand: PKCS #8 of P-256 begins like this.
        credentials.allow_minting(&credentials.mint_authority().expect("there is an authority"));
        let Some(UpstreamUser::User(minted)) = acting.last() else { panic!("{acting:?}") };
        let Ok(CallCredential::Certificate(minted)) = minted.credential_for(MemberId(1)).await else {
            panic!("{minted:?}")
        };
        let text = format!("{:?} {minted:?}", minted.leaf().expect("minted").tls);
        assert!(!text.contains("48, 129, 135, 2, 1, 0") && !text.contains("PRIVATE KEY"), "{text}");
    });
}
