//! The answers of `keyward policy check`, `test` and `explain` for programs.
//!
//! Owns: the JSON fields: they are added, never renamed. Must not know: how a policy is judged.

use std::fmt::Display;
use std::io;

use serde::Serialize;

use super::output_form::print_json;

/// Prints a policy that can be loaded.
pub(super) fn print_checked<T: Display, U: Display>(warnings: &[T], unreachable: &[U]) -> io::Result<()> {
    #[derive(Serialize)]
    struct Checked {
        /// No rule is without a caller.
        reachable: bool,
        warnings: Vec<String>,
        unreachable: Vec<String>,
    }
    print_json(&Checked {
        reachable: unreachable.is_empty(),
        warnings: warnings.iter().map(ToString::to_string).collect(),
        unreachable: unreachable.iter().map(ToString::to_string).collect(),
    })
}

/// Prints the number of judged calls, and a text for each call with another verdict than expected.
pub(super) fn print_tested(calls: usize, others: &[String]) -> io::Result<()> {
    #[derive(Serialize)]
    struct Tested<'a> {
        as_expected: bool,
        calls: usize,
        others: &'a [String],
    }
    print_json(&Tested { as_expected: others.is_empty(), calls, others })
}

/// Prints a verdict, with the lines that explain it.
pub(super) fn print_explained(is_allowed: bool, text: &str) -> io::Result<()> {
    #[derive(Serialize)]
    struct Explained<'a> {
        allowed: bool,
        lines: Vec<&'a str>,
    }
    print_json(&Explained { allowed: is_allowed, lines: text.lines().collect() })
}
