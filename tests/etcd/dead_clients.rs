//! Clients that are gone, and connections that nobody uses: neither keeps what others need.

use std::cell::Cell;
use std::io::{Read as _, Write as _};
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use keyward::pb::etcdserverpb::kv_client::KvClient;
use keyward::pb::etcdserverpb::{PutRequest, RangeRequest};
use rustix::process::Signal;
use socket2::{Domain, Socket, Type};
use tonic::Status;
use tonic::transport::{Channel, Endpoint};

use crate::harness::keyward::{Keyward, Site};
use crate::harness::{Cluster, Options, versions, wait};
use crate::revocations::command;

const LIMIT: Duration = Duration::from_secs(60);
/// Short for a test, and long enough for processes that have to wait for a processor.
const PINGS: &str = "limits.client_ping_interval = \"1s\"\nlimits.client_ping_timeout = \"4s\"\n";
const ENDED: &str = "keyward_downstream_connections_ended_total";
const REFUSED: &str = "keyward_downstream_connections_refused_total";
const WATCHERS: &str = "etcd_debugging_mvcc_watcher_total";

/// A process that hangs and holds a watch loses it; when it goes on it has missed nothing. Nobody else notices. Beside it one that hangs and
/// watches etcd directly.
#[tokio::test]
async fn a_process_that_hangs_loses_its_watch_and_goes_on_where_it_was() {
    for version in versions() {
        let cluster = Cluster::start(&version, Options::default()).await;
        let site = Site::new();
        let config = format!("{}{PINGS}", site.in_front_of(&cluster));
        let keyward = Keyward::start(site, &config).await;
        let (direct, through) = (cluster.ctl(), cluster.ctl().to(vec![keyward.url()]));
        let folder = tempfile::tempdir().expect("a folder");
        let log = |name: &str| folder.path().join(name);
        let hanging = through.start(&["watch", "k"], &log("hanging"));
        let living = through.start(&["watch", "k"], &log("living"));
        let hanging_at_etcd = direct.start(&["watch", "k"], &log("at-etcd"));
        let watchers = async || cluster.counter(0, WATCHERS, &[]).await;
        let three = async || (watchers().await == 3.0).then_some(());
        wait::until(LIMIT, "three watches are there", three).await;
        direct.ok(&["put", "k", "first"]).await;
        for process in [&hanging, &living, &hanging_at_etcd] {
            process.wrote(LIMIT, "an event", |text| text.contains("first").then_some(())).await;
        }
        let streams = async || keyward.metric("keyward_streams_open", &[]).await;
        assert_eq!(streams().await, 2.0, "{version}");

        let stopped = Instant::now();
        for process in [&hanging, &hanging_at_etcd] {
            process.signal(Signal::STOP);
        }
        let one = async || (streams().await == 1.0).then_some(());
        wait::until(LIMIT, "the watch of the process that hangs has ended", one).await;
        let took = stopped.elapsed();
        let two = async || (watchers().await == 2.0).then_some(());
        wait::until(LIMIT, "etcd has one watcher less", two).await;
        assert_eq!(keyward.metric(ENDED, &[("reason", "no_answer")]).await, 1.0, "{version}");
        println!(
            "{version}: Keyward took a stopped client's watch back after {took:.1?}, etcd has not after {:.1?}",
            stopped.elapsed()
        );

        direct.ok(&["put", "k", "second"]).await;
        living.wrote(LIMIT, "an event", |text| text.contains("second").then_some(())).await;
        hanging.signal(Signal::CONT);
        hanging.wrote(LIMIT, "what it missed", |text| text.contains("second").then_some(())).await;
        let said = hanging.output();
        assert_eq!(said.matches("second").count(), 1, "{version}: {said}");
        // Those who live have answered: nobody else was ended.
        assert_eq!(keyward.metric(ENDED, &[]).await, 1.0, "{version}");
    }
}

