//! The size of an answer, measured before the answer is asked for.
//!
//! Owns: reading a range in pages small enough for every member, and their sum. Must not know: the limit's
//! source, the request.
//! Invariants: what is asked is a part of what the client asks for, with the client's identity, so etcd
//! judges the rights; no page has more keys than could be within the limit, or within 32 MiB, whatever
//! their sizes, so that measuring costs a member no more memory than a call within the limit; nothing read is
//! kept, or told to anybody.
//!
//! etcd counts all keys of a range for each page, so pages to the end of a large range would cost the square
//! of its keys: where many keys follow, pages end where the keys of the last page's common prefix end.

use bytes::{BufMut as _, Bytes, BytesMut};
use prost::Message as _;
use prost::encoding::message::encoded_len;

use crate::permission_probe::{PermissionProbe, Unproved};
use keyward_cluster::choose::MemberTarget;
use keyward_etcd::pb::etcdserverpb::{RangeRequest, RangeResponse};
use keyward_etcd::refusal::Refusal;
use keyward_etcd::rpc::answer_parts::AnswerPart;
use keyward_etcd::rpc::key_range::end_of_prefix;

const RANGE: &str = "/etcdserverpb.KV/Range";
/// Bytes of a page aimed at.
const PAGE: usize = 256 * 1024;
/// Bytes that any member can gather at once.
const HARMLESS: u64 = 32 << 20;
/// Keys of the first page, each of which may be as large as a request.
const FIRST_PAGE: u64 = 4;
/// Keys of the largest page.
const LARGEST_PAGE: u64 = 10_000;
/// The factor by which a page may have more keys than the page before.
const GROWTH: u64 = 8;
/// The factor by which the keys that etcd counts for a page may be more than those of the page.
const COUNTED: u64 = 16;
/// The field of a RangeResponse with the pairs.
const PAIRS: u32 = 2;

/// The size of the pairs that etcd gathers for `part`, or a larger number than `most` as soon as it is
/// larger. `None` where etcd refuses: the request itself has the refusal as its answer. Values have up to
/// `largest_value` bytes; a part with a larger one counts as larger than any limit. Holds a page of
/// [`held`] bytes.
///
/// Cancel-safe.
///
/// # Errors
/// No member answered.
pub async fn measure(
    probe: &PermissionProbe,
    part: &AnswerPart,
    most: u64,
    largest_value: usize,
) -> Result<Option<u64>, Refusal> {
    let mut range = RangeRequest {
        key: part.key.clone(),
        range_end: part.range_end.clone(),
        revision: part.revision,
        serializable: part.serializable,
        ..RangeRequest::default()
    };
    let largest_page = (most.max(HARMLESS) / (largest_value as u64).max(1)).clamp(1, LARGEST_PAGE);
    let (mut size, mut left) = (0, part.most_keys.unwrap_or(u64::MAX));
    let mut keys = FIRST_PAGE.min(largest_page);
    // The first page is of the whole range: etcd judges the rights on all of it.
    let mut end: Option<Bytes> = None;
    // Bytes by which the prefix behind a prefix is shorter: twice as many each time, of keys that may be
    // long.
    let mut shorter_by = 1;
    while left > 0 && size <= most {
        range.limit = i64::try_from(keys.min(left)).unwrap_or(i64::MAX);
        let asked = range.encode_to_vec();
        let page = match probe.ask_at_length(RANGE, &asked, MemberTarget::Any, held(largest_value)).await {
            Ok(page) => page,
            Err(Unproved::Denied(_)) => return Ok(None),
            Err(Unproved::Unknown(refusal)) => return Err(refusal),
            Err(Unproved::TooLarge) if range.limit > 1 => {
                keys = keys.min(left).div_ceil(GROWTH);
                continue;
            }
            Err(Unproved::TooLarge) => return Ok(Some(u64::MAX)),
        };
        let Ok(page) = RangeResponse::decode(page) else { return Err(Refusal::UNREADABLE_ANSWER) };
        let bytes = page.kvs.iter().map(|pair| encoded_len(PAIRS, pair) as u64).sum::<u64>();
        let read = page.kvs.len() as u64;
        size += bytes;
        left = left.saturating_sub(read);
        if read > 0 {
            keys = (read * PAGE as u64 / bytes.max(1)).clamp(1, (read * GROWTH).min(largest_page));
        }
        match page.kvs.first().zip(page.kvs.last()).filter(|_| page.more) {
            Some((first, last)) => {
                let counted = u64::try_from(page.count).unwrap_or_default();
                if counted > read * COUNTED {
                    end = end_inside(common_prefix(&first.key, &last.key), &part.range_end).or(end);
                }
                range.key = behind(&last.key);
                shorter_by = 1;
            }
            None => {
                let Some(begin) = end else { break };
                let around = &begin[..begin.len().saturating_sub(shorter_by)];
                end = end_inside(around, &part.range_end);
                range.key = begin;
                shorter_by *= 2;
            }
        }
        range.range_end = end.clone().unwrap_or_else(|| part.range_end.clone());
    }
    Ok(Some(size))
}

/// The end of the keys with `prefix`; `None` if these go on to the end of the range.
fn end_inside(prefix: &[u8], range_end: &[u8]) -> Option<Bytes> {
    let end = end_of_prefix(prefix)?;
    let is_inside = range_end == b"\0" || &end[..] < range_end;
    is_inside.then(|| end.into())
}

/// The common prefix of two keys.
fn common_prefix<'k>(one: &'k [u8], other: &[u8]) -> &'k [u8] {
    let length = one.iter().zip(other).take_while(|(one, other)| one == other).count();
    &one[..length]
}

/// Bytes held at most while an answer is measured, where values have up to this many.
#[must_use]
pub fn held(largest_value: usize) -> usize {
    largest_value.saturating_add(PAGE)
}

/// The first key behind `key`.
fn behind(key: &[u8]) -> Bytes {
    let mut next = BytesMut::with_capacity(key.len() + 1);
    next.put_slice(key);
    next.put_u8(0);
    next.freeze()
}
