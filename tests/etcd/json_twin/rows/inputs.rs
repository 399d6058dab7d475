//! Bodies that are odd or bad: forms of values, broken JSON, and documents in a row.

use super::{RestRow, bytes};
use crate::json_twin::exchange::Reading;

const RANGE: &str = "/v3/kv/range";
const TXN: &str = "/v3/kv/txn";
const ROLE_GET: &str = "/v3/auth/role/get";
const WATCH: &str = "/v3/watch";
const KEEP_ALIVE: &str = "/v3/lease/keepalive";

/// Forms that at least one version takes. The key is `/a/k`, `L2Ev` and `aw==`.
pub(super) fn forms() -> Vec<RestRow> {
    vec![
        bytes(RANGE, "white space around", || b" \r\n\t{ \"key\" : \"L2Evaw==\" } \n".to_vec()),
        bytes(RANGE, "names in camelCase", || {
            br#"{"key":"L2Ev","rangeEnd":"L2Ew","countOnly":true}"#.to_vec()
        }),
        bytes(RANGE, "a name in another case", || br#"{"Key":"L2Evaw=="}"#.to_vec()),
        bytes(RANGE, "a name with an escape", || br#"{"\u006bey":"L2Evaw=="}"#.to_vec()),
        bytes(RANGE, "base64 without padding", || br#"{"key":"L2Evaw"}"#.to_vec()),
        bytes(RANGE, "base64 for URLs", || br#"{"key":"L2Ev_-8="}"#.to_vec()),
        bytes(RANGE, "base64 of both alphabets", || br#"{"key":"L2Ev_+8="}"#.to_vec()),
        bytes(RANGE, "base64 over two lines", || br#"{"key":"L2Ev\naw=="}"#.to_vec()),
        bytes(RANGE, "base64 with bits left over", || br#"{"key":"L2Evax=="}"#.to_vec()),
        bytes(RANGE, "bytes as a list of numbers", || br#"{"key":[47,97,47,107]}"#.to_vec()),
        bytes(RANGE, "a number with a fraction of nothing", || br#"{"key":"L2Evaw==","limit":1.0}"#.to_vec()),
        bytes(RANGE, "a number with an exponent", || br#"{"key":"L2Evaw==","limit":"1e2"}"#.to_vec()),
        bytes(RANGE, "a number in a string with a space", || br#"{"key":"L2Evaw==","limit":" 5"}"#.to_vec()),
        bytes(RANGE, "a negative zero", || br#"{"key":"L2Evaw==","limit":-0}"#.to_vec()),
        bytes(RANGE, "null for a number", || br#"{"key":"L2Evaw==","limit":null}"#.to_vec()),
        bytes(RANGE, "an enum by its name in a wrong case", || {
            br#"{"key":"L2Evaw==","sort_order":"descend"}"#.to_vec()
        }),
        bytes(RANGE, "an enum by its number in a string", || {
            br#"{"key":"L2Evaw==","sort_order":"1"}"#.to_vec()
        }),
        bytes(RANGE, "a name twice", || br#"{"key":"L2Evbg==","key":"L2Evaw=="}"#.to_vec()),
        bytes(RANGE, "a name in both cases", || {
            br#"{"key":"L2Ev","range_end":"L2Ev","rangeEnd":"L2Ew","count_only":true}"#.to_vec()
        }),
        bytes(RANGE, "a document and another", || br#"{"key":"L2Evaw=="}{"key":"bm9uZQ=="}"#.to_vec()),
        bytes(RANGE, "a document and garbage", || br#"{"key":"L2Evaw=="} x"#.to_vec()),
        bytes(RANGE, "an unknown name with NUL", || br#"{"key":"L2Evaw==","a\u0000b":1}"#.to_vec()),
        bytes(RANGE, "an unknown value 9000 lists deep", || {
            let (open, close) = ("[".repeat(9_000), "]".repeat(9_000));
            format!("{{\"key\":\"L2Evaw==\",\"x\":{open}{close}}}").into_bytes()
        }),
        of_a_oneof("two members of a oneof", || {
            br#"{"success":[{"request_delete_range":{"key":"L2EvbzE="},"request_range":{"key":"L2Evaw=="}}]}"#
                .to_vec()
        }),
        of_a_oneof("null for a member of a oneof", || {
            br#"{"success":[{"request_range":null,"request_put":{"key":"L2EvbzI="}}]}"#.to_vec()
        }),
        bytes(TXN, "an empty operation", || br#"{"success":[{}]}"#.to_vec()),
        bytes(TXN, "null for a list", || br#"{"success":null}"#.to_vec()),
        bytes(TXN, "a comparison of another target", || {
            br#"{"compare":[{"key":"L2Evaw==","target":"VALUE","version":"0"}]}"#.to_vec()
        }),
        bytes(ROLE_GET, "a surrogate pair", || br#"{"role":"\ud83d\ude00"}"#.to_vec()),
        bytes(ROLE_GET, "a lone surrogate", || br#"{"role":"a\ud800b"}"#.to_vec()),
        bytes(ROLE_GET, "bytes that are no UTF-8", || b"{\"role\":\"a\xffb\"}".to_vec()),
    ]
}

/// etcd 3.4 takes one of the members of a oneof at random, null too.
fn of_a_oneof(case: &'static str, body: fn() -> Vec<u8>) -> RestRow {
    RestRow { from: Some("3.5"), ..bytes(TXN, case, body) }
}

/// What no version takes.
pub(super) fn faults() -> Vec<RestRow> {
    vec![
        bytes(RANGE, "nothing", Vec::new),
        bytes(RANGE, "null", || b"null".to_vec()),
        bytes(RANGE, "a list", || b"[]".to_vec()),
        bytes(RANGE, "a string", || b"\"x\"".to_vec()),
        bytes(RANGE, "an open object", || b"{".to_vec()),
        bytes(RANGE, "a word", || b"nonsense".to_vec()),
        bytes(RANGE, "a form", || b"key=L2Evaw%3D%3D".to_vec()),
        bytes(RANGE, "a byte order mark", || b"\xef\xbb\xbf{\"key\":\"L2Evaw==\"}".to_vec()),
        bytes(RANGE, "a comma at the end", || br#"{"key":"L2Evaw==",}"#.to_vec()),
        bytes(RANGE, "a comment", || br#"{"key":"L2Evaw=="/**/}"#.to_vec()),
        bytes(RANGE, "single quotes", || b"{'key':'L2Evaw=='}".to_vec()),
        bytes(RANGE, "a NUL", || b"{\"key\":\"L2Evaw==\0\"}".to_vec()),
        bytes(RANGE, "bad base64", || br#"{"key":"a*b"}"#.to_vec()),
        bytes(RANGE, "a key that is a number", || br#"{"key":1}"#.to_vec()),
        bytes(RANGE, "a number that is a word", || br#"{"key":"L2Evaw==","limit":"x"}"#.to_vec()),
        bytes(RANGE, "a number with a fraction", || br#"{"key":"L2Evaw==","limit":1.5}"#.to_vec()),
        bytes(RANGE, "a number past 64 bits", || {
            br#"{"key":"L2Evaw==","limit":9223372036854775808}"#.to_vec()
        }),
        bytes(RANGE, "a number that starts with 0", || br#"{"key":"L2Evaw==","limit":05}"#.to_vec()),
        bytes(RANGE, "a bool that is a string", || br#"{"key":"L2Evaw==","serializable":"true"}"#.to_vec()),
        bytes(RANGE, "an unknown value 10001 lists deep", || {
            let (open, close) = ("[".repeat(10_001), "]".repeat(10_001));
            format!("{{\"key\":\"L2Evaw==\",\"x\":{open}{close}}}").into_bytes()
        }),
        bytes(TXN, "an object for a list", || br#"{"success":{}}"#.to_vec()),
        bytes(ROLE_GET, "a string that is a number", || br#"{"role":1}"#.to_vec()),
        bytes(ROLE_GET, "an unknown escape", || br#"{"role":"\x41"}"#.to_vec()),
        bytes("/v3/auth/role/grant", "a list for a message", || br#"{"name":"ra","perm":[]}"#.to_vec()),
        bytes("/v3/cluster/member/remove", "a negative id", || br#"{"ID":-1}"#.to_vec()),
    ]
}

/// Documents of streams that are bad, at the start or later.
pub(super) fn streams() -> Vec<RestRow> {
    let silent =
        |case, body| RestRow { reading: Reading::Documents { at_least: 0 }, ..bytes(WATCH, case, body) };
    let created =
        |case, body| RestRow { reading: Reading::Documents { at_least: 1 }, ..bytes(WATCH, case, body) };
    vec![
        silent("nothing", Vec::new),
        silent("a bad first document", || b"[".to_vec()),
        silent("a first document of a wrong type", || br#"{"create_request":{"key":1}}"#.to_vec()),
        created("a bad second document", || br#"{"create_request":{"key":"L2Evaw=="}}}"#.to_vec()),
        created("a second document of a wrong type", || {
            br#"{"create_request":{"key":"L2Evaw=="}}{"create_request":{"key":1}}"#.to_vec()
        }),
        created("names in camelCase", || br#"{"createRequest":{"key":"L2Evaw=="}}"#.to_vec()),
        bytes(KEEP_ALIVE, "nothing", Vec::new),
        bytes(KEEP_ALIVE, "a bad first document", || b"[".to_vec()),
        bytes(KEEP_ALIVE, "a first document of a wrong type", || br#"{"ID":"x"}"#.to_vec()),
        bytes(KEEP_ALIVE, "a bad second document", || br#"{"ID":"7703"}}"#.to_vec()),
        bytes("/v3/maintenance/snapshot", "a bad document", || b"[".to_vec()),
        bytes("/v3/election/observe", "a bad document", || b"[".to_vec()),
    ]
}
