//! Reads and writes of Keyward's own keys below one prefix in etcd.
//!
//! Owns: the choice of the member, Keyward's own login, the proof that an answer is of the served cluster.
//! Must not know: the meaning of a key. Invariants: every read is linearizable, so that the age of the result
//! is known (a silent watch may have stalled), except a local read, which is made only without a quorum; a
//! transaction with an unknown outcome is sent again only if its caller says so.

use std::cell::Cell;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwapOption;
use bytes::Bytes;
use tokio::time::Instant;
use tonic::metadata::AsciiMetadataValue;
use tonic::transport::Channel;
use tonic::{Code, Request, Status};

use crate::credentials::{Credentials, LoginFailure, PasswordIdentity, Token};
use keyward_cluster::choose::MemberTarget;
use keyward_cluster::leaderless::choose_leaderless;
use keyward_cluster::membership::{
    AuthSetting, ChangeReceiver, ControlChannels, Member, MembersHandle, ServingState,
};
use keyward_config::EtcdLogin;
use keyward_etcd::identity::MemberId;
use keyward_etcd::pb::etcdserverpb::compare::{CompareResult, CompareTarget, TargetUnion};
use keyward_etcd::pb::etcdserverpb::kv_client::KvClient;
use keyward_etcd::pb::etcdserverpb::request_op::Request as Operation;
use keyward_etcd::pb::etcdserverpb::{
    Compare, PutRequest, RangeRequest, RangeResponse, RequestOp, ResponseHeader, TxnRequest, TxnResponse,
};
use keyward_etcd::refusal::Refusal;
use keyward_etcd::rpc::quorum::QuorumNeed;

/// Time limit for one member's answer, before another member is asked.
const ANSWER: Duration = Duration::from_secs(1);
/// Time limit for a login at one member.
const LOGIN: Duration = Duration::from_secs(2);
/// Size limit of an answer.
const LARGEST_ANSWER: usize = 64 << 20;
/// The largest number of tokens tried for one local read: the member's own, and one of another member.
const LOCAL_TRIES: usize = 2;
/// Maximum of reasons logged in one series of failed reads. A text of a member may differ each time.
const MOST_REASONS: usize = 8;
/// Error text for an answer of a cluster no longer served.
pub const ANOTHER_CLUSTER: &str = "the answer is of another cluster";

/// Access to etcd from the control runtime.
#[derive(Clone)]
pub struct OwnKeysUpstream {
    /// The published members.
    pub members: MembersHandle,
    /// A channel to each member.
    pub channels: ControlChannels,
    /// Tokens per identity and member.
    pub credentials: Arc<Credentials>,
}

/// Keyward's login for a prefix; shared, so that a reload can replace the login.
#[derive(Clone)]
pub struct PrefixLogin {
    prefix: Arc<str>,
    credentials: Arc<Credentials>,
    identity: Arc<ArcSwapOption<PasswordIdentity>>,
}

impl PrefixLogin {
    /// True if the login in use is `login`. Also true for another prefix, whose login says nothing about this
    /// prefix.
    #[must_use]
    pub fn is(&self, prefix: &str, login: Option<&EtcdLogin>) -> bool {
        let named = login.map(|login| self.credentials.identity(&login.user, &login.password));
        let now = self.identity.load();
        *prefix != *self.prefix || now.as_ref().map(Arc::as_ptr) == named.as_ref().map(Arc::as_ptr)
    }

    /// Uses `login` from now on, unless `login` is for another prefix.
    pub fn set(&self, prefix: &str, login: Option<&EtcdLogin>) {
        if *prefix == *self.prefix {
            self.identity.store(login.map(|login| self.credentials.identity(&login.user, &login.password)));
        }
    }
}

/// The keys below one prefix.
pub struct OwnKeys {
    prefix: Arc<str>,
    upstream: OwnKeysUpstream,
    identity: Arc<ArcSwapOption<PasswordIdentity>>,
    /// The member that answered last is asked first, so that a stuck member costs its timeout only once.
    last: Cell<Option<MemberId>>,
}

/// The state of a prefix seen by a read: the next poll asks for changes since.
#[derive(Clone, Copy, Debug)]
pub struct SeenPrefix {
    /// The cluster's id; 0 if unknown.
    pub cluster: u64,
    /// The revision of the read.
    pub revision: i64,
    /// The number of keys below the prefix at this revision.
    pub keys: i64,
}

/// No member has answered.
#[derive(Debug)]
pub struct PrefixUnanswered {
    /// The reason of the member asked last.
    pub reason: String,
    /// True if a member may have applied the request nevertheless.
    pub sent: bool,
}

