//! Real etcd clusters, etcdctl and Keyward itself, for tests.
//!
//! Owns: everything that is started and must be gone at the end. Must not know what is being tested. Invariants: loopback only, no
//! fixed port, no fixed sleep; nothing outlives the test process.

pub(crate) mod binary;
pub(crate) mod client;
pub(crate) mod client_program;
pub(crate) mod cluster;
pub(crate) mod ctl;
pub(crate) mod dns;
pub(crate) mod evidence;
pub(crate) mod http;
pub(crate) mod issuer;
pub(crate) mod key_history;
pub(crate) mod keyward;
pub(crate) mod page;
pub(crate) mod pki;
pub(crate) mod ports;
pub(crate) mod process;
pub(crate) mod prometheus;
pub(crate) mod relay;
pub(crate) mod setup;
pub(crate) mod wait;

pub(crate) use binary::{every_version, newest, side_by_side, versions, versions_that_survive_kills};
pub(crate) use cluster::{Auth, Cluster, Options, PeerTls, Tls, password};
