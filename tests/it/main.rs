//! The in-process ring: the data path against scripted members, on one runtime, most of it under a paused clock.
//!
//! `rig` puts Keyward together, `member` is an etcd that answers by script, `client` a gRPC client that sees frames,
//! `raw_client` one that writes them, `words` the messages that both say; every other module is one promise. The two seams are the connector and the
//! incoming connections.

#[cfg(test)]
mod admin_address;
#[cfg(test)]
mod admin_commands;
#[cfg(test)]
mod advertised;
#[cfg(test)]
mod ages;
#[cfg(test)]
mod answer_limit;
#[cfg(test)]
mod authority;
#[cfg(test)]
mod client;
#[cfg(test)]
mod member;
#[cfg(test)]
mod raw_client;
#[cfg(test)]
mod rig;
#[cfg(test)]
mod wire;
#[cfg(test)]
mod words;

#[cfg(test)]
mod addressed;
#[cfg(test)]
mod audit;
#[cfg(test)]
mod budgets;
#[cfg(test)]
mod cancel_bursts;
#[cfg(test)]
mod carried;
#[cfg(test)]
mod certificates;
#[cfg(test)]
mod compressed;
#[cfg(test)]
mod crowded;
#[cfg(test)]
mod dead_clients;
#[cfg(test)]
mod defragmentations;
#[cfg(test)]
mod drain;
#[cfg(test)]
mod entries;
#[cfg(test)]
mod forged_sessions;
#[cfg(test)]
mod guesses;
#[cfg(test)]
mod hashed_stores;
#[cfg(test)]
mod hedges;
#[cfg(test)]
mod honest_ends;
#[cfg(test)]
mod http1;
#[cfg(test)]
mod ignored_tokens;
#[cfg(test)]
mod jwts;
#[cfg(test)]
mod keepalives;
#[cfg(test)]
mod leaderless_reads;
#[cfg(test)]
mod lent_logins;
#[cfg(test)]
mod limits;
#[cfg(test)]
mod locks;
#[cfg(test)]
mod log_records;
#[cfg(test)]
mod logins;
#[cfg(test)]
mod lone_frames;
#[cfg(test)]
mod lost_reads;
#[cfg(test)]
mod many_peers;
#[cfg(test)]
mod metrics_page;
#[cfg(test)]
mod moves;
#[cfg(test)]
mod name_server;
#[cfg(test)]
mod name_servers;
#[cfg(test)]
mod namespace_leases;
#[cfg(test)]
mod namespaces;
#[cfg(test)]
mod observers;
#[cfg(test)]
mod odd_authorities;
#[cfg(test)]
mod odd_http2;
#[cfg(test)]
mod outages;
#[cfg(test)]
mod own_troubles;
#[cfg(test)]
mod paused_readers;
#[cfg(test)]
mod permissions;
#[cfg(test)]
mod pinned;
#[cfg(test)]
mod proofs;
#[cfg(test)]
mod proxied;
#[cfg(test)]
mod re_decisions;
#[cfg(test)]
mod removals;
#[cfg(test)]
mod replays;
#[cfg(test)]
mod reported_rules;
#[cfg(test)]
mod request_memory;
#[cfg(test)]
mod reset_floods;
#[cfg(test)]
mod rest;
#[cfg(test)]
mod rest_http2;
#[cfg(test)]
mod rest_streams;
#[cfg(test)]
mod rest_websockets;
#[cfg(test)]
mod revocations;
#[cfg(test)]
mod revocations_in_etcd;
#[cfg(test)]
mod right_member;
#[cfg(test)]
mod rule_table;
#[cfg(test)]
mod secrets;
#[cfg(test)]
mod shadow;
#[cfg(test)]
mod shared_watches;
#[cfg(test)]
mod slow_watchers;
#[cfg(test)]
mod sockets;
#[cfg(test)]
mod stale;
#[cfg(test)]
mod status_page;
#[cfg(test)]
mod stored_policy;
#[cfg(test)]
mod storms;
#[cfg(test)]
mod strays;
#[cfg(test)]
mod traces;
#[cfg(test)]
mod turns;
#[cfg(test)]
mod unproved_logins;
#[cfg(test)]
mod unread_answers;
#[cfg(test)]
mod unread_copies;
#[cfg(test)]
mod upstream_headers;
#[cfg(test)]
mod usage_limits;
#[cfg(test)]
mod watches;
#[cfg(test)]
mod withdrawn;
#[cfg(test)]
mod write_order;
