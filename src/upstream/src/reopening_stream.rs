//! A stream to a member, opened again whenever it is lost, at another member if possible.
//!
//! Owns: the wait before an attempt, the choice of the member, the credential, the request header, the
//! members tried, the report of a lost member. Must not know: the meaning of messages, the statuses final
//! for a client. The watch hub decides itself when to open a stream: [`StreamRoute`] and [`OpenStream`] only.
//! Invariants: the first retry follows at once, later retries after a growing wait, cut short by a change of
//! the membership; a member that failed is tried again only after all other ready members.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt;
use futures_util::future::LocalBoxFuture;
use http::uri::PathAndQuery;
use http::{HeaderMap, HeaderName, HeaderValue};
use prometheus_client::metrics::counter::Counter;

use crate::bidi::{Bidi, BidiEvent};
use crate::credentials::CallCredential;
use crate::send::{UpstreamClient, UpstreamUser, upstream_headers};
use keyward_access::policy::permit::Permit;
use keyward_cluster::choose::MemberTarget;
use keyward_cluster::cluster_outage::UpstreamLink;
use keyward_cluster::membership::{AuthSetting, Member, MembershipHint};
use keyward_etcd::identity::MemberId;
use keyward_etcd::refusal::{AnswerEnd, Refusal, Status};
use keyward_etcd::rpc::frame::encode;
use keyward_etcd::rpc::method::Method;
use keyward_etcd::rpc::outcome::{JudgedCall, RevealedAuth, auth_state};

const HAS_LEADER: HeaderName = HeaderName::from_static("hasleader");

/// How the streams of a method are opened.
pub struct StreamRules {
    /// The wait before the second retry in a row, doubled with each further retry.
    pub first_pause: Duration,
    /// The longest wait.
    pub longest_pause: Duration,
    /// Each wait takes half to one and a half: the streams of a lost member do not all return at once.
    pub has_jitter: bool,
    /// `hasleader` always goes upstream: a member without a leader ends the stream instead of going silent.
    pub requires_leader: bool,
}

/// The requirements for opening the upstream streams of a client's stream.
pub struct StreamRoute {
    /// The shard's sender of upstream requests.
    pub upstream: Rc<UpstreamClient>,
    /// The upstream user.
    pub user: UpstreamUser,
    /// The headers of the client's request.
    pub headers: HeaderMap,
    /// The method's row.
    pub method: &'static Method,
    /// The rules of the method's streams.
    pub rules: &'static StreamRules,
    /// The only request message, without its frame; `None` if the client streams.
    pub request: Option<Bytes>,
    /// The permit of the client's stream.
    pub permit: Permit,
}

/// An open stream: the request's header is on its way.
pub struct OpenStream {
    /// The messages.
    pub bidi: Bidi,
    /// The member carrying the stream.
    pub member: Arc<Member>,
    route: Rc<StreamRoute>,
    credential: CallCredential,
}

/// The next step after the end of a stream or a failed attempt.
pub enum ReopenStep {
    /// Open the next stream at once: the member did not fail.
    Now,
    /// Open the next stream after the wait, if possible at another member than the one named.
    Elsewhere(Option<MemberId>),
    /// End the client's stream so.
    End(AnswerEnd),
}

/// An event of a [`ReopeningStream`].
pub enum ReopeningEvent<C> {
    /// A stream was opened.
    Opened,
    /// No stream was opened.
    NotOpened(ReopenStep),
    /// A message, or the end of the stream. An unreachable member was already reported.
    Received(BidiEvent),
    /// The outcome of a check, see [`ReopeningStream::check`].
    Checked(C),
}

