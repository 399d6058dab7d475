//! Auth: users, roles, logins, and last the switch itself.

use serde_json::{Value, json};

use super::{RestRow, base64, row};
use crate::{harness::password, json_twin::caller_side::Who};

const STATUS: &str = "/v3/auth/status";
const ENABLE: &str = "/v3/auth/enable";
const DISABLE: &str = "/v3/auth/disable";
const AUTHENTICATE: &str = "/v3/auth/authenticate";
const USER_ADD: &str = "/v3/auth/user/add";
const USER_GET: &str = "/v3/auth/user/get";
const USER_LIST: &str = "/v3/auth/user/list";
const USER_DELETE: &str = "/v3/auth/user/delete";
const PASSWORD: &str = "/v3/auth/user/changepw";
const GRANT_ROLE: &str = "/v3/auth/user/grant";
const REVOKE_ROLE: &str = "/v3/auth/user/revoke";
const ROLE_ADD: &str = "/v3/auth/role/add";
const ROLE_GET: &str = "/v3/auth/role/get";
const ROLE_LIST: &str = "/v3/auth/role/list";
const ROLE_DELETE: &str = "/v3/auth/role/delete";
const GRANT: &str = "/v3/auth/role/grant";
const REVOKE: &str = "/v3/auth/role/revoke";
const RANGE: &str = "/v3/kv/range";
/// Characters that encoders of JSON write in different ways, each of which etcd takes in a name.
const ODD: &str = "<r>&\u{2028}\u{2029}\"\\/\u{1}\u{8}\u{c}\n\u{7f}\u{e9}\u{1f600}";

pub(super) fn users() -> Vec<RestRow> {
    let mut rows = vec![
        row(STATUS, "", |_, _| vec![json!({})]),
        row(ENABLE, "while it is on", |_, _| vec![json!({})]),
        row(USER_ADD, "a new one", |_, _| vec![login("carol", "carol-secret")]),
        row(USER_ADD, "one that is there", |_, _| vec![login("alice", "another-secret")]),
        row(USER_ADD, "without a name", |_, _| vec![login("", "secret")]),
        row(USER_ADD, "for certificates only", |_, _| {
            vec![json!({ "name": "dave", "options": { "no_password": true } })]
        }),
        // Kept, from here on, by whoever keeps good logins.
        row(AUTHENTICATE, "a new user", |_, _| vec![login("carol", "carol-secret")]).only(&[Who::None]),
        row(USER_GET, "alice", |_, _| vec![named("alice")]),
        row(USER_GET, "oneself", |_, who| vec![named(if who == Who::Bearer { "alice" } else { who.name() })]),
        row(USER_LIST, "", |_, _| vec![json!({})]),
        row(PASSWORD, "carol's", |_, _| vec![login("carol", "new-secret")]),
        row(AUTHENTICATE, "right after its change", |_, _| vec![login("carol", "carol-secret")])
            .only(&[Who::None]),
        row(PASSWORD, "nobody's", |_, _| vec![login("nobody", "new-secret")]),
    ];
    rows.extend(roles());
    rows
}

