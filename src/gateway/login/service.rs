//! Password logins: the order of the steps from a client's password to a verdict.
//!
//! Owns: the way of a login (known results, limits, sources, the time of a refusal), on the control runtime.
//! Must not know: the content of a session, how a source checks a password.
//! Invariants: concurrent logins with the same user and password share one check (docs/decisions.md#d42); a
//! password already known to be right, or known to be wrong, passes the limits (docs/decisions.md#d15); the
//! time and the form of a refusal depend neither on the user's existence nor on the source asked nor, for a
//! blocked user, on the correctness of the password; the limits never keep a session from being proved again
//! (docs/decisions.md#d12).

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
use crate::credentials::{AuthRevisionTracker, Credentials, MetricsPages, PasswordFingerprint};
use crate::downstream::session::{Session, SessionPeer, SessionProof};
use crate::gateway::login::limits::{
    AttemptOutcome, ClientNetwork, LoginAttempt, LoginLimiter, TooManyFailures,
};
use crate::gateway::login::password_check::{
    AuthOffTrust, LoginCredentials, LoginDenial, LoginEffort, LoginProof, LoginResult, PasswordCheckPurpose,
    PasswordJudge,
};
use crate::gateway::login::password_sources::PasswordSourceOrder;
use crate::gateway::login::refusal_schedule::RefusalSchedule;
use crate::gateway::login::refused_passwords::RefusedPasswords;
use crate::gateway::login::single_flight::{
    JoinedPasswordCheck, PasswordCheckReport, PasswordChecks, SEATS, TooManyPasswordChecks,
};
use crate::gateway::login::users_file::UsersFileSource;
use crate::identity::UserName;
use crate::members::membership::MembersHandle;
use crate::published::Published;
use crate::secret::Secret;
use crate::tasks::Tasks;
use crate::telemetry::limiter::RecordLimiter;
use crate::telemetry::metrics::Metrics;
use crate::telemetry::single_label::one;
use crate::users::UserLineMark;

/// Capacity of the channel to the control runtime. The control runtime takes requests up at once, so the
/// channel fills only if the control runtime is stuck. Beyond the checks that hold a seat there is room for
/// logins and sessions with passwords known to be right.
const REQUESTS: usize = SEATS + 4096;
/// Concurrent checks per client network. A member runs two checks at a time, so a network guessing passwords
/// delays other networks by a few checks, not by hundreds.
const TURNS: usize = 8;
/// Delay before a login refused by the limits is answered. Longer than [`UNANNOUNCED`]: a failed unannounced
/// try is answered after the same delay, so the caller cannot tell the two apart.
const LIMITED_ANSWER: Duration = Duration::from_secs(1);
/// Time limit of an unannounced try. A check at etcd goes on past the limit and counts for the next try.
const UNANNOUNCED: Duration = Duration::from_millis(750);

/// Age up to which the last proof of a session's password is used as it is. Up to twice this age the proof is
/// used while a new check runs in the background.
const PROVED: Duration = Duration::from_secs(1);
/// Session passwords whose last proof is remembered.
const REMEMBERED: u64 = 10_000;

/// The password logins of this process, shared by all shards.
pub struct LoginService {
    credentials: Arc<Credentials>,
    proved: Arc<Cache<PasswordFingerprint, (LoginProof, Instant)>>,
    passwords: Arc<Published<config::Passwords>>,
    file: Arc<UsersFileSource>,
    refused: RefusedPasswords,
    metrics: Arc<Metrics>,
    flights: PasswordChecks,
    requests: mpsc::Sender<QueuedLogin>,
    auth_revision: AuthRevisionTracker,
    /// True once the upstream has become another cluster.
    has_followed_cluster: AtomicBool,
}

/// The part of [`LoginService`] run by the control runtime. Logins fail while `LoginServiceControl` is not
/// running.
pub struct LoginServiceControl {
    requests: mpsc::Receiver<QueuedLogin>,
    sources: PasswordSourceOrder,
    refused: RefusedPasswords,
    limits: config::FailedLogins,
    pages: MetricsPages,
    log_limiter: RecordLimiter,
}

