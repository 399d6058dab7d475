//! What the writers asked for and what they were told, held against the history.
//!
//! Owns: the audit. Must not know watches. Invariants that it checks: an acknowledged write is in the history, whole, at its
//! revision, and nothing else is in that revision; a write of unknown outcome is there at most once, and then whole; what nobody
//! wrote is a lease's deletion.

use std::collections::{BTreeSet, HashMap};

use super::history::History;
use super::record::{Event, Range};

/// What a write would do: the success or the failure of a transaction, or all of another call.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Branch {
    /// Key and value; no two branches of a run have a value in common.
    pub(crate) puts: Vec<(String, String)>,
    pub(crate) deletes: Vec<Range>,
}

/// One change as the answer to a write told it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    Put(String, String),
    Delete(String),
}

/// How a write ended.
#[derive(Clone, Debug)]
pub(crate) enum Outcome {
    /// With these changes at this revision; without any it made no revision.
    Acknowledged {
        revision: i64,
        changes: Vec<Change>,
    },
    Unknown,
}

/// One call of a writer.
#[derive(Clone, Debug)]
pub(crate) struct Write {
    pub(crate) branches: Vec<Branch>,
    pub(crate) outcome: Outcome,
}

/// What the audit found.
#[derive(Debug, Default)]
pub(crate) struct Audit {
    pub(crate) acknowledged: usize,
    pub(crate) unknown: usize,
    /// Of the unknown ones, those that the history has (deletions are not told apart).
    pub(crate) applied: usize,
    /// Revisions that only a lease explains.
    pub(crate) by_lease: usize,
    pub(crate) faults: Vec<String>,
}

/// Holds all writes against the history.
pub(crate) fn audit(writes: &[Write], history: &History) -> Audit {
    let mut audit = Audit::default();
    let mut claimed: BTreeSet<i64> = BTreeSet::new();
    let mut unknown: Vec<&Branch> = Vec::new();
    for write in writes {
        match &write.outcome {
            Outcome::Acknowledged { revision, changes } => {
                audit.acknowledged += 1;
                if !changes.is_empty() {
                    audit.acknowledged_write(*revision, changes, history, &mut claimed);
                }
            }
            Outcome::Unknown => {
                audit.unknown += 1;
                unknown.extend(&write.branches);
            }
        }
    }
    audit.rest(&unknown, history, &claimed);
    audit
}

impl Audit {
    fn acknowledged_write(
        &mut self,
        revision: i64,
        changes: &[Change],
        history: &History,
        claimed: &mut BTreeSet<i64>,
    ) {
        if !claimed.insert(revision) {
            self.faults.push(format!("two writes were told revision {revision}"));
        }
        let found = changes_of(history.revision(revision));
        if found != changes {
            self.faults.push(format!("acknowledged {changes:?} at {revision}, the history has {found:?}"));
        }
    }

    /// What no acknowledged write explains.
    fn rest(&mut self, unknown: &[&Branch], history: &History, claimed: &BTreeSet<i64>) {
        let by_value: HashMap<&str, usize> = unknown
            .iter()
            .enumerate()
            .flat_map(|(i, branch)| branch.puts.iter().map(move |(_, value)| (value.as_str(), i)))
            .collect();
        let mut applied: BTreeSet<usize> = BTreeSet::new();
        let mut leased: BTreeSet<&str> = BTreeSet::new();
        for events in history.events().chunk_by(|one, next| one.revision == next.revision) {
            let revision = events[0].revision;
            if claimed.contains(&revision) {
            } else if let Some(put) = events.iter().find(|event| event.put) {
                match by_value.get(put.value.as_str()) {
                    None => self.faults.push(format!("nobody wrote {put:?}")),
                    Some(i) if !applied.insert(*i) => {
                        self.faults.push(format!("a write of unknown outcome came twice: {put:?}"));
                    }
                    Some(i) if !is_whole(unknown[*i], events) => {
                        let asked = unknown[*i];
                        self.faults
                            .push(format!("revision {revision} is {events:?}, asked for was {asked:?}"));
                    }
                    Some(_) => self.applied += 1,
                }
            } else if events.iter().all(|event| leased.contains(event.key.as_str())) {
                self.by_lease += 1;
            } else if !events.iter().all(|event| deletes(unknown, &event.key)) {
                self.faults.push(format!("nobody deleted at {revision}: {events:?}"));
            }
            for event in events {
                if event.put && event.lease != 0 {
                    leased.insert(&event.key);
                } else {
                    leased.remove(event.key.as_str());
                }
            }
        }
    }
}

fn deletes(branches: &[&Branch], key: &str) -> bool {
    branches.iter().any(|branch| branch.deletes.iter().any(|range| range.contains(key)))
}

