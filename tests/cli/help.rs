//! The help: every command in one line and in a group, its exit codes, examples and files in its own help and man page; and
//! hints for words that one tries.

use super::*;

/// The words of every command that can be run.
fn runnable() -> Vec<Vec<String>> {
    let top = commands_of(&[]);
    let mut all = Vec::new();
    for name in top {
        match name.as_str() {
            "policy" | "audit" => {
                all.extend(commands_of(&[&name]).into_iter().map(|below| vec![name.clone(), below]));
            }
            _ => all.push(vec![name]),
        }
    }
    all
}

fn help_of(words: &[String]) -> String {
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let (code, stdout, stderr) = run(&mut keyward(&[&["help"], &words[..]].concat()));
    assert_eq!((code, stderr.as_str()), (0, ""), "{words:?}");
    stdout
}

#[test]
fn the_overview_fits_a_terminal_and_has_every_command_in_a_group() {
    for arguments in [&["--help"][..], &["help"]] {
        let (code, stdout, _) = run(&mut keyward(arguments));
        assert_eq!(code, 0);
        assert!(stdout.lines().all(|line| line.chars().count() <= 80), "{stdout}");
        assert!(!stdout.contains("Others:") && !stdout.contains("xit code 1"), "{stdout}");
        for group in ["Set up:", "Run:", "Look:", "Act:", "Policy:", "Audit:"] {
            assert!(stdout.lines().any(|line| line == group), "{group} in {stdout}");
        }
    }
    let (_, stdout, _) = run(&mut keyward(&["--help"]));
    let names = commands_of(&[]);
    assert!(names.len() > 25 && names.iter().any(|name| name == "version"), "{names:?}");
    // One line each.
    let is_command = |line: &&str| {
        line.strip_prefix("  ").is_some_and(|rest| rest.starts_with(|first: char| first.is_alphabetic()))
    };
    let lines = stdout.lines().filter(is_command);
    assert_eq!(lines.count(), names.len(), "{stdout}");
}

#[test]
fn every_command_tells_its_exit_codes_and_examples_and_each_example_is_a_command() {
    let folder = tempfile::tempdir().unwrap();
    let man = folder.path().to_str().unwrap();
    assert_eq!(run(&mut keyward(&["man", man])).0, 0);
    let commands = runnable();
    assert!(commands.len() > 30, "{commands:?}");
    let mut examples = 0;
    for words in &commands {
        let help = help_of(words);
        let (_, exit) = help.split_once("Exit status:\n").unwrap_or_else(|| panic!("{words:?}: {help}"));
        assert!(exit.contains("  0 ") && exit.contains("  64 "), "{words:?}: {exit}");
        let (_, lines) = help.split_once("Examples:\n").unwrap_or_else(|| panic!("{words:?}: {help}"));
        let lines = lines.lines().take_while(|line| !line.is_empty());
        for example in lines.filter_map(|line| line.trim().strip_prefix("keyward ")) {
            examples += 1;
            let program = env!("CARGO_BIN_EXE_keyward");
            let mut shell = Command::new("sh");
            shell.args(["-c", &format!("{program} {example} --help")]);
            without_settings_of_this_process(&mut shell);
            let (code, stdout, stderr) = run(&mut shell);
            assert!(code == 0 && stdout.contains("Usage: "), "{example}: {stderr}");
        }
        let page = folder.path().join(format!("keyward-{}.1", words.join("-")));
        let page = fs::read_to_string(page).expect("the page of a command");
        for section in [".SH \"EXIT STATUS\"", ".SH EXAMPLES"] {
            assert!(page.contains(section), "{section} of {words:?}");
        }
    }
    assert!(examples > commands.len(), "{examples}");
    let status = fs::read_to_string(folder.path().join("keyward-status.1")).expect("a page");
    assert!(status.contains(".SH FILES") && status.contains("admin.sock"), "{status}");
    let whole = fs::read_to_string(folder.path().join("keyward.1")).expect("a page");
    assert!(whole.contains(".SH EXAMPLES") && whole.contains(".SH VERSION"), "{whole}");
}

#[test]
fn a_word_that_is_no_command_leads_to_what_does_it() {
    for (word, instead) in [
        ("defrag", "etcdctl defrag through Keyward"),
        ("clients", "keyward show clients"),
        ("stop", "keyward drain"),
    ] {
        let (code, stdout, stderr) = run(&mut keyward(&[word]));
        assert_eq!((code, stdout.as_str()), (64, ""));
        assert!(stderr.contains(&format!("instead: {instead}")), "{stderr}");
        assert!(!stderr.contains("similar"), "drain is no way to defragment: {stderr}");
    }
    let (code, _, stderr) = run(&mut keyward(&["statsu"]));
    assert!(code == 64 && stderr.contains("'status'") && !stderr.contains("instead"), "{stderr}");
}

#[test]
fn the_version_is_a_command_too() {
    let version = env!("CARGO_PKG_VERSION");
    let (code, stdout, _) = run(&mut keyward(&["version"]));
    assert!(code == 0 && stdout.starts_with(&format!("keyward {version}")), "{stdout}");
    let (code, stdout, _) = run(&mut keyward(&["version", "-o", "json"]));
    let told: serde_json::Value = serde_json::from_str(&stdout).expect("JSON");
    assert_eq!((code, &told["version"]), (0, &version.into()));
    assert!(told.as_object().is_some_and(|fields| fields.contains_key("commit")), "{told}");
}

/// One name for one form, and JSON wherever something is listed.
#[test]
fn every_answer_has_a_form_for_programs() {
    let served = Served::start("runtime.shards = 1\n", |_, _| {});
    let (code, stdout, _) = served.ask(&["sessions", "-o", "json"]);
    let listed: serde_json::Value = serde_json::from_str(&stdout).expect("JSON");
    assert_eq!((code, &listed), (0, &serde_json::json!({"sessions": [], "users": []})));
    assert_eq!(served.ask(&["block", "alice"]).0, 0);
    let (_, stdout, _) = served.ask(&["sessions"]);
    assert!(stdout.contains("REVOKED BEFORE        STATE    USER\n"), "{stdout}");
    assert!(stdout.lines().any(|line| line.ends_with("Z  blocked  alice")), "{stdout}");

    served.configure("limits.connections = 70\n");
    let (code, stdout, _) = served.ask(&["reload", "-o", "json"]);
    let applied: serde_json::Value = serde_json::from_str(&stdout).expect("JSON");
    let waiting = &applied["applied"]["waiting"];
    assert!(code == 0 && waiting == &serde_json::json!(["runtime"]), "{applied}");
    served.configure("limits.connections = 'many'\n");
    let (code, stdout, stderr) = served.ask(&["reload", "-o", "json"]);
    let refused: serde_json::Value = serde_json::from_str(&stdout).expect("JSON");
    assert_eq!((code, stderr.as_str()), (1, ""));
    assert!(refused["refused"][0].as_str().is_some_and(|fault| fault.contains("limits.connections")));

    // The old names of the same form.
    for (command, form) in [(["doctor", "-o"], "text"), (["doctor", "-o"], "table")] {
        assert_ne!(served.ask(&[&command[..], &[form]].concat()).0, 64, "{form}");
    }
    let reference = concat!(env!("CARGO_MANIFEST_DIR"), "/config.toml");
    for form in ["text", "table", "json"] {
        assert_eq!(run(&mut keyward(&["check", "--config", reference, "-o", form])).0, 0, "{form}");
    }
}
