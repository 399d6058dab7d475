//! The rules of etcd for every kind of certificate, and the limits of the work for a hostile chain.

use std::slice;
use std::sync::Arc;

use proptest::prelude::*;
use rcgen::KeyPair;
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, ServerName, UnixTime};

use super::test_certificates::{
    ANY, CLIENT, CODE, Draft, ECDSA_SHA256, SERVER, alternative, assemble, basic, constraints, der,
    extension, name_of, purposes, usage,
};
use super::*;

/// An authority of a test, and the key of leaves.
struct Keys {
    ca: KeyPair,
    other: KeyPair,
    leaf: KeyPair,
}

fn keys() -> Keys {
    let key = || KeyPair::generate().unwrap();
    Keys { ca: key(), other: key(), leaf: key() }
}

const SIGNS: u8 = 0b0000_0100;

fn authority(keys: &Keys) -> Draft {
    Draft::new("ca", "ca", &keys.ca).with(&[basic(true, None), usage(SIGNS)])
}

fn leaf(keys: &Keys) -> Draft {
    Draft::new("alice", "ca", &keys.leaf)
}

fn leaf_of(subject: &str, keys: &Keys) -> Draft {
    Draft::new(subject, "ca", &keys.leaf)
}

fn at() -> UnixTime {
    UnixTime::since_unix_epoch(std::time::Duration::from_secs(1_800_000_000))
}

fn provider() -> Arc<rustls::crypto::CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

