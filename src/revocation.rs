//! Where revocations are kept, and how every shard comes to obey them.
//!
//! Owns: one task on the control runtime that takes an operator's changes, keeps them, and tells the sealer. Must not
//! know: who asks (`admin`), what a revoked session loses (`downstream::session`, `gateway::live`).
//! Invariants (rules 13): nothing is admitted before what is kept was read; a change that is told to be made is kept, and in
//! force here; where one is not, or it is not known, that is what is told; what was read last stays in force for `max_age`,
//! then nothing is admitted until it is read again.

mod etcd;
mod file;
mod row;

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use arc_swap::ArcSwap;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, MissedTickBehavior, interval};

use crate::config::{Keep, Revocation};
use crate::downstream::session::{Change, Full, Revocations, Sealer};
use crate::upstream::membership::Changes;

pub use etcd::Upstream;
pub use file::Unusable;

/// Changes that wait to be kept. Operators send one at a time; past it they are told to come again.
const ORDERS: usize = 16;
/// How often the prefix in etcd is looked at: half of it, and a slow answer, stay far below 2 s.
const LOOK: Duration = Duration::from_millis(500);
/// How long one look, or one change, may take over all members.
const PATIENCE: Duration = Duration::from_secs(5);

/// Why a change is not kept.
#[derive(Debug, thiserror::Error)]
pub enum Trouble {
    /// It is in force on this replica until that ends, and nowhere else.
    #[error("in force on this replica until it restarts, but not kept: {0}")]
    NotKept(String),
    /// Nothing has changed.
    #[error("nothing has changed: {0}")]
    Unchanged(String),
    /// It was sent to be kept, and nobody said what became of it. It may be made again: twice is the same as once.
    #[error("not known whether it is kept, so give it again: {0}")]
    Unknown(String),
    /// Nothing has changed.
    #[error(transparent)]
    Full(#[from] Full),
    /// The task is gone, or has too much to do.
    #[error("not now: Keyward is ending, or too many changes wait")]
    Busy,
}

/// Where a change is kept now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kept {
    /// Nowhere: it is forgotten at the next start.
    Memory,
    /// In the state file of this replica.
    File,
    /// In etcd: all replicas obey within 2 s.
    Etcd,
}

/// The operator's side, and what is known. Cheap to clone.
#[derive(Clone)]
pub struct Register {
    orders: mpsc::Sender<Order>,
    known: Arc<ArcSwap<Known>>,
    max_age: Duration,
    opened_at: Instant,
    /// Where it is etcd.
    access: Option<etcd::Access>,
}

/// What was read last.
struct Known {
    revocations: Arc<Revocations>,
    as_of: AsOf,
}

/// When what is known was true.
#[derive(Clone, Copy)]
enum AsOf {
    /// It was never read.
    Never,
    /// Others may have changed it since.
    At(Instant),
    /// Nobody else changes it.
    Always,
}

struct Order {
    change: Change,
    done: oneshot::Sender<Result<Kept, Trouble>>,
}

/// The task: takes changes, keeps them, follows what others change.
pub struct Keeper {
    orders: mpsc::Receiver<Order>,
    store: Store,
    sealer: Arc<Sealer>,
    known: Arc<ArcSwap<Known>>,
    max_age: Duration,
    /// Whether the last look failed: said once.
    failing: bool,
}

enum Store {
    Memory,
    File(PathBuf),
    Etcd(Box<etcd::Prefix>),
}

