//! Paths, header values and tokens: any bytes have an answer, and only the right ones the right answer.

use std::sync::LazyLock;
use std::time::{Duration, SystemTime};

use http::{HeaderMap, HeaderValue};
use keyward::downstream::session::{SealRealm, Sealer, Session, SessionKeys, SessionPeer, SessionProof};
use keyward::identity::ClusterId;
use keyward::refusal::{Code, Status};
use keyward::rpc::call::Deadline;
use keyward::rpc::method::{Effect, METHODS, Method, RpcPathKind, path_kind};
use keyward::rpc::outcome::{self, JudgedCall, StatusVerdict};
use keyward::secret::Secret;

use crate::choices::{Choices, for_any_bytes};

fn header(bytes: &[u8]) -> Option<HeaderValue> {
    HeaderValue::from_bytes(bytes).ok()
}

fn method(choices: &mut Choices<'_>) -> &'static Method {
    &METHODS[choices.below(METHODS.len())]
}

/// A row's path, often changed by a byte or two.
fn path(choices: &mut Choices<'_>) -> String {
    let mut path = method(choices).path.as_bytes().to_vec();
    for _ in 0..choices.below(3) {
        let at = choices.below(path.len().max(1)).min(path.len());
        match choices.below(5) {
            0 if at < path.len() => path[at] ^= 0x20,
            1 => path.truncate(at),
            2 => path.insert(at, choices.byte()),
            3 => path.splice(at..at, *b"%2F").for_each(drop),
            _ => path.extend(choices.bytes(4)),
        }
    }
    String::from_utf8_lossy(&path).into_owned()
}

fn only_a_rows_own_path_is_known(input: &[u8]) {
    let mut choices = Choices::new(input);
    let path = path(&mut choices);
    let kind = path_kind(&path);
    let row = METHODS.iter().find(|row| row.path == path);
    match kind {
        RpcPathKind::Known(method) => assert_eq!(Some(method), row),
        RpcPathKind::WellFormed { service, method } => {
            assert_eq!((row, format!("/{service}/{method}")), (None, path.clone()));
            assert!(path[1..].bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._/".contains(&byte)));
            assert_eq!(path.matches('/').count(), 2);
        }
        RpcPathKind::Malformed => assert_eq!(row, None),
    }
    assert_eq!(kind.refusal(&path).is_none(), row.is_some());
}

/// A member's status: as percent-encoding has it, and what goes out again is read as the same.
fn a_status_is_read_and_written_alike(input: &[u8]) {
    let mut choices = Choices::new(input);
    let mut headers = HeaderMap::new();
    let digits = choices.byte().to_string();
    let code = if choices.flag() { header(digits.as_bytes()) } else { header(choices.bytes(6)) };
    if let Some(code) = code {
        headers.insert("grpc-status", code);
    }
    if let Some(message) = header(choices.rest()) {
        headers.insert("grpc-message", message);
    }
    let status = Status::from_headers(&headers);
    assert_eq!(status.is_some(), headers.contains_key("grpc-status"));
    let Some(status) = status else { return };
    for again in [status.trailers(), status.trailers_only()] {
        assert_eq!(Status::from_headers(&again), Some(status.clone()), "{again:?}");
    }
    assert!(!status.cancel_reason().is_empty());
    judge(&mut Choices::new(input), &status);
}

/// What a status proves and becomes: never what makes a client send a write again that it did not cancel.
fn judge(choices: &mut Choices<'_>, status: &Status) {
    let method = method(choices);
    let proof = if choices.flag() { outcome::CallProof::Token } else { outcome::CallProof::NoToken };
    let asked = JudgedCall { method, effect: method.effect, proof };
    let told = outcome::translate(&asked, status, false).unwrap_or_else(|| status.clone());
    if method.effect != Effect::ReadOnly {
        assert!(!matches!(told.code, Code::Canceled | Code::DeadlineExceeded), "{status:?} to {told:?}");
    }
    let verdict = outcome::verdict(&asked, status);
    if status.code == Code::Ok {
        assert_eq!((verdict, told.code), (StatusVerdict::Final, Code::Ok), "a success is one");
    }
    let _on_or_off = outcome::auth_state(&asked, status);
}

/// As the specification has it: up to eight digits and a unit, and nothing else.
fn a_timeout_is_read_as_the_specification_has_it(input: &[u8]) {
    let Some(value) = header(input) else { return };
    let headers = HeaderMap::from_iter([(http::HeaderName::from_static("grpc-timeout"), value)]);
    let (digits, unit) = input.split_at(input.len().saturating_sub(1));
    let nanos = match unit {
        b"H" => 3_600_000_000_000,
        b"M" => 60_000_000_000,
        b"S" => 1_000_000_000,
        b"m" => 1_000_000,
        b"u" => 1_000,
        b"n" => 1,
        _ => 0_u128,
    };
    let well_formed = (1..=8).contains(&digits.len()) && digits.iter().all(u8::is_ascii_digit) && nanos > 0;
    match Deadline::of(&headers) {
        Ok(Some(time)) => {
            let count: u128 = std::str::from_utf8(digits).expect("digits").parse().expect("a number");
            assert!(well_formed && time.as_nanos() == count * nanos, "{input:?} is {time:?}");
        }
        Ok(None) => panic!("a header that is there"),
        Err(refusal) => assert!(!well_formed && !refusal.status().is_ok(), "{input:?}: {refusal:?}"),
    }
}

static SEALER: LazyLock<Sealer> = LazyLock::new(|| {
    let sealer = Sealer::new(SessionKeys::new(&[Secret::new([7; 32])]).expect("a key"));
    sealer.pin(&SealRealm::new(None, ClusterId(7)));
    sealer
});

/// A token that is good, and the same a little changed.
static TOKEN: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let peer = SessionPeer::Password { user: "alice".into(), password: Secret::new("p".to_owned()) };
    let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1);
    let session = Session::begin(peer, SessionProof::None, 0, now).expect("random bytes");
    SEALER.seal(&session).expect("sealed").expose().clone().into_bytes()
});

