//! Fair reading among the connections of a shard: the bytes read from one connection per turn.
//!
//! Owns: the cost of a frame, of a byte and of a request, the budget of a turn, and the bytes read beyond the
//! budget. Must not know: the services served, a frame's meaning beyond its length and type.
//! Invariants: every protocol on a client's connection is read through a [`TurnReader`]. A turn is one poll
//! of the connection's task, begun by the connection. A turn of HTTP/2 ends between two frames. A protocol
//! whose frames are unknown here pays for each byte the share of its smallest frames, so it needs no rule of
//! its own. Bytes left over are delivered in later turns, in order. A connection at the end of its turn goes
//! to the back of the runtime's queue, so every ready task runs before the connection's next turn.

use std::cell::Cell;
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};

use bytes::{Buf, BytesMut};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::socket_progress::PREFACE;
use crate::turn_length::SHORT;

/// The budget of one turn, in bytes.
const TURN: usize = 64 * 1024;
/// Cost of a frame beside the frame's bytes: a PING of 17 bytes is more work than 17 bytes of a value.
const FRAME: usize = 128;
/// Cost of a byte whose frame is unknown: the smallest frames of WebSocket and the smallest chunks of HTTP/1
/// have six bytes, a line of a header less.
const BYTE: usize = FRAME / 8;

const HEAD: usize = 9;
const HEADERS: u8 = 0x1;

/// The rest of a connection's current budget. The connection begins a turn, the reader spends the budget.
pub(super) struct ReadTurn {
    left: Cell<usize>,
    /// Cost of a request beside its bytes.
    request: Cell<usize>,
}

impl ReadTurn {
    pub(super) fn new() -> Rc<Self> {
        Rc::new(Self { left: Cell::new(TURN), request: Cell::new(TURN / SHORT) })
    }

    /// Grants a whole budget, for `requests` requests at most; called when the connection's task is polled.
    pub(super) fn begin(&self, requests: usize) {
        self.left.set(TURN);
        self.request.set(TURN / requests);
    }

    /// Removes the limit: from now on the reader discards all input, and yields to other tasks without the
    /// budget.
    pub(super) fn lift(&self) {
        self.left.set(usize::MAX);
    }

    /// Ready once a request may begin, which then is paid for. A request whose beginning is no frame begins
    /// behind this.
    pub(super) fn poll_request(&self, cx: &Context<'_>) -> Poll<()> {
        if self.is_over() {
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        self.spend(self.request.get());
        Poll::Ready(())
    }

    fn is_over(&self) -> bool {
        self.left.get() == 0
    }

    fn spend(&self, cost: usize) {
        if self.left.get() != usize::MAX {
            self.left.set(self.left.get().saturating_sub(cost));
        }
    }
}

/// The bytes of a connection, read in turns.
pub(super) struct TurnReader<T> {
    io: T,
    turn: Rc<ReadTurn>,
    /// The position in HTTP/2's frames; `None` for any other protocol.
    frames: Option<FramePosition>,
    /// Bytes read beyond a turn's budget.
    ahead: BytesMut,
}

/// A connection's position within its frames.
struct FramePosition {
    /// Bytes of the current frame not yet read.
    payload: usize,
    head: [u8; HEAD],
    /// Bytes of `head` already read.
    gathered: usize,
}

impl<T> TurnReader<T> {
    /// Reads HTTP/2.
    pub(super) fn http2(io: T, turn: &Rc<ReadTurn>) -> Self {
        let frames = FramePosition { payload: PREFACE, head: [0; HEAD], gathered: 0 };
        Self { io, turn: Rc::clone(turn), frames: Some(frames), ahead: BytesMut::new() }
    }

