//! A waiting Lock or Campaign, and the removal of its queue key after a failure.
//!
//! Owns: looking up the call's position in the lock queue, confirming a success, removing the key. Must not
//! know: how the call is sent, the client's answer.
//! Invariants (docs/decisions.md#d28): a key is removed only if seen in the queue behind other keys while the
//! call waited, so the lease held no lock by the key before; no key is removed once the client may have been
//! told of a success.
//!
//! With auth off, etcd removes the key itself. With auth on, etcd tries to remove the key without a user,
//! fails, and reports no error (etcd-io/etcd#13330): the key of a dead waiter would get the lock.

use std::cell::Cell;
use std::future::Future;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use prometheus_client::metrics::counter::Counter;
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep, timeout};

use crate::lease::lock_queue::{LockQueueKey, LockQueuePosition};
use crate::lease::lock_wait_register::{LockWaitEnd, LockWaitRegister, OwedKeyRemoval};
use keyward_base::tasks::Tasks;
use keyward_cluster::choose::MemberTarget;
use keyward_cluster::membership::{AuthSetting, Member};
use keyward_etcd::identity::MemberId;
use keyward_etcd::rpc::method::Method;
use keyward_etcd::rpc::outcome::is_trouble;
use keyward_upstream::own_requests::{ReadError, ask};
use keyward_upstream::send::{UpstreamClient, UpstreamUser};

const TXN: &str = "/etcdserverpb.KV/Txn";
/// Time without an answer after which a call counts as queued, and its position is looked up: longer than an
/// answer without waiting takes, shorter than any client's patience.
const FIRST_LOOK: Duration = Duration::from_millis(100);
/// Longest interval, before jitter, between two lookups of a waiting call's position.
const LONGEST_WATCH: Duration = Duration::from_secs(15);
/// Time for etcd to answer the call at the head of the queue; etcd takes milliseconds.
const ANSWER: Duration = Duration::from_secs(2);
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
/// For this long after the failure the key is removed even at the head of the queue. Later, the owner may
/// have called again elsewhere and been told of a success.
const SURE: Duration = Duration::from_secs(1);
/// Time after which a request accepted by a member can no longer be applied: etcd's own limit.
const LATE: Duration = Duration::from_secs(7);
/// Time for which a removal is tried while no member accepts it. Afterwards the key stays until its lease
/// ends.
const TRIED: Duration = Duration::from_secs(60);

/// The environment of a waiting call.
#[derive(Clone)]
pub struct LockWaitContext {
    /// The register of all waiting calls of the process.
    pub lock_waits: Arc<LockWaitRegister>,
    /// The sender of upstream requests.
    pub upstream: Rc<UpstreamClient>,
    /// The user of the call and of the key's removal.
    pub user: UpstreamUser,
    /// The tasks running the removals.
    pub tasks: Tasks,
    /// Counter of removed keys.
    pub removed: Counter,
}

/// A call waiting with a queue key. Unless ended by [`LockWait::keep`], a drop starts the removal of the key.
pub struct LockWait {
    ground: LockWaitContext,
    ticket: Rc<LockQueueKey>,
    state: Cell<LockWaitState>,
}

#[derive(Clone, Copy, Default)]
struct LockWaitState {
    /// The call was sent.
    sent: bool,
    /// The call was sent with an unknown outcome: the member may still create or remove the key.
    lost: bool,
    /// Create revision of the key when first seen behind other keys.
    since: Option<i64>,
    /// No request sent so far can still create the key.
    settled: bool,
    /// The call was seen in the queue since the last [`LockWait::take_in_line`].
    in_line: bool,
    fate: LockKeyFate,
    /// The call has left the register.
    left: bool,
}

/// The treatment of the key at the end of the call.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum LockKeyFate {
    #[default]
    Removed,
    Kept,
    /// No key exists.
    Nothing,
}

