//! The simulation: seeds × faults, through the session, the source and the hub as they are shipped.
//!
//! `run` makes a world of one seed, `steps` shakes it, `cluster` and `wire` are the members that the model of
//! `tests/model` speaks for, `client` is who watches, `checker` holds what it saw against `truth`. Two seams only: the
//! connector and the incoming connections. `KEYWARD_SEEDS=n` runs n seeds, `KEYWARD_SEED=n` repeats one and tells all.

#[cfg(test)]
#[path = "../model.rs"]
mod model;

#[cfg(test)]
mod checker;
#[cfg(test)]
mod client;
#[cfg(test)]
mod cluster;
#[cfg(test)]
mod counts;
#[cfg(test)]
mod dice;
#[cfg(test)]
mod rig;
#[cfg(test)]
mod run;
#[cfg(test)]
mod seeds;
#[cfg(test)]
mod steps;
#[cfg(test)]
mod truth;
#[cfg(test)]
mod wire;
