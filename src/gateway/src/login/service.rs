//! Password logins: the order of the steps from a client's password to a verdict.
//!
//! Owns: the way of a login (known results, limits, sources, the time of a refusal), on the control runtime.
//! Must not know: the content of a session, how a source checks a password.
//! Invariants: concurrent logins with the same user and password share one check (docs/decisions.md#d42); a
//! password already known to be right, or known to be wrong, passes the limits (docs/decisions.md#d15); the
//! time and the form of a refusal depend neither on the user's existence nor on the source asked nor, for a
//! blocked user, on the correctness of the password; the limits never keep a session from being proved again
//! (docs/decisions.md#d12); a refusal that is decided counts once, also if its client gives up while the
//! answer is held back.

mod awaited_login;

use std::cell::Cell;
use std::collections::{HashMap, HashSet};
use std::mem::{Discriminant, discriminant};
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use tokio::sync::{Semaphore, watch};
use tokio::time::{Instant, sleep_until, timeout_at};

use crate::login::limits::{
    AttemptOutcome, CheckSeats, ClientNetwork, LoginAttempt, LoginLimiter, RefusalSchedule, TooManyFailures,
};
use crate::login::password_sources::{AuthOffTrust, LoginCredentials, LoginDenial, PasswordSourceOrder};
use crate::login::unsettled_lines::UnsettledLines;
use awaited_login::{AwaitedLogin, HeldBack};
use keyward_base::secret::Secret;
use keyward_base::tasks::Tasks;
use keyward_cluster::membership::MembersHandle;
use keyward_config::PasswordSources;
use keyward_config::users::UserLineMark;
use keyward_downstream::session::{Session, SessionPeer, SessionProof};
use keyward_etcd::identity::UserName;
use keyward_telemetry::limiter::RecordLimiter;
use keyward_telemetry::metrics::Metrics;
use keyward_telemetry::single_label::one;
use keyward_upstream::credentials::{
    AuthRevisionTracker, Credentials, Joinable, LoginProof, MetricsPages, PasswordFingerprint,
    PasswordRefusal, RefusedBy, RunningWork, SingleFlight, WorkReport, lock,
};

/// Concurrent checks per client network. A member runs two checks at a time, so a network guessing passwords
/// delays other networks by a few checks, not by hundreds.
const CHECKS_OF_ONE_NETWORK: usize = 8;
/// Delay before a login refused by the limits is answered. Longer than [`UNANNOUNCED`]: a failed unannounced
/// try is answered after the same delay, so the caller cannot tell the two apart.
const LIMITED_ANSWER: Duration = Duration::from_secs(1);
/// Time limit of an unannounced try. A check at etcd goes on past the limit and counts for the next try.
const UNANNOUNCED: Duration = Duration::from_millis(750);

/// Age up to which the last proof of a session's password is used as it is. Up to twice this age the proof is
/// used while a new check runs in the background.
const FRESH_PROOF: Duration = Duration::from_secs(1);

/// The password logins of this process, shared by all shards. The checks run on the control runtime.
pub struct LoginService {
    sources: PasswordSourceOrder,
    running_checks: SingleFlight<PasswordCheckKey, LoginResult>,
    seats: CheckSeats,
    /// The running checks whose refusal is decided, and held back until the end of its slot.
    held_back: Mutex<HashSet<PasswordCheckKey>>,
    limiter: Mutex<LoginLimiter>,
    refusal_schedule: Mutex<RefusalSchedule>,
    /// The checks that a network may run at a time, for each network with a check.
    network_places: Mutex<HashMap<ClientNetwork, Arc<Semaphore>>>,
    /// Checks now running at the sources.
    checks_at_sources: AtomicU32,
    /// Rate limit of the log lines about unchecked logins.
    log_limiter: Mutex<RecordLimiter>,
    metrics: Arc<Metrics>,
    unsettled_lines: UnsettledLines,
    /// True once the upstream has become another cluster.
    has_followed_cluster: AtomicBool,
}

