//! Coordination of defragmentations between replicas, by keys in etcd.
//!
//! Owns: the keys `PREFIX` + `defragment/lock`, bound to a lease, and `PREFIX` + `defragment/done/ID`, which
//! records a defragmented member for ten minutes. Must not know: the work done under the lock. Invariants:
//! every request is made as the caller's user, because a user permitted to defragment may write every key;
//! after the lock is lost, no further defragmentation begins; a lock that cannot be renewed expires within a
//! minute.

use std::collections::BTreeSet;
use std::future::Future;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use prost::Message;
use tokio::time::{MissedTickBehavior, interval};

use super::{DefragmentFailure, LATELY, ask_anywhere};
use keyward_etcd::identity::MemberId;
use keyward_etcd::pb::etcdserverpb::compare::{CompareResult, CompareTarget, TargetUnion};
use keyward_etcd::pb::etcdserverpb::request_op::Request;
use keyward_etcd::pb::etcdserverpb::response_op::Response;
use keyward_etcd::pb::etcdserverpb::{
    Compare, LeaseGrantRequest, LeaseGrantResponse, LeaseRevokeRequest, PutRequest, RangeRequest,
    RangeResponse, RequestOp, TxnRequest, TxnResponse,
};
use keyward_etcd::refusal::{Code, Status};
use keyward_upstream::own_requests::ReadError;
use keyward_upstream::send::{UpstreamClient, UpstreamUser};

const GRANT: &str = "/etcdserverpb.Lease/LeaseGrant";
const REVOKE: &str = "/etcdserverpb.Lease/LeaseRevoke";
const TXN: &str = "/etcdserverpb.KV/Txn";
const PUT: &str = "/etcdserverpb.KV/Put";
const RANGE: &str = "/etcdserverpb.KV/Range";
const NO_SPACE: &str = "etcdserver: mvcc: database space exceeded";

/// How long a lock outlives its replica.
const TTL: Duration = Duration::from_secs(60);

/// The result of trying to take the lock.
pub(super) enum DefragmentLockAttempt {
    /// The lock was taken.
    Ours(DefragmentLock),
    /// Another replica holds the lock.
    HeldElsewhere,
    /// The store is full and accepts no key.
    NoSpace,
}

/// The lock, held by this replica.
pub(super) struct DefragmentLock {
    upstream: Rc<UpstreamClient>,
    user: UpstreamUser,
    prefix: Arc<str>,
    /// The key's value, unique to this holder.
    mark: Bytes,
    lease: i64,
}

/// Takes the lock if free.
///
/// # Errors
/// A member refused the request, or no member answered.
pub(super) async fn take(
    upstream: &Rc<UpstreamClient>,
    user: &UpstreamUser,
    prefix: Arc<str>,
) -> Result<DefragmentLockAttempt, ReadError> {
    let granted = grant(upstream, user, TTL).await;
    let lease = match granted {
        Err(ReadError::Refused(status)) if is_full(&status) => return Ok(DefragmentLockAttempt::NoSpace),
        granted => granted?,
    };
    let mark = Bytes::from(format!("{lease:x}"));
    let lock = DefragmentLock { upstream: Rc::clone(upstream), user: user.clone(), prefix, mark, lease };
    let free = Compare {
        result: CompareResult::Equal.into(),
        target: CompareTarget::Create.into(),
        key: lock.key(),
        target_union: Some(TargetUnion::CreateRevision(0)),
        ..Compare::default()
    };
    let look = RangeRequest { key: lock.key(), ..RangeRequest::default() };
    let answer = match lock.txn(free, lease, Some(look)).await {
        Err(ReadError::Refused(status)) if is_full(&status) => return Ok(DefragmentLockAttempt::NoSpace),
        answer => answer?,
    };
    // An earlier try whose answer was lost may have taken the lock.
    let holds = |response: &Response| match response {
        Response::ResponseRange(range) => range.kvs.iter().any(|kv| kv.value == lock.mark),
        _ => false,
    };
    let ours = answer.responses.iter().filter_map(|op| op.response.as_ref()).any(holds);
    if answer.succeeded || ours {
        return Ok(DefragmentLockAttempt::Ours(lock));
    }
    lock.release().await;
    Ok(DefragmentLockAttempt::HeldElsewhere)
}

impl DefragmentLock {
    fn key(&self) -> Bytes {
        format!("{}defragment/lock", self.prefix).into()
    }

    fn done(&self) -> String {
        format!("{}defragment/done/", self.prefix)
    }

    /// Puts the lock key with `lease` if `compare` holds, else runs the `otherwise` read.
    async fn txn(
        &self,
        compare: Compare,
        lease: i64,
        otherwise: Option<RangeRequest>,
    ) -> Result<TxnResponse, ReadError> {
        let put = PutRequest { key: self.key(), value: self.mark.clone(), lease, ..PutRequest::default() };
        let op = |request| RequestOp { request: Some(request) };
        let txn = TxnRequest {
            compare: vec![compare],
            success: vec![op(Request::RequestPut(put))],
            failure: otherwise.map(Request::RequestRange).map(op).into_iter().collect(),
        };
        self.ask(TXN, &txn).await
    }

