//! The model's own rules, one by one: what the replay against real servers cannot reach (full channels, snapshots, slips between two
//! lines), and what is quicker to see here.

use bytes::Bytes;
use keyward::pb::etcdserverpb::{
    WatchCancelRequest, WatchCreateRequest, WatchProgressRequest, WatchRequest, WatchResponse,
    watch_create_request::FilterType, watch_request::RequestUnion,
};

use super::{
    flavor::Flavor,
    interval::{Interval, Rights},
    member::Member,
    send::Selected,
    store::{Entry, Op, Store, key_of},
    stream::{Limits, NO_WATCH, Refusal, WatchStream},
};

const OLD: Flavor = Flavor::V3_5_1;
const NEW: Flavor = Flavor::V3_5_35;

/// One member with one stream, all permitted.
struct World {
    store: Store,
    member: Member,
    stream: WatchStream,
}

impl World {
    fn new(flavor: Flavor) -> World {
        World::sized(flavor, Limits::default())
    }

    fn sized(flavor: Flavor, limits: Limits) -> World {
        let stream = WatchStream::new(flavor, limits);
        World { store: Store::new(7), member: Member::new(9, 2), stream }
    }

    fn put(&mut self, key: &str) -> i64 {
        let revision = self.store.txn(&[put(key, "v")]);
        self.apply();
        revision
    }

    fn delete(&mut self, key: &str) {
        self.store.txn(&[delete(key)]);
        self.apply();
    }

    fn compact(&mut self, revision: i64) {
        assert!(self.store.compact(revision));
        self.apply();
    }

    fn apply(&mut self) {
        while self.member.apply(&self.store, [&mut self.stream]).is_some() {}
    }

    fn ask(&mut self, create: WatchCreateRequest) {
        self.stream.request(of(RequestUnion::CreateRequest(create)));
    }

    fn cancel(&mut self, watch_id: i64) {
        self.stream.request(of(RequestUnion::CancelRequest(WatchCancelRequest { watch_id })));
    }

    fn progress(&mut self) {
        self.stream.request(of(RequestUnion::ProgressRequest(WatchProgressRequest {})));
    }

    fn receive(&mut self) -> bool {
        self.stream.receive(&self.store, &self.member, &|_| Ok(()))
    }

    fn sync(&mut self) -> bool {
        self.stream.sync(&self.store, &self.member)
    }

    fn send(&mut self, from: Selected) -> bool {
        self.stream.send(&self.store, &self.member, from)
    }

    /// Comes to rest, and reads what came.
    fn rest(&mut self) -> Vec<WatchResponse> {
        self.rest_as(&|_| Ok(()))
    }

    fn rest_as(&mut self, permit: super::stream::Permit<'_>) -> Vec<WatchResponse> {
        self.stream.rest(&self.store, &self.member, permit);
        assert!(self.stream.is_at_rest());
        self.read()
    }

    fn read(&mut self) -> Vec<WatchResponse> {
        let unread = self.stream.unread();
        let read: Vec<_> = std::iter::from_fn(|| self.stream.pop()).collect();
        assert_eq!(read.len(), unread);
        read
    }
}

fn of(union: RequestUnion) -> WatchRequest {
    WatchRequest { request_union: Some(union) }
}

fn put(key: &str, value: &str) -> Op {
    Op::Put { key: key.to_owned().into(), value: value.to_owned().into(), lease: 0 }
}

fn delete(key: &str) -> Op {
    Op::Delete { key: key.to_owned().into(), range_end: Bytes::new() }
}

/// A watch of `a`..`z` from a revision.
fn watch(start_revision: i64) -> WatchCreateRequest {
    WatchCreateRequest {
        key: "a".into(),
        range_end: "z".into(),
        start_revision,
        ..WatchCreateRequest::default()
    }
}

