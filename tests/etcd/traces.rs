//! Traces at a real OpenTelemetry Collector: the spans of a call with its waits, in the trace of its client and above the span of
//! etcd; the same id in the access record, in the log at the collector, and as the exemplar of a bucket in a real Prometheus.

use std::{
    collections::BTreeMap,
    fs,
    time::{Duration, SystemTime},
};

use ::http::uri::PathAndQuery;
use futures_util::{StreamExt as _, future::join_all, stream};
use keyward::pb::etcdserverpb::{
    PutRequest, PutResponse, WatchCreateRequest, WatchRequest, kv_client::KvClient,
    watch_client::WatchClient, watch_request::RequestUnion,
};
use serde_json::Value;
use tempfile::TempDir;
use tonic::{Request, transport::Channel};
use tonic_prost::ProstCodec;

use crate::{
    harness::{
        Auth, Cluster, Options,
        client_program::client_program,
        evidence, http,
        keyward::{Keyward, Site},
        newest, password, ports,
        process::Process,
        prometheus::Prometheus,
        wait,
    },
    lent::connection,
    rewatch::local,
};

const LIMIT: Duration = Duration::from_secs(60);
/// `SpanKind`.
const INTERNAL: u64 = 1;
const SERVER: u64 = 2;
const CLIENT: u64 = 3;
const PUT: &str = "etcdserverpb.KV/Put";
const WATCH: &str = "etcdserverpb.Watch/Watch";
/// Calls under way at a member at most.
const SLOTS: usize = 1;

/// A running Collector, and its files.
struct Collector {
    process: Process,
    http: u16,
    grpc: u16,
    folder: TempDir,
}

/// A span.
#[derive(Clone, Debug)]
struct Span {
    service: String,
    trace: String,
    id: String,
    parent: String,
    name: String,
    kind: u64,
    begin: u128,
    end: u128,
    attributes: BTreeMap<String, String>,
}

impl Collector {
    async fn start() -> Self {
        let folder = tempfile::Builder::new().prefix("collector-").tempdir().expect("a temporary folder");
        let (http, grpc) = (ports::free(), ports::free());
        let args = [grpc.to_string(), http.to_string(), folder.path().display().to_string()];
        let log = folder.path().join("collector.log");
        let process = Process::start("collector", &client_program("collector", &[]), args, &[], &log);
        let ready = |text: &str| text.contains("ready").then_some(());
        process.wrote(LIMIT, "that it is ready", ready).await;
        Self { process, http: http.port(), grpc: grpc.port(), folder }
    }

    fn documents(&self, name: &str) -> Vec<Value> {
        let text = fs::read_to_string(self.folder.path().join(name)).unwrap_or_default();
        let whole = text.split_inclusive('\n').filter(|line| line.ends_with('\n'));
        whole.map(|line| serde_json::from_str(line).expect("JSON")).collect()
    }

    fn spans(&self) -> Vec<Span> {
        assert!(self.process.exit().is_none(), "the collector ended: {}", self.process.tail());
        let mut spans = Vec::new();
        for document in self.documents("traces.json") {
            for resource in each(&document, "resourceSpans") {
                let service = attributes(&resource["resource"])["service.name"].clone();
                for span in each(resource, "scopeSpans").flat_map(|scope| each(scope, "spans")) {
                    let text = |name: &str| span[name].as_str().unwrap_or_default().to_owned();
                    spans.push(Span {
                        service: service.clone(),
                        trace: text("traceId"),
                        id: text("spanId"),
                        parent: text("parentSpanId"),
                        name: text("name"),
                        kind: span["kind"].as_u64().unwrap_or_default(),
                        begin: text("startTimeUnixNano").parse().expect("a time"),
                        end: text("endTimeUnixNano").parse().expect("a time"),
                        attributes: attributes(span),
                    });
                }
            }
        }
        spans
    }

    /// The spans of a trace, once `is_whole`.
    async fn trace(&self, id: &str, is_whole: impl Fn(&[Span]) -> bool) -> Vec<Span> {
        let look = async || {
            let of_trace: Vec<_> = self.spans().into_iter().filter(|span| span.trace == id).collect();
            is_whole(&of_trace).then_some(of_trace)
        };
        wait::until(LIMIT, &format!("the spans of {id}"), look).await
    }

    /// The log records at the collector.
    fn records(&self) -> Vec<Value> {
        let documents = self.documents("logs.json");
        let scopes = documents.iter().flat_map(|document| each(document, "resourceLogs"));
        let scopes = scopes.flat_map(|resource| each(resource, "scopeLogs"));
        scopes.flat_map(|scope| each(scope, "logRecords")).cloned().collect()
    }
}

fn each<'v>(value: &'v Value, name: &str) -> impl Iterator<Item = &'v Value> {
    value[name].as_array().into_iter().flatten()
}

