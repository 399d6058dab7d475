//! Finds grants of a role that change nothing: earlier lines of the role give or deny the same.
//!
//! Owns: the keys covered by the lines so far. Must not know: bindings, decisions. Invariant: a reported
//! grant can be removed without a change of any decision.

use std::collections::BTreeMap;
use std::ops::Bound;

use crate::policy_document::{ActionSet, GrantKeys, PolicyGrant, PolicyRole};
use keyward_etcd::rpc::key_range::end_of_prefix;
use keyward_etcd::rpc::touch::Action;

/// Most grants with variables that are compared with each other.
const MOST_TEMPLATES: usize = 256;

/// Disjoint intervals by their start: the end (`None` for no end), and the first line.
type Intervals = BTreeMap<Vec<u8>, (Option<Vec<u8>>, usize)>;

/// A grant without effect, and the reason.
pub(super) struct IdleGrant {
    /// `allow` or `deny`, with the index.
    pub(super) place: String,
    /// The reason.
    pub(super) reason: String,
}

/// The keys of the lines so far.
#[derive(Default)]
struct CoveredKeys {
    /// The fixed keys of each action.
    intervals: BTreeMap<Action, Intervals>,
    /// The first line for each action not on keys.
    others: BTreeMap<Action, usize>,
    /// Lines with variables.
    templates: Vec<(GrantKeys, ActionSet, usize)>,
}

/// The grants of a role without effect.
pub(super) fn idle_grants(role: &PolicyRole) -> Vec<IdleGrant> {
    let mut idle = Vec::new();
    let mut denied = CoveredKeys::default();
    for (at, grant) in role.deny.iter().enumerate() {
        match denied.covers(grant) {
            Some(line) => {
                let reason = format!("denies nothing that deny[{line}] does not deny");
                idle.push(IdleGrant { place: format!("deny[{at}]"), reason });
            }
            None => denied.add(grant, at),
        }
    }
    let mut allowed = CoveredKeys::default();
    for (at, grant) in role.allow.iter().enumerate() {
        let place = format!("allow[{at}]");
        if let Some(line) = denied.covers(grant) {
            idle.push(IdleGrant { place, reason: format!("reaches nothing: deny[{line}] denies all of it") });
        } else if let Some(line) = allowed.covers(grant) {
            idle.push(IdleGrant { place, reason: format!("gives nothing that allow[{line}] does not give") });
        } else {
            allowed.add(grant, at);
        }
    }
    idle
}

impl CoveredKeys {
    /// The first line that has a part of the grant, if the lines so far have all of the grant.
    fn covers(&self, grant: &PolicyGrant) -> Option<usize> {
        let mut first = None;
        for action in grant.actions.iter() {
            let line = if action.is_on_keys() {
                self.covering(action, grant.keys.as_ref()?)?
            } else {
                *self.others.get(&action)?
            };
            first = Some(first.map_or(line, |known: usize| known.min(line)));
        }
        first
    }

    fn covering(&self, action: Action, keys: &GrantKeys) -> Option<usize> {
        let Some((start, end)) = interval(keys) else {
            let everything = self.interval_around(action, b"", None);
            return everything.or_else(|| self.template_around(action, keys));
        };
        self.interval_around(action, &start, end.as_deref())
    }

    fn interval_around(&self, action: Action, start: &[u8], end: Option<&[u8]>) -> Option<usize> {
        let (_, (known_end, line)) = self.intervals.get(&action)?.range(..=start.to_vec()).next_back()?;
        let holds = match (known_end, end) {
            (None, _) => true,
            (Some(_), None) => false,
            (Some(known), Some(end)) => end <= &known[..],
        };
        holds.then_some(*line)
    }

    fn template_around(&self, action: Action, keys: &GrantKeys) -> Option<usize> {
        let is_around = |(known, actions, _): &&(GrantKeys, ActionSet, usize)| {
            let begins = match (known, keys) {
                (GrantKeys::Prefix(prefix), GrantKeys::Prefix(key) | GrantKeys::Key(key)) => {
                    prefix == key || prefix.is_beginning_of(key)
                }
                _ => false,
            };
            actions.contains(action) && (known == keys || begins)
        };
        self.templates.iter().find(is_around).map(|(_, _, line)| *line)
    }

    fn add(&mut self, grant: &PolicyGrant, line: usize) {
        for action in grant.actions.iter().filter(|action| !action.is_on_keys()) {
            self.others.entry(action).or_insert(line);
        }
        let Some(keys) = &grant.keys else { return };
        let Some((start, end)) = interval(keys) else {
            if self.templates.len() < MOST_TEMPLATES {
                self.templates.push((keys.clone(), grant.actions, line));
            }
            return;
        };
        for action in grant.actions.iter().filter(|action| action.is_on_keys()) {
            insert(self.intervals.entry(action).or_default(), start.clone(), end.clone(), line);
        }
    }
}

