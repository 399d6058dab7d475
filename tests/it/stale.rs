//! What is known of the members grows old: readiness says so, and calls go on by what was known last.

use std::time::Duration;

use keyward::admin::status::ReplicaState;
use keyward::tasks::Tasks;
use tokio::time::Instant;

use crate::member::Member;
use crate::rig::{Keyward, paused};
use crate::words::{RANGE, range, ranged};

#[test]
fn readiness_ends_when_no_member_has_confirmed_for_long_and_calls_go_on() {
    paused(async {
        let member = Member::new(1, &Tasks::default());
        let keyward = Keyward::before(&[&member]);
        let admin = keyward.admin();
        let state = || admin.state.status().replica.state;
        keyward.publish(|members| members.confirmed = Instant::now());
        assert_eq!(state(), ReplicaState::Serving);
        tokio::time::sleep(Duration::from_secs(20)).await;
        assert_eq!(state(), ReplicaState::Serving);
        tokio::time::sleep(Duration::from_millis(2)).await;
        assert_eq!(state(), ReplicaState::NotReady);
        let client = keyward.client().await;
        let (outcome, ()) = tokio::join!(client.call(RANGE, range("k")), async {
            member.called(RANGE).await.reply(&ranged(5)).await;
        });
        outcome.message();
        keyward.publish(|members| members.confirmed = Instant::now());
        assert_eq!(state(), ReplicaState::Serving);
    });
}
