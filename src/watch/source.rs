//! One upstream Watch stream: from "wanted" to its end.
//!
//! Owns: choosing its member, waiting before it where others failed, having its credential proven. Must not know what
//! a watch is: the hub's business. Invariants: every wait and read has a limit; `hasleader` always goes upstream, so
//! that a member without a leader ends the stream instead of going silent.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::LocalBoxFuture;
use http::uri::PathAndQuery;
use http::{HeaderMap, HeaderName, HeaderValue};

use crate::identity::MemberId;
use crate::refusal::{Refusal, Status};
use crate::rpc::method::lookup;
use crate::rpc::outcome::{Asked, Proof, Verdict, verdict};
use crate::upstream::bidi::{Bidi, Next};
use crate::upstream::choose::Wanted;
use crate::upstream::credential::{LoginFailure, Token};
use crate::upstream::membership::{Auth, Hint, Member};
use crate::upstream::read::{ReadError, local_revision};
use crate::upstream::send::{As, Door, upstream_headers};
use crate::watch::hub::{Credential, Loss, Traits};

/// The method's path.
pub const PATH: &str = "/etcdserverpb.Watch/Watch";
const HAS_LEADER: HeaderName = HeaderName::from_static("hasleader");
const FIRST_PAUSE: Duration = Duration::from_millis(25);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// What opening a stream takes.
#[derive(Clone)]
pub struct Route {
    /// The way upstream.
    pub door: Rc<Door>,
    /// As whom.
    pub whom: As,
    /// The client's header.
    pub headers: HeaderMap,
    /// The client connection's own member.
    pub home: Option<MemberId>,
}

/// A stream that is open, or whose request is on the way.
pub struct Source {
    /// Which member carries it.
    pub member: Arc<Member>,
    /// What its version says.
    pub traits: Traits,
    stream: Bidi,
    token: Option<Token>,
}

/// A stream that is being opened.
pub type Opening = LocalBoxFuture<'static, Result<Source, Failed>>;

/// No stream, and which member that speaks against.
pub struct Failed {
    /// Why.
    pub why: Loss,
    /// The member that failed, if it was one.
    pub member: Option<MemberId>,
}

/// What came from a stream.
pub enum Came {
    /// A WatchResponse.
    Message(bytes::Bytes),
    /// Its end.
    Lost(Loss),
}

impl Route {
    /// Opens a stream on a member that is not among `tried`, where there is another. `attempt` counts the losses
    /// before it.
    #[must_use]
    pub fn open(&self, credential: Credential, attempt: u32, tried: Vec<MemberId>) -> Opening {
        let route = self.clone();
        async move { route.opened(credential, attempt, &tried).await }.boxed_local()
    }

    async fn opened(
        &self,
        credential: Credential,
        attempt: u32,
        tried: &[MemberId],
    ) -> Result<Source, Failed> {
        if attempt > 1 {
            let pause = (FIRST_PAUSE * 2_u32.saturating_pow(attempt - 2)).min(LONGEST_PAUSE);
            // Half of it to one and a half: the watches of a lost member do not come back all at once.
            let half = u64::try_from(pause.as_millis() / 2).unwrap_or(0);
            let drawn = Duration::from_millis(half + self.door.chooser.draw(2 * half));
            self.door.pause_or_change(drawn).await;
        }
        let nobody = Failed { why: Loss::Upstream, member: None };
        let member = self.door.choose(Wanted::Home(self.home), tried).ok_or(nobody)?;
        let failed = |why| Failed { why, member: Some(member.id) };
        if credential == Credential::Fresh {
            if matches!(self.whom, As::User(_)) && self.door.members.auth.now() == Auth::Off {
                // Only with auth on is a credential refused. Where it is off after all, the login says so.
                self.door.auth_is(Auth::On);
            }
            // A read with the token at hand proves it, or renews it where the member refuses it.
            match local_revision(&self.door, &self.whom, &member).await {
                Ok(_) | Err(ReadError::Refused(_)) => {}
                Err(ReadError::Login(failure)) => return Err(failed(login_loss(&failure))),
                Err(ReadError::Lost) => return Err(failed(Loss::Upstream)),
            }
        }
        let token = self.door.token(&self.whom, &member).await;
        let token = token.map_err(|failure| failed(login_loss(&failure)))?;
        let mut headers = upstream_headers(&self.headers, token.as_ref());
        headers.insert(HAS_LEADER, HeaderValue::from_static("true"));
        headers.remove("grpc-timeout");
        let stream = Bidi::open(&self.door, &member, PathAndQuery::from_static(PATH), headers);
        let told = member.traits();
        let traits = Traits {
            progress_trusted: told.progress_ordered && told.progress_after_idle,
            exact_refusals: told.exact_watch_refusals,
            late_created: told.late_created,
        };
        Ok(Source { member, traits, stream, token })
    }

    /// Reads a revision of `source`'s member, for the anchor of a watch from now.
    pub fn reader(&self, source: &Source) -> (Rc<Door>, As, Arc<Member>) {
        (Rc::clone(&self.door), self.whom.clone(), Arc::clone(&source.member))
    }
}

impl Source {
    /// Puts a WatchRequest in line.
    pub fn send(&mut self, message: &[u8]) {
        self.stream.send(message);
    }

    /// What comes next. Cancel-safe.
    pub async fn next(&mut self) -> Next {
        self.stream.next().await
    }

    /// What the end of the stream means to the hub; tells those who keep members and tokens.
    #[must_use]
    pub fn ended(&self, door: &Door, whom: &As, end: &Next) -> Loss {
        match end {
            Next::Message(_) => Loss::Upstream,
            Next::Broken(reason) => {
                tracing::debug!(member = %self.member.id, %reason, "a watch stream broke");
                self.member.suspect();
                door.members.hints.send(Hint::Unreachable(self.member.id));
                Loss::Upstream
            }
            Next::Ended(status) => {
                tracing::debug!(member = %self.member.id, ?status, "a member ended a watch stream");
                self.refused(whom, status)
            }
        }
    }

    fn refused(&self, whom: &As, status: &Status) -> Loss {
        let proof = if self.token.is_some() { Proof::Token } else { Proof::NoToken };
        let verdict =
            lookup(PATH).map(|method| verdict(&Asked { method, effect: method.effect, proof }, status));
        match (verdict, whom, &self.token) {
            (Some(Verdict::Heal), As::User(identity), Some(token)) => {
                identity.invalidate(self.member.id, token);
                Loss::Credential
            }
            _ => Loss::Upstream,
        }
    }
}

/// What the hub is told when no token can be had.
#[must_use]
pub fn login_loss(failure: &LoginFailure) -> Loss {
    match failure {
        LoginFailure::WrongPassword | LoginFailure::NoPassword => {
            Loss::Denied(Refusal::INVALID_AUTH_TOKEN.status().cancel_reason())
        }
        _ => Loss::Upstream,
    }
}
