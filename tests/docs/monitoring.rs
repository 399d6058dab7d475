//! The alerts, the dashboard and the runbooks: complete, and about metrics, labels and commands that exist.
//!
//! Must not know: Prometheus and Grafana, which `tests/etcd/monitoring` starts or asks. A check that finds nothing to look at fails.

use std::collections::{BTreeMap, BTreeSet};

use super::{metrics_text, read, root};

const RULES: &str = "deploy/monitoring/alerts.yaml";
const DASHBOARD: &str = "deploy/monitoring/dashboard.json";
const RUNBOOKS: &str = "docs/runbooks";
const HEADINGS: [&str; 4] = ["## Meaning", "## What to look at", "## What to do", "## When it is harmless"];
/// Labels of every scraped metric.
const OF_PROMETHEUS: [&str; 2] = ["job", "instance"];

/// A rule: an alert, or a recorded metric.
#[derive(Default)]
struct Rule {
    name: String,
    is_alert: bool,
    expression: String,
    /// All other lines: `for`, severity and annotations.
    rest: String,
}

/// The rules, by the form that the file keeps.
fn rules() -> Vec<Rule> {
    let text = read(RULES);
    let mut rules: Vec<Rule> = Vec::new();
    for line in text.lines() {
        let bare = line.trim();
        if let Some(name) = bare.strip_prefix("- alert: ").or_else(|| bare.strip_prefix("- record: ")) {
            let is_alert = bare.starts_with("- alert: ");
            rules.push(Rule { name: name.to_owned(), is_alert, ..Rule::default() });
        } else if let Some(rule) = rules.last_mut() {
            let is_expression = rule.rest.is_empty() && !bare.starts_with("for: ");
            let part = if is_expression { &mut rule.expression } else { &mut rule.rest };
            *part += &format!("{}\n", bare.strip_prefix("expr: ").unwrap_or(bare));
        }
    }
    assert!(rules.iter().filter(|rule| rule.is_alert).count() > 11, "found {} rules", rules.len());
    rules
}

/// The files of the runbooks.
fn runbooks() -> Vec<String> {
    let folder = std::fs::read_dir(root().join(RUNBOOKS)).expect("the folder of runbooks");
    let name = |entry: std::io::Result<std::fs::DirEntry>| entry.expect("an entry").file_name();
    let names = folder.map(name).map(|name| format!("{RUNBOOKS}/{}", name.to_string_lossy()));
    let names: Vec<String> = names.collect();
    assert!(names.len() > 11, "{names:?}");
    names
}

#[test]
fn every_alert_is_complete_and_has_a_runbook_and_every_runbook_has_an_alert() {
    let rules = rules();
    let alerts: BTreeSet<String> =
        rules.iter().filter(|rule| rule.is_alert).map(|rule| rule.name.clone()).collect();
    for rule in rules.iter().filter(|rule| rule.is_alert) {
        let Rule { name, rest, .. } = rule;
        let line = |start: &str| rest.lines().find_map(|line| line.strip_prefix(start)).unwrap_or_default();
        let minutes = line("for: ").strip_suffix('m').and_then(|minutes| minutes.parse::<u32>().ok());
        assert!(minutes.is_some_and(|minutes| (1..=60).contains(&minutes)), "{name} waits: {rest}");
        assert!(["critical", "warning"].contains(&line("severity: ")), "{name}: {rest}");
        assert!(line("summary: ").len() > 20 && rest.contains("description: >-\n"), "{name}: {rest}");
        assert_eq!(line("runbook_url: "), format!("{RUNBOOKS}/{name}.md"), "{name}");
    }
    let contents = read("docs/runbooks.md");
    let rows: BTreeSet<String> = contents
        .lines()
        .filter_map(|line| Some(line.strip_prefix("| [")?.split(']').next()?.to_owned()))
        .collect();
    assert_eq!(rows, alerts);
    let mut pages = BTreeSet::new();
    for file in &runbooks() {
        let page = read(file);
        let name = page.lines().next().and_then(|line| line.strip_prefix("# ")).expect("a title");
        assert_eq!(*file, format!("{RUNBOOKS}/{name}.md"));
        let headings: Vec<&str> = page.lines().filter(|line| line.starts_with("## ")).collect();
        assert_eq!(headings, HEADINGS, "{file}");
        pages.insert(name.to_owned());
    }
    assert_eq!(pages, alerts);
}

/// The labels of each metric: of the page, and of the counters that the admin address keeps outside of the registry.
fn labels() -> BTreeMap<String, BTreeSet<String>> {
    let mut labels: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    let text = metrics_text();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let sample = line.rsplit_once(' ').map_or(line, |(sample, _)| sample);
        let (name, selectors) = sample.split_once('{').unwrap_or((sample, ""));
        let names = selectors.split("\",").filter_map(|part| Some(part.split_once("=\"")?.0.to_owned()));
        labels.entry(name.to_owned()).or_default().extend(names);
    }
    let admin = read("src/operations/src/admin.rs").split_whitespace().collect::<Vec<_>>().join(" ");
    for call in admin.split("family(").skip(1) {
        let mut texts = call.split('"').skip(1).step_by(2);
        if let (Some(name), Some(_), Some(label)) = (texts.next(), texts.next(), texts.next()) {
            labels.entry(format!("keyward_{name}_total")).or_default().insert(label.to_owned());
        }
    }
    assert!(labels["keyward_member_streams"].contains("kind"), "{labels:?}");
    assert!(labels["keyward_log_records_lost_total"].contains("reason"), "{labels:?}");
    labels
}

fn is_word(letter: char) -> bool {
    letter.is_ascii_alphanumeric() || letter == '_' || letter == ':'
}

