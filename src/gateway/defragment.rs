//! Defragmentation, which stalls a member for seconds: one member at a time, and never under anybody's calls (story 11).
//!
//! Owns: what is done around a Defragment. Below, `lock` has what replicas know of each other, `rest` frees one member of its
//! calls. Must not know: how a member is chosen for calls. Invariants (rules 24): whoever names no member has all voters
//! defragmented, one after the other, the leader last, only while all others are ready; after the client's deadline, or
//! once it has left, none is begun; one that was begun is seen to its end, whoever waits for it; one that was done less than
//! ten minutes ago is passed over; nobody has a member freed who could not have it defragmented.

mod lock;
mod rest;

use std::collections::{BTreeSet, HashMap};
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep_until, timeout_at};

use crate::gateway::caller::Caller;
use crate::gateway::{Client, Gateway};
use crate::identity::MemberId;
use crate::refusal::{Code, Refusal, Status};
use crate::rpc::frame;
use crate::rpc::method::Method;
use crate::upstream::choose::Wanted;
use crate::upstream::membership::{Member, Membership, Role};
use crate::upstream::read::{self, ReadError};
use crate::upstream::send::{As, Door};

use lock::{Lock, Taken};

pub use rest::{Freed, idle};

/// The method's path.
pub const PATH: &str = "/etcdserverpb.Maintenance/Defragment";
/// Whoever may make this call may defragment, in every version; it changes nothing.
const USERS: &str = "/etcdserverpb.Auth/UserList";
/// A member is passed over that was done so lately.
const LATELY: Duration = Duration::from_secs(600);
/// How long it is waited for that members are ready, where the client waits for longer.
const READY: Duration = Duration::from_secs(30);
/// How often a question of our own is asked elsewhere.
const TRIES: usize = 3;

/// What shards know of each other's defragmentations. Shared by them.
#[derive(Debug, Default)]
pub struct Register {
    running: AtomicBool,
    /// When members were done last.
    done: Mutex<HashMap<MemberId, Instant>>,
}

/// The one that runs in this process.
pub struct Running(Arc<Register>);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.running.store(false, Ordering::SeqCst);
    }
}

impl Register {
    /// None while another runs.
    fn begin(self: &Arc<Self>) -> Option<Running> {
        let free = self.running.compare_exchange(false, true, Ordering::SeqCst, Ordering::SeqCst).is_ok();
        free.then(|| Running(Arc::clone(self)))
    }

    fn is_running(&self) -> bool {
        self.running.load(Ordering::SeqCst)
    }

    fn note(&self, member: MemberId) {
        let mut done = self.done.lock().unwrap_or_else(PoisonError::into_inner);
        done.insert(member, Instant::now());
    }

    fn lately(&self) -> BTreeSet<MemberId> {
        let done = self.done.lock().unwrap_or_else(PoisonError::into_inner);
        done.iter().filter(|(_, at)| at.elapsed() < LATELY).map(|(member, _)| *member).collect()
    }
}

/// Whether a Defragment that wants this is more than a call: there are others to take over what its member serves.
#[must_use]
pub fn is_ours(gateway: &Gateway, wanted: Wanted) -> bool {
    let members = gateway.door.members.snapshot.load();
    match wanted {
        // One that is not ready, or without which the others are no quorum, is asked as by anybody else; not while another rests,
        // or is about to.
        Wanted::This(id) => {
            let voter = members.get(id).is_some_and(|member| member.role == Role::Voter);
            let rests = voters(&members).any(|member| member.rest.is_taken());
            let taken = rests || gateway.defragmentations.is_running();
            voter && voters(&members).count() > 1 && (taken || unready(&members).is_none())
        }
        _ => voters(&members).count() > 1 || !members.absent.is_empty(),
    }
}

/// Defragments the member that is wanted, or all of them; the answer is framed.
///
/// # Errors
/// It was not done, or not all of it.
pub async fn serve(
    gateway: &Rc<Gateway>,
    client: &Rc<Client>,
    caller: &Rc<Caller>,
    wanted: Wanted,
    deadline: Option<Instant>,
) -> Result<Bytes, Refusal> {
    let mut stay = gateway.enter(client, caller)?;
    let (tell, told) = oneshot::channel();
    let in_use = caller.in_use();
    let work = Work { gateway: Rc::clone(gateway), whom: caller.whom.clone(), deadline };
    // In a task of its own: what was begun goes on in the member, whether or not its client waits.
    let (_waits, left) = oneshot::channel::<()>();
    let mut drain = gateway.drain.clone();
    let run = async move {
        let (tell, _in_use) = (tell, in_use);
        let work = async {
            match wanted {
                Wanted::This(id) => work.one(id, &tell).await,
                _ => work.all(&tell).await,
            }
        };
        let deserted = async {
            drop(left.await);
            drain.wait_for(Option::is_some).await.is_ok()
        };
        tokio::select! {
            biased; // what is done first
            ended = work => {
                if tell.send(ended).is_err() {
                    tracing::info!("a defragmentation ended after its client had left");
                }
            }
            // The process ends, and nobody is there to be told.
            true = deserted => tracing::info!("a defragmentation is left to its member"),
        }
    };
    gateway.tasks.spawn("defragmentation", run).detach();
    let late = deadline.map(|deadline| (deadline, Refusal::DEADLINE_EXCEEDED));
    let ends = client.ends(caller).into_iter().chain(late).min_by_key(|(at, _)| *at);
    let over = async {
        match ends {
            Some((at, refusal)) => {
                sleep_until(at).await;
                refusal
            }
            None => std::future::pending().await,
        }
    };
    let answer = tokio::select! {
        biased; // what is known first, then what let it in
        told = told => told.unwrap_or(Err(Refusal::SHUTTING_DOWN)),
        refusal = stay.cut() => Err(refusal),
        refusal = over => Err(refusal),
    };
    answer.map(|message| frame::encode(&message))
}

