//! From names to addresses, and from a domain to the endpoints that its SRV records name.
//!
//! Owns: who is asked, and for how long an answer is good. Must not know: members, when something is asked again.
//! Invariants: an address needs no question; an answer that names nothing is none; every question ends within [`LIMIT`].

use std::cmp::Reverse;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use hickory_resolver::TokioResolver;
use hickory_resolver::config::{
    ConnectionConfig, LookupIpStrategy, NameServerConfig, ResolveHosts, ResolverConfig, ResolverOpts,
};
use hickory_resolver::net::runtime::TokioRuntimeProvider;
use hickory_resolver::proto::rr::RData;

use crate::config::{Endpoint, Scheme};

/// How long a question may take.
const LIMIT: Duration = Duration::from_secs(5);
/// How long one name server may take over it.
const SERVER: Duration = Duration::from_secs(2);
/// Addresses of one name, and endpoints of one domain, that are taken. Real clusters have at most some nine members.
const MOST: usize = 32;

/// How names become addresses. Cheap to clone.
#[derive(Clone)]
pub enum Names {
    /// Not here: whoever dials knows what a name means, as in tests of one process.
    Dialler,
    /// As all programs of this machine do it: by its hosts file, then by what it is set up for.
    System,
    /// By these name servers and nothing else.
    Servers(Box<TokioResolver>),
}

/// What was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found<T> {
    /// Never empty; nothing twice.
    pub all: Vec<T>,
    /// For how long it is good, where that was said.
    pub good_for: Option<Duration>,
}

/// Nothing was found.
#[derive(Clone, Debug, thiserror::Error)]
pub enum NameError {
    /// Nobody answered, or the name is not known.
    #[error("{0}")]
    Failed(Arc<str>),
    /// It is known, and leads nowhere.
    #[error("the name leads nowhere")]
    Nowhere,
    /// It took too long.
    #[error("no answer within {LIMIT:?}")]
    TimedOut,
}

impl Names {
    /// As the machine does, or by these name servers where there are any.
    ///
    /// # Errors
    /// The servers cannot be used.
    pub fn by(servers: &[SocketAddr]) -> io::Result<Self> {
        if servers.is_empty() {
            return Ok(Self::System);
        }
        let reached = |server: &SocketAddr| {
            let way = |mut way: ConnectionConfig| {
                way.port = server.port();
                way
            };
            let ways = vec![way(ConnectionConfig::udp()), way(ConnectionConfig::tcp())];
            NameServerConfig::new(server.ip(), true, ways)
        };
        let config = ResolverConfig::from_name_servers(servers.iter().map(reached).collect());
        let mut builder = TokioResolver::builder_with_config(config, TokioRuntimeProvider::default());
        set(builder.options_mut());
        let built = builder.build().map_err(io::Error::other)?;
        Ok(Self::Servers(Box::new(built)))
    }

    /// Whether the machine's hosts file counts.
    #[must_use]
    pub fn reads_hosts_file(&self) -> bool {
        matches!(self, Self::System)
    }

    /// Whether somebody must be asked where this host is.
    #[must_use]
    pub fn asks_for(&self, host: &str) -> bool {
        !matches!(self, Self::Dialler) && host.parse::<IpAddr>().is_err()
    }

    /// The addresses of a host. Cancel-safe.
    ///
    /// # Errors
    /// See [`NameError`].
    pub async fn addresses(&self, host: &str) -> Result<Found<IpAddr>, NameError> {
        let asked = async {
            match self {
                Self::Dialler | Self::System => {
                    let found = tokio::net::lookup_host((host, 0)).await.map_err(failed)?;
                    Ok(Found { all: found.map(|address| address.ip()).collect(), good_for: None })
                }
                Self::Servers(servers) => {
                    let looked = servers.lookup_ip(format!("{host}.")).await.map_err(failed)?;
                    let good_for = least(looked.as_lookup().answers().iter().map(|record| record.ttl));
                    Ok(Found { all: looked.iter().collect(), good_for })
                }
            }
        };
        limited(asked).await
    }

