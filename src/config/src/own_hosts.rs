//! The resolved `listener.hosts` and `admin.hosts`: the names under which this process is asked by HTTP.
//!
//! Owns: the comparison of a request's host with the names. Must not know: headers, the answer to a foreign
//! host. Invariant: a name that is not listed is no own one, so a web site cannot let its own name point here
//! and read (DNS rebinding); an address, or `localhost`, is no site's name.

use std::net::IpAddr;
use std::sync::Arc;

use http::uri::Authority;

/// The names of this process in the Host header, beside IP addresses and `localhost`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OwnHosts {
    /// Every name.
    Any,
    /// These names, in lower case, without a port.
    Listed(Arc<[String]>),
}

impl Default for OwnHosts {
    fn default() -> Self {
        Self::Listed([].into())
    }
}

impl OwnHosts {
    /// The same and these names, in lower case.
    #[must_use]
    pub fn with(self, more: impl Iterator<Item = String>) -> Self {
        match self {
            Self::Any => Self::Any,
            Self::Listed(names) => Self::Listed(names.iter().cloned().chain(more).collect()),
        }
    }

    /// True if a request for this host is for this process; a request without one is, if any is. The port is
    /// not compared: a balancer's may be another.
    #[must_use]
    pub fn include(&self, asked: Option<&Authority>) -> bool {
        let Self::Listed(names) = self else { return true };
        let Some(asked) = asked else { return false };
        let host = asked.host();
        let address = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(host);
        let is_known = host.eq_ignore_ascii_case("localhost")
            || address.parse::<IpAddr>().is_ok()
            || names.iter().any(|own| host.eq_ignore_ascii_case(own));
        is_known && !asked.as_str().contains('@')
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_addresses_and_listed_names_are_own() {
        let own = OwnHosts::Listed(["ops.example.com".to_owned()].into());
        let include = |own: &OwnHosts, host: &str| own.include(host.parse().ok().as_ref());
        for host in ["127.0.0.1:2389", "10.0.0.7", "[::1]:2389", "localhost:1", "Ops.Example.Com:2389"] {
            assert!(include(&own, host), "{host}");
        }
        for host in ["evil.example", "ops.example.com.evil.example", "127.0.0.1.nip.io", "a@127.0.0.1", ""] {
            assert!(!include(&own, host), "{host}");
            assert!(include(&OwnHosts::Any, host), "{host}");
        }
        assert!(!include(&OwnHosts::default(), "ops.example.com"));
    }
}
