//! What lives longer than the decision that let it begin: streams, and calls that wait.
//!
//! Owns: this shard's register of them, and ending those whose session stands no more. Must not know: what is revoked
//! and why, what the streams do. Invariant (rules 29): whatever lives by a session is registered first and decided
//! upon then, so that a revocation finds it either here or refused; all of it is on one thread, so no lock is taken.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::future::poll_fn;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};

use tokio::sync::oneshot;

use crate::downstream::session::{Sealer, Session};
use crate::gateway::caller::Caller;
use crate::refusal::Refusal;

/// Everything on this shard that lives by a session.
#[derive(Default)]
pub struct Live {
    entries: RefCell<HashMap<u64, Entry>>,
    next: Cell<u64>,
}

struct Entry {
    session: Rc<Session>,
    cut: oneshot::Sender<()>,
}

/// A place in the register, until dropped.
#[must_use = "what has no place in the register outlives its session"]
pub struct Stay(Option<Registered>);

struct Registered {
    live: Rc<Live>,
    number: u64,
    cut: oneshot::Receiver<()>,
}

impl Live {
    /// Registers something that lives by the caller's session, then decides whether it may begin.
    ///
    /// # Errors
    /// The session stands no more.
    pub fn enter(self: &Rc<Self>, caller: &Caller, sealer: &Sealer) -> Result<Stay, Refusal> {
        let Some(session) = &caller.session else { return Ok(Stay::UNBOUND) };
        let (cut, when_cut) = oneshot::channel();
        let number = self.next.replace(self.next.get() + 1);
        self.entries.borrow_mut().insert(number, Entry { session: Rc::clone(session), cut });
        let stay = Stay(Some(Registered { live: Rc::clone(self), number, cut: when_cut }));
        if sealer.stands(session) { Ok(stay) } else { Err(Refusal::INVALID_AUTH_TOKEN) }
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

    /// Ends what stands no more.
    fn decide_again(&self, sealer: &Sealer) {
        let mut entries = self.entries.borrow_mut();
        let fallen = entries.extract_if(|_, entry| !sealer.stands(&entry.session));
        let mut ended = 0;
        for (_, entry) in fallen {
            tracing::debug!(session = %entry.session.id, "a stream ends with its session");
            ended += usize::from(entry.cut.send(()).is_ok());
        }
        if ended > 0 {
            tracing::info!(ended, "streams ended with their sessions");
        }
    }
}

/// Decides again whenever sessions may have fallen, until dropped.
pub async fn follow(live: Rc<Live>, sealer: Arc<Sealer>) {
    let mut changes = sealer.changes();
    while changes.changed().await.is_ok() {
        live.decide_again(&sealer);
    }
}

impl Stay {
    /// Of what lives by no session, or is too short to be looked at twice.
    pub const UNBOUND: Self = Self(None);

    /// Waits until the session stands no more. Cancel-safe.
    pub async fn cut(&mut self) {
        poll_fn(|cx| self.poll_cut(cx)).await;
    }

    /// Ready once the session stands no more; said once.
    pub fn poll_cut(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let Some(registered) = &mut self.0 else { return Poll::Pending };
        let cut = std::task::ready!(Pin::new(&mut registered.cut).poll(cx));
        self.0 = None;
        // The register itself is gone: the shard ends, and nobody decides any more.
        if cut.is_ok() { Poll::Ready(()) } else { Poll::Pending }
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        self.live.entries.borrow_mut().remove(&self.number);
    }
}
