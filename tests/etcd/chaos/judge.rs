//! Whether what a watch showed is what it had to show.
//!
//! Owns: the rules. Must not know how a record was made, nor that a proxy was in between. Invariant: a record is judged whole; what
//! is not explained by the history is a violation.
//!
//! A watch opened at N > 0 must show everything in its range from N on. One opened "from now", with Created at R: from R + 1 on.
//! Where the library does not show R: everything after the revision that was current when the watch was known to stand; it may
//! begin earlier, without a gap. The end of a watch is explained by a compaction above its next revision, or by a right that was
//! missing at that time; the application opens it again, and that is judged as a watch of its own.

use std::collections::BTreeSet;
use std::fmt;

use super::history::{Compaction, History};
use super::record::{Event, Line, Seen, Watch};

/// Between what one process did and another wrote down, on one machine; in milliseconds.
const SLACK: i64 = 3_000;
/// Between a revision's being told to us and its being recorded by the oracle, of which a member always runs.
pub(crate) const SOON: i64 = 1_000;

/// What kind of wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Wrong {
    /// An event that had to come did not.
    Lost,
    /// An event came again.
    Double,
    /// An event came after a later one.
    Disorder,
    /// A response ended inside a revision.
    Half,
    /// Another value, lease, version or create revision than etcd's.
    Content,
    /// Another previous value, one that was not asked for, or none where it was not compacted.
    Prev,
    /// Not in the watch's range, or filtered out.
    Foreign,
    /// Nothing of this key happened at that revision.
    Invented,
    /// Before the revision from which the watch was opened.
    TooEarly,
    /// At or below a progress that was told before.
    AfterProgress,
    /// A progress beyond an event that had not come.
    ProgressAhead,
    /// A progress below what came before.
    ProgressBack,
    /// A response whose header is below its events, or beyond one that had not come.
    Header,
    /// Something before the watch was said to stand, or that said twice.
    Created,
    /// An end by compaction that no compaction explains.
    Compacted,
    /// Another end that nothing explains.
    Ended,
}

/// One wrong thing.
#[derive(Clone, Debug)]
pub(crate) struct Violation {
    pub(crate) wrong: Wrong,
    pub(crate) watch: String,
    pub(crate) what: String,
}

/// A watch and what there is to know of it.
#[derive(Debug)]
pub(crate) struct Case<'a> {
    pub(crate) watch: &'a Watch,
    /// The library shows whole responses: no single events, no pieces.
    pub(crate) whole: bool,
    /// The library tells why a watch ended that stood.
    pub(crate) tells_why: bool,
    /// Its user's right is taken away at times.
    pub(crate) revocable: bool,
    /// A revision that was not yet current when the watch was known to stand, or later.
    pub(crate) stood_by: i64,
    /// Up to here everything must have come; `None` where the application ended the watch by itself.
    pub(crate) last: Option<i64>,
}

/// What came of one watch.
#[derive(Debug, Default)]
pub(crate) struct Verdict {
    pub(crate) events: usize,
    /// How often it was opened.
    pub(crate) incarnations: usize,
    pub(crate) progress: usize,
    /// Previous values that were not told since they were compacted, as in etcd.
    pub(crate) prev_compacted: usize,
    /// Explained ends by compaction, and when.
    pub(crate) compacted: Vec<(i64, String)>,
    /// The same where the watch was opened below a compaction in the first place: nothing was lost on the way.
    pub(crate) asked_late: usize,
    /// Explained ends by a missing right of watches that stood, and when.
    pub(crate) denied: Vec<(i64, String)>,
    /// Refusals of the same, each time that it was opened again too early.
    pub(crate) refused: usize,
    pub(crate) violations: Vec<Violation>,
}

/// Judges one watch's record.
pub(crate) fn judge(case: &Case<'_>, record: &[Line], history: &History) -> Verdict {
    let mut judging = Judging { case, history, verdict: Verdict::default() };
    let mut walk: Option<Walk<'_>> = None;
    for line in record {
        if let Seen::Opened { start } = line.seen {
            if let Some(walk) = walk.take() {
                judging.close(walk, None);
            }
            judging.verdict.incarnations += 1;
            walk = Some(judging.open(start, line.at));
        } else if let Some(walk) = &mut walk {
            judging.line(walk, line);
        } else {
            judging.wrong(Wrong::Created, format!("{:?} before it was opened", line.seen));
        }
    }
    match walk {
        Some(walk) => judging.close(walk, case.last),
        None => judging.wrong(Wrong::Created, "was never opened".into()),
    }
    judging.verdict
}

