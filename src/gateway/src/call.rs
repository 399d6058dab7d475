//! A call: everything about one RPC that its steps share.
//!
//! Owns: the admission of the call (memory, deadline, path), its snapshot, and the identification of its
//! caller. Must not know: how a method is served. Invariant: a call decides by one snapshot of configuration,
//! members and rules; a call that waited is identified again, and then decides by a new snapshot.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use bytes::BytesMut;
use http::HeaderMap;
use http::uri::PathAndQuery;
use tokio::time::Instant;

use crate::access_log::AccessRecord;
use crate::caller::{Caller, Identities};
use crate::required_identity::identity_check;
use crate::{ClientConnection, Gateway};
use keyward_cluster::membership::Membership;
use keyward_config::Config;
use keyward_downstream::client_body::ClientBody;
use keyward_downstream::request_memory::{REQUEST, RequestMemoryCharge, Requester, header_bytes};
use keyward_downstream::request_messages::RequestBody;
use keyward_etcd::refusal::Refusal;
use keyward_etcd::rpc::call::Deadline;
use keyward_etcd::rpc::method::{Handler, Method, RpcPathKind, UNKNOWN, path_kind};
use keyward_etcd::rpc::trace_id::TraceParent;

/// The published values by which a call decides.
pub struct CallSnapshot {
    /// The configuration.
    pub config: Arc<Config>,
    /// The members of the cluster. Each attempt at a member reads the members again.
    pub members: Arc<Membership>,
    /// The rules for callers.
    pub identities: Arc<Identities>,
}

/// The part of a connection's streams that streams and waiting calls leave to other calls: one in so many.
const KEPT_FOR_CALLS: u32 = 8;

/// Appends the rewritten form of a method's answer to the bytes. False if the answer cannot be read.
pub type AnswerRewrite = fn(&'static Method, &[u8], &mut BytesMut) -> bool;

/// The bytes held for a rewritten answer, in answers: itself, and its rewritten form of about twice the size.
pub const REWRITTEN_COPIES: usize = 3;

/// One RPC of a client.
pub struct Call<'a> {
    /// The shared state of this shard.
    pub gateway: &'a Rc<Gateway>,
    /// The client's connection.
    pub client: &'a Rc<ClientConnection>,
    /// The method's row in the method table.
    pub method: &'static Method,
    /// The path as sent by the client.
    pub path: &'a str,
    /// The client's request header.
    pub headers: &'a HeaderMap,
    /// The end of the client's time limit.
    pub deadline: Option<Instant>,
    /// The record for metrics and access log.
    pub record: AccessRecord,
    /// Rewrites the answer, for a client that reads another form than protobuf.
    pub rewrite: Option<AnswerRewrite>,
    snapshot: RefCell<Rc<CallSnapshot>>,
    memory: RefCell<RequestMemoryCharge>,
}

impl<'a> Call<'a> {
    /// A call that has just arrived.
    #[must_use]
    pub fn new(
        gateway: &'a Rc<Gateway>,
        client: &'a Rc<ClientConnection>,
        headers: &'a HeaderMap,
        path: Option<&'a PathAndQuery>,
    ) -> Self {
        let path = path.map_or("", PathAndQuery::as_str);
        let method = match path_kind(path) {
            RpcPathKind::Known(method) => method,
            RpcPathKind::WellFormed { .. } | RpcPathKind::Malformed => &UNKNOWN,
        };
        // Most methods charge the account of identified callers: identification is immediate for nearly all
        // calls, and the slower calls carry a genuine credential.
        let anybody = method.handler.is_for_anybody();
        let requester = if anybody { Requester::Anybody } else { Requester::Known };
        let sinks = Rc::clone(&gateway.records);
        client.origin.note_user_agent(headers);
        client.origin.figures.begin_call();
        let record = AccessRecord::begin(sinks, method, Rc::clone(&client.origin));
        record.begin_trace(TraceParent::in_headers(headers));
        Self {
            gateway,
            client,
            method,
            path,
            headers,
            deadline: None,
            record,
            rewrite: None,
            snapshot: RefCell::new(gateway.snapshot()),
            memory: RefCell::new(gateway.hold(client, requester)),
        }
    }

    /// The bytes held for a message of the answer until the client has read the message, in messages.
    #[must_use]
    pub fn copies(&self) -> usize {
        self.rewrite.map_or(1, |_| REWRITTEN_COPIES)
    }

    /// Charges the call's memory, and reads the client's time limit.
    ///
    /// # Errors
    /// The connection takes no calls any more, the memory budget is exhausted, or the header is malformed.
    pub fn admit(&mut self) -> Result<(), Refusal> {
        if self.client.is_dismissed() {
            return Err(Refusal::CERTIFICATE_ENDED);
        }
        if !self.memory.get_mut().charge(REQUEST + header_bytes(self.headers)) {
            return Err(Refusal::TOO_MANY_REQUESTS);
        }
        if self.is_beyond_streams() {
            return Err(Refusal::TOO_MANY_REQUESTS);
        }
        if self.method.handler == Handler::PassThrough
            && let Some(refusal) = malformed(self.path)
        {
            return Err(self.count_not_canonical(refusal));
        }
        self.deadline = Deadline::of(self.headers)?.map(|left| self.record.started + left);
        Ok(())
    }

