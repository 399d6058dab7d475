//! The mirror of limits on usage, key by key.
//!
//! Owns: the names of keys and the TOML types of values. Must not know: defaults, meanings, other keys.

use serde::Deserialize;

#[derive(Debug, Default, Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(deny_unknown_fields, default)]
pub(super) struct TomlUsageLimits {
    pub(super) calls_per_second: Option<u32>,
    pub(super) burst: Option<u32>,
    pub(super) calls_in_flight: Option<u32>,
    pub(super) watches: Option<u32>,
    pub(super) leases: Option<u32>,
    pub(super) request_bytes_per_second: Option<String>,
    pub(super) reply_bytes_per_second: Option<String>,
    pub(super) keys_per_range: Option<u32>,
    pub(super) bytes_per_answer: Option<String>,
    pub(super) on_exceed: Option<TomlOnExceed>,
    pub(super) priority: Option<TomlPriority>,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(rename_all = "lowercase")]
pub(super) enum TomlOnExceed {
    Refuse,
    Page,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(rename_all = "lowercase")]
pub(super) enum TomlPriority {
    Low,
    Normal,
    High,
}