impl Register {
    /// Opens what the configuration names. Where it is etcd, nothing is admitted until [`Keeper::run`] has read it.
    ///
    /// # Errors
    /// The state file cannot be read or written.
    pub fn open(
        settings: &Revocation,
        upstream: Upstream,
        sealer: Arc<Sealer>,
    ) -> Result<(Self, Keeper), Unusable> {
        let (store, revocations) = match &settings.keep {
            Keep::Memory => (Store::Memory, Some(Revocations::default())),
            Keep::File(path) => {
                let revocations = file::read(path)?;
                // What cannot be written now could not be kept in an incident either.
                file::write(path, &revocations)?;
                (Store::File(path.clone()), Some(revocations))
            }
            Keep::Etcd { prefix, login } => {
                (Store::Etcd(Box::new(etcd::Prefix::new(prefix, login.as_ref(), upstream))), None)
            }
        };
        let revocations = revocations.map(Arc::new);
        sealer.obey(revocations.as_ref());
        let as_of = if revocations.is_some() { AsOf::Always } else { AsOf::Never };
        let known = Known { revocations: revocations.unwrap_or_default(), as_of };
        let known = Arc::new(ArcSwap::from_pointee(known));
        let (sender, orders) = mpsc::channel(ORDERS);
        let max_age = settings.max_age;
        let access = match &store {
            Store::Etcd(prefix) => Some(prefix.access()),
            Store::Memory | Store::File(_) => None,
        };
        let opened_at = Instant::now();
        let register = Self { orders: sender, known: Arc::clone(&known), max_age, opened_at, access };
        Ok((register, Keeper { orders, store, sealer, known, max_age, failing: false }))
    }

    /// Makes a change and keeps it.
    ///
    /// # Errors
    /// See [`Trouble`].
    pub async fn change(&self, change: Change) -> Result<Kept, Trouble> {
        let (done, answer) = oneshot::channel();
        self.orders.try_send(Order { change, done }).map_err(|_full_or_gone| Trouble::Busy)?;
        answer.await.unwrap_or_else(|_gone| Err(Trouble::Unknown("Keyward is ending".into())))
    }

    /// Whether etcd is read and written as whom these settings say. Of where revocations are kept they change nothing.
    #[must_use]
    pub fn logs_in_as(&self, settings: &Revocation) -> bool {
        self.access.as_ref().is_none_or(|access| access.is_as(&settings.keep))
    }

    /// From now on reads and writes as whom they say.
    pub fn log_in_as(&self, settings: &Revocation) {
        if let Some(access) = &self.access {
            access.follow(&settings.keep);
        }
    }

    /// What is in force.
    #[must_use]
    pub fn revocations(&self) -> Arc<Revocations> {
        Arc::clone(&self.known.load().revocations)
    }

    /// Another cluster is followed from now on. Where revocations are kept in etcd it is not known who was revoked until they
    /// were read there, and nothing is admitted until then.
    pub fn forget_cluster(&self, sealer: &Sealer) {
        if self.access.is_some() {
            self.known.store(Arc::new(Known { revocations: self.revocations(), as_of: AsOf::Never }));
            sealer.obey(None);
        }
    }

    /// How old what is known is; before it was read, for how long it is not known.
    #[must_use]
    pub fn age(&self) -> Duration {
        self.known.load().age().unwrap_or_else(|| self.opened_at.elapsed())
    }

    /// Whether it is known who was revoked, as far as `max_age` goes.
    #[must_use]
    pub fn is_known(&self) -> bool {
        self.known.load().age().is_some_and(|age| age <= self.max_age)
    }
}

impl Known {
    fn age(&self) -> Option<Duration> {
        match self.as_of {
            AsOf::Never => None,
            AsOf::At(then) => Some(then.elapsed()),
            AsOf::Always => Some(Duration::ZERO),
        }
    }
}

impl Keeper {
    /// Runs until the last [`Register`] is gone.
    pub async fn run(mut self) {
        let mut looks = interval(LOOK);
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut changes = match &self.store {
            Store::Etcd(prefix) => Some(prefix.changes()),
            Store::Memory | Store::File(_) => None,
        };
        loop {
            let order = tokio::select! {
                biased; // an operator first; all are cancel-safe
                order = self.orders.recv() => match order {
                    Some(order) => order,
                    None => return,
                },
                () = changed(&mut changes) => {
                    // Clients wait for it: at the start, and where another cluster is followed.
                    if !self.sealer.knows() {
                        self.look().await;
                    }
                    continue;
                }
                _ = looks.tick(), if matches!(self.store, Store::Etcd(_)) => {
                    self.look().await;
                    continue;
                }
            };
            let outcome = self.make(&order.change).await;
            match &outcome {
                Ok(kept) => tracing::info!(change = %Printable(&order.change), ?kept, "revocations changed"),
                Err(trouble) => {
                    tracing::error!(change = %Printable(&order.change), %trouble, "revocations not changed as asked");
                }
            }
            if order.done.send(outcome).is_err() {
                tracing::debug!("the operator did not wait for the answer");
            }
        }
    }

