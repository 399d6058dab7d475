//! The sources of a configuration, merged into one: the file with its included files, the environment, the
//! flags.
//!
//! Owns: the precedence. Must not know: the meaning of any key but `include`. Invariants: a flag wins over a
//! variable, a variable over a file; two files never set the same key, so no file overrides another in
//! silence; every check of a file applies to the merged configuration, and a fault names its source.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::ops::Range;
use std::path::{Path, PathBuf};

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::environment::{self, OuterSetting};
use super::findings::{ConfigFaults, ConfigFindings, ConfigWarning};
use super::known_keys::KeyStep;
use super::source_text::{INCLUDE, SourceTexts};
use super::toml_file::TomlFile;
use super::toml_parse::{join, read_table};
use super::{Config, resolve};
use keyward_base::io::memory_limit;

pub use super::environment::FlagSetting;

/// The sources of a configuration. A reload reads the files again; variables and flags stay as at the start.
#[derive(Clone, Default)]
pub struct ConfigSources {
    file: Option<PathBuf>,
    variables: Vec<(String, OsString)>,
    flags: Vec<FlagSetting>,
}

/// The merged sources.
struct MergedSources {
    /// `None` if a file cannot be read.
    file: Option<TomlFile>,
    findings: ConfigFindings,
    /// The included files.
    files: BTreeSet<PathBuf>,
    /// Identifies the texts of all sources.
    digest: String,
}

/// Reads the configuration file and all files named in it, without the environment.
///
/// # Errors
/// All faults at once.
pub fn load(path: &Path) -> Result<(Config, Vec<ConfigWarning>), ConfigFaults> {
    ConfigSources::of_file(Some(path.to_owned())).load()
}

impl ConfigSources {
    /// The sources of a configuration with this file only.
    #[must_use]
    pub fn of_file(file: Option<PathBuf>) -> Self {
        Self { file, ..Self::default() }
    }

    /// Adds the variables of the environment that are meant for Keyward.
    #[must_use]
    pub fn with_environment(mut self, all: impl Iterator<Item = (OsString, OsString)>) -> Self {
        let named = all.filter_map(|(name, value)| Some((name.into_string().ok()?, value)));
        self.variables.extend(named.filter(|(name, _)| environment::is_setting(name)));
        self
    }

    /// Adds flags of the command line.
    #[must_use]
    pub fn with_flags(mut self, flags: Vec<FlagSetting>) -> Self {
        self.flags.extend(flags);
        self
    }

    /// The configuration file, if any.
    #[must_use]
    pub fn file(&self) -> Option<&Path> {
        self.file.as_deref()
    }

    /// The value of a variable.
    pub(super) fn variable(&self, name: &str) -> Option<&OsString> {
        self.variables.iter().find(|(known, _)| known == name).map(|(_, value)| value)
    }

    /// Reads all sources, and all files named in them. Relative file names are relative to the folder of the
    /// file that names them; in variables and flags, to the working directory.
    ///
    /// # Errors
    /// All faults at once.
    pub fn load(&self) -> Result<(Config, Vec<ConfigWarning>), ConfigFaults> {
        let MergedSources { file, findings, files, digest } = self.merge();
        let folder = self.file.as_deref().and_then(Path::parent).unwrap_or(Path::new(""));
        resolve::resolve(file, findings, folder, files, &digest, memory_limit::of_process())
    }

    /// The mirror of all sources, and the findings so far.
    #[cfg(test)]
    pub(super) fn mirror(&self) -> (Option<TomlFile>, ConfigFindings) {
        let MergedSources { file, findings, .. } = self.merge();
        (file, findings)
    }

    fn merge(&self) -> MergedSources {
        let mut findings = ConfigFindings::default();
        let mut texts = SourceTexts::default();
        let mut settings = environment::of_variables(&self.variables, &mut findings);
        settings.extend(self.flags.iter().map(environment::of_flag));
        // The short texts come first, since each text is padded by the texts before.
        for setting in &settings {
            texts.add(setting.source.clone(), &environment::as_file(&setting.steps, &setting.value));
        }
        let is_readable = self.file.as_deref().is_none_or(|path| texts.add_files(path, &mut findings));
        let mut merged = DeTable::new();
        let mut is_toml = true;
        for text in texts.iter().skip(settings.len()) {
            let (table, broken) = DeTable::parse_recoverable(&text.text);
            for error in &broken {
                is_toml = false;
                findings.fault_at("", error.span().map(|span| texts.place(span.start)), error.message());
            }
            let mut table = table.into_inner();
            table.remove(INCLUDE);
            merge(&mut merged, table, "", &texts, &mut findings);
        }
        for (setting, text) in settings.iter().zip(texts.iter()) {
            apply(&mut merged, setting, &text.text, &texts, &mut findings);
        }
        // The remainder of invalid TOML tells nothing, and keys of an unreadable file would look missing.
        let (file, findings) = match is_toml {
            true => read_table(merged, &|at| texts.place(at), findings),
            false => (None, findings),
        };
        let file = file.filter(|_| is_readable);
        let digest = texts.digest();
        let files = texts.included_files().map(Path::to_owned).collect();
        MergedSources { file, findings, files, digest }
    }
}

