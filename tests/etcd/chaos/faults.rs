//! What happens to the cluster: members killed and stopped, roles changed, history compacted.
//!
//! Owns: doing it, and remembering when. Must not know what watches make of it. Invariants: one member is away at a time, and back
//! before the next one goes; nothing is compacted that the oracle has not recorded of every member; a right that is taken away is
//! given back.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::time::Duration;

use keyward::pb::authpb::Permission;
use keyward::pb::authpb::permission::Type;
use keyward::pb::etcdserverpb::{
    AuthRoleAddRequest, AuthRoleDeleteRequest, AuthRoleGrantPermissionRequest,
    AuthRoleRevokePermissionRequest, CompactionRequest,
};
use tokio::time::{Instant, sleep, sleep_until};
use tonic::{Code, Status};

use super::door::{Door, within};
use super::history::{Compaction, Denial};
use super::oracle::Oracle;
use super::record::Range;
use super::seeded::Rng;
use super::writers::REVOCABLE;
use crate::harness::keyward::Keyward;
use crate::harness::{Cluster, wait};
use crate::steady::{resumes, unix_ms};

/// From one fault to the next.
const EVERY: Duration = Duration::from_secs(10);
/// How long a member is away, in milliseconds.
const AWAY: (usize, usize) = (2_000, 6_000);
/// One fault in so many comes while a right is missing.
const DENIED_EVERY: usize = 3;
const COMPACT_EVERY: Duration = Duration::from_secs(15);
const ROLES_EVERY: Duration = Duration::from_secs(3);
/// For an administrator's call to go through while there is no leader.
const LIMIT: Duration = Duration::from_secs(60);
const AGAIN: Duration = Duration::from_millis(200);
/// The role of the user whose right comes and goes.
pub(crate) const REVOCABLE_ROLE: &str = "rr";

/// One fault.
#[derive(Clone, Debug)]
pub(crate) struct Fault {
    /// When it began, in milliseconds of the system's clock.
    pub(crate) at: i64,
    pub(crate) kind: Kind,
    pub(crate) member: usize,
    pub(crate) led: bool,
    /// How many of Keyward's watches the member carried, by its own count.
    pub(crate) carried: usize,
    /// How many upstream streams Keyward opened to go on, from this fault until the next.
    pub(crate) resumes: f64,
    pub(crate) denied: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// SIGKILL, and started again.
    Killed,
    /// SIGSTOP, and SIGCONT.
    Stopped,
}

/// Makes faults until the time is over, and returns when all members are back.
pub(crate) async fn faults(
    cluster: &mut Cluster,
    keyward: &Keyward,
    root: &Door,
    mut rng: Rng,
    length: Duration,
) -> (Vec<Fault>, Vec<Denial>) {
    let (mut faults, mut denials): (Vec<Fault>, Vec<Denial>) = (Vec::new(), Vec::new());
    let begun = Instant::now();
    let mut next = Duration::ZERO;
    while next < length {
        sleep_until(begun + next).await;
        next += EVERY;
        let before = resumes(keyward).await[0];
        count(&mut faults, before);
        let denied = faults.len() % DENIED_EVERY == 1;
        let from = unix_ms();
        if denied {
            revoke(root).await;
        }
        // A stopped member may come back before its streams leave it: one kill at least, also in a short run.
        let kind = if rng.percent(60) || faults.is_empty() { Kind::Killed } else { Kind::Stopped };
        let (member, carried) = victim(cluster, &mut rng).await;
        let led = cluster.leader().await == member;
        faults.push(Fault { at: unix_ms(), kind, member, led, carried, resumes: before, denied });
        let away = Duration::from_millis((AWAY.0 + rng.below(AWAY.1 - AWAY.0)) as u64);
        match kind {
            Kind::Killed => cluster.kill(member),
            Kind::Stopped => cluster.stop(member),
        }
        sleep(away).await;
        match kind {
            Kind::Killed => cluster.restart(member).await,
            Kind::Stopped => cluster.resume(member),
        }
        cluster.serving(member).await;
        if denied {
            grant(root).await;
            denials.push(Denial { from, to: unix_ms() });
        }
    }
    sleep_until(begun + length).await;
    count(&mut faults, resumes(keyward).await[0]);
    (faults, denials)
}

/// The last fault is over: what was counted before it becomes what was counted since.
fn count(faults: &mut [Fault], now: f64) {
    if let Some(last) = faults.last_mut() {
        last.resumes = now - last.resumes;
    }
}

