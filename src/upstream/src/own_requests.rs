//! Keyward's own small requests with a client's identity, above all to read the revision of a member or the
//! cluster.
//!
//! Owns: the requests, their retry with a fresh credential, and reading the response header. Must not know:
//! the use of the answer.
//! Invariants: a read of a revision returns no key's value (count only). A request has a time limit, since a
//! member may be stuck; the exception is [`ask_patiently`].

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::HeaderMap;
use http::uri::PathAndQuery;
use prost::Message as _;

use crate::answer::{HELD, MemberReply};
use crate::credentials::{CallCredential, LoginFailure};
use crate::send::{NoReply, UpstreamClient, UpstreamUser, upstream_headers};
use crate::upstream_request::UpstreamRequestBody;
use keyward_access::policy::permit::Permit;
use keyward_cluster::membership::{AuthSetting, Member};
use keyward_etcd::pb::etcdserverpb::RangeRequest;
use keyward_etcd::refusal::Status;
use keyward_etcd::rpc::frame::{PREFIX, encode};
use keyward_etcd::rpc::header;
use keyward_etcd::rpc::method::{Lane, lookup};
use keyward_etcd::rpc::outcome::{JudgedCall, RevealedAuth, StatusVerdict, auth_state, is_outdated, verdict};

const RANGE: &str = "/etcdserverpb.KV/Range";
const TXN: &str = "/etcdserverpb.KV/Txn";
const LIMIT: Duration = Duration::from_secs(5);
/// Retries of a request refused because users or roles changed meanwhile; each retry waits `PAUSE` longer.
const OUTDATED: u32 = 5;
const PAUSE: Duration = Duration::from_millis(20);

/// Why a request got no answer.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The member answered with an error status.
    #[error("the member answered: {}", .0.message)]
    Refused(Status),
    /// No credential could be obtained.
    #[error("no credential: {0}")]
    Login(LoginFailure),
    /// No usable answer.
    #[error("no usable answer")]
    Lost,
    /// A success, larger than the caller of the request reads.
    #[error("the answer is too large")]
    TooLarge,
    /// No request was sent: a limit of Keyward's is reached, and another member would not help.
    #[error("a limit of Keyward's is reached")]
    NoRoom,
}

/// A ResponseHeader from a member, and its revision.
#[derive(Debug)]
pub struct MemberRevision {
    /// The raw ResponseHeader.
    pub header: Bytes,
    /// The header's revision.
    pub revision: i64,
}

/// Reads the revision applied by `member`, with an empty transaction: a valid credential is enough, without
/// permission on any key. The transaction begins after the call, on the given member. Cancel-safe.
///
/// # Errors
/// [`ReadError`].
pub async fn local_revision(
    upstream: &Rc<UpstreamClient>,
    user: &UpstreamUser,
    member: &Arc<Member>,
) -> Result<MemberRevision, ReadError> {
    ask(upstream, user, member, TXN, &[]).await.and_then(revealed)
}

/// Reads the cluster's revision with a linearizable count of `key`: the member has applied every write
/// acknowledged before the call. Cancel-safe.
///
/// # Errors
/// [`ReadError`].
pub async fn linearizable_revision(
    upstream: &Rc<UpstreamClient>,
    user: &UpstreamUser,
    member: &Arc<Member>,
    key: &[u8],
) -> Result<MemberRevision, ReadError> {
    let request = RangeRequest {
        key: Bytes::copy_from_slice(key),
        count_only: true,
        limit: 1,
        ..RangeRequest::default()
    };
    ask(upstream, user, member, RANGE, &request.encode_to_vec()).await.and_then(revealed)
}

/// Makes a unary call of the method at `path` and returns the answer's message. If the credential is refused,
/// sends once more with a fresh credential. After [`ReadError::Lost`] the member may have executed the
/// request. Cancel-safe for reads.
///
/// # Errors
/// [`ReadError`].
pub async fn ask(
    upstream: &Rc<UpstreamClient>,
    user: &UpstreamUser,
    member: &Arc<Member>,
    path: &'static str,
    message: &[u8],
) -> Result<Bytes, ReadError> {
    ask_at_length(upstream, user, member, path, message, HELD).await
}

