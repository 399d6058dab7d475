//! The decisions of a policy, by examples, and compared with a reference of its own.
//!
//! The reference (`allows`) knows neither intervals nor compiled sets: a range is the list of its keys in a
//! small world of keys, and each key is compared with each grant.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use proptest::prelude::*;
use prost::Message as _;

use super::compiled::{Policy, PolicySubject};
use super::learned::{LearningBounds, PolicyLearner};
use super::permit_set::{Decision, DenialReason, PermitSet};
use super::rules_in_force::{RulesGeneration, RulesInForce};
use keyward_config::{Config, PolicyMode, PolicySettings};
use keyward_etcd::identity::Peer;
use keyward_etcd::identity::peer::JwtClaims;
use keyward_etcd::pb::etcdserverpb::{
    Compare, DeleteRangeRequest, PutRequest, RangeRequest, RequestOp, TxnRequest, WatchCreateRequest,
    WatchRequest, request_op::Request, watch_request,
};
use keyward_etcd::rpc::key_range::{KeyRange, end_of_prefix};
use keyward_etcd::rpc::method::lookup;
use keyward_etcd::rpc::touch::{self, Action, TouchTarget};

const RANGE: &str = "/etcdserverpb.KV/Range";
const PUT: &str = "/etcdserverpb.KV/Put";

/// A configuration with this policy, enforced.
fn config(policy: &str) -> Config {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("policy.toml"), policy).unwrap();
    let text = "[[listener]]\nname = 'clients'\naddress = '127.0.0.1:2379'\n\
                [cluster]\nendpoints = ['http://127.0.0.1:1']\n\
                [maintenance]\netcd_prefix = '/own/'\n\
                [policy]\nmode = 'enforce'\nfile = 'policy.toml'\n";
    let path = folder.path().join("config.toml");
    std::fs::write(&path, text).unwrap();
    keyward_config::load(&path).unwrap_or_else(|faults| panic!("{faults}")).0
}

pub(super) fn policy(text: &str) -> Policy {
    Policy::of(&config(text), &RulesInForce::Configured, SystemTime::now())
}

pub(super) fn peer(name: &str) -> Peer {
    Peer::Password(name.into())
}

pub(super) fn permits(policy: &Policy, peer: &Peer) -> PermitSet {
    policy.permits(PolicySubject::of(peer, Some("etcd-user"), None, "clients"))
}

/// The request of one key.
fn range_of(key: String) -> Vec<u8> {
    RangeRequest { key: key.into(), ..Default::default() }.encode_to_vec()
}

pub(super) fn range(key: &'static str, range_end: &'static str) -> Vec<u8> {
    RangeRequest { key: key.into(), range_end: range_end.into(), ..Default::default() }.encode_to_vec()
}

pub(super) fn put(key: &str) -> PutRequest {
    PutRequest { key: key.as_bytes().to_vec().into(), ..Default::default() }
}

#[track_caller]
fn verdict(permits: &PermitSet, path: &str, body: &[u8]) -> Result<(), DenialReason> {
    match permits.decide(lookup(path).expect("a method"), body) {
        Decision::Allowed(_) => Ok(()),
        Decision::Denied(denial) => Err(denial.reason),
        Decision::NeedsLeaseKeys(..) => panic!("needs the keys of a lease"),
    }
}

/// Tokens that alternate on a connection, as behind a gateway, cost no compilation each.
#[test]
fn the_grants_of_a_caller_are_compiled_once_and_shared_with_nobody_else() {
    let text = "[[role]]\nname = 'r'\n[[role.allow]]\nactions = ['read']\nprefix = '/a/{user}/'\n\
                [[binding]]\neveryone = true\nroles = ['r']\n";
    let policy = policy(text);
    let own = |name: &str| permits(&policy, &peer(name)).own.expect("grants of its own");
    let (alice, bob) = (own("alice"), own("bob"));
    assert!(Arc::ptr_eq(&alice, &own("alice")) && Arc::ptr_eq(&bob, &own("bob")));
    assert!(!Arc::ptr_eq(&alice, &bob));
    for (name, key, expected) in [("alice", "/a/alice/k", true), ("bob", "/a/alice/k", false)] {
        let read = range(key, "");
        let verdict = verdict(&permits(&policy, &peer(name)), "/etcdserverpb.KV/Range", &read);
        assert_eq!(verdict.is_ok(), expected, "{name}");
    }
}

