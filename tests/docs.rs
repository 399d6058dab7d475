//! What the documents promise: that the files, keys and metrics they name exist, and that their examples are valid.
//!
//! Must not know: how a document is worded. A check that finds nothing to look at fails.

#[cfg(test)]
#[path = "docs/cited_tests.rs"]
mod cited_tests;
#[cfg(test)]
#[path = "docs/conditions.rs"]
mod conditions;
#[cfg(test)]
#[path = "docs/error_texts.rs"]
mod error_texts;
#[cfg(test)]
#[path = "docs/etcd_versions.rs"]
mod etcd_versions;
#[cfg(test)]
#[path = "docs/monitoring.rs"]
mod monitoring;

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use keyward::telemetry::conditions::{CONDITIONS, StandingCondition};
use keyward::telemetry::connection_metrics::{ConnectionLimit, EndReason};
use keyward::telemetry::member_metrics::MemberSample;
use keyward::telemetry::metrics::Metrics;
use keyward::telemetry::rest_metrics::RestLabels;
use keyward::telemetry::single_label::one;
use keyward::telemetry::unread_metrics::GiveUpReason;
use keyward::telemetry::user_metrics::UserFigures;

/// Documents for operators, beside the book.
const DOCUMENTS: [&str; 4] = ["README.md", "ARCHITECTURE.md", "CHANGELOG.md", "SECURITY.md"];
/// Pages about the program itself: their files and links are checked too.
const PAGES: [&str; 4] = ["CONTRIBUTING.md", "docs/decisions.md", "docs/etcd-facts.md", "docs/glossary.md"];
/// Documents with tables whose every row names the tests that show it in its last column, and how many tests they name.
const PROMISES: [(&str, usize); 4] =
    [("tests/watches.md", 150), ("SECURITY.md", 120), ("docs/differences.md", 100), ("docs/clients.md", 15)];
/// Folders of the repository: a word that begins with one of these is a path.
const FOLDERS: [&str; 6] = [".ci/", "deploy/", "examples/", "proto/", "src/", "tests/"];
/// A README's reader should see an example whole.
const EXAMPLE_LINES: usize = 15;

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

fn read(name: impl AsRef<Path>) -> String {
    fs::read_to_string(root().join(name)).expect("every file that is named here exists")
}

/// All documents for operators: with the pages of the book.
fn documents() -> Vec<String> {
    let mut found: Vec<String> = DOCUMENTS.map(str::to_owned).into();
    for folder in ["docs", "docs/runbooks"] {
        let entries = fs::read_dir(root().join(folder)).expect("a folder of the book");
        let names = entries.map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned());
        let names = names.filter(|name| name.ends_with(".md")).map(|name| format!("{folder}/{name}"));
        found.extend(names.filter(|name| !PAGES.contains(&name.as_str())));
    }
    assert!(found.len() > 40, "found {} documents", found.len());
    found
}

/// The fenced blocks of a language, and the text without any fenced block.
fn fenced(document: &str, language: &str) -> (Vec<String>, String) {
    let (mut blocks, mut prose, mut inside) = (Vec::new(), String::new(), None);
    for line in document.lines() {
        match (line.trim_start().strip_prefix("```"), &mut inside) {
            (Some(named), None) => inside = Some((named == language, String::new())),
            (Some(_), Some((wanted, block))) => {
                if *wanted {
                    blocks.push(std::mem::take(block));
                }
                inside = None;
            }
            (None, Some((_, block))) => *block += &format!("{line}\n"),
            (None, None) => prose += &format!("{line}\n"),
        }
    }
    assert!(inside.is_none(), "a block is not closed");
    (blocks, prose)
}

/// What stands between backticks.
fn quoted(prose: &str) -> Vec<&str> {
    let parts: Vec<&str> = prose.split('`').collect();
    assert!(parts.len() % 2 == 1, "a backtick is alone");
    parts.into_iter().skip(1).step_by(2).collect()
}

/// The targets of links.
fn links(prose: &str) -> Vec<&str> {
    prose.split("](").skip(1).filter_map(|rest| rest.split(')').next()).collect()
}

