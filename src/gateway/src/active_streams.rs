//! The register of active streams and waiting calls, which may outlive the authorization granted at their
//! start.
//!
//! Owns: this shard's register, when entries are authorized again, and ending entries no longer authorized.
//! Must not know: the reason for losing authorization (`caller::again`), the work of the streams. Invariants
//! (docs/decisions.md#d29): an entry is registered first and authorized afterwards, so every change of rules
//! either finds the entry or is seen by the authorization; the register belongs to a single thread, so no
//! lock is taken; entries not affected by a change continue.

use std::cell::{Cell, OnceCell, RefCell};
use std::collections::HashMap;
use std::future::poll_fn;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use tokio::sync::{Notify, oneshot};
use tokio::time::Instant;

use crate::access_log::AccessRecord;
use crate::caller::Caller;
use crate::permission::DecidedRequest;
use crate::proof_basis::ProofBasis;
use crate::{ClientConnection, Gateway};
use keyward_access::policy::live_permits::LivePermits;
use keyward_access::usage::caller_usage::CallerUsage;
use keyward_access::usage::live_usage::LiveUsage;
use keyward_etcd::refusal::Refusal;
use keyward_streams::lease::renewed_leases::RenewedLeases;
use keyward_streams::watch::shared_session::WatchSessionHandle;

/// Entries authorized again before yielding to other tasks; each takes some microseconds.
const AT_A_TIME: usize = 64;

/// The active streams and waiting calls of a shard.
#[derive(Default)]
pub struct ActiveStreams {
    entries: RefCell<HashMap<u64, ActiveStreamEntry>>,
    next: Cell<u64>,
    by_password: Notify,
}

struct ActiveStreamEntry {
    life: Rc<ActiveStream>,
    cut: oneshot::Sender<Refusal>,
}

/// The identity under which a stream or waiting call runs.
pub struct ActiveStream {
    /// The client connection.
    pub client: Rc<ClientConnection>,
    /// The caller and the upstream user.
    pub caller: Rc<Caller>,
    /// The user's revocation generation at the start: a later generation ends the entry. `None` for a caller
    /// without a user.
    pub generation: Option<u64>,
    /// The state against which the session's password was proved, if no member checks the password.
    pub proof_basis: RefCell<Option<ProofBasis>>,
    /// The caller's permissions.
    pub permits: Rc<LivePermits>,
    /// The request to be decided again after a change of the policy.
    pub request: Option<DecidedRequest>,
    /// The caller's limits; `None` for a call that no limit can count.
    pub usage: Option<Rc<LiveUsage>>,
    /// What the stream does, for an operator's questions.
    pub work: OnceCell<StreamWork>,
    number: u64,
}

/// The work of a stream, seen by an operator's questions on the stream's own shard.
pub enum StreamWork {
    /// A Watch stream.
    Watch(WatchSessionHandle),
    /// A LeaseKeepAlive stream.
    KeepAlive(Rc<RenewedLeases>),
}

/// A registration, removed when dropped.
#[must_use = "what has no place in the register outlives what let it in"]
pub struct Registration(Option<RegistrationEntry>);

struct RegistrationEntry {
    live: Rc<ActiveStreams>,
    permits: Rc<LivePermits>,
    number: u64,
    cut: oneshot::Receiver<Refusal>,
}

impl Gateway {
    /// Registers a stream or waiting call of `caller`, then checks the authorization again. `request` is
    /// decided again after every change of the policy; a stream of requests decides by the registration's
    /// permissions itself. `record` has the limits that count the call.
    ///
    /// # Errors
    /// The caller is not authorized any more.
    pub fn enter(
        &self,
        client: &Rc<ClientConnection>,
        caller: &Rc<Caller>,
        request: Option<DecidedRequest>,
        record: &AccessRecord,
    ) -> Result<Registration, Refusal> {
        if client.activity().is_kicked() {
            return Err(Refusal::KICKED);
        }
        let generation = self.callers.generation(self, caller)?;
        let against = caller.needs_recheck.then(|| ProofBasis::now(self));
        let life = Rc::new(ActiveStream {
            client: Rc::clone(client),
            caller: Rc::clone(caller),
            generation,
            proof_basis: RefCell::new(against),
            permits: Rc::new(LivePermits::new(Rc::clone(self.callers.permits(caller, client)))),
            request,
            usage: record.live_usage(),
            work: OnceCell::new(),
            number: self.active_streams.next.replace(self.active_streams.next.get() + 1),
        });
        let registration = self.active_streams.register(&life);
        self.callers.may_continue(self, &life).map(|()| registration)
    }
}

impl ActiveStream {
    /// Counts the stream and what it holds by `usage`, the caller's limits from now on.
    pub fn replace_usage(&self, usage: Option<&Rc<CallerUsage>>) {
        let Some(live) = &self.usage else { return };
        if live.replace(usage.cloned()) {
            self.permits.wake();
        }
        if let (Some(usage), Some(StreamWork::KeepAlive(renewed))) = (usage, self.work.get()) {
            renewed.live_for(Instant::now()).for_each(|(lease, ttl)| usage.note_renewal(lease, ttl));
        }
    }

    /// Starts or stops re-proving the session's password here. `here` is true if no member checks the
    /// password; reloading the `[[user]]` rows may change this under a running stream.
    pub fn set_password_recheck(&self, gateway: &Gateway, here: bool) {
        let mut against = self.proof_basis.borrow_mut();
        if !here {
            *against = None;
        } else if against.is_none() {
            // The member's verdict on the password, and its time, are unknown here.
            *against = Some(ProofBasis::unknown(gateway));
            gateway.active_streams.by_password.notify_one();
        }
    }
}

