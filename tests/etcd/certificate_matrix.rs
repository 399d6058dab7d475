//! The verdict on certificates: Keyward's beside Go's, for clients and for members, over every combination of roots, intermediates and
//! leaves, and over random changes that the authority has signed. Nothing that Go refuses is accepted. What Go accepts is accepted, but
//! for `DIFFERENCES`, each of which stands in docs/differences.md.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead as _, BufReader, BufWriter, Write as _};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use data_encoding::BASE64;
use keyward::trust::{ChainVerifier, ChainVerifierError, Strictness};
use rcgen::KeyPair;
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, ServerName, UnixTime};
use serde_json::{Value, json};

use crate::harness::binary::full;
use keyward::trust::test_certificates::{
    ANY, CLIENT, CODE, Draft, SERVER, alternative, assemble, basic, constraints, der, extension, name_of,
    purposes, usage,
};

const NOW: u64 = 1_800_000_000;
const HOST: &str = "m1.example.com";

/// What Go accepts and Keyward refuses: a part of the case's name, and the reason.
const DIFFERENCES: &[(&str, &str)] = &[
    ("extensions in version 1", "Go ignores them: a certificate of two meanings"),
    ("extensions in version 2", "the same"),
    ("a host in pieces", "Go ignores the name, x509-parser reads it: a certificate of two meanings"),
    ("a field behind an extension", "Go ignores it: the same"),
    ("times without seconds", "RFC 5280 demands seconds, and UTC"),
    ("times with a zone", "the same"),
    ("a uri with a user", "only URIs that every reader takes alike"),
    ("a uri with an address", "the same"),
    ("a uri without a scheme", "the same"),
    ("policy constraints", "policies are not evaluated"),
    ("policy mappings", "the same"),
    ("a chain of nine", "eight certificates at most"),
    ("a p521 key", "ring verifies none; for members the p521 crate does"),
];

/// Reasons for which Keyward alone refuses a changed certificate.
const STRICTER: &[(&str, &str)] = &[
    ("policy constraints or mappings", "policies are not evaluated"),
    ("extensions, which its version does not have", "Go ignores them: a certificate of two meanings"),
    ("it is no X.509 certificate", "bytes behind a field, and times without seconds, which Go takes"),
    ("it is not DER", "in a part that Go does not look at"),
    ("subject alternative names are malformed", "odd URIs, and names of unknown kinds"),
];

/// What Go refuses and the verifier of chains accepts: a part of Go's reason. No client gets in by it.
const PROVED_LATER: &[(&str, &str)] =
    &[("not on curve", "no private key belongs to such a key, so no signature of a handshake is good")];

/// Roots and a chain, leaf first.
struct Case {
    name: String,
    roots: Vec<CertificateDer<'static>>,
    chain: Vec<CertificateDer<'static>>,
}

struct Keys {
    ca: KeyPair,
    middle: KeyPair,
    leaf: KeyPair,
    other: KeyPair,
}

fn times(from: &[u8], to: &[u8]) -> Vec<u8> {
    der(0x30, &[&der(0x17, &[from]), &der(0x17, &[to])])
}

fn dns(name: &str) -> Vec<u8> {
    der(0x82, &[name.as_bytes()])
}

const SIGNS: u8 = 0b0000_0100;
/// ecdsa-with-SHA384, sha256WithRSAEncryption, ecdsa-with-SHA1, Ed25519.
const SHA384: &[u8] = &[0x30, 10, 6, 8, 0x2a, 0x86, 0x48, 0xce, 0x3d, 4, 3, 3];
const SHA1: &[u8] = &[0x30, 9, 6, 7, 0x2a, 0x86, 0x48, 0xce, 0x3d, 4, 1];
const ED25519: &[u8] = &[0x30, 5, 6, 3, 0x2b, 0x65, 0x70];

fn signed_with(draft: Draft, algorithm: &[u8]) -> Draft {
    Draft { algorithm: algorithm.to_vec(), outer_algorithm: algorithm.to_vec(), ..draft }
}

