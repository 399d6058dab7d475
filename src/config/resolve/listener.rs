//! Listeners, and what follows from them: their users, our advertised URLs, the admin address beside them.
//!
//! Owns: `[[listener]]`, `[advertise]`, `[admin]`. Must not know: the cluster.
//! Invariants: names and addresses are unique; there is something that proves a listener's default user.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;

use super::Resolver;
use super::users::Rows;
use crate::config::{Address, Admin, Advertise, ClientAuth, Endpoint, Listener, Scheme, ServerTls, file};
use crate::identity::UserName;

/// rules 47.
const ADMIN: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 2381);

impl Resolver<'_> {
    pub(super) fn listeners(&mut self, rows: Vec<file::Listener>, users: &Rows) -> Vec<Arc<Listener>> {
        if rows.is_empty() {
            self.findings.missing("listener", "at least one [[listener]] is needed");
        }
        let mut listeners: Vec<Arc<Listener>> = Vec::new();
        for (index, row) in rows.into_iter().enumerate() {
            let path = format!("listener[{index}]");
            let name = self.listener_name(&format!("{path}.name"), row.name);
            let address_path = format!("{path}.address");
            let address = self.required(&address_path, row.address, "an address to listen on is needed");
            let address = address.and_then(|text| self.checked(&address_path, text.parse::<Address>()));
            let tls = row.tls.and_then(|tls| self.server_tls(&format!("{path}.tls"), tls));
            let default_user = row
                .default_user
                .and_then(|name| self.default_user(&format!("{path}.default_user"), &name, users));
            let (Some(name), Some(address)) = (name, address) else { continue };
            if listeners.iter().any(|earlier| earlier.name == name) {
                self.findings.fault(
                    &format!("{path}.name"),
                    format!("{name:?} is the name of an earlier listener too"),
                );
            }
            self.taken(&address_path, &address, &listeners);
            let listener = Listener { name, address, tls, default_user };
            self.warn_of_open_default(&path, &listener);
            listeners.push(Arc::new(listener));
        }
        listeners
    }

    fn listener_name(&mut self, path: &str, name: Option<String>) -> Option<Arc<str>> {
        let name = self.required(path, name, "a name is needed; logs and metrics show it")?;
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
        if name.is_empty() || name.len() > 64 || !name.bytes().all(plain) {
            self.findings.fault(path, "a listener's name is 1 to 64 of A-Z a-z 0-9 - _ .");
        }
        Some(name.into())
    }

    fn default_user(&mut self, path: &str, name: &str, rows: &Rows) -> Option<UserName> {
        let user = UserName::from(name);
        if !rows.users.prove(&user) && !rows.faulty.contains(name) {
            self.findings.fault(path, format!("there is no [[user]] with the name {name:?}"));
        }
        Some(user)
    }

    fn warn_of_open_default(&mut self, path: &str, listener: &Listener) {
        let guarded = matches!(listener.tls, Some(ServerTls { clients: ClientAuth::Required(_), .. }));
        let (Some(user), Address::Tcp(address)) = (&listener.default_user, &listener.address) else {
            return;
        };
        if !guarded && !address.ip().is_loopback() {
            let reason = format!("whoever reaches {address} acts as {user:?} without showing a credential");
            self.findings.warn(&format!("{path}.default_user"), reason);
        }
    }

    fn server_tls(&mut self, path: &str, tls: file::ListenerTls) -> Option<ServerTls> {
        let identity = self.key_pair(path, tls.cert, tls.key);
        let ca_path = format!("{path}.client_ca");
        let roots = tls.client_ca.as_ref().map(|name| self.roots(&ca_path, name));
        // A CA without a word on what it is for means "required", as etcd's --trusted-ca-file does.
        let unsaid = if roots.is_some() { file::ClientAuth::Required } else { file::ClientAuth::None };
        let clients = match (tls.client_auth.unwrap_or(unsaid), roots) {
            (file::ClientAuth::None, None) => Some(ClientAuth::None),
            (file::ClientAuth::None, Some(_)) => {
                self.findings.warn(&ca_path, "has no effect, since client_auth is \"none\"");
                Some(ClientAuth::None)
            }
            (file::ClientAuth::Optional, Some(roots)) => roots.map(ClientAuth::Optional),
            (file::ClientAuth::Required, Some(roots)) => roots.map(ClientAuth::Required),
            (file::ClientAuth::Optional | file::ClientAuth::Required, None) => {
                self.findings
                    .missing(&ca_path, "client_auth needs the CA that client certificates must verify under");
                None
            }
        };
        Some(ServerTls { identity: identity?, clients: clients? })
    }

    /// URLs lose the `/` at their end, so that clients see what etcd would write.
    pub(super) fn advertise(&mut self, advertise: file::Advertise, listeners: &[Arc<Listener>]) -> Advertise {
        let path = "advertise.client_urls";
        let Some(urls) = advertise.client_urls else {
            return Advertise {
                client_urls: listeners.first().map(|first| self.derived(first)).into_iter().collect(),
            };
        };
        if urls.is_empty() {
            self.findings.fault(path, "names no URL; leave it out to advertise the first listener");
        }
        let mut client_urls = Vec::new();
        for (index, url) in urls.iter().enumerate() {
            let path = format!("{path}[{index}]");
            let Some(url) = self.checked(&path, url.parse::<Endpoint>()) else { continue };
            if url.is_wildcard() {
                self.findings
                    .warn(&path, format!("{url} leads clients nowhere; name an address that they can reach"));
            }
            client_urls.push(url.to_string());
        }
        Advertise { client_urls }
    }

    fn derived(&mut self, listener: &Listener) -> String {
        let address = match &listener.address {
            Address::Tcp(address) => *address,
            Address::Unix(path) if listener.tls.is_some() => return format!("unixs://{}", path.display()),
            Address::Unix(path) => return format!("unix://{}", path.display()),
        };
        let scheme = if listener.tls.is_some() { Scheme::Https } else { Scheme::Http };
        let url = Endpoint { scheme, host: address.ip().to_string(), port: address.port() };
        if address.ip().is_unspecified() || address.port() == 0 {
            let reason = format!(
                "not set, and {url}, the address of listener {:?}, leads clients nowhere; clients that ask for the \
                 member list will follow it, so name an address that they can reach",
                &*listener.name
            );
            self.findings.warn("advertise.client_urls", reason);
        }
        url.to_string()
    }

    pub(super) fn admin(&mut self, admin: file::Admin, listeners: &[Arc<Listener>]) -> Option<Admin> {
        let path = "admin.address";
        let address = match admin.address {
            Some(text) => match self.checked(path, text.parse::<Address>())? {
                Address::Tcp(address) => address,
                Address::Unix(_) => {
                    self.findings.fault(path, "an IP address with a port is needed");
                    return None;
                }
            },
            None => ADMIN,
        };
        self.taken(path, &Address::Tcp(address), listeners);
        Some(Admin { address })
    }

    fn taken(&mut self, path: &str, address: &Address, earlier: &[Arc<Listener>]) {
        if let Some(other) = earlier.iter().find(|other| collide(&other.address, address)) {
            let reason = format!("{address} is taken by listener {:?} ({})", &*other.name, other.address);
            self.findings.fault(path, reason);
        }
    }
}

/// Whether the two cannot be bound at once: the same address, or the same port of one address and of "all".
fn collide(one: &Address, other: &Address) -> bool {
    match (one, other) {
        (Address::Tcp(one), Address::Tcp(other)) => {
            let all = (one.ip().is_unspecified() || other.ip().is_unspecified())
                && one.is_ipv4() == other.is_ipv4();
            one.port() != 0 && one.port() == other.port() && (one.ip() == other.ip() || all)
        }
        _ => one == other,
    }
}