    /// The endpoints that these SRV records name, the preferred ones first. Cancel-safe.
    ///
    /// # Errors
    /// See [`NameError`].
    pub async fn services(&self, record: &str, scheme: Scheme) -> Result<Found<Endpoint>, NameError> {
        let asked = async {
            let looked = match self {
                Self::Servers(servers) => servers.srv_lookup(record).await,
                Self::Dialler | Self::System => {
                    // Built each time: what the machine is set up for may have changed.
                    let mut builder = TokioResolver::builder_tokio().map_err(failed)?;
                    set(builder.options_mut());
                    builder.build().map_err(failed)?.srv_lookup(record).await
                }
            };
            let looked = looked.map_err(failed)?;
            let mut named: Vec<_> = looked
                .answers()
                .iter()
                .filter_map(|record| match &record.data {
                    RData::SRV(srv) => {
                        let target = srv.target.to_ascii();
                        Some((srv.priority, Reverse(srv.weight), target, srv.port))
                    }
                    _ => None,
                })
                .collect();
            named.sort_unstable();
            let endpoints =
                named.into_iter().filter_map(|(_, _, target, port)| endpoint(scheme, &target, port));
            let good_for = least(looked.answers().iter().map(|record| record.ttl));
            Ok(Found { all: endpoints.collect(), good_for })
        };
        limited(asked).await
    }
}

/// The endpoint that a record names; none for a root, which says that there is no such service.
fn endpoint(scheme: Scheme, target: &str, port: u16) -> Option<Endpoint> {
    let prefix = match scheme {
        Scheme::Http => "http",
        Scheme::Https => "https",
    };
    format!("{prefix}://{}:{port}", target.trim_end_matches('.')).parse().ok()
}

fn least(seconds: impl Iterator<Item = u32>) -> Option<Duration> {
    seconds.min().map(|seconds| Duration::from_secs(seconds.into()))
}

/// What is remembered is remembered by whoever asks, who knows when to ask again.
fn set(options: &mut ResolverOpts) {
    options.cache_size = 0;
    options.timeout = SERVER;
    options.attempts = 2;
    options.use_hosts_file = ResolveHosts::Never;
    options.ip_strategy = LookupIpStrategy::Ipv4AndIpv6;
    options.try_tcp_on_error = true;
}

fn failed(error: impl std::fmt::Display) -> NameError {
    NameError::Failed(error.to_string().into())
}

async fn limited<T: PartialEq>(
    asked: impl Future<Output = Result<Found<T>, NameError>>,
) -> Result<Found<T>, NameError> {
    let found = tokio::time::timeout(LIMIT, asked).await.unwrap_or(Err(NameError::TimedOut))?;
    let mut all: Vec<T> = Vec::with_capacity(found.all.len());
    for one in found.all {
        if all.len() < MOST && !all.contains(&one) {
            all.push(one);
        }
    }
    if all.is_empty() { Err(NameError::Nowhere) } else { Ok(Found { all, ..found }) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_needs_no_question_and_a_root_is_no_endpoint() {
        for host in ["127.0.0.1", "::1"] {
            assert!(!Names::System.asks_for(host), "{host}");
        }
        assert!(Names::System.asks_for("localhost") && !Names::Dialler.asks_for("localhost"));
        let url = |scheme, target, port| endpoint(scheme, target, port).map(|endpoint| endpoint.to_string());
        assert_eq!(
            url(Scheme::Https, "M1.example.com.", 2379).as_deref(),
            Some("https://m1.example.com:2379")
        );
        assert_eq!(url(Scheme::Http, ".", 2379), None);
        assert_eq!(url(Scheme::Http, "m1.example.com.", 0), None);
    }

    #[tokio::test]
    async fn what_is_found_is_bounded_and_nothing_stands_twice() {
        let found = |all: Vec<usize>| limited(std::future::ready(Ok(Found { all, good_for: None })));
        assert_eq!(found(vec![1, 2, 1]).await.unwrap().all, [1, 2]);
        assert_eq!(found((0..99).collect()).await.unwrap().all.len(), MOST);
        assert!(matches!(found(Vec::new()).await, Err(NameError::Nowhere)));
    }
}
