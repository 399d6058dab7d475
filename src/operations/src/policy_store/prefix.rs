//! The keys of the stored policy below its prefix in etcd.
//!
//! Owns: the names of the keys, and the requests. Must not know: the choice of the generation in force.
//! Invariants: pointer and grants are read at one revision; a change is one transaction under a condition on
//! the pointer, and is never sent again after an unknown outcome.
//!
//! Keys are `PREFIX` + `current` (the pointer), `generation/NUMBER` with 20 digits, and `grant/ID`.

use bytes::Bytes;

use super::generation::{GenerationHeader, GenerationPointer};
use super::last_good::PointerReading;
use super::temporary_grant::TemporaryGrant;
use keyward_config::PolicyInEtcd;
use keyward_etcd::pb::etcdserverpb::range_request::{SortOrder, SortTarget};
use keyward_etcd::pb::etcdserverpb::request_op::Request as Operation;
use keyward_etcd::pb::etcdserverpb::response_op::Response as Answer;
use keyward_etcd::pb::etcdserverpb::{
    Compare, DeleteRangeRequest, RangeRequest, RangeResponse, RequestOp, TxnRequest, TxnResponse,
};
use keyward_upstream::own_keys::{
    AfterUnknownOutcome, OwnKeys, OwnKeysUpstream, PrefixUnanswered, SeenPrefix, below, is_unchanged,
};

/// Most temporary grants; a grant has about 300 bytes.
pub(super) const MOST_GRANTS: usize = 256;
/// Generations that are kept, the current one included.
pub(super) const KEPT_GENERATIONS: u64 = 20;

/// The stored policy in etcd.
pub(super) struct PolicyPrefix {
    pub(super) keys: OwnKeys,
    current: Bytes,
    generations: String,
    grants: String,
}

/// Pointer and grants at one revision.
pub(super) struct PrefixReading {
    pub(super) seen: SeenPrefix,
    pub(super) pointer: PointerReading,
    /// The mod revision of the pointer; 0 for a missing pointer.
    pub(super) pointer_changed_at: i64,
    /// The highest number of a generation's key; 0 without any.
    pub(super) highest: u64,
    pub(super) grants: Vec<StoredGrant>,
    /// Keys of grants with unreadable values.
    pub(super) unreadable: Vec<Bytes>,
}

/// A temporary grant and its key.
#[derive(Clone, Debug)]
pub(super) struct StoredGrant {
    pub(super) key: Bytes,
    pub(super) changed_at: i64,
    pub(super) grant: TemporaryGrant,
}

impl PolicyPrefix {
    pub(super) fn new(settings: &PolicyInEtcd, upstream: OwnKeysUpstream) -> Self {
        let keys = OwnKeys::new(&settings.prefix, settings.login.as_ref(), upstream);
        let below = |name: &str| format!("{}{name}", settings.prefix);
        Self {
            keys,
            current: below("current").into(),
            generations: below("generation/"),
            grants: below("grant/"),
        }
    }

    /// Reads pointer and grants.
    pub(super) async fn read(&self) -> Result<PrefixReading, String> {
        let most = i64::try_from(MOST_GRANTS).unwrap_or(i64::MAX);
        let highest = RangeRequest {
            keys_only: true,
            limit: 1,
            sort_order: SortOrder::Descend.into(),
            sort_target: SortTarget::Key.into(),
            ..below(&self.generations)
        };
        let ranges = [
            RangeRequest { key: self.current.clone(), ..RangeRequest::default() },
            RangeRequest { limit: most, ..below(&self.grants) },
            highest,
            RangeRequest { count_only: true, ..self.keys.all_keys() },
        ];
        let success = ranges.map(|range| RequestOp { request: Some(Operation::RequestRange(range)) });
        let txn = TxnRequest { success: success.into(), ..TxnRequest::default() };
        let answer = self.keys.txn(txn, AfterUnknownOutcome::SendAgain).await.map_err(|none| none.reason)?;
        let cluster = answer.header.as_ref().map_or(0, |header| header.cluster_id);
        self.keys.check_cluster(answer.header.as_ref(), cluster)?;
        let revision = answer.header.as_ref().map_or(0, |header| header.revision);
        let [pointer, grants, highest, all] = range_answers(answer).ok_or("the answer is incomplete")?;
        let highest = highest.kvs.first().map(|kv| self.number_of(&kv.key));
        let pointer_changed_at = pointer.kvs.first().map_or(0, |kv| kv.mod_revision);
        let pointer = match (pointer.kvs.first(), highest) {
            (None, None) => PointerReading::NeverApplied,
            (None, Some(_)) => PointerReading::Missing,
            (Some(kv), _) => {
                GenerationPointer::read(&kv.value).map_or(PointerReading::Unreadable, PointerReading::At)
            }
        };
        let (mut readable, mut unreadable) = (Vec::new(), Vec::new());
        for kv in grants.kvs {
            let key = std::str::from_utf8(&kv.key).ok().and_then(|key| key.strip_prefix(&self.grants));
            match key.and_then(|key| TemporaryGrant::read(key, &kv.value)) {
                Some(grant) => readable.push(StoredGrant { key: kv.key, changed_at: kv.mod_revision, grant }),
                None => unreadable.push(kv.key),
            }
        }
        Ok(PrefixReading {
            seen: SeenPrefix { cluster, revision, keys: all.count },
            pointer,
            pointer_changed_at,
            highest: highest.unwrap_or(0),
            grants: readable,
            unreadable,
        })
    }

