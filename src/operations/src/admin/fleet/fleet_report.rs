//! The answers of all replicas, side by side for an operator.
//!
//! Owns: joining views and statuses, the lines of orders, and what the answers mean together. Must not know:
//! how replicas are asked. Invariants: a replica without an answer is named with its reason, and its absence
//! is never taken for "nothing there"; texts of answers are escaped.

use std::fmt;

use serde::Serialize;

use crate::admin::socket_protocol::{AdminAnswer, ReplicaAnswer, ReplicaOutcome};
use crate::admin::status::{ReplicaState, ReplicaStatus};
use crate::admin::table::{TableColumn, TableWidth, TerminalTable};
use crate::admin::view::View;
use keyward_telemetry::printable::escaped;

/// A replica without an answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct UnansweredReplica {
    /// Its name, or its address.
    pub replica: String,
    /// The reason.
    pub why: String,
}

impl fmt::Display for UnansweredReplica {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.replica, self.why)
    }
}

/// The rows of all replicas for one topic, each with the field `replica`.
#[derive(Debug, Serialize)]
pub struct FleetView {
    /// The rows, and the time of the first replica's view.
    #[serde(flatten)]
    pub view: View,
    /// The replicas whose rows are missing.
    pub unanswered: Vec<UnansweredReplica>,
}

impl FleetView {
    /// Joins the views of all replicas, with rates since `earlier`; the replicas without an answer where no
    /// replica has a view.
    ///
    /// # Errors
    /// No replica has answered with a view.
    pub fn join(
        answers: Vec<ReplicaAnswer>,
        earlier: Option<&[ReplicaAnswer]>,
    ) -> Result<Self, Vec<UnansweredReplica>> {
        let (mut joined, mut unanswered): (Option<View>, Vec<UnansweredReplica>) = (None, Vec::new());
        for ReplicaAnswer { replica, addresses, outcome } in answers {
            let mut view = match answered(outcome) {
                Ok(AdminAnswer::View(view)) => view,
                Ok(other) => {
                    unanswered.push(UnansweredReplica { replica, why: line_of(&other) });
                    continue;
                }
                Err(why) => {
                    unanswered.push(UnansweredReplica { replica, why });
                    continue;
                }
            };
            let before = earlier.into_iter().flatten();
            let mut before =
                before.filter(|before| (&before.replica, &before.addresses) == (&replica, &addresses));
            if let Some(ReplicaOutcome::Answered(answer)) = before.next().map(|before| &before.outcome)
                && let AdminAnswer::View(before) = &**answer
            {
                view.add_rates(before);
            }
            for row in &mut view.rows {
                row.insert("replica".into(), replica.clone().into());
            }
            match &mut joined {
                Some(joined) => {
                    joined.rows.append(&mut view.rows);
                    joined.left_out += view.left_out;
                }
                None => joined = Some(View { is_of_replicas: true, ..view }),
            }
        }
        match joined {
            Some(view) => Ok(Self { view, unanswered }),
            None => Err(unanswered),
        }
    }
}

/// The status of each replica.
#[derive(Debug, Serialize)]
pub struct FleetStatus {
    replicas: Vec<FleetStatusRow>,
}

#[derive(Debug, Serialize)]
struct FleetStatusRow {
    replica: String,
    /// Its admin addresses among those of `admin.replicas`.
    addresses: Vec<String>,
    /// Null without an answer.
    status: Option<Box<ReplicaStatus>>,
    /// The reason for the lack of an answer.
    why: Option<String>,
}

impl FleetStatus {
    /// The statuses among the answers.
    #[must_use]
    pub fn of(answers: Vec<ReplicaAnswer>) -> Self {
        let row = |ReplicaAnswer { replica, addresses, outcome }| match answered(outcome) {
            Ok(AdminAnswer::Status(status)) => {
                FleetStatusRow { replica, addresses, status: Some(status), why: None }
            }
            Ok(other) => FleetStatusRow { replica, addresses, status: None, why: Some(line_of(&other)) },
            Err(why) => FleetStatusRow { replica, addresses, status: None, why: Some(why) },
        };
        Self { replicas: answers.into_iter().map(row).collect() }
    }

    /// True if every replica has answered, and serves.
    #[must_use]
    pub fn is_serving(&self) -> bool {
        let serves = |row: &FleetStatusRow| {
            let state = row.status.as_ref().map(|status| status.replica.state);
            matches!(state, Some(ReplicaState::Serving | ReplicaState::Degraded))
        };
        self.replicas.iter().all(serves)
    }

