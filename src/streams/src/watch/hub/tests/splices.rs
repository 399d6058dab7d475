//! Splices: bytes not set by Keyward cross unchanged.

use super::*;

#[test]
fn a_create_crosses_with_the_clients_own_bytes() {
    let mut bench = Bench::new();
    // key "k", start_revision 5, prev_kv, watch_id 8, an unknown field 99; beside the union an unknown field
    // 50.
    let create = b"\x0a\x01k\x18\x05\x30\x01\x38\x08\x98\x06\x2a";
    let mut message = vec![0x0a, u8::try_from(create.len()).unwrap()];
    message.extend_from_slice(create);
    message.extend_from_slice(b"\x92\x03\x02hi");
    bench.input(HubInput::Client(message.into()));
    bench.out.clear();
    bench.input(HubInput::Opened { stream: UpstreamStreamId(1), traits: NEW });
    let HubOutput::Send { message, .. } = bench.only() else { panic!() };
    let sent = b"\x0a\x01k\x30\x01\x98\x06\x2a\x18\x05\x20\x01\x38\x01\x40\x01";
    let mut expected = vec![0x0a, u8::try_from(sent.len()).unwrap()];
    expected.extend_from_slice(sent);
    expected.extend_from_slice(b"\x92\x03\x02hi");
    assert_eq!(message, expected);
}

#[test]
fn fields_that_we_do_not_know_cross_in_header_event_and_response() {
    let mut bench = Bench::watching(MIDDLE);
    // header { cluster 7, revision 9, leader_id 5 (of etcd 3.8) }, watch 1, one event { kv { mod_revision 9
    // }, field 20 }, and field 15 beside the events.
    let header = b"\x0a\x06\x08\x07\x18\x09\x28\x05";
    let event = b"\x5a\x07\x12\x02\x18\x09\xa0\x01\x01";
    let unknown = b"\x78\x2a";
    let message = [&header[..], b"\x10\x01", event, unknown].concat();
    bench.input(HubInput::Upstream { stream: UpstreamStreamId(1), message: message.into() });
    let HubOutput::Emit(told) = bench.only() else { panic!() };
    assert_eq!(told, [&header[..], event, unknown].concat(), "watch id 0 is left out, all else as it came");
    // A header ahead of the delivered events: only the revision changes.
    let header = b"\x0a\x06\x08\x07\x18\x32\x28\x05";
    let event = b"\x5a\x07\x12\x02\x18\x0a\xa0\x01\x01";
    let message = [&header[..], b"\x10\x01", event, unknown].concat();
    bench.input(HubInput::Upstream { stream: UpstreamStreamId(1), message: message.into() });
    let HubOutput::Emit(told) = bench.only() else { panic!() };
    assert_eq!(told, [b"\x0a\x06\x08\x07\x18\x0a\x28\x05", &event[..], unknown].concat());
}
