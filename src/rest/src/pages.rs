//! The pages of etcd's client port beside the JSON gateway: `/version`, `/health`, `/livez`, `/readyz`,
//! and `/metrics` where the listener shows it.
//!
//! Owns: their contents, in etcd's own JSON and text, from the members' last probes. Must not know: how
//! members are probed. Invariants: no page needs an identity, and none tells a key, a user or an address;
//! no page costs a member anything.

use bytes::Bytes;
use http::header::{CONTENT_TYPE, HeaderValue};
use http::{HeaderMap, Method, Request, Response, StatusCode};
use serde_json::json;

use super::RestFace;
use super::http_answer::{self, AnswerBody};
use super::routes::Page;
use keyward_cluster::discovery::keyward_page;
use keyward_cluster::membership::{Membership, ServingState};
use keyward_cluster::version::Version;
use keyward_config::JsonGateway;
use keyward_downstream::client_body::ClientBody;
use keyward_telemetry::exposition::ExpositionFormat;

/// Alarms in the words of a member's Status, and in the words of etcd's `/health`.
const ALARMS: [(&str, &str); 2] = [("NOSPACE", "ALARM NOSPACE"), ("CORRUPT", "ALARM CORRUPT")];

/// Answers a request for a page.
pub(super) fn answer(
    face: &RestFace,
    page: Page,
    request: &Request<ClientBody>,
    form: JsonGateway,
) -> Response<AnswerBody> {
    if page == Page::Metrics {
        return metrics(face, request.headers());
    }
    if request.method() != Method::GET {
        return http_answer::only_get();
    }
    let members = face.gateway.upstream.members.snapshot.load();
    let query = request.uri().query().unwrap_or_default();
    match page {
        Page::Version => version(&members),
        Page::Keyward => http_answer::text(StatusCode::OK, keyward_page::page()),
        Page::Health => health(&members, query, form),
        Page::Livez => checks(&members, &LIVEZ, "/livez", request.uri().path(), query),
        Page::Readyz | Page::Metrics => checks(&members, &READYZ, "/readyz", request.uri().path(), query),
    }
}

fn metrics(face: &RestFace, headers: &HeaderMap) -> Response<AnswerBody> {
    if !face.client.listener.http.metrics_page {
        return http_answer::not_found();
    }
    let format = ExpositionFormat::accepted_by(headers);
    // Writing to a string does not fail.
    let text = Bytes::from(format.convert(face.gateway.metrics.text().unwrap_or_default()));
    let content_type = [(CONTENT_TYPE, format.content_type())];
    http_answer::response(StatusCode::OK, content_type, AnswerBody::Whole(text))
}

/// The oldest version among the members; `None` before any member told its version.
pub(super) fn oldest_version(members: &Membership) -> Option<Version> {
    members.members.iter().filter_map(|member| member.version).min()
}