/// Key of a running check: fingerprint of user and password, and the kind of purpose.
type PasswordCheckKey = (PasswordFingerprint, Discriminant<PasswordCheckPurpose>);

/// Too many checks are under way.
struct TooManyPasswordChecks;

/// Result and cost of a login.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct LoginResult {
    verdict: Result<LoginProof, LoginDenial>,
    effort: LoginEffort,
}

/// Cost of a login.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LoginEffort {
    /// Answered from memory, or by a cheap read at a member: no bcrypt, no argon2.
    Recall,
    /// The sources were asked.
    Ask,
}

/// The reason for a password check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PasswordCheckPurpose {
    /// A client at this address presents the password.
    Login(Option<IpAddr>),
    /// A client at this address presents the password of a blocked user.
    Blocked(Option<IpAddr>),
    /// A session sealed with the password is used, so the check is no guess. The number is the auth revision
    /// at which etcd accepted the password; 0 if unknown.
    Session(u64),
}

impl LoginService {
    /// Starts the service. `credentials` run the checks on the control runtime; a task among `tasks` asks for
    /// the auth revision on demand.
    #[must_use]
    pub fn start(
        config: &Arc<keyward_config::Passwords>,
        credentials: Arc<Credentials>,
        members: MembersHandle,
        pages: MetricsPages,
        metrics: Arc<Metrics>,
        tasks: &Tasks,
    ) -> Arc<Self> {
        let sources = PasswordSourceOrder::new(config, credentials, members);
        tasks.spawn("auth revision shown", sources.auth_revision.clone().run(pages)).detach();
        Arc::new(Self {
            sources,
            running_checks: SingleFlight::default(),
            seats: CheckSeats::default(),
            held_back: Mutex::default(),
            limiter: Mutex::new(LoginLimiter::new(config.failed)),
            refusal_schedule: Mutex::new(RefusalSchedule::new(Instant::now())),
            network_places: Mutex::default(),
            checks_at_sources: AtomicU32::new(0),
            log_limiter: Mutex::new(RecordLimiter::new(metrics.log_records_left_out.clone())),
            metrics,
            unsettled_lines: UnsettledLines::default(),
            has_followed_cluster: AtomicBool::default(),
        })
    }

    /// Checks the password and returns the source of the proof. `held` is told of a denial whose answer is
    /// held back, once the wait begins, or when the caller gives the wait up.
    ///
    /// Cancel-safe: a check already begun goes on.
    ///
    /// # Errors
    /// See [`LoginDenial`].
    pub async fn check(
        self: &Arc<Self>,
        user: &UserName,
        password: &Secret<String>,
        from: Option<IpAddr>,
        held: &dyn Fn(LoginDenial),
    ) -> Result<LoginProof, LoginDenial> {
        self.check_and_count(user, password, PasswordCheckPurpose::Login(from), held).await
    }

    /// Refuses a login of a blocked user without asking any source. The answer, its delay and the counting
    /// for the limits are the same as for a wrong password.
    ///
    /// Cancel-safe, as [`LoginService::check`].
    pub async fn refuse(
        self: &Arc<Self>,
        user: &UserName,
        password: &Secret<String>,
        from: Option<IpAddr>,
        held: &dyn Fn(LoginDenial),
    ) -> LoginDenial {
        match self.check_and_count(user, password, PasswordCheckPurpose::Blocked(from), held).await {
            Ok(_) => LoginDenial::Refused(PasswordRefusal::WrongPassword),
            Err(denied) => denied,
        }
    }

