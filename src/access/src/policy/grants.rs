//! The grants of a set of roles, compiled for decisions.
//!
//! Owns: the keys and actions that roles allow and deny, with the variables of one caller replaced. Must not
//! know: which caller has which roles. Invariants: a denying grant wins over every allowing grant; a text of
//! the caller that could reach other keys (empty, with `/`, `..`, or a control character) is never put into a
//! key: an allowing grant then allows nothing, and a denying grant denies its actions on every key.

use std::cmp::Ordering;

use super::interval_set::{GrantId, IntervalSet, KeyInterval, compare_ends};
use keyward_config::policy_document::{
    ActionSet, GrantKeys, KeyTemplate, KeyVariable, PolicyDocument, PolicyGrant, TemplatePart,
};
use keyward_etcd::identity::Peer;
use keyward_etcd::rpc::key_range::{KeyRange, end_of_prefix};
use keyward_etcd::rpc::touch::Action;

/// Most keys made from one key with variables: claims may have several values each.
const MOST_EXPANSIONS: usize = 256;
/// Most intervals of one caller's grants with variables, over all actions: a policy with many such grants
/// makes fewer keys from each.
pub(super) const MOST_OWN_INTERVALS: usize = 32 * 1024;
/// Bytes of a key with variables on average, at most, and of a single one.
const USUAL_KEY: usize = 64;
const LONGEST_KEY: usize = 4096;

/// The texts about a caller that replace variables.
#[derive(Clone, Copy, Debug)]
pub(super) struct VariableTexts<'a> {
    /// The peer, with its name and claims.
    pub(super) peer: &'a Peer,
    /// The etcd user of the peer's calls.
    pub(super) etcd_user: Option<&'a str>,
}

/// The grants to compile.
#[derive(Clone, Copy, Debug)]
pub(super) enum GrantPart<'a> {
    /// Grants without variables: the same for all callers.
    Shared,
    /// Grants with variables, for one caller.
    Own(VariableTexts<'a>),
}

/// Allowed and denied actions.
#[derive(Debug, Default)]
pub(super) struct ActionGrants {
    on_keys: [KeyGrants; Action::ON_KEYS],
    on_cluster: [Option<GrantId>; Action::ALL.len()],
    denied_on_cluster: [Option<GrantId>; Action::ALL.len()],
}

/// The keys allowed and denied for one action.
#[derive(Debug, Default)]
struct KeyGrants {
    allow: IntervalSet,
    deny: IntervalSet,
}

/// A run of allowed keys: its exclusive end (`None` for no end), and the grant of its first key.
pub(super) type AllowedRun<'g> = (Option<&'g [u8]>, GrantId);

impl ActionGrants {
    /// Compiles the grants of `roles`, given as indexes in the document.
    #[must_use]
    pub(super) fn new(document: &PolicyDocument, roles: &[usize], part: GrantPart<'_>) -> Self {
        let most_keys = most_keys_of_each(document, roles);
        let mut compiling = CompilingGrants { part, most_keys, ..CompilingGrants::default() };
        for &role in roles {
            let Some(found) = document.roles.get(role) else { continue };
            for (grant, row) in found.allow.iter().enumerate() {
                compiling.allow(row, grant_id(role, grant));
            }
            for (grant, row) in found.deny.iter().enumerate() {
                compiling.deny(row, grant_id(role, grant));
            }
        }
        compiling.finish()
    }

    /// The bytes of the sets of keys, about.
    #[must_use]
    pub(super) fn bytes(&self) -> usize {
        self.on_keys.iter().map(|keys| keys.allow.bytes() + keys.deny.bytes()).sum()
    }

    /// True if some role has a grant for [`GrantPart::Own`].
    #[must_use]
    pub(super) fn have_variables(document: &PolicyDocument, roles: &[usize]) -> bool {
        let roles = roles.iter().filter_map(|role| document.roles.get(*role));
        let mut grants = roles.flat_map(|role| role.allow.iter().chain(&role.deny));
        grants.any(|grant| grant.keys.as_ref().is_some_and(GrantKeys::has_variables))
    }

    /// The allowed keys from `key` on, regardless of denials.
    #[must_use]
    pub(super) fn allowed_run(&self, action: Action, key: &[u8]) -> Option<AllowedRun<'_>> {
        self.on_keys.get(action as usize)?.allow.run_from(key)
    }

    /// The grant that denies the first denied key of `range`, if any.
    #[must_use]
    pub(super) fn denied(&self, action: Action, range: &KeyRange<'_>) -> Option<GrantId> {
        let deny = &self.on_keys.get(action as usize)?.deny;
        if deny.is_empty() { None } else { deny.first_shared(range) }
    }

    /// The grants that allow and that deny an action on the cluster.
    #[must_use]
    pub(super) fn on_cluster(&self, action: Action) -> (Option<GrantId>, Option<GrantId>) {
        (self.on_cluster[action as usize], self.denied_on_cluster[action as usize])
    }
}

