//! Watches on a feed: they join between two revisions, and leave as from a lost stream.

use super::*;
use crate::watch::hub::FeedPosition;

/// A feed that delivers everything from `first` on, of a member that has reached `proven`.
fn feed(first: i64, proven: i64) -> FeedPosition {
    FeedPosition { traits: NEW, cluster: 7, first, proven }
}

impl Bench {
    #[track_caller]
    fn join(&mut self, watch: u64, on: Option<u64>, feed: FeedPosition) -> Option<u64> {
        let on = on.map(UpstreamStreamId);
        let stream = self.hub.join_feed(self.now, WatchKey(watch), on, feed, &mut self.out);
        stream.map(|UpstreamStreamId(stream)| stream)
    }

    /// A watch from revision 5 on that has joined a feed, stream 2.
    fn on_feed() -> Self {
        let mut bench = Self::watching(NEW);
        assert_eq!(bench.join(1, None, feed(5, 4)), Some(2));
        bench.out.clear();
        bench
    }
}

#[test]
fn a_watch_that_joins_leaves_its_own_stream_and_goes_on_at_the_same_revision() {
    let mut bench = Bench::watching(NEW);
    assert_eq!(bench.hub.next_to_join(WatchKey(1)), Some(Revision(5)));
    assert_eq!(bench.join(1, None, feed(3, 6)), Some(2));
    assert_eq!(bench.next_cancel(1), 1);
    assert!(matches!(bench.only(), HubOutput::Close { stream: UpstreamStreamId(1) }));
    assert_eq!(bench.hub.next_to_join(WatchKey(1)), None);
    // The own stream's messages count no more, and the feed's are cut at the watch's next revision.
    bench.up(1, events(1, 5, &[5]));
    bench.nothing();
    bench.up(2, events(1, 5, &[3, 4, 5]));
    assert_eq!(bench.emitted(), events(0, 5, &[5]));
    let message = events(1, 9, &[7, 9]);
    bench.up(2, message);
    assert_eq!(bench.emitted(), events(0, 9, &[7, 9]));
}

#[test]
fn a_watch_joins_only_where_it_misses_and_doubts_nothing() {
    let mut bench = Bench::watching(NEW);
    assert_eq!(bench.join(1, None, feed(6, 9)), None, "revision 5 is no longer kept");
    assert_eq!(bench.join(1, None, feed(1, 3)), None, "the feed's member may have another history");
    assert_eq!(bench.join(1, None, FeedPosition { cluster: 8, ..feed(5, 4) }), None, "another cluster");
    assert_eq!(bench.join(2, None, feed(5, 4)), None, "no such watch");
    assert_eq!(bench.join(1, Some(1), feed(5, 4)), None, "no feed");
    bench.up(1, fragment(1, 5, &[5]));
    assert_eq!(bench.join(1, None, feed(5, 5)), None, "revision 5 has begun to arrive");
    bench.up(1, events(1, 5, &[5]));
    bench.out.clear();
    bench.ask_progress();
    bench.out.clear();
    assert_eq!(bench.join(1, None, feed(6, 5)), None, "the client waits for progress");
    bench.up(1, answer(-1, 5));
    bench.out.clear();
    bench.create(watch("b", 5));
    bench.out.clear();
    assert_eq!(bench.join(1, None, feed(6, 5)), None, "the client waits for a Created");
    assert_eq!(bench.join(2, None, feed(5, 5)), None, "not told yet");
    bench.up(1, created(2, 5));
    bench.out.clear();
    assert_eq!(bench.join(1, None, feed(6, 5)), Some(2));
    bench.out.clear();
    assert_eq!(bench.join(1, None, feed(6, 5)), None, "on a feed");
}

#[test]
fn the_watches_of_a_feed_are_told_each_at_its_own_place() {
    let mut bench = Bench::watching(NEW);
    bench.create(pb::WatchCreateRequest { progress_notify: true, ..watch("a", 8) });
    bench.create_and_let_in(2);
    bench.out.clear();
    assert_eq!(bench.join(1, None, feed(5, 7)), Some(2));
    assert_eq!(bench.join(2, Some(2), feed(5, 7)), Some(2));
    bench.out.clear();
    let told: Vec<WatchKey> = bench.hub.watches_of_feed(UpstreamStreamId(2)).to_vec();
    assert_eq!(told, [WatchKey(1), WatchKey(2)]);
    bench.up(2, events(1, 6, &[6]));
    assert_eq!(bench.emitted(), events(0, 6, &[6]));
    bench.up(2, events(1, 9, &[8, 9]));
    assert_eq!((bench.next_emitted(), bench.emitted()), (events(0, 9, &[8, 9]), events(1, 9, &[8, 9])));
    // The feed's own progress is for those who asked for it.
    bench.up(2, answer(1, 12));
    assert_eq!(bench.emitted(), answer(1, 12));
    bench.ask_progress();
    assert!(matches!(bench.next_sent(2), RequestUnion::ProgressRequest(_)));
    bench.up(2, answer(-1, 15));
    assert_eq!(bench.emitted(), answer(-1, 15));
    // One cancels, and the other goes on.
    bench.cancel(0);
    assert_eq!(bench.next_cancel(2), 3);
    assert!(bench.emitted().canceled);
    bench.up(2, events(1, 16, &[16]));
    assert_eq!(bench.emitted(), events(1, 16, &[16]));
    bench.cancel(1);
    assert_eq!(bench.next_cancel(2), 4);
    assert!(bench.next_emitted().canceled);
    assert!(matches!(bench.only(), HubOutput::Close { stream: UpstreamStreamId(2) }));
}