    /// True if the connection has too many open streams for this call. An eighth of the limit is kept for
    /// calls that end by themselves.
    fn is_beyond_streams(&self) -> bool {
        let limit = self.snapshot.borrow().config.limits.streams_per_connection;
        let room = if self.method.is_lasting() { limit - limit / KEPT_FOR_CALLS } else { limit };
        let open = self.client.activity().open_streams();
        u32::try_from(open).unwrap_or(u32::MAX) > room
    }

    /// True if the client wants a refusal where there is no leader, rather than to wait.
    #[must_use]
    pub fn wants_leader(&self) -> bool {
        self.headers.get("hasleader").is_some_and(|value| value == "true")
    }

    /// The request's body, with a memory account beside the header's.
    ///
    /// # Errors
    /// The body's compression is not supported.
    pub fn body(&self, frames: ClientBody) -> Result<RequestBody, Refusal> {
        RequestBody::of(self.headers, frames, self.memory.borrow().sibling())
    }

    /// Room for bytes held for the call beside its request; `None` if the memory budget has no room.
    #[must_use]
    pub fn hold_beside(&self, bytes: usize) -> Option<RequestMemoryCharge> {
        let mut beside = self.memory.borrow().sibling();
        beside.charge(bytes).then_some(beside)
    }

    /// Charges the memory of the header and of the body to the account of unidentified callers, if `caller`
    /// has no user.
    ///
    /// # Errors
    /// The account has no room.
    pub fn charge_to(&self, caller: &Caller, mut body: RequestBody) -> Result<RequestBody, Refusal> {
        if self.gateway.requester(caller) == Requester::Anybody {
            let held = self.gateway.hold_request(self.client, Requester::Anybody, self.headers)?;
            body.held = held.sibling();
            self.memory.replace(held);
        }
        Ok(body)
    }

    /// The published values by which the call decides.
    #[must_use]
    pub fn snapshot(&self) -> Rc<CallSnapshot> {
        Rc::clone(&self.snapshot.borrow())
    }

    /// Identifies the caller under the rules of the call's snapshot.
    ///
    /// # Errors
    /// The caller's credential is bad, the caller has no etcd user where one is required, or the connection
    /// takes no calls any more.
    pub async fn identify(&self) -> Result<Rc<Caller>, Refusal> {
        let (gateway, client) = (self.gateway, self.client);
        let snapshot = self.snapshot();
        let served = snapshot.members.cluster;
        // Before the caller: revocations told by a quorum meanwhile may be those that refuse the caller.
        self.record.is_for_local_reads.set(gateway.sealer.is_for_local_reads());
        let callers = &gateway.callers;
        let (rules, record) = (&snapshot.identities, &self.record);
        let caller = callers.identify(gateway, client, self.method, self.headers, rules, record).await?;
        client.origin.figures.note_caller(caller.user.as_ref(), record.peer().as_ref());
        client.follow(served);
        // The caller was authenticated against the previous cluster.
        if gateway.upstream.has_followed(served) {
            return Err(Refusal::NOTHING_SENT);
        }
        client.check_authorized(&caller)?;
        let (members, policy) = (&gateway.upstream.members, &snapshot.config.policy);
        if let Some(check) = identity_check(members, policy, self.method, &caller.upstream_user) {
            check.await?;
        }
        client.note_call(gateway, &caller);
        if !caller.is_revocable() {
            self.record.is_for_local_reads.set(false);
        }
        Ok(caller)
    }

    /// True if the caller was identified by revocations that suffice for local reads only.
    #[must_use]
    pub fn is_for_local_reads(&self) -> bool {
        self.record.is_for_local_reads.get()
    }

    /// Identifies the caller of a call that waited, under the current rules: the call's snapshot from now on.
    ///
    /// # Errors
    /// As [`Call::identify`].
    pub async fn identify_again(&self) -> Result<Rc<Caller>, Refusal> {
        self.snapshot.replace(self.gateway.snapshot());
        self.identify().await
    }

    /// Counts and returns the refusal of a request whose bytes are read differently by different decoders.
    #[must_use]
    pub fn count_not_canonical(&self, refusal: Refusal) -> Refusal {
        self.gateway.metrics.not_canonical.inc();
        refusal
    }
}

fn malformed(path: &str) -> Option<Refusal> {
    match path_kind(path) {
        kind @ RpcPathKind::Malformed => kind.refusal(path),
        RpcPathKind::Known(_) | RpcPathKind::WellFormed { .. } => None,
    }
}
