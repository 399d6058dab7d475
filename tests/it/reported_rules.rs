//! `keyward check` and doctor report a rule exactly if none of the clients that there can be has the rule applied.

use keyward::members::membership::AuthSetting;
use keyward::pb::etcdserverpb::PutRequest;
use keyward::policy::unreachable_rules::{UnreachableRule, unreachable_rules};
use keyward::refusal::Code;
use keyward::tasks::Tasks;
use prost::Message as _;
use serde_json::json;

use crate::authority::{Authority, Shown, connect};
use crate::client::Client;
use crate::jwts::{Issuer, claims, lasting};
use crate::logins::line;
use crate::member::Member;
use crate::rig::{Keyward, log_in, paused};
use crate::rule_table::{KEY, SAME};
use crate::words::{PUT, was_put};

/// The conditions of the rules.
const CONDITIONS: [&str; 7] = [
    "peer = 'listener:clients'",
    "peer = 'cert:staff:CN=alice'",
    "peer = 'file:alice'",
    "peer = 'password:alice'",
    "peer = 'jwt:https://ci.test:8443:alice'",
    "peer = 'etcd_jwt:alice'",
    "network = '10.0.0.0/8'",
];
/// A listener of its own for logins, and the issuers. Auth is off, so a login by a password of etcd would prove nothing.
const LINES: &str = "[policy]\nfile = 'policy.toml'\n[login]\nsources = ['file']\nusers_file = 'users'\n\
    [[listener]]\nname = 'logins'\naddress = '127.0.0.1:2378'\n\
    [[jwt]]\nissuer = 'https://ci.test:8443'\naudience = 'etcd'\nkeys = 'ci.pem'\n\
    [etcd_jwt]\nmethod = 'ES256'\npublic_key = 'ci.pem'\n";

/// What the listeners say of client certificates, and of identification.
fn listeners() -> Vec<String> {
    let plain = ["", "['token']", "['jwt']", "['default']", "['token', 'default']", "['jwt', 'token']"];
    let asking = [
        "['certificate']",
        "['certificate', 'token']",
        "['token', 'certificate', 'default']",
        "['jwt', 'certificate']",
        "['certificate', 'default']",
    ];
    let identify = |ways: &&str| if ways.is_empty() { String::new() } else { format!("identify = {ways}\n") };
    let mut all: Vec<String> = plain.iter().map(identify).collect();
    for auth in ["optional", "required"] {
        let tls = format!(
            "tls = {{ cert = 'server.crt', key = 'server.key', client_ca = 'ca.crt', client_ca_name = 'staff', \
             client_auth = '{auth}' }}\n"
        );
        all.extend(plain.iter().chain(&asking).map(|ways| identify(ways) + &tls));
    }
    all
}

/// A rule: the namespace of a binding for the listener, or a denial in a `[[map]]` rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rule {
    Namespace,
    Denial,
}

/// Keyward with one rule, before a member.
struct Site<'a> {
    listener: &'a str,
    authority: &'a Authority,
    member: Member,
    keyward: Keyward,
    /// The finding about the rule.
    found: Option<UnreachableRule>,
}