/// A login queued for the control runtime.
struct QueuedLogin {
    login: LoginCredentials,
    purpose: PasswordCheckPurpose,
    proved: Arc<Cache<PasswordFingerprint, (LoginProof, Instant)>>,
    landing: PasswordCheckReport,
}

/// State of all logins on the control runtime.
struct LoginServiceState {
    sources: PasswordSourceOrder,
    refused: RefusedPasswords,
    attempts: RefCell<LoginLimiter>,
    refusals: RefCell<RefusalSchedule>,
    /// Checks now running at the sources.
    asked: Cell<u32>,
    turns: RefCell<HashMap<ClientNetwork, Rc<Semaphore>>>,
    /// Rate limit of the log lines about unchecked logins.
    log_limiter: RecordLimiter,
}

impl LoginService {
    /// Creates the shared handle and the part to be run by the control runtime.
    #[must_use]
    pub fn new(
        config: &Arc<config::Passwords>,
        credentials: Arc<Credentials>,
        members: MembersHandle,
        pages: MetricsPages,
        metrics: Arc<Metrics>,
    ) -> (Arc<Self>, LoginServiceControl) {
        let moves = AuthRevisionTracker::default();
        let (requests, asked) = mpsc::channel(REQUESTS);
        let passwords = Arc::new(Published::new(Arc::clone(config)));
        let (file, refused) = (Arc::new(UsersFileSource::new()), RefusedPasswords::nothing());
        let sources = PasswordSourceOrder {
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
            LoginServiceControl { requests: asked, sources, refused: refusals, limits, pages, log_limiter };
        let proved = Cache::builder().max_capacity(REMEMBERED).eviction_policy(EvictionPolicy::lru()).build();
        let proved = Arc::new(proved);
        let flights = PasswordChecks::default();
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
            auth_revision: moves,
            has_followed_cluster: followed,
        };
        (Arc::new(logins), control)
    }

    /// Checks the password and returns the source of the proof.
    ///
    /// Cancel-safe: a check already begun goes on.
    ///
    /// # Errors
    /// See [`LoginDenial`].
    pub async fn check(
        &self,
        user: &UserName,
        password: &Secret<String>,
        from: Option<IpAddr>,
    ) -> Result<LoginProof, LoginDenial> {
        self.check_and_count(user, password, PasswordCheckPurpose::Login(from)).await
    }

    /// Refuses a login of a blocked user without asking any source. The answer, its delay and the counting
    /// are the same as for a wrong password.
    ///
    /// Cancel-safe, as [`LoginService::check`].
    pub async fn refuse(
        &self,
        user: &UserName,
        password: &Secret<String>,
        from: Option<IpAddr>,
    ) -> LoginDenial {
        match self.check_and_count(user, password, PasswordCheckPurpose::Blocked(from)).await {
            Ok(_) => LoginDenial::WrongPassword,
            Err(denied) => denied,
        }
    }

    async fn check_and_count(
        &self,
        user: &UserName,
        password: &Secret<String>,
        purpose: PasswordCheckPurpose,
    ) -> Result<LoginProof, LoginDenial> {
        let login = self.login(user, password);
        let begun = Instant::now();
        let ended = loop {
            let boarded = self.join_or_request(&login, purpose);
            let joined = boarded.as_ref().is_ok_and(|boarded| boarded.joined);
            let ended = self.check_result(boarded).await;
            // The limits refused the client that began the shared check; a client that only joined may still
            // be within the limits.
            if !joined || ended.verdict != Err(LoginDenial::Limited) {
                break ended;
            }
        };
        self.metrics.logins.get_or_create(&one("result", ended.result())).inc();
        if ended.verdict == Err(LoginDenial::Limited) {
            sleep_until(begun + LIMITED_ANSWER).await;
        }
        ended.verdict
    }

