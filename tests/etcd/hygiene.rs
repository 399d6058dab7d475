//! No secret in what is written: `tests/hygiene` finds what is planted, and Keyward at its most talkative leaves nothing to find. The
//! search over all logs of a whole run is a step of `tests/run`.

mod identities;

use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use bytes::Bytes;
use data_encoding::{BASE64, BASE64URL_NOPAD, HEXLOWER};
use keyward::pb::etcdserverpb::{AuthenticateRequest, AuthenticateResponse, PutRequest};
use prost::Message;
use serde_json::json;
use tempfile::TempDir;

use crate::harness::keyward::{Keyward, Site, program};
use crate::harness::{Auth, Cluster, Options, Tls, newest, password};
use crate::raw::{Call, Endpoint};

const CLEAN: Option<i32> = Some(0);
const FOUND: Option<i32> = Some(1);
const NOTHING_TO_SEARCH: Option<i32> = Some(2);

/// A folder as `tests/run` makes it.
struct Evidence(TempDir);

impl Evidence {
    fn new() -> Evidence {
        let folder = tempfile::Builder::new().prefix("evidence-").tempdir().expect("a temporary folder");
        fs::create_dir(folder.path().join("logs")).expect("the folder is ours");
        Evidence(folder)
    }

    fn secrets(&self, all: &[(&str, &str)]) {
        let lines: Vec<String> =
            all.iter().map(|(name, value)| json!({ "name": name, "value": value }).to_string()).collect();
        fs::write(self.0.path().join("secrets-1"), lines.join("\n")).expect("the folder is ours");
    }

    /// Secrets that are no text.
    fn bytes(&self, name: &str, value: &[u8]) {
        let hex = HEXLOWER.encode(value);
        let line = json!({ "name": name, "hex": hex }).to_string();
        fs::write(self.0.path().join("secrets-2"), line).expect("the folder is ours");
    }

    fn log(&self, name: &str, text: &str) {
        fs::write(self.0.path().join("logs").join(name), text).expect("the folder is ours");
    }

    fn search(&self) -> Output {
        self.search_with(None)
    }

    /// Also in what a run printed.
    fn search_with(&self, transcript: Option<&str>) -> Output {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/hygiene");
        let (mut command, printed) = (Command::new(script), self.0.path().join("transcript"));
        command.arg(self.0.path()).stdin(Stdio::null());
        if let Some(text) = transcript {
            fs::write(&printed, text).expect("the folder is ours");
            command.arg(printed);
        }
        command.output().expect("the script runs (it needs python3)")
    }
}

const STRANGE: &str = "p\"ä s\\%wörd";
const RAW: [u8; 12] = [0, 1, 2, 200, 201, 202, b'"', b'k', b'e', b'y', 254, 255];

/// The search of one line of one log, where the password of alice, a session key and a token are known.
fn planted(log: &str, line: &str) -> Option<i32> {
    let evidence = Evidence::new();
    evidence.secrets(&[
        ("the password of alice", "correct-horse"),
        ("session.key", "00112233445566778899aabbccddeeff"),
        ("a token", "kw1_short"),
        ("a hash of Keyward's users file", "$2b$stands-for-a-hash"),
        ("a strange password", STRANGE),
    ]);
    evidence.bytes("raw.key", &RAW);
    evidence.log("keyward.1-0", "nothing here\n");
    evidence.log(log, &format!("before\n{line}\nafter"));
    let output = evidence.search();
    let told = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(!told.contains("correct-horse"), "the search prints what it finds: {told}");
    assert!(output.status.code() != FOUND || told.contains(&format!("{log}:2:")), "{told}");
    output.status.code()
}

