//! Creates: one Created each, in request order; the start of "from now"; ids; refusals.

use super::*;

/// The watch is in sync at once on any member and begins at the revision of Created: events sent by a new
/// member (3.4.38, 3.5.22, 3.6.2 and later) from between registration and Created are not told.
#[test]
fn from_now_is_sent_as_it_is_and_begins_where_created_says() {
    for (traits, resumes_at) in [(NEW, 15), (MIDDLE, 16), (OLD, 16)] {
        let mut bench = Bench::new();
        bench.create(watch("a", 0));
        bench.nothing();
        bench.input(HubInput::Opened { stream: UpstreamStreamId(1), traits });
        assert_eq!(bench.next_create(1), (1, 0));
        bench.nothing();
        bench.up(1, created(1, 15));
        let told = bench.emitted();
        assert_eq!((told.watch_id, header_revision(&told), told.created), (0, 15, true));
        if traits == NEW {
            bench.up(1, events(1, 16, &[14, 15, 16]));
            assert_eq!(revisions(&bench.emitted()), [16]);
            bench.resumed(1, 2, traits);
            assert_eq!(
                bench.next_create(2),
                (2, 16),
                "one back: a watch from the future gets no progress there"
            );
        } else {
            bench.resumed(1, 2, traits);
            assert_eq!(bench.next_create(2), (2, resumes_at));
        }
    }
}

/// Writes wait for the registration and go on afterwards: their events must not be missed, even if the stream
/// is lost before the Created was told.
#[test]
fn from_now_keeps_its_beginning_from_its_registration_on() {
    for (traits, start) in [(NEW, 15), (MIDDLE, 16)] {
        let mut bench = Bench::new();
        bench.create(watch("a", 5));
        bench.create(watch("b", 0));
        let key = bench.hub.newest();
        bench.opened(1, traits);
        assert!(bench.hub.is_unregistered(key));
        bench.up(1, refused(-1, BAD_TOKEN));
        bench.out.clear();
        bench.up(1, created(2, 15));
        bench.nothing();
        assert!(!bench.hub.is_unregistered(key), "its answer waits for its turn");
        bench.lose(1, StreamLoss::Upstream);
        bench.input(HubInput::Opened { stream: UpstreamStreamId(2), traits });
        assert_eq!((bench.next_create(2), bench.next_create(2)), ((3, 5), (4, start)));
        bench.nothing();
        bench.up(2, created(3, 30));
        bench.out.clear();
        bench.up(2, created(4, 30));
        assert_eq!(header_revision(&bench.emitted()), 15);
        bench.up(2, events(4, 30, &[15, 16, 17]));
        assert_eq!(revisions(&bench.emitted()), [16, 17]);
    }
}

/// A write of the client went upstream before the registration: the watch begins before the write.
#[test]
fn from_now_that_was_overtaken_begins_before_what_overtook_it() {
    for (traits, start) in [(NEW, 12), (MIDDLE, 13)] {
        // Overtaken before the create was sent.
        let mut bench = Bench::new();
        bench.create(watch("a", 0));
        bench.hub.note_overtaking_write(bench.hub.newest(), Revision(12));
        bench.hub.note_overtaking_write(bench.hub.newest(), Revision(14));
        bench.input(HubInput::Opened { stream: UpstreamStreamId(1), traits });
        assert_eq!(bench.next_create(1), (1, start));
        bench.up(1, created(1, 15));
        assert_eq!(header_revision(&bench.emitted()), 12);
        bench.up(1, events(1, 15, &[12, 13]));
        assert_eq!(revisions(&bench.emitted()), [13]);
        // Overtaken after the create was sent: registered too late (15), or early enough.
        for created_at in [15, 12, 11] {
            let mut bench = Bench::new();
            bench.create(watch("a", 0));
            bench.opened(1, traits);
            bench.hub.note_overtaking_write(bench.hub.newest(), Revision(12));
            bench.up(1, created(1, created_at));
            if created_at == 11 {
                // The member's revision is below the cluster's.
                assert_eq!(bench.next_cancel(1), 1);
                assert!(matches!(bench.only(), HubOutput::Check { .. }));
                bench.checked(1, 1, 20);
                assert_eq!(bench.next_create(1), (2, start));
                bench.up(1, created(2, 20));
            } else if created_at == 15 {
                assert_eq!((bench.next_cancel(1), bench.next_create(1)), (1, (2, start)));
                bench.nothing();
                bench.up(1, created(2, 15));
            }
            assert_eq!(header_revision(&bench.emitted()), 12);
        }
    }
}