const READER: &str = "[[role]]\nname = 'r'\n[[role.allow]]\nactions = ['read']\nprefix = '/a/'\n\
                      [[binding]]\neveryone = true\nroles = ['r']\n";

#[test]
fn what_no_grant_allows_is_denied() {
    let permits = permits(&policy(READER), &peer("alice"));
    assert_eq!(verdict(&permits, RANGE, &range("/a/1", "")), Ok(()));
    assert_eq!(verdict(&permits, RANGE, &range("/a/", "/a0")), Ok(()));
    assert_eq!(
        verdict(&permits, RANGE, &range("/a/", "/a1")),
        Err(DenialReason::NoGrant),
        "beyond the prefix"
    );
    assert_eq!(verdict(&permits, RANGE, &range("/a/", "\0")), Err(DenialReason::OwnKeys), "from the key on");
    assert_eq!(verdict(&permits, RANGE, &range("/b", "")), Err(DenialReason::NoGrant));
    assert_eq!(verdict(&permits, PUT, &put("/a/1").encode_to_vec()), Err(DenialReason::NoGrant));
    assert_eq!(
        verdict(&permits, "/etcdserverpb.Maintenance/Status", b""),
        Err(DenialReason::NoGrant),
        "an action on the cluster"
    );
}

#[test]
fn compaction_is_an_action_of_its_own_that_maintenance_contains() {
    const COMPACT: &str = "/etcdserverpb.KV/Compact";
    const DEFRAGMENT: &str = "/etcdserverpb.Maintenance/Defragment";
    const STATUS: &str = "/etcdserverpb.Maintenance/Status";
    let of = |grants: &str| {
        let text = format!("[[role]]\nname = 'r'\n{grants}[[binding]]\neveryone = true\nroles = ['r']\n");
        let permits = permits(&policy(&text), &peer("alice"));
        [COMPACT, DEFRAGMENT, STATUS].map(|path| verdict(&permits, path, b"").is_ok())
    };
    let (compact, maintenance) =
        ("[[role.allow]]\nactions = ['compact']\n", "[[role.allow]]\nactions = ['maintenance']\n");
    assert_eq!(of(compact), [true, false, false]);
    assert_eq!(of(maintenance), [true, true, true]);
    assert_eq!(of("[[role.allow]]\nactions = ['maintenance_view']\n"), [false, false, true]);
    let without = |action: &str| format!("{maintenance}[[role.deny]]\nactions = ['{action}']\n");
    assert_eq!(of(&without("compact")), [false, true, true]);
    assert_eq!(of(&(compact.to_owned() + &without("maintenance"))), [false, false, false]);
}

#[test]
fn without_a_role_even_an_empty_transaction_is_denied() {
    let text = READER.replace("everyone = true", "peer = 'password:bob'");
    let policy = policy(&text);
    let alice = permits(&policy, &peer("alice"));
    assert_eq!(verdict(&alice, "/etcdserverpb.KV/Txn", b""), Err(DenialReason::NoRole));
    for (path, rule) in [
        ("/etcdserverpb.Watch/Watch", "no_role: watch"),
        ("/etcdserverpb.Lease/LeaseKeepAlive", "no_role: lease"),
    ] {
        let stream = lookup(path).expect("a method");
        let Decision::Denied(denial) = alice.decide_stream(stream) else { panic!("{path}") };
        assert_eq!(alice.denying_rule(denial), rule);
        // A message without a watch or a readable lease.
        let Decision::Denied(denial) = alice.decide(stream, b"") else { panic!("{path}") };
        assert_eq!(alice.denying_rule(denial), rule);
    }
    assert_eq!(verdict(&permits(&policy, &peer("bob")), "/etcdserverpb.KV/Txn", b""), Ok(()));
}

