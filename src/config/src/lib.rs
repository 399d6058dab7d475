//! The meaning of one `keyward.toml`: a value valid as a whole, cheap to clone and to share.
//!
//! Owns: the resolved types. Below: `sources` merges the files, the environment and the flags, `toml_file`
//! mirrors the TOML, `toml_parse` reports faults of types, `resolve` gives the mirror its meaning, with
//! `values` and `secrets` for single values; `findings` collects faults and warnings. Must not know: tasks,
//! sockets, TLS engines. Invariants: no `Option` means "default"; every file named in the configuration has
//! been read and checked; all faults are reported at once, with key paths; no secret is printed.

mod address;
mod admin_page;
mod admin_socket;
pub mod audit_settings;
pub mod authority;
mod certificate_checks;
pub mod certificate_expiry;
mod client_connections;
mod client_tls;
pub mod collector_settings;
mod endpoint;
mod environment;
mod findings;
pub mod jwt;
mod known_keys;
pub mod lost_intermediates;
mod mapping_rules;
pub mod memory_budgets;
mod outage_times;
mod own_hosts;
pub mod policy_document;
mod policy_settings;
mod protection_settings;
#[cfg(test)]
mod reference;
pub mod reload_request;
mod resolve;
mod rest_settings;
mod secrets;
mod server_tls;
mod setting_place;
mod source_text;
mod sources;
#[cfg(any(test, feature = "testing"))]
pub mod test_reference;
mod toml_file;
mod toml_limits;
mod toml_parse;
mod toml_policy;
mod toml_rest;
mod toml_trace;
pub mod trace_settings;
pub mod trust;
mod unread_limits;
pub mod upstream_users;
pub mod usage_limits;
pub mod users;
mod values;

use std::collections::BTreeMap;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crate::users::UserPasswordHashes;
use keyward_base::secret::Secret;
use keyward_etcd::identity::named_member::NamedMember;
use keyward_etcd::identity::pattern::{AddressRange, Glob};
use keyward_etcd::identity::{ClusterId, UserName};

pub use address::Address;
pub use admin_page::{PageContent, PageSettings};
pub use admin_socket::{AdminSocketSetting, DEFAULT_ADMIN_SOCKET, admin_socket};
pub use client_connections::{ClientConnections, ClientPings};
pub use client_tls::{ClientTls, MemberTrust};
pub use endpoint::{Endpoint, Scheme};
pub use findings::{ConfigFault, ConfigFaults, ConfigWarning};
pub use mapping_rules::{Conditions, MapRule, MappingOutcome, MappingRules, ROOT, RootNeedsExactPeer};
pub use outage_times::OutageTimes;
pub use own_hosts::OwnHosts;
pub use policy_settings::{PolicyInEtcd, PolicyMode, PolicySettings, RequireIdentity, UnknownMethods};
pub use protection_settings::ProtectionSettings;
pub use resolve::{peer_pattern, policy, read_policy};
pub use rest_settings::{AllowedOrigins, JsonGateway, ListenerHttp, RestSettings};
pub use secrets::write_session_key;
pub use server_tls::{ClientAuth, ClientCa, ServerTls};
pub use setting_place::{KeyPlace, SettingSource};
pub use sources::{ConfigSources, FlagSetting, load};
pub use unread_limits::UnreadLimits;
pub use values::{MalformedValue, duration};

