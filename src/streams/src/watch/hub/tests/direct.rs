//! The direct delivery: taken whenever nothing but events is to be handled, and never otherwise.

use bytes::BytesMut;

use super::*;

impl Bench {
    /// The message and its revision, if delivered directly.
    fn directly(&mut self, response: pb::WatchResponse) -> Option<(pb::WatchResponse, i64)> {
        let message = response.encode_to_vec();
        let mut to = BytesMut::from(&b"before"[..]);
        let told = self.hub.deliver_directly(UpstreamStreamId(1), None, &message, &mut to);
        let written = to.split_off(6);
        assert_eq!(to, b"before"[..]);
        assert_eq!(told.is_none(), written.is_empty(), "all or nothing");
        told.map(|Revision(revision)| (pb::WatchResponse::decode(written).unwrap(), revision))
    }
}

#[test]
fn whole_new_revisions_of_a_watch_that_stands_are_delivered_directly() {
    let mut bench = Bench::watching(NEW);
    for (header, all) in [(5, &[5][..]), (6, &[6, 6]), (9, &[7, 9])] {
        let (told, revision) = bench.directly(events(1, header, all)).expect("directly");
        assert_eq!((told, revision), (events(0, header, all), header));
    }
    // The other way goes on where the direct way stopped, and the direct way where the other one did.
    bench.up(1, events(1, 50, &[9, 10]));
    assert_eq!((revisions(&bench.emitted()), bench.hub.held()), (vec![10], 0));
    assert!(bench.directly(events(1, 11, &[11])).is_some());
    bench.lose(1, StreamLoss::Upstream);
    bench.next_open();
    bench.input(HubInput::Opened { stream: UpstreamStreamId(2), traits: MIDDLE });
    assert_eq!(bench.next_create(2).1, 12, "the watch resumes behind what was delivered directly");
}

#[test]
fn whatever_is_more_than_events_is_handled_by_the_hub() {
    let mut bench = Bench::watching(NEW);
    let another_cluster = |mut response: pb::WatchResponse| {
        response.header.as_mut().unwrap().cluster_id = 8;
        response
    };
    for other in [
        events(1, 4, &[4]),
        events(1, 50, &[5]),
        events(1, 6, &[7, 6]),
        events(2, 5, &[5]),
        fragment(1, 5, &[5]),
        answer(1, 9),
        created(1, 9),
        compacted(1, 9),
        pb::WatchResponse { canceled: true, ..events(1, 5, &[5]) },
        pb::WatchResponse { header: None, ..events(1, 5, &[5]) },
        another_cluster(events(1, 5, &[5])),
    ] {
        assert_eq!(bench.directly(other.clone()), None, "{other:?}");
    }
    bench.up(1, fragment(1, 5, &[5]));
    assert_eq!(bench.directly(events(1, 6, &[6])), None, "a revision has begun to arrive");
    bench.up(1, events(1, 5, &[5]));
    bench.out.clear();
    bench.ask_progress();
    assert_eq!(bench.directly(events(1, 6, &[6])), None, "the client waits for progress");
    bench.out.clear();
    let mut bench = Bench::watching(NEW);
    bench.create(watch("b", 5));
    assert_eq!(bench.directly(events(1, 5, &[5])), None, "the client waits for a Created");
    let mut bench = Bench::new();
    bench.create(pb::WatchCreateRequest { fragment: true, ..watch("a", 5) });
    bench.opened(1, NEW);
    bench.up(1, created(1, 4));
    assert_eq!(bench.directly(events(1, 5, &[5])), None, "the client takes fragments");
}