#[test]
fn a_denial_wins_and_adjacent_grants_join() {
    let text = "[[role]]\nname = 'one'\n\
                [[role.allow]]\nactions = ['read']\nrange = { from = 'a', to = 'm' }\n\
                [[role.deny]]\nactions = ['read']\nkey = 'c'\n\
                [[role]]\nname = 'two'\n\
                [[role.allow]]\nactions = ['read']\nrange = { from = 'm', to = 'z' }\n\
                [[role.allow]]\nactions = ['read']\nkey = 'c'\n\
                [[binding]]\neveryone = true\nroles = ['one', 'two']\n";
    let permits = permits(&policy(text), &peer("alice"));
    assert_eq!(verdict(&permits, RANGE, &range("d", "y")), Ok(()), "of two roles together");
    assert!(matches!(verdict(&permits, RANGE, &range("c", "")), Err(DenialReason::Grant(_))));
    assert!(matches!(verdict(&permits, RANGE, &range("b", "d")), Err(DenialReason::Grant(_))));
    assert_eq!(verdict(&permits, RANGE, &range("c\0", "d")), Ok(()));
}

#[test]
fn own_keys_are_closed_to_everybody() {
    let text = "[[role]]\nname = 'all'\n[[role.allow]]\nactions = ['read', 'write', 'maintenance']\n\
                everything = true\n[[binding]]\neveryone = true\nroles = ['all']\n";
    let permits = permits(&policy(text), &peer("root"));
    assert_eq!(verdict(&permits, PUT, &put("/own/lock").encode_to_vec()), Err(DenialReason::OwnKeys));
    assert_eq!(verdict(&permits, RANGE, &range("/a", "/z")), Err(DenialReason::OwnKeys));
    assert_eq!(verdict(&permits, RANGE, &range("/p", "\0")), Ok(()));
    assert_eq!(verdict(&permits, "/etcdserverpb.Maintenance/Snapshot", b""), Err(DenialReason::OwnKeys));
    // A transaction that cannot be read may touch any key.
    assert_eq!(verdict(&permits, "/etcdserverpb.KV/Txn", b"\x22\x00"), Err(DenialReason::OwnKeys));
}

#[test]
fn variables_are_the_callers_own_texts() {
    let text = "[[role]]\nname = 'home'\n[[role.allow]]\nactions = ['read']\nprefix = '/teams/{user}/'\n\
                [[role.allow]]\nactions = ['write']\nprefix = '/ns/{claim.team}/'\n\
                [[role.deny]]\nactions = ['read']\nkey = '/teams/{user}/secret'\n\
                [[role.allow]]\nactions = ['read']\nprefix = '/as/{etcd_user}/'\n\
                [[binding]]\neveryone = true\nroles = ['home']\n";
    let policy = policy(text);
    let alice = permits(&policy, &peer("alice"));
    assert_eq!(verdict(&alice, RANGE, &range("/teams/alice/x", "")), Ok(()));
    assert_eq!(verdict(&alice, RANGE, &range("/as/etcd-user/x", "")), Ok(()));
    assert_eq!(verdict(&alice, RANGE, &range("/teams/bob/x", "")), Err(DenialReason::NoGrant));
    assert!(matches!(verdict(&alice, RANGE, &range("/teams/alice/secret", "")), Err(DenialReason::Grant(_))));
    assert_eq!(verdict(&alice, PUT, &put("/ns/a/k").encode_to_vec()), Err(DenialReason::NoGrant));
    let claims: JwtClaims = [("team".to_owned(), vec!["a".to_owned(), "b".to_owned()])].into_iter().collect();
    let jwt = Peer::Jwt { issuer: "https://ci".into(), subject: "s".into(), claims: Arc::new(claims) };
    let member = permits(&policy, &jwt);
    assert_eq!(verdict(&member, PUT, &put("/ns/a/k").encode_to_vec()), Ok(()));
    assert_eq!(verdict(&member, PUT, &put("/ns/b/k").encode_to_vec()), Ok(()));
    assert_eq!(verdict(&member, PUT, &put("/ns/c/k").encode_to_vec()), Err(DenialReason::NoGrant));
}

