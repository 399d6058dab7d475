//! Answers that name members' addresses: they name ours instead, or clients would go past us.
//!
//! Owns: which methods those are, and the splice of `Member.clientURLs`. Must not know who asked. Invariant: ids,
//! names, peer URLs, the learner flag and every unknown field cross as the bytes they came in; a member that has no
//! client URL yet (not started) gets none.

use bytes::{BufMut, Bytes, BytesMut};

use crate::rpc::frame;
use crate::rpc::scan::{Fields, ScanFault, Value, append_bytes_field};

/// `Member.clientURLs`.
const CLIENT_URLS: u32 = 4;

/// Where an answer's `Member` messages stand: their field numbers.
#[must_use]
pub fn member_fields(path: &str) -> Option<&'static [u32]> {
    match path {
        // MemberAddResponse: member = 2, members = 3.
        "/etcdserverpb.Cluster/MemberAdd" => Some(&[2, 3]),
        "/etcdserverpb.Cluster/MemberRemove"
        | "/etcdserverpb.Cluster/MemberUpdate"
        | "/etcdserverpb.Cluster/MemberList"
        | "/etcdserverpb.Cluster/MemberPromote" => Some(&[2]),
        _ => None,
    }
}

/// The framed answer with the members' client URLs replaced by `urls`.
///
/// # Errors
/// The member's answer is not protobuf as we know it.
pub fn rewrite(message: &[u8], members: &[u32], urls: &[String]) -> Result<Bytes, ScanFault> {
    let mut out = BytesMut::with_capacity(message.len() + 64);
    for field in Fields::new(message) {
        let field = field?;
        match field.value {
            Value::Bytes(member) if members.contains(&field.number) => {
                append_bytes_field(&mut out, field.number, &rewrite_member(member, urls)?);
            }
            _ => out.put_slice(&message[field.range]),
        }
    }
    Ok(frame::encode(&out))
}

fn rewrite_member(member: &[u8], urls: &[String]) -> Result<BytesMut, ScanFault> {
    let mut out = BytesMut::with_capacity(member.len());
    let mut written = false;
    for field in Fields::new(member) {
        let field = field?;
        if field.number != CLIENT_URLS {
            out.put_slice(&member[field.range]);
        } else if !written {
            written = true;
            for url in urls {
                append_bytes_field(&mut out, CLIENT_URLS, url.as_bytes());
            }
        }
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use prost::Message as _;

    use super::*;
    use crate::pb::etcdserverpb::{Member, MemberListResponse};

    #[test]
    fn members_keep_everything_but_their_client_urls() {
        let member = Member {
            id: 7,
            name: "m1".into(),
            peer_ur_ls: vec!["http://a:2380".into()],
            client_ur_ls: vec!["http://a:2379".into(), "http://b:2379".into()],
            is_learner: true,
        };
        let unstarted = Member { id: 8, ..Member::default() };
        let mut sent = MemberListResponse { header: None, members: vec![member.clone(), unstarted.clone()] }
            .encode_to_vec();
        sent.extend_from_slice(&[0xfa, 0x06, 1, 9]); // field 111, unknown
        let out = rewrite(&sent, &[2], &["http://keyward:2379".into()]).expect("rewritten");
        let seen = MemberListResponse::decode(&out[5..]).expect("decodes");
        assert_eq!(seen.members[0], Member { client_ur_ls: vec!["http://keyward:2379".into()], ..member });
        assert_eq!(seen.members[1], unstarted);
        assert!(out.ends_with(&[0xfa, 0x06, 1, 9]));
    }
}
