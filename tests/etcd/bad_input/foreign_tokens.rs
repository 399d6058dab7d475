//! Tokens of somebody else in front of a cluster without auth: ignored, as etcd ignores them, until auth is turned on.

use std::time::Duration;

use super::{put, told};
use crate::harness::keyward::{Keyward, Site};
use crate::harness::{Cluster, Options, every_version, wait};
use crate::raw::Endpoint;

const LIMIT: Duration = Duration::from_secs(30);
const SERVED: (Option<u32>, &str) = (Some(0), "");
const INVALID: (Option<u32>, &str) = (Some(16), "etcdserver: invalid auth token");
const EMPTY: (Option<u32>, &str) = (Some(3), "etcdserver: user name is empty");

/// Not `x.999999999`, upon which etcd before 3.4.28 and 3.5.10 waits for the client's deadline.
const FOREIGN: [(&str, &str); 6] = [
    ("token", ""),
    ("token", "nobody-issued-this"),
    ("token", "a.b.c"),
    ("token", "kw1_c29tZWJvZHkgZWxzZSdz"),
    ("authorization", "Basic YWxpY2U6c2VjcmV0"),
    ("authorization", "Bearer nobody-issued-this"),
];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn foreign_tokens_are_ignored_until_auth_is_turned_on() {
    for version in every_version() {
        let cluster = Cluster::start(&version, Options { strangers: true, ..Options::default() }).await;
        let site = Site::new();
        let config = site.in_front_of(&cluster);
        let keyward = Keyward::start(site, &config).await;
        let (etcd, through) = (Endpoint::plain(cluster.address(0)), Endpoint::plain(keyward.site().listen));
        // Until a member has said that auth is off, they are bad tokens.
        let (name, value) = FOREIGN[1];
        let known = async || {
            let answer = through.call(&put("/a/foreign").with(name, value)).await;
            (told(&answer).0 == SERVED.0).then_some(())
        };
        wait::until(LIMIT, "a member has said that auth is off", known).await;
        let is_ignored_directly = version.at_least("3.5.10");
        for (name, value) in FOREIGN {
            let call = put("/a/foreign").with(name, value);
            let (direct, answer) = (told(&etcd.call(&call).await), told(&through.call(&call).await));
            println!(
                "etcd {version}, auth off, {name} {value:?}: directly {direct:?}, through Keyward {answer:?}"
            );
            assert_eq!((answer.0, answer.1.as_str()), SERVED, "{version}: {name} {value:?}");
            let expected = if is_ignored_directly { SERVED } else { INVALID };
            assert_eq!((direct.0, direct.1.as_str()), expected, "{version}: {name} {value:?}, directly");
        }
        let ctl = cluster.ctl();
        for args in [
            &["role", "add", "root"][..],
            &["user", "add", "root:root-secret"],
            &["user", "grant-role", "root", "root"],
            &["auth", "enable"],
        ] {
            ctl.ok(args).await;
        }
        // Nobody's call is refused from now on, whatever it shows; soon it is told that its token is bad.
        let strict = async || {
            let answer = told(&through.call(&put("/a/foreign").with(name, value)).await);
            let answer = (answer.0, answer.1.as_str());
            assert!([INVALID, EMPTY].contains(&answer), "{version}: {answer:?}");
            (answer == INVALID).then_some(())
        };
        wait::until(LIMIT, "bad tokens are bad", strict).await;
        for (name, value) in FOREIGN {
            let call = put("/a/foreign").with(name, value);
            let (direct, answer) = (told(&etcd.call(&call).await), told(&through.call(&call).await));
            assert_eq!((answer.0, answer.1.as_str()), INVALID, "{version}: {name} {value:?}, auth on");
            assert_eq!(direct, answer, "{version}: {name} {value:?}, auth on");
        }
    }
}
