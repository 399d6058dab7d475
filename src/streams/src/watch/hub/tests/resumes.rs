//! Events: whole revisions, in order, once, from any member.

use super::*;

#[test]
fn resumes_after_the_last_whole_revision_never_after_a_header() {
    let mut bench = Bench::watching(MIDDLE);
    bench.up(1, events(1, 900, &[6, 7]));
    let told = bench.emitted();
    assert_eq!((revisions(&told), header_revision(&told)), (vec![6, 7], 7));
    bench.resumed(1, 2, MIDDLE);
    assert_eq!(bench.next_create(2), (2, 8));
    bench.up(2, created(2, 950));
    bench.nothing();
    bench.up(2, events(2, 950, &[7, 8]));
    assert_eq!(revisions(&bench.emitted()), [8]);
}

#[test]
fn half_a_revision_is_held_back_and_comes_whole_from_the_next_member() {
    let mut bench = Bench::watching(MIDDLE);
    bench.up(1, fragment(1, 9, &[6, 7]));
    let told = bench.emitted();
    assert_eq!((revisions(&told), header_revision(&told), told.fragment), (vec![6], 6, false));
    bench.up(1, fragment(1, 9, &[7]));
    bench.nothing();
    bench.resumed(1, 2, MIDDLE);
    assert_eq!(bench.next_create(2), (2, 7));
    bench.up(2, created(2, 9));
    bench.up(2, events(2, 9, &[7, 7, 7]));
    assert_eq!(revisions(&bench.emitted()), [7, 7, 7]);
}

#[test]
fn a_client_that_asked_for_fragments_gets_contiguous_ones() {
    let mut bench = Bench::new();
    bench.create(pb::WatchCreateRequest { fragment: true, ..watch("a", 5) });
    bench.opened(1, MIDDLE);
    bench.up(1, created(1, 4));
    bench.out.clear();
    bench.up(1, events(1, 6, &[6; 9]));
    let pieces: Vec<_> = (0..bench.out.len()).map(|_| bench.next_emitted()).collect();
    assert!(pieces.len() > 1, "the limit of a fragment is smaller");
    assert_eq!(pieces.iter().map(|piece| piece.events.len()).sum::<usize>(), 9);
    let flags: Vec<bool> = pieces.iter().map(|piece| piece.fragment).collect();
    assert!(flags[..flags.len() - 1].iter().all(|more| *more) && !flags[flags.len() - 1]);
    assert!(pieces.iter().all(|piece| header_revision(piece) == 6 && !piece.events.is_empty()));
}

#[test]
fn a_revision_too_large_to_be_whole_ends_the_stream() {
    let mut bench = Bench::watching(MIDDLE);
    for _ in 0..3 {
        bench.up(1, fragment(1, 6, &[6; 1000]));
        if let Some(output) = bench.out.pop() {
            return assert!(matches!(output, HubOutput::End(WatchStreamEnd::RevisionTooLarge)));
        }
    }
    panic!("held without bound");
}

#[test]
fn all_watches_of_a_lost_stream_move_to_one_new_stream() {
    let mut bench = Bench::watching(MIDDLE);
    bench.create(watch("b", 6));
    bench.create_and_let_in(2);
    bench.out.clear();
    bench.resumed(1, 2, MIDDLE);
    assert_eq!(bench.next_create(2), (3, 5));
    assert_eq!(bench.next_create(2), (4, 6));
    bench.nothing();
    // Later messages of the old stream belong to no watch.
    bench.up(1, events(1, 6, &[6]));
    bench.nothing();
}

#[test]
fn losses_are_counted_until_it_has_been_quiet() {
    let mut bench = Bench::watching(MIDDLE);
    bench.lose(1, StreamLoss::Upstream);
    assert_eq!(bench.next_open(), (2, StreamCredential::Current, 1));
    bench.lose(2, StreamLoss::Credential);
    assert_eq!(bench.next_open(), (3, StreamCredential::Fresh, 2));
    bench.now += SETTLED;
    bench.lose(3, StreamLoss::Upstream);
    assert_eq!(bench.next_open(), (4, StreamCredential::Current, 1));
}

#[test]
fn a_cancel_that_the_client_did_not_ask_for_is_resumed() {
    let mut bench = Bench::watching(MIDDLE);
    bench.up(1, pb::WatchResponse { canceled: true, ..answer(1, 6) });
    assert_eq!(bench.next_open(), (2, StreamCredential::Current, 1));
    assert!(matches!(bench.only(), HubOutput::Close { stream: UpstreamStreamId(1) }));
    bench.input(HubInput::Opened { stream: UpstreamStreamId(2), traits: MIDDLE });
    assert_eq!(bench.next_create(2), (2, 5));
}

#[test]
fn a_watch_that_lived_is_ended_once_when_its_user_may_not_have_it_any_more() {
    let mut bench = Bench::watching(NEW);
    bench.resumed(1, 2, NEW);
    bench.out.clear();
    bench.up(2, refused(-1, BAD_TOKEN));
    assert_eq!(bench.next_open(), (3, StreamCredential::Fresh, 1));
    bench.out.clear();
    bench.opened(3, NEW);
    bench.up(3, refused(-1, DENIED));
    let told = bench.next_emitted();
    assert_eq!((told.watch_id, told.created, told.canceled), (0, false, true));
    assert_eq!(told.cancel_reason, DENIED);
    bench.out.clear();
    bench.cancel(0);
    bench.nothing();
}

