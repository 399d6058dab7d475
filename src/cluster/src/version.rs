//! The behaviour of exact etcd versions; the only file with etcd version numbers.
//!
//! Owns: parsing `Status.version`, and the switches ([`VersionTraits`]) queried while a call is handled. Must
//! not know: members, connections. Query a trait, never a version number.
//! Invariants: a release line newer than the newest known line behaves as the newest known line; a line older
//! than the oldest known line behaves as the oldest; a member with an unknown version is trusted with nothing
//! ([`VersionTraits::CAUTIOUS`]).

use std::fmt;

use keyward_config::JsonGateway;

/// An etcd server's version, without its pre-release or build suffix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Version {
    major: u16,
    minor: u16,
    patch: u16,
}

/// The text is not a version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a version of the form 3.5.1")]
pub struct NotAVersion;

/// How a version's release line relates to the known lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VersionKnowledge {
    /// The release line is in this file.
    Known,
    /// Newer than the newest known line, and treated as the newest known line.
    Newer,
    /// Older than the oldest known line, and treated as the oldest known line.
    Older,
}

/// The version-dependent behaviours relevant to Keyward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VersionTraits {
    /// True: manual progress is ordered behind events. False: manual progress may run ahead of undelivered
    /// events, and is not a safe resume point.
    pub progress_ordered: bool,
    /// True: manual progress is answered for a watch that caught up without any event. False: the answer may
    /// be missing.
    pub progress_after_idle: bool,
    /// True: `Created.header.revision` of a watch "from now" is read after registration, so events at or
    /// below the revision may still arrive. The same servers answer no progress for a watch starting in the
    /// member's future.
    pub late_created: bool,
    /// True: a refused watch create is answered with id -1 and the reason. False: the answer echoes the
    /// requested id, always says "permission denied", even for an expired token, and mutes the live watch
    /// with the same id.
    pub exact_watch_refusals: bool,
    /// True: a watch from a negative revision is refused. False: the watch makes the member skip events
    /// awaited by unrelated watches, because the scan for all watches catching up starts at the lowest start
    /// revision, and finds nothing.
    pub refuses_negative_start: bool,
    /// True: right after a grant through a follower, the leader may answer a keepalive with a false TTL of 0.
    pub keepalive_false_zero: bool,
    /// True: every member list is the member's own view, answered without a quorum. False: only a list
    /// requested as not linearizable is.
    pub lists_members_alone: bool,
    /// True: calls about leases, members and maintenance require an etcd user, and the root role where their
    /// effect reaches all users (CVE-2026-33413). False: the member serves many such calls to anybody.
    pub guards_every_method: bool,
    /// True: nested Txns, and `prev_kv` and `lease` inside a Txn, require the permissions of the same
    /// operations outside of a Txn (CVE-2026-33343, etcd-io/etcd#21683). False: the member leaves them
    /// unchecked.
    pub checks_whole_txns: bool,
    /// True: the keys of a lease are told only to a user who may read the keys.
    pub guards_lease_keys: bool,
    /// True: a watch to the end of the keyspace (`range_end` of one zero byte) requires permission for the
    /// whole range (GHSA-xg4h-6gfc-h4m8). False: permission for the first key is enough.
    pub checks_open_watches: bool,
    /// True: permissions are checked also while an alarm is raised. False: writes and changes of users are
    /// applied without a check then.
    pub checks_under_alarm: bool,
    /// True: a Range with an unknown sort target is refused. False: the member panics over it.
    pub checks_sort_options: bool,
    /// True: every member evaluates the ranges of a Txn that writes. False: the answering member alone
    /// evaluates the ranges at the Txn's top level; where one of them fails, the other members apply the Txn
    /// and the answering member does not.
    pub applies_txns_alike: bool,
    /// True: Status is told to every user. False: to every caller, or to the role root alone, by the patch.
    pub tells_status_to_users: bool,
    /// True: every lease is there after a restart. False: a lease with a negative id, or with the largest, is
    /// not, and the member differs from the others.
    pub loads_all_leases: bool,
}

/// For each known line, oldest first: the first patch release with a behaviour.
type FirstPatches = [Option<u16>; LINES.len()];

/// The known lines of major version 3, by minor version.
const LINES: [u16; 4] = [4, 5, 6, 7];
const MAJOR: u16 = 3;

