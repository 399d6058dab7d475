//! The signer of tokens with etcd's own key, and the cluster's auth revision, required in every such token.
//!
//! Owns: the format of a token, the last known auth revision, the single flight of questions, and how to ask
//! each etcd version. Must not know: when a token is signed. Invariants: after a member called a revision
//! old, the revision is not reported again unless a member confirmed the revision later; waiters may leave,
//! the question continues.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use arc_swap::ArcSwap;
use data_encoding::BASE64URL_NOPAD;
use hmac::{Hmac, KeyInit as _, Mac as _};
use http::HeaderValue;
use rustls::SignatureScheme;
use sha2::{Sha256, Sha384, Sha512};
use tokio::sync::{mpsc, watch};

use super::auth_calls::{self, AuthStatusAnswer};
use super::{CredentialContext, LoginFailure};
use crate::config::upstream_users::{JwtKey, JwtKind, SignJwt};
use crate::dial::connect::Connector;
use crate::members::discovery::metrics_page;
use crate::members::membership::{ControlChannels, Membership};

/// Time limit for one member's answer.
pub(super) const LIMIT: Duration = Duration::from_secs(2);

/// Queue of requests for the auth revision. A single queued request suffices, because the answer serves all
/// waiters.
pub(super) type RevisionRequests = mpsc::Receiver<Arc<TokenSigner>>;

/// Access to the HTTP/1.1 pages of members.
#[derive(Clone)]
pub struct MetricsPages {
    /// The connector for member connections.
    pub connector: Connector,
    /// The published members.
    pub members: Arc<ArcSwap<Membership>>,
}

/// Signs tokens with one key.
pub(super) struct TokenSigner {
    pub(super) config: Arc<SignJwt>,
    revisions: SigningRevision,
    pub(super) shared: Arc<CredentialContext>,
    signed: AtomicU64,
}

/// The key cannot sign, although the configuration passed its check.
#[derive(Debug, thiserror::Error)]
#[error("sign_jwt.key does not sign")]
pub(super) struct SigningError;

impl TokenSigner {
    pub(super) fn new(
        config: &Arc<SignJwt>,
        revisions: SigningRevision,
        shared: Arc<CredentialContext>,
    ) -> Arc<Self> {
        let (config, signed) = (Arc::clone(config), AtomicU64::new(0));
        Arc::new(Self { config, revisions, shared, signed })
    }

    pub(super) fn revisions(&self) -> &SigningRevision {
        &self.revisions
    }

    /// Number of tokens signed.
    pub(super) fn signed(&self) -> u64 {
        self.signed.load(Ordering::Relaxed)
    }

    /// Signs a token for `user` with the given auth revision, valid from now.
    pub(super) fn sign(
        &self,
        user: &str,
        revision: u64,
        now: SystemTime,
    ) -> Result<HeaderValue, SigningError> {
        let expires = now + self.config.lifetime;
        let expires = expires.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let part = |text: &str| BASE64URL_NOPAD.encode(text.as_bytes());
        let header = part(&format!("{{\"alg\":\"{}\",\"typ\":\"JWT\"}}", self.config.method.name));
        let claims =
            part(&format!("{{\"username\":{},\"revision\":{revision},\"exp\":{expires}}}", quoted(user)));
        let body = format!("{header}.{claims}");
        let signature = signature(&self.config, body.as_bytes()).ok_or(SigningError)?;
        let token = format!("{body}.{}", BASE64URL_NOPAD.encode(&signature));
        self.signed.fetch_add(1, Ordering::Relaxed);
        HeaderValue::try_from(token).map_err(|_| SigningError)
    }
}

/// The auth revision as known, with the means to ask for a new one.
#[derive(Clone)]
pub(super) struct SigningRevision {
    known: Arc<KnownRevision>,
    questions: mpsc::Sender<Arc<TokenSigner>>,
    pages: MetricsPages,
}

struct KnownRevision {
    /// 0 means unknown: etcd's auth revisions begin at 1.
    revision: AtomicU64,
    /// How often the known revision became invalid.
    refusals: AtomicU64,
    /// The outcome of the last question.
    answered: watch::Sender<Result<u64, LoginFailure>>,
}

