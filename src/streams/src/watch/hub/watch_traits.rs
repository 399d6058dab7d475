//! The behaviour of a member's Watch service, as the hub uses it.
//!
//! Owns: the traits. Must not know: versions, streams.

/// Version-dependent behaviours of a member's Watch service. The versions are listed in `docs/etcd-facts.md`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WatchTraits {
    /// Manual progress never runs ahead of undelivered events (3.4.25, 3.5.8 and later), and is answered for
    /// watches that caught up without any event (3.4.31, 3.5.13 and later). See `docs/etcd-facts.md#v2` and
    /// `#v3`.
    pub progress_trusted: bool,
    /// "permission denied" means a real denial (3.4.22, 3.5.6 and later); older members say the same of an
    /// expired token. See `docs/etcd-facts.md#v6` and `#v7`.
    pub exact_refusals: bool,
    /// The Created of a watch "from now" may carry a revision later than the watch's start, and a watch from
    /// a future revision gets no progress (both 3.4.38, 3.5.22, 3.6.2 and later). The start of a watch does
    /// not depend on the trait: a start is never below the revision told by Created. See
    /// `docs/etcd-facts.md#v4` and `#v5`.
    pub late_created: bool,
    /// A watch from a negative revision is refused (3.4.38, 3.5.24, 3.6.6 and later). On older members a
    /// negative start makes the member's watches lose events. See `docs/etcd-facts.md#v8`.
    pub refuses_negative_start: bool,
    /// A watch to the end of the keyspace is judged by the permission for its first key (before 3.5.33,
    /// 3.6.14 and 3.7.1, and in every 3.4), and the stream has a user to judge. Keyward then names an end
    /// that etcd judges as a range. See `docs/etcd-facts.md#v12`.
    pub misjudges_open_end: bool,
}

impl WatchTraits {
    /// The traits of a member of unknown version: no behaviour is taken on trust.
    pub const UNKNOWN: Self = Self {
        progress_trusted: false,
        exact_refusals: false,
        misjudges_open_end: true,
        late_created: true,
        refuses_negative_start: false,
    };
}
