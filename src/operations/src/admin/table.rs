//! Tables for a terminal and for a pipe.
//!
//! Owns: lines, columns and the width of a table. Must not know: the content of a cell, which columns fit
//! (`column_layout`). Invariants: text from a member or a user cannot break a line or control the terminal; a
//! row is one line; a table of [`TableWidth::Terminal`] is never wider than the terminal.

use std::fmt;

use super::column_layout::{CellLength, ColumnNeed, GAP, fit, shortened};
use comfy_table::{Cell, CellAlignment, ContentArrangement, Table, presets};
use keyward_telemetry::printable::escaped;

/// The width of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TableWidth {
    /// The most needed columns that fit into a terminal of this width.
    Terminal(u16),
    /// The same columns whatever their width, for a file or another program.
    Uncut,
    /// All columns, each as wide as its texts.
    Wide,
}

/// The kind of a column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ColumnKind {
    /// Texts, which are shortened where they do not fit.
    Text,
    /// Addresses, ids, times and other texts that are worthless in part.
    Exact,
    /// Numbers, which end at the right.
    Number,
}

/// The head of a column, its kind and its rank: the most needed column has the lowest.
#[derive(Clone, Copy, Debug)]
pub(super) struct TableColumn {
    pub(super) name: &'static str,
    pub(super) kind: ColumnKind,
    pub(super) rank: u8,
}

/// A header and rows; a row shorter than the header gets empty cells.
pub(super) struct TerminalTable {
    columns: Vec<TableColumn>,
    width: TableWidth,
    rows: Vec<Vec<String>>,
}

impl TerminalTable {
    /// A table without rows.
    pub(super) fn new(columns: &[TableColumn], width: TableWidth) -> Self {
        Self { columns: columns.to_vec(), width, rows: Vec::new() }
    }

    /// Adds a row.
    pub(super) fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        let mut cells = cells.into_iter().map(|cell| escaped(&cell));
        self.rows.push(self.columns.iter().map(|_| cells.next().unwrap_or_default()).collect());
    }

    /// The width of each column; `None` for a column that is left out.
    fn widths(&self) -> Vec<Option<usize>> {
        let need = |(at, column): (usize, &TableColumn)| {
            let cells = self.rows.iter().map(move |row| row[at].as_str());
            ColumnNeed::of((column.rank, column.kind.length()), column.name, cells)
        };
        let needs: Vec<ColumnNeed> = self.columns.iter().enumerate().map(need).collect();
        match self.width {
            TableWidth::Terminal(width) => fit(&needs, width.into()),
            TableWidth::Uncut | TableWidth::Wide => needs.iter().map(|need| Some(need.widest)).collect(),
        }
    }
}

impl TableColumn {
    /// A column of texts.
    pub(super) const fn text(name: &'static str, rank: u8) -> Self {
        Self { name, kind: ColumnKind::Text, rank }
    }

    /// A column of addresses, ids or times.
    pub(super) const fn exact(name: &'static str, rank: u8) -> Self {
        Self { name, kind: ColumnKind::Exact, rank }
    }

    /// A column of numbers.
    pub(super) const fn number(name: &'static str, rank: u8) -> Self {
        Self { name, kind: ColumnKind::Number, rank }
    }

    fn cell(self, text: &str, width: usize) -> Cell {
        let align = match self.kind {
            ColumnKind::Text | ColumnKind::Exact => CellAlignment::Left,
            ColumnKind::Number => CellAlignment::Right,
        };
        Cell::new(shortened(text, width)).set_alignment(align)
    }
}

impl ColumnKind {
    pub(super) fn length(self) -> CellLength {
        match self {
            Self::Text => CellLength::Shortened,
            Self::Exact | Self::Number => CellLength::Whole,
        }
    }
}

impl fmt::Display for TerminalTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let widths = self.widths();
        let shown = || widths.iter().enumerate().filter_map(|(at, width)| Some((at, (*width)?)));
        if shown().next().is_none() {
            return writeln!(f, "no column fits into the terminal: -o wide");
        }
        let mut table = Table::new();
        table.load_style(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
        table.set_header(shown().map(|(at, width)| self.columns[at].cell(self.columns[at].name, width)));
        for row in &self.rows {
            table.add_row(shown().map(|(at, width)| self.columns[at].cell(&row[at], width)));
        }
        let padding = u16::try_from(GAP).unwrap_or(u16::MAX);
        table.column_iter_mut().for_each(|column| _ = column.set_padding((0, padding)));
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

    const HEAD: [TableColumn; 2] = [TableColumn::number("ID", 1), TableColumn::text("NAME", 2)];

    #[test]
    fn a_table_is_as_wide_as_what_is_in_it() {
        let mut table = TerminalTable::new(&HEAD, TableWidth::Terminal(80));
        table.row(["1".to_owned(), "a\n\u{1b}[2Jb".to_owned()]);
        table.row(["22222".to_owned()]);
        let expected = "\
            \x20  ID  NAME\n\
            \x20   1  a\\n\\u{1b}[2Jb\n\
            22222\n";
        assert_eq!(table.to_string(), expected);
    }

    #[test]
    fn long_texts_are_shortened_in_a_terminal_alone() {
        let printed = |wanted| {
            let mut table = TerminalTable::new(&HEAD, wanted);
            table.row(["123456".to_owned(), "word ".repeat(60)]);
            table.to_string()
        };
        let (narrow, piped) = (printed(TableWidth::Terminal(30)), printed(TableWidth::Uncut));
        assert_eq!(narrow, "    ID  NAME\n123456  word word word word w…\n");
        assert!(piped.lines().count() == 2 && piped.len() > 300, "{piped}");
        assert_eq!(piped, printed(TableWidth::Wide));
        assert!(printed(TableWidth::Terminal(5)).contains("-o wide"), "no part of a number is shown");
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
