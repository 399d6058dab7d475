//! A certificate authority for one test, and the certificates that it issues, as PEM files.
//!
//! Owns: the files in its folder. Must not know who presents them.

use std::{
    fs::{self, Permissions},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationList, CertificateRevocationListParams,
    CertifiedIssuer, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, KeyIdMethod, KeyPair,
    KeyUsagePurpose, RevokedCertParams, SerialNumber, date_time_ymd,
};

use super::evidence;

/// Names by which members are reached that may lead elsewhere.
pub(crate) const NAMES: [&str; 3] = ["etcd-1.keyward.test", "etcd-2.keyward.test", "etcd-3.keyward.test"];

/// An authority whose certificate is in `ca`.
pub(crate) struct Pki {
    /// The authority's certificate.
    pub(crate) ca: PathBuf,
    folder: PathBuf,
    issuer: CertifiedIssuer<'static, KeyPair>,
}

impl std::fmt::Debug for Pki {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pki").field("ca", &self.ca).finish_non_exhaustive()
    }
}

/// A certificate and its key.
#[derive(Clone)]
pub(crate) struct Pair {
    pub(crate) cert: PathBuf,
    pub(crate) key: PathBuf,
}

impl Pki {
    /// A new authority with its files in `folder`.
    pub(crate) fn new(folder: &Path) -> Pki {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        // Authorities are told apart by their names.
        let name = folder.file_name().unwrap_or_default().to_string_lossy();
        params.distinguished_name = named(Some(&format!("test authority {name}")));
        let issuer = CertifiedIssuer::self_signed(params, key()).expect("the authority signs itself");
        fs::create_dir_all(folder).expect("the folder can be made");
        evidence::key("the key of an authority", &issuer.key().serialize_pem());
        let ca = folder.join("ca.pem");
        fs::write(&ca, issuer.pem()).expect("the certificate can be written");
        Pki { ca, folder: folder.into(), issuer }
    }

    /// For a server on loopback, and for the names of [`NAMES`]. Good as a client's too, since etcd's own JSON gateway shows it to its gRPC port, and without a
    /// common name, which that gateway refuses.
    pub(crate) fn server(&self) -> Pair {
        let both = [ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        self.issue("server", None, &[&["127.0.0.1", "localhost"], &NAMES[..]].concat(), &both)
    }

    /// For a client whose common name is `user`: with `--client-cert-auth` etcd takes it for that user.
    pub(crate) fn client(&self, user: &str) -> Pair {
        self.issue(&format!("client-{user}"), Some(user), &[], &[ExtendedKeyUsagePurpose::ClientAuth])
    }

    /// For a client of this name whose certificate is changed by `change`, in files of their own.
    pub(crate) fn changed(
        &self,
        file: &str,
        user: &str,
        change: impl FnOnce(&mut CertificateParams),
    ) -> Pair {
        self.issue_changed(file, Some(user), &[], &[ExtendedKeyUsagePurpose::ClientAuth], change)
    }

    /// For a client of this name, signed by itself.
    pub(crate) fn self_signed(&self, user: &str) -> Pair {
        let mut params = CertificateParams::default();
        params.distinguished_name = named(Some(user));
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        let key = key();
        let cert = params.self_signed(&key).expect("it signs itself");
        self.write(&format!("self-{user}"), &cert.pem(), &key)
    }

    /// What it says it has revoked: the certificates of these serial numbers.
    pub(crate) fn revoke(&self, serials: &[u64]) -> PathBuf {
        let path = self.folder.join("revoked.crl");
        let list = self.revoked(serials);
        fs::write(&path, list.pem().expect("it is text")).expect("the list can be written");
        path
    }

    /// The same as etcd reads it.
    pub(crate) fn revoked_der(&self, serials: &[u64]) -> Vec<u8> {
        self.revoked(serials).der().to_vec()
    }

    fn revoked(&self, serials: &[u64]) -> CertificateRevocationList {
        let revoked = |serial: &u64| RevokedCertParams {
            serial_number: SerialNumber::from(*serial),
            revocation_time: date_time_ymd(2026, 1, 1),
            reason_code: None,
            invalidity_date: None,
        };
        let list = CertificateRevocationListParams {
            this_update: date_time_ymd(2026, 1, 1),
            next_update: date_time_ymd(2100, 1, 1),
            crl_number: SerialNumber::from(1),
            issuing_distribution_point: None,
            revoked_certs: serials.iter().map(revoked).collect(),
            key_identifier_method: KeyIdMethod::Sha256,
        };
        list.signed_by(&self.issuer).expect("the authority signs")
    }

    /// For a client that TLS lets in and that names no user.
    pub(crate) fn nobody(&self) -> Pair {
        self.issue("nobody", None, &[], &[ExtendedKeyUsagePurpose::ClientAuth])
    }

    /// An authority below this one that may sign certificates for clients and nothing else.
    pub(crate) fn mint(&self) -> Pair {
        self.another_mint("mint", None)
    }

    /// The same in other files, with a serial number.
    pub(crate) fn another_mint(&self, file: &str, serial: Option<u64>) -> Pair {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.distinguished_name = named(Some("test mint"));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        params.serial_number = serial.map(SerialNumber::from);
        self.sign(file, &params)
    }

    fn issue(
        &self,
        file: &str,
        name: Option<&str>,
        hosts: &[&str],
        usages: &[ExtendedKeyUsagePurpose],
    ) -> Pair {
        self.issue_changed(file, name, hosts, usages, |_| {})
    }

    fn issue_changed(
        &self,
        file: &str,
        name: Option<&str>,
        hosts: &[&str],
        usages: &[ExtendedKeyUsagePurpose],
        change: impl FnOnce(&mut CertificateParams),
    ) -> Pair {
        let hosts: Vec<String> = hosts.iter().map(ToString::to_string).collect();
        let mut params = CertificateParams::new(hosts).expect("hosts are valid names");
        params.distinguished_name = named(name);
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = usages.to_vec();
        change(&mut params);
        self.sign(file, &params)
    }

    fn sign(&self, file: &str, params: &CertificateParams) -> Pair {
        let pair = self.pair(file);
        if pair.cert.exists() {
            return pair;
        }
        let key = key();
        let cert = params.signed_by(&key, &self.issuer).expect("the authority signs");
        self.write(file, &cert.pem(), &key)
    }

    fn pair(&self, file: &str) -> Pair {
        let path = self.folder.join(file);
        Pair { cert: path.with_extension("pem"), key: path.with_extension("key") }
    }

    fn write(&self, file: &str, cert: &str, key: &KeyPair) -> Pair {
        let pair = self.pair(file);
        fs::write(&pair.key, key.serialize_pem()).expect("the key can be written");
        evidence::key(&format!("the key of {file}"), &key.serialize_pem());
        fs::set_permissions(&pair.key, Permissions::from_mode(0o600)).expect("the key file is ours");
        fs::write(&pair.cert, cert).expect("the certificate can be written");
        pair
    }
}

fn key() -> KeyPair {
    KeyPair::generate().expect("a key can be made")
}

fn named(name: Option<&str>) -> DistinguishedName {
    let mut distinguished = DistinguishedName::new();
    if let Some(name) = name {
        distinguished.push(DnType::CommonName, name);
    }
    distinguished
}