/// The anchors that a document's headings have.
fn anchors(document: &str) -> Vec<String> {
    let headings = document.lines().filter(|line| line.starts_with('#'));
    let anchor = |heading: &str| {
        let text = heading.trim_start_matches('#').trim().to_lowercase();
        let kept = text.chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c));
        kept.map(|c| if c == ' ' { '-' } else { c }).collect()
    };
    let named = document.split("<a id=\"").skip(1).filter_map(|rest| rest.split('"').next());
    headings.map(anchor).chain(named.map(str::to_owned)).collect()
}

/// Every key of the reference, as in `listener.tls.cert`, and every table.
fn reference_keys() -> BTreeSet<String> {
    let (mut keys, mut table) = (BTreeSet::new(), String::new());
    for line in read("config.toml").lines() {
        let line = line.strip_prefix('#').unwrap_or(line);
        if line.starts_with('[') {
            table = line.trim_matches(['[', ']']).to_owned();
            keys.insert(table.clone());
        } else if let Some((key, _)) = line.split_once(" = ")
            && key.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_')
        {
            keys.insert(format!("{table}.{key}"));
        }
    }
    assert!(keys.contains("listener.tls.cert") && keys.contains("runtime.shards"), "{keys:?}");
    keys
}

#[test]
fn documents_name_files_that_exist() {
    let (mut missing, mut looked_at) = (Vec::new(), 0);
    for name in documents().into_iter().chain(PAGES.map(str::to_owned)) {
        let document = read(&name);
        let (commands, prose) = fenced(&document, "sh");
        let folder = Path::new(&name).parent().expect("a file's folder");
        let paths =
            quoted(&prose).into_iter().chain(commands.iter().flat_map(|block| block.split_whitespace()));
        for path in paths.map(|path| path.trim_start_matches("./")) {
            if FOLDERS.iter().any(|folder| path.starts_with(folder)) || path.ends_with(".rs") {
                looked_at += 1;
                missing.extend((!root().join(path).exists()).then(|| format!("{name}: {path}")));
            }
        }
        for link in links(&prose).into_iter().filter(|link| !link.starts_with("https://")) {
            looked_at += 1;
            let (file, anchor) = link.split_once('#').unwrap_or((link, ""));
            let file = if file.is_empty() { Path::new(&name).to_owned() } else { folder.join(file) };
            let found = root().join(&file).exists()
                && (anchor.is_empty() || anchors(&read(&file)).iter().any(|known| known == anchor));
            missing.extend((!found).then(|| format!("{name}: {link}")));
        }
    }
    assert!(looked_at > 15, "found {looked_at} paths and links");
    assert_eq!(missing, Vec::<String>::new());
}

#[test]
fn documents_name_keys_that_exist() {
    let keys = reference_keys();
    let tables: BTreeSet<&str> = keys.iter().filter_map(|key| key.split('.').next()).collect();
    let (mut unknown, mut looked_at) = (Vec::new(), 0);
    for name in documents() {
        let (_, prose) = fenced(&read(&name), "");
        for word in quoted(&prose) {
            let dotted = word.split_once('.').is_some_and(|(table, _)| tables.contains(table));
            let key = word.trim_matches(['[', ']']);
            if !(dotted && !word.contains('/') && !word.ends_with(".toml")) && key == word {
                continue;
            }
            looked_at += 1;
            unknown.extend((!keys.contains(key)).then(|| format!("{name}: {word}")));
        }
    }
    assert!(looked_at > 4, "found {looked_at} keys");
    assert_eq!(unknown, Vec::<String>::new());
}