/// Revisions and keys of the events, by answer.
fn shown(answers: &[WatchResponse]) -> Vec<String> {
    let one = |answer: &WatchResponse| {
        let events = answer.events.iter().map(|event| {
            let kv = event.kv.as_ref().unwrap();
            let sign = if event.r#type == 1 { "-" } else { "+" };
            format!(" {sign}{}@{}", String::from_utf8_lossy(key_of(event)), kv.mod_revision)
        });
        let kind = match (answer.created, answer.canceled, answer.events.is_empty()) {
            (true, true, _) => "refused",
            (true, false, _) => "created",
            (false, true, _) if answer.compact_revision != 0 => "compacted",
            (false, true, _) => "canceled",
            (false, false, true) => "progress",
            (false, false, false) => "events",
        };
        let more = if answer.fragment { " ..." } else { "" };
        let header = answer.header.as_ref().unwrap();
        assert_eq!((header.cluster_id, header.member_id, header.raft_term), (7, 9, 2));
        format!("{} {kind} {}{}{more}", answer.watch_id, header.revision, events.collect::<String>())
    };
    answers.iter().map(one).collect()
}

#[test]
fn the_store_counts_as_etcd_does() {
    let mut store = Store::new(1);
    assert_eq!((store.revision(), store.compacted()), (1, -1));
    assert_eq!(store.txn(&[put("a", "1"), put("b", "1")]), 2);
    assert_eq!(store.txn(&[delete("nothing")]), 2, "nothing changed");
    assert_eq!(store.txn(&[put("a", "2")]), 3);
    assert_eq!(store.txn(&[Op::Delete { key: "a".into(), range_end: "\0".into() }, put("c", "1")]), 4);
    assert_eq!(store.txn(&[put("a", "3")]), 5);
    let kv = store.value(b"a", 3).unwrap();
    assert_eq!((kv.create_revision, kv.mod_revision, kv.version), (2, 3, 2));
    assert!(store.value(b"a", 4).is_none() && store.value(b"a", 1).is_none());
    assert_eq!(store.value(b"a", 9).unwrap().version, 1);
    let all: Vec<_> =
        store.events(0, 9, &"\0".into(), &"\0".into()).map(|(at, event)| (at, key_of(event))).collect();
    let expected: [(i64, &[u8]); 7] =
        [(2, b"a"), (2, b"b"), (3, b"a"), (4, b"a"), (4, b"b"), (4, b"c"), (5, b"a")];
    assert_eq!(all, expected);
    assert_eq!(store.events(3, 4, &"a".into(), &Bytes::new()).count(), 2);
    assert!(!store.compact(6), "the future");
    assert!(store.compact(4) && !store.compact(4) && store.compacted() == 4);
    assert_eq!(store.keys().map(|kv| kv.key.as_ref()).collect::<Vec<_>>(), [b"a", b"c"]);
    assert_eq!(store.events(0, 9, &"\0".into(), &"\0".into()).count(), 7, "the truth is not compacted");
}

#[test]
fn rights_are_judged_as_etcd_judges_them() {
    let rights =
        Rights::to([Interval::new(&"a/".into(), &"a0".into()), Interval::new(&"k".into(), &"".into())]);
    let may = |flavor, key: &str, end: &str| {
        rights.permit(flavor, &Interval::new(&key.to_owned().into(), &end.to_owned().into()))
    };
    for flavor in Flavor::ALL {
        assert!(may(flavor, "a/1", "") && may(flavor, "a/", "a0") && may(flavor, "a/1", "a/2"));
        assert!(!may(flavor, "a", "") && !may(flavor, "a/1", "b") && !may(flavor, "b", "c"));
        assert!(may(flavor, "a/2", "a/1") && !may(flavor, "c", "a/"), "inverted");
        assert!(may(flavor, "k", "k\0") && !may(flavor, "k", "l"));
        assert_eq!(may(flavor, "a/1", "\0"), !flavor.guards_open_end, "{flavor:?}");
        assert!(Rights::all().permit(flavor, &Interval::new(&"a".into(), &"\0".into())));
        assert!(!Rights::default().permit(flavor, &Interval::new(&"a".into(), &"".into())));
    }
}

