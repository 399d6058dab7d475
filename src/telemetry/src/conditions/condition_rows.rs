//! Every warning and error of the log, and where else an operator finds each.
//!
//! Owns: the names, and the remedies of those that no check of `keyward doctor` examines. Must not know: the
//! records of a process. Invariant: the rows are those of the book, and the messages those of the
//! source; `tests/docs` compares the three.

use super::{ConditionTelling, LoggedCondition};

/// All conditions.
pub static CONDITIONS: &[LoggedCondition] = &[
    // Members.
    checked("member_ejected", "member is ejected: it gets no calls that others can serve", "member_ejected"),
    checked("member_not_ready", "member is not ready", "member_unreachable"),
    checked("no_leader", "no leader is known", "serving"),
    checked("cluster_unserved", "the cluster cannot be served", "serving"),
    checked("no_member", "no member answers", "serving"),
    checked("member_tls", "a TLS handshake with a member failed", "address_unanswered"),
    checked(
        "foreign_cluster",
        "another cluster than the one that is served answers here, and is not used: correct where the \
         endpoint leads; where the cluster was replaced and cluster.identity is \"pinned\", \
         restart Keyward, or set it to \"follow\"",
        "foreign_cluster",
    ),
    checked("foreign_address", "another cluster answers here: the address is not used", "foreign_cluster"),
    checked(
        "clusters_mixed",
        "the configured endpoints belong to different clusters: the one that most of them name is served; \
         set cluster.id to choose",
        "foreign_cluster",
    ),
    event(
        "cluster_replaced",
        "all endpoints name another cluster: Keyward follows it if that lasts",
        "nothing, if the cluster was restored or replaced on purpose; else correct where the endpoints \
         lead",
    ),
    event(
        "cluster_followed",
        "all endpoints have become another cluster, which is followed: watches end as compacted, leases \
         and tokens of the first are gone, sessions prove themselves again",
        "nothing, if the cluster was restored or replaced on purpose; else set cluster.identity to \
         \"pinned\"",
    ),
    lasting(
        "etcd_newer",
        "etcd is newer than any known here: treated as the newest known",
        "look for a newer Keyward that knows this version of etcd",
    ),
    lasting(
        "etcd_older",
        "etcd is older than any known here: treated as the oldest known",
        "upgrade etcd: the versions that Keyward knows are in docs/etcd-facts.md",
    ),
    checked(
        "probe_login_refused",
        "etcd refuses the name and password of the probing user (cluster.probe)",
        "probe_login_refused",
    ),
    event(
        "probe_status_refused",
        "members refuse their status to the probing user (cluster.probe): instead each is asked for its \
         metrics page every 2 s, some milliseconds of its time, and a new leader is noticed that \
         much later; a probing user with the role root avoids it",
        "upgrade etcd to 3.5.32, 3.6.12 or newer, or accept it: the role root for cluster.probe is the \
         other way",
    ),
    checked(
        "member_id_untold",
        "a member answers and tells nobody its id: give Keyward a probing user (cluster.probe)",
        "cluster_unverified",
    ),
    checked(
        "member_list_refused",
        "the member list is refused to the probing user (cluster.probe): only the configured endpoints \
         are used, and members that are added or moved are not found",
        "member_list_refused",
    ),
    lasting(
        "srv_host_not_allowed",
        "an SRV record names a host that is not among cluster.allowed_hosts: nothing is sent there",
        "add the host to cluster.allowed_hosts, or take it out of the SRV record",
    ),
    checked("name_not_found", "a name cannot be looked up", "name_servers"),
    checked(
        "name_servers_silent",
        "no name server answers: the last known addresses stay in use",
        "name_servers",
    ),
    checked("name_server_fails", "a name server fails; another one answers", "name_servers"),
    event(
        "known_addresses_unusable",
        "the last known addresses cannot be used",
        "nothing, if the name servers answer; the file below runtime.state_dir is written again",
    ),
    // Connections to members, and the identities that Keyward has there.
    event(
        "login_failed",
        "login failed",
        "look at the member: its state (keyward status), and its load by bcrypt logins",
    ),
    lasting(
        "tokens_die_early",
        "tokens die sooner than cluster.token_ttl says, touching more often: set it to etcd's \
         --auth-token-ttl",
        "set cluster.token_ttl to etcd's --auth-token-ttl",
    ),
    until(
        "mint_fails",
        "no certificate can be minted",
        "by the reason in the finding: the key and certificate of [mint], and the clock",
    ),
    event("signing_fails", "no token can be signed", "by the reason in the finding: the key of sign_jwt"),
    event(
        "auth_revision_untold",
        "no member tells the auth revision",
        "see that members answer (keyward status), and that signed tokens name a user with the role root \
         where etcd is 3.5 or 3.6",
    ),
    lasting(
        "mint_ca_trusted",
        "members trust mint.ca between each other, which they must not",
        "issue mint.ca from an authority that is not in the members' --peer-trusted-ca-file",
    ),
    checked(
        "mint_ca_unchecked",
        "the member list is refused to the probing user (cluster.probe), so it is not known whether \
         members trust mint.ca between each other, which they must not",
        "member_list_refused",
    ),
    lasting(
        "peer_url_open",
        "the member asks for no certificate at its peer URL: whoever reaches that can act as a member",
        "start the member with --peer-client-cert-auth and --peer-trusted-ca-file",
    ),
    lasting(
        "peer_url_unreached",
        "a member's peer URL cannot be reached from here, so it is not known whether it trusts mint.ca \
         there, which it must not; said once",
        "let Keyward reach the peer URLs, or compare mint.ca with --peer-trusted-ca-file by hand",
    ),
    event(
        "certificate_room",
        "no room for a connection with this user's certificate",
        "raise limits.certificate_connections",
    ),
    event(
        "certificate_connection",
        "no connection to the member with this user's certificate; told again in a minute",
        "by the reason in the finding: the member's --trusted-ca-file, the certificate of the user, the \
         network",
    ),
    event(
        "read_lost",
        "a member was lost while it answered a large read",
        "give the client a limit for its ranges (limits.bytes_per_answer), and look at the member's memory",
    ),
    event(
        "fatal_request",
        "refused: members would end, or differ",
        "find the client in the access log, and upgrade etcd: see open_holes and member_weaknesses",
    ),
    event(
        "lease_id_random",
        "no random bytes for the id of a lease",
        "look at the kernel's log: getrandom fails",
    ),
    event(
        "namespace_answer",
        "a member's answer cannot be shown in a namespace",
        "report it, with this record and keyward version",
    ),
    event(
        "answer_rewriting",
        "a member's answer cannot be rewritten",
        "report it, with this record and keyward version",
    ),
    event(
        "defragment_lock_full",
        "etcd has no space for the lock of a defragmentation: other replicas do not know of it",
        "defragment through one replica at a time, then disarm the alarm",
    ),
    event(
        "defragment_lock_unkept",
        "etcd has no space to keep the lock of a defragmentation: other replicas may not know of it",
        "defragment through one replica at a time, then disarm the alarm",
    ),
    event(
        "defragment_lock_lost",
        "the lock of a defragmentation was lost while a member is under way",
        "defragment through no other replica before the member has ended",
    ),
    checked("calls_shed", "calls are shed while db or latency is not 0", "sheds"),
    // Clients.
    event(
        "connection_unaccepted",
        "a connection could not be accepted",
        "by the reason in the finding: the limit on open files, the kernel's memory for sockets",
    ),
    event(
        "descriptors_near",
        "the limit on open files is near: clients are not accepted for a moment",
        "raise the limit on open files (LimitNOFILE=), or lower limits.connections",
    ),
    checked("descriptors_unraised", "the limit on open files is not raised", "descriptors"),
    checked(
        "descriptors_few",
        "limits.connections does not fit into the limit on open files: further clients are closed",
        "descriptors",
    ),
    checked(
        "connections_full",
        "a limit of client connections is reached: idle ones make room, or else newcomers are refused",
        "connections_full",
    ),
    lasting(
        "shard_gone",
        "a shard is gone; its connections go to the others",
        "restart Keyward, and report the panic in its log",
    ),
    unasked(
        "shard_unstarted",
        "a shard could not start",
        "the process ends, and its exit code and log say why",
    ),
    until(
        "shard_stuck",
        "a shard is stuck or gone",
        "look for a stopped or starved process; if it lasts, restart Keyward and report it",
    ),
    event(
        "waiting_clients_left",
        "not all clients that waited for a listener are served",
        "nothing: these clients connect again",
    ),
    event(
        "waiting_clients_unserved",
        "clients that waited for a listener are not served",
        "nothing: these clients connect again",
    ),
    event(
        "waiting_client_waits",
        "a client that waited for a listener waits on",
        "by the reason in the finding: the limit on open files",
    ),
    event(
        "listener_closes",
        "clients wait for a listener that closes",
        "move these clients to another listener",
    ),
    event(
        "stream_resets",
        "connections were ended: their clients reset too many streams",
        "find the clients: keyward show clients; a client that cancels calls by the thousand has a \
         timeout that is too short",
    ),
    event(
        "handshakes_failed",
        "handshakes of clients failed; the reason is that of the last one",
        "by the reason in the finding: keyward show certs tells which certificate of Keyward has ended; \
         else the client's",
    ),
    event(
        "answers_given_up",
        "answers were given up because their client does not read them",
        "find the clients: keyward show clients; runbook KeywardClientsNotReading",
    ),
    // Policy, revocations, configuration.
    checked("rule_unreachable", "a rule can apply to no caller of any listener", "rule_unreachable"),
    checked("policy_unread", "the policy cannot be read from etcd; the rules in force stay", "policy_old"),
    checked(
        "policy_faulty",
        "the stored policy cannot be used: the last good generation stays in force",
        "policy_faulty",
    ),
    until(
        "grants_unreadable",
        "temporary grants cannot be read, and give nothing",
        "keyward grants lists those that count; give the others again: keyward grant",
    ),
    event(
        "policy_file_unusable",
        "policy.state_file cannot be used",
        "by the reason in the finding: the rights of the file and of its folder; it is written again",
    ),
    event(
        "policy_file_faulty",
        "policy.state_file has a policy with a fault",
        "keyward policy show, then keyward policy apply a good document; the file is written again",
    ),
    event(
        "policy_file_unmade",
        "policy.state_file cannot be made of the policy in force",
        "report it, with this record and keyward version",
    ),
    lasting(
        "revocation_unreadable",
        "an entry of the revocations cannot be read",
        "delete the entry that the finding names, and revoke or block the user again",
    ),
    event(
        "revocation_unchanged",
        "revocations not changed as asked",
        "by the reason in the finding; then repeat the order",
    ),
    until(
        "revocations_unread",
        "revocations cannot be read from etcd",
        "see that a member is ready (keyward status) and that cluster.probe or revocation.user may read \
         revocation.etcd_prefix",
    ),
    checked(
        "revocations_old",
        "revocations are too old: no session is admitted until they are read again",
        "revocation_unknown",
    ),
    event("configuration_warning", "configuration", "keyward check prints the warning with its key"),
    event(
        "configuration_warnings_stand",
        "configuration: warnings stand as before; keyward check prints them",
        "keyward check prints them",
    ),
    checked("configuration_refused", "configuration not reloaded", "config_not_reloaded"),
    checked(
        "configuration_weaker",
        "configuration reloaded: more callers can do more",
        "configuration_weaker",
    ),
    checked("restart_pending", "changed in the file; takes effect at the next start", "restart_pending"),
    event(
        "chain_shorter",
        "configuration reloaded: a chain of certificates is shorter",
        "if nobody meant it: put the intermediate certificate back into the file",
    ),
    checked("state_file_unwritten", "not written; tried again", "state_file_unwritten"),
    // Audit log.
    checked("audit_unwritable", "the audit log cannot be written", "audit_unwritable"),
    checked(
        "audit_disk_silent",
        "the audit log cannot be written: the disk does not answer",
        "audit_unwritable",
    ),
    checked("audit_not_continued", "the audit file cannot be continued yet", "audit_unwritable"),
    checked("audit_file_lost", "the audit file was moved, and no new one can be begun", "audit_file_moved"),
    checked("audit_records_lost", "audit records are lost", "audit_records_lost"),
    checked(
        "audit_lost_at_end",
        "audit records could not be written before the end of the process, and are lost",
        "audit_records_lost",
    ),
    checked(
        "audit_not_stopped",
        "the process before did not end with a stop: audit records of its last calls may be missing",
        "audit_not_stopped",
    ),
    checked(
        "audit_file_removed",
        "somebody removed the audit file: the records go on in a new one",
        "audit_file_moved",
    ),
    checked(
        "audit_file_moved",
        "somebody moved the audit file: the records go on in a new one",
        "audit_file_moved",
    ),
    checked(
        "audit_file_foreign",
        "a file with other bytes is in the place of the audit file, and is moved aside",
        "audit_file_moved",
    ),
    lasting(
        "audit_records_missing",
        "the last audit records are in no file of the folder",
        "keyward audit verify tells which; look for the file that somebody moved",
    ),
    event(
        "audit_not_rotated",
        "the audit file cannot be rotated",
        "by the reason in the finding: room and rights in the folder of audit.file; tried again",
    ),
    event(
        "audit_files_unremoved",
        "old audit files cannot be removed",
        "by the reason in the finding: the rights of the folder of audit.file",
    ),
    event(
        "audit_end_unkept",
        "the end of the audit records is not kept for a restart",
        "by the reason in the finding: the folder runtime.state_dir",
    ),
    event(
        "audit_places_unknown",
        "the place in the audit files is not known: all records are sent again",
        "nothing: the sink gets records a second time",
    ),
    checked(
        "audit_sink_behind",
        "calls are refused: a sink of audit records is behind by more than audit.keep files",
        "audit_sinks",
    ),
    checked("audit_sink_fails", "audit records are not accepted", "audit_sinks"),
    event(
        "audit_sink_refuses",
        "the collector refuses audit records for good",
        "by the answer in the finding: the collector's limits; the records stand in audit.file",
    ),
    checked(
        "audit_retention",
        "at the present rate audit records are removed before audit.keep_for",
        "audit_retention",
    ),
    checked(
        "audit_removed_early",
        "audit records younger than audit.keep_for were removed",
        "audit_retention",
    ),
    event(
        "audit_hand_over_ended",
        "the process before hands no more audit records on",
        "nothing, if that process has ended; its own log says why",
    ),
    event(
        "audit_not_handed_over",
        "the successor takes no audit records: the file is opened again",
        "repeat the hand-over; the successor's log says why it ended",
    ),
    event(
        "audit_no_successor",
        "no successor has taken the audit file",
        "repeat the hand-over; the successor's log says why it ended",
    ),
    // The process, its telemetry, its administration.
    lasting(
        "panicked",
        "a thread panicked",
        "runbook KeywardPanicked: report it, with the place and keyward version",
    ),
    lasting(
        "task_panicked",
        "task panicked",
        "runbook KeywardPanicked: report it, with the place and keyward version",
    ),
    event(
        "log_records_lost",
        "log records were lost: stderr was not read in time, or did not take them",
        "look at who reads stderr (journald, the container's runtime) and at its disk",
    ),
    event(
        "log_records_left_out",
        "records of calls without effect were left out: some callers had too many",
        "find the callers: keyward show clients",
    ),
    until(
        "telemetry_untaken",
        "the collector takes no telemetry",
        "by the reason in the finding: the address, certificate and state of the collector of [trace]",
    ),
    event(
        "telemetry_refused",
        "the collector refuses telemetry for good",
        "by the answer in the finding: the collector's limits and access",
    ),
    event(
        "service_manager_fails",
        "a report to the service manager failed",
        "look at NOTIFY_SOCKET and at systemd",
    ),
    event(
        "service_manager_cancelled",
        "a report to the service manager was cancelled",
        "look at NOTIFY_SOCKET and at systemd",
    ),
    event(
        "service_manager_silent",
        "the service manager takes no reports",
        "look at NOTIFY_SOCKET and at systemd",
    ),
    event(
        "admin_unaccepted",
        "an admin connection could not be accepted",
        "by the reason in the finding: the limit on open files",
    ),
    event(
        "admin_command_unaccepted",
        "an admin command could not be accepted",
        "by the reason in the finding: the limit on open files",
    ),
    event(
        "admin_foreign_user",
        "an admin command of another user was refused",
        "give orders as root or as the user that Keyward runs as",
    ),
    event(
        "fleet_requests_refused",
        "sealed requests of other replicas were refused",
        "by the reason in the finding: forged: give all replicas the same session.key_files, and keep the \
         admin address private; elsewhere: admin.replicas names a replica of another cluster or realm",
    ),
    lasting(
        "admin_socket_gone",
        "the admin socket is gone",
        "restart Keyward; the admin address answers meanwhile",
    ),
    lasting(
        "admin_socket_none",
        "no admin socket; admin.socket names another path, or turns it off",
        "let admin.socket name a path in a folder that Keyward may write to",
    ),
    event(
        "audit_file_not_left",
        "the audit file is not handed over, and this process goes on",
        "by the reason in the finding; then repeat the hand-over",
    ),
    event(
        "successor_unstarted",
        "no successor can be started",
        "by the reason in the finding: the program at the path that Keyward was started from",
    ),
    event(
        "successor_ended",
        "the successor has ended: this process goes on",
        "the successor's own log says why: often keyward check does, too",
    ),
    event(
        "successor_end_unknown",
        "the end of the successor is unknown",
        "look for a second process of Keyward, and repeat the hand-over",
    ),
    event(
        "socket_unhanded",
        "the listening socket of this address cannot be handed over",
        "nothing: the successor binds the address itself",
    ),
    unasked("drain_too_long", "the drain took too long; ended with calls open", "the process ends"),
    unasked("ended_by_signal", "ended at once by a second signal", "the process ends"),
    unasked("ended_by_failure", "ended by a failure", "the process ends, and its exit code says so"),
    unasked(
        "terminal_echo",
        "the terminal may not show what is typed; `stty echo` brings it back",
        "a command that asks for a password has no process to ask",
    ),
];

const fn checked(name: &'static str, message: &'static str, check: &'static str) -> LoggedCondition {
    LoggedCondition { name, message, telling: ConditionTelling::Check(check) }
}

const fn until(name: &'static str, message: &'static str, fix: &'static str) -> LoggedCondition {
    LoggedCondition { name, message, telling: ConditionTelling::Until { fix } }
}

const fn lasting(name: &'static str, message: &'static str, fix: &'static str) -> LoggedCondition {
    LoggedCondition { name, message, telling: ConditionTelling::Lasting { fix } }
}

const fn event(name: &'static str, message: &'static str, fix: &'static str) -> LoggedCondition {
    LoggedCondition { name, message, telling: ConditionTelling::Event { fix } }
}

const fn unasked(name: &'static str, message: &'static str, reason: &'static str) -> LoggedCondition {
    LoggedCondition { name, message, telling: ConditionTelling::NoProcess { reason } }
}
