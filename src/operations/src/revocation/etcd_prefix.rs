//! Revocations under a prefix in etcd, read by every replica.
//!
//! Owns: the keys, reading all keys, changing one key. Must not know: the consumers of revocations.
//! Invariants: every read is linearizable, so that the age of the result is known (a silent watch may have
//! stalled), except a look at one member's store while the cluster has no quorum, which never replaces the
//! state of a later revision; a change is a transaction conditional on the revision read before the decision,
//! so that concurrent operators lose no change; a user with an unreadable entry is blocked.
//!
//! Keys are `PREFIX` + `user/NAME` and `PREFIX` + `session/ID`; each value is a row.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::SystemTime;

use bytes::Bytes;
use tokio::time::{Instant, timeout_at};

use super::{RevocationError, row};
use keyward_cluster::membership::{ChangeReceiver, ServingState};
use keyward_config::EtcdLogin;
use keyward_downstream::session::{
    MOST_ENTRIES, RevocationChange, RevocationEntry, Revocations, UserRevocation,
};
use keyward_etcd::identity::UserName;
use keyward_etcd::pb::etcdserverpb::{RangeRequest, RangeResponse, TxnRequest};
use keyward_etcd::pb::mvccpb::KeyValue;
use keyward_upstream::own_keys::{
    self, ANOTHER_CLUSTER, AfterUnknownOutcome, OwnKeys, OwnKeysUpstream, PrefixLogin, PrefixUnanswered,
    SeenPrefix,
};

/// Maximum of attempts to make a change when another operator changes the same key.
const TRIES: usize = 5;
/// Error text for a missing answer.
pub(super) const LATE: &str = "etcd did not answer in time";

/// The prefix, with the state read last.
pub(super) struct RevocationPrefix {
    keys: OwnKeys,
    /// The state read by the last poll; the next poll asks only for changes since.
    read: Option<PrefixSnapshot>,
}

/// The state of the prefix at one revision.
struct PrefixSnapshot {
    seen: SeenPrefix,
    /// The mod revision of each key.
    changed_at: HashMap<Bytes, i64>,
    revocations: Revocations,
}

impl RevocationPrefix {
    pub(super) fn new(prefix: &Arc<str>, login: Option<&EtcdLogin>, upstream: OwnKeysUpstream) -> Self {
        Self { keys: OwnKeys::new(prefix, login, upstream), read: None }
    }

    pub(super) fn login(&self) -> PrefixLogin {
        self.keys.login()
    }

    /// Notifies of changes of members.
    pub(super) fn changes(&self) -> ChangeReceiver {
        self.keys.member_changes()
    }

    /// True if a member is ready for a poll.
    pub(super) fn has_member(&self) -> bool {
        self.keys.has_member()
    }

    /// The calls that the cluster serves now.
    pub(super) fn serving(&self) -> ServingState {
        self.keys.serving()
    }

    /// Returns the current revocations if the prefix may have changed since the last poll, or if another
    /// cluster is served; otherwise None.
    pub(super) async fn poll(&mut self) -> Result<Option<Revocations>, String> {
        if let Some(read) = &self.read
            && !self.keys.has_changed(read.seen).await?
        {
            return Ok(None);
        }
        let read = self.read_all().await?;
        let revocations = read.revocations.clone();
        self.read = Some(read);
        Ok(Some(revocations))
    }

    /// The same from the store of the member that serves local reads, while the cluster has no quorum. None
    /// also if the store is older than the state read last.
    pub(super) async fn poll_local(&mut self) -> Result<Option<Revocations>, String> {
        if let Some(last) = &self.read
            && self.keys.is_served(last.seen.cluster)
        {
            let first = self.keys.local_range(1).await?;
            self.keys.check_cluster(first.header.as_ref(), last.seen.cluster)?;
            if first.header.is_none_or(|header| header.revision <= last.seen.revision) {
                return Ok(None);
            }
        }
        let read = self.snapshot_of(self.keys.local_range(most_keys() + 1).await?)?;
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
            let key = key_of(self.keys.prefix(), &entry);
            let known = read.changed_at.get(&key).copied().unwrap_or(0);
            match timeout_at(until, self.put(key, row::write(&entry), known)).await {
                Ok(Ok(true)) if self.keys.is_served(read.seen.cluster) => return Ok((after, asked)),
                Ok(Ok(true)) => return Err(RevocationError::Unknown(ANOTHER_CLUSTER.into())),
                Ok(Ok(false)) => sent = true,
                Ok(Err(unanswered)) => return Err(trouble(sent || unanswered.sent, unanswered.reason)),
                Err(_) => return Err(RevocationError::Unknown(LATE.into())),
            }
        }
        Err(trouble(sent, "others change the same all the time".into()))
    }

    async fn read_all(&self) -> Result<PrefixSnapshot, String> {
        let range = RangeRequest { limit: most_keys() + 1, ..self.keys.all_keys() };
        self.snapshot_of(self.keys.range(range).await?)
    }

    fn snapshot_of(&self, answer: RangeResponse) -> Result<PrefixSnapshot, String> {
        if answer.count > most_keys() {
            return Err(format!("there are more than {MOST_ENTRIES} keys under the prefix"));
        }
        let cluster = answer.header.as_ref().map_or(0, |header| header.cluster_id);
        self.keys.check_cluster(answer.header.as_ref(), cluster)?;
        let revision = answer.header.as_ref().map_or(0, |header| header.revision);
        let seen = SeenPrefix { cluster, revision, keys: answer.count };
        let entries = answer.kvs.iter().filter_map(|kv| parse_entry(self.keys.prefix(), kv));
        let revocations = entries.collect();
        let changed_at = answer.kvs.into_iter().map(|kv| (kv.key, kv.mod_revision)).collect();
        Ok(PrefixSnapshot { seen, changed_at, revocations })
    }

    /// Writes the key if the key's mod revision is still `known`; 0 means a missing key. Returns true if
    /// written. Repeating an applied request is harmless: the change is decided again.
    async fn put(&self, key: Bytes, value: String, known: i64) -> Result<bool, PrefixUnanswered> {
        let unchanged = own_keys::is_unchanged(&key, known);
        let put = own_keys::put(key, value.into());
        let txn = TxnRequest { compare: vec![unchanged], success: vec![put], failure: vec![] };
        Ok(self.keys.txn(txn, AfterUnknownOutcome::SendAgain).await?.succeeded)
    }
}

/// The largest number of keys below the prefix.
fn most_keys() -> i64 {
    i64::try_from(MOST_ENTRIES).unwrap_or(i64::MAX)
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