/// Authorities called "ca" with the key `keys.ca`, which sign all below.
fn roots(keys: &Keys) -> Vec<(&'static str, CertificateDer<'static>)> {
    let plain = || Draft::new("ca", "ca", &keys.ca);
    let with = |more: &[Vec<u8>]| plain().with(&[basic(true, None)]).with(more);
    let unknown = |critical| extension(&[0x2a, 3, 4], critical, &[5, 0]);
    let drafts = vec![
        ("the usual", with(&[usage(SIGNS)])),
        ("no key usage", with(&[])),
        ("a root of version 1", plain().v1()),
        ("a root of version 1, said", Draft { version: vec![0xa0, 3, 2, 1, 0], ..plain() }),
        ("a root of version 2", Draft { version: vec![0xa0, 3, 2, 1, 1], ..plain() }),
        ("no basic constraints", plain()),
        ("CA:FALSE", plain().with(&[basic(false, None)])),
        ("the wrong key usage", with(&[usage(0x80)])),
        ("pathlen 0", plain().with(&[basic(true, Some(0))])),
        ("for servers", with(&[purposes(&[SERVER])])),
        ("for clients", with(&[purposes(&[CLIENT])])),
        ("for both", with(&[purposes(&[CLIENT, SERVER])])),
        ("for any", with(&[purposes(&[ANY])])),
        ("for code", with(&[purposes(&[CODE])])),
        ("expired", Draft { validity: times(b"100101000000Z", b"110101000000Z"), ..with(&[]) }),
        ("not yet", Draft { validity: times(b"400101000000Z", b"450101000000Z"), ..with(&[]) }),
        ("signed by another", Draft { issuer: name_of(12, b"elsewhere"), ..with(&[]) }),
        ("an unknown critical extension", with(&[unknown(true)])),
        ("an unknown extension", with(&[unknown(false)])),
        ("permits example.com", with(&[constraints(&[&dns("example.com")], &[])])),
        ("permits .example.com", with(&[constraints(&[&dns(".example.com")], &[])])),
        ("permits nothing of DNS", with(&[constraints(&[&dns("example.org")], &[])])),
        ("excludes the host", with(&[constraints(&[], &[&dns(HOST)])])),
        ("permits 10/8", with(&[constraints(&[&der(0x87, &[&[10, 0, 0, 0, 255, 0, 0, 0]])], &[])])),
        ("permits a uri host", with(&[constraints(&[&der(0x86, &[b"cluster.local"])], &[])])),
        ("permits mail", with(&[constraints(&[&der(0x81, &[b"a@example.com"])], &[])])),
        ("constrains a directory", with(&[constraints(&[&der(0xa4, &[&name_of(12, b"x")])], &[])])),
        ("another key identifier", with(&[extension(&[0x55, 0x1d, 14], false, &[4, 2, 1, 2])])),
    ];
    drafts.into_iter().map(|(name, draft)| (name, draft.sign(&keys.ca))).collect()
}

/// Drafts of certificates called "alice".
struct LeafDrafts<'a> {
    keys: &'a Keys,
    issuer: &'a str,
}

