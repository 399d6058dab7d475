//! The bytes that wait to be sent on one connection.
//!
//! Owns: a connection's buffer, and one large buffer per thread, which the thread's connections take in turn.
//! A large buffer lent out again a moment later is still in the processor's caches, and needs neither pages
//! from the kernel nor copies while growing. Must not know: sockets, the bytes' meaning.
//! Invariant: an empty buffer occupies at most `KEEP` bytes, and a thread's spare at most `LARGE`.

use std::cell::Cell;

/// The largest buffer that an idle connection keeps.
const KEEP: usize = 16 * 1024;

/// Buffered bytes at which writers must wait. A busy connection with large values sends so many bytes with
/// one system call, and each call may wake the peer's process: with half as many bytes, a call with a value
/// of 64 KiB costs a tenth more CPU time. Small compared with the socket's own buffer.
pub(super) const HIGH_WATER: usize = 256 * 1024;

/// The size of a large buffer. While a slow peer takes few bytes at a time, the unsent bytes are moved to the
/// buffer's front after each [`LARGE`] - [`HIGH_WATER`] bytes.
const LARGE: usize = HIGH_WATER + 64 * 1024;

thread_local! {
    /// A large buffer that no connection of the thread uses now; without capacity if there is none.
    static SPARE: Cell<Vec<u8>> = const { Cell::new(Vec::new()) };
}

/// The unsent bytes of one connection.
#[derive(Default)]
pub struct WriteBuffer {
    bytes: Vec<u8>,
    /// Bytes at the front of `bytes` that were sent already.
    sent: usize,
}

impl WriteBuffer {
    pub(super) fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.unsent().len()
    }

    /// The bytes that wait.
    #[must_use]
    pub fn unsent(&self) -> &[u8] {
        self.bytes.get(self.sent..).unwrap_or_default()
    }

    /// Adds bytes behind those that wait.
    pub fn append(&mut self, bytes: &[u8]) {
        if self.bytes.capacity() - self.bytes.len() < bytes.len() {
            self.make_room(bytes.len());
        }
        self.bytes.extend_from_slice(bytes);
    }

    /// Removes the first `count` bytes. The last byte's removal frees a large buffer.
    pub(super) fn advance(&mut self, count: usize) {
        self.sent += count;
        if self.sent >= self.bytes.len() {
            self.clear();
        }
    }

    /// Discards all bytes.
    pub(super) fn clear(&mut self) {
        self.sent = 0;
        self.bytes.clear();
        if self.bytes.capacity() > KEEP {
            release(std::mem::take(&mut self.bytes));
        }
    }

    fn make_room(&mut self, more: usize) {
        self.bytes.drain(..self.sent);
        self.sent = 0;
        let needed = self.bytes.len() + more;
        if needed <= KEEP {
            // Not by `reserve`: it doubles the capacity, which from 10 KiB on leads past `KEEP`.
            let capacity = needed.next_power_of_two();
            self.bytes.reserve_exact(capacity - self.bytes.len());
        } else if needed > LARGE {
            self.bytes.reserve(more);
        } else if self.bytes.capacity() < needed {
            let mut large = SPARE.try_with(Cell::take).unwrap_or_default();
            large.reserve_exact(LARGE);
            large.extend_from_slice(&self.bytes);
            release(std::mem::replace(&mut self.bytes, large));
        }
    }
}

impl Drop for WriteBuffer {
    fn drop(&mut self) {
        self.clear();
    }
}

/// Keeps a large buffer as the thread's spare, and frees any other buffer.
fn release(mut bytes: Vec<u8>) {
    if bytes.capacity() == LARGE {
        bytes.clear();
        // During the thread's end there is no spare any more.
        SPARE.try_with(|spare| spare.set(bytes)).ok();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spare() -> usize {
        let spare = SPARE.take();
        let capacity = spare.capacity();
        SPARE.set(spare);
        capacity
    }

    #[test]
    fn bytes_leave_in_their_order_through_every_size_of_buffer() {
        let (mut buffer, mut expected, mut seen) = (WriteBuffer::default(), Vec::new(), Vec::new());
        let mut next = 0u8;
        for (write, send) in
            [(9, 4), (5000, 1), (20_000, 16_000), (200_000, 7), (1, 150_000), (90_000, 10), (300_000, 1)]
        {
            let bytes: Vec<u8> =
                std::iter::repeat_with(|| (next = next.wrapping_add(1), next).1).take(write).collect();
            expected.extend_from_slice(&bytes);
            buffer.append(&bytes);
            seen.extend_from_slice(&buffer.unsent()[..send]);
            buffer.advance(send);
            assert_eq!(seen.len() + buffer.len(), expected.len());
        }
        seen.extend_from_slice(buffer.unsent());
        buffer.advance(buffer.len());
        assert!(buffer.is_empty() && seen == expected);
    }

    #[test]
    fn an_empty_buffer_is_small_however_full_it_was() {
        let mut buffer = WriteBuffer::default();
        for length in [KEEP, KEEP + 1, HIGH_WATER, LARGE, LARGE + 1, 3 * LARGE] {
            for first in [1, length - 1, length] {
                buffer.append(&vec![1; length]);
                buffer.advance(first);
                buffer.advance(buffer.len());
                assert!(buffer.bytes.capacity() <= KEEP, "{length} bytes, {first} sent first");
            }
        }
        assert_eq!(spare(), LARGE);
    }

    #[test]
    fn a_connection_keeps_its_small_buffer() {
        let mut buffer = WriteBuffer::default();
        for length in [1, 100, 10_000, 12_000, KEEP] {
            buffer.append(&vec![1; length]);
            let place = buffer.bytes.as_ptr();
            buffer.advance(length);
            assert!((length..=KEEP).contains(&buffer.bytes.capacity()), "{length} bytes");
            buffer.append(&vec![2; length]);
            assert_eq!(buffer.bytes.as_ptr(), place, "{length} bytes");
            buffer.advance(length);
        }
    }

    #[test]
    fn the_buffer_of_a_slow_peer_does_not_grow() {
        let (mut buffer, frame) = (WriteBuffer::default(), [1; KEEP]);
        for _ in 0..100 {
            while buffer.len() < HIGH_WATER {
                buffer.append(&frame);
            }
            assert!(buffer.bytes.capacity() <= LARGE);
            buffer.advance(1000);
        }
    }

    #[test]
    fn connections_take_the_large_buffer_in_turn() {
        let mut first = WriteBuffer::default();
        first.append(&[1; KEEP + 1]);
        assert_eq!(spare(), 0, "in use");
        let place = first.bytes.as_ptr();
        let mut second = WriteBuffer::default();
        second.append(&[2; KEEP + 1]);
        assert_ne!(second.bytes.as_ptr(), place);
        drop(second);
        first.advance(KEEP + 1);
        let mut third = WriteBuffer::default();
        third.append(&[3; KEEP + 1]);
        assert_eq!(third.bytes.as_ptr(), place);
        assert_eq!(third.unsent(), [3; KEEP + 1]);
    }
}
