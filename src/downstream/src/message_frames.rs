//! A DATA frame for each message of a stream, as etcd sends them: Erlang's eetcd takes one message from a
//! frame.
//!
//! Owns: the borders of DATA frames on their way from HTTP/2 to the client's socket. HTTP/2 gets small
//! messages that come together as one chunk, since a frame costs HTTP/2 more than a message, and sends the
//! chunk as one frame; here the frame is taken apart. Must not know: streams, the messages' meaning.
//! Invariants: the payload bytes, their order and the flags of a frame's end stay, so flow control and the
//! client see the same stream. A frame is taken apart only if its payload is whole messages to its last byte.
//! A frame within a large message whose bytes look so is taken apart too: allowed by HTTP/2, and bounded by
//! [`MOST`].

use bytes::Bytes;

use keyward_base::io::coalesce::{OutgoingBytes, WriteBuffer};
use keyward_etcd::rpc::frame::{PREFIX, announced};

/// Messages of a chunk at most, and of a frame that is taken apart.
const MOST: usize = 64;
/// The largest payload that HTTP/2 sends in one frame, whatever the client allows.
const LONGEST: usize = 16 * 1024;
/// Bytes of a frame's header.
const HEADER: usize = 9;
/// The type of DATA frames.
const DATA: u8 = 0;
/// The largest first byte of a message.
const COMPRESSED: u8 = 1;
const END_STREAM: u8 = 1;

/// Splits off the messages at the front of `chunk` that HTTP/2 sends in one frame if it has room for so many
/// bytes: as many whole ones as fit, and at least one.
pub(super) fn messages_of_one_frame(chunk: &mut Bytes, room: usize) -> Bytes {
    let room = room.min(LONGEST);
    let (mut end, mut count) = (0, 0);
    while let Some(length) = announced(&chunk[end..]) {
        let next = (end + PREFIX + length).min(chunk.len());
        if count == MOST || (count > 0 && next > room) {
            break;
        }
        (end, count) = (next, count + 1);
    }
    if end == 0 || end == chunk.len() { std::mem::take(chunk) } else { chunk.split_to(end) }
}

/// True if the bytes at the front of a chunk are a message, and more bytes follow.
pub(super) fn has_several_messages(chunk: &[u8]) -> bool {
    announced(chunk).is_some_and(|length| PREFIX + length < chunk.len())
}

/// The frames of one connection on their way out.
#[derive(Debug, Default)]
pub(super) struct MessageFrames {
    /// Bytes of the present frame that are still to come.
    left: usize,
    /// A frame that came in part, and may be several messages. HTTP/2 writes the beginning of a long payload
    /// with the frame's header.
    held: Vec<u8>,
}

/// A frame's header.
#[derive(Clone, Copy)]
struct FrameHead([u8; HEADER]);

impl FrameHead {
    fn length(self) -> usize {
        usize::from(self.0[0]) << 16 | usize::from(self.0[1]) << 8 | usize::from(self.0[2])
    }

    fn is_data(self) -> bool {
        // Padding is not ours, and would stand within the payload.
        self.0[3] == DATA && self.0[4] & !END_STREAM == 0
    }

    /// The header of a part of the frame.
    fn of_part(self, length: usize, is_last: bool) -> [u8; HEADER] {
        let mut head = self.0;
        let [_, length @ ..] = u32::try_from(length).unwrap_or(u32::MAX).to_be_bytes();
        head[..3].copy_from_slice(&length);
        if !is_last {
            head[4] &= !END_STREAM;
        }
        head
    }
}

/// A payload that came in two writes; the second part is empty for a payload that came in one.
#[derive(Clone, Copy)]
struct PayloadParts<'a>([&'a [u8]; 2]);

impl<'a> PayloadParts<'a> {
    /// The bytes from `begin` to `end`, in their parts.
    fn range(self, begin: usize, end: usize) -> [&'a [u8]; 2] {
        let [first, second] = self.0;
        let of_first = first.get(begin.min(first.len())..end.min(first.len())).unwrap_or_default();
        let (begin, end) = (begin.saturating_sub(first.len()), end.saturating_sub(first.len()));
        [of_first, second.get(begin..end).unwrap_or_default()]
    }

    fn len(self) -> usize {
        self.0.iter().map(|part| part.len()).sum()
    }

    /// The end of the message that begins at `begin`, if its prefix is here.
    fn end_of_message(self, begin: usize) -> Option<usize> {
        let mut prefix = [0; PREFIX];
        let [first, second] = self.range(begin, begin + PREFIX);
        prefix.get_mut(..first.len())?.copy_from_slice(first);
        prefix.get_mut(first.len()..first.len() + second.len())?.copy_from_slice(second);
        let is_whole = first.len() + second.len() == PREFIX;
        (is_whole && prefix[0] <= COMPRESSED)
            .then(|| announced(&prefix).map(|length| begin + PREFIX + length))?
    }

