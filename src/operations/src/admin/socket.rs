//! The admin socket: operator commands from the same machine and the same user.
//!
//! Owns: its access control, and the order of commands and answers (their form is in `socket_protocol`, the
//! client's end in `socket_client`). Must not know: the persistence of a change. Invariants: only the
//! socket's owner and root may give commands, also in the moment between bind and chmod; a client costs
//! bounded time and memory; a line without its newline is never executed, in whole or in part; names given
//! in a command may appear in an answer, and keys and users in a view; tokens and passwords never.
//!
//! A command is one line of JSON, and so is its answer: `{"revoke":{"user":"alice"}}`, `{"done":"…"}`.

use std::io::{self, Write as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader, Interest};
use tokio::net::unix::WriteHalf;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{Semaphore, watch};
use tokio::time::timeout;

use super::AdminState;
use super::doctor::Doctor;
use super::drain::{Progress, Stage};
use super::fleet::Fleet;
use super::grant_effect::unseen_peer_warning;
use super::local_commands::{LocalCommands, result_of};
use super::log_level::change_log_filter;
use super::operator_actions::CommandOrigin;
use super::revocation_effect::RevocationEffect;
pub use super::socket_protocol::{AdminAnswer, AdminCommand};
use super::view::Viewer;
use crate::policy_store::{PolicyCommand, PolicyRegister, PolicyStoreError};
use crate::revocation::{RevocationError, RevocationRegister, RevocationStorage};
use keyward_base::io::listening_sockets::ListeningSockets;
use keyward_base::io::socket_passing;
use keyward_base::tasks::Tasks;
use keyward_config::reload_request::ReloadRequests;
use keyward_downstream::acceptor::remove_stale;
use keyward_downstream::session::{InvalidSessionId, RevocationChange, Sealer};
use keyward_etcd::identity::UserName;
use keyward_records::audit::log::{AuditLog, AuditObstacle};

/// Maximum length of a command line: a policy of 4 MiB with escapes.
const LONGEST_LINE: u64 = 6 << 20;
/// Time limit for receiving a command, and for sending its answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// Time limit for a process that takes over to be ready.
const HAND_OVER: Duration = Duration::from_secs(90);
/// Time limit for waiting for a reload: a hanging file system must not take the places of other commands.
const RELOAD: Duration = Duration::from_secs(20);
/// Interval of the progress reports of a drain.
const NEWS: Duration = Duration::from_millis(500);
/// Maximum of concurrent clients.
const PEERS: usize = 8;

/// Executes the commands.
pub struct AdminCommandService {
    /// Persists revocations.
    pub register: RevocationRegister,
    /// The policy stored in etcd, if configured.
    pub policy: Option<PolicyRegister>,
    /// Knows the recent sessions.
    pub sealer: Arc<Sealer>,
    /// Reports the status.
    pub state: Arc<AdminState>,
    /// Runs the examination of `keyward doctor`.
    pub doctor: Arc<Doctor>,
    /// Reads views.
    pub viewer: Arc<Viewer>,
    /// Executes the commands about this process alone.
    pub local: Arc<LocalCommands>,
    /// Asks the other replicas, and answers them.
    pub fleet: Arc<Fleet>,
    /// Asks the reload task.
    pub reload: ReloadRequests,
    /// The audit log, if on.
    pub audit: Option<Arc<AuditLog>>,
    /// The listening sockets, for a process that takes over.
    pub sockets: Arc<ListeningSockets>,
    /// Taken while a process takes over: it has read the revocations, and would not know of a later change.
    pub hand_over: Semaphore,
}

/// Binds the socket. A stale socket is replaced, a served socket is an error.
///
/// # Errors
/// The operating system's error.
pub fn bind(path: &Path) -> io::Result<UnixListener> {
    remove_stale(path)?;
    let listener = UnixListener::bind(path)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
    Ok(listener)
}

