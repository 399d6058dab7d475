//! Lost histories: compaction, another cluster, a history that went back, a lagging member.

use super::*;

#[test]
fn compaction_is_told_as_etcd_tells_it_and_its_id_stays_taken_until_cancelled() {
    let mut bench = Bench::watching(MIDDLE);
    bench.resumed(1, 2, MIDDLE);
    bench.out.clear();
    bench.up(2, created(2, 90));
    bench.up(2, compacted(2, 50));
    assert_eq!(bench.next_cancel(2), 2);
    let told = bench.next_emitted();
    assert_eq!((told.watch_id, told.created, told.canceled), (0, false, true));
    assert_eq!((told.compact_revision, header_revision(&told)), (50, 0));
    bench.out.clear();
    // A later cancel is acknowledged once.
    bench.cancel(0);
    let ack = bench.emitted();
    assert_eq!((ack.watch_id, ack.canceled, ack.compact_revision), (0, true, 0));
    bench.cancel(0);
    bench.nothing();
}

#[test]
fn an_id_that_compaction_ended_is_a_duplicate() {
    let mut bench = Bench::watching(MIDDLE);
    bench.create(with_id(9));
    bench.create_and_let_in(2);
    bench.out.clear();
    bench.up(1, compacted(2, 50));
    bench.out.clear();
    bench.create(with_id(9));
    bench.create_and_let_in(3);
    bench.out.remove(0);
    assert_eq!(bench.emitted().cancel_reason, DUPLICATE);
}

#[test]
fn compaction_of_what_was_delivered_is_none() {
    let mut bench = Bench::watching(NEW);
    bench.up(1, events(1, 9, &[9]));
    bench.out.clear();
    bench.resumed(1, 2, NEW);
    // The create reaches back to 9, so that progress is answered; 9 is compacted, 10 is not.
    assert_eq!(bench.next_create(2), (2, 9));
    bench.up(2, created(2, 12));
    bench.up(2, compacted(2, 10));
    assert_eq!(bench.next_cancel(2), 2);
    assert_eq!(bench.next_create(2), (3, 10));
    bench.nothing();
}

/// A member of 3.5.22 or later begins a watch "from now" before the revision told by Created, and a
/// compaction may then cancel the watch. A resume after that revision would get no progress until the
/// next write (`docs/etcd-facts.md#v4`).
#[test]
fn a_resume_after_a_compaction_reaches_back_to_what_is_not_compacted() {
    for (traits, start) in [(NEW, 21), (MIDDLE, 22)] {
        let mut bench = Bench::new();
        bench.create(watch("a", 0));
        bench.opened(1, traits);
        bench.up(1, created(1, 21));
        assert_eq!(header_revision(&bench.emitted()), 21);
        bench.up(1, events(1, 21, &[18]));
        bench.up(1, compacted(1, 21));
        assert_eq!(bench.next_cancel(1), 1);
        assert_eq!(bench.next_create(1), (2, start));
        bench.nothing();
    }
}

#[test]
fn another_cluster_ends_watches_as_compacted() {
    let mut bench = Bench::watching(MIDDLE);
    bench.resumed(1, 2, MIDDLE);
    bench.out.clear();
    bench.cluster = 8;
    bench.up(2, created(2, 3));
    assert_eq!(bench.next_cancel(2), 2);
    let told = bench.next_emitted();
    assert_eq!((told.watch_id, told.canceled, told.compact_revision), (0, true, 3));
    assert_eq!(header_revision(&told), 0);
    assert!(matches!(bench.only(), HubOutput::Close { .. }));
    // The client starts anew, on the new cluster.
    bench.create(watch("a", 4));
    bench.opened(3, MIDDLE);
    bench.up(3, created(3, 3));
    assert_eq!(bench.emitted().watch_id, 1);
}

#[test]
fn history_that_went_back_ends_watches_as_compacted() {
    let mut bench = Bench::watching(MIDDLE);
    bench.up(1, events(1, 40, &[40]));
    bench.out.clear();
    bench.resumed(1, 2, MIDDLE);
    bench.out.clear();
    bench.up(2, created(2, 30));
    assert_eq!(bench.next_cancel(2), 2);
    assert!(matches!(bench.only(), HubOutput::Check { .. }));
    bench.checked(1, 2, 31);
    let told = bench.next_emitted();
    assert_eq!((told.watch_id, told.canceled, told.compact_revision), (0, true, 31));
    assert_eq!(header_revision(&told), 0, "as etcd tells it");
    assert!(matches!(bench.only(), HubOutput::Close { .. }));
    // Later answers belong to the history as of now.
    bench.create(watch("a", 32));
    bench.opened(3, MIDDLE);
    bench.up(3, created(3, 31));
    assert_eq!(header_revision(&bench.emitted()), 31);
}

