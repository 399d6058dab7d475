//! Where logins are dealt with: one at a time for the same user and password, whoever waits for it.
//!
//! Owns: the way of a login (what is known, the limits, the sources, the time at which a refusal is told), on the control
//! runtime. Must not know: what a session is, how a source checks.
//! Invariants (rules 12, 15, 42): a password that is known to be right, or known to be wrong, passes the limits; when and
//! how a refusal is told depends neither on whether the user exists, nor on which source was asked, nor, of one who is
//! blocked, on whether the password was right; a session is looked at whoever guesses.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::mem::discriminant;
use std::net::IpAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use moka::policy::EvictionPolicy;
use moka::sync::Cache;
use tokio::sync::{Semaphore, mpsc, watch};
use tokio::time::{Instant, sleep_until, timeout_at};

use crate::config::{self, PasswordSources};
use crate::downstream::session::{Proof, Session, SessionPeer};
use crate::gateway::login::file::UsersFile;
use crate::gateway::login::flights::{Boarded, Flights, Full, Landing, SEATS};
use crate::gateway::login::limits::{Attempts, Limited, Network, Settled, Try};
use crate::gateway::login::refusal_schedule::RefusalSchedule;
use crate::gateway::login::refused::{Asked, Refused};
use crate::gateway::login::sources::{Denied, Login, Off, Proved, Sources};
use crate::identity::UserName;
use crate::published::Published;
use crate::secret::Secret;
use crate::tasks::Tasks;
use crate::telemetry::limiter::RecordLimiter;
use crate::telemetry::metrics::{Metrics, one};
use crate::upstream::credential::{Credentials, Fingerprint, Moves, Pages};
use crate::upstream::membership::MembersHandle;
use crate::users::LineMark;

/// Requests that the control runtime has not taken up yet: it takes them up at once, so that this fills only when that
/// runtime is stuck. Beside those that take seats, logins and sessions of passwords that were right before.
const REQUESTS: usize = SEATS + 4096;
/// Checks under way of one network: a member makes two at a time, so that who guesses takes a few turns of everybody
/// else's, and not hundreds.
const TURNS: usize = 8;
/// A login that the limits refuse is answered after so long: by then an unannounced try of another user has ended, so
/// that nobody can tell the two apart.
const LIMITED_ANSWER: Duration = Duration::from_secs(1);
/// What an unannounced try may take. Where it takes longer, the check goes on, and counts for the next try.
const UNANNOUNCED: Duration = Duration::from_millis(750);

/// For so long a password that was right is taken for right where a session is used, and for twice as long while it is
/// looked at again.
const PROVED: Duration = Duration::from_secs(1);
/// Passwords of sessions that are remembered with that.
const REMEMBERED: u64 = 10_000;

/// The password logins of this process. One for all shards.
pub struct Logins {
    credentials: Arc<Credentials>,
    proved: Arc<Cache<Fingerprint, (Proved, Instant)>>,
    passwords: Arc<Published<config::Passwords>>,
    file: Arc<UsersFile>,
    refused: Refused,
    metrics: Arc<Metrics>,
    flights: Flights,
    requests: mpsc::Sender<Request>,
    moves: Moves,
    /// Whether another cluster was followed.
    followed: AtomicBool,
}

/// What the control runtime runs for [`Logins`]. Without it, nobody logs in.
pub struct LoginControl {
    requests: mpsc::Receiver<Request>,
    sources: Sources,
    refused: Refused,
    limits: config::FailedLogins,
    pages: Pages,
    log_limiter: RecordLimiter,
}

/// How a login ended, and at what cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ended {
    verdict: Result<Proved, Denied>,
    effort: Effort,
}

/// What a login cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Effort {
    /// No more than a look at what is known: neither bcrypt nor argon2.
    Recall,
    /// Whatever it took.
    Ask,
}

/// A login that the control runtime is asked to deal with.
struct Request {
    login: Login,
    purpose: Purpose,
    proved: Arc<Cache<Fingerprint, (Proved, Instant)>>,
    landing: Landing,
}

/// What a password is checked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    /// A client presents it, from this address.
    Login(Option<IpAddr>),
    /// The same, for a user who is blocked.
    Blocked(Option<IpAddr>),
    /// A session that was sealed for it is used: nobody is guessing. etcd accepted it at this auth revision, if not 0.
    Session(u64),
}

