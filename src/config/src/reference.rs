//! Tests of the repository's `config.toml`: complete keys, true defaults, valid examples.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use toml::{Table, Value};

use super::environment::name_of;
use super::known_keys::{KeyStep, known_keys};
use super::test_reference::{REFERENCE, revoking_authority, with_examples};
use super::toml_file::{self, TomlFile};
use super::toml_limits::TomlUsageLimits;
use super::upstream_users::{CredentialMaker, UserCredential};
use super::{
    Address, ClientAuth, ClusterPin, Config, ConfigSources, MapRule, MappingOutcome, RealmSetting, resolve,
};
use keyward_etcd::identity::Peer;

/// Required keys: listed in the reference without being a default.
const NEEDED: [&str; 3] = ["listener[0].name", "listener[0].address", "cluster.endpoints"];

/// Collects the paths of all keys, with or without (`null`) a value.
fn key_paths(value: &serde_json::Value, path: &str, keys: &mut BTreeSet<String>) {
    match value {
        serde_json::Value::Object(entries) => {
            for (key, value) in entries {
                let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
                key_paths(value, &path, keys);
            }
        }
        serde_json::Value::Array(elements) if elements.iter().any(serde_json::Value::is_object) => {
            for (index, element) in elements.iter().enumerate() {
                // The rows of the `user` table show different keys.
                let index = if path == "user" { 0 } else { index };
                key_paths(element, &format!("{path}[{index}]"), keys);
            }
        }
        _ => {
            keys.insert(path.to_owned());
        }
    }
}

fn parsed(text: &str) -> Config {
    let (config, _) = resolve::parse(text, Path::new("/")).unwrap_or_else(|faults| panic!("{faults}"));
    // Of the text itself, not of its meaning.
    Config { digest: Arc::default(), ..config }
}

#[test]
fn every_key_of_the_code_stands_in_it_and_no_other() {
    // A table added to the mirror and not here appears as a key without inner keys, and the test fails.
    let all = TomlFile {
        listener: vec![toml_file::TomlListener {
            tls: Some(toml_file::TomlListenerTls::default()),
            server_names: Some([("m1.etcd.example.com".to_owned(), String::new())].into()),
            limits: Some(TomlUsageLimits::default()),
            ..Default::default()
        }],
        advertise: toml_file::TomlAdvertise {
            members: Some([("m1".to_owned(), Vec::new())].into()),
            ..Default::default()
        },
        cluster: toml_file::TomlCluster {
            tls: Some(toml_file::TomlClusterTls::default()),
            srv: Some(toml_file::TomlClusterSrv::default()),
            probe: Some(toml_file::TomlProbe::default()),
            ..Default::default()
        },
        policy: toml_file::TomlPolicy { peer_limits: Some(TomlUsageLimits::default()), ..Default::default() },
        audit: toml_file::TomlAudit { otlp: Some(toml_file::TomlOtlp::default()), ..Default::default() },
        user: vec![toml_file::TomlUser::default()],
        jwt: vec![toml_file::TomlJwt::default()],
        map: vec![toml_file::TomlMap {
            claim: Some([("repository".to_owned(), String::new())].into()),
            ..Default::default()
        }],
        mint: Some(toml_file::TomlMint::default()),
        sign_jwt: Some(toml_file::TomlSignJwt::default()),
        etcd_jwt: Some(toml_file::TomlEtcdJwt::default()),
        ..Default::default()
    };
    let (mut known, mut written) = (BTreeSet::new(), BTreeSet::new());
    key_paths(&serde_json::to_value(all).unwrap(), "", &mut known);
    let table: Table = toml::from_str(&with_examples()).unwrap();
    key_paths(&serde_json::to_value(table).unwrap(), "", &mut written);
    // The example rules for certificates and for JWTs are separate: no rule has all conditions.
    let written = written.iter().map(|path| path.replace("map[1]", "map[0]")).collect();
    assert!(known.len() > 30, "{known:?}");
    assert_eq!(known, written);
}

#[test]
fn every_uncommented_value_is_the_default() {
    let reference: Table = toml::from_str(REFERENCE).unwrap();
    let expected = without_keys(&parsed(REFERENCE));
    let mut tried = 0;
    for (section, value) in &reference {
        let Value::Table(keys) = value else { continue };
        for key in keys.keys() {
            let path = format!("{section}.{key}");
            if NEEDED.contains(&path.as_str()) {
                continue;
            }
            let mut fewer = reference.clone();
            fewer[section].as_table_mut().unwrap().remove(key);
            let resolved = parsed(&toml::to_string(&fewer).unwrap());
            assert_eq!(without_keys(&resolved), expected, "{path}");
            tried += 1;
        }
    }
    assert!(tried > 14, "{tried}");
    let listener: Vec<_> = reference["listener"][0].as_table().unwrap().keys().collect();
    assert_eq!(listener, ["address", "name"]);
}

