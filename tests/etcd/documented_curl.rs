//! Must show 4 of the JSON face, curl: the commands of etcd's own documentation page get the same answers through Keyward as directly.

use std::time::Duration;

use crate::harness::binary::full;
use crate::harness::client_program::client_program;
use crate::harness::keyward::{Keyward, Site};
use crate::harness::process::Process;
use crate::harness::{Cluster, Options, newest, password, versions};

const LIMIT: Duration = Duration::from_secs(120);
/// Steps of the script.
const STEPS: usize = 18;

/// Runs the page's commands; all answers must be the expected ones.
async fn run(url: &str, cluster: &Cluster, label: &str) {
    let log = cluster.folder().join("curl");
    let secret = password("root");
    let process = Process::start("curl", &client_program("curl", &[]), [url, &secret], &[], &log);
    let exit = process.ended(LIMIT).await;
    let output = process.output();
    println!("{} {label}:\n{output}", cluster.version());
    assert!(exit.success(), "{label}: {exit}: {output}");
    assert_eq!(output.matches("same: ").count(), STEPS, "{label}");
}

#[tokio::test]
async fn curl_commands_of_the_documentation_get_the_documented_answers() {
    for version in if full() { versions() } else { vec![newest("3.5"), newest("3.6")] } {
        let cluster = Cluster::start(&version, Options::default()).await;
        run(&cluster.url(0), &cluster, "directly").await;

        let cluster = Cluster::start(&version, Options::default()).await;
        let site = Site::new();
        // Auth is turned on by the script; Keyward's own user is there from then on.
        let secret = site.write("root-password", &password("root"));
        let config = site.in_front_of(&cluster)
            + &format!("[cluster.probe]\nuser = \"root\"\npassword_file = {secret:?}\n");
        let keyward = Keyward::start(site, &config).await;
        run(&keyward.url(), &cluster, "through Keyward").await;
    }
}
