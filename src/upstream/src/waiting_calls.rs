//! The calls of one shard that wait for an answer, by member and address.
//!
//! Owns: the calls to notify when a member leaves, moves or hangs. Must not know: why a call waits.

use std::cell::RefCell;
use std::net::IpAddr;
use std::rc::Rc;

use tokio::sync::Notify;

use keyward_cluster::membership::{ConnectionTarget, Member, Membership};
use keyward_config::Endpoint;
use keyward_etcd::identity::MemberId;

/// The waiting calls of one shard, by member and address; notified when the calls should check if waiting
/// still makes sense.
#[derive(Default)]
pub struct WaitingCalls(pub(super) RefCell<Vec<WaitersAtMember>>);

/// A member and address at which calls wait.
pub(super) struct WaitersAtMember {
    member: MemberId,
    endpoint: Endpoint,
    at: Option<IpAddr>,
    spot: ConnectionTarget,
    told: Rc<Notify>,
}

impl WaitersAtMember {
    /// Compares the endpoint as written; comparing the resolved target would cost each call more.
    fn is_of(&self, member: &Member) -> bool {
        self.member == member.id && self.at == member.resolved_ip && self.endpoint == member.endpoint
    }
}

impl WaitingCalls {
    /// Returns the notifier for calls waiting for `member` at the member's current address.
    #[must_use]
    pub fn at(&self, member: &Member) -> Rc<Notify> {
        let mut all = self.0.borrow_mut();
        if let Some(place) = all.iter().find(|place| place.is_of(member)) {
            return Rc::clone(&place.told);
        }
        let told = Rc::new(Notify::new());
        let (endpoint, spot) = (member.endpoint.clone(), member.connection_target());
        all.push(WaitersAtMember {
            member: member.id,
            endpoint,
            at: member.resolved_ip,
            spot,
            told: Rc::clone(&told),
        });
        told
    }

    pub(super) fn tell(&self, member: MemberId) {
        let all = self.0.borrow();
        all.iter().filter(|place| place.member == member).for_each(|place| place.told.notify_waiters());
    }

    /// Notifies calls waiting at an address without a member: the member was removed, or moved.
    pub(super) fn notify_displaced_calls(&self, members: &Membership) {
        self.0.borrow_mut().retain(|place| {
            let is_there =
                members.get(place.member).is_some_and(|member| member.connection_target() == place.spot);
            if !is_there {
                place.told.notify_waiters();
            }
            // Drop the entry if no call waits: this list then holds the only reference.
            is_there || Rc::strong_count(&place.told) > 1
        });
    }
}

/// True if `member` is still ready, at the address at which the call waits.
#[must_use]
pub fn is_still_served(members: &Membership, member: &Member) -> bool {
    members
        .get(member.id)
        .is_some_and(|now| now.is_ready() && now.connection_target() == member.connection_target())
}
