//! Tests of the members' task beyond the scope of `census` and `following`.

use std::net::{IpAddr, SocketAddr};

use super::census::{LeaderView, MemberProbeAnswer};
use super::probe::IdentifiedMember;
use super::*;
use crate::membership::Role;
use keyward_config::{Discovery, Endpoint, MemberPreference, OutageTimes, Scheme};
use keyward_dial::names::NameResolver;

const OURS: ClusterId = ClusterId(1);
const OTHER: ClusterId = ClusterId(2);

fn ip(last: u8) -> IpAddr {
    IpAddr::from([127, 0, 0, last])
}

/// A task with one configured name. No probe is sent: the tests deliver reports directly.
fn task(pin: ClusterPin) -> (MembersTask, MembersHandle) {
    let second = Duration::from_secs(1);
    let config = Cluster {
        endpoints: vec![Endpoint { scheme: Scheme::Http, host: "m".into(), port: 1 }],
        tls: None,
        connect_timeout: second,
        idle_timeout: second,
        token_ttl: second,
        pin,
        reads: MemberPreference::Any,
        writes: MemberPreference::Any,
        near: Vec::new(),
        hedge_after: None,
        outage: OutageTimes::default(),
        probe: None,
        discovery: Discovery::default(),
    };
    let names = NameResolver::by(&[SocketAddr::from(([127, 0, 0, 1], 1))], None);
    let members = Members::new(&config, Connector::resolving(names, None, second));
    let (handle, changed, _) = MembersHandle::publishing(Membership::unknown(Instant::now()));
    let mut task = MembersTask::new(members, MembershipPublisher::of(&handle, changed));
    task.update_probed_addresses();
    (task, handle)
}

impl MembersTask {
    /// Delivers a DNS answer with these addresses.
    fn leads_to(&mut self, last: &[u8]) {
        self.seeds.told("m", last.iter().copied().map(ip).collect());
        self.pin();
        self.conclude();
    }

    fn place(&mut self, last: u8) -> &mut ProbedAddress {
        self.places.iter_mut().find(|place| place.sighting.at == Some(ip(last))).unwrap()
    }

    fn begins(&mut self, last: u8) -> Prober {
        let snapshot = self.published.snapshot.load_full();
        let place = self.place(last);
        place.mark_all(&snapshot);
        place.prober.take().unwrap()
    }

    fn answers(&mut self, prober: Prober, answer: MemberProbeAnswer, list: Option<Vec<ListedMember>>) {
        let told = Ok(IdentifiedMember { answer, makeshift: false, is_standing: false });
        self.handle_report(
            prober,
            ProbeReport { told, list: list.map(Ok), auth: None, login_refused: false, ids: None, took: None },
        );
    }

    fn is_silent(&mut self, last: u8) {
        let prober = self.begins(last);
        let told = Err(ProbeFailure::Gone);
        self.handle_report(
            prober,
            ProbeReport { told, list: None, auth: None, login_refused: false, ids: None, took: None },
        );
    }

    /// Runs one round of probes begun together: the members in `answered` answer after `took`, the members in
    /// `late` time out. Returns the time limit of the round.
    async fn round(&mut self, answered: &[(u8, MemberProbeAnswer)], took: Duration, late: &[u8]) -> Duration {
        let limit = self.limit();
        let mut begun = Vec::new();
        for last in answered.iter().map(|(last, _)| last).chain(late) {
            let prober = self.begins(*last);
            let place = self.place(*last);
            (place.asked, place.limit) = (Some(Instant::now()), limit);
            begun.push(prober);
        }
        tokio::time::advance(took.min(limit)).await;
        let mut begun = begun.into_iter();
        for (_, answer) in answered {
            let told = Ok(IdentifiedMember { answer: answer.clone(), makeshift: false, is_standing: false });
            let report = ProbeReport {
                told,
                took: Some(took),
                list: None,
                auth: None,
                login_refused: false,
                ids: None,
            };
            self.handle_report(begun.next().unwrap(), report);
        }
        tokio::time::advance(limit.saturating_sub(took)).await;
        for prober in begun {
            let told = Err(ProbeFailure::Late);
            let report =
                ProbeReport { told, took: None, list: None, auth: None, login_refused: false, ids: None };
            self.handle_report(prober, report);
        }
        limit
    }