/// The failed reads of a prefix since the last good one.
#[derive(Debug, Default)]
pub struct ReadFailures {
    /// The reason of the last read, if it failed.
    last: Option<String>,
    /// The reasons of this series so far: each is logged once.
    logged: Vec<String>,
    /// True once a member was ready at a read. A process that has just started has found none yet, and a
    /// cluster without any is told by the members' own conditions.
    had_member: bool,
}

/// The treatment of a request with an unknown outcome.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AfterUnknownOutcome {
    /// The request is sent to the next member: repeating an applied request is harmless.
    SendAgain,
    /// No further member is asked.
    Stop,
}

impl ReadFailures {
    /// Notes a failed read; `has_member` says that a member is ready now. True for a reason to be logged: the
    /// first of this series, and each other one, all since the first ready member.
    pub fn note(&mut self, reason: &str, has_member: bool) -> bool {
        self.last = Some(reason.to_owned());
        self.had_member |= has_member;
        if !self.had_member {
            return false;
        }
        let is_new = self.logged.len() < MOST_REASONS && !self.logged.iter().any(|known| known == reason);
        if is_new {
            self.logged.push(reason.to_owned());
        }
        is_new
    }

    /// Notes a good read. True if reads failed before.
    pub fn end(&mut self) -> bool {
        (self.last, self.had_member) = (None, true);
        !std::mem::take(&mut self.logged).is_empty()
    }

    /// Why the last read failed; `None` after a good one.
    #[must_use]
    pub fn last(&self) -> Option<&str> {
        self.last.as_deref()
    }
}

impl OwnKeys {
    /// The keys below `prefix`, read and written as the user of `login`, or as nobody.
    #[must_use]
    pub fn new(prefix: &Arc<str>, login: Option<&EtcdLogin>, upstream: OwnKeysUpstream) -> Self {
        let identity = login.map(|login| upstream.credentials.identity(&login.user, &login.password));
        let identity = Arc::new(ArcSwapOption::new(identity));
        Self { prefix: Arc::clone(prefix), upstream, identity, last: Cell::default() }
    }

    /// The prefix.
    #[must_use]
    pub fn prefix(&self) -> &str {
        &self.prefix
    }

    /// The login, for replacement by a reload.
    #[must_use]
    pub fn login(&self) -> PrefixLogin {
        PrefixLogin {
            prefix: Arc::clone(&self.prefix),
            credentials: Arc::clone(&self.upstream.credentials),
            identity: Arc::clone(&self.identity),
        }
    }

    /// Notifies of changes of members.
    #[must_use]
    pub fn member_changes(&self) -> ChangeReceiver {
        self.upstream.members.changes.clone()
    }

    /// True if a member is ready for a read.
    #[must_use]
    pub fn has_member(&self) -> bool {
        self.upstream.members.snapshot.load().ready_voters().next().is_some()
    }

    /// The calls that the cluster serves now.
    #[must_use]
    pub fn serving(&self) -> ServingState {
        self.upstream.members.snapshot.load().serving()
    }

    /// True if a key below the prefix may have changed since `seen`, or another cluster is served.
    ///
    /// # Errors
    /// No member has answered.
    pub async fn has_changed(&self, seen: SeenPrefix) -> Result<bool, String> {
        if !self.is_served(seen.cluster) {
            return Ok(true);
        }
        // A key modified since, and the number of keys: the two values reveal any change, deletions included.
        let since = RangeRequest {
            min_mod_revision: seen.revision + 1,
            keys_only: true,
            limit: 1,
            ..self.all_keys()
        };
        let answer = self.range(since).await?;
        self.check_cluster(answer.header.as_ref(), seen.cluster)?;
        Ok(!answer.kvs.is_empty() || answer.count != seen.keys)
    }

    /// True if `cluster` is the served cluster, or if either is unknown.
    #[must_use]
    pub fn is_served(&self, cluster: u64) -> bool {
        let served = self.upstream.members.snapshot.load().cluster;
        cluster == 0 || served.is_none_or(|served| served.0 == cluster)
    }

    /// Accepts an answer only if the answer is from `cluster`, and `cluster` is still the served cluster.
    ///
    /// # Errors
    /// The answer is from another cluster.
    pub fn check_cluster(&self, header: Option<&ResponseHeader>, cluster: u64) -> Result<(), String> {
        let of = header.map_or(0, |header| header.cluster_id);
        if of == cluster && self.is_served(of) { Ok(()) } else { Err(ANOTHER_CLUSTER.into()) }
    }

    /// The range of all keys below the prefix.
    #[must_use]
    pub fn all_keys(&self) -> RangeRequest {
        below(&self.prefix)
    }

