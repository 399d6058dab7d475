//! Calls that an operator describes, judged by a policy.
//!
//! Owns: the described calls, and the text of a verdict. Must not know: how a decision is made, where the
//! policy comes from. Invariant: a verdict is that of the same code which decides on clients' requests, under
//! `enforce`.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::SystemTime;

use bytes::Bytes;
use prost::Message as _;
use serde::{Deserialize, Serialize};

use super::compiled::{Policy, PolicySubject};
use super::mapping::{Mapping, MappingResult};
use super::permit_set::{Decision, PermitSet};
use super::rules_in_force::RulesGeneration;
use keyward_config::policy_document::PolicyDocument;
use keyward_config::{Config, Identify, PolicyMode, PolicySettings};
use keyward_etcd::identity::Peer;
use keyward_etcd::identity::pattern::{Attribute, Glob, PeerPattern};
use keyward_etcd::identity::peer::JwtClaims;
use keyward_etcd::pb::{etcdserverpb as pb, v3electionpb as election, v3lockpb as lock};
use keyward_etcd::rpc::key_range::end_of_prefix;
use keyward_etcd::rpc::method::{Method, methods_named};
use keyward_etcd::rpc::schema::MessageId;
use keyward_etcd::rpc::touch::{Action, TouchTarget};

/// The line about a peer without an etcd user. The call may have names that its description lacks, as further
/// names of a certificate.
const UNMAPPED: &str = "none: no rule of [[map]] takes this peer as described, and while auth is on at etcd \
                        its calls are refused; --etcd-user names the user of its calls";

/// A call to be judged.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DescribedCall {
    /// The peer, as in a binding without `*`.
    pub peer: String,
    /// The etcd user of the peer's calls; by default the user that the configuration's rules give the peer.
    pub etcd_user: Option<String>,
    /// The listener; by default the first one of the configuration.
    pub listener: Option<String>,
    /// The client's address.
    pub address: Option<IpAddr>,
    /// Claims of a JWT.
    pub claims: BTreeMap<String, Vec<String>>,
    /// The path of the method, or its last part, as in `Put`.
    pub method: String,
    /// The key, the name of a lock, or a key of the lease. Without a key the keys of a lease are not judged.
    pub key: String,
    /// The end of the range, as on etcd's wire; a zero byte means no end.
    pub range_end: String,
    /// True for all keys that begin with `key`, in place of `range_end`.
    pub prefix: bool,
}

/// The verdict on a described call.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Explanation {
    /// True if the policy allows the call.
    pub is_allowed: bool,
    /// The explanation, several lines.
    pub text: String,
}

/// A call that cannot be judged as described, with the reason.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct UnjudgedCall(String);

/// A policy that judges described calls, within its configuration.
pub struct JudgingPolicy<'c> {
    config: &'c Config,
    /// Under `enforce`, whatever the modes in the configuration and in the document.
    enforced: Policy,
    /// With its own modes.
    own: Policy,
}

impl<'c> JudgingPolicy<'c> {
    /// The rules of `document` in place of the configuration's, as they are at `now`.
    #[must_use]
    pub fn new(config: &'c Config, document: &PolicyDocument, now: SystemTime) -> Self {
        let compiled = |mode: PolicyMode, document: PolicyDocument| {
            let settings = PolicySettings { mode, ..PolicySettings::clone(&config.policy) };
            let rules = RulesGeneration { number: 0, document: Arc::new(document), is_known: true };
            Policy::new(Arc::new(settings), rules, config.own_prefixes(), now)
        };
        let mut enforced = document.clone();
        enforced.bindings.iter_mut().for_each(|binding| binding.mode = None);
        let own = compiled(config.policy.mode, document.clone());
        Self { config, enforced: compiled(PolicyMode::Enforce, enforced), own }
    }

    /// Explains the verdict on a call.
    ///
    /// # Errors
    /// The call cannot be judged as described.
    pub fn explain(&self, call: &DescribedCall) -> Result<Explanation, UnjudgedCall> {
        let peer = self.peer(call)?;
        let method = method(&call.method)?;
        let message = message(method, call)?;
        let listener = match (&call.listener, self.config.listeners.first()) {
            (Some(name), _) => &**name,
            (None, Some(first)) => &*first.name,
            (None, None) => "",
        };
        // A certificate that no way takes does not make its client another than the listener's.
        let of_listener = self.config.listeners.iter().find(|known| *known.name == *listener);
        let is_beside = matches!(peer, Peer::Certificate { .. })
            && of_listener.is_some_and(|known| !known.identify.contains(&Identify::Certificate));
        let also = is_beside.then(|| Peer::Listener(listener.into()));
        let user = match &call.etcd_user {
            Some(given) => DescribedUser::of(given.as_str()),
            // Beside a certificate that no way takes, the listener gives the etcd user.
            None => self.mapped_user(also.as_ref().unwrap_or(&peer), call.address),
        };
        let subject = PolicySubject::of(&peer, user.name.as_deref(), call.address, listener);
        let subject = PolicySubject { also: also.as_ref(), ..subject };
        let (permits, own) = (self.enforced.permits(subject), self.own.permits(subject));
        let mut text = String::new();
        let document = self.enforced.document();
        let roles: Vec<&str> = permits.roles.iter().map(|role| &*document.roles[*role].name).collect();
        let _infallible = writeln!(text, "peer     {peer}");
        let _infallible = writeln!(
            text,
            "roles    {}",
            if roles.is_empty() { "none".to_owned() } else { roles.join(", ") }
        );
        let _infallible = writeln!(text, "mode     {}", own.mode.name());
        if let Some(origin) = &user.origin {
            let _infallible = writeln!(text, "user     {origin}");
        }
        let is_allowed = judge(&permits, method, &message, call, &mut text) && !user.is_denied;
        let _infallible = writeln!(text, "verdict  {}", if is_allowed { "allowed" } else { "refused" });
        Ok(Explanation { is_allowed, text })
    }

