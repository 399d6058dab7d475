//! When two transcripts of one step are the same, and what kinds of answer are in them.
//!
//! Owns: what is compared and what is left to timing. Invariant: every field of every answer is compared; left to timing is only the order
//! of answers that etcd itself does not promise:
//!
//! - Answers of *different* watches: the store hands a revision to its watches in the order of a Go map. Of one watch, the order counts.
//! - Created, refusals and acks against everything else: two channels, and Go's `select` takes either. Among each other their order counts,
//!   whatever their watch.
//! - Of id -1, which a client may choose and which is also the whole stream's, the same against its progress and its events.
//! - Answers that lie in the channel before their Created is out are sent right behind it, uncut; later ones are cut into fragments. Which
//!   it is, is up to the pass over watches that are behind (each 100 ms), so either is taken where a step creates such a watch.
//!
//! Nothing is left out: revisions, ids and the raft term are the server's own, since the model follows the server's whole life. Fragments
//! must follow one another with nothing between.

use std::collections::BTreeMap;

use keyward::pb::etcdserverpb::WatchResponse;

use crate::model::{
    store::{is_delete, key_of},
    stream::NO_WATCH,
};

use super::Counts;

/// Why two transcripts are not the same; `None` where they are.
pub(super) fn difference(told: &[WatchResponse], modelled: &[WatchResponse]) -> Option<String> {
    if let Some(torn) = torn(told) {
        return Some(torn);
    }
    let same = normal(told) == normal(modelled);
    (!same).then(|| format!("etcd said\n{}the model\n{}", shown(told), shown(modelled)))
}

/// Control answers in their order, and all answers of each watch in theirs.
fn normal(answers: &[WatchResponse]) -> (Vec<&WatchResponse>, BTreeMap<i64, Vec<&WatchResponse>>) {
    let control = answers.iter().filter(|answer| is_control(answer)).collect();
    let mut by_watch: BTreeMap<i64, Vec<_>> = BTreeMap::new();
    for answer in answers.iter().filter(|answer| answer.watch_id != NO_WATCH || !is_control(answer)) {
        by_watch.entry(answer.watch_id).or_default().push(answer);
    }
    (control, by_watch)
}

fn is_control(answer: &WatchResponse) -> bool {
    answer.created || (answer.canceled && answer.compact_revision == 0)
}

/// Something between two fragments of one answer.
fn torn(told: &[WatchResponse]) -> Option<String> {
    let broken = told.windows(2).find(|pair| {
        let follows = pair[0].watch_id == pair[1].watch_id && !pair[1].events.is_empty();
        pair[0].fragment && !(follows && pair[0].header == pair[1].header)
    });
    broken.map(|pair| format!("a fragment is not followed by its next:\n{}", shown(pair)))
}

/// For a person to read.
pub(super) fn shown(answers: &[WatchResponse]) -> String {
    answers.iter().map(|answer| format!("  {}\n", line(answer))).collect()
}

fn line(answer: &WatchResponse) -> String {
    let flags = [(answer.created, "created"), (answer.canceled, "canceled"), (answer.fragment, "fragment")];
    let flags: Vec<&str> = flags.into_iter().filter_map(|(set, name)| set.then_some(name)).collect();
    let header = answer.header.as_ref().map_or(-1, |header| header.revision);
    let mut line = format!("watch {} at {header} {}", answer.watch_id, flags.join(" "));
    if answer.compact_revision != 0 {
        line += &format!(" compacted {}", answer.compact_revision);
    }
    if !answer.cancel_reason.is_empty() {
        line += &format!(" {:?}", answer.cancel_reason);
    }
    for event in answer.events.iter().take(EVENTS_SHOWN) {
        let revision = event.kv.as_ref().map_or(0, |kv| kv.mod_revision);
        let sign = if is_delete(event) { '-' } else { '+' };
        let before = event.prev_kv.as_ref().map_or(String::new(), |kv| format!("({})", kv.mod_revision));
        line += &format!(" {sign}{}@{revision}{before}", String::from_utf8_lossy(key_of(event)));
    }
    if answer.events.len() > EVENTS_SHOWN {
        line += &format!(" and {} more", answer.events.len() - EVENTS_SHOWN);
    }
    line
}

const EVENTS_SHOWN: usize = 12;

/// Counts the kinds of answers in a transcript, of a server that compacted at `compacted`.
pub(super) fn count(answers: &[WatchResponse], compacted: i64, counts: &mut Counts) {
    let mut add = |kind, n: usize| *counts.entry(kind).or_default() += n as u64;
    add("responses", answers.len());
    for answer in answers {
        add(kind(answer), 1);
        let revision_of = |index: usize| {
            let event = answer.events.get(index)?;
            event.kv.as_ref().map(|kv| kv.mod_revision)
        };
        let same = (1..answer.events.len()).any(|index| revision_of(index) == revision_of(index - 1));
        let revisions = answer.events.chunk_by(|a, b| mod_revision(a) == mod_revision(b)).count();
        add("events, several of one revision", usize::from(same));
        add("batches cut at 1000 revisions", usize::from(revisions == 1000));
        let deletes = answer.events.iter().filter(|event| is_delete(event)).map(mod_revision);
        add("deletes, at the very compaction", deletes.clone().filter(|at| *at == compacted).count());
        add("deletes", deletes.count());
        add("previous values", answer.events.iter().filter(|event| event.prev_kv.is_some()).count());
        add("fragments", usize::from(answer.fragment));
    }
}

fn mod_revision(event: &keyward::pb::mvccpb::Event) -> i64 {
    event.kv.as_ref().map_or(0, |kv| kv.mod_revision)
}

fn kind(answer: &WatchResponse) -> &'static str {
    if answer.created && answer.canceled {
        return refusal(&answer.cancel_reason);
    }
    let live = answer.events.last().map(mod_revision) == answer.header.as_ref().map(|header| header.revision);
    match (answer.created, answer.canceled, answer.events.is_empty()) {
        (true, _, _) => "created",
        (_, true, _) if answer.compact_revision != 0 => "compacted",
        (_, true, _) => "canceled",
        (_, _, true) => "progress",
        _ if live => "events, live",
        _ => "events, caught up",
    }
}

fn refusal(reason: &str) -> &'static str {
    match reason {
        "mvcc: duplicate watch ID provided on the WatchStream" => "refused: duplicate id",
        "mvcc: watcher range is empty" => "refused: empty range",
        "etcdserver: mvcc: required revision has been compacted" => "refused: negative start",
        "rpc error: code = PermissionDenied desc = etcdserver: permission denied" => "refused: denied",
        "rpc error: code = Unauthenticated desc = etcdserver: invalid auth token" => "refused: token",
        "rpc error: code = InvalidArgument desc = etcdserver: user name is empty" => "refused: no user",
        _ => "refused: other",
    }
}
