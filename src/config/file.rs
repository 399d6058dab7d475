//! What is written: the mirror of the TOML, key by key.
//!
//! Owns: the names of keys and the TOML types of their values. Must not know: defaults, meanings, files.
//! Invariants: every key is optional here, so that `resolve` can tell all that is missing at once; unknown keys are
//! refused. A key lands here with its reader and its line in the `config.toml` of the repository's root.

use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;

use serde::de::value::MapAccessDeserializer;
use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer};

/// The whole file.
#[derive(Debug, Default, Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(deny_unknown_fields, default)]
pub(super) struct File {
    #[serde(deserialize_with = "tables")]
    pub(super) listener: Vec<Listener>,
    #[serde(deserialize_with = "table")]
    pub(super) cluster: Cluster,
    #[serde(deserialize_with = "table")]
    pub(super) advertise: Advertise,
    #[serde(deserialize_with = "table")]
    pub(super) session: Session,
    #[serde(deserialize_with = "table")]
    pub(super) login: Passwords,
    #[serde(deserialize_with = "table")]
    pub(super) revocation: Revocation,
    #[serde(deserialize_with = "tables")]
    pub(super) user: Vec<User>,
    #[serde(deserialize_with = "tables")]
    pub(super) jwt: Vec<Jwt>,
    #[serde(deserialize_with = "tables")]
    pub(super) map: Vec<Map>,
    #[serde(deserialize_with = "table")]
    pub(super) mapping: Mapping,
    #[serde(deserialize_with = "some_table")]
    pub(super) mint: Option<Mint>,
    #[serde(deserialize_with = "some_table")]
    pub(super) sign_jwt: Option<SignJwt>,
    #[serde(deserialize_with = "some_table")]
    pub(super) etcd_jwt: Option<EtcdJwt>,
    #[serde(deserialize_with = "table")]
    pub(super) maintenance: Maintenance,
    #[serde(deserialize_with = "table")]
    pub(super) watch: Watch,
    #[serde(deserialize_with = "table")]
    pub(super) limits: Limits,
    #[serde(deserialize_with = "table")]
    pub(super) admin: Admin,
    #[serde(deserialize_with = "table")]
    pub(super) log: Log,
    #[serde(deserialize_with = "table")]
    pub(super) drain: Drain,
    #[serde(deserialize_with = "table")]
    pub(super) runtime: Runtime,
}

#[derive(Debug, Default, Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(deny_unknown_fields, default)]
pub(super) struct Listener {
    pub(super) name: Option<String>,
    pub(super) address: Option<String>,
    #[serde(deserialize_with = "some_table")]
    pub(super) tls: Option<ListenerTls>,
    pub(super) default_user: Option<String>,
    pub(super) identify: Option<Vec<Identify>>,
    pub(super) lend_login_identity: Option<bool>,
    pub(super) accept_odd_authority: Option<bool>,
    pub(super) on_expiry: Option<OnExpiry>,
    pub(super) proxy_protocol_from: Option<Vec<String>>,
    pub(super) member: Option<String>,
    pub(super) server_names: Option<BTreeMap<String, String>>,
    pub(super) client_urls: Option<Vec<String>>,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(rename_all = "lowercase")]
pub(super) enum Identify {
    Token,
    Jwt,
    Certificate,
    Default,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(rename_all = "lowercase")]
pub(super) enum OnExpiry {
    Cut,
    Keep,
}

#[derive(Debug, Default, Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(deny_unknown_fields, default)]
pub(super) struct ListenerTls {
    pub(super) cert: Option<String>,
    pub(super) key: Option<String>,
    pub(super) client_ca: Option<String>,
    pub(super) client_ca_name: Option<String>,
    pub(super) client_crl: Option<String>,
    pub(super) client_auth: Option<ClientAuth>,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(rename_all = "lowercase")]
pub(super) enum ClientAuth {
    None,
    Optional,
    Required,
}

