//! The status page: what it shows to whom, and what it costs nobody.

use std::net::SocketAddr;
use std::time::Duration;

use keyward::admin;
use keyward::admin::drain::Stage;
use keyward::members::membership::AuthSetting;
use keyward::refusal::Code;
use keyward::tasks::Tasks;
use serde_json::Value;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpStream;
use tokio::time::Instant;

use crate::client::Client;
use crate::member::Member;
use crate::rig::{Keyward, log_in, real};
use crate::words::{RANGE, WATCH, create_of, created, range, watch};

const OWN: &str = "Host: 127.0.0.1:2389\r\n";

/// A Keyward with an admin address, with auth and these lines in `[admin]`.
async fn administered(lines: &str) -> (SocketAddr, Member, Keyward) {
    let member = Member::new(1, &Tasks::default());
    let keyward = Keyward::configured(&[&member], AuthSetting::On, &format!("[admin]\n{lines}"));
    let listener = admin::bind(([127, 0, 0, 1], 0).into()).await.expect("bound");
    let address = listener.local_addr().expect("an address");
    keyward.tasks.spawn("admin", keyward.serve_admin(listener)).detach();
    (address, member, keyward)
}

async fn request(address: SocketAddr, path: &str, headers: &str) -> TcpStream {
    let mut stream = TcpStream::connect(address).await.expect("connected");
    let request = format!("GET {path} HTTP/1.1\r\n{headers}\r\n");
    stream.write_all(request.as_bytes()).await.expect("sent");
    stream
}

/// The whole answer, in lower case above the body.
async fn get(address: SocketAddr, path: &str, headers: &str) -> (String, String) {
    let mut stream = request(address, path, &format!("{headers}Connection: close\r\n")).await;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.expect("UTF-8");
    let (head, body) = answer.split_once("\r\n\r\n").expect("a head and a body");
    (head.to_lowercase(), body.to_owned())
}

/// An open page.
struct Page(BufReader<TcpStream>);

impl Page {
    async fn open(address: SocketAddr, query: &str) -> Self {
        let stream = request(address, &format!("/page/events{query}"), OWN).await;
        let mut page = Self(BufReader::new(stream));
        let status = page.line().await.expect("an answer");
        assert_eq!(status, "HTTP/1.1 200 OK");
        page
    }

    /// The next line; `None` at the end.
    async fn line(&mut self) -> Option<String> {
        let mut line = String::new();
        let read = self.0.read_line(&mut line).await.expect("UTF-8");
        (read > 0).then(|| line.trim_end().to_owned())
    }

    /// The next event as text.
    async fn event(&mut self) -> String {
        loop {
            let line = self.line().await.expect("the events go on");
            if let Some(event) = line.strip_prefix("data: ") {
                return event.to_owned();
            }
        }
    }

    /// The first event for which `wanted` holds.
    async fn event_with(&mut self, wanted: impl Fn(&Value) -> bool) -> (String, Value) {
        loop {
            let text = self.event().await;
            let event = serde_json::from_str(&text).expect("JSON");
            if wanted(&event) {
                return (text, event);
            }
        }
    }
}

#[test]
fn a_web_site_reads_nothing() {
    real(async {
        let (address, _member, _keyward) = administered("hosts = ['ops.example.com']\n").await;
        let refused = [
            "Host: evil.example\r\n",
            "Host: ops.example.com.evil.example\r\n",
            "Host: 127.0.0.1\r\nHost: evil.example\r\n",
            "Host: 127.0.0.1:2389\r\nOrigin: http://evil.example\r\n",
            "Host: 127.0.0.1:2389\r\nOrigin: null\r\n",
        ];
        for path in ["/", "/page/events"] {
            for headers in refused {
                let (head, body) = get(address, path, headers).await;
                assert!(head.starts_with("http/1.1 403 "), "{path} {headers} {head}");
                assert!(!body.contains("<html") && !body.contains("status"), "{body}");
                assert!(!head.contains("access-control-"), "{head}");
            }
        }
        for host in ["10.0.0.1", "[::1]:2389", "LOCALHOST:1", "Ops.example.com"] {
            let (head, body) = get(address, "/", &format!("Host: {host}\r\n")).await;
            assert!(
                head.starts_with("http/1.1 200 ") && body.starts_with("<!doctype html>"),
                "{host} {head}"
            );
            for line in [
                "content-type: text/html; charset=utf-8",
                "x-content-type-options: nosniff",
                "referrer-policy: no-referrer",
                "x-frame-options: deny",
                "cache-control: no-store",
                "content-security-policy: default-src 'none'; script-src 'sha256-",
            ] {
                assert!(head.contains(line), "{line}: {head}");
            }
            assert!(!head.contains("access-control-") && !head.contains("unsafe"), "{head}");
        }
        // Probes are asked for by any name.
        assert!(get(address, "/livez", "Host: keyward.svc\r\n").await.0.starts_with("http/1.1 200 "));
        let (head, body) = get(address, "/page/events?filter=nosuch=1", OWN).await;
        assert!(head.starts_with("http/1.1 400 ") && body.contains("no field \"nosuch\""), "{head} {body}");
    });
}