/// The interval of fixed keys; `None` with variables.
fn interval(keys: &GrantKeys) -> Option<(Vec<u8>, Option<Vec<u8>>)> {
    Some(match keys {
        GrantKeys::Everything => (Vec::new(), None),
        GrantKeys::Key(key) => {
            let key = key.fixed()?;
            (key.to_vec(), Some([key, b"\0"].concat()))
        }
        GrantKeys::Prefix(prefix) => {
            let prefix = prefix.fixed()?;
            (prefix.to_vec(), end_of_prefix(prefix))
        }
        GrantKeys::Range(from, to) => (from.fixed()?.to_vec(), Some(to.fixed()?.to_vec())),
    })
}

/// Adds an interval, joined with those that it touches.
fn insert(known: &mut Intervals, mut start: Vec<u8>, mut end: Option<Vec<u8>>, mut line: usize) {
    let last = end.as_ref().map_or(Bound::Unbounded, Bound::Included);
    let before = known.range::<Vec<u8>, _>((Bound::Unbounded, last)).rev();
    let reaches = |known_end: &Option<Vec<u8>>| known_end.as_ref().is_none_or(|known| *known >= start);
    let touching = before.take_while(|(_, (known_end, _))| reaches(known_end));
    let touching: Vec<Vec<u8>> = touching.map(|(begin, _)| begin.clone()).collect();
    for begin in touching {
        let Some((known_end, known_line)) = known.remove(&begin) else { continue };
        start = start.min(begin);
        end = end.zip(known_end).map(|(one, other)| one.max(other));
        line = line.min(known_line);
    }
    known.insert(start, (end, line));
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::policy_document::KeyTemplate;
    use crate::usage_limits::UsageLimits;

    fn template(text: &str) -> KeyTemplate {
        KeyTemplate::parse(text).unwrap()
    }

    fn grant(actions: &[Action], keys: Option<GrantKeys>) -> PolicyGrant {
        let mut set = ActionSet::default();
        actions.iter().for_each(|action| set.insert(*action));
        PolicyGrant { actions: set, keys }
    }

    fn found(allow: Vec<PolicyGrant>, deny: Vec<PolicyGrant>) -> Vec<String> {
        let (limits, total_limits) = (UsageLimits::default(), UsageLimits::default());
        let role = PolicyRole { name: "r".into(), allow, deny, limits, total_limits };
        idle_grants(&role).into_iter().map(|idle| format!("{} {}", idle.place, idle.reason)).collect()
    }

    fn prefix(text: &str) -> Option<GrantKeys> {
        Some(GrantKeys::Prefix(template(text)))
    }

    #[test]
    fn a_grant_within_earlier_ones_is_named() {
        let (read, both) = ([Action::Read], [Action::Read, Action::Write]);
        let range = Some(GrantKeys::Range(template("/b"), template("/d")));
        let key = |text| Some(GrantKeys::Key(template(text)));
        let allow = vec![
            grant(&both, prefix("/a/")),
            grant(&read, prefix("/a/x/")),
            grant(&read, range),
            grant(&both, key("/c")),
            grant(&read, key("/c")),
        ];
        assert_eq!(
            found(allow, vec![]),
            [
                "allow[1] gives nothing that allow[0] does not give",
                "allow[4] gives nothing that allow[2] does not give"
            ]
        );
        let denied = found(
            vec![grant(&read, key("/a/1"))],
            vec![grant(&both, prefix("/a/")), grant(&read, key("/a/2"))],
        );
        assert_eq!(
            denied,
            [
                "deny[1] denies nothing that deny[0] does not deny",
                "allow[0] reaches nothing: deny[0] denies all of it"
            ]
        );
    }

    #[test]
    fn variables_are_compared_as_text_and_everything_has_all() {
        let (read, lease) = ([Action::Read], [Action::Lease]);
        let mine = grant(&read, prefix("/t/{user}/"));
        assert_eq!(found(vec![mine.clone(), grant(&read, prefix("/t/{user}/x/"))], vec![]).len(), 1);
        assert_eq!(found(vec![mine.clone(), grant(&read, prefix("/t/{etcd_user}/"))], vec![]).len(), 0);
        assert_eq!(found(vec![grant(&read, Some(GrantKeys::Everything)), mine], vec![]).len(), 1);
        let twice =
            vec![grant(&lease, None), grant(&[Action::Lease, Action::Auth], None), grant(&lease, None)];
        assert_eq!(found(twice, vec![]), ["allow[2] gives nothing that allow[0] does not give"]);
    }

    proptest! {
        /// In a world of eight keys.
        #[test]
        fn intervals_are_those_of_a_set_of_keys(ranges in prop::collection::vec((0u8..8, 0u8..9), 1..12)) {
            let (mut known, mut set) = (CoveredKeys::default(), std::collections::BTreeSet::new());
            for (line, (from, to)) in ranges.into_iter().filter(|(from, to)| from < to).enumerate() {
                let key = |number: u8| template(&format!("k{number}"));
                let keys = if to == 8 && from == 0 {
                    GrantKeys::Everything
                } else {
                    GrantKeys::Range(key(from), key(to))
                };
                let grant = grant(&[Action::Read], Some(keys));
                let is_known = (from..to).all(|number| set.contains(&number));
                // All keys are more than eight.
                if !(from == 0 && to == 8) {
                    prop_assert_eq!(known.covers(&grant).is_some(), is_known, "{} {}", from, to);
                }
                known.add(&grant, line);
                set.extend(from..to);
            }
        }
    }
}
