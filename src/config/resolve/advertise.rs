//! What clients are told of where members are: us, and which part of us is about which member.
//!
//! Owns: `[advertise]`, what listeners say of members, and what follows where neither says it. Must not know: the cluster,
//! so that a name that no member has is no fault. Invariant: a URL never comes from what a client says.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::Resolver;
use crate::config::{Address, Advertise, Endpoint, Listener, Scheme, ServerTls, file};
use crate::identity::named::NamedMember;

const CLIENT_URLS: &str = "advertise.client_urls";
const MEMBERS: &str = "advertise.members";

impl Resolver<'_> {
    pub(super) fn member_named(&mut self, path: &str, text: &str) -> Option<NamedMember> {
        let named = NamedMember::new(text);
        if named.is_none() {
            self.findings.fault(path, "is empty; a member's name, or its id in hexadecimal, is needed");
        }
        named
    }

    /// Hosts are told apart as TLS does it: in lower case.
    pub(super) fn server_names(
        &mut self,
        listener: &str,
        rows: BTreeMap<String, String>,
        tls: Option<&ServerTls>,
        member: Option<&NamedMember>,
    ) -> BTreeMap<String, NamedMember> {
        let path = format!("{listener}.server_names");
        if !rows.is_empty() && tls.is_none() {
            self.findings.fault(&path, "needs tls: without it no client names a host");
        }
        if !rows.is_empty() && member.is_some() {
            self.findings.warn(&path, "has no effect: all connections are about the listener's member");
        }
        let mut names = BTreeMap::new();
        for (host, member) in rows {
            let path = format!("{path}.{host}");
            if !is_host(&host) {
                self.findings.fault(&path, "is no host name");
            }
            let Some(member) = self.member_named(&path, &member) else { continue };
            if names.insert(host.to_ascii_lowercase(), member).is_some() {
                self.findings.fault(&path, "stands there twice");
            }
        }
        names
    }

    /// URLs lose the `/` at their end, so that clients see what etcd would write.
    pub(super) fn advertise(&mut self, advertise: file::Advertise, listeners: &[Arc<Listener>]) -> Advertise {
        let client_urls = match advertise.client_urls {
            Some(urls) => {
                if urls.is_empty() {
                    self.findings
                        .fault(CLIENT_URLS, "names no URL; leave it out to advertise the first listener");
                }
                self.urls(CLIENT_URLS, urls)
            }
            None => {
                // One member's own is nobody else's.
                let shared = listeners.iter().find(|listener| listener.member.is_none());
                let first = shared.or(listeners.first());
                first.map(|first| self.derived(CLIENT_URLS, first, None)).into_iter().collect()
            }
        };
        let mut members = Vec::new();
        for (name, urls) in advertise.members.unwrap_or_default() {
            let path = format!("{MEMBERS}.{name}");
            if urls.is_empty() {
                self.findings.fault(&path, "names no URL");
            }
            let Some(named) = self.member_named(&path, &name) else { continue };
            members.push((named, self.urls(&path, urls)));
        }
        for listener in listeners {
            let own = listener.member.iter().map(|member| (member, None));
            let hosts = listener.server_names.iter().map(|(host, member)| (member, Some(host.as_str())));
            for (member, host) in own.chain(hosts) {
                if members.iter().all(|(known, _)| known != member) {
                    let url = self.derived(&format!("{MEMBERS}.{member}"), listener, host);
                    members.push((member.clone(), vec![url]));
                }
            }
        }
        Advertise { client_urls, members }
    }

    fn urls(&mut self, path: &str, urls: Vec<String>) -> Vec<String> {
        let mut checked = Vec::new();
        for (index, url) in urls.iter().enumerate() {
            let path = format!("{path}[{index}]");
            let Some(url) = self.checked(&path, url.parse::<Endpoint>()) else { continue };
            if url.is_wildcard() {
                self.findings
                    .warn(&path, format!("{url} leads clients nowhere; name an address that they can reach"));
            }
            checked.push(url.to_string());
        }
        checked
    }

    /// The listener's own address, or its port on `host`.
    fn derived(&mut self, path: &str, listener: &Listener, host: Option<&str>) -> String {
        let address = match &listener.address {
            Address::Tcp(address) => *address,
            Address::Unix(path) if listener.tls.is_some() => return format!("unixs://{}", path.display()),
            Address::Unix(path) => return format!("unix://{}", path.display()),
        };
        let scheme = if listener.tls.is_some() { Scheme::Https } else { Scheme::Http };
        let nowhere = (address.ip().is_unspecified() && host.is_none()) || address.port() == 0;
        let host = host.map_or_else(|| address.ip().to_string(), str::to_owned);
        let url = Endpoint { scheme, host, port: address.port() };
        if nowhere {
            let reason = format!(
                "not set, and {url}, the address of listener {:?}, leads clients nowhere; clients that ask for the \
                 member list will follow it, so name an address that they can reach",
                &*listener.name
            );
            self.findings.warn(path, reason);
        }
        url.to_string()
    }
}

/// What a client can name in TLS: no address, no port.
fn is_host(text: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    (1..=253).contains(&text.len()) && text.bytes().all(plain) && text.parse::<std::net::IpAddr>().is_err()
}
