//! Revocations under a prefix in etcd: every replica reads them there.
//!
//! Owns: the keys, reading them, changing one. Must not know: who obeys. Invariants: every read is linearizable, so that
//! how old it is can be told (a watch that says nothing may have stalled); a change is a transaction on the revision that it
//! was decided upon, so that two operators lose nothing; a user whose entry cannot be understood is blocked.
//!
//! `PREFIX` + `user/NAME` and `PREFIX` + `session/ID`, each with a row as its value.

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

use super::{Trouble, row};
use crate::config::{Keep, Login};
use crate::downstream::session::{Change, Entry, MOST_ENTRIES, Revocations, Standing};
use crate::identity::{MemberId, UserName};
use crate::pb::etcdserverpb::compare::{CompareResult, CompareTarget, TargetUnion};
use crate::pb::etcdserverpb::kv_client::KvClient;
use crate::pb::etcdserverpb::request_op;
use crate::pb::etcdserverpb::{
    Compare, PutRequest, RangeRequest, RangeResponse, RequestOp, ResponseHeader, TxnRequest,
};
use crate::pb::mvccpb::KeyValue;
use crate::refusal::Refusal;
use crate::upstream::credential::{Credentials, LoginFailure, PasswordIdentity, Token};
use crate::upstream::membership::{Auth, Changes, ControlChannels, Member, MembersHandle};

/// How long one member may take for an answer before another is asked.
const ANSWER: Duration = Duration::from_secs(1);
/// How long a login at one member may take.
const LOGIN: Duration = Duration::from_secs(2);
/// How often a change is decided anew since somebody else changed the same.
const TRIES: usize = 5;
/// Why there is no answer where none came.
pub(super) const LATE: &str = "etcd did not answer in time";
/// Why an answer does not count that came of a cluster which is not served any more.
const ANOTHER: &str = "the answer is of another cluster";
/// [`MOST_ENTRIES`] rows of long names.
const LARGEST_ANSWER: usize = 64 << 20;

/// How etcd is reached from the control runtime.
#[derive(Clone)]
pub struct Upstream {
    /// The published members.
    pub members: MembersHandle,
    /// A channel to each.
    pub channels: ControlChannels,
    /// Tokens per identity and member.
    pub credentials: Arc<Credentials>,
}

/// As whom the prefix is read and written, for whoever replaces that.
#[derive(Clone)]
pub(super) struct Access {
    prefix: Arc<str>,
    credentials: Arc<Credentials>,
    identity: Arc<ArcSwapOption<PasswordIdentity>>,
}

impl Access {
    /// Whether it is as these settings say; those of another prefix say nothing of this one.
    pub(super) fn is_as(&self, keep: &Keep) -> bool {
        let Keep::Etcd { prefix, login } = keep else { return true };
        let named = login.as_ref().map(|login| self.credentials.identity(&login.user, &login.password));
        let now = self.identity.load();
        *prefix != self.prefix || now.as_ref().map(Arc::as_ptr) == named.as_ref().map(Arc::as_ptr)
    }

    /// Makes it so.
    pub(super) fn follow(&self, keep: &Keep) {
        if let Keep::Etcd { prefix, login } = keep
            && *prefix == self.prefix
        {
            let login = login.as_ref();
            self.identity.store(login.map(|login| self.credentials.identity(&login.user, &login.password)));
        }
    }
}

/// The prefix, and what was read there last.
pub(super) struct Prefix {
    prefix: Arc<str>,
    upstream: Upstream,
    identity: Arc<ArcSwapOption<PasswordIdentity>>,
    /// Who answered last, and is asked first: one that is stuck costs its time once.
    last: Cell<Option<MemberId>>,
    /// What the last look made known: the next one tells what has changed since.
    read: Option<Read>,
}

/// No member has answered.
struct Unanswered {
    reason: String,
    /// Whether one may have done it all the same.
    sent: bool,
}

/// The state of the prefix at one revision.
struct Read {
    /// Of which cluster; 0 where that is not told.
    cluster: u64,
    revision: i64,
    /// By key, the revision of its last change.
    changed_at: HashMap<Bytes, i64>,
    revocations: Revocations,
}

