//! Delivery of one key's events to many watches.
//!
//! Owns: the watches, the Puts, the delivery times. Must not know: the proxy's costs; `run` reads the costs
//! between the lines. Invariants: the Puts go to the member directly, so that the proxy only delivers; the
//! next Put waits for the last delivery; every event is verified (key, length of the value, growing revision).

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;
use std::time::Duration;

use clap::Args;
use keyward::pb::etcdserverpb::watch_request::RequestUnion;
use keyward::pb::etcdserverpb::{PutRequest, PutResponse, WatchCreateRequest, WatchRequest, WatchResponse};
use keyward::tasks::Tasks;
use prost::Message as _;
use serde_json::json;
use tokio::sync::Notify;
use tokio::time::{Instant, timeout};

use crate::Failure;
use crate::grpc_client::{BidiStream, GrpcClient, framed_all};
use crate::latency::{micros, percentile};
use crate::script_turns::{tell, wait_for_turn};
use crate::target::ProxyAndMember;

const WATCH: &str = "/etcdserverpb.Watch/Watch";
const PUT: &str = "/etcdserverpb.KV/Put";
/// Time limit of one round of deliveries: a missing event is a failure, not a slow proxy.
const LIMIT: Duration = Duration::from_secs(60);

/// The load.
#[derive(Args)]
pub(crate) struct FanOut {
    #[command(flatten)]
    target: ProxyAndMember,
    #[arg(long, default_value_t = 10)]
    connections: usize,
    /// Streams of one connection.
    #[arg(long, default_value_t = 100)]
    streams: usize,
    /// Watches of one stream.
    #[arg(long, default_value_t = 1)]
    watches: usize,
    #[arg(long, default_value_t = 40)]
    puts: usize,
    /// Puts before the measured Puts.
    #[arg(long, default_value_t = 3)]
    warm: usize,
    #[arg(long, default_value_t = 256)]
    value: usize,
    #[arg(long, default_value = "fan-out")]
    key: String,
}

/// The deliveries of the newest Put.
struct Deliveries {
    key: String,
    value: usize,
    sent: Cell<Instant>,
    missing: Cell<usize>,
    micros: RefCell<Vec<u64>>,
    fault: RefCell<Option<String>>,
    all_here: Notify,
}

/// A request to create one watch of `key`.
pub(crate) fn create_watch(key: &str) -> WatchRequest {
    let create = WatchCreateRequest { key: key.to_owned().into(), ..WatchCreateRequest::default() };
    WatchRequest { request_union: Some(RequestUnion::CreateRequest(create)) }
}

/// Opens a stream with `watches` watches of `key`, and waits for each Created.
pub(crate) async fn open_watches(
    client: &GrpcClient,
    key: &str,
    watches: usize,
) -> Result<BidiStream, Failure> {
    let mut stream = client.open(WATCH, framed_all((0..watches).map(|_| create_watch(key)))).await?;
    for _ in 0..watches {
        let message = stream.responses.next().await?.ok_or("a watch stream ended before its Created")?;
        let response = WatchResponse::decode(message)?;
        if !response.created || response.canceled {
            return Err(format!("not a Created: {response:?}").into());
        }
    }
    Ok(stream)
}

/// Sends one Put.
pub(crate) async fn put(member: &GrpcClient, key: &str, value: usize) -> Result<PutResponse, Failure> {
    let value = vec![b'v'; value].into();
    let asked = PutRequest { key: key.to_owned().into(), value, ..PutRequest::default() };
    member.call(PUT, &asked).await
}

impl FanOut {
    /// Opens the watches, tells `run`, delivers in `run`'s turn, and prints the delivery times.
    pub(crate) async fn run(self) -> Result<(), Failure> {
        let tasks = Tasks::default();
        let member = self.target.connect_to_member(&tasks).await?;
        let deliveries = Rc::new(Deliveries {
            key: self.key.clone(),
            value: self.value,
            sent: Cell::new(Instant::now()),
            missing: Cell::new(0),
            micros: RefCell::default(),
            fault: RefCell::default(),
            all_here: Notify::new(),
        });
        // A dropped client could end its connection.
        let mut clients = Vec::new();
        for _ in 0..self.connections {
            let client = self.target.proxy.connect(&tasks).await?;
            for _ in 0..self.streams {
                let stream = timeout(LIMIT, open_watches(&client, &self.key, self.watches)).await??;
                tasks.spawn("watch stream", Rc::clone(&deliveries).read(stream)).detach();
            }
            clients.push(client);
        }
        let events = self.connections * self.streams * self.watches;
        for _ in 0..self.warm {
            deliveries.round(&member, events).await?;
        }
        deliveries.micros.borrow_mut().clear();
        tell(&json!({ "watches": events }))?;
        wait_for_turn().await?;
        let began = Instant::now();
        for _ in 0..self.puts {
            deliveries.round(&member, events).await?;
        }
        let seconds = began.elapsed().as_secs_f64();
        let mut micros = deliveries.micros.take();
        tell(&json!({
            "events": micros.len(),
            "seconds": seconds,
            "p50_us": percentile(&mut micros, 50),
            "p99_us": percentile(&mut micros, 99),
        }))?;
        wait_for_turn().await
    }
}

impl Deliveries {
    /// Sends one Put and waits for its `events` deliveries.
    async fn round(&self, member: &GrpcClient, events: usize) -> Result<(), Failure> {
        self.missing.set(events);
        self.sent.set(Instant::now());
        timeout(LIMIT, put(member, &self.key, self.value)).await??;
        let all_here = async {
            while self.missing.get() > 0 && self.fault.borrow().is_none() {
                self.all_here.notified().await;
            }
        };
        let ended = timeout(LIMIT, all_here).await;
        if let Some(fault) = self.fault.take() {
            return Err(fault.into());
        }
        ended.map_err(|_| format!("{} of {events} events are missing", self.missing.get()).into())
    }

    /// Reads the events of one stream until its end, which is a fault.
    async fn read(self: Rc<Self>, stream: BidiStream) {
        let BidiStream { requests, mut responses } = stream;
        let mut newest = HashMap::new();
        let fault = loop {
            let message = match responses.next().await {
                Ok(Some(message)) => message,
                Ok(None) => break "a watch stream ended".to_owned(),
                Err(failure) => break failure.to_string(),
            };
            let response = match WatchResponse::decode(message) {
                Ok(response) => response,
                Err(failure) => break failure.to_string(),
            };
            if let Err(fault) = self.count(&response, newest.entry(response.watch_id).or_default()) {
                break fault;
            }
        };
        drop(requests);
        self.fault.replace(Some(fault));
        self.all_here.notify_one();
    }

    /// Verifies and counts the events of one response; `newest` is the revision of the watch.
    fn count(&self, response: &WatchResponse, newest: &mut i64) -> Result<(), String> {
        for event in &response.events {
            let right = |kv: &keyward::pb::mvccpb::KeyValue| {
                kv.key == self.key.as_bytes() && kv.value.len() == self.value && kv.mod_revision > *newest
            };
            let Some(kv) = event.kv.as_ref().filter(|kv| right(kv)) else {
                return Err(format!("a wrong event after revision {newest}: {event:?}"));
            };
            *newest = kv.mod_revision;
            let Some(missing) = self.missing.get().checked_sub(1) else {
                return Err("an event too many".to_owned());
            };
            self.missing.set(missing);
            self.micros.borrow_mut().push(micros(self.sent.get().elapsed()));
            if missing == 0 {
                self.all_here.notify_one();
            }
        }
        Ok(())
    }
}
