//! The logged differences between two snapshots.
//!
//! Owns: the comparison and the log texts. Must not know: the origin of the snapshots.
//! Invariant: two snapshots differing only in times and raft indexes have no changes.

use std::sync::Arc;

use crate::membership::{
    AbsentMember, ForeignAddress, Member, Membership, Readiness, Role, ServingState, UnreadyReason,
};
use crate::version::Version;
use keyward_config::Endpoint;
use keyward_etcd::identity::{ClusterId, MemberId};

/// A difference between two snapshots.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum MembershipChange {
    Pinned(ClusterId),
    /// A cluster different from the served cluster answers at an address, seen for the first time.
    Rival(ForeignAddress),
    Leader(Option<MemberId>),
    Term,
    Added(MemberId),
    Removed(MemberId, Arc<str>),
    Absent(AbsentMember),
    Moved(MemberId, Endpoint),
    Role(MemberId, Role),
    Version(MemberId, Version),
    Renamed(MemberId),
    Ready(MemberId),
    NotReady(MemberId, UnreadyReason),
    Foreign(ForeignAddress),
    ForeignGone(ForeignAddress),
    Serving(ServingState),
}

/// The changes from `before` to `after`.
pub(super) fn between(before: &Membership, after: &Membership) -> Vec<MembershipChange> {
    let mut changes = Vec::new();
    if before.cluster != after.cluster {
        changes.extend(after.cluster.map(MembershipChange::Pinned));
    }
    let mut rivals: Vec<ForeignAddress> = Vec::new();
    for foreign in fresh(&before.foreign, &after.foreign) {
        if before.foreign.iter().chain(&rivals).all(|known| known.cluster != foreign.cluster) {
            rivals.push(foreign);
        }
    }
    changes.extend(rivals.into_iter().map(MembershipChange::Rival));
    changes.extend(fresh(&before.foreign, &after.foreign).map(MembershipChange::Foreign));
    changes.extend(fresh(&after.foreign, &before.foreign).map(MembershipChange::ForeignGone));
    for member in &after.members {
        match before.get(member.id) {
            None => {
                changes.push(MembershipChange::Added(member.id));
                changes.push(readiness(member));
            }
            Some(known) => compare(known, member, &mut changes),
        }
    }
    let gone = before.members.iter().filter(|member| after.get(member.id).is_none());
    changes.extend(gone.map(|member| MembershipChange::Removed(member.id, Arc::clone(&member.name))));
    changes.extend(fresh(&before.absent, &after.absent).map(MembershipChange::Absent));
    if before.leader != after.leader {
        changes.push(MembershipChange::Leader(after.leader));
    }
    if before.term != after.term {
        changes.push(MembershipChange::Term);
    }
    if before.serving() != after.serving() {
        changes.push(MembershipChange::Serving(after.serving()));
    }
    changes
}

fn compare(known: &Member, member: &Member, changes: &mut Vec<MembershipChange>) {
    if known.endpoint != member.endpoint || known.resolved_ip != member.resolved_ip {
        changes.push(MembershipChange::Moved(member.id, member.endpoint.clone()));
    }
    if known.role != member.role {
        changes.push(MembershipChange::Role(member.id, member.role));
    }
    if known.version != member.version {
        changes.extend(member.version.map(|version| MembershipChange::Version(member.id, version)));
    }
    if known.name != member.name || known.client_urls != member.client_urls {
        changes.push(MembershipChange::Renamed(member.id));
    }
    if known.readiness != member.readiness {
        changes.push(readiness(member));
    }
}

fn readiness(member: &Member) -> MembershipChange {
    match member.readiness {
        Readiness::Ready => MembershipChange::Ready(member.id),
        Readiness::NotReady(reason) => MembershipChange::NotReady(member.id, reason),
    }
}

fn fresh<'a, T: Clone + PartialEq>(before: &'a [T], after: &'a [T]) -> impl Iterator<Item = T> + 'a {
    after.iter().filter(|item| !before.contains(item)).cloned()
}

/// Logs the move from cluster `left` to cluster `followed`.
pub(super) fn log_followed(left: ClusterId, followed: ClusterId) {
    tracing::warn!(
        %left, %followed,
        "all endpoints have become another cluster, which is followed: watches end as compacted, leases and \
         tokens of the first are gone, sessions prove themselves again"
    );
}

