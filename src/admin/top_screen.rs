//! The screen of `keyward top`: who does what, live.
//!
//! Owns: the state of the screen, the meaning of keys, the drawing. Must not know: the terminal, the admin
//! socket, clocks. Invariants: drawing is a function of the state; texts come escaped from the views; a
//! screen of any size is drawn, and what does not fit is cut.

use ratatui::Frame;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use ratatui::layout::{Constraint, Layout};
use ratatui::style::{Modifier, Style};
use ratatui::text::Line;
use ratatui::widgets::{Cell, Paragraph, Row, Table};

use super::status::ReplicaStatus;
use super::view::{View, ViewTopic};
use super::view_table::{CellForm, Shown, ViewColumn, cell_text, columns};

/// The topics of the screen, each with its key.
const TOPICS: [(char, ViewTopic); 6] = [
    ('c', ViewTopic::Clients),
    ('u', ViewTopic::Users),
    ('w', ViewTopic::Watches),
    ('l', ViewTopic::Leases),
    ('k', ViewTopic::Locks),
    ('m', ViewTopic::Members),
];
const HELP: &str = "q quit  c clients  u users  w watches  l leases  k locks  m members  s sort  r reverse  \
                    arrows scroll";
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
        frame.render_widget(Paragraph::new(self.head()), head);
        match &self.view {
            Some(view) => frame.render_widget(self.table(view, body.height), body),
            None => frame.render_widget(Paragraph::new("waiting for the first answer"), body),
        }
        let foot_line = match &self.trouble {
            Some(why) => Line::styled(why.escape_debug().to_string(), Modifier::REVERSED),
            None => Line::styled(HELP, Modifier::DIM),
        };
        frame.render_widget(Paragraph::new(foot_line), foot);
    }

    fn head(&self) -> Vec<Line<'_>> {
        let Some(status) = &self.status else { return vec![Line::raw("keyward top")] };
        let ready = status.members.iter().filter(|member| member.ready).count();
        let title = Line::styled(status.line(), Modifier::BOLD);
        let order = self.order.or_else(|| self.default_order()).unwrap_or("the topic's own order");
        let topic =
            ViewTopic::ALL.iter().find(|(_, topic)| *topic == self.topic).map_or("", |(name, _)| name);
        let rows = self.view.as_ref().map_or(0, |view| view.rows.len());
        let turned = if self.is_reversed { ", reversed" } else { "" };
        let members = status.members.len();
        let line = format!("{topic}: {rows} rows by {order}{turned}; {ready} of {members} members ready");
        vec![title, Line::raw(line)]
    }

    fn shown_columns(&self) -> impl Iterator<Item = &'static ViewColumn> {
        columns(self.topic).iter().filter(|(.., shown)| *shown == Shown::Always)
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

    fn table(&self, view: &View, height: u16) -> Table<'static> {
        let shown: Vec<&ViewColumn> = self.shown_columns().collect();
        let cells = view.rows.iter().skip(self.scrolled).take(height.into()).map(|row| {
            let text = |(field, _, form, _): &&ViewColumn| cell_text(row.get(*field), *form);
            shown.iter().map(text).collect::<Vec<String>>()
        });
        let cells: Vec<Vec<String>> = cells.collect();
        let width = |at: usize, head: &str| {
            let texts = cells.iter().map(|row| row.get(at).map_or(0, |text| text.chars().count()));
            Constraint::Length(u16::try_from(texts.max().unwrap_or(0).max(head.len())).unwrap_or(u16::MAX))
        };
        let widths: Vec<Constraint> =
            shown.iter().enumerate().map(|(at, (_, head, ..))| width(at, head)).collect();
        let heads = Row::new(shown.iter().map(|(_, head, ..)| *head));
        let order = self.order.or_else(|| self.default_order());
        let rows = cells.into_iter().map(|row| {
            let cells = row.into_iter().zip(&shown).map(|(text, (field, _, form, _))| {
                let line =
                    if *form == CellForm::Text { Line::raw(text) } else { Line::raw(text).right_aligned() };
                let is_order = order == Some(*field);
                Cell::new(line).style(if is_order { Style::new().bold() } else { Style::new() })
            });
            Row::new(cells.collect::<Vec<_>>())
        });
        Table::new(rows.collect::<Vec<_>>(), widths).header(heads.style(Modifier::REVERSED)).column_spacing(2)
    }
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
        View { schema_version: 1, topic: ViewTopic::Clients, taken_at, uptime_seconds, rows, left_out: 0 }
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
