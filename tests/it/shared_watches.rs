//! Many clients watch the same range: one watch at the member, the feed, serves them all, and no client sees it.
//!
//! A session counts the events of its upstream streams: 1 is the opening, 2 the Created, and it lets its watches join a
//! feed at each power of two. So the Created of the fourth watch opens a feed, and the second event is the first that
//! lets a watch join it.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use futures_util::future::join_all;
use h2::Reason;
use keyward::members::membership::AuthSetting;
use keyward::pb::etcdserverpb::watch_request::RequestUnion;
use keyward::pb::etcdserverpb::{WatchCreateRequest, WatchProgressRequest, WatchRequest, WatchResponse};
use keyward::pb::mvccpb::{Event, KeyValue};
use keyward::refusal::Code;
use keyward::tasks::Tasks;
use prost::Message as _;
use tokio::time::{Instant, sleep, timeout};

use crate::client::{Client, Stream};
use crate::member::{Call, Member};
use crate::rig::{Keyward, log_in, paused, settled};
use crate::words::{
    INVALID_TOKEN, TXN, WATCH, cancel_watch, create_of, created, event, header, refused, revisions, txn_done,
    watched,
};

/// The hub's timer stands still, unless a test wants it: a watch joins with a message only.
const LINES: &str = "[watch]\nidle_progress = \"0s\"\nshare_from = 4\n[runtime]\nshards = 1\n";
/// The clients that make a feed worth its while.
const ALL: usize = 4;
/// The feed's own watch.
const FEED: i64 = 1;
/// Nothing that Keyward does at once takes longer.
const AT_ONCE: Duration = Duration::from_secs(5);

struct Site {
    member: Member,
    keyward: Keyward,
}

/// A client's side of a watch.
struct Watcher {
    stream: Stream,
    /// As the client knows it.
    id: i64,
    _client: Client,
}

/// The member's side of a watch.
struct Upstream {
    call: Call,
    id: i64,
    start: i64,
}

impl Site {
    fn new() -> Self {
        Self::of(AuthSetting::Off, LINES)
    }

    fn of(auth: AuthSetting, lines: &str) -> Self {
        let member = Member::new(1, &Tasks::default());
        let keyward = Keyward::configured(&[&member], auth, lines);
        Self { member, keyward }
    }

    /// The watch of a client of its own, which stands at the member.
    async fn watching(&self, create: WatchCreateRequest) -> (Watcher, Upstream) {
        self.watching_as(self.keyward.client().await, create).await
    }

    /// As many watches of one key as share a feed.
    async fn all_watching(&self) -> Vec<(Watcher, Upstream)> {
        let mut all = Vec::new();
        for _ in 0..ALL {
            all.push(self.watching(on("k")).await);
        }
        all
    }

    async fn watching_as(&self, client: Client, create: WatchCreateRequest) -> (Watcher, Upstream) {
        self.watching_at(9, client, create).await
    }

    /// The same at a member that is at `revision`.
    async fn watching_at(
        &self,
        revision: i64,
        client: Client,
        create: WatchCreateRequest,
    ) -> (Watcher, Upstream) {
        let mut stream = client.open(WATCH).await.expect("open");
        stream.say(&creating(create)).await;
        let upstream = self.accept(revision).await;
        let told = watched(&stream.next().await.expect("created"));
        assert!(told.created && !told.canceled, "{told:?}");
        (Watcher { stream, id: told.watch_id, _client: client }, upstream)
    }

    /// Answers the next call, which must be a watch.
    async fn accept(&self, revision: i64) -> Upstream {
        let call = timeout(AT_ONCE, self.member.called(WATCH)).await.expect("a watch comes");
        let mut upstream = Upstream::of(call).await;
        upstream.call.say(&created(upstream.id, revision)).await.expect("taken");
        upstream
    }

    /// The next call, which must be a feed's; it is not answered.
    async fn feed(&self) -> Call {
        let call = timeout(AT_ONCE, self.member.called(WATCH)).await;
        let call = call.unwrap_or_else(|_| panic!("a feed comes: {:?}", self.figures()));
        let feed = Upstream::of(call).await;
        assert_eq!((feed.id, feed.start), (FEED, 0), "a feed watches from now");
        feed.call
    }

    async fn no_call_comes(&self) {
        settled().await;
        let stray = self.member.was_called_again();
        assert!(stray.is_none(), "{:?}", stray.map(|call| call.path().to_owned()));
    }

    /// The feeds that are open, their readers, and the watches that ever joined one.
    fn figures(&self) -> (i64, i64, u64) {
        let figures = &self.keyward.metrics.watch_feeds;
        (figures.feeds.get(), figures.readers.get(), figures.joins.get())
    }

    /// A feed and its clients, which are told everything up to revision 11 on streams of their own.
    async fn shared(&self) -> (Vec<Watcher>, Call) {
        let mut clients = Vec::new();
        for _ in 0..ALL {
            clients.push(self.keyward.client().await);
        }
        self.shared_by(clients, &[]).await
    }

    /// The same; the clients in `notified` want progress.
    async fn shared_by(&self, clients: Vec<Client>, notified: &[usize]) -> (Vec<Watcher>, Call) {
        let (mut watchers, mut own) = (Vec::new(), Vec::new());
        for (at, client) in clients.into_iter().enumerate() {
            // Ids of their own choice, so that none is the feed's.
            let create = WatchCreateRequest {
                watch_id: 70 + i64::try_from(at).expect("few"),
                progress_notify: notified.contains(&at),
                ..on("k")
            };
            let (watcher, upstream) = self.watching_as(client, create).await;
            watchers.push(watcher);
            own.push(upstream);
        }
        let mut feed = self.feed().await;
        feed.say(&created(FEED, 11)).await.expect("taken");
        settled().await;
        for (watcher, upstream) in watchers.iter_mut().zip(&mut own) {
            for revision in [10, 11] {
                upstream.tell(revision).await;
                assert_eq!(watcher.told().await, [revision]);
            }
            upstream.closed().await;
        }
        let count = i64::try_from(watchers.len()).expect("few");
        assert_eq!((self.figures().0, self.figures().1), (1, count));
        (watchers, feed)
    }

