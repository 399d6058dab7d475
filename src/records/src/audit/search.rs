//! Searches records: by key, prefix, time, peer and method.
//!
//! Owns: the conditions, and the table of the results. Must not know: where the bytes come from. Invariant: a
//! range that covers the key matches, so that a delete of a range is found by each key in the range; a record
//! that does not name all ranges of its call matches every key.

use std::fmt;

use serde::Deserialize;

use super::record::{AuditedRange, Timestamp};
use keyward_etcd::rpc::key_range::end_of_prefix;
use keyward_etcd::rpc::method::{lookup, methods_named};

/// The conditions of a search. All must hold.
#[derive(Clone, Debug, Default)]
pub struct AuditSearch {
    /// A touched range has this key.
    pub key: Option<Vec<u8>>,
    /// A touched range has a key with this prefix.
    pub prefix: Option<Vec<u8>>,
    /// The record is not older.
    pub since: Option<Timestamp>,
    /// The record is not younger.
    pub until: Option<Timestamp>,
    /// The peer, or the etcd user.
    pub peer: Option<String>,
    /// The etcd user.
    pub user: Option<String>,
    /// The path of the method, or its last part, in any case; or a part of such a name, if it names no
    /// method.
    pub method: Option<String>,
    /// The event.
    pub event: Option<String>,
    /// The code, or the result of a command, in any case.
    pub code: Option<String>,
    /// The verdict of the policy.
    pub verdict: Option<SearchedVerdict>,
    /// The replica that wrote the record.
    pub replica: Option<String>,
}

/// A verdict of the policy, as a condition.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum SearchedVerdict {
    /// A grant allows the call.
    Allowed,
    /// The call was refused.
    Refused,
    /// The call would be refused if the policy were enforced.
    #[value(name = "would_refuse")]
    WouldRefuse,
}

impl SearchedVerdict {
    fn word(self) -> &'static str {
        match self {
            Self::Allowed => "allowed",
            Self::Refused => "refused",
            Self::WouldRefuse => "would_refuse",
        }
    }
}

/// The fields of a record shown by a search.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct FoundRecord {
    time: String,
    event: String,
    method: Option<String>,
    command: Option<String>,
    code: Option<String>,
    result: Option<String>,
    peer: Option<String>,
    user: Option<String>,
    remote: Option<String>,
    uid: Option<u32>,
    target: Option<String>,
    reason: Option<String>,
    policy_mode_before: Option<String>,
    policy_mode: Option<String>,
    revision: Option<i64>,
    lease: Option<String>,
    replica: Option<String>,
    verdict: Option<String>,
    rule: Option<String>,
    limit: Option<String>,
    refused_by: Option<String>,
    ranges: Vec<AuditedRange>,
    ranges_omitted: u64,
    actions: Vec<String>,
    // Of records about the log itself, and of commands.
    count: Option<u64>,
    since: Option<String>,
    sink: Option<String>,
    peers: Vec<FoundPeer>,
    version: Option<String>,
    previous_file: Option<String>,
    removed_file: Option<String>,
    moved: bool,
    torn_bytes: Option<u64>,
    signature: Option<String>,
    policy_generation: Option<String>,
    sudo_user: Option<String>,
    from_replica: Option<String>,
}

/// A peer with calls that have no record of their own.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct FoundPeer {
    peer: String,
    count: u64,
}

impl FoundRecord {
    /// The time, in a text form that compares as the times do.
    #[must_use]
    pub fn time(&self) -> &str {
        &self.time
    }
}

impl AuditSearch {
    /// Reads a line, and returns the record if all conditions hold.
    #[must_use]
    pub fn find(&self, line: &[u8]) -> Option<FoundRecord> {
        let record: FoundRecord = serde_json::from_slice(line).ok()?;
        self.holds(&record).then_some(record)
    }

