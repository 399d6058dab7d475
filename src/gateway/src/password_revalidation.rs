//! Re-proving session passwords under active streams, where no member checks the password any more.
//!
//! Owns: when a session's password is proved again, and ending the streams of a refused session. Must not
//! know: how a password is proved. Invariants (docs/decisions.md#d12): a session is not proved again while
//! etcd's users and roles and the users file are unchanged since its last proof; if a change cannot be
//! detected, the session is proved again at intervals; if no source can judge the password, the streams
//! continue.

use std::collections::HashMap;
use std::rc::Rc;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream;
use tokio::time::{sleep, timeout};

use crate::Gateway;
use crate::active_streams::ActiveStream;
use crate::login::password_sources::LoginDenial;
use crate::proof_basis::ProofBasis;
use crate::retries::PATIENCE;
use keyward_downstream::session::{Session, SessionId};
use keyward_etcd::refusal::Refusal;
use keyward_upstream::credentials::LoginProof;

/// The interval between checks for changes.
const CHANGE_CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// Concurrent proofs of a shard. Each member has a separate limit on logins.
const CONCURRENT_PROOFS: usize = 16;

/// Proves due sessions again, until dropped.
pub async fn revalidate_passwords(gateway: Rc<Gateway>) {
    loop {
        let streams = gateway.active_streams.with_unchecked_passwords();
        if streams.is_empty() {
            // The timer runs only while entries with such sessions exist.
            gateway.active_streams.wait_for_unchecked_password().await;
        } else {
            let revision = gateway.logins.auth_revision().current().await;
            prove(&gateway, streams, revision).await;
            // Jitter, so that shards started together do not query etcd together.
            let jitter = gateway
                .upstream
                .chooser
                .draw(u64::try_from(CHANGE_CHECK_INTERVAL.as_millis() / 4).unwrap_or(u64::MAX));
            sleep(CHANGE_CHECK_INTERVAL - CHANGE_CHECK_INTERVAL / 4 + Duration::from_millis(jitter)).await;
        }
    }
}

/// Proves every due session of `streams` again, each session at most once.
async fn prove(gateway: &Gateway, streams: Vec<Rc<ActiveStream>>, revision: Option<u64>) {
    let passwords = gateway.logins.passwords();
    let cluster = gateway.upstream.members.snapshot.load().cluster;
    let mut due: HashMap<SessionId, (Rc<Session>, Vec<Rc<ActiveStream>>)> = HashMap::new();
    for stream in streams {
        let is_past = |basis: &ProofBasis| basis.is_past(revision, cluster, &passwords);
        let is_due = stream.proof_basis.borrow().as_ref().is_some_and(is_past);
        if let Some(session) = stream.caller.session().filter(|_| is_due) {
            due.entry(session.id).or_insert_with(|| (Rc::clone(session), Vec::new())).1.push(stream);
        }
    }
    let proofs =
        stream::iter(due.into_values()).for_each_concurrent(CONCURRENT_PROOFS, async |(session, streams)| {
            let basis = ProofBasis::now(gateway);
            let proved = timeout(PATIENCE, gateway.logins.prove_now(&session)).await;
            let proved = proved.unwrap_or(Err(LoginDenial::Untold));
            for stream in streams {
                let ended = match proved {
                    Ok(LoginProof::Etcd | LoginProof::Nothing) => None,
                    // The user has moved into the users file: the rules for users of the file apply.
                    Ok(LoginProof::File(_)) => gateway.callers.may_continue_by_file(gateway, &stream).err(),
                    Err(LoginDenial::Refused(_)) => Some(Refusal::INVALID_AUTH_TOKEN),
                    // The old proof stays outdated, so the session is proved again at the next check.
                    Err(LoginDenial::Untold | LoginDenial::Limited) => continue,
                };
                match ended {
                    None => *stream.proof_basis.borrow_mut() = Some(basis.clone()),
                    Some(refusal) => {
                        gateway.active_streams.end(&stream, refusal);
                    }
                }
            }
        });
    proofs.await;
}
