//! The mirror of `[trace]`, key by key.
//!
//! Owns: the names of keys and the TOML types of values. Must not know: defaults, meanings, other keys.

use serde::Deserialize;

#[derive(Debug, Default, Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(deny_unknown_fields, default)]
pub(super) struct TomlTrace {
    pub(super) url: Option<String>,
    pub(super) ca: Option<String>,
    pub(super) cert: Option<String>,
    pub(super) key: Option<String>,
    pub(super) headers_file: Option<String>,
    pub(super) queue: Option<String>,
    pub(super) sample: Option<f64>,
    pub(super) follow_parent: Option<bool>,
    pub(super) parents_per_second: Option<u32>,
    pub(super) identities: Option<bool>,
}
