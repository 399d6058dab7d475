//! Holds what one client stream saw against what really happened.
//!
//! Owns: what was asked on the stream and what was told, and every promise of a watch: only what was asked for, in order,
//! each once, whole revisions, true previous values, progress that hides nothing, a true end; one Created per create in
//! request order, etcd's ids, real headers. Must not know: Keyward, members, how the answers came about.

use bytes::Bytes;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

use keyward::pb::etcdserverpb::WatchResponse;
use keyward::pb::mvccpb::Event;

use crate::counts::{Counts, What};
use crate::model::store::is_delete;
use crate::truth::{Truth, Wanted};

pub(crate) const DUPLICATE: &str = "mvcc: duplicate watch ID provided on the WatchStream";
pub(crate) const EMPTY_RANGE: &str = "mvcc: watcher range is empty";
pub(crate) const COMPACTED: &str = "etcdserver: mvcc: required revision has been compacted";
const NO_WATCH: i64 = -1;

/// A broken promise, in words.
pub(crate) type Checked = Result<(), String>;

/// What a client asked of a watch.
#[derive(Clone, Debug)]
pub(crate) struct Asked {
    /// Unlike any other's in the run.
    pub(crate) serial: u64,
    /// The serial of the first create that a member cannot tell from this one.
    pub(crate) form: u64,
    pub(crate) range_end: Bytes,
    pub(crate) wanted: Wanted,
    pub(crate) id: i64,
    pub(crate) start: i64,
    pub(crate) fragment: bool,
    pub(crate) notify: bool,
    pub(crate) prev_kv: bool,
    /// An end before its key: refused whatever comes.
    pub(crate) inverted: bool,
    /// The era in which it was asked, and what its client's connection had been shown then.
    pub(crate) era: usize,
    pub(crate) shown: i64,
    /// The era that its client's connection may have known of.
    pub(crate) known: usize,
    /// The era in which its client was shown the revision that it begins after, if it ever was.
    pub(crate) heard: usize,
}

/// What the checker must know of the world beside its history.
pub(crate) struct Surroundings<'a> {
    pub(crate) truth: &'a Truth,
    pub(crate) terms: u64,
    pub(crate) members: usize,
    /// Refusals of a create since it was last let in, by form: how often, and the last one's words.
    pub(crate) refusals: &'a BTreeMap<u64, Refused>,
    /// Creates and revisions whose events some member sent without previous values.
    pub(crate) without_previous: &'a BTreeSet<(u64, i64)>,
    /// Whether watches of one form may share an upstream watch.
    pub(crate) shares: bool,
    /// Whether every member tells refusals exactly (V6, V7).
    pub(crate) exact: Exact,
    pub(crate) auth: bool,
}

/// How the members of a run tell refusals.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Exact {
    All,
    Some,
    None,
}

/// How upstream refused a create.
#[derive(Clone, Debug, Default)]
pub(crate) struct Refused {
    pub(crate) times: u32,
    pub(crate) reason: String,
    /// Of all creates of the form: where watches share an upstream watch, the last may be the shared one's.
    pub(crate) reasons: BTreeSet<String>,
    /// Whether the last one came from a member that says so exactly.
    pub(crate) exact: bool,
    /// When the stream of the first one was opened: of the creates of the form, the stream that was opened first. When the token of
    /// the last one had last been seen to be good.
    pub(crate) first: u64,
    pub(crate) proof: u64,
    /// Whether the token of one was seen to be good after the stream of an earlier one was opened.
    pub(crate) is_proven: bool,
}

struct Seen {
    asked: Asked,
    /// The first revision that was not told whole.
    next: i64,
    /// How many events of `next` were told, in fragments.
    told_of_next: usize,
    in_fragments: bool,
    /// The highest revision that the client has proof of for this watch: event, progress, Created of one from now.
    proven: i64,
    /// The highest progress.
    progress: i64,
    /// In which eras' histories all of this can be.
    eras: BTreeSet<usize>,
    compacted: bool,
}