    /// The etcd user that the configuration's rules give the peer.
    fn mapped_user(&self, peer: &Peer, address: Option<IpAddr>) -> DescribedUser {
        let nobody =
            |origin: Option<&str>| DescribedUser { origin: origin.map(Into::into), ..Default::default() };
        match Mapping::new(self.config.mapping.as_ref().clone()).user_of(peer, address) {
            MappingResult::User(user) => DescribedUser {
                origin: Some(format!("{user}, by the rules of [[map]]")),
                ..DescribedUser::of(user.as_str())
            },
            MappingResult::Itself => match peer {
                Peer::Password(user) | Peer::EtcdToken(user) => DescribedUser::of(user.as_str()),
                _ => nobody(None),
            },
            MappingResult::Anonymous => nobody(None),
            MappingResult::Denied => DescribedUser {
                is_denied: true,
                ..nobody(Some("none: the rules of [[map]] refuse this peer"))
            },
            MappingResult::Unknown => nobody(Some(UNMAPPED)),
        }
    }

    fn peer(&self, call: &DescribedCall) -> Result<Peer, UnjudgedCall> {
        let issuers: Vec<Arc<str>> =
            self.config.issuers.listed.iter().map(|issuer| Arc::clone(&issuer.issuer)).collect();
        let fault = |reason: &str| UnjudgedCall(format!("peer {:?}: {reason}", call.peer));
        let pattern =
            PeerPattern::parse(&call.peer, &issuers).map_err(|malformed| fault(&malformed.to_string()))?;
        let exact = |name: &Glob| {
            name.exact().map(Arc::<str>::from).ok_or_else(|| fault("one peer is needed, without *"))
        };
        Ok(match pattern {
            PeerPattern::Password(name) => Peer::Password((&*exact(&name)?).into()),
            PeerPattern::File(name) => Peer::File((&*exact(&name)?).into()),
            PeerPattern::EtcdToken(name) => Peer::EtcdToken((&*exact(&name)?).into()),
            PeerPattern::Listener(name) => Peer::Listener(exact(&name)?),
            PeerPattern::Jwt { issuer, subject } => {
                let claims: JwtClaims = call.claims.clone().into_iter().collect();
                Peer::Jwt { issuer, subject: exact(&subject)?, claims: Arc::new(claims) }
            }
            PeerPattern::Certificate { ca, attribute, name } => {
                let name = exact(&name)?;
                let only = |wanted| if attribute == wanted { vec![Arc::clone(&name)] } else { Vec::new() };
                let common_name = (attribute == Attribute::CommonName).then(|| Arc::clone(&name));
                let (dns, uris) = (only(Attribute::Dns).into(), only(Attribute::Uri).into());
                Peer::Certificate { ca, common_name, dns, uris }
            }
        })
    }
}

/// The etcd user of a described call.
#[derive(Default)]
struct DescribedUser {
    /// The name, if there is a user.
    name: Option<Box<str>>,
    /// The line about the user, where the peer's name and the command line do not tell the user.
    origin: Option<String>,
    /// The rules refuse the peer before the policy is asked.
    is_denied: bool,
}

impl DescribedUser {
    fn of(name: &str) -> Self {
        Self { name: Some(name.into()), ..Self::default() }
    }
}