/// The configuration with masked secrets.
fn without_keys(config: &Config) -> String {
    format!("{config:#?}")
}

/// Writes the files named by the examples.
fn write_example_files(root: &Path) {
    std::fs::create_dir(root.join("tls")).unwrap();
    for (cert, key) in [
        ("tls/server.crt", "tls/server.key"),
        ("tls/client.crt", "tls/client.key"),
        ("tls/etcd-ca.crt", "tls/unused.key"),
        ("tls/collector-ca.crt", "tls/unused.key"),
        ("tls/audit.crt", "tls/audit.key"),
        ("tls/trace.crt", "tls/trace.key"),
    ] {
        let made = rcgen::generate_simple_self_signed(["keyward.test".to_owned()]).unwrap();
        std::fs::write(root.join(cert), made.cert.pem()).unwrap();
        std::fs::write(root.join(key), made.signing_key.serialize_pem()).unwrap();
    }
    let (ca, crl) = revoking_authority();
    std::fs::write(root.join("tls/clients-ca.crt"), ca).unwrap();
    std::fs::write(root.join("tls/clients.crl"), crl).unwrap();
    let pem = rcgen::KeyPair::generate().unwrap().public_key_pem();
    std::fs::write(root.join("ci-keys.json"), pem).unwrap();
    let user = rcgen::KeyPair::generate().unwrap();
    let mut named = rcgen::CertificateParams::default();
    named.distinguished_name.push(rcgen::DnType::CommonName, "operator");
    std::fs::write(root.join("tls/operator.crt"), named.self_signed(&user).unwrap().pem()).unwrap();
    std::fs::write(root.join("tls/operator.key"), user.serialize_pem()).unwrap();
    let mut mint = rcgen::CertificateParams::default();
    mint.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Constrained(0));
    mint.extended_key_usages = vec![rcgen::ExtendedKeyUsagePurpose::ClientAuth];
    std::fs::write(root.join("tls/mint.crt"), mint.self_signed(&user).unwrap().pem()).unwrap();
    std::fs::write(root.join("tls/mint.key"), user.serialize_pem()).unwrap();
    std::fs::write(root.join("tls/etcd-jwt.key"), user.serialize_pem()).unwrap();
    std::fs::write(root.join("tls/etcd-jwt.pub"), user.public_key_pem()).unwrap();
    let signing = rcgen::KeyPair::generate_for(&rcgen::PKCS_ED25519).unwrap();
    std::fs::write(root.join("audit.key"), signing.serialize_pem()).unwrap();
    std::fs::write(root.join("collector-authorization"), "Bearer hunter2\n").unwrap();
    std::fs::write(root.join("collector-headers"), "authorization: Bearer hunter2\n").unwrap();
    std::fs::write(root.join("session.key"), "q83vEjRWeJCrze8SNFZ4kKvN7xI0VniQq83vEjRWeJA=\n").unwrap();
    std::fs::write(root.join("policy.toml"), include_str!("../../../deploy/policy.toml")).unwrap();
    std::fs::write(root.join("app.password"), "app-hunter2\n").unwrap();
    std::fs::write(root.join("probe.password"), "probe-hunter2\n").unwrap();
    std::fs::write(
        root.join("users"),
        "nobody:$argon2id$v=19$m=8,t=1,p=1$AAAAAAAAAAAAAAAAAAAAAA$\
         AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA\n",
    )
    .unwrap();
}

