//! The leases of two namespaces: a hostile neighbour that knows every lease destroys no session, and the clients of each namespace get
//! the answers of an etcd of their own.

use std::collections::BTreeMap;

use bytes::Bytes;
use futures_util::future::join_all;
use futures_util::stream;
use keyward::pb::etcdserverpb::compare::{CompareResult, CompareTarget, TargetUnion};
use keyward::pb::etcdserverpb::kv_client::KvClient;
use keyward::pb::etcdserverpb::lease_client::LeaseClient;
use keyward::pb::etcdserverpb::request_op::Request as Op;
use keyward::pb::etcdserverpb::response_op::Response as Done;
use keyward::pb::etcdserverpb::{
    Compare, DeleteRangeRequest, LeaseGrantRequest, LeaseKeepAliveRequest, LeaseKeepAliveResponse,
    LeaseLeasesRequest, LeaseRevokeRequest, LeaseTimeToLiveRequest, LeaseTimeToLiveResponse, PutRequest,
    RangeRequest, RequestOp, TxnRequest, TxnResponse,
};
use keyward::pb::mvccpb::KeyValue;
use keyward::pb::v3electionpb::election_client::ElectionClient;
use keyward::pb::v3electionpb::{CampaignRequest, LeaderKey, ProclaimRequest, ResignRequest};
use keyward::pb::v3lockpb::lock_client::LockClient;
use keyward::pb::v3lockpb::{LockRequest, UnlockRequest};
use tonic::{Code, Status};

use crate::caller::Caller;
use crate::chaos::seeded::Rng;
use crate::harness::binary;
use crate::harness::keyward::{Keyward, Site};
use crate::harness::{Auth, Cluster, Options, password, versions};

/// The hostile neighbour, and the namespace of its user.
const HOSTILE: (&str, &str) = ("alice", "/a/one/");
const VICTIM: (&str, &str) = ("u00", "/u/two/");
const SESSIONS: usize = 60;
const TTL: i64 = 600;
const NOT_FOUND: (Code, &str) = (Code::NotFound, "etcdserver: requested lease not found");

/// The users of both namespaces at etcd.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum EtcdUsers {
    /// Each has a user with a role for its namespace.
    Own,
    /// Both are root.
    Shared,
}

fn options(auth: Auth) -> Options {
    Options { members: 1, auth, ..Options::default() }
}

/// Keyward with both namespaces, in this mode of the policy.
async fn keyward(cluster: &Cluster, mode: &str, users: EtcdUsers, leases: &str) -> Keyward {
    let site = Site::new();
    let role = |name: &str, prefix: &str| {
        format!(
            "[[role]]\nname = '{name}'\n[[role.allow]]\nactions = ['read', 'write', 'watch', 'lock']\n\
             prefix = '{prefix}'\n[[role.allow]]\nactions = ['lease']\n"
        )
    };
    let binding = |(user, namespace): (&str, &str)| {
        format!("[[binding]]\npeer = 'password:{user}'\nnamespace = '{namespace}'\nroles = ['{user}']\n")
    };
    let of = |tenant: (&str, &str)| role(tenant.0, tenant.1) + &binding(tenant);
    site.write("policy.toml", &(role("unused", "/none/") + &of(HOSTILE) + &of(VICTIM)));
    let mut config = site.in_front_of(cluster);
    config += &format!(
        "policy.file = \"policy.toml\"\npolicy.mode = \"{mode}\"\npolicy.namespace_leases = \"{leases}\"\n"
    );
    if users == EtcdUsers::Shared {
        let secret = site.write("shared", &password("root"));
        config += &format!("[[user]]\nname = \"root\"\npassword_file = {secret:?}\n");
        for (user, _) in [HOSTILE, VICTIM] {
            config += &format!("[[map]]\npeer = \"password:{user}\"\nas = \"root\"\n");
        }
    }
    Keyward::start(site, &config).await
}

