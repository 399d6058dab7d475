//! Tests of `[[user]]`, `[mint]` and `[sign_jwt]`: accepted and refused rows and keys.

use std::path::Path;

use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair,
};

use crate::upstream_users::{CredentialMaker, JwtKey, UserCredential};
use crate::{Config, resolve};
use keyward_etcd::identity::UserName;

const LISTENER: &str = "[[listener]]\nname = 'a'\naddress = '127.0.0.1:2'\n";
const HTTPS: &str = "[cluster]\nendpoints = ['https://127.0.0.1:1']\ntls = { ca = 'etcd.crt' }\n";
const MINT: &str = "[mint]\nca = 'mint.crt'\nkey = 'mint.key'\n";
const SIGN: &str = "[sign_jwt]\nmethod = 'ES256'\nkey = 'mint.key'\n";

/// Properties of a test certificate.
struct TestCertificate {
    name: &'static str,
    ca: IsCa,
    usages: Vec<ExtendedKeyUsagePurpose>,
    until: i32,
}

const CLIENT: ExtendedKeyUsagePurpose = ExtendedKeyUsagePurpose::ClientAuth;
const SERVER: ExtendedKeyUsagePurpose = ExtendedKeyUsagePurpose::ServerAuth;

fn path_length(length: u8) -> IsCa {
    IsCa::Ca(BasicConstraints::Constrained(length))
}

fn write(folder: &Path, file: &str, made: TestCertificate) {
    write_with(folder, file, made, &KeyPair::generate().unwrap());
}

fn write_with(folder: &Path, file: &str, made: TestCertificate, key: &KeyPair) {
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, made.name);
    params.is_ca = made.ca;
    params.extended_key_usages = made.usages;
    params.not_after = rcgen::date_time_ymd(made.until, 1, 1);
    std::fs::write(folder.join(file).with_extension("crt"), params.self_signed(key).unwrap().pem()).unwrap();
    std::fs::write(folder.join(file).with_extension("key"), key.serialize_pem()).unwrap();
}

/// A folder with valid certificates of every kind, and with certificates having a single fault each.
fn folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let made = |name, ca, usages: &[_]| TestCertificate { name, ca, usages: usages.to_vec(), until: 4000 };
    write(at, "etcd", made("etcd", IsCa::Ca(BasicConstraints::Unconstrained), &[]));
    let key = KeyPair::generate().unwrap();
    write_with(at, "mint", made("mint", path_length(0), &[CLIENT]), &key);
    write_with(at, "twin", made("etcd", IsCa::Ca(BasicConstraints::Unconstrained), &[]), &key);
    write(at, "leaf", made("leaf", IsCa::ExplicitNoCa, &[CLIENT]));
    write(at, "plain", made("plain", IsCa::NoCa, &[CLIENT]));
    write(at, "long", made("long", path_length(1), &[CLIENT]));
    write(at, "endless", made("endless", IsCa::Ca(BasicConstraints::Unconstrained), &[CLIENT]));
    write(at, "server", made("server", path_length(0), &[CLIENT, SERVER]));
    write(at, "code", made("code", path_length(0), &[CLIENT, ExtendedKeyUsagePurpose::CodeSigning]));
    write(
        at,
        "odd",
        made("odd", path_length(0), &[CLIENT, ExtendedKeyUsagePurpose::Other(vec![1, 3, 6, 1])]),
    );
    write(at, "any", made("any", path_length(0), &[]));
    write(at, "over", TestCertificate { until: 2020, ..made("over", path_length(0), &[CLIENT]) });
    write(at, "alice", made("alice", IsCa::NoCa, &[CLIENT]));
    write(at, "late", TestCertificate { until: 2020, ..made("alice", IsCa::NoCa, &[CLIENT]) });
    write(at, "member", made("alice", IsCa::NoCa, &[SERVER]));
    std::fs::write(at.join("pw"), "hunter2\n").unwrap();
    std::fs::write(at.join("shared"), "0123456789abcdef\n").unwrap();
    std::fs::write(at.join("short"), "0123456789\n").unwrap();
    folder
}

