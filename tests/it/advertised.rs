//! Who asks for the member list is led back by the way that it came: plaintext, TLS, or a unix socket.

use keyward::members::membership::AuthSetting;
use keyward::pb::etcdserverpb::{Member as Listed, MemberListRequest, MemberListResponse};
use keyward::tasks::Tasks;
use prost::Message as _;

use crate::authority::{Authority, connect};
use crate::client::Client;
use crate::member::Member;
use crate::rig::{Keyward, paused};
use crate::words::header;

const LIST: &str = "/etcdserverpb.Cluster/MemberList";

/// What this client is told are the client URLs of the members.
async fn told(member: &Member, client: &Client) -> Vec<String> {
    let listed = |id: u64| Listed {
        id,
        name: format!("m{id}"),
        client_ur_ls: vec!["http://10.0.0.1:2379".into()],
        ..Listed::default()
    };
    let script = async {
        let answer = MemberListResponse { header: Some(header(1)), members: vec![listed(1), listed(2)] };
        member.called(LIST).await.reply(&answer.encode_to_vec()).await;
    };
    let asked = client.call(LIST, MemberListRequest::default().encode_to_vec());
    let (outcome, ()) = tokio::join!(asked, script);
    let answer = MemberListResponse::decode(outcome.message().clone()).expect("an answer");
    answer.members.into_iter().flat_map(|member| member.client_ur_ls).collect()
}

#[test]
fn the_member_list_leads_back_by_the_listener_that_it_was_asked_over() {
    paused(async {
        let (member, authority) = (Member::new(1, &Tasks::default()), Authority::new());
        let folder = tempfile::tempdir().expect("a folder");
        authority.write(folder.path(), "ca");
        let tls = "tls = { cert = \"server.crt\", key = \"server.key\" }";
        let listeners = format!(
            "[[listener]]\nname = \"tls\"\naddress = \"127.0.0.1:2380\"\n{tls}\n\
             [[listener]]\nname = \"socket\"\naddress = \"unix:/run/keyward.sock\"\n\
             [[listener]]\nname = \"m2\"\naddress = \"127.0.0.1:2392\"\nmember = \"m2\"\n{tls}\n"
        );
        let plain = "http://127.0.0.1:2379";
        for (everywhere, expected) in [
            ("", [plain, "https://127.0.0.1:2380", "unix:///run/keyward.sock"]),
            ("[advertise]\nclient_urls = [\"https://all:2379\"]\n", ["https://all:2379"; 3]),
        ] {
            let lines = format!("{listeners}{everywhere}");
            let keyward = Keyward::at(&[&member], AuthSetting::Off, folder.path(), "", &lines);
            for (listener, shared) in expected.into_iter().enumerate() {
                let pipe = keyward.connect_to(listener, None);
                let (client, own) = if listener == 1 {
                    let io = connect(pipe, authority.tls(None)).await.expect("a handshake");
                    (Client::over(io, &keyward.tasks).await, "https://127.0.0.1:2392")
                } else {
                    // The listener of m2 speaks TLS: it is nobody's way back who came without.
                    (Client::over(pipe, &keyward.tasks).await, shared)
                };
                assert_eq!(
                    told(&member, &client).await,
                    [shared, own],
                    "listener {listener}, {everywhere:?}"
                );
            }
        }
    });
}