    fn holds(&self, record: &FoundRecord) -> bool {
        let is = |field: &Option<String>, wanted: &str| field.as_deref() == Some(wanted);
        let method = record.method.as_ref().or(record.command.as_ref());
        let code = record.code.as_ref().or(record.result.as_ref());
        let is_code = |wanted: &String| code.is_some_and(|code| code.eq_ignore_ascii_case(wanted));
        // Times have one length, so that their texts compare as the times do.
        self.since.is_none_or(|since| record.time >= since.to_string())
            && self.until.is_none_or(|until| record.time <= until.to_string())
            && self.peer.as_ref().is_none_or(|peer| is(&record.peer, peer) || is(&record.user, peer))
            && self.user.as_ref().is_none_or(|user| is(&record.user, user))
            && self
                .method
                .as_ref()
                .is_none_or(|wanted| method.is_some_and(|method| is_method(method, wanted)))
            && self.event.as_ref().is_none_or(|event| record.event == *event)
            && self.code.as_ref().is_none_or(is_code)
            && self.verdict.is_none_or(|verdict| is(&record.verdict, verdict.word()))
            && self.replica.as_ref().is_none_or(|replica| is(&record.replica, replica))
            && self.key.as_ref().is_none_or(|key| may_touch(record, |range| has_key(range, key)))
            && self.prefix.as_ref().is_none_or(|prefix| may_touch(record, |range| has_prefix(range, prefix)))
    }
}

/// True if a person who writes `wanted` means the method.
fn is_method(method: &str, wanted: &str) -> bool {
    let named = methods_named(wanted);
    if lookup(method).is_some() && !named.is_empty() {
        return named.iter().any(|row| row.path == method);
    }
    let name = method.rsplit('/').next().unwrap_or_default().to_ascii_lowercase();
    let wanted_name = wanted.to_ascii_lowercase();
    method == wanted || name == wanted_name || (named.is_empty() && name.contains(&wanted_name))
}

/// True if the call touched such a range, or may have: the record does not name all of its ranges.
fn may_touch(record: &FoundRecord, is_wanted: impl Fn(&AuditedRange) -> bool) -> bool {
    record.ranges_omitted > 0 || record.ranges.iter().any(is_wanted)
}

fn has_key(range: &AuditedRange, key: &[u8]) -> bool {
    range.judge_keys(|range| range.contains(key))
}

fn has_prefix(range: &AuditedRange, prefix: &[u8]) -> bool {
    let after = end_of_prefix(prefix);
    range.judge_keys(|range| {
        let begins_before_end = after.as_ref().is_none_or(|after| range.start < &after[..]);
        // The range has the prefix, or begins within the keys of the prefix.
        begins_before_end && (range.start >= prefix || range.compare_end(Some(prefix)).is_gt())
    })
}

fn shown(text: Option<&String>, base64: Option<&String>) -> String {
    match (text, base64) {
        (Some(text), _) => format!("{text:?}"),
        (None, Some(base64)) => format!("base64:{base64}"),
        (None, None) => String::new(),
    }
}

