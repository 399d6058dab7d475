//! Which leaders of an election an observer was told of. Pure.
//!
//! Owns: what a leader that a member tells is to the observer. Must not know: streams, members.
//! Invariant: each proclamation is told once, and in etcd's order: leaders follow each other by create revision (the
//! oldest key leads), the proclamations of one by mod revision. The mod revision alone is no order: who waits in line may
//! proclaim too, and leads later with what it said then.

use bytes::Bytes;
use prost::Message as _;

use crate::pb::v3electionpb::LeaderResponse;

/// What was told last.
#[derive(Debug, Default)]
pub struct Leaders {
    last: Option<(i64, i64)>,
}

/// What to do with a LeaderResponse.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Told {
    /// It is news.
    News,
    /// The observer knows it.
    Known,
    /// It is older than what the observer knows: this is not the same history.
    Older,
    /// It cannot be read.
    Unreadable,
}

impl Leaders {
    /// Whether the observer was told of this proclamation or a newer one, by create and mod revision.
    #[must_use]
    pub fn knows(&self, proclaimed: (i64, i64)) -> bool {
        self.last.is_some_and(|last| proclaimed <= last)
    }

    /// A member tells of a leader; where it is news, it counts as told.
    pub fn told(&mut self, message: &Bytes) -> Told {
        let Some(leader) = LeaderResponse::decode(message.clone()).ok().and_then(|answer| answer.kv) else {
            return Told::Unreadable;
        };
        let now = (leader.create_revision, leader.mod_revision);
        match self.last {
            Some(last) if now == last => Told::Known,
            Some(last) if now < last => Told::Older,
            _ => {
                self.last = Some(now);
                Told::News
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pb::mvccpb::KeyValue;

    fn leader(create_revision: i64, mod_revision: i64) -> Bytes {
        let kv = KeyValue { create_revision, mod_revision, ..KeyValue::default() };
        LeaderResponse { header: None, kv: Some(kv) }.encode_to_vec().into()
    }

    /// As real servers of 3.4 to 3.7 told it: the second leader had proclaimed at 37 while the first one led.
    #[test]
    fn leaders_come_by_create_revision_and_then_by_mod_revision() {
        let mut leaders = Leaders::default();
        for (created, modified) in [(34, 34), (34, 36), (34, 38), (35, 37), (40, 40)] {
            assert_eq!(leaders.told(&leader(created, modified)), Told::News);
            assert_eq!(leaders.told(&leader(created, modified)), Told::Known);
        }
        assert_eq!(leaders.told(&leader(35, 99)), Told::Older);
        assert_eq!(leaders.told(&leader(40, 39)), Told::Older);
        assert_eq!(leaders.told(&leader(40, 40)), Told::Known, "what is refused changes nothing");
        assert!(leaders.knows((40, 40)) && leaders.knows((35, 99)) && !leaders.knows((40, 41)));
        assert!(!Leaders::default().knows((1, 1)));
    }

    #[test]
    fn what_names_no_leader_is_no_news() {
        let mut leaders = Leaders::default();
        assert_eq!(leaders.told(&Bytes::new()), Told::Unreadable);
        assert_eq!(leaders.told(&Bytes::from_static(b"\xff")), Told::Unreadable);
    }
}
