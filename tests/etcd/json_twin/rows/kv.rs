//! KV and Watch.

use serde_json::{Value, json};

use super::{RestRow, base64, row, stream};
use crate::json_twin::caller_side::Who;

const RANGE: &str = "/v3/kv/range";
const PUT: &str = "/v3/kv/put";
const DELETE: &str = "/v3/kv/deleterange";
const TXN: &str = "/v3/kv/txn";
const COMPACT: &str = "/v3/kv/compaction";
const WATCH: &str = "/v3/watch";

/// What the other rows find: alice's role covers `/a/`, not `/b/`.
pub(super) fn before() -> Vec<RestRow> {
    vec![
        row(PUT, "first", |_, _| vec![put("/a/k", "one")]).only(&[Who::Root]),
        row(PUT, "again", |_, _| vec![put("/a/k", "two")]).only(&[Who::Root]),
        row(PUT, "another", |_, _| vec![put("/a/m", "one")]).only(&[Who::Root]),
        row(PUT, "elsewhere", |_, _| vec![put("/b/k", "one")]).only(&[Who::Root]),
    ]
}

pub(super) fn keys() -> Vec<RestRow> {
    let mut rows = reads();
    rows.extend(writes());
    rows
}

fn reads() -> Vec<RestRow> {
    vec![
        row(RANGE, "a key", |_, _| vec![key("/a/k")]),
        row(RANGE, "a key outside the role", |_, _| vec![key("/b/k")]),
        row(RANGE, "a key that is not there", |_, _| vec![key("/a/none")]),
        row(RANGE, "a prefix, limited", |_, _| vec![prefix(json!({ "limit": "1" }))]),
        row(RANGE, "everything", |_, _| vec![json!({ "key": base64("\0"), "range_end": base64("\0") })]),
        row(RANGE, "the number of keys", |_, _| vec![prefix(json!({ "count_only": true }))]),
        row(RANGE, "sorted, keys only", |_, _| {
            vec![prefix(json!({ "sort_order": "DESCEND", "sort_target": "MOD", "keys_only": true }))]
        }),
        row(RANGE, "serializable", |_, _| vec![with(key("/a/k"), json!({ "serializable": true }))]),
        row(RANGE, "an older revision", |_, _| vec![with(key("/a/k"), json!({ "revision": 2 }))]),
        row(RANGE, "a future revision", |_, _| vec![with(key("/a/k"), json!({ "revision": 99_999 }))]),
        row(RANGE, "no key", |_, _| vec![json!({})]),
        row(RANGE, "an unknown sort order", |_, _| vec![with(key("/a/k"), json!({ "sort_order": 9 }))]),
        row(RANGE, "a field that nobody knows", |_, _| vec![with(key("/a/k"), json!({ "nope": [1, {}] }))]),
    ]
}

fn writes() -> Vec<RestRow> {
    vec![
        row(PUT, "a key", |_, who| {
            vec![with(put(&format!("/a/p/{}", who.name()), "x"), json!({ "prev_kv": true }))]
        }),
        row(PUT, "a key outside the role", |_, who| vec![put(&format!("/b/p/{}", who.name()), "x")]),
        row(PUT, "no key", |_, _| vec![put("", "x")]),
        row(PUT, "with a lease", |_, who| {
            let lease = json!({ "lease": who.lease() });
            vec![with(put(&format!("/a/leased/{}", who.name()), "x"), lease)]
        }),
        row(PUT, "with an unknown lease", |_, _| {
            vec![with(put("/a/leased/no", "x"), json!({ "lease": "4" }))]
        }),
        row(PUT, "keeping a value that is not there", |_, _| {
            vec![with(key("/a/none"), json!({ "ignore_value": true }))]
        }),
        row(PUT, "keeping a value and giving one", |_, _| {
            vec![with(put("/a/k", "x"), json!({ "ignore_value": true }))]
        }),
        row(PUT, "larger than etcd takes", |_, _| vec![put("/a/large", &"x".repeat(1_700_000))])
            .only(&[Who::Alice, Who::Root]),
        row(TXN, "compare, then write and read", |_, who| vec![txn(&format!("/a/t/{}", who.name()))]),
        row(TXN, "outside the role", |_, who| vec![txn(&format!("/b/t/{}", who.name()))]),
        row(TXN, "empty", |_, _| vec![json!({})]),
        row(TXN, "one key twice", |_, _| {
            vec![
                json!({ "success": [{ "request_put": put("/a/d", "1") }, { "requestPut": put("/a/d", "2") }] }),
            ]
        }),
        row(TXN, "too many operations", |_, _| {
            let many: Vec<_> =
                (0..129).map(|n| json!({ "request_put": put(&format!("/a/o/{n}"), "1") })).collect();
            vec![json!({ "success": many })]
        }),
        row(TXN, "a Txn within", |_, who| {
            vec![json!({ "success": [{ "request_txn": txn(&format!("/a/n/{}", who.name())) }] })]
        })
        // Old members let everybody write so, and Keyward does not: the revisions would differ from here on.
        .only(&[Who::Alice, Who::Bearer, Who::Root]),
        row(DELETE, "a key", |_, who| {
            vec![with(key(&format!("/a/p/{}", who.name())), json!({ "prev_kv": true }))]
        }),
        row(DELETE, "a key outside the role", |_, _| vec![key("/b/p/root")]),
        row(DELETE, "no key", |_, _| vec![json!({})]),
    ]
}