/// Manual progress ordered behind events: etcd-io/etcd#15220, `docs/etcd-facts.md#v2`.
const PROGRESS_ORDERED: FirstPatches = [Some(25), Some(8), Some(0), Some(0)];
/// Progress for a watch that caught up without events: etcd-io/etcd#17507, `docs/etcd-facts.md#v3`.
const PROGRESS_AFTER_IDLE: FirstPatches = [Some(31), Some(13), Some(0), Some(0)];
/// No progress for future watches, and Created read after registration: etcd-io/etcd#20221,
/// `docs/etcd-facts.md#v4` and `docs/etcd-facts.md#v5`.
const LATE_CREATED: FirstPatches = [Some(38), Some(22), Some(2), Some(0)];
/// Distinct reasons and id -1 for refused creates: etcd-io/etcd#12385, #14562, `docs/etcd-facts.md#v6` and
/// `docs/etcd-facts.md#v7`.
const EXACT_WATCH_REFUSALS: FirstPatches = [Some(22), Some(6), Some(0), Some(0)];
/// Negative start revisions refused: etcd-io/etcd#20707, `docs/etcd-facts.md#v8`.
const REFUSES_NEGATIVE_START: FirstPatches = [Some(38), Some(24), Some(6), Some(0)];
/// The leader confirms a lease as applied before renewing the lease.
const TRUE_ZERO: FirstPatches = [Some(20), Some(3), Some(0), Some(0)];
/// `MemberListRequest.linearizable` (etcd-io/etcd#11639).
const LINEARIZABLE_LIST: FirstPatches = [None, Some(0), Some(0), Some(0)];
/// CVE-2026-33413: `docs/etcd-facts.md#v13`.
const GUARDS_EVERY_METHOD: FirstPatches = [Some(42), Some(28), Some(9), Some(0)];
/// CVE-2026-33343 and etcd-io/etcd#21683: `docs/etcd-facts.md#v24`. The patches of CVE-2026-33343 alone lie
/// two releases earlier.
const CHECKS_WHOLE_TXNS: FirstPatches = [Some(44), Some(30), Some(11), Some(0)];
/// `LeaseTimeToLive` with keys: `docs/etcd-facts.md#v25`.
const GUARDS_LEASE_KEYS: FirstPatches = [Some(26), Some(9), Some(0), Some(0)];
/// GHSA-xg4h-6gfc-h4m8, never fixed in 3.4: `docs/etcd-facts.md#v12`.
const CHECKS_OPEN_WATCHES: FirstPatches = [None, Some(33), Some(14), Some(1)];
/// etcd-io/etcd#22386: `docs/etcd-facts.md#v28`.
const CHECKS_UNDER_ALARM: FirstPatches = [None, None, Some(0), Some(0)];
/// etcd-io/etcd#13554: `docs/etcd-facts.md#v26`.
const CHECKS_SORT_OPTIONS: FirstPatches = [None, None, Some(0), Some(0)];
/// etcd-io/etcd#18667: `docs/etcd-facts.md#v27`.
const APPLIES_TXNS_ALIKE: FirstPatches = [None, None, None, Some(0)];
/// Status needs any valid user: `docs/etcd-facts.md#v15`.
const TELLS_STATUS_TO_USERS: FirstPatches = [None, Some(32), Some(12), Some(0)];
/// Ids outside of a range scanned at the start: `docs/etcd-facts.md#v30`.
const LOADS_ALL_LEASES: FirstPatches = [Some(0), Some(3), Some(0), Some(0)];