    async fn make(&mut self, change: &Change) -> Result<Kept, Trouble> {
        if let Store::Etcd(prefix) = &self.store {
            let (after, asked) = prefix.change(change, Instant::now() + PATIENCE).await?;
            self.publish(&Arc::new(after), AsOf::At(asked));
            return Ok(Kept::Etcd);
        }
        let before = Arc::clone(&self.known.load().revocations);
        let after = Arc::new(before.with(before.entry(change, SystemTime::now()))?);
        self.publish(&after, AsOf::Always);
        let Store::File(path) = &self.store else { return Ok(Kept::Memory) };
        let path = path.clone();
        let written = tokio::task::spawn_blocking(move || file::write(&path, &after)).await;
        match written {
            Ok(Ok(())) => Ok(Kept::File),
            Ok(Err(unusable)) => Err(Trouble::NotKept(unusable.to_string())),
            Err(panicked) => Err(Trouble::NotKept(panicked.to_string())),
        }
    }

    /// Looks at what is kept in etcd; past `max_age` without success nothing is admitted.
    async fn look(&mut self) {
        let Store::Etcd(prefix) = &mut self.store else { return };
        // As of the question: what is decided while it is on its way may be missed.
        let asked = Instant::now();
        let looked = tokio::time::timeout(PATIENCE, prefix.look()).await;
        match looked.unwrap_or_else(|_| Err(etcd::LATE.into())) {
            Ok(changed) => {
                let known = Arc::clone(&self.known.load().revocations);
                let now = changed.map_or(known, Arc::new);
                self.publish(&now, AsOf::At(asked));
                if std::mem::take(&mut self.failing) {
                    tracing::info!("revocations are read from etcd again");
                }
            }
            Err(reason) => {
                if !std::mem::replace(&mut self.failing, true) {
                    tracing::warn!(%reason, "revocations cannot be read from etcd");
                }
                let known = self.known.load();
                if known.age().is_some_and(|age| age > self.max_age) && self.sealer.knows() {
                    tracing::error!(
                        "revocations are too old: no session is admitted until they are read again"
                    );
                    self.sealer.obey(None);
                }
            }
        }
    }

    fn publish(&self, revocations: &Arc<Revocations>, as_of: AsOf) {
        self.known.store(Arc::new(Known { revocations: Arc::clone(revocations), as_of }));
        self.sealer.obey(Some(revocations));
    }
}

/// Waits until members come or go, where that matters. Cancel-safe.
async fn changed(changes: &mut Option<Changes>) {
    if let Some(told) = changes {
        if told.changed().await.is_ok() {
            return;
        }
        *changes = None;
    }
    std::future::pending().await
}

/// A name may hold what ends a log's line.
struct Printable<'a>(&'a Change);