    /// Proves a session's password again. Needed for sessions that go upstream with a credential of
    /// Keyward's, since etcd then never sees the session's password. All sources are asked in order, so a
    /// session survives its user's move into the users file. A proof younger than one second is reused; a
    /// proof younger than two seconds is reused while a new check runs in the background; an older proof
    /// makes the caller wait for the check.
    ///
    /// Cancel-safe: a check already begun goes on.
    ///
    /// # Errors
    /// See [`LoginDenial`]; [`LoginDenial::Untold`] and [`LoginDenial::Limited`] are not the
    /// session's fault.
    pub async fn prove_again(&self, session: &Session) -> Result<LoginProof, LoginDenial> {
        let Some((login, purpose)) = self.session_login(session) else { return Ok(LoginProof::Nothing) };
        let known = self.proved.get(&login.fingerprint).filter(|(proved, _)| match proved {
            // A proof by a line of the users file is void once the line has changed.
            LoginProof::File(line) => self.line(&login.user) == Some(*line),
            LoginProof::Etcd | LoginProof::Nothing => true,
        });
        let known = known.map(|(proved, at)| (proved, at.elapsed())).filter(|(_, age)| *age < PROVED * 2);
        match known {
            Some((proved, age)) if age < PROVED => Ok(proved),
            Some((proved, _)) => {
                // The check runs in the background; the next caller finds the result.
                drop(self.join_or_request(&login, purpose));
                Ok(proved)
            }
            None => self.check_result(self.join_or_request(&login, purpose)).await.verdict,
        }
    }

    /// As [`LoginService::prove_again`], but ignores earlier proofs.
    ///
    /// Cancel-safe: a check already begun goes on.
    ///
    /// # Errors
    /// As [`LoginService::prove_again`].
    pub async fn prove_now(&self, session: &Session) -> Result<LoginProof, LoginDenial> {
        let Some((login, purpose)) = self.session_login(session) else { return Ok(LoginProof::Nothing) };
        self.check_result(self.join_or_request(&login, purpose)).await.verdict
    }

    /// The login and purpose of a session's password; `None` for a session without a password.
    fn session_login(&self, session: &Session) -> Option<(LoginCredentials, PasswordCheckPurpose)> {
        let SessionPeer::Password { user, password } = &session.peer else { return None };
        let at = match session.proof {
            // The proof names no cluster, and another cluster may show the same auth revision.
            SessionProof::Etcd { auth_revision } if !self.has_followed_cluster.load(Ordering::Acquire) => {
                auth_revision
            }
            SessionProof::Etcd { .. } | SessionProof::None | SessionProof::File { .. } => 0,
        };
        Some((self.login(user, password), PasswordCheckPurpose::Session(at)))
    }

    /// The auth revision, as last shown by a member.
    #[must_use]
    pub fn auth_revision(&self) -> &AuthRevisionTracker {
        &self.auth_revision
    }

    /// The present order of the sources and the present users file.
    #[must_use]
    pub fn passwords(&self) -> Arc<config::Passwords> {
        self.passwords.load_full()
    }

    /// The mark of this user's line in the present users file. A login proved by the file holds as long as
    /// the mark is unchanged. `None` if the file is no source.
    #[must_use]
    pub fn line(&self, user: &UserName) -> Option<UserLineMark> {
        let passwords = self.passwords.load();
        (passwords.sources != PasswordSources::Etcd).then(|| passwords.users.line(user))?
    }

    /// Replaces the sources and the users file. The limits stay as configured at the start.
    pub fn replace(&self, passwords: Arc<config::Passwords>) {
        self.passwords.publish(passwords);
        // Results of the former sources are void.
        self.proved.invalidate_all();
        self.refused.forget_all();
    }