    /// Answers the watches by which clients go on after the loss of a feed. Each begins with the last revision that
    /// was told, to be dropped: V4 answers no progress from the future.
    async fn resumed(&self, count: usize, told: i64) -> Vec<Upstream> {
        let mut resumed = Vec::new();
        for _ in 0..count {
            let upstream = self.accept(told + 1).await;
            assert_eq!(upstream.start, told);
            resumed.push(upstream);
        }
        resumed
    }
}

impl Watcher {
    async fn next(&mut self) -> WatchResponse {
        let next = timeout(AT_ONCE, self.stream.next()).await.expect("something is told");
        watched(&next.expect("the stream lives"))
    }

    /// The revisions in the next message, which must be of this watch.
    async fn told(&mut self) -> Vec<i64> {
        let response = self.next().await;
        assert_eq!((response.watch_id, response.canceled, response.fragment), (self.id, false, false));
        revisions(&response)
    }

    async fn is_told_nothing(&mut self) {
        let told = timeout(Duration::from_millis(20), self.stream.next()).await;
        assert!(told.is_err(), "{:?}", told.map(|told| told.map(|message| watched(&message))));
    }
}

impl Upstream {
    async fn of(mut call: Call) -> Self {
        let create = create_of(&call.messages.next().await.expect("a request")).expect("a create");
        assert_eq!(create.key, "k".as_bytes());
        Self { call, id: create.watch_id, start: create.start_revision }
    }

    async fn tell(&mut self, revision: i64) {
        self.call.say(&event(self.id, revision, 5)).await.expect("taken");
    }

    /// The same of several revisions, in one message.
    async fn tell_all(&mut self, all: &[i64]) {
        self.call.say(&events(self.id, all, false)).await.expect("taken");
    }

    async fn closed(&mut self) {
        closed(&mut self.call).await;
    }
}

/// Waits until Keyward has ended the stream.
async fn closed(call: &mut Call) {
    let reset = timeout(AT_ONCE, call.canceled()).await.expect("the stream is ended");
    assert_eq!(reset, Reason::CANCEL);
}

/// The stream is there, and nothing more was asked on it.
async fn is_left_alone(call: &mut Call) {
    let ended = timeout(Duration::from_millis(20), call.canceled()).await;
    assert!(ended.is_err(), "the stream was ended: {ended:?}");
    let asked = timeout(Duration::from_millis(20), call.messages.next()).await;
    assert!(asked.is_err(), "{asked:?}");
}

fn on(key: &str) -> WatchCreateRequest {
    WatchCreateRequest { key: key.to_owned().into(), start_revision: 10, ..WatchCreateRequest::default() }
}

fn creating(create: WatchCreateRequest) -> Vec<u8> {
    WatchRequest { request_union: Some(RequestUnion::CreateRequest(create)) }.encode_to_vec()
}

fn asking_progress() -> Vec<u8> {
    let request = RequestUnion::ProgressRequest(WatchProgressRequest {});
    WatchRequest { request_union: Some(request) }.encode_to_vec()
}

fn is_progress_request(message: &[u8]) -> bool {
    let request = WatchRequest::decode(message).expect("a WatchRequest").request_union;
    matches!(request, Some(RequestUnion::ProgressRequest(_)))
}

fn progress(watch_id: i64, revision: i64) -> Vec<u8> {
    WatchResponse { header: Some(header(revision)), watch_id, ..WatchResponse::default() }.encode_to_vec()
}

fn compacted(watch_id: i64, compact_revision: i64) -> Vec<u8> {
    WatchResponse {
        header: Some(header(0)),
        watch_id,
        canceled: true,
        compact_revision,
        ..WatchResponse::default()
    }
    .encode_to_vec()
}

/// One message with an event of each of these revisions.
fn events(watch_id: i64, all: &[i64], fragment: bool) -> Vec<u8> {
    let put = |revision: &i64| {
        let kv = KeyValue { key: "k".into(), mod_revision: *revision, ..KeyValue::default() };
        Event { kv: Some(kv), ..Event::default() }
    };
    WatchResponse {
        header: all.last().map(|last| header(*last)),
        watch_id,
        events: all.iter().map(put).collect(),
        fragment,
        ..WatchResponse::default()
    }
    .encode_to_vec()
}

/// One event of the member reaches all.
async fn all_are_told(feed: &mut Call, watchers: &mut [Watcher], revision: i64) {
    feed.say(&event(FEED, revision, 5)).await.expect("taken");
    for watcher in watchers {
        assert_eq!(watcher.told().await, [revision]);
    }
}

#[test]
fn four_watches_move_to_one_without_gap_and_without_double() {
    paused(async {
        let site = Site::new();
        let (mut watchers, mut own): (Vec<_>, Vec<_>) = site.all_watching().await.into_iter().unzip();
        let mut feed = site.feed().await;
        for (watcher, upstream) in watchers.iter_mut().zip(&mut own) {
            upstream.tell(10).await;
            assert_eq!(watcher.told().await, [10]);
        }
        feed.say(&created(FEED, 10)).await.expect("taken");
        settled().await;
        // Three are ahead of the feed when they could move, the fourth further than the others.
        for (watcher, (upstream, last)) in watchers.iter_mut().zip(own.iter_mut().zip([10, 14, 14, 18])) {
            for revision in 11..=last {
                upstream.tell(revision).await;
                assert_eq!(watcher.told().await, [revision]);
            }
        }
        assert_eq!(site.figures(), (1, 0, 0), "a member that is behind takes nobody over");
        for revision in 11..=16 {
            feed.say(&event(FEED, revision, 5)).await.expect("taken");
        }
        settled().await;
        // The second and the third move once the feed has come as far as they.
        for at in [1, 2] {
            assert_eq!((watchers[at].told().await, watchers[at].told().await), (vec![15], vec![16]));
            own[at].closed().await;
        }
        assert_eq!(site.figures(), (1, 2, 2));
        // The first is behind the feed: it takes the rest from there, and not from its own stream.
        for revision in 11..=13 {
            own[0].tell(revision).await;
        }
        for revision in 11..=16 {
            assert_eq!(watchers[0].told().await, [revision]);
        }
        own[0].closed().await;
        assert_eq!(site.figures(), (1, 3, 3));
        for revision in 17..=18 {
            watchers[3].is_told_nothing().await;
            all_are_told(&mut feed, &mut watchers[..3], revision).await;
        }
        own[3].closed().await;
        assert_eq!(site.figures(), (1, 4, 4));
        for revision in 19..=40 {
            all_are_told(&mut feed, &mut watchers, revision).await;
        }
        for watcher in &mut watchers {
            watcher.is_told_nothing().await;
        }
        is_left_alone(&mut feed).await;
        site.no_call_comes().await;
    });
}

