//! Every warning and error of the log has a row in the list of conditions, and every row a place where an operator finds it.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use keyward::telemetry::conditions::{CONDITION_ENDS, CONDITIONS, ConditionTelling, LoggedCondition};

use super::{metrics, read, root};

const PAGE: &str = "docs/conditions.md";
/// The alert for errors without an alert of their own.
const GENERAL: &str = "KeywardLoggedError";

/// The code of each file of the program before its tests.
fn sources(folder: &Path, found: &mut Vec<String>) {
    for entry in fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|ending| ending == "rs") && !path.ends_with("tests.rs") {
            let text = fs::read_to_string(&path).expect("a source file");
            let code = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
            let is_code = |line: &&str| !line.trim_start().starts_with("//");
            found.push(code.lines().filter(is_code).collect::<Vec<_>>().join("\n"));
        }
    }
}

/// The message of the macro call whose arguments `text` begins with: the last literal that stands in no bracket.
fn message(text: &str) -> Option<String> {
    let (mut depth, mut last, mut characters) = (1, None, text.chars().peekable());
    while let Some(character) = characters.next() {
        match character {
            '(' | '[' | '{' => depth += 1,
            ')' | ']' | '}' if depth == 1 => return last,
            ')' | ']' | '}' => depth -= 1,
            '"' => {
                let mut literal = String::new();
                loop {
                    match characters.next()? {
                        '"' => break,
                        '\\' if characters.peek() == Some(&'\n') => {
                            while characters.next_if(|next| next.is_whitespace()).is_some() {}
                        }
                        '\\' => literal.push(characters.next()?),
                        other => literal.push(other),
                    }
                }
                if depth == 1 {
                    last = Some(literal);
                }
            }
            _ => {}
        }
    }
    None
}

/// The messages of the records at these levels.
fn messages(sources: &[String], level: &str) -> BTreeSet<String> {
    let start = format!("{level}!(");
    let calls = sources.iter().flat_map(|source| source.split(start.as_str()).skip(1));
    calls.map(|call| message(call).expect("a record with a message")).collect()
}

fn all_sources() -> Vec<String> {
    let mut found = Vec::new();
    sources(&root().join("src"), &mut found);
    assert!(found.len() > 300, "{}", found.len());
    found
}

#[test]
fn every_warning_and_error_has_a_row_and_every_row_a_record() {
    let sources = all_sources();
    let logged: BTreeSet<_> =
        messages(&sources, "warn").union(&messages(&sources, "error")).cloned().collect();
    let listed: BTreeSet<_> = CONDITIONS.iter().map(|row| row.message.to_owned()).collect();
    assert!(logged.len() > 100, "{logged:?}");
    let (missing, stale): (Vec<_>, Vec<_>) =
        (logged.difference(&listed).collect(), listed.difference(&logged).collect());
    assert!(missing.is_empty(), "records without a row in condition_rows.rs: {missing:#?}");
    assert!(stale.is_empty(), "rows without a record: {stale:#?}");
}

/// Conditions that a check of doctor finds, of whose end the log has no record, with the reason.
const WITHOUT_AN_END: [(&str, &str); 15] = [
    ("clusters_mixed", "the configured endpoints are judged once, before a cluster is served"),
    ("member_id_untold", "told once in a process, whichever member it is"),
    ("mint_ca_unchecked", "told once for each mint.ca"),
    ("descriptors_unraised", "the limit is raised at the start alone"),
    ("descriptors_few", "the limit is raised at the start alone"),
    ("connections_full", "told once a minute while it happens"),
    ("rule_unreachable", "told at each reload that has such a rule"),
    ("configuration_weaker", "a happening, which doctor tells for a day"),
    ("audit_file_removed", "a happening, which doctor tells for a day"),
    ("audit_file_moved", "a happening, which doctor tells for a day"),
    ("audit_file_foreign", "a happening, which doctor tells for a day"),
    ("audit_records_lost", "a happening, which doctor tells for a day"),
    ("audit_lost_at_end", "the process ends"),
    ("audit_not_stopped", "a happening, which doctor tells for a day"),
    ("audit_removed_early", "a happening: the records stay removed"),
];

/// Records that something is well again, though no condition ends with them, with the reason.
const ENDS_OF_NO_CONDITION: [(&str, &str); 4] = [
    ("a client's certificate is no longer valid: its connection ends", "a refusal of a client"),
    (
        "members defragmented lately are not defragmented again; request metadata \
         keyward-force-defragment: true does",
        "the outcome of a call",
    ),
    ("streams ended: their session, rule or certificate is no longer valid", "a refusal of clients"),
    ("streams leave addresses where no member is any more", "a move of streams"),
];

