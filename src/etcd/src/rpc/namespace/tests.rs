//! Splices beside a reference that decodes, changes the decoded keys, and encodes.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use bytes::{BufMut as _, BytesMut};
use proptest::prelude::*;
use prost::Message as _;
use prost_types::field_descriptor_proto::Type;
use prost_types::{DescriptorProto, FileDescriptorSet};

use super::key_fields::FieldRole;
use super::*;
use crate::pb::etcdserverpb::compare::TargetUnion;
use crate::pb::etcdserverpb::request_op::Request;
use crate::pb::etcdserverpb::response_op::Response;
use crate::pb::etcdserverpb::watch_request::RequestUnion;
use crate::pb::etcdserverpb::{
    Compare, DeleteRangeRequest, DeleteRangeResponse, LeaseKeepAliveRequest, LeaseLeasesResponse,
    LeaseRevokeRequest, LeaseStatus, LeaseTimeToLiveRequest, LeaseTimeToLiveResponse, PutRequest,
    PutResponse, RangeRequest, RangeResponse, RequestOp, ResponseHeader, ResponseOp, TxnRequest, TxnResponse,
    WatchCreateRequest, WatchRequest, WatchResponse,
};
use crate::pb::mvccpb::{Event, KeyValue};
use crate::pb::v3electionpb::{
    CampaignRequest, CampaignResponse, LeaderKey, LeaderRequest, LeaderResponse, ProclaimRequest,
    ResignRequest,
};
use crate::pb::v3lockpb::{LockRequest, LockResponse, UnlockRequest};
use crate::rpc::frame::PREFIX;
use crate::rpc::method::{METHODS, lookup};
use crate::rpc::scan::{WireFields, append_bytes_field};

const MAX: usize = 1 << 20;

fn namespace(prefix: &[u8]) -> Namespace {
    Namespace::new(prefix).expect("a prefix")
}

fn unframed(framed: Bytes) -> Vec<u8> {
    assert_eq!(crate::rpc::frame::unary(&framed).expect("a frame").len() + PREFIX, framed.len());
    framed[PREFIX..].to_vec()
}

fn up(prefix: &[u8], request: MessageId, body: &[u8]) -> Result<Vec<u8>, NamespaceFault> {
    let spliced = namespace(prefix).splice_request(request, body, MAX, LeaseScope::Own)?;
    Ok(spliced.map_or_else(|| body.to_vec(), |spliced| unframed(spliced.framed)))
}

fn down(prefix: &[u8], path: &str, body: &[u8]) -> Result<Vec<u8>, NamespaceFault> {
    let spliced = namespace(prefix).splice_answer(lookup(path).expect("a method"), body)?;
    Ok(spliced.map_or_else(|| body.to_vec(), unframed))
}

/// The reference: keys and ends as clientv3's `prefixInterval` makes them, with the end of a prefix that the
/// store needs.
fn prefixed(prefix: &[u8], key: &[u8], end: &[u8]) -> (Bytes, Bytes) {
    let end = match end {
        b"" => Vec::new(),
        b"\0" => {
            let mut end = prefix.to_vec();
            while end.last() == Some(&0xff) {
                end.pop();
            }
            match end.last_mut() {
                Some(last) => *last += 1,
                None => end.push(0),
            }
            end
        }
        end => [prefix, end].concat(),
    };
    ([prefix, key].concat().into(), end.into())
}

fn reference_range(prefix: &[u8], range: RangeRequest) -> RangeRequest {
    let (key, range_end) = prefixed(prefix, &range.key, &range.range_end);
    RangeRequest { key, range_end, ..range }
}

fn reference_txn(prefix: &[u8], txn: TxnRequest) -> TxnRequest {
    let compare = txn.compare.into_iter().map(|compare| {
        let (key, range_end) = prefixed(prefix, &compare.key, &compare.range_end);
        Compare { key, range_end, ..compare }
    });
    let compare = compare.collect();
    let ops = |ops: Vec<RequestOp>| ops.into_iter().map(|op| reference_op(prefix, op)).collect();
    TxnRequest { compare, success: ops(txn.success), failure: ops(txn.failure) }
}

