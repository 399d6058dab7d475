//! The audit records, as the fields of their JSON lines. A test holds the lines to the JSON Schema.
//!
//! Owns: the names and the order of the fields, the text form of keys, and the bounds on a record. Must not
//! know: the chain, the sinks. Invariants: a record has no value, token or password; a key that is no UTF-8
//! text, or has control characters, is written in base64, so that no key is six times as long in a record;
//! keys, ranges and names are cut at fixed bounds, and a cut is visible; no range that was read takes the
//! place of one that was changed.

use std::borrow::Cow;
use std::fmt;
use std::time::{SystemTime, UNIX_EPOCH};

use data_encoding::BASE64;
use serde::{Deserialize, Serialize, Serializer};
use time::OffsetDateTime;

use super::left_out::LeftOutPeer;
use keyward_etcd::rpc::key_range::{KeyRange, RangeEnd, end_of_prefix};
use keyward_telemetry::printable::cut_to;

/// Ranges in one record; further ranges are counted only.
const MOST_RANGES: usize = 64;
/// Bytes of one key in a record. etcd accepts keys up to the size of a request.
pub const LONGEST_KEY: usize = 1024;
/// Bytes of all keys of a record; ranges past the bound are counted only.
const MOST_KEY_BYTES: usize = 16 * 1024;
/// The same for a refused call.
const MOST_REFUSED_KEY_BYTES: usize = 2 * 1024;
/// Bytes of a range beside its keys: the names of the fields.
const FIELDS: usize = 96;
/// Bytes that most records have room in, without a second allocation.
const USUAL_RECORD: usize = 1024;
/// Bytes of a name in a record: peer, user, method, user agent, target.
const LONGEST_NAME: usize = 512;

/// A point in time, written as RFC 3339 in UTC with microseconds.
#[derive(Clone, Copy, Debug)]
pub struct Timestamp(pub SystemTime);

impl Timestamp {
    /// The time now.
    #[must_use]
    pub fn now() -> Self {
        Self(SystemTime::now())
    }

    /// The text form.
    fn text(self) -> [u8; 27] {
        let since = self.0.duration_since(UNIX_EPOCH).unwrap_or_default();
        let seconds = i64::try_from(since.as_secs()).unwrap_or(0);
        let at = OffsetDateTime::from_unix_timestamp(seconds).unwrap_or(OffsetDateTime::UNIX_EPOCH);
        let mut text = *b"0000-00-00T00:00:00.000000Z";
        let mut put = |from: usize, to: usize, mut number: u32| {
            for place in text[from..to].iter_mut().rev() {
                *place = b'0' + u8::try_from(number % 10).unwrap_or(0);
                number /= 10;
            }
        };
        put(0, 4, u32::try_from(at.year()).unwrap_or(0));
        put(5, 7, u8::from(at.month()).into());
        put(8, 10, at.day().into());
        put(11, 13, at.hour().into());
        put(14, 16, at.minute().into());
        put(17, 19, at.second().into());
        put(20, 26, since.subsec_micros());
        text
    }
}

impl fmt::Display for Timestamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(std::str::from_utf8(&self.text()).unwrap_or_default())
    }
}

impl Serialize for Timestamp {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(std::str::from_utf8(&self.text()).unwrap_or_default())
    }
}

/// A range of keys touched by a call, or the keys of a lease.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AuditedRange {
    /// The action, in the words of a policy: `read`, `write`, `watch`, `lock`.
    pub action: Cow<'static, str>,
    /// The first key, if the key is UTF-8 without control characters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// The first key in base64, if the key is another one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key_b64: Option<String>,
    /// The length of the first key in bytes, if the record has its beginning only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key_bytes: Option<usize>,
    /// The end of the range, exclusive, if the end is UTF-8 without control characters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub end: Option<String>,
    /// The end of the range in base64, if the end is another one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub end_b64: Option<String>,
    /// The length of the end in bytes, if the record has its beginning only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub end_bytes: Option<usize>,
    /// True if the range has all keys from the first key on.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub unbounded: bool,
    /// The lease with the keys, in hexadecimal, in place of a range.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keys_of_lease: Option<String>,
}