fn version(members: &Membership) -> Response<AnswerBody> {
    let Some(oldest) = oldest_version(members) else {
        return http_answer::text(StatusCode::SERVICE_UNAVAILABLE, "no member has told its version\n");
    };
    let of = members.members.iter().find(|member| member.version == Some(oldest));
    let storage = of.and_then(|member| member.store_status.as_ref()?.storage_version.clone());
    let (server, cluster) = (oldest.to_string(), oldest.of_cluster().to_string());
    http_answer::json(
        StatusCode::OK,
        match storage {
            Some(storage) => {
                format!(
                    r#"{{"etcdserver":"{server}","etcdcluster":"{cluster}","storage":{}}}"#,
                    json!(&*storage)
                )
            }
            None => format!(r#"{{"etcdserver":"{server}","etcdcluster":"{cluster}"}}"#),
        },
    )
}

/// The values of a query's parameter, without percent-decoding: no known value needs an escape.
fn values<'q>(query: &'q str, name: &'q str) -> impl Iterator<Item = &'q str> {
    query.split('&').filter_map(move |pair| {
        let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
        (key == name).then_some(value)
    })
}

fn health(members: &Membership, query: &str, form: JsonGateway) -> Response<AnswerBody> {
    let is_local = values(query, "serializable").any(|value| value == "true");
    let excluded: Vec<&str> = values(query, "exclude").collect();
    let reason = unhealthy_reason(members, is_local, &excluded);
    let (health, reason) = (reason.is_none(), reason.unwrap_or_default());
    let json = match form {
        JsonGateway::Etcd34 => format!(r#"{{"health":"{health}"}}"#),
        JsonGateway::Etcd35 | JsonGateway::Etcd36 => {
            format!(r#"{{"health":"{health}","reason":{}}}"#, json!(reason))
        }
    };
    let status = if health { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    let text = HeaderValue::from_static("text/plain; charset=utf-8");
    http_answer::response(status, [(CONTENT_TYPE, text)], AnswerBody::Whole(json.into()))
}

/// The reason why the cluster is unhealthy, in etcd's words; `None` if the cluster is healthy.
fn unhealthy_reason(members: &Membership, is_local: bool, excluded: &[&str]) -> Option<&'static str> {
    for (alarm, reason) in ALARMS {
        if !excluded.contains(&alarm) && has_alarm(members, alarm) {
            return Some(reason);
        }
    }
    match members.serving() {
        ServingState::Ready => None,
        ServingState::LocalReadsOnly if is_local => None,
        ServingState::LocalReadsOnly | ServingState::NoKnownLeader => Some("RAFT NO LEADER"),
        ServingState::NothingKnown | ServingState::NoReadyVoter => Some("NO MEMBER READY"),
    }
}

/// True if a member reports the alarm, as in `memberID:8211f1d0f64f3269 alarm:NOSPACE `.
fn has_alarm(members: &Membership, alarm: &str) -> bool {
    let reports = |error: &String| {
        error.split_whitespace().any(|word| word.strip_prefix("alarm:").is_some_and(|named| named == alarm))
    };
    let mut stores = members.members.iter().filter_map(|member| member.store_status.as_ref());
    stores.any(|store| store.errors.iter().any(reports))
}

/// A check below `/livez` or `/readyz`.
struct HealthCheck {
    name: &'static str,
    is_passed: fn(&Membership) -> bool,
}

const SERIALIZABLE_READ: HealthCheck = HealthCheck {
    name: "serializable_read",
    is_passed: |members| matches!(members.serving(), ServingState::Ready | ServingState::LocalReadsOnly),
};
const LIVEZ: [HealthCheck; 1] = [SERIALIZABLE_READ];
const READYZ: [HealthCheck; 4] = [
    HealthCheck { name: "data_corruption", is_passed: |members| !has_alarm(members, "CORRUPT") },
    SERIALIZABLE_READ,
    HealthCheck { name: "linearizable_read", is_passed: |members| members.serving() == ServingState::Ready },
    // Learners get no calls from Keyward.
    HealthCheck { name: "non_learner", is_passed: |_| true },
];

fn checks(
    members: &Membership,
    all: &[HealthCheck],
    page: &str,
    path: &str,
    query: &str,
) -> Response<AnswerBody> {
    let chosen: Vec<&HealthCheck> = match path.strip_prefix(page).and_then(|rest| rest.strip_prefix('/')) {
        Some(name) => all.iter().filter(|check| check.name == name).collect(),
        None => {
            let excluded: Vec<&str> = values(query, "exclude").collect();
            all.iter().filter(|check| !excluded.contains(&check.name)).collect()
        }
    };
    if chosen.is_empty() && path != page {
        return http_answer::not_found();
    }
    let mut lines = String::new();
    let mut is_passed = true;
    for check in chosen {
        let passed = (check.is_passed)(members);
        is_passed &= passed;
        let (sign, word) = if passed { ('+', "ok") } else { ('-', "failed") };
        lines.push_str(&format!("[{sign}]{} {word}\n", check.name));
    }
    let is_verbose = values(query, "verbose").next().is_some();
    if is_passed {
        let text = if is_verbose { lines + "ok\n" } else { "ok\n".to_owned() };
        return http_answer::text(StatusCode::OK, text);
    }
    http_answer::text(StatusCode::SERVICE_UNAVAILABLE, lines + "check failed\n")
}
