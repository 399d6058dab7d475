//! The last good answer for each name: it serves while name servers fail, and survives a restart.
//!
//! Owns: the answers, their bound, the file. Must not know: how answers are found. Invariants: at most
//! [`MOST_NAMES`] names are kept; the file is replaced whole; a file that is damaged or of another version is
//! put aside by the next write and has no effect.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read as _};
use std::net::IpAddr;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use super::MOST;
use super::name_lookup::{LookupFound, NameQuestion, RecordsFound, ServiceTarget};

/// Names whose answers are kept. A cluster has some nine members.
const MOST_NAMES: usize = 128;
/// Bytes read of the file: far more than the names of a cluster need.
const LARGEST: u64 = 1 << 20;
/// An answer that no name server has confirmed for this time is not believed after a restart.
const BELIEVED_FOR: Duration = Duration::from_secs(7 * 24 * 3600);
/// A confirmed answer is written again after this time, so that the file tells its age.
const CONFIRMED_AGAIN: Duration = Duration::from_secs(3600);
/// TTL of an answer that no name server confirms now: the name is asked for again soon.
const AGAIN: Duration = Duration::from_secs(1);
const VERSION: u32 = 1;

/// The last good answer for a name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct KnownName {
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    v4: Vec<IpAddr>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    v6: Vec<IpAddr>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    services: Vec<ServiceTarget>,
    /// When a name server said so, in seconds of the Unix epoch.
    confirmed_at: u64,
    /// The time in the file.
    #[serde(skip)]
    written_at: u64,
}

/// The file's content.
#[derive(Serialize, Deserialize)]
struct KnownNamesFile {
    version: u32,
    hosts: BTreeMap<String, KnownName>,
    services: BTreeMap<String, KnownName>,
}

/// The answers, and whether there is one that the file does not have.
#[derive(Default)]
pub(super) struct KnownNames {
    names: BTreeMap<NameQuestion, KnownName>,
    has_unwritten: bool,
}

/// The known records of a name: those of the name servers now, completed by their earlier answers.
#[derive(Clone, Debug, Default)]
pub(super) struct KnownAnswer {
    pub(super) addresses: Vec<IpAddr>,
    pub(super) services: Vec<ServiceTarget>,
    pub(super) ttl: Option<Duration>,
    /// True if no record was confirmed by a name server now.
    pub(super) is_old: bool,
    /// When a name server confirmed the answer.
    pub(super) confirmed_at: Option<SystemTime>,
}

impl KnownAnswer {
    pub(super) fn is_empty(&self) -> bool {
        self.addresses.is_empty() && self.services.is_empty()
    }
}