#[test]
fn live_events_come_by_revision_and_backlog_in_batches_under_the_current_revision() {
    let mut world = World::sized(NEW, Limits { revisions: 2, ..Limits::default() });
    for _ in 2..=6 {
        world.put("b");
    }
    world.ask(watch(2));
    assert_eq!(
        shown(&world.rest()),
        ["0 created 6", "0 events 6 +b@2 +b@3", "0 events 6 +b@4 +b@5", "0 events 6 +b@6"]
    );
    world.put("c");
    world.put("zz");
    world.delete("b");
    assert_eq!(shown(&world.rest()), ["0 events 7 +c@7", "0 events 9 -b@9"]);
}

#[test]
fn a_lagging_member_tells_its_own_revision() {
    let mut world = World::new(NEW);
    world.store.txn(&[put("b", "1")]);
    world.store.txn(&[put("c", "1")]);
    assert_eq!(world.member.apply(&world.store, [&mut world.stream]), Some(Entry::Revision(2)));
    assert!(!world.member.is_current(&world.store));
    world.ask(watch(2));
    assert_eq!(shown(&world.rest()), ["0 created 2", "0 events 2 +b@2"]);
    assert!(world.member.apply(&world.store, [&mut world.stream]).is_some());
    assert!(world.member.is_current(&world.store) && world.member.applied() == 3);
    assert_eq!(shown(&world.rest()), ["0 events 3 +c@3"]);
}

#[test]
fn created_tells_the_revision_before_or_after_the_start_by_version() {
    for (flavor, created, event) in [(OLD, 2, 3), (NEW, 3, 3)] {
        let mut world = World::new(flavor);
        world.put("b");
        world.ask(watch(0));
        assert!(world.receive());
        // Between the two halves of a create.
        world.put("c");
        let answers = world.rest();
        assert_eq!(shown(&answers), [format!("0 created {created}"), format!("0 events 3 +c@{event}")]);
    }
}

#[test]
fn events_wait_for_their_created_whatever_is_sent_first() {
    let mut world = World::new(NEW);
    world.ask(watch(0));
    assert!(world.receive() && world.receive());
    world.put("b");
    assert!(world.send(Selected::Channel));
    assert!(world.read().is_empty(), "parked");
    world.put("c");
    assert!(world.stream.can_send(Selected::Control) && world.send(Selected::Control));
    assert_eq!(shown(&world.read()), ["0 created 1", "0 events 2 +b@2"]);
    assert!(world.stream.can_send(Selected::Channel) && world.send(Selected::Channel));
    assert_eq!(shown(&world.read()), ["0 events 3 +c@3"]);
    assert!(!world.send(Selected::Channel) && !world.send(Selected::Control));
}

#[test]
fn ids_are_chosen_or_counted_and_never_doubled() {
    let mut world = World::new(NEW);
    for id in [1, 0, 0, 1, -5, -5] {
        world.ask(WatchCreateRequest { watch_id: id, ..watch(0) });
    }
    let answers = world.rest();
    let ids: Vec<_> = answers.iter().map(|answer| answer.watch_id).collect();
    assert_eq!(ids, [1, 0, 2, -1, -5, -1]);
    assert_eq!(answers[3].cancel_reason, "mvcc: duplicate watch ID provided on the WatchStream");
    assert_eq!(world.stream.ids().collect::<Vec<_>>(), [-5, 0, 1, 2]);
    world.cancel(2);
    world.cancel(77);
    world.ask(watch(0));
    assert_eq!(shown(&world.rest()), ["2 canceled 1", "3 created 1"], "an unknown id has no answer");
}

#[test]
fn ranges_that_cannot_be_are_refused() {
    let mut world = World::new(OLD);
    for (key, end) in [("b", "b"), ("c", "b"), ("b", "\0"), ("", ""), ("", "\0"), ("b", "b\0")] {
        let (key, range_end) = (key.to_owned().into(), end.to_owned().into());
        world.ask(WatchCreateRequest { key, range_end, ..WatchCreateRequest::default() });
    }
    let answers = world.rest();
    assert_eq!(shown(&answers[..3]), ["-1 refused 1", "-1 refused 1", "0 created 1"]);
    assert!(answers[..2].iter().all(|answer| answer.cancel_reason == "mvcc: watcher range is empty"));
    world.put("b");
    let mut told: Vec<_> = world.rest().iter().map(|answer| answer.watch_id).collect();
    told.sort_unstable();
    assert_eq!(told, [0, 2, 3], "an empty key is \"\\0\", and alone it is that key");
}

