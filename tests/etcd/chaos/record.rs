//! What a watch asked for and what its application saw, in the form in which it is judged.
//!
//! Owns: the words of spec and record, whether they come from JSON lines or from a gRPC stream. Must not know what is right.
//! Invariant: a long value is kept as its length and a hash, the same way everywhere.

use std::hash::{DefaultHasher, Hash, Hasher};

use keyward::pb::etcdserverpb::WatchCreateRequest;
use keyward::pb::mvccpb;
use serde_json::{Value, json};

/// Longer values are kept by length and hash.
const KEPT: usize = 128;
/// `range_end` of "everything from the key on".
pub(crate) const TAIL: &str = "\0";
const NOPUT: i32 = 0;
const NODELETE: i32 = 1;

/// A range as etcd's requests have it: `end` is empty for one key, [`TAIL`] for everything from `key` on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Range {
    pub(crate) key: String,
    pub(crate) end: String,
}

/// What a watch leaves out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Filter {
    NoPut,
    NoDelete,
}

/// One watch as its application asks for it.
#[derive(Clone, Debug)]
pub(crate) struct Watch {
    pub(crate) name: String,
    pub(crate) range: Range,
    /// 0 is "from now".
    pub(crate) start: i64,
    pub(crate) prev_kv: bool,
    pub(crate) progress_notify: bool,
    pub(crate) fragment: bool,
    pub(crate) filter: Option<Filter>,
}

/// One event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Event {
    pub(crate) put: bool,
    pub(crate) key: String,
    pub(crate) value: String,
    pub(crate) revision: i64,
    pub(crate) create: i64,
    pub(crate) version: i64,
    pub(crate) lease: i64,
    pub(crate) prev: Option<Prev>,
}

/// What a key was before an event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Prev {
    pub(crate) value: String,
    pub(crate) revision: i64,
    pub(crate) create: i64,
    pub(crate) version: i64,
}

/// One thing that the application of a watch saw or did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Seen {
    /// It opened the watch: at first, or again after an end.
    Opened {
        start: i64,
    },
    /// The watch stands. The header's revision, where the library shows it.
    Created {
        revision: Option<i64>,
    },
    Events {
        header: Option<i64>,
        events: Vec<Event>,
    },
    Progress {
        revision: i64,
    },
    /// Etcd's compact revision, where the library shows it.
    Compacted {
        revision: Option<i64>,
    },
    Ended {
        code: String,
        message: String,
    },
}

/// The same with its time, in milliseconds of the system's clock.
#[derive(Clone, Debug)]
pub(crate) struct Line {
    pub(crate) at: i64,
    pub(crate) seen: Seen,
}

/// Everything that one watch showed, in order.
pub(crate) type Record = Vec<Line>;

impl Range {
    pub(crate) fn one(key: &str) -> Range {
        Range { key: key.into(), end: String::new() }
    }

    pub(crate) fn prefix(prefix: &str) -> Range {
        let mut end = prefix.as_bytes().to_vec();
        *end.last_mut().expect("a prefix is not empty") += 1;
        Range { key: prefix.into(), end: String::from_utf8(end).expect("ASCII") }
    }

    pub(crate) fn tail(key: &str) -> Range {
        Range { key: key.into(), end: TAIL.into() }
    }

    pub(crate) fn contains(&self, key: &str) -> bool {
        match self.end.as_str() {
            "" => key == self.key,
            TAIL => key >= self.key.as_str(),
            end => key >= self.key.as_str() && key < end,
        }
    }
}

impl Watch {
    /// Whether the watch is to show this event.
    pub(crate) fn wants(&self, event: &Event) -> bool {
        let filtered = match self.filter {
            None => false,
            Some(Filter::NoPut) => event.put,
            Some(Filter::NoDelete) => !event.put,
        };
        !filtered && self.range.contains(&event.key)
    }

    /// Its entry in a spec file.
    pub(crate) fn spec(&self) -> Value {
        let filters = match self.filter {
            None => vec![],
            Some(Filter::NoPut) => vec!["noput"],
            Some(Filter::NoDelete) => vec!["nodelete"],
        };
        json!({
            "name": self.name, "key": self.range.key, "range_end": self.range.end, "start_revision": self.start,
            "prev_kv": self.prev_kv, "progress_notify": self.progress_notify, "fragment": self.fragment,
            "filters": filters,
        })
    }

    /// The same as a request, from another revision on.
    pub(crate) fn request(&self, watch_id: i64, start: i64) -> WatchCreateRequest {
        let filters = match self.filter {
            None => vec![],
            Some(Filter::NoPut) => vec![NOPUT],
            Some(Filter::NoDelete) => vec![NODELETE],
        };
        WatchCreateRequest {
            key: self.range.key.clone().into(),
            range_end: self.range.end.clone().into(),
            start_revision: start,
            progress_notify: self.progress_notify,
            filters,
            prev_kv: self.prev_kv,
            watch_id,
            fragment: self.fragment,
        }
    }
}

