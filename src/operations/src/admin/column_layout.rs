//! The columns of a table that fit into a terminal, and the width of each.
//!
//! Owns: the choice of the columns to leave out, and the shortening of texts. Must not know: the content of a
//! cell, the terminal. Invariants: a number, an address or another value that an operator copies is shown
//! whole, or its column is left out; a shortened text ends in `…` and never in a part of a number.

use ratatui::text::Span;

/// Spaces between two columns.
pub(super) const GAP: usize = 2;

/// Characters that a text keeps while less needed columns are shown. Longer texts take the room that is left
/// over.
const SHORTEST_TEXT: usize = 20;

/// Stands for the rest of a shortened text.
const REST: char = '…';

/// The treatment of a cell that is longer than its column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CellLength {
    /// The column is left out.
    Whole,
    /// The text is shortened.
    Shortened,
}

/// The room that a column needs.
#[derive(Clone, Copy, Debug)]
pub(super) struct ColumnNeed {
    /// The most needed column has the lowest rank.
    pub(super) rank: u8,
    pub(super) length: CellLength,
    /// Width of the head.
    pub(super) head: usize,
    /// Width of the widest cell, the head included.
    pub(super) widest: usize,
}

impl ColumnNeed {
    /// The need of a column with this head and these cells.
    pub(super) fn of<'t>(
        (rank, length): (u8, CellLength),
        head: &str,
        cells: impl Iterator<Item = &'t str>,
    ) -> Self {
        let head = width_of(head);
        Self { rank, length, head, widest: cells.map(width_of).fold(head, usize::max) }
    }

    fn least(&self) -> usize {
        match self.length {
            CellLength::Whole => self.widest,
            CellLength::Shortened => self.widest.min(SHORTEST_TEXT.max(self.head)),
        }
    }
}

/// The width of each column in a table of this width; `None` for a column that is left out.
pub(super) fn fit(columns: &[ColumnNeed], width: usize) -> Vec<Option<usize>> {
    let mut widths = vec![None; columns.len()];
    let mut by_rank: Vec<(usize, &ColumnNeed)> = columns.iter().enumerate().collect();
    by_rank.sort_by_key(|(at, column)| (column.rank, *at));
    let mut taken = 0;
    for (at, column) in &by_rank {
        let gap = if taken == 0 { 0 } else { GAP };
        if taken + gap + column.least() <= width {
            taken += gap + column.least();
            widths[*at] = Some(column.least());
        }
    }
    // Texts share what is left over; a text that lacks less than its share leaves more to the others.
    let mut spare = width.saturating_sub(taken);
    let shown = |(at, column): &(usize, &ColumnNeed)| Some((*at, column.widest - widths[*at]?));
    let mut lacking: Vec<(usize, usize)> = by_rank.iter().filter_map(shown).collect();
    lacking.retain(|(_, lack)| *lack > 0);
    lacking.sort_by_key(|(_, lack)| *lack);
    let count = lacking.len();
    for (done, (at, lack)) in lacking.into_iter().enumerate() {
        let more = lack.min(spare / (count - done));
        spare -= more;
        widths[at] = widths[at].map(|width| width + more);
    }
    widths
}

/// Columns that a terminal needs for the text.
pub(super) fn width_of(text: &str) -> usize {
    Span::raw(text).width()
}

/// The text, shortened if it is wider than `width`. A number at the cut is left out, since a part of a number
/// is another number.
pub(super) fn shortened(text: &str, width: usize) -> String {
    if width_of(text) <= width {
        return text.to_owned();
    }
    let mut taken = 0;
    let fits = |(at, letter): &(usize, char)| {
        taken += width_of(&text[*at..at + letter.len_utf8()]);
        taken < width
    };
    let end = text.char_indices().take_while(fits).last().map_or(0, |(at, letter)| at + letter.len_utf8());
    let (kept, rest) = text.split_at(end);
    let kept = match rest.starts_with(|next: char| next.is_ascii_digit()) {
        true => kept.trim_end_matches(|last: char| last.is_ascii_digit()),
        false => kept,
    };
    let mut short = kept.trim_end().to_owned();
    if width > 0 {
        short.push(REST);
    }
    short
}

/// As [`shortened`], for a sentence: no word is cut.
pub(super) fn shortened_at_word(text: &str, width: usize) -> String {
    if width_of(text) <= width {
        return text.to_owned();
    }
    let fits = |end: &usize| width_of(&text[..*end]) + 2 <= width;
    match text.rmatch_indices(' ').map(|(at, _)| at).find(fits) {
        Some(end) => format!("{} {REST}", text[..end].trim_end()),
        None => shortened(text, width),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WHOLE: CellLength = CellLength::Whole;
    const SHORT: CellLength = CellLength::Shortened;

    fn need(rank: u8, length: CellLength, widest: usize) -> ColumnNeed {
        ColumnNeed { rank, length, head: 4, widest }
    }

    #[test]
    fn the_least_needed_columns_are_left_out_and_the_most_needed_stay() {
        let columns = [need(2, WHOLE, 10), need(1, WHOLE, 10), need(3, WHOLE, 10)];
        assert_eq!(fit(&columns, 34), [Some(10), Some(10), Some(10)]);
        assert_eq!(fit(&columns, 33), [Some(10), Some(10), None]);
        assert_eq!(fit(&columns, 21), [None, Some(10), None]);
        assert_eq!(fit(&columns, 9), [None; 3], "nothing is better than a part of a number");
        // A small column stands where a larger, more needed one has no room.
        let columns = [need(1, WHOLE, 10), need(2, WHOLE, 30), need(3, WHOLE, 5)];
        assert_eq!(fit(&columns, 20), [Some(10), None, Some(5)]);
    }

    #[test]
    fn texts_are_shortened_before_a_column_is_left_out_and_share_what_is_over() {
        let columns = [need(1, SHORT, 100), need(2, WHOLE, 10)];
        assert_eq!(fit(&columns, 32), [Some(20), Some(10)]);
        assert_eq!(fit(&columns, 31), [Some(31), None]);
        assert_eq!(fit(&columns, 200), [Some(100), Some(10)]);
        let columns = [need(1, SHORT, 24), need(2, SHORT, 100), need(3, SHORT, 100)];
        assert_eq!(fit(&columns, 88), [Some(24), Some(30), Some(30)]);
    }

    #[test]
    fn a_shortened_text_says_so_and_ends_in_no_part_of_a_number() {
        for (text, width, short) in [
            ("alice", 5, "alice"),
            ("alice", 4, "ali…"),
            ("it has 12345 entries", 11, "it has…"),
            ("it has 12345 entries", 13, "it has 12345…"),
            ("/a/7d51a21af486500b", 10, "/a/7d51a…"),
            ("äöüß", 3, "äö…"),
            ("日本語", 4, "日…"),
            ("abc", 1, "…"),
            ("abc", 0, ""),
        ] {
            assert_eq!(shortened(text, width), short, "{text} {width}");
            assert!(width_of(short) <= width);
        }
        assert_eq!(shortened_at_word("serving; 12 connections, 3 calls", 26), "serving; 12 connections, …");
        assert_eq!(shortened_at_word("serving; 12 connections, 3 calls", 24), "serving; 12 …");
        assert_eq!(shortened_at_word("serving", 4), "ser…");
    }
}
