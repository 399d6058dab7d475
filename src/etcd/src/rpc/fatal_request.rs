//! Requests that end members of etcd, or split them: a member panics while it answers, every member panics
//! while it applies the request, and again at each restart, or some members apply what others refuse.
//!
//! Owns: the form of each such request, and its refusal. Must not know: members, callers. Invariants: of a
//! request that no known member falls over, nothing is refused; a request refused by a newer etcd is refused
//! in the same words. Bodies come here after `canonical::check`. The sources, and what each request does on
//! each version, are in `docs/etcd-facts.md#fatal`.

use http::uri::Authority;

use super::method::Method;
use super::scan::{WireFields, WireValue};
use super::schema::MessageId;
use super::txn_parts::{TxnPart, TxnParts};
use crate::refusal::Refusal;

/// The longest key of bbolt, the file format of etcd's store, in bytes. etcd stores users and roles by name.
const LONGEST_NAME: usize = 32_768;
/// The largest sort target.
const LAST_SORT_TARGET: i64 = 4;
/// Actions and types of alarms.
const ACTIVATE: i64 = 1;
const LAST_ALARM_ACTION: i64 = 2;
const LAST_ALARM_TYPE: i64 = 2;
/// The depth of Txns inside of Txns read in a Txn that deletes to the end of the store and keeps values.
const DEEPEST_READ: usize = 64;
/// The end of a range without an end.
const NO_END: &[u8] = b"\0";

/// Weaknesses of members in use that newer members do not have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Weaknesses {
    /// Panics over an unknown sort target.
    pub sort_options: bool,
    /// Leaves out the ranges of a Txn that writes where another member answers, and so applies a Txn that the
    /// other member refuses for such a range.
    pub split_txns: bool,
    /// Forgets leases with a negative or the largest id at a restart.
    pub lost_leases: bool,
}

/// The refusal of a request that would end or split members with these weaknesses; `None` for every other
/// request.
#[must_use]
pub fn refusal(method: &Method, message: &[u8], weak: Weaknesses) -> Option<Refusal> {
    match method.body {
        MessageId::RangeRequest if weak.sort_options => {
            has_unknown_sort(message).then_some(Refusal::SORT_OPTION)
        }
        MessageId::TxnRequest => of_txn(message, weak),
        MessageId::LeaseGrantRequest if weak.lost_leases => {
            has_lost_id(message).then(|| Refusal::fatal("a lease with an id that is lost at a restart"))
        }
        MessageId::AlarmRequest => is_unknown_alarm(message).then(|| Refusal::fatal("an unknown alarm")),
        MessageId::MemberUpdateRequest => (!has_peer_urls(message)).then_some(Refusal::MEMBER_URLS),
        MessageId::AuthUserAddRequest | MessageId::AuthRoleAddRequest => {
            let is_too_long = named(message).is_some_and(|name| name.len() > LONGEST_NAME);
            is_too_long.then(|| Refusal::fatal("a name of more than 32768 bytes"))
        }
        MessageId::AuthRoleGrantPermissionRequest => {
            let has_permission = fields(message).any(|(number, _)| number == 2);
            (!has_permission).then_some(Refusal::NO_PERMISSION_GIVEN)
        }
        _ => None,
    }
}

/// The fields of a canonical message.
fn fields(message: &[u8]) -> impl Iterator<Item = (u32, WireValue<'_>)> {
    WireFields::new(message).map_while(Result::ok).map(|field| (field.number, field.value))
}

/// The bytes of field 1.
fn named(message: &[u8]) -> Option<&[u8]> {
    fields(message).find(|(number, _)| *number == 1)?.1.bytes()
}

/// True for a RangeRequest with a sort target outside of etcd's set: etcd before 3.6 sorts by nothing, and
/// panics. By an order outside of the set it does not sort.
fn has_unknown_sort(range: &[u8]) -> bool {
    fields(range).any(|(number, value)| {
        number == 6 && !value.signed().is_some_and(|target| (0..=LAST_SORT_TARGET).contains(&target))
    })
}

/// A Txn with a fatal Range; with a put that keeps the key's value or lease behind a delete of everything
/// from a key at or below it (etcd takes the delete's end `\0` for an empty range when it looks for keys that
/// are changed twice, and the put then finds no key while every member applies the Txn); or with a write and,
/// at the top level, a Range at a revision.
fn of_txn(txn: &[u8], weak: Weaknesses) -> Option<Refusal> {
    let (mut writes, mut reads_at_revision) = (false, false);
    let (mut deletes_open_ended, mut keeps) = (false, false);
    let mut parts = TxnParts::new(txn);
    while let Some(Ok(part)) = parts.next() {
        writes |= matches!(part, TxnPart::Put(_) | TxnPart::DeleteRange(_));
        match part {
            TxnPart::Range(range) if weak.sort_options && has_unknown_sort(range) => {
                return Some(Refusal::SORT_OPTION);
            }
            TxnPart::Range(range) if !parts.is_nested() => reads_at_revision |= is_at_revision(range),
            TxnPart::DeleteRange(delete) => deletes_open_ended |= open_ended(delete).is_some(),
            TxnPart::Put(put) => keeps |= kept_key(put).is_some(),
            _ => {}
        }
    }
    if deletes_open_ended
        && keeps
        && let Err(refusal) = deleted_by(txn, None, 0)
    {
        return Some(refusal);
    }
    (weak.split_txns && writes && reads_at_revision).then_some(Refusal::SPLITTING_TXN)
}

