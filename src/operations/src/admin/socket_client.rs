//! The client's end of the admin socket: sends commands, and waits for the answers.
//!
//! Owns: the time limits of the client. Must not know: the execution of a command. Invariant: an error means
//! that no command was sent; a command that was sent and not answered has an unknown outcome, and says so.

use std::io::{self, BufRead as _, Read as _, Write as _};
use std::path::Path;
use std::time::Duration;

use super::drain::{Phase, Progress};
use super::socket::{AdminAnswer, AdminCommand};
use super::socket_owner;

/// Maximum length of an answer: a listing has a row per session, some thousands of rows at most.
const LONGEST_ANSWER: u64 = 64 << 20;
/// Time limit for sending a command.
const PATIENCE: Duration = Duration::from_secs(5);
/// Time limit for an answer: a change may wait for etcd.
const ANSWER: Duration = Duration::from_secs(30);

/// Sends a command to the Keyward serving the socket, and waits for the answer. Blocks.
///
/// # Errors
/// The operating system's error: no command was sent.
pub fn send_command(path: &Path, command: &AdminCommand) -> io::Result<AdminAnswer> {
    let mut stream = socket_owner::connect(path)?;
    stream.set_read_timeout(Some(ANSWER))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let mut line = serde_json::to_vec(command)?;
    line.push(b'\n');
    if let Err(error) = stream.write_all(&line) {
        // The server closed the connection, perhaps after sending a reason.
        return read_answer(stream).map_err(|_| error);
    }
    Ok(read_answer(stream)
        .unwrap_or_else(|error| AdminAnswer::Unknown(format!("asked, but not answered: {error}"))))
}

/// Requests a drain from the Keyward serving the socket, and passes each progress report to `tell` until the
/// drain has ended; with `loses_audit_records` also where audit records wait for a disk. Blocks. Returns the
/// last progress: if its phase is not [`Phase::Ended`], the process exited before reporting the end.
///
/// # Errors
/// The operating system's error: no command was sent. `Ok(Err(_))` is an answer without progress.
pub fn drain(
    path: &Path,
    loses_audit_records: bool,
    mut tell: impl FnMut(Progress),
) -> io::Result<Result<Progress, AdminAnswer>> {
    let mut stream = socket_owner::connect(path)?;
    stream.set_read_timeout(Some(ANSWER))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let mut answers = io::BufReader::new(stream.try_clone()?);
    let mut line = serde_json::to_vec(&AdminCommand::Drain { loses_audit_records })?;
    line.push(b'\n');
    let mut last: Option<Progress> = None;
    loop {
        let mut answer = Vec::new();
        let asked = stream.write_all(&line).and_then(|()| answers.read_until(b'\n', &mut answer));
        match (asked, last) {
            (Ok(1..), _) => {}
            (Ok(_) | Err(_), Some(last)) => return Ok(Ok(last)),
            (Ok(_), None) => return Err(io::ErrorKind::UnexpectedEof.into()),
            (Err(error), None) => return Err(error),
        }
        match serde_json::from_slice(&answer)? {
            AdminAnswer::Draining(progress) => {
                tell(progress);
                last = Some(progress);
                if progress.phase == Phase::Ended {
                    return Ok(Ok(progress));
                }
            }
            other => return Ok(Err(other)),
        }
    }
}

fn read_answer(stream: std::os::unix::net::UnixStream) -> io::Result<AdminAnswer> {
    let mut answer = Vec::new();
    io::BufReader::new(stream.take(LONGEST_ANSWER)).read_until(b'\n', &mut answer)?;
    Ok(serde_json::from_slice(&answer)?)
}
