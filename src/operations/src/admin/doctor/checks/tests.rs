//! Each check against healthy inputs with one fault.

use std::path::Path;
use std::sync::{Arc, LazyLock};

use rcgen::{CertificateParams, KeyPair};
use tokio::time::Instant;

use super::*;
use crate::policy_store::PolicyStoreStatus;
use keyward_access::usage::exceeded::{LimitKind, LimitScope};
use keyward_base::io::descriptor_limit::DescriptorRoom;
use keyward_base::io::kept_file::UnwrittenFile;
use keyward_cluster::discovery::store_hashes::{HashObstacle, StoreHash};
use keyward_cluster::fitness::store_status::StoreStatus;
use keyward_cluster::membership::{
    AbsentMember, AddressFault, ForeignAddress, MemberPeerUrls, UnansweredAddress, UnreadyReason,
};
use keyward_cluster::version::Version;
use keyward_config::Endpoint;
use keyward_config::reload_request::WeakerSetting;
use keyward_dial::names::NameTrouble;
use keyward_downstream::connection_table::ClientAddress;
use keyward_etcd::identity::ClusterId;
use keyward_records::audit::log::AuditSinksReport;
use keyward_records::audit::log_trouble::LogTroubleReport;
use keyward_records::audit::loss_counter::LossSeries;
use keyward_records::audit::moved_file::MovedFile;
use keyward_records::audit::retention::RetentionReport;
use keyward_records::audit::sink_state::{SinkReport, SinkTrouble};
use keyward_telemetry::conditions::CONDITIONS;

/// 2030-01-01.
static NOW: LazyLock<SystemTime> =
    LazyLock::new(|| SystemTime::UNIX_EPOCH + Duration::from_secs(1_893_456_000));
const MIB: u64 = 1 << 20;

/// A healthy cluster of three members and a complete Keyward configuration.
struct Scene {
    folder: tempfile::TempDir,
    lines: String,
    reload: ReloadState,
    members: Membership,
    auth: AuthSetting,
    examined: Vec<(MemberId, Option<MemberHealthFigures>)>,
    keywards: Vec<KeywardEndpoint>,
    without_request: Vec<MemberId>,
    hashes: StoreHashes,
    revocations_known: bool,
    revocations_unread: Option<&'static str>,
    stored_policy: Option<PolicyStoreStatus>,
    root_holders: RootHolders,
    connections: ConnectionOccupancy,
    constant_limits: Vec<Exceeded>,
    name_troubles: Vec<NameTrouble>,
    unwritten: Vec<UnwrittenFile>,
    memory_limit: Option<u64>,
    shown: Vec<(String, CertificateDer<'static>)>,
    audit: AuditReport,
    logged: Vec<StandingCondition>,
    instant: Instant,
}

fn member(id: u64) -> Member {
    let store_status = StoreStatus {
        db_size: 10 * MIB,
        db_in_use: 9 * MIB,
        raft_index: 1000,
        applied: 1000,
        ..StoreStatus::default()
    };
    Member {
        id: MemberId(id),
        name: format!("m{id}").into(),
        endpoint: Endpoint { scheme: Scheme::Http, host: "127.0.0.1".into(), port: 2379 },
        resolved_ip: None,
        role: Role::Voter,
        version: Version::parse("3.5.35").ok(),
        readiness: Readiness::Ready,
        term: 2,
        store_status: Some(Arc::new(store_status)),
        client_urls: Arc::default(),
        suspicion: Arc::default(),
        maintenance: Arc::default(),
        load: Arc::default(),
    }
}

impl Scene {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("session.key"), "0123456789abcdef".repeat(4)).unwrap();
        std::fs::write(folder.path().join("password"), "secret").unwrap();
        let known = MemberHealthFigures {
            quota: Some(100 * MIB),
            revision: Some(5000),
            compacted: Some(4000),
            clock: Some((*NOW, *NOW)),
            ..MemberHealthFigures::default()
        };
        let peering = |id| MemberPeerUrls { member: MemberId(id), name: "m".into(), urls: Arc::default() };
        let members = Membership {
            cluster: Some(ClusterId(0xc1)),
            leader: Some(MemberId(1)),
            members: (1..4).map(|id| Arc::new(member(id))).collect(),
            peer_urls: PeerUrls::Listed((1..4).map(peering).collect()),
            ..Membership::unknown(Instant::now())
        };
        Self {
            folder,
            lines: "session.key_files = ['session.key']\nrevocation.etcd_prefix = '/keyward/'\n\
                    cluster.probe = { user = 'keyward', password_file = 'password' }\n"
                .to_owned(),
            reload: ReloadState::default(),
            members,
            auth: AuthSetting::On,
            examined: (1..4).map(|id| (MemberId(id), Some(known.clone()))).collect(),
            keywards: Vec::new(),
            without_request: Vec::new(),
            hashes: StoreHashes::default(),
            revocations_known: true,
            revocations_unread: None,
            stored_policy: None,
            root_holders: RootHolders::default(),
            connections: ConnectionOccupancy { open: 100, ..ConnectionOccupancy::default() },
            constant_limits: Vec::new(),
            name_troubles: Vec::new(),
            unwritten: Vec::new(),
            memory_limit: None,
            shown: Vec::new(),
            audit: AuditReport::default(),
            logged: Vec::new(),
            instant: Instant::now() + Duration::from_secs(1),
        }
    }

    /// Replaces the third member.
    fn third(mut self, change: impl FnOnce(&mut Member)) -> Self {
        let mut third = member(3);
        change(&mut third);
        self.members.members[2] = Arc::new(third);
        self
    }

    /// Changes the last Status of the third member.
    fn third_says(self, change: impl FnOnce(&mut StoreStatus)) -> Self {
        let mut store_status = StoreStatus::clone(member(3).store_status.as_ref().unwrap());
        change(&mut store_status);
        self.third(|member| member.store_status = Some(Arc::new(store_status)))
    }

    /// Changes the unauthenticated answers of all members.
    fn told(mut self, change: impl Fn(&mut MemberHealthFigures)) -> Self {
        self.examined.iter_mut().filter_map(|(_, told)| told.as_mut()).for_each(change);
        self
    }

    fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }

    fn report(&self) -> DoctorReport {
        let path = self.folder.path().join("keyward.toml");
        let text = format!(
            "{}listener = [{{ name = 'a', address = '127.0.0.1:1'{} }}]\n\
             cluster.endpoints = ['http://127.0.0.1:2379']\n",
            self.lines,
            tls(self.folder.path())
        );
        std::fs::write(&path, text).unwrap();
        let (mut config, _) = keyward_config::load(&path).unwrap();
        config.memory_limit = self.memory_limit;
        DoctorInputs {
            now: *NOW,
            config: &config,
            reload: &self.reload,
            members: &self.members,
            auth: self.auth,
            examined: &self.examined,
            keywards: &self.keywards,
            without_request: &self.without_request,
            hashes: &self.hashes,
            revocations_known: self.revocations_known,
            revocations_unread: self.revocations_unread,
            peer_trust: None,
            stored_policy: self.stored_policy.as_ref(),
            unreachable: &keyward_access::policy::unreachable_rules::unreachable_rules(
                &config,
                &config.policy.document,
            ),
            root_holders: &self.root_holders,
            connections: &self.connections,
            constant_limits: &self.constant_limits,
            name_troubles: &self.name_troubles,
            unwritten: &self.unwritten,
            shown: &self.shown,
            audit: &self.audit,
            logged: &self.logged,
            instant: self.instant,
        }
        .report()
    }

    /// Asserts exactly the `wanted` findings, notes apart, and no unreadable input; returns the printed
    /// report.
    fn finds(&self, wanted: &[(Severity, &str)]) -> String {
        let report = self.report();
        let found: Vec<_> = report.findings.iter().map(|one| (one.severity, &*one.check)).collect();
        let found: Vec<_> = found.into_iter().filter(|(severity, _)| *severity != Severity::Note).collect();
        assert_eq!(found, wanted, "{report}");
        assert_eq!(report.unseen, Vec::<String>::new());
        let worst = report.worst().filter(|severity| *severity != Severity::Note);
        assert_eq!(worst, wanted.iter().map(|(severity, _)| *severity).min());
        assert!(report.findings.iter().all(|one| !one.fix.is_empty() && !one.fix.contains('\n')));
        report.to_string()
    }
}

