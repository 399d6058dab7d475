//! Resolves the etcd users with upstream credentials, and the keys for minting and signing.
//!
//! Owns: `[[user]]`, `[mint]`, `[sign_jwt]`. Must not know: listeners. Invariants: a user has exactly one
//! credential; `root` has a credential only by a row naming `root`; certificates are shown over TLS only, and
//! are never minted from an authority trusted for members.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use super::{Resolver, SECOND, secrets};
use crate::authority::Authority;
use crate::certificate_checks::{self, UnfitCertificate};
use crate::upstream_users::{
    CredentialMaker, JwtKey, JwtKind, JwtMethod, MintAuthority, SignJwt, UpstreamUsers, UserCredential,
};
use crate::{Cluster, Scheme, toml_file};
use keyward_base::pem::PrivateKey;
use keyward_etcd::identity::UserName;

/// The value of `as` in a `[[map]]` row for the peer's own name; no user may have this name.
pub(super) const SAME: &str = "same";

/// Name of the row for all users without their own row.
pub(super) const OTHERS: &str = "*";
const LONGEST_CERTIFICATE: Duration = Duration::from_secs(3600);
const HOUR: Duration = Duration::from_secs(3600);

/// The users, and the names of faulty rows, already reported as faults.
pub(super) struct UserRows {
    pub(super) users: UpstreamUsers,
    pub(super) faulty: BTreeSet<String>,
}

