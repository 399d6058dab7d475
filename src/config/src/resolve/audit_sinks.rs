//! Resolves the audit log.
//!
//! Owns: `[audit]`. Must not know: the writing of records. Invariant: without a sink the audit log is off.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use http::HeaderValue;
use http::header::AUTHORIZATION;
use rustls::SignatureScheme;

use super::collector_tables::CollectorTlsFiles;
use super::{DAY, Duration, GIB, HOUR, KIB, MIB, Resolver};
use crate::audit_settings::{
    AuditCollector, AuditEvent, AuditEvents, AuditFileSettings, AuditSettings, OnFull, SyslogAddress,
};
use crate::collector_settings::CollectorSettings;
use crate::toml_file::{TomlAudit, TomlAuditEvent, TomlOnFull, TomlOtlp};
use crate::{secrets, values};
use keyward_base::pem::PrivateKey;
use keyward_base::secret::Secret;

/// Events recorded without `audit.events`.
const EVENTS: [TomlAuditEvent; 4] =
    [TomlAuditEvent::Changes, TomlAuditEvent::Logins, TomlAuditEvent::Refusals, TomlAuditEvent::Admin];
const YEAR: Duration = Duration::from_secs(366 * 24 * 3600);
/// Longest name of a replica.
const LONGEST_REPLICA: usize = 128;

impl Resolver<'_> {
    /// The audit log; `None` without a sink.
    pub(super) fn audit(&mut self, audit: TomlAudit, replica: String) -> Option<AuditSettings> {
        let max_size = self.size("audit.max_size", audit.max_size, 100 * MIB, 64 * KIB..=1024 * GIB);
        let max_age = self.duration("audit.max_age", audit.max_age, DAY, Duration::ZERO..=YEAR);
        if !max_age.is_zero() && max_age < HOUR / 60 {
            self.findings.fault("audit.max_age", "must be 0s or at least 1m");
        }
        let keep = self.count("audit.keep", audit.keep, 30, 0..=100_000);
        let keep_for = self.duration("audit.keep_for", audit.keep_for, DAY, Duration::ZERO..=YEAR);
        let files = u32::try_from(keep).unwrap_or(u32::MAX).saturating_add(1);
        if keep > 0 && !max_age.is_zero() && max_age.saturating_mul(files) < keep_for {
            self.findings.warn("audit.keep_for", "is longer than audit.keep files of audit.max_age last");
        }
        let queue = self.size("audit.queue", audit.queue, 16 * MIB, 64 * KIB..=GIB);
        let syslog = audit.syslog.and_then(|text| self.syslog_address(&text));
        let otlp = audit.otlp.and_then(|row| self.otlp(row));
        let signing_key = audit.signing_key_file.and_then(|name| self.audit_key(&name));
        let events = audit.events.unwrap_or_else(|| EVENTS.to_vec());
        if events.is_empty() {
            self.findings.fault("audit.events", "is empty; without a sink nothing is recorded");
        }
        let file = audit.file.filter(|name| !name.is_empty());
        let path = file.map(|name| self.written_path("audit.file", &name));
        let stdout = audit.stdout.unwrap_or(false);
        if path.is_none() && !stdout && syslog.is_none() && otlp.is_none() {
            // The reference of the configuration names the default.
            let set = |events: &[TomlAuditEvent]| events.iter().copied().map(event).collect::<AuditEvents>();
            if set(&events) != set(&EVENTS) {
                self.findings.warn("audit.events", "records nothing: no sink is named, such as audit.file");
            }
            return None;
        }
        let file = path.map(|path| AuditFileSettings {
            path,
            max_size: max_size as u64,
            max_age: Some(max_age).filter(|age| !age.is_zero()),
            keep,
            keep_for: Some(keep_for).filter(|time| keep > 0 && !time.is_zero()),
        });
        let on_full = match audit.on_full {
            Some(TomlOnFull::Drop) => OnFull::Drop,
            Some(TomlOnFull::Block) | None => OnFull::Block,
        };
        let events = events.into_iter().map(event).collect::<AuditEvents>();
        Some(AuditSettings { events, file, stdout, syslog, otlp, queue, on_full, signing_key, replica })
    }

    /// The name of the replica: the host's name unless configured.
    pub(super) fn replica(&mut self, configured: Option<String>) -> String {
        let path = "audit.replica";
        let replica =
            configured.unwrap_or_else(|| rustix::system::uname().nodename().to_string_lossy().into_owned());
        // The name is a field of RFC 5424, where only printable ASCII may stand.
        let fits = (1..=LONGEST_REPLICA).contains(&replica.len());
        if !fits || !replica.bytes().all(|byte| byte.is_ascii_graphic()) {
            self.findings
                .fault(path, "a replica's name is 1 to 128 printable ASCII characters without spaces");
        }
        replica
    }

    fn audit_key(&mut self, name: &str) -> Option<Arc<PrivateKey>> {
        let path = "audit.signing_key_file";
        let file = self.file(path, name);
        self.warn_if_open(path, &file);
        let key = self.checked(path, PrivateKey::read(&file))?;
        if key.signing().choose_scheme(&[SignatureScheme::ED25519]).is_none() {
            self.findings.fault(path, "is no Ed25519 key; `keyward audit keygen` makes one");
            return None;
        }
        Some(Arc::new(key))
    }

    /// The collector of OTLP logs.
    fn otlp(&mut self, row: TomlOtlp) -> Option<AuditCollector> {
        let url = self.required("audit.otlp.url", row.url, "the collector's URL is needed");
        let address =
            url.and_then(|url| self.checked("audit.otlp.url", values::collector_url(&url, "/v1/logs")));
        let authorization = row.authorization_file.and_then(|name| self.authorization(&name));
        let headers = authorization.map(|value| (AUTHORIZATION, value)).into_iter().collect();
        let files = CollectorTlsFiles { ca: row.ca, cert: row.cert, key: row.key };
        let endpoint = address.as_ref().map(|(endpoint, _)| endpoint);
        let tls = self.collector_tls("audit.otlp", endpoint, files)?;
        let (endpoint, path) = address?;
        Some(AuditCollector { collector: CollectorSettings { endpoint, tls, headers }, path })
    }

    fn authorization(&mut self, name: &str) -> Option<Secret<String>> {
        let path = "audit.otlp.authorization_file";
        let value = self.secret(path, name, secrets::password)?;
        if HeaderValue::from_str(value.expose()).is_err() {
            self.findings.fault(path, "holds a control character, which no HTTP header may have");
            return None;
        }
        Some(value)
    }

    fn syslog_address(&mut self, text: &str) -> Option<SyslogAddress> {
        const FORM: &str = "a syslog server is \"unix:/path\" or \"udp:ADDRESS:PORT\" with an IP address";
        let address = match text.split_once(':') {
            Some(("unix", path)) if path.starts_with('/') => Some(SyslogAddress::Unix(PathBuf::from(path))),
            Some(("udp", address)) => address.parse::<SocketAddr>().ok().map(SyslogAddress::Udp),
            _ => None,
        };
        if address.is_none() {
            self.findings.fault("audit.syslog", FORM);
        }
        address
    }
}

