//! The execution of an operator's commands to the stored policy.
//!
//! Owns: the checks before a change, the transaction of each change, and the answers. Must not know: the
//! admin socket. Invariants (docs/decisions.md#d58): a change is one transaction under the condition that the
//! pointer is as the command read it; a change with an unknown outcome is reported as such, and never sent
//! again; a document with a fault is never stored.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;
use tokio::time::timeout;

use super::command::{GenerationRow, GrantRow, PolicyAnswer, PolicyCommand, PolicyListing, PolicyStoreError};
use super::difference::difference;
use super::generation::{GenerationHeader, read_document, sha256};
use super::last_good::PointerReading;
use super::limit_notes::limit_note;
use super::prefix::{MOST_GRANTS, PrefixReading, StoredGrant, delete};
use super::temporary_grant::{TemporaryGrant, key_of};
use super::{LATE, PATIENCE, PolicyKeeper, PolicyOutlets, parse};
use keyward_access::policy::unreachable_rules::{UnreachableRule, unreachable_bindings, unreachable_peer};
use keyward_config::Config;
use keyward_config::policy_document::{PolicyDigest, PolicyDocument};
use keyward_etcd::pb::etcdserverpb::{Compare, RequestOp};
use keyward_upstream::own_keys::{is_unchanged, put};

/// Longest duration of a temporary grant: a lasting right belongs into the policy.
const LONGEST_GRANT: Duration = Duration::from_secs(30 * 24 * 3600);
/// Longest reason of a temporary grant, in bytes.
const LONGEST_REASON: usize = 1024;
/// Longest name of a user who became root by sudo, in bytes.
const LONGEST_USER: usize = 256;
/// Ended grants deleted in one transaction: etcd takes 128 operations (`--max-txn-ops`).
const MOST_DELETED: usize = 64;

/// A document to be stored as the next generation.
struct WantedGeneration<'t> {
    text: &'t str,
    /// The required current generation.
    if_generation: Option<u64>,
    comment: String,
}

/// The operator of a change.
struct Operator {
    /// The user id of the process that gave the command.
    uid: Option<u32>,
    /// The user who became root by sudo, as root's process claims.
    sudo_user: Option<String>,
}

impl Operator {
    /// Takes a claim from root alone: root can be whom it wants, others could blame somebody.
    fn new(uid: Option<u32>, claim: Option<&str>) -> Self {
        let claim = claim.filter(|user| uid == Some(0) && !user.is_empty() && user.len() <= LONGEST_USER);
        Self { uid, sudo_user: claim.map(str::to_owned) }
    }
}

type Outcome = Result<PolicyAnswer, PolicyStoreError>;

impl PolicyKeeper {
    pub(super) async fn execute(
        &mut self,
        command: PolicyCommand,
        uid: Option<u32>,
        outlets: &mut PolicyOutlets,
    ) -> Outcome {
        let operator = Operator::new(uid, command.sudo_user());
        match command {
            PolicyCommand::Apply { text, if_generation, comment, allow_unreachable, .. } => {
                let wanted = WantedGeneration { text: &text, if_generation, comment };
                if !allow_unreachable {
                    self.check_reach(&text, outlets)?;
                }
                self.apply(wanted, operator, outlets).await
            }
            PolicyCommand::Rollback { generation, .. } => {
                let (_, text) = self.stored_document(generation).await?;
                let comment = format!("rollback to generation {generation}");
                // A way back is never closed.
                let wanted = WantedGeneration { text: &text, if_generation: None, comment };
                self.apply(wanted, operator, outlets).await
            }
            PolicyCommand::Diff { text } => {
                let config = outlets.config.load_full();
                let document = parse(&config, &text).map_err(PolicyStoreError::Unchanged)?;
                let lines = difference(&self.text_in_force(&config).await?, &text);
                let text = lines.iter().fold(String::new(), |text, line| text + line + "\n");
                let note = limit_note(config.policy.limits_mode, self.document_in_force(&config), &document);
                let text = text + &note.unwrap_or_default();
                Ok(PolicyAnswer { differs: !text.is_empty(), ..answer(text) })
            }
            PolicyCommand::History {} => self.history().await,
            PolicyCommand::Show { generation: Some(number) } => {
                let (_, text) = self.stored_document(number).await?;
                Ok(answer(text.to_string()))
            }
            PolicyCommand::Show { generation: None } => match self.good.generation() {
                Some(good) => Ok(answer(good.text.to_string())),
                None => Err(unchanged("no generation is in force")),
            },
            PolicyCommand::Grant { peer, role, seconds, reason, .. } => {
                self.grant(peer, role, seconds, reason, operator, outlets).await
            }
            PolicyCommand::Ungrant { peer, role, .. } => self.ungrant(&peer, &role, operator, outlets).await,
            PolicyCommand::Grants {} => Ok(listed(self.listed_grants())),
        }
    }

