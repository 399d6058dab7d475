//! Settings outside the files: environment variables and flags of the command line.
//!
//! Owns: the mapping of variable names to keys, and the reading of their values. Must not know: the files,
//! the meaning of any key. Invariants: a variable with the prefix is a key, reserved, or a fault with the
//! nearest key, never ignored in silence; a value never stands in a fault of this module.

use std::collections::BTreeSet;
use std::ffi::OsString;

use serde::Deserialize as _;
use toml::Value;
use toml::de::{DeValue, Deserializer};

use super::findings::ConfigFindings;
use super::known_keys::{KeyStep, known_keys, nearest, no_key, steps_of_path, with_first_rows};
use super::setting_place::SettingSource;
use super::toml_file::TomlFile;

/// The beginning of every variable of Keyward.
const PREFIX: &str = "KEYWARD_";
/// Variables with another meaning: of the command line, the tests and the demo.
const RESERVED: [&str; 4] = ["KEYWARD_CONFIG", "KEYWARD_BIN", "KEYWARD_SEED", "KEYWARD_SEEDS"];
/// Beginnings of variables of the tests.
const RESERVED_PREFIXES: [&str; 3] = ["KEYWARD_TEST_", "KEYWARD_CHAOS_", "KEYWARD_FUZZ_"];

/// A flag of the command line with the value of one key.
#[derive(Clone, Debug)]
pub struct FlagSetting {
    /// The flag, as in `--listen`.
    pub flag: &'static str,
    /// The key, as in `listener[0].address`.
    pub key: &'static str,
    /// The value, as in a variable.
    pub value: String,
    /// True if a value from another source is kept.
    pub yields: bool,
}

/// A key with its value as TOML.
pub(super) struct OuterSetting {
    pub(super) source: SettingSource,
    pub(super) steps: Vec<KeyStep>,
    pub(super) value: String,
    pub(super) yields: bool,
}

/// The settings of all variables, in the order of the keys. Adds a fault for each variable without a key.
pub(super) fn of_variables(
    variables: &[(String, OsString)],
    findings: &mut ConfigFindings,
) -> Vec<OuterSetting> {
    let mut settings = Vec::new();
    let mut known = None;
    for (name, value) in variables.iter().filter(|(name, _)| is_setting(name)) {
        let known =
            known.get_or_insert_with(|| known_keys::<TomlFile>().into_iter().collect::<BTreeSet<_>>());
        let steps = steps_of(name);
        if !known.contains(&with_first_rows(&steps)) || name_of(&steps) != *name {
            let nearest = nearest(&steps, &*known).map(|(key, _)| name_of(&key));
            findings.fault_at(name, None, no_key(nearest.as_deref()));
            continue;
        }
        match value.to_str() {
            Some(text) => settings.push(OuterSetting {
                value: toml_of(&steps, text),
                steps,
                source: SettingSource::Variable(name.clone()),
                yields: false,
            }),
            None => findings.fault_at(name, None, "the value is not UTF-8"),
        }
    }
    settings.sort_by(|one, other| one.steps.cmp(&other.steps));
    settings
}

/// The setting of a flag.
pub(super) fn of_flag(setting: &FlagSetting) -> OuterSetting {
    let steps = steps_of_path(setting.key);
    OuterSetting {
        value: toml_of(&steps, &setting.value),
        steps,
        source: SettingSource::Flag(setting.flag),
        yields: setting.yields,
    }
}

/// True if the variable is meant as a key.
pub(super) fn is_setting(name: &str) -> bool {
    let reserved =
        RESERVED.contains(&name) || RESERVED_PREFIXES.iter().any(|prefix| name.starts_with(prefix));
    name.starts_with(PREFIX) && !reserved && !is_service_link(name)
}

/// True for a variable that Kubernetes sets in every pod beside a Service with a name like "keyward" or
/// "keyward-admin" (kubernetes/pkg/kubelet/envvars/envvars.go). A key has two underscores in a row, and such
/// a variable has none.
fn is_service_link(name: &str) -> bool {
    let has_port = |(_, port): (&str, &str)| port.starts_with(|first: char| first.is_ascii_digit());
    !name.contains("__")
        && (name.ends_with("_SERVICE_HOST")
            || name.contains("_SERVICE_PORT")
            || name.ends_with("_PORT")
            || name.split_once("_PORT_").is_some_and(has_port))
}

/// The steps named by a variable: `__` separates the steps, a number is a row.
fn steps_of(name: &str) -> Vec<KeyStep> {
    let parts = name.strip_prefix(PREFIX).unwrap_or(name).split("__");
    let step = |part: &str| match part.parse() {
        Ok(row) => KeyStep::Row(row),
        Err(_) => KeyStep::Key(part.to_ascii_lowercase()),
    };
    parts.map(step).collect()
}

/// The variable of a key.
pub(super) fn name_of(steps: &[KeyStep]) -> String {
    let part = |step: &KeyStep| match step {
        KeyStep::Key(key) => key.to_ascii_uppercase(),
        KeyStep::Row(row) => row.to_string(),
    };
    format!("{PREFIX}{}", steps.iter().map(part).collect::<Vec<_>>().join("__"))
}