/// The end of an audited range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AuditedEnd<'a> {
    /// The first key alone.
    Key,
    /// Before this key.
    Before(&'a [u8]),
    /// All keys from the first key on.
    Unbounded,
}

/// A key in a record: its text or its base64, and its length if cut.
type WrittenKey = (Option<String>, Option<String>, Option<usize>);

fn written(key: &[u8]) -> WrittenKey {
    let (shown, length) = match key.get(..LONGEST_KEY) {
        Some(shown) if key.len() > LONGEST_KEY => (shown, Some(key.len())),
        _ => (key, None),
    };
    match std::str::from_utf8(shown) {
        Ok(text) if text.contains(char::is_control) => (None, Some(BASE64.encode(shown)), length),
        Ok(text) => (Some(text.to_owned()), None, length),
        // A cut may lie within a letter.
        Err(cut) if length.is_some() && cut.error_len().is_none() => {
            let (whole, _) = shown.split_at(cut.valid_up_to());
            match std::str::from_utf8(whole) {
                Ok(text) if !text.contains(char::is_control) => (Some(text.to_owned()), None, length),
                _ => (None, Some(BASE64.encode(whole)), length),
            }
        }
        Err(_) => (None, Some(BASE64.encode(shown)), length),
    }
}

impl AuditedRange {
    /// The range from `key` to `end`.
    #[must_use]
    pub fn new(action: &'static str, key: &[u8], end: AuditedEnd<'_>) -> Self {
        let (key, key_b64, key_bytes) = written(key);
        let begun = Self { action: action.into(), key, key_b64, key_bytes, ..Self::default() };
        match end {
            AuditedEnd::Key => begun,
            AuditedEnd::Unbounded => Self { unbounded: true, ..begun },
            AuditedEnd::Before(end) => {
                let (end, end_b64, end_bytes) = written(end);
                Self { end, end_b64, end_bytes, ..begun }
            }
        }
    }

    /// The keys attached to `lease`.
    #[must_use]
    pub fn of_lease(action: &'static str, lease: i64) -> Self {
        Self { action: action.into(), keys_of_lease: Some(lease_text(lease)), ..Self::default() }
    }

    /// Calls `judge` with the range; false without a range of keys. A key cut by the record widens the range:
    /// its end is the end of all keys with the same beginning.
    pub fn judge_keys(&self, judge: impl FnOnce(KeyRange<'_>) -> bool) -> bool {
        let Some(start) = key_bytes(self.key.as_ref(), self.key_b64.as_ref()) else { return false };
        let end = key_bytes(self.end.as_ref(), self.end_b64.as_ref());
        let end = match (end, self.end_bytes, self.key_bytes) {
            _ if self.unbounded => None,
            (Some(end), None, _) => Some(end),
            (Some(end), Some(_), _) => end_of_prefix(&end),
            (None, _, Some(_)) => end_of_prefix(&start),
            (None, _, None) => return judge(KeyRange::key(&start)),
        };
        match end {
            None => judge(KeyRange { start: &start, end: RangeEnd::Unbounded }),
            Some(end) => judge(KeyRange::of(&start, &end)),
        }
    }

    /// The bytes of the range in a record, at least.
    fn weight(&self) -> usize {
        let escaped = |byte: &u8| matches!(byte, b'"' | b'\\');
        let texts = [&self.key, &self.key_b64, &self.end, &self.end_b64].into_iter().flatten();
        texts.map(|text| text.len() + text.bytes().filter(|byte| escaped(byte)).count()).sum::<usize>()
            + FIELDS
    }

    fn is_read(&self) -> bool {
        matches!(&*self.action, "read" | "watch")
    }
}

/// The bytes of a key in a record; `None` without such a key.
fn key_bytes(text: Option<&String>, base64: Option<&String>) -> Option<Vec<u8>> {
    match (text, base64) {
        (Some(text), _) => Some(text.as_bytes().to_vec()),
        (None, Some(base64)) => BASE64.decode(base64.as_bytes()).ok(),
        (None, None) => None,
    }
}

/// A lease in hexadecimal, as etcdctl shows a lease.
#[must_use]
pub fn lease_text(lease: i64) -> String {
    format!("{:x}", lease.cast_unsigned())
}

/// The ranges of a call, within the bounds of a record.
#[derive(Debug, Default)]
pub struct AuditedRanges {
    ranges: Vec<AuditedRange>,
    /// The number of ranges that are changed, at the begin of `ranges`.
    changed: usize,
    actions: Vec<&'static str>,
    bytes: usize,
    omitted: u64,
}

impl AuditedRanges {
    /// Adds a range that is read, or one that is changed: those come first. Past the bounds a range is
    /// counted only; one that is changed takes the places of ranges that are read.
    pub fn add(&mut self, make: impl FnOnce() -> AuditedRange) {
        let is_full = |ranges: &Self| ranges.ranges.len() >= MOST_RANGES || ranges.bytes >= MOST_KEY_BYTES;
        if is_full(self) && self.changed == self.ranges.len() {
            self.omitted += 1;
            return;
        }
        let range = make();
        if range.is_read() {
            if is_full(self) {
                self.omitted += 1;
                return;
            }
            self.bytes += range.weight();
            self.ranges.push(range);
            return;
        }
        while is_full(self) && self.ranges.len() > self.changed {
            self.bytes -= self.ranges.pop().map_or(0, |read| read.weight());
            self.omitted += 1;
        }
        self.bytes += range.weight();
        self.ranges.insert(self.changed, range);
        self.changed += 1;
    }

