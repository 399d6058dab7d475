//! The measured operations, and the values that client and member agree on.

use keyward::pb::etcdserverpb::{PutRequest, PutResponse, RangeRequest, RangeResponse};
use keyward::pb::mvccpb::KeyValue;
use prost::Message as _;

use crate::canned_member::header;

pub(crate) const CLUSTER: u64 = 0xc1;
pub(crate) const MEMBER: u64 = 1;
pub(crate) const USER: &str = "alice";
pub(crate) const PASSWORD: &str = "right";
pub(crate) const KEY: &str = "/registry/services/endpoints/default/kubernetes";
/// Bytes of a value.
pub(crate) const VALUE: usize = 256;
/// Bytes of a large value.
const LARGE_VALUE: usize = 64 * 1024;
/// Calls, or watches, at the same time on the one connection.
pub(crate) const AT_ONCE: usize = 8;
/// The revision at the beginning. Later revisions have as many bytes.
pub(crate) const FIRST_REVISION: i64 = 3_000_000;

/// A measured operation.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Workload {
    /// A Put, [`AT_ONCE`] at a time.
    Put,
    /// A linearizable Range of one key, [`AT_ONCE`] at a time.
    Range,
    /// A linearizable Range of one key with a large value, [`AT_ONCE`] at a time.
    LargeRange,
    /// An event delivered to a watch; [`AT_ONCE`] watches of the key, each on a stream of its own.
    Watch,
    /// An event delivered to a watch; [`AT_ONCE`] watches of the key, all on one stream.
    SharedWatch,
}

impl Workload {
    pub(crate) fn named(name: &str) -> Option<Self> {
        match name {
            "put" => Some(Self::Put),
            "range" => Some(Self::Range),
            "large_range" => Some(Self::LargeRange),
            "watch" => Some(Self::Watch),
            "shared_watch" => Some(Self::SharedWatch),
            _ => None,
        }
    }

    /// Path, request and answer of a unary call; empty for watches.
    pub(crate) fn call(self) -> (&'static str, Vec<u8>, Vec<u8>) {
        let header = Some(header(FIRST_REVISION));
        let length = if self == Self::LargeRange { LARGE_VALUE } else { VALUE };
        let value = || vec![b'v'; length].into();
        match self {
            Self::Put => {
                let request = PutRequest { key: KEY.into(), value: value(), ..PutRequest::default() };
                let answer = PutResponse { header, prev_kv: None };
                ("/etcdserverpb.KV/Put", request.encode_to_vec(), answer.encode_to_vec())
            }
            Self::Range | Self::LargeRange => {
                let request = RangeRequest { key: KEY.into(), ..RangeRequest::default() };
                let kv = KeyValue {
                    key: KEY.into(),
                    value: value(),
                    create_revision: 1,
                    mod_revision: FIRST_REVISION,
                    version: 7,
                    lease: 0,
                };
                let answer = RangeResponse { header, kvs: vec![kv], more: false, count: 1 };
                ("/etcdserverpb.KV/Range", request.encode_to_vec(), answer.encode_to_vec())
            }
            Self::Watch | Self::SharedWatch => ("", Vec::new(), Vec::new()),
        }
    }

    /// Watch streams, and watches on each stream.
    pub(crate) fn watches(self) -> (usize, usize) {
        match self {
            Self::Put | Self::Range | Self::LargeRange => (0, 0),
            Self::Watch => (AT_ONCE, 1),
            Self::SharedWatch => (1, AT_ONCE),
        }
    }
}
