//! Questions to etcd about a caller's permissions, asked with the caller's own credential before a call that
//! an old member would serve without the check (docs/decisions.md#d57).
//!
//! Owns: the questions, their retries at other members, and the refusal for the client. Must not know: the
//! calls in need of a question (`gateway::vulnerable_members`, `lease::renewal_permission`).
//! Invariants: etcd is the only judge, and its refusal goes to the client in etcd's form; a question never
//! changes the store, so a question is repeated freely; an unanswered question refuses the call, and nothing
//! of the call was sent.

mod under_alarm;

use std::collections::HashSet;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use prost::Message as _;
use tokio::time::{Instant, timeout};

use crate::own_requests::{ReadError, ask_at_length};
use crate::send::{UpstreamClient, UpstreamUser};
use keyward_cluster::choose::MemberTarget;
use keyward_cluster::membership::Member;
use keyward_etcd::identity::MemberId;
use keyward_etcd::pb::etcdserverpb::{
    AuthUserListRequest, LeaseLeasesResponse, LeaseTimeToLiveRequest, LeaseTimeToLiveResponse,
};
use keyward_etcd::refusal::{Code, Refusal, Status};
use keyward_etcd::rpc::method::{Effect, lookup};
use keyward_etcd::rpc::outcome::{CallProof, JudgedCall, is_trouble, translate};
use keyward_etcd::rpc::txn_permissions::{KeyAccess, KeyPermission, MOST_OPS, judge_txn};

const TXN: &str = "/etcdserverpb.KV/Txn";
const USER_LIST: &str = "/etcdserverpb.Auth/UserList";
const LEASES: &str = "/etcdserverpb.Lease/LeaseLeases";
const TIME_TO_LIVE: &str = "/etcdserverpb.Lease/LeaseTimeToLive";

/// Leases whose keys are judged one lease after the other.
const MOST_LEASES: usize = 256;
/// Members asked before the call fails.
const ROUNDS: usize = 3;
/// Time for all questions of a call: etcd's own request timeout.
const PATIENCE: Duration = Duration::from_secs(7);
/// Time for the answer of a member while another can be asked: a member that passes the question on to a lost
/// leader answers after seven seconds.
const ANSWER: Duration = Duration::from_secs(2);
/// Largest list of a lease's keys read by Keyward.
const LARGEST_ANSWER: usize = 1024 * 1024;

/// The questions of one caller.
pub struct PermissionProbe {
    /// The sender of upstream requests.
    pub upstream: Rc<UpstreamClient>,
    /// The upstream user.
    pub user: UpstreamUser,
}

/// Why a question was not answered with yes.
pub(super) enum Unproved {
    /// etcd said no.
    Denied(Status),
    /// etcd answered with a success too large to read.
    TooLarge,
    /// No member could answer.
    Unknown(Refusal),
}

impl PermissionProbe {
    /// Succeeds if the user has the root role: etcd lists the users to root only, in every version.
    ///
    /// # Errors
    /// etcd's refusal, or no member answered.
    pub async fn is_root(&self) -> Result<(), Refusal> {
        let asked = AuthUserListRequest::default().encode_to_vec();
        within_patience(async {
            match self.ask(USER_LIST, &asked, MemberTarget::Any).await {
                // The list is told to root only, however long the list is.
                Ok(_) | Err(Unproved::TooLarge) => Ok(()),
                Err(unproved) => Err(unproved),
            }
        })
        .await
    }

    /// Succeeds if the user has every permission of `needed`, and permission `on_keys` for every key attached
    /// to each of `leases`.
    ///
    /// # Errors
    /// etcd's refusal, or no member answered.
    pub async fn has(
        &self,
        needed: Vec<KeyPermission>,
        leases: &[i64],
        on_keys: KeyAccess,
    ) -> Result<(), Refusal> {
        within_patience(async {
            let mut needed = needed;
            let mut keys = HashSet::new();
            for lease in leases {
                match self.lease_keys(*lease).await {
                    Ok(attached) => keys.extend(attached),
                    // The user may not read the keys, or the keys are too many: the user's permission for the
                    // whole keyspace is enough.
                    Err(Unproved::Denied(_) | Unproved::TooLarge) => {
                        self.judge(&[KeyPermission::of_everything(on_keys)]).await?;
                    }
                    Err(unknown) => return Err(unknown),
                }
            }
            // Root, and whoever may do everything, needs no question for each key.
            let all = [KeyPermission::of_everything(on_keys)];
            if keys.len() <= MOST_OPS || self.judge(&all).await.is_err() {
                needed.extend(keys.into_iter().map(|key| KeyPermission::of_key(on_keys, key)));
            }
            for questions in needed.chunks(MOST_OPS) {
                self.judge(questions).await?;
            }
            Ok(())
        })
        .await
    }