impl Resolver<'_> {
    pub(super) fn users(
        &mut self,
        rows: Vec<toml_file::TomlUser>,
        mint: Option<toml_file::TomlMint>,
        sign_jwt: Option<toml_file::TomlSignJwt>,
        cluster: &Cluster,
    ) -> UserRows {
        let makes = |wanted: fn(&toml_file::TomlUser) -> Option<bool>| {
            rows.iter().any(|row| wanted(row) == Some(true))
        };
        let (mints, signs) = (makes(|row| row.mint), makes(|row| row.jwt));
        let mut users = UpstreamUsers {
            mint: self.mint(mint, mints, cluster),
            sign_jwt: self.sign_jwt(sign_jwt, signs),
            ..UpstreamUsers::default()
        };
        let mut names = BTreeSet::new();
        let mut faulty = BTreeSet::new();
        let https = cluster.scheme() == Scheme::Https;
        for (index, mut row) in rows.into_iter().enumerate() {
            let path = format!("user[{index}]");
            let name_path = format!("{path}.name");
            let name = self.required(&name_path, row.name.take(), "the name of an etcd user is needed");
            if name.as_deref() == Some("") {
                self.findings.fault(&name_path, "is empty; the name of an etcd user is needed");
            }
            if name.as_deref() == Some(SAME) {
                let reason =
                    "stands in rules for the name of whoever calls, so no rule could lead to this user";
                self.findings.fault(&name_path, format!("{SAME:?} {reason}"));
            }
            if name.as_ref().is_some_and(|name| !names.insert(name.clone())) {
                self.findings.fault(&name_path, "is the name of an earlier [[user]] too");
            }
            let credential = self.credential(&path, name.as_deref(), row, https);
            match (name, credential) {
                (Some(name), Some(UserCredential::Made(maker))) if name == OTHERS => {
                    users.others = Some(maker)
                }
                (Some(name), Some(_)) if name == OTHERS => {
                    let reason = "stands for users of many names, so only mint or jwt can prove them";
                    self.findings.fault(&name_path, format!("{OTHERS:?} {reason}"));
                }
                (Some(name), Some(credential)) => {
                    users.named.insert(UserName::from(name.as_str()), credential);
                }
                (Some(name), None) => {
                    faulty.insert(name);
                }
                (None, _) => {}
            }
        }
        UserRows { users, faulty }
    }

    /// Resolves exactly one credential.
    fn credential(
        &mut self,
        path: &str,
        name: Option<&str>,
        row: toml_file::TomlUser,
        https: bool,
    ) -> Option<UserCredential> {
        let shows = row.cert.is_some() || row.key.is_some();
        let (mint, jwt) = (row.mint == Some(true), row.jwt == Some(true));
        match [row.password_file.is_some(), shows, mint, jwt].iter().filter(|given| **given).count() {
            0 => {
                let reason = "what proves the user is needed: password_file, cert with key, mint or jwt";
                self.findings.missing(&format!("{path}.password_file"), reason);
                return None;
            }
            1 => {}
            _ => {
                let reason =
                    "has more than one of password_file, cert with key, mint and jwt; one proves a user";
                self.findings.fault(path, reason);
                return None;
            }
        }
        if (shows || mint) && !https {
            let reason = "needs https endpoints: a certificate is shown over TLS only";
            self.findings.fault(&format!("{path}.{}", if mint { "mint" } else { "cert" }), reason);
        }
        if let Some(file) = row.password_file {
            let password = self.secret(&format!("{path}.password_file"), &file, secrets::password);
            return password.map(|password| UserCredential::Password(Arc::new(password)));
        }
        if shows {
            let pair = self.key_pair(path, row.cert, row.key)?;
            let cert_path = format!("{path}.cert");
            let leaf = pair.chain().first()?;
            self.checked(&cert_path, certificate_checks::of_user(leaf, name?))?;
            if certificate_checks::good_at(leaf, SystemTime::now()).is_err() {
                self.findings.warn(&cert_path, UnfitCertificate::NotNow);
            }
            return Some(UserCredential::Certificate(pair));
        }
        Some(UserCredential::Made(if mint { CredentialMaker::Mint } else { CredentialMaker::Jwt }))
    }

    fn mint(
        &mut self,
        mint: Option<toml_file::TomlMint>,
        wanted: bool,
        cluster: &Cluster,
    ) -> Option<Arc<MintAuthority>> {
        let Some(mint) = mint else {
            if wanted {
                let reason = "a [[user]] has mint = true: the authority to mint from is needed";
                self.findings.missing("mint.ca", reason);
            }
            return None;
        };
        let lifetime = self.duration("mint.lifetime", mint.lifetime, HOUR, SECOND..=LONGEST_CERTIFICATE);
        // `mint.ca` takes the place of the usual `cert` key.
        let ca_path = "mint.ca";
        let ca = self.required(ca_path, mint.ca, "the certificate of the authority to mint from is needed");
        let key = self.required("mint.key", mint.key, "the key of the authority to mint from is needed");
        let authority = self.pair((ca_path, ca), ("mint.key", key))?;
        let certificate = authority.chain().first()?;
        self.checked(ca_path, certificate_checks::of_mint(certificate, SystemTime::now()))?;
        self.checked(ca_path, Authority::new(&authority))?;
        let mut roots = cluster.tls.iter().flat_map(|tls| tls.authorities());
        // Compares the keys: a stolen key also signs under a second certificate of the same key.
        if roots.any(|root| certificate_checks::same_key(root, certificate) == Ok(true)) {
            let reason = "has the key of cluster.tls.ca, so whoever steals it could pose as a member; mint \
                          from an authority of its own";
            self.findings.fault(ca_path, reason);
        }
        Some(Arc::new(MintAuthority { authority, lifetime }))
    }

    fn sign_jwt(&mut self, sign: Option<toml_file::TomlSignJwt>, wanted: bool) -> Option<Arc<SignJwt>> {
        let Some(sign) = sign else {
            if wanted {
                let reason =
                    "a [[user]] has jwt = true: the key that etcd's tokens are signed with is needed";
                self.findings.missing("sign_jwt.key", reason);
            }
            return None;
        };
        let (key_path, method_path) = ("sign_jwt.key", "sign_jwt.method");
        let lifetime =
            self.duration("sign_jwt.lifetime", sign.lifetime, 600 * SECOND, 3 * SECOND..=24 * HOUR);
        let name = self.required(method_path, sign.method, "etcd's sign-method is needed, as in \"RS256\"");
        let file = self.required(key_path, sign.key, "the key that etcd's tokens are signed with is needed");
        let (name, file) = (name?, file?);
        let Some(method) = JwtMethod::named(&name) else {
            self.findings.fault(method_path, format!("must be one of {}", JwtMethod::names()));
            return None;
        };
        let key = match method.kind {
            JwtKind::Private(scheme) => {
                let file = self.file(key_path, &file);
                self.warn_if_open(key_path, &file);
                let key = self.checked(key_path, PrivateKey::read(&file))?;
                if key.signing().choose_scheme(&[scheme]).is_none() {
                    self.findings.fault(key_path, format!("is no key of the kind that {name} signs with"));
                    return None;
                }
                JwtKey::Private(key)
            }
            _ => JwtKey::Shared(self.secret(key_path, &file, secrets::shared_key)?),
        };
        Some(Arc::new(SignJwt { method, key, lifetime }))
    }
}

#[cfg(test)]
mod tests;
