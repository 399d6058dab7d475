//! Must show 1 of identities: one unchanged application, on a clientv3 of 2021 and with its user and password, over the stages of
//! `docs/migrate-to-tls.md` and back. Beside it a python etcd3, which never logs in twice, and a client with a certificate.
//!
//! The page and this file say the same, step by step: who changes one changes the other.

mod front;
mod scene;

use std::time::{Duration, Instant};

use keyward::pb::etcdserverpb::{AuthenticateRequest, AuthenticateResponse, PutRequest};
use keyward::tasks::Tasks;
use prost::Message as _;

use crate::harness::binary::Version;
use crate::harness::ctl::Ctl;
use crate::harness::keyward::NOBODY_IN_FILE;
use crate::harness::{Cluster, Tls, evidence, password, versions, wait};
use crate::raw::{Call, End, Endpoint};
use crate::rewatch::local;
use crate::rounds::{Application, FAMILIES, Family};
use crate::steady::of_each;

use front::{Front, Stage, line};
use scene::{Scene, all_well};

const LIMIT: Duration = Duration::from_secs(60);
/// Within which etcd refuses a token of Keyward's.
const AT_ONCE: Duration = Duration::from_millis(100);
const NO_PASSWORD: &str = "password was given for no password user";

fn family(name: &str) -> &'static Family {
    FAMILIES.iter().find(|family| family.name == name).expect("it is among them")
}

#[test]
fn an_unchanged_client_goes_through_all_stages_and_back() {
    local(async {
        for name in ["python etcd3 0.12.0", "clientv3 3.5.1"] {
            drop(family(name).program());
        }
        for version in versions() {
            let begun = Instant::now();
            there_and_back(&version).await;
            println!("etcd {version}: all of it in {:?}", begun.elapsed());
        }
    });
}

async fn there_and_back(version: &Version) {
    let tasks = Tasks::default();
    let mut scene = Scene::start(version, &tasks).await;
    scene.stage("0").await;
    let mut front = Front::start(&scene.cluster).await;
    let mut tokens = Vec::new();

    to_keyward(&mut scene, &front).await;
    tokens.push(log_in(&front, &scene.cluster, "alice").await);
    to_certificates(&mut scene, &front).await;
    to_the_users_file(&mut scene, &mut front).await;
    tokens.push(log_in(&front, &scene.cluster, "alice").await);
    to_clients_with_certificates(&mut scene, &front).await;

    // Back: stage 4 to 3.
    scene.begins("4 to 3").await;
    front.becomes(Stage::Three).await;
    scene.stage("3 again").await;
    back_to_passwords_at_etcd(&mut scene, &front).await;
    back_to_passwords_upstream(&mut scene, &front).await;
    back_to_etcd(&mut scene, front).await;
    for token in &tokens {
        refused_at_once(&scene.cluster, token).await;
    }
    scene.judged().await;
}

/// Stage 0 to 1.
async fn to_keyward(scene: &mut Scene, front: &Front) {
    // 4: see that it works.
    let listen = front.addresses();
    for address in &listen {
        let through = scene.cluster.ctl().as_user("alice").to(vec![format!("https://{address}")]);
        admitted(&through).await;
    }
    // 5: lead the name there.
    scene.begins("0 to 1").await;
    let to = listen.clone();
    scene.switch("the name leads to Keyward", async move |scene| scene.relay.turn_all_to(&to).await).await;
    // 6: they have come, and are who they say.
    assert!(front.metric("keyward_downstream_connections", &[]).await >= 10.0);
    assert!(front.metric("keyward_upstream_logins_total", &[("result", "accepted")]).await > 0.0);
    // What cannot open a watch again stays on the replica that is not restarted.
    scene.relay.open(listen[0]);
    let python = Application::start(family("python etcd3 0.12.0"), scene.relay.address, &scene.cluster).await;
    scene.relay.open_all(&listen);
    scene.python = Some(python);
    scene.stage("1").await;
}