#[test]
fn the_watches_of_one_client_move_as_those_of_several() {
    paused(async {
        let site = Site::new();
        let (mut watchers, mut own) = (Vec::new(), Vec::new());
        for _ in 0..2 {
            let (mut watcher, mut upstream) = site.watching(on("k")).await;
            watcher.stream.say(&creating(WatchCreateRequest { fragment: true, ..on("k") })).await;
            let create =
                create_of(&upstream.call.messages.next().await.expect("a request")).expect("a create");
            upstream.call.say(&created(create.watch_id, 9)).await.expect("taken");
            let second = watcher.next().await;
            assert!(second.created);
            watchers.push((watcher, second.watch_id));
            own.push((upstream, create.watch_id));
        }
        let mut feed: Option<Call> = None;
        for revision in 10..=80 {
            if let Some(feed) = &mut feed {
                feed.say(&event(FEED, revision, 5)).await.expect("taken");
                if revision == 20 {
                    // One message more, so that the turns to join do not all fall on the feed's messages.
                    feed.say(&progress(FEED, revision)).await.expect("taken");
                }
            }
            settled().await;
            for (upstream, second) in &mut own {
                // After the move the stream is gone.
                drop(upstream.call.say(&event(upstream.id, revision, 5)).await);
                drop(upstream.call.say(&event(*second, revision, 5)).await);
            }
            for (watcher, second) in &mut watchers {
                let told = [watcher.next().await, watcher.next().await];
                let mut ids = told.each_ref().map(|told| told.watch_id);
                ids.sort_unstable();
                assert_eq!(ids, [watcher.id, *second]);
                assert_eq!(told.each_ref().map(revisions), [[revision], [revision]]);
            }
            if feed.is_none() {
                // It comes with the fourth message of a stream: a Created more than where each has one.
                let mut call = site.feed().await;
                call.say(&created(FEED, revision)).await.expect("taken");
                feed = Some(call);
            }
        }
        assert_eq!(site.figures(), (1, 2, 4));
        for (upstream, _) in &mut own {
            upstream.closed().await;
        }
        for (watcher, _) in &mut watchers {
            watcher.is_told_nothing().await;
        }
    });
}

#[test]
fn a_revision_in_fragments_is_told_whole_to_each() {
    paused(async {
        let site = Site::new();
        let (mut watchers, mut own) = (Vec::new(), Vec::new());
        for _ in 0..ALL {
            let (mut watcher, mut upstream) = site.watching(on("k")).await;
            upstream.tell(10).await;
            assert_eq!(watcher.told().await, [10]);
            watchers.push(watcher);
            own.push(upstream);
        }
        let mut feed = site.feed().await;
        feed.say(&created(FEED, 10)).await.expect("taken");
        feed.say(&events(FEED, &[11, 12, 12], true)).await.expect("taken");
        settled().await;
        // Half of the clients have seen the beginning of the revision only, the others all of it.
        for (watcher, upstream) in watchers.iter_mut().zip(&mut own).take(2) {
            upstream.tell_all(&[11]).await;
            assert_eq!(watcher.told().await, [11]);
            upstream.closed().await;
        }
        for (watcher, upstream) in watchers.iter_mut().zip(&mut own).skip(2) {
            upstream.tell_all(&[11, 12, 12, 12]).await;
            assert_eq!(watcher.told().await, [11, 12, 12, 12]);
            upstream.closed().await;
        }
        for watcher in &mut watchers {
            watcher.is_told_nothing().await;
        }
        feed.say(&events(FEED, &[12], false)).await.expect("taken");
        for watcher in &mut watchers[..2] {
            assert_eq!(watcher.told().await, [12, 12, 12]);
        }
        all_are_told(&mut feed, &mut watchers, 13).await;
    });
}

/// Tells each watch everything up to `last`, and sees that nothing but its own stream brings it.
async fn go_on_alone(site: &Site, all: &mut [(Watcher, Upstream)], last: i64) {
    for revision in 10..=last {
        for (watcher, upstream) in all.iter_mut() {
            upstream.tell(revision).await;
            assert_eq!(watcher.told().await, [revision]);
        }
    }
    site.no_call_comes().await;
    assert_eq!(site.figures(), (0, 0, 0));
    for (_, upstream) in all {
        is_left_alone(&mut upstream.call).await;
    }
}

#[test]
fn three_watches_share_nothing() {
    paused(async {
        let site = Site::new();
        let mut all = Vec::new();
        for _ in 0..3 {
            all.push(site.watching(on("k")).await);
        }
        go_on_alone(&site, &mut all, 80).await;
    });
}

#[test]
fn nothing_is_shared_where_the_number_is_0_and_two_are_enough_where_it_is_2() {
    paused(async {
        let lines = |number: usize| format!("[watch]\nshare_from = {number}\n[runtime]\nshards = 1\n");
        let site = Site::of(AuthSetting::Off, &lines(0));
        let mut all = Vec::new();
        for _ in 0..8 {
            all.push(site.watching(on("k")).await);
        }
        go_on_alone(&site, &mut all, 20).await;

        let site = Site::of(AuthSetting::Off, &lines(2));
        let _one = site.watching(on("k")).await;
        site.no_call_comes().await;
        let _other = site.watching(on("k")).await;
        site.feed().await;
    });
}

