//! Resolves limits on usage (`[policy.peer_limits]`, `[role.limits]`, `[role.total_limits]`,
//! `[listener.limits]`) and `[protection]`.
//!
//! Owns: the defaults and bounds. Must not know: the present usage. Invariant: a limit that would refuse
//! every call is a fault.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use super::policy_tables::mode;
use super::{GIB, KIB, Resolver};
use crate::toml_file::{TomlListener, TomlProtection};
use crate::toml_limits::{TomlOnExceed, TomlPriority, TomlUsageLimits};
use crate::usage_limits::{CallRate, OnExceed, Priority, UsageLimits};
use crate::{PolicyMode, ProtectionSettings, values};

/// Highest count in a limit. At a million calls a second, the bucket of calls is still exact.
const MOST: u32 = 1_000_000;

/// Largest rate of bytes.
const MOST_BYTES: u64 = 64 * GIB;

/// Bounds of `protection.db_share`.
const SHARES: std::ops::RangeInclusive<f64> = 0.1..=0.99;

impl Resolver<'_> {
    /// Takes the limits out of the listeners' rows.
    pub(super) fn listener_limits(&mut self, rows: &mut [TomlListener]) -> Vec<(Arc<str>, UsageLimits)> {
        let rows = rows.iter_mut().enumerate();
        let rows = rows.filter_map(|(at, row)| Some((at, row.name.clone()?, row.limits.take()?)));
        rows.map(|(at, name, row)| (name.into(), self.usage_limits(&format!("listener[{at}].limits"), row)))
            .collect()
    }

    /// Resolves a table of limits.
    pub(super) fn usage_limits(&mut self, path: &str, row: TomlUsageLimits) -> UsageLimits {
        let mut least_one = |key: &str, value: Option<u32>| -> Option<NonZeroU32> {
            self.bounded(&format!("{path}.{key}"), value).and_then(NonZeroU32::new)
        };
        let per_second = least_one("calls_per_second", row.calls_per_second);
        let burst = least_one("burst", row.burst);
        let keys_per_range = least_one("keys_per_range", row.keys_per_range);
        let calls_in_flight = self.bounded(&format!("{path}.calls_in_flight"), row.calls_in_flight);
        if burst.is_some() && row.calls_per_second.is_none() {
            self.findings.fault(&format!("{path}.burst"), "needs calls_per_second beside it");
        }
        if row.on_exceed.is_some() && row.keys_per_range.is_none() {
            self.findings
                .warn(&format!("{path}.on_exceed"), "has no effect without keys_per_range beside it");
        }
        UsageLimits {
            calls: per_second.map(|per_second| CallRate { per_second, burst: burst.unwrap_or(per_second) }),
            calls_in_flight,
            watches: row.watches,
            leases: row.leases,
            request_kib: self.kib(&format!("{path}.request_bytes_per_second"), row.request_bytes_per_second),
            reply_kib: self.kib(&format!("{path}.reply_bytes_per_second"), row.reply_bytes_per_second),
            keys_per_range,
            answer_kib: self.kib(&format!("{path}.bytes_per_answer"), row.bytes_per_answer),
            on_exceed: row.on_exceed.map(|on_exceed| match on_exceed {
                TomlOnExceed::Refuse => OnExceed::Refuse,
                TomlOnExceed::Page => OnExceed::Page,
            }),
            priority: row.priority.map(|priority| match priority {
                TomlPriority::Low => Priority::Low,
                TomlPriority::Normal => Priority::Normal,
                TomlPriority::High => Priority::High,
            }),
        }
    }

    fn bounded(&mut self, path: &str, value: Option<u32>) -> Option<u32> {
        if value.is_some_and(|value| !(1..=MOST).contains(&value)) {
            self.findings.fault(path, format!("must be from 1 to {MOST}"));
            return None;
        }
        value
    }

    /// Resolves a number of bytes, in KiB.
    fn kib(&mut self, path: &str, text: Option<String>) -> Option<NonZeroU32> {
        let bytes = self.checked(path, values::size(&text?))?;
        if !(KIB..=MOST_BYTES).contains(&bytes) {
            self.findings.fault(path, format!("must be from {KIB} to {MOST_BYTES} bytes"));
        }
        u32::try_from(bytes / KIB).ok().and_then(NonZeroU32::new)
    }

    /// Resolves `[protection]`.
    pub(super) fn protection(&mut self, row: TomlProtection) -> ProtectionSettings {
        let default = ProtectionSettings::default();
        let db_share = row.db_share.map_or(default.db_share, |share| {
            if !SHARES.contains(&share) {
                let (least, most) = (SHARES.start(), SHARES.end());
                self.findings.fault("protection.db_share", format!("must be from {least} to {most}"));
            }
            thousandths(share)
        });
        let path = "protection.db_quota";
        let quota = row.db_quota.and_then(|text| self.checked(path, values::size(&text)));
        if quota == Some(0) {
            self.findings.fault(path, "must be etcd's --quota-backend-bytes, above 0");
        }
        let path = "protection.latency_target";
        let bounds = Duration::ZERO..=Duration::from_secs(60);
        let target = self.duration(path, row.latency_target, Duration::ZERO, bounds);
        ProtectionSettings {
            mode: row.mode.map_or(PolicyMode::Off, mode),
            db_share,
            db_quota: quota.filter(|quota| *quota > 0),
            latency_target: Some(target).filter(|target| !target.is_zero()),
        }
    }
}

/// A share from 0 to 1 in thousandths.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "the share is clamped before")]
fn thousandths(share: f64) -> u32 {
    (share.clamp(0.0, 1.0) * 1000.0).round() as u32
}
