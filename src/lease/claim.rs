//! One Lock or Campaign that waits, and the removal of its key when the wait fails.
//!
//! Owns: looking where its ticket stands, confirming its success, removing its key. Must not know: how the call is sent,
//! or what its client is told.
//! Invariants (rules 28): a key is removed only where it was seen in line, behind others, while its call waited: so its
//! lease held nothing by it before; nothing is removed once the client may have been told of a success.
//!
//! etcd removes the key itself where auth is off. With auth on it tries to without a user, fails, and says nothing
//! (etcd-io/etcd#13330): whoever died in line would hold the lock.

use std::cell::Cell;
use std::future::Future;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use prometheus_client::metrics::counter::Counter;
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep, timeout};

use crate::identity::MemberId;
use crate::lease::claims::{Claims, Debt, Left};
use crate::lease::ticket::{Place, Ticket};
use crate::rpc::method::Method;
use crate::rpc::outcome::is_trouble;
use crate::tasks::Tasks;
use crate::upstream::choose::Wanted;
use crate::upstream::membership::{Auth, Member};
use crate::upstream::read::{ReadError, ask};
use crate::upstream::send::{As, Door};

const TXN: &str = "/etcdserverpb.KV/Txn";
/// A call without an answer for so long waits in line, and it is looked where: longer than an answer takes that does not
/// wait, shorter than anybody's patience.
const FIRST_LOOK: Duration = Duration::from_millis(100);
/// While it waits, it is looked again and again, up to so seldom.
const LONGEST_WATCH: Duration = Duration::from_secs(15);
/// Who is first in line is told so within this time; etcd takes milliseconds.
const ANSWER: Duration = Duration::from_secs(2);
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
/// For so long a key that has become the first is still removed: later, its owner may have asked again elsewhere and been
/// told that it holds the lock.
const SURE: Duration = Duration::from_secs(1);
/// What a member took may be applied so much later: etcd's own limit.
const LATE: Duration = Duration::from_secs(7);
/// How long a removal is tried without any member that takes it. After that the key stays until its lease ends.
const TRIED: Duration = Duration::from_secs(60);

/// What a claim stands on.
#[derive(Clone)]
pub struct Ground {
    /// All claims of the process.
    pub claims: Arc<Claims>,
    /// The way upstream.
    pub door: Rc<Door>,
    /// As whom the call waits, and its key is removed.
    pub whom: As,
    /// Where removals run.
    pub tasks: Tasks,
    /// Counts keys that were removed.
    pub removed: Counter,
}

/// A call that waits with a ticket. Dropped without [`Claim::keep`], it has the key removed.
pub struct Claim {
    ground: Ground,
    ticket: Rc<Ticket>,
    state: Cell<State>,
}

#[derive(Clone, Copy, Default)]
struct State {
    /// The call was sent.
    sent: bool,
    /// It was sent, and what became of that is not known: its member may still create the key, or remove it.
    lost: bool,
    /// The create revision at which its key was first seen behind others.
    since: Option<i64>,
    /// Nothing that was sent can still create it.
    settled: bool,
    /// It was seen in line, which nobody has asked for yet.
    in_line: bool,
    fate: Fate,
    /// It is registered no more.
    left: bool,
}

/// What is to become of the key.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Fate {
    #[default]
    Removed,
    Kept,
    /// There is none.
    Nothing,
}

impl Claim {
    /// Registers a call that will wait with `ticket`. Returns once no removal of it is under way. Cancel-safe.
    pub async fn new(ground: Ground, ticket: Ticket) -> Self {
        ground.claims.arrive(ticket.key()).await;
        Self { ground, ticket: Rc::new(ticket), state: Cell::default() }
    }

    /// Waits for `answer` to the call, which is about to be sent, and looks meanwhile where its ticket stands. None where
    /// its turn came and the member did not say so: with auth on, one watch of the member's own serves all who wait there,
    /// and in 3.4 it goes silent when the token of whoever was first has expired (etcd-io/etcd#14850).
    pub async fn beside<T>(&self, answer: impl Future<Output = T>) -> Option<T> {
        // What was lost before may come later than what is sent now.
        self.change(|state| State { sent: true, settled: false, ..state });
        tokio::select! {
            biased; // an answer makes every look needless
            answer = answer => Some(answer),
            () = self.overdue() => {
                self.lost();
                None
            }
        }
    }