impl<'a> Site<'a> {
    fn new(
        listener: &'a str,
        (condition, rule): (&str, Rule),
        mapped: &str,
        (authority, issuer): (&'a Authority, &Issuer),
    ) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).expect("written");
        authority.write(folder.path(), "ca");
        write("ci.pem", &issuer.0.public_key_pem());
        write("users", &line("alice", "right"));
        let (binding, denial, name) = match rule {
            Rule::Namespace => {
                let rest = "listener = 'clients'\nnamespace = '/t/'\n";
                (format!("[[binding]]\n{condition}\n{rest}"), String::new(), "policy: binding[0]")
            }
            Rule::Denial => (String::new(), format!("[[map]]\n{condition}\ndeny = true\n"), "map[0]"),
        };
        write("policy.toml", &binding);
        let member = Member::new(1, &Tasks::default());
        let lines = format!("{LINES}{denial}{mapped}");
        let keyward = Keyward::at(&[&member], AuthSetting::Off, folder.path(), listener, &lines);
        let config = keyward.config.load_full();
        let found = unreachable_rules(&config, &config.policy.document);
        let found = found.into_iter().find(|found| found.rule == name);
        Self { listener, authority, member, keyward, found }
    }

    /// True if the rule is applied to a client of this listener that shows this.
    async fn applies(&self, at: usize, shown: Option<&Shown>, token: Option<&String>) -> bool {
        let io = self.keyward.connect_to(at, Some("10.1.1.1:1".parse().expect("an address")));
        let client = if at == 0 && self.listener.contains("tls") {
            if shown.is_none() && self.listener.contains("required") {
                return false;
            }
            let io = connect(io, self.authority.tls(shown)).await.expect("a handshake");
            Client::over(io, &self.keyward.tasks).await
        } else {
            Client::over(io, &self.keyward.tasks).await
        };
        let client = token.iter().fold(client, |client, token| client.header("token", token));
        let put = PutRequest { key: KEY.into(), value: "v".into(), ..PutRequest::default() }.encode_to_vec();
        let mut has_prefix = false;
        let answers = async {
            let mut call = self.member.called(PUT).await;
            let asked = PutRequest::decode(call.message().await).expect("a put");
            call.reply(&was_put(9)).await;
            has_prefix = asked.key.starts_with(b"/t/");
            std::future::pending::<()>().await;
        };
        let end = tokio::select! {
            outcome = client.call(PUT, &put) => outcome.end,
            () = answers => unreachable!("it answers once"),
        };
        has_prefix || end.code() == Some(Code::PermissionDenied)
    }

    /// True if the rule is applied to any client that there can be.
    async fn applies_to_any(&self, issuer: &Issuer, shown: &Shown) -> bool {
        let logins = Client::over(self.keyward.connect_to(1, None), &self.keyward.tasks).await;
        let session = log_in(&logins, "alice").await;
        let etcds = json!({ "username": "alice", "revision": 1, "exp": lasting() });
        let (jwt, etcds) = (issuer.token(&claims("alice")), issuer.token(&etcds));
        let mut applies = false;
        for token in [None, Some(&session), Some(&jwt), Some(&etcds)] {
            for (at, shown) in [(0, None), (0, Some(shown)), (1, None)] {
                applies |= self.applies(at, shown, token).await;
            }
        }
        applies
    }
}

#[test]
fn a_rule_is_reported_exactly_if_no_client_meets_it() {
    paused(async {
        let (authority, issuer) = (Authority::new(), Issuer::new());
        let shown = authority.client("alice");
        let (mut reported, mut met, mut other) = (0, 0, Vec::new());
        for (at, listener) in listeners().iter().enumerate() {
            // Rules about etcd users lead to certificates, and change nothing else.
            let mapped = if at % 2 == 0 && listener.contains("tls") { SAME } else { "" };
            let rules = CONDITIONS.iter().flat_map(|one| [(*one, Rule::Namespace), (*one, Rule::Denial)]);
            // Without an authority of the name, a rule about its certificates is a fault of the configuration.
            for rule in rules.filter(|rule| !rule.0.contains("cert:") || listener.contains("client_ca")) {
                let site = Site::new(listener, rule, mapped, (&authority, &issuer));
                let is_met = site.applies_to_any(&issuer, &shown).await;
                reported += usize::from(site.found.is_some());
                met += usize::from(is_met);
                if site.found.is_some() == is_met {
                    let found = &site.found;
                    other.push(format!(
                        "{listener}{mapped}{rule:?}: met by a client: {is_met}, found: {found:?}"
                    ));
                }
            }
        }
        assert!(other.is_empty(), "{}", other.join("\n"));
        assert!(reported > 50 && met > 50, "{reported} reported, {met} met");
    });
}
