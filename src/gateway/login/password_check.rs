//! A password check: user and password, the reason for the check, and the result.
//!
//! Must not know: how a password is checked.

use std::net::IpAddr;
use std::sync::Arc;

use crate::credentials::PasswordFingerprint;
use crate::identity::UserName;
use crate::secret::Secret;
use crate::users::UserLineMark;

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

/// The proof made by a login.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoginProof {
    /// etcd accepted the password.
    Etcd,
    /// The user's line in the users file accepted the password.
    File(UserLineMark),
    /// No proof: auth is off, and the user is not in a users file (docs/decisions.md#d11).
    Nothing,
}

/// The treatment of auth last known to be off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AuthOffTrust {
    /// Taken for off: a call upstream will notice if auth is on again.
    Believed,
    /// etcd is asked, since no later call would notice.
    Asked,
}

/// The reason for a login without a proof.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoginDenial {
    /// The password is wrong, or the user does not exist.
    WrongPassword,
    /// etcd has the user without a password.
    NoPassword,
    /// The limits on failed logins refused the try.
    Limited,
    /// No source answered in time.
    Untold,
}

/// Result and cost of a login.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LoginResult {
    pub(super) verdict: Result<LoginProof, LoginDenial>,
    pub(super) effort: LoginEffort,
}

/// Cost of a login.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LoginEffort {
    /// Answered from memory, or by a cheap read at a member: no bcrypt, no argon2.
    Recall,
    /// The sources were asked.
    Ask,
}

/// The reason for a password check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PasswordCheckPurpose {
    /// A client at this address presents the password.
    Login(Option<IpAddr>),
    /// A client at this address presents the password of a blocked user.
    Blocked(Option<IpAddr>),
    /// A session sealed with the password is used, so the check is no guess. The number is the auth revision
    /// at which etcd accepted the password; 0 if unknown.
    Session(u64),
}

/// The sources to be asked about a password.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum PasswordJudge {
    /// The configured sources.
    Sources,
    /// No source: the user is blocked.
    Nobody,
}

impl PasswordCheckPurpose {
    pub(super) fn asked(self) -> PasswordJudge {
        match self {
            Self::Login(_) | Self::Session(_) => PasswordJudge::Sources,
            Self::Blocked(_) => PasswordJudge::Nobody,
        }
    }

    /// A proved session goes upstream with a credential of Keyward's, valid with auth on or off, so no later
    /// call would notice that auth is on again.
    pub(super) fn off(self) -> AuthOffTrust {
        match self {
            Self::Session(_) => AuthOffTrust::Asked,
            Self::Login(_) | Self::Blocked(_) => AuthOffTrust::Believed,
        }
    }
}
