//! What a request touches, as Keyward judges it and as etcd says it, in one form.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;

use keyward::rpc::key_range::RangeEnd;
use keyward::rpc::method::{Class, Method};
use keyward::rpc::scan::{WireFields, WireValue};
use keyward::rpc::schema::{FieldKind, MessageId};
use keyward::rpc::touch::{self, Action, TouchTarget};

use crate::key_set::{Interval, KeySet, point};

/// What a request touches.
#[derive(Debug, Default)]
pub(crate) struct Touched {
    keys: BTreeMap<Action, KeySet>,
    /// The actions on the keys attached to a lease.
    leases: BTreeSet<(Action, i64)>,
    cluster: BTreeSet<Action>,
    /// The first keys of ranges in which etcd finds no key.
    of_empty_ranges: BTreeMap<Action, KeySet>,
    /// Keyward cannot read the request, and judges it as one that reads and writes every key.
    is_unreadable: bool,
}

/// Why Keyward judges more than etcd touches. No other reason is accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Surplus {
    /// An op or a field of a Txn that is unknown counts as every key; etcd ignores the field, or refuses the Txn.
    UnknownPartOfTxn,
    /// A range without keys counts as its first key.
    FirstKeyOfEmptyRange,
    /// A present and empty end of a read counts as no end, which it is for 3.4-3.6 where the read does not go through raft.
    EmptyEndOfRead,
    /// The raw key of Unlock, Proclaim and Resign may be empty; etcd refuses that.
    EmptyRawKey,
}

/// What Keyward judges.
pub(crate) fn by_keyward(method: &Method, body: &[u8]) -> Touched {
    let mut touched = Touched::default();
    let mut keys: BTreeMap<Action, Vec<Interval>> = BTreeMap::new();
    let visited = touch::visit(method, body, &mut |touch| {
        match touch.target {
            TouchTarget::Cluster => drop(touched.cluster.insert(touch.action)),
            TouchTarget::KeysOfLease(lease) | TouchTarget::KeysSharingLease(lease) => {
                touched.leases.insert((touch.action, lease));
            }
            TouchTarget::Keys(range) => {
                let interval = match range.end {
                    RangeEnd::StartKey => point(range.start),
                    RangeEnd::Before(end) => (range.start.to_vec(), Some(end.to_vec())),
                    RangeEnd::Unbounded => (range.start.to_vec(), None),
                };
                keys.entry(touch.action).or_default().push(interval);
            }
        }
        ControlFlow::Continue(())
    });
    if visited.is_err() {
        touched.is_unreadable = true;
        for action in [Action::Read, Action::Write] {
            keys.insert(action, vec![(Vec::new(), None)]);
        }
    }
    touched.keys = sets(keys);
    touched
}

fn sets(keys: BTreeMap<Action, Vec<Interval>>) -> BTreeMap<Action, KeySet> {
    keys.into_iter().map(|(action, keys)| (action, KeySet::new(keys))).collect()
}

/// What etcd says that it touches, as a line of `touches`; `None` where etcd's types cannot read the request, or do not know the method.
pub(crate) fn by_etcd(method: &Method, line: &str) -> Option<Touched> {
    let mut words = line.split('\t');
    match words.next() {
        Some("touches") => {}
        Some("undecodable" | "unknown method") => return None,
        _ => panic!("not an answer: {line:?}"),
    }
    let mut touched = Touched::default();
    let mut keys: BTreeMap<Action, Vec<Interval>> = BTreeMap::new();
    let mut of_empty_ranges: BTreeMap<Action, Vec<Interval>> = BTreeMap::new();
    for touch in words {
        let parts: Vec<&str> = touch.split(' ').collect();
        match parts[..] {
            ["none", action, first] => {
                of_empty_ranges.entry(acting(method, action)).or_default().push(interval(first));
            }
            [action, "lease", lease] => {
                touched.leases.insert((acting(method, action), lease.parse().expect("a lease")));
            }
            [action, keys_touched] => {
                keys.entry(acting(method, action)).or_default().push(interval(keys_touched));
            }
            // A Lock or Campaign without a lease is granted one of its own.
            ["lease"] if method.class == Class::Lock => {}
            [action] => drop(touched.cluster.insert(acting(method, action))),
            _ => panic!("not a touch: {touch:?}"),
        }
    }
    touched.keys = sets(keys);
    touched.of_empty_ranges = sets(of_empty_ranges);
    Some(touched)
}

/// What etcd reads, writes and watches for locks and elections is one action here.
fn acting(method: &Method, name: &str) -> Action {
    let action = Action::ALL.into_iter().find(|action| action.name() == name).expect("an action");
    let is_queued = method.class == Class::Lock && action.is_on_keys();
    if is_queued { Action::Lock } else { action }
}

