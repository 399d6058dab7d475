//! `keyward policy check`, `explain` and `test`: a policy file without a running Keyward.
//!
//! Owns: the calls that a table or an operator describes, and the text of a verdict. Must not know: how a
//! decision is made. Invariant: a verdict is that of the same code which decides on clients' requests, under
//! `enforce`.

use std::fmt::Write as _;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use prost::Message as _;
use serde::Deserialize;

use crate::config::policy_document::PolicyDocument;
use crate::config::{
    self, Config, ConfigFaults, ConfigSources, ConfigWarning, Identify, PolicyMode, PolicySettings,
};
use crate::identity::Peer;
use crate::identity::pattern::{Attribute, PeerPattern};
use crate::identity::peer::JwtClaims;
use crate::pb::{etcdserverpb as pb, v3electionpb as election, v3lockpb as lock};
use crate::policy::compiled::{Policy, PolicySubject};
use crate::policy::permit_set::{Decision, PermitSet};
use crate::policy::rules_in_force::RulesInForce;
use crate::policy::unreachable_rules::{UnreachableRule, unreachable_bindings};
use crate::rpc::method::{METHODS, Method};
use crate::rpc::schema::MessageId;
use crate::rpc::touch::{Action, TouchTarget};

/// Reasons why a policy cannot be judged.
#[derive(Debug, thiserror::Error)]
pub enum PolicyCheckError {
    /// The configuration, or the policy, has faults.
    #[error("{0}")]
    Faults(#[from] ConfigFaults),
    /// A file cannot be read.
    #[error("{0}")]
    Unreadable(String),
    /// The table of calls is malformed.
    #[error("{}: {reason}", .path.display())]
    Table {
        /// The file.
        path: PathBuf,
        /// The fault.
        reason: String,
    },
    /// A call cannot be judged as described.
    #[error("{0}")]
    Call(String),
}

/// A call to be judged.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DescribedCall {
    /// The peer, as in a binding without `*`.
    pub peer: String,
    /// The etcd user of the peer's calls; by default the name of a peer that logs in.
    pub etcd_user: Option<String>,
    /// The listener; by default the first one of the configuration.
    pub listener: Option<String>,
    /// The client's address.
    pub address: Option<IpAddr>,
    /// Claims of a JWT.
    pub claims: std::collections::BTreeMap<String, Vec<String>>,
    /// The path of the method, or its last part, as in `Put`.
    pub method: String,
    /// The key, the name of a lock, or a key of the lease.
    pub key: String,
    /// The end of the range, as on etcd's wire; a zero byte means no end.
    pub range_end: String,
    /// True for all keys that begin with `key`, in place of `range_end`.
    pub prefix: bool,
}

/// A table of calls with their expected verdicts.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct ExpectedVerdicts {
    test: Vec<ExpectedVerdict>,
}

/// A row of the table.
#[derive(Debug, Deserialize)]
struct ExpectedVerdict {
    /// `allow` or `deny`.
    expect: ExpectedWord,
    #[serde(flatten)]
    call: toml::Table,
}

#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
enum ExpectedWord {
    Allow,
    Deny,
}

/// A policy to be judged, within its configuration.
pub struct CheckedPolicy {
    config: Config,
    /// Under `enforce`, whatever the modes in the configuration and in the document.
    enforced: Policy,
    /// With its own modes.
    own: Policy,
    /// The warnings about the policy.
    pub warnings: Vec<ConfigWarning>,
    /// The rules of the policy that can apply to no caller.
    pub unreachable: Vec<UnreachableRule>,
}

/// The verdict on a described call.
#[derive(Debug)]
pub struct Explanation {
    /// True if the policy allows the call.
    pub is_allowed: bool,
    /// The explanation, several lines.
    pub text: String,
}

impl CheckedPolicy {
    /// Reads the configuration, and the policy of `file` in place of the configuration's.
    ///
    /// # Errors
    /// All faults of the configuration, or of the policy.
    pub fn read(sources: &ConfigSources, file: Option<&Path>) -> Result<Self, PolicyCheckError> {
        let (mut config, _) = sources.load()?;
        let mut warnings = Vec::new();
        let mut settings = PolicySettings::clone(&config.policy);
        if let Some(file) = file {
            let text = config::read_policy(file).map_err(PolicyCheckError::Unreadable)?;
            let issuers: Vec<Arc<str>> =
                config.issuers.listed.iter().map(|issuer| Arc::clone(&issuer.issuer)).collect();
            let (document, found) = config::policy(&text, &config.listeners, &issuers)?;
            settings.document = Arc::new(document);
            warnings = found;
        }
        let unreachable = unreachable_bindings(&config, &settings.document);
        let own = policy(&mut config, settings.clone());
        settings.mode = PolicyMode::Enforce;
        let mut document = PolicyDocument::clone(&settings.document);
        document.bindings.iter_mut().for_each(|binding| binding.mode = None);
        settings.document = Arc::new(document);
        let enforced = policy(&mut config, settings);
        Ok(Self { config, enforced, own, warnings, unreachable })
    }

