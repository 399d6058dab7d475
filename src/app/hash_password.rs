//! `keyward hash-password`: from a password to the hash that a users file has.
//!
//! Owns: asking for the password, twice and unseen on a terminal, one line of anything else. Must not know: what the
//! hash is made of.
//! Invariants: the password comes as no argument and from no environment, where others would see it; the terminal
//! shows again what is typed, whatever happened here.

use std::fs::File;
use std::io::{self, IsTerminal as _, Read, Write as _};
use std::os::fd::{AsFd, BorrowedFd};

use rustix::termios::{LocalModes, OptionalActions, Termios, tcgetattr, tcsetattr};
use zeroize::Zeroizing;

use crate::secret::Secret;
use crate::users::{self, Cost, HashFailure};

/// As long as a password in any other file of ours.
const LONGEST: u64 = 4096;

/// Why there is no hash.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Nothing could be read, or nobody could be asked.
    #[error("the password cannot be read: {0}")]
    Unreadable(#[from] io::Error),
    /// There is none.
    #[error("the password is empty")]
    Empty,
    /// It is none that a client could send, or none that a session could carry.
    #[error("a password is one line of UTF-8 text, of at most {LONGEST} bytes")]
    Unusable,
    /// The two that were typed differ.
    #[error("the two passwords differ")]
    Different,
    /// It could not be hashed.
    #[error(transparent)]
    Hash(#[from] HashFailure),
}

/// Reads the password from standard input, and hashes it.
///
/// # Errors
/// See [`Error`].
pub fn from_stdin() -> Result<String, Error> {
    let stdin = io::stdin();
    // Not by its buffer, which would keep the password.
    let mut input = File::from(stdin.as_fd().try_clone_to_owned()?);
    let password = if stdin.is_terminal() {
        let _unseen = Unseen::on(stdin.as_fd())?;
        let first = ask(&mut input, "Password: ")?;
        let second = ask(&mut input, "Once more: ")?;
        if first.expose() != second.expose() {
            return Err(Error::Different);
        }
        first
    } else {
        line(&mut input)?
    };
    Ok(users::hash(&password, Cost::DEFAULT)?)
}

fn ask(input: &mut impl Read, question: &str) -> Result<Secret<String>, Error> {
    // Not to standard output: that is the hash's.
    io::stderr().write_all(question.as_bytes())?;
    line(input)
}

/// One line, byte by byte, so that nothing of what follows is taken, and no copy stays in a buffer.
fn line(input: &mut impl Read) -> Result<Secret<String>, Error> {
    let mut bytes = Zeroizing::new(Vec::with_capacity(8192));
    let mut byte = Zeroizing::new([0]);
    while input.read(byte.as_mut_slice())? == 1 && byte[0] != b'\n' {
        if bytes.len() as u64 == LONGEST {
            return Err(Error::Unusable);
        }
        bytes.push(byte[0]);
    }
    let text = std::str::from_utf8(&bytes).map_err(|_| Error::Unusable)?;
    let text = text.strip_suffix('\r').unwrap_or(text);
    if text.is_empty() {
        return Err(Error::Empty);
    }
    Ok(Secret::new(text.to_owned()))
}

/// While it lives, the terminal does not show what is typed.
struct Unseen<'a> {
    terminal: BorrowedFd<'a>,
    before: Termios,
}

impl<'a> Unseen<'a> {
    fn on(terminal: BorrowedFd<'a>) -> io::Result<Self> {
        let before = tcgetattr(terminal)?;
        let mut unseen = before.clone();
        unseen.local_modes.remove(LocalModes::ECHO);
        // The line's end is shown, so that the next question begins a line.
        unseen.local_modes.insert(LocalModes::ECHONL);
        tcsetattr(terminal, OptionalActions::Flush, &unseen)?;
        Ok(Self { terminal, before })
    }
}

impl Drop for Unseen<'_> {
    fn drop(&mut self) {
        if let Err(error) = tcsetattr(self.terminal, OptionalActions::Flush, &self.before) {
            tracing::warn!(%error, "the terminal may not show what is typed; `stty echo` brings it back");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_password_is_one_line() {
        let read = |bytes: &[u8]| line(&mut &bytes[..]).map(|password| password.expose().clone());
        for (bytes, password) in
            [("pw", "pw"), ("pw\nmore", "pw"), ("p w \r\n", "p w "), ("pässword\n", "pässword")]
        {
            assert_eq!(read(bytes.as_bytes()).unwrap(), password);
        }
        for empty in ["", "\n", "\r\n", "\nmore"] {
            assert!(matches!(read(empty.as_bytes()), Err(Error::Empty)), "{empty:?}");
        }
        assert!(matches!(read(&[b'x'; 4097]), Err(Error::Unusable)));
        assert_eq!(read(&[b'x'; 4096]).unwrap().len(), 4096);
        assert!(matches!(read(b"a\xff\n"), Err(Error::Unusable)));
    }
}