/// The metrics of a query, each with the names of the labels that it selects by.
fn selected(query: &str) -> Vec<(String, Vec<String>)> {
    let mut found = Vec::new();
    let mut rest = query;
    while let Some(at) = rest.find(['k', 'p', 'u', 'A']) {
        let before = rest[..at].chars().next_back();
        let word: String = rest[at..].chars().take_while(|letter| is_word(*letter)).collect();
        let is_metric = word.starts_with("keyward_")
            || word.starts_with("keyward:")
            || word.starts_with("process_")
            || ["up", "ALERTS"].contains(&word.as_str());
        rest = &rest[at + word.len().max(1)..];
        // A word that goes on before `at`, or stands in quotation marks, is no metric.
        if !is_metric || before.is_some_and(|letter| is_word(letter) || letter == '"') {
            continue;
        }
        let inside = rest.strip_prefix('{').and_then(|rest| rest.split('}').next()).unwrap_or_default();
        let names = inside.split(", ").filter_map(|part| part.split(['=', '!']).next());
        let names = names.filter(|name| !name.is_empty()).map(str::to_owned).collect();
        found.push((word, names));
    }
    found
}

/// The labels in `by (…)` and `on (…)`.
fn grouped(query: &str) -> Vec<String> {
    let groups = ["by (", "on ("].into_iter().flat_map(|word| query.split(word).skip(1));
    let inside = groups.filter_map(|rest| rest.split(')').next());
    inside
        .flat_map(|inside| inside.split(", ").map(str::to_owned))
        .filter(|label| !label.is_empty())
        .collect()
}

/// The faults of a query; `texts` are templates that name its labels.
fn faults(query: &str, texts: &[&str], known: &BTreeMap<String, BTreeSet<String>>) -> Vec<String> {
    let mut faults = Vec::new();
    // `label_replace` makes a label.
    let made = query.split("label_replace(").skip(1).filter_map(|call| call.split('"').nth(1));
    let mut all: BTreeSet<String> = made.chain(OF_PROMETHEUS).map(str::to_owned).collect();
    let metrics = selected(query);
    faults.extend(metrics.is_empty().then(|| "names no metric".to_owned()));
    for (metric, names) in &metrics {
        match known.get(metric) {
            None => faults.push(format!("{metric} does not exist")),
            Some(labels) => {
                all.extend(labels.iter().cloned());
                let missing = names.iter().filter(|name| !labels.contains(*name));
                let missing = missing.filter(|name| !OF_PROMETHEUS.contains(&name.as_str()));
                faults.extend(missing.map(|name| format!("{metric} has no label {name}")));
            }
        }
    }
    let in_texts = texts.iter().flat_map(|text| {
        text.split("$labels.")
            .skip(1)
            .map(|rest| rest.chars().take_while(|letter| is_word(*letter)).collect::<String>())
    });
    let named = grouped(query).into_iter().chain(in_texts);
    faults.extend(named.filter(|label| !all.contains(label)).map(|label| format!("no label {label}")));
    faults.into_iter().map(|fault| format!("{fault}: {query}")).collect()
}

/// The metrics of Keyward, of Prometheus itself, and those that the rules record.
fn known() -> BTreeMap<String, BTreeSet<String>> {
    let mut known = labels();
    known.insert("up".to_owned(), BTreeSet::new());
    known.insert("ALERTS".to_owned(), ["alertname", "alertstate"].map(str::to_owned).into());
    for rule in rules().into_iter().filter(|rule| !rule.is_alert) {
        let by: BTreeSet<String> = grouped(&rule.expression).into_iter().collect();
        known.insert(rule.name, by);
    }
    known
}

#[test]
fn alerts_and_dashboard_name_metrics_and_labels_that_exist() {
    let known = known();
    let mut found: Vec<String> = Vec::new();
    for rule in rules() {
        found.extend(faults(&rule.expression, &[&rule.rest], &known));
    }
    let dashboard: serde_json::Value = serde_json::from_str(&read(DASHBOARD)).expect("JSON");
    let mut queries = 0;
    for panel in dashboard["panels"].as_array().expect("panels") {
        for target in panel["targets"].as_array().into_iter().flatten() {
            let text = |key: &str| target[key].as_str().unwrap_or_default().to_owned();
            let query = text("expr");
            // `$job` and `$instance` are values.
            let legend = text("legendFormat").replace("{{", "$labels.");
            found.extend(faults(&query, &[&legend], &known));
            let selects = query.contains("job=~\"$job") && query.contains("instance=~\"$instance");
            found.extend((!selects).then(|| format!("does not follow the variables: {query}")));
            queries += 1;
        }
    }
    assert!(queries > 40, "found {queries} queries");
    assert_eq!(found, Vec::<String>::new());
}

#[test]
fn the_reader_of_queries_finds_wrong_metrics_and_labels() {
    let known = known();
    let right =
        "sum by (limit) (rate(keyward_limit_refused_total{scope=\"peer\"}[5m])) > 0 and on (job) up == 1";
    assert_eq!(faults(right, &["{{ $labels.limit }}"], &known), Vec::<String>::new());
    for (wrong, text) in [
        (right.replace("refused_total", "refused"), ""),
        (right.replace("scope=", "scopes="), ""),
        (right.replace("by (limit)", "by (limits)"), ""),
        (right.replace("on (job)", "on (jobs)"), ""),
        (right.to_owned(), "$labels.member"),
        ("vector(0)".to_owned(), ""),
    ] {
        assert!(!faults(&wrong, &[text], &known).is_empty(), "{wrong} {text}");
    }
}