#[derive(Debug, Default, Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(deny_unknown_fields, default)]
pub(super) struct Cluster {
    pub(super) endpoints: Option<Vec<String>>,
    #[serde(deserialize_with = "some_table")]
    pub(super) srv: Option<ClusterSrv>,
    pub(super) dns: Option<Vec<String>>,
    pub(super) allowed_hosts: Option<Vec<String>>,
    pub(super) identity: Option<ClusterIdentity>,
    #[serde(deserialize_with = "some_table")]
    pub(super) tls: Option<ClusterTls>,
    pub(super) connect_timeout: Option<String>,
    pub(super) idle_timeout: Option<String>,
    pub(super) token_ttl: Option<String>,
    pub(super) id: Option<String>,
    pub(super) reads: Option<Target>,
    pub(super) writes: Option<Target>,
    pub(super) near: Option<Vec<String>>,
    pub(super) hedge_after: Option<String>,
    pub(super) election_timeout: Option<String>,
    pub(super) unreachable_timeout: Option<String>,
    #[serde(deserialize_with = "some_table")]
    pub(super) probe: Option<Probe>,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(rename_all = "lowercase")]
pub(super) enum Target {
    Any,
    Leader,
}

#[derive(Debug, Default, Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(deny_unknown_fields, default)]
pub(super) struct ClusterSrv {
    pub(super) domain: Option<String>,
    pub(super) name: Option<String>,
    pub(super) scheme: Option<ClusterScheme>,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(rename_all = "lowercase")]
pub(super) enum ClusterScheme {
    Http,
    Https,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(rename_all = "lowercase")]
pub(super) enum ClusterIdentity {
    Pinned,
    Follow,
}

#[derive(Debug, Default, Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(deny_unknown_fields, default)]
pub(super) struct ClusterTls {
    pub(super) ca: Option<String>,
    pub(super) cert: Option<String>,
    pub(super) key: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(deny_unknown_fields, default)]
pub(super) struct Probe {
    pub(super) user: Option<String>,
    pub(super) password_file: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(deny_unknown_fields, default)]
pub(super) struct Advertise {
    pub(super) client_urls: Option<Vec<String>>,
    pub(super) members: Option<BTreeMap<String, Vec<String>>>,
}

#[derive(Debug, Default, Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(deny_unknown_fields, default)]
pub(super) struct Session {
    pub(super) key_files: Option<Vec<String>>,
    pub(super) realm: Option<String>,
    pub(super) not_before: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(deny_unknown_fields, default)]
pub(super) struct Revocation {
    pub(super) state_file: Option<String>,
    pub(super) etcd_prefix: Option<String>,
    pub(super) user: Option<String>,
    pub(super) max_age: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(deny_unknown_fields, default)]
pub(super) struct Passwords {
    pub(super) sources: Option<Vec<PasswordSource>>,
    pub(super) users_file: Option<String>,
    pub(super) failures_per_user_and_address: Option<u32>,
    pub(super) failures_per_user: Option<u32>,
    pub(super) failures_per_address: Option<u32>,
    pub(super) longest_wait: Option<String>,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(rename_all = "lowercase")]
pub(super) enum PasswordSource {
    Etcd,
    File,
}

#[derive(Debug, Default, Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(deny_unknown_fields, default)]
pub(super) struct User {
    pub(super) name: Option<String>,
    pub(super) password_file: Option<String>,
    pub(super) cert: Option<String>,
    pub(super) key: Option<String>,
    pub(super) mint: Option<bool>,
    pub(super) jwt: Option<bool>,
}

#[derive(Debug, Default, Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(deny_unknown_fields, default)]
pub(super) struct Mint {
    pub(super) ca: Option<String>,
    pub(super) key: Option<String>,
    pub(super) lifetime: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(deny_unknown_fields, default)]
pub(super) struct EtcdJwt {
    pub(super) method: Option<String>,
    pub(super) public_key: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(deny_unknown_fields, default)]