/// Drafts with their names.
type NamedDrafts = Vec<(&'static str, Draft)>;

impl LeafDrafts<'_> {
    fn plain(&self) -> Draft {
        Draft::new("alice", self.issuer, &self.keys.leaf)
    }

    fn host(&self) -> Draft {
        self.names(&[&dns(HOST)])
    }

    fn names(&self, all: &[&[u8]]) -> Draft {
        self.plain().with(&[alternative(all)])
    }

    fn extended(&self, oid: &[u8], value: &[u8]) -> Draft {
        self.host().with(&[extension(oid, false, value)])
    }

    fn version(&self, number: u8) -> Draft {
        Draft { version: vec![0xa0, 3, 2, 1, number], ..self.host() }
    }

    /// Versions, purposes, and uses of the key.
    fn for_uses(&self) -> NamedDrafts {
        vec![
            ("plain", self.plain()),
            ("version 1", self.plain().v1()),
            ("version 2", Draft { version: vec![0xa0, 3, 2, 1, 1], ..self.plain() }),
            ("version 3", self.host()),
            ("version 4", self.version(3)),
            ("extensions in version 1", self.host().v1()),
            ("extensions in version 2", self.version(1)),
            ("for clients", self.host().with(&[purposes(&[CLIENT])])),
            ("for servers", self.host().with(&[purposes(&[SERVER])])),
            ("for both", self.host().with(&[purposes(&[SERVER, CLIENT])])),
            ("for any", self.host().with(&[purposes(&[ANY])])),
            ("for code and any", self.host().with(&[purposes(&[CODE, ANY])])),
            ("for code", self.host().with(&[purposes(&[CODE])])),
            ("for nothing", self.host().with(&[purposes(&[])])),
            (
                "for a purpose with a large number",
                self.host().with(&[purposes(&[&[0x69, 0x88, 0x80, 0x80, 0x80, 0]])]),
            ),
            ("CA:TRUE", self.host().with(&[basic(true, None)])),
            ("CA:TRUE and pathlen", self.host().with(&[basic(true, Some(0))])),
            ("CA:FALSE", self.host().with(&[basic(false, None)])),
            ("CA:FALSE and pathlen", self.host().with(&[basic(false, Some(0))])),
            ("key usage for encryption", self.host().with(&[usage(0x20)])),
            ("an empty key usage", self.host().with(&[extension(&[0x55, 0x1d, 15], true, &[3, 1, 0])])),
            ("a padded key usage", self.host().with(&[extension(&[0x55, 0x1d, 15], true, &[3, 2, 1, 0x81])])),
        ]
    }

    /// Times of validity.
    fn of_times(&self) -> NamedDrafts {
        let minutes = der(0x30, &[&der(0x17, &[b"2001010000Z"]), &der(0x17, &[b"4912312359Z"])]);
        let zone = der(0x30, &[&der(0x17, &[b"200101000000+0100"]), &der(0x17, &[b"491231235959Z"])]);
        let general = der(0x30, &[&der(0x18, &[b"20200101000000Z"]), &der(0x18, &[b"20991231235959Z"])]);
        let fraction = der(0x30, &[&der(0x18, &[b"20200101000000.5Z"]), &der(0x18, &[b"20991231235959Z"])]);
        vec![
            ("expired", Draft { validity: times(b"100101000000Z", b"110101000000Z"), ..self.host() }),
            ("not yet", Draft { validity: times(b"400101000000Z", b"450101000000Z"), ..self.host() }),
            ("times without seconds", Draft { validity: minutes, ..self.host() }),
            ("times with a zone", Draft { validity: zone, ..self.host() }),
            ("times of four digits", Draft { validity: general, ..self.host() }),
            ("times with a fraction", Draft { validity: fraction, ..self.host() }),
            (
                "times that are none",
                Draft { validity: times(b"200231000000Z", b"491231235959Z"), ..self.host() },
            ),
        ]
    }

    /// Names.
    fn of_names(&self) -> NamedDrafts {
        let uri = |text: &str| der(0x86, &[text.as_bytes()]);
        vec![
            ("another host", self.names(&[&dns("m2.example.com")])),
            ("a wildcard", self.names(&[&dns("*.example.com")])),
            ("a wildcard of two labels", self.names(&[&dns("*.*.com")])),
            ("a wildcard of all", self.names(&[&dns("*")])),
            ("capitals", self.names(&[&dns("M1.Example.COM")])),
            ("a host with a period at its end", self.names(&[&dns("m1.example.com.")])),
            ("an address", self.names(&[&der(0x87, &[&[10, 1, 1, 1]]), &dns(HOST)])),
            ("an address of three bytes", self.names(&[&der(0x87, &[&[10, 1, 1]])])),
            ("a uri", self.names(&[&uri("spiffe://a.cluster.local/ns/web"), &dns(HOST)])),
            ("a urn", self.names(&[&uri("urn:example:a"), &dns(HOST)])),
            ("a uri with a user", self.names(&[&uri("https://u@a.cluster.local/"), &dns(HOST)])),
            ("a uri with an address", self.names(&[&uri("https://[::1]/"), &dns(HOST)])),
            ("a uri with a port", self.names(&[&uri("https://a.cluster.local:8443/%41?b#c"), &dns(HOST)])),
            ("a uri without a scheme", self.names(&[&uri("/a/b"), &dns(HOST)])),
            ("a uri with a blank", self.names(&[&uri("https://a b/"), &dns(HOST)])),
            ("a uri with a bad escape", self.names(&[&uri("https://a/%zz"), &dns(HOST)])),
            ("a uri with an empty label", self.names(&[&uri("https://a..b/"), &dns(HOST)])),
            ("a uri with a bad port", self.names(&[&uri("https://a:b/"), &dns(HOST)])),
            ("mail", self.names(&[&der(0x81, &[b"a@example.com"]), &dns(HOST)])),
            ("mail of another", self.names(&[&der(0x81, &[b"b@example.com"]), &dns(HOST)])),
            ("mail that is none", self.names(&[&der(0x81, &[b"nobody"]), &dns(HOST)])),
            ("another kind of name", self.names(&[&der(0xa0, &[&[6, 1, 0x2a, 0xa0, 2, 5, 0]]), &dns(HOST)])),
            (
                "only another kind of name",
                self.plain().with(&[extension(&[0x55, 0x1d, 17], true, &[0x30, 4, 0x88, 2, 0x2a, 3])]),
            ),
            ("a name beyond ASCII", self.names(&[&der(0x82, &[b"\xe4"])])),
        ]
    }

    /// Extensions.
    fn of_extensions(&self) -> NamedDrafts {
        vec![
            ("an unknown critical extension", self.host().with(&[extension(&[0x2a, 3], true, &[5, 0])])),
            ("an unknown extension", self.host().with(&[extension(&[0x2a, 3], false, &[1, 2, 3])])),
            (
                "an extension twice",
                self.host().with(&[extension(&[0x2a, 3], false, &[]), extension(&[0x2a, 3], false, &[])]),
            ),
            (
                "an extension of a large number",
                self.host().with(&[extension(&[0x69, 0x88, 0x80, 0x80, 0x80, 0], false, &[])]),
            ),
            ("policies", self.extended(&[0x55, 0x1d, 32], &[0x30, 6, 0x30, 4, 6, 2, 0x2a, 3])),
            (
                "policies twice",
                self.extended(&[0x55, 0x1d, 32], &[0x30, 12, 0x30, 4, 6, 2, 0x2a, 3, 0x30, 4, 6, 2, 0x2a, 3]),
            ),
            ("policy constraints", self.extended(&[0x55, 0x1d, 36], &[0x30, 3, 0x80, 1, 5])),
            ("explicit policies wanted", self.extended(&[0x55, 0x1d, 36], &[0x30, 3, 0x80, 1, 0])),
            (
                "policy mappings",
                self.extended(&[0x55, 0x1d, 33], &[0x30, 10, 0x30, 8, 6, 2, 0x2a, 3, 6, 2, 0x2a, 4]),
            ),
            ("no policy of every kind", self.extended(&[0x55, 0x1d, 54], &[2, 1, 0])),
            (
                "distribution points",
                self.extended(&[0x55, 0x1d, 31], &[0x30, 8, 0x30, 6, 0xa0, 4, 0xa0, 2, 0x86, 0]),
            ),
            ("bad distribution points", self.extended(&[0x55, 0x1d, 31], &[0x30, 4, 0x30, 2, 0xa0, 0])),
            ("a subject key", self.extended(&[0x55, 0x1d, 14], &[4, 1, 1])),
            ("an authority key", self.extended(&[0x55, 0x1d, 35], &[0x30, 4, 0x80, 2, 1, 2])),
            ("a critical authority key", self.host().with(&[extension(&[0x55, 0x1d, 35], true, &[0x30, 0])])),
            (
                "a critical access",
                self.host().with(&[extension(&[0x2b, 6, 1, 5, 5, 7, 1, 1], true, &[0x30, 0])]),
            ),
            ("name constraints", self.host().with(&[constraints(&[&dns("a")], &[])])),
            ("empty name constraints", self.extended(&[0x55, 0x1d, 30], &[0x30, 0])),
            (
                "a bad mask",
                self.host().with(&[constraints(&[&der(0x87, &[&[10, 0, 0, 0, 255, 0, 255, 0]])], &[])]),
            ),
        ]
    }

    /// Numbers, signatures, and texts.
    fn of_forms(&self) -> NamedDrafts {
        vec![
            ("a negative serial number", Draft { serial: vec![0x80], ..self.host() }),
            ("no serial number", Draft { serial: Vec::new(), ..self.host() }),
            ("a long serial number", Draft { serial: vec![0x11; 40], ..self.host() }),
            ("a padded serial number", Draft { serial: vec![0, 1], ..self.host() }),
            ("unique ids", Draft { unique_ids: vec![0x81, 2, 0, 1, 0x82, 2, 0, 1], ..self.host() }),
            ("two algorithms", Draft { algorithm: SHA384.to_vec(), ..self.host() }),
            ("sha1", signed_with(self.host(), SHA1)),
            ("the wrong hash", signed_with(self.host(), SHA384)),
            ("printable text", Draft { subject: name_of(19, b"alice"), ..self.host() }),
            ("bad printable text", Draft { subject: name_of(19, b"al@ce"), ..self.host() }),
            ("teletex text", Draft { subject: name_of(20, b"al\xe4ce"), ..self.host() }),
            ("bmp text", Draft { subject: name_of(30, b"\0a\0l"), ..self.host() }),
            ("bad bmp text", Draft { subject: name_of(30, b"\0a\xd8\0"), ..self.host() }),
            ("universal text", Draft { subject: name_of(28, b"\0\0\0a"), ..self.host() }),
            ("numeric text", Draft { subject: name_of(18, b"12 3"), ..self.host() }),
            ("bad utf-8", Draft { subject: name_of(12, b"\xff"), ..self.host() }),
            ("an empty subject", Draft { subject: vec![0x30, 0], ..self.host() }),
            ("another issuer", Draft { issuer: name_of(12, b"nobody"), ..self.host() }),
            (
                "another kind of text in the issuer",
                Draft { issuer: name_of(19, self.issuer.as_bytes()), ..self.host() },
            ),
        ]
    }

    /// Keys, and bytes that readers skip.
    fn of_keys(&self) -> NamedDrafts {
        let p384 = KeyPair::generate_for(&rcgen::PKCS_ECDSA_P384_SHA384).expect("a key");
        let ed25519 = KeyPair::generate_for(&rcgen::PKCS_ED25519).expect("a key");
        vec![
            (
                "a p384 key",
                Draft { key: rcgen::PublicKeyData::subject_public_key_info(&p384), ..self.host() },
            ),
            ("a p521 key", Draft { key: p521_key(), ..self.host() }),
            ("a key off its curve", Draft { key: off_curve(self.keys), ..self.host() }),
            (
                "a key of an unknown kind",
                Draft { key: der(0x30, &[&[0x30, 4, 6, 2, 0x2a, 3], &[3, 2, 0, 1]]), ..self.host() },
            ),
            ("a host in pieces", self.names(&[&der(0xa2, &[&dns(HOST)]), &dns(HOST)])),
            (
                "an extension of another class",
                self.host().with(&[{
                    let mut other = basic(true, None);
                    other[2] = 0x46;
                    other
                }]),
            ),
            (
                "a field behind an extension",
                self.host().with(&[der(0x30, &[&[6, 2, 0x2a, 3], &[4, 0], &[5, 0]])]),
            ),
            (
                "an ed25519 key",
                Draft { key: rcgen::PublicKeyData::subject_public_key_info(&ed25519), ..self.host() },
            ),
        ]
    }
}

