//! Which member a call is about, where it is about one.
//!
//! Owns: how a client says so: by the listener that it came by, by the host that it named in TLS, or by a header. Must not
//! know: how members are reached. Invariants (rules 23): only calls about one member's own state are led by it; who names
//! a member hears it from that one or not at all; it says nothing of who calls, and lets nobody do more.

use http::HeaderMap;
use http::header::HeaderName;

use crate::gateway::Client;
use crate::identity::MemberId;
use crate::identity::named::NamedMember;
use crate::refusal::Refusal;
use crate::rpc::method::Method;
use crate::upstream::membership::Membership;

/// The member that a single call is about; it goes before what the connection says.
pub const HEADER: HeaderName = HeaderName::from_static("x-keyward-member");

/// The member that this call is about; none where it may be any.
///
/// # Errors
/// There is no such member, or it was never started.
pub fn addressed(
    client: &Client,
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
    if let Some((id, _)) = named.among(known, |(id, name)| (*id, *name)) {
        // At its address there may be another cluster.
        let ours = members.get(id).is_some_and(|member| member.is_ours());
        return if ours { Ok(id) } else { Err(Refusal::NOTHING_SENT) };
    }
    let absent = members.absent.iter().map(|member| (member.id, &*member.name));
    // Nobody has answered yet, or there is nowhere to send it.
    if members.members.is_empty() || named.among(absent, |(id, name)| (*id, *name)).is_some() {
        return Err(Refusal::NOTHING_SENT);
    }
    Err(Refusal::unknown_member(named.as_str()))
}
