//! The names of Keyward's modules, as operators write and read them: `keyward::upstream::pool`.
//!
//! Owns: the path of each top module, and the name that a record shows for a path. Must not know: levels,
//! formats.
//! Invariant: the name of a module does not tell in which package the module is.

use std::fmt;

/// The top modules of Keyward: the name below `keyward::`, and the path in the code.
pub(super) const MODULES: &[(&str, &str)] = &[
    ("admin", "keyward_operations::admin"),
    ("app", "keyward::app"),
    ("audit", "keyward_records::audit"),
    ("authority", "keyward_config::authority"),
    ("byte_account", "keyward_base::byte_account"),
    ("config", "keyward_config"),
    ("credentials", "keyward_upstream::credentials"),
    ("dial", "keyward_dial"),
    ("downstream", "keyward_downstream"),
    ("gateway", "keyward_gateway"),
    ("identity", "keyward_etcd::identity"),
    ("io", "keyward_base::io"),
    ("jwt", "keyward_config::jwt"),
    ("lease", "keyward_streams::lease"),
    ("members", "keyward_cluster"),
    ("otlp", "keyward_records::otlp"),
    ("own_keys", "keyward_upstream::own_keys"),
    ("pb", "keyward_etcd::pb"),
    ("pem", "keyward_base::pem"),
    ("policy", "keyward_access::policy"),
    ("policy_store", "keyward_operations::policy_store"),
    ("published", "keyward_base::published"),
    ("refusal", "keyward_etcd::refusal"),
    ("reload", "keyward::reload"),
    ("rest", "keyward_rest"),
    ("revocation", "keyward_operations::revocation"),
    ("rpc", "keyward_etcd::rpc"),
    ("secret", "keyward_base::secret"),
    ("shard", "keyward_base::shard"),
    ("tasks", "keyward_base::tasks"),
    ("telemetry", "keyward_telemetry"),
    ("trust", "keyward_config::trust"),
    ("upstream", "keyward_upstream"),
    ("usage", "keyward_access::usage"),
    ("users", "keyward_config::users"),
    ("wall_deadline", "keyward_base::wall_deadline"),
    ("watch", "keyward_streams::watch"),
];

/// The target of a record as it is shown: `keyward_upstream::pool` is `keyward::upstream::pool`. Any other
/// target is shown as it is.
#[derive(Clone, Copy, Debug)]
pub(super) struct ShownTarget<'a> {
    module: Option<&'static str>,
    rest: &'a str,
}

impl<'a> ShownTarget<'a> {
    pub(super) fn of(target: &'a str) -> Self {
        if !target.starts_with("keyward_") {
            return Self { module: None, rest: target };
        }
        let below =
            |path: &str| target.strip_prefix(path).filter(|rest| rest.is_empty() || rest.starts_with("::"));
        let rows = MODULES.iter().filter_map(|(module, path)| Some((*module, path.len(), below(path)?)));
        match rows.max_by_key(|(_, length, _)| *length) {
            Some((module, _, rest)) => Self { module: Some(module), rest },
            None => Self { module: None, rest: target },
        }
    }

    /// True for a record of Keyward's own code, access records included.
    pub(super) fn is_own(self) -> bool {
        self.module.is_some() || self.rest == "keyward" || self.rest.starts_with("keyward::")
    }

    /// Adds the name to a line.
    pub(super) fn push_to(self, line: &mut String) {
        if let Some(module) = self.module {
            line.push_str("keyward::");
            line.push_str(module);
        }
        line.push_str(self.rest);
    }
}

impl fmt::Display for ShownTarget<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut name = String::new();
        self.push_to(&mut name);
        f.write_str(&name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The face of the library names every top module, by the package that has it.
    #[test]
    fn the_modules_are_those_of_the_library() {
        let mut found = Vec::new();
        for line in include_str!("../../lib.rs").lines() {
            if let Some(module) = line.strip_prefix("pub mod ").and_then(|line| line.strip_suffix(';')) {
                found.push((module.to_owned(), format!("keyward::{module}")));
            }
            let Some(used) = line.strip_prefix("pub use ").and_then(|line| line.strip_suffix(';')) else {
                continue;
            };
            match used.split_once(" as ") {
                Some((package, module)) => found.push((module.to_owned(), package.to_owned())),
                None => {
                    let (package, modules) = used.split_once("::").expect("modules of a package");
                    let modules = modules.trim_matches(['{', '}']).split(", ");
                    found.extend(modules.map(|module| (module.to_owned(), format!("{package}::{module}"))));
                }
            }
        }
        found.sort();
        let listed: Vec<_> =
            MODULES.iter().map(|(module, path)| ((*module).to_owned(), (*path).to_owned())).collect();
        assert_eq!(found, listed);
    }

    #[test]
    fn a_record_is_shown_with_the_name_of_its_module() {
        for (target, shown) in [
            ("keyward_upstream::pool", "keyward::upstream::pool"),
            ("keyward_upstream::credentials::control", "keyward::credentials::control"),
            ("keyward_upstream::credentials_of_others", "keyward::upstream::credentials_of_others"),
            ("keyward_cluster", "keyward::members"),
            ("keyward_streams::watch::hub", "keyward::watch::hub"),
            ("keyward::app::listeners", "keyward::app::listeners"),
            ("keyward::access", "keyward::access"),
            ("keyward", "keyward"),
            ("h2::codec", "h2::codec"),
            ("keyward_of_others::x", "keyward_of_others::x"),
        ] {
            assert_eq!(ShownTarget::of(target).to_string(), shown);
            assert_eq!(
                ShownTarget::of(target).is_own(),
                shown == "keyward" || shown.starts_with("keyward::"),
                "{target}"
            );
        }
    }
}
