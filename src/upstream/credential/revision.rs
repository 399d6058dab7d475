//! The cluster's auth revision, which every token that we sign must carry.
//!
//! Owns: what is known of it, that one question serves all who wait, and how the question is asked of each version.
//! Must not know: what a token looks like. Invariants: once a revision was called old it is not answered again unless a
//! member was asked after that; those who wait may leave, the question goes on.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use arc_swap::ArcSwap;
use tokio::sync::{mpsc, watch};

use super::LoginFailure;
use super::signed::Signer;
use super::wire::{self, AuthSaid};
use crate::upstream::connect::Connector;
use crate::upstream::members::metrics_page;
use crate::upstream::membership::{ControlChannels, Membership};

/// How long one member may take to tell.
pub(super) const LIMIT: Duration = Duration::from_secs(2);

/// Whoever wants to know; one is enough, since the answer is for all.
pub(super) type Questions = mpsc::Receiver<Arc<Signer>>;

/// Who can be asked for the pages that members serve by HTTP/1.1.
#[derive(Clone)]
pub struct Pages {
    /// Reaches them.
    pub connector: Connector,
    /// The published members.
    pub members: Arc<ArcSwap<Membership>>,
}

/// What is known of the auth revision.
#[derive(Clone)]
pub(super) struct Revisions {
    known: Arc<Known>,
    questions: mpsc::Sender<Arc<Signer>>,
    pages: Pages,
}

struct Known {
    /// 0: unknown. etcd's begin with 1.
    revision: AtomicU64,
    /// How often a revision was called old.
    refusals: AtomicU64,
    /// How the last question ended.
    answered: watch::Sender<Result<u64, LoginFailure>>,
}

impl Revisions {
    pub(super) fn new(questions: mpsc::Sender<Arc<Signer>>, pages: Pages) -> Self {
        let (answered, _) = watch::channel(Err(LoginFailure::NoAnswer));
        let known = Known { revision: AtomicU64::new(0), refusals: AtomicU64::new(0), answered };
        Self { known: Arc::new(known), questions, pages }
    }

    /// The revision as last heard, asked for where it is not known. Cancel-safe: a question that was asked goes on.
    pub(super) async fn current(&self, signer: &Arc<Signer>) -> Result<u64, LoginFailure> {
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
        // What is in the channel may be the question of another signer, whose answer would not be ours.
        let asking = async {
            if self.questions.send(Arc::clone(signer)).await.is_ok() {
                self.questions.closed().await;
            }
        };
        tokio::select! {
            biased; // what was answered counts, whoever asked
            changed = answered.changed() => match changed {
                Ok(()) => answered.borrow().clone(),
                Err(_) => Err(LoginFailure::NoAnswer),
            },
            () = asking => Err(LoginFailure::NoAnswer),
        }
    }

    /// A member called `revision` old: known → unknown, if it is still the one that is known.
    pub(super) fn refused(&self, revision: u64) {
        let known = &self.known.revision;
        if known.compare_exchange(revision, 0, Ordering::SeqCst, Ordering::SeqCst).is_ok() {
            self.known.refusals.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// Members are those of another cluster: known → unknown.
    pub(super) fn forget(&self) {
        self.known.revision.store(0, Ordering::SeqCst);
        self.known.refusals.fetch_add(1, Ordering::SeqCst);
    }

    /// Asks, for all who wait: unknown → known. What a refusal overtook is asked again.
    pub(super) async fn answer(&self, signer: &Signer, channels: &ControlChannels) {
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

    /// etcd 3.5 and 3.6 tell it to root, whatever revision root's own token carries; 3.7 to anybody; 3.4 has no such call,
    /// and shows it among its metrics.
    async fn ask(&self, signer: &Signer, channels: &ControlChannels) -> Result<u64, LoginFailure> {
        let root = signer.sign("root", 1, SystemTime::now()).map_err(|_| LoginFailure::NoAnswer)?;
        let mut failure = LoginFailure::NoAnswer;
        for channel in channels.load().values().cloned() {
            let asked = wire::auth_status(channel, &root);
            match tokio::time::timeout(LIMIT, asked).await.unwrap_or(AuthSaid::Nothing(None)) {
                AuthSaid::Revision(revision) => return Ok(revision),
                AuthSaid::Disabled => return Err(LoginFailure::AuthDisabled),
                AuthSaid::Unknown => break,
                AuthSaid::Nothing(status) => {
                    failure = status.map_or(LoginFailure::NoAnswer, LoginFailure::Unavailable);
                }
            }
        }
        self.pages.auth_revision().await.ok_or(failure)
    }
}

impl Pages {
    /// The auth revision that a member shows, the leader first: another may be behind.
    pub(super) async fn auth_revision(&self) -> Option<u64> {
        let members = self.members.load_full();
        let rest = members.ready_voters().filter(|member| Some(member.id) != members.leader);
        for member in members.leader().into_iter().chain(rest) {
            let page = metrics_page::text(&self.connector, &member.endpoint, member.at);
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
    use crate::config::users::{JwtKey, JwtMethod, SignJwt};
    use crate::secret::Secret;
    use crate::upstream::credential::{CredentialSettings, Credentials, SignedIdentity};

    /// A signer whose questions nobody but the test answers.
    fn signer() -> (Arc<Signer>, Questions) {
        let (questions, asked) = mpsc::channel(1);
        (asking(questions), asked)
    }

    fn asking(questions: mpsc::Sender<Arc<Signer>>) -> Arc<Signer> {
        let channels = ControlChannels::default();
        let (credentials, _control) = Credentials::new(CredentialSettings::default(), channels).unwrap();
        let connector = Connector::tcp(None, Duration::from_secs(1));
        let members = Arc::new(ArcSwap::from_pointee(Membership::unknown(Instant::now())));
        let revisions = Revisions::new(questions, Pages { connector, members });
        let config = SignJwt {
            method: JwtMethod::named("HS256").unwrap(),
            key: JwtKey::Shared(Secret::new(vec![7; 32])),
            lifetime: Duration::from_secs(60),
        };
        Signer::new(&Arc::new(config), revisions, Arc::clone(&credentials.shared))
    }

    fn told(signer: &Signer, revision: u64) {
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
        // Ten hold tokens of revision 7. The first that is refused has it asked for; those after the answer do not.
        revisions.refused(7);
        let mut next = revisions.current(&signer).boxed();
        assert!((&mut next).now_or_never().is_none() && asked.try_recv().is_ok());
        told(&signer, 8);
        assert_eq!(next.await.unwrap(), 8);
        (0..9).for_each(|_| revisions.refused(7));
        assert_eq!(revisions.current(&signer).await.unwrap(), 8);
        assert!(asked.try_recv().is_err());
    }

    /// As after a reload: somebody still holds the one before.
    #[tokio::test]
    async fn a_question_waits_for_room_behind_another_signers() {
        let (questions, mut asked) = mpsc::channel(1);
        let (before, now) = (asking(questions.clone()), asking(questions));
        let mut first = before.revisions().current(&before).boxed();
        let mut second = now.revisions().current(&now).boxed();
        assert!((&mut first).now_or_never().is_none() && (&mut second).now_or_never().is_none());
        let answer = async |question: Arc<Signer>| told(&question, 7);
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