/// The watch begins after a revision shown to the client: the events between the history's new end and the
/// start are not the events known to the client.
#[test]
fn a_watch_that_begins_after_a_history_that_went_back_ends_as_compacted() {
    for (start, ends) in [(5, false), (32, false), (33, true), (41, true), (42, false)] {
        let mut bench = Bench::watching(MIDDLE);
        bench.up(1, events(1, 40, &[40]));
        bench.out.clear();
        bench.cancel(0);
        bench.out.clear();
        bench.create(watch("b", start));
        bench.opened(2, MIDDLE);
        bench.up(2, created(2, 30));
        assert!(matches!(bench.out.remove(0), HubOutput::Check { .. }));
        assert!(bench.emitted().created, "nobody waits for that read");
        bench.checked(2, 2, 31);
        if ends {
            assert_eq!(bench.next_cancel(2), 2);
            let told = bench.next_emitted();
            assert_eq!((told.watch_id, told.canceled, told.compact_revision), (1, true, 31));
        } else {
            bench.nothing();
        }
    }
}

/// A read for a new watch shows that the history went back: live watches that saw more belong to the old
/// history, even if the new history has grown past them by now.
#[test]
fn a_read_that_shows_less_ends_what_had_seen_more() {
    let mut bench = Bench::watching(NEW);
    bench.create(watch("b", 5));
    bench.create_and_let_in(2);
    bench.out.clear();
    bench.up(1, events(1, 40, &[40]));
    bench.out.clear();
    bench.create(watch("c", 0));
    bench.out.clear();
    bench.up(1, created(3, 31));
    assert_eq!(bench.next_cancel(1), 3);
    assert!(matches!(bench.only(), HubOutput::Check { .. }));
    bench.checked(3, 1, 31);
    assert_eq!(bench.next_cancel(1), 1);
    let told = bench.next_emitted();
    assert_eq!((told.watch_id, told.canceled, told.compact_revision), (0, true, 31));
    // A watch that saw less goes on, and the new watch begins.
    assert_eq!(bench.next_create(1), (4, 0));
    bench.up(1, created(4, 50));
    assert_eq!(bench.emitted().watch_id, 2);
    bench.up(1, events(2, 50, &[33]));
    assert_eq!(revisions(&bench.emitted()), [33]);
}

/// The watches saw a revision by progress, and the client was not told of it. A second read begins after both
/// watches asked for it, so its answer holds for both.
#[test]
fn a_second_read_decides_for_all_watches_that_joined_the_first() {
    for (cluster, ends) in [(31, true), (40, false)] {
        let mut bench = Bench::watching(MIDDLE);
        bench.create(watch("b", 5));
        bench.create_and_let_in(2);
        bench.out.clear();
        bench.up(1, answer(-1, 40));
        bench.resumed(1, 2, MIDDLE);
        bench.out.clear();
        bench.up(2, created(3, 30));
        assert_eq!(bench.next_cancel(2), 3);
        assert!(matches!(bench.only(), HubOutput::Check { .. }));
        bench.up(2, created(4, 30));
        assert_eq!(bench.next_cancel(2), 4);
        bench.nothing();
        bench.checked(1, 2, 31);
        assert!(matches!(bench.only(), HubOutput::Check { watch: WatchKey(1), .. }), "one read for both");
        bench.checked(1, 2, cluster);
        if ends {
            for id in [0, 1] {
                let told = bench.next_emitted();
                assert_eq!((told.watch_id, told.compact_revision), (id, 31));
            }
            assert!(matches!(bench.only(), HubOutput::Close { .. }));
        } else {
            assert_eq!((bench.next_create(2), bench.next_create(2)), ((5, 41), (6, 41)));
            bench.nothing();
        }
    }
}

/// The watch that saw the higher revision is gone; the remaining watches lost no events.
#[test]
fn a_question_is_answered_also_where_only_a_watch_that_ended_saw_more() {
    for (cluster, answers) in [(31, true), (40, false)] {
        let mut bench = Bench::watching(MIDDLE);
        bench.create(watch("b", 5));
        bench.create_and_let_in(2);
        bench.out.clear();
        bench.up(1, events(1, 40, &[40]));
        bench.out.clear();
        bench.cancel(0);
        bench.out.clear();
        bench.resumed(1, 2, MIDDLE);
        assert_eq!(bench.next_create(2), (3, 5));
        bench.up(2, created(3, 31));
        assert!(matches!(bench.only(), HubOutput::Check { .. }));
        bench.checked(2, 2, cluster);
        bench.nothing();
        bench.ask_progress();
        bench.out.clear();
        bench.up(2, answer(-1, 31));
        if answers {
            assert_eq!(header_revision(&bench.emitted()), 31);
        } else {
            bench.nothing();
        }
    }
}

