//! One client's session of the soak: a login, unary calls, watches, a lease, a lock, the end of the connection.
//!
//! Owns: the calls and their verification. Must not know: other sessions. Invariants: a session leaves no key
//! and no lease at etcd; every answer and event is verified; some streams end in order, some by a reset.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::net::SocketAddr;

use bytes::Bytes;
use keyward::pb::etcdserverpb::watch_request::RequestUnion;
use keyward::pb::etcdserverpb::{
    DeleteRangeRequest, DeleteRangeResponse, LeaseGrantRequest, LeaseGrantResponse, LeaseKeepAliveRequest,
    LeaseKeepAliveResponse, LeaseRevokeRequest, LeaseRevokeResponse, PutRequest, PutResponse, RangeRequest,
    RangeResponse, WatchCancelRequest, WatchRequest, WatchResponse,
};
use keyward::pb::v3lockpb::{LockRequest, LockResponse, UnlockRequest, UnlockResponse};
use keyward::rpc::frame;
use keyward::tasks::Tasks;
use prost::Message as _;
use serde::Serialize;

use crate::Failure;
use crate::canned::PASSWORD;
use crate::client_pool::log_in;
use crate::fan_out::open_watches;
use crate::grpc_client::{BidiStream, GrpcClient, framed_all};

/// Puts, each read back by a Range, of one session.
const PUTS: usize = 20;
/// Length of a value.
const VALUE: usize = 256;
/// Watches of one stream.
const WATCHES: usize = 4;
/// Keepalives of one lease.
const KEEPALIVES: usize = 2;
/// Lifetime of a lease in seconds: longer than a session.
const TTL: i64 = 120;

/// The verified work of one cycle.
#[derive(Default, Serialize)]
pub(crate) struct Counts {
    sessions: Cell<usize>,
    puts_and_ranges: Cell<usize>,
    watches: Cell<usize>,
    events: Cell<usize>,
    leases: Cell<usize>,
    locks: Cell<usize>,
}

/// One client.
pub(crate) struct Session<'a> {
    /// The prefix of the session's keys.
    pub(crate) name: String,
    pub(crate) user: &'a str,
    pub(crate) address: SocketAddr,
    pub(crate) tasks: &'a Tasks,
    pub(crate) counts: &'a Counts,
}

fn add(count: &Cell<usize>, more: usize) {
    count.set(count.get() + more);
}

fn put_request(key: &str, value: Bytes, lease: i64) -> PutRequest {
    PutRequest { key: key.to_owned().into(), value, lease, ..PutRequest::default() }
}

async fn put(client: &GrpcClient, asked: &PutRequest) -> Result<i64, Failure> {
    let answer: PutResponse = client.call("/etcdserverpb.KV/Put", asked).await?;
    Ok(answer.header.ok_or("a Put without a header")?.revision)
}

async fn range(client: &GrpcClient, key: &str) -> Result<RangeResponse, Failure> {
    let asked = RangeRequest { key: key.to_owned().into(), ..RangeRequest::default() };
    client.call("/etcdserverpb.KV/Range", &asked).await
}

