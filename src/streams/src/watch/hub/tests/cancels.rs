//! Cancels: acknowledged once, and no message of the watch afterwards.

use super::*;

#[test]
fn a_cancel_is_acknowledged_at_once_even_during_an_outage() {
    let mut bench = Bench::watching(MIDDLE);
    bench.up(1, events(1, 6, &[6]));
    bench.out.clear();
    bench.lose(1, StreamLoss::Upstream);
    bench.out.clear();
    bench.cancel(0);
    let ack = bench.next_emitted();
    assert_eq!((ack.watch_id, ack.canceled, ack.created), (0, true, false));
    assert_eq!((ack.cancel_reason.as_str(), header_revision(&ack)), ("", 6));
    assert!(matches!(bench.only(), HubOutput::Close { stream: UpstreamStreamId(2) }), "nothing is resumed");
}

#[test]
fn a_cancel_of_id_0_waits_for_no_create_that_chose_none() {
    let mut bench = Bench::watching(MIDDLE);
    bench.create(watch("b", 5));
    assert_eq!(bench.next_create(1).0, 2);
    bench.cancel(0);
    assert_eq!(bench.next_cancel(1), 1);
    assert_eq!(bench.emitted().watch_id, 0);
}

#[test]
fn what_upstream_says_after_a_cancel_is_not_told() {
    let mut bench = Bench::watching(MIDDLE);
    bench.create(watch("b", 5));
    bench.create_and_let_in(2);
    bench.out.clear();
    bench.cancel(0);
    assert_eq!(bench.next_cancel(1), 1);
    assert!(bench.emitted().canceled);
    bench.up(1, events(1, 6, &[6]));
    bench.up(1, pb::WatchResponse { canceled: true, ..answer(1, 6) });
    bench.nothing();
}

#[test]
fn a_cancel_of_an_unknown_id_gets_no_answer() {
    let mut bench = Bench::watching(MIDDLE);
    bench.cancel(33);
    bench.nothing();
}

#[test]
fn a_cancel_behind_its_create_waits_for_it() {
    let mut bench = Bench::watching(MIDDLE);
    bench.create(with_id(9));
    assert_eq!(bench.next_create(1).0, 2);
    bench.cancel(9);
    bench.nothing();
    bench.up(1, created(2, 4));
    assert!(bench.next_emitted().created);
    assert_eq!(bench.next_cancel(1), 2);
    assert!(bench.emitted().canceled);
}

/// etcd takes requests in order: the second create of the id is refused before the cancel ends the first.
#[test]
fn a_cancel_waits_behind_a_create_that_claims_its_id() {
    let mut bench = Bench::watching(MIDDLE);
    bench.create(with_id(9));
    bench.create_and_let_in(2);
    bench.out.clear();
    bench.create(with_id(9));
    assert_eq!(bench.next_create(1).0, 3);
    bench.cancel(9);
    bench.nothing();
    bench.up(1, created(3, 4));
    assert_eq!(bench.next_cancel(1), 3);
    assert_eq!(bench.next_emitted().cancel_reason, DUPLICATE);
    assert_eq!(bench.next_cancel(1), 2);
    let ack = bench.emitted();
    assert_eq!((ack.watch_id, ack.created, ack.canceled), (9, false, true));
}

/// A header ahead of the cluster would be the start of the client's next watch "from now": earlier events
/// would be missed.
#[test]
fn the_end_of_a_watch_from_the_future_tells_no_revision_that_is_not_there() {
    let mut bench = Bench::watching(MIDDLE);
    for (id, upstream_id) in [(1, 2), (2, 3)] {
        bench.create(watch("b", 1_000));
        bench.create_and_let_in(upstream_id);
        bench.out.clear();
        assert!(bench.hub.client_ids.contains_key(&id));
    }
    bench.cancel(1);
    assert_eq!(bench.next_cancel(1), 2);
    assert_eq!(header_revision(&bench.emitted()), 4);

    bench.resumed(1, 2, MIDDLE);
    bench.out.clear();
    bench.up(2, created(4, 4));
    bench.up(2, refused(-1, DENIED));
    let told = bench.emitted();
    assert_eq!((told.watch_id, told.canceled, header_revision(&told)), (2, true, 4));
}

/// A cancel on its way when the watch is denied means the denied watch, not a later one.
#[test]
fn the_id_of_a_watch_that_was_denied_is_not_given_again() {
    let mut bench = Bench::watching(MIDDLE);
    bench.create(pb::WatchCreateRequest { watch_id: 1, ..watch("b", 5) });
    bench.create_and_let_in(2);
    bench.out.clear();
    bench.resumed(1, 2, MIDDLE);
    bench.out.clear();
    bench.up(2, created(3, 4));
    bench.up(2, refused(-1, DENIED));
    assert_eq!((bench.emitted().watch_id), 1);
    bench.create(watch("c", 5));
    assert_eq!(bench.next_create(2), (5, 5));
    bench.up(2, created(5, 4));
    assert_eq!(bench.emitted().watch_id, 2);
    bench.cancel(1);
    bench.nothing();
    // A client choosing the id gets the id.
    bench.create(pb::WatchCreateRequest { watch_id: 1, ..watch("b", 5) });
    bench.out.clear();
    bench.up(2, created(6, 4));
    let told = bench.emitted();
    assert_eq!((told.watch_id, told.canceled), (1, false));
}
