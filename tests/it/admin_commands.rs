//! The admin socket: whatever a peer sends, it is told no, costs little, and keeps nobody else out; and only this user's
//! processes are listened to.

use std::fs::Permissions;
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use futures_util::future::join_all;
use keyward::admin::socket::{self, AdminAnswer, AdminCommand};
use keyward::downstream::session::RevocationEntry;
use keyward::identity::UserName;
use keyward::tasks::Tasks;
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::UnixStream;

use crate::member::Member;
use crate::rig::{Keyward, real};

/// A Keyward with an admin socket.
struct Office {
    folder: tempfile::TempDir,
    keyward: Keyward,
}

impl Office {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let member = Member::new(1, &Tasks::default());
        let keyward = Keyward::with_auth(&[&member]);
        let path = folder.path().join("admin.sock");
        let bound = socket::bind(&path).expect("bound");
        let serve = socket::serve(bound, path.as_path().into(), keyward.admin(), keyward.tasks.clone());
        keyward.tasks.spawn("admin socket", serve).detach();
        Self { folder, keyward }
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("admin.sock")
    }

    async fn visit(&self) -> Visitor {
        Visitor(BufReader::new(UnixStream::connect(self.path()).await.expect("it listens")))
    }

    fn blocked(&self) -> Vec<UserName> {
        let blocked = |entry| match entry {
            RevocationEntry::User(name, standing) if standing.blocked => Some(name),
            _ => None,
        };
        let mut all: Vec<_> =
            self.keyward.admin().register.revocations().entries().filter_map(blocked).collect();
        all.sort();
        all
    }
}

struct Visitor(BufReader<UnixStream>);

impl Visitor {
    async fn says(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.0.write_all(bytes).await
    }

    /// The next answer; none where the socket was closed.
    async fn hears(&mut self) -> Option<AdminAnswer> {
        let mut line = String::new();
        match self.0.read_line(&mut line).await {
            // Whoever is closed before all that it said was read hears so as a reset.
            Ok(0) | Err(_) => None,
            Ok(_) => Some(serde_json::from_str(&line).expect("an answer")),
        }
    }

    async fn asks(&mut self, command: &AdminCommand) -> Option<AdminAnswer> {
        let mut line = serde_json::to_vec(command).expect("JSON");
        line.push(b'\n');
        self.says(&line).await.expect("taken");
        self.hears().await
    }
}

fn block(user: &str) -> AdminCommand {
    AdminCommand::Block { user: user.to_owned() }
}

#[test]
fn garbage_is_refused_and_the_next_line_is_heard() {
    real(async {
        let office = Office::new();
        let mut visitor = office.visit().await;
        let deep = "[".repeat(60_000);
        let long = format!("{{\"block\":{{\"user\":\"{}", "x".repeat(60_000));
        let wrong: [&[u8]; 12] = [
            b"",
            b"x",
            b"{}",
            b"null",
            b"\"sessions\"",
            b"\0\0\0\0",
            b"\xff\xfe{\"sessions\":{}}",
            b"{\"block\":{\"user\":1}}",
            b"{\"block\":{\"user\":\"a\",\"user\":\"b\"}}",
            b"{\"block\":{\"user\":\"a\"}}{\"block\":{\"user\":\"b\"}}",
            deep.as_bytes(),
            long.as_bytes(),
        ];
        for line in wrong {
            visitor.says(&[line, b"\n"].concat()).await.expect("taken");
            let answer = visitor.hears().await.expect("an answer");
            assert!(matches!(answer, AdminAnswer::Failed(_)), "{answer:?}");
        }
        let bad_id = AdminCommand::RevokeSession { session: "12".into() };
        assert!(matches!(visitor.asks(&bad_id).await, Some(AdminAnswer::Failed(_))));
        assert!(office.blocked().is_empty());
        assert!(matches!(visitor.asks(&block("alice")).await, Some(AdminAnswer::Done(_))));
        assert_eq!(office.blocked(), ["alice".into()]);
    });
}

