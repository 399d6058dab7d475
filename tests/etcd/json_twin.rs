//! The twin test of the JSON face: every route, as everybody, answered through Keyward as etcd itself answers it.
//!
//! Two clusters of one member live the same history: each request is made on one directly and on the other through Keyward, and all
//! that comes back is compared. Owns: the run and its table. Invariant: a difference is permitted by `json_differences.toml` or it is
//! a failure.

mod caller_side;
mod changed_documents;
mod differences;
mod document;
mod exchange;
mod routes;
mod rows;

use std::fmt::Write as _;

use futures_util::future::join_all;

use self::{
    caller_side::{CallerSide, NAMES, Who},
    differences::{compare, outcome},
    exchange::{Ask, HttpAnswer, Reading, Target},
    rows::RestRow,
};
use crate::{
    harness::{
        Auth, Cluster, Options, Tls,
        binary::Version,
        every_version,
        keyward::{Keyward, Site},
        password, side_by_side, versions,
    },
    raw::End,
    twin::{
        compare::Difference,
        permitted::{At, List, Permitted, Second},
        side::Port,
    },
};

/// The review of this test.
const LIST: List = List {
    name: "json_differences.toml",
    text: include_str!("json_differences.toml"),
    callers: NAMES,
    is_path: |path| rows::all().iter().any(|row| row.path == path),
    is_difference: |what| {
        let kinds = ["outcome", "messages", "order", "space", "text", "length"];
        let of = ["header ", "trailer ", "body "];
        kinds.contains(&what) || of.iter().any(|start| what.starts_with(start))
    },
};

/// etcd's own answers to callers without a user, whatever the version, and to web pages.
const CONFIG: &str = "policy.require_identity = \"as-etcd\"\nrest.cors = [\"*\"]\n";

/// What became of one request on both sides.
struct RestVerdict {
    path: &'static str,
    case: &'static str,
    who: Who,
    /// How the direct one ended.
    outcome: String,
    permitted: Vec<String>,
    forbidden: Vec<Difference>,
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_over_json_are_those_of_a_plain_port() {
    let of_version = async |version: &Version| {
        let (first, second) = (cluster(version, Tls::Off).await, cluster(version, Tls::Off).await);
        let site = Site::new();
        let config = site.in_front_of(&second) + CONFIG;
        let keyward = Keyward::start(site, &config).await;
        let mut direct = side(&first).await;
        let target = Target::plain(keyward.site().listen);
        let mut through = CallerSide::new(target, keyward.url(), second.member_id(0).await, true).await;
        run(version, Port::Plain, Second::Keyward, &mut direct, &mut through).await
    };
    let faults = side_by_side(&every_version(), of_version).await.concat();
    assert!(faults.is_empty(), "{faults}");
}

/// etcd's gateway refuses certificates that name a user. Here they count: the answers are those of etcd to the user's token.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_to_certificates_over_json_are_those_to_tokens() {
    let of_version = async |version: &Version| {
        let (first, second) = (cluster(version, Tls::Server).await, cluster(version, Tls::Server).await);
        let keyward = knowing_certificates(&second).await;
        let mut direct = side(&first).await;
        let (listen, pki) = (keyward.site().listen, second.pki());
        let (target, member) = (Target::tls(listen, pki, None), second.member_id(0).await);
        let url = format!("https://{listen}");
        let mut through = CallerSide::new(target, url, member, true).await;
        for who in [Who::Bob, Who::Alice, Who::Root] {
            let target = Target::tls(listen, pki, Some(&pki.client(who.name())));
            through = through.with_certificate(who, target);
        }
        run(version, Port::Tls, Second::Keyward, &mut direct, &mut through).await
    };
    let faults = side_by_side(&versions(), of_version).await.concat();
    assert!(faults.is_empty(), "{faults}");
}

