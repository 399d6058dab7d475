//! The frames of WebSocket (RFC 6455, section 5), on the server's side.
//!
//! Owns: the heads of frames, the mask, the order of a message's fragments, the limit on their number. Must
//! not know: the connection, the meaning of a message. Invariants: no payload of a message is held: its bytes
//! are passed on as they arrive, a control frame is taken whole. A fragment without a byte counts as a
//! fragment.

use bytes::{Buf as _, Bytes, BytesMut};

/// Limit on the fragments of a message: the largest document in fragments of 1 KiB.
const MOST_FRAGMENTS: usize = 4096;
/// The longest payload of a control frame.
pub const LONGEST_CONTROL: usize = 125;

const CONTINUATION: u8 = 0x0;
const TEXT: u8 = 0x1;
const BINARY: u8 = 0x2;
const CLOSE: u8 = 0x8;
const PING: u8 = 0x9;
const PONG: u8 = 0xa;

const FINAL: u8 = 0x80;
const RESERVED: u8 = 0x70;
const OPCODE: u8 = 0x0f;
const MASKED: u8 = 0x80;

/// A part of the client's side of a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WebSocketPart {
    /// The next bytes of a message.
    Data(Bytes),
    /// The end of a message.
    MessageEnd,
    /// A Ping, which asks for a Pong with the same payload.
    Ping(Bytes),
    /// A Pong that nobody has asked for.
    Pong,
    /// The client closes the connection. The payload is to be sent back.
    Close(Bytes),
}

/// A fault of the client, for which the connection ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WebSocketFault {
    /// The frame breaks the protocol.
    #[error("the frame breaks the protocol")]
    Protocol,
    /// A message has more fragments than are taken.
    #[error("the message has too many fragments")]
    TooManyFragments,
}

impl WebSocketFault {
    /// The status of the Close sent to the client (RFC 6455, section 7.4.1).
    #[must_use]
    pub fn close_code(self) -> u16 {
        match self {
            Self::Protocol => 1002,
            Self::TooManyFragments => 1008,
        }
    }
}

/// The messages that are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MessagesRead {
    /// Every message.
    All,
    /// No further message: reading ends at its first frame. Control frames before it are read.
    None,
}

/// Reads the frames of a client.
#[derive(Debug, Default)]
pub struct WebSocketReader {
    /// Bytes of the current frame's payload that have not arrived.
    left: u64,
    mask: [u8; 4],
    is_final: bool,
    /// Fragments of the current message; 0 between two messages.
    fragments: usize,
    /// The payload of the current message's frame is read, or the next head is.
    in_payload: bool,
    is_held_back: bool,
}

struct FrameHead {
    opcode: u8,
    is_final: bool,
    length: u64,
    mask: [u8; 4],
    /// The bytes of the head.
    size: usize,
}

impl WebSocketReader {
    /// True within a message.
    #[must_use]
    pub fn is_in_message(&self) -> bool {
        self.fragments > 0
    }

    /// True if `input` begins with a message that is not to be read.
    #[must_use]
    pub fn is_held_back(&self) -> bool {
        self.is_held_back
    }

    /// The next part of `input`; `None` if more bytes must arrive first, or a message is held back.
    ///
    /// # Errors
    /// The client's bytes have a fault: the connection must end.
    pub fn next(
        &mut self,
        input: &mut BytesMut,
        messages: MessagesRead,
    ) -> Result<Option<WebSocketPart>, WebSocketFault> {
        loop {
            if self.in_payload {
                if self.left > 0 {
                    return Ok(self.data(input));
                }
                self.in_payload = false;
                if self.is_final {
                    self.fragments = 0;
                    return Ok(Some(WebSocketPart::MessageEnd));
                }
            }
            let Some(head) = FrameHead::read(input)? else { return Ok(None) };
            if head.opcode >= CLOSE {
                return head.control(input);
            }
            if (head.opcode == CONTINUATION) != self.is_in_message() {
                return Err(WebSocketFault::Protocol);
            }
            self.is_held_back = messages == MessagesRead::None;
            if self.is_held_back {
                return Ok(None);
            }
            self.fragments += 1;
            if self.fragments > MOST_FRAGMENTS {
                return Err(WebSocketFault::TooManyFragments);
            }
            input.advance(head.size);
            (self.left, self.mask, self.is_final, self.in_payload) =
                (head.length, head.mask, head.is_final, true);
        }
    }

