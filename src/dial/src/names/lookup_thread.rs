//! The thread that looks names up for all threads of the process.
//!
//! Owns: the lookups under way, their askers, the moment at which the last known addresses serve. Must not
//! know: members, collectors, the time of the next lookup. Invariants: a name has one lookup under way,
//! whoever asks; a lookup goes on when its askers have given up, and its answer serves the next asker; an
//! asker has an answer within the limit of a lookup, and within `LookupTimes::old_after` where an answer is
//! known from before; at most [`MOST_LOOKUPS`] lookups are under way; the disk delays no lookup.

use std::collections::{HashMap, HashSet};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use futures_util::StreamExt as _;
use futures_util::future::{BoxFuture, FutureExt as _};
use futures_util::stream::FuturesUnordered;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, sleep_until};

use super::followed_file::FollowedFile;
use super::hosts_file::{HostsFile, loopback};
use super::known_names::{KnownAnswer, KnownNames};
use super::name_lookup::{LookupFound, LookupNews, NameQuestion, NewsPart, look_up};
use super::name_troubles::NameTroubles;
use super::resolv_conf::NameServers;
use super::server_question::ServerPart;
use super::{NameError, NameSource, ResolverSettings};
use keyward_base::io::kept_file::{self, KeptFile, KeptFileStatus};

/// Lookups under way. Names come from the configuration and from a bounded member list.
const MOST_LOOKUPS: usize = 256;
/// Age up to which an answer that came when nobody waited serves the next asker.
const LATE_FOR: Duration = Duration::from_secs(30);
/// Minimum interval between two writes of the last known addresses.
const WRITES: Duration = Duration::from_secs(10);
/// Limit of the write at the end of the process.
const LAST_WRITE: Duration = Duration::from_secs(1);

/// The answer to an asker.
pub(super) type LookupReply = Result<KnownAnswer, NameError>;

/// A question of a caller.
pub(super) struct LookupRequest {
    pub(super) question: NameQuestion,
    pub(super) reply: oneshot::Sender<LookupReply>,
}

/// The state of the thread.
pub(super) struct LookupThread {
    settings: ResolverSettings,
    hosts: Option<FollowedFile<HostsFile>>,
    servers: NameServersSource,
    known: KnownNames,
    troubles: Arc<NameTroubles>,
    lookups: FuturesUnordered<BoxFuture<'static, ()>>,
    /// The askers of lookups that have no answer yet.
    waiting: HashMap<NameQuestion, Vec<Asker>>,
    /// The names of which one family of addresses was passed on while the other is still awaited: one such
    /// lookup a name.
    halves: HashSet<NameQuestion>,
    /// Answers for which nobody waited.
    late: HashMap<NameQuestion, (Instant, KnownAnswer)>,
    kept: Option<KeptFile>,
    written_at: Option<Instant>,
}

struct Asker {
    reply: oneshot::Sender<LookupReply>,
    since: Instant,
}

enum NameServersSource {
    Followed(FollowedFile<Arc<NameServers>>),
    Given(Arc<NameServers>),
}

impl LookupThread {
    pub(super) fn new(
        settings: ResolverSettings,
        kept: Option<KeptFileStatus>,
        troubles: Arc<NameTroubles>,
    ) -> Self {
        let (hosts, servers) = match &settings.source {
            NameSource::Machine { resolv_conf, hosts, port } => {
                let port = *port;
                let parse = move |text: &[u8]| Arc::new(NameServers::parse(text, port));
                let servers = NameServersSource::Followed(FollowedFile::new(resolv_conf.clone(), parse));
                (Some(FollowedFile::new(hosts.clone(), HostsFile::parse)), servers)
            }
            NameSource::Servers(servers) => {
                (None, NameServersSource::Given(Arc::new(NameServers::of(servers))))
            }
        };
        let known = kept.as_ref().map(|file| KnownNames::read(file.path(), SystemTime::now()));
        Self {
            settings,
            hosts,
            servers,
            known: known.unwrap_or_default(),
            troubles,
            lookups: FuturesUnordered::new(),
            waiting: HashMap::new(),
            halves: HashSet::new(),
            late: HashMap::new(),
            kept: kept.map(KeptFile::new),
            written_at: None,
        }
    }

    /// Serves until every asker is gone.
    pub(super) async fn run(mut self, mut requests: mpsc::Receiver<LookupRequest>) {
        // Lookups send at most two news each, and wait while the queue is full.
        let (news, mut told) = mpsc::channel(MOST_LOOKUPS);
        loop {
            let wake = self.next_old_answer().into_iter().chain(self.next_write()).min();
            tokio::select! {
                biased; // Answers before questions.
                Some(news) = told.recv() => self.take_in(news),
                Some(()) = self.lookups.next() => {}
                request = requests.recv() => match request {
                    Some(request) => self.ask(request, &news),
                    None => break,
                },
                () = kept_file::keep(self.kept.as_mut()) => {}
                () = sleep_until(wake.unwrap_or_else(Instant::now)), if wake.is_some() => {
                    self.serve_old_answers();
                }
            }
            self.write_known();
        }
        if let Some(file) = &mut self.kept {
            self.known.take_unwritten().into_iter().for_each(|content| file.put(content));
            // A failure is in the status, and the last attempt.
            drop(file.written(LAST_WRITE).await);
        }
    }

