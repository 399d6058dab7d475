//! The length of a client connection's turns: short beside other connections, longer for a connection that
//! the shard serves alone.
//!
//! Owns: the count of the shard's turns. Must not know: a turn's work. A short turn lets others go on soon; a
//! long turn sends more with one system call, to the client and to the members.
//! Invariant: after a turn of another connection, `CAREFUL` turns are short.

use std::cell::Cell;
use std::rc::Rc;

use crate::client_trust::VerificationTurns;

/// A turn beside other connections: streams polled, and requests begun.
pub(super) const SHORT: usize = 8;
/// A turn of a connection that is served alone. A call of another connection waits for one such turn: 32
/// would save 5 % of a call's cost, and delay others by half as much again (`benches/peers/run --rows
/// fairness`).
const LONG: usize = 16;
/// Short turns after a turn of another connection. A call on its way through Keyward waits for some dozen
/// turns of a busy connection, between few turns of its own connection.
const CAREFUL: u8 = 32;

/// The turns of a shard's connections. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct ShardTurns {
    /// The number of turns that the connections have had.
    count: Rc<Cell<u64>>,
    /// The turns in which certificates of open connections are verified.
    pub(super) verifications: VerificationTurns,
}

/// The length of one connection's turns.
pub(super) struct TurnLength {
    shard: ShardTurns,
    /// The shard's count at the connection's last turn.
    last: u64,
    /// Short turns until the next long one.
    careful: u8,
}

impl TurnLength {
    pub(super) fn new(shard: ShardTurns) -> Self {
        Self { last: shard.count.get(), shard, careful: CAREFUL }
    }

    /// Begins a turn. Returns its length.
    pub(super) fn begin(&mut self) -> usize {
        let turn = self.shard.count.get().wrapping_add(1);
        let is_alone = turn == self.last.wrapping_add(1);
        self.shard.count.set(turn);
        self.last = turn;
        self.careful = if is_alone { self.careful.saturating_sub(1) } else { CAREFUL };
        if self.careful == 0 { LONG } else { SHORT }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_turn_is_long_only_some_turns_after_the_last_turn_of_another_connection() {
        let shard = ShardTurns::default();
        let (mut greedy, mut polite) = (TurnLength::new(shard.clone()), TurnLength::new(shard));
        let short = usize::from(CAREFUL) - 1;
        for _ in 0..2 {
            assert_eq!(polite.begin(), SHORT);
            let lengths: Vec<_> = (0..short + 3).map(|_| greedy.begin()).collect();
            assert_eq!(lengths.iter().filter(|length| **length == SHORT).count(), short + 1);
            assert_eq!(lengths[short + 1..], [LONG; 2]);
        }
    }
}
