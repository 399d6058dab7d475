//! Names and name servers that fail now, for the log and for `keyward doctor`.
//!
//! Owns: what counts as a trouble, and its record in the log: once at its begin and once at its end. Must not
//! know: the lookups. Invariants: a server that fails while another one answers is in trouble after
//! [`SERVER_FAILS`] questions in a row; a name is, once no server has answered.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use super::NameError;
use super::known_names::KnownAnswer;
use super::server_question::{ServerPart, shown};

/// Questions in a row that a server leaves to another one.
const SERVER_FAILS: u32 = 3;
/// A trouble of which nothing was heard for this time is over, or of a name that is not used any more.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(300);
/// Names in trouble that are kept.
const MOST_NAMES: usize = 128;

/// A name or a name server that fails now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NameTrouble {
    /// The name, or the name server.
    pub about: String,
    /// The failure, with the name server.
    pub what: String,
    /// True for a name server.
    pub is_server: bool,
    /// True if calls are served all the same: by another server, or by the addresses known from before.
    pub is_served: bool,
}

/// The troubles of one resolver.
#[derive(Default)]
pub(super) struct NameTroubles(Mutex<Troubles>);

#[derive(Default)]
struct Troubles {
    names: BTreeMap<String, (Instant, NameTrouble)>,
    servers: BTreeMap<SocketAddr, ServerTrouble>,
}

struct ServerTrouble {
    at: Instant,
    fails: u32,
    what: String,
}

impl NameTroubles {
    /// The name has an answer of a name server, or needs none.
    pub(super) fn note_answer(&self, name: &str) {
        if self.lock().names.remove(name).is_some_and(|(_, trouble)| trouble.is_served) {
            tracing::info!(name, "name servers answer again");
        }
    }

    /// No name server has answered; `old` is what is known from before.
    pub(super) fn note_failure(&self, name: &str, error: &NameError, old: &KnownAnswer) {
        let is_served = !old.is_empty();
        let mut what = error.to_string();
        if is_served {
            let since = old.confirmed_at.and_then(|at| SystemTime::now().duration_since(at).ok());
            let minutes = since.unwrap_or_default().as_secs() / 60;
            what = format!("{what}; its addresses of {minutes} minutes ago stay in use");
        }
        let mut troubles = self.lock();
        troubles.names.retain(|_, (at, _)| at.elapsed() < FORGOTTEN_AFTER);
        if troubles.names.len() >= MOST_NAMES && !troubles.names.contains_key(name) {
            return;
        }
        let trouble = NameTrouble { about: name.to_owned(), what, is_server: false, is_served };
        let before = troubles.names.insert(name.to_owned(), (Instant::now(), trouble));
        if is_served && before.is_none_or(|(_, before)| !before.is_served) {
            tracing::warn!(
                name,
                why = %error,
                "no name server answers: the last known addresses stay in use"
            );
        }
    }

    /// The name servers' parts in a question about `name`.
    pub(super) fn note_servers(&self, name: &str, servers: &[(SocketAddr, ServerPart)]) {
        if servers.iter().all(|(_, part)| *part != ServerPart::Answered) {
            return;
        }
        let mut troubles = self.lock();
        troubles.servers.retain(|server, _| servers.iter().any(|(listed, _)| listed == server));
        for (server, part) in servers {
            let why = match part {
                ServerPart::NotAsked => continue,
                ServerPart::Answered => {
                    let ended = troubles.servers.remove(server);
                    if ended.is_some_and(|trouble| trouble.fails >= SERVER_FAILS) {
                        tracing::info!(server = %shown(*server), "a name server answers again");
                    }
                    continue;
                }
                ServerPart::Silent => "it does not answer",
                ServerPart::Failed(why) => why.as_str(),
            };
            let new = || ServerTrouble { at: Instant::now(), fails: 0, what: String::new() };
            let trouble = troubles.servers.entry(*server).or_insert_with(new);
            trouble.at = Instant::now();
            trouble.fails = trouble.fails.saturating_add(1);
            trouble.what = format!("{why}: last asked for {name}; another name server answers");
            if trouble.fails == SERVER_FAILS {
                let server = shown(*server);
                tracing::warn!(%server, name, why, "a name server fails; another one answers");
            }
        }
    }

    /// The troubles of now.
    pub(super) fn report(&self) -> Vec<NameTrouble> {
        let troubles = self.lock();
        let is_of_now = |at: &Instant| at.elapsed() < FORGOTTEN_AFTER;
        let names = troubles.names.values().filter(|(at, _)| is_of_now(at));
        let servers = troubles.servers.iter().filter(|(_, trouble)| trouble.fails >= SERVER_FAILS);
        let servers = servers.filter(|(_, trouble)| is_of_now(&trouble.at));
        let of_server = |(server, trouble): (&SocketAddr, &ServerTrouble)| NameTrouble {
            about: format!("name server {}", shown(*server)),
            what: trouble.what.clone(),
            is_server: true,
            is_served: true,
        };
        names.map(|(_, trouble)| trouble.clone()).chain(servers.map(of_server)).collect()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Troubles> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
