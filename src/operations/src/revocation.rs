//! Storage of revocations, and their publication to every shard.
//!
//! Owns: one task on the control runtime; the task takes an operator's changes, stores the changes, and
//! informs the sealer. Must not know: the operator (`admin`), the consequences for a revoked session
//! (`downstream::session`, `gateway::live`).
//! Invariants (docs/decisions.md#d13): no session is admitted before the stored revocations were read; a
//! change reported as made is stored, and in force on this replica; a failed or unknown outcome is reported
//! as such; the revocations read last stay in force for `max_age`, afterwards no session is admitted until
//! the next successful read, except for local reads while the cluster has no quorum (docs/decisions.md#d77).

mod etcd_prefix;
mod local_standing;
mod row;
mod state_file;

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use arc_swap::{ArcSwap, ArcSwapOption};
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, MissedTickBehavior, interval};

use keyward_base::io::kept_file::{self, KeptFile, KeptFileStatus};
use keyward_cluster::membership::{ChangeReceiver, ServingState};
use keyward_config::{Revocation, RevocationPersistence};
use keyward_downstream::session::{RevocationChange, Revocations, RevocationsFull, Sealer};
use keyward_upstream::own_keys::{OwnKeysUpstream, PrefixLogin, ReadFailures};

use local_standing::LocalStanding;

pub use state_file::StateFileError;

/// Maximum of queued changes. Operators send changes one at a time; on a full queue a change is rejected as
/// [`RevocationError::Busy`].
const ORDERS: usize = 16;
/// Poll interval of the prefix in etcd. The interval and a slow answer together stay far below 2 s.
const LOOK: Duration = Duration::from_millis(500);
/// Time limit of one poll, or of one change, over all members or to the disk.
const PATIENCE: Duration = Duration::from_secs(5);
/// The reason for unread revocations while the cluster has no quorum.
const NO_QUORUM: &str = "the cluster has no quorum";
/// The loss at a restart while the state file is not on the disk.
const FORGOTTEN: &str = "a restart forgets the revocations since then";

/// Reasons for not having stored a change.
#[derive(Debug, thiserror::Error)]
pub enum RevocationError {
    /// The change is in force on this replica, and not yet in its state file, which is written again until it
    /// is on the disk. A restart before that forgets the change.
    #[error("in force on this replica, but not kept yet: {0}; it is tried again until it is on the disk")]
    NotKept(String),
    /// No revocation has changed.
    #[error("nothing has changed: {0}")]
    Unchanged(String),
    /// The change was sent to etcd, but the outcome is unknown. The change may be repeated: changes are
    /// idempotent.
    #[error("not known whether it is kept, so give it again: {0}")]
    Unknown(String),
    /// No revocation has changed: the maximum number of revocations is reached.
    #[error(transparent)]
    Full(#[from] RevocationsFull),
    /// The task has ended, or too many changes are queued.
    #[error("not now: Keyward is ending, or too many changes wait")]
    Busy,
}

/// The place where a change is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RevocationStorage {
    /// In memory only: forgotten at the next start.
    Memory,
    /// In the state file of this replica.
    File,
    /// In etcd: all replicas apply the change within 2 s.
    Etcd,
}

impl RevocationStorage {
    /// The storage, for the log.
    fn name(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::File => "file",
            Self::Etcd => "etcd",
        }
    }
}

/// The operator's interface to the task, with the known revocations. Cheap to clone.
#[derive(Clone)]
pub struct RevocationRegister {
    orders: mpsc::Sender<RevocationOrder>,
    known: Arc<ArcSwap<KnownRevocations>>,
    /// Why the last read from etcd failed; `None` after a good one.
    unread: Arc<ArcSwapOption<String>>,
    max_age: Duration,
    opened_at: Instant,
    /// Access to etcd, if revocations are stored in etcd.
    access: Option<PrefixLogin>,
    /// The state file, if revocations are stored in it.
    state_file: Option<KeptFileStatus>,
}

