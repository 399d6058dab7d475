//! The hashes of the members' stores: they tell members that have come to differ from members that are alike.
//!
//! Owns: the members asked, the common revision, the second round, the limits of the cost, and which hashes
//! may be compared. Must not know: the credential of a question, the consequence of a difference.
//! Invariants: one member at a time is asked, a ready voter with a store of at most `LARGEST` bytes; a
//! difference counts only if a second round, at a revision of its own, shows a difference too; hashes of
//! different compactions are never compared, because compacted revisions are left out of a hash.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{sleep, timeout};
use tonic::metadata::AsciiMetadataValue;
use tonic::transport::Channel;

use super::probe::{ProbeCallError, heard, with_token};
use crate::fitness::LAG;
use crate::membership::{Member, Membership, Role};
use crate::version::Version;
use keyward_etcd::identity::MemberId;
use keyward_etcd::pb::etcdserverpb::HashKvRequest;
use keyward_etcd::pb::etcdserverpb::maintenance_client::MaintenanceClient;

/// Time limit of one question. A member hashes 400 MB in some 70 ms.
const LIMIT: Duration = Duration::from_secs(5);
/// Time limit of both rounds.
const BOTH_ROUNDS: Duration = Duration::from_secs(20);
/// Used bytes of the largest store that is hashed without being told to.
const LARGEST: u64 = 2 << 30;
/// Pause before the second round, in which every member is probed again.
const BETWEEN_ROUNDS: Duration = Duration::from_secs(1);

/// A member's answer to HashKV.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HashAnswer {
    /// The hash of the store behind the revision asked for.
    Hash {
        /// The hash.
        hash: u32,
        /// The revision of the member's last compaction; not above 0 without a compaction.
        compact_revision: i64,
    },
    /// etcd tells the hash to the role `root` alone, and the caller does not have the role.
    Denied,
    /// The member does not know the token.
    BadToken,
    /// The revision is compacted, or to come.
    OtherRevision,
    /// No answer about the store.
    Nothing,
}

/// The hash of one member's store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreHash {
    /// The member.
    pub member: MemberId,
    /// The member's version.
    pub version: Option<Version>,
    /// The revision of the member's last compaction.
    pub compact_revision: i64,
    /// The hash.
    pub hash: u32,
}

/// Why the hash of a member's store is unknown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HashObstacle {
    /// The store is larger than Keyward has hashed.
    Large,
    /// The member did not answer in time, or not about the store.
    NoAnswer,
    /// The member has compacted the common revision, or does not have the revision yet.
    OtherRevision,
}

/// The hashes of the members' stores behind one revision.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StoreHashes {
    /// The revision.
    pub revision: i64,
    /// The hashes.
    pub hashes: Vec<StoreHash>,
    /// Members without a hash. Empty if etcd denies the hashes to the caller.
    pub unread: Vec<(MemberId, HashObstacle)>,
}

impl StoreHashes {
    /// The hashes in groups that may be compared: of equal compactions. Where the common revision is the
    /// compacted one, versions before etcd-io/etcd#18274 leave out a deletion there that later ones keep, so
    /// that only equal versions are compared.
    #[must_use]
    pub fn comparable(&self) -> Vec<Vec<&StoreHash>> {
        let key = |one: &StoreHash| {
            let compacted = one.compact_revision.max(0);
            (compacted, one.version.filter(|_| compacted == self.revision))
        };
        let mut hashes: Vec<_> = self.hashes.iter().collect();
        hashes.sort_by_key(|one| (key(one), one.member));
        hashes.chunk_by(|one, next| key(one) == key(next)).map(<[_]>::to_vec).collect()
    }

    /// True if members with comparable hashes have different hashes.
    #[must_use]
    fn has_difference(&self) -> bool {
        self.comparable().iter().any(|group| group.windows(2).any(|pair| pair[0].hash != pair[1].hash))
    }

