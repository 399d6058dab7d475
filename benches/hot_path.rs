//! The time of each decision on the way of a call, alone: `cargo bench --bench hot_path`.
//!
//! The sum is a small part of a call: HTTP/2, headers and copies cost more, and are counted by `benches/budget/run`.
//! Aims: a session token opened in 2 µs if the shard has opened the token before, in 10 µs otherwise; a policy's
//! decision in 0.5 µs with 10 rules, in 1 µs with 10,000 rules; the record of an audited call in 2 µs.

use std::fmt::Write as _;
use std::hint::black_box;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::{Bytes, BytesMut};
use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use keyward::audit::log::{AuditCloseGuard, AuditLog, Reservation};
use keyward::audit::queue::RoomShare;
use keyward::audit::record::{AuditedEnd, AuditedRange, AuditedRanges, CallAuditRecord, Timestamp};
use keyward::config::audit_settings::{AuditEvent, AuditFileSettings, AuditSettings, OnFull};
use keyward::config::{self, Endpoint, Scheme};
use keyward::credentials::{CredentialSettings, Credentials};
use keyward::dial::names::NameResolver;
use keyward::downstream::session::{
    OpenedSessions, SealRealm, Sealer, Session, SessionKeys, SessionPeer, SessionProof,
};
use keyward::identity::peer::Peer;
use keyward::identity::{ClusterId, MemberId};
use keyward::members::choose::{MemberChooser, MemberComparison, MemberTarget};
use keyward::members::membership::{ControlChannels, Member, Membership, Readiness, Role};
use keyward::members::version::Version;
use keyward::pb::etcdserverpb::watch_request::RequestUnion;
use keyward::pb::etcdserverpb::{
    PutRequest, RangeRequest, RangeResponse, RequestOp, ResponseHeader, TxnRequest, WatchCreateRequest,
    WatchRequest, WatchResponse, request_op::Request,
};
use keyward::pb::mvccpb::{Event, KeyValue};
use keyward::policy::compiled::{Policy, PolicySubject};
use keyward::policy::permit_set::{Decision, PermitSet};
use keyward::policy::rules_in_force::RulesInForce;
use keyward::rest::json_reply::append_json_of_message;
use keyward::rest::json_request::message_of_json;
use keyward::rest::json_style::{JsonPlace, JsonStyle};
use keyward::rest::message_fields;
use keyward::rpc::frame::{FrameReader, encode, unary};
use keyward::rpc::method::{Method, lookup, path_kind};
use keyward::rpc::scan::WireFields;
use keyward::rpc::schema::MessageId;
use keyward::rpc::touch::{self, TouchTarget};
use keyward::rpc::{body_shape, canonical, header};
use keyward::secret::Secret;
use keyward::telemetry::metrics::Metrics;
use keyward::watch::hub::{Hub, HubInput, HubOutput, HubTiming, UpstreamStreamId, WatchTraits};
use prost::Message as _;
use tokio::time::Instant;

/// The allocator of the program.
#[cfg(target_os = "linux")]
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

/// Sessions in the shard's memory beside the session of the call.
const OTHERS: usize = 2000;
const KEY: &str = "/registry/services/endpoints/default/kubernetes";
const CLUSTER: u64 = 0xc1;

fn put() -> PutRequest {
    PutRequest { key: KEY.into(), value: vec![b'v'; 256].into(), ..PutRequest::default() }
}

fn range() -> RangeRequest {
    RangeRequest { key: KEY.into(), ..RangeRequest::default() }
}

/// A compare-and-swap with a read in its failure branch, as made by Kubernetes.
fn txn() -> TxnRequest {
    let success = vec![RequestOp { request: Some(Request::RequestPut(put())) }];
    let failure = vec![RequestOp { request: Some(Request::RequestRange(range())) }];
    TxnRequest { success, failure, ..TxnRequest::default() }
}

