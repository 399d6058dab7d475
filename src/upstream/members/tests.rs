//! What the task makes of what is heard, where that is more than `census` or `following` can see.

use std::net::{IpAddr, SocketAddr};

use super::census::{Answer, Sight};
use super::*;
use crate::config::{Discovery, Endpoint, OutageTimes, Scheme, Serves};
use crate::upstream::membership::Role;
use crate::upstream::names::Names;

const OURS: ClusterId = ClusterId(1);
const OTHER: ClusterId = ClusterId(2);

fn ip(last: u8) -> IpAddr {
    IpAddr::from([127, 0, 0, last])
}

/// One name is configured. Nothing is asked: what is heard is laid down.
fn task(pin: ClusterPin) -> (Task, MembersHandle) {
    let second = Duration::from_secs(1);
    let config = Cluster {
        endpoints: vec![Endpoint { scheme: Scheme::Http, host: "m".into(), port: 1 }],
        tls: None,
        connect_timeout: second,
        idle_timeout: second,
        token_ttl: second,
        pin,
        reads: Serves::Any,
        writes: Serves::Any,
        near: Vec::new(),
        hedge_after: None,
        outage: OutageTimes::default(),
        probe: None,
        discovery: Discovery::default(),
    };
    let names = Names::by(&[SocketAddr::from(([127, 0, 0, 1], 1))]).unwrap();
    let members = Members::new(&config, Connector::resolving(names, None, second));
    let (handle, changed, _) = MembersHandle::showing(Membership::unknown(Instant::now()));
    let mut task = Task::new(members, Published::of(&handle, changed));
    task.settle();
    (task, handle)
}

impl Task {
    /// A name server says that the name leads there.
    fn leads_to(&mut self, last: &[u8]) {
        self.seeds.told("m", last.iter().copied().map(ip).collect());
        self.pin();
        self.conclude();
    }

    fn place(&mut self, last: u8) -> &mut Place {
        self.places.iter_mut().find(|place| place.sighting.at == Some(ip(last))).unwrap()
    }

    fn begins(&mut self, last: u8) -> Prober {
        let snapshot = self.published.snapshot.load_full();
        let place = self.place(last);
        place.mark_all(&snapshot);
        place.prober.take().unwrap()
    }

    fn answers(&mut self, prober: Prober, answer: Answer, list: Option<Vec<Listed>>) {
        let told = Ok(Told { answer, makeshift: false });
        self.heard(prober, Report { told, list: list.map(Ok), auth: None, login_refused: false });
    }

    fn is_silent(&mut self, last: u8) {
        let prober = self.begins(last);
        let told = Err(Silence::Gone);
        self.heard(prober, Report { told, list: None, auth: None, login_refused: false });
    }

    /// A whole probe.
    fn hears(&mut self, last: u8, answer: Answer) {
        let prober = self.begins(last);
        self.answers(prober, answer, None);
    }
}

fn of(member: u64, cluster: ClusterId) -> Answer {
    Answer {
        member: MemberId(member),
        cluster: Some(cluster),
        version: None,
        role: Role::Voter,
        leader: Sight::Member(MemberId(member)),
        term: 1,
        vitals: None,
    }
}

fn listed(member: u64) -> Listed {
    Listed {
        id: MemberId(member),
        name: "m".into(),
        role: Role::Voter,
        client_urls: Arc::default(),
        peer_urls: Arc::default(),
    }
}

/// A name server may give some of a name's addresses at a time: one answer with an address of another cluster alone does not say
/// that all have become that.
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

/// A member that hangs has two addresses: that one of them is known to be silent first says nothing good of the other.
#[tokio::test(start_paused = true)]
async fn a_member_that_is_suspected_is_so_at_its_other_address_until_it_answers_there() {
    let (mut task, handle) = task(ClusterPin::FirstAnswer);
    task.leads_to(&[1, 2]);
    task.hears(1, of(11, OURS));
    task.hears(2, of(11, OURS));
    let is_ready = |handle: &MembersHandle| handle.snapshot.load().get(MemberId(11)).unwrap().is_ready();
    assert_eq!(handle.snapshot.load().get(MemberId(11)).unwrap().at, Some(ip(1)));
    let began_before = task.begins(2);
    handle.snapshot.load().get(MemberId(11)).unwrap().suspect();
    task.is_silent(1);
    assert_eq!(handle.snapshot.load().get(MemberId(11)).unwrap().at, Some(ip(2)));
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
    assert_eq!((member.at, member.is_ready()), (Some(ip(2)), true));
    // What was raised before the move, and what is raised after it, are told apart.
    member.suspect();
    assert!(!member.is_ready());
}

/// Where an address leads to another cluster from one call to the next, its list is that one's.
#[tokio::test(start_paused = true)]
async fn a_list_is_believed_only_from_who_answers_as_ours() {
    let (mut task, handle) = task(ClusterPin::FirstAnswer);
    task.leads_to(&[1, 2]);
    task.hears(1, of(11, OURS));
    task.hears(2, of(12, OURS));
    let ids = |task: &Task| {
        let list = task.list.as_ref().map(|list| list.iter().map(|listed| listed.id.0).collect::<Vec<_>>());
        (list, task.known.iter().map(|id| id.0).collect::<Vec<_>>())
    };
    let prober = task.begins(1);
    task.answers(prober, of(21, OTHER), Some(vec![listed(21), listed(22)]));
    assert_eq!(ids(&task), (None, vec![11, 12]));
    let nameless = Answer { cluster: None, ..of(22, OTHER) };
    task.hears(1, nameless);
    assert_eq!(handle.snapshot.load().ready_voters().map(|member| member.id.0).collect::<Vec<_>>(), [12]);
    let prober = task.begins(2);
    task.answers(prober, of(12, OURS), Some(vec![listed(11), listed(12)]));
    assert_eq!(ids(&task), (Some(vec![11, 12]), vec![11, 12]));
}

/// It was added and took over since the list was asked for: calls for the leader wait for its address.
#[tokio::test(start_paused = true)]
async fn a_leader_that_is_not_listed_brings_the_next_look_at_the_list_forward() {
    let (mut task, handle) = task(ClusterPin::FirstAnswer);
    task.leads_to(&[1]);
    let prober = task.begins(1);
    task.answers(prober, of(11, OURS), Some(vec![listed(11)]));
    let asked = Instant::now();
    (task.list_asked, task.list_due) = (Some(asked), asked + LIST);
    let sees = |leader| Answer { leader: Sight::Member(MemberId(leader)), ..of(11, OURS) };
    task.hears(1, sees(11));
    assert_eq!(task.list_due, asked + LIST, "it is listed");
    task.hears(1, sees(12));
    assert_eq!(handle.snapshot.load().leader, Some(MemberId(12)));
    assert_eq!(task.list_due, asked + FORCED, "at once");
    // A member that is behind tells a list without it: not as fast as it goes.
    let asked = asked + FORCED;
    (task.list_asked, task.list_due) = (Some(asked), asked + LIST);
    task.hears(1, sees(12));
    assert_eq!(task.list_due, asked + LIST_AGAIN);
    // One whose address may not be used is listed, and the list tells no more.
    let prober = task.begins(1);
    task.answers(prober, sees(12), Some(vec![listed(11), listed(12)]));
    assert!(handle.snapshot.load().absent.iter().any(|absent| absent.id == MemberId(12)));
    (task.list_asked, task.list_due) = (Some(asked), asked + LIST);
    task.hears(1, sees(12));
    assert_eq!(task.list_due, asked + LIST);
}