fn told<T>(answer: Result<T, Status>) -> Result<T, (Code, String)> {
    answer.map_err(|status| (status.code(), status.message().to_owned()))
}

type Told<T> = Result<T, (Code, String)>;

async fn revoke(caller: &Caller, id: i64) -> Told<()> {
    let mut client = LeaseClient::new(caller.channel.clone());
    told(client.lease_revoke(caller.request(LeaseRevokeRequest { id })).await.map(drop))
}

async fn time_to_live(caller: &Caller, id: i64, keys: bool) -> Told<LeaseTimeToLiveResponse> {
    let request = caller.request(LeaseTimeToLiveRequest { id, keys });
    let answer = LeaseClient::new(caller.channel.clone()).lease_time_to_live(request).await;
    told(answer.map(tonic::Response::into_inner))
}

async fn renew(caller: &Caller, id: i64) -> Told<LeaseKeepAliveResponse> {
    let asked = stream::iter([LeaseKeepAliveRequest { id }]);
    let renewed = async {
        let opened = LeaseClient::new(caller.channel.clone()).lease_keep_alive(caller.request(asked)).await?;
        opened.into_inner().message().await?.ok_or_else(|| Status::unknown("no answer"))
    };
    told(renewed.await)
}

async fn lock(caller: &Caller, name: &str, lease: i64) -> Told<Bytes> {
    let request = caller.request(LockRequest { name: name.to_owned().into(), lease });
    let locked = LockClient::new(caller.channel.clone()).lock(request).await;
    told(locked.map(|locked| locked.into_inner().key))
}

/// Everything that a neighbour can do with a lease, most harmful first. Returns the number of attempts that had an effect.
async fn attack(hostile: &Caller, lease: i64) -> usize {
    let gone = (NOT_FOUND.0, NOT_FOUND.1.to_owned());
    let mut harmful = 0;
    let mut count = |found: bool| harmful += usize::from(found);
    count(renew(hostile, lease).await.is_ok_and(|renewed| renewed.ttl > 0));
    count(time_to_live(hostile, lease, true).await.is_ok_and(|life| life.ttl != -1));
    count(told(hostile.put("/mine", b"v".to_vec(), lease).await) != Err(gone.clone()));
    let put = PutRequest { key: "/mine".into(), lease, ..PutRequest::default() };
    let op = RequestOp { request: Some(Op::RequestPut(put)) };
    let inner = TxnRequest { success: vec![op], ..TxnRequest::default() };
    let outer = RequestOp { request: Some(Op::RequestTxn(inner)) };
    let txn = hostile.request(TxnRequest { success: vec![outer], ..TxnRequest::default() });
    count(told(KvClient::new(hostile.channel.clone()).txn(txn).await.map(drop)) != Err(gone.clone()));
    count(lock(hostile, "mine", lease).await.is_ok());
    count(revoke(hostile, lease).await != Err(gone));
    harmful
}

/// Sessions of the victim: each is attacked between its grant and its first key, when no key shows whose it is, and again with the key.
/// Returns the number of destroyed sessions, and of attempts that had an effect.
async fn sessions(hostile: &Caller, victim: &Caller) -> (usize, usize) {
    let (mut destroyed, mut harmful, mut held) = (0, 0, Vec::new());
    for number in 0..SESSIONS {
        let lease = victim.grant(TTL).await;
        harmful += attack(hostile, lease).await;
        // etcd's own ids are counters, so that a neighbour's next ids tell this one.
        let near = hostile.grant(TTL).await;
        let guesses = (near - 6..near + 7).filter(|guess| *guess != near);
        let revoked = join_all(guesses.map(|guess| revoke(hostile, guess))).await;
        harmful += revoked.iter().filter(|revoked| revoked.is_ok()).count();
        let key = format!("/session/{number}");
        if victim.put(&key, b"v".to_vec(), lease).await.is_err() {
            destroyed += 1;
            continue;
        }
        harmful += attack(hostile, lease).await;
        let life = time_to_live(victim, lease, true).await.expect("the life of its own lease");
        destroyed += usize::from(life.ttl <= 0 || life.keys != [key]);
        held.push(lease);
    }
    let mut leases = LeaseClient::new(hostile.channel.clone());
    if let Ok(listed) = leases.lease_leases(hostile.request(LeaseLeasesRequest {})).await {
        let listed = listed.into_inner().leases;
        assert!(listed.iter().all(|lease| !held.contains(&lease.id)), "the neighbour's leases are listed");
    }
    for lease in held {
        assert_eq!(revoke(victim, lease).await, Ok(()), "its own lease");
    }
    (destroyed, harmful)
}

