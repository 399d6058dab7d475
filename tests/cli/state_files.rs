//! What Keyward keeps over a restart: written until it is on the disk, and a configuration cut short since.

use std::fs;

use super::{LIMIT, Served, keyward, run, write};

#[test]
fn a_state_file_on_a_full_disk_is_told_and_written_once_there_is_room() {
    let served = Served::start("revocation.state_file = 'kept/revocations'\n", |_, folder| {
        fs::create_dir(folder.join("kept")).expect("a folder");
    });
    let kept = served.folder.path().join("kept");
    fs::remove_dir_all(&kept).expect("it is ours");
    let (code, _, told) = served.ask(&["block", "mallory"]);
    assert!(code == 74 && told.contains("tried again until it is on the disk"), "{code}: {told}");
    let (code, told, _) = served.ask(&["doctor"]);
    assert!(code != 0 && told.contains("state_file_unwritten"), "{code}: {told}");
    assert!(told.contains("kept/revocations has not been written for 0 minutes"), "{told}");
    fs::create_dir(&kept).expect("room");
    served.logged("written again");
    let (_, told, _) = served.ask(&["doctor"]);
    assert!(!told.contains("state_file_unwritten"), "{told}");
    let text = fs::read_to_string(kept.join("revocations")).expect("written");
    assert!(text.contains("mallory"), "{text}");
}

#[test]
fn a_start_does_not_take_a_configuration_that_was_cut_short_in_place() {
    let lines = "runtime.state_dir = 'state'\npolicy = { mode = 'enforce', file = 'policy.toml' }\n";
    let policy = "[[role]]\nname = 'reader'\nallow = [{ actions = ['read'], everything = true }]\n\
                  [[binding]]\npeer = 'listener:a'\nroles = ['reader']\n";
    let mut served = Served::start(lines, |_, folder| {
        fs::create_dir(folder.join("state")).expect("a folder");
        write(folder, "policy.toml", policy);
    });
    let at = |name: &str| served.folder.path().join(name);
    let began = std::time::Instant::now();
    while !at("state/configuration.json").exists() {
        assert!(began.elapsed() < LIMIT, "the digests are not kept");
        drop(served.ask(&["status"]));
    }
    // It ends; a writer whose disk is full rewrites both files meanwhile.
    served.child.kill().and_then(|()| served.child.wait()).expect("it is ours");
    let whole = fs::read_to_string(at("keyward.toml")).expect("ours");
    let head = whole.find("policy = ").expect("a policy");
    fs::write(at("keyward.toml"), whole.get(..head).expect("a head")).expect("ours");
    let config = at("keyward.toml").to_str().expect("UTF-8").to_owned();
    for command in ["serve", "check"] {
        let (code, _, told) = run(&mut keyward(&[command, "--config", &config]));
        assert!(
            code == 64 && told.contains("keyward.toml: was written in place"),
            "{command}: {code}: {told}"
        );
    }
    fs::write(at("keyward.toml"), &whole).expect("ours");
    fs::write(
        at("policy.toml"),
        policy.get(..policy.find("[[binding]]").expect("a binding")).expect("a head"),
    )
    .expect("ours");
    let (code, _, told) = run(&mut keyward(&["serve", "--config", &config]));
    assert!(code == 64 && told.contains("policy.toml: was written in place"), "{code}: {told}");
    // A rename says that it is meant so.
    fs::copy(at("policy.toml"), at("new")).expect("ours");
    fs::rename(at("new"), at("policy.toml")).expect("ours");
    let (code, _, told) = run(&mut keyward(&["check", "--config", &config]));
    assert_eq!(code, 0, "{told}");
}
