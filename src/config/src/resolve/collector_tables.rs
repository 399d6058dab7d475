//! Resolves the collectors of OTLP, and `[trace]`.
//!
//! Owns: `[trace]`, and the keys of every collector. Must not know: spans, records, the sending of requests.

use http::{HeaderName, HeaderValue};

use super::{GIB, KIB, MIB, Resolver};
use crate::collector_settings::CollectorSettings;
use crate::toml_trace::TomlTrace;
use crate::trace_settings::TraceSettings;
use crate::trust::Strictness;
use crate::{ClientTls, Endpoint, MemberTrust, Scheme, secrets, values};
use keyward_base::secret::Secret;
use keyward_telemetry::trace_sampling::TraceSampling;

/// Most calls a second with a trace because their client wants one.
const MOST_PARENTS: u32 = 1_000_000;
/// Headers of the request itself.
const OWN_HEADERS: [HeaderName; 5] = [
    http::header::CONTENT_TYPE,
    http::header::CONTENT_LENGTH,
    http::header::TRANSFER_ENCODING,
    http::header::CONNECTION,
    http::header::HOST,
];

/// Files of TLS towards a collector, by name.
pub(super) struct CollectorTlsFiles {
    pub(super) ca: Option<String>,
    pub(super) cert: Option<String>,
    pub(super) key: Option<String>,
}

impl Resolver<'_> {
    /// The collector of spans and log records; `None` without a URL.
    pub(super) fn trace(&mut self, row: &TomlTrace, replica: String) -> Option<TraceSettings> {
        let queue = self.size("trace.queue", row.queue.clone(), 8 * MIB, 64 * KIB..=GIB);
        let Some(url) = &row.url else {
            let needs = |wanted: bool, key| wanted.then_some(key);
            let named = [
                needs(row.ca.is_some() || row.cert.is_some() || row.key.is_some(), "trace.ca"),
                needs(row.headers_file.is_some(), "trace.headers_file"),
                needs(row.sample.is_some_and(|share| share > 0.0), "trace.sample"),
            ];
            for key in named.into_iter().flatten() {
                self.findings.fault(key, "needs trace.url");
            }
            return None;
        };
        let endpoint = self.checked("trace.url", values::collector_url(url, "/"));
        let (endpoint, base) = endpoint.unzip();
        let files = CollectorTlsFiles { ca: row.ca.clone(), cert: row.cert.clone(), key: row.key.clone() };
        let tls = self.collector_tls("trace", endpoint.as_ref(), files);
        let headers = match &row.headers_file {
            Some(name) => self.headers("trace.headers_file", name)?,
            None => Vec::new(),
        };
        let base = base?;
        let path = |signal: &str| format!("{}/v1/{signal}", base.path().trim_end_matches('/')).parse();
        let (traces, logs) = (path("traces"), path("logs"));
        if base.query().is_some() {
            self.findings.fault("trace.url", "must not have a query");
        }
        Some(TraceSettings {
            traces_path: self.checked("trace.url", traces)?,
            logs_path: self.checked("trace.url", logs)?,
            collector: CollectorSettings { endpoint: endpoint?, tls: tls?, headers },
            queue,
            replica,
        })
    }

    /// The choice of the calls with a trace.
    pub(super) fn trace_sampling(&mut self, row: &TomlTrace) -> TraceSampling {
        let default = TraceSampling::default();
        let share = row.sample.unwrap_or(default.share);
        if !(0.0..=1.0).contains(&share) {
            self.findings.fault("trace.sample", "must be from 0 to 1");
        }
        let parents = row.parents_per_second.unwrap_or(default.parents_per_second);
        let path = "trace.parents_per_second";
        let parents = self.count(path, Some(parents), 0, 0..=MOST_PARENTS);
        TraceSampling {
            share,
            follows_parent: row.follow_parent.unwrap_or(default.follows_parent),
            parents_per_second: u32::try_from(parents).unwrap_or(u32::MAX),
            has_identities: row.identities.unwrap_or(default.has_identities),
        }
    }

    /// TLS towards the collector at `endpoint`, if its URL is known; `Some(None)` for plain HTTP. `table` is
    /// the table of the keys.
    pub(super) fn collector_tls(
        &mut self,
        table: &str,
        endpoint: Option<&Endpoint>,
        files: CollectorTlsFiles,
    ) -> Option<Option<ClientTls>> {
        let CollectorTlsFiles { ca, cert, key } = files;
        let is_https = endpoint.is_none_or(|endpoint| endpoint.scheme == Scheme::Https);
        let has_tls = ca.is_some() || cert.is_some() || key.is_some();
        if has_tls && !is_https {
            self.findings.fault(&format!("{table}.url"), "needs https for ca, cert and key");
        }
        if !has_tls && !is_https {
            return Some(None);
        }
        let path = format!("{table}.ca");
        let ca = self.required(&path, ca, "https needs the authorities of the collector's certificate");
        let identity = match (cert, key) {
            (None, None) => None,
            (cert, key) => self.key_pair(table, cert, key),
        };
        let roots = self.roots(&path, &ca?)?;
        Some(Some(ClientTls { trust: MemberTrust::Authorities(roots, Strictness::AsEtcd), identity }))
    }

    /// The headers in a secret file.
    fn headers(&mut self, path: &str, name: &str) -> Option<Vec<(HeaderName, Secret<String>)>> {
        let lines = self.secret(path, name, secrets::lines)?;
        let headers = lines.expose().lines().filter(|line| !line.is_empty()).map(header);
        let headers = headers.collect::<Option<Vec<_>>>();
        if headers.is_none() {
            self.findings.fault(path, "must have one header in each line, as `name: value`");
        }
        headers
    }
}

