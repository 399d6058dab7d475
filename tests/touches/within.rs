//! Many requests: what etcd touches lies within what Keyward judges, and Keyward judges no more than it must.

use std::collections::BTreeMap;
use std::time::Instant;

use keyward::rpc::canonical;
use keyward::rpc::method::{Class, lookup};

use crate::bodies::{self, Style};
use crate::choices::Choices;
use crate::etcd_types::{EtcdTypes, Request, versions};
use crate::requests;
use crate::rewritten::rewritten;
use crate::touched::{Surplus, by_etcd, by_keyward};

const SHORT: u64 = 20_000;
const FULL: u64 = 1_000_000;
/// Requests in one exchange with a program.
const BATCH: u64 = 2_000;
/// Decisions behind one request, in bytes.
const CHOICES: usize = 400;

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

/// Splitmix64: the same bytes for the same seed and place, everywhere.
fn random_bytes(seed: u64, place: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ place.wrapping_mul(0xd134_2543_de82_ef95);
    let mut next = || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)).to_le_bytes()
    };
    (0..CHOICES / 8).flat_map(|_| next()).collect()
}

/// The ways in which requests are made.
const ORIGINS: [&str; 4] = ["as clients write them", "rewritten", "canonical by schema", "odd by schema"];

fn request(seed: u64, place: u64) -> (usize, Request) {
    let bytes = random_bytes(seed, place);
    let mut choices = Choices::new(&bytes);
    let origin = [0, 0, 0, 0, 1, 1, 1, 1, 2, 3][choices.below(10)];
    let method = requests::method(&mut choices);
    let body = match origin {
        0 => requests::structured(&mut choices, method),
        1 => {
            let body = requests::structured(&mut choices, method);
            // The decisions left may be few: those about the bytes are others.
            rewritten(&mut Choices::new(&random_bytes(!seed, place)), method.body, &body)
        }
        2 => bodies::body(&mut choices, method.body, Style::Canonical, 3),
        _ => bodies::body(&mut choices, method.body, Style::Odd, 3),
    };
    (origin, (method, body))
}

#[derive(Default)]
struct Counts {
    made: [u64; ORIGINS.len()],
    accepted: [u64; ORIGINS.len()],
    /// Requests compared, by version.
    compared: BTreeMap<String, u64>,
    /// Requests of which Keyward judges more, by version and reason.
    surplus: BTreeMap<(String, Surplus), u64>,
    /// Refused bodies whose touches, as etcd reads them, Keyward would not all have judged.
    saved_by_refusal: BTreeMap<String, u64>,
    by_class: BTreeMap<String, u64>,
}

impl Counts {
    /// Compares the answer of one program about one request.
    fn compare(&mut self, version: &str, (method, body): &Request, is_accepted: bool, line: &str) {
        let keyward = by_keyward(method, body);
        let etcd = by_etcd(method, line);
        let text =
            || format!("{} {body:02x?} on {version}\n  etcd: {line}\n  Keyward: {keyward:?}", method.path);
        let Some(etcd) = etcd else {
            let is_known = line != "unknown method";
            assert!(!(is_accepted && is_known), "an accepted body is not read by etcd: {}", text());
            assert!(is_known || (method.name == "RangeStream" && version.starts_with("3.5")), "{}", text());
            return;
        };
        let escaped = etcd.beyond(&keyward);
        if !is_accepted {
            *self.saved_by_refusal.entry(version.to_owned()).or_default() += u64::from(!escaped.is_empty());
            return;
        }
        assert!(escaped.is_empty(), "etcd touches {escaped:?}, which Keyward does not judge: {}", text());
        let surplus = keyward.surplus(method, body, &etcd);
        let surplus = surplus.unwrap_or_else(|more| panic!("Keyward judges {more:?} as well: {}", text()));
        for reason in surplus {
            *self.surplus.entry((version.to_owned(), reason)).or_default() += 1;
        }
        *self.compared.entry(version.to_owned()).or_default() += 1;
    }

    fn tell(&self) {
        for (at, origin) in ORIGINS.iter().enumerate() {
            println!("{origin}: {} of {} bodies are canonical", self.accepted[at], self.made[at]);
        }
        println!("canonical bodies by class: {:?}", self.by_class);
        println!("compared by version: {:?}", self.compared);
        for ((version, reason), count) in &self.surplus {
            println!("{version}: of {count} bodies Keyward judges more: {reason:?}");
        }
        println!(
            "refused bodies of which etcd would touch more than Keyward judges: {:?}",
            self.saved_by_refusal
        );
    }
}

