//! Sockets passed from one process to another, over a unix socket.
//!
//! Owns: the ancillary message with the sockets (SCM_RIGHTS). Must not know: the purpose of a socket.
//! Invariants: a received socket is closed with its value, and is not inherited by programs that the process
//! starts; a message has at most [`MOST`] sockets.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};

/// Sockets of one message at most; Linux allows 253.
pub const MOST: usize = 128;

/// Sends `bytes` with `sockets` on a connected unix socket. Returns the number of bytes sent, which may be
/// less than all; the sockets are sent with the first byte. The sender keeps its sockets.
///
/// # Errors
/// There are too many sockets, or the operating system's error, such as `WouldBlock`.
pub fn send(to: BorrowedFd<'_>, bytes: &[u8], sockets: &[OwnedFd]) -> io::Result<usize> {
    if sockets.len() > MOST {
        return Err(io::Error::other(format!("more than {MOST} sockets")));
    }
    let sockets: Vec<BorrowedFd<'_>> = sockets.iter().map(OwnedFd::as_fd).collect();
    let message = SendAncillaryMessage::ScmRights(&sockets);
    let mut space = vec![MaybeUninit::uninit(); message.size()];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !sockets.is_empty() && !ancillary.push(message) {
        return Err(io::Error::other("no room for the sockets"));
    }
    Ok(rustix::net::sendmsg(to, &[IoSlice::new(bytes)], &mut ancillary, SendFlags::NOSIGNAL)?)
}

/// Receives bytes into `bytes`, and the sockets sent with them. Returns the number of bytes; 0 at the end of
/// the stream.
///
/// # Errors
/// The operating system's error.
pub fn receive(from: BorrowedFd<'_>, bytes: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut bytes = [IoSliceMut::new(bytes)];
    let received = rustix::net::recvmsg(from, &mut bytes, &mut ancillary, RecvFlags::CMSG_CLOEXEC)?;
    let mut sockets = Vec::new();
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            sockets.extend(rights);
        }
    }
    Ok((received.bytes, sockets))
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::{UnixListener, UnixStream};

    use super::*;

    /// The socket has a path in a folder of the test: another process may listen at a port once it is free.
    #[test]
    fn a_listening_socket_outlives_the_sender() {
        let (one, other) = UnixStream::pair().unwrap();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        assert_eq!(send(one.as_fd(), b"take\n", &[listener.into()]).unwrap(), 5);
        let mut bytes = [0; 16];
        let (length, mut sockets) = receive(other.as_fd(), &mut bytes).unwrap();
        assert_eq!((&bytes[..length], sockets.len()), (&b"take\n"[..], 1));
        drop(one);
        let listener = UnixListener::from(sockets.remove(0));
        assert!(UnixStream::connect(&path).is_ok());
        listener.accept().unwrap();
        assert_eq!(receive(other.as_fd(), &mut bytes).unwrap().0, 0);
        drop(listener);
        assert!(UnixStream::connect(&path).is_err(), "no copy of the socket is left");
    }

    #[test]
    fn too_many_sockets_are_refused() {
        let (one, _other) = UnixStream::pair().unwrap();
        let copies = (0..=MOST).map(|_| one.as_fd().try_clone_to_owned().unwrap()).collect::<Vec<_>>();
        assert!(send(one.as_fd(), b"x", &copies).is_err());
        assert!(send(one.as_fd(), b"x", &copies[1..]).is_ok());
    }
}
