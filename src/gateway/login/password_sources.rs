//! The order of the password sources.
//!
//! Owns: the order, and the rule "the first source that knows the user is final" (docs/decisions.md#d12).
//! Must not know: limits on tries, sessions.
//!
//! The users file knows the users with a line in the file. etcd does not say whether a user exists: a wrong
//! password and an unknown user get the same answer. Therefore:
//! - `["file", "etcd"]`: the file decides for its own users, even for users known to etcd; etcd decides for
//!   all other users. Use this order to move accounts from etcd into the file user by user.
//! - `["etcd", "file"]`: etcd's yes and etcd's no are both final. A no may be the wrong password of a user
//!   known to etcd; asking the file next would give the user two passwords, and the old password would
//!   survive a change. The file decides only where etcd has no password to compare with: for a user without a
//!   password (`--no-password`), or with auth off.
//!
//! Invariants: a password refused by a source is shown to no other source; a login without proof says so.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::config::{PasswordSources, Passwords};
use crate::credentials::{AuthRevisionTracker, Credentials, LoginFailure};
use crate::gateway::exchange::PATIENCE;
use crate::gateway::login::password_check::{AuthOffTrust, LoginCredentials, LoginDenial, LoginProof};
use crate::gateway::login::users_file::UsersFileSource;
use crate::identity::{MemberId, UserName};
use crate::members::membership::{AuthSetting, MembersHandle};
use crate::published::Published;
use crate::users::{UserLineMark, UserPasswordHashes};

/// Pause before the members are asked again while no member can answer; a change of the members ends the
/// pause.
const PAUSE: Duration = Duration::from_millis(100);

/// The password sources of this process.
pub(super) struct PasswordSourceOrder {
    /// The order and the users file, as one value: both change together.
    pub(super) passwords: Arc<Published<Passwords>>,
    pub(super) file: Arc<UsersFileSource>,
    pub(super) credentials: Arc<Credentials>,
    pub(super) members: MembersHandle,
    pub(super) moves: AuthRevisionTracker,
}

impl PasswordSourceOrder {
    /// Returns a result known without a bcrypt or an argon2: the password was right, or auth is off and no
    /// proof is possible. Remembered refusals are not used here: each source remembers refusals differently,
    /// and the difference would reveal the source that knows the user.
    pub(super) async fn recall(&self, login: &LoginCredentials, off: AuthOffTrust) -> Option<LoginProof> {
        let Passwords { sources, users, .. } = &*self.passwords.load_full();
        let file = || self.file.recall(users, login).map(LoginProof::File);
        let in_file = users.line(&login.user).is_some();
        match sources {
            PasswordSources::Etcd => self.recall_etcd(login, off).await,
            PasswordSources::File => file(),
            PasswordSources::FileThenEtcd if in_file => file(),
            PasswordSources::FileThenEtcd => self.recall_etcd(login, off).await,
            // The file has accepted this password, so the login is no guess: etcd is asked again to confirm
            // that etcd has no password for the user.
            PasswordSources::EtcdThenFile if file().is_some() => self.ask(login, off).await.ok(),
            PasswordSources::EtcdThenFile => {
                self.recall_etcd(login, off).await.filter(|proved| *proved != LoginProof::Nothing || !in_file)
            }
        }
    }

    /// True if etcd's acceptance of the user's password at `auth_revision` is final and would be repeated
    /// now.
    pub(super) async fn is_unmoved(&self, user: &UserName, auth_revision: u64) -> bool {
        let passwords = self.passwords.load_full();
        let etcd_decides = match passwords.sources {
            PasswordSources::Etcd | PasswordSources::EtcdThenFile => true,
            PasswordSources::FileThenEtcd => passwords.users.line(user).is_none(),
            PasswordSources::File => false,
        };
        etcd_decides && auth_revision != 0 && self.moves.current().await == Some(auth_revision)
    }

