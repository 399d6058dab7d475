//! `keyward show`, `keyward policy shadow`: what is going on in one replica, or in all.
//!
//! Owns: the arguments, and the printed form. Must not know: the rows of a topic.

use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser as _};
use keyward::admin::fleet::fleet_report::FleetView;
use keyward::admin::socket_protocol::{AdminAnswer, AdminCommand as Ask, FleetCommand};
use keyward::admin::view::{View, ViewTopic};
use keyward::admin::view_table::RowFilter;
use keyward::config;

use super::fleet_commands::FleetArgs;
use super::output_form::TableArgs;
use super::{AdminSocketArgs, UNUSABLE, fail, finish, send_command_or_exit, unexpected_answer};

/// Arguments of `keyward show`.
#[derive(Args)]
pub(super) struct ShowArguments {
    /// What to show.
    #[arg(value_parser = topics())]
    topic: ViewTopic,
    /// Looks twice, at this interval, and adds rates: calls_per_second, bytes_in_per_second,
    /// bytes_out_per_second, events_per_second.
    #[arg(long, value_parser = config::duration, value_name = "TIME")]
    over: Option<Duration>,
    #[command(flatten)]
    rows: RowArguments,
}

/// Arguments of `keyward policy shadow`.
#[derive(Args)]
pub(super) struct ShadowArguments {
    #[command(flatten)]
    rows: RowArguments,
}

/// The rows wanted, their order and form, and the replicas that are asked.
#[derive(Args)]
struct RowArguments {
    /// A field of the JSON output: numbers from the highest, texts in alphabetical order. Each topic has an
    /// order of its own by default.
    #[arg(long, value_name = "FIELD")]
    sort: Option<String>,
    /// Turns the order round.
    #[arg(long)]
    reverse: bool,
    /// Only rows for which the condition holds: FIELD=TEXT, FIELD~PART, FIELD>NUMBER, FIELD<NUMBER. Repeated
    /// conditions must all hold.
    #[arg(long, value_name = "CONDITION")]
    filter: Vec<RowFilter>,
    #[command(flatten)]
    fleet: FleetArgs,
    #[command(flatten)]
    as_what: TableArgs,
    #[command(flatten)]
    at: AdminSocketArgs,
}

fn topics() -> impl clap::builder::TypedValueParser<Value = ViewTopic> {
    let names = PossibleValuesParser::new(ViewTopic::ALL.map(|(name, _)| name));
    names.try_map(|name| ViewTopic::named(&name).ok_or("no such topic"))
}

impl ShowArguments {
    /// Prints the view.
    pub(super) fn run(self) -> ExitCode {
        let Self { topic, over, rows } = self;
        let given = AdminSocketArgs { socket: rows.at.socket.clone(), config: rows.at.config.clone() };
        let socket = match given.socket() {
            Ok(socket) => socket,
            Err(code) => return code,
        };
        let at = || AdminSocketArgs { socket: Some(socket.clone()), config: None };
        if !rows.fleet.is_here() {
            return rows.run_of_fleet(topic, over, &at);
        }
        let views = twice(over, || ask(at(), topic));
        let (earlier, mut view) = match views {
            Ok(views) => views,
            Err(code) => return code,
        };
        if let Some(earlier) = earlier {
            view.add_rates(&earlier);
        }
        if let Err(error) = view.arrange(rows.sort.as_deref(), rows.reverse, &rows.filter) {
            return fail(&error.to_string(), ExitCode::from(UNUSABLE));
        }
        finish(rows.as_what.output.print(&view, |view, width| view.table(width)), ExitCode::SUCCESS)
    }
}

impl RowArguments {
    /// Prints the view of several replicas, and names those without an answer.
    fn run_of_fleet(
        &self,
        topic: ViewTopic,
        over: Option<Duration>,
        at: &dyn Fn() -> AdminSocketArgs,
    ) -> ExitCode {
        let (earlier, answers) = match twice(over, || self.fleet.ask(at(), FleetCommand::Show { topic })) {
            Ok(answers) => answers,
            Err(code) => return code,
        };
        let (printed, unanswered) = match FleetView::join(answers, earlier.as_deref()) {
            Ok(mut fleet) => {
                if let Err(error) = fleet.view.arrange(self.sort.as_deref(), self.reverse, &self.filter) {
                    return fail(&error.to_string(), ExitCode::from(UNUSABLE));
                }
                let printed = self.as_what.output.print(&fleet, |fleet, width| fleet.view.table(width));
                (printed, fleet.unanswered)
            }
            Err(unanswered) => (Ok(()), unanswered),
        };
        let lines: Vec<String> = unanswered.iter().map(ToString::to_string).collect();
        match &lines.join("\n")[..] {
            "" => finish(printed, ExitCode::SUCCESS),
            lines => fail(lines, ExitCode::FAILURE),
        }
    }
}

/// Looks twice, `over` a time, or once.
fn twice<T>(
    over: Option<Duration>,
    mut look: impl FnMut() -> Result<T, ExitCode>,
) -> Result<(Option<T>, T), ExitCode> {
    let Some(time) = over else { return Ok((None, look()?)) };
    let earlier = look()?;
    #[expect(clippy::disallowed_methods, reason = "the process of a command has no shard")]
    std::thread::sleep(time);
    Ok((Some(earlier), look()?))
}

impl ShadowArguments {
    /// Prints the view.
    pub(super) fn run(self) -> ExitCode {
        ShowArguments { topic: ViewTopic::Shadow, over: None, rows: self.rows }.run()
    }
}

/// Asks for a view; the exit code after printing an error.
fn ask(at: AdminSocketArgs, topic: ViewTopic) -> Result<View, ExitCode> {
    match send_command_or_exit(at, &Ask::Show { topic })? {
        AdminAnswer::View(view) => Ok(view),
        _ => Err(unexpected_answer()),
    }
}
