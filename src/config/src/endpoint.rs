//! A member's URL.
//!
//! Owns: the parts of the URL, and its text. Must not know: the parsing of settings, members.

use std::fmt;

/// URL scheme of a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scheme {
    /// Plaintext HTTP/2.
    Http,
    /// HTTP/2 over TLS.
    Https,
}

/// A member's URL: `scheme://host:port`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Endpoint {
    /// Plaintext or TLS.
    pub scheme: Scheme,
    /// A DNS name or an IP address; IPv6 without brackets.
    pub host: String,
    /// The TCP port.
    pub port: u16,
}

impl Endpoint {
    /// `host:port`, as in `:authority`; IPv6 in brackets.
    #[must_use]
    pub fn authority(&self) -> String {
        if self.host.contains(':') {
            format!("[{}]:{}", self.host, self.port)
        } else {
            format!("{}:{}", self.host, self.port)
        }
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = match self.scheme {
            Scheme::Http => "http",
            Scheme::Https => "https",
        };
        write!(f, "{scheme}://{}", self.authority())
    }
}
