//! A `watchers` program of a client library: started with its watches, its lines read as they come.
//!
//! Owns: the process, its spec file, the contract of its lines (tests/clients/README.md). Must not know what is right. Invariant:
//! a line that the contract does not know is kept as strange, never passed over.

use std::cell::{RefCell, RefMut};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use rustix::process::Signal;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::families::{Family, User};
use super::record::{Event, Line, Record, Seen, Watch, number};
use crate::harness::process::Process;
use crate::harness::{password, wait};

/// For a program that was asked to end.
const SOON: Duration = Duration::from_secs(30);

/// How Keyward is reached.
#[derive(Clone)]
pub(crate) struct Through {
    pub(crate) plain: SocketAddr,
    pub(crate) tls: SocketAddr,
    pub(crate) ca: PathBuf,
}

/// A running program.
pub(crate) struct Program {
    pub(crate) family: &'static Family,
    pub(crate) user: User,
    pub(crate) watches: Vec<Watch>,
    process: Process,
    tail: RefCell<Tail>,
    _folder: TempDir,
}

/// Its output, as far as it was read.
struct Tail {
    path: PathBuf,
    read: u64,
    partial: Vec<u8>,
    said: Said,
    /// It was asked to end.
    ending: bool,
}

/// What the lines said.
#[derive(Debug, Default)]
pub(crate) struct Said {
    pub(crate) client: String,
    began: i64,
    pub(crate) ready: bool,
    pub(crate) records: BTreeMap<String, Record>,
    /// Errors that the application saw, and lines that nobody understands.
    pub(crate) strange: Vec<String>,
}

impl Program {
    pub(crate) fn start(
        family: &'static Family,
        user: User,
        through: &Through,
        watches: Vec<Watch>,
    ) -> Program {
        let folder = tempfile::Builder::new().prefix("watchers-").tempdir().expect("a temporary folder");
        let file = |name: &str| folder.path().join(name);
        std::fs::write(file("password"), password(user.name())).expect("a file can be written");
        let spec = json!({ "watches": watches.iter().map(Watch::spec).collect::<Vec<_>>() });
        std::fs::write(file("spec.json"), spec.to_string()).expect("a file can be written");
        let (secret, spec) =
            (file("password").display().to_string(), file("spec.json").display().to_string());
        let address = if family.tls { through.tls } else { through.plain }.to_string();
        let ca = through.ca.display().to_string();
        let mut args = vec!["watchers", "--endpoints", &address, "--user", user.name()];
        args.extend(["--password-file", &secret, "--spec", &spec]);
        if family.tls {
            args.extend(["--cacert", &ca]);
        }
        let path = file("record");
        let process = Process::start(family.name, &family.program(), args, &[], &path);
        let records = watches.iter().map(|watch| {
            let opened = Line { at: 0, seen: Seen::Opened { start: watch.start } };
            (watch.name.clone(), vec![opened])
        });
        let said = Said { records: records.collect(), ..Said::default() };
        let tail = Tail { path, read: 0, partial: Vec::new(), said, ending: false };
        Program { family, user, watches, process, tail: RefCell::new(tail), _folder: folder }
    }

    /// Reads on, and shows everything that it said so far. Panics where it said that it could not go on.
    pub(crate) fn said(&self) -> RefMut<'_, Said> {
        let mut tail = self.tail.borrow_mut();
        // Before the reading: what a program says last must not be missed.
        let exit = self.process.exit();
        tail.read_on(self.family.name);
        if let (Some(exit), false) = (exit, tail.ending) {
            panic!(
                "{} as {} ended by itself: {exit}: {}",
                self.family.name,
                self.user.name(),
                self.process.tail()
            );
        }
        RefMut::map(tail, |tail| &mut tail.said)
    }

    /// Asks it to end, and waits for that.
    pub(crate) async fn end(self) -> Said {
        self.tail.borrow_mut().ending = true;
        self.process.signal(Signal::TERM);
        let exit = wait::within_limit(SOON, async || self.process.exit()).await;
        if !exit.is_some_and(|exit| exit.success()) {
            self.said()
                .strange
                .push(format!("asked to end, it ended with {exit:?}: {}", self.process.tail()));
        }
        drop(self.said());
        self.tail.into_inner().said
    }
}

impl Tail {
    fn read_on(&mut self, family: &str) {
        let mut file = File::open(&self.path).expect("the record is there");
        file.seek(SeekFrom::Start(self.read)).expect("a file can be sought");
        let from = self.partial.len();
        file.read_to_end(&mut self.partial).expect("the record can be read");
        self.read += (self.partial.len() - from) as u64;
        let whole = self.partial.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
        for line in self.partial[..whole].split(|byte| *byte == b'\n').filter(|line| line.starts_with(b"{")) {
            match serde_json::from_slice::<Value>(line) {
                Ok(line) if line["kind"] == "fatal" => panic!("{family}: {line}"),
                Ok(line) => self.said.take(&line),
                Err(error) => self.said.strange.push(format!("{error}: {}", String::from_utf8_lossy(line))),
            }
        }
        self.partial.drain(..whole);
    }
}

