//! The settings of the audit log.
//!
//! Must not know: the format of a record, the writing of a file.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use http::uri::PathAndQuery;

use crate::collector_settings::CollectorSettings;
use keyward_base::pem::PrivateKey;

/// A kind of event with audit records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AuditEvent {
    /// A call that changes keys, leases, members, users or roles.
    Change,
    /// A call that only reads.
    Read,
    /// The begin and the end of a watch stream.
    Watch,
    /// The begin of a keepalive stream.
    Lease,
    /// A password login.
    Login,
    /// A call refused by Keyward, or denied by a member.
    Refusal,
    /// A command on the admin socket.
    Admin,
}

/// A set of [`AuditEvent`]s.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AuditEvents(u8);

impl AuditEvents {
    /// True if the set has the event.
    #[must_use]
    pub fn has(self, event: AuditEvent) -> bool {
        self.0 & (1 << event as u8) != 0
    }
}

impl FromIterator<AuditEvent> for AuditEvents {
    fn from_iter<I: IntoIterator<Item = AuditEvent>>(events: I) -> Self {
        Self(events.into_iter().fold(0, |set, event| set | 1 << event as u8))
    }
}

/// The behaviour of a call whose record finds no room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnFull {
    /// The call waits for room before anything is sent, and is refused if the log cannot be written.
    Block,
    /// The call goes on, and the loss of its record is counted.
    Drop,
}

/// Address of a syslog server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SyslogAddress {
    /// A datagram socket of this machine, such as `/dev/log`.
    Unix(PathBuf),
    /// A UDP port.
    Udp(SocketAddr),
}

/// A collector that takes audit records.
#[derive(Clone, Debug, PartialEq)]
pub struct AuditCollector {
    /// The collector.
    pub collector: CollectorSettings,
    /// The path of requests, such as `/v1/logs`.
    pub path: PathAndQuery,
}

/// The file of the audit log, and its rotation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuditFileSettings {
    /// The file written now. Older files are beside it, with a number at the end of the name.
    pub path: PathBuf,
    /// Size in bytes at which the file is rotated.
    pub max_size: u64,
    /// Age at which the file is rotated; `None` for no limit.
    pub max_age: Option<Duration>,
    /// Number of older files kept; 0 keeps all.
    pub keep: usize,
    /// How long records are to be kept at least; `None` for no such time.
    pub keep_for: Option<Duration>,
}

/// Divisor: the writer takes this part of `audit.queue` at once.
pub const BATCH_PART: usize = 16;
/// Bytes of lines that a sink beside the file takes at once. Proxies before a collector often refuse requests
/// of more than 1 MiB.
pub const SINK_BYTES: usize = 512 * 1024;
/// A sink has these lines as they are read, as they are sent, and encoded with their lengths and times.
const SINK_COPIES: usize = 4;

/// The settings of the audit log, with at least one sink.
#[derive(Clone, Debug, PartialEq)]
pub struct AuditSettings {
    /// The recorded events.
    pub events: AuditEvents,
    /// The file, if any.
    pub file: Option<AuditFileSettings>,
    /// True if records go to stdout.
    pub stdout: bool,
    /// The syslog server, if any.
    pub syslog: Option<SyslogAddress>,
    /// The collector of OTLP logs, if any.
    pub otlp: Option<AuditCollector>,
    /// Memory of records waiting for a sink, in bytes.
    pub queue: usize,
    /// The behaviour of a call whose record finds no room.
    pub on_full: OnFull,
    /// The Ed25519 key that signs the head of the chain, if any.
    pub signing_key: Option<Arc<PrivateKey>>,
    /// The name of this replica in the records.
    pub replica: String,
}

impl AuditSettings {
    /// Bytes held for records at most: those in the queue, the lines of the batch that is written, in two
    /// copies, and for each sink the lines that are sent. Without a file the lines wait in memory: with
    /// `Block` in the room of their records, with `Drop` in a queue of each sink.
    #[must_use]
    pub fn memory(&self) -> usize {
        let sinks =
            usize::from(self.stdout) + usize::from(self.syslog.is_some()) + usize::from(self.otlp.is_some());
        // A line has a few hundred bytes beside its record.
        let batch = self.queue / BATCH_PART / 4 * 5;
        let waiting = match (&self.file, self.on_full) {
            (Some(_), _) => 0,
            (None, OnFull::Block) => self.queue / 4,
            (None, OnFull::Drop) => self.queue * sinks,
        };
        self.queue + batch * 2 + waiting + sinks * SINK_BYTES * SINK_COPIES
    }
}
