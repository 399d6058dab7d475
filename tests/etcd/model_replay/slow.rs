//! A client that does not read: the channel of its stream fills up, and its watches fall behind.
//!
//! Owns: what such a stream is told in the end. Must not know how much lies on the way, which is the kernel's and gRPC's choice: so events are
//! compared one by one, not answer by answer. Invariant: that the server has come past a point is seen from another connection.

use std::time::Duration;

use bytes::Bytes;
use keyward::pb::{
    etcdserverpb::{WatchCreateRequest, WatchResponse, watch_request::RequestUnion},
    mvccpb::Event,
};

use crate::{
    harness::{binary::Version, every_version, wait},
    model::store::Op,
};

use super::{
    Counts, flavor,
    pair::Pair,
    server::{Server, Who},
    transcript::shown,
};

const LIMIT: Duration = Duration::from_secs(30);
/// Together far more than the connection's window, gRPC's own buffer and the channel of 128 take.
const WRITES: usize = 500;
const SIZE: usize = 2 * 1024;
/// The watches of the stream, by id.
const SLOW: i64 = 1;
const COMPACTED: i64 = 2;

#[tokio::test]
async fn a_stream_that_is_not_read_is_told_in_the_end_what_the_model_says() {
    for version in every_version() {
        let told = run(&version).await;
        told.unwrap_or_else(|what| panic!("etcd {version}: {what}"));
    }
}

async fn run(version: &Version) -> Result<(), String> {
    let mut server = Server::start(version, flavor(version), &[]).await;
    let mut counts = Counts::new();
    let mut slow = Pair::open_on(server.narrow_channel().await, &server, Who::Root);
    let mut other = Pair::open(&server, Who::Root);
    slow.ask(create(SLOW, "/a/slow", 0));
    slow.settle(&server, &mut counts).await?;

    for n in 0..WRITES {
        let value = format!("{n:0SIZE$}").into();
        server.write(&[Op::Put { key: "/a/slow".into(), value, lease: 0 }]).await?;
        apply(&mut server, [&mut slow, &mut other]);
    }
    // The channel is full: what is to be told now cannot be.
    let before = server.watches().await;
    slow.ask(create(COMPACTED, "/a/slow", 1));
    while slow.model.receive(&server.store, &server.member, &|_| Ok(())) {}
    wait::until(LIMIT, "the watch is made", async || (server.watches().await > before).then_some(())).await;
    server.write(&[Op::Put { key: "/a/other".into(), value: "1".into(), lease: 0 }]).await?;
    apply(&mut server, [&mut slow, &mut other]);
    slow.model.sync(&server.store, &server.member);
    other.ask(create(SLOW, "/a/other", server.store.revision()));
    other.settle(&server, &mut counts).await?;

    let modelled = Content::modelled(&mut slow, &server);
    let mut told = Content::default();
    told.read(&mut slow, &modelled).await?;
    // And what comes later.
    server.write(&[Op::Put { key: "/a/slow".into(), value: "end".into(), lease: 0 }]).await?;
    apply(&mut server, [&mut slow, &mut other]);
    let modelled = modelled.and(Content::modelled(&mut slow, &server));
    told.read(&mut slow, &modelled).await?;
    let expected = WRITES + 1;
    if told.slow.len() != expected {
        return Err(format!("{} events, not {expected}", told.slow.len()));
    }
    Ok(())
}

/// What a stream was told, however it was grouped.
#[derive(Debug, Default, PartialEq)]
struct Content {
    slow: Vec<Event>,
    /// All about the other watch.
    compacted: Vec<WatchResponse>,
}

impl Content {
    fn modelled(slow: &mut Pair, server: &Server) -> Content {
        slow.model.rest(&server.store, &server.member, &|_| Ok(()));
        let mut content = Content::default();
        std::iter::from_fn(|| slow.model.pop()).for_each(|answer| content.add(answer));
        content
    }

    fn add(&mut self, answer: WatchResponse) {
        if answer.watch_id == SLOW {
            self.slow.extend(answer.events);
        } else {
            self.compacted.push(answer);
        }
    }

    fn and(mut self, later: Content) -> Content {
        self.slow.extend(later.slow);
        self.compacted.extend(later.compacted);
        self
    }

    /// Reads until there is as much as the model has, and compares.
    async fn read(&mut self, slow: &mut Pair, modelled: &Content) -> Result<(), String> {
        while self.slow.len() < modelled.slow.len() || self.compacted.len() < modelled.compacted.len() {
            match slow.next().await? {
                Some(answer) => self.add(answer),
                None => break,
            }
        }
        if self == modelled {
            return Ok(());
        }
        let (events, all) = (self.slow.len(), modelled.slow.len());
        let (told, modelled) = (shown(&self.compacted), shown(&modelled.compacted));
        Err(format!("{events} events of {all}, and\n{told}the model\n{modelled}"))
    }
}

fn create(watch_id: i64, key: &str, start_revision: i64) -> RequestUnion {
    RequestUnion::CreateRequest(WatchCreateRequest {
        watch_id,
        key: Bytes::copy_from_slice(key.as_bytes()),
        start_revision,
        ..WatchCreateRequest::default()
    })
}

fn apply(server: &mut Server, mut pairs: [&mut Pair; 2]) {
    while server.member.apply(&server.store, pairs.iter_mut().map(|pair| &mut pair.model)).is_some() {}
}