#[test]
fn a_refusal_says_why_or_mutes_by_version() {
    for (flavor, refusal, id, text) in [
        (NEW, Refusal::InvalidToken, -1, "Unauthenticated desc = etcdserver: invalid auth token"),
        (NEW, Refusal::OldRevision, -1, "InvalidArgument desc = etcdserver: revision of auth store is old"),
        (NEW, Refusal::NoUser, -1, "InvalidArgument desc = etcdserver: user name is empty"),
        (NEW, Refusal::Denied, -1, "PermissionDenied desc = etcdserver: permission denied"),
        (Flavor::V3_4_23, Refusal::Denied, -1, "PermissionDenied desc = etcdserver: permission denied"),
        (OLD, Refusal::InvalidToken, 0, "PermissionDenied desc = etcdserver: permission denied"),
    ] {
        let mut world = World::new(flavor);
        world.ask(watch(0));
        world.rest();
        world.ask(watch(0));
        let answers = world.rest_as(&|_| Err(refusal));
        assert_eq!(shown(&answers), [format!("{id} refused 1")]);
        assert_eq!(answers[0].cancel_reason, format!("rpc error: code = {text}"));
        world.put("b");
        let muted = world.rest().is_empty();
        assert_eq!(muted, !flavor.exact_refusals, "{flavor:?}");
        assert_eq!(world.stream.parked(), usize::from(muted));
    }
}

#[test]
fn what_was_compacted_ends_a_watch_that_keeps_its_id() {
    for flavor in [OLD, NEW] {
        let mut world = World::new(flavor);
        for key in ["b", "c", "d"] {
            world.put(key);
        }
        world.compact(3);
        world.ask(watch(2));
        world.ask(WatchCreateRequest { prev_kv: true, ..watch(3) });
        let answers = world.rest();
        assert_eq!(shown(&answers), ["0 created 4", "1 created 4", "0 compacted 0", "1 events 4 +c@3 +d@4"]);
        assert_eq!(answers[2].compact_revision, 3);
        world.progress();
        let expected: &[&str] = if flavor.ordered_progress { &[] } else { &["-1 progress 4"] };
        assert_eq!(shown(&world.rest()), expected);
        world.ask(WatchCreateRequest { watch_id: 1, ..watch(0) });
        world.cancel(0);
        world.progress();
        assert_eq!(shown(&world.rest()), ["-1 refused 4", "0 canceled 4", "-1 progress 4"]);
    }
}

#[test]
fn a_negative_start_is_refused_or_compacted_by_version() {
    let mut world = World::new(NEW);
    world.ask(WatchCreateRequest { watch_id: 5, ..watch(-1) });
    let answers = world.rest();
    assert_eq!(shown(&answers), ["-1 refused 1"]);
    assert_eq!(answers[0].cancel_reason, "etcdserver: mvcc: required revision has been compacted");
    let mut world = World::new(OLD);
    world.put("b");
    world.ask(watch(-1));
    world.ask(watch(-2));
    let answers = world.rest();
    assert_eq!(shown(&answers), ["0 created 2", "1 created 2", "1 compacted 0"], "-1 is not below -1");
    assert_eq!(answers[2].compact_revision, -1);
    world.compact(2);
    world.ask(watch(-1));
    assert_eq!(shown(&world.rest()), ["2 created 2", "2 compacted 0"]);
}

#[test]
fn a_delete_at_the_compaction_is_kept_or_lost_by_version() {
    for flavor in Flavor::ALL {
        let mut world = World::new(flavor);
        world.put("b");
        world.store.txn(&[put("c", "1"), delete("b")]);
        world.apply();
        world.compact(3);
        world.ask(watch(3));
        let kept = if flavor.keeps_compacted_tombstone { " -b@3" } else { "" };
        assert_eq!(shown(&world.rest())[1], format!("0 events 3 +c@3{kept}"), "{flavor:?}");
    }
}