/// One opening of the watch, and how far it came.
struct Walk<'a> {
    /// When it was opened.
    at: i64,
    /// What it was opened with; 0 is "from now".
    start: i64,
    first: bool,
    created: bool,
    ended: bool,
    /// Whether it is known from where on it must show everything. If not, it must from after `stood_by` on.
    anchored: bool,
    stood_by: i64,
    expected: Vec<&'a Event>,
    /// The next of `expected`.
    next: usize,
    /// Those before `next` that did not come.
    skipped: BTreeSet<usize>,
    /// The highest revision shown by an event or a progress.
    shown: i64,
    progress: i64,
}

struct Judging<'a> {
    case: &'a Case<'a>,
    history: &'a History,
    verdict: Verdict,
}

impl<'a> Judging<'a> {
    fn wrong(&mut self, wrong: Wrong, what: String) {
        self.verdict.violations.push(Violation { wrong, watch: self.case.watch.name.clone(), what });
    }

    fn open(&self, start: i64, at: i64) -> Walk<'a> {
        Walk {
            at,
            start,
            first: self.verdict.incarnations == 1,
            created: false,
            ended: false,
            anchored: start > 0,
            stood_by: i64::MAX,
            expected: self.history.expected(self.case.watch, start),
            next: 0,
            skipped: BTreeSet::new(),
            shown: 0,
            progress: 0,
        }
    }

    fn line(&mut self, walk: &mut Walk<'a>, line: &Line) {
        if walk.ended {
            self.wrong(Wrong::Created, format!("{:?} after its end", line.seen));
        }
        match &line.seen {
            Seen::Opened { .. } => {}
            Seen::Created { revision } => self.created(walk, *revision, line.at),
            Seen::Events { header, events } => self.response(walk, *header, events, line.at),
            Seen::Progress { revision } => self.progress(walk, *revision),
            Seen::Compacted { revision } => self.compacted(walk, *revision, line.at),
            Seen::Ended { code, message } => self.ended(walk, code, message, line.at),
        }
    }

    fn created(&mut self, walk: &mut Walk<'a>, revision: Option<i64>, at: i64) {
        if walk.created {
            self.wrong(Wrong::Created, "was said to stand twice".into());
        }
        walk.created = true;
        let known = self.history.known_at(at + SOON);
        if let Some(revision) = revision.filter(|revision| *revision > known) {
            self.wrong(Wrong::Header, format!("created at {revision}, when etcd was at {known}"));
        }
        walk.stood_by = if walk.first { self.case.stood_by } else { self.history.known_at(at + SLACK) };
        if let (0, Some(revision)) = (walk.start, revision) {
            walk.anchor(revision + 1);
        }
    }

    fn response(&mut self, walk: &mut Walk<'a>, header: Option<i64>, events: &[Event], at: i64) {
        if !walk.created {
            self.wrong(Wrong::Created, format!("events before it was said to stand: {events:?}"));
        }
        for event in events {
            self.verdict.events += 1;
            self.event(walk, event, at);
        }
        let (Some(last), true) = (events.last(), self.case.whole) else { return };
        let reached = walk.next.checked_sub(1).map(|i| walk.expected[i].revision);
        let coming = walk.coming();
        if coming.is_some() && coming == reached {
            self.wrong(Wrong::Half, format!("a response ended inside revision {}", last.revision));
        }
        if let Some(header) = header
            && (header < last.revision || coming.is_some_and(|coming| coming <= header))
        {
            let what =
                format!("header {header}, last event at {}, the next one at {coming:?}", last.revision);
            self.wrong(Wrong::Header, what);
        }
    }

    fn event(&mut self, walk: &mut Walk<'a>, event: &Event, at: i64) {
        let told = || format!("{event:?}");
        if !self.case.watch.wants(event) {
            return self.wrong(Wrong::Foreign, told());
        }
        if event.revision <= walk.progress {
            self.wrong(Wrong::AfterProgress, format!("{} was told before {event:?}", walk.progress));
        }
        walk.shown = walk.shown.max(event.revision);
        let is = |i: &usize| {
            let expected = walk.expected[*i];
            expected.revision == event.revision && expected.key == event.key
        };
        let here = if is_at(walk, event) {
            Some(walk.next)
        } else {
            let from = walk.expected.partition_point(|expected| expected.revision < event.revision);
            (from..walk.expected.len()).take_while(|i| walk.expected[*i].revision == event.revision).find(is)
        };
        let Some(here) = here else {
            let early = self.history.find(event.revision, &event.key).is_some();
            return self.wrong(if early { Wrong::TooEarly } else { Wrong::Invented }, told());
        };
        if !walk.anchored {
            walk.anchored = true;
            walk.next = here.min(walk.first_due());
        }
        if here >= walk.next {
            walk.skipped.extend(walk.next..here);
            walk.next = here + 1;
        } else if walk.skipped.remove(&here) {
            self.wrong(Wrong::Disorder, told());
        } else {
            self.wrong(Wrong::Double, told());
        }
        self.content(walk.expected[here], event, at);
    }

    fn content(&mut self, expected: &Event, event: &Event, at: i64) {
        let bare = |event: &Event| Event { prev: None, ..event.clone() };
        if bare(expected) != bare(event) {
            self.wrong(Wrong::Content, format!("{:?} instead of {:?}", bare(event), bare(expected)));
        }
        let wanted = if self.case.watch.prev_kv { &expected.prev } else { &None };
        if *wanted == event.prev {
            return;
        }
        let gone = |c: &Compaction| c.revision >= event.revision && c.at <= at + SLACK;
        if event.prev.is_none() && self.history.compactions.iter().any(gone) {
            self.verdict.prev_compacted += 1;
        } else {
            let what =
                format!("{:?} instead of {wanted:?} at {} of {}", event.prev, event.revision, event.key);
            self.wrong(Wrong::Prev, what);
        }
    }

    fn progress(&mut self, walk: &mut Walk<'a>, revision: i64) {
        self.verdict.progress += 1;
        if !walk.created {
            self.wrong(Wrong::Created, format!("progress {revision} before it was said to stand"));
        }
        if !walk.anchored {
            walk.next = walk.first_due();
        }
        if let Some(coming) = walk.coming().filter(|coming| *coming <= revision) {
            self.wrong(Wrong::ProgressAhead, format!("{revision}, but {coming} had not come"));
        }
        if revision < walk.shown {
            self.wrong(Wrong::ProgressBack, format!("{revision} after {}", walk.shown));
        }
        if !walk.anchored {
            walk.anchor(revision + 1);
        }
        walk.progress = walk.progress.max(revision);
        walk.shown = walk.shown.max(revision);
    }

    fn compacted(&mut self, walk: &mut Walk<'a>, revision: Option<i64>, at: i64) {
        walk.ended = true;
        // Where the library does not show it, it was etcd's newest at that time.
        let known = self.history.compactions.iter().filter(|c| c.at <= at + SLACK).map(|c| c.revision).max();
        let revision = revision.or(known).unwrap_or_default();
        let next = walk.due();
        let asked = |c: &Compaction| c.revision == revision && c.at <= at + SLACK;
        let what = format!(
            "{}: next revision {next} below etcd's compact revision {revision}",
            self.case.watch.name
        );
        let before = |c: &Compaction| c.revision > walk.start && c.at <= walk.at;
        if next < revision && self.history.compactions.iter().any(asked) {
            if walk.start > 0 && walk.shown == 0 && self.history.compactions.iter().any(before) {
                self.verdict.asked_late += 1;
            } else {
                self.verdict.compacted.push((at, what));
            }
        } else {
            self.wrong(Wrong::Compacted, format!("not so: {what}"));
        }
    }

    fn ended(&mut self, walk: &mut Walk<'a>, code: &str, message: &str, at: i64) {
        walk.ended = true;
        let missing = self.history.denials.iter().any(|denial| denial.from <= at && at <= denial.to + SLACK);
        let what = format!("{}: {code} {message}", self.case.watch.name);
        // The code of a watch's end reaches applications only inside etcd's text.
        let says_so = message.contains("permission denied");
        let says_nothing = code.is_empty() && message.is_empty() && walk.created && !self.case.tells_why;
        match self.case.revocable && missing && (says_so || says_nothing) {
            true if walk.created => self.verdict.denied.push((at, what)),
            true => self.verdict.refused += 1,
            false => self.wrong(Wrong::Ended, what),
        }
    }

    /// The watch is over, or the record is: nothing may be missing before the last that came, nor up to `last`.
    fn close(&mut self, mut walk: Walk<'a>, last: Option<i64>) {
        if let Some(last) = last {
            if !walk.created {
                return self.wrong(Wrong::Created, "never stood".into());
            }
            if !walk.anchored {
                walk.next = walk.first_due();
            }
            let end = walk.expected.partition_point(|expected| expected.revision <= last);
            walk.skipped.extend(walk.next..end.max(walk.next));
        }
        for i in walk.skipped {
            let what =
                format!("{:?}, opened at {}, shown up to {}", walk.expected[i], walk.start, walk.shown);
            self.wrong(Wrong::Lost, what);
        }
    }
}

