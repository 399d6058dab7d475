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
/// `policy` is the policy in force on the replica that judged, if one did.
pub(super) fn print_tested(policy: Option<&str>, calls: usize, others: &[String]) -> io::Result<()> {
    #[derive(Serialize)]
    struct Tested<'a> {
        #[serde(skip_serializing_if = "Option::is_none")]
        policy: Option<&'a str>,
        as_expected: bool,
        calls: usize,
        others: &'a [String],
    }
    print_json(&Tested { policy, as_expected: others.is_empty(), calls, others })
}

/// Prints a verdict, with the lines that explain it. `policy` is the policy in force on the replica that
/// judged, if one did.
pub(super) fn print_explained(policy: Option<&str>, is_allowed: bool, text: &str) -> io::Result<()> {
    #[derive(Serialize)]
    struct Explained<'a> {
        #[serde(skip_serializing_if = "Option::is_none")]
        policy: Option<&'a str>,
        allowed: bool,
        lines: Vec<&'a str>,
    }
    print_json(&Explained { policy, allowed: is_allowed, lines: text.lines().collect() })
}