    /// Runs a whole probe with this answer.
    fn hears(&mut self, last: u8, answer: MemberProbeAnswer) {
        let prober = self.begins(last);
        self.answers(prober, answer, None);
    }
}

fn of(member: u64, cluster: ClusterId) -> MemberProbeAnswer {
    MemberProbeAnswer {
        member: MemberId(member),
        cluster: Some(cluster),
        version: None,
        role: Role::Voter,
        leader: LeaderView::Member(MemberId(member)),
        term: 1,
        store_status: None,
    }
}

fn listed(member: u64) -> ListedMember {
    ListedMember {
        id: MemberId(member),
        name: "m".into(),
        role: Role::Voter,
        client_urls: Arc::default(),
        peer_urls: Arc::default(),
    }
}

/// A name server may return only some addresses of a name at a time: a single DNS answer, leading to an
/// address of a different cluster, does not prove a move of all members.
#[tokio::test(start_paused = true)]
async fn who_goes_on_answering_where_one_answer_does_not_lead_keeps_us_where_we_are() {
    let (mut task, handle) = task(ClusterPin::Follow);
    task.leads_to(&[1, 2]);
    task.hears(1, of(11, OURS));
    task.hears(2, of(12, OURS));
    assert_eq!(handle.snapshot.load().ready_voters().count(), 2);
    task.leads_to(&[3]);
    task.hears(3, of(13, OTHER));
    assert_eq!(agreed(OURS, &task.sightings_of_now()), None, "two go on answering as ours");
    task.is_silent(1);
    assert_eq!(agreed(OURS, &task.sightings_of_now()), None);
    task.is_silent(2);
    assert_eq!(agreed(OURS, &task.sightings_of_now()), Some(OTHER), "who is silent there has no voice");
}

/// A hung member has two addresses: the first one going silent does not clear the second.
#[tokio::test(start_paused = true)]
async fn a_member_that_is_suspected_is_so_at_its_other_address_until_it_answers_there() {
    let (mut task, handle) = task(ClusterPin::FirstAnswer);
    task.leads_to(&[1, 2]);
    task.hears(1, of(11, OURS));
    task.hears(2, of(11, OURS));
    let is_ready = |handle: &MembersHandle| handle.snapshot.load().get(MemberId(11)).unwrap().is_ready();
    assert_eq!(handle.snapshot.load().get(MemberId(11)).unwrap().resolved_ip, Some(ip(1)));
    let began_before = task.begins(2);
    handle.snapshot.load().get(MemberId(11)).unwrap().suspect();
    task.is_silent(1);
    assert_eq!(handle.snapshot.load().get(MemberId(11)).unwrap().resolved_ip, Some(ip(2)));
    assert!(!is_ready(&handle), "nobody has answered there since");
    task.answers(began_before, of(11, OURS), None);
    assert!(!is_ready(&handle), "what began before may be of before");
    task.hears(2, of(11, OURS));
    assert!(is_ready(&handle));
}

#[tokio::test(start_paused = true)]
async fn a_member_that_comes_back_elsewhere_is_ready_by_its_first_answer_there() {
    let (mut task, handle) = task(ClusterPin::FirstAnswer);
    task.leads_to(&[1]);
    task.hears(1, of(11, OURS));
    handle.snapshot.load().get(MemberId(11)).unwrap().suspect();
    task.leads_to(&[1, 2]);
    task.is_silent(1);
    task.hears(2, of(11, OURS));
    let now = handle.snapshot.load();
    let member = now.get(MemberId(11)).unwrap();
    assert_eq!((member.resolved_ip, member.is_ready()), (Some(ip(2)), true));
    // Suspicions raised before and after the move are distinct.
    member.suspect();
    assert!(!member.is_ready());
}