/// The cluster's revision is not known before the read returns: no progress until then.
#[test]
fn a_question_waits_until_it_is_known_how_far_the_cluster_is() {
    for (cluster, told) in [(31, None), (45, Some(40))] {
        let mut bench = Bench::watching(MIDDLE);
        bench.up(1, events(1, 40, &[40]));
        bench.out.clear();
        bench.cancel(0);
        bench.out.clear();
        // A start in the future: no events below the start can be missed.
        bench.create(watch("b", 41));
        bench.opened(2, MIDDLE);
        bench.up(2, created(2, 30));
        bench.out.clear();
        bench.ask_progress();
        bench.wait(Duration::from_secs(3));
        bench.nothing();
        bench.checked(2, 2, cluster);
        bench.out.clear();
        bench.wait(Duration::from_secs(3));
        let answer = bench.out.drain(..).find_map(|output| match output {
            HubOutput::Emit(message) => Some(pb::WatchResponse::decode(message).unwrap()),
            _ => None,
        });
        assert_eq!(answer.as_ref().map(header_revision), told);
    }
}

/// The hub leaves a member that cannot read the cluster's revision.
#[test]
fn a_member_that_knows_less_and_cannot_ask_is_left() {
    let mut bench = Bench::watching(MIDDLE);
    bench.up(1, events(1, 40, &[40]));
    bench.out.clear();
    bench.create(watch("b", 20));
    assert_eq!(bench.next_create(1), (2, 20));
    bench.up(1, created(2, 30));
    bench.out.clear();
    bench.input(HubInput::CheckFailed {
        watch: WatchKey(2),
        stream: UpstreamStreamId(1),
        why: StreamLoss::Upstream,
    });
    assert!(matches!(bench.out.remove(0), HubOutput::Close { stream: UpstreamStreamId(1) }));
    assert_eq!(bench.next_open().0, 2);
}

#[test]
fn a_member_that_is_only_behind_is_accepted() {
    let mut bench = Bench::watching(MIDDLE);
    bench.up(1, events(1, 40, &[40]));
    bench.out.clear();
    bench.resumed(1, 2, MIDDLE);
    bench.out.clear();
    bench.up(2, created(2, 30));
    bench.out.clear();
    bench.checked(1, 2, 45);
    assert_eq!(bench.next_create(2), (3, 41));
    bench.up(2, created(3, 30));
    bench.nothing();
    // The member's progress is behind the client's: neither told nor trusted.
    bench.up(2, answer(3, 35));
    bench.nothing();
    bench.up(2, events(3, 41, &[41]));
    assert_eq!(revisions(&bench.emitted()), [41]);
}

#[test]
fn a_history_that_may_not_be_asked_for_is_taken_on_trust() {
    let mut bench = Bench::watching(MIDDLE);
    bench.up(1, events(1, 40, &[40]));
    bench.out.clear();
    bench.resumed(1, 2, MIDDLE);
    bench.out.clear();
    bench.up(2, created(2, 30));
    bench.out.clear();
    let why = StreamLoss::Denied(DENIED.into());
    bench.input(HubInput::CheckFailed { watch: WatchKey(1), stream: UpstreamStreamId(2), why });
    assert_eq!(bench.next_create(2), (3, 41));
}

#[test]
fn a_refused_resume_that_names_a_compaction_is_one() {
    let mut bench = Bench::watching(NEW);
    bench.resumed(1, 2, NEW);
    bench.out.clear();
    let refusal = refused(-1, "etcdserver: mvcc: required revision has been compacted");
    bench.up(2, pb::WatchResponse { compact_revision: 50, ..refusal });
    let told = bench.next_emitted();
    assert_eq!((told.watch_id, told.created, told.canceled), (0, false, true));
    assert_eq!((told.compact_revision, header_revision(&told)), (50, 0));
    bench.out.clear();
    bench.cancel(0);
    assert!(bench.emitted().canceled, "acknowledged, as after any compaction");
}

