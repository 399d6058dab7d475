//! A compaction that overtakes a watch which has to catch up.
//!
//! Owns: what such a watch is told, by how many passes it had before. Must not know when etcd makes a pass: each number of them is a schedule
//! of the model, and etcd must follow one. Invariant: what a race alone decides is printed, what must happen is asserted.

use keyward::pb::etcdserverpb::{
    WatchCancelRequest, WatchCreateRequest, WatchResponse, watch_request::RequestUnion,
};

use crate::{
    harness::{
        binary::{Version, full},
        every_version,
    },
    model::{send::Selected, stream::WatchStream},
};

use super::{
    Counts, flavor,
    pair::Pair,
    server::{Server, Who},
};

/// Above what one pass gives.
const REVISIONS: usize = 1_030;
const ROUNDS_SHORT: i64 = 8;
const ROUNDS_FULL: i64 = 40;

/// How a watch ended.
#[derive(Debug, Default)]
struct Endings {
    /// Without an event: the compaction won a race.
    at_once: u64,
    /// After the first answer, with more to come.
    midway: u64,
    /// Not at all: it had caught up, or was past the compaction.
    never: u64,
}

#[tokio::test]
async fn a_watch_that_a_compaction_overtakes_ends_as_the_model_says() {
    for version in every_version() {
        let endings = run(&version).await.unwrap_or_else(|what| panic!("etcd {version}: {what}"));
        println!("overtaken on etcd {version}: {endings:?}");
        assert!(endings.midway > 0 && endings.never > 0, "{version}: {endings:?}");
    }
}

async fn run(version: &Version) -> Result<Endings, String> {
    let mut server = Server::start(version, flavor(version), &[]).await;
    let mut pair = Pair::open(&server, Who::Root);
    let mut endings = Endings::default();
    for round in 1..=if full() { ROUNDS_FULL } else { ROUNDS_SHORT } {
        let told = overtake(&mut server, &mut pair, round).await;
        let told = told.map_err(|what| format!("round {round}: {what}"))?;
        let compacted = told.last().is_some_and(|answer| answer.compact_revision != 0);
        let events = told.iter().any(|answer| !answer.events.is_empty());
        match (compacted, events) {
            (true, false) => endings.at_once += 1,
            (true, true) => endings.midway += 1,
            (false, _) => endings.never += 1,
        }
        pair.ask(RequestUnion::CancelRequest(WatchCancelRequest { watch_id: round }));
        pair.settle(&server, &mut Counts::new()).await?;
    }
    Ok(endings)
}

/// One watch from far behind, and a compaction: as soon as it was made, or after its first answer. Returns all that it was told.
async fn overtake(server: &mut Server, pair: &mut Pair, round: i64) -> Result<Vec<WatchResponse>, String> {
    let first = server.store.revision() + 1;
    let puts = (0..REVISIONS).map(|n| (format!("/a/k{}", n % 4).into(), n.to_string().into()));
    server.write_many(puts.collect()).await?;
    while server.member.apply(&server.store, [&mut pair.model]).is_some() {}
    pair.ask(RequestUnion::CreateRequest(WatchCreateRequest {
        key: "/a/k".into(),
        range_end: "/a/l".into(),
        start_revision: first,
        watch_id: round,
        ..WatchCreateRequest::default()
    }));
    while pair.model.receive(&server.store, &server.member, &|_| Ok(())) {}
    pair.model.send(&server.store, &server.member, Selected::Control);
    if round % 3 != 0 {
        pair.model.sync(&server.store, &server.member);
        pair.model.send(&server.store, &server.member, Selected::Channel);
    }
    let begun = [popped(&mut pair.model)];
    let (_, mut told) = pair.read_one_of(&begun).await?;

    // In the last of four, below what a pass leaves to the next.
    let at = if round % 4 == 0 { first + 500 } else { server.store.revision() };
    let before = server.member.clone();
    assert!(server.compact(at).await?, "it can be compacted");
    server.member.apply(&server.store, []);
    let schedules = (0..=2).map(|passes| {
        let mut model = pair.model.clone();
        for _ in 0..passes {
            model.sync(&server.store, &before);
        }
        model.rest(&server.store, &server.member, &|_| Ok(()));
        let answers = popped(&mut model);
        (model, answers)
    });
    let (mut models, answers): (Vec<WatchStream>, Vec<_>) = schedules.unzip();
    let (which, more) = pair.read_one_of(&answers).await?;
    pair.model = models.swap_remove(which);
    told.extend(more);
    Ok(told)
}

fn popped(model: &mut WatchStream) -> Vec<WatchResponse> {
    std::iter::from_fn(|| model.pop()).collect()
}
