//! Txns: walked to their depth and no further, however they lie in one another and however many ops they have.

use keyward::rpc::body_shape;
use keyward::rpc::canonical::{self, MAX_TXN_DEPTH};
use keyward::rpc::schema::MessageId;

use crate::bodies::put_bytes;
use crate::choices::{Choices, for_any_bytes};

/// The parts of a Txn on the wire.
const RANGE: &[u8] = b"\x0a\x03\x0a\x01a";
const PUT: &[u8] = b"\x12\x03\x0a\x01a";
const DELETE: &[u8] = b"\x1a\x03\x0a\x01a";

/// A Txn of that depth, itself counted, and whether it writes: each has its next one in either branch, among others.
fn chain(choices: &mut Choices<'_>, depth: usize) -> (Vec<u8>, bool) {
    let (mut txn, mut writes) = (Vec::new(), false);
    for level in 0..depth {
        let mut outer = Vec::new();
        let place = choices.below(4);
        for at in 0..=place {
            let branch = if choices.flag() { 2 } else { 3 };
            if at == place && level > 0 {
                let mut op = Vec::new();
                put_bytes(4, &txn, &mut op);
                put_bytes(branch, &op, &mut outer);
                continue;
            }
            let op = match choices.below(24) {
                22 => PUT,
                23 => DELETE,
                _ => RANGE,
            };
            writes |= op != RANGE;
            put_bytes(branch, op, &mut outer);
        }
        txn = outer;
    }
    (txn, writes)
}

fn txns_are_walked_to_their_depth(input: &[u8]) {
    let mut choices = Choices::new(input);
    let depth = match choices.below(40) {
        // Around the border, where a test costs the most.
        39 => MAX_TXN_DEPTH - 1 + choices.below(3),
        depth => 1 + depth,
    };
    let (txn, writes) = chain(&mut choices, depth);
    let checked = canonical::check(MessageId::TxnRequest, &txn);
    assert_eq!(checked.is_ok(), depth <= MAX_TXN_DEPTH, "{depth} deep: {checked:?}");
    assert_eq!(body_shape::txn_is_read_only(&txn), depth <= MAX_TXN_DEPTH && !writes, "{depth} deep");
}

#[test]
fn a_txn_is_walked_to_its_depth_wherever_it_lies() {
    for_any_bytes(200, txns_are_walked_to_their_depth);
}

#[test]
fn the_border_is_exact() {
    for depth in [MAX_TXN_DEPTH, MAX_TXN_DEPTH + 1] {
        let (txn, _) = chain(&mut Choices::new(b""), depth);
        assert_eq!(canonical::check(MessageId::TxnRequest, &txn).is_ok(), depth == MAX_TXN_DEPTH);
        assert_eq!(body_shape::txn_is_read_only(&txn), depth == MAX_TXN_DEPTH);
    }
}

/// Half a million ops, at the top and at the bottom of the deepest Txn. A walk that is not linear does not end.
#[test]
fn many_ops_are_walked_once() {
    const OPS: usize = 500_000;
    for depth in [1, MAX_TXN_DEPTH] {
        let mut txn = Vec::with_capacity(OPS * 10);
        for at in 0..OPS {
            put_bytes(2 + (at as u64 & 1), RANGE, &mut txn);
        }
        for _ in 1..depth {
            let (mut op, mut outer) = (Vec::new(), Vec::new());
            put_bytes(4, &txn, &mut op);
            put_bytes(3, &op, &mut outer);
            txn = outer;
        }
        assert_eq!(canonical::check(MessageId::TxnRequest, &txn), Ok(()));
        assert!(body_shape::txn_is_read_only(&txn));
    }
}

/// A Txn around a Txn, a hundred thousand times: refused at the border, not by a stack that ends. The deepest that passes
/// is walked on a stack far smaller than any thread's.
#[test]
fn the_deepest_nesting_costs_no_stack() {
    for (depth, passes) in [(MAX_TXN_DEPTH, true), (MAX_TXN_DEPTH + 1, false), (100_000, false)] {
        let txn = nested(depth);
        let walk =
            move || (canonical::check(MessageId::TxnRequest, &txn), body_shape::txn_is_read_only(&txn));
        let small = std::thread::Builder::new().stack_size(32 * 1024).spawn(walk).expect("a thread");
        let (checked, is_read_only) = small.join().expect("no panic");
        assert_eq!((checked.is_ok(), is_read_only), (passes, passes), "{depth} deep: {checked:?}");
    }
}

/// Written from the inside, back to front, or it would take quadratic time to build.
fn nested(depth: usize) -> Vec<u8> {
    let (mut reversed, mut length) = (Vec::new(), 0_u64);
    for _ in 1..depth {
        for tag in [4 << 3 | 2, 2 << 3 | 2] {
            let mut prefix = vec![tag];
            crate::bodies::put_varint(length, &mut prefix);
            length += prefix.len() as u64;
            reversed.extend(prefix.iter().rev());
        }
    }
    reversed.reverse();
    reversed
}
