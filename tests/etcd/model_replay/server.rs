//! One real server with auth on, and the model of it.
//!
//! Owns: the server, its users and their tokens; every change is made on both. Must not know watches. Invariant: both are at the same
//! revision, and answer the same revision to a write.

use bytes::Bytes;
use futures_util::{StreamExt as _, stream};
use keyward::pb::{
    authpb::{Permission, permission},
    etcdserverpb::{
        AuthRoleGrantPermissionRequest, AuthRoleRevokePermissionRequest, AuthUserChangePasswordRequest,
        AuthenticateRequest, CompactionRequest, DeleteRangeRequest, LeaseGrantRequest, LeaseRevokeRequest,
        PutRequest, RangeRequest, RequestOp, TxnRequest, auth_client::AuthClient, kv_client::KvClient,
        lease_client::LeaseClient, request_op,
    },
};
use tonic::{
    Request, Status,
    transport::{Channel, Endpoint},
};

use crate::{
    harness::{Auth, Cluster, Options, binary::Version, password},
    model::{
        flavor::Flavor,
        interval::{Interval, Rights},
        member::Member,
        store::{Op, Store},
        stream::{Limits, Refusal},
    },
};

/// `--max-request-bytes`: small, so that an answer is soon cut into fragments.
const MAX_REQUEST: usize = 64 * 1024;
/// What etcd adds to it for the size of an answer.
const OVERHEAD: usize = 512 * 1024;
/// Above all that a test reads from one stream before the next.
const WINDOW: u32 = 64 * 1024 * 1024;

/// HTTP/2's own default.
const NARROW: u32 = 65_535;

/// As whom a stream is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Who {
    Root,
    /// May read `/a/`, and now and then `/c/`.
    Alice,
    /// May read nothing.
    Bob,
    /// A token that was good once.
    Stale,
    /// Not a token.
    Garbage,
    NoToken,
}