    /// Leaves the first few: the call changed nothing.
    pub fn shorten(&mut self) {
        while self.ranges.len() > 1 && self.bytes > MOST_REFUSED_KEY_BYTES {
            self.bytes -= self.ranges.pop().map_or(0, |last| last.weight());
            self.omitted += 1;
        }
        self.changed = self.changed.min(self.ranges.len());
    }

    /// Adds the ranges and actions of `other`, within the bounds.
    pub fn append(&mut self, other: Self) {
        self.omitted += other.omitted;
        other.ranges.into_iter().for_each(|range| self.add(|| range));
        other.actions.into_iter().for_each(|action| self.add_action(action));
    }

    /// Adds an action that is not on keys, once.
    pub fn add_action(&mut self, action: &'static str) {
        if !self.actions.contains(&action) {
            self.actions.push(action);
        }
    }

    /// True without ranges.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// The approximate size of the ranges in a record, in bytes.
    #[must_use]
    pub fn weight(&self) -> usize {
        self.bytes
    }
}

/// A key in quotes, with escapes; in base64 if the key is no UTF-8 text; its length if cut.
fn write_key(
    f: &mut fmt::Formatter<'_>,
    text: Option<&String>,
    base64: Option<&String>,
    bytes: Option<usize>,
) -> fmt::Result {
    match (text, base64) {
        (Some(text), _) => write!(f, "{text:?}")?,
        (None, Some(base64)) => write!(f, "base64:{base64}")?,
        (None, None) => {}
    }
    bytes.map_or(Ok(()), |bytes| write!(f, "...({bytes} bytes)"))
}

impl fmt::Display for AuditedRange {
    /// `read "/a"`, `read ["/a", "/b")`, `read ["/a", end)`, `lease 1f`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ", self.action)?;
        if let Some(lease) = &self.keys_of_lease {
            return f.write_str(lease);
        }
        let key = |f: &mut fmt::Formatter<'_>| {
            write_key(f, self.key.as_ref(), self.key_b64.as_ref(), self.key_bytes)
        };
        if self.unbounded {
            f.write_str("[")?;
            key(f)?;
            return f.write_str(", end)");
        }
        if self.end.is_none() && self.end_b64.is_none() {
            return key(f);
        }
        f.write_str("[")?;
        key(f)?;
        f.write_str(", ")?;
        write_key(f, self.end.as_ref(), self.end_b64.as_ref(), self.end_bytes)?;
        f.write_str(")")
    }
}