pub(super) struct SignJwt {
    pub(super) method: Option<String>,
    pub(super) key: Option<String>,
    pub(super) lifetime: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(deny_unknown_fields, default)]
pub(super) struct Jwt {
    pub(super) issuer: Option<String>,
    pub(super) audience: Option<String>,
    pub(super) keys: Option<String>,
    pub(super) algorithms: Option<Vec<String>>,
    pub(super) subject: Option<String>,
    pub(super) leeway: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(deny_unknown_fields, default)]
pub(super) struct Map {
    pub(super) peer: Option<String>,
    pub(super) san_uri: Option<String>,
    pub(super) san_dns: Option<String>,
    pub(super) issuer: Option<String>,
    pub(super) claim: Option<BTreeMap<String, String>>,
    pub(super) network: Option<String>,
    #[serde(rename = "as")]
    pub(super) user: Option<String>,
    pub(super) deny: Option<bool>,
}

#[derive(Debug, Default, Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(deny_unknown_fields, default)]
pub(super) struct Mapping {
    pub(super) default: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(deny_unknown_fields, default)]
pub(super) struct Maintenance {
    pub(super) etcd_prefix: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(deny_unknown_fields, default)]
pub(super) struct Watch {
    pub(super) idle_progress: Option<String>,
    pub(super) buffer: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(deny_unknown_fields, default)]
pub(super) struct Limits {
    pub(super) connections: Option<u32>,
    pub(super) streams_per_connection: Option<u32>,
    pub(super) header_size: Option<String>,
    pub(super) request_size: Option<String>,
    pub(super) handshake_timeout: Option<String>,
    pub(super) connection_age: Option<String>,
    pub(super) replay_buffer: Option<String>,
    pub(super) member_in_flight: Option<u32>,
    pub(super) logins_in_flight_per_member: Option<u32>,
    pub(super) certificate_connections: Option<u32>,
    pub(super) unread_buffer: Option<String>,
    pub(super) unread_timeout: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(deny_unknown_fields, default)]
pub(super) struct Admin {
    pub(super) address: Option<String>,
    pub(super) socket: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(deny_unknown_fields, default)]
pub(super) struct Log {
    pub(super) format: Option<LogFormat>,
    pub(super) level: Option<String>,
    pub(super) access: Option<bool>,
    pub(super) buffer: Option<String>,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(rename_all = "lowercase")]
pub(super) enum LogFormat {
    Text,
    Json,
}

#[derive(Debug, Default, Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(deny_unknown_fields, default)]
pub(super) struct Drain {
    pub(super) wait: Option<String>,
    pub(super) timeout: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(deny_unknown_fields, default)]
pub(super) struct Runtime {
    pub(super) shards: Option<u16>,
}

/// A table and nothing else: serde would also fill a struct from an array, by position, so that `tls = ["a", "b"]`
/// or `[[log]]` would mean something.
struct Table<T>(T);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Table<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct OnlyTable<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for OnlyTable<T> {
            type Value = Table<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a table")
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Table<T>, A::Error> {
                T::deserialize(MapAccessDeserializer::new(map)).map(Table)
            }
        }
        deserializer.deserialize_map(OnlyTable(PhantomData))
    }
}

fn table<'de, D: Deserializer<'de>, T: Deserialize<'de>>(deserializer: D) -> Result<T, D::Error> {
    Table::deserialize(deserializer).map(|Table(inner)| inner)
}

fn some_table<'de, D: Deserializer<'de>, T: Deserialize<'de>>(
    deserializer: D,
) -> Result<Option<T>, D::Error> {
    table(deserializer).map(Some)
}

fn tables<'de, D: Deserializer<'de>, T: Deserialize<'de>>(deserializer: D) -> Result<Vec<T>, D::Error> {
    let tables = Vec::deserialize(deserializer)?;
    Ok(tables.into_iter().map(|Table(inner)| inner).collect())
}
