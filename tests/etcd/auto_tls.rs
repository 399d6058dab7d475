//! etcd with `--auto-tls`: each member shows a P-521 certificate that it made itself. Pinned, it is believed; another is not, and the
//! reason is told; unverified members are served loudly.

use std::time::Duration;

use keyward::pem::CertificateFingerprint;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;
use serde_json::Value;

use crate::harness::ctl::Ctl;
use crate::harness::keyward::{Keyward, Site};
use crate::harness::{Auth, Cluster, Options, Tls, versions, wait};
use crate::revocations::command;

const LIMIT: Duration = Duration::from_secs(60);

fn pin(cluster: &Cluster, i: usize) -> CertificateFingerprint {
    let file = cluster.folder().join(format!("m{i}/fixtures/client/cert.pem"));
    CertificateFingerprint::of(&CertificateDer::from_pem_file(file).expect("etcd made itself a certificate"))
}

fn config(site: &Site, cluster: &Cluster, trust: &str) -> String {
    format!("{}admin.socket = \"admin.sock\"\n{trust}\n", site.in_front_of(cluster))
}

/// What is said of a check that the doctor finds, once it does.
async fn finding(keyward: &Keyward, check: &str) -> (String, String) {
    let look = async || {
        let (_, said) = command(keyward, &["doctor", "-o", "json"]).await;
        let report: Value = serde_json::from_str(&said).ok()?;
        let found = report["findings"].as_array()?.iter().find(|one| one["check"] == check)?;
        Some((found["severity"].as_str()?.to_owned(), found["what"].as_str()?.to_owned()))
    };
    wait::until(LIMIT, &format!("{check} is found"), look).await
}

async fn serves(keyward: &Keyward, cluster: &Cluster) {
    let ctl = Ctl::new(cluster.version(), vec![keyward.url()]).as_user("root");
    ctl.ok(&["put", "k", "v"]).await;
    assert!(ctl.ok(&["get", "k"]).await.contains('v'));
    let ready = async || (keyward.metric("keyward_member_ready", &[]).await == 3.0).then_some(());
    wait::until(LIMIT, "all are ready", ready).await;
}

#[tokio::test]
async fn members_with_certificates_of_their_own_are_pinned() {
    for version in versions() {
        let auth = Auth::On { extra_users: 0 };
        let cluster =
            Cluster::start(&version, Options { members: 3, tls: Tls::Auto, auth, ..Options::default() })
                .await;
        let pins: Vec<String> = (0..3).map(|i| pin(&cluster, i).to_string()).collect();

        let site = Site::new();
        let lines = config(&site, &cluster, &format!("cluster.tls.pinned_sha256 = {pins:?}"));
        let keyward = Keyward::start(site, &lines).await;
        serves(&keyward, &cluster).await;
        assert_eq!(keyward.metric("keyward_members_unverified", &[]).await, 0.0);

        // A pin that no member has: nobody is believed, and the fingerprint that was shown is told.
        let site = Site::new();
        let wrong = CertificateFingerprint::of(&CertificateDer::from(b"of nobody".to_vec()));
        let lines = config(&site, &cluster, &format!("cluster.tls.pinned_sha256 = ['{wrong}']"));
        let refused = Keyward::start_unready(site, &lines).await;
        let (severity, what) = finding(&refused, "address_unanswered").await;
        assert!(pins.iter().any(|pin| what.contains(pin)), "{what}");
        let told = async || refused.log().contains("its certificate is not pinned").then_some(());
        wait::until(LIMIT, "the log has the reason", told).await;
        assert_eq!(refused.admin("/readyz").await.0, 503);
        println!("{version}: {severity}: {what}");

        // The same through an authority that did not sign it.
        let site = Site::new();
        let lines = config(&site, &cluster, &format!("cluster.tls.ca = {:?}", cluster.pki().ca));
        let refused = Keyward::start_unready(site, &lines).await;
        let (_, what) = finding(&refused, "address_unanswered").await;
        assert!(what.contains("cluster.tls.ca does not vouch for it"), "{what}");
        println!("{version}: {what}");

        let site = Site::new();
        let lines = config(&site, &cluster, "cluster.tls.insecure_skip_verify = true");
        let loud = Keyward::start(site, &lines).await;
        serves(&loud, &cluster).await;
        let warnings = || loud.log().matches("members are NOT verified").count();
        loud.logged("the warning", |line| line.contains("members are NOT verified")).await;
        assert_eq!(warnings(), 1, "{}", loud.log());
        loud.reload(&lines);
        let counted = async || loud.log().contains("warnings stand as before").then_some(());
        wait::until(LIMIT, "a reload counts it", counted).await;
        assert_eq!(warnings(), 1, "{}", loud.log());
        assert_eq!(loud.metric("keyward_members_unverified", &[]).await, 1.0);
        assert_eq!(finding(&loud, "members_unverified").await.0, "error");
    }
}
