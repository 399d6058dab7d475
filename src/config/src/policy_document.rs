//! A policy: roles with grants, groups of peers, and bindings of roles to peers.
//!
//! Owns: the valid form of the rules, and the grammar of keys with variables. Must not know: the decision on
//! a call, the storage of a policy. Invariants: every name in a binding is the name of a role or group of the
//! same document; no range is inverted; a key names its variables explicitly, so no text of a peer is read as
//! syntax.

use std::fmt;
use std::sync::Arc;
use std::time::SystemTime;

use sha2::{Digest as _, Sha256};

use crate::usage_limits::UsageLimits;
use crate::{Conditions, PolicyMode};
use keyward_etcd::identity::pattern::PeerPattern;
use keyward_etcd::rpc::touch::Action;

/// A whole policy.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PolicyDocument {
    /// Roles with unique names.
    pub roles: Vec<PolicyRole>,
    /// Groups with unique names.
    pub groups: Vec<PolicyGroup>,
    /// Bindings, in the order of the file.
    pub bindings: Vec<PolicyBinding>,
    /// Identifies the text of the document: two documents with the same text have the same digest.
    pub digest: PolicyDigest,
}

/// Identifies the text of a policy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PolicyDigest(u64);

impl PolicyDigest {
    /// The digest of a text.
    #[must_use]
    pub fn of(text: &str) -> Self {
        let digest = Sha256::digest(text);
        Self(digest.iter().take(8).fold(0, |value, byte| value << 8 | u64::from(*byte)))
    }
}

impl fmt::Display for PolicyDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// A named set of grants.
#[derive(Clone, Debug, PartialEq)]
pub struct PolicyRole {
    /// The role's name.
    pub name: Arc<str>,
    /// The permitted actions.
    pub allow: Vec<PolicyGrant>,
    /// The forbidden actions: they win over permitted ones, whichever role permits.
    pub deny: Vec<PolicyGrant>,
    /// The limits of each peer with the role.
    pub limits: UsageLimits,
    /// The limits of all peers with the role together.
    pub total_limits: UsageLimits,
}

/// Actions on keys, or on the cluster.
#[derive(Clone, Debug, PartialEq)]
pub struct PolicyGrant {
    /// The actions. Never empty.
    pub actions: ActionSet,
    /// The keys for actions on keys; `None` if no action is on keys.
    pub keys: Option<GrantKeys>,
}

/// A set of actions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ActionSet(u16);

impl ActionSet {
    /// Adds an action, and the actions that it contains: the viewing action, and compaction in maintenance.
    pub fn insert(&mut self, action: Action) {
        let contained: &[Action] = match action {
            Action::Maintenance => &[Action::MaintenanceView, Action::Compact],
            Action::Cluster => &[Action::ClusterView],
            Action::Auth => &[Action::AuthView],
            _ => &[],
        };
        for action in contained.iter().chain([&action]) {
            self.0 |= 1 << *action as u16;
        }
    }

    /// True if the set contains the action.
    #[must_use]
    pub fn contains(self, action: Action) -> bool {
        self.0 & (1 << action as u16) != 0
    }

    /// True without any action.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// The actions of the set.
    pub fn iter(self) -> impl Iterator<Item = Action> {
        Action::ALL.into_iter().filter(move |action| self.contains(*action))
    }
}

/// The keys of a grant.
#[derive(Clone, Debug, PartialEq)]
pub enum GrantKeys {
    /// All keys.
    Everything,
    /// A single key.
    Key(KeyTemplate),
    /// All keys with the prefix.
    Prefix(KeyTemplate),
    /// The keys from the first, up to and without the second.
    Range(KeyTemplate, KeyTemplate),
}

/// A key, perhaps with variables that are replaced for each caller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyTemplate(Vec<TemplatePart>);

/// A part of a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TemplatePart {
    /// Bytes of the key.
    Bytes(Vec<u8>),
    /// Replaced by a text about the caller.
    Variable(KeyVariable),
}

/// A text about the caller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeyVariable {
    /// `{user}`: the peer's own name, which is the login, the certificate's common name, or the JWT's
    /// subject.
    User,
    /// `{etcd_user}`: the etcd user of the peer's calls.
    EtcdUser,
    /// `{claim.NAME}`: each value of the JWT's claim.
    Claim(Arc<str>),
}

/// Reasons for rejecting the text of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MalformedKey {
    /// An unknown variable, or a brace without its partner.
    #[error(
        "a variable is {{user}}, {{etcd_user}} or {{claim.NAME}}; write {{{{ and }}}} for literal braces"
    )]
    Variable,
    /// An unfinished escape.
    #[error("an escape is \\xNN with two hexadecimal digits, or \\\\")]
    Escape,
}