/// A pending create names a revision of the old cluster: the client still gets Created, and then the
/// compaction.
#[test]
fn a_create_that_waits_for_another_clusters_revision_is_ended_as_compacted() {
    let mut bench = Bench::watching(MIDDLE);
    bench.create(watch("b", 50));
    assert_eq!(bench.next_create(1), (2, 50));
    bench.resumed(1, 2, MIDDLE);
    assert_eq!((bench.next_create(2), bench.next_create(2)), ((3, 5), (4, 50)));
    bench.cluster = 8;
    bench.up(2, created(3, 3));
    assert_eq!(bench.next_cancel(2), 3);
    assert_eq!(bench.emitted().watch_id, 0);
    bench.up(2, created(4, 3));
    let told = bench.next_emitted();
    assert_eq!((told.watch_id, told.created, told.canceled), (1, true, false));
    assert_eq!(bench.next_cancel(2), 4);
    let told = bench.next_emitted();
    assert_eq!((told.watch_id, told.canceled, told.compact_revision), (1, true, 3));
    assert!(matches!(bench.only(), HubOutput::Close { .. }));
}

#[test]
fn what_was_shown_of_another_cluster_binds_nobody() {
    let mut bench = Bench::watching(MIDDLE);
    bench.up(1, events(1, 900, &[900]));
    bench.out.clear();
    bench.resumed(1, 2, MIDDLE);
    bench.out.clear();
    bench.cluster = 8;
    bench.up(2, created(2, 3));
    bench.out.clear();
    bench.create(watch("a", 4));
    bench.opened(3, MIDDLE);
    bench.up(3, created(3, 3));
    assert_eq!(header_revision(&bench.emitted()), 3);
    bench.ask_progress();
    bench.out.clear();
    bench.up(3, answer(-1, 6));
    assert_eq!(header_revision(&bench.emitted()), 6);
}

/// The create was accepted on a stream of the old cluster, and not told yet: the watch must neither stay on
/// the stream nor keep its beginning.
#[test]
fn a_create_that_waits_moves_to_the_other_cluster() {
    let mut bench = Bench::watching(NEW);
    bench.create(watch("b", 5));
    assert_eq!(bench.next_create(1).0, 2);
    bench.create(watch("c", 0));
    assert_eq!(bench.next_create(1), (3, 0));
    bench.up(1, refused(-1, BAD_TOKEN));
    assert_eq!(bench.next_open(), (2, StreamCredential::Fresh, 0));
    bench.up(1, created(3, 900));
    bench.nothing();
    bench.cluster = 8;
    bench.input(HubInput::Opened { stream: UpstreamStreamId(2), traits: NEW });
    assert_eq!(bench.next_create(2), (4, 5));
    bench.up(2, created(4, 3));
    assert_eq!(bench.next_cancel(1), 1);
    assert_eq!(bench.next_emitted().watch_id, 0, "it followed the old cluster");
    assert!(matches!(bench.out.remove(0), HubOutput::Close { stream: UpstreamStreamId(1) }));
    assert!(bench.next_emitted().created);
    assert_eq!(bench.next_cancel(2), 4);
    assert!(bench.next_emitted().canceled, "it named a revision of the old cluster");
    assert_eq!(bench.next_create(2), (5, 0), "from now, in this cluster");
    bench.up(2, created(5, 4));
    assert_eq!(header_revision(&bench.emitted()), 4);
}

/// The watch's Created waits behind an earlier create: the beginning at a revision never reached by the
/// cluster is dropped.
#[test]
fn from_now_that_waits_to_be_told_begins_again_where_history_went_back() {
    let mut bench = Bench::watching(MIDDLE);
    bench.create(watch("b", 5));
    bench.create_and_let_in(2);
    bench.out.clear();
    for waiting in [watch("c", 5), watch("d", 5), watch("e", 0)] {
        bench.create(waiting);
        bench.out.clear();
    }
    for _ in 0..2 {
        bench.up(1, refused(-1, BAD_TOKEN));
        bench.out.clear();
    }
    bench.up(1, created(5, 40));
    bench.up(1, events(1, 41, &[41]));
    bench.out.clear();
    bench.opened(2, MIDDLE);
    bench.up(2, created(6, 31));
    assert!(matches!(bench.out.remove(0), HubOutput::Check { stream: UpstreamStreamId(2), .. }));
    assert!(bench.emitted().created);
    bench.checked(3, 2, 31);
    assert_eq!(bench.next_cancel(1), 1);
    assert_eq!(bench.next_emitted().compact_revision, 31);
    assert_eq!((bench.next_cancel(1), bench.next_create(2)), (5, (8, 0)));
    bench.nothing();
    bench.up(2, created(7, 31));
    assert!(bench.emitted().created);
    bench.up(2, created(8, 32));
    assert_eq!(header_revision(&bench.emitted()), 32);
}