/// TLS of the listener, if the folder holds a certificate.
fn tls(folder: &Path) -> &'static str {
    if folder.join("a.crt").exists() { ", tls = { cert = 'a.crt', key = 'a.key' }" } else { "" }
}

use Severity::{Error, Warning};

#[test]
fn members_that_applied_the_same_and_differ_are_told() {
    let third_at = |revision, applied, unchanged| {
        let settled = |status: &mut StoreStatus| status.unchanged = 9;
        let mut scene = Scene::new();
        for place in &mut scene.members.members {
            let mut status = StoreStatus::clone(place.store_status.as_ref().unwrap());
            settled(&mut status);
            *place = Arc::new(Member { store_status: Some(Arc::new(status)), ..Member::clone(place) });
        }
        scene.third_says(|status| {
            (status.revision, status.applied, status.unchanged) = (revision, applied, unchanged);
        })
    };
    third_at(0, 1000, 9).finds(&[]);
    third_at(1, 1000, 0).finds(&[]);
    third_at(1, 999, 9).finds(&[]);
    let said = third_at(1, 1000, 9).finds(&[(Error, "members_differ")]);
    assert!(said.contains("raft entry 1000 applied by both, the revisions are 0 and 1"), "{said}");
}

#[test]
fn a_member_that_is_ejected_paused_or_slow_is_told() {
    const MS: Duration = Duration::from_millis(1);
    let answers = |took: [u32; 3]| {
        let scene = Scene::new();
        for (member, took) in scene.members.members.iter().zip(took) {
            member.load.answered(scene.instant, took * MS);
        }
        scene
    };
    answers([1, 240, 5]).finds(&[]);
    let said = answers([1, 300, 5]).finds(&[(Warning, "member_slow")]);
    assert!(said.contains("m2 (2): calls through it take 300 ms, and 1 ms at the fastest"), "{said}");
    assert!(said.contains("keyward pause m2 keeps the calls of this replica"), "{said}");
    let said = answers([400, 300, 500]).finds(&[(Warning, "calls_slow")]);
    assert!(said.contains("they take 300 ms to 500 ms; the leader") && said.contains("is m1 (1)"), "{said}");
    let slow = answers([1, 900, 5]);
    slow.members.members[1].load.eject(slow.instant, keyward_cluster::fitness::member_load::Ejection::Slow);
    let said = slow.finds(&[(Warning, "member_ejected")]);
    assert!(said.contains("far slower than the others: 900 ms by its last calls; tried again in"), "{said}");
    let old = answers([1, 300, 5]).with(|scene| scene.instant += Duration::from_secs(60));
    old.finds(&[]);
    let paused = Scene::new();
    assert!(paused.members.members[2].maintenance.pause());
    let said = paused.finds(&[(Warning, "member_paused")]);
    assert!(said.contains("m3 (3): it is paused by an operator"), "{said}");
    assert!(said.contains("fix: keyward resume m3, once"), "{said}");
}

#[test]
fn what_the_log_tells_and_no_check_examines_is_told() {
    let logged = |name: &str, is_error, records| {
        let row = CONDITIONS.iter().find(|row| row.name == name).expect("a row");
        let (last, details) = (Duration::from_secs(12), "user=a".to_owned());
        let standing = StandingCondition { row, is_error, records, last, details };
        Scene::new().with(|scene| scene.logged.push(standing))
    };
    logged("member_ejected", false, 1).finds(&[]);
    let said = logged("login_failed", false, 1).finds(&[]);
    let told =
        "note [logged] login_failed: the log has \"login failed\": user=a (once, the last time 12 s ago)";
    assert!(said.contains(told), "{said}");
    let said = logged("lease_id_random", true, 3).finds(&[(Warning, "logged")]);
    assert!(said.contains("(3 times, with less than 10 minutes between, the last time 12 s ago)"), "{said}");
    logged("mint_fails", true, 1).finds(&[(Error, "logged")]);
    logged("peer_url_open", false, 1).finds(&[(Warning, "logged")]);
}

#[test]
fn members_with_other_contents_behind_the_same_revision_are_told() {
    let hashed = |hashes: &[(u64, i64, u32)], unread: &[(u64, HashObstacle)]| {
        let hash = |&(member, compact_revision, hash): &(u64, i64, u32)| StoreHash {
            member: MemberId(member),
            version: None,
            compact_revision,
            hash,
        };
        Scene::new().with(|scene| {
            scene.hashes = StoreHashes {
                revision: 70,
                hashes: hashes.iter().map(hash).collect(),
                unread: unread.iter().map(|(member, why)| (MemberId(*member), *why)).collect(),
            }
        })
    };
    hashed(&[(1, 60, 7), (2, 60, 7), (3, 60, 7)], &[]).finds(&[]);
    hashed(&[(1, 60, 7), (2, 60, 7), (3, 61, 8)], &[]).finds(&[]);
    hashed(&[(1, 60, 7)], &[]).finds(&[]);
    let said = hashed(&[(1, 60, 7), (2, 60, 8), (3, 60, 7)], &[]).finds(&[(Error, "members_differ")]);
    assert!(
        said.starts_with(
            "error [members_differ] m2 (2): the stores differ: at revision 70, compacted at 60, the HashKV \
             hashes are 7 at m1 (1), m3 (3); 8 at m2 (2)\n    fix: keep m1 (1), m3 (3), which agree"
        ),
        "{said}"
    );
    // Two of three are no majority without the third, if they differ.
    let said = hashed(&[(1, -1, 7), (2, -1, 8)], &[]).finds(&[(Error, "members_differ")]);
    assert!(
        said.contains("m1 (1), m2 (2): the stores differ: at revision 70 the")
            && said.contains("no majority"),
        "{said}"
    );
    let said = hashed(&[(1, -1, 7), (2, -1, 8), (3, -1, 9)], &[]).finds(&[(Error, "members_differ")]);
    assert!(said.contains("no majority"), "{said}");
    let unread = hashed(&[(1, 60, 7), (3, 60, 7)], &[(2, HashObstacle::Large)]).report();
    assert_eq!(
        unread.unseen,
        ["m2 (2): the hash of its store: it has more than 2 GiB: etcdctl endpoint hashkv, at the members \
             themselves"]
    );
    assert_eq!(unread.worst(), Some(Severity::Note));
}

