//! Resolves `[[jwt]]` and `[etcd_jwt]`: the accepted JWT issuers.
//!
//! Owns: the requirements on an issuer. Must not know: the mapping of a subject to an etcd user. Invariants:
//! an issuer is configured once, with an audience and usable keys.

use std::sync::Arc;
use std::time::Duration;

use super::{Resolver, SECOND};
use crate::jwt::{Algorithm, EtcdTokens, HmacHash, IssuerKeys, Verifier};
use crate::toml_file;
use crate::upstream_users::{JwtKey, JwtKind, SignJwt};

/// Maximum leeway: a larger clock difference is a wrong clock.
const MOST_LEEWAY: Duration = Duration::from_secs(600);

impl Resolver<'_> {
    pub(super) fn issuers(&mut self, rows: Vec<toml_file::TomlJwt>) -> Vec<Verifier> {
        let mut issuers: Vec<Verifier> = Vec::new();
        for (index, row) in rows.into_iter().enumerate() {
            let path = format!("jwt[{index}]");
            let issuer_path = format!("{path}.issuer");
            let issuer = self.text(&issuer_path, row.issuer, "the `iss` of the tokens is needed");
            let audience_path = format!("{path}.audience");
            let audience =
                self.text(&audience_path, row.audience, "the `aud` that means this cluster is needed");
            let keys_path = format!("{path}.keys");
            let keys = self.required(&keys_path, row.keys, "the file of the issuer's public keys is needed");
            let keys = keys.and_then(|name| {
                let file = self.file(&keys_path, &name);
                self.checked(&keys_path, IssuerKeys::read(&file))
            });
            let algorithms = self.algorithms(&format!("{path}.algorithms"), row.algorithms);
            let subject_path = format!("{path}.subject");
            let subject = row.subject.or(Some("sub".to_owned()));
            let subject = self.text(&subject_path, subject, "");
            let leeway = self.duration(
                &format!("{path}.leeway"),
                row.leeway,
                30 * SECOND,
                Duration::ZERO..=MOST_LEEWAY,
            );
            let (Some(issuer), Some(audience), Some(keys), Some(subject)) = (issuer, audience, keys, subject)
            else {
                continue;
            };
            if issuers.iter().any(|earlier| *earlier.issuer == *issuer) {
                self.findings.fault(&issuer_path, "is the issuer of an earlier [[jwt]] too");
            }
            let issuer = Arc::from(issuer);
            issuers.push(Verifier { issuer, audience, keys, algorithms, subject, leeway });
        }
        issuers
    }

    /// Verification of tokens signed with etcd's own key: by etcd's public key, or by the key of
    /// `[sign_jwt]`.
    pub(super) fn etcd_tokens(
        &mut self,
        etcd: Option<toml_file::TomlEtcdJwt>,
        sign: Option<&SignJwt>,
    ) -> Option<EtcdTokens> {
        let Some(etcd) = etcd else { return sign.and_then(checked_as_signed) };
        let (method_path, key_path) = ("etcd_jwt.method", "etcd_jwt.public_key");
        let method = self.text(method_path, etcd.method, "etcd's sign-method is needed, as in \"RS256\"");
        let key = self.text(key_path, etcd.public_key, "etcd's pub-key is needed");
        let keys = key.and_then(|name| {
            let file = self.file(key_path, &name);
            self.checked(key_path, IssuerKeys::read(&file))
        });
        let Some(algorithm) = Algorithm::named(&method?) else {
            let reason = "is none of RS256, RS384, RS512, PS256, PS384, PS512, ES256, ES384, EdDSA; what HS \
                          signs with is a secret: [sign_jwt]";
            self.findings.fault(method_path, reason);
            return None;
        };
        keys.map(|keys| EtcdTokens::by_public_key(algorithm, keys))
    }

    fn text(&mut self, path: &str, value: Option<String>, reason: &str) -> Option<String> {
        let value = self.required(path, value, reason)?;
        if value.is_empty() {
            self.findings.fault(path, "is empty");
            return None;
        }
        Some(value)
    }

    fn algorithms(&mut self, path: &str, names: Option<Vec<String>>) -> Vec<Algorithm> {
        if names.as_ref().is_some_and(Vec::is_empty) {
            self.findings.fault(path, "names no algorithm; leave it out for all that fit the keys");
        }
        let mut algorithms = Vec::new();
        for (index, name) in names.unwrap_or_default().iter().enumerate() {
            match Algorithm::named(name) {
                Some(algorithm) => algorithms.push(algorithm),
                None => self.findings.fault(
                    &format!("{path}[{index}]"),
                    "is none of RS256, RS384, RS512, PS256, PS384, PS512, ES256, ES384, EdDSA",
                ),
            }
        }
        algorithms
    }
}

/// Verification of tokens signed by `sign`. `None` for a private key without a supported public key.
fn checked_as_signed(sign: &SignJwt) -> Option<EtcdTokens> {
    match (&sign.key, sign.method.kind) {
        (JwtKey::Private(key), _) => {
            let keys = IssuerKeys::of_public_key(key.signing().public_key()?.as_ref())?;
            Some(EtcdTokens::by_public_key(Algorithm::named(sign.method.name)?, keys))
        }
        (JwtKey::Shared(secret), JwtKind::Hs256) => {
            Some(EtcdTokens::by_secret(HmacHash::Sha256, secret.clone()))
        }
        (JwtKey::Shared(secret), JwtKind::Hs384) => {
            Some(EtcdTokens::by_secret(HmacHash::Sha384, secret.clone()))
        }
        (JwtKey::Shared(secret), JwtKind::Hs512) => {
            Some(EtcdTokens::by_secret(HmacHash::Sha512, secret.clone()))
        }
        (JwtKey::Shared(_), JwtKind::Private(_)) => None,
    }
}