fn clients(roots: &[CertificateDer<'static>], strictness: Strictness) -> ChainVerifier {
    ChainVerifier::of_clients(roots, &[], false, strictness, &provider()).unwrap()
}

fn as_client(roots: &[CertificateDer<'static>], chain: &[CertificateDer<'static>]) -> Result<(), Refusal> {
    let verify = |strictness| clients(roots, strictness).verify(&chain[0], &chain[1..], None, at());
    let verdict = verify(Strictness::AsEtcd).map_err(|refused| refused.refusal);
    if verdict.is_err() {
        assert!(verify(Strictness::Strict).is_err(), "strict is laxer than etcd");
    }
    verdict
}

fn as_member(
    roots: &[CertificateDer<'static>],
    chain: &[CertificateDer<'static>],
    name: &str,
) -> Result<(), Refusal> {
    let verifier = ChainVerifier::of_members(roots, Strictness::AsEtcd, &provider()).unwrap();
    let name = ServerName::try_from(name.to_owned()).unwrap();
    verifier.verify(&chain[0], &chain[1..], Some(&name), at()).map_err(|refused| refused.refusal)
}

fn is_strict_refusal(roots: &[CertificateDer<'static>], leaf: &CertificateDer<'static>) -> bool {
    let verdict = clients(roots, Strictness::Strict).verify(leaf, &[], None, at());
    matches!(verdict, Err(RefusedChain { refusal: Refusal::Strict(_), .. }))
}

/// The kinds that openssl's how-tos make, and that webpki refuses.
#[test]
fn certificates_of_old_how_tos_are_taken_as_by_etcd_and_refused_if_strict() {
    let keys = keys();
    let ca = authority(&keys).sign(&keys.ca);
    let v1_ca = Draft::new("ca", "ca", &keys.ca).v1().sign(&keys.ca);
    for (kind, root, leaf) in [
        ("a leaf of version 1", &ca, leaf(&keys).v1().sign(&keys.ca)),
        ("both of version 1", &v1_ca, leaf(&keys).v1().sign(&keys.ca)),
        ("any purpose", &ca, leaf(&keys).with(&[purposes(&[ANY])]).sign(&keys.ca)),
        ("any purpose beside another", &ca, leaf(&keys).with(&[purposes(&[CODE, ANY])]).sign(&keys.ca)),
        ("a leaf with CA:TRUE", &ca, leaf(&keys).with(&[basic(true, None)]).sign(&keys.ca)),
    ] {
        let leaf = [leaf];
        assert_eq!(as_client(slice::from_ref(root), &leaf), Ok(()), "{kind}");
        assert!(is_strict_refusal(slice::from_ref(root), &leaf[0]), "{kind}");
    }
    let under_v1 = leaf(&keys).with(&[purposes(&[CLIENT])]).sign(&keys.ca);
    assert_eq!(as_client(slice::from_ref(&v1_ca), &[under_v1]), Ok(()));
    let own = Draft::new("alice", "alice", &keys.leaf).with(&[basic(true, None)]).sign(&keys.leaf);
    assert_eq!(as_client(slice::from_ref(&own), slice::from_ref(&own)), Ok(()), "openssl req -x509");
    assert!(is_strict_refusal(slice::from_ref(&own), &own));
}

#[test]
fn the_purpose_of_every_certificate_of_a_chain_counts() {
    let keys = keys();
    let ca = |oids: &[&[u8]]| authority(&keys).with(&[purposes(oids)]).sign(&keys.ca);
    let plain = leaf(&keys).sign(&keys.ca);
    let other = Err(Refusal::OtherPurpose("clientAuth"));
    assert_eq!(
        as_client(&[ca(&[SERVER])], slice::from_ref(&plain)),
        other,
        "etcd refuses it, webpki does not"
    );
    assert_eq!(as_client(&[ca(&[SERVER, CLIENT])], slice::from_ref(&plain)), Ok(()));
    assert_eq!(as_client(&[ca(&[ANY])], &[plain]), Ok(()));
    let root = [authority(&keys).sign(&keys.ca)];
    let of = |oids: &[&[u8]]| [leaf(&keys).with(&[purposes(oids)]).sign(&keys.ca)];
    assert_eq!(as_client(&root, &of(&[SERVER])), other);
    assert_eq!(as_client(&root, &of(&[CODE])), other);
    assert_eq!(as_client(&root, &of(&[])), Ok(()), "an empty list limits nothing in Go");
}

#[test]
fn only_authorities_vouch_for_others() {
    let keys = keys();
    let plain = [leaf(&keys).sign(&keys.ca)];
    let root = |extensions: &[Vec<u8>]| [Draft::new("ca", "ca", &keys.ca).with(extensions).sign(&keys.ca)];
    assert_eq!(as_client(&root(&[]), &plain), Err(Refusal::NoAuthority));
    assert_eq!(as_client(&root(&[basic(false, None)]), &plain), Err(Refusal::NoAuthority));
    assert_eq!(as_client(&root(&[basic(true, None), usage(0x80)]), &plain), Err(Refusal::NoAuthority));
    assert_eq!(as_client(&root(&[basic(true, Some(0))]), &plain), Ok(()));

    // A client's own certificate, also of version 1, makes no other.
    let ca = [authority(&keys).sign(&keys.ca)];
    let by_alice = Draft::new("root", "alice", &keys.other).sign(&keys.leaf);
    for alice in [leaf(&keys), leaf(&keys).v1(), leaf(&keys).with(&[basic(false, None)])] {
        let chain = [by_alice.clone(), alice.sign(&keys.ca)];
        assert_eq!(as_client(&ca, &chain), Err(Refusal::NoAuthority));
    }
    let short = [authority(&keys).with(&[]).sign(&keys.ca), root(&[basic(true, Some(0))])[0].clone()];
    let middle = Draft::new("alice", "ca", &keys.leaf).with(&[basic(true, None)]).sign(&keys.ca);
    assert_eq!(as_client(&short[..1], &[by_alice.clone(), middle.clone()]), Ok(()));
    assert_eq!(as_client(&short[1..], &[by_alice, middle]), Err(Refusal::PathTooLong));
}

#[test]
fn signatures_and_times_count_in_every_certificate() {
    let keys = keys();
    let root = [authority(&keys).sign(&keys.ca)];
    let verdict = |draft: Draft, key: &KeyPair| as_client(&root, &[draft.sign(key)]);
    assert_eq!(verdict(leaf(&keys), &keys.other), Err(Refusal::BadSignature));
    assert_eq!(verdict(Draft::new("alice", "nobody", &keys.leaf), &keys.ca), Err(Refusal::UnknownIssuer));
    let times = |from: &[u8], to: &[u8]| der(0x30, &[&der(0x17, &[from]), &der(0x17, &[to])]);
    let old = times(b"100101000000Z", b"110101000000Z");
    let late = times(b"400101000000Z", b"410101000000Z");
    assert_eq!(verdict(Draft { validity: old.clone(), ..leaf(&keys) }, &keys.ca), Err(Refusal::Expired));
    assert_eq!(verdict(Draft { validity: late, ..leaf(&keys) }, &keys.ca), Err(Refusal::NotYet));
    let expired = [Draft { validity: old, ..authority(&keys) }.sign(&keys.ca)];
    let plain = leaf(&keys).sign(&keys.ca);
    assert_eq!(as_client(&expired, &[plain]), Err(Refusal::Expired), "webpki asks no root for its time");
    let sha1 = &[0x30, 9, 6, 7, 0x2a, 0x86, 0x48, 0xce, 0x3d, 4, 1][..];
    let weak = Draft { algorithm: sha1.to_vec(), outer_algorithm: sha1.to_vec(), ..leaf(&keys) };
    assert_eq!(verdict(weak, &keys.ca), Err(Refusal::UnsupportedSignature));
    let unknown = leaf(&keys).with(&[extension(&[0x2a, 3], true, &[5, 0])]);
    assert_eq!(verdict(unknown, &keys.ca), Err(Refusal::UnknownCritical));
    let harmless = leaf(&keys).with(&[extension(&[0x2a, 3], false, &[5, 0])]);
    assert_eq!(verdict(harmless, &keys.ca), Ok(()));
    let policies = leaf(&keys).with(&[extension(&[0x55, 0x1d, 36], true, &[0x30, 3, 0x80, 1, 0])]);
    assert_eq!(verdict(policies, &keys.ca), Err(Refusal::PolicyRules));
}

#[test]
fn forms_that_go_cannot_parse_are_unreadable() {
    let keys = keys();
    let root = [authority(&keys).sign(&keys.ca)];
    let sha384 = &[0x30, 10, 6, 8, 0x2a, 0x86, 0x48, 0xce, 0x3d, 4, 3, 3][..];
    let twice = extension(&[0x2a, 3], false, &[5, 0]);
    let printable = name_of(19, b"al@ce");
    let universal = name_of(28, b"\0\0\0a");
    for (kind, draft) in [
        ("version 4", Draft { version: vec![0xa0, 3, 2, 1, 3], ..leaf(&keys) }),
        ("a negative serial", Draft { serial: vec![0x80], ..leaf(&keys) }),
        ("two algorithms", Draft { algorithm: sha384.to_vec(), ..leaf(&keys) }),
        ("an extension twice", leaf(&keys).with(&[twice.clone(), twice])),
        ("text", Draft { subject: printable, ..leaf(&keys) }),
        ("kind of text", Draft { subject: universal, ..leaf(&keys) }),
        ("an address", leaf(&keys).with(&[alternative(&[&der(0x87, &[&[1, 2, 3]])])])),
        ("a uri", leaf(&keys).with(&[alternative(&[&der(0x86, &[b"http://a b/"])])])),
        ("a host", leaf(&keys).with(&[alternative(&[&der(0x82, &[b"\xe4"])])])),
        ("key usage", leaf(&keys).with(&[extension(&[0x55, 0x1d, 15], true, &[3, 2, 1, 0x81])])),
        ("a critical identifier", leaf(&keys).with(&[extension(&[0x55, 0x1d, 14], true, &[4, 1, 1])])),
        ("another class", leaf(&keys).with(&[[&[0x30, 7, 0x46, 3, 0x55, 0x1d, 19], &[4, 0][..]].concat()])),
        ("a host in pieces", leaf(&keys).with(&[alternative(&[&der(0xa2, &[&der(0x82, &[b"a"])])])])),
        ("more in an extension", leaf(&keys).with(&[der(0x30, &[&[6, 2, 0x2a, 3], &[4, 0], &[5, 0]])])),
        ("another class of text", Draft { subject: name_of(0x4c, b"alice"), ..leaf(&keys) }),
        ("extensions before version 3", leaf(&keys).v1().with(&[purposes(&[CLIENT])])),
    ] {
        let verdict = as_client(&root, &[draft.sign(&keys.ca)]);
        assert!(matches!(verdict, Err(Refusal::Unreadable(_))), "{kind}: {verdict:?}");
    }
    let many = (0..65).map(|number| extension(&[0x2a, 3, number], false, &[5, 0])).collect::<Vec<_>>();
    let verdict = |count: usize| as_client(&root, &[leaf(&keys).with(&many[..count]).sign(&keys.ca)]);
    assert_eq!(verdict(64), Ok(()));
    assert!(
        matches!(verdict(65), Err(Refusal::Unreadable(_))),
        "thousands would be compared with each other"
    );
    let good = leaf(&keys).sign(&keys.ca);
    let longer = CertificateDer::from([&good[..], &[0]].concat());
    assert!(matches!(as_client(&root, &[longer]), Err(Refusal::Unreadable(_))));
    let junk = CertificateDer::from(vec![0x30, 0]);
    assert!(matches!(as_client(&root, &[good, junk]), Err(Refusal::Unreadable(_))), "as in Go, all are read");
}

/// Go leaves this to the handshake; there would be no reason in the log.
#[test]
fn a_key_that_no_handshake_can_prove_is_refused() {
    let keys = keys();
    let root = [authority(&keys).sign(&keys.ca)];
    let key = der(0x30, &[&[0x30, 4, 6, 2, 0x2a, 3], &[3, 2, 0, 1]]);
    let verdict = as_client(&root, &[Draft { key, ..leaf(&keys) }.sign(&keys.ca)]);
    assert_eq!(verdict, Err(Refusal::UnsupportedKey));
}

#[test]
fn names_stay_within_the_constraints_of_every_authority() {
    let keys = keys();
    let verdict = |limits: Vec<u8>, names: &[&[u8]]| {
        let root = authority(&keys).with(&[limits]).sign(&keys.ca);
        as_client(&[root], &[leaf(&keys).with(&[alternative(names)]).sign(&keys.ca)])
    };
    let dns = |name: &[u8]| der(0x82, &[name]);
    let permitted = || constraints(&[&dns(b"example.com")], &[]);
    assert_eq!(verdict(permitted(), &[&dns(b"a.example.com")]), Ok(()));
    assert_eq!(verdict(permitted(), &[&dns(b"a.example.org")]), Err(Refusal::NameOutside));
    assert_eq!(verdict(permitted(), &[&dns(b"a.example.com"), &dns(b"b.test")]), Err(Refusal::NameOutside));
    let excluded = || constraints(&[], &[&dns(b"a.example.com")]);
    assert_eq!(verdict(excluded(), &[&dns(b"*.example.com")]), Err(Refusal::NameOutside));
    assert_eq!(verdict(excluded(), &[&dns(b"b.example.com")]), Ok(()));
    let network = || constraints(&[&der(0x87, &[&[10, 0, 0, 0, 255, 0, 0, 0]])], &[]);
    assert_eq!(verdict(network(), &[&der(0x87, &[&[10, 1, 1, 1]])]), Ok(()));
    assert_eq!(verdict(network(), &[&der(0x87, &[&[11, 1, 1, 1]])]), Err(Refusal::NameOutside));
    let hosts = || constraints(&[&der(0x86, &[b"cluster.local"])], &[]);
    assert_eq!(verdict(hosts(), &[&der(0x86, &[b"spiffe://a.cluster.local/web"])]), Ok(()));
    assert_eq!(verdict(hosts(), &[&der(0x86, &[b"spiffe://other/web"])]), Err(Refusal::NameOutside));
    assert_eq!(verdict(hosts(), &[&der(0x86, &[b"urn:a:b"])]), Err(Refusal::NameOutside));
    let mail = || constraints(&[&der(0x81, &[b"example.com"])], &[]);
    assert_eq!(verdict(mail(), &[&der(0x81, &[b"a@b.example.com"])]), Ok(()));
    assert_eq!(verdict(mail(), &[&der(0x81, &[b"a@example.org"])]), Err(Refusal::NameOutside));
    let directory = constraints(&[&der(0xa4, &[&name_of(12, b"a")])], &[]);
    let verdict = verdict(directory, &[&dns(b"a")]);
    assert_eq!(verdict, Err(Refusal::UnknownCritical));
}

#[test]
fn a_member_is_verified_for_the_dialled_name() {
    let keys = keys();
    let root = [authority(&keys).sign(&keys.ca)];
    let of = |names: &[&[u8]]| [leaf(&keys).with(&[alternative(names)]).sign(&keys.ca)];
    let wildcard = of(&[&der(0x82, &[b"*.Example.com"]), &der(0x87, &[&[127, 0, 0, 1]])]);
    assert_eq!(as_member(&root, &wildcard, "m1.example.com"), Ok(()));
    assert_eq!(as_member(&root, &wildcard, "127.0.0.1"), Ok(()));
    for other in ["example.com", "a.b.example.com", "127.0.0.2", "alice"] {
        assert_eq!(as_member(&root, &wildcard, other), Err(Refusal::OtherHost(other.to_owned())), "{other}");
    }
    let v1 = [leaf(&keys).v1().sign(&keys.ca)];
    assert_eq!(as_member(&root, &v1, "alice"), Err(Refusal::OtherHost("alice".to_owned())), "as in Go");
    let for_clients =
        leaf(&keys).with(&[purposes(&[CLIENT]), alternative(&[&der(0x82, &[b"a"])])]).sign(&keys.ca);
    assert_eq!(as_member(&root, &[for_clients], "a"), Err(Refusal::OtherPurpose("serverAuth")));
    let authority =
        leaf(&keys).with(&[basic(true, None), alternative(&[&der(0x82, &[b"a"])])]).sign(&keys.ca);
    assert_eq!(as_member(&root, &[authority], "a"), Ok(()), "openssl req -x509");
}

fn revocations(keys: &Keys, serials: &[u8]) -> CertificateRevocationListDer<'static> {
    let mut params = rcgen::CertificateParams::new(Vec::new()).unwrap();
    params.distinguished_name = rcgen::DistinguishedName::new();
    params.distinguished_name.push(rcgen::DnType::CommonName, "ca");
    params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let issuer = rcgen::Issuer::new(params, &keys.ca);
    let revoked = |&serial: &u8| rcgen::RevokedCertParams {
        serial_number: rcgen::SerialNumber::from(vec![serial]),
        revocation_time: rcgen::date_time_ymd(2020, 1, 1),
        reason_code: None,
        invalidity_date: None,
    };
    let list = rcgen::CertificateRevocationListParams {
        this_update: rcgen::date_time_ymd(2020, 1, 1),
        next_update: rcgen::date_time_ymd(2049, 1, 1),
        crl_number: rcgen::SerialNumber::from(1),
        issuing_distribution_point: None,
        revoked_certs: serials.iter().map(revoked).collect(),
        key_identifier_method: rcgen::KeyIdMethod::Sha256,
    };
    list.signed_by(&issuer).unwrap().der().clone()
}

#[test]
fn a_revocation_counts_for_certificates_that_webpki_does_not_read() {
    let keys = keys();
    let ca = Draft::new("ca", "ca", &keys.ca).with(&[basic(true, None), usage(SIGNS | 2)]).sign(&keys.ca);
    let of = |serials: &[u8]| {
        let lists = [revocations(&keys, serials)];
        ChainVerifier::of_clients(slice::from_ref(&ca), &lists, false, Strictness::AsEtcd, &provider())
            .unwrap()
    };
    for draft in [leaf(&keys), leaf(&keys).v1(), leaf(&keys).with(&[purposes(&[ANY])])] {
        let leaf = draft.sign(&keys.ca);
        let verdict = |serials: &[u8]| of(serials).verify(&leaf, &[], None, at()).map_err(|r| r.refusal);
        assert_eq!(verdict(&[9]), Err(Refusal::Revoked));
        assert_eq!(verdict(&[8]), Ok(()), "another serial number");
    }
    // A list by another key tells nothing, and an authority without the right makes no lists.
    let other = Keys { ca: KeyPair::generate().unwrap(), ..self::keys() };
    let no_lists = authority(&keys).sign(&keys.ca);
    for (root, list) in [(&ca, revocations(&other, &[])), (&no_lists, revocations(&keys, &[]))] {
        let roots = slice::from_ref(root);
        let verifier =
            ChainVerifier::of_clients(roots, &[list], false, Strictness::AsEtcd, &provider()).unwrap();
        let v1 = leaf(&keys).v1().sign(&keys.ca);
        let verdict = verifier.verify(&v1, &[], None, at()).map_err(|refused| refused.refusal);
        assert_eq!(verdict, Err(Refusal::UnknownRevocation));
    }
}

/// A chain of many certificates with the same names, by keys of a stranger's choice.
#[test]
fn a_hostile_chain_costs_few_signature_checks() {
    let keys = keys();
    let root = [authority(&keys).sign(&keys.ca)];
    let own = |serial: u8, subject: &str, issuer: &str| {
        let draft = Draft::new(subject, issuer, &keys.other).with(&[basic(true, None)]);
        Draft { serial: vec![serial], ..draft }.sign(&keys.other)
    };
    let verifier = clients(&root, Strictness::AsEtcd);
    let all_by_root: Vec<_> = (1..=31).map(|serial| own(serial, "ca", "ca")).collect();
    let key = || KeyPair::generate().unwrap();
    let many_keys: Vec<_> = (1..=31_u8)
        .map(|serial| {
            let draft = Draft::new("ca", "ca", &key()).with(&[basic(true, None)]);
            Draft { serial: vec![serial], ..draft }.sign(&keys.other)
        })
        .collect();
    for others in [&all_by_root, &many_keys] {
        let leaf = Draft::new("root", "ca", &keys.leaf).sign(&keys.other);
        let (verdict, work) = verifier.verify_within(&leaf, others, None, at());
        assert!(verdict.is_err());
        assert!(work.signature_checks() <= MAX_SIGNATURE_CHECKS, "{}", work.signature_checks());
    }
    // With several authorities of the name every pair is another check, up to the limit.
    let namesakes: Vec<_> = (0..4)
        .map(|_| {
            let key = key();
            Draft::new("ca", "ca", &key).with(&[basic(true, None)]).sign(&key)
        })
        .collect();
    let leaf = Draft::new("root", "ca", &keys.leaf).sign(&keys.other);
    let (verdict, work) =
        clients(&namesakes, Strictness::AsEtcd).verify_within(&leaf, &many_keys, None, at());
    assert!(verdict.is_err());
    assert_eq!(work.signature_checks(), MAX_SIGNATURE_CHECKS);
    // The stranger's own signatures are never checked: the trusted key's comes first.
    let chain: Vec<_> = (0..6).map(|n| own(n + 1, &format!("i{n}"), &format!("i{}", n + 1))).collect();
    let top = own(9, "i6", "ca");
    let leaf = Draft::new("root", "i0", &keys.leaf).sign(&keys.other);
    for others in [chain.clone(), [&chain[..5], &[own(8, "i5", "ca"), top][..]].concat()] {
        let (verdict, work) = verifier.verify_within(&leaf, &others, None, at());
        assert!(verdict.is_err());
        assert!(work.signature_checks() <= 1, "{}", work.signature_checks());
    }
    // Names are compared once the signatures are good: a stranger's constraints cost nothing.
    let limits = constraints(&[], &[&der(0x82, &[b"a.test"])]);
    let limited = Draft::new("ca", "ca", &keys.other).with(&[basic(true, None), limits]);
    let names = leaf_of("root", &keys).with(&[alternative(&[&der(0x82, &[b"b.test"])])]).sign(&keys.other);
    let middle = Draft { serial: vec![8], ..limited }.sign(&keys.other);
    let (verdict, work) = verifier.verify_within(&names, &[middle], None, at());
    assert!(verdict.is_err());
    assert_eq!(work.comparisons(), 0);
    let too_many: Vec<_> = (0..32).map(|n| own(n + 1, "ca", "ca")).collect();
    let verdict = verifier.verify(&leaf, &too_many, None, at()).map_err(|refused| refused.refusal);
    assert_eq!(verdict, Err(Refusal::TooMany(31)));
}

#[test]
fn a_refusal_names_the_certificate_in_printable_text() {
    let keys = keys();
    let root = [authority(&keys).sign(&keys.ca)];
    let subject = name_of(12, "al\u{202e}ice\n\u{1b}[0m".as_bytes());
    let leaf = Draft { subject, ..leaf(&keys) }.sign(&keys.other);
    let refused = clients(&root, Strictness::AsEtcd).verify(&leaf, &[], None, at()).unwrap_err();
    assert_eq!(
        refused.to_string(),
        "the certificate of CN=al\\u{202e}ice\\n\\u{1b}[0m: its signature is not of the authority with its \
         issuer's name"
    );
}

#[test]
fn weak_certificates_are_named_and_refused_ones_are_refused() {
    let keys = keys();
    let algorithms = provider().signature_verification_algorithms;
    let of = |der: &CertificateDer<'static>, is_trusted| {
        let all = weaknesses(der, ChainUse::Client, is_trusted, &algorithms);
        all.iter().map(|weakness| weakness.is_refused).collect::<Vec<_>>()
    };
    let good = leaf(&keys).with(&[purposes(&[CLIENT])]).sign(&keys.ca);
    assert!(of(&good, false).is_empty());
    assert!(of(&authority(&keys).sign(&keys.ca), true).is_empty());
    assert_eq!(of(&leaf(&keys).v1().sign(&keys.ca), false), [false]);
    assert_eq!(of(&leaf(&keys).with(&[purposes(&[ANY])]).sign(&keys.ca), false), [false]);
    assert_eq!(of(&Draft::new("ca", "ca", &keys.ca).v1().sign(&keys.ca), true), [false]);
    assert_eq!(of(&leaf(&keys).with(&[purposes(&[SERVER])]).sign(&keys.ca), false), [true]);
    assert_eq!(of(&authority(&keys).with(&[purposes(&[SERVER])]).sign(&keys.ca), true), [true]);
    assert_eq!(of(&leaf(&keys).sign(&keys.ca), true), [false]);
    assert_eq!(of(&CertificateDer::from(vec![1, 2, 3]), true), [true]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// A signature of the authority over any bytes: nothing panics, and the certificate is read or not.
    #[test]
    fn no_bytes_panic(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6),
        cut in any::<prop::sample::Index>(),
        is_signed: bool,
    ) {
        let keys = keys();
        let draft = leaf(&keys).with(&[
            basic(true, Some(3)), usage(0x84), purposes(&[CLIENT, ANY]),
            alternative(&[&der(0x82, &[b"a.test"]), &der(0x86, &[b"spiffe://a/b"]), &der(0x81, &[b"a@b"])]),
            constraints(&[&der(0x82, &[b"a.test"])], &[&der(0x87, &[&[10, 0, 0, 0, 255, 0, 0, 0]])]),
        ]);
        let change = |mut bytes: Vec<u8>| {
            for (place, value) in &changes {
                let place = place.index(bytes.len());
                bytes[place] = *value;
            }
            let length = bytes.len() - cut.index(3);
            bytes.truncate(length);
            bytes
        };
        let made = if is_signed {
            assemble(&change(draft.signed_part()), ECDSA_SHA256, &keys.ca)
        } else {
            CertificateDer::from(change(draft.sign(&keys.ca).to_vec()))
        };
        let root = [authority(&keys).sign(&keys.ca)];
        let verifier = clients(&root, Strictness::Strict);
        drop(verifier.verify(&made, slice::from_ref(&made), None, at()));
        drop(subject_text(&made));
        drop(ChainVerifier::of_clients(slice::from_ref(&made), &[], false, Strictness::AsEtcd, &provider()));
    }
}
