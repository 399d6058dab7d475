//! A cluster with short-lived tokens, a Keyward before it, and calls that stay open.
//!
//! Owns: both, and looking at them past Keyward. Must not know what a test wants to show.

use std::time::Duration;

use bytes::Bytes;
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::timeout;
use tonic::Status;

use crate::caller::{Caller, Kind};
use crate::harness::binary::Version;
use crate::harness::keyward::{Keyward, Site};
use crate::harness::{Cluster, Options, wait};
use crate::steady::{TTL, options};

pub(crate) const SOON: Duration = Duration::from_secs(30);
/// Three lives of a token.
pub(crate) const THREE: Duration = Duration::from_secs(3 * TTL as u64);
/// Longer than any test: it never ends a lease here.
pub(crate) const LEASE: i64 = 300;
/// etcd's own defaults.
const TIMING: (u32, u32) = (100, 1000);

pub(crate) struct Bench {
    pub(crate) cluster: Cluster,
    pub(crate) keyward: Keyward,
}

impl Bench {
    pub(crate) async fn of(version: &Version) -> Bench {
        Bench::with(version, options(TIMING)).await
    }

    pub(crate) async fn with(version: &Version, options: Options) -> Bench {
        let cluster = Cluster::start(version, options).await;
        let site = Site::new();
        let config = site.in_front_of(&cluster);
        let keyward = Keyward::start(site, &config).await;
        Bench { cluster, keyward }
    }

    pub(crate) async fn through(&self, user: &str) -> Caller {
        Caller::log_in(self.keyward.site().listen, user).await
    }

    pub(crate) async fn direct(&self, user: &str) -> Caller {
        Caller::log_in(self.cluster.address(0), user).await
    }

    /// The keys in line, oldest first, read at a member with a token of its own.
    pub(crate) async fn line(&self, member: usize, name: &str) -> Vec<String> {
        Caller::log_in(self.cluster.address(member), "root").await.keys(&format!("{name}/")).await
    }

    pub(crate) async fn in_line(&self, name: &str, count: usize) {
        let look = async || (self.line(0, name).await.len() == count).then_some(());
        wait::until(SOON, &format!("{count} in line under {name}"), look).await;
    }

    /// The member that has an open call of this method.
    pub(crate) async fn carrier(&self, method: &str) -> usize {
        let look = async || {
            let mut carriers = Vec::new();
            for member in 0..self.cluster.len() {
                let of = [("grpc_method", method)];
                let started = self.cluster.counter(member, "grpc_server_started_total", &of).await;
                let handled = self.cluster.counter(member, "grpc_server_handled_total", &of).await;
                if started > handled {
                    carriers.push(member);
                }
            }
            // One that was left a moment ago may still be there.
            (carriers.len() == 1).then(|| carriers[0])
        };
        wait::until(SOON, &format!("a member carries {method}"), look).await
    }
}

/// A call in the background; dropped, it is cancelled.
pub(crate) struct Open<T> {
    running: JoinSet<T>,
    handle: AbortHandle,
}

impl<T: Send + 'static> Open<T> {
    pub(crate) fn start(call: impl Future<Output = T> + Send + 'static) -> Open<T> {
        let mut running = JoinSet::new();
        let handle = running.spawn(call);
        Open { running, handle }
    }

    pub(crate) fn is_finished(&self) -> bool {
        self.handle.is_finished()
    }

    pub(crate) async fn ended(mut self) -> T {
        let ended = timeout(SOON, self.running.join_next()).await.expect("the call ends");
        ended.expect("there is one").expect("no panic")
    }
}

impl Open<Result<Bytes, Status>> {
    /// Queues under `name`.
    pub(crate) fn queue(caller: &Caller, kind: Kind, name: &str, lease: i64, value: &str) -> Self {
        let (caller, name, value) = (caller.clone(), name.to_owned(), value.to_owned());
        Open::start(async move { caller.queue(kind, &name, lease, &value).await })
    }
}

pub(crate) fn told(status: &Status) -> (i32, &str) {
    (status.code().into(), status.message())
}
