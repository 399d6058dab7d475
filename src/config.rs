//! What one `keyward.toml` means: a value that is valid as a whole, cheap to clone and to share.
//!
//! Owns: the resolved types. Below: `file` mirrors the TOML, `shape` tells every fault of its shape, `resolve` gives it
//! its meaning, with `values` and `secrets` for its single values; `findings` collects what is wrong. Must not know: tasks, sockets, TLS engines.
//! Invariants: no `Option` means "default"; every file named in the configuration has been read and checked; all
//! faults are told at once, with key paths; nothing here prints a secret.

mod admin_socket;
mod certificates;
mod client_connections;
mod client_tls;
mod file;
mod findings;
mod mapping;
mod outage;
#[cfg(test)]
mod reference;
mod resolve;
mod secrets;
mod shape;
mod unread;
pub mod users;
mod values;

use std::collections::BTreeMap;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crate::identity::named::NamedMember;
use crate::identity::pattern::{Glob, Network};
use crate::identity::{ClusterId, UserName};
use crate::jwt::Issuers;
use crate::pem::{Crls, KeyPair, Roots};
use crate::secret::Secret;
use crate::telemetry;
use crate::users::Users;

pub use admin_socket::admin_socket;
pub use client_connections::{ClientConnections, ClientPings};
pub use client_tls::{ClientTls, MemberTrust};
pub use findings::{Fault, Faults, Warning};
pub use mapping::{Conditions, MapRule, Mapping, NotSpelledOut, Outcome, ROOT};
pub use outage::OutageTimes;
pub use resolve::load;
pub use secrets::write_session_key;
pub use unread::Unread;
pub use values::Malformed;

/// The whole configuration.
#[derive(Clone, Debug)]
pub struct Config {
    /// Where clients connect. At least one; names and addresses are unique.
    pub listeners: Vec<Arc<Listener>>,
    /// The etcd cluster behind us.
    pub cluster: Arc<Cluster>,
    /// What MemberList answers call us.
    pub advertise: Arc<Advertise>,
    /// As whom calls may go upstream without the client's own password.
    pub users: Arc<users::Users>,
    /// How sessions are sealed.
    pub session: Arc<Session>,
    /// Who checks passwords.
    pub passwords: Arc<Passwords>,
    /// Whose JWTs are taken.
    pub issuers: Arc<Issuers>,
    /// Who is which etcd user.
    pub mapping: Arc<Mapping>,
    /// Where revocations are kept.
    pub revocation: Arc<Revocation>,
    /// How members are worked on.
    pub maintenance: Maintenance,
    /// How watches are kept alive.
    pub watch: Watch,
    /// Bounds on what clients may use.
    pub limits: Limits,
    /// The address of `/livez`, `/readyz` and `/metrics`.
    pub admin: Admin,
    /// What is logged, and how.
    pub log: telemetry::Settings,
    /// How long an ending takes.
    pub drain: Drain,
    /// Threads.
    pub runtime: Runtime,
    /// Every file that was read beside the configuration itself.
    pub files: Arc<[PathBuf]>,
}

/// One address on which clients connect.
#[derive(Clone, Debug)]
pub struct Listener {
    /// Its name in logs, metrics and peers.
    pub name: Arc<str>,
    /// Where it listens.
    pub address: Address,
    /// TLS, where it is on.
    pub tls: Option<ServerTls>,
    /// What clients may show, in the order in which it is looked at. Never empty, nothing twice, the default last.
    pub identify: Vec<Identify>,
    /// Whether a login serves calls about leases and members that show nothing, on its connection.
    pub lend_login_identity: bool,
    /// Whether clients are served whose `:authority` is none.
    pub accept_odd_authority: bool,
    /// What happens to whom when its certificate or JWT expires.
    pub on_expiry: OnExpiry,
    /// Balancers that say who their clients are, by a PROXY protocol header: from there nobody else connects. Empty on a unix
    /// socket.
    pub proxy_protocol_from: Vec<Network>,
    /// The member that its connections are about, where it is one member's.
    pub member: Option<NamedMember>,
    /// The members that its connections are about which name one of these hosts in TLS, in lower case.
    pub server_names: BTreeMap<String, NamedMember>,
}