    /// A row for each replica, then the members with an alarm or a reason against them.
    #[must_use]
    pub fn text(&self, width: TableWidth) -> String {
        let heads = [
            TableColumn::exact("REPLICA", 0),
            TableColumn::text("STATE", 1),
            TableColumn::exact("VERSION", 7),
            TableColumn::text("MEMBERS", 3),
            TableColumn::number("CONNECTIONS", 4),
            TableColumn::number("CALLS", 5),
            TableColumn::number("STREAMS", 6),
            TableColumn::text("WHY NOT", 2),
        ];
        let mut table = TerminalTable::new(&heads, width);
        let mut unready = String::new();
        for row in &self.replicas {
            let Some(status) = &row.status else {
                let why = row.why.clone().unwrap_or_default();
                let empty = String::new;
                let state = "no answer".to_owned();
                table.row([row.replica.clone(), state, empty(), empty(), empty(), empty(), empty(), why]);
                continue;
            };
            let ready = status.members.iter().filter(|member| member.gets_calls()).count();
            let replica = &status.replica;
            table.row([
                row.replica.clone(),
                state_text(replica.state).to_owned(),
                replica.version.clone(),
                format!("{ready} of {} ready", status.members.len() + status.absent.len()),
                replica.connections.to_string(),
                replica.calls.to_string(),
                replica.streams.to_string(),
                replica.why.clone().unwrap_or_default(),
            ]);
            for member in status.members.iter().filter(|member| !member.why_text().is_empty()) {
                let name = if member.name.is_empty() { &member.id } else { &member.name };
                let why = member.why_text();
                let why = escaped(&why);
                unready += &format!("{}: member {}: {why}\n", row.replica, escaped(name));
            }
        }
        format!("{table}{unready}")
    }
}

const fn state_text(state: ReplicaState) -> &'static str {
    match state {
        ReplicaState::Serving => "serving",
        ReplicaState::Degraded => "degraded",
        ReplicaState::NotReady => "not ready",
        ReplicaState::Draining => "draining",
    }
}

/// The outcome of an order at each replica.
#[derive(Debug)]
pub struct FleetOutcomes(pub Vec<ReplicaAnswer>);

/// The meaning of all outcomes of an order together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FleetVerdict {
    /// Every replica has answered, and one at least has done something.
    Done,
    /// Every replica has answered, and none had anything to do.
    Idle,
    /// A replica was not reached, or refused.
    Incomplete,
    /// A replica was asked and has not answered: the order may be in force there.
    Unknown,
}

impl FleetOutcomes {
    /// The verdict; the worst outcome counts.
    #[must_use]
    pub fn verdict(&self) -> FleetVerdict {
        let mut verdict = FleetVerdict::Idle;
        for outcome in self.0.iter().map(|answer| &answer.outcome) {
            let next = match outcome {
                ReplicaOutcome::Unknown(_) => return FleetVerdict::Unknown,
                ReplicaOutcome::Unreached(_) => FleetVerdict::Incomplete,
                ReplicaOutcome::Answered(answer) => match &**answer {
                    AdminAnswer::Done(_) => FleetVerdict::Done,
                    AdminAnswer::Idle(_) => FleetVerdict::Idle,
                    AdminAnswer::Unknown(_) => return FleetVerdict::Unknown,
                    _ => FleetVerdict::Incomplete,
                },
            };
            verdict = match (verdict, next) {
                (FleetVerdict::Incomplete, _) | (_, FleetVerdict::Incomplete) => FleetVerdict::Incomplete,
                (FleetVerdict::Done, _) | (_, FleetVerdict::Done) => FleetVerdict::Done,
                _ => FleetVerdict::Idle,
            };
        }
        verdict
    }
}

/// One line or more for each replica, each with its name.
impl fmt::Display for FleetOutcomes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for ReplicaAnswer { replica, outcome, .. } in &self.0 {
            let text = match outcome {
                ReplicaOutcome::Answered(answer) => text_of(answer).to_owned(),
                ReplicaOutcome::Unreached(why) => format!("not reached, so nothing was done there: {why}"),
                ReplicaOutcome::Unknown(why) => {
                    format!("asked, and it is not known what was done there: {why}")
                }
            };
            text.lines().try_for_each(|line| writeln!(f, "{replica}: {}", escaped(line)))?;
        }
        Ok(())
    }
}

