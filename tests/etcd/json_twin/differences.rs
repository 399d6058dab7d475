//! The differences between two answers to the same request.
//!
//! Must not know which differences are permitted. Invariant: all that no difference names is equal, but for white space inside a
//! document, the order of header fields, and the date.

use std::collections::BTreeSet;

use http::HeaderMap;

use super::{
    document::{self, JsonLeaf},
    exchange::HttpAnswer,
};
use crate::{raw::End, twin::compare::Difference};

/// Fields that say how long the body is, compared by their meaning.
const LENGTHS: [&str; 2] = ["content-length", "transfer-encoding"];

/// How it ended: the status, the error where it is one, and the end where it is not the usual one.
pub(crate) fn outcome(answer: &HttpAnswer) -> String {
    let Some(status) = answer.status else {
        return match &answer.end {
            End::Open => "silent".into(),
            end => format!("nothing: {end:?}"),
        };
    };
    let status = match error(answer) {
        Some(error) => format!("{status} {error}"),
        None if status >= 300 => format!("{status} {}", String::from_utf8_lossy(&answer.body).trim_end()),
        None => status.to_string(),
    };
    match &answer.end {
        End::Ended => status,
        // Fewer documents than were waited for: their number differs.
        End::Open | End::TimedOut => format!("{status}, open"),
        end => format!("{status}, {end:?}"),
    }
}

/// Code and message of the error that an answer is, or ends with.
fn error(answer: &HttpAnswer) -> Option<String> {
    let documents = answer.documents();
    let value: serde_json::Value = serde_json::from_str(documents.last()?).ok()?;
    let in_stream = value.get("error").filter(|error| error.is_object());
    let error = in_stream.unwrap_or(&value);
    let code = error.get("code").or_else(|| error.get("grpc_code"))?;
    Some(format!("{code} {}", error.get("message")?.as_str()?))
}

/// Everything in which two answers differ. Headers and bodies are compared only where the outcome is the same.
pub(crate) fn compare(direct: &HttpAnswer, keyward: &HttpAnswer) -> Vec<Difference> {
    let mut found = Vec::new();
    let mut note = |what: &str, direct: String, keyward: String| {
        if direct != keyward {
            found.push(Difference { what: what.into(), direct, keyward });
        }
    };
    note("outcome", outcome(direct), outcome(keyward));
    if outcome(direct) != outcome(keyward) {
        return found;
    }
    for name in names(&direct.headers, &keyward.headers) {
        note(&format!("header {name}"), values(&direct.headers, &name), values(&keyward.headers, &name));
    }
    for name in names(&direct.trailers, &keyward.trailers) {
        note(&format!("trailer {name}"), values(&direct.trailers, &name), values(&keyward.trailers, &name));
    }
    note("length", length(direct), length(keyward));
    bodies(direct, keyward, &mut note);
    found
}

fn bodies(direct: &HttpAnswer, keyward: &HttpAnswer, note: &mut impl FnMut(&str, String, String)) {
    let (theirs, ours) = (direct.documents(), keyward.documents());
    if theirs.is_empty() && ours.is_empty() {
        let text = |answer: &HttpAnswer| answer.body.escape_ascii().to_string();
        return note("text", text(direct), text(keyward));
    }
    if theirs.len() != ours.len() {
        return note("messages", theirs.len().to_string(), ours.len().to_string());
    }
    let spaces = |answer: &HttpAnswer| format!("{:?}", document::spaces(&answer.body));
    note("space", spaces(direct), spaces(keyward));
    for (theirs, ours) in theirs.iter().zip(&ours) {
        match (document::leaves(theirs), document::leaves(ours)) {
            (Some(theirs), Some(ours)) => leaves(&theirs, &ours, note),
            _ => note("text", (*theirs).into(), (*ours).into()),
        }
    }
}

/// Path by path; a leaf that one side alone has differs from `absent`.
fn leaves(direct: &[JsonLeaf], keyward: &[JsonLeaf], note: &mut impl FnMut(&str, String, String)) {
    let paths = |leaves: &[JsonLeaf]| leaves.iter().map(|leaf| leaf.path.clone()).collect::<Vec<_>>();
    let (theirs, ours) = (paths(direct), paths(keyward));
    let all: BTreeSet<&String> = theirs.iter().chain(&ours).collect();
    let mut same_paths = true;
    for path in all {
        let at = |leaves: &[JsonLeaf]| {
            leaves.iter().filter(|leaf| leaf.path == *path).cloned().collect::<Vec<_>>()
        };
        let (a, b) = (at(direct), at(keyward));
        same_paths &= a.len() == b.len();
        let field = &a.first().or(b.first()).expect("the path is of one of them").field;
        note(&format!("body {field}"), shown(&a), shown(&b));
    }
    if same_paths {
        note("order", theirs.join(" "), ours.join(" "));
    }
}