/// `/teams//` or `/teams/../x/` would be other keys than meant; a denial that cannot be placed denies all.
#[test]
fn a_text_that_could_reach_other_keys_is_never_put_into_a_key() {
    let allow = "[[role]]\nname = 'home'\n[[role.allow]]\nactions = ['read']\nprefix = '/teams/{user}'\n\
                 [[binding]]\neveryone = true\nroles = ['home']\n";
    let allows = policy(allow);
    let deny = allow.replace(
        "[[binding]]",
        "[[role.allow]]\nactions = ['read']\neverything = true\n\
         [[role.deny]]\nactions = ['read']\nprefix = '/teams/{user}'\n[[binding]]",
    );
    let denies = policy(&deny);
    for name in ["", "a/b", "..", "a..b", ".", "/", "a\0", "a\nb", "\\"] {
        let permitted = permits(&allows, &peer(name));
        assert_eq!(
            verdict(&permitted, RANGE, &range("/teams/", "/teams0")),
            Err(DenialReason::NoGrant),
            "{name:?}"
        );
        assert_eq!(verdict(&permitted, RANGE, &range("/teams", "")), Err(DenialReason::NoGrant), "{name:?}");
        let denied = permits(&denies, &peer(name));
        assert!(matches!(verdict(&denied, RANGE, &range("x", "")), Err(DenialReason::Grant(_))), "{name:?}");
    }
    assert_eq!(verdict(&permits(&denies, &peer("a")), RANGE, &range("x", "")), Ok(()));
}

/// The rules of the configuration are other rules, of another role.
#[test]
fn a_verdict_of_a_stored_policy_names_the_stored_role() {
    let stored = READER.replace("name = 'r'", "name = 'stored'").replace("['r']", "['stored']");
    let document = Arc::new(keyward_config::policy(&stored, &[], &[]).expect("valid").0);
    let rules = RulesInForce::Stored { number: 7, document };
    let config = config("[[role]]\nname = 'configured'\nallow = [{ actions = ['read'], key = 'x' }]\n");
    let permits = permits(&Policy::of(&config, &rules, SystemTime::now()), &peer("a"));
    let grant = permits.decide(lookup(RANGE).unwrap(), &range("/a/x", ""));
    let Decision::Allowed(permit) = grant else { panic!("{grant:?}") };
    assert_eq!(permits.allowing_rule(permit.grant().expect("a grant")), "stored.allow[0]");
    assert!(permits.generation.to_string().starts_with("7-"));
}

/// The rules of the configuration have other variables, or none.
#[test]
fn the_variables_of_a_stored_policy_are_filled_for_each_caller() {
    let allow = "allow = [{ actions = ['read'], prefix = '/teams/{etcd_user}/' }]\n";
    let deny = "deny = [{ actions = ['read'], key = '/teams/{user}/frozen' }]\n";
    let role = format!("[[role]]\nname = 'r'\n{allow}{deny}[[binding]]\neveryone = true\nroles = ['r']\n");
    let document = Arc::new(keyward_config::policy(&role, &[], &[]).expect("valid").0);
    let rules = RulesInForce::Stored { number: 1, document };
    let of_claims = READER.replace("prefix = '/a/'", "prefix = '/{claim.groups}/'");
    for configured in ["", READER, &of_claims, &role] {
        let policy = Policy::of(&config(configured), &rules, SystemTime::now());
        for name in ["a", "b", "a"] {
            let caller = peer(name);
            let subject = PolicySubject::of(&caller, Some(name), None, "clients");
            let permits = policy.permits(subject);
            for owner in ["a", "b"] {
                let read = |key| verdict(&permits, RANGE, &range_of(format!("/teams/{owner}/{key}")));
                let expected = if owner == name { Ok(()) } else { Err(DenialReason::NoGrant) };
                assert_eq!(read("x"), expected, "{name} reads a key of {owner}; configured: {configured}");
                let is_denied = matches!(read("frozen"), Err(DenialReason::Grant(_)));
                assert_eq!(is_denied, owner == name, "{name}, {owner}; configured: {configured}");
            }
        }
    }
}

#[test]
fn the_strictest_mode_of_the_bindings_holds() {
    let text = format!(
        "{READER}[[binding]]\npeer = 'password:a*'\nroles = ['r']\nmode = 'shadow'\n\
         [[binding]]\npeer = 'password:ab'\nroles = ['r']\nmode = 'enforce'\n"
    );
    let policy = policy(&text);
    assert_eq!(permits(&policy, &peer("x")).mode, PolicyMode::Enforce, "the policy's own mode");
    assert_eq!(permits(&policy, &peer("a")).mode, PolicyMode::Shadow);
    assert_eq!(permits(&policy, &peer("ab")).mode, PolicyMode::Enforce);
}