#[test]
fn the_search_finds_what_is_planted() {
    let bytes = "[99, 111, 114, 114, 101, 99, 116, 45, 104, 111, 114, 115, 101]";
    let minted_key = BASE64.encode(&rcgen::KeyPair::generate().expect("a key").serialize_der());
    let unknown_token = format!("token={}", "kw1_".to_owned() + &"Ab0-".repeat(12));
    for line in [
        "password=correct-horse",
        "cGFzc3dvcmQ= Y29ycmVjdC1ob3Jz",
        "636f72726563742d686f727365",
        &format!("Put(b{bytes})"),
        "opened kw1_short",
        &unknown_token,
        "token: AbCdEfGhIjKlMnOp.42",
        // In base64 with one, two or three bytes before it, and for the use in URLs.
        &format!("basic {}", BASE64.encode(b"a:correct-horse")),
        &format!("basic {}", BASE64.encode(b"ab:correct-horse")),
        &format!("basic {}", BASE64.encode(b"abc:correct-horse!")),
        &format!("raw {}", BASE64URL_NOPAD.encode(&RAW)),
        &format!("raw {}", BASE64.encode(&[&b"x"[..], &RAW].concat())),
        "636F72726563742D686F727365",
        "%63%6f%72%72%65%63%74%2d%68%6f%72%73%65",
        "%63%6F%72%72%65%63%74%2D%68%6F%72%73%65",
        "password=p%22%C3%A4%20s%5C%25w%C3%B6rd&",
        &format!("user {STRANGE:?} refused"),
        &json!({ "password": STRANGE }).to_string(),
        &format!("{:?}", Bytes::copy_from_slice(STRANGE.as_bytes())),
        &format!("{:?}", Bytes::copy_from_slice(&RAW)),
        &format!("key {RAW:?}"),
        &format!("key {RAW:02x?}").replace(", ", ""),
        // By their shape: nobody knows them.
        "alice:$argon2id$v=19$m=19456,t=2,p=1$c29tZXNhbHQ$CTFhFdXPJO1aFaMaO6Mm",
        "-----BEGIN PRIVATE KEY-----",
        "-----BEGIN EC PRIVATE KEY-----",
        &minted_key,
        &format!("{:?}", BASE64.decode(minted_key.as_bytes()).expect("base64")),
        "eyJhbGciOiJFUzI1NiJ9.eyJzdWIiOiJhbGljZSJ9.c2lnbmF0dXJl",
    ] {
        assert_eq!(planted("keyward.1-1", line), FOUND, "{line}");
    }
    for clean in ["-----BEGIN PUBLIC KEY-----", "-----BEGIN CERTIFICATE-----", "argon2id", "correct horse"] {
        assert_eq!(planted("keyward.1-1", clean), CLEAN, "{clean}");
    }
    assert_eq!(planted("keyward.1-1", "session issued session=0b6b8ba5b5a3814f user=\"alice\""), CLEAN);
    // What etcd says of its users is etcd's; what Keyward made is not.
    assert_eq!(planted("etcd-3.5.1-m0.1-1", "name:alice password:correct-horse"), CLEAN);
    assert_eq!(planted("etcd-3.5.1-m0.1-1", &unknown_token), FOUND);
    assert_eq!(planted("etcd-3.5.1-m0.1-1", "00112233445566778899aabbccddeeff"), FOUND);
    assert_eq!(planted("etcd-3.5.1-m0.1-1", "a $2b$stands-for-a-hash of ours"), FOUND);
    let strange = "etcd-3.5.1-m0-strangers.1-1";
    assert_eq!(planted(strange, &unknown_token), CLEAN);
    assert_eq!(planted(strange, "00112233445566778899aabbccddeeff"), FOUND);
    assert_eq!(Evidence::new().search().status.code(), NOTHING_TO_SEARCH);
}

/// A failed test prints the ends of its logs, where etcd may say what is etcd's; what the test itself prints is searched.
#[test]
fn the_search_passes_over_printed_ends_of_logs_and_nothing_else() {
    let evidence = Evidence::new();
    evidence.secrets(&[("the password of alice", "correct-horse")]);
    evidence.log("etcd-3.5.1-m0.1-1", "name:alice password:correct-horse\n");
    let shown = "    a::b panicked: it does not serve: --- etcd 3.5.1 m0 (last 2 of 9 lines)\n    one\rand correct-horse\n    \
                 two correct-horse\n";
    for (behind, code) in
        [("", CLEAN), ("    correct-horse\n", FOUND), ("--- m1 (last 0 of 0 lines)\ncorrect-horse\n", FOUND)]
    {
        let found = evidence.search_with(Some(&format!("test a::b\n{shown}{behind}")));
        assert_eq!(found.status.code(), code, "{behind:?}: {found:?}");
    }
}

fn login(user: &str, password: &str) -> Call {
    let request = AuthenticateRequest { name: user.into(), password: password.into() };
    Call::unary("/etcdserverpb.Auth/Authenticate", &request.encode_to_vec())
}

const SESSION_KEY: &str = "8f1d0c6b5a4938271605f4e3d2c1b0a98f1d0c6b5a4938271605f4e3d2c1b0a9";
const WRONG: &str = "not-her-password-at-all";
const FOREIGN: &str = "kw1_of-another-replica-with-another-key-which-nobody-opens-0000";
const VALUE: &str = "a-value-that-only-its-reader-may-see";

