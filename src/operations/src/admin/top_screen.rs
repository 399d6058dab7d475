//! The screen of `keyward top`: who does what, live.
//!
//! Owns: the state of the screen, the meaning of keys, the drawing. Must not know: the terminal, the admin
//! socket, clocks, which columns fit (`column_layout`). Invariants: drawing is a function of the state; texts
//! come escaped from the views; a screen of any size is drawn, and no part of a number is: a column, or a key
//! of the last line, that does not fit is left out.

use ratatui::Frame;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Modifier, Style};
use ratatui::text::Line;
use ratatui::widgets::{Cell, Paragraph, Row, Table};

use super::column_layout::{CellLength, ColumnNeed, GAP, fit, shortened, shortened_at_word};
use super::status::ReplicaStatus;
use super::table::ColumnKind;
use super::view::{View, ViewTopic};
use super::view_table::{Shown, ViewColumn, cell_of, columns, head_of};
use keyward_telemetry::printable::escaped;

/// The topics of the screen, each with its key.
const TOPICS: [(char, ViewTopic); 6] = [
    ('c', ViewTopic::Clients),
    ('u', ViewTopic::Users),
    ('w', ViewTopic::Watches),
    ('l', ViewTopic::Leases),
    ('k', ViewTopic::Locks),
    ('m', ViewTopic::Members),
];
/// The keys, each with its rank: where the line is narrow, the key with the highest rank is left out first.
const KEYS: [(&str, u8); 10] = [
    ("q quit", 1),
    ("c clients", 3),
    ("u users", 4),
    ("w watches", 5),
    ("l leases", 7),
    ("k locks", 8),
    ("m members", 6),
    ("s sort", 2),
    ("r reverse", 9),
    ("arrows scroll", 10),
];
/// Rows per page key.
const PAGE: usize = 20;

/// The state of the screen.
#[derive(Debug)]
pub struct TopScreen {
    topic: ViewTopic,
    /// The field of the order, if chosen; else the rate of calls, or the topic's own order.
    order: Option<&'static str>,
    is_reversed: bool,
    scrolled: usize,
    status: Option<ReplicaStatus>,
    /// The newest view, with rates; and the view before, as received.
    view: Option<View>,
    received: Option<View>,
    /// Why there is no newer view.
    trouble: Option<String>,
}

/// What a key asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TopStep {
    /// Draw again.
    Draw,
    /// Ask for another topic.
    Ask(ViewTopic),
    /// End.
    Quit,
}

impl Default for TopScreen {
    fn default() -> Self {
        Self {
            topic: ViewTopic::Clients,
            order: None,
            is_reversed: false,
            scrolled: 0,
            status: None,
            view: None,
            received: None,
            trouble: None,
        }
    }
}

impl TopScreen {
    /// The topic to ask for.
    #[must_use]
    pub fn topic(&self) -> ViewTopic {
        self.topic
    }

    /// Takes in new answers. A view of another topic than the screen's came too late, and is left out.
    pub fn take(&mut self, status: ReplicaStatus, view: View) {
        self.status = Some(status);
        self.trouble = None;
        if view.topic != self.topic {
            return;
        }
        let mut shown = view.clone();
        if let Some(earlier) = self.received.as_ref().filter(|earlier| earlier.topic == view.topic) {
            shown.add_rates(earlier);
        }
        self.received = Some(view);
        self.view = Some(shown);
        self.arrange();
    }

    /// Notes that no answer came, and why.
    pub fn note_trouble(&mut self, why: String) {
        self.trouble = Some(why);
    }

