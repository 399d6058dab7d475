//! The admin socket: commands, from the same machine and the same user.
//!
//! Owns: its protocol, both ends of it, and who may speak. Must not know: how a change is kept. Invariants: only the
//! socket's owner and root are listened to, also in the moment before its mode is set; a peer costs bounded time and
//! memory; what has no end of line is no command, nor is a part of it; a name that is given in a command stands in an answer, a token or password never.
//!
//! One line of JSON asks, one line answers: `{"revoke":{"user":"alice"}}`, `{"done":"…"}`.

use std::fmt;
use std::io::{self, BufRead as _, Read as _, Write as _};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{Semaphore, watch};
use tokio::time::timeout;

use super::State;
use super::doctor::{Doctor, Report};
use super::drain::{Phase, Progress, Stage};
use super::status::Status;
use crate::downstream::listener::remove_stale;
use crate::downstream::session::{Change, Entry, NoSessionId, Sealer};
use crate::identity::UserName;
use crate::revocation::{Kept, Register, Trouble};
use crate::tasks::Tasks;

/// More than the longest name that a session can hold, each byte of it escaped.
const LONGEST_LINE: u64 = 64 * 1024;
/// How long a peer may take to ask, and to take its answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long we wait for an answer: a change may wait for etcd.
const ANSWER: Duration = Duration::from_secs(30);
/// How often whoever waits for the end is told how far it has come.
const NEWS: Duration = Duration::from_millis(500);
/// Peers served at once.
const PEERS: usize = 8;

/// What is asked for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Command {
    /// End all sessions of the user, and what lives as that etcd user.
    Revoke {
        /// Byte by byte.
        user: String,
    },
    /// End one session.
    RevokeSession {
        /// Its id, as in the log at login.
        session: String,
    },
    /// The same, and refuse its logins and calls.
    Block {
        /// Byte by byte.
        user: String,
    },
    /// Let the user log in and call again.
    Unblock {
        /// Byte by byte.
        user: String,
    },
    /// Tell the sessions that this replica has seen, and who was revoked.
    Sessions {},
    /// Tell how the replica and the members are doing.
    Status {},
    /// Look for what is wrong.
    Doctor {},
    /// End, as by SIGTERM, and tell how far that has come. Asked again it tells what is new, within half a second.
    Drain {},
}

/// What comes back.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    /// It is done; with what follows from it.
    Done(String),
    /// Nothing has changed; and why.
    Failed(String),
    /// It is in force on this replica until it ends, and nowhere else; and why.
    NotKept(String),
    /// Nobody can say whether it is done. It may be asked for again.
    Unknown(String),
    /// What was asked for.
    Sessions(Listing),
    /// What was asked for.
    Status(Box<Status>),
    /// What was asked for.
    Doctor(Report),
    /// It has begun.
    Draining(Progress),
}

/// The sessions that a replica has seen, and who was revoked.
#[derive(Debug, Serialize, Deserialize)]
pub struct Listing {
    sessions: Vec<Row>,
    users: Vec<User>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Row {
    id: String,
    peer: String,
    issued_at: u64,
    stands: bool,
}

#[derive(Debug, Serialize, Deserialize)]
struct User {
    name: String,
    generation: u64,
    blocked: bool,
}

/// What answers are made of.
pub struct Desk {
    /// Keeps changes.
    pub register: Register,
    /// Has seen sessions.
    pub sealer: Arc<Sealer>,
    /// Knows how everything is doing.
    pub state: Arc<State>,
    /// Knows what should not be so.
    pub doctor: Doctor,
}

/// Binds the socket. One that was left behind is replaced, one that is served is not.
///
/// # Errors
/// The system's.
pub fn bind(path: &Path) -> io::Result<UnixListener> {
    remove_stale(path)?;
    let listener = UnixListener::bind(path)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
    Ok(listener)
}

/// Serves for ever. `path` is where the listener was bound.
pub async fn serve(listener: UnixListener, path: Arc<Path>, desk: Arc<Desk>, tasks: Tasks) {
    let owner = match std::fs::metadata(&path) {
        Ok(metadata) => metadata.uid(),
        Err(error) => return tracing::error!(%error, "the admin socket is gone"),
    };
    let places = Arc::new(Semaphore::new(PEERS));
    loop {
        let Ok(place) = Arc::clone(&places).acquire_owned().await else { return };
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!(%error, "an admin command could not be accepted");
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            }
        };
        if !stream.peer_cred().is_ok_and(|peer| peer.uid() == owner || peer.uid() == 0) {
            tracing::warn!("another user's admin command was not listened to");
            // Whoever waits for an answer is not left to think that it may have been done.
            drop(refuse(stream));
            continue;
        }
        let desk = Arc::clone(&desk);
        let peer = async move {
            let _place = place;
            if let Err(error) = converse(stream, &desk).await {
                tracing::debug!(%error, "an admin peer left");
            }
        };
        tasks.spawn("admin command", peer).detach();
    }
}