#[test]
fn an_endpoint_that_is_a_keyward_is_told_and_itself_is_an_error() {
    let keyward = |is_this| {
        let endpoint = Endpoint { scheme: Scheme::Http, host: "edge".into(), port: 2379 };
        Scene::new().with(|scene| scene.keywards = vec![KeywardEndpoint { endpoint, is_this }])
    };
    assert!(keyward(false).finds(&[]).contains("note [endpoint_is_keyward] http://edge:2379: is another"));
    keyward(true).finds(&[(Error, "endpoint_is_keyward")]);
}

#[test]
fn a_rule_of_no_caller_is_an_error() {
    let nobody = Scene::new().with(|scene| {
        scene.lines = format!("{}login.sources = ['etcd']\npolicy.file = 'policy.toml'\n", scene.lines);
        let binding = |peer: &str| format!("[[binding]]\npeer = '{peer}'\nnamespace = '/{peer}/'\n");
        let policy = binding("password:a") + &binding("file:a") + &binding("listener:a");
        std::fs::write(scene.folder.path().join("policy.toml"), policy).unwrap();
    });
    let said = nobody.finds(&[(Error, "rule_unreachable")]);
    assert!(said.contains("policy: binding[1]") && said.contains("login.sources"), "{said}");
}

#[test]
fn a_rule_to_users_without_a_credential_is_a_warning() {
    let with = |name: &str| {
        Scene::new().with(|scene| {
            std::fs::write(scene.folder.path().join("password"), "x").unwrap();
            let line = "nobody:$argon2id$v=19$m=8,t=1,p=1$AAAAAAAAAAAAAAAAAAAAAA$\
                        AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA\n";
            std::fs::write(scene.folder.path().join("users"), line).unwrap();
            let rules =
                ["file:a", "file:b*", "password:*"].map(|peer| format!("{{ peer = '{peer}', as = 'same' }}"));
            scene.lines += &format!(
                "login.sources = ['file', 'etcd']\nlogin.users_file = 'users'\nmap = [{}]\n\
                 user = [{{ name = '{name}', password_file = 'password' }}]\n",
                rules.join(", ")
            );
        })
    };
    let said = with("a").finds(&[(Warning, "mapping_unproved")]);
    assert!(said.contains("[mapping_unproved] map[1]: ") && said.contains("[[user]]"), "{said}");
    with("bo").finds(&[(Warning, "mapping_unproved")]);
    let said = with("root").finds(&[(Warning, "mapping_unproved"), (Warning, "mapping_unproved")]);
    assert!(!said.contains("map[2]"), "{said}");
}

#[test]
fn nothing_is_found_where_all_is_well() {
    let newest = |scene: &mut Scene| {
        for member in &mut scene.members.members {
            Arc::make_mut(member).version = Version::parse("3.7.3").ok();
        }
    };
    assert_eq!(Scene::new().with(newest).finds(&[]), "nothing found\n");
}

/// Of etcd 3.5 in its newest patch: a note, with which the exit code is as without findings.
#[test]
fn members_that_some_requests_end_or_split() {
    let said = Scene::new().finds(&[]);
    assert!(said.starts_with("nothing found\nnote [member_weaknesses] cluster: "), "{said}");
    for weakness in ["#13554", "#18667", "#22386"] {
        assert!(said.contains(weakness), "{weakness}: {said}");
    }
    let report = Scene::new().report();
    assert_eq!(report.worst(), Some(Severity::Note));
}

#[test]
fn a_stored_policy_that_is_unknown_faulty_old_or_not_applied() {
    let now = Instant::now();
    let good = PolicyStoreStatus {
        generation: 3,
        grants: 0,
        fault: None,
        unread: None,
        is_known: true,
        confirmed_at: Some(now),
        opened_at: now,
    };
    let finds = |status: PolicyStoreStatus, wanted: &[(Severity, &str)]| {
        Scene::new().with(|scene| scene.stored_policy = Some(status)).finds(wanted)
    };
    finds(good.clone(), &[]);
    let faulty = PolicyStoreStatus { fault: Some("the pointer".into()), ..good.clone() };
    let said = finds(faulty, &[(Error, "policy_faulty")]);
    assert!(said.contains("generation 3 stays in force: the pointer"), "{said}");
    let long_ago = now.checked_sub(Duration::from_secs(60)).expect("the machine runs for longer");
    let old = PolicyStoreStatus { confirmed_at: Some(long_ago), ..good.clone() };
    finds(old, &[(Error, "policy_old")]);
    finds(PolicyStoreStatus { generation: 0, ..good.clone() }, &[(Warning, "policy_not_applied")]);
    let unread = Some("PermissionDenied: etcdserver: permission denied".to_owned());
    let unknown = PolicyStoreStatus { generation: 0, is_known: false, unread, ..good };
    let said = finds(unknown, &[(Error, "policy_unknown")]);
    assert!(said.contains("was never read (PermissionDenied: etcdserver: permission denied)"), "{said}");
}

#[test]
fn prefixes_of_a_user_without_a_role() {
    let keys = "cluster.probe = { user = 'keyward', password_file = 'password' }\n\
                revocation.etcd_prefix = '/keyward/revocations/'\npolicy.etcd_prefix = '/keyward/policy/'\n";
    let unread = Scene::new().with(|scene| {
        scene.lines = keys.to_owned();
        scene.revocations_known = false;
        scene.stored_policy = Some(PolicyStoreStatus {
            generation: 0,
            grants: 0,
            fault: None,
            unread: None,
            is_known: false,
            confirmed_at: None,
            opened_at: Instant::now(),
        });
    });
    let said =
        unread.finds(&[(Error, "policy_unknown"), (Error, "revocation_unknown"), (Warning, "session_keys")]);
    for place in ["revocations", "policy"] {
        let role = format!(
            "etcdctl role add keyward; etcdctl role grant-permission keyward readwrite /keyward/{place}/ \
             --prefix; etcdctl user grant-role keyward keyward"
        );
        assert!(said.contains(&role), "{said}");
    }
}

