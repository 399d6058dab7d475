//! A collector that takes records as OTLP logs over HTTP/1.1 (protobuf).
//!
//! Owns: the connection, the division of a batch into requests, and the meaning of an answer. Must not know:
//! the contents of a record, the queue of the sink. Invariants: a request has a time limit; lines are counted
//! as sent after the answer to their request; the authorization stands in no log and no error.
//!
//! <https://github.com/open-telemetry/opentelemetry-proto>

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::{Either, select};
use http::header::{AUTHORIZATION, CONTENT_TYPE, HOST, USER_AGENT};
use http::uri::PathAndQuery;
use http::{HeaderValue, Request, StatusCode};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper_util::rt::TokioIo;
use prost::Message as _;
use tokio::runtime::{Builder, Runtime};
use tokio::time::timeout;

use super::otlp_messages::{OtlpLogsAnswer, logs_request};
use super::record::Timestamp;
use super::sink_progress::SinkProgress;
use crate::config::Endpoint;
use crate::config::audit_settings::OtlpSettings;
use crate::dial::connect::Connector;
use crate::dial::member_tls;

/// Lines in one request. The Collector's own limit on a request is 20 MiB.
const MOST_LINES: usize = 1000;
/// Bytes of lines in one request. A longer line goes alone.
const MOST_BYTES: usize = 1 << 20;
/// Time limit for resolving, connecting and the handshake.
const CONNECTING: Duration = Duration::from_secs(5);
/// Time limit for a request, with its answer.
const ANSWERING: Duration = Duration::from_secs(10);
/// Largest answer that is read.
const LONGEST_ANSWER: usize = 64 * 1024;
/// Characters of a collector's message in the log.
const LONGEST_MESSAGE: usize = 200;

/// A collector. Used by one thread, which drives the connection while a request is under way.
pub(super) struct OtlpCollector {
    endpoint: Endpoint,
    path: PathAndQuery,
    authorization: Option<HeaderValue>,
    replica: String,
    connector: Connector,
    runtime: Runtime,
    connection: Option<CollectorConnection>,
    /// True after a refused record, until the next answer without one: a series is logged once.
    refuses: bool,
}

/// An HTTP/1.1 connection: its sending half, and the future that moves its bytes.
struct CollectorConnection {
    sender: SendRequest<Full<Bytes>>,
    driver: Pin<Box<dyn Future<Output = hyper::Result<()>> + Send>>,
}

/// The consequence of an answer for the lines of a request.
#[derive(Debug, PartialEq, Eq)]
enum OtlpVerdict {
    /// The collector has the lines, except for this number, which the collector refuses for good.
    Taken { refused: u64, message: String },
    /// The lines may be sent again.
    Again,
}

impl OtlpCollector {
    /// # Errors
    /// The TLS settings cannot be used, or the operating system gives no resources.
    pub(super) fn new(settings: &OtlpSettings, replica: &str) -> io::Result<Self> {
        let tls = settings.tls.as_ref().map(member_tls::client_config).transpose();
        let connector = Connector::tcp(tls.map_err(io::Error::other)?, CONNECTING).http1();
        let authorization = settings.authorization.as_ref();
        let authorization = authorization.map(|value| HeaderValue::from_str(value.expose())).transpose();
        let mut authorization = authorization.map_err(io::Error::other)?;
        authorization.iter_mut().for_each(|value| value.set_sensitive(true));
        Ok(Self {
            endpoint: settings.endpoint.clone(),
            path: settings.path.clone(),
            authorization,
            replica: replica.to_owned(),
            connector,
            runtime: Builder::new_current_thread().enable_all().build()?,
            connection: None,
            refuses: false,
        })
    }

    /// Sends the lines from the first unsent one on.
    ///
    /// # Errors
    /// The collector is gone, or refuses for now: the remaining lines may be sent again. After an error
    /// without an answer, the collector may have the lines already.
    pub(super) fn send(&mut self, lines: &[u8], progress: &mut SinkProgress) -> io::Result<()> {
        let lines: Vec<&[u8]> = lines.split_inclusive(|byte| *byte == b'\n').collect();
        let mut rest = lines.get(progress.sent_lines()..).unwrap_or_default();
        while !rest.is_empty() {
            let (now, later) = rest.split_at(lines_of_request(rest));
            let without_ends = now.iter().map(|line| line.strip_suffix(b"\n").unwrap_or(line));
            let request = logs_request(&self.replica, without_ends, Timestamp::now()).encode_to_vec();
            let (status, answer) = self.exchange(request.into())?;
            match verdict(status, &answer, now.len() as u64) {
                OtlpVerdict::Taken { refused, message } => {
                    self.note_refused(refused, status, &message);
                    progress.sent += now.len() as u64;
                    progress.refused += refused;
                }
                OtlpVerdict::Again => {
                    return Err(io::Error::other(format!("the collector answers {status}")));
                }
            }
            rest = later;
        }
        Ok(())
    }