/// A command that the program refuses helps nobody at night. `tests/book` runs the commands in blocks; these are the ones in sentences.
#[test]
fn the_program_knows_every_command_of_the_documents() {
    let (mut refused, mut tried) = (Vec::new(), 0);
    for file in documents() {
        let (_, prose) = fenced(&read(&file), "");
        for text in quoted(&prose) {
            let Some(command) = text.strip_prefix("keyward ") else { continue };
            let command = command.split(['#', '|', ';', '>']).next().unwrap_or_default();
            // A word in capitals stands for a value; after `--help` the other arguments are still checked.
            let words = command.split_whitespace().map(|word| match word {
                "SHELL" => "bash",
                "TOPIC" => "clients",
                _ if word.bytes().all(|b| b.is_ascii_uppercase()) => "7",
                _ => word,
            });
            let mut keyward = Command::new(env!("CARGO_BIN_EXE_keyward"));
            let ended = keyward.args(words).arg("--help").stdin(Stdio::null()).output().expect("it starts");
            if !ended.status.success() {
                refused.push(format!("{file}: {text}: {}", String::from_utf8_lossy(&ended.stderr)));
            }
            tried += 1;
        }
    }
    assert!(tried > 150, "found {tried} commands");
    assert_eq!(refused, Vec::<String>::new());
}

/// A promise whose test was renamed or removed is a promise that nobody holds.
#[test]
fn every_row_of_the_tables_of_promises_names_tests_that_exist() {
    let tests = cited_tests::Tests::of_the_tree();
    for (name, at_least) in PROMISES {
        let document = read(name);
        let (mut cited, mut faults) = (0, Vec::new());
        for row in cited_tests::rows(&document) {
            let found = cited_tests::cited(cited_tests::last_cell(row));
            faults.extend(found.is_empty().then(|| format!("without a test: {row}")));
            faults.extend(found.iter().filter_map(|test| tests.fault(test)));
            cited += found.len();
        }
        assert_eq!(faults, Vec::<String>::new(), "in {name}");
        assert!(cited > at_least, "found {cited} tests in {name}");
    }
}

#[test]
fn every_decision_names_tests_that_exist() {
    let (tests, document) = (cited_tests::Tests::of_the_tree(), read("docs/decisions.md"));
    let paragraphs = document.split("- **Test.**").skip(1).filter_map(|rest| rest.split("\n\n").next());
    let cited: Vec<_> = paragraphs.flat_map(cited_tests::cited).collect();
    assert!(cited.len() > 200, "found {} tests", cited.len());
    assert_eq!(cited.iter().filter_map(|test| tests.fault(test)).collect::<Vec<_>>(), Vec::<String>::new());
}

/// The page of the metrics with each labelled family touched once, but for the counters that the admin address adds.
/// A condition that holds.
fn a_condition() -> StandingCondition {
    let row = CONDITIONS.first().expect("a row");
    let (last, details) = (std::time::Duration::ZERO, String::new());
    StandingCondition { row, is_error: true, records: 1, last, details }
}

fn metrics_text() -> String {
    let registry = Metrics::new(vec!["/a/B"]);
    registry.call_ended(0, 0, || "OK", Some(std::time::Duration::ZERO));
    registry.member_ready.get_or_create(&one("member", "1")).set(1);
    registry.member_leader.get_or_create(&one("member", "1")).set(1);
    let everything = MemberSample {
        latency: Some(std::time::Duration::ZERO),
        term: 1,
        errors: Some(0),
        db: Some((0, 0)),
        quota: Some(0),
        ..MemberSample::default()
    };
    registry.member_figures.put(&[everything]);
    registry.logins.get_or_create(&one("result", "accepted")).inc();
    registry.odd_authority.refused.get_or_create(&one("reason", "order")).inc();
    registry.request_memory.refused("all").inc();
    registry.audit.lost("all").inc();
    registry.audit.sent("otlp").inc();
    registry.audit.unsent("otlp").set(1);
    registry.audit.sink_failing("otlp").set(1);
    registry.put_state_files(&[("revocation.state_file", false)]);
    registry.conditions.put(&[a_condition()]);
    registry.rest_requests.get_or_create(&RestLabels { path: "other", status: 404 }).inc();
    registry.connection_figures.ended(EndReason::NoCall).inc();
    registry.connection_figures.refused(ConnectionLimit::Connections).inc();
    registry.unread.given_up(GiveUpReason::ForTime).inc();
    drop(registry.limits.counters("peer", "watches"));
    registry.limits.pressure("latency").set(0);
    registry.policy.count_refused("read");
    registry.policy.count_shadow_denied("read");
    registry.policy_store.count_fault("went_back");
    let certificate = ("listener", "a".to_owned(), std::time::SystemTime::UNIX_EPOCH);
    registry.config.put_certificates([certificate]);
    registry.config.put_limits(&[("limits.connections", 1)]);
    registry.stream_ended(0, std::time::Duration::ZERO);
    registry.refusals.name_reasons(["policy"]);
    UserFigures::new(1).call_ended(&registry.users, Some("a"), |figures| {
        figures.call_ended(0, || "OK", Some(std::time::Duration::ZERO));
    });
    let listener = registry.listeners.of(&"a".into());
    listener.calls.call_ended(0, || "OK", Some(std::time::Duration::ZERO));
    registry.admin_text(Vec::new()).expect("a String takes all")
}