/// The whole configuration.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// Client listeners. At least one; names and addresses are unique.
    pub listeners: Vec<Arc<Listener>>,
    /// The etcd cluster.
    pub cluster: Arc<Cluster>,
    /// Client URLs in MemberList answers.
    pub advertise: Arc<AdvertisedUrls>,
    /// Upstream credentials of etcd users without the client's own password.
    pub users: Arc<upstream_users::UpstreamUsers>,
    /// Sealing of sessions.
    pub session: Arc<SessionSettings>,
    /// Checking of passwords.
    pub passwords: Arc<Passwords>,
    /// Accepted JWT issuers.
    pub issuers: Arc<jwt::Issuers>,
    /// Mapping of peers to etcd users.
    pub mapping: Arc<MappingRules>,
    /// The policy.
    pub policy: Arc<PolicySettings>,
    /// Shedding for the whole cluster.
    pub protection: ProtectionSettings,
    /// The HTTP/JSON face.
    pub rest: Arc<RestSettings>,
    /// Persistence of revocations.
    pub revocation: Arc<Revocation>,
    /// Coordination of member maintenance.
    pub maintenance: Maintenance,
    /// Settings of watches.
    pub watch: WatchSettings,
    /// Limits on the resources of clients.
    pub limits: Limits,
    /// The admin address and socket.
    pub admin: Admin,
    /// The audit log; `None` if off.
    pub audit: Option<Arc<audit_settings::AuditSettings>>,
    /// The collector of spans and log records; `None` without one.
    pub trace: Option<Arc<trace_settings::TraceSettings>>,
    /// `[trace]`: the calls with a trace.
    pub trace_sampling: keyward_telemetry::trace_sampling::TraceSampling,
    /// Settings of the log.
    pub log: keyward_telemetry::LogSettings,
    /// `[log]`: the calls with an access record.
    pub access_log: keyward_telemetry::access_settings::AccessLogSettings,
    /// Times of the drain.
    pub drain: Drain,
    /// Threads.
    pub runtime: Runtime,
    /// The limit of the operating system on the process's memory, in bytes, when the configuration was read.
    pub memory_limit: Option<u64>,
    /// Every file read beside the configuration itself.
    pub files: Arc<[PathBuf]>,
    /// The first 16 hexadecimal digits of the SHA-256 of the configuration's text, so that operators can tell
    /// the configurations of replicas apart. The text holds no secret: secrets are in files of their own.
    pub digest: Arc<str>,
}

impl Config {
    /// The key prefixes of Keyward's own data in etcd.
    pub fn own_prefixes(&self) -> impl Iterator<Item = &str> {
        let revoked = match &self.revocation.keep {
            RevocationPersistence::Etcd { prefix, .. } => Some(&**prefix),
            RevocationPersistence::Memory | RevocationPersistence::File(_) => None,
        };
        let stored = self.policy.stored.as_ref().map(|stored| &*stored.prefix);
        revoked.into_iter().chain(stored).chain(self.maintenance.etcd_prefix.as_deref())
    }
}

/// One address for clients.
#[derive(Clone, Debug, PartialEq)]
pub struct Listener {
    /// Name in logs, metrics and peers.
    pub name: Arc<str>,
    /// Listening address.
    pub address: Address,
    /// TLS, if enabled.
    pub tls: Option<ServerTls>,
    /// Accepted ways of identification, in order of evaluation: never empty, each once, `Default` last.
    pub identify: Vec<Identify>,
    /// True if a login identifies later lease and member calls without a credential on the same connection.
    pub lend_login_identity: bool,
    /// True if clients with an invalid `:authority` are served.
    pub accept_odd_authority: bool,
    /// The user agents of gRPC clients whose connections `limits.connection_age` spares: they cannot take a
    /// GOAWAY. [`NO_USER_AGENT`] stands for a client without a user agent.
    pub connection_age_spares: Vec<Glob>,
    /// Treatment of connections and streams at the expiry of their certificate or JWT.
    pub on_expiry: OnExpiry,
    /// Networks of load balancers sending a PROXY protocol header with the client's address; connections from
    /// these networks without the header are refused. Empty on a unix socket.
    pub proxy_protocol_from: Vec<AddressRange>,
    /// The HTTP/JSON face.
    pub http: ListenerHttp,
    /// The member addressed by this listener's connections, if any.
    pub member: Option<NamedMember>,
    /// The members addressed by TLS server name, in lower case.
    pub server_names: BTreeMap<String, NamedMember>,
}