    /// The rules in force: before the first generation those of `policy.file`.
    fn document_in_force<'d>(&'d self, config: &'d Config) -> &'d PolicyDocument {
        self.good.generation().map_or(&*config.policy.document, |good| &good.document)
    }

    /// The text of the rules in force; empty without any.
    async fn text_in_force(&self, config: &Config) -> Result<String, PolicyStoreError> {
        if let Some(good) = self.good.generation() {
            return Ok(good.text.to_string());
        }
        let Some(file) = config.policy.file.clone() else { return Ok(String::new()) };
        let read = tokio::task::spawn_blocking(move || keyward_config::read_policy(&file)).await;
        let text =
            read.map_err(|error| unchanged(error.to_string()))?.map_err(PolicyStoreError::Unchanged)?;
        match PolicyDigest::of(&text) == config.policy.document.digest {
            true => Ok(text),
            false => Err(unchanged("policy.file has changed since it was read: keyward reload reads it")),
        }
    }

    /// Refuses a document with rules that can apply to no caller of this replica.
    fn check_reach(&self, text: &str, outlets: &PolicyOutlets) -> Result<(), PolicyStoreError> {
        let config = outlets.config.load();
        let document = parse(&config, text).map_err(PolicyStoreError::Unchanged)?;
        let unreachable = unreachable_bindings(&config, &document);
        if unreachable.is_empty() {
            return Ok(());
        }
        let lines: Vec<String> = unreachable.iter().map(UnreachableRule::to_string).collect();
        Err(unchanged(format!(
            "{}\nif another replica has listeners for these rules: --allow-unreachable",
            lines.join("\n")
        )))
    }

    async fn apply(
        &mut self,
        wanted: WantedGeneration<'_>,
        operator: Operator,
        outlets: &mut PolicyOutlets,
    ) -> Outcome {
        let WantedGeneration { text, if_generation, comment } = wanted;
        let (unreachable, limits) = {
            let config = outlets.config.load();
            let document = parse(&config, text).map_err(PolicyStoreError::Unchanged)?;
            let limits = limit_note(config.policy.limits_mode, self.document_in_force(&config), &document);
            (unreachable_bindings(&config, &document), limits)
        };
        let reading = self.read_now().await?;
        let current = match &reading.pointer {
            PointerReading::At(pointer) => Some(pointer),
            PointerReading::NeverApplied | PointerReading::Missing | PointerReading::Unreadable => None,
        };
        let current_number = current.map_or(0, |pointer| pointer.generation);
        if let Some(wanted) = if_generation.filter(|wanted| *wanted != current_number) {
            return Err(unchanged(format!("generation {current_number} is current, not {wanted}")));
        }
        let is_current = current.is_some_and(|pointer| pointer.sha256 == sha256(text));
        if is_current && self.good.number() == current_number {
            return Ok(answer(format!("generation {current_number} has this document already\n")));
        }
        let before = current.map_or(reading.highest, |pointer| pointer.generation).max(self.good.number());
        let number = before.checked_add(1).filter(|number| *number < u64::MAX);
        let number = number.ok_or_else(|| unchanged("the numbers of generations have reached their end"))?;
        let applied_at = seconds_of(SystemTime::now());
        let Operator { uid, sudo_user } = operator;
        let header = GenerationHeader {
            generation: number,
            sha256: sha256(text),
            comment,
            applied_at,
            uid,
            sudo_user,
        };
        let value = header.value(text).map_err(unchanged)?;
        let mut operations = vec![
            put(self.prefix.key_of(number), value),
            put(self.prefix.current(), header.pointer().value()),
        ];
        operations.extend(self.prefix.delete_before(number));
        operations.extend(deleted_ended(&reading.grants));
        if !self.write(vec![self.prefix.has_pointer_of(&reading)], operations).await? {
            return Err(unchanged("another generation was applied at the same time"));
        }
        tracing::info!(
            generation = number,
            uid,
            sudo_user = header.sudo_user.as_ref().map(|user| tracing::field::display(user.escape_debug())),
            "a policy was applied"
        );
        self.poll(outlets).await;
        let text = if self.good.number() >= number && self.good.fault().is_none() {
            format!("generation {number} is in force on this replica now, on all others within 1 s\n")
        } else {
            format!(
                "generation {number} is stored, and not in force on this replica yet: see `keyward doctor`\n"
            )
        };
        let text = text + &limits.unwrap_or_default();
        let text = unreachable.iter().fold(text, |text, rule| format!("{text}warning: {rule}\n"));
        Ok(PolicyAnswer { generation: Some(number), ..answer(text) })
    }