#[test]
fn a_future_start_waits_and_holds_back_progress_by_version() {
    for flavor in [OLD, NEW] {
        let mut world = World::new(flavor);
        world.ask(WatchCreateRequest { progress_notify: true, ..watch(4) });
        world.rest();
        world.put("b");
        world.put("c");
        world.progress();
        world.stream.timed_progress(&world.member);
        let mut told = shown(&world.rest());
        told.sort();
        let expected: &[&str] =
            if flavor.no_future_progress { &[] } else { &["-1 progress 3", "0 progress 3"] };
        assert_eq!(told, expected);
        world.put("d");
        world.progress();
        let mut told = shown(&world.rest());
        told.sort();
        assert_eq!(told, ["-1 progress 4", "0 events 4 +d@4"]);
    }
}

#[test]
fn manual_progress_runs_ahead_of_events_by_version() {
    let order = |flavor| {
        let mut world = World::new(flavor);
        world.ask(watch(0));
        world.rest();
        world.put("b");
        world.progress();
        shown(&world.rest())
    };
    assert_eq!(order(OLD), ["-1 progress 2", "0 events 2 +b@2"]);
    assert_eq!(order(NEW), ["0 events 2 +b@2", "-1 progress 2"]);
    let mut none = World::new(NEW);
    none.progress();
    assert!(none.rest().is_empty(), "a stream without watches");
}

#[test]
fn a_tick_skips_who_got_events_and_who_did_not_ask() {
    let mut world = World::new(NEW);
    world.ask(WatchCreateRequest { progress_notify: true, ..watch(0) });
    world.ask(watch(0));
    world.put("b");
    world.rest();
    world.stream.timed_progress(&world.member);
    assert_eq!(shown(&world.rest()), ["0 progress 2"], "asked before the events were there");
    world.put("c");
    world.rest();
    world.stream.timed_progress(&world.member);
    assert!(world.rest().is_empty());
    world.stream.timed_progress(&world.member);
    assert_eq!(shown(&world.rest()), ["0 progress 3"]);
}

#[test]
fn filters_leave_silence() {
    let mut world = World::new(NEW);
    world.ask(WatchCreateRequest { filters: vec![FilterType::Noput.into()], ..watch(0) });
    world.ask(WatchCreateRequest { filters: vec![FilterType::Nodelete.into(), 9], ..watch(0) });
    world.ask(WatchCreateRequest { filters: vec![0, 1], ..watch(0) });
    world.rest();
    world.put("b");
    world.delete("b");
    assert_eq!(shown(&world.rest()), ["1 events 2 +b@2", "0 events 3 -b@3"]);
}

#[test]
fn prev_kv_is_looked_up_when_it_is_sent() {
    let mut world = World::new(NEW);
    world.ask(WatchCreateRequest { prev_kv: true, ..watch(0) });
    world.rest();
    for revision in 2..=4 {
        assert_eq!(world.put("b"), revision);
    }
    world.delete("b");
    world.put("b");
    world.compact(3);
    let answers = world.rest();
    let previous: Vec<_> = answers
        .iter()
        .map(|answer| answer.events[0].prev_kv.as_ref().map(|kv| (kv.mod_revision, kv.version)))
        .collect();
    assert_eq!(previous, [None, None, Some((3, 2)), Some((4, 3)), None]);
}

#[test]
fn fragments_cut_inside_a_revision_but_not_what_was_parked() {
    let limits = Limits { fragment: 90, ..Limits::default() };
    let mut world = World::sized(NEW, limits);
    world.ask(WatchCreateRequest { fragment: true, ..watch(0) });
    world.ask(watch(0));
    world.rest();
    let ops: Vec<Op> = ["b", "c", "d", "e", "f"].iter().map(|key| put(key, "0123456789")).collect();
    world.store.txn(&ops);
    world.apply();
    assert_eq!(
        shown(&world.rest()),
        ["0 events 2 +b@2 +c@2 +d@2 ...", "0 events 2 +e@2 +f@2", "1 events 2 +b@2 +c@2 +d@2 +e@2 +f@2"]
    );
    world.ask(WatchCreateRequest { fragment: true, ..watch(2) });
    assert!(world.receive() && world.receive() && world.stream.behind().eq([2]) && world.sync());
    assert!(world.send(Selected::Channel) && world.send(Selected::Control));
    assert_eq!(shown(&world.read()), ["2 created 2", "2 events 2 +b@2 +c@2 +d@2 +e@2 +f@2"]);
}