pub(super) struct Server {
    pub(super) flavor: Flavor,
    pub(super) store: Store,
    pub(super) member: Member,
    channel: Channel,
    tokens: [(Who, &'static str, String); 3],
    stale: String,
    alice_reads_c: bool,
    /// Last, so that it outlives its connections.
    cluster: Cluster,
}

impl Server {
    /// A new one, with further flags of etcd.
    pub(super) async fn start(version: &Version, flavor: Flavor, flags: &[String]) -> Server {
        let cluster = Cluster::start(
            version,
            Options {
                auth: Auth::On { extra_users: 0 },
                token_ttl: Some(3600),
                flags: [&[format!("--max-request-bytes={MAX_REQUEST}")], flags].concat(),
                ..Options::default()
            },
        )
        .await;
        let endpoint = Endpoint::from_shared(cluster.url(0)).expect("a URL");
        let endpoint = endpoint
            .initial_connection_window_size(WINDOW)
            .initial_stream_window_size(WINDOW)
            .tcp_nodelay(true);
        let channel = endpoint.connect().await.expect("the server listens");
        let root = log_in(&channel, "root").await;
        let stale = log_in(&channel, "bob").await;
        let change = AuthUserChangePasswordRequest {
            name: "bob".into(),
            password: password("bob"),
            ..AuthUserChangePasswordRequest::default()
        };
        AuthClient::new(channel.clone())
            .user_change_password(signed(&root, change))
            .await
            .expect("root changes a password, even to the same");
        let (alice, bob) = (log_in(&channel, "alice").await, log_in(&channel, "bob").await);
        let all = RangeRequest { key: "\0".into(), range_end: "\0".into(), ..RangeRequest::default() };
        let read = KvClient::new(channel.clone()).range(signed(&root, all)).await.expect("root reads");
        let header = read.into_inner().header.expect("an answer has a header");
        assert_eq!(header.revision, 1, "a new server");
        let mut server = Server {
            flavor,
            store: Store::new(header.cluster_id),
            member: Member::new(header.member_id, header.raft_term),
            channel,
            tokens: [(Who::Root, "root", root), (Who::Alice, "alice", alice), (Who::Bob, "bob", bob)],
            stale,
            alice_reads_c: false,
            cluster,
        };
        // Before V8 a negative start on a store that was never compacted spoils the pass for every watch of the server.
        let first = [Op::Put { key: "/a/first".into(), value: "1".into(), lease: 0 }];
        server.write(&first).await.expect("a new server takes a write");
        assert!(server.compact(2).await.expect("and a compaction"));
        while server.member.apply(&server.store, []).is_some() {}
        server
    }

    pub(super) fn channel(&self) -> Channel {
        self.channel.clone()
    }

    /// A connection that takes little before it is read.
    pub(super) async fn narrow_channel(&self) -> Channel {
        connect(&self.cluster, NARROW).await
    }

    /// How many watches the server has.
    pub(super) async fn watches(&self) -> f64 {
        self.cluster.counter(0, "etcd_debugging_mvcc_watcher_total", &[]).await
    }

    pub(super) fn limits() -> Limits {
        Limits { fragment: MAX_REQUEST + OVERHEAD, ..Limits::default() }
    }

    pub(super) fn token(&self, who: Who) -> Option<String> {
        match who {
            Who::NoToken => None,
            Who::Garbage => Some("garbage".into()),
            Who::Stale => Some(self.stale.clone()),
            _ => self.tokens.iter().find(|(user, _, _)| *user == who).map(|(_, _, token)| token.clone()),
        }
    }

    /// Whether etcd lets this user watch a range now.
    pub(super) fn permit(&self, who: Who, asked: &Interval) -> Result<(), Refusal> {
        let own = |name: &'static str, end: &'static str| Interval::new(&name.into(), &end.into());
        let rights = match who {
            Who::Root => Rights::all(),
            Who::Alice if self.alice_reads_c => Rights::to([own("/a/", "/a0"), own("/c/", "/c0")]),
            Who::Alice => Rights::to([own("/a/", "/a0")]),
            Who::Bob => Rights::default(),
            Who::Stale | Who::Garbage => return Err(Refusal::InvalidToken),
            Who::NoToken => return Err(Refusal::NoUser),
        };
        if rights.permit(self.flavor, asked) { Ok(()) } else { Err(Refusal::Denied) }
    }

    fn root<T>(&self, message: T) -> Request<T> {
        signed(&self.tokens[0].2, message)
    }

    fn kv(&self) -> KvClient<Channel> {
        KvClient::new(self.channel.clone())
    }

    /// One write. The model's member has yet to apply it.
    pub(super) async fn write(&mut self, ops: &[Op]) -> Result<(), String> {
        let header = match ops {
            [Op::Put { key, value, lease }] => {
                let put = put_request(key, value, *lease);
                self.kv().put(self.root(put)).await.map(|answer| answer.into_inner().header)
            }
            [Op::Delete { key, range_end }] => {
                let delete = delete_request(key, range_end);
                self.kv().delete_range(self.root(delete)).await.map(|answer| answer.into_inner().header)
            }
            _ => {
                let txn =
                    TxnRequest { success: ops.iter().map(request_op).collect(), ..TxnRequest::default() };
                self.kv().txn(self.root(txn)).await.map(|answer| answer.into_inner().header)
            }
        };
        let revision = header.map_err(unexpected)?.map(|header| header.revision);
        let modelled = self.store.txn(ops);
        if revision != Some(modelled) {
            return Err(format!("{ops:?} made revision {revision:?}, the model says {modelled}"));
        }
        Ok(())
    }

    /// Many puts at once, applied by the model in the order that etcd gave them.
    pub(super) async fn write_many(&mut self, puts: Vec<(Bytes, Bytes)>) -> Result<(), String> {
        let puts = puts.into_iter().map(|(key, value)| {
            let request = self.root(put_request(&key, &value, 0));
            let mut kv = self.kv();
            async move {
                let answer = kv.put(request).await.map_err(unexpected)?.into_inner();
                Ok::<_, String>((answer.header.map_or(0, |header| header.revision), key, value))
            }
        });
        let done: Vec<Result<_, String>> = stream::iter(puts).buffer_unordered(64).collect().await;
        let mut done = done.into_iter().collect::<Result<Vec<_>, _>>()?;
        done.sort();
        for (revision, key, value) in done {
            let modelled = self.store.txn(&[Op::Put { key, value, lease: 0 }]);
            if revision != modelled {
                return Err(format!("a put made revision {revision}, the model says {modelled}"));
            }
        }
        Ok(())
    }

    /// A compaction, and whether it was possible. It is physical: what is gone is gone when this returns.
    pub(super) async fn compact(&mut self, revision: i64) -> Result<bool, String> {
        let request = CompactionRequest { revision, physical: true };
        let answer = self.kv().compact(self.root(request)).await;
        let possible = self.store.compact(revision);
        match answer {
            Ok(_) if possible => Ok(true),
            Err(refused) if !possible && refused.code() == tonic::Code::OutOfRange => Ok(false),
            other => Err(format!("compaction at {revision}: possible {possible}, but {other:?}")),
        }
    }

    /// A lease, which is no more than an id here.
    pub(super) async fn grant(&self, lease: i64) -> Result<(), String> {
        let request = LeaseGrantRequest { id: lease, ttl: 3600 };
        LeaseClient::new(self.channel()).lease_grant(self.root(request)).await.map_err(unexpected)?;
        Ok(())
    }

    /// Its end: one revision that deletes its keys, in order.
    pub(super) async fn revoke(&mut self, lease: i64) -> Result<(), String> {
        let request = LeaseRevokeRequest { id: lease };
        LeaseClient::new(self.channel()).lease_revoke(self.root(request)).await.map_err(unexpected)?;
        let held = self.store.keys().filter(|kv| kv.lease == lease);
        let deletes: Vec<Op> =
            held.map(|kv| Op::Delete { key: kv.key.clone(), range_end: Bytes::new() }).collect();
        self.store.txn(&deletes);
        Ok(())
    }

    /// Whether alice may read `/c/` from now on.
    pub(super) async fn let_alice_read_c(&mut self, may: bool) -> Result<(), String> {
        if may == self.alice_reads_c {
            return Ok(());
        }
        self.alice_reads_c = may;
        let mut auth = AuthClient::new(self.channel());
        if may {
            let perm = Permission {
                perm_type: permission::Type::Read.into(),
                key: "/c/".into(),
                range_end: "/c0".into(),
            };
            let grant = AuthRoleGrantPermissionRequest { name: "ra".into(), perm: Some(perm) };
            auth.role_grant_permission(self.root(grant)).await.map_err(unexpected)?;
        } else {
            let revoke = AuthRoleRevokePermissionRequest {
                role: "ra".into(),
                key: "/c/".into(),
                range_end: "/c0".into(),
            };
            auth.role_revoke_permission(self.root(revoke)).await.map_err(unexpected)?;
        }
        Ok(())
    }
}

async fn connect(cluster: &Cluster, window: u32) -> Channel {
    let endpoint = Endpoint::from_shared(cluster.url(0)).expect("a URL").tcp_nodelay(true);
    let endpoint = endpoint.initial_connection_window_size(window).initial_stream_window_size(window);
    endpoint.connect().await.expect("the server listens")
}

async fn log_in(channel: &Channel, name: &str) -> String {
    let request = AuthenticateRequest { name: name.into(), password: password(name) };
    let answer = AuthClient::new(channel.clone()).authenticate(request).await.expect("the user logs in");
    answer.into_inner().token
}

/// A request with a token.
pub(super) fn signed<T>(token: &str, message: T) -> Request<T> {
    let mut request = Request::new(message);
    request.metadata_mut().insert("token", token.parse().expect("a token is a header's value"));
    request
}

fn unexpected(status: Status) -> String {
    format!("etcd refused what must work: {status:?}")
}

fn put_request(key: &Bytes, value: &Bytes, lease: i64) -> PutRequest {
    PutRequest { key: key.clone(), value: value.clone(), lease, ..PutRequest::default() }
}

fn delete_request(key: &Bytes, range_end: &Bytes) -> DeleteRangeRequest {
    DeleteRangeRequest { key: key.clone(), range_end: range_end.clone(), prev_kv: false }
}

fn request_op(op: &Op) -> RequestOp {
    let request = match op {
        Op::Put { key, value, lease } => request_op::Request::RequestPut(put_request(key, value, *lease)),
        Op::Delete { key, range_end } => {
            request_op::Request::RequestDeleteRange(delete_request(key, range_end))
        }
    };
    RequestOp { request: Some(request) }
}
