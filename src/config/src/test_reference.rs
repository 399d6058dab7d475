//! `config.toml` as tests read it, of this room and of others.

pub(super) const REFERENCE: &str = include_str!("../../../config.toml");

/// The reference with all examples activated: `#key = …` and `#[table]` lose the `#`.
pub(super) fn with_examples() -> String {
    let example = |line: &str| line.starts_with(|first: char| first.is_ascii_lowercase() || first == '[');
    let lines = REFERENCE.lines().map(|line| match line.strip_prefix('#') {
        Some(rest) if example(rest) => rest,
        _ => line,
    });
    lines.collect::<Vec<_>>().join("\n")
}

/// All keys of the reference, without indices of tables, each with the comment above it. Keys in a row share
/// a comment.
pub fn keys_with_comments() -> Vec<(String, String)> {
    let (mut section, mut comment, mut keys) = (String::new(), String::new(), Vec::new());
    let mut after_key = false;
    for line in with_examples().lines() {
        let line = line.trim();
        if line.is_empty() || line.starts_with('[') {
            comment.clear();
            section = if line.is_empty() { section } else { line.trim_matches(['[', ']']).to_owned() };
        } else if let Some(words) = line.strip_prefix('#') {
            if after_key {
                comment.clear();
            }
            comment += words;
        } else if let Some((key, _)) = line.split_once(" = ") {
            keys.push((format!("{section}.{key}"), comment.clone()));
        }
        after_key = !line.starts_with('#');
    }
    keys
}

/// An authority's certificate, and an empty revocation list.
pub fn revoking_authority() -> (String, String) {
    let mut params = rcgen::CertificateParams::default();
    params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    params.key_usages = vec![rcgen::KeyUsagePurpose::KeyCertSign, rcgen::KeyUsagePurpose::CrlSign];
    let ca =
        rcgen::CertifiedIssuer::self_signed(params, rcgen::KeyPair::generate().expect("made for this test"))
            .expect("made for this test");
    let crl = rcgen::CertificateRevocationListParams {
        this_update: rcgen::date_time_ymd(2026, 1, 1),
        next_update: rcgen::date_time_ymd(2100, 1, 1),
        crl_number: rcgen::SerialNumber::from(1),
        issuing_distribution_point: None,
        revoked_certs: Vec::new(),
        key_identifier_method: rcgen::KeyIdMethod::Sha256,
    };
    (ca.pem(), crl.signed_by(&ca).expect("made for this test").pem().expect("made for this test"))
}
