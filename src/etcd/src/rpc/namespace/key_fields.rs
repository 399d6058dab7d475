//! The fields with keys and leases in etcd's requests and answers.
//!
//! Owns: the table of fields. Must not know: prefixes, ids of leases. Invariant: a message listed as a set of
//! operations has no unknown fields, since an unknown operation may name any key.

use crate::rpc::method::Method;
use crate::rpc::schema::MessageId;

/// A message with keys or leases, or with messages with keys or leases.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum KeyedMessage {
    /// RangeRequest, DeleteRangeRequest.
    KeyAndEnd,
    /// UnlockRequest.
    Key,
    Put,
    Txn,
    Op,
    Compare,
    WatchRequest,
    WatchCreate,
    /// LeaderRequest: the queue's keys are `name/`.
    Queue,
    /// LockRequest, CampaignRequest.
    QueueOfLease,
    /// LeaseRevokeRequest, LeaseKeepAliveRequest, LeaseTimeToLiveRequest.
    LeaseId,
    /// ProclaimRequest, ResignRequest.
    LeaderHolder,
    LeaderKey,
    KeyValue,
    RangeAnswer,
    PutAnswer,
    DeleteAnswer,
    TxnAnswer,
    OpAnswer,
    WatchAnswer,
    Event,
    LeaseKeysAnswer,
    LeasesAnswer,
    LockAnswer,
    CampaignAnswer,
    LeaderAnswer,
}

/// The meaning of a field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FieldRole {
    /// Crosses as received.
    Plain,
    /// A key.
    Key(EmptyKey),
    /// The end of a range.
    RangeEnd,
    /// One of many keys: keys outside of the namespace are left out of an answer.
    ListedKey,
    /// A message with keys or leases.
    Message(KeyedMessage),
    /// A lease.
    Lease,
    /// One of many messages with a lease in field 1: leases outside of the namespace are left out of an
    /// answer.
    ListedLease,
    /// An operation unknown here.
    Unknown,
}

/// The meaning of an empty key in a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EmptyKey {
    /// etcd refuses the request.
    Refused,
    /// The first possible key.
    First,
    /// A name, to which etcd appends.
    Name,
}

use EmptyKey::{First, Name, Refused};
use FieldRole::{Key, Lease, ListedKey, ListedLease, Message, Plain, RangeEnd, Unknown};

impl KeyedMessage {
    /// The message of a request; `None` for a request without keys and without a lease of before. The id of a
    /// LeaseGrantRequest is drawn (`lease_ids`).
    pub(super) fn of_request(request: MessageId) -> Option<Self> {
        Some(match request {
            MessageId::RangeRequest | MessageId::DeleteRangeRequest => Self::KeyAndEnd,
            MessageId::PutRequest => Self::Put,
            MessageId::UnlockRequest => Self::Key,
            MessageId::TxnRequest => Self::Txn,
            MessageId::WatchRequest => Self::WatchRequest,
            MessageId::LeaderRequest => Self::Queue,
            MessageId::LockRequest | MessageId::CampaignRequest => Self::QueueOfLease,
            MessageId::LeaseRevokeRequest
            | MessageId::LeaseKeepAliveRequest
            | MessageId::LeaseTimeToLiveRequest => Self::LeaseId,
            MessageId::ProclaimRequest | MessageId::ResignRequest => Self::LeaderHolder,
            _ => return None,
        })
    }

    /// The message of an answer; `None` for an answer without keys.
    pub(super) fn of_answer(method: &Method) -> Option<Self> {
        Some(match method.body {
            MessageId::RangeRequest => Self::RangeAnswer,
            MessageId::PutRequest => Self::PutAnswer,
            MessageId::DeleteRangeRequest => Self::DeleteAnswer,
            MessageId::TxnRequest => Self::TxnAnswer,
            MessageId::WatchRequest => Self::WatchAnswer,
            MessageId::LeaseTimeToLiveRequest => Self::LeaseKeysAnswer,
            MessageId::LeaseLeasesRequest => Self::LeasesAnswer,
            MessageId::LockRequest => Self::LockAnswer,
            MessageId::CampaignRequest => Self::CampaignAnswer,
            MessageId::LeaderRequest => Self::LeaderAnswer,
            _ => return None,
        })
    }

    /// The role of the field `number`.
    pub(super) fn role(self, number: u32) -> FieldRole {
        match (self, number) {
            (Self::KeyAndEnd | Self::Key | Self::Put, 1) | (Self::Compare, 3) => Key(Refused),
            (Self::Put, 3) | (Self::QueueOfLease, 2) | (Self::LeaderKey, 4) | (Self::LeaseId, 1) => Lease,
            (Self::KeyAndEnd | Self::WatchCreate, 2) | (Self::Compare, 64) => RangeEnd,
            (Self::Txn, 1) => Message(Self::Compare),
            (Self::Txn, 2 | 3) => Message(Self::Op),
            (Self::Op, 1 | 3) => Message(Self::KeyAndEnd),
            (Self::Op, 2) => Message(Self::Put),
            (Self::Op, 4) => Message(Self::Txn),
            (Self::WatchRequest, 1) => Message(Self::WatchCreate),
            // Cancel and progress name no key.
            (Self::WatchRequest, 2 | 3) => Plain,
            (Self::WatchCreate, 1) => Key(First),
            (Self::Queue | Self::QueueOfLease | Self::LeaderKey, 1) => Key(Name),
            (Self::LeaderHolder, 1) | (Self::CampaignAnswer, 2) => Message(Self::LeaderKey),
            (Self::LeaderKey, 2) | (Self::KeyValue, 1) | (Self::LockAnswer, 2) => Key(Refused),
            (Self::RangeAnswer, 2) | (Self::PutAnswer, 2) | (Self::DeleteAnswer, 3) => {
                Message(Self::KeyValue)
            }
            (Self::TxnAnswer, 3) => Message(Self::OpAnswer),
            (Self::OpAnswer, 1) => Message(Self::RangeAnswer),
            (Self::OpAnswer, 2) => Message(Self::PutAnswer),
            (Self::OpAnswer, 3) => Message(Self::DeleteAnswer),
            (Self::OpAnswer, 4) => Message(Self::TxnAnswer),
            (Self::WatchAnswer, 11) => Message(Self::Event),
            (Self::Event, 2 | 3) | (Self::LeaderAnswer, 2) => Message(Self::KeyValue),
            (Self::LeaseKeysAnswer, 5) => ListedKey,
            (Self::LeasesAnswer, 2) => ListedLease,
            (Self::Txn | Self::Op | Self::OpAnswer | Self::WatchRequest, _) => Unknown,
            _ => Plain,
        }
    }

    /// The key that every message of this kind has, or needs: its number and the meaning of its absence.
    pub(super) fn required_key(self) -> Option<(u32, EmptyKey)> {
        match self {
            Self::KeyAndEnd | Self::Key | Self::Put | Self::KeyValue => Some((1, Refused)),
            Self::Compare => Some((3, Refused)),
            Self::WatchCreate => Some((1, First)),
            Self::Queue | Self::QueueOfLease => Some((1, Name)),
            Self::LeaderKey | Self::LockAnswer => Some((2, Refused)),
            _ => None,
        }
    }
}