/// Why a member was not defragmented.
enum Trouble {
    /// A member said so to a request of ours.
    Refused(Status),
    /// It is not known what became of it.
    Lost,
    /// One of the voters is not ready.
    NotReady(String),
    /// The client has left, or its deadline has passed.
    NoTime,
    /// Another is under way.
    Another,
}

impl From<ReadError> for Trouble {
    fn from(error: ReadError) -> Self {
        match error {
            ReadError::Refused(status) => Self::Refused(status),
            ReadError::Login(_) | ReadError::Lost | ReadError::NoRoom => Self::Lost,
        }
    }
}

/// What the client is told: the member's answer, not framed.
type Told = Result<Bytes, Refusal>;

struct Work {
    gateway: Rc<Gateway>,
    whom: As,
    deadline: Option<Instant>,
}

impl Work {
    /// The one that the client named.
    async fn one(&self, id: MemberId, client: &oneshot::Sender<Told>) -> Told {
        let (_running, mut lock) = self.alone().await?;
        let members = self.gateway.door.members.snapshot.load_full();
        let done = match (members.get(id), unready(&members)) {
            (None, _) => Err(Refusal::NOTHING_SENT),
            (Some(member), Some(unready)) => Err(refusal(&Trouble::NotReady(unready), Some(member), &[])),
            (Some(member), None) => {
                let done = self.done(member, lock.as_mut(), client).await;
                done.map_err(|trouble| refusal(&trouble, Some(member), &[]))
            }
        };
        if let Some(lock) = lock {
            lock.release().await;
        }
        done
    }

    /// All voters.
    async fn all(&self, client: &oneshot::Sender<Told>) -> Told {
        let (_running, mut lock) = self.alone().await?;
        let walked = self.walk(lock.as_mut(), client).await;
        if let Some(lock) = lock {
            lock.release().await;
        }
        walked
    }

    /// Nobody else's until both are dropped, as far as there is a lock; whether the caller may is asked first.
    async fn alone(&self) -> Result<(Running, Option<Lock>), Refusal> {
        let told = |error: ReadError| refusal(&error.into(), None, &[]);
        permitted(&self.gateway.door, &self.whom).await.map_err(told)?;
        let running = self.gateway.defragmentations.begin().ok_or(Refusal::DEFRAGMENTING)?;
        let prefix = self.gateway.config.load().maintenance.etcd_prefix.clone();
        let Some(prefix) = prefix else { return Ok((running, None)) };
        match lock::take(&self.gateway.door, &self.whom, prefix).await.map_err(told)? {
            Taken::Ours(lock) => Ok((running, Some(lock))),
            // A full store takes no lock, and defragmentation is what helps it.
            Taken::NoSpace => {
                tracing::warn!(
                    "etcd has no space for the lock of a defragmentation: other replicas do not know of it"
                );
                Ok((running, None))
            }
            Taken::Anothers => Err(Refusal::DEFRAGMENTING),
        }
    }

    /// Whether there is somebody to do it for.
    fn may_begin(&self, client: &oneshot::Sender<Told>) -> bool {
        !client.is_closed() && self.deadline.is_none_or(|deadline| Instant::now() < deadline)
    }

    /// One member, under the lock where there is one.
    async fn done(
        &self,
        member: &Arc<Member>,
        lock: Option<&mut Lock>,
        client: &oneshot::Sender<Told>,
    ) -> Result<Bytes, Trouble> {
        let may_begin = || self.may_begin(client);
        let defragment = rest::defragment(&self.gateway.door, &self.whom, member, may_begin);
        let answer = match lock {
            None => defragment.await?,
            Some(lock) => {
                let answer = lock.held_while(defragment).await??;
                lock.note(member.id).await;
                answer
            }
        };
        tracing::info!(member = %member.id, name = &*member.name, "a member was defragmented");
        self.gateway.defragmentations.note(member.id);
        Ok(answer)
    }