/// What all logins share on the control runtime.
struct Desk {
    sources: Sources,
    refused: Refused,
    attempts: RefCell<Attempts>,
    refusals: RefCell<RefusalSchedule>,
    /// Checks that the sources are asked for now.
    asked: Cell<u32>,
    turns: RefCell<HashMap<Network, Rc<Semaphore>>>,
    /// Limits the log lines of logins that are not checked.
    log_limiter: RecordLimiter,
}

impl Logins {
    /// Logins, and what the control runtime has to run for them.
    #[must_use]
    pub fn new(
        config: &Arc<config::Passwords>,
        credentials: Arc<Credentials>,
        members: MembersHandle,
        pages: Pages,
        metrics: Arc<Metrics>,
    ) -> (Arc<Self>, LoginControl) {
        let moves = Moves::default();
        let (requests, asked) = mpsc::channel(REQUESTS);
        let passwords = Arc::new(Published::new(Arc::clone(config)));
        let (file, refused) = (Arc::new(UsersFile::new()), Refused::nothing());
        let sources = Sources {
            passwords: Arc::clone(&passwords),
            file: Arc::clone(&file),
            credentials: Arc::clone(&credentials),
            members,
            moves: moves.clone(),
        };
        let limits = config.failed;
        let log_limiter = RecordLimiter::new(metrics.log_records_left_out.clone());
        let refusals = refused.clone();
        let control =
            LoginControl { requests: asked, sources, refused: refusals, limits, pages, log_limiter };
        let proved = Cache::builder().max_capacity(REMEMBERED).eviction_policy(EvictionPolicy::lru()).build();
        let proved = Arc::new(proved);
        let flights = Flights::default();
        let followed = AtomicBool::default();
        let logins = Self {
            credentials,
            proved,
            passwords,
            file,
            refused,
            metrics,
            flights,
            requests,
            moves,
            followed,
        };
        (Arc::new(logins), control)
    }

    /// What this password proves.
    ///
    /// Cancel-safe: a check that was begun goes on.
    ///
    /// # Errors
    /// See [`Denied`].
    pub async fn check(
        &self,
        user: &UserName,
        password: &Secret<String>,
        from: Option<IpAddr>,
    ) -> Result<Proved, Denied> {
        self.counted(user, password, Purpose::Login(from)).await
    }

    /// What a user who is blocked is told: what is told to a wrong password, when it is told to one, and counted as one.
    /// Nobody is asked about the password.
    ///
    /// Cancel-safe, as [`Logins::check`].
    pub async fn refuse(&self, user: &UserName, password: &Secret<String>, from: Option<IpAddr>) -> Denied {
        match self.counted(user, password, Purpose::Blocked(from)).await {
            Ok(_) => Denied::WrongPassword,
            Err(denied) => denied,
        }
    }

    async fn counted(
        &self,
        user: &UserName,
        password: &Secret<String>,
        purpose: Purpose,
    ) -> Result<Proved, Denied> {
        let login = self.login(user, password);
        let begun = Instant::now();
        let ended = loop {
            let boarded = self.board(&login, purpose);
            let joined = boarded.as_ref().is_ok_and(|boarded| boarded.joined);
            let ended = self.landed(boarded).await;
            // Whoever began it may not try again now; that says nothing of who comes from elsewhere.
            if !joined || ended.verdict != Err(Denied::Limited) {
                break ended;
            }
        };
        self.metrics.logins.get_or_create(&one("result", ended.result())).inc();
        if ended.verdict == Err(Denied::Limited) {
            sleep_until(begun + LIMITED_ANSWER).await;
        }
        ended.verdict
    }

    /// What the password of a session proves now: for sessions that go upstream by a credential of ours, where etcd does not
    /// look at the password any more. All sources are asked in their order, so that a session outlives its user's move into
    /// the users file. A look that is older than a second is taken again while the call goes on, one that is older than two
    /// is waited for.
    ///
    /// Cancel-safe: a check that was begun goes on.
    ///
    /// # Errors
    /// See [`Denied`]; [`Denied::Untold`] and [`Denied::Limited`] are not the session's fault.
    pub async fn prove_again(&self, session: &Session) -> Result<Proved, Denied> {
        let Some((login, purpose)) = self.of_session(session) else { return Ok(Proved::Nothing) };
        let known = self.proved.get(&login.fingerprint).filter(|(proved, _)| match proved {
            // Of a line that is another by now, it says nothing.
            Proved::File(line) => self.line(&login.user) == Some(*line),
            Proved::Etcd | Proved::Nothing => true,
        });
        let known = known.map(|(proved, at)| (proved, at.elapsed())).filter(|(_, age)| *age < PROVED * 2);
        match known {
            Some((proved, age)) if age < PROVED => Ok(proved),
            Some((proved, _)) => {
                // Whoever comes after it finds what it says; nobody waits for it.
                drop(self.board(&login, purpose));
                Ok(proved)
            }
            None => self.landed(self.board(&login, purpose)).await.verdict,
        }
    }