#[tokio::test]
async fn a_hostile_neighbour_destroys_no_session() {
    for version in versions() {
        let cluster = Cluster::start(&version, options(Auth::On { extra_users: 1 })).await;
        for users in [EtcdUsers::Shared, EtcdUsers::Own] {
            for mode in ["off", "enforce"] {
                let keyward = keyward(&cluster, mode, users, "own").await;
                let address = keyward.site().listen;
                let hostile = Caller::log_in(address, HOSTILE.0).await;
                let victim = Caller::log_in(address, VICTIM.0).await;
                let (destroyed, harmful) = sessions(&hostile, &victim).await;
                println!(
                    "{version} {users:?} {mode}: {destroyed} of {SESSIONS} destroyed, {harmful} with effect"
                );
                assert_eq!((destroyed, harmful), (0, 0), "{version} {users:?} {mode}");
                assert!(keyward.metric("keyward_policy_foreign_leases_total", &[]).await > 0.0);
            }
        }
        // What an operator may choose for the time of an upgrade; and the proof that the attack is one.
        let keyward = keyward(&cluster, "off", EtcdUsers::Shared, "any").await;
        let address = keyward.site().listen;
        let (hostile, victim) =
            (Caller::log_in(address, HOSTILE.0).await, Caller::log_in(address, VICTIM.0).await);
        let lease = victim.grant(TTL).await;
        assert!(attack(&hostile, lease).await >= 5, "{version}");
    }
}

/// A lease that a step names.
#[derive(Clone, Copy, Debug)]
enum Named {
    None,
    /// One that was granted to this client, perhaps revoked since.
    Own(usize),
    /// One of the other namespace; nothing in an etcd of one's own.
    Foreign(usize),
    Number(i64),
}

/// A client at one of its two places, with the ids of its leases there, in the order of their grants.
struct Place {
    caller: Caller,
    leases: Vec<i64>,
}

/// A client in a namespace, and the same client at an etcd of its own.
struct Twin {
    through: Place,
    beside: Place,
}

/// A thing to do.
#[derive(Clone, Debug)]
enum Step {
    Grant,
    GrantAgain(usize),
    Revoke(Named),
    Put {
        key: String,
        lease: Named,
        keeps_lease: bool,
    },
    /// Compares the key's lease, then puts in one branch, and in a Txn in the other.
    Txn {
        key: String,
        compared: Named,
        then: Named,
        otherwise: Named,
    },
    Delete(String),
    TimeToLive(Named, bool),
    Renew(Named),
    Leases,
    Lock(Named),
    Campaign(Named, Named),
    Read,
}

impl Place {
    fn id(&self, named: Named, other: &[i64]) -> i64 {
        match named {
            Named::None => 0,
            Named::Own(at) => self.leases[at % self.leases.len().max(1)],
            Named::Foreign(at) => other.get(at % other.len().max(1)).copied().unwrap_or(7),
            Named::Number(id) => id,
        }
    }

    /// The lease by the number of its grant.
    fn named(&self, id: i64) -> String {
        match self.leases.iter().position(|lease| *lease == id) {
            _ if id == 0 => "-".to_owned(),
            Some(at) => format!("lease {at}"),
            None => "lease of a lock".to_owned(),
        }
    }

