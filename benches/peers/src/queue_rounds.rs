//! Round trips of a queue, with the calls of etcd's client recipe
//! (<https://github.com/etcd-io/etcd/blob/main/client/v3/experimental/recipes/queue.go>).
//!
//! Owns: a producer and a consumer, each on a connection of its own through the proxy. Invariants: the consumer
//! finds the queue empty, and waits with a new watch; a round begins with the producer's Txn and ends after the
//! consumer's deleting Txn; the consumer receives the value of the round.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use clap::Args;
use keyward::pb::etcdserverpb::compare::{CompareResult, CompareTarget, TargetUnion};
use keyward::pb::etcdserverpb::range_request::{SortOrder, SortTarget};
use keyward::pb::etcdserverpb::request_op::Request;
use keyward::pb::etcdserverpb::watch_request::RequestUnion;
use keyward::pb::etcdserverpb::{
    Compare, DeleteRangeRequest, PutRequest, RangeRequest, RangeResponse, RequestOp, TxnRequest, TxnResponse,
    WatchCreateRequest, WatchRequest, WatchResponse,
};
use keyward::pb::mvccpb::event::EventType;
use keyward::pb::mvccpb::{Event, KeyValue};
use keyward::tasks::Tasks;
use prost::Message as _;
use serde_json::json;
use tokio::time::{Instant, timeout};

use crate::Failure;
use crate::grpc_client::{BidiStream, GrpcClient, framed_all};
use crate::latency::{micros, percentile};
use crate::script_turns::{tell, wait_for_turn};
use crate::target::ProxyAddress;

const LIMIT: Duration = Duration::from_secs(10);
/// The queue's prefix, and the first key behind the prefix.
const PREFIX: &str = "queue-rounds";
const PREFIX_END: &str = "queue-roundt";

/// The load.
#[derive(Args)]
pub(crate) struct QueueRounds {
    #[command(flatten)]
    proxy: ProxyAddress,
    #[arg(long, default_value_t = 40)]
    rounds: usize,
    /// Rounds before the measured rounds.
    #[arg(long, default_value_t = 3)]
    warm: usize,
    /// Length of a value.
    #[arg(long, default_value_t = 256)]
    value: usize,
}

/// A consumer that waits for the next item.
struct WaitingConsumer {
    watch: BidiStream,
}

impl QueueRounds {
    /// Makes the rounds in `run`'s turn, and prints the time of a round.
    pub(crate) async fn run(self) -> Result<(), Failure> {
        let tasks = Tasks::default();
        let producer = self.proxy.connect(&tasks).await?;
        let consumer = self.proxy.connect(&tasks).await?;
        let mut deleted = 0;
        for at in 0..self.warm {
            let (_, revision) = timeout(LIMIT, self.round(&producer, &consumer, at, deleted)).await??;
            deleted = revision;
        }
        tell(&json!({ "queue": PREFIX }))?;
        wait_for_turn().await?;
        let mut times = Vec::new();
        for at in 0..self.rounds {
            let (time, revision) = timeout(LIMIT, self.round(&producer, &consumer, at, deleted)).await??;
            times.push(micros(time));
            deleted = revision;
        }
        tell(&json!({
            "rounds": times.len(),
            "p50_us": percentile(&mut times, 50),
            "p99_us": percentile(&mut times, 99),
        }))?;
        wait_for_turn().await
    }

    /// The time of one round, and the revision of its deletion. `deleted` is the previous round's.
    async fn round(
        &self,
        producer: &GrpcClient,
        consumer: &GrpcClient,
        at: usize,
        deleted: i64,
    ) -> Result<(Duration, i64), Failure> {
        let mut waiting = WaitingConsumer::start(consumer, deleted).await?;
        let value = Bytes::from(format!("{at:0>width$}", width = self.value));
        let began = Instant::now();
        // The event may arrive before the answer of the enqueuing Txn.
        let (enqueued, dequeued) =
            futures_util::try_join!(enqueue(producer, value.clone()), waiting.dequeue(consumer))?;
        let time = began.elapsed();
        let (item, revision) = dequeued;
        if item.key != enqueued || item.value != value {
            return Err(format!("round {at}: the consumer received another item").into());
        }
        Ok((time, revision))
    }
}

