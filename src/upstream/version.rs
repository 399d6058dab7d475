//! What an etcd of an exact version does differently: the only file with etcd version numbers.
//!
//! Owns: parsing `Status.version`, and the switches ([`Traits`]) that code on the way of a call may ask for. Must not
//! know: members, connections. Ask for a trait, never for a number.
//! Invariants: a release line newer than any known behaves as the newest known; one older than any known as the
//! oldest known; a member whose version is not known is trusted with nothing ([`Traits::CAUTIOUS`]).

use std::fmt;

/// An etcd server's version, without its pre-release or build suffix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Version {
    major: u16,
    minor: u16,
    patch: u16,
}

/// The text is no version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a version of the form 3.5.1")]
pub struct NotAVersion;

/// Whether we know the release line that a version belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Knowledge {
    /// Its differences are in this file.
    Known,
    /// Newer than the newest line known here; it is treated as that.
    Newer,
    /// Older than the oldest line known here; it is treated as that.
    Older,
}

/// Who may ask, while auth is on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Needs {
    /// Anybody, without any credential.
    Nothing,
    /// Any valid user.
    AnyUser,
    /// A user with the role `root`.
    Root,
}

/// The behaviours that differ between versions and that we must switch on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Traits {
    /// Manual progress is ordered behind events; else it may run ahead of undelivered ones and is no place to resume.
    pub progress_ordered: bool,
    /// Manual progress is answered for a watch that caught up without any event; else it may stay unanswered.
    pub progress_after_idle: bool,
    /// `Created.header.revision` of a watch "from now" is read after it was registered: events at or below it may
    /// still come. The same servers answer no progress for a watch that starts in the member's future.
    pub late_created: bool,
    /// A refused watch create answers id -1 and says why; else it echoes the asked id, always says "permission
    /// denied", even for an expired token, and mutes the live watch of that id.
    pub exact_watch_refusals: bool,
    /// A watch from a negative revision is refused. Else it makes the member skip events that other watches wait for: its
    /// start is the lowest of all that are to catch up, and a scan from there finds nothing.
    pub refuses_negative_start: bool,
    /// Every keepalive, grant, revoke and time-to-live needs a valid user (and a keepalive the right to write every
    /// key of the lease); else none is checked.
    pub keepalive_needs_auth: bool,
    /// Right after a grant through a follower the leader may answer a keepalive with a false TTL of 0.
    pub keepalive_false_zero: bool,
    /// Every member list is the member's own view, answered without a quorum; else only where a linearizable one is not asked for.
    pub lists_members_alone: bool,
    /// What `Cluster.MemberList` needs.
    pub member_list_auth: Needs,
    /// What `Maintenance.Status` needs.
    pub status_auth: Needs,
}

/// The first patch of each known line that has a behaviour, oldest line first.
type Since = [Option<u16>; LINES.len()];

/// The known lines of major version 3, by minor version.
const LINES: [u16; 4] = [4, 5, 6, 7];
const MAJOR: u16 = 3;

// The numbers V… are the rows of the version matrix in which each was established.
/// V2: etcd-io/etcd#15220.
const PROGRESS_ORDERED: Since = [Some(25), Some(8), Some(0), Some(0)];
/// V3: etcd-io/etcd#17507.
const PROGRESS_AFTER_IDLE: Since = [Some(31), Some(13), Some(0), Some(0)];
/// V4, V5: etcd-io/etcd#20221.
const LATE_CREATED: Since = [Some(38), Some(22), Some(2), Some(0)];
/// V6, V7: etcd-io/etcd#12385, #14562.
const EXACT_WATCH_REFUSALS: Since = [Some(22), Some(6), Some(0), Some(0)];
/// V8: etcd-io/etcd#20707.
const REFUSES_NEGATIVE_START: Since = [Some(38), Some(24), Some(6), Some(0)];
/// V13: CVE-2026-33413.
const LEASE_AUTH: Since = [Some(42), Some(28), Some(9), Some(0)];
/// The leader confirms a lease as applied before it renews it.
const TRUE_ZERO: Since = [Some(20), Some(3), Some(0), Some(0)];
/// `MemberListRequest.linearizable` (etcd-io/etcd#11639).
const LINEARIZABLE_LIST: Since = [None, Some(0), Some(0), Some(0)];
/// V14: root first, any user one patch later (etcd-io/etcd#21530).
const MEMBER_LIST_ROOT: Since = [Some(42), Some(28), Some(9), Some(0)];
const MEMBER_LIST_USER: Since = [Some(43), Some(29), Some(10), Some(0)];
/// V15: 3.6 asked for root from its first release, 3.4 never relaxed it.
const STATUS_ROOT: Since = [Some(42), Some(28), Some(0), Some(0)];
const STATUS_USER: Since = [None, Some(32), Some(12), Some(0)];

impl Version {
    /// Parses `3.5.1`, and `3.6.0-rc.3` or `3.5.1+git` as what precedes the suffix.
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

    /// Major and minor: of lines that are more than one minor apart etcd promises nothing in one cluster.
    #[must_use]
    pub fn line(self) -> (u16, u16) {
        (self.major, self.minor)
    }

