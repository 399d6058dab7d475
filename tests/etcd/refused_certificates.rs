//! A user's certificate that members refuse: every call ends at once where all of them do, goes on elsewhere where one does, harms
//! nobody else, and is served again once the certificate is replaced.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use futures_util::{StreamExt as _, future::ready, stream};
use keyward::pb::etcdserverpb::WatchRequest;
use keyward::pb::etcdserverpb::watch_client::WatchClient;
use keyward::pb::etcdserverpb::watch_request::RequestUnion;
use rcgen::date_time_ymd;
use tokio::time::timeout;
use tonic::{Code, Status};

use crate::caller::Caller;
use crate::harness::keyward::{Keyward, Site};
use crate::harness::pki::{Pair, Pki};
use crate::harness::{Auth, Cluster, Options, Tls, newest, side_by_side, versions, wait};
use crate::streams::watch_of;

const TOLD: &str = "keyward: the members do not accept this user's certificate";
const LINE: &str = "no connection to the member with this user's certificate";
/// A call that waits for a member waits for 7 s: so many calls would take longer than `LIMIT`.
const CALLS: usize = 30;
const LIMIT: Duration = Duration::from_secs(120);

/// The files of the user's row.
fn files(site: &Site) -> (PathBuf, PathBuf) {
    (site.file("alice.crt"), site.file("alice.key"))
}

fn put_pair(site: &Site, pair: &Pair) {
    let (cert, key) = files(site);
    fs::copy(&pair.key, key).expect("the key can be copied");
    fs::copy(&pair.cert, cert).expect("the certificate can be copied");
}

/// Who comes without a name is alice, with the pair in her files; root has a good one.
async fn in_front_of(cluster: &Cluster, alice: &Pair) -> Keyward {
    let site = Site::new();
    put_pair(&site, alice);
    let ((cert, key), root) = (files(&site), cluster.pki().client("root"));
    let config = site.listening(cluster, ", default_user = \"alice\"")
        + &format!(
            "[[user]]\nname = \"alice\"\ncert = {cert:?}\nkey = {key:?}\n[[user]]\nname = \"root\"\ncert = {:?}\nkey = {:?}\n",
            root.cert, root.key
        );
    Keyward::start(site, &config).await
}

fn options(members: usize) -> Options {
    Options { members, auth: Auth::On { extra_users: 0 }, tls: Tls::Mutual, ..Options::default() }
}

fn told(status: &Status) -> (Code, &str) {
    (status.code(), status.message())
}

fn lines(keyward: &Keyward) -> usize {
    keyward.log().lines().filter(|line| line.contains(LINE)).count()
}

#[tokio::test]
async fn a_certificate_that_every_member_refuses_ends_each_call_at_once_and_harms_its_user_alone() {
    side_by_side(&versions(), async |version| {
        let cluster = Cluster::start(version, options(3)).await;
        let ended = cluster.pki().changed("ended", "alice", |params| {
            (params.not_before, params.not_after) = (date_time_ymd(2020, 1, 1), date_time_ymd(2021, 1, 1));
        });
        let keyward = in_front_of(&cluster, &ended).await;
        let alice = Caller::anybody(keyward.site().listen).await;
        let calls = async {
            for call in 0..CALLS {
                let refused = alice.put("/a/x", b"1".to_vec(), 0).await.expect_err("nobody accepts it");
                assert_eq!(told(&refused), (Code::Unavailable, TOLD), "{version}: {call}");
            }
            let create = RequestUnion::CreateRequest(watch_of("/a/x", false, 0));
            let asks =
                stream::once(ready(WatchRequest { request_union: Some(create) })).chain(stream::pending());
            let ended = match WatchClient::new(alice.channel.clone()).watch(asks).await {
                Ok(stream) => stream.into_inner().message().await.expect_err("nobody accepts it"),
                Err(ended) => ended,
            };
            assert_eq!(told(&ended), (Code::Unavailable, TOLD), "{version}");
        };
        timeout(LIMIT, calls).await.expect("no call waits");
        // One line for each member, and the same again after a minute on a slow machine.
        assert!((1..=9).contains(&lines(&keyward)), "{version}: {}", keyward.log());
        let root = Caller::log_in(keyward.site().listen, "root").await;
        root.put("/b/x", b"1".to_vec(), 0).await.expect("the members serve whom they accept");
        // The renewed pair counts at once, whatever was refused a moment ago.
        put_pair(keyward.site(), &cluster.pki().client("alice"));
        let put = async || alice.put("/a/x", b"1".to_vec(), 0).await.ok();
        wait::until(LIMIT, "the renewed pair is read", put).await;
    })
    .await;
}

/// The member that was not started again knows one authority, the others two.
#[tokio::test]
async fn a_certificate_that_one_member_refuses_is_served_by_the_others() {
    let mut cluster = Cluster::start(&newest("3.5"), options(3)).await;
    let other = Pki::new(&cluster.folder().join("other"));
    let both = fs::read_to_string(&cluster.pki().ca).expect("a file")
        + &fs::read_to_string(&other.ca).expect("a file");
    fs::write(&cluster.pki().ca, both).expect("the file can be written");
    for member in 1..3 {
        cluster.bounce(member, None).await;
    }
    let keyward = in_front_of(&cluster, &other.client("alice")).await;
    let alice = Caller::anybody(keyward.site().listen).await;
    let calls = async {
        for call in 0..CALLS {
            let put = alice.put("/a/x", b"1".to_vec(), 0).await;
            put.unwrap_or_else(|refused| panic!("{call}: {refused}"));
        }
    };
    timeout(LIMIT, calls).await.expect("no call waits");
    assert!(lines(&keyward) <= 3, "{}", keyward.log());
}