fn header_at(revision: i64) -> Option<ResponseHeader> {
    Some(ResponseHeader { cluster_id: CLUSTER, member_id: 1, revision, raft_term: 2 })
}

fn frames(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("frame");
    let body = encode(&put().encode_to_vec());
    group.bench_function("a unary body of 256 bytes", |bencher| {
        bencher.iter(|| unary(black_box(&body)).expect("one frame"));
    });
    let eight = Bytes::from([&body[..]; 8].concat());
    group.bench_function("eight messages in one chunk", |bencher| {
        bencher.iter(|| {
            let mut reader = FrameReader::new(1 << 20);
            reader.push(black_box(&eight).clone());
            let read = reader.by_ref().filter(Result::is_ok).count();
            assert_eq!(read, 8);
        });
    });
    group.finish();
}

fn messages(criterion: &mut Criterion) {
    let (put, range, txn) = (put().encode_to_vec(), range().encode_to_vec(), txn().encode_to_vec());
    let mut group = criterion.benchmark_group("message");
    group.bench_function("field scan, Put", |bencher| {
        bencher.iter(|| WireFields::new(black_box(&put)).filter(Result::is_ok).count());
    });
    let bodies = [
        ("Put", MessageId::PutRequest, &put),
        ("Range", MessageId::RangeRequest, &range),
        ("Txn", MessageId::TxnRequest, &txn),
    ];
    for (name, schema, body) in bodies {
        group.bench_function(format!("canonical check, {name}"), |bencher| {
            bencher.iter(|| canonical::check(schema, black_box(body)).expect("canonical"));
        });
    }
    group.bench_function("shape of a Range", |bencher| bencher.iter(|| body_shape::range(black_box(&range))));
    let answer = WatchResponse { header: header_at(3_000_000), ..WatchResponse::default() }.encode_to_vec();
    group.bench_function("revision of an answer", |bencher| {
        bencher.iter(|| header::progress(black_box(&answer)).expect("a header"));
    });
    group.finish();
}

fn methods(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("method");
    let paths = [
        "/etcdserverpb.KV/Range",
        "/etcdserverpb.KV/Put",
        "/etcdserverpb.Watch/Watch",
        "/etcdserverpb.Maintenance/Status",
        "/grpc.health.v1.Health/Check",
    ];
    for path in paths {
        group.bench_function(path, |bencher| bencher.iter(|| path_kind(black_box(path))));
    }
    group.finish();
}

fn member(id: u64) -> Member {
    Member {
        id: MemberId(id),
        name: format!("m{id}").into(),
        endpoint: Endpoint { scheme: Scheme::Http, host: format!("m{id}.test"), port: 2379 },
        resolved_ip: None,
        role: Role::Voter,
        version: Version::parse("3.6.16").ok(),
        readiness: Readiness::Ready,
        term: 2,
        store_status: None,
        client_urls: Arc::default(),
        suspicion: Arc::default(),
        maintenance: Arc::default(),
        load: Arc::default(),
    }
}

fn choices(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("member choice");
    for count in [1, 3, 7] {
        let members = (1..=count).map(|id| Arc::new(member(id))).collect();
        let begun = Membership::unknown(Instant::now());
        let leader = Some(MemberId(1));
        let members = Membership { cluster: Some(ClusterId(CLUSTER)), leader, members, term: 2, ..begun };
        let (chooser, now) = (MemberChooser::seeded(1), Instant::now());
        for (target, wanted) in [("any", MemberTarget::Any), ("leader", MemberTarget::Leader)] {
            group.bench_function(format!("{target} of {count}"), |bencher| {
                let latency = MemberComparison::Latency;
                bencher.iter(|| chooser.choose(black_box(&members), wanted, &[], latency, now));
            });
        }
    }
    group.finish();
}

