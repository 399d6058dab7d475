//! The token presented by a request.
//!
//! Owns: the choice among headers, in the same way as etcd (`AuthInfoFromCtx` in etcd's auth/store.go). Must
//! not know: the token's validity.
//! Invariant: an empty token is an invalid token, not an absent token.

use http::{HeaderMap, header};

use super::MARK;

const TOKEN: header::HeaderName = header::HeaderName::from_static("token");
const BEARER: &[u8] = b"bearer ";

/// The token in a request's headers.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum PresentedToken<'a> {
    /// No token header.
    None,
    /// A token, valid or not, possibly empty.
    Token(&'a [u8]),
}

impl<'a> PresentedToken<'a> {
    /// True if the token has the form of a JWT: three dot-separated parts. A session token has one part, an
    /// etcd simple token two parts.
    #[must_use]
    pub fn is_jwt(&self) -> bool {
        // A JWT's first part is Base64 of a JSON object, and never begins like a session token.
        matches!(self, Self::Token(token)
            if !token.starts_with(MARK.as_bytes()) && token.iter().filter(|byte| **byte == b'.').count() == 2)
    }

    /// The first `token` header; without a `token` header, the first `authorization` header. A `Bearer `
    /// prefix is optional, as in etcd since 3.5.32 and 3.6.13.
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

impl std::fmt::Debug for PresentedToken<'_> {
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
        match PresentedToken::in_headers(&map) {
            PresentedToken::None => None,
            PresentedToken::Token(token) => Some(str::from_utf8(token).unwrap().to_owned()),
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
        assert_eq!(format!("{:?}", PresentedToken::Token(b"kw1_secret")), "Token(***)");
    }
}