    /// The same of today: no earlier look is taken for it.
    ///
    /// Cancel-safe: a check that was begun goes on.
    ///
    /// # Errors
    /// As there.
    pub async fn prove_now(&self, session: &Session) -> Result<Proved, Denied> {
        let Some((login, purpose)) = self.of_session(session) else { return Ok(Proved::Nothing) };
        self.landed(self.board(&login, purpose)).await.verdict
    }

    /// None where it carries no password.
    fn of_session(&self, session: &Session) -> Option<(Login, Purpose)> {
        let SessionPeer::Password { user, password } = &session.peer else { return None };
        let at = match session.proof {
            // Of which cluster that was, it does not say: another's may show the same number.
            Proof::Etcd { auth_revision } if !self.followed.load(Ordering::Acquire) => auth_revision,
            Proof::Etcd { .. } | Proof::None | Proof::File { .. } => 0,
        };
        Some((self.login(user, password), Purpose::Session(at)))
    }

    /// What is known of changes of users and roles at etcd.
    #[must_use]
    pub fn moves(&self) -> &Moves {
        &self.moves
    }

    /// The sources and the users file as they are now.
    #[must_use]
    pub fn passwords(&self) -> Arc<config::Passwords> {
        self.passwords.load_full()
    }

    /// The mark of this user's line in the users file as it is now: what a file login proved holds as long as it is the
    /// same. None where the file is no source.
    #[must_use]
    pub fn line(&self, user: &UserName) -> Option<LineMark> {
        let passwords = self.passwords.load();
        (passwords.sources != PasswordSources::Etcd).then(|| passwords.users.line(user))?
    }

    /// Takes other sources, or another users file, in place of those that were read before. What the limits are stays.
    pub fn replace(&self, passwords: Arc<config::Passwords>) {
        self.passwords.publish(passwords);
        // What others said holds no more.
        self.proved.invalidate_all();
        self.refused.forget_all();
    }

    /// Forgets what the cluster ever said of any password: another is followed from now on.
    pub fn forget_cluster(&self) {
        self.followed.store(true, Ordering::Release);
        self.proved.invalidate_all();
        self.refused.forget_all();
    }

    /// Moves whenever there are other sources, or another users file.
    #[must_use]
    pub fn changes(&self) -> watch::Receiver<()> {
        self.passwords.changes()
    }

    /// Forgets what was ever said of this user's passwords. To be called when one was changed, or the user was added or
    /// deleted, through us.
    pub fn forget_user(&self, user: &UserName) {
        self.credentials.forget_user(user);
        self.refused.forget_user(user);
    }

    fn login(&self, user: &UserName, password: &Secret<String>) -> Login {
        let fingerprint = self.credentials.fingerprint(user, password);
        Login { user: user.clone(), password: Arc::new(password.clone()), fingerprint }
    }

    /// Joins the check of this user and password that is under way, or asks for one.
    fn board(&self, login: &Login, purpose: Purpose) -> Result<Boarded, Full> {
        let seat = match purpose {
            Purpose::Login(_) if self.is_known(login) => None,
            Purpose::Login(from) | Purpose::Blocked(from) => Some(Network::of(from)),
            Purpose::Session(_) => None,
        };
        self.flights.board((login.fingerprint, discriminant(&purpose)), seat, |landing| {
            let (login, proved) = (login.clone(), Arc::clone(&self.proved));
            let request = Request { login, purpose, proved, landing };
            self.requests.try_send(request).map_err(|_full| Full)
        })
    }

    /// Whether it was right before, as far as that can be told without asking anybody.
    fn is_known(&self, login: &Login) -> bool {
        let users = &self.passwords.load().users;
        self.file.recall(users, login).is_some() || self.credentials.knows(login.fingerprint)
    }

