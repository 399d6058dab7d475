//! A real Prometheus on loopback with the repository's rules, in which a minute is a second.
//!
//! Owns: its process, its folder, the questions to its API. Must not know what an alert means. Invariants: Prometheus scrapes and
//! evaluates once a second; every duration of the rules is in minutes, and the copy that is loaded differs only in their unit.

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde_json::Value;
use tempfile::TempDir;

use super::{http, ports, process::Process, wait};

/// The rules of the repository.
pub(crate) const RULES: &str = "deploy/monitoring/alerts.yaml";
const LIMIT: Duration = Duration::from_secs(60);

/// A running Prometheus.
pub(crate) struct Prometheus {
    process: Process,
    address: SocketAddr,
    /// After the process, whose files are in it.
    _folder: TempDir,
}

/// An alert that fires.
#[derive(Clone, Debug)]
pub(crate) struct FiringAlert {
    pub(crate) name: String,
    pub(crate) instance: String,
    pub(crate) labels: Value,
    pub(crate) annotations: Value,
}

impl Prometheus {
    /// Starts it with these admin addresses of Keyward as targets of the job `keyward`, and waits until it answers.
    pub(crate) async fn start(targets: &[SocketAddr]) -> Prometheus {
        Prometheus::start_with(targets, &[]).await
    }

    /// The same with further flags.
    pub(crate) async fn start_with(targets: &[SocketAddr], flags: &[&str]) -> Prometheus {
        let folder = tempfile::Builder::new().prefix("prometheus-").tempdir().expect("a temporary folder");
        let address = ports::free();
        let targets: Vec<String> = targets.iter().map(ToString::to_string).collect();
        let config = format!(
            "global: {{scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: 1s}}\n\
             rule_files: [rules.yaml]\n\
             scrape_configs: [{{job_name: keyward, static_configs: [{{targets: {targets:?}}}]}}]\n"
        );
        let write = |name: &str, text: &str| {
            std::fs::write(folder.path().join(name), text).expect("the file can be written");
        };
        write("prometheus.yaml", &config);
        write("rules.yaml", &in_seconds(&std::fs::read_to_string(root().join(RULES)).expect("the rules")));
        let args = [
            format!("--config.file={}", folder.path().join("prometheus.yaml").display()),
            format!("--storage.tsdb.path={}", folder.path().join("data").display()),
            format!("--web.listen-address={address}"),
            "--log.level=warn".to_owned(),
        ];
        let args = args.into_iter().chain(flags.iter().map(|flag| (*flag).to_owned()));
        let log = folder.path().join("prometheus.log");
        let process = Process::start("prometheus", &programs().join("prometheus"), args, &[], &log);
        let prometheus = Prometheus { process, address, _folder: folder };
        let ready = async || {
            assert!(prometheus.process.exit().is_none(), "prometheus ended: {}", prometheus.process.tail());
            http::get(address, "/-/ready").await.filter(|(status, _)| *status == 200).map(|_| ())
        };
        wait::until(LIMIT, "Prometheus is ready", ready).await;
        prometheus
    }

    /// The alerts that fire now.
    pub(crate) async fn firing(&self) -> Vec<FiringAlert> {
        let answer = self.api("/api/v1/alerts").await;
        let alerts = answer["alerts"].as_array().expect("alerts").iter();
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let firing = alerts.filter(|alert| alert["state"] == "firing").map(|alert| FiringAlert {
            name: text(&alert["labels"]["alertname"]),
            instance: text(&alert["labels"]["instance"]),
            labels: alert["labels"].clone(),
            annotations: alert["annotations"].clone(),
        });
        firing.collect()
    }

    /// The result of an instant query: the samples, each with its labels and its value.
    pub(crate) async fn query(&self, expression: &str) -> Vec<(Value, f64)> {
        let query = utf8_percent_encode(expression, NON_ALPHANUMERIC);
        let answer = self.api(&format!("/api/v1/query?query={query}")).await;
        let samples = answer["result"].as_array().unwrap_or_else(|| panic!("{expression}: {answer}"));
        let value = |sample: &Value| -> f64 {
            sample["value"][1].as_str().and_then(|text| text.parse().ok()).expect("a number")
        };
        samples.iter().map(|sample| (sample["metric"].clone(), value(sample))).collect()
    }

    /// The exemplars of a query between two times in seconds: each with the labels of its series.
    pub(crate) async fn exemplars(&self, query: &str, begin: u64, end: u64) -> Vec<(Value, Value)> {
        let query = utf8_percent_encode(query, NON_ALPHANUMERIC);
        let path = format!("/api/v1/query_exemplars?query={query}&start={begin}&end={end}");
        let answer = self.api(&path).await;
        let series = answer.as_array().unwrap_or_else(|| panic!("{answer}")).iter();
        let exemplars = series.flat_map(|series| {
            let exemplars = series["exemplars"].as_array().into_iter().flatten();
            exemplars.map(|exemplar| (series["seriesLabels"].clone(), exemplar.clone()))
        });
        exemplars.collect()
    }

    async fn api(&self, path: &str) -> Value {
        let asked = async || http::get(self.address, path).await;
        let (status, body) = wait::until(LIMIT, "Prometheus answers", asked).await;
        let answer: Value = serde_json::from_str(&body).unwrap_or_else(|_| panic!("{path}: {body}"));
        assert_eq!((status, &answer["status"]), (200, &"success".into()), "{path}: {body}");
        answer["data"].clone()
    }
}

/// The same rules with every duration in seconds in place of minutes: `for: 5m` and `[5m]`.
fn in_seconds(rules: &str) -> String {
    let mut parts = Vec::new();
    for line in rules.lines() {
        let mut line = line.to_owned();
        if let Some(digits) =
            line.trim().strip_prefix("for: ").and_then(|duration| duration.strip_suffix('m'))
        {
            assert!(digits.parse::<u32>().is_ok(), "{line}");
            line = line.replace(&format!("{digits}m"), &format!("{digits}s"));
        }
        assert!(!line.trim().starts_with("for: ") || line.ends_with('s'), "{line}");
        while let Some(at) = line.find("m]") {
            line.replace_range(at..at + 1, "s");
        }
        parts.push(line);
    }
    parts.join("\n")
}

/// The folder of `prometheus` and `promtool`.
pub(crate) fn programs() -> PathBuf {
    let script = root().join("tests/get-prometheus");
    let asked = Command::new(script).stdin(Stdio::null()).stderr(Stdio::inherit()).output();
    let asked = asked.expect("tests/get-prometheus can be run");
    assert!(asked.status.success(), "tests/get-prometheus failed; its reason is above");
    PathBuf::from(String::from_utf8(asked.stdout).expect("a path in UTF-8").trim_end())
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

#[test]
fn only_durations_are_changed() {
    let rules = "  expr: increase(a_total[15m]) > 5\n  for: 10m\n  summary: \"for 15m\"\n";
    assert_eq!(in_seconds(rules), "  expr: increase(a_total[15s]) > 5\n  for: 10s\n  summary: \"for 15m\"");
}
