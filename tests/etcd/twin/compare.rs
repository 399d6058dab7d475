//! What two answers to the same call differ in.
//!
//! Must not know which differences are permitted. Invariant: what no difference names is equal, byte for byte.

use std::collections::BTreeSet;

use super::fields::{self, Leaf};
use crate::raw::{Answer, End};

/// One thing that is not the same.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Difference {
    /// `outcome`, `form`, `messages`, `metadata NAME`, `body`, or the field of an answer's message.
    pub(crate) what: String,
    pub(crate) direct: String,
    pub(crate) keyward: String,
}

/// How many messages came, at least, and how it ended: what a person would call the answer.
pub(crate) fn outcome(answer: &Answer) -> String {
    let status = match (&answer.head, answer.code()) {
        (None, _) => "nothing".into(),
        (Some((200, _)), Some(code)) => format!("{code} {}", answer.message()).trim_end().to_owned(),
        (Some((200, _)), None) => "no status".into(),
        (Some((http, _)), code) => format!("HTTP {http}, grpc-status {code:?}"),
    };
    match &answer.end {
        End::Ended => status,
        End::Open => "open".into(),
        End::TimedOut => format!("{status}, silent"),
        End::Reset(code) => format!("{status}, RST_STREAM {code}"),
        End::ConnectionLost(why) => format!("{status}, connection lost: {why}"),
    }
}

/// Everything in which the answers to a call whose answer is `message` differ. Bodies are compared only where the outcome is the same.
pub(crate) fn compare(message: Option<&str>, direct: &Answer, keyward: &Answer) -> Vec<Difference> {
    let mut found = Vec::new();
    let mut note = |what: &str, direct: String, keyward: String| {
        if direct != keyward {
            found.push(Difference { what: what.into(), direct, keyward });
        }
    };
    note("form", form(direct), form(keyward));
    for name in names(direct, keyward) {
        note(&format!("metadata {name}"), values(direct, &name), values(keyward, &name));
    }
    note("outcome", outcome(direct), outcome(keyward));
    if outcome(direct) == outcome(keyward) {
        bodies(message, direct, keyward, &mut note);
    }
    found
}

fn bodies(
    message: Option<&str>,
    direct: &Answer,
    keyward: &Answer,
    note: &mut impl FnMut(&str, String, String),
) {
    let (ours, theirs) = (keyward.messages(), direct.messages());
    if ours.len() != theirs.len() {
        return note("messages", theirs.len().to_string(), ours.len().to_string());
    }
    let whole =
        |answer: &Answer| answer.messages().iter().map(|m| 5 + m.len()).sum::<usize>() == answer.data.len();
    let flags = |answer: &Answer| whole(answer) && answer.data.first().is_none_or(|flag| *flag == 0);
    note("framing", flags(direct).to_string(), flags(keyward).to_string());
    for (theirs, ours) in theirs.iter().zip(&ours) {
        let parsed =
            message.and_then(|name| Some((fields::leaves(name, theirs)?, fields::leaves(name, ours)?)));
        match parsed {
            Some((theirs, ours)) => leaves(&theirs, &ours, note),
            None => note("body", theirs.escape_ascii().to_string(), ours.escape_ascii().to_string()),
        }
    }
}

/// Path by path; what one side alone has differs from `absent`.
fn leaves(direct: &[Leaf], keyward: &[Leaf], note: &mut impl FnMut(&str, String, String)) {
    let paths = |leaves: &[Leaf]| leaves.iter().map(|leaf| leaf.path.clone()).collect::<Vec<_>>();
    let (theirs, ours) = (paths(direct), paths(keyward));
    let all: BTreeSet<&String> = theirs.iter().chain(&ours).collect();
    let mut same_paths = true;
    for path in all {
        let at =
            |leaves: &[Leaf]| leaves.iter().filter(|leaf| leaf.path == *path).cloned().collect::<Vec<_>>();
        let (a, b) = (at(direct), at(keyward));
        same_paths &= a.len() == b.len();
        let bytes = |leaves: &[Leaf]| leaves.iter().map(|leaf| leaf.bytes.clone()).collect::<Vec<_>>();
        if bytes(&a) != bytes(&b) {
            let field = &a.first().or(b.first()).expect("the path is of one of them").field;
            let alike = a.len() == b.len() && shown(&a, false) == shown(&b, false);
            note(field, shown(&a, alike), shown(&b, alike));
        }
    }
    if same_paths {
        note("order", theirs.join(" "), ours.join(" "));
    }
}

/// With the bytes where the values look alike: a number can stand in more bytes than it needs.
fn shown(leaves: &[Leaf], with_bytes: bool) -> String {
    let one = |leaf: &Leaf| {
        if with_bytes { format!("{} {:?}", leaf.shown, leaf.bytes) } else { leaf.shown.clone() }
    };
    if leaves.is_empty() { "absent".into() } else { leaves.iter().map(one).collect::<Vec<_>>().join(", ") }
}

/// Which HEADERS carried the status.
fn form(answer: &Answer) -> String {
    let form = match (&answer.head, &answer.end) {
        (Some(_), End::Ended) if answer.trailers_only => "Trailers-Only",
        (Some(_), End::Ended) => "headers and trailers",
        _ => "no end",
    };
    form.into()
}

fn names(direct: &Answer, keyward: &Answer) -> BTreeSet<String> {
    let names = direct.metadata().chain(keyward.metadata()).map(|(name, _)| name.to_owned());
    names.filter(|name| !["grpc-status", "grpc-message"].contains(&name.as_str())).collect()
}

