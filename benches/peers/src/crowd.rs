//! Many connections with watches, and paced Range calls over all connections.
//!
//! Owns: the connections, the watch streams, the pace. Must not know: the proxy's memory and CPU time; the
//! script `crowd` reads both between the lines. Invariants: the calls follow their plan, not the answers, so
//! that a slow proxy does not lower the rate; no watch stream ends, and no event arrives, before the Puts;
//! every answer and event is verified.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::rc::Rc;
use std::time::Duration;

use clap::Args;
use futures_util::FutureExt as _;
use futures_util::stream::{self, StreamExt as _, TryStreamExt as _};
use keyward::pb::etcdserverpb::WatchResponse;
use keyward::tasks::Tasks;
use prost::Message as _;
use serde_json::json;
use tokio::time::{Instant, sleep_until, timeout};

use crate::Failure;
use crate::client_pool::{LIMIT, open, verified_range};
use crate::fan_out::{open_watches, put};
use crate::grpc_client::{BidiStream, GrpcClient};
use crate::latency::{micros, percentile};
use crate::script_turns::{tell, wait_for_turn};
use crate::target::ProxyAndMember;

/// Length of a value.
const VALUE: usize = 256;
/// Watch streams opened at the same time.
const OPENING: usize = 32;
/// Calls in flight. A proxy that falls so far behind the plan has failed.
const MOST_IN_FLIGHT: usize = 8192;
/// The pace's step: tokio's timers have whole milliseconds.
const STEP: Duration = Duration::from_millis(1);

/// The load.
#[derive(Args)]
pub(crate) struct Crowd {
    #[command(flatten)]
    target: ProxyAndMember,
    #[arg(long, default_value_t = 10_000)]
    connections: usize,
    /// Loopback addresses of the connections in turn, from 127.0.0.1.
    #[arg(long, default_value_t = 1)]
    sources: u8,
    /// Watches of one connection: all on one stream, of a key of the connection's own.
    #[arg(long, default_value_t = 5)]
    watches: usize,
    /// Calls a second, over all connections in turn.
    #[arg(long, default_value_t = 2000)]
    rate: u32,
    /// Duration of the calls.
    #[arg(long, default_value_t = 60)]
    seconds: u32,
    /// Puts at the end, each of another connection's key.
    #[arg(long, default_value_t = 100)]
    puts: usize,
}

/// The results of the paced calls.
#[derive(Default)]
struct CallResults {
    in_flight: Cell<usize>,
    micros: RefCell<Vec<u64>>,
    errors: Cell<usize>,
    first_error: RefCell<Option<String>>,
}

/// One connection with its watch stream.
struct Watcher {
    client: Rc<GrpcClient>,
    key: String,
    stream: BidiStream,
}

impl Crowd {
    /// Opens connections and watches, makes the calls and the Puts, each part in the script's turn.
    pub(crate) async fn run(self) -> Result<(), Failure> {
        let tasks = Tasks::default();
        let member = self.target.connect_to_member(&tasks).await?;
        let proxy = &self.target.proxy;
        let tokens: Vec<_> = proxy.token.iter().cloned().collect();
        let clients = open(proxy.address, self.connections, self.sources, &tokens, &tasks).await?;
        tell(&json!({ "connections": clients.len() }))?;
        wait_for_turn().await?;
        let mut watchers = self.open_watchers(clients).await?;
        tell(&json!({ "watches": watchers.len() * self.watches }))?;
        wait_for_turn().await?;
        let line = self.make_calls(&watchers, &tasks).await?;
        tell(&line)?;
        wait_for_turn().await?;
        for watcher in &mut watchers {
            verify_silence(watcher)?;
        }
        let every = watchers.len().div_ceil(self.puts.max(1)).max(1);
        let mut events = 0;
        for watcher in watchers.iter_mut().step_by(every) {
            events += timeout(LIMIT, deliver(watcher, &member, self.watches)).await??;
        }
        tell(&json!({ "puts": events / self.watches.max(1), "events": events }))?;
        wait_for_turn().await
    }

    async fn open_watchers(&self, clients: Vec<GrpcClient>) -> Result<Vec<Watcher>, Failure> {
        let opened = stream::iter(clients.into_iter().enumerate()).map(async |(at, client)| {
            let key = format!("crowd-{at}");
            let stream = timeout(LIMIT, open_watches(&client, &key, self.watches)).await??;
            Ok::<_, Failure>(Watcher { client: Rc::new(client), key, stream })
        });
        opened.buffered(OPENING).try_collect().await
    }

