//! The mirror of the TOML, key by key.
//!
//! Owns: the names of keys and the TOML types of values. Must not know: defaults, meanings, files.
//! Invariants: every key is optional here, so `resolve` can report all missing keys at once; unknown keys are
//! refused. A key is added together with its reader and its line in the repository's `config.toml`.

use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;

use serde::de::value::MapAccessDeserializer;
use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer};

use super::toml_limits::TomlUsageLimits;
use super::toml_rest::TomlRest;
use super::toml_trace::TomlTrace;

/// The whole file.
#[derive(Debug, Default, Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(deny_unknown_fields, default)]
pub(super) struct TomlFile {
    #[serde(deserialize_with = "tables")]
    pub(super) listener: Vec<TomlListener>,
    #[serde(deserialize_with = "table")]
    pub(super) cluster: TomlCluster,
    #[serde(deserialize_with = "table")]
    pub(super) advertise: TomlAdvertise,
    #[serde(deserialize_with = "table")]
    pub(super) session: TomlSession,
    #[serde(deserialize_with = "table")]
    pub(super) login: TomlLogin,
    #[serde(deserialize_with = "table")]
    pub(super) revocation: TomlRevocation,
    #[serde(deserialize_with = "tables")]
    pub(super) user: Vec<TomlUser>,
    #[serde(deserialize_with = "tables")]
    pub(super) jwt: Vec<TomlJwt>,
    #[serde(deserialize_with = "tables")]
    pub(super) map: Vec<TomlMap>,
    #[serde(deserialize_with = "table")]
    pub(super) mapping: TomlMapping,
    #[serde(deserialize_with = "some_table")]
    pub(super) mint: Option<TomlMint>,
    #[serde(deserialize_with = "some_table")]
    pub(super) sign_jwt: Option<TomlSignJwt>,
    #[serde(deserialize_with = "some_table")]
    pub(super) etcd_jwt: Option<TomlEtcdJwt>,
    #[serde(deserialize_with = "table")]
    pub(super) policy: TomlPolicy,
    #[serde(deserialize_with = "table")]
    pub(super) protection: TomlProtection,
    #[serde(deserialize_with = "table")]
    pub(super) rest: TomlRest,
    #[serde(deserialize_with = "table")]
    pub(super) maintenance: TomlMaintenance,
    #[serde(deserialize_with = "table")]
    pub(super) watch: TomlWatch,
    #[serde(deserialize_with = "table")]
    pub(super) limits: TomlLimits,
    #[serde(deserialize_with = "table")]
    pub(super) admin: TomlAdmin,
    #[serde(deserialize_with = "table")]
    pub(super) audit: TomlAudit,
    #[serde(deserialize_with = "table")]
    pub(super) trace: TomlTrace,
    #[serde(deserialize_with = "table")]
    pub(super) log: TomlLog,
    #[serde(deserialize_with = "table")]
    pub(super) drain: TomlDrain,
    #[serde(deserialize_with = "table")]
    pub(super) runtime: TomlRuntime,
}

#[derive(Debug, Default, Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(deny_unknown_fields, default)]
pub(super) struct TomlListener {
    pub(super) name: Option<String>,
    pub(super) address: Option<String>,
    #[serde(deserialize_with = "some_table")]
    pub(super) tls: Option<TomlListenerTls>,
    pub(super) default_user: Option<String>,
    pub(super) identify: Option<Vec<TomlIdentify>>,
    pub(super) lend_login_identity: Option<bool>,
    pub(super) accept_odd_authority: Option<bool>,
    pub(super) connection_age_spares: Option<Vec<String>>,
    pub(super) on_expiry: Option<TomlOnExpiry>,
    pub(super) proxy_protocol_from: Option<Vec<String>>,
    pub(super) rest: Option<bool>,
    pub(super) metrics_page: Option<bool>,
    pub(super) hosts: Option<Vec<String>>,
    pub(super) member: Option<String>,
    pub(super) server_names: Option<BTreeMap<String, String>>,
    pub(super) client_urls: Option<Vec<String>>,
    pub(super) namespace: Option<String>,
    #[serde(deserialize_with = "some_table")]
    pub(super) limits: Option<TomlUsageLimits>,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(rename_all = "lowercase")]