impl fmt::Display for FoundRecord {
    /// One line; keys are quoted and escaped, so that no key can forge a line.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let method = self.method.as_ref().or(self.command.as_ref());
        let method = method.map_or("", |method| method.rsplit('/').next().unwrap_or_default());
        let code = self.code.as_ref().or(self.result.as_ref()).map_or("-", String::as_str);
        write!(f, "{} {:<8} {:<12} {:<18}", self.time, self.event, method, code)?;
        if let Some(peer) = &self.peer {
            write!(f, " {peer:?}")?;
        }
        if let Some(user) = &self.user {
            write!(f, " as {user:?}")?;
        }
        if let Some(uid) = self.uid {
            write!(f, " uid {uid}")?;
        }
        if let Some(user) = &self.sudo_user {
            write!(f, " sudo by {user:?}")?;
        }
        if let Some(replica) = &self.from_replica {
            write!(f, " given at {replica:?}")?;
        }
        if let Some(target) = &self.target {
            write!(f, " target {target:?}")?;
        }
        if let (Some(before), Some(now)) = (&self.policy_mode_before, &self.policy_mode) {
            write!(f, " policy.mode {before} to {now}")?;
        }
        if let Some(reason) = &self.reason {
            write!(f, " reason {reason:?}")?;
        }
        if let Some(refused_by) = &self.refused_by {
            write!(f, " refused by {refused_by}")?;
        }
        if let Some(limit) = &self.limit {
            write!(f, " {limit:?}")?;
        }
        match (self.verdict.as_deref(), &self.rule) {
            (Some("refused"), Some(rule)) => write!(f, " by the rule {rule:?}")?,
            (Some("would_refuse"), Some(rule)) => write!(f, " would be refused by the rule {rule:?}")?,
            _ => {}
        }
        if let Some(generation) = self.policy_generation.as_ref().filter(|_| self.command.is_some()) {
            write!(f, " policy {generation:?}")?;
        }
        if let Some(remote) = &self.remote {
            write!(f, " from {remote}")?;
        }
        if let Some(revision) = self.revision {
            write!(f, " revision {revision}")?;
        }
        if let Some(lease) = &self.lease {
            write!(f, " lease {lease}")?;
        }
        self.actions.iter().try_for_each(|action| write!(f, " action {action}"))?;
        for range in &self.ranges {
            write!(f, " {}", range.action)?;
            if let Some(lease) = &range.keys_of_lease {
                write!(f, " keys of lease {lease}")?;
                continue;
            }
            write!(f, " {}", shown(range.key.as_ref(), range.key_b64.as_ref()))?;
            if range.unbounded {
                write!(f, " and above")?;
            } else if range.end.is_some() || range.end_b64.is_some() {
                write!(f, " to {}", shown(range.end.as_ref(), range.end_b64.as_ref()))?;
            }
        }
        if self.ranges_omitted > 0 {
            write!(f, " and {} more ranges, which may have the key", self.ranges_omitted)?;
        }
        self.fmt_of_log(f)
    }
}

impl FoundRecord {
    /// The content of a record about the log itself.
    fn fmt_of_log(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.count, &self.since) {
            (Some(count), Some(since)) => write!(f, " {count} records since {since}")?,
            (Some(count), None) if self.event == "lost" => write!(f, " {count} records")?,
            (Some(count), None) => write!(f, " {count} calls")?,
            (None, _) => {}
        }
        if let Some(sink) = &self.sink {
            write!(f, " of the sink {sink}")?;
        }
        self.peers.iter().try_for_each(|one| write!(f, " {:?} {}", one.peer, one.count))?;
        if let Some(version) = &self.version {
            write!(f, " keyward {version}")?;
        }
        if let Some(file) = &self.previous_file {
            write!(f, " after {file:?}")?;
        }
        if self.moved {
            write!(f, ", moved by somebody else")?;
        }
        if let Some(file) = &self.removed_file {
            write!(f, " removed {file:?}")?;
        }
        if let Some(bytes) = self.torn_bytes {
            write!(f, " {bytes} bytes of a torn line moved aside")?;
        }
        match (&self.event[..], &self.signature) {
            ("head", Some(_)) => f.write_str(" signed"),
            ("head", None) => f.write_str(" unsigned"),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, UNIX_EPOCH};

    use super::*;
    use crate::audit::record::{AuditedEnd, LONGEST_KEY, body};

    fn by_key(key: &[u8]) -> AuditSearch {
        AuditSearch { key: Some(key.to_vec()), ..AuditSearch::default() }
    }

    fn by_prefix(prefix: &[u8]) -> AuditSearch {
        AuditSearch { prefix: Some(prefix.to_vec()), ..AuditSearch::default() }
    }

    fn line(range: &AuditedRange) -> Vec<u8> {
        let range = String::from_utf8(body(range)).unwrap();
        format!(
            "{{\"time\":\"2026-01-02T00:00:00.000000Z\",\"event\":\"change\",\"peer\":\"password:al\",\
             \"user\":\"al\",\"method\":\"/etcdserverpb.KV/DeleteRange\",\"code\":\"OK\",\"ranges\":[{range}]}}"
        )
        .into_bytes()
    }