/// The client was shown a higher revision than the one known when the write went ahead: no earlier events are
/// told.
#[test]
fn from_now_that_was_overtaken_is_not_before_what_its_client_was_shown() {
    let mut bench = Bench::new();
    bench.hub.raise_shown_revision(None, Revision(14));
    bench.create(watch("a", 0));
    for unknown in [0, 12] {
        bench.hub.note_overtaking_write(bench.hub.newest(), Revision(unknown));
    }
    bench.input(HubInput::Opened { stream: UpstreamStreamId(1), traits: MIDDLE });
    assert_eq!(bench.next_create(1), (1, 15));
}

/// Old members (before 3.4.38, 3.5.24, 3.6.6) accept a negative start and then skip events of other watches.
/// The hub sends a harmless start instead, and answers the client as newer members do. See
/// `docs/etcd-facts.md#v8`.
#[test]
fn a_negative_start_never_reaches_a_member_that_would_let_it_in() {
    for traits in [MIDDLE, OLD] {
        let mut bench = Bench::new();
        bench.create(watch("a", -1));
        bench.input(HubInput::Opened { stream: UpstreamStreamId(1), traits });
        let (id, start) = bench.next_create(1);
        assert!(id == 1 && start > 1 << 60, "from the future");
        bench.up(1, created(1, 20));
        assert_eq!(bench.next_cancel(1), 1);
        let told = bench.next_emitted();
        assert_eq!((told.watch_id, told.created, told.canceled), (-1, true, true));
        assert_eq!(told.cancel_reason, "etcdserver: mvcc: required revision has been compacted");
        assert_eq!(bench.refused, [(Code::Unknown, RefusalReason::Malformed)]);
        assert_eq!((told.compact_revision, header_revision(&told)), (0, 20));
        assert!(matches!(bench.only(), HubOutput::Close { .. }), "nothing else is said, up or down");
    }
}

/// The member refuses a client without permission in its own words, as for any watch.
#[test]
fn a_negative_start_of_one_who_may_not_watch_is_denied() {
    let mut bench = Bench::new();
    bench.create(watch("a", -1));
    bench.input(HubInput::Opened { stream: UpstreamStreamId(1), traits: MIDDLE });
    bench.out.clear();
    bench.up(1, refused(-1, DENIED));
    assert_eq!(bench.next_emitted().cancel_reason, DENIED);
}

/// Another member answered a Put of the connection: the written key must not arrive as an event of a later
/// watch.
#[test]
fn from_now_is_not_before_what_another_call_was_shown() {
    for traits in [NEW, MIDDLE, OLD] {
        let mut bench = Bench::new();
        bench.hub.raise_shown_revision(None, Revision(100));
        bench.create(watch("a", 0));
        bench.opened(1, traits);
        bench.out.clear();
        bench.up(1, created(1, 95));
        assert_eq!(bench.next_cancel(1), 1);
        assert!(matches!(bench.only(), HubOutput::Check { .. }));
        bench.checked(1, 1, 101);
        assert_eq!(bench.next_create(1), (2, 0));
        bench.nothing();
        bench.up(1, created(2, 101));
        assert_eq!(header_revision(&bench.emitted()), 101);
    }
}

#[test]
fn created_of_a_watch_from_the_past_does_not_go_back_behind_another_call() {
    let mut bench = Bench::new();
    bench.hub.raise_shown_revision(None, Revision(100));
    bench.create(watch("a", 5));
    bench.opened(1, MIDDLE);
    bench.out.clear();
    bench.up(1, created(1, 95));
    assert!(matches!(bench.out.remove(0), HubOutput::Check { .. }));
    assert_eq!(header_revision(&bench.emitted()), 100);
}

