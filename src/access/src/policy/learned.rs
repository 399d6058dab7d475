//! The smallest policy that allows what was observed.
//!
//! Owns: the generalization of observed keys to prefixes, and the roles of peers with alike grants. Must not
//! know: where the observations come from. Invariants: the policy allows every observation, except for those
//! named in its comments; a prefix without any name of its own, such as `/`, is granted only to a peer that
//! read or changed it as one range.
//!
//! A folder is a prefix that ends in a slash. A folder with more than [`LearningBounds::names`] observed
//! names is granted as a whole, since its names are data; so is a folder that the peer lists or watches,
//! with more than [`LearningBounds::listed_names`] keys of its own, and a folder with a key named for a
//! lease: the next lease has another id. etcd's `client/v3/concurrency`, and with it the services Lock and
//! Election, ends such a key with the id in hexadecimal (`%s%x`), the npm package etcd3 in decimal; etcd's
//! recipes for queues and barriers end theirs with a time in nanoseconds.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use keyward_etcd::rpc::key_range::{KeyRange, RangeEnd, end_of_prefix};
use keyward_etcd::rpc::touch::Action;

/// Observed keys of one peer and action beyond which folders are generalized while observing.
const MOST_KEYS: usize = 1 << 16;

/// Digits of a lease's id from which on a key counts as named for the lease: small numbers are names of many
/// things.
const SHORTEST_ID: usize = 6;

/// When a folder is granted as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LearningBounds {
    /// More observed names than this.
    pub names: usize,
    /// More observed keys than this directly in the folder, if the peer lists or watches the folder, or a
    /// folder around the folder.
    pub listed_names: usize,
}

impl Default for LearningBounds {
    fn default() -> Self {
        Self { names: 16, listed_names: 2 }
    }
}

/// Collects observations.
#[derive(Debug, Default)]
pub struct PolicyLearner {
    bounds: LearningBounds,
    peers: BTreeMap<String, ObservedPeer>,
    leases: HashSet<u64>,
}

/// The observations of a peer.
#[derive(Debug, Default)]
struct ObservedPeer {
    on_keys: BTreeMap<Action, ObservedKeys>,
    others: BTreeSet<Action>,
    calls: u64,
}

/// The keys of one action.
#[derive(Debug, Default)]
struct ObservedKeys {
    keys: BTreeSet<Vec<u8>>,
    prefixes: BTreeSet<Vec<u8>>,
    ranges: BTreeSet<(Vec<u8>, Vec<u8>)>,
    everything: bool,
}

/// The keys of a learned grant.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum LearnedKeys {
    None,
    Everything,
    Prefix(Vec<u8>),
    Range(Vec<u8>, Vec<u8>),
    Key(Vec<u8>),
}

/// A grant, with its keys as text of a policy.
type LearnedGrant = (String, BTreeSet<Action>);

/// The peers of a role, with the number of their calls.
type RolePeers = Vec<(String, u64)>;

impl PolicyLearner {
    /// Learns with these bounds.
    #[must_use]
    pub fn new(bounds: LearningBounds) -> Self {
        Self { bounds, ..Self::default() }
    }