fn event(written: TomlAuditEvent) -> AuditEvent {
    match written {
        TomlAuditEvent::Changes => AuditEvent::Change,
        TomlAuditEvent::Reads => AuditEvent::Read,
        TomlAuditEvent::Watches => AuditEvent::Watch,
        TomlAuditEvent::Leases => AuditEvent::Lease,
        TomlAuditEvent::Logins => AuditEvent::Login,
        TomlAuditEvent::Refusals => AuditEvent::Refusal,
        TomlAuditEvent::Admin => AuditEvent::Admin,
    }
}

#[cfg(test)]
mod tests {
    use crate::{Config, ConfigFaults};

    fn config(otlp: &str) -> Result<Config, ConfigFaults> {
        let folder = tempfile::tempdir().unwrap();
        let made = rcgen::generate_simple_self_signed(["keyward.test".to_owned()]).unwrap();
        for (name, text) in
            [("ca", made.cert.pem()), ("token", "Bearer x\n".into()), ("odd", "a\x01b".into())]
        {
            std::fs::write(folder.path().join(name), text).unwrap();
        }
        let text = format!(
            "[[listener]]\nname = 'one'\naddress = '127.0.0.1:1'\n[cluster]\n\
             endpoints = ['http://127.0.0.1:2']\n[audit.otlp]\n{otlp}"
        );
        let path = folder.path().join("config.toml");
        std::fs::write(&path, text).unwrap();
        crate::load(&path).map(|(config, _)| config)
    }

    #[test]
    fn a_collector_alone_turns_the_log_on_and_its_secret_is_masked() {
        let text = "url = 'https://c:4318'\nca = 'ca'\nauthorization_file = 'token'\n";
        let config = config(text).unwrap_or_else(|faults| panic!("{faults}"));
        let otlp = config.audit.as_ref().unwrap().otlp.as_ref().unwrap();
        assert_eq!(
            (otlp.collector.endpoint.to_string(), otlp.path.as_str()),
            ("https://c:4318".into(), "/v1/logs")
        );
        assert!(otlp.collector.tls.is_some() && !format!("{config:?}").contains("Bearer"));
        assert!(self::config("url = 'http://c:4318'").unwrap().audit.is_some());
    }

    #[test]
    fn faults_of_a_collector_are_told_with_their_keys() {
        for (text, fault) in [
            ("", "audit.otlp.url"),
            ("url = 'c:4318'", "audit.otlp.url"),
            ("url = 'http://c:4318'\nca = 'ca'", "audit.otlp.url"),
            ("url = 'https://c:4318'", "audit.otlp.ca"),
            ("url = 'https://c:4318'\nca = 'absent'", "audit.otlp.ca"),
            ("url = 'https://c:4318'\nca = 'ca'\ncert = 'ca'", "audit.otlp.key"),
            ("url = 'http://c:4318'\nauthorization_file = 'odd'", "audit.otlp.authorization_file"),
        ] {
            let faults = config(text).expect_err(text);
            let paths: Vec<_> = faults.iter().map(|fault| fault.path.as_str()).collect();
            assert!(paths.contains(&fault), "{text}: {paths:?}");
        }
    }
}