/// Connects from an address of its own, as far as HTTP/2's first frames, and says nothing more.
fn silent_connection(from: IpAddr, to: SocketAddr) -> std::io::Result<Socket> {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
    socket.bind(&SocketAddr::new(from, 0).into())?;
    socket.connect_timeout(&to.into(), Duration::from_secs(5))?;
    // It may be closed by then.
    drop((&socket).write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0"));
    Ok(socket)
}

fn is_closed(socket: &Socket) -> bool {
    socket.set_nonblocking(true).expect("a socket");
    let mut bytes = [0; 1024];
    loop {
        match (&mut &*socket).read(&mut bytes) {
            Ok(0) => return true,
            Ok(_) => {}
            Err(error) => return error.kind() != std::io::ErrorKind::WouldBlock,
        }
    }
}

/// A client on a connection that has been called over; `None` where it found no room.
async fn connect(keyward: &Keyward, from: &str) -> Option<KvClient<Channel>> {
    let endpoint = Endpoint::from_shared(keyward.url()).expect("an address");
    let endpoint = endpoint.local_address(Some(from.parse().expect("an address")));
    let mut client = KvClient::new(endpoint.connect().await.ok()?);
    write_and_read(&mut client).await.ok().map(|()| client)
}

/// The same, at 20 tries at most; counts how often it found no room in `again`.
async fn arrive_at(keyward: &Keyward, from: &str, again: &Cell<usize>) -> KvClient<Channel> {
    let tries = Cell::new(0);
    let arrive = async || {
        assert!(tries.replace(tries.get() + 1) < 20, "{from} finds no room");
        let client = connect(keyward, from).await;
        again.set(again.get() + usize::from(client.is_none()));
        client
    };
    wait::until(LIMIT, "the client finds room", arrive).await
}

async fn write_and_read(client: &mut KvClient<Channel>) -> Result<(), Status> {
    client.put(PutRequest { key: "k".into(), ..PutRequest::default() }).await?;
    client.range(RangeRequest { key: "k".into(), ..RangeRequest::default() }).await.map(drop)
}

/// From one address, and from enough addresses to fill the table: whoever comes and calls finds room, from the flooding address too, and keeps
/// it.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn idle_connections_without_end_keep_nobody_out_and_doctor_says_whose_they_are() {
    const FLOOD: usize = 400;
    let version = versions().pop().expect("one is pinned");
    let cluster = Cluster::start(&version, Options::default()).await;
    let site = Site::new();
    let config = format!(
        "{}limits.connections = 64\nadmin.socket = \"admin.sock\"\nlimits.client_ping_interval = \"0s\"\n",
        site.in_front_of(&cluster)
    );
    let keyward = Keyward::start(site, &config).await;
    let address = keyward.site().listen;
    let flood = async |from: [u8; 4]| {
        tokio::task::block_in_place(|| {
            let all: Vec<_> =
                (0..FLOOD).filter_map(|_| silent_connection(from.into(), address).ok()).collect();
            assert!(all.len() > FLOOD / 2, "{} connections", all.len());
            all
        })
    };
    let mut clients = Vec::new();
    // Right behind a burst, while as many idle connections as may make room at the same time do so, a newcomer is refused and comes again.
    let again = Cell::new(0);
    let mut arrive = async |from: &str| {
        for _ in 0..6 {
            clients.push(arrive_at(&keyward, from, &again).await);
        }
    };
    arrive("127.0.0.1").await;
    let from_one = flood([127, 0, 0, 3]).await;
    let (_, said) = command(&keyward, &["doctor"]).await;
    assert!(said.contains("[address_full] 127.0.0.3: "), "{said}");
    assert!(!said.contains("connections_full"), "the others have room: {said}");
    arrive("127.0.0.2").await;
    arrive("127.0.0.3").await;
    assert_eq!(
        keyward.metric(ENDED, &[("reason", "connections")]).await,
        0.0,
        "at the limit of an address only"
    );
    let from_another = flood([127, 0, 0, 4]).await;
    let (_, said) = command(&keyward, &["doctor"]).await;
    assert!(said.contains("[connections_full] limits.connections: "), "{said}");
    arrive("127.0.0.5").await;
    for client in &mut clients {
        write_and_read(client).await.expect("the client has kept its room");
    }
    let open = async || {
        let open = from_one.iter().chain(&from_another).filter(|socket| !is_closed(socket)).count();
        (open <= 64).then_some(open)
    };
    let open = wait::until(LIMIT, "idle connections beyond the limit are closed", open).await;
    let ended = keyward.metric(ENDED, &[]).await;
    println!(
        "{version}: of {} silent connections {open} are open, {ended} made room, {} were refused; {} clients found room, and came again \
         {} times",
        2 * FLOOD,
        keyward.metric(REFUSED, &[]).await,
        clients.len(),
        again.get()
    );
    assert!(ended >= 20.0, "{ended} made room");
    const TOLD: &str = "a limit of client connections is reached";
    keyward.logged(TOLD, |line| line.contains(TOLD)).await;
    let told = keyward.log().matches(TOLD).count();
    assert!((1..=12).contains(&told), "{told} lines");
}