impl LockWait {
    /// Registers a call about to wait with `ticket`. Returns once no removal of the key is running.
    /// Cancel-safe.
    pub async fn new(ground: LockWaitContext, ticket: LockQueueKey) -> Self {
        ground.lock_waits.arrive(ticket.key()).await;
        Self { ground, ticket: Rc::new(ticket), state: Cell::default() }
    }

    /// Waits for `answer`, the answer to the call about to be sent, and looks up the queue position
    /// meanwhile. `None` if the call reached the head of the queue without an answer: with auth on, a member
    /// serves all its waiting calls by a single watch, and on 3.4 the watch goes silent when the token of the
    /// first user expires (etcd-io/etcd#14850).
    pub async fn await_answer<T>(&self, answer: impl Future<Output = T>) -> Option<T> {
        // A lost earlier request may be applied after the request about to be sent.
        self.change(|state| LockWaitState { sent: true, settled: false, ..state });
        tokio::select! {
            biased; // an answer makes every lookup needless
            answer = answer => Some(answer),
            () = self.until_answer_overdue() => {
                self.lost();
                None
            }
        }
    }

    /// True if the call was seen in the queue since the last `take_in_line`, so the cluster was working.
    #[must_use]
    pub fn take_in_line(&self) -> bool {
        let in_line = self.state.get().in_line;
        self.change(|state| LockWaitState { in_line: false, ..state });
        in_line
    }

    /// Checks that the user may read the lock queue. Also notes the queue position.
    ///
    /// # Errors
    /// [`ReadError`]: the user may not, or no member answered.
    pub async fn is_permitted(&self) -> Result<(), ReadError> {
        if let LockQueuePosition::Behind(created, _) = self.read_position().await? {
            self.change(|state| LockWaitState { since: state.since.or(Some(created)), ..state });
        }
        Ok(())
    }

    /// Notes that the outcome of the last request will stay unknown.
    pub fn lost(&self) {
        self.change(|state| LockWaitState { lost: true, ..state });
    }

    /// True if the outcome of an earlier request is unknown.
    #[must_use]
    pub fn was_lost(&self) -> bool {
        self.state.get().lost
    }

    /// True if a success may be untrue: the key was queued, or the outcome of an earlier request is unknown,
    /// so the key may have been removed.
    #[must_use]
    pub fn is_doubtful(&self) -> bool {
        let LockWaitState { since, lost, .. } = self.state.get();
        since.is_some() || lost
    }

