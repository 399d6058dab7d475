//! What an operator sees of `keyward` on the command line: answers, faults, exit codes, and never a secret.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{Command, Output};

const SECRET: &str = "hunter2-c0rrect-h0rse";

fn keyward(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_keyward"));
    command.args(arguments).env_remove("KEYWARD_CONFIG");
    command
}

fn run(command: &mut Command) -> (i32, String, String) {
    let Output { status, stdout, stderr } = command.output().unwrap();
    let (stdout, stderr) = (String::from_utf8(stdout).unwrap(), String::from_utf8(stderr).unwrap());
    assert!(!stdout.contains(SECRET) && !stderr.contains(SECRET), "a secret was printed:\n{stdout}{stderr}");
    (status.code().expect("ended by itself"), stdout, stderr)
}

fn write(folder: &Path, name: &str, content: &str) -> String {
    let path = folder.join(name);
    fs::write(&path, content).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    path.to_str().unwrap().to_owned()
}

fn check(config: &str) -> (i32, String, String) {
    run(&mut keyward(&["check", "--config", config]))
}

/// The key path that each line begins with.
fn paths(stderr: &str) -> Vec<&str> {
    stderr.lines().map(|line| line.split(": ").next().unwrap()).collect()
}

#[test]
fn the_reference_is_valid() {
    let reference = concat!(env!("CARGO_MANIFEST_DIR"), "/config.toml");
    let (code, stdout, stderr) = check(reference);
    assert_eq!((code, stdout.as_str()), (0, "configuration is valid\n"), "{stderr}");
    assert_eq!(stderr.lines().count(), 1, "{stderr}");
    assert!(stderr.starts_with("warning: session.key_files: "), "{stderr}");

    let (code, stdout, _) = run(keyward(&["check"]).env("KEYWARD_CONFIG", reference));
    assert_eq!((code, stdout.as_str()), (0, "configuration is valid\n"));
}

#[test]
fn three_faults_are_told_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let text = "\
        [[listener]]\n\
        name = 'a'\n\
        address = 'nowhere'\n\
        [cluster]\n\
        endpoints = ['http://127.0.0.1:2379']\n\
        tokenttl = '5s'\n\
        [limits]\n\
        connections = 'many'\n";
    let (code, stdout, stderr) = check(&write(folder.path(), "keyward.toml", text));
    assert_eq!((code, stdout.as_str()), (64, ""));
    assert_eq!(paths(&stderr), ["listener[0].address", "cluster.tokenttl", "limits.connections"], "{stderr}");
    for (line, number) in stderr.lines().zip([3, 6, 8]) {
        assert!(line.ends_with(&format!("(line {number})")), "{line}");
    }
}

#[test]
fn a_key_file_that_cannot_be_read_is_named() {
    let folder = tempfile::tempdir().unwrap();
    // A folder: unlike a file without permissions, root cannot read it either.
    fs::create_dir(folder.path().join("server.key")).unwrap();
    let certificate = rcgen::generate_simple_self_signed(["keyward.test".to_owned()]).unwrap();
    write(folder.path(), "server.crt", &certificate.cert.pem());
    let text = "\
        [[listener]]\n\
        name = 'a'\n\
        address = '127.0.0.1:0'\n\
        tls = { cert = 'server.crt', key = 'server.key' }\n\
        [session]\n\
        key_files = ['absent.key']\n\
        [cluster]\n\
        endpoints = ['http://127.0.0.1:2379']\n";
    let (code, stdout, stderr) = check(&write(folder.path(), "keyward.toml", text));
    assert_eq!((code, stdout.as_str()), (64, ""));
    assert_eq!(paths(&stderr), ["listener[0].tls.key", "session.key_files[0]"], "{stderr}");
    for (line, name) in stderr.lines().zip(["server.key", "absent.key"]) {
        assert!(line.contains(folder.path().join(name).to_str().unwrap()), "{line}");
    }
}

#[test]
fn no_secret_is_printed_wherever_it_stands() {
    let folder = tempfile::tempdir().unwrap();
    // Each where it belongs, each in a file of the wrong kind, and each written into the configuration itself.
    let file = write(folder.path(), "secret", &format!("{SECRET}\n{SECRET}\n"));
    let pem = write(folder.path(), "secret.pem", &format!("-----BEGIN PRIVATE KEY-----\n{SECRET}\n"));
    let text = format!(
        "password = '{SECRET}'\n\
         [[listener]]\n\
         name = 'a'\n\
         address = '127.0.0.1:0'\n\
         default_user = 'app'\n\
         tls = {{ cert = '{pem}', key = '{pem}', client_ca = '{file}' }}\n\
         [cluster]\n\
         endpoints = ['http://root:{SECRET}@127.0.0.1:2379']\n\
         probe = '{SECRET}'\n\
         [session]\n\
         key_files = ['{file}', '{pem}', ['{SECRET}']]\n\
         [[user]]\n\
         name = 'app'\n\
         password = '{SECRET}'\n\
         password_file = '{file}'\n\
         [limits]\n\
         connections = '{SECRET}'\n"
    );
    let (code, _, stderr) = check(&write(folder.path(), "keyward.toml", &text));
    assert_eq!(code, 64);
    assert_eq!(paths(&stderr).len(), 10, "{stderr}");

    let broken = format!("[[user]]\nname = 'app'\npassword = '{SECRET}\n");
    let (code, _, stderr) = check(&write(folder.path(), "broken.toml", &broken));
    assert_eq!((code, stderr.lines().count()), (64, 1), "{stderr}");
}

#[test]
fn a_missing_file_and_a_wrong_command_line_end_with_64() {
    let (code, stdout, stderr) = check("/nowhere/keyward.toml");
    assert_eq!((code, stdout.as_str()), (64, ""));
    assert!(stderr.contains("/nowhere/keyward.toml"), "{stderr}");
    for wrong in [&["check"][..], &["serv"], &["--nonsense"], &[]] {
        let (code, stdout, stderr) = run(&mut keyward(wrong));
        assert_eq!((code, stdout.as_str()), (64, ""), "{wrong:?}");
        assert!(!stderr.is_empty(), "{wrong:?}");
    }
}

#[test]
fn the_version_is_the_packages() {
    let (code, stdout, _) = run(&mut keyward(&["--version"]));
    assert_eq!((code, stdout), (0, format!("keyward {}\n", env!("CARGO_PKG_VERSION"))));
}
