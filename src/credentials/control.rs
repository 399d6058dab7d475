//! The control side of credentials: makes logins and keeps tokens alive.
//!
//! Owns: the limit of concurrent logins per member. Must not know: the waiters of a login, the circuit
//! breaker's rules.
//! Invariants: a login runs to completion even if all waiters leave; a member has at most `logins_per_member`
//! in-flight logins of Keyward.

use std::cell::RefCell;
use std::collections::HashMap;
use std::fmt;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use http::HeaderValue;
use tokio::sync::{Semaphore, mpsc};
use tokio::time::Instant;

use super::breaker::{LoginBreaker, LoginVerdict};
use super::keep_alive::TokenKeepAlive;
use super::password_identity::LoginRequest;
use super::signing_revision::RevisionRequests;
use super::{Credentials, LoginFailure, auth_calls};
use crate::identity::MemberId;
use crate::members::membership::ControlChannels;
use crate::tasks::Tasks;

/// The part of [`Credentials`] run by the control runtime. Without the running part, no login is made.
pub struct CredentialControl {
    credentials: Arc<Credentials>,
    requests: mpsc::Receiver<LoginRequest>,
    questions: RevisionRequests,
    channels: ControlChannels,
}

type LoginGates = HashMap<MemberId, Rc<LoginGate>>;

/// Concurrency limit of one member's logins. Waiting logins are served first come, first served.
struct LoginGate {
    places: Semaphore,
    breaker: RefCell<LoginBreaker>,
}

impl CredentialControl {
    pub(super) fn new(
        credentials: Arc<Credentials>,
        requests: mpsc::Receiver<LoginRequest>,
        questions: RevisionRequests,
        channels: ControlChannels,
    ) -> Self {
        Self { credentials, requests, questions, channels }
    }

    /// Serves logins and keeps tokens alive until dropped, by tasks spawned among `tasks`.
    ///
    /// Must run on a [`LocalSet`](tokio::task::LocalSet) with time enabled.
    pub async fn run(mut self, tasks: Tasks) {
        let keep_alive =
            TokenKeepAlive::new(Arc::clone(&self.credentials), self.channels.clone(), tasks.clone());
        let _keeper = tasks.spawn("credential keep-alive", keep_alive.run());
        let _asker = tasks.spawn("auth revision", ask(self.questions, self.channels.clone()));
        let mut gates = LoginGates::new();
        while let Some(request) = self.requests.recv().await {
            begin(&self.credentials, &self.channels, &mut gates, request, &tasks);
        }
    }
}

fn begin(
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
        request.land(Err(LoginFailure::Busy));
        return;
    }
    let (gate, channels) = (Rc::clone(gate), channels.clone());
    let credentials = Arc::clone(credentials);
    let login = async move {
        let _place = gate.places.acquire().await;
        // While the request waited for a place, another member may have refused the password, or the breaker
        // may have opened for the silent member.
        if let Some(refused) = request.identity().refused() {
            return request.land(Err(refused));
        }
        let (begun, limit) = (Instant::now(), credentials.shared.settings.login_timeout);
        if !gate.breaker.borrow_mut().allows(begun, limit) {
            return request.land(Err(LoginFailure::NoAnswer));
        }
        let outcome = log_in(&credentials, &channels, &request).await;
        let (heard, now) = (heard(&outcome), Instant::now());
        let identity = Arc::clone(request.identity());
        credentials.note(&request, &outcome);
        request.land(outcome);
        credentials.cache_identity(&identity);
        let rest = gate.breaker.borrow_mut().note(heard, now - begun, now);
        tokio::time::sleep(rest).await;
    };
    tasks.spawn("login", login).detach();
}

/// Answers requests for the auth revision, one after another.
async fn ask(mut questions: RevisionRequests, channels: ControlChannels) {
    while let Some(revision) = questions.recv().await {
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
fn heard(outcome: &Result<HeaderValue, LoginFailure>) -> LoginVerdict {
    match outcome {
        Ok(_) | Err(LoginFailure::AuthDisabled) => LoginVerdict::Accepted,
        Err(why) if why.is_refusal() => LoginVerdict::Refused,
        Err(_) => LoginVerdict::Nothing,
    }
}

impl Credentials {
    fn note(&self, request: &LoginRequest, outcome: &Result<HeaderValue, LoginFailure>) {
        let (user, member) = (request.identity().user(), request.member());
        let counters = &self.shared.counters;
        let counter = match outcome {
            Ok(_) => {
                tracing::debug!(?user, %member, "logged in");
                &counters.logins_accepted
            }
            Err(why) if why.is_refusal() => {
                tracing::info!(?user, %member, %why, "login refused");
                &counters.logins_refused
            }
            Err(why) => {
                tracing::warn!(?user, %member, %why, "login failed");
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
    use crate::identity::UserName;
    use crate::secret::Secret;

    /// Callers choose the user name in our log: a name must not break the log line.
    #[tokio::test]
    async fn a_users_name_makes_no_log_lines() {
        let settings = CredentialSettings::default();
        let (credentials, mut control) = Credentials::new(settings, ControlChannels::default()).unwrap();
        let user = UserName::from("eve\n2026-01-01 INFO session issued user=root");
        let identity = credentials.identity(&user, &Secret::new("p".to_owned()));
        assert!(identity.token(MemberId(1)).now_or_never().is_none());
        let request = control.requests.try_recv().unwrap();
        let lines = Arc::new(Mutex::new(Vec::new()));
        let to = Arc::clone(&lines);
        let writer = move || Lines(Arc::clone(&to));
        let subscriber = tracing_subscriber::fmt()
            .with_max_level(tracing::Level::DEBUG)
            .with_ansi(false)
            .with_writer(writer)
            .finish();
        tracing::subscriber::with_default(subscriber, || {
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
}