/// One client stream.
#[derive(Default)]
pub(crate) struct Checker {
    waiting: VecDeque<Asked>,
    watches: BTreeMap<i64, Seen>,
    /// Ids of watches that were denied while they lived: not given again, for the client may be about to cancel one.
    denied: BTreeSet<i64>,
    /// Cancels without an ack; and whether their watch was not told of yet when they were sent.
    cancels: BTreeMap<i64, CancelOf>,
    next_id: i64,
    /// The highest header.revision that this stream was shown, and in which era.
    shown: (usize, i64),
    /// The highest header.revision that it was ever shown, and in which era.
    highest: (usize, i64),
    /// The last progress of all, and how often it was below the one before.
    told: i64,
    went_back: usize,
    pub(crate) progress_told: u64,
    /// The watch whose revision is being told in fragments.
    fragments_of: Option<i64>,
    /// The clusters whose headers it saw.
    clusters: BTreeSet<u64>,
    pub(crate) counts: Counts,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CancelOf {
    Told,
    Untold(u64),
}

fn ensure(holds: bool, why: impl FnOnce() -> String) -> Checked {
    if holds { Ok(()) } else { Err(why()) }
}

impl Checker {
    // ---- what the client asks

    pub(crate) fn creates(&mut self, asked: Asked) {
        self.counts.one(What::Creates);
        self.waiting.push_back(asked);
    }

    /// Ids that may be cancelled now: told, not cancelled yet, and no create waits that names them.
    pub(crate) fn cancelable(&self) -> Vec<i64> {
        let free =
            |id: &&i64| !self.cancels.contains_key(id) && !self.waiting.iter().any(|asked| asked.id == **id);
        self.watches.keys().filter(free).copied().collect()
    }

    pub(crate) fn cancels(&mut self, id: i64) {
        self.cancels.insert(id, CancelOf::Told);
    }

    /// The id of the create that was asked last, if it may be cancelled before it was told: it was chosen, and names
    /// nothing else.
    pub(crate) fn cancelable_untold(&self) -> Option<(i64, u64)> {
        let last = self.waiting.back().filter(|asked| asked.id != 0)?;
        let alone = !self.watches.contains_key(&last.id)
            && !self.cancels.contains_key(&last.id)
            // One that etcd gives might be the same.
            && self.waiting.iter().filter(|asked| asked.id == last.id || asked.id == 0).count() == 1;
        alone.then_some((last.id, last.serial))
    }

    pub(crate) fn cancels_untold(&mut self, id: i64, serial: u64) {
        self.cancels.insert(id, CancelOf::Untold(serial));
    }

    /// The highest revision that this stream was shown in the present era.
    pub(crate) fn shown_in(&self, era: usize) -> i64 {
        if self.shown.0 == era { self.shown.1 } else { 0 }
    }

    /// The highest header.revision that this stream was ever shown, and its era.
    pub(crate) fn highest(&self) -> (usize, i64) {
        self.highest
    }

    /// The newest era that this stream has heard of: a restored history looks like the old one.
    pub(crate) fn known_era(&self, truth: &Truth) -> usize {
        let heard = |era: &usize| {
            truth.eras[*era].base.is_some() || self.clusters.contains(&truth.eras[*era].store.cluster_id())
        };
        (0..=truth.index()).rev().find(heard).unwrap_or(0)
    }

    pub(crate) fn open(&self) -> usize {
        self.watches.len() + self.waiting.len()
    }

    /// The serials of the watches that live.
    pub(crate) fn living(&self) -> impl Iterator<Item = (i64, &Asked)> {
        self.watches.iter().filter(|(_, seen)| !seen.compacted).map(|(id, seen)| (*id, &seen.asked))
    }

    // ---- what the client sees

    pub(crate) fn saw(&mut self, around: &Surroundings<'_>, response: &WatchResponse) -> Checked {
        let header = response.header.as_ref().ok_or("an answer without a header")?;
        let truth = around.truth;
        let real = (1..=around.members as u64).contains(&header.member_id)
            && (2..=around.terms).contains(&header.raft_term)
            && truth.has_header(header.cluster_id, header.revision);
        ensure(real, || format!("no member ever had this header: {header:?}"))?;
        if let Some(id) = self.fragments_of {
            let goes_on = response.watch_id == id && !response.events.is_empty();
            ensure(goes_on, || format!("{response:?} between two fragments of {id}"))?;
        }
        let revision = header.revision;
        self.clusters.insert(header.cluster_id);
        if response.created {
            self.saw_created(around, response, header.cluster_id, revision)?;
        } else if response.canceled {
            self.saw_canceled(around, response, revision)?;
        } else if response.events.is_empty() {
            self.saw_progress(truth, response, revision)?;
        } else {
            self.saw_events(around, response, revision)?;
        }
        let now = truth.index();
        if revision > self.highest.1 {
            // A revision that the present history has not reached was shown of an older one: Keyward lets no header go back.
            self.highest = (truth.era_of(header.cluster_id, revision).unwrap_or(now), revision);
        }
        if self.shown.0 < now {
            // What was shown before counts no more: history is another.
            self.shown = (now, 0);
        }
        if truth.eras[now].store.cluster_id() == header.cluster_id && revision <= truth.now().head() {
            self.shown.1 = self.shown.1.max(revision);
        }
        Ok(())
    }