/// The names under which a scraper finds what the registry and the admin address tell.
fn metrics() -> BTreeSet<String> {
    let text = metrics_text();
    let types = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' '));
    let mut names: BTreeSet<String> = types
        .map(|(name, kind)| format!("{name}{}", if kind == "counter" { "_total" } else { "" }))
        .collect();
    assert!(names.contains("keyward_calls_total") && names.len() > 10, "{names:?}");
    let admin = read("src/operations/src/admin.rs");
    let families = admin.split("family(").skip(1).filter_map(|call| call.trim_start().strip_prefix('"'));
    let families: Vec<&str> = families.filter_map(|call| call.split('"').next()).collect();
    assert!(families.len() > 1, "{families:?}");
    names.extend(families.iter().map(|family| format!("keyward_{family}_total")));
    names
}

fn is_metric(word: &str) -> bool {
    word.starts_with("keyward_") || word.starts_with("process_") && word != "process_"
}

#[test]
fn the_book_lists_the_metrics_that_there_are() {
    let (_, prose) = fenced(&read("docs/metrics.md"), "");
    let listed: BTreeSet<String> =
        quoted(&prose).into_iter().filter(|word| is_metric(word)).map(str::to_owned).collect();
    assert_eq!(listed, metrics());
}

/// What stands between this and the next quotation mark, wherever it stands.
fn after<'a>(text: &'a str, start: &str) -> BTreeSet<&'a str> {
    text.split(start)
        .skip(1)
        .filter_map(|rest| rest.trim_start().strip_prefix('"')?.split('"').next())
        .collect()
}

#[test]
fn the_operators_guide_lists_the_checks_that_doctor_makes() {
    // However its lines are broken.
    let files = [
        "checks.rs",
        "checks/alarms.rs",
        "checks/audit_retention.rs",
        "checks/audit_troubles.rs",
        "checks/certificates.rs",
        "checks/weak_certificates.rs",
        "checks/versions.rs",
        "checks/state_files.rs",
        "checks/stored_policy.rs",
        "checks/readiness.rs",
        "checks/limits.rs",
        "checks/logged_conditions.rs",
        "checks/member_speed.rs",
        "checks/name_servers.rs",
        "checks/reloads.rs",
        "checks/rule_reach.rs",
        "checks/endpoints.rs",
        "checks/store_differences.rs",
        "checks/member_readiness.rs",
    ];
    let code = files.map(|file| read(format!("src/operations/src/admin/doctor/{file}"))).concat();
    let code = code.split_whitespace().collect::<Vec<_>>().join(" ");
    let code = code.replace("( ", "(");
    let mut made = after(&code, "findings.error(");
    made.extend(after(&code, "findings.warning("));
    made.extend(after(&code, "findings.note("));
    made.extend(after(&code, "findings.add(severity,"));
    assert!(made.contains("db_quota") && made.contains("no_compaction") && made.len() > 20, "{made:?}");
    let guide = read("docs/doctor.md");
    let rows = guide.lines().skip_while(|line| !line.starts_with("| check |")).skip(2);
    let rows: Vec<&str> = rows.take_while(|line| line.starts_with("| ")).collect();
    let first = rows.iter().filter_map(|row| row.split('|').nth(1));
    let listed: BTreeSet<&str> = first.flat_map(quoted).collect();
    assert_eq!(listed, made);
    let (shown, _) = fenced(&guide, "console");
    let shown: Vec<&str> = shown
        .iter()
        .flat_map(|block| block.lines())
        .filter(|line| line.starts_with("error [") || line.starts_with("warning ["))
        .filter_map(|line| line.split_once('[')?.1.split(']').next())
        .collect();
    assert!(shown.len() > 2 && shown.iter().all(|check| made.contains(check)), "{shown:?}");
}