    /// The key without the id of its lease.
    fn key(&self, key: &[u8]) -> String {
        let text = String::from_utf8_lossy(key).into_owned();
        match text.rsplit_once('/').map(|(name, id)| (name, i64::from_str_radix(id, 16))) {
            Some((name, Ok(id))) if name == "lock" || name == "election" => {
                format!("{name}/{}", self.named(id))
            }
            _ => text,
        }
    }

    fn kv(&self, kv: &KeyValue) -> String {
        format!("{}={:?} version {} {}", self.key(&kv.key), kv.value, kv.version, self.named(kv.lease))
    }

    fn txn(&self, answer: &TxnResponse) -> String {
        let each = answer.responses.iter().map(|op| match op.response.as_ref().expect("a response") {
            Done::ResponsePut(put) => format!("put {:?}", put.prev_kv.as_ref().map(|kv| self.kv(kv))),
            Done::ResponseTxn(txn) => format!("{{{}}}", self.txn(txn)),
            other => format!("{other:?}"),
        });
        format!("{} {}", answer.succeeded, each.collect::<Vec<_>>().join(", "))
    }

    /// Does the step and returns the answer as text, without revisions and ids. `other` are the leases of the other namespace.
    #[expect(clippy::too_many_lines, reason = "a few lines for each kind of step, and no branch beside")]
    async fn take(&mut self, step: &Step, other: &[i64]) -> String {
        let channel = self.caller.channel.clone();
        let (mut leases, mut kv) = (LeaseClient::new(channel.clone()), KvClient::new(channel.clone()));
        match step.clone() {
            Step::Grant => {
                let id = self.caller.grant(TTL).await;
                self.leases.push(id);
                "granted".to_owned()
            }
            Step::GrantAgain(at) => {
                let id = self.id(Named::Own(at), other);
                let granted =
                    leases.lease_grant(self.caller.request(LeaseGrantRequest { ttl: TTL, id })).await;
                format!("{:?}", told(granted.map(|granted| granted.into_inner().id == id)))
            }
            Step::Revoke(lease) => format!("{:?}", revoke(&self.caller, self.id(lease, other)).await),
            Step::Put { key, lease, keeps_lease } => {
                let lease = self.id(lease, other);
                let ignore_lease = keeps_lease && lease == 0;
                let put = PutRequest {
                    key: key.into(),
                    value: "v".into(),
                    lease,
                    prev_kv: true,
                    ignore_lease,
                    ..PutRequest::default()
                };
                let answer = told(kv.put(self.caller.request(put)).await);
                format!("{:?}", answer.map(|put| put.into_inner().prev_kv.map(|kv| self.kv(&kv))))
            }
            Step::Txn { key, compared, then, otherwise } => {
                let put = |lease| {
                    let put =
                        PutRequest { key: key.clone().into(), lease, prev_kv: true, ..PutRequest::default() };
                    vec![RequestOp { request: Some(Op::RequestPut(put)) }]
                };
                let compare = Compare {
                    result: CompareResult::Equal.into(),
                    target: CompareTarget::Lease.into(),
                    key: key.clone().into(),
                    target_union: Some(TargetUnion::Lease(self.id(compared, other))),
                    ..Compare::default()
                };
                let inner = TxnRequest { success: put(self.id(otherwise, other)), ..TxnRequest::default() };
                let txn = TxnRequest {
                    compare: vec![compare],
                    success: put(self.id(then, other)),
                    failure: vec![RequestOp { request: Some(Op::RequestTxn(inner)) }],
                };
                let answer = told(kv.txn(self.caller.request(txn)).await);
                format!("{:?}", answer.map(|answer| self.txn(answer.get_ref())))
            }
            Step::Delete(key) => {
                let delete = DeleteRangeRequest { key: key.into(), ..DeleteRangeRequest::default() };
                let answer = told(kv.delete_range(self.caller.request(delete)).await);
                format!("{:?}", answer.map(|answer| answer.into_inner().deleted))
            }
            Step::TimeToLive(lease, keys) => {
                let id = self.id(lease, other);
                let life = time_to_live(&self.caller, id, keys).await;
                let life = life.map(|life| {
                    let mut keys: Vec<_> = life.keys.iter().map(|key| self.key(key)).collect();
                    keys.sort();
                    (life.id == id, life.ttl.signum(), life.granted_ttl, keys)
                });
                format!("{life:?}")
            }
            Step::Renew(lease) => {
                let id = self.id(lease, other);
                let renewed = renew(&self.caller, id).await;
                format!("{:?}", renewed.map(|renewed| (renewed.id == id, renewed.ttl)))
            }
            Step::Leases => {
                let listed = told(leases.lease_leases(self.caller.request(LeaseLeasesRequest {})).await);
                let listed = listed.map(|listed| {
                    let listed = listed.into_inner().leases;
                    let mut named: Vec<_> = listed.iter().map(|lease| self.named(lease.id)).collect();
                    named.sort();
                    named
                });
                format!("{listed:?}")
            }
            Step::Lock(lease) => {
                let key = lock(&self.caller, "lock", self.id(lease, other)).await;
                if let Ok(key) = &key {
                    let unlock = self.caller.request(UnlockRequest { key: key.clone() });
                    LockClient::new(channel).unlock(unlock).await.expect("unlocked");
                }
                format!("{:?}", key.map(|key| self.key(&key)))
            }
            Step::Campaign(lease, proclaimed) => {
                let mut elections = ElectionClient::new(channel);
                let campaign = CampaignRequest {
                    name: "election".into(),
                    lease: self.id(lease, other),
                    value: "v".into(),
                };
                let leader = told(elections.campaign(self.caller.request(campaign)).await);
                let leader = leader.map(|answer| answer.into_inner().leader.expect("a leader"));
                let Ok(leader) = leader else { return format!("{leader:?}") };
                let other_lease = match proclaimed {
                    Named::None => leader.lease,
                    _ => self.id(proclaimed, other),
                };
                let named = LeaderKey { lease: other_lease, ..leader.clone() };
                let proclaim = ProclaimRequest { leader: Some(named), value: "w".into() };
                let proclaimed = told(elections.proclaim(self.caller.request(proclaim)).await.map(drop));
                let resign = self.caller.request(ResignRequest { leader: Some(leader.clone()) });
                let resigned = told(elections.resign(resign).await.map(drop));
                format!("{} {proclaimed:?} {resigned:?}", self.key(&leader.key))
            }
            Step::Read => {
                let all =
                    RangeRequest { key: "\0".into(), range_end: "\0".into(), ..RangeRequest::default() };
                let read = told(kv.range(self.caller.request(all)).await);
                format!(
                    "{:?}",
                    read.map(|read| read.get_ref().kvs.iter().map(|kv| self.kv(kv)).collect::<Vec<_>>())
                )
            }
        }
    }
}