    async fn check_and_count(
        self: &Arc<Self>,
        user: &UserName,
        password: &Secret<String>,
        purpose: PasswordCheckPurpose,
        held: &dyn Fn(LoginDenial),
    ) -> Result<LoginProof, LoginDenial> {
        let login = self.login(user, password);
        let begun = Instant::now();
        let awaited = AwaitedLogin { service: self, login: &login, purpose, held, is_over: Cell::default() };
        let result = loop {
            let running = self.join_or_request(&login, purpose);
            let joined = running.as_ref().is_ok_and(|running| running.has_joined);
            let result = self.check_result(running).await;
            // The limits refused the client that began the shared check; a client that only joined may still
            // be within the limits.
            if !joined || result.verdict != Err(LoginDenial::Limited) {
                break result;
            }
        };
        awaited.is_over.set(true);
        self.count(result, purpose);
        if result.verdict == Err(LoginDenial::Limited) {
            held(LoginDenial::Limited);
            sleep_until(begun + LIMITED_ANSWER).await;
        }
        result.verdict
    }

    fn count(&self, result: LoginResult, purpose: PasswordCheckPurpose) {
        self.metrics.logins.get_or_create(&one("result", result.label(purpose))).inc();
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
    pub async fn prove_again(self: &Arc<Self>, session: &Session) -> Result<LoginProof, LoginDenial> {
        let Some((login, purpose)) = self.session_login(session) else { return Ok(LoginProof::Nothing) };
        let memory = self.sources.credentials.password_memory();
        let known = memory.last_proof(login.fingerprint, self.line(&login.user));
        match known {
            Some((proved, age)) if age < FRESH_PROOF => Ok(proved),
            Some((proved, age)) if age < FRESH_PROOF * 2 => {
                // The check runs in the background; the next caller finds the result.
                drop(self.join_or_request(&login, purpose));
                Ok(proved)
            }
            _ => self.check_result(self.join_or_request(&login, purpose)).await.verdict,
        }
    }

    /// As [`LoginService::prove_again`], but ignores earlier proofs.
    ///
    /// Cancel-safe: a check already begun goes on.
    ///
    /// # Errors
    /// As [`LoginService::prove_again`].
    pub async fn prove_now(self: &Arc<Self>, session: &Session) -> Result<LoginProof, LoginDenial> {
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
        &self.sources.auth_revision
    }

    /// The present order of the sources and the present users file.
    #[must_use]
    pub fn passwords(&self) -> Arc<keyward_config::Passwords> {
        self.sources.passwords.load_full()
    }

    /// The mark of this user's line in the present users file. A login proved by the file holds as long as
    /// the mark is unchanged. `None` if the file is no source.
    #[must_use]
    pub fn line(&self, user: &UserName) -> Option<UserLineMark> {
        let passwords = self.sources.passwords.load();
        (passwords.sources != PasswordSources::Etcd).then(|| passwords.users.line(user))?
    }

    /// True for a session of a line that this replica does not have, while the replicas may be of two minds
    /// about the user's line.
    #[must_use]
    pub fn is_unsettled(&self, session: &Session) -> bool {
        let (user, now) = (session.peer.user(), (SystemTime::now(), Instant::now()));
        self.unsettled_lines.is_unsettled(user, session.issued_at, now.0, now.1)
    }

    /// Replaces the sources and the users file. The limits stay as configured at the start.
    pub fn replace(&self, passwords: Arc<keyward_config::Passwords>) {
        self.unsettled_lines.forget();
        self.sources.passwords.publish(passwords);
        self.sources.credentials.password_memory().forget_verdicts();
    }

    /// Forgets every verdict of the former cluster, since another cluster is followed from now on.
    pub fn forget_cluster(&self) {
        self.has_followed_cluster.store(true, Ordering::Release);
        self.sources.credentials.password_memory().forget_verdicts();
    }

    /// Notifies when the sources or the users file are replaced.
    #[must_use]
    pub fn changes(&self) -> watch::Receiver<()> {
        self.sources.passwords.changes()
    }

    /// Forgets all verdicts on this user's passwords. To be called after a change of the user's password, and
    /// after the user was added or deleted, through Keyward.
    pub fn forget_user(&self, user: &UserName) {
        self.sources.credentials.forget_user(user);
    }

    fn login(&self, user: &UserName, password: &Secret<String>) -> LoginCredentials {
        let fingerprint = self.sources.credentials.fingerprint(user, password);
        LoginCredentials { user: user.clone(), password: Arc::new(password.clone()), fingerprint }
    }

    /// Joins the running check of this user and password, or requests a new check.
    fn join_or_request(
        self: &Arc<Self>,
        login: &LoginCredentials,
        purpose: PasswordCheckPurpose,
    ) -> Result<RunningWork<LoginResult>, TooManyPasswordChecks> {
        let key = (login.fingerprint, discriminant(&purpose));
        self.running_checks.join_or_begin(key, Joinable::SameKey, || {
            let seat = match purpose {
                PasswordCheckPurpose::Login(_) if self.sources.is_known(login) => None,
                PasswordCheckPurpose::Login(from) | PasswordCheckPurpose::Blocked(from) => {
                    Some(self.seats.take(ClientNetwork::of(from)).ok_or(TooManyPasswordChecks)?)
                }
                PasswordCheckPurpose::Session(_) => None,
            };
            let place = self.sources.credentials.reserve_check().ok_or(TooManyPasswordChecks)?;
            let (service, login) = (Arc::clone(self), login.clone());
            Ok(move |report: WorkReport<PasswordCheckKey, LoginResult>| {
                place.run(async move {
                    let held_back = HeldBack { service: &service, key };
                    let result = service.run_login(&login, purpose).await;
                    service.remember(&login, purpose, result.verdict);
                    drop(seat);
                    report.report(result);
                    drop(held_back);
                });
            })
        })
    }

    async fn check_result(
        &self,
        running: Result<RunningWork<LoginResult>, TooManyPasswordChecks>,
    ) -> LoginResult {
        let Ok(running) = running else {
            return LoginResult { verdict: Err(LoginDenial::Limited), effort: LoginEffort::Recall };
        };
        let result = running.result_unless(self.sources.credentials.control_ended()).await;
        result.unwrap_or(LoginResult { verdict: Err(LoginDenial::Untold), effort: LoginEffort::Ask })
    }

    /// Remembers the verdict, before the result is reported to the waiting callers.
    fn remember(
        &self,
        login: &LoginCredentials,
        purpose: PasswordCheckPurpose,
        verdict: Result<LoginProof, LoginDenial>,
    ) {
        let memory = self.sources.credentials.password_memory();
        match (purpose, verdict) {
            // No source was asked. A login while auth is off takes any password, so a flood of such logins
            // would evict right passwords.
            (PasswordCheckPurpose::Blocked(_), _)
            | (PasswordCheckPurpose::Login(_), Ok(LoginProof::Nothing)) => {}
            (_, Ok(proved)) => memory.note_accepted(login.fingerprint, proved),
            (_, Err(LoginDenial::Refused(_))) => {
                memory.forget_accepted(login.fingerprint);
            }
            // Without an answer the earlier result stays and keeps its age.
            (_, Err(LoginDenial::Limited | LoginDenial::Untold)) => {}
        }
    }

    async fn run_login(&self, login: &LoginCredentials, purpose: PasswordCheckPurpose) -> LoginResult {
        if purpose.refused_by() == RefusedBy::Sources
            && let Some(proved) = self.sources.recall(login, purpose.auth_off_trust()).await
        {
            return LoginResult { verdict: Ok(proved), effort: LoginEffort::Recall };
        }
        let memory = self.sources.credentials.password_memory();
        let (key, line) = ((login.fingerprint, purpose.refused_by()), self.sources.line(&login.user));
        if let Some(why) = memory.refusal(key, line, Instant::now()) {
            return LoginResult { verdict: Err(LoginDenial::Refused(why)), effort: LoginEffort::Recall };
        }
        let verdict = match purpose {
            PasswordCheckPurpose::Login(from) | PasswordCheckPurpose::Blocked(from) => {
                self.check_within_limits(login, purpose, from).await
            }
            // The auth revision has not moved since etcd accepted the password: sessions from another
            // replica, or from before a restart, cost no bcrypt.
            PasswordCheckPurpose::Session(at) if self.sources.is_unmoved(&login.user, at).await => {
                return LoginResult { verdict: Ok(LoginProof::Etcd), effort: LoginEffort::Recall };
            }
            PasswordCheckPurpose::Session(_) => Ok(self.ask(login, purpose.auth_off_trust()).await),
        };
        let Ok(verdict) = verdict else {
            return LoginResult { verdict: Err(LoginDenial::Limited), effort: LoginEffort::Recall };
        };
        match verdict {
            Ok(_) => memory.forget_refusal(key),
            Err(LoginDenial::Refused(why)) => {
                memory.note_refusal(key, &login.user, line, why, Instant::now());
            }
            Err(LoginDenial::Limited | LoginDenial::Untold) => {}
        }
        LoginResult { verdict, effort: LoginEffort::Ask }
    }

    /// Asks the sources if the limits allow the try, and delays a refusal until the end of its slot.
    async fn check_within_limits(
        &self,
        login: &LoginCredentials,
        purpose: PasswordCheckPurpose,
        from: Option<IpAddr>,
    ) -> Result<Result<LoginProof, LoginDenial>, TooManyFailures> {
        let (network, begun) = (ClientNetwork::of(from), Instant::now());
        let attempt = lock(&self.limiter).begin(&login.user, from, begun).inspect_err(|limited| {
            if lock(&self.log_limiter).may_log() {
                let from = from.map(tracing::field::display);
                tracing::info!(user = %login.user, from, reason = %limited, "login not checked");
            }
        })?;
        if attempt.is_unannounced() {
            return self.check_past_limits(login, purpose, network, attempt).await;
        }
        let slot = lock(&self.refusal_schedule).reserve(network, begun);
        let verdict = self.verdict(login, purpose, network).await;
        let (outcome, now) = (attempt_outcome(verdict), Instant::now());
        match outcome {
            AttemptOutcome::Wrong => {
                // The limits count from the answer: counting from the end of the check would reveal the cost
                // of the check.
                let at = lock(&self.refusal_schedule).answer_at(&slot, now);
                lock(&self.limiter).settle(attempt, outcome, at);
                lock(&self.held_back).insert((login.fingerprint, discriminant(&purpose)));
                sleep_until(at).await;
            }
            AttemptOutcome::Right | AttemptOutcome::Untold => {
                lock(&self.limiter).settle(attempt, outcome, now);
                lock(&self.refusal_schedule).release(&slot, outcome == AttemptOutcome::Right);
            }
        }
        Ok(verdict)
    }

    /// Checks a login past the limits, for a user with an earlier login from this address. Any result but
    /// success is reported as a refusal by the limits.
    async fn check_past_limits(
        &self,
        login: &LoginCredentials,
        purpose: PasswordCheckPurpose,
        network: ClientNetwork,
        attempt: LoginAttempt,
    ) -> Result<Result<LoginProof, LoginDenial>, TooManyFailures> {
        let until = Instant::now() + UNANNOUNCED;
        let verdict = timeout_at(until, self.verdict(login, purpose, network)).await.ok();
        let outcome = verdict.map_or(AttemptOutcome::Wrong, attempt_outcome);
        lock(&self.limiter).settle(attempt, outcome, Instant::now());
        verdict.and_then(Result::ok).map(Ok).ok_or(TooManyFailures)
    }

    async fn verdict(
        &self,
        login: &LoginCredentials,
        purpose: PasswordCheckPurpose,
        network: ClientNetwork,
    ) -> Result<LoginProof, LoginDenial> {
        match purpose {
            PasswordCheckPurpose::Blocked(_) => Err(LoginDenial::Refused(PasswordRefusal::WrongPassword)),
            PasswordCheckPurpose::Login(_) | PasswordCheckPurpose::Session(_) => {
                self.ask_for_network(login, network).await
            }
        }
    }

    /// Asks the sources once this network has a free place, so other networks wait for a few checks at most.
    async fn ask_for_network(
        &self,
        login: &LoginCredentials,
        network: ClientNetwork,
    ) -> Result<LoginProof, LoginDenial> {
        let places = {
            let mut all = lock(&self.network_places);
            all.retain(|_, places| Arc::strong_count(places) > 1);
            let new = || Arc::new(Semaphore::new(CHECKS_OF_ONE_NETWORK));
            Arc::clone(all.entry(network).or_insert_with(new))
        };
        let _place = places.acquire().await;
        let (begun, alone) = (Instant::now(), self.checks_at_sources.load(Ordering::Relaxed) == 0);
        let verdict = self.ask(login, AuthOffTrust::Believed).await;
        // A check running beside other checks waited for them, so its duration is no measure of the cost.
        if alone {
            match attempt_outcome(verdict) {
                AttemptOutcome::Right => lock(&self.refusal_schedule).learn_accepted(begun.elapsed()),
                AttemptOutcome::Wrong => lock(&self.refusal_schedule).learn_refused(begun.elapsed()),
                AttemptOutcome::Untold => {}
            }
        }
        verdict
    }

    async fn ask(&self, login: &LoginCredentials, off: AuthOffTrust) -> Result<LoginProof, LoginDenial> {
        let _running = RunningCheckGuard::begin(&self.checks_at_sources);
        self.sources.ask(login, off).await
    }
}

impl PasswordCheckPurpose {
    /// The judge to be remembered with a refusal.
    fn refused_by(self) -> RefusedBy {
        match self {
            Self::Login(_) | Self::Session(_) => RefusedBy::Sources,
            Self::Blocked(_) => RefusedBy::Blocklist,
        }
    }

