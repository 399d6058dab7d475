//! The mirror of `[rest]`, key by key.
//!
//! Owns: the names of keys and the TOML types of values. Must not know: defaults, meanings, other keys.

use serde::Deserialize;

#[derive(Debug, Default, Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(deny_unknown_fields, default)]
pub(super) struct TomlRest {
    pub(super) style: Option<TomlRestStyle>,
    pub(super) cors: Option<Vec<String>>,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
pub(super) enum TomlRestStyle {
    #[serde(rename = "auto")]
    Auto,
    #[serde(rename = "3.4")]
    Etcd34,
    #[serde(rename = "3.5")]
    Etcd35,
    #[serde(rename = "3.6")]
    Etcd36,
}