/// Stage 1 to 2.
async fn to_certificates(scene: &mut Scene, front: &Front) {
    // 1 and 2: etcd asks for client certificates, member by member.
    scene.begins("1, etcd's flags").await;
    roll(scene, front, Tls::Mutual).await;
    scene.stage("1, etcd with --client-cert-auth").await;
    // 3: users are proved by certificates.
    scene.begins("1 to 2").await;
    front.becomes(Stage::Two).await;
    let before = logins(&scene.cluster).await;
    scene.stage("2").await;
    // 4: it works.
    assert!(front.metric("keyward_upstream_certificate_connections", &[]).await > 0.0);
    assert!(front.metric("keyward_upstream_credentials_made_total", &[("kind", "certificate")]).await > 0.0);
    let after = logins(&scene.cluster).await;
    println!("logins at etcd in stage 2: {}", after - before);
}

async fn roll(scene: &mut Scene, front: &Front, tls: Tls) {
    for i in 0..scene.cluster.len() {
        scene.restarts(i, tls).await;
        front.see_all_ready(scene.cluster.len()).await;
    }
}

/// The lines of the file: alice, who has a password at etcd, and carol, who never had one.
async fn users() -> String {
    line("alice", &password("alice")).await + &line("carol", &password("carol")).await
}

/// Stage 2 to 3.
async fn to_the_users_file(scene: &mut Scene, front: &mut Front) {
    // 1 and 2: the rule, then the lines.
    scene.begins("2 to 3").await;
    front.becomes(Stage::Three).await;
    front.has_users(&users().await).await;
    // 3: see that the file decides.
    scene.stage("3, etcd still has the passwords").await;
    assert!(front.records("file:alice", "Put") > 0, "sessions of stage 1 have moved");
    let before = front.records("password:alice", "Put");
    // 4: at etcd, a password that nobody knows.
    scene.begins("3, etcd's passwords go").await;
    change_password(&scene.cluster, "alice", &nobodys()).await;
    let root = scene.cluster.ctl_as_root();
    root.ok(&["user", "add", "carol", "--no-password"]).await;
    root.ok(&["user", "grant-role", "carol", "ra"]).await;
    scene.stage("3").await;
    assert_eq!(front.records("password:alice", "Put"), before, "somebody is still proved by etcd");

    let straight = scene.cluster.ctl();
    refused(&straight.as_user("alice"), "authentication failed").await;
    refused(&straight.as_user("carol"), NO_PASSWORD).await;
    for address in front.addresses() {
        let through = scene.cluster.ctl().to(vec![format!("https://{address}")]);
        let through = through.with_tls(scene.cluster.pki(), None);
        admitted(&through.as_user("carol")).await;
    }

    // A replica can be restarted at any stage.
    scene.begins("3, a replica restarts").await;
    front.restart(Stage::Three).await;
    scene.stage("3, restarted").await;
}

/// Stage 3 to 4.
async fn to_clients_with_certificates(scene: &mut Scene, front: &Front) {
    scene.begins("3 to 4").await;
    front.becomes(Stage::Four).await;
    let shown = front.clients.client("alice");
    let family = family("clientv3 3.5.1");
    let mut all = Vec::new();
    for address in front.addresses() {
        all.push(Application::start_showing(family, address, &scene.cluster, Some(&shown)).await);
    }
    scene.stage("4").await;
    for application in all {
        println!("with a certificate: {} calls", all_well(&application, &scene.cluster).await);
    }
    assert!(front.records("cert:clients:CN=alice", "Put") > 0);
    // root is nobody's by a pattern.
    let root = front.clients.client("root");
    let address = vec![format!("https://{}", front.addresses()[0])];
    let root = scene.cluster.ctl().to(address).with_tls(scene.cluster.pki(), Some(root));
    refused(&root, "permission denied").await;
}

/// Stage 3 to 2.
async fn back_to_passwords_at_etcd(scene: &mut Scene, front: &Front) {
    scene.begins("3 to 2").await;
    change_password(&scene.cluster, "alice", &password("alice")).await;
    front.has_users(NOBODY_IN_FILE).await;
    front.becomes(Stage::Two).await;
    scene.stage("2 again").await;
}

