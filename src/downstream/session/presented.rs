//! Which token a request shows.
//!
//! Owns: the choice among headers, as etcd makes it (`AuthInfoFromCtx` in etcd's auth/store.go). Must not know: whether
//! the token is any good.
//! Invariant: an empty token is a bad token, not an absent one.

use http::{HeaderMap, header};

const TOKEN: header::HeaderName = header::HeaderName::from_static("token");
const BEARER: &[u8] = b"bearer ";

/// What a request shows in its headers.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Presented<'a> {
    /// No token at all.
    None,
    /// A token, good or bad, perhaps empty.
    Token(&'a [u8]),
}

impl<'a> Presented<'a> {
    /// Whether it has the form of a JWT: three parts. A session's token has one, etcd's own have two.
    #[must_use]
    pub fn is_jwt(&self) -> bool {
        matches!(self, Self::Token(token) if token.iter().filter(|byte| **byte == b'.').count() == 2)
    }

    /// The first `token`; only where there is none, the first `authorization`. With or without `Bearer `, as etcd since
    /// 3.5.32 and 3.6.13.
    #[must_use]
    pub fn in_headers(headers: &'a HeaderMap) -> Self {
        let Some(value) = headers.get(TOKEN).or_else(|| headers.get(header::AUTHORIZATION)) else {
            return Self::None;
        };
        Self::Token(match value.as_bytes().split_at_checked(BEARER.len()) {
            Some((scheme, token)) if scheme.eq_ignore_ascii_case(BEARER) => token,
            _ => value.as_bytes(),
        })
    }
}

impl std::fmt::Debug for Presented<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::None => "None",
            Self::Token(_) => "Token(***)",
        })
    }
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    fn presented(headers: &[(&'static str, &'static str)]) -> Option<String> {
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            map.append(*name, HeaderValue::from_static(value));
        }
        match Presented::in_headers(&map) {
            Presented::None => None,
            Presented::Token(token) => Some(str::from_utf8(token).unwrap().to_owned()),
        }
    }

    #[test]
    fn the_first_token_wins_and_authorization_only_stands_in() {
        for (headers, expected) in [
            (&[][..], None),
            (&[("user-agent", "x")], None),
            (&[("token", "a")], Some("a")),
            (&[("token", "a"), ("token", "b")], Some("a")),
            (&[("authorization", "b")], Some("b")),
            (&[("authorization", "b"), ("authorization", "c")], Some("b")),
            (&[("authorization", "b"), ("token", "a")], Some("a")),
            (&[("authorization", "b"), ("token", "")], Some("")),
            (&[("authorization", "")], Some("")),
            (&[("authorization", "Bearer b")], Some("b")),
            (&[("authorization", "bEARER b")], Some("b")),
            (&[("authorization", "Bearer ")], Some("")),
            (&[("authorization", "Bearerb")], Some("Bearerb")),
            (&[("authorization", "Basic b")], Some("Basic b")),
            (&[("token", "Bearer a")], Some("a")),
        ] {
            assert_eq!(presented(headers).as_deref(), expected, "{headers:?}");
        }
    }

    #[test]
    fn debug_shows_no_token() {
        assert_eq!(format!("{:?}", Presented::Token(b"kw1_secret")), "Token(***)");
    }
}
