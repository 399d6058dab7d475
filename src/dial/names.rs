//! Resolves names to addresses, and the SRV records of a domain to endpoints.
//!
//! Owns: the choice of resolver, and the TTL of an answer. Must not know: members, the time of the next
//! lookup.
//! Invariants: an IP address needs no lookup; an empty answer is an error; every lookup ends within seconds.

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
use hickory_resolver::proto::rr::{Name, RData};

use crate::config::{Endpoint, Scheme};

/// Time limit of a lookup.
const LIMIT: Duration = Duration::from_secs(5);
/// Time limit of one name server within a lookup.
const SERVER: Duration = Duration::from_secs(2);
/// Maximum number of addresses of one name, and of endpoints of one domain. Real clusters have at most some
/// nine members.
const MOST: usize = 32;

/// The resolver of names. Cheap to clone.
#[derive(Clone)]
pub enum NameResolver {
    /// No resolution here: the dialler interprets names, as in single-process tests.
    Dialler,
    /// The resolver of the operating system: the hosts file first, then the configured sources.
    System,
    /// Only these name servers.
    Servers(Box<TokioResolver>),
}

/// The result of a lookup.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NameAnswer<T> {
    /// Never empty; without duplicates.
    pub all: Vec<T>,
    /// The TTL of the answer, if known.
    pub good_for: Option<Duration>,
}

/// Why a lookup has no result.
#[derive(Clone, Debug, thiserror::Error)]
pub enum NameError {
    /// No name server answered, or the name is unknown.
    #[error("{0}")]
    Failed(Arc<str>),
    /// The name is known, but has no address.
    #[error("the name leads nowhere")]
    Nowhere,
    /// The lookup timed out.
    #[error("no answer within {LIMIT:?}")]
    TimedOut,
}

impl NameResolver {
    /// The resolver for these name servers; the system's resolver if `servers` is empty.
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

    /// True if the machine's hosts file is consulted.
    #[must_use]
    pub fn reads_hosts_file(&self) -> bool {
        matches!(self, Self::System)
    }

    /// True if resolving this host needs a lookup.
    #[must_use]
    pub fn asks_for(&self, host: &str) -> bool {
        !matches!(self, Self::Dialler) && host.parse::<IpAddr>().is_err()
    }

    /// Looks up the addresses of a host. Cancel-safe.
    ///
    /// # Errors
    /// See [`NameError`].
    pub async fn addresses(&self, host: &str) -> Result<NameAnswer<IpAddr>, NameError> {
        let asked = async {
            match self {
                Self::Dialler | Self::System => {
                    let found = tokio::net::lookup_host((host, 0)).await.map_err(failed)?;
                    Ok(NameAnswer { all: found.map(|address| address.ip()).collect(), good_for: None })
                }
                Self::Servers(servers) => {
                    let looked = servers.lookup_ip(whole_name(host)?).await.map_err(failed)?;
                    let good_for = least(looked.as_lookup().answers().iter().map(|record| record.ttl));
                    Ok(NameAnswer { all: looked.iter().collect(), good_for })
                }
            }
        };
        limited(asked).await
    }

    /// Looks up the endpoints named by SRV records, preferred endpoints first. Cancel-safe.
    ///
    /// # Errors
    /// See [`NameError`].
    pub async fn services(&self, record: &str, scheme: Scheme) -> Result<NameAnswer<Endpoint>, NameError> {
        let asked = async {
            let looked = match self {
                Self::Servers(servers) => servers.srv_lookup(record).await,
                Self::Dialler | Self::System => {
                    // Built for each lookup, because the system's resolver settings may have changed.
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
            Ok(NameAnswer { all: endpoints.collect(), good_for })
        };
        limited(asked).await
    }
}

/// The name of a host as a name server knows it, without a search list. Unlike names that people register, a
/// label may have an underscore, as those of Docker Compose have.
fn whole_name(host: &str) -> Result<Name, NameError> {
    let mut name = if host.is_ascii() {
        let labels = host.strip_suffix('.').unwrap_or(host).split('.');
        Name::from_labels(labels.map(str::as_bytes)).map_err(failed)?
    } else {
        Name::from_utf8(host).map_err(failed)?
    };
    name.set_fqdn(true);
    Ok(name)
}

/// The endpoint named by a record; `None` for the root name, which means that the service does not exist.
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

/// Disables the resolver's cache: the caller keeps the answers and schedules the lookups.
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
    asked: impl Future<Output = Result<NameAnswer<T>, NameError>>,
) -> Result<NameAnswer<T>, NameError> {
    let found = tokio::time::timeout(LIMIT, asked).await.unwrap_or(Err(NameError::TimedOut))?;
    let mut all: Vec<T> = Vec::with_capacity(found.all.len());
    for one in found.all {
        if all.len() < MOST && !all.contains(&one) {
            all.push(one);
        }
    }
    if all.is_empty() { Err(NameError::Nowhere) } else { Ok(NameAnswer { all, ..found }) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_needs_no_question_and_a_root_is_no_endpoint() {
        for host in ["127.0.0.1", "::1"] {
            assert!(!NameResolver::System.asks_for(host), "{host}");
        }
        assert!(NameResolver::System.asks_for("localhost") && !NameResolver::Dialler.asks_for("localhost"));
        let url = |scheme, target, port| endpoint(scheme, target, port).map(|endpoint| endpoint.to_string());
        assert_eq!(
            url(Scheme::Https, "M1.example.com.", 2379).as_deref(),
            Some("https://m1.example.com:2379")
        );
        assert_eq!(url(Scheme::Http, ".", 2379), None);
        assert_eq!(url(Scheme::Http, "m1.example.com.", 0), None);
    }

    /// Every name that the configuration takes is asked for.
    #[test]
    fn names_with_underscores_and_with_a_dot_at_their_end_are_names() {
        let name = |host: &str| whole_name(host).map(|name| name.to_ascii());
        for host in
            ["etcd-1", "etcd_1", "project_etcd_1.project_default", "_etcd", "a_", "etcd-1.example.com"]
        {
            assert_eq!(name(host).unwrap(), format!("{host}."));
        }
        assert_eq!(name("etcd-1.example.com.").unwrap(), "etcd-1.example.com.");
        assert!(name("b\u{fc}ro.example").unwrap().starts_with("xn--"));
        for host in ["", ".", "a..b", &"a".repeat(64)] {
            assert!(name(host).is_err(), "{host}");
        }
    }

    #[tokio::test]
    async fn what_is_found_is_bounded_and_nothing_stands_twice() {
        let found = |all: Vec<usize>| limited(std::future::ready(Ok(NameAnswer { all, good_for: None })));
        assert_eq!(found(vec![1, 2, 1]).await.unwrap().all, [1, 2]);
        assert_eq!(found((0..99).collect()).await.unwrap().all.len(), MOST);
        assert!(matches!(found(Vec::new()).await, Err(NameError::Nowhere)));
    }
}
