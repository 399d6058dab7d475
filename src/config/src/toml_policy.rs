//! The mirror of a policy file, key by key.
//!
//! Owns: the names of keys and the TOML types of values. Must not know: defaults, meanings, other keys.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::toml_file::{TomlPolicyMode, some_table, tables};
use super::toml_limits::TomlUsageLimits;

/// The whole policy file.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct TomlPolicyFile {
    #[serde(deserialize_with = "tables")]
    pub(super) role: Vec<TomlRole>,
    #[serde(deserialize_with = "tables")]
    pub(super) group: Vec<TomlGroup>,
    #[serde(deserialize_with = "tables")]
    pub(super) binding: Vec<TomlBinding>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct TomlRole {
    pub(super) name: Option<String>,
    #[serde(deserialize_with = "tables")]
    pub(super) allow: Vec<TomlGrant>,
    #[serde(deserialize_with = "tables")]
    pub(super) deny: Vec<TomlGrant>,
    #[serde(deserialize_with = "some_table")]
    pub(super) limits: Option<TomlUsageLimits>,
    #[serde(deserialize_with = "some_table")]
    pub(super) total_limits: Option<TomlUsageLimits>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct TomlGrant {
    pub(super) actions: Option<Vec<String>>,
    pub(super) key: Option<String>,
    pub(super) prefix: Option<String>,
    #[serde(deserialize_with = "some_table")]
    pub(super) range: Option<TomlRange>,
    pub(super) everything: Option<bool>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct TomlRange {
    pub(super) from: Option<String>,
    pub(super) to: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct TomlGroup {
    pub(super) name: Option<String>,
    pub(super) members: Option<Vec<String>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct TomlBinding {
    pub(super) roles: Option<Vec<String>>,
    pub(super) everyone: Option<bool>,
    pub(super) peer: Option<String>,
    pub(super) san_uri: Option<String>,
    pub(super) san_dns: Option<String>,
    pub(super) issuer: Option<String>,
    pub(super) claim: Option<BTreeMap<String, String>>,
    pub(super) network: Option<String>,
    pub(super) group: Option<String>,
    pub(super) etcd_user: Option<String>,
    pub(super) listener: Option<String>,
    pub(super) namespace: Option<String>,
    pub(super) until: Option<String>,
    pub(super) mode: Option<TomlPolicyMode>,
}
