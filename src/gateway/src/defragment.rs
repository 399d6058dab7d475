//! Defragmentation, which stalls a member for seconds: only a single member at a time, and only after the
//! member's calls were moved away.
//!
//! Owns: the steps around a Defragment call. Below, `lock` coordinates the replicas, and `rest` moves calls
//! off a member. Must not know: how a member is chosen for calls. Invariants (docs/decisions.md#d24): a
//! Defragment without a named member defragments all voters, each in turn, the leader last, only while all
//! other voters are ready; no member is begun after the client's deadline or after the client has left; a
//! begun defragmentation runs to its end, even without a client; a member defragmented less than ten minutes
//! ago is skipped, unless the client forces it; a member is taken out of service only for callers permitted
//! to defragment.

mod lock;
mod out_of_service;

use std::collections::{BTreeSet, HashMap};
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout_at};

use crate::Gateway;
use crate::call::Call;
use crate::exchange::Exchange;
use crate::pipeline_result::PipelineResult;
use crate::unary_request::UnaryRequest;
use keyward_cluster::choose::MemberTarget;
use keyward_cluster::membership::{Member, Membership, Role};
use keyward_etcd::identity::MemberId;
use keyward_etcd::refusal::{Code, Refusal, Status};
use keyward_etcd::rpc::frame;
use keyward_upstream::answer::MemberReply;
use keyward_upstream::own_requests::{self, ReadError};
use keyward_upstream::send::{UpstreamClient, UpstreamUser};

use lock::{DefragmentLock, DefragmentLockAttempt};

pub use out_of_service::{DrainedMember, idle};

/// The permission test: a caller permitted to make this read-only call may defragment, in every etcd version.
const USERS: &str = "/etcdserverpb.Auth/UserList";
/// Request metadata: also defragments members defragmented within the last ten minutes.
const FORCE: &str = "keyward-force-defragment";
/// A member defragmented within this time is skipped.
const LATELY: Duration = Duration::from_secs(600);
/// How long to wait until all voters are ready, unless the client's deadline is earlier.
const READY: Duration = Duration::from_secs(30);
/// How many members are tried for a request of our own.
const TRIES: usize = 3;

/// The defragmentations of this process, shared by all shards.
#[derive(Debug, Default)]
pub struct DefragmentationRegister {
    running: AtomicBool,
    /// When each member was last defragmented.
    done: Mutex<HashMap<MemberId, Instant>>,
}

/// Guard of the only running defragmentation of the process.
struct DefragmentationGuard(Arc<DefragmentationRegister>);

impl Drop for DefragmentationGuard {
    fn drop(&mut self) {
        self.0.running.store(false, Ordering::SeqCst);
    }
}