impl Session<'_> {
    /// Runs the whole session; the connection closes at the end.
    pub(crate) async fn run(self) -> Result<(), Failure> {
        let token = log_in(self.address, self.user, PASSWORD, self.tasks).await?;
        let client = GrpcClient::connect(self.address, Some(&token), self.tasks).await?;
        self.put_and_range(&client).await?;
        self.watch(&client).await?;
        self.hold_lease(&client).await?;
        self.lock(&client).await?;
        let asked = DeleteRangeRequest { key: self.name.clone().into(), ..DeleteRangeRequest::default() };
        let deleted: DeleteRangeResponse = client.call("/etcdserverpb.KV/DeleteRange", &asked).await?;
        if deleted.deleted != 1 {
            return Err(format!("{}: {} keys deleted instead of 1", self.name, deleted.deleted).into());
        }
        add(&self.counts.sessions, 1);
        Ok(())
    }

    async fn put_and_range(&self, client: &GrpcClient) -> Result<(), Failure> {
        for number in 0..PUTS {
            let value = Bytes::from(format!("{number:>VALUE$}"));
            let revision = put(client, &put_request(&self.name, value.clone(), 0)).await?;
            let answer = range(client, &self.name).await?;
            let is_newest = match &answer.kvs[..] {
                [kv] => kv.key == self.name.as_bytes() && kv.value == value && kv.mod_revision == revision,
                _ => false,
            };
            if !is_newest {
                return Err(format!("{}: a Range without the Put of revision {revision}", self.name).into());
            }
        }
        add(&self.counts.puts_and_ranges, 2 * PUTS);
        Ok(())
    }

    /// Watches, receives events, cancels one watch, and half-closes. A second stream ends by a reset.
    async fn watch(&self, client: &GrpcClient) -> Result<(), Failure> {
        let mut stream = open_watches(client, &self.name, WATCHES).await?;
        let reset = open_watches(client, &self.name, WATCHES).await?;
        self.deliver(client, &mut stream, (0..WATCHES).collect()).await?;
        let cancel = RequestUnion::CancelRequest(WatchCancelRequest { watch_id: 0 });
        let cancel = framed_all([WatchRequest { request_union: Some(cancel) }]);
        stream.requests.send_data(cancel, false)?;
        let message = stream.responses.next().await?.ok_or("a watch stream ended before its Canceled")?;
        let canceled = WatchResponse::decode(message)?;
        if !canceled.canceled || canceled.watch_id != 0 {
            return Err(format!("{}: not the Canceled of watch 0: {canceled:?}", self.name).into());
        }
        self.deliver(client, &mut stream, (1..WATCHES).collect()).await?;
        stream.requests.send_data(Bytes::new(), true)?;
        drop(reset);
        add(&self.counts.watches, 2 * WATCHES);
        Ok(())
    }

    /// Puts the watched key; exactly the watches of `ids` must receive the event.
    async fn deliver(
        &self,
        client: &GrpcClient,
        stream: &mut BidiStream,
        mut ids: BTreeSet<usize>,
    ) -> Result<(), Failure> {
        let revision = put(client, &put_request(&self.name, vec![b'w'; VALUE].into(), 0)).await?;
        add(&self.counts.events, ids.len());
        while !ids.is_empty() {
            let message = stream.responses.next().await?.ok_or("a watch stream ended before its event")?;
            let response = WatchResponse::decode(message)?;
            let is_expected = match &response.events[..] {
                [event] => event.kv.as_ref().is_some_and(|kv| {
                    kv.key == self.name.as_bytes() && kv.value.len() == VALUE && kv.mod_revision == revision
                }),
                _ => false,
            };
            let id = usize::try_from(response.watch_id)?;
            if !is_expected || !ids.remove(&id) {
                return Err(format!("{}: not an event of revision {revision}", self.name).into());
            }
        }
        Ok(())
    }

    async fn grant(&self, client: &GrpcClient) -> Result<i64, Failure> {
        let asked = LeaseGrantRequest { ttl: TTL, id: 0 };
        let granted: LeaseGrantResponse = client.call("/etcdserverpb.Lease/LeaseGrant", &asked).await?;
        if granted.id == 0 || granted.ttl != TTL {
            return Err(format!("{}: lease {} of {} s", self.name, granted.id, granted.ttl).into());
        }
        Ok(granted.id)
    }

    async fn revoke(&self, client: &GrpcClient, id: i64) -> Result<(), Failure> {
        let asked = LeaseRevokeRequest { id };
        let _: LeaseRevokeResponse = client.call("/etcdserverpb.Lease/LeaseRevoke", &asked).await?;
        add(&self.counts.leases, 1);
        Ok(())
    }

    /// A lease is kept alive and revoked; the key of the lease must be gone after the revoke.
    async fn hold_lease(&self, client: &GrpcClient) -> Result<(), Failure> {
        let (lease, key) = (self.grant(client).await?, format!("{}-lease", self.name));
        put(client, &put_request(&key, Bytes::from_static(b"held"), lease)).await?;
        let keepalive = frame::encode(&LeaseKeepAliveRequest { id: lease }.encode_to_vec());
        let mut stream = client.open("/etcdserverpb.Lease/LeaseKeepAlive", keepalive.clone()).await?;
        for sent in 1..=KEEPALIVES {
            let message = stream.responses.next().await?.ok_or("a keepalive stream ended")?;
            let kept = LeaseKeepAliveResponse::decode(message)?;
            if kept.id != lease || kept.ttl != TTL {
                return Err(format!("{}: lease {} was kept for {} s", self.name, kept.id, kept.ttl).into());
            }
            if sent < KEEPALIVES {
                stream.requests.send_data(keepalive.clone(), false)?;
            }
        }
        stream.requests.send_data(Bytes::new(), true)?;
        let before = range(client, &key).await?.count;
        self.revoke(client, lease).await?;
        let after = range(client, &key).await?.count;
        if (before, after) != (1, 0) {
            return Err(format!("{key}: {before} keys before the revoke, {after} after").into());
        }
        Ok(())
    }

    async fn lock(&self, client: &GrpcClient) -> Result<(), Failure> {
        let lease = self.grant(client).await?;
        let asked = LockRequest { name: self.name.clone().into(), lease };
        let held: LockResponse = client.call("/v3lockpb.Lock/Lock", &asked).await?;
        if held.key != format!("{}/{lease:x}", self.name) {
            return Err(format!("the lock of {} has the key {:?}", self.name, held.key).into());
        }
        let key = held.key;
        let _: UnlockResponse = client.call("/v3lockpb.Lock/Unlock", &UnlockRequest { key }).await?;
        add(&self.counts.locks, 1);
        self.revoke(client, lease).await
    }
}