/// A record of the log that a trouble is over ends its condition: a writer of such a record adds it to the list.
#[test]
fn every_record_of_an_end_ends_a_condition_and_every_condition_without_one_has_a_reason() {
    let infos = messages(&all_sources(), "info");
    for end in CONDITION_ENDS {
        assert!(
            infos.contains(end.message),
            "no record says {:?}, which ends {:?}",
            end.message,
            end.conditions
        );
    }
    let tells_an_end = |message: &&String| {
        [" again", "no longer", "any more", " has ended: "].iter().any(|word| message.contains(word))
    };
    let is_listed = |message: &str| CONDITION_ENDS.iter().any(|end| end.message == message);
    let unlisted: Vec<_> = infos.iter().filter(tells_an_end).filter(|message| !is_listed(message)).collect();
    let excepted: Vec<_> = ENDS_OF_NO_CONDITION.iter().map(|(message, _)| *message).collect();
    assert_eq!(unlisted, excepted, "records of an end that end no condition");
    let is_checked = |row: &&LoggedCondition| matches!(row.telling, ConditionTelling::Check(_));
    let endless = CONDITIONS.iter().filter(is_checked).filter(|row| row.ends().next().is_none());
    let reasons = WITHOUT_AN_END.iter().map(|(name, _)| *name);
    assert_eq!(
        endless.map(|row| row.name).collect::<BTreeSet<_>>(),
        reasons.collect(),
        "conditions without an end"
    );
}

/// The cell of the page that says when a condition ends.
fn end_cell(row: &LoggedCondition) -> String {
    let ends: Vec<String> = row.ends().map(|end| format!("`{}`", end.message)).collect();
    match row.telling {
        ConditionTelling::NoProcess { .. } => "—".to_owned(),
        ConditionTelling::Lasting { .. } => "with the process".to_owned(),
        ConditionTelling::Until { .. } => ends.join(", "),
        _ if ends.is_empty() => "after ten minutes".to_owned(),
        _ => format!("{}; after ten minutes", ends.join(", ")),
    }
}

#[test]
fn every_condition_has_its_cells() {
    let errors = messages(&all_sources(), "error");
    let page = read(PAGE);
    let rows = page.lines().skip_while(|line| !line.starts_with("| condition |")).skip(2);
    let rows: Vec<Vec<&str>> = rows
        .take_while(|line| line.starts_with("| "))
        .map(|row| row.trim_matches('|').split(" | ").map(str::trim).collect())
        .collect();
    let names: Vec<_> = rows.iter().map(|row| row[0].trim_matches('`')).collect();
    assert_eq!(names, CONDITIONS.iter().map(|row| row.name).collect::<Vec<_>>(), "the rows of {PAGE}");
    let (metrics, alerts) = (metrics(), read("deploy/monitoring/alerts.yaml"));
    let excepted = excepted(&alerts);
    let doctor = read("docs/doctor.md");
    for (row, condition) in rows.iter().zip(CONDITIONS) {
        let [_, level, says, metric, alert, check, end] = row[..] else { panic!("{row:?}") };
        assert_eq!(end, end_cell(condition), "{}", condition.name);
        let is_error = errors.contains(condition.message);
        assert_eq!(level, if is_error { "error" } else { "warn" }, "{}", condition.name);
        assert_eq!(says, condition.message, "{}", condition.name);
        assert!(metric == "only the common one" || metrics.contains(metric.trim_matches('`')), "{row:?}");
        let told = condition.telling.check();
        if let ConditionTelling::NoProcess { reason } = condition.telling {
            assert_eq!((alert, check), ("—", reason), "{}", condition.name);
            continue;
        }
        assert_eq!(check.trim_matches('`'), told, "{}", condition.name);
        assert!(doctor.contains(&format!("`{told}`")), "{told} in docs/doctor.md");
        let named = alert.split(['[', ']']).nth(1);
        assert!(alert == "none: no call fails for it" || named.is_some(), "{row:?}");
        if let Some(named) = named {
            assert!(alerts.contains(&format!("- alert: {named}\n")), "{named}");
            assert!(root().join(format!("docs/runbooks/{named}.md")).exists(), "{named}");
        }
        let fires = is_error && !excepted.contains(told) && !excepted.contains(condition.name);
        assert!(!is_error || named.is_some(), "an error without an alert: {}", condition.name);
        assert_eq!(named == Some(GENERAL), fires, "{}: {GENERAL}", condition.name);
    }
}

/// The checks and conditions that the general alert leaves to others.
fn excepted(alerts: &str) -> BTreeSet<String> {
    let rule = alerts.split("- alert: ").find(|rule| rule.starts_with(GENERAL)).expect("the general alert");
    let exception = |label: &str| rule.split(label).nth(1)?.split('"').nth(1);
    let names = ["check!~", "condition!~"].map(|label| exception(label).expect("an exception"));
    names.iter().flat_map(|names| names.split('|')).map(str::to_owned).collect()
}
