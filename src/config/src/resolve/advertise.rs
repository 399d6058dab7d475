//! Advertised client URLs: Keyward's own addresses, shared and per member.
//!
//! Owns: `[advertise]`, the members of listeners, and the URLs derived from listeners. Must not know: the
//! cluster, so a name of no existing member is no fault. Invariants: no URL stems from client input; a
//! derived URL leads a client back by TLS if and only if the client came by TLS, and by a unix socket if and
//! only if the client came by a unix socket.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::Resolver;
use crate::{Address, AdvertisedUrls, Endpoint, Listener, ListenerClientUrls, Scheme, ServerTls, toml_file};
use keyward_etcd::identity::named_member::NamedMember;

/// The configured `client_urls` of listeners, by listener name.
pub(super) type ConfiguredClientUrls = BTreeMap<String, Vec<String>>;

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

    /// Resolves TLS server names. Hosts are compared in lower case, as in TLS.
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

    /// Takes the configured `client_urls` of all listeners, by listener name.
    pub(super) fn reached(&mut self, rows: &mut [toml_file::TomlListener]) -> ConfiguredClientUrls {
        let mut reached = ConfiguredClientUrls::new();
        for (index, row) in rows.iter_mut().enumerate() {
            let (Some(name), Some(urls)) = (&row.name, row.client_urls.take()) else { continue };
            let urls = self.urls(&format!("listener[{index}].client_urls"), urls);
            reached.insert(name.clone(), urls);
        }
        reached
    }

    /// Resolves the advertised URLs. A URL loses its trailing `/`, so clients see the form used by etcd.
    pub(super) fn advertise(
        &mut self,
        advertise: toml_file::TomlAdvertise,
        reached: &ConfiguredClientUrls,
        listeners: &[Arc<Listener>],
    ) -> AdvertisedUrls {
        let everywhere = advertise.client_urls.map(|urls| self.urls(CLIENT_URLS, urls));
        let mut named = Vec::new();
        for (name, urls) in advertise.members.unwrap_or_default() {
            let path = format!("{MEMBERS}.{name}");
            let Some(member) = self.member_named(&path, &name) else { continue };
            named.push((member, self.urls(&path, urls)));
        }
        let own = self.members_own(&named, reached, listeners);
        let mut shared: BTreeMap<&str, Vec<String>> = BTreeMap::new();
        let mut rows = Vec::new();
        for listener in listeners {
            // The URL of a per-member listener is shared only if no further listener fits.
            let back = listeners.iter().find(|other| other.member.is_none() && alike(other, listener));
            let back = if listener.member.is_none() { listener } else { back.unwrap_or(listener) };
            let client_urls = shared.entry(&back.name).or_insert_with(|| {
                let told = reached.get(&*back.name).or(everywhere.as_ref()).cloned();
                told.unwrap_or_else(|| vec![self.derived(CLIENT_URLS, back, None)])
            });
            let mut members = named.clone();
            // The listener's own member URLs win over those of further listeners.
            let mine = own.iter().filter(|(of, ..)| Arc::ptr_eq(of, listener));
            let others = own.iter().filter(|(of, ..)| alike(of, listener));
            for (_, member, urls) in mine.chain(others) {
                if members.iter().all(|(known, _)| known != member) {
                    members.push((member.clone(), urls.clone()));
                }
            }
            let name = Arc::clone(&listener.name);
            rows.push(ListenerClientUrls { listener: name, client_urls: client_urls.clone(), members });
        }
        AdvertisedUrls { rows }
    }

    /// The member URLs from listeners, for members without a URL in `named`.
    fn members_own<'a>(
        &mut self,
        named: &[(NamedMember, Vec<String>)],
        reached: &ConfiguredClientUrls,
        listeners: &'a [Arc<Listener>],
    ) -> Vec<(&'a Arc<Listener>, NamedMember, Vec<String>)> {
        let mut own = Vec::new();
        for listener in listeners {
            let itself = listener.member.iter().map(|member| (member, None));
            let hosts = listener.server_names.iter().map(|(host, member)| (member, Some(host.as_str())));
            for (member, host) in itself.chain(hosts) {
                if named.iter().any(|(known, _)| known == member) {
                    continue;
                }
                let told = reached.get(&*listener.name).filter(|_| host.is_none()).cloned();
                let urls = told
                    .unwrap_or_else(|| vec![self.derived(&format!("{MEMBERS}.{member}"), listener, host)]);
                own.push((listener, member.clone(), urls));
            }
        }
        own
    }

    fn urls(&mut self, path: &str, urls: Vec<String>) -> Vec<String> {
        if urls.is_empty() {
            self.findings.fault(path, "names no URL; leave it out for what follows from listeners");
        }
        let mut checked = Vec::new();
        for (index, url) in urls.into_iter().enumerate() {
            let path = format!("{path}[{index}]");
            if is_socket(&url) {
                checked.push(url);
                continue;
            }
            let Some(url) = self.checked(&path, url.parse::<Endpoint>()) else { continue };
            if url.is_wildcard() {
                self.findings
                    .warn(&path, format!("{url} leads clients nowhere; name an address that they can reach"));
            }
            checked.push(url.to_string());
        }
        checked
    }

    /// The listener's own URL, or its port on `host`.
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
                "not set, and {url}, the address of listener {:?}, leads clients nowhere; clients that ask \
                 for the member list will follow it, so name an address that they can reach",
                &*listener.name
            );
            self.findings.warn(path, reason);
        }
        url.to_string()
    }
}

/// True if a client of `one` can connect to `other` with the same use of TLS and unix sockets.
fn alike(one: &Listener, other: &Listener) -> bool {
    let is_socket = |listener: &Listener| matches!(listener.address, Address::Unix(_));
    one.tls.is_some() == other.tls.is_some() && is_socket(one) == is_socket(other)
}

/// True for a unix socket URL as written by etcd's own clients: `unix:///path`, with TLS `unixs:///path`.
fn is_socket(url: &str) -> bool {
    let path = url.strip_prefix("unix://").or_else(|| url.strip_prefix("unixs://"));
    path.is_some_and(|path| path.starts_with('/') && !path.contains(char::is_control))
}

/// True for a valid TLS server name: no address, no port.
fn is_host(text: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    (1..=253).contains(&text.len()) && text.bytes().all(plain) && text.parse::<std::net::IpAddr>().is_err()
}
