//! The lookup of one name at name servers: its search list, and both families of addresses.
//!
//! Owns: the order of the names to ask for, and the moment at which the answer for one family of addresses
//! does not wait for the other any longer. Must not know: hosts files, earlier answers, who asked. Invariant:
//! a lookup's last news is sent before its end; a family is asked for by itself, and whatever is said about
//! one family has no bearing on the other.

use std::net::{IpAddr, SocketAddr};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use hickory_resolver::proto::rr::{Name, RData, RecordType};
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until};

use super::resolv_conf::NameServers;
use super::server_question::{AskedServers, ServerPart, ServerVerdict, ask};
use super::{LookupTimes, NameError, whole_name};

/// A name and the kind of its records.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum NameQuestion {
    /// The addresses of a host.
    Addresses(String),
    /// The targets of an SRV record.
    Services(String),
}

/// The answers that a lookup has so far.
#[derive(Debug)]
pub(super) struct LookupNews {
    pub(super) question: NameQuestion,
    pub(super) found: LookupFound,
    /// The name servers' parts, for the operator.
    pub(super) servers: Vec<(SocketAddr, ServerPart)>,
    pub(super) part: NewsPart,
}

/// A target of an SRV record (RFC 2782).
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) struct ServiceTarget {
    pub(super) priority: u16,
    pub(super) weight: u16,
    pub(super) port: u16,
    pub(super) host: String,
}

impl ServiceTarget {
    fn of(record: &RData) -> Option<Self> {
        let RData::SRV(srv) = record else { return None };
        let host = srv.target.to_ascii();
        Some(Self { priority: srv.priority, weight: srv.weight, port: srv.port, host })
    }
}

/// The place of news in a lookup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NewsPart {
    /// One family of addresses is passed on, the other is still awaited.
    First,
    /// The outcome for the other family.
    Second,
    /// The outcome of a lookup without parts.
    Whole,
}

/// The answers so far, by the kind of records.
#[derive(Clone, Debug, Default)]
pub(super) struct LookupFound {
    pub(super) v4: RecordsFound<IpAddr>,
    pub(super) v6: RecordsFound<IpAddr>,
    pub(super) services: RecordsFound<ServiceTarget>,
    pub(super) ttl: Option<Duration>,
}

/// The answer about one kind of records.
#[derive(Clone, Debug, Default)]
pub(super) enum RecordsFound<T> {
    /// Not asked for.
    #[default]
    NotAsked,
    /// Not answered yet.
    Open,
    /// The records.
    Records(Vec<T>),
    /// There are none, as a server says.
    NoRecords(String),
    /// No server gave an answer.
    Failed(String),
}

impl<T> RecordsFound<T> {
    /// True if the records are known.
    pub(super) fn has_records(&self) -> bool {
        matches!(self, Self::Records(_))
    }

    fn is_open(&self) -> bool {
        matches!(self, Self::Open)
    }

    /// Why there are no records.
    pub(super) fn failure(&self) -> Option<&str> {
        match self {
            Self::Failed(why) | Self::NoRecords(why) => Some(why),
            Self::NotAsked | Self::Open | Self::Records(_) => None,
        }
    }
}

impl LookupFound {
    /// True if any record is known.
    pub(super) fn has_any(&self) -> bool {
        self.v4.has_records() || self.v6.has_records() || self.services.has_records()
    }

    /// True if a kind of records that was asked for has no answer of a name server.
    fn is_in_doubt(&self) -> bool {
        let families = [&self.v4, &self.v6];
        families.into_iter().any(|family| matches!(family, RecordsFound::Open | RecordsFound::Failed(_)))
            || matches!(self.services, RecordsFound::Failed(_))
    }

    fn is_closed(&self) -> bool {
        !self.v4.is_open() && !self.v6.is_open()
    }

    /// Why there is no record of any kind.
    pub(super) fn error(&self) -> NameError {
        let failed = [&self.v4, &self.v6].map(|family| match family {
            RecordsFound::Failed(why) => Some(why.as_str()),
            _ => None,
        });
        let whys = failed.into_iter().flatten();
        let none = [self.v4.failure(), self.v6.failure(), self.services.failure()].into_iter().flatten();
        NameError::because(whys.chain(none).next().unwrap_or("no name server was asked"))
    }

    fn note_ttl(&mut self, ttl: Option<Duration>) {
        self.ttl = self.ttl.into_iter().chain(ttl).min();
    }
}

