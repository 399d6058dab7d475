//! The register of conditions, with times as arguments and with records of a real log.

use tracing_subscriber::layer::SubscriberExt as _;

use super::*;
use crate::log_listener::with_log_listener;
use crate::{LogLevel, LogSettings, subscriber};

const MINUTE: Duration = Duration::from_secs(60);

fn row(name: &str) -> &'static LoggedCondition {
    CONDITIONS.iter().find(|row| row.name == name).expect("a row")
}

fn note(register: &ConditionRegister, level: Level, message: &str, details: &str, now: Instant) {
    let (message, details) = (message.to_owned(), details.to_owned());
    let names = details.split(' ').filter_map(|field| field.split_once('='));
    let is_subject = |(field, _): &(&str, &str)| *field == "member";
    let subjects = names.filter(is_subject).map(|(_, name)| ("member", name.to_owned())).collect();
    register.note(level, RecordText { message, details, subjects }, now);
}

fn names(register: &ConditionRegister, now: Instant) -> Vec<(&'static str, u64)> {
    register.standing(now).iter().map(|standing| (standing.row.name, standing.records)).collect()
}

#[test]
fn an_event_holds_for_ten_minutes_after_its_last_record_and_then_begins_anew() {
    let (register, now) = (ConditionRegister::default(), Instant::now());
    let failed = |now| note(&register, Level::WARN, row("login_failed").message, "user=a", now);
    failed(now);
    failed(now + 5 * MINUTE);
    assert_eq!(names(&register, now + 14 * MINUTE), [("login_failed", 2)]);
    assert_eq!(names(&register, now + 15 * MINUTE), []);
    failed(now + 16 * MINUTE);
    assert_eq!(names(&register, now + 17 * MINUTE), [("login_failed", 1)]);
}

#[test]
fn a_condition_with_an_end_holds_until_the_record_of_the_end() {
    let (register, now) = (ConditionRegister::default(), Instant::now());
    note(&register, Level::ERROR, row("mint_fails").message, "", now);
    note(&register, Level::ERROR, row("panicked").message, "", now);
    let late = now + 1000 * MINUTE;
    assert_eq!(names(&register, late), [("mint_fails", 1), ("panicked", 1)]);
    assert!(register.standing(late).iter().all(|standing| standing.is_error));
    note(&register, Level::INFO, "certificates are minted again", "", late);
    assert_eq!(names(&register, late), [("panicked", 1)], "no record ends a panic");
    let until = CONDITIONS.iter().filter(|row| matches!(row.telling, ConditionTelling::Until { .. }));
    assert!(until.count() > 4);
}

/// Each record that tells an end ends what it names, within the ten minutes of an event or of a check too.
#[test]
fn every_end_ends_its_conditions_at_once() {
    for end in CONDITION_ENDS {
        let (register, now) = (ConditionRegister::default(), Instant::now());
        for name in end.conditions {
            note(&register, Level::WARN, row(name).message, "", now);
        }
        note(&register, Level::WARN, row("login_failed").message, "", now);
        assert_eq!(register.standing(now).len(), end.conditions.len() + 1, "{end:?}");
        note(&register, Level::INFO, end.message, "", now);
        assert_eq!(names(&register, now), [("login_failed", 1)], "{end:?}");
    }
    assert!(CONDITION_ENDS.len() > 25);
}

#[test]
fn the_end_of_one_member_ends_the_condition_of_no_other() {
    let (register, now) = (ConditionRegister::default(), Instant::now());
    let unready = row("member_not_ready").message;
    note(&register, Level::WARN, unready, "member=1 name=m1", now);
    note(&register, Level::WARN, unready, "member=3 name=m3", now + MINUTE);
    note(&register, Level::WARN, unready, "member=1 name=m1", now + 2 * MINUTE);
    let told =
        |now| register.standing(now).into_iter().map(|it| (it.records, it.details)).collect::<Vec<_>>();
    assert_eq!(told(now + 2 * MINUTE), [(3, "member=1 name=m1".to_owned())], "one row, the last record");
    note(&register, Level::INFO, "member is ready", "member=1 name=m1", now + 3 * MINUTE);
    assert_eq!(told(now + 3 * MINUTE), [(1, "member=3 name=m3".to_owned())]);
    note(&register, Level::INFO, "member left", "member=3 name=m3", now + 4 * MINUTE);
    assert_eq!(told(now + 4 * MINUTE), []);
}

#[test]
fn a_row_is_kept_apart_for_a_bounded_number_of_subjects() {
    let (register, now) = (ConditionRegister::default(), Instant::now());
    for member in 0..3 * SUBJECTS {
        note(&register, Level::WARN, row("member_not_ready").message, &format!("member={member}"), now);
    }
    assert_eq!(register.0.lock().unwrap().len(), SUBJECTS + 1, "the rest is counted together");
    assert_eq!(names(&register, now), [("member_not_ready", 3 * SUBJECTS as u64)]);
    assert_eq!(names(&register, now + 10 * MINUTE), []);
}

/// A record of a real log has its subject as the field says, with `%`, as a text, or in an `Option`.
#[test]
fn the_subject_is_read_from_the_field_of_the_record() {
    let register = Arc::new(ConditionRegister::default());
    let conditions = ConditionLayer::with(Arc::clone(&register)).with_filter(ConditionFilter);
    with_log_listener(tracing_subscriber::registry().with(conditions), || {
        let standing = || register.standing(Instant::now()).len();
        tracing::warn!(target: "keyward", member = %7, name = Some("m7"), "member is not ready");
        tracing::info!(target: "keyward", member = %8, name = Some("m8"), "member is ready");
        assert_eq!(standing(), 1);
        tracing::info!(target: "keyward", member = %7, name = Some("m7"), "member is ready");
        assert_eq!(standing(), 0);
        tracing::error!(target: "keyward", sink = "otlp", "audit records are not accepted");
        tracing::info!(target: "keyward", sink = "syslog", "audit records are accepted again");
        assert_eq!(standing(), 1);
        tracing::info!(target: "keyward", sink = "otlp", "audit records are accepted again");
        assert_eq!(standing(), 0);
    });
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

#[test]
fn every_end_names_conditions_and_all_ends_of_one_have_the_same_subject() {
    for end in CONDITION_ENDS {
        for name in end.conditions {
            assert!(row(name).ends().all(|other| other.subject == end.subject), "{name}");
            let telling = &row(name).telling;
            assert!(!matches!(telling, ConditionTelling::Lasting { .. }), "{name} has an end");
        }
    }
    for row in CONDITIONS.iter().filter(|row| matches!(row.telling, ConditionTelling::Until { .. })) {
        assert!(row.ends().next().is_some(), "{} would hold for ever", row.name);
    }
}
