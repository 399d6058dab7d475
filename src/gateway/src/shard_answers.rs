//! A shard's answers to an operator's questions.
//!
//! Owns: reading the shard's connections and streams into rows. Must not know: the askers. Invariants: the
//! answers come from the state by which calls are served, and nothing is copied before a question; a question
//! is answered in small parts, with all other tasks of the shard in between.

use std::collections::HashMap;
use std::rc::Rc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::task::yield_now;
use tokio::time::Instant;

use crate::active_streams::{ActiveStream, StreamWork};
use crate::hot_prefixes::{CountedPrefixes, SAMPLED, SketchCount};
use crate::shard_questions::{KickTarget, ShardQuestion};
use crate::shard_rows::{
    ClientRow, HotPrefixRow, KickedClient, LeaseRow, LockRow, SlowCallRow, WatchRow, key_text, range_text,
};
use crate::slow_calls::SlowCall;
use crate::{ClientConnection, Gateway};
use keyward_streams::watch::hub::{ListedWatch, WatchStreamReport};
use keyward_telemetry::printable::escaped;

/// Connections or streams read before yielding to other tasks; each takes a microsecond or two.
const AT_A_TIME: usize = 64;

/// Answers questions until the askers are gone.
pub async fn answer_questions(gateway: Rc<Gateway>, mut questions: mpsc::Receiver<ShardQuestion>) {
    while let Some(question) = questions.recv().await {
        // An asker that has left needs no answer.
        match question {
            ShardQuestion::Clients(answer) => drop(answer.send(clients(&gateway).await)),
            ShardQuestion::Watches(answer) => drop(answer.send(watches(&gateway).await)),
            ShardQuestion::Leases(answer) => drop(answer.send(of_streams(&gateway, leases_of).await)),
            ShardQuestion::Locks(answer) => drop(answer.send(of_streams(&gateway, locks_of).await)),
            ShardQuestion::SlowCalls(answer) => drop(answer.send(slow_calls(&gateway))),
            ShardQuestion::HotPrefixes(answer) => drop(answer.send(hot_prefixes(&gateway))),
            ShardQuestion::Shadow(answer) => drop(answer.send(gateway.shadow.missing())),
            ShardQuestion::Kick(target, answer) => drop(answer.send(kick(&gateway, &target).await)),
        }
    }
}

/// What the streams of a connection hold.
#[derive(Clone, Copy, Default)]
struct HeldByStreams {
    watches: u64,
    leases: u64,
    bytes: u64,
}

impl HeldByStreams {
    fn add(&mut self, stream: &ActiveStream, now: Instant) {
        match stream.work.get() {
            Some(StreamWork::Watch(session)) => {
                let (watches, bytes) = session.held();
                self.watches += watches;
                self.bytes += bytes;
            }
            Some(StreamWork::KeepAlive(renewed)) => self.leases += renewed.live_count(now),
            None => {}
        }
    }
}

async fn clients(gateway: &Gateway) -> Vec<ClientRow> {
    let mut held: HashMap<u64, HeldByStreams> = HashMap::new();
    for_each_stream(gateway, |stream, now| {
        held.entry(stream.client.origin.figures.id).or_default().add(stream, now);
    })
    .await;
    let mut rows = Vec::new();
    for some in gateway.clients.ids().chunks(AT_A_TIME) {
        let now = Instant::now();
        let clients = some.iter().filter_map(|id| gateway.clients.get(*id));
        rows.extend(clients.map(|client| {
            let held = held.get(&client.origin.figures.id).copied().unwrap_or_default();
            client_row(&client, held, now)
        }));
        yield_now().await;
    }
    rows
}

async fn watches(gateway: &Gateway) -> Vec<WatchRow> {
    let members = gateway.upstream.members.snapshot.load_full();
    let newest = members.members.iter().map(|member| member.known_revision().0).max().unwrap_or_default();
    of_streams(gateway, |stream, _| match stream.work.get() {
        Some(StreamWork::Watch(session)) => {
            let report = session.report();
            report.ranges.iter().map(|range| watch_row(stream, &report, range, newest)).collect()
        }
        _ => Vec::new(),
    })
    .await
}

