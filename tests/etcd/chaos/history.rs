//! What really happened in etcd: every event from the first revision on, as several members told it.
//!
//! Owns: comparing the members' records, replaying them, answering "what should a watch have shown". Must not know who asks.
//! Invariant: a history that exists was told alike by all members and agrees with itself: previous values, versions and create
//! revisions follow from the events before.

use std::collections::{BTreeMap, HashMap};

use super::record::{Event, Prev, Watch};

/// The revision of the first write; an empty etcd is at the one before.
const FIRST: i64 = 2;

/// One member's record: whole revisions.
pub(crate) type Revisions = BTreeMap<i64, Vec<Event>>;

/// A compaction that was asked for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Compaction {
    pub(crate) revision: i64,
    /// When it was asked for, in milliseconds of the system's clock.
    pub(crate) at: i64,
}

/// When a right was missing: from before it was taken until after it was given back.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Denial {
    pub(crate) from: i64,
    pub(crate) to: i64,
}

/// The truth.
#[derive(Debug, Default)]
pub(crate) struct History {
    events: Vec<Event>,
    /// When a revision was known to exist, in order of both.
    pub(crate) arrivals: Vec<(i64, i64)>,
    pub(crate) compactions: Vec<Compaction>,
    pub(crate) denials: Vec<Denial>,
}

impl History {
    /// Joins the members' records up to `last`. Otherwise says where they disagree with each other or with themselves.
    pub(crate) fn agreed(members: &[Revisions], last: i64) -> Result<History, Vec<String>> {
        let mut faults = Vec::new();
        let first = members.first().expect("there is a member");
        for (i, other) in members.iter().enumerate().skip(1) {
            faults.extend(differences(first, other, last).map(|fault| format!("m0 and m{i}: {fault}")));
        }
        let mut events: Vec<Event> =
            first.range(..=last).flat_map(|(_, events)| events.iter().cloned()).collect();
        let missing = (FIRST..=last).filter(|revision| !first.contains_key(revision));
        faults.extend(missing.map(|revision| format!("nothing is known of revision {revision}")));
        replay(&mut events, members, &mut faults);
        if faults.is_empty() { Ok(History { events, ..History::default() }) } else { Err(faults) }
    }

    pub(crate) fn events(&self) -> &[Event] {
        &self.events
    }

    /// The events of one revision; none where nothing changed in it.
    pub(crate) fn revision(&self, revision: i64) -> &[Event] {
        let from = self.events.partition_point(|event| event.revision < revision);
        let to = self.events.partition_point(|event| event.revision <= revision);
        &self.events[from..to]
    }

    /// What a watch is to show from a revision on, in order.
    pub(crate) fn expected(&self, watch: &Watch, from: i64) -> Vec<&Event> {
        let begin = self.events.partition_point(|event| event.revision < from);
        self.events[begin..].iter().filter(|event| watch.wants(event)).collect()
    }

    /// The event of this key at this revision.
    pub(crate) fn find(&self, revision: i64, key: &str) -> Option<&Event> {
        self.revision(revision).iter().find(|event| event.key == key)
    }

    /// The highest revision that was known to exist at this time.
    pub(crate) fn known_at(&self, at: i64) -> i64 {
        let next = self.arrivals.partition_point(|(time, _)| *time <= at);
        next.checked_sub(1).map_or(0, |i| self.arrivals[i].1)
    }
}

fn differences<'a>(one: &'a Revisions, other: &'a Revisions, last: i64) -> impl Iterator<Item = String> + 'a {
    let revisions = one.range(..=last).chain(other.range(..=last)).map(|(revision, _)| *revision);
    let all: std::collections::BTreeSet<i64> = revisions.collect();
    all.into_iter().filter_map(move |revision| {
        let bare = |side: &Revisions| -> Vec<Event> {
            let events = side.get(&revision).cloned().unwrap_or_default();
            events.into_iter().map(|event| Event { prev: None, ..event }).collect()
        };
        let (one, other) = (bare(one), bare(other));
        (one != other).then(|| format!("revision {revision}: {one:?} and {other:?}"))
    })
}