/// Returns the longer of two runs that begin at the same key.
pub(super) fn longer<'g>(
    one: Option<AllowedRun<'g>>,
    other: Option<AllowedRun<'g>>,
) -> Option<AllowedRun<'g>> {
    match (one, other) {
        (Some(one), Some(other)) if compare_ends(one.0, other.0) == Ordering::Less => Some(other),
        (Some(one), _) => Some(one),
        (None, other) => other,
    }
}

fn grant_id(role: usize, grant: usize) -> GrantId {
    let short = |index| u16::try_from(index).unwrap_or(u16::MAX);
    GrantId { role: short(role), grant: short(grant) }
}

/// Most keys made from each key with variables of these roles.
fn most_keys_of_each(document: &PolicyDocument, roles: &[usize]) -> usize {
    let roles = roles.iter().filter_map(|role| document.roles.get(*role));
    let grants = roles.flat_map(|role| role.allow.iter().chain(&role.deny));
    let own = grants.filter(|grant| grant.keys.as_ref().is_some_and(GrantKeys::has_variables));
    let sets: usize =
        own.map(|grant| grant.actions.iter().filter(|action| action.is_on_keys()).count()).sum();
    (MOST_OWN_INTERVALS / sets.max(1)).clamp(1, MOST_EXPANSIONS)
}

struct CompilingGrants<'a> {
    part: GrantPart<'a>,
    most_keys: usize,
    allow: [Vec<KeyInterval>; Action::ON_KEYS],
    deny: [Vec<KeyInterval>; Action::ON_KEYS],
    on_cluster: [Option<GrantId>; Action::ALL.len()],
    denied_on_cluster: [Option<GrantId>; Action::ALL.len()],
}

impl Default for CompilingGrants<'_> {
    fn default() -> Self {
        Self {
            part: GrantPart::Shared,
            most_keys: MOST_EXPANSIONS,
            allow: Default::default(),
            deny: Default::default(),
            on_cluster: Default::default(),
            denied_on_cluster: Default::default(),
        }
    }
}

impl CompilingGrants<'_> {
    fn allow(&mut self, grant: &PolicyGrant, id: GrantId) {
        if let Some(keys) = self.keys_of(grant) {
            push(&mut self.allow, grant.actions, &keys.unwrap_or_default(), id);
        }
        if matches!(self.part, GrantPart::Shared) {
            set(&mut self.on_cluster, grant.actions, id);
        }
    }

    fn deny(&mut self, grant: &PolicyGrant, id: GrantId) {
        if let Some(keys) = self.keys_of(grant) {
            let keys = keys.unwrap_or_else(|| vec![(Vec::new(), None)]);
            push(&mut self.deny, grant.actions, &keys, id);
        }
        if matches!(self.part, GrantPart::Shared) {
            set(&mut self.denied_on_cluster, grant.actions, id);
        }
    }

    /// The intervals of a grant of this part. `None` for a grant of the other part or without keys,
    /// `Some(None)` if a variable has no usable text.
    #[expect(clippy::option_option, reason = "a grant without usable text differs from one without keys")]
    fn keys_of(&self, grant: &PolicyGrant) -> Option<Option<Vec<KeyBounds>>> {
        let keys = grant.keys.as_ref()?;
        match self.part {
            GrantPart::Shared if !keys.has_variables() => Some(bounds(keys, None, self.most_keys)),
            GrantPart::Own(texts) if keys.has_variables() => Some(bounds(keys, Some(texts), self.most_keys)),
            GrantPart::Shared | GrantPart::Own(_) => None,
        }
    }

    fn finish(self) -> ActionGrants {
        let mut on_keys: [KeyGrants; Action::ON_KEYS] = Default::default();
        for ((to, allow), deny) in on_keys.iter_mut().zip(self.allow).zip(self.deny) {
            *to = KeyGrants { allow: IntervalSet::new(allow), deny: IntervalSet::new(deny) };
        }
        ActionGrants { on_keys, on_cluster: self.on_cluster, denied_on_cluster: self.denied_on_cluster }
    }
}