    /// True without observations.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.peers.is_empty()
    }

    /// The number of peers without a binding, because their names hold `*`: a binding would take the name for
    /// a pattern, and give the role to other peers too.
    #[must_use]
    pub fn peers_without_binding(&self) -> usize {
        self.peers.keys().filter(|peer| !names_one_peer(peer)).count()
    }

    /// Notes a call of `peer`, given as in a record.
    pub fn note_call(&mut self, peer: &str) {
        self.peer(peer).calls += 1;
    }

    /// Notes an action of `peer` on keys.
    pub fn note_keys(&mut self, peer: &str, action: Action, range: &KeyRange<'_>) {
        let bounds = self.bounds;
        let observed = self.peer(peer).on_keys.entry(action).or_default();
        observed.note(range);
        if observed.keys.len() > MOST_KEYS {
            observed.generalize(bounds, &[], &HashSet::new());
        }
    }

    /// Notes the id of a lease: keys may be named for the lease.
    pub fn note_lease(&mut self, id: u64) {
        self.leases.insert(id);
    }

    /// Notes an action of `peer` that is not on keys.
    pub fn note_action(&mut self, peer: &str, action: Action) {
        self.peer(peer).others.insert(action);
    }

    fn peer(&mut self, peer: &str) -> &mut ObservedPeer {
        if !self.peers.contains_key(peer) {
            self.peers.insert(peer.to_owned(), ObservedPeer::default());
        }
        self.peers.entry(peer.to_owned()).or_default()
    }

    /// The policy file, with a comment for each role.
    #[must_use]
    pub fn policy(mut self) -> String {
        let bounds = self.bounds;
        let mut roles: BTreeMap<Vec<LearnedGrant>, RolePeers> = BTreeMap::new();
        for (peer, observed) in &mut self.peers {
            let grants = observed.grants(bounds, &self.leases);
            let general = with_variable(&grants, user_of(peer));
            roles.entry(general.unwrap_or(grants)).or_default().push((peer.clone(), observed.calls));
        }
        // A variable shared with nobody only hides the name.
        let mut named: Vec<(Vec<LearnedGrant>, RolePeers)> = Vec::new();
        for (grants, peers) in roles {
            let [(only, _)] = &peers[..] else {
                named.push((grants, peers));
                continue;
            };
            let own = user_of(only).map(|user| without_variable(&grants, user));
            named.push((own.unwrap_or(grants), peers));
        }
        named.sort_by(|(_, one), (_, other)| one.cmp(other));
        named.iter().map(|(grants, peers)| role_text(grants, peers)).collect::<Vec<_>>().join("\n")
    }
}

impl ObservedPeer {
    /// The grants with their actions, sorted by keys.
    fn grants(&mut self, bounds: LearningBounds, leases: &HashSet<u64>) -> Vec<LearnedGrant> {
        let listed = [Action::Read, Action::Watch].into_iter().filter_map(|action| self.on_keys.get(&action));
        let listed: Vec<Vec<u8>> = listed.flat_map(|observed| observed.prefixes.iter().cloned()).collect();
        let mut by_keys: BTreeMap<LearnedKeys, BTreeSet<Action>> = BTreeMap::new();
        for (action, observed) in &mut self.on_keys {
            observed.generalize(bounds, &listed, leases);
            for keys in observed.learned() {
                by_keys.entry(keys).or_default().insert(*action);
            }
        }
        if !self.others.is_empty() {
            by_keys.entry(LearnedKeys::None).or_default().extend(&self.others);
        }
        by_keys.into_iter().map(|(keys, actions)| (keys.text(), actions)).collect()
    }
}

impl ObservedKeys {
    fn note(&mut self, range: &KeyRange<'_>) {
        match range.end {
            RangeEnd::StartKey => {
                self.keys.insert(range.start.to_vec());
            }
            RangeEnd::Unbounded => self.everything = true,
            RangeEnd::Before(end) => match listed_folder(range.start, end) {
                Some(prefix) => {
                    self.prefixes.insert(prefix.to_vec());
                }
                None => {
                    self.ranges.insert((range.start.to_vec(), end.to_vec()));
                }
            },
        }
    }

    /// Replaces the keys of folders with many names, and keys named for leases, by their folders.
    fn generalize(&mut self, bounds: LearningBounds, listed: &[Vec<u8>], leases: &HashSet<u64>) {
        let (of_leases, keys): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.keys).into_iter().partition(|key| is_named_for_lease(key, leases));
        self.prefixes.extend(of_leases.iter().filter_map(|key| folder_of(key)).map(<[u8]>::to_vec));
        let mut folders = Folders { bounds, listed, prefixes: &mut self.prefixes, keys: &mut self.keys };
        folders.descend(&keys, 0);
    }

    /// The keys without those within others.
    fn learned(&self) -> Vec<LearnedKeys> {
        if self.everything {
            return vec![LearnedKeys::Everything];
        }
        let is_within = |key: &[u8], but: &[u8]| {
            let mut around = self.prefixes.iter().filter(|prefix| prefix.as_slice() != but);
            around.any(|prefix| key.starts_with(prefix))
        };
        let prefixes = self.prefixes.iter().filter(|prefix| !is_within(prefix, prefix));
        let ends_within = |start: &[u8], end: &[u8]| {
            let holds = |prefix: &Vec<u8>| {
                start.starts_with(prefix) && end_of_prefix(prefix).is_none_or(|after| end <= &after[..])
            };
            self.prefixes.iter().any(holds)
        };
        let ranges = self.ranges.iter().filter(|(start, end)| !ends_within(start, end));
        let in_range =
            |key: &[u8]| self.ranges.iter().any(|(start, end)| (&start[..]..&end[..]).contains(&key));
        let keys = self.keys.iter().filter(|key| !is_within(key, b"") && !in_range(key));
        let prefixes = prefixes.cloned().map(LearnedKeys::Prefix);
        let ranges = ranges.cloned().map(|(start, end)| LearnedKeys::Range(start, end));
        prefixes.chain(ranges).chain(keys.cloned().map(LearnedKeys::Key)).collect()
    }
}