/// The revocations read last.
struct KnownRevocations {
    revocations: Arc<Revocations>,
    as_of: RevocationsAge,
    standing: LocalStanding,
}

/// The time for which the known revocations are valid.
#[derive(Clone, Copy)]
enum RevocationsAge {
    /// Revocations were never read.
    Never,
    /// Read by a quorum at the given time; another replica may have changed revocations since.
    At(Instant),
    /// Always valid: no further replica changes the revocations.
    Always,
}

struct RevocationOrder {
    change: RevocationChange,
    done: oneshot::Sender<Result<RevocationStorage, RevocationError>>,
}

/// The task: takes changes, stores changes, and follows changes made by other replicas.
pub struct RevocationKeeper {
    orders: mpsc::Receiver<RevocationOrder>,
    store: RevocationStore,
    sealer: Arc<Sealer>,
    known: Arc<ArcSwap<KnownRevocations>>,
    max_age: Duration,
    failures: ReadFailures,
    unread: Arc<ArcSwapOption<String>>,
}

enum RevocationStore {
    Memory,
    File(KeptFile),
    Etcd(Box<etcd_prefix::RevocationPrefix>),
}

impl RevocationStore {
    fn file(&mut self) -> Option<&mut KeptFile> {
        match self {
            Self::File(file) => Some(file),
            Self::Memory | Self::Etcd(_) => None,
        }
    }
}

impl RevocationRegister {
    /// Opens the configured storage. With storage in etcd, no session is admitted until
    /// [`RevocationKeeper::run`] has read the revocations.
    ///
    /// # Errors
    /// The state file cannot be read or written.
    pub fn open(
        settings: &Revocation,
        upstream: OwnKeysUpstream,
        sealer: Arc<Sealer>,
    ) -> Result<(Self, RevocationKeeper), StateFileError> {
        let (store, revocations) = match &settings.keep {
            RevocationPersistence::Memory => (RevocationStore::Memory, Some(Revocations::default())),
            RevocationPersistence::File(path) => {
                let revocations = state_file::read(path)?;
                // A file not writable at startup would not be writable in an incident either.
                state_file::write(path, &revocations)?;
                let status = KeptFileStatus::new("revocation.state_file", path.clone(), FORGOTTEN);
                (RevocationStore::File(KeptFile::new(status)), Some(revocations))
            }
            RevocationPersistence::Etcd { prefix, login } => (
                RevocationStore::Etcd(Box::new(etcd_prefix::RevocationPrefix::new(
                    prefix,
                    login.as_ref(),
                    upstream,
                ))),
                None,
            ),
        };
        let revocations = revocations.map(Arc::new);
        sealer.apply_revocations(revocations.as_ref());
        let as_of = if revocations.is_some() { RevocationsAge::Always } else { RevocationsAge::Never };
        let (revocations, standing) = (revocations.unwrap_or_default(), LocalStanding::default());
        let known = KnownRevocations { revocations, as_of, standing };
        let known = Arc::new(ArcSwap::from_pointee(known));
        let (sender, orders) = mpsc::channel(ORDERS);
        let max_age = settings.max_age;
        let (access, state_file) = match &store {
            RevocationStore::Etcd(prefix) => (Some(prefix.login()), None),
            RevocationStore::File(file) => (None, Some(file.status())),
            RevocationStore::Memory => (None, None),
        };
        let (known_here, opened_at) = (Arc::clone(&known), Instant::now());
        let unread = Arc::new(ArcSwapOption::empty());
        let unread_here = Arc::clone(&unread);
        let register = Self {
            orders: sender,
            known: known_here,
            unread: unread_here,
            max_age,
            opened_at,
            access,
            state_file,
        };
        let failures = ReadFailures::default();
        Ok((register, RevocationKeeper { orders, store, sealer, known, max_age, failures, unread }))
    }

