//! Resolves the prefixes of Keyward's own keys in etcd: of maintenance, and of the policy.
//!
//! Owns: `[maintenance]`, and the place of the policy in `[policy]`. Must not know: the keys below a prefix.
//! Invariant: no prefix of Keyward's contains another, since each prefix is read as a whole.

use super::user_tables::UserRows;
use super::{MAINTENANCE, Resolver};
use crate::toml_file::{TomlMaintenance, TomlPolicy};
use crate::{EtcdLogin, Maintenance, PolicyInEtcd, Revocation, RevocationPersistence};

impl Resolver<'_> {
    /// Resolves the place of the policy in etcd; `default_login` logs in without `policy.user`.
    pub(super) fn policy_in_etcd(
        &mut self,
        policy: &mut TomlPolicy,
        rows: &UserRows,
        default_login: Option<&EtcdLogin>,
        revocation: &Revocation,
    ) -> Option<PolicyInEtcd> {
        let (user, state_file) = (policy.user.take(), policy.state_file.take());
        let Some(prefix) = policy.etcd_prefix.take() else {
            for (path, is_set) in
                [("policy.user", user.is_some()), ("policy.state_file", state_file.is_some())]
            {
                if is_set {
                    self.findings.warn(path, "has no effect without policy.etcd_prefix");
                }
            }
            return None;
        };
        let path = "policy.etcd_prefix";
        if self.is_own_prefix(path, &prefix, "/keyward/policy/") {
            self.keep_apart(path, &prefix, "revocation.etcd_prefix", revoked(revocation));
        }
        if policy.file.is_some() {
            let reason = "is in force only while nothing was ever applied to policy.etcd_prefix: remove \
                          policy.file after the first `keyward policy apply`";
            self.findings.warn("policy.file", reason);
        }
        let login = match user {
            Some(name) => self.login_of("policy.user", &name, rows),
            None => default_login.cloned(),
        };
        let state_file = state_file.map(|name| self.written_path("policy.state_file", &name));
        Some(PolicyInEtcd { prefix: prefix.into(), login, state_file })
    }

    pub(super) fn maintenance(
        &mut self,
        maintenance: TomlMaintenance,
        revocation: &Revocation,
        policy: Option<&PolicyInEtcd>,
    ) -> Maintenance {
        let path = "maintenance.etcd_prefix";
        let prefix = maintenance.etcd_prefix.unwrap_or_else(|| MAINTENANCE.to_owned());
        if prefix.is_empty() {
            return Maintenance { etcd_prefix: None };
        }
        self.is_own_prefix(path, &prefix, MAINTENANCE);
        self.keep_apart(path, &prefix, "revocation.etcd_prefix", revoked(revocation));
        self.keep_apart(path, &prefix, "policy.etcd_prefix", policy.map(|stored| &*stored.prefix));
        Maintenance { etcd_prefix: Some(prefix.into()) }
    }

    /// True if the prefix is a name that ends with a slash; otherwise a fault is reported.
    fn is_own_prefix(&mut self, path: &str, prefix: &str, example: &str) -> bool {
        let is_name = !prefix.trim_matches('/').is_empty() && prefix.ends_with('/');
        if !is_name {
            self.findings.fault(path, format!("is a name that ends with a slash, as in {example:?}"));
        }
        is_name
    }

    /// Reports a fault if one prefix contains the other. An invalid other prefix is a separate fault.
    fn keep_apart(&mut self, path: &str, prefix: &str, other_path: &str, other: Option<&str>) {
        if let Some(other) = other.filter(|other| !other.trim_matches('/').is_empty())
            && (prefix.starts_with(other) || other.starts_with(prefix))
        {
            self.findings.fault(path, format!("{prefix:?} and {other_path}, {other:?}, hold each other"));
        }
    }
}

fn revoked(revocation: &Revocation) -> Option<&str> {
    match &revocation.keep {
        RevocationPersistence::Etcd { prefix, .. } => Some(&**prefix),
        RevocationPersistence::Memory | RevocationPersistence::File(_) => None,
    }
}