    /// Whether the call was seen in line since this was asked last: the cluster worked then.
    #[must_use]
    pub fn take_in_line(&self) -> bool {
        let in_line = self.state.get().in_line;
        self.change(|state| State { in_line: false, ..state });
        in_line
    }

    /// Whether the user may read the line that it waits in. Where it stands there, this tells, too.
    ///
    /// # Errors
    /// [`ReadError`]: it may not, or nobody told.
    pub async fn is_permitted(&self) -> Result<(), ReadError> {
        if let Place::Behind(created, _) = self.look().await? {
            self.change(|state| State { since: state.since.or(Some(created)), ..state });
        }
        Ok(())
    }

    /// What became of the call where it was sent last will not be known.
    pub fn lost(&self) {
        self.change(|state| State { lost: true, ..state });
    }

    /// Whether what became of an earlier sending is not known.
    #[must_use]
    pub fn was_lost(&self) -> bool {
        self.state.get().lost
    }

    /// Whether a success may be untrue: the key stood in line, where others can remove it.
    #[must_use]
    pub fn is_doubtful(&self) -> bool {
        let State { since, lost, .. } = self.state.get();
        since.is_some() || lost
    }

    /// Whether a success of `method` with this message is true; none where no member can tell within etcd's own time.
    pub async fn holds(&self, method: &Method, message: &Bytes) -> Option<bool> {
        let until = Instant::now() + LATE;
        let mut pause = FIRST_PAUSE;
        loop {
            match self.look().await {
                Ok(place) => return Some(Ticket::holds(method, message, &place)),
                Err(_) if Instant::now() + pause < until => self.ground.door.pause_or_change(pause).await,
                Err(_) => return None,
            }
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    /// The client is told of its success: from here on nothing is removed.
    pub fn keep(self) {
        self.change(|state| State { fate: Fate::Kept, ..state });
    }

    /// The call failed and its client is still there: has the key removed, and returns when that was tried once, so that
    /// the client's next call finds the line without it. `refused` says that the cluster itself refused the call.
    pub async fn give_up(self, refused: bool) {
        if refused && !self.is_doubtful() {
            // It never stood in line.
            self.change(|state| State { fate: Fate::Nothing, ..state });
        }
        if let Some(tried) = self.leave() {
            // An error is its end by other means.
            drop(timeout(SURE, tried).await);
        }
    }

    fn change(&self, to: impl FnOnce(State) -> State) {
        self.state.set(to(self.state.get()));
    }

    /// Returns when the call holds the lock for some time without having been told.
    async fn overdue(&self) {
        let mut pause = FIRST_LOOK;
        let (mut first_in_line, mut came) = (None::<Bytes>, false);
        loop {
            sleep(pause).await;
            let place = match &first_in_line {
                None => self.look().await,
                Some(first) => self.glance(first).await,
            };
            match place {
                Ok(Place::Behind(created, first)) => {
                    self.change(|state| State {
                        since: state.since.or(Some(created)),
                        settled: !state.lost,
                        in_line: true,
                        ..state
                    });
                    first_in_line = Some(first);
                    came = false;
                    // Not all who wait at once.
                    let spread = Duration::from_millis(self.ground.door.chooser.draw(1000));
                    pause = (pause * 2).min(LONGEST_WATCH) + spread;
                }
                // A glance knows no others who may have become the first.
                Ok(Place::First(_)) if first_in_line.take().is_some() => pause = Duration::ZERO,
                Ok(Place::First(_)) => {
                    self.change(|state| State { settled: !state.lost, ..state });
                    if came && self.ground.door.members.auth.now() == Auth::On {
                        return;
                    }
                    came = true;
                    pause = ANSWER;
                }
                Ok(Place::Absent) | Err(_) => {
                    first_in_line = None;
                    pause = (pause * 2).min(LONGEST_PAUSE);
                }
            }
        }
    }

    async fn glance(&self, first: &Bytes) -> Result<Place, ReadError> {
        let Ground { door, whom, .. } = &self.ground;
        let member = door.choose(Wanted::Any, &[]).ok_or(ReadError::Lost)?;
        let answer = ask(door, whom, &member, TXN, &self.ticket.glance(first)).await?;
        Ticket::place(&answer).ok_or(ReadError::Lost)
    }

    async fn look(&self) -> Result<Place, ReadError> {
        let Ground { door, whom, .. } = &self.ground;
        let member = door.choose(Wanted::Any, &[]).ok_or(ReadError::Lost)?;
        look(door, whom, &self.ticket, &member).await
    }

    /// Leaves the register, once; a removal that is due begins. Told when it was tried once.
    fn leave(&self) -> Option<oneshot::Receiver<()>> {
        let State { since, settled, fate, sent, left, .. } = self.state.get();
        if left {
            return None;
        }
        self.change(|state| State { left: true, ..state });
        let left = match fate {
            Fate::Kept => Left::Kept,
            Fate::Removed if sent => Left::Owing(Debt { whom: self.ground.whom.clone(), since, settled }),
            Fate::Removed | Fate::Nothing => Left::Nothing,
        };
        // At the very end of the process there is nobody left to do it.
        let due = self.ground.claims.leave(self.ticket.key(), left);
        (due && tokio::runtime::Handle::try_current().is_ok()).then(|| {
            let (ground, ticket) = (self.ground.clone(), Rc::clone(&self.ticket));
            let (tried, told) = oneshot::channel();
            self.ground.tasks.spawn("lock clean-up", remove(ground, ticket, tried)).detach();
            told
        })
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        drop(self.leave());
    }
}

/// How one try at a removal ended.
enum Step {
    /// Nothing is left to do.
    Done,
    /// The key does not exist, but may still come.
    NotYet,
    /// No member did it.
    Lost,
}

/// Removes the ticket of calls that failed, unless another call takes it over meanwhile.
async fn remove(ground: Ground, ticket: Rc<Ticket>, tried: oneshot::Sender<()>) {
    let began = Instant::now();
    let mut tried = Some(tried);
    let mut pause = FIRST_PAUSE;
    let mut avoid = Vec::new();
    while let Some(mut removal) = ground.claims.removal(ticket.key()) {
        let Some(debt) = &mut removal.debt else { return };
        if began.elapsed() >= SURE {
            debt.since = None;
        }
        let patience = match step(&ground, &ticket, debt, &mut avoid).await {
            Step::Done => Duration::ZERO,
            Step::NotYet => LATE,
            Step::Lost => TRIED,
        };
        if began.elapsed() + pause > patience {
            removal.debt = None;
            return;
        }
        drop(removal);
        // Whoever waits for the first try may have gone.
        tried.take().map(|tried| tried.send(()));
        ground.door.pause_or_change(pause).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

async fn step(ground: &Ground, ticket: &Ticket, debt: &mut Debt, avoid: &mut Vec<MemberId>) -> Step {
    let Some(member) = ground.door.choose(Wanted::Any, avoid) else { return Step::Lost };
    match remove_once(ground, ticket, debt, &member).await {
        Ok(()) if debt.settled => Step::Done,
        Ok(()) => {
            // What comes late is in line again, or somebody else's.
            debt.since = None;
            Step::NotYet
        }
        Err(ReadError::Refused(status)) if !is_trouble(&status) => {
            tracing::debug!(?status, "the key of a failed lock call may not be removed");
            Step::Done
        }
        Err(ReadError::Login(failure)) if failure.is_refusal() => Step::Done,
        Err(_) => {
            avoid.push(member.id);
            if !ground.door.another(Wanted::Any, avoid) {
                avoid.clear();
            }
            Step::Lost
        }
    }
}

/// The key is gone, or not the failed call's to remove.
async fn remove_once(
    ground: &Ground,
    ticket: &Ticket,
    debt: &mut Debt,
    member: &Arc<Member>,
) -> Result<(), ReadError> {
    let Ground { door, .. } = ground;
    let since = match debt.since {
        Some(since) => since,
        None => match look(door, &debt.whom, ticket, member).await? {
            Place::Behind(created, _) => created,
            Place::Absent => return Ok(()),
            // It may have held the lock before this call, as etcd would have told it at once. etcd leaves it, too.
            Place::First(_) => {
                debt.settled = true;
                return Ok(());
            }
        },
    };
    let answer = ask(door, &debt.whom, member, TXN, &ticket.remove(since)).await?;
    if Ticket::removed(&answer).ok_or(ReadError::Lost)? {
        ground.removed.inc();
    }
    Ok(())
}

async fn look(door: &Rc<Door>, whom: &As, ticket: &Ticket, member: &Arc<Member>) -> Result<Place, ReadError> {
    let answer = ask(door, whom, member, TXN, &ticket.look()).await?;
    Ticket::place(&answer).ok_or(ReadError::Lost)
}