/// As [`ask`], for an answer of up to `largest` bytes.
///
/// # Errors
/// [`ReadError`].
pub async fn ask_at_length(
    upstream: &Rc<UpstreamClient>,
    user: &UpstreamUser,
    member: &Arc<Member>,
    path: &'static str,
    message: &[u8],
    largest: usize,
) -> Result<Bytes, ReadError> {
    let asking = ask_without_limit(upstream, user, member, path, message, largest);
    tokio::time::timeout(LIMIT, asking).await.unwrap_or(Err(ReadError::Lost))
}

/// As [`ask`], without a time limit: the connection's pings detect a dead member.
///
/// # Errors
/// [`ReadError`].
pub async fn ask_patiently(
    upstream: &Rc<UpstreamClient>,
    user: &UpstreamUser,
    member: &Arc<Member>,
    path: &'static str,
    message: &[u8],
) -> Result<Bytes, ReadError> {
    ask_without_limit(upstream, user, member, path, message, HELD).await
}

async fn ask_without_limit(
    upstream: &Rc<UpstreamClient>,
    user: &UpstreamUser,
    member: &Arc<Member>,
    path: &'static str,
    message: &[u8],
    largest: usize,
) -> Result<Bytes, ReadError> {
    let framed = encode(message);
    let method = lookup(path).ok_or(ReadError::Lost)?;
    let mut healed = 0;
    loop {
        let shown = upstream.credential_for(user, member).await.map_err(ReadError::Login)?;
        let body = UpstreamRequestBody::Once(framed.clone());
        let headers = upstream_headers(&HeaderMap::new(), &shown, Permit::for_own_request());
        let sent = upstream.send(member, Lane::Unary, PathAndQuery::from_static(path), headers, body).await;
        let (response, in_flight) = sent.map_err(lost)?;
        let answer = MemberReply::read(response, in_flight, largest).await.map_err(|_| ReadError::Lost)?;
        // No status yet: the answer has outgrown the limit. etcd refuses without a message.
        let status = answer.status().ok_or(ReadError::TooLarge)?;
        if status.is_ok() {
            let message = answer.message().ok_or(ReadError::Lost)?;
            return Ok(message.slice(PREFIX.min(message.len())..));
        }
        let asked = JudgedCall { method, effect: method.effect, proof: shown.proof() };
        let refused = verdict(&asked, status) == StatusVerdict::Heal;
        let now_on = auth_state(&asked, status) == Some(RevealedAuth::On);
        // Users or roles changed during the call: the next attempt may pass, whatever the credential.
        let outdated = refused && is_outdated(&asked, status) && healed < OUTDATED;
        match (user, &shown) {
            (UpstreamUser::User(identity), CallCredential::Token(_)) if refused && healed == 0 => {
                identity.renew(member.id, &shown);
            }
            (UpstreamUser::User(identity), _) if outdated => {
                if identity.is_bound_to_revision() {
                    identity.renew(member.id, &shown);
                }
                tokio::time::sleep(PAUSE * healed).await;
            }
            // The request went without a token because auth was off.
            (UpstreamUser::User(_), CallCredential::Nothing) if now_on && healed == 0 => {
                upstream.report_auth(AuthSetting::On)
            }
            _ => return Err(ReadError::Refused(status.clone())),
        }
        healed += 1;
    }
}

fn lost(why: NoReply) -> ReadError {
    match why {
        NoReply::NoRoom => ReadError::NoRoom,
        NoReply::NeverSent(_) | NoReply::NotShown(_) | NoReply::NotAccepted(_) | NoReply::Lost(_) => {
            ReadError::Lost
        }
    }
}

fn revealed(message: Bytes) -> Result<MemberRevision, ReadError> {
    let header = header::raw_header(&message).ok_or(ReadError::Lost)?;
    let revision = header::revision(&header).ok_or(ReadError::Lost)?;
    Ok(MemberRevision { header, revision })
}
