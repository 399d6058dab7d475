//! Every kind of rule, for every way of identification, in every mode of the policy, at every door: a cell applies the rule
//! to the caller, or the rule is a fault of the check before a start. No cell lets a caller pass in silence.

use std::cell::RefCell;
use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;

use data_encoding::BASE64;
use futures_util::{SinkExt as _, StreamExt as _};
use keyward::downstream::session::{RevocationChange, Revocations};
use keyward::members::membership::AuthSetting;
use keyward::pb::etcdserverpb::{PutRequest, RangeRequest};
use keyward::tasks::Tasks;
use prost::Message as _;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::protocol::Role;

use crate::authority::{Authority, connect};
use crate::client::Client;
use crate::jwts::{ISSUER, Issuer, claims, lasting};
use crate::logins::line;
use crate::member::Member;
use crate::revocations::decide;
use crate::rig::{Keyward, log_in, paused};
use crate::words::{PUT, RANGE, ranged, was_put};

const MODES: [&str; 3] = ["off", "shadow", "enforce"];
const DOORS: [Door; 3] = [Door::Grpc, Door::Json, Door::WebSocket];
/// The key of every call.
pub(crate) const KEY: &str = "/secret";
const TLS: &str = "tls = { cert = 'server.crt', key = 'server.key', client_ca = 'ca.crt', \
    client_ca_name = 'staff', client_auth = 'optional' }\n";
const CERTIFICATE: &str = "peer = 'cert:staff:CN=alice'\n";
/// Everybody may read and write all keys, where only a namespace or a limit is looked at.
const OPEN: &str = "[[role]]\nname = 'open'\n[[role.allow]]\nactions = ['read', 'write']\neverything = true\n\
    [[binding]]\neveryone = true\nroles = ['open']\n";

/// The way by which a client comes in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Door {
    Grpc,
    Json,
    WebSocket,
}

/// The evidence that a client shows beside its connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Evidence {
    Nothing,
    /// A login as this user.
    Login(&'static str),
    /// A token of nobody's.
    Junk,
    Jwt,
    EtcdToken,
}

/// A way of identification: a listener, the rules about etcd users, and a client.
#[derive(Clone, Copy, Debug)]
struct Way {
    name: &'static str,
    auth: AuthSetting,
    listener: &'static str,
    lines: &'static str,
    /// The condition of a binding, and of a `[[map]]` rule, about this client.
    binding: &'static str,
    map: &'static str,
    certificate: bool,
    evidence: Evidence,
    from: Option<&'static str>,
    /// The etcd user by the rules.
    user: Option<&'static str>,
    /// The peer in audit records.
    shown: &'static str,
}

const NOBODY: Way = Way {
    name: "nobody",
    auth: AuthSetting::Off,
    listener: "",
    lines: "",
    binding: "peer = 'listener:clients'\n",
    map: "peer = 'listener:clients'\n",
    certificate: false,
    evidence: Evidence::Nothing,
    from: None,
    user: None,
    shown: "listener:clients",
};

/// A certificate on a listener that nothing leads to look at certificates.
const BARE: Way = Way {
    name: "certificate without a rule about users",
    listener: TLS,
    binding: CERTIFICATE,
    map: CERTIFICATE,
    certificate: true,
    shown: "cert:staff:CN=alice",
    ..NOBODY
};

const ALICE: Way = Way {
    name: "password",
    auth: AuthSetting::On,
    binding: "peer = 'password:alice'\n",
    map: "peer = 'password:alice'\n",
    evidence: Evidence::Login("alice"),
    user: Some("alice"),
    shown: "password:alice",
    ..NOBODY
};