    /// The value of a generation's key.
    pub(super) async fn generation(&self, number: u64) -> Result<Option<Bytes>, String> {
        let answer =
            self.keys.range(RangeRequest { key: self.key_of(number), ..RangeRequest::default() }).await?;
        let cluster = answer.header.as_ref().map_or(0, |header| header.cluster_id);
        self.keys.check_cluster(answer.header.as_ref(), cluster)?;
        Ok(answer.kvs.into_iter().next().map(|kv| kv.value))
    }

    /// The headers of the kept generations, in order.
    pub(super) async fn history(&self) -> Result<Vec<GenerationHeader>, String> {
        let answer = self.keys.range(below(&self.generations)).await?;
        Ok(answer.kvs.iter().filter_map(|kv| GenerationHeader::read(&kv.value)).collect())
    }

    /// Sends a transaction with `conditions`. Returns true if the conditions held.
    pub(super) async fn write(
        &self,
        conditions: Vec<Compare>,
        operations: Vec<RequestOp>,
    ) -> Result<bool, PrefixUnanswered> {
        let txn = TxnRequest { compare: conditions, success: operations, failure: vec![] };
        Ok(self.keys.txn(txn, AfterUnknownOutcome::Stop).await?.succeeded)
    }

    /// The condition that the pointer is as read.
    pub(super) fn has_pointer_of(&self, reading: &PrefixReading) -> Compare {
        is_unchanged(&self.current, reading.pointer_changed_at)
    }

    /// The key of the pointer.
    pub(super) fn current(&self) -> Bytes {
        self.current.clone()
    }

    /// The key of a generation.
    pub(super) fn key_of(&self, number: u64) -> Bytes {
        format!("{}{number:020}", self.generations).into()
    }

    /// The key of a grant.
    pub(super) fn grant_key(&self, name: &str) -> Bytes {
        format!("{}{name}", self.grants).into()
    }

    /// Deletes the generations before the kept ones, if any.
    pub(super) fn delete_before(&self, newest: u64) -> Option<RequestOp> {
        let first_kept = newest.checked_sub(KEPT_GENERATIONS)? + 1;
        let key = Bytes::copy_from_slice(self.generations.as_bytes());
        let range_end = self.key_of(first_kept);
        let delete = DeleteRangeRequest { key, range_end, ..DeleteRangeRequest::default() };
        Some(RequestOp { request: Some(Operation::RequestDeleteRange(delete)) })
    }

    /// The number in a generation's key; 0 for a key of another program.
    fn number_of(&self, key: &[u8]) -> u64 {
        let name = std::str::from_utf8(key).ok().and_then(|key| key.strip_prefix(&self.generations));
        name.and_then(|number| number.parse().ok()).unwrap_or(0)
    }
}

/// Deletes a key, as an operation of a transaction.
pub(super) fn delete(key: Bytes) -> RequestOp {
    let delete = DeleteRangeRequest { key, ..DeleteRangeRequest::default() };
    RequestOp { request: Some(Operation::RequestDeleteRange(delete)) }
}

fn range_answers(answer: TxnResponse) -> Option<[RangeResponse; 4]> {
    let ranges = answer.responses.into_iter().filter_map(|op| match op.response {
        Some(Answer::ResponseRange(range)) => Some(range),
        _ => None,
    });
    ranges.collect::<Vec<_>>().try_into().ok()
}