    /// Explains the verdict on a call.
    ///
    /// # Errors
    /// The call cannot be judged as described.
    pub fn explain(&self, call: &DescribedCall) -> Result<Explanation, PolicyCheckError> {
        let peer = self.peer(call)?;
        let method = method(&call.method)?;
        let message = message(method, call)?;
        let listener = match (&call.listener, self.config.listeners.first()) {
            (Some(name), _) => &**name,
            (None, Some(first)) => &*first.name,
            (None, None) => "",
        };
        let etcd_user = call.etcd_user.as_deref().or(match &peer {
            Peer::Password(user) | Peer::File(user) | Peer::EtcdToken(user) => Some(user.as_str()),
            _ => None,
        });
        // A certificate that no way takes does not make its client another than the listener's.
        let of_listener = self.config.listeners.iter().find(|known| *known.name == *listener);
        let is_beside = matches!(peer, Peer::Certificate { .. })
            && of_listener.is_some_and(|known| !known.identify.contains(&Identify::Certificate));
        let also = is_beside.then(|| Peer::Listener(listener.into()));
        let subject = PolicySubject::of(&peer, etcd_user, call.address, listener);
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
        let is_allowed = judge(&permits, method, &message, call, &mut text);
        let _infallible = writeln!(text, "verdict  {}", if is_allowed { "allowed" } else { "refused" });
        Ok(Explanation { is_allowed, text })
    }

    fn peer(&self, call: &DescribedCall) -> Result<Peer, PolicyCheckError> {
        let issuers: Vec<Arc<str>> =
            self.config.issuers.listed.iter().map(|issuer| Arc::clone(&issuer.issuer)).collect();
        let fault = |reason: &str| PolicyCheckError::Call(format!("peer {:?}: {reason}", call.peer));
        let pattern =
            PeerPattern::parse(&call.peer, &issuers).map_err(|malformed| fault(&malformed.to_string()))?;
        let exact = |name: &crate::identity::pattern::Glob| {
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

    /// Judges each call of a table, a TOML file with `[[test]]` tables. Returns the number of calls, and a
    /// text for each call with another verdict than expected.
    ///
    /// # Errors
    /// The table is malformed, or a call cannot be judged as described.
    pub fn test(&self, path: &Path) -> Result<(usize, Vec<String>), PolicyCheckError> {
        let table = |reason: String| PolicyCheckError::Table { path: path.to_owned(), reason };
        let text = std::fs::read_to_string(path).map_err(|error| {
            PolicyCheckError::Unreadable(format!("cannot read {}: {error}", path.display()))
        })?;
        let rows: ExpectedVerdicts = toml::from_str(&text).map_err(|error| table(error.to_string()))?;
        if rows.test.is_empty() {
            return Err(table("has no [[test]]".to_owned()));
        }
        let mut others = Vec::new();
        let count = rows.test.len();
        for (at, row) in rows.test.into_iter().enumerate() {
            let call: DescribedCall =
                row.call.try_into().map_err(|error| table(format!("test[{at}]: {error}")))?;
            let explained = self.explain(&call).map_err(|error| table(format!("test[{at}]: {error}")))?;
            if explained.is_allowed != (row.expect == ExpectedWord::Allow) {
                let expected = if explained.is_allowed { "deny" } else { "allow" };
                others.push(format!(
                    "test[{at}]: {} {} {:?}: expected {expected:?}\n{}",
                    call.peer, call.method, call.key, explained.text
                ));
            }
        }
        Ok((count, others))
    }
}

fn policy(config: &mut Config, settings: PolicySettings) -> Policy {
    config.policy = Arc::new(settings);
    Policy::of(config, &RulesInForce::Configured, SystemTime::now())
}

/// Judges each touch of a request, with a line for each.
fn judge(
    permits: &PermitSet,
    method: &Method,
    message: &[u8],
    call: &DescribedCall,
    text: &mut String,
) -> bool {
    let mut is_allowed = true;
    let mut line = |action: Action, keys: &str, verdict: Result<Option<String>, String>| {
        let shown = match verdict {
            Ok(rule) => format!("allowed by {}", rule.unwrap_or_else(|| "its role".to_owned())),
            Err(reason) => {
                is_allowed = false;
                format!("refused: {reason}")
            }
        };
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
    if let Decision::Denied(denial) = permits.decide_stream() {
        line(denial.action, "any request", Err(permits.denying_rule(denial)));
    }
    is_allowed
}

/// The method with this path, or with this last part of its path.
fn method(name: &str) -> Result<&'static Method, PolicyCheckError> {
    let is_named = |method: &&Method| {
        method.path == name
            || method.path.rsplit('/').next().is_some_and(|last| last.eq_ignore_ascii_case(name))
    };
    let found: Vec<&Method> =
        METHODS.iter().filter(|method| method.path != "unknown").filter(is_named).collect();
    match found[..] {
        [method] => Ok(method),
        [] => Err(PolicyCheckError::Call(format!(
            "{name:?} is no method; write its path, or its last part as in Put"
        ))),
        [first, ..] => Err(PolicyCheckError::Call(format!(
            "{name:?} is the end of several paths; write one, as {}",
            first.path
        ))),
    }
}

/// The request of a described call.
fn message(method: &Method, call: &DescribedCall) -> Result<Vec<u8>, PolicyCheckError> {
    let key: Vec<u8> = call.key.clone().into_bytes();
    let end: Vec<u8> = if call.prefix {
        crate::rpc::key_range::end_of_prefix(&key).unwrap_or_else(|| vec![0])
    } else {
        call.range_end.clone().into_bytes()
    };
    let (key, range_end) = (bytes::Bytes::from(key), bytes::Bytes::from(end));
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
            return Err(PolicyCheckError::Call(reason.to_owned()));
        }
        _ => Vec::new(),
    })
}