    /// The bytes of the current payload that have arrived.
    fn data(&mut self, input: &mut BytesMut) -> Option<WebSocketPart> {
        let length = usize::try_from(self.left).unwrap_or(usize::MAX).min(input.len());
        if length == 0 {
            return None;
        }
        let mut data = input.split_to(length);
        unmask(&mut data, self.mask);
        self.mask.rotate_left(length % 4);
        self.left -= length as u64;
        Some(WebSocketPart::Data(data.freeze()))
    }
}

impl FrameHead {
    /// The head at the beginning of `input`; `None` if it has not arrived whole.
    fn read(input: &[u8]) -> Result<Option<Self>, WebSocketFault> {
        let [first, second, rest @ ..] = input else { return Ok(None) };
        let (opcode, is_final) = (first & OPCODE, first & FINAL != 0);
        let is_control = opcode >= CLOSE;
        let is_known = matches!(opcode, CONTINUATION | TEXT | BINARY | CLOSE | PING | PONG);
        let short = second & !MASKED;
        let is_long = usize::from(short) > LONGEST_CONTROL;
        // No extension is agreed, and a client masks its frames.
        if first & RESERVED != 0 || second & MASKED == 0 || !is_known || is_control && (!is_final || is_long)
        {
            return Err(WebSocketFault::Protocol);
        }
        let (length, rest) = match short {
            126 => {
                let Some((length, rest)) = rest.split_first_chunk() else { return Ok(None) };
                (u64::from(u16::from_be_bytes(*length)), rest)
            }
            127 => {
                let Some((length, rest)) = rest.split_first_chunk() else { return Ok(None) };
                (u64::from_be_bytes(*length), rest)
            }
            _ => (u64::from(short), rest),
        };
        if length >> 63 != 0 {
            return Err(WebSocketFault::Protocol);
        }
        let Some((mask, rest)) = rest.split_first_chunk() else { return Ok(None) };
        Ok(Some(Self { opcode, is_final, length, mask: *mask, size: input.len() - rest.len() }))
    }

    /// The control frame at the beginning of `input`.
    fn control(&self, input: &mut BytesMut) -> Result<Option<WebSocketPart>, WebSocketFault> {
        let length = usize::try_from(self.length).unwrap_or(usize::MAX);
        if input.len() - self.size < length {
            return Ok(None);
        }
        input.advance(self.size);
        let mut payload = input.split_to(length);
        unmask(&mut payload, self.mask);
        Ok(Some(match self.opcode {
            PING => WebSocketPart::Ping(payload.freeze()),
            PONG => WebSocketPart::Pong,
            // A status has two bytes.
            _ if length == 1 => return Err(WebSocketFault::Protocol),
            _ => WebSocketPart::Close(payload.freeze()),
        }))
    }
}

fn unmask(payload: &mut [u8], mask: [u8; 4]) {
    for (byte, mask) in payload.iter_mut().zip(mask.iter().cycle()) {
        *byte ^= mask;
    }
}

/// The place of a frame in the server's message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fragment {
    /// It begins the message.
    pub is_first: bool,
    /// It ends the message.
    pub is_last: bool,
}

/// Appends the head of a text frame with `length` bytes of payload, which follow.
pub fn put_text_head(output: &mut BytesMut, length: usize, fragment: Fragment) {
    let opcode = if fragment.is_first { TEXT } else { CONTINUATION };
    put_head(output, opcode | if fragment.is_last { FINAL } else { 0 }, length);
}

/// Appends a Pong.
pub fn put_pong(output: &mut BytesMut, payload: &[u8]) {
    put_head(output, PONG | FINAL, payload.len());
    output.extend_from_slice(payload);
}

/// Appends a Close.
pub fn put_close(output: &mut BytesMut, payload: &[u8]) {
    put_head(output, CLOSE | FINAL, payload.len());
    output.extend_from_slice(payload);
}