#[test]
fn connections_that_find_no_room() {
    let with = |occupancy: ConnectionOccupancy| Scene::new().with(|scene| scene.connections = occupancy);
    let address = ClientAddress::of([10, 0, 0, 1].into());
    let said = with(ConnectionOccupancy {
        open: 9_000,
        most: Some((address, 8_000)),
        ..ConnectionOccupancy::default()
    })
    .finds(&[(Warning, "connections_full")]);
    assert!(said.contains("9000 of 10000") && said.contains("8000, are of 10.0.0.1:"), "{said}");
    let minutes = |minutes: u64| Duration::from_secs(60 * minutes);
    let said = with(ConnectionOccupancy {
        open: 4_000,
        most: None,
        full: Some(minutes(1)),
        address_full: Some((minutes(2), address)),
        ..ConnectionOccupancy::default()
    })
    .finds(&[(Warning, "address_full"), (Warning, "connections_full")]);
    assert!(said.contains("60 s ago there was no room"), "{said}");
    assert!(said.contains("10.0.0.1: 120 s ago") && said.contains("all the 5000"), "{said}");
    let long_ago = Some(minutes(10));
    with(ConnectionOccupancy {
        open: 8_999,
        most: None,
        full: long_ago,
        address_full: long_ago.map(|ago| (ago, address)),
        ..ConnectionOccupancy::default()
    })
    .finds(&[]);
}

#[test]
fn connections_that_do_not_fit_into_the_limit_on_open_files() {
    let with = |limit, open| {
        let descriptors = Some(DescriptorRoom::of(limit));
        let connections = ConnectionOccupancy { open, descriptors, ..ConnectionOccupancy::default() };
        Scene::new().with(|scene| scene.connections = connections)
    };
    let said = with(1024, 10).finds(&[(Warning, "descriptors")]);
    assert!(
        said.contains("10000 connections are allowed, and with a limit of 1024 open files 784 fit"),
        "{said}"
    );
    with(1024, 780).finds(&[(Warning, "connections_full"), (Warning, "descriptors")]);
    with(65_536, 8_999).finds(&[]);
}

#[test]
fn names_and_name_servers_that_fail() {
    let trouble = |about: &str, is_served| NameTrouble {
        about: about.to_owned(),
        what: "the name server 10.0.0.53 does not answer".to_owned(),
        is_server: is_served,
        is_served,
    };
    let scene = Scene::new().with(|scene| {
        scene.name_troubles = vec![trouble("m1.example", false), trouble("name server 10.0.0.53", true)];
    });
    let said = scene.finds(&[(Error, "name_servers"), (Warning, "name_servers")]);
    assert!(said.contains("m1.example") && said.contains("/etc/resolv.conf"), "{said}");
}

#[test]
fn state_files_that_are_not_on_the_disk() {
    let scene = Scene::new().with(|scene| {
        scene.unwritten = vec![UnwrittenFile {
            setting: "revocation.state_file",
            path: "/state/revocations".into(),
            since: *NOW - Duration::from_secs(300),
            error: "No space left on device".to_owned(),
            loss: "a restart forgets the revocations since then",
        }];
    });
    let said = scene.finds(&[(Error, "state_file_unwritten")]);
    assert!(said.contains("for 5 minutes (No space left on device): a restart forgets"), "{said}");
}

#[test]
fn a_refused_configuration_is_told_with_every_fault() {
    let scene = Scene::new().with(|scene| {
        scene.reload.faults =
            ["log.level: unknown (line 3)", "jwt[0].keys: absent"].map(str::to_owned).into();
    });
    let said = scene.finds(&[(Error, "config_not_reloaded")]);
    assert!(said.contains("log.level: unknown (line 3); jwt[0].keys: absent"), "{said}");
}

#[test]
fn settings_that_a_reload_has_weakened() {
    let scene = Scene::new().with(|scene| {
        let (since, change) = (SystemTime::now(), "policy.mode: enforce -> off".to_owned());
        scene.reload.weaker = vec![WeakerSetting { since, change }];
    });
    let said = scene.finds(&[(Warning, "configuration_weaker")]);
    assert!(said.contains("policy.mode: enforce -> off"), "{said}");
}

#[test]
fn keys_that_wait_for_a_restart() {
    let scene = Scene::new().with(|scene| scene.reload.pending_restart = vec!["cluster.tls", "runtime"]);
    let said = scene.finds(&[(Warning, "restart_pending"), (Warning, "restart_pending")]);
    assert!(said.contains("cluster.tls: ") && said.contains("runtime: "), "{said}");
}

#[test]
fn a_cluster_that_does_not_serve() {
    let scene = Scene::new().with(|scene| scene.members.leader = None);
    scene.finds(&[(Error, "serving")]);
    let scene = Scene::new().with(|scene| {
        scene.members.leader = None;
        for (at, place) in scene.members.members.iter_mut().enumerate() {
            let reason = if at == 0 { UnreadyReason::NoLeader } else { UnreadyReason::Unreachable };
            *place = Arc::new(Member { readiness: Readiness::NotReady(reason), ..Member::clone(place) });
        }
    });
    let absent = |scene: &mut Scene| {
        let (name, role, why) = ("".into(), Role::Voter, AbsenceReason::Unstarted);
        scene.members.absent.push(AbsentMember { id: MemberId(0xab), name, role, why });
    };
    // The cause first, and no advice that needs the lost quorum.
    let found = [
        (Error, "quorum_lost"),
        (Error, "member_unreachable"),
        (Error, "member_unreachable"),
        (Error, "member_without_leader"),
        (Warning, "member_unstarted"),
    ];
    let said = scene.with(absent).finds(&found);
    assert!(said.contains("etcdctl snapshot save") && said.contains("member/snap/db"), "{said}");
    assert!(!said.contains("member remove") && !said.contains("member add"), "{said}");
    assert_eq!(said.matches("without a quorum etcd adds and removes no member").count(), 4, "{said}");
    let said = Scene::new().with(absent).finds(&[(Warning, "member_unstarted")]);
    assert!(said.contains("start it; or etcdctl member remove ab"), "{said}");
    let foreign = ForeignAddress { endpoint: member(9).endpoint, cluster: ClusterId(0xbad) };
    let scene = Scene::new().with(|scene| scene.members.foreign.push(foreign));
    assert!(scene.finds(&[(Error, "foreign_cluster")]).contains("cluster.endpoints"));
}