impl fmt::Display for AuditedRanges {
    /// The ranges, then the further actions, then the number of omitted ranges, separated by `; `.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut separator = "";
        for range in &self.ranges {
            write!(f, "{}{range}", std::mem::replace(&mut separator, "; "))?;
        }
        for action in &self.actions {
            write!(f, "{}{action}", std::mem::replace(&mut separator, "; "))?;
        }
        if self.omitted > 0 {
            write!(f, "{separator}{} more", self.omitted)?;
        }
        Ok(())
    }
}

/// The record of a call, or of a watch.
#[derive(Debug, Serialize)]
pub struct CallAuditRecord<'a> {
    /// The time of the record: the end of the event.
    pub time: Timestamp,
    /// `change`, `read`, `login`, `refusal`, `watch_create`, `watch_end`.
    pub event: &'static str,
    /// The path of the method.
    #[serde(serialize_with = "cut")]
    pub method: &'a str,
    /// The gRPC status code's name.
    pub code: &'static str,
    /// True if Keyward refused the call, and sent nothing upstream.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub refused: bool,
    /// The proved or claimed identity of the client.
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "cut_some")]
    pub peer: Option<&'a str>,
    /// The etcd user of the call.
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "cut_some")]
    pub user: Option<&'a str>,
    /// The client's address.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remote: Option<&'a str>,
    /// The listener of the client's connection.
    pub listener: &'a str,
    /// The touched ranges.
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    pub ranges: &'a [AuditedRange],
    /// The number of further ranges.
    #[serde(skip_serializing_if = "is_zero")]
    pub ranges_omitted: u64,
    /// The actions of the call that are not on keys, in the words of a policy.
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    pub actions: &'a [&'static str],
    /// The lease named by the request, in hexadecimal.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lease: Option<&'a str>,
    /// The store's revision after the call.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub revision: Option<i64>,
    /// The member that answered, in hexadecimal.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub member: Option<&'a str>,
    /// How often the call was sent upstream.
    pub attempts: u32,
    /// The duration in microseconds.
    pub micros: u64,
    /// Bytes of the request message.
    pub received: u64,
    /// Bytes of messages sent to the client.
    pub sent: u64,
    /// The generation of the policy that decided.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub policy_generation: Option<&'a str>,
    /// The policy's verdict: `allowed`, `refused`, or `would_refuse` if denials are only counted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub verdict: Option<&'static str>,
    /// The rule of the policy that decided, or the reason of a denial.
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "cut_some")]
    pub rule: Option<&'a str>,
    /// The limit that refused the call: its scope and its key.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<&'a str>,
    /// The maker of the error at the end: etcd, or Keyward for this reason.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub refused_by: Option<&'static str>,
    /// The client's user agent.
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "cut_some")]
    pub user_agent: Option<&'a str>,
}

impl<'a> CallAuditRecord<'a> {
    /// Puts the ranges and the further actions into the record.
    #[must_use]
    pub fn with_ranges(self, ranges: &'a AuditedRanges) -> Self {
        let AuditedRanges { ranges, actions, omitted, .. } = ranges;
        Self { ranges, ranges_omitted: *omitted, actions, ..self }
    }
}

/// The record of a command on the admin socket, or of a change of the configuration or policy in force.
#[derive(Debug, Serialize)]
pub struct AdminAuditRecord<'a> {
    /// The time of the command's end.
    pub time: Timestamp,
    /// `admin`.
    pub event: &'static str,
    /// The command; `reload` or `policy` for a change.
    pub command: &'static str,
    /// The user, session, generation or grant named by the command.
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "cut_some")]
    pub target: Option<&'a str>,
    /// The operator's reason or comment, or the cause of a change.
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "cut_some")]
    pub reason: Option<&'a str>,
    /// The generation of the policy in force from now on, if the policy changed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub policy_generation: Option<&'a str>,
    /// The mode of the policy before, if it changed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub policy_mode_before: Option<&'static str>,
    /// The mode of the policy from now on, if it changed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub policy_mode: Option<&'static str>,
    /// The result: `done`, `failed`, `not_kept`, `unknown`.
    pub result: &'static str,
    /// The user id of the process that gave the command.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uid: Option<u32>,
    /// The user who became root by sudo, as root's process claims.
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "cut_some")]
    pub sudo_user: Option<&'a str>,
    /// The replica at whose admin socket the command was given, if it is another one.
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "cut_some")]
    pub from_replica: Option<&'a str>,
}