impl Version {
    /// Parses `3.5.1`; a suffix as in `3.6.0-rc.3` or `3.5.1+git` is ignored.
    ///
    /// # Errors
    /// [`NotAVersion`].
    pub fn parse(text: &str) -> Result<Self, NotAVersion> {
        let core = text.split(['-', '+']).next().unwrap_or_default();
        let mut numbers = core.split('.').map(|number| {
            let digits = !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit());
            if digits { number.parse().map_err(|_| NotAVersion) } else { Err(NotAVersion) }
        });
        let mut next = || numbers.next().unwrap_or(Err(NotAVersion));
        let version = Self { major: next()?, minor: next()?, patch: next()? };
        if numbers.next().is_none() { Ok(version) } else { Err(NotAVersion) }
    }

    /// Major and minor version. etcd guarantees nothing for a cluster of lines more than one minor version
    /// apart.
    #[must_use]
    pub fn line(self) -> (u16, u16) {
        (self.major, self.minor)
    }

    /// How the version's release line relates to the lines in this file.
    #[must_use]
    pub fn knowledge(self) -> VersionKnowledge {
        let [oldest, .., newest] = LINES;
        let line = self.line();
        if line < (MAJOR, oldest) {
            VersionKnowledge::Older
        } else if line > (MAJOR, newest) {
            VersionKnowledge::Newer
        } else {
            VersionKnowledge::Known
        }
    }

    /// The behaviour of this version.
    #[must_use]
    pub fn traits(self) -> VersionTraits {
        VersionTraits {
            progress_ordered: self.has(PROGRESS_ORDERED),
            progress_after_idle: self.has(PROGRESS_AFTER_IDLE),
            late_created: self.has(LATE_CREATED),
            exact_watch_refusals: self.has(EXACT_WATCH_REFUSALS),
            refuses_negative_start: self.has(REFUSES_NEGATIVE_START),
            keepalive_false_zero: !self.has(TRUE_ZERO),
            lists_members_alone: !self.has(LINEARIZABLE_LIST),
            guards_every_method: self.has(GUARDS_EVERY_METHOD),
            checks_whole_txns: self.has(CHECKS_WHOLE_TXNS),
            guards_lease_keys: self.has(GUARDS_LEASE_KEYS),
            checks_open_watches: self.has(CHECKS_OPEN_WATCHES),
            checks_under_alarm: self.has(CHECKS_UNDER_ALARM),
            checks_sort_options: self.has(CHECKS_SORT_OPTIONS),
            applies_txns_alike: self.has(APPLIES_TXNS_ALIKE),
            tells_status_to_users: self.has(TELLS_STATUS_TO_USERS),
            loads_all_leases: self.has(LOADS_ALL_LEASES),
        }
    }

    /// The form of this version's JSON gateway.
    #[must_use]
    pub fn json_gateway(self) -> JsonGateway {
        match self.line() {
            (MAJOR, ..5) | (..MAJOR, _) => JsonGateway::Etcd34,
            (MAJOR, 5) => JsonGateway::Etcd35,
            _ => JsonGateway::Etcd36,
        }
    }

    /// The version of a cluster whose oldest member has this version: the release line, with patch 0.
    #[must_use]
    pub fn of_cluster(self) -> Self {
        Self { patch: 0, ..self }
    }

    fn has(self, since: FirstPatches) -> bool {
        let (line, patch) = match self.knowledge() {
            VersionKnowledge::Older => (0, 0),
            VersionKnowledge::Newer => (LINES.len() - 1, u16::MAX),
            VersionKnowledge::Known => (usize::from(self.minor - LINES[0]), self.patch),
        };
        since[line].is_some_and(|first| patch >= first)
    }
}

impl VersionTraits {
    /// The traits of a member with an unknown version: for each trait, the worst behaviour of any known
    /// version.
    pub const CAUTIOUS: Self = Self {
        progress_ordered: false,
        progress_after_idle: false,
        late_created: true,
        exact_watch_refusals: false,
        refuses_negative_start: false,
        keepalive_false_zero: true,
        lists_members_alone: false,
        guards_every_method: false,
        checks_whole_txns: false,
        guards_lease_keys: false,
        checks_open_watches: false,
        checks_under_alarm: false,
        checks_sort_options: false,
        applies_txns_alike: false,
        tells_status_to_users: false,
        loads_all_leases: false,
    };
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn traits(version: &str) -> VersionTraits {
        Version::parse(version).unwrap().traits()
    }

    #[test]
    fn reads_what_servers_say_and_nothing_else() {
        let version = |major, minor, patch| Ok(Version { major, minor, patch });
        assert_eq!(Version::parse("3.5.1"), version(3, 5, 1));
        assert_eq!(Version::parse("3.4.23"), version(3, 4, 23));
        assert_eq!(Version::parse("3.6.0-rc.3"), version(3, 6, 0));
        assert_eq!(Version::parse("3.8.0-alpha.0+git.1"), version(3, 8, 0));
        for text in
            ["", "3", "3.5", "3.5.", "3.5.x", "3.5.1.2", "v3.5.1", "3.+5.1", " 3.5.1", "3.5.65536", "-3.5.1"]
        {
            assert_eq!(Version::parse(text), Err(NotAVersion), "{text:?}");
        }
        assert_eq!(Version::parse("3.5.16").unwrap().to_string(), "3.5.16");
        assert!(Version::parse("3.5.10").unwrap() > Version::parse("3.5.9").unwrap());
    }