/// Serves the socket forever. `path` is the bound path of `listener`.
pub async fn serve(listener: UnixListener, path: Arc<Path>, desk: Arc<AdminCommandService>, tasks: Tasks) {
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
        let uid = stream.peer_cred().ok().map(|peer| peer.uid());
        if uid.is_none_or(|uid| uid != owner && uid != 0) {
            tracing::warn!("an admin command of another user was refused");
            // Answers the refusal, so that the client cannot believe its command was executed.
            drop(refuse(stream));
            continue;
        }
        let desk = Arc::clone(&desk);
        let peer = async move {
            let _place = place;
            if let Err(error) = converse(stream, uid, &desk).await {
                tracing::debug!(%error, "an admin peer left");
            }
        };
        tasks.spawn("admin command", peer).detach();
    }
}

/// Sends the refusal without reading or waiting: the text fits into the socket's buffer.
fn refuse(stream: UnixStream) -> io::Result<()> {
    let answer = AdminAnswer::Failed("only Keyward's own user and root may".into());
    stream.into_std()?.write_all(&line_of(&answer)?)
}

async fn converse(mut stream: UnixStream, uid: Option<u32>, desk: &AdminCommandService) -> io::Result<()> {
    // A live receiver delays the exit of the process until this client has been told of the end.
    let mut waits: Option<watch::Receiver<Stage>> = None;
    let mut hand_over = None;
    let (read, mut write) = stream.split();
    let mut read = BufReader::new(read);
    loop {
        let mut line = Vec::new();
        let mut asked = (&mut read).take(LONGEST_LINE);
        let patience = if hand_over.is_some() { HAND_OVER } else { PATIENCE };
        let length = timeout(patience, asked.read_until(b'\n', &mut line)).await??;
        if length == 0 {
            return Ok(());
        }
        let whole = line.ends_with(b"\n");
        let mut sockets = Vec::new();
        let answer = match serde_json::from_slice(&line) {
            _ if !whole => AdminAnswer::Failed("not a command: the line is too long, or was cut".into()),
            Ok(AdminCommand::Drain { loses_audit_records }) if waits.is_none() => {
                desk.begin_drain(loses_audit_records, &mut waits, uid)
            }
            Ok(AdminCommand::Drain { .. }) => desk.drain(&mut waits).await,
            Ok(AdminCommand::HandOver {}) => {
                hand_over = hand_over.or_else(|| desk.hand_over.try_acquire().ok());
                match &hand_over {
                    None => AdminAnswer::Failed("another process is taking over".into()),
                    Some(_) => desk.copy_sockets(&mut sockets, uid),
                }
            }
            Ok(AdminCommand::Release { .. }) if hand_over.is_none() => {
                AdminAnswer::Failed("no sockets were handed over on this connection".into())
            }
            Ok(AdminCommand::Release { left }) => {
                waits.get_or_insert_with(|| desk.state.exit.listen());
                desk.release_sockets(left, &mut sockets, uid).await
            }
            Ok(command) => desk.answer(command, uid).await,
            Err(error) => AdminAnswer::Failed(format!("not a command: {error}")),
        };
        timeout(PATIENCE, send(&mut write, &line_of(&answer)?, &sockets)).await??;
        // The remainder of an overlong line is no command.
        if !whole {
            return Ok(());
        }
    }
}

fn line_of(answer: &AdminAnswer) -> io::Result<Vec<u8>> {
    let mut line = serde_json::to_vec(answer)?;
    line.push(b'\n');
    Ok(line)
}

/// Sends a line, and sockets with its first bytes.
async fn send(to: &mut WriteHalf<'_>, line: &[u8], sockets: &[OwnedFd]) -> io::Result<()> {
    let mut rest = line;
    if !sockets.is_empty() {
        let stream: &UnixStream = to.as_ref();
        let send = || socket_passing::send(stream.as_fd(), rest, sockets);
        let sent = stream.async_io(Interest::WRITABLE, send).await?;
        rest = &rest[sent..];
    }
    to.write_all(rest).await
}