#[test]
fn the_operators_guide_lists_the_fields_that_status_has() {
    let code = read("src/operations/src/admin/status.rs");
    let fields: BTreeSet<&str> = code
        .lines()
        .filter_map(|line| line.trim().strip_prefix("pub ")?.split_once(": ").map(|(name, _)| name))
        .filter(|name| *name != "load" && !name.starts_with("fn "))
        .collect();
    let guide = read("docs/commands.md");
    let rows = guide.lines().skip_while(|line| !line.starts_with("| part |")).skip(2);
    let rows: Vec<&str> = rows.take_while(|line| line.starts_with("| ")).collect();
    let values = ["serving", "degraded", "not_ready", "draining", "on", "off"];
    let listed: BTreeSet<&str> =
        rows.iter().flat_map(|row| quoted(row)).filter(|word| !values.contains(word)).collect();
    assert!(fields.len() > 30, "{fields:?}");
    assert_eq!(listed, fields);
}

#[test]
fn the_readmes_configuration_is_valid_and_short() {
    let (examples, _) = fenced(&read("README.md"), "toml");
    let [example] = &examples[..] else { panic!("found {} examples", examples.len()) };
    let lines = example.lines().filter(|line| !line.is_empty()).count();
    assert!(lines <= EXAMPLE_LINES, "{lines} lines");
    check(example);
}

#[test]
fn the_production_example_is_valid() {
    let text = read("deploy/keyward.toml");
    check(&text);
    // What is commented out there must be right too.
    let whole: Vec<&str> =
        text.lines().map(|line| line.strip_prefix('#').filter(is_key).unwrap_or(line)).collect();
    assert_ne!(whole.join("\n"), text.trim_end());
    check(&whole.join("\n"));
}

fn is_key(line: &&str) -> bool {
    line.split_once(" = ")
        .is_some_and(|(key, _)| key.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_'))
}

/// `keyward check` in a folder where every file that the configuration names has a fitting content.
fn check(configuration: &str) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let configuration = configuration.replace("/etc/keyward/", "");
    let certificate = rcgen::generate_simple_self_signed(["keyward.test".to_owned()]).expect("a name");
    let mut authority = rcgen::CertificateParams::default();
    authority.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let authority = authority.self_signed(&certificate.signing_key).expect("it signs itself");
    let mut written = 0;
    for name in configuration.split('"').skip(1).step_by(2) {
        let content = match name.rsplit_once('.') {
            Some((stem, "crt")) if stem.ends_with("ca") => authority.pem(),
            Some((_, "crt")) => certificate.cert.pem(),
            Some(("session", "key")) => "0123456789abcdef".repeat(4),
            Some((_, "key")) => certificate.signing_key.serialize_pem(),
            Some((_, "password")) => "a password\n".to_owned(),
            _ => continue,
        };
        write(folder.path(), name, &content);
        written += 1;
    }
    assert!(written > 3, "found {written} files");
    let file = write(folder.path(), "keyward.toml", &configuration);
    let mut command = Command::new(env!("CARGO_BIN_EXE_keyward"));
    command.args(["check", "--config"]).arg(file).stdin(Stdio::null());
    let checked = command.output().expect("keyward starts");
    let told = String::from_utf8_lossy(&checked.stderr).into_owned();
    assert_eq!((checked.status.code(), told.as_str()), (Some(0), ""));
}

fn write(folder: &Path, name: &str, content: &str) -> PathBuf {
    let path = folder.join(name);
    fs::create_dir_all(path.parent().expect("it is in the folder")).expect("the folder is ours");
    fs::write(&path, content).expect("the folder is ours");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).expect("the file is ours");
    path
}