    async fn landed(&self, boarded: Result<Boarded, Full>) -> Ended {
        let Ok(Boarded { flight, .. }) = boarded else {
            return Ended { verdict: Err(Denied::Limited), effort: Effort::Recall };
        };
        let landed = tokio::select! {
            biased; // what has landed counts; both are cancel-safe
            landed = flight => landed.ok(),
            () = self.requests.closed() => None,
        };
        landed.unwrap_or(Ended { verdict: Err(Denied::Untold), effort: Effort::Ask })
    }
}

impl LoginControl {
    /// Deals with logins until dropped, by tasks among `tasks`.
    pub async fn run(mut self, tasks: Tasks) {
        let _asking = tasks.spawn("auth revision shown", self.sources.moves.clone().run(self.pages));
        let desk = Rc::new(Desk {
            sources: self.sources,
            refused: self.refused,
            attempts: RefCell::new(Attempts::new(self.limits)),
            refusals: RefCell::new(RefusalSchedule::new(Instant::now())),
            asked: Cell::new(0),
            turns: RefCell::default(),
            log_limiter: self.log_limiter,
        });
        while let Some(request) = self.requests.recv().await {
            let desk = Rc::clone(&desk);
            let deal = async move {
                let ended = desk.deal(&request.login, request.purpose).await;
                request.land(ended);
            };
            tasks.spawn("password login", deal).detach();
        }
    }
}

impl Desk {
    async fn deal(&self, login: &Login, purpose: Purpose) -> Ended {
        let asked = purpose.asked();
        if asked == Asked::Sources
            && let Some(proved) = self.sources.recall(login, purpose.off()).await
        {
            return Ended { verdict: Ok(proved), effort: Effort::Recall };
        }
        let line = self.sources.line(&login.user);
        if let Some(denied) = self.refused.recall(login, asked, line, Instant::now()) {
            return Ended { verdict: Err(denied), effort: Effort::Recall };
        }
        let verdict = match purpose {
            Purpose::Login(from) | Purpose::Blocked(from) => self.guarded(login, asked, from).await,
            // Nobody has changed anything since: no bcrypt for whom another replica, or this one before a restart, has seen.
            Purpose::Session(at) if self.sources.is_unmoved(&login.user, at).await => {
                return Ended { verdict: Ok(Proved::Etcd), effort: Effort::Recall };
            }
            Purpose::Session(_) => Ok(self.ask(login, purpose.off()).await),
        };
        let Ok(verdict) = verdict else {
            return Ended { verdict: Err(Denied::Limited), effort: Effort::Recall };
        };
        match verdict {
            Ok(_) => self.refused.forget(login),
            Err(why @ (Denied::WrongPassword | Denied::NoPassword)) => {
                self.refused.note(login, asked, line, why, Instant::now());
            }
            Err(Denied::Limited | Denied::Untold) => {}
        }
        Ended { verdict, effort: Effort::Ask }
    }

    /// Asks, if the limits allow it, and is in no hurry to say no.
    async fn guarded(
        &self,
        login: &Login,
        asked: Asked,
        from: Option<IpAddr>,
    ) -> Result<Result<Proved, Denied>, Limited> {
        let begun = Instant::now();
        let tried = self.attempts.borrow_mut().begin(&login.user, from, begun).inspect_err(|limited| {
            if self.log_limiter.may_log() {
                tracing::info!(user = ?login.user, ?from, why = %limited, "login not checked");
            }
        })?;
        if tried.is_unannounced() {
            return self.unannounced(login, asked, from, tried).await;
        }
        let slot = self.refusals.borrow_mut().reserve(Network::of(from), begun);
        let verdict = self.verdict(login, asked, from).await;
        let (how, now) = (settled(verdict), Instant::now());
        match how {
            Settled::Wrong => {
                // The limits count from the answer: from when the check ended they would tell what it took.
                let at = self.refusals.borrow_mut().answer_at(&slot, now);
                self.attempts.borrow_mut().settle(tried, how, at);
                sleep_until(at).await;
            }
            Settled::Right | Settled::Untold => {
                self.attempts.borrow_mut().settle(tried, how, now);
                self.refusals.borrow_mut().release(&slot, how == Settled::Right);
            }
        }
        Ok(verdict)
    }