pub(super) enum TomlIdentify {
    Token,
    Jwt,
    Certificate,
    Default,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(rename_all = "lowercase")]
pub(super) enum TomlOnExpiry {
    Cut,
    Keep,
}

#[derive(Debug, Default, Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(deny_unknown_fields, default)]
pub(super) struct TomlListenerTls {
    pub(super) cert: Option<String>,
    pub(super) key: Option<String>,
    pub(super) client_ca: Option<String>,
    pub(super) client_ca_name: Option<String>,
    pub(super) client_crl: Option<String>,
    pub(super) client_auth: Option<TomlClientAuth>,
    pub(super) strict_certificates: Option<bool>,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(rename_all = "lowercase")]
pub(super) enum TomlClientAuth {
    None,
    Optional,
    Required,
}

#[derive(Debug, Default, Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(deny_unknown_fields, default)]
pub(super) struct TomlCluster {
    pub(super) endpoints: Option<Vec<String>>,
    #[serde(deserialize_with = "some_table")]
    pub(super) srv: Option<TomlClusterSrv>,
    pub(super) dns: Option<Vec<String>>,
    pub(super) allowed_hosts: Option<Vec<String>>,
    pub(super) identity: Option<TomlClusterIdentity>,
    #[serde(deserialize_with = "some_table")]
    pub(super) tls: Option<TomlClusterTls>,
    pub(super) connect_timeout: Option<String>,
    pub(super) idle_timeout: Option<String>,
    pub(super) token_ttl: Option<String>,
    pub(super) id: Option<String>,
    pub(super) reads: Option<TomlMemberPreference>,
    pub(super) writes: Option<TomlMemberPreference>,
    pub(super) near: Option<Vec<String>>,
    pub(super) hedge_after: Option<String>,
    pub(super) election_timeout: Option<String>,
    pub(super) unreachable_timeout: Option<String>,
    #[serde(deserialize_with = "some_table")]
    pub(super) probe: Option<TomlProbe>,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(rename_all = "lowercase")]
pub(super) enum TomlMemberPreference {
    Any,
    Leader,
}

#[derive(Debug, Default, Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(deny_unknown_fields, default)]
pub(super) struct TomlClusterSrv {
    pub(super) domain: Option<String>,
    pub(super) name: Option<String>,
    pub(super) scheme: Option<TomlClusterScheme>,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(rename_all = "lowercase")]
pub(super) enum TomlClusterScheme {
    Http,
    Https,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(rename_all = "lowercase")]
pub(super) enum TomlClusterIdentity {
    Pinned,
    Follow,
}

#[derive(Debug, Default, Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(deny_unknown_fields, default)]
pub(super) struct TomlClusterTls {
    pub(super) ca: Option<String>,
    pub(super) pinned_sha256: Option<Vec<String>>,
    pub(super) insecure_skip_verify: Option<bool>,
    pub(super) strict_certificates: Option<bool>,
    pub(super) cert: Option<String>,
    pub(super) key: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(deny_unknown_fields, default)]
pub(super) struct TomlProbe {
    pub(super) user: Option<String>,
    pub(super) password_file: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(deny_unknown_fields, default)]
pub(super) struct TomlAdvertise {
    pub(super) client_urls: Option<Vec<String>>,
    pub(super) members: Option<BTreeMap<String, Vec<String>>>,
}

#[derive(Debug, Default, Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(deny_unknown_fields, default)]
pub(super) struct TomlSession {
    pub(super) key_files: Option<Vec<String>>,
    pub(super) realm: Option<String>,
    pub(super) not_before: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(deny_unknown_fields, default)]
