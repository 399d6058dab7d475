//! Every kind of peer and of upstream credential, each good and bad, and the admin socket: Keyward at its most talkative writes none
//! of their secrets.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use keyward::pb::etcdserverpb::{AuthenticateResponse, PutRequest};
use keyward::users::{self, Cost};
use prost::Message as _;

use super::{CLEAN, Evidence, FOUND, SESSION_KEY, VALUE, WRONG, login};
use crate::harness::issuer::{AUDIENCE, ISSUER, Issuer, claims};
use crate::harness::keyward::{Keyward, Site, program};
use crate::harness::pki::Pair;
use crate::harness::{Auth, Cluster, Options, Tls, newest, password, wait};
use crate::raw::{Call, Endpoint};

const IN_THE_FILE: &str = "fionas-password-in-keywards-own-file";
const SIGNING: &str = "what-etcd-and-keyward-sign-tokens-with";
const LIMIT: Duration = Duration::from_secs(30);

/// What the configuration names.
struct Files {
    session: PathBuf,
    users: PathBuf,
    signing: PathBuf,
    alice: PathBuf,
    issuer: PathBuf,
    server: Pair,
    mint: Pair,
    /// fiona's, in the users file.
    hash: String,
}

impl Files {
    fn write(site: &Site, cluster: &Cluster, issuer: &Issuer) -> Files {
        let hash = users::hash(&IN_THE_FILE.to_owned().into(), Cost::DEFAULT).expect("hashed");
        Files {
            session: site.write("session.key", SESSION_KEY),
            users: site.write("users", &format!("fiona:{hash}\n")),
            signing: site.write("jwt-secret", SIGNING),
            alice: site.write("alice-password", &password("alice")),
            issuer: site.write("ci.pem", &issuer.public_key()),
            server: cluster.pki().server(),
            mint: cluster.pki().mint(),
            hash,
        }
    }

    /// Everybody is the etcd user of its own name: alice by her password, others by a certificate, `signed` by a token.
    fn config(&self, site: &Site, cluster: &Cluster) -> String {
        let fields = format!(
            ", tls.cert = {:?}, tls.key = {:?}, tls.client_ca = {:?}, tls.client_auth = \"optional\"",
            self.server.cert,
            self.server.key,
            cluster.pki().ca
        );
        let Files { session, users, signing, alice, issuer, mint, .. } = self;
        site.listening(cluster, &fields)
            + &format!(
                "session.key_files = [{session:?}]\nlog.level = \"trace\"\nlog.keys = true\nadmin.socket = \"admin.sock\"\n\
                 revocation.state_file = \"state\"\n\
                 login.sources = [\"file\", \"etcd\"]\nlogin.users_file = {users:?}\n\
                 mint.ca = {:?}\nmint.key = {:?}\n\
                 sign_jwt.method = \"HS256\"\nsign_jwt.key = {signing:?}\n\
                 [[user]]\nname = \"*\"\nmint = true\n\
                 [[user]]\nname = \"alice\"\npassword_file = {alice:?}\n\
                 [[user]]\nname = \"signed\"\njwt = true\n\
                 [[jwt]]\nissuer = \"{ISSUER}\"\naudience = \"{AUDIENCE}\"\nkeys = {issuer:?}\n\
                 [[map]]\npeer = \"file:*\"\nas = \"same\"\n\
                 [[map]]\npeer = \"cert:main:CN=*\"\nas = \"same\"\n\
                 [[map]]\npeer = \"jwt:{ISSUER}:*\"\nas = \"same\"\n",
                mint.cert, mint.key
            )
    }

    /// The same with each secret in the place of another, or with something of its own that is wrong.
    fn spoiled(&self, site: &Site, config: &str) -> String {
        let write = |name: &str, text: &str| format!("{:?}", site.write(name, text));
        let private = fs::read_to_string(&self.mint.key).expect("the key is there");
        let (hash, signing) = (&self.hash, &self.signing);
        let mut config = config.to_owned();
        for (good, bad) in [
            (format!("{:?}", self.session), write("bad.key", &format!("{SESSION_KEY}{WRONG}"))),
            (format!("{:?}", self.users), write("users-bad", &format!("bob:{WRONG}\nfiona:{hash} \n"))),
            (format!("{:?}", self.alice), write("bad-password", &format!("{WRONG}\n{WRONG}\n"))),
            (format!("{:?}", self.issuer), write("issuer.key", &private)),
            (format!("mint.key = {:?}", self.mint.key), format!("mint.key = {signing:?}")),
            ("sign_jwt.method = \"HS256\"".into(), "sign_jwt.method = \"ES256\"".into()),
        ] {
            assert!(config.contains(&good), "{good}");
            config = config.replace(&good, &bad);
        }
        config
    }

    /// Private keys, line by line.
    fn keys(&self) -> Vec<String> {
        let pems =
            [&self.server, &self.mint].map(|pair| fs::read_to_string(&pair.key).expect("the key is there"));
        pems.concat().lines().filter(|line| !line.starts_with('-')).map(str::to_owned).collect()
    }
}

