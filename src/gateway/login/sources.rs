//! Who says whether a password is right.
//!
//! Owns: the order of the password sources, and what "the first source that knows the user is final" means (rules 12).
//! Must not know: how often a client may try, sessions.
//!
//! The file knows the users that stand in it. etcd cannot be asked whom it knows: to a wrong password and to a user that
//! it does not have it gives the same answer. So:
//! - `["file", "etcd"]`: the file decides about its own users, whatever etcd thinks of them; etcd about all others. This is
//!   the order in which accounts move from etcd into the file one by one.
//! - `["etcd", "file"]`: etcd's yes and etcd's no are final, since a no may be a wrong password of a user that it knows; going
//!   on to the file after it would give such a user two passwords, of which the old one would outlive its change.
//!   The file decides where etcd says that it has no password to compare with: a user without a password (`--no-password`),
//!   or auth that is off.
//!
//! Invariants: a password that one source refused is shown to no other; a login that proves nothing says so.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::config::{PasswordSources, Passwords};
use crate::gateway::exchange::PATIENCE;
use crate::gateway::login::file::UsersFile;
use crate::identity::{MemberId, UserName};
use crate::published::Published;
use crate::secret::Secret;
use crate::upstream::credential::{Credentials, Fingerprint, LoginFailure};
use crate::upstream::membership::{Auth, MembersHandle};
use crate::users::{LineMark, Users};

/// While no member can tell, they are asked again this often, or as soon as the members change.
const PAUSE: Duration = Duration::from_millis(100);

/// A user and a password that are to be checked.
#[derive(Clone)]
pub struct Login {
    /// As the client gave it.
    pub user: UserName,
    /// As the client gave it.
    pub password: Arc<Secret<String>>,
    /// Stands for the two.
    pub fingerprint: Fingerprint,
}

/// What a login proved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Proved {
    /// etcd accepted the password.
    Etcd,
    /// This line of the users file accepted it.
    File(LineMark),
    /// Nothing: auth is off, and the user is not in a users file (rules 11).
    Nothing,
}

/// Why a login proved nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Denied {
    /// The password is wrong, or there is no such user.
    WrongPassword,
    /// etcd has the user without a password.
    NoPassword,
    /// Too many wrong ones came before it.
    Limited,
    /// Nobody could say in time.
    Untold,
}

/// What a login may cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Effort {
    /// No more than a look at what is known: neither bcrypt nor argon2.
    Recall,
    /// Whatever it takes.
    Ask,
}

/// The password sources of this process.
pub(super) struct Sources {
    /// Their order and the users file; one value, so that both change together.
    pub(super) passwords: Arc<Published<Passwords>>,
    pub(super) file: UsersFile,
    pub(super) credentials: Arc<Credentials>,
    pub(super) members: MembersHandle,
}

type Answer = Option<Result<Proved, Denied>>;

impl Sources {
    /// What the sources say; none where that would take more than the effort that is allowed.
    pub(super) async fn ask(&self, login: &Login, effort: Effort) -> Answer {
        let Passwords { sources, users, .. } = &*self.passwords.load_full();
        let in_file = users.line(&login.user).is_some();
        match sources {
            PasswordSources::Etcd => self.etcd(login, effort).await,
            PasswordSources::File => self.file(users, login, effort).await,
            PasswordSources::FileThenEtcd if in_file => self.file(users, login, effort).await,
            PasswordSources::FileThenEtcd => self.etcd(login, effort).await,
            PasswordSources::EtcdThenFile => {
                // Whom the file has accepted is not guessing: that etcd has no password is looked up again.
                let accepted = self.file.recall(users, login).is_some_and(|known| known.is_ok());
                match self.etcd(login, if accepted { Effort::Ask } else { effort }).await {
                    Some(Ok(Proved::Nothing) | Err(Denied::NoPassword)) if in_file => {
                        self.file(users, login, effort).await
                    }
                    final_answer => final_answer,
                }
            }
        }
    }

    async fn file(&self, users: &Users, login: &Login, effort: Effort) -> Answer {
        let told = match (self.file.recall(users, login), effort) {
            (Some(known), _) => known,
            (None, Effort::Recall) => return None,
            (None, Effort::Ask) => self.file.compare(users, login).await,
        };
        Some(told.map(Proved::File))
    }

    /// Asks again while no member can tell.
    async fn etcd(&self, login: &Login, effort: Effort) -> Answer {
        let until = Instant::now() + PATIENCE;
        let Login { user, password, .. } = login;
        loop {
            if self.members.auth.now() == Auth::Off {
                return Some(Ok(Proved::Nothing));
            }
            let mut members: Vec<MemberId> =
                self.members.snapshot.load().ready_voters().map(|member| member.id).collect();
            // bcrypt is the member's own work: each gets its share.
            let first = login.fingerprint.one_of(members.len());
            members.rotate_left(first);
            let told = match effort {
                Effort::Recall => self.credentials.recall(user, password, &members).await?,
                Effort::Ask => self.credentials.verify(user, password, &members).await.map(drop),
            };
            match told {
                Ok(()) => return Some(Ok(Proved::Etcd)),
                Err(LoginFailure::AuthDisabled) => self.members.auth_is(Auth::Off),
                Err(LoginFailure::WrongPassword) => return Some(Err(Denied::WrongPassword)),
                Err(LoginFailure::NoPassword) => return Some(Err(Denied::NoPassword)),
                Err(LoginFailure::Unavailable(_) | LoginFailure::NoAnswer | LoginFailure::Busy) => {
                    if Instant::now() + PAUSE > until {
                        return Some(Err(Denied::Untold));
                    }
                    self.members.pause_or_change(PAUSE).await;
                }
            }
        }
    }
}
