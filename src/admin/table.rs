//! Tables for a terminal, drawn like those of etcdctl.
//!
//! Owns: lines and columns. Must not know: the content of a cell. Invariant: text from a member or a user
//! cannot break a line or control the terminal.

use std::fmt;

/// A header and rows; a row shorter than the header gets empty cells.
pub(super) struct TerminalTable {
    head: Vec<&'static str>,
    rows: Vec<Vec<String>>,
}

impl TerminalTable {
    /// A table without rows.
    pub(super) fn new(head: &[&'static str]) -> Self {
        Self { head: head.to_vec(), rows: Vec::new() }
    }

    /// Adds a row.
    pub(super) fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        self.rows.push(cells.into_iter().map(|cell| plain(&cell)).collect());
    }
}

impl fmt::Display for TerminalTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let cell = |row: &[String], column: usize| row.get(column).cloned().unwrap_or_default();
        let width = |column: usize| {
            let longest = self.rows.iter().map(|row| cell(row, column).chars().count()).max().unwrap_or(0);
            longest.max(self.head.get(column).map_or(0, |name| name.chars().count()))
        };
        let widths: Vec<usize> = (0..self.head.len()).map(width).collect();
        let rule = |f: &mut fmt::Formatter<'_>| {
            widths.iter().try_for_each(|width| write!(f, "+-{:-<width$}-", ""))?;
            writeln!(f, "+")
        };
        rule(f)?;
        for (name, width) in self.head.iter().zip(&widths) {
            write!(f, "| {name:^width$} ")?;
        }
        writeln!(f, "|")?;
        rule(f)?;
        for row in &self.rows {
            for (column, width) in widths.iter().enumerate() {
                write!(f, "| {:>width$} ", cell(row, column))?;
            }
            writeln!(f, "|")?;
        }
        rule(f)
    }
}

/// Escapes control characters: the text stays on one line and cannot control the terminal.
pub(super) fn plain(text: &str) -> String {
    if text.chars().any(char::is_control) { text.escape_debug().to_string() } else { text.to_owned() }
}

/// Formats bytes like etcdctl: powers of 1000, with one decimal below 10.
pub(super) fn size(bytes: u64) -> String {
    const UNITS: [&str; 6] = ["B", "kB", "MB", "GB", "TB", "PB"];
    let mut unit = 0;
    let mut divisor = 1_u64;
    while bytes / divisor >= 1000 && unit + 1 < UNITS.len() {
        divisor *= 1000;
        unit += 1;
    }
    let (whole, tenth) = (bytes / divisor, bytes % divisor * 10 / divisor);
    let name = UNITS.get(unit).copied().unwrap_or_default();
    if unit > 0 && whole < 10 { format!("{whole}.{tenth} {name}") } else { format!("{whole} {name}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_is_as_wide_as_what_is_in_it() {
        let mut table = TerminalTable::new(&["ID", "NAME"]);
        table.row(["1".to_owned(), "a\nb".to_owned()]);
        table.row(["22222".to_owned()]);
        let expected = "+-------+------+\n|  ID   | NAME |\n+-------+------+\n|     1 | a\\nb |\n\
            | 22222 |      |\n+-------+------+\n";
        assert_eq!(table.to_string(), expected);
    }

    #[test]
    fn sizes_are_as_etcdctl_tells_them() {
        for (bytes, text) in [
            (0, "0 B"),
            (999, "999 B"),
            (20_480, "20 kB"),
            (1_500_000, "1.5 MB"),
            (2_147_483_648, "2.1 GB"),
            (u64::MAX, "18446 PB"),
        ] {
            assert_eq!(size(bytes), text);
        }
    }
}
