//! What watch streams hold for slow clients, and of revisions that have not come whole, is bounded by one budget: past it streams
//! begin anew upstream, no watch ends, and whoever reads ordinary events waits for nobody.

use std::rc::Rc;

use futures_util::future::join_all;
use keyward::members::membership::AuthSetting;
use keyward::pb::etcdserverpb::WatchResponse;
use keyward::tasks::Tasks;
use prost::Message as _;

use crate::client::{Client, Stream};
use crate::member::{Call, Member};
use crate::rig::{Keyward, paused};
use crate::words::{WATCH, create_of, created, event, revisions, watch, watched};

const MIB: i64 = 1 << 20;
/// The budget of the one shard.
const BUDGET: i64 = MIB;
/// An event of the watch of `large`: needs room. One of `medium` does not, but is counted when it was not taken.
const LARGE: usize = 100 * 1024;
const MEDIUM: usize = 40 * 1024;
const UNREAD_EVENTS: i64 = 40;
const SMALL_EVENTS: i64 = 3_000;
/// The revision of the watch of `huge`: three times the budget, in parts that need no room each.
const PARTS: usize = 60;
const PART: usize = 50 * 1024;

struct Site {
    member: Rc<Member>,
    keyward: Keyward,
}

impl Site {
    fn new() -> Self {
        let tasks = Tasks::default();
        let member = Rc::new(Member::new(1, &tasks));
        let lines = "[watch]\nbuffer = \"1MiB\"\n[runtime]\nshards = 1\n";
        let keyward = Keyward::configured(&[&member], AuthSetting::Off, lines);
        let (this, streams) = (Rc::clone(&member), tasks.clone());
        let serve = async move {
            loop {
                let call = this.called(WATCH).await;
                streams.spawn("a scripted watch", tell(call)).detach();
            }
        };
        tasks.spawn("a scripted member's watches", serve).detach();
        Self { member, keyward }
    }

    /// A client as real ones are, with a watch of `key`.
    async fn watching(&self, key: &str) -> (Client, Stream) {
        let mut builder = h2::client::Builder::new();
        builder.initial_window_size(64 * 1024).initial_connection_window_size(1 << 30);
        let client = Client::with(self.keyward.connect(), &self.keyward.tasks, &builder).await;
        let mut stream = client.open(WATCH).await.expect("open");
        stream.say(&watch(key, 10)).await;
        assert!(watched(&stream.next().await.expect("created")).created);
        (client, stream)
    }

    fn held(&self) -> i64 {
        self.keyward.metrics.watch_held_bytes.get()
    }
}

/// A member's side of a watch, from wherever it begins.
async fn tell(mut call: Call) {
    let Ok(message) = call.messages.next().await else { return };
    let create = create_of(&message).expect("a create");
    let (id, start) = (create.watch_id, create.start_revision);
    let told = async {
        call.say(&created(id, 10_000)).await?;
        match &*create.key {
            b"large" | b"medium" => {
                let size = if create.key == "large" { LARGE } else { MEDIUM };
                for revision in start..10 + UNREAD_EVENTS {
                    call.say(&event(id, revision, size)).await?;
                }
            }
            b"small" => {
                for revision in start..10 + SMALL_EVENTS {
                    call.say(&event(id, revision, 2048)).await?;
                }
            }
            _ => {
                for part in (1..=PARTS).filter(|_| start == 10) {
                    let mut response = watched(&event(id, 10, PART).into());
                    response.fragment = part < PARTS;
                    call.say(&response.encode_to_vec()).await?;
                }
            }
        }
        call.canceled().await;
        Ok::<_, crate::wire::End>(())
    };
    // Given up by Keyward: it comes again.
    drop(told.await);
}

async fn told(stream: &mut Stream) -> WatchResponse {
    watched(&stream.next().await.expect("the watch lives"))
}

async fn all_in_order(stream: &mut Stream, count: i64, mut each: impl FnMut()) {
    let mut next = 10;
    while next < 10 + count {
        for revision in revisions(&told(stream).await) {
            assert_eq!(revision, next);
            next += 1;
        }
        each();
    }
}

/// `slow` clients do not read; of all that is held, `bound` is the most.
async fn nobody_waits(key: &str, slow: usize, bound: i64) {
    let site = Site::new();
    let mut unread = Vec::new();
    for _ in 0..slow {
        unread.push(site.watching(key).await);
    }
    let (_client, mut reader) = site.watching("small").await;
    let mut most = 0;
    all_in_order(&mut reader, SMALL_EVENTS, || most = most.max(site.held())).await;
    assert!(most <= bound, "{most} bytes were held, {bound} at most");
    assert!(most > BUDGET / 2, "they held something: {most}");
    // Nothing was dropped: who reads again is told everything.
    join_all(unread.iter_mut().map(|(_, stream)| all_in_order(stream, UNREAD_EVENTS, || {}))).await;
    drop((unread, site.member));
}

#[test]
fn slow_clients_stay_within_the_budget_and_nobody_waits_for_them() {
    // One message may end just past the limit.
    paused(nobody_waits("large", 20, BUDGET + 2 * LARGE as i64));
}

#[test]
fn past_the_budget_a_slow_client_is_at_most_two_messages_ahead() {
    paused(nobody_waits("medium", 60, BUDGET + 60 * 2 * MEDIUM as i64));
}

#[test]
fn a_revision_larger_than_the_budget_passes_and_so_do_several_of_them() {
    paused(async {
        let site = Site::new();
        let mut clients = Vec::new();
        for _ in 0..4 {
            clients.push(site.watching("huge").await);
        }
        join_all(clients.iter_mut().map(async |(_, stream)| {
            let response = told(stream).await;
            assert!(!response.fragment);
            assert_eq!(revisions(&response), [10; PARTS], "whole");
        }))
        .await;
        assert!(site.keyward.metrics.watch_resumes.get() > 0, "not all at once");
    });
}