pub(crate) const SAME: &str = "[[map]]\npeer = 'cert:staff:CN=*'\nas = 'same'\n";
const WAYS: &[Way] = &[
    NOBODY,
    Way { name: "nobody beside a token that is ignored", evidence: Evidence::Junk, ..NOBODY },
    Way {
        name: "address",
        binding: "network = '10.0.0.0/8'\n",
        map: "network = '10.0.0.0/8'\n",
        from: Some("10.1.1.1:1"),
        ..NOBODY
    },
    BARE,
    Way {
        name: "certificate where identify leaves certificates out",
        listener: "identify = ['token', 'default']\ntls = { cert = 'server.crt', key = 'server.key', \
            client_ca = 'ca.crt', client_ca_name = 'staff' }\n",
        ..BARE
    },
    Way {
        name: "listener, of a client with a certificate",
        binding: NOBODY.binding,
        // With a rule about certificates the client would be its certificate.
        map: CERTIFICATE,
        ..BARE
    },
    Way { name: "certificate beside a token that is ignored", evidence: Evidence::Junk, ..BARE },
    Way {
        name: "certificate beside a login that nothing proved",
        evidence: Evidence::Login("mallory"),
        shown: "password:mallory",
        ..BARE
    },
    Way {
        name: "certificate on the listener of a default user",
        auth: AuthSetting::On,
        listener: "default_user = 'app'\ntls = { cert = 'server.crt', key = 'server.key', \
            client_ca = 'ca.crt', client_ca_name = 'staff' }\n",
        user: Some("app"),
        ..BARE
    },
    Way { name: "certificate with a user", auth: AuthSetting::On, lines: SAME, user: Some("alice"), ..BARE },
    Way { name: "certificate with a user, auth off", lines: SAME, user: Some("alice"), ..BARE },
    Way {
        name: "certificate with a user beside a login that nothing proved",
        lines: SAME,
        evidence: Evidence::Login("mallory"),
        shown: "password:mallory",
        ..BARE
    },
    ALICE,
    Way { name: "password, not proved", auth: AuthSetting::Off, ..ALICE },
    Way { name: "etcd user of a password", binding: "etcd_user = 'alice'\n", ..ALICE },
    Way {
        name: "etcd user of a password, not proved",
        auth: AuthSetting::Off,
        binding: "etcd_user = 'alice'\n",
        ..ALICE
    },
    Way {
        name: "users file",
        lines: "[login]\nsources = ['file']\nusers_file = 'users'\n[[map]]\npeer = 'file:*'\nas = 'same'\n",
        binding: "peer = 'file:alice'\n",
        map: "peer = 'file:alice'\n",
        shown: "file:alice",
        ..ALICE
    },
    Way {
        name: "users file, auth off, and no user",
        auth: AuthSetting::Off,
        lines: "[login]\nsources = ['file']\nusers_file = 'users'\n",
        binding: "peer = 'file:alice'\n",
        map: "peer = 'file:alice'\n",
        user: None,
        shown: "file:alice",
        ..ALICE
    },
    Way {
        name: "JWT",
        lines: "[[jwt]]\nissuer = 'https://ci.test:8443'\naudience = 'etcd'\nkeys = 'ci.pem'\n\
            [[map]]\npeer = 'jwt:https://ci.test:8443:*'\nas = 'same'\n",
        binding: "peer = 'jwt:https://ci.test:8443:alice'\n",
        map: "peer = 'jwt:https://ci.test:8443:alice'\n",
        evidence: Evidence::Jwt,
        shown: "jwt:https://ci.test:8443:alice",
        ..ALICE
    },
    Way {
        name: "JWT, auth off, and no user",
        auth: AuthSetting::Off,
        lines: "[[jwt]]\nissuer = 'https://ci.test:8443'\naudience = 'etcd'\nkeys = 'ci.pem'\n",
        binding: "issuer = 'https://ci.test:8443'\nclaim = { sub = 'al*' }\n",
        map: "peer = 'jwt:https://ci.test:8443:alice'\n",
        evidence: Evidence::Jwt,
        user: None,
        shown: "jwt:https://ci.test:8443:alice",
        ..ALICE
    },
    Way {
        name: "etcd's own token",
        auth: AuthSetting::Off,
        lines: "[etcd_jwt]\nmethod = 'ES256'\npublic_key = 'ci.pem'\n",
        binding: "peer = 'etcd_jwt:alice'\n",
        map: "peer = 'etcd_jwt:alice'\n",
        evidence: Evidence::EtcdToken,
        shown: "etcd_jwt:alice",
        ..ALICE
    },
    Way {
        name: "default user",
        auth: AuthSetting::On,
        listener: "default_user = 'app'\n",
        binding: "etcd_user = 'app'\n",
        user: Some("app"),
        ..NOBODY
    },
    Way {
        name: "default user beside a token that is ignored",
        listener: "default_user = 'app'\n",
        binding: "etcd_user = 'app'\n",
        evidence: Evidence::Junk,
        user: Some("app"),
        ..NOBODY
    },
];

/// A kind of rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rule {
    Namespace,
    ListenerNamespace,
    /// A binding of its own mode, with a role that may read.
    Enforced,
    /// The same, with a role that may all but write the key.
    Denying,
    /// A binding of the policy's mode.
    Grants,
    RoleLimit,
    PeerLimit,
    ListenerLimit,
    /// `deny` in a `[[map]]` rule.
    Denial,
    /// `keyward block` of the etcd user.
    Block,
    /// The peer in an audit record, by which the log is searched and a policy learned.
    Audit,
}

