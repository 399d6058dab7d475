//! How a listener's client certificates are judged, and the verdicts on the chains of open connections.
//!
//! Owns: the verifier, and what was judged by it. Must not know: connections, handshakes, the server's own
//! certificate. Invariants: a change of the server's own certificate is no change of trust; each distinct
//! chain is verified once by one trust; chains of open connections are verified by an admitting verifier of
//! handshakes, a few at a time.

use std::collections::HashMap;
use std::rc::Rc;
use std::sync::{Arc, Mutex, PoisonError};

use rustls::crypto::CryptoProvider;
use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::server::danger::ClientCertVerifier;
use sha2::{Digest as _, Sha256};
use tokio::sync::Semaphore;
use tokio::task::yield_now;

use keyward_base::pem::Crls;
use keyward_config::trust::{ChainVerifier, ChainVerifierError};
use keyward_config::{ClientAuth, ClientCa};

/// Verdicts kept for one trust; the chains beyond are verified each time. More than `limits.connections` has
/// by default.
const MOST_VERDICTS: usize = 16 * 1024;

/// Chains of a shard's open connections that are verified between two looks at the shard's sockets: a chain
/// takes some 0.1 ms.
pub(super) const AT_ONCE: usize = 8;

/// The trust in clients' certificates, by one reading of the authorities and lists.
#[derive(Debug)]
pub struct ClientTrust {
    setting: ClientAuth,
    /// The verifier of client certificates, if certificates are requested.
    verifier: Option<Arc<ChainVerifier>>,
    verdicts: ChainVerdicts,
}

impl ClientTrust {
    /// # Errors
    /// The authorities or lists cannot be used.
    pub(super) fn new(
        setting: &ClientAuth,
        provider: &Arc<CryptoProvider>,
    ) -> Result<Self, ChainVerifierError> {
        let verifier = |ca: &ClientCa, is_optional| -> Result<_, ChainVerifierError> {
            let lists = ca.crls.as_ref().map_or(&[][..], Crls::lists);
            let roots = ca.roots.certificates();
            let made = ChainVerifier::of_clients(roots, lists, is_optional, ca.strictness, provider)?;
            Ok(Arc::new(made))
        };
        let verifier = match setting {
            ClientAuth::None => None,
            ClientAuth::Optional(ca) => Some(verifier(ca, true)?),
            ClientAuth::Required(ca) => Some(verifier(ca, false)?),
        };
        Ok(Self { setting: setting.clone(), verifier, verdicts: ChainVerdicts::default() })
    }

    /// True if the trust is by this setting.
    pub(super) fn is_by(&self, setting: &ClientAuth) -> bool {
        self.setting == *setting
    }

    /// The verifier for handshakes, if certificates are requested.
    pub(super) fn verifier(&self) -> Option<&Arc<ChainVerifier>> {
        self.verifier.as_ref()
    }

    /// True if a client with the given chain, leaf first, possibly empty, would be admitted at `now`. A chain
    /// that was judged before keeps its verdict: whatever ends it by time is watched elsewhere.
    pub(super) fn admits_chain(&self, chain: &[CertificateDer<'_>], now: UnixTime) -> bool {
        match (&self.verifier, chain.split_first()) {
            (None, _) => true,
            (Some(verifier), None) => !verifier.client_auth_mandatory(),
            (Some(verifier), Some((leaf, rest))) => {
                self.verdicts.of(chain, || verifier.verify(leaf, rest, None, now).is_ok())
            }
        }
    }
}

/// The verdicts on chains by their digests, for all shards.
#[derive(Debug, Default)]
struct ChainVerdicts(Mutex<HashMap<[u8; 32], bool>>);

impl ChainVerdicts {
    /// The verdict on a chain; `verify` is called for a chain without one.
    fn of(&self, chain: &[CertificateDer<'_>], verify: impl FnOnce() -> bool) -> bool {
        let mut hash = Sha256::new();
        for certificate in chain {
            hash.update((certificate.len() as u64).to_be_bytes());
            hash.update(certificate);
        }
        let digest = hash.finalize().into();
        // No code under the lock can panic half-way. Two shards may verify one chain at the same time.
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner).get(&digest).copied();
        known.unwrap_or_else(|| {
            let verdict = verify();
            let mut verdicts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            if verdicts.len() < MOST_VERDICTS {
                verdicts.insert(digest, verdict);
            }
            verdict
        })
    }
}

/// The turns in which a shard verifies the chains of its open connections: after a change of trust all of
/// them are due at once, and calls must go on in between. Clones share the turns.
#[derive(Clone, Debug)]
pub struct VerificationTurns(Rc<Semaphore>);

impl Default for VerificationTurns {
    fn default() -> Self {
        Self(Rc::new(Semaphore::new(AT_ONCE)))
    }
}

impl VerificationTurns {
    /// Waits for a turn and judges in it. The turn ends once the shard has looked at its sockets, and run
    /// what is ready. After a cancellation the verdict is lost, and may be asked for again.
    pub(super) async fn judge<T>(&self, judge: impl FnOnce() -> T) -> T {
        // The semaphore is never closed.
        let turn = self.0.acquire().await.ok();
        let verdict = judge();
        yield_now().await;
        drop(turn);
        verdict
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use tokio::task::LocalSet;

    use super::*;

    #[test]
    fn each_distinct_chain_is_verified_once() {
        let (verdicts, verified) = (ChainVerdicts::default(), Cell::new(0));
        let verify = |verdict| {
            verified.set(verified.get() + 1);
            verdict
        };
        let chain = |parts: &[&[u8]]| parts.iter().map(|part| part.to_vec().into()).collect::<Vec<_>>();
        for _ in 0..1_000 {
            assert!(verdicts.of(&chain(&[b"good", b"ca"]), || verify(true)));
            assert!(!verdicts.of(&chain(&[b"bad", b"ca"]), || verify(false)));
        }
        assert_eq!(verified.get(), 2);
        assert!(!verdicts.of(&chain(&[b"goodca"]), || verify(false)), "another chain of the same bytes");
        for number in 0..2 * MOST_VERDICTS as u64 {
            assert!(verdicts.of(&chain(&[&number.to_be_bytes()]), || verify(true)));
        }
        assert_eq!(verdicts.0.lock().unwrap().len(), MOST_VERDICTS);
    }

    /// All connections of a shard are due at once, and a call has work in between.
    #[tokio::test]
    async fn few_chains_are_verified_between_two_turns_of_another_task() {
        const CHAINS: usize = 4_000;
        let (turns, verified, longest) = (VerificationTurns::default(), Rc::new(Cell::new(0)), Cell::new(0));
        let local = LocalSet::new();
        for _ in 0..CHAINS {
            let (turns, verified) = (turns.clone(), Rc::clone(&verified));
            local.spawn_local(async move {
                turns.judge(|| verified.set(verified.get() + 1)).await;
            });
        }
        let call = async {
            // The first round is that in which all of them ask for a turn.
            yield_now().await;
            while verified.get() < CHAINS {
                let before = verified.get();
                yield_now().await;
                longest.set(longest.get().max(verified.get() - before));
            }
        };
        local.run_until(call).await;
        assert!((1..=2 * AT_ONCE).contains(&longest.get()), "{longest:?}");
    }
}
