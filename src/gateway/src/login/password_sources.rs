//! The password sources, asked in order: etcd, and the users file.
//!
//! Owns: the question to a source and the answer; the order, and the rule "the first source that knows the
//! user is final" (docs/decisions.md#d12); the comparisons with the users file, and their number. Must not
//! know: limits on tries, sessions, the file's path.
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
//! Invariants: a password refused by a source is shown to no other source; a login without proof says so; a
//! comparison with the users file runs to the end after the caller has left, off the shards.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::time::Instant;

use crate::retries::PATIENCE;
use keyward_base::published::Published;
use keyward_base::secret::Secret;
use keyward_cluster::membership::{AuthSetting, MembersHandle};
use keyward_config::users::{UserLineMark, UserPasswordHashes};
use keyward_config::{PasswordSources, Passwords};
use keyward_etcd::identity::{MemberId, UserName};
use keyward_upstream::credentials::{
    AuthRevisionTracker, Credentials, LoginFailure, LoginProof, PasswordFingerprint, PasswordRefusal,
};

/// Pause before the members are asked again while no member can answer; a change of the members ends the
/// pause.
const PAUSE: Duration = Duration::from_millis(100);

/// Concurrent comparisons: each takes a core for some 30 ms and up to 64 MiB.
const COMPARISONS: usize = 2;

/// A user and a password to be checked.
#[derive(Clone)]
pub struct LoginCredentials {
    /// The user name, as given by the client.
    pub user: UserName,
    /// The password, as given by the client.
    pub password: Arc<Secret<String>>,
    /// Keyed hash of user and password.
    pub fingerprint: PasswordFingerprint,
}

/// The reason for a login without a proof.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoginDenial {
    /// A source refused the password.
    Refused(PasswordRefusal),
    /// The limits on failed logins refused the try.
    Limited,
    /// No source answered in time.
    Untold,
}

/// The treatment of auth last known to be off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AuthOffTrust {
    /// Taken for off: a call upstream will notice if auth is on again.
    Believed,
    /// etcd is asked, since no later call would notice.
    Asked,
}

/// The password sources of this process.
pub(super) struct PasswordSourceOrder {
    /// The order and the users file, as one value: both change together.
    pub(super) passwords: Published<Passwords>,
    pub(super) credentials: Arc<Credentials>,
    members: MembersHandle,
    pub(super) auth_revision: AuthRevisionTracker,
    comparisons: Arc<Semaphore>,
}

impl PasswordSourceOrder {
    pub(super) fn new(
        passwords: &Arc<Passwords>,
        credentials: Arc<Credentials>,
        members: MembersHandle,
    ) -> Self {
        Self {
            passwords: Published::new(Arc::clone(passwords)),
            credentials,
            members,
            auth_revision: AuthRevisionTracker::default(),
            comparisons: Arc::new(Semaphore::new(COMPARISONS)),
        }
    }

