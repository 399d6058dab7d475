//! The forms of an answer: `-o table`, `-o wide`, `-o json`, one name for one form in every command.
//!
//! Owns: the flag, the width of the terminal, the printing. Must not know: any answer. Invariant: an answer
//! for a file or another program has whole rows, each on one line.

use std::fmt::Display;
use std::io::{self, IsTerminal as _, Write as _};

use clap::{Args, ValueEnum};
use keyward::admin::table::TableWidth;
use keyward::telemetry::printable;
use serde::Serialize;

/// The width of a terminal that does not tell its own.
const UNTOLD: u16 = 80;

/// Output format of an answer.
#[derive(Args)]
pub(super) struct OutputArgs {
    /// Output format.
    #[arg(short = 'o', long = "output", value_enum, default_value_t = OutputForm::Table)]
    pub(super) output: OutputForm,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum OutputForm {
    /// Readable text.
    #[value(alias = "text")]
    Table,
    /// One line of JSON, for programs.
    Json,
}

/// Output format of a table.
#[derive(Args)]
pub(super) struct TableArgs {
    /// Output format.
    #[arg(short = 'o', long = "output", value_enum, default_value_t = TableForm::Table)]
    pub(super) output: TableForm,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum TableForm {
    /// The columns needed most, as many as the terminal has room for; whole rows for a file or a pipe.
    #[value(alias = "text")]
    Table,
    /// One line of JSON, for programs.
    Json,
    /// All columns, however wide.
    Wide,
}

impl TableForm {
    /// Prints the answer: `text` makes it a table.
    pub(super) fn print<T: Serialize>(
        self,
        what: &T,
        text: impl FnOnce(&T, TableWidth) -> String,
    ) -> io::Result<()> {
        match self {
            Self::Table => write!(io::stdout(), "{}", text(what, table_width())),
            Self::Wide => write!(io::stdout(), "{}", text(what, TableWidth::Wide)),
            Self::Json => print_json(what),
        }
    }
}

/// The width of tables on stdout. `COLUMNS` wins over the terminal's own size, as in other programs.
fn table_width() -> TableWidth {
    let stdout = io::stdout();
    if !stdout.is_terminal() {
        return TableWidth::Uncut;
    }
    let wanted = std::env::var("COLUMNS").ok().and_then(|columns| columns.trim().parse().ok());
    let told = || rustix::termios::tcgetwinsize(&stdout).ok().map(|size| size.ws_col);
    let width = wanted.filter(|columns| *columns > 0).or_else(told).filter(|columns| *columns > 0);
    TableWidth::Terminal(width.unwrap_or(UNTOLD))
}

/// Prints an answer that is text as it is, or JSON.
pub(super) fn print<T: Display + Serialize>(what: &T, form: OutputForm) -> io::Result<()> {
    match form {
        OutputForm::Table => write!(io::stdout(), "{what}"),
        OutputForm::Json => print_json(what),
    }
}

pub(super) fn print_json<T: Serialize>(what: &T) -> io::Result<()> {
    writeln!(io::stdout(), "{}", printable::json(&serde_json::to_string(what)?))
}