    /// Makes a change and stores the change.
    ///
    /// # Errors
    /// See [`RevocationError`].
    pub async fn change(&self, change: RevocationChange) -> Result<RevocationStorage, RevocationError> {
        let (done, answer) = oneshot::channel();
        self.orders
            .try_send(RevocationOrder { change, done })
            .map_err(|_full_or_gone| RevocationError::Busy)?;
        answer.await.unwrap_or_else(|_gone| Err(RevocationError::Unknown("Keyward is ending".into())))
    }

    /// True if etcd is accessed with the credentials of `settings`. A different storage in `settings` is not
    /// compared.
    #[must_use]
    pub fn has_login(&self, settings: &Revocation) -> bool {
        let (Some(access), RevocationPersistence::Etcd { prefix, login }) = (&self.access, &settings.keep)
        else {
            return true;
        };
        access.is(prefix, login.as_ref())
    }

    /// From now on accesses etcd with the credentials of `settings`.
    pub fn set_login(&self, settings: &Revocation) {
        if let (Some(access), RevocationPersistence::Etcd { prefix, login }) = (&self.access, &settings.keep)
        {
            access.set(prefix, login.as_ref());
        }
    }

    /// The state of the state file, if revocations are stored in one.
    #[must_use]
    pub fn state_file(&self) -> Option<&KeptFileStatus> {
        self.state_file.as_ref()
    }

    /// The revocations in force.
    #[must_use]
    pub fn revocations(&self) -> Arc<Revocations> {
        Arc::clone(&self.known.load().revocations)
    }

    /// Keyward now follows another cluster. With storage in etcd, the revocations are unknown until read from
    /// the new cluster, and no session is admitted until then.
    pub fn forget_cluster(&self, sealer: &Sealer) {
        if self.access.is_some() {
            self.known.store(Arc::new(KnownRevocations {
                revocations: self.revocations(),
                as_of: RevocationsAge::Never,
                standing: LocalStanding::default(),
            }));
            sealer.apply_revocations(None);
        }
    }

    /// The age of the known revocations. Before the first read, the time since opening.
    #[must_use]
    pub fn age(&self) -> Duration {
        self.known.load().age().unwrap_or_else(|| self.opened_at.elapsed())
    }

    /// Why the last read of the revocations in etcd failed; `None` after a good one, and before the first.
    #[must_use]
    pub fn unread_reason(&self) -> Option<Arc<String>> {
        self.unread.load_full()
    }

    /// True if the known revocations are not older than `max_age`.
    #[must_use]
    pub fn is_known(&self) -> bool {
        self.known.load().is_good(self.max_age)
    }

    /// True if the known revocations suffice for the calls that the cluster serves now.
    #[must_use]
    pub fn is_known_for(&self, serving: ServingState) -> bool {
        let known = self.known.load();
        known.is_good(self.max_age)
            || serving == ServingState::LocalReadsOnly && known.standing.holds(Instant::now(), self.max_age)
    }
}

impl KnownRevocations {
    fn age(&self) -> Option<Duration> {
        match self.as_of {
            RevocationsAge::Never => None,
            RevocationsAge::At(then) => Some(then.elapsed()),
            RevocationsAge::Always => Some(Duration::ZERO),
        }
    }

    fn is_good(&self, max_age: Duration) -> bool {
        self.age().is_some_and(|age| age <= max_age)
    }
}