#[test]
fn watches_of_other_ranges_and_options_share_nothing() {
    paused(async {
        let others = [
            WatchCreateRequest { range_end: "l".into(), ..on("k") },
            WatchCreateRequest { range_end: "m".into(), ..on("k") },
            WatchCreateRequest { prev_kv: true, ..on("k") },
            WatchCreateRequest { filters: vec![1], ..on("k") },
            WatchCreateRequest { range_end: "l".into(), prev_kv: true, ..on("k") },
        ];
        let site = Site::new();
        let mut all = Vec::new();
        for _ in 0..3 {
            all.push(site.watching(on("k")).await);
            for other in &others {
                all.push(site.watching(other.clone()).await);
            }
        }
        go_on_alone(&site, &mut all, 30).await;
    });
}

#[test]
fn what_a_client_asks_for_itself_alone_does_not_keep_it_from_sharing() {
    paused(async {
        let site = Site::new();
        let creates = [
            on("k"),
            WatchCreateRequest { watch_id: 9, ..on("k") },
            WatchCreateRequest { progress_notify: true, ..on("k") },
            WatchCreateRequest { fragment: true, start_revision: 5, ..on("k") },
        ];
        for create in creates {
            site.no_call_comes().await;
            site.watching(create).await;
        }
        // The clients have left: their watches do not count.
        site.no_call_comes().await;
        let mut all = Vec::new();
        for start_revision in [4, 5, 10, 8] {
            let fragment = start_revision == 5;
            let progress_notify = start_revision == 8;
            let create = WatchCreateRequest { start_revision, fragment, progress_notify, ..on("k") };
            all.push(site.watching(create).await);
        }
        site.feed().await;
    });
}

#[test]
fn watches_of_two_users_share_nothing_with_each_other() {
    paused(async {
        let site = Site::of(AuthSetting::On, LINES);
        let (alice, bob) = (site.keyward.logged_in("alice").await, site.keyward.logged_in("bob").await);
        let mut all = Vec::new();
        for _ in 0..3 {
            for user in [&alice, &bob] {
                all.push(site.watching_as(user.again(), on("k")).await);
            }
        }
        go_on_alone(&site, &mut all, 12).await;
        // A fourth of alice's: hers are shared.
        let (mut fourth, mut own) = site.watching_at(12, alice, on("k")).await;
        let mut feed = site.feed().await;
        assert_eq!(feed.token(), Some("alice.1"), "with the token of its user");
        feed.say(&created(FEED, 13)).await.expect("taken");
        settled().await;
        own.tell_all(&[10, 11, 12]).await;
        assert_eq!(fourth.told().await, [10, 11, 12]);
        own.tell(13).await;
        assert_eq!(fourth.told().await, [13]);
        own.closed().await;
        for revision in 13..=80 {
            if revision > 13 {
                feed.say(&event(FEED, revision, 5)).await.expect("taken");
                assert_eq!(fourth.told().await, [revision]);
            }
            for (watcher, upstream) in &mut all {
                drop(upstream.call.say(&event(upstream.id, revision, 5)).await);
                assert_eq!(watcher.told().await, [revision]);
            }
        }
        assert_eq!(site.figures(), (1, 4, 4));
        for (_, upstream) in &mut all {
            match upstream.call.token() {
                Some(token) if token.starts_with("bob.") => is_left_alone(&mut upstream.call).await,
                _ => upstream.closed().await,
            }
        }
        site.no_call_comes().await;
    });
}

#[test]
fn connections_with_one_token_share_a_feed() {
    paused(async {
        let site = Site::of(AuthSetting::On, LINES);
        let token = log_in(&site.keyward.client().await, "alice").await;
        let mut clients = Vec::new();
        for _ in 0..ALL {
            clients.push(site.keyward.client().await.header("token", &token));
        }
        let (mut watchers, mut feed) = site.shared_by(clients, &[]).await;
        assert_eq!(feed.token(), Some("alice.1"));
        all_are_told(&mut feed, &mut watchers, 12).await;
    });
}

#[test]
fn clients_that_logged_in_by_themselves_as_one_user_share_a_feed() {
    paused(async {
        let site = Site::of(AuthSetting::On, LINES);
        let mut clients = Vec::new();
        for _ in 0..ALL {
            clients.push(site.keyward.logged_in("alice").await);
        }
        let (mut watchers, mut feed) = site.shared_by(clients, &[]).await;
        assert_eq!(feed.token(), Some("alice.1"));
        all_are_told(&mut feed, &mut watchers, 12).await;
    });
}

#[test]
fn each_client_goes_on_alone_after_every_way_of_ending_of_a_feed() {
    paused(async {
        let ends: [fn(Call); 5] = [
            |call| call.reset(Reason::CANCEL),
            |call| call.reset(Reason::INTERNAL_ERROR),
            |call| call.end(Code::Unavailable, "etcdserver: no leader"),
            |call| call.end(Code::Unavailable, "error reading from server: EOF"),
            Call::end_without_status,
        ];
        for end in ends {
            let site = Site::new();
            let (mut watchers, mut feed) = site.shared().await;
            all_are_told(&mut feed, &mut watchers, 12).await;
            // The last one is still on its way when the feed ends, and arrives only where the end is orderly.
            feed.say(&event(FEED, 13, 5)).await.expect("taken");
            end(feed);
            for _ in 0..ALL {
                let mut upstream = site.accept(15).await;
                assert!([12, 13].contains(&upstream.start), "from {} on", upstream.start);
                for revision in upstream.start..=15 {
                    upstream.tell(revision).await;
                }
                // The stream stays.
                site.keyward
                    .tasks
                    .spawn("a watch", async move { drop(upstream.call.messages.next().await) })
                    .detach();
            }
            for watcher in &mut watchers {
                for revision in 13..=15 {
                    assert_eq!(watcher.told().await, [revision]);
                }
                watcher.is_told_nothing().await;
            }
            assert_eq!(site.figures().1, 0, "nobody reads it any more");
            site.no_call_comes().await;
        }
    });
}