/// Any member that carries watches: a fault of another shows nothing.
async fn victim(cluster: &Cluster, rng: &mut Rng) -> (usize, usize) {
    let mut all = Vec::new();
    for member in 0..cluster.len() {
        all.push((member, carried(cluster, member).await));
    }
    all.retain(|(_, carried)| *carried > 0);
    *rng.one_of(&all)
}

/// The watches that Keyward has on this member; one more is the oracle's.
async fn carried(cluster: &Cluster, member: usize) -> usize {
    let all = cluster.counter(member, "etcd_debugging_mvcc_watcher_total", &[]).await - 1.0;
    (0..).take_while(|n| f64::from(*n) < all).count()
}

/// Compacts now and then; each compaction stands in the list from before it is asked for.
pub(crate) async fn compact(
    root: Door,
    oracle: Arc<Oracle>,
    newest: Arc<AtomicI64>,
    writing: Arc<AtomicBool>,
) -> Vec<Compaction> {
    let mut compactions: Vec<Compaction> = Vec::new();
    let mut next = Instant::now() + COMPACT_EVERY / 2;
    while writing.load(Ordering::Relaxed) {
        if Instant::now() < next {
            sleep(AGAIN).await;
            continue;
        }
        next += COMPACT_EVERY;
        let last = compactions.last().map_or(0, |compaction| compaction.revision);
        let Some(revision) = oracle.compactable().filter(|revision| *revision > last) else { continue };
        compactions.push(Compaction { revision, at: unix_ms() });
        newest.store(revision, Ordering::Relaxed);
        let asked = async || within(root.kv().compact(CompactionRequest { revision, physical: false })).await;
        // Compacted already: an earlier try was done after all.
        carried_out("a compaction", Code::OutOfRange, async || asked().await.map(drop)).await;
    }
    compactions
}

/// Changes roles that no watch needs, all the time.
pub(crate) async fn roles(root: Door, writing: Arc<AtomicBool>) -> usize {
    let mut changes = 0;
    let mut next = Instant::now();
    while writing.load(Ordering::Relaxed) {
        if Instant::now() < next {
            sleep(AGAIN).await;
            continue;
        }
        next += ROLES_EVERY;
        let name = "other".to_owned();
        carried_out("a role", Code::FailedPrecondition, async || {
            within(root.auth().role_add(AuthRoleAddRequest { name: name.clone() })).await.map(drop)
        })
        .await;
        permit(&root, &name, "/o/").await;
        carried_out("a role's end", Code::FailedPrecondition, async || {
            within(root.auth().role_delete(AuthRoleDeleteRequest { role: name.clone() })).await.map(drop)
        })
        .await;
        changes += 3;
    }
    changes
}

/// Gives back what [`revoke`] took.
async fn grant(root: &Door) {
    permit(root, REVOCABLE_ROLE, REVOCABLE).await;
}

async fn permit(root: &Door, role: &str, prefix: &str) {
    let Range { key, end } = Range::prefix(prefix);
    let perm = Permission { perm_type: Type::Read.into(), key: key.into(), range_end: end.into() };
    let request = AuthRoleGrantPermissionRequest { name: role.into(), perm: Some(perm) };
    carried_out("a grant", Code::Ok, async || {
        within(root.auth().role_grant_permission(request.clone())).await.map(drop)
    })
    .await;
}

async fn revoke(root: &Door) {
    let Range { key, end } = Range::prefix(REVOCABLE);
    let request = AuthRoleRevokePermissionRequest {
        role: REVOCABLE_ROLE.into(),
        key: key.into(),
        range_end: end.into(),
    };
    // Refused where an earlier try was done after all: there is no such permission.
    carried_out("a revocation", Code::FailedPrecondition, async || {
        within(root.auth().role_revoke_permission(request.clone())).await.map(drop)
    })
    .await;
}

/// Asks until it is done; `done` is how etcd says that it is done already.
async fn carried_out(what: &str, done: Code, call: impl AsyncFn() -> Result<(), Status>) {
    let tried = async || match call().await {
        Ok(()) => Some(()),
        Err(status) if status.code() == done => Some(()),
        Err(status) => {
            let again = matches!(status.code(), Code::Unavailable | Code::DeadlineExceeded | Code::Unknown);
            assert!(again, "{what}: {status:?}");
            None
        }
    };
    wait::until(LIMIT, what, tried).await;
}
