//! The size of an answer, measured before the answer is asked for.
//!
//! Owns: reading a range in pages small enough for every member, and their sum. Must not know: the limit's
//! source, the request.
//! Invariants: what is asked is a part of what the client asks for, with the client's identity, so etcd
//! judges the rights; no page has more keys than could be within the limit, whatever their sizes, so that
//! measuring costs a member no more memory than a call within the limit; nothing read is kept, or told to
//! anybody.

use bytes::{BufMut as _, Bytes, BytesMut};
use prost::Message as _;

use crate::members::choose::MemberTarget;
use crate::pb::etcdserverpb::{RangeRequest, RangeResponse};
use crate::refusal::Refusal;
use crate::rpc::answer_parts::AnswerPart;
use crate::upstream::permission_probe::{PermissionProbe, Unproved};

const RANGE: &str = "/etcdserverpb.KV/Range";
/// Bytes of a page aimed at.
const PAGE: usize = 256 * 1024;
/// Keys of the first page, each of which may be as large as a request.
const FIRST_PAGE: u64 = 4;
/// Keys of the largest page.
const LARGEST_PAGE: u64 = 10_000;
/// The factor by which a page may have more keys than the page before.
const GROWTH: u64 = 8;

/// The size of what etcd gathers for `part`, or a larger number than `most` as soon as it is larger. `None`
/// where etcd refuses: the request itself has the refusal as its answer. Values have up to `largest_value`
/// bytes; a larger one counts as so many. Holds a page of [`held`] bytes.
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
    let largest = held(largest_value);
    let largest_page = (most / (largest_value as u64).max(1)).clamp(1, LARGEST_PAGE);
    let (mut size, mut left) = (0, part.most_keys.unwrap_or(u64::MAX));
    let mut keys = FIRST_PAGE.min(largest_page);
    while left > 0 && size <= most {
        range.limit = i64::try_from(keys.min(left)).unwrap_or(i64::MAX);
        let asked = range.encode_to_vec();
        let page = match probe.ask_at_length(RANGE, &asked, MemberTarget::Any, largest).await {
            Ok(page) => page,
            Err(Unproved::Denied(_)) => return Ok(None),
            Err(Unproved::Unknown(refusal)) => return Err(refusal),
            Err(Unproved::TooLarge) if range.limit > 1 => {
                keys = keys.min(left).div_ceil(GROWTH);
                continue;
            }
            Err(Unproved::TooLarge) if !range.keys_only => {
                // The value is counted; its key is the way behind it.
                size += largest as u64;
                range.keys_only = true;
                continue;
            }
            Err(Unproved::TooLarge) => return Err(Refusal::UNREADABLE_ANSWER),
        };
        range.keys_only = false;
        let bytes = page.len() as u64;
        size += bytes;
        let Ok(page) = RangeResponse::decode(page) else { return Err(Refusal::UNREADABLE_ANSWER) };
        let Some(last) = page.kvs.last().filter(|_| page.more) else { break };
        let read = page.kvs.len() as u64;
        left = left.saturating_sub(read);
        keys = (read * PAGE as u64 / bytes.max(1)).clamp(1, (read * GROWTH).min(largest_page));
        range.key = behind(&last.key);
    }
    Ok(Some(size))
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
