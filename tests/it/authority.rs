//! A certificate authority, what it issues and what it revokes.
//!
//! Owns: the files of a listener that asks for certificates, and the TLS of clients that show them. Must not know what a
//! test wants to show.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, CertifiedIssuer, DistinguishedName,
    DnType, ExtendedKeyUsagePurpose, IsCa, KeyIdMethod, KeyPair, KeyUsagePurpose, RevokedCertParams, SanType,
    SerialNumber, date_time_ymd,
};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, RootCertStore, SupportedProtocolVersion};

pub(crate) const NAME: &str = "keyward.test";

pub(crate) struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
}

/// What a client may show.
pub(crate) struct Shown {
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
}

/// What is signed: a client's certificate of this common name, valid today.
pub(crate) fn client(name: &str) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, name);
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
    params.serial_number = Some(SerialNumber::from(7));
    params
}

impl Authority {
    pub(crate) fn new() -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, "authority of the test");
        let key = KeyPair::generate().expect("a key");
        Self { issuer: CertifiedIssuer::self_signed(params, key).expect("signed") }
    }

    /// Signs.
    pub(crate) fn issue(&self, params: &CertificateParams) -> Shown {
        let key = KeyPair::generate().expect("a key");
        let leaf = params.signed_by(&key, &self.issuer).expect("signed");
        Shown { chain: vec![leaf.der().clone()], key: key.into() }
    }

    /// A client's certificate of this common name.
    pub(crate) fn client(&self, name: &str) -> Shown {
        self.issue(&client(name))
    }

    /// Writes `NAME.crt`, and `server.crt` with `server.key` for Keyward itself, into the folder.
    pub(crate) fn write(&self, folder: &Path, name: &str) {
        let mut params = CertificateParams::new(vec![NAME.to_owned(), format!("*.{NAME}")]).expect("a name");
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        let key = KeyPair::generate().expect("a key");
        let leaf = params.signed_by(&key, &self.issuer).expect("signed");
        let write = |name: &str, pem: &str| std::fs::write(folder.join(name), pem).expect("written");
        write(&format!("{name}.crt"), &self.issuer.pem());
        write("server.crt", &leaf.pem());
        write("server.key", &key.serialize_pem());
    }

    /// A list that says that the certificates of these serial numbers are revoked.
    pub(crate) fn revoke(&self, serials: &[u64]) -> String {
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
        list.signed_by(&self.issuer).expect("signed").pem().expect("text")
    }

    /// TLS of a client that trusts this authority and shows that.
    pub(crate) fn tls(&self, shown: Option<&Shown>) -> Arc<ClientConfig> {
        self.tls_by(shown, rustls::DEFAULT_VERSIONS)
    }

    /// The same by one version of TLS.
    pub(crate) fn tls_of(
        &self,
        shown: Option<&Shown>,
        version: &'static SupportedProtocolVersion,
    ) -> Arc<ClientConfig> {
        self.tls_by(shown, &[version])
    }

    fn tls_by(
        &self,
        shown: Option<&Shown>,
        versions: &[&'static SupportedProtocolVersion],
    ) -> Arc<ClientConfig> {
        let mut roots = RootCertStore::empty();
        roots.add(self.issuer.der().clone()).expect("a root");
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(versions)
            .expect("versions")
            .with_root_certificates(roots);
        let mut config = match shown {
            None => builder.with_no_client_auth(),
            Some(shown) => builder
                .with_client_auth_cert(shown.chain.clone(), shown.key.clone_key())
                .expect("a certificate and its key"),
        };
        config.alpn_protocols = vec![b"h2".to_vec()];
        Arc::new(config)
    }
}

/// A self-signed certificate: nobody vouches for it.
pub(crate) fn self_signed(params: &CertificateParams) -> Shown {
    let key = KeyPair::generate().expect("a key");
    let leaf = params.self_signed(&key).expect("signed");
    Shown { chain: vec![leaf.der().clone()], key: key.into() }
}

/// Makes it end after `left` from now.
pub(crate) fn valid_for(mut params: CertificateParams, left: Duration) -> CertificateParams {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("after 1970");
    params.not_after = date_time_ymd(1970, 1, 1) + now + left;
    params
}

/// Adds a URI.
pub(crate) fn with_uri(mut params: CertificateParams, uri: &str) -> CertificateParams {
    params.subject_alt_names.push(SanType::URI(uri.try_into().expect("ASCII")));
    params
}

/// Client TLS over `io`.
///
/// # Errors
/// The handshake failed, as far as the client sees it: where it is refused for its certificate, it may learn that later.
pub(crate) async fn connect<T: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin>(
    io: T,
    config: Arc<ClientConfig>,
) -> std::io::Result<tokio_rustls::client::TlsStream<T>> {
    connect_to_host(io, config, NAME.to_owned()).await
}

/// The same, naming a host of the test's choice.
pub(crate) async fn connect_to_host<T: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin>(
    io: T,
    config: Arc<ClientConfig>,
    host: String,
) -> std::io::Result<tokio_rustls::client::TlsStream<T>> {
    let name = host.try_into().expect("a name");
    tokio_rustls::TlsConnector::from(config).connect(name, io).await
}