impl RevocationKeeper {
    /// Runs until the last [`RevocationRegister`] is dropped.
    pub async fn run(mut self) {
        let mut looks = interval(LOOK);
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut changes = match &self.store {
            RevocationStore::Etcd(prefix) => Some(prefix.changes()),
            RevocationStore::Memory | RevocationStore::File(_) => None,
        };
        loop {
            let is_etcd = matches!(self.store, RevocationStore::Etcd(_));
            let order = tokio::select! {
                biased; // an operator's change first; every arm is cancel-safe
                order = self.orders.recv() => match order {
                    Some(order) => order,
                    None => return,
                },
                () = kept_file::keep(self.store.file()) => continue,
                () = changed(&mut changes) => {
                    // Clients wait for the first read, at startup and after Keyward follows another cluster.
                    if !self.sealer.knows_revocations() || self.sealer.is_for_local_reads() {
                        self.poll().await;
                    }
                    continue;
                }
                _ = looks.tick(), if is_etcd => {
                    self.poll().await;
                    continue;
                }
            };
            let outcome = self.make(&order.change).await;
            match &outcome {
                Ok(kept) => {
                    let (change, kept) = (EscapedChange(&order.change), kept.name());
                    tracing::info!(%change, kept, "revocations changed");
                }
                Err(trouble) => {
                    tracing::error!(
                        change = %EscapedChange(&order.change), %trouble,
                        "revocations not changed as asked"
                    );
                }
            }
            if order.done.send(outcome).is_err() {
                tracing::debug!("the operator did not wait for the answer");
            }
        }
    }

    async fn make(&mut self, change: &RevocationChange) -> Result<RevocationStorage, RevocationError> {
        if let RevocationStore::Etcd(prefix) = &self.store {
            let (after, asked) = prefix.change(change, Instant::now() + PATIENCE).await?;
            self.publish_read(&Arc::new(after), asked);
            return Ok(RevocationStorage::Etcd);
        }
        let before = Arc::clone(&self.known.load().revocations);
        let after = Arc::new(before.with(before.entry(change, SystemTime::now()))?);
        self.publish(&after, RevocationsAge::Always, LocalStanding::default());
        self.sealer.apply_revocations(Some(&after));
        let RevocationStore::File(file) = &mut self.store else { return Ok(RevocationStorage::Memory) };
        file.put(state_file::content(&after));
        let written = file.written(PATIENCE).await;
        let unkept = |error| RevocationError::NotKept(format!("{}: {error}", file.status().path().display()));
        written.map(|()| RevocationStorage::File).map_err(unkept)
    }

    /// Polls the revocations in etcd. After `max_age` without a successful poll no session is admitted,
    /// except for local reads while the cluster has no quorum.
    async fn poll(&mut self) {
        let RevocationStore::Etcd(prefix) = &mut self.store else { return };
        // Dated by the time of the request, because the answer may miss a later change.
        let asked = Instant::now();
        let is_local = prefix.serving() == ServingState::LocalReadsOnly;
        let looked = async {
            let looked = if is_local { prefix.poll_local().await } else { prefix.poll().await };
            looked.map_err(|why| if is_local { format!("{NO_QUORUM}: {why}") } else { why })
        };
        let looked = tokio::time::timeout(PATIENCE, looked).await;
        let looked = looked.unwrap_or_else(|_| Err(etcd_prefix::LATE.into()));
        // The poll of a member that has just lost its leader waits for seconds.
        let (serving, has_member) = (prefix.serving(), prefix.has_member());
        self.look(serving);
        match looked {
            Ok(changed) => {
                let known = Arc::clone(&self.known.load().revocations);
                let now = changed.map_or(known, Arc::new);
                if is_local {
                    self.unread.store(Some(Arc::new(NO_QUORUM.to_owned())));
                    self.publish_local_read(&now, asked);
                    self.apply_by_age(serving);
                    return;
                }
                self.publish_read(&now, asked);
                self.unread.store(None);
                if self.failures.end() {
                    tracing::info!("revocations are read from etcd again");
                }
            }
            Err(reason) => {
                self.unread.store(Some(Arc::new(reason.clone())));
                if self.failures.note(&reason, has_member) {
                    tracing::warn!(%reason, "revocations cannot be read from etcd");
                }
                self.apply_by_age(serving);
            }
        }
    }

    /// Notes the calls that the cluster serves now.
    fn look(&self, serving: ServingState) {
        self.known.rcu(|known| {
            let mut standing = known.standing;
            standing.look(serving, Instant::now(), self.max_age);
            let revocations = Arc::clone(&known.revocations);
            KnownRevocations { revocations, as_of: known.as_of, standing }
        });
    }

