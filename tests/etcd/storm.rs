//! Must show 5: many clients of few users log in at once, some with a wrong password. None of these gets in, all others do, and
//! bcrypt runs once per user and member instead of once per client.

use crate::harness::binary::full;
use crate::harness::client::{Client, Record};
use crate::harness::keyward::{Keyward, Site};
use crate::harness::{Auth, Cluster, Options, password, versions};
use crate::steady::of_each;

const CLIENT: &str = "3.5.11";
const USERS: usize = 20;
/// Of each user, at each member: one. The probe is one user more.
const LOGINS: f64 = 20.0;
const PROBE: f64 = 1.0;
/// etcd's own bcrypt cost takes both processors for half a minute, and what is counted is the same.
const COST: u32 = 7;
const FULL_COST: u32 = 10;

async fn logins(cluster: &Cluster, code: &[&str]) -> Vec<f64> {
    let labels = code.iter().map(|code| ("grpc_code", *code)).chain([("grpc_method", "Authenticate")]);
    of_each(cluster, "grpc_server_handled_total", &labels.collect::<Vec<_>>()).await
}

fn made(before: &[f64], after: &[f64]) -> Vec<f64> {
    after.iter().zip(before).map(|(after, before)| after - before).collect()
}

async fn storm(endpoints: &[String], users: &str) -> Record {
    Client::start(CLIENT, "login-storm", "", endpoints, &["--users-file", users]).record().await
}

#[tokio::test]
async fn a_storm_of_logins_costs_one_per_user_and_member() {
    for version in versions() {
        let options = Options {
            members: 3,
            auth: Auth::On { extra_users: USERS },
            bcrypt_cost: if full() { FULL_COST } else { COST },
            timing: Some((250, 2500)),
            ..Options::default()
        };
        let cluster = Cluster::start(&version, options).await;
        let site = Site::new();
        let lines: Vec<String> = (0..USERS)
            .map(|n| format!("u{n:02}"))
            .map(|user| format!("{user} {}\n", password(&user)))
            .collect();
        let users = site.write("users", &lines.concat()).display().to_string();
        let config = site.in_front_of(&cluster);
        let through = [site.listen.to_string()];
        let before = [logins(&cluster, &["OK"]).await, logins(&cluster, &[]).await];
        let keyward = Keyward::start(site, &config).await;
        let good = storm(&through, &users).await;
        let between = [logins(&cluster, &["OK"]).await, logins(&cluster, &[]).await];
        let direct: Vec<String> = (0..cluster.len()).map(|i| cluster.address(i).to_string()).collect();
        let bad = storm(&direct, &users).await;
        let after = [logins(&cluster, &["OK"]).await, logins(&cluster, &[]).await];

        let successes = made(&before[0], &between[0]);
        for (how, record, from, to) in
            [("through Keyward", &good, &before, &between), ("directly", &bad, &between, &after)]
        {
            println!("{version} {how}: {} in {} ms", record.the("summary"), record.the("end")["t"]);
            println!(
                "{version} {how}: logins at each member that succeeded {:?}, all {:?}",
                made(&from[0], &to[0]),
                made(&from[1], &to[1])
            );
        }
        assert_eq!(good.exit.code(), Some(0), "{}", good.tail());
        assert_eq!(good.summed("wrong_admitted"), 0);
        assert_eq!(good.summed("wrong_rejected"), 50);
        // A machine that is too slow for so many bcrypts in etcd's own 7 s is nobody's fault, and nothing else is an excuse.
        let refused: Vec<_> =
            good.all("login").filter(|line| line["ok"] == false && line["wrong"] == false).collect();
        let late = refused.iter().filter(|line| line["message"] == "etcdserver: request timed out").count();
        assert_eq!(refused.len(), late, "{refused:?}");
        assert_eq!(good.summed("admitted"), 200 - i64::try_from(late).expect("few"));
        assert_eq!(good.summed("access_failed"), 0, "{:?}", good.errors());
        assert!(
            successes.iter().all(|made| *made <= LOGINS + PROBE),
            "{version}: {successes:?} logins succeeded"
        );
        assert!(successes.iter().sum::<f64>() >= LOGINS, "{version}: 20 users logged in with {successes:?}");
        drop(keyward);
    }
}
