//! The checks of certificates that are weak, or refused.
//!
//! Owns: the words, and the certificates looked at: the configured ones, and the members' own. Must not know:
//! the rules (`trust`). Invariants: a certificate that is served is a note at most; one that is refused is an
//! error.

use rustls::crypto::WebPkiSupportedAlgorithms;
use rustls::pki_types::CertificateDer;

use super::DoctorFindings;
use keyward_config::Config;
use keyward_config::trust::{ChainUse, weaknesses};
use keyward_config::upstream_users::UserCredential;
use keyward_dial::member_tls;
use keyward_downstream::listener_tls;

/// The part of a certificate in the configuration.
#[derive(Clone, Copy, PartialEq, Eq)]
enum CertificateRole {
    /// Vouches for others.
    Trusted,
    /// Shown by Keyward or by a member.
    Own,
}

/// Checks the certificates of the configuration, and those `shown` by members.
pub(super) fn check(
    config: &Config,
    shown: &[(String, CertificateDer<'static>)],
    findings: &mut DoctorFindings,
) {
    let (of_clients, of_members) = (listener_tls::algorithms(), member_tls::algorithms());
    let mut look = |about: &str, certificates: &[CertificateDer<'static>], usage, role| {
        let algorithms = match usage {
            ChainUse::Client => &of_clients,
            ChainUse::Server => &of_members,
        };
        for certificate in certificates {
            add(about, certificate, (usage, role), algorithms, findings);
        }
    };
    for listener in &config.listeners {
        let Some(tls) = &listener.tls else { continue };
        let about = |key: &str| format!("listener {}: tls.{key}", listener.name);
        look(&about("cert"), leaf(tls.identity.chain()), ChainUse::Server, CertificateRole::Own);
        if let Some(ca) = tls.clients.ca() {
            look(&about("client_ca"), ca.roots.certificates(), ChainUse::Client, CertificateRole::Trusted);
        }
    }
    if let Some(tls) = &config.cluster.tls {
        look("cluster.tls.ca", tls.authorities(), ChainUse::Server, CertificateRole::Trusted);
        if let Some(identity) = &tls.identity {
            look("cluster.tls.cert", leaf(identity.chain()), ChainUse::Client, CertificateRole::Own);
        }
        // A pinned certificate is believed as it is.
        if !tls.authorities().is_empty() {
            for (member, certificate) in shown {
                let certificate = std::slice::from_ref(certificate);
                look(&format!("member {member}"), certificate, ChainUse::Server, CertificateRole::Own);
            }
        }
    }
    for (name, credential) in &config.users.named {
        if let UserCredential::Certificate(pair) = credential {
            let about = format!("user {}: cert", name.as_str());
            look(&about, leaf(pair.chain()), ChainUse::Client, CertificateRole::Own);
        }
    }
}

fn leaf<'a>(chain: &'a [CertificateDer<'static>]) -> &'a [CertificateDer<'static>] {
    chain.get(..1).unwrap_or_default()
}

fn add(
    about: &str,
    certificate: &CertificateDer<'static>,
    (usage, role): (ChainUse, CertificateRole),
    algorithms: &WebPkiSupportedAlgorithms,
    findings: &mut DoctorFindings,
) {
    for weakness in weaknesses(certificate, usage, role == CertificateRole::Trusted, algorithms) {
        let what = format!("the certificate of {}: {}", weakness.subject, weakness.what);
        if weakness.is_refused {
            let fix = match role {
                CertificateRole::Trusted => {
                    "replace the authority, or take it out of the file: nobody below it is admitted"
                }
                CertificateRole::Own => "issue it again, with the extension named here",
            };
            findings.error("certificate_refused", about, what, fix);
        } else {
            let fix = "issue it again with extensions (docs/migrate-to-tls.md); then strict_certificates = \
                       true admits no other of its kind";
            findings.note("certificate_weak", about, what, fix);
        }
    }
}