#[test]
fn upstream_nonsense_costs_the_stream_not_the_watch() {
    for message in [
        Bytes::from_static(&[0xff]),
        events(1, 6, &[7, 6]).encode_to_vec().into(),
        created(9, 6).encode_to_vec().into(),
    ] {
        let mut bench = Bench::watching(MIDDLE);
        bench.input(HubInput::Upstream { stream: UpstreamStreamId(1), message });
        assert!(matches!(bench.out.remove(0), HubOutput::Close { stream: UpstreamStreamId(1) }));
        assert_eq!(bench.next_open(), (2, StreamCredential::Current, 1));
        bench.nothing();
        bench.input(HubInput::Opened { stream: UpstreamStreamId(2), traits: MIDDLE });
        assert_eq!(bench.next_create(2), (2, 5));
    }
}

#[test]
fn streams_are_bounded_and_the_oldest_gives_way() {
    let mut bench = Bench::watching(NEW);
    let mut upstream = 1;
    for stream in 1..=u64::try_from(MAX_STREAMS).unwrap() {
        bench.create(watch("b", 5));
        bench.out.clear();
        bench.up(stream, refused(-1, BAD_TOKEN));
        let next = stream + 1;
        assert_eq!(bench.next_open(), (next, StreamCredential::Fresh, 0));
        if stream == u64::try_from(MAX_STREAMS).unwrap() {
            assert!(matches!(bench.only(), HubOutput::Close { stream: UpstreamStreamId(1) }));
            bench.input(HubInput::Opened { stream: UpstreamStreamId(next), traits: NEW });
            assert_eq!(bench.next_create(next).1, 5, "the watch of the oldest goes on here");
            return;
        }
        bench.opened(next, NEW);
        upstream += 2;
        bench.up(next, created(upstream, 4));
        bench.out.clear();
    }
    panic!("never bounded");
}

/// etcd sends no message for a watch before the watch's Created.
#[test]
fn a_watch_that_ends_before_it_began_costs_the_stream_and_is_created_elsewhere() {
    for end in [pb::WatchResponse { canceled: true, ..answer(2, 6) }, compacted(2, 50)] {
        let mut bench = Bench::watching(MIDDLE);
        bench.create(watch("b", 5));
        assert_eq!(bench.next_create(1).0, 2);
        bench.up(1, end);
        assert!(matches!(bench.out.remove(0), HubOutput::Close { stream: UpstreamStreamId(1) }));
        assert_eq!(bench.next_open(), (2, StreamCredential::Current, 1));
        bench.input(HubInput::Opened { stream: UpstreamStreamId(2), traits: MIDDLE });
        assert_eq!((bench.next_create(2), bench.next_create(2)), ((3, 5), (4, 5)));
        bench.up(2, created(3, 6));
        bench.nothing();
        bench.up(2, created(4, 6));
        assert_eq!(bench.emitted().watch_id, 1, "its one Created");
    }
}

/// A member that should have refused the start below 1.
#[test]
fn a_watch_from_below_the_beginning_is_resumed_when_its_member_cancels_it() {
    let mut bench = Bench::new();
    bench.create(watch("a", -5));
    bench.opened(1, NEW);
    bench.up(1, created(1, 4));
    bench.out.clear();
    bench.up(1, pb::WatchResponse { canceled: true, ..answer(1, 4) });
    assert_eq!(bench.next_open(), (2, StreamCredential::Current, 1));
    bench.out.clear();
    bench.input(HubInput::Opened { stream: UpstreamStreamId(2), traits: NEW });
    assert_eq!(bench.next_create(2), (2, 1), "never 0, which means now");
}

#[test]
fn an_event_without_its_previous_value_crosses_as_it_is() {
    let mut bench = Bench::new();
    bench.create(pb::WatchCreateRequest { prev_kv: true, ..watch("a", 5) });
    bench.opened(1, MIDDLE);
    bench.up(1, created(1, 4));
    bench.out.clear();
    bench.resumed(1, 2, MIDDLE);
    let RequestUnion::CreateRequest(again) = bench.next_sent(2) else { panic!("a create") };
    assert!(again.prev_kv, "asked for again");
    bench.up(2, created(2, 9));
    // Revision 6 was compacted: etcd has no previous value to send for revision 7.
    let mut response = events(2, 9, &[7, 8]);
    response.events[1].prev_kv = Some(mvccpb::KeyValue { value: "old".into(), ..Default::default() });
    bench.up(2, response.clone());
    assert_eq!(bench.emitted().events, response.events);
}

/// A client would misread such a combination.
#[test]
fn what_etcd_never_says_at_once_costs_the_stream() {
    let fragment = true;
    for nonsense in [
        pb::WatchResponse { created: true, ..events(2, 6, &[6]) },
        pb::WatchResponse { canceled: true, ..events(1, 6, &[6]) },
        pb::WatchResponse { fragment, ..created(2, 6) },
        pb::WatchResponse { fragment, ..compacted(1, 50) },
        pb::WatchResponse { fragment, ..answer(1, 6) },
    ] {
        let mut bench = Bench::watching(MIDDLE);
        bench.create(watch("b", 5));
        bench.out.clear();
        bench.up(1, nonsense);
        assert!(matches!(bench.out.remove(0), HubOutput::Close { stream: UpstreamStreamId(1) }));
        assert_eq!(bench.next_open(), (2, StreamCredential::Current, 1));
        bench.nothing();
    }
}