impl AdminAuditRecord<'_> {
    /// A record of now, without further fields.
    #[must_use]
    pub fn new(command: &'static str, result: &'static str) -> Self {
        Self {
            time: Timestamp::now(),
            event: "admin",
            command,
            target: None,
            reason: None,
            policy_generation: None,
            policy_mode_before: None,
            policy_mode: None,
            result,
            uid: None,
            sudo_user: None,
            from_replica: None,
        }
    }
}

/// A record of the log about itself.
#[derive(Debug, Serialize)]
pub struct LogAuditRecord<'a> {
    /// The time of the record.
    pub time: Timestamp,
    /// `start`, `continue`, `removed`, `lost`, `left_out`, `head`, `succession`, `stop`.
    pub event: &'static str,
    /// The version of Keyward, at a start.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub version: Option<&'static str>,
    /// The name of the file before, in the first record of a file.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub previous_file: Option<&'a str>,
    /// True if somebody else than Keyward moved or removed the file before.
    #[serde(rename = "moved", skip_serializing_if = "std::ops::Not::not")]
    pub is_moved: bool,
    /// The name of an old file that was removed, being beyond `audit.keep`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub removed_file: Option<&'a str>,
    /// Records that were lost, or left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub count: Option<u64>,
    /// When the first of the lost records was given up.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub since: Option<Timestamp>,
    /// The peers with most of the records left out.
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    pub peers: &'a [LeftOutPeer<'a>],
    /// The sink that lost records; without a sink, no sink has the records.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sink: Option<&'static str>,
    /// Bytes at the end of the file cut by a crash, moved to a file beside.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub torn_bytes: Option<u64>,
    /// The signature of a head, in base64.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub signature: Option<&'a str>,
}

impl LogAuditRecord<'_> {
    /// A record without further fields.
    #[must_use]
    pub fn new(event: &'static str) -> Self {
        Self {
            time: Timestamp::now(),
            event,
            version: None,
            previous_file: None,
            is_moved: false,
            removed_file: None,
            count: None,
            since: None,
            peers: &[],
            sink: None,
            torn_bytes: None,
            signature: None,
        }
    }
}

/// The JSON object of a record.
#[must_use]
pub fn body(record: &impl Serialize) -> Vec<u8> {
    let mut body = Vec::with_capacity(USUAL_RECORD);
    // A record has text keys only, and a vector takes every byte.
    if serde_json::to_writer(&mut body, record).is_err() {
        body.clear();
        body.extend_from_slice(b"{\"event\":\"unwritable\"}");
    }
    body
}