    async fn walk(&self, mut lock: Option<&mut Lock>, client: &oneshot::Sender<Told>) -> Told {
        let mut over = self.gateway.defragmentations.lately();
        if let Some(lock) = &lock {
            over.extend(lock.lately().await.map_err(|error| refusal(&error.into(), None, &[]))?);
        }
        let (mut names, mut answer) = (Vec::new(), Bytes::new());
        loop {
            let next = next(&self.gateway.door.members.snapshot.load(), &over);
            let Some(member) = next else { return Ok(answer) };
            let begin = if self.may_begin(client) { self.all_ready().await } else { Err(Trouble::NoTime) };
            let done = match begin {
                Ok(()) => self.done(&member, lock.as_deref_mut(), client).await,
                Err(trouble) => Err(trouble),
            };
            answer = done.map_err(|trouble| refusal(&trouble, Some(&member), &names))?;
            over.insert(member.id);
            names.push(Arc::clone(&member.name));
        }
    }

    /// Waits until every voter is ready.
    async fn all_ready(&self) -> Result<(), Trouble> {
        let members = &self.gateway.door.members;
        let until = Instant::now() + READY;
        let until = self.deadline.map_or(until, |deadline| deadline.min(until));
        loop {
            let mut changes = members.changes.clone();
            changes.mark_unchanged();
            let Some(unready) = unready(&members.snapshot.load()) else { return Ok(()) };
            match timeout_at(until, changes.changed()).await {
                Ok(Ok(())) => {}
                Ok(Err(_)) | Err(_) => return Err(Trouble::NotReady(unready)),
            }
        }
    }
}

fn voters(members: &Membership) -> impl Iterator<Item = &Arc<Member>> {
    members.members.iter().filter(|member| member.role == Role::Voter)
}

/// One that may be a voter and takes no calls: without it, one more that is slow may be one too many.
fn unready(members: &Membership) -> Option<String> {
    let known = voters(members).find(|member| !member.is_ready()).map(|member| told(&member.name, member.id));
    known.or_else(|| members.absent.first().map(|member| told(&member.name, member.id)))
}

/// The next voter that is not `over`: followers by their ids, then the leader.
fn next(members: &Membership, over: &BTreeSet<MemberId>) -> Option<Arc<Member>> {
    let left = voters(members).filter(|member| !over.contains(&member.id));
    left.min_by_key(|member| (members.leader == Some(member.id), member.id)).cloned()
}

fn told(name: &str, id: MemberId) -> String {
    if name.is_empty() { id.to_string() } else { format!("{name} ({id})") }
}

/// What the client is told. `done`: the names of those that were done before.
fn refusal(trouble: &Trouble, member: Option<&Member>, done: &[Arc<str>]) -> Refusal {
    let (code, why) = match trouble {
        // Nothing was begun: the member's own words.
        Trouble::Refused(status) if done.is_empty() => return Refusal::told(status),
        Trouble::Refused(status) => (status.code, status.message.to_string()),
        Trouble::Lost => (Code::Unavailable, Refusal::REQUEST_TIMED_OUT_CONNECTION_LOST.message().to_owned()),
        Trouble::NotReady(unready) => (Code::FailedPrecondition, format!("member {unready} is not ready")),
        Trouble::NoTime => return Refusal::DEADLINE_EXCEEDED,
        Trouble::Another => return Refusal::DEFRAGMENTING,
    };
    let member = member.map(|member| told(&member.name, member.id));
    Refusal::not_defragmented(code, member.as_deref().unwrap_or("any"), &why, &done.join(", "))
}

/// A Defragment that is passed on as any call is under way as well: none of ours begins beside it. Nobody has others kept from theirs
/// who could not have a member defragmented.
pub async fn passed_on(gateway: &Gateway, method: &Method, whom: &As) -> Option<Running> {
    if method.path != PATH {
        return None;
    }
    permitted(&gateway.door, whom).await.ok()?;
    gateway.defragmentations.begin()
}

/// Whether the caller may work on members at all: nobody else has them freed of their calls.
///
/// # Errors
/// It may not, or no member can say.
pub async fn permitted(door: &Rc<Door>, whom: &As) -> Result<(), ReadError> {
    ask_anywhere(door, whom, USERS, &[]).await.map(drop)
}

/// Asks members that take calls, one after the other, until one answers.
async fn ask_anywhere(
    door: &Rc<Door>,
    whom: &As,
    path: &'static str,
    message: &[u8],
) -> Result<Bytes, ReadError> {
    let mut tried = Vec::new();
    loop {
        let member = door.choose(Wanted::Any, &tried).ok_or(ReadError::Lost)?;
        match read::ask(door, whom, &member, path, message).await {
            Err(ReadError::Lost | ReadError::Login(_)) if tried.len() + 1 < TRIES => tried.push(member.id),
            answered => return answered,
        }
    }
}