#[test]
fn a_full_channel_makes_victims_that_lose_nothing() {
    let limits = Limits { channel: 2, revisions: 2, ..Limits::default() };
    let mut world = World::sized(NEW, limits);
    world.ask(watch(0));
    world.rest();
    for _ in 2..=7 {
        world.put("b");
    }
    assert!(!world.stream.flush(&world.member), "no room");
    let answers = world.rest();
    assert_eq!(
        shown(&answers),
        ["0 events 2 +b@2", "0 events 3 +b@3", "0 events 4 +b@4", "0 events 7 +b@5 +b@6", "0 events 7 +b@7"]
    );
}

#[test]
fn a_compaction_that_finds_the_channel_full_is_told_later_or_never_by_version() {
    for flavor in [OLD, NEW] {
        let limits = Limits { channel: 1, ..Limits::default() };
        let mut world = World::sized(flavor, limits);
        world.ask(watch(0));
        world.rest();
        world.put("b");
        world.put("c");
        world.compact(3);
        world.ask(watch(2));
        assert!(world.receive() && world.receive());
        world.sync();
        let answers = shown(&world.rest());
        let told = answers.contains(&"1 compacted 0".to_owned());
        assert_eq!(told, flavor.compaction_always_told, "{answers:?}");
        world.put("d");
        let goes_on = shown(&world.rest()).contains(&"1 events 4 +d@4".to_owned());
        assert_eq!(goes_on, !flavor.compaction_always_told);
    }
}

#[test]
fn a_snapshot_keeps_the_place_or_goes_back_in_time_by_version() {
    for (flavor, expected) in [(OLD, "0 events 4 +b@2 +c@3 +d@4"), (NEW, "0 events 4 +c@3 +d@4")] {
        let mut world = World::new(flavor);
        world.ask(watch(0));
        world.rest();
        world.put("b");
        world.rest();
        world.store.txn(&[put("c", "1")]);
        world.store.txn(&[put("d", "1")]);
        world.member.restore(&world.store, [&mut world.stream]);
        assert!(world.member.is_current(&world.store));
        assert_eq!(shown(&world.rest()), [expected]);
    }
}

#[test]
fn a_full_control_channel_stops_the_requests() {
    let mut world = World::sized(NEW, Limits { control: 1, ..Limits::default() });
    world.ask(watch(0));
    world.ask(watch(0));
    assert!(world.receive() && world.receive() && !world.receive());
    assert_eq!(shown(&world.rest()), ["0 created 1", "1 created 1"]);
}

#[test]
fn an_id_that_is_used_again_gets_what_was_parked_for_its_forerunner() {
    let mut world = World::new(NEW);
    world.ask(WatchCreateRequest { watch_id: 4, ..watch(0) });
    world.rest();
    world.put("b");
    world.cancel(4);
    assert!(world.receive() && world.send(Selected::Control) && world.send(Selected::Channel));
    assert_eq!(shown(&world.read()), ["4 canceled 2"]);
    world.ask(WatchCreateRequest { watch_id: 4, ..watch(0) });
    assert_eq!(shown(&world.rest()), ["4 created 2", "4 events 2 +b@2"]);
}

#[test]
fn progress_of_no_watch_is_not_a_watch() {
    // A client may choose -1. New servers send its events at once, since -1 is also the whole stream.
    let mut world = World::new(NEW);
    world.ask(WatchCreateRequest { watch_id: NO_WATCH, ..watch(0) });
    assert!(world.receive() && world.receive());
    world.put("b");
    assert!(world.send(Selected::Channel) && world.send(Selected::Control));
    assert_eq!(shown(&world.read()), ["-1 events 2 +b@2", "-1 created 1"]);
}
