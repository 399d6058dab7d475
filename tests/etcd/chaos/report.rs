//! What a run showed: every record judged, everything counted, and what must be so.
//!
//! Owns: the sums, their text, the last word. Must not know how anything was made to happen. What is counted is in `chaos.rs`.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use super::bare::{Group, Manner};
use super::families::User;
use super::faults::{Fault, Kind};
use super::history::History;
use super::judge::{Case, SOON, Verdict, Violation, judge};
use super::ledger::{Audit, audit};
use super::program::Program;
use super::record::{Filter, Record, Watch, story};
use super::writers::{REVOCABLE, Written};
use crate::harness::binary::Version;

/// Of hits, how many in a hundred must go on.
const WENT_ON: usize = 95;
/// How many violations are printed whole.
const SHOWN: usize = 20;

/// What was done, as far as no record tells it.
#[derive(Debug, Default)]
pub(crate) struct Done {
    pub(crate) seed: u64,
    pub(crate) length: Duration,
    pub(crate) faults: Vec<Fault>,
    pub(crate) role_changes: usize,
    pub(crate) oracle_reopened: usize,
    /// Upstream streams that Keyward opened to go on.
    pub(crate) resumes: f64,
}

/// What came of a run.
#[derive(Debug, Default)]
pub(crate) struct Report {
    done: Done,
    programs: Vec<String>,
    /// Watches, and those that came and went.
    watches: [usize; 2],
    verdict: Verdict,
    audit: Audit,
    leases: usize,
    /// The writers', by code and text.
    errors: BTreeMap<String, usize>,
    compactions: usize,
    /// Events in the history.
    history: usize,
    strange: Vec<String>,
    /// The records that are wrong.
    stories: Vec<String>,
}

/// One watch at its end.
pub(crate) struct Judged {
    watch: Watch,
    record: Record,
    whole: bool,
    tells_why: bool,
    user: User,
    guest: bool,
}

/// The revision of the last event that a watch must show.
pub(crate) fn last_of(watch: &Watch, [put, deleted]: [i64; 2]) -> i64 {
    if watch.filter == Some(Filter::NoDelete) { put } else { deleted }
}

impl Report {
    pub(crate) fn new(done: Done) -> Report {
        Report { done, ..Report::default() }
    }

    /// Ends the programs and takes all records.
    pub(crate) async fn gather(
        &mut self,
        programs: Vec<Program>,
        groups: &[Arc<Group>],
        history: &History,
    ) -> Vec<Judged> {
        let mut judged = Vec::new();
        for program in programs {
            let (family, user) = (program.family, program.user);
            let watches = program.watches.clone();
            let mut said = program.end().await;
            self.programs.push(format!("{} as {}: {} watches", said.client, user.name(), watches.len()));
            self.strange.extend(said.strange.drain(..).map(|line| format!("{}: {line}", family.name)));
            for watch in watches {
                let record = said.records.remove(&watch.name).unwrap_or_default();
                let name = format!("{} {} {}", family.name, user.name(), watch.name);
                let watch = Watch { name, ..watch };
                let whole = family.can.joins || !watch.fragment;
                let tells_why = family.can.tells_why;
                judged.push(Judged { watch, record, whole, tells_why, user, guest: false });
            }
        }
        for group in groups {
            let mut held = group.held();
            let (manner, user) = (group.manner, group.user);
            let count = held.watches.len();
            self.programs.push(format!("bare gRPC as {}, {manner:?}: {count} watches", user.name()));
            self.strange.append(&mut held.strange);
            let ahead = |(at, revision): &(i64, i64)| *revision > history.known_at(at + SOON);
            let ahead: Vec<_> = held.highest.iter().filter(|header| ahead(header)).collect();
            self.strange.extend(ahead.iter().map(|(at, revision)| {
                format!("{manner:?}: a header at {at} told {revision}, which etcd had not reached")
            }));
            for (watch, record) in held.watches.drain(..) {
                let watch = Watch { name: format!("bare {manner:?} {}", watch.name), ..watch };
                judged.push(Judged {
                    watch,
                    record,
                    whole: true,
                    tells_why: true,
                    user,
                    guest: manner == Manner::Guests,
                });
            }
        }
        judged
    }

    pub(crate) fn judge(
        &mut self,
        judged: &[Judged],
        history: &History,
        written: Vec<Written>,
        stood_by: i64,
        last: [i64; 2],
    ) {
        for one in judged {
            self.watches[usize::from(one.guest)] += 1;
            let case = Case {
                watch: &one.watch,
                whole: one.whole,
                tells_why: one.tells_why,
                revocable: one.watch.range.key.starts_with(REVOCABLE) && one.user == User::Revocable,
                stood_by,
                last: (!one.guest).then(|| last_of(&one.watch, last)),
            };
            let verdict = judge(&case, &one.record, history);
            if !verdict.violations.is_empty() {
                self.stories.push(format!("{:?}: {}", one.watch, story(&one.record)));
            }
            self.add(verdict);
        }
        let mut writes = Vec::new();
        for written in written {
            writes.extend(written.writes);
            self.leases += written.leases;
            for (error, count) in written.errors {
                *self.errors.entry(error).or_default() += count;
            }
        }
        self.history = history.events().len();
        self.compactions = history.compactions.len();
        self.audit = audit(&writes, history);
    }