    /// Sends a transaction.
    ///
    /// # Errors
    /// No member has answered.
    pub async fn txn(
        &self,
        txn: TxnRequest,
        after_unknown: AfterUnknownOutcome,
    ) -> Result<TxnResponse, PrefixUnanswered> {
        let call = async |mut kv: KvClient<Channel>, token| {
            kv.txn(with(token, txn.clone())).await.map(tonic::Response::into_inner)
        };
        self.ask(after_unknown, call).await
    }

    /// Reads a range.
    ///
    /// # Errors
    /// No member has answered.
    pub async fn range(&self, request: RangeRequest) -> Result<RangeResponse, String> {
        let call = async |mut kv: KvClient<Channel>, token| {
            kv.range(with(token, request.clone())).await.map(tonic::Response::into_inner)
        };
        self.ask(AfterUnknownOutcome::SendAgain, call).await.map_err(|unanswered| unanswered.reason)
    }

    /// Reads all keys below the prefix, at most `limit`, from the store of the member that serves local reads
    /// while the cluster has no quorum. Makes no login, because a login needs a quorum.
    ///
    /// # Errors
    /// No member serves local reads, no token is left for the member, or the member has not answered.
    pub async fn local_range(&self, limit: i64) -> Result<RangeResponse, String> {
        let request = RangeRequest { limit, serializable: true, ..self.all_keys() };
        let members = self.upstream.members.snapshot.load_full();
        // The most advanced store, as for a snapshot: no other store that serves has newer keys.
        let member = choose_leaderless(&members, MemberTarget::Spared, QuorumNeed::Never, &[]);
        let member = member.ok_or("no member answers")?;
        let channel = self.upstream.channels.load().get(&member.id).cloned().ok_or("no member answers")?;
        let client = KvClient::new(channel).max_decoding_message_size(LARGEST_ANSWER);
        let identity = self.identity.load_full();
        let with_token = self.upstream.members.auth.now() != AuthSetting::Off;
        let mut reason = String::new();
        for _ in 0..LOCAL_TRIES {
            let identity = identity.as_ref().filter(|_| with_token);
            let token = match identity.map(|identity| identity.token_without_leader(member.id)) {
                Some(None) if reason.is_empty() => return Err("a login needs a quorum".into()),
                Some(None) => break,
                known => known.flatten(),
            };
            let asked = with(token.as_ref().and_then(header_of), request.clone());
            match tokio::time::timeout(ANSWER, client.clone().range(asked)).await {
                Ok(Ok(answer)) => {
                    token.iter().for_each(|token| token.mark_used(Instant::now()));
                    return Ok(answer.into_inner());
                }
                Ok(Err(status)) => {
                    reason = self.reason_of(&status, identity.is_some());
                    match (identity, &token) {
                        (Some(identity), Some(token)) if is_stale(&status) => {
                            identity.invalidate(member.id, token);
                        }
                        _ => break,
                    }
                }
                Err(_) => return Err("no answer in time".into()),
            }
        }
        Err(reason)
    }

    /// Asks the ready voters one after another.
    async fn ask<T>(
        &self,
        after_unknown: AfterUnknownOutcome,
        call: impl AsyncFn(KvClient<Channel>, Option<AsciiMetadataValue>) -> Result<T, Status>,
    ) -> Result<T, PrefixUnanswered> {
        let mut members: Vec<Arc<Member>> =
            self.upstream.members.snapshot.load().ready_voters().cloned().collect();
        let last = self.last.take();
        let identity = self.identity.load_full();
        members.sort_by_key(|member| Some(member.id) != last);
        let (mut reason, mut sent) = ("no member is ready".to_owned(), false);
        for member in members {
            if sent && after_unknown == AfterUnknownOutcome::Stop {
                break;
            }
            let Some(channel) = self.upstream.channels.load().get(&member.id).cloned() else { continue };
            let client = KvClient::new(channel).max_decoding_message_size(LARGEST_ANSWER);
            // The second attempt uses a new token, if the member called the first token invalid.
            for _ in 0..2 {
                let token = match self.token(identity.as_ref(), &member).await {
                    Ok(token) => token,
                    Err(failure) => {
                        reason = failure.to_string();
                        break;
                    }
                };
                let header = token.as_ref().and_then(header_of);
                match tokio::time::timeout(ANSWER, call(client.clone(), header)).await {
                    Ok(Ok(answer)) => {
                        token.iter().for_each(|token| token.mark_used(Instant::now()));
                        self.last.set(Some(member.id));
                        return Ok(answer);
                    }
                    Ok(Err(status)) => {
                        reason = self.reason_of(&status, identity.is_some());
                        sent |= !is_refusal(&status);
                        match (&identity, &token) {
                            (Some(identity), Some(token)) if is_stale(&status) => {
                                identity.invalidate(member.id, token);
                            }
                            _ => break,
                        }
                    }
                    Err(_) => {
                        (reason, sent) = ("no answer in time".into(), true);
                        break;
                    }
                }
            }
        }
        Err(PrefixUnanswered { reason, sent })
    }

