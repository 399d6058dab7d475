//! The control side of credentials: runs password checks, makes logins at members, and keeps tokens alive.
//!
//! Owns: the only queue of login work to the control runtime; the limit of concurrent logins per member; the
//! circuit breaker of logins at a member. Must not know: the waiters of a login, the content of a password
//! check.
//! Invariants: work runs to completion even if all waiters leave (docs/decisions.md#d42); a member has at
//! most `logins_per_member` in-flight logins of Keyward; a member without answers gets one login at a time,
//! with growing backoff, until the member answers; a member refusing every login is left idle most of the
//! time, for other work; one accepted login resets the breaker.

use std::cell::RefCell;
use std::collections::HashMap;
use std::fmt;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures_util::future::BoxFuture;
use http::HeaderValue;
use tokio::sync::{Semaphore, mpsc};
use tokio::time::Instant;

use super::keep_alive::TokenKeepAlive;
use super::password_identity::LoginRequest;
use super::signing_revision::RevisionRequests;
use super::{Credentials, LoginFailure, auth_calls};
use keyward_base::tasks::Tasks;
use keyward_cluster::membership::ControlChannels;
use keyward_etcd::identity::MemberId;

/// Consecutive logins without an answer before the breaker opens.
const UNANSWERED_TO_OPEN: u32 = 5;
const FIRST_BACKOFF: Duration = Duration::from_millis(250);
/// Longest backoff. Well below a call's waiting time, so a call waiting for a token still gets a login.
const LONGEST_BACKOFF: Duration = Duration::from_secs(2);
/// Consecutive refusals before each refusal is followed by a pause of `PAUSE_PER_REFUSAL` times the login's
/// duration.
const REFUSALS_WITHOUT_PAUSE: u32 = 30;
const PAUSE_PER_REFUSAL: u32 = 4;
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// Work of logins, queued for the control runtime.
pub(super) enum LoginWork {
    /// The check of a client's password.
    PasswordCheck(BoxFuture<'static, ()>),
    /// A login at a member, for a token.
    OnMember(LoginRequest),
}

/// A place in the queue to the control runtime, reserved for a password check.
pub struct QueuePlace<'a>(mpsc::Permit<'a, LoginWork>);

/// The part of [`Credentials`] run by the control runtime. Without the running part, no password is checked
/// and no login is made.
pub struct CredentialControl {
    credentials: Arc<Credentials>,
    queue: mpsc::Receiver<LoginWork>,
    revision_requests: RevisionRequests,
    channels: ControlChannels,
}

type LoginGates = HashMap<MemberId, Rc<LoginGate>>;

/// Concurrency limit of one member's logins. Waiting logins are served first come, first served.
struct LoginGate {
    places: Semaphore,
    breaker: RefCell<LoginBreaker>,
}

/// The outcome of a login, as far as relevant for the member's health.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LoginVerdict {
    Accepted,
    Refused,
    /// No answer, or no answer about the password.
    Nothing,
}

/// The circuit breaker of one member.
#[derive(Debug, Default)]
struct LoginBreaker {
    unanswered: u32,
    refusals: u32,
    /// Logins are not allowed before this time.
    open_until: Option<Instant>,
}

impl CredentialControl {
    pub(super) fn new(
        credentials: Arc<Credentials>,
        queue: mpsc::Receiver<LoginWork>,
        revision_requests: RevisionRequests,
        channels: ControlChannels,
    ) -> Self {
        Self { credentials, queue, revision_requests, channels }
    }

