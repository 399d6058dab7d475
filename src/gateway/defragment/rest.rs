//! One member freed of its calls, defragmented, and back.
//!
//! Owns: that order. Must not know: which member is next. Invariants: nobody's call goes to the member from its being freed
//! until it has read what the others have; where nobody else is ready it goes on serving; the guard goes with whoever holds
//! it, also when all of it fails.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::time::{Instant, sleep, timeout};

use super::{PATH, Trouble};
use crate::upstream::membership::{Hint, Member, MembersHandle, Readiness};
use crate::upstream::read::{self, ReadError};
use crate::upstream::send::{As, Door};
use crate::upstream::standing::Resting;

/// How long it is waited for calls under way: as long as etcd itself takes over one. A snapshot may take longer; it is slow
/// then, and nobody else.
const CALLS: Duration = Duration::from_secs(7);
/// How often it is looked whether they have ended. Two looks in a row: whoever chose the member a moment before it was freed
/// may send a moment after.
const LOOK: Duration = Duration::from_millis(10);
/// How long a member may take to serve again.
const BACK: Duration = Duration::from_secs(60);
/// The read that says so: etcd's own for health.
const KEY: &[u8] = b"health";

/// The member out of every shard's choice.
pub struct Freed {
    members: MembersHandle,
    resting: Option<Resting>,
}

impl Freed {
    /// Takes it out, unless nobody else would be left.
    #[must_use]
    pub fn new(door: &Door, member: &Arc<Member>) -> Self {
        let resting = member.rest.take();
        let members = door.members.clone();
        members.rest_changed();
        let others = members.snapshot.load().ready_voters().next().is_some();
        let freed = Self { members, resting: Some(resting) };
        // Slow is better than nobody.
        if others { freed } else { Self { members: freed.members.clone(), resting: None } }
    }

    /// Whether it is out.
    #[must_use]
    pub fn is_free(&self) -> bool {
        self.resting.is_some()
    }
}

impl Drop for Freed {
    fn drop(&mut self) {
        if self.resting.take().is_some() {
            self.members.rest_changed();
        }
    }
}

/// Frees the member, defragments it, and lets calls back once it serves. The member's answer, not framed.
pub(super) async fn defragment(
    door: &Rc<Door>,
    whom: &As,
    member: &Arc<Member>,
    may_begin: impl Fn() -> bool,
) -> Result<Bytes, Trouble> {
    let freed = Freed::new(door, member);
    if freed.is_free() && timeout(CALLS, idle(member)).await.is_err() {
        tracing::info!(member = %member.id, "calls go on at a member that is about to be defragmented");
    }
    if !may_begin() {
        return Err(Trouble::NoTime);
    }
    let began = Instant::now();
    // However long it takes: only the member knows, and the connection's pings tell when it is gone.
    let answer = read::ask_patiently(door, whom, member, PATH, &[]).await;
    tracing::debug!(member = %member.id, took = ?began.elapsed(), ok = answer.is_ok(), "defragment");
    let refused = matches!(answer, Err(ReadError::Refused(_)));
    // What was refused has not made it slow.
    if !refused && timeout(BACK, back(door, whom, member)).await.is_err() {
        let answered = answer.map(drop).map_err(Trouble::from);
        return Err(answered.err().unwrap_or(Trouble::NotReady(super::told(&member.name, member.id))));
    }
    Ok(answer?)
}

/// Waits until no call is under way at the member.
pub async fn idle(member: &Member) {
    let mut quiet = 0;
    while quiet < 2 {
        quiet = if member.rest.busy() == 0 { quiet + 1 } else { 0 };
        sleep(LOOK).await;
    }
}

/// Waits until a probe that began now has succeeded, and the member has read what the others have.
async fn back(door: &Rc<Door>, whom: &As, member: &Arc<Member>) {
    member.suspect();
    loop {
        door.members.hints.send(Hint::Unreachable(member.id));
        let known = door.members.snapshot.load().get(member.id).cloned();
        let serves =
            |known: &Arc<Member>| known.readiness == Readiness::Ready && !known.suspicion.is_raised();
        if let Some(known) = known.filter(serves) {
            match read::linearizable_revision(door, whom, &known, KEY).await {
                // What is not permitted went through the log all the same, as in `etcdctl endpoint health`.
                Ok(_) | Err(ReadError::Refused(_)) => return,
                Err(_) => {}
            }
        }
        door.members.pause_or_change(Duration::from_millis(200)).await;
    }
}
