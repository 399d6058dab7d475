//! `keyward kick`, `pause` and `resume`: what an operator does to one client or one member of this process.
//!
//! Owns: the conditions of these actions, and their report. Must not know: how a connection ends, how
//! streams leave a member, how an order came here. Invariants: every action is logged with the operator,
//! also if it is refused; a pause never leaves the replica without a member; nothing outlives the process.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use keyward_cluster::membership::{Fitness, Member, MembersHandle, Membership};
use keyward_gateway::shard_questions::{KickTarget, ShardQuestion, ShardQuestions};
use keyward_gateway::shard_rows::KickedClient;

/// Connections named in the report of an action.
const MOST_NAMED: usize = 20;

/// The actions.
pub struct OperatorActions {
    /// The shards, which hold the client connections.
    pub questions: Arc<ShardQuestions>,
    /// The members.
    pub members: MembersHandle,
}

/// The operator who gave a command, and where.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CommandOrigin {
    /// The user id of the process at the admin socket.
    pub uid: Option<u32>,
    /// The user who became root by sudo, as the command of user id 0 claims (SUDO_USER).
    pub sudo_user: Option<String>,
    /// The replica with the admin socket, if it is another one.
    pub replica: Option<String>,
}

impl From<Option<u32>> for CommandOrigin {
    fn from(uid: Option<u32>) -> Self {
        Self { uid, ..Self::default() }
    }
}

/// The report of an action, or why nothing was done.
pub type ActionResult = Result<String, NoAction>;

/// Why nothing was done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NoAction {
    /// The action has no object here: no such connection, or a member that is not paused. Another replica may
    /// have one.
    Idle(String),
    /// The action is refused, or failed.
    Refused(String),
    /// A part of the action may have been done.
    Unknown(String),
}

impl OperatorActions {
    /// Asks client connections to end, as a drain does: GOAWAY, streams end with Unavailable, calls under
    /// way have ten seconds.
    ///
    /// # Errors
    /// No connection is meant, or a shard does not answer: others may have done their part.
    pub async fn kick(&self, target: &KickTarget, by: &CommandOrigin) -> ActionResult {
        let asked = self.questions.ask(|answer| ShardQuestion::Kick(target.clone(), answer)).await;
        let kicked: Vec<KickedClient> = asked.map_err(|silent| {
            tracing::info!(
                %target,
                uid = by.uid,
                sudo_user = by.sudo_user,
                from_replica = by.replica,
                "an operator's order to end connections has an unknown outcome: a shard does not answer"
            );
            NoAction::Unknown(format!(
                "{silent}: connections of the other shards may have been told to leave"
            ))
        })?;
        if kicked.is_empty() {
            tracing::info!(
                %target,
                uid = by.uid,
                sudo_user = by.sudo_user,
                from_replica = by.replica,
                "an operator wanted to end a connection that is not there"
            );
            return Err(NoAction::Idle(match target {
                KickTarget::Number(client) => {
                    format!("no client {client}: keyward show clients lists the clients of one replica")
                }
                KickTarget::Named(name) => {
                    format!("no connection of the peer, user or address {name:?} on this replica")
                }
            }));
        }
        for KickedClient { client: row, streams } in &kicked {
            tracing::info!(
                client = row.client,
                remote = row.address,
                user = row.user,
                blocked_login = row.blocked_login,
                listener = row.listener,
                streams,
                uid = by.uid,
                sudo_user = by.sudo_user,
                from_replica = by.replica,
                "an operator ended a client connection"
            );
        }
        Ok(kick_report(&kicked))
    }

