//! Progress: never ahead of delivered events, never back; idle watches stay fresh.

use super::*;

#[test]
fn timed_progress_is_told_only_to_those_who_asked_and_moves_the_resume_point() {
    for asked in [false, true] {
        let mut bench = Bench::new();
        bench.create(pb::WatchCreateRequest { progress_notify: asked, ..watch("a", 5) });
        bench.opened(1, OLD);
        bench.up(1, created(1, 4));
        bench.out.clear();
        bench.up(1, answer(1, 30));
        if asked {
            let told = bench.emitted();
            assert_eq!((told.watch_id, header_revision(&told)), (0, 30));
        }
        bench.up(1, answer(1, 29));
        bench.nothing();
        bench.resumed(1, 2, OLD);
        assert_eq!(bench.next_create(2), (2, 31));
    }
}

#[test]
fn a_progress_request_is_answered_when_upstream_answered() {
    let mut bench = Bench::watching(MIDDLE);
    bench.ask_progress();
    assert!(matches!(bench.next_sent(1), RequestUnion::ProgressRequest(_)));
    bench.nothing();
    bench.up(1, answer(-1, 30));
    let told = bench.emitted();
    assert_eq!((told.watch_id, header_revision(&told)), (-1, 30));
    bench.up(1, answer(-1, 31));
    bench.nothing();
}

#[test]
fn a_progress_of_upstream_from_before_a_watch_does_not_count_for_it() {
    let mut bench = Bench::watching(MIDDLE);
    bench.ask_progress();
    bench.out.clear();
    bench.create(watch("b", 2));
    bench.create_and_let_in(2);
    bench.out.clear();
    // Requested before the create and received after Created: etcd may not have known the watch. The hub asks
    // again at once.
    bench.up(1, answer(-1, 4));
    assert!(matches!(bench.next_sent(1), RequestUnion::ProgressRequest(_)));
    bench.nothing();
    bench.up(1, events(2, 4, &[3]));
    assert_eq!(revisions(&bench.emitted()), [3]);
    bench.up(1, answer(-1, 4));
    assert_eq!(header_revision(&bench.emitted()), 4);
}

#[test]
fn a_progress_request_during_an_outage_waits_and_is_answered_after_it() {
    let mut bench = Bench::watching(MIDDLE);
    bench.lose(1, StreamLoss::Upstream);
    bench.out.clear();
    bench.ask_progress();
    bench.nothing();
    bench.opened(2, MIDDLE);
    bench.up(2, created(2, 8));
    assert!(matches!(bench.next_sent(2), RequestUnion::ProgressRequest(_)));
    bench.up(2, answer(-1, 8));
    assert_eq!(header_revision(&bench.emitted()), 8);
}

#[test]
fn a_progress_request_that_was_lost_with_its_stream_is_asked_again() {
    let mut bench = Bench::watching(MIDDLE);
    bench.ask_progress();
    bench.out.clear();
    bench.resumed(1, 2, MIDDLE);
    bench.out.clear();
    bench.up(2, created(2, 8));
    assert!(matches!(bench.next_sent(2), RequestUnion::ProgressRequest(_)));
    bench.up(2, answer(-1, 8));
    assert_eq!(header_revision(&bench.emitted()), 8);
}

#[test]
fn where_upstream_stays_silent_what_is_known_answers() {
    // A start at the next revision of an idle cluster: members from 3.4.38, 3.5.22 and 3.6.2 on send no
    // progress before the next write (`docs/etcd-facts.md#v4`).
    let mut bench = Bench::watching(NEW);
    bench.ask_progress();
    bench.out.clear();
    assert_eq!(bench.hub.next_deadline(), Some(bench.now + Duration::from_secs(1)));
    bench.wait(Duration::from_secs(1));
    let told = bench.emitted();
    assert_eq!((told.watch_id, header_revision(&told)), (-1, 4));
}