const RULES: [Rule; 11] = [
    Rule::Namespace,
    Rule::ListenerNamespace,
    Rule::Enforced,
    Rule::Denying,
    Rule::Grants,
    Rule::RoleLimit,
    Rule::PeerLimit,
    Rule::ListenerLimit,
    Rule::Denial,
    Rule::Block,
    Rule::Audit,
];

impl Rule {
    /// The policy, the lines of the listener, and those of the configuration.
    fn texts(self, way: &Way) -> (String, &'static str, String) {
        let role = |rest: &str| format!("[[role]]\nname = 'r'\n{rest}");
        let bound = |rest: &str| format!("[[binding]]\n{}{rest}", way.binding);
        let reader = role("[[role.allow]]\nactions = ['read']\neverything = true\n");
        let in_role = |rest: &str| bound(&format!("roles = ['r']\n{rest}"));
        let all = || "".to_owned();
        match self {
            Self::Namespace => (format!("{OPEN}{}", bound("namespace = '/t/'\n")), "", all()),
            Self::ListenerNamespace => (OPEN.to_owned(), "namespace = '/t/'\n", all()),
            Self::Enforced => (reader + &in_role("mode = 'enforce'\n"), "", all()),
            Self::Denying => {
                let denying = format!(
                    "[[role.allow]]\nactions = ['read', 'write']\neverything = true\n\
                     [[role.deny]]\nactions = ['write']\nkey = '{KEY}'\n"
                );
                (role(&denying) + &in_role("mode = 'enforce'\n"), "", all())
            }
            Self::Grants => (reader + &in_role(""), "", all()),
            Self::RoleLimit => {
                let limited = role("limits = { keys_per_range = 7, on_exceed = 'page' }\n") + &in_role("");
                (OPEN.to_owned() + &limited, "", all())
            }
            Self::PeerLimit => {
                let lines = "[policy.peer_limits]\nkeys_per_range = 7\non_exceed = 'page'\n";
                (OPEN.to_owned(), "", lines.to_owned())
            }
            Self::ListenerLimit => {
                (OPEN.to_owned(), "limits = { keys_per_range = 7, on_exceed = 'page' }\n", all())
            }
            Self::Denial => (OPEN.to_owned(), "", format!("[[map]]\n{}deny = true\n", way.map)),
            Self::Block => (OPEN.to_owned(), "", all()),
            Self::Audit => (OPEN.to_owned(), "", "[audit]\nfile = 'audit.log'\n".to_owned()),
        }
    }
}

/// Where a call has come to.
#[derive(Debug)]
enum Fate {
    /// The member got this request.
    Served(Vec<u8>),
    /// The client was refused so, and the member got nothing.
    Refused(String),
}

trait Io: AsyncRead + AsyncWrite + Unpin {}
impl<T: AsyncRead + AsyncWrite + Unpin> Io for T {}

/// Keyward with one way and one rule, before a member.
struct Site {
    way: &'static Way,
    folder: TempDir,
    authority: Arc<Authority>,
    issuer: Arc<Issuer>,
    member: Member,
    keyward: Keyward,
}

