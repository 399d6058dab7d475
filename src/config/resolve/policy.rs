//! Resolves the section `[policy]`.
//!
//! Owns: the defaults. Must not know: further sections.

use crate::config::toml_file::{TomlPolicy, TomlRequireIdentity};
use crate::config::{PolicySettings, RequireIdentity};

pub(super) fn policy(policy: &TomlPolicy) -> PolicySettings {
    let require_identity = match policy.require_identity {
        None | Some(TomlRequireIdentity::Strict) => RequireIdentity::Strict,
        Some(TomlRequireIdentity::AsEtcd) => RequireIdentity::AsEtcd,
    };
    PolicySettings { require_identity }
}
