//! Makes a number of calls through Keyward, or receives a number of watch events, in one process and one thread, for
//! the tools that count instructions, allocations and copied bytes (`benches/budget/run`).
//!
//! ```text
//! canned_exchange keyward|direct put|range|large_range|watch|shared_watch OPERATIONS
//! ```
//!
//! With `direct`, the client's connection leads to the member: the cost of client, member and pipes alone. Owns: the
//! order of the exchange. Every answer is checked: a wrong answer ends the process.

mod canned_client;
mod canned_member;
mod composed_keyward;
mod http2_pipe;
mod member_logins;
mod workload;

use std::future::{Future, poll_fn};
use std::io::Write as _;
use std::process::ExitCode;
use std::task::Poll;

use keyward::gateway::pipeline;
use keyward::tasks::Tasks;
use tokio::runtime::{Builder, LocalOptions};
use tokio::sync::mpsc;

use canned_client::CannedClient;
use canned_member::CannedMember;
use composed_keyward::{ComposedKeyward, MemberDoors};
use member_logins::SIMPLE_TOKEN;
use workload::{AT_ONCE, FIRST_REVISION, Workload};

/// Connections to the member at the same time: more than Keyward opens.
const DOOR: usize = 16;
/// The answering side of the client's connection.
#[derive(Clone, Copy)]
enum ClientPeer {
    Keyward,
    Member,
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [peer, workload, operations] = &arguments[..] else { return usage() };
    let peer = match &**peer {
        "keyward" => ClientPeer::Keyward,
        "direct" => ClientPeer::Member,
        _ => return usage(),
    };
    let (Some(workload), Ok(operations)) = (Workload::named(workload), operations.parse()) else {
        return usage();
    };
    let runtime = Builder::new_current_thread().enable_all().build_local(LocalOptions::default());
    runtime.expect("a runtime").block_on(exchange(peer, workload, operations));
    let future = future_size(pipeline::serve);
    let printed = writeln!(std::io::stdout(), "operations {operations}\nfuture_bytes {future}");
    if printed.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn usage() -> ExitCode {
    let usage = "usage: canned_exchange keyward|direct put|range|large_range|watch|shared_watch OPERATIONS";
    // Without stderr, the exit code alone tells the fault.
    drop(writeln!(std::io::stderr(), "{usage}"));
    ExitCode::from(64)
}

/// The size of the future of a call, as hyper holds the future, in bytes.
fn future_size<A, B, C, D, F: Future>(_: impl Fn(A, B, C, D) -> F) -> usize {
    size_of::<F>()
}

async fn exchange(peer: ClientPeer, workload: Workload, operations: usize) {
    let tasks = Tasks::default();
    let (calls, called) = mpsc::channel(DOOR);
    let (logins, logged_in) = mpsc::channel(DOOR);
    tasks.spawn("logins at the member", member_logins::serve_logins(logged_in, tasks.clone())).detach();
    let (path, request, answer) = workload.call();
    let member = CannedMember::new(called, &answer);
    let doors = MemberDoors { calls, logins };
    let (mut exchange, _keyward) = match peer {
        ClientPeer::Keyward => {
            let keyward = ComposedKeyward::start(doors, tasks.clone());
            let client = CannedClient::over(keyward.connect());
            let mut exchange = CannedExchange { client, member, revision: FIRST_REVISION };
            let token = exchange.log_in().await;
            exchange.prepare(workload, &token, path, &request, &answer).await;
            (exchange, Some(keyward))
        }
        ClientPeer::Member => {
            let client = CannedClient::over(composed_keyward::dial(&doors.calls).expect("the door is open"));
            let mut exchange = CannedExchange { client, member, revision: FIRST_REVISION };
            exchange.prepare(workload, SIMPLE_TOKEN, path, &request, &answer).await;
            (exchange, None)
        }
    };
    for _ in 0..operations / AT_ONCE {
        exchange.turn(workload).await;
    }
}

/// Both ends of the measured exchange, driven by one task.
struct CannedExchange {
    client: CannedClient,
    member: CannedMember,
    /// The revision of the last event.
    revision: i64,
}

impl CannedExchange {
    /// Logs in; the session's token.
    async fn log_in(&mut self) -> String {
        self.client.begin();
        self.client.log_in();
        self.until_received(1, 1).await;
        self.client.token()
    }

    async fn prepare(&mut self, workload: Workload, token: &str, path: &str, request: &[u8], answer: &[u8]) {
        let (streams, watches) = workload.watches();
        if streams == 0 {
            return self.client.set_call(path, token, request, answer);
        }
        self.client.begin();
        self.client.open_watches(token, streams, watches);
        self.until_received(streams * watches, 0).await;
        assert!(self.client.last_watch_response().created);
        assert_eq!(self.member.watches(), streams * watches);
    }

    /// [`AT_ONCE`] operations.
    async fn turn(&mut self, workload: Workload) {
        self.client.begin();
        match workload {
            Workload::Put | Workload::Range | Workload::LargeRange => {
                (0..AT_ONCE).for_each(|_| self.client.send_call());
                self.until_received(AT_ONCE, AT_ONCE).await;
            }
            Workload::Watch | Workload::SharedWatch => {
                self.revision += 1;
                self.member.send_events(self.revision);
                self.until_received(AT_ONCE, 0).await;
                let header = self.client.last_watch_response().header;
                assert_eq!(header.map(|header| header.revision), Some(self.revision));
            }
        }
    }

    /// Drives client and member until the client has received these messages and ends of streams, and no more.
    async fn until_received(&mut self, messages: usize, ended: usize) {
        poll_fn(|cx| {
            self.member.poll_requests(cx);
            let received = self.client.poll_answers(cx);
            assert!(received.0 <= messages && received.1 <= ended, "{received:?}");
            if received == (messages, ended) { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }
}
