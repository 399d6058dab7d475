//! The requests that mode `shadow` lets pass and `enforce` would refuse, by peer and missing grant.
//!
//! Owns: the count for each missing grant, and the bounds on all counts. Must not know: the askers, the form
//! of a row, audit records. Invariants: a register counts under one generation of the policy; no denial is
//! left out: past the bounds denials are counted for their peer and action, or for all further peers; a
//! register belongs to one shard, so that counting takes no lock.

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, HashSet};
use std::rc::Rc;

use bytes::Bytes;
use tokio::time::Instant;

use super::learned::{folder_of, is_named_for_lease, listed_folder};
use super::permit::Permit;
use super::permit_set::{Denial, PermitSet, PolicyGeneration};
use keyward_etcd::refusal::Refusal;
use keyward_etcd::rpc::key_range::{KeyRange, RangeEnd, end_of_prefix};
use keyward_etcd::rpc::method::{Handler, Method};
use keyward_etcd::rpc::touch::{Action, Touch, TouchTarget};
use keyward_telemetry::policy_metrics::PolicyMetrics;
use keyward_telemetry::printable::cut_to;

/// Peers with rows of their own.
const MOST_PEERS: usize = 256;
/// Rows of one peer, beside one for the further keys of each action.
const MOST_OF_PEER: usize = 64;
/// Rows of all peers: with the lengths below, some 2 MiB in each shard.
const MOST_ROWS: usize = 2048;
/// Bytes of a key in a row. A longer key counts as all keys with the same beginning.
const LONGEST_KEY: usize = 256;
/// Bytes of a peer's name, or of the path of an unknown method.
const LONGEST_NAME: usize = 512;