/// Says so without having read anything, and without waiting: what is said fits into the socket.
fn refuse(stream: UnixStream) -> io::Result<()> {
    let answer = Answer::Failed("only Keyward's own user and root may".into());
    let mut text = serde_json::to_vec(&answer)?;
    text.push(b'\n');
    stream.into_std()?.write_all(&text)
}

async fn converse(mut stream: UnixStream, desk: &Desk) -> io::Result<()> {
    // Whoever waits for the end is told of it before the process goes.
    let mut waits: Option<watch::Receiver<Stage>> = None;
    let (read, mut write) = stream.split();
    let mut read = BufReader::new(read);
    loop {
        let mut line = Vec::new();
        let mut asked = (&mut read).take(LONGEST_LINE);
        let length = timeout(PATIENCE, asked.read_until(b'\n', &mut line)).await??;
        if length == 0 {
            return Ok(());
        }
        let whole = line.ends_with(b"\n");
        let answer = match serde_json::from_slice(&line) {
            _ if !whole => Answer::Failed("not a command: the line is too long, or was cut".into()),
            Ok(Command::Drain {}) => desk.drain(&mut waits).await,
            Ok(command) => desk.answer(command).await,
            Err(error) => Answer::Failed(format!("not a command: {error}")),
        };
        let mut text = serde_json::to_vec(&answer)?;
        text.push(b'\n');
        timeout(PATIENCE, write.write_all(&text)).await??;
        // Its rest is no line of its own.
        if !whole {
            return Ok(());
        }
    }
}

impl Desk {
    async fn answer(&self, command: Command) -> Answer {
        let change = match change(&command) {
            Ok(Some(change)) => change,
            Ok(None) => return self.tell(&command).await,
            Err(error) => return Answer::Failed(error.to_string()),
        };
        match self.register.change(change).await {
            Ok(Kept::Etcd) => Answer::Done("in force on this replica now, on all others within 2 s".into()),
            Ok(Kept::File) => Answer::Done("in force now; kept in revocation.state_file, for this replica alone".into()),
            Ok(Kept::Memory) => Answer::Done(
                "in force now, until this process ends: set revocation.etcd_prefix or revocation.state_file to keep it"
                    .into(),
            ),
            Err(trouble) => {
                let why = trouble.to_string();
                match trouble {
                    Trouble::NotKept(_) => Answer::NotKept(why),
                    Trouble::Unknown(_) => Answer::Unknown(why),
                    Trouble::Unchanged(_) | Trouble::Full(_) | Trouble::Busy => Answer::Failed(why),
                }
            }
        }
    }

    /// What changes nothing.
    async fn tell(&self, command: &Command) -> Answer {
        match command {
            Command::Status {} => Answer::Status(Box::new(self.state.status())),
            Command::Doctor {} => Answer::Doctor(self.doctor.examine().await),
            _ => Answer::Sessions(self.listing()),
        }
    }

