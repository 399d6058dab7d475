//! One question to name servers: which server is asked when, and which answer counts.
//!
//! Owns: the turns of the servers, the repetitions, the verdict. Must not know: hosts files, search lists,
//! what the records are for. Invariants: an answer with records counts whatever other servers say or do not
//! say; that a name has no records is believed of a server once each preferred server has failed or has had
//! its time; an answer is taken until the end of the question, however long ago its server was asked; a
//! question ends.
//!
//! Go's resolver, by which etcd's own clients find members, asks one server after the other, each for the
//! whole `timeout`, and gives up a server's answer that comes later (`net/dnsclient_unix.go`, `tryOneName`).

use std::collections::VecDeque;
use std::fmt::Display;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::future::{BoxFuture, FutureExt as _};
use futures_util::stream::FuturesUnordered;
use hickory_resolver::TokioResolver;
use hickory_resolver::config::{ConnectionConfig, NameServerConfig, ResolveHosts, ResolverConfig};
use hickory_resolver::net::runtime::TokioRuntimeProvider;
use hickory_resolver::net::{DnsError, NetError};
use hickory_resolver::proto::op::ResponseCode;
use hickory_resolver::proto::rr::{Name, RData, RecordType};
use tokio::time::{Instant, sleep_until};

use super::LookupTimes;
use super::resolv_conf::NameServers;

/// Pause before a server that answered with a failure is asked again.
const AFTER_FAILURE: Duration = Duration::from_millis(100);

/// The outcome of a question.
#[derive(Clone, Debug)]
pub(super) enum ServerVerdict {
    /// The records of the asked type, and the shortest TTL.
    Records(Vec<RData>, Option<Duration>),
    /// A server that is believed says that there are none.
    NoRecords(String),
    /// No server gave an answer, with what each of them did.
    Failed(String),
}

/// The outcome of a question, and how each server of the list took part.
pub(super) struct AskedServers {
    pub(super) verdict: ServerVerdict,
    pub(super) servers: Vec<(SocketAddr, ServerPart)>,
}

/// A server's part in a question.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ServerPart {
    /// The question was over before the server's turn.
    NotAsked,
    /// The server was asked and has not answered.
    Silent,
    /// The server failed, or answered with a failure.
    Failed(String),
    /// The server answered, with records or without.
    Answered,
}

/// A server's turn that lies ahead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ServerTurn {
    at: Instant,
    server: usize,
    extended: bool,
}

struct ServerQuestion<'a> {
    settings: &'a NameServers,
    name: &'a Name,
    kind: RecordType,
    ends: Instant,
    /// How long a preferred server may take to know better than another one.
    preferred: Duration,
    turns: VecDeque<ServerTurn>,
    answers: FuturesUnordered<BoxFuture<'static, (ServerTurn, Result<Found, NetError>)>>,
    parts: Vec<ServerPart>,
    asked_at: Vec<Option<Instant>>,
    /// The most preferred server that knows of no records, with its words.
    no_records: Option<(usize, String)>,
}

type Found = (Vec<RData>, Option<Duration>);

/// Puts a question to the servers. The name is whole. Cancel-safe.
pub(super) async fn ask(
    settings: &Arc<NameServers>,
    name: &Name,
    kind: RecordType,
    times: &LookupTimes,
) -> AskedServers {
    let begin = Instant::now();
    let mut turns: Vec<ServerTurn> = (0..settings.attempts)
        .flat_map(|attempt| (0..settings.servers.len()).map(move |server| (attempt, server)))
        .map(|(attempt, server)| {
            let later = u32::try_from(server).unwrap_or(u32::MAX);
            let at = begin + settings.timeout * attempt + times.next_server.saturating_mul(later);
            // A server that knows no extensions (RFC 6891) gets the repetition without.
            ServerTurn { at, server, extended: attempt % 2 == 0 }
        })
        .collect();
    turns.sort_by_key(|turn| turn.at);
    let question = ServerQuestion {
        settings,
        name,
        kind,
        ends: begin + times.limit(settings),
        preferred: settings.timeout.min(times.preferred_server),
        turns: turns.into(),
        answers: FuturesUnordered::new(),
        parts: vec![ServerPart::NotAsked; settings.servers.len()],
        asked_at: vec![None; settings.servers.len()],
        no_records: None,
    };
    question.run().await
}