fn read(text: &str) -> Result<(Config, Vec<String>), Vec<String>> {
    let folder = folder();
    match resolve::parse(&format!("{LISTENER}{text}"), folder.path()) {
        Ok((config, warnings)) => {
            let told = warnings.into_iter().map(|warning| warning.path);
            Ok((config, told.filter(|path| path != "session.key_files" && !path.ends_with("key")).collect()))
        }
        Err(faults) => {
            assert!(!faults.to_string().contains("hunter2"), "{faults}");
            Err(faults.iter().map(|fault| fault.path.clone()).collect())
        }
    }
}

fn faults(text: &str) -> Vec<String> {
    read(text).map(|(config, _)| config).expect_err(text)
}

fn valid(text: &str) -> Config {
    read(text).unwrap_or_else(|faults| panic!("{text}\n{faults:?}")).0
}

fn user(name: &str, credential: &str) -> String {
    format!("[[user]]\nname = '{name}'\n{credential}\n")
}

#[test]
fn a_user_has_exactly_one_credential() {
    let all = format!("{HTTPS}{MINT}{SIGN}");
    let one = |name: &str, credential: &str| valid(&format!("{all}{}", user(name, credential))).users;
    let of = |name: &str, credential: &str| one(name, credential).named[&UserName::from(name)].clone();
    assert!(matches!(of("bob", "password_file = 'pw'"), UserCredential::Password(_)));
    assert!(matches!(of("alice", "cert = 'alice.crt'\nkey = 'alice.key'"), UserCredential::Certificate(_)));
    assert!(matches!(of("bob", "mint = true"), UserCredential::Made(CredentialMaker::Mint)));
    assert!(matches!(of("root", "jwt = true\nmint = false"), UserCredential::Made(CredentialMaker::Jwt)));
    assert_eq!(one("*", "jwt = true").others, Some(CredentialMaker::Jwt));

    assert_eq!(faults(&format!("{all}{}", user("same", "mint = true"))), ["user[0].name"], "as = \"same\"");
    let fault = |credential: &str| faults(&format!("{all}{}", user("alice", credential)));
    assert_eq!(fault(""), ["user[0].password_file"]);
    assert_eq!(fault("mint = false"), ["user[0].password_file"]);
    assert_eq!(fault("mint = true\njwt = true"), ["user[0]"]);
    assert_eq!(fault("mint = true\npassword_file = 'pw'"), ["user[0]"]);
    assert_eq!(fault("cert = 'alice.crt'"), ["user[0].key"]);
    assert_eq!(fault("cert = 'alice.crt'\nkey = 'leaf.key'"), ["user[0].key"]);
}

#[test]
fn a_row_for_all_names_proves_none_by_one_password_or_certificate_and_never_root() {
    for credential in ["password_file = 'pw'", "cert = 'alice.crt'\nkey = 'alice.key'"] {
        let told = faults(&format!("{HTTPS}{}", user("*", credential)));
        assert!(told.iter().any(|path| path.starts_with("user[0]")), "{told:?}");
    }
    let users = valid(&format!("{HTTPS}{MINT}{}", user("*", "mint = true"))).users;
    assert!(
        users.has_credential_for(&"anybody".into())
            && !users.has_credential_for(&"root".into())
            && users.named.is_empty()
    );
    let default = |user: &str, rows: &str| {
        read(&format!("default_user = '{user}'\n{HTTPS}{MINT}{rows}")).map(|_| ()).unwrap_or_else(|told| {
            assert_eq!(told, ["listener[0].default_user"], "{user}");
            panic!("refused")
        });
    };
    default("anybody", &user("*", "mint = true"));
    default("root", &user("root", "mint = true"));
    let root = faults(&format!("default_user = 'root'\n{HTTPS}{MINT}{}", user("*", "mint = true")));
    assert_eq!(root, ["listener[0].default_user"]);
}