#[test]
fn a_page_that_is_off_is_not_there() {
    real(async {
        let (address, _member, _keyward) = administered("page = 'off'\n").await;
        for path in ["/", "/page/events"] {
            assert!(get(address, path, OWN).await.0.starts_with("http/1.1 404 "), "{path}");
        }
        assert!(get(address, "/livez", OWN).await.0.starts_with("http/1.1 200 "));
    });
}

/// The first event in which a client of alice's, at a known address, has made a call for a known key.
async fn event_of_a_call(lines: &str, query: &str) -> (String, Value) {
    let (address, member, keyward) = administered(lines).await;
    let from = SocketAddr::from(([203, 0, 113, 77], 4242));
    let client = Client::over(keyward.connect_to(0, Some(from)), &keyward.tasks).await;
    let client = client.header("user-agent", "secret-agent/7");
    let token = log_in(&client, "alice").await;
    let client = client.header("token", &token);
    let mut watching = client.open(WATCH).await.expect("open");
    watching.say(&watch("/hush/key", 5)).await;
    let mut call = member.called(WATCH).await;
    let create = create_of(&call.messages.next().await.expect("a create")).expect("a create");
    call.say(&created(create.watch_id, 9)).await.expect("taken");
    watching.next().await.expect("created");
    // A refused call.
    let nobody = keyward.client().await;
    let refused = nobody.call(RANGE, range("k")).await;
    assert_eq!(refused.end.code(), Some(Code::InvalidArgument));
    let mut page = Page::open(address, query).await;
    let is_whole = |event: &Value| {
        let has_rows = |topic: &str| event[topic]["rows"].as_array().is_some_and(|rows| !rows.is_empty());
        has_rows("clients") && has_rows("watches") && event["doctor"].is_object()
    };
    page.event_with(is_whole).await
}

/// Everything in an event that names somebody, or a key.
const NAMING: [&str; 4] = ["alice", "203.0.113.77", "secret-agent", "/hush"];

#[test]
fn a_full_page_names_clients_and_keys() {
    real(async {
        let (text, event) = event_of_a_call("page = 'full'\n", "").await;
        for naming in NAMING {
            assert!(text.contains(naming), "{naming}: {text}");
        }
        assert_eq!(event["content"], "full");
        let clients = event["clients"]["rows"].as_array().expect("rows");
        assert!(
            clients.iter().any(|row| row["user"] == "alice" && row["calls"].as_u64() >= Some(2)),
            "{text}"
        );
        let refused = event["refusals"].as_array().expect("rows");
        let nobody = refused.iter().find(|row| row["reason"] == "no_identity").expect("the reason");
        assert_eq!(nobody["calls"], 1);
        assert_eq!(event["status"]["members"][0]["name"], "m1");
        for topic in ["limits", "config", "version", "replicas"] {
            assert!(!event[topic]["rows"].as_array().expect("rows").is_empty(), "{topic}: {text}");
        }
        assert!(event["digest"].as_str().is_some_and(|digest| !digest.is_empty()), "{text}");
    });
}

#[test]
fn an_anonymous_page_names_nobody_and_counts_all() {
    real(async {
        // A condition on a hidden field must not tell either which rows have the value.
        for query in ["", "?sort=failed&filter=calls%3E0"] {
            let (text, event) = event_of_a_call("", query).await;
            for naming in NAMING {
                assert!(!text.contains(naming), "{naming}: {text}");
            }
            assert_eq!(event["content"], "anonymous");
            let clients = event["clients"]["rows"].as_array().expect("rows");
            assert_eq!(clients.len(), 2, "{text}");
            assert!(clients.iter().any(|row| row["calls"].as_u64() >= Some(2)), "{text}");
        }
        let (_, event) = event_of_a_call("", "?filter=calls%3E0").await;
        assert_eq!(event["clients"]["rows"].as_array().map(Vec::len), Some(2));
        let (address, _member, keyward) = administered("").await;
        let client = keyward.client().await;
        log_in(&client, "alice").await;
        for user in ["alice", "bob"] {
            let (head, body) = get(address, &format!("/page/events?filter=user={user}"), OWN).await;
            assert!(head.starts_with("http/1.1 400 "), "{head}");
            assert_eq!(body, "the field \"user\" is hidden: the page is anonymous (admin.page)\n");
        }
    });
}

