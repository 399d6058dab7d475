//! Metrics of answers not yet read by clients.
//!
//! Owns: names and labels. Must not know: when an answer is given up.

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use crate::single_label::{SingleLabel, one};

/// Metrics of answers not yet read by clients.
#[derive(Clone)]
pub struct UnreadMetrics {
    /// Bytes of room taken.
    pub bytes: Gauge,
    /// Reads repeated because the buffer had no room for their answer.
    pub asked_again: Counter,
    given_up: Family<SingleLabel, Counter>,
}

/// Why an answer was given up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GiveUpReason {
    /// The client read no byte of the answer for `limits.unread_timeout`, and the room was needed, or the
    /// connection has too many such answers.
    ForTime,
    /// A connection holding less needed the room.
    ForRoom,
}

impl GiveUpReason {
    /// The name in metric labels and log records.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::ForTime => "time",
            Self::ForRoom => "room",
        }
    }
}

impl UnreadMetrics {
    pub(super) fn registered(registry: &mut Registry) -> Self {
        let figures =
            Self { bytes: Gauge::default(), asked_again: Counter::default(), given_up: Family::default() };
        let help = "Bytes of answers that clients have not read";
        registry.register("unread_answer_bytes", help, figures.bytes.clone());
        let help = "Reads made again since there was no room for their answer";
        registry.register("unread_answers_asked_again", help, figures.asked_again.clone());
        let help = "Answers given up since their client did not read them, by reason";
        registry.register("unread_answers_given_up", help, figures.given_up.clone());
        // From 0 on: the first answer given up is an increase.
        drop([GiveUpReason::ForTime, GiveUpReason::ForRoom].map(|why| figures.given_up(why)));
        figures
    }

    /// Answers given up for this reason.
    #[must_use]
    pub fn given_up(&self, why: GiveUpReason) -> Counter {
        self.given_up.get_or_create(&one("reason", why.name())).clone()
    }
}