    /// A Txn of many reads and one write: the record does not name all.
    #[test]
    fn a_record_that_omits_ranges_may_have_every_key() {
        let mut whole = String::from_utf8(line(&AuditedRange::new("read", b"/a", AuditedEnd::Key))).unwrap();
        assert!(by_key(b"/hidden").find(whole.as_bytes()).is_none());
        whole.insert_str(whole.len() - 1, ",\"ranges_omitted\":1");
        for search in [by_key(b"/hidden"), by_prefix(b"/h")] {
            let found = search.find(whole.as_bytes()).expect("it may have touched the key").to_string();
            assert!(found.ends_with("and 1 more ranges, which may have the key"), "{found}");
        }
    }

    #[test]
    fn a_range_is_found_by_each_of_its_keys() {
        let delete = line(&AuditedRange::new("write", b"/a/", AuditedEnd::Before(b"/a0")));
        for key in [&b"/a/"[..], b"/a/b", b"/a/\xff"] {
            assert!(by_key(key).find(&delete).is_some(), "{key:?}");
        }
        assert!(by_key(b"/a0").find(&delete).is_none() && by_key(b"/a").find(&delete).is_none());
        for prefix in [&b"/a/"[..], b"/a/b/c", b"/", b""] {
            assert!(by_prefix(prefix).find(&delete).is_some(), "{prefix:?}");
        }
        assert!(by_prefix(b"/b").find(&delete).is_none() && by_prefix(b"/a0").find(&delete).is_none());
        let all = line(&AuditedRange::new("write", b"", AuditedEnd::Unbounded));
        assert!(by_key(b"x").find(&all).is_some() && by_prefix(b"\xff").find(&all).is_some());
        let one = line(&AuditedRange::new("write", b"\xff\x01", AuditedEnd::Key));
        assert!(by_key(b"\xff\x01").find(&one).is_some() && by_key(b"\xff\x01\0").find(&one).is_none());
        assert!(by_prefix(b"\xff").find(&one).is_some() && by_prefix(b"\xff\x02").find(&one).is_none());
    }

    #[test]
    fn a_cut_key_is_found_by_its_whole() {
        let long = vec![b'k'; LONGEST_KEY + 10];
        let one = line(&AuditedRange::new("write", &long, AuditedEnd::Key));
        assert!(by_key(&long).find(&one).is_some() && by_key(b"k").find(&one).is_none());
        let range = line(&AuditedRange::new("write", b"a", AuditedEnd::Before(&long)));
        assert!(by_key(&long[..LONGEST_KEY + 9]).find(&range).is_some());
    }