impl Listener {
    /// Who vouches for its clients, where they are asked for a certificate.
    #[must_use]
    pub fn client_ca(&self) -> Option<&ClientCa> {
        self.tls.as_ref()?.clients.ca()
    }

    /// The member that a connection is about which names this host in TLS, if any.
    #[must_use]
    pub fn member_of(&self, server_name: Option<&str>) -> Option<&NamedMember> {
        let named = || self.server_names.get(&server_name?.to_ascii_lowercase());
        self.member.as_ref().or_else(named)
    }
}

/// A way to say who one is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Identify {
    /// A session token, from a login.
    Token,
    /// A signed JWT.
    Jwt,
    /// A client certificate.
    Certificate,
    /// Nothing: whoever reaches the listener.
    Default,
}

/// What happens when a proof of identity expires under a connection or stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnExpiry {
    /// It ends.
    Cut,
    /// It goes on until it ends by itself.
    Keep,
}

/// Where a socket listens.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Address {
    /// An IP address and port; port 0 lets the system choose.
    Tcp(SocketAddr),
    /// A unix socket of this absolute path.
    Unix(PathBuf),
}

/// TLS towards clients.
#[derive(Clone, Debug)]
pub struct ServerTls {
    /// What we show.
    pub identity: KeyPair,
    /// What clients show.
    pub clients: ClientAuth,
}

/// Whether clients show a certificate.
#[derive(Clone, Debug)]
pub enum ClientAuth {
    /// They are not asked.
    None,
    /// They are asked; one that is shown must verify under this.
    Optional(ClientCa),
    /// They must show one that verifies under this.
    Required(ClientCa),
}

/// Who vouches for clients.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientCa {
    /// What its peers are called by.
    pub name: Arc<str>,
    /// Its certificates.
    pub roots: Roots,
    /// What it has revoked, where that is looked at.
    pub crls: Option<Crls>,
}

/// An etcd user with the password that proves it.
#[derive(Clone, Debug)]
pub struct Login {
    /// The etcd user.
    pub user: UserName,
    /// Its password.
    pub password: Arc<Secret<String>>,
}

/// The etcd cluster behind us.
#[derive(Clone, Debug)]
pub struct Cluster {
    /// Where members are found first. No two the same, all of one scheme; none where `discovery.srv` says it.
    pub endpoints: Vec<Endpoint>,
    /// TLS towards members: there exactly where the endpoints are https.
    pub tls: Option<ClientTls>,
    /// How long a TCP and TLS handshake with a member may take.
    pub connect_timeout: Duration,
    /// After how long without a call a connection to a member is closed.
    pub idle_timeout: Duration,
    /// etcd's `--auth-token-ttl`.
    pub token_ttl: Duration,
    /// Which cluster it must be.
    pub pin: ClusterPin,
    /// Who reads, of the calls that any member can serve.
    pub reads: Serves,
    /// Who takes writes.
    pub writes: Serves,
    /// Names of members, or hosts of their addresses, that serve reads before others.
    pub near: Vec<String>,
    /// After what time a second member is asked for a linearizable read that the first has not answered, if at all.
    pub hedge_after: Option<Duration>,
    /// How long streams wait while no member serves.
    pub outage: OutageTimes,
    /// As whom members are probed; nobody where auth is off.
    pub probe: Option<Login>,
    /// How members are found beside the endpoints.
    pub discovery: Discovery,
}

impl Cluster {
    /// How members are spoken to: never otherwise, wherever one was found.
    #[must_use]
    pub fn scheme(&self) -> Scheme {
        match (&self.discovery.srv, self.endpoints.first()) {
            (Some(srv), _) => srv.scheme,
            (None, Some(endpoint)) => endpoint.scheme,
            (None, None) => Scheme::Http,
        }
    }
}

/// How members are found beside the endpoints.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Discovery {
    /// DNS says what the endpoints are.
    pub srv: Option<Srv>,
    /// Name servers in place of those of the machine, and of its hosts file; none: the machine's.
    pub dns: Vec<SocketAddr>,
    /// Of which form the host of an address must be that DNS or the member list told; any where this is empty.
    pub allowed_hosts: Vec<Glob>,
}