    /// Returns a result known without a bcrypt or an argon2: the password was right, or auth is off and no
    /// proof is possible. Remembered refusals are not used here: each source remembers refusals differently,
    /// and the difference would reveal the source that knows the user.
    pub(super) async fn recall(&self, login: &LoginCredentials, off: AuthOffTrust) -> Option<LoginProof> {
        let Passwords { sources, users, .. } = &*self.passwords.load_full();
        let file = || self.recall_file(users, login).map(LoginProof::File);
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
        etcd_decides && auth_revision != 0 && self.auth_revision.current().await == Some(auth_revision)
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
                Ok(LoginProof::Nothing) | Err(LoginDenial::Refused(PasswordRefusal::NoPassword))
                    if in_file =>
                {
                    self.file(users, login).await
                }
                final_answer => final_answer,
            },
        }
    }

    /// True if the password is known to be right, without asking a source.
    pub(super) fn is_known(&self, login: &LoginCredentials) -> bool {
        self.recall_file(&self.passwords.load().users, login).is_some()
            || self.credentials.is_proved(login.fingerprint)
    }

    /// The user's line among `users`, if the line has accepted this password before.
    fn recall_file(&self, users: &UserPasswordHashes, login: &LoginCredentials) -> Option<UserLineMark> {
        let memory = self.credentials.password_memory();
        users.line(&login.user).filter(|line| memory.is_accepted_by_line(login.fingerprint, *line))
    }

    async fn file(
        &self,
        users: &UserPasswordHashes,
        login: &LoginCredentials,
    ) -> Result<LoginProof, LoginDenial> {
        match self.recall_file(users, login) {
            Some(line) => Ok(LoginProof::File(line)),
            None => self.compare(users, login).await.map(LoginProof::File),
        }
    }

    /// Compares the password with the user's line.
    async fn compare(
        &self,
        users: &UserPasswordHashes,
        login: &LoginCredentials,
    ) -> Result<UserLineMark, LoginDenial> {
        let place = Arc::clone(&self.comparisons).acquire_owned().await;
        let place = place.map_err(|_closed| LoginDenial::Untold)?;
        let line = users.line(&login.user);
        let comparison = users.comparison(&login.user);
        let (password, fingerprint) = (Arc::clone(&login.password), login.fingerprint);
        let credentials = Arc::clone(&self.credentials);
        let compared = tokio::task::spawn_blocking(move || {
            let matches = comparison.matches(&password);
            drop(place);
            // Remembered here: a caller may have stopped waiting, and the next try counts on the result.
            if let (true, Some(line)) = (matches, line) {
                credentials.password_memory().note_accepted(fingerprint, LoginProof::File(line));
            }
            matches
        });
        match (compared.await, line) {
            (Ok(true), Some(line)) => Ok(line),
            (Ok(_), _) => Err(LoginDenial::Refused(PasswordRefusal::WrongPassword)),
            (Err(_panicked), _) => Err(LoginDenial::Untold),
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
                Err(failure) => {
                    if let Some(why) = PasswordRefusal::of(&failure) {
                        return Err(LoginDenial::Refused(why));
                    }
                    if Instant::now() + PAUSE > until {
                        return Err(LoginDenial::Untold);
                    }
                    self.members.pause_or_change(PAUSE).await;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;
    use keyward_cluster::membership::{ControlChannels, Membership};
    use keyward_config::FailedLogins;
    use keyward_config::users::{Cost, hash};
    use keyward_upstream::credentials::CredentialSettings;

    const CHEAP: Cost = Cost { memory: 8, passes: 1 };

    /// The sources with a users file that knows alice alone.
    fn sources(password: &str, cost: Cost) -> PasswordSourceOrder {
        let lines = format!("alice:{}\n", hash(&Secret::new(password.to_owned()), cost).unwrap());
        let failed = FailedLogins {
            per_user_and_address: 0,
            per_user: 0,
            per_address: 0,
            longest_wait: Duration::from_secs(1),
        };
        let users = Arc::new(UserPasswordHashes::parse(lines.as_bytes()).unwrap());
        let passwords = Passwords { sources: PasswordSources::File, users, failed };
        let (members, _, _) = MembersHandle::publishing(Membership::unknown(Instant::now()));
        let (credentials, _control) =
            Credentials::new(CredentialSettings::default(), ControlChannels::default()).unwrap();
        PasswordSourceOrder::new(&Arc::new(passwords), credentials, members)
    }

    fn login(sources: &PasswordSourceOrder, user: &str, password: &str) -> LoginCredentials {
        let (user, password) = (UserName::from(user), Secret::new(password.to_owned()));
        let fingerprint = sources.credentials.fingerprint(&user, &password);
        LoginCredentials { user, password: Arc::new(password), fingerprint }
    }

    #[tokio::test]
    async fn a_flood_of_wrong_passwords_is_not_kept_and_no_right_one_is_forgotten() {
        let sources = sources("right", CHEAP);
        let users = &sources.passwords.load_full().users;
        let alice = login(&sources, "alice", "right");
        let line = sources.compare(users, &alice).await.unwrap();
        for n in 0..1000 {
            let wrong = login(&sources, &format!("user{n}"), "guess");
            assert_eq!(
                sources.compare(users, &wrong).await,
                Err(LoginDenial::Refused(PasswordRefusal::WrongPassword))
            );
            assert!(!sources.is_known(&wrong));
            assert_eq!(sources.credentials.password_memory().last_proof(wrong.fingerprint, None), None);
        }
        assert!(sources.is_known(&alice));
        assert_eq!(sources.recall_file(users, &alice), Some(line));
    }

    /// The runtime has one thread for blocking work: while the test holds the thread, no comparison begins, and
    /// work behind a comparison begins after the comparison.
    #[test]
    fn a_comparison_is_remembered_although_the_caller_has_left() {
        let runtime = tokio::runtime::Builder::new_current_thread().max_blocking_threads(1).build().unwrap();
        runtime.block_on(async {
            let sources = sources("right", CHEAP);
            let users = &sources.passwords.load_full().users;
            let alice = login(&sources, "alice", "right");
            let (release, held) = std::sync::mpsc::channel();
            let holds = tokio::task::spawn_blocking(move || held.recv());
            assert!(sources.compare(users, &alice).now_or_never().is_none(), "the caller leaves");
            assert_eq!(sources.recall_file(users, &alice), None);
            release.send(()).unwrap();
            holds.await.unwrap().unwrap();
            tokio::task::spawn_blocking(|| ()).await.unwrap();
            assert!(sources.recall_file(users, &alice).is_some());
            assert_eq!(sources.comparisons.available_permits(), COMPARISONS);
        });
    }
}
