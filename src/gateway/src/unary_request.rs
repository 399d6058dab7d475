//! The request of a call with a single request message, complete and checked, and its caller.
//!
//! Owns: waiting for the message, the check of its form, the properties read from the message, and
//! identifying the caller again after a wait. Must not know: how the request is served.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::rc::Rc;

use bytes::Bytes;

use crate::call::Call;
use crate::call_trace::CallWait;
use crate::caller::Caller;
use crate::exchange::Exchange;
use crate::permission::DecidedRequest;
use crate::usage_limits::AnswerCheck;
use crate::{
    addressed_member, audited_request, namespaces, permission, request_body, usage_limits, write_order,
};
use keyward_access::policy::permit::Permit;
use keyward_cluster::choose::MemberTarget;
use keyward_config::MemberPreference;
use keyward_downstream::request_memory::RequestMemoryCharge;
use keyward_downstream::request_messages::RequestBody;
use keyward_etcd::refusal::Refusal;
use keyward_etcd::rpc::method::{Effect, Handler, Lane};
use keyward_etcd::rpc::namespace::lease_ids::RequestLease;
use keyward_etcd::rpc::{body_shape, canonical, frame, quorum};

/// A complete request with its caller.
pub struct UnaryRequest {
    /// The caller, identified under the current rules.
    pub caller: Rc<Caller>,
    /// The message as sent upstream, framed for the wire.
    pub framed: Bytes,
    /// The call's effect on the store, as refined by the message.
    pub effect: Effect,
    /// The lane of the connection to use, as refined by the message.
    pub lane: Lane,
    /// True if a member answers from its own store.
    pub is_local: bool,
    /// The policy's permit for the request.
    pub permit: Permit,
    /// The treatment of the answer, by the caller's limit of keys.
    pub answer_check: AnswerCheck,
    /// The lease of the request, of a caller in a namespace.
    pub lease: RequestLease,
    held: RequestMemoryCharge,
}

impl UnaryRequest {
    /// Waits for the message, for the connection's new watches if the call changes keys, and for room in
    /// the audit log. A wait may take 30 seconds, in which the caller may be revoked: then the caller is
    /// identified again.
    ///
    /// # Errors
    /// The message is incomplete, too large or not canonical, or the caller is no longer accepted.
    pub async fn collect(call: &Call<'_>, caller: Rc<Caller>, body: RequestBody) -> Result<Self, Refusal> {
        let mut caller = caller;
        let mut waited = false;
        let mut collecting = pin!(request_body::collect(call, body));
        let collected = poll_fn(|cx| {
            let polled = collecting.as_mut().poll(cx);
            if polled.is_pending() && !waited {
                waited = true;
                call.record.begin_wait(CallWait::Body);
            }
            polled
        });
        let collected = collected.await;
        if waited {
            call.record.end_wait(CallWait::Body);
        }
        let (mut framed, mut held) = collected?;
        if call.method.handler == Handler::Lock {
            (framed, held) = request_body::hold_while_waiting(call, &framed)?;
        }
        let effect = checked_effect(call, &framed).map_err(|refusal| call.count_not_canonical(refusal))?;
        waited |= write_order::wait(call, effect).await;
        let room = audited_request::begin(call, effect, Some(message_of(&framed)));
        if waited || room.is_some() {
            // Boxed, since few calls wait.
            caller = Box::pin(audited_request::identify_after(call, room)).await?;
        }
        let spliced = namespaces::splice_request(call, &caller, framed, &mut held);
        let message = spliced.as_ref().ok().map(|(framed, _)| message_of(framed));
        audited_request::note_real_keys(call, &caller, message);
        audited_request::note_logged_keys(call, message);
        let (mut framed, lease) = spliced?;
        audited_request::note_named_lease(call, lease);
        let permit = permission::of_request(call, &caller, message_of(&framed)).await;
        let permit = permit.inspect_err(|_| audited_request::note_refused_keys(call, message_of(&framed)))?;
        let answer_check = usage_limits::limit_request(call, effect, &mut framed, &mut held)?;
        let message = message_of(&framed);
        Ok(Self {
            answer_check,
            caller,
            permit,
            effect,
            lane: body_shape::lane(call.method, message),
            is_local: body_shape::is_local(call.method, message),
            framed,
            lease,
            held,
        })
    }

    /// Replaces the message, by one with further fields.
    ///
    /// # Errors
    /// The memory budget has no room.
    pub fn replace(&mut self, framed: Bytes) -> Result<(), Refusal> {
        if !self.held.charge(framed.len().saturating_sub(self.framed.len())) {
            return Err(Refusal::TOO_MANY_REQUESTS);
        }
        self.framed = framed;
        Ok(())
    }

    /// The message itself.
    #[must_use]
    pub fn message(&self) -> &[u8] {
        message_of(&self.framed)
    }

    /// The request, to be decided again after a change of the policy.
    #[must_use]
    pub fn decided(&self, call: &Call<'_>) -> DecidedRequest {
        DecidedRequest::new(call, self.message())
    }

    /// The exchange with a member for this request.
    ///
    /// # Errors
    /// The client names an unknown member.
    pub fn exchange<'a>(&self, call: &'a Call<'a>) -> Result<Exchange<'a>, Refusal> {
        Ok(Exchange {
            call,
            wanted: self.member_target(call)?,
            lane: self.lane,
            effect: self.effect,
            quorum: quorum::need(call.method, self.message()),
            may_reissue: body_shape::may_reissue(call.method, self.message()),
            user: self.caller.upstream_user.clone(),
            body: self.framed.clone(),
            permit: self.permit,
        })
    }

    /// The kind of member for the call: chosen by the member named by the client, the method's row, the
    /// call's effect, and the configured preferences.
    ///
    /// # Errors
    /// The client names an unknown member.
    pub fn member_target(&self, call: &Call<'_>) -> Result<MemberTarget, Refusal> {
        let (gateway, client) = (call.gateway, call.client);
        if self.is_local {
            // A member answers from its own store: any at or above the client's revision floor.
            return Ok(MemberTarget::Current { home: gateway.home(client), floor: client.floor.revision() });
        }
        let snapshot = call.snapshot();
        let settings = &snapshot.config.cluster;
        let addressed = addressed_member::addressed(client, call.method, call.headers, &snapshot.members)?;
        let by_row = addressed.map_or_else(|| MemberTarget::by(call.method), MemberTarget::This);
        Ok(match (by_row, self.effect) {
            (MemberTarget::Any, _) if client.is_pinned_home() => MemberTarget::Home(gateway.home(client)),
            (MemberTarget::Any, Effect::ReadOnly) if settings.reads == MemberPreference::Leader => {
                MemberTarget::LeaderFirst
            }
            (MemberTarget::Any, Effect::ReadOnly) if !settings.near.is_empty() => MemberTarget::Near,
            (MemberTarget::Any, Effect::Mutates | Effect::Idempotent)
                if settings.writes == MemberPreference::Leader =>
            {
                MemberTarget::LeaderFirst
            }
            (wanted, _) => wanted,
        })
    }
}

/// The message in a checked frame.
fn message_of(framed: &Bytes) -> &[u8] {
    framed.get(frame::PREFIX..).unwrap_or_default()
}

/// Checks the form of a request. Returns the call's effect on the store.
fn checked_effect(call: &Call<'_>, framed: &Bytes) -> Result<Effect, Refusal> {
    let message = frame::unary(framed).map_err(|fault| fault.refusal(None))?;
    canonical::check(call.method.body, &message)?;
    Ok(body_shape::effect(call.method, &message))
}
