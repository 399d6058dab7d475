//! The other replicas, side by side with this one: each is asked at its admin address when somebody looks.
//!
//! Owns: the addresses behind `admin.replicas`, the questions, and the answers of the last seconds. Must not
//! know: who looks. Invariants: nobody is asked while nobody looks; one look asks each address once, at the
//! same time, within a second; the texts of an answer are escaped, and an answer decides nothing.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use http::StatusCode;
use serde::{Deserialize, Serialize};
use tokio::sync::Mutex;
use tokio::time::{Instant, timeout};

use keyward_base::io::http_exchange::{ExchangeError, get};
use keyward_base::io::tcp_connect::connect_tcp;
use keyward_dial::names::{NameError, NameResolver};
use keyward_telemetry::printable::escaped;

/// The path of a replica's row at its admin address.
pub(super) const PATH: &str = "/replica";
/// The times of a look at the other replicas.
#[derive(Clone, Copy)]
struct ReplicaTimes {
    /// Time limit for the answer of one address, and for the resolution of one name.
    limit: Duration,
    /// Age up to which answers are used again.
    fresh: Duration,
}

const TIMES: ReplicaTimes = ReplicaTimes { limit: Duration::from_secs(1), fresh: Duration::from_secs(3) };
/// Largest answer that is read, in bytes.
const LONGEST: usize = 16 * 1024;

/// Asks the other replicas.
pub struct OtherReplicas {
    names: Arc<[String]>,
    resolver: NameResolver,
    times: ReplicaTimes,
    answers: Mutex<Option<(Instant, Vec<ReplicaRow>)>>,
}

/// A replica, as told by itself.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReplicaRow {
    /// Name of its machine.
    pub host: Option<String>,
    /// Admin address by which another replica asked; null for the replica that shows the row.
    #[serde(default)]
    pub address: Option<String>,
    /// Process id. Null, as every count, if the replica did not answer.
    pub pid: Option<u32>,
    /// Keyward's version.
    pub version: String,
    /// Serving state, as in `keyward status`; empty if the replica did not answer.
    pub state: String,
    /// Reason for the state, or for the lack of an answer.
    pub why: Option<String>,
    /// Begin of the process, as RFC 3339.
    pub started_at: String,
    /// Digest of the configuration in force.
    pub configuration: String,
    /// Open client connections.
    pub connections: Option<i64>,
    /// Unary calls in flight.
    pub calls: Option<i64>,
    /// Open streams.
    pub streams: Option<i64>,
    /// Sessions seen recently.
    pub sessions: Option<usize>,
    /// Threads serving clients.
    pub shards: Option<usize>,
}

