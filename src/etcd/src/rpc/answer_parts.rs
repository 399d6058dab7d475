//! The parts of a request for which etcd reads key-value pairs, to bound what it gathers before it is asked.
//!
//! Owns: which pairs a Range, a DeleteRange, a Put, a Txn, and the calls of locks and elections make etcd
//! read, and a Txn's reads of its own writes. Must not know: the sizes, who is limited.
//! Invariant: the sum over the parts is never below what etcd gathers, whichever branch of a Txn it takes:
//! the compares and all branches count together, so that finding the sum reads no more than the sum.
//!
//! etcd gathers as follows in all versions (`mvcc/kvstore_txn.go`, `etcdserver/apply*.go`): a Range of a
//! count only reads no values; one of keys only reads the values, and leaves them out of the answer; one with
//! a limit reads one pair more; with a sort order, or with a bound on revisions, all pairs of the range are
//! read, whatever its limit. A compare over a range reads all pairs of the range. A Lock, a Campaign, a
//! Leader and an Observe ask for the first or the last of a prefix by a sort order.

use std::collections::HashMap;

use bytes::{BufMut as _, Bytes, BytesMut};
use prost::Message as _;

use super::key_range::end_of_prefix;
use super::schema::MessageId;
use super::txn_parts::{TxnPart, TxnParts};
use crate::pb::etcdserverpb::{Compare, DeleteRangeRequest, PutRequest, RangeRequest};
use crate::pb::v3electionpb::{CampaignRequest, LeaderRequest};
use crate::pb::v3lockpb::LockRequest;

/// A range whose key-value pairs etcd reads.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct AnswerPart {
    /// The first key.
    pub key: Bytes,
    /// The end as in a RangeRequest; empty for one key.
    pub range_end: Bytes,
    /// The revision; 0 for the newest.
    pub revision: i64,
    /// The most pairs, in the order of keys; `None` for all.
    pub most_keys: Option<u64>,
    /// True if the client takes the answer of a member without its leader.
    pub serializable: bool,
}

/// The parts of one request.
#[derive(Debug)]
pub struct AnswerParts {
    parts: HashMap<AnswerPart, PartUse>,
}

/// The use of a part by a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PartUse {
    /// The number of times that etcd reads the part.
    pub times: u64,
    /// Bytes that the request itself may have written into the part before.
    pub written: u64,
}

impl AnswerPart {
    /// The newest pairs of a range, all of them; of one key without an end.
    fn newest(key: Bytes, range_end: Bytes) -> Self {
        let most_keys = range_end.is_empty().then_some(1);
        Self { key, range_end, revision: 0, most_keys, serializable: false }
    }

    fn of_range(range: RangeRequest) -> Option<Self> {
        if range.count_only {
            return None;
        }
        let bounds = [
            range.min_mod_revision,
            range.max_mod_revision,
            range.min_create_revision,
            range.max_create_revision,
        ];
        let is_picked = range.sort_order != 0 || bounds.iter().any(|bound| *bound != 0);
        let limit = u64::try_from(range.limit).ok().filter(|limit| *limit > 0 && !is_picked);
        Some(Self {
            most_keys: if range.range_end.is_empty() { Some(1) } else { limit.map(|limit| limit + 1) },
            key: range.key,
            range_end: range.range_end,
            revision: range.revision,
            serializable: range.serializable,
        })
    }

    fn of_deletion(deletion: DeleteRangeRequest) -> Option<Self> {
        let DeleteRangeRequest { key, range_end, prev_kv } = deletion;
        prev_kv.then(|| Self::newest(key, range_end))
    }

    /// The keys of those who wait for a lock, or stand in an election.
    fn of_queue(name: &[u8]) -> Self {
        let mut prefix = BytesMut::with_capacity(name.len() + 1);
        prefix.put_slice(name);
        prefix.put_u8(b'/');
        let end = end_of_prefix(&prefix).map_or(Bytes::from_static(b"\0"), Bytes::from);
        Self::newest(prefix.freeze(), end)
    }