/// Stage 2 to 1.
async fn back_to_passwords_upstream(scene: &mut Scene, front: &Front) {
    scene.begins("2 to 1").await;
    front.becomes(Stage::One).await;
    scene.stage("1 again, etcd with --client-cert-auth").await;
    scene.begins("1 again, etcd's flags").await;
    roll(scene, front, Tls::Server).await;
    // Before the stage, so that its connection is not among those that must come anew after it.
    scene.python_ends("1 again").await;
    scene.stage("1 again").await;
    assert_eq!(front.metric("keyward_upstream_certificate_connections", &[]).await, 0.0);
}

/// Stage 1 to 0.
async fn back_to_etcd(scene: &mut Scene, front: Front) {
    let straight = scene.cluster.address(0);
    scene.begins("1 to 0").await;
    scene.switch("the name leads to etcd", async |scene| scene.relay.turn_all_to(&[straight]).await).await;
    scene.stage("0 again").await;
    front.end().await;
}

async fn change_password(cluster: &Cluster, user: &str, to: &str) {
    let typed = format!("{to}\n");
    let ended =
        cluster.ctl_as_root().run_with(&["user", "passwd", user, "--interactive=false"], &typed).await;
    assert_eq!(ended.code, Some(0), "{ended:?}");
}

/// Who calls by it is told this, and never let in. A busy machine may keep etcdctl waiting for longer than that waits.
async fn refused(ctl: &Ctl, text: &str) {
    let told = async || {
        let ended = ctl.run(&["get", "/a/k"]).await;
        assert_ne!(ended.code, Some(0), "{ended:?}");
        ended.stderr.contains(text).then_some(())
    };
    wait::until(LIMIT, text, told).await;
}

/// Who calls by it is let in. A busy machine may keep etcdctl waiting for longer than that waits.
async fn admitted(ctl: &Ctl) {
    let told = async || {
        let ended = ctl.run(&["get", "/a/k"]).await;
        let late = ended.stderr.contains("deadline exceeded");
        assert!(ended.code == Some(0) || late, "{ended:?}");
        (!late).then_some(())
    };
    wait::until(LIMIT, "it is let in", told).await;
}

/// A password that nobody knows.
fn nobodys() -> String {
    let mut random = [0; 16];
    getrandom::fill(&mut random).expect("random bytes");
    let word = format!("{:032x}", u128::from_ne_bytes(random));
    evidence::secret("a password that nobody knows", &word);
    word
}

async fn logins(cluster: &Cluster) -> f64 {
    of_each(cluster, "grpc_server_handled_total", &[("grpc_method", "Authenticate")]).await.iter().sum()
}

async fn log_in(front: &Front, cluster: &Cluster, user: &str) -> String {
    let login = AuthenticateRequest { name: user.into(), password: password(user) };
    let call = Call::unary("/etcdserverpb.Auth/Authenticate", &login.encode_to_vec());
    let answer = Endpoint::tls(front.addresses()[0], cluster.pki(), None).call(&call).await;
    let reply = AuthenticateResponse::decode(answer.messages().remove(0)).expect("etcd's message");
    assert!(reply.token.starts_with("kw1_"), "Keyward's own token");
    evidence::secret("a token", &reply.token);
    reply.token
}

/// What a client may still hold at the way back: refused by each member, and never left waiting. On a machine that is busy with
/// something else it is asked again: the median of nine at each member counts.
async fn refused_at_once(cluster: &Cluster, token: &str) {
    let put = PutRequest { key: "/a/k".into(), ..PutRequest::default() };
    let call = Call::unary("/etcdserverpb.KV/Put", &put.encode_to_vec()).with("token", token);
    for i in 0..cluster.len() {
        let etcd = Endpoint::tls(cluster.address(i), cluster.pki(), None);
        let median = async || {
            let mut took = Vec::new();
            for _ in 0..9 {
                let begun = Instant::now();
                let answer = etcd.call(&call).await;
                took.push(begun.elapsed());
                assert_eq!((answer.code(), &answer.end), (Some(16), &End::Ended), "{answer:?}");
                assert_eq!(answer.message(), "etcdserver: invalid auth token");
            }
            took.sort();
            println!("member {i} refuses a Keyward token in {:?} (median of {})", took[4], took.len());
            (took[4] < AT_ONCE).then_some(())
        };
        wait::until(LIMIT, "a token of Keyward's is refused at once", median).await;
    }
}
