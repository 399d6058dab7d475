//! `keyward audit verify`: the files of several replicas are chains of their own, named in the report.
//! `keyward audit search`: the records of several replicas come in the order of their times.

use std::path::Path;

use keyward::audit::chain::{Chain, ChainEnd};

use super::{keyward, run};

/// Lines of a chain, one for each event.
fn lines(chain: &mut Chain, events: &[&str]) -> String {
    let mut lines = Vec::new();
    for event in events {
        let (event, file) = event.split_once(' ').unwrap_or((event, ""));
        let file = if file.is_empty() { String::new() } else { format!(",\"previous_file\":\"{file}\"") };
        let body = format!("{{\"time\":\"2026-01-02T00:00:00.000000Z\",\"event\":\"{event}\"{file}}}");
        chain.append(body.as_bytes(), &mut lines);
    }
    String::from_utf8(lines).expect("JSON")
}

/// Writes the files, and verifies all of them in the order of their names.
fn verify(folder: &Path, files: &[(&str, &str)]) -> (i32, String, String) {
    let mut command = keyward(&["audit", "verify"]);
    for (name, text) in files {
        command.arg(super::write(folder, name, text));
    }
    let (code, stdout, stderr) = run(&mut command);
    let folder = format!("{}/", folder.display());
    (code, stdout.replace(&folder, ""), stderr.replace(&folder, ""))
}

#[test]
fn files_of_two_replicas_are_two_chains_and_only_one_with_a_fault_is_a_fault() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut one = Chain::new("keyward-1", ChainEnd::default());
    let mut two = Chain::new("keyward-2", ChainEnd::default());
    let first = lines(&mut one, &["start", "change", "change"]);
    let second = lines(&mut one, &["continue 1.log", "change"]);
    let other = lines(&mut two, &["start", "change"]);
    let files = [("0.log", &*second), ("1.log", &*first), ("2.log", &*other)];
    let (code, stdout, stderr) = verify(folder.path(), &files);
    assert_eq!((code, &*stderr), (0, ""));
    let told: Vec<_> = stdout.lines().filter(|line| !line.contains("signatures")).collect();
    assert_eq!(
        told,
        [
            "the files belong to 2 replicas, each with a chain of its own",
            "replica \"keyward-1\": 1.log 0.log",
            "  5 records, 1 to 5, 2026-01-02T00:00:00.000000Z to 2026-01-02T00:00:00.000000Z: the chain is whole",
            "replica \"keyward-2\": 2.log",
            "  2 records, 1 to 2, 2026-01-02T00:00:00.000000Z to 2026-01-02T00:00:00.000000Z: the chain is whole",
        ]
    );
    // A fault of one replica's chain is told beside the other's report.
    let changed = first.replacen("change", "chance", 1);
    let (code, stdout, stderr) = verify(folder.path(), &[files[0], ("1.log", &changed), files[2]]);
    assert_eq!((code, &*stdout), (1, ""));
    assert!(stderr.contains("\n  1.log:2: the line was changed"), "{stderr}");
    assert!(stderr.contains("\nreplica \"keyward-2\": 2.log\n  2 records, "), "{stderr}");
    // The lines of two replicas in one file.
    let (code, _, stderr) = verify(folder.path(), &[("1.log", &format!("{first}{other}"))]);
    assert_eq!(code, 1);
    assert!(stderr.contains("1.log:4: replica \"keyward-2\" wrote the line, not \"keyward-1\""), "{stderr}");
    // A file without any record is a fault, whoever wrote it.
    let (code, _, stderr) = verify(folder.path(), &[files[1], files[2], ("3.log", "")]);
    assert!(
        code == 1 && stderr.contains("of no replica: 3.log\n  3.log:1: the file has no record"),
        "{stderr}"
    );
}

#[test]
fn a_replica_that_was_renamed_between_two_starts_is_one_chain() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut chain = Chain::new("old", ChainEnd::default());
    let first = lines(&mut chain, &["start", "change"]);
    // Within a file, and at the begin of a file.
    let mut chain = Chain::new("new", chain.end);
    let second = lines(&mut chain, &["start", "change"]);
    let third = lines(&mut Chain::new("newest", chain.end), &["start 1.log", "change"]);
    for files in [
        &[("1.log", &*format!("{first}{second}")), ("2.log", &third)][..],
        &[("1.log", &format!("{first}{second}{third}"))],
    ] {
        let (code, stdout, stderr) = verify(folder.path(), files);
        assert_eq!((code, &*stderr), (0, ""));
        assert!(stdout.starts_with("6 records, 1 to 6, "), "{stdout}");
    }
}