#[tokio::test]
async fn keyward_at_level_trace_writes_no_secret() {
    let (auth, tls) = (Auth::On { extra_users: 0 }, Tls::Server);
    let cluster = Cluster::start(&newest("3.5"), Options { auth, tls, ..Options::default() }).await;
    let (site, pair) = (Site::new(), cluster.pki().server());
    let key = site.write("session.key", SESSION_KEY);
    let listener = format!(", tls.cert = {:?}, tls.key = {:?}", pair.cert, pair.key);
    let mut config = site.listening(&cluster, &listener);
    config += &format!("session.key_files = [{key:?}]\nlog.level = \"trace\"\nlog.keys = true\n");
    let front = Endpoint::tls(site.listen, cluster.pki(), None);
    let keyward = Keyward::start(site, &config).await;

    let reply = front.call(&login("alice", &password("alice"))).await.messages().remove(0);
    let token = AuthenticateResponse::decode(reply).expect("etcd's message").token;
    let put = PutRequest { key: b"/a/k".to_vec().into(), value: VALUE.into(), ..Default::default() };
    let put = Call::unary("/etcdserverpb.KV/Put", &put.encode_to_vec());
    assert_eq!(front.call(&put.clone().with("token", &token)).await.code(), Some(0));
    let bearer = put.clone().with("authorization", &format!("Bearer {token}"));
    front.call(&bearer).await;
    for (call, code) in [
        (login("alice", WRONG), 3),
        (login("nobody-knows-her", WRONG), 3),
        (put.clone().with("token", FOREIGN), 16),
        (put.clone().with("token", &token[..token.len() - 4]), 16),
        (put.with("authorization", &format!("Basic {WRONG}")), 16),
    ] {
        assert_eq!(front.call(&call).await.code(), Some(code));
    }
    cluster.ctl_as_root().ok(&["user", "delete", "alice"]).await;
    front.call(&login("alice", &password("alice"))).await;

    let evidence = Evidence::new();
    let pem = fs::read_to_string(&pair.key).expect("the key is there");
    let mut secrets = vec![
        ("the password of alice", password("alice")),
        ("the password of root", password("root")),
        ("a wrong password", WRONG.into()),
        ("session.key", SESSION_KEY.into()),
        ("a token", token),
        ("a foreign token", FOREIGN.into()),
        ("a value", VALUE.into()),
    ];
    secrets.extend(pem.lines().filter(|line| !line.starts_with('-')).map(|line| ("key", line.to_owned())));
    evidence.secrets(&secrets.iter().map(|(name, value)| (*name, value.as_str())).collect::<Vec<_>>());
    for path in ["/metrics", "/readyz", "/livez"] {
        evidence.log(&format!("keyward-{}", &path[1..]), &keyward.admin(path).await.1);
    }
    keyward.reload(&config.replace("log.level", "log.nonsense"));
    let (_, site) = keyward.terminate().await;
    // The faults of a configuration: of a key that is none, and of a file that is none.
    let broken = site.write("broken.key", &format!("{SESSION_KEY}{WRONG}"));
    let bad = config
        .replace(&format!("{key:?}"), &format!("{broken:?}"))
        .replace(&format!("tls.key = {:?}", pair.key), &format!("tls.key = {broken:?}"));
    assert_ne!(bad, config);
    let bad = site.write("bad.toml", &bad);
    let check = Command::new(program()).args(["check", "--config"]).arg(bad).stdin(Stdio::null()).output();
    let check = check.expect("keyward starts");
    assert_eq!(check.status.code(), Some(64));
    evidence.log("keyward-check", &String::from_utf8_lossy(&check.stderr));
    let log = fs::read_to_string(key.with_file_name("keyward.log")).expect("the log is there");
    assert!(log.contains("user=\"alice\"") && log.contains("DEBUG"), "it says what it does: {log}");
    evidence.log("keyward", &log);
    let output = evidence.search();
    let told = String::from_utf8_lossy(&output.stdout).into_owned();
    println!("{told}");
    assert_eq!(output.status.code(), CLEAN, "{told}{}", String::from_utf8_lossy(&output.stderr));
    // The same search over the same logs sees one secret more.
    evidence.log("keyward-planted", &format!("{log}\nsession {}", password("alice")));
    assert_eq!(evidence.search().status.code(), FOUND);
}
