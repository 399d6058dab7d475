//! What is worth a line in the log between two snapshots.
//!
//! Owns: the comparison and the words. Must not know: how either came about.
//! Invariant: two snapshots that differ in times and raft indexes only have no changes.

use crate::config::Endpoint;
use crate::identity::{ClusterId, MemberId};
use crate::upstream::membership::{Absent, Foreign, Member, Membership, Readiness, Reason, Role, Serving};
use crate::upstream::version::Version;

/// One difference.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Change {
    Pinned(ClusterId),
    /// Another cluster than the one that is served answers somewhere, which was not seen before.
    Rival(Foreign),
    Leader(Option<MemberId>),
    Term,
    Added(MemberId),
    Removed(MemberId),
    Absent(Absent),
    Moved(MemberId, Endpoint),
    Role(MemberId, Role),
    Version(MemberId, Version),
    Renamed(MemberId),
    Ready(MemberId),
    NotReady(MemberId, Reason),
    Foreign(Foreign),
    ForeignGone(Foreign),
    Serving(Serving),
}

/// From `before` to `after`.
pub(super) fn between(before: &Membership, after: &Membership) -> Vec<Change> {
    let mut changes = Vec::new();
    if before.cluster != after.cluster {
        changes.extend(after.cluster.map(Change::Pinned));
    }
    let mut rivals: Vec<Foreign> = Vec::new();
    for foreign in fresh(&before.foreign, &after.foreign) {
        if before.foreign.iter().chain(&rivals).all(|known| known.cluster != foreign.cluster) {
            rivals.push(foreign);
        }
    }
    changes.extend(rivals.into_iter().map(Change::Rival));
    changes.extend(fresh(&before.foreign, &after.foreign).map(Change::Foreign));
    changes.extend(fresh(&after.foreign, &before.foreign).map(Change::ForeignGone));
    for member in &after.members {
        match before.get(member.id) {
            None => {
                changes.push(Change::Added(member.id));
                changes.push(readiness(member));
            }
            Some(known) => compare(known, member, &mut changes),
        }
    }
    let gone = before.members.iter().filter(|member| after.get(member.id).is_none());
    changes.extend(gone.map(|member| Change::Removed(member.id)));
    changes.extend(fresh(&before.absent, &after.absent).map(Change::Absent));
    if before.leader != after.leader {
        changes.push(Change::Leader(after.leader));
    }
    if before.term != after.term {
        changes.push(Change::Term);
    }
    if before.serving() != after.serving() {
        changes.push(Change::Serving(after.serving()));
    }
    changes
}

fn compare(known: &Member, member: &Member, changes: &mut Vec<Change>) {
    if known.endpoint != member.endpoint || known.at != member.at {
        changes.push(Change::Moved(member.id, member.endpoint.clone()));
    }
    if known.role != member.role {
        changes.push(Change::Role(member.id, member.role));
    }
    if known.version != member.version {
        changes.extend(member.version.map(|version| Change::Version(member.id, version)));
    }
    if known.name != member.name || known.client_urls != member.client_urls {
        changes.push(Change::Renamed(member.id));
    }
    if known.readiness != member.readiness {
        changes.push(readiness(member));
    }
}

fn readiness(member: &Member) -> Change {
    match member.readiness {
        Readiness::Ready => Change::Ready(member.id),
        Readiness::NotReady(reason) => Change::NotReady(member.id, reason),
    }
}

fn fresh<'a, T: Clone + PartialEq>(before: &'a [T], after: &'a [T]) -> impl Iterator<Item = T> + 'a {
    after.iter().filter(|item| !before.contains(item)).cloned()
}

/// Writes that Keyward leaves the cluster `left` for `followed`.
pub(super) fn log_followed(left: ClusterId, followed: ClusterId) {
    tracing::warn!(
        %left, %followed,
        "all endpoints have become another cluster, which is followed: watches end as compacted, leases and tokens of the \
         first are gone, sessions prove themselves again"
    );
}

