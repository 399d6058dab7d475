//! The cluster's auth revision, required in every token signed with etcd's own key.
//!
//! Owns: the last known auth revision, the single flight of questions, and how to ask each etcd version. Must
//! not know: when a token is signed. Invariants: after a member called a revision old, the revision is not
//! reported again unless a member confirmed the revision later; waiters may leave, the question continues.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use arc_swap::ArcSwap;
use tokio::sync::{mpsc, watch};

use super::LoginFailure;
use super::auth_calls::{self, AuthStatusAnswer};
use super::token_signer::TokenSigner;
use keyward_cluster::discovery::metrics_page;
use keyward_cluster::membership::{ControlChannels, Membership};
use keyward_dial::connect::Connector;

/// Time limit for one member's answer.
pub(super) const LIMIT: Duration = Duration::from_secs(2);

/// Queue of requests for the auth revision. A single queued request suffices, because the answer serves all
/// waiters.
pub(super) type RevisionRequests = mpsc::Receiver<SigningRevision>;

/// Access to the HTTP/1.1 pages of members.
#[derive(Clone)]
pub struct MetricsPages {
    /// The connector for member connections.
    pub connector: Connector,
    /// The published members.
    pub members: Arc<ArcSwap<Membership>>,
}

/// The auth revision as known for the tokens of one signer, with the means to ask for a new one.
#[derive(Clone)]
pub(super) struct SigningRevision {
    signer: Arc<TokenSigner>,
    known: Arc<KnownRevision>,
    questions: mpsc::Sender<SigningRevision>,
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
    pub(super) fn new(
        signer: Arc<TokenSigner>,
        questions: mpsc::Sender<SigningRevision>,
        pages: MetricsPages,
    ) -> Self {
        let (answered, _) = watch::channel(Err(LoginFailure::NoAnswer));
        let known = KnownRevision { revision: AtomicU64::new(0), refusals: AtomicU64::new(0), answered };
        Self { signer, known: Arc::new(known), questions, pages }
    }

    pub(super) fn signer(&self) -> &TokenSigner {
        &self.signer
    }

