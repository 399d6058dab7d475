//! A stranger cannot tell which users exist by guessing: five wrong passwords at once for one name, as he would try them, at
//! real bcrypts and argon2s of their default cost.

use std::time::{Duration, Instant};

use futures_util::future::join_all;
use keyward::pb::etcdserverpb::AuthenticateRequest;
use keyward::secret::Secret;
use keyward::users::{self, Cost};
use prost::Message;

use crate::harness::binary::full;
use crate::harness::keyward::{Keyward, Site};
use crate::harness::{Auth, Cluster, Options, newest, versions};
use crate::raw::{Call, Endpoint};

/// Guesses at once for one name: as many as one name and address have free.
const GUESSES: usize = 5;
const FAILED: &str = "etcdserver: authentication failed, invalid user ID or password";
const TIMED_OUT: &str = "etcdserver: request timed out";
/// What a stranger's clock resolves, beyond what a network adds.
const RESOLUTION: Duration = Duration::from_millis(50);
/// Each refusal of one network ends a slot of this length at least, whoever the user is (`src/gateway/src/login/limits.rs`).
const LEAST_SLOT: Duration = Duration::from_secs(1);

/// After what times the guesses of one round were answered, all at once. They count from before the first guess, since that one's slot
/// begins before a busy machine comes to the last.
async fn round(endpoint: &Endpoint, user: &str, number: usize) -> Vec<Duration> {
    let begun = Instant::now();
    let guesses = (0..GUESSES).map(async |guess| {
        let password = format!("wrong-{number}-{guess}");
        let request = AuthenticateRequest { name: user.into(), password };
        let call = Call::unary("/etcdserverpb.Auth/Authenticate", &request.encode_to_vec());
        let answer = endpoint.call(&call).await;
        // A machine too busy for five bcrypts in seven seconds says so.
        let message = answer.message();
        assert!(message == FAILED || (!full() && message == TIMED_OUT), "{user}: {message}");
        begun.elapsed()
    });
    let mut times = join_all(guesses).await;
    times.sort();
    times
}

/// How many of these rounds the best threshold of the mean time tells apart, as the stranger's clock shows them.
fn told_apart(existing: &[Vec<Duration>], missing: &[Vec<Duration>]) -> usize {
    let mean = |times: &Vec<Duration>| {
        let sum = times.iter().sum::<Duration>() / u32::try_from(times.len()).expect("few");
        sum.as_millis() / RESOLUTION.as_millis()
    };
    let (existing, missing): (Vec<_>, Vec<_>) =
        (existing.iter().map(mean).collect(), missing.iter().map(mean).collect());
    let thresholds = existing.iter().chain(&missing);
    let right = thresholds.map(|threshold| {
        let above = existing.iter().filter(|mean| *mean >= threshold).count()
            + missing.iter().filter(|mean| *mean < threshold).count();
        above.max(existing.len() + missing.len() - above)
    });
    right.max().expect("rounds")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn five_guesses_at_once_do_not_tell_whether_the_user_exists() {
    let rounds = if full() { 25 } else { 4 };
    let versions = if full() { versions() } else { vec![newest("3.6")] };
    for version in versions {
        let auth = Auth::On { extra_users: 0 };
        let cluster = Cluster::start(&version, Options { auth, bcrypt_cost: 10, ..Options::default() }).await;
        let site = Site::new();
        let hash = users::hash(&Secret::new("in-the-file".to_owned()), Cost::DEFAULT).expect("hashed");
        let file = site.write("users", &format!("carol:{hash}\n"));
        // The limits would answer most rounds; here the times alone are tried.
        let config = site.in_front_of(&cluster)
            + &format!("login.sources = [\"file\", \"etcd\"]\nlogin.users_file = {file:?}\n")
            + "login.failures_per_user_and_address = 0\nlogin.failures_per_user = 0\n\
               login.failures_per_address = 0\n";
        let keyward = Keyward::start(site, &config).await;
        let through = Endpoint::plain(keyward.site().listen);
        let (mut etcds, mut files, mut missing) = (Vec::new(), Vec::new(), Vec::new());
        for number in 0..rounds {
            etcds.push(round(&through, "alice", number).await);
            missing.push(round(&through, &format!("nobody-{number}"), number).await);
            files.push(round(&through, "carol", number).await);
        }
        for (source, existing) in [("etcd", &etcds), ("the users file", &files)] {
            let right = told_apart(existing, &missing);
            println!(
                "{version}: a user of {source} is told from nobody in {right} of {} rounds\n{existing:?}\n{missing:?}",
                2 * rounds
            );
            // Half is chance. A few rounds on a busy machine show nothing but how busy it is.
            if full() {
                assert!(right <= rounds + rounds.div_ceil(4), "{version}: {source} tells who exists");
            }
        }
        for times in etcds.iter().chain(&files).chain(&missing) {
            let slots = (1..).map(|number| LEAST_SLOT * number);
            let early: Vec<_> = times.iter().zip(slots).filter(|(time, slot)| *time < slot).collect();
            assert!(
                early.is_empty(),
                "{version}: refused before the end of their slots: {early:?} of {times:?}"
            );
        }
        drop(keyward);
    }
}