impl AdminCommandService {
    /// Copies the listening sockets into `sockets`, for the answer.
    fn copy_sockets(&self, sockets: &mut Vec<OwnedFd>, uid: Option<u32>) -> AdminAnswer {
        tracing::info!(uid, "another process asks for the listening sockets");
        if self.audit.as_ref().and_then(|audit| audit.obstacle()) == Some(AuditObstacle::File) {
            return AdminAnswer::Failed("audit.file: the audit log cannot be written".into());
        }
        match self.sockets.copies() {
            Ok((names, copies)) => {
                sockets.extend(copies);
                AdminAnswer::HandingOver(names)
            }
            Err(error) => AdminAnswer::Failed(error.to_string()),
        }
    }

    /// Leaves the audit file and the listening sockets to the process that has copies, and begins the
    /// drain. The answer brings the way of the last audit records, in `sockets`.
    async fn release_sockets(
        &self,
        left: Vec<String>,
        sockets: &mut Vec<OwnedFd>,
        uid: Option<u32>,
    ) -> AdminAnswer {
        tracing::info!(uid, "another process has taken over the listening sockets");
        self.local.record(&AdminCommand::Release { left: Vec::new() }, None, "done", uid);
        if let Some(audit) = &self.audit {
            match audit.leave_to_successor().await {
                Ok(relay) => sockets.extend(relay),
                Err(error) => {
                    tracing::error!(%error, "the audit file is not handed over, and this process goes on");
                    return AdminAnswer::Failed(format!("audit.file: {error}"));
                }
            }
        }
        self.sockets.leave(left);
        self.state.exit.hand_over();
        self.draining()
    }

    async fn answer(&self, command: AdminCommand, uid: Option<u32>) -> AdminAnswer {
        if let AdminCommand::Policy(asked) = &command {
            let answer = self.answer_policy(asked, uid).await;
            let stored = match &answer {
                AdminAnswer::Policy(answer) => answer.generation,
                _ => None,
            };
            self.local.record(&command, stored, result_of(&answer), uid);
            return answer;
        }
        if let AdminCommand::Reload {} = &command {
            return self.reload_configuration(uid).await;
        }
        if let AdminCommand::LogLevel { filter } = &command {
            let answer = change_log_filter(filter, uid).map_or_else(AdminAnswer::Failed, AdminAnswer::Done);
            self.local.record(&command, None, result_of(&answer), uid);
            return answer;
        }
        let command = match command {
            AdminCommand::Fleet(question) => return self.fleet.ask(question, uid).await,
            command => command,
        };
        let change = match change(&command) {
            Ok(Some(change)) => change,
            Ok(None) => return self.local.execute(command, &CommandOrigin::from(uid)).await,
            Err(error) => return AdminAnswer::Failed(error.to_string()),
        };
        let answer = self.change(change).await;
        self.local.record(&command, None, result_of(&answer), uid);
        answer
    }

    async fn change(&self, change: RevocationChange) -> AdminAnswer {
        if self.hand_over.available_permits() == 0 {
            return AdminAnswer::Failed(
                "another process is taking over: repeat the command in a moment".into(),
            );
        }
        let effect = RevocationEffect::before(change.clone(), &self.sealer, &self.register.revocations());
        let stored = self.register.change(change).await;
        let reaches_others = matches!(stored, Ok(RevocationStorage::Etcd));
        let storage = match stored {
            Ok(RevocationStorage::Etcd) => "in force on this replica now, on all others within 2 s",
            Ok(RevocationStorage::File) => {
                "in force now; kept in revocation.state_file, for this replica alone"
            }
            Ok(RevocationStorage::Memory) => {
                "in force now, until this process ends: set revocation.etcd_prefix or revocation.state_file \
                 to keep it"
            }
            Err(trouble) => {
                let why = trouble.to_string();
                return match trouble {
                    RevocationError::NotKept(_) => AdminAnswer::NotKept(why),
                    RevocationError::Unknown(_) => AdminAnswer::Unknown(why),
                    RevocationError::Unchanged(_) | RevocationError::Full(_) | RevocationError::Busy => {
                        AdminAnswer::Failed(why)
                    }
                };
            }
        };
        AdminAnswer::Done(format!("{storage}\n{}", effect.describe(&self.sealer, reaches_others).await))
    }