    /// Why a member refused: the missing user is the reason behind any text of a member with auth on.
    fn reason_of(&self, status: &Status, has_login: bool) -> String {
        let told = format!("{:?}: {}", status.code(), status.message());
        let is_nobody = status.message() == Refusal::USER_EMPTY.message();
        match !has_login && is_nobody && self.upstream.members.auth.now() != AuthSetting::Off {
            true => format!("needs cluster.probe: auth is on ({told})"),
            false => told,
        }
    }

    async fn token(
        &self,
        identity: Option<&Arc<PasswordIdentity>>,
        member: &Member,
    ) -> Result<Option<Token>, LoginFailure> {
        match identity {
            Some(identity) if self.upstream.members.auth.now() != AuthSetting::Off => {
                // A login continues after the timeout, and serves the next poll.
                match tokio::time::timeout(LOGIN, identity.token(member.id)).await {
                    Ok(Err(LoginFailure::AuthDisabled)) => Ok(None),
                    Ok(token) => token.map(Some),
                    Err(_) => Err(LoginFailure::NoAnswer),
                }
            }
            _ => Ok(None),
        }
    }
}

/// The range of the keys below `prefix`, which ends with a slash.
#[must_use]
pub fn below(prefix: &str) -> RangeRequest {
    let key = Bytes::copy_from_slice(prefix.as_bytes());
    let mut end = prefix.as_bytes().to_vec();
    // `config` makes the prefix end with a slash, so the last byte is never 0xff.
    if let Some(last) = end.last_mut() {
        *last = last.saturating_add(1);
    }
    RangeRequest { key, range_end: end.into(), ..RangeRequest::default() }
}

/// The condition that the key's mod revision is `known`; 0 means a missing key.
#[must_use]
pub fn is_unchanged(key: &Bytes, known: i64) -> Compare {
    Compare {
        result: CompareResult::Equal.into(),
        target: CompareTarget::Mod.into(),
        key: key.clone(),
        target_union: Some(TargetUnion::ModRevision(known)),
        ..Compare::default()
    }
}

/// Writes a value, as an operation of a transaction.
#[must_use]
pub fn put(key: Bytes, value: Bytes) -> RequestOp {
    let put = PutRequest { key, value, ..PutRequest::default() };
    RequestOp { request: Some(Operation::RequestPut(put)) }
}

fn header_of(token: &Token) -> Option<AsciiMetadataValue> {
    AsciiMetadataValue::try_from(token.header().as_bytes()).ok()
}

fn with<T>(token: Option<AsciiMetadataValue>, message: T) -> Request<T> {
    let mut request = Request::new(message);
    if let Some(token) = token {
        request.metadata_mut().insert("token", token);
    }
    request
}

/// True if the status proves that the member did not apply the request.
fn is_refusal(status: &Status) -> bool {
    use Code::{FailedPrecondition, InvalidArgument, PermissionDenied, ResourceExhausted, Unauthenticated};
    let refusals =
        [FailedPrecondition, InvalidArgument, PermissionDenied, ResourceExhausted, Unauthenticated];
    refusals.contains(&status.code()) || is_stale(status)
}

/// True if etcd reports a token as no longer valid. Reads and conditional writes may then be sent again.
fn is_stale(status: &Status) -> bool {
    let says = |refusal: &Refusal| {
        status.code() as u8 == refusal.code() as u8 && status.message() == refusal.message()
    };
    says(&Refusal::INVALID_AUTH_TOKEN)
        || says(&Refusal::AUTH_OLD_REVISION)
        // etcd 3.5.0 and 3.5.1 send the raw error text when etcd's tokens are JWTs.
        || (status.code() == Code::Unknown && status.message() == "auth: revision in header is old")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_read_is_told_since_the_first_ready_member() {
        let mut failures = ReadFailures::default();
        assert!(!failures.note("no member", false) && !failures.note("late", false));
        assert_eq!(failures.last(), Some("late"), "doctor and /readyz tell it all the same");
        assert!(!failures.end(), "nothing was told that could end");
        assert!(failures.note("no member", false) && !failures.note("no member", false));
        assert!(failures.end() && failures.last().is_none());
        let mut refused = ReadFailures::default();
        assert!(!refused.note("no member", false) && refused.note("permission denied", true));
        assert!(refused.note("no member", false), "the members are gone again");
    }
}