/// The part of a denied request that names keys.
#[derive(Clone, Copy)]
pub enum DeniedPart<'r> {
    /// The message of a call, or one message of a stream.
    Message(&'r [u8]),
    /// A watch that has begun, given as its WatchCreateRequest.
    WatchCreate(&'r [u8]),
    /// The keys of a lease, read for this action.
    KeysOfLease(Action, &'r [Bytes]),
    /// The path of a method that no rule can name.
    UnknownMethod(&'r str),
    /// None: a stream before its first message. The decisions on the messages name what is missing.
    Nothing,
}

/// The keys of a missing grant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MissingKeys {
    /// The action is not on keys.
    None,
    /// One key.
    Key(Box<[u8]>),
    /// Several keys directly below this folder, a prefix that ends in a slash; or one that is named for a
    /// lease.
    Folder(Box<[u8]>),
    /// A range of keys, up to the end, if there is one.
    Range(Box<[u8]>, Option<Box<[u8]>>),
    /// Keys beyond the bound on rows.
    Further,
    /// The keys of the method with this path, which no rule can name.
    UnknownMethod(Box<str>),
}

/// A grant that a peer lacks.
#[derive(Clone, Debug)]
pub struct MissingGrant {
    /// The action.
    pub action: Action,
    /// The keys.
    pub keys: MissingKeys,
    /// The reason of the denial, as in audit records.
    pub rule: Box<str>,
    /// The method denied last; empty for an unknown method.
    pub method: &'static str,
    /// The generation of the policy.
    pub generation: PolicyGeneration,
    /// The number of requests.
    pub requests: u64,
    /// The first request.
    pub first: Instant,
    /// The last request.
    pub last: Instant,
    /// The number of the last request: a request with many keys counts once.
    counted: u64,
}

/// The missing grants of a shard's callers.
#[derive(Debug, Default)]
pub struct ShadowRegister {
    generation: Cell<PolicyGeneration>,
    requests: Cell<u64>,
    missing: RefCell<MissingGrants>,
}

/// Missing grants within the bounds, of one shard or of several.
#[derive(Debug, Default)]
pub struct MissingGrants {
    by_peer: HashMap<Box<str>, Vec<MissingGrant>>,
    /// The grants that all peers beyond the bound lack, one for each action.
    of_further_peers: Vec<MissingGrant>,
    rows: usize,
}

/// Counts the denials of a caller on a stream.
#[derive(Clone)]
pub struct StreamDenials {
    /// Metrics of decisions.
    pub metrics: PolicyMetrics,
    /// The register of the caller's shard.
    pub register: Rc<ShadowRegister>,
    /// The caller's name, as in audit records.
    pub peer: Rc<str>,
}

impl StreamDenials {
    /// Counts a denial by `permits`. Returns the permit of a denial that is only counted.
    ///
    /// # Errors
    /// The denial is enforced: the refusal for the client.
    pub fn count(
        &self,
        permits: &PermitSet,
        denial: Denial,
        method: &'static Method,
        part: DeniedPart<'_>,
    ) -> Result<Permit, Refusal> {
        let counted = permits.enforce_and_count(denial, &self.metrics);
        if counted.is_ok() {
            self.register.note(permits, &self.peer, (method, denial), part, Instant::now());
        }
        counted
    }
}

impl ShadowRegister {
    /// Begins anew if `generation` is another one: the missing grants may be there now.
    pub fn follow(&self, generation: PolicyGeneration) {
        if self.generation.replace(generation) != generation {
            self.missing.take();
        }
    }

    /// The missing grants now, with the peer; `None` stands for all peers beyond the bound.
    #[must_use]
    pub fn missing(&self) -> Vec<(Option<Box<str>>, MissingGrant)> {
        self.missing.borrow().list()
    }

    /// Counts a denial by `permits` that is not enforced. A denial under another generation is left to the
    /// register of that generation: open streams are decided again after each change.
    pub fn note(
        &self,
        permits: &PermitSet,
        peer: &str,
        (method, denial): (&'static Method, Denial),
        part: DeniedPart<'_>,
        now: Instant,
    ) {
        if permits.generation != self.generation.get() {
            return;
        }
        let counted = self.requests.get() + 1;
        self.requests.set(counted);
        let mut missing = self.missing.borrow_mut();
        let is_named = Cell::new(false);
        let mut add = |action, keys, denial| {
            is_named.set(true);
            let rule = permits.denying_rule(denial).into();
            let grant = MissingGrant {
                action,
                keys,
                rule,
                method: method.name,
                generation: permits.generation,
                requests: 1,
                first: now,
                last: now,
                counted,
            };
            missing.add(Some(cut_to(peer, LONGEST_NAME)), grant);
        };
        let mut add_touch = |touch: Touch<'_>, denial| match touch.target {
            TouchTarget::Keys(range) => add(touch.action, MissingKeys::of(&range), denial),
            TouchTarget::Cluster => add(touch.action, MissingKeys::None, denial),
            // The keys of a lease are decided on, and counted, once they are read.
            TouchTarget::KeysOfLease(_) | TouchTarget::KeysSharingLease(_) => {}
        };
        let mut each = |touch: Touch<'_>, judged: Result<_, Denial>| {
            if let Err(denial) = judged {
                add_touch(touch, denial);
            }
        };
        match part {
            DeniedPart::Message(message) => permits.explain(method, message, &mut each),
            DeniedPart::WatchCreate(create) => permits.explain_watch(create, &mut each),
            DeniedPart::KeysOfLease(action, keys) => {
                permits.explain_keys(action, keys.iter().map(|key| &key[..]), &mut each);
            }
            DeniedPart::UnknownMethod(path) => {
                add(denial.action, MissingKeys::UnknownMethod(cut_to(path, LONGEST_NAME).into()), denial);
            }
            DeniedPart::Nothing => return,
        }
        // A request without keys, as an empty Txn, of a caller without a role. A watch stream has requests
        // that are about no keys.
        if !is_named.get() && method.handler != Handler::Watch {
            add(denial.action, MissingKeys::None, denial);
        }
    }
}

impl MissingGrants {
    /// Adds a missing grant of a peer, or of all peers beyond the bound.
    pub fn add(&mut self, peer: Option<&str>, grant: MissingGrant) {
        let has_room = self.by_peer.len() < MOST_PEERS;
        let rows = match peer {
            Some(peer) if self.by_peer.contains_key(peer) => self.by_peer.get_mut(peer),
            Some(peer) if has_room => Some(self.by_peer.entry(peer.into()).or_default()),
            _ => None,
        };
        let is_own = rows.is_some();
        let rows = rows.unwrap_or(&mut self.of_further_peers);
        let same = rows.iter_mut().find_map(|row| row.joined_keys(&grant).map(|keys| (row, keys)));
        if let Some((row, keys)) = same {
            row.join(grant, keys);
            return;
        }
        if is_own && self.rows < MOST_ROWS && rows.len() < MOST_OF_PEER {
            self.rows += 1;
            rows.push(grant);
            return;
        }
        let further =
            |row: &&mut MissingGrant| row.action == grant.action && row.keys == MissingKeys::Further;
        match rows.iter_mut().find(further) {
            Some(row) => row.join(grant, MissingKeys::Further),
            None => rows.push(MissingGrant { keys: MissingKeys::Further, ..grant }),
        }
    }

    /// The missing grants, with the peer.
    #[must_use]
    pub fn list(&self) -> Vec<(Option<Box<str>>, MissingGrant)> {
        let own = self.by_peer.iter().flat_map(|(peer, rows)| rows.iter().map(move |row| (Some(peer), row)));
        let further = self.of_further_peers.iter().map(|row| (None, row));
        own.chain(further).map(|(peer, row)| (peer.cloned(), row.clone())).collect()
    }
}

impl MissingGrant {
    /// The keys of a row for this grant and for `other`; `None` if the two have rows of their own.
    fn joined_keys(&self, other: &Self) -> Option<MissingKeys> {
        if self.action != other.action {
            return None;
        }
        let folder = |keys: &MissingKeys| match keys {
            MissingKeys::Key(key) => folder_of(key).map(Box::from),
            MissingKeys::Folder(folder) => Some(folder.clone()),
            _ => None,
        };
        if self.keys == other.keys {
            return Some(self.keys.clone());
        }
        folder(&self.keys).filter(|own| folder(&other.keys).as_ref() == Some(own)).map(MissingKeys::Folder)
    }

    fn join(&mut self, more: Self, keys: MissingKeys) {
        if self.counted != more.counted || self.counted == 0 {
            self.requests += more.requests;
        }
        if more.last >= self.last {
            (self.method, self.last, self.counted) = (more.method, more.last, more.counted);
        }
        self.first = self.first.min(more.first);
        self.keys = keys;
    }

    /// The grant as found in one shard, to be joined with those of other shards.
    #[must_use]
    pub fn of_shard(self) -> Self {
        Self { counted: 0, ..self }
    }
}

impl MissingKeys {
    fn of(range: &KeyRange<'_>) -> Self {
        let start = range.start.get(..LONGEST_KEY).unwrap_or(range.start);
        let is_cut = start.len() < range.start.len();
        match range.end {
            RangeEnd::StartKey if is_cut => Self::Range(start.into(), end_of_prefix(start).map(Into::into)),
            // A grant on the key of one lease would not hold for the next.
            RangeEnd::StartKey => match folder_of(start) {
                Some(folder) if is_named_for_lease(start, &HashSet::new()) => Self::Folder(folder.into()),
                _ => Self::Key(start.into()),
            },
            RangeEnd::Unbounded => Self::Range(start.into(), None),
            RangeEnd::Before(end) => {
                // The pages of a list begin at another key each.
                let start = listed_folder(start, end).unwrap_or(start);
                let end = match end.get(..LONGEST_KEY) {
                    Some(cut) if cut.len() < end.len() => end_of_prefix(cut),
                    _ => Some(end.to_vec()),
                };
                Self::Range(start.into(), end.map(Into::into))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use prost::Message as _;

    use super::super::tests::{peer, permits, policy, put, range};
    use super::*;
    use crate::policy::permit_set::{Decision, DenialReason};
    use keyward_config::PolicyMode;
    use keyward_etcd::pb::etcdserverpb::{RequestOp, TxnRequest, request_op::Request};
    use keyward_etcd::rpc::method::{METHODS, UNKNOWN, lookup};

    const POLICY: &str = "[[role]]\nname = 'r'\n[[role.allow]]\nactions = ['read']\nprefix = '/a/'\n\
                          [[role.deny]]\nactions = ['read']\nkey = '/a/secret'\n\
                          [[binding]]\npeer = 'password:al'\nroles = ['r']\n";

    fn shadow(name: &str) -> PermitSet {
        PermitSet { mode: PolicyMode::Shadow, ..permits(&policy(POLICY), &peer(name)) }
    }

    /// Decides on a message, and notes the denial.
    fn note(register: &ShadowRegister, permits: &PermitSet, peer: &str, path: &str, message: &[u8]) {
        let method = lookup(path).expect("a method");
        if let Decision::Denied(denial) = permits.decide(method, message) {
            register.note(permits, peer, (method, denial), DeniedPart::Message(message), Instant::now());
        }
    }

    /// Peer, action, keys, requests.
    fn rows(register: &ShadowRegister) -> Vec<String> {
        told(&register.missing.borrow())
    }

    fn told(missing: &MissingGrants) -> Vec<String> {
        let text = |(peer, grant): (Option<Box<str>>, MissingGrant)| {
            let text = |key: &[u8]| key.escape_ascii().to_string();
            let keys = match &grant.keys {
                MissingKeys::None => "-".to_owned(),
                MissingKeys::Key(key) => text(key),
                MissingKeys::Folder(folder) => text(folder) + "*",
                MissingKeys::Range(start, end) => {
                    format!("{}..{}", text(start), end.as_deref().map(text).unwrap_or_default())
                }
                MissingKeys::Further => "further".to_owned(),
                MissingKeys::UnknownMethod(path) => path.to_string(),
            };
            format!(
                "{} {} {keys} {}",
                peer.as_deref().unwrap_or("others"),
                grant.action.name(),
                grant.requests
            )
        };
        let mut rows: Vec<String> = missing.list().into_iter().map(text).collect();
        rows.sort();
        rows
    }

    const RANGE: &str = "/etcdserverpb.KV/Range";
    const PUT: &str = "/etcdserverpb.KV/Put";

    fn following(permits: &PermitSet) -> ShadowRegister {
        let register = ShadowRegister::default();
        register.follow(permits.generation);
        register
    }

    #[test]
    fn each_denial_is_counted_by_peer_action_and_keys() {
        let al = shadow("al");
        let register = following(&al);
        note(&register, &al, "al", RANGE, &range("/a/1", ""));
        assert_eq!(rows(&register), [""; 0], "the request is allowed");
        for _ in 0..3 {
            note(&register, &al, "al", RANGE, &range("/b/1", ""));
        }
        note(&register, &al, "al", RANGE, &range("/c/", "/c0"));
        note(&register, &al, "al", RANGE, &range("/c/x\0", "/c0"));
        note(&register, &al, "al", RANGE, &range("/a/secret", ""));
        note(&register, &al, "al", PUT, &put("/b/1").encode_to_vec());
        note(&register, &al, "al", "/etcdserverpb.Lease/LeaseKeepAlive", b"\x08\x07");
        note(&register, &al, "al", "/etcdserverpb.Lease/LeaseGrant", b"");
        note(&register, &al, "bo", PUT, &put("/b/1").encode_to_vec());
        note(&register, &al, "bo", PUT, &put("/locks/job/7d51a21af486500b").encode_to_vec());
        assert_eq!(
            rows(&register),
            [
                "al lease - 2",
                "al read /a/secret 1",
                "al read /b/1 3",
                "al read /c/../c0 2",
                "al write /b/1 1",
                "bo write /b/1 1",
                "bo write /locks/job/* 1"
            ]
        );
        let rule = |action, keys: MissingKeys| {
            let rows = register.missing();
            let row = rows.into_iter().find(|(_, row)| row.action == action && row.keys == keys);
            row.expect("a row").1.rule
        };
        assert_eq!(&*rule(Action::Read, MissingKeys::Key(b"/a/secret".as_slice().into())), "r.deny[0]");
        assert_eq!(&*rule(Action::Lease, MissingKeys::None), "no_grant: lease");
    }

    #[test]
    fn a_request_counts_once_however_many_keys_lie_in_a_folder() {
        let al = shadow("al");
        let register = following(&al);
        let ops = ["/b/1", "/b/2", "/b/3", "x", "y"].map(|key| Some(Request::RequestPut(put(key))));
        let success = ops.map(|request| RequestOp { request }).to_vec();
        let txn = TxnRequest { success, ..TxnRequest::default() }.encode_to_vec();
        for _ in 0..2 {
            note(&register, &al, "al", "/etcdserverpb.KV/Txn", &txn);
        }
        // Keys without a folder of a name are rows of their own.
        assert_eq!(rows(&register), ["al write /b/* 2", "al write x 2", "al write y 2"]);
    }

    #[test]
    fn a_caller_without_a_role_is_named_also_by_a_request_without_keys() {
        let nobody = shadow("nobody");
        let register = following(&nobody);
        note(&register, &nobody, "no", "/etcdserverpb.KV/Txn", b"");
        note(&register, &nobody, "no", PUT, &put("k").encode_to_vec());
        // A request for progress.
        note(&register, &nobody, "no", "/etcdserverpb.Watch/Watch", b"\x1a\x00");
        let denial = Denial { action: Action::Write, reason: DenialReason::UnknownMethod };
        let part = DeniedPart::UnknownMethod("/a.B/C");
        register.note(&nobody, "no", (&UNKNOWN, denial), part, Instant::now());
        assert_eq!(rows(&register), ["no read - 1", "no write /a.B/C 1", "no write k 1"]);
    }

    /// Whatever is denied is named: a method of the table by its touches, or by its action.
    #[test]
    fn every_method_that_a_policy_can_refuse_is_named() {
        let nobody = shadow("nobody");
        let mut named = 0;
        for method in METHODS {
            let register = following(&nobody);
            let Decision::Denied(denial) = nobody.decide(method, b"") else { panic!("{}", method.path) };
            let part = DeniedPart::Message(b"");
            register.note(&nobody, "no", (method, denial), part, Instant::now());
            let told = nobody.denying_rule(denial);
            let rules: Vec<_> = register.missing().into_iter().map(|(_, row)| row.rule).collect();
            assert!(rules.is_empty() || rules.contains(&told.as_str().into()), "{told}: {rules:?}");
            assert!(rules.iter().all(|rule| rule.starts_with("no_role: ")), "{rules:?}");
            // A watch stream is named by its watches.
            assert_eq!(register.missing().is_empty(), method.handler == Handler::Watch, "{}", method.path);
            named += usize::from(!register.missing().is_empty());
        }
        assert!(named > 35, "{named}");
    }

    /// A search for the text of an audit record finds the row, also of a request that cannot be read.
    #[test]
    fn a_row_has_the_rule_of_the_decision() {
        for (name, expected) in [
            ("al", ["no_grant: read", "no_grant: write", "own_keys: read"]),
            ("bo", ["no_role: read", "no_role: write", "no_role: read"]),
        ] {
            let permits = shadow(name);
            let requests =
                [(RANGE, range("/b/1", "")), (PUT, put("/b/1").encode_to_vec()), (RANGE, b"\xff".to_vec())];
            for ((path, message), expected) in requests.into_iter().zip(expected) {
                let register = following(&permits);
                let method = lookup(path).expect("a method");
                let Decision::Denied(denial) = permits.decide(method, &message) else { panic!("{path}") };
                assert_eq!(permits.denying_rule(denial), expected);
                note(&register, &permits, name, path, &message);
                assert_eq!(&*register.missing()[0].1.rule, expected, "{name} {path}");
            }
        }
    }

    #[test]
    fn past_the_bounds_denials_are_counted_together() {
        let al = shadow("al");
        let register = following(&al);
        let keys = MOST_OF_PEER + 10;
        for key in 0..keys {
            note(&register, &al, "al", PUT, &put(&format!("key-{key}")).encode_to_vec());
        }
        note(&register, &al, "al", PUT, &put("key-0").encode_to_vec());
        let of_al = rows(&register);
        assert_eq!(of_al.len(), MOST_OF_PEER + 1);
        assert!(
            of_al.contains(&"al write further 10".to_owned())
                && of_al.contains(&"al write key-0 2".to_owned())
        );
        for peer in 0..MOST_PEERS + 5 {
            note(&register, &al, &format!("peer-{peer}"), PUT, &put("k").encode_to_vec());
        }
        assert!(rows(&register).contains(&"others write further 6".to_owned()));
        for peer in 0..MOST_PEERS - 1 {
            for key in 0..keys {
                let key = format!("{key}{}", "x".repeat(LONGEST_KEY));
                note(&register, &al, &format!("peer-{peer}"), PUT, &put(&key).encode_to_vec());
            }
        }
        let missing = register.missing.borrow();
        let bytes = |row: &MissingGrant| match &row.keys {
            MissingKeys::Range(start, end) => start.len() + end.as_ref().map_or(0, |end| end.len()),
            _ => 0,
        };
        assert!(missing.rows <= MOST_ROWS && missing.by_peer.len() == MOST_PEERS);
        let held: usize = missing.by_peer.values().flatten().map(bytes).sum();
        assert!((1 << 19..=MOST_ROWS * 2 * LONGEST_KEY).contains(&held), "{held} bytes of keys");
        let all: u64 = missing.list().iter().map(|(_, row)| row.requests).sum();
        let noted = keys + 1 + MOST_PEERS + 5 + (MOST_PEERS - 1) * keys;
        assert_eq!(usize::try_from(all).expect("small"), noted, "no denial is left out");
    }

    #[test]
    fn another_policy_begins_anew_and_a_former_one_counts_no_more() {
        let al = shadow("al");
        let other = policy(&POLICY.replace("/a/", "/other/"));
        let other = PermitSet { mode: PolicyMode::Shadow, ..permits(&other, &peer("al")) };
        let register = following(&al);
        note(&register, &al, "al", PUT, &put("k").encode_to_vec());
        register.follow(al.generation);
        assert_eq!(rows(&register).len(), 1);
        register.follow(other.generation);
        note(&register, &al, "al", PUT, &put("k").encode_to_vec());
        assert_eq!(rows(&register), [""; 0]);
        note(&register, &other, "al", PUT, &put("k").encode_to_vec());
        assert_eq!(rows(&register), ["al write k 1"]);
    }

    #[tokio::test(start_paused = true)]
    async fn grants_missing_in_several_shards_are_one_row_of_the_whole_time() {
        let al = shadow("al");
        let shards = [following(&al), following(&al)];
        note(&shards[0], &al, "al", PUT, &put("/b/1").encode_to_vec());
        tokio::time::advance(Duration::from_secs(5)).await;
        note(&shards[1], &al, "al", PUT, &put("/b/2").encode_to_vec());
        note(&shards[1], &al, "al", PUT, &put("/b/2").encode_to_vec());
        let mut joined = MissingGrants::default();
        for (peer, grant) in shards.iter().flat_map(ShadowRegister::missing) {
            joined.add(peer.as_deref(), grant.of_shard());
        }
        assert_eq!(told(&joined), ["al write /b/* 3"]);
        let row = &joined.list()[0].1;
        assert_eq!(row.last - row.first, Duration::from_secs(5));
    }
}