    /// Lets the reload task reload. The reload task records the reload with `uid`.
    async fn reload_configuration(&self, uid: Option<u32>) -> AdminAnswer {
        tracing::info!(uid, "an operator requested a reload");
        match timeout(RELOAD, self.reload.reload(uid)).await {
            Ok(Some(outcome)) => AdminAnswer::Reloaded(outcome),
            Ok(None) => {
                self.local.record(&AdminCommand::Reload {}, None, "failed", uid);
                AdminAnswer::Failed("reload is off: the log has the reason".into())
            }
            Err(_) => AdminAnswer::Unknown("the reload still runs; the log will have its outcome".into()),
        }
    }

    async fn answer_policy(&self, command: &PolicyCommand, uid: Option<u32>) -> AdminAnswer {
        let Some(policy) = &self.policy else {
            let why = "policy.etcd_prefix is not set: the policy is that of policy.file (keyward show \
                       config), which keyward policy check, test and explain judge";
            return AdminAnswer::Failed(why.into());
        };
        match policy.execute(command.clone(), uid).await {
            Ok(mut answer) => {
                if let PolicyCommand::Grant { peer, .. } = command {
                    answer.text += unseen_peer_warning(&self.viewer, peer).await.unwrap_or_default();
                }
                AdminAnswer::Policy(answer)
            }
            Err(PolicyStoreError::Unchanged(reason)) => AdminAnswer::Failed(reason),
            Err(unknown @ PolicyStoreError::Unknown(_)) => AdminAnswer::Unknown(unknown.to_string()),
        }
    }

    /// Begins the drain at the first command of a connection, unless audit records would be lost.
    fn begin_drain(
        &self,
        loses_audit_records: bool,
        waits: &mut Option<watch::Receiver<Stage>>,
        uid: Option<u32>,
    ) -> AdminAnswer {
        let command = AdminCommand::Drain { loses_audit_records };
        let waiting = self.audit_records_waiting();
        // A drain that has begun, as by SIGTERM, cannot be refused any more.
        if waiting > 0 && !loses_audit_records && self.state.exit.stage() == Stage::Serving {
            self.local.record(&command, None, "failed", uid);
            return AdminAnswer::Failed(format!(
                "nothing has changed: {waiting} audit records of answered calls wait in memory, since the \
                 audit file cannot be written, and this process takes them with it. Make room first (runbook \
                 KeywardAuditRecordsLost); keyward drain --lose-audit-records drains all the same, and loses \
                 them unless there is room within drain.timeout"
            ));
        }
        self.local.record(&command, None, "done", uid);
        *waits = Some(self.state.exit.listen());
        self.state.exit.request_drain();
        self.draining()
    }

    /// Waits for progress of the drain at a repeated command.
    async fn drain(&self, waits: &mut Option<watch::Receiver<Stage>>) -> AdminAnswer {
        if let Some(stages) = waits {
            let ended = stages.wait_for(|stage| *stage == Stage::Ended);
            // Upon a timeout the answer reports the present stage.
            drop(timeout(NEWS, ended).await);
        }
        self.draining()
    }

    fn draining(&self) -> AdminAnswer {
        let progress = self.state.exit.progress(&self.state.metrics);
        AdminAnswer::Draining(Progress { audit_waiting: self.audit_records_waiting(), ..progress })
    }

    fn audit_records_waiting(&self) -> u64 {
        self.audit.as_ref().map_or(0, |audit| audit.waiting_for_disk())
    }
}

