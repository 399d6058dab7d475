//! Many connections of one load, and the verified Range of every load over many connections.
//!
//! Owns: source addresses, logins, the first call of a connection. Must not know: the later calls. Invariant:
//! a connection of the pool has made one verified call with its user's token.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use futures_util::stream::{self, StreamExt as _, TryStreamExt as _};
use keyward::tasks::Tasks;
use tokio::net::{TcpSocket, TcpStream};
use tokio::time::timeout;

use crate::Failure;
use crate::canned::SMALL_KEY;
use crate::check::{authenticate, range};
use crate::grpc_client::GrpcClient;

/// The length of the answered value.
const VALUE: usize = 256;
/// Connections and logins under way at the same time: below the backlog of every listener.
const OPENING: usize = 32;
/// Time limit of one connection's opening, and of one call.
pub(crate) const LIMIT: Duration = Duration::from_secs(30);

/// Logs in on a connection of its own; the token.
pub(crate) async fn log_in(
    address: SocketAddr,
    name: &str,
    password: &str,
    tasks: &Tasks,
) -> Result<String, Failure> {
    let client = GrpcClient::connect(address, None, tasks).await?;
    authenticate(&client, name, password).await
}

/// Logs in the users `NAME-0`, `NAME-1`, … with one password; their tokens.
pub(crate) async fn log_in_all(
    address: SocketAddr,
    name: &str,
    password: &str,
    users: usize,
    tasks: &Tasks,
) -> Result<Vec<String>, Failure> {
    let logins = stream::iter(0..users).map(async |at| {
        let name = format!("{name}-{at}");
        timeout(LIMIT, log_in(address, &name, password, tasks)).await?
    });
    logins.buffered(OPENING).try_collect().await
}

/// Opens `connections` connections from `sources` loopback addresses in turn, and with `tokens` in turn.
pub(crate) async fn open(
    address: SocketAddr,
    connections: usize,
    sources: u8,
    tokens: &[String],
    tasks: &Tasks,
) -> Result<Vec<GrpcClient>, Failure> {
    let sources: Vec<_> = (1..=sources.max(1)).map(|last| Ipv4Addr::new(127, 0, 0, last)).collect();
    let opened = stream::iter((0..connections).zip(sources.into_iter().cycle())).map(async |(at, source)| {
        let token = tokens.get(at % tokens.len().max(1)).map(String::as_str);
        let opening = async {
            let client = GrpcClient::over(connect(source, address).await?, token, tasks).await?;
            verified_range(&client).await?;
            Ok::<_, Failure>(client)
        };
        timeout(LIMIT, opening).await.map_err(|_| format!("connection {at} has no answer"))?
    });
    opened.buffered(OPENING).try_collect().await
}

/// Connects from `source`, a loopback address: a source has some 28,000 ports towards one listener.
async fn connect(source: Ipv4Addr, address: SocketAddr) -> Result<TcpStream, Failure> {
    let socket = TcpSocket::new_v4()?;
    if source != Ipv4Addr::LOCALHOST {
        socket.bind(SocketAddr::from((source, 0)))?;
    }
    Ok(socket.connect(address).await?)
}

/// Makes one Range. The answer must be one pair of the asked key with a value of the right length.
pub(crate) async fn verified_range(client: &GrpcClient) -> Result<(), Failure> {
    range(client, SMALL_KEY, VALUE).await.map(drop)
}