/// The prefix read by a range: the range is all of its keys, or the rest of a folder's keys, as a client
/// reads page by page.
pub(super) fn listed_folder<'k>(start: &'k [u8], end: &[u8]) -> Option<&'k [u8]> {
    let (last, before) = end.split_last()?;
    let length = before.len() + 1;
    let prefix = start.get(..length)?;
    let is_prefix = prefix.strip_prefix(before).is_some_and(|rest| rest[0].checked_add(1) == Some(*last));
    let is_whole = start.len() == length;
    (is_prefix && (is_whole || (prefix.ends_with(b"/") && has_name(prefix)))).then_some(prefix)
}

/// The folder of a key, up to the last slash; `None` if the folder has no name, as `/`.
pub(super) fn folder_of(key: &[u8]) -> Option<&[u8]> {
    let slash = key.iter().rposition(|byte| *byte == b'/')?;
    key.get(..=slash).filter(|folder| has_name(folder))
}

/// True if the last part of a key, in a folder with a name, is the id of a known lease, or has the form of a
/// lease's id or of a time in nanoseconds: another run has another name.
pub(super) fn is_named_for_lease(key: &[u8], leases: &HashSet<u64>) -> bool {
    let name = folder_of(key).and_then(|folder| std::str::from_utf8(&key[folder.len()..]).ok());
    let Some(name) = name.filter(|name| !name.is_empty() && !name.starts_with(['0', '+'])) else {
        return false;
    };
    let is_known = |id: Result<u64, _>| id.is_ok_and(|id| leases.contains(&id));
    let is_lower = |letter: u8| matches!(letter, b'0'..=b'9' | b'a'..=b'f');
    if !name.bytes().all(is_lower) {
        return false;
    }
    let has_letter = name.bytes().any(|letter| letter.is_ascii_lowercase());
    match name.len() {
        // etcd draws ids of 63 bits whose first bytes come from the member's id.
        15 | 16 if has_letter => i64::from_str_radix(name, 16).is_ok(),
        18 | 19 if !has_letter => name.parse::<i64>().is_ok(),
        SHORTEST_ID.. => is_known(u64::from_str_radix(name, 16)) || is_known(name.parse()),
        _ => false,
    }
}

/// True if the folder has a name of its own, unlike `/`.
fn has_name(folder: &[u8]) -> bool {
    folder.iter().any(|byte| *byte != b'/')
}

/// Sorts keys into folders.
struct Folders<'f> {
    bounds: LearningBounds,
    listed: &'f [Vec<u8>],
    prefixes: &'f mut BTreeSet<Vec<u8>>,
    keys: &'f mut BTreeSet<Vec<u8>>,
}

impl Folders<'_> {
    /// Takes sorted keys that share their first `depth` bytes, the name of a folder.
    fn descend(&mut self, keys: &[Vec<u8>], depth: usize) {
        let Some(first) = keys.first() else { return };
        let folder = &first[..depth];
        let name_end =
            |key: &[u8]| key[depth..].iter().position(|byte| *byte == b'/').map(|at| depth + at + 1);
        let names = keys.chunk_by(|one, other| {
            let end = name_end(one);
            end == name_end(other) && end.is_some_and(|end| one[..end] == other[..end])
        });
        let names: Vec<&[Vec<u8>]> = names.collect();
        let is_listed = self.listed.iter().any(|listed| folder.starts_with(listed));
        let keys = names.iter().filter(|name| name_end(&name[0]).is_none()).count();
        let has_data = names.len() > self.bounds.names || is_listed && keys > self.bounds.listed_names;
        if has_data && has_name(folder) {
            self.prefixes.insert(folder.to_vec());
            return;
        }
        for name in names {
            match name_end(&name[0]) {
                Some(end) if name.len() > 1 || name[0].len() > end => self.descend_below(name, end),
                _ => self.keys.extend(name.iter().cloned()),
            }
        }
    }

    /// Takes the keys of a folder within; the folder's own name may be a key too.
    fn descend_below(&mut self, keys: &[Vec<u8>], depth: usize) {
        let own = keys.iter().take_while(|key| key.len() == depth).count();
        self.keys.extend(keys[..own].iter().cloned());
        self.descend(&keys[own..], depth);
    }
}