    /// Takes a key.
    pub fn press(&mut self, key: KeyEvent) -> TopStep {
        if key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL) {
            return TopStep::Quit;
        }
        match key.code {
            KeyCode::Char('q') | KeyCode::Esc => return TopStep::Quit,
            KeyCode::Char('s') => {
                self.order = self.next_order();
                self.arrange();
            }
            KeyCode::Char('r') => {
                self.is_reversed = !self.is_reversed;
                self.arrange();
            }
            KeyCode::Char(key) => {
                if let Some((_, topic)) = TOPICS.iter().find(|(known, _)| *known == key) {
                    *self = Self { topic: *topic, status: self.status.take(), ..Self::default() };
                    return TopStep::Ask(*topic);
                }
            }
            KeyCode::Down => self.scrolled = self.scrolled.saturating_add(1),
            KeyCode::PageDown => self.scrolled = self.scrolled.saturating_add(PAGE),
            KeyCode::Up => self.scrolled = self.scrolled.saturating_sub(1),
            KeyCode::PageUp => self.scrolled = self.scrolled.saturating_sub(PAGE),
            KeyCode::Home => self.scrolled = 0,
            _ => {}
        }
        let rows = self.view.as_ref().map_or(0, |view| view.rows.len());
        self.scrolled = self.scrolled.min(rows.saturating_sub(1));
        TopStep::Draw
    }

    /// Draws the screen.
    pub fn draw(&self, frame: &mut Frame<'_>) {
        let parts = Layout::vertical([Constraint::Length(2), Constraint::Fill(1), Constraint::Length(1)]);
        let [head, body, foot] = parts.areas(frame.area());
        frame.render_widget(Paragraph::new(self.head(head.width.into())), head);
        match &self.view {
            Some(view) => frame.render_widget(self.table(view, body), body),
            None => frame.render_widget(Paragraph::new("waiting for the first answer"), body),
        }
        let width = usize::from(foot.width);
        let foot_line = match &self.trouble {
            Some(why) => Line::styled(shortened_at_word(&escaped(why), width), Modifier::REVERSED),
            None => Line::styled(keys_line(width), Modifier::DIM),
        };
        frame.render_widget(Paragraph::new(foot_line), foot);
    }

    fn head(&self, width: usize) -> Vec<Line<'_>> {
        let Some(status) = &self.status else { return vec![Line::raw("keyward top")] };
        let ready = status.members.iter().filter(|member| member.gets_calls()).count();
        let title = Line::styled(shortened_at_word(&escaped(&status.line()), width), Modifier::BOLD);
        let order = self.order.or_else(|| self.default_order()).unwrap_or("the topic's own order");
        let topic =
            ViewTopic::ALL.iter().find(|(_, topic)| *topic == self.topic).map_or("", |(name, _)| name);
        let rows = self.view.as_ref().map_or(0, |view| view.rows.len());
        let turned = if self.is_reversed { ", reversed" } else { "" };
        let members = status.members.len();
        let line = format!("{topic}: {rows} rows by {order}{turned}; {ready} of {members} members ready");
        vec![title, Line::raw(shortened_at_word(&line, width))]
    }

    fn shown_columns(&self) -> impl Iterator<Item = &'static ViewColumn> {
        columns(self.topic).iter().filter(|(.., shown)| *shown != Shown::WideOnly)
    }

    /// The order while none is chosen: the rate of calls or events.
    fn default_order(&self) -> Option<&'static str> {
        let mut fields = self.shown_columns().map(|(field, ..)| *field);
        fields.find(|field| field.ends_with("_per_second"))
    }

    /// The column after the present order, in the order of the screen.
    fn next_order(&self) -> Option<&'static str> {
        let fields: Vec<&'static str> = self.shown_columns().map(|(field, ..)| *field).collect();
        let present = self.order.or_else(|| self.default_order());
        let at = present.and_then(|present| fields.iter().position(|field| *field == present));
        fields.get(at.map_or(0, |at| (at + 1) % fields.len().max(1))).copied()
    }

    fn arrange(&mut self) {
        let order = self.order.or_else(|| self.default_order());
        if let Some(view) = &mut self.view
            && let Err(error) = view.arrange(order, self.is_reversed, &[])
        {
            self.trouble = Some(error.to_string());
        }
    }

    /// The rows that fit into the area. A wide area has the columns of wide tables, too.
    fn table(&self, view: &View, area: Rect) -> Table<'static> {
        let order = self.order.or_else(|| self.default_order());
        let all = columns(self.topic);
        let cells = view.rows.iter().skip(self.scrolled).take(area.height.into()).map(|row| {
            let text = |column: &ViewColumn| escaped(&cell_of(row, column));
            all.iter().map(text).collect::<Vec<String>>()
        });
        let cells: Vec<Vec<String>> = cells.collect();
        let need = |(at, column): (usize, &ViewColumn)| {
            let (field, name, ..) = column;
            // The numbers of the order stay on the narrowest screen.
            let rank = if order == Some(*field) { 0 } else { head_of(column).rank };
            let texts = cells.iter().map(move |row| row[at].as_str());
            ColumnNeed::of((rank, head_of(column).kind.length()), name, texts)
        };
        let needs: Vec<ColumnNeed> = all.iter().enumerate().map(need).collect();
        let widths = fit(&needs, area.width.into());
        let shown = || all.iter().enumerate().filter_map(|(at, column)| Some((at, column, widths[at]?)));
        let line = |column: &ViewColumn, text: &str, width: usize| {
            let line = Line::raw(shortened(text, width));
            let is_number = head_of(column).kind == ColumnKind::Number;
            Cell::new(if is_number { line.right_aligned() } else { line })
        };
        let heads = Row::new(shown().map(|(_, column, width)| line(column, column.1, width)));
        let rows = cells.iter().map(|row| {
            Row::new(shown().map(|(at, column, width)| {
                let is_order = order == Some(column.0);
                let style = if is_order { Style::new().bold() } else { Style::new() };
                line(column, &row[at], width).style(style)
            }))
        });
        let length = |width: usize| Constraint::Length(u16::try_from(width).unwrap_or(u16::MAX));
        let widths = shown().map(|(_, _, width)| length(width));
        let gap = u16::try_from(GAP).unwrap_or(u16::MAX);
        Table::new(rows, widths.collect::<Vec<_>>())
            .header(heads.style(Modifier::REVERSED))
            .column_spacing(gap)
    }
}