    /// Applies the known revocations to the calls for which the revocations suffice by their age. While no
    /// voter is ready, no call but a local read can be served.
    fn apply_by_age(&self, serving: ServingState) {
        let known = self.known.load();
        let has_voter = matches!(serving, ServingState::Ready | ServingState::NoKnownLeader);
        if known.is_good(self.max_age) {
            self.sealer.apply_revocations(Some(&known.revocations));
        } else if !has_voter && known.standing.holds(Instant::now(), self.max_age) {
            if !self.sealer.is_for_local_reads() {
                tracing::info!("the cluster has no quorum: the known revocations count for local reads only");
            }
            self.sealer.apply_to_local_reads(&known.revocations);
        } else if self.sealer.knows_revocations() {
            tracing::error!("revocations are too old: no session is admitted until they are read again");
            self.sealer.apply_revocations(None);
        }
    }

    /// Publishes the revocations read from a quorum.
    fn publish_read(&self, revocations: &Arc<Revocations>, asked: Instant) {
        let mut standing = self.known.load().standing;
        standing.note_read(asked);
        self.publish(revocations, RevocationsAge::At(asked), standing);
        self.sealer.apply_revocations(Some(revocations));
    }

    /// Publishes the revocations read from one member's store, which are not the newer for it.
    fn publish_local_read(&self, revocations: &Arc<Revocations>, asked: Instant) {
        let known = self.known.load();
        let mut standing = known.standing;
        standing.note_read(asked);
        self.publish(revocations, known.as_of, standing);
    }

    fn publish(&self, revocations: &Arc<Revocations>, as_of: RevocationsAge, standing: LocalStanding) {
        let revocations = Arc::clone(revocations);
        self.known.store(Arc::new(KnownRevocations { revocations, as_of, standing }));
    }
}

/// Waits for a change of members, if revocations are stored in etcd. Cancel-safe.
async fn changed(changes: &mut Option<ChangeReceiver>) {
    if let Some(told) = changes {
        if told.changed().await.is_ok() {
            return;
        }
        *changes = None;
    }
    std::future::pending().await
}

/// Displays a change with escapes, because a user name may contain a line break.
struct EscapedChange<'a>(&'a RevocationChange);