    /// Reads another protocol, or several after one another.
    pub(super) fn unframed(io: T, turn: &Rc<ReadTurn>) -> Self {
        Self { io, turn: Rc::clone(turn), frames: None, ahead: BytesMut::new() }
    }
}

impl<T: AsyncRead + Unpin> TurnReader<T> {
    /// Reads as many bytes as the turn's budget allows.
    fn poll_read_unframed(&mut self, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let most = (self.turn.left.get() / BYTE).max(1).min(buf.remaining());
        let mut part = ReadBuf::new(buf.initialize_unfilled_to(most));
        ready!(Pin::new(&mut self.io).poll_read(cx, &mut part))?;
        let read = part.filled().len();
        buf.advance(read);
        self.turn.spend(read * BYTE);
        Poll::Ready(Ok(()))
    }
}

impl FramePosition {
    /// The number of `bytes` within the turn's budget; spends the budget for the frames of `bytes`.
    fn take(&mut self, bytes: &[u8], turn: &ReadTurn) -> usize {
        let mut rest = bytes;
        while !rest.is_empty() {
            if self.payload > 0 {
                let passed = self.payload.min(rest.len());
                self.payload -= passed;
                rest = &rest[passed..];
                continue;
            }
            if self.gathered == 0 && turn.is_over() {
                break;
            }
            let (more, after) = rest.split_at(rest.len().min(HEAD - self.gathered));
            self.head[self.gathered..][..more.len()].copy_from_slice(more);
            self.gathered += more.len();
            rest = after;
            if self.gathered == HEAD {
                self.gathered = 0;
                let [high, middle, low, kind, ..] = self.head;
                self.payload = usize::from(high) << 16 | usize::from(middle) << 8 | usize::from(low);
                let work = if kind == HEADERS { turn.request.get() } else { FRAME };
                turn.spend(HEAD + self.payload + work);
            }
        }
        bytes.len() - rest.len()
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for TurnReader<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.turn.is_over() {
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        let Self { io, turn, frames: Some(frames), ahead } = &mut *self else {
            return self.poll_read_unframed(cx, buf);
        };
        if !ahead.is_empty() {
            let length = ahead.len().min(buf.remaining());
            let taken = frames.take(&ahead[..length], turn);
            buf.put_slice(&ahead[..taken]);
            ahead.advance(taken);
            if ahead.is_empty() {
                *ahead = BytesMut::new();
            }
            return Poll::Ready(Ok(()));
        }
        let before = buf.filled().len();
        ready!(Pin::new(io).poll_read(cx, buf))?;
        let read = &buf.filled()[before..];
        let taken = frames.take(read, turn);
        ahead.extend_from_slice(&read[taken..]);
        buf.set_filled(before + taken);
        Poll::Ready(Ok(()))
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for TurnReader<T> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;
    use proptest::prelude::*;
    use tokio::io::AsyncReadExt as _;

    use super::*;

    const PING: u8 = 0x6;
    const DATA: u8 = 0x0;
    const REQUESTS: usize = 8;

    fn frame(kind: u8, payload: usize) -> Vec<u8> {
        let length = u32::try_from(payload).expect("short").to_be_bytes();
        [&length[1..], &[kind, 0, 0, 0, 0, 1], &vec![kind; payload]].concat()
    }

    fn in_turns(bytes: &[u8]) -> (TurnReader<io::Cursor<Vec<u8>>>, Rc<ReadTurn>) {
        let turn = ReadTurn::new();
        let bytes = [&[0; PREFACE], bytes].concat();
        (TurnReader::http2(io::Cursor::new(bytes), &turn), turn)
    }

    /// The bytes read in one turn, with a buffer of `at_once` bytes.
    fn one_turn(reader: &mut TurnReader<io::Cursor<Vec<u8>>>, turn: &ReadTurn, at_once: usize) -> Vec<u8> {
        turn.begin(REQUESTS);
        let mut read = Vec::new();
        let mut buffer = vec![0; at_once];
        while let Some(length) = reader.read(&mut buffer).now_or_never() {
            match length.expect("no error") {
                0 => break,
                length => read.extend_from_slice(&buffer[..length]),
            }
        }
        read
    }

    /// The number of frames read in one turn from a long sequence of frames of one kind and length.
    fn frames_in_a_turn(kind: u8, payload: usize) -> usize {
        let frame = frame(kind, payload);
        let (mut reader, turn) = in_turns(&frame.repeat(10_000));
        let read: usize = (0..10).map(|_| one_turn(&mut reader, &turn, 16 * 1024).len()).sum();
        ((read - PREFACE) / frame.len()).div_ceil(10)
    }

    #[test]
    fn a_turn_ends_by_requests_by_frames_and_by_bytes() {
        assert!(frames_in_a_turn(HEADERS, 1) <= REQUESTS);
        assert!((REQUESTS - 1..=REQUESTS).contains(&frames_in_a_turn(HEADERS, 100)));
        // Header blocks rewritten from a few bytes: 16 KiB each.
        assert_eq!(frames_in_a_turn(HEADERS, 16 * 1024), 3);
        assert!((400..=512).contains(&frames_in_a_turn(PING, 8)));
        assert_eq!(frames_in_a_turn(DATA, 16 * 1024), 4);
    }

    #[test]
    fn a_turn_of_another_protocol_ends_by_bytes_and_by_requests() {
        let turn = ReadTurn::new();
        let bytes: Vec<u8> = (0..=250).cycle().take(100_000).collect();
        let mut reader = TurnReader::unframed(io::Cursor::new(bytes.clone()), &turn);
        let mut read = Vec::new();
        for at_once in [1, 7, 4096, 65_536].into_iter().cycle() {
            let more = one_turn(&mut reader, &turn, at_once);
            assert!(more.len() <= TURN / BYTE, "{} bytes", more.len());
            read.extend_from_slice(&more);
            if more.is_empty() {
                break;
            }
            assert!(more.len() == TURN / BYTE || read.len() == bytes.len(), "{} bytes", more.len());
        }
        assert_eq!(read, bytes);

        turn.begin(REQUESTS);
        let begun = || std::future::poll_fn(|cx| turn.poll_request(cx)).now_or_never();
        assert_eq!((0..100).map_while(|_| begun()).count(), REQUESTS);
        let mut reader = TurnReader::unframed(io::Cursor::new(bytes), &turn);
        assert!(reader.read(&mut [0]).now_or_never().is_none(), "the turn is over for reading too");
        turn.begin(REQUESTS);
        assert!(reader.read(&mut [0]).now_or_never().is_some());
    }

    /// The connection's task reads until no bytes come, like HTTP/2; another task runs between the turns.
    #[tokio::test]
    async fn another_task_runs_after_every_turn() {
        let frame = frame(HEADERS, 40);
        let requests = 10_000;
        let (mut reader, turn) = in_turns(&frame.repeat(requests));
        let read = Cell::new(0);
        let greedy = async {
            let mut buffer = [0; 8 * 1024];
            std::future::poll_fn(|cx| {
                turn.begin(REQUESTS);
                loop {
                    let mut into = ReadBuf::new(&mut buffer);
                    ready!(Pin::new(&mut reader).poll_read(cx, &mut into)).expect("no error");
                    match into.filled().len() {
                        0 => return Poll::Ready(()),
                        length => read.set(read.get() + length),
                    }
                }
            })
            .await;
        };
        let other = async {
            let (mut before, mut turns, mut most) = (0, 0, 0);
            loop {
                most = most.max(read.get() - before);
                before = read.get();
                if before == PREFACE + requests * frame.len() {
                    return (turns, most);
                }
                turns += 1;
                tokio::task::yield_now().await;
            }
        };
        let ((), (turns, most)) = futures_util::future::join(greedy, other).await;
        assert!(most <= PREFACE + (REQUESTS + 1) * frame.len(), "{most} bytes in one turn");
        assert!(turns + 1 >= requests / REQUESTS, "{turns} turns");
    }

    proptest! {
        /// For any frames and any split of reads: all bytes arrive, in order.
        #[test]
        fn no_byte_is_lost_or_moved(
            frames in prop::collection::vec((0_u8..10, 0_usize..3000), 0..200),
            at_once in 1_usize..5000,
        ) {
            let bytes: Vec<u8> = frames.iter().flat_map(|(kind, payload)| frame(*kind, *payload)).collect();
            let (mut reader, turn) = in_turns(&bytes);
            let mut read = Vec::new();
            loop {
                let more = one_turn(&mut reader, &turn, at_once);
                if more.is_empty() {
                    break;
                }
                read.extend(more);
            }
            prop_assert_eq!(&read[PREFACE..], &bytes);
        }
    }
}