    /// Begins the end where it has not begun; whoever has heard of it waits for what is new.
    async fn drain(&self, waits: &mut Option<watch::Receiver<Stage>>) -> Answer {
        match waits {
            Some(stages) => {
                let ended = stages.wait_for(|stage| *stage == Stage::Ended);
                // Late is as good: then it is told how far it has come.
                drop(timeout(NEWS, ended).await);
            }
            None => {
                *waits = Some(self.state.exit.listen());
                self.state.exit.ask();
            }
        }
        Answer::Draining(self.state.exit.progress(&self.state.metrics))
    }

    fn listing(&self) -> Listing {
        let row = |seen: crate::downstream::session::Seen| Row {
            id: seen.id.to_string(),
            peer: seen.peer.to_string(),
            issued_at: seen.issued_at,
            stands: seen.stands,
        };
        let mut sessions: Vec<_> = self.sealer.seen().into_iter().map(row).collect();
        sessions.sort_by(|a, b| (&a.peer, a.issued_at, &a.id).cmp(&(&b.peer, b.issued_at, &b.id)));
        let revocations = self.register.revocations();
        let user = |entry| match entry {
            Entry::User(name, standing) => Some(User {
                name: name.as_str().to_owned(),
                generation: standing.generation,
                blocked: standing.blocked,
            }),
            Entry::Session(_) => None,
        };
        let mut users: Vec<_> = revocations.entries().filter_map(user).collect();
        users.sort_by(|a, b| a.name.cmp(&b.name));
        Listing { sessions, users }
    }
}

fn change(command: &Command) -> Result<Option<Change>, NoSessionId> {
    let user = |name: &str| UserName::from(name);
    Ok(Some(match command {
        Command::Revoke { user: name } => Change::Revoke(user(name)),
        Command::Block { user: name } => Change::Block(user(name)),
        Command::Unblock { user: name } => Change::Unblock(user(name)),
        Command::RevokeSession { session } => Change::RevokeSession(session.parse()?),
        Command::Sessions {} | Command::Status {} | Command::Doctor {} | Command::Drain {} => {
            return Ok(None);
        }
    }))
}

/// Asks the Keyward that serves the socket, and waits for the answer. Blocks.
///
/// # Errors
/// The system's: nothing was asked.
pub fn ask(path: &Path, command: &Command) -> io::Result<Answer> {
    let mut stream = std::os::unix::net::UnixStream::connect(path)?;
    stream.set_read_timeout(Some(ANSWER))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let mut line = serde_json::to_vec(command)?;
    line.push(b'\n');
    if let Err(error) = stream.write_all(&line) {
        // It was hung up on: perhaps it was told why.
        return read_answer(stream).map_err(|_| error);
    }
    Ok(read_answer(stream)
        .unwrap_or_else(|error| Answer::Unknown(format!("asked, but not answered: {error}"))))
}

/// Asks the Keyward that serves the socket to end, and hands on how far that has come, until it has. Blocks. The last is told again:
/// where nothing says that it has ended, Keyward was gone before it could.
///
/// # Errors
/// The system's, or what it said instead: nothing was asked.
pub fn drain(path: &Path, mut tell: impl FnMut(Progress)) -> io::Result<Result<Progress, Answer>> {
    let mut stream = std::os::unix::net::UnixStream::connect(path)?;
    stream.set_read_timeout(Some(ANSWER))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let mut answers = io::BufReader::new(stream.try_clone()?);
    let mut line = serde_json::to_vec(&Command::Drain {})?;
    line.push(b'\n');
    let mut last: Option<Progress> = None;
    loop {
        let mut answer = Vec::new();
        let asked = stream.write_all(&line).and_then(|()| answers.read_until(b'\n', &mut answer));
        match (asked, last) {
            (Ok(1..), _) => {}
            (Ok(_) | Err(_), Some(last)) => return Ok(Ok(last)),
            (Ok(_), None) => return Err(io::ErrorKind::UnexpectedEof.into()),
            (Err(error), None) => return Err(error),
        }
        match serde_json::from_slice(&answer)? {
            Answer::Draining(progress) => {
                tell(progress);
                last = Some(progress);
                if progress.phase == Phase::Ended {
                    return Ok(Ok(progress));
                }
            }
            other => return Ok(Err(other)),
        }
    }
}

