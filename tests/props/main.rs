//! For any bytes: nothing that a peer sends panics us, and what we decide on is what etcd reads.
//!
//! Each target is a plain function from bytes that panics where a promise is broken, so that a fuzzer can call it as it
//! is. `choices` turns bytes into decisions, `bodies` decisions into messages, valid and odd; `readers` reads messages
//! as etcd does. How many cases each property tries is said by `PROPTEST_CASES`; a failure prints its smallest input.

#[cfg(test)]
mod bodies;
#[cfg(test)]
mod choices;
#[cfg(test)]
mod readers;

#[cfg(test)]
mod audit_chain;
#[cfg(test)]
mod authorities;
#[cfg(test)]
mod canonical;
#[cfg(test)]
mod chains;
#[cfg(test)]
mod fleet;
#[cfg(test)]
mod frames;
#[cfg(test)]
mod gzip;
#[cfg(test)]
mod headers;
#[cfg(test)]
mod hub;
#[cfg(test)]
mod json;
#[cfg(test)]
mod json_texts;
#[cfg(test)]
mod jwts;
#[cfg(test)]
mod proxied;
#[cfg(test)]
mod splice;
#[cfg(test)]
mod targets;
#[cfg(test)]
mod txns;
#[cfg(test)]
mod users_file;
#[cfg(test)]
mod websockets;