fn shown(leaves: &[JsonLeaf]) -> String {
    let texts: Vec<_> = leaves.iter().map(|leaf| leaf.text.as_str()).collect();
    if texts.is_empty() { "absent".into() } else { texts.join(", ") }
}

/// The names of both sides, save those that are compared by their meaning.
fn names(direct: &HeaderMap, keyward: &HeaderMap) -> BTreeSet<String> {
    let all = direct.keys().chain(keyward.keys()).map(|name| name.as_str().to_owned());
    all.filter(|name| !LENGTHS.contains(&name.as_str())).collect()
}

fn values(headers: &HeaderMap, name: &str) -> String {
    let values: Vec<_> =
        headers.get_all(name).iter().map(|value| value.as_bytes().escape_ascii().to_string()).collect();
    match (name, values.is_empty()) {
        (_, true) => "absent".into(),
        ("date", false) => "present".into(),
        _ => values.join(" and "),
    }
}

/// How the end of the body is told.
fn length(answer: &HttpAnswer) -> String {
    let told =
        answer.headers.get("content-length").and_then(|value| value.to_str().ok()?.parse::<usize>().ok());
    match (told, answer.headers.get("transfer-encoding")) {
        (Some(length), _) if length == answer.body.len() => "content-length".into(),
        (Some(length), _) => format!("content-length {length} for {} bytes", answer.body.len()),
        (None, Some(coding)) => coding.to_str().unwrap_or("no text").into(),
        (None, None) => "none".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(status: u16, headers: &[(&'static str, &str)], body: &str) -> HttpAnswer {
        let headers = headers.iter().map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap()));
        HttpAnswer {
            status: Some(status),
            headers: headers.collect(),
            body: body.into(),
            trailers: HeaderMap::new(),
            end: End::Ended,
        }
    }

    fn found(direct: &HttpAnswer, keyward: &HttpAnswer) -> Vec<String> {
        compare(direct, keyward).into_iter().map(|difference| difference.what).collect()
    }

    #[test]
    fn every_kind_of_difference_is_found() {
        let body = "{\"header\":{\"revision\":\"1\"},\"more\":true}";
        let one = answer(200, &[("content-type", "application/json")], body);
        assert_eq!(found(&one, &one), [""; 0]);
        let other = |body: &str| answer(200, &[("content-type", "application/json")], body);
        assert_eq!(found(&one, &answer(200, &[], body)), ["header content-type"]);
        assert_eq!(
            found(&one, &other("{\"header\":{\"revision\":1},\"more\":true}")),
            ["body header.revision"]
        );
        assert_eq!(found(&one, &other("{\"more\":true,\"header\":{\"revision\":\"1\"}}")), ["order"]);
        assert_eq!(found(&one, &other("{\"header\":{\"revision\":\"1\"}}")), ["body more"]);
        assert_eq!(found(&one, &other(&format!("{body}\n"))), ["space"]);
        assert_eq!(found(&one, &other(&format!("{body}{body}"))), ["messages"]);
        assert_eq!(found(&one, &answer(201, &[], body)), ["outcome"]);
        let long = answer(200, &[("content-type", "application/json"), ("content-length", "38")], body);
        assert_eq!(found(&one, &long), ["length"]);
        let mut trailing = one.clone();
        trailing.trailers.insert("grpc-trailer-content-type", "x".parse().unwrap());
        assert_eq!(found(&one, &trailing), ["trailer grpc-trailer-content-type"]);
    }

    #[test]
    fn errors_are_told_by_code_and_message() {
        let v2 = answer(400, &[], "{\"code\":3,\"message\":\"m\"}");
        let v1 = answer(400, &[], "{\"error\":\"m\",\"code\":3,\"message\":\"m\"}");
        assert_eq!((outcome(&v1), outcome(&v2)), ("400 3 m".into(), "400 3 m".into()));
        assert_eq!(found(&v1, &v2), ["body error"]);
        let stream = answer(200, &[], "{\"result\":{}}\n{\"error\":{\"grpc_code\":14,\"message\":\"m\"}}");
        assert_eq!(outcome(&stream), "200 14 m");
        assert_eq!(outcome(&answer(404, &[], "Not Found\n")), "404 Not Found");
        assert_eq!(outcome(&answer(200, &[], "{\"code\":3}")), "200");
    }
}