    fn saw_created(
        &mut self,
        around: &Surroundings<'_>,
        response: &WatchResponse,
        cluster: u64,
        revision: i64,
    ) -> Checked {
        let asked = self.waiting.pop_front().ok_or("a Created that answers no create")?;
        ensure(response.events.is_empty() && !response.fragment, || {
            format!("a Created with more: {response:?}")
        })?;
        if response.canceled {
            return self.saw_refused(around, response, &asked);
        }
        ensure(!asked.inverted, || format!("an empty range was let in: {asked:?}"))?;
        let id = if asked.id == 0 {
            while self.watches.contains_key(&self.next_id) || self.denied.contains(&self.next_id) {
                self.next_id += 1;
            }
            self.next_id += 1;
            self.next_id - 1
        } else {
            ensure(!self.watches.contains_key(&asked.id), || {
                format!("a duplicate id was let in: {asked:?}")
            })?;
            self.counts.one(What::ChosenIds);
            asked.id
        };
        ensure(response.watch_id == id, || {
            format!("id {} where etcd gives {id}: {asked:?}", response.watch_id)
        })?;
        let truth = around.truth;
        let from_now = asked.start == 0;
        // Of a watch from some revision on, Created says nothing but that header fields do not go back.
        let possible = |era: &usize| {
            truth.eras[*era].store.cluster_id() == cluster
                && (!from_now || revision <= truth.eras[*era].head())
        };
        let eras: BTreeSet<usize> = (asked.era..=truth.index()).filter(possible).collect();
        ensure(!eras.is_empty(), || format!("Created at {revision} of a history that is gone: {asked:?}"))?;
        if from_now && asked.era == truth.index() {
            let shown = asked.shown;
            ensure(revision >= shown, || {
                format!("from now is before {shown}, which was shown: {response:?}")
            })?;
        }
        let next = if from_now { revision + 1 } else { asked.start.max(1) };
        let proven = if from_now { revision } else { 0 };
        self.denied.remove(&id);
        if let Some(cancel) = self.cancels.get_mut(&id) {
            *cancel = CancelOf::Told;
        }
        let seen = Seen {
            asked,
            next,
            told_of_next: 0,
            in_fragments: false,
            proven,
            progress: proven,
            eras,
            compacted: false,
        };
        self.watches.insert(id, seen);
        Ok(())
    }

    fn saw_refused(&mut self, around: &Surroundings<'_>, response: &WatchResponse, asked: &Asked) -> Checked {
        if self.cancels.get(&asked.id) == Some(&CancelOf::Untold(asked.serial)) {
            // Nothing to cancel: no ack either.
            self.cancels.remove(&asked.id);
        }
        let in_use = self.watches.contains_key(&asked.id);
        let reason = response.cancel_reason.as_str();
        if reason == DUPLICATE {
            ensure(asked.id != 0 && in_use, || format!("no duplicate: {asked:?}"))?;
            self.counts.one(What::Duplicates);
            return ensure(response.watch_id == NO_WATCH, || format!("not -1: {response:?}"));
        }
        if reason == EMPTY_RANGE {
            ensure(asked.inverted, || format!("no empty range: {asked:?}"))?;
            return ensure(response.watch_id == NO_WATCH, || format!("not -1: {response:?}"));
        }
        if reason == COMPACTED {
            // Told by a member, or before one without this refusal is asked: it would cost other watches their events.
            ensure(asked.start < 0, || format!("compacted at once: {asked:?}"))?;
            return ensure(response.watch_id == NO_WATCH, || format!("not -1: {response:?}"));
        }
        let exact = response.watch_id == NO_WATCH;
        let allowed = match around.exact {
            Exact::All => exact,
            Exact::None => response.watch_id == if in_use { NO_WATCH } else { asked.id },
            Exact::Some => exact || (response.watch_id == asked.id && !in_use),
        };
        ensure(allowed, || format!("a refusal of another watch: {response:?} to {asked:?}"))?;
        self.check_refusal(around, asked, reason)
    }