    /// Serves logins and keeps tokens alive until dropped, by tasks spawned among `tasks`.
    ///
    /// Must run on a [`LocalSet`](tokio::task::LocalSet) with time enabled.
    pub async fn run(mut self, tasks: Tasks) {
        let keep_alive =
            TokenKeepAlive::new(Arc::clone(&self.credentials), self.channels.clone(), tasks.clone());
        let _keep_alive = tasks.spawn("credential keep-alive", keep_alive.run());
        let _revisions = tasks
            .spawn("auth revision", answer_revision_requests(self.revision_requests, self.channels.clone()));
        let mut gates = LoginGates::new();
        while let Some(work) = self.queue.recv().await {
            match work {
                LoginWork::PasswordCheck(check) => tasks.spawn("password check", check).detach(),
                LoginWork::OnMember(request) => {
                    begin_login(&self.credentials, &self.channels, &mut gates, request, &tasks);
                }
            }
        }
    }
}

fn begin_login(
    credentials: &Arc<Credentials>,
    channels: &ControlChannels,
    gates: &mut LoginGates,
    request: LoginRequest,
    tasks: &Tasks,
) {
    let settings = &credentials.shared.settings;
    gates.retain(|_, gate| Rc::strong_count(gate) > 1 || !gate.breaker.borrow().is_at_rest());
    let gate = gates.entry(request.member()).or_insert_with(|| {
        Rc::new(LoginGate { places: Semaphore::new(settings.logins_per_member), breaker: RefCell::default() })
    });
    // The map holds one reference; each waiting or in-flight login holds another.
    let before = Rc::strong_count(gate) - 1;
    if before >= settings.logins_per_member + settings.logins_waiting {
        request.finish(Err(LoginFailure::Busy));
        return;
    }
    let (gate, channels) = (Rc::clone(gate), channels.clone());
    let credentials = Arc::clone(credentials);
    let login = async move {
        let _place = gate.places.acquire().await;
        // While the request waited for a place, another member may have refused the password, or the breaker
        // may have opened for the silent member.
        if let Some(refused) = request.identity().refused() {
            return request.finish(Err(refused));
        }
        let (begun, limit) = (Instant::now(), credentials.shared.settings.login_timeout);
        if !gate.breaker.borrow_mut().allows(begun, limit) {
            return request.finish(Err(LoginFailure::NoAnswer));
        }
        let outcome = log_in(&credentials, &channels, &request).await;
        let (verdict, now) = (login_verdict(&outcome), Instant::now());
        let identity = Arc::clone(request.identity());
        credentials.note(&request, &outcome);
        request.finish(outcome);
        credentials.cache_identity(&identity);
        let pause = gate.breaker.borrow_mut().note(verdict, now - begun, now);
        tokio::time::sleep(pause).await;
    };
    tasks.spawn("login", login).detach();
}

/// Answers requests for the auth revision, one after another.
async fn answer_revision_requests(mut requests: RevisionRequests, channels: ControlChannels) {
    while let Some(revision) = requests.recv().await {
        revision.answer(&channels).await;
    }
}

/// Makes a login on the requested member, within the login timeout.
async fn log_in(
    credentials: &Credentials,
    channels: &ControlChannels,
    request: &LoginRequest,
) -> Result<HeaderValue, LoginFailure> {
    let identity = request.identity();
    let channel = channels.load().get(&request.member()).cloned().ok_or(LoginFailure::NoAnswer)?;
    let login = auth_calls::authenticate(channel, identity.user(), identity.password());
    tokio::time::timeout(credentials.shared.settings.login_timeout, login)
        .await
        .unwrap_or(Err(LoginFailure::NoAnswer))
}

/// Classifies an outcome for the member's circuit breaker.
fn login_verdict(outcome: &Result<HeaderValue, LoginFailure>) -> LoginVerdict {
    match outcome {
        Ok(_) | Err(LoginFailure::AuthDisabled) => LoginVerdict::Accepted,
        Err(why) if why.is_refusal() => LoginVerdict::Refused,
        Err(_) => LoginVerdict::Nothing,
    }
}