/// A header as written in one line; `None` if the line is malformed, or if the header is one of the request's
/// own.
fn header(line: &str) -> Option<(HeaderName, Secret<String>)> {
    let (name, value) = line.split_once(':')?;
    let name = name.trim().parse::<HeaderName>().ok().filter(|name| !OWN_HEADERS.contains(name))?;
    let value = value.trim();
    HeaderValue::from_str(value).ok().filter(|value| !value.is_empty())?;
    Some((name, Secret::new(value.to_owned())))
}

#[cfg(test)]
mod tests {
    use crate::{Config, ConfigFaults};

    fn config(lines: &str) -> Result<Config, ConfigFaults> {
        let folder = tempfile::tempdir().unwrap();
        let made = rcgen::generate_simple_self_signed(["keyward.test".to_owned()]).unwrap();
        for (name, text) in [
            ("ca", made.cert.pem().as_str()),
            ("headers", "authorization: Bearer x\n\nX-Tenant : a:b \n"),
            ("host", "host: elsewhere\n"),
            ("odd", "no colon\n"),
        ] {
            std::fs::write(folder.path().join(name), text).unwrap();
        }
        let text = format!(
            "[[listener]]\nname = 'one'\naddress = '127.0.0.1:1'\n[cluster]\n\
             endpoints = ['http://127.0.0.1:2']\n{lines}"
        );
        let path = folder.path().join("config.toml");
        std::fs::write(&path, text).unwrap();
        crate::load(&path).map(|(config, _)| config)
    }

    #[test]
    fn a_collector_has_a_base_url_and_headers_that_are_masked() {
        let text =
            "[trace]\nurl = 'https://c:4318/otel/'\nca = 'ca'\nheaders_file = 'headers'\nsample = 0.25\n";
        let config = config(text).unwrap_or_else(|faults| panic!("{faults}"));
        let trace = config.trace.as_ref().unwrap();
        assert_eq!(trace.traces_path, "/otel/v1/traces");
        assert_eq!(trace.logs_path, "/otel/v1/logs");
        let headers = trace.collector.headers.iter();
        let headers: Vec<_> = headers.map(|(name, value)| (name.as_str(), value.expose().as_str())).collect();
        assert_eq!(headers, [("authorization", "Bearer x"), ("x-tenant", "a:b")]);
        assert!(!format!("{config:?}").contains("Bearer"));
        assert!((config.trace_sampling.share - 0.25).abs() < 1e-9);
        let plain = self::config("[trace]\nurl = 'http://c:4318'\n[log]\notlp = true\n").unwrap();
        assert_eq!(plain.trace.as_ref().unwrap().traces_path, "/v1/traces");
        assert!(plain.log.is_exported);
        assert!(self::config("").unwrap().trace.is_none());
    }

    #[test]
    fn faults_are_told_with_their_keys() {
        for (text, fault) in [
            ("[trace]\nurl = 'c:4318'", "trace.url"),
            ("[trace]\nurl = 'http://c:1/?a=b'", "trace.url"),
            ("[trace]\nurl = 'http://c:4318'\nca = 'ca'", "trace.url"),
            ("[trace]\nurl = 'https://c:4318'", "trace.ca"),
            ("[trace]\nurl = 'https://c:4318'\nca = 'ca'\ncert = 'ca'", "trace.key"),
            ("[trace]\nurl = 'http://c:4318'\nheaders_file = 'odd'", "trace.headers_file"),
            ("[trace]\nurl = 'http://c:4318'\nheaders_file = 'host'", "trace.headers_file"),
            ("[trace]\nurl = 'http://c:4318'\nsample = 1.5", "trace.sample"),
            ("[trace]\nurl = 'http://c:4318'\nqueue = '1KiB'", "trace.queue"),
            ("[trace]\nsample = 0.5", "trace.sample"),
            ("[trace]\nca = 'ca'", "trace.ca"),
            ("[log]\notlp = true", "log.otlp"),
        ] {
            let faults = config(text).expect_err(text);
            let paths: Vec<_> = faults.iter().map(|fault| fault.path.as_str()).collect();
            assert!(paths.contains(&fault), "{text}: {paths:?}");
        }
    }
}