/// Merges the table of a further file. Rows of arrays of tables follow the rows of earlier files; any other
/// key is a fault in a second file.
fn merge<'i>(
    merged: &mut DeTable<'i>,
    further: DeTable<'i>,
    path: &str,
    texts: &SourceTexts,
    findings: &mut ConfigFindings,
) {
    let is_rows = |array: &[Spanned<DeValue<'_>>]| array.iter().all(|row| row.get_ref().is_table());
    for (key, value) in further {
        let path = join(path, key.get_ref());
        let Some(present) = merged.get_mut(&**key.get_ref()) else {
            merged.insert(key, value);
            continue;
        };
        let before = present.span().start;
        match (present.get_mut(), value.into_inner()) {
            (DeValue::Table(present), DeValue::Table(further)) => {
                merge(present, further, &path, texts, findings);
            }
            (DeValue::Array(present), DeValue::Array(further))
                if !further.is_empty() && is_rows(present) && is_rows(&further) =>
            {
                for row in further {
                    present.push(row);
                }
            }
            _ => {
                let other = texts.place(before);
                let reason = format!("is set twice, first at {other}; one file only may set a key");
                findings.fault_at(&path, Some(texts.place(key.span().start)), reason);
            }
        }
    }
}

/// Sets the key of a variable or flag. `text` is the file with this key alone.
fn apply<'i>(
    merged: &mut DeTable<'i>,
    setting: &OuterSetting,
    text: &'i str,
    texts: &SourceTexts,
    findings: &mut ConfigFindings,
) {
    let (table, _valid) = DeTable::parse_recoverable(text);
    let Some((value, at)) = value_at(table.into_inner(), &setting.steps) else { return };
    if let Err(rows) = set(merged, &setting.steps, value, &at, setting.yields) {
        let path = setting.steps.iter().find_map(|step| match step {
            KeyStep::Key(key) => Some(&**key),
            KeyStep::Row(_) => None,
        });
        let reason = format!("has {rows} rows, so the next row is number {rows}");
        findings.fault_at(path.unwrap_or_default(), Some(texts.place(at.start)), reason);
    }
}

/// The value at `steps`, and the position of its outermost key.
fn value_at<'i>(table: DeTable<'i>, steps: &[KeyStep]) -> Option<(Spanned<DeValue<'i>>, Range<usize>)> {
    let at = table.keys().next()?.span();
    let mut value = Spanned::new(at.clone(), DeValue::Table(table));
    for step in steps {
        value = match (value.into_inner(), step) {
            (DeValue::Table(mut table), KeyStep::Key(key)) => table.remove(key.as_str())?,
            (DeValue::Array(rows), KeyStep::Row(_)) => rows.into_iter().next()?,
            _ => return None,
        };
    }
    Some((value, at))
}

