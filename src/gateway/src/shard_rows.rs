//! The rows that a shard answers to an operator's questions.
//!
//! Owns: the stable field names of clients, watches, leases and locks, in JSON and in `--sort`. Must not
//! know: how a row is printed. Invariants: counts only rise during a connection's life, so that the asker
//! computes rates from two answers; keys and texts of clients are escaped, so that no row controls a terminal
//! or a page; an unknown value is null.

use serde::Serialize;

/// A client connection.
#[derive(Clone, Debug, Serialize)]
pub struct ClientRow {
    /// Number of the connection, unique in the process: `keyward kick`.
    pub client: u64,
    /// The client's address; null on a unix socket.
    pub address: Option<String>,
    /// The listener's name.
    pub listener: String,
    /// The etcd user of the last identified call.
    pub user: Option<String>,
    /// The peer of the last identified call: kind of evidence, and name.
    pub peer: Option<String>,
    /// The name of the last login refused because its user is blocked: a claim, proved by nothing.
    pub blocked_login: Option<String>,
    /// The beginning of the user-agent.
    pub user_agent: Option<String>,
    /// Seconds since the connection was accepted.
    pub age_seconds: u64,
    /// Calls begun, streams included.
    pub calls: u64,
    /// Calls ended with an error.
    pub failed: u64,
    /// Calls and streams under way.
    pub open: u64,
    /// Bytes received, without TLS.
    pub bytes_in: u64,
    /// Bytes sent, without TLS.
    pub bytes_out: u64,
    /// Open watches.
    pub watches: u64,
    /// Leases kept alive.
    pub leases: u64,
    /// Bytes of answers and events that the client has not taken yet.
    pub unread_bytes: u64,
    /// The status code of the last call that failed.
    pub last_error: Option<&'static str>,
    /// The maker of that error: `etcd`, or Keyward for this reason.
    pub last_error_by: Option<&'static str>,
    /// The rule of the policy, or the limit, that refused the call.
    pub last_error_rule: Option<String>,
    /// Seconds since that call.
    pub last_error_seconds: Option<u64>,
    /// True if an operator has asked the connection to end.
    pub kicked: bool,
}

impl ClientRow {
    /// True if `name` is the row's peer, etcd user, or address with or without its port.
    #[must_use]
    pub fn is_named(&self, name: &str) -> bool {
        let is_address = |address: &str| {
            let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
            address == name || host == name || host.trim_matches(['[', ']']) == name
        };
        [&self.peer, &self.user].into_iter().any(|known| known.as_deref() == Some(name))
            || self.address.as_deref().is_some_and(is_address)
    }

    /// True if the connection has shown nobody but a blocked user of this name, whose login was refused. A
    /// connection whose last call was identified as an etcd user is that user's, whatever name it claims.
    #[must_use]
    pub fn is_of_blocked_login(&self, name: &str) -> bool {
        self.user.is_none() && self.blocked_login.as_deref() == Some(name)
    }
}

/// The watches of one range on one client stream.
#[derive(Clone, Debug, Serialize)]
pub struct WatchRow {
    /// Number of the client connection.
    pub client: u64,
    /// The client's address; null on a unix socket.
    pub address: Option<String>,
    /// The etcd user.
    pub user: Option<String>,
    /// The first key, escaped.
    pub key: String,
    /// The end of the range, escaped; empty for a single key, `\\x00` for the end of the keyspace.
    pub range_end: String,
    /// The range in words: a key, a prefix followed by `*`, or an interval.
    pub range: String,
    /// The number of watches of the range.
    pub watches: u64,
    /// Watches served by a member now.
    pub live: u64,
    /// Events delivered.
    pub events: u64,
    /// Revisions of the cluster that the client may still miss; null where a member serves the watch and the
    /// client has taken its events: the member alone knows the events to come.
    pub behind: Option<i64>,
    /// Bytes held of unfinished revisions of these watches.
    pub held_bytes: u64,
    /// True if the client leaves its messages untaken.
    pub client_is_behind: bool,
}

/// A lease kept alive by a client.
#[derive(Clone, Debug, Serialize)]
pub struct LeaseRow {
    /// Number of the client connection.
    pub client: u64,
    /// The client's address; null on a unix socket.
    pub address: Option<String>,
    /// The etcd user.
    pub user: Option<String>,
    /// The lease, hexadecimal as in etcdctl.
    pub lease: String,
    /// The TTL told by the member with the last renewal, in seconds.
    pub ttl: i64,
    /// Renewals on this stream.
    pub renewals: u64,
    /// Seconds since the last renewal.
    pub renewed_seconds: u64,
}

/// A Lock or Campaign that waits.
#[derive(Clone, Debug, Serialize)]
pub struct LockRow {
    /// Number of the client connection.
    pub client: u64,
    /// The client's address; null on a unix socket.
    pub address: Option<String>,
    /// The etcd user.
    pub user: Option<String>,
    /// `Lock` or `Campaign`.
    pub method: &'static str,
    /// The lock's or election's name, escaped.
    pub name: String,
    /// The lease, hexadecimal; null without a lease.
    pub lease: Option<String>,
    /// Seconds since the call arrived.
    pub waiting_seconds: u64,
}