    /// Forgets every verdict of the former cluster, since another cluster is followed from now on.
    pub fn forget_cluster(&self) {
        self.has_followed_cluster.store(true, Ordering::Release);
        self.proved.invalidate_all();
        self.refused.forget_all();
    }

    /// Notifies when the sources or the users file are replaced.
    #[must_use]
    pub fn changes(&self) -> watch::Receiver<()> {
        self.passwords.changes()
    }

    /// Forgets all verdicts on this user's passwords. To be called after a change of the user's password, and
    /// after the user was added or deleted, through Keyward.
    pub fn forget_user(&self, user: &UserName) {
        self.credentials.forget_user(user);
        self.refused.forget_user(user);
    }

    fn login(&self, user: &UserName, password: &Secret<String>) -> LoginCredentials {
        let fingerprint = self.credentials.fingerprint(user, password);
        LoginCredentials { user: user.clone(), password: Arc::new(password.clone()), fingerprint }
    }

    /// Joins the running check of this user and password, or requests a new check.
    fn join_or_request(
        &self,
        login: &LoginCredentials,
        purpose: PasswordCheckPurpose,
    ) -> Result<JoinedPasswordCheck, TooManyPasswordChecks> {
        let seat = match purpose {
            PasswordCheckPurpose::Login(_) if self.is_known(login) => None,
            PasswordCheckPurpose::Login(from) | PasswordCheckPurpose::Blocked(from) => {
                Some(ClientNetwork::of(from))
            }
            PasswordCheckPurpose::Session(_) => None,
        };
        self.flights.join_or_begin((login.fingerprint, discriminant(&purpose)), seat, |landing| {
            let (login, proved) = (login.clone(), Arc::clone(&self.proved));
            let request = QueuedLogin { login, purpose, proved, landing };
            self.requests.try_send(request).map_err(|_full| TooManyPasswordChecks)
        })
    }

    /// True if the password is known to be right, without asking a source.
    fn is_known(&self, login: &LoginCredentials) -> bool {
        let users = &self.passwords.load().users;
        self.file.recall(users, login).is_some() || self.credentials.is_proved(login.fingerprint)
    }

    async fn check_result(&self, boarded: Result<JoinedPasswordCheck, TooManyPasswordChecks>) -> LoginResult {
        let Ok(JoinedPasswordCheck { flight, .. }) = boarded else {
            return LoginResult { verdict: Err(LoginDenial::Limited), effort: LoginEffort::Recall };
        };
        let landed = tokio::select! {
            biased; // a finished check wins; both arms are cancel-safe
            landed = flight => landed.ok(),
            () = self.requests.closed() => None,
        };
        landed.unwrap_or(LoginResult { verdict: Err(LoginDenial::Untold), effort: LoginEffort::Ask })
    }
}

impl LoginServiceControl {
    /// Serves logins until dropped; spawns a task in `tasks` for each login.
    pub async fn run(mut self, tasks: Tasks) {
        let _asking = tasks.spawn("auth revision shown", self.sources.moves.clone().run(self.pages));
        let desk = Rc::new(LoginServiceState {
            sources: self.sources,
            refused: self.refused,
            attempts: RefCell::new(LoginLimiter::new(self.limits)),
            refusals: RefCell::new(RefusalSchedule::new(Instant::now())),
            asked: Cell::new(0),
            turns: RefCell::default(),
            log_limiter: self.log_limiter,
        });
        while let Some(request) = self.requests.recv().await {
            let desk = Rc::clone(&desk);
            let deal = async move {
                let ended = desk.run_login(&request.login, request.purpose).await;
                request.store_and_report(ended);
            };
            tasks.spawn("password login", deal).detach();
        }
    }
}