/// Sets the value at `steps`. Fails with the number of rows if a row before the named one is missing. Leaves
/// everything as it is where a file has another type, which is a fault of the file.
fn set<'i>(
    table: &mut DeTable<'i>,
    steps: &[KeyStep],
    value: Spanned<DeValue<'i>>,
    at: &Range<usize>,
    yields: bool,
) -> Result<(), usize> {
    let key = |name: &String| Spanned::new(at.clone(), std::borrow::Cow::Owned(name.clone()));
    let inner = |value| Spanned::new(at.clone(), value);
    match steps {
        [KeyStep::Key(name)] if yields && table.contains_key(name.as_str()) => {}
        [KeyStep::Key(name)] => {
            // Removed first: `insert` alone would keep the place of the former key.
            table.remove(name.as_str());
            table.insert(key(name), value);
        }
        [KeyStep::Key(name), KeyStep::Row(row), steps @ ..] => {
            if !table.contains_key(name.as_str()) {
                table.insert(key(name), inner(DeValue::Array(toml::de::DeArray::new())));
            }
            let present = table.get_mut(name.as_str()).map(Spanned::get_mut);
            let Some(DeValue::Array(rows)) = present else { return Ok(()) };
            if *row == rows.len() {
                rows.push(inner(DeValue::Table(DeTable::new())));
            } else if *row > rows.len() {
                return Err(rows.len());
            }
            if let Some(DeValue::Table(table)) = rows.get_mut(*row).map(Spanned::get_mut) {
                return set(table, steps, value, at, yields);
            }
        }
        [KeyStep::Key(name), steps @ ..] => {
            if !table.contains_key(name.as_str()) {
                table.insert(key(name), inner(DeValue::Table(DeTable::new())));
            }
            if let Some(DeValue::Table(table)) = table.get_mut(name.as_str()).map(Spanned::get_mut) {
                return set(table, steps, value, at, yields);
            }
        }
        _ => {}
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Address;

    /// A folder with these files, and the configuration of its `keyward.toml`.
    fn sources(files: &[(&str, &str)], variables: &[(&str, &str)]) -> (tempfile::TempDir, ConfigSources) {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = folder.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        let file = (!files.is_empty()).then(|| folder.path().join("keyward.toml"));
        let variables = variables.iter().map(|(name, value)| (name.into(), value.into()));
        (folder, ConfigSources::of_file(file).with_environment(variables))
    }

    fn faults(files: &[(&str, &str)], variables: &[(&str, &str)]) -> Vec<String> {
        let (folder, sources) = sources(files, variables);
        let faults = sources.load().map(|_| ()).unwrap_err();
        let folder = format!("{}/", folder.path().display());
        faults.iter().map(|fault| fault.to_string().replace(&folder, "")).collect()
    }

    fn flag(flag: &'static str, key: &'static str, value: &str) -> FlagSetting {
        FlagSetting { flag, key, value: value.to_owned(), yields: key.ends_with("name") }
    }

    const MAIN: &str = "[[listener]]\nname = 'a'\naddress = '127.0.0.1:1'\n\
                        [cluster]\nendpoints = ['http://127.0.0.1:2']\n";

    #[test]
    fn a_flag_wins_over_a_variable_and_a_variable_over_a_file() {
        let (_folder, sources) = sources(
            &[("keyward.toml", &format!("{MAIN}token_ttl = '1s'\n[watch]\nbuffer = '1MiB'\n"))],
            &[
                ("KEYWARD_CLUSTER__TOKEN_TTL", "2s"),
                ("KEYWARD_CLUSTER__ENDPOINTS", "http://127.0.0.1:3,http://127.0.0.1:4"),
                ("KEYWARD_LISTENER__1__NAME", "b"),
                ("KEYWARD_LISTENER__1__ADDRESS", "127.0.0.1:5"),
            ],
        );
        let (config, _) = sources.load().unwrap();
        assert_eq!((config.cluster.token_ttl.as_secs(), config.watch.buffer), (2, 1 << 20));
        assert_eq!(config.cluster.endpoints.len(), 2);
        assert_eq!(&*config.listeners[1].name, "b");

        let flags = vec![
            flag("--endpoints", "cluster.endpoints", "http://127.0.0.1:6"),
            flag("--listen", "listener[0].address", "127.0.0.1:7"),
            flag("--listen", "listener[0].name", "clients"),
        ];
        let (config, _) = sources.with_flags(flags).load().unwrap();
        assert_eq!(config.cluster.endpoints[0].to_string(), "http://127.0.0.1:6");
        assert_eq!(config.cluster.endpoints.len(), 1);
        assert_eq!(config.listeners[0].address, Address::Tcp("127.0.0.1:7".parse().unwrap()));
        assert_eq!((&*config.listeners[0].name, config.listeners.len()), ("a", 2));
        assert_eq!(config.cluster.token_ttl.as_secs(), 2);
    }

    #[test]
    fn flags_alone_are_a_configuration() {
        let flags = vec![
            flag("--endpoints", "cluster.endpoints", "http://127.0.0.1:6"),
            flag("--listen", "listener[0].address", "127.0.0.1:7"),
            flag("--listen", "listener[0].name", "clients"),
        ];
        let (config, _) = ConfigSources::default().with_flags(flags).load().unwrap();
        assert_eq!(&*config.listeners[0].name, "clients");
    }

    /// Each fault names the file and line, the variable or the flag that it stands in.
    #[test]
    fn a_fault_names_its_source() {
        let files = [
            ("keyward.toml", "include = ['more/users.toml']\nlog.level = 'loud'\n"),
            ("more/users.toml", "\n[[user]]\nname = 'app'\npassword_file = 'absent'\n"),
        ];
        let variables = [
            ("KEYWARD_LIMITS__CONNECTIONS", "many"),
            ("KEYWARD_LISTENER__1__NAME", "b"),
            ("KEYWARD_CLUSTER__TOKEN_TTL", "soon"),
        ];
        let (folder, sources) = sources(&files, &variables);
        let sources =
            sources.with_flags(vec![flag("--endpoints", "cluster.endpoints", "http://a:1,https://")]);
        let folder = format!("{}/", folder.path().display());
        let faults = sources.load().map(|_| ()).unwrap_err().to_string().replace(&folder, "");
        let expected = [
            "log.level: ",
            " (line 2)",
            "user[0].password_file: cannot read more/absent",
            " (line 4 of more/users.toml)",
            "cluster.token_ttl: ",
            " (environment variable KEYWARD_CLUSTER__TOKEN_TTL)",
            "limits.connections: ",
            " (environment variable KEYWARD_LIMITS__CONNECTIONS)",
            "listener: has 0 rows, so the next row is number 0",
            " (environment variable KEYWARD_LISTENER__1__NAME)",
            "cluster.endpoints[1]: ",
            " (flag --endpoints)",
        ];
        let lines: Vec<&str> = faults.lines().collect();
        assert_eq!(lines.len() * 2, expected.len(), "{faults}");
        for ends in expected.chunks(2) {
            assert!(
                lines.iter().any(|line| line.starts_with(ends[0]) && line.contains(ends[1])),
                "{ends:?} in {faults}"
            );
        }
        assert!(!faults.contains("many"), "{faults}");
    }

    #[test]
    fn rows_of_included_files_follow_and_names_are_relative_to_their_file() {
        let files = [
            ("keyward.toml", &*format!("include = ['more/users.toml', 'listener.toml']\n{MAIN}")),
            ("more/users.toml", "include = ['deep.toml']\n[[user]]\nname='x'\npassword_file = 'pw'\n"),
            ("more/deep.toml", "[cluster]\ntoken_ttl = '7s'\n"),
            ("more/pw", "hunter2"),
            ("listener.toml", "[[listener]]\nname = 'b'\naddress = '127.0.0.1:5'\n"),
        ];
        let (folder, sources) = sources(&files, &[]);
        let (config, _) = sources.load().unwrap();
        assert_eq!(config.cluster.token_ttl.as_secs(), 7);
        assert_eq!(config.listeners.iter().map(|row| &*row.name).collect::<Vec<_>>(), ["a", "b"]);
        let watched = |name| config.files.contains(&folder.path().join(name));
        assert!(["more/users.toml", "more/deep.toml", "listener.toml", "more/pw"].iter().all(watched));
    }

    #[test]
    fn an_included_file_overrides_nothing_and_includes_nothing_twice() {
        let twice = faults(
            &[
                ("keyward.toml", &*format!("include = ['a.toml', 'a.toml', 'none.toml', 'b.toml']\n{MAIN}")),
                ("a.toml", "include = 'keyward.toml'\n[cluster]\nendpoints = ['http://127.0.0.1:9']\n"),
                ("b.toml", "include = ['keyward.toml']\n"),
            ],
            &[],
        );
        let expected = [
            "include: a.toml is read already; a file is included once, and never includes itself (line 1)",
            "include: cannot read none.toml: No such file or directory (os error 2) (line 1)",
            "include: must be an array of file names, as in include = [\"listeners.toml\"] \
             (line 1 of a.toml)",
            "cluster.endpoints: is set twice, first at line 6; one file only may set a key \
             (line 3 of a.toml)",
            "include: keyward.toml is read already; a file is included once, and never includes itself \
             (line 1 of b.toml)",
        ];
        assert_eq!(twice, expected);
        let broken = faults(&[("keyward.toml", "include = ['a.toml']\n"), ("a.toml", "x = = 1\n")], &[]);
        assert!(broken[0].ends_with("(line 1 of a.toml)"), "{broken:?}");
    }

    #[test]
    fn a_misspelt_variable_is_a_fault_beside_the_others() {
        let told =
            faults(&[("keyward.toml", &format!("{MAIN}tokenttl = 1\n"))], &[("KEYWARD_LOG__LEVL", "x")]);
        assert!(told[0].starts_with("cluster.tokenttl: "), "{told:?}");
        let expected = "KEYWARD_LOG__LEVL: names no key; the nearest is KEYWARD_LOG__LEVEL";
        assert!(told.iter().any(|fault| fault == expected), "{told:?}");
    }
}