impl ActiveStreams {
    fn register(self: &Rc<Self>, life: &Rc<ActiveStream>) -> Registration {
        let (cut, when_cut) = oneshot::channel();
        self.entries.borrow_mut().insert(life.number, ActiveStreamEntry { life: Rc::clone(life), cut });
        if life.proof_basis.borrow().is_some() {
            self.by_password.notify_one();
        }
        Registration(Some(RegistrationEntry {
            live: Rc::clone(self),
            permits: Rc::clone(&life.permits),
            number: life.number,
            cut: when_cut,
        }))
    }

    /// The entries whose session password is not checked by any member.
    #[must_use]
    pub fn with_unchecked_passwords(&self) -> Vec<Rc<ActiveStream>> {
        let entries = self.entries.borrow();
        entries
            .values()
            .map(|entry| &entry.life)
            .filter(|life| life.proof_basis.borrow().is_some())
            .map(Rc::clone)
            .collect()
    }

    /// The numbers of all entries.
    #[must_use]
    pub fn numbers(&self) -> Vec<u64> {
        self.entries.borrow().keys().copied().collect()
    }

    /// The entry with this number.
    #[must_use]
    pub fn get(&self, number: u64) -> Option<Rc<ActiveStream>> {
        self.entries.borrow().get(&number).map(|entry| Rc::clone(&entry.life))
    }

    /// Ends every entry of a connection. Returns their number.
    pub fn end_of_client(&self, client: &ClientConnection, refusal: &Refusal) -> u64 {
        let id = client.origin.figures.id;
        let of_client: Vec<Rc<ActiveStream>> = {
            let entries = self.entries.borrow();
            let lives = entries.values().map(|entry| &entry.life);
            lives.filter(|life| life.client.origin.figures.id == id).map(Rc::clone).collect()
        };
        of_client.iter().map(|life| u64::from(self.end(life, refusal.clone()))).sum()
    }

    /// Waits until an entry with a password not checked by any member begins.
    pub async fn wait_for_unchecked_password(&self) {
        self.by_password.notified().await;
    }

    /// Authorizes every entry again and ends the entries without authorization. Returns the number of ended
    /// entries. Entries arriving meanwhile were authorized by the current rules.
    async fn reauthorize_all(&self, gateway: &Gateway) -> u64 {
        let numbers = self.numbers();
        let mut ended = 0;
        for some in numbers.chunks(AT_A_TIME) {
            for number in some {
                if let Some(life) = self.get(*number)
                    && let Err(refusal) = gateway.callers.may_continue(gateway, &life)
                {
                    ended += u64::from(self.end(&life, refusal));
                }
            }
            tokio::task::yield_now().await;
        }
        if ended > 0 {
            tracing::info!(ended, "streams ended: their session, rule or certificate is no longer valid");
        }
        ended
    }

    /// Ends an entry. Returns true if the entry was still registered.
    pub fn end(&self, life: &ActiveStream, refusal: Refusal) -> bool {
        let entry = self.entries.borrow_mut().remove(&life.number);
        entry.is_some_and(|entry| {
            let caller = &entry.life.caller;
            tracing::debug!(
                user = caller.user.as_ref().map(tracing::field::display),
                why = refusal.message(),
                "a stream ends with what had let it in"
            );
            entry.cut.send(refusal).is_ok()
        })
    }
}

/// Authorizes all entries again after every change of sessions, rules or users, until dropped.
pub async fn reauthorize_on_changes(gateway: Rc<Gateway>) {
    let mut sessions = gateway.sealer.changes();
    let mut rules = gateway.callers.changes();
    let mut users = gateway.logins.changes();
    let ended_streams = gateway.sealer.ended_streams().join(*sessions.borrow());
    loop {
        // All arms are cancel-safe. Dismissed connections always belong to this shard.
        let goes_on = tokio::select! {
            changed = sessions.changed() => changed.is_ok(),
            changed = rules.changed() => changed.is_ok(),
            changed = users.changed() => changed.is_ok(),
            () = gateway.dismissed.notified() => true,
        };
        if !goes_on {
            return;
        }
        let change = *sessions.borrow_and_update();
        // Before the streams are decided again: their denials count under the new policy.
        gateway.shadow.follow(gateway.callers.rules().policy_generation());
        let ended = gateway.active_streams.reauthorize_all(&gateway).await;
        ended_streams.note(change, ended);
    }
}

impl Registration {
    /// For calls too short to be authorized twice: never cancelled.
    pub const UNBOUND: Self = Self(None);

    /// The current permissions of the entry's caller; `None` for a call too short to be authorized twice.
    #[must_use]
    pub fn permits(&self) -> Option<Rc<LivePermits>> {
        self.0.as_ref().map(|entry| Rc::clone(&entry.permits))
    }

    /// Notes the work of the entry.
    pub fn set_work(&self, work: StreamWork) {
        if let Some(registered) = &self.0
            && let Some(life) = registered.live.get(registered.number)
        {
            life.work.get_or_init(|| work);
        }
    }

    /// Waits until the entry is ended and returns the refusal for the client. Cancel-safe.
    pub async fn cancelled(&mut self) -> Refusal {
        poll_fn(|cx| self.poll_cut(cx)).await
    }

    /// Ready once, when the entry is ended.
    pub fn poll_cut(&mut self, cx: &mut Context<'_>) -> Poll<Refusal> {
        let Some(registered) = &mut self.0 else { return Poll::Pending };
        let cut = std::task::ready!(Pin::new(&mut registered.cut).poll(cx));
        self.0 = None;
        // The register is gone: the shard is ending and authorizes no entry any more.
        cut.map_or(Poll::Pending, Poll::Ready)
    }
}

impl Drop for RegistrationEntry {
    fn drop(&mut self) {
        self.live.entries.borrow_mut().remove(&self.number);
    }
}