fn reference_op(prefix: &[u8], op: RequestOp) -> RequestOp {
    let request = op.request.map(|request| match request {
        Request::RequestRange(range) => Request::RequestRange(reference_range(prefix, range)),
        Request::RequestPut(put) => {
            Request::RequestPut(PutRequest { key: prefixed(prefix, &put.key, b"").0, ..put })
        }
        Request::RequestDeleteRange(delete) => {
            let (key, range_end) = prefixed(prefix, &delete.key, &delete.range_end);
            Request::RequestDeleteRange(DeleteRangeRequest { key, range_end, ..delete })
        }
        Request::RequestTxn(txn) => Request::RequestTxn(reference_txn(prefix, txn)),
    });
    RequestOp { request }
}

/// Messages whose unknown fields would be unknown operations.
const OPERATIONS: [&str; 4] = ["TxnRequest", "RequestOp", "ResponseOp", "WatchRequest"];

/// The descriptors of all messages, by name.
static DESCRIBED: LazyLock<BTreeMap<String, DescriptorProto>> = LazyLock::new(|| {
    let set = FileDescriptorSet::decode(crate::pb::DESCRIPTORS).expect("descriptors");
    let files = set.file.into_iter();
    let named = files.flat_map(|file| {
        let package = file.package().to_owned();
        file.message_type.into_iter().map(move |message| (format!(".{package}.{}", message.name()), message))
    });
    named.collect()
});

/// Appends an unknown field with a running number to the message `name` and to every message in it.
fn salted(name: &str, body: &[u8], grains: &mut u32) -> Vec<u8> {
    let message = &DESCRIBED[name];
    let mut out = BytesMut::new();
    for field in WireFields::new(body) {
        let field = field.expect("a field");
        let nested = message.field.iter().find(|known| {
            known.number() == i32::try_from(field.number).expect("small") && known.r#type() == Type::Message
        });
        match nested {
            Some(nested) => {
                let inner = salted(nested.type_name(), field.value.bytes().expect("bytes"), grains);
                append_bytes_field(&mut out, field.number, &inner);
            }
            None => out.put_slice(&body[field.range]),
        }
    }
    if !OPERATIONS.iter().any(|set| name.ends_with(&format!(".{set}"))) {
        *grains += 1;
        append_bytes_field(&mut out, 5000, &grains.to_be_bytes());
    }
    out.to_vec()
}

fn salt(name: &str, body: &[u8]) -> Vec<u8> {
    salted(name, body, &mut 0)
}

const ALPHABET: [u8; 5] = [0, 1, b'a', 0xfe, 0xff];

fn text(length: std::ops::Range<usize>) -> BoxedStrategy<Bytes> {
    prop::collection::vec(prop::sample::select(&ALPHABET[..]), length).prop_map(Bytes::from).boxed()
}

fn range_request() -> impl Strategy<Value = RangeRequest> {
    (text(1..3), text(0..3), any::<i64>(), any::<bool>()).prop_map(|(key, range_end, limit, keys_only)| {
        RangeRequest { key, range_end, limit, keys_only, ..Default::default() }
    })
}

fn txn_request() -> impl Strategy<Value = TxnRequest> {
    let compare = (text(1..3), text(0..3), any::<i64>()).prop_map(|(key, range_end, revision)| Compare {
        key,
        range_end,
        target_union: Some(TargetUnion::ModRevision(revision)),
        ..Default::default()
    });
    let leaf = prop_oneof![
        range_request().prop_map(Request::RequestRange),
        (text(1..3), text(0..3), any::<bool>()).prop_map(|(key, value, prev_kv)| Request::RequestPut(
            PutRequest { key, value, prev_kv, ..Default::default() }
        )),
        (text(1..3), text(0..3), any::<bool>()).prop_map(|(key, range_end, prev_kv)| {
            Request::RequestDeleteRange(DeleteRangeRequest { key, range_end, prev_kv })
        }),
    ];
    let op = |leaf: BoxedStrategy<Request>| leaf.prop_map(|op| RequestOp { request: Some(op) }).boxed();
    let flat = move |ops: BoxedStrategy<RequestOp>| {
        let ops = prop::collection::vec(ops, 0..3);
        (prop::collection::vec(compare.clone(), 0..3), ops.clone(), ops)
            .prop_map(|(compare, success, failure)| TxnRequest { compare, success, failure })
            .boxed()
    };
    let first = flat(op(leaf.clone().boxed()));
    first.prop_recursive(3, 24, 3, move |inner| {
        let nested = prop_oneof![2 => leaf.clone(), 1 => inner.prop_map(Request::RequestTxn)];
        flat(op(nested.boxed()))
    })
}