/// Certificates called "alice", issued by "ca".
fn leaves(keys: &Keys, issuer: &str, by: &KeyPair) -> Vec<(&'static str, CertificateDer<'static>)> {
    let of = LeafDrafts { keys, issuer };
    let drafts =
        [of.for_uses(), of.of_times(), of.of_names(), of.of_extensions(), of.of_forms(), of.of_keys()];
    let drafts = drafts.into_iter().flatten();
    let mut all: Vec<_> = drafts.map(|(name, draft)| (name, draft.sign(by))).collect();
    all.push(("signed by another", of.host().sign(&keys.other)));
    all.push(("bytes behind", CertificateDer::from([&of.host().sign(by)[..], &[0]].concat())));
    all
}

/// A key that OpenSSL made.
fn p521_key() -> Vec<u8> {
    const POINT: &str = "040075ea85a06b77e5f5d510f5f58ac1df8aad5f5cb23f2eaf54ba03da97ecf3f3db1c4375bf9f7233cea5e66593ed25\
        e1129bf94e740ef80469c9340f260ba88172780085b3d20589bc502b72df09acf783555215dfe5b2cf0af44e1ae57026\
        14484a230865be048b79ff7fbceb9985e6ac6fdd8808c9b38367928c6aabb97ef53645a4ed";
    let point = data_encoding::HEXLOWER.decode(POINT.as_bytes()).expect("hexadecimal");
    let algorithm =
        der(0x30, &[&[6, 7, 0x2a, 0x86, 0x48, 0xce, 0x3d, 2, 1], &[6, 5, 0x2b, 0x81, 4, 0, 0x23]]);
    der(0x30, &[&algorithm, &der(3, &[&[0], &point])])
}