/// The keys that fit into the width.
fn keys_line(width: usize) -> String {
    let need = |(key, rank): &(&str, u8)| ColumnNeed::of((*rank, CellLength::Whole), key, std::iter::empty());
    let widths = fit(&KEYS.iter().map(need).collect::<Vec<_>>(), width);
    let shown = KEYS.iter().zip(&widths).filter(|(_, width)| width.is_some());
    shown.map(|((key, _), _)| *key).collect::<Vec<_>>().join("  ")
}

#[cfg(test)]
mod tests {
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;
    use serde_json::json;

    use super::*;
    use crate::admin::status::{ClusterStatus, Replica, ReplicaState};

    fn status() -> ReplicaStatus {
        ReplicaStatus {
            replica: Replica {
                version: "0.1.0".into(),
                state: ReplicaState::Serving,
                why: None,
                connections: 2,
                calls: 1,
                streams: 0,
                sessions: 0,
            },
            cluster: ClusterStatus { id: None, auth: None, leader: None, raft_term: None },
            members: Vec::new(),
            absent: Vec::new(),
            foreign: Vec::new(),
            unanswered: Vec::new(),
            warned: Vec::new(),
        }
    }

    fn clients(uptime_seconds: f64, calls: [u64; 2]) -> View {
        let rows = json!([
            {"client": 1, "address": "10.0.0.1:1", "user": "alice", "age_seconds": 60, "calls": calls[0],
             "bytes_in": 1, "bytes_out": 2, "watches": 3, "leases": 0, "failed": 0, "last_error": null},
            {"client": 2, "address": "10.0.0.2:1", "user": "bob", "age_seconds": 61, "calls": calls[1],
             "bytes_in": 1, "bytes_out": 2, "watches": 0, "leases": 1, "failed": 4, "last_error": "NotFound"},
        ]);
        let rows = serde_json::from_value(rows).expect("rows");
        let taken_at = "2026-01-01T00:00:00Z".into();
        View {
            schema_version: 1,
            topic: ViewTopic::Clients,
            taken_at,
            uptime_seconds,
            rows,
            left_out: 0,
            is_of_replicas: false,
        }
    }

