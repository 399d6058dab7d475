//! `--all` and `--replica`: commands to the replicas of the fleet.
//!
//! Owns: the two flags, and the exit codes of several answers. Must not know: how replicas are asked.

use std::io::{self, Write as _};
use std::process::ExitCode;

use clap::Args;
use keyward::admin::fleet::fleet_report::{FleetOutcomes, FleetStatus, FleetVerdict};
use keyward::admin::socket_protocol::{
    AdminAnswer, AdminCommand as Ask, FleetCommand, FleetQuestion, ReplicaAnswer,
};

use super::output_form::TableForm;
use super::{AdminSocketArgs, UNKNOWN, UNUSABLE, ask, fail, finish, send_command_or_exit, unexpected_answer};

/// The replicas that a command is for.
#[derive(Args)]
pub(super) struct FleetArgs {
    /// Every replica of admin.replicas, this one included.
    #[arg(long)]
    all: bool,
    /// One of these: its name in the column REPLICA of `show --all`, or its admin address.
    #[arg(long, value_name = "REPLICA", conflicts_with = "all")]
    replica: Option<String>,
}

impl FleetArgs {
    /// True for the replica of the admin socket alone.
    pub(super) fn is_here(&self) -> bool {
        !self.all && self.replica.is_none()
    }

    /// Asks the replicas; the exit code after printing an error.
    pub(super) fn ask(
        &self,
        at: AdminSocketArgs,
        command: FleetCommand,
    ) -> Result<Vec<ReplicaAnswer>, ExitCode> {
        let sudo_user = std::env::var("SUDO_USER").ok();
        let question = FleetQuestion { command, only: self.replica.clone(), sudo_user };
        match send_command_or_exit(at, &Ask::Fleet(question))? {
            AdminAnswer::Fleet(answers) => Ok(answers),
            _ => Err(unexpected_answer()),
        }
    }

    /// Gives an order, and prints the outcome at each replica.
    pub(super) fn order(&self, at: AdminSocketArgs, command: FleetCommand) -> ExitCode {
        if self.is_here() {
            return ask(at, &Ask::from(command));
        }
        let outcomes = match self.ask(at, command) {
            Ok(answers) => FleetOutcomes(answers),
            Err(code) => return code,
        };
        let code = match outcomes.verdict() {
            FleetVerdict::Done => ExitCode::SUCCESS,
            FleetVerdict::Idle | FleetVerdict::Incomplete => ExitCode::FAILURE,
            FleetVerdict::Unknown => ExitCode::from(UNKNOWN),
        };
        finish(write!(io::stdout(), "{outcomes}"), code)
    }

    /// Prints the status of each replica.
    pub(super) fn status(&self, at: AdminSocketArgs, form: TableForm) -> ExitCode {
        let status = match self.ask(at, FleetCommand::Status {}) {
            Ok(answers) => FleetStatus::of(answers),
            Err(code) => return code,
        };
        let code = if status.is_serving() { ExitCode::SUCCESS } else { ExitCode::FAILURE };
        finish(form.print(&status, |status, width| status.text(width)), code)
    }
}

/// `keyward kick`.
#[derive(Args)]
pub(super) struct KickArguments {
    /// The number of the connection as in `keyward show clients`, or for all connections of a client its
    /// peer, its etcd user, or its address.
    client: String,
    #[command(flatten)]
    fleet: FleetArgs,
    #[command(flatten)]
    at: AdminSocketArgs,
}

impl KickArguments {
    /// Ends the connections.
    pub(super) fn run(self) -> ExitCode {
        let command = match self.client.parse::<u64>() {
            Ok(_) if self.fleet.all => {
                let reason = "each replica numbers its own connections: name the replica (--replica), or the \
                              client's peer, etcd user or address";
                return fail(reason, ExitCode::from(UNUSABLE));
            }
            Ok(client) => FleetCommand::Kick { client },
            Err(_) => FleetCommand::KickPeer { peer: self.client },
        };
        self.fleet.order(self.at, command)
    }
}
