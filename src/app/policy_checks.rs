//! `keyward policy check`, `explain` and `test` without a running Keyward: a policy of a file.
//!
//! Owns: reading the policy, and tables of calls with expected verdicts. Must not know: how a call is judged
//! (`policy::described_call`).

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use serde::Deserialize;

use keyward_access::policy::described_call::{DescribedCall, Explanation, JudgingPolicy, UnjudgedCall};
use keyward_access::policy::unreachable_rules::{UnreachableRule, unreachable_bindings};
use keyward_config::policy_document::PolicyDocument;
use keyward_config::{Config, ConfigFaults, ConfigSources, ConfigWarning};

/// Reasons why a policy cannot be judged.
#[derive(Debug, thiserror::Error)]
pub enum PolicyCheckError {
    /// The configuration, or the policy, has faults.
    #[error("{0}")]
    Faults(#[from] ConfigFaults),
    /// A file cannot be read.
    #[error("{0}")]
    Unreadable(String),
    /// The table of calls is malformed.
    #[error("{}: {reason}", .path.display())]
    Table {
        /// The file.
        path: PathBuf,
        /// The fault.
        reason: String,
    },
    /// The policy in force is in etcd, and only a running replica knows it.
    #[error(
        "policy.etcd_prefix: the policy is in etcd, and no replica answers here; judge a copy: \
         keyward policy show >FILE on another machine, then --policy FILE"
    )]
    StoredInEtcd,
    /// Neither the configuration nor the command names a policy.
    #[error("the configuration has no policy: name one by --policy FILE")]
    NoPolicy,
}

/// A table of calls with their expected verdicts.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct ExpectedVerdicts {
    test: Vec<ExpectedVerdict>,
}

/// A row of the table.
#[derive(Debug, Deserialize)]
struct ExpectedVerdict {
    /// `allow` or `deny`.
    expect: ExpectedWord,
    #[serde(flatten)]
    call: toml::Table,
}

#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
enum ExpectedWord {
    Allow,
    Deny,
}

/// A policy to be judged, within its configuration.
pub struct CheckedPolicy {
    config: Config,
    document: Arc<PolicyDocument>,
    /// The warnings about the policy.
    pub warnings: Vec<ConfigWarning>,
    /// The rules of the policy that can apply to no caller.
    pub unreachable: Vec<UnreachableRule>,
}

impl CheckedPolicy {
    /// Reads the configuration, and the policy of `file` in place of the configuration's.
    ///
    /// # Errors
    /// All faults of the configuration, or of the policy.
    pub fn read(sources: &ConfigSources, file: &Path) -> Result<Self, PolicyCheckError> {
        let (config, _) = sources.load()?;
        let text = keyward_config::read_policy(file).map_err(PolicyCheckError::Unreadable)?;
        let issuers: Vec<Arc<str>> =
            config.issuers.listed.iter().map(|issuer| Arc::clone(&issuer.issuer)).collect();
        let (document, warnings) = keyward_config::policy(&text, &config.listeners, &issuers)?;
        let unreachable = unreachable_bindings(&config, &document);
        Ok(Self { config, document: Arc::new(document), warnings, unreachable })
    }

    /// Reads the configuration with its own policy.
    ///
    /// # Errors
    /// All faults of the configuration; or the configuration has no policy that is known without a replica.
    pub fn configured(sources: &ConfigSources) -> Result<Self, PolicyCheckError> {
        let (config, _) = sources.load()?;
        if config.policy.stored.is_some() {
            return Err(PolicyCheckError::StoredInEtcd);
        }
        let document = Arc::clone(&config.policy.document);
        if *document == PolicyDocument::default() {
            return Err(PolicyCheckError::NoPolicy);
        }
        let unreachable = unreachable_bindings(&config, &document);
        Ok(Self { config, document, warnings: Vec::new(), unreachable })
    }

    /// Explains the verdicts on calls.
    #[must_use]
    pub fn explain(&self, calls: &[DescribedCall]) -> Vec<Result<Explanation, UnjudgedCall>> {
        let judging = JudgingPolicy::new(&self.config, &self.document, SystemTime::now());
        calls.iter().map(|call| judging.explain(call)).collect()
    }
}

/// A table of calls with their expected verdicts, as read.
pub struct VerdictTable {
    path: PathBuf,
    expected: Vec<ExpectedWord>,
    /// The calls, in the order of the table.
    pub calls: Vec<DescribedCall>,
}

impl VerdictTable {
    /// Reads a TOML file with `[[test]]` tables.
    ///
    /// # Errors
    /// The table is malformed, or has no call.
    pub fn read(path: &Path) -> Result<Self, PolicyCheckError> {
        let table = |reason: String| PolicyCheckError::Table { path: path.to_owned(), reason };
        let text = std::fs::read_to_string(path).map_err(|error| {
            PolicyCheckError::Unreadable(format!("cannot read {}: {error}", path.display()))
        })?;
        let rows: ExpectedVerdicts = toml::from_str(&text).map_err(|error| table(error.to_string()))?;
        if rows.test.is_empty() {
            return Err(table("has no [[test]]".to_owned()));
        }
        let mut read = Self { path: path.to_owned(), expected: Vec::new(), calls: Vec::new() };
        for (at, row) in rows.test.into_iter().enumerate() {
            read.expected.push(row.expect);
            read.calls.push(row.call.try_into().map_err(|error| table(format!("test[{at}]: {error}")))?);
        }
        Ok(read)
    }

    /// Returns a text for each call with another verdict than expected.
    ///
    /// # Errors
    /// A call could not be judged as described; or a verdict is missing.
    pub fn compare(
        &self,
        verdicts: Vec<Result<Explanation, String>>,
    ) -> Result<Vec<String>, PolicyCheckError> {
        let table = |reason: String| PolicyCheckError::Table { path: self.path.clone(), reason };
        if verdicts.len() != self.calls.len() {
            return Err(table("not all calls were judged".to_owned()));
        }
        let mut others = Vec::new();
        for (at, (verdict, call)) in verdicts.into_iter().zip(&self.calls).enumerate() {
            let explained = verdict.map_err(|reason| table(format!("test[{at}]: {reason}")))?;
            if explained.is_allowed != (self.expected.get(at) == Some(&ExpectedWord::Allow)) {
                let expected = if explained.is_allowed { "deny" } else { "allow" };
                others.push(format!(
                    "test[{at}]: {} {} {:?}: expected {expected:?}\n{}",
                    call.peer, call.method, call.key, explained.text
                ));
            }
        }
        Ok(others)
    }
}