    /// Begin and end of the part's keys in the sorted `keys`.
    fn place_in(&self, keys: &[(Bytes, u64)]) -> (usize, usize) {
        let begin = keys.partition_point(|(key, _)| *key < self.key);
        let end = match &self.range_end[..] {
            b"" => keys.partition_point(|(key, _)| *key <= self.key),
            b"\0" => keys.len(),
            end => keys.partition_point(|(key, _)| &key[..] < end),
        };
        (begin, end.max(begin))
    }
}

impl AnswerParts {
    /// The parts of a message checked before; `None` if etcd reads no pairs for it. The keys of a lease,
    /// whose values nobody reads, are no part: they cannot be read in pages.
    #[must_use]
    pub fn of(body: MessageId, message: &[u8]) -> Option<Self> {
        let part = match body {
            MessageId::RangeRequest => AnswerPart::of_range(RangeRequest::decode(message).ok()?)?,
            MessageId::DeleteRangeRequest => {
                AnswerPart::of_deletion(DeleteRangeRequest::decode(message).ok()?)?
            }
            MessageId::PutRequest => {
                let PutRequest { key, prev_kv, .. } = PutRequest::decode(message).ok()?;
                prev_kv.then(|| AnswerPart::newest(key, Bytes::new()))?
            }
            MessageId::LockRequest => AnswerPart::of_queue(&LockRequest::decode(message).ok()?.name),
            MessageId::CampaignRequest => AnswerPart::of_queue(&CampaignRequest::decode(message).ok()?.name),
            MessageId::LeaderRequest => AnswerPart::of_queue(&LeaderRequest::decode(message).ok()?.name),
            MessageId::TxnRequest => return Self::of_txn(message),
            _ => return None,
        };
        Some(Self { parts: HashMap::from([(part, PartUse { times: 1, written: 0 })]) })
    }

    /// A Txn that cannot be read to its end is taken for one that reads everything.
    fn of_txn(txn: &[u8]) -> Option<Self> {
        let (mut parts, mut puts) = (HashMap::<AnswerPart, PartUse>::new(), Vec::new());
        for part in TxnParts::new(txn) {
            let read = match part.map(|part| read_by(part, &mut puts)) {
                Ok(Ok(read)) => read,
                Ok(Err(_)) | Err(_) => {
                    Some(AnswerPart::newest(Bytes::from_static(b"\0"), Bytes::from_static(b"\0")))
                }
            };
            if let Some(read) = read {
                parts.entry(read).or_default().times += 1;
            }
        }
        note_writes(&mut parts, puts);
        (!parts.is_empty()).then_some(Self { parts })
    }

    /// Each different part.
    pub fn each(&self) -> impl Iterator<Item = (&AnswerPart, PartUse)> {
        self.parts.iter().map(|(part, used)| (part, *used))
    }

    /// The sum, with the bytes of a part given by `size_of`.
    #[must_use]
    pub fn sum(&self, size_of: impl Fn(&AnswerPart) -> u64) -> u64 {
        self.each().fold(0, |sum, (part, used)| used.bytes(size_of(part)).saturating_add(sum))
    }
}

impl PartUse {
    /// The bytes that etcd gathers for a part of `size` bytes.
    #[must_use]
    pub fn bytes(self, size: u64) -> u64 {
        size.saturating_add(self.written).saturating_mul(self.times)
    }
}

