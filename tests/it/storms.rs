//! A member dies under many watches: they come back a few at a time, spread over the members that are left.

use std::collections::BTreeSet;
use std::time::Duration;

use keyward::members::membership::{Readiness, UnreadyReason};
use keyward::tasks::Tasks;
use keyward::upstream::resume_limiter::AT_ONCE;
use tokio::time::{Instant, sleep, timeout};

use crate::client::{Client, Stream};
use crate::member::{Call, Member};
use crate::rig::{Keyward, paused, settled};
use crate::words::{WATCH, create_of, created, event, revisions, watch, watched};

/// Clients, each with a connection and a watch of its own.
const CLIENTS: usize = 40;
/// Creates of resumed watches that may be unanswered on one stream.
const UNANSWERED: usize = 32;
/// Past every pause before a first attempt, far below the time after which the next have their turn.
const SOON: Duration = Duration::from_millis(500);
/// Past that time.
const LATE: Duration = Duration::from_millis(1100);

struct Site {
    members: Vec<Member>,
    keyward: Keyward,
}

impl Site {
    /// Three members. The third has one watch more than the second: what tempts all to go to the second. Only the first is
    /// ready.
    async fn on_the_first() -> (Self, (Client, Stream, Call)) {
        let tasks = Tasks::default();
        let members: Vec<_> = (1..=3).map(|id| Member::new(id, &tasks)).collect();
        let keyward = Keyward::before(&members.iter().collect::<Vec<_>>());
        let site = Self { members, keyward };
        site.only_ready(&[2]);
        let elsewhere = site.watching(2).await;
        site.only_ready(&[0]);
        (site, elsewhere)
    }

    fn only_ready(&self, ready: &[usize]) {
        self.keyward.publish(|membership| {
            for (at, member) in membership.members.iter_mut().enumerate() {
                let mut changed = keyward::members::membership::Member::clone(member);
                let down = Readiness::NotReady(UnreadyReason::Unreachable);
                changed.readiness = if ready.contains(&at) { Readiness::Ready } else { down };
                *member = changed.into();
            }
        });
    }

    /// A client that watches through this member, and wants a leader.
    async fn watching(&self, member: usize) -> (Client, Stream, Call) {
        let client = self.keyward.client().await.header("hasleader", "true");
        let mut stream = client.open(WATCH).await.expect("open");
        stream.say(&watch("k", 10)).await;
        let mut call = self.members[member].called(WATCH).await;
        accept(&mut call).await;
        assert!(watched(&stream.next().await.expect("created")).created);
        (client, stream, call)
    }

    async fn all_watching(&self) -> Vec<(Client, Stream, Call)> {
        let mut streams = Vec::new();
        for _ in 0..CLIENTS {
            streams.push(self.watching(0).await);
        }
        streams
    }

    /// The first member dies; the others are there.
    fn kill_the_first(&self) {
        self.only_ready(&[0, 1, 2]);
        self.members[0].refuse_connections(true);
        self.members[0].cut();
    }

    /// The calls that reached the second and the third by now.
    fn come(&self) -> [Vec<Call>; 2] {
        [1, 2].map(|at| std::iter::from_fn(|| self.members[at].was_called_again()).collect())
    }
}

async fn accept(call: &mut Call) -> i64 {
    let create = create_of(&call.messages.next().await.expect("a request")).expect("a create");
    call.say(&created(create.watch_id, 9)).await.expect("taken");
    create.watch_id
}

async fn next_of_the_others(site: &Site) -> Call {
    let both = [1, 2].map(|at| Box::pin(site.members[at].called(WATCH)));
    futures_util::future::select_all(both).await.0
}

#[test]
fn on_each_member_a_few_are_resumed_at_once_and_the_rest_follows() {
    paused(async {
        let (site, _elsewhere) = Site::on_the_first().await;
        let mut streams = site.all_watching().await;
        site.kill_the_first();
        sleep(SOON).await;
        let first = site.come();
        assert_eq!(first.each_ref().map(Vec::len), [AT_ONCE; 2], "spread, and no more than have their turn");
        // Nobody answers them: the next have their turn all the same, after a while.
        sleep(LATE).await;
        let mut second = site.come();
        assert_eq!(second.each_ref().map(Vec::len), [AT_ONCE; 2]);
        // These stand: the next follow at once.
        for call in second.iter_mut().flatten() {
            accept(call).await;
        }
        settled().await;
        let third = site.come();
        let [one, other] = third.each_ref().map(Vec::len);
        assert_eq!(one + other, CLIENTS - 4 * AT_ONCE);
        assert!(one.abs_diff(other) <= 2, "spread: {one} and {other}");
        let mut calls: Vec<Call> = second.into_iter().flatten().collect();
        for mut call in first.into_iter().chain(third).flatten() {
            accept(&mut call).await;
            calls.push(call);
        }
        assert_eq!(calls.len(), CLIENTS);
        for call in &mut calls {
            // Its second life, by our ids.
            call.say(&event(2, 10, 5)).await.expect("taken");
        }
        for (_, stream, _) in &mut streams {
            assert_eq!(revisions(&watched(&stream.next().await.expect("it lives"))), [10]);
        }
    });
}