    /// Sends each call at its planned time. The plan's lag shows whether the load itself was too slow.
    async fn make_calls(&self, watchers: &[Watcher], tasks: &Tasks) -> Result<serde_json::Value, Failure> {
        let results = Rc::new(CallResults::default());
        let calls = self.rate * self.seconds;
        let began = Instant::now();
        let mut lag = Duration::ZERO;
        for (number, watcher) in (0..calls).zip(watchers.iter().cycle()) {
            let due = began + Duration::from_secs(1) * number / self.rate;
            if Instant::now() + STEP < due {
                sleep_until(due).await;
            }
            lag = lag.max(due.elapsed());
            if results.in_flight.get() >= MOST_IN_FLIGHT {
                let text =
                    format!("{MOST_IN_FLIGHT} of {number} calls have no answer yet: the rate is too high");
                return Err(format!("{text} for the proxy, the member or the load").into());
            }
            results.in_flight.set(results.in_flight.get() + 1);
            let call = make_call(Rc::clone(&watcher.client), Rc::clone(&results));
            tasks.spawn("call", call).detach();
            if number % 16 == 0 {
                // A load behind its plan still reads the answers.
                tokio::task::yield_now().await;
            }
        }
        let ends = Instant::now() + LIMIT;
        while results.in_flight.get() > 0 {
            if Instant::now() > ends {
                return Err(format!("{} calls have no answer", results.in_flight.get()).into());
            }
            sleep_until(Instant::now() + STEP).await;
        }
        let mut times = results.micros.take();
        Ok(json!({
            "calls": calls,
            "seconds": began.elapsed().as_secs_f64(),
            "errors": results.errors.get(),
            "first_error": results.first_error.take(),
            "lag_us": micros(lag),
            "p50_us": percentile(&mut times, 50),
            "p99_us": percentile(&mut times, 99),
            "max_us": percentile(&mut times, 100),
        }))
    }
}

async fn make_call(client: Rc<GrpcClient>, results: Rc<CallResults>) {
    let began = Instant::now();
    let error = match timeout(LIMIT, verified_range(&client)).await {
        Ok(Ok(())) => None,
        Ok(Err(failure)) => Some(failure.to_string()),
        Err(elapsed) => Some(elapsed.to_string()),
    };
    results.micros.borrow_mut().push(micros(began.elapsed()));
    if let Some(error) = error {
        results.errors.set(results.errors.get() + 1);
        results.first_error.borrow_mut().get_or_insert(error);
    }
    results.in_flight.set(results.in_flight.get() - 1);
}

/// Verifies that a watch stream is open and has received nothing since the last Created.
fn verify_silence(watcher: &mut Watcher) -> Result<(), Failure> {
    match watcher.stream.responses.next().now_or_never() {
        None => Ok(()),
        Some(Ok(None)) => Err(format!("the watch stream of {} ended", watcher.key).into()),
        Some(Ok(Some(_))) => Err(format!("{} was never put, but has a response", watcher.key).into()),
        Some(Err(failure)) => Err(format!("the watch stream of {}: {failure}", watcher.key).into()),
    }
}

/// Puts the watcher's key; each of its `watches` must receive the event of the Put once.
async fn deliver(watcher: &mut Watcher, member: &GrpcClient, watches: usize) -> Result<usize, Failure> {
    let header = put(member, &watcher.key, VALUE).await?.header.ok_or("a Put without a header")?;
    let mut delivered = BTreeSet::new();
    while delivered.len() < watches {
        let message = watcher.stream.responses.next().await?.ok_or("a watch stream ended")?;
        let response = WatchResponse::decode(message)?;
        let right = match &response.events[..] {
            [event] => event.kv.as_ref().is_some_and(|kv| {
                kv.key == watcher.key.as_bytes()
                    && kv.value.len() == VALUE
                    && kv.mod_revision == header.revision
            }),
            _ => false,
        };
        if !right || !delivered.insert(response.watch_id) {
            return Err(format!("{}: not the event of the Put: {response:?}", watcher.key).into());
        }
    }
    Ok(delivered.len())
}
