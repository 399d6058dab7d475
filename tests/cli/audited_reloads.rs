//! Each reload leaves one audit record that names its trigger, its outcome and the change of the policy.

use std::fs;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use super::{Served, write};

const POLICY: &str = "[[role]]\nname = 'reader'\nallow = [{ actions = ['read'], everything = true }]\n\
    [[binding]]\npeer = 'listener:a'\nroles = ['reader']\n";

fn lines(mode: &str) -> String {
    format!("audit.file = 'audit.log'\npolicy = {{ mode = '{mode}', file = 'policy.toml' }}\n")
}

/// The records of admin events.
fn records(served: &Served) -> Vec<Value> {
    let text = fs::read_to_string(served.folder.path().join("audit.log")).expect("a file");
    let records = text.lines().map(|line| serde_json::from_str::<Value>(line).expect("JSON"));
    records.filter(|record| record["event"] == "admin").collect()
}

#[test]
fn each_reload_leaves_one_record_with_its_trigger_and_the_change_of_the_policy() {
    let mut served = Served::start(&lines("enforce"), |_, folder| {
        write(folder, "policy.toml", POLICY);
    });
    // `keyward reload`, SIGHUP, then a changed policy, a changed mode, and a fault, each without a signal.
    assert_eq!(served.ask(&["reload"]).0, 0);
    served.logged("nothing has changed");
    let id = Pid::from_child(&served.child);
    kill_process(id, Signal::HUP).expect("it runs");
    served.logged("nothing has changed");
    let rules = format!(
        "{POLICY}[[role]]\nname = 'nobody'\nallow = [{{ actions = ['write'], everything = true }}]\n"
    );
    fs::write(served.folder.path().join("policy.toml"), rules).expect("written");
    served.logged("is in force");
    served.configure(&lines("off"));
    served.logged("is in force");
    served.configure("policy.mode = 'nonsense'\n");
    served.logged("configuration not reloaded");
    assert_eq!(served.ask(&["drain"]).0, 0);
    assert!(served.child.wait().expect("it is ours").success());
    let records = records(&served);
    let [command, signal, policy, mode, fault, drain] = &records[..] else { panic!("{records:#?}") };
    assert_eq!(drain["command"], "drain");
    let reason = |record: &Value| record["reason"].as_str().expect("a reason").to_owned();
    for (record, trigger, result) in [
        (command, "a command", "done"),
        (signal, "SIGHUP", "done"),
        (policy, "a changed file: ", "done"),
        (mode, "a changed file: ", "done"),
        (fault, "a changed file: ", "failed"),
    ] {
        assert_eq!((&record["command"], &record["result"]), (&"reload".into(), &result.into()), "{record}");
        assert!(reason(record).starts_with(trigger), "{record}");
        assert_eq!(record["uid"].is_u64(), trigger == "a command", "{record}");
        assert_eq!(record["policy_generation"].is_string(), record == policy || record == mode, "{record}");
        assert_eq!(record["policy_mode"].is_string(), record == mode, "{record}");
    }
    assert_eq!((&mode["policy_mode_before"], &mode["policy_mode"]), (&"enforce".into(), &"off".into()));
    assert!(reason(mode).contains("[policy] changed"), "{mode}");
    assert!(reason(fault).contains("policy.mode"), "{fault}");
}
