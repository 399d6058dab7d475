//! Where logins are dealt with: one at a time for the same user and password, whoever waits for it.
//!
//! Owns: the way of a login (what is known, the limits, the sources, the time at which a refusal is told), on the control
//! runtime. Must not know: what a session is, how a source checks.
//! Invariants (rules 12, 15, 42): all who present the same user and password at the same time share one check, and it
//! ends whoever leaves; a password that is known to be right, or known to be wrong, passes the limits; a refusal is told
//! at a moment that depends neither on whether the user exists nor on which source was asked.

use std::cell::RefCell;
use std::collections::HashMap;
use std::net::IpAddr;
use std::rc::Rc;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::Shared;
use moka::policy::EvictionPolicy;
use moka::sync::Cache;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{Instant, sleep_until};

use crate::config;
use crate::gateway::login::file::UsersFile;
use crate::gateway::login::limits::{Attempts, Limited, Settled};
use crate::gateway::login::sources::{Denied, Effort, Login, Proved, Sources};
use crate::identity::UserName;
use crate::published::Published;
use crate::secret::Secret;
use crate::tasks::Tasks;
use crate::telemetry::metrics::{Metrics, one};
use crate::upstream::credential::{Credentials, Fingerprint};
use crate::upstream::membership::MembersHandle;
use crate::users::{LineMark, Users};

/// Different users and passwords under way. Each waits for its turn at a member, or at the users file; past this many
/// callers are told that there were too many.
const UNDER_WAY: usize = 1024;
/// Refusals are told after a whole number of these, at least.
const LEAST_BEAT: Duration = Duration::from_millis(250);
const LONGEST_BEAT: Duration = Duration::from_secs(2);

/// For so long a password that was right is taken for right where a session is used, and for twice as long while it is
/// looked at again.
const PROVED: Duration = Duration::from_secs(1);
/// Passwords of sessions that are remembered with that.
const REMEMBERED: u64 = 10_000;

/// The password logins of this process. One for all shards.
pub struct Logins {
    credentials: Arc<Credentials>,
    proved: Arc<Cache<Fingerprint, (Proved, Instant)>>,
    users: Arc<Published<Users>>,
    metrics: Arc<Metrics>,
    flights: Arc<Mutex<Flights>>,
    requests: mpsc::Sender<Request>,
}

/// What the control runtime runs for [`Logins`]. Without it, nobody logs in.
pub struct LoginControl {
    requests: mpsc::Receiver<Request>,
    sources: Sources,
    limits: config::FailedLogins,
}

/// How a login ended, and at what cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Ended {
    verdict: Result<Proved, Denied>,
    effort: Effort,
}

type Flight = Shared<oneshot::Receiver<Ended>>;
type Flights = HashMap<Fingerprint, Flight>;

/// A login that the control runtime is asked to deal with. Dropped, it tells those who wait.
struct Request {
    login: Login,
    purpose: Purpose,
    flights: Arc<Mutex<Flights>>,
    proved: Arc<Cache<Fingerprint, (Proved, Instant)>>,
    landed: Option<oneshot::Sender<Ended>>,
}

/// What a password is checked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Purpose {
    /// A client presents it, from this address.
    Login(Option<IpAddr>),
    /// A session that was sealed for it is used: nobody is guessing.
    Session,
}

/// What all logins share on the control runtime.
struct Desk {
    sources: Sources,
    attempts: RefCell<Attempts>,
    beat: RefCell<Beat>,
}

/// When refusals are told. An unknown user costs etcd no bcrypt, and a line of the users file not what a password of etcd
/// does: so each waits for the next beat, and a beat is longer than a check takes.
#[derive(Debug)]
struct Beat {
    /// What a check takes that ends well: it was not cut short.
    check: Duration,
}

