//! The commands that concern this process alone and end with it: views, and actions on clients and members.
//!
//! Owns: their execution, and the audit records of all commands. Must not know: the admin socket, other
//! replicas, the chain of the audit log. Invariants: a command that changes something has a record, with its
//! result; a record names no token and no password.

use std::sync::Arc;

use super::doctor::{Doctor, ExaminedFor};
use super::explained_calls::ExplainedCalls;
use super::operator_actions::{CommandOrigin, NoAction, OperatorActions};
use super::session_listing::SessionListing;
use super::socket_protocol::{AdminAnswer, AdminCommand};
use super::view::Viewer;
use crate::revocation::RevocationRegister;
use keyward_access::policy::described_call::DescribedCall;
use keyward_config::audit_settings::AuditEvent;
use keyward_downstream::session::Sealer;
use keyward_gateway::shard_questions::KickTarget;
use keyward_records::audit::log::AuditLog;
use keyward_records::audit::queue::RoomShare;
use keyward_records::audit::record::AdminAuditRecord;

/// Executes the commands.
pub struct LocalCommands {
    /// Knows the revocations.
    pub register: RevocationRegister,
    /// Knows the recent sessions.
    pub sealer: Arc<Sealer>,
    /// Runs the examination of `keyward doctor`.
    pub doctor: Arc<Doctor>,
    /// Reads views.
    pub viewer: Arc<Viewer>,
    /// Ends connections, pauses members.
    pub actions: OperatorActions,
    /// The audit log, if on.
    pub audit: Option<Arc<AuditLog>>,
}

impl LocalCommands {
    /// Executes a command that is read-only, or about clients or one member.
    pub(super) async fn execute(&self, command: AdminCommand, by: &CommandOrigin) -> AdminAnswer {
        let result = match &command {
            AdminCommand::Kick { client } => self.actions.kick(&KickTarget::Number(*client), by).await,
            AdminCommand::KickPeer { peer } => {
                self.actions.kick(&KickTarget::Named(peer.as_str().into()), by).await
            }
            AdminCommand::Pause { member } => self.actions.pause(member, by),
            AdminCommand::Resume { member } => self.actions.resume(member, by),
            _ => return self.answer_read_only(&command).await,
        };
        let answer = match result {
            Ok(done) => AdminAnswer::Done(done),
            Err(NoAction::Idle(reason)) => AdminAnswer::Idle(reason),
            Err(NoAction::Refused(reason)) => AdminAnswer::Failed(reason),
            Err(NoAction::Unknown(reason)) => AdminAnswer::Unknown(reason),
        };
        self.record(&command, None, result_of(&answer), by.clone());
        answer
    }

    /// Executes a read-only command.
    async fn answer_read_only(&self, command: &AdminCommand) -> AdminAnswer {
        match command {
            AdminCommand::Status {} => AdminAnswer::Status(Box::new(self.viewer.state.status())),
            AdminCommand::Doctor {} => AdminAnswer::Doctor(self.doctor.examine(ExaminedFor::Command).await),
            AdminCommand::Show { topic } => match self.viewer.view(*topic).await {
                Ok(view) => AdminAnswer::View(view),
                Err(silent) => AdminAnswer::Failed(silent.to_string()),
            },
            AdminCommand::Explain { calls } => self.explain(calls).await,
            _ => AdminAnswer::Sessions(SessionListing::of(&self.sealer, &self.register.revocations())),
        }
    }

    async fn explain(&self, calls: &[DescribedCall]) -> AdminAnswer {
        let (config, identities) = (self.doctor.config.load_full(), self.doctor.identities.load_full());
        match ExplainedCalls::judge(&config, &identities, calls).await {
            Ok(explained) => AdminAnswer::Explained(explained),
            Err(reason) => AdminAnswer::Failed(reason),
        }
    }

    /// Records a command that changes something in the audit log; `stored` is the generation stored by a
    /// command to the policy.
    pub(super) fn record(
        &self,
        command: &AdminCommand,
        stored: Option<u64>,
        result: &'static str,
        by: impl Into<CommandOrigin>,
    ) {
        let Some(audit) = self.audit.as_ref().filter(|audit| audit.has(AuditEvent::Admin)) else { return };
        let (name, target, reason) = match command {
            AdminCommand::Revoke { user } => ("revoke", Some(user.clone()), None),
            AdminCommand::RevokeSession { session } => ("revoke_session", Some(session.clone()), None),
            AdminCommand::Block { user } => ("block", Some(user.clone()), None),
            AdminCommand::Unblock { user } => ("unblock", Some(user.clone()), None),
            AdminCommand::Reload {} => ("reload", None, None),
            AdminCommand::LogLevel { filter } => ("log_level", Some(filter.clone()), None),
            AdminCommand::Kick { client } => ("kick", Some(client.to_string()), None),
            AdminCommand::KickPeer { peer } => ("kick_peer", Some(peer.clone()), None),
            AdminCommand::Pause { member } => ("pause", Some(member.clone()), None),
            AdminCommand::Resume { member } => ("resume", Some(member.clone()), None),
            AdminCommand::Drain { .. } => ("drain", None, None),
            AdminCommand::Release { .. } => ("hand_over", None, None),
            AdminCommand::Policy(command) => match command.audited() {
                Some(audited) => audited,
                None => return,
            },
            AdminCommand::Sessions {}
            | AdminCommand::Status {}
            | AdminCommand::Doctor {}
            | AdminCommand::Show { .. }
            | AdminCommand::Explain { .. }
            | AdminCommand::Fleet(_)
            | AdminCommand::HandOver {} => return,
        };
        let target = stored.map(|generation| generation.to_string()).or(target);
        let (target, reason) = (target.as_deref(), reason.as_deref().filter(|reason| !reason.is_empty()));
        let CommandOrigin { uid, sudo_user, replica } = by.into();
        let claimed = match command {
            AdminCommand::Policy(command) if uid == Some(0) => command.sudo_user(),
            _ => sudo_user.as_deref(),
        };
        let (sudo_user, from_replica) = (claimed, replica.as_deref());
        let new = AdminAuditRecord::new(name, result);
        let record = AdminAuditRecord { target, reason, uid, sudo_user, from_replica, ..new };
        audit.record(None, RoomShare::Commands, &record);
    }
}

/// The result of a change, for the audit log.
pub(super) fn result_of(answer: &AdminAnswer) -> &'static str {
    match answer {
        AdminAnswer::NotKept(_) => "not_kept",
        AdminAnswer::Unknown(_) => "unknown",
        AdminAnswer::Failed(_) | AdminAnswer::Idle(_) => "failed",
        _ => "done",
    }
}
