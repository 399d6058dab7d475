//! The register of conditions, with times as arguments and with records of a real log.

use tracing_subscriber::layer::SubscriberExt as _;

use super::*;
use crate::telemetry::log_listener::with_log_listener;
use crate::telemetry::{LogLevel, LogSettings, subscriber};

const MINUTE: Duration = Duration::from_secs(60);

fn row(name: &str) -> &'static LoggedCondition {
    CONDITIONS.iter().find(|row| row.name == name).expect("a row")
}

fn names(register: &ConditionRegister, now: Instant) -> Vec<(&'static str, u64)> {
    register.standing(now).iter().map(|standing| (standing.row.name, standing.records)).collect()
}

#[test]
fn an_event_holds_for_ten_minutes_after_its_last_record_and_then_begins_anew() {
    let (register, now) = (ConditionRegister::default(), Instant::now());
    let note = |now| register.note(Level::WARN, row("login_failed").message, "user=a".into(), now);
    note(now);
    note(now + 5 * MINUTE);
    assert_eq!(names(&register, now + 14 * MINUTE), [("login_failed", 2)]);
    assert_eq!(names(&register, now + 15 * MINUTE), []);
    note(now + 16 * MINUTE);
    assert_eq!(names(&register, now + 17 * MINUTE), [("login_failed", 1)]);
}

#[test]
fn a_condition_with_an_end_holds_until_the_record_of_the_end() {
    let (register, now) = (ConditionRegister::default(), Instant::now());
    register.note(Level::ERROR, row("mint_fails").message, String::new(), now);
    register.note(Level::ERROR, row("panicked").message, String::new(), now);
    let late = now + 1000 * MINUTE;
    assert_eq!(names(&register, late), [("mint_fails", 1), ("panicked", 1)]);
    assert!(register.standing(late).iter().all(|standing| standing.is_error));
    register.note(Level::INFO, "certificates are minted again", String::new(), late);
    assert_eq!(names(&register, late), [("panicked", 1)], "no record ends a panic");
    let until = CONDITIONS.iter().filter(|row| matches!(row.telling, ConditionTelling::Until { .. }));
    assert!(until.count() > 4);
}

#[test]
fn a_record_is_a_condition_whatever_the_level_of_the_log_and_only_keywards_own() {
    for level in ["off", "error", "info", "trace"] {
        let register = Arc::new(ConditionRegister::default());
        let settings = LogSettings { level: level.parse::<LogLevel>().unwrap(), ..LogSettings::default() };
        let conditions = ConditionLayer::with(Arc::clone(&register)).with_filter(ConditionFilter);
        with_log_listener(subscriber(&settings, std::io::sink).with(conditions), || {
            tracing::warn!(target: "keyward::members", user = "a", count = 3, "login failed");
            tracing::error!(target: "h2::codec", "a thread panicked");
            tracing::warn!(target: ACCESS, "no leader is known");
            tracing::warn!(target: "keyward::members", "a record without a row");
            tracing::info!(target: "keyward::members", "no member answers");
        });
        let standing = register.standing(Instant::now());
        let [only] = &standing[..] else { panic!("{level}: {standing:?}") };
        assert_eq!((only.row.name, only.is_error, only.records), ("login_failed", false, 1), "{level}");
        assert_eq!(only.details, "user=a count=3");
    }
}

#[test]
fn the_details_of_a_record_are_bounded() {
    let register = Arc::new(ConditionRegister::default());
    let conditions = ConditionLayer::with(Arc::clone(&register)).with_filter(ConditionFilter);
    with_log_listener(tracing_subscriber::registry().with(conditions), || {
        let long = "ü".repeat(10_000);
        tracing::warn!(target: "keyward", long, more = "cut", "login failed");
    });
    let standing = register.standing(Instant::now());
    assert!(standing[0].details.len() <= DETAILS + '…'.len_utf8(), "{}", standing[0].details.len());
    assert!(standing[0].details.starts_with("long=üü") && standing[0].details.ends_with('…'));
}

#[test]
fn names_and_messages_are_unique() {
    for (at, row) in CONDITIONS.iter().enumerate() {
        let others = &CONDITIONS[at + 1..];
        assert!(others.iter().all(|other| other.name != row.name && other.message != row.message), "{row:?}");
    }
}