fn leases_of(stream: &ActiveStream, now: Instant) -> Vec<LeaseRow> {
    let Some(StreamWork::KeepAlive(renewed)) = stream.work.get() else { return Vec::new() };
    let (client, address, user) = owner(stream);
    let row = |lease: keyward_streams::lease::renewed_leases::RenewedLease| LeaseRow {
        client,
        address: address.clone(),
        user: user.clone(),
        lease: format!("{:x}", lease.id),
        ttl: lease.ttl,
        renewals: lease.renewals,
        renewed_seconds: seconds(now, lease.renewed_at),
    };
    renewed.live(now).into_iter().map(row).collect()
}

fn locks_of(stream: &ActiveStream, now: Instant) -> Vec<LockRow> {
    let Some(request) = &stream.request else { return Vec::new() };
    let Some((method, name, lease)) = request.lock() else { return Vec::new() };
    let (client, address, user) = owner(stream);
    vec![LockRow {
        client,
        address,
        user,
        method,
        name: key_text(&name),
        lease: (lease != 0).then(|| format!("{lease:x}")),
        waiting_seconds: seconds(now, request.since),
    }]
}

fn hot_prefixes(gateway: &Gateway) -> Vec<HotPrefixRow> {
    let (prefixes, covered): (CountedPrefixes, Duration) =
        gateway.records.hot_prefixes.recent(Instant::now());
    let row = |(prefix, known): (Box<[u8]>, SketchCount)| HotPrefixRow {
        prefix: key_text(&prefix),
        calls: known.count * SAMPLED,
        calls_at_least: (known.count - known.error) * SAMPLED,
        calls_per_second: 0.0,
        seconds: covered.as_secs(),
    };
    prefixes.into_iter().map(row).collect()
}

fn slow_calls(gateway: &Gateway) -> Vec<SlowCallRow> {
    let now = Instant::now();
    let micros = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
    let row = |call: SlowCall| {
        let client = gateway.clients.get(call.client);
        let answered = call.parts.as_ref().map(|parts| parts.before + parts.member);
        SlowCallRow {
            method: call.method.name,
            ranges: call.parts.as_ref().map(|parts| parts.ranges.clone()),
            client: call.client,
            address: client.and_then(|client| client.origin.remote_text.as_deref().map(str::to_owned)),
            user: call.user.map(|user| escaped(user.as_str())),
            member: call.member.map(|member| member.to_string()),
            attempts: call.attempts,
            code: call.code.name(),
            ended_seconds: seconds(now, call.ended),
            took_micros: micros(call.took),
            before_micros: call.parts.as_ref().map(|parts| micros(parts.before)),
            member_micros: call.parts.as_ref().map(|parts| micros(parts.member)),
            after_micros: answered.map(|answered| micros(call.took.saturating_sub(answered))),
        }
    };
    gateway.records.slow_calls.recent(now).into_iter().map(row).collect()
}

/// Asks connections to end.
async fn kick(gateway: &Gateway, target: &KickTarget) -> Vec<KickedClient> {
    let rows = match target {
        KickTarget::Number(id) => client_of(gateway, *id).into_iter().collect(),
        KickTarget::Named(name) => {
            let mut rows = clients(gateway).await;
            // A connection that is leaving already is not told again.
            rows.retain(|row| {
                let is_of_blocked_login =
                    row.is_of_blocked_login(name) && !has_stream_of_user(gateway, row.client);
                !row.kicked && (row.is_named(name) || is_of_blocked_login)
            });
            rows
        }
    };
    let mut kicked = Vec::new();
    for (number, row) in rows.into_iter().enumerate() {
        if let Some(client) = gateway.clients.get(row.client) {
            kicked.push(KickedClient { streams: client.kick(gateway), client: row });
        }
        if number % AT_A_TIME == AT_A_TIME - 1 {
            yield_now().await;
        }
    }
    kicked
}

/// True if a stream or waiting call of an etcd user is open on the connection: a name that the connection
/// claims ends no work of a user whom the connection has proved.
fn has_stream_of_user(gateway: &Gateway, client: u64) -> bool {
    let streams = gateway.active_streams.numbers();
    let mut open = streams.iter().filter_map(|number| gateway.active_streams.get(*number));
    open.any(|stream| stream.client.origin.figures.id == client && stream.caller.user.is_some())
}

