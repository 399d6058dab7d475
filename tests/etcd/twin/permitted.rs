//! The differences that are permitted between etcd and Keyward, read from the reviewed list of a twin test.
//!
//! Must not know how answers are compared, nor in which language the calls are made. Invariants: every entry has a reason; an entry that permitted nothing in a run to which it
//! applies is a fault of that run, so the list cannot rot.

use std::{cell::Cell, fmt::Write as _};

use serde::Deserialize;

use super::{compare::Difference, side::Port};
use crate::harness::binary::Version;

/// A reviewed list, and the names that its entries may use.
pub(crate) struct List {
    /// The file's name.
    pub(crate) name: &'static str,
    pub(crate) text: &'static str,
    /// The callers by their names.
    pub(crate) callers: &'static [&'static str],
    /// Whether a call is made at this path.
    pub(crate) is_path: fn(&str) -> bool,
    /// Whether answers can differ in this.
    pub(crate) is_difference: fn(&str) -> bool,
}

/// The entries that apply to one run, each with how often it was used.
pub(crate) struct Permitted {
    /// The client URL that the second side must name as its own.
    own_url: String,
    entries: Vec<(Entry, Cell<usize>)>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    permitted: Vec<Entry>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    what: String,
    reason: String,
    /// Where the two are any two clusters: then the entry must hold between two etcds asked directly too.
    #[serde(default)]
    twins: bool,
    #[serde(default, alias = "routes")]
    rpcs: Vec<String>,
    case: Option<String>,
    #[serde(default, rename = "as")]
    who: Vec<String>,
    /// Ends with `*` where only the start counts; so does `keyward`.
    direct: Option<String>,
    /// `OWN URL` is the address of the one that answers.
    keyward: Option<String>,
    port: Option<Port>,
    from: Option<String>,
    before: Option<String>,
    /// Why it may not occur in a run.
    not_always: Option<String>,
}

/// Which call a difference is of.
#[derive(Clone, Copy)]
pub(crate) struct At<'a> {
    pub(crate) rpc: &'a str,
    pub(crate) case: &'a str,
    pub(crate) who: &'a str,
}

/// Who stands on the second side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Second {
    Keyward,
    Etcd,
}

impl Permitted {
    /// The entries for a run on this version and port. Panics where the file has an entry that can permit nothing.
    pub(crate) fn load(
        list: &List,
        version: &Version,
        port: Port,
        second: Second,
        own_url: String,
    ) -> Permitted {
        let file: File = toml::from_str(list.text).unwrap_or_else(|error| panic!("{}: {error}", list.name));
        file.permitted.iter().for_each(|entry| entry.check(list));
        let applies = |entry: &Entry| {
            let from = entry.from.as_deref().is_none_or(|from| version.at_least(from));
            let before = entry.before.as_deref().is_none_or(|before| !version.at_least(before));
            from && before
                && entry.port.is_none_or(|of| of == port)
                && (entry.twins || second == Second::Keyward)
        };
        let entries = file.permitted.into_iter().filter(applies).map(|entry| (entry, Cell::new(0)));
        Permitted { own_url, entries: entries.collect() }
    }

    /// The reason for which a difference is permitted.
    pub(crate) fn reason(&self, at: At<'_>, difference: &Difference) -> Option<&str> {
        let (entry, used) =
            self.entries.iter().find(|(entry, _)| entry.permits(at, difference, &self.own_url))?;
        used.set(used.get() + 1);
        Some(&entry.reason)
    }

    /// The entries that permitted nothing; empty where there are none.
    pub(crate) fn unused(&self) -> String {
        let mut text = String::new();
        for (entry, used) in &self.entries {
            if used.get() == 0 && entry.not_always.is_none() {
                writeln!(text, "  permitted but never seen: {entry:?}").expect("a String takes all");
            }
        }
        text
    }
}

impl Entry {
    fn permits(&self, at: At<'_>, difference: &Difference, own_url: &str) -> bool {
        let of = |pattern: &Option<String>, value: &str| match pattern.as_deref() {
            None => true,
            Some(pattern) => match pattern.strip_suffix('*') {
                Some(start) => value.starts_with(start),
                None => pattern == value,
            },
        };
        let keyward = self.keyward.as_deref().map(|pattern| pattern.replace("OWN URL", own_url));
        self.what == difference.what
            && (self.rpcs.is_empty() || self.rpcs.iter().any(|rpc| rpc == at.rpc))
            && (self.who.is_empty() || self.who.iter().any(|who| who == at.who))
            && of(&self.case, at.case)
            && of(&self.direct, &difference.direct)
            && of(&keyward, &difference.keyward)
    }

    fn check(&self, list: &List) {
        let file = list.name;
        assert!((list.is_difference)(&self.what), "{file}: nothing is called {:?}", self.what);
        assert!(self.reason.len() > 10, "{file}: {:?} has no reason", self.what);
        for path in &self.rpcs {
            assert!((list.is_path)(path), "{file}: no call is made at {path:?}");
        }
        for who in &self.who {
            assert!(list.callers.contains(&who.as_str()), "{file}: nobody calls as {who:?}");
        }
        let whole = self.what == "outcome" || self.what == "messages";
        let limited = !self.rpcs.is_empty() || !self.who.is_empty() || self.direct.is_some();
        let narrow = limited && (self.keyward.is_some() || self.twins);
        assert!(!whole || narrow, "{file}: {:?} permits any {}", self.reason, self.what);
    }
}
