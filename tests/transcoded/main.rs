//! What Keyward reads from JSON and writes as JSON has the same meaning for Go's own readers and writers.
//!
//! `tests/clients/protojson` reads each accepted document with Go's `protojson` (grpc-gateway v2) and
//! `jsonpb` (v1) on etcd's generated types, and compares the message with Keyward's; it writes each message
//! too, and compares the text. Needs Go, which `tests/run` brings. `KEYWARD_TEST_FULL=1` compares ten
//! million inputs instead of twenty thousand; `KEYWARD_SEED` is the seed (1).

#[cfg(test)]
#[path = "../props/bodies.rs"]
mod bodies;
#[cfg(test)]
#[expect(dead_code, reason = "shared with tests/props, which uses all of it")]
#[path = "../props/choices.rs"]
mod choices;
#[cfg(test)]
mod go_json;
#[cfg(test)]
#[path = "../props/json_texts.rs"]
mod json_texts;
#[cfg(test)]
mod same_meaning;
