//! Which role each PostgreSQL has over time, as the program `observe` of tests/clients/patroni is told by SQL and by Patroni.
//!
//! Owns: the observer, its record, and what follows from it. Must not know why a role changes. Invariant: two primaries are counted
//! only where the record proves them: one was seen between two sightings of the other.

use std::cell::{Cell, RefCell};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::harness::process::Process;

/// Who told it.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub(super) enum ToldBy {
    /// PostgreSQL itself: `pg_is_in_recovery`.
    Sql,
    /// Patroni's REST API.
    Rest,
}

/// One answer, or that there was none.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct RoleSample {
    node: String,
    by: ToldBy,
    /// Before the question and after the answer, in unix milliseconds.
    from: i64,
    to: i64,
    /// `None` where nobody answered.
    primary: Option<bool>,
    timeline: Option<i64>,
}

/// The observer and its record.
pub(super) struct RoleSamples {
    process: Process,
    path: PathBuf,
    read: Cell<u64>,
    partial: RefCell<Vec<u8>>,
    samples: RefCell<Vec<RoleSample>>,
}

impl RoleSamples {
    pub(super) fn start(program: &Path, args: &[String], folder: &Path) -> RoleSamples {
        let path = folder.join("roles");
        let process = Process::start("patroni observer", program, args, &[], &path);
        RoleSamples {
            process,
            path,
            read: Cell::default(),
            partial: RefCell::default(),
            samples: RefCell::default(),
        }
    }

    /// Everything that was told so far.
    pub(super) fn all(&self) -> Vec<RoleSample> {
        self.read_on();
        self.samples.borrow().clone()
    }

    /// The only node that both tell to be primary now.
    pub(super) fn primary(&self) -> Option<String> {
        self.read_on();
        let samples = self.samples.borrow();
        let is_primary = |node: &&String| {
            [ToldBy::Sql, ToldBy::Rest]
                .into_iter()
                .all(|by| last(&samples, node, by).is_some_and(|s| s.primary == Some(true)))
        };
        let nodes = nodes(&samples);
        let mut primaries = nodes.iter().filter(is_primary);
        let one = primaries.next()?.clone();
        primaries.next().is_none().then_some(one)
    }

    /// Whether this node follows the primary, on its timeline.
    pub(super) fn follows(&self, node: &str) -> bool {
        let Some(primary) = self.primary() else { return false };
        let samples = self.samples.borrow();
        let timeline = |node: &str| last(&samples, node, ToldBy::Rest).and_then(|sample| sample.timeline);
        [ToldBy::Sql, ToldBy::Rest]
            .into_iter()
            .all(|by| last(&samples, node, by).is_some_and(|s| s.primary == Some(false)))
            && timeline(node) == timeline(&primary)
    }

    fn read_on(&self) {
        assert!(self.process.exit().is_none(), "the observer ended: {}", self.process.tail());
        let mut file = File::open(&self.path).expect("the record is there");
        file.seek(SeekFrom::Start(self.read.get())).expect("a file can be sought");
        let mut partial = self.partial.borrow_mut();
        let more = file.read_to_end(&mut partial).expect("the record can be read");
        self.read.set(self.read.get() + more as u64);
        let whole = partial.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
        for line in partial[..whole].split(|byte| *byte == b'\n').filter(|line| !line.is_empty()) {
            let told: serde_json::Value = serde_json::from_slice(line).expect("the observer writes JSON");
            if told["kind"] == "start" {
                println!("Patroni {}", told["patroni"]);
            } else {
                let sample = serde_json::from_value(told).expect("a line as its contract says");
                self.samples.borrow_mut().push(sample);
            }
        }
        partial.drain(..whole);
    }
}

fn nodes(samples: &[RoleSample]) -> Vec<String> {
    let mut nodes: Vec<String> = samples.iter().map(|sample| sample.node.clone()).collect();
    nodes.sort();
    nodes.dedup();
    nodes
}

fn last<'a>(samples: &'a [RoleSample], node: &str, by: ToldBy) -> Option<&'a RoleSample> {
    samples.iter().rev().find(|sample| sample.node == node && sample.by == by)
}

/// How often a node was seen as primary between two sightings of another one, with nothing else told of that in between.
pub(super) fn two_primaries(samples: &[RoleSample], by: ToldBy) -> usize {
    let of = |node: &str| -> Vec<RoleSample> {
        samples.iter().filter(|sample| sample.node == node && sample.by == by).cloned().collect()
    };
    let all: Vec<_> = nodes(samples).iter().map(|node| of(node)).collect();
    let mut proofs = 0;
    for (one, samples) in all.iter().enumerate() {
        let spans = samples.windows(2).filter(|pair| pair.iter().all(|sample| sample.primary == Some(true)));
        for (begin, end) in spans.map(|pair| (pair[0].to, pair[1].from)) {
            let others =
                all.iter().enumerate().filter(|(other, _)| *other != one).flat_map(|(_, samples)| samples);
            proofs += others.filter(|s| s.primary == Some(true) && begin < s.from && s.to < end).count();
        }
    }
    proofs
}

/// The longest time in which nobody was seen as primary, in milliseconds, between the first and the last sighting.
pub(super) fn longest_without_primary(samples: &[RoleSample]) -> i64 {
    let mut seen: Vec<_> =
        samples.iter().filter(|s| s.by == ToldBy::Sql && s.primary == Some(true)).collect();
    seen.sort_by_key(|sample| sample.from);
    seen.windows(2).map(|pair| pair[1].from - pair[0].to).max().unwrap_or(0)
}

/// The samples of a span of time.
pub(super) fn within(samples: &[RoleSample], from: i64, to: i64) -> Vec<RoleSample> {
    samples.iter().filter(|sample| from <= sample.from && sample.from < to).cloned().collect()
}

#[test]
fn two_primaries_are_seen_only_where_they_are_proved() {
    let sample = |node: &str, from: i64, primary: Option<bool>| RoleSample {
        node: node.into(),
        by: ToldBy::Sql,
        from,
        to: from + 1,
        primary,
        timeline: None,
    };
    let both = [sample("a", 0, Some(true)), sample("b", 3, Some(true)), sample("a", 6, Some(true))];
    assert_eq!(two_primaries(&both, ToldBy::Sql), 1);
    assert_eq!(two_primaries(&both, ToldBy::Rest), 0);
    assert_eq!(two_primaries(&both[..2], ToldBy::Sql), 0, "one after the other");
    let between = [both.as_slice(), &[sample("a", 2, Some(false))]].concat();
    let mut ordered = between.clone();
    ordered.sort_by_key(|sample| sample.from);
    assert_eq!(two_primaries(&ordered, ToldBy::Sql), 0, "it was none in between");
    assert_eq!(longest_without_primary(&both), 2);
}
