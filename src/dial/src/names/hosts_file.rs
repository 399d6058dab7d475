//! The hosts file (hosts(5)), and the names that need neither the file nor a name server.
//!
//! Owns: the meaning of a line. Must not know: where the file is. Invariants: names are compared without case
//! and without a dot at their end; a line that is no hosts line has no effect on the others.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// The addresses of the file's names.
#[derive(Default)]
pub(super) struct HostsFile(HashMap<String, Vec<IpAddr>>);

impl HostsFile {
    /// Reads the lines `address name…`.
    pub(super) fn parse(text: &[u8]) -> Self {
        let mut addresses: HashMap<String, Vec<IpAddr>> = HashMap::new();
        for line in String::from_utf8_lossy(text).lines() {
            let mut words = line.split('#').next().unwrap_or_default().split_ascii_whitespace();
            let Some(address) = words.next().and_then(|word| word.parse::<IpAddr>().ok()) else { continue };
            for name in words {
                let known = addresses.entry(compared(name)).or_default();
                if !known.contains(&address) {
                    known.push(address);
                }
            }
        }
        Self(addresses)
    }

    /// The addresses of a name; `None` if the file does not have the name.
    pub(super) fn addresses(&self, host: &str) -> Option<&[IpAddr]> {
        self.0.get(&compared(host)).map(Vec::as_slice)
    }
}

/// The addresses of `localhost` and of the names below it (RFC 6761, 6.3), which are never asked for.
pub(super) fn loopback(host: &str) -> Option<[IpAddr; 2]> {
    let host = compared(host);
    let is_local = host == "localhost" || host.ends_with(".localhost");
    is_local.then_some([IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST)])
}

fn compared(name: &str) -> String {
    name.strip_suffix('.').unwrap_or(name).to_ascii_lowercase()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_of_a_line_leads_to_its_address_whatever_its_case() {
        let text = b"127.0.0.1 localhost\n10.0.0.1\tetcd_1  Etcd-1.Example.com # etcd-9\n\xff\n\
            ::1 localhost ip6-localhost\n10.0.0.2 etcd_1\nnonsense etcd-7\n10.0.0.2 etcd_1\n#10.0.0.3 etcd-8";
        let file = HostsFile::parse(text);
        let of = |host: &str| {
            let found = file.addresses(host).unwrap_or_default();
            found.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(of("etcd_1"), "10.0.0.1 10.0.0.2");
        assert_eq!(of("ETCD-1.example.com."), "10.0.0.1");
        assert_eq!(of("localhost"), "127.0.0.1 ::1");
        for host in ["etcd-7", "etcd-8", "etcd-9", "nonsense", ""] {
            assert!(file.addresses(host).is_none(), "{host}");
        }
    }

    #[test]
    fn localhost_and_the_names_below_it_are_this_machine() {
        for host in ["localhost", "LOCALHOST.", "etcd.localhost"] {
            assert!(loopback(host).is_some(), "{host}");
        }
        for host in ["localhost.example.com", "notlocalhost"] {
            assert!(loopback(host).is_none(), "{host}");
        }
    }
}
