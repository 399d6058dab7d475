//! When the audit file is rotated, and the names of old files.
//!
//! Owns: the decisions. Must not know: how a file is renamed or removed.

use std::ffi::{OsStr, OsString};
use std::time::{Duration, SystemTime};

use keyward_config::audit_settings::AuditFileSettings;

/// Digits of the number at the end of an old file's name: enough for every number of a line.
const DIGITS: usize = 20;

/// True if the file is to be rotated before `more` bytes are written. A file without records stays.
#[must_use]
pub(super) fn is_due(settings: &AuditFileSettings, file: FileAge, more: usize, now: SystemTime) -> bool {
    let too_large = file.size.saturating_add(more as u64) > settings.max_size;
    let is_old = |age: Duration| now.duration_since(file.begun).is_ok_and(|since| since >= age);
    file.size > 0 && (too_large || settings.max_age.is_some_and(is_old))
}

/// The part of a file that is used until it is rotated.
#[must_use]
pub(super) fn used_part(settings: &AuditFileSettings, file: FileAge, now: SystemTime) -> f64 {
    if file.size == 0 {
        return 0.0;
    }
    #[expect(clippy::cast_precision_loss, reason = "a forecast")]
    let by_size = file.size as f64 / settings.max_size as f64;
    let since = now.duration_since(file.begun).unwrap_or_default();
    let by_age = settings.max_age.map_or(0.0, |age| since.as_secs_f64() / age.as_secs_f64());
    by_size.max(by_age).min(1.0)
}

/// The size and the begin of a file.
#[derive(Clone, Copy, Debug)]
pub(super) struct FileAge {
    /// Bytes.
    pub(super) size: u64,
    /// The time of the first record.
    pub(super) begun: SystemTime,
}

/// The name of an old file, whose first line has the number `first`.
#[must_use]
pub(super) fn old_name(name: &OsStr, first: u64) -> OsString {
    let mut old = name.to_owned();
    old.push(format!(".{first:0DIGITS$}"));
    old
}

/// The name for a file that stood in the place of the audit file, and has no lines of the chain, when the
/// next line had the number `next`.
#[must_use]
pub(super) fn aside_name(name: &OsStr, next: u64) -> OsString {
    let mut aside = old_name(name, next);
    aside.push(".torn");
    aside
}

/// The number of the first line of an old file, by its name.
#[must_use]
pub(super) fn first_number(old: &OsStr) -> Option<u64> {
    let digits = old.as_encoded_bytes().rsplit(|byte| *byte == b'.').next()?;
    std::str::from_utf8(digits).ok()?.parse().ok()
}

/// True if `entry` may be the file `name` under another name: followed by a number or a date, as by Keyward
/// and by logrotate.
#[must_use]
pub(super) fn may_be_renamed(name: &OsStr, entry: &OsStr) -> bool {
    let rest = entry.as_encoded_bytes().strip_prefix(name.as_encoded_bytes());
    let suffix = rest.and_then(|rest| rest.strip_prefix(b".").or_else(|| rest.strip_prefix(b"-")));
    let is_numeric = |byte: &u8| byte.is_ascii_digit() || b".-_".contains(byte);
    suffix.is_some_and(|suffix| !suffix.is_empty() && suffix.iter().all(is_numeric))
}

/// The old files of `name` among the names of its folder, oldest first.
#[must_use]
pub(super) fn old_files(name: &OsStr, folder: impl IntoIterator<Item = OsString>) -> Vec<OsString> {
    let is_old = |entry: &OsString| {
        let rest = entry.as_encoded_bytes().strip_prefix(name.as_encoded_bytes());
        let number = rest.and_then(|rest| rest.strip_prefix(b"."));
        number.is_some_and(|number| number.len() == DIGITS && number.iter().all(u8::is_ascii_digit))
    };
    let mut old: Vec<_> = folder.into_iter().filter(is_old).collect();
    old.sort_unstable();
    old
}

/// The files to remove, given all old files: the oldest beyond `keep`; none if `keep` is 0. A file with lines
/// behind `taken` stays, until there are twice as many as `keep`.
#[must_use]
pub(super) fn surplus(old: &[OsString], keep: usize, taken: u64) -> SurplusFiles {
    let surplus = if keep == 0 { 0 } else { old.len().saturating_sub(keep) };
    let mut removed = Vec::new();
    for (at, name) in old.iter().enumerate().take(surplus) {
        // At least one younger file stays.
        let Some(next) = old.get(at + 1).and_then(|next| first_number(next)) else { break };
        let last = next.saturating_sub(1);
        if last > taken && old.len() - at <= 2 * keep {
            break;
        }
        removed.push((name.clone(), last));
    }
    let held = surplus - removed.len();
    SurplusFiles { removed, held }
}

/// Old files beyond the wanted number.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct SurplusFiles {
    /// The files to remove, oldest first, each with the number of its last line.
    pub(super) removed: Vec<(OsString, u64)>,
    /// The number of files that stay for a sink.
    pub(super) held: usize,
}

#[cfg(test)]
mod tests {
    use std::time::UNIX_EPOCH;

    use super::*;

    #[test]
    fn a_file_is_rotated_by_size_and_by_age() {
        let hour = Duration::from_secs(3600);
        let settings = AuditFileSettings {
            path: "a".into(),
            max_size: 100,
            max_age: Some(hour),
            keep: 2,
            keep_for: None,
        };
        let file = |size| FileAge { size, begun: UNIX_EPOCH };
        let soon = UNIX_EPOCH + hour / 2;
        assert!(!is_due(&settings, file(60), 40, soon));
        assert!(is_due(&settings, file(60), 41, soon));
        assert!(!is_due(&settings, file(0), 4000, soon), "a line larger than the file has a file of its own");
        assert!(is_due(&settings, file(1), 1, UNIX_EPOCH + hour));
        assert!(!is_due(&settings, file(1), 1, UNIX_EPOCH - hour), "the clock was set back");
        let ageless = AuditFileSettings { max_age: None, ..settings };
        assert!(!is_due(&ageless, file(1), 1, UNIX_EPOCH + 9999 * hour));
    }

    #[test]
    fn the_oldest_files_are_surplus() {
        let name = OsStr::new("audit.log");
        let names: Vec<_> = [10, 9, 100].map(|first| old_name(name, first)).into();
        let further = ["audit.log", "audit.log.torn", "audit.log.7", "other.00000000000000000001"];
        let all = names.iter().cloned().chain(further.map(OsString::from));
        let old = old_files(name, all);
        assert_eq!(old, [names[1].clone(), names[0].clone(), names[2].clone()]);
        let judged = |keep, taken| {
            let SurplusFiles { removed, held } = surplus(&old, keep, taken);
            let lasts: Vec<_> = removed.iter().map(|(_, last)| *last).collect();
            (lasts, held)
        };
        assert_eq!(judged(2, u64::MAX), (vec![9], 0));
        assert_eq!(judged(1, u64::MAX), (vec![9, 99], 0));
        assert_eq!((judged(3, 0), judged(0, 0)), ((vec![], 0), (vec![], 0)));
        assert_eq!(judged(2, 8), (vec![], 1), "a sink has not taken line 9");
        assert_eq!(judged(2, 9), (vec![9], 0));
        assert_eq!(judged(1, 9), (vec![9], 1));
        assert_eq!(judged(1, 0), (vec![9], 1), "twice as many files at most");
    }
}