fn is_at(walk: &Walk<'_>, event: &Event) -> bool {
    let expected = walk.expected.get(walk.next);
    walk.anchored && expected.is_some_and(|e| e.revision == event.revision && e.key == event.key)
}

impl Walk<'_> {
    /// It is now known that it must show everything from here on.
    fn anchor(&mut self, from: i64) {
        self.anchored = true;
        self.next = 0;
        self.shown = self.shown.max(from - 1);
        self.expected.retain(|event| event.revision >= from);
    }

    /// The first that had to come after the watch stood.
    fn first_due(&self) -> usize {
        self.expected.partition_point(|event| event.revision <= self.stood_by)
    }

    /// The revision of the next event that must come.
    fn coming(&self) -> Option<i64> {
        self.expected.get(self.next).map(|event| event.revision)
    }

    /// The lowest revision from which the watch would have to begin anew, as far as its application can know.
    fn due(&self) -> i64 {
        let opened = match (self.start, self.anchored) {
            (0, true) => 0,
            (0, false) => self.stood_by,
            (start, _) => start,
        };
        opened.max(self.shown + 1)
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {}: {}", self.wrong, self.watch, self.what)
    }
}

#[cfg(test)]
mod tests {
    use super::super::history::Denial;
    use super::super::history::tests::told;
    use super::super::record::{Filter, Prev, Range, Record};
    use super::*;