    /// The ends of the messages; `None` if the payload is not whole messages, or fewer than two, or too many.
    fn ends_of_messages(self) -> Option<([usize; MOST], usize)> {
        let (mut ends, mut count, mut end) = ([0; MOST], 0, 0);
        while end < self.len() {
            end = self.end_of_message(end)?;
            if end > self.len() {
                return None;
            }
            *ends.get_mut(count)? = end;
            count += 1;
        }
        (count > 1).then_some((ends, count))
    }

    /// Appends the frame of this payload, or a frame for each of its messages.
    fn append(self, head: FrameHead, to: &mut WriteBuffer) {
        let Some((ends, count)) = self.ends_of_messages() else {
            to.append(&head.0);
            return self.0.iter().for_each(|part| to.append(part));
        };
        let mut begin = 0;
        for (at, end) in ends[..count].iter().enumerate() {
            to.append(&head.of_part(end - begin, at + 1 == count));
            self.range(begin, *end).iter().filter(|part| !part.is_empty()).for_each(|part| to.append(part));
            begin = *end;
        }
    }
}

impl MessageFrames {
    /// Goes on with the frame that came in part. Returns the bytes behind.
    fn go_on<'a>(&mut self, bytes: &'a [u8], to: &mut WriteBuffer) -> &'a [u8] {
        let (more, bytes) = bytes.split_at(bytes.len().min(HEADER.saturating_sub(self.held.len())));
        self.held.extend_from_slice(more);
        let Some((head, payload)) = self.held.split_first_chunk() else { return bytes };
        let head = FrameHead(*head);
        let missing = head.length().saturating_sub(payload.len());
        match bytes.split_at_checked(missing) {
            Some((rest, behind)) if head.is_data() => {
                PayloadParts([payload, rest]).append(head, to);
                self.held.clear();
                behind
            }
            _ if bytes.is_empty() => bytes,
            // Not taken apart: HTTP/2 writes the rest of a payload at once.
            _ => {
                to.append(&self.held);
                self.held.clear();
                self.left = missing;
                bytes
            }
        }
    }
}

/// True if a frame that came in part waits for its rest: it may be several messages.
fn waits_for_rest(part: &[u8]) -> bool {
    let Some((head, payload)) = part.split_first_chunk() else { return true };
    let (head, payload) = (FrameHead(*head), PayloadParts([payload, &[]]));
    if !head.is_data() {
        return false;
    }
    payload.len() < PREFIX || payload.end_of_message(0).is_some_and(|end| end < head.length())
}

