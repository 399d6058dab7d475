//! A collector that takes records as OTLP logs.
//!
//! Owns: the division of lines into requests, and the count of what an answer means. Must not know: the
//! contents of a record, where the lines come from, HTTP connections. Invariant: lines are counted as sent
//! after the answer to their request.
//!
//! <https://github.com/open-telemetry/opentelemetry-proto>

use std::io;
use std::time::{Duration, SystemTime};

use http::StatusCode;
use http::uri::PathAndQuery;
use prost::Message as _;

use super::otlp_request::logs_request;
use super::record::Timestamp;
use super::sink_progress::{SinkError, SinkProgress};
use crate::otlp::collector::CollectorClient;
use crate::otlp::collector_access::CurrentCollectorAccess;
use crate::otlp::verdict::{OtlpVerdict, verdict};

/// The collector of the audit log.
pub(super) struct OtlpCollector {
    client: CollectorClient,
    replica: String,
    /// Lines in one request at most; fewer for a while after a request that was too large.
    most_lines: usize,
    /// True after a refused record, until the next answer without one: a series is logged once.
    refuses: bool,
}

impl OtlpCollector {
    /// # Errors
    /// The operating system gives no resources.
    pub(super) fn new(
        collector: CurrentCollectorAccess,
        path: PathAndQuery,
        replica: &str,
    ) -> io::Result<Self> {
        let client = CollectorClient::new(collector, path)?;
        Ok(Self { client, replica: replica.to_owned(), most_lines: usize::MAX, refuses: false })
    }

    /// Sends the lines from the first unsent one on, in one request, or in several where a proxy takes no
    /// such large one.
    ///
    /// # Errors
    /// The collector is gone, or refuses for now: the remaining lines may be sent again. Without an answer,
    /// the collector may have the lines already: a line that comes twice has the same number, a lost line is
    /// gone.
    pub(super) fn send(&mut self, lines: &[u8], progress: &mut SinkProgress) -> Result<(), SinkError> {
        let lines: Vec<&[u8]> = lines.split_inclusive(|byte| *byte == b'\n').collect();
        let mut rest = lines.get(progress.sent_lines()..).unwrap_or_default();
        while !rest.is_empty() {
            let (now, later) = rest.split_at(rest.len().min(self.most_lines));
            let without_ends = now.iter().map(|line| line.strip_suffix(b"\n").unwrap_or(line));
            let request = logs_request(&self.replica, without_ends, Timestamp::now()).encode_to_vec();
            let answer = self.client.exchange(&request.into())?;
            let (status, count) = (answer.status, now.len() as u64);
            let (refused, message) = match verdict(&answer, count, SystemTime::now()) {
                OtlpVerdict::Taken { refused, message } => (refused, message),
                OtlpVerdict::Refused { message } => (count, message),
                OtlpVerdict::TooLarge => {
                    self.most_lines = (now.len() / 2).max(1);
                    continue;
                }
                OtlpVerdict::Again(after) => return Err(refusal(status, after)),
            };
            self.note_refused(refused, status, &message);
            progress.sent += count;
            progress.refused += refused;
            rest = later;
        }
        self.most_lines = self.most_lines.saturating_mul(2);
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

fn refusal(status: StatusCode, after: Duration) -> SinkError {
    let error = if status.is_success() {
        format!(
            "the answer {status} is none of OTLP: is the URL right, and no proxy or login page before it?"
        )
    } else {
        format!("the collector answers {status}")
    };
    SinkError { error: io::Error::other(error), after }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Write as _};
    use std::net::{Ipv4Addr, SocketAddr, TcpListener};
    use std::thread::{self, JoinHandle};

    use super::*;
    use crate::otlp::collector_access::CollectorAccess;
    use keyward_config::collector_settings::CollectorSettings;
    use keyward_config::{Endpoint, Scheme};
    use keyward_dial::names::NameResolver;
    use keyward_telemetry::otlp_messages::{OtlpAnswer, OtlpLogsRequest, OtlpPartialSuccess, OtlpValueKind};

    struct ScriptedAnswer {
        status: &'static str,
        refused: i64,
    }

    const OK: ScriptedAnswer = ScriptedAnswer { status: "200 OK", refused: 0 };

    /// Answers one request each, and returns the bodies of the log records of each request. Without an
    /// answer, the connection is closed behind the request.
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
                let head = format!(
                    "HTTP/1.1 {}\r\ncontent-type: application/x-protobuf\r\ncontent-length: {}\r\n\r\n",
                    answer.status,
                    body.len()
                );
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
        let access = CollectorAccess::new(&collector, &NameResolver::of_machine(None)).unwrap();
        OtlpCollector::new(access.in_force(), path, "a").unwrap()
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
            (error.error.to_string(), progress.sent),
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
        let answers = [("200 OK", 1), ("200 OK", 99), ("400 Bad Request", 0)];
        let answers = answers.map(|(status, refused)| Some(ScriptedAnswer { status, refused }));
        let (address, serving) = collector(answers.into());
        let mut collector = sending_to(address);
        for refused in [1, 2, 2] {
            let mut progress = SinkProgress::default();
            collector.send(b"one\ntwo\n", &mut progress).unwrap();
            assert_eq!((progress.sent, progress.refused), (2, refused));
        }
        assert_eq!(serving.join().unwrap().len(), 3);
    }

    #[test]
    fn a_request_that_is_too_large_is_divided_and_a_single_line_is_not_given_up() {
        let large = || Some(ScriptedAnswer { status: "413 Payload Too Large", ..OK });
        let answers = vec![large(), large(), Some(OK), Some(OK), Some(OK), Some(OK)];
        let (address, serving) = collector(answers);
        let (mut collector, mut progress) = (sending_to(address), SinkProgress::default());
        collector.send(b"1\n2\n3\n4\n", &mut progress).unwrap();
        assert_eq!((progress.sent, progress.refused), (4, 0));
        let sizes: Vec<_> = serving.join().unwrap().iter().map(Vec::len).collect();
        assert_eq!(sizes, [4, 2, 1, 1, 1, 1]);
    }
}