fn off_curve(keys: &Keys) -> Vec<u8> {
    let mut key = rcgen::PublicKeyData::subject_public_key_info(&keys.leaf);
    let last = key.len() - 1;
    key[last] ^= 1;
    key
}

/// Intermediates called "middle", issued by "ca".
fn middles(keys: &Keys) -> Vec<(&'static str, CertificateDer<'static>)> {
    let plain = || Draft::new("middle", "ca", &keys.middle);
    let with = |more: &[Vec<u8>]| plain().with(&[basic(true, None)]).with(more);
    let drafts = vec![
        ("the usual middle", with(&[usage(SIGNS)])),
        ("a middle of version 1", plain().v1()),
        ("a middle without basic constraints", plain()),
        ("a middle with CA:FALSE", plain().with(&[basic(false, None)])),
        ("a middle for encryption", with(&[usage(0x20)])),
        ("a middle with pathlen 0", plain().with(&[basic(true, Some(0))])),
        ("a middle for servers", with(&[purposes(&[SERVER])])),
        ("a middle for clients", with(&[purposes(&[CLIENT])])),
        ("a middle for any", with(&[purposes(&[ANY])])),
        ("an expired middle", Draft { validity: times(b"100101000000Z", b"110101000000Z"), ..with(&[]) }),
        ("a middle that permits example.com", with(&[constraints(&[&dns("example.com")], &[])])),
        ("a middle with an unknown critical extension", with(&[extension(&[0x2a, 3], true, &[5, 0])])),
        (
            "a middle with policy constraints",
            with(&[extension(&[0x55, 0x1d, 36], true, &[0x30, 3, 0x80, 1, 5])]),
        ),
    ];
    let mut all: Vec<_> = drafts.into_iter().map(|(name, draft)| (name, draft.sign(&keys.ca))).collect();
    all.push(("a middle by another", with(&[]).sign(&keys.other)));
    all
}