    /// Returns the last known auth revision; asks members if unknown. Cancel-safe: a question already sent
    /// continues.
    pub(super) async fn current(&self) -> Result<u64, LoginFailure> {
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
            if self.questions.send(self.clone()).await.is_ok() {
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
    pub(super) async fn answer(&self, channels: &ControlChannels) {
        if self.known.revision.load(Ordering::SeqCst) != 0 {
            return;
        }
        let ended = loop {
            let refusals = self.known.refusals.load(Ordering::SeqCst);
            let ended = self.ask(channels).await;
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
    async fn ask(&self, channels: &ControlChannels) -> Result<u64, LoginFailure> {
        let root = self.signer.sign("root", 1, SystemTime::now()).map_err(|_| LoginFailure::NoAnswer)?;
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

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;
    use tokio::time::Instant;

    use super::*;
    use crate::credentials::{CredentialSettings, Credentials, SignedIdentity};
    use keyward_base::secret::Secret;
    use keyward_config::upstream_users::{JwtKey, JwtMethod, SignJwt};

    /// The revision of a signer whose questions only the test answers.
    fn revision() -> (SigningRevision, RevisionRequests) {
        let (questions, asked) = mpsc::channel(1);
        (asking(questions), asked)
    }

    fn asking(questions: mpsc::Sender<SigningRevision>) -> SigningRevision {
        let channels = ControlChannels::default();
        let (credentials, _control) = Credentials::new(CredentialSettings::default(), channels).unwrap();
        let connector = Connector::tcp(None, Duration::from_secs(1));
        let members = Arc::new(ArcSwap::from_pointee(Membership::unknown(Instant::now())));
        let config = SignJwt {
            method: JwtMethod::named("HS256").unwrap(),
            key: JwtKey::Shared(Secret::new(vec![7; 32])),
            lifetime: Duration::from_secs(60),
        };
        let signer = TokenSigner::new(&Arc::new(config), Arc::clone(&credentials.shared));
        SigningRevision::new(signer, questions, MetricsPages { connector, members })
    }

    fn told(signing: &SigningRevision, revision: u64) {
        signing.known.revision.store(revision, Ordering::SeqCst);
        drop(signing.known.answered.send_replace(Ok(revision)));
    }

    #[tokio::test]
    async fn one_question_serves_all_who_wait_and_all_who_held_the_old_revision() {
        let (revision, mut asked) = revision();
        let waiting: Vec<_> = (0..10)
            .map(|_| {
                let revision = revision.clone();
                let mut current = async move { revision.current().await }.boxed();
                assert!((&mut current).now_or_never().is_none());
                current
            })
            .collect();
        assert!(asked.try_recv().is_ok() && asked.try_recv().is_err(), "one question");
        told(&revision, 7);
        for current in waiting {
            assert_eq!(current.await.unwrap(), 7);
        }
        // Ten tokens carry revision 7. The first refusal causes a new question; refusals after the answer do
        // not.
        revision.refused(7);
        let mut next = revision.current().boxed();
        assert!((&mut next).now_or_never().is_none() && asked.try_recv().is_ok());
        told(&revision, 8);
        assert_eq!(next.await.unwrap(), 8);
        (0..9).for_each(|_| revision.refused(7));
        assert_eq!(revision.current().await.unwrap(), 8);
        assert!(asked.try_recv().is_err());
    }

    /// Simulates a reload: a caller still holds the previous signer.
    #[tokio::test]
    async fn a_question_waits_for_room_behind_another_signers() {
        let (questions, mut asked) = mpsc::channel(1);
        let (before, now) = (asking(questions.clone()), asking(questions));
        let mut first = before.current().boxed();
        let mut second = now.current().boxed();
        assert!((&mut first).now_or_never().is_none() && (&mut second).now_or_never().is_none());
        let answer = async |question: SigningRevision| told(&question, 7);
        answer(asked.recv().await.unwrap()).await;
        assert_eq!(first.await.unwrap(), 7);
        assert!((&mut second).now_or_never().is_none());
        let question = asked.try_recv().expect("the second question");
        assert!(Arc::ptr_eq(&question.signer, &now.signer));
        answer(question).await;
        assert_eq!(second.await.unwrap(), 7);
    }

    #[tokio::test(start_paused = true)]
    async fn a_refused_token_is_replaced_though_the_revision_is_the_same_and_by_no_more_than_one_a_second() {
        let (revision, _asked) = revision();
        told(&revision, 7);
        let alice = SignedIdentity::new(&"alice".into(), &revision);
        // The wall clock goes with the paused clock: a real second may pass at any step of the test.
        let (began, epoch) = (Instant::now(), SystemTime::now());
        let token = async || {
            let clocks = || (Instant::now(), epoch + began.elapsed());
            alice.token_by(clocks).await.unwrap()
        };
        let refused = async || {
            let token = token().await;
            alice.invalidate(&token);
            told(&revision, 7);
            token.serial()
        };
        let first = token().await.serial();
        tokio::time::advance(Duration::from_secs(1)).await;
        assert_eq!(refused().await, first);
        let second = refused().await;
        assert_ne!(second, first);
        for _ in 0..100 {
            assert_eq!(refused().await, second, "one that is signed in the same second is the same");
        }
        tokio::time::advance(Duration::from_secs(1)).await;
        assert_ne!(token().await.serial(), second);
        assert_eq!(revision.signer().signed(), 3);
    }

    #[tokio::test]
    async fn where_no_member_tells_all_who_wait_are_told_so() {
        let (revision, mut asked) = revision();
        let mut current = revision.current().boxed();
        assert!((&mut current).now_or_never().is_none());
        let question = asked.try_recv().unwrap();
        question.answer(&ControlChannels::default()).await;
        assert!(matches!(current.await, Err(LoginFailure::NoAnswer)));
    }
}