/// The reason why the comparison above is with a token.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_certificate_names_a_user_here_and_is_refused_by_etcd_itself() {
    for version in every_version() {
        let cluster = cluster(&version, Tls::Mutual).await;
        let keyward = knowing_certificates(&cluster).await;
        let (pki, alice) = (cluster.pki(), cluster.pki().client("alice"));
        let direct = Target::tls(cluster.address(0), pki, Some(&alice));
        let through = Target::tls(keyward.site().listen, pki, Some(&alice));
        let (mine, others) = ("{\"key\":\"L2Evaw==\"}", "{\"key\":\"L2Ivaw==\"}");
        println!("etcd {version}: a read with the certificate of alice, directly and through Keyward");
        for (body, here) in [(mine, "200"), (others, "403 7 etcdserver: permission denied")] {
            let ask = Ask {
                method: "POST",
                path: "/v3/kv/range".into(),
                headers: Vec::new(),
                body: body.into(),
                reading: Reading::ToItsEnd,
            };
            let (directly, through) = (outcome(&direct.ask(&ask).await), outcome(&through.ask(&ask).await));
            println!("  {body:<22} {directly:<104} {through}");
            assert!(directly.starts_with("400 CommonName of client"), "etcd {version}: {directly}");
            assert_eq!(through, here, "etcd {version}");
        }
    }
}

/// The proof of the comparison: with etcd in Keyward's place nothing differs but what two clusters must differ in.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_etcds_give_the_same_answers_over_json() {
    let of_version = async |version: &Version| {
        let (first, second) = (cluster(version, Tls::Off).await, cluster(version, Tls::Off).await);
        let (mut direct, mut other) = (side(&first).await, side(&second).await);
        run(version, Port::Plain, Second::Etcd, &mut direct, &mut other).await
    };
    let faults = side_by_side(&every_version(), of_version).await.concat();
    assert!(faults.is_empty(), "{faults}");
}

#[test]
fn no_row_is_there_twice() {
    let rows = rows::all();
    for row in &rows {
        let key = |row: &RestRow| (row.method, row.path, row.case);
        let same = rows.iter().filter(|other| key(other) == key(row)).count();
        assert_eq!(same, 1, "{:?} is there twice", key(row));
    }
}

/// Keyward with TLS, where a certificate's common name is a user.
async fn knowing_certificates(cluster: &Cluster) -> Keyward {
    let (site, pki) = (Site::new(), cluster.pki());
    let server = pki.server();
    let fields = format!(
        ", tls.cert = {:?}, tls.key = {:?}, tls.client_ca = {:?}, tls.client_auth = \"optional\", \
         tls.client_ca_name = \"staff\"",
        server.cert, server.key, pki.ca
    );
    let mut config = site.listening(cluster, &fields) + CONFIG;
    for user in ["alice", "bob", "root"] {
        let file = site.write(&format!("{user}-login"), &password(user));
        config += &format!("[[user]]\nname = \"{user}\"\npassword_file = {file:?}\n");
        config += &format!("[[map]]\npeer = \"cert:staff:CN={user}\"\nas = \"{user}\"\n");
    }
    Keyward::start(site, &config).await
}

async fn cluster(version: &Version, tls: Tls) -> Cluster {
    let auth = Auth::On { extra_users: 0 };
    Cluster::start(version, Options { auth, tls, ..Options::default() }).await
}

/// etcd itself, which knows the word `Bearer` since 3.5.32.
async fn side(cluster: &Cluster) -> CallerSide {
    let takes_bearer = cluster.version().at_least("3.5.32");
    let target = match cluster.options().tls {
        Tls::Off => Target::plain(cluster.address(0)),
        _ => Target::tls(cluster.address(0), cluster.pki(), Some(&cluster.pki().nobody())),
    };
    CallerSide::new(target, cluster.url(0), cluster.member_id(0).await, takes_bearer).await
}

/// Lives the history on both sides, prints the verdicts, and tells where more differed than may: empty where nothing did.
async fn run(
    version: &Version,
    port: Port,
    second: Second,
    direct: &mut CallerSide,
    other: &mut CallerSide,
) -> String {
    let permitted = Permitted::load(&LIST, version, port, second, other.url.clone());
    let mut verdicts = Vec::new();
    let mut rows = rows::all();
    rows.retain(|row| row.from.is_none_or(|from| version.at_least(from)));
    for rows in rows.chunk_by(|row, next| row.is_stream() && next.is_stream()) {
        verdicts.extend(judge_rows(rows, direct, other, &permitted).await);
    }
    let title = format!("etcd {version} over JSON, {port:?} port, second side: {second:?}");
    println!("{title}\n{}", table(&verdicts));
    let forbidden: Vec<_> =
        verdicts.iter().filter(|verdict| !verdict.forbidden.is_empty()).map(told).collect();
    let unused = permitted.unused();
    if forbidden.is_empty() && unused.is_empty() {
        return String::new();
    }
    format!("{title}: {} requests differ\n{}{unused}", forbidden.len(), forbidden.concat())
}

