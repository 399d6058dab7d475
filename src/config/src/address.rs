//! The listening address of a socket.
//!
//! Owns: its forms, and how it is shown. Must not know: how it is written in the configuration, sockets.
//! Invariant: the shown form is the written form.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;

/// Listening address of a socket.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Address {
    /// An IP address and port; with port 0 the operating system chooses.
    Tcp(SocketAddr),
    /// Absolute path of a unix socket.
    Unix(PathBuf),
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => address.fmt(f),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}