    /// Whether this file knows the version's release line.
    #[must_use]
    pub fn knowledge(self) -> Knowledge {
        let [oldest, .., newest] = LINES;
        let line = self.line();
        if line < (MAJOR, oldest) {
            Knowledge::Older
        } else if line > (MAJOR, newest) {
            Knowledge::Newer
        } else {
            Knowledge::Known
        }
    }

    /// What this version does differently.
    #[must_use]
    pub fn traits(self) -> Traits {
        Traits {
            progress_ordered: self.has(PROGRESS_ORDERED),
            progress_after_idle: self.has(PROGRESS_AFTER_IDLE),
            late_created: self.has(LATE_CREATED),
            exact_watch_refusals: self.has(EXACT_WATCH_REFUSALS),
            refuses_negative_start: self.has(REFUSES_NEGATIVE_START),
            keepalive_needs_auth: self.has(LEASE_AUTH),
            keepalive_false_zero: !self.has(TRUE_ZERO),
            lists_members_alone: !self.has(LINEARIZABLE_LIST),
            member_list_auth: self.needs(MEMBER_LIST_ROOT, MEMBER_LIST_USER),
            status_auth: self.needs(STATUS_ROOT, STATUS_USER),
        }
    }

    fn has(self, since: Since) -> bool {
        let (line, patch) = match self.knowledge() {
            Knowledge::Older => (0, 0),
            Knowledge::Newer => (LINES.len() - 1, u16::MAX),
            Knowledge::Known => (usize::from(self.minor - LINES[0]), self.patch),
        };
        since[line].is_some_and(|first| patch >= first)
    }

    fn needs(self, root: Since, user: Since) -> Needs {
        if self.has(user) {
            Needs::AnyUser
        } else if self.has(root) {
            Needs::Root
        } else {
            Needs::Nothing
        }
    }
}

impl Traits {
    /// For a member of unknown version: the worst that any known version does, trait by trait.
    pub const CAUTIOUS: Self = Self {
        progress_ordered: false,
        progress_after_idle: false,
        late_created: true,
        exact_watch_refusals: false,
        refuses_negative_start: false,
        keepalive_needs_auth: true,
        keepalive_false_zero: true,
        lists_members_alone: false,
        member_list_auth: Needs::Root,
        status_auth: Needs::Root,
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

    fn traits(version: &str) -> Traits {
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

    /// Each border of the matrix: the last patch without and the first with.
    #[test]
    fn every_border_is_at_its_exact_patch() {
        type Has = fn(&Traits) -> bool;
        type LastWithoutFirstWith = &'static [(&'static str, &'static str)];
        let borders: [(&str, Has, LastWithoutFirstWith); 7] = [
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
                "keepalive_needs_auth",
                |t| t.keepalive_needs_auth,
                &[("3.4.41", "3.4.42"), ("3.5.27", "3.5.28"), ("3.6.8", "3.6.9")],
            ),
            ("true zero", |t| !t.keepalive_false_zero, &[("3.4.19", "3.4.20"), ("3.5.2", "3.5.3")]),
        ];
        for (name, has, pairs) in borders {
            for (without, with) in pairs {
                assert!(!has(&traits(without)), "{name} at {without}");
                assert!(has(&traits(with)), "{name} at {with}");
            }
            assert!(has(&traits("3.7.0")), "{name} at 3.7.0");
        }
    }

    #[test]
    fn what_status_and_member_list_need_follows_the_security_releases() {
        use Needs::{AnyUser, Nothing, Root};
        let rows = [
            // version, MemberList, Status
            ("3.4.41", Nothing, Nothing),
            ("3.4.42", Root, Root),
            ("3.4.43", AnyUser, Root),
            ("3.4.45", AnyUser, Root),
            ("3.5.1", Nothing, Nothing),
            ("3.5.27", Nothing, Nothing),
            ("3.5.28", Root, Root),
            ("3.5.29", AnyUser, Root),
            ("3.5.31", AnyUser, Root),
            ("3.5.32", AnyUser, AnyUser),
            ("3.6.0", Nothing, Root),
            ("3.6.9", Root, Root),
            ("3.6.10", AnyUser, Root),
            ("3.6.11", AnyUser, Root),
            ("3.6.12", AnyUser, AnyUser),
            ("3.7.0", AnyUser, AnyUser),
        ];
        for (version, member_list, status) in rows {
            assert_eq!(traits(version).member_list_auth, member_list, "MemberList of {version}");
            assert_eq!(traits(version).status_auth, status, "Status of {version}");
        }
    }

    #[test]
    fn lines_that_are_not_known_behave_as_the_nearest_known() {
        assert_eq!(Version::parse("3.7.99").unwrap().knowledge(), Knowledge::Known);
        for newer in ["3.8.0", "3.10.0", "4.0.0"] {
            assert_eq!(Version::parse(newer).unwrap().knowledge(), Knowledge::Newer, "{newer}");
            assert_eq!(traits(newer), traits("3.7.99"), "{newer}");
        }
        for older in ["3.3.27", "2.3.8"] {
            assert_eq!(Version::parse(older).unwrap().knowledge(), Knowledge::Older, "{older}");
            assert_eq!(traits(older), traits("3.4.0"), "{older}");
        }
    }
}