impl KnownNames {
    /// The answers of the file. A missing file has none; a damaged file has none either, and is reported.
    pub(super) fn read(path: &Path, now: SystemTime) -> Self {
        match read_file(path) {
            Ok(file) => {
                let hosts =
                    file.hosts.into_iter().map(|(name, known)| (NameQuestion::Addresses(name), known));
                let services =
                    file.services.into_iter().map(|(name, known)| (NameQuestion::Services(name), known));
                let believed = |known: &KnownName| known.age(now).is_some_and(|age| age <= BELIEVED_FOR);
                let names = hosts.chain(services).filter(|(_, known)| believed(known)).take(MOST_NAMES);
                Self { names: names.collect(), has_unwritten: false }
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => Self::default(),
            Err(error) => {
                tracing::warn!(path = %path.display(), %error, "the last known addresses cannot be used");
                Self::default()
            }
        }
    }

    /// Takes in the answers of a lookup, and returns the known records of the name.
    pub(super) fn take_in(
        &mut self,
        question: &NameQuestion,
        found: &LookupFound,
        now: SystemTime,
    ) -> KnownAnswer {
        if !self.names.contains_key(question) && !found.has_any() {
            return KnownAnswer::default();
        }
        self.make_room(question);
        let known = self.names.entry(question.clone()).or_default();
        let before = known.clone();
        let answer = KnownAnswer {
            addresses: [known.take_family(&found.v4, Family::V4), known.take_family(&found.v6, Family::V6)]
                .concat(),
            services: take_records(&mut known.services, &found.services),
            ttl: if found.has_any() { found.ttl } else { Some(AGAIN) },
            is_old: !found.has_any(),
            confirmed_at: known.confirmed_at(),
        };
        if found.has_any() {
            known.confirmed_at = now.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
            let same = (&before.v4, &before.v6, &before.services) == (&known.v4, &known.v6, &known.services);
            // An unchanged answer costs a write an hour.
            if !same || known.confirmed_at.abs_diff(known.written_at) >= CONFIRMED_AGAIN.as_secs() {
                known.written_at = known.confirmed_at;
                self.has_unwritten = true;
            }
        } else if known.is_empty() {
            self.names.remove(question);
            self.has_unwritten = true;
        }
        answer
    }

    /// The last good answer for a name; empty if there is none.
    pub(super) fn old_answer(&self, question: &NameQuestion) -> KnownAnswer {
        let Some(known) = self.names.get(question) else { return KnownAnswer::default() };
        KnownAnswer {
            addresses: [&known.v4[..], &known.v6[..]].concat(),
            services: known.services.clone(),
            ttl: Some(AGAIN),
            is_old: true,
            confirmed_at: known.confirmed_at(),
        }
    }

    /// True if the file is to be written.
    pub(super) fn has_unwritten(&self) -> bool {
        self.has_unwritten
    }

    /// The content of the file if it is to be written; the file counts as written then.
    pub(super) fn take_unwritten(&mut self) -> Option<Vec<u8>> {
        if !std::mem::take(&mut self.has_unwritten) {
            return None;
        }
        let mut file = KnownNamesFile { version: VERSION, hosts: BTreeMap::new(), services: BTreeMap::new() };
        for (question, known) in &self.names {
            match question {
                NameQuestion::Addresses(name) => file.hosts.insert(name.clone(), known.clone()),
                NameQuestion::Services(name) => file.services.insert(name.clone(), known.clone()),
            };
        }
        serde_json::to_vec(&file).ok()
    }

    /// Forgets the name that was confirmed the longest time ago, if a new one would be too many.
    fn make_room(&mut self, question: &NameQuestion) {
        if self.names.len() < MOST_NAMES || self.names.contains_key(question) {
            return;
        }
        let oldest = self.names.iter().min_by_key(|(_, known)| known.confirmed_at);
        if let Some(oldest) = oldest.map(|(question, _)| question.clone()) {
            self.names.remove(&oldest);
        }
    }
}

#[derive(Clone, Copy)]
enum Family {
    V4,
    V6,
}

impl KnownName {
    fn take_family(&mut self, found: &RecordsFound<IpAddr>, family: Family) -> Vec<IpAddr> {
        match family {
            Family::V4 => take_records(&mut self.v4, found),
            Family::V6 => take_records(&mut self.v6, found),
        }
    }

    fn is_empty(&self) -> bool {
        self.v4.is_empty() && self.v6.is_empty() && self.services.is_empty()
    }

    fn confirmed_at(&self) -> Option<SystemTime> {
        UNIX_EPOCH.checked_add(Duration::from_secs(self.confirmed_at))
    }