    fn drawn(screen: &TopScreen, width: u16, height: u16) -> Vec<String> {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).expect("memory");
        terminal.draw(|frame| screen.draw(frame)).expect("memory");
        let buffer = terminal.backend().buffer().clone();
        let symbols: Vec<&str> = buffer.content.iter().map(|cell| cell.symbol()).collect();
        symbols.chunks(usize::from(width)).map(|line| line.concat().trim_end().to_owned()).collect()
    }

    fn key(code: KeyCode) -> KeyEvent {
        KeyEvent::new(code, KeyModifiers::NONE)
    }

    #[test]
    fn the_busiest_client_stands_at_the_top() {
        let mut screen = TopScreen::default();
        assert_eq!(drawn(&screen, 60, 4)[2], "waiting for the first answer");
        screen.take(status(), clients(1.0, [1000, 10]));
        screen.take(status(), clients(3.0, [1004, 70]));
        let lines = drawn(&screen, 110, 8);
        assert!(lines[0].starts_with("keyward 0.1.0: serving; 2 connections"), "{lines:#?}");
        assert_eq!(lines[1], "clients: 2 rows by calls_per_second; 0 of 0 members ready");
        assert!(lines[2].starts_with("CLIENT  ADDRESS     USER"), "{lines:#?}");
        assert!(lines[3].contains("10.0.0.2:1") && lines[3].contains(" 30.0 "), "{lines:#?}");
        assert!(lines[4].contains("10.0.0.1:1") && lines[4].contains(" 2.0 "), "{lines:#?}");
        assert!(lines[7].starts_with("q quit"), "{lines:#?}");
        assert_eq!(screen.press(key(KeyCode::Char('r'))), TopStep::Draw);
        assert!(drawn(&screen, 110, 8)[3].contains("10.0.0.1:1"));
        assert_eq!(screen.press(key(KeyCode::Down)), TopStep::Draw);
        assert!(drawn(&screen, 110, 8)[3].contains("10.0.0.2:1"));
    }

    /// The cells of a drawn line.
    fn cells(line: &str) -> Vec<&str> {
        line.split("  ").map(str::trim).filter(|cell| !cell.is_empty()).collect()
    }

    #[test]
    fn no_width_cuts_a_number_or_an_address() {
        let mut view = clients(1.0, [1000, 10]);
        let more = json!({"address": "127.0.0.11:53350", "bytes_in": 718_000, "bytes_out": 1_000_000,
            "age_seconds": 300, "failed": 29, "watches": 12, "leases": 3, "calls_per_second": 4321.5,
            "user": "cert:clients:CN=carol.teams.example.com", "last_error": "ResourceExhausted",
            "peer": "cert:clients:CN=carol", "blocked_login": "dave", "last_error_by": "Keyward's policy",
            "last_error_rule": "no role grants it", "listener": "clients", "user_agent": "grpc-go/1.59.0", "open": 1,
            "unread_bytes": 123_456, "last_error_seconds": 61, "kicked": false});
        let more: serde_json::Map<String, serde_json::Value> = serde_json::from_value(more).expect("a row");
        view.rows.iter_mut().for_each(|row| row.extend(more.clone()));
        let whole: Vec<String> =
            columns(ViewTopic::Clients).iter().map(|column| cell_of(&view.rows[0], column)).collect();
        let mut screen = TopScreen::default();
        screen.take(status(), view);
        let mut counts = Vec::new();
        for width in [20, 40, 60, 80, 100, 120, 200, 300] {
            let lines = drawn(&screen, width, 6);
            let row = cells(&lines[3]);
            for cell in &row {
                let is_text = cell.ends_with('…') && !cell.ends_with(|last: char| last.is_ascii_digit());
                assert!(whole.iter().any(|known| known == cell) || is_text, "{width}: {cell:?}\n{lines:#?}");
            }
            counts.push(row.len());
            let has_rate = lines[2].contains("CALLS/S") && lines[3].contains("4321.5");
            assert!(has_rate, "the order has its column at {width}: {lines:#?}");
            for key in cells(&lines[5]) {
                assert!(KEYS.iter().any(|(known, _)| *known == key), "{width}: {lines:#?}");
            }
        }
        assert!(counts.is_sorted() && counts[0] >= 2, "{counts:?}");
        assert!(drawn(&screen, 80, 6)[5].starts_with("q quit  c clients  u users"));
        assert_eq!(counts[7], whole.len() - 2, "all but the rates of bytes: {:#?}", drawn(&screen, 300, 6));
    }

    #[test]
    fn keys_change_the_topic_and_the_order_and_end() {
        let mut screen = TopScreen::default();
        screen.take(status(), clients(1.0, [1000, 10]));
        // From the default order on, every column has its turn.
        let mut seen = vec!["calls_per_second"];
        while screen.press(key(KeyCode::Char('s'))) == TopStep::Draw {
            let order = screen.order.expect("chosen");
            if seen.contains(&order) {
                break;
            }
            seen.push(order);
        }
        assert!(seen.contains(&"user") && seen.contains(&"watches") && seen.len() > 8, "{seen:?}");
        assert_eq!(screen.press(key(KeyCode::Char('w'))), TopStep::Ask(ViewTopic::Watches));
        screen.take(status(), clients(2.0, [1000, 10]));
        assert!(screen.view.is_none(), "the answer to an earlier question");
        screen.note_trouble("no process\u{1b}[2J".into());
        assert_eq!(drawn(&screen, 40, 5)[4], "no process\\u{1b}[2J");
        assert_eq!(screen.press(key(KeyCode::Char('q'))), TopStep::Quit);
        let interrupt = KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL);
        assert_eq!(screen.press(interrupt), TopStep::Quit);
    }

    #[test]
    fn a_screen_of_any_size_is_drawn() {
        let mut screen = TopScreen::default();
        screen.take(status(), clients(1.0, [1000, 10]));
        for (width, height) in [(1, 1), (3, 2), (20, 3), (300, 100)] {
            assert_eq!(drawn(&screen, width, height).len(), usize::from(height));
        }
    }
}