    /// True if a success of `method` with this message still holds; `None` if no member answers within etcd's
    /// own time limit.
    pub async fn holds(&self, method: &Method, message: &Bytes) -> Option<bool> {
        let until = Instant::now() + LATE;
        let mut pause = FIRST_PAUSE;
        loop {
            match self.read_position().await {
                Ok(place) => return Some(LockQueueKey::holds(method, message, &place)),
                Err(_) if Instant::now() + pause < until => self.ground.upstream.pause_or_change(pause).await,
                Err(_) => return None,
            }
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    /// Ends the call with a success told to the client: the key is not removed from here on.
    pub fn keep(self) {
        self.change(|state| LockWaitState { fate: LockKeyFate::Kept, ..state });
    }

    /// Ends a failed call with its client still connected. Returns after the first attempt to remove the key,
    /// so the client's next call finds the queue without the key. `refused` is true if the cluster itself
    /// refused the call.
    pub async fn give_up(self, refused: bool) {
        if refused && !self.is_doubtful() {
            // The call was never queued.
            self.change(|state| LockWaitState { fate: LockKeyFate::Nothing, ..state });
        }
        if let Some(tried) = self.leave() {
            // A dropped sender means a finished removal, a timeout a removal still running.
            drop(timeout(SURE, tried).await);
        }
    }

    fn change(&self, to: impl FnOnce(LockWaitState) -> LockWaitState) {
        self.state.set(to(self.state.get()));
    }

    /// Returns once the call has held the lock for some time without an answer.
    async fn until_answer_overdue(&self) {
        let mut pause = FIRST_LOOK;
        let (mut first_in_line, mut came) = (None::<Bytes>, false);
        loop {
            sleep(pause).await;
            let place = match &first_in_line {
                None => self.read_position().await,
                Some(first) => self.read_position_locally(first).await,
            };
            match place {
                Ok(LockQueuePosition::Behind(created, first)) => {
                    self.change(|state| LockWaitState {
                        since: state.since.or(Some(created)),
                        settled: !state.lost,
                        in_line: true,
                        ..state
                    });
                    first_in_line = Some(first);
                    came = false;
                    // Jitter: not all waiting calls look at once.
                    let spread = Duration::from_millis(self.ground.upstream.chooser.draw(1000));
                    pause = (pause * 2).min(LONGEST_WATCH) + spread;
                }
                // `LockQueueKey::glance` reads two keys only, so a third key may be the first now.
                Ok(LockQueuePosition::First(_)) if first_in_line.take().is_some() => pause = Duration::ZERO,
                Ok(LockQueuePosition::First(_)) => {
                    self.change(|state| LockWaitState { settled: !state.lost, ..state });
                    if came && self.ground.upstream.members.auth.now() == AuthSetting::On {
                        return;
                    }
                    came = true;
                    pause = ANSWER;
                }
                Ok(LockQueuePosition::Absent) | Err(_) => {
                    first_in_line = None;
                    pause = (pause * 2).min(LONGEST_PAUSE);
                }
            }
        }
    }

    async fn read_position_locally(&self, first: &Bytes) -> Result<LockQueuePosition, ReadError> {
        self.look_up(self.ticket.glance(first)).await
    }

    async fn read_position(&self) -> Result<LockQueuePosition, ReadError> {
        self.look_up(self.ticket.look()).await
    }

    /// Sends the Txn `lookup` to a member, in a task of its own: if this future is dropped, the task still
    /// reads the answer. A read-only Txn that is cancelled while a member of 3.5.0 to 3.5.6 executes the Txn
    /// may crash the member (docs/etcd-facts.md#cancelled-txn). A wait cancels no lookup; the time limit of
    /// [`ask`] does.
    async fn look_up(&self, lookup: Vec<u8>) -> Result<LockQueuePosition, ReadError> {
        let LockWaitContext { upstream, user, tasks, .. } = self.ground.clone();
        let member = upstream.choose(MemberTarget::Any, &[]).ok_or(ReadError::Lost)?;
        let (finished, result) = oneshot::channel();
        let asking = async move {
            // The receiver is gone if the wait has ended.
            drop(finished.send(ask(&upstream, &user, &member, TXN, &lookup).await));
        };
        tasks.spawn("lock lookup", asking).detach();
        let answer = result.await.map_err(|_| ReadError::Lost)??;
        LockQueueKey::place(&answer).ok_or(ReadError::Lost)
    }

    /// Leaves the register, once, and starts a removal if due. The receiver is notified after the first
    /// attempt.
    fn leave(&self) -> Option<oneshot::Receiver<()>> {
        let LockWaitState { since, settled, fate, sent, left, .. } = self.state.get();
        if left {
            return None;
        }
        self.change(|state| LockWaitState { left: true, ..state });
        let left = match fate {
            LockKeyFate::Kept => LockWaitEnd::Kept,
            LockKeyFate::Removed if sent => {
                LockWaitEnd::Owing(OwedKeyRemoval { user: self.ground.user.clone(), since, settled })
            }
            LockKeyFate::Removed | LockKeyFate::Nothing => LockWaitEnd::Nothing,
        };
        // At the end of the process no runtime is left for the task.
        let due = self.ground.lock_waits.leave(self.ticket.key(), left);
        (due && tokio::runtime::Handle::try_current().is_ok()).then(|| {
            let (ground, ticket) = (self.ground.clone(), Rc::clone(&self.ticket));
            let (tried, told) = oneshot::channel();
            self.ground.tasks.spawn("lock clean-up", remove(ground, ticket, tried)).detach();
            told
        })
    }
}

impl Drop for LockWait {
    fn drop(&mut self) {
        drop(self.leave());
    }
}

/// The result of an attempt to remove a key.
enum RemovalStep {
    /// The removal is complete.
    Done,
    /// The key does not exist, but may still be created.
    NotYet,
    /// No member carried out the removal.
    Lost,
}

/// Removes the queue key of failed calls, unless a new call waits with the same key meanwhile.
async fn remove(ground: LockWaitContext, ticket: Rc<LockQueueKey>, tried: oneshot::Sender<()>) {
    let began = Instant::now();
    let mut tried = Some(tried);
    let mut pause = FIRST_PAUSE;
    let mut avoid = Vec::new();
    while let Some(mut removal) = ground.lock_waits.removal(ticket.key()) {
        let Some(debt) = &mut removal.debt else { return };
        if began.elapsed() >= SURE {
            debt.since = None;
        }
        let patience = match step(&ground, &ticket, debt, &mut avoid).await {
            RemovalStep::Done => Duration::ZERO,
            RemovalStep::NotYet => LATE,
            RemovalStep::Lost => TRIED,
        };
        if began.elapsed() + pause > patience {
            removal.debt = None;
            return;
        }
        drop(removal);
        // The receiver may be gone.
        tried.take().map(|tried| tried.send(()));
        ground.upstream.pause_or_change(pause).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

async fn step(
    ground: &LockWaitContext,
    ticket: &LockQueueKey,
    debt: &mut OwedKeyRemoval,
    avoid: &mut Vec<MemberId>,
) -> RemovalStep {
    let Some(member) = ground.upstream.choose(MemberTarget::Any, avoid) else { return RemovalStep::Lost };
    match remove_once(ground, ticket, debt, &member).await {
        Ok(()) if debt.settled => RemovalStep::Done,
        Ok(()) => {
            // A key created late is queued anew or belongs to another call, so its position is looked up
            // again.
            debt.since = None;
            RemovalStep::NotYet
        }
        Err(ReadError::Refused(status)) if !is_trouble(&status) => {
            tracing::debug!(?status, "the key of a failed lock call may not be removed");
            RemovalStep::Done
        }
        Err(ReadError::Login(failure)) if failure.is_refusal() => RemovalStep::Done,
        Err(_) => {
            ground.upstream.try_last(MemberTarget::Any, avoid, Some(member.id));
            RemovalStep::Lost
        }
    }
}

/// Succeeds if the key is gone, or is not the failed call's to remove.
async fn remove_once(
    ground: &LockWaitContext,
    ticket: &LockQueueKey,
    debt: &mut OwedKeyRemoval,
    member: &Arc<Member>,
) -> Result<(), ReadError> {
    let LockWaitContext { upstream, .. } = ground;
    let since = match debt.since {
        Some(since) => since,
        None => match look(upstream, &debt.user, ticket, member).await? {
            LockQueuePosition::Behind(created, _) => created,
            LockQueuePosition::Absent => return Ok(()),
            // The lease may have held the lock by this key before the call, and a new call by the holder
            // succeeds at once. etcd keeps such a key too.
            LockQueuePosition::First(_) => {
                debt.settled = true;
                return Ok(());
            }
        },
    };
    let answer = ask(upstream, &debt.user, member, TXN, &ticket.remove(since)).await?;
    if LockQueueKey::removed(&answer).ok_or(ReadError::Lost)? {
        ground.removed.inc();
    }
    Ok(())
}

async fn look(
    upstream: &Rc<UpstreamClient>,
    user: &UpstreamUser,
    ticket: &LockQueueKey,
    member: &Arc<Member>,
) -> Result<LockQueuePosition, ReadError> {
    let answer = ask(upstream, user, member, TXN, &ticket.look()).await?;
    LockQueueKey::place(&answer).ok_or(ReadError::Lost)
}