#[test]
fn after_a_lost_feed_the_clients_come_together_on_another_one() {
    paused(async {
        let site = Site::new();
        let (mut watchers, feed) = site.shared().await;
        feed.refuse_later();
        let mut own = site.resumed(ALL, 11).await;
        let mut feed: Option<Call> = None;
        for revision in 12..=400 {
            // Longer than the pause between two feeds, over all of them.
            sleep(Duration::from_millis(50)).await;
            if let Some(feed) = &mut feed {
                feed.say(&event(FEED, revision, 5)).await.expect("taken");
                settled().await;
            }
            for upstream in &mut own {
                drop(upstream.call.say(&event(upstream.id, revision, 5)).await);
            }
            if feed.is_none()
                && let Some(call) = site.member.was_called_again()
            {
                let mut upstream = Upstream::of(call).await;
                assert_eq!((upstream.id, upstream.start), (FEED, 0));
                upstream.call.say(&created(FEED, revision)).await.expect("taken");
                feed = Some(upstream.call);
            }
            for watcher in &mut watchers {
                assert_eq!(watcher.told().await, [revision]);
            }
        }
        assert_eq!(site.figures(), (1, 4, 8));
        for upstream in &mut own {
            upstream.closed().await;
        }
        for watcher in &mut watchers {
            watcher.is_told_nothing().await;
        }
    });
}

#[test]
fn a_feed_that_ended_is_not_counted_as_open() {
    paused(async {
        let site = Site::new();
        let (_watchers, feed) = site.shared().await;
        feed.refuse_later();
        let _own = site.resumed(ALL, 11).await;
        settled().await;
        assert_eq!(site.figures(), (0, 0, 4));
    });
}

#[test]
fn a_feed_that_nobody_could_join_ends() {
    paused(async {
        let site = Site::new();
        let (mut watchers, mut own): (Vec<_>, Vec<_>) = site.all_watching().await.into_iter().unzip();
        let mut feed = site.feed().await;
        // It begins later than the clients have got to, and they are told nothing that would let them catch up.
        feed.say(&created(FEED, 20)).await.expect("taken");
        sleep(Duration::from_secs(5)).await;
        feed.say(&event(FEED, 21, 5)).await.expect("taken");
        is_left_alone(&mut feed).await;
        sleep(Duration::from_secs(6)).await;
        feed.say(&event(FEED, 22, 5)).await.expect("taken");
        closed(&mut feed).await;
        for (watcher, upstream) in watchers.iter_mut().zip(&mut own) {
            upstream.tell_all(&[10, 21, 22]).await;
            assert_eq!(watcher.told().await, [10, 21, 22]);
            is_left_alone(&mut upstream.call).await;
        }
        assert_eq!((site.figures().1, site.figures().2), (0, 0));
    });
}

/// A feed whose events always come after those of the clients' own streams.
#[test]
fn clients_ahead_of_the_feed_join_once_it_has_caught_up() {
    paused(async {
        let site = Site::new();
        let mut all = site.all_watching().await;
        let mut feed = site.feed().await;
        feed.say(&created(FEED, 9)).await.expect("taken");
        let mut revision = 10;
        while site.figures().2 < ALL as u64 {
            assert!(revision < 20, "nobody joins a feed that comes second: {:?}", site.figures());
            let mut joined = Vec::new();
            for (watcher, upstream) in &mut all {
                // A client that has joined has left its own stream.
                if upstream.call.say(&event(upstream.id, revision, 5)).await.is_ok() {
                    assert_eq!(watcher.told().await, [revision]);
                } else {
                    joined.push(watcher);
                }
            }
            settled().await;
            feed.say(&event(FEED, revision, 5)).await.expect("taken");
            for watcher in joined {
                assert_eq!(watcher.told().await, [revision]);
            }
            settled().await;
            revision += 1;
        }
        let mut watchers: Vec<Watcher> = all.into_iter().map(|(watcher, _)| watcher).collect();
        for revision in revision..revision + 5 {
            all_are_told(&mut feed, &mut watchers, revision).await;
        }
    });
}

#[test]
fn a_feed_that_lags_behind_all_clients_ends_although_they_try_to_join() {
    paused(async {
        let site = Site::new();
        let mut all = site.all_watching().await;
        let mut feed = site.feed().await;
        feed.say(&created(FEED, 9)).await.expect("taken");
        let (began, mut revision) = (Instant::now(), 10);
        while began.elapsed() < Duration::from_secs(60) && feed.say(&event(FEED, revision, 5)).await.is_ok() {
            for (watcher, upstream) in &mut all {
                // Two revisions are there before the feed's next one.
                let told = if revision == 10 { vec![10, 11, 12] } else { vec![revision + 2] };
                upstream.tell_all(&told).await;
                assert_eq!(watcher.told().await, told);
            }
            revision += 1;
            sleep(Duration::from_millis(100)).await;
        }
        assert_eq!((site.figures().1, site.figures().2), (0, 0), "nobody could join");
        closed(&mut feed).await;
    });
}

#[test]
fn watches_without_events_move_when_the_timer_ticks() {
    paused(async {
        let lines = "[watch]\nidle_progress = \"30s\"\nshare_from = 4\n[runtime]\nshards = 1\n";
        let site = Site::of(AuthSetting::Off, lines);
        let (mut watchers, mut own): (Vec<_>, Vec<_>) = site.all_watching().await.into_iter().unzip();
        let mut feed = site.feed().await;
        feed.say(&created(FEED, 9)).await.expect("taken");
        sleep(Duration::from_secs(61)).await;
        for upstream in &mut own {
            upstream.closed().await;
        }
        assert_eq!(site.figures(), (1, 4, 4));
        all_are_told(&mut feed, &mut watchers, 10).await;
    });
}

/// A minute of events on streams of their own, while the member refuses every feed. How many it was asked for.
async fn refuse_for_a_minute(site: &Site, all: &mut [(Watcher, Upstream)], reason: &str) -> usize {
    let (began, mut revision, mut feeds) = (Instant::now(), 9, Vec::new());
    while began.elapsed() < Duration::from_secs(60) {
        revision += 1;
        for (watcher, upstream) in all.iter_mut() {
            upstream.tell(revision).await;
            assert_eq!(watcher.told().await, [revision]);
        }
        settled().await;
        while let Some(call) = site.member.was_called_again() {
            if call.path() == TXN {
                call.reply(&txn_done(revision)).await;
                continue;
            }
            let mut feed = Upstream::of(call).await;
            assert_eq!((feed.id, feed.start), (FEED, 0));
            feed.call.say(&refused(reason)).await.expect("taken");
            feed.closed().await;
            feeds.push(began.elapsed());
        }
        sleep(Duration::from_millis(20)).await;
    }
    for (watcher, upstream) in all.iter_mut() {
        is_left_alone(&mut upstream.call).await;
        watcher.is_told_nothing().await;
    }
    let (_, readers, joins) = site.figures();
    assert_eq!((readers, joins), (0, 0));
    assert!(feeds.len() > 1, "it is tried again: {feeds:?}");
    feeds.len()
}

