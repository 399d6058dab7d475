//! Small requests of our own, with a client's identity: what revision is a member, or the cluster, at?
//!
//! Owns: those requests, their healing, and the reading of their header. Must not know what the answer is for.
//! Invariants: a read never returns a value of a key (count only); a request has a time limit, since a member may be
//! stuck.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::HeaderMap;
use http::uri::PathAndQuery;
use prost::Message as _;

use crate::pb::etcdserverpb::RangeRequest;
use crate::refusal::Status;
use crate::rpc::frame::{PREFIX, encode};
use crate::rpc::header;
use crate::rpc::method::{Lane, lookup};
use crate::rpc::outcome::{Asked, AuthState, Verdict, auth_state, is_outdated, verdict};
use crate::upstream::answer::{Answer, HELD};
use crate::upstream::connection::Outgoing;
use crate::upstream::credential::{LoginFailure, Shown};
use crate::upstream::membership::{Auth, Member};
use crate::upstream::send::{As, Door, NoAnswer, upstream_headers};

const RANGE: &str = "/etcdserverpb.KV/Range";
const TXN: &str = "/etcdserverpb.KV/Txn";
const LIMIT: Duration = Duration::from_secs(5);
/// How often a member may say that users or roles changed meanwhile, and how much longer is waited each time.
const OUTDATED: u32 = 5;
const PAUSE: Duration = Duration::from_millis(20);

/// Why there is no answer.
#[derive(Debug)]
pub enum ReadError {
    /// The member answered with a status.
    Refused(Status),
    /// No credential.
    Login(LoginFailure),
    /// No answer.
    Lost,
    /// Nothing was asked: a limit of ours is reached, and no other member helps.
    NoRoom,
}

/// A header that a member sent, and its revision.
#[derive(Debug)]
pub struct Revealed {
    /// The raw ResponseHeader.
    pub header: Bytes,
    /// Its revision.
    pub revision: i64,
}

/// Reads the revision that `member` has applied, by an empty transaction: it needs a valid credential and no right
/// to any key. Begun after the call, on that member. Cancel-safe.
///
/// # Errors
/// [`ReadError`].
pub async fn local_revision(door: &Rc<Door>, whom: &As, member: &Arc<Member>) -> Result<Revealed, ReadError> {
    ask(door, whom, member, TXN, &[]).await.and_then(revealed)
}

/// Reads the cluster's revision by a linearizable count of `key`: the member has applied all that was acknowledged
/// before the call. Cancel-safe.
///
/// # Errors
/// [`ReadError`].
pub async fn linearizable_revision(
    door: &Rc<Door>,
    whom: &As,
    member: &Arc<Member>,
    key: &[u8],
) -> Result<Revealed, ReadError> {
    let request = RangeRequest {
        key: Bytes::copy_from_slice(key),
        count_only: true,
        limit: 1,
        ..RangeRequest::default()
    };
    ask(door, whom, member, RANGE, &request.encode_to_vec()).await.and_then(revealed)
}

/// Makes a unary call of the method at `path` and returns its answer's message; once more with a fresh credential where
/// the first is refused. After [`ReadError::Lost`] the member may have done what it was asked. Cancel-safe for reads.
///
/// # Errors
/// [`ReadError`].
pub async fn ask(
    door: &Rc<Door>,
    whom: &As,
    member: &Arc<Member>,
    path: &'static str,
    message: &[u8],
) -> Result<Bytes, ReadError> {
    let asking = ask_patiently(door, whom, member, path, message);
    tokio::time::timeout(LIMIT, asking).await.unwrap_or(Err(ReadError::Lost))
}

/// The same for as long as it takes: the connection's own pings tell when the member is gone.
///
/// # Errors
/// [`ReadError`].
pub async fn ask_patiently(
    door: &Rc<Door>,
    whom: &As,
    member: &Arc<Member>,
    path: &'static str,
    message: &[u8],
) -> Result<Bytes, ReadError> {
    let framed = encode(message);
    let method = lookup(path).ok_or(ReadError::Lost)?;
    let mut healed = 0;
    loop {
        let shown = door.shown(whom, member).await.map_err(ReadError::Login)?;
        let body = Outgoing::Once(Some(framed.clone()));
        let headers = upstream_headers(&HeaderMap::new(), &shown);
        let sent = door.send(member, Lane::Unary, PathAndQuery::from_static(path), headers, body).await;
        let (response, in_flight) = sent.map_err(lost)?;
        let answer = Answer::read(response, in_flight, HELD).await.map_err(|_| ReadError::Lost)?;
        let status = answer.status().ok_or(ReadError::Lost)?;
        if status.is_ok() {
            let message = answer.message().ok_or(ReadError::Lost)?;
            return Ok(message.slice(PREFIX.min(message.len())..));
        }
        let asked = Asked { method, effect: method.effect, proof: shown.proof() };
        let refused = verdict(&asked, &status) == Verdict::Heal;
        let now_on = auth_state(&asked, &status) == Some(AuthState::On);
        // Users or roles changed under it: the next one may pass, whatever proves it.
        let outdated = refused && is_outdated(&asked, &status) && healed < OUTDATED;
        match (whom, &shown) {
            (As::User(identity), Shown::Token(_)) if refused && healed == 0 => {
                identity.renew(member.id, &shown);
            }
            (As::User(identity), _) if outdated => {
                if identity.follows_revisions() {
                    identity.renew(member.id, &shown);
                }
                tokio::time::sleep(PAUSE * healed).await;
            }
            // It went without a token since auth was off.
            (As::User(_), Shown::Nothing) if now_on && healed == 0 => door.auth_is(Auth::On),
            _ => return Err(ReadError::Refused(status)),
        }
        healed += 1;
    }
}

fn lost(why: NoAnswer) -> ReadError {
    match why {
        NoAnswer::NoRoom => ReadError::NoRoom,
        NoAnswer::NeverSent(_) | NoAnswer::NotShown(_) | NoAnswer::Lost(_) => ReadError::Lost,
    }
}

fn revealed(message: Bytes) -> Result<Revealed, ReadError> {
    let header = header::of(&message).ok_or(ReadError::Lost)?;
    let revision = header::revision(&header).ok_or(ReadError::Lost)?;
    Ok(Revealed { header, revision })
}