impl ServerQuestion<'_> {
    async fn run(mut self) -> AskedServers {
        loop {
            if let Some(verdict) = self.believed() {
                return AskedServers { verdict, servers: self.servers() };
            }
            let due = self.turns.front().map(|turn| turn.at);
            if due.is_none() && self.answers.is_empty() {
                return self.ended();
            }
            let wake = due.into_iter().chain(self.believed_at()).chain([self.ends]).min();
            tokio::select! {
                biased; // An answer that is there goes before a further question.
                Some((turn, answer)) = self.answers.next() => {
                    if let Some(found) = self.take(turn, answer) {
                        let verdict = ServerVerdict::Records(found.0, found.1);
                        return AskedServers { verdict, servers: self.servers() };
                    }
                }
                () = sleep_until(wake.unwrap_or(self.ends)) => {
                    let now = Instant::now();
                    if now >= self.ends {
                        return self.ended();
                    }
                    if due.is_some_and(|due| due <= now) {
                        self.begin_turn(now);
                    }
                }
            }
        }
    }

    fn servers(&self) -> Vec<(SocketAddr, ServerPart)> {
        self.settings.servers.iter().copied().zip(self.parts.iter().cloned()).collect()
    }

    fn begin_turn(&mut self, now: Instant) {
        let Some(turn) = self.turns.pop_front() else { return };
        if self.parts[turn.server] == ServerPart::Answered {
            return;
        }
        if self.parts[turn.server] == ServerPart::NotAsked {
            self.parts[turn.server] = ServerPart::Silent;
        }
        self.asked_at[turn.server].get_or_insert(now);
        let exchange = exchange(
            self.settings.servers[turn.server],
            (self.settings.only_tcp, turn.extended),
            self.name.clone(),
            self.kind,
            self.ends.saturating_duration_since(now),
        );
        self.answers.push(async move { (turn, exchange.await) }.boxed());
    }

    /// Takes in the end of a turn. Returns records, which end the question.
    fn take(&mut self, turn: ServerTurn, answer: Result<Found, NetError>) -> Option<Found> {
        match answer {
            Ok(found) if !found.0.is_empty() => {
                self.parts[turn.server] = ServerPart::Answered;
                return Some(found);
            }
            Ok(_) => self.note_no_records(turn.server, "has no address"),
            Err(NetError::Dns(DnsError::NoRecordsFound(none))) => match none.response_code {
                ResponseCode::NXDomain => self.note_no_records(turn.server, "does not know the name"),
                // A referral: the server is not meant for clients.
                _ if none.ns.is_some() && none.soa.is_none() => {
                    self.note_failure(turn, "it refers to other servers".to_owned());
                }
                _ => self.note_no_records(turn.server, "knows the name without such records"),
            },
            Err(NetError::Dns(DnsError::ResponseCode(code))) => {
                // The answer may be about the extensions.
                if turn.extended {
                    let again = ServerTurn { at: Instant::now(), extended: false, ..turn };
                    self.turns.push_front(again);
                }
                self.note_failure(turn, format!("it answers {}", code_name(code)));
            }
            Err(error) => self.note_failure(turn, error_text(&error)),
        }
        None
    }

    fn note_no_records(&mut self, server: usize, why: &str) {
        self.parts[server] = ServerPart::Answered;
        if self.no_records.as_ref().is_none_or(|(before, _)| server < *before) {
            let words = format!("the name server {} {why}", shown(self.settings.servers[server]));
            self.no_records = Some((server, words));
        }
    }

    /// The next turn comes at once, or after a pause if its server has failed before.
    fn note_failure(&mut self, turn: ServerTurn, why: String) {
        if self.parts[turn.server] != ServerPart::Answered {
            self.parts[turn.server] = ServerPart::Failed(why);
        }
        let now = Instant::now();
        if let Some(next) = self.turns.front_mut() {
            let has_failed = matches!(self.parts[next.server], ServerPart::Failed(_));
            let pause = if has_failed { AFTER_FAILURE } else { Duration::ZERO };
            next.at = next.at.min(now + pause);
        }
    }

    /// The verdict that there are no records, once no preferred server may still know better.
    fn believed(&self) -> Option<ServerVerdict> {
        let (_, words) = self.no_records.as_ref()?;
        self.believed_at()
            .is_none_or(|at| at <= Instant::now())
            .then(|| ServerVerdict::NoRecords(words.clone()))
    }

    /// The time until which a server that is preferred to the one without records may answer.
    fn believed_at(&self) -> Option<Instant> {
        let (server, _) = self.no_records.as_ref()?;
        let preferred = self.parts.iter().zip(&self.asked_at).take(*server);
        let open = preferred.filter(|(part, _)| **part == ServerPart::Silent);
        open.filter_map(|(_, asked_at)| asked_at.map(|at| at + self.preferred)).max()
    }

    fn ended(self) -> AskedServers {
        let servers = self.servers();
        let verdict = match self.no_records {
            Some((_, words)) => ServerVerdict::NoRecords(words),
            None => ServerVerdict::Failed(
                servers.iter().map(|(server, part)| part.text(*server)).collect::<Vec<_>>().join("; "),
            ),
        };
        AskedServers { verdict, servers }
    }
}

