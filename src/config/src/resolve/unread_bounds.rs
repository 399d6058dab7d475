//! Resolves the limits on unread answers.
//!
//! Owns: the defaults and bounds of `limits.unread_buffer` and `limits.unread_timeout`. Must not know:
//! further limits.

use std::time::Duration;

use super::{DAY, GIB, MIB, Resolver, SECOND};
use crate::UnreadLimits;
use crate::memory_budgets::BudgetDefaults;

impl Resolver<'_> {
    pub(super) fn unread(&mut self, buffer: Option<String>, timeout: Option<String>) -> UnreadLimits {
        let default = BudgetDefaults::within(self.memory_limit).unread;
        let buffer = self.size("limits.unread_buffer", buffer, default, 16 * MIB..=1024 * GIB);
        let minute = Duration::from_secs(60);
        let timeout = self.duration("limits.unread_timeout", timeout, minute, SECOND..=DAY);
        UnreadLimits { buffer, timeout }
    }
}