    /// Asks for a user who has logged in from there, though the limits are reached. Only a right password is told from a
    /// login that was refused by the limits.
    async fn unannounced(
        &self,
        login: &Login,
        asked: Asked,
        from: Option<IpAddr>,
        tried: Try,
    ) -> Result<Result<Proved, Denied>, Limited> {
        let until = Instant::now() + UNANNOUNCED;
        let verdict = timeout_at(until, self.verdict(login, asked, from)).await.ok();
        let how = verdict.map_or(Settled::Wrong, settled);
        self.attempts.borrow_mut().settle(tried, how, Instant::now());
        verdict.and_then(Result::ok).map(Ok).ok_or(Limited)
    }

    async fn verdict(&self, login: &Login, asked: Asked, from: Option<IpAddr>) -> Result<Proved, Denied> {
        match asked {
            Asked::Sources => self.in_turn(login, Network::of(from)).await,
            Asked::Nobody => Err(Denied::WrongPassword),
        }
    }

    /// Asks once it is this network's turn: others wait for a few of its tries, never for all of them.
    async fn in_turn(&self, login: &Login, network: Network) -> Result<Proved, Denied> {
        let turns = {
            let mut all = self.turns.borrow_mut();
            all.retain(|_, turns| Rc::strong_count(turns) > 1);
            Rc::clone(all.entry(network).or_insert_with(|| Rc::new(Semaphore::new(TURNS))))
        };
        let _turn = turns.acquire().await;
        let (begun, alone) = (Instant::now(), self.asked.get() == 0);
        let verdict = self.ask(login, Off::Believed).await;
        // A check that waited for others says nothing of what one costs.
        match settled(verdict) {
            Settled::Right if alone => self.refusals.borrow_mut().learn_accepted(begun.elapsed()),
            Settled::Wrong if alone => self.refusals.borrow_mut().learn_refused(begun.elapsed()),
            Settled::Right | Settled::Wrong | Settled::Untold => {}
        }
        verdict
    }

    async fn ask(&self, login: &Login, off: Off) -> Result<Proved, Denied> {
        let _asking = Asking::begin(&self.asked);
        self.sources.ask(login, off).await
    }
}

/// A check under way, also one that is given up.
struct Asking<'a>(&'a Cell<u32>);

impl<'a> Asking<'a> {
    fn begin(asked: &'a Cell<u32>) -> Self {
        asked.set(asked.get() + 1);
        Self(asked)
    }
}

impl Drop for Asking<'_> {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

impl Purpose {
    fn asked(self) -> Asked {
        match self {
            Self::Login(_) | Self::Session(_) => Asked::Sources,
            Self::Blocked(_) => Asked::Nobody,
        }
    }

    /// What is proved of a session goes upstream by a credential of ours, which passes whether auth is on or off.
    fn off(self) -> Off {
        match self {
            Self::Session(_) => Off::Asked,
            Self::Login(_) | Self::Blocked(_) => Off::Believed,
        }
    }
}

fn settled(verdict: Result<Proved, Denied>) -> Settled {
    match verdict {
        Ok(Proved::Etcd | Proved::File(_)) => Settled::Right,
        Err(Denied::WrongPassword | Denied::NoPassword) => Settled::Wrong,
        Ok(Proved::Nothing) | Err(Denied::Limited | Denied::Untold) => Settled::Untold,
    }
}

impl Ended {
    /// Its name in the metrics.
    fn result(self) -> &'static str {
        match (self.verdict, self.effort) {
            (Ok(Proved::Nothing), _) => "unproved",
            (Ok(_), Effort::Ask) => "accepted",
            (Ok(_), Effort::Recall) => "remembered",
            (Err(Denied::WrongPassword | Denied::NoPassword), Effort::Ask) => "refused",
            (Err(Denied::WrongPassword | Denied::NoPassword), Effort::Recall) => "refused_again",
            (Err(Denied::Limited), _) => "limited",
            (Err(Denied::Untold), _) => "untold",
        }
    }
}

impl Request {
    /// Takes down how it ended, then tells those who wait.
    fn land(self, ended: Ended) {
        match ended.verdict {
            _ if self.purpose.asked() == Asked::Nobody => {}
            Ok(proved) => self.proved.insert(self.login.fingerprint, (proved, Instant::now())),
            Err(Denied::WrongPassword | Denied::NoPassword) => {
                self.proved.invalidate(&self.login.fingerprint);
            }
            // That nobody could say changes nothing of what was said, nor makes it younger.
            Err(Denied::Limited | Denied::Untold) => {}
        }
        self.landing.land(ended);
    }
}
