//! Users with certificates cost connections: for whom there is no room, the answer is etcd's "too many requests", at once.
//! Where there is no certificate to show, no member is to blame.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use h2::Reason;
use keyward::config;
use keyward::config::upstream_users::{CredentialMaker, MintAuthority, UpstreamUsers, UserCredential};
use keyward::members::membership::AuthSetting;
use keyward::pb::v3electionpb::LeaderRequest;
use keyward::pem::{Chain, KeyPair as Pair, PrivateKey};
use keyward::refusal::Code;
use keyward::tasks::Tasks;
use prost::Message as _;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair, date_time_ymd,
};

use crate::client::{Client, Stream};
use crate::member::{Call, Member};
use crate::rig::{Keyward, paused};
use crate::words::{KEEP_ALIVE, RANGE, WATCH, create_of, created, event, range, renew, watch};

const TOO_MANY: (Code, &str) = (Code::ResourceExhausted, "etcdserver: too many requests");
const OBSERVE: &str = "/v3electionpb.Election/Observe";

fn write(folder: &Path, name: &str, is_ca: IsCa) {
    let mut params = CertificateParams::default();
    if name == "over" {
        params.not_after = date_time_ymd(2020, 1, 1);
    }
    params.distinguished_name.push(DnType::CommonName, name);
    params.is_ca = is_ca;
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
    let key = KeyPair::generate().expect("a key");
    let write = |kind: &str, pem: String| {
        std::fs::write(folder.join(name).with_extension(kind), pem).expect("written");
    };
    write("crt", params.self_signed(&key).expect("signed").pem());
    write("key", key.serialize_pem());
}

/// One connection for certificates, one listener for alice, another for bob.
fn crowded() -> (Member, Keyward) {
    crowded_in(tempfile::tempdir().expect("a folder").path())
}

fn crowded_in(folder: &Path) -> (Member, Keyward) {
    let member = Member::new(1, &Tasks::default());
    write(folder, "etcd", IsCa::Ca(BasicConstraints::Unconstrained));
    let user = |user| {
        write(folder, user, IsCa::NoCa);
        format!("[[user]]\nname = \"{user}\"\ncert = \"{user}.crt\"\nkey = \"{user}.key\"\n")
    };
    let lines = format!(
        "endpoints = [\"https://127.0.0.1:1\"]\ntls = {{ ca = \"etcd.crt\" }}\n{}{}\
         [limits]\ncertificate_connections = 1\n\
         [[listener]]\nname = \"others\"\naddress = \"127.0.0.1:1\"\ndefault_user = \"bob\"\n",
        user("alice"),
        user("bob")
    );
    let keyward = Keyward::at(&[&member], AuthSetting::On, folder, "default_user = \"alice\"\n", &lines);
    (member, keyward)
}

async fn of(keyward: &Keyward, listener: usize) -> Client {
    Client::over(keyward.connect_to(listener, None), &keyward.tasks).await
}

/// A watch that holds the only connection.
async fn holding(member: &Member, client: &Client) -> (Stream, Call) {
    let mut stream = client.open(WATCH).await.expect("a stream");
    stream.say(&watch("k", 5)).await;
    let mut upstream = member.called(WATCH).await;
    upstream.messages.next().await.expect("a create");
    upstream.say(&created(1, 4)).await.expect("said");
    stream.next().await.expect("created");
    (stream, upstream)
}

#[test]
fn a_stream_that_finds_no_room_is_told_so() {
    paused(async {
        let (member, keyward) = crowded();
        let alice = of(&keyward, 0).await;
        let _held = holding(&member, &alice).await;
        let bob = of(&keyward, 1).await;
        assert_eq!(bob.call(RANGE, range("k")).await.end.told(), TOO_MANY);
        for (path, message) in [
            (WATCH, watch("k", 5)),
            (WATCH, watch("k", 0)),
            (KEEP_ALIVE, renew(1)),
            (OBSERVE, LeaderRequest { name: "n".into() }.encode_to_vec()),
        ] {
            let mut stream = match path {
                OBSERVE => bob.begin(path, message).await.expect("sent"),
                _ => {
                    let mut stream = bob.open(path).await.expect("a stream");
                    stream.say(&message).await;
                    stream
                }
            };
            let end = stream.next().await.expect_err("nothing was answered");
            assert_eq!(end.told(), TOO_MANY, "{path}");
        }
        assert!(member.was_called_again().is_none());
    });
}