/// Logs each change on a line of its own. A line about a member has the name that operators gave it.
pub(super) fn log(changes: &[MembershipChange], after: &Membership) {
    let name =
        |member: &MemberId| after.get(*member).map(|known| &*known.name).filter(|name| !name.is_empty());
    for change in changes {
        match change {
            MembershipChange::Pinned(cluster) => tracing::info!(%cluster, "cluster pinned"),
            MembershipChange::Leader(Some(member)) => {
                tracing::info!(%member, name = name(member), term = after.term, "member became leader");
            }
            MembershipChange::Leader(None) => tracing::warn!(term = after.term, "no leader is known"),
            MembershipChange::Term | MembershipChange::Renamed(_) => {
                tracing::debug!(?change, "membership changed")
            }
            MembershipChange::Added(member) => {
                if let Some(found) = after.get(*member) {
                    tracing::info!(%member, name = name(member), endpoint = %found.endpoint, "member found");
                }
            }
            MembershipChange::Removed(member, name) => tracing::info!(%member, name = &**name, "member left"),
            MembershipChange::Absent(absent) => {
                let (name, reason) = (&*absent.name, absent.why.text());
                tracing::info!(member = %absent.id, name, reason, "member without a usable address");
            }
            MembershipChange::Moved(member, endpoint) => {
                tracing::info!(%member, name = name(member), %endpoint, "member has another address")
            }
            MembershipChange::Role(member, role) => {
                tracing::info!(%member, name = name(member), role = role.name(), "member changed its role")
            }
            MembershipChange::Version(member, version) => {
                tracing::info!(%member, name = name(member), %version, "member runs this version")
            }
            MembershipChange::Ready(member) => {
                tracing::info!(%member, name = name(member), "member is ready")
            }
            MembershipChange::NotReady(member, UnreadyReason::Unprobed) => {
                tracing::debug!(%member, "member will be asked")
            }
            MembershipChange::NotReady(member, reason) => {
                tracing::warn!(%member, name = name(member), %reason, "member is not ready")
            }
            MembershipChange::Rival(ForeignAddress { endpoint, cluster }) => tracing::error!(
                %endpoint, %cluster, serving = after.cluster.map(tracing::field::display),
                "another cluster than the one that is served answers here, and is not used: correct where \
                 the endpoint leads; where the cluster was replaced and cluster.identity is \"pinned\", \
                 restart Keyward, or set it to \"follow\""
            ),
            MembershipChange::Foreign(ForeignAddress { endpoint, cluster }) => {
                tracing::warn!(%endpoint, %cluster, "another cluster answers here: the address is not used");
            }
            MembershipChange::ForeignGone(ForeignAddress { endpoint, cluster }) => {
                tracing::info!(%endpoint, %cluster, "the other cluster does not answer here any more");
            }
            MembershipChange::Serving(ServingState::Ready) => tracing::info!("the cluster can be served"),
            MembershipChange::Serving(why) => tracing::warn!(%why, "the cluster cannot be served"),
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;
    use keyward_config::Scheme;

    fn endpoint(port: u16) -> Endpoint {
        Endpoint { scheme: Scheme::Http, host: "127.0.0.1".into(), port }
    }

    fn member(id: u64) -> Member {
        Member {
            id: MemberId(id),
            name: format!("m{id}").into(),
            endpoint: endpoint(1),
            resolved_ip: None,
            role: Role::Voter,
            version: None,
            readiness: Readiness::Ready,
            term: 2,
            store_status: None,
            client_urls: Arc::default(),
            suspicion: Arc::default(),
            maintenance: Arc::default(),
            load: Arc::default(),
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
        let later = Member { store_status: Some(Arc::default()), term: 3, ..member(1) };
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
            readiness: Readiness::NotReady(UnreadyReason::Learner),
            name: "new".into(),
            ..member(1)
        };
        let mut after = snapshot(vec![other, member(3)]);
        after.leader = None;
        after.term = 3;
        let foreign = ForeignAddress { endpoint: endpoint(9), cluster: ClusterId(2) };
        after.foreign = vec![foreign.clone()];
        let id = MemberId;
        let expected = [
            MembershipChange::Rival(foreign.clone()),
            MembershipChange::Foreign(foreign.clone()),
            MembershipChange::Moved(id(1), endpoint(2)),
            MembershipChange::Role(id(1), Role::Learner),
            MembershipChange::Version(id(1), version),
            MembershipChange::Renamed(id(1)),
            MembershipChange::NotReady(id(1), UnreadyReason::Learner),
            MembershipChange::Added(id(3)),
            MembershipChange::Ready(id(3)),
            MembershipChange::Removed(id(2), "m2".into()),
            MembershipChange::Leader(None),
            MembershipChange::Term,
            MembershipChange::Serving(ServingState::NoKnownLeader),
        ];
        assert_eq!(between(&before, &after), expected);
        assert_eq!(between(&after, &after), []);
        assert!(between(&after, &before).contains(&MembershipChange::ForeignGone(foreign)));
    }
}