    fn age(&self, now: SystemTime) -> Option<Duration> {
        // A clock that was set back makes an answer new, not unusable.
        Some(now.duration_since(self.confirmed_at()?).unwrap_or_default())
    }
}

/// Takes in the answer about one kind of records; while there is none, the records before stay.
fn take_records<T: Clone + Ord>(known: &mut Vec<T>, found: &RecordsFound<T>) -> Vec<T> {
    match found {
        RecordsFound::Records(records) => {
            let mut records = records.clone();
            records.truncate(MOST);
            known.clone_from(&records);
            // Name servers change the order from answer to answer.
            known.sort_unstable();
            return records;
        }
        RecordsFound::NoRecords(_) => known.clear(),
        RecordsFound::NotAsked | RecordsFound::Open | RecordsFound::Failed(_) => {}
    }
    known.clone()
}

fn read_file(path: &Path) -> io::Result<KnownNamesFile> {
    let mut bytes = Vec::new();
    File::open(path)?.take(LARGEST).read_to_end(&mut bytes)?;
    let file: KnownNamesFile = serde_json::from_slice(&bytes)?;
    if file.version == VERSION { Ok(file) } else { Err(io::Error::other("is of another version of Keyward")) }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    fn question(name: &str) -> NameQuestion {
        NameQuestion::Addresses(name.to_owned())
    }

    fn address(last: u8) -> IpAddr {
        Ipv4Addr::new(10, 0, 0, last).into()
    }

    fn found(all: &[u8]) -> LookupFound {
        let records = all.iter().copied().map(address).collect();
        LookupFound { v4: RecordsFound::Records(records), ..LookupFound::default() }
    }

    fn failed() -> LookupFound {
        LookupFound { v4: RecordsFound::Failed("silence".to_owned()), ..LookupFound::default() }
    }

    fn written(names: &mut KnownNames) -> Vec<u8> {
        names.take_unwritten().expect("something new")
    }

    #[test]
    fn a_failure_leaves_what_is_known_and_a_server_s_word_does_not() {
        let (mut names, now) = (KnownNames::default(), SystemTime::now());
        assert!(names.take_in(&question("a"), &failed(), now).is_empty());
        assert!(!names.has_unwritten());
        let answer = names.take_in(&question("a"), &found(&[2, 1]), now);
        assert_eq!((answer.addresses, answer.is_old), (vec![address(2), address(1)], false));
        let answer = names.take_in(&question("a"), &failed(), now);
        assert_eq!((answer.addresses, answer.is_old), (vec![address(1), address(2)], true));
        let gone =
            LookupFound { v4: RecordsFound::NoRecords("unknown".to_owned()), ..LookupFound::default() };
        assert!(names.take_in(&question("a"), &gone, now).is_empty());
        assert!(names.old_answer(&question("a")).is_empty());
    }

    #[test]
    fn an_unchanged_answer_is_written_once_an_hour_in_whatever_order_it_comes() {
        let (mut names, now) = (KnownNames::default(), SystemTime::now());
        let after = |seconds| now + Duration::from_secs(seconds);
        names.take_in(&question("a"), &found(&[1, 2]), now);
        written(&mut names);
        names.take_in(&question("a"), &found(&[2, 1]), after(3500));
        assert!(!names.has_unwritten());
        names.take_in(&question("a"), &found(&[2, 1]), after(3601));
        assert!(names.has_unwritten());
        written(&mut names);
        names.take_in(&question("a"), &found(&[1]), after(3602));
        assert!(names.has_unwritten());
    }

    #[test]
    fn the_file_is_read_whole_or_not_at_all_and_old_answers_are_left_out() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("names.json");
        let (mut names, now) = (KnownNames::default(), SystemTime::now());
        assert!(KnownNames::read(&path, now).names.is_empty(), "not there yet");
        names.take_in(&question("a"), &found(&[1]), now);
        let target = ServiceTarget { priority: 0, weight: 1, port: 2379, host: "a.".to_owned() };
        let services = RecordsFound::Records(vec![target.clone()]);
        let record = NameQuestion::Services("_etcd-client._tcp.a".to_owned());
        names.take_in(&record, &LookupFound { services, ..LookupFound::default() }, now);
        let content = written(&mut names);
        std::fs::write(&path, &content).unwrap();
        let read = KnownNames::read(&path, now);
        assert_eq!(read.old_answer(&question("a")).addresses, [address(1)]);
        assert_eq!(read.old_answer(&record).services, [target]);
        let later = now + BELIEVED_FOR + Duration::from_secs(2);
        assert!(KnownNames::read(&path, later).names.is_empty(), "nobody confirmed it for a week");
        for end in 0..content.len() {
            std::fs::write(&path, &content[..end]).unwrap();
            assert!(KnownNames::read(&path, now).names.is_empty(), "cut at {end}");
        }
        for foreign in [&br#"{"version":2,"hosts":{},"services":{}}"#[..], b"[]", b"\xff"] {
            std::fs::write(&path, foreign).unwrap();
            assert!(KnownNames::read(&path, now).names.is_empty());
        }
    }

    #[test]
    fn a_bounded_number_of_names_is_kept_the_latest_ones() {
        let (mut names, now) = (KnownNames::default(), SystemTime::now());
        for number in 0..=MOST_NAMES {
            let at = now + Duration::from_secs(number as u64);
            names.take_in(&question(&number.to_string()), &found(&[1]), at);
        }
        assert_eq!(names.names.len(), MOST_NAMES);
        assert!(names.old_answer(&question("0")).is_empty());
        assert!(!names.old_answer(&question(&MOST_NAMES.to_string())).is_empty());
    }
}