    /// For each version border: the last patch release without the behaviour, and the first with the
    /// behaviour.
    #[test]
    fn every_border_is_at_its_exact_patch() {
        type Has = fn(&VersionTraits) -> bool;
        type LastWithoutFirstWith = &'static [(&'static str, &'static str)];
        let borders: [(&str, Has, LastWithoutFirstWith); 15] = [
            ("progress_ordered", |t| t.progress_ordered, &[("3.4.24", "3.4.25"), ("3.5.7", "3.5.8")]),
            ("progress_after_idle", |t| t.progress_after_idle, &[("3.4.30", "3.4.31"), ("3.5.12", "3.5.13")]),
            (
                "late_created",
                |t| t.late_created,
                &[("3.4.37", "3.4.38"), ("3.5.21", "3.5.22"), ("3.6.1", "3.6.2")],
            ),
            ("exact_watch_refusals", |t| t.exact_watch_refusals, &[("3.4.21", "3.4.22"), ("3.5.5", "3.5.6")]),
            (
                "refuses_negative_start",
                |t| t.refuses_negative_start,
                &[("3.4.37", "3.4.38"), ("3.5.23", "3.5.24"), ("3.6.5", "3.6.6")],
            ),
            (
                "guards_every_method",
                |t| t.guards_every_method,
                &[("3.4.41", "3.4.42"), ("3.5.27", "3.5.28"), ("3.6.8", "3.6.9")],
            ),
            (
                "checks_whole_txns",
                |t| t.checks_whole_txns,
                &[("3.4.43", "3.4.44"), ("3.5.29", "3.5.30"), ("3.6.10", "3.6.11")],
            ),
            ("guards_lease_keys", |t| t.guards_lease_keys, &[("3.4.25", "3.4.26"), ("3.5.8", "3.5.9")]),
            (
                "checks_open_watches",
                |t| t.checks_open_watches,
                &[("3.5.32", "3.5.33"), ("3.6.13", "3.6.14"), ("3.7.0", "3.7.1")],
            ),
            ("checks_under_alarm", |t| t.checks_under_alarm, &[("3.5.35", "3.6.0")]),
            ("checks_sort_options", |t| t.checks_sort_options, &[("3.5.35", "3.6.0")]),
            ("applies_txns_alike", |t| t.applies_txns_alike, &[("3.6.16", "3.7.0")]),
            (
                "tells_status_to_users",
                |t| t.tells_status_to_users,
                &[("3.5.31", "3.5.32"), ("3.6.11", "3.6.12")],
            ),
            ("loads_all_leases", |t| t.loads_all_leases, &[("3.5.2", "3.5.3")]),
            ("true zero", |t| !t.keepalive_false_zero, &[("3.4.19", "3.4.20"), ("3.5.2", "3.5.3")]),
        ];
        for (name, has, pairs) in borders {
            for (without, with) in pairs {
                assert!(!has(&traits(without)), "{name} at {without}");
                assert!(has(&traits(with)), "{name} at {with}");
            }
            assert!(has(&traits("3.7.1")), "{name} at 3.7.1");
        }
    }

    #[test]
    fn each_line_has_the_form_of_its_json_gateway() {
        for (version, form) in [
            ("2.3.8", JsonGateway::Etcd34),
            ("3.4.23", JsonGateway::Etcd34),
            ("3.5.1", JsonGateway::Etcd35),
            ("3.6.0", JsonGateway::Etcd36),
            ("3.8.0", JsonGateway::Etcd36),
            ("4.0.0", JsonGateway::Etcd36),
        ] {
            assert_eq!(Version::parse(version).unwrap().json_gateway(), form, "{version}");
        }
        assert_eq!(Version::parse("3.5.16").unwrap().of_cluster().to_string(), "3.5.0");
    }

    #[test]
    fn lines_that_are_not_known_behave_as_the_nearest_known() {
        assert_eq!(Version::parse("3.7.99").unwrap().knowledge(), VersionKnowledge::Known);
        for newer in ["3.8.0", "3.10.0", "4.0.0"] {
            assert_eq!(Version::parse(newer).unwrap().knowledge(), VersionKnowledge::Newer, "{newer}");
            assert_eq!(traits(newer), traits("3.7.99"), "{newer}");
        }
        for older in ["3.3.27", "2.3.8"] {
            assert_eq!(Version::parse(older).unwrap().knowledge(), VersionKnowledge::Older, "{older}");
            assert_eq!(traits(older), traits("3.4.0"), "{older}");
        }
    }
}