enum ReopeningState<C> {
    /// No stream, none wanted yet.
    Closed,
    /// Waiting, choosing a member and getting a credential.
    Opening(LocalBoxFuture<'static, Result<Box<OpenStream>, ReopenStep>>),
    Open(Box<OpenStream>),
    /// A read decides the next step.
    Checking(LocalBoxFuture<'static, C>),
}

/// The upstream streams of a client's stream, one at a time. `C` is the outcome of a check.
pub struct ReopeningStream<C> {
    /// The requirements for opening a stream.
    pub route: Rc<StreamRoute>,
    target: MemberTarget,
    resumed: Counter,
    link: Rc<UpstreamLink>,
    state: ReopeningState<C>,
    /// Members that failed since the last success.
    tried: Vec<MemberId>,
    /// Streams and attempts lost since the last success.
    pub losses: u32,
    /// The losses counted for the next wait; 0 opens at once.
    pause_after: u32,
    has_opened: bool,
    has_delivered: bool,
}

impl StreamRoute {
    /// Waits before the attempt after `losses` losses in a row.
    pub async fn pause(&self, losses: u32) {
        let Some(doublings) = losses.checked_sub(2) else { return };
        let StreamRules { first_pause, longest_pause, .. } = *self.rules;
        let mut pause = (first_pause * 2_u32.saturating_pow(doublings)).min(longest_pause);
        if self.rules.has_jitter {
            let half = u64::try_from(pause.as_millis() / 2).unwrap_or_default();
            pause = Duration::from_millis(half + self.upstream.chooser.draw(2 * half));
        }
        self.upstream.pause_or_change(pause).await;
    }

    /// The refusal of a stream that ended so without being opened, if another attempt would not help.
    #[must_use]
    pub fn refusal_of(&self, target: MemberTarget, end: &BidiEvent) -> Option<Refusal> {
        match end {
            BidiEvent::NoRoom => Some(Refusal::TOO_MANY_REQUESTS),
            BidiEvent::NotAccepted(shown) => self
                .upstream
                .is_refused_everywhere(target, shown)
                .then_some(Refusal::CERTIFICATE_NOT_ACCEPTED),
            _ => None,
        }
    }

    /// Begins a stream to `member`.
    #[must_use]
    pub fn start(self: Rc<Self>, member: Arc<Member>, credential: CallCredential) -> OpenStream {
        let mut head = upstream_headers(&self.headers, &credential, self.permit);
        if self.rules.requires_leader {
            head.fields.insert(HAS_LEADER, HeaderValue::from_static("true"));
        }
        // The client's deadline is kept downstream; upstream the timeout would restart with each stream.
        head.fields.remove("grpc-timeout");
        let path = PathAndQuery::from_static(self.method.path);
        let bidi = match &self.request {
            Some(request) => Bidi::ask(&self.upstream, &member, path, head, encode(request)),
            None => Bidi::open(&self.upstream, &member, path, head),
        };
        OpenStream { bidi, member, route: self, credential }
    }

    async fn open(
        self: Rc<Self>,
        target: MemberTarget,
        tried: &[MemberId],
    ) -> Result<Box<OpenStream>, ReopenStep> {
        let member = self.upstream.choose(target, tried).ok_or(ReopenStep::Elsewhere(None))?;
        match self.upstream.credential_for(&self.user, &member).await {
            Ok(credential) => Ok(Box::new(self.start(member, credential))),
            Err(failure) if failure.is_refusal() => Err(ReopenStep::End(Refusal::INVALID_AUTH_TOKEN.into())),
            Err(_) => Err(ReopenStep::Elsewhere(Some(member.id))),
        }
    }
}

impl OpenStream {
    /// The stream's call, to judge a status.
    #[must_use]
    pub fn judged(&self) -> JudgedCall {
        let method = self.route.method;
        JudgedCall { method, effect: method.effect, proof: self.credential.proof() }
    }

    /// Reports auth as on if `status` reveals so, and returns true.
    pub fn reports_auth_on(&self, status: &Status) -> bool {
        let is_on = auth_state(&self.judged(), status) == Some(RevealedAuth::On);
        if is_on {
            self.route.upstream.report_auth(AuthSetting::On);
        }
        is_on
    }

    /// Gives up the refused credential. Returns false if no other credential can be obtained.
    #[must_use]
    pub fn renew_credential(&self) -> bool {
        let user = &self.route.user;
        matches!(user, UpstreamUser::User(identity) if identity.renew(self.member.id, &self.credential))
    }

    /// Logs the end of the stream, and reports an unreachable member. A message is no end.
    pub fn report_end(&self, event: &BidiEvent) {
        let (method, member) = (self.route.method.path, self.member.id);
        match event {
            BidiEvent::Message(_) => {}
            BidiEvent::Ended(status) => {
                tracing::debug!(method, %member, ?status, "a member ended an upstream stream");
            }
            BidiEvent::Broken(reason) => {
                tracing::debug!(method, %member, %reason, "an upstream stream broke");
                self.member.suspect();
                self.route.upstream.members.hints.send(MembershipHint::Unreachable(member));
            }
            BidiEvent::Left => tracing::debug!(method, %member, "an upstream stream leaves its member"),
            BidiEvent::Unopened(reason) => {
                tracing::debug!(method, %member, %reason, "an upstream stream was not opened");
            }
            BidiEvent::NotAccepted(shown) => {
                tracing::debug!(method, %member, user = %shown.user(), "the member refused the certificate");
            }
            BidiEvent::NoRoom => tracing::debug!(method, %member, "an upstream stream found no room"),
        }
    }
}

impl<C> ReopeningStream<C> {
    /// A closed stream to members for `target`. `resumed` counts every stream opened after the first one;
    /// `link` shows if a stream serves the client.
    #[must_use]
    pub fn new(route: StreamRoute, target: MemberTarget, resumed: Counter, link: Rc<UpstreamLink>) -> Self {
        Self {
            route: Rc::new(route),
            target,
            resumed,
            link,
            state: ReopeningState::Closed,
            tried: Vec::new(),
            losses: 0,
            pause_after: 0,
            has_opened: false,
            has_delivered: false,
        }
    }

    /// The open stream.
    pub fn open_stream(&mut self) -> Option<&mut OpenStream> {
        match &mut self.state {
            ReopeningState::Open(stream) => Some(stream),
            _ => None,
        }
    }

    /// closed → opening.
    pub fn open(&mut self) {
        if !matches!(self.state, ReopeningState::Closed) {
            return;
        }
        let (route, target, tried) = (Rc::clone(&self.route), self.target, self.tried.clone());
        let losses = std::mem::take(&mut self.pause_after);
        let resumed = std::mem::replace(&mut self.has_opened, true).then(|| self.resumed.clone());
        let opening = async move {
            route.pause(losses).await;
            if let Some(resumed) = resumed {
                resumed.inc();
            }
            route.open(target, &tried).await
        };
        self.state = ReopeningState::Opening(opening.boxed_local());
    }

    /// The next event; never, while the stream is closed. Cancel-safe.
    ///
    /// opening → open or closed; checking → closed. After the end of a stream the caller closes the stream.
    pub async fn next(&mut self) -> ReopeningEvent<C> {
        match &mut self.state {
            ReopeningState::Closed => std::future::pending().await,
            ReopeningState::Opening(opening) => {
                let (state, event) = match opening.await {
                    Ok(stream) => (ReopeningState::Open(stream), ReopeningEvent::Opened),
                    Err(step) => (ReopeningState::Closed, ReopeningEvent::NotOpened(step)),
                };
                self.state = state;
                event
            }
            ReopeningState::Open(stream) => {
                let event = stream.bidi.next().await;
                stream.report_end(&event);
                ReopeningEvent::Received(event)
            }
            ReopeningState::Checking(check) => {
                let outcome = check.await;
                self.state = ReopeningState::Closed;
                ReopeningEvent::Checked(outcome)
            }
        }
    }

    /// open → checking: `check` decides on the next step.
    pub fn check(&mut self, check: impl Future<Output = C> + 'static) {
        self.state = ReopeningState::Checking(check.boxed_local());
    }

    /// Notes an answer of a member: the client is served.
    pub fn note_delivery(&mut self) {
        self.has_delivered = true;
        self.link.set_up();
    }

    /// Notes a success: every member counts as untried, and the next loss as the first.
    pub fn forget_losses(&mut self) {
        self.tried.clear();
        self.losses = 0;
    }

    /// The step that leaves the present member.
    #[must_use]
    pub fn leave_member(&mut self) -> ReopenStep {
        ReopenStep::Elsewhere(self.open_stream().map(|stream| stream.member.id))
    }

    /// The next step after the end of the open stream, unless a status ended the stream.
    #[must_use]
    pub fn step_after(&mut self, end: &BidiEvent) -> ReopenStep {
        // A stream that served its client waits, as for a member: the certificate may be replaced.
        match self.route.refusal_of(self.target, end) {
            Some(refusal) if !self.has_delivered => ReopenStep::End(refusal.into()),
            _ => self.leave_member(),
        }
    }

    /// any → closed.
    ///
    /// # Errors
    /// The end of the client's stream.
    pub fn close(&mut self, step: ReopenStep) -> Result<(), AnswerEnd> {
        self.state = ReopeningState::Closed;
        self.link.set_down();
        match step {
            ReopenStep::Now => {}
            ReopenStep::Elsewhere(failed) => {
                self.route.upstream.try_last(self.target, &mut self.tried, failed);
                self.losses += 1;
                self.pause_after = self.losses;
            }
            ReopenStep::End(end) => return Err(end),
        }
        Ok(())
    }
}