/// Two replicas on one machine have its name, unless they are told apart.
#[test]
fn replicas_of_one_name_are_chains_of_their_own_too() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut one = Chain::new("host", ChainEnd::default());
    let mut two = Chain::new("host", ChainEnd::default());
    let (first, second) =
        (lines(&mut one, &["start", "change"]), lines(&mut one, &["continue 1.log", "change"]));
    let (third, fourth) = (lines(&mut two, &["start", "read", "read"]), lines(&mut two, &["continue 3.log"]));
    let files = [("1.log", &*first), ("2.log", &second), ("3.log", &third), ("4.log", &fourth)];
    let (code, stdout, stderr) = verify(folder.path(), &files);
    assert_eq!((code, &*stderr), (0, ""));
    assert!(stdout.contains("several replicas have the name \"host\""), "{stdout}");
    for chain in ["1.log 2.log\n  4 records, 1 to 4, ", "3.log 4.log\n  4 records, 1 to 4, "] {
        assert!(stdout.contains(&format!("replica \"host\": {chain}")), "{stdout}");
    }
    // A changed line is a fault of its own chain.
    let changed = third.replacen("read", "note", 1);
    let (code, _, stderr) = verify(folder.path(), &[files[0], files[1], ("3.log", &changed), files[3]]);
    assert!(code == 1 && stderr.contains("3.log:2: the line was changed"), "{stderr}");
    // A file missing in the middle of the only chain breaks it.
    let fifth = lines(&mut one, &["continue 2.log", "change"]);
    let (code, _, stderr) = verify(folder.path(), &[files[0], ("5.log", &fifth)]);
    assert!(code == 1 && stderr.contains("5.log:1: the line does not follow"), "{stderr}");
}

/// After a crash, `audit.log*` names the torn end beside the log as well.
#[test]
fn a_torn_end_beside_the_log_is_no_part_of_the_chain() {
    let folder = tempfile::tempdir().expect("a folder");
    let log = lines(&mut Chain::new("a", ChainEnd::default()), &["start", "change"]);
    let torn = ("audit.log.torn", "{\"v\":1,\"se\n");
    let (code, stdout, stderr) = verify(folder.path(), &[("audit.log", &log), torn]);
    assert_eq!((code, &*stderr), (0, ""));
    assert!(stdout.starts_with("2 records, 1 to 2, "), "{stdout}");
    assert_eq!(verify(folder.path(), &[torn]).0, 1, "it alone is not passed over");
}

/// The first record of `keyward-2` is late: the records of one chain keep their order.
#[test]
fn a_search_in_the_files_of_several_replicas_prints_by_time() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = |name: &str, chain: &mut Chain, seconds: &[u8]| {
        let mut lines = Vec::new();
        for second in seconds {
            let body = format!("{{\"time\":\"2026-01-02T00:00:{second:02}.000000Z\",\"event\":\"change\"}}");
            chain.append(body.as_bytes(), &mut lines);
        }
        super::write(folder.path(), name, &String::from_utf8(lines).expect("JSON"))
    };
    let mut one = Chain::new("keyward-1", ChainEnd::default());
    let first = file("1.log", &mut one, &[1, 4]);
    let second = file("0.log", &mut one, &[7, 9]);
    let other = file("2.log", &mut Chain::new("keyward-2", ChainEnd::default()), &[3, 2, 4, 8]);
    for form in ["table", "json"] {
        let search = ["audit", "search", &second, &other, &first, "-o", form];
        let (code, stdout, stderr) = run(&mut keyward(&search));
        assert_eq!((code, &*stderr), (0, ""));
        let second = |line: &str| line.split("00:00:").nth(1).map(|rest| rest[..2].to_owned());
        let seconds: Vec<_> = stdout.lines().filter_map(second).collect();
        assert_eq!(seconds, ["01", "03", "02", "04", "04", "07", "08", "09"], "{form}: {stdout}");
    }
}
