//! The member addressed by a call about a single member.
//!
//! Owns: how a client names the member: by listener, by TLS server name, or by a header. Must not know: how
//! members are reached.
//! Invariants (docs/decisions.md#d23): the name directs only calls about a member's own state; a call naming
//! a member is answered by the named member or not at all; the name neither identifies the caller nor grants
//! any right.

use http::HeaderMap;
use http::header::HeaderName;

use crate::ClientConnection;
use keyward_cluster::membership::Membership;
use keyward_etcd::identity::MemberId;
use keyward_etcd::identity::named_member::NamedMember;
use keyward_etcd::refusal::Refusal;
use keyward_etcd::rpc::method::Method;

/// Request header naming the member of a single call; takes precedence over the connection's member.
pub const HEADER: HeaderName = HeaderName::from_static("x-keyward-member");

/// The member addressed by the call; `None` if any member will do.
///
/// # Errors
/// The header is repeated, or the member is unknown, not started, or not reachable as a member of the served
/// cluster.
pub fn addressed(
    client: &ClientConnection,
    method: &Method,
    headers: &HeaderMap,
    members: &Membership,
) -> Result<Option<MemberId>, Refusal> {
    if !method.is_about_one_member() {
        return Ok(None);
    }
    let mut said = headers.get_all(HEADER).iter();
    match (said.next(), said.next()) {
        (None, _) => client.member.as_ref().map(|named| found(named, members)).transpose(),
        (Some(value), None) => {
            let named = value.to_str().ok().and_then(NamedMember::new);
            let Some(named) = named else {
                return Err(Refusal::unknown_member(&String::from_utf8_lossy(value.as_bytes())));
            };
            found(&named, members).map(Some)
        }
        (Some(_), Some(_)) => Err(Refusal::not_canonical("two members are named")),
    }
}

fn found(named: &NamedMember, members: &Membership) -> Result<MemberId, Refusal> {
    let known = members.members.iter().map(|member| (member.id, &*member.name));
    if let Some((id, _)) = named.find_member(known, |(id, name)| (*id, *name)) {
        // Another cluster may answer at the member's address.
        let ours = members.get(id).is_some_and(|member| member.is_ours());
        return if ours { Ok(id) } else { Err(Refusal::NOTHING_SENT) };
    }
    let absent = members.absent.iter().map(|member| (member.id, &*member.name));
    // No member has answered yet, or the named member has no address.
    if members.members.is_empty() || named.find_member(absent, |(id, name)| (*id, *name)).is_some() {
        return Err(Refusal::NOTHING_SENT);
    }
    Err(Refusal::unknown_member(named.as_str()))
}