impl Said {
    fn take(&mut self, line: &Value) {
        let text = |field: &str| line[field].as_str().unwrap_or_default().to_owned();
        let at = self.began + line["t"].as_i64().unwrap_or_default();
        let revision = number(&line["revision"]);
        let seen = match line["kind"].as_str().unwrap_or_default() {
            "start" => {
                self.client = text("client");
                self.began = number(&line["unix_ms"]).unwrap_or_default();
                return;
            }
            "ready" => return self.ready = true,
            // What Go's program tells below its library is none of the application's.
            "end" | "wire" | "stream_ended" | "attempt_failed" => return,
            "created" => Some(Seen::Created { revision }),
            "progress" => revision.map(|revision| Seen::Progress { revision }),
            "compacted" => Some(Seen::Compacted { revision: number(&line["compact_revision"]) }),
            "listed" => revision.map(|revision| Seen::Opened { start: revision + 1 }),
            "ended" => Some(Seen::Ended { code: text("code"), message: text("message") }),
            "response" => line["events"]
                .as_array()
                .and_then(|rows| rows.iter().map(Event::row).collect())
                .map(|events| Seen::Events { header: revision, events }),
            _ => None,
        };
        match (seen, self.records.get_mut(line["watch"].as_str().unwrap_or_default())) {
            (Some(seen), Some(record)) => note(record, at, seen),
            _ => self.strange.push(line.to_string()),
        }
    }
}

/// Notes what a watch showed and, after an end, that its application opens it again, as every application of this test does: at
/// the compacted revision where it is told, otherwise after the last event, or from where it was opened.
pub(crate) fn note(record: &mut Record, at: i64, seen: Seen) {
    let again = match &seen {
        Seen::Compacted { revision } => *revision,
        Seen::Ended { .. } => Some(next_event(record)),
        _ => None,
    };
    record.push(Line { at, seen });
    record.extend(again.map(|start| Line { at, seen: Seen::Opened { start } }));
}

/// Where the application of a watch expects it to begin anew.
fn next_event(record: &Record) -> i64 {
    let next = record.iter().rev().find_map(|line| match &line.seen {
        Seen::Opened { start } => Some(*start),
        Seen::Events { events, .. } => events.last().map(|event| event.revision + 1),
        _ => None,
    });
    next.unwrap_or_default()
}

/// The revision of the last event.
pub(crate) fn last_event(record: &Record) -> Option<i64> {
    record.iter().rev().find_map(|line| match &line.seen {
        Seen::Events { events, .. } => events.last().map(|event| event.revision),
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(lines: &[&str]) -> Said {
        let mut said = Said::default();
        said.records.insert("w0".into(), Vec::new());
        lines.iter().for_each(|line| said.take(&serde_json::from_str(line).unwrap()));
        said
    }

    #[test]
    fn the_contract_is_understood() {
        let said = said(&[
            r#"{"t":0,"kind":"start","client":"c 1","unix_ms":1000}"#,
            r#"{"t":1,"kind":"created","watch":"w0"}"#,
            r#"{"t":2,"kind":"ready"}"#,
            r#"{"t":3,"kind":"response","watch":"w0","revision":5,"events":[["delete","k","",5,0,0,0,null]]}"#,
            r#"{"t":4,"kind":"progress","watch":"w0","revision":"6"}"#,
            r#"{"t":5,"kind":"ended","watch":"w0","code":"c","message":"m"}"#,
            r#"{"t":6,"kind":"ended","watch":"w0","code":"c","message":"m"}"#,
            r#"{"t":7,"kind":"compacted","watch":"w0","compact_revision":9}"#,
            r#"{"t":8,"kind":"compacted","watch":"w0"}"#,
            r#"{"t":9,"kind":"listed","watch":"w0","revision":20}"#,
        ]);
        let record = &said.records["w0"];
        let ended = Seen::Ended { code: "c".into(), message: "m".into() };
        let events = vec![Event::row(&json!(["delete", "k", "", 5, 0, 0, 0, null])).unwrap()];
        let expected = [
            Seen::Created { revision: None },
            Seen::Events { header: Some(5), events },
            Seen::Progress { revision: 6 },
            ended.clone(),
            Seen::Opened { start: 6 },
            ended,
            Seen::Opened { start: 6 },
            Seen::Compacted { revision: Some(9) },
            Seen::Opened { start: 9 },
            Seen::Compacted { revision: None },
            Seen::Opened { start: 21 },
        ];
        let shown: Vec<Seen> = record.iter().map(|line| line.seen.clone()).collect();
        assert_eq!(shown, expected);
        assert_eq!(
            (record[0].at, said.ready, said.client.as_str(), said.strange.len()),
            (1001, true, "c 1", 0)
        );
    }

    #[test]
    fn what_is_not_understood_is_kept() {
        let strange = [
            r#"{"kind":"error","op":"x","code":"c","message":"m"}"#,
            r#"{"kind":"unsupported","watch":"w0","why":"x"}"#,
            r#"{"kind":"created","watch":"w7"}"#,
            r#"{"kind":"progress","watch":"w0"}"#,
            r#"{"kind":"response","watch":"w0","events":[["put"]]}"#,
        ];
        let said = said(&strange);
        assert_eq!((said.strange.len(), said.records["w0"].len()), (strange.len(), 0));
    }
}
