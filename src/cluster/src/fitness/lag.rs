//! Writes lag and nearness into each member's shared state, read by the data path beside the snapshot.
//!
//! Owns: a member's lag, its nearness, the slow start of a member that takes no traffic. Must not know: the
//! use of the values when a member is chosen.

use crate::membership::{Member, Membership, Readiness};

/// Updates every member of `members`. `near` contains member names and hosts of addresses.
pub fn place(members: &Membership, near: &[String]) {
    for member in &members.members {
        let lag = members.lag(member).unwrap_or(0);
        member.load.set_lag_and_nearness(lag, near.iter().any(|named| is_named(member, named)));
        if member.readiness != Readiness::Ready {
            member.load.begin_slow_start();
        }
    }
}

fn is_named(member: &Member, named: &str) -> bool {
    *member.name == *named || member.endpoint.host == named || member.endpoint.authority() == named
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tokio::time::Instant;

    use super::*;
    use crate::fitness::store_status::StoreStatus;
    use crate::test_member::member;

    #[test]
    fn lag_is_counted_from_the_member_that_is_furthest() {
        let applied = |id, applied| {
            let mut member = Member::clone(&member(id, Readiness::Ready));
            let store_status = StoreStatus { applied, ..StoreStatus::default() };
            member.store_status = Some(Arc::new(store_status));
            Arc::new(member)
        };
        let silent = member(3, Readiness::Ready);
        let members = vec![applied(1, 500), applied(2, 20), silent];
        let members = Membership { members, ..Membership::unknown(Instant::now()) };
        place(&members, &[]);
        let lags: Vec<u64> = members.members.iter().map(|member| member.load.lag()).collect();
        assert_eq!(lags, [0, 480, 0], "who does not tell is not held to it");
    }

    #[test]
    fn near_is_who_is_named_by_name_host_or_address() {
        let members = vec![member(1, Readiness::Ready)];
        let members = Membership { members, ..Membership::unknown(Instant::now()) };
        for (named, near) in
            [("m", true), ("127.0.0.1", true), ("127.0.0.1:1", true), ("127.0.0.1:2", false), ("", false)]
        {
            place(&members, &[named.to_owned()]);
            assert_eq!(members.members[0].load.is_near(), near, "{named}");
        }
    }
}