pub(super) fn watch() -> Vec<RestRow> {
    vec![
        stream(WATCH, "from now", 1, |_, _| vec![create(key("/a/k"))]),
        stream(WATCH, "a key outside the role", 1, |_, _| vec![create(key("/b/k"))]),
        stream(WATCH, "a prefix", 1, |_, _| vec![create(prefix(json!({})))]),
        stream(WATCH, "history", 2, |_, _| {
            vec![create(with(key("/a/k"), json!({ "start_revision": "2", "prev_kv": true })))]
        }),
        stream(WATCH, "history without puts", 1, |_, _| {
            vec![create(with(prefix(json!({})), json!({ "start_revision": 2, "filters": ["NOPUT"] })))]
        }),
        stream(WATCH, "from the future", 1, |_, _| {
            vec![create(with(key("/a/k"), json!({ "start_revision": 99_999 })))]
        }),
        stream(WATCH, "from a negative revision", 1, |_, _| {
            vec![create(with(key("/a/k"), json!({ "start_revision": -1 })))]
        }),
        stream(WATCH, "an id of the client's", 1, |_, _| {
            vec![create(with(key("/a/k"), json!({ "watch_id": 77 })))]
        }),
        stream(WATCH, "an id twice", 2, |_, _| vec![create(with(key("/a/k"), json!({ "watch_id": 77 }))); 2]),
        stream(WATCH, "two, then cancel one", 3, |_, _| {
            vec![create(key("/a/k")), create(key("/a/m")), json!({ "cancel_request": { "watch_id": "1" } })]
        }),
        stream(WATCH, "cancel an unknown one", 1, |_, _| {
            vec![create(key("/a/k")), json!({ "cancel_request": { "watch_id": 9 } })]
        }),
        stream(WATCH, "an inverted range", 1, |_, _| {
            vec![create(with(key("/a/z"), json!({ "range_end": base64("/a/a") })))]
        })
        .only(&[Who::Alice, Who::Root]),
        stream(WATCH, "a request that says nothing", 0, |_, _| vec![json!({})]).only(&[Who::Alice]),
    ]
}

/// Rows that need a compaction: it can be made once.
pub(super) fn compacted() -> Vec<RestRow> {
    vec![
        row(COMPACT, "the future", |_, _| vec![json!({ "revision": 99_999 })]),
        row(COMPACT, "the past", |_, _| vec![json!({ "revision": "3", "physical": true })]),
        row(COMPACT, "what was compacted", |_, _| vec![json!({ "revision": 2 })]),
        row(RANGE, "a compacted revision", |_, _| vec![with(key("/a/k"), json!({ "revision": 2 }))]),
        stream(WATCH, "from a compacted revision", 2, |_, _| {
            vec![create(with(key("/a/k"), json!({ "start_revision": 2 })))]
        })
        .only(&[Who::Alice, Who::Root]),
    ]
}

/// The members of both objects.
fn with(mut object: Value, more: Value) -> Value {
    if let (Value::Object(members), Value::Object(more)) = (&mut object, more) {
        members.extend(more);
    }
    object
}

fn key(key: &str) -> Value {
    json!({ "key": base64(key) })
}

fn prefix(more: Value) -> Value {
    with(json!({ "key": base64("/a/"), "range_end": base64("/a0") }), more)
}

fn put(key: &str, value: &str) -> Value {
    json!({ "key": base64(key), "value": base64(value) })
}

/// Where the key is not there: write it, read it, and read its neighbour.
fn txn(name: &str) -> Value {
    json!({
        "compare": [{ "result": "EQUAL", "target": "CREATE", "key": base64(name), "create_revision": "0" }],
        "success": [{ "request_put": put(name, "x") }, { "request_range": key(name) }],
        "failure": [{ "request_range": key("/a/k") }],
    })
}

fn create(request: Value) -> Value {
    json!({ "create_request": request })
}