/// A slow call.
#[derive(Clone, Debug, Serialize)]
pub struct SlowCallRow {
    /// The method's name.
    pub method: &'static str,
    /// The ranges touched, escaped; null if no member answered.
    pub ranges: Option<String>,
    /// Number of the client connection, which may have ended.
    pub client: u64,
    /// The client's address; null on a unix socket, and once the connection has ended.
    pub address: Option<String>,
    /// The etcd user.
    pub user: Option<String>,
    /// The member that answered last, hexadecimal.
    pub member: Option<String>,
    /// Attempts at members.
    pub attempts: u32,
    /// The status code.
    pub code: &'static str,
    /// Seconds since the end of the call.
    pub ended_seconds: u64,
    /// The whole time.
    pub took_micros: u64,
    /// The time before the last attempt: waiting for the message, the credential, a turn, earlier attempts.
    pub before_micros: Option<u64>,
    /// The member's time, network included.
    pub member_micros: Option<u64>,
    /// The time after the member's answer: delivery to the client.
    pub after_micros: Option<u64>,
}

/// A key prefix with many calls, estimated from a sample of the calls.
#[derive(Clone, Debug, Serialize)]
pub struct HotPrefixRow {
    /// The prefix, up to the last slash of the keys, escaped.
    pub prefix: String,
    /// Calls in the time covered, at most; watches and their events do not count.
    pub calls: u64,
    /// Calls in the time covered, at least.
    pub calls_at_least: u64,
    /// Calls per second.
    pub calls_per_second: f64,
    /// The time covered, in seconds: two minutes at most.
    pub seconds: u64,
}

/// A grant that a peer lacks, where the policy only counts denials.
#[derive(Clone, Debug, Serialize)]
pub struct ShadowRow {
    /// The peer: kind of evidence, and name; null for all peers beyond the first 256 of a thread.
    pub peer: Option<String>,
    /// The action, in the words of a policy.
    pub action: &'static str,
    /// The keys, escaped: a key, `PREFIX*` or `[KEY, END)`; `further keys` beyond the bound on rows, and the
    /// path of an unknown method. Null for an action that is not on keys.
    pub keys: Option<String>,
    /// The reason: `no_grant: write`, or the grant that denies.
    pub rule: String,
    /// The method of the last request; empty for an unknown method.
    pub method: &'static str,
    /// Requests that would be refused.
    pub requests: u64,
    /// Seconds since the first one.
    pub since_seconds: u64,
    /// Seconds since the last one.
    pub last_seconds: u64,
    /// The generation of the policy, under which all of these requests were counted.
    pub policy_generation: String,
}

/// A connection that was asked to end.
#[derive(Clone, Debug)]
pub struct KickedClient {
    /// The connection as it was.
    pub client: ClientRow,
    /// Streams and waiting calls that were ended.
    pub streams: u64,
}

/// A key or a part of a key as text: printable ASCII, everything else as `\xNN`.
#[must_use]
pub fn key_text(key: &[u8]) -> String {
    key.escape_ascii().to_string()
}

/// A range in words.
#[must_use]
pub fn range_text(key: &[u8], range_end: &[u8]) -> String {
    let text = key_text;
    match range_end {
        [] => text(key),
        [0] if key.is_empty() || key == [0] => "all keys".into(),
        [0] => format!("[{}, end)", text(key)),
        end if is_prefix_end(key, end) => format!("{}*", text(key)),
        end => format!("[{}, {})", text(key), text(end)),
    }
}

/// True if `[key, end)` holds exactly the keys with the prefix `key`.
fn is_prefix_end(key: &[u8], end: &[u8]) -> bool {
    let last = key.iter().rposition(|byte| *byte < 0xff);
    last.is_some_and(|last| end.len() == last + 1 && end[..last] == key[..last] && end[last] == key[last] + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_told_in_words_that_control_no_terminal() {
        let cases: [(&[u8], &[u8], &str); 7] = [
            (b"/a", b"", "/a"),
            (b"/a/", b"/a0", "/a/*"),
            (b"/a\xff", b"/b", "/a\\xff*"),
            (b"/a", b"/c", "[/a, /c)"),
            (b"/a", b"\0", "[/a, end)"),
            (b"\0", b"\0", "all keys"),
            (b"\x1b[2J\n", b"", "\\x1b[2J\\n"),
        ];
        for (key, end, text) in cases {
            assert_eq!(range_text(key, end), text);
        }
    }

    #[test]
    fn a_client_is_named_by_peer_user_or_address_and_by_no_part_of_them() {
        let row = ClientRow {
            client: 7,
            address: Some("10.0.0.1:4711".into()),
            listener: "clients".into(),
            user: Some("bob".into()),
            peer: Some("file:bob".into()),
            blocked_login: Some("carol".into()),
            user_agent: None,
            age_seconds: 0,
            calls: 0,
            failed: 0,
            open: 0,
            bytes_in: 0,
            bytes_out: 0,
            watches: 0,
            leases: 0,
            unread_bytes: 0,
            last_error: None,
            last_error_by: None,
            last_error_rule: None,
            last_error_seconds: None,
            kicked: false,
        };
        for name in ["bob", "file:bob", "10.0.0.1", "10.0.0.1:4711"] {
            assert!(row.is_named(name), "{name}");
        }
        assert!(!row.is_named("carol") && !row.is_of_blocked_login("carol"), "bob's, who claims to be carol");
        for name in ["", "file", "7", "bo", "10.0.0", "4711", "10.0.0.1:", "clients"] {
            assert!(!row.is_named(name), "{name}");
        }
        let six = ClientRow { address: Some("[::1]:4711".into()), ..row.clone() };
        assert!(six.is_named("::1") && six.is_named("[::1]") && six.is_named("[::1]:4711"));
        let nobody = ClientRow { address: None, user: None, peer: None, ..row };
        assert!(nobody.is_of_blocked_login("carol") && !nobody.is_named("carol"));
        assert!(!nobody.is_of_blocked_login("bob") && !nobody.is_of_blocked_login(""));
        assert!(!nobody.is_named(""), "an unknown name is nobody's");
    }
}