impl KeyTemplate {
    /// Parses the text of a key.
    ///
    /// # Errors
    /// [`MalformedKey`].
    pub fn parse(text: &str) -> Result<Self, MalformedKey> {
        let (mut parts, mut bytes, mut rest) = (Vec::new(), Vec::new(), text);
        while let Some(first) = rest.chars().next() {
            if let Some(after) = rest.strip_prefix("{{").or_else(|| rest.strip_prefix("}}")) {
                bytes.push(rest.as_bytes()[0]);
                rest = after;
            } else if let Some(after) = rest.strip_prefix('{') {
                let (name, after) = after.split_once('}').ok_or(MalformedKey::Variable)?;
                if !bytes.is_empty() {
                    parts.push(TemplatePart::Bytes(std::mem::take(&mut bytes)));
                }
                parts.push(TemplatePart::Variable(variable(name)?));
                rest = after;
            } else if first == '}' {
                return Err(MalformedKey::Variable);
            } else if let Some(after) = rest.strip_prefix('\\') {
                let (byte, after) = escaped(after)?;
                bytes.push(byte);
                rest = after;
            } else {
                let (plain, after) = rest.split_at(first.len_utf8());
                bytes.extend_from_slice(plain.as_bytes());
                rest = after;
            }
        }
        if !bytes.is_empty() {
            parts.push(TemplatePart::Bytes(bytes));
        }
        Ok(Self(parts))
    }

    /// The parts, in order.
    #[must_use]
    pub fn parts(&self) -> &[TemplatePart] {
        &self.0
    }

    /// True if every variable ends at a byte that no text of a peer has. Otherwise the keys of `alice` would
    /// begin with those of `al`.
    #[must_use]
    pub fn has_ends_of_variables(&self) -> bool {
        let ends = |next: Option<&TemplatePart>| match next {
            Some(TemplatePart::Bytes(bytes)) => matches!(bytes.first(), Some(b'/' | b'\\' | 0..0x20)),
            Some(TemplatePart::Variable(_)) | None => false,
        };
        let mut parts = self.0.iter().enumerate();
        parts.all(|(at, part)| matches!(part, TemplatePart::Bytes(_)) || ends(self.0.get(at + 1)))
    }

    /// True if, for the same caller, every key made from `other` begins with the key made from this template,
    /// and is another key.
    #[must_use]
    pub fn is_beginning_of(&self, other: &Self) -> bool {
        let Some((last, first)) = self.0.split_last() else { return false };
        let rest = other.0.strip_prefix(first).and_then(<[_]>::first);
        self != other
            && match (last, rest) {
                (TemplatePart::Bytes(begin), Some(TemplatePart::Bytes(bytes))) => bytes.starts_with(begin),
                (last, rest) => rest == Some(last),
            }
    }

    /// The key, if it has no variable.
    #[must_use]
    pub fn fixed(&self) -> Option<&[u8]> {
        match &self.0[..] {
            [] => Some(&[]),
            [TemplatePart::Bytes(bytes)] => Some(bytes),
            _ => None,
        }
    }
}

fn variable(name: &str) -> Result<KeyVariable, MalformedKey> {
    match name {
        "user" => Ok(KeyVariable::User),
        "etcd_user" => Ok(KeyVariable::EtcdUser),
        _ => {
            let claim = name.strip_prefix("claim.").filter(|claim| !claim.is_empty());
            claim.map(|claim| KeyVariable::Claim(claim.into())).ok_or(MalformedKey::Variable)
        }
    }
}

/// Reads an escape behind its backslash.
fn escaped(text: &str) -> Result<(u8, &str), MalformedKey> {
    if let Some(after) = text.strip_prefix('\\') {
        return Ok((b'\\', after));
    }
    let digits = text.strip_prefix('x').and_then(|rest| rest.split_at_checked(2));
    let (digits, after) = digits.ok_or(MalformedKey::Escape)?;
    let is_hex = digits.bytes().all(|digit| digit.is_ascii_hexdigit());
    let byte = u8::from_str_radix(digits, 16).ok().filter(|_| is_hex);
    byte.map(|byte| (byte, after)).ok_or(MalformedKey::Escape)
}

impl GrantKeys {
    /// The texts with variables and without.
    pub fn templates(&self) -> impl Iterator<Item = &KeyTemplate> {
        let (one, other) = match self {
            Self::Everything => (None, None),
            Self::Key(key) | Self::Prefix(key) => (Some(key), None),
            Self::Range(from, to) => (Some(from), Some(to)),
        };
        one.into_iter().chain(other)
    }

