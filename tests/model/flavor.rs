//! How etcd's versions differ on a Watch stream.
//!
//! Owns: one switch per difference that a client can see, and one row per version. Must not know what a switch leads to.

/// The Watch service of one etcd version. The letters are those of the project's fact sheet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Flavor {
    /// V6, V7: a refused create says why and answers watch id -1. Otherwise every refusal says "permission denied" and echoes the
    /// id that was asked, which mutes the watch that has it.
    pub(crate) exact_refusals: bool,
    /// V2, V3: manual progress takes its place behind the events, and comes only when every watch of the stream is in sync.
    /// Otherwise it is answered at once, ahead of events that are on the way.
    pub(crate) ordered_progress: bool,
    /// V4: no progress for a watch whose start revision the member has not reached.
    pub(crate) no_future_progress: bool,
    /// V5: the revision in Created is read after the watch was registered. Otherwise before.
    pub(crate) late_created: bool,
    /// V8: a negative start revision is refused. Otherwise it is a start that was compacted.
    pub(crate) refuses_negative_start: bool,
    /// V9: a watch that cannot be told of its compaction now, because the channel is full, is told later. Otherwise it goes on without
    /// a word, behind a gap.
    pub(crate) compaction_always_told: bool,
    /// V10: a delete at the very revision of a compaction is still seen by a watch from there.
    pub(crate) keeps_compacted_tombstone: bool,
    /// V11: a member that took a snapshot goes on where each watch was. Otherwise a watch that was in sync begins again where it
    /// began, or in the present.
    pub(crate) keeps_place_over_snapshot: bool,
    /// V12: a right to one key does not give the whole tail from it (`range_end` "\0").
    pub(crate) guards_open_end: bool,
}

impl Flavor {
    /// etcd 3.4.23.
    pub(crate) const V3_4_23: Flavor = Flavor { exact_refusals: true, ..Flavor::V3_5_1 };

    /// etcd 3.5.1.
    pub(crate) const V3_5_1: Flavor = Flavor {
        exact_refusals: false,
        ordered_progress: false,
        no_future_progress: false,
        late_created: false,
        refuses_negative_start: false,
        compaction_always_told: false,
        keeps_compacted_tombstone: false,
        keeps_place_over_snapshot: false,
        guards_open_end: false,
    };

    /// etcd 3.5.16: by its source only, no replay holds it.
    pub(crate) const V3_5_16: Flavor = Flavor {
        exact_refusals: true,
        ordered_progress: true,
        compaction_always_told: true,
        keeps_place_over_snapshot: true,
        ..Flavor::V3_5_1
    };

    /// etcd 3.5.35, and 3.6 and 3.7 as of then.
    pub(crate) const V3_5_35: Flavor = Flavor {
        exact_refusals: true,
        ordered_progress: true,
        no_future_progress: true,
        late_created: true,
        refuses_negative_start: true,
        compaction_always_told: true,
        keeps_compacted_tombstone: true,
        keeps_place_over_snapshot: true,
        guards_open_end: true,
    };

    /// All rows, oldest first.
    pub(crate) const ALL: [Flavor; 4] = [Flavor::V3_4_23, Flavor::V3_5_1, Flavor::V3_5_16, Flavor::V3_5_35];
}