/// An address may lead to a different cluster from one call to the next; the list then belongs to the
/// different cluster.
#[tokio::test(start_paused = true)]
async fn a_list_is_believed_only_from_who_answers_as_ours() {
    let (mut task, handle) = task(ClusterPin::FirstAnswer);
    task.leads_to(&[1, 2]);
    task.hears(1, of(11, OURS));
    task.hears(2, of(12, OURS));
    let ids = |task: &MembersTask| {
        let list = task.list.as_ref().map(|list| list.iter().map(|listed| listed.id.0).collect::<Vec<_>>());
        (list, task.known.iter().map(|id| id.0).collect::<Vec<_>>())
    };
    let prober = task.begins(1);
    task.answers(prober, of(21, OTHER), Some(vec![listed(21), listed(22)]));
    assert_eq!(ids(&task), (None, vec![11, 12]));
    let nameless = MemberProbeAnswer { cluster: None, ..of(22, OTHER) };
    task.hears(1, nameless);
    assert_eq!(handle.snapshot.load().ready_voters().map(|member| member.id.0).collect::<Vec<_>>(), [12]);
    let prober = task.begins(2);
    task.answers(prober, of(12, OURS), Some(vec![listed(11), listed(12)]));
    assert_eq!(ids(&task), (Some(vec![11, 12]), vec![11, 12]));
}

/// The leader was added and elected after the last read of the list: calls for the leader wait for the
/// leader's address.
#[tokio::test(start_paused = true)]
async fn a_leader_that_is_not_listed_brings_the_next_look_at_the_list_forward() {
    let (mut task, handle) = task(ClusterPin::FirstAnswer);
    task.leads_to(&[1]);
    let prober = task.begins(1);
    task.answers(prober, of(11, OURS), Some(vec![listed(11)]));
    let asked = Instant::now();
    (task.list_asked, task.list_due) = (Some(asked), asked + LIST);
    let sees = |leader| MemberProbeAnswer { leader: LeaderView::Member(MemberId(leader)), ..of(11, OURS) };
    task.hears(1, sees(11));
    assert_eq!(task.list_due, asked + LIST, "it is listed");
    task.hears(1, sees(12));
    assert_eq!(handle.snapshot.load().leader, Some(MemberId(12)));
    assert_eq!(task.list_due, asked + FORCED, "at once");
    // A lagging member may return a list without the leader, so the reads are spaced out.
    let asked = asked + FORCED;
    (task.list_asked, task.list_due) = (Some(asked), asked + LIST);
    task.hears(1, sees(12));
    assert_eq!(task.list_due, asked + LIST_AGAIN);
    // A listed leader without a usable address triggers no read: the list has no further information.
    let prober = task.begins(1);
    task.answers(prober, sees(12), Some(vec![listed(11), listed(12)]));
    assert!(handle.snapshot.load().absent.iter().any(|absent| absent.id == MemberId(12)));
    (task.list_asked, task.list_due) = (Some(asked), asked + LIST);
    task.hears(1, sees(12));
    assert_eq!(task.list_due, asked + LIST);
}

#[tokio::test(start_paused = true)]
async fn members_that_are_all_slow_are_all_ready_and_one_that_alone_is_slow_is_not() {
    const MS: Duration = Duration::from_millis(1);
    let second = 1000 * MS;
    let (mut task, handle) = task(ClusterPin::FirstAnswer);
    task.leads_to(&[1, 2, 3]);
    let answers = |lasts: &[u8]| -> Vec<_> {
        let of_one = |last: &u8| {
            (
                *last,
                MemberProbeAnswer {
                    leader: LeaderView::Member(MemberId(11)),
                    ..of(10 + u64::from(*last), OURS)
                },
            )
        };
        lasts.iter().map(of_one).collect()
    };
    let ready = || handle.snapshot.load().ready_voters().map(|member| member.id.0).collect::<Vec<_>>();
    let all = answers(&[1, 2, 3]);
    assert_eq!(task.round(&all, MS, &[]).await, second);
    assert_eq!(ready(), [11, 12, 13]);
    // All members suddenly take 3 s.
    assert_eq!(task.round(&[], second, &[1, 2, 3]).await, second);
    assert_eq!(task.round(&[], second, &[1, 2, 3]).await, 2 * second);
    assert_eq!(ready(), [11, 12, 13], "nobody is faster");
    assert_eq!(task.round(&all, 3 * second, &[]).await, 4 * second);
    assert_eq!(task.round(&all, 3 * second, &[]).await, 12 * second, "four times what the fastest takes");
    assert_eq!(ready(), [11, 12, 13]);
    // Two members are fast again; the third stays slow.
    let two = answers(&[1, 2]);
    let mut rounds = 0;
    while task.limit() > 2 * second {
        task.round(&all, MS, &[]).await;
        rounds += 1;
    }
    assert!(rounds < 20, "{rounds}");
    task.round(&two, MS, &[3]).await;
    assert_eq!(ready(), [11, 12, 13], "one late answer is no silence");
    task.round(&two, MS, &[3]).await;
    assert_eq!(ready(), [11, 12]);
    // No member answers: all are lost after etcd's own limit.
    task.round(&two, MS, &[]).await;
    while task.limit() > second {
        task.round(&two, MS, &[]).await;
    }
    let mut silent = Duration::ZERO;
    while !ready().is_empty() {
        silent += task.round(&[], MS, &[1, 2]).await;
    }
    assert_eq!(silent, 7 * second);
}

