//! The programs of `tests/clients/protojson`, one for each version of etcd's types.
//!
//! Owns: building and asking them. Must not know: what an answer means.

use std::io::{BufRead as _, BufReader, BufWriter, Write as _};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};

/// A record: its kind, the message's full name, the text, and the message.
pub(crate) type Record = (&'static str, &'static str, Vec<u8>, Vec<u8>);

/// A running program.
pub(crate) struct GoJson {
    pub(crate) version: String,
    child: Child,
    answers: BufReader<ChildStdout>,
}

/// The versions that can be built, oldest first.
pub(crate) fn versions() -> Vec<String> {
    run(script().arg("--list")).lines().map(str::to_owned).collect()
}

fn script() -> Command {
    Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/clients/protojson/build"))
}

fn run(command: &mut Command) -> String {
    let done = command.stderr(Stdio::inherit()).output().expect("the program runs");
    assert!(done.status.success(), "{command:?} failed; its reason is above");
    String::from_utf8(done.stdout).expect("text")
}

impl GoJson {
    pub(crate) fn start(version: &str) -> Self {
        let mut command = Command::new(run(script().arg(version)).trim());
        let spawned = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let mut child = spawned.expect("the program starts");
        let answers = BufReader::new(child.stdout.take().expect("piped"));
        Self { version: version.to_owned(), child, answers }
    }

    /// The answers to the records, in their order: one line each.
    pub(crate) fn ask(&mut self, records: &[Record]) -> Vec<String> {
        let mut input = BufWriter::new(self.child.stdin.as_mut().expect("piped"));
        let answers = &mut self.answers;
        std::thread::scope(|threads| {
            // The program answers while it reads: pipes are small.
            let written = threads.spawn(move || {
                for (kind, message, text, body) in records {
                    for part in [kind.as_bytes(), message.as_bytes(), text, body] {
                        let length = u32::try_from(part.len()).expect("a small part");
                        input.write_all(&length.to_be_bytes())?;
                        input.write_all(part)?;
                    }
                }
                input.flush()
            });
            let lines = records.iter().map(|(_, message, text, _)| {
                let mut line = String::new();
                let length = answers.read_line(&mut line).expect("text");
                assert!(length > 0, "the program ended at or after {message} {}", text.escape_ascii());
                line.truncate(line.trim_end_matches('\n').len());
                line
            });
            let lines = lines.collect();
            written.join().expect("no panic").expect("the program reads");
            lines
        })
    }
}

impl Drop for GoJson {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        drop(self.child.wait());
    }
}
