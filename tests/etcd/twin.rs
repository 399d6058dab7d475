//! The twin test: every RPC, as everybody, answered through Keyward as etcd itself answers it.
//!
//! Two clusters of one member live the same history: each call is made on one directly and on the other through Keyward, and all that
//! comes back is compared. Owns: the run and its table. Invariant: a difference is permitted by `twin_differences.toml` or it is a
//! failure.

pub(crate) mod compare;
mod fields;
pub(crate) mod permitted;
mod rows;
pub(crate) mod side;

use std::fmt::Write as _;

use futures_util::future::join_all;

use self::{
    compare::{Difference, compare, outcome},
    permitted::{At, List, Permitted, Second},
    rows::Row,
    side::{Port, Side, Who},
};
use crate::{
    harness::{
        Auth, Cluster, Options, Tls,
        binary::Version,
        every_version,
        keyward::{Keyward, Site},
        side_by_side, versions,
    },
    raw::{Answer, End, Endpoint, Shape},
};

/// What became of one call on both sides.
struct Verdict {
    path: &'static str,
    case: &'static str,
    who: Who,
    /// How the direct one ended.
    outcome: String,
    permitted: Vec<String>,
    forbidden: Vec<Difference>,
}

/// The review of this test.
const LIST: List = List {
    name: "twin_differences.toml",
    text: include_str!("twin_differences.toml"),
    callers: &["none", "bob", "garbage", "alice", "root"],
    is_path: |path| fields::rpcs().iter().any(|known| known.path == path),
    is_difference: |what| {
        let words = ["form", "outcome", "messages", "order"];
        words.contains(&what) || what.starts_with("metadata ") || fields::knows(what)
    },
};

/// A role with every action, for everybody.
const ALL_ALLOWED: &str = "[[role]]\nname = 'all'\n[[role.allow]]\neverything = true\n\
    actions = ['read', 'write', 'watch', 'lock', 'lease', 'maintenance', 'cluster', 'auth']\n\
    [[binding]]\neveryone = true\nroles = ['all']\n";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_through_keyward_are_those_of_a_plain_port() {
    through_keyward(&every_version(), Port::Plain, |_| String::new()).await;
}