#[test]
fn odd_starts_reach_etcd_as_they_are() {
    let mut bench = Bench::new();
    bench.create(watch("a", -3));
    bench.input(HubInput::Opened { stream: UpstreamStreamId(1), traits: NEW });
    assert_eq!(bench.next_create(1), (1, -3));
    bench.up(1, refused(-1, "etcdserver: mvcc: required revision has been compacted"));
    let HubOutput::Emit(message) = bench.out.remove(0) else { panic!() };
    let told = pb::WatchResponse::decode(message).unwrap();
    assert_eq!((told.watch_id, told.created, told.canceled), (-1, true, true));
}

#[test]
fn created_comes_once_per_create_in_request_order() {
    let mut bench = Bench::new();
    bench.create(watch("a", 5));
    bench.create(watch("b", 5));
    bench.opened(1, MIDDLE);
    bench.up(1, refused(-1, BAD_TOKEN));
    assert_eq!(bench.next_open(), (2, StreamCredential::Fresh, 0));
    // The second create is accepted first and even gets events: neither may be told yet.
    bench.up(1, created(2, 4));
    bench.nothing();
    bench.up(1, events(2, 6, &[6]));
    assert_eq!(bench.next_cancel(1), 2);
    bench.nothing();
    bench.input(HubInput::Opened { stream: UpstreamStreamId(2), traits: MIDDLE });
    assert_eq!(bench.next_create(2), (3, 5));
    bench.up(2, created(3, 4));
    assert_eq!(bench.next_emitted().watch_id, 0);
    assert_eq!(bench.next_emitted().watch_id, 1);
    assert_eq!(bench.next_create(2), (4, 5));
    assert!(matches!(bench.only(), HubOutput::Close { stream: UpstreamStreamId(1) }));
    bench.up(2, created(4, 4));
    bench.nothing();
    bench.up(2, events(4, 6, &[6]));
    assert_eq!((bench.out.len(), bench.next_emitted().watch_id), (1, 1));
}

#[test]
fn a_create_waits_until_the_earlier_ones_are_on_their_way() {
    let mut bench = Bench::watching(NEW);
    bench.create(watch("a", 0));
    bench.out.clear();
    bench.up(1, refused(-1, BAD_TOKEN));
    assert_eq!(bench.next_open(), (2, StreamCredential::Fresh, 0));
    bench.create(watch("b", 5));
    bench.nothing();
    bench.input(HubInput::Opened { stream: UpstreamStreamId(2), traits: NEW });
    assert_eq!((bench.next_create(2), bench.next_create(2)), ((3, 0), (4, 5)));
}

#[test]
fn ids_are_assigned_upward_past_those_in_use_and_never_again() {
    let mut bench = Bench::watching(MIDDLE);
    for (upstream, (asked, given)) in [(1, 1), (0, 2), (-7, -7)].into_iter().enumerate() {
        bench.create(with_id(asked));
        bench.out.clear();
        bench.up(1, created(i64::try_from(upstream).unwrap() + 2, 4));
        assert_eq!(bench.emitted().watch_id, given);
    }
    bench.cancel(2);
    bench.out.clear();
    bench.create(watch("a", 5));
    bench.out.clear();
    bench.up(1, created(5, 4));
    assert_eq!(bench.emitted().watch_id, 3);
}

#[test]
fn a_duplicate_id_is_refused_as_etcd_does() {
    let mut bench = Bench::watching(MIDDLE);
    bench.create(with_id(9));
    bench.create_and_let_in(2);
    assert_eq!(bench.emitted().watch_id, 9);
    bench.create(with_id(9));
    bench.create_and_let_in(3);
    assert_eq!(bench.next_cancel(1), 3);
    let told = bench.emitted();
    assert_eq!((told.watch_id, told.created, told.canceled), (-1, true, true));
    assert_eq!(told.cancel_reason, DUPLICATE);
    assert_eq!(bench.refused, [(Code::Unknown, RefusalReason::Malformed)]);
    // The first watch goes on; after a cancel the id is free.
    bench.up(1, events(2, 8, &[8]));
    assert_eq!(bench.emitted().watch_id, 9);
    bench.cancel(9);
    bench.out.clear();
    bench.create(with_id(9));
    assert_eq!(bench.next_create(1).0, 4);
    bench.up(1, created(4, 8));
    assert_eq!(bench.emitted().watch_id, 9);
}