fn read_answer(stream: std::os::unix::net::UnixStream) -> io::Result<Answer> {
    let mut answer = Vec::new();
    // A listing has a row per session, of which there are some thousands.
    io::BufReader::new(stream.take(LONGEST_LINE * 1024)).read_until(b'\n', &mut answer)?;
    Ok(serde_json::from_slice(&answer)?)
}

/// For a terminal.
impl fmt::Display for Listing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{:32}  {:20}  {:7}  PEER", "SESSION", "ISSUED", "")?;
        for row in &self.sessions {
            let state = if row.stands { "" } else { "revoked" };
            let peer = row.peer.escape_debug();
            writeln!(f, "{:32}  {:20}  {state:7}  {peer}", row.id, moment(row.issued_at))?;
        }
        if !self.users.is_empty() {
            writeln!(f, "\n{:20}  {:7}  USER", "REVOKED BEFORE", "")?;
        }
        for user in &self.users {
            let state = if user.blocked { "blocked" } else { "" };
            let name = user.name.escape_debug();
            writeln!(f, "{:20}  {state:7}  {name}", moment(user.generation / 1_000_000))?;
        }
        Ok(())
    }
}

/// Seconds of the Unix epoch as RFC 3339.
fn moment(seconds: u64) -> String {
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    // Years that begin in March, so that the leap day is the last: every 400 of them have 146097 days.
    let days = days + 719_468;
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted + 2) / 5 + 1;
    let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_is_one_line_of_json() {
        for (command, text) in [
            (Command::Revoke { user: "a\nb".into() }, r#"{"revoke":{"user":"a\nb"}}"#),
            (Command::RevokeSession { session: "7".into() }, r#"{"revoke_session":{"session":"7"}}"#),
            (Command::Block { user: "a".into() }, r#"{"block":{"user":"a"}}"#),
            (Command::Unblock { user: "a".into() }, r#"{"unblock":{"user":"a"}}"#),
            (Command::Sessions {}, r#"{"sessions":{}}"#),
            (Command::Status {}, r#"{"status":{}}"#),
            (Command::Doctor {}, r#"{"doctor":{}}"#),
            (Command::Drain {}, r#"{"drain":{}}"#),
        ] {
            assert_eq!(serde_json::to_string(&command).unwrap(), text);
            assert_eq!(serde_json::from_str::<Command>(text).unwrap(), command);
        }
        for wrong in [r#"{"revoke":{}}"#, r#"{"revoke":{"user":"a","session":"b"}}"#, r#""sessions""#, "{}"] {
            assert!(serde_json::from_str::<Command>(wrong).is_err(), "{wrong}");
        }
    }

    #[tokio::test]
    async fn the_socket_is_its_owners_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("admin.sock");
        let listener = bind(&path).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(
            bind(&path).unwrap_err().kind(),
            io::ErrorKind::AddrInUse,
            "one that is served is nobody's to take"
        );
        drop(listener);
        // Nor is another file that stands there, or leads elsewhere.
        let (file, link) = (folder.path().join("file"), folder.path().join("link"));
        std::fs::write(&file, "data").unwrap();
        std::os::unix::fs::symlink(&path, &link).unwrap();
        assert!(bind(&file).is_err() && bind(&link).is_err());
        assert_eq!(std::fs::read(&file).unwrap(), b"data");
    }

    #[test]
    fn moments_are_dates() {
        for (seconds, text) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (1_700_000_000, "2023-11-14T22:13:20Z"),
            (1_772_323_199, "2026-02-28T23:59:59Z"),
            (4_107_542_400, "2100-03-01T00:00:00Z"),
        ] {
            assert_eq!(moment(seconds), text);
        }
    }
}
