//! Client certificates as the how-tos of openssl make them: etcd's own client shows them, and acts as the user named by them. With
//! `strict_certificates` they are refused, and so are those that etcd refuses; the log names the subject and the reason.

use data_encoding::BASE64;
use rcgen::KeyPair;
use rustls::pki_types::CertificateDer;

use crate::harness::keyward::{Keyward, Site};
use crate::harness::pki::Pair;
use crate::harness::{Cluster, password, versions};
use crate::members::with_auth;
use keyward::trust::test_certificates::{ANY, CLIENT, Draft, SERVER, basic, purposes, usage};

/// A certificate of alice, the authority in the listener's file, and the reason if etcd refuses it.
struct Kind {
    name: &'static str,
    trusted: CertificateDer<'static>,
    leaf: CertificateDer<'static>,
    refusal: Option<&'static str>,
}

fn pem(der: &CertificateDer<'_>) -> String {
    format!("-----BEGIN CERTIFICATE-----\n{}\n-----END CERTIFICATE-----\n", BASE64.encode(der))
}

fn kinds(ca: &KeyPair, alice: &KeyPair) -> Vec<Kind> {
    let authority = || Draft::new("ca", "ca", ca).with(&[basic(true, None), usage(4)]);
    let v1_authority = Draft::new("ca", "ca", ca).v1().sign(ca);
    let leaf = || Draft::new("alice", "ca", alice);
    let usual = authority().sign(ca);
    let own = Draft::new("alice", "alice", alice).with(&[basic(true, None)]).sign(alice);
    let kind = |name, trusted: &CertificateDer<'static>, leaf: Draft, refusal| Kind {
        name,
        trusted: trusted.clone(),
        leaf: leaf.sign(ca),
        refusal,
    };
    let for_servers = authority().with(&[purposes(&[SERVER])]).sign(ca);
    vec![
        kind("a leaf of version 1", &usual, leaf().v1(), None),
        kind("under an authority of version 1", &v1_authority, leaf().with(&[purposes(&[CLIENT])]), None),
        kind("both of version 1", &v1_authority, leaf().v1(), None),
        kind("any purpose", &usual, leaf().with(&[purposes(&[ANY])]), None),
        kind("a leaf with CA:TRUE", &usual, leaf().with(&[basic(true, None)]), None),
        Kind { name: "self-signed, itself the file", trusted: own.clone(), leaf: own, refusal: None },
        kind("an authority for servers", &for_servers, leaf(), Some("lacks clientAuth")),
        kind("for servers", &usual, leaf().with(&[purposes(&[SERVER])]), Some("lacks clientAuth")),
        kind("of nobody", &usual, Draft::new("alice", "nobody", alice), Some("no trusted authority")),
    ]
}

async fn keyward(cluster: &Cluster, trusted: &CertificateDer<'_>, strict: bool) -> Keyward {
    let (site, server) = (Site::new(), cluster.pki().server());
    let ca = site.write("trusted.pem", &pem(trusted));
    let secret = site.write("alice-password", &password("alice"));
    let fields = format!(
        ", tls = {{ cert = {:?}, key = {:?}, client_ca = {ca:?}, client_ca_name = \"staff\", \
         strict_certificates = {strict} }}",
        server.cert, server.key
    );
    let config = site.listening(cluster, &fields)
        + &format!(
            "[[user]]\nname = \"alice\"\npassword_file = {secret:?}\n\
             [[map]]\npeer = \"cert:staff:CN=alice\"\nas = \"alice\"\n"
        );
    Keyward::start(site, &config).await
}

async fn puts(cluster: &Cluster, keyward: &Keyward, alice: &Pair, key: &str) -> bool {
    let listen = keyward.site().listen;
    let ctl =
        cluster.ctl().to(vec![format!("https://{listen}")]).with_tls(cluster.pki(), Some(alice.clone()));
    ctl.run(&["--command-timeout=4s", "put", key, "v"]).await.code == Some(0)
}

#[tokio::test]
async fn certificates_of_openssls_how_tos_are_their_user() {
    let version = versions().remove(0);
    let cluster = Cluster::start(&version, with_auth(1)).await;
    let (ca, key) = (KeyPair::generate().expect("a key"), KeyPair::generate().expect("a key"));
    let folder = tempfile::tempdir().expect("a folder");
    let write = |name: &str, text: String| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).expect("a file");
        path
    };
    for (number, kind) in kinds(&ca, &key).iter().enumerate() {
        let alice =
            Pair { cert: write("alice.crt", pem(&kind.leaf)), key: write("alice.key", key.serialize_pem()) };
        let at_key = format!("/a/{number}");
        let loose = keyward(&cluster, &kind.trusted, false).await;
        let is_served = puts(&cluster, &loose, &alice, &at_key).await;
        assert_eq!(is_served, kind.refusal.is_none(), "{version} {}: {}", kind.name, loose.log());
        // The user is alice, who may write below /a alone.
        assert!(!puts(&cluster, &loose, &alice, "/elsewhere").await, "{version} {}", kind.name);
        if let Some(reason) = kind.refusal {
            let told = loose.logged("the reason", |line| line.contains("handshakes of clients failed")).await;
            assert!(told.contains("the certificate of CN=") && told.contains(reason), "{told}");
            continue;
        }
        let read = cluster.ctl_as_root().ok(&["get", &at_key]).await;
        assert_eq!(read, format!("{at_key}\nv\n"), "{version} {}", kind.name);
        drop(loose);
        // An authority of version 1 alone is no reason for webpki.
        if kind.name != "under an authority of version 1" {
            let strict = keyward(&cluster, &kind.trusted, true).await;
            assert!(!puts(&cluster, &strict, &alice, &at_key).await, "{version} {}", kind.name);
            let told =
                strict.logged("the reason", |line| line.contains("handshakes of clients failed")).await;
            assert!(told.contains("CN=alice") && told.contains("strict_certificates"), "{told}");
        }
    }
}
