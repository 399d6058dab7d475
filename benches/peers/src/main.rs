//! The programs of the comparison with other proxies: the yardstick `bare`, the `canned` member, and the loads
//! that `h2load` cannot make. `README.md` describes the comparison, `run` starts the programs.
//!
//! Owns: the command line. Must not know: the other proxies, the figures of a table. Invariant: a load prints
//! a figure only after every answer behind the figure was verified.

mod abuse;
mod auth_setup;
mod bare;
mod calls;
mod canned;
mod canned_watches;
mod certificates;
mod check;
mod client_pool;
mod crowd;
mod fan_out;
mod first_event;
mod grpc_client;
mod idle_streams;
mod keepalives;
mod latency;
mod lock_rounds;
mod login_storm;
mod polite_calls;
mod queue_rounds;
mod script_turns;
mod soak;
mod soak_session;
mod target;

use std::io::{self, Write as _};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use tokio::runtime::{Builder, LocalOptions};

/// Keyward's own allocator, so that a ratio between Keyward and `bare` compares code, not allocators.
#[cfg(target_os = "linux")]
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

/// Any failure: `run` shows the text and ends.
type Failure = Box<dyn std::error::Error>;

/// The programs of the comparison.
#[derive(Parser)]
struct Arguments {
    #[command(subcommand)]
    program: Program,
}

#[derive(Subcommand)]
enum Program {
    /// Reads the whole keyspace over and over, and writes at a steady rate: an abusive identity.
    Abuse(abuse::Abuse),
    /// Forwards every call over one upstream connection, and does nothing else.
    Bare {
        #[arg(long)]
        listen: SocketAddr,
        #[arg(long)]
        upstream: SocketAddr,
        /// The folder of the certificate for TLS towards clients; plaintext without the folder.
        #[arg(long)]
        tls: Option<PathBuf>,
    },
    /// Makes Range calls, a constant number in flight, over many connections and as many users.
    Calls(calls::Calls),
    /// Answers like a member of an etcd cluster, with auth on, from memory.
    Canned {
        #[arg(long)]
        listen: SocketAddr,
        /// All members, the leader first. Default: `listen` is the only member.
        #[arg(long, value_delimiter = ',')]
        cluster: Vec<SocketAddr>,
    },
    /// Makes the CA and the server's certificate of one run.
    Certificates {
        #[arg(long)]
        folder: PathBuf,
    },
    /// Verifies the answers of a proxy, and prints the token and the lengths of the answers.
    Check(check::Check),
    /// Holds many connections with watches, and makes paced calls over all connections.
    Crowd(crowd::Crowd),
    /// Adds users with the right to everything, and turns auth on.
    EnableAuth(auth_setup::EnableAuth),
    /// Fills the keyspace of a cluster without auth.
    Fill(abuse::Fill),
    /// Delivers the events of one key to many watches, and prints the delivery times.
    FanOut(fan_out::FanOut),
    /// Opens one watch after the other, and prints the time of each first event.
    FirstEvent(first_event::FirstEvent),
    /// Holds idle connections, then idle watches, while `run` reads the memory of the proxy.
    Idle(idle_streams::IdleStreams),
    /// Keeps many leases alive, and prints the time of a round of keepalives.
    Keepalive(keepalives::Keepalives),
    /// Takes and releases a lock, and prints the time of a round.
    Lock(lock_rounds::LockRounds),
    /// Lets many clients of one user log in at once, and prints the time until each was served.
    Login(login_storm::LoginStorm),
    /// Makes calls at a steady rate, alone and then beside a greedy client, and prints their times.
    Polite(polite_calls::PoliteCalls),
    /// Enqueues for a waiting consumer, and prints the time of a round.
    Queue(queue_rounds::QueueRounds),
    /// Makes a mixed load of calls, watches, leases and locks, one cycle for each turn.
    Soak(soak::Soak),
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match run(arguments.program) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            // Nobody is left to be told if stderr is closed.
            drop(writeln!(io::stderr(), "peers: {failure}"));
            ExitCode::FAILURE
        }
    }
}

fn run(program: Program) -> Result<(), Failure> {
    let runtime = Builder::new_current_thread().enable_all().build_local(LocalOptions::default())?;
    runtime.block_on(async {
        match program {
            Program::Abuse(load) => load.run().await,
            Program::Bare { listen, upstream, tls } => {
                let tls = tls.as_deref().map(certificates::server_config).transpose()?;
                bare::serve(listen, upstream, tls).await
            }
            Program::Calls(load) => load.run().await,
            Program::Canned { listen, cluster } => canned::serve(listen, cluster).await,
            Program::Certificates { folder } => certificates::write(&folder),
            Program::Check(check) => check.run().await,
            Program::Crowd(load) => load.run().await,
            Program::EnableAuth(setup) => setup.run().await,
            Program::FanOut(load) => load.run().await,
            Program::Fill(setup) => setup.run().await,
            Program::FirstEvent(load) => load.run().await,
            Program::Idle(load) => load.run().await,
            Program::Keepalive(load) => load.run().await,
            Program::Lock(load) => load.run().await,
            Program::Login(load) => load.run().await,
            Program::Polite(load) => load.run().await,
            Program::Queue(load) => load.run().await,
            Program::Soak(load) => load.run().await,
        }
    })
}
