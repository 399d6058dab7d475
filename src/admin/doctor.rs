//! What is wrong, or soon will be, with the cluster and with Keyward before it: `keyward doctor`.
//!
//! Owns: what a finding is, gathering what is looked at, how it is told. Below, `checks` knows what is wrong about it. Must not know: the
//! data path. Invariants: looking changes nothing; what could not be looked at is said, and never taken for good; nothing tells a secret.

mod certificates;
mod checks;

use std::fmt;
use std::sync::Arc;
use std::time::SystemTime;

use futures_util::future::join_all;
use serde::{Deserialize, Serialize};

use super::table::plain;
use crate::config::{Config, Outcome};
use crate::identity::MemberId;
use crate::published::Published;
use crate::revocation::Register;
use crate::upstream::credential::{Credentials, Pages, RootHolders, Wanted};
use crate::upstream::examine::{Examined, examine};
use crate::upstream::membership::{Auth, MembersHandle, Membership};
use checks::Facts;

/// All that was found.
#[derive(Debug, Serialize, Deserialize)]
pub struct Report {
    /// The worst first.
    pub findings: Vec<Finding>,
    /// What could not be looked at, and why.
    pub unseen: Vec<String>,
}

/// One thing that is wrong, or soon will be.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Finding {
    /// How bad it is.
    pub severity: Severity,
    /// What was looked at; stays the same between versions.
    pub check: String,
    /// Whom it is about: a member's name and id, an address, a key of the configuration.
    pub about: String,
    /// What is wrong.
    pub what: String,
    /// What to do, in one line.
    pub fix: String,
}

/// How bad it is. The worst first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Severity {
    /// Something does not work now, or will not within days.
    Error,
    /// Something will not work when something else happens.
    Warning,
}

/// What is looked at.
pub struct Doctor {
    /// The configuration that is in force.
    pub config: Arc<Published<Config>>,
    /// Keys that say otherwise in the file, and wait for a restart.
    pub waiting: Arc<Published<Vec<&'static str>>>,
    /// The members.
    pub members: MembersHandle,
    /// Reaches the pages that they serve.
    pub pages: Pages,
    /// Who was revoked.
    pub register: Register,
    /// Asks for users' roles.
    pub credentials: Arc<Credentials>,
}

impl Doctor {
    /// Looks at everything once.
    pub async fn examine(&self) -> Report {
        let members = self.members.snapshot.load_full();
        let asked = members.members.iter().map(async |member| {
            (member.id, examine(&self.pages.connector, &member.endpoint, member.at).await)
        });
        let examined: Vec<(MemberId, Option<Examined>)> = join_all(asked).await;
        let config = self.config.load_full();
        let root_holders = self.root_holders(&config, &members).await;
        Facts {
            now: SystemTime::now(),
            config: &config,
            waiting: &self.waiting.load_full(),
            members: &members,
            auth: self.members.auth.now(),
            examined: &examined,
            revocations_known: self.register.is_known(),
            root_holders: &root_holders,
        }
        .report()
    }

    /// Who holds the role `root` of the users that a rule leads to which spells no peer out. Nobody is asked where no rule is so,
    /// or there are no users.
    async fn root_holders(&self, config: &Config, members: &Membership) -> RootHolders {
        let patterns = config.mapping.rules.iter().filter(|rule| !rule.names_one_peer());
        let mut wanted = Wanted { named: config.mapping.default.iter().cloned().collect(), all: false };
        for rule in patterns {
            match rule.outcome() {
                Outcome::User(user) => wanted.named.push(user.clone()),
                Outcome::Same => wanted.all = true,
                Outcome::Deny => {}
            }
        }
        let member = members.leader().or_else(|| members.ready_voters().next());
        let is_asked = self.members.auth.now() == Auth::On && (wanted.all || !wanted.named.is_empty());
        match member.filter(|_| is_asked) {
            Some(member) => {
                self.credentials.root_holders(config.cluster.probe.as_ref(), wanted, member.id).await
            }
            None => RootHolders::default(),
        }
    }
}

impl Report {
    /// The worst of what was found.
    #[must_use]
    pub fn worst(&self) -> Option<Severity> {
        self.findings.iter().map(|finding| finding.severity).min()
    }
}

impl fmt::Display for Severity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Error => "error",
            Self::Warning => "warning",
        })
    }
}

/// For a terminal.
impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for Finding { severity, check, about, what, fix } in &self.findings {
            let (about, what, fix) = (plain(about), plain(what), plain(fix));
            writeln!(f, "{severity} [{check}] {about}: {what}\n    fix: {fix}")?;
        }
        for unseen in &self.unseen {
            writeln!(f, "not looked at: {}", plain(unseen))?;
        }
        match (self.findings.len(), self.unseen.len()) {
            (0, 0) => writeln!(f, "nothing found"),
            (0, _) => writeln!(f, "nothing found in what could be looked at"),
            _ => Ok(()),
        }
    }
}