fn key_value() -> impl Strategy<Value = KeyValue> {
    (text(0..3), text(0..3), any::<i64>()).prop_map(|(key, value, mod_revision)| KeyValue {
        key,
        value,
        mod_revision,
        ..Default::default()
    })
}

/// Keys of an answer with the prefix put before them, as a member sends them.
fn of_member(prefix: &[u8], kv: &KeyValue) -> KeyValue {
    KeyValue { key: prefixed(prefix, &kv.key, b"").0, ..kv.clone() }
}

fn txn_response(kvs: &[KeyValue], depth: usize) -> TxnResponse {
    let op = |response| ResponseOp { response: Some(response) };
    let mut responses = vec![
        op(Response::ResponseRange(RangeResponse { kvs: kvs.to_vec(), count: 9, ..Default::default() })),
        op(Response::ResponsePut(PutResponse { prev_kv: kvs.first().cloned(), ..Default::default() })),
        op(Response::ResponseDeleteRange(DeleteRangeResponse {
            deleted: 2,
            prev_kvs: kvs.to_vec(),
            ..Default::default()
        })),
    ];
    if depth > 0 {
        responses.push(op(Response::ResponseTxn(txn_response(kvs, depth - 1))));
    }
    let header = Some(ResponseHeader { revision: 7, ..Default::default() });
    TxnResponse { header, succeeded: true, responses }
}

