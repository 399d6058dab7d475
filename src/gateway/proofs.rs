//! Passwords that nobody upstream looks at any more, under what lives by them.
//!
//! Owns: when such a session is proved once more, and ending what lives by one that is refused. Must not know: how a password
//! is proved. Invariants (rules 12): while users and roles at etcd, and the users file, are what they were when a session was
//! proved, it is not proved again; where it cannot be told, it is proved now and then; what nobody can say ends nothing.

use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream;
use tokio::time::{Instant, sleep, timeout};

use crate::config::Passwords;
use crate::downstream::session::{Session, SessionId};
use crate::gateway::Gateway;
use crate::gateway::exchange::PATIENCE;
use crate::gateway::live::Life;
use crate::gateway::login::sources::{Denied, Proved};
use crate::identity::ClusterId;
use crate::refusal::Refusal;

/// How often it is looked whether something has changed.
const LOOK: Duration = Duration::from_secs(1);
/// How long a proof counts while no member shows the auth revision.
const UNSEEN: Duration = Duration::from_secs(10);
/// Proofs under way at a time, of one shard: each member has its own limit beside it.
const AT_A_TIME: usize = 16;

/// What a session was proved against.
#[derive(Clone)]
pub struct Against {
    /// etcd's auth revision; 0 where it was not known.
    revision: u64,
    /// Revisions of two clusters say nothing of each other.
    cluster: Option<ClusterId>,
    passwords: Arc<Passwords>,
    at: Instant,
}

impl Against {
    /// What holds for a proof that begins now.
    #[must_use]
    pub fn now(gateway: &Gateway) -> Self {
        let logins = &gateway.logins;
        Self {
            revision: logins.moves().settled(),
            cluster: gateway.door.members.snapshot.load().cluster,
            passwords: logins.passwords(),
            at: Instant::now(),
        }
    }

    /// What holds for a proof of which it is not known when it was made: it is to be made anew.
    #[must_use]
    pub fn unknown(gateway: &Gateway) -> Self {
        Self { revision: 0, ..Self::now(gateway) }
    }

    /// Whether that is past: `revision` is what members show now, `cluster` whose.
    fn is_past(&self, revision: Option<u64>, cluster: Option<ClusterId>, passwords: &Arc<Passwords>) -> bool {
        let changed = revision.map_or(self.at.elapsed() >= UNSEEN, |revision| revision != self.revision);
        changed || cluster != self.cluster || !Arc::ptr_eq(&self.passwords, passwords)
    }
}

/// Proves again what is due, until dropped.
pub async fn follow(gateway: Rc<Gateway>) {
    loop {
        let lives = gateway.live.by_passwords();
        if lives.is_empty() {
            // A clock that nobody needs stands still.
            gateway.live.began_by_password().await;
        } else {
            let revision = gateway.logins.moves().current().await;
            prove(&gateway, lives, revision).await;
            // Shards that began together do not ask together.
            let jitter = gateway.door.chooser.draw(u64::try_from(LOOK.as_millis() / 4).unwrap_or(u64::MAX));
            sleep(LOOK - LOOK / 4 + Duration::from_millis(jitter)).await;
        }
    }
}

/// Proves each session once that one of these lives by and that is due.
async fn prove(gateway: &Gateway, lives: Vec<Rc<Life>>, revision: Option<u64>) {
    let passwords = gateway.logins.passwords();
    let cluster = gateway.door.members.snapshot.load().cluster;
    let mut due: HashMap<SessionId, (Rc<Session>, Vec<Rc<Life>>)> = HashMap::new();
    for life in lives {
        let is_past = |against: &Against| against.is_past(revision, cluster, &passwords);
        let is_due = life.against.borrow().as_ref().is_some_and(is_past);
        if let Some(session) = life.caller.session().filter(|_| is_due) {
            due.entry(session.id).or_insert_with(|| (Rc::clone(session), Vec::new())).1.push(life);
        }
    }
    let proofs = stream::iter(due.into_values()).for_each_concurrent(AT_A_TIME, async |(session, lives)| {
        let against = Against::now(gateway);
        let proved = timeout(PATIENCE, gateway.logins.prove_now(&session)).await;
        let proved = proved.unwrap_or(Err(Denied::Untold));
        for life in lives {
            let ended = match proved {
                Ok(Proved::Etcd | Proved::Nothing) => None,
                // The user has moved into the users file, and is whom the rules say of that.
                Ok(Proved::File(_)) => gateway.callers.stands_by_file(gateway, &life).err(),
                Err(Denied::WrongPassword | Denied::NoPassword) => Some(Refusal::INVALID_AUTH_TOKEN),
                // What it was proved against stays past: it is asked again at the next look.
                Err(Denied::Untold | Denied::Limited) => continue,
            };
            match ended {
                None => *life.against.borrow_mut() = Some(against.clone()),
                Some(refusal) => {
                    gateway.live.end(&life, refusal);
                }
            }
        }
    });
    proofs.await;
}
