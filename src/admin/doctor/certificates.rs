//! Which certificates the configuration names, and when each ends.
//!
//! Owns: finding them, and reading their ends. Must not know: what is too soon. Invariant: of a chain the first to end counts, since it
//! ends the others.

use std::time::{Duration, SystemTime};

use rustls::pki_types::CertificateDer;
use x509_parser::prelude::{FromDer as _, X509Certificate};

use crate::config::{Config, users};

/// A certificate, or some that stand and fall together.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Certificate {
    /// The key of the configuration that names it.
    pub(super) key: String,
    /// What stops working.
    pub(super) loss: &'static str,
    /// When it ends.
    pub(super) ends: SystemTime,
}

/// All that the configuration names.
pub(super) fn all(config: &Config) -> Vec<Certificate> {
    let mut all = Vec::new();
    let mut add = |key: String, loss, chain: &[CertificateDer<'static>]| {
        all.extend(chain.iter().filter_map(ends).min().map(|ends| Certificate { key, loss, ends }));
    };
    for listener in &config.listeners {
        let Some(tls) = &listener.tls else { continue };
        let name = &listener.name;
        add(format!("listener {name}: tls.cert"), "clients refuse to connect", tls.identity.chain());
        if let Some(ca) = listener.client_ca() {
            let key = format!("listener {name}: tls.client_ca");
            // Each vouches for its own clients: the last to end is the end of all.
            let last = ca
                .roots
                .certificates()
                .iter()
                .filter_map(|der| Some((ends(der)?, der)))
                .max_by_key(|(at, _)| *at);
            add(key, "no client certificate is good any more", last.map(|(_, der)| der.clone()).as_slice());
        }
    }
    if let Some(tls) = &config.cluster.tls {
        let last =
            tls.authorities().iter().filter_map(|der| Some((ends(der)?, der))).max_by_key(|(at, _)| *at);
        add("cluster.tls.ca".into(), "no member is believed", last.map(|(_, der)| der.clone()).as_slice());
        if let Some(identity) = &tls.identity {
            add("cluster.tls.cert".into(), "members refuse connections", identity.chain());
        }
    }
    for (name, credential) in &config.users.named {
        if let users::Credential::Certificate(pair) = credential {
            let key = format!("user {}: cert", name.as_str());
            add(key, "members refuse this user's connections", pair.chain());
        }
    }
    if let Some(mint) = &config.users.mint {
        add("mint.ca".into(), "members refuse what is minted", mint.authority.chain());
    }
    all
}

fn ends(der: &CertificateDer<'_>) -> Option<SystemTime> {
    let (_, certificate) = X509Certificate::from_der(der).ok()?;
    let end = u64::try_from(certificate.validity().not_after.timestamp()).unwrap_or(0);
    SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(end))
}