    /// True if the keys differ from caller to caller.
    #[must_use]
    pub fn has_variables(&self) -> bool {
        match self {
            Self::Everything => false,
            Self::Key(key) | Self::Prefix(key) => key.fixed().is_none(),
            Self::Range(from, to) => from.fixed().is_none() || to.fixed().is_none(),
        }
    }
}

/// Peers under one name.
#[derive(Clone, Debug, PartialEq)]
pub struct PolicyGroup {
    /// The group's name.
    pub name: Arc<str>,
    /// Patterns of its members.
    pub members: Vec<PeerPattern>,
}

/// Gives roles to callers.
#[derive(Clone, Debug, PartialEq)]
pub struct PolicyBinding {
    /// Indexes in [`PolicyDocument::roles`]. Empty only for a binding with a namespace.
    pub roles: Vec<usize>,
    /// Conditions on the peer and its address.
    pub conditions: Conditions,
    /// Index in [`PolicyDocument::groups`].
    pub group: Option<usize>,
    /// The etcd user of the caller's calls.
    pub etcd_user: Option<Arc<str>>,
    /// The listener of the caller's connection.
    pub listener: Option<Arc<str>>,
    /// The prefix of the bound callers' keys: all other keys do not exist for these callers.
    pub namespace: Option<KeyTemplate>,
    /// The binding holds before this time only.
    pub until: Option<SystemTime>,
    /// The mode for the bound callers, in place of the policy's mode.
    pub mode: Option<PolicyMode>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(text: &str) -> TemplatePart {
        TemplatePart::Bytes(text.as_bytes().to_vec())
    }

    #[test]
    fn keys_have_variables_and_escapes() {
        let parse = |text| KeyTemplate::parse(text).map(|key| key.0);
        assert_eq!(parse("/a"), Ok(vec![bytes("/a")]));
        assert_eq!(
            parse("/t/{user}/x"),
            Ok(vec![bytes("/t/"), TemplatePart::Variable(KeyVariable::User), bytes("/x")])
        );
        assert_eq!(
            parse("{claim.team}{etcd_user}"),
            Ok(vec![
                TemplatePart::Variable(KeyVariable::Claim("team".into())),
                TemplatePart::Variable(KeyVariable::EtcdUser)
            ])
        );
        assert_eq!(parse("{{x}}"), Ok(vec![bytes("{x}")]));
        assert_eq!(parse("\\x00\\xff\\\\"), Ok(vec![TemplatePart::Bytes(vec![0, 255, b'\\'])]));
        assert_eq!(parse("é"), Ok(vec![bytes("é")]));
        assert_eq!(parse(""), Ok(vec![]));
        for bad in ["{", "}", "{users}", "{claim.}", "{user", "a}b"] {
            assert_eq!(parse(bad), Err(MalformedKey::Variable), "{bad}");
        }
        for bad in ["\\", "\\x", "\\x0", "\\xg0", "\\n", "\\x+1", "\\xé"] {
            assert_eq!(parse(bad), Err(MalformedKey::Escape), "{bad}");
        }
    }

    #[test]
    fn templates_contain_each_other_by_their_fixed_parts() {
        let template = |text| KeyTemplate::parse(text).expect("a key");
        let begins = |one, other| template(one).is_beginning_of(&template(other));
        assert!(begins("/t/", "/t/{user}/") && begins("/t/{user}/", "/t/{user}/x/") && begins("/t", "/tx"));
        assert!(!begins("/t/", "/t/") && !begins("/t/{user}/", "/t/") && !begins("/t/{user}/", "/t/x/"));
        assert!(!begins("/t/{user}/", "/t/{etcd_user}/x/") && !begins("/a/", "/t/{user}/"));
        for (text, ends) in [("/t/{user}/", true), ("/t/{user}\\x00a", true), ("/t/", true)] {
            assert_eq!(template(text).has_ends_of_variables(), ends, "{text}");
        }
        for text in ["/t/{user}", "/t/{user}{etcd_user}/", "/t/{user}-/", "{user}.{claim.team}/"] {
            assert!(!template(text).has_ends_of_variables(), "{text}");
        }
    }

    #[test]
    fn a_working_action_implies_its_view() {
        let mut actions = ActionSet::default();
        actions.insert(Action::Cluster);
        assert!(actions.iter().eq([Action::ClusterView, Action::Cluster]));
    }
}