proptest! {
    #[test]
    fn a_range_is_the_reference_and_all_else_stays(prefix in text(1..4), range in range_request()) {
        let name = ".etcdserverpb.RangeRequest";
        let sent = salt(name, &range.encode_to_vec());
        let expected = salt(name, &reference_range(&prefix, range).encode_to_vec());
        prop_assert_eq!(up(&prefix, MessageId::RangeRequest, &sent), Ok(expected));
    }

    #[test]
    fn a_txn_is_the_reference_and_all_else_stays(prefix in text(1..4), txn in txn_request()) {
        let name = ".etcdserverpb.TxnRequest";
        let sent = salt(name, &txn.encode_to_vec());
        let expected = salt(name, &reference_txn(&prefix, txn).encode_to_vec());
        prop_assert_eq!(up(&prefix, MessageId::TxnRequest, &sent), Ok(expected));
    }

    /// Every message of an answer is as if the store held the short keys.
    #[test]
    fn an_answer_loses_the_prefix_and_nothing_else(
        prefix in text(1..4), kvs in prop::collection::vec(key_value(), 1..4), depth in 0usize..4,
    ) {
        let long: Vec<_> = kvs.iter().map(|kv| of_member(&prefix, kv)).collect();
        let check = |path: &str, name: &str, sent: Vec<u8>, shown: Vec<u8>| {
            prop_assert_eq!(down(&prefix, path, &salt(name, &sent)), Ok(salt_of_shown(name, &shown)));
            Ok(())
        };
        let (sent, shown) = (txn_response(&long, depth), txn_response(&kvs, depth));
        check("/etcdserverpb.KV/Txn", ".etcdserverpb.TxnResponse", sent.encode_to_vec(), shown.encode_to_vec())?;
        let watched = |kvs: &[KeyValue]| WatchResponse {
            watch_id: 3,
            events: kvs.iter().map(|kv| Event { kv: Some(kv.clone()), prev_kv: Some(kv.clone()), r#type: 1 })
                .collect(),
            ..Default::default()
        };
        check(
            "/etcdserverpb.Watch/Watch",
            ".etcdserverpb.WatchResponse",
            watched(&long).encode_to_vec(),
            watched(&kvs).encode_to_vec(),
        )?;
        let leader = |kv: &KeyValue| LeaderResponse { kv: Some(kv.clone()), ..Default::default() };
        check(
            "/v3electionpb.Election/Observe",
            ".v3electionpb.LeaderResponse",
            leader(&long[0]).encode_to_vec(),
            leader(&kvs[0]).encode_to_vec(),
        )?;
    }

    /// An answer with one key outside shows nothing, wherever the key stands.
    #[test]
    fn a_key_outside_is_a_fault(prefix in text(1..4), key in text(0..4), depth in 0usize..3) {
        prop_assume!(!key.starts_with(&prefix));
        let kv = KeyValue { key, value: "foreign".into(), ..Default::default() };
        let answer = txn_response(&[kv], depth).encode_to_vec();
        prop_assert_eq!(down(&prefix, "/etcdserverpb.KV/Txn", &answer), Err(NamespaceFault::Outside));
    }

    /// A range in a namespace contains the keys that the same range contains in a store of its own.
    #[test]
    fn a_range_finds_what_it_finds_in_a_store_of_its_own(
        prefix in text(1..4), key in text(1..3), end in text(0..3), keys in prop::collection::vec(text(1..6), 1..40),
    ) {
        let request = RangeRequest { key: key.clone(), range_end: end.clone(), ..Default::default() };
        let spliced = up(&prefix, MessageId::RangeRequest, &request.encode_to_vec()).unwrap();
        let spliced = RangeRequest::decode(&spliced[..]).unwrap();
        let found = |key: &[u8], end: &[u8], wanted: &[u8]| match end {
            b"" => wanted == key,
            b"\0" => wanted >= key,
            end => key <= wanted && wanted < end,
        };
        let namespace = namespace(&prefix);
        prop_assert!(namespace.contains(&KeyRange::of(&spliced.key, &spliced.range_end)));
        for short in &keys {
            let long = [&prefix[..], short].concat();
            let in_namespace = found(&spliced.key, &spliced.range_end, &long);
            prop_assert_eq!(in_namespace, found(&key, &end, short), "{:?}", short);
            // The same bytes as a key of the whole store.
            let is_inside = short.starts_with(&prefix);
            prop_assert!(is_inside || !found(&spliced.key, &spliced.range_end, short), "{:?} leaks", short);
        }
    }

    #[test]
    fn any_bytes_are_a_splice_or_a_fault(prefix in text(1..4), body: Vec<u8>, method in 0..METHODS.len()) {
        let (namespace, method) = (namespace(&prefix), &METHODS[method]);
        let request = namespace.splice_request(method.body, &body, 64, LeaseScope::Own);
        let request = request.map(|spliced| spliced.map(|spliced| spliced.framed));
        for spliced in [request, namespace.splice_answer(method, &body)] {
            if let Ok(Some(framed)) = spliced {
                prop_assert!(crate::rpc::frame::unary(&framed).is_ok());
            }
        }
    }
}

/// The salt of the shown answer: prost leaves out an empty key, and the splice writes an empty field.
fn salt_of_shown(name: &str, body: &[u8]) -> Vec<u8> {
    with_empty_keys(name, &salt(name, body))
}

fn with_empty_keys(name: &str, body: &[u8]) -> Vec<u8> {
    let message = &DESCRIBED[name];
    let mut out = BytesMut::new();
    let has_key = WireFields::new(body).any(|field| field.expect("a field").number == 1);
    if name == ".mvccpb.KeyValue" && !has_key {
        append_bytes_field(&mut out, 1, b"");
    }
    for field in WireFields::new(body) {
        let field = field.expect("a field");
        let nested = message.field.iter().find(|known| {
            known.number() == i32::try_from(field.number).expect("small") && known.r#type() == Type::Message
        });
        match nested {
            Some(nested) => {
                let inner = with_empty_keys(nested.type_name(), field.value.bytes().expect("bytes"));
                append_bytes_field(&mut out, field.number, &inner);
            }
            None => out.put_slice(&body[field.range]),
        }
    }
    out.to_vec()
}

fn in_tenant<M: prost::Message + Default>(request: MessageId, message: &M) -> M {
    let spliced = up(b"t/", request, &message.encode_to_vec()).expect("spliced");
    M::decode(&spliced[..]).expect("a message")
}

fn shown<M: prost::Message + Default>(path: &str, message: &M) -> M {
    M::decode(&down(b"t/", path, &message.encode_to_vec()).expect("spliced")[..]).expect("a message")
}

#[test]
fn an_empty_key_is_refused_and_never_the_prefix_itself() {
    let refused = Err(NamespaceFault::EmptyKey);
    let to_end = RangeRequest { range_end: "\0".into(), ..Default::default() };
    assert_eq!(up(b"t/", MessageId::RangeRequest, b""), refused);
    assert_eq!(up(b"t/", MessageId::RangeRequest, b"\x0a\x00"), refused);
    assert_eq!(up(b"t/", MessageId::RangeRequest, &to_end.encode_to_vec()), refused);
    for request in [MessageId::PutRequest, MessageId::DeleteRangeRequest, MessageId::UnlockRequest] {
        assert_eq!(up(b"t/", request, b""), refused, "{request:?}");
    }
    let op = RequestOp { request: Some(Request::RequestRange(RangeRequest::default())) };
    for txn in [
        TxnRequest { compare: vec![Compare::default()], ..Default::default() },
        TxnRequest { failure: vec![op], ..Default::default() },
    ] {
        assert_eq!(up(b"t/", MessageId::TxnRequest, &txn.encode_to_vec()), refused);
    }
    let leaderless = ProclaimRequest { leader: Some(LeaderKey::default()), ..Default::default() };
    assert_eq!(up(b"t/", MessageId::ProclaimRequest, &leaderless.encode_to_vec()), refused);
    assert_eq!(up(b"t/", MessageId::ProclaimRequest, b""), Ok(Vec::new()), "etcd refuses a missing leader");
    assert_eq!(Namespace::new(b""), None);
}

#[test]
fn the_whole_keyspace_is_the_namespace() {
    let all = RangeRequest { key: "\0".into(), range_end: "\0".into(), ..Default::default() };
    let end_of = |prefix: &[u8]| {
        let spliced = up(prefix, MessageId::RangeRequest, &all.encode_to_vec()).unwrap();
        RangeRequest::decode(&spliced[..]).unwrap().range_end
    };
    assert_eq!(end_of(b"t/"), "t0");
    assert_eq!(end_of(b"a\xff"), "b", "clientv3's package would take b\\0, and show the key b");
    assert_eq!(end_of(b"\xff\xff"), "\0");
    let whole = namespace(b"\xff\xff");
    assert!(whole.contains(&KeyRange::of(b"\xff\xff\x01", b"\0")));
    assert!(!whole.contains(&KeyRange::of(b"\xff", b"\0")));
    assert!(!namespace(b"t/").contains(&KeyRange::of(b"t/a", b"\0")));
    assert!(!namespace(b"t/").contains(&KeyRange::of(b"t/a", b"t1")));
    assert!(!namespace(b"t/").contains(&KeyRange::ALL));
}

#[test]
fn a_watch_of_the_empty_key_begins_at_the_first_key_of_the_namespace() {
    let create = |key: &'static str, range_end: &'static str| WatchRequest {
        request_union: Some(RequestUnion::CreateRequest(WatchCreateRequest {
            key: key.into(),
            range_end: range_end.into(),
            start_revision: 5,
            ..Default::default()
        })),
    };
    let spliced = |key, end| match in_tenant(MessageId::WatchRequest, &create(key, end)).request_union {
        Some(RequestUnion::CreateRequest(create)) => {
            assert_eq!(create.start_revision, 5);
            (create.key, create.range_end)
        }
        other => panic!("{other:?}"),
    };
    assert_eq!(spliced("", ""), ("t/\0".into(), "".into()));
    assert_eq!(spliced("", "\0"), ("t/\0".into(), "t0".into()));
    assert_eq!(spliced("k", "\0"), ("t/k".into(), "t0".into()));
    assert_eq!(spliced("k", "l"), ("t/k".into(), "t/l".into()));
    let cancel = WatchRequest { request_union: Some(RequestUnion::CancelRequest(Default::default())) };
    assert_eq!(in_tenant(MessageId::WatchRequest, &cancel), cancel);
}

#[test]
fn an_unknown_operation_is_refused() {
    let unknown = Err(NamespaceFault::UnknownOperation);
    assert_eq!(up(b"t/", MessageId::TxnRequest, b"\x22\x00"), unknown);
    assert_eq!(up(b"t/", MessageId::TxnRequest, b"\x12\x02\x2a\x00"), unknown);
    assert_eq!(up(b"t/", MessageId::WatchRequest, b"\x22\x00"), unknown);
    assert_eq!(down(b"t/", "/etcdserverpb.KV/Txn", b"\x1a\x02\x2a\x00"), unknown);
}

#[test]
fn locks_and_elections_have_their_names_and_keys_in_the_namespace() {
    let lease = namespace(b"t/").draw_lease().expect("random bytes");
    let lock = LockRequest { name: "n".into(), lease };
    assert_eq!(in_tenant(MessageId::LockRequest, &lock), LockRequest { name: "t/n".into(), lease });
    assert_eq!(in_tenant(MessageId::LockRequest, &LockRequest::default()).name, "t/", "the queue is /");
    assert_eq!(in_tenant(MessageId::UnlockRequest, &UnlockRequest { key: "n/7".into() }).key, "t/n/7");
    let campaign = CampaignRequest { name: "e".into(), lease, value: "v".into() };
    assert_eq!(
        in_tenant(MessageId::CampaignRequest, &campaign),
        CampaignRequest { name: "t/e".into(), ..campaign }
    );
    assert_eq!(in_tenant(MessageId::LeaderRequest, &LeaderRequest { name: "e".into() }).name, "t/e");
    let own = LeaderKey { name: "e".into(), key: "e/7".into(), rev: 3, lease };
    let real = LeaderKey { name: "t/e".into(), key: "t/e/7".into(), ..own.clone() };
    let proclaim = ProclaimRequest { leader: Some(own.clone()), value: "v".into() };
    assert_eq!(in_tenant(MessageId::ProclaimRequest, &proclaim).leader, Some(real.clone()));
    let resign = ResignRequest { leader: Some(own.clone()) };
    assert_eq!(in_tenant(MessageId::ResignRequest, &resign).leader, Some(real.clone()));
    let campaigned = CampaignResponse { header: None, leader: Some(real) };
    assert_eq!(shown("/v3electionpb.Election/Campaign", &campaigned).leader, Some(own));
    let locked = LockResponse { header: None, key: "t/n/7".into() };
    assert_eq!(shown("/v3lockpb.Lock/Lock", &locked).key, "n/7");
}

#[test]
fn the_keys_of_a_lease_are_those_of_the_namespace() {
    let keys = ["t/a", "u/b", "t", "t/", "t/c"].map(|key| key.into()).to_vec();
    let told = LeaseTimeToLiveResponse { id: 7, ttl: 5, granted_ttl: 9, keys, ..Default::default() };
    let told = shown("/etcdserverpb.Lease/LeaseTimeToLive", &told);
    assert_eq!((told.id, told.ttl, told.granted_ttl), (7, 5, 9));
    assert_eq!(told.keys, ["a", "", "c"]);
}

#[test]
fn many_small_keys_are_refused_before_their_prefixes_take_much_memory() {
    let compare = Compare { key: "k".into(), ..Default::default() };
    let txn = TxnRequest { compare: vec![compare; 1000], ..Default::default() }.encode_to_vec();
    let long = namespace(&[b'x'; 100]);
    let splice = |max| long.splice_request(MessageId::TxnRequest, &txn, max, LeaseScope::Own);
    let refused = splice(50_000);
    assert!(matches!(refused, Err(NamespaceFault::TooLarge(got)) if got < 50_200), "{refused:?}");
    assert!(splice(200_000).is_ok());
}

/// As deep as a body may be: neither the stack nor the time limits the splice.
#[test]
fn a_deep_txn_is_spliced_in_linear_time() {
    let mut txn =
        TxnRequest { compare: vec![Compare { key: "k".into(), ..Default::default() }], ..Default::default() };
    for _ in 1..90 {
        txn = TxnRequest {
            success: vec![RequestOp { request: Some(Request::RequestTxn(txn)) }],
            ..Default::default()
        };
    }
    let mut body = txn.encode_to_vec();
    let expected = reference_txn(b"t/", txn).encode_to_vec();
    assert_eq!(up(b"t/", MessageId::TxnRequest, &body), Ok(expected));
    for _ in 0..20_000 {
        let mut op = BytesMut::new();
        append_bytes_field(&mut op, 4, &[]);
        let mut outer = BytesMut::with_capacity(body.len() + 16);
        if body.len() > 1 << 16 {
            break;
        }
        let mut nested = BytesMut::new();
        append_bytes_field(&mut nested, 4, &body);
        append_bytes_field(&mut outer, 2, &nested);
        body = outer.to_vec();
    }
    assert!(up(b"t/", MessageId::TxnRequest, &body).is_ok());
}

/// A method with keys or a lease that is missing in the table would pass both as they are. The id of a
/// LeaseGrant is drawn.
#[test]
fn every_request_with_keys_or_a_lease_is_in_the_table() {
    let has_keys = |request: MessageId| {
        let message = &DESCRIBED[&format!(".{}", request.message().name)];
        message.field.iter().any(|field| {
            let keyed = ["key", "range_end", "name", "leader", "compare", "create_request"];
            keyed.contains(&field.name()) && field.r#type() != Type::String
                || message.name().starts_with("Lease") && request != MessageId::LeaseGrantRequest
        })
    };
    let mut count = 0;
    for method in METHODS.iter().filter(|method| !matches!(method.service, "etcdserverpb.Auth")) {
        let spliced = KeyedMessage::of_request(method.body).is_some();
        assert_eq!(spliced, has_keys(method.body), "{}", method.path);
        count += usize::from(spliced);
    }
    assert_eq!(count, 16);
}

/// Every field of etcd's requests that is a lease by its name or message has that role.
#[test]
fn every_field_with_a_lease_is_in_the_table() {
    let mut found = Vec::new();
    let mut visit = vec![];
    for method in METHODS {
        visit.extend(
            KeyedMessage::of_request(method.body).map(|kind| (kind, method.body.message().name.to_owned())),
        );
    }
    let mut seen = std::collections::BTreeSet::new();
    while let Some((kind, name)) = visit.pop() {
        if !seen.insert(name.clone()) {
            continue;
        }
        let message = &DESCRIBED[&format!(".{name}")];
        for field in &message.field {
            let number = u32::try_from(field.number()).expect("small");
            let is_lease = field.name() == "lease" || field.name() == "ID";
            let role = kind.role(number);
            // A compare reads the lease of a key of the namespace.
            if !name.ends_with(".Compare") {
                assert_eq!(is_lease, role == FieldRole::Lease, "{name}.{}", field.name());
            }
            if is_lease {
                found.push(format!("{}.{}", message.name(), field.name()));
            }
            if let FieldRole::Message(nested) = role {
                visit.push((nested, field.type_name()[1..].to_owned()));
            }
        }
    }
    found.sort();
    let leases = ["CampaignRequest.lease", "Compare.lease", "LeaderKey.lease", "LeaseKeepAliveRequest.ID"];
    let more =
        ["LeaseRevokeRequest.ID", "LeaseTimeToLiveRequest.ID", "LockRequest.lease", "PutRequest.lease"];
    assert_eq!(found, [leases, more].concat());
}

fn spliced_lease<M: prost::Message + Default>(
    request: MessageId,
    message: &M,
    scope: LeaseScope,
) -> (M, Option<i64>) {
    let spliced = namespace(b"t/").splice_request(request, &message.encode_to_vec(), MAX, scope);
    let spliced = spliced.expect("spliced").expect("with keys or a lease");
    (M::decode(&unframed(spliced.framed)[..]).expect("a message"), spliced.foreign_lease)
}

/// A request with a lease as it is sent, where leases of others count and where they do not.
fn check_lease<M: prost::Message + Default + PartialEq + std::fmt::Debug>(
    request: MessageId,
    named: M,
    sent: M,
    foreign: Option<i64>,
    without_prefix: impl Fn(M) -> M,
) {
    let (found, told) = spliced_lease(request, &named, LeaseScope::Own);
    assert_eq!((without_prefix(found), told), (sent, foreign), "{request:?}");
    let (found, told) = spliced_lease(request, &named, LeaseScope::Any);
    assert_eq!((without_prefix(found), told), (named, foreign), "{request:?}, of any namespace");
}

/// Wherever a request names a lease, etcd finds a lease of the namespace, or none.
#[test]
fn a_foreign_lease_is_no_lease_in_every_request() {
    let (own, other) = (namespace(b"t/"), namespace(b"u/"));
    let [mine, theirs] = [&own, &other].map(|namespace| namespace.draw_lease().expect("random bytes"));
    let revoke = |id| LeaseRevokeRequest { id };
    let renew = |id| LeaseKeepAliveRequest { id };
    let time = |id| LeaseTimeToLiveRequest { id, keys: true };
    let put = |lease| PutRequest { key: "k".into(), lease, prev_kv: true, ..Default::default() };
    let lock = |lease| LockRequest { name: "n".into(), lease };
    let campaign = |lease| CampaignRequest { name: "n".into(), lease, value: "v".into() };
    let leader = |lease| Some(LeaderKey { name: "n".into(), key: "n/1".into(), rev: 3, lease });
    let proclaim = |lease| ProclaimRequest { leader: leader(lease), value: "v".into() };
    let resign = |lease| ResignRequest { leader: leader(lease) };
    let op = |request| RequestOp { request: Some(request) };
    let txn = |lease| {
        let inner = TxnRequest {
            success: vec![op(Request::RequestPut(put(mine)))],
            failure: vec![
                op(Request::RequestPut(put(lease))),
                op(Request::RequestRange(RangeRequest { key: "k".into(), ..Default::default() })),
            ],
            ..Default::default()
        };
        TxnRequest {
            success: vec![op(Request::RequestPut(put(lease)))],
            failure: vec![op(Request::RequestTxn(inner)), op(Request::RequestPut(put(0)))],
            ..Default::default()
        }
    };
    for (named, sent, foreign) in [
        (mine, mine, None),
        (0, 0, None),
        (theirs, own.lease_bits(), Some(theirs)),
        (7, own.lease_bits(), Some(7)),
        (-7, own.lease_bits(), Some(-7)),
        (own.lease_bits(), own.lease_bits(), Some(own.lease_bits())),
    ] {
        let short = |key: &Bytes| key.strip_prefix(b"t/").map(Bytes::copy_from_slice).expect("the prefix");
        let short_leader = move |leader: Option<LeaderKey>| {
            leader.map(|leader| LeaderKey { name: short(&leader.name), key: short(&leader.key), ..leader })
        };
        check_lease(MessageId::LeaseRevokeRequest, revoke(named), revoke(sent), foreign, |same| same);
        check_lease(MessageId::LeaseKeepAliveRequest, renew(named), renew(sent), foreign, |same| same);
        check_lease(MessageId::LeaseTimeToLiveRequest, time(named), time(sent), foreign, |same| same);
        check_lease(MessageId::PutRequest, put(named), put(sent), foreign, |put| PutRequest {
            key: short(&put.key),
            ..put
        });
        check_lease(MessageId::LockRequest, lock(named), lock(sent), foreign, |lock| LockRequest {
            name: short(&lock.name),
            ..lock
        });
        check_lease(MessageId::CampaignRequest, campaign(named), campaign(sent), foreign, |run| {
            CampaignRequest { name: short(&run.name), ..run }
        });
        check_lease(MessageId::ProclaimRequest, proclaim(named), proclaim(sent), foreign, |all| {
            ProclaimRequest { leader: short_leader(all.leader), ..all }
        });
        check_lease(MessageId::ResignRequest, resign(named), resign(sent), foreign, |all| ResignRequest {
            leader: short_leader(all.leader),
        });
        // The keys are those of the reference.
        let (found, told) = spliced_lease(MessageId::TxnRequest, &txn(named), LeaseScope::Own);
        assert_eq!((found, told), (reference_txn(b"t/", txn(sent)), foreign));
    }
}

#[test]
fn a_list_of_leases_has_those_of_the_namespace() {
    let own = namespace(b"t/");
    let [first, second] = [0, 1].map(|_| own.draw_lease().expect("random bytes"));
    let foreign = namespace(b"u/").draw_lease().expect("random bytes");
    let list = |ids: &[i64]| LeaseLeasesResponse {
        header: Some(ResponseHeader { revision: 7, ..Default::default() }),
        leases: ids.iter().map(|id| LeaseStatus { id: *id }).collect(),
    };
    let path = "/etcdserverpb.Lease/LeaseLeases";
    assert_eq!(shown(path, &list(&[first, foreign, 0, 7, second, own.lease_bits()])), list(&[first, second]));
    assert_eq!(shown(path, &list(&[])), list(&[]));
}
