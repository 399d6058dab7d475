//! A member is found at another address: what leads to the first is given up, which says nothing of the member.

use std::rc::Rc;
use std::sync::Arc;

use keyward::members::membership;
use keyward::tasks::Tasks;

use crate::member::Member;
use crate::revocations::{next, watching};
use crate::rig::{Keyward, paused, settled};
use crate::words::WATCH;

#[test]
fn streams_that_are_given_up_raise_no_suspicion_of_the_member() {
    paused(async {
        let member = Rc::new(Member::new(1, &Tasks::default()));
        let mut keyward = Keyward::before(&[&member]);
        let client = keyward.client().await;
        let (_stream, mut call) = watching(&client, &member).await;
        keyward.publish(|members| {
            let mut moved = membership::Member::clone(&members.members[0]);
            // The very same member for all that can be told: also what is suspected of it.
            moved.endpoint.port += 1;
            members.members[0] = Arc::new(moved);
        });
        call.canceled().await;
        // The only member there is: with a suspicion it would have to wait for a probe.
        let again = next(&member, WATCH).await;
        settled().await;
        assert!(keyward.members.snapshot.load().members[0].is_ready());
        let hints: Vec<_> = std::iter::from_fn(|| keyward.hints.try_recv().ok()).collect();
        assert!(hints.is_empty(), "{hints:?}");
        drop(again);
    });
}