impl Prefix {
    pub(super) fn new(prefix: &Arc<str>, login: Option<&Login>, upstream: Upstream) -> Self {
        let identity = login.map(|login| upstream.credentials.identity(&login.user, &login.password));
        let identity = Arc::new(ArcSwapOption::new(identity));
        Self { prefix: Arc::clone(prefix), upstream, identity, last: Cell::default(), read: None }
    }

    pub(super) fn access(&self) -> Access {
        Access {
            prefix: Arc::clone(&self.prefix),
            credentials: Arc::clone(&self.upstream.credentials),
            identity: Arc::clone(&self.identity),
        }
    }

    /// Tells when members come and go.
    pub(super) fn changes(&self) -> Changes {
        self.upstream.members.changes.clone()
    }

    /// What is there now, if it may have changed since the last look, or another cluster is served; else none.
    pub(super) async fn look(&mut self) -> Result<Option<Revocations>, String> {
        if let Some(read) = self.read.as_ref().filter(|read| self.is_served(read.cluster)) {
            // The key that was changed last, and how many there are: together they tell any change.
            let since = RangeRequest {
                min_mod_revision: read.revision + 1,
                keys_only: true,
                limit: 1,
                ..self.everything()
            };
            let answer = self.range(since).await?;
            self.held_against(answer.header.as_ref(), read.cluster)?;
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

    /// Decides on what is there now, and keeps that, until then. What is there then, as of when it was read. What the next look
    /// compares with stays as it is: only what is published may be that, and a change that fails publishes nothing.
    pub(super) async fn change(
        &self,
        change: &Change,
        until: Instant,
    ) -> Result<(Revocations, Instant), Trouble> {
        // Whether it was sent; where a put says that others were faster, that may have been the same put on another way.
        let mut sent = false;
        let trouble = |sent, reason| if sent { Trouble::Unknown(reason) } else { Trouble::Unchanged(reason) };
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
                Ok(Ok(true)) => return Err(Trouble::Unknown(ANOTHER.into())),
                Ok(Ok(false)) => sent = true,
                Ok(Err(unanswered)) => return Err(trouble(sent || unanswered.sent, unanswered.reason)),
                Err(_) => return Err(Trouble::Unknown(LATE.into())),
            }
        }
        Err(trouble(sent, "others change the same all the time".into()))
    }

    async fn read_all(&self) -> Result<Read, String> {
        let most = i64::try_from(MOST_ENTRIES).unwrap_or(i64::MAX);
        let answer = self.range(RangeRequest { limit: most + 1, ..self.everything() }).await?;
        if answer.count > most {
            return Err(format!("there are more than {MOST_ENTRIES} keys under the prefix"));
        }
        let cluster = answer.header.as_ref().map_or(0, |header| header.cluster_id);
        self.held_against(answer.header.as_ref(), cluster)?;
        let revision = answer.header.as_ref().map_or(0, |header| header.revision);
        let entries = answer.kvs.iter().filter_map(|kv| understood(&self.prefix, kv));
        let revocations = entries.collect();
        let changed_at = answer.kvs.into_iter().map(|kv| (kv.key, kv.mod_revision)).collect();
        Ok(Read { cluster, revision, changed_at, revocations })
    }

    /// Whether that is the cluster that is served now, as far as either is known.
    fn is_served(&self, cluster: u64) -> bool {
        let served = self.upstream.members.snapshot.load().cluster;
        cluster == 0 || served.is_none_or(|served| served.0 == cluster)
    }

    /// An answer counts only where it is of `cluster`, and that is the one which is served when it has come.
    fn held_against(&self, header: Option<&ResponseHeader>, cluster: u64) -> Result<(), String> {
        let of = header.map_or(0, |header| header.cluster_id);
        if of == cluster && self.is_served(of) { Ok(()) } else { Err(ANOTHER.into()) }
    }

