//! Byte streams below HTTP/2, without knowledge of their contents.

pub mod coalesce;
pub mod descriptor_limit;
pub mod file_replacement;
pub mod http2_body;
pub mod http_exchange;
pub mod kept_file;
pub mod kill_switch;
pub mod listening_sockets;
pub mod memory_limit;
pub mod service_manager;
pub mod socket_passing;
pub mod tcp_connect;
mod write_buffer;

use tokio::io::{AsyncRead, AsyncWrite};

/// A bidirectional byte stream: TCP, a unix socket, TLS over either, or an in-process pipe in tests.
pub trait Duplex: AsyncRead + AsyncWrite + Unpin + Send {}

impl<T: AsyncRead + AsyncWrite + Unpin + Send> Duplex for T {}

/// Any connected byte stream. The cost of a virtual call per system call is not measurable.
pub type ByteStream = Box<dyn Duplex>;
