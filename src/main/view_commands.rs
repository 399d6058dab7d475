//! `keyward show`: what is going on in one replica.
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
    /// Looks twice, at this interval, and adds rates: calls_per_second, bytes_in_per_second,
    /// bytes_out_per_second, events_per_second.
    #[arg(long, value_parser = config::duration, value_name = "TIME")]
    over: Option<Duration>,
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
        let socket = match self.at.socket() {
            Ok(socket) => socket,
            Err(code) => return code,
        };
        let at = || AdminSocketArgs { socket: Some(socket.clone()), config: None };
        let mut earlier = None;
        if let Some(time) = self.over {
            match ask(at(), self.topic) {
                Ok(view) => earlier = Some(view),
                Err(code) => return code,
            }
            #[expect(clippy::disallowed_methods, reason = "the process of a command has no shard")]
            std::thread::sleep(time);
        }
        let mut view = match ask(at(), self.topic) {
            Ok(view) => view,
            Err(code) => return code,
        };
        if let Some(earlier) = earlier {
            view.add_rates(&earlier);
        }
        if let Err(error) = view.arrange(self.sort.as_deref(), self.reverse, &self.filter) {
            return fail(&error.to_string(), ExitCode::from(UNUSABLE));
        }
        let printed = self.as_what.output.print(&view, |view, width| view.table(width));
        finish(printed, ExitCode::SUCCESS)
    }
}

/// Asks for a view; the exit code after printing an error.
fn ask(at: AdminSocketArgs, topic: ViewTopic) -> Result<View, ExitCode> {
    match send_command_or_exit(at, &Ask::Show { topic })? {
        AdminAnswer::View(view) => Ok(view),
        _ => Err(unexpected_answer()),
    }
}
