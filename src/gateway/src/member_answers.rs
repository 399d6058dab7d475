//! Rewriting member addresses in answers: clients get Keyward's addresses, because the members' own addresses
//! would let clients bypass Keyward.
//!
//! Owns: the list of affected methods, and the splice of `Member.clientURLs`. Must not know: the caller.
//! Invariants: IDs, names, peer URLs, the learner flag and every unknown field keep their original bytes; a
//! member without client URLs (not started) gets no URL; a per-member URL leads to Keyward as well, where
//! only calls about the member itself are pinned to the member.

use bytes::{BufMut, Bytes, BytesMut};

use crate::call::Call;
use keyward_cluster::membership::MembershipHint;
use keyward_etcd::identity::MemberId;
use keyward_etcd::identity::named_member::NamedMember;
use keyward_etcd::refusal::Refusal;
use keyward_etcd::rpc::frame;
use keyward_etcd::rpc::scan::{ScanFault, WireField, WireFields, WireValue, append_bytes_field};
use keyward_etcd::rpc::schema::MessageId;
use keyward_upstream::answer::MemberReply;

/// `Member.ID`, `Member.name` and `Member.clientURLs`.
const ID: u32 = 1;
const NAME: u32 = 2;
const CLIENT_URLS: u32 = 4;

/// Replaces the client URLs in a successful answer with Keyward's own.
///
/// # Errors
/// The answer is too large to be read whole, and would reveal the members' own addresses.
pub fn finish(call: &Call<'_>, answer: &mut MemberReply) -> Result<(), Refusal> {
    if call.method.body != MessageId::MemberListRequest {
        call.gateway.upstream.members.hints.send(MembershipHint::ListChanged);
    }
    let whole = answer.message();
    let message = whole.as_ref().and_then(|framed| framed.get(frame::PREFIX..));
    let snapshot = call.snapshot();
    let urls = snapshot.config.advertise.to_clients_of(&call.client.listener.name);
    let (message, urls) = message.zip(urls).ok_or(Refusal::UNREADABLE_ANSWER)?;
    let rewritten = rewrite(message, member_fields(call.method.body), &urls.members, &urls.client_urls);
    answer.data = [rewritten.map_err(|_| Refusal::UNREADABLE_ANSWER)?].into();
    Ok(())
}

/// The field numbers of the `Member` messages in the answer to a request.
fn member_fields(request: MessageId) -> &'static [u32] {
    // MemberAddResponse: member = 2, members = 3.
    if request == MessageId::MemberAddRequest { &[2, 3] } else { &[2] }
}

/// Replaces the members' client URLs by each member's entry in `urls`, or by the `shared` URLs. Returns the
/// framed answer.
///
/// # Errors
/// The member's answer is not valid protobuf.
fn rewrite(
    message: &[u8],
    members: &[u32],
    urls: &[(NamedMember, Vec<String>)],
    shared: &[String],
) -> Result<Bytes, ScanFault> {
    let mut out = BytesMut::with_capacity(message.len() + 64);
    for field in WireFields::new(message) {
        let field = field?;
        match field.value {
            WireValue::Bytes(member) if members.contains(&field.number) => {
                append_bytes_field(&mut out, field.number, &rewrite_member(member, urls, shared)?);
            }
            _ => out.put_slice(&message[field.range]),
        }
    }
    Ok(frame::encode(&out))
}

fn rewrite_member(
    member: &[u8],
    urls: &[(NamedMember, Vec<String>)],
    shared: &[String],
) -> Result<BytesMut, ScanFault> {
    let (id, name) = who(member)?;
    let urls = NamedMember::find_row(urls, id, &name).map_or(shared, Vec::as_slice);
    let mut out = BytesMut::with_capacity(member.len());
    let mut written = false;
    for field in WireFields::new(member) {
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

fn who(member: &[u8]) -> Result<(MemberId, String), ScanFault> {
    let (mut id, mut name) = (MemberId(0), String::new());
    for field in WireFields::new(member) {
        match field? {
            WireField { number: ID, value: WireValue::Varint(told), .. } => id = MemberId(told),
            WireField { number: NAME, value: WireValue::Bytes(told), .. } => {
                name = String::from_utf8_lossy(told).into_owned();
            }
            _ => {}
        }
    }
    Ok((id, name))
}

#[cfg(test)]
mod tests {
    use prost::Message as _;

    use super::*;
    use keyward_etcd::pb::etcdserverpb::{Member, MemberListResponse};

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
        let out = rewrite(&sent, &[2], &[], &["http://keyward:2379".into()]).expect("rewritten");
        let seen = MemberListResponse::decode(&out[5..]).expect("decodes");
        assert_eq!(seen.members[0], Member { client_ur_ls: vec!["http://keyward:2379".into()], ..member });
        assert_eq!(seen.members[1], unstarted);
        assert!(out.ends_with(&[0xfa, 0x06, 1, 9]));
    }

    #[test]
    fn a_member_with_urls_of_its_own_is_told_those() {
        let started = |id, name: &str| Member {
            id,
            name: name.into(),
            client_ur_ls: vec!["http://a:2379".into()],
            ..Member::default()
        };
        let members = vec![started(7, "m1"), started(8, "m2"), started(9, "m3")];
        let sent = MemberListResponse { header: None, members }.encode_to_vec();
        let urls = |url: &str| vec![url.to_owned()];
        let own = [("m1", urls("http://k:1")), ("8", urls("http://k:2"))]
            .map(|(name, urls)| (NamedMember::new(name).expect("a name"), urls));
        let out = rewrite(&sent, &[2], &own, &urls("http://k:9")).expect("rewritten");
        let seen = MemberListResponse::decode(&out[5..]).expect("decodes");
        let seen: Vec<_> = seen.members.iter().map(|member| &member.client_ur_ls[0]).collect();
        assert_eq!(seen, ["http://k:1", "http://k:2", "http://k:9"]);
    }
}