fn put_head(output: &mut BytesMut, first: u8, length: usize) {
    match (u8::try_from(length), u16::try_from(length)) {
        (Ok(short @ ..=125), _) => output.extend_from_slice(&[first, short]),
        (_, Ok(length)) => {
            output.extend_from_slice(&[first, 126]);
            output.extend_from_slice(&length.to_be_bytes());
        }
        _ => {
            output.extend_from_slice(&[first, 127]);
            output.extend_from_slice(&(length as u64).to_be_bytes());
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tokio_tungstenite::tungstenite::Message;
    use tokio_tungstenite::tungstenite::protocol::{Role, WebSocketContext};

    use super::*;

    const MASK: [u8; 4] = [1, 2, 3, 4];

    fn frame(first: u8, payload: &[u8]) -> Vec<u8> {
        let mut frame = BytesMut::new();
        put_head(&mut frame, first, payload.len());
        frame[1] |= MASKED;
        frame.extend_from_slice(&MASK);
        let begin = frame.len();
        frame.extend_from_slice(payload);
        unmask(&mut frame[begin..], MASK);
        frame.to_vec()
    }

    /// All parts of the bytes, which arrive so many at once; the data of a message is joined.
    fn parts(bytes: &[u8], at_once: usize) -> Result<Vec<WebSocketPart>, WebSocketFault> {
        let (mut reader, mut input) = (WebSocketReader::default(), BytesMut::new());
        let (mut parts, mut message) = (Vec::new(), Vec::new());
        for arrived in bytes.chunks(at_once) {
            input.extend_from_slice(arrived);
            while let Some(part) = reader.next(&mut input, MessagesRead::All)? {
                match part {
                    WebSocketPart::Data(data) => message.extend_from_slice(&data),
                    WebSocketPart::MessageEnd => {
                        parts.push(WebSocketPart::Data(std::mem::take(&mut message).into()));
                        parts.push(WebSocketPart::MessageEnd);
                    }
                    control => parts.push(control),
                }
            }
            assert!(input.len() < 14 + LONGEST_CONTROL, "no payload of a message is held");
        }
        Ok(parts)
    }

    #[test]
    fn fragments_are_joined_and_control_frames_come_between_them() {
        let bytes = [
            frame(TEXT, b"{\"a\""),
            frame(PING | FINAL, b"p"),
            frame(CONTINUATION, b""),
            frame(PONG | FINAL, b""),
            frame(CONTINUATION | FINAL, b":1}"),
            frame(BINARY | FINAL, &[7; 70_000]),
            frame(CLOSE | FINAL, b"\x03\xe8bye"),
        ]
        .concat();
        let wanted = [
            WebSocketPart::Ping("p".into()),
            WebSocketPart::Pong,
            WebSocketPart::Data("{\"a\":1}".into()),
            WebSocketPart::MessageEnd,
            WebSocketPart::Data(vec![7; 70_000].into()),
            WebSocketPart::MessageEnd,
            WebSocketPart::Close("\x03\u{e8}bye".as_bytes().into()),
        ];
        for at_once in [1, 3, 1000, 100_000] {
            let parts = parts(&bytes, at_once).expect("no fault");
            assert_eq!(parts[..6], wanted[..6]);
            assert_eq!(parts[6], WebSocketPart::Close(Bytes::from_static(b"\x03\xe8bye")));
        }
    }

    #[test]
    fn a_frame_against_the_protocol_is_a_fault() {
        let mut unmasked = frame(TEXT | FINAL, b"{}");
        unmasked[1] &= !MASKED;
        let mut long = frame(TEXT | FINAL, &[0; 70_000]);
        long[2] = 0x80;
        for (name, bytes) in [
            ("without a mask", unmasked),
            ("compressed", frame(TEXT | FINAL | 0x40, b"{}")),
            ("unknown opcode", frame(0x3 | FINAL, b"{}")),
            ("unknown control", frame(0xb | FINAL, b"{}")),
            ("long Ping", frame(PING | FINAL, &[0; 126])),
            ("Ping in fragments", frame(PING, b"")),
            ("Close of a byte", frame(CLOSE | FINAL, b"x")),
            ("continuation of nothing", frame(CONTINUATION | FINAL, b"{}")),
            ("message within a message", [frame(TEXT, b"{"), frame(TEXT | FINAL, b"}")].concat()),
            ("length of 64 bits", long),
        ] {
            assert_eq!(parts(&bytes, 1).unwrap_err(), WebSocketFault::Protocol, "{name}");
        }
    }

    #[test]
    fn a_message_has_a_limited_number_of_fragments() {
        let first = frame(TEXT, b"{");
        let most = [first, frame(CONTINUATION, b"").repeat(MOST_FRAGMENTS - 2)].concat();
        let whole = [most.clone(), frame(CONTINUATION | FINAL, b"}")].concat();
        // The next message counts anew.
        assert_eq!(parts(&whole.repeat(2), 4096).expect("no fault").len(), 4);
        let one_more = [most, frame(CONTINUATION, b"").repeat(2)].concat();
        assert_eq!(parts(&one_more, 4096).unwrap_err(), WebSocketFault::TooManyFragments);
    }

    #[test]
    fn a_message_is_held_back_behind_control_frames() {
        let (mut reader, mut input) = (WebSocketReader::default(), BytesMut::new());
        input.extend_from_slice(&frame(PING | FINAL, b"p"));
        input.extend_from_slice(&frame(TEXT | FINAL, b"{}"));
        let part = reader.next(&mut input, MessagesRead::None);
        assert_eq!(part, Ok(Some(WebSocketPart::Ping("p".into()))));
        assert!(!reader.is_held_back());
        assert_eq!(reader.next(&mut input, MessagesRead::None), Ok(None));
        assert!(reader.is_held_back());
        let part = reader.next(&mut input, MessagesRead::All);
        assert_eq!(part, Ok(Some(WebSocketPart::Data("{}".into()))));
    }

    /// A message written in fragments, as the library of clients reads it.
    #[test]
    fn a_client_reads_the_fragments_of_a_message() {
        let mut written = BytesMut::new();
        let texts = ["a".repeat(125), "b".repeat(126), "c".repeat(70_000)];
        for (number, text) in texts.iter().enumerate() {
            let fragment = Fragment { is_first: number == 0, is_last: number == 2 };
            put_text_head(&mut written, text.len(), fragment);
            written.extend_from_slice(text.as_bytes());
            put_pong(&mut written, b"p");
        }
        put_close(&mut written, b"");
        let mut io = std::io::Cursor::new(written.to_vec());
        let mut client = WebSocketContext::new(Role::Client, None);
        let mut read = Vec::new();
        while let Ok(message) = client.read(&mut io) {
            read.push(message);
        }
        let pong = || Message::Pong("p".into());
        assert_eq!(read, [pong(), pong(), Message::text(texts.concat()), pong(), Message::Close(None)]);
    }

    proptest! {
        /// For any bytes: the same messages as tungstenite's, up to the first fault. Tungstenite refuses text
        /// that is no UTF-8, which is left to the document's reader here.
        #[test]
        fn any_bytes_are_read_as_by_another_reader(
            frames in prop::collection::vec(
                (prop::sample::select(vec![0x0_u8, 0x80, 0x2, 0x82, 0x88, 0x89, 0x8a, 0xc2, 0x83, 0x9]), 0_usize..200),
                0..20,
            ),
            at_once in 1_usize..300,
        ) {
            let bytes: Vec<u8> =
                frames.iter().flat_map(|(first, length)| frame(*first, &vec![b'x'; *length])).collect();
            let mut server = WebSocketContext::new(Role::Server, None);
            let mut io = std::io::Cursor::new(bytes.clone());
            let mut theirs = Vec::new();
            // The library writes its Pongs into the same stream.
            let mut split = ReadOnly(&mut io);
            while let Ok(message) = server.read(&mut split) {
                let is_close = message.is_close();
                match message {
                    Message::Binary(data) => {
                        theirs.extend([WebSocketPart::Data(data), WebSocketPart::MessageEnd]);
                    }
                    Message::Ping(payload) => theirs.push(WebSocketPart::Ping(payload)),
                    Message::Pong(_) => theirs.push(WebSocketPart::Pong),
                    _ => {}
                }
                if is_close {
                    break;
                }
            }
            let (mut reader, mut input) = (WebSocketReader::default(), BytesMut::new());
            let (mut ours, mut message, mut is_over) = (Vec::new(), Vec::new(), false);
            for arrived in bytes.chunks(at_once) {
                input.extend_from_slice(arrived);
                while !is_over {
                    match reader.next(&mut input, MessagesRead::All) {
                        Ok(None) => break,
                        Ok(Some(WebSocketPart::Data(data))) => message.extend_from_slice(&data),
                        Ok(Some(WebSocketPart::MessageEnd)) => {
                            ours.push(WebSocketPart::Data(std::mem::take(&mut message).into()));
                            ours.push(WebSocketPart::MessageEnd);
                        }
                        Ok(Some(WebSocketPart::Close(_))) | Err(_) => is_over = true,
                        Ok(Some(control)) => ours.push(control),
                    }
                }
            }
            prop_assert_eq!(ours, theirs);
        }
    }

    struct ReadOnly<'a>(&'a mut std::io::Cursor<Vec<u8>>);

    impl std::io::Read for ReadOnly<'_> {
        fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
            self.0.read(buffer)
        }
    }

    impl std::io::Write for ReadOnly<'_> {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            Ok(bytes.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
}