    /// A refusal is told only after a fresh credential was tried where one might have helped.
    fn check_refusal(&mut self, around: &Surroundings<'_>, asked: &Asked, reason: &str) -> Checked {
        let none = Refused::default();
        let refused = around.refusals.get(&asked.form).unwrap_or(&none);
        ensure(refused.times > 0, || format!("{reason:?}, but no member refused {asked:?}"))?;
        let is_said = if around.shares { refused.reasons.contains(reason) } else { refused.reason == reason };
        ensure(is_said, || format!("{reason:?} is not what a member said: {refused:?}"))?;
        let curable = reason.contains("invalid auth token") || !refused.exact;
        let is_proven = if around.shares { refused.is_proven } else { refused.proof > refused.first };
        let enough = !curable || (refused.times >= 2 && (!around.auth || is_proven));
        ensure(enough, || format!("{reason:?} told after {refused:?} of {asked:?}"))?;
        self.counts.one(What::RefusedTold);
        Ok(())
    }

    fn saw_canceled(
        &mut self,
        around: &Surroundings<'_>,
        response: &WatchResponse,
        revision: i64,
    ) -> Checked {
        let id = response.watch_id;
        ensure(response.events.is_empty() && !response.fragment, || {
            format!("an end with more: {response:?}")
        })?;
        if response.compact_revision != 0 {
            ensure(revision == 0, || format!("etcd tells a compaction with revision 0: {response:?}"))?;
            let seen =
                self.watches.get_mut(&id).ok_or_else(|| format!("compaction of no watch: {response:?}"))?;
            ensure(!seen.compacted, || format!("told twice: {response:?}"))?;
            let swapped = seen.may_end(around.truth, response.compact_revision)?;
            seen.compacted = true;
            self.counts.one(if swapped { What::SwapsTold } else { What::Compacted });
            return Ok(());
        }
        if response.cancel_reason.is_empty() {
            let cancel = self.cancels.remove(&id);
            ensure(cancel == Some(CancelOf::Told), || format!("an ack of no cancel: {response:?}"))?;
            let was = self.watches.remove(&id);
            ensure(was.is_some(), || format!("an ack of no watch: {response:?}"))?;
            self.counts.one(What::Cancels);
            return Ok(());
        }
        let seen = self.watches.remove(&id).ok_or_else(|| format!("a denial of no watch: {response:?}"))?;
        ensure(!seen.compacted, || format!("ended twice: {response:?}"))?;
        self.cancels.remove(&id);
        self.denied.insert(id);
        self.check_refusal(around, &seen.asked, &response.cancel_reason)
    }

    fn saw_progress(&mut self, truth: &Truth, response: &WatchResponse, revision: i64) -> Checked {
        let all = response.watch_id == NO_WATCH;
        if all {
            // Once for each time that history did.
            let before = self.told;
            self.went_back += usize::from(revision < before);
            ensure(self.went_back <= truth.index(), || {
                format!("progress went back from {before} to {revision}")
            })?;
            self.told = revision;
            self.progress_told += 1;
        } else {
            let id = response.watch_id;
            let seen = self.watches.get(&id).ok_or_else(|| format!("progress of no watch: {response:?}"))?;
            ensure(seen.asked.notify, || format!("progress that nobody asked for: {response:?}"))?;
            ensure(!seen.compacted, || format!("progress after the end: {response:?}"))?;
        }
        for (id, seen) in self.watches.iter_mut().filter(|(_, seen)| !seen.compacted) {
            if all || *id == response.watch_id {
                seen.progress(truth, revision).map_err(|why| format!("{why}: watch {id}, {response:?}"))?;
            }
        }
        self.counts.one(What::ProgressTold);
        Ok(())
    }

