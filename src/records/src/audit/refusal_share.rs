//! The part of the disk for records of calls without effect.
//!
//! Owns: the bytes that these records may take. Must not know: the files, the reason of a call's end.
//! Invariant: within `audit.keep_for` they take a quarter of the kept files at most, so that whoever is
//! refused cannot rotate the records of changes away.

use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use keyward_config::audit_settings::AuditFileSettings;

/// Divisor: the part of the kept files, and of one file at once.
const PART: f64 = 4.0;
/// Bytes of a line beside its record, about.
const LINE: usize = 300;

/// A bucket of bytes.
#[derive(Debug)]
pub(super) struct RefusalShare {
    /// Bytes at most, and bytes earned in a second.
    most: f64,
    earned: f64,
    left: Mutex<(f64, Instant)>,
}

#[expect(clippy::cast_precision_loss, reason = "sizes of files, not exact")]
impl RefusalShare {
    /// A full bucket; `None` where files are not removed, or may be at any age.
    pub(super) fn new(file: &AuditFileSettings, now: Instant) -> Option<Self> {
        let keep_for = file.keep_for.filter(|_| file.keep > 0)?;
        let most = file.max_size as f64 / PART;
        let earned = most * (file.keep as f64) / keep_for.as_secs_f64();
        Some(Self { most, earned, left: Mutex::new((most, now)) })
    }

    /// Takes the bytes of a record, if they are there.
    pub(super) fn try_take(&self, record: usize, now: Instant) -> bool {
        let mut left = self.left.lock().unwrap_or_else(PoisonError::into_inner);
        let since = now.saturating_duration_since(left.1).as_secs_f64();
        let bytes = (record + LINE) as f64;
        *left = ((left.0 + since * self.earned).min(self.most), now.max(left.1));
        let fits = left.0 >= bytes;
        if fits {
            left.0 -= bytes;
        }
        fits
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn within_the_time_a_quarter_of_the_disk_is_taken_at_most() {
        let day = Duration::from_secs(24 * 3600);
        let file = |keep, keep_for| AuditFileSettings {
            path: "a".into(),
            max_size: 1 << 20,
            max_age: None,
            keep,
            keep_for,
        };
        let began = Instant::now();
        let share = RefusalShare::new(&file(30, Some(day)), began).expect("a share");
        let mut taken = 0;
        for second in 0..24 * 3600 {
            let now = began + Duration::from_secs(second);
            while share.try_take(3000, now) {
                taken += 3000 + LINE;
            }
        }
        let quarter = 31 * (1 << 20) / 4;
        assert!(taken <= quarter && taken > quarter * 9 / 10, "{taken} of {quarter}");
        assert!(RefusalShare::new(&file(0, Some(day)), began).is_none());
        assert!(RefusalShare::new(&file(30, None), began).is_none());
    }
}