impl LoginBreaker {
    /// Returns true if a login may start now. While the member is silent, an allowed login is a trial: no
    /// further login is allowed until the trial has ended or `trial` has passed.
    fn allows(&mut self, now: Instant, trial: Duration) -> bool {
        match self.open_until {
            None => true,
            Some(until) if now < until => false,
            Some(_) => {
                self.open_until = Some(now + trial);
                true
            }
        }
    }

    /// Records the outcome of a login. Returns for how long the login keeps occupying its place.
    fn note(&mut self, verdict: LoginVerdict, took: Duration, now: Instant) -> Duration {
        match verdict {
            LoginVerdict::Accepted => *self = Self::default(),
            LoginVerdict::Refused => {
                *self = Self { refusals: self.refusals.saturating_add(1), ..Self::default() };
                if self.refusals > REFUSALS_WITHOUT_PAUSE {
                    return (took * PAUSE_PER_REFUSAL).min(LONGEST_PAUSE);
                }
            }
            LoginVerdict::Nothing => {
                self.unanswered = self.unanswered.saturating_add(1);
                if let Some(more) = self.unanswered.checked_sub(UNANSWERED_TO_OPEN) {
                    let backoff = FIRST_BACKOFF.saturating_mul(1 << more.min(8)).min(LONGEST_BACKOFF);
                    self.open_until = Some(now + backoff);
                }
            }
        }
        Duration::ZERO
    }

    /// True if the breaker has no failure on record.
    fn is_at_rest(&self) -> bool {
        self.unanswered == 0 && self.refusals == 0
    }
}

impl QueuePlace<'_> {
    /// Hands the check to the control runtime. The check runs to its end there, whoever waits.
    pub fn run(self, check: impl Future<Output = ()> + Send + 'static) {
        self.0.send(LoginWork::PasswordCheck(Box::pin(check)));
    }
}

impl Credentials {
    /// Reserves a place in the queue to the control runtime. `None` if the queue is full, or if the control
    /// runtime has ended.
    #[must_use]
    pub fn reserve_check(&self) -> Option<QueuePlace<'_>> {
        self.shared.queue.try_reserve().ok().map(QueuePlace)
    }

    /// Waits until the control runtime has ended: no check or login will end any more. Cancel-safe.
    pub async fn control_ended(&self) {
        self.shared.queue.closed().await;
    }

    fn note(&self, request: &LoginRequest, outcome: &Result<HeaderValue, LoginFailure>) {
        let (user, member) = (request.identity().user(), request.member());
        let counters = &self.shared.counters;
        let counter = match outcome {
            Ok(_) => {
                tracing::debug!(%user, %member, "logged in");
                &counters.logins_accepted
            }
            Err(why) if why.is_refusal() => {
                tracing::info!(%user, %member, %why, "login refused");
                &counters.logins_refused
            }
            Err(why) => {
                tracing::warn!(%user, %member, %why, "login failed");
                &counters.logins_failed
            }
        };
        counter.fetch_add(1, Ordering::Relaxed);
    }
}

