//! Resolves the audit log.
//!
//! Owns: `[audit]`. Must not know: the writing of records. Invariant: without a sink the audit log is off.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use rustls::SignatureScheme;

use super::{DAY, Duration, GIB, HOUR, KIB, MIB, Resolver};
use crate::config::audit_settings::{
    AuditEvent, AuditEvents, AuditFileSettings, AuditSettings, OnFull, SyslogAddress,
};
use crate::config::toml_file::{TomlAudit, TomlAuditEvent, TomlOnFull};
use crate::pem::PrivateKey;

/// Events recorded without `audit.events`.
const EVENTS: [TomlAuditEvent; 4] =
    [TomlAuditEvent::Changes, TomlAuditEvent::Logins, TomlAuditEvent::Refusals, TomlAuditEvent::Admin];
const YEAR: Duration = Duration::from_secs(366 * 24 * 3600);
/// Longest name of a replica.
const LONGEST_REPLICA: usize = 128;

impl Resolver<'_> {
    /// The audit log; `None` without a sink.
    pub(super) fn audit(&mut self, audit: TomlAudit) -> Option<AuditSettings> {
        let max_size = self.size("audit.max_size", audit.max_size, 100 * MIB, 64 * KIB..=1024 * GIB);
        let max_age = self.duration("audit.max_age", audit.max_age, DAY, Duration::ZERO..=YEAR);
        if !max_age.is_zero() && max_age < HOUR / 60 {
            self.findings.fault("audit.max_age", "must be 0s or at least 1m");
        }
        let keep = self.count("audit.keep", audit.keep, 30, 0..=100_000);
        let queue = self.size("audit.queue", audit.queue, 16 * MIB, 64 * KIB..=GIB);
        let syslog = audit.syslog.and_then(|text| self.syslog_address(&text));
        let signing_key = audit.signing_key_file.and_then(|name| self.audit_key(&name));
        let events = audit.events.unwrap_or_else(|| EVENTS.to_vec());
        if events.is_empty() {
            self.findings.fault("audit.events", "is empty; without a sink nothing is recorded");
        }
        let path = audit.file.filter(|name| !name.is_empty()).map(|name| self.written_path(&name));
        let stdout = audit.stdout.unwrap_or(false);
        let replica = self.replica(audit.replica);
        if path.is_none() && !stdout && syslog.is_none() {
            return None;
        }
        let file = path.map(|path| AuditFileSettings {
            path,
            max_size: max_size as u64,
            max_age: Some(max_age).filter(|age| !age.is_zero()),
            keep,
        });
        let on_full = match audit.on_full {
            Some(TomlOnFull::Drop) => OnFull::Drop,
            Some(TomlOnFull::Block) | None => OnFull::Block,
        };
        let events = events.into_iter().map(event).collect::<AuditEvents>();
        Some(AuditSettings { events, file, stdout, syslog, queue, on_full, signing_key, replica })
    }

    /// The name of the replica: the host's name unless configured.
    fn replica(&mut self, configured: Option<String>) -> String {
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
        let file = self.file(name);
        self.warn_if_open(path, &file);
        let key = self.checked(path, PrivateKey::read(&file))?;
        if key.signing().choose_scheme(&[SignatureScheme::ED25519]).is_none() {
            self.findings.fault(path, "is no Ed25519 key; `keyward audit keygen` makes one");
            return None;
        }
        Some(Arc::new(key))
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
        TomlAuditEvent::Logins => AuditEvent::Login,
        TomlAuditEvent::Refusals => AuditEvent::Refusal,
        TomlAuditEvent::Admin => AuditEvent::Admin,
    }
}
