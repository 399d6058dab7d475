//! Many inputs: accepted documents mean for Go what they mean for Keyward, and messages are written alike.

use std::collections::BTreeMap;
use std::time::Instant;

use bytes::BytesMut;
use keyward::rest::json_fault::JsonFaultReason;
use keyward::rest::json_reply::append_json_of_message;
use keyward::rest::json_request::message_of_json;
use keyward::rest::json_style::{JsonPlace, JsonStyle};
use keyward::rest::message_fields::{self, MessageFields};
use keyward::rpc::method::{METHODS, Method, lookup};

use crate::bodies::{self, Style};
use crate::choices::Choices;
use crate::go_json::{GoJson, Record, versions};
use crate::json_texts;

const SHORT: u64 = 20_000;
const FULL: u64 = 10_000_000;
/// Inputs in one exchange with a program.
const BATCH: u64 = 2_000;
/// Decisions behind one input, in bytes.
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

fn method(choices: &mut Choices<'_>) -> &'static Method {
    match choices.below(4) {
        0 => lookup("/etcdserverpb.KV/Txn").expect("a row"),
        1 => lookup("/etcdserverpb.Watch/Watch").expect("a row"),
        _ => &METHODS[choices.below(METHODS.len())],
    }
}

/// RPCs whose messages etcd's types do not have, or not in every version.
fn is_of_every_version(method: &Method) -> bool {
    !method.path.starts_with("/grpc.health") && !["AuthStatus", "Downgrade"].contains(&method.name)
}

/// The version whose types have every field of `proto/`.
const NEWEST: &str = "3.7.";
/// Replies with fields that only the newest version has.
const GROWN: [&str; 4] = [
    "etcdserverpb.StatusResponse",
    "etcdserverpb.HashKVResponse",
    "etcdserverpb.SnapshotResponse",
    "etcdserverpb.RangeStreamResponse",
];

/// A message of the kind that a member sends.
fn reply(choices: &mut Choices<'_>, method: &Method) -> (&'static str, &'static MessageFields, Vec<u8>) {
    let fields = message_fields::of_method(method.path).expect("messages").reply;
    let json = json_texts::document(choices, fields.full_name(), Style::Canonical, 3);
    let body =
        message_of_json(&json, fields).unwrap_or_else(|fault| panic!("{fault}: {}", json.escape_ascii()));
    (fields.full_name(), fields, body.to_vec())
}

#[derive(Default)]
struct Counts {
    documents: u64,
    accepted: u64,
    messages: u64,
    refused: BTreeMap<JsonFaultReason, u64>,
    /// By version and answer.
    answers: BTreeMap<(String, String), u64>,
}

impl Counts {
    /// One input: a document, accepted or not, or a message in each of its forms.
    fn input(&mut self, seed: u64, place: u64) -> Vec<Record> {
        let bytes = random_bytes(seed, place);
        let mut choices = Choices::new(&bytes);
        let mut method = method(&mut choices);
        if !is_of_every_version(method) {
            method = lookup("/etcdserverpb.KV/Txn").expect("a row");
        }
        let name = method.body.message().name;
        let fields = message_fields::of_method(method.path).expect("messages").request;
        if choices.one_in(4) {
            self.messages += 1;
            let (name, fields, body) = if choices.flag() {
                (name, fields, bodies::body(&mut choices, method.body, Style::Canonical, 3))
            } else {
                reply(&mut choices, method)
            };
            let forms = [
                ("v1", JsonStyle::GatewayV1, JsonPlace::Body),
                ("v2", JsonStyle::GatewayV2, JsonPlace::Body),
                ("v2 stream", JsonStyle::GatewayV2, JsonPlace::StreamResult),
            ];
            let written = forms.map(|(kind, style, place)| {
                let mut out = BytesMut::new();
                append_json_of_message(style, place, fields, &body, &mut out).expect("a canonical message");
                (kind, name, out.to_vec(), body.clone())
            });
            return written.into();
        }
        self.documents += 1;
        let style = if choices.flag() { Style::Canonical } else { Style::Odd };
        let json = json_texts::document(&mut choices, name, style, 3);
        match message_of_json(&json, fields) {
            Ok(body) => {
                self.accepted += 1;
                vec![("request", name, json, body.to_vec())]
            }
            Err(fault) => {
                assert!(style == Style::Odd, "{fault}: {} {}", method.path, json.escape_ascii());
                *self.refused.entry(fault.reason).or_default() += 1;
                Vec::new()
            }
        }
    }

    fn compare(&mut self, version: &str, (kind, name, text, body): &Record, line: &str) {
        if GROWN.contains(name) && !version.starts_with(NEWEST) {
            return;
        }
        let answer = match line {
            "same" | "same, refused by v1" | "same, refused by v2" | "refused by each for base64" => {
                format!("{kind}: {line}")
            }
            _ => panic!("{version}: {kind} {name} {} {body:02x?}\n  Go: {line}", text.escape_ascii()),
        };
        *self.answers.entry((version.to_owned(), answer)).or_default() += 1;
    }

    fn tell(&self) {
        println!(
            "{} of {} documents are accepted; {} messages",
            self.accepted, self.documents, self.messages
        );
        println!("refused documents by reason: {:?}", self.refused);
        for ((version, answer), count) in &self.answers {
            println!("{version}: {answer}: {count}");
        }
    }
}

#[test]
fn json_means_the_same_for_go() {
    let seed = number("KEYWARD_SEED").unwrap_or(1);
    let all = if number("KEYWARD_TEST_FULL") == Some(1) { FULL } else { SHORT };
    let versions = versions();
    assert!(versions.len() >= 2, "gogo/protobuf's types and Go's own: {versions:?}");
    let mut programs: Vec<_> = versions.iter().map(|version| GoJson::start(version)).collect();
    let (mut counts, started) = (Counts::default(), Instant::now());
    for first in (0..all).step_by(usize::try_from(BATCH).expect("small")) {
        let last = all.min(first + BATCH);
        let batch: Vec<Record> = (first..last).flat_map(|place| counts.input(seed, place)).collect();
        let answers: Vec<Vec<String>> = std::thread::scope(|threads| {
            let asked: Vec<_> =
                programs.iter_mut().map(|program| threads.spawn(|| program.ask(&batch))).collect();
            asked.into_iter().map(|asked| asked.join().expect("answers")).collect()
        });
        for (program, lines) in programs.iter().zip(&answers) {
            for (record, line) in batch.iter().zip(lines) {
                counts.compare(&program.version, record, line);
            }
        }
        if last.is_multiple_of(100_000) {
            println!("{last} of {all} inputs after {} s", started.elapsed().as_secs());
        }
    }
    counts.tell();
    assert_eq!(counts.documents + counts.messages, all);
    assert!(counts.accepted * 2 > counts.documents, "{} of {}", counts.accepted, counts.documents);
    assert!(counts.accepted * 10 < counts.documents * 9, "{} of {}", counts.accepted, counts.documents);
    let reasons = [
        JsonFaultReason::NotUtf8,
        JsonFaultReason::Syntax,
        JsonFaultReason::Incomplete,
        JsonFaultReason::Trailing,
        JsonFaultReason::Twice,
        JsonFaultReason::SecondOfOneof,
        JsonFaultReason::WrongType,
        JsonFaultReason::NotInteger,
        JsonFaultReason::OutOfRange,
        JsonFaultReason::NotBase64,
        JsonFaultReason::UnknownEnumName,
    ];
    for reason in reasons {
        let count = counts.refused.get(&reason).copied().unwrap_or_default();
        assert!(count > all / 2_000, "{count} documents are refused: {reason}");
    }
}