impl Listener {
    /// The authority of client certificates, if clients are asked for a certificate.
    #[must_use]
    pub fn client_ca(&self) -> Option<&ClientCa> {
        self.tls.as_ref()?.clients.ca()
    }

    /// True if a gRPC client with this user agent (`None` for a client without one) keeps its connection over
    /// `limits.connection_age`.
    #[must_use]
    pub fn spares_age_of(&self, user_agent: Option<&str>) -> bool {
        let user_agent = user_agent.unwrap_or(NO_USER_AGENT);
        self.connection_age_spares.iter().any(|spared| spared.matches(user_agent))
    }

    /// The member addressed by a connection with this TLS server name, if any.
    #[must_use]
    pub fn member_of(&self, server_name: Option<&str>) -> Option<&NamedMember> {
        let named = || self.server_names.get(&server_name?.to_ascii_lowercase());
        self.member.as_ref().or_else(named)
    }
}

/// A way of client identification.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Identify {
    /// A session token, from a login.
    Token,
    /// A signed JWT.
    Jwt,
    /// A client certificate.
    Certificate,
    /// No credential: every client reaching the listener is accepted.
    Default,
}

/// Treatment of a connection or stream after the expiry of its proof of identity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnExpiry {
    /// Ended at expiry.
    Cut,
    /// Kept until its regular end.
    Keep,
}

/// An etcd user and password.
#[derive(Clone, Debug, PartialEq)]
pub struct EtcdLogin {
    /// The etcd user.
    pub user: UserName,
    /// The user's password.
    pub password: Arc<Secret<String>>,
}

/// The etcd cluster.
#[derive(Clone, Debug, PartialEq)]
pub struct Cluster {
    /// Seed endpoints. Without duplicates, all of one scheme; empty if `discovery.srv` is set.
    pub endpoints: Vec<Endpoint>,
    /// TLS towards members: set if and only if the endpoints are https.
    pub tls: Option<ClientTls>,
    /// Time limit for the TCP and TLS handshake with a member.
    pub connect_timeout: Duration,
    /// A connection to a member without a call for so long is closed.
    pub idle_timeout: Duration,
    /// etcd's `--auth-token-ttl`.
    pub token_ttl: Duration,
    /// The required cluster id.
    pub pin: ClusterPin,
    /// Members serving reads, among calls open to any member.
    pub reads: MemberPreference,
    /// Members serving writes.
    pub writes: MemberPreference,
    /// Names of members, or hosts of their addresses, preferred for reads.
    pub near: Vec<String>,
    /// Delay before a linearizable read without an answer is hedged at a second member, if it is.
    pub hedge_after: Option<Duration>,
    /// Time limits of streams waiting for a member.
    pub outage: OutageTimes,
    /// The etcd user for probes; `None` with auth off.
    pub probe: Option<EtcdLogin>,
    /// Sources of member addresses beside the endpoints.
    pub discovery: Discovery,
}

impl Cluster {
    /// The only scheme for member connections, whatever the source of an address.
    #[must_use]
    pub fn scheme(&self) -> Scheme {
        match (&self.discovery.srv, self.endpoints.first()) {
            (Some(srv), _) => srv.scheme,
            (None, Some(endpoint)) => endpoint.scheme,
            (None, None) => Scheme::Http,
        }
    }
}

/// Sources of member addresses beside the endpoints.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Discovery {
    /// SRV records as the source of the endpoints.
    pub srv: Option<Srv>,
    /// Name servers replacing the machine's resolver and hosts file; the machine's resolver if empty.
    pub dns: Vec<SocketAddr>,
    /// Allowed host patterns for addresses from DNS or the member list; all hosts are allowed if empty.
    pub allowed_hosts: Vec<Glob>,
}

impl Discovery {
    /// True if a discovered address with this host may be used.
    #[must_use]
    pub fn allows(&self, host: &str) -> bool {
        let host = host.to_ascii_lowercase();
        self.allowed_hosts.is_empty() || self.allowed_hosts.iter().any(|form| form.matches(&host))
    }
}

