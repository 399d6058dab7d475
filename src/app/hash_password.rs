//! `keyward hash-password`: hashes a password for the users file.
//!
//! Owns: reading the password, twice without echo from a terminal, or a single line otherwise. Must not know:
//! the hash format. Invariants: the password is never taken from arguments or the environment, since further
//! users of the machine could read both; terminal echo is restored on every path.

use std::fs::File;
use std::io::{self, IsTerminal as _, Read, Write as _};
use std::os::fd::{AsFd, BorrowedFd};

use rustix::termios::{LocalModes, OptionalActions, Termios, tcgetattr, tcsetattr};
use zeroize::Zeroizing;

use keyward_base::secret::Secret;
use keyward_config::users::{self, Cost, HashFailure};

/// Maximum password length, as for every password file of Keyward.
const LONGEST: u64 = 4096;

/// Reasons for a missing hash.
#[derive(Debug, thiserror::Error)]
pub enum HashPasswordError {
    /// Standard input or the terminal failed.
    #[error("the password cannot be read: {0}")]
    Unreadable(#[from] io::Error),
    /// The password is empty.
    #[error("the password is empty")]
    Empty,
    /// The password is not UTF-8, or longer than clients and sessions support.
    #[error("a password is one line of UTF-8 text, of at most {LONGEST} bytes")]
    Unusable,
    /// The two typed passwords differ.
    #[error("the two passwords differ")]
    Different,
    /// Hashing failed.
    #[error(transparent)]
    Hash(#[from] HashFailure),
}

/// Reads and hashes the password from standard input.
///
/// # Errors
/// See [`HashPasswordError`].
pub fn from_stdin() -> Result<String, HashPasswordError> {
    let stdin = io::stdin();
    // Bypasses the buffer of `Stdin`, where a copy of the password would remain.
    let mut input = File::from(stdin.as_fd().try_clone_to_owned()?);
    let password = if stdin.is_terminal() {
        let _unseen = TerminalEchoGuard::on(stdin.as_fd())?;
        let first = ask(&mut input, "Password: ")?;
        let second = ask(&mut input, "Once more: ")?;
        if first.expose() != second.expose() {
            return Err(HashPasswordError::Different);
        }
        first
    } else {
        line(&mut input)?
    };
    Ok(users::hash(&password, Cost::DEFAULT)?)
}

fn ask(input: &mut impl Read, question: &str) -> Result<Secret<String>, HashPasswordError> {
    // Standard output is reserved for the hash.
    io::stderr().write_all(question.as_bytes())?;
    line(input)
}

/// Reads a line byte by byte: no later input is consumed, and no copy stays in a buffer.
fn line(input: &mut impl Read) -> Result<Secret<String>, HashPasswordError> {
    let mut bytes = Zeroizing::new(Vec::with_capacity(8192));
    let mut byte = Zeroizing::new([0]);
    while input.read(byte.as_mut_slice())? == 1 && byte[0] != b'\n' {
        if bytes.len() as u64 == LONGEST {
            return Err(HashPasswordError::Unusable);
        }
        bytes.push(byte[0]);
    }
    let text = std::str::from_utf8(&bytes).map_err(|_| HashPasswordError::Unusable)?;
    let text = text.strip_suffix('\r').unwrap_or(text);
    if text.is_empty() {
        return Err(HashPasswordError::Empty);
    }
    Ok(Secret::new(text.to_owned()))
}

/// Disables terminal echo until dropped.
struct TerminalEchoGuard<'a> {
    terminal: BorrowedFd<'a>,
    before: Termios,
}

impl<'a> TerminalEchoGuard<'a> {
    fn on(terminal: BorrowedFd<'a>) -> io::Result<Self> {
        let before = tcgetattr(terminal)?;
        let mut unseen = before.clone();
        unseen.local_modes.remove(LocalModes::ECHO);
        // Echoes the newline alone: the next question begins on a new line.
        unseen.local_modes.insert(LocalModes::ECHONL);
        tcsetattr(terminal, OptionalActions::Flush, &unseen)?;
        Ok(Self { terminal, before })
    }
}

impl Drop for TerminalEchoGuard<'_> {
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
            assert!(matches!(read(empty.as_bytes()), Err(HashPasswordError::Empty)), "{empty:?}");
        }
        assert!(matches!(read(&[b'x'; 4097]), Err(HashPasswordError::Unusable)));
        assert_eq!(read(&[b'x'; 4096]).unwrap().len(), 4096);
        assert!(matches!(read(b"a\xff\n"), Err(HashPasswordError::Unusable)));
    }
}