    const LAST: i64 = 9;

    fn history() -> History {
        let member = told(&[
            (2, "/a/x", Some("1")),
            (2, "/a/y", Some("1")),
            (3, "/b/x", Some("1")),
            (4, "/a/x", Some("2")),
            (5, "/a/x", None),
            (5, "/a/y", None),
            (6, "/a/x", Some("3")),
            (7, "/a/y", Some("4")),
            (8, "/b/x", None),
            (9, "/a/x", Some("last")),
        ]);
        let compactions = vec![Compaction { revision: 4, at: 1_000_000 }];
        let denials = vec![Denial { from: 2_000_000, to: 3_000_000 }];
        let mut history = History::agreed(&[member], LAST).unwrap();
        history.compactions = compactions;
        history.denials = denials;
        history.arrivals = vec![(0, 1), (500, LAST)];
        history
    }

    fn watch(start: i64) -> Watch {
        Watch {
            name: "w".into(),
            range: Range::prefix("/a/"),
            start,
            prev_kv: true,
            progress_notify: true,
            fragment: false,
            filter: None,
        }
    }

    fn line(seen: Seen) -> Line {
        Line { at: 0, seen }
    }

    /// What a right watch shows: one response for each revision, then a progress.
    fn right(watch: &Watch, history: &History, created: Option<i64>, from: i64) -> Record {
        let mut record =
            vec![line(Seen::Opened { start: watch.start }), line(Seen::Created { revision: created })];
        let mut revisions: Vec<Vec<Event>> = Vec::new();
        for event in history.expected(watch, from) {
            let event = Event { prev: event.prev.clone().filter(|_| watch.prev_kv), ..event.clone() };
            match revisions.last_mut().filter(|events| events[0].revision == event.revision) {
                Some(events) => events.push(event),
                None => revisions.push(vec![event]),
            }
        }
        record.extend(
            revisions.into_iter().map(|events| {
                line(Seen::Events { header: events.last().map(|event| event.revision), events })
            }),
        );
        record.push(line(Seen::Progress { revision: LAST }));
        record
    }