    /// Takes a member out of service until [`OperatorActions::resume`] or the end of the process: no new call
    /// that another member can serve goes there, and streams move elsewhere.
    ///
    /// # Errors
    /// No such member, or no other member would be left.
    pub fn pause(&self, name: &str, by: &CommandOrigin) -> ActionResult {
        let members = self.members.snapshot.load_full();
        let member = find(&members, name).map_err(NoAction::Refused)?;
        if member.maintenance.is_paused() {
            return Ok(format!("member {} is paused already", label(member)));
        }
        let others = members.ready_voters().filter(|other| other.id != member.id);
        let fit = others.filter(|other| !matches!(other.fitness(Instant::now()), Fitness::Ejected(_)));
        let fit: Vec<_> = fit.collect();
        let left: Vec<String> = fit.iter().map(|other| label(other)).collect();
        if left.is_empty() {
            tracing::info!(
                member = %member.id,
                name = &*member.name,
                uid = by.uid,
                sudo_user = by.sudo_user,
                from_replica = by.replica,
                "a pause was refused: no other member is ready"
            );
            return Err(stays_in_service(member));
        }
        // Two pauses at the same time: the later one looks again, and gives way.
        if !member.maintenance.pause() {
            return Ok(format!("member {} is paused already", label(member)));
        }
        if members.ready_voters().next().is_none() {
            member.maintenance.resume();
            return Err(stays_in_service(member));
        }
        self.members.maintenance_changed();
        let streams = member.load.streams().counts();
        tracing::info!(
            member = %member.id,
            name = &*member.name,
            uid = by.uid,
            sudo_user = by.sudo_user,
            from_replica = by.replica,
            "an operator paused a member"
        );
        let leads = match fit.first().filter(|_| members.leader == Some(member.id)) {
            // etcdctl looks for the leader among its endpoints, and Keyward asks a paused one for no status.
            Some(next) => format!(
                "\nit is the leader: MoveLeader and MemberPromote still go there, and other members pass \
                 writes on to it; to move the leadership, at the member itself and with its CA: \
                 ETCDCTL_ENDPOINTS={} etcdctl move-leader {}",
                member.endpoint, next.id
            ),
            None => String::new(),
        };
        Ok(format!(
            "member {} gets no new calls from this replica; {} streams move to: {}{leads}\n\
             until keyward resume, or the end of this process",
            label(member),
            streams.watches + streams.keepalives + streams.others,
            left.join(", ")
        ))
    }

    /// Returns a paused member to service.
    ///
    /// # Errors
    /// No such member, or the member is not paused.
    pub fn resume(&self, name: &str, by: &CommandOrigin) -> ActionResult {
        let members = self.members.snapshot.load_full();
        let member = find(&members, name).map_err(NoAction::Refused)?;
        if !member.maintenance.resume() {
            return Err(NoAction::Idle(format!("member {} is not paused", label(member))));
        }
        // The returned member gets calls gradually.
        member.load.begin_slow_start();
        self.members.maintenance_changed();
        tracing::info!(
            member = %member.id,
            name = &*member.name,
            uid = by.uid,
            sudo_user = by.sudo_user,
            from_replica = by.replica,
            "an operator resumed a member"
        );
        let rest =
            if member.is_ready() { "gets calls again" } else { "is not paused any more, and not ready" };
        Ok(format!("member {} {rest}", label(member)))
    }
}

/// The report of connections that were asked to end.
fn kick_report(kicked: &[KickedClient]) -> String {
    let mut report = String::new();
    for KickedClient { client: row, streams } in kicked.iter().take(MOST_NAMED) {
        let address = row.address.as_deref().unwrap_or("a unix socket");
        let user = match (&row.user, &row.blocked_login) {
            (Some(user), _) => format!(", user {user}"),
            (None, Some(name)) => format!(", blocked login {name}"),
            (None, None) => String::new(),
        };
        let calls = row.open.saturating_sub(*streams);
        let ended = format!("{streams} streams ended, {calls} calls have 10 s");
        report += &format!("client {} ({address}{user}) was told to leave: {ended}\n", row.client);
    }
    match kicked.len().saturating_sub(MOST_NAMED) {
        0 => {}
        more => report += &format!("and {more} clients more\n"),
    }
    report + "the client may connect again: keyward block refuses its user"
}

fn stays_in_service(member: &Member) -> NoAction {
    NoAction::Refused(format!("member {} stays in service: no other voter is ready", label(member)))
}

/// The member with this name or hexadecimal id. A name of two members names none.
fn find<'m>(members: &'m Membership, name: &str) -> Result<&'m Arc<Member>, String> {
    let known = || members.members.iter().map(|member| label(member)).collect::<Vec<_>>().join(", ");
    let mut named = members.members.iter().filter(|it| &*it.name == name || it.id.to_string() == name);
    match (named.next(), named.next()) {
        (Some(member), None) => Ok(member),
        (Some(_), Some(_)) => Err(format!("several members are called {name:?}: use the id: {}", known())),
        (None, _) => Err(format!("no member {name:?}: there are {}", known())),
    }
}

fn label(member: &Member) -> String {
    if member.name.is_empty() {
        member.id.to_string()
    } else {
        format!("{} ({})", member.name.escape_debug(), member.id)
    }
}