#[test]
fn a_binding_ends_at_its_time() {
    let text = READER.replace("everyone = true", "everyone = true\nuntil = '2040-01-01T00:00:00Z'");
    let config = config(&text);
    let end = SystemTime::UNIX_EPOCH + Duration::from_secs(2_208_988_800);
    let before = Policy::of(&config, &RulesInForce::Configured, end - Duration::from_secs(1));
    assert_eq!(before.next_end(), Some(end));
    assert_eq!(permits(&before, &peer("a")).roles.len(), 1);
    let after = Policy::of(&config, &RulesInForce::Configured, end);
    assert_eq!(after.next_end(), None);
    assert_eq!(permits(&after, &peer("a")).roles.len(), 0);
}

#[test]
fn listeners_users_and_groups_are_conditions() {
    let text = "[[role]]\nname = 'r'\n[[role.allow]]\nactions = ['lease']\n\
                [[group]]\nname = 'g'\nmembers = ['password:al*', 'listener:clients']\n\
                [[binding]]\ngroup = 'g'\nlistener = 'clients'\netcd_user = 'app'\nroles = ['r']\n";
    let policy = policy(text);
    let roles = |peer: &Peer, etcd_user, listener| {
        policy.permits(PolicySubject::of(peer, etcd_user, None, listener)).roles.len()
    };
    assert_eq!(roles(&peer("alice"), Some("app"), "clients"), 1);
    assert_eq!(roles(&Peer::Listener("clients".into()), Some("app"), "clients"), 1);
    assert_eq!(roles(&peer("bob"), Some("app"), "clients"), 0);
    assert_eq!(roles(&peer("alice"), Some("other"), "clients"), 0);
    assert_eq!(roles(&peer("alice"), None, "clients"), 0);
    assert_eq!(roles(&peer("alice"), Some("app"), "inner"), 0);
}

#[test]
fn the_keys_of_a_lease_are_needed_unless_every_key_is_allowed() {
    let text = "[[role]]\nname = 'some'\n[[role.allow]]\nactions = ['lease', 'write']\nprefix = '/a/'\n\
                [[binding]]\neveryone = true\nroles = ['some']\n";
    let some = permits(&policy(text), &peer("a"));
    let revoke = lookup("/etcdserverpb.Lease/LeaseRevoke").unwrap();
    let Decision::NeedsLeaseKeys(_, leases) = some.decide(revoke, b"\x08\x07") else { panic!() };
    assert_eq!(leases, [(Action::Write, 7)]);
    assert!(matches!(some.decide_keys(Action::Write, [&b"/a/1"[..], b"/a/2"]), Decision::Allowed(_)));
    assert!(matches!(some.decide_keys(Action::Write, [&b"/a/1"[..], b"/b"]), Decision::Denied(_)));
    assert!(matches!(some.decide_keys(Action::Write, []), Decision::Allowed(_)), "a lease without keys");
}

/// The key of a lock is on a lease, which its holder renews and revokes.
#[test]
fn who_may_lock_may_keep_the_lease_of_the_lock() {
    let text = "[[role]]\nname = 'r'\n[[role.allow]]\nactions = ['lease']\n\
                [[role.allow]]\nactions = ['lock']\nprefix = '/locks/'\n\
                [[role.deny]]\nactions = ['write']\nprefix = '/locks/frozen/'\n\
                [[binding]]\neveryone = true\nroles = ['r']\n";
    let locks = permits(&policy(text), &peer("a"));
    let may = |action, key: &str| matches!(locks.decide_keys(action, [key.as_bytes()]), Decision::Allowed(_));
    assert!(may(Action::Write, "/locks/job/7f") && may(Action::Lock, "/locks/job/7f"));
    assert!(!may(Action::Write, "/locks/frozen/7f"), "a denial wins");
    assert!(!may(Action::Write, "/data/x") && !may(Action::Read, "/locks/job/7f"));
    assert!(!may(Action::Write, "/own/x"), "Keyward's own key");
    // To put the key is another matter.
    assert!(verdict(&locks, PUT, &put("/locks/job/7f").encode_to_vec()).is_err());
}

