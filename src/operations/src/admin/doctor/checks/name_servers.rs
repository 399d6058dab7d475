//! Name servers that fail, and names that they do not answer for.
//!
//! Owns: the findings. Must not know: the lookups.

use super::DoctorFindings;
use keyward_config::Config;
use keyward_dial::names::NameTrouble;

pub(super) fn check(config: &Config, troubles: &[NameTrouble], findings: &mut DoctorFindings) {
    let fix = if config.cluster.discovery.dns.is_empty() {
        "see that the name servers of /etc/resolv.conf answer (dig @SERVER NAME), or take a dead one out"
    } else {
        "see that the name servers of cluster.dns and of /etc/resolv.conf answer (dig @SERVER NAME), or take \
         a dead one out"
    };
    for NameTrouble { about, what, is_served, .. } in troubles {
        if *is_served {
            findings.warning("name_servers", about.clone(), what.clone(), fix);
        } else {
            findings.error("name_servers", about.clone(), what.clone(), fix);
        }
    }
}
