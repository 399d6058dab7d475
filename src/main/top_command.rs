//! `keyward top`: the screen on a terminal.
//!
//! Owns: the terminal, the keys, the questions each second. Must not know: what the screen shows. Invariants:
//! the terminal is as before at the end, also after a panic (the panic hook of `ratatui::try_init`); a silent
//! replica delays neither keys nor drawing.

use std::io::{self, IsTerminal as _};
use std::path::Path;
use std::process::ExitCode;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::Duration;

use keyward::admin::socket::{AdminAnswer, AdminCommand as Ask};
use keyward::admin::status::ReplicaStatus;
use keyward::admin::top_screen::{TopScreen, TopStep};
use keyward::admin::view::{View, ViewTopic};
use keyward::admin::{socket_client, socket_owner};
use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event, KeyEventKind};

use super::{AdminSocketArgs, UNUSABLE, fail, no_process};

/// Interval of the questions.
const INTERVAL: Duration = Duration::from_secs(1);
/// Time limit for a key, before new answers are looked for.
const KEY: Duration = Duration::from_millis(50);

/// An answer, or why there is none.
type Answer = Result<(ReplicaStatus, View), String>;

/// Shows the screen until a key ends it.
pub(super) fn run(at: AdminSocketArgs) -> ExitCode {
    let socket = match at.socket() {
        Ok(socket) => socket,
        Err(code) => return code,
    };
    if !(io::stdout().is_terminal() && io::stdin().is_terminal()) {
        let why = "keyward top needs a terminal; for programs: keyward show TOPIC -o json";
        return fail(why, ExitCode::from(UNUSABLE));
    }
    // A wrong path is told at once, on the screen as it was.
    if let Err(error) = socket_owner::connect(&socket) {
        return no_process(&socket, &error);
    }
    let (wanted, topics) = channel();
    let (answers, answered) = channel();
    // The thread ends with the process, or once nobody wants its answers.
    thread::spawn(move || ask_each_second(&socket, &topics, &answers));
    let shown = ratatui::try_init().and_then(|mut terminal| {
        let shown = show(&mut terminal, &wanted, &answered);
        ratatui::try_restore().and(shown)
    });
    match shown {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => fail(&format!("the terminal: {error}"), ExitCode::FAILURE),
    }
}

fn show(
    terminal: &mut DefaultTerminal,
    wanted: &Sender<ViewTopic>,
    answered: &Receiver<Answer>,
) -> io::Result<()> {
    let mut screen = TopScreen::default();
    let want = |topic| wanted.send(topic).map_err(|_| io::Error::other("no more answers come"));
    want(screen.topic())?;
    let mut has_changed = true;
    loop {
        for answer in answered.try_iter() {
            match answer {
                Ok((status, view)) => screen.take(status, view),
                Err(why) => screen.note_trouble(why),
            }
            has_changed = true;
        }
        if std::mem::take(&mut has_changed) {
            terminal.draw(|frame| screen.draw(frame))?;
        }
        if !event::poll(KEY)? {
            continue;
        }
        has_changed = true;
        if let Event::Key(key) = event::read()?
            && key.kind == KeyEventKind::Press
        {
            match screen.press(key) {
                TopStep::Draw => {}
                TopStep::Ask(topic) => want(topic)?,
                TopStep::Quit => return Ok(()),
            }
        }
    }
}

/// Asks for the newest wanted topic, now and each second, until nobody wants answers.
fn ask_each_second(socket: &Path, topics: &Receiver<ViewTopic>, answers: &Sender<Answer>) {
    let Ok(mut topic) = topics.recv() else { return };
    loop {
        if answers.send(ask(socket, topic)).is_err() {
            return;
        }
        match topics.recv_timeout(INTERVAL) {
            Ok(next) => topic = topics.try_iter().last().unwrap_or(next),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}

fn ask(path: &Path, topic: ViewTopic) -> Answer {
    let send = |command| socket_client::send_command(path, &command).map_err(|error| error.to_string());
    match (send(Ask::Status {})?, send(Ask::Show { topic })?) {
        (AdminAnswer::Status(status), AdminAnswer::View(view)) => Ok((*status, view)),
        (AdminAnswer::Failed(why) | AdminAnswer::Unknown(why), _)
        | (_, AdminAnswer::Failed(why) | AdminAnswer::Unknown(why)) => Err(why),
        _ => Err("it answered something else: is it of this version?".into()),
    }
}