/// A hub with a registered watch, and the upstream stream and id of the watch.
fn hub_with_watch(now: Instant) -> (Hub, UpstreamStreamId, i64) {
    let idle_progress = Some(Duration::from_secs(40));
    let mut hub = Hub::new(now, HubTiming { idle_progress, progress_grace: Duration::from_secs(1) });
    let mut outputs = Vec::new();
    let create = WatchCreateRequest { key: KEY.into(), ..WatchCreateRequest::default() };
    let create = WatchRequest { request_union: Some(RequestUnion::CreateRequest(create)) };
    hub.handle(now, HubInput::Client(create.encode_to_vec().into()), &mut outputs);
    let Some(HubOutput::Open { stream, .. }) = outputs.pop() else { unreachable!("a watch needs a stream") };
    hub.handle(now, HubInput::Opened { stream, traits: WatchTraits::UNKNOWN }, &mut outputs);
    let Some(HubOutput::Send { message, .. }) = outputs.pop() else { unreachable!("the create goes up") };
    let sent = WatchRequest::decode(message).expect("a WatchRequest").request_union;
    let Some(RequestUnion::CreateRequest(WatchCreateRequest { watch_id, .. })) = sent else {
        unreachable!("a create")
    };
    let created =
        WatchResponse { header: header_at(3_000_000), watch_id, created: true, ..WatchResponse::default() };
    hub.handle(now, HubInput::Upstream { stream, message: created.encode_to_vec().into() }, &mut outputs);
    (hub, stream, watch_id)
}

fn hub_steps(criterion: &mut Criterion) {
    let now = Instant::now();
    let (mut hub, stream, watch_id) = hub_with_watch(now);
    let (mut revision, mut outputs) = (3_000_000, Vec::new());
    let mut next_event = || {
        revision += 1;
        let kv = KeyValue {
            key: KEY.into(),
            value: vec![b'v'; 256].into(),
            mod_revision: revision,
            ..KeyValue::default()
        };
        let events = vec![Event { kv: Some(kv), ..Event::default() }];
        let header = header_at(revision);
        let response = WatchResponse { header, watch_id, events, ..WatchResponse::default() };
        HubInput::Upstream { stream, message: response.encode_to_vec().into() }
    };
    criterion.benchmark_group("hub").bench_function("an event of 256 bytes", |bencher| {
        let step = |input| {
            hub.handle(now, input, &mut outputs);
            assert!(matches!(outputs.pop(), Some(HubOutput::Emit(_))) && outputs.is_empty());
        };
        // One at a time, in the order of the revisions.
        bencher.iter_batched(&mut next_event, step, BatchSize::PerIteration);
    });
}

fn sealer() -> Arc<Sealer> {
    let keys = [1, 2].map(|seed| Secret::new([seed; 32]));
    let sealer = Sealer::new(SessionKeys::new(&keys).expect("two keys"));
    sealer.pin(&SealRealm::new(None, ClusterId(CLUSTER)));
    Arc::new(sealer)
}

fn token(sealer: &Sealer, user: &str) -> Vec<u8> {
    let password = Secret::new("correct horse battery staple".to_owned());
    let peer = SessionPeer::Password { user: user.into(), password };
    let session = Session::begin(peer, SessionProof::Etcd { auth_revision: 7 }, 3, SystemTime::now());
    sealer.seal(&session.expect("random bytes")).expect("it fits").expose().clone().into_bytes()
}

fn find(credentials: &Credentials, session: &Session) {
    let SessionPeer::Password { user, password } = &session.peer else { return };
    black_box(credentials.identity(user, password));
}