impl fmt::Display for EscapedChange<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0.to_string().escape_debug(), f)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;
    use keyward_base::secret::Secret;
    use keyward_cluster::membership::{
        ControlChannels, HintSender, MembersHandle, Membership, SharedAuthSetting,
    };
    use keyward_downstream::session::{LoginInadmissible, SessionKeys};
    use keyward_upstream::credentials::{CredentialSettings, Credentials};

    fn sealer() -> Arc<Sealer> {
        Arc::new(Sealer::new(SessionKeys::new(&[Secret::new([7; 32])]).unwrap()))
    }

    /// Access to a cluster without known members.
    fn nowhere() -> OwnKeysUpstream {
        let channels = ControlChannels::new(ArcSwap::from_pointee(HashMap::new()));
        let (credentials, _) = Credentials::new(CredentialSettings::default(), channels.clone()).unwrap();
        let members = MembersHandle {
            snapshot: Arc::new(ArcSwap::from_pointee(Membership::unknown(Instant::now()))),
            changes: ChangeReceiver::channel().1,
            outages: Arc::default(),
            hints: HintSender::channel().0,
            auth: Arc::new(SharedAuthSetting::default()),
            alarms: Arc::default(),
        };
        OwnKeysUpstream { members, channels, credentials }
    }

    fn settings(keep: RevocationPersistence) -> Revocation {
        Revocation { keep, max_age: Duration::from_secs(60) }
    }

    /// Makes changes one after another, and returns the outcome of each change.
    async fn made(
        register: RevocationRegister,
        keeper: RevocationKeeper,
        changes: Vec<RevocationChange>,
    ) -> Vec<Result<RevocationStorage, RevocationError>> {
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
        let keep = || settings(RevocationPersistence::File(folder.path().join("state")));
        let first = sealer();
        let (register, keeper) = RevocationRegister::open(&keep(), nowhere(), Arc::clone(&first)).unwrap();
        assert!(register.is_known());
        let changes = vec![RevocationChange::Block("alice".into()), RevocationChange::Revoke("bob".into())];
        let outcomes = made(register, keeper, changes).await;
        assert!(outcomes.iter().all(|kept| matches!(kept, Ok(RevocationStorage::File))), "{outcomes:?}");
        assert_eq!(first.admit_login(&"alice".into()), Err(LoginInadmissible::Blocked));

        let second = sealer();
        let (register, _keeper) = RevocationRegister::open(&keep(), nowhere(), Arc::clone(&second)).unwrap();
        assert_eq!(register.revocations().len(), 2);
        assert_eq!(second.admit_login(&"alice".into()), Err(LoginInadmissible::Blocked));
        assert_eq!(second.admit_login(&"bob".into()), first.admit_login(&"bob".into()));
    }

    #[tokio::test(start_paused = true)]
    async fn what_cannot_be_written_is_in_force_said_not_to_be_kept_and_written_later() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("folder");
        std::fs::create_dir(&path).unwrap();
        let sealer = sealer();
        let keep = settings(RevocationPersistence::File(path.join("state")));
        let (register, keeper) = RevocationRegister::open(&keep, nowhere(), Arc::clone(&sealer)).unwrap();
        std::fs::remove_dir_all(&path).unwrap();
        let file = register.state_file().expect("configured").clone();
        let operator = async {
            let outcome = register.change(RevocationChange::Block("alice".into())).await;
            assert!(matches!(outcome, Err(RevocationError::NotKept(_))), "{outcome:?}");
            assert_eq!(sealer.admit_login(&"alice".into()), Err(LoginInadmissible::Blocked));
            assert!(file.unwritten().is_some_and(|file| file.path == path.join("state")));
            assert!(
                RevocationRegister::open(&keep, nowhere(), self::sealer()).is_err(),
                "nor does it start like that"
            );
            std::fs::create_dir(&path).unwrap();
            while file.unwritten().is_some() {
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
        };
        tokio::select! {
            () = operator => {}
            () = keeper.run() => panic!("the register is there"),
        }
        let other = self::sealer();
        let (_register, _keeper) = RevocationRegister::open(&keep, nowhere(), Arc::clone(&other)).unwrap();
        assert_eq!(other.admit_login(&"alice".into()), Err(LoginInadmissible::Blocked));
    }

    #[tokio::test]
    async fn memory_says_that_it_is_no_more_than_that() {
        let sealer = sealer();
        let keep = settings(RevocationPersistence::Memory);
        let (register, keeper) = RevocationRegister::open(&keep, nowhere(), Arc::clone(&sealer)).unwrap();
        let outcomes = made(register, keeper, vec![RevocationChange::Block("alice".into())]).await;
        assert!(matches!(outcomes[..], [Ok(RevocationStorage::Memory)]), "{outcomes:?}");
        assert_eq!(sealer.admit_login(&"alice".into()), Err(LoginInadmissible::Blocked));
    }

    #[tokio::test(start_paused = true)]
    async fn before_etcd_was_read_nobody_is_admitted_and_nothing_is_changed() {
        let sealer = sealer();
        let keep = settings(RevocationPersistence::Etcd { prefix: "/p/".into(), login: None });
        let (register, keeper) = RevocationRegister::open(&keep, nowhere(), Arc::clone(&sealer)).unwrap();
        assert!(!register.is_known());
        assert_eq!(sealer.admit_login(&"alice".into()), Err(LoginInadmissible::NotKnown));
        let outcomes = made(register, keeper, vec![RevocationChange::Unblock("alice".into())]).await;
        assert!(matches!(outcomes[..], [Err(RevocationError::Unchanged(_))]), "{outcomes:?}");
        assert_eq!(sealer.admit_login(&"alice".into()), Err(LoginInadmissible::NotKnown));
    }
}
