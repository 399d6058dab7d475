//! How many streams a member carries is known by what they are, from their beginning to their end.

use keyward::members::fitness::stream_counts::StreamCounts;

use crate::rig::{self, one_member, paused, settled};
use crate::words::{RANGE, range, ranged};

const OBSERVE: &str = "/v3electionpb.Election/Observe";

#[test]
fn streams_of_a_member_are_counted_from_their_beginning_to_their_end() {
    paused(async {
        let (member, keyward) = one_member();
        let counts = || keyward.members.snapshot.load().members[0].load.streams().counts();
        let client = keyward.client().await;
        assert_eq!(counts(), StreamCounts::default());

        let (watching, watched) = rig::watching(&client, &member).await;
        assert_eq!(counts(), StreamCounts { watches: 1, ..StreamCounts::default() });

        let (renewing, renewals) = rig::renewing(&client, &member).await;
        let observing = client.begin(OBSERVE, []).await.expect("sent");
        let observed = member.called(OBSERVE).await;
        settled().await;
        assert_eq!(counts(), StreamCounts { watches: 1, keepalives: 1, others: 1 });

        // A short call is none.
        let short = client.begin(RANGE, range("k")).await.expect("sent");
        let call = member.called(RANGE).await;
        assert_eq!(counts(), StreamCounts { watches: 1, keepalives: 1, others: 1 });
        call.reply(&ranged(1)).await;
        short.finish().await.message();

        drop((watching, watched));
        settled().await;
        assert_eq!(counts(), StreamCounts { watches: 0, keepalives: 1, others: 1 });
        drop((client, renewing, observing, renewals, observed));
        settled().await;
        assert_eq!(counts(), StreamCounts::default());
    });
}