impl OutgoingBytes for MessageFrames {
    fn append(&mut self, mut bytes: &[u8], to: &mut WriteBuffer) {
        if !self.held.is_empty() {
            bytes = self.go_on(bytes, to);
        }
        // `bytes[..at]` is appended as it is.
        let mut at = self.left.min(bytes.len());
        self.left -= at;
        while let Some(rest) = bytes.get(at..).filter(|rest| !rest.is_empty()) {
            let head = rest.first_chunk().copied().map(FrameHead);
            let end = HEADER + head.map_or(0, FrameHead::length);
            match (head, rest.get(HEADER..end)) {
                (Some(head), Some(payload)) => {
                    if head.is_data() && has_several_messages(payload) {
                        to.append(&bytes[..at]);
                        PayloadParts([payload, &[]]).append(head, to);
                        (bytes, at) = (&rest[end..], 0);
                    } else {
                        at += end;
                    }
                }
                _ if waits_for_rest(rest) => {
                    self.held.extend_from_slice(rest);
                    bytes = &bytes[..at];
                }
                _ => {
                    self.left = end - rest.len();
                    at = bytes.len();
                }
            }
        }
        if !bytes.is_empty() {
            to.append(bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use keyward_etcd::rpc::frame::encode;

    fn frame(kind: u8, flags: u8, payload: &[u8]) -> Vec<u8> {
        let [_, length @ ..] = u32::try_from(payload.len()).unwrap().to_be_bytes();
        [&length[..], &[kind, flags, 0, 0, 0, 7], payload].concat()
    }

    /// What leaves, if HTTP/2 writes these pieces.
    fn sent(pieces: &[&[u8]]) -> Vec<u8> {
        let (mut frames, mut buffer) = (MessageFrames::default(), WriteBuffer::default());
        pieces.iter().for_each(|piece| frames.append(piece, &mut buffer));
        assert!(frames.held.is_empty(), "a frame is not withheld");
        buffer.unsent().to_vec()
    }

    /// The frames in these bytes, as type, flags and payload.
    fn parsed(mut bytes: &[u8]) -> Vec<(u8, u8, Vec<u8>)> {
        let mut frames = Vec::new();
        while let Some(head) = bytes.first_chunk().copied().map(FrameHead) {
            let end = HEADER + head.length();
            frames.push((head.0[3], head.0[4], bytes[HEADER..end].to_vec()));
            bytes = &bytes[end..];
        }
        assert!(bytes.is_empty());
        frames
    }

    #[test]
    fn a_frame_of_several_messages_is_taken_apart() {
        let messages = [encode(b"one"), encode(b""), encode(b"three")];
        let chunk = messages.concat();
        let headers = frame(1, 4, b"head");
        let expected: Vec<u8> = [
            headers.clone(),
            frame(DATA, 0, &messages[0]),
            frame(DATA, 0, &messages[1]),
            frame(DATA, END_STREAM, &messages[2]),
            headers.clone(),
        ]
        .concat();
        let data = frame(DATA, END_STREAM, &chunk);
        let all = [&headers[..], &data, &headers].concat();
        assert_eq!(sent(&[&all]), expected);
        // As HTTP/2 writes a payload that it does not copy: with its beginning, or without.
        for part in 0..data.len() {
            let head = [&headers[..], &data[..part]].concat();
            assert_eq!(sent(&[&head, &data[part..], &headers]), expected, "{part}");
        }
    }

    #[test]
    fn other_frames_stay() {
        let part = encode(&[7; 100]).slice(..50);
        let (message, many) = (encode(b"one"), encode(b"").repeat(MOST + 1));
        for frame in [
            frame(DATA, END_STREAM, b""),
            frame(DATA, 0, &message),
            frame(DATA, 0, &part),
            frame(DATA, 0, &[&message[..], &part].concat()),
            frame(DATA, 0, &many),
            frame(DATA, 8, &[&message[..], &message].concat()),
            frame(1, 4, &[&message[..], &message].concat()),
            frame(DATA, 0, b"{\"result\":{}}\n"),
        ] {
            assert_eq!(sent(&[&frame]), frame);
            for part in 0..frame.len() {
                assert_eq!(sent(&[&frame[..part], &frame[part..]]), frame, "{part}");
            }
        }
    }

    #[test]
    fn a_chunk_is_cut_between_messages_where_there_is_room_for_a_part() {
        let message = encode(&[7; 95]);
        let chunk = || Bytes::from(message.repeat(3));
        for (room, taken) in [(1, 1), (199, 1), (200, 2), (299, 2), (300, 3), (1 << 20, 3)] {
            let mut rest = chunk();
            assert_eq!(messages_of_one_frame(&mut rest, room).len(), taken * 100, "{room}");
            assert_eq!(rest.len(), (3 - taken) * 100);
        }
        let mut many = Bytes::from(encode(b"").repeat(MOST + 1));
        assert_eq!(messages_of_one_frame(&mut many, 1 << 20).len(), MOST * PREFIX);
        let mut long = Bytes::from(encode(&[7; 6000]).repeat(3));
        assert_eq!(messages_of_one_frame(&mut long, 1 << 20).len(), 2 * (6000 + PREFIX), "one frame");
        assert!(has_several_messages(&chunk()) && !has_several_messages(&message));
    }

    proptest! {
        /// Whatever HTTP/2 writes, and in whichever pieces: the streams are the same, and the flags of their
        /// ends.
        #[test]
        fn the_bytes_of_a_stream_stay(
            frames in prop::collection::vec((0..3_u8, 0..2_u8, prop::collection::vec(0..30_usize, 0..6), 0..4_usize), 0..8),
            cuts in prop::collection::vec(0..400_usize, 0..6),
        ) {
            let payload = |messages: &[usize], cut: usize| {
                let all: Vec<u8> = messages.iter().flat_map(|size| encode(&vec![1; *size]).to_vec()).collect();
                all[cut.min(all.len())..].to_vec()
            };
            let frames: Vec<_> = frames.iter().map(|(kind, flags, messages, cut)| (*kind, *flags, payload(messages, *cut))).collect();
            let bytes: Vec<u8> = frames.iter().flat_map(|(kind, flags, payload)| frame(*kind, *flags, payload)).collect();
            let mut cuts: Vec<usize> = cuts.iter().map(|cut| bytes.len().min(*cut)).collect();
            cuts.sort_unstable();
            let (mut state, mut buffer, mut begin) = (MessageFrames::default(), WriteBuffer::default(), 0);
            for end in cuts.into_iter().chain([bytes.len()]) {
                state.append(&bytes[begin..end], &mut buffer);
                begin = end;
            }
            let joined = |frames: &[(u8, u8, Vec<u8>)]| {
                let mut joined: Vec<(u8, u8, Vec<u8>)> = Vec::new();
                for (kind, flags, payload) in frames {
                    match joined.last_mut() {
                        Some((DATA, last, all)) if *kind == DATA && *last & END_STREAM == 0 => {
                            all.extend_from_slice(payload);
                            *last = *flags;
                        }
                        _ => joined.push((*kind, *flags, payload.clone())),
                    }
                }
                joined
            };
            let sent = [buffer.unsent(), &state.held].concat();
            prop_assert_eq!(joined(&parsed(&sent)), joined(&frames));
        }
    }
}