#[test]
fn what_etcd_touches_is_judged() {
    let seed = number("KEYWARD_SEED").unwrap_or(1);
    let all = if number("KEYWARD_TEST_FULL") == Some(1) { FULL } else { SHORT };
    let versions = versions();
    assert!(versions.len() >= 2, "gogo/protobuf's types and Go's own: {versions:?}");
    let mut programs: Vec<_> = versions.iter().map(|version| EtcdTypes::start(version)).collect();
    let (mut counts, started) = (Counts::default(), Instant::now());
    for first in (0..all).step_by(usize::try_from(BATCH).expect("small")) {
        let made: Vec<_> = (first..all.min(first + BATCH)).map(|place| request(seed, place)).collect();
        let mut accepted = Vec::with_capacity(made.len());
        let mut batch = Vec::with_capacity(made.len());
        for (origin, (method, body)) in made {
            let is_accepted = canonical::check(method.body, &body).is_ok();
            counts.made[origin] += 1;
            counts.accepted[origin] += u64::from(is_accepted);
            if is_accepted {
                *counts.by_class.entry(format!("{:?}", method.class)).or_default() += 1;
            }
            accepted.push(is_accepted);
            batch.push((method, body));
        }
        let answers: Vec<Vec<String>> = std::thread::scope(|threads| {
            let asked: Vec<_> =
                programs.iter_mut().map(|program| threads.spawn(|| program.ask(&batch))).collect();
            asked.into_iter().map(|asked| asked.join().expect("answers")).collect()
        });
        for (program, lines) in programs.iter().zip(&answers) {
            for ((request, is_accepted), line) in batch.iter().zip(&accepted).zip(lines) {
                counts.compare(&program.version, request, *is_accepted, line);
            }
        }
        let done = first + batch.len() as u64;
        if done.is_multiple_of(100_000) {
            println!("{done} of {all} bodies after {} s", started.elapsed().as_secs());
        }
    }
    counts.tell();
    let (made, accepted): (u64, u64) = (counts.made.iter().sum(), counts.accepted.iter().sum());
    assert_eq!(made, all);
    assert!(accepted * 10 > made * 7, "{accepted} of {made} bodies are canonical");
    assert_eq!(counts.made[0], counts.accepted[0], "clients write canonical bodies");
    assert!(counts.compared.values().all(|compared| compared * 10 > made * 6), "{:?}", counts.compared);
    for class in [Class::Read, Class::Write, Class::Watch, Class::Lease, Class::Lock, Class::Auth] {
        let count = counts.by_class.get(&format!("{class:?}")).copied().unwrap_or_default();
        assert!(count > all / 200, "{count} bodies of class {class:?}");
    }
    assert!(counts.saved_by_refusal.values().all(|saved| *saved > 0), "{:?}", counts.saved_by_refusal);
}

/// The programs read bodies differently where their decoders are known to: else two of them would say no more than one.
#[test]
fn the_versions_read_differently_what_is_known_to_differ() {
    let range = lookup("/etcdserverpb.KV/Range").expect("a row");
    let txn = lookup("/etcdserverpb.KV/Txn").expect("a row");
    let requests: [(Request, &str, &str); 4] = [
        // An end that is present and empty is not nil for gogo/protobuf, and etcd's store takes it for no end.
        ((range, b"\x0a\x01a\x12\x00".to_vec()), "touches\tread [61,)", "touches\tread =61"),
        ((txn, b"\x12\x07\x0a\x05\x0a\x01a\x12\x00".to_vec()), "touches\tread [61,)", "touches\tread =61"),
        // An op that names request_range twice: replaced, or merged.
        (
            (txn, b"\x12\x0a\x0a\x03\x0a\x01a\x0a\x03\x12\x01b".to_vec()),
            "touches\tread [,62)",
            "touches\tread [61,62)",
        ),
        // Field 2^32 + 1.
        ((range, b"\x8a\x80\x80\x80\x80\x01\x01a".to_vec()), "touches\tread =61", "undecodable"),
    ];
    let bodies: Vec<Request> = requests.iter().map(|(request, ..)| request.clone()).collect();
    for version in versions() {
        let answers = EtcdTypes::start(&version).ask(&bodies);
        for ((request, gogo, own), answer) in requests.iter().zip(answers) {
            let expected = if version.starts_with("3.5") { gogo } else { own };
            assert_eq!(&answer, expected, "{version} {request:02x?}");
        }
    }
}