#[test]
fn a_line_without_an_end_is_refused_and_its_rest_is_no_command() {
    real(async {
        let office = Office::new();
        for filling in [b'x', b' '] {
            let mut visitor = office.visit().await;
            // A reader of pieces would take the last one for a command of its own.
            let mut line = vec![filling; 8 << 20];
            line.extend_from_slice(b"{\"block\":{\"user\":\"alice\"}}\n");
            // It may be closed while it speaks.
            drop(visitor.says(&line).await);
            while let Some(answer) = visitor.hears().await {
                assert!(matches!(answer, AdminAnswer::Failed(_)), "{answer:?}");
            }
            assert!(office.blocked().is_empty());
        }
        let mut endless = office.visit().await;
        let mut sent = 0_usize;
        while endless.says(&[b'y'; 4096]).await.is_ok() {
            sent += 4096;
            assert!(sent < 64 << 20, "it is not heard for ever");
        }
        assert!(matches!(office.visit().await.asks(&block("bob")).await, Some(AdminAnswer::Done(_))));
    });
}

#[test]
fn a_peer_that_leaves_in_the_middle_harms_nobody() {
    real(async {
        let office = Office::new();
        for part in ["", "{\"block\":", "{\"block\":{\"user\":\"alice\"}}"] {
            let mut visitor = office.visit().await;
            visitor.says(part.as_bytes()).await.expect("taken");
        }
        // More than are served at once, each with an answer that nobody takes.
        for _ in 0..32 {
            let mut visitor = office.visit().await;
            visitor.says(b"{\"sessions\":{}}\n").await.expect("taken");
        }
        assert!(matches!(
            office.visit().await.asks(&AdminCommand::Sessions {}).await,
            Some(AdminAnswer::Sessions(_))
        ));
        assert!(office.blocked().is_empty());
    });
}

#[test]
fn commands_at_the_same_time_are_all_done() {
    real(async {
        let office = Office::new();
        let visitors = (0..24).map(async |visitor| {
            for round in 0..8 {
                let mut socket = office.visit().await;
                let user = format!("user-{visitor:02}-{round}");
                for command in [block(&user), AdminCommand::Revoke { user: user.clone() }, block("all")] {
                    let answer = socket.asks(&command).await;
                    assert!(matches!(answer, Some(AdminAnswer::Done(_))), "{command:?}: {answer:?}");
                }
                if round % 2 == 1 {
                    let answer = socket.asks(&AdminCommand::Unblock { user }).await;
                    assert!(matches!(answer, Some(AdminAnswer::Done(_))), "{answer:?}");
                }
            }
        });
        join_all(visitors).await;
        let expected = (0..24).flat_map(|visitor| (0..8).step_by(2).map(move |round| (visitor, round)));
        let mut expected: Vec<UserName> =
            expected.map(|(visitor, round)| format!("user-{visitor:02}-{round}").as_str().into()).collect();
        expected.push("all".into());
        expected.sort();
        assert_eq!(office.blocked(), expected);
        assert_eq!(office.keyward.admin().register.revocations().len(), 24 * 8 + 1);
    });
}

/// Needs root to become another user; elsewhere the system itself keeps others out, by the socket's mode.
#[test]
fn another_users_process_is_not_listened_to() {
    real(async {
        let office = Office::new();
        let mode = std::fs::metadata(office.path()).expect("it is there").permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        if !rustix::process::geteuid().is_root() {
            return println!("not root: another user cannot be tried");
        }
        // As in the moment before its mode is set.
        let open = |path: &Path, mode| std::fs::set_permissions(path, Permissions::from_mode(mode));
        open(office.folder.path(), 0o755).and_then(|()| open(&office.path(), 0o666)).expect("ours");
        let program = office.folder.path().join("keyward");
        std::fs::copy(env!("CARGO_BIN_EXE_keyward"), &program).expect("copied");
        let ask = async |user: &str| {
            let mut command = tokio::process::Command::new("setpriv");
            command.args([&format!("--reuid={user}"), &format!("--regid={user}"), "--clear-groups"]);
            command.arg(&program).args(["block", "alice", "--socket"]).arg(office.path());
            let output =
                command.stdin(Stdio::null()).kill_on_drop(true).output().await.expect("setpriv runs");
            (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
        };
        let (code, told) = ask("65534").await;
        assert_eq!(code, Some(1), "{told}");
        assert!(told.contains("only Keyward's own user and root may"), "{told}");
        assert!(office.blocked().is_empty());
        assert_eq!(ask("0").await.0, Some(0));
        assert_eq!(office.blocked(), ["alice".into()]);
    });
}