    fn ask(&mut self, request: LookupRequest, news: &mpsc::Sender<LookupNews>) {
        let LookupRequest { question, reply } = request;
        if let Some(answer) = self.answer_at_once(&question) {
            // The asker may have given up.
            drop(reply.send(answer));
            return;
        }
        let asker = Asker { reply, since: Instant::now() };
        if let Some(askers) = self.waiting.get_mut(&question) {
            askers.retain(|asker| !asker.reply.is_closed());
            askers.push(asker);
            return;
        }
        if self.lookups.len() >= MOST_LOOKUPS {
            drop(asker.reply.send(Err(NameError::because("too many names are looked up"))));
            return;
        }
        self.waiting.insert(question.clone(), vec![asker]);
        let times = (self.settings.times, !self.halves.contains(&question));
        let servers = self.name_servers();
        self.lookups.push(look_up(question, servers, times, news.clone()).boxed());
    }

    /// The answer of the hosts file, of no lookup at all, or of a lookup that came too late for its askers.
    fn answer_at_once(&mut self, question: &NameQuestion) -> Option<LookupReply> {
        if let NameQuestion::Addresses(host) = question {
            if let Some(hosts) = &mut self.hosts {
                hosts.read_again();
            }
            let of_file = self.hosts.as_ref().and_then(|hosts| hosts.content().addresses(host));
            let addresses = of_file.map(<[_]>::to_vec).or_else(|| loopback(host).map(Vec::from));
            if let Some(addresses) = addresses {
                self.troubles.note_answer(host);
                return Some(Ok(KnownAnswer { addresses, ..KnownAnswer::default() }));
            }
        }
        let (at, answer) = self.late.remove(question)?;
        (at.elapsed() <= LATE_FOR).then_some(Ok(answer))
    }

    fn name_servers(&mut self) -> Arc<NameServers> {
        match &mut self.servers {
            NameServersSource::Given(servers) => Arc::clone(servers),
            NameServersSource::Followed(file) => {
                file.read_again();
                Arc::clone(file.content())
            }
        }
    }

    /// Takes in what a lookup has found, and answers its askers.
    fn take_in(&mut self, news: LookupNews) {
        let LookupNews { question, found, servers, part } = news;
        let answer = self.known.take_in(&question, &found, SystemTime::now());
        self.note_troubles(&question, &found, &servers, &answer);
        match part {
            NewsPart::First => {
                self.halves.insert(question.clone());
            }
            // Askers of a later lookup have its answer.
            NewsPart::Second => {
                self.halves.remove(&question);
                return;
            }
            NewsPart::Whole => {}
        }
        let askers = self.waiting.remove(&question);
        let is_known = !answer.is_empty();
        let reply = if is_known { Ok(answer) } else { Err(found.error()) };
        let mut heard = false;
        for asker in askers.into_iter().flatten() {
            heard |= asker.reply.send(reply.clone()).is_ok();
        }
        if let Ok(answer) = reply
            && !heard
            && !answer.is_old
        {
            self.late.retain(|_, (at, _)| at.elapsed() <= LATE_FOR);
            self.late.insert(question, (Instant::now(), answer));
        }
    }

    fn note_troubles(
        &self,
        question: &NameQuestion,
        found: &LookupFound,
        servers: &[(SocketAddr, ServerPart)],
        answer: &KnownAnswer,
    ) {
        let (NameQuestion::Addresses(name) | NameQuestion::Services(name)) = question;
        self.troubles.note_servers(name, servers);
        if found.has_any() {
            self.troubles.note_answer(name);
        } else {
            self.troubles.note_failure(name, &found.error(), answer);
        }
    }

    /// The time at which the next asker is served from before.
    fn next_old_answer(&self) -> Option<Instant> {
        let known = self.waiting.iter().filter(|(question, _)| !self.known.old_answer(question).is_empty());
        known.flat_map(|(_, askers)| askers).map(|asker| asker.since + self.settings.times.old_after).min()
    }

    /// Gives the last known answer to those who have waited long enough; their lookups go on.
    fn serve_old_answers(&mut self) {
        let now = Instant::now();
        for (question, askers) in &mut self.waiting {
            let old = self.known.old_answer(question);
            if old.is_empty() {
                continue;
            }
            for index in (0..askers.len()).rev() {
                if askers[index].since + self.settings.times.old_after <= now {
                    // The asker may have given up.
                    drop(askers.swap_remove(index).reply.send(Ok(old.clone())));
                }
            }
        }
    }

    /// The time of the next write.
    fn next_write(&self) -> Option<Instant> {
        (self.kept.is_some() && self.known.has_unwritten())
            .then(|| self.written_at.map_or_else(Instant::now, |at| at + WRITES))
    }

    /// Has the answers written.
    fn write_known(&mut self) {
        if self.next_write().is_none_or(|at| at > Instant::now()) {
            return;
        }
        if let Some((file, content)) = self.kept.as_mut().zip(self.known.take_unwritten()) {
            self.written_at = Some(Instant::now());
            file.put(content);
        }
    }
}