impl DefragmentationRegister {
    /// Takes the process's only slot; `None` while a defragmentation is running.
    fn begin(self: &Arc<Self>) -> Option<DefragmentationGuard> {
        let free = self.running.compare_exchange(false, true, Ordering::SeqCst, Ordering::SeqCst).is_ok();
        free.then(|| DefragmentationGuard(Arc::clone(self)))
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

/// True if Keyward runs a Defragment for this target itself, because other voters can take over the member's
/// calls. False if the call is passed on.
fn is_ours(gateway: &Gateway, wanted: MemberTarget) -> bool {
    let members = gateway.upstream.members.snapshot.load();
    match wanted {
        // With an unready voter, the call is passed on unchanged, unless a member is being defragmented or
        // about to be: then the call is refused here.
        MemberTarget::This(id) => {
            let voter = members.get(id).is_some_and(|member| member.role == Role::Voter);
            let rests = voters(&members).any(|member| member.maintenance.is_open());
            let taken = rests || gateway.defragmentations.is_running();
            voter && voters(&members).count() > 1 && (taken || unready(&members).is_none())
        }
        _ => voters(&members).count() > 1 || !members.absent.is_empty(),
    }
}

/// Defragments the wanted member, or all voters. `None` if the call is to be passed on, because no other
/// voter can take over the member's calls.
///
/// # Errors
/// No member, or not every member, was defragmented; or the client names an unknown member.
pub async fn serve(call: &Call<'_>, request: &UnaryRequest) -> Result<Option<PipelineResult>, Refusal> {
    let wanted = request.member_target(call)?;
    if !is_ours(call.gateway, wanted) {
        return Ok(None);
    }
    run(call, request, wanted).await.map(|answer| Some(PipelineResult::Ours(answer)))
}

/// Passes the call on. No other defragmentation begins meanwhile, if the caller may defragment.
///
/// # Errors
/// As [`Exchange::run`].
pub async fn pass_on(exchange: Exchange<'_>) -> Result<Box<MemberReply>, Refusal> {
    let _running = guard_passed_on_call(exchange.call.gateway, &exchange.user).await;
    exchange.run(None).await
}

async fn run(call: &Call<'_>, request: &UnaryRequest, wanted: MemberTarget) -> Result<Bytes, Refusal> {
    let (gateway, client, deadline) = (call.gateway, call.client, call.deadline);
    let caller = &request.caller;
    let mut registration = gateway.enter(client, caller, Some(request.decided(call)), &call.record)?;
    let (tell, told) = oneshot::channel();
    let in_use = caller.in_use();
    let forces = call.headers.get(FORCE).is_some_and(|value| value == "true");
    let user = caller.upstream_user.clone();
    let work = DefragmentJob { gateway: Rc::clone(gateway), user, deadline, forces };
    // A separate task, because a begun defragmentation continues in the member even after its client has
    // left.
    let (_waits, left) = oneshot::channel::<()>();
    let mut drain = gateway.drain.clone();
    let run = async move {
        let (tell, _in_use) = (tell, in_use);
        let work = async {
            match wanted {
                MemberTarget::This(id) => work.one(id, &tell).await,
                _ => work.all(&tell).await,
            }
        };
        let deserted = async {
            drop(left.await);
            drain.wait_for(Option::is_some).await.is_ok()
        };
        tokio::select! {
            biased; // a finished defragmentation first
            ended = work => {
                if tell.send(ended).is_err() {
                    tracing::info!("a defragmentation ended after its client had left");
                }
            }
            // The client has left and the process is draining.
            true = deserted => tracing::info!("a defragmentation is left to its member"),
        }
    };
    gateway.tasks.spawn("defragmentation", run).detach();
    let over = async {
        match client.authorization_end(caller) {
            Some((end, refusal)) => {
                end.passed().await;
                refusal
            }
            None => std::future::pending().await,
        }
    };
    let answer = tokio::select! {
        biased; // the result first, then a revoked authorization
        told = told => told.unwrap_or(Err(Refusal::SHUTTING_DOWN)),
        refusal = registration.cancelled() => Err(refusal),
        refusal = over => Err(refusal),
    };
    answer.map(|message| frame::encode(&message))
}

/// Why a member was not defragmented.
enum DefragmentFailure {
    /// A member refused a request of ours with this status.
    Refused(Status),
    /// The outcome is unknown.
    Lost,
    /// The named voter is not ready.
    NotReady(String),
    /// The client has left, or its deadline has passed.
    NoTime,
    /// Another defragmentation is running.
    Another,
}

impl From<ReadError> for DefragmentFailure {
    fn from(error: ReadError) -> Self {
        match error {
            ReadError::Refused(status) => Self::Refused(status),
            ReadError::Login(_) | ReadError::Lost | ReadError::TooLarge | ReadError::NoRoom => Self::Lost,
        }
    }
}

/// The result for the client: the member's unframed answer, or a refusal.
type DefragmentResult = Result<Bytes, Refusal>;

struct DefragmentJob {
    gateway: Rc<Gateway>,
    user: UpstreamUser,
    deadline: Option<Instant>,
    /// True if members defragmented lately are not skipped.
    forces: bool,
}

impl DefragmentJob {
    /// Defragments the member named by the client.
    async fn one(&self, id: MemberId, client: &oneshot::Sender<DefragmentResult>) -> DefragmentResult {
        let (_running, mut lock) = self.acquire_exclusive().await?;
        let members = self.gateway.upstream.members.snapshot.load_full();
        let done = match (members.get(id), unready(&members)) {
            (None, _) => Err(Refusal::NOTHING_SENT),
            (Some(member), Some(unready)) => {
                Err(refusal(&DefragmentFailure::NotReady(unready), Some(member), &[]))
            }
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

    /// Defragments all voters.
    async fn all(&self, client: &oneshot::Sender<DefragmentResult>) -> DefragmentResult {
        let (_running, mut lock) = self.acquire_exclusive().await?;
        let walked = self.walk(lock.as_mut(), client).await;
        if let Some(lock) = lock {
            lock.release().await;
        }
        walked
    }

    /// Checks the caller's permission, then takes the process's slot and, if a prefix is configured, the lock
    /// in etcd. No other defragmentation begins until both guards are dropped.
    async fn acquire_exclusive(&self) -> Result<(DefragmentationGuard, Option<DefragmentLock>), Refusal> {
        let told = |error: ReadError| refusal(&error.into(), None, &[]);
        permitted(&self.gateway.upstream, &self.user).await.map_err(told)?;
        let running = self.gateway.defragmentations.begin().ok_or(Refusal::DEFRAGMENTING)?;
        let prefix = self.gateway.config.load().maintenance.etcd_prefix.clone();
        let Some(prefix) = prefix else { return Ok((running, None)) };
        match lock::take(&self.gateway.upstream, &self.user, prefix).await.map_err(told)? {
            DefragmentLockAttempt::Ours(lock) => Ok((running, Some(lock))),
            // A full store accepts no lock key, and defragmentation may free the space.
            DefragmentLockAttempt::NoSpace => {
                tracing::warn!(
                    "etcd has no space for the lock of a defragmentation: other replicas do not know of it"
                );
                Ok((running, None))
            }
            DefragmentLockAttempt::HeldElsewhere => Err(Refusal::DEFRAGMENTING),
        }
    }

    /// True if the client is still waiting and its deadline has not passed.
    fn may_begin(&self, client: &oneshot::Sender<DefragmentResult>) -> bool {
        !client.is_closed() && self.deadline.is_none_or(|deadline| Instant::now() < deadline)
    }

    /// Defragments a single member, under the lock if held.
    async fn done(
        &self,
        member: &Arc<Member>,
        lock: Option<&mut DefragmentLock>,
        client: &oneshot::Sender<DefragmentResult>,
    ) -> Result<Bytes, DefragmentFailure> {
        let may_begin = || self.may_begin(client);
        let defragment = out_of_service::defragment(&self.gateway.upstream, &self.user, member, may_begin);
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

    async fn walk(
        &self,
        mut lock: Option<&mut DefragmentLock>,
        client: &oneshot::Sender<DefragmentResult>,
    ) -> DefragmentResult {
        let mut over = BTreeSet::new();
        if !self.forces {
            over = self.gateway.defragmentations.lately();
            if let Some(lock) = &lock {
                over.extend(lock.lately().await.map_err(|error| refusal(&error.into(), None, &[]))?);
            }
            self.log_skipped(&over);
        }
        let (mut names, mut answer) = (Vec::new(), Bytes::new());
        loop {
            let next = next(&self.gateway.upstream.members.snapshot.load(), &over);
            let Some(member) = next else { return Ok(answer) };
            let begin =
                if self.may_begin(client) { self.all_ready().await } else { Err(DefragmentFailure::NoTime) };
            let done = match begin {
                Ok(()) => self.done(&member, lock.as_deref_mut(), client).await,
                Err(trouble) => Err(trouble),
            };
            answer = done.map_err(|trouble| refusal(&trouble, Some(&member), &names))?;
            over.insert(member.id);
            names.push(Arc::clone(&member.name));
        }
    }

    /// Logs the voters that are skipped: the client gets a success also if every voter is, because
    /// `etcdctl defrag --cluster` asks once for each member, and every member has Keyward's address.
    fn log_skipped(&self, lately: &BTreeSet<MemberId>) {
        let members = self.gateway.upstream.members.snapshot.load();
        let skipped = voters(&members).filter(|member| lately.contains(&member.id));
        let skipped: Vec<String> = skipped.map(|member| member_label(&member.name, member.id)).collect();
        if !skipped.is_empty() {
            tracing::info!(
                skipped = skipped.join(", "),
                minutes = LATELY.as_secs() / 60,
                "members defragmented lately are not defragmented again; request metadata \
                 keyward-force-defragment: true does"
            );
        }
    }

    /// Waits until every voter is ready.
    async fn all_ready(&self) -> Result<(), DefragmentFailure> {
        let members = &self.gateway.upstream.members;
        let until = Instant::now() + READY;
        let until = self.deadline.map_or(until, |deadline| deadline.min(until));
        loop {
            let mut changes = members.changes.clone();
            changes.mark_unchanged();
            let Some(unready) = unready(&members.snapshot.load()) else { return Ok(()) };
            match timeout_at(until, changes.changed()).await {
                Ok(Ok(())) => {}
                Ok(Err(_)) | Err(_) => return Err(DefragmentFailure::NotReady(unready)),
            }
        }
    }
}

fn voters(members: &Membership) -> impl Iterator<Item = &Arc<Member>> {
    members.members.iter().filter(|member| member.role == Role::Voter)
}

/// Names a voter that is not ready, or a listed member without a usable address (possibly a voter). While
/// such a member is missing, slowing down a second voter could cost the quorum.
fn unready(members: &Membership) -> Option<String> {
    let known =
        voters(members).find(|member| !member.is_ready()).map(|member| member_label(&member.name, member.id));
    known.or_else(|| members.absent.first().map(|member| member_label(&member.name, member.id)))
}

/// The next voter outside `over`: followers by ID, then the leader.
fn next(members: &Membership, over: &BTreeSet<MemberId>) -> Option<Arc<Member>> {
    let left = voters(members).filter(|member| !over.contains(&member.id));
    left.min_by_key(|member| (members.leader == Some(member.id), member.id)).cloned()
}

fn member_label(name: &str, id: MemberId) -> String {
    if name.is_empty() { id.to_string() } else { format!("{name} ({id})") }
}

/// The refusal for the client. `done` has the names of the members already defragmented.
fn refusal(trouble: &DefragmentFailure, member: Option<&Member>, done: &[Arc<str>]) -> Refusal {
    let (code, why) = match trouble {
        // No member was defragmented yet: pass on the member's own status.
        DefragmentFailure::Refused(status) if done.is_empty() => return Refusal::told(status),
        DefragmentFailure::Refused(status) => (status.code, status.message.to_string()),
        DefragmentFailure::Lost => {
            (Code::Unavailable, Refusal::REQUEST_TIMED_OUT_CONNECTION_LOST.message().to_owned())
        }
        DefragmentFailure::NotReady(unready) => {
            (Code::FailedPrecondition, format!("member {unready} is not ready"))
        }
        DefragmentFailure::NoTime => return Refusal::DEADLINE_EXCEEDED,
        DefragmentFailure::Another => return Refusal::DEFRAGMENTING,
    };
    let member = member.map(|member| member_label(&member.name, member.id));
    Refusal::not_defragmented(code, member.as_deref().unwrap_or("any"), &why, &done.join(", "))
}

/// Takes the process's slot for a Defragment passed on unchanged, so that no other defragmentation begins
/// meanwhile. Only callers permitted to defragment take the slot.
async fn guard_passed_on_call(gateway: &Gateway, user: &UpstreamUser) -> Option<DefragmentationGuard> {
    permitted(&gateway.upstream, user).await.ok()?;
    gateway.defragmentations.begin()
}

/// Checks that the caller may defragment, before any member is taken out of service.
///
/// # Errors
/// The caller may not, or no member answered.
pub async fn permitted(upstream: &Rc<UpstreamClient>, user: &UpstreamUser) -> Result<(), ReadError> {
    ask_anywhere(upstream, user, USERS, &[]).await.map(drop)
}

/// Asks ready members in turn until a member answers.
async fn ask_anywhere(
    upstream: &Rc<UpstreamClient>,
    user: &UpstreamUser,
    path: &'static str,
    message: &[u8],
) -> Result<Bytes, ReadError> {
    let mut tried = Vec::new();
    loop {
        let member = upstream.choose(MemberTarget::Any, &tried).ok_or(ReadError::Lost)?;
        match own_requests::ask(upstream, user, &member, path, message).await {
            Err(ReadError::Lost | ReadError::Login(_)) if tried.len() + 1 < TRIES => tried.push(member.id),
            answered => return answered,
        }
    }
}
