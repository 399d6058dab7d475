//! Revocations under a prefix in etcd, read by every replica.
//!
//! Owns: the keys, reading all keys, changing one key. Must not know: the consumers of revocations.
//! Invariants: every read is linearizable, so that the age of the result is known (a silent watch may have
//! stalled); a change is a transaction conditional on the revision read before the decision, so that
//! concurrent operators lose no change; a user with an unreadable entry is blocked.
//!
//! Keys are `PREFIX` + `user/NAME` and `PREFIX` + `session/ID`; each value is a row.

use std::cell::Cell;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use arc_swap::ArcSwapOption;
use bytes::Bytes;
use tokio::time::{Instant, timeout_at};
use tonic::metadata::AsciiMetadataValue;
use tonic::transport::Channel;
use tonic::{Code, Request, Status};

use super::{RevocationError, row};
use crate::config::{EtcdLogin, RevocationPersistence};
use crate::credentials::{Credentials, LoginFailure, PasswordIdentity, Token};
use crate::downstream::session::{
    MOST_ENTRIES, RevocationChange, RevocationEntry, Revocations, UserRevocation,
};
use crate::identity::{MemberId, UserName};
use crate::members::membership::{AuthSetting, ChangeReceiver, ControlChannels, Member, MembersHandle};
use crate::pb::etcdserverpb::compare::{CompareResult, CompareTarget, TargetUnion};
use crate::pb::etcdserverpb::kv_client::KvClient;
use crate::pb::etcdserverpb::request_op;
use crate::pb::etcdserverpb::{
    Compare, PutRequest, RangeRequest, RangeResponse, RequestOp, ResponseHeader, TxnRequest,
};
use crate::pb::mvccpb::KeyValue;
use crate::refusal::Refusal;

/// Time limit for one member's answer, before another member is asked.
const ANSWER: Duration = Duration::from_secs(1);
/// Time limit for a login at one member.
const LOGIN: Duration = Duration::from_secs(2);
/// Maximum of attempts to make a change when another operator changes the same key.
const TRIES: usize = 5;
/// Error text for a missing answer.
pub(super) const LATE: &str = "etcd did not answer in time";
/// Error text for an answer of a cluster no longer served.
const ANOTHER: &str = "the answer is of another cluster";
/// Size limit of an answer: [`MOST_ENTRIES`] rows with long names.
const LARGEST_ANSWER: usize = 64 << 20;

/// Access to etcd from the control runtime.
#[derive(Clone)]
pub struct RevocationUpstream {
    /// The published members.
    pub members: MembersHandle,
    /// A channel to each member.
    pub channels: ControlChannels,
    /// Tokens per identity and member.
    pub credentials: Arc<Credentials>,
}

/// The credentials for the prefix; shared, so that a reload can replace the credentials.
#[derive(Clone)]
pub(super) struct PrefixAccess {
    prefix: Arc<str>,
    credentials: Arc<Credentials>,
    identity: Arc<ArcSwapOption<PasswordIdentity>>,
}

impl PrefixAccess {
    /// True if the current credentials equal the credentials of `keep`. Also true if `keep` has a different
    /// storage or prefix: such settings say nothing about the current prefix.
    pub(super) fn has_login(&self, keep: &RevocationPersistence) -> bool {
        let RevocationPersistence::Etcd { prefix, login } = keep else { return true };
        let named = login.as_ref().map(|login| self.credentials.identity(&login.user, &login.password));
        let now = self.identity.load();
        *prefix != self.prefix || now.as_ref().map(Arc::as_ptr) == named.as_ref().map(Arc::as_ptr)
    }

    /// Switches to the credentials of `keep`, if `keep` has the same prefix.
    pub(super) fn set_login(&self, keep: &RevocationPersistence) {
        if let RevocationPersistence::Etcd { prefix, login } = keep
            && *prefix == self.prefix
        {
            let login = login.as_ref();
            self.identity.store(login.map(|login| self.credentials.identity(&login.user, &login.password)));
        }
    }
}

/// The prefix, with the state read last.
pub(super) struct RevocationPrefix {
    prefix: Arc<str>,
    upstream: RevocationUpstream,
    identity: Arc<ArcSwapOption<PasswordIdentity>>,
    /// The member that answered last is asked first, so that a stuck member costs its timeout only once.
    last: Cell<Option<MemberId>>,
    /// The state read by the last poll; the next poll asks only for changes since.
    read: Option<PrefixSnapshot>,
}

/// No member has answered.
struct PrefixUnanswered {
    reason: String,
    /// True if a member may have applied the request nevertheless.
    sent: bool,
}

/// The state of the prefix at one revision.
struct PrefixSnapshot {
    /// The cluster's id; 0 if unknown.
    cluster: u64,
    revision: i64,
    /// The mod revision of each key.
    changed_at: HashMap<Bytes, i64>,
    revocations: Revocations,
}