    /// A proved session goes upstream with a credential of Keyward's, valid with auth on or off, so no later
    /// call would notice that auth is on again.
    fn auth_off_trust(self) -> AuthOffTrust {
        match self {
            Self::Session(_) => AuthOffTrust::Asked,
            Self::Login(_) | Self::Blocked(_) => AuthOffTrust::Believed,
        }
    }
}

/// Counts a running check; the drop also covers a check cut short.
struct RunningCheckGuard<'a>(&'a AtomicU32);

impl<'a> RunningCheckGuard<'a> {
    fn begin(running: &'a AtomicU32) -> Self {
        running.fetch_add(1, Ordering::Relaxed);
        Self(running)
    }
}

impl Drop for RunningCheckGuard<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

fn attempt_outcome(verdict: Result<LoginProof, LoginDenial>) -> AttemptOutcome {
    match verdict {
        Ok(LoginProof::Etcd | LoginProof::File(_)) => AttemptOutcome::Right,
        Err(LoginDenial::Refused(_)) => AttemptOutcome::Wrong,
        Ok(LoginProof::Nothing) | Err(LoginDenial::Limited | LoginDenial::Untold) => AttemptOutcome::Untold,
    }
}

impl LoginResult {
    /// The `result` label in the metrics.
    fn label(self, purpose: PasswordCheckPurpose) -> &'static str {
        match (self.verdict, self.effort) {
            (Err(LoginDenial::Refused(_)), _) if purpose.refused_by() == RefusedBy::Blocklist => "blocked",
            (Ok(LoginProof::Nothing), _) => "unproved",
            (Ok(_), LoginEffort::Ask) => "accepted",
            (Ok(_), LoginEffort::Recall) => "remembered",
            (Err(LoginDenial::Refused(_)), LoginEffort::Ask) => "refused",
            (Err(LoginDenial::Refused(_)), LoginEffort::Recall) => "refused_again",
            (Err(LoginDenial::Limited), _) => "limited",
            (Err(LoginDenial::Untold), _) => "untold",
        }
    }
}