#[test]
fn a_feed_that_is_refused_is_no_client_s_business_and_is_tried_again_ever_more_rarely() {
    paused(async {
        let invalid = format!("rpc error: code = Unauthenticated desc = {INVALID_TOKEN}");
        let denied = "rpc error: code = PermissionDenied desc = etcdserver: permission denied";
        for auth in [AuthSetting::Off, AuthSetting::On] {
            for reason in [&*invalid, denied] {
                let site = Site::of(auth, LINES);
                let client = match auth {
                    AuthSetting::On => site.keyward.logged_in("alice").await,
                    _ => site.keyward.client().await,
                };
                let mut all = Vec::new();
                for _ in 0..ALL {
                    all.push(site.watching_as(client.again(), on("k")).await);
                }
                let logins = site.member.logins();
                let tries = refuse_for_a_minute(&site, &mut all, reason).await;
                assert!(tries <= 7, "{tries} feeds in a minute");
                assert!(site.member.logins() <= logins + tries, "no storm of logins");
            }
        }
    });
}

/// A client as real ones are: a window per stream, and one for the connection that no stream can use up.
async fn with_small_window(keyward: &Keyward) -> Client {
    let mut builder = h2::client::Builder::new();
    builder.initial_window_size(64 * 1024).initial_connection_window_size(1 << 30);
    Client::with(keyward.connect(), &keyward.tasks, &builder).await
}

/// The last revision of a long history.
const LAST: i64 = 4_000;

#[test]
fn a_client_that_does_not_read_goes_on_alone_later_and_holds_up_nobody() {
    paused(async {
        let site = Site::new();
        let mut clients = Vec::new();
        for _ in 0..ALL {
            clients.push(with_small_window(&site.keyward).await);
        }
        let (mut watchers, mut feed) = site.shared_by(clients, &[]).await;
        let mut slow = watchers.remove(1);
        for revision in 12..=LAST {
            feed.say(&event(FEED, revision, 2048)).await.expect("taken");
            for watcher in &mut watchers {
                assert_eq!(watcher.told().await, [revision]);
            }
        }
        site.no_call_comes().await;
        assert!(site.keyward.metrics.watch_held_bytes.get() < 6 << 20, "what nobody reads is not kept");
        let script = async {
            let call = site.member.called(WATCH).await;
            let mut upstream = Upstream::of(call).await;
            assert!((20..LAST - 1024).contains(&upstream.start), "from {} on", upstream.start);
            upstream.call.say(&created(upstream.id, LAST)).await.expect("taken");
            for revision in upstream.start..=LAST {
                // It goes back to the feed as soon as the rest is kept there.
                if upstream.call.say(&event(upstream.id, revision, 2048)).await.is_err() {
                    break;
                }
            }
            upstream
        };
        let reading = async {
            for revision in 12..=LAST {
                assert_eq!(slow.told().await, [revision]);
            }
        };
        let (mut upstream, ()) = tokio::join!(script, reading);
        slow.is_told_nothing().await;
        // It comes back to the others, and nobody misses anything meanwhile.
        for revision in LAST + 1..LAST + 100 {
            all_are_told(&mut feed, &mut watchers, revision).await;
            drop(upstream.call.say(&event(upstream.id, revision, 5)).await);
            assert_eq!(slow.told().await, [revision]);
        }
        assert_eq!(site.figures(), (1, 4, 5), "it reads again, and is with the others again");
        upstream.closed().await;
        slow.is_told_nothing().await;
    });
}

#[test]
fn a_client_s_progress_request_is_answered_to_it_alone() {
    paused(async {
        let site = Site::new();
        let (mut watchers, mut feed) = site.shared().await;
        watchers[2].stream.say(&asking_progress()).await;
        let asked = timeout(AT_ONCE, feed.messages.next()).await.expect("asked").expect("a request");
        assert!(is_progress_request(&asked));
        feed.say(&progress(-1, 20)).await.expect("taken");
        let answer = watchers[2].next().await;
        assert_eq!((answer.watch_id, answer.header.map(|header| header.revision)), (-1, Some(20)));
        for watcher in &mut watchers {
            watcher.is_told_nothing().await;
        }
        is_left_alone(&mut feed).await;
        all_are_told(&mut feed, &mut watchers, 21).await;
    });
}

#[test]
fn many_progress_requests_at_once_are_few_upstream() {
    paused(async {
        let site = Site::new();
        let (mut watchers, mut feed) = site.shared().await;
        for watcher in &mut watchers {
            watcher.stream.say(&asking_progress()).await;
        }
        // Those that came after the first was sent want an answer of their own, and share it.
        for revision in [20, 21] {
            let asked = timeout(AT_ONCE, feed.messages.next()).await.expect("asked").expect("a request");
            assert!(is_progress_request(&asked));
            is_left_alone(&mut feed).await;
            feed.say(&progress(-1, revision)).await.expect("taken");
        }
        for watcher in &mut watchers {
            let answer = watcher.next().await;
            assert_eq!(answer.watch_id, -1);
            let told = answer.header.map(|header| header.revision);
            assert!(matches!(told, Some(20 | 21)), "{told:?}");
            watcher.is_told_nothing().await;
        }
        is_left_alone(&mut feed).await;
    });
}

#[test]
fn a_progress_request_that_the_member_drops_is_answered_all_the_same() {
    paused(async {
        let site = Site::new();
        let (mut watchers, mut feed) = site.shared().await;
        for watcher in &mut watchers {
            watcher.stream.say(&asking_progress()).await;
        }
        for watcher in &mut watchers {
            let answer = watcher.next().await;
            assert_eq!((answer.watch_id, answer.header.map(|header| header.revision)), (-1, Some(11)));
        }
        // And so is the next one, by the member.
        while timeout(Duration::from_secs(1), feed.messages.next()).await.is_ok() {}
        watchers[0].stream.say(&asking_progress()).await;
        timeout(AT_ONCE, feed.messages.next()).await.expect("asked").expect("a request");
        feed.say(&progress(-1, 20)).await.expect("taken");
        let answer = watchers[0].next().await;
        assert_eq!((answer.watch_id, answer.header.map(|header| header.revision)), (-1, Some(20)));
    });
}