    /// True if another revision may tell more.
    fn is_inconclusive(&self) -> bool {
        let has_moved = self.unread.iter().any(|(_, why)| *why == HashObstacle::OtherRevision);
        has_moved || self.comparable().len() > 1 || self.has_difference()
    }
}

/// Reads the hashes of the ready voters, by `ask`, at a revision that every one of them has applied. A second
/// round follows if the first one shows a difference, or finds the revision compacted.
pub async fn read_hashes(
    snapshot: impl Fn() -> Arc<Membership>,
    ask: impl AsyncFn(MemberId, i64) -> HashAnswer,
) -> StoreHashes {
    let rounds = async {
        let first = read_round(&snapshot, &ask).await;
        if !first.is_inconclusive() {
            return first;
        }
        sleep(BETWEEN_ROUNDS).await;
        read_round(&snapshot, &ask).await
    };
    let late = || StoreHashes {
        unread: asked_members(&snapshot()).iter().map(|one| (one.id, HashObstacle::NoAnswer)).collect(),
        ..StoreHashes::default()
    };
    timeout(BOTH_ROUNDS, rounds).await.unwrap_or_else(|_| late())
}

/// The members whose stores are compared: those whose last Status tells a revision. A voter far behind would
/// hold the common revision back.
fn asked_members(membership: &Membership) -> Vec<Arc<Member>> {
    let is_asked = |member: &&Arc<Member>| {
        member.role == Role::Voter
            && membership.lag(member).is_some_and(|lag| lag <= LAG)
            && member.store_status.as_ref().is_some_and(|status| status.revision > 0)
    };
    membership.ready_voters().filter(is_asked).cloned().collect()
}

async fn read_round(
    snapshot: &impl Fn() -> Arc<Membership>,
    ask: &impl AsyncFn(MemberId, i64) -> HashAnswer,
) -> StoreHashes {
    let in_use = |member: &Member| member.store_status.as_ref().map_or(0, |status| status.db_in_use);
    let (asked, large): (Vec<_>, Vec<_>) =
        asked_members(&snapshot()).into_iter().partition(|member| in_use(member) <= LARGEST);
    let mut read = StoreHashes {
        unread: large.iter().map(|member| (member.id, HashObstacle::Large)).collect(),
        ..StoreHashes::default()
    };
    let revisions = asked.iter().filter_map(|member| Some(member.store_status.as_ref()?.revision));
    let Some(revision) = revisions.min().filter(|_| asked.len() > 1) else { return read };
    read.revision = revision;
    for member in asked {
        // The member may have left meanwhile, or be about to.
        let stays = |member: &Arc<Member>| member.is_ready() && !member.maintenance.is_being_removed();
        if !snapshot().get(member.id).is_some_and(stays) {
            continue;
        }
        match ask(member.id, revision).await {
            HashAnswer::Hash { hash, compact_revision } => {
                let (member, version) = (member.id, member.version);
                read.hashes.push(StoreHash { member, version, compact_revision, hash });
            }
            // So does every member.
            HashAnswer::Denied | HashAnswer::BadToken => return StoreHashes::default(),
            HashAnswer::OtherRevision => read.unread.push((member.id, HashObstacle::OtherRevision)),
            HashAnswer::Nothing => read.unread.push((member.id, HashObstacle::NoAnswer)),
        }
    }
    read
}

