//! Single flight and admission of password checks.
//!
//! Owns: the running checks and the callers waiting for them. Must not know: how a password is checked.
//! Invariants: all callers presenting the same user and password at the same time share a check, and the
//! check goes on after any caller has left (docs/decisions.md#d42); checks of passwords with no known result
//! take seats, and no network takes more than half of the seats, so a guesser keeps out neither sessions nor
//! known passwords, and a guesser in a single network keeps out no other network (docs/decisions.md#d15).

use std::collections::HashMap;
use std::mem::Discriminant;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures_util::FutureExt as _;
use futures_util::future::Shared;
use tokio::sync::oneshot;

use crate::credentials::PasswordFingerprint;
use crate::gateway::login::limits::ClientNetwork;
use crate::gateway::login::password_check::{LoginResult, PasswordCheckPurpose};

/// Concurrent checks of passwords with no known result. Each check waits for its turn at a member or at the
/// users file; callers past this number are refused with "too many requests".
pub(super) const SEATS: usize = 1024;
const OF_ONE_NETWORK: usize = SEATS / 2;

/// Shared handle on the result of a running check.
pub(super) type SharedPasswordCheck = Shared<oneshot::Receiver<LoginResult>>;
/// Key of a running check: fingerprint of user and password, and the kind of purpose.
pub(super) type PasswordCheckKey = (PasswordFingerprint, Discriminant<PasswordCheckPurpose>);

/// The running checks. Clones share the state.
#[derive(Clone, Default)]
pub(super) struct PasswordChecks(Arc<Mutex<RunningPasswordChecks>>);

#[derive(Default)]
struct RunningPasswordChecks {
    all: HashMap<PasswordCheckKey, SharedPasswordCheck>,
    taken: usize,
    by_network: HashMap<ClientNetwork, usize>,
}

/// Reports a check's result to the waiting callers. If dropped, the callers learn that no result will come.
pub(super) struct PasswordCheckReport {
    flights: PasswordChecks,
    checked: PasswordCheckKey,
    seat: Option<ClientNetwork>,
    landed: Option<oneshot::Sender<LoginResult>>,
}

/// Too many checks are under way.
pub(super) struct TooManyPasswordChecks;

/// A running check, and the caller's part in the check.
pub(super) struct JoinedPasswordCheck {
    pub(super) flight: SharedPasswordCheck,
    /// True if another caller began the check.
    pub(super) joined: bool,
}

impl PasswordChecks {
    /// Joins the running check with this key, or begins a check by calling `launch` with the
    /// [`PasswordCheckReport`] that reports the result. `seat` is the client's network, for a password with
    /// no known result.
    pub(super) fn join_or_begin(
        &self,
        checked: PasswordCheckKey,
        seat: Option<ClientNetwork>,
        launch: impl FnOnce(PasswordCheckReport) -> Result<(), TooManyPasswordChecks>,
    ) -> Result<JoinedPasswordCheck, TooManyPasswordChecks> {
        let mut under_way = self.lock();
        if let Some(flight) = under_way.all.get(&checked) {
            return Ok(JoinedPasswordCheck { flight: flight.clone(), joined: true });
        }
        if let Some(network) = seat {
            under_way.take(network)?;
        }
        let (landed, flight) = oneshot::channel();
        let flight = flight.shared();
        under_way.all.insert(checked, flight.clone());
        drop(under_way);
        launch(PasswordCheckReport { flights: self.clone(), checked, seat, landed: Some(landed) })?;
        Ok(JoinedPasswordCheck { flight, joined: false })
    }

    /// No code under this lock can panic half-way, so a poisoned lock still guards a consistent state.
    fn lock(&self) -> MutexGuard<'_, RunningPasswordChecks> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl RunningPasswordChecks {
    fn take(&mut self, network: ClientNetwork) -> Result<(), TooManyPasswordChecks> {
        let of_network = self.by_network.get(&network).copied().unwrap_or(0);
        if self.taken >= SEATS || of_network >= OF_ONE_NETWORK {
            return Err(TooManyPasswordChecks);
        }
        self.taken += 1;
        self.by_network.insert(network, of_network + 1);
        Ok(())
    }

    fn give_back(&mut self, network: ClientNetwork) {
        self.taken = self.taken.saturating_sub(1);
        match self.by_network.get_mut(&network) {
            Some(taken) if *taken > 1 => *taken -= 1,
            _ => drop(self.by_network.remove(&network)),
        }
    }
}

impl PasswordCheckReport {
    /// Ends the check: no caller joins from here on, and the waiting callers get the result.
    pub(super) fn report(mut self, ended: LoginResult) {
        if let Some(landed) = self.leave()
            && landed.send(ended).is_err()
        {
            tracing::trace!("nobody waits for a login any more");
        }
    }

    fn leave(&mut self) -> Option<oneshot::Sender<LoginResult>> {
        let landed = self.landed.take()?;
        let mut under_way = self.flights.lock();
        under_way.all.remove(&self.checked);
        if let Some(network) = self.seat {
            under_way.give_back(network);
        }
        Some(landed)
    }
}

impl Drop for PasswordCheckReport {
    fn drop(&mut self) {
        drop(self.leave());
    }
}