impl LearnedKeys {
    fn text(&self) -> String {
        match self {
            Self::None => String::new(),
            Self::Everything => "everything = true".to_owned(),
            Self::Prefix(prefix) => format!("prefix = {}", key_text(prefix)),
            Self::Range(start, end) => {
                format!("range = {{ from = {}, to = {} }}", key_text(start), key_text(end))
            }
            Self::Key(key) => format!("key = {}", key_text(key)),
        }
    }
}

/// A key in the grammar of a policy, quoted for TOML.
fn key_text(key: &[u8]) -> String {
    let mut text = String::new();
    for chunk in key.utf8_chunks() {
        for letter in chunk.valid().chars() {
            match letter {
                '{' => text.push_str("{{"),
                '}' => text.push_str("}}"),
                '\\' => text.push_str("\\\\"),
                control if control.is_control() => {
                    let mut bytes = [0; 4];
                    control.encode_utf8(&mut bytes).bytes().for_each(|byte| push_escaped(&mut text, byte));
                }
                plain => text.push(plain),
            }
        }
        chunk.invalid().iter().for_each(|byte| push_escaped(&mut text, *byte));
    }
    toml::Value::String(text).to_string()
}

fn push_escaped(text: &mut String, byte: u8) {
    text.push_str(&format!("\\x{byte:02x}"));
}

/// The text of `{user}` for a peer, if keys may hold it.
fn user_of(peer: &str) -> Option<&str> {
    let (kind, name) = peer.split_once(':')?;
    let name = match kind {
        "password" | "file" | "etcd_jwt" => name,
        "cert" => name.split_once(":CN=")?.1,
        _ => return None,
    };
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.' | b'@');
    (name.bytes().all(is_plain) && !name.is_empty() && !name.contains("..") && name != ".").then_some(name)
}

/// The grants with `{user}` in place of the user's name as a whole name of a folder; `None` without any.
fn with_variable(grants: &[LearnedGrant], user: Option<&str>) -> Option<Vec<LearnedGrant>> {
    let name = format!("/{}/", user?);
    let changed: Vec<_> =
        grants.iter().map(|(keys, actions)| (keys.replace(&name, "/{user}/"), actions.clone())).collect();
    (changed != grants).then_some(changed)
}

fn without_variable(grants: &[LearnedGrant], user: &str) -> Vec<LearnedGrant> {
    let name = format!("/{user}/");
    grants.iter().map(|(keys, actions)| (keys.replace("/{user}/", &name), actions.clone())).collect()
}

/// A role, and the bindings of its peers.
fn role_text(grants: &[LearnedGrant], peers: &[(String, u64)]) -> String {
    let quoted = |text: &str| toml::Value::String(text.to_owned()).to_string();
    let role = match peers {
        // A policy takes no control character in a role's name.
        [(only, _)] => format!("learned from {}", only.escape_debug()),
        [(first, _), ..] => {
            format!("learned from {} and {} others", first.escape_debug(), peers.len() - 1)
        }
        [] => String::new(),
    };
    let calls: u64 = peers.iter().map(|(_, calls)| calls).sum();
    let mut text = format!("# {calls} calls observed.\n[[role]]\nname = {}\n", quoted(&role));
    for (keys, actions) in grants {
        let actions: Vec<String> = actions.iter().map(|action| quoted(action.name())).collect();
        text += &format!("[[role.allow]]\nactions = [{}]\n", actions.join(", "));
        if !keys.is_empty() {
            text += &format!("{keys}\n");
        }
    }
    for (peer, _) in peers {
        text += &if names_one_peer(peer) {
            format!("\n[[binding]]\npeer = {}\nroles = [{}]\n", quoted(peer), quoted(&role))
        } else {
            format!("\n# No binding of {}: the * would bind other peers too.\n", peer.escape_debug())
        };
    }
    text
}