/// Judges each touch of a request, with a line for each.
fn judge(
    permits: &PermitSet,
    method: &Method,
    message: &[u8],
    call: &DescribedCall,
    text: &mut String,
) -> bool {
    let (mut is_allowed, has_line) = (true, Cell::new(false));
    let mut unjudged = None;
    let mut line = |action: Action, keys: &str, verdict: Result<Option<String>, String>| {
        let shown = match verdict {
            Ok(rule) => format!("allowed by {}", rule.unwrap_or_else(|| "its role".to_owned())),
            Err(reason) => {
                is_allowed = false;
                format!("refused: {reason}")
            }
        };
        has_line.set(true);
        let _infallible = writeln!(text, "{:<8} {keys}: {shown}", action.name());
    };
    permits.explain(method, message, &mut |touch, verdict| {
        let verdict = match verdict {
            Ok(grant) => Ok(Some(permits.allowing_rule(grant))),
            Err(denial) => Err(permits.denying_rule(denial)),
        };
        match touch.target {
            TouchTarget::Keys(range) => line(touch.action, &range.to_string(), verdict),
            TouchTarget::Cluster => line(touch.action, "the cluster", verdict),
            TouchTarget::KeysOfLease(_) | TouchTarget::KeysSharingLease(_) if call.key.is_empty() => {
                unjudged = Some(touch.action);
            }
            TouchTarget::KeysOfLease(_) | TouchTarget::KeysSharingLease(_) => {
                let key = call.key.as_bytes();
                let decided = match permits.decide_keys(touch.action, [key]) {
                    Decision::Denied(denial) => Err(permits.denying_rule(denial)),
                    Decision::Allowed(permit) | Decision::NeedsLeaseKeys(permit, _) => {
                        Ok(permit.grant().map(|grant| permits.allowing_rule(grant)))
                    }
                };
                line(touch.action, &format!("key {:?} of the lease", call.key), decided);
            }
        }
    });
    // A request without any touch, such as an empty Txn, needs a role.
    if let (false, Decision::Denied(denial)) = (has_line.get(), permits.decide_stream(method)) {
        line(denial.action, "any request", Err(permits.denying_rule(denial)));
    }
    // A lease without keys is one that the caller's actions alone decide on.
    if let Some(action) = unjudged {
        let advice = "not judged; name a key of the lease to judge its keys";
        let _infallible = writeln!(text, "{:<8} keys of the lease: {advice}", action.name());
    }
    is_allowed
}

/// The method that a person names.
fn method(name: &str) -> Result<&'static Method, UnjudgedCall> {
    match methods_named(name)[..] {
        [method] => Ok(method),
        [] => Err(UnjudgedCall(format!("{name:?} is no method; write its path, or its last part as in Put"))),
        ref several => {
            let paths: Vec<&str> = several.iter().map(|method| method.path).collect();
            let paths = paths.join(" or ");
            Err(UnjudgedCall(format!("{name:?} is the end of several paths; write one of them: {paths}")))
        }
    }
}

/// The request of a described call.
fn message(method: &Method, call: &DescribedCall) -> Result<Vec<u8>, UnjudgedCall> {
    let key: Vec<u8> = call.key.clone().into_bytes();
    let end: Vec<u8> = if call.prefix {
        end_of_prefix(&key).unwrap_or_else(|| vec![0])
    } else {
        call.range_end.clone().into_bytes()
    };
    let (key, range_end) = (Bytes::from(key), Bytes::from(end));
    let leader = || Some(election::LeaderKey { key: key.clone(), ..Default::default() });
    Ok(match method.body {
        MessageId::RangeRequest => pb::RangeRequest { key, range_end, ..Default::default() }.encode_to_vec(),
        MessageId::PutRequest => pb::PutRequest { key, ..Default::default() }.encode_to_vec(),
        MessageId::DeleteRangeRequest => {
            pb::DeleteRangeRequest { key, range_end, ..Default::default() }.encode_to_vec()
        }
        MessageId::WatchRequest => {
            let create = pb::WatchCreateRequest { key, range_end, ..Default::default() };
            let union = Some(pb::watch_request::RequestUnion::CreateRequest(create));
            pb::WatchRequest { request_union: union }.encode_to_vec()
        }
        MessageId::LockRequest => lock::LockRequest { name: key, ..Default::default() }.encode_to_vec(),
        MessageId::UnlockRequest => lock::UnlockRequest { key }.encode_to_vec(),
        MessageId::CampaignRequest => {
            election::CampaignRequest { name: key, ..Default::default() }.encode_to_vec()
        }
        MessageId::LeaderRequest => election::LeaderRequest { name: key }.encode_to_vec(),
        MessageId::ProclaimRequest => {
            election::ProclaimRequest { leader: leader(), ..Default::default() }.encode_to_vec()
        }
        MessageId::ResignRequest => election::ResignRequest { leader: leader() }.encode_to_vec(),
        MessageId::LeaseRevokeRequest => pb::LeaseRevokeRequest { id: 1 }.encode_to_vec(),
        MessageId::LeaseKeepAliveRequest => pb::LeaseKeepAliveRequest { id: 1 }.encode_to_vec(),
        MessageId::LeaseTimeToLiveRequest => pb::LeaseTimeToLiveRequest { id: 1, keys: true }.encode_to_vec(),
        MessageId::TxnRequest => {
            let reason = "a Txn needs the permissions of its parts: \
                          name each as a Range (also for a compare), Put or DeleteRange";
            return Err(UnjudgedCall(reason.to_owned()));
        }
        _ => Vec::new(),
    })
}