/// The create was sent before the client was shown more: a lower revision in Created still reveals a history
/// that went back.
#[test]
fn a_created_below_what_was_shown_since_is_of_a_history_that_went_back() {
    for (now, progress, told) in [(20, 20, 20), (12, 12, 12)] {
        let mut bench = Bench::watching(NEW);
        bench.create(watch("b", 0));
        bench.out.clear();
        bench.up(1, events(1, 20, &[20]));
        bench.out.clear();
        bench.lose(1, StreamLoss::Upstream);
        bench.out.clear();
        bench.cancel(0);
        bench.out.clear();
        bench.input(HubInput::Opened { stream: UpstreamStreamId(2), traits: NEW });
        assert_eq!(bench.next_create(2), (3, 0));
        bench.up(2, created(3, now));
        if now < 20 {
            assert!(matches!(bench.out.remove(0), HubOutput::Check { .. }));
        }
        assert_eq!(header_revision(&bench.emitted()), now);
        if now < 20 {
            bench.checked(2, 2, now);
        }
        bench.ask_progress();
        bench.out.clear();
        bench.up(2, answer(3, progress));
        bench.up(2, answer(-1, progress));
        assert_eq!(header_revision(&bench.emitted()), told);
    }
}

/// A member at a revision below the shown revision lags, or the history went back.
#[test]
fn from_now_on_a_member_that_knows_less_is_asked_about() {
    for (traits, cluster, told) in [(MIDDLE, 25, 20), (MIDDLE, 12, 12), (NEW, 25, 20), (NEW, 12, 12)] {
        let mut bench = Bench::watching(traits);
        bench.up(1, events(1, 20, &[20]));
        bench.out.clear();
        bench.create(watch("b", 0));
        assert_eq!(bench.next_create(1), (2, 0));
        bench.up(1, created(2, 12));
        assert_eq!(bench.next_cancel(1), 2);
        assert!(matches!(bench.only(), HubOutput::Check { .. }));
        bench.checked(2, 1, cluster);
        if told < 20 {
            assert_eq!(bench.next_cancel(1), 1);
            assert_eq!(bench.next_emitted().compact_revision, 12);
        }
        assert_eq!(bench.next_create(1), (3, 0));
        bench.nothing();
        bench.up(1, created(3, 12));
        assert_eq!(header_revision(&bench.emitted()), told);
    }
}

/// The answer waits behind an earlier create, and events came too early: the beginning belongs to the old
/// cluster.
#[test]
fn a_watch_from_now_that_waits_to_be_told_begins_again_in_another_cluster() {
    let mut bench = Bench::new();
    bench.create(watch("a", 0));
    bench.create(watch("b", 0));
    bench.opened(1, MIDDLE);
    bench.up(1, refused(-1, BAD_TOKEN));
    bench.out.clear();
    bench.up(1, created(2, 9));
    bench.up(1, events(2, 10, &[10]));
    bench.out.clear();
    bench.cluster = 8;
    bench.opened(2, MIDDLE);
    bench.out.clear();
    bench.up(2, created(3, 3));
    assert!(
        matches!(bench.out.remove(0), HubOutput::Close { stream: UpstreamStreamId(1) }),
        "{:?}",
        bench.out
    );
    let told = bench.next_emitted();
    assert_eq!((told.watch_id, header_revision(&told)), (0, 3));
    assert_eq!(bench.next_create(2), (4, 0));
    bench.nothing();
}

/// A refusal of the old cluster, told late, carries a header of the present cluster.
#[test]
fn an_answer_that_waited_has_no_header_of_two_clusters() {
    let mut bench = Bench::watching(MIDDLE);
    for create in [watch("b", 0), watch("c", 5)] {
        bench.create(create);
        bench.out.clear();
    }
    for reason in [BAD_TOKEN, DENIED] {
        bench.up(1, refused(-1, reason));
        bench.out.clear();
    }
    bench.cluster = 8;
    bench.opened(2, MIDDLE);
    bench.out.clear();
    bench.up(2, created(4, 3));
    let told = std::mem::take(&mut bench.out).into_iter().filter_map(|output| match output {
        HubOutput::Emit(message) => pb::WatchResponse::decode(message).unwrap().header,
        _ => None,
    });
    let clusters: Vec<u64> = told.map(|header| header.cluster_id).collect();
    assert_eq!(clusters, [8, 8, 8], "the first watch's end, a Created, a refusal");
}