/// Puts a new key below the prefix; the key.
async fn enqueue(producer: &GrpcClient, value: Bytes) -> Result<Bytes, Failure> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH)?.as_nanos();
    let key = Bytes::from(format!("{PREFIX}/{now}"));
    let put = PutRequest { key: key.clone(), value, ..PutRequest::default() };
    let is_new = compare(&key, CompareTarget::Version, TargetUnion::Version(0));
    txn(producer, is_new, Request::RequestPut(put)).await?;
    Ok(key)
}

fn compare(key: &Bytes, target: CompareTarget, union: TargetUnion) -> Compare {
    Compare {
        result: CompareResult::Equal.into(),
        target: target.into(),
        key: key.clone(),
        target_union: Some(union),
        ..Compare::default()
    }
}

/// Makes a Txn that must succeed; its revision.
async fn txn(client: &GrpcClient, compare: Compare, request: Request) -> Result<i64, Failure> {
    let success = vec![RequestOp { request: Some(request) }];
    let asked = TxnRequest { compare: vec![compare], success, failure: Vec::new() };
    let answer: TxnResponse = client.call("/etcdserverpb.KV/Txn", &asked).await?;
    match answer {
        TxnResponse { succeeded: true, header: Some(header), .. } => Ok(header.revision),
        _ => Err(format!("a Txn did not succeed: {answer:?}").into()),
    }
}

impl WaitingConsumer {
    /// Finds the queue empty and opens a watch, from the revision of the Range, as the recipe does.
    ///
    /// etcd delivers to such a watch only after up to 100 ms, because the watch may need past events. The item
    /// comes later, as in a queue that was empty for a while: `start` returns after the event of the deletion
    /// at revision `deleted`, unless other writes followed the deletion.
    async fn start(client: &GrpcClient, deleted: i64) -> Result<Self, Failure> {
        let asked = RangeRequest {
            key: PREFIX.into(),
            range_end: PREFIX_END.into(),
            limit: 1,
            sort_order: SortOrder::Ascend.into(),
            sort_target: SortTarget::Mod.into(),
            ..RangeRequest::default()
        };
        let found: RangeResponse = client.call("/etcdserverpb.KV/Range", &asked).await?;
        if !found.kvs.is_empty() {
            return Err("the queue is not empty".into());
        }
        let revision = found.header.ok_or("a Range was answered without a header")?.revision;
        let create = WatchCreateRequest {
            key: PREFIX.into(),
            range_end: PREFIX_END.into(),
            start_revision: revision,
            ..WatchCreateRequest::default()
        };
        let create = WatchRequest { request_union: Some(RequestUnion::CreateRequest(create)) };
        let mut waiting =
            Self { watch: client.open("/etcdserverpb.Watch/Watch", framed_all([create])).await? };
        let created = waiting.next_response().await?;
        if !created.created || created.canceled || !created.events.is_empty() {
            return Err(format!("not a Created: {created:?}").into());
        }
        if deleted == revision {
            waiting.next_event(EventType::Delete).await?;
        }
        Ok(waiting)
    }

    async fn next_response(&mut self) -> Result<WatchResponse, Failure> {
        let message = self.watch.responses.next().await?.ok_or("a watch stream ended")?;
        Ok(WatchResponse::decode(message)?)
    }

    /// The next event of the wanted type; events of the other type are passed over, as in the recipe.
    async fn next_event(&mut self, wanted: EventType) -> Result<KeyValue, Failure> {
        loop {
            let response = self.next_response().await?;
            if response.canceled {
                return Err(format!("a watch was canceled: {response:?}").into());
            }
            let is_wanted = |event: &Event| event.r#type == i32::from(wanted);
            if let Some(event) = response.events.into_iter().find(is_wanted) {
                return Ok(event.kv.ok_or("an event without a key")?);
            }
        }
    }

    /// Waits for the next item, deletes it, and ends the watch; the item, and the revision of the deletion.
    async fn dequeue(&mut self, client: &GrpcClient) -> Result<(KeyValue, i64), Failure> {
        let item = self.next_event(EventType::Put).await?;
        let delete = DeleteRangeRequest { key: item.key.clone(), ..DeleteRangeRequest::default() };
        let unchanged = compare(&item.key, CompareTarget::Mod, TargetUnion::ModRevision(item.mod_revision));
        let revision = txn(client, unchanged, Request::RequestDeleteRange(delete)).await?;
        Ok((item, revision))
    }
}