    async fn ask<T: Message + Default>(
        &self,
        path: &'static str,
        message: &impl Message,
    ) -> Result<T, ReadError> {
        ask(&self.upstream, &self.user, path, message).await
    }

    /// The members recently defragmented by any replica.
    ///
    /// # Errors
    /// The keys could not be read.
    pub(super) async fn lately(&self) -> Result<BTreeSet<MemberId>, ReadError> {
        let prefix = self.done();
        // All hexadecimal digits sort before the tilde.
        let all = RangeRequest {
            key: prefix.clone().into(),
            range_end: format!("{prefix}~").into(),
            keys_only: true,
            ..RangeRequest::default()
        };
        let found: RangeResponse = self.ask(RANGE, &all).await?;
        let id = |key: &Bytes| {
            let id = std::str::from_utf8(key.get(prefix.len()..)?).ok()?;
            u64::from_str_radix(id, 16).ok().map(MemberId)
        };
        Ok(found.kvs.iter().filter_map(|kv| id(&kv.key)).collect())
    }

    /// Records a defragmented member. A failure is harmless: the member may only be defragmented again too
    /// early.
    pub(super) async fn note(&self, member: MemberId) {
        let noted = async {
            let lease = grant(&self.upstream, &self.user, LATELY).await?;
            let key = format!("{}{member}", self.done()).into();
            let put = PutRequest { key, lease, ..PutRequest::default() };
            ask::<keyward_etcd::pb::etcdserverpb::PutResponse>(&self.upstream, &self.user, PUT, &put)
                .await
                .map(drop)
        };
        if let Err(error) = noted.await {
            tracing::info!(%member, %error, "the list of defragmented members could not be written");
        }
    }

    /// Renews the lock while `work` runs. `work`, once begun, runs to its end.
    ///
    /// # Errors
    /// [`DefragmentFailure::Another`]: the lock was lost before `work` began.
    pub(super) async fn held_while<T>(
        &mut self,
        work: impl Future<Output = T>,
    ) -> Result<T, DefragmentFailure> {
        match self.renewed().await {
            Ok(true) => {}
            Ok(false) => return Err(DefragmentFailure::Another),
            // The store filled up after the lock was taken; the defragmentation may free the space.
            Err(ReadError::Refused(status)) if is_full(&status) => tracing::warn!(
                "etcd has no space to keep the lock of a defragmentation: other replicas may not know of it"
            ),
            Err(error) => return Err(error.into()),
        }
        let mut work = pin!(work);
        let mut turns = interval(TTL / 3);
        turns.set_missed_tick_behavior(MissedTickBehavior::Delay);
        turns.tick().await;
        loop {
            tokio::select! {
                biased; // a finished defragmentation first
                done = &mut work => return Ok(done),
                _ = turns.tick() => match self.renewed().await {
                    Ok(true) => {}
                    Ok(false) => tracing::warn!(
                        "the lock of a defragmentation was lost while a member is under way"
                    ),
                    Err(error) => tracing::info!(%error, "the lock of a defragmentation could not be kept"),
                },
            }
        }
    }

    /// Binds the lock to a new lease of a full TTL. Returns false if another replica holds the lock.
    async fn renewed(&mut self) -> Result<bool, ReadError> {
        let lease = grant(&self.upstream, &self.user, TTL).await?;
        let ours = Compare {
            result: CompareResult::Equal.into(),
            target: CompareTarget::Value.into(),
            key: self.key(),
            target_union: Some(TargetUnion::Value(self.mark.clone())),
            ..Compare::default()
        };
        let kept = self.txn(ours, lease, None).await?.succeeded;
        self.lease = lease;
        Ok(kept)
    }

    /// Releases the lock. After a failure the lock expires with its lease.
    pub(super) async fn release(self) {
        let revoke = LeaseRevokeRequest { id: self.lease };
        let revoked: Result<keyward_etcd::pb::etcdserverpb::LeaseRevokeResponse, _> =
            self.ask(REVOKE, &revoke).await;
        if let Err(error) = revoked {
            tracing::info!(%error, "the lock of a defragmentation ends by itself, in a minute");
        }
    }
}

async fn grant(upstream: &Rc<UpstreamClient>, user: &UpstreamUser, ttl: Duration) -> Result<i64, ReadError> {
    let ttl = i64::try_from(ttl.as_secs()).unwrap_or(i64::MAX);
    let granted: LeaseGrantResponse = ask(upstream, user, GRANT, &LeaseGrantRequest { ttl, id: 0 }).await?;
    Ok(granted.id)
}

async fn ask<T: Message + Default>(
    upstream: &Rc<UpstreamClient>,
    user: &UpstreamUser,
    path: &'static str,
    message: &impl Message,
) -> Result<T, ReadError> {
    let answer = ask_anywhere(upstream, user, path, &message.encode_to_vec()).await?;
    T::decode(answer).map_err(|_unreadable| ReadError::Lost)
}

/// True for etcd's error of a full store, recognized by etcd's own text.
fn is_full(status: &Status) -> bool {
    status.code == Code::ResourceExhausted && status.message == NO_SPACE
}
