//! Bytes under HTTP/2. Knows nothing of what they mean.

pub mod coalesce;
pub mod cut;

use tokio::io::{AsyncRead, AsyncWrite};

/// Both halves of a byte stream: TCP, a unix socket, TLS over either, or an in-process pipe in tests.
pub trait Duplex: AsyncRead + AsyncWrite + Unpin + Send {}

impl<T: AsyncRead + AsyncWrite + Unpin + Send> Duplex for T {}

/// Any connected byte stream. One virtual call per system call: below what can be measured.
pub type Stream = Box<dyn Duplex>;