/// The first key that may be deleted to the end of the store after the Txn, of this key before it and of the
/// deletes in either branch.
///
/// # Errors
/// A put keeps the value or lease of a key that was deleted before it on a way through the Txn, or Txns are
/// nested deeper than [`DEEPEST_READ`].
fn deleted_by<'a>(
    txn: &'a [u8],
    before: Option<&'a [u8]>,
    depth: usize,
) -> Result<Option<&'a [u8]>, Refusal> {
    if depth > DEEPEST_READ {
        return Err(Refusal::DUPLICATE_KEY);
    }
    let mut branches = [before; 2];
    for (number, operation) in fields(txn) {
        let deleted = match number {
            2 => &mut branches[0],
            3 => &mut branches[1],
            _ => continue,
        };
        for (kind, message) in fields(operation.bytes().unwrap_or_default()) {
            let message = message.bytes().unwrap_or_default();
            match kind {
                2 if deleted.zip(kept_key(message)).is_some_and(|(from, key)| key >= from) => {
                    return Err(Refusal::DUPLICATE_KEY);
                }
                3 => *deleted = deleted.iter().copied().chain(open_ended(message)).min(),
                4 => *deleted = deleted_by(message, *deleted, depth + 1)?,
                _ => {}
            }
        }
    }
    Ok(branches.into_iter().flatten().min())
}

fn is_at_revision(range: &[u8]) -> bool {
    fields(range).any(|(number, value)| number == 4 && value != WireValue::Varint(0))
}

/// The first key of a DeleteRangeRequest without an end.
fn open_ended(delete: &[u8]) -> Option<&[u8]> {
    let has_no_end = fields(delete).any(|(number, value)| number == 2 && value.bytes() == Some(NO_END));
    has_no_end.then(|| named(delete).unwrap_or_default())
}

/// The key of a PutRequest that keeps the key's value or lease.
fn kept_key(put: &[u8]) -> Option<&[u8]> {
    let keeps = fields(put).any(|(number, value)| matches!(number, 5 | 6) && value != WireValue::Varint(0));
    keeps.then(|| named(put).unwrap_or_default())
}

/// True for a LeaseGrantRequest with an id that etcd 3.5.0 to 3.5.2 does not find at its start.
fn has_lost_id(grant: &[u8]) -> bool {
    fields(grant)
        .any(|(number, value)| number == 2 && !value.signed().is_some_and(|id| (0..i64::MAX).contains(&id)))
}

/// True for an AlarmRequest with an action that etcd does not know, and for the activation of an alarm that
/// etcd does not know.
fn is_unknown_alarm(message: &[u8]) -> bool {
    let number = |wanted| {
        let value = fields(message).find(|(number, _)| *number == wanted);
        value.and_then(|(_, value)| value.signed()).unwrap_or_default()
    };
    let (action, alarm) = (number(1), number(3));
    !(0..=LAST_ALARM_ACTION).contains(&action)
        || action == ACTIVATE && !(1..=LAST_ALARM_TYPE).contains(&alarm)
}

/// True if a MemberUpdateRequest has URLs, and etcd can read each. etcd looks at those of a MemberAdd, and
/// panics over those of a MemberUpdate.
fn has_peer_urls(message: &[u8]) -> bool {
    let mut urls = fields(message).filter(|(number, _)| *number == 2).peekable();
    urls.peek().is_some() && urls.all(|(_, url)| url.bytes().is_some_and(is_peer_url))
}

/// True for `scheme://host:port` of characters that no parser reads in two ways. (etcd's own rule is
/// `types.NewURLs`; it takes a user and a query, too.)
fn is_peer_url(url: &[u8]) -> bool {
    let Ok(url) = std::str::from_utf8(url) else { return false };
    let Some((scheme, host)) = url.trim().split_once("://") else { return false };
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b".-_:[]".contains(&byte);
    matches!(scheme, "http" | "https" | "unix" | "unixs")
        && host.bytes().all(is_plain)
        && host.parse().is_ok_and(|host: Authority| host.port_u16().is_some())
}

#[cfg(test)]
mod tests {
    use prost::Message as _;