#[test]
fn the_client_that_loops_now_stands_above_the_one_with_more_calls_since_its_start() {
    real(async {
        let (address, _member, keyward) = administered("page = 'full'\n").await;
        let before = keyward.client().await.header("user-agent", "busy-before");
        for _ in 0..20 {
            before.call(RANGE, range("k")).await;
        }
        let mut page = Page::open(address, "").await;
        let clients = |event: &Value| event["clients"]["rows"].as_array().cloned().unwrap_or_default();
        let (_, first) = page.event_with(|event| !clients(event).is_empty()).await;
        let first = clients(&first);
        assert_eq!((&first[0]["calls"], &first[0]["calls_in_ten_seconds"]), (&20.into(), &Value::Null));
        let now = keyward.client().await.header("user-agent", "loops-now");
        for _ in 0..3 {
            now.call(RANGE, range("k")).await;
        }
        let (_, event) = page.event_with(|event| clients(event).len() == 2).await;
        let shown: Vec<[Value; 3]> = clients(&event)
            .into_iter()
            .map(|row| ["user_agent", "calls", "calls_in_ten_seconds"].map(|field| row[field].clone()))
            .collect();
        let row = |agent: &str, calls: u64, recent: u64| -> [Value; 3] {
            [agent.into(), calls.into(), recent.into()]
        };
        assert_eq!(shown, [row("loops-now", 3, 3), row("busy-before", 20, 0)]);
    });
}

#[test]
fn listeners_that_do_not_read_keep_nobody_out() {
    real(async {
        let (address, _member, _keyward) = administered("").await;
        let mut pages = Vec::new();
        for _ in 0..8 {
            let mut page = Page::open(address, "").await;
            page.event().await;
            pages.push(page);
        }
        let mut ninth = Page::open(address, "").await;
        ninth.event().await;
        // The oldest has made room, and a browser asks again.
        while pages[0].line().await.is_some() {}
        pages[1].event().await;
        Page::open(address, "").await.event().await;
        ninth.event().await;
    });
}

#[test]
fn nothing_is_asked_while_nobody_listens() {
    real(async {
        let (address, _member, keyward) = administered("").await;
        // Gets the questions to shards, and answers none.
        let mut questions = keyward.questions.join();
        get(address, "/", OWN).await;
        tokio::time::sleep(Duration::from_millis(1500)).await;
        assert!(questions.try_recv().is_err(), "the document alone asks nothing");
        let mut page = Page::open(address, "").await;
        assert!(questions.recv().await.is_some());
        // A shard without an answer leaves the rest of the event whole.
        let unanswered = async { while questions.recv().await.is_some() {} };
        let (_, event) = tokio::select! {
            event = page.event_with(|event| event["clients"].is_null()) => event,
            () = unanswered => unreachable!("the shards are asked again"),
        };
        assert_eq!(event["status"]["members"][0]["name"], "m1");
        drop(page);
        // The event in work still asks; an event that goes on to be made every second would keep the test here.
        while tokio::time::timeout(Duration::from_secs(3), questions.recv()).await.is_ok() {}
    });
}

#[test]
fn events_outlive_other_connections_and_end_with_a_drain() {
    real(async {
        let (address, _member, keyward) = administered("").await;
        let mut page = Page::open(address, "").await;
        let began = Instant::now();
        while began.elapsed() < Duration::from_secs(17) {
            page.event().await;
        }
        keyward.exit().enter(Stage::Waiting { until: Instant::now() + Duration::from_secs(60) });
        let mut has_ended = false;
        while let Some(line) = page.line().await {
            has_ended |= line == "event: end";
        }
        assert!(has_ended, "the last event says so");
        let (head, _) = get(address, "/page/events", OWN).await;
        assert!(head.starts_with("http/1.1 503 "), "{head}");
        // The end of the process waits for no page.
        keyward.exit().enter(Stage::Ended);
        keyward.exit().receivers_dropped().await;
    });
}