/// A policy that allows everything changes no answer. Whose answers these are is seen above on every version.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_under_a_policy_that_allows_everything_are_those_of_a_plain_port() {
    through_keyward(&versions(), Port::Plain, |site| {
        let file = site.write("policy.toml", ALL_ALLOWED);
        // No key is Keyward's own: then the whole keyspace may be asked for.
        format!(
            "policy.mode = \"enforce\"\npolicy.file = {file:?}\npolicy.unknown_methods = \"allow\"\n\
             maintenance.etcd_prefix = \"\"\n"
        )
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_through_keyward_are_those_of_a_tls_port() {
    through_keyward(&versions(), Port::Tls, |_| String::new()).await;
}

/// What proves the comparison: with etcd in Keyward's place nothing differs but what two clusters must differ in.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_etcds_give_the_same_answers() {
    let of_version = async |version: &Version| {
        let (first, second) = (cluster(version, Port::Plain).await, cluster(version, Port::Plain).await);
        let (mut direct, mut other) = (side(&first, None).await, side(&second, None).await);
        run(version, Port::Plain, Second::Etcd, &mut direct, &mut other).await
    };
    let faults = side_by_side(&every_version(), of_version).await.concat();
    assert!(faults.is_empty(), "{faults}");
}

#[test]
fn every_rpc_has_a_row() {
    let rows = rows::all();
    let known: Vec<&str> = fields::rpcs().iter().map(|rpc| rpc.path.as_str()).collect();
    assert!(known.contains(&"/etcdserverpb.KV/Range"), "the descriptors have no KV service");
    let missing: Vec<_> = known.iter().filter(|path| rows.iter().all(|row| row.path != **path)).collect();
    assert!(missing.is_empty(), "no row for {missing:?}");
    for row in &rows {
        let same = rows.iter().filter(|other| (other.path, other.case) == (row.path, row.case)).count();
        assert_eq!(same, 1, "{} {:?} is there twice", row.path, row.case);
    }
}

/// With the lines of configuration that `lines` adds.
async fn through_keyward(versions: &[Version], port: Port, lines: impl Fn(&Site) -> String) {
    let of_version = async |version: &Version| {
        let (first, second) = (cluster(version, port).await, cluster(version, port).await);
        let site = Site::new();
        // etcd's own answers to callers without a user, whatever the version.
        let config = site.in_front_of(&second) + "policy.require_identity = \"as-etcd\"\n" + &lines(&site);
        let keyward = Keyward::start(site, &config).await;
        let mut direct = side(&first, None).await;
        let mut through = side(&second, Some(&keyward)).await;
        run(version, port, Second::Keyward, &mut direct, &mut through).await
    };
    let faults = side_by_side(versions, of_version).await.concat();
    assert!(faults.is_empty(), "{faults}");
}

async fn cluster(version: &Version, port: Port) -> Cluster {
    let tls = match port {
        Port::Plain => Tls::Off,
        Port::Tls => Tls::Server,
        Port::Mutual => Tls::Mutual,
    };
    let auth = Auth::On { extra_users: 0 };
    Cluster::start(version, Options { auth, tls, ..Options::default() }).await
}

async fn side(cluster: &Cluster, through: Option<&Keyward>) -> Side {
    let endpoint = match (through, cluster.options().tls) {
        (Some(keyward), _) => Endpoint::plain(keyward.site().listen),
        (None, Tls::Off) => Endpoint::plain(cluster.address(0)),
        (None, _) => Endpoint::tls(cluster.address(0), cluster.pki(), None),
    };
    let url = through.map_or_else(|| cluster.url(0), Keyward::url);
    Side::new(endpoint, url, cluster.member_id(0).await).await
}

/// Lives the history on both sides, prints what came of it, and tells where more differed than may: empty where nothing did.
async fn run(version: &Version, port: Port, second: Second, direct: &mut Side, other: &mut Side) -> String {
    let permitted = Permitted::load(&LIST, version, port, second, other.url.clone());
    let mut verdicts = Vec::new();
    for row in rows::all() {
        verdicts.extend(judge_row(&row, direct, other, &permitted).await);
    }
    let title = format!("etcd {version}, {port:?} port, second side: {second:?}");
    println!("{title}\n{}", table(&verdicts));
    let forbidden: Vec<_> =
        verdicts.iter().filter(|verdict| !verdict.forbidden.is_empty()).map(told).collect();
    let unused = permitted.unused();
    if forbidden.is_empty() && unused.is_empty() {
        return String::new();
    }
    format!("{title}: {} calls differ\n{}{unused}", forbidden.len(), forbidden.concat())
}

/// One row as everybody. Streams change nothing, so they need not wait for each other.
async fn judge_row(row: &Row, direct: &mut Side, other: &mut Side, permitted: &Permitted) -> Vec<Verdict> {
    if row.shape != Shape::Once {
        let each = row.who.iter().map(|who| ask_both(row, *who, direct, other));
        let answers = join_all(each).await;
        return row
            .who
            .iter()
            .zip(answers)
            .map(|(who, (a, b))| verdict(row, *who, &a, &b, permitted))
            .collect();
    }
    let mut verdicts = Vec::new();
    for who in row.who {
        let (a, b) = ask_both(row, *who, direct, other).await;
        if a.code() == Some(0) && b.code() == Some(0) {
            direct.learn(row.path, *who, &a);
            other.learn(row.path, *who, &b);
        }
        verdicts.push(verdict(row, *who, &a, &b, permitted));
    }
    verdicts
}

/// First directly; a stream that tells something is read on each side until as many messages came as on the other side: the pause
/// after which an open stream counts as told may be shorter than a busy machine takes for the next message.
async fn ask_both(row: &Row, who: Who, direct: &Side, other: &Side) -> (Answer, Answer) {
    let shape = match row.shape {
        // Who may not do it is told once.
        Shape::Stream { at_least } if who < Who::Alice => Shape::Stream { at_least: at_least.min(1) },
        shape => shape,
    };
    let first = direct.call(row.path, &(row.request)(direct, who), shape, who).await;
    let at_least = first.messages().len();
    let shape = match row.shape {
        Shape::Once => Shape::Once,
        Shape::Stream { .. } => Shape::Stream { at_least },
        Shape::ServerStream { .. } => Shape::ServerStream { at_least },
    };
    let second = other.call(row.path, &(row.request)(other, who), shape, who).await;
    let told = second.messages().len();
    if first.end != End::Open || !(1..told).contains(&first.messages().len()) {
        return (first, second);
    }
    let shape = match row.shape {
        Shape::Once => Shape::Once,
        Shape::Stream { .. } => Shape::Stream { at_least: told },
        Shape::ServerStream { .. } => Shape::ServerStream { at_least: told },
    };
    (direct.call(row.path, &(row.request)(direct, who), shape, who).await, second)
}

fn verdict(row: &Row, who: Who, direct: &Answer, other: &Answer, permitted: &Permitted) -> Verdict {
    let message = fields::rpcs().iter().find(|rpc| rpc.path == row.path).map(|rpc| rpc.output.as_str());
    let at = At { rpc: row.path, case: row.case, who: who.name() };
    let mut verdict = Verdict {
        path: row.path,
        case: row.case,
        who,
        outcome: outcome(direct),
        permitted: Vec::new(),
        forbidden: Vec::new(),
    };
    for difference in compare(message, direct, other) {
        match permitted.reason(at, &difference) {
            Some(reason) if verdict.permitted.iter().any(|known| known == reason) => {}
            Some(reason) => verdict.permitted.push(reason.to_owned()),
            None => verdict.forbidden.push(difference),
        }
    }
    verdict
}

/// A line for each call; the reasons stand below, once.
fn table(verdicts: &[Verdict]) -> String {
    let mut reasons: Vec<&String> = Vec::new();
    let mut text = String::new();
    for verdict in verdicts {
        let mut marks = Vec::new();
        for reason in &verdict.permitted {
            let at = reasons.iter().position(|known| *known == reason).unwrap_or_else(|| {
                reasons.push(reason);
                reasons.len() - 1
            });
            marks.push(format!("{}", at + 1));
        }
        let mark = match (verdict.forbidden.is_empty(), marks.is_empty()) {
            (false, _) => "DIFFERENT".into(),
            (true, true) => "same".into(),
            (true, false) => format!("permitted ({})", marks.join(" ")),
        };
        let rpc = verdict.path.rsplit('.').next().unwrap_or(verdict.path);
        let (case, who, outcome) = (verdict.case, verdict.who.name(), &verdict.outcome);
        writeln!(text, "{rpc:<28} {case:<34} {who:<8} {mark:<22} {outcome}").expect("a String takes all");
    }
    for (at, reason) in reasons.iter().enumerate() {
        writeln!(text, "({}) {reason}", at + 1).expect("a String takes all");
    }
    text
}

fn told(verdict: &Verdict) -> String {
    let mut text = format!("{} {:?} as {}:\n", verdict.path, verdict.case, verdict.who.name());
    for difference in &verdict.forbidden {
        let Difference { what, direct, keyward } = difference;
        writeln!(text, "  {what}: directly {direct:?}, through Keyward {keyward:?}")
            .expect("a String takes all");
    }
    text
}
