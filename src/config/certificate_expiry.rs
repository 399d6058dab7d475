//! The certificates named by the configuration, with their expiry.
//!
//! Owns: collecting the certificates, and reading the expiry. Must not know: the thresholds of a warning, the
//! names of metrics. Invariant: the expiry of a chain is the earliest expiry in the chain, since any expired
//! certificate invalidates the chain.

use std::time::{Duration, SystemTime};

use rustls::pki_types::CertificateDer;
use x509_parser::prelude::{FromDer as _, X509Certificate};

use crate::config::upstream_users::UserCredential;
use crate::config::{ClientTls, Config};

/// The use of a configured certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CertificateUse {
    /// Presented to the clients of a listener.
    Listener,
    /// The authorities of a listener's client certificates.
    ListenerClientCa,
    /// Presented to members.
    Members,
    /// The authorities of the members' certificates.
    MembersCa,
    /// Presented to members on behalf of an etcd user.
    User,
    /// The authority that signs minted certificates.
    MintCa,
    /// Presented to the collector of audit records.
    Collector,
    /// The authorities of the collector's certificate.
    CollectorCa,
}

/// The expiry of a certificate, a chain, or a set of authorities.
#[derive(Debug, PartialEq, Eq)]
pub struct CertificateExpiry {
    /// The use of the certificate.
    pub usage: CertificateUse,
    /// The listener, the etcd user, or the table of the configuration that names the certificate.
    pub name: String,
    /// Time of expiry.
    pub ends: SystemTime,
}

impl CertificateUse {
    /// Label of the use in metrics.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::Listener => "listener",
            Self::ListenerClientCa => "listener_client_ca",
            Self::Members => "members",
            Self::MembersCa => "members_ca",
            Self::User => "user",
            Self::MintCa => "mint_ca",
            Self::Collector => "collector",
            Self::CollectorCa => "collector_ca",
        }
    }

    /// Consequence of the expiry.
    #[must_use]
    pub fn loss(self) -> &'static str {
        match self {
            Self::Listener => "clients refuse to connect",
            Self::ListenerClientCa => "no client certificate is good any more",
            Self::Members => "members refuse connections",
            Self::MembersCa => "no member is believed",
            Self::User => "members refuse this user's connections",
            Self::MintCa => "members refuse what is minted",
            Self::Collector => "the collector refuses audit records",
            Self::CollectorCa => "the collector of audit records is not believed",
        }
    }
}

impl CertificateExpiry {
    /// Configuration key naming the certificate.
    #[must_use]
    pub fn key(&self) -> String {
        let name = &self.name;
        match self.usage {
            CertificateUse::Listener => format!("listener {name}: tls.cert"),
            CertificateUse::ListenerClientCa => format!("listener {name}: tls.client_ca"),
            CertificateUse::Members | CertificateUse::Collector => format!("{name}.cert"),
            CertificateUse::User => format!("user {name}: cert"),
            CertificateUse::MembersCa | CertificateUse::MintCa | CertificateUse::CollectorCa => {
                format!("{name}.ca")
            }
        }
    }
}

/// All certificates named by the configuration. A use and a name occur together once.
#[must_use]
pub fn configured_certificates(config: &Config) -> Vec<CertificateExpiry> {
    let mut all = ExpiryList::default();
    for listener in &config.listeners {
        let Some(tls) = &listener.tls else { continue };
        all.add(CertificateUse::Listener, &listener.name, tls.identity.chain());
        if let Some(ca) = listener.client_ca() {
            all.add_authorities(CertificateUse::ListenerClientCa, &listener.name, ca.roots.certificates());
        }
    }
    if let Some(tls) = &config.cluster.tls {
        all.add_client_tls((CertificateUse::Members, CertificateUse::MembersCa), "cluster.tls", tls);
    }
    for (name, credential) in &config.users.named {
        if let UserCredential::Certificate(pair) = credential {
            all.add(CertificateUse::User, name.as_str(), pair.chain());
        }
    }
    if let Some(mint) = &config.users.mint {
        all.add(CertificateUse::MintCa, "mint", mint.authority.chain());
    }
    if let Some(tls) = config.audit.as_ref().and_then(|audit| audit.otlp.as_ref()?.collector.tls.as_ref()) {
        all.add_client_tls((CertificateUse::Collector, CertificateUse::CollectorCa), "audit.otlp", tls);
    }
    if let Some(tls) = config.trace.as_ref().and_then(|trace| trace.collector.tls.as_ref()) {
        all.add_client_tls((CertificateUse::Collector, CertificateUse::CollectorCa), "trace", tls);
    }
    all.0
}

/// The certificates collected so far.
#[derive(Default)]
struct ExpiryList(Vec<CertificateExpiry>);

impl ExpiryList {
    fn add(&mut self, usage: CertificateUse, name: &str, chain: &[CertificateDer<'static>]) {
        let ends = chain.iter().filter_map(expiry_of).min();
        self.0.extend(ends.map(|ends| CertificateExpiry { usage, name: name.to_owned(), ends }));
    }

    /// Each authority vouches for separate certificates, so the last authority to expire counts.
    fn add_authorities(&mut self, usage: CertificateUse, name: &str, all: &[CertificateDer<'static>]) {
        let ends = all.iter().filter_map(expiry_of).max();
        self.0.extend(ends.map(|ends| CertificateExpiry { usage, name: name.to_owned(), ends }));
    }

    fn add_client_tls(&mut self, (own, ca): (CertificateUse, CertificateUse), name: &str, tls: &ClientTls) {
        self.add_authorities(ca, name, tls.authorities());
        if let Some(identity) = &tls.identity {
            self.add(own, name, identity.chain());
        }
    }
}

fn expiry_of(der: &CertificateDer<'_>) -> Option<SystemTime> {
    let (_, certificate) = X509Certificate::from_der(der).ok()?;
    let end = u64::try_from(certificate.validity().not_after.timestamp()).unwrap_or(0);
    SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(end))
}