/// The begin of a name, as far as a record has it.
#[must_use]
pub fn cut_name(name: &str) -> &str {
    cut_to(name, LONGEST_NAME)
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes references")]
fn is_zero(count: &u64) -> bool {
    *count == 0
}

fn cut<S: Serializer>(name: &str, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(cut_name(name))
}

fn cut_some<S: Serializer>(name: &Option<&str>, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(cut_name(name.unwrap_or_default()))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn json(range: &AuditedRange) -> String {
        String::from_utf8(body(range)).unwrap()
    }

    #[test]
    fn what_is_changed_stands_first_and_takes_the_places_of_reads() {
        let range = |action, key: &str| AuditedRange::new(action, key.as_bytes(), AuditedEnd::Key);
        let mut ranges = AuditedRanges::default();
        for number in 0..MOST_RANGES {
            ranges.add(|| range("read", &number.to_string()));
        }
        ranges.add(|| range("write", "hidden"));
        ranges.add(|| range("read", "further"));
        assert_eq!((ranges.ranges.len(), ranges.omitted), (MOST_RANGES, 2));
        assert_eq!(ranges.ranges[0].key.as_deref(), Some("hidden"));
        let mut long = AuditedRanges::default();
        for _ in 0..MOST_RANGES {
            long.add(|| range("read", &"r".repeat(LONGEST_KEY)));
        }
        long.add(|| range("lock", &"w".repeat(LONGEST_KEY)));
        assert_eq!(long.ranges[0].action, "lock");
        assert!(long.bytes <= MOST_KEY_BYTES + LONGEST_KEY + FIELDS, "{}", long.bytes);
        long.shorten();
        assert!(long.bytes <= MOST_REFUSED_KEY_BYTES && long.ranges[0].action == "lock", "{}", long.bytes);
        let omitted = usize::try_from(long.omitted).expect("few");
        assert_eq!(omitted + long.ranges.len(), MOST_RANGES + 1);
    }

    /// No key is much longer in a record than its base64.
    #[test]
    fn a_range_weighs_what_it_has_in_a_record() {
        for byte in 0..=u8::MAX {
            let key = [byte].repeat(LONGEST_KEY);
            let range = AuditedRange::new("read", &key, AuditedEnd::Before(&key));
            let length = body(&range).len();
            assert!(length <= range.weight(), "{byte}: {length} bytes weigh {}", range.weight());
            assert!(length <= 2 * (2 * LONGEST_KEY) + FIELDS, "{byte}: {length} bytes");
        }
    }

    #[test]
    fn a_time_has_microseconds() {
        let at = UNIX_EPOCH + Duration::from_micros(1_700_000_000_000_007);
        assert_eq!(Timestamp(at).to_string(), "2023-11-14T22:13:20.000007Z");
    }

    #[test]
    fn a_key_is_text_or_base64() {
        let one = AuditedRange::new("write", "/ä\"".as_bytes(), AuditedEnd::Key);
        assert_eq!(json(&one), r#"{"action":"write","key":"/ä\""}"#);
        let control = AuditedRange::new("write", b"/a\n", AuditedEnd::Key);
        assert_eq!(json(&control), r#"{"action":"write","key_b64":"L2EK"}"#);
        let bytes = AuditedRange::new("write", b"\xff\0", AuditedEnd::Before(b"\xff\x01"));
        assert_eq!(json(&bytes), r#"{"action":"write","key_b64":"/wA=","end_b64":"/wE="}"#);
        let all = AuditedRange::new("read", b"", AuditedEnd::Unbounded);
        assert_eq!(json(&all), r#"{"action":"read","key":"","unbounded":true}"#);
        assert_eq!(
            json(&AuditedRange::of_lease("write", 0x7a)),
            r#"{"action":"write","keys_of_lease":"7a"}"#
        );
        for range in [one, control, bytes, all] {
            assert_eq!(serde_json::from_str::<AuditedRange>(&json(&range)).unwrap(), range);
        }
    }

    #[test]
    fn a_long_key_is_cut_and_its_length_told() {
        let key = "ä".repeat(LONGEST_KEY);
        let range = AuditedRange::new("read", format!("x{key}").as_bytes(), AuditedEnd::Key);
        assert_eq!(range.key_bytes, Some(2 * LONGEST_KEY + 1));
        assert_eq!(range.key.as_ref().map(String::len), Some(LONGEST_KEY - 1), "a whole letter less");
        let whole = AuditedRange::new("read", &[b'x'; LONGEST_KEY], AuditedEnd::Key);
        assert_eq!((whole.key.map(|key| key.len()), whole.key_bytes), (Some(LONGEST_KEY), None));
        let bytes = AuditedRange::new("read", &[0xff; 4000], AuditedEnd::Key);
        assert_eq!((bytes.key_b64.map(|key| key.len()), bytes.key_bytes), (Some(1368), Some(4000)));
    }

    #[test]
    fn ranges_past_the_bounds_are_counted() {
        let mut many = AuditedRanges::default();
        (0..100).for_each(|_| many.add(|| AuditedRange::new("read", b"k", AuditedEnd::Key)));
        assert_eq!((many.ranges.len(), many.omitted), (64, 36));
        let mut long = AuditedRanges::default();
        (0..64).for_each(|_| long.add(|| AuditedRange::new("read", &[b'k'; 1024], AuditedEnd::Key)));
        assert!(long.weight() < 18 * 1024 && long.omitted > 40, "{long:?}");
    }
}