impl Discovery {
    /// Whether an address may be used that was not configured but found.
    #[must_use]
    pub fn allows(&self, host: &str) -> bool {
        let host = host.to_ascii_lowercase();
        self.allowed_hosts.is_empty() || self.allowed_hosts.iter().any(|form| form.matches(&host))
    }
}

/// Where DNS says what the endpoints are, as etcd's own clients look it up (`--discovery-srv`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Srv {
    /// Of which domain.
    pub domain: String,
    /// Of several clusters in it, which (`--discovery-srv-name`).
    pub name: Option<String>,
    /// How the endpoints are spoken to; each has records of its own.
    pub scheme: Scheme,
}

impl Srv {
    /// The name whose SRV records say it.
    #[must_use]
    pub fn record(&self) -> String {
        let service = match self.scheme {
            Scheme::Http => "etcd-client",
            Scheme::Https => "etcd-client-ssl",
        };
        match &self.name {
            Some(name) => format!("_{service}-{name}._tcp.{}.", self.domain),
            None => format!("_{service}._tcp.{}.", self.domain),
        }
    }
}

/// Who serves a kind of call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Serves {
    /// Any ready voter.
    Any,
    /// The leader, where it is ready; else any.
    Leader,
}

/// Which cluster the endpoints must belong to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClusterPin {
    /// This one.
    Id(ClusterId),
    /// That of the member which answers first.
    FirstAnswer,
    /// That of the member which answers first, until all of them have become another.
    Follow,
}

/// How a member is spoken to.
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

/// What member answers call us: to each client what leads it back by the way that it came.
#[derive(Clone, Debug)]
pub struct Advertise {
    /// One per listener, in their order.
    pub(crate) rows: Vec<Advertised>,
}

/// The same for the clients of one listener.
#[derive(Clone, Debug)]
pub struct Advertised {
    /// The listener's name.
    pub listener: Arc<str>,
    /// The client URLs of every member, as clients are told them.
    pub client_urls: Vec<String>,
    /// Those of single members instead.
    pub members: Vec<(NamedMember, Vec<String>)>,
}

impl Advertise {
    /// What clients of this listener are told; where there is no such listener any more, those of the first. None where there is no
    /// listener at all.
    #[must_use]
    pub fn to_clients_of(&self, listener: &str) -> Option<&Advertised> {
        self.rows.iter().find(|row| *row.listener == *listener).or(self.rows.first())
    }
}

/// How sessions are sealed.
#[derive(Clone, Debug)]
pub struct Session {
    /// The first seals, all open. At least one.
    pub keys: Vec<SessionKey>,
    /// Where they come from. A reload must keep a random key: the one that was just made opens no session.
    pub key_source: KeySource,
    /// Replicas of one realm accept each other's sessions.
    pub realm: Realm,
    /// Sessions issued before this second of the Unix epoch are refused.
    pub not_before: u64,
}

/// Where revocations are kept, and for how long an old copy is good.
#[derive(Clone, Debug)]
pub struct Revocation {
    /// Where.
    pub keep: Keep,
    /// Past this age of what was read, no session is admitted. Matters where others can change it.
    pub max_age: Duration,
}

/// Where revocations are kept.
#[derive(Clone, Debug)]
pub enum Keep {
    /// Nowhere: a restart forgets them.
    Memory,
    /// In a file of this one replica.
    File(PathBuf),
    /// In etcd, for all replicas.
    Etcd {
        /// Ends with a slash.
        prefix: Arc<str>,
        /// As whom; nobody where auth is off.
        login: Option<Login>,
    },
}

/// Who checks passwords, and how often a wrong one may come.
#[derive(Clone, Debug)]
pub struct Passwords {
    /// Who is asked, in which order.
    pub sources: PasswordSources,
    /// The users file; empty where none is a source.
    pub users: Arc<Users>,
    /// When a further password is not checked.
    pub failed: FailedLogins,
}