#[test]
fn a_member_that_does_not_serve() {
    for (reason, severity, check) in [
        (UnreadyReason::Unreachable, Error, "member_unreachable"),
        (UnreadyReason::NoLeader, Error, "member_without_leader"),
        (UnreadyReason::UnverifiedCluster, Error, "cluster_unverified"),
        (UnreadyReason::Unlisted, Warning, "member_unlisted"),
    ] {
        let scene = Scene::new().third(|member| member.readiness = Readiness::NotReady(reason));
        assert!(scene.finds(&[(severity, check)]).contains("m3 (3)"));
    }
}

#[test]
fn a_silent_member_is_one_finding_with_its_reason() {
    let silent = |trouble, why: &str, reason| {
        let endpoint = Endpoint { port: 2399, ..member(3).endpoint };
        let address = UnansweredAddress { endpoint: endpoint.clone(), at: None, trouble, why: why.into() };
        let change = |member: &mut Member| {
            (member.endpoint, member.readiness) = (endpoint, Readiness::NotReady(reason));
        };
        Scene::new().third(change).with(|scene| scene.members.unanswered.push(address))
    };
    let unreachable = |trouble, why: &str| {
        silent(trouble, why, UnreadyReason::Unreachable).finds(&[(Error, "member_unreachable")])
    };
    let said = unreachable(AddressFault::Hung, "it does not answer in time");
    assert!(said.contains("m3 (3): at http://127.0.0.1:2399: unreachable: it does not answer"), "{said}");
    assert!(said.contains("fix: its process hangs, or") && said.contains("then restart it; if it"), "{said}");
    assert!(said.contains("etcdctl member remove 3, then member add"), "{said}");
    let refused = "cannot connect to http://127.0.0.1:2399: Connection refused";
    let said = unreachable(AddressFault::Connection, refused);
    assert!(said.contains(&format!("m3 (3): unreachable: {refused}\n    fix: start the member")), "{said}");
    let said = unreachable(AddressFault::Tls, "it shows the certificate of m2");
    assert!(said.contains("fix: mend its certificate") && !said.contains("member remove"), "{said}");
    // A member that answers by another address.
    let other = silent(AddressFault::Connection, refused, UnreadyReason::NoLeader);
    other.finds(&[(Error, "member_without_leader"), (Warning, "address_unanswered")]);
}

#[test]
fn commands_of_a_fix_have_the_member_that_they_are_about() {
    let corrupt = |told: &str| {
        let told = format!("memberID:{told} alarm:CORRUPT ");
        Scene::new().third_says(|status| status.errors = [told].into())
    };
    let said = corrupt("3").finds(&[(Error, "alarm_corrupt")]);
    assert!(said.contains("etcdctl member remove 3, delete its data"), "{said}");
    let nameless = Scene::new().third(|member| member.name = "".into());
    assert!(nameless.members.members[2].maintenance.pause());
    let said = nameless.finds(&[(Warning, "member_paused")]);
    assert!(said.contains("fix: keyward resume 3, once"), "{said}");
    let all_slow = Scene::new();
    for (member, took) in all_slow.members.members.iter().zip([300, 500, 400]) {
        member.load.answered(all_slow.instant, Duration::from_millis(took));
    }
    let said = all_slow.finds(&[(Warning, "calls_slow")]);
    assert!(said.contains("ETCDCTL_ENDPOINTS=http://127.0.0.1:2379 etcdctl move-leader 3;"), "{said}");
}

#[test]
fn an_upgrade_is_advised_to_members_that_hide_their_status_only() {
    let refused = |version: &str| {
        let row = CONDITIONS.iter().find(|row| row.name == "probe_status_refused").expect("a row");
        let (last, details) = (Duration::from_secs(12), String::new());
        let standing = StandingCondition { row, is_error: false, records: 1, last, details };
        let scene = Scene::new().third(|member| member.version = Version::parse(version).ok());
        scene.with(|scene| scene.logged.push(standing)).report().to_string()
    };
    let said = refused("3.5.35");
    assert!(
        !said.contains("upgrade etcd") && said.contains("give cluster.probe a user that exists"),
        "{said}"
    );
    assert!(refused("3.5.31").contains("fix: for m3 (3): upgrade etcd to 3.5.32"));
    let hidden = |version: &str| {
        let scene = Scene::new().third(|member| {
            (member.version, member.store_status) = (Version::parse(version).ok(), None);
        });
        scene.report().unseen.join("\n")
    };
    assert!(hidden("3.5.35").ends_with("its raft log, since Status is refused to cluster.probe"));
    assert!(hidden("3.5.31").ends_with("(before 3.5.32 and 3.6.12 it may need the role root)"));
}

#[test]
fn a_refused_password_of_the_probing_user_is_named_before_its_consequences() {
    let scene = Scene::new().with(|scene| {
        scene.members.is_probe_login_refused = true;
        scene.members.peer_urls = PeerUrls::Refused;
    });
    let said = scene.finds(&[(Error, "probe_login_refused"), (Warning, "member_list_refused")]);
    assert!(said.contains("cluster.probe.password_file") && !said.contains("set cluster.probe to"), "{said}");
}

#[test]
fn members_without_an_address() {
    for (why, severity, check) in [
        (AbsenceReason::Unstarted, Warning, "member_unstarted"),
        (AbsenceReason::NoUsableUrl, Error, "member_without_address"),
    ] {
        let absent = AbsentMember { id: MemberId(0xab), name: "".into(), role: Role::Voter, why };
        let scene = Scene::new().with(|scene| scene.members.absent.push(absent));
        assert!(scene.finds(&[(severity, check)]).contains("ab"));
    }
    let learner = AbsentMember {
        id: MemberId(0xab),
        name: "".into(),
        role: Role::Learner,
        why: AbsenceReason::Unstarted,
    };
    let scene = Scene::new().with(|scene| scene.members.absent.push(learner));
    assert!(scene.finds(&[(Warning, "member_unstarted")]).contains("does not count for the quorum"));
}

#[test]
fn a_learner_that_could_be_promoted_and_one_that_is_behind() {
    let learner = |applied| {
        let scene = Scene::new().third_says(|store_status| store_status.applied = applied);
        let store_status = scene.members.members[2].store_status.clone();
        scene.third(|member| {
            (member.role, member.readiness) = (Role::Learner, Readiness::NotReady(UnreadyReason::Learner));
            member.store_status = store_status;
        })
    };
    assert!(learner(901).finds(&[(Warning, "learner")]).contains("etcdctl member promote 3"));
    assert!(learner(900).finds(&[(Warning, "learner")]).contains("100 entries behind"));
    // With auth on, a learner discloses neither its Status nor its cluster id.
    let silent = Scene::new().third(|member| {
        (member.role, member.store_status) = (Role::Learner, None);
        member.readiness = Readiness::NotReady(UnreadyReason::UnverifiedCluster);
    });
    silent.finds(&[(Warning, "learner")]);
}