    /// Writes the key if it was last changed at `known`; 0 is never.
    async fn put(&self, key: Bytes, value: String, known: i64) -> Result<bool, Unanswered> {
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

    fn everything(&self) -> RangeRequest {
        let key = Bytes::copy_from_slice(self.prefix.as_bytes());
        let mut end = self.prefix.as_bytes().to_vec();
        // `config` has it end with a slash, so this is no 0xff.
        if let Some(last) = end.last_mut() {
            *last = last.saturating_add(1);
        }
        RangeRequest { key, range_end: end.into(), ..RangeRequest::default() }
    }

    /// Asks one ready voter after the other. A second time where the first was done all the same is harmless: reads
    /// change nothing, and a change is decided anew.
    async fn ask<T>(
        &self,
        call: impl AsyncFn(KvClient<Channel>, Option<AsciiMetadataValue>) -> Result<T, Status>,
    ) -> Result<T, Unanswered> {
        let mut members: Vec<Arc<Member>> =
            self.upstream.members.snapshot.load().ready_voters().cloned().collect();
        let last = self.last.take();
        let identity = self.identity.load_full();
        members.sort_by_key(|member| Some(member.id) != last);
        let (mut reason, mut sent) = ("no member is ready".to_owned(), false);
        for member in members {
            let Some(channel) = self.upstream.channels.load().get(&member.id).cloned() else { continue };
            let client = KvClient::new(channel).max_decoding_message_size(LARGEST_ANSWER);
            // Once more where the token has died meanwhile.
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
                        token.iter().for_each(Token::mark_used);
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
        Err(Unanswered { reason, sent })
    }

    async fn token(
        &self,
        identity: Option<&Arc<PasswordIdentity>>,
        member: &Member,
    ) -> Result<Option<Token>, LoginFailure> {
        match identity {
            Some(identity) if self.upstream.members.auth.now() != Auth::Off => {
                // One that is given up goes on, and serves the next look.
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

/// Whether a member says that it has done nothing.
fn is_refusal(status: &Status) -> bool {
    use Code::{FailedPrecondition, InvalidArgument, PermissionDenied, ResourceExhausted, Unauthenticated};
    let refusals =
        [FailedPrecondition, InvalidArgument, PermissionDenied, ResourceExhausted, Unauthenticated];
    refusals.contains(&status.code()) || is_stale(status)
}

/// Whether etcd says so of a token that was good once. Reads and compared puts may both be sent again.
fn is_stale(status: &Status) -> bool {
    let says = |refusal: &Refusal| {
        status.code() as u8 == refusal.code() as u8 && status.message() == refusal.message()
    };
    says(&Refusal::INVALID_AUTH_TOKEN)
        || says(&Refusal::AUTH_OLD_REVISION)
        // 3.5.0 and 3.5.1 tell it raw, where their tokens are JWTs.
        || (status.code() == Code::Unknown && status.message() == "auth: revision in header is old")
}

fn key_of(prefix: &str, entry: &Entry) -> Bytes {
    match entry {
        Entry::User(name, _) => format!("{prefix}user/{name}").into(),
        Entry::Session(id) => format!("{prefix}session/{id}").into(),
    }
}

/// The entry of a key. None where nobody can be meant by it.
fn understood(prefix: &str, kv: &KeyValue) -> Option<Entry> {
    if let Some(entry) = row::read(&kv.value).filter(|entry| key_of(prefix, entry) == kv.key) {
        return Some(entry);
    }
    let key = String::from_utf8_lossy(&kv.key);
    let rest = key.strip_prefix(prefix).unwrap_or_default();
    let meant = match rest.split_once('/') {
        Some(("user", name)) => Some(Entry::User(UserName::from(name), Standing::NOT_KNOWN)),
        Some(("session", id)) => id.parse().ok().map(Entry::Session),
        _ => None,
    };
    tracing::error!(key = %key.escape_debug(), refused = meant.is_some(), "an entry of the revocations cannot be read");
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
        let good = Entry::User("a/b".into(), Standing { generation: 3, blocked: false });
        let value = row::write(&good);
        assert_eq!(understood("/p/", &kv("/p/user/a/b", &value)), Some(good));
        let closed = |name: &str| Some(Entry::User(name.into(), Standing::NOT_KNOWN));
        assert_eq!(understood("/p/", &kv("/p/user/c", &value)), closed("c"), "another's value");
        assert_eq!(understood("/p/", &kv("/p/user/c", "")), closed("c"));
        assert_eq!(
            understood("/p/", &kv(&format!("/p/session/{id}"), "?")).unwrap(),
            Entry::Session(id.parse().unwrap())
        );
        assert_eq!(understood("/p/", &kv("/p/session/12", "?")), None);
        assert_eq!(understood("/p/", &kv("/p/more/c", "?")), None);
    }
}
