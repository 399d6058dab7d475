//! The check that no member trusts the minting CA at its peer URLs: with such trust, the holder of the CA's
//! key could join the cluster (`docs/decisions.md#d19`).
//!
//! Owns: the choice of members to check and the time of each check, and the block on minting until then. Must
//! not know: how a peer URL is examined (`sight`), how trust is judged (`ancestry`), how a certificate is
//! minted.
//! Invariants: no certificate is minted from a CA before every listed member was checked or found
//! unreachable; unreachability is logged once. A member is checked once, and again when the member comes
//! back, perhaps restarted with different flags.

mod ca_chain;
mod peer_handshake;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use arc_swap::ArcSwap;
use futures_util::future::join_all;
use rustls::pki_types::CertificateDer;

use crate::credentials::Credentials;
use keyward_cluster::discovery::usable;
use keyward_cluster::membership::{
    MemberPeerUrls, MembersHandle, Membership, PeerUrls, Readiness, UnreadyReason,
};
use keyward_config::{Cluster, Endpoint, Scheme};
use keyward_dial::connect::{ConnectError, Connector};
use keyward_etcd::identity::MemberId;

use ca_chain::CaChain;
use peer_handshake::{PeerClientAuth, PeerHandshake};

/// A member trusts the minting CA at a peer URL, and would accept a minted certificate as a member's.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "member {name} ({member}) trusts this authority at its peer URL {url}, so whoever has mint.key could \
     join the cluster as a member: mint from an authority that etcd's --peer-trusted-ca-file does not lead to"
)]
pub struct MintingCaTrusted {
    /// The member's id.
    pub member: MemberId,
    /// The member's name.
    pub name: Arc<str>,
    /// The peer URL at which the member trusts the CA.
    pub url: Endpoint,
}

/// The answers of one look at the peer URLs, for a command without a running Keyward.
#[derive(Debug, Default)]
pub struct PeerTrustLook {
    /// The first member found to trust the CA.
    pub trusted: Option<MintingCaTrusted>,
    /// The peer URLs without an answer, with the reason.
    pub unseen: Vec<String>,
}

/// Checks members' peer URLs for trust in the minting CA.
pub struct PeerTrustCheck {
    connector: Connector,
    members: MembersHandle,
    credentials: Arc<Credentials>,
    /// CA certificates for members' client URLs, as last read.
    roots: ArcSwap<Vec<CertificateDer<'static>>>,
    logged: LoggedPeerWarnings,
}

/// Warnings already logged.
#[derive(Default)]
struct LoggedPeerWarnings {
    no_list: AtomicBool,
    unreached: AtomicBool,
    wants_nothing: AtomicBool,
}

/// A minting CA, and the members already checked for trust in the CA.
#[derive(Default)]
struct CheckedPeers {
    authority: Vec<CertificateDer<'static>>,
    members: HashMap<MemberId, PeerCheck>,
}

struct PeerCheck {
    urls: Arc<[String]>,
    /// The member was away or unreachable since: check again when the member answers.
    needs_recheck: bool,
}