#[test]
fn no_progress_is_told_of_where_the_cluster_never_was() {
    let mut bench = Bench::new();
    bench.create(watch("a", 50));
    bench.opened(1, NEW);
    bench.up(1, created(1, 4));
    bench.out.clear();
    bench.ask_progress();
    bench.out.clear();
    bench.wait(Duration::from_secs(1));
    assert!(matches!(bench.next_sent(1), RequestUnion::ProgressRequest(_)), "asked again instead");
    bench.nothing();
}

/// After a restore of an older backup, a watch's start may lie between the cluster's revision of today
/// and the revision of before the restore.
#[test]
fn a_start_beyond_a_restored_history_is_no_progress() {
    let mut bench = Bench::new();
    bench.create(watch("a", 31));
    bench.opened(1, MIDDLE);
    // Before the restore. The client is not told of this revision.
    bench.up(1, pb::WatchResponse { canceled: true, cancel_reason: BAD_TOKEN.into(), ..created(-1, 40) });
    bench.out.clear();
    bench.opened(2, MIDDLE);
    bench.up(2, created(2, 29));
    bench.out.clear();
    bench.ask_progress();
    assert!(matches!(bench.next_sent(2), RequestUnion::ProgressRequest(_)));
    bench.up(2, answer(-1, 29));
    bench.nothing();
    bench.wait(Duration::from_secs(2));
    assert!(matches!(bench.next_sent(2), RequestUnion::ProgressRequest(_)), "asked again instead");
    bench.up(2, answer(-1, 30));
    assert_eq!(header_revision(&bench.emitted()), 30);
}

#[test]
fn progress_of_several_streams_holds_for_all_watches() {
    let mut bench = Bench::watching(NEW);
    bench.create(watch("b", 5));
    bench.out.clear();
    bench.up(1, refused(-1, BAD_TOKEN));
    bench.out.clear();
    bench.opened(2, NEW);
    bench.up(2, created(3, 4));
    bench.out.clear();
    bench.ask_progress();
    assert!(matches!(bench.next_sent(1), RequestUnion::ProgressRequest(_)));
    assert!(matches!(bench.next_sent(2), RequestUnion::ProgressRequest(_)));
    bench.up(1, answer(-1, 40));
    bench.nothing();
    bench.up(2, answer(-1, 35));
    assert_eq!(header_revision(&bench.emitted()), 35);
}

#[test]
fn an_old_member_is_never_asked_and_its_progress_never_believed() {
    let mut bench = Bench::watching(OLD);
    bench.up(1, events(1, 6, &[6]));
    bench.out.clear();
    bench.ask_progress();
    let told = bench.emitted();
    assert_eq!((told.watch_id, header_revision(&told)), (-1, 6));
    bench.up(1, answer(-1, 60));
    bench.wait(Duration::from_secs(60));
    bench.nothing();
    bench.resumed(1, 2, OLD);
    assert_eq!(bench.next_create(2), (2, 7));
}

#[test]
fn a_progress_request_without_watches_gets_no_answer() {
    let mut bench = Bench::new();
    bench.ask_progress();
    bench.nothing();
    assert_eq!(bench.hub.next_deadline(), None);
}

#[test]
fn idle_watches_are_kept_fresh_unseen() {
    let mut bench = Bench::watching(MIDDLE);
    bench.wait(Duration::from_secs(40));
    assert!(matches!(bench.next_sent(1), RequestUnion::ProgressRequest(_)));
    bench.up(1, answer(-1, 70));
    bench.nothing();
    bench.resumed(1, 2, MIDDLE);
    assert_eq!(bench.next_create(2), (2, 71));
}

#[test]
fn where_idle_watches_are_not_kept_fresh_nobody_is_asked() {
    let mut bench = Bench::new();
    let timing = HubTiming { idle_progress: None, progress_grace: Duration::from_secs(1) };
    bench.hub = Hub::new(bench.now, timing);
    bench.create(watch("a", 5));
    bench.opened(1, MIDDLE);
    bench.up(1, created(1, 4));
    bench.out.clear();
    assert_eq!(bench.hub.next_deadline(), None);
    bench.wait(Duration::from_secs(3600));
    bench.nothing();
}