    #[test]
    fn all_conditions_must_hold() {
        let record = line(&AuditedRange::new("write", b"k", AuditedEnd::Key));
        let midnight = UNIX_EPOCH + Duration::from_secs(1_767_312_000);
        let since = |at| AuditSearch { since: Some(Timestamp(at)), ..by_key(b"k") };
        assert!(since(midnight).find(&record).is_some());
        assert!(since(midnight + Duration::from_micros(1)).find(&record).is_none());
        for (peer, method, found) in [
            ("al", "DeleteRange", true),
            ("password:al", "/etcdserverpb.KV/DeleteRange", true),
            ("a", "DeleteRange", false),
            ("al", "Range", false),
            ("al", "deleterange", true),
            ("al", "delete", true),
            ("al", "put", false),
        ] {
            let search = AuditSearch { peer: Some(peer.into()), method: Some(method.into()), ..by_key(b"k") };
            assert_eq!(search.find(&record).is_some(), found, "{peer} {method}");
        }
        for (method, wanted, found) in [
            ("/etcdserverpb.Watch/Watch", "Watch", true),
            ("/etcdserverpb.Watch/Watch", "watc", true),
            ("/grpc.health.v1.Health/Watch", "Watch", false),
            ("/grpc.health.v1.Health/Watch", "/grpc.health.v1.Health/Watch", true),
            ("/other.Watch/Watch", "Watch", true),
            ("kick", "kick", true),
        ] {
            assert_eq!(is_method(method, wanted), found, "{method} {wanted}");
        }
        for (search, found) in [
            (AuditSearch { until: Some(Timestamp(midnight)), ..by_key(b"k") }, true),
            (
                AuditSearch { until: Some(Timestamp(midnight - Duration::from_micros(1))), ..by_key(b"k") },
                false,
            ),
            (AuditSearch { user: Some("al".into()), ..by_key(b"k") }, true),
            (AuditSearch { user: Some("password:al".into()), ..by_key(b"k") }, false),
            (AuditSearch { event: Some("change".into()), ..by_key(b"k") }, true),
            (AuditSearch { event: Some("read".into()), ..by_key(b"k") }, false),
            (AuditSearch { code: Some("ok".into()), ..by_key(b"k") }, true),
            (AuditSearch { code: Some("Unavailable".into()), ..by_key(b"k") }, false),
            (AuditSearch { replica: Some("r1".into()), ..by_key(b"k") }, false),
        ] {
            assert_eq!(search.find(&record).is_some(), found, "{search:?}");
        }
        assert!(AuditSearch::default().find(b"no record").is_none());
        let mut judged = String::from_utf8(record.clone()).unwrap();
        judged.insert_str(
            judged.len() - 1,
            r#","verdict":"would_refuse","rule":"no_grant: write","replica":"r1","refused_by":"limit","limit":"peer calls_per_second""#,
        );
        let by = |verdict| AuditSearch { verdict: Some(verdict), replica: Some("r1".into()), ..by_key(b"k") };
        assert!(by(SearchedVerdict::Refused).find(judged.as_bytes()).is_none());
        let shown = by(SearchedVerdict::WouldRefuse).find(judged.as_bytes()).unwrap().to_string();
        assert!(shown.contains(r#"would be refused by the rule "no_grant: write""#), "{shown}");
        assert!(shown.contains(r#"refused by limit "peer calls_per_second""#), "{shown}");
        let limit = r#""refused_by":"limit","limit":"peer calls_per_second""#;
        let refused = judged.replace("would_refuse", "refused").replace(limit, r#""refused_by":"policy""#);
        let shown = by(SearchedVerdict::Refused).find(refused.as_bytes()).unwrap().to_string();
        assert!(shown.contains(r#" refused by policy by the rule "no_grant: write""#), "{shown}");
        let shown = AuditSearch::default().find(&record).unwrap().to_string();
        assert!(
            shown.contains("DeleteRange") && shown.ends_with("\"password:al\" as \"al\" write \"k\""),
            "{shown}"
        );
    }
    /// The content of each event of the log itself is in its line, not in the JSON alone.
    #[test]
    fn a_line_has_what_the_record_is_about() {
        for (fields, shown) in [
            (
                r#""event":"lost","count":28,"since":"2026-01-01T23:59:00.000000Z""#,
                " 28 records since 2026-01-01T23:59:00.000000Z",
            ),
            (r#""event":"lost","count":3,"sink":"otlp""#, " 3 records of the sink otlp"),
            (
                r#""event":"left_out","count":9,"peers":[{"peer":"file:bob","count":7}]"#,
                r#" 9 calls "file:bob" 7"#,
            ),
            (r#""event":"removed","removed_file":"audit.log.1""#, r#" removed "audit.log.1""#),
            (
                r#""event":"continue","previous_file":"audit.log.2","moved":true"#,
                r#" after "audit.log.2", moved by somebody else"#,
            ),
            (
                r#""event":"start","version":"0.1.0","torn_bytes":12"#,
                " keyward 0.1.0 12 bytes of a torn line moved aside",
            ),
            (r#""event":"head","signature":"AA==""#, " signed"),
            (r#""event":"head""#, " unsigned"),
            (r#""event":"admin","command":"grant","sudo_user":"al""#, r#" sudo by "al""#),
            (r#""event":"admin","command":"policy","policy_generation":"7""#, r#" policy "7""#),
            (r#""event":"change","code":"OK","actions":["auth"]"#, " action auth"),
        ] {
            let line = format!(r#"{{"time":"2026-01-02T00:00:00.000000Z",{fields}}}"#);
            let found = AuditSearch::default().find(line.as_bytes()).expect("a record").to_string();
            assert!(found.trim_end().ends_with(shown), "{found:?} {shown:?}");
        }
    }
}