    /// Succeeds if the user may read the keys of all leases, as a patched etcd requires of whoever lists the
    /// leases. A user without permission for the whole keyspace is judged by the keys of at most
    /// `MOST_LEASES` leases, and refused if there are more.
    ///
    /// # Errors
    /// etcd's refusal, or no member answered.
    pub async fn may_list_leases(&self) -> Result<(), Refusal> {
        let denied =
            match self.has(vec![KeyPermission::of_everything(KeyAccess::Read)], &[], KeyAccess::Read).await {
                Err(refusal) if refusal.code() == Code::PermissionDenied => refusal,
                proved => return proved,
            };
        let listed = self.ask(LEASES, &[], MemberTarget::LeaderFirst);
        match timeout(PATIENCE, listed).await {
            Ok(Ok(answer)) => {
                let answer = LeaseLeasesResponse::decode(answer).map_err(|_unreadable| denied.clone())?;
                let leases: Vec<i64> = answer.leases.iter().map(|lease| lease.id).collect();
                if leases.len() > MOST_LEASES {
                    return Err(denied);
                }
                self.has(Vec::new(), &leases, KeyAccess::Read).await
            }
            Ok(Err(Unproved::Denied(_) | Unproved::TooLarge)) => Err(denied),
            Ok(Err(Unproved::Unknown(refusal))) => Err(refusal),
            Err(_elapsed) => Err(Refusal::NOTHING_SENT),
        }
    }

    /// The keys attached to a lease; none for an unknown lease.
    ///
    /// # Errors
    /// etcd's refusal (newer versions tell the keys only to a user with permission to read all of them), more
    /// keys than Keyward reads, or no member answered.
    pub async fn keys_of_lease(&self, lease: i64) -> Result<Vec<Bytes>, Refusal> {
        within_patience(self.lease_keys(lease)).await
    }

    async fn judge(&self, needed: &[KeyPermission]) -> Result<(), Unproved> {
        self.ask(TXN, &judge_txn(needed), MemberTarget::Any).await.map(drop)
    }

    /// The keys attached to a lease; none for an unknown lease.
    async fn lease_keys(&self, lease: i64) -> Result<Vec<Bytes>, Unproved> {
        let asked = LeaseTimeToLiveRequest { id: lease, keys: true }.encode_to_vec();
        let answer = self.ask(TIME_TO_LIVE, &asked, MemberTarget::LeaderFirst).await?;
        let answer = LeaseTimeToLiveResponse::decode(answer);
        Ok(answer.map_err(|_unreadable| Unproved::Unknown(Refusal::NOTHING_SENT))?.keys)
    }

    /// Asks one member, and after a failure of the member, or without its answer in time, another.
    async fn ask(&self, path: &'static str, message: &[u8], wanted: MemberTarget) -> Result<Bytes, Unproved> {
        self.ask_at_length(path, message, wanted, LARGEST_ANSWER).await
    }

    /// As `ask`, for an answer of up to `largest` bytes.
    pub(super) async fn ask_at_length(
        &self,
        path: &'static str,
        message: &[u8],
        wanted: MemberTarget,
        largest: usize,
    ) -> Result<Bytes, Unproved> {
        let mut tried: Vec<MemberId> = Vec::new();
        let mut last = Refusal::NO_LEADER;
        while tried.len() < ROUNDS {
            let Some(member) = self.choose(wanted, &tried) else { break };
            tried.push(member.id);
            let asking = ask_at_length(&self.upstream, &self.user, &member, path, message, largest);
            let answer = match self.choose(wanted, &tried) {
                Some(_another) if tried.len() < ROUNDS => {
                    timeout(ANSWER, asking).await.unwrap_or(Err(ReadError::Lost))
                }
                _ => asking.await,
            };
            match answer {
                Ok(answer) => return Ok(answer),
                Err(ReadError::Refused(status)) if !is_trouble(&status) => {
                    return Err(Unproved::Denied(in_etcds_form(path, status)));
                }
                Err(ReadError::Refused(status)) => last = Refusal::told(&status),
                Err(ReadError::Login(failure)) if failure.is_refusal() => {
                    return Err(Unproved::Unknown(Refusal::INVALID_AUTH_TOKEN));
                }
                Err(ReadError::TooLarge) => return Err(Unproved::TooLarge),
                Err(ReadError::NoRoom) => return Err(Unproved::Unknown(Refusal::TOO_MANY_REQUESTS)),
                Err(ReadError::Login(_) | ReadError::Lost) => last = Refusal::NOTHING_SENT,
            }
        }
        Err(Unproved::Unknown(last))
    }

    fn choose(&self, wanted: MemberTarget, tried: &[MemberId]) -> Option<Arc<Member>> {
        let members = self.upstream.members.snapshot.load();
        self.upstream.choose_for_call(&members, wanted, tried, Instant::now())
    }
}

/// The status in the form of a patched etcd: old members send some texts unmapped.
fn in_etcds_form(path: &str, status: Status) -> Status {
    let Some(method) = lookup(path) else { return status };
    let asked = JudgedCall { method, effect: Effect::ReadOnly, proof: CallProof::NoToken };
    translate(&asked, &status, false).unwrap_or(status)
}

async fn within_patience<T>(asking: impl Future<Output = Result<T, Unproved>>) -> Result<T, Refusal> {
    match timeout(PATIENCE, asking).await {
        Ok(Ok(proved)) => Ok(proved),
        Ok(Err(Unproved::Denied(status))) => Err(Refusal::told(&status)),
        Ok(Err(Unproved::Unknown(refusal))) => Err(refusal),
        // What was not read stays unjudged.
        Ok(Err(Unproved::TooLarge)) => Err(Refusal::PERMISSION_DENIED),
        Err(_elapsed) => Err(Refusal::NOTHING_SENT),
    }
}
