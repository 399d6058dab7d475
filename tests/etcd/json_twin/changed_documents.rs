//! Documents of clients, changed by chance, at etcd's gateway and through Keyward, in front of the same member.
//!
//! Owns: the documents and their changes. Must not know why a document is refused, but for the reasons that are documented. Every request reads,
//! so that both answers are of one store. Values of `sort_target` stay valid: members before 3.6 end over others.

use std::collections::BTreeMap;

use crate::chaos::seeded::Rng;
use crate::harness::{
    Cluster, Options,
    binary::{Version, full},
    every_version,
    keyward::{Keyward, Site},
    side_by_side,
};

use super::exchange::{Ask, HttpAnswer, Reading, Target};

/// Documents for each version.
const DOCUMENTS: (usize, usize) = (400, 4000);

/// What clients send, by path.
const BEGIN: [(&str, &str); 4] = [
    (
        "/v3/kv/range",
        r#"{"key":"Zm9v","range_end":"Zm9wAA==","limit":"10","revision":0,"sort_order":"ASCEND","serializable":true,"keys_only":false,"max_mod_revision":"9223372036854775807"}"#,
    ),
    (
        "/v3/kv/txn",
        r#"{"compare":[{"target":"VALUE","key":"Zm9v","value":"YmFy","result":"EQUAL"}],"success":[{"request_range":{"key":"Zm9v"}}],"failure":[{"request_range":{"key":"YQ==","range_end":"Yg=="}}]}"#,
    ),
    ("/v3/lease/timetolive", r#"{"ID":"7587","keys":true}"#),
    ("/v3/kv/range", r#"{"key":"Zm9v","range_end":"enp6"}"#),
];

/// Values in place of others.
const VALUES: &[&str] = &[
    "null",
    "true",
    "\"true\"",
    "1",
    "\"1\"",
    "1e1",
    "1.0",
    "1.5",
    "\"1e1\"",
    "-0",
    "01",
    "\"\"",
    "[]",
    "{}",
    "[\"YQ==\"]",
    "9223372036854775808",
    "\"DESCEND\"",
    "\"descend\"",
    "2",
    "\"2\"",
    r#""Zm9v\n""#,
    r#""Zm9\nv""#,
    r#""Zm\r\n9v\r\n""#,
    r#""Zm9vYg\n==""#,
    r#""Zm9vYg==\n""#,
    r#""Zm9v\nYg""#,
    r#""Zm8\n""#,
    r#""Zm9v""#,
    r#""Zm9v Yg==""#,
    "\"YQ\"",
    "\"YR==\"",
    "\"YR\"",
    "\"YQ=\"",
    "\"YQ==YQ==\"",
    "\"-_8=\"",
    "\"-_8\"",
    "\"+/8=\"",
    "\"+/8\"",
    "\"+_8=\"",
    r#""\/\/8=""#,
    r#""\u005am9v""#,
    r#""\ud800""#,
];

/// Texts put in somewhere.
const PIECES: &[&str] = &[
    " ",
    "\n",
    "\t",
    "\\n",
    "\\r\\n",
    "=",
    "\"",
    ",",
    "{",
    "}",
    "-",
    "_",
    "\0",
    "\u{feff}",
    ",\"key\":\"YQ==\"",
    "\"x\":1,",
];

/// The documented reasons of Keyward to refuse what a gateway takes: docs/differences.md, HTTP and JSON.
const DOCUMENTED: [&str; 5] = [
    "given twice",
    "another field of the same oneof is given too",
    "no such enum value",
    "more bytes after the document",
    "not an integer",
];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_the_gateway_takes_of_changed_documents_is_taken() {
    let faults = side_by_side(&every_version(), compared).await.concat();
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

/// The documents that are judged otherwise than documented.
async fn compared(version: &Version) -> Vec<String> {
    let cluster = Cluster::start(version, Options::default()).await;
    let site = Site::new();
    let config = site.in_front_of(&cluster);
    let keyward = Keyward::start(site, &config).await;
    let (direct, through) = (Target::plain(cluster.address(0)), Target::plain(keyward.site().listen));
    let mut rng = Rng::new(20_261_128);
    let (mut outcomes, mut faults) = (BTreeMap::<String, usize>::new(), Vec::new());
    for _ in 0..if full() { DOCUMENTS.1 } else { DOCUMENTS.0 } {
        let (path, body) = document(&mut rng);
        let ask = Ask {
            method: "POST",
            path: path.into(),
            headers: Vec::new(),
            body: body.clone().into(),
            reading: Reading::ToItsEnd,
        };
        let (theirs, ours) = (taken(&direct.ask(&ask).await), taken(&through.ask(&ask).await));
        let outcome = match (&theirs, &ours) {
            (Ok(theirs), Ok(ours)) if theirs == ours => "taken by both".into(),
            (Ok(theirs), Ok(ours)) => {
                faults.push(format!("etcd {version}: {path} {body:?}: {theirs} and {ours}"));
                "answered otherwise".into()
            }
            (Err(_), Err(_)) => "refused by both".into(),
            (Err(_), Ok(_)) => "taken here alone".into(),
            (Ok(_), Err(reason)) => {
                let is_list = reason.ends_with("wrong JSON type") && body.contains(":[]");
                if !is_list && !DOCUMENTED.iter().any(|documented| reason.ends_with(documented)) {
                    faults.push(format!("etcd {version}: {path} {body:?}: taken by etcd, here {reason}"));
                }
                let (_, reason) = reason.rsplit_once(": ").unwrap_or_default();
                format!("taken by etcd alone, {reason}")
            }
        };
        *outcomes.entry(outcome).or_default() += 1;
    }
    println!("etcd {version}: {outcomes:?}");
    let both = outcomes.get("taken by both").copied().unwrap_or_default();
    let refused = outcomes.get("refused by both").copied().unwrap_or_default();
    assert!(both.min(refused) > DOCUMENTS.0 / 10, "the documents are of one kind: {outcomes:?}");
    faults
}

/// The answer to a document that was read, or why the document was not.
fn taken(answer: &HttpAnswer) -> Result<serde_json::Value, String> {
    let status = answer.status.expect("an answer");
    let document: serde_json::Value = match serde_json::from_slice(&answer.body) {
        Ok(document) => document,
        Err(_) => return Err(format!("{status} {}", String::from_utf8_lossy(&answer.body))),
    };
    let told = document.get("message").or_else(|| document.get("error"));
    match told.and_then(|told| told.as_str()) {
        Some(text) if status != 200 && !text.starts_with("etcdserver: ") => Err(text.to_owned()),
        // A refusal by the store, in the gateway's or in Keyward's form.
        Some(text) => Ok(text.into()),
        None => Ok(document),
    }
}

/// A path, and a document with one to three changes.
fn document(rng: &mut Rng) -> (&'static str, String) {
    let &(path, begin) = rng.one_of(&BEGIN);
    let mut text = begin.to_owned();
    for _ in 0..=rng.below(3) {
        text = changed(rng, &text);
    }
    (path, text)
}

fn changed(rng: &mut Rng, text: &str) -> String {
    let at = rng.below(text.len() + 1);
    let at = (0..=at).rev().find(|at| text.is_char_boundary(*at)).unwrap_or_default();
    let (before, after) = text.split_at(at);
    match rng.below(10) {
        // A value behind a colon.
        0..6 => with_value(rng, text),
        6 => format!("{before}{}{after}", rng.one_of(PIECES)),
        7 => after.get(1..).map_or_else(|| text.to_owned(), |after| format!("{before}{after}")),
        8 => text.replacen('_', "", 1),
        _ => format!("{text}{}", rng.one_of(&[" ", "\n", "{}", "x", ","])),
    }
}

/// With another value of one field.
fn with_value(rng: &mut Rng, text: &str) -> String {
    let colons: Vec<usize> = text.match_indices(':').map(|(at, _)| at + 1).collect();
    if colons.is_empty() {
        return text.to_owned();
    }
    let begin = *rng.one_of(&colons);
    let rest = &text[begin..];
    let mut in_string = false;
    let end = rest.char_indices().find(|(at, char)| {
        if *char == '"' && !rest[..*at].ends_with('\\') {
            in_string = !in_string;
        }
        !in_string && [',', '}', ']'].contains(char)
    });
    let end = end.map_or(rest.len(), |(at, _)| at);
    format!("{}{}{}", &text[..begin], rng.one_of(VALUES), &rest[end..])
}