/// What `docker build` would send: the files that git has and the ignore file keeps, in a folder of their own.
fn image_context() -> tempfile::TempDir {
    let ignored = read("deploy/Dockerfile.dockerignore");
    let rules = ignored.lines().filter(|line| !line.starts_with('#') && !line.is_empty());
    let (mut all, mut kept) = (false, Vec::new());
    for rule in rules {
        match rule.strip_prefix('!') {
            Some(name) => kept.push(name),
            None => all |= rule == "*",
        }
    }
    assert!(all && kept.len() > 3, "everything is ignored but {kept:?}");
    let listed = Command::new("git").args(["ls-files", "-z"]).current_dir(root()).output().expect("git runs");
    let names = String::from_utf8(listed.stdout).expect("names are UTF-8");
    let folder = tempfile::tempdir().expect("a temporary folder");
    let is_kept = |name: &&str| kept.iter().any(|kept| Path::new(name).starts_with(kept));
    for name in names.split('\0').filter(|name| !name.is_empty()).filter(is_kept) {
        // A file that was deleted and not committed yet is listed, too.
        let Ok(content) = fs::read(root().join(name)) else { continue };
        let path = folder.path().join(name);
        fs::create_dir_all(path.parent().expect("it is in the folder")).expect("the folder is ours");
        fs::write(path, content).expect("the folder is ours");
    }
    folder
}

/// Cargo reads the manifest and all that it names, in what an engine would give to the build, which is what a file that is left out
/// breaks. `tests/packages` builds and runs the image, and with `--full` compiles the program in that context.
#[test]
fn the_image_builds_from_what_its_ignore_file_leaves() {
    let dockerfile = read("deploy/Dockerfile");
    let (build_stage, _) = dockerfile.rsplit_once("\nFROM ").expect("a stage that builds, and the image");
    let built: Vec<&str> = build_stage.lines().filter_map(|line| line.strip_prefix("RUN ")).collect();
    assert_eq!(built.last(), Some(&"deploy/package binary && deploy/package rootfs /rootfs"));
    assert!(built.iter().rev().skip(1).all(|step| step.starts_with("apt-get ")), "{built:?}");
    let context = image_context();
    let copied = dockerfile.lines().filter_map(|line| line.strip_prefix("COPY "));
    let copied: Vec<&str> =
        copied.filter_map(|line| line.split(' ').next()).filter(|from| !from.starts_with("--")).collect();
    assert_eq!(copied, ["."]);
    assert!(copied.iter().all(|name| context.path().join(name).exists()));
    let cargo = |arguments: &[&str]| {
        let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        command.args(arguments).args(["--locked", "--offline"]).current_dir(context.path());
        let ended = command.stdin(Stdio::null()).output().expect("cargo starts");
        assert!(ended.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&ended.stderr));
        String::from_utf8(ended.stdout).expect("UTF-8")
    };
    let metadata = cargo(&["metadata", "--no-deps", "--format-version", "1"]);
    assert!(metadata.contains("\"name\":\"keyward\""), "{metadata}");
    // The version of the image's compiler is one that the manifest takes.
    let manifest = read("Cargo.toml");
    let needed = manifest.lines().find_map(|line| line.strip_prefix("rust-version = \"")?.strip_suffix('"'));
    let image = dockerfile.lines().find_map(|line| line.strip_prefix("FROM rust:")?.split('-').next());
    let number = |version: Option<&str>| -> u32 {
        version.and_then(|version| version.strip_prefix("1.")?.parse().ok()).expect("a version of Rust 1")
    };
    assert!(number(image) >= number(needed), "{image:?} {needed:?}");
    assert!(context.path().join("deploy/package").exists());
}

#[test]
fn the_readers_see_what_they_should() {
    let document = "# A `b/c` d\n[x](y#z) [w](https://v)\n```sh\n./tests/run --full\n```\n`e.f`\n";
    let (blocks, prose) = fenced(document, "sh");
    assert_eq!(blocks, ["./tests/run --full\n"]);
    assert_eq!(quoted(&prose), ["b/c", "e.f"]);
    assert_eq!(links(&prose), ["y#z", "https://v"]);
    assert_eq!(anchors(&prose), ["a-bc-d"]);
}