/// The row of the connection with this number.
fn client_of(gateway: &Gateway, id: u64) -> Option<ClientRow> {
    let client = gateway.clients.get(id)?;
    let now = Instant::now();
    let mut held = HeldByStreams::default();
    for stream in gateway.active_streams.numbers().iter().filter_map(|it| gateway.active_streams.get(*it)) {
        if stream.client.origin.figures.id == id {
            held.add(&stream, now);
        }
    }
    Some(client_row(&client, held, now))
}

/// The rows of all streams.
async fn of_streams<T>(gateway: &Gateway, rows_of: impl Fn(&ActiveStream, Instant) -> Vec<T>) -> Vec<T> {
    let mut rows = Vec::new();
    for_each_stream(gateway, |stream, now| rows.extend(rows_of(stream, now))).await;
    rows
}

async fn for_each_stream(gateway: &Gateway, mut look: impl FnMut(&ActiveStream, Instant)) {
    for some in gateway.active_streams.numbers().chunks(AT_A_TIME) {
        let now = Instant::now();
        for stream in some.iter().filter_map(|number| gateway.active_streams.get(*number)) {
            look(&stream, now);
        }
        yield_now().await;
    }
}

fn client_row(client: &ClientConnection, held: HeldByStreams, now: Instant) -> ClientRow {
    let origin = &client.origin;
    let figures = &origin.figures;
    let (bytes_in, bytes_out) = figures.bytes();
    let error = figures.last_error();
    ClientRow {
        client: figures.id,
        address: origin.remote_text.as_deref().map(str::to_owned),
        listener: (*origin.listener).to_owned(),
        user: figures.user().map(|user| escaped(user.as_str())),
        peer: figures.peer().map(|peer| escaped(&peer)),
        blocked_login: figures.blocked_login().map(|name| escaped(name.as_str())),
        user_agent: origin.user_agent().map(escaped),
        age_seconds: seconds(now, client.activity().opened()),
        calls: figures.calls(),
        failed: figures.failed(),
        open: client.activity().open_streams() as u64,
        bytes_in,
        bytes_out,
        watches: held.watches,
        leases: held.leases,
        unread_bytes: client.unread.held() as u64 + held.bytes,
        last_error: error.as_ref().map(|error| error.code.name()),
        last_error_by: error.as_ref().and_then(|error| error.refused_by),
        last_error_rule: error.as_ref().and_then(|error| error.rule.as_deref().map(escaped)),
        last_error_seconds: error.as_ref().map(|error| seconds(now, error.at)),
        kicked: client.activity().is_kicked(),
    }
}

fn watch_row(
    stream: &ActiveStream,
    report: &WatchStreamReport,
    range: &ListedWatch,
    newest: i64,
) -> WatchRow {
    let (client, address, user) = owner(stream);
    // While the client leaves its messages untaken, no watch of the stream is read further.
    let next = range.next_revision.or(report.next_revision.filter(|_| report.is_behind));
    WatchRow {
        client,
        address,
        user,
        key: key_text(&range.key),
        range_end: key_text(&range.range_end),
        range: range_text(&range.key, &range.range_end),
        watches: range.watches,
        live: range.live,
        events: range.events,
        behind: next.map(|next| (newest + 1).saturating_sub(next).max(0)),
        held_bytes: range.held_bytes,
        client_is_behind: report.is_behind,
    }
}

/// Number and address of a stream's connection, and the stream's etcd user.
fn owner(stream: &ActiveStream) -> (u64, Option<String>, Option<String>) {
    let origin = &stream.client.origin;
    let user = stream.caller.user.as_ref().map(|user| escaped(user.as_str()));
    (origin.figures.id, origin.remote_text.as_deref().map(str::to_owned), user)
}

fn seconds(now: Instant, from: Instant) -> u64 {
    now.saturating_duration_since(from).min(Duration::from_secs(u64::from(u32::MAX))).as_secs()
}