    fn add(&mut self, verdict: Verdict) {
        let sum = &mut self.verdict;
        sum.events += verdict.events;
        sum.incarnations += verdict.incarnations;
        sum.progress += verdict.progress;
        sum.prev_compacted += verdict.prev_compacted;
        sum.asked_late += verdict.asked_late;
        sum.refused += verdict.refused;
        sum.compacted.extend(verdict.compacted);
        sum.denied.extend(verdict.denied);
        sum.violations.extend(verdict.violations);
    }

    /// Of each fault: watches that it hit and whose end was not a right one, and how many of them went on.
    fn hits(&self) -> Vec<[usize; 2]> {
        let ends = self.done.faults.iter().skip(1).map(|fault| fault.at).chain([i64::MAX]);
        let between = |ends: &[(i64, String)], from: i64, to: i64| {
            ends.iter().filter(|(at, _)| (from..to).contains(at)).count()
        };
        let hits = self.done.faults.iter().zip(ends).map(|(fault, end)| {
            let denied = between(&self.verdict.denied, fault.at, end).min(fault.carried);
            let hit = fault.carried - denied;
            [hit, hit.saturating_sub(between(&self.verdict.compacted, fault.at, end))]
        });
        hits.collect()
    }

    /// What a person reads.
    pub(crate) fn text(&self, version: &Version) -> String {
        let mut lines = self.programs.clone();
        lines.extend(self.fault_lines());
        lines.extend(self.verdict.compacted.iter().map(|(_, what)| format!("compacted: {what}")));
        lines.extend(self.verdict.denied.iter().map(|(_, what)| format!("denied while revoked: {what}")));
        lines.extend(self.errors.iter().map(|(error, count)| format!("writers' errors: {count} x {error}")));
        let Audit { acknowledged, unknown, applied, by_lease, .. } = &self.audit;
        lines.push(format!(
            "oracle: {} events on three members alike, opened again {} times; compactions {}, role changes {}",
            self.history, self.done.oracle_reopened, self.compactions, self.done.role_changes
        ));
        lines.push(format!(
            "writes: acknowledged {acknowledged}, of unknown outcome {unknown} ({applied} there); leases {}, revisions made by leases {by_lease}",
            self.leases
        ));
        let [watches, guests] = self.watches;
        let Verdict { events, incarnations, progress, prev_compacted, asked_late, refused, .. } =
            &self.verdict;
        lines.push(format!(
            "watches: {watches}, and {guests} that came and went; opened {incarnations} times; previous values compacted {prev_compacted}; asked for what was gone {asked_late}, refused until the right was back {refused}"
        ));
        let wrong = self.verdict.violations.len() + self.strange.len() + self.audit.faults.len();
        lines.push(format!(
            "events checked {events}, progress checked {progress}, resumes {}, compacted endings {}, denied endings {}, violations {wrong}",
            self.done.resumes,
            self.verdict.compacted.len(),
            self.verdict.denied.len(),
        ));
        lines.iter().map(|line| format!("{version}: {line}\n")).collect()
    }

    fn fault_lines(&self) -> Vec<String> {
        let faults = &self.done.faults;
        let mut lines = Vec::new();
        let (mut hitting, mut resumed) = (0, 0);
        for (fault, [hit, went_on]) in faults.iter().zip(self.hits()) {
            let Fault { at, kind, member, led, carried, resumes, denied } = fault;
            lines.push(format!(
                "at {at} {kind:?} m{member}, leader: {led}, right revoked: {denied}, watches there {carried}: hit {hit}, went on {went_on}, upstream streams opened to go on {resumes}"
            ));
            let missed = *kind == Kind::Killed && *resumes == 0.0;
            hitting += usize::from(hit > 0);
            resumed += usize::from(hit > 0 && hit == went_on && !missed);
        }
        let killed = faults.iter().filter(|fault| fault.kind == Kind::Killed).count();
        let led = faults.iter().filter(|fault| fault.led).count();
        let (hit, went_on) = self.sums();
        lines.push(format!(
            "seed {}, {} s; faults {}: killed {killed}, stopped {}, of leaders {led}; hit a watch {hitting}, ended in a resume {resumed}; hits {hit}, went on {went_on}",
            self.done.seed,
            self.done.length.as_secs(),
            faults.len(),
            faults.len() - killed
        ));
        lines
    }

    fn sums(&self) -> (usize, usize) {
        self.hits().iter().fold((0, 0), |(hit, on), [more_hit, more_on]| (hit + more_hit, on + more_on))
    }

    /// Fails where anything was wrong, or where nothing happened.
    pub(crate) fn assert(&self, version: &Version) {
        let first: Vec<String> =
            self.verdict.violations.iter().take(SHOWN).map(Violation::to_string).collect();
        self.stories.iter().for_each(|story| println!("{version}: wrong: {story}"));
        assert!(first.is_empty(), "{version}: {} violations: {first:#?}", self.verdict.violations.len());
        let first: Vec<&String> = self.strange.iter().take(SHOWN).collect();
        assert!(first.is_empty(), "{version}: {} strange things: {first:#?}", self.strange.len());
        let first: Vec<&String> = self.audit.faults.iter().take(SHOWN).collect();
        assert!(first.is_empty(), "{version}: the oracle and the writers do not agree: {first:#?}");
        let (hit, went_on) = self.sums();
        assert!(hit > 0 && self.done.resumes > 0.0, "{version}: no fault hit a watch");
        assert!(went_on * 100 >= hit * WENT_ON, "{version}: of {hit} hits only {went_on} went on");
        let busy =
            self.verdict.events > self.history && self.audit.acknowledged > 0 && self.audit.by_lease > 0;
        assert!(busy, "{version}: too little happened to prove anything");
    }
}