impl Site {
    fn new(
        way: &'static Way,
        rule: Rule,
        mode: &str,
        authority: &Arc<Authority>,
        issuer: &Arc<Issuer>,
    ) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).expect("written");
        authority.write(folder.path(), "ca");
        write("ci.pem", &issuer.0.public_key_pem());
        write("users", &line("alice", "right"));
        let (policy, listener, rules) = rule.texts(way);
        write("policy.toml", &policy);
        let mut lines = format!("[policy]\nmode = '{mode}'\nfile = 'policy.toml'\n{rules}{}", way.lines);
        for user in ["app", "alice"] {
            write(user, "right");
            lines += &format!("[[user]]\nname = '{user}'\npassword_file = '{user}'\n");
        }
        let member = Member::new(1, &Tasks::default());
        let listener = format!("{}{listener}", way.listener);
        let keyward = Keyward::at(&[&member], way.auth, folder.path(), &listener, &lines);
        Self { way, folder, authority: Arc::clone(authority), issuer: Arc::clone(issuer), member, keyward }
    }

    async fn io(&self, protocol: &[u8]) -> Box<dyn Io> {
        let from: Option<SocketAddr> = self.way.from.map(|from| from.parse().expect("an address"));
        let io = self.keyward.connect_to(0, from);
        if !self.way.listener.contains("tls") {
            return Box::new(io);
        }
        let shown = self.way.certificate.then(|| self.authority.client("alice"));
        let mut tls = rustls::ClientConfig::clone(&self.authority.tls(shown.as_ref()));
        tls.alpn_protocols = vec![protocol.to_vec()];
        Box::new(connect(io, Arc::new(tls)).await.expect("a handshake"))
    }

    async fn client(&self) -> Client {
        Client::over(self.io(b"h2").await, &self.keyward.tasks).await
    }

    async fn token(&self) -> Option<String> {
        match self.way.evidence {
            Evidence::Nothing => None,
            Evidence::Login(user) => Some(log_in(&self.client().await, user).await),
            Evidence::Junk => Some("nobody-issued-this".to_owned()),
            Evidence::Jwt => Some(self.issuer.token(&claims("alice"))),
            Evidence::EtcdToken => {
                let claims = json!({ "username": "alice", "revision": 1, "exp": lasting() });
                Some(self.issuer.token(&claims))
            }
        }
    }

    /// Makes a call, and answers what reaches the member.
    async fn call(&self, door: Door, token: Option<&str>, rule: Rule) -> Fate {
        let seen = RefCell::new(None);
        let answers = async {
            loop {
                let mut call = self.member.call().await;
                let message = call.message().await;
                let answer = match call.path() {
                    RANGE => ranged(9),
                    PUT => was_put(9),
                    other => panic!("{other}"),
                };
                assert!(seen.replace(Some(message.to_vec())).is_none(), "one call reaches the member");
                call.reply(&answer).await;
            }
        };
        let refusal = tokio::select! {
            refusal = self.ask(door, token, rule) => refusal,
            () = answers => unreachable!("the member answers for ever"),
        };
        match (seen.into_inner(), refusal) {
            (Some(request), None) => Fate::Served(request),
            (None, Some(text)) => Fate::Refused(text),
            (Some(_), Some(text)) => panic!("refused, and sent: {text}"),
            (None, None) => panic!("an answer of nobody's"),
        }
    }

    /// Makes a call; the text of its refusal.
    async fn ask(&self, door: Door, token: Option<&str>, rule: Rule) -> Option<String> {
        let limited = matches!(rule, Rule::RoleLimit | Rule::PeerLimit | Rule::ListenerLimit);
        let base64 = |text: &str| BASE64.encode(text.as_bytes());
        let (path, rest, message, document) = if limited {
            let asked = RangeRequest { key: KEY.into(), range_end: "/z".into(), ..RangeRequest::default() };
            let document = json!({ "key": base64(KEY), "range_end": base64("/z") });
            (RANGE, "/v3/kv/range", asked.encode_to_vec(), document)
        } else {
            let asked = PutRequest { key: KEY.into(), value: "v".into(), ..PutRequest::default() };
            let document = json!({ "key": base64(KEY), "value": base64("v") });
            (PUT, "/v3/kv/put", asked.encode_to_vec(), document)
        };
        match door {
            Door::Grpc => {
                let client = self.client().await;
                let client = token.into_iter().fold(client, |client, token| client.header("token", token));
                let outcome = client.call(path, &message).await;
                let (code, text) = outcome.end.told();
                (outcome.messages.is_empty()).then(|| format!("{code:?}: {text}"))
            }
            Door::Json => {
                let field = token.map(|token| format!("Authorization: {token}\r\n")).unwrap_or_default();
                let mut io = self.io(b"http/1.1").await;
                let request = crate::rest::post(rest, &field, &document.to_string());
                io.write_all(request.as_bytes()).await.expect("room");
                let mut answer = Vec::new();
                // A client of TLS is not told of the end by every close.
                drop(io.read_to_end(&mut answer).await);
                let answer = String::from_utf8(answer).expect("text");
                let (status, _, body) = crate::rest::parts(&answer);
                (status != 200).then(|| body.to_owned())
            }
            Door::WebSocket => {
                let field = token.map(|token| format!("Sec-WebSocket-Protocol: Bearer, {token}\r\n"));
                let mut io = self.io(b"http/1.1").await;
                let request = crate::rest_websockets::asking(rest, &field.unwrap_or_default());
                io.write_all(request.as_bytes()).await.expect("room");
                let mut head = Vec::new();
                while !head.ends_with(b"\r\n\r\n") {
                    head.push(io.read_u8().await.expect("a head"));
                }
                let head = String::from_utf8(head).expect("text");
                assert!(head.starts_with("HTTP/1.1 101"), "{head}");
                let mut socket = WebSocketStream::from_raw_socket(io, Role::Client, None).await;
                // A call that is refused before its document has no reader for the document.
                drop(socket.send(Message::text(document.to_string())).await);
                loop {
                    match socket.next().await.expect("an answer").expect("a message") {
                        Message::Text(text) => {
                            let answer: Value = serde_json::from_str(&text).expect("JSON");
                            return answer.get("code").is_some().then(|| text.to_string());
                        }
                        Message::Ping(_) | Message::Pong(_) => {}
                        other => panic!("{other:?}"),
                    }
                }
            }
        }
    }

    /// True if the rule was applied to the call.
    fn has_applied(&self, rule: Rule, mode: &str, fate: &Fate) -> bool {
        match (rule, fate) {
            (Rule::Namespace | Rule::ListenerNamespace, Fate::Served(request)) => {
                PutRequest::decode(&request[..]).expect("a put").key == format!("/t/{KEY}").as_bytes()
            }
            (Rule::Enforced | Rule::Denying | Rule::Denial | Rule::Block, Fate::Refused(text)) => {
                is_denial(text)
            }
            // A mode says by itself that grants are not judged, or that denials are counted.
            (Rule::Grants, Fate::Served(_)) if mode == "off" => true,
            (Rule::Grants, Fate::Served(_)) if mode == "shadow" => {
                let metrics = self.keyward.metrics.text().expect("text");
                metrics.contains("keyward_policy_shadow_denied_total{action=\"write\"}")
            }
            (Rule::Grants, Fate::Refused(text)) => mode == "enforce" && is_denial(text),
            (Rule::RoleLimit | Rule::PeerLimit | Rule::ListenerLimit, Fate::Served(request)) => {
                RangeRequest::decode(&request[..]).expect("a range").limit == 7
            }
            (Rule::Audit, Fate::Served(_)) => self.recorded(&format!("\"peer\":\"{}\"", self.way.shown)),
            _ => false,
        }
    }

    /// True if a record of a change has this text.
    fn recorded(&self, text: &str) -> bool {
        let file = self.folder.path().join("audit.log");
        loop {
            let records = std::fs::read_to_string(&file).expect("the log");
            if let Some(record) = records.lines().rfind(|line| line.contains("\"event\":\"change\"")) {
                return record.contains(text);
            }
            std::thread::yield_now();
        }
    }
}