fn values(answer: &Answer, name: &str) -> String {
    let of_name = answer.metadata().filter(|(field, _)| *field == name);
    let values: Vec<String> = of_name.map(|(_, value)| value.escape_ascii().to_string()).collect();
    if values.is_empty() { "absent".into() } else { values.join(", ") }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use http::HeaderMap;
    use keyward::pb::etcdserverpb::{LeaseGrantResponse, ResponseHeader};
    use prost::Message as _;

    use super::*;
    use crate::raw::frame;

    const GRANTED: Option<&str> = Some("etcdserverpb.LeaseGrantResponse");

    fn answer(data: Bytes, trailers: &[(&'static str, &'static str)]) -> Answer {
        let map = |fields: &[(&'static str, &'static str)]| {
            fields
                .iter()
                .map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap()))
                .collect::<HeaderMap>()
        };
        let head = Some((200, map(&[("content-type", "application/grpc")])));
        Answer { head, trailers_only: false, data, trailers: map(trailers), end: End::Ended }
    }

    fn granted(term: u64) -> LeaseGrantResponse {
        let header = ResponseHeader { raft_term: term, ..Default::default() };
        LeaseGrantResponse { header: Some(header), id: 5, ttl: 60, ..Default::default() }
    }

    fn differences(direct: &Answer, keyward: &Answer) -> Vec<(String, String, String)> {
        let found = compare(GRANTED, direct, keyward);
        found.into_iter().map(|d| (d.what, d.direct, d.keyward)).collect()
    }

    fn difference(what: &str, direct: &str, keyward: &str) -> (String, String, String) {
        (what.into(), direct.into(), keyward.into())
    }

    #[test]
    fn equal_answers_have_no_difference() {
        let one = answer(frame(&granted(2).encode_to_vec()), &[("grpc-status", "0")]);
        assert_eq!(differences(&one, &one), []);
    }

    #[test]
    fn a_changed_field_is_named() {
        let one = answer(frame(&granted(2).encode_to_vec()), &[("grpc-status", "0")]);
        let other = answer(frame(&granted(3).encode_to_vec()), &[("grpc-status", "0")]);
        let expected = difference("ResponseHeader.raft_term", "2", "3");
        assert_eq!(differences(&one, &other), [expected]);
    }

    #[test]
    fn a_field_that_one_side_lacks_is_named() {
        let one = answer(frame(&granted(2).encode_to_vec()), &[("grpc-status", "0")]);
        let other = LeaseGrantResponse { ttl: 0, ..granted(2) };
        let other = answer(frame(&other.encode_to_vec()), &[("grpc-status", "0")]);
        let expected = difference("LeaseGrantResponse.TTL", "60", "absent");
        assert_eq!(differences(&one, &other), [expected]);
    }

    #[test]
    fn the_same_number_in_more_bytes_is_a_difference() {
        let one = answer(frame(b"\x10\x05"), &[("grpc-status", "0")]);
        let other = answer(frame(b"\x10\x85\x00"), &[("grpc-status", "0")]);
        let expected = difference("LeaseGrantResponse.ID", "5 [16, 5]", "5 [16, 133, 0]");
        assert_eq!(differences(&one, &other), [expected]);
    }

    #[test]
    fn the_same_fields_in_another_order_are_a_difference() {
        let one = answer(frame(b"\x10\x05\x18\x06"), &[("grpc-status", "0")]);
        let other = answer(frame(b"\x18\x06\x10\x05"), &[("grpc-status", "0")]);
        assert_eq!(differences(&one, &other), [difference("order", "ID TTL", "TTL ID")]);
    }

    #[test]
    fn a_text_is_decoded_and_another_code_hides_the_body() {
        let one = answer(Bytes::new(), &[("grpc-status", "3"), ("grpc-message", "etcdserver%3A a")]);
        let other = answer(Bytes::new(), &[("grpc-status", "3"), ("grpc-message", "etcdserver: a")]);
        assert_eq!(differences(&one, &other), []);
        let other = answer(frame(b"x"), &[("grpc-status", "0")]);
        assert_eq!(differences(&one, &other), [difference("outcome", "3 etcdserver: a", "0")]);
    }

    #[test]
    fn metadata_and_form_and_the_end_are_compared() {
        let one = answer(Bytes::new(), &[("grpc-status", "0")]);
        let with_more = answer(Bytes::new(), &[("grpc-status", "0"), ("x-more", "1")]);
        assert_eq!(differences(&one, &with_more), [difference("metadata x-more", "absent", "1")]);
        let short = Answer { trailers_only: true, ..one.clone() };
        assert_eq!(differences(&one, &short), [difference("form", "headers and trailers", "Trailers-Only")]);
        let reset = Answer { end: End::Reset(8), ..one.clone() };
        let expected = [
            difference("form", "headers and trailers", "no end"),
            difference("outcome", "0", "0, RST_STREAM 8"),
        ];
        assert_eq!(differences(&one, &reset), expected);
    }

    #[test]
    fn a_message_more_or_a_broken_frame_is_a_difference() {
        let one = answer(frame(b""), &[("grpc-status", "0")]);
        let twice = answer([frame(b""), frame(b"")].concat().into(), &[("grpc-status", "0")]);
        assert_eq!(differences(&one, &twice), [difference("messages", "1", "2")]);
        let broken =
            answer([frame(b""), Bytes::from_static(b"\0\0")].concat().into(), &[("grpc-status", "0")]);
        assert_eq!(differences(&one, &broken), [difference("framing", "true", "false")]);
    }
}
