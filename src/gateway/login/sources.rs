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
use crate::upstream::credential::{Credentials, Fingerprint, LoginFailure, Moves};
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

/// Whether auth that is known to be off is taken for off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Off {
    /// It is: a call upstream will notice that it is on.
    Believed,
    /// etcd is asked: nothing else would notice.
    Asked,
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

/// The password sources of this process.
pub(super) struct Sources {
    /// Their order and the users file; one value, so that both change together.
    pub(super) passwords: Arc<Published<Passwords>>,
    pub(super) file: Arc<UsersFile>,
    pub(super) credentials: Arc<Credentials>,
    pub(super) members: MembersHandle,
    pub(super) moves: Moves,
}

impl Sources {
    /// What is known of a password without a bcrypt or an argon2: that it was right, or that there is nothing to prove.
    /// That one was refused is not told here: sources remember that in ways of their own, which would show whose a user is.
    pub(super) async fn recall(&self, login: &Login, off: Off) -> Option<Proved> {
        let Passwords { sources, users, .. } = &*self.passwords.load_full();
        let file = || self.file.recall(users, login).map(Proved::File);
        let in_file = users.line(&login.user).is_some();
        match sources {
            PasswordSources::Etcd => self.recall_etcd(login, off).await,
            PasswordSources::File => file(),
            PasswordSources::FileThenEtcd if in_file => file(),
            PasswordSources::FileThenEtcd => self.recall_etcd(login, off).await,
            // Whom the file has accepted is not guessing: that etcd has no password is looked up again.
            PasswordSources::EtcdThenFile if file().is_some() => self.ask(login, off).await.ok(),
            PasswordSources::EtcdThenFile => {
                self.recall_etcd(login, off).await.filter(|proved| *proved != Proved::Nothing || !in_file)
            }
        }
    }

    /// Whether what etcd said at this auth revision of the user's password is what it would say now, and final.
    pub(super) async fn is_unmoved(&self, user: &UserName, auth_revision: u64) -> bool {
        let passwords = self.passwords.load_full();
        let etcd_decides = match passwords.sources {
            PasswordSources::Etcd | PasswordSources::EtcdThenFile => true,
            PasswordSources::FileThenEtcd => passwords.users.line(user).is_none(),
            PasswordSources::File => false,
        };
        etcd_decides && auth_revision != 0 && self.moves.current().await == Some(auth_revision)
    }

    /// What the sources say, whatever it takes.
    pub(super) async fn ask(&self, login: &Login, off: Off) -> Result<Proved, Denied> {
        let Passwords { sources, users, .. } = &*self.passwords.load_full();
        let in_file = users.line(&login.user).is_some();
        match sources {
            PasswordSources::Etcd => self.etcd(login, off).await,
            PasswordSources::File => self.file(users, login).await,
            PasswordSources::FileThenEtcd if in_file => self.file(users, login).await,
            PasswordSources::FileThenEtcd => self.etcd(login, off).await,
            PasswordSources::EtcdThenFile => match self.etcd(login, off).await {
                Ok(Proved::Nothing) | Err(Denied::NoPassword) if in_file => self.file(users, login).await,
                final_answer => final_answer,
            },
        }
    }

    async fn file(&self, users: &Users, login: &Login) -> Result<Proved, Denied> {
        match self.file.recall(users, login) {
            Some(line) => Ok(Proved::File(line)),
            None => self.file.compare(users, login).await.map(Proved::File),
        }
    }

    /// The user's line in the users file, whatever it is worth.
    pub(super) fn line(&self, user: &UserName) -> Option<LineMark> {
        self.passwords.load().users.line(user)
    }

    async fn recall_etcd(&self, login: &Login, off: Off) -> Option<Proved> {
        if off == Off::Believed && self.members.auth.now() == Auth::Off {
            return Some(Proved::Nothing);
        }
        let Login { user, password, .. } = login;
        let ready = self.order_of(login);
        let known = if ready.is_empty() {
            self.credentials.recall_leaderless(user, password, &self.leaderless()).await
        } else {
            self.credentials.recall(user, password, &ready).await
        };
        known.then_some(Proved::Etcd)
    }

    /// Members that can look at a token, and can make no login.
    fn leaderless(&self) -> Vec<MemberId> {
        self.members.snapshot.load().leaderless_voters().map(|member| member.id).collect()
    }

    /// bcrypt is the member's own work: each gets its share.
    fn order_of(&self, login: &Login) -> Vec<MemberId> {
        let mut members: Vec<MemberId> =
            self.members.snapshot.load().ready_voters().map(|member| member.id).collect();
        let first = login.fingerprint.one_of(members.len());
        members.rotate_left(first);
        members
    }

    /// Asks again while no member can tell.
    async fn etcd(&self, login: &Login, off: Off) -> Result<Proved, Denied> {
        let until = Instant::now() + PATIENCE;
        loop {
            if off == Off::Believed && self.members.auth.now() == Auth::Off {
                return Ok(Proved::Nothing);
            }
            let members = self.order_of(login);
            match self.credentials.verify(&login.user, &login.password, &members).await {
                Ok(_identity) => return Ok(Proved::Etcd),
                Err(LoginFailure::AuthDisabled) => {
                    self.members.auth_is(Auth::Off);
                    return Ok(Proved::Nothing);
                }
                Err(LoginFailure::WrongPassword) => return Err(Denied::WrongPassword),
                Err(LoginFailure::NoPassword) => return Err(Denied::NoPassword),
                Err(LoginFailure::Unavailable(_) | LoginFailure::NoAnswer | LoginFailure::Busy) => {
                    if Instant::now() + PAUSE > until {
                        return Err(Denied::Untold);
                    }
                    self.members.pause_or_change(PAUSE).await;
                }
            }
        }
    }
}
