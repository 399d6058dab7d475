//! The thread that sends spans or log records to a collector.
//!
//! Owns: the division of a batch into requests, repetitions, and the count of losses. Must not know: the
//! facts in a span or a record. Invariants: no call waits for this thread; a request is sent a bounded number
//! of times; an item that the collector does not take is counted; a series of failures is logged once.

use std::io;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use bytes::Bytes;
use http::uri::PathAndQuery;

use crate::otlp::collector::CollectorClient;
use crate::otlp::collector_access::CurrentCollectorAccess;
use crate::otlp::verdict::{OtlpVerdict, verdict};
use keyward_telemetry::export_metrics::ExportMetrics;
use keyward_telemetry::export_queue::{ExportBatch, ExportGuard, ExportQueue};

/// Items in one request. The Collector's own limit on a request is 20 MiB.
const MOST_ITEMS: usize = 512;
/// How often a request is sent while the collector takes none.
const ATTEMPTS: u32 = 3;
/// The pause between two attempts.
const RETRY: Duration = Duration::from_secs(1);

/// A kind of items: spans or log records.
pub struct ExportedSignal<T> {
    /// The name in metrics and in the log.
    pub name: &'static str,
    /// The path of requests.
    pub path: PathAndQuery,
    /// Encodes the body of a request of this replica.
    pub encode: fn(replica: &str, items: &[T]) -> Vec<u8>,
}

/// The sending thread.
struct Exporter<T> {
    signal: ExportedSignal<T>,
    queue: Arc<ExportQueue<T>>,
    client: CollectorClient,
    replica: String,
    metrics: ExportMetrics,
    fails: bool,
    /// True after refused items, until the next answer without any: a series is logged once.
    refuses: bool,
    /// The collector asked for no request before this time.
    not_before: Option<Instant>,
}

/// The outcome of a request.
enum SentRequest {
    /// The collector has the items, except for this number.
    Taken { refused: u64 },
    /// The items may be sent in smaller requests.
    TooLarge,
    /// The collector did not take the request.
    Unsent,
}

/// Starts the thread that sends the items of `queue`. The guard sends the last items when dropped.
///
/// # Errors
/// The thread cannot be started.
pub fn start<T: Send + 'static>(
    signal: ExportedSignal<T>,
    queue: Arc<ExportQueue<T>>,
    collector: CurrentCollectorAccess,
    replica: &str,
    metrics: ExportMetrics,
) -> io::Result<ExportGuard<T>> {
    queue.count_losses_in(metrics.lost(signal.name, "queue_full"));
    let client = CollectorClient::new(collector, signal.path.clone())?;
    let guard = ExportGuard(Arc::clone(&queue));
    let name = format!("otlp {}", signal.name);
    let (replica, fails, refuses, not_before) = (replica.to_owned(), false, false, None);
    let exporter = Exporter { signal, queue, client, replica, metrics, fails, refuses, not_before };
    thread::Builder::new().name(name).spawn(move || exporter.run())?;
    Ok(guard)
}

impl<T> Exporter<T> {
    fn run(mut self) {
        while let Some(batch) = self.queue.take() {
            self.send(&batch);
            self.queue.release(batch);
        }
        self.queue.end();
    }

    fn send(&mut self, batch: &ExportBatch<T>) {
        batch.items.chunks(MOST_ITEMS).for_each(|items| self.send_items(items));
    }

    fn send_items(&mut self, items: &[T]) {
        let body = Bytes::from((self.signal.encode)(&self.replica, items));
        let (count, name) = (items.len() as u64, self.signal.name);
        match self.send_request(&body, count) {
            SentRequest::Taken { refused } => {
                self.metrics.sent(name).inc_by(count - refused);
                self.metrics.lost(name, "refused").inc_by(refused);
            }
            // Halves of halves: a request has `MOST_ITEMS` items at most.
            SentRequest::TooLarge => {
                let (first, second) = items.split_at(items.len() / 2);
                self.send_items(first);
                self.send_items(second);
            }
            SentRequest::Unsent => {
                self.metrics.lost(name, "unsent").inc_by(count);
            }
        }
    }