/// The range that a part of a Txn reads. A Put is added to `puts`.
fn read_by(
    part: TxnPart<'_>,
    puts: &mut Vec<(Bytes, u64)>,
) -> Result<Option<AnswerPart>, prost::DecodeError> {
    Ok(match part {
        TxnPart::Compare(compare) => {
            let Compare { key, range_end, .. } = Compare::decode(compare)?;
            Some(AnswerPart::newest(key, range_end))
        }
        TxnPart::Range(range) => AnswerPart::of_range(RangeRequest::decode(range)?),
        TxnPart::DeleteRange(deletion) => AnswerPart::of_deletion(DeleteRangeRequest::decode(deletion)?),
        TxnPart::Put(put) => {
            let PutRequest { key, value, prev_kv, .. } = PutRequest::decode(put)?;
            puts.push((key.clone(), (key.len() + value.len()) as u64));
            prev_kv.then(|| AnswerPart::newest(key, Bytes::new()))
        }
        TxnPart::UnknownOperation | TxnPart::UnknownField => None,
    })
}

/// Notes for each part the bytes that the Txn may have written into it: of several writes of a key, all.
fn note_writes(parts: &mut HashMap<AnswerPart, PartUse>, mut puts: Vec<(Bytes, u64)>) {
    puts.sort_unstable();
    // The bytes of all puts before each.
    let sums = puts.iter().scan(0, |sum, (_, bytes)| {
        *sum += bytes;
        Some(*sum)
    });
    let sums: Vec<u64> = std::iter::once(0).chain(sums).collect();
    for (part, used) in parts {
        let (begin, end) = part.place_in(&puts);
        used.written = sums[end] - sums[begin];
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pb::etcdserverpb::request_op::Request;
    use crate::pb::etcdserverpb::{RequestOp, TxnRequest};

    fn operation(request: Request) -> RequestOp {
        RequestOp { request: Some(request) }
    }

    fn range(key: &'static str, limit: i64) -> RangeRequest {
        RangeRequest { key: key.into(), range_end: "z".into(), limit, ..RangeRequest::default() }
    }

    /// What is gathered, with a part of `n` keys being `n` bytes, and one of all keys 1000.
    fn gathered(body: MessageId, message: &[u8]) -> Option<u64> {
        AnswerParts::of(body, message).map(|parts| parts.sum(|part| part.most_keys.unwrap_or(1000)))
    }

    fn of_range(range: &RangeRequest) -> Option<u64> {
        gathered(MessageId::RangeRequest, &range.encode_to_vec())
    }

    fn of_txn(txn: &TxnRequest) -> Option<u64> {
        gathered(MessageId::TxnRequest, &txn.encode_to_vec())
    }

    #[test]
    fn a_range_gathers_all_pairs_where_its_limit_applies_to_what_was_read() {
        let all = range("a", 0);
        assert_eq!(of_range(&all), Some(1000));
        assert_eq!(of_range(&RangeRequest { range_end: Bytes::new(), ..all.clone() }), Some(1));
        assert_eq!(of_range(&RangeRequest { count_only: true, ..all.clone() }), None);
        assert_eq!(of_range(&RangeRequest { keys_only: true, ..all }), Some(1000));
        let ten = range("a", 10);
        assert_eq!(of_range(&ten), Some(11), "one more tells `more`");
        assert_eq!(of_range(&RangeRequest { limit: -1, ..ten.clone() }), Some(1000));
        assert_eq!(of_range(&RangeRequest { sort_order: 1, ..ten.clone() }), Some(1000));
        assert_eq!(of_range(&RangeRequest { sort_order: 2, sort_target: 3, ..ten.clone() }), Some(1000));
        assert_eq!(of_range(&RangeRequest { sort_target: 3, ..ten.clone() }), Some(11), "sorted afterwards");
        let bounded: [fn(&mut RangeRequest); 4] = [
            |range| range.min_mod_revision = 1,
            |range| range.max_mod_revision = 1,
            |range| range.min_create_revision = 1,
            |range| range.max_create_revision = 1,
        ];
        for bound in bounded {
            let mut range = ten.clone();
            bound(&mut range);
            assert_eq!(of_range(&range), Some(1000), "{range:?}");
        }
    }

    #[test]
    fn writes_count_where_they_return_what_was_there_and_queues_by_their_prefix() {
        let deletion = |range_end: &'static str, prev_kv| {
            let request = DeleteRangeRequest { key: "a".into(), range_end: range_end.into(), prev_kv };
            gathered(MessageId::DeleteRangeRequest, &request.encode_to_vec())
        };
        assert_eq!([deletion("", true), deletion("z", true)], [Some(1), Some(1000)]);
        assert_eq!([deletion("", false), deletion("z", false)], [None, None]);
        let put = |prev_kv| {
            let request = PutRequest { key: "a".into(), prev_kv, ..PutRequest::default() };
            gathered(MessageId::PutRequest, &request.encode_to_vec())
        };
        assert_eq!([put(true), put(false)], [Some(1), None]);
        assert_eq!(gathered(MessageId::LeaseGrantRequest, b""), None);
        let lock = LockRequest { name: "n".into(), lease: 1 }.encode_to_vec();
        let campaign = CampaignRequest { name: "n".into(), ..CampaignRequest::default() }.encode_to_vec();
        let leader = LeaderRequest { name: "n".into() }.encode_to_vec();
        for (body, message) in [
            (MessageId::LockRequest, lock),
            (MessageId::CampaignRequest, campaign),
            (MessageId::LeaderRequest, leader),
        ] {
            let parts = AnswerParts::of(body, &message).expect("a part");
            let (part, _) = parts.each().next().expect("one");
            assert_eq!((&part.key[..], &part.range_end[..], part.most_keys), (&b"n/"[..], &b"n0"[..], None));
        }
    }

    #[test]
    fn of_a_txn_compares_and_branches_count_together_at_each_depth_and_equal_parts_are_one() {
        let read = |limit: i64| operation(Request::RequestRange(range("a", limit - 1)));
        let txn = |success, failure| TxnRequest { success, failure, ..TxnRequest::default() };
        assert_eq!(of_txn(&txn(vec![], vec![])), None);
        assert_eq!(of_txn(&txn(vec![read(3), read(4)], vec![read(5)])), Some(12));
        let nested = operation(Request::RequestTxn(txn(vec![read(2)], vec![read(20), read(20)])));
        let mut whole = txn(vec![], vec![read(5), nested]);
        assert_eq!(of_txn(&whole), Some(47));
        let parts = AnswerParts::of(MessageId::TxnRequest, &whole.encode_to_vec()).expect("parts");
        assert_eq!(parts.each().count(), 3);
        let compare = |range_end: &'static str| Compare {
            key: "a".into(),
            range_end: range_end.into(),
            ..Compare::default()
        };
        whole.compare = vec![compare(""), compare("z")];
        assert_eq!(of_txn(&whole), Some(1048));
        let deep = (0..500).fold(whole, |inner, _| txn(vec![operation(Request::RequestTxn(inner))], vec![]));
        assert_eq!(of_txn(&deep), Some(1048), "deeper than prost reads");
        assert_eq!(gathered(MessageId::TxnRequest, b"\x12\x02\x0a"), Some(1000), "unreadable");
    }

    #[test]
    fn what_a_txn_writes_counts_for_each_of_its_reads_of_it() {
        let put = |key: &'static str, bytes: usize| {
            let put = PutRequest { key: key.into(), value: vec![7; bytes].into(), ..PutRequest::default() };
            operation(Request::RequestPut(put))
        };
        let one = |key: &'static str| {
            operation(Request::RequestRange(RangeRequest { key: key.into(), ..RangeRequest::default() }))
        };
        let txn = |success| TxnRequest { success, ..TxnRequest::default() };
        assert_eq!(of_txn(&txn(vec![put("b", 99), one("b"), one("b"), one("c")])), Some(2 * 101 + 1));
        let all = operation(Request::RequestRange(range("b", 0)));
        assert_eq!(of_txn(&txn(vec![put("a", 9), put("b", 99), put("c", 49), all])), Some(1000 + 150));
    }
}
