//! Who waits for which check of a password, and how many checks there may be.
//!
//! Owns: the checks under way, and whose they are. Must not know: how a password is checked.
//! Invariants (rules 15, 42): all who present the same user and password at the same time share one check, and it ends
//! whoever leaves; checks of passwords of which nothing is known take seats, and no network more than half of them, so
//! that who guesses keeps neither sessions nor known passwords out, and alone nobody else either.

use std::collections::HashMap;
use std::mem::Discriminant;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures_util::FutureExt as _;
use futures_util::future::Shared;
use tokio::sync::oneshot;

use crate::gateway::login::desk::{Ended, Purpose};
use crate::gateway::login::limits::Network;
use crate::upstream::credential::Fingerprint;

/// Checks of passwords of which nothing is known. Each waits for its turn at a member, or at the users file; past this many
/// callers are told that there were too many.
pub(super) const SEATS: usize = 1024;
const OF_ONE_NETWORK: usize = SEATS / 2;

/// A check that others wait for.
pub(super) type Flight = Shared<oneshot::Receiver<Ended>>;
/// What is checked, and what for.
pub(super) type Checked = (Fingerprint, Discriminant<Purpose>);

/// The checks under way. Clones are the same ones.
#[derive(Clone, Default)]
pub(super) struct Flights(Arc<Mutex<UnderWay>>);

#[derive(Default)]
struct UnderWay {
    all: HashMap<Checked, Flight>,
    taken: usize,
    by_network: HashMap<Network, usize>,
}

/// What whoever makes a check tells those who wait for it. Dropped, it tells them that nobody will.
pub(super) struct Landing {
    flights: Flights,
    checked: Checked,
    seat: Option<Network>,
    landed: Option<oneshot::Sender<Ended>>,
}

/// Too many checks are under way.
pub(super) struct Full;

/// A check, and whose.
pub(super) struct Boarded {
    pub(super) flight: Flight,
    /// Somebody else began it.
    pub(super) joined: bool,
}

impl Flights {
    /// Joins this check, or begins it: `launch` is given what is to be told. `seat` is where a password comes from of which
    /// nothing is known.
    pub(super) fn board(
        &self,
        checked: Checked,
        seat: Option<Network>,
        launch: impl FnOnce(Landing) -> Result<(), Full>,
    ) -> Result<Boarded, Full> {
        let mut under_way = self.lock();
        if let Some(flight) = under_way.all.get(&checked) {
            return Ok(Boarded { flight: flight.clone(), joined: true });
        }
        if let Some(network) = seat {
            under_way.take(network)?;
        }
        let (landed, flight) = oneshot::channel();
        let flight = flight.shared();
        under_way.all.insert(checked, flight.clone());
        drop(under_way);
        launch(Landing { flights: self.clone(), checked, seat, landed: Some(landed) })?;
        Ok(Boarded { flight, joined: false })
    }

    /// Nothing under this lock can panic half-way, so that a poisoned one is still whole.
    fn lock(&self) -> MutexGuard<'_, UnderWay> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl UnderWay {
    fn take(&mut self, network: Network) -> Result<(), Full> {
        let of_network = self.by_network.get(&network).copied().unwrap_or(0);
        if self.taken >= SEATS || of_network >= OF_ONE_NETWORK {
            return Err(Full);
        }
        self.taken += 1;
        self.by_network.insert(network, of_network + 1);
        Ok(())
    }

    fn give_back(&mut self, network: Network) {
        self.taken = self.taken.saturating_sub(1);
        match self.by_network.get_mut(&network) {
            Some(taken) if *taken > 1 => *taken -= 1,
            _ => drop(self.by_network.remove(&network)),
        }
    }
}

impl Landing {
    /// Nobody boards a flight that has landed.
    pub(super) fn land(mut self, ended: Ended) {
        if let Some(landed) = self.leave()
            && landed.send(ended).is_err()
        {
            tracing::trace!("nobody waits for a login any more");
        }
    }

    fn leave(&mut self) -> Option<oneshot::Sender<Ended>> {
        let landed = self.landed.take()?;
        let mut under_way = self.flights.lock();
        under_way.all.remove(&self.checked);
        if let Some(network) = self.seat {
            under_way.give_back(network);
        }
        Some(landed)
    }
}

impl Drop for Landing {
    fn drop(&mut self) {
        drop(self.leave());
    }
}
