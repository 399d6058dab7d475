//! One of the two sides that are asked the same over HTTP: where it is, and what its callers know of it.
//!
//! Owns: the tokens of its users and the ids that only it has. Must not know what the other side answers.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::exchange::{Ask, HttpAnswer, Reading, Target};
use crate::{harness::password, raw::End};

/// As whom a request is made. In the order in which a row is asked: what changes something is mostly permitted to the last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Who {
    /// Without a token.
    None,
    /// A user without roles.
    Bob,
    /// With a token that nobody issued, of a form that etcd refuses at once (others make it wait).
    Garbage,
    /// A user with the role for `/a/`, her token in `Authorization`.
    Alice,
    /// Alice, her token after the word `Bearer`.
    Bearer,
    Root,
}

pub(crate) const EVERYBODY: &[Who] = &[Who::None, Who::Bob, Who::Garbage, Who::Alice, Who::Bearer, Who::Root];
pub(crate) const NAMES: &[&str] = &["none", "bob", "garbage", "alice", "bearer", "root"];
const GARBAGE: &str = "nobody-issued-this";

/// How a caller proves who calls.
#[derive(Clone, Debug)]
enum Proof {
    Token(String),
    /// By what the connection shows.
    Certificate,
}

/// A side of the comparison.
pub(crate) struct CallerSide {
    target: Target,
    proofs: BTreeMap<Who, (Proof, Option<Target>)>,
    /// Whether it takes the word `Bearer` before a token.
    takes_bearer: bool,
    /// The client URL that it answers as its own.
    pub(crate) url: String,
    /// The id of its only member.
    pub(crate) member: u64,
    /// The id of the learner that was added last; 0 before.
    pub(crate) learner: u64,
    leaders: BTreeMap<Who, Value>,
}

impl Who {
    /// The user that this is, or an unused name.
    pub(crate) fn name(self) -> &'static str {
        NAMES[self as usize]
    }

    /// A lease of its own.
    pub(crate) fn lease(self) -> i64 {
        7_700 + self as i64
    }
}

impl CallerSide {
    /// Logs in everybody who has a password.
    pub(crate) async fn new(target: Target, url: String, member: u64, takes_bearer: bool) -> CallerSide {
        let (proofs, leaders) = (BTreeMap::new(), BTreeMap::new());
        let mut side = CallerSide { target, proofs, takes_bearer, url, member, learner: 0, leaders };
        for who in [Who::Bob, Who::Alice, Who::Root] {
            let token = side.login(who).await;
            side.proofs.insert(who, (Proof::Token(token), None));
        }
        side.proofs.insert(Who::Garbage, (Proof::Token(GARBAGE.into()), None));
        side.proofs.insert(Who::Bearer, side.proofs[&Who::Alice].clone());
        side
    }

    /// The same where `who` shows a certificate, as `target` does, in the place of the token.
    pub(crate) fn with_certificate(mut self, who: Who, target: Target) -> CallerSide {
        self.proofs.insert(who, (Proof::Certificate, Some(target)));
        self
    }

    async fn login(&self, who: Who) -> String {
        let body = json!({ "name": who.name(), "password": password(who.name()) });
        let ask = Ask {
            method: "POST",
            path: "/v3/auth/authenticate".into(),
            headers: Vec::new(),
            body: body.to_string().into_bytes(),
            reading: Reading::ToItsEnd,
        };
        let answer = self.target.ask(&ask).await;
        let text = String::from_utf8_lossy(&answer.body);
        assert_eq!((answer.status, &answer.end), (Some(200), &End::Ended), "{who:?} cannot log in: {text}");
        let value: Value = serde_json::from_str(&text).expect("JSON");
        value["token"].as_str().expect("an AuthenticateResponse").to_owned()
    }

    /// Makes one request as `who`.
    pub(crate) async fn ask(&self, mut ask: Ask, who: Who) -> HttpAnswer {
        let proof = self.proofs.get(&who);
        if let Some((Proof::Token(token), _)) = proof {
            let word = if who == Who::Bearer && self.takes_bearer { "Bearer " } else { "" };
            ask.headers.push(("authorization", format!("{word}{token}")));
        }
        let target = proof.and_then(|(_, target)| target.as_ref()).unwrap_or(&self.target);
        target.ask(&ask).await
    }

    /// Remembers of an answer what later requests must name.
    pub(crate) fn learn(&mut self, path: &str, who: Who, answer: &HttpAnswer) {
        let value: Value = answer.documents().first().map_or(Value::Null, |document| {
            serde_json::from_str(document).expect("a document that was split off is JSON")
        });
        match path {
            "/v3/cluster/member/add" => {
                let id = value["member"]["ID"].as_str().and_then(|id| id.parse().ok());
                self.learner = id.expect("a member was added");
            }
            "/v3/election/campaign" => {
                self.leaders.insert(who, value["leader"].clone());
            }
            _ => {}
        }
    }

    /// The leadership that `who` won, or alice's.
    pub(crate) fn leader(&self, who: Who) -> Value {
        self.leaders.get(&who).or_else(|| self.leaders.get(&Who::Alice)).cloned().unwrap_or_default()
    }
}