#[test]
fn alarms_told_by_status_or_by_health() {
    for (alarm, check) in [("NOSPACE", "alarm_nospace"), ("CORRUPT", "alarm_corrupt")] {
        let scene = Scene::new()
            .third_says(|store_status| store_status.errors = [format!("memberID:3 alarm:{alarm} ")].into());
        let said = scene.finds(&[(Error, check)]);
        assert!(said.contains("] m3 (3): "));
        // A compaction frees no space of keys that live.
        let places = ["etcdctl del ", "etcdctl --command-timeout=10m compact "].map(|step| said.find(step));
        let [deleted, compacted] = places;
        assert!(alarm != "NOSPACE" || deleted.is_some() && deleted < compacted, "{said}");
        // Every member tells the alarm of one.
        let scene = Scene::new().with(|scene| {
            for place in &mut scene.members.members {
                let mut told = StoreStatus::clone(place.store_status.as_ref().unwrap());
                told.errors = [format!("memberID:3 alarm:{alarm} ")].into();
                *place = Arc::new(Member { store_status: Some(Arc::new(told)), ..Member::clone(place) });
            }
            for (_, told) in &mut scene.examined {
                told.as_mut().unwrap().unhealthy = Some(format!("ALARM {alarm}"));
            }
        });
        assert!(scene.finds(&[(Error, check)]).contains("] m3 (3): "));
        let scene = Scene::new().with(|scene| {
            scene.examined[2].1.as_mut().unwrap().unhealthy = Some(format!("ALARM {alarm}"));
        });
        assert!(scene.finds(&[(Error, check)]).contains("] cluster: "));
    }
    // etcd 3.4 reports no reason in `/health`.
    let scene =
        Scene::new().with(|scene| scene.examined[2].1.as_mut().unwrap().unhealthy = Some(String::new()));
    scene.finds(&[(Error, "unhealthy")]);
}

#[test]
fn a_database_near_its_quota() {
    let filled = |size, used| {
        Scene::new().third_says(|store_status| (store_status.db_size, store_status.db_in_use) = (size, used))
    };
    filled(80 * MIB - 1, 70 * MIB).finds(&[]);
    assert!(filled(80 * MIB, 70 * MIB).finds(&[(Warning, "db_quota")]).contains("quota-backend-bytes"));
    assert!(filled(95 * MIB, 10 * MIB).finds(&[(Error, "db_quota")]).contains("defrag"));
    // etcd 3.6 reports the quota in Status; this value wins over `/metrics`.
    let scene = Scene::new().third_says(|store_status| store_status.db_quota = Some(11 * MIB));
    scene.finds(&[(Warning, "db_quota")]);
}

#[test]
fn revisions_that_nobody_compacts() {
    let never = |kept| Scene::new().told(|told| (told.revision, told.compacted) = (Some(kept), Some(0)));
    never(NEVER_COMPACTED).finds(&[]);
    assert!(never(NEVER_COMPACTED + 1).finds(&[(Warning, "no_compaction")]).contains("auto-compaction-mode"));
    let once = |ago: Duration| {
        Scene::new().told(|told| {
            (told.revision, told.compacted) = (Some(LONG_KEPT + 5001), Some(5000));
            told.compacted_at = NOW.checked_sub(ago);
        })
    };
    once(LONG_AGO).finds(&[]);
    once(LONG_AGO + Duration::from_secs(1)).finds(&[(Warning, "no_compaction")]);
}

#[test]
fn a_log_that_is_behind() {
    let scene = |index, applied| {
        Scene::new()
            .third_says(|store_status| (store_status.raft_index, store_status.applied) = (index, applied))
    };
    scene(1000 + LAG, 1000 + LAG - UNAPPLIED).finds(&[]);
    scene(1000 + LAG, 999 + LAG - UNAPPLIED).finds(&[(Error, "apply_lag")]);
    scene(1000 + LAG, 1000 + LAG).finds(&[]);
    // The first and second member lag behind the third.
    let said = scene(1001 + LAG, 1001 + LAG).finds(&[(Warning, "raft_lag"), (Warning, "raft_lag")]);
    assert!(said.contains("m1 (1): it has 10001 entries"), "{said}");
}

#[test]
fn members_of_different_versions() {
    let scene = |version: &str| Scene::new().third(|member| member.version = Version::parse(version).ok());
    assert!(scene("3.5.36").finds(&[(Warning, "version_skew")]).contains("3.5.35, 3.5.36"));
    scene("3.6.16").finds(&[(Warning, "version_skew")]);
    scene("3.7.1").finds(&[(Error, "version_skew")]);
}

/// The versions of the holes are tested in `members::version`.
#[test]
fn members_with_published_holes() {
    let scene = |version: &str| Scene::new().third(|member| member.version = Version::parse(version).ok());
    let skewed = [(Warning, "open_holes"), (Warning, "version_skew")];
    let said = scene("3.5.1").finds(&skewed);
    for hole in ["CVE-2026-33413", "CVE-2026-33343", "#21683", "keys of every lease", "GHSA-xg4h-6gfc-h4m8"] {
        assert!(said.contains(hole), "{hole}: {said}");
    }
    assert!(said.contains("through Keyward this is closed"), "{said}");
    assert!(!said.contains("except for"), "{said}");
    let said = scene("3.5.32").finds(&skewed);
    assert!(said.contains("GHSA-xg4h") && !said.contains("CVE"), "{said}");
    let passed = scene("3.5.1").with(|scene| scene.lines += "policy.require_identity = 'as-etcd'\n");
    assert!(passed.finds(&skewed).contains("except for calls without a user"));
    scene("3.5.1").with(|scene| scene.auth = AuthSetting::Off);
}

#[test]
fn clocks_that_are_apart() {
    let apart = |seconds| {
        Scene::new().with(|scene| {
            scene.examined[2].1.as_mut().unwrap().clock = Some((*NOW + Duration::from_secs(seconds), *NOW));
        })
    };
    apart(4).finds(&[]);
    apart(5).finds(&[(Warning, "clock")]);
    let signing = |seconds| {
        apart(seconds).with(|scene| {
            std::fs::write(scene.folder.path().join("hs"), "0123456789abcdef0123456789abcdef").unwrap();
            scene.lines = format!(
                "{}user = [{{ name = '*', jwt = true }}]\nsign_jwt = {{ method = 'HS256', key = 'hs' }}\n",
                scene.lines
            );
        })
    };
    signing(150).finds(&[(Warning, "clock")]);
    signing(151).finds(&[(Error, "clock")]);
}