impl LoginServiceState {
    async fn run_login(&self, login: &LoginCredentials, purpose: PasswordCheckPurpose) -> LoginResult {
        let asked = purpose.asked();
        if asked == PasswordJudge::Sources
            && let Some(proved) = self.sources.recall(login, purpose.off()).await
        {
            return LoginResult { verdict: Ok(proved), effort: LoginEffort::Recall };
        }
        let line = self.sources.line(&login.user);
        if let Some(denied) = self.refused.recall(login, asked, line, Instant::now()) {
            return LoginResult { verdict: Err(denied), effort: LoginEffort::Recall };
        }
        let verdict = match purpose {
            PasswordCheckPurpose::Login(from) | PasswordCheckPurpose::Blocked(from) => {
                self.check_within_limits(login, asked, from).await
            }
            // The auth revision has not moved since etcd accepted the password: sessions from another
            // replica, or from before a restart, cost no bcrypt.
            PasswordCheckPurpose::Session(at) if self.sources.is_unmoved(&login.user, at).await => {
                return LoginResult { verdict: Ok(LoginProof::Etcd), effort: LoginEffort::Recall };
            }
            PasswordCheckPurpose::Session(_) => Ok(self.ask(login, purpose.off()).await),
        };
        let Ok(verdict) = verdict else {
            return LoginResult { verdict: Err(LoginDenial::Limited), effort: LoginEffort::Recall };
        };
        match verdict {
            Ok(_) => self.refused.forget(login),
            Err(why @ (LoginDenial::WrongPassword | LoginDenial::NoPassword)) => {
                self.refused.note(login, asked, line, why, Instant::now());
            }
            Err(LoginDenial::Limited | LoginDenial::Untold) => {}
        }
        LoginResult { verdict, effort: LoginEffort::Ask }
    }

    /// Asks the sources if the limits allow the try, and delays a refusal until the end of its slot.
    async fn check_within_limits(
        &self,
        login: &LoginCredentials,
        asked: PasswordJudge,
        from: Option<IpAddr>,
    ) -> Result<Result<LoginProof, LoginDenial>, TooManyFailures> {
        let begun = Instant::now();
        let tried = self.attempts.borrow_mut().begin(&login.user, from, begun).inspect_err(|limited| {
            if self.log_limiter.may_log() {
                tracing::info!(user = ?login.user, ?from, why = %limited, "login not checked");
            }
        })?;
        if tried.is_unannounced() {
            return self.check_past_limits(login, asked, from, tried).await;
        }
        let slot = self.refusals.borrow_mut().reserve(ClientNetwork::of(from), begun);
        let verdict = self.verdict(login, asked, from).await;
        let (how, now) = (settled(verdict), Instant::now());
        match how {
            AttemptOutcome::Wrong => {
                // The limits count from the answer: counting from the end of the check would reveal the cost
                // of the check.
                let at = self.refusals.borrow_mut().answer_at(&slot, now);
                self.attempts.borrow_mut().settle(tried, how, at);
                sleep_until(at).await;
            }
            AttemptOutcome::Right | AttemptOutcome::Untold => {
                self.attempts.borrow_mut().settle(tried, how, now);
                self.refusals.borrow_mut().release(&slot, how == AttemptOutcome::Right);
            }
        }
        Ok(verdict)
    }

    /// Checks a login past the limits, for a user with an earlier login from this address. Any result but
    /// success is reported as a refusal by the limits.
    async fn check_past_limits(
        &self,
        login: &LoginCredentials,
        asked: PasswordJudge,
        from: Option<IpAddr>,
        tried: LoginAttempt,
    ) -> Result<Result<LoginProof, LoginDenial>, TooManyFailures> {
        let until = Instant::now() + UNANNOUNCED;
        let verdict = timeout_at(until, self.verdict(login, asked, from)).await.ok();
        let how = verdict.map_or(AttemptOutcome::Wrong, settled);
        self.attempts.borrow_mut().settle(tried, how, Instant::now());
        verdict.and_then(Result::ok).map(Ok).ok_or(TooManyFailures)
    }