    fn saw_events(&mut self, around: &Surroundings<'_>, response: &WatchResponse, revision: i64) -> Checked {
        let truth = around.truth;
        let id = response.watch_id;
        let seen = self.watches.get_mut(&id).ok_or_else(|| format!("events of no watch: {response:?}"))?;
        ensure(!seen.compacted, || format!("events after the end: {response:?}"))?;
        ensure(!response.fragment || seen.asked.fragment, || {
            format!("fragments that nobody asked for: {response:?}")
        })?;
        for event in &response.events {
            seen.event(around, event)
                .map_err(|why| format!("{why}: watch {id} {:?}, {event:?}", seen.asked))?;
            if event.prev_kv.is_some() {
                self.counts.one(What::PrevKvs);
            }
        }
        let last = response.events.last().and_then(|event| event.kv.as_ref()).map_or(0, |kv| kv.mod_revision);
        seen.in_fragments = response.fragment;
        self.fragments_of = response.fragment.then_some(id);
        if !response.fragment {
            ensure(seen.is_whole(truth), || format!("half a revision: watch {id}, {response:?}"))?;
            ensure(revision == last, || format!("a header that is not what was delivered: {response:?}"))?;
        }
        ensure(revision >= last, || format!("a header behind what was delivered: {response:?}"))?;
        self.counts.more(What::Events, response.events.len() as u64);
        self.counts.more(What::Pieces, u64::from(response.fragment));
        Ok(())
    }

    // ---- after all came to rest

    /// Everything that must have come has come.
    pub(crate) fn check_all_arrived(&self, truth: &Truth) -> Checked {
        ensure(self.waiting.is_empty(), || format!("creates without an answer: {:?}", self.waiting))?;
        ensure(self.cancels.is_empty(), || format!("cancels without an answer: {:?}", self.cancels))?;
        for (id, seen) in self.watches.iter().filter(|(_, seen)| !seen.compacted) {
            ensure(!seen.in_fragments, || format!("watch {id} never got the last fragment"))?;
            seen.is_complete(truth).map_err(|why| format!("watch {id} {:?}: {why}", seen.asked))?;
        }
        Ok(())
    }

    /// Whether a progress must be answered now, and at which revision.
    pub(crate) fn progress_is_due(&self, truth: &Truth) -> bool {
        let head = truth.now().head();
        let mut living = self.living().peekable();
        living.peek().is_some() && living.all(|(_, asked)| asked.start <= head)
    }

    pub(crate) fn told_progress(&self) -> i64 {
        self.told
    }

    /// The ids of living watches, for a trace.
    pub(crate) fn ids(&self) -> Vec<i64> {
        self.watches.keys().copied().collect()
    }
}

impl Seen {
    /// The eras that it may be in by now.
    fn reachable(&self, truth: &Truth) -> BTreeSet<usize> {
        let mut eras = BTreeSet::new();
        for &era in &self.eras {
            let mut era = era;
            eras.insert(era);
            while truth.goes_on(era, self.proven.max(if self.told_of_next > 0 { self.next } else { 0 })) {
                era += 1;
                eras.insert(era);
            }
        }
        eras
    }

    fn event(&mut self, around: &Surroundings<'_>, event: &Event) -> Checked {
        let truth = around.truth;
        let revision = event.kv.as_ref().map_or(0, |kv| kv.mod_revision);
        ensure(revision > self.progress, || format!("an event after its progress {}", self.progress))?;
        ensure(self.asked.wanted.has(event), || "an event that nobody asked for".to_owned())?;
        let expected = |era: usize| {
            let history = &truth.eras[era];
            let mut from = self.next;
            if self.told_of_next > 0 {
                // The rest of the revision that is being told, then the next one.
                let rest = history.of(from, &self.asked.wanted).nth(self.told_of_next);
                if let Some(event) = rest {
                    return Some((from, self.told_of_next, event));
                }
                from += 1;
            }
            let next = history.next(from, revision, &self.asked.wanted)?;
            history.of(next, &self.asked.wanted).next().map(|event| (next, 0, event))
        };
        let same = |theirs: &Event| theirs.r#type == event.r#type && theirs.kv == event.kv;
        let mut eras: BTreeSet<usize> = self
            .reachable(truth)
            .into_iter()
            .filter(|era| expected(*era).is_some_and(|(.., theirs)| same(theirs)))
            .collect();
        // Two histories may have the same event, after another value.
        let told_apart: BTreeSet<usize> =
            eras.iter().filter(|era| self.previous(around, **era, event).is_ok()).copied().collect();
        if !told_apart.is_empty() {
            eras = told_apart;
        }
        let Some(&era) = eras.first() else {
            let wanted: Vec<_> = self.reachable(truth).into_iter().map(|era| (era, expected(era))).collect();
            return Err(format!(
                "gap, double, disorder or an event that never happened; next was {wanted:?}"
            ));
        };
        let (_, index, _) = expected(era).ok_or("an event")?;
        self.previous(around, era, event)?;
        self.eras = eras;
        self.next = revision;
        self.told_of_next = index + 1;
        self.proven = self.proven.max(revision);
        Ok(())
    }