fn named(rng: &mut Rng) -> Named {
    match rng.below(8) {
        0 => Named::None,
        1 | 2 => Named::Foreign(rng.below(1000)),
        3 => Named::Number(*rng.one_of(&[7, -7, i64::MAX, i64::MIN])),
        _ => Named::Own(rng.below(1000)),
    }
}

fn step(rng: &mut Rng) -> Step {
    let key = format!("k{}", rng.below(4));
    match rng.below(22) {
        0..3 => Step::Grant,
        3 => Step::GrantAgain(rng.below(1000)),
        4 | 5 => Step::Revoke(named(rng)),
        6..9 => Step::Put { key, lease: named(rng), keeps_lease: rng.below(3) == 0 },
        9..12 => Step::Txn { key, compared: named(rng), then: named(rng), otherwise: named(rng) },
        12 => Step::Delete(key),
        13 | 14 => Step::TimeToLive(named(rng), rng.below(2) == 0),
        15 | 16 => Step::Renew(named(rng)),
        17 => Step::Leases,
        18 => Step::Lock(named(rng)),
        19 => Step::Campaign(named(rng), named(rng)),
        _ => Step::Read,
    }
}

/// Does random things with both twins. Returns the numbers of successes, of refusals, and of answers about a lease that is gone.
async fn histories(
    keyward: &Keyward,
    alone: &[Cluster],
    users: EtcdUsers,
    seed: u64,
    steps: usize,
    what: &str,
) -> BTreeMap<&'static str, usize> {
    let mut rng = Rng::new(seed);
    let mut twins = Vec::new();
    for ((user, _), cluster) in [HOSTILE, VICTIM].into_iter().zip(alone) {
        let through = Caller::log_in(keyward.site().listen, user).await;
        let beside = Caller::anybody(cluster.address(0)).await;
        let [through, beside] = [through, beside].map(|caller| Place { caller, leases: Vec::new() });
        twins.push(Twin { through, beside });
    }
    let mut found = BTreeMap::new();
    for number in 0..steps {
        let at = rng.below(2);
        let other = twins[1 - at].through.leases.clone();
        let twin = &mut twins[at];
        let step = match step(&mut rng) {
            _ if twin.through.leases.is_empty() => Step::Grant,
            // etcd lists the leases only to a user that may read the keys of all.
            Step::Leases if users == EtcdUsers::Own => Step::Read,
            step => step,
        };
        let through = twin.through.take(&step, &other).await;
        let beside = twin.beside.take(&step, &other).await;
        assert_eq!(through, beside, "{what}, step {number} of client {at}: {step:?}");
        let kind = match &through {
            answer if answer.contains("requested lease not found") => "gone",
            answer if answer.contains("Err(") => "refused",
            _ => "served",
        };
        *found.entry(kind).or_default() += 1;
    }
    found
}