fn change(command: &AdminCommand) -> Result<Option<RevocationChange>, InvalidSessionId> {
    let user = |name: &str| UserName::from(name);
    Ok(Some(match command {
        AdminCommand::Revoke { user: name } => RevocationChange::Revoke(user(name)),
        AdminCommand::Block { user: name } => RevocationChange::Block(user(name)),
        AdminCommand::Unblock { user: name } => RevocationChange::Unblock(user(name)),
        AdminCommand::RevokeSession { session } => RevocationChange::RevokeSession(session.parse()?),
        AdminCommand::Sessions {}
        | AdminCommand::Status {}
        | AdminCommand::Doctor {}
        | AdminCommand::Policy(_)
        | AdminCommand::Explain { .. }
        | AdminCommand::Reload {}
        | AdminCommand::LogLevel { .. }
        | AdminCommand::Show { .. }
        | AdminCommand::Kick { .. }
        | AdminCommand::KickPeer { .. }
        | AdminCommand::Fleet(_)
        | AdminCommand::Pause { .. }
        | AdminCommand::Resume { .. }
        | AdminCommand::HandOver {}
        | AdminCommand::Release { .. }
        | AdminCommand::Drain { .. } => {
            return Ok(None);
        }
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::admin::view::ViewTopic;

    #[test]
    fn a_command_is_one_line_of_json() {
        for (command, text) in [
            (AdminCommand::Revoke { user: "a\nb".into() }, r#"{"revoke":{"user":"a\nb"}}"#),
            (AdminCommand::RevokeSession { session: "7".into() }, r#"{"revoke_session":{"session":"7"}}"#),
            (AdminCommand::Block { user: "a".into() }, r#"{"block":{"user":"a"}}"#),
            (AdminCommand::Unblock { user: "a".into() }, r#"{"unblock":{"user":"a"}}"#),
            (AdminCommand::Sessions {}, r#"{"sessions":{}}"#),
            (AdminCommand::Status {}, r#"{"status":{}}"#),
            (AdminCommand::Doctor {}, r#"{"doctor":{}}"#),
            (AdminCommand::Drain { loses_audit_records: false }, r#"{"drain":{}}"#),
            (AdminCommand::Drain { loses_audit_records: true }, r#"{"drain":{"loses_audit_records":true}}"#),
            (AdminCommand::Reload {}, r#"{"reload":{}}"#),
            (AdminCommand::HandOver {}, r#"{"hand_over":{}}"#),
            (AdminCommand::Release { left: vec!["a".into()] }, r#"{"release":{"left":["a"]}}"#),
            (AdminCommand::LogLevel { filter: "info".into() }, r#"{"log_level":{"filter":"info"}}"#),
            (AdminCommand::Show { topic: ViewTopic::Clients }, r#"{"show":{"topic":"clients"}}"#),
            (AdminCommand::Explain { calls: vec![] }, r#"{"explain":{"calls":[]}}"#),
            (AdminCommand::Kick { client: 7 }, r#"{"kick":{"client":7}}"#),
            (AdminCommand::KickPeer { peer: "a".into() }, r#"{"kick_peer":{"peer":"a"}}"#),
            (AdminCommand::Pause { member: "m1".into() }, r#"{"pause":{"member":"m1"}}"#),
            (AdminCommand::Resume { member: "m1".into() }, r#"{"resume":{"member":"m1"}}"#),
        ] {
            assert_eq!(serde_json::to_string(&command).unwrap(), text);
            assert_eq!(serde_json::from_str::<AdminCommand>(text).unwrap(), command);
        }
        for wrong in [r#"{"revoke":{}}"#, r#"{"revoke":{"user":"a","session":"b"}}"#, r#""sessions""#, "{}"] {
            assert!(serde_json::from_str::<AdminCommand>(wrong).is_err(), "{wrong}");
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
        // A regular file, or a symlink, at the path is not replaced.
        let (file, link) = (folder.path().join("file"), folder.path().join("link"));
        std::fs::write(&file, "data").unwrap();
        std::os::unix::fs::symlink(&path, &link).unwrap();
        assert!(bind(&file).is_err() && bind(&link).is_err());
        assert_eq!(std::fs::read(&file).unwrap(), b"data");
    }
}