/// One row as everybody, or several of streams. Streams change nothing, so they need not wait for each other.
async fn judge_rows(
    rows: &[RestRow],
    direct: &mut CallerSide,
    other: &mut CallerSide,
    permitted: &Permitted,
) -> Vec<RestVerdict> {
    let calls: Vec<_> = rows.iter().flat_map(|row| row.who.iter().map(move |who| (row, *who))).collect();
    if rows[0].is_stream() {
        let answers = join_all(calls.iter().map(|(row, who)| ask_both(row, *who, direct, other))).await;
        let judged = calls.iter().zip(&answers);
        return judged.map(|((row, who), (a, b))| verdict(row, *who, a, b, permitted)).collect();
    }
    let mut verdicts = Vec::new();
    for (row, who) in calls {
        let (a, b) = ask_both(row, who, direct, other).await;
        if (a.status, b.status) == (Some(200), Some(200)) {
            direct.learn(row.path, who, &a);
            other.learn(row.path, who, &b);
        }
        verdicts.push(verdict(row, who, &a, &b, permitted));
    }
    verdicts
}

/// First directly; a stream that tells something is read on each side until as many documents came as on the other side: the pause
/// after which an open stream counts as told may be shorter than a busy machine takes for the next document.
async fn ask_both(
    row: &RestRow,
    who: Who,
    direct: &CallerSide,
    other: &CallerSide,
) -> (HttpAnswer, HttpAnswer) {
    let reading = match row.reading {
        // Who may not do it is told once.
        Reading::Documents { at_least } if who < Who::Alice => {
            Reading::Documents { at_least: at_least.min(1) }
        }
        reading => reading,
    };
    let first = direct.ask(row.ask(direct, who, reading), who).await;
    let reading = match row.reading {
        Reading::ToItsEnd => Reading::ToItsEnd,
        Reading::Documents { .. } => Reading::Documents { at_least: first.documents().len() },
    };
    let second = other.ask(row.ask(other, who, reading), who).await;
    let told = second.documents().len();
    if first.end == End::Open && (1..told).contains(&first.documents().len()) {
        let reading = Reading::Documents { at_least: told };
        return (direct.ask(row.ask(direct, who, reading), who).await, second);
    }
    (first, second)
}

fn verdict(
    row: &RestRow,
    who: Who,
    direct: &HttpAnswer,
    other: &HttpAnswer,
    permitted: &Permitted,
) -> RestVerdict {
    let at = At { rpc: row.path, case: row.case, who: who.name() };
    let mut verdict = RestVerdict {
        path: row.path,
        case: row.case,
        who,
        outcome: outcome(direct),
        permitted: Vec::new(),
        forbidden: Vec::new(),
    };
    for difference in compare(direct, other) {
        match permitted.reason(at, &difference) {
            Some(reason) if verdict.permitted.iter().any(|known| known == reason) => {}
            Some(reason) => verdict.permitted.push(reason.to_owned()),
            None => verdict.forbidden.push(difference),
        }
    }
    verdict
}

/// A line for each request; the reasons stand below, once.
fn table(verdicts: &[RestVerdict]) -> String {
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
        let (path, case, who, outcome) = (verdict.path, verdict.case, verdict.who.name(), &verdict.outcome);
        writeln!(text, "{path:<34} {case:<38} {who:<8} {mark:<22} {outcome}").expect("a String takes all");
    }
    for (at, reason) in reasons.iter().enumerate() {
        writeln!(text, "({}) {reason}", at + 1).expect("a String takes all");
    }
    text
}

fn told(verdict: &RestVerdict) -> String {
    let mut text = format!("{} {:?} as {}:\n", verdict.path, verdict.case, verdict.who.name());
    for difference in &verdict.forbidden {
        let Difference { what, direct, keyward } = difference;
        writeln!(text, "  {what}: directly {direct:?}, through Keyward {keyward:?}")
            .expect("a String takes all");
    }
    text
}
