//! The records of the log that end a condition.
//!
//! Owns: which record ends which condition, and the field that tells apart those who can have a condition at
//! the same time. Must not know: the records of a process. Invariants: a condition that several members,
//! names or sinks can have has a subject, so that one of them does not end it for the others; all ends of a
//! condition have the same subject. `tests/docs` holds the rows against the source and against the book.

/// A record of the log that ends conditions.
#[derive(Debug)]
pub struct ConditionEnd {
    /// The names of the conditions.
    pub conditions: &'static [&'static str],
    /// The message of the record, of level info.
    pub message: &'static str,
    /// The field of both records that names the one who has the condition: a member, a name, a sink.
    pub subject: Option<&'static str>,
}

/// All records that end conditions.
pub static CONDITION_ENDS: &[ConditionEnd] = &[
    // Members.
    of_each(&["member_ejected"], "member", "the ejection of a member has ended: it gets calls again"),
    of_each(&["member_not_ready"], "member", "member is ready"),
    of_each(&["member_not_ready", "member_ejected"], "member", "member left"),
    end(&["no_leader"], "member became leader"),
    end(&["cluster_unserved"], "the cluster can be served"),
    end(&["no_member"], "a member answers again"),
    of_each(&["member_tls"], "endpoint", "a member answers where a TLS handshake failed"),
    of_each(
        &["foreign_cluster", "foreign_address"],
        "endpoint",
        "the other cluster does not answer here any more",
    ),
    end(&["probe_login_refused"], "etcd takes the name and password of the probing user again"),
    end(&["member_list_refused"], "the member list is given to the probing user again"),
    of_each(&["name_not_found"], "name", "a name was looked up"),
    of_each(&["name_servers_silent"], "name", "name servers answer again"),
    of_each(&["name_server_fails"], "server", "a name server answers again"),
    end(&["mint_fails"], "certificates are minted again"),
    end(&["calls_shed"], "no calls are shed any more: db and latency are 0"),
    end(&["shard_stuck"], "all shards make progress again"),
    // Policy, revocations, configuration.
    end(&["policy_unread"], "the policy is read from etcd again"),
    end(&["policy_faulty"], "the stored policy is good again"),
    end(&["grants_unreadable"], "all temporary grants can be read again"),
    end(&["revocations_unread", "revocations_old"], "revocations are read from etcd again"),
    end(
        &["configuration_warning", "configuration_warnings_stand"],
        "configuration: warnings stand no longer",
    ),
    // A reload tells anew which keys wait for a restart, behind these records.
    end(&["configuration_refused", "restart_pending"], "the configuration with this digest is in force"),
    end(
        &["configuration_refused", "restart_pending"],
        "configuration read again: nothing has changed that can change while running",
    ),
    of_each(&["state_file_unwritten"], "path", "written again"),
    // Audit log, telemetry.
    end(&["audit_unwritable", "audit_disk_silent"], "the audit log is written again"),
    end(&["audit_not_continued"], "the audit file is continued"),
    end(&["audit_file_lost"], "the audit file is at its path again"),
    end(&["audit_not_rotated"], "the audit file was rotated"),
    end(
        &["audit_sink_behind"],
        "calls are served again: all sinks of audit records have taken the old files",
    ),
    of_each(&["audit_sink_fails"], "sink", "audit records are accepted again"),
    end(&["audit_retention"], "audit records are kept for audit.keep_for again"),
    of_each(&["telemetry_untaken"], "signal", "the collector takes telemetry again"),
];

const fn end(conditions: &'static [&'static str], message: &'static str) -> ConditionEnd {
    ConditionEnd { conditions, message, subject: None }
}

/// The record ends the conditions of the one that its field `subject` names.
const fn of_each(
    conditions: &'static [&'static str],
    subject: &'static str,
    message: &'static str,
) -> ConditionEnd {
    ConditionEnd { conditions, message, subject: Some(subject) }
}