    fn previous(&self, around: &Surroundings<'_>, era: usize, event: &Event) -> Checked {
        let truth = around.truth;
        let Some(given) = &event.prev_kv else {
            let kv = event.kv.as_ref().ok_or("an event without a key")?;
            let history = &truth.eras[era];
            let none = history.before(event).is_none();
            let made = !is_delete(event) && kv.create_revision == kv.mod_revision;
            let lost = history.store.compacted() >= kv.mod_revision
                || around.without_previous.contains(&(self.asked.form, kv.mod_revision));
            return ensure(!self.asked.prev_kv || none || made || lost, || {
                "the previous value is missing".to_owned()
            });
        };
        ensure(self.asked.prev_kv, || "a previous value that nobody asked for".to_owned())?;
        let real = truth.eras[era].before(event);
        ensure(real == Some(given), || format!("the previous value was {real:?}"))
    }

    /// Ends the revision that was being told.
    fn is_whole(&mut self, truth: &Truth) -> bool {
        let whole =
            |era: &usize| truth.eras[*era].of(self.next, &self.asked.wanted).count() == self.told_of_next;
        let eras: BTreeSet<usize> = self.eras.iter().filter(|era| whole(era)).copied().collect();
        if eras.is_empty() {
            return false;
        }
        self.eras = eras;
        self.next += 1;
        self.told_of_next = 0;
        true
    }

    fn progress(&mut self, truth: &Truth, revision: i64) -> Checked {
        ensure(revision >= self.progress.max(self.next - 1).min(self.proven), || {
            format!("progress {revision} goes back: {} was told", self.proven)
        })?;
        let hides_nothing = |era: &usize| {
            let history = &truth.eras[*era];
            revision <= history.head() && history.next(self.next, revision, &self.asked.wanted).is_none()
        };
        let eras: BTreeSet<usize> = self.reachable(truth).into_iter().filter(hides_nothing).collect();
        ensure(!eras.is_empty(), || {
            format!("progress {revision} ahead of what was delivered, next {}", self.next)
        })?;
        self.eras = eras;
        self.progress = self.progress.max(revision);
        // Below its start there was nothing to tell.
        if revision >= self.asked.start {
            self.proven = self.proven.max(revision);
        }
        self.next = self.next.max(revision + 1);
        Ok(())
    }

    /// Whether it may be told a compaction at `compacted`. Whether that is since history is another.
    fn may_end(&self, truth: &Truth, compacted: i64) -> Result<bool, String> {
        let reachable = self.reachable(truth);
        let needs = self.next.max(self.asked.start);
        let real = |era: &usize| truth.eras[*era].compactions.contains(&compacted) && needs < compacted;
        if reachable.iter().any(real) {
            return Ok(false);
        }
        // What it was asked after what was shown in another era may mean that era's.
        let relies = self.asked.known.min(self.asked.heard);
        let first = self.eras.first().copied().unwrap_or(relies).min(relies);
        let another = truth.went_back_since(first);
        ensure(another, || {
            format!(
                "compacted at {compacted}, but next was {needs}: {:?}, {:?}",
                self.asked,
                truth.now().compactions
            )
        })?;
        Ok(true)
    }

    fn is_complete(&self, truth: &Truth) -> Checked {
        let now = truth.index();
        let reachable = self.reachable(truth);
        ensure(reachable.contains(&now), || {
            format!("follows a history that is gone ({reachable:?} of {now}), proven {}", self.proven)
        })?;
        let missing = truth.now().next(self.next, i64::MAX, &self.asked.wanted);
        ensure(missing.is_none(), || format!("never got revision {missing:?}, next was {}", self.next))
    }
}
