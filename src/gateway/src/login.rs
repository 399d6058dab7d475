//! Password logins: `authenticate` answers the RPC, `service` runs the check of a password, `limits` is the
//! defence against guesses, `password_sources` asks etcd and the users file,
//! `unsettled_lines` knows whose lines differ between replicas.

pub mod authenticate;
pub mod limits;
pub mod password_sources;
pub mod service;
mod unsettled_lines;