#[test]
fn every_fault_of_a_policy_is_told_at_once() {
    let text = "[[role]]\nname = 'r'\n[[role.allow]]\nactions = ['reed']\n\
                [[role.allow]]\nactions = ['read']\nrange = { from = 'b', to = 'a' }\n\
                [[role.allow]]\nactions = ['read']\n\
                [[role]]\nname = 'r'\n\
                [[binding]]\nroles = ['x']\n\
                [[binding]]\neveryone = true\npeer = 'nobody:x'\nroles = ['r']\ngroup = 'none'\n";
    let faults = keyward_config::policy(text, &[], &[]).expect_err("faults");
    let paths: Vec<_> = faults.iter().map(|fault| fault.path.as_str()).collect();
    assert_eq!(
        paths,
        [
            "role[0].allow[0].actions[0]",
            "role[0].allow[1].range",
            "role[0].allow[2]",
            "role[1].name",
            "binding[0].roles[0]",
            "binding[1].peer",
            "binding[1].group",
        ]
    );
    let text = "[[role]]\nname = 'r'\n[[binding]]\nroles = ['r']\n";
    let faults = keyward_config::policy(text, &[], &[]).expect_err("a binding of nobody");
    assert_eq!(faults.iter().map(|fault| fault.path.as_str()).collect::<Vec<_>>(), ["binding[0]"]);
}

/// Without the slash, `al` would have the keys of `alice`.
#[test]
fn a_prefix_that_does_not_end_its_variable_is_named() {
    for (prefix, count) in
        [("/teams/{user}", 1), ("/teams/{user}-", 1), ("/teams/{user}/", 0), ("/teams/", 0)]
    {
        let text = READER.replace("'/a/'", &format!("'{prefix}'"));
        let (_, warnings) = keyward_config::policy(&text, &[], &[]).expect("valid");
        let named = warnings.iter().filter(|warning| warning.path == "role[0].allow[0].prefix").count();
        assert_eq!(named, count, "{prefix}: {warnings:?}");
    }
}

/// A megabyte of grants, each with its own key: every one counts, and no neighbour of it.
#[test]
fn a_megabyte_of_rules_decides_like_a_few() {
    let grants = (0..20_000).map(|n| format!("{{ actions = ['read'], key = '/k/{n:05}' }},\n"));
    let text = format!(
        "[[role]]\nname = 'r'\nallow = [\n{}]\n[[binding]]\neveryone = true\nroles = ['r']\n",
        grants.collect::<String>() + &"# Rules.\n".repeat(30_000),
    );
    assert!(text.len() > 1 << 20, "{}", text.len());
    let permits = permits(&policy(&text), &peer("a"));
    let read = |key: String| {
        let request = RangeRequest { key: key.into_bytes().into(), ..Default::default() };
        verdict(&permits, RANGE, &request.encode_to_vec())
    };
    for n in (0..20_000).step_by(499).chain([19_999]) {
        assert_eq!(read(format!("/k/{n:05}")), Ok(()), "{n}");
        assert_eq!(read(format!("/k/{n:05}0")), Err(DenialReason::NoGrant), "{n}");
    }
    assert_eq!(read("/k/20000".to_owned()), Err(DenialReason::NoGrant));
    assert_eq!(verdict(&permits, RANGE, &range("/k/00000", "/k/00001")), Err(DenialReason::NoGrant));
}

// --- The reference ---

/// Keys of the small world: grants and requests begin and end at these keys only.
const KEYS: [&str; 8] = ["/", "/a", "/a/", "/a/x", "/b", "/own/", "/own/k", "/z"];

#[derive(Clone, Debug)]
struct Grant {
    allow: bool,
    action: usize,
    kind: u8,
    key: usize,
    end: usize,
}

impl Grant {
    fn toml(&self) -> String {
        let keys = match self.kind {
            0 => format!("key = '{}'", KEYS[self.key]),
            1 => format!("prefix = '{}'", KEYS[self.key]),
            2 if self.key < self.end => {
                format!("range = {{ from = '{}', to = '{}' }}", KEYS[self.key], KEYS[self.end])
            }
            _ => "everything = true".to_owned(),
        };
        let kind = if self.allow { "allow" } else { "deny" };
        format!("[[role.{kind}]]\nactions = ['{}']\n{keys}\n", Action::ALL[self.action].name())
    }

