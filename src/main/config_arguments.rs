//! The sources of the configuration on the command line: the file, and flags for the keys of a first try.
//!
//! Owns: the flags, each with its key. Must not know: the meaning of a key. Invariant: a flag is the value of
//! one key, so that every check of the key applies to the flag.

use std::path::PathBuf;

use clap::Args;
use keyward::config::{ConfigSources, FlagSetting};

/// The configuration file.
#[derive(Args)]
pub(crate) struct ConfigFile {
    /// The configuration file; the repository's config.toml describes every key. A variable sets a key, too,
    /// and wins over the file: KEYWARD_CLUSTER__TOKEN_TTL=5m, KEYWARD_LISTENER__0__NAME=clients.
    #[arg(long, env = "KEYWARD_CONFIG", value_name = "FILE")]
    config: Option<PathBuf>,
}

/// The configuration file, and flags that win over the file and over variables. The names of the flags for
/// TLS are those of etcdctl (towards the members) and of etcd (towards clients).
#[derive(Args)]
pub(crate) struct ConfigArguments {
    #[command(flatten)]
    file: ConfigFile,
    #[command(flatten)]
    flags: ConfigFlags,
}

/// Flags for the keys of a first try.
#[derive(Args)]
pub(crate) struct ConfigFlags {
    /// The members' client URLs, separated by commas (cluster.endpoints).
    #[arg(long, value_name = "URLS")]
    endpoints: Option<String>,
    /// The CA of the members' certificates (cluster.tls.ca).
    #[arg(long, value_name = "FILE")]
    cacert: Option<String>,
    /// Keyward's certificate towards the members (cluster.tls.cert).
    #[arg(long, value_name = "FILE")]
    cert: Option<String>,
    /// The key of --cert (cluster.tls.key).
    #[arg(long, value_name = "FILE")]
    key: Option<String>,
    /// The etcd user of Keyward's own questions (cluster.probe.user).
    #[arg(long, value_name = "NAME")]
    probe_user: Option<String>,
    /// The file with the password of --probe-user (cluster.probe.password_file).
    #[arg(long, value_name = "FILE")]
    probe_password_file: Option<String>,
    /// The address for clients, as in 127.0.0.1:2379 (listener[0].address, of a listener named "clients").
    #[arg(long, value_name = "ADDRESS")]
    listen: Option<String>,
    /// The certificate towards clients (listener[0].tls.cert).
    #[arg(long, value_name = "FILE")]
    cert_file: Option<String>,
    /// The key of --cert-file (listener[0].tls.key).
    #[arg(long, value_name = "FILE")]
    key_file: Option<String>,
    /// The CA of the clients' certificates, which are then required (listener[0].tls.client_ca).
    #[arg(long, value_name = "FILE")]
    trusted_ca_file: Option<String>,
    /// The URLs at which clients reach Keyward, separated by commas (advertise.client_urls).
    #[arg(long, value_name = "URLS")]
    advertise_client_urls: Option<String>,
    /// The key that seals sessions, of `keyward keygen` (session.key_files).
    #[arg(long, value_name = "FILES")]
    session_key: Option<String>,
    /// The address of metrics and health checks (admin.address).
    #[arg(long, value_name = "ADDRESS")]
    admin: Option<String>,
}

impl ConfigFile {
    /// The path of the file, if any is named.
    pub(crate) fn path(&self) -> Option<PathBuf> {
        self.config.clone()
    }

    /// The file, and the variables of the environment.
    pub(crate) fn sources(&self) -> ConfigSources {
        ConfigSources::of_file(self.config.clone()).with_environment(std::env::vars_os())
    }
}

impl ConfigArguments {
    /// All sources.
    pub(crate) fn sources(self) -> ConfigSources {
        self.file.sources().with_flags(self.flags.settings())
    }
}

impl ConfigFlags {
    /// The keys of the given flags.
    pub(crate) fn settings(self) -> Vec<FlagSetting> {
        // A listener of a file keeps its name.
        let name = self.listen.as_ref().map(|_| "clients".to_owned());
        let flags = [
            ("--endpoints", "cluster.endpoints", self.endpoints),
            ("--cacert", "cluster.tls.ca", self.cacert),
            ("--cert", "cluster.tls.cert", self.cert),
            ("--key", "cluster.tls.key", self.key),
            ("--probe-user", "cluster.probe.user", self.probe_user),
            ("--probe-password-file", "cluster.probe.password_file", self.probe_password_file),
            ("--listen", "listener[0].address", self.listen),
            ("--listen", "listener[0].name", name),
            ("--cert-file", "listener[0].tls.cert", self.cert_file),
            ("--key-file", "listener[0].tls.key", self.key_file),
            ("--trusted-ca-file", "listener[0].tls.client_ca", self.trusted_ca_file),
            ("--advertise-client-urls", "advertise.client_urls", self.advertise_client_urls),
            ("--session-key", "session.key_files", self.session_key),
            ("--admin", "admin.address", self.admin),
        ];
        let set = flags.into_iter().filter_map(|(flag, key, value)| Some((flag, key, value?)));
        set.map(|(flag, key, value)| FlagSetting { flag, key, value, yields: key.ends_with(".name") })
            .collect()
    }
}
