//! The authority that certificates are minted from must not be one that members trust between each other: whoever stole its
//! key could join the cluster (rules 19).

use std::time::Duration;

use crate::caller::Caller;
use crate::first_minutes::dialled;
use crate::harness::binary::Version;
use crate::harness::keyward::{Keyward, Site};
use crate::harness::pki::Pair;
use crate::harness::{Auth, Cluster, Options, PeerTls, Tls, versions, wait};
use crate::revocations::command;

const LIMIT: Duration = Duration::from_secs(60);

async fn cluster(version: &Version, members: usize, peer_tls: PeerTls) -> Cluster {
    let auth = Auth::On { extra_users: 0 };
    let options = Options { members, auth, tls: Tls::Mutual, peer_tls, ..Options::default() };
    Cluster::start(version, options).await
}

fn minting(site: &Site, cluster: &Cluster, mint: &Pair) -> String {
    site.listening(cluster, ", default_user = \"alice\"")
        + "[[user]]\nname = \"alice\"\nmint = true\n"
        + &format!("[mint]\nca = {:?}\nkey = {:?}\n", mint.cert, mint.key)
}

#[tokio::test]
async fn an_authority_that_members_trust_between_each_other_mints_nothing() {
    for version in versions() {
        let cluster = cluster(&version, 1, PeerTls::Shared).await;
        let site = Site::new();
        let config = minting(&site, &cluster, &cluster.pki().mint());
        // Told before a start, by the same words.
        let file = site.write("keyward.toml", &config);
        let (code, findings, report) = dialled(file.to_str().expect("UTF-8")).await;
        assert!(code == Some(1) && findings.contains(&"error mint_trusted".to_owned()), "{report}");
        assert!(report.to_string().contains("member m0 ("), "{report}");
        let (ended, log) = Keyward::refused(site, &config).await;
        assert_eq!(ended.code(), Some(1), "{version}: {log}");
        let said = log.lines().find(|line| line.contains("mint.ca")).expect("it is said");
        let member = format!("{:x}", cluster.member_id(0).await);
        for part in ["member m0", &member, &cluster.peer_address(0).to_string()] {
            assert!(said.contains(part), "{version}: {part} in {said}");
        }
        assert!(!log.contains("minted a certificate"), "{version}: {log}");

        // Without minting it is nobody's concern.
        let site = Site::new();
        let config = site.in_front_of(&cluster);
        drop(Keyward::start(site, &config).await);
    }
}

/// Every call of a user with a minted certificate fails there.
#[tokio::test]
async fn a_member_without_client_cert_auth_is_named_by_check_and_doctor() {
    for version in versions() {
        for (tls, is_named) in [(Tls::Server, true), (Tls::Mutual, false)] {
            let auth = Auth::On { extra_users: 0 };
            let options = Options { members: 1, auth, tls, peer_tls: PeerTls::Own, ..Options::default() };
            let cluster = Cluster::start(&version, options).await;
            let site = Site::new();
            let minting = minting(&site, &cluster, &cluster.pki().mint());
            let config = format!("admin.socket = \"admin.sock\"\n{minting}");
            let file = site.write("keyward.toml", &config);
            let (code, findings, report) = dialled(file.to_str().expect("UTF-8")).await;
            let finding = "warning certificate_not_asked".to_owned();
            assert_eq!((code, findings.contains(&finding)), (Some(0), is_named), "{version}: {report}");
            let keyward = Keyward::start(site, &config).await;
            let (_, told) = command(&keyward, &["doctor"]).await;
            assert_eq!(told.contains("[certificate_not_asked] m0 ("), is_named, "{version}: {told}");
            let put = Caller::anybody(keyward.site().listen).await.put("/a/x", b"1".to_vec(), 0).await;
            assert_eq!(put.is_err(), is_named, "{version}: {put:?}");
        }
    }
}

#[tokio::test]
async fn one_that_they_do_not_trust_mints_and_a_reload_to_one_that_they_do_is_refused() {
    for version in versions() {
        let cluster = cluster(&version, 3, PeerTls::Own).await;
        let site = Site::new();
        let config = minting(&site, &cluster, &cluster.pki().mint());
        let other = minting(&site, &cluster, &cluster.peer_pki().mint());
        let file = site.write("keyward.toml", &config);
        let (code, findings, report) = dialled(file.to_str().expect("UTF-8")).await;
        assert!(code == Some(0) && !findings.iter().any(|one| one.contains("mint")), "{report}");
        let keyward = Keyward::start(site, &config).await;
        let listen = keyward.site().listen;
        Caller::anybody(listen).await.put("/a/x", b"1".to_vec(), 0).await.expect("her role allows it");

        keyward.reload(&other);
        let refused = async || {
            let count = keyward.metric("keyward_config_reloads_refused_total", &[]).await;
            (count > 0.0).then_some(())
        };
        wait::until(LIMIT, "the reload is refused", refused).await;
        let is_refusal = |line: &str| line.contains("configuration not reloaded");
        let log = keyward.logged("the refusal of the reload", is_refusal).await;
        let said = log.lines().find(|line| is_refusal(line)).expect("it is said");
        assert!(said.contains("mint.ca: member m"), "{version}: {said}");
        Caller::anybody(listen).await.put("/a/x", b"2".to_vec(), 0).await.expect("the old one mints");
        // Nobody else was harmed by our look.
        assert!(!log.contains("cannot be reached from here"), "{version}: {log}");
    }
}