#[test]
fn a_lost_feed_is_a_lost_stream() {
    let mut bench = Bench::on_feed();
    bench.up(2, events(1, 6, &[5, 6]));
    assert_eq!(revisions(&bench.emitted()), [5, 6]);
    // A revision that has begun to arrive comes again.
    bench.up(2, fragment(1, 7, &[7]));
    bench.nothing();
    bench.lose(2, StreamLoss::Upstream);
    assert_eq!(bench.next_open(), (3, StreamCredential::Current, 1));
    bench.input(HubInput::Opened { stream: UpstreamStreamId(3), traits: MIDDLE });
    assert_eq!(bench.next_create(3), (3, 7));
}

#[test]
fn a_feed_passes_on_events_and_progress_only() {
    for other in [created(1, 9), compacted(1, 9), refused(1, DENIED)] {
        let mut bench = Bench::on_feed();
        bench.up(2, other);
        assert!(bench.out.iter().any(|output| matches!(output, HubOutput::Close { .. })), "{:?}", bench.out);
        assert!(!bench.out.iter().any(|output| matches!(output, HubOutput::Emit(_))), "{:?}", bench.out);
    }
}

#[test]
fn progress_that_feeds_never_agree_on_ends_the_sharing() {
    let mut bench = Bench::watching(NEW);
    bench.create(watch("b", 5));
    bench.create_and_let_in(2);
    bench.out.clear();
    assert_eq!(bench.join(1, None, feed(5, 4)), Some(2));
    bench.out.clear();
    bench.ask_progress();
    // Under steady writes, each answer of one stream is behind what the other has delivered.
    for step in 0.. {
        assert!(step < 20, "the request is never answered");
        bench.out.clear();
        if !bench.hub.may_join() && bench.hub.watches_of_feed(UpstreamStreamId(2)).is_empty() {
            break;
        }
        let revision = 6 + 2 * step;
        bench.up(1, events(2, revision, &[revision]));
        bench.out.clear();
        bench.up(2, answer(-1, revision - 1));
        bench.out.clear();
        bench.up(2, events(1, revision + 1, &[revision + 1]));
        bench.out.clear();
        bench.up(1, answer(-1, revision));
    }
    assert!(!bench.hub.may_join());
}

#[test]
fn new_watches_are_created_on_a_stream_of_the_client() {
    let mut bench = Bench::on_feed();
    bench.ask(RequestUnion::CreateRequest(watch("b", 0)));
    assert_eq!(bench.next_open().0, 3);
    bench.input(HubInput::Opened { stream: UpstreamStreamId(3), traits: NEW });
    assert_eq!(bench.next_create(3), (3, 0));
    bench.up(3, created(3, 9));
    assert!(bench.emitted().created);
}

#[test]
fn a_client_stream_reads_a_few_feeds_at_most() {
    let mut bench = Bench::watching(NEW);
    for (at, key) in ["b", "c"].into_iter().enumerate() {
        bench.create(watch(key, 5));
        bench.create_and_let_in(at as i64 + 2);
        bench.out.clear();
    }
    assert_eq!((bench.join(1, None, feed(5, 4)), bench.join(2, None, feed(5, 4))), (Some(2), Some(3)));
    assert_eq!(bench.join(3, None, feed(5, 4)), None);
    bench.out.clear();
    bench.up(1, events(3, 5, &[5]));
    assert_eq!(bench.emitted(), events(2, 5, &[5]));
}

#[test]
fn watches_are_offered_once_their_create_was_answered() {
    let mut bench = Bench::new();
    let after = |bench: &Bench, last: u64| -> Vec<u64> {
        bench.hub.told_after(WatchKey(last)).map(|WatchKey(key)| key).collect()
    };
    assert!(after(&bench, 0).is_empty());
    bench.create(watch("a", 5));
    bench.create(watch("b", 5));
    bench.opened(1, NEW);
    assert!(after(&bench, 0).is_empty());
    bench.up(1, created(1, 4));
    assert_eq!(after(&bench, 0), [1]);
    bench.out.clear();
    bench.up(1, created(2, 4));
    assert_eq!((after(&bench, 0), after(&bench, 1), after(&bench, 2)), (vec![1, 2], vec![2], vec![]));
    assert!(bench.hub.feed_create(WatchKey(1)).is_some() && bench.hub.feed_create(WatchKey(3)).is_none());
}