fn sessions(criterion: &mut Criterion) {
    let sealer = sealer();
    let opened = OpenedSessions::new(Arc::clone(&sealer), 2 * (OTHERS + 1));
    for other in 0..OTHERS {
        opened.open(&token(&sealer, &format!("user-{other}"))).expect("its own token");
    }
    let (credentials, _control) =
        Credentials::new(CredentialSettings::default(), ControlChannels::default()).expect("random bytes");
    let alice = token(&sealer, "alice");

    let mut group = criterion.benchmark_group("session");
    group.bench_function("open, cached, same caller as last", |bencher| {
        bencher.iter(|| black_box(opened.open(black_box(&alice)).expect("its own token")));
    });
    group.bench_function("open and identity, cached", |bencher| {
        bencher.iter(|| find(&credentials, &opened.open(black_box(&alice)).expect("its own token")));
    });
    group.bench_function("open and identity, not cached", |bencher| {
        bencher.iter(|| find(&credentials, &sealer.open(black_box(&alice)).expect("its own token")));
    });
    group.bench_function("login: seal", |bencher| bencher.iter(|| black_box(token(&sealer, "alice"))));
    group.finish();
}

/// The permissions of a caller whose role has `rules` grants on prefixes, every tenth of them a denial.
fn permits(rules: usize) -> PermitSet {
    let mut text = "[[role]]\nname = 'r'\n".to_owned();
    for rule in 0..rules {
        // Denials lie beside the keys of the call, so that each decision searches them as well.
        let (kind, folder) = if rule % 10 == 9 { ("deny", "minions") } else { ("allow", "services") };
        writeln!(text, "[[role.{kind}]]\nactions = ['read', 'write']\nprefix = '/registry/{folder}/{rule}/'")
            .expect("a String takes all");
    }
    text += "[[role.allow]]\nactions = ['read', 'write']\nprefix = '/registry/services/endpoints/'\n\
             [[binding]]\neveryone = true\nroles = ['r']\n";
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::write(folder.path().join("policy.toml"), text).expect("written");
    let path = folder.path().join("config.toml");
    let config = "[[listener]]\nname = 'clients'\naddress = '127.0.0.1:2379'\n\
                  [cluster]\nendpoints = ['http://127.0.0.1:1']\n\
                  [policy]\nmode = 'enforce'\nfile = 'policy.toml'\n";
    std::fs::write(&path, config).expect("written");
    let config = config::load(&path).expect("a valid policy").0;
    let peer = Peer::Password("app".into());
    let subject = PolicySubject::of(&peer, Some("app"), None, "clients");
    Policy::of(&config, &RulesInForce::Configured, SystemTime::now()).permits(subject)
}

fn decisions(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("policy");
    let calls = [
        ("Range", "/etcdserverpb.KV/Range", range().encode_to_vec()),
        ("Put", "/etcdserverpb.KV/Put", put().encode_to_vec()),
        ("Txn", "/etcdserverpb.KV/Txn", txn().encode_to_vec()),
    ];
    for rules in [10, 10_000] {
        let permits = permits(rules);
        for (name, path, body) in &calls {
            let method = lookup(path).expect("a method");
            group.bench_function(format!("a {name} under {rules} rules"), |bencher| {
                bencher.iter(|| {
                    let decision = permits.decide(method, black_box(body));
                    assert!(matches!(decision, Decision::Allowed(_)));
                });
            });
        }
    }
    group.finish();
}

/// An audit log in a file of the folder.
fn audit_log(folder: &Path) -> (Arc<AuditLog>, AuditCloseGuard) {
    let file = AuditFileSettings {
        path: folder.join("audit.log"),
        max_size: 1 << 30,
        max_age: None,
        keep: 1,
        keep_for: None,
    };
    let settings = AuditSettings {
        events: [AuditEvent::Change].into_iter().collect(),
        file: Some(file),
        stdout: false,
        syslog: None,
        otlp: None,
        queue: 256 << 20,
        on_full: OnFull::Block,
        signing_key: None,
        replica: "a".to_owned(),
    };
    AuditLog::start(&settings, &NameResolver::of_machine(None), Metrics::new(Vec::new()).audit)
        .expect("the log starts")
}

