//! The members that refused a user's certificate a moment ago.
//!
//! Owns: how long a refusal counts, and how often it is told. Must not know: connections, alerts of TLS.
//! Invariants: a refusal counts for one certificate at one member's address, so that a replaced certificate
//! and a moved member are tried at once; the number of refusals kept is bounded. Pure.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use crate::credentials::CertificateConnectionKey;
use keyward_cluster::membership::ConnectionTarget;
use keyward_etcd::identity::MemberId;

/// How long a member is not asked again with a certificate that it refused: its administrator may repair it
/// at any time, and each handshake costs both sides a signature.
const COUNTS: Duration = Duration::from_secs(1);
/// The time between two log lines about one certificate at one member.
const TOLD: Duration = Duration::from_secs(60);
/// Troubles kept at most; further ones are told each time, and are no memory.
const MOST: usize = 4096;

/// The troubles with users' certificates, by member and certificate.
#[derive(Default)]
pub(super) struct CertificateRefusals(Mutex<HashMap<TroubleKey, CertificateTrouble>>);

type TroubleKey = ((MemberId, ConnectionTarget), CertificateConnectionKey);

/// A trouble with one certificate at one member.
#[derive(Default)]
struct CertificateTrouble {
    /// The last refusal.
    refused: Option<Instant>,
    /// The last log line.
    told: Option<Instant>,
}

impl CertificateTrouble {
    fn is_refused(&self, now: Instant) -> bool {
        self.refused.is_some_and(|at| now < at + COUNTS)
    }

    fn is_told(&self, now: Instant) -> bool {
        self.told.is_some_and(|at| now < at + TOLD)
    }
}

impl CertificateRefusals {
    /// Notes that no connection came about, since the member refused the certificate, or for another reason.
    /// Returns true if that is to be logged.
    pub(super) fn note_trouble(
        &self,
        member: (MemberId, ConnectionTarget),
        shown: &CertificateConnectionKey,
        is_refusal: bool,
        now: Instant,
    ) -> bool {
        let mut all = self.lock();
        if all.len() >= MOST {
            all.retain(|_, trouble| trouble.is_told(now));
        }
        let key = (member, shown.clone());
        if all.len() >= MOST && !all.contains_key(&key) {
            return true;
        }
        let trouble = all.entry(key).or_default();
        if is_refusal {
            trouble.refused = Some(now);
        }
        let tells = !trouble.is_told(now);
        if tells {
            trouble.told = Some(now);
        }
        tells
    }

    /// Forgets the troubles: the member has accepted the certificate.
    pub(super) fn forget(&self, member: (MemberId, ConnectionTarget), shown: &CertificateConnectionKey) {
        self.lock().remove(&(member, shown.clone()));
    }

    /// True if the member refused the certificate a moment ago.
    pub(super) fn is_refused(
        &self,
        member: (MemberId, ConnectionTarget),
        shown: &CertificateConnectionKey,
        now: Instant,
    ) -> bool {
        self.lock().get(&(member, shown.clone())).is_some_and(|trouble| trouble.is_refused(now))
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<TroubleKey, CertificateTrouble>> {
        // No code under the lock can panic half-way.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TARGET: ConnectionTarget = ConnectionTarget { ip: None, port: 2379 };

    fn shown(user: &str, epoch: u64) -> CertificateConnectionKey {
        CertificateConnectionKey { user: user.into(), epoch }
    }

    #[test]
    fn a_refusal_counts_for_a_moment_for_one_certificate_at_one_address_and_is_told_once_a_minute() {
        let (refusals, begin) = (CertificateRefusals::default(), Instant::now());
        let (member, alice) = ((MemberId(1), TARGET), shown("alice", 1));
        assert!(refusals.note_trouble(member, &alice, true, begin));
        assert!(refusals.is_refused(member, &alice, begin));
        let moved = (MemberId(1), ConnectionTarget { port: 2380, ..TARGET });
        for (member, shown) in [
            ((MemberId(2), TARGET), &alice),
            (moved, &alice),
            (member, &shown("alice", 2)),
            (member, &shown("bob", 1)),
        ] {
            assert!(!refusals.is_refused(member, shown, begin));
        }
        assert!(!refusals.is_refused(member, &alice, begin + COUNTS));
        // The refusals of a minute are one line in the log.
        let told: Vec<u32> = (1..=120)
            .filter(|second| refusals.note_trouble(member, &alice, true, begin + COUNTS * *second))
            .collect();
        assert_eq!(told, [60, 120]);
        refusals.forget(member, &alice);
        assert!(!refusals.is_refused(member, &alice, begin + COUNTS * 120));
    }

    #[test]
    fn a_member_that_cannot_be_reached_has_refused_nothing_and_the_memory_is_bounded() {
        let (refusals, begin) = (CertificateRefusals::default(), Instant::now());
        let member = (MemberId(1), TARGET);
        assert!(refusals.note_trouble(member, &shown("alice", 0), false, begin));
        assert!(!refusals.is_refused(member, &shown("alice", 0), begin));
        for epoch in 1..=2 * MOST as u64 {
            refusals.note_trouble(member, &shown("alice", epoch), true, begin);
        }
        assert_eq!(refusals.lock().len(), MOST);
        assert!(refusals.note_trouble(member, &shown("bob", 0), true, begin + TOLD));
        assert_eq!(refusals.lock().len(), 1);
    }
}