fn push(
    to: &mut [Vec<KeyInterval>; Action::ON_KEYS],
    actions: ActionSet,
    keys: &[KeyBounds],
    grant: GrantId,
) {
    for action in actions.iter().filter(|action| action.is_on_keys()) {
        let intervals = keys.iter().map(|(start, end)| KeyInterval {
            start: start.as_slice().into(),
            end: end.as_deref().map(Into::into),
            grant,
        });
        to[action as usize].extend(intervals);
    }
}

/// Notes the first grant of each action on the cluster.
fn set(to: &mut [Option<GrantId>; Action::ALL.len()], actions: ActionSet, grant: GrantId) {
    for action in actions.iter().filter(|action| !action.is_on_keys()) {
        to[action as usize].get_or_insert(grant);
    }
}

/// The first key and the exclusive end of an interval; `None` for no end.
type KeyBounds = (Vec<u8>, Option<Vec<u8>>);

/// Returns the intervals of `keys`; `None` if a variable has no usable text.
fn bounds(keys: &GrantKeys, texts: Option<VariableTexts<'_>>, most: usize) -> Option<Vec<KeyBounds>> {
    Some(match keys {
        GrantKeys::Everything => vec![(Vec::new(), None)],
        GrantKeys::Key(key) => {
            let after = |key: Vec<u8>| {
                let end = [&key[..], &[0]].concat();
                (key, Some(end))
            };
            expand_up_to(key, texts, most)?.into_iter().map(after).collect()
        }
        GrantKeys::Prefix(prefix) => {
            let below = |prefix: Vec<u8>| {
                let end = end_of_prefix(&prefix);
                (prefix, end)
            };
            expand_up_to(prefix, texts, most)?.into_iter().map(below).collect()
        }
        // The ends of a range belong together: a text with several values would pair them at will.
        GrantKeys::Range(from, to) => match (&expand(from, texts)?[..], &expand(to, texts)?[..]) {
            ([from], [to]) => vec![(from.clone(), Some(to.clone()))],
            _ => return None,
        },
    })
}

/// Returns the keys of a template; `None` if a variable has no usable text.
pub(super) fn expand(key: &KeyTemplate, texts: Option<VariableTexts<'_>>) -> Option<Vec<Vec<u8>>> {
    expand_up_to(key, texts, MOST_EXPANSIONS)
}

/// Returns up to `most` keys of a template; `None` if there are more, or a variable has no usable text.
fn expand_up_to(key: &KeyTemplate, texts: Option<VariableTexts<'_>>, most: usize) -> Option<Vec<Vec<u8>>> {
    let mut keys = vec![Vec::new()];
    for part in key.parts() {
        match part {
            TemplatePart::Bytes(bytes) => keys.iter_mut().for_each(|key| key.extend_from_slice(bytes)),
            TemplatePart::Variable(variable) => {
                let values = values(variable, texts?);
                let bytes = |texts: &mut dyn Iterator<Item = usize>| texts.sum::<usize>();
                let longer = values.len() * bytes(&mut keys.iter().map(Vec::len))
                    + keys.len() * bytes(&mut values.iter().map(|value| value.len()));
                let is_too_much =
                    values.len() * keys.len() > most || longer > (most * USUAL_KEY).max(LONGEST_KEY);
                if values.is_empty() || is_too_much {
                    return None;
                }
                let with = |key: &Vec<u8>| {
                    let key = key.clone();
                    values.iter().map(move |value| [&key, value.as_bytes()].concat()).collect::<Vec<_>>()
                };
                keys = keys.iter().flat_map(with).collect();
            }
        }
    }
    Some(keys)
}

/// Returns the texts of a variable; none if any of them could reach other keys.
pub(super) fn values<'a>(variable: &KeyVariable, texts: VariableTexts<'a>) -> Vec<&'a str> {
    let values: Vec<&str> = match variable {
        KeyVariable::User => texts.peer.own_name().into_iter().collect(),
        KeyVariable::EtcdUser => texts.etcd_user.into_iter().collect(),
        KeyVariable::Claim(name) => match texts.peer {
            Peer::Jwt { claims, .. } => claims.values(name).iter().map(String::as_str).collect(),
            _ => Vec::new(),
        },
    };
    if values.iter().all(|text| is_usable(text)) { values } else { Vec::new() }
}

/// True for a text that cannot leave its place in a key.
fn is_usable(text: &str) -> bool {
    !text.is_empty()
        && text != "."
        && !text.contains("..")
        && !text.contains(['/', '\0', '\\'])
        && !text.contains(char::is_control)
}