impl RevocationPrefix {
    pub(super) fn new(prefix: &Arc<str>, login: Option<&EtcdLogin>, upstream: RevocationUpstream) -> Self {
        let identity = login.map(|login| upstream.credentials.identity(&login.user, &login.password));
        let identity = Arc::new(ArcSwapOption::new(identity));
        Self { prefix: Arc::clone(prefix), upstream, identity, last: Cell::default(), read: None }
    }

    pub(super) fn access(&self) -> PrefixAccess {
        PrefixAccess {
            prefix: Arc::clone(&self.prefix),
            credentials: Arc::clone(&self.upstream.credentials),
            identity: Arc::clone(&self.identity),
        }
    }

    /// Notifies of changes of members.
    pub(super) fn changes(&self) -> ChangeReceiver {
        self.upstream.members.changes.clone()
    }

    /// Returns the current revocations if the prefix may have changed since the last poll, or if another
    /// cluster is served; otherwise None.
    pub(super) async fn poll(&mut self) -> Result<Option<Revocations>, String> {
        if let Some(read) = self.read.as_ref().filter(|read| self.is_served(read.cluster)) {
            // Ask for a key modified since, and for the number of keys: the two values reveal any change,
            // deletions included.
            let since = RangeRequest {
                min_mod_revision: read.revision + 1,
                keys_only: true,
                limit: 1,
                ..self.prefix_range()
            };
            let answer = self.range(since).await?;
            self.check_cluster(answer.header.as_ref(), read.cluster)?;
            let keys = usize::try_from(answer.count).unwrap_or(usize::MAX);
            if answer.kvs.is_empty() && keys == read.changed_at.len() {
                return Ok(None);
            }
        }
        let read = self.read_all().await?;
        let revocations = read.revocations.clone();
        self.read = Some(read);
        Ok(Some(revocations))
    }

    /// Reads the current revocations, decides on `change`, and writes the result; gives up at `until`.
    /// Returns the revocations after the change, and the time of the read. Leaves `read`, the state compared
    /// by the next poll, unchanged: only a published state may be stored in `read`, and a failed change
    /// publishes no state.
    pub(super) async fn change(
        &self,
        change: &RevocationChange,
        until: Instant,
    ) -> Result<(Revocations, Instant), RevocationError> {
        // True once a write may have been sent. A failed compare may be caused by an earlier attempt of the
        // same write through another member.
        let mut sent = false;
        let trouble = |sent, reason| {
            if sent { RevocationError::Unknown(reason) } else { RevocationError::Unchanged(reason) }
        };
        for _ in 0..TRIES {
            let asked = Instant::now();
            let read = timeout_at(until, self.read_all()).await.unwrap_or_else(|_| Err(LATE.into()));
            let read = read.map_err(|reason| trouble(sent, reason))?;
            let entry = read.revocations.entry(change, SystemTime::now());
            let after = read.revocations.with(entry.clone())?;
            let key = key_of(&self.prefix, &entry);
            let known = read.changed_at.get(&key).copied().unwrap_or(0);
            match timeout_at(until, self.put(key, row::write(&entry), known)).await {
                Ok(Ok(true)) if self.is_served(read.cluster) => return Ok((after, asked)),
                Ok(Ok(true)) => return Err(RevocationError::Unknown(ANOTHER.into())),
                Ok(Ok(false)) => sent = true,
                Ok(Err(unanswered)) => return Err(trouble(sent || unanswered.sent, unanswered.reason)),
                Err(_) => return Err(RevocationError::Unknown(LATE.into())),
            }
        }
        Err(trouble(sent, "others change the same all the time".into()))
    }

    async fn read_all(&self) -> Result<PrefixSnapshot, String> {
        let most = i64::try_from(MOST_ENTRIES).unwrap_or(i64::MAX);
        let answer = self.range(RangeRequest { limit: most + 1, ..self.prefix_range() }).await?;
        if answer.count > most {
            return Err(format!("there are more than {MOST_ENTRIES} keys under the prefix"));
        }
        let cluster = answer.header.as_ref().map_or(0, |header| header.cluster_id);
        self.check_cluster(answer.header.as_ref(), cluster)?;
        let revision = answer.header.as_ref().map_or(0, |header| header.revision);
        let entries = answer.kvs.iter().filter_map(|kv| parse_entry(&self.prefix, kv));
        let revocations = entries.collect();
        let changed_at = answer.kvs.into_iter().map(|kv| (kv.key, kv.mod_revision)).collect();
        Ok(PrefixSnapshot { cluster, revision, changed_at, revocations })
    }

    /// True if `cluster` is the served cluster, or if either is unknown.
    fn is_served(&self, cluster: u64) -> bool {
        let served = self.upstream.members.snapshot.load().cluster;
        cluster == 0 || served.is_none_or(|served| served.0 == cluster)
    }

    /// Accepts an answer only if the answer is from `cluster`, and `cluster` is still the served cluster.
    fn check_cluster(&self, header: Option<&ResponseHeader>, cluster: u64) -> Result<(), String> {
        let of = header.map_or(0, |header| header.cluster_id);
        if of == cluster && self.is_served(of) { Ok(()) } else { Err(ANOTHER.into()) }
    }