    fn has(&self, key: &[u8]) -> bool {
        let own = KEYS[self.key].as_bytes();
        match self.kind {
            0 => key == own,
            1 => key.starts_with(own),
            2 if self.key < self.end => own <= key && key < KEYS[self.end].as_bytes(),
            _ => true,
        }
    }
}

fn grant() -> impl Strategy<Value = Grant> {
    (prop::bool::weighted(0.8), 0..Action::ON_KEYS, 0u8..4, 0..KEYS.len(), 0..KEYS.len())
        .prop_map(|(allow, action, kind, key, end)| Grant { allow, action, kind, key, end })
}

/// Every key that can tell two sets of the small world apart: each key, the key behind it, a key below it,
/// and a key above all.
fn world() -> Vec<Vec<u8>> {
    let mut keys: Vec<Vec<u8>> = vec![Vec::new(), b"\0".to_vec(), b"0".to_vec(), vec![0xff; 4]];
    for key in KEYS {
        let key = key.as_bytes();
        keys.extend([key.to_vec(), [key, b"\0"].concat(), [key, b"q"].concat(), [key, b"\xff"].concat()]);
        let mut next = key.to_vec();
        *next.last_mut().unwrap() += 1;
        keys.push(next);
    }
    keys
}

fn allows(grants: &[Grant], action: Action, range: &KeyRange<'_>) -> bool {
    let keys = world();
    // The first key belongs to every range, also outside of the small world.
    let mut touched = keys.iter().map(Vec::as_slice).filter(|key| range.contains(key)).chain([range.start]);
    touched.all(|key| {
        let of = |allow| {
            let action = action as usize;
            grants.iter().any(|grant| grant.allow == allow && grant.action == action && grant.has(key))
        };
        of(true) && !of(false) && !key.starts_with(b"/own/")
    })
}

fn some_key() -> impl Strategy<Value = Vec<u8>> + Clone {
    prop::sample::select(world())
}

fn request() -> impl Strategy<Value = (&'static str, Vec<u8>)> {
    let keys = || (some_key(), prop_oneof![Just(Vec::new()), Just(vec![0]), some_key()]);
    let read = keys().prop_map(|(key, end)| RangeRequest {
        key: key.into(),
        range_end: end.into(),
        ..Default::default()
    });
    let write = (some_key(), any::<bool>()).prop_map(|(key, prev_kv)| PutRequest {
        key: key.into(),
        prev_kv,
        ..Default::default()
    });
    let delete = (keys(), any::<bool>()).prop_map(|((key, end), prev_kv)| DeleteRangeRequest {
        key: key.into(),
        range_end: end.into(),
        prev_kv,
    });
    let op = prop_oneof![
        read.clone().prop_map(Request::RequestRange),
        write.clone().prop_map(Request::RequestPut),
        delete.clone().prop_map(Request::RequestDeleteRange),
    ];
    let txn = |op: BoxedStrategy<Request>| {
        let ops = || prop::collection::vec(op.clone(), 0..3);
        (prop::collection::vec(keys(), 0..2), ops(), ops()).prop_map(|(compares, success, failure)| {
            let compare = |(key, end): (Vec<u8>, Vec<u8>)| Compare {
                key: key.into(),
                range_end: end.into(),
                ..Default::default()
            };
            let ops = |requests: Vec<_>| {
                requests.into_iter().map(|request| RequestOp { request: Some(request) }).collect()
            };
            TxnRequest {
                compare: compares.into_iter().map(compare).collect(),
                success: ops(success),
                failure: ops(failure),
            }
        })
    };
    let nested = prop_oneof![op.clone(), txn(op.clone().boxed()).prop_map(Request::RequestTxn)];
    prop_oneof![
        read.prop_map(|request| (RANGE, request.encode_to_vec())),
        write.prop_map(|request| (PUT, request.encode_to_vec())),
        delete.prop_map(|request| ("/etcdserverpb.KV/DeleteRange", request.encode_to_vec())),
        txn(nested.boxed()).prop_map(|request| ("/etcdserverpb.KV/Txn", request.encode_to_vec())),
    ]
}

