//! The programs of the comparison with other proxies: the yardstick `bare`, the `canned` member, and the loads
//! that `h2load` cannot make. `README.md` describes the comparison, `run` starts the programs.
//!
//! Owns: the command line. Must not know: the other proxies, the figures of a table. Invariant: a load prints
//! a figure only after every answer behind the figure was verified.

mod auth_setup;
mod bare;
mod calls;
mod canned;
mod canned_watches;
mod check;
mod client_pool;
mod crowd;
mod fan_out;
mod first_event;
mod grpc_client;
mod idle_streams;
mod latency;
mod lock_rounds;
mod script_turns;
mod soak;
mod soak_session;

use std::io::{self, Write as _};
use std::net::SocketAddr;
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
    /// Forwards every call over one upstream connection, and does nothing else.
    Bare {
        #[arg(long)]
        listen: SocketAddr,
        #[arg(long)]
        upstream: SocketAddr,
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
    /// Verifies the answers of a proxy, and prints the token and the lengths of the answers.
    Check(check::Check),
    /// Holds many connections with watches, and makes paced calls over all connections.
    Crowd(crowd::Crowd),
    /// Adds users with the right to everything, and turns auth on.
    EnableAuth(auth_setup::EnableAuth),
    /// Delivers the events of one key to many watches, and prints the delivery times.
    FanOut(fan_out::FanOut),
    /// Opens one watch after the other, and prints the time of each first event.
    FirstEvent(first_event::FirstEvent),
    /// Holds idle connections, then idle watches, while `run` reads the memory of the proxy.
    Idle(idle_streams::IdleStreams),
    /// Takes and releases a lock, and prints the time of a round.
    Lock(lock_rounds::LockRounds),
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
            Program::Bare { listen, upstream } => bare::serve(listen, upstream).await,
            Program::Calls(load) => load.run().await,
            Program::Canned { listen, cluster } => canned::serve(listen, cluster).await,
            Program::Check(check) => check.run().await,
            Program::Crowd(load) => load.run().await,
            Program::EnableAuth(setup) => setup.run().await,
            Program::FanOut(load) => load.run().await,
            Program::FirstEvent(load) => load.run().await,
            Program::Idle(load) => load.run().await,
            Program::Lock(load) => load.run().await,
            Program::Soak(load) => load.run().await,
        }
    })
}