#[test]
fn what_is_open_or_would_be_lost() {
    let off = Scene::new().with(|scene| scene.auth = AuthSetting::Off);
    off.finds(&[(Warning, "auth_off"), (Warning, "revocation_open")]);
    let keys = "session.key_files = ['session.key']\n";
    let probe =
        Scene::new().with(|scene| scene.lines = format!("{keys}revocation.etcd_prefix = '/keyward/'\n"));
    probe.finds(&[(Warning, "no_probe_user")]);
    let refused = Scene::new().with(|scene| scene.members.peer_urls = PeerUrls::Refused);
    refused.finds(&[(Warning, "member_list_refused")]);
    let bare = Scene::new().with(|scene| {
        scene.lines = "cluster.probe = { user = 'keyward', password_file = 'password' }\n".to_owned();
    });
    bare.finds(&[(Warning, "revocation_forgotten"), (Warning, "session_keys")]);
    let unknown = Scene::new().with(|scene| {
        scene.revocations_known = false;
        scene.revocations_unread = Some("needs cluster.probe: auth is on");
    });
    let said = unknown.finds(&[(Error, "revocation_unknown")]);
    assert!(said.contains("are not known (needs cluster.probe: auth is on): logins"), "{said}");
    let lost = Scene::new().with(|scene| {
        scene.revocations_known = false;
        scene.revocations_unread = Some("the cluster has no quorum: a login needs a quorum");
        scene.members.leader = None;
        for place in &mut scene.members.members {
            let readiness = Readiness::NotReady(UnreadyReason::NoLeader);
            *place = Arc::new(Member { readiness, ..Member::clone(place) });
        }
    });
    let report = lost.report().to_string();
    let unknown = report.split("revocation_unknown").nth(1).expect("it is told");
    assert!(
        unknown.contains("the cluster has no quorum") && unknown.contains("KeywardQuorumLost"),
        "{report}"
    );
    assert!(!report.contains("etcdctl role"), "a role needs a quorum: {report}");
    let holders = |found: &[&str], untold: &[&str], unlisted| {
        let users = |names: &[&str]| names.iter().map(|name| UserName::from(*name)).collect();
        let holders = RootHolders { found: users(found), untold: users(untold), unlisted };
        Scene::new().with(|scene| scene.root_holders = holders)
    };
    let said = holders(&["ops"], &[], false).finds(&[(Warning, "root_by_pattern")]);
    assert!(said.contains("user ops") && said.contains("revoke-role ops root"), "{said}");
    let report = holders(&[], &["web"], true).report();
    assert_eq!(report.worst(), Some(Severity::Note));
    assert!(report.unseen[0].contains("web") && report.unseen[1].contains("same"), "{:?}", report.unseen);
    // Keyward's own user may not look, so whoever reads the line is told how to.
    assert!(report.unseen.iter().all(|line| line.contains("etcdctl user get USER")), "{:?}", report.unseen);
}

#[test]
fn certificates_that_end() {
    let ending = |seconds: i64| {
        Scene::new().with(|scene| {
            let key = KeyPair::generate().unwrap();
            let mut params = CertificateParams::new(["a".to_owned()]).unwrap();
            let now = rcgen::date_time_ymd(2030, 1, 1);
            let apart = Duration::from_secs(seconds.unsigned_abs());
            params.not_after = if seconds < 0 { now - apart } else { now + apart };
            let pem = params.self_signed(&key).unwrap().pem();
            std::fs::write(scene.folder.path().join("a.crt"), pem).unwrap();
            std::fs::write(scene.folder.path().join("a.key"), key.serialize_pem()).unwrap();
        })
    };
    let day = 24 * 3600;
    ending(30 * day + 1).finds(&[]);
    assert!(ending(30 * day).finds(&[(Warning, "certificate")]).contains("30 days"));
    assert!(ending(7 * day - 1).finds(&[(Error, "certificate")]).contains("167 hours"));
    assert!(ending(-1).finds(&[(Error, "certificate")]).contains("listener a: tls.cert: it has ended"));
}

#[test]
fn a_certificate_that_is_not_good_yet() {
    let scene = Scene::new().with(|scene| {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(["a".to_owned()]).unwrap();
        let now = rcgen::date_time_ymd(2030, 1, 1);
        params.not_before = now + Duration::from_secs(30 * 3600);
        params.not_after = rcgen::date_time_ymd(2040, 1, 1);
        std::fs::write(scene.folder.path().join("a.crt"), params.self_signed(&key).unwrap().pem()).unwrap();
        std::fs::write(scene.folder.path().join("a.key"), key.serialize_pem()).unwrap();
    });
    let said = scene.finds(&[(Error, "certificate")]);
    assert!(said.contains("listener a: tls.cert: it is not good yet, but in 30 hours"), "{said}");
}

#[test]
fn certificates_that_are_weak_or_refused() {
    let of = |change: &dyn Fn(&mut CertificateParams)| {
        Scene::new().with(|scene| {
            let key = KeyPair::generate().unwrap();
            let mut params = CertificateParams::new(["a".to_owned()]).unwrap();
            params.not_after = rcgen::date_time_ymd(2040, 1, 1);
            change(&mut params);
            let pem = params.self_signed(&key).unwrap().pem();
            std::fs::write(scene.folder.path().join("a.crt"), pem).unwrap();
            std::fs::write(scene.folder.path().join("a.key"), key.serialize_pem()).unwrap();
        })
    };
    of(&|_| {}).finds(&[]);
    let purposes = |purpose: rcgen::ExtendedKeyUsagePurpose| {
        of(&|params| params.extended_key_usages = vec![purpose.clone()])
    };
    purposes(rcgen::ExtendedKeyUsagePurpose::ServerAuth).finds(&[]);
    let refused =
        purposes(rcgen::ExtendedKeyUsagePurpose::ClientAuth).finds(&[(Error, "certificate_refused")]);
    assert!(refused.contains("listener a: tls.cert") && refused.contains("lacks serverAuth"), "{refused}");
    of(&|params| params.subject_alt_names.clear()).finds(&[(Error, "certificate_refused")]);
    let any = purposes(rcgen::ExtendedKeyUsagePurpose::Any).report();
    assert!(any.to_string().contains("note [certificate_weak] listener a: tls.cert"), "{any}");
    let authority = of(&|params| params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained));
    assert!(authority.report().to_string().contains("(CA:TRUE)"));
}

#[test]
fn audit_records_that_are_not_kept_for_their_time() {
    let day = Duration::from_secs(24 * 3600);
    let of = |short, removed_early| {
        let report = RetentionReport { keep_for: day, short, removed_early };
        Scene::new().with(|scene| scene.audit.retention = Some(report))
    };
    of(None, 0).finds(&[]);
    let said = of(Some(day / 4), 0).finds(&[(Warning, "audit_retention")]);
    assert!(said.contains("after 6 h") && said.contains("kept for 24 h"), "{said}");
    of(Some(day / 4), 2).finds(&[(Error, "audit_retention")]);
}

