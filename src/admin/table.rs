//! Tables for a terminal.
//!
//! Owns: lines, columns and the width of a table. Must not know: the content of a cell. Invariants: text from
//! a member or a user cannot break a line or control the terminal; a table of [`TableWidth::Fit`] has at most
//! [`COLUMNS`] columns of characters.

use std::fmt;

use crate::telemetry::printable::escaped;
use comfy_table::{Cell, CellAlignment, ColumnConstraint, ContentArrangement, Table, presets};

/// Width of a table that fits: a terminal window as most people leave it is wider by little, if at all.
pub const COLUMNS: u16 = 100;

/// Longest text that is not wrapped in a table of [`TableWidth::Fit`]: an IPv4 address with its port.
const UNBROKEN: u16 = 22;

/// Spaces between two columns.
const PADDING: u16 = 2;

/// The width of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TableWidth {
    /// The most needed columns, with long texts wrapped to fit into [`COLUMNS`].
    Fit,
    /// All columns, each as wide as its texts.
    Wide,
}

/// The head of a column.
#[derive(Clone, Copy, Debug)]
pub(super) enum TableColumn {
    /// Texts, which begin at the left.
    Text(&'static str),
    /// Numbers, which end at the right.
    Number(&'static str),
}

/// A header and rows; a row shorter than the header gets empty cells.
pub(super) struct TerminalTable {
    columns: Vec<TableColumn>,
    table: Table,
}

impl TerminalTable {
    /// A table without rows.
    pub(super) fn new(columns: &[TableColumn], width: TableWidth) -> Self {
        let mut table = Table::new();
        table.load_style(presets::NOTHING);
        match width {
            TableWidth::Fit => {
                table.set_content_arrangement(ContentArrangement::Dynamic).set_width(COLUMNS);
            }
            TableWidth::Wide => {
                table.set_content_arrangement(ContentArrangement::Disabled);
            }
        }
        table.set_header(columns.iter().map(|column| column.cell(column.name())));
        table.column_iter_mut().for_each(|column| _ = column.set_padding((0, PADDING)));
        Self { columns: columns.to_vec(), table }
    }

    /// Adds a row.
    pub(super) fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        let mut cells = cells.into_iter();
        let cells = self.columns.iter().map(|column| column.cell(&cells.next().unwrap_or_default()));
        self.table.add_row(cells.collect::<Vec<_>>());
    }
}

impl TableColumn {
    fn name(self) -> &'static str {
        match self {
            Self::Text(name) | Self::Number(name) => name,
        }
    }

    fn cell(self, text: &str) -> Cell {
        let align = match self {
            Self::Text(_) => CellAlignment::Left,
            Self::Number(_) => CellAlignment::Right,
        };
        Cell::new(escaped(text)).set_alignment(align)
    }
}

impl fmt::Display for TerminalTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table = self.table.clone();
        let widths = table.column_max_content_widths();
        // The last column takes wrapped texts, if the others leave room for a word.
        let last = widths.len().saturating_sub(1);
        let is_unbroken = |(index, width): &(usize, u16)| *width <= UNBROKEN && *index != last;
        let unbroken = widths.into_iter().enumerate().filter(is_unbroken).collect::<Vec<_>>();
        let taken: u16 = unbroken.iter().map(|(_, width)| width + PADDING).sum();
        if taken + UNBROKEN <= COLUMNS {
            for (index, _) in unbroken {
                if let Some(column) = table.column_mut(index) {
                    column.set_constraint(ColumnConstraint::ContentWidth);
                }
            }
        }
        // No spaces behind the last cell of a line.
        table.lines().try_for_each(|line| writeln!(f, "{}", line.trim_end()))
    }
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

    const HEAD: [TableColumn; 2] = [TableColumn::Number("ID"), TableColumn::Text("NAME")];

    #[test]
    fn a_table_is_as_wide_as_what_is_in_it() {
        let mut table = TerminalTable::new(&HEAD, TableWidth::Fit);
        table.row(["1".to_owned(), "a\n\u{1b}[2Jb".to_owned()]);
        table.row(["22222".to_owned()]);
        let expected = "\
            \x20  ID  NAME\n\
            \x20   1  a\\n\\u{1b}[2Jb\n\
            22222\n";
        assert_eq!(table.to_string(), expected);
    }

    #[test]
    fn long_texts_are_wrapped_unless_a_wide_table_is_wanted() {
        let width = |wanted| {
            let mut table = TerminalTable::new(&HEAD, wanted);
            table.row(["1".to_owned(), "word ".repeat(60)]);
            table.to_string().lines().map(|line| line.chars().count()).max().unwrap()
        };
        assert!(width(TableWidth::Fit) <= usize::from(COLUMNS));
        assert!(width(TableWidth::Wide) > 300);
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
