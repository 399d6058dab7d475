//! JSON: nothing that a client sends panics us; what is accepted is canonical and comes back through its
//! own JSON; a stream is cut alike however its bytes arrive.

use bytes::{Bytes, BytesMut};
use keyward::rest::json_documents::JsonDocuments;
use keyward::rest::json_fault::JsonFault;
use keyward::rest::json_reply::append_json_of_message;
use keyward::rest::json_request::message_of_json;
use keyward::rest::json_style::{JsonPlace, JsonStyle};
use keyward::rest::message_fields;
use keyward::rpc::canonical;
use keyward::rpc::method::{METHODS, Method, lookup};

use crate::bodies::{self, Style};
use crate::choices::Choices;
use crate::{json_texts, readers};

/// For fuzzers.
pub(crate) const TARGETS: [fn(&[u8]); 6] = [
    any_bytes_are_read_or_refused,
    a_document_of_a_client_is_accepted,
    an_odd_document_is_read_or_refused,
    a_message_comes_back_through_json,
    any_message_is_written_or_refused,
    a_stream_is_cut_alike_in_pieces,
];

const FORMS: [(JsonStyle, JsonPlace); 3] = [
    (JsonStyle::GatewayV1, JsonPlace::Body),
    (JsonStyle::GatewayV2, JsonPlace::Body),
    (JsonStyle::GatewayV2, JsonPlace::StreamResult),
];

fn method(choices: &mut Choices<'_>) -> &'static Method {
    match choices.below(4) {
        0 => lookup("/etcdserverpb.KV/Txn").expect("a row"),
        1 => lookup("/etcdserverpb.KV/Range").expect("a row"),
        _ => &METHODS[choices.below(METHODS.len())],
    }
}

fn read(method: &Method, json: &[u8]) -> Result<BytesMut, JsonFault> {
    message_of_json(json, message_fields::of_method(method.path).expect("messages").request)
}

fn any_bytes_are_read_or_refused(input: &[u8]) {
    let mut choices = Choices::new(input);
    let method = method(&mut choices);
    drop(check(method, choices.rest()));
}

fn a_document_of_a_client_is_accepted(input: &[u8]) {
    let mut choices = Choices::new(input);
    let method = method(&mut choices);
    let json = json_texts::document(&mut choices, method.body.message().name, Style::Canonical, 3);
    if let Err(fault) = check(method, &json) {
        panic!("{fault}: {} {}", method.path, json.escape_ascii());
    }
}

fn an_odd_document_is_read_or_refused(input: &[u8]) {
    let mut choices = Choices::new(input);
    let method = method(&mut choices);
    let json = json_texts::document(&mut choices, method.body.message().name, Style::Odd, 3);
    drop(check(method, &json));
}

/// What is accepted is canonical, and its own JSON is accepted with the same meaning. What is refused is
/// refused in few words.
fn check(method: &Method, json: &[u8]) -> Result<(), JsonFault> {
    let body = read(method, json).inspect_err(|fault| {
        let text = fault.to_string();
        assert!(text.is_ascii() && text.len() < 2000, "{text}");
    })?;
    assert_eq!(canonical::check(method.body, &body), Ok(()), "{}", json.escape_ascii());
    comes_back(method, &body);
    Ok(())
}

fn comes_back(method: &Method, body: &[u8]) {
    let meaning = readers::prost(method.body, body);
    assert!(meaning.is_some(), "{} {body:02x?}", method.path);
    for (style, place) in FORMS {
        let json = written(method, style, place, body).expect("a canonical message is written");
        let again = read(method, &json).unwrap_or_else(|fault| panic!("{fault}: {}", json.escape_ascii()));
        assert_eq!(readers::prost(method.body, &again), meaning, "{}", json.escape_ascii());
    }
}

fn written(method: &Method, style: JsonStyle, place: JsonPlace, body: &[u8]) -> Option<BytesMut> {
    let message = message_fields::of_method(method.path).expect("messages").request;
    let mut out = BytesMut::new();
    append_json_of_message(style, place, message, body, &mut out).ok().map(|()| out)
}

fn a_message_comes_back_through_json(input: &[u8]) {
    let mut choices = Choices::new(input);
    let method = method(&mut choices);
    comes_back(method, &bodies::body(&mut choices, method.body, Style::Canonical, 3));
}

/// What is written is JSON, also of bodies on which decoders differ; both gateways agree, apart from
/// invalid UTF-8.
fn any_message_is_written_or_refused(input: &[u8]) {
    let mut choices = Choices::new(input);
    let method = method(&mut choices);
    let is_structured = choices.flag();
    let body = if is_structured {
        bodies::body(&mut choices, method.body, Style::Odd, 3)
    } else {
        choices.rest().to_vec()
    };
    for (style, place) in FORMS {
        if let Some(json) = written(method, style, place, &body) {
            let parsed = serde_json::from_slice::<serde_json::Value>(&json);
            assert!(parsed.is_ok(), "{} {body:02x?}: {}", method.path, json.escape_ascii());
        }
    }
    let [v1, v2] = [FORMS[0], FORMS[2]].map(|(style, place)| written(method, style, place, &body));
    assert!(v2.is_none() || v1 == v2, "{} {body:02x?}", method.path);
}

fn a_stream_is_cut_alike_in_pieces(input: &[u8]) {
    let mut choices = Choices::new(input);
    let longest = 1 + choices.below(256);
    let mut stream = Vec::new();
    for _ in 0..choices.below(6) {
        let style = if choices.one_in(6) { Style::Odd } else { Style::Canonical };
        stream.extend(json_texts::document(&mut choices, "etcdserverpb.WatchRequest", style, 3));
        stream.extend([&b""[..], b" ", b"\r\n"][choices.below(3)]);
    }
    let pieces: Vec<usize> = (0..choices.below(12)).map(|_| choices.below(64)).collect();
    stream.extend(choices.rest());

    let whole = cut(longest, [&stream[..]]);
    let mut rest = &stream[..];
    let mut chunks = Vec::new();
    for length in pieces {
        let (chunk, after) = rest.split_at(length.min(rest.len()));
        chunks.push(chunk);
        rest = after;
    }
    chunks.push(rest);
    assert_eq!(cut(longest, chunks), whole, "{}", stream.escape_ascii());
    assert_eq!(cut(longest, stream.chunks(1)), whole, "{}", stream.escape_ascii());
    // Documents and the white space between them are the stream.
    let mut at = 0;
    for document in &whole.0 {
        at += stream[at..].iter().take_while(|byte| b" \t\r\n".contains(byte)).count();
        assert!(stream[at..].starts_with(document) && document.len() <= longest);
        at += document.len();
    }
    assert!(whole.1.is_err() || stream[at..].iter().all(|byte| b" \t\r\n".contains(byte)));
}

/// The documents of a stream, and its end.
fn cut<'a>(
    longest: usize,
    chunks: impl IntoIterator<Item = &'a [u8]>,
) -> (Vec<Bytes>, Result<(), JsonFault>) {
    let mut documents = JsonDocuments::new(longest);
    let mut found = Vec::new();
    for chunk in chunks {
        documents.push(chunk);
        loop {
            match documents.next() {
                Ok(Some(document)) => found.push(document),
                Ok(None) => break,
                Err(fault) => return (found, Err(fault)),
            }
        }
    }
    let end = documents.finish();
    (found, end)
}

#[cfg(test)]
mod tests {
    use super::TARGETS;
    use crate::choices::for_any_bytes;

    #[test]
    fn every_json_promise_holds() {
        for target in TARGETS {
            for_any_bytes(300, target);
        }
    }
}
