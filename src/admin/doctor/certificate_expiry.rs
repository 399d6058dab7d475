//! The certificates named by the configuration, with their expiry.
//!
//! Owns: collecting the certificates, and reading the expiry. Must not know: the thresholds of a warning.
//! Invariant: the expiry of a chain is the earliest expiry in the chain, since any expired certificate
//! invalidates the chain.

use std::time::{Duration, SystemTime};

use rustls::pki_types::CertificateDer;
use x509_parser::prelude::{FromDer as _, X509Certificate};

use crate::config::{Config, upstream_users};

/// The expiry of a certificate, a chain, or a set of authorities.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct CertificateExpiry {
    /// Configuration key naming the certificate.
    pub(super) key: String,
    /// Consequence of the expiry.
    pub(super) loss: &'static str,
    /// Time of expiry.
    pub(super) ends: SystemTime,
}

/// All certificates named by the configuration.
pub(super) fn configured_certificates(config: &Config) -> Vec<CertificateExpiry> {
    let mut all = Vec::new();
    let mut add = |key: String, loss, chain: &[CertificateDer<'static>]| {
        all.extend(chain.iter().filter_map(expiry_of).min().map(|ends| CertificateExpiry {
            key,
            loss,
            ends,
        }));
    };
    for listener in &config.listeners {
        let Some(tls) = &listener.tls else { continue };
        let name = &listener.name;
        add(format!("listener {name}: tls.cert"), "clients refuse to connect", tls.identity.chain());
        if let Some(ca) = listener.client_ca() {
            let key = format!("listener {name}: tls.client_ca");
            // Each authority vouches for separate clients, so the last authority to expire counts.
            let last = ca
                .roots
                .certificates()
                .iter()
                .filter_map(|der| Some((expiry_of(der)?, der)))
                .max_by_key(|(at, _)| *at);
            add(key, "no client certificate is good any more", last.map(|(_, der)| der.clone()).as_slice());
        }
    }
    if let Some(tls) = &config.cluster.tls {
        let last =
            tls.authorities().iter().filter_map(|der| Some((expiry_of(der)?, der))).max_by_key(|(at, _)| *at);
        add("cluster.tls.ca".into(), "no member is believed", last.map(|(_, der)| der.clone()).as_slice());
        if let Some(identity) = &tls.identity {
            add("cluster.tls.cert".into(), "members refuse connections", identity.chain());
        }
    }
    for (name, credential) in &config.users.named {
        if let upstream_users::UserCredential::Certificate(pair) = credential {
            let key = format!("user {}: cert", name.as_str());
            add(key, "members refuse this user's connections", pair.chain());
        }
    }
    if let Some(mint) = &config.users.mint {
        add("mint.ca".into(), "members refuse what is minted", mint.authority.chain());
    }
    all
}

fn expiry_of(der: &CertificateDer<'_>) -> Option<SystemTime> {
    let (_, certificate) = X509Certificate::from_der(der).ok()?;
    let end = u64::try_from(certificate.validity().not_after.timestamp()).unwrap_or(0);
    SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(end))
}