    async fn verdict(
        &self,
        login: &LoginCredentials,
        asked: PasswordJudge,
        from: Option<IpAddr>,
    ) -> Result<LoginProof, LoginDenial> {
        match asked {
            PasswordJudge::Sources => self.check_in_turn(login, ClientNetwork::of(from)).await,
            PasswordJudge::Nobody => Err(LoginDenial::WrongPassword),
        }
    }

    /// Asks the sources once this network has a free turn, so other networks wait for a few checks at most.
    async fn check_in_turn(
        &self,
        login: &LoginCredentials,
        network: ClientNetwork,
    ) -> Result<LoginProof, LoginDenial> {
        let turns = {
            let mut all = self.turns.borrow_mut();
            all.retain(|_, turns| Rc::strong_count(turns) > 1);
            Rc::clone(all.entry(network).or_insert_with(|| Rc::new(Semaphore::new(TURNS))))
        };
        let _turn = turns.acquire().await;
        let (begun, alone) = (Instant::now(), self.asked.get() == 0);
        let verdict = self.ask(login, AuthOffTrust::Believed).await;
        // A check running beside other checks waited for them, so its duration is no measure of the cost.
        match settled(verdict) {
            AttemptOutcome::Right if alone => self.refusals.borrow_mut().learn_accepted(begun.elapsed()),
            AttemptOutcome::Wrong if alone => self.refusals.borrow_mut().learn_refused(begun.elapsed()),
            AttemptOutcome::Right | AttemptOutcome::Wrong | AttemptOutcome::Untold => {}
        }
        verdict
    }

    async fn ask(&self, login: &LoginCredentials, off: AuthOffTrust) -> Result<LoginProof, LoginDenial> {
        let _asking = RunningCheckGuard::begin(&self.asked);
        self.sources.ask(login, off).await
    }
}

/// Counts a running check; the drop also covers a check cut short.
struct RunningCheckGuard<'a>(&'a Cell<u32>);

impl<'a> RunningCheckGuard<'a> {
    fn begin(asked: &'a Cell<u32>) -> Self {
        asked.set(asked.get() + 1);
        Self(asked)
    }
}

impl Drop for RunningCheckGuard<'_> {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

fn settled(verdict: Result<LoginProof, LoginDenial>) -> AttemptOutcome {
    match verdict {
        Ok(LoginProof::Etcd | LoginProof::File(_)) => AttemptOutcome::Right,
        Err(LoginDenial::WrongPassword | LoginDenial::NoPassword) => AttemptOutcome::Wrong,
        Ok(LoginProof::Nothing) | Err(LoginDenial::Limited | LoginDenial::Untold) => AttemptOutcome::Untold,
    }
}

impl LoginResult {
    /// The `result` label in the metrics.
    fn result(self) -> &'static str {
        match (self.verdict, self.effort) {
            (Ok(LoginProof::Nothing), _) => "unproved",
            (Ok(_), LoginEffort::Ask) => "accepted",
            (Ok(_), LoginEffort::Recall) => "remembered",
            (Err(LoginDenial::WrongPassword | LoginDenial::NoPassword), LoginEffort::Ask) => "refused",
            (Err(LoginDenial::WrongPassword | LoginDenial::NoPassword), LoginEffort::Recall) => {
                "refused_again"
            }
            (Err(LoginDenial::Limited), _) => "limited",
            (Err(LoginDenial::Untold), _) => "untold",
        }
    }
}

impl QueuedLogin {
    /// Remembers the verdict, then reports the result to the waiting callers.
    fn store_and_report(self, ended: LoginResult) {
        match ended.verdict {
            _ if self.purpose.asked() == PasswordJudge::Nobody => {}
            Ok(proved) => self.proved.insert(self.login.fingerprint, (proved, Instant::now())),
            Err(LoginDenial::WrongPassword | LoginDenial::NoPassword) => {
                self.proved.invalidate(&self.login.fingerprint);
            }
            // Without an answer the earlier result stays and keeps its age.
            Err(LoginDenial::Limited | LoginDenial::Untold) => {}
        }
        self.landing.report(ended);
    }
}