/// SRV lookup of the endpoints, as in etcd's own clients (`--discovery-srv`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Srv {
    /// The domain.
    pub domain: String,
    /// The cluster within the domain (`--discovery-srv-name`).
    pub name: Option<String>,
    /// Scheme of the endpoints; each scheme has its own records.
    pub scheme: Scheme,
}

impl Srv {
    /// The SRV record's name.
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

/// Members serving a kind of call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemberPreference {
    /// Any ready voter.
    Any,
    /// The leader if ready, else any ready voter.
    Leader,
}

/// The required cluster of the endpoints.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClusterPin {
    /// The cluster with this id.
    Id(ClusterId),
    /// The cluster of the first answering member.
    FirstAnswer,
    /// The cluster of the first answering member, until all endpoints have become another cluster.
    Follow,
}

/// Client URLs in member answers: each client gets URLs for its own way of connecting.
#[derive(Clone, Debug, PartialEq)]
pub struct AdvertisedUrls {
    /// One row per listener, in the order of the listeners.
    pub(crate) rows: Vec<ListenerClientUrls>,
}

/// Client URLs for the clients of one listener.
#[derive(Clone, Debug, PartialEq)]
pub struct ListenerClientUrls {
    /// The listener's name.
    pub listener: Arc<str>,
    /// Client URLs shared by all members.
    pub client_urls: Vec<String>,
    /// Client URLs of single members, replacing the shared URLs.
    pub members: Vec<(NamedMember, Vec<String>)>,
}

impl AdvertisedUrls {
    /// The row of this listener; the first row if the listener no longer exists. `None` without any listener.
    #[must_use]
    pub fn to_clients_of(&self, listener: &str) -> Option<&ListenerClientUrls> {
        self.rows.iter().find(|row| *row.listener == *listener).or(self.rows.first())
    }
}

/// Sealing of sessions.
#[derive(Clone, Debug, PartialEq)]
pub struct SessionSettings {
    /// Session keys: the first key seals, all keys open. At least one.
    pub keys: Vec<SessionKey>,
    /// Source of the keys. A reload must keep a random key: a newly made key opens no existing session.
    pub key_source: KeySource,
    /// Replicas of one realm accept each other's sessions.
    pub realm: RealmSetting,
    /// Sessions issued before this second of the Unix epoch are refused.
    pub not_before: u64,
}

/// Persistence of revocations, and the maximum age of a copy.
#[derive(Clone, Debug, PartialEq)]
pub struct Revocation {
    /// Place of the revocations.
    pub keep: RevocationPersistence,
    /// Without a successful read for so long, no session is admitted. Relevant only for a place shared with
    /// further replicas.
    pub max_age: Duration,
}

/// Place of the revocations.
#[derive(Clone, Debug, PartialEq)]
pub enum RevocationPersistence {
    /// Memory only: lost at a restart.
    Memory,
    /// A file of this one replica.
    File(PathBuf),
    /// etcd, shared by all replicas.
    Etcd {
        /// Key prefix, ending with a slash.
        prefix: Arc<str>,
        /// The etcd user for reading and writing the prefix; `None` with auth off.
        login: Option<EtcdLogin>,
    },
}

/// Checking of passwords, and limits on failures.
#[derive(Clone, Debug, PartialEq)]
pub struct Passwords {
    /// Password sources, in order.
    pub sources: PasswordSources,
    /// The users file; empty if no file is a source.
    pub users: Arc<UserPasswordHashes>,
    /// Limits on failed logins.
    pub failed: FailedLogins,
}

/// Password sources, in order. The first source knowing the user decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PasswordSources {
    /// etcd only.
    Etcd,
    /// The users file only.
    File,
    /// The file for its own users, etcd for all further users.
    FileThenEtcd,
    /// etcd; the file for users without a password in etcd, and while auth is off.
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

