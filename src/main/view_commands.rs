//! `keyward show`, `keyward policy shadow`: what is going on in one replica.
//!
//! Owns: the arguments, and the printed form. Must not know: the rows of a topic.

use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser as _};
use keyward::admin::socket::{AdminAnswer, AdminCommand as Ask};
use keyward::admin::view::{View, ViewTopic};
use keyward::admin::view_table::RowFilter;
use keyward::config;

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

/// The rows wanted, their order and form, and the replica that is asked.
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
        let socket = match rows.at.socket() {
            Ok(socket) => socket,
            Err(code) => return code,
        };
        let at = || AdminSocketArgs { socket: Some(socket.clone()), config: None };
        let mut earlier = None;
        if let Some(time) = over {
            match ask(at(), topic) {
                Ok(view) => earlier = Some(view),
                Err(code) => return code,
            }
            #[expect(clippy::disallowed_methods, reason = "the process of a command has no shard")]
            std::thread::sleep(time);
        }
        let mut view = match ask(at(), topic) {
            Ok(view) => view,
            Err(code) => return code,
        };
        if let Some(earlier) = earlier {
            view.add_rates(&earlier);
        }
        if let Err(error) = view.arrange(rows.sort.as_deref(), rows.reverse, &rows.filter) {
            return fail(&error.to_string(), ExitCode::from(UNUSABLE));
        }
        let printed = rows.as_what.output.print(&view, |view, width| view.table(width));
        finish(printed, ExitCode::SUCCESS)
    }
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