/// The value of a variable or flag as TOML: the text itself if the key takes a text; else the value written
/// as TOML; else a list of texts, separated by commas. A text that fits in no way stays a text, and becomes a
/// fault of its type later.
fn toml_of(steps: &[KeyStep], text: &str) -> String {
    let quoted = |text: &str| Value::String(text.to_owned()).to_string();
    let list = || {
        let parts = text.split(',').map(str::trim).filter(|part| !part.is_empty());
        format!("[{}]", parts.map(quoted).collect::<Vec<_>>().join(", "))
    };
    let as_written = || DeValue::parse(text).is_ok().then(|| text.to_owned());
    let candidates: [&dyn Fn() -> Option<String>; 3] =
        [&|| Some(quoted(text)), &as_written, &|| Some(list())];
    let fitting = candidates.iter().filter_map(|candidate| candidate()).find(|value| fits(steps, value));
    fitting.unwrap_or_else(|| quoted(text))
}

/// True if the mirror takes the value at this key.
fn fits(steps: &[KeyStep], value: &str) -> bool {
    let text = as_file(steps, value);
    Deserializer::parse(&text).and_then(TomlFile::deserialize).is_ok()
}

/// The text of a file with one key.
pub(super) fn as_file(steps: &[KeyStep], value: &str) -> String {
    let nest = |inner: String, (at, step): (usize, &KeyStep)| match step {
        KeyStep::Row(_) => format!("[{inner}]"),
        KeyStep::Key(key) if at == 0 => format!("{key} = {inner}"),
        KeyStep::Key(key) => format!("{{ {key} = {inner} }}"),
    };
    steps.iter().enumerate().rev().fold(value.to_owned(), nest)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn faults(name: &str) -> String {
        let mut findings = ConfigFindings::default();
        let settings = of_variables(&[(name.to_owned(), "hunter2".into())], &mut findings);
        assert!(settings.is_empty(), "{name}");
        let told = findings.conclude(None::<()>).unwrap_err().to_string();
        assert!(!told.contains("hunter2"), "{told}");
        told
    }

    #[test]
    fn a_variable_without_a_key_is_a_fault_with_the_nearest_key() {
        for (name, nearest) in [
            ("KEYWARD_CLUSTER__ENDPOINT", "KEYWARD_CLUSTER__ENDPOINTS"),
            ("KEYWARD_CLUSTER_ENDPOINTS", "KEYWARD_CLUSTER__ENDPOINTS"),
            ("KEYWARD_CLUSTR__TOKEN_TTL", "KEYWARD_CLUSTER__TOKEN_TTL"),
            ("KEYWARD_cluster__endpoints", "KEYWARD_CLUSTER__ENDPOINTS"),
            ("KEYWARD_CLUSTER__PROBE__PASSWORD", "KEYWARD_CLUSTER__PROBE__PASSWORD_FILE"),
            ("KEYWARD_LISTENER__3__ADRESS", "KEYWARD_LISTENER__3__ADDRESS"),
            ("KEYWARD_LISTENER__ADDRESS", "KEYWARD_LISTENER__0__ADDRESS"),
            ("KEYWARD_LISTENER__0__TLS__CRT", "KEYWARD_LISTENER__0__TLS__CERT"),
        ] {
            let expected = format!("{name}: names no key; the nearest is {nearest}");
            assert_eq!(faults(name), expected);
        }
    }

    #[test]
    fn variables_of_others_are_no_keys() {
        for name in [
            "KEYWARD_CONFIG",
            "KEYWARD_TEST_FULL",
            "KEYWARD_SEED",
            "KEYWARDEN_CLUSTER__ENDPOINTS",
            // A Service "keyward" and a Service "keyward-admin", with named ports.
            "KEYWARD_SERVICE_HOST",
            "KEYWARD_SERVICE_PORT",
            "KEYWARD_SERVICE_PORT_CLIENTS",
            "KEYWARD_PORT",
            "KEYWARD_PORT_2379_TCP",
            "KEYWARD_PORT_2379_TCP_ADDR",
            "KEYWARD_ADMIN_PORT_2389_TCP_PROTO",
        ] {
            assert!(!is_setting(name), "{name}");
        }
        assert!(is_setting("KEYWARD_ADMIN_SOCKET"));
        assert!(known_keys::<TomlFile>().iter().all(|key| is_setting(&name_of(key))));
    }

    #[test]
    fn a_value_takes_the_type_of_its_key() {
        let toml = |name: &str, text: &str| toml_of(&steps_of(name), text);
        assert_eq!(toml("KEYWARD_LISTENER__0__NAME", "7"), "\"7\"");
        assert_eq!(toml("KEYWARD_LIMITS__CONNECTIONS", "7"), "7");
        assert_eq!(toml("KEYWARD_LISTENER__0__REST", "false"), "false");
        assert_eq!(toml("KEYWARD_CLUSTER__NEAR", "true, b"), "[\"true\", \"b\"]");
        assert_eq!(toml("KEYWARD_CLUSTER__NEAR", "['a,b']"), "['a,b']");
        assert_eq!(toml("KEYWARD_REST__CORS", ""), "[]");
        assert_eq!(toml("KEYWARD_LISTENER__1__IDENTIFY", "token,jwt"), "[\"token\", \"jwt\"]");
        assert_eq!(toml("KEYWARD_MAP__0__CLAIM", "{ a = 'b' }"), "{ a = 'b' }");
        assert_eq!(toml("KEYWARD_LIMITS__CONNECTIONS", "1\n[x]"), "\"\"\"\n1\n[x]\"\"\"", "one text");
    }
}
