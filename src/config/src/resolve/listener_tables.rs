//! Resolves the listeners and the admin address.
//!
//! Owns: `[[listener]]`, `[admin]`. Must not know: the cluster. Invariants: names and addresses are unique;
//! an authority label means a single authority; a listener's default user has a credential.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;

use http::uri::Authority;

use super::user_tables::{OTHERS, UserRows};
use super::{IdentifyAvailability, Resolver};
use crate::certificate_expiry::RevocationCoverage;
use crate::{
    Address, Admin, AdminSocketSetting, ClientAuth, ClientCa, DEFAULT_ADMIN_SOCKET, Identify, Listener,
    ListenerHttp, NO_USER_AGENT, OnExpiry, OwnHosts, PageContent, PageSettings, ServerTls, toml_file,
};
use keyward_base::pem::{Crls, Roots};
use keyward_etcd::identity::UserName;
use keyward_etcd::identity::pattern::{AddressRange, Glob};

/// Default of `admin.address` (docs/decisions.md#d47).
const ADMIN: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 2389);

/// Maximum number of entries in `admin.replicas`.
const MOST_REPLICAS: usize = 64;

/// Maximum length of a unix socket path on Linux.
const LONGEST_SOCKET: usize = 107;

impl Resolver<'_> {
    /// Resolves the listeners. The default users are added to `defaults`, with the listener's name.
    pub(super) fn listeners(
        &mut self,
        rows: Vec<toml_file::TomlListener>,
        users: &UserRows,
        lead: IdentifyAvailability,
        defaults: &mut Vec<(Arc<str>, UserName)>,
    ) -> Vec<Arc<Listener>> {
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
            let tls = row.tls.and_then(|tls| self.server_tls(&format!("{path}.tls"), tls, name.as_ref()));
            let identify = self.identify(&format!("{path}.identify"), row.identify, tls.as_ref(), lead);
            let path_of_proxies = format!("{path}.proxy_protocol_from");
            let proxies = self.proxies(&path_of_proxies, row.proxy_protocol_from, address.as_ref());
            let default_user = row
                .default_user
                .and_then(|name| self.user_named(&format!("{path}.default_user"), &name, users));
            let hosts = match row.hosts {
                Some(names) if names != ["*"] => self.own_hosts(&format!("{path}.hosts"), names),
                _ => OwnHosts::Any,
            };
            let member = row.member.and_then(|name| self.member_named(&format!("{path}.member"), &name));
            let server_names = row.server_names.unwrap_or_default();
            let server_names = self.server_names(&path, server_names, tls.as_ref(), member.as_ref());
            let (Some(name), Some(address)) = (name, address) else { continue };
            if listeners.iter().any(|earlier| earlier.name == name) {
                self.findings.fault(
                    &format!("{path}.name"),
                    format!("{name:?} is the name of an earlier listener too"),
                );
            }
            self.taken(&address_path, &address, &listeners);
            self.one_authority_of_a_name(&path, tls.as_ref(), &listeners);
            let listener = Listener {
                name,
                address,
                tls,
                identify,
                lend_login_identity: row.lend_login_identity.unwrap_or(false),
                // etcd does not check `:authority` either.
                accept_odd_authority: row.accept_odd_authority.unwrap_or(true),
                connection_age_spares: spared_user_agents(row.connection_age_spares),
                on_expiry: match row.on_expiry {
                    None | Some(toml_file::TomlOnExpiry::Cut) => OnExpiry::Cut,
                    Some(toml_file::TomlOnExpiry::Keep) => OnExpiry::Keep,
                },
                proxy_protocol_from: proxies,
                http: ListenerHttp {
                    is_served: row.rest.unwrap_or(true),
                    metrics_page: row.metrics_page.unwrap_or(false),
                    hosts,
                },
                member,
                server_names,
            };
            if let Some(user) = default_user {
                self.warn_of_open_default(&path, &listener, &user);
                defaults.push((Arc::clone(&listener.name), user));
            }
            listeners.push(Arc::new(listener));
        }
        listeners
    }

    fn listener_name(&mut self, path: &str, name: Option<String>) -> Option<Arc<str>> {
        let name = self.required(path, name, "a name is needed; logs and metrics show it")?;
        if !is_plain(&name) {
            self.findings.fault(path, "a listener's name is 1 to 64 of A-Z a-z 0-9 - _ .");
        }
        Some(name.into())
    }

    fn proxies(
        &mut self,
        path: &str,
        networks: Option<Vec<String>>,
        address: Option<&Address>,
    ) -> Vec<AddressRange> {
        let Some(networks) = networks else { return Vec::new() };
        if networks.is_empty() {
            self.findings
                .fault(path, "names no network; leave it out where no balancer says who clients are");
        } else if matches!(address, Some(Address::Unix(_))) {
            self.findings.fault(path, "who connects to a unix socket has no address to be trusted by");
        }
        let network = |(index, text): (usize, &String)| {
            let network = self.checked(&format!("{path}[{index}]"), text.parse::<AddressRange>())?;
            if network.is_everybody() {
                let reason =
                    format!("{network} lets whoever reaches the listener name an address of its choice");
                self.findings.warn(&format!("{path}[{index}]"), reason);
            }
            Some(network)
        };
        networks.iter().enumerate().filter_map(network).collect()
    }

    /// The etcd user with the given name, if a row can prove the user.
    pub(super) fn user_named(&mut self, path: &str, name: &str, rows: &UserRows) -> Option<UserName> {
        let user = UserName::from(name);
        // A faulty row has a separate fault.
        let told = rows.faulty.contains(name) || rows.faulty.contains(OTHERS);
        if !rows.users.has_credential_for(&user) && !told {
            self.findings.fault(path, format!("there is no [[user]] with the name {name:?}"));
            return None;
        }
        Some(user)
    }

    fn warn_of_open_default(&mut self, path: &str, listener: &Listener, user: &UserName) {
        let guarded = matches!(listener.tls, Some(ServerTls { clients: ClientAuth::Required(_), .. }));
        let Address::Tcp(address) = &listener.address else { return };
        if !guarded && !address.ip().is_loopback() {
            let reason = format!("whoever reaches {address} acts as {user:?} without showing a credential");
            self.findings.warn(&format!("{path}.default_user"), reason);
        }
    }

    fn server_tls(
        &mut self,
        path: &str,
        tls: toml_file::TomlListenerTls,
        listener: Option<&Arc<str>>,
    ) -> Option<ServerTls> {
        let identity = self.key_pair(path, tls.cert, tls.key);
        let ca_path = format!("{path}.client_ca");
        let name = self.ca_name(&format!("{ca_path}_name"), tls.client_ca_name, &tls.client_ca, listener);
        let roots = tls.client_ca.as_ref().map(|name| self.roots(&ca_path, name));
        let crls = self.crls(&format!("{path}.client_crl"), tls.client_crl, roots.as_ref());
        let strictness =
            self.strictness(&format!("{path}.strict_certificates"), tls.strict_certificates, roots.is_some());
        let roots = roots.map(|roots| Some(ClientCa { name: name?, roots: roots?, crls, strictness }));
        // A CA without `client_auth` means "required", as etcd's `--trusted-ca-file` does.
        let unsaid = if roots.is_some() {
            toml_file::TomlClientAuth::Required
        } else {
            toml_file::TomlClientAuth::None
        };
        let clients = match (tls.client_auth.unwrap_or(unsaid), roots) {
            (toml_file::TomlClientAuth::None, None) => Some(ClientAuth::None),
            (toml_file::TomlClientAuth::None, Some(_)) => {
                self.findings.warn(&ca_path, "has no effect, since client_auth is \"none\"");
                Some(ClientAuth::None)
            }
            (toml_file::TomlClientAuth::Optional, Some(roots)) => roots.map(ClientAuth::Optional),
            (toml_file::TomlClientAuth::Required, Some(roots)) => roots.map(ClientAuth::Required),
            (toml_file::TomlClientAuth::Optional | toml_file::TomlClientAuth::Required, None) => {
                self.findings
                    .missing(&ca_path, "client_auth needs the CA that client certificates must verify under");
                None
            }
        };
        Some(ServerTls { identity: identity?, clients: clients? })
    }

    /// Requires a single authority per label: two authorities with the same label would merge different
    /// peers, and so would an authority with a revocation list at some of its listeners only
    /// (docs/decisions.md#d09).
    fn one_authority_of_a_name(&mut self, path: &str, tls: Option<&ServerTls>, earlier: &[Arc<Listener>]) {
        let Some(ca) = tls.and_then(|tls| tls.clients.ca()) else { return };
        let other = earlier.iter().find(|earlier| {
            let theirs = earlier.tls.as_ref().and_then(|tls| tls.clients.ca());
            theirs.is_some_and(|theirs| theirs.name == ca.name && theirs != ca)
        });
        if let Some(other) = other {
            let reason = format!(
                "peers would be called {:?} here and at listener {:?}, whose client_ca, client_crl or \
                 strict_certificates is another",
                &*ca.name, &*other.name
            );
            self.findings.fault(&format!("{path}.tls.client_ca_name"), reason);
        }
    }

    fn ca_name(
        &mut self,
        path: &str,
        name: Option<String>,
        ca: &Option<String>,
        listener: Option<&Arc<str>>,
    ) -> Option<Arc<str>> {
        match name {
            None => listener.cloned(),
            Some(_) if ca.is_none() => {
                self.findings.fault(path, "names the client_ca, which is missing");
                None
            }
            Some(name) if is_plain(&name) => Some(name.into()),
            Some(_) => {
                self.findings.fault(path, "an authority's name is 1 to 64 of A-Z a-z 0-9 - _ .");
                None
            }
        }
    }

    /// Resolves the revocation lists. `roots` is `Some(None)` for unusable roots, already reported as a
    /// fault.
    fn crls(&mut self, path: &str, name: Option<String>, roots: Option<&Option<Roots>>) -> Option<Crls> {
        let name = name?;
        match roots {
            None => {
                self.findings.fault(path, "says what the client_ca has revoked, which is missing");
                None
            }
            Some(roots) => {
                let (file, roots) = (self.file(path, &name), roots.as_ref()?);
                let crls = self.checked(path, Crls::read(&file, roots))?;
                let coverage = RevocationCoverage::of(roots.certificates(), crls.lists());
                for authority in coverage.uncovered {
                    let reason =
                        format!("has no list of {authority:?}: no certificate under it would be accepted");
                    self.findings.fault(path, reason);
                }
                for issuer in coverage.foreign {
                    self.findings.warn(path, format!("has a list of {issuer:?}, which is not in client_ca"));
                }
                Some(crls)
            }
        }
    }

    fn identify(
        &mut self,
        path: &str,
        ways: Option<Vec<toml_file::TomlIdentify>>,
        tls: Option<&ServerTls>,
        lead: IdentifyAvailability,
    ) -> Vec<Identify> {
        let certificates = tls.is_some_and(|tls| tls.clients.ca().is_some());
        let Some(ways) = ways else {
            let counts = |way: &Identify| match way {
                Identify::Token | Identify::Default => true,
                Identify::Jwt => lead.jwts,
                Identify::Certificate => certificates && lead.mapped,
            };
            let all = [Identify::Token, Identify::Jwt, Identify::Certificate, Identify::Default];
            return all.into_iter().filter(counts).collect();
        };
        let mut identify = Vec::new();
        for (index, way) in ways.iter().enumerate() {
            let way = match way {
                toml_file::TomlIdentify::Token => Identify::Token,
                toml_file::TomlIdentify::Jwt => Identify::Jwt,
                toml_file::TomlIdentify::Certificate => Identify::Certificate,
                toml_file::TomlIdentify::Default => Identify::Default,
            };
            let path = format!("{path}[{index}]");
            if identify.contains(&way) {
                self.findings.fault(&path, "stands there twice");
            } else if identify.last() == Some(&Identify::Default) {
                self.findings.fault(&path, "is never looked at: \"default\" before it takes everybody");
            } else if way == Identify::Certificate && !certificates {
                self.findings.fault(&path, "needs tls.client_ca, so that certificates are asked for");
            } else if way == Identify::Jwt && !lead.jwts {
                self.findings.fault(&path, "needs a [[jwt]]");
            }
            identify.push(way);
        }
        if identify.is_empty() {
            self.findings.fault(path, "names no way; leave it out for all of them");
        }
        identify
    }

    pub(super) fn admin(
        &mut self,
        admin: toml_file::TomlAdmin,
        listeners: &[Arc<Listener>],
    ) -> Option<Admin> {
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
        let is_full = matches!(admin.page, Some(toml_file::TomlPageContent::Full));
        if is_full && !address.ip().is_loopback() {
            let reason = format!("shows users, addresses and keys to everybody who reaches {address}");
            self.findings.warn("admin.page", reason);
        }
        let replicas = self.other_replicas(admin.replicas.unwrap_or_default());
        Some(Admin {
            address,
            socket: self.admin_socket(admin.socket.as_deref(), listeners),
            page: PageSettings {
                content: admin.page.map_or_else(PageContent::default, |content| match content {
                    toml_file::TomlPageContent::Off => PageContent::Off,
                    toml_file::TomlPageContent::Anonymous => PageContent::Anonymous,
                    toml_file::TomlPageContent::Full => PageContent::Full,
                }),
                hosts: self.admin_hosts(admin.hosts.unwrap_or_default(), &replicas),
            },
            replicas,
            user_metrics: self.count("admin.user_metrics", admin.user_metrics, 0, 0..=1000),
        })
    }

    /// The names of the admin address: those of `admin.hosts`, and the hosts of `admin.replicas`.
    fn admin_hosts(&mut self, names: Vec<String>, replicas: &[String]) -> OwnHosts {
        let own = self.own_hosts("admin.hosts", names);
        let replicas = replicas.iter().filter_map(|replica| replica.parse::<Authority>().ok());
        own.with(replicas.map(|replica| replica.host().to_ascii_lowercase()))
    }

    /// Checks names as in the Host header, without a port.
    fn own_hosts(&mut self, path: &str, names: Vec<String>) -> OwnHosts {
        let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
        for (index, name) in names.iter().enumerate() {
            if name.is_empty() || !name.bytes().all(is_allowed) {
                let reason = "is no host name: a name without scheme and port is needed";
                self.findings.fault(&format!("{path}[{index}]"), reason);
            }
        }
        OwnHosts::Listed(names.into_iter().map(|name| name.to_ascii_lowercase()).collect())
    }

    /// Checks `admin.replicas`: a host and a port each.
    fn other_replicas(&mut self, names: Vec<String>) -> Arc<[String]> {
        if names.len() > MOST_REPLICAS {
            self.findings.fault("admin.replicas", format!("has more than {MOST_REPLICAS} addresses"));
        }
        for (index, name) in names.iter().enumerate() {
            let authority = name.parse::<Authority>();
            let is_address = authority.is_ok_and(|found| found.port_u16().is_some() && !name.contains('@'));
            if !is_address {
                let reason = "is no address of a replica: HOST:PORT is needed, without a scheme";
                self.findings.fault(&format!("admin.replicas[{index}]"), reason);
            }
        }
        names.into()
    }

    fn admin_socket(&mut self, written: Option<&str>, listeners: &[Arc<Listener>]) -> AdminSocketSetting {
        let key = "admin.socket";
        match written {
            Some("") => AdminSocketSetting::Off,
            Some(name) => {
                let socket = self.written_path(key, name);
                self.taken(key, &Address::Unix(socket.clone()), listeners);
                if socket.as_os_str().len() > LONGEST_SOCKET {
                    self.findings.fault(key, format!("is longer than {LONGEST_SOCKET} bytes"));
                }
                AdminSocketSetting::Path(socket)
            }
            None => {
                self.taken(key, &Address::Unix(DEFAULT_ADMIN_SOCKET.into()), listeners);
                AdminSocketSetting::Default
            }
        }
    }

    fn taken(&mut self, path: &str, address: &Address, earlier: &[Arc<Listener>]) {
        if let Some(other) = earlier.iter().find(|other| collide(&other.address, address)) {
            let reason = format!("{address} is taken by listener {:?} ({})", &*other.name, other.address);
            self.findings.fault(path, reason);
        }
    }
}

/// True for a name allowed in logs, metrics and peer names.
/// Erlang's gun, below eetcd, sends no user agent, and every library of gRPC sends one.
fn spared_user_agents(texts: Option<Vec<String>>) -> Vec<Glob> {
    texts.map_or_else(
        || vec![Glob::new(NO_USER_AGENT)],
        |texts| texts.iter().map(|text| Glob::new(text)).collect(),
    )
}

fn is_plain(name: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    (1..=64).contains(&name.len()) && name.bytes().all(plain)
}

/// True if both addresses cannot be bound at once: the same address, or the same port of an address and of
/// the wildcard address.
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
