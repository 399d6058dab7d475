//! What etcd touches for a request lies within what Keyward judges, by etcd's own generated types and servers.
//!
//! `tests/clients/touches` decodes requests with the types of etcd 3.5 (gogo/protobuf) and 3.7 (Go's own protobuf) and says what
//! etcd touches for them; here the same requests go through `rpc::canonical` and `rpc::touch`. Needs Go, which `tests/run` brings.
//! `KEYWARD_TEST_FULL=1` compares a million bodies instead of twenty thousand; `KEYWARD_SEED` is the seed (1).

#[cfg(test)]
#[path = "../props/bodies.rs"]
mod bodies;
#[cfg(test)]
#[expect(dead_code, reason = "shared with tests/props, which uses all of it")]
#[path = "../props/choices.rs"]
mod choices;
#[cfg(test)]
mod etcd_types;
#[cfg(test)]
mod key_set;
#[cfg(test)]
mod requests;
#[cfg(test)]
mod rewritten;
#[cfg(test)]
mod same_schema;
#[cfg(test)]
mod touched;
#[cfg(test)]
mod within;
