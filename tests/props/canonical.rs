//! Bodies: what is canonical has one reading, ours is etcd's, and decisions follow it. Whatever else comes panics nobody
//! and is decided on with care.

use bytes::Bytes;
use keyward::pb::{etcdserverpb as pb, mvccpb, v3electionpb as election, v3lockpb as lock};
use keyward::rpc::method::{Effect, METHODS, Method};
use keyward::rpc::scan::WireFields;
use keyward::rpc::schema::MessageId;
use keyward::rpc::{body_shape, canonical, header};
use prost::Message;

use crate::bodies::{Style, body};
use crate::choices::{Choices, for_any_bytes};
use crate::readers;

/// How deep Txns lie in one another here; `txns` goes deeper.
const DEPTH: u32 = 3;

/// For fuzzers.
pub(crate) const TARGETS: [fn(&[u8]); 5] = [
    what_is_canonical_by_construction_passes,
    an_odd_body_is_refused_or_read_alike,
    any_body_is_refused_or_read_alike,
    fields_cover_the_body,
    the_header_is_what_prost_reads,
];

fn method(choices: &mut Choices<'_>) -> &'static Method {
    // Half of them where the decisions are.
    match choices.below(16) {
        0..6 => &METHODS[choices.below(METHODS.len())],
        6 | 7 => keyward::rpc::method::lookup("/etcdserverpb.KV/Range").expect("a row"),
        8 => keyward::rpc::method::lookup("/v3lockpb.Lock/Lock").expect("a row"),
        9 => keyward::rpc::method::lookup("/v3electionpb.Election/Campaign").expect("a row"),
        10 => keyward::rpc::method::lookup("/etcdserverpb.Watch/Watch").expect("a row"),
        11 => keyward::rpc::method::lookup("/etcdserverpb.Maintenance/Alarm").expect("a row"),
        _ => keyward::rpc::method::lookup("/etcdserverpb.KV/Txn").expect("a row"),
    }
}

/// What clients could write passes.
fn what_is_canonical_by_construction_passes(input: &[u8]) {
    let mut choices = Choices::new(input);
    let method = method(&mut choices);
    let body = body(&mut choices, method.body, Style::Canonical, DEPTH);
    assert_eq!(canonical::check(method.body, &body), Ok(()), "{body:02x?}");
    decide(method, &body);
}

/// Messages with oddities in them, at any depth.
fn an_odd_body_is_refused_or_read_alike(input: &[u8]) {
    let mut choices = Choices::new(input);
    let method = method(&mut choices);
    let body = body(&mut choices, method.body, Style::Odd, DEPTH);
    decide(method, &body);
}

fn any_body_is_refused_or_read_alike(input: &[u8]) {
    let mut choices = Choices::new(input);
    let method = method(&mut choices);
    decide(method, choices.rest());
}

/// Everything that is read of a request's body, each held to what etcd's decoders read.
fn decide(method: &Method, body: &[u8]) {
    let schema = method.body;
    let canonical = canonical::check(schema, body);
    let read = readers::prost(schema, body);
    if canonical.is_ok() {
        let ours = readers::ours(schema, body);
        assert!(ours.is_some(), "a canonical body is read: {body:02x?}");
        assert_eq!(read, ours, "prost and we read {} {body:02x?}", schema.message().name);
        assert_eq!(
            readers::gogo(schema, body),
            ours,
            "gogo and we read {} {body:02x?}",
            schema.message().name
        );
        let again = ours.expect("read");
        assert_eq!(canonical::check(schema, &again), Ok(()), "what is written again passes again");
        // Written again, a present but empty end is absent: old members read the two apart (V23).
        if !ends_empty(schema, body) {
            assert_eq!(body_shape::lane(method, body), body_shape::lane(method, &again));
        }
        assert_eq!(body_shape::may_reissue(method, body), body_shape::may_reissue(method, &again));
    }
    let effect = body_shape::effect(method, body);
    let (_, _) = (body_shape::lane(method, body), body_shape::may_reissue(method, body));
    match schema {
        MessageId::TxnRequest => {
            let writes =
                read.is_some_and(|read| writes(&pb::TxnRequest::decode(&*read).expect("read before")));
            let gogo = readers::gogo(schema, body);
            let gogo = gogo.is_some_and(|read| self::writes(&pb::TxnRequest::decode(&*read).expect("valid")));
            assert!(!(effect == Effect::ReadOnly && (writes || gogo)), "an overlooked write: {body:02x?}");
        }
        MessageId::RangeRequest => {
            let range = body_shape::range(body);
            if let (Ok(()), Some(read)) = (canonical, read) {
                let read = pb::RangeRequest::decode(&*read).expect("read before");
                let lean = read.keys_only || read.count_only;
                let ends = !read.range_end.is_empty() || ends_empty(schema, body);
                let bulk = ends && !lean && (read.limit <= 0 || read.limit > 1000);
                assert_eq!((range.serializable, range.bulk), (read.serializable, bulk), "{body:02x?}");
            }
        }
        MessageId::AlarmRequest => {
            let asks = |read: Vec<u8>| pb::AlarmRequest::decode(&*read).expect("read before").action == 0;
            let asks = read.into_iter().chain(readers::gogo(schema, body)).all(asks);
            assert!(effect != Effect::ReadOnly || asks, "an overlooked change of alarms: {body:02x?}");
        }
        MessageId::LockRequest | MessageId::CampaignRequest if canonical.is_ok() => {
            let read = read.expect("canonical");
            let lease = if schema == MessageId::LockRequest {
                lock::LockRequest::decode(&*read).expect("read before").lease
            } else {
                election::CampaignRequest::decode(&*read).expect("read before").lease
            };
            assert_eq!(body_shape::lock_lease(body), lease);
            assert_eq!(body_shape::may_reissue(method, body), lease != 0);
        }
        _ => drop(body_shape::user_name(body).map(str::len)),
    }
}

/// True if the body is a RangeRequest whose `range_end` is present and empty.
fn ends_empty(schema: MessageId, body: &[u8]) -> bool {
    let mut fields = WireFields::new(body).map_while(Result::ok);
    schema == MessageId::RangeRequest
        && fields.any(|field| field.number == 2 && field.value.bytes().is_some_and(<[u8]>::is_empty))
}

fn writes(txn: &pb::TxnRequest) -> bool {
    use pb::request_op::Request;
    txn.success.iter().chain(&txn.failure).any(|op| match &op.request {
        Some(Request::RequestPut(_) | Request::RequestDeleteRange(_)) => true,
        Some(Request::RequestTxn(nested)) => writes(nested),
        Some(Request::RequestRange(_)) | None => false,
    })
}

/// Fields lie one after another and cover the body, up to the first fault; each is readable alone.
fn fields_cover_the_body(input: &[u8]) {
    let mut end = 0;
    for field in WireFields::new(input) {
        let Ok(field) = field else { return };
        assert_eq!(field.range.start, end);
        end = field.range.end;
        let alone: Vec<_> = WireFields::new(&input[field.range.clone()]).collect();
        assert!(
            matches!(&alone[..], [Ok(same)] if same.number == field.number && same.value == field.value),
            "{alone:?}"
        );
    }
    assert_eq!(end, input.len());
}

/// A member's answer: the header that we read of it is the one that prost reads.
fn the_header_is_what_prost_reads(input: &[u8]) {
    let mut choices = Choices::new(input);
    let header = pb::ResponseHeader {
        cluster_id: choices.number(),
        member_id: choices.number(),
        revision: choices.number().cast_signed(),
        raft_term: choices.number(),
    };
    let with = choices.flag().then_some(header);
    let kv = choices
        .flag()
        .then(|| mvccpb::KeyValue { key: choices.bytes(3).to_vec().into(), ..Default::default() });
    let mut answer = pb::PutResponse { header: with, prev_kv: kv }.encode_to_vec();
    // etcd writes the header first; bytes after it are another's business.
    if with.is_some() {
        answer.extend(choices.bytes(3));
    }
    let answer = Bytes::from(answer);
    assert_eq!(header::revision_of(&answer), with.map(|header| header.revision));
    let raw = header::raw_header(&answer);
    assert_eq!(raw.as_deref().and_then(header::revision), header::revision_of(&answer));
    let any = Bytes::copy_from_slice(choices.rest());
    let (_, _) = (header::revision_of(&any), header::raw_header(&any));
}

#[test]
fn what_clients_could_write_is_canonical_and_read_alike() {
    for_any_bytes(300, what_is_canonical_by_construction_passes);
}

#[test]
fn odd_bodies_are_refused_or_read_alike() {
    for_any_bytes(300, an_odd_body_is_refused_or_read_alike);
}

#[test]
fn any_bytes_are_refused_or_read_alike() {
    for_any_bytes(60, any_body_is_refused_or_read_alike);
}

#[test]
fn fields_lie_one_after_another() {
    for_any_bytes(60, fields_cover_the_body);
}

#[test]
fn a_header_is_read_as_prost_reads_it() {
    for_any_bytes(80, the_header_is_what_prost_reads);
}

/// Enough of the odd bodies pass, and enough are refused, for both to say something.
#[test]
fn odd_bodies_are_of_both_kinds() {
    let (mut passed, mut refused) = (0_u32, 0_u32);
    for seed in 0..2000_u32 {
        let bytes: Vec<u8> = (0..200_u32)
            .map(|at| {
                (seed.wrapping_mul(2_654_435_761) ^ at.wrapping_mul(0x9e37_79b9))
                    .rotate_left(at)
                    .to_le_bytes()[1]
            })
            .collect();
        let mut choices = Choices::new(&bytes);
        let method = method(&mut choices);
        let body = body(&mut choices, method.body, Style::Odd, DEPTH);
        match canonical::check(method.body, &body) {
            Ok(()) if body.len() > 8 => passed += 1,
            Ok(()) => {}
            Err(_) => refused += 1,
        }
    }
    assert!(passed > 100 && refused > 100, "{passed} passed, {refused} were refused");
}