/// The answer, or why there is none.
fn answered(outcome: ReplicaOutcome) -> Result<AdminAnswer, String> {
    match outcome {
        ReplicaOutcome::Answered(answer) => Ok(*answer),
        ReplicaOutcome::Unreached(why) | ReplicaOutcome::Unknown(why) => Err(why),
    }
}

/// The text of an answer that is a text.
fn text_of(answer: &AdminAnswer) -> &str {
    match answer {
        AdminAnswer::Done(text)
        | AdminAnswer::Idle(text)
        | AdminAnswer::Failed(text)
        | AdminAnswer::NotKept(text)
        | AdminAnswer::Unknown(text) => text,
        _ => "it answered something else: is it of this version?",
    }
}

fn line_of(answer: &AdminAnswer) -> String {
    escaped(text_of(answer))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::admin::view::ViewTopic;

    fn answer(replica: &str, outcome: ReplicaOutcome) -> ReplicaAnswer {
        ReplicaAnswer { replica: replica.into(), addresses: Vec::new(), outcome }
    }

    fn said(answer: AdminAnswer) -> ReplicaOutcome {
        ReplicaOutcome::Answered(Box::new(answer))
    }

    fn view(uptime_seconds: f64, calls: u64) -> ReplicaOutcome {
        said(AdminAnswer::View(View {
            schema_version: 1,
            topic: ViewTopic::Clients,
            taken_at: "2026-01-01T00:00:00Z".into(),
            uptime_seconds,
            rows: vec![json!({"client": 1, "calls": calls}).as_object().cloned().expect("a row")],
            left_out: 1,
            is_of_replicas: false,
        }))
    }

    #[test]
    fn rows_name_their_replica_and_rates_are_those_of_one_replica() {
        let earlier = [answer("a", view(10.0, 5)), answer("b", view(1000.0, 70))];
        let later = vec![
            answer("a", view(12.0, 25)),
            answer("b", view(1002.0, 70)),
            answer("c", ReplicaOutcome::Unreached("no answer within 1 s".into())),
        ];
        let joined = FleetView::join(later, Some(&earlier)).expect("two views");
        let rows: Vec<_> =
            joined.view.rows.iter().map(|row| (&row["replica"], &row["calls_per_second"])).collect();
        assert_eq!(rows, [(&json!("a"), &json!(10.0)), (&json!("b"), &json!(0.0))]);
        assert_eq!(joined.view.left_out, 2);
        let missing = UnansweredReplica { replica: "c".into(), why: "no answer within 1 s".into() };
        assert_eq!(joined.unanswered, [missing]);
        let table = joined.view.table(TableWidth::Wide);
        assert!(table.starts_with("REPLICA"), "{table}");
        let nothing = said(AdminAnswer::View(View { rows: Vec::new(), ..joined.view }));
        let empty = FleetView::join(vec![answer("a", nothing)], None).expect("a view");
        assert!(empty.view.table(TableWidth::Wide).starts_with("REPLICA"), "of no rows");
        let nobody = FleetView::join(vec![answer("a", said(AdminAnswer::Failed("a shard".into())))], None);
        assert_eq!(nobody.expect_err("no view")[0].to_string(), "a: a shard");
    }

    #[test]
    fn an_order_is_done_if_one_replica_had_something_to_do_and_none_is_missing() {
        let done = || said(AdminAnswer::Done("told\nto leave".into()));
        let idle = || said(AdminAnswer::Idle("no connection".into()));
        let refused = || said(AdminAnswer::Failed("no member".into()));
        let unreached = || ReplicaOutcome::Unreached("refused".into());
        let unknown = || ReplicaOutcome::Unknown("late".into());
        let verdict = |outcomes: Vec<ReplicaOutcome>| {
            FleetOutcomes(outcomes.into_iter().map(|outcome| answer("a", outcome)).collect()).verdict()
        };
        assert_eq!(verdict(vec![idle(), done(), idle()]), FleetVerdict::Done);
        assert_eq!(verdict(vec![idle(), idle()]), FleetVerdict::Idle);
        assert_eq!(verdict(vec![done(), refused(), done()]), FleetVerdict::Incomplete);
        assert_eq!(verdict(vec![unreached(), done()]), FleetVerdict::Incomplete);
        assert_eq!(verdict(vec![unknown(), unreached(), done()]), FleetVerdict::Unknown);
        let lines = FleetOutcomes(vec![answer("a", done()), answer("b", unreached())]).to_string();
        assert_eq!(lines, "a: told\na: to leave\nb: not reached, so nothing was done there: refused\n");
    }
}