/// `=KEY`, `[KEY,END)` or `[KEY,)`, in hexadecimal.
fn interval(text: &str) -> Interval {
    if let Some(key) = text.strip_prefix('=') {
        return point(&bytes(key));
    }
    let inner = text.strip_prefix('[').and_then(|rest| rest.strip_suffix(')'));
    let (start, end) = inner.and_then(|inner| inner.split_once(',')).expect("a range");
    (bytes(start), (!end.is_empty()).then(|| bytes(end)))
}

fn bytes(hexadecimal: &str) -> Vec<u8> {
    let pairs = hexadecimal.as_bytes().chunks(2).map(|pair| std::str::from_utf8(pair).expect("ASCII"));
    pairs.map(|pair| u8::from_str_radix(pair, 16).expect("hexadecimal")).collect()
}

impl Touched {
    /// What this has and `other` does not have, for people.
    pub(crate) fn beyond(&self, other: &Self) -> Vec<String> {
        let mut beyond: Vec<String> =
            self.cluster.difference(&other.cluster).map(|action| action.name().to_owned()).collect();
        // Who may read and write every key may do so with the keys of any lease.
        let leases = self.leases.difference(&other.leases).filter(|_| !other.is_unreadable);
        beyond.extend(leases.map(|lease| format!("{lease:?}")));
        for (action, keys) in surplus(&self.keys, &other.keys) {
            beyond.push(format!("{} {keys:02x?}", action.name()));
        }
        beyond
    }

    /// Why this, judged by Keyward, is more than what etcd touches.
    ///
    /// # Errors
    /// There is more without an accepted reason.
    pub(crate) fn surplus(
        &self,
        method: &Method,
        body: &[u8],
        etcd: &Self,
    ) -> Result<BTreeSet<Surplus>, Vec<String>> {
        if self.is_unreadable {
            let is_txn = method.body == MessageId::TxnRequest;
            let reason = BTreeSet::from([Surplus::UnknownPartOfTxn]);
            return if is_txn { Ok(reason) } else { Err(vec!["unreadable".to_owned()]) };
        }
        let more =
            self.cluster.difference(&etcd.cluster).count() + self.leases.difference(&etcd.leases).count();
        if more > 0 {
            return Err(self.beyond(etcd));
        }
        let mut reasons = BTreeSet::new();
        let more = surplus(&self.keys, &etcd.keys);
        let rest = surplus(&sets(intervals(more.clone())), &etcd.of_empty_ranges);
        if rest != more {
            reasons.insert(Surplus::FirstKeyOfEmptyRange);
        }
        for (_, (start, end)) in rest {
            if start.is_empty() && end == point(b"").1 && method.class == Class::Lock {
                reasons.insert(Surplus::EmptyRawKey);
            } else if has_read_with_empty_end(method.body, body) {
                reasons.insert(Surplus::EmptyEndOfRead);
            } else {
                return Err(self.beyond(etcd));
            }
        }
        Ok(reasons)
    }
}

/// The keys of one map that the other one does not have, by action.
fn surplus(ours: &BTreeMap<Action, KeySet>, theirs: &BTreeMap<Action, KeySet>) -> Vec<(Action, Interval)> {
    let none = KeySet::default();
    let beyond = |(action, keys): (&Action, &KeySet)| {
        let beyond = keys.minus(theirs.get(action).unwrap_or(&none));
        beyond.into_iter().map(|interval| (*action, interval)).collect::<Vec<_>>()
    };
    ours.iter().flat_map(beyond).collect()
}

fn intervals(keys: Vec<(Action, Interval)>) -> BTreeMap<Action, Vec<Interval>> {
    let mut intervals: BTreeMap<Action, Vec<Interval>> = BTreeMap::new();
    keys.into_iter().for_each(|(action, interval)| intervals.entry(action).or_default().push(interval));
    intervals
}

/// True if a Range or Compare has an end that is present and empty.
fn has_read_with_empty_end(schema: MessageId, body: &[u8]) -> bool {
    let end = match schema {
        MessageId::RangeRequest => 2,
        MessageId::Compare => 64,
        _ => 0,
    };
    WireFields::new(body).map_while(Result::ok).any(|field| match field.value {
        WireValue::Bytes(bytes) => match schema.field(field.number).map(|field| field.kind) {
            Some(FieldKind::Message(nested)) => has_read_with_empty_end(nested, bytes),
            _ => field.number == end && bytes.is_empty(),
        },
        _ => false,
    })
}