impl CheckedPeers {
    /// Returns the members to check now; they count as checked from here on.
    fn due(
        &mut self,
        authority: &[CertificateDer<'static>],
        listed: &[MemberPeerUrls],
        snapshot: &Membership,
    ) -> Vec<MemberPeerUrls> {
        if self.authority != authority {
            *self = Self { authority: authority.to_vec(), members: HashMap::new() };
        }
        self.members.retain(|id, _| listed.iter().any(|peering| peering.member == *id));
        let mut due = Vec::new();
        for peering in listed {
            let new = || PeerCheck { urls: Arc::clone(&peering.urls), needs_recheck: false };
            match self.members.get_mut(&peering.member) {
                Some(look) if look.urls == peering.urls => {
                    let answers = answers(snapshot, peering.member);
                    if answers == Some(false) {
                        look.needs_recheck = true;
                    }
                    if answers == Some(true) && std::mem::take(&mut look.needs_recheck) {
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

/// Returns the CA certificates trusted for members' client URLs.
#[must_use]
pub fn roots_of(cluster: &Cluster) -> Vec<CertificateDer<'static>> {
    cluster.tls.as_ref().map(|tls| tls.authorities().to_vec()).unwrap_or_default()
}

/// True if the member answers clients; `None` before the first probe.
fn answers(snapshot: &Membership, member: MemberId) -> Option<bool> {
    match snapshot.get(member)?.readiness {
        Readiness::NotReady(UnreadyReason::Unprobed) => None,
        Readiness::NotReady(UnreadyReason::Unreachable) => Some(false),
        Readiness::Ready | Readiness::NotReady(_) => Some(true),
    }
}

/// The member's https peer URLs. A plaintext URL involves no trust in any certificate.
fn over_tls(peering: &MemberPeerUrls) -> impl Iterator<Item = (&MemberPeerUrls, Endpoint)> {
    peering.urls.iter().filter_map(move |url| Some((peering, usable(url, Scheme::Https)?)))
}

/// Looks once at the peer URLs of all listed members. `roots` are the CA certificates for members' client
/// URLs. Cancel-safe.
pub async fn look_at_peer_urls(
    connector: &Connector,
    snapshot: &Membership,
    authority: &[CertificateDer<'static>],
    roots: &[CertificateDer<'static>],
) -> PeerTrustLook {
    let PeerUrls::Listed(listed) = &snapshot.peer_urls else {
        let unseen = "whether members trust mint.ca at their peer URLs: the member list is not told";
        return PeerTrustLook { trusted: None, unseen: vec![unseen.to_owned()] };
    };
    let ancestry = CaChain::of(authority, roots);
    let mut seen = PeerTrustLook::default();
    for (peering, url, sight) in examine(connector, listed).await {
        let (member, name) = (peering.member, Arc::clone(&peering.name));
        match sight {
            Ok(sight) if ancestry.is_trusted(&sight) => {
                seen.trusted = seen.trusted.or(Some(MintingCaTrusted { member, name, url }));
            }
            Ok(_) => {}
            Err(error) => seen
                .unseen
                .push(format!("whether {name} ({member}) trusts mint.ca at its peer URL {url}: {error}")),
        }
    }
    seen
}

/// Records a handshake with each https peer URL of these members.
async fn examine<'p>(
    connector: &Connector,
    members: &'p [MemberPeerUrls],
) -> Vec<(&'p MemberPeerUrls, Endpoint, Result<PeerHandshake, ConnectError>)> {
    let looks = members.iter().flat_map(over_tls).map(async |(peering, url)| {
        let sight = peer_handshake::record_handshake(connector, &url).await;
        (peering, url, sight)
    });
    join_all(looks).await
}

impl PeerTrustCheck {
    /// Creates the check for the members of `cluster`, reached through `connector`.
    #[must_use]
    pub fn new(
        cluster: &Cluster,
        connector: Connector,
        members: MembersHandle,
        credentials: Arc<Credentials>,
    ) -> Self {
        let roots = ArcSwap::from_pointee(roots_of(cluster));
        Self { connector, members, credentials, roots, logged: LoggedPeerWarnings::default() }
    }

    /// Checks a CA to mint from against all members, and permits minting if no member trusts the CA. `roots`
    /// are the CA certificates for members' client URLs. Before the first member list, the check is left to
    /// [`Self::follow`]. Cancel-safe.
    ///
    /// # Errors
    /// [`MintingCaTrusted`]; no certificate is minted from the CA.
    pub async fn check_before_minting(
        &self,
        authority: &[CertificateDer<'static>],
        roots: &[CertificateDer<'static>],
    ) -> Result<(), MintingCaTrusted> {
        self.roots.store(Arc::new(roots.to_vec()));
        if self.credentials.may_authority_mint(authority) {
            return Ok(());
        }
        self.round(authority, &mut CheckedPeers::default()).await
    }

    /// Checks the minting CA against every newly seen member. Returns only if a member trusts a CA not yet
    /// permitted to mint; trust in a CA already minting is logged, and minting goes on.
    pub async fn follow(&self) -> MintingCaTrusted {
        let mut changes = self.members.changes.clone();
        let mut looked = CheckedPeers::default();
        loop {
            if let Some(authority) = self.credentials.mint_authority()
                && let Err(trusted) = self.round(&authority, &mut looked).await
            {
                if !self.credentials.may_mint() {
                    return trusted;
                }
                tracing::error!(
                    %trusted, "members trust mint.ca between each other, which they must not"
                );
            }
            if changes.changed().await.is_err() {
                return std::future::pending().await;
            }
        }
    }

    async fn round(
        &self,
        authority: &[CertificateDer<'static>],
        looked: &mut CheckedPeers,
    ) -> Result<(), MintingCaTrusted> {
        let snapshot = self.members.snapshot.load_full();
        let listed = match &snapshot.peer_urls {
            PeerUrls::Unknown => return Ok(()),
            PeerUrls::Refused => {
                if !self.logged.no_list.swap(true, Ordering::Relaxed) {
                    tracing::warn!(
                        "the member list is refused to the probing user (cluster.probe), so it is not known \
                         whether members trust mint.ca between each other, which they must not"
                    );
                }
                self.credentials.allow_minting(authority);
                return Ok(());
            }
            PeerUrls::Listed(listed) => listed,
        };
        let due = looked.due(authority, listed, &snapshot);
        let roots = self.roots.load_full();
        let ancestry = CaChain::of(authority, &roots);
        let mut trusted = None;
        for (peering, url, sight) in examine(&self.connector, &due).await {
            match sight {
                Ok(sight) if ancestry.is_trusted(&sight) => {
                    let (member, name) = (peering.member, Arc::clone(&peering.name));
                    trusted = trusted.or(Some(MintingCaTrusted { member, name, url }));
                }
                Ok(sight) => self.log_untrusting(peering, &url, &sight),
                Err(error) => {
                    // An absent member may come back.
                    let there = answers(&snapshot, peering.member) == Some(true);
                    if let Some(look) = looked.members.get_mut(&peering.member) {
                        look.needs_recheck = !there;
                    }
                    self.log_unreachable(peering, there, &error.to_string());
                }
            }
        }
        trusted.map_or(Ok(()), Err)?;
        self.credentials.allow_minting(authority);
        Ok(())
    }

    fn log_untrusting(&self, peering: &MemberPeerUrls, url: &Endpoint, sight: &PeerHandshake) {
        tracing::debug!(member = %peering.member, %url, "the member does not trust mint.ca at its peer URL");
        if sight.client_auth == PeerClientAuth::Nothing
            && !self.logged.wants_nothing.swap(true, Ordering::Relaxed)
        {
            tracing::warn!(
                member = %peering.member, name = &*peering.name, %url,
                "the member asks for no certificate at its peer URL: whoever reaches that can act as a member"
            );
        }
    }

    fn log_unreachable(&self, peering: &MemberPeerUrls, there: bool, error: &str) {
        if !there || self.logged.unreached.swap(true, Ordering::Relaxed) {
            tracing::debug!(member = %peering.member, error, "no look at a peer URL");
        } else {
            tracing::warn!(
                member = %peering.member, name = &*peering.name, error,
                "a member's peer URL cannot be reached from here, so it is not known whether it trusts \
                 mint.ca there, which it must not; said once"
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
    use crate::credentials::CredentialSettings;
    use keyward_cluster::membership::{
        ChangeReceiver, ChangeSender, ControlChannels, HintSender, SharedAuthSetting,
    };
    use keyward_cluster::test_member::member;
    use keyward_config::{ClusterPin, MemberPreference};

    fn peering(member: u64, port: u16) -> MemberPeerUrls {
        let urls = [format!("https://127.0.0.1:{port}")].into();
        MemberPeerUrls { member: MemberId(member), name: format!("m{member}").into(), urls }
    }

    fn snapshot(members: &[(u64, Readiness)], peer_urls: PeerUrls) -> Membership {
        let members = members.iter().map(|(id, readiness)| member(*id, *readiness)).collect();
        Membership { members, peer_urls, ..Membership::unknown(Instant::now()) }
    }

    const UNPROBED: Readiness = Readiness::NotReady(UnreadyReason::Unprobed);
    const GONE: Readiness = Readiness::NotReady(UnreadyReason::Unreachable);

    #[tokio::test]
    async fn a_member_is_looked_at_once_and_again_when_it_comes_back() {
        let mut looked = CheckedPeers::default();
        let one = [CertificateDer::from(vec![1])];
        let mut due = |authority: &[CertificateDer<'static>],
                       listed: &[MemberPeerUrls],
                       states: &[(u64, Readiness)]| {
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

    /// A check of members whose peer URLs all refuse connections.
    fn behind_a_wall(published: Membership) -> (PeerTrustCheck, ChangeSender) {
        let (changed, changes) = ChangeReceiver::channel();
        let members = MembersHandle {
            snapshot: Arc::new(ArcSwap::from_pointee(published)),
            changes,
            outages: Arc::default(),
            hints: HintSender::channel().0,
            auth: Arc::new(SharedAuthSetting::default()),
            alarms: Arc::default(),
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
            reads: MemberPreference::Any,
            writes: MemberPreference::Any,
            near: Vec::new(),
            hedge_after: None,
            outage: keyward_config::OutageTimes::default(),
            probe: None,
            discovery: keyward_config::Discovery::default(),
        };
        (PeerTrustCheck::new(&cluster, connector, members, credentials), changed)
    }

    #[tokio::test]
    async fn an_authority_mints_once_members_are_known_also_where_none_can_be_looked_at() {
        let authority = [CertificateDer::from(vec![1])];
        let listed = PeerUrls::Listed([peering(1, 11)].into());
        for (peer_urls, mints) in [(PeerUrls::Unknown, false), (PeerUrls::Refused, true), (listed, true)] {
            let members = snapshot(&[(1, Readiness::Ready)], peer_urls.clone());
            let (trust, _changed) = behind_a_wall(members);
            trust.check_before_minting(&authority, &[]).await.unwrap();
            assert_eq!(trust.credentials.may_authority_mint(&authority), mints, "{peer_urls:?}");
            assert_eq!(
                trust.logged.unreached.load(Ordering::Relaxed),
                matches!(peer_urls, PeerUrls::Listed(_))
            );
            assert_eq!(trust.logged.no_list.load(Ordering::Relaxed), peer_urls == PeerUrls::Refused);
        }
    }

    #[tokio::test]
    async fn a_member_that_is_not_there_is_looked_at_when_it_comes() {
        let authority = [CertificateDer::from(vec![1])];
        let listed = PeerUrls::Listed([peering(1, 11)].into());
        let (trust, _changed) = behind_a_wall(snapshot(&[(1, UNPROBED)], listed.clone()));
        let mut looked = CheckedPeers::default();
        trust.round(&authority, &mut looked).await.unwrap();
        assert!(!trust.logged.unreached.load(Ordering::Relaxed), "it is not there");
        trust.members.snapshot.store(Arc::new(snapshot(&[(1, Readiness::Ready)], listed)));
        trust.round(&authority, &mut looked).await.unwrap();
        assert!(trust.logged.unreached.load(Ordering::Relaxed), "it is, and its peer URL is not");
        assert!(!looked.members[&MemberId(1)].needs_recheck);
    }
}