/// Writes one line per change.
pub(super) fn log(changes: &[Change], after: &Membership) {
    for change in changes {
        match change {
            Change::Pinned(cluster) => tracing::info!(%cluster, "cluster pinned"),
            Change::Leader(Some(member)) => {
                tracing::info!(%member, term = after.term, "member became leader");
            }
            Change::Leader(None) => tracing::warn!(term = after.term, "no leader is known"),
            Change::Term | Change::Renamed(_) => tracing::debug!(?change, "membership changed"),
            Change::Added(member) => {
                if let Some(found) = after.get(*member) {
                    tracing::info!(%member, endpoint = %found.endpoint, name = &*found.name, "member found");
                }
            }
            Change::Removed(member) => tracing::info!(%member, "member left"),
            Change::Absent(absent) => {
                tracing::info!(member = %absent.id, why = ?absent.why, "member without a usable address");
            }
            Change::Moved(member, endpoint) => {
                tracing::info!(%member, %endpoint, "member is reached elsewhere")
            }
            Change::Role(member, role) => tracing::info!(%member, ?role, "member changed its role"),
            Change::Version(member, version) => tracing::info!(%member, %version, "member runs this version"),
            Change::Ready(member) => tracing::info!(%member, "member is ready"),
            Change::NotReady(member, Reason::Unprobed) => tracing::debug!(%member, "member will be asked"),
            Change::NotReady(member, reason) => tracing::warn!(%member, %reason, "member is not ready"),
            Change::Rival(Foreign { endpoint, cluster }) => tracing::error!(
                %endpoint, %cluster, serving = after.cluster.map(tracing::field::display),
                "another cluster than the one that is served answers here, and is not used: correct where the endpoint leads; where \
                 the cluster was replaced and cluster.identity is \"pinned\", restart Keyward, or set it to \"follow\""
            ),
            Change::Foreign(Foreign { endpoint, cluster }) => {
                tracing::warn!(%endpoint, %cluster, "another cluster answers here: the address is not used");
            }
            Change::ForeignGone(Foreign { endpoint, cluster }) => {
                tracing::info!(%endpoint, %cluster, "the other cluster does not answer here any more");
            }
            Change::Serving(Serving::Ready) => tracing::info!("the cluster can be served"),
            Change::Serving(why) => tracing::warn!(%why, "the cluster cannot be served"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tokio::time::Instant;

    use super::*;
    use crate::config::Scheme;

    fn endpoint(port: u16) -> Endpoint {
        Endpoint { scheme: Scheme::Http, host: "127.0.0.1".into(), port }
    }

    fn member(id: u64) -> Member {
        Member {
            id: MemberId(id),
            name: format!("m{id}").into(),
            endpoint: endpoint(1),
            at: None,
            role: Role::Voter,
            version: None,
            readiness: Readiness::Ready,
            term: 2,
            vitals: None,
            client_urls: Arc::default(),
            suspicion: Arc::default(),
            rest: Arc::default(),
            conduct: Arc::default(),
        }
    }

    fn snapshot(members: Vec<Member>) -> Membership {
        let mut snapshot = Membership::unknown(Instant::now());
        snapshot.members = members.into_iter().map(Arc::new).collect();
        snapshot.cluster = Some(ClusterId(1));
        snapshot.leader = Some(MemberId(1));
        snapshot.term = 2;
        snapshot
    }

    #[test]
    fn times_and_indexes_alone_are_no_change() {
        let before = snapshot(vec![member(1)]);
        let later = Member { vitals: Some(Arc::default()), term: 3, ..member(1) };
        let mut after = snapshot(vec![later]);
        after.confirmed += std::time::Duration::from_secs(1);
        assert_eq!(between(&before, &after), []);
    }

    #[test]
    fn every_other_difference_is_told_once() {
        let before = snapshot(vec![member(1), member(2)]);
        let version = Version::parse("3.5.1").unwrap();
        let other = Member {
            endpoint: endpoint(2),
            role: Role::Learner,
            version: Some(version),
            readiness: Readiness::NotReady(Reason::Learner),
            name: "new".into(),
            ..member(1)
        };
        let mut after = snapshot(vec![other, member(3)]);
        after.leader = None;
        after.term = 3;
        let foreign = Foreign { endpoint: endpoint(9), cluster: ClusterId(2) };
        after.foreign = vec![foreign.clone()];
        let id = MemberId;
        let expected = [
            Change::Rival(foreign.clone()),
            Change::Foreign(foreign.clone()),
            Change::Moved(id(1), endpoint(2)),
            Change::Role(id(1), Role::Learner),
            Change::Version(id(1), version),
            Change::Renamed(id(1)),
            Change::NotReady(id(1), Reason::Learner),
            Change::Added(id(3)),
            Change::Ready(id(3)),
            Change::Removed(id(2)),
            Change::Leader(None),
            Change::Term,
            Change::Serving(Serving::NoKnownLeader),
        ];
        assert_eq!(between(&before, &after), expected);
        assert_eq!(between(&after, &after), []);
        assert!(between(&after, &before).contains(&Change::ForeignGone(foreign)));
    }
}