/// The attributes with their values as text.
fn attributes(value: &Value) -> BTreeMap<String, String> {
    let text = |value: &Value| {
        let kinds = value.as_object().into_iter().flatten();
        kinds.map(|(_, value)| value.as_str().map_or_else(|| value.to_string(), str::to_owned)).collect()
    };
    let name = |named: &Value| named["key"].as_str().unwrap_or_default().to_owned();
    each(value, "attributes").map(|named| (name(named), text(&named["value"]))).collect()
}

/// A trace of a client: its id, and the header.
fn traceparent(number: u8, flags: &str) -> (String, String) {
    let id = format!("{:02x}", number).repeat(16);
    let header = format!("00-{id}-00f067aa0ba902b7-{flags}");
    (id, header)
}

fn put_of(key: &str, header: Option<&str>) -> Request<PutRequest> {
    let put = PutRequest { key: key.to_owned().into(), value: "v".into(), ..PutRequest::default() };
    let mut request = Request::new(put);
    if let Some(header) = header {
        request.metadata_mut().insert("traceparent", header.parse().expect("a header"));
    }
    request
}

async fn put(channel: &Channel, key: &str, header: Option<&str>) {
    KvClient::new(channel.clone()).put(put_of(key, header)).await.expect("written");
}

/// A Put whose message is sent when Keyward has taken up the call by its header.
async fn slow_put(keyward: &Keyward, channel: &Channel, key: &str, header: &str) {
    let mut grpc = tonic::client::Grpc::new(channel.clone());
    grpc.ready().await.expect("connected");
    let (metadata, _, message) = put_of(key, Some(header)).into_parts();
    let (is_open, opened) = tokio::sync::oneshot::channel();
    let late = stream::once(async {
        opened.await.expect("the call was seen");
        message
    });
    let open = async {
        let look = async || (keyward.metric("keyward_calls_open", &[]).await == 1.0).then_some(());
        wait::until(LIMIT, "the call is open", look).await;
        is_open.send(()).expect("the call goes on");
    };
    let request = Request::from_parts(metadata, tonic::Extensions::default(), late.boxed());
    let path = PathAndQuery::from_static("/etcdserverpb.KV/Put");
    let codec = ProstCodec::<PutRequest, PutResponse>::default();
    let (written, ()) = tokio::join!(grpc.client_streaming(request, path, codec), open);
    written.expect("written");
}

fn config(site: &Site, cluster: &Cluster, collector: &Collector, fields: &str) -> String {
    let file = site.write("alice-password", &password("alice"));
    let base = if cluster.options().auth == Auth::Off {
        site.in_front_of(cluster)
    } else {
        site.listening(cluster, ", default_user = \"alice\"")
            + &format!("user = [{{ name = \"alice\", password_file = {file:?} }}]\n")
    };
    base + &format!("runtime.shards = 1\ntrace.url = \"http://127.0.0.1:{}\"\n{fields}", collector.http)
}

/// The only span of this name and kind.
fn only<'s>(spans: &'s [Span], name: &str, kind: u64) -> &'s Span {
    let found: Vec<_> = spans.iter().filter(|span| span.name == name && span.kind == kind).collect();
    assert_eq!(found.len(), 1, "{name} {kind}: {spans:#?}");
    found[0]
}

/// A version's flags for sending its spans to the collector; there are none before 3.5.
fn tracing_flags(collector: &Collector, minor: &str) -> Vec<String> {
    let begin = if minor == "3.5" { "--experimental-" } else { "--" };
    let (enable, address) = ("enable-distributed-tracing=true", "distributed-tracing-address");
    vec![format!("{begin}{enable}"), format!("{begin}{address}=127.0.0.1:{}", collector.grpc)]
}

