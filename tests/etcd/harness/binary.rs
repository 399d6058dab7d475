//! Which etcd versions a run covers, and where their programs are.
//!
//! Owns: reading `tests/versions.toml`, finding a version in the cache of `tests/get-etcd`. Must not know how a version is fetched or run.

use std::{
    collections::HashMap,
    env, fmt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::Mutex,
};

use futures_util::future::join_all;
use serde::Deserialize;

/// A pinned etcd version, such as 3.5.1.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Version(Vec<u32>);

#[derive(Deserialize)]
struct Pins {
    etcd: Vec<Pin>,
}

#[derive(Deserialize)]
struct Pin {
    version: String,
    ci: bool,
}

/// The two versions of a promise that every etcd version is held to alike, oldest first: those with `ci = true`. With
/// `./tests/run --full`, all pinned versions.
pub(crate) fn versions() -> Vec<Version> {
    covered(|pin| full() || pin.ci)
}

/// The versions of a promise about members that are killed while clients write, and started again: without 3.5.0 to 3.5.2, whose members may
/// then apply an entry twice (etcd-io/etcd#13766) and tell different histories. The newest 3.6 is in their place.
pub(crate) fn versions_that_survive_kills() -> Vec<Version> {
    let (_, mut sound): (Vec<_>, Vec<_>) = versions().into_iter().partition(Version::may_apply_twice);
    let another = newest("3.6");
    if !sound.contains(&another) {
        sound.push(another);
    }
    sound
}

/// All pinned versions, oldest first, in every run: for a promise that differs by version, or that is about what one version does.
/// CONTRIBUTING.md lists the modules that call this function, and `tests/docs.rs` compares that list with the modules.
pub(crate) fn every_version() -> Vec<Version> {
    covered(|_| true)
}

/// The pinned versions that are wanted, oldest first. `KEYWARD_TEST_VERSION`, which `tests/run --quick` sets, leaves one of them.
fn covered(is_wanted: impl Fn(&Pin) -> bool) -> Vec<Version> {
    let only = env::var("KEYWARD_TEST_VERSION").ok();
    let named = |pin: &Pin| only.as_ref().is_none_or(|version| *version == pin.version);
    let wanted = pins().into_iter().filter(|pin| is_wanted(pin) && named(pin));
    let versions: Vec<Version> = wanted.map(|pin| Version::parse(&pin.version)).collect();
    assert!(!versions.is_empty(), "no version is left to test");
    versions
}

/// Runs the same steps on all of these versions at the same time, and returns each version's result in the order of the versions. For
/// steps that mostly wait, such as for a token to expire.
pub(crate) async fn side_by_side<T>(versions: &[Version], steps: impl AsyncFn(&Version) -> T) -> Vec<T> {
    join_all(versions.iter().map(|version| steps(version))).await
}

/// The newest pinned patch of a minor, such as `newest("3.5")`.
pub(crate) fn newest(minor: &str) -> Version {
    let of_minor = Version::parse(minor);
    let all = pins().into_iter().map(|pin| Version::parse(&pin.version));
    all.filter(|version| version.0.starts_with(&of_minor.0)).max().expect("the minor is pinned")
}

/// Whether this is `./tests/run --full`: the same tests at full length and on all versions.
pub(crate) fn full() -> bool {
    env::var_os("KEYWARD_TEST_FULL").is_some_and(|value| value == "1")
}

fn pins() -> Vec<Pin> {
    let pins: Pins =
        toml::from_str(include_str!("../../versions.toml")).expect("tests/versions.toml is valid");
    assert!(!pins.etcd.is_empty(), "tests/versions.toml names no version");
    pins.etcd
}

impl Version {
    /// Panics on text that is not numbers with dots.
    pub(crate) fn parse(text: &str) -> Version {
        Version(text.split('.').map(|part| part.parse().expect("a version is numbers with dots")).collect())
    }

    /// Whether a member that was killed while clients wrote may apply an entry twice when it starts again.
    fn may_apply_twice(&self) -> bool {
        self.at_least("3.5.0") && !self.at_least("3.5.3")
    }

    /// Whether this version is `other` or newer.
    pub(crate) fn at_least(&self, other: &str) -> bool {
        *self >= Version::parse(other)
    }

    /// The server program.
    pub(crate) fn etcd(&self) -> PathBuf {
        self.folder().join("etcd")
    }

    /// The client program.
    pub(crate) fn etcdctl(&self) -> PathBuf {
        self.folder().join("etcdctl")
    }

    /// The folder of both programs. Each test is a process of its own, so the cache is looked into before `tests/get-etcd` is asked,
    /// which takes a python; `tests/get-etcd` alone judges `ETCD_BIN`, and fetches or builds what is missing.
    fn folder(&self) -> PathBuf {
        static FOUND: Mutex<Option<HashMap<String, PathBuf>>> = Mutex::new(None);
        let mut found = FOUND.lock().expect("no holder panics, or every test must");
        let folder = found.get_or_insert_default().entry(self.to_string()).or_insert_with(|| {
            self.cached().filter(|_| env::var_os("ETCD_BIN").is_none()).unwrap_or_else(|| self.fetched())
        });
        folder.clone()
    }

    /// This version's entry in the cache. `tests/get-etcd` renames an entry to its place when it is complete.
    fn cached(&self) -> Option<PathBuf> {
        let named = env::var_os("XDG_CACHE_HOME").filter(|folder| !folder.is_empty()).map(PathBuf::from);
        let cache = named.or_else(|| Some(Path::new(&env::var_os("HOME")?).join(".cache")))?;
        Some(cache.join("keyward/etcd").join(self.to_string())).filter(|folder| folder.is_dir())
    }

    /// Asks `tests/get-etcd`; blocks while it fetches or builds, which `tests/run` has done before.
    fn fetched(&self) -> PathBuf {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/get-etcd");
        let asked =
            Command::new(script).arg(self.to_string()).stdin(Stdio::null()).stderr(Stdio::inherit()).output();
        let asked = asked.expect("tests/get-etcd can be run (it needs python3)");
        assert!(asked.status.success(), "tests/get-etcd {self} failed; its reason is above");
        PathBuf::from(String::from_utf8(asked.stdout).expect("a path in UTF-8").trim_end())
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts: Vec<String> = self.0.iter().map(u32::to_string).collect();
        f.write_str(&parts.join("."))
    }
}
