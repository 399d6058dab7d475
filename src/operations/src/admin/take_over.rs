//! The client's end of a hand-over: a starting process gets the listening sockets of the process that serves.
//!
//! Owns: the order of the two commands. Must not know: the listeners. Invariants: until the second command
//! both processes accept at the same sockets, and the serving process serves as before, so a start that fails
//! changes nothing; the second command is sent once.

use std::io::{self, ErrorKind, Write as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use super::socket::{AdminAnswer, AdminCommand};
use super::socket_owner;
use keyward_base::io::listening_sockets::NamedSocket;
use keyward_base::io::socket_passing;

/// Time limit of an answer.
const ANSWER: Duration = Duration::from_secs(5);
/// Bytes of an answer at most.
const LONGEST_ANSWER: usize = 64 * 1024;

/// A hand-over between its two commands.
#[derive(Debug)]
pub struct TakeOver(UnixStream);

/// Gets the listening sockets of the process at the admin socket `path`; `None` if no process serves there.
///
/// # Errors
/// The process refuses, or does not answer in time.
pub fn begin(path: &Path) -> io::Result<Option<(TakeOver, Vec<NamedSocket>)>> {
    let mut stream = match socket_owner::connect(path) {
        Ok(stream) => stream,
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::ConnectionRefused) => {
            return Ok(None);
        }
        Err(error) => return Err(error),
    };
    stream.set_read_timeout(Some(ANSWER))?;
    stream.set_write_timeout(Some(ANSWER))?;
    send(&mut stream, &AdminCommand::HandOver {})?;
    match receive(&stream)? {
        (AdminAnswer::HandingOver(names), sockets) if names.len() == sockets.len() => {
            Ok(Some((TakeOver(stream), names.into_iter().zip(sockets).collect())))
        }
        (answer, _) => Err(refused(answer)),
    }
}

impl TakeOver {
    /// Makes the other process leave its audit file, stop accepting, close the sockets named `left`, and
    /// drain. Returns the socket of its last audit records, if the process has an audit file.
    ///
    /// # Errors
    /// The process refuses, or does not answer in time: both processes may go on serving.
    pub fn finish(mut self, left: Vec<String>) -> io::Result<Option<OwnedFd>> {
        send(&mut self.0, &AdminCommand::Release { left })?;
        match receive(&self.0)? {
            (AdminAnswer::Draining(_), mut sockets) => Ok(sockets.pop()),
            (answer, _) => Err(refused(answer)),
        }
    }
}

/// Receives an answer, and the sockets that come with it.
fn receive(stream: &UnixStream) -> io::Result<(AdminAnswer, Vec<OwnedFd>)> {
    let (mut text, mut sockets) = (Vec::new(), Vec::new());
    while !text.ends_with(b"\n") && text.len() < LONGEST_ANSWER {
        let mut bytes = [0; 4096];
        let (length, more) = socket_passing::receive(stream.as_fd(), &mut bytes)?;
        if length == 0 {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        text.extend_from_slice(&bytes[..length]);
        sockets.extend(more);
    }
    Ok((serde_json::from_slice(&text)?, sockets))
}

fn send(stream: &mut UnixStream, command: &AdminCommand) -> io::Result<()> {
    let mut line = serde_json::to_vec(command)?;
    line.push(b'\n');
    stream.write_all(&line)
}

fn refused(answer: AdminAnswer) -> io::Error {
    match answer {
        AdminAnswer::Failed(reason) => io::Error::other(reason),
        _ => io::Error::other("it answered something else: is it of this version?"),
    }
}
