//! One abusive identity: ranges over the whole keyspace on each of its connections, and Puts at a steady rate.
//!
//! Owns: the abusive calls, and filling the keyspace before. Must not know: the other clients. Invariants: a
//! refused call is followed by the next call at once; the rate of Puts does not depend on the answers.

use std::cell::Cell;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use clap::Args;
use keyward::pb::etcdserverpb::request_op::Request;
use keyward::pb::etcdserverpb::{PutRequest, RangeRequest, RequestOp, TxnRequest, TxnResponse};
use keyward::tasks::Tasks;
use serde_json::json;
use tokio::time::{Instant, MissedTickBehavior, interval};

use crate::Failure;
use crate::client_pool::log_in;
use crate::grpc_client::GrpcClient;
use crate::script_turns::{tell, wait_for_turn};

/// Puts of one Txn, below etcd's limit of 128.
const PUTS: usize = 100;
/// Bytes of a value.
const VALUE: usize = 64;
/// The longest wait between two Puts' turns: several Puts are due at once.
const TURN: Duration = Duration::from_millis(5);

/// Fills the keyspace of a cluster without auth.
#[derive(Args)]
pub(crate) struct Fill {
    /// A member.
    #[arg(long)]
    address: SocketAddr,
    #[arg(long, default_value_t = 100_000)]
    keys: usize,
}

impl Fill {
    /// Puts the keys, and the key of the other loads.
    pub(crate) async fn run(self) -> Result<(), Failure> {
        let tasks = Tasks::default();
        let member = GrpcClient::connect(self.address, None, &tasks).await?;
        let put = |key: String, value: usize| {
            let value = vec![b'v'; value].into();
            let put = PutRequest { key: key.into(), value, ..PutRequest::default() };
            RequestOp { request: Some(Request::RequestPut(put)) }
        };
        let small = TxnRequest { success: vec![put("small".to_owned(), 256)], ..TxnRequest::default() };
        let _: TxnResponse = member.call("/etcdserverpb.KV/Txn", &small).await?;
        for first in (0..self.keys).step_by(PUTS) {
            let keys = first..self.keys.min(first + PUTS);
            let success = keys.map(|key| put(format!("/registry/pods/{key:08}"), VALUE)).collect();
            let txn = TxnRequest { success, ..TxnRequest::default() };
            let _: TxnResponse = member.call("/etcdserverpb.KV/Txn", &txn).await?;
        }
        Ok(())
    }
}

/// The abusive load.
#[derive(Args)]
pub(crate) struct Abuse {
    /// The proxy, or a member.
    #[arg(long)]
    address: SocketAddr,
    #[arg(long, value_name = "USER:PASSWORD")]
    login: String,
    #[arg(long, default_value_t = 8)]
    connections: usize,
    /// Puts of all connections in one second.
    #[arg(long, default_value_t = 2000)]
    puts: u32,
    /// Puts not yet answered: later Puts are left out.
    #[arg(long, default_value_t = 1000)]
    most: usize,
}

/// Counts of one kind of calls.
#[derive(Default)]
struct Counts {
    sent: Cell<u64>,
    served: Cell<u64>,
    open: Cell<usize>,
}

impl Counts {
    fn note(&self, was_served: bool) {
        self.sent.set(self.sent.get() + 1);
        self.served.set(self.served.get() + u64::from(was_served));
    }
}

impl Abuse {
    /// Makes the calls from one turn of the script to the next, and prints their numbers.
    pub(crate) async fn run(self) -> Result<(), Failure> {
        let tasks = Tasks::default();
        let (name, password) = self.login.split_once(':').ok_or("--login without a colon")?;
        let token = log_in(self.address, name, password, &tasks).await?;
        let mut clients = Vec::new();
        for _ in 0..self.connections {
            clients.push(Rc::new(GrpcClient::connect(self.address, Some(&token), &tasks).await?));
        }
        tell(&json!({ "connections": clients.len() }))?;
        wait_for_turn().await?;
        let (ranges, puts) = (Rc::<Counts>::default(), Rc::<Counts>::default());
        let began = Instant::now();
        let mut running = Vec::new();
        for client in &clients {
            let (client, ranges) = (Rc::clone(client), Rc::clone(&ranges));
            running.push(tasks.spawn("ranges", async move {
                loop {
                    ranges.note(client.drain("/etcdserverpb.KV/Range", &whole_keyspace()).await);
                }
            }));
        }
        let (rate, most, counted) = (self.puts, self.most, Rc::clone(&puts));
        let calls = tasks.clone();
        running.push(tasks.spawn("puts", async move {
            let (mut turns, mut sent) = (interval(TURN), 0_u64);
            turns.set_missed_tick_behavior(MissedTickBehavior::Skip);
            loop {
                turns.tick().await;
                let due = began.elapsed().as_millis() * u128::from(rate) / 1000;
                while u128::from(sent) < due {
                    sent += 1;
                    if counted.open.get() >= most {
                        continue;
                    }
                    let at = usize::try_from(sent).unwrap_or_default() % clients.len().max(1);
                    let (client, counted) = (Rc::clone(&clients[at]), Rc::clone(&counted));
                    counted.open.set(counted.open.get() + 1);
                    let put = async move {
                        counted.note(client.drain("/etcdserverpb.KV/Put", &abusive_put(sent)).await);
                        counted.open.set(counted.open.get() - 1);
                    };
                    calls.spawn("put", put).detach();
                }
            }
        }));
        wait_for_turn().await?;
        drop(running);
        tell(&json!({
            "seconds": began.elapsed().as_secs_f64(),
            "ranges": ranges.sent.get(),
            "ranges_served": ranges.served.get(),
            "puts": puts.sent.get(),
            "puts_served": puts.served.get(),
        }))?;
        wait_for_turn().await
    }
}

fn whole_keyspace() -> RangeRequest {
    RangeRequest { key: b"\0"[..].into(), range_end: b"\0"[..].into(), ..RangeRequest::default() }
}

fn abusive_put(number: u64) -> PutRequest {
    let key = format!("/abuse/{:04}", number % 1000).into();
    PutRequest { key, value: vec![b'v'; VALUE].into(), ..PutRequest::default() }
}