#[test]
fn its_examples_are_valid_together() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    write_example_files(root);
    let text = with_examples().replace("/etc/keyward", root.to_str().unwrap()).replace("\"http:", "\"https:");
    // Keys replacing the endpoints and `cluster.tls.ca`.
    let instead = ["srv = ", "pinned_sha256 = ", "insecure_skip_verify = "];
    let stays = |line: &&str| !instead.iter().any(|key| line.starts_with(key));
    let text: String = text.lines().filter(stays).flat_map(|line| [line, "\n"]).collect();
    assert_ne!(text, REFERENCE);

    let config = parsed(&text);
    let listener = &config.listeners[0];
    assert_eq!(listener.address, Address::Tcp("127.0.0.1:2379".parse().unwrap()));
    assert!(matches!(listener.tls.as_ref().unwrap().clients, ClientAuth::Required(_)));
    let UserCredential::Password(password) = &config.users.named[&"app".into()] else { panic!("{config:?}") };
    assert_eq!(password.expose().as_str(), "app-hunter2");
    assert_eq!(config.users.named.len(), 3);
    assert_eq!(config.users.others, Some(CredentialMaker::Mint));
    assert_eq!(config.users.sign_jwt.as_ref().unwrap().method.name, "ES256");
    let outcomes: Vec<_> = config.mapping.rules.iter().map(MapRule::outcome).collect();
    let app = MappingOutcome::User("app".into());
    assert_eq!(outcomes, [&app, &MappingOutcome::Same, &app], "the last one is default_user");
    assert_eq!(&*config.issuers.listed[0].issuer, "https://ci.example.com");
    assert!(config.mapping.rules[2].applies(&Peer::Listener("clients".into()), None));
    assert_eq!(config.mapping.default, Some("app".into()));
    assert_eq!(&*listener.tls.as_ref().unwrap().clients.ca().unwrap().name, "staff");
    let cluster = &config.cluster;
    assert!(cluster.tls.as_ref().unwrap().identity.is_some());
    assert!(matches!(cluster.pin, ClusterPin::Id(id) if id.to_string() == "cdf818194e3a8c32"));
    assert_eq!(cluster.probe.as_ref().unwrap().password.expose(), "probe-hunter2");
    let told = config.advertise.to_clients_of(&listener.name).unwrap();
    assert_eq!(told.client_urls, ["https://etcd.example.com:2379"]);
    assert_eq!(config.session.keys[0].expose()[..3], [0xab, 0xcd, 0xef]);
    assert_eq!(config.session.realm, RealmSetting::Named("production".into()));
    let printed = format!("{config:#?}");
    assert!(!printed.contains("hunter2"), "{printed}");
}

/// The variables of all keys of a table, each with the value as text or TOML.
fn variables_of(table: &Table) -> Vec<(String, String)> {
    let mut variables = Vec::new();
    for key in known_keys::<TomlFile>() {
        let mut places = vec![(Vec::new(), Value::Table(table.clone()))];
        for step in &key {
            let mut next = Vec::new();
            for (steps, value) in places {
                let with = |step: KeyStep| [&steps[..], &[step]].concat();
                match (step, &value) {
                    (KeyStep::Key(key), Value::Table(table)) => next
                        .extend(table.get(key).map(|value| (with(KeyStep::Key(key.clone())), value.clone()))),
                    (KeyStep::Row(_), Value::Array(rows)) => {
                        let rows = rows.iter().cloned().enumerate();
                        next.extend(rows.map(|(row, value)| (with(KeyStep::Row(row)), value)));
                    }
                    _ => {}
                }
            }
            places = next;
        }
        let text = |value: Value| match value {
            Value::String(text) => text,
            value => value.to_string(),
        };
        variables.extend(places.into_iter().map(|(steps, value)| (name_of(&steps), text(value))));
    }
    variables
}

/// Every key of the reference, set by its variable, is what the file sets.
#[test]
fn every_key_can_be_set_by_its_variable() {
    let table: Table = toml::from_str(&with_examples()).unwrap();
    let variables = variables_of(&table);
    let keys: BTreeSet<String> = variables.iter().map(|(name, _)| name.replace("__1__", "__0__")).collect();
    let mut written = BTreeSet::new();
    key_paths(&serde_json::to_value(&table).unwrap(), "", &mut written);
    let tables_of_texts =
        written.iter().filter(|path| path.contains("server_names.") || path.contains(".claim."));
    let others = tables_of_texts.chain(written.iter().filter(|path| path.starts_with("advertise.members.")));
    assert_eq!(others.count(), 3, "{written:?}");
    assert!(variables.len() >= written.len(), "{} of {}: {keys:?}", variables.len(), written.len());
    let from_file = format!("{:?}", toml::from_str::<TomlFile>(&with_examples()).unwrap());
    let set = variables.iter().map(|(name, value)| (name.into(), value.into()));
    let (from_variables, places) = ConfigSources::default().with_environment(set).mirror();
    assert_eq!(format!("{:?}", from_variables.unwrap()), from_file);
    assert_eq!(places.conclude(Some(())), Ok(((), Vec::new())));

    // Each alone, so that no key is set by another's variable, with lists in their short form.
    for (name, value) in &variables {
        if name.matches("__").count() > 1
            && (name.contains("__1__") || name.contains("__2__") || name.contains("__3__"))
        {
            continue;
        }
        let list = toml::from_str::<Table>(&format!("v = {value}")).ok();
        let list = list.and_then(|table| table["v"].clone().try_into::<Vec<String>>().ok());
        let short = list.map_or(value.clone(), |list| list.join(","));
        let of = |value: &str| {
            let one = [(name.into(), value.into())].into_iter();
            let (mirror, findings) = ConfigSources::default().with_environment(one).mirror();
            assert_eq!(findings.conclude(Some(())), Ok(((), Vec::new())), "{name}");
            format!("{:?}", mirror.unwrap())
        };
        assert_eq!(of(value), of(&short), "{name}");
        assert_ne!(of(value), format!("{:?}", TomlFile::default()), "{name}");
    }
}