/// Removes all leases and keys.
async fn forget(root: &Caller) {
    let mut leases = LeaseClient::new(root.channel.clone());
    let listed = leases.lease_leases(root.request(LeaseLeasesRequest {})).await.expect("the leases");
    for lease in listed.into_inner().leases {
        revoke(root, lease.id).await.expect("revoked");
    }
    let all =
        DeleteRangeRequest { key: "\0".into(), range_end: "\0".into(), ..DeleteRangeRequest::default() };
    KvClient::new(root.channel.clone()).delete_range(root.request(all)).await.expect("deleted");
}

/// Random things by two clients in namespaces of one cluster, each also done at an etcd that the client has for itself.
#[tokio::test]
async fn each_namespace_has_the_leases_of_an_etcd_of_its_own() {
    let (seeds, steps) = if binary::full() { (10, 600) } else { (2, 250) };
    for version in versions() {
        let cluster = Cluster::start(&version, options(Auth::On { extra_users: 1 })).await;
        let alone = [0, 1].map(|_| Cluster::start(&version, options(Auth::Off)));
        let alone = join_all(alone).await;
        for users in [EtcdUsers::Shared, EtcdUsers::Own] {
            for mode in ["off", "enforce"] {
                let keyward = keyward(&cluster, mode, users, "own").await;
                for seed in 0..seeds {
                    let what = format!("{version} {users:?} {mode} seed {seed}");
                    let found = histories(&keyward, &alone, users, seed, steps, &what).await;
                    println!("{what}: {found:?}");
                    assert!(found["served"] > steps / 4 && found["gone"] > steps / 10, "{what}: {found:?}");
                    assert!(found["refused"] > 0, "{what}: {found:?}");
                    // The next seed begins with nothing.
                    forget(&Caller::log_in(cluster.address(0), "root").await).await;
                    for cluster in &alone {
                        forget(&Caller::anybody(cluster.address(0)).await).await;
                    }
                }
            }
        }
    }
}