impl Event {
    /// As it stands in a WatchResponse.
    pub(crate) fn of(event: &mvccpb::Event) -> Event {
        let kv = event.kv.clone().unwrap_or_default();
        let prev = event.prev_kv.as_ref().map(|prev| Prev {
            value: text(&prev.value),
            revision: prev.mod_revision,
            create: prev.create_revision,
            version: prev.version,
        });
        Event {
            put: event.r#type() == mvccpb::event::EventType::Put,
            key: text(&kv.key),
            value: text(&kv.value),
            revision: kv.mod_revision,
            create: kv.create_revision,
            version: kv.version,
            lease: kv.lease,
            prev,
        }
    }

    /// A row of a `response` line; `None` where it is none.
    pub(crate) fn row(row: &Value) -> Option<Event> {
        let row = row.as_array()?;
        let word = |i: usize| row.get(i)?.as_str();
        let previous = row.get(7)?;
        let prev = if previous.is_null() {
            None
        } else {
            Some(Prev {
                value: text(previous.get(0)?.as_str()?.as_bytes()),
                revision: number(previous.get(1)?)?,
                create: number(previous.get(2)?)?,
                version: number(previous.get(3)?)?,
            })
        };
        let put = match word(0)? {
            "put" => true,
            "delete" => false,
            _ => return None,
        };
        Some(Event {
            put,
            key: text(word(1)?.as_bytes()),
            value: text(word(2)?.as_bytes()),
            revision: number(row.get(3)?)?,
            create: number(row.get(4)?)?,
            version: number(row.get(5)?)?,
            lease: number(row.get(6)?)?,
            prev,
        })
    }
}

/// A record in short, for a person to read.
pub(crate) fn story(record: &Record) -> String {
    let parts = record.iter().map(|Line { at, seen }| {
        let what = match seen {
            Seen::Opened { start } => format!("opened at {start}"),
            Seen::Created { revision } => format!("created {revision:?}"),
            Seen::Events { header, events } => {
                let revisions: Vec<i64> = events.iter().map(|event| event.revision).collect();
                format!("events {revisions:?} header {header:?}")
            }
            Seen::Progress { revision } => format!("progress {revision}"),
            Seen::Compacted { revision } => format!("compacted {revision:?}"),
            Seen::Ended { code, message } => format!("ended {code} {message}"),
        };
        format!("{at} {what}")
    });
    parts.collect::<Vec<_>>().join("; ")
}

/// A whole number, or the text of one: languages without 64-bit integers write that.
pub(crate) fn number(value: &Value) -> Option<i64> {
    value.as_i64().or_else(|| value.as_str()?.parse().ok())
}

/// A key or value as it is kept.
pub(crate) fn text(bytes: &[u8]) -> String {
    if bytes.len() <= KEPT {
        return String::from_utf8_lossy(bytes).into_owned();
    }
    let mut hasher = DefaultHasher::new();
    bytes.hash(&mut hasher);
    format!("{} bytes {:016x}", bytes.len(), hasher.finish())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_contain_what_etcd_says() {
        assert!(Range::one("/a").contains("/a") && !Range::one("/a").contains("/ab"));
        let prefix = Range::prefix("/a/");
        assert!(prefix.contains("/a/") && prefix.contains("/a/z") && !prefix.contains("/a0"));
        assert!(
            !prefix.contains("/Z") && Range::tail("/b").contains("/z") && !Range::tail("/b").contains("/a")
        );
    }

    #[test]
    fn a_row_and_a_message_are_read_alike() {
        let long = "x".repeat(300);
        let kv = |value: &str| mvccpb::KeyValue {
            key: "k".into(),
            value: value.to_owned().into(),
            mod_revision: 7,
            create_revision: 3,
            version: 2,
            lease: 1 << 60,
        };
        let message = mvccpb::Event { r#type: 0, kv: Some(kv(&long)), prev_kv: Some(kv("old")) };
        let row = json!(["put", "k", long, 7, "3", 2, (1_i64 << 60).to_string(), ["old", 7, 3, 2]]);
        assert_eq!(Event::row(&row), Some(Event::of(&message)));
        assert!(Event::of(&message).value.starts_with("300 bytes "));
        assert_eq!(Event::row(&json!(["put", "k", "v", 7, 3, 2, 0])), None, "no PREV");
        assert_eq!(Event::row(&json!(["sung", "k", "v", 7, 3, 2, 0, null])), None);
    }
}