/// Checks the spans of a Put of alice. Returns the spans of etcd.
fn judge(spans: Vec<Span>, cluster: &Cluster) -> Vec<Span> {
    let (spans, of_etcd): (Vec<_>, Vec<_>) = spans.into_iter().partition(|span| span.service == "keyward");
    let call = only(&spans, PUT, SERVER);
    assert_eq!(call.parent, "00f067aa0ba902b7", "the client's span is the parent");
    for (name, value) in [
        ("rpc.system", "grpc"),
        ("rpc.service", "etcdserverpb.KV"),
        ("rpc.method", "Put"),
        ("rpc.grpc.status_code", "0"),
        ("keyward.listener", "main"),
        ("keyward.attempts", "1"),
        ("network.peer.address", "127.0.0.1"),
        ("enduser.id", "alice"),
    ] {
        assert_eq!(call.attributes.get(name).map(String::as_str), Some(value), "{name}: {call:#?}");
    }
    let member = only(&spans, PUT, CLIENT);
    for (name, value) in [
        ("server.address", "127.0.0.1".to_owned()),
        ("server.port", cluster.address(0).port().to_string()),
        ("rpc.grpc.status_code", "0".to_owned()),
    ] {
        assert_eq!(member.attributes.get(name), Some(&value), "{name}: {member:#?}");
    }
    let parts = ["wait for body", "wait for credential", "delivery"].map(|name| only(&spans, name, INTERNAL));
    for part in parts.iter().chain([&member]) {
        assert_eq!(part.parent, call.id, "{part:#?}");
        assert!(call.begin <= part.begin && part.begin <= part.end && part.end <= call.end, "{part:#?}");
    }
    let [body, credential, delivery] = parts;
    assert!(body.end <= credential.begin && credential.end <= member.begin && member.end <= delivery.end);
    assert!(of_etcd.iter().any(|span| span.parent == member.id), "{of_etcd:#?}");
    assert!(of_etcd.iter().all(|span| span.service == "etcd"), "{of_etcd:#?}");
    of_etcd
}

/// The first call of alice waits for a login, and for its own message.
async fn is_a_span_with_its_waits(minor: &str) {
    let collector = Collector::start().await;
    let auth = Auth::On { extra_users: 0 };
    let flags = tracing_flags(&collector, minor);
    let cluster = Cluster::start(&newest(minor), Options { auth, flags, ..Options::default() }).await;
    let site = Site::new();
    let secret = "Bearer 41d8c0a6e2b75f93";
    evidence::secret("the collector's header", secret);
    let headers = site.write("headers", &format!("authorization: {secret}\n"));
    let lines = format!("trace.headers_file = {headers:?}\ntrace.identities = true\nlog.otlp = true\n");
    let text = config(&site, &cluster, &collector, &lines);
    let keyward = Keyward::start(site, &text).await;
    let channel = connection(&keyward.url()).await;
    let (id, header) = traceparent(0xa1, "01");
    slow_put(&keyward, &channel, "/a/k", &header).await;
    let is_whole = |spans: &[Span]| {
        let of = |service| spans.iter().filter(move |span: &&Span| span.service == service).count();
        of("keyward") > 4 && of("etcd") > 0
    };
    let spans = collector.trace(&id, is_whole).await;
    let of_etcd = judge(spans, &cluster);

    // The same id stands in the access record, here and at the collector.
    let is_record = |line: &str| line.contains("/Put") && line.contains(&format!("trace=\"{id}\""));
    keyward.logged("the access record with the trace", is_record).await;
    let record = async || {
        let is_call = |record: &Value| record["traceId"] == *id && record["body"]["stringValue"] == "call";
        collector.records().into_iter().find(is_call)
    };
    let record = wait::until(LIMIT, "the access record at the collector", record).await;
    let fields = attributes(&record);
    assert_eq!((fields["method"].as_str(), fields["user"].as_str()), ("/etcdserverpb.KV/Put", "alice"));
    let is_start = |record: &Value| record["body"]["stringValue"] == "started";
    let started = async || collector.records().iter().any(is_start).then_some(());
    wait::until(LIMIT, "the program's log at the collector", started).await;

    watch_until_created(&collector, &channel).await;
    let (exit, _) = keyward.terminate().await;
    assert!(exit.success());
    println!("etcd {}: {} spans of etcd below the attempt", cluster.version(), of_etcd.len());
}

#[test]
fn a_put_is_a_span_in_its_clients_trace_with_its_waits_and_above_the_span_of_etcd() {
    local(async {
        for minor in ["3.5", "3.6"] {
            is_a_span_with_its_waits(minor).await;
        }
    });
}

/// The span of a stream ends with the first answer.
async fn watch_until_created(collector: &Collector, channel: &Channel) {
    let (id, header) = traceparent(0xa2, "01");
    let create = WatchCreateRequest { key: "/a/k".into(), ..WatchCreateRequest::default() };
    let create = WatchRequest { request_union: Some(RequestUnion::CreateRequest(create)) };
    let mut request = Request::new(stream::once(async { create }).chain(stream::pending()));
    request.metadata_mut().insert("traceparent", header.parse().expect("a header"));
    let mut answers = WatchClient::new(channel.clone()).watch(request).await.expect("open").into_inner();
    assert!(answers.message().await.expect("an answer").expect("an answer").created);
    // The stream is open still.
    let spans = collector.trace(&id, |spans| spans.iter().any(|span| span.service == "keyward")).await;
    let (spans, _): (Vec<_>, Vec<_>) = spans.into_iter().partition(|span| span.service == "keyward");
    let stream = only(&spans, WATCH, SERVER);
    assert_eq!(stream.attributes["keyward.stream.goes_on"], "true");
    assert!(!stream.attributes.contains_key("rpc.grpc.status_code"));
}

