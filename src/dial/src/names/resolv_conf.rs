//! The name servers to ask, and how: of resolv.conf(5), or of the configuration.
//!
//! Owns: the meaning of the settings and their bounds, and the names to ask for. Must not know: a question's
//! answer. Invariants: there is a name server always; a name with a dot at its end is asked for as it is.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

/// The port of name servers (RFC 1035, 4.2).
pub(super) const PORT: u16 = 53;
/// Name servers that are asked. The machine's own resolver takes three.
const MOST_SERVERS: usize = 8;
/// Suffixes of the search list.
const MOST_SUFFIXES: usize = 16;
/// Bounds of `timeout` and `attempts`, as in glibc (`RES_MAXRETRANS`, `RES_MAXRETRY`).
const LONGEST_TIMEOUT: u32 = 30;
const MOST_ATTEMPTS: u32 = 5;

/// The name servers, and how they are asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct NameServers {
    /// Never empty; preferred servers first.
    pub(super) servers: Vec<SocketAddr>,
    /// Suffixes for names that are not whole.
    search: Vec<String>,
    /// A name with at least this number of dots is asked for as it is first.
    ndots: usize,
    /// After this time a question is put again, while its first answer is still awaited.
    pub(super) timeout: Duration,
    /// How often a question is put to each server.
    pub(super) attempts: u32,
    /// True if questions go over TCP only.
    pub(super) only_tcp: bool,
    /// True if IPv6 addresses are asked for.
    pub(super) asks_aaaa: bool,
}

impl NameServers {
    /// The settings of a resolv.conf. Without a server in it, the server of this machine is asked.
    pub(super) fn parse(text: &[u8], port: u16) -> Self {
        let (read, faults) = resolv_conf::Config::parse_with_errors(text);
        for fault in faults {
            tracing::debug!(%fault, "a line of resolv.conf has no effect");
        }
        let servers = read.nameservers.iter().map(|server| SocketAddr::new(IpAddr::from(server), port));
        let mut servers: Vec<SocketAddr> = servers.take(MOST_SERVERS).collect();
        if servers.is_empty() {
            servers.push((Ipv4Addr::LOCALHOST, port).into());
        }
        let mut search: Vec<String> = read.get_last_search_or_domain().cloned().collect();
        if search.is_empty() {
            search.extend(domain_of_machine());
        }
        search.retain(|suffix| !suffix.trim_matches('.').is_empty() && suffix != "--");
        search.truncate(MOST_SUFFIXES);
        Self {
            servers,
            search,
            ndots: usize::try_from(read.ndots).unwrap_or(1),
            timeout: Duration::from_secs(read.timeout.clamp(1, LONGEST_TIMEOUT).into()),
            attempts: read.attempts.clamp(1, MOST_ATTEMPTS),
            only_tcp: read.use_vc,
            asks_aaaa: !read.no_aaaa,
        }
    }

    /// These servers, without a search list.
    pub(super) fn of(servers: &[SocketAddr]) -> Self {
        Self { servers: servers.to_vec(), search: Vec::new(), ndots: 0, ..Self::parse(b"", PORT) }
    }

    /// The whole names to ask for, one after the other, each with a dot at its end.
    pub(super) fn names(&self, name: &str) -> Vec<String> {
        if name.ends_with('.') {
            return vec![name.to_owned()];
        }
        let whole = format!("{name}.");
        let below = |suffix: &String| format!("{name}.{}.", suffix.trim_matches('.'));
        let mut names: Vec<String> = self.search.iter().map(below).collect();
        if name.matches('.').count() >= self.ndots {
            names.insert(0, whole);
        } else {
            names.push(whole);
        }
        names
    }
}

/// The domain in the machine's own name: the search list where resolv.conf has none.
fn domain_of_machine() -> Option<String> {
    let uname = rustix::system::uname();
    let (_, domain) = uname.nodename().to_str().ok()?.split_once('.')?;
    Some(domain.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_settings_of_the_file_are_obeyed_within_bounds() {
        let read = NameServers::parse(
            b"; of DHCP\nnameserver 10.0.0.53\nnameserver fd00::53\nnameserver nonsense\n\
              search a.example. -- b.example\noptions ndots:2 timeout:3 attempts:9 use-vc no-aaaa rotate\n",
            PORT,
        );
        assert_eq!(read.servers, ["10.0.0.53:53".parse().unwrap(), "[fd00::53]:53".parse().unwrap()]);
        assert_eq!((read.timeout, read.attempts), (Duration::from_secs(3), MOST_ATTEMPTS));
        assert!(read.only_tcp && !read.asks_aaaa);
        let hasty = NameServers::parse(b"options timeout:0 attempts:0\n", PORT);
        assert_eq!((hasty.timeout, hasty.attempts), (Duration::from_secs(1), 1));
        assert_eq!(hasty.servers, ["127.0.0.1:53".parse().unwrap()], "as glibc and Go");
    }

    #[test]
    fn a_short_name_is_sought_below_the_search_list_and_a_whole_one_is_not() {
        let read = NameServers::parse(b"search a.example b.example.\noptions ndots:2\n", PORT);
        assert_eq!(read.names("etcd_1"), ["etcd_1.a.example.", "etcd_1.b.example.", "etcd_1."]);
        assert_eq!(read.names("x.y.z"), ["x.y.z.", "x.y.z.a.example.", "x.y.z.b.example."]);
        assert_eq!(read.names("etcd-1."), ["etcd-1."]);
        let given = NameServers::of(&["127.0.0.1:5353".parse().unwrap()]);
        assert_eq!(given.names("etcd_1"), ["etcd_1."]);
        assert_eq!(given.servers[0].port(), 5353);
    }
}