#[test]
fn an_audit_sink_that_takes_no_records() {
    let of = |trouble: Option<&str>, is_behind| {
        let trouble =
            trouble.map(|error| SinkTrouble { since: SystemTime::UNIX_EPOCH, error: error.to_owned() });
        let sinks = vec![SinkReport { name: "otlp", unsent: 7, trouble, lost: None }];
        Scene::new().with(|scene| scene.audit.sinks = AuditSinksReport { sinks, is_behind })
    };
    of(None, false).finds(&[]);
    let said = of(Some("the collector answers 401"), false).finds(&[(Warning, "audit_sinks")]);
    assert!(said.contains("audit.otlp") && said.contains("401") && said.contains("7 wait"), "{said}");
    let said = of(Some("gone"), true).finds(&[(Error, "audit_sinks")]);
    assert!(said.contains("refused"), "{said}");
}

#[test]
fn audit_records_that_are_lost_are_told_for_a_day() {
    let minutes = |minutes: u64| *NOW - Duration::from_secs(minutes * 60);
    let lost = |last: u64| Some(LossSeries { records: 1087, since: minutes(last + 20), last: minutes(last) });
    let of = |last| Scene::new().with(|scene| scene.audit.lost = lost(last));
    let said = of(3).finds(&[(Warning, "audit_records_lost")]);
    assert!(said.contains("1087 audit records are lost, from 23 to 3 minutes ago"), "{said}");
    of(24 * 60).finds(&[]);
    let seconds = |seconds| *NOW - Duration::from_secs(seconds);
    let short = LossSeries { records: 7, since: seconds(52), last: seconds(12) };
    let of_short = Scene::new().with(|scene| scene.audit.lost = Some(short));
    let said = of_short.finds(&[(Warning, "audit_records_lost")]);
    assert!(said.contains("7 audit records are lost, from 52 to 12 seconds ago"), "{said}");
    let sink = SinkReport { name: "otlp", unsent: 0, trouble: None, lost: lost(0) };
    let sinks = AuditSinksReport { sinks: vec![sink], is_behind: false };
    let said = Scene::new().with(|scene| scene.audit.sinks = sinks).finds(&[(Warning, "audit_records_lost")]);
    assert!(said.contains("audit.otlp"), "{said}");
}

#[test]
fn an_audit_file_that_is_moved_or_cannot_be_written() {
    let of = |report: LogTroubleReport| Scene::new().with(|scene| scene.audit.trouble = report);
    let trouble = || Some(SinkTrouble { since: *NOW - Duration::from_secs(7), error: "disk full".into() });
    let full = of(LogTroubleReport { unwritable: trouble(), ..LogTroubleReport::default() });
    let said = full.finds(&[(Error, "audit_unwritable")]);
    assert!(said.contains("for 7 s (disk full)"), "{said}");
    let unstopped = |at| LogTroubleReport { unstopped: Some((17, at)), ..LogTroubleReport::default() };
    let of_end = of(unstopped(*NOW - Duration::from_secs(600))).finds(&[(Warning, "audit_not_stopped")]);
    assert!(of_end.contains("record 17") && of_end.contains("10 minutes ago"), "{of_end}");
    of(unstopped(*NOW - Duration::from_secs(24 * 3600))).finds(&[]);
    for (lines, told) in [
        (
            "",
            "audit.log cannot be written for 7 s (disk full): once the queue is full, calls with records are \
             refused, logins too",
        ),
        ("audit.events = ['changes']\n", "calls with records are refused (audit.on_full is \"block\")"),
        ("audit.on_full = 'drop'\n", "changes are made without a record (audit.on_full is \"drop\")"),
    ] {
        let full = of(LogTroubleReport { unwritable: trouble(), ..LogTroubleReport::default() });
        let full = full.with(|scene| scene.lines += &format!("audit.file = 'audit.log'\n{lines}"));
        let said = full.finds(&[(Error, "audit_unwritable")]);
        assert!(said.contains(told), "{said}");
    }
    of(LogTroubleReport { lost_path: trouble(), ..LogTroubleReport::default() })
        .finds(&[(Error, "audit_file_moved")]);
    let moved = |hours: u64| {
        let moved = MovedFile { name: "audit.log.1".into(), is_removed: false };
        let at = *NOW - Duration::from_secs(hours * 3600);
        of(LogTroubleReport { moved: Some((moved, at)), ..LogTroubleReport::default() })
    };
    let said = moved(1).finds(&[(Warning, "audit_file_moved")]);
    assert!(said.contains("audit.log.1") && said.contains("logrotate"), "{said}");
    moved(25).finds(&[]);
}

#[test]
fn what_could_not_be_looked_at_is_said() {
    let scene = Scene::new().third(|member| member.store_status = None).with(|scene| {
        scene.examined[2].1 = None;
        scene.auth = AuthSetting::Unknown;
    });
    let report = scene.report();
    assert_eq!((report.worst(), report.unseen.len()), (Some(Severity::Note), 3), "{report}");
    assert!(report.to_string().contains("nothing found in what could be looked at\n"));
}

#[test]
fn budgets_above_the_memory_of_the_process_are_told() {
    let within = |limit| {
        let mut scene = Scene::new();
        let budgets = "limits.unread_buffer = '1GiB'\nwatch.buffer = '512MiB'\n\
                       limits.replay_buffer = '256MiB'\nruntime.shards = 1\n";
        scene.lines.insert_str(0, budgets);
        scene.memory_limit = limit;
        scene
    };
    within(None).finds(&[]);
    within(Some(2500 * MIB)).finds(&[]);
    let told = within(Some(2048 * MIB)).finds(&[(Warning, "memory_budgets")]);
    assert!(told.contains("1868 MiB") && told.contains("limits.unread_buffer 1024 MiB"), "{told}");
}

#[test]
fn a_limit_that_refuses_all_the_time_is_told_with_its_key() {
    let told = |scope, limit| {
        let mut scene = Scene::new();
        scene.constant_limits.push(Exceeded { scope, limit });
        scene
    };
    let watches = told(LimitScope::Peer, LimitKind::Watches).finds(&[(Warning, "limit_refuses")]);
    assert!(watches.contains("peer_limits") && watches.contains("watches"), "{watches}");
    let shed = told(LimitScope::Cluster, LimitKind::DbSize).finds(&[(Warning, "sheds")]);
    assert!(shed.contains("protection.db_share"), "{shed}");
}

#[test]
fn a_member_that_asks_for_no_certificate_is_named() {
    let scene = Scene::new().with(|scene| scene.without_request = vec![MemberId(3)]);
    let report = scene.finds(&[(Warning, "certificate_not_asked")]);
    assert!(report.contains("m3 (3)") && report.contains("--client-cert-auth"), "{report}");
}