fn cases(keys: &Keys) -> Vec<Case> {
    let mut cases = Vec::new();
    let case = |name: String, root: &CertificateDer<'static>, chain: Vec<CertificateDer<'static>>| Case {
        name,
        roots: vec![root.clone()],
        chain,
    };
    let (roots, middles) = (roots(keys), middles(keys));
    for (root_name, root) in &roots {
        for (leaf_name, leaf) in leaves(keys, "ca", &keys.ca) {
            cases.push(case(format!("root: {root_name}; leaf: {leaf_name}"), root, vec![leaf]));
        }
    }
    for (root_name, root) in &roots {
        for (middle_name, middle) in &middles {
            for (leaf_name, leaf) in leaves(keys, "middle", &keys.middle).into_iter().step_by(5) {
                let name = format!("root: {root_name}; {middle_name}; leaf: {leaf_name}");
                cases.push(case(name, root, vec![leaf, middle.clone()]));
            }
        }
    }
    // Trusted itself, whoever signed it.
    for (name, leaf) in leaves(keys, "ca", &keys.ca).into_iter().chain(leaves(keys, "alice", &keys.leaf)) {
        cases.push(case(format!("its own trust; leaf: {name}"), &leaf, vec![leaf.clone()]));
    }
    let (usual, host) = (&roots[0].1, &leaves(keys, "middle", &keys.middle)[3].1);
    let other_root = Draft::new("ca", "ca", &keys.other).with(&[basic(true, None)]).sign(&keys.other);
    let both = vec![other_root.clone(), usual.clone()];
    let (middle, junk) = (&middles[0].1, CertificateDer::from(vec![0x30, 0]));
    for (name, chain) in [
        ("a chain without its middle", vec![host.clone()]),
        ("a chain with the root", vec![host.clone(), middle.clone(), usual.clone()]),
        ("a chain in another order", vec![host.clone(), usual.clone(), middle.clone()]),
        ("a chain with another's root", vec![host.clone(), other_root, middle.clone()]),
        ("a chain with junk", vec![host.clone(), middle.clone(), junk]),
        ("the leaf twice", vec![host.clone(), host.clone(), middle.clone()]),
    ] {
        cases.push(Case {
            name: format!("two roots of a name; {name}"),
            roots: both.clone(),
            chain: chain.clone(),
        });
        cases.push(case(format!("one root; {name}"), usual, chain));
    }
    // Chains of two to nine, all of one key.
    for length in 2..=9_usize {
        let name = |n: usize| if n == length - 1 { "ca".to_owned() } else { format!("i{n}") };
        let mut chain = Vec::new();
        for n in 0..length - 1 {
            let by = if n + 2 == length { &keys.ca } else { &keys.middle };
            let draft = Draft::new(&name(n), &name(n + 1), &keys.middle);
            let extensions = if n == 0 { alternative(&[&dns(HOST)]) } else { basic(true, None) };
            chain.push(draft.with(&[extensions]).sign(by));
        }
        let words = ["", "", "two", "three", "four", "five", "six", "seven", "eight", "nine"];
        cases.push(case(format!("a chain of {}", words[length]), usual, chain));
    }
    for (name, kind, algorithm) in
        [("p384", &rcgen::PKCS_ECDSA_P384_SHA384, SHA384), ("ed25519", &rcgen::PKCS_ED25519, ED25519)]
    {
        let key = KeyPair::generate_for(kind).expect("a key");
        let root = signed_with(Draft::new("ca", "ca", &key), algorithm).with(&[basic(true, None)]).sign(&key);
        let leaf = signed_with(Draft::new("alice", "ca", &keys.leaf), algorithm).sign(&key);
        cases.push(case(format!("an authority with a {name} key"), &root, vec![leaf]));
    }
    cases
}

