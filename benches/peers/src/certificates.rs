//! TLS of the comparison: a CA and a server certificate made for one run, and rustls on both sides.
//!
//! Owns: the files `ca.crt`, `server.crt`, `server.key`, and `server.pem` with chain and key for HAProxy. Must
//! not know: proxies. Invariant: rustls uses ring, as in Keyward; a server offers only `h2` and sends no more
//! tickets than rustls does by default.

use std::fs::{self, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::sync::Arc;

use data_encoding::BASE64;
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, RootCertStore, ServerConfig};

use crate::Failure;

/// The protocol name of HTTP/2 in TLS.
pub(crate) const H2: &[u8] = b"h2";

/// Bytes of one line of PEM.
const LINE: usize = 48;

/// Makes the CA and the server's certificate for 127.0.0.1, and writes the files into `folder`.
pub(crate) fn write(folder: &Path) -> Result<(), Failure> {
    let mut authority = CertificateParams::default();
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    authority.distinguished_name.push(DnType::CommonName, "CA of one run");
    let authority_key = KeyPair::generate()?;
    let authority_certificate = authority.self_signed(&authority_key)?;
    let issuer = Issuer::new(authority, authority_key);
    let mut server = CertificateParams::new(vec!["localhost".to_owned(), "127.0.0.1".to_owned()])?;
    server.distinguished_name.push(DnType::CommonName, "localhost");
    let server_key = KeyPair::generate()?;
    let server_certificate = server.signed_by(&server_key, &issuer)?;
    let authority_pem = pem("CERTIFICATE", authority_certificate.der());
    let chain = pem("CERTIFICATE", server_certificate.der()) + &authority_pem;
    let key = pem("PRIVATE KEY", &server_key.serialize_der());
    fs::write(folder.join("ca.crt"), authority_pem)?;
    fs::write(folder.join("server.crt"), &chain)?;
    write_secret(&folder.join("server.key"), &key)?;
    write_secret(&folder.join("server.pem"), &(chain + &key))
}

fn write_secret(file: &Path, text: &str) -> Result<(), Failure> {
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(file)?;
    Ok(file.write_all(text.as_bytes())?)
}

fn pem(label: &str, der: &[u8]) -> String {
    let mut text = format!("-----BEGIN {label}-----\n");
    // OpenSSL refuses long lines.
    for line in der.chunks(LINE) {
        text.push_str(&BASE64.encode(line));
        text.push('\n');
    }
    text + &format!("-----END {label}-----\n")
}

/// The TLS configuration of a server, from the files in `folder`.
pub(crate) fn server_config(folder: &Path) -> Result<Arc<ServerConfig>, Failure> {
    let chain: Result<Vec<_>, _> = CertificateDer::pem_file_iter(folder.join("server.crt"))?.collect();
    let key = PrivateKeyDer::from_pem_file(folder.join("server.key"))?;
    let mut config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()?
        .with_no_client_auth()
        .with_single_cert(chain?, key)?;
    config.alpn_protocols = vec![H2.to_vec()];
    Ok(Arc::new(config))
}

/// The TLS configuration of a client that trusts the CA in the file `authority`.
pub(crate) fn client_config(authority: &Path) -> Result<Arc<ClientConfig>, Failure> {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(authority)?)?;
    let mut config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()?
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = vec![H2.to_vec()];
    Ok(Arc::new(config))
}
