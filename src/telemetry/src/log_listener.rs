//! Tests that listen to log lines, beside other tests in the same process.
//!
//! Owns: the condition under which a line reaches the listener of its thread. Must not know: records.

use std::sync::OnceLock;

use tracing::{Dispatch, Subscriber};
use tracing_subscriber::filter::dynamic_filter_fn;
use tracing_subscriber::layer::SubscriberExt as _;

/// Runs `log` while `subscriber` listens on this thread.
///
/// `tracing` asks at the first use of a log line which subscribers want the line, and keeps the answer. While
/// the process has one subscriber at most, `tracing` asks the subscriber of the asking thread alone: a test
/// without a listener would silence the line for the threads of all tests. Two further subscribers end both:
/// then `tracing` asks all subscribers, and these two want no line and want to be asked each time.
pub fn with_log_listener<T>(
    subscriber: impl Subscriber + Send + Sync + 'static,
    log: impl FnOnce() -> T,
) -> T {
    static ASKED_EACH_TIME: OnceLock<[Dispatch; 2]> = OnceLock::new();
    ASKED_EACH_TIME.get_or_init(|| {
        [(); 2].map(|()| Dispatch::new(tracing_subscriber::registry().with(dynamic_filter_fn(|_, _| false))))
    });
    tracing::subscriber::with_default(subscriber, log)
}

#[cfg(test)]
mod tests {
    use crate::LogSettings;
    use crate::tests::logged;

    #[test]
    fn a_line_is_heard_although_a_thread_without_a_listener_logged_it_first() {
        let lines = logged(LogSettings::default(), || {
            let log = || tracing::info!(target: "keyward", "the same line");
            std::thread::scope(|scope| scope.spawn(log).join().expect("no panic"));
            log();
        });
        assert_eq!(lines.len(), 1, "{lines:?}");
    }
}
