//! The listening sockets of the process, by name: the sockets taken over from another process, and copies of
//! the open sockets for a process that takes over.
//!
//! Owns: the copies. Must not know: the protocols served at the sockets. Invariant: the kernel closes a
//! listening socket with its last copy, so a copy is dropped together with the listener. Two processes give a
//! unix socket one name, whatever path each was given.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A listening socket and its name: the kind of the listener, and its address.
pub type NamedSocket = (String, OwnedFd);

/// The listening sockets of the process.
#[derive(Debug, Default)]
pub struct ListeningSockets {
    /// Taken over, and not opened yet.
    taken_over: Mutex<Vec<NamedSocket>>,
    open: Mutex<Vec<NamedSocket>>,
    /// Names of open sockets that the process that takes over does not open.
    left: Mutex<Vec<String>>,
}

impl ListeningSockets {
    /// Adds sockets taken over from another process.
    pub fn adopt(&self, sockets: Vec<NamedSocket>) {
        lock(&self.taken_over).extend(sockets);
    }

    /// Returns the socket of this name, if taken over and not opened yet.
    #[must_use]
    pub fn take(&self, name: &str) -> Option<OwnedFd> {
        let mut sockets = lock(&self.taken_over);
        let index = sockets.iter().position(|(taken, _)| taken == name)?;
        Some(sockets.swap_remove(index).1)
    }

    /// Drops the sockets that were taken over and not opened, and returns their names.
    pub fn drop_unused(&self) -> Vec<String> {
        std::mem::take(&mut *lock(&self.taken_over)).into_iter().map(|(name, _)| name).collect()
    }

    /// Keeps a copy of an open socket.
    ///
    /// # Errors
    /// The process has too many open files.
    pub fn opened(&self, name: String, socket: &impl AsFd) -> io::Result<()> {
        let copy = socket.as_fd().try_clone_to_owned()?;
        lock(&self.open).push((name, copy));
        Ok(())
    }

    /// Notes the sockets that the process that takes over does not open.
    pub fn leave(&self, names: Vec<String>) {
        *lock(&self.left) = names;
    }

    /// True if the process that takes over does not open the socket.
    #[must_use]
    pub fn is_left(&self, name: &str) -> bool {
        lock(&self.left).iter().any(|left| left == name)
    }

    /// Drops the copy of a socket that is being closed.
    pub fn closed(&self, name: &str) {
        lock(&self.open).retain(|(open, _)| open != name);
    }

    /// Further copies of the open sockets, with their names.
    ///
    /// # Errors
    /// The process has too many open files.
    pub fn copies(&self) -> io::Result<(Vec<String>, Vec<OwnedFd>)> {
        let open = lock(&self.open);
        let names = open.iter().map(|(name, _)| name.clone()).collect();
        let sockets = open.iter().map(|(_, socket)| socket.try_clone()).collect::<io::Result<_>>()?;
        Ok((names, sockets))
    }
}

/// The path of a unix socket as part of its name: absolute, and without symbolic links in its folder, because
/// the other process may have another working directory, or the path of its configuration in another form.
#[must_use]
pub fn plain_socket_path(path: &Path) -> PathBuf {
    let absolute = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let folder = absolute.parent().and_then(|folder| folder.canonicalize().ok());
    match (folder, absolute.file_name()) {
        (Some(folder), Some(file)) => folder.join(file),
        _ => absolute,
    }
}

fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::{UnixListener, UnixStream};

    use super::*;

    #[test]
    fn a_unix_socket_has_one_name_whatever_its_path() {
        let folder = tempfile::tempdir().unwrap();
        let plain = folder.path().canonicalize().unwrap().join("a.sock");
        std::fs::create_dir(folder.path().join("below")).unwrap();
        std::os::unix::fs::symlink(folder.path(), folder.path().join("link")).unwrap();
        for path in ["a.sock", "./a.sock", "below/../a.sock", "link/a.sock", "link/below/../a.sock"] {
            assert_eq!(plain_socket_path(&folder.path().join(path)), plain, "{path}");
        }
        let here = std::env::current_dir().unwrap().canonicalize().unwrap();
        assert_eq!(plain_socket_path(Path::new("a.sock")), here.join("a.sock"));
        assert_eq!(
            plain_socket_path(Path::new("/no/such/folder/a.sock")),
            Path::new("/no/such/folder/a.sock")
        );
    }

    /// The sockets have paths in a folder of the test: another process may listen at a port once it is free.
    #[test]
    fn a_socket_is_taken_once_and_ends_with_its_last_copy() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name| folder.path().join(name);
        let listener = UnixListener::bind(path("a")).unwrap();
        let before = ListeningSockets::default();
        before.opened("a".into(), &listener).unwrap();
        before.opened("b".into(), &UnixListener::bind(path("b")).unwrap()).unwrap();
        let (names, sockets) = before.copies().unwrap();
        assert_eq!(names, ["a", "b"]);
        let after = ListeningSockets::default();
        after.adopt(names.into_iter().zip(sockets).collect());
        drop(listener);
        before.closed("a");
        let taken = after.take("a").expect("was open");
        assert!(after.take("a").is_none() && UnixStream::connect(path("a")).is_ok());
        assert_eq!(after.drop_unused(), ["b"]);
        drop(taken);
        assert!(UnixStream::connect(path("a")).is_err());
    }
}
