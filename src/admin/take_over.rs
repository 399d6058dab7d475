//! The client's end of a hand-over: a starting process gets the listening sockets of the process that serves.
//!
//! Owns: the order of the two commands. Must not know: the listeners. Invariants: until the second command
//! both processes accept at the same sockets, and the serving process serves as before, so a start that fails
//! changes nothing; the second command is sent once.

use std::io::{self, BufRead as _, BufReader, ErrorKind, Write as _};
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use super::socket::{AdminAnswer, AdminCommand};
use super::socket_owner;
use crate::io::listening_sockets::NamedSocket;
use crate::io::socket_passing;

/// Time limit of an answer.
const ANSWER: Duration = Duration::from_secs(5);
/// Bytes of the names of all sockets at most.
const LONGEST_NAMES: usize = 64 * 1024;

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
    let (mut text, mut sockets) = (Vec::new(), Vec::new());
    while !text.ends_with(b"\n") && text.len() < LONGEST_NAMES {
        let mut bytes = [0; 4096];
        let (length, more) = socket_passing::receive(stream.as_fd(), &mut bytes)?;
        if length == 0 {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        text.extend_from_slice(&bytes[..length]);
        sockets.extend(more);
    }
    match serde_json::from_slice(&text)? {
        AdminAnswer::HandingOver(names) if names.len() == sockets.len() => {
            Ok(Some((TakeOver(stream), names.into_iter().zip(sockets).collect())))
        }
        answer => Err(refused(answer)),
    }
}

impl TakeOver {
    /// Makes the other process stop accepting, and drain.
    ///
    /// # Errors
    /// The process refuses, or does not answer in time: both processes may go on serving.
    pub fn finish(mut self) -> io::Result<()> {
        send(&mut self.0, &AdminCommand::Release {})?;
        let mut line = String::new();
        BufReader::new(&self.0).read_line(&mut line)?;
        match serde_json::from_str(&line)? {
            AdminAnswer::Draining(_) => Ok(()),
            answer => Err(refused(answer)),
        }
    }
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
