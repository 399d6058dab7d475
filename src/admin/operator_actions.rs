//! `keyward kick`, `pause` and `resume`: what an operator does to one client or one member of this process.
//!
//! Owns: the conditions of these actions, and their report. Must not know: how a connection ends, how streams
//! leave a member. Invariants: every action is logged with the operator's user id, also if it is refused; a
//! pause never leaves the replica without a member; nothing outlives the process.

use std::sync::Arc;

use tokio::time::Instant;

use crate::gateway::shard_questions::{ShardQuestion, ShardQuestions};
use crate::gateway::shard_rows::KickedClient;
use crate::members::membership::{Fitness, Member, MembersHandle, Membership};

/// The actions.
pub struct OperatorActions {
    /// The shards, which hold the client connections.
    pub questions: Arc<ShardQuestions>,
    /// The members.
    pub members: MembersHandle,
}

/// The report of an action, or the reason for its refusal.
pub type ActionResult = Result<String, String>;

impl OperatorActions {
    /// Asks a client connection to end, as a drain does: GOAWAY, streams end with Unavailable, calls under
    /// way have ten seconds.
    ///
    /// # Errors
    /// No connection has this number, or a shard does not answer.
    pub async fn kick(&self, client: u64, uid: Option<u32>) -> ActionResult {
        let kicked: Vec<KickedClient> = self
            .questions
            .ask(|answer| ShardQuestion::Kick(client, answer))
            .await
            .map_err(|error| error.to_string())?;
        let Some(KickedClient { client: row, streams }) = kicked.into_iter().next() else {
            tracing::info!(client, uid, "an operator wanted to end a connection that is not there");
            return Err(format!("no client {client}: keyward show clients lists the clients of one replica"));
        };
        tracing::info!(
            client,
            remote = row.address,
            user = row.user,
            listener = row.listener,
            streams,
            uid,
            "an operator ended a client connection"
        );
        let address = row.address.as_deref().unwrap_or("a unix socket");
        let user = row.user.as_deref().map(|user| format!(", user {user}")).unwrap_or_default();
        let calls = row.open.saturating_sub(streams);
        let ended = format!("{streams} streams ended, {calls} calls have 10 s");
        Ok(format!(
            "client {client} ({address}{user}) was told to leave: {ended}\n\
             the client may connect again: keyward block refuses its user"
        ))
    }

    /// Takes a member out of service until [`OperatorActions::resume`] or the end of the process: no new call
    /// that another member can serve goes there, and streams move elsewhere.
    ///
    /// # Errors
    /// No such member, or no other member would be left.
    pub fn pause(&self, name: &str, uid: Option<u32>) -> ActionResult {
        let members = self.members.snapshot.load_full();
        let member = find(&members, name)?;
        if member.maintenance.is_paused() {
            return Ok(format!("member {} is paused already", label(member)));
        }
        let others = members.ready_voters().filter(|other| other.id != member.id);
        let fit = others.filter(|other| !matches!(other.fitness(Instant::now()), Fitness::Ejected(_)));
        let left: Vec<String> = fit.map(|other| label(other)).collect();
        if left.is_empty() {
            let name = &*member.name;
            tracing::info!(member = %member.id, name, uid, "a pause was refused: no other member is ready");
            return Err(format!("member {} stays in service: no other voter is ready", label(member)));
        }
        // Two pauses at the same time: the later one looks again, and gives way.
        if !member.maintenance.pause() {
            return Ok(format!("member {} is paused already", label(member)));
        }
        if members.ready_voters().next().is_none() {
            member.maintenance.resume();
            return Err(format!("member {} stays in service: no other voter is ready", label(member)));
        }
        self.members.maintenance_changed();
        let streams = member.load.streams().counts();
        tracing::info!(member = %member.id, name = &*member.name, uid, "an operator paused a member");
        let leads = if members.leader == Some(member.id) {
            "\nit is the leader: MoveLeader and MemberPromote still go there, and other members pass \
             writes on to it; etcdctl move-leader moves the leadership"
        } else {
            ""
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
    pub fn resume(&self, name: &str, uid: Option<u32>) -> ActionResult {
        let members = self.members.snapshot.load_full();
        let member = find(&members, name)?;
        if !member.maintenance.resume() {
            return Err(format!("member {} is not paused", label(member)));
        }
        // The returned member gets calls gradually.
        member.load.begin_slow_start();
        self.members.maintenance_changed();
        tracing::info!(member = %member.id, name = &*member.name, uid, "an operator resumed a member");
        let rest =
            if member.is_ready() { "gets calls again" } else { "is not paused any more, and not ready" };
        Ok(format!("member {} {rest}", label(member)))
    }
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
