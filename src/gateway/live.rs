//! What lives longer than the decision that let it begin: streams, and calls that wait.
//!
//! Owns: this shard's register of them, when they are decided upon again, and ending those that may not go on. Must not
//! know: why one may not (`caller::again`), what the streams do. Invariants (rules 29): whatever lives is registered
//! first and decided upon then, so that a change finds it either here or decides it; all of it is on one thread, so no
//! lock is taken; what a change does not touch goes on.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::future::poll_fn;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use tokio::sync::{Notify, oneshot};

use crate::gateway::caller::Caller;
use crate::gateway::proofs::Against;
use crate::gateway::{Client, Gateway};
use crate::refusal::Refusal;

/// How many are decided upon again before others have their turn: each takes some microseconds.
const AT_A_TIME: usize = 64;

/// Everything on this shard that lives.
#[derive(Default)]
pub struct Live {
    entries: RefCell<HashMap<u64, Entry>>,
    next: Cell<u64>,
    by_password: Notify,
}

struct Entry {
    life: Rc<Life>,
    cut: oneshot::Sender<Refusal>,
}

/// By what something lives.
pub struct Life {
    /// Over which connection it came.
    pub client: Rc<Client>,
    /// As whom it goes upstream, and why.
    pub caller: Rc<Caller>,
    /// The user's generation when it began: a later one ends it. None where it goes as nobody.
    pub generation: Option<u64>,
    /// What its session's password was proved against, where nobody upstream looks at that.
    pub against: RefCell<Option<Against>>,
    number: u64,
}

/// A place in the register, until dropped.
#[must_use = "what has no place in the register outlives what let it in"]
pub struct Stay(Option<Registered>);

struct Registered {
    live: Rc<Live>,
    number: u64,
    cut: oneshot::Receiver<Refusal>,
}

impl Gateway {
    /// Registers what is to live as this caller, then decides whether it may begin.
    ///
    /// # Errors
    /// It may not: what it was decided by has changed meanwhile.
    pub fn enter(&self, client: &Rc<Client>, caller: &Rc<Caller>) -> Result<Stay, Refusal> {
        let generation = self.callers.generation(self, caller)?;
        let against = caller.again.then(|| Against::now(self));
        let life = Rc::new(Life {
            client: Rc::clone(client),
            caller: Rc::clone(caller),
            generation,
            against: RefCell::new(against),
            number: self.live.next.replace(self.live.next.get() + 1),
        });
        let stay = self.live.register(&life);
        self.callers.stands(self, &life).map(|()| stay)
    }
}

impl Life {
    /// Whether its session's password is to be looked at here, since nobody upstream does: that may change with the rows of
    /// users, under what lives.
    pub fn is_looked_at(&self, gateway: &Gateway, here: bool) {
        let mut against = self.against.borrow_mut();
        if !here {
            *against = None;
        } else if against.is_none() {
            // What upstream said of it, and when, is not known here.
            *against = Some(Against::unknown(gateway));
            gateway.live.by_password.notify_one();
        }
    }
}

impl Live {
    fn register(self: &Rc<Self>, life: &Rc<Life>) -> Stay {
        let (cut, when_cut) = oneshot::channel();
        self.entries.borrow_mut().insert(life.number, Entry { life: Rc::clone(life), cut });
        if life.against.borrow().is_some() {
            self.by_password.notify_one();
        }
        Stay(Some(Registered { live: Rc::clone(self), number: life.number, cut: when_cut }))
    }

    /// What lives by a password that nobody upstream looks at.
    #[must_use]
    pub fn by_passwords(&self) -> Vec<Rc<Life>> {
        let entries = self.entries.borrow();
        entries
            .values()
            .map(|entry| &entry.life)
            .filter(|life| life.against.borrow().is_some())
            .map(Rc::clone)
            .collect()
    }

    /// Waits until something began that lives so.
    pub async fn began_by_password(&self) {
        self.by_password.notified().await;
    }

    /// How much is registered.
    #[must_use]
    pub fn len(&self) -> usize {
        self.entries.borrow().len()
    }

    /// Whether nothing is.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Ends what may not go on: what came meanwhile was decided by what holds now.
    async fn decide_again(&self, gateway: &Gateway) {
        let numbers: Vec<u64> = self.entries.borrow().keys().copied().collect();
        let mut ended = 0;
        for some in numbers.chunks(AT_A_TIME) {
            for number in some {
                let life = self.entries.borrow().get(number).map(|entry| Rc::clone(&entry.life));
                if let Some(life) = life
                    && let Err(refusal) = gateway.callers.stands(gateway, &life)
                {
                    ended += usize::from(self.end(&life, refusal));
                }
            }
            tokio::task::yield_now().await;
        }
        if ended > 0 {
            tracing::info!(ended, "streams ended with what had let them in");
        }
    }

    /// Ends one. Whether it was still there.
    pub fn end(&self, life: &Life, refusal: Refusal) -> bool {
        let entry = self.entries.borrow_mut().remove(&life.number);
        entry.is_some_and(|entry| {
            let caller = &entry.life.caller;
            tracing::debug!(user = ?caller.user, why = refusal.message(), "a stream ends with what had let it in");
            entry.cut.send(refusal).is_ok()
        })
    }
}

/// Decides again whenever something changed by which it was decided, until dropped.
pub async fn follow(gateway: Rc<Gateway>) {
    let mut sessions = gateway.sealer.changes();
    let mut rules = gateway.callers.changes();
    let mut users = gateway.logins.changes();
    loop {
        // All arms are cancel-safe. What a connection lost is this shard's own.
        let goes_on = tokio::select! {
            changed = sessions.changed() => changed.is_ok(),
            changed = rules.changed() => changed.is_ok(),
            changed = users.changed() => changed.is_ok(),
            () = gateway.dismissed.notified() => true,
        };
        if !goes_on {
            return;
        }
        gateway.live.decide_again(&gateway).await;
    }
}

impl Stay {
    /// Of what is too short to be looked at twice.
    pub const UNBOUND: Self = Self(None);

    /// Waits until it may not go on, and says what its client is told. Cancel-safe.
    pub async fn cut(&mut self) -> Refusal {
        poll_fn(|cx| self.poll_cut(cx)).await
    }

    /// Ready once it may not go on; said once.
    pub fn poll_cut(&mut self, cx: &mut Context<'_>) -> Poll<Refusal> {
        let Some(registered) = &mut self.0 else { return Poll::Pending };
        let cut = std::task::ready!(Pin::new(&mut registered.cut).poll(cx));
        self.0 = None;
        // The register itself is gone: the shard ends, and nobody decides any more.
        cut.map_or(Poll::Pending, Poll::Ready)
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        self.live.entries.borrow_mut().remove(&self.number);
    }
}