/// Who is asked whether a password is right. The first that knows the user is final.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PasswordSources {
    /// etcd only.
    Etcd,
    /// The users file only.
    File,
    /// The file about its own users, etcd about all others.
    FileThenEtcd,
    /// etcd; the file about users of whom etcd says that they have no password, and where auth is off.
    EtcdThenFile,
}

impl fmt::Display for PasswordSources {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Etcd => "etcd",
            Self::File => "file",
            Self::FileThenEtcd => "file, etcd",
            Self::EtcdThenFile => "etcd, file",
        })
    }
}

/// After how many wrong passwords a further one waits; 0 is never.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FailedLogins {
    /// Of one user from one address.
    pub per_user_and_address: u32,
    /// Of one user, from wherever.
    pub per_user: u32,
    /// From one address, of whomever.
    pub per_address: u32,
    /// The longest wait.
    pub longest_wait: Duration,
}

/// Where session keys come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeySource {
    /// From `session.key_files`: the same after a restart and on other replicas.
    Files,
    /// Made up when the configuration was read, and another one each time.
    Random,
}

/// 32 bytes that seal sessions.
pub type SessionKey = Arc<Secret<[u8; 32]>>;

/// For whom a session is sealed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Realm {
    /// A name that the operator chose.
    Named(Arc<str>),
    /// The id of the cluster behind us.
    ClusterId,
}

/// How members are worked on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Maintenance {
    /// Below it replicas tell each other what is done to members; none where they do not. Ends with a slash.
    pub etcd_prefix: Option<Arc<str>>,
}

/// How watches are kept alive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Watch {
    /// Where idle watches are asked for their progress: after this time at the earliest, after twice as long at the
    /// latest.
    pub idle_progress: Option<Duration>,
    /// Bytes that watch streams may hold, over all shards.
    pub buffer: usize,
}

/// Bounds on what clients may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Open client connections, over all listeners.
    pub connections: usize,
    /// Those of one client, and those that are of no use.
    pub client_connections: ClientConnections,
    /// Open streams (calls) per client connection.
    pub streams_per_connection: u32,
    /// Bytes of a request's header list.
    pub header_size: u32,
    /// Bytes of a request message.
    pub request_size: usize,
    /// How long a client may take for its TLS and HTTP/2 handshake.
    pub handshake_timeout: Duration,
    /// Bytes that requests hold, over all calls: header lists, messages that are kept, streams; past it a call is refused.
    pub replay_buffer: usize,
    /// Connections to members that show a user's own certificate, over all shards.
    pub certificate_connections: usize,
    /// After how long, about, a client connection is told to go, if at all: what is open on it goes on.
    pub connection_age: Option<Duration>,
    /// Calls that one member has to answer at a time, over all shards; streams are none.
    pub member_in_flight: usize,
    /// Answers that their clients do not read.
    pub unread: Unread,
    /// `Authenticate` calls in flight per member.
    pub logins_in_flight_per_member: usize,
}

/// The operator's own listener.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Admin {
    /// Where it listens.
    pub address: SocketAddr,
    /// The unix socket for commands that change something, if there is one.
    pub socket: Option<PathBuf>,
}

/// How long an ending takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Drain {
    /// Between "not ready" and the first GOAWAY, for load balancers to notice.
    pub wait: Duration,
    /// Between the first GOAWAY and the end of the process, at most.
    pub timeout: Duration,
}

/// Threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Runtime {
    /// Threads that serve clients.
    pub shards: NonZeroUsize,
}

impl Listener {
    /// Whether who connects from there is a balancer, which says who the client is.
    #[must_use]
    pub fn believes(&self, address: IpAddr) -> bool {
        self.proxy_protocol_from.iter().any(|network| network.contains(address))
    }
}

impl ClientAuth {
    /// Who vouches for the certificates that are shown, if any are.
    #[must_use]
    pub fn ca(&self) -> Option<&ClientCa> {
        match self {
            Self::None => None,
            Self::Optional(ca) | Self::Required(ca) => Some(ca),
        }
    }
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

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => address.fmt(f),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}
