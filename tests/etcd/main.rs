//! The real ring: what Keyward promises, shown on real etcd servers of the versions in `tests/versions.toml`.
//!
//! `harness` starts and breaks clusters and knows nothing of what is promised; every other module is one promise.

#[cfg(test)]
mod acting;
#[cfg(test)]
mod advisories;
mod all_slow;
#[cfg(test)]
mod answer_limit;
#[cfg(test)]
mod apisix;
#[cfg(test)]
mod attacks;
#[cfg(test)]
mod audit;
#[cfg(test)]
mod audit_sinks;
mod auto_tls;
#[cfg(test)]
mod bad_input;
#[cfg(test)]
mod bench;
#[cfg(test)]
mod caller;
#[cfg(test)]
mod catch_up;
#[cfg(test)]
mod certificate_matrix;
#[cfg(test)]
mod chained;
#[cfg(test)]
mod chaos;
#[cfg(test)]
mod client_certificates;
#[cfg(test)]
mod client_families;
#[cfg(test)]
mod compressed;
#[cfg(test)]
mod console;
#[cfg(test)]
mod control_planes;
#[cfg(test)]
mod credentials;
#[cfg(test)]
mod crowd;
#[cfg(test)]
mod dead_clients;
#[cfg(test)]
mod defragmentation;
#[cfg(test)]
mod discovery;
#[cfg(test)]
mod doctor;
#[cfg(test)]
mod documented_curl;
#[cfg(test)]
mod eetcd;
#[cfg(test)]
mod etcd3gw;
#[cfg(test)]
mod etcd_tokens;
#[cfg(test)]
mod etcdctl;
#[cfg(test)]
mod evening;
#[cfg(test)]
mod expiry;
#[cfg(test)]
mod fatal_requests;
#[cfg(test)]
mod first_minutes;
#[cfg(test)]
mod fleet;
#[cfg(test)]
mod fleet_commands;
#[cfg(test)]
mod followed;
#[cfg(test)]
mod frames;
#[cfg(test)]
mod guessing;
#[cfg(test)]
mod handed_over;
#[cfg(test)]
mod harness;
#[cfg(test)]
mod harness_works;
#[cfg(test)]
mod hygiene;
#[cfg(test)]
mod idle;
#[cfg(test)]
mod idle_clients;
#[cfg(test)]
mod json_pieces;
#[cfg(test)]
mod json_twin;
#[cfg(test)]
mod kept_connections;
#[cfg(test)]
mod kill;
#[cfg(test)]
mod lagging;
#[cfg(test)]
mod large;
#[cfg(test)]
mod learned_policy;
#[cfg(test)]
mod learned_streams;
#[cfg(test)]
mod lent;
#[cfg(test)]
mod listeners;
#[cfg(test)]
mod load;
#[cfg(test)]
mod locks;
#[cfg(test)]
mod logins;
#[cfg(test)]
mod members;
#[cfg(test)]
mod migration;
#[cfg(test)]
#[path = "../model.rs"]
mod model;
#[cfg(test)]
mod model_replay;
#[cfg(test)]
mod monitoring;
#[cfg(test)]
mod muted;
#[cfg(test)]
mod namespaces;
#[cfg(test)]
mod odd_authorities;
#[cfg(test)]
mod operating;
#[cfg(test)]
mod outages;
#[cfg(test)]
mod outlived;
#[cfg(test)]
mod patroni;
#[cfg(test)]
mod peer_trust;
#[cfg(test)]
mod probe_logins;
#[cfg(test)]
mod promotions;
#[cfg(test)]
mod proofs;
#[cfg(test)]
mod proxied;
#[cfg(test)]
mod quorum_lost;
mod raw;
#[cfg(test)]
mod refused_certificates;
#[cfg(test)]
mod reload;
#[cfg(test)]
mod removed;
mod renewals;
#[cfg(test)]
mod replicas;
#[cfg(test)]
mod revocations;
#[cfg(test)]
mod rewatch;
#[cfg(test)]
mod right_member;
#[cfg(test)]
mod rolled;
#[cfg(test)]
mod rolling;
#[cfg(test)]
mod rounds;
#[cfg(test)]
mod signed;
#[cfg(test)]
mod snapshots;
#[cfg(test)]
mod split_members;
#[cfg(test)]
mod steady;
#[cfg(test)]
mod stored_policy;
#[cfg(test)]
mod stories;
#[cfg(test)]
mod storm;
#[cfg(test)]
mod streams;
#[cfg(test)]
mod taken_alike;
#[cfg(test)]
mod tenant_leases;
#[cfg(test)]
mod token_touches;
#[cfg(test)]
mod topology;
#[cfg(test)]
mod traces;
#[cfg(test)]
mod twin;
#[cfg(test)]
mod unread_events;
#[cfg(test)]
mod unread_log;
#[cfg(test)]
mod usage_limits;
#[cfg(test)]
mod way_out;
#[cfg(test)]
mod write_order;
