//! Members must not trust, between each other, the authority that certificates are minted from (rules 19): whoever had its
//! key could join the cluster.
//!
//! Owns: which member's peer URLs are looked at when, and that nothing is minted before. Must not know: how one looks
//! (`sight`), what is trust (`ancestry`), how a certificate is minted.
//! Invariants: nothing is minted from an authority before every listed member was looked at, or could not be, which is
//! told once; a member is looked at once, and again when it comes back, since it may have been started with other flags.

mod ancestry;
mod sight;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use arc_swap::ArcSwap;
use futures_util::future::join_all;
use rustls::pki_types::CertificateDer;

use crate::config::{Cluster, Endpoint, Scheme};
use crate::identity::MemberId;
use crate::upstream::connect::Connector;
use crate::upstream::credential::Credentials;
use crate::upstream::members::usable;
use crate::upstream::membership::{MembersHandle, Membership, PeerUrls, Peering, Readiness, Reason};

use ancestry::Ancestry;
use sight::{Sight, Wants};

/// A member takes what is minted for a member's certificate.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "member {name} ({member}) trusts this authority at its peer URL {url}, so whoever has mint.key could join the cluster \
     as a member: mint from an authority that etcd's --peer-trusted-ca-file does not lead to"
)]
pub struct Trusted {
    /// Which member.
    pub member: MemberId,
    /// Its name.
    pub name: Arc<str>,
    /// Where.
    pub url: Endpoint,
}

/// Looks at members' peer URLs.
pub struct PeerTrust {
    connector: Connector,
    members: MembersHandle,
    credentials: Arc<Credentials>,
    /// Of the members' client URLs, as was read last.
    roots: ArcSwap<Vec<CertificateDer<'static>>>,
    told: Told,
}

/// What was said already.
#[derive(Default)]
struct Told {
    no_list: AtomicBool,
    unreached: AtomicBool,
    wants_nothing: AtomicBool,
}

/// Which members were looked at for which authority.
#[derive(Default)]
struct Looked {
    authority: Vec<CertificateDer<'static>>,
    members: HashMap<MemberId, Look>,
}

struct Look {
    urls: Arc<[String]>,
    /// It was away since, or could not be reached.
    again: bool,
}

impl Looked {
    /// Members to look at now; they count as looked at.
    fn due(
        &mut self,
        authority: &[CertificateDer<'static>],
        listed: &[Peering],
        snapshot: &Membership,
    ) -> Vec<Peering> {
        if self.authority != authority {
            *self = Self { authority: authority.to_vec(), members: HashMap::new() };
        }
        self.members.retain(|id, _| listed.iter().any(|peering| peering.member == *id));
        let mut due = Vec::new();
        for peering in listed {
            let new = || Look { urls: Arc::clone(&peering.urls), again: false };
            match self.members.get_mut(&peering.member) {
                Some(look) if look.urls == peering.urls => {
                    let answers = answers(snapshot, peering.member);
                    if answers == Some(false) {
                        look.again = true;
                    }
                    if answers == Some(true) && std::mem::take(&mut look.again) {
                        due.push(peering.clone());
                    }
                }
                Some(look) => {
                    *look = new();
                    due.push(peering.clone());
                }
                None => {
                    self.members.insert(peering.member, new());
                    due.push(peering.clone());
                }
            }
        }
        due
    }
}

/// The authorities that vouch for members' client URLs.
#[must_use]
pub fn roots_of(cluster: &Cluster) -> Vec<CertificateDer<'static>> {
    cluster.tls.as_ref().map(|tls| tls.roots.certificates().to_vec()).unwrap_or_default()
}

/// Whether the member answers clients; none where it was not asked yet.
fn answers(snapshot: &Membership, member: MemberId) -> Option<bool> {
    match snapshot.get(member)?.readiness {
        Readiness::NotReady(Reason::Unprobed) => None,
        Readiness::NotReady(Reason::Unreachable) => Some(false),
        Readiness::Ready | Readiness::NotReady(_) => Some(true),
    }
}

/// The peer URLs over TLS: others trust nobody's certificate.
fn over_tls(peering: &Peering) -> impl Iterator<Item = (&Peering, Endpoint)> {
    peering.urls.iter().filter_map(move |url| Some((peering, usable(url, Scheme::Https)?)))
}

impl PeerTrust {
    /// For the members of `cluster`, reached by `connector`.
    #[must_use]
    pub fn new(
        cluster: &Cluster,
        connector: Connector,
        members: MembersHandle,
        credentials: Arc<Credentials>,
    ) -> Self {
        let roots = ArcSwap::from_pointee(roots_of(cluster));
        Self { connector, members, credentials, roots, told: Told::default() }
    }