#[test]
fn progress_of_the_feed_is_told_to_those_who_want_it_and_kept_for_all() {
    paused(async {
        let site = Site::new();
        let mut clients = Vec::new();
        for _ in 0..ALL {
            clients.push(site.keyward.client().await);
        }
        let (mut watchers, mut feed) = site.shared_by(clients, &[1, 3]).await;
        feed.say(&progress(FEED, 25)).await.expect("taken");
        for (at, watcher) in watchers.iter_mut().enumerate() {
            if at % 2 == 1 {
                let told = watcher.next().await;
                assert_eq!(
                    (told.watch_id, told.header.map(|header| header.revision)),
                    (watcher.id, Some(25))
                );
                assert!(told.events.is_empty() && !told.created && !told.canceled, "{told:?}");
            }
            watcher.is_told_nothing().await;
        }
        feed.refuse_later();
        site.resumed(ALL, 25).await;
    });
}

#[test]
fn a_feed_ends_with_its_last_client() {
    paused(async {
        let site = Site::new();
        let (mut watchers, mut feed) = site.shared().await;
        // The last one was the one that opened it.
        for left in (0..ALL).rev() {
            let watcher = watchers.remove(left);
            if left == 1 {
                // Its connection goes away.
                drop(watcher);
            } else {
                watcher.stream.cancel();
            }
            settled().await;
            if left > 0 {
                assert_eq!(site.figures().1, i64::try_from(left).expect("few"));
                let revision = 20 - i64::try_from(left).expect("few");
                all_are_told(&mut feed, &mut watchers, revision).await;
                is_left_alone(&mut feed).await;
            }
        }
        closed(&mut feed).await;
        assert_eq!(site.figures(), (0, 0, 4));
        site.no_call_comes().await;
    });
}

#[test]
fn a_watch_that_is_cancelled_leaves_the_others_alone() {
    paused(async {
        let site = Site::new();
        let (mut watchers, mut feed) = site.shared().await;
        let mut leaving = watchers.remove(0);
        leaving.stream.say(&cancel_watch(leaving.id)).await;
        let told = leaving.next().await;
        assert!(told.canceled && told.watch_id == leaving.id && told.compact_revision == 0, "{told:?}");
        settled().await;
        assert_eq!(site.figures(), (1, 3, 4));
        is_left_alone(&mut feed).await;
        for revision in 12..=90 {
            all_are_told(&mut feed, &mut watchers, revision).await;
        }
        leaving.is_told_nothing().await;
        site.no_call_comes().await;
    });
}

#[test]
fn a_feed_ends_with_its_last_watch_although_the_clients_stay() {
    paused(async {
        let site = Site::new();
        let (mut watchers, mut feed) = site.shared().await;
        for watcher in &mut watchers {
            watcher.stream.say(&cancel_watch(watcher.id)).await;
            assert!(watcher.next().await.canceled);
        }
        assert_eq!(site.figures().1, 0);
        closed(&mut feed).await;
        assert_eq!(site.figures(), (0, 0, 4));
    });
}

#[test]
fn cancelled_watches_do_not_count() {
    paused(async {
        let site = Site::new();
        let (mut watcher, mut upstream) = site.watching(on("k")).await;
        for _ in 0..5 {
            // A second watch comes and goes.
            watcher.stream.say(&creating(on("k"))).await;
            let create =
                create_of(&upstream.call.messages.next().await.expect("a request")).expect("a create");
            upstream.call.say(&created(create.watch_id, 9)).await.expect("taken");
            let second = watcher.next().await;
            assert!(second.created);
            watcher.stream.say(&cancel_watch(second.watch_id)).await;
            assert!(watcher.next().await.canceled);
            assert!(
                create_of(&upstream.call.messages.next().await.expect("a request")).is_none(),
                "a cancel"
            );
        }
        for revision in 10..=80 {
            upstream.tell(revision).await;
            assert_eq!(watcher.told().await, [revision]);
        }
        site.no_call_comes().await;
        assert_eq!(site.figures(), (0, 0, 0));
    });
}

#[test]
fn a_compaction_is_told_by_each_watch_s_own_registration() {
    paused(async {
        let site = Site::new();
        let (mut watchers, mut feed) = site.shared().await;
        all_are_told(&mut feed, &mut watchers, 12).await;
        feed.say(&compacted(FEED, 100)).await.expect("taken");
        let mut own = Vec::new();
        for _ in 0..ALL {
            let call = timeout(AT_ONCE, site.member.called(WATCH)).await.expect("it goes on");
            let upstream = Upstream::of(call).await;
            assert_eq!(upstream.start, 12);
            own.push(upstream);
        }
        closed(&mut feed).await;
        for watcher in &mut watchers {
            watcher.is_told_nothing().await;
        }
        // To half of them their own member says the same, to the others it does not.
        let (gone, kept) = own.split_at_mut(2);
        for upstream in gone {
            upstream.call.say(&created(upstream.id, 120)).await.expect("taken");
            upstream.call.say(&compacted(upstream.id, 100)).await.expect("taken");
        }
        for upstream in kept {
            upstream.call.say(&created(upstream.id, 120)).await.expect("taken");
            upstream.tell_all(&[12, 13]).await;
        }
        let mut ended = 0;
        for watcher in &mut watchers {
            let told = watcher.next().await;
            assert_eq!(told.watch_id, watcher.id);
            if told.canceled {
                assert_eq!(told.compact_revision, 100);
                ended += 1;
            } else {
                assert_eq!(revisions(&told), [13]);
            }
            watcher.is_told_nothing().await;
        }
        assert_eq!(ended, 2);
    });
}