/// False for a name with `*`, which a binding reads as a pattern.
fn names_one_peer(peer: &str) -> bool {
    !peer.contains('*')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn learned(touches: &[(&str, Action, &str, &str)]) -> String {
        let mut learner = PolicyLearner::new(LearningBounds { names: 4, listed_names: 2 });
        for (peer, action, key, end) in touches {
            learner.note_call(peer);
            learner.note_keys(peer, *action, &KeyRange::of(key.as_bytes(), end.as_bytes()));
        }
        learner.policy()
    }

    /// The lines about keys and actions.
    fn grants(text: &str) -> Vec<&str> {
        let is_grant = |line: &&str| {
            ["actions", "key", "prefix", "range", "everything"].iter().any(|word| line.starts_with(word))
        };
        text.lines().filter(is_grant).collect()
    }

    const PEER: &str = "password:app";

    #[test]
    fn few_keys_stay_keys_and_many_become_their_folder() {
        let few = learned(&[
            (PEER, Action::Read, "/a/1", ""),
            (PEER, Action::Write, "/a/1", ""),
            (PEER, Action::Read, "/a/b/2", ""),
        ]);
        assert_eq!(
            grants(&few),
            [
                r#"actions = ["read", "write"]"#,
                r#"key = "/a/1""#,
                r#"actions = ["read"]"#,
                r#"key = "/a/b/2""#
            ]
        );
        let keys: Vec<String> = (0..5).map(|n| format!("/a/b/{n}")).collect();
        let many: Vec<_> = keys.iter().map(|key| (PEER, Action::Read, &**key, "")).collect();
        assert_eq!(grants(&learned(&many)), [r#"actions = ["read"]"#, r#"prefix = "/a/b/""#]);
    }

    #[test]
    fn the_root_is_never_granted_for_its_many_names() {
        let keys: Vec<String> = (0..9).map(|n| format!("/{n}/x")).collect();
        let many: Vec<_> = keys.iter().map(|key| (PEER, Action::Read, &**key, "")).collect();
        let text = learned(&many);
        assert_eq!(grants(&text).len(), 18, "{text}");
        assert!(!text.contains("prefix"), "{text}");
    }

    #[test]
    fn ranges_are_prefixes_pages_or_ranges() {
        let text = learned(&[
            (PEER, Action::Read, "/a/", "/a0"),
            (PEER, Action::Read, "/a/b\0", "/a0"),
            (PEER, Action::Watch, "/b/k", "/b/m"),
            (PEER, Action::Lock, "/c/x\0", "/c0"),
        ]);
        assert_eq!(
            grants(&text),
            [
                r#"actions = ["read"]"#,
                r#"prefix = "/a/""#,
                r#"actions = ["lock"]"#,
                r#"prefix = "/c/""#,
                r#"actions = ["watch"]"#,
                r#"range = { from = "/b/k", to = "/b/m" }"#,
            ]
        );
        assert_eq!(
            grants(&learned(&[(PEER, Action::Read, "/a", "\0"), (PEER, Action::Read, "/b", "")])),
            [r#"actions = ["read"]"#, "everything = true"]
        );
    }

    #[test]
    fn names_in_a_listed_folder_are_data() {
        let list = (PEER, Action::Read, "/r/", "/r0");
        let three = [
            list,
            (PEER, Action::Write, "/r/p/1", ""),
            (PEER, Action::Write, "/r/p/2", ""),
            (PEER, Action::Write, "/r/p/3", ""),
        ];
        assert_eq!(
            grants(&learned(&three)),
            [r#"actions = ["read"]"#, r#"prefix = "/r/""#, r#"actions = ["write"]"#, r#"prefix = "/r/p/""#]
        );
        assert!(grants(&learned(&three[..3])).contains(&r#"key = "/r/p/2""#));
    }

    #[test]
    fn a_key_named_for_a_lease_is_its_folder() {
        let folder_of = |key: &str, leases: &[u64]| {
            let mut learner = PolicyLearner::new(LearningBounds::default());
            leases.iter().for_each(|id| learner.note_lease(*id));
            learner.note_keys(PEER, Action::Write, &KeyRange::key(key.as_bytes()));
            let text = learner.policy();
            grants(&text)[1].to_owned()
        };
        // By its form: an id of etcd's in hexadecimal or in decimal, a time in nanoseconds.
        for name in ["7d51a21af486500b", "694d9ae3c5c2a1f", "7587875486221233419", "1764384431123456789"] {
            let key = format!("/teams/alice/locks/job/{name}");
            assert_eq!(folder_of(&key, &[]), r#"prefix = "/teams/alice/locks/job/""#, "{name}");
        }
        // By the lease of another record: a client may choose any id.
        for (name, id) in [("7d51a2", 0x7d_51a2), ("8212898", 8_212_898)] {
            let key = format!("locks/{name}");
            assert_eq!(folder_of(&key, &[]), format!("key = {key:?}"));
            assert_eq!(folder_of(&key, &[id]), r#"prefix = "locks/""#, "{name}");
        }
        // Other names, and a folder without a name.
        for key in [
            "/jobs/7D51A21AF486500B",
            "/jobs/fd51a21af486500b",
            "/jobs/0d51a21af486500b",
            "/jobs/1234567890123456",
            "/jobs/00000000000000000014",
            "/jobs/7d51a21af486500b/state",
            "/jobs/job-7d51a21af486500b",
            "/jobs/7",
            "/7d51a21af486500b",
            "7d51a21af486500b",
        ] {
            assert_eq!(folder_of(key, &[7]), format!("key = {key:?}"));
        }
    }

    #[test]
    fn the_next_one_in_the_queue_of_a_lock_is_within_the_grants() {
        // As the Go client's Mutex: own key, first and last key of the queue, the key before the own.
        let text = learned(&[
            (PEER, Action::Read, "/l/job/7d51a21af486500b", ""),
            (PEER, Action::Write, "/l/job/7d51a21af486500b", ""),
            (PEER, Action::Read, "/l/job/", "/l/job0"),
            (PEER, Action::Watch, "/l/job/694d9ae3c5c2a1f0", ""),
        ]);
        assert_eq!(grants(&text), [r#"actions = ["read", "write", "watch"]"#, r#"prefix = "/l/job/""#]);
    }

    #[test]
    fn peers_alike_but_for_their_names_share_a_role() {
        let text = learned(&[
            ("password:al", Action::Write, "/t/al/x", ""),
            ("cert:ca:CN=bo", Action::Write, "/t/bo/x", ""),
            ("password:cy", Action::Write, "/u/cy/x", ""),
        ]);
        assert_eq!(text.matches("[[role]]").count(), 2, "{text}");
        assert!(text.contains(r#"key = "/t/{user}/x""#) && text.contains(r#"key = "/u/cy/x""#), "{text}");
        assert_eq!(text.matches("[[binding]]").count(), 3, "{text}");
    }

    #[test]
    fn a_peer_whose_name_is_a_pattern_gets_no_binding() {
        let text = learned(&[
            ("password:a*", Action::Write, "/k", ""),
            ("cert:ca:CN=*.example.com\n[[binding]]", Action::Write, "/k", ""),
            ("password:al", Action::Write, "/k", ""),
        ]);
        let (document, _) = keyward_config::policy(&text, &[], &[]).expect("valid");
        assert_eq!((document.roles.len(), document.bindings.len()), (1, 1), "{text}");
        assert!(text.contains(r#"peer = "password:al""#), "{text}");
        assert!(text.contains("# No binding of password:a*:"), "{text}");
    }

    #[test]
    fn keys_are_written_in_the_grammar_of_a_policy() {
        for key in [&b"/{a}\\b"[..], b"/\xff\x00", "/é\n\"".as_bytes()] {
            let text = key_text(key);
            let value: toml::Value =
                toml::from_str::<toml::Table>(&format!("k = {text}")).unwrap()["k"].clone();
            let template =
                keyward_config::policy_document::KeyTemplate::parse(value.as_str().unwrap()).unwrap();
            assert_eq!(template.fixed(), Some(key), "{text}");
        }
    }
}
