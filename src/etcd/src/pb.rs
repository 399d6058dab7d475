//! The etcd API as Rust types, generated from `proto/`, and its descriptors.
//!
//! Owns: messages and tonic clients of every etcd service and of gRPC's health service. Messages are for
//! control work; the data path forwards bytes, because decoding and encoding loses unknown fields. Invariant:
//! `Debug` of a message with a password or a token never shows the secret; a login's password is wiped on
//! drop.

use std::fmt;

use zeroize::Zeroize;

/// The `FileDescriptorSet` of `proto/`, encoded.
pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));

pub use generated::{authpb, etcdserverpb, health, mvccpb, v3electionpb, v3lockpb};

#[expect(
    missing_docs,
    unused_qualifications,
    clippy::allow_attributes_without_reason,
    reason = "generated; the words are in proto/"
)]
mod generated {
    /// KV, Watch, Lease, Cluster, Maintenance and Auth.
    pub mod etcdserverpb {
        tonic::include_proto!("etcdserverpb");
    }

    /// Keys and events.
    pub mod mvccpb {
        tonic::include_proto!("mvccpb");
    }

    /// Permissions and user options.
    pub mod authpb {
        tonic::include_proto!("authpb");
    }

    /// The Lock service.
    pub mod v3lockpb {
        tonic::include_proto!("v3lockpb");
    }

    /// The Election service.
    pub mod v3electionpb {
        tonic::include_proto!("v3electionpb");
    }

    /// gRPC's health service.
    pub mod health {
        tonic::include_proto!("grpc.health.v1");
    }
}

/// The only message with a password decoded or encoded by Keyward; all further messages are forwarded as
/// bytes.
impl Zeroize for etcdserverpb::AuthenticateRequest {
    fn zeroize(&mut self) {
        self.password.zeroize();
    }
}

impl Drop for etcdserverpb::AuthenticateRequest {
    fn drop(&mut self) {
        self.zeroize();
    }
}

/// Replaces a secret in `Debug`.
const HIDDEN: &str = "…";

impl fmt::Debug for etcdserverpb::AuthenticateRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AuthenticateRequest").field("name", &self.name).field("password", &HIDDEN).finish()
    }
}

impl fmt::Debug for etcdserverpb::AuthenticateResponse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AuthenticateResponse").field("header", &self.header).field("token", &HIDDEN).finish()
    }
}

impl fmt::Debug for etcdserverpb::AuthUserAddRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AuthUserAddRequest")
            .field("name", &self.name)
            .field("password", &HIDDEN)
            .field("options", &self.options)
            .field("hashed_password", &HIDDEN)
            .finish()
    }
}

impl fmt::Debug for etcdserverpb::AuthUserChangePasswordRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AuthUserChangePasswordRequest")
            .field("name", &self.name)
            .field("password", &HIDDEN)
            .field("hashed_password", &HIDDEN)
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use prost::Message as _;

    use super::*;

    #[test]
    fn no_secret_is_shown_by_debug() {
        let secret = "hunter2".to_owned();
        let shown = format!(
            "{:?} {:?} {:?} {:?}",
            etcdserverpb::AuthenticateRequest { name: "alice".into(), password: secret.clone() },
            etcdserverpb::AuthenticateResponse { token: secret.clone(), ..Default::default() },
            etcdserverpb::AuthUserAddRequest {
                name: "bob".into(),
                password: secret.clone(),
                hashed_password: secret.clone(),
                ..Default::default()
            },
            etcdserverpb::AuthUserChangePasswordRequest {
                name: "carol".into(),
                password: secret.clone(),
                hashed_password: secret.clone(),
            },
        );
        assert!(!shown.contains(&secret), "{shown}");
        for name in ["alice", "bob", "carol"] {
            assert!(shown.contains(name), "{shown}");
        }
    }

    #[test]
    fn a_login_is_wiped() {
        let mut login =
            etcdserverpb::AuthenticateRequest { name: "alice".into(), password: "hunter2".into() };
        login.zeroize();
        assert_eq!((login.name.as_str(), login.password.as_str()), ("alice", ""));
    }

    /// Every message with a secret field, judged by the field's name, must have a hand-written `Debug` above.
    #[test]
    fn every_message_with_a_secret_is_covered() {
        let set = prost_types::FileDescriptorSet::decode(DESCRIPTORS).unwrap();
        let mut found = Vec::new();
        for message in set.file.iter().flat_map(|file| &file.message_type) {
            let secret = |name: &str| name.to_lowercase().ends_with("password") || name == "token";
            if message.field.iter().any(|f| secret(f.name()) && f.r#type() == string()) {
                found.push(message.name().to_owned());
            }
        }
        found.sort();
        let covered = [
            "AuthUserAddRequest",
            "AuthUserChangePasswordRequest",
            "AuthenticateRequest",
            "AuthenticateResponse",
        ];
        assert_eq!(found, covered);
    }

    fn string() -> prost_types::field_descriptor_proto::Type {
        prost_types::field_descriptor_proto::Type::String
    }

    #[test]
    fn numbers_are_those_of_the_wire() {
        let compare = etcdserverpb::Compare { range_end: "z".into(), ..Default::default() };
        assert_eq!(compare.encode_to_vec(), b"\x82\x04\x01z");
        let response = etcdserverpb::WatchResponse {
            watch_id: -1,
            events: vec![mvccpb::Event::default()],
            ..Default::default()
        };
        assert_eq!(response.encode_to_vec(), b"\x10\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01\x5a\x00");
    }
}