fn nothing_but_a_token_opens(input: &[u8]) {
    let mut choices = Choices::new(input);
    assert!(SEALER.open(&TOKEN).is_ok());
    let mut token = TOKEN.clone();
    match choices.below(6) {
        0 => token = choices.rest().to_vec(),
        1 => token = [&b"kw1_"[..], choices.rest()].concat(),
        _ => {
            for _ in 0..=choices.below(3) {
                let at = choices.below(256).min(token.len().saturating_sub(1));
                match choices.below(5) {
                    0 => token.truncate(at),
                    1 => token.insert(at.min(token.len()), choices.byte()),
                    2 => token.extend(choices.bytes(5)),
                    _ => {
                        if let Some(byte) = token.get_mut(at) {
                            *byte = choices.byte();
                        }
                    }
                }
            }
        }
    }
    assert_eq!(SEALER.open(&token).is_ok(), token == *TOKEN, "{token:?}");
}

#[test]
fn only_exact_paths_are_known() {
    for_any_bytes(12, only_a_rows_own_path_is_known);
}

#[test]
fn any_status_is_read_judged_and_written() {
    for_any_bytes(60, a_status_is_read_and_written_alike);
}

#[test]
fn any_timeout_is_read_or_refused() {
    for_any_bytes(12, a_timeout_is_read_as_the_specification_has_it);
    for_any_bytes(16, |input| {
        let mut choices = Choices::new(input);
        let unit = b"HMSmunx"[choices.below(7)];
        // Mostly digits, and what number parsers take beside them.
        let sign = |byte: &u8| b"0123456789012345678901234567890123456789+-_ ."[usize::from(*byte) % 45];
        let mut text: Vec<u8> = choices.rest().iter().take(10).map(sign).collect();
        text.push(unit);
        a_timeout_is_read_as_the_specification_has_it(&text);
    });
}

#[test]
fn no_token_opens_but_one_that_was_sealed() {
    for_any_bytes(40, nothing_but_a_token_opens);
}