#[test]
fn those_that_lost_one_member_do_not_jump_in_one_moment_and_a_lone_one_does_not_wait() {
    paused(async {
        let (site, _elsewhere) = Site::on_the_first().await;
        let mut streams = site.all_watching().await;
        site.kill_the_first();
        let began = Instant::now();
        let mut moments = BTreeSet::new();
        let mut calls = Vec::new();
        while calls.len() < CLIENTS {
            let mut call = next_of_the_others(&site).await;
            moments.insert(began.elapsed().as_millis());
            accept(&mut call).await;
            calls.push(call);
        }
        assert_eq!(moments.first(), Some(&0), "somebody is the first");
        assert!(moments.len() > CLIENTS / 4, "spread in time: {moments:?}");
        assert!(moments.last().is_some_and(|last| *last < 100), "and soon: {moments:?}");
        assert_eq!(streams.len(), CLIENTS);
        drop(streams.split_off(1));
        settled().await;
        // Long after, one is alone.
        sleep(Duration::from_secs(60)).await;
        let began = Instant::now();
        drop(calls);
        next_of_the_others(&site).await;
        assert_eq!(began.elapsed(), Duration::ZERO);
    });
}

/// The creates that come on a call until none comes any more.
async fn creates(call: &mut Call) -> Vec<(i64, i64)> {
    let mut all = Vec::new();
    while let Ok(message) = timeout(Duration::from_millis(10), call.messages.next()).await {
        let create = create_of(&message.expect("a request")).expect("a create");
        all.push((create.watch_id, create.start_revision));
    }
    all
}

#[test]
fn of_one_stream_a_few_watches_are_unanswered_at_once_and_a_new_one_waits_for_none_of_them() {
    paused(async {
        let (site, _elsewhere) = Site::on_the_first().await;
        let client = site.keyward.client().await;
        let mut stream = client.open(WATCH).await.expect("open");
        let mut call = None;
        for _ in 0..100 {
            stream.say(&watch("k", 10)).await;
            if call.is_none() {
                call = Some(site.members[0].called(WATCH).await);
            }
            accept(call.as_mut().expect("called")).await;
            assert!(watched(&stream.next().await.expect("created")).created);
        }
        site.kill_the_first();
        let mut call = next_of_the_others(&site).await;
        let first = creates(&mut call).await;
        assert_eq!(first.len(), UNANSWERED);
        stream.say(&watch("new", 77)).await;
        let new = creates(&mut call).await;
        assert_eq!(new.iter().map(|(_, start)| *start).collect::<Vec<_>>(), [77], "at once");
        let mut unanswered: std::collections::VecDeque<_> = first.into_iter().chain(new).collect();
        let mut answered = 0;
        while let Some((id, _)) = unanswered.pop_front() {
            call.say(&created(id, 80)).await.expect("taken");
            answered += 1;
            unanswered.extend(creates(&mut call).await);
            assert!(unanswered.len() <= UNANSWERED + 1);
        }
        assert_eq!(answered, 101, "every watch stands again");
    });
}

/// A member that is slow with each: whoever stands in line for it longer than a leader may be missing is not told that there is none.
#[test]
fn standing_in_line_is_not_missing_a_leader() {
    paused(async {
        let (site, _elsewhere) = Site::on_the_first().await;
        let mut streams = site.all_watching().await;
        for _ in 0..CLIENTS {
            streams.push(site.watching(0).await);
        }
        site.kill_the_first();
        let began = Instant::now();
        let mut calls: Vec<Call> = Vec::new();
        while calls.len() < streams.len() {
            sleep(Duration::from_millis(900)).await;
            for mut call in site.come().into_iter().flatten() {
                accept(&mut call).await;
                calls.push(call);
            }
        }
        assert!(began.elapsed() > Duration::from_secs(4), "the last stood in line for long");
        for call in &mut calls {
            call.say(&event(2, 10, 5)).await.expect("taken");
        }
        for (_, stream, _) in &mut streams {
            assert_eq!(revisions(&watched(&stream.next().await.expect("it lives"))), [10]);
        }
    });
}