/// Looks a name up, and sends the news: at most once the answer for one family while the other is awaited,
/// and then the outcome. The other family is awaited to the end only if `in_parts`.
pub(super) async fn look_up(
    question: NameQuestion,
    settings: Arc<NameServers>,
    (times, in_parts): (LookupTimes, bool),
    news: mpsc::Sender<LookupNews>,
) {
    let (NameQuestion::Addresses(name) | NameQuestion::Services(name)) = &question;
    let mut outcome: Option<(LookupFound, Vec<(SocketAddr, ServerPart)>)> = None;
    let mut passed_on = false;
    for whole in settings.names(name) {
        let (times, news, passed_on) = (&times, in_parts.then_some(&news), &mut passed_on);
        let mut lookup = OneName { question: &question, settings: &settings, times, news, passed_on };
        let (found, servers) = match (whole_name(&whole), &question) {
            (Ok(whole), NameQuestion::Addresses(_)) => lookup.addresses(&whole).await,
            (Ok(whole), NameQuestion::Services(_)) => lookup.services(&whole).await,
            (Err(error), _) => {
                let v4 = RecordsFound::NoRecords(error.to_string());
                (LookupFound { v4, ..LookupFound::default() }, Vec::new())
            }
        };
        let (ends, is_better) = match &outcome {
            _ if found.has_any() => (true, true),
            None => (false, true),
            // That servers fail says more than that a name is unknown.
            Some((before, _)) => (false, found.is_in_doubt() || !before.is_in_doubt()),
        };
        if is_better {
            outcome = Some((found, servers));
        }
        if ends {
            break;
        }
    }
    let (found, servers) = outcome.unwrap_or_default();
    // The receiver is gone only when no name is looked up any more.
    let part = if passed_on { NewsPart::Second } else { NewsPart::Whole };
    drop(news.send(LookupNews { question, found, servers, part }).await);
}

/// The lookup of one whole name.
struct OneName<'a> {
    question: &'a NameQuestion,
    settings: &'a Arc<NameServers>,
    times: &'a LookupTimes,
    /// Takes the first part; `None` if there is to be none.
    news: Option<&'a mpsc::Sender<LookupNews>>,
    passed_on: &'a mut bool,
}

impl OneName<'_> {
    async fn services(&self, name: &Name) -> (LookupFound, Vec<(SocketAddr, ServerPart)>) {
        let AskedServers { verdict, servers } = ask(self.settings, name, RecordType::SRV, self.times).await;
        let mut found = LookupFound::default();
        found.services = match verdict {
            ServerVerdict::Records(records, ttl) => {
                found.note_ttl(ttl);
                RecordsFound::Records(records.iter().filter_map(ServiceTarget::of).collect())
            }
            ServerVerdict::NoRecords(why) => RecordsFound::NoRecords(why),
            ServerVerdict::Failed(why) => RecordsFound::Failed(why),
        };
        (found, servers)
    }

    async fn addresses(&mut self, name: &Name) -> (LookupFound, Vec<(SocketAddr, ServerPart)>) {
        let mut a = pin!(ask(self.settings, name, RecordType::A, self.times));
        let mut aaaa = pin!(ask(self.settings, name, RecordType::AAAA, self.times));
        let mut found = LookupFound { v4: RecordsFound::Open, ..LookupFound::default() };
        if self.settings.asks_aaaa {
            found.v6 = RecordsFound::Open;
        }
        let mut servers = Vec::new();
        // When the answer for one family is passed on, or the other family is given up.
        let mut wake: Option<Instant> = None;
        while !found.is_closed() {
            tokio::select! {
                biased; // Answers before time limits.
                asked = &mut a, if found.v4.is_open() => {
                    note(&mut servers, asked.servers);
                    found.v4 = family(asked.verdict, &mut found);
                }
                asked = &mut aaaa, if found.v6.is_open() => {
                    note(&mut servers, asked.servers);
                    found.v6 = family(asked.verdict, &mut found);
                }
                () = sleep_until(wake.unwrap_or_else(Instant::now)), if wake.is_some() => {
                    let Some(news) = self.news.filter(|_| found.has_any()) else { return (found, servers) };
                    let (question, found) = (self.question.clone(), found.clone());
                    let (servers, part) = (servers.clone(), NewsPart::First);
                    let part = LookupNews { question, found, servers, part };
                    *self.passed_on = true;
                    // The receiver is gone only when no name is looked up any more.
                    drop(news.send(part).await);
                    wake = None;
                    continue;
                }
            }
            let none = |family: &RecordsFound<IpAddr>| matches!(family, RecordsFound::NoRecords(_));
            if found.has_any() {
                wake = Some(Instant::now() + self.times.other_family);
            } else if none(&found.v4) || none(&found.v6) {
                wake = Some(Instant::now() + self.settings.timeout);
            }
        }
        (found, servers)
    }
}

fn family(verdict: ServerVerdict, found: &mut LookupFound) -> RecordsFound<IpAddr> {
    match verdict {
        ServerVerdict::Records(records, ttl) => {
            found.note_ttl(ttl);
            RecordsFound::Records(records.iter().filter_map(RData::ip_addr).collect())
        }
        ServerVerdict::NoRecords(why) => RecordsFound::NoRecords(why),
        ServerVerdict::Failed(why) => RecordsFound::Failed(why),
    }
}

/// Keeps the best part of each server: a server that answers for one family is not at fault for the other.
fn note(servers: &mut Vec<(SocketAddr, ServerPart)>, asked: Vec<(SocketAddr, ServerPart)>) {
    for (server, part) in asked {
        match servers.iter_mut().find(|(known, _)| *known == server) {
            Some((_, known)) if *known == ServerPart::Answered => {}
            Some((_, known)) => *known = part,
            None => servers.push((server, part)),
        }
    }
}
