//! The checks of addresses that reach beyond this machine.
//!
//! Owns: the words for open addresses. Must not know: firewalls, and balancers that end TLS in front of
//! Keyward. Invariant: a loopback address and a unix socket are no finding.

use std::net::SocketAddr;

use super::DoctorFindings;
use keyward_config::{Address, Config, Identify};

/// Checks for passwords in plaintext, and for an open admin address.
pub(super) fn check(config: &Config, findings: &mut DoctorFindings) {
    for listener in &config.listeners {
        let Address::Tcp(address) = listener.address else { continue };
        let takes_secrets =
            listener.identify.iter().any(|way| matches!(way, Identify::Token | Identify::Jwt));
        if listener.tls.is_none() && takes_secrets && is_open(address) {
            let what = format!(
                "{address} is plaintext and reachable from other machines: passwords, tokens and values can \
                 be read on the way"
            );
            let fix = "set listener.tls, or listen on 127.0.0.1 or a unix socket; behind a balancer that \
                       ends TLS, let a firewall admit the balancer alone";
            findings.warning("plaintext_listener", format!("listener {}", listener.name), what, fix);
        }
    }
    let address = config.admin.address;
    if is_open(address) {
        let what = format!(
            "{address} is reachable from other machines: whoever connects reads metrics and the state of \
             the members"
        );
        let fix = "listen on 127.0.0.1, or let a firewall admit the monitoring alone";
        findings.warning("admin_open", "admin.address", what, fix);
    }
}

fn is_open(address: SocketAddr) -> bool {
    !address.ip().to_canonical().is_loopback()
}