/// Numbers of failed logins before a further login is delayed; 0 for no limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FailedLogins {
    /// Failures of one user from one address.
    pub per_user_and_address: u32,
    /// Failures of one user, from all addresses.
    pub per_user: u32,
    /// Failures from one address, for all users.
    pub per_address: u32,
    /// The longest delay.
    pub longest_wait: Duration,
}

/// Source of the session keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeySource {
    /// `session.key_files`: the same keys after a restart and on every replica.
    Files,
    /// A random key, made anew at every reading of the configuration.
    Random,
}

/// 32 bytes for sealing sessions.
pub type SessionKey = Arc<Secret<[u8; 32]>>;

/// Realm of sealed sessions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RealmSetting {
    /// A name chosen by the operator.
    Named(Arc<str>),
    /// The id of the etcd cluster.
    ClusterId,
}

/// Coordination of member maintenance.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Maintenance {
    /// Key prefix for coordinating maintenance between replicas, ending with a slash, if any.
    pub etcd_prefix: Option<Arc<str>>,
}

/// Settings of watches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WatchSettings {
    /// Shortest interval of progress requests for idle watches, half of the longest; `None` for no requests.
    pub idle_progress: Option<Duration>,
    /// Number of equal watches on a shard that share an upstream watch; `None` for never.
    pub share_from: Option<NonZeroUsize>,
    /// Bytes buffered by watch streams, over all shards.
    pub buffer: usize,
}

/// Limits on the resources of clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Open client connections, over all listeners.
    pub connections: usize,
    /// Connections per client address, and limits on idle and dead connections.
    pub client_connections: ClientConnections,
    /// Open streams (calls) per client connection.
    pub streams_per_connection: u32,
    /// Bytes of a request's header list.
    pub header_size: u32,
    /// Bytes of a request message.
    pub request_size: usize,
    /// Time limit for a client's TLS and HTTP/2 handshake.
    pub handshake_timeout: Duration,
    /// Bytes held by requests, over all calls: header lists, buffered messages, streams; above the limit a
    /// call is refused.
    pub replay_buffer: usize,
    /// Connections to members with a user's own certificate, over all shards.
    pub certificate_connections: usize,
    /// Approximate maximum age of a client connection before its GOAWAY, if any; open calls go on.
    pub connection_age: Option<Duration>,
    /// Unary calls in flight per member, over all shards; streams do not count.
    pub member_in_flight: usize,
    /// Limits on unread answers.
    pub unread: UnreadLimits,
    /// `Authenticate` calls in flight per member.
    pub logins_in_flight_per_member: usize,
}

/// The admin address and socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Admin {
    /// Admin address.
    pub address: SocketAddr,
    /// The unix socket for operator commands.
    pub socket: AdminSocketSetting,
    /// The status page.
    pub page: PageSettings,
    /// Admin addresses of the other replicas, `HOST:PORT`.
    pub replicas: Arc<[String]>,
    /// Number of etcd users with metrics of their own.
    pub user_metrics: usize,
}

/// Times of the drain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Drain {
    /// Delay between "not ready" and the first GOAWAY, for load balancers to notice.
    pub wait: Duration,
    /// Maximum time between the first GOAWAY and the end of the process.
    pub timeout: Duration,
}

/// Threads, and the folder of this process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Runtime {
    /// Threads serving clients.
    pub shards: NonZeroUsize,
    /// The folder for what Keyward keeps over a restart.
    pub state_dir: Option<PathBuf>,
}

/// The user agent of clients without one in `listener.connection_age_spares`.
pub const NO_USER_AGENT: &str = "-";

impl Listener {
    /// True if this address belongs to a load balancer sending the client's address by the PROXY protocol.
    #[must_use]
    pub fn is_trusted_proxy(&self, address: IpAddr) -> bool {
        self.proxy_protocol_from.iter().any(|network| network.contains(address))
    }
}