    async fn history(&self) -> Outcome {
        let headers = limited(self.prefix.history()).await?;
        let row = |header: GenerationHeader| GenerationRow {
            generation: header.generation,
            in_force: header.generation == self.good.number(),
            applied_at: moment(header.applied_at),
            uid: header.uid,
            sudo_user: header.sudo_user,
            sha256: header.sha256,
            comment: header.comment,
        };
        Ok(listed(PolicyListing::Generations(headers.into_iter().map(row).collect())))
    }

    async fn grant(
        &mut self,
        peer: String,
        role: String,
        seconds: u64,
        reason: String,
        operator: Operator,
        outlets: &mut PolicyOutlets,
    ) -> Outcome {
        let config = outlets.config.load_full();
        let pattern = keyward_config::peer_pattern(&peer, &config.listeners, &super::issuers(&config));
        let unreachable = unreachable_peer(&config, &pattern.map_err(unchanged)?);
        let roles = self.good.generation().map(|good| &good.document.roles);
        let roles = roles.ok_or_else(|| unchanged("no generation of the policy is in force"))?;
        if !roles.iter().any(|known| *known.name == *role) {
            return Err(unchanged(format!("the policy has no role {role:?}")));
        }
        if seconds == 0 || seconds > LONGEST_GRANT.as_secs() {
            return Err(unchanged("a grant lasts from 1 s to 30 days"));
        }
        if reason.trim().is_empty() || reason.len() > LONGEST_REASON {
            return Err(unchanged(format!("a reason of at most {LONGEST_REASON} bytes is needed")));
        }
        let reading = self.read_now().await?;
        let given_at = seconds_of(SystemTime::now());
        // Rounded up, so that no grant is shorter than asked for.
        let until = given_at.saturating_add(seconds).saturating_add(1);
        let Operator { uid, sudo_user } = operator;
        let grant = TemporaryGrant { peer, role, reason, uid, sudo_user, given_at, until };
        let key = self.prefix.grant_key(&grant.key());
        let known = reading.grants.iter().find(|stored| stored.key == key);
        let unreadable = reading.unreadable.contains(&key);
        if known.is_none() && reading.grants.len() + reading.unreadable.len() >= MOST_GRANTS {
            return Err(unchanged(format!("there are {MOST_GRANTS} temporary grants already")));
        }
        let mut conditions = vec![self.prefix.has_pointer_of(&reading)];
        if !unreadable {
            conditions.push(is_unchanged(&key, known.map_or(0, |stored| stored.changed_at)));
        }
        let mut operations = vec![put(key.clone(), grant.value())];
        operations.extend(deleted_ended(&StoredGrant::without(&reading, &key)));
        if !self.write(conditions, operations).await? {
            return Err(unchanged("the policy or the grant was changed at the same time"));
        }
        tracing::info!(
            peer = %grant.peer.escape_debug(), role = %grant.role.escape_debug(),
            reason = %grant.reason.escape_debug(), until = moment(grant.until), uid,
            sudo_user = grant.sudo_user.as_ref().map(|user| tracing::field::display(user.escape_debug())),
            "a temporary grant was given"
        );
        self.poll(outlets).await;
        let text = self.in_force_or_not(&format!("the grant ends at {}", moment(grant.until)));
        // The peer may be a caller of another replica.
        let warning = unreachable.map(|reason| format!("warning: applies to no caller here: {reason}\n"));
        Ok(answer(text + &warning.unwrap_or_default()))
    }

    async fn ungrant(
        &mut self,
        peer: &str,
        role: &str,
        operator: Operator,
        outlets: &mut PolicyOutlets,
    ) -> Outcome {
        let reading = self.read_now().await?;
        let key = self.prefix.grant_key(&key_of(peer, role));
        let known = reading.grants.iter().find(|stored| stored.key == key);
        let known = known.ok_or_else(|| unchanged("there is no such grant"))?;
        let conditions = vec![is_unchanged(&key, known.changed_at)];
        if !self.write(conditions, vec![delete(key)]).await? {
            return Err(unchanged("the grant was changed at the same time"));
        }
        let (peer, role) = (peer.escape_debug(), role.escape_debug());
        let Operator { uid, sudo_user } = operator;
        tracing::info!(
            %peer, %role, uid,
            sudo_user = sudo_user.as_ref().map(|user| tracing::field::display(user.escape_debug())),
            "a temporary grant was taken back"
        );
        self.poll(outlets).await;
        Ok(answer(self.in_force_or_not("the grant is taken back")))
    }