/// What lives longer than the configuration that let it in goes on with what proves its user now.
#[test]
fn a_watch_resumes_with_the_certificate_that_its_user_has_now() {
    paused(async {
        let folder = tempfile::tempdir().expect("a folder");
        let (member, keyward) = crowded_in(folder.path());
        let alice = of(&keyward, 0).await;
        let (mut stream, upstream) = holding(&member, &alice).await;
        write(folder.path(), "alice", IsCa::NoCa);
        let read =
            config::load(&folder.path().join("keyward.toml")).unwrap_or_else(|faults| panic!("{faults}")).0;
        keyward.credentials.act_for(&read.users, &read.cluster, keyward.pages()).expect("users");
        assert_eq!(member.dials(), 1);
        upstream.reset(Reason::INTERNAL_ERROR);
        let mut upstream = member.called(WATCH).await;
        assert_eq!(member.dials(), 2, "the first connection shows what was replaced");
        let create = upstream.messages.next().await.expect("a create");
        let id = create_of(&create).expect("a create").watch_id;
        upstream.say(&created(id, 4)).await.expect("said");
        upstream.say(&event(id, 5, 1)).await.expect("said");
        stream.next().await.expect("it goes on");
    });
}

/// Nothing is read before it is created.
#[test]
fn a_watch_from_now_needs_no_second_connection() {
    paused(async {
        let (member, keyward) = crowded();
        let alice = of(&keyward, 0).await;
        let mut stream = alice.open(WATCH).await.expect("a stream");
        stream.say(&watch("k", 0)).await;
        let mut upstream = member.called(WATCH).await;
        let create = create_of(&upstream.messages.next().await.expect("a create")).expect("a create");
        upstream.say(&created(create.watch_id, 4)).await.expect("said");
        stream.next().await.expect("created");
        assert_eq!(member.dials(), 1);
    });
}

#[test]
fn a_certificate_that_cannot_be_minted_is_no_members_fault_and_takes_nobodys_room() {
    paused(async {
        let folder = tempfile::tempdir().expect("a folder");
        let at = folder.path();
        let (member, mut keyward) = crowded_in(at);
        let alice = of(&keyward, 0).await;
        let (mut stream, mut upstream) = holding(&member, &alice).await;
        // Bob's is to be minted, from an authority whose time is over since it was read.
        write(at, "over", IsCa::Ca(BasicConstraints::Constrained(0)));
        let chain = Chain::read(&at.join("over.crt")).expect("a certificate");
        let key = PrivateKey::read(&at.join("over.key")).expect("a key");
        let authority = Pair::new(chain, key).expect("a pair");
        let read = config::load(&at.join("keyward.toml")).unwrap_or_else(|faults| panic!("{faults}")).0;
        let mut users = UpstreamUsers::clone(&read.users);
        users.named.insert("bob".into(), UserCredential::Made(CredentialMaker::Mint));
        users.mint = Some(Arc::new(MintAuthority { authority, lifetime: Duration::from_secs(60) }));
        keyward.credentials.act_for(&users, &read.cluster, keyward.pages()).expect("users");
        while keyward.hints.try_recv().is_ok() {}
        let refused = keyward.metrics.certificate_connections_refused.get();
        let bob = of(&keyward, 1).await;
        let end = bob.call(RANGE, range("k")).await.end;
        assert_eq!(end.told(), (Code::Unavailable, "there is no connection available"));
        assert!(keyward.hints.try_recv().is_err(), "no member was spoken against");
        assert!(member.was_called_again().is_none());
        assert_eq!(keyward.metrics.certificate_connections_refused.get(), refused);
        upstream.say(&event(1, 5, 1)).await.expect("said");
        stream.next().await.expect("alice's connection is as it was");
    });
}