fn roles() -> Vec<RestRow> {
    vec![
        row(ROLE_ADD, "a new one", |_, _| vec![named("rc")]),
        row(ROLE_ADD, "one that is there", |_, _| vec![named("ra")]),
        row(ROLE_ADD, "an odd name", |_, _| vec![named(ODD)]),
        row(ROLE_LIST, "with an odd name", |_, _| vec![json!({})]),
        row(ROLE_DELETE, "an odd name", |_, _| vec![json!({ "role": ODD })]),
        row(GRANT, "to read a prefix", |_, _| vec![grant("rc")]),
        row(GRANT, "to an unknown role", |_, _| vec![grant("none")]),
        row(ROLE_GET, "alice's", |_, _| vec![json!({ "role": "ra" })]),
        row(ROLE_GET, "the new one", |_, _| vec![json!({ "role": "rc" })]),
        row(ROLE_GET, "an unknown one", |_, _| vec![json!({ "role": "none" })]),
        row(ROLE_LIST, "", |_, _| vec![json!({})]),
        row(GRANT_ROLE, "the new one", |_, _| vec![json!({ "user": "carol", "role": "rc" })]),
        row(GRANT_ROLE, "an unknown one", |_, _| vec![json!({ "user": "carol", "role": "none" })]),
        row(REVOKE_ROLE, "the new one", |_, _| vec![json!({ "name": "carol", "role": "rc" })]),
        row(REVOKE_ROLE, "one that was not granted", |_, _| vec![json!({ "name": "carol", "role": "ra" })]),
        row(REVOKE, "what was granted", |_, _| vec![revoke("/c/")]),
        row(REVOKE, "what was not granted", |_, _| vec![revoke("/none/")]),
        row(ROLE_DELETE, "the new one", |_, _| vec![json!({ "role": "rc" })]),
        row(ROLE_DELETE, "an unknown one", |_, _| vec![json!({ "role": "none" })]),
        row(USER_DELETE, "an unknown one", |_, _| vec![named("nobody")]),
        row(USER_DELETE, "root", |_, _| vec![named("root")]),
    ]
}

pub(super) fn logins() -> Vec<RestRow> {
    vec![
        row(AUTHENTICATE, "the right password", |_, _| vec![login("alice", &password("alice"))]),
        row(AUTHENTICATE, "a wrong password", |_, _| vec![login("alice", "wrong")]),
        row(AUTHENTICATE, "no password", |_, _| vec![named("alice")]),
        row(AUTHENTICATE, "an unknown user", |_, _| vec![login("nobody", "wrong")]),
        row(AUTHENTICATE, "no user", |_, _| vec![json!({})]),
        row(AUTHENTICATE, "a user without a password", |_, _| vec![login("dave", "wrong")]),
        row(AUTHENTICATE, "a changed password", |_, _| vec![login("carol", "new-secret")]).only(&[Who::None]),
        row(AUTHENTICATE, "the password before it", |_, _| vec![login("carol", "carol-secret")])
            .only(&[Who::None]),
        row(USER_DELETE, "the new one", |_, _| vec![named("carol")]),
        row(AUTHENTICATE, "a user that is gone", |_, _| vec![login("carol", "new-secret")])
            .only(&[Who::None]),
    ]
}

/// Auth goes off for a while. The tokens of the callers end here.
pub(super) fn off_and_on() -> Vec<RestRow> {
    vec![
        row(DISABLE, "", |_, _| vec![json!({})]),
        row(STATUS, "while it is off", |_, _| vec![json!({})]).only(&[Who::None]),
        row(RANGE, "while auth is off", |_, _| vec![read()]).only(&[Who::None]),
        row(AUTHENTICATE, "while auth is off", |_, _| vec![login("alice", &password("alice"))])
            .only(&[Who::None]),
        row(ENABLE, "while it is off", |_, _| vec![json!({})]).only(&[Who::None]),
        row(RANGE, "after auth was off", |_, _| vec![read()]).only(&[Who::None, Who::Garbage, Who::Alice]),
        row(AUTHENTICATE, "after auth was off", |_, _| vec![login("alice", &password("alice"))])
            .only(&[Who::None]),
    ]
}

fn named(name: &str) -> Value {
    json!({ "name": name })
}

fn login(name: &str, password: &str) -> Value {
    json!({ "name": name, "password": password })
}

fn grant(role: &str) -> Value {
    json!({ "name": role, "perm": { "permType": "READ", "key": base64("/c/"), "range_end": base64("/c0") } })
}

fn revoke(key: &str) -> Value {
    json!({ "role": "rc", "key": base64(key), "range_end": base64("/c0") })
}

fn read() -> Value {
    json!({ "key": base64("/a/k") })
}