#[test]
fn a_certificate_is_the_users_own_and_is_shown_over_tls() {
    let with = |cert: &str| user("alice", &format!("cert = '{cert}.crt'\nkey = '{cert}.key'"));
    assert_eq!(read(&format!("{HTTPS}{}", with("alice"))).unwrap().1, Vec::<String>::new());
    assert_eq!(read(&format!("{HTTPS}{}", with("late"))).unwrap().1, ["user[0].cert"]);
    for bad in ["leaf", "member"] {
        assert_eq!(faults(&format!("{HTTPS}{}", with(bad))), ["user[0].cert"], "{bad}");
    }
    let plain = "[cluster]\nendpoints = ['http://127.0.0.1:1']\n";
    assert_eq!(faults(&format!("{plain}{}", with("alice"))), ["user[0].cert"]);
    assert_eq!(faults(&format!("{plain}{MINT}{}", user("a", "mint = true"))), ["user[0].mint"]);
}

#[test]
fn certificates_are_minted_from_an_authority_for_clients_alone() {
    let mint = |name: &str| format!("{HTTPS}[mint]\nca = '{name}.crt'\nkey = '{name}.key'\n");
    valid(&mint("mint"));
    for bad in ["leaf", "plain", "long", "endless", "server", "code", "odd", "any", "over"] {
        assert_eq!(faults(&mint(bad)), ["mint.ca"], "{bad}");
    }
    for trusted in ["mint.crt", "twin.crt"] {
        let told = faults(&mint("mint").replace("etcd.crt", trusted));
        assert_eq!(told, ["mint.ca"], "{trusted}: it vouches for members");
    }
    assert_eq!(faults(&format!("{HTTPS}[mint]\nca = 'mint.crt'\nkey = 'leaf.key'\n")), ["mint.key"]);
    assert_eq!(faults(&format!("{HTTPS}[mint]\n")), ["mint.ca", "mint.key"]);
    assert_eq!(faults(&format!("{HTTPS}{}", user("a", "mint = true"))), ["mint.ca"]);
    for bad in ["61m", "0s"] {
        let told = faults(&format!("{HTTPS}{MINT}lifetime = '{bad}'\n"));
        assert_eq!(told, ["mint.lifetime"], "{bad}");
    }
}

#[test]
fn tokens_are_signed_with_a_key_of_the_methods_kind() {
    let sign = |method: &str, key: &str| format!("{HTTPS}[sign_jwt]\nmethod = '{method}'\nkey = '{key}'\n");
    valid(&sign("ES256", "mint.key"));
    let shared = valid(&sign("HS256", "shared")).users;
    let JwtKey::Shared(key) = &shared.sign_jwt.as_ref().unwrap().key else { panic!("{shared:?}") };
    assert_eq!(key.expose().last(), Some(&b'\n'), "etcd takes every byte");
    for (method, key, path) in [
        ("ES384", "mint.key", "sign_jwt.key"),
        ("RS256", "mint.key", "sign_jwt.key"),
        ("EdDSA", "mint.key", "sign_jwt.key"),
        ("ES256", "shared", "sign_jwt.key"),
        ("HS256", "short", "sign_jwt.key"),
        ("none", "shared", "sign_jwt.method"),
        ("es256", "mint.key", "sign_jwt.method"),
    ] {
        assert_eq!(faults(&sign(method, key)), [path], "{method} {key}");
    }
    assert_eq!(faults(&format!("{HTTPS}[sign_jwt]\n")), ["sign_jwt.method", "sign_jwt.key"]);
    assert_eq!(faults(&format!("{HTTPS}{}", user("a", "jwt = true"))), ["sign_jwt.key"]);
    let printed = format!("{shared:?}");
    assert!(!printed.contains("48, 49, 50") && !printed.contains("0123456789"), "{printed}");
}