proptest! {
    /// Whatever was observed is allowed by the policy learned from it, and keys of other folders are not.
    #[test]
    fn a_learned_policy_allows_what_was_observed(
        touches in prop::collection::vec(
            (0usize..3, "(/[ab]{1,2}){1,3}/?[cd{}\\\\]{0,2}", prop_oneof![Just(0), Just(1), Just(2), Just(3)]), 1..40,
        ),
        names in 1usize..6, listed_names in 1usize..4,
    ) {
        let mut learner = PolicyLearner::new(LearningBounds { names, listed_names });
        let mut bodies = Vec::new();
        for (action, key, kind) in &touches {
            let end = match kind {
                0 | 1 => Vec::new(),
                2 => end_of_prefix(key.as_bytes()).expect("text"),
                _ => format!("{key}~").into_bytes(),
            };
            let range = KeyRange::of(key.as_bytes(), &end);
            learner.note_keys("password:a", Action::ALL[*action], &range);
            let (key, range_end) = (key.clone().into_bytes().into(), end.clone().into());
            bodies.push(match action {
                0 => (RANGE, RangeRequest { key, range_end, ..Default::default() }.encode_to_vec()),
                1 => {
                    let delete = DeleteRangeRequest { key, range_end, ..Default::default() };
                    ("/etcdserverpb.KV/DeleteRange", delete.encode_to_vec())
                }
                _ => {
                    let create = WatchCreateRequest { key, range_end, ..Default::default() };
                    let union = Some(watch_request::RequestUnion::CreateRequest(create));
                    ("/etcdserverpb.Watch/Watch", WatchRequest { request_union: union }.encode_to_vec())
                }
            });
        }
        let text = learner.policy();
        let permits = permits(&policy(&text), &peer("a"));
        for (path, body) in bodies {
            prop_assert_eq!(verdict(&permits, path, &body), Ok(()), "{}", text);
        }
        for foreign in ["/x", "z", "/"] {
            prop_assert!(verdict(&permits, PUT, &put(foreign).encode_to_vec()).is_err(), "{}", text);
        }
    }
}

/// The number of cases: `KEYWARD_TEST_FULL=1` runs a million.
fn cases() -> u32 {
    if std::env::var("KEYWARD_TEST_FULL").as_deref() == Ok("1") { 1_000_000 } else { 4_000 }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), ..ProptestConfig::default() })]

    /// The verdict equals the verdict of a reference that enumerates keys.
    #[test]
    fn verdicts_equal_those_of_a_reference_that_enumerates_keys(
        grants in prop::collection::vec(grant(), 0..8),
        (path, body) in request(),
        create in (some_key(), prop_oneof![Just(Vec::new()), Just(vec![0]), some_key()], any::<bool>()),
    ) {
        let rules: String = grants.iter().map(Grant::toml).collect();
        let text = format!(
            "[[role]]\nname = 'r'\n{rules}[[binding]]\neveryone = true\nroles = ['r']\n"
        );
        let document = keyward_config::policy(&text, &[], &[]).expect("valid").0;
        let settings = PolicySettings {
            mode: PolicyMode::Enforce,
            document: Arc::new(document),
            ..PolicySettings::default()
        };
        let rules = RulesGeneration::configured(&settings);
        let compiled = Policy::new(Arc::new(settings), rules, ["/own/"].into_iter(), SystemTime::now());
        let permits = permits(&compiled, &peer("a"));
        let mut expected = true;
        touch::visit(lookup(path).unwrap(), &body, &mut |touch| {
            if let TouchTarget::Keys(range) = touch.target {
                expected &= allows(&grants, touch.action, &range);
            }
            ControlFlow::Continue(())
        }).expect("readable");
        let decided = permits.decide(lookup(path).unwrap(), &body);
        prop_assert_eq!(matches!(decided, Decision::Allowed(_)), expected, "{:?} {}", decided, text);

        let (key, range_end, prev_kv) = create;
        let first = if key.is_empty() { vec![0] } else { key.clone() };
        let range = KeyRange::of(&first, &range_end);
        let expected = allows(&grants, Action::Watch, &range)
            && (!prev_kv || allows(&grants, Action::Read, &range));
        let create = WatchCreateRequest {
            key: key.clone().into(), range_end: range_end.clone().into(), prev_kv, ..Default::default()
        };
        let decided = permits.decide_watch(&create.encode_to_vec());
        prop_assert_eq!(matches!(decided, Decision::Allowed(_)), expected, "{:?} {}", decided, text);
    }
}