fn changes_of(events: &[Event]) -> Vec<Change> {
    let change = |event: &Event| {
        if event.put {
            Change::Put(event.key.clone(), event.value.clone())
        } else {
            Change::Delete(event.key.clone())
        }
    };
    events.iter().map(change).collect()
}

/// Whether these are all of the branch's puts, and none but deletions that it asked for beside them.
fn is_whole(branch: &Branch, events: &[Event]) -> bool {
    let (puts, deletions): (Vec<&Event>, Vec<&Event>) = events.iter().partition(|event| event.put);
    let is = |(key, value): &(String, String)| puts.iter().any(|put| put.key == *key && put.value == *value);
    puts.len() == branch.puts.len()
        && branch.puts.iter().all(is)
        && deletions.iter().all(|event| deletes(&[branch], &event.key))
}

#[cfg(test)]
mod tests {
    use super::super::history::tests::told;
    use super::*;

    fn history() -> History {
        let mut member = told(&[
            (2, "a", Some("1")),
            (2, "b", Some("1")),
            (3, "a", Some("2")),
            (4, "a", None),
            (5, "c", Some("leased")),
            (6, "c", None),
        ]);
        member.get_mut(&5).expect("it is there")[0].lease = 7;
        History::agreed(&[member], 6).unwrap()
    }

    fn put(key: &str, value: &str) -> Change {
        Change::Put(key.into(), value.into())
    }

    fn told_so(revision: i64, changes: &[Change]) -> Write {
        let outcome = Outcome::Acknowledged { revision, changes: changes.to_vec() };
        Write { branches: Vec::new(), outcome }
    }

    fn unknown(puts: &[(&str, &str)], deletes: &[&str]) -> Write {
        let puts = puts.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        let deletes = deletes.iter().map(|key| Range::one(key)).collect();
        Write { branches: vec![Branch { puts, deletes }], outcome: Outcome::Unknown }
    }

    fn writes() -> Vec<Write> {
        vec![
            told_so(2, &[put("a", "1"), put("b", "1")]),
            told_so(3, &[put("a", "2")]),
            told_so(4, &[Change::Delete("a".into())]),
            told_so(5, &[put("c", "leased")]),
            told_so(6, &[]),
        ]
    }

    fn faults(change: impl FnOnce(&mut Vec<Write>)) -> usize {
        let mut writes = writes();
        change(&mut writes);
        audit(&writes, &history()).faults.len()
    }

    #[test]
    fn writes_that_are_there_are_right() {
        let found = audit(&writes(), &history());
        assert_eq!((found.acknowledged, found.by_lease, found.faults), (5, 1, vec![]));
    }

    #[test]
    fn what_was_acknowledged_is_there_whole() {
        assert_eq!(faults(|writes| writes[1] = told_so(3, &[put("a", "x")])), 1);
        assert_eq!(faults(|writes| writes[0] = told_so(2, &[put("a", "1")])), 1, "more than was told");
        assert_eq!(faults(|writes| writes.push(told_so(3, &[put("a", "2")]))), 1, "twice");
        assert_eq!(faults(|writes| writes.push(told_so(9, &[put("a", "2")]))), 1, "lost");
        assert_eq!(faults(|writes| writes.push(told_so(9, &[]))), 0, "changed nothing");
    }

    #[test]
    fn nothing_is_there_that_nobody_asked_for() {
        assert_eq!(faults(|writes| drop(writes.remove(1))), 1);
        assert_eq!(faults(|writes| drop(writes.remove(2))), 1, "a deletion");
    }

    #[test]
    fn a_write_of_unknown_outcome_is_there_whole_or_not_at_all() {
        let instead = |at: usize, write: Write| faults(|writes| writes[at] = write);
        assert_eq!(instead(0, unknown(&[("a", "1"), ("b", "1")], &[])), 0);
        assert_eq!(instead(0, unknown(&[("a", "1"), ("b", "1"), ("c", "1")], &[])), 1, "not all of it");
        assert_eq!(instead(0, unknown(&[("a", "1")], &[])), 1, "more than asked for");
        assert_eq!(instead(2, unknown(&[], &["a"])), 0);
        assert_eq!(instead(2, unknown(&[], &["b"])), 1);
        assert_eq!(faults(|writes| writes.push(unknown(&[("z", "z")], &[]))), 0, "not at all");
    }

    #[test]
    fn a_write_of_unknown_outcome_comes_once() {
        let member = told(&[(2, "a", Some("1")), (3, "a", Some("1"))]);
        let history = History::agreed(&[member], 3).unwrap();
        assert_eq!(audit(&[unknown(&[("a", "1")], &[])], &history).faults.len(), 1);
    }
}