/// Checks each event against those before it, and writes into it the previous value that follows from them. A member may have
/// left one out (it was compacted), never told another.
fn replay(events: &mut [Event], members: &[Revisions], faults: &mut Vec<String>) {
    let mut state: HashMap<String, Prev> = HashMap::new();
    for event in events {
        let prev = state.get(&event.key).cloned();
        let expected = match (&prev, event.put) {
            (Some(prev), true) => (prev.create, prev.version + 1),
            (None, true) => (event.revision, 1),
            (_, false) => (0, 0),
        };
        if (event.create, event.version) != expected || (!event.put && prev.is_none()) {
            faults.push(format!("{event:?} follows {prev:?}"));
        }
        let told = members.iter().filter_map(|member| member.get(&event.revision));
        for told in told.flatten().filter(|told| told.key == event.key) {
            if told.prev.is_some() && told.prev != prev {
                faults.push(format!("{told:?} follows {prev:?}"));
            }
        }
        if event.put {
            let now = Prev {
                value: event.value.clone(),
                revision: event.revision,
                create: event.create,
                version: event.version,
            };
            state.insert(event.key.clone(), now);
        } else {
            state.remove(&event.key);
        }
        event.prev = prev;
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A put or (without a value) a delete, with what follows left to [`told`].
    pub(crate) fn change(revision: i64, key: &str, value: Option<&str>) -> Event {
        Event {
            put: value.is_some(),
            key: key.into(),
            value: value.unwrap_or_default().into(),
            revision,
            create: 0,
            version: 0,
            lease: 0,
            prev: None,
        }
    }

    /// A member's true record of these changes.
    pub(crate) fn told(changes: &[(i64, &str, Option<&str>)]) -> Revisions {
        let mut state: HashMap<&str, (i64, i64)> = HashMap::new();
        let mut revisions = Revisions::new();
        for (revision, key, value) in changes {
            let mut event = change(*revision, key, *value);
            if event.put {
                let (create, version) = state.get(key).copied().unwrap_or((*revision, 0));
                (event.create, event.version) = (create, version + 1);
                state.insert(key, (create, version + 1));
            } else {
                state.remove(key);
            }
            revisions.entry(*revision).or_default().push(event);
        }
        revisions
    }

    const CHANGES: &[(i64, &str, Option<&str>)] =
        &[(2, "a", Some("1")), (2, "b", Some("1")), (3, "a", Some("2")), (4, "a", None), (5, "a", Some("3"))];

    #[test]
    fn members_that_agree_make_a_history_with_previous_values() {
        let history = History::agreed(&[told(CHANGES), told(CHANGES)], 5).unwrap();
        let prev =
            |revision| history.find(revision, "a").unwrap().prev.as_ref().map(|prev| prev.value.as_str());
        assert_eq!([prev(2), prev(3), prev(4), prev(5)], [None, Some("1"), Some("2"), None]);
        assert_eq!((history.revision(2).len(), history.revision(9).len()), (2, 0));
    }

    #[test]
    fn what_comes_later_is_not_compared() {
        assert!(History::agreed(&[told(CHANGES), told(&CHANGES[..4])], 4).is_ok());
        assert!(History::agreed(&[told(CHANGES), told(&CHANGES[..4])], 5).is_err());
    }

    #[test]
    fn a_member_that_tells_another_thing_is_found() {
        let doctor = |change: fn(&mut Revisions)| {
            let mut other = told(CHANGES);
            change(&mut other);
            [History::agreed(&[told(CHANGES), other.clone()], 5), History::agreed(&[other], 5)]
                .map(|h| h.is_err())
        };
        assert_eq!(doctor(|_| {}), [false, false]);
        assert_eq!(doctor(|other| drop(other.remove(&3))), [true, true], "lost");
        assert_eq!(doctor(|other| other.get_mut(&3).unwrap()[0].value = "x".into()), [true, false]);
        assert_eq!(doctor(|other| other.get_mut(&3).unwrap()[0].version = 7), [true, true]);
        assert_eq!(doctor(|other| other.get_mut(&2).unwrap().reverse()), [true, false]);
        let wrong = |other: &mut Revisions| {
            let prev = Prev { value: "x".into(), revision: 2, create: 2, version: 1 };
            other.get_mut(&3).unwrap()[0].prev = Some(prev);
        };
        assert_eq!(doctor(wrong), [true, true], "a wrong previous value");
    }

    #[test]
    fn what_was_known_when() {
        let history = History { arrivals: vec![(10, 2), (20, 5)], ..History::default() };
        assert_eq!([9, 10, 19, 20, 99].map(|at| history.known_at(at)), [0, 2, 2, 5, 5]);
    }
}