/// Reason for the lack of a replica's row.
#[derive(Debug, thiserror::Error)]
enum SilentReplica {
    #[error("no answer within {} s", .0.as_secs())]
    Late(Duration),
    #[error("{0}")]
    Unnamed(#[from] NameError),
    #[error("the address has no port")]
    NoPort,
    #[error("{0}")]
    Unconnected(#[from] std::io::Error),
    #[error("{0}")]
    NoAnswer(#[from] ExchangeError),
    #[error("the answer has the HTTP status {0}: no replica of this version")]
    Refused(StatusCode),
    #[error("the answer is no replica's: {0}")]
    Foreign(#[from] serde_json::Error),
}

impl OtherReplicas {
    /// The replicas with these admin addresses: `HOST:PORT`, a name for all of its addresses.
    #[must_use]
    pub fn new(names: Arc<[String]>, resolver: NameResolver) -> Self {
        Self { names, resolver, times: TIMES, answers: Mutex::default() }
    }

    /// The rows of all replicas, `own` first. An address that leads to this process has no further row.
    pub(super) async fn beside(&self, own: ReplicaRow) -> Vec<ReplicaRow> {
        if self.names.is_empty() {
            return vec![own];
        }
        // Later lookers wait for the answers to the first.
        let mut answers = self.answers.lock().await;
        let others = match &*answers {
            Some((taken, rows)) if taken.elapsed() < self.times.fresh => rows,
            _ => &answers.insert((Instant::now(), self.ask_all().await)).1,
        };
        let mut rows = vec![own];
        for other in others {
            if !rows.iter().any(|row| row.is_same_process(other)) {
                rows.push(other.clone());
            }
        }
        rows
    }

    /// The addresses of each name, or why there are none.
    pub(super) async fn all_addresses(&self) -> Vec<(String, Result<Vec<SocketAddr>, String>)> {
        let found = self.names.iter().map(|name| async move {
            let found = within(self.times.limit, self.addresses(name)).await;
            (name.clone(), found.map_err(|silent| silent.to_string()))
        });
        join_all(found).await
    }

    async fn ask_all(&self) -> Vec<ReplicaRow> {
        let asked = self.names.iter().map(|name| self.rows_of(name));
        join_all(asked).await.into_iter().flatten().collect()
    }

    /// The rows of all addresses of a name. A name that is looked up for longer than the limit has its rows
    /// at the next look.
    async fn rows_of(&self, name: &str) -> Vec<ReplicaRow> {
        let limit = self.times.limit;
        match within(limit, self.addresses(name)).await {
            Ok(found) => join_all(found.into_iter().map(|address| row_of(address, limit))).await,
            Err(silent) => vec![ReplicaRow::silent(name, &silent)],
        }
    }

    async fn addresses(&self, name: &str) -> Result<Vec<SocketAddr>, SilentReplica> {
        if let Ok(address) = name.parse() {
            return Ok(vec![address]);
        }
        let (host, port) = name.rsplit_once(':').ok_or(SilentReplica::NoPort)?;
        let port = port.parse().map_err(|_| SilentReplica::NoPort)?;
        let found = self.resolver.addresses(host).await?;
        Ok(found.all.into_iter().map(|address| SocketAddr::new(address, port)).collect())
    }
}

async fn row_of(address: SocketAddr, limit: Duration) -> ReplicaRow {
    match within(limit, ask(address)).await {
        Ok(row) => row.at(address),
        Err(silent) => ReplicaRow::silent(&address.to_string(), &silent),
    }
}

async fn within<T, E>(limit: Duration, step: impl Future<Output = Result<T, E>>) -> Result<T, SilentReplica>
where
    SilentReplica: From<E>,
{
    Ok(timeout(limit, step).await.map_err(|_| SilentReplica::Late(limit))??)
}

/// Asks by the address: the other replica need not know the name that led there.
async fn ask(address: SocketAddr) -> Result<ReplicaRow, SilentReplica> {
    let stream = connect_tcp(address).await?;
    let (head, body) =
        get(stream, &SocketAddr::new(address.ip(), address.port()).to_string(), PATH, LONGEST).await?;
    if head.status != StatusCode::OK {
        return Err(SilentReplica::Refused(head.status));
    }
    Ok(serde_json::from_slice(&body)?)
}

impl ReplicaRow {
    /// The row of a replica that did not tell its own.
    fn silent(address: &str, why: &SilentReplica) -> Self {
        Self { address: Some(address.to_owned()), why: Some(escaped(&why.to_string())), ..Self::default() }
    }

    /// The row of another replica, which answered at `address`.
    fn at(self, address: SocketAddr) -> Self {
        Self {
            host: self.host.as_deref().map(escaped),
            address: Some(address.to_string()),
            version: escaped(&self.version),
            state: escaped(&self.state),
            why: self.why.as_deref().map(escaped),
            started_at: escaped(&self.started_at),
            configuration: escaped(&self.configuration),
            ..self
        }
    }

    /// True for two rows of one process. A silent replica is only itself.
    fn is_same_process(&self, other: &Self) -> bool {
        if other.pid.is_none() {
            return self.address == other.address;
        }
        (&self.host, self.pid, &self.started_at) == (&other.host, other.pid, &other.started_at)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;

    use super::*;

    fn own() -> ReplicaRow {
        ReplicaRow {
            host: Some("here".into()),
            pid: Some(7),
            started_at: "1".into(),
            ..ReplicaRow::default()
        }
    }

    /// Answers one connection after the other with `answer`, as often as `answers` has one.
    async fn serve(listener: TcpListener, answers: Vec<String>) {
        for answer in answers {
            let (mut stream, _) = listener.accept().await.expect("a connection");
            let mut request = [0; 256];
            let read = stream.read(&mut request).await.expect("a request");
            assert!(request[..read].starts_with(b"GET /replica HTTP/1.1\r\n"));
            stream.write_all(answer.as_bytes()).await.expect("the answer is read");
        }
    }

    fn page(row: &ReplicaRow) -> String {
        let body = serde_json::to_string(row).expect("JSON");
        format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{body}", body.len())
    }

    #[tokio::test]
    async fn each_replica_has_one_row_and_a_silent_one_says_why() {
        let listeners = [(); 3].map(|()| TcpListener::bind("127.0.0.1:0"));
        let listeners = join_all(listeners).await.into_iter().map(|bound| bound.expect("a port"));
        let listeners: Vec<_> = listeners.collect();
        let addresses: Vec<_> = listeners.iter().map(|bound| bound.local_addr().expect("its port")).collect();
        let other =
            ReplicaRow { state: "serving\x1b[2J".into(), host: Some("there".into()), pid: Some(9), ..own() };
        let wrong = "HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n".to_owned();
        // The machine may take any time for an answer.
        let (names, long) = (addresses.iter().map(ToString::to_string).collect(), Duration::from_secs(3600));
        let times = ReplicaTimes { limit: long, fresh: long };
        let replicas = OtherReplicas { times, ..OtherReplicas::new(names, NameResolver::of_machine(None)) };
        let answers = [page(&own()), page(&other), wrong].map(|answer| vec![answer]);
        let served = join_all(listeners.into_iter().zip(answers).map(|(one, answers)| serve(one, answers)));
        let (rows, _) = tokio::join!(replicas.beside(own()), served);
        let states: Vec<_> = rows.iter().map(|row| (row.pid, row.state.as_str())).collect();
        // The first address leads to the asking process itself.
        assert_eq!(states, [(Some(7), ""), (Some(9), "serving\\u{1b}[2J"), (None, "")], "{rows:?}");
        assert_eq!(rows[1].address, Some(addresses[1].to_string()));
        assert!(rows[2].why.as_deref().is_some_and(|why| why.contains("404")), "{rows:?}");
        // Nobody listens any more: a second look within the time shows the same answers.
        assert_eq!(replicas.beside(own()).await.len(), 3);
    }
}
