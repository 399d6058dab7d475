//! What happened in one run or in many: a promise is only kept where it was put to the test.
//!
//! Owns: the table of what is counted, and how often each must happen in a thousand seeds. Must not know who counts.

use std::fmt;

/// What is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum What {
    Events,
    Revisions,
    Creates,
    Resumes,
    Held,
    Compacted,
    RefusedExact,
    RefusedOld,
    RefusedTold,
    Healed,
    Swaps,
    Restored,
    SwapsTold,
    Slow,
    StreamCuts,
    ByteCuts,
    ConnectionCuts,
    GoAways,
    LeaderLosses,
    Cancels,
    CancelsRaced,
    ProgressTold,
    ProgressAnswered,
    Duplicates,
    ChosenIds,
    Fragments,
    PrevKvs,
    HalfCloses,
    Late,
    Pieces,
    Joins,
}

/// Each with its words, and its floor in a thousand seeds.
const ROWS: [(What, &str, u64); 31] = [
    (What::Events, "events checked", 20_000),
    (What::Revisions, "revisions written", 10_000),
    (What::Creates, "creates", 4_000),
    (What::Resumes, "resumes (watches sent upstream again)", 1_000),
    (What::Held, "held-back revisions dropped at a cut", 50),
    (What::Compacted, "compactions told", 100),
    (What::RefusedExact, "creates refused with id -1", 100),
    (What::RefusedOld, "creates refused in the old form", 100),
    (What::RefusedTold, "refusals told to a client", 50),
    (What::Healed, "creates let in after a refusal", 50),
    (What::Swaps, "cluster swaps", 50),
    (What::Restored, "restored older histories", 50),
    (What::SwapsTold, "watches ended by a swap or a restore", 50),
    (What::Slow, "slow clients that held back something", 100),
    (What::StreamCuts, "streams cut", 500),
    (What::ByteCuts, "connections cut after n bytes", 100),
    (What::ConnectionCuts, "connections cut", 100),
    (What::GoAways, "members that said GOAWAY", 50),
    (What::LeaderLosses, "leader losses", 50),
    (What::Cancels, "cancels acknowledged", 100),
    (What::CancelsRaced, "cancels sent while no stream carried the watch", 20),
    (What::ProgressTold, "progresses told", 500),
    (What::ProgressAnswered, "progresses answered at the end", 200),
    (What::Duplicates, "duplicate ids refused", 50),
    (What::ChosenIds, "ids that a client chose", 100),
    (What::Fragments, "fragments sent by members", 500),
    (What::PrevKvs, "previous values compared", 1_000),
    (What::HalfCloses, "half-closed streams", 50),
    (What::Late, "clients that came late", 100),
    (What::Pieces, "fragments told to clients that asked for them", 3),
    (What::Joins, "watches that joined a shared upstream watch", 300),
];

/// How often each of [`What`] happened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts([u64; ROWS.len()]);

impl Counts {
    pub(crate) fn more(&mut self, what: What, by: u64) {
        self.0[what as usize] += by;
    }

    pub(crate) fn one(&mut self, what: What) {
        self.more(what, 1);
    }

    pub(crate) fn add(&mut self, other: &Self) {
        for (mine, theirs) in self.0.iter_mut().zip(other.0) {
            *mine += theirs;
        }
    }

    /// What happened too seldom for `seeds` runs, in words.
    pub(crate) fn too_few(&self, seeds: u64) -> Vec<String> {
        let rows = ROWS.iter().zip(self.0);
        let few = rows.filter(|((_, _, floor), count)| count * 1000 < floor * seeds);
        few.map(|((_, words, floor), count)| {
            format!("{words}: {count} in {seeds} seeds, wanted {floor} in 1000")
        })
        .collect()
    }

    /// The table, per thousand seeds.
    pub(crate) fn table(&self, seeds: u64) -> Table {
        Table { counts: *self, seeds }
    }
}

/// [`Counts`] to print.
pub(crate) struct Table {
    counts: Counts,
    seeds: u64,
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "in all, per 1,000 seeds (floor):")?;
        for ((_, words, floor), count) in ROWS.iter().zip(self.counts.0) {
            writeln!(f, "{count:>12} {:>9} ({floor})  {words}", count * 1000 / self.seeds.max(1))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_in_the_order_of_what_is_counted() {
        for (at, (what, ..)) in ROWS.iter().enumerate() {
            assert_eq!(*what as usize, at, "{what:?}");
        }
    }
}
