//! The programs of `tests/clients/touches`, one for each version of etcd's types.
//!
//! Owns: building and asking them. Must not know: what an answer means.

use std::io::{BufRead as _, BufReader, BufWriter, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};

use keyward::rpc::method::Method;

/// A request: its method and its body.
pub(crate) type Request = (&'static Method, Vec<u8>);

/// A running program.
pub(crate) struct EtcdTypes {
    pub(crate) version: String,
    child: Child,
    answers: BufReader<ChildStdout>,
}

/// The versions that can be built, oldest first.
pub(crate) fn versions() -> Vec<String> {
    run(script().arg("--list")).lines().map(str::to_owned).collect()
}

/// What `touches schema` of that version writes.
pub(crate) fn schema(version: &str) -> String {
    run(Command::new(program(version)).arg("schema"))
}

fn script() -> Command {
    Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/clients/touches/build"))
}

/// The path of the program, which `tests/run` has built before.
fn program(version: &str) -> PathBuf {
    run(script().arg(version)).trim().into()
}

fn run(command: &mut Command) -> String {
    let done = command.stderr(Stdio::inherit()).output().expect("the program runs");
    assert!(done.status.success(), "{command:?} failed; its reason is above");
    String::from_utf8(done.stdout).expect("text")
}

impl EtcdTypes {
    pub(crate) fn start(version: &str) -> Self {
        let mut command = Command::new(program(version));
        let spawned = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let mut child = spawned.expect("the program starts");
        let answers = BufReader::new(child.stdout.take().expect("piped"));
        Self { version: version.to_owned(), child, answers }
    }

    /// The answers to the requests, in their order: one line each.
    pub(crate) fn ask(&mut self, requests: &[Request]) -> Vec<String> {
        let mut input = BufWriter::new(self.child.stdin.as_mut().expect("piped"));
        let answers = &mut self.answers;
        std::thread::scope(|threads| {
            // The program answers while it reads: pipes are small.
            let written = threads.spawn(move || {
                for (method, body) in requests {
                    let path = u16::try_from(method.path.len()).expect("a short path");
                    let length = u32::try_from(body.len()).expect("a small body");
                    input.write_all(&path.to_be_bytes())?;
                    input.write_all(method.path.as_bytes())?;
                    input.write_all(&length.to_be_bytes())?;
                    input.write_all(body)?;
                }
                input.flush()
            });
            let lines = requests.iter().map(|(method, body)| {
                let mut line = String::new();
                let length = answers.read_line(&mut line).expect("text");
                assert!(length > 0, "the program ended at or after {} {body:02x?}", method.path);
                line.truncate(line.trim_end_matches('\n').len());
                line
            });
            let lines = lines.collect();
            written.join().expect("no panic").expect("the program reads");
            lines
        })
    }
}

impl Drop for EtcdTypes {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        drop(self.child.wait());
    }
}