impl SigningRevision {
    pub(super) fn new(questions: mpsc::Sender<Arc<TokenSigner>>, pages: MetricsPages) -> Self {
        let (answered, _) = watch::channel(Err(LoginFailure::NoAnswer));
        let known = KnownRevision { revision: AtomicU64::new(0), refusals: AtomicU64::new(0), answered };
        Self { known: Arc::new(known), questions, pages }
    }

    /// Returns the last known auth revision; asks members if unknown. Cancel-safe: a question already sent
    /// continues.
    pub(super) async fn current(&self, signer: &Arc<TokenSigner>) -> Result<u64, LoginFailure> {
        let known = self.known.revision.load(Ordering::SeqCst);
        if known != 0 {
            return Ok(known);
        }
        let mut answered = self.known.answered.subscribe();
        answered.mark_unchanged();
        let known = self.known.revision.load(Ordering::SeqCst);
        if known != 0 {
            return Ok(known);
        }
        // A request already in the channel may belong to another signer; the answer would go to the wrong
        // signer.
        let asking = async {
            if self.questions.send(Arc::clone(signer)).await.is_ok() {
                self.questions.closed().await;
            }
        };
        tokio::select! {
            biased; // an answer takes precedence, also to the question of another waiter
            changed = answered.changed() => match changed {
                Ok(()) => answered.borrow().clone(),
                Err(_) => Err(LoginFailure::NoAnswer),
            },
            () = asking => Err(LoginFailure::NoAnswer),
        }
    }