    fn note_refused(&mut self, refused: u64, status: StatusCode, message: &str) {
        let refuses = refused > 0;
        if refuses && !self.refuses {
            let status = status.as_u16();
            tracing::error!(refused, status, message, "the collector refuses audit records for good");
        }
        self.refuses = refuses;
    }

    /// Sends a request. A connection that was idle may be dead without a sign, so a failure there is followed
    /// by one attempt on a new connection.
    fn exchange(&mut self, body: Bytes) -> io::Result<(StatusCode, Bytes)> {
        let idle = self.connection.take().filter(|connection| !connection.sender.is_closed());
        let attempt = async {
            let answered = match idle {
                Some(idle) => self.ask(idle, body.clone()).await.ok(),
                None => None,
            };
            match answered {
                Some(answered) => Ok(answered),
                None => self.ask(self.connect().await?, body).await,
            }
        };
        let answered = self.runtime.block_on(async { timeout(ANSWERING, attempt).await });
        let late = || io::Error::new(io::ErrorKind::TimedOut, "the collector does not answer");
        let (status, answer, connection) = answered.unwrap_or_else(|_| Err(late()))?;
        self.connection = connection;
        Ok((status, answer))
    }

    async fn connect(&self) -> io::Result<CollectorConnection> {
        let stream = self.connector.connect(&self.endpoint).await.map_err(io::Error::other)?;
        let (sender, driver) = handshake(TokioIo::new(stream)).await.map_err(io::Error::other)?;
        Ok(CollectorConnection { sender, driver: Box::pin(driver) })
    }

    /// Sends one request, and reads its answer whole. Returns the connection if further requests may use it.
    async fn ask(
        &self,
        mut connection: CollectorConnection,
        body: Bytes,
    ) -> io::Result<(StatusCode, Bytes, Option<CollectorConnection>)> {
        let mut request = Request::post(self.path.as_str())
            .header(HOST, self.endpoint.authority())
            .header(CONTENT_TYPE, "application/x-protobuf")
            .header(USER_AGENT, concat!("keyward/", env!("CARGO_PKG_VERSION")));
        if let Some(value) = &self.authorization {
            request = request.header(AUTHORIZATION, value);
        }
        let request = request.body(Full::new(body)).map_err(io::Error::other)?;
        let answer = async {
            let sent = connection.sender.send_request(request).await;
            let (head, body) = sent.map_err(io::Error::other)?.into_parts();
            let body = Limited::new(body, LONGEST_ANSWER).collect().await.map_err(io::Error::other)?;
            Ok::<_, io::Error>((head.status, body.to_bytes()))
        };
        // A connection may end with its answer: the answer is complete then, and the connection is not used
        // again.
        let (answered, is_open) = match select(Box::pin(answer), connection.driver.as_mut()).await {
            Either::Left((answered, _)) => (answered, true),
            Either::Right((_, answer)) => (answer.await, false),
        };
        let (status, body) = answered?;
        Ok((status, body, is_open.then_some(connection)))
    }
}

/// The number of first lines that go into one request.
fn lines_of_request(lines: &[&[u8]]) -> usize {
    let mut bytes = 0;
    let fits = |line: &&&[u8]| {
        bytes += line.len();
        bytes <= MOST_BYTES
    };
    lines.iter().take(MOST_LINES).take_while(fits).count().max(1)
}