    /// Sends a request, several times if needed.
    fn send_request(&mut self, body: &Bytes, items: u64) -> SentRequest {
        // While the collector fails, later requests do not wait for it again and again.
        let attempts = if self.fails { 1 } else { ATTEMPTS };
        for attempt in 1..=attempts {
            let left = self.not_before.take().map(|at| at.saturating_duration_since(Instant::now()));
            if !left.is_none_or(|left| self.queue.pause(left)) {
                return SentRequest::Unsent;
            }
            let (error, after) = match self.client.exchange(body) {
                Ok(answer) => match verdict(&answer, items, SystemTime::now()) {
                    OtlpVerdict::Taken { refused, message } => {
                        self.note_taken(refused, &message);
                        return SentRequest::Taken { refused };
                    }
                    OtlpVerdict::Refused { message } => {
                        self.note_taken(items, &message);
                        return SentRequest::Taken { refused: items };
                    }
                    OtlpVerdict::TooLarge => return SentRequest::TooLarge,
                    OtlpVerdict::Again(after) => {
                        (io::Error::other(format!("the collector answers {}", answer.status)), after)
                    }
                },
                Err(error) => (error, Duration::ZERO),
            };
            if !std::mem::replace(&mut self.fails, true) {
                tracing::warn!(signal = self.signal.name, %error, "the collector takes no telemetry");
            }
            self.not_before = (!after.is_zero()).then(|| Instant::now() + after);
            if attempt < attempts && !self.queue.pause(RETRY) {
                return SentRequest::Unsent;
            }
        }
        SentRequest::Unsent
    }

