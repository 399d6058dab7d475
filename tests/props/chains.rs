//! Certificates of peers: bytes of anybody neither panic nor are believed, and only what a trusted authority signed is.

use std::sync::{Arc, LazyLock};
use std::time::Duration;

use keyward::trust::{ChainVerifier, Strictness, subject_text};
use rcgen::KeyPair;
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, ServerName, UnixTime};

use crate::choices::Choices;
use keyward::trust::test_certificates::{
    ANY, CLIENT, CODE, Draft, ECDSA_SHA256, SERVER, alternative, assemble, basic, constraints, der,
    extension, name_of, purposes, usage,
};

pub(crate) const TARGETS: [fn(&[u8]); 4] = [any_bytes, changed, signed, any_chain];

static CA: LazyLock<KeyPair> = LazyLock::new(|| KeyPair::generate().expect("a key"));
static STRANGER: LazyLock<KeyPair> = LazyLock::new(|| KeyPair::generate().expect("a key"));

static ROOT: LazyLock<CertificateDer<'static>> =
    LazyLock::new(|| Draft::new("ca", "ca", &CA).with(&[basic(true, None), usage(4)]).sign(&CA));

static VERIFIERS: LazyLock<[ChainVerifier; 2]> = LazyLock::new(|| {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let roots = [ROOT.clone()];
    let no_lists: &[CertificateRevocationListDer<'static>] = &[];
    let clients = ChainVerifier::of_clients(&roots, no_lists, false, Strictness::AsEtcd, &provider);
    let members = ChainVerifier::of_members(&roots, Strictness::AsEtcd, &provider);
    [clients.expect("a root"), members.expect("a root")]
});

fn leaf() -> Draft {
    Draft::new("alice", "ca", &STRANGER).with(&[
        purposes(&[CLIENT, SERVER]),
        alternative(&[
            &der(0x82, &[b"a.test"]),
            &der(0x86, &[b"spiffe://a.test/b"]),
            &der(0x81, &[b"a@b.test"]),
        ]),
        constraints(&[&der(0x82, &[b"test"])], &[&der(0x87, &[&[10, 0, 0, 0, 255, 0, 0, 0]])]),
        extension(&[0x55, 0x1d, 35], false, &[0x30, 4, 0x80, 2, 1, 2]),
    ])
}

fn is_accepted(chain: &[CertificateDer<'static>]) -> bool {
    let now = UnixTime::since_unix_epoch(Duration::from_secs(1_800_000_000));
    let name = ServerName::try_from("a.test").expect("a name");
    let [clients, members] = &*VERIFIERS;
    let (leaf, others) = chain.split_first().expect("a leaf");
    drop(subject_text(leaf));
    let is_client = clients.verify(leaf, others, None, now).is_ok();
    is_client | members.verify(leaf, others, Some(&name), now).is_ok()
}

fn bend(bytes: &mut [u8], choices: &mut Choices<'_>) {
    for _ in 0..choices.below(4) {
        let (place, value) = (choices.below(bytes.len()), choices.byte());
        bytes[place] = value;
    }
}

fn any_bytes(input: &[u8]) {
    let made = CertificateDer::from(input.to_vec());
    assert!(!is_accepted(std::slice::from_ref(&made)), "nobody signed it");
    assert!(!is_accepted(&[made.clone(), made.clone(), ROOT.clone()]));
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let list = CertificateRevocationListDer::from(input.to_vec());
    drop(ChainVerifier::of_clients(&[made], &[list], true, Strictness::Strict, &provider));
}

/// Whatever is changed behind the authority's back: accepted means that the signed part is as it was.
fn changed(input: &[u8]) {
    let part = leaf().signed_part();
    let mut made = assemble(&part, ECDSA_SHA256, &CA).to_vec();
    bend(&mut made, &mut Choices::new(input));
    if is_accepted(&[CertificateDer::from(made.clone())]) {
        assert!(made.windows(part.len()).any(|window| window == part), "another signed part: {made:?}");
    }
}

/// Whatever the authority signs.
fn signed(input: &[u8]) {
    let mut choices = Choices::new(input);
    let mut part = if choices.flag() { leaf().signed_part() } else { choices.rest().to_vec() };
    if !part.is_empty() {
        bend(&mut part, &mut choices);
    }
    is_accepted(&[assemble(&part, ECDSA_SHA256, &CA)]);
}

/// Chains of certificates with a few names and two keys: accepted only if the trusted key signed one of them.
fn any_chain(input: &[u8]) {
    let mut choices = Choices::new(input);
    let names = ["ca", "alice", "middle"];
    let mut is_signed = false;
    let mut chain = Vec::new();
    while chain.len() < 2 || !choices.is_empty() && chain.len() < 40 {
        let (subject, issuer) = (names[choices.below(3)], names[choices.below(3)]);
        let mut draft = Draft::new(subject, issuer, &STRANGER);
        draft.serial = vec![choices.byte() & 0x7f];
        if choices.flag() {
            draft = draft.with(&[basic(choices.flag(), choices.flag().then_some(1))]);
        }
        if choices.flag() {
            draft = draft.with(&[purposes(&[[CLIENT, SERVER, ANY, CODE][choices.below(4)]])]);
        }
        if choices.one_in(4) {
            draft = draft.v1();
            draft.extensions.clear();
        }
        if choices.one_in(8) {
            draft.issuer = name_of(19, issuer.as_bytes());
        }
        let by_ca = choices.one_in(4);
        is_signed |= by_ca;
        chain.push(draft.sign(if by_ca { &CA } else { &STRANGER }));
    }
    assert!(!is_accepted(&chain) || is_signed, "no trusted key signed any of it");
}