    /// Records that a member called `revision` old: known → unknown, if `revision` is still current.
    pub(super) fn refused(&self, revision: u64) {
        let known = &self.known.revision;
        if known.compare_exchange(revision, 0, Ordering::SeqCst, Ordering::SeqCst).is_ok() {
            self.known.refusals.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// Keyward follows another cluster: known → unknown.
    pub(super) fn forget(&self) {
        self.known.revision.store(0, Ordering::SeqCst);
        self.known.refusals.fetch_add(1, Ordering::SeqCst);
    }

    /// Asks members on behalf of all waiters: unknown → known. Asks again if a refusal arrived in the
    /// meantime.
    pub(super) async fn answer(&self, signer: &TokenSigner, channels: &ControlChannels) {
        if self.known.revision.load(Ordering::SeqCst) != 0 {
            return;
        }
        let ended = loop {
            let refusals = self.known.refusals.load(Ordering::SeqCst);
            let ended = self.ask(signer, channels).await;
            if refusals == self.known.refusals.load(Ordering::SeqCst) {
                break ended;
            }
        };
        match &ended {
            Ok(revision) => {
                tracing::debug!(revision, "heard the auth revision");
                self.known.revision.store(*revision, Ordering::SeqCst);
            }
            Err(why) => tracing::warn!(%why, "no member tells the auth revision"),
        }
        drop(self.known.answered.send_replace(ended));
    }

    /// Asks members for the auth revision. etcd 3.5 and 3.6 answer only root, regardless of the auth revision
    /// in root's token; etcd 3.7 answers every user; etcd 3.4 has no AuthStatus RPC, but shows the auth
    /// revision among its metrics.
    async fn ask(&self, signer: &TokenSigner, channels: &ControlChannels) -> Result<u64, LoginFailure> {
        let root = signer.sign("root", 1, SystemTime::now()).map_err(|_| LoginFailure::NoAnswer)?;
        let mut failure = LoginFailure::NoAnswer;
        for channel in channels.load().values().cloned() {
            let asked = auth_calls::auth_status(channel, &root);
            match tokio::time::timeout(LIMIT, asked).await.unwrap_or(AuthStatusAnswer::Nothing(None)) {
                AuthStatusAnswer::Revision(revision) => return Ok(revision),
                AuthStatusAnswer::Disabled => return Err(LoginFailure::AuthDisabled),
                AuthStatusAnswer::Unknown => break,
                AuthStatusAnswer::Nothing(status) => {
                    failure = status.map_or(LoginFailure::NoAnswer, LoginFailure::Unavailable);
                }
            }
        }
        self.pages.auth_revision().await.ok_or(failure)
    }
}

impl MetricsPages {
    /// Returns the auth revision shown on a member's metrics page. Asks the leader first, because a follower
    /// may lag behind.
    pub(super) async fn auth_revision(&self) -> Option<u64> {
        let members = self.members.load_full();
        let rest = members.ready_voters().filter(|member| Some(member.id) != members.leader);
        for member in members.leader().into_iter().chain(rest) {
            let page = metrics_page::text(&self.connector, &member.endpoint, member.resolved_ip);
            let page = tokio::time::timeout(LIMIT, page).await.ok().flatten();
            if let Some(revision) = page.as_deref().and_then(metrics_page::auth_revision) {
                return Some(revision);
            }
        }
        None
    }
}

/// Encodes a JSON string.
pub(super) fn quoted(text: &str) -> String {
    let mut quoted = String::with_capacity(text.len() + 2);
    quoted.push('"');
    for letter in text.chars() {
        match letter {
            '"' | '\\' => quoted.extend(['\\', letter]),
            '\0'..='\x1f' => quoted.push_str(&format!("\\u{:04x}", u32::from(letter))),
            _ => quoted.push(letter),
        }
    }
    quoted.push('"');
    quoted
}

pub(super) fn signature(config: &SignJwt, body: &[u8]) -> Option<Vec<u8>> {
    match (config.method.kind, &config.key) {
        (JwtKind::Private(scheme), JwtKey::Private(key)) => {
            let signature = key.signing().choose_scheme(&[scheme])?.sign(body).ok()?;
            match scheme {
                SignatureScheme::ECDSA_NISTP256_SHA256 => fixed(&signature, 32),
                SignatureScheme::ECDSA_NISTP384_SHA384 => fixed(&signature, 48),
                _ => Some(signature),
            }
        }
        (JwtKind::Hs256, JwtKey::Shared(key)) => {
            let mac = Hmac::<Sha256>::new_from_slice(key.expose()).ok()?;
            Some(mac.chain_update(body).finalize().into_bytes().to_vec())
        }
        (JwtKind::Hs384, JwtKey::Shared(key)) => {
            let mac = Hmac::<Sha384>::new_from_slice(key.expose()).ok()?;
            Some(mac.chain_update(body).finalize().into_bytes().to_vec())
        }
        (JwtKind::Hs512, JwtKey::Shared(key)) => {
            let mac = Hmac::<Sha512>::new_from_slice(key.expose()).ok()?;
            Some(mac.chain_update(body).finalize().into_bytes().to_vec())
        }
        _ => None,
    }
}

/// Converts an ECDSA signature to the form of RFC 7518: r and s, each of `size` bytes, instead of X.509's
/// SEQUENCE of two INTEGERs.
pub(super) fn fixed(der: &[u8], size: usize) -> Option<Vec<u8>> {
    let (tag, rest) = der.split_first()?;
    let (length, rest) = rest.split_first()?;
    // Both curves fit the short form of a length.
    if *tag != 0x30 || usize::from(*length) != rest.len() || *length >= 0x80 {
        return None;
    }
    let mut joined = Vec::with_capacity(2 * size);
    let mut rest = rest;
    for _ in 0..2 {
        let [0x02, length, after @ ..] = rest else { return None };
        let (number, after) = after.split_at_checked(usize::from(*length))?;
        let number = &number[number.iter().take_while(|byte| **byte == 0).count()..];
        joined.extend(std::iter::repeat_n(0, size.checked_sub(number.len())?));
        joined.extend_from_slice(number);
        rest = after;
    }
    rest.is_empty().then_some(joined)
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;
    use tokio::time::Instant;

    use super::*;
    use crate::config::upstream_users::{JwtKey, JwtMethod, SignJwt};
    use crate::credentials::{CredentialSettings, Credentials, SignedIdentity};
    use crate::secret::Secret;

    /// A signer whose questions only the test answers.
    fn signer() -> (Arc<TokenSigner>, RevisionRequests) {
        let (questions, asked) = mpsc::channel(1);
        (asking(questions), asked)
    }

    fn asking(questions: mpsc::Sender<Arc<TokenSigner>>) -> Arc<TokenSigner> {
        let channels = ControlChannels::default();
        let (credentials, _control) = Credentials::new(CredentialSettings::default(), channels).unwrap();
        let connector = Connector::tcp(None, Duration::from_secs(1));
        let members = Arc::new(ArcSwap::from_pointee(Membership::unknown(Instant::now())));
        let revisions = SigningRevision::new(questions, MetricsPages { connector, members });
        let config = SignJwt {
            method: JwtMethod::named("HS256").unwrap(),
            key: JwtKey::Shared(Secret::new(vec![7; 32])),
            lifetime: Duration::from_secs(60),
        };
        TokenSigner::new(&Arc::new(config), revisions, Arc::clone(&credentials.shared))
    }

    fn told(signer: &TokenSigner, revision: u64) {
        signer.revisions().known.revision.store(revision, Ordering::SeqCst);
        drop(signer.revisions().known.answered.send_replace(Ok(revision)));
    }

    #[tokio::test]
    async fn one_question_serves_all_who_wait_and_all_who_held_the_old_revision() {
        let (signer, mut asked) = signer();
        let revisions = signer.revisions().clone();
        let waiting: Vec<_> = (0..10)
            .map(|_| {
                let (revisions, signer) = (revisions.clone(), Arc::clone(&signer));
                let mut current = async move { revisions.current(&signer).await }.boxed();
                assert!((&mut current).now_or_never().is_none());
                current
            })
            .collect();
        assert!(asked.try_recv().is_ok() && asked.try_recv().is_err(), "one question");
        told(&signer, 7);
        for current in waiting {
            assert_eq!(current.await.unwrap(), 7);
        }
        // Ten tokens carry revision 7. The first refusal causes a new question; refusals after the answer do
        // not.
        revisions.refused(7);
        let mut next = revisions.current(&signer).boxed();
        assert!((&mut next).now_or_never().is_none() && asked.try_recv().is_ok());
        told(&signer, 8);
        assert_eq!(next.await.unwrap(), 8);
        (0..9).for_each(|_| revisions.refused(7));
        assert_eq!(revisions.current(&signer).await.unwrap(), 8);
        assert!(asked.try_recv().is_err());
    }

    /// Simulates a reload: a caller still holds the previous signer.
    #[tokio::test]
    async fn a_question_waits_for_room_behind_another_signers() {
        let (questions, mut asked) = mpsc::channel(1);
        let (before, now) = (asking(questions.clone()), asking(questions));
        let mut first = before.revisions().current(&before).boxed();
        let mut second = now.revisions().current(&now).boxed();
        assert!((&mut first).now_or_never().is_none() && (&mut second).now_or_never().is_none());
        let answer = async |question: Arc<TokenSigner>| told(&question, 7);
        answer(asked.recv().await.unwrap()).await;
        assert_eq!(first.await.unwrap(), 7);
        assert!((&mut second).now_or_never().is_none());
        let question = asked.try_recv().expect("the second question");
        assert!(Arc::ptr_eq(&question, &now));
        answer(question).await;
        assert_eq!(second.await.unwrap(), 7);
    }

    #[tokio::test(start_paused = true)]
    async fn a_refused_token_is_replaced_though_the_revision_is_the_same_and_by_no_more_than_one_a_second() {
        let (signer, _asked) = signer();
        told(&signer, 7);
        let alice = SignedIdentity::new(&"alice".into(), &signer);
        let refused = async || {
            let token = alice.token().await.unwrap();
            alice.invalidate(&token);
            told(&signer, 7);
            token.serial()
        };
        let first = alice.token().await.unwrap().serial();
        tokio::time::advance(Duration::from_secs(1)).await;
        assert_eq!(refused().await, first);
        let second = refused().await;
        assert_ne!(second, first);
        for _ in 0..100 {
            assert_eq!(refused().await, second, "one that is signed in the same second is the same");
        }
        tokio::time::advance(Duration::from_secs(1)).await;
        assert_ne!(alice.token().await.unwrap().serial(), second);
        assert_eq!(signer.signed(), 3);
    }

    #[tokio::test]
    async fn where_no_member_tells_all_who_wait_are_told_so() {
        let (signer, mut asked) = signer();
        let mut current = signer.revisions().current(&signer).boxed();
        assert!((&mut current).now_or_never().is_none());
        let question = asked.try_recv().unwrap();
        question.revisions().answer(&question, &ControlChannels::default()).await;
        assert!(matches!(current.await, Err(LoginFailure::NoAnswer)));
    }
}