#[test]
fn a_refusal_that_a_fresh_credential_may_cure_is_tried_once_more_alone() {
    for (traits, reason) in [
        (NEW, BAD_TOKEN),
        (NEW, "rpc error: code = InvalidArgument desc = etcdserver: revision of auth store is old"),
        (NEW, "rpc error: code = InvalidArgument desc = etcdserver: user name is empty"),
        (OLD, "rpc error: code = Unknown desc = auth: revision in header is old"),
        (OLD, DENIED),
    ] {
        let mut bench = Bench::watching(traits);
        bench.create(watch("b", 5));
        bench.out.clear();
        bench.up(1, refused(if traits == OLD { 2 } else { -1 }, reason));
        assert_eq!(bench.next_open(), (2, StreamCredential::Fresh, 0));
        bench.nothing();
        bench.input(HubInput::Opened { stream: UpstreamStreamId(2), traits });
        assert_eq!(bench.next_create(2), (3, 5));
        bench.up(2, created(3, 4));
        assert_eq!(bench.emitted().watch_id, 1);
        // The remaining watches stay on their stream.
        bench.up(1, events(1, 6, &[6]));
        assert_eq!(bench.emitted().watch_id, 0);
    }
}

#[test]
fn a_second_refusal_is_the_truth_and_told_once() {
    for traits in [NEW, OLD] {
        let mut bench = Bench::watching(traits);
        bench.create(with_id(77));
        bench.out.clear();
        let reason = if traits == NEW { BAD_TOKEN } else { DENIED };
        bench.up(1, refused(if traits == OLD { 2 } else { -1 }, reason));
        bench.out.clear();
        bench.opened(2, traits);
        bench.up(2, refused(if traits == OLD { 3 } else { -1 }, reason));
        let told = bench.next_emitted();
        assert_eq!((told.created, told.canceled), (true, true));
        assert_eq!(told.cancel_reason, reason);
        let code = if traits == NEW { Code::Unauthenticated } else { Code::PermissionDenied };
        assert_eq!(bench.refused, [(code, RefusalReason::Member)]);
        assert_eq!(told.watch_id, if traits == OLD { 77 } else { -1 }, "as that version says it");
        assert!(matches!(bench.only(), HubOutput::Close { stream: UpstreamStreamId(2) }));
    }
}

#[test]
fn a_real_denial_is_told_at_once() {
    let mut bench = Bench::watching(NEW);
    bench.create(watch("b", 5));
    bench.out.clear();
    bench.up(1, refused(-1, DENIED));
    assert_eq!(bench.emitted().cancel_reason, DENIED);
    assert_eq!(bench.refused, [(Code::PermissionDenied, RefusalReason::Member)]);
}

#[test]
fn an_old_refusal_never_names_a_living_watch() {
    // etcd 3.5.1 refuses with id 0, the id of a live watch of the same client.
    let mut bench = Bench::watching(OLD);
    bench.create(watch("b", 5));
    bench.out.clear();
    bench.up(1, refused(2, DENIED));
    bench.out.clear();
    bench.opened(2, OLD);
    bench.up(2, refused(3, DENIED));
    assert_eq!(bench.next_emitted().watch_id, -1);
    bench.out.clear();
    bench.up(1, events(1, 6, &[6]));
    assert_eq!(bench.emitted().watch_id, 0);
}

#[test]
fn without_any_credential_the_first_refusal_is_told() {
    let mut bench = Bench::watching(NEW);
    bench.create(watch("b", 5));
    bench.out.clear();
    bench.up(1, refused(-1, BAD_TOKEN));
    bench.out.clear();
    bench.lose(2, StreamLoss::Denied("wrong password".into()));
    assert_eq!(bench.emitted().cancel_reason, BAD_TOKEN);
    assert_eq!(bench.refused, [(Code::Unauthenticated, RefusalReason::Member)]);
}