/// Asks one member for the hash of its store behind `revision`.
pub async fn hash_kv(channel: Channel, token: Option<AsciiMetadataValue>, revision: i64) -> HashAnswer {
    let request = with_token(HashKvRequest { revision }, token);
    let mut client = MaintenanceClient::new(channel);
    match timeout(LIMIT, client.hash_kv(request)).await {
        Ok(Ok(answer)) => {
            let answer = answer.into_inner();
            HashAnswer::Hash { hash: answer.hash, compact_revision: answer.compact_revision }
        }
        Ok(Err(status)) => match status.message() {
            "etcdserver: mvcc: required revision has been compacted"
            | "etcdserver: mvcc: required revision is a future revision" => HashAnswer::OtherRevision,
            _ => match heard(&status) {
                ProbeCallError::NoUser | ProbeCallError::Denied => HashAnswer::Denied,
                ProbeCallError::BadToken => HashAnswer::BadToken,
                _ => HashAnswer::Nothing,
            },
        },
        Err(_) => HashAnswer::Nothing,
    }
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};

    use tokio::time::Instant;

    use super::*;
    use crate::fitness::store_status::StoreStatus;
    use crate::membership::Readiness;
    use keyward_config::{Endpoint, Scheme};

    fn member(id: u64, revision: i64, db_in_use: u64) -> Arc<Member> {
        Arc::new(Member {
            id: MemberId(id),
            name: format!("m{id}").into(),
            endpoint: Endpoint { scheme: Scheme::Http, host: "127.0.0.1".into(), port: 2379 },
            resolved_ip: None,
            role: Role::Voter,
            version: Version::parse("3.5.35").ok(),
            readiness: Readiness::Ready,
            term: 2,
            store_status: Some(Arc::new(StoreStatus { revision, db_in_use, ..StoreStatus::default() })),
            client_urls: Arc::default(),
            suspicion: Arc::default(),
            maintenance: Arc::default(),
            load: Arc::default(),
        })
    }

    fn cluster(members: Vec<Arc<Member>>) -> Arc<Membership> {
        Arc::new(Membership { members, ..Membership::unknown(Instant::now()) })
    }

    /// Reads by a script of answers by member; returns also the questions, and the most that ran at a time.
    async fn read(
        members: Vec<Arc<Member>>,
        answer: impl Fn(u64, usize) -> HashAnswer,
    ) -> (StoreHashes, Vec<(u64, i64)>, usize) {
        let (asked, running, most) = (RefCell::new(Vec::new()), Cell::new(0), Cell::new(0));
        let membership = cluster(members);
        let ask = async |member: MemberId, revision| {
            running.set(running.get() + 1);
            most.set(most.get().max(running.get()));
            sleep(Duration::from_millis(1)).await;
            let round = asked.borrow().iter().filter(|(one, _)| *one == member.0).count();
            asked.borrow_mut().push((member.0, revision));
            running.set(running.get() - 1);
            answer(member.0, round)
        };
        let read = read_hashes(|| Arc::clone(&membership), ask).await;
        (read, asked.into_inner(), most.get())
    }

    const ALIKE: HashAnswer = HashAnswer::Hash { hash: 7, compact_revision: 2 };
    const OTHER: HashAnswer = HashAnswer::Hash { hash: 8, compact_revision: 2 };
    const GIB: u64 = 1 << 30;

    #[tokio::test(start_paused = true)]
    async fn members_are_asked_once_one_at_a_time_at_a_revision_of_all() {
        let (hashes, asked, most) =
            read(vec![member(1, 9, 1), member(2, 7, 1), member(3, 8, 1)], |_, _| ALIKE).await;
        assert_eq!((asked, most), (vec![(1, 7), (2, 7), (3, 7)], 1));
        assert_eq!((hashes.revision, hashes.hashes.len(), hashes.has_difference()), (7, 3, false));
    }

    #[tokio::test(start_paused = true)]
    async fn a_difference_is_one_only_if_it_is_seen_twice() {
        let three = || (1..4).map(|id| member(id, 7, 1)).collect::<Vec<_>>();
        let differs = |member, _| if member == 3 { OTHER } else { ALIKE };
        let (hashes, asked, _) = read(three(), differs).await;
        assert!(hashes.has_difference() && asked.len() == 6, "{hashes:?} {asked:?}");
        let once = |member, round| if (member, round) == (3, 0) { OTHER } else { ALIKE };
        let (hashes, asked, _) = read(three(), once).await;
        assert!(!hashes.has_difference() && asked.len() == 6, "{hashes:?} {asked:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_revision_that_is_gone_or_to_come_is_replaced_once() {
        let three = || (1..4).map(|id| member(id, 7, 1)).collect::<Vec<_>>();
        let moved = |member, round| if (member, round) == (2, 0) { HashAnswer::OtherRevision } else { ALIKE };
        let (hashes, asked, _) = read(three(), moved).await;
        assert_eq!((asked.len(), hashes.hashes.len(), hashes.unread), (6, 3, Vec::new()));
        let always = |member, _| if member == 2 { HashAnswer::OtherRevision } else { ALIKE };
        let (hashes, asked, _) = read(three(), always).await;
        assert_eq!((asked.len(), hashes.hashes.len()), (6, 2));
        assert_eq!(hashes.unread, [(MemberId(2), HashObstacle::OtherRevision)]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_denial_is_heard_once_and_nothing_is_read() {
        let (hashes, asked, _) =
            read((1..4).map(|id| member(id, 7, 1)).collect(), |_, _| HashAnswer::Denied).await;
        assert_eq!((hashes, asked.len()), (StoreHashes::default(), 1));
    }

    #[tokio::test(start_paused = true)]
    async fn large_stores_learners_laggards_and_lone_members_are_not_asked() {
        let large = read(vec![member(1, 7, 3 * GIB), member(2, 7, 2 * GIB), member(3, 7, 1)], |_, _| ALIKE);
        let (hashes, asked, _) = large.await;
        assert_eq!(asked, [(2, 7), (3, 7)]);
        assert_eq!(hashes.unread, [(MemberId(1), HashObstacle::Large)]);
        let mut others = vec![member(1, 7, 1), member(2, 7, 1), member(3, 7, 1), member(4, 7, 1)];
        Arc::make_mut(&mut others[1]).role = Role::Learner;
        Arc::make_mut(&mut others[2]).store_status = None;
        let behind = StoreStatus { applied: 20_000, revision: 7, ..StoreStatus::default() };
        Arc::make_mut(&mut others[3]).store_status = Some(Arc::new(behind));
        // Only the member furthest ahead is left, and has nobody to be compared with.
        assert_eq!(read(others, |_, _| ALIKE).await.1, []);
    }

    #[tokio::test(start_paused = true)]
    async fn silent_members_take_a_bounded_time() {
        let begun = Instant::now();
        let membership = cluster((1..10).map(|id| member(id, 7, 1)).collect());
        let silent = async |_, _| {
            sleep(LIMIT).await;
            HashAnswer::Nothing
        };
        let hashes = read_hashes(|| Arc::clone(&membership), silent).await;
        assert_eq!((begun.elapsed(), hashes.unread.len()), (BOTH_ROUNDS, 9));
    }

    #[test]
    fn only_hashes_of_one_compaction_are_compared() {
        let old = Version::parse("3.5.10").ok();
        let of = |member, compact_revision, hash, version| StoreHash {
            member: MemberId(member),
            version,
            compact_revision,
            hash,
        };
        let differ = |revision, hashes: &[StoreHash]| {
            StoreHashes { revision, hashes: hashes.to_vec(), unread: Vec::new() }.has_difference()
        };
        let new = Version::parse("3.5.35").ok();
        assert!(!differ(9, &[of(1, 2, 7, new), of(2, 2, 7, new), of(3, 2, 7, old)]));
        assert!(differ(9, &[of(1, 2, 7, new), of(2, 2, 8, new), of(3, 2, 7, new)]));
        assert!(differ(9, &[of(1, 2, 7, new), of(2, 2, 8, old)]));
        assert!(!differ(9, &[of(1, 2, 7, new), of(2, 3, 8, new)]));
        assert!(differ(9, &[of(1, -1, 7, new), of(2, 0, 8, new)]), "never compacted");
        assert!(!differ(9, &[of(1, 9, 7, old), of(2, 9, 8, new)]), "a deletion is kept by one of them");
        assert!(differ(9, &[of(1, 9, 7, new), of(2, 9, 8, new)]));
        assert!(!differ(9, &[of(1, 2, 7, new)]));
    }
}