/// Random changes of a leaf's signed part, which the authority signs all the same; as root, as leaf, as both.
fn changed(keys: &Keys, count: usize) -> Vec<Case> {
    let mut seed = 1_u64;
    let mut random = move |below: usize| {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        usize::try_from(seed >> 11).expect("64 bits") % below
    };
    let draft = |subject: &str| {
        Draft::new(subject, "ca", &keys.ca).with(&[
            basic(true, Some(3)),
            usage(0x84),
            purposes(&[CLIENT, SERVER]),
            alternative(&[
                &dns(HOST),
                &der(0x86, &[b"spiffe://a.example.com/b"]),
                &der(0x81, &[b"a@b"]),
                &der(0x87, &[&[10; 4]]),
            ]),
            constraints(&[&dns("example.com")], &[&der(0x87, &[&[11, 0, 0, 0, 255, 0, 0, 0]])]),
            extension(&[0x55, 0x1d, 14], false, &[4, 2, 1, 2]),
            extension(&[0x55, 0x1d, 35], false, &[0x30, 4, 0x80, 2, 1, 2]),
            extension(&[0x55, 0x1d, 32], false, &[0x30, 6, 0x30, 4, 6, 2, 0x2a, 3]),
        ])
    };
    let usual = draft("ca").sign(&keys.ca);
    let values = [0, 1, 2, 3, 5, 6, 12, 0x17, 0x18, 0x30, 0x31, 0x7f, 0x80, 0x81, 0x82, 0xa0, 0xa3, 0xff];
    let mut cases = Vec::new();
    for number in 0..count {
        let mut part = draft(["alice", "ca"][number % 2]).signed_part();
        for _ in 0..=random(2) {
            let (place, value) = (random(part.len()), values[random(values.len())]);
            match random(4) {
                0 => part[place] ^= 1 << random(8),
                1 => part[place] = value,
                2 => part[place] = part[place].wrapping_add(1),
                _ => part[place] = b"az09.*-@ \n"[random(10)],
            }
        }
        let made = assemble(&part, keyward::trust::test_certificates::ECDSA_SHA256, &keys.ca);
        let (roots, chain) = match number % 2 {
            0 => (vec![usual.clone()], vec![made]),
            _ => (vec![made.clone()], vec![draft("alice").sign(&keys.ca)]),
        };
        cases.push(Case { name: format!("change {number}"), roots, chain });
    }
    cases
}

/// Go's verdicts for clients and members: empty for accepted, else the reason.
fn ask_go(cases: &[Case]) -> Vec<[String; 2]> {
    let build = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/clients/chains/build");
    let built = Command::new(build).stderr(Stdio::inherit()).output().expect("the program is built");
    assert!(built.status.success());
    let program = String::from_utf8(built.stdout).expect("a path");
    let mut child = Command::new(program.trim())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("the program starts");
    let mut input = BufWriter::new(child.stdin.take().expect("piped"));
    let answers = BufReader::new(child.stdout.take().expect("piped"));
    let verdicts = std::thread::scope(|threads| {
        threads.spawn(move || {
            for case in cases {
                let texts = |all: &[CertificateDer<'static>]| {
                    all.iter().map(|der| BASE64.encode(der)).collect::<Vec<_>>()
                };
                let (roots, chain) = (texts(&case.roots), texts(&case.chain));
                let question = json!({"roots": roots, "chain": chain, "now": NOW, "host": HOST});
                writeln!(input, "{question}").expect("the program reads");
            }
        });
        let read = |line: Result<String, _>| {
            let answer: Value = serde_json::from_str(&line.expect("a line")).expect("JSON");
            ["client", "server"].map(|side| answer[side].as_str().expect("text").to_owned())
        };
        answers.lines().map(read).collect::<Vec<_>>()
    });
    assert!(child.wait().expect("it ends").success());
    assert_eq!(verdicts.len(), cases.len());
    verdicts
}

/// Keyward's verdicts for clients and members: empty for accepted, else the reason.
fn ask_keyward(case: &Case, strictness: Strictness) -> [String; 2] {
    let now = UnixTime::since_unix_epoch(Duration::from_secs(NOW));
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let no_lists: &[CertificateRevocationListDer<'static>] = &[];
    let host = ServerName::try_from(HOST).expect("a name");
    let verdict =
        |verifier: Result<ChainVerifier, ChainVerifierError>, name: Option<&ServerName<'_>>| match verifier {
            Err(why) => format!("a root: {why}"),
            Ok(verifier) => match verifier.verify(&case.chain[0], &case.chain[1..], name, now) {
                Ok(()) => String::new(),
                Err(refused) => refused.refusal.to_string(),
            },
        };
    let clients = ChainVerifier::of_clients(&case.roots, no_lists, false, strictness, &provider);
    let members = ChainVerifier::of_members(&case.roots, strictness, &provider);
    [verdict(clients, None), verdict(members, Some(&host))]
}