pub(super) struct TomlRevocation {
    pub(super) state_file: Option<String>,
    pub(super) etcd_prefix: Option<String>,
    pub(super) user: Option<String>,
    pub(super) max_age: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(deny_unknown_fields, default)]
pub(super) struct TomlLogin {
    pub(super) sources: Option<Vec<TomlPasswordSource>>,
    pub(super) users_file: Option<String>,
    pub(super) failures_per_user_and_address: Option<u32>,
    pub(super) failures_per_user: Option<u32>,
    pub(super) failures_per_address: Option<u32>,
    pub(super) longest_wait: Option<String>,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(rename_all = "lowercase")]
pub(super) enum TomlPasswordSource {
    Etcd,
    File,
}

#[derive(Debug, Default, Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(deny_unknown_fields, default)]
pub(super) struct TomlUser {
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
pub(super) struct TomlMint {
    pub(super) ca: Option<String>,
    pub(super) key: Option<String>,
    pub(super) lifetime: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(deny_unknown_fields, default)]
pub(super) struct TomlEtcdJwt {
    pub(super) method: Option<String>,
    pub(super) public_key: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(deny_unknown_fields, default)]
pub(super) struct TomlSignJwt {
    pub(super) method: Option<String>,
    pub(super) key: Option<String>,
    pub(super) lifetime: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(deny_unknown_fields, default)]
pub(super) struct TomlJwt {
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
pub(super) struct TomlMap {
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
pub(super) struct TomlMapping {
    pub(super) default: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(deny_unknown_fields, default)]
pub(super) struct TomlPolicy {
    pub(super) mode: Option<TomlPolicyMode>,
    pub(super) file: Option<String>,
    pub(super) etcd_prefix: Option<String>,
    pub(super) user: Option<String>,
    pub(super) state_file: Option<String>,
    pub(super) unknown_methods: Option<TomlUnknownMethods>,
    pub(super) require_identity: Option<TomlRequireIdentity>,
    pub(super) namespace_leases: Option<TomlNamespaceLeases>,
    pub(super) limits_mode: Option<TomlPolicyMode>,
    #[serde(deserialize_with = "some_table")]
    pub(super) peer_limits: Option<TomlUsageLimits>,
}

#[derive(Debug, Default, Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(deny_unknown_fields, default)]
pub(super) struct TomlProtection {
    pub(super) mode: Option<TomlPolicyMode>,
    pub(super) db_share: Option<f64>,
    pub(super) db_quota: Option<String>,
    pub(super) latency_target: Option<String>,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(rename_all = "lowercase")]
pub(super) enum TomlPolicyMode {
    Off,
    Shadow,
    Enforce,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(rename_all = "lowercase")]
pub(super) enum TomlNamespaceLeases {
    Own,
    Any,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(rename_all = "lowercase")]
pub(super) enum TomlUnknownMethods {
    Refuse,
    Allow,
}

#[derive(Debug, Default, Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(deny_unknown_fields, default)]
pub(super) struct TomlMaintenance {
    pub(super) etcd_prefix: Option<String>,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(rename_all = "kebab-case")]
pub(super) enum TomlRequireIdentity {
    Strict,
    AsEtcd,
}

#[derive(Debug, Default, Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(deny_unknown_fields, default)]
pub(super) struct TomlWatch {
    pub(super) idle_progress: Option<String>,
    pub(super) share_from: Option<u32>,
    pub(super) buffer: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(deny_unknown_fields, default)]
pub(super) struct TomlLimits {
    pub(super) connections: Option<u32>,
    pub(super) connections_per_address: Option<u32>,
    pub(super) first_call_timeout: Option<String>,
    pub(super) client_ping_interval: Option<String>,
    pub(super) client_ping_timeout: Option<String>,
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
pub(super) struct TomlAdmin {
    pub(super) address: Option<String>,
    pub(super) socket: Option<String>,
    pub(super) page: Option<TomlPageContent>,
    pub(super) hosts: Option<Vec<String>>,
    pub(super) replicas: Option<Vec<String>>,
    pub(super) user_metrics: Option<u32>,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(rename_all = "lowercase")]
pub(super) enum TomlPageContent {
    Off,
    Anonymous,
    Full,
}

#[derive(Debug, Default, Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(deny_unknown_fields, default)]
pub(super) struct TomlAudit {
    pub(super) events: Option<Vec<TomlAuditEvent>>,
    pub(super) file: Option<String>,
    pub(super) max_size: Option<String>,
    pub(super) max_age: Option<String>,
    pub(super) keep: Option<u32>,
    pub(super) keep_for: Option<String>,
    pub(super) stdout: Option<bool>,
    pub(super) syslog: Option<String>,
    #[serde(deserialize_with = "some_table")]
    pub(super) otlp: Option<TomlOtlp>,
    pub(super) queue: Option<String>,
    pub(super) on_full: Option<TomlOnFull>,
    pub(super) signing_key_file: Option<String>,
    pub(super) replica: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(deny_unknown_fields, default)]
pub(super) struct TomlOtlp {
    pub(super) url: Option<String>,
    pub(super) ca: Option<String>,
    pub(super) cert: Option<String>,
    pub(super) key: Option<String>,
    pub(super) authorization_file: Option<String>,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(rename_all = "lowercase")]
pub(super) enum TomlAuditEvent {
    Changes,
    Reads,
    Watches,
    Leases,
    Logins,
    Refusals,
    Admin,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(rename_all = "lowercase")]
pub(super) enum TomlOnFull {
    Block,
    Drop,
}

#[derive(Debug, Default, Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(deny_unknown_fields, default)]
pub(super) struct TomlLog {
    pub(super) format: Option<TomlLogFormat>,
    pub(super) level: Option<String>,
    pub(super) access: Option<TomlRecordedCalls>,
    pub(super) slow: Option<String>,
    pub(super) sample: Option<u32>,
    pub(super) keys: Option<bool>,
    pub(super) buffer: Option<String>,
    pub(super) otlp: Option<bool>,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(rename_all = "lowercase")]
pub(super) enum TomlRecordedCalls {
    Off,
    Errors,
    Slow,
    All,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(rename_all = "lowercase")]
pub(super) enum TomlLogFormat {
    Text,
    Json,
}

#[derive(Debug, Default, Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(deny_unknown_fields, default)]
pub(super) struct TomlDrain {
    pub(super) wait: Option<String>,
    pub(super) timeout: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(deny_unknown_fields, default)]
pub(super) struct TomlRuntime {
    pub(super) shards: Option<u16>,
    pub(super) state_dir: Option<String>,
}

/// A TOML table: serde would also fill a struct from an array, by position, so that `tls = ["a", "b"]` or
/// `[[log]]` would be accepted.
struct StrictTable<T>(T);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for StrictTable<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct OnlyTable<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for OnlyTable<T> {
            type Value = StrictTable<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a table")
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<StrictTable<T>, A::Error> {
                T::deserialize(MapAccessDeserializer::new(map)).map(StrictTable)
            }
        }
        deserializer.deserialize_map(OnlyTable(PhantomData))
    }
}

pub(super) fn table<'de, D: Deserializer<'de>, T: Deserialize<'de>>(deserializer: D) -> Result<T, D::Error> {
    StrictTable::deserialize(deserializer).map(|StrictTable(inner)| inner)
}

pub(super) fn some_table<'de, D: Deserializer<'de>, T: Deserialize<'de>>(
    deserializer: D,
) -> Result<Option<T>, D::Error> {
    table(deserializer).map(Some)
}

pub(super) fn tables<'de, D: Deserializer<'de>, T: Deserialize<'de>>(
    deserializer: D,
) -> Result<Vec<T>, D::Error> {
    let tables = Vec::deserialize(deserializer)?;
    Ok(tables.into_iter().map(|StrictTable(inner)| inner).collect())
}