    /// Holds an authority that is to be minted from against all members (`roots` vouch for their client URLs), and lets it mint where none trusts it. While no
    /// member list was had that is left to [`Self::follow`]. Cancel-safe.
    ///
    /// # Errors
    /// [`Trusted`]; it mints nothing.
    pub async fn hold(
        &self,
        authority: &[CertificateDer<'static>],
        roots: &[CertificateDer<'static>],
    ) -> Result<(), Trusted> {
        self.roots.store(Arc::new(roots.to_vec()));
        if self.credentials.is_held(authority) {
            return Ok(());
        }
        self.round(authority, &mut Looked::default()).await
    }

    /// Holds what is minted from against the members that come. Ends only where an authority that has not minted yet is
    /// trusted by one; that one which does mint becomes so is told, and changes nothing.
    pub async fn follow(&self) -> Trusted {
        let mut changes = self.members.changes.clone();
        let mut looked = Looked::default();
        loop {
            if let Some(authority) = self.credentials.mints_from()
                && let Err(trusted) = self.round(&authority, &mut looked).await
            {
                if !self.credentials.may_mint() {
                    return trusted;
                }
                tracing::error!(%trusted, "mint.ca");
            }
            if changes.changed().await.is_err() {
                return std::future::pending().await;
            }
        }
    }

    async fn round(&self, authority: &[CertificateDer<'static>], looked: &mut Looked) -> Result<(), Trusted> {
        let snapshot = self.members.snapshot.load_full();
        let listed = match &snapshot.peer_urls {
            PeerUrls::Unknown => return Ok(()),
            PeerUrls::Refused => {
                if !self.told.no_list.swap(true, Ordering::Relaxed) {
                    tracing::warn!(
                        "the member list is refused to the probing user (cluster.probe), so it is not known whether \
                         members trust mint.ca between each other, which they must not"
                    );
                }
                self.credentials.let_mint(authority);
                return Ok(());
            }
            PeerUrls::Listed(listed) => listed,
        };
        let due = looked.due(authority, listed, &snapshot);
        let looks = due.iter().flat_map(over_tls).map(async |(peering, url)| {
            let sight = sight::look(&self.connector, &url).await;
            (peering, url, sight)
        });
        let roots = self.roots.load_full();
        let ancestry = Ancestry::of(authority, &roots);
        let mut trusted = None;
        for (peering, url, sight) in join_all(looks).await {
            match sight {
                Ok(sight) if ancestry.is_trusted(&sight) => {
                    let (member, name) = (peering.member, Arc::clone(&peering.name));
                    trusted = trusted.or(Some(Trusted { member, name, url }));
                }
                Ok(sight) => self.seen(peering, &url, &sight),
                Err(error) => {
                    // One that is not there may come.
                    let there = answers(&snapshot, peering.member) == Some(true);
                    if let Some(look) = looked.members.get_mut(&peering.member) {
                        look.again = !there;
                    }
                    self.unreached(peering, there, &error.to_string());
                }
            }
        }
        trusted.map_or(Ok(()), Err)?;
        self.credentials.let_mint(authority);
        Ok(())
    }

    fn seen(&self, peering: &Peering, url: &Endpoint, sight: &Sight) {
        tracing::debug!(member = %peering.member, %url, "the member does not trust mint.ca at its peer URL");
        if sight.wants == Wants::Nothing && !self.told.wants_nothing.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                member = %peering.member, name = &*peering.name, %url,
                "the member asks for no certificate at its peer URL: whoever reaches that can act as a member"
            );
        }
    }

    fn unreached(&self, peering: &Peering, there: bool, error: &str) {
        if !there || self.told.unreached.swap(true, Ordering::Relaxed) {
            tracing::debug!(member = %peering.member, error, "no look at a peer URL");
        } else {
            tracing::warn!(
                member = %peering.member, name = &*peering.name, error,
                "a member's peer URL cannot be reached from here, so it is not known whether it trusts mint.ca there, which \
                 it must not; said once"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::time::Duration;

    use futures_util::FutureExt as _;
    use tokio::time::Instant;

    use super::*;
    use crate::config::{ClusterPin, Serves};
    use crate::upstream::credential::CredentialSettings;
    use crate::upstream::membership::tests::member;
    use crate::upstream::membership::{AuthState, Changes, ChangesSender, ControlChannels, Hints};

    fn peering(member: u64, port: u16) -> Peering {
        let urls = [format!("https://127.0.0.1:{port}")].into();
        Peering { member: MemberId(member), name: format!("m{member}").into(), urls }
    }

    fn snapshot(members: &[(u64, Readiness)], peer_urls: PeerUrls) -> Membership {
        let members = members.iter().map(|(id, readiness)| member(*id, *readiness)).collect();
        Membership { members, peer_urls, ..Membership::unknown(Instant::now()) }
    }

    const UNPROBED: Readiness = Readiness::NotReady(Reason::Unprobed);
    const GONE: Readiness = Readiness::NotReady(Reason::Unreachable);

    #[tokio::test]
    async fn a_member_is_looked_at_once_and_again_when_it_comes_back() {
        let mut looked = Looked::default();
        let one = [CertificateDer::from(vec![1])];
        let mut due =
            |authority: &[CertificateDer<'static>], listed: &[Peering], states: &[(u64, Readiness)]| {
                let due = looked.due(authority, listed, &snapshot(states, PeerUrls::Unknown));
                due.into_iter().map(|peering| peering.member.0).collect::<Vec<_>>()
            };
        let both = [peering(1, 11), peering(2, 12)];
        assert_eq!(due(&one, &both, &[(1, Readiness::Ready), (2, UNPROBED)]), [1, 2]);
        assert!(due(&one, &both, &[(1, Readiness::Ready), (2, Readiness::Ready)]).is_empty());
        assert!(due(&one, &both, &[(1, Readiness::Ready), (2, GONE)]).is_empty());
        assert_eq!(due(&one, &both, &[(1, Readiness::Ready), (2, Readiness::Ready)]), [2]);
        assert!(due(&one, &both, &[(1, Readiness::Ready), (2, Readiness::Ready)]).is_empty());
        let moved = [peering(1, 21), peering(2, 12)];
        assert_eq!(due(&one, &moved, &[(1, Readiness::Ready), (2, Readiness::Ready)]), [1]);
        assert!(due(&one, &moved[1..], &[(2, Readiness::Ready)]).is_empty());
        assert_eq!(due(&one, &moved, &[(1, Readiness::Ready), (2, Readiness::Ready)]), [1], "it was removed");
        let two = [CertificateDer::from(vec![2])];
        assert_eq!(due(&two, &moved, &[(1, Readiness::Ready), (2, Readiness::Ready)]), [1, 2]);
    }

    /// Before members whose peer URLs nobody reaches.
    fn behind_a_wall(published: Membership) -> (PeerTrust, ChangesSender) {
        let (changed, changes) = Changes::channel();
        let members = MembersHandle {
            snapshot: Arc::new(ArcSwap::from_pointee(published)),
            changes,
            outages: Arc::default(),
            hints: Hints::channel().0,
            auth: Arc::new(AuthState::default()),
        };
        let dial = |_: &Endpoint| std::future::ready(Err(io::ErrorKind::ConnectionRefused.into())).boxed();
        let connector = Connector::over(Arc::new(dial), None, Duration::from_secs(1));
        let settings = CredentialSettings::default();
        let (credentials, _) = Credentials::new(settings, ControlChannels::default()).unwrap();
        let cluster = Cluster {
            endpoints: Vec::new(),
            tls: None,
            connect_timeout: Duration::from_secs(1),
            idle_timeout: Duration::from_secs(1),
            token_ttl: Duration::from_secs(1),
            pin: ClusterPin::FirstAnswer,
            reads: Serves::Any,
            writes: Serves::Any,
            near: Vec::new(),
            hedge_after: None,
            outage: crate::config::OutageTimes::default(),
            probe: None,
            discovery: crate::config::Discovery::default(),
        };
        (PeerTrust::new(&cluster, connector, members, credentials), changed)
    }

    #[tokio::test]
    async fn an_authority_mints_once_members_are_known_also_where_none_can_be_looked_at() {
        let authority = [CertificateDer::from(vec![1])];
        let listed = PeerUrls::Listed([peering(1, 11)].into());
        for (peer_urls, mints) in [(PeerUrls::Unknown, false), (PeerUrls::Refused, true), (listed, true)] {
            let members = snapshot(&[(1, Readiness::Ready)], peer_urls.clone());
            let (trust, _changed) = behind_a_wall(members);
            trust.hold(&authority, &[]).await.unwrap();
            assert_eq!(trust.credentials.is_held(&authority), mints, "{peer_urls:?}");
            assert_eq!(
                trust.told.unreached.load(Ordering::Relaxed),
                matches!(peer_urls, PeerUrls::Listed(_))
            );
            assert_eq!(trust.told.no_list.load(Ordering::Relaxed), peer_urls == PeerUrls::Refused);
        }
    }

    #[tokio::test]
    async fn a_member_that_is_not_there_is_looked_at_when_it_comes() {
        let authority = [CertificateDer::from(vec![1])];
        let listed = PeerUrls::Listed([peering(1, 11)].into());
        let (trust, _changed) = behind_a_wall(snapshot(&[(1, UNPROBED)], listed.clone()));
        let mut looked = Looked::default();
        trust.round(&authority, &mut looked).await.unwrap();
        assert!(!trust.told.unreached.load(Ordering::Relaxed), "it is not there");
        trust.members.snapshot.store(Arc::new(snapshot(&[(1, Readiness::Ready)], listed)));
        trust.round(&authority, &mut looked).await.unwrap();
        assert!(trust.told.unreached.load(Ordering::Relaxed), "it is, and its peer URL is not");
        assert!(!looked.members[&MemberId(1)].again);
    }
}