impl Logins {
    /// Logins, and what the control runtime has to run for them.
    #[must_use]
    pub fn new(
        config: &config::Passwords,
        credentials: Arc<Credentials>,
        members: MembersHandle,
        metrics: Arc<Metrics>,
    ) -> (Arc<Self>, LoginControl) {
        let (sender, requests) = mpsc::channel(UNDER_WAY);
        let users = Arc::new(Published::new(Arc::clone(&config.users)));
        let file = UsersFile::new(Arc::clone(&users));
        let sources = Sources { order: config.sources, file, credentials: Arc::clone(&credentials), members };
        let control = LoginControl { requests, sources, limits: config.failed };
        let proved = Cache::builder().max_capacity(REMEMBERED).eviction_policy(EvictionPolicy::lru()).build();
        let proved = Arc::new(proved);
        let logins = Self { credentials, proved, users, metrics, flights: Arc::default(), requests: sender };
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
        let login = self.login(user, password);
        let ended = self.landed(self.board(&login, Purpose::Login(from))).await;
        self.metrics.logins.get_or_create(&one("result", ended.result())).inc();
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
    pub async fn prove_again(&self, user: &UserName, password: &Secret<String>) -> Result<Proved, Denied> {
        let login = self.login(user, password);
        let known = self.proved.get(&login.fingerprint);
        let known = known.map(|(proved, at)| (proved, at.elapsed())).filter(|(_, age)| *age < PROVED * 2);
        match known {
            Some((proved, age)) if age < PROVED => Ok(proved),
            Some((proved, _)) => {
                // Whoever comes after it finds what it says; nobody waits for it.
                drop(self.board(&login, Purpose::Session));
                Ok(proved)
            }
            None => self.landed(self.board(&login, Purpose::Session)).await.verdict,
        }
    }

    /// The mark of this user's line in the users file as it is now: what a file login proved holds as long as it is the
    /// same.
    #[must_use]
    pub fn line(&self, user: &UserName) -> Option<LineMark> {
        self.users.load().line(user)
    }

    /// Takes another users file in place of the one that was read before.
    pub fn replace_users(&self, users: Arc<Users>) {
        self.users.publish(users);
    }

    /// Moves whenever there is another users file.
    #[must_use]
    pub fn changes(&self) -> watch::Receiver<()> {
        self.users.changes()
    }

    fn login(&self, user: &UserName, password: &Secret<String>) -> Login {
        let fingerprint = self.credentials.fingerprint(user, password);
        Login { user: user.clone(), password: Arc::new(password.clone()), fingerprint }
    }

    /// Joins the check of this user and password that is under way, or asks for one.
    fn board(&self, login: &Login, purpose: Purpose) -> Result<Flight, Full> {
        let mut flights = lock(&self.flights);
        if let Some(flight) = flights.get(&login.fingerprint) {
            return Ok(flight.clone());
        }
        if flights.len() >= UNDER_WAY {
            return Err(Full);
        }
        let seat = self.requests.try_reserve().map_err(|_full| Full)?;
        let (landed, flight) = oneshot::channel();
        let flight = flight.shared();
        flights.insert(login.fingerprint, flight.clone());
        let (flights, proved) = (Arc::clone(&self.flights), Arc::clone(&self.proved));
        seat.send(Request { login: login.clone(), purpose, flights, proved, landed: Some(landed) });
        Ok(flight)
    }

    async fn landed(&self, boarded: Result<Flight, Full>) -> Ended {
        let Ok(flight) = boarded else {
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

/// Too many logins are under way.
struct Full;

impl LoginControl {
    /// Deals with logins until dropped, by tasks among `tasks`.
    pub async fn run(mut self, tasks: Tasks) {
        let desk = Rc::new(Desk {
            sources: self.sources,
            attempts: RefCell::new(Attempts::new(self.limits)),
            beat: RefCell::new(Beat { check: Duration::ZERO }),
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
        if let Some(verdict) = self.sources.ask(login, Effort::Recall).await {
            return Ended { verdict, effort: Effort::Recall };
        }
        let verdict = match purpose {
            Purpose::Login(from) => self.guarded(login, from).await,
            Purpose::Session => Ok(self.ask(login).await),
        };
        match verdict {
            Ok(verdict) => Ended { verdict, effort: Effort::Ask },
            Err(Limited) => Ended { verdict: Err(Denied::Limited), effort: Effort::Recall },
        }
    }

    async fn ask(&self, login: &Login) -> Result<Proved, Denied> {
        self.sources.ask(login, Effort::Ask).await.unwrap_or(Err(Denied::Untold))
    }

    /// Asks, if the limits allow it, and is in no hurry to say no.
    async fn guarded(&self, login: &Login, from: Option<IpAddr>) -> Result<Result<Proved, Denied>, Limited> {
        let begun = Instant::now();
        let tried = self.attempts.borrow_mut().begin(&login.user, from, begun).inspect_err(|limited| {
            tracing::info!(user = ?login.user, ?from, why = %limited, "login not checked");
        })?;
        let verdict = self.ask(login).await;
        let (how, now) = (settled(verdict), Instant::now());
        self.attempts.borrow_mut().settle(tried, how, now);
        match how {
            Settled::Right => self.beat.borrow_mut().learn(now - begun),
            Settled::Wrong => {
                let at = self.beat.borrow().after(now - begun);
                sleep_until(begun + at).await;
            }
            Settled::Untold => {}
        }
        Ok(verdict)
    }
}

fn settled(verdict: Result<Proved, Denied>) -> Settled {
    match verdict {
        Ok(Proved::Etcd | Proved::File(_)) => Settled::Right,
        Err(Denied::WrongPassword | Denied::NoPassword) => Settled::Wrong,
        Ok(Proved::Nothing) | Err(Denied::Limited | Denied::Untold) => Settled::Untold,
    }
}

impl Beat {
    fn learn(&mut self, took: Duration) {
        self.check = if self.check.is_zero() { took } else { self.check * 7 / 8 + took / 8 };
    }

    /// When a refusal that took so long is told, counted from its beginning.
    fn after(&self, took: Duration) -> Duration {
        let beat = (self.check * 2).clamp(LEAST_BEAT, LONGEST_BEAT);
        let beats = took.as_micros().div_ceil(beat.as_micros()).max(1);
        beat.saturating_mul(u32::try_from(beats).unwrap_or(u32::MAX))
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
    fn land(mut self, ended: Ended) {
        self.tell(Some(ended));
    }

    /// Nobody boards a flight that has landed.
    fn tell(&mut self, ended: Option<Ended>) {
        let Some(landed) = self.landed.take() else { return };
        match ended.map(|ended| ended.verdict) {
            Some(Ok(proved)) => self.proved.insert(self.login.fingerprint, (proved, Instant::now())),
            Some(Err(Denied::WrongPassword | Denied::NoPassword)) => {
                self.proved.invalidate(&self.login.fingerprint);
            }
            // That nobody could say changes nothing of what was said, nor makes it younger.
            Some(Err(Denied::Limited | Denied::Untold)) | None => {}
        }
        lock(&self.flights).remove(&self.login.fingerprint);
        if let Some(ended) = ended
            && landed.send(ended).is_err()
        {
            tracing::trace!("nobody waits for a login any more");
        }
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        self.tell(None);
    }
}

/// Nothing under this lock can panic half-way, so that a poisoned one is still whole.
fn lock(flights: &Mutex<Flights>) -> std::sync::MutexGuard<'_, Flights> {
    flights.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_is_told_when_any_other_would_be() {
        let millis = Duration::from_millis;
        let mut beat = Beat { check: Duration::ZERO };
        // etcd knows no such user; a cheap line; a bcrypt.
        assert_eq!([0, 1, 30, 90, 250].map(|took| beat.after(millis(took))), [millis(250); 5]);
        assert_eq!(beat.after(millis(251)), millis(500), "what waited in line is late with all others");
        for _ in 0..64 {
            beat.learn(millis(400));
        }
        let told = [1, 400].map(|took| beat.after(millis(took)));
        assert_eq!(told[0], told[1], "a dearer bcrypt makes longer beats");
        assert!(told[0] > millis(700) && told[0] <= millis(800), "{told:?}");
        for _ in 0..64 {
            beat.learn(Duration::from_secs(60));
        }
        assert_eq!(beat.after(millis(1)), LONGEST_BEAT);
    }
}