    /// Writes the key if the key's mod revision is still `known`; 0 means a missing key. Returns true if
    /// written.
    async fn put(&self, key: Bytes, value: String, known: i64) -> Result<bool, PrefixUnanswered> {
        let unchanged = Compare {
            result: CompareResult::Equal.into(),
            target: CompareTarget::Mod.into(),
            key: key.clone(),
            target_union: Some(TargetUnion::ModRevision(known)),
            ..Compare::default()
        };
        let put = PutRequest { key, value: value.into(), ..PutRequest::default() };
        let put = RequestOp { request: Some(request_op::Request::RequestPut(put)) };
        let txn = TxnRequest { compare: vec![unchanged], success: vec![put], failure: vec![] };
        let answer = self
            .ask(async |mut kv, token| {
                kv.txn(with(token, txn.clone())).await.map(tonic::Response::into_inner)
            })
            .await?;
        Ok(answer.succeeded)
    }

    async fn range(&self, request: RangeRequest) -> Result<RangeResponse, String> {
        self.ask(async |mut kv, token| {
            kv.range(with(token, request.clone())).await.map(tonic::Response::into_inner)
        })
        .await
        .map_err(|unanswered| unanswered.reason)
    }

    fn prefix_range(&self) -> RangeRequest {
        let key = Bytes::copy_from_slice(self.prefix.as_bytes());
        let mut end = self.prefix.as_bytes().to_vec();
        // `config` makes the prefix end with a slash, so the last byte is never 0xff.
        if let Some(last) = end.last_mut() {
            *last = last.saturating_add(1);
        }
        RangeRequest { key, range_end: end.into(), ..RangeRequest::default() }
    }

    /// Asks the ready voters one after another. Repeating an applied request is harmless: reads change
    /// nothing, and a change is decided again.
    async fn ask<T>(
        &self,
        call: impl AsyncFn(KvClient<Channel>, Option<AsciiMetadataValue>) -> Result<T, Status>,
    ) -> Result<T, PrefixUnanswered> {
        let mut members: Vec<Arc<Member>> =
            self.upstream.members.snapshot.load().ready_voters().cloned().collect();
        let last = self.last.take();
        let identity = self.identity.load_full();
        members.sort_by_key(|member| Some(member.id) != last);
        let (mut reason, mut sent) = ("no member is ready".to_owned(), false);
        for member in members {
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
                        reason = format!("{:?}: {}", status.code(), status.message());
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

fn key_of(prefix: &str, entry: &RevocationEntry) -> Bytes {
    match entry {
        RevocationEntry::User(name, _) => format!("{prefix}user/{name}").into(),
        RevocationEntry::Session(id) => format!("{prefix}session/{id}").into(),
    }
}

/// Returns the entry of a key. An unreadable entry blocks the user or session named by the key; None if the
/// key names no user or session.
fn parse_entry(prefix: &str, kv: &KeyValue) -> Option<RevocationEntry> {
    if let Some(entry) = row::read(&kv.value).filter(|entry| key_of(prefix, entry) == kv.key) {
        return Some(entry);
    }
    let key = String::from_utf8_lossy(&kv.key);
    let rest = key.strip_prefix(prefix).unwrap_or_default();
    let meant = match rest.split_once('/') {
        Some(("user", name)) => Some(RevocationEntry::User(UserName::from(name), UserRevocation::NOT_KNOWN)),
        Some(("session", id)) => id.parse().ok().map(RevocationEntry::Session),
        _ => None,
    };
    tracing::error!(
        key = %key.escape_debug(), refused = meant.is_some(),
        "an entry of the revocations cannot be read"
    );
    meant
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kv(key: &str, value: &str) -> KeyValue {
        KeyValue { key: key.to_owned().into(), value: value.to_owned().into(), ..KeyValue::default() }
    }

    #[test]
    fn an_entry_that_cannot_be_read_refuses_whom_its_key_names() {
        let id = "2188fb71f3e76d20bc325cea09efdc7c";
        let good = RevocationEntry::User("a/b".into(), UserRevocation { generation: 3, blocked: false });
        let value = row::write(&good);
        assert_eq!(parse_entry("/p/", &kv("/p/user/a/b", &value)), Some(good));
        let closed = |name: &str| Some(RevocationEntry::User(name.into(), UserRevocation::NOT_KNOWN));
        assert_eq!(parse_entry("/p/", &kv("/p/user/c", &value)), closed("c"), "another's value");
        assert_eq!(parse_entry("/p/", &kv("/p/user/c", "")), closed("c"));
        assert_eq!(
            parse_entry("/p/", &kv(&format!("/p/session/{id}"), "?")).unwrap(),
            RevocationEntry::Session(id.parse().unwrap())
        );
        assert_eq!(parse_entry("/p/", &kv("/p/session/12", "?")), None);
        assert_eq!(parse_entry("/p/", &kv("/p/more/c", "?")), None);
    }
}
