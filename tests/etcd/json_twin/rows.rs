//! The requests that are made on both sides: every route of etcd's JSON gateway, several cases of each, and the other paths of its
//! client port.
//!
//! Owns: the order of the requests, which is a history: what one row changes, the next ones see. Must not know what the answers are.

mod accounts;
mod inputs;
mod kv;
mod lifetimes;
mod membership;
mod paths;

use data_encoding::BASE64;
use serde_json::Value;

use super::{
    caller_side::{CallerSide, EVERYBODY, Who},
    exchange::{Ask, Reading},
};

/// One kind of request, made once as each of `who`.
pub(crate) struct RestRow {
    pub(crate) method: &'static str,
    pub(crate) path: &'static str,
    /// Tells the rows of a path apart.
    pub(crate) case: &'static str,
    pub(crate) reading: Reading,
    pub(crate) who: &'static [Who],
    pub(crate) headers: &'static [(&'static str, &'static str)],
    /// The first version whose answer is not left to chance.
    pub(crate) from: Option<&'static str>,
    pub(crate) body: Body,
}

/// What makes the body of a request.
pub(crate) enum Body {
    /// Documents, one a line.
    Json(fn(&CallerSide, Who) -> Vec<Value>),
    Bytes(fn() -> Vec<u8>),
}

impl RestRow {
    /// For these callers only.
    fn only(self, who: &'static [Who]) -> RestRow {
        RestRow { who, ..self }
    }

    fn with(self, headers: &'static [(&'static str, &'static str)]) -> RestRow {
        RestRow { headers, ..self }
    }

    /// Whether its answer does not end by itself.
    pub(crate) fn is_stream(&self) -> bool {
        self.reading != Reading::ToItsEnd
    }

    /// What to send; reading stops where the caller says.
    pub(crate) fn ask(&self, side: &CallerSide, who: Who, reading: Reading) -> Ask {
        let body = match self.body {
            Body::Json(make) => {
                let documents: Vec<_> = make(side, who).iter().map(Value::to_string).collect();
                documents.join("\n").into_bytes()
            }
            Body::Bytes(make) => make(),
        };
        let headers = self.headers.iter().map(|(name, value)| (*name, (*value).to_owned())).collect();
        Ask { method: self.method, path: self.path.into(), headers, body, reading }
    }
}

/// A request whose answer ends by itself.
fn row(path: &'static str, case: &'static str, body: fn(&CallerSide, Who) -> Vec<Value>) -> RestRow {
    RestRow {
        method: "POST",
        path,
        case,
        reading: Reading::ToItsEnd,
        who: EVERYBODY,
        headers: &[],
        from: None,
        body: Body::Json(body),
    }
}

/// A request whose answer is read until `at_least` documents came.
fn stream(
    path: &'static str,
    case: &'static str,
    at_least: usize,
    body: fn(&CallerSide, Who) -> Vec<Value>,
) -> RestRow {
    RestRow { reading: Reading::Documents { at_least }, ..row(path, case, body) }
}

/// A body that is no document as `row` makes it; asked by alice, whom nothing else stops.
fn bytes(path: &'static str, case: &'static str, body: fn() -> Vec<u8>) -> RestRow {
    RestRow { body: Body::Bytes(body), who: &[Who::Alice], ..row(path, case, |_, _| Vec::new()) }
}

fn base64(text: &str) -> String {
    BASE64.encode(text.as_bytes())
}

/// All rows, in order.
pub(crate) fn all() -> Vec<RestRow> {
    let parts = [
        kv::before(),
        lifetimes::granted(),
        kv::keys(),
        kv::watch(),
        lifetimes::lease(),
        kv::watch_from_below(),
        lifetimes::lock(),
        lifetimes::election(),
        membership::maintenance(),
        membership::cluster(),
        accounts::users(),
        accounts::logins(),
        inputs::forms(),
        inputs::faults(),
        inputs::streams(),
        paths::prefixes(),
        paths::methods(),
        paths::unknown(),
        paths::probes(),
        paths::headers(),
        kv::compacted(),
        lifetimes::revoked(),
        accounts::off_and_on(),
    ];
    parts.into_iter().flatten().collect()
}