    fn in_force_or_not(&self, done: &str) -> String {
        match self.good.fault() {
            None => format!("{done}; in force on this replica now, on all others within 1 s\n"),
            Some(fault) => {
                format!("{done}; stored, and in force once the stored policy is good again: {fault}\n")
            }
        }
    }

    fn listed_grants(&self) -> PolicyListing {
        let now = SystemTime::now();
        let roles = self.good.generation().map(|good| &*good.document.roles).unwrap_or_default();
        let row = |grant: &TemporaryGrant| GrantRow {
            until: moment(grant.until),
            uid: grant.uid,
            sudo_user: grant.sudo_user.clone(),
            peer: grant.peer.clone(),
            role: grant.role.clone(),
            has_role: roles.iter().any(|known| *known.name == *grant.role),
            reason: grant.reason.clone(),
        };
        let in_force = self.grants.iter().filter(|grant| !grant.has_ended(now));
        PolicyListing::Grants(in_force.map(row).collect())
    }

    /// The document of a stored generation.
    async fn stored_document(&self, number: u64) -> Result<(GenerationHeader, Arc<str>), PolicyStoreError> {
        let value = limited(self.prefix.generation(number)).await?;
        let value = value.ok_or_else(|| unchanged(format!("there is no generation {number}")))?;
        let pointer = GenerationHeader::read(&value).map(|header| header.pointer());
        let pointer = pointer.filter(|pointer| pointer.generation == number);
        pointer
            .and_then(|pointer| read_document(&pointer, &value))
            .ok_or_else(|| unchanged(format!("the document of generation {number} is damaged")))
    }

    async fn read_now(&self) -> Result<PrefixReading, PolicyStoreError> {
        limited(self.prefix.read()).await
    }

    /// Sends a transaction, once.
    async fn write(
        &self,
        conditions: Vec<Compare>,
        operations: Vec<RequestOp>,
    ) -> Result<bool, PolicyStoreError> {
        match timeout(PATIENCE, self.prefix.write(conditions, operations)).await {
            Ok(Ok(held)) => Ok(held),
            Ok(Err(unanswered)) if unanswered.sent => Err(PolicyStoreError::Unknown(unanswered.reason)),
            Ok(Err(unanswered)) => Err(PolicyStoreError::Unchanged(unanswered.reason)),
            Err(_) => Err(PolicyStoreError::Unknown(LATE.into())),
        }
    }
}

impl StoredGrant {
    /// The grants of a reading without the grant at `key`.
    fn without(reading: &PrefixReading, key: &[u8]) -> Vec<Self> {
        reading.grants.iter().filter(|stored| stored.key != key).cloned().collect()
    }
}

/// Limits the time of a read.
async fn limited<T>(read: impl Future<Output = Result<T, String>>) -> Result<T, PolicyStoreError> {
    timeout(PATIENCE, read).await.unwrap_or_else(|_| Err(LATE.into())).map_err(PolicyStoreError::Unchanged)
}

/// Deletes grants that have ended.
fn deleted_ended(grants: &[StoredGrant]) -> impl Iterator<Item = RequestOp> {
    let now = SystemTime::now();
    let ended = grants.iter().filter(move |stored| stored.grant.has_ended(now)).take(MOST_DELETED);
    ended.map(|stored| delete(stored.key.clone()))
}

fn answer(text: String) -> PolicyAnswer {
    PolicyAnswer { text, ..PolicyAnswer::default() }
}

fn listed(listing: PolicyListing) -> PolicyAnswer {
    PolicyAnswer { listing: Some(listing), ..PolicyAnswer::default() }
}

fn unchanged(reason: impl ToString) -> PolicyStoreError {
    PolicyStoreError::Unchanged(reason.to_string())
}

fn seconds_of(time: SystemTime) -> u64 {
    time.duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// Formats seconds of the Unix epoch as RFC 3339.
fn moment(seconds: u64) -> String {
    let moment = i64::try_from(seconds).ok().and_then(|s| OffsetDateTime::from_unix_timestamp(s).ok());
    moment.and_then(|moment| moment.format(&Rfc3339).ok()).unwrap_or_else(|| seconds.to_string())
}
