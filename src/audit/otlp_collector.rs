//! A collector that takes records as OTLP logs.
//!
//! Owns: the division of a batch into requests, and the meaning of an answer. Must not know: the contents of
//! a record, the queue of the sink, HTTP connections. Invariant: lines are counted as sent after the answer
//! to their request.
//!
//! <https://github.com/open-telemetry/opentelemetry-proto>

use std::io;

use http::StatusCode;
use prost::Message as _;

use super::otlp_request::logs_request;
use super::record::Timestamp;
use super::sink_progress::SinkProgress;
use crate::config::audit_settings::AuditCollector;
use crate::otlp::collector::CollectorClient;
use crate::telemetry::otlp_messages::OtlpAnswer;

/// Lines in one request. The Collector's own limit on a request is 20 MiB.
const MOST_LINES: usize = 1000;
/// Bytes of lines in one request. A longer line goes alone.
const MOST_BYTES: usize = 1 << 20;
/// Characters of a collector's message in the log.
const LONGEST_MESSAGE: usize = 200;

/// The collector of the audit log.
pub(super) struct OtlpCollector {
    client: CollectorClient,
    replica: String,
    /// True after a refused record, until the next answer without one: a series is logged once.
    refuses: bool,
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
    pub(super) fn new(settings: &AuditCollector, replica: &str) -> io::Result<Self> {
        let client = CollectorClient::new(&settings.collector, settings.path.clone())?;
        Ok(Self { client, replica: replica.to_owned(), refuses: false })
    }

    /// Sends the lines from the first unsent one on.
    ///
    /// # Errors
    /// The collector is gone, or refuses for now: the remaining lines may be sent again. Without an answer,
    /// the collector may have the lines already: a line that comes twice has the same number, a lost line is
    /// gone.
    pub(super) fn send(&mut self, lines: &[u8], progress: &mut SinkProgress) -> io::Result<()> {
        let lines: Vec<&[u8]> = lines.split_inclusive(|byte| *byte == b'\n').collect();
        let mut rest = lines.get(progress.sent_lines()..).unwrap_or_default();
        while !rest.is_empty() {
            let (now, later) = rest.split_at(lines_of_request(rest));
            let without_ends = now.iter().map(|line| line.strip_suffix(b"\n").unwrap_or(line));
            let request = logs_request(&self.replica, without_ends, Timestamp::now()).encode_to_vec();
            let (status, answer) = self.client.exchange(&request.into())?;
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
        let answer = OtlpAnswer::decode(answer).unwrap_or_default().partial_success.unwrap_or_default();
        let refused = u64::try_from(answer.rejected).unwrap_or(0).min(lines);
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
    use crate::config::collector_settings::CollectorSettings;
    use crate::config::{Endpoint, Scheme};
    use crate::telemetry::otlp_messages::{OtlpLogsRequest, OtlpPartialSuccess, OtlpValueKind};
    use http::uri::PathAndQuery;

    struct ScriptedAnswer {
        status: &'static str,
        refused: i64,
    }

    const OK: ScriptedAnswer = ScriptedAnswer { status: "200 OK", refused: 0 };

    /// Answers one request each, and returns the bodies of the log records of each request. Without an answer,
    /// the connection is closed behind the request.
    fn collector(answers: Vec<Option<ScriptedAnswer>>) -> (SocketAddr, JoinHandle<Vec<Vec<String>>>) {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let serving = thread::spawn(move || {
            let mut connection = None;
            let mut requests = Vec::new();
            for answer in answers {
                let mut stream =
                    connection.take().unwrap_or_else(|| BufReader::new(listener.accept().unwrap().0));
                requests.push(request(&mut stream));
                let Some(answer) = answer else { continue };
                let partial_success = (answer.refused > 0).then(|| OtlpPartialSuccess {
                    rejected: answer.refused,
                    error_message: "too old".into(),
                });
                let body = OtlpAnswer { partial_success }.encode_to_vec();
                let head = format!("HTTP/1.1 {}\r\ncontent-length: {}\r\n\r\n", answer.status, body.len());
                stream.get_mut().write_all(&[head.as_bytes(), &body].concat()).unwrap();
                connection = Some(stream);
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
        let collector = CollectorSettings { endpoint, tls: None, headers: Vec::new() };
        OtlpCollector::new(&AuditCollector { collector, path }, "a").unwrap()
    }

    #[test]
    fn lines_are_sent_again_after_a_refusal_for_now_and_past_a_kept_connection_that_closes() {
        let unavailable = ScriptedAnswer { status: "503 Service Unavailable", ..OK };
        let (address, serving) = collector(vec![Some(OK), None, Some(unavailable), Some(OK), Some(OK)]);
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
        let three = || vec!["three"];
        let requests = [vec!["one", "two"], three(), three(), three(), vec!["four"]];
        assert_eq!(
            serving.join().unwrap(),
            requests,
            "the connection closed before the first answer to three"
        );
    }

    #[test]
    fn lines_refused_for_good_are_counted_and_not_repeated() {
        let answers = [("200 OK", 1), ("200 OK", 99), ("400 Bad Request", 0), ("413 Payload Too Large", 0)];
        let answers = answers.map(|(status, refused)| Some(ScriptedAnswer { status, refused }));
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