    use super::*;
    use crate::pb::authpb::Permission;
    use crate::pb::etcdserverpb::request_op::Request;
    use crate::pb::etcdserverpb::{
        AlarmRequest, AuthRoleAddRequest, AuthRoleGrantPermissionRequest, AuthUserAddRequest,
        DeleteRangeRequest, LeaseGrantRequest, MemberUpdateRequest, PutRequest, RangeRequest, RequestOp,
        TxnRequest,
    };
    use crate::rpc::method::{METHODS, lookup};

    const WEAK: Weaknesses = Weaknesses { sort_options: true, split_txns: true, lost_leases: true };

    fn of(path: &str, message: &impl prost::Message) -> Option<Refusal> {
        refusal(lookup(path).expect("a method"), &message.encode_to_vec(), WEAK)
    }

    fn txn(success: Vec<Request>, failure: Vec<Request>) -> TxnRequest {
        let ops =
            |requests: Vec<_>| requests.into_iter().map(|one| RequestOp { request: Some(one) }).collect();
        TxnRequest { compare: vec![], success: ops(success), failure: ops(failure) }
    }

    const TXN: &str = "/etcdserverpb.KV/Txn";

    #[test]
    fn no_empty_message_is_fatal_but_those_without_what_etcd_needs() {
        let fatal: Vec<_> = METHODS
            .iter()
            .filter(|method| refusal(method, b"", WEAK).is_some())
            .map(|method| method.name)
            .collect();
        assert_eq!(fatal, ["MemberUpdate", "RoleGrantPermission"]);
    }

    #[test]
    fn a_sort_target_is_one_that_etcd_has_at_any_depth() {
        let sorted =
            |sort_order, sort_target| RangeRequest { sort_order, sort_target, ..RangeRequest::default() };
        for order in [-1, 0, 1, 2, 3, i32::MAX] {
            for target in [-1, 0, 1, 2, 3, 4, 5, 9, i32::MIN] {
                let range = sorted(order, target);
                let expected = (!(0..=4).contains(&target)).then_some(Refusal::SORT_OPTION);
                assert_eq!(of("/etcdserverpb.KV/Range", &range), expected, "{order} {target}");
                let inner = txn(vec![], vec![Request::RequestRange(range.clone())]);
                assert_eq!(of(TXN, &inner), expected);
                assert_eq!(of(TXN, &txn(vec![Request::RequestTxn(inner)], vec![])), expected);
                let bytes = range.encode_to_vec();
                let patched = Weaknesses::default();
                assert_eq!(refusal(lookup("/etcdserverpb.KV/Range").unwrap(), &bytes, patched), None);
            }
        }
    }