/// A removed member is missing from its own list, before any different member's list shows the removal.
#[tokio::test(start_paused = true)]
async fn a_member_that_was_removed_takes_no_calls_and_the_list_is_asked_for() {
    let (mut task, handle) = task(ClusterPin::FirstAnswer);
    task.leads_to(&[1, 2]);
    task.hears(1, of(11, OURS));
    let prober = task.begins(2);
    task.answers(prober, of(12, OURS), Some(vec![listed(11), listed(12)]));
    assert_eq!(handle.snapshot.load().ready_voters().count(), 2);
    task.list_due = Instant::now() + LIST;
    let prober = task.begins(2);
    let (told, ids) = (Err(ProbeFailure::Removed), Some([MemberId(11)].into()));
    task.handle_report(
        prober,
        ProbeReport { told, ids, list: None, auth: None, login_refused: false, took: None },
    );
    assert_eq!(handle.snapshot.load().ready_voters().map(|member| member.id.0).collect::<Vec<_>>(), [11]);
    assert!(task.list_due <= Instant::now() + LIST_AGAIN);
    // A member whose own list differs from the accepted list triggers a read too.
    task.list_due = Instant::now() + LIST;
    let prober = task.begins(1);
    let told = Ok(IdentifiedMember { answer: of(11, OURS), makeshift: false, is_standing: false });
    let ids = Some([MemberId(11)].into());
    task.handle_report(
        prober,
        ProbeReport { told, ids, list: None, auth: None, login_refused: false, took: None },
    );
    assert!(task.list_due <= Instant::now() + LIST_AGAIN);
}

/// No probe begins during a removal, and a removal waits for probes in flight.
#[tokio::test(start_paused = true)]
async fn probes_of_a_member_stop_before_its_removal() {
    let (mut task, handle) = task(ClusterPin::FirstAnswer);
    task.leads_to(&[1]);
    task.hears(1, of(11, OURS));
    let window = Arc::clone(&handle.snapshot.load().get(MemberId(11)).unwrap().maintenance);
    let due = |task: &mut MembersTask| {
        task.place(1).due = Instant::now();
        task.begin_due();
        task.probes.len()
    };
    let removal = window.begin_removal();
    assert_eq!((due(&mut task), window.busy()), (0, 0));
    drop(removal);
    assert_eq!((due(&mut task), window.busy()), (1, 1));
    task.probes.clear();
    assert_eq!(window.busy(), 0);
}

/// While Keyward believes that auth is off, a wrong password is accepted.
#[tokio::test(start_paused = true)]
async fn the_auth_setting_is_asked_for_with_each_round_of_probes_and_confirmed_with_each_list() {
    let (mut task, _handle) = task(ClusterPin::FirstAnswer);
    task.leads_to(&[1]);
    task.hears(1, of(1, OURS));
    let mut confirmed = 0;
    for _ in 0..40 {
        task.place(1).want.auth = None;
        task.assign(Instant::now());
        let question = task.place(1).want.auth.expect("asked in each round");
        confirmed += usize::from(question.confirms);
        tokio::time::advance(PROBE).await;
    }
    assert_eq!(confirmed, 2, "in twenty seconds");
}
