//! The checks of what `keyward serve` refuses or waits for, as far as a look from outside can tell.
//!
//! Owns: findings and fixes. Must not know: how the members were asked.

use super::DoctorFindings;
use keyward_cluster::membership::ServingState;
use keyward_config::{Config, EtcdLogin, RevocationPersistence};
use keyward_upstream::peer_urls::{PeerTrustLook, roots_of};

/// The remedy for revocations that cannot be read. Roles are changed by a quorum only, and a member without
/// one gives no token.
pub(super) fn revocation_fix(config: &Config, serving: ServingState) -> String {
    match serving {
        ServingState::LocalReadsOnly => {
            "start the missing members, or see the way out in docs/runbooks/KeywardQuorumLost.md: without a \
             quorum this replica, which has not known the revocations before, cannot log in to read them; a \
             replica that knew them still serves local reads, do not restart it"
                .to_owned()
        }
        ServingState::NoReadyVoter => {
            "start the members: the revocations are read as soon as one is ready".to_owned()
        }
        ServingState::Ready | ServingState::NoKnownLeader | ServingState::NothingKnown => {
            revocation_role(config)
        }
    }
}

/// The remedy for a login that may not read the revocations.
fn revocation_role(config: &Config) -> String {
    let fix = "see that cluster.probe or revocation.user may read and write revocation.etcd_prefix";
    match &config.revocation.keep {
        RevocationPersistence::Etcd { prefix, login: Some(login) } => {
            fix.to_owned() + &role_of(login, prefix)
        }
        RevocationPersistence::Etcd { login: None, .. }
        | RevocationPersistence::Memory
        | RevocationPersistence::File(_) => fix.to_owned(),
    }
}

/// The commands, to be given by root at etcd, that let a user without a role read and write a prefix.
pub(super) fn role_of(login: &EtcdLogin, prefix: &str) -> String {
    let user = &login.user;
    format!(
        ": etcdctl role add keyward; etcdctl role grant-permission keyward readwrite {prefix} --prefix; \
         etcdctl user grant-role {user} keyward"
    )
}

/// Checks the answers of the members' peer URLs.
pub(super) fn check(peer_trust: Option<&PeerTrustLook>, findings: &mut DoctorFindings) {
    let Some(seen) = peer_trust else { return };
    if let Some(trusted) = &seen.trusted {
        let what = format!("keyward serve would end: {trusted}");
        findings.error("mint_trusted", "mint.ca", what, MINT_APART);
    }
    for unseen in &seen.unseen {
        findings.unseen(unseen.clone());
    }
}

/// The remedy for a minting authority that members trust between each other.
const MINT_APART: &str = "make an authority for mint.ca alone, and add it to etcd's --trusted-ca-file, never \
                          to --peer-trusted-ca-file";

/// Warns of what a look at the cluster would decide.
pub(super) fn foresee(config: &Config, findings: &mut DoctorFindings) {
    let shows_certificate = config.cluster.tls.as_ref().is_some_and(|tls| tls.identity.is_some());
    let waits = |key: &str| {
        format!(
            "no user reads {key}: where auth is on at etcd, keyward serve would never be ready (keyward \
             check --dial asks)"
        )
    };
    if let RevocationPersistence::Etcd { login: None, .. } = &config.revocation.keep
        && !shows_certificate
    {
        let about = "revocation.etcd_prefix";
        findings.warning("revocation_unknown", about, waits(about), "set cluster.probe or revocation.user");
    }
    if config.policy.stored.as_ref().is_some_and(|stored| stored.login.is_none()) && !shows_certificate {
        let about = "policy.etcd_prefix";
        findings.warning("policy_unknown", about, waits(about), "set cluster.probe or policy.user");
    }
    if let Some(mint) = &config.users.mint {
        let roots = roots_of(&config.cluster);
        if mint.authority.chain().iter().any(|authority| roots.contains(authority)) {
            let what = "the authority of the members' own certificates (cluster.tls.ca) mints: where members \
                        trust it between each other too, keyward serve would end (keyward check --dial asks)";
            findings.warning("mint_trusted", "mint.ca", what, MINT_APART);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Severity;
    use super::*;
    use keyward_config::{Endpoint, Scheme};
    use keyward_etcd::identity::MemberId;
    use keyward_upstream::peer_urls::MintingCaTrusted;

    #[test]
    fn a_member_that_trusts_the_minting_authority_is_an_error_and_a_silent_one_is_unseen() {
        let url = Endpoint { scheme: Scheme::Https, host: "10.0.0.1".into(), port: 2380 };
        let trusted = MintingCaTrusted { member: MemberId(0xa), name: "m1".into(), url };
        let seen = PeerTrustLook { trusted: Some(trusted), unseen: vec!["m2".to_owned()] };
        let mut findings = DoctorFindings::default();
        check(Some(&seen), &mut findings);
        let report = findings.into_report();
        let [finding] = &report.findings[..] else { panic!("{report}") };
        assert_eq!((finding.severity, &*finding.check), (Severity::Error, "mint_trusted"));
        assert!(finding.what.contains("member m1 (") && finding.what.contains("10.0.0.1:2380"), "{report}");
        assert_eq!(report.unseen, ["m2"]);
        let mut findings = DoctorFindings::default();
        check(Some(&PeerTrustLook::default()), &mut findings);
        assert!(findings.into_report().findings.is_empty());
    }
}
