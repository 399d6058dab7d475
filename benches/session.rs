//! What a call pays to be known: the session token opened, and the identity behind it found.
//!
//! Aims (issue 4): 2 µs where the shard has opened the token before, 10 µs where it has not.

use std::hint::black_box;
use std::sync::Arc;
use std::time::SystemTime;

use criterion::{Criterion, criterion_group, criterion_main};
use keyward::credentials::{CredentialSettings, Credentials};
use keyward::downstream::session::{
    OpenedSessions, SealRealm, Sealer, Session, SessionKeys, SessionPeer, SessionProof,
};
use keyward::identity::ClusterId;
use keyward::members::membership::ControlChannels;
use keyward::secret::Secret;

/// Sessions in the shard's memory beside the one that calls.
const OTHERS: usize = 2000;

fn sealer() -> Arc<Sealer> {
    let keys = [1, 2].map(|seed| Secret::new([seed; 32]));
    let sealer = Sealer::new(SessionKeys::new(&keys).expect("two keys"));
    sealer.pin(&SealRealm::new(None, ClusterId(0xcafe)));
    Arc::new(sealer)
}

fn token(sealer: &Sealer, user: &str) -> Vec<u8> {
    let password = Secret::new("correct horse battery staple".to_owned());
    let peer = SessionPeer::Password { user: user.into(), password };
    let session = Session::begin(peer, SessionProof::Etcd { auth_revision: 7 }, 3, SystemTime::now());
    sealer.seal(&session.expect("random bytes")).expect("it fits").expose().clone().into_bytes()
}

fn find(credentials: &Credentials, session: &Session) {
    let SessionPeer::Password { user, password } = &session.peer else { return };
    black_box(credentials.identity(user, password));
}

fn sessions(criterion: &mut Criterion) {
    let sealer = sealer();
    let opened = OpenedSessions::new(Arc::clone(&sealer), 2 * (OTHERS + 1));
    for other in 0..OTHERS {
        opened.open(&token(&sealer, &format!("user-{other}"))).expect("its own token");
    }
    let (credentials, _control) =
        Credentials::new(CredentialSettings::default(), ControlChannels::default()).expect("random bytes");
    let alice = token(&sealer, "alice");

    let mut group = criterion.benchmark_group("session");
    group.bench_function("open, cached, same caller as last", |bencher| {
        bencher.iter(|| black_box(opened.open(black_box(&alice)).expect("its own token")));
    });
    group.bench_function("open and identity, cached", |bencher| {
        bencher.iter(|| find(&credentials, &opened.open(black_box(&alice)).expect("its own token")));
    });
    group.bench_function("open and identity, not cached", |bencher| {
        bencher.iter(|| find(&credentials, &sealer.open(black_box(&alice)).expect("its own token")));
    });
    group.bench_function("login: seal", |bencher| bencher.iter(|| black_box(token(&sealer, "alice"))));
    group.finish();
}

criterion_group!(benches, sessions);
criterion_main!(benches);