/// Whatever a member may send on a feed beside events and progress ends the feed, and reaches no client.
#[test]
fn a_feed_that_says_something_odd_is_given_up() {
    paused(async {
        let cancel = WatchResponse {
            header: Some(header(12)),
            watch_id: FEED,
            canceled: true,
            cancel_reason: "odd".into(),
            ..WatchResponse::default()
        };
        let elsewhere = WatchResponse {
            header: Some(keyward::pb::etcdserverpb::ResponseHeader { cluster_id: 0xc2, ..header(12) }),
            ..WatchResponse::decode(&*event(FEED, 12, 5)).expect("an event")
        };
        let odd = [
            cancel.encode_to_vec(),
            elsewhere.encode_to_vec(),
            created(FEED, 12),
            event(2, 12, 5),
            b"not a WatchResponse".to_vec(),
        ];
        for odd in odd {
            let site = Site::new();
            let (mut watchers, mut feed) = site.shared().await;
            feed.say(&odd).await.expect("taken");
            for upstream in &mut site.resumed(ALL, 11).await {
                upstream.tell_all(&[11, 12]).await;
                // Only for the loop's end: the stream must live until the client was told.
                settled().await;
            }
            closed(&mut feed).await;
            let told = join_all(watchers.iter_mut().map(Watcher::told)).await;
            assert_eq!(told, vec![[12]; ALL]);
        }
    });
}

/// Numbers that look random, the same ones each time.
struct Dice(u64);

impl Dice {
    /// Below `limit`.
    fn roll(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }
}

/// A member whose watches move at random, each by itself.
struct Random {
    site: Site,
    dice: Dice,
    /// The highest revision that anybody was told.
    head: i64,
    /// The watches, and the next revision of each.
    watches: Vec<(Upstream, i64)>,
    feeds: usize,
}

impl Random {
    /// Answers what has come.
    async fn answer(&mut self) {
        settled().await;
        while let Some(call) = self.site.member.was_called_again() {
            assert_eq!(call.path(), WATCH);
            let mut upstream = Upstream::of(call).await;
            let is_feed = upstream.start == 0;
            self.feeds += usize::from(is_feed);
            // A feed's member may be a little behind.
            let behind = if is_feed { i64::try_from(self.dice.roll(3)).expect("small") } else { 0 };
            let revision = self.head - behind;
            drop(upstream.call.say(&created(upstream.id, revision)).await);
            let next = if is_feed { revision + 1 } else { upstream.start };
            self.watches.push((upstream, next));
        }
    }

    /// One watch is told one to three revisions in one message, up to `last`.
    async fn advance(&mut self, at: usize, last: i64) {
        let count = i64::try_from(self.dice.roll(3)).expect("small");
        let (upstream, next) = &mut self.watches[at];
        let told: Vec<i64> = (*next..=(*next + count).min(last)).collect();
        let Some(newest) = told.last() else { return };
        (*next, self.head) = (newest + 1, self.head.max(*newest));
        if upstream.call.say(&events(upstream.id, &told, false)).await.is_err() {
            self.watches.swap_remove(at);
        }
    }

    async fn step(&mut self, last: i64) {
        if self.watches.is_empty() {
            return self.answer().await;
        }
        let at = usize::try_from(self.dice.roll(self.watches.len() as u64)).expect("small");
        if self.dice.roll(150) == 0 && self.watches[at].0.start == 0 {
            let (feed, _) = self.watches.swap_remove(at);
            feed.call.refuse_later();
        } else {
            self.advance(at, last).await;
        }
        if self.dice.roll(4) > 0 {
            self.answer().await;
        }
        if self.dice.roll(20) == 0 {
            sleep(Duration::from_secs(1)).await;
        }
    }
}

/// Reads a client's stream to the end of its time: what it was told is complete, in order, and told once.
async fn read(mut watcher: Watcher, told: Rc<RefCell<BTreeMap<usize, i64>>>, at: usize) {
    while let Ok(message) = watcher.stream.next().await {
        let response = watched(&message);
        assert!(response.watch_id == watcher.id && !response.canceled, "{response:?}");
        for revision in revisions(&response) {
            let next = told.borrow().get(&at).copied().expect("known");
            assert_eq!(revision, next, "client {at}");
            told.borrow_mut().insert(at, next + 1);
        }
    }
}

#[test]
fn whatever_the_order_of_feed_and_clients_each_is_told_everything_once() {
    paused(async {
        let (mut feeds, mut joins) = (0, 0);
        for seed in 0..20 {
            let last = 300;
            let site = Site::new();
            let told = Rc::new(RefCell::new(BTreeMap::new()));
            let (mut watches, mut readers) = (Vec::new(), Vec::new());
            for at in 0..6 {
                let (client, revision) = (site.keyward.client().await, 9);
                let mut stream = client.open(WATCH).await.expect("open");
                stream.say(&creating(on("k"))).await;
                let mut upstream = Upstream::of(site.member.called(WATCH).await).await;
                let mut watcher = Watcher { stream, id: 0, _client: client };
                upstream.call.say(&created(upstream.id, revision)).await.expect("taken");
                assert!(watcher.next().await.created);
                watches.push((upstream, 10));
                told.borrow_mut().insert(at, 10);
                let reading = read(watcher, Rc::clone(&told), at);
                readers.push(site.keyward.tasks.spawn("a reader", reading));
                if at == 3 {
                    // The feed comes with the fourth.
                    let mut feed = site.feed().await;
                    feed.say(&created(FEED, 9)).await.expect("taken");
                    watches.push((Upstream { call: feed, id: FEED, start: 0 }, 10));
                }
            }
            let mut all = Random { site, dice: Dice(seed), head: 9, watches, feeds: 1 };
            for _ in 0..1500 {
                all.step(last).await;
            }
            // Now everything is told.
            for _ in 0..1000 {
                all.answer().await;
                for at in (0..all.watches.len()).rev() {
                    all.advance(at, last).await;
                }
            }
            for (at, next) in told.borrow().iter() {
                assert_eq!(*next, last + 1, "client {at} of seed {seed}");
            }
            assert!(readers.iter().all(|reader| !reader.is_finished()), "no client was ended");
            feeds += all.feeds;
            joins += all.site.figures().2;
        }
        assert!(feeds > 20 && joins > 80, "{feeds} feeds, {joins} joins: not much was tried");
    });
}