impl fmt::Display for Printable<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0.to_string().escape_debug(), f)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;
    use crate::downstream::session::{Inadmissible, SessionKeys};
    use crate::secret::Secret;
    use crate::upstream::credential::{CredentialSettings, Credentials};
    use crate::upstream::membership::{AuthState, ControlChannels, Hints, MembersHandle, Membership};

    fn sealer() -> Arc<Sealer> {
        Arc::new(Sealer::new(SessionKeys::new(&[Secret::new([7; 32])]).unwrap()))
    }

    /// Of a cluster of which nothing is known.
    fn nowhere() -> Upstream {
        let channels = ControlChannels::new(ArcSwap::from_pointee(HashMap::new()));
        let (credentials, _) = Credentials::new(CredentialSettings::default(), channels.clone()).unwrap();
        let members = MembersHandle {
            snapshot: Arc::new(ArcSwap::from_pointee(Membership::unknown(Instant::now()))),
            changes: Changes::channel().1,
            outages: Arc::default(),
            hints: Hints::channel().0,
            auth: Arc::new(AuthState::default()),
        };
        Upstream { members, channels, credentials }
    }

    fn settings(keep: Keep) -> Revocation {
        Revocation { keep, max_age: Duration::from_secs(60) }
    }

    /// Makes changes, one after the other, and returns what became of each.
    async fn made(register: Register, keeper: Keeper, changes: Vec<Change>) -> Vec<Result<Kept, Trouble>> {
        let asking = async move {
            let mut outcomes = Vec::new();
            for change in changes {
                outcomes.push(register.change(change).await);
            }
            outcomes
        };
        tokio::join!(asking, keeper.run()).0
    }

    #[tokio::test]
    async fn a_file_keeps_what_was_decided_and_a_restart_obeys_it() {
        let folder = tempfile::tempdir().unwrap();
        let keep = || settings(Keep::File(folder.path().join("state")));
        let first = sealer();
        let (register, keeper) = Register::open(&keep(), nowhere(), Arc::clone(&first)).unwrap();
        assert!(register.is_known());
        let changes = vec![Change::Block("alice".into()), Change::Revoke("bob".into())];
        let outcomes = made(register, keeper, changes).await;
        assert!(outcomes.iter().all(|kept| matches!(kept, Ok(Kept::File))), "{outcomes:?}");
        assert_eq!(first.admit(&"alice".into()), Err(Inadmissible::Blocked));

        let second = sealer();
        let (register, _keeper) = Register::open(&keep(), nowhere(), Arc::clone(&second)).unwrap();
        assert_eq!(register.revocations().len(), 2);
        assert_eq!(second.admit(&"alice".into()), Err(Inadmissible::Blocked));
        assert_eq!(second.admit(&"bob".into()), first.admit(&"bob".into()));
    }

    #[tokio::test]
    async fn what_cannot_be_written_is_in_force_and_said_not_to_be_kept() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("folder");
        std::fs::create_dir(&path).unwrap();
        let sealer = sealer();
        let keep = settings(Keep::File(path.join("state")));
        let (register, keeper) = Register::open(&keep, nowhere(), Arc::clone(&sealer)).unwrap();
        std::fs::remove_dir_all(&path).unwrap();
        let outcomes = made(register, keeper, vec![Change::Block("alice".into())]).await;
        assert!(matches!(outcomes[..], [Err(Trouble::NotKept(_))]), "{outcomes:?}");
        assert_eq!(sealer.admit(&"alice".into()), Err(Inadmissible::Blocked));
        assert!(Register::open(&keep, nowhere(), sealer).is_err(), "nor does it start like that");
    }

    #[tokio::test]
    async fn memory_says_that_it_is_no_more_than_that() {
        let sealer = sealer();
        let keep = settings(Keep::Memory);
        let (register, keeper) = Register::open(&keep, nowhere(), Arc::clone(&sealer)).unwrap();
        let outcomes = made(register, keeper, vec![Change::Block("alice".into())]).await;
        assert!(matches!(outcomes[..], [Ok(Kept::Memory)]), "{outcomes:?}");
        assert_eq!(sealer.admit(&"alice".into()), Err(Inadmissible::Blocked));
    }

    #[tokio::test(start_paused = true)]
    async fn before_etcd_was_read_nobody_is_admitted_and_nothing_is_changed() {
        let sealer = sealer();
        let keep = settings(Keep::Etcd { prefix: "/p/".into(), login: None });
        let (register, keeper) = Register::open(&keep, nowhere(), Arc::clone(&sealer)).unwrap();
        assert!(!register.is_known());
        assert_eq!(sealer.admit(&"alice".into()), Err(Inadmissible::NotKnown));
        let outcomes = made(register, keeper, vec![Change::Unblock("alice".into())]).await;
        assert!(matches!(outcomes[..], [Err(Trouble::Unchanged(_))]), "{outcomes:?}");
        assert_eq!(sealer.admit(&"alice".into()), Err(Inadmissible::NotKnown));
    }
}