/// Puts the record of a Put into the queue, as the end of a call does. False without room.
fn record_put(log: &AuditLog, method: &'static Method, body: &[u8]) -> bool {
    let Reservation::Place(place) = log.reserve(700) else { return false };
    let mut ranges = AuditedRanges::default();
    let visited = touch::visit(method, body, &mut |touch| {
        if let TouchTarget::Keys(range) = touch.target {
            ranges.add(|| AuditedRange::new(touch.action.name(), range.start, AuditedEnd::Key));
        }
        ControlFlow::Continue(())
    });
    let record = CallAuditRecord {
        time: Timestamp::now(),
        event: "change",
        method: method.path,
        code: "OK",
        refused: false,
        peer: Some("password:app"),
        user: Some("app"),
        remote: Some("127.0.0.1:40000"),
        listener: "clients",
        ranges: &[],
        ranges_omitted: 0,
        actions: &[],
        lease: None,
        revision: Some(1_234_567),
        member: Some("8e9e05c52164694d"),
        attempts: 1,
        micros: 700,
        received: body.len() as u64,
        sent: 40,
        policy_generation: Some("0123456789abcdef"),
        verdict: Some("allowed"),
        rule: Some("app.allow[0]"),
        limit: None,
        refused_by: None,
        user_agent: Some("grpc-go/1.71.0"),
    };
    log.record(Some(place), RoomShare::Common, &record.with_ranges(&ranges));
    visited.is_ok()
}

/// The cost of an audited call for the thread that serves it. The writer's thread runs beside.
fn audited(criterion: &mut Criterion) {
    let folder = tempfile::tempdir().expect("a folder");
    let (log, _guard) = audit_log(folder.path());
    let (method, body) = (lookup("/etcdserverpb.KV/Put").expect("a method"), put().encode_to_vec());
    let mut group = criterion.benchmark_group("audit");
    group.bench_function("the record of a Put", |bencher| {
        bencher.iter_custom(|count| {
            let mut taken = Duration::ZERO;
            let mut left = count;
            while left > 0 {
                let turn = left.min(1000);
                let begun = std::time::Instant::now();
                (0..turn).for_each(|_| assert!(record_put(&log, method, black_box(&body))));
                taken += begun.elapsed();
                left -= turn;
                // The writer catches up.
                std::thread::park_timeout(Duration::from_millis(25));
            }
            taken
        });
    });
    group.finish();
}

/// A Put read from JSON, and Range answers of 256 B and of 1 MB written as JSON.
fn json(c: &mut Criterion) {
    let put = message_fields::of_message("etcdserverpb.PutRequest").expect("a message");
    let document =
        r#"{"key":"L3JlZ2lzdHJ5L3NlcnZpY2Vz","value":"dmFsdWV2YWx1ZXZhbHVldmFsdWU=","lease":"7587"}"#;
    c.bench_function("json_request_put", |b| b.iter(|| message_of_json(black_box(document.as_bytes()), put)));
    let fields = message_fields::of_message("etcdserverpb.RangeResponse").expect("a message");
    for (name, keys, value) in [("json_reply_256B", 1, 256), ("json_reply_1MB_of_4000_keys", 4000, 180)] {
        let kv = KeyValue {
            key: KEY.into(),
            mod_revision: 7,
            value: vec![b'v'; value].into(),
            ..KeyValue::default()
        };
        let answer =
            RangeResponse { kvs: vec![kv; keys], count: 1, ..RangeResponse::default() }.encode_to_vec();
        c.bench_function(name, |b| {
            b.iter(|| {
                let mut out = BytesMut::new();
                append_json_of_message(
                    JsonStyle::GatewayV2,
                    JsonPlace::Body,
                    fields,
                    black_box(&answer),
                    &mut out,
                )
                .expect("a message");
                out
            });
        });
    }
}

criterion_group!(benches, frames, messages, methods, choices, hub_steps, sessions, decisions, audited, json);
criterion_main!(benches);
