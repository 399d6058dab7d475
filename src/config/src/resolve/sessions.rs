//! Resolves sessions: the session keys, and the persistence of revocations.
//!
//! Owns: `[session]`, `[revocation]`. Must not know: tokens, etcd. Invariants: at least one key exists;
//! revocations in etcd use a separate key prefix.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use super::user_tables::UserRows;
use super::{DAY, Resolver, SECOND, secrets, values};
use crate::upstream_users::UserCredential;
use crate::{
    EtcdLogin, KeySource, RealmSetting, Revocation, RevocationPersistence, SessionKey, SessionSettings,
    toml_file,
};
use keyward_base::secret::Secret;

impl Resolver<'_> {
    pub(super) fn session(&mut self, session: toml_file::TomlSession) -> SessionSettings {
        let path = "session.key_files";
        let names = session.key_files.unwrap_or_default();
        let mut keys: Vec<SessionKey> = Vec::new();
        for (index, name) in names.iter().enumerate() {
            let path = format!("{path}[{index}]");
            let Some(key) = self.secret(&path, name, secrets::session_key) else { continue };
            if keys.iter().any(|earlier| earlier.expose() == key.expose()) {
                self.findings.warn(&path, "holds the same key as an earlier file");
            } else {
                keys.push(Arc::new(key));
            }
        }
        if names.is_empty() {
            let reason = "no key file: sessions are sealed with a random key, so every client must log in \
                          again after a restart, and no other replica accepts its session";
            self.findings.warn(path, reason);
            let mut key = zeroize::Zeroizing::new([0; 32]);
            match getrandom::fill(key.as_mut()) {
                Ok(()) => keys.push(Arc::new(Secret::new(*key))),
                Err(error) => self.findings.fault(path, format!("the system gives no random key: {error}")),
            }
        }
        if session.realm.as_ref().is_some_and(|realm| realm.is_empty() || realm.len() > 128) {
            self.findings
                .fault("session.realm", "a realm is 1 to 128 bytes; leave it out for the cluster's id");
        }
        let realm = session.realm.map_or(RealmSetting::ClusterId, |realm| RealmSetting::Named(realm.into()));
        let key_source = if names.is_empty() { KeySource::Random } else { KeySource::Files };
        let not_before = session.not_before.map_or(0, |text| self.not_before(&text));
        SessionSettings { keys, key_source, realm, not_before }
    }

    fn not_before(&mut self, text: &str) -> u64 {
        let path = "session.not_before";
        let seconds = self.checked(path, values::moment(text)).unwrap_or(0);
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        if seconds > now {
            self.findings.warn(path, "lies in the future: until then every session is refused, new ones too");
        }
        seconds
    }

    /// The password login of a user at members.
    pub(super) fn login_of(&mut self, path: &str, name: &str, rows: &UserRows) -> Option<EtcdLogin> {
        let user = self.user_named(path, name, rows)?;
        match rows.users.named.get(&user) {
            Some(UserCredential::Password(password)) => {
                Some(EtcdLogin { user, password: Arc::clone(password) })
            }
            _ if rows.faulty.contains(name) => None,
            _ => {
                self.findings.fault(path, "logs in with a password: its [[user]] needs a password_file");
                None
            }
        }
    }

    pub(super) fn revocation(
        &mut self,
        revocation: toml_file::TomlRevocation,
        rows: &UserRows,
        probe: Option<&EtcdLogin>,
    ) -> Revocation {
        let max_age = self.duration("revocation.max_age", revocation.max_age, 60 * SECOND, 5 * SECOND..=DAY);
        let file = revocation.state_file.map(|name| self.written_path("revocation.state_file", &name));
        let login = match revocation.user {
            Some(name) => self.login_of("revocation.user", &name, rows),
            None => probe.cloned(),
        };
        let keep = match (revocation.etcd_prefix, file) {
            (Some(prefix), file) => {
                if file.is_some() {
                    let reason = "has no effect, since revocation.etcd_prefix is set";
                    self.findings.warn("revocation.state_file", reason);
                }
                // All keys below the prefix are reserved for Keyward.
                if prefix.trim_matches('/').is_empty() || !prefix.ends_with('/') {
                    let reason = "is a name that ends with a slash, as in \"/keyward/revocations/\"";
                    self.findings.fault("revocation.etcd_prefix", reason);
                }
                RevocationPersistence::Etcd { prefix: Arc::from(prefix), login }
            }
            (None, Some(file)) => RevocationPersistence::File(file),
            (None, None) => RevocationPersistence::Memory,
        };
        Revocation { keep, max_age }
    }
}