    fn judged(watch: &Watch, record: &Record, stood_by: i64) -> Verdict {
        let case = Case { watch, whole: true, revocable: true, tells_why: true, stood_by, last: Some(LAST) };
        judge(&case, record, &history())
    }

    fn wrongs(verdict: &Verdict) -> Vec<Wrong> {
        let mut wrongs: Vec<Wrong> = verdict.violations.iter().map(|violation| violation.wrong).collect();
        wrongs.sort();
        wrongs.dedup();
        wrongs
    }

    /// The wrongs found in a right record after `change`, which is shown the events of each response.
    fn doctored(change: impl FnOnce(&mut Record)) -> Vec<Wrong> {
        let watch = watch(2);
        let mut record = right(&watch, &history(), Some(1), 2);
        change(&mut record);
        wrongs(&judged(&watch, &record, 1))
    }

    fn events(line: &mut Line) -> &mut Vec<Event> {
        match &mut line.seen {
            Seen::Events { events, .. } => events,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_right_record_has_no_violation() {
        let verdict = judged(&watch(2), &right(&watch(2), &history(), Some(1), 2), 1);
        assert_eq!(wrongs(&verdict), []);
        assert_eq!((verdict.events, verdict.incarnations, verdict.progress), (8, 1, 1));
        for filter in [Filter::NoPut, Filter::NoDelete] {
            let watch = Watch { filter: Some(filter), prev_kv: false, ..watch(2) };
            let verdict = judged(&watch, &right(&watch, &history(), Some(1), 2), 1);
            assert_eq!((wrongs(&verdict), verdict.events > 0), (vec![], true));
        }
    }

    #[test]
    fn each_wrong_is_found() {
        // Lines: opened, created, 2, 4, 5, 6, 7, 9, progress.
        assert_eq!(doctored(|_| {}), []);
        assert_eq!(doctored(|record| drop(record.remove(5))), [Wrong::Lost]);
        assert_eq!(doctored(|record| drop(record.drain(7..))), [Wrong::Lost], "the end is missing");
        assert_eq!(doctored(|record| record.insert(4, record[3].clone())), [Wrong::Double]);
        assert!(doctored(|record| record.swap(5, 6)).contains(&Wrong::Disorder));
        assert!(
            doctored(|record| events(&mut record[4]).reverse()).contains(&Wrong::Disorder),
            "in a revision"
        );
        assert_eq!(doctored(|record| events(&mut record[3])[0].value = "x".into()), [Wrong::Content]);
        assert_eq!(doctored(|record| events(&mut record[3])[0].create = 1), [Wrong::Content]);
        assert_eq!(doctored(|record| events(&mut record[3])[0].version = 7), [Wrong::Content]);
        assert_eq!(doctored(|record| events(&mut record[3])[0].lease = 7), [Wrong::Content]);
        assert_eq!(doctored(|record| events(&mut record[4])[0].prev = None), [Wrong::Prev]);
        let prev = Prev { value: "x".into(), revision: 2, create: 2, version: 1 };
        assert_eq!(doctored(|record| events(&mut record[3])[0].prev = Some(prev)), [Wrong::Prev]);
        assert!(doctored(|record| events(&mut record[3])[0].key = "/b/x".into()).contains(&Wrong::Foreign));
        assert!(doctored(|record| events(&mut record[3])[0].key = "/a/z".into()).contains(&Wrong::Invented));
        let progress = |revision| line(Seen::Progress { revision });
        assert!(doctored(|record| record.insert(4, progress(5))).contains(&Wrong::ProgressAhead));
        assert!(doctored(|record| record.insert(4, progress(5))).contains(&Wrong::AfterProgress));
        assert_eq!(doctored(|record| record.insert(4, progress(3))), [Wrong::ProgressBack]);
        assert_eq!(doctored(|record| record.insert(3, progress(3))), [], "no event of the range at 3");
        assert_eq!(doctored(|record| record.swap(1, 2)), [Wrong::Created]);
        assert_eq!(doctored(|record| record.insert(4, record[1].clone())), [Wrong::Created]);
        assert_eq!(doctored(|record| drop(record.drain(1..))), [Wrong::Created], "never stood");
        assert_eq!(doctored(|record| record.clear()), [Wrong::Created], "never opened");
    }

    #[test]
    fn half_a_revision_is_found_where_responses_are_whole() {
        let watch = watch(2);
        let mut record = right(&watch, &history(), Some(1), 2);
        let second = events(&mut record[4]).split_off(1);
        record.insert(5, line(Seen::Events { header: Some(5), events: second }));
        let found = wrongs(&judged(&watch, &record, 1));
        assert!(found.contains(&Wrong::Half) && found.contains(&Wrong::Header), "{found:?}");
        let case = Case {
            watch: &watch,
            whole: false,
            revocable: false,
            tells_why: true,
            stood_by: 1,
            last: Some(LAST),
        };
        assert_eq!(wrongs(&judge(&case, &record, &history())), []);
    }

    #[test]
    fn a_header_speaks_of_nothing_that_did_not_come() {
        let header = |value| {
            doctored(|record| {
                if let Seen::Events { header, .. } = &mut record[3].seen {
                    *header = Some(value);
                }
            })
        };
        assert_eq!([header(3), header(4), header(5)], [vec![Wrong::Header], vec![], vec![Wrong::Header]]);
    }

    #[test]
    fn created_is_never_ahead_of_etcd() {
        let watch = watch(0);
        let mut record = right(&watch, &history(), Some(9), 10);
        record.truncate(2);
        record[1].at = -501;
        let case =
            Case { watch: &watch, whole: true, tells_why: true, revocable: false, stood_by: 9, last: None };
        assert_eq!(wrongs(&judge(&case, &record, &history())), [Wrong::Header]);
        record[1].at = -500;
        assert_eq!(wrongs(&judge(&case, &record, &history())), []);
    }

    #[test]
    fn from_now_begins_after_created() {
        let watch = watch(0);
        let record = |from| right(&watch, &history(), Some(5), from);
        assert_eq!(wrongs(&judged(&watch, &record(6), 0)), []);
        assert_eq!(wrongs(&judged(&watch, &record(5), 0)), [Wrong::TooEarly]);
        assert_eq!(wrongs(&judged(&watch, &record(7), 0)), [Wrong::Lost]);
    }

    #[test]
    fn from_an_unknown_now_begins_no_later_than_it_stood() {
        let watch = watch(0);
        let record = |from| right(&watch, &history(), None, from);
        assert_eq!(wrongs(&judged(&watch, &record(6), 5)), []);
        assert_eq!(wrongs(&judged(&watch, &record(4), 5)), [], "earlier is fine");
        assert_eq!(wrongs(&judged(&watch, &record(7), 5)), [Wrong::Lost]);
        let mut gap = record(4);
        gap.remove(4);
        assert_eq!(wrongs(&judged(&watch, &gap, 6)), [Wrong::Lost], "earlier, but with a gap");
        let mut silent = record(4);
        silent.drain(2..);
        assert_eq!(wrongs(&judged(&watch, &silent, 6)), [Wrong::Lost]);
        silent.push(line(Seen::Progress { revision: LAST }));
        assert_eq!(wrongs(&judged(&watch, &silent, 6)), [Wrong::ProgressAhead]);
    }

    #[test]
    fn a_previous_value_may_be_missing_only_where_it_was_compacted() {
        let missing = |at, line: usize| {
            let watch = watch(2);
            let mut record = right(&watch, &history(), Some(1), 2);
            record[line].at = at;
            events(&mut record[line])[0].prev = None;
            let verdict = judged(&watch, &record, 1);
            (wrongs(&verdict), verdict.prev_compacted)
        };
        assert_eq!(missing(1_000_000, 3), (vec![], 1));
        assert_eq!(missing(0, 3), (vec![Wrong::Prev], 0), "not yet compacted");
        assert_eq!(missing(1_000_000, 4), (vec![Wrong::Prev], 0), "compacted up to 4, event at 5");
    }

    /// Ends the right record after its line `cut`, and opens it again.
    fn reopened(watch: &Watch, cut: usize, end: Seen, at: i64, start: i64) -> Verdict {
        let mut record = right(watch, &history(), Some(1), 2);
        record.truncate(cut);
        record.push(Line { at, seen: end });
        let again = Watch { start, ..watch.clone() };
        record.extend(right(&again, &history(), Some(9), start));
        judged(watch, &record, 1)
    }

    #[test]
    fn an_end_by_compaction_is_explained_by_a_compaction_above_the_next_revision() {
        let end = |revision| Seen::Compacted { revision: Some(revision) };
        let good = reopened(&watch(2), 3, end(4), 1_000_000, 4);
        assert_eq!((wrongs(&good), good.compacted.len(), good.incarnations), (vec![], 1, 2));
        let mut late = vec![Line { at: 1_000_001, seen: Seen::Opened { start: 2 } }];
        late.extend([Seen::Created { revision: Some(9) }, end(4)].map(|seen| Line { at: 1_000_002, seen }));
        let case = Case {
            watch: &watch(2),
            whole: true,
            revocable: false,
            tells_why: true,
            stood_by: 1,
            last: None,
        };
        let verdict = judge(&case, &late, &history());
        assert_eq!((wrongs(&verdict), verdict.compacted.len(), verdict.asked_late), (vec![], 0, 1));
        assert_eq!(wrongs(&reopened(&watch(2), 4, end(4), 1_000_000, 4)), [Wrong::Compacted], "4 had come");
        assert_eq!(
            wrongs(&reopened(&watch(2), 3, end(4), 0, 4)),
            [Wrong::Compacted],
            "before it was asked for"
        );
        assert_eq!(
            wrongs(&reopened(&watch(2), 3, end(5), 1_000_000, 5)),
            [Wrong::Compacted],
            "never asked for"
        );
    }

    #[test]
    fn another_end_is_explained_by_a_missing_right_only() {
        let end = |message: &str| Seen::Ended { code: "Unknown".into(), message: message.into() };
        let denied = end("rpc error: code = PermissionDenied desc = etcdserver: permission denied");
        let good = reopened(&watch(2), 4, denied.clone(), 2_500_000, 5);
        assert_eq!((wrongs(&good), good.denied.len()), (vec![], 1));
        assert_eq!(wrongs(&reopened(&watch(2), 4, denied.clone(), 1_000_000, 5)), [Wrong::Ended]);
        assert_eq!(wrongs(&reopened(&watch(2), 4, end("channel closed"), 2_500_000, 5)), [Wrong::Ended]);
        let mut record = right(&watch(2), &history(), Some(1), 2);
        record.truncate(4);
        let stood = record.clone();
        record.push(Line { at: 2_500_000, seen: denied });
        let watch = watch(2);
        let case = |revocable| Case {
            watch: &watch,
            whole: true,
            revocable,
            tells_why: false,
            stood_by: 1,
            last: None,
        };
        assert_eq!(
            wrongs(&judge(&case(false), &record, &history())),
            [Wrong::Ended],
            "nobody took its right"
        );
        record.remove(1);
        let refused = judge(&case(true), &record, &history());
        assert_eq!(
            (wrongs(&refused).contains(&Wrong::Ended), refused.denied.len(), refused.refused),
            (false, 0, 1)
        );
        let mute = Line { at: 2_500_000, seen: Seen::Ended { code: String::new(), message: String::new() } };
        let record = [stood, vec![mute]].concat();
        assert_eq!(judge(&case(true), &record, &history()).denied.len(), 1);
        let talks = Case { tells_why: true, ..case(true) };
        assert_eq!(wrongs(&judge(&talks, &record, &history())), [Wrong::Ended], "without a word");
    }

    #[test]
    fn nothing_comes_after_an_end() {
        let found = doctored(|record| record.insert(4, line(Seen::Compacted { revision: Some(3) })));
        assert_eq!(found, [Wrong::Created, Wrong::Compacted]);
    }
}