impl ServerPart {
    fn text(&self, server: SocketAddr) -> String {
        let server = shown(server);
        match self {
            Self::Failed(why) => format!("the name server {server}: {why}"),
            Self::Answered => format!("the name server {server} answers"),
            Self::NotAsked | Self::Silent => format!("the name server {server} does not answer"),
        }
    }
}

/// The server without its port, if the port is the usual one.
pub(super) fn shown(server: SocketAddr) -> String {
    if server.port() == super::resolv_conf::PORT { server.ip().to_string() } else { server.to_string() }
}

fn error_text(error: &NetError) -> String {
    match error {
        NetError::Timeout => "it does not answer".to_owned(),
        other => other.to_string(),
    }
}

/// The name of a response code in DNS tools (RFC 1035, 4.1.1).
fn code_name(code: ResponseCode) -> String {
    let name: &dyn Display = match code {
        ResponseCode::FormErr => &"FORMERR",
        ResponseCode::ServFail => &"SERVFAIL",
        ResponseCode::NotImp => &"NOTIMP",
        ResponseCode::Refused => &"REFUSED",
        _ => &code,
    };
    name.to_string()
}

/// Asks one server once: over UDP, with a few repetitions in the first second for lost packets, and over TCP
/// for what does not fit into a packet. The resolver is made for one question, because it keeps sockets that
/// belong to a runtime and judges servers by other questions.
async fn exchange(
    server: SocketAddr,
    (only_tcp, extended): (bool, bool),
    name: Name,
    kind: RecordType,
    limit: Duration,
) -> Result<Found, NetError> {
    let way = |mut way: ConnectionConfig| {
        way.port = server.port();
        way
    };
    let mut ways = vec![way(ConnectionConfig::udp()), way(ConnectionConfig::tcp())];
    if only_tcp {
        ways.remove(0);
    }
    let servers = vec![NameServerConfig::new(server.ip(), true, ways)];
    let config = ResolverConfig::from_name_servers(servers);
    let mut builder = TokioResolver::builder_with_config(config, TokioRuntimeProvider::default());
    let options = builder.options_mut();
    options.cache_size = 0;
    options.timeout = limit;
    options.attempts = 0;
    options.use_hosts_file = ResolveHosts::Never;
    options.edns0 = extended;
    let found = builder.build()?.lookup(name, kind).await?;
    let ttl = found.answers().iter().map(|record| record.ttl).min();
    let records = found.answers().iter().filter(|record| record.record_type() == kind);
    let records = records.map(|record| record.data.clone()).collect();
    Ok((records, ttl.map(|seconds| Duration::from_secs(seconds.into()))))
}