    /// Asks the sources, whatever the cost.
    pub(super) async fn ask(
        &self,
        login: &LoginCredentials,
        off: AuthOffTrust,
    ) -> Result<LoginProof, LoginDenial> {
        let Passwords { sources, users, .. } = &*self.passwords.load_full();
        let in_file = users.line(&login.user).is_some();
        match sources {
            PasswordSources::Etcd => self.etcd(login, off).await,
            PasswordSources::File => self.file(users, login).await,
            PasswordSources::FileThenEtcd if in_file => self.file(users, login).await,
            PasswordSources::FileThenEtcd => self.etcd(login, off).await,
            PasswordSources::EtcdThenFile => match self.etcd(login, off).await {
                Ok(LoginProof::Nothing) | Err(LoginDenial::NoPassword) if in_file => {
                    self.file(users, login).await
                }
                final_answer => final_answer,
            },
        }
    }

    async fn file(
        &self,
        users: &UserPasswordHashes,
        login: &LoginCredentials,
    ) -> Result<LoginProof, LoginDenial> {
        match self.file.recall(users, login) {
            Some(line) => Ok(LoginProof::File(line)),
            None => self.file.compare(users, login).await.map(LoginProof::File),
        }
    }

    /// The mark of the user's line in the users file, whatever the order of the sources.
    pub(super) fn line(&self, user: &UserName) -> Option<UserLineMark> {
        self.passwords.load().users.line(user)
    }

    async fn recall_etcd(&self, login: &LoginCredentials, off: AuthOffTrust) -> Option<LoginProof> {
        if off == AuthOffTrust::Believed && self.members.auth.now() == AuthSetting::Off {
            return Some(LoginProof::Nothing);
        }
        let LoginCredentials { user, password, .. } = login;
        let ready = self.order_of(login);
        let known = if ready.is_empty() {
            self.credentials.recall_leaderless(user, password, &self.leaderless()).await
        } else {
            self.credentials.recall(user, password, &ready).await
        };
        known.then_some(LoginProof::Etcd)
    }

    /// Members without a leader: able to confirm a token, unable to make a login.
    fn leaderless(&self) -> Vec<MemberId> {
        self.members.snapshot.load().leaderless_voters().map(|member| member.id).collect()
    }

    /// The order in which the members are asked. bcrypt runs on the member, so each member gets an equal
    /// share.
    fn order_of(&self, login: &LoginCredentials) -> Vec<MemberId> {
        let mut members: Vec<MemberId> =
            self.members.snapshot.load().ready_voters().map(|member| member.id).collect();
        let first = login.fingerprint.bucket_of(members.len());
        members.rotate_left(first);
        members
    }

    /// Asks etcd, repeatedly while no member can answer.
    async fn etcd(&self, login: &LoginCredentials, off: AuthOffTrust) -> Result<LoginProof, LoginDenial> {
        let until = Instant::now() + PATIENCE;
        loop {
            if off == AuthOffTrust::Believed && self.members.auth.now() == AuthSetting::Off {
                return Ok(LoginProof::Nothing);
            }
            let members = self.order_of(login);
            match self.credentials.verify(&login.user, &login.password, &members).await {
                Ok(_identity) => return Ok(LoginProof::Etcd),
                Err(LoginFailure::AuthDisabled) => {
                    self.members.record_auth(AuthSetting::Off);
                    return Ok(LoginProof::Nothing);
                }
                Err(LoginFailure::WrongPassword) => return Err(LoginDenial::WrongPassword),
                Err(LoginFailure::NoPassword) => return Err(LoginDenial::NoPassword),
                Err(LoginFailure::Unavailable(_) | LoginFailure::NoAnswer | LoginFailure::Busy) => {
                    if Instant::now() + PAUSE > until {
                        return Err(LoginDenial::Untold);
                    }
                    self.members.pause_or_change(PAUSE).await;
                }
            }
        }
    }
}