#[test]
fn without_a_decision_and_with_sample_0_no_call_has_a_trace_until_a_reload_changes_the_share() {
    local(async {
        let collector = Collector::start().await;
        let mut cluster = Cluster::start(&newest("3.6"), Options::default()).await;
        let site = Site::new();
        let text = |share: &str| {
            config(&site, &cluster, &collector, &format!("limits.member_in_flight = {SLOTS}\n{share}"))
        };
        let (off, on) = (text(""), text("trace.sample = 1.0\n"));
        let keyward = Keyward::start(site, &off).await;
        let channel = connection(&keyward.url()).await;
        let (untraced, header) = traceparent(0xb1, "00");
        for number in 0..20 {
            put(&channel, &format!("/{number}"), (number % 2 == 0).then_some(&*header)).await;
        }
        // What comes last comes alone.
        let (id, header) = traceparent(0xb2, "01");
        put(&channel, "/last", Some(&header)).await;
        let spans = collector.trace(&id, |spans| !spans.is_empty()).await;
        assert_eq!(only(&spans, PUT, SERVER).attributes.get("network.peer.address"), None, "identities");
        assert!(collector.spans().iter().all(|span| span.trace == id), "{:#?}", collector.spans());
        let told = format!("trace=\"{untraced}\"");
        keyward.logged("the client's id", |line| line.contains(&told)).await;

        keyward.reload(&on);
        // A call without a trace of its client's gets one, with the id in its access record.
        let begun = async || {
            put(&channel, "/own", None).await;
            collector.spans().into_iter().find(|span| span.trace != id && span.kind == SERVER)
        };
        let own = wait::until(LIMIT, "a trace of Keyward's own", begun).await;
        assert_eq!((own.parent.as_str(), own.name.as_str()), ("", PUT));
        let told = format!("trace=\"{}\"", own.trace);
        keyward.logged("the id of Keyward's own trace", |line| line.contains(&told)).await;

        // A member that hangs leaves no slot for further calls.
        cluster.stop(0);
        let (crowd, header) = traceparent(0xb3, "01");
        let puts = (0..=SLOTS).map(|number| {
            let (channel, header) = (channel.clone(), header.clone());
            async move { put(&channel, &format!("/slot/{number}"), Some(&header)).await }
        });
        let waits = async {
            let turn =
                async || (keyward.metric("keyward_member_calls_queued", &[]).await == 1.0).then_some(());
            wait::until(LIMIT, "a call waits for its turn", turn).await;
            cluster.resume(0);
        };
        futures_util::future::join(join_all(puts), waits).await;
        let has_turn = |spans: &[Span]| spans.iter().any(|span| span.name == "wait for turn");
        let spans = collector.trace(&crowd, has_turn).await;
        let turn = only(&spans, "wait for turn", INTERNAL);
        assert!(spans.iter().any(|span| span.id == turn.parent && span.name == PUT && span.kind == SERVER));
        println!("{} spans at the collector", collector.spans().len());
    });
}

#[test]
fn a_bucket_of_latency_has_the_last_trace_as_its_exemplar_in_a_real_prometheus() {
    local(async {
        let collector = Collector::start().await;
        let cluster = Cluster::start(&newest("3.6"), Options::default()).await;
        let site = Site::new();
        let text = config(&site, &cluster, &collector, "");
        let keyward = Keyward::start(site, &text).await;
        let features = ["--enable-feature=exemplar-storage"];
        let prometheus = Prometheus::start_with(&[keyward.site().admin], &features).await;
        let channel = connection(&keyward.url()).await;
        let (id, header) = traceparent(0xc1, "01");
        let found = async || {
            put(&channel, "/k", Some(&header)).await;
            let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("a time").as_secs();
            let query = "keyward_call_duration_seconds_bucket";
            let exemplars = prometheus.exemplars(query, since - 600, since + 600).await;
            exemplars.into_iter().find(|(series, _)| series["method"] == "/etcdserverpb.KV/Put")
        };
        let (series, exemplar) = wait::until(LIMIT, "an exemplar", found).await;
        assert_eq!(exemplar["labels"]["trace_id"], id.as_str(), "{series} {exemplar}");
        let took: f64 = exemplar["value"].as_str().and_then(|text| text.parse().ok()).expect("a number");
        let bound = series["le"].as_str().and_then(|text| text.parse::<f64>().ok()).unwrap_or(f64::INFINITY);
        assert!(took <= bound, "{series} {exemplar}");
        // The old text has no exemplars.
        let (_, text) = http::get(keyward.site().admin, "/metrics").await.expect("the page");
        assert!(!text.contains("trace_id"), "{text}");
        println!("{series}: {exemplar}");
    });
}