/// Judges the answer to a request with `lines` lines. A request that the collector calls malformed or too
/// large is not repeated. Every other failure is, also where the specification forbids a repetition (as for
/// 401 and 404): an operator repairs these, and the log must not lose the records until then.
fn verdict(status: StatusCode, answer: &[u8], lines: u64) -> OtlpVerdict {
    if status.is_success() {
        let answer = OtlpLogsAnswer::decode(answer).unwrap_or_default().partial_success.unwrap_or_default();
        let refused = u64::try_from(answer.rejected_log_records).unwrap_or(0).min(lines);
        let message = answer.error_message.chars().take(LONGEST_MESSAGE).collect::<String>();
        return OtlpVerdict::Taken { refused, message: message.escape_debug().to_string() };
    }
    match status {
        StatusCode::BAD_REQUEST | StatusCode::PAYLOAD_TOO_LARGE => {
            OtlpVerdict::Taken { refused: lines, message: String::new() }
        }
        _ => OtlpVerdict::Again,
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Write as _};
    use std::net::{Ipv4Addr, SocketAddr, TcpListener};
    use std::thread::{self, JoinHandle};

    use super::*;
    use crate::audit::otlp_messages::{OtlpLogsRequest, OtlpPartialSuccess, OtlpValueKind};
    use crate::config::Scheme;

    /// An answer, and the treatment of the connection behind it.
    struct ScriptedAnswer {
        status: &'static str,
        refused: i64,
        closes: bool,
    }

    const OK: ScriptedAnswer = ScriptedAnswer { status: "200 OK", refused: 0, closes: false };

    /// Answers one request each, and returns the bodies of the log records of each request.
    fn collector(answers: Vec<ScriptedAnswer>) -> (SocketAddr, JoinHandle<Vec<Vec<String>>>) {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let serving = thread::spawn(move || {
            let mut connection = None;
            let mut requests = Vec::new();
            for answer in answers {
                let mut stream =
                    connection.take().unwrap_or_else(|| BufReader::new(listener.accept().unwrap().0));
                requests.push(request(&mut stream));
                let partial_success = (answer.refused > 0).then(|| OtlpPartialSuccess {
                    rejected_log_records: answer.refused,
                    error_message: "too old".into(),
                });
                let body = OtlpLogsAnswer { partial_success }.encode_to_vec();
                let head = format!("HTTP/1.1 {}\r\ncontent-length: {}\r\n\r\n", answer.status, body.len());
                stream.get_mut().write_all(&[head.as_bytes(), &body].concat()).unwrap();
                connection = Some(stream).filter(|_| !answer.closes);
            }
            requests
        });
        (address, serving)
    }

    fn request(stream: &mut impl BufRead) -> Vec<String> {
        let mut length = 0;
        loop {
            let mut line = String::new();
            stream.read_line(&mut line).unwrap();
            if line == "\r\n" {
                break;
            }
            if let Some(told) = line.to_ascii_lowercase().strip_prefix("content-length: ") {
                length = told.trim().parse().unwrap();
            }
        }
        let mut body = vec![0; length];
        stream.read_exact(&mut body).unwrap();
        let request = OtlpLogsRequest::decode(&body[..]).unwrap();
        let records = request.resource_logs.into_iter().flat_map(|resource| resource.scope_logs);
        let records = records.flat_map(|scope| scope.log_records);
        let body = |kind| match kind {
            Some(OtlpValueKind::Text(text)) => text,
            other => panic!("{other:?}"),
        };
        records.map(|record| body(record.body.unwrap().value)).collect()
    }

    fn sending_to(address: SocketAddr) -> OtlpCollector {
        let endpoint = Endpoint { scheme: Scheme::Http, host: "127.0.0.1".into(), port: address.port() };
        let path = PathAndQuery::from_static("/v1/logs");
        OtlpCollector::new(&OtlpSettings { endpoint, path, tls: None, authorization: None }, "a").unwrap()
    }

    #[test]
    fn lines_are_sent_again_after_a_refusal_for_now_and_past_a_connection_closed_while_idle() {
        let unavailable = ScriptedAnswer { status: "503 Service Unavailable", ..OK };
        let (address, serving) = collector(vec![ScriptedAnswer { closes: true, ..OK }, unavailable, OK, OK]);
        let (mut collector, mut progress) = (sending_to(address), SinkProgress::default());
        collector.send(b"one\ntwo\n", &mut progress).unwrap();
        assert_eq!((progress.sent, progress.refused), (2, 0));
        let mut progress = SinkProgress::default();
        let error = collector.send(b"three\n", &mut progress).unwrap_err();
        assert_eq!(
            (error.to_string(), progress.sent),
            ("the collector answers 503 Service Unavailable".into(), 0)
        );
        collector.send(b"three\n", &mut progress).unwrap();
        assert_eq!(progress.sent, 1);
        // Lines of the batch that were sent are not sent again.
        progress = SinkProgress { sent: 1, refused: 0 };
        collector.send(b"three\nfour\n", &mut progress).unwrap();
        assert_eq!(serving.join().unwrap(), [vec!["one", "two"], vec!["three"], vec!["three"], vec!["four"]]);
    }

    #[test]
    fn lines_refused_for_good_are_counted_and_not_repeated() {
        let answers = [("200 OK", 1), ("200 OK", 99), ("400 Bad Request", 0), ("413 Payload Too Large", 0)];
        let answers = answers.map(|(status, refused)| ScriptedAnswer { status, refused, ..OK });
        let (address, serving) = collector(answers.into());
        let mut collector = sending_to(address);
        for refused in [1, 2, 2, 2] {
            let mut progress = SinkProgress::default();
            collector.send(b"one\ntwo\n", &mut progress).unwrap();
            assert_eq!((progress.sent, progress.refused), (2, refused));
        }
        assert_eq!(serving.join().unwrap().len(), 4);
    }

    #[test]
    fn a_large_batch_is_divided() {
        let (long, short) = (vec![b'x'; MOST_BYTES + 1], b"s\n");
        assert_eq!(lines_of_request(&[&long, short]), 1, "a longer line goes alone");
        assert_eq!(lines_of_request(&[short, &long]), 1);
        assert_eq!(lines_of_request(&vec![&short[..]; MOST_LINES + 1]), MOST_LINES);
        assert_eq!(lines_of_request(&[short, short]), 2);
    }
}
