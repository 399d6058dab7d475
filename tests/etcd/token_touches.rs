//! What keeps idle tokens alive costs members no more after restarts than before: a token that is lost with its member's process
//! says nothing of how long tokens live.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::future::join_all;

use crate::caller::Caller;
use crate::harness::client::lifetime;
use crate::harness::keyward::{Keyward, Site};
use crate::harness::{Auth, Cluster, Options, versions, wait};

const USERS: usize = 6;
const RESTARTS: usize = 3;
/// How long touches are counted: a tenth of the time after which an idle token is touched (`cluster.token_ttl` of 300 s).
const COUNTED: Duration = Duration::from_secs(8);
const LIMIT: Duration = Duration::from_secs(60);

/// All touches that Keyward has made.
async fn touches(keyward: &Keyward) -> f64 {
    keyward.metric("keyward_upstream_touches_total", &[]).await
}

#[tokio::test]
async fn restarts_of_a_member_under_load_do_not_change_how_often_tokens_are_touched() {
    for version in versions() {
        let auth = Auth::On { extra_users: USERS };
        let mut cluster = Cluster::start(&version, Options { members: 1, auth, ..Options::default() }).await;
        let site = Site::new();
        let config = site.in_front_of(&cluster);
        let keyward = Keyward::start(site, &config).await;
        let listen = keyward.site().listen;
        let users = join_all((0..USERS).map(|user| async move {
            let user = format!("u{user:02}");
            (format!("/u/{user}"), Caller::log_in(listen, &user).await)
        }))
        .await;
        let done = AtomicBool::new(false);
        let calls = join_all(users.iter().map(async |(key, user)| {
            while !done.load(Ordering::Relaxed) {
                // Refused while the member is away.
                drop(user.put(key, b"1".to_vec(), 0).await);
                lifetime(Duration::from_millis(100)).await;
            }
        }));
        let restarts = async {
            for _ in 0..RESTARTS {
                lifetime(Duration::from_millis(1500)).await;
                cluster.bounce(0, None).await;
                keyward.uses(cluster.member_id(0).await, LIMIT).await;
                let served = join_all(users.iter().map(async |(key, user)| {
                    let put = async || user.put(key, b"2".to_vec(), 0).await.ok();
                    wait::until(LIMIT, "the user is served again", put).await
                }));
                served.await;
            }
            done.store(true, Ordering::Relaxed);
        };
        tokio::join!(calls, restarts);
        let logins = keyward.metric("keyward_upstream_logins_total", &[("result", "accepted")]).await;
        let before = touches(&keyward).await;
        lifetime(COUNTED).await;
        let made = touches(&keyward).await - before;
        println!(
            "{version}: {RESTARTS} restarts, {USERS} users: {logins} logins, then {made} touches in {COUNTED:?}"
        );
        assert_eq!(made, 0.0, "{version}: touches of idle tokens in {COUNTED:?}");
        // Directly there is nothing that touches a token; here nothing must look like a shorter life of tokens.
        assert!(!keyward.log().contains("tokens die sooner"), "{version}");
    }
}