#[test]
fn without_any_credential_or_header_the_stream_ends() {
    let mut bench = Bench::new();
    bench.create(watch("a", 5));
    bench.lose(1, StreamLoss::Denied("wrong password".into()));
    assert!(
        matches!(bench.only(), HubOutput::End(WatchStreamEnd::Denied(reason)) if reason == "wrong password")
    );
    bench.create(watch("a", 5));
    bench.nothing();
}

#[test]
fn bytes_that_are_no_request_end_the_stream_and_unknown_requests_do_not() {
    let mut bench = Bench::watching(NEW);
    bench.input(HubInput::Client(Bytes::new()));
    bench.input(HubInput::Client(Bytes::from_static(&[0x7a, 0])));
    bench.nothing();
    bench.input(HubInput::Client(Bytes::from_static(&[0x0a, 0x05, 0x01])));
    assert!(matches!(bench.only(), HubOutput::End(WatchStreamEnd::InvalidRequest)));
}

#[test]
fn a_flood_of_creates_is_not_read_without_end() {
    let mut bench = Bench::new();
    for _ in 0..MAX_PENDING {
        assert!(bench.hub.accepts_client());
        bench.create(watch("a", 5));
    }
    assert!(!bench.hub.accepts_client());
}

#[test]
fn a_refusal_is_cured_by_a_fresh_credential_also_after_a_loss() {
    let mut bench = Bench::watching(NEW);
    bench.create(watch("b", 5));
    bench.out.clear();
    bench.up(1, refused(-1, BAD_TOKEN));
    assert_eq!(bench.next_open(), (2, StreamCredential::Fresh, 0));
    bench.lose(2, StreamLoss::Upstream);
    assert_eq!(bench.next_open(), (3, StreamCredential::Fresh, 1));
    bench.nothing();
}

#[test]
fn no_header_goes_back_on_a_member_that_lags() {
    let mut bench = Bench::watching(MIDDLE);
    bench.create(watch("b", 5));
    bench.create_and_let_in(2);
    bench.out.clear();
    bench.up(1, events(2, 40, &[40]));
    bench.out.clear();
    // A Created, a refusal and an acknowledgement, each from a member at revision 4.
    bench.create(watch("c", 5));
    bench.create_and_let_in(3);
    assert!(matches!(bench.out.remove(0), HubOutput::Check { .. }));
    assert_eq!(header_revision(&bench.emitted()), 40);
    bench.create(watch("d", 5));
    bench.out.clear();
    bench.up(1, refused(-1, DENIED));
    assert_eq!(header_revision(&bench.emitted()), 40);
    bench.cancel(0);
    assert_eq!(bench.next_cancel(1), 1);
    assert_eq!(header_revision(&bench.emitted()), 40);
}

/// A member that judges a watch to the end of the keyspace by its first key gets an end in its place, in the
/// create and in every resume (`docs/etcd-facts.md#v12`).
#[test]
fn an_open_end_is_explicit_where_a_member_misjudges_it() {
    let end_sent = |traits, end: &'static str| {
        let mut bench = Bench::new();
        bench.create(pb::WatchCreateRequest { range_end: end.into(), ..watch("a", 5) });
        bench.input(HubInput::Opened { stream: UpstreamStreamId(1), traits });
        let RequestUnion::CreateRequest(first) = bench.next_sent(1) else { panic!("a create") };
        bench.up(1, created(1, 4));
        bench.out.clear();
        bench.resumed(1, 2, traits);
        let RequestUnion::CreateRequest(resumed) = bench.next_sent(2) else { panic!("a create") };
        assert_eq!(first.range_end, resumed.range_end);
        first.range_end
    };
    assert_eq!(end_sent(NEW, "\0"), "\0");
    assert_eq!(end_sent(OLD, "\0")[..], [0xff; 64]);
    for end in ["", "b", "\0\0"] {
        assert_eq!(end_sent(OLD, end), end);
    }
}
