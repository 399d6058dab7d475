//! The election leaders already reported to an observer. Pure.
//!
//! Owns: whether a leader reported by a member is news to the observer. Must not know: streams, members.
//! Invariant: each proclamation is reported once, in etcd's order: leaders by create revision (the oldest key
//! leads), a leader's proclamations by mod revision. The mod revision alone is no order: a candidate in the
//! queue may proclaim too, and become leader later with the same value.

use bytes::Bytes;
use prost::Message as _;

use keyward_etcd::pb::v3electionpb::LeaderResponse;

/// The last leader reported, by create and mod revision.
#[derive(Debug, Default)]
pub struct ObservedLeaders {
    last: Option<(i64, i64)>,
}

/// The meaning of a LeaderResponse for the observer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeaderNews {
    /// A new proclamation, to be reported.
    News,
    /// A proclamation already reported.
    Known,
    /// A proclamation older than the last reported: the election has another history.
    Older,
    /// The message cannot be decoded or names no leader.
    Unreadable,
}

impl ObservedLeaders {
    /// True if the observer knows this proclamation or a newer proclamation, by create and mod revision.
    #[must_use]
    pub fn knows(&self, proclaimed: (i64, i64)) -> bool {
        self.last.is_some_and(|last| proclaimed <= last)
    }

    /// Compares a member's message with the last proclamation reported; a new proclamation counts as reported
    /// from here on.
    pub fn told(&mut self, message: &Bytes) -> LeaderNews {
        let Some(leader) = LeaderResponse::decode(message.clone()).ok().and_then(|answer| answer.kv) else {
            return LeaderNews::Unreadable;
        };
        let now = (leader.create_revision, leader.mod_revision);
        match self.last {
            Some(last) if now == last => LeaderNews::Known,
            Some(last) if now < last => LeaderNews::Older,
            _ => {
                self.last = Some(now);
                LeaderNews::News
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use keyward_etcd::pb::mvccpb::KeyValue;

    fn leader(create_revision: i64, mod_revision: i64) -> Bytes {
        let kv = KeyValue { create_revision, mod_revision, ..KeyValue::default() };
        LeaderResponse { header: None, kv: Some(kv) }.encode_to_vec().into()
    }

    /// The order seen from real servers of 3.4 to 3.7: the second leader had proclaimed at 37 while the first
    /// led.
    #[test]
    fn leaders_come_by_create_revision_and_then_by_mod_revision() {
        let mut leaders = ObservedLeaders::default();
        for (created, modified) in [(34, 34), (34, 36), (34, 38), (35, 37), (40, 40)] {
            assert_eq!(leaders.told(&leader(created, modified)), LeaderNews::News);
            assert_eq!(leaders.told(&leader(created, modified)), LeaderNews::Known);
        }
        assert_eq!(leaders.told(&leader(35, 99)), LeaderNews::Older);
        assert_eq!(leaders.told(&leader(40, 39)), LeaderNews::Older);
        assert_eq!(leaders.told(&leader(40, 40)), LeaderNews::Known, "what is refused changes nothing");
        assert!(leaders.knows((40, 40)) && leaders.knows((35, 99)) && !leaders.knows((40, 41)));
        assert!(!ObservedLeaders::default().knows((1, 1)));
    }

    #[test]
    fn what_names_no_leader_is_no_news() {
        let mut leaders = ObservedLeaders::default();
        assert_eq!(leaders.told(&Bytes::new()), LeaderNews::Unreadable);
        assert_eq!(leaders.told(&Bytes::from_static(b"\xff")), LeaderNews::Unreadable);
    }
}