/// Calls as everybody, and as everybody who is not; the tokens that were shown.
async fn calls(cluster: &Cluster, keyward: &Keyward, issuer: &Issuer) -> Vec<String> {
    let (pki, listen) = (cluster.pki(), keyward.site().listen);
    let front = Endpoint::tls(listen, pki, None);
    let reply = front.call(&login("fiona", IN_THE_FILE)).await.messages().remove(0);
    let session = AuthenticateResponse::decode(reply).expect("etcd's message").token;
    let tokens = ["alice", "fiona", "signed"].map(|name| issuer.sign("ES256", &claims(name, 600)));
    let forged = Issuer::new().sign("ES256", &claims("alice", 600));
    for (call, code) in [
        (put().with("token", &session), 0),
        (login("fiona", WRONG), 3),
        (put().with("token", &tokens[0]), 0),
        (put().with("authorization", &format!("Bearer {}", tokens[1])), 0),
        // etcd has other tokens than ours: what is signed was made, and sent.
        (put().with("token", &tokens[2]), 16),
        (put().with("token", &forged), 16),
        (put().with("token", &tokens[0][..tokens[0].len() - 2]), 16),
    ] {
        let answer = front.call(&call).await;
        assert_eq!(answer.code(), Some(code), "{:?}: {}", call.headers, answer.message());
    }
    let shown = Endpoint::tls(listen, pki, Some(&pki.client("alice")));
    assert_eq!(shown.call(&put()).await.code(), Some(0));
    [&tokens[..], &[session, forged]].concat()
}

fn put() -> Call {
    let put = PutRequest { key: b"/a/k".to_vec().into(), value: VALUE.into(), ..Default::default() };
    Call::unary("/etcdserverpb.KV/Put", &put.encode_to_vec())
}

/// Runs `keyward`, and keeps what it says.
fn run(evidence: &Evidence, arguments: &[&str]) -> (Option<i32>, String) {
    let output =
        Command::new(program()).args(arguments).stdin(Stdio::null()).output().expect("keyward starts");
    let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    evidence.log(&format!("keyward-{}", arguments[0]), &said);
    (output.status.code(), said)
}

fn path(path: &Path) -> String {
    path.display().to_string()
}

#[tokio::test]
async fn keyward_at_level_trace_writes_no_secret_of_any_identity() {
    let (auth, tls) = (Auth::On { extra_users: 0 }, Tls::Mutual);
    let cluster = Cluster::start(&newest("3.5"), Options { auth, tls, ..Options::default() }).await;
    let root = cluster.ctl_as_root();
    root.ok(&["user", "add", "fiona", "--no-password"]).await;
    root.ok(&["user", "grant-role", "fiona", "ra"]).await;
    let (site, issuer, evidence) = (Site::new(), Issuer::new(), Evidence::new());
    let files = Files::write(&site, &cluster, &issuer);
    let config = files.config(&site, &cluster);
    let keyward = Keyward::start(site, &config).await;
    let tokens = calls(&cluster, &keyward, &issuer).await;

    let socket = path(&keyward.site().file("admin.sock"));
    let (code, listed) = run(&evidence, &["sessions", "--socket", &socket]);
    assert!(code == Some(0) && listed.contains("file:fiona"), "{listed}");
    assert_eq!(run(&evidence, &["revoke", "fiona", "--socket", &socket]).0, Some(0));
    for page in ["/metrics", "/readyz"] {
        evidence.log(&format!("keyward-{}", &page[1..]), &keyward.admin(page).await.1);
    }
    let bad = files.spoiled(keyward.site(), &config);
    let (code, faults) =
        run(&evidence, &["check", "--config", &path(&keyward.site().write("bad.toml", &bad))]);
    assert_eq!(code, Some(64));
    let at_fault = [
        "session.key_files",
        "login.users_file",
        "user[1].password_file",
        "mint.key",
        "sign_jwt.key",
        "jwt[0].keys",
    ];
    assert!(at_fault.iter().all(|key| faults.contains(key)), "{faults}");
    keyward.reload(&bad);
    let refused = async || keyward.log().contains("configuration not reloaded").then_some(());
    wait::until(LIMIT, "the bad configuration is refused", refused).await;

    let mut secrets = vec![
        ("the password of alice", password("alice")),
        ("the password of fiona", IN_THE_FILE.into()),
        ("a hash of Keyward's users file", files.hash.clone()),
        ("a wrong password", WRONG.into()),
        ("session.key", SESSION_KEY.into()),
        ("the signing key", SIGNING.into()),
        ("a value", VALUE.into()),
    ];
    secrets.extend(tokens.into_iter().map(|token| ("a token", token)));
    secrets.extend(files.keys().into_iter().map(|line| ("a private key", line)));
    evidence.secrets(&secrets.iter().map(|(name, value)| (*name, value.as_str())).collect::<Vec<_>>());
    let log = keyward.log();
    for said in ["minted a certificate", "peer=\"file:fiona\"", "DEBUG", "revocations changed"] {
        assert!(log.contains(said), "it does not say {said:?}: {log}");
    }
    evidence.log("keyward", &log);
    evidence.log("state", &fs::read_to_string(keyward.site().file("state")).expect("the state file"));
    let output = evidence.search();
    let told = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(output.status.code(), CLEAN, "{told}{}", String::from_utf8_lossy(&output.stderr));
    evidence.log("keyward-planted", &format!("{log}\nline {:?}", files.hash));
    assert_eq!(evidence.search().status.code(), FOUND);
}
