//! A login while its client waits, and the refusals held back meanwhile.
//!
//! Owns: the count of a refusal whose client gives up before the answer. Must not know: how a verdict is
//! found, or when an answer is due. Invariants: a login counts once; nothing here changes what the client is
//! told, or when.

use std::cell::Cell;
use std::mem::discriminant;

use tokio::time::Instant;

use super::{LoginEffort, LoginResult, LoginService, PasswordCheckKey, PasswordCheckPurpose};
use crate::login::password_sources::{LoginCredentials, LoginDenial};
use keyward_upstream::credentials::{PasswordRefusal, RefusedBy, lock};

/// Takes a check out of the checks held back, however the check ends.
pub(super) struct HeldBack<'s> {
    pub(super) service: &'s LoginService,
    pub(super) key: PasswordCheckKey,
}

impl Drop for HeldBack<'_> {
    fn drop(&mut self) {
        lock(&self.service.held_back).remove(&self.key);
    }
}

/// A login whose client waits for the verdict. If the client gives up, a refusal already decided counts.
pub(super) struct AwaitedLogin<'a> {
    pub(super) service: &'a LoginService,
    pub(super) login: &'a LoginCredentials,
    pub(super) purpose: PasswordCheckPurpose,
    /// Told of the refusal.
    pub(super) held: &'a dyn Fn(LoginDenial),
    /// True once the verdict is counted.
    pub(super) is_over: Cell<bool>,
}

impl Drop for AwaitedLogin<'_> {
    fn drop(&mut self) {
        let decided = || self.service.decided_refusal(self.login, self.purpose);
        if !self.is_over.get()
            && let Some(why) = decided()
        {
            let denial = LoginDenial::Refused(why);
            self.service.count(LoginResult { verdict: Err(denial), effort: LoginEffort::Ask }, self.purpose);
            (self.held)(denial);
        }
    }
}

impl LoginService {
    /// The refusal of a login under way, if decided: held back until the end of its slot, or not yet fetched.
    fn decided_refusal(
        &self,
        login: &LoginCredentials,
        purpose: PasswordCheckPurpose,
    ) -> Option<PasswordRefusal> {
        let is_decided = purpose.refused_by() == RefusedBy::Blocklist
            || lock(&self.held_back).contains(&(login.fingerprint, discriminant(&purpose)));
        if is_decided {
            return Some(PasswordRefusal::WrongPassword);
        }
        let (key, line) = ((login.fingerprint, purpose.refused_by()), self.sources.line(&login.user));
        self.sources.credentials.password_memory().refusal(key, line, Instant::now())
    }
}