    #[test]
    fn a_put_that_keeps_something_of_what_was_deleted() {
        let delete = |key: &'static str, end: &'static str| {
            let request = DeleteRangeRequest { key: key.into(), range_end: end.into(), prev_kv: false };
            Request::RequestDeleteRange(request)
        };
        let put = |key: &'static str, ignore_value, ignore_lease| {
            Request::RequestPut(PutRequest {
                key: key.into(),
                ignore_value,
                ignore_lease,
                ..PutRequest::default()
            })
        };
        let nested = |ops| Request::RequestTxn(txn(ops, vec![]));
        let fatal = [
            txn(vec![delete("a", "\0"), put("b", true, false)], vec![]),
            txn(vec![], vec![delete("a", "\0"), put("a", false, true)]),
            txn(vec![delete("c", "\0"), delete("a", "\0"), put("b", true, false)], vec![]),
            txn(vec![nested(vec![delete("", "\0")]), nested(vec![put("b", true, true)])], vec![]),
            txn(
                vec![
                    Request::RequestTxn(txn(vec![delete("a", "\0")], vec![])),
                    Request::RequestTxn(txn(vec![], vec![put("b", true, false)])),
                ],
                vec![],
            ),
            txn(vec![], vec![delete("a", "\0"), nested(vec![put("b", true, false)])]),
        ];
        for txn in fatal {
            assert_eq!(of(TXN, &txn), Some(Refusal::DUPLICATE_KEY), "{txn:?}");
        }
        let served = [
            txn(vec![delete("c", "\0"), put("b", true, false)], vec![]),
            txn(vec![delete("a", "\0"), put("b", false, false)], vec![]),
            txn(vec![put("b", true, false), delete("a", "\0")], vec![]),
            // etcd itself finds these.
            txn(vec![delete("a", "c"), put("b", true, false)], vec![]),
            txn(vec![delete("b", ""), put("b", true, false)], vec![]),
            // One of the branches is executed.
            txn(vec![delete("a", "\0")], vec![put("b", true, false)]),
            txn(vec![Request::RequestTxn(txn(vec![delete("a", "\0")], vec![put("b", true, false)]))], vec![]),
        ];
        for txn in served {
            assert_eq!(of(TXN, &txn), None, "{txn:?}");
        }
    }

    #[test]
    fn a_txn_that_writes_and_reads_at_a_revision_at_its_top_level() {
        let range = |revision| Request::RequestRange(RangeRequest { revision, ..RangeRequest::default() });
        let put = || Request::RequestPut(PutRequest { key: "k".into(), ..PutRequest::default() });
        let nested = |ops| Request::RequestTxn(txn(ops, vec![]));
        let splitting = [
            txn(vec![range(7), put()], vec![]),
            txn(vec![put()], vec![range(-1)]),
            txn(vec![nested(vec![put()])], vec![range(1)]),
            txn(vec![Request::RequestDeleteRange(DeleteRangeRequest::default()), range(1)], vec![]),
        ];
        for txn in splitting {
            assert_eq!(of(TXN, &txn), Some(Refusal::SPLITTING_TXN), "{txn:?}");
            let patched = Weaknesses::default();
            assert_eq!(refusal(lookup(TXN).unwrap(), &txn.encode_to_vec(), patched), None);
        }
        let alike = [
            txn(vec![range(0), put()], vec![]),
            txn(vec![range(7)], vec![range(8)]),
            txn(vec![put(), nested(vec![range(7)])], vec![]),
        ];
        for txn in alike {
            assert_eq!(of(TXN, &txn), None, "{txn:?}");
        }
    }

    #[test]
    fn lease_ids_are_those_that_every_member_finds_again() {
        let grant = |id| of("/etcdserverpb.Lease/LeaseGrant", &LeaseGrantRequest { ttl: 60, id });
        for id in [0, 1, 7, i64::MAX - 1] {
            assert_eq!(grant(id), None, "{id}");
        }
        for id in [-1, i64::MIN, i64::MAX] {
            assert!(grant(id).is_some(), "{id}");
        }
    }

    #[test]
    fn alarms_are_those_that_etcd_has() {
        for action in [-1, 0, 1, 2, 3, 9] {
            for alarm in [-1, 0, 1, 2, 3, 9] {
                let served = matches!((action, alarm), (0 | 2, _) | (1, 1 | 2));
                let request = AlarmRequest { action, member_id: 7, alarm };
                let refused = of("/etcdserverpb.Maintenance/Alarm", &request).is_some();
                assert_eq!(refused, !served, "{action} {alarm}");
            }
        }
    }

    #[test]
    fn peer_urls_are_there_and_readable() {
        let update = |urls: &[&str]| {
            let peer_ur_ls = urls.iter().map(|url| (*url).into()).collect();
            of("/etcdserverpb.Cluster/MemberUpdate", &MemberUpdateRequest { id: 1, peer_ur_ls })
        };
        for good in
            ["http://10.0.0.1:2380", "https://a-b.example_c:1", " https://[::1]:2380 ", "unix://localhost:1"]
        {
            assert_eq!(update(&[good]), None, "{good}");
        }
        let bad = [
            "",
            "http://",
            "http://a",
            "http://a:",
            "http://a:x",
            "http://a:99999",
            "a:2380",
            "ftp://a:1",
            "http://a:1/",
            "http://a:1/p",
            "http://[::1:1",
            "http://u@a:1",
            "http://a:1?q",
            "http://a%zz:1",
            "http://a b:1",
        ];
        for bad in bad {
            assert_eq!(update(&["http://10.0.0.1:2380", bad]), Some(Refusal::MEMBER_URLS), "{bad}");
        }
        assert_eq!(update(&[]), Some(Refusal::MEMBER_URLS));
    }

    #[test]
    fn names_fit_into_the_store_and_a_grant_grants() {
        let name = |length| "n".repeat(length);
        let user = |length| AuthUserAddRequest { name: name(length), ..AuthUserAddRequest::default() };
        assert_eq!(of("/etcdserverpb.Auth/UserAdd", &user(LONGEST_NAME)), None);
        assert!(of("/etcdserverpb.Auth/UserAdd", &user(LONGEST_NAME + 1)).is_some());
        let role = |length| AuthRoleAddRequest { name: name(length) };
        assert_eq!(of("/etcdserverpb.Auth/RoleAdd", &role(LONGEST_NAME)), None);
        assert!(of("/etcdserverpb.Auth/RoleAdd", &role(LONGEST_NAME + 1)).is_some());
        let grant = |perm| AuthRoleGrantPermissionRequest { name: "r".into(), perm };
        let path = "/etcdserverpb.Auth/RoleGrantPermission";
        assert_eq!(of(path, &grant(Some(Permission::default()))), None);
        assert_eq!(of(path, &grant(None)), Some(Refusal::NO_PERMISSION_GIVEN));
    }
}