/// A verdict of Keyward against Go's.
struct Stricter {
    name: String,
    reason: String,
}

/// Compares all verdicts: the number accepted by Go, and the cases that Keyward alone refuses.
fn compare(cases: &[Case]) -> (usize, Vec<Stricter>) {
    let (mut accepted, mut refused, mut faults, mut proved_later) = (0, Vec::new(), Vec::new(), 0);
    for (case, go) in cases.iter().zip(ask_go(cases)) {
        let (ours, strict) = (ask_keyward(case, Strictness::AsEtcd), ask_keyward(case, Strictness::Strict));
        for (((side, go), ours), strict) in ["client", "member"].into_iter().zip(go).zip(ours).zip(strict) {
            let name = format!("{side}: {}", case.name);
            let is_listed = PROVED_LATER.iter().any(|(part, _)| go.contains(part));
            let (is_accepted, is_lax) = (go.is_empty(), ours.is_empty() && !go.is_empty());
            accepted += usize::from(is_accepted);
            if strict.is_empty() && !ours.is_empty() || is_lax && !is_listed {
                let chain: Vec<_> =
                    case.chain.iter().chain(&case.roots).map(|der| BASE64.encode(der)).collect();
                faults.push(format!("{name}: Keyward {ours:?}, strict {strict:?}; Go {go:?}: {chain:?}"));
            } else if is_lax {
                proved_later += 1;
            } else if is_accepted && !ours.is_empty() {
                refused.push(Stricter { name, reason: ours });
            }
        }
    }
    println!("{proved_later} accepted before the handshake's proof, which cannot be made");
    let shown = &faults[..faults.len().min(10)];
    assert!(
        faults.is_empty(),
        "{} accepted, and refused by Go or by etcd's rules:\n{}",
        faults.len(),
        shown.join("\n")
    );
    (accepted, refused)
}

fn keys() -> Keys {
    let key = || KeyPair::generate().expect("a key");
    Keys { ca: key(), middle: key(), leaf: key(), other: key() }
}

#[test]
fn certificates_are_judged_as_by_go_but_for_the_listed_differences() {
    let cases = cases(&keys());
    let all = cases.iter().flat_map(|case| case.chain.iter().chain(&case.roots));
    let made: BTreeSet<&[u8]> = all.map(AsRef::as_ref).collect();
    assert!(made.len() > 100 && cases.len() > 1000, "{} certificates, {} cases", made.len(), cases.len());
    let (accepted, refused) = compare(&cases);
    let mut seen = BTreeMap::new();
    let mut unlisted = Vec::new();
    for Stricter { name, .. } in &refused {
        match DIFFERENCES.iter().find(|(part, _)| name.contains(part)) {
            Some((part, _)) => *seen.entry(*part).or_insert(0) += 1,
            None => unlisted.push(name.as_str()),
        }
    }
    println!(
        "{} certificates in {} chains for clients and members: Go accepts {accepted}, Keyward {}",
        made.len(),
        cases.len(),
        accepted - refused.len()
    );
    println!("refused here alone: {seen:?}");
    assert!(unlisted.is_empty(), "refused, and accepted by Go:\n{}", unlisted.join("\n"));
    let unseen: Vec<_> = DIFFERENCES.iter().filter(|(part, _)| !seen.contains_key(part)).collect();
    assert!(unseen.is_empty(), "no difference any more: {unseen:?}");
}

#[test]
fn no_change_of_a_certificate_is_accepted_that_go_refuses() {
    let count = if full() { 50_000 } else { 4_000 };
    let (accepted, refused) = compare(&changed(&keys(), count));
    println!(
        "{count} changed certificates for clients and members: Go accepts {accepted}, Keyward {}",
        accepted - refused.len()
    );
    assert!(accepted > count / 4, "too few changes are harmless: {accepted}");
    let mut reasons: BTreeMap<String, (usize, String)> = BTreeMap::new();
    for Stricter { name, reason } in refused {
        reasons.entry(reason).or_insert((0, name)).0 += 1;
    }
    println!("refused here alone: {reasons:#?}");
    let is_listed = |reason: &String| STRICTER.iter().any(|(part, _)| reason.contains(part));
    let unlisted: Vec<_> = reasons.iter().filter(|(reason, _)| !is_listed(reason)).collect();
    assert!(unlisted.is_empty(), "refused, and accepted by Go: {unlisted:#?}");
}