    /// Logs the end of a series of failures, and the begin of a series of refused items.
    fn note_taken(&mut self, refused: u64, message: &str) {
        let signal = self.signal.name;
        if std::mem::take(&mut self.fails) {
            tracing::info!(signal, "the collector takes telemetry again");
        }
        if !std::mem::replace(&mut self.refuses, refused > 0) && refused > 0 {
            tracing::error!(signal, refused, message, "the collector refuses telemetry for good");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead as _, BufReader, Read as _, Write as _};
    use std::net::{Ipv4Addr, TcpListener};
    use std::sync::mpsc::{Receiver, channel};

    use super::*;
    use crate::otlp::collector_access::CollectorAccess;
    use keyward_config::collector_settings::CollectorSettings;
    use keyward_config::{Endpoint, Scheme};
    use keyward_dial::names::NameResolver;
    use keyward_telemetry::metrics::Metrics;

    /// A collector that treats each connection, with its number, as `serve` says.
    fn collector(
        serve: impl Fn(usize, BufReader<std::net::TcpStream>) + Send + 'static,
    ) -> CollectorSettings {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        thread::spawn(move || {
            for number in 0.. {
                let Ok((stream, _)) = listener.accept() else { return };
                serve(number, BufReader::new(stream));
            }
        });
        let endpoint = Endpoint { scheme: Scheme::Http, host: "127.0.0.1".into(), port };
        CollectorSettings { endpoint, tls: None, headers: Vec::new() }
    }

    /// Reads a request, and returns its body; `None` at the end of the connection.
    fn body_of(stream: &mut BufReader<std::net::TcpStream>) -> Option<Vec<u8>> {
        let mut length = 0;
        loop {
            let mut line = String::new();
            if stream.read_line(&mut line).ok()? == 0 {
                return None;
            }
            if line == "\r\n" {
                break;
            }
            if let Some(told) = line.to_ascii_lowercase().strip_prefix("content-length: ") {
                length = told.trim().parse().unwrap();
            }
        }
        let mut body = vec![0; length];
        stream.read_exact(&mut body).ok()?;
        Some(body)
    }

    fn exporting(settings: &CollectorSettings) -> (Arc<ExportQueue<u8>>, ExportGuard<u8>, ExportMetrics) {
        let metrics = Metrics::new(Vec::new()).export;
        let queue = Arc::new(ExportQueue::new(64));
        let encode = |_: &str, items: &[u8]| items.to_vec();
        let signal = ExportedSignal { name: "spans", path: PathAndQuery::from_static("/v1/traces"), encode };
        let guard = start(
            signal,
            Arc::clone(&queue),
            CollectorAccess::new(settings, &NameResolver::of_machine(None)).unwrap().in_force(),
            "a",
            metrics.clone(),
        )
        .unwrap();
        (queue, guard, metrics)
    }

    /// Ends the exporter without the guard's limit.
    fn end(queue: &ExportQueue<u8>, guard: ExportGuard<u8>) {
        queue.close(Duration::from_secs(24 * 3600));
        drop(guard);
    }

    fn answering(status: &'static str) -> (CollectorSettings, Receiver<Vec<u8>>) {
        let (bodies, received) = channel();
        let settings = collector(move |_, mut stream| {
            while let Some(body) = body_of(&mut stream) {
                bodies.send(body).unwrap();
                let head = format!("HTTP/1.1 {status}\r\ncontent-length: 0\r\n\r\n");
                stream.get_mut().write_all(head.as_bytes()).unwrap();
            }
        });
        (settings, received)
    }

    #[test]
    fn the_end_sends_the_last_items_at_once() {
        let (settings, received) = answering("200 OK");
        let (queue, guard, metrics) = exporting(&settings);
        (0..3).for_each(|item| queue.push(item, 1));
        end(&queue, guard);
        assert_eq!(received.try_iter().flatten().collect::<Vec<_>>(), [0, 1, 2]);
        assert_eq!(metrics.sent("spans").get(), 3);
    }

    #[test]
    fn items_refused_for_good_are_not_repeated_and_are_counted() {
        let (settings, received) = answering("400 Bad Request\r\ncontent-type: application/x-protobuf");
        let (queue, guard, metrics) = exporting(&settings);
        queue.push(7, 1);
        end(&queue, guard);
        assert_eq!(received.try_iter().count(), 1);
        assert_eq!((metrics.sent("spans").get(), metrics.lost("spans", "refused").get()), (0, 1));
    }

    #[test]
    fn a_request_refused_for_now_is_repeated_a_few_times_and_then_counted_as_unsent() {
        let (settings, received) = answering("503 Service Unavailable");
        let (queue, guard, metrics) = exporting(&settings);
        queue.push(7, 1);
        // An earlier end would leave attempts out.
        (0..ATTEMPTS).for_each(|_| drop(received.recv().unwrap()));
        end(&queue, guard);
        assert_eq!((metrics.lost("spans", "unsent").get(), received.try_iter().count()), (1, 0));
    }

    /// A page in the place of an answer, and a 400 without the protocol's form: sent again, and not counted
    /// as sent.
    #[test]
    fn an_answer_that_is_not_the_protocols_takes_nothing_and_ends_nothing() {
        for answer in ["200 OK\r\ncontent-type: text/html", "400 Bad Request"] {
            let (bodies, received) = channel();
            let settings = collector(move |_, mut stream| {
                while let Some(body) = body_of(&mut stream) {
                    bodies.send(body).unwrap();
                    let head = format!("HTTP/1.1 {answer}\r\ncontent-length: 3\r\n\r\n<p>");
                    stream.get_mut().write_all(head.as_bytes()).unwrap();
                }
            });
            let (queue, guard, metrics) = exporting(&settings);
            queue.push(7, 1);
            (0..ATTEMPTS).for_each(|_| drop(received.recv().unwrap()));
            end(&queue, guard);
            let lost = |reason| metrics.lost("spans", reason).get();
            assert_eq!((metrics.sent("spans").get(), lost("refused"), lost("unsent")), (0, 0, 1), "{answer}");
        }
    }

    /// The next items wait, too.
    #[test]
    fn a_collector_that_names_a_time_is_asked_no_earlier() {
        let (settings, received) = answering("503 Service Unavailable\r\nretry-after: 300");
        let (queue, guard, metrics) = exporting(&settings);
        queue.push(7, 1);
        drop(received.recv().unwrap());
        queue.push(8, 1);
        end(&queue, guard);
        assert_eq!(received.try_iter().count(), 0);
        assert_eq!(metrics.lost("spans", "unsent").get(), 2);
    }

    /// The first answer is silence for a while, and then a body without an end, as every later one.
    #[test]
    fn a_silent_or_endless_collector_delays_no_push_and_bounds_the_memory() {
        let (requested, request) = channel();
        let (answer, answers) = channel::<()>();
        let (began, beginning) = channel();
        let settings = collector(move |_, mut stream| {
            drop(body_of(&mut stream));
            requested.send(()).unwrap();
            // After the first request all are answered at once.
            _ = answers.recv();
            let head = "HTTP/1.1 200 OK\r\ncontent-length: 1000000000\r\n\r\n";
            drop(stream.get_mut().write_all(head.as_bytes()));
            let (block, mut sent) = (vec![b'x'; 1 << 16], 0_u64);
            while sent < 1_000_000_000 && stream.get_mut().write_all(&block).is_ok() {
                sent += block.len() as u64;
            }
            began.send(sent).unwrap();
        });
        let (queue, guard, metrics) = exporting(&settings);
        queue.push(0, 1);
        request.recv().unwrap();
        // The queue has 64 bytes, one of which is on its way.
        (0..200).for_each(|item| queue.push(item, 1));
        assert_eq!(metrics.lost("spans", "queue_full").get(), 137);
        drop(answer);
        let read = beginning.recv().unwrap();
        assert!(read < 100_000_000, "the answer was given up early: {read}");
        drop(guard);
    }

    #[test]
    fn a_collector_that_answers_nothing_costs_the_end_of_the_process_two_seconds_at_most() {
        let (held, holding) = channel();
        let settings = collector(move |_, stream| held.send(stream).unwrap());
        let (queue, guard, metrics) = exporting(&settings);
        queue.push(0, 1);
        let silent = holding.recv().unwrap();
        (0..100).for_each(|item| queue.push(item, 1));
        assert_eq!(metrics.lost("spans", "queue_full").get(), 37);
        // Returns, although the request has no answer.
        drop(guard);
        drop(silent);
        assert_eq!(metrics.sent("spans").get(), 0);
    }
}