impl fmt::Debug for CredentialControl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CredentialControl").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use futures_util::FutureExt as _;

    use super::*;
    use crate::credentials::CredentialSettings;
    use keyward_base::secret::Secret;
    use keyward_etcd::identity::UserName;
    use keyward_telemetry::LogSettings;
    use keyward_telemetry::log_listener::with_log_listener;

    /// Callers choose the user name in our log: a name must not break the log line.
    #[tokio::test]
    async fn a_users_name_makes_no_log_lines() {
        let settings = CredentialSettings::default();
        let (credentials, mut control) = Credentials::new(settings, ControlChannels::default()).unwrap();
        let user = UserName::from("eve\n2026-01-01 INFO session issued user=root");
        let identity = credentials.identity(&user, &Secret::new("p".to_owned()));
        assert!(identity.token(MemberId(1)).now_or_never().is_none());
        let Ok(LoginWork::OnMember(request)) = control.queue.try_recv() else {
            panic!("a login was requested")
        };
        let lines = Arc::new(Mutex::new(Vec::new()));
        let to = Arc::clone(&lines);
        let writer = move || Lines(Arc::clone(&to));
        let settings = LogSettings { level: "debug".parse().unwrap(), ..LogSettings::default() };
        with_log_listener(keyward_telemetry::subscriber(&settings, writer), || {
            credentials.note(&request, &Err(LoginFailure::WrongPassword));
            credentials.note(&request, &Err(LoginFailure::Busy));
            credentials.note(&request, &Ok(HeaderValue::from_static("t")));
        });
        let lines = String::from_utf8(lines.lock().unwrap().clone()).unwrap();
        assert_eq!(lines.lines().count(), 3, "{lines}");
        assert!(lines.lines().all(|line| line.contains("eve")), "{lines}");
    }

    struct Lines(Arc<Mutex<Vec<u8>>>);

    impl std::io::Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    const TRIAL: Duration = Duration::from_secs(10);
    const MILLI: Duration = Duration::from_millis(1);

    #[test]
    fn a_silent_member_is_asked_ever_more_rarely_and_by_one_at_a_time() {
        let (mut breaker, start) = (LoginBreaker::default(), Instant::now());
        let mut asked = Vec::new();
        for milli in 0..10_000 {
            let now = start + milli * MILLI;
            while breaker.allows(now, TRIAL) {
                assert!(!breaker.allows(now, TRIAL) || asked.len() < 5, "one at a time");
                breaker.note(LoginVerdict::Nothing, Duration::ZERO, now);
                asked.push(milli);
            }
        }
        assert_eq!(asked, [0, 0, 0, 0, 0, 250, 750, 1750, 3750, 5750, 7750, 9750]);
        assert!(breaker.allows(start + 20_000 * MILLI, TRIAL));
        breaker.note(LoginVerdict::Accepted, Duration::ZERO, start + 20_001 * MILLI);
        assert!(breaker.is_at_rest() && (0..9).all(|_| breaker.allows(start + 20_001 * MILLI, TRIAL)));
    }

    #[test]
    fn a_trial_that_never_ends_is_not_waited_for_for_ever() {
        let (mut breaker, start) = (LoginBreaker::default(), Instant::now());
        for _ in 0..5 {
            breaker.note(LoginVerdict::Nothing, Duration::ZERO, start);
        }
        assert!(breaker.allows(start + 250 * MILLI, TRIAL));
        assert!(!breaker.allows(start + 250 * MILLI + TRIAL - MILLI, TRIAL));
        assert!(breaker.allows(start + 250 * MILLI + TRIAL, TRIAL));
    }

    #[test]
    fn a_member_that_refuses_everybody_gets_time_to_breathe() {
        let (mut breaker, now) = (LoginBreaker::default(), Instant::now());
        let took = 50 * MILLI;
        let refuse = |breaker: &mut LoginBreaker| breaker.note(LoginVerdict::Refused, took, now);
        assert!((0..30).all(|_| refuse(&mut breaker).is_zero()), "some are always wrong");
        assert_eq!(refuse(&mut breaker), 200 * MILLI);
        assert_eq!(breaker.note(LoginVerdict::Refused, 60_000 * MILLI, now), LONGEST_PAUSE);
        assert!(breaker.allows(now, TRIAL), "slower, never closed");
        breaker.note(LoginVerdict::Accepted, took, now);
        assert!(refuse(&mut breaker).is_zero());
    }

    #[test]
    fn an_answer_of_any_kind_ends_a_silence() {
        let (mut breaker, now) = (LoginBreaker::default(), Instant::now());
        for _ in 0..9 {
            breaker.note(LoginVerdict::Nothing, Duration::ZERO, now);
        }
        assert!(!breaker.allows(now, TRIAL));
        breaker.note(LoginVerdict::Refused, Duration::ZERO, now);
        assert!(breaker.allows(now, TRIAL));
    }
}
