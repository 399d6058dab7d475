//! One of the two sides that are asked the same: where it is, and what its callers know of it.
//!
//! Owns: the tokens of its users and the ids that only it has. Must not know what the other side answers.

use std::collections::BTreeMap;

use keyward::pb::{
    etcdserverpb::{AuthenticateRequest, AuthenticateResponse, MemberAddResponse},
    v3electionpb::{CampaignResponse, LeaderKey},
};
use prost::Message;
use serde::Deserialize;

use crate::{
    harness::password,
    raw::{Answer, Call, Endpoint, Shape, frame},
};

/// As whom a call is made. In the order in which a row is asked: what changes something is mostly permitted to the last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Who {
    /// Without a token.
    None,
    /// A user without roles.
    Bob,
    /// With a token that nobody issued, of a form that etcd refuses at once (others make it wait).
    Garbage,
    /// A user with the role for `/a/`.
    Alice,
    Root,
}

/// Which kind of port etcd has: its two gRPC servers answer in different forms.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Port {
    Plain,
    Tls,
    /// TLS by which clients show certificates.
    Mutual,
}

pub(crate) const EVERYBODY: &[Who] = &[Who::None, Who::Bob, Who::Garbage, Who::Alice, Who::Root];
const GARBAGE: &str = "nobody-issued-this";

/// A side of the comparison.
pub(crate) struct Side {
    endpoint: Endpoint,
    tokens: BTreeMap<Who, String>,
    /// The client URL that it answers as its own.
    pub(crate) url: String,
    /// The id of its only member.
    pub(crate) member: u64,
    /// The id of the learner that was added last; 0 before.
    pub(crate) learner: u64,
    leaders: BTreeMap<Who, LeaderKey>,
}

impl Who {
    /// The user that this is, or an unused name.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Who::None => "none",
            Who::Bob => "bob",
            Who::Garbage => "garbage",
            Who::Alice => "alice",
            Who::Root => "root",
        }
    }

    /// A lease of its own.
    pub(crate) fn lease(self) -> i64 {
        7_700 + self as i64
    }
}

impl Side {
    /// Logs in everybody who has a password.
    pub(crate) async fn new(endpoint: Endpoint, url: String, member: u64) -> Side {
        let mut side =
            Side { endpoint, tokens: BTreeMap::new(), url, member, learner: 0, leaders: BTreeMap::new() };
        side.tokens.insert(Who::Garbage, GARBAGE.into());
        for who in [Who::Bob, Who::Alice, Who::Root] {
            let token = side.login(who).await;
            side.tokens.insert(who, token);
        }
        side
    }

    async fn login(&self, who: Who) -> String {
        let request = AuthenticateRequest { name: who.name().into(), password: password(who.name()) };
        let answer = self
            .endpoint
            .call(&Call::unary("/etcdserverpb.Auth/Authenticate", &request.encode_to_vec()))
            .await;
        assert_eq!(answer.code(), Some(0), "{who:?} cannot log in: {}", answer.message());
        let message = answer.messages().into_iter().next().expect("an answer that is OK has a message");
        AuthenticateResponse::decode(message).expect("an AuthenticateResponse").token
    }

    /// Makes one call as `who`.
    pub(crate) async fn call(&self, path: &str, messages: &[Vec<u8>], shape: Shape, who: Who) -> Answer {
        let body = messages.iter().map(|message| frame(message)).collect();
        let token = self.tokens.get(&who).map(|token| ("token", token.clone()));
        self.endpoint
            .call(&Call {
                path: path.into(),
                headers: token.into_iter().collect(),
                body,
                shape,
                ..Call::default()
            })
            .await
    }

    /// Remembers of an answer what later requests must name.
    pub(crate) fn learn(&mut self, path: &str, who: Who, answer: &Answer) {
        let Some(message) = answer.messages().into_iter().next() else { return };
        match path {
            "/etcdserverpb.Cluster/MemberAdd" => {
                let added = MemberAddResponse::decode(message).expect("a MemberAddResponse");
                self.learner = added.member.expect("a member was added").id;
            }
            "/v3electionpb.Election/Campaign" => {
                let elected = CampaignResponse::decode(message).expect("a CampaignResponse");
                self.leaders.insert(who, elected.leader.expect("somebody was elected"));
            }
            _ => {}
        }
    }

    /// The leadership that `who` won, or alice's.
    pub(crate) fn leader(&self, who: Who) -> Option<LeaderKey> {
        self.leaders.get(&who).or_else(|| self.leaders.get(&Who::Alice)).cloned()
    }
}