/// The refusals of a denied caller: of a blocked user's session, and all others.
fn is_denial(text: &str) -> bool {
    text.contains("permission denied") || text.contains("invalid auth token")
}

impl fmt::Display for Door {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Grpc => "gRPC",
            Self::Json => "JSON",
            Self::WebSocket => "WebSocket",
        })
    }
}

/// Visits all cells of a mode.
async fn every_cell_applies(mode: &str) {
    let (authority, issuer) = (Arc::new(Authority::new()), Arc::new(Issuer::new()));
    assert!(ISSUER == "https://ci.test:8443", "the issuer in the table");
    let (mut cells, mut silent) = (0, Vec::new());
    for way in WAYS {
        for rule in RULES {
            if rule == Rule::Block && way.user.is_none() {
                // There is no user to block: `keyward block` says that the name is not known.
                continue;
            }
            let site = Site::new(way, rule, mode, &authority, &issuer);
            let token = site.token().await;
            if let (Rule::Block, Some(user)) = (rule, way.user) {
                decide(&site.keyward, &Revocations::default(), &RevocationChange::Block(user.into()));
            }
            for door in DOORS {
                let fate = site.call(door, token.as_deref(), rule).await;
                cells += 1;
                if !site.has_applied(rule, mode, &fate) {
                    silent.push(format!("{} × {rule:?} × {mode} × {door}: {fate:?}", way.name));
                }
            }
        }
    }
    assert!(cells > 500, "{cells}");
    assert!(silent.is_empty(), "{} of {cells} cells:\n{}", silent.len(), silent.join("\n"));
}

#[test]
fn every_rule_applies_where_the_policy_is_off() {
    paused(every_cell_applies(MODES[0]));
}

#[test]
fn every_rule_applies_where_the_policy_is_in_shadow() {
    paused(every_cell_applies(MODES[1]));
}

#[test]
fn every_rule_applies_where_the_policy_is_enforced() {
    paused(every_cell_applies(MODES[2]));
}
