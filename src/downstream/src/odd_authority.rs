//! Clients sending an invalid `:authority`: Go's clientv3 3.5.0 sends `#initially=[host:port]`, and clients
//! on unix sockets send a path. h2 refuses the first request of the connection as malformed, and would refuse
//! every later request.
//!
//! Owns: frame boundaries in the bytes from such a client, and the rewriting of header blocks. Must not know:
//! sockets, the meaning of a request. Without I/O: bytes in, bytes out.
//! Invariants (`docs/decisions.md#d33`): the first header block of a connection decides, once. If the
//! authority is valid or the block cannot be read, every byte passes unchanged and h2 judges. Otherwise each
//! header block of the connection is encoded anew with [`AUTHORITY`] and no other change of meaning, and all
//! other frames pass. From then on any doubt ends the connection with a GOAWAY. Memory is bounded: one block
//! as received, its decoded fields, and the encoded output.

mod header_block;

use bytes::{BufMut, Bytes, BytesMut};

use crate::socket_progress::PREFACE;

use header_block::{HpackField, HpackTable};

pub use header_block::TABLE;

/// The authority in every rewritten request. Never read afterwards.
pub const AUTHORITY: &str = "keyward";
/// Largest header block accepted, over all its frames.
pub const LARGEST: usize = 16 * 1024;
/// Most frames in one header block.
pub const FRAMES: usize = 8;
/// Largest header list accepted, counted as in RFC 9113, section 6.5.2, unless the connection's own limit is
/// lower. The output uses no HPACK table, so a block of a few indexed bytes can expand to many: a list that
/// is too large is refused before any output is written.
const LARGEST_LIST: usize = 16 * 1024;
/// Output size at which processing pauses until the output is read.
pub const WAITING: usize = 16 * 1024;

const HEAD: usize = 9;
const HEADERS: u8 = 0x1;
const CONTINUATION: u8 = 0x9;
const END_STREAM: u8 = 0x1;
const END_HEADERS: u8 = 0x4;
const PADDED: u8 = 0x8;
const PRIORITY: u8 = 0x20;
/// An invalid frame (DATA on stream 0): h2 answers by ending the connection with GOAWAY (`PROTOCOL_ERROR`),
/// in order after h2's earlier frames.
const OFFENCE: [u8; HEAD] = [0; HEAD];

/// Reason for ending a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AuthorityRefusal {
    /// A header block interrupted by another frame, or a CONTINUATION without a block.
    Order,
    /// A block longer than [`LARGEST`], or in more than [`FRAMES`] frames.
    Length,
    /// A frame with more padding than payload.
    Padding,
    /// A block that cannot be decompressed.
    Compression,
    /// A header list above the size limit.
    Fields,
    /// A request with no authority or several, or trailers with an authority.
    Authority,
}

impl AuthorityRefusal {
    /// Label in metrics and logs.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Order => "order",
            Self::Length => "length",
            Self::Padding => "padding",
            Self::Compression => "compression",
            Self::Fields => "fields",
            Self::Authority => "authority",
        }
    }
}

/// The state of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShimState {
    /// No header block has arrived.
    Undecided,
    /// Every byte passes unchanged.
    Ordinary,
    /// Header blocks are rewritten.
    Odd,
    /// The connection ends.
    Refused(AuthorityRefusal),
}

/// The byte stream from one client to h2.
pub struct AuthorityShim {
    course: ShimState,
    at: ShimPosition,
    /// Received bytes, not yet processed.
    input: BytesMut,
    /// Bytes ready for h2.
    output: BytesMut,
    open: Option<OpenHeaderBlock>,
    /// The highest stream id seen in a header block.
    highest_stream: u32,
    table: HpackTable,
    /// Limit on a header list, counted as h2 counts.
    largest_list: usize,
}

/// Position within the input.
enum ShimPosition {
    Passing(usize),
    Frame,
}

/// An unfinished header block.
struct OpenHeaderBlock {
    stream: u32,
    flags: u8,
    priority: Bytes,
    block: BytesMut,
    /// The frames as received, kept while they may still have to pass unchanged.
    raw: BytesMut,
    frames: usize,
}

/// The header of a frame.
#[derive(Clone, Copy)]
struct FrameHead {
    length: usize,
    kind: u8,
    flags: u8,
    stream: u32,
}

impl AuthorityShim {
    /// A shim at the start of a connection. A header list larger than `limit` or `LARGEST_LIST` is refused.
    #[must_use]
    pub fn new(limit: usize) -> Self {
        Self {
            course: ShimState::Undecided,
            at: ShimPosition::Passing(PREFACE),
            input: BytesMut::new(),
            output: BytesMut::new(),
            open: None,
            highest_stream: 0,
            table: HpackTable::new(),
            largest_list: limit.min(LARGEST_LIST),
        }
    }

    /// A shim for a connection known to need rewriting.
    #[must_use]
    pub fn odd(limit: usize) -> Self {
        Self { course: ShimState::Odd, ..Self::new(limit) }
    }

    /// The connection's state.
    #[must_use]
    pub fn course(&self) -> ShimState {
        self.course
    }

    /// Adds received bytes.
    pub fn push(&mut self, bytes: &[u8]) {
        self.input.extend_from_slice(bytes);
    }

    /// Bytes ready for h2; empty if more input is needed.
    pub fn output(&mut self) -> &mut BytesMut {
        while self.output.len() < WAITING && self.step() {}
        &mut self.output
    }

    /// Number of bytes in memory.
    #[must_use]
    pub fn buffered_bytes(&self) -> usize {
        let open = self.open.as_ref().map_or(0, |open| open.block.len() + open.raw.len());
        self.input.len() + self.output.len() + open
    }

    /// Performs one step; false if more input is needed.
    fn step(&mut self) -> bool {
        if self.input.is_empty() {
            return false;
        }
        match (self.course, &mut self.at) {
            (ShimState::Refused(_), _) => self.input.clear(),
            (ShimState::Ordinary, _) => self.output.unsplit(self.input.split()),
            (_, ShimPosition::Passing(left)) => {
                let passes = self.input.split_to((*left).min(self.input.len()));
                *left -= passes.len();
                self.output.unsplit(passes);
                if *left == 0 {
                    self.at = ShimPosition::Frame;
                }
            }
            (_, ShimPosition::Frame) => {
                let Some(head) = FrameHead::read(&self.input) else { return false };
                if self.open.is_none() && head.kind != HEADERS && head.kind != CONTINUATION {
                    self.output.unsplit(self.input.split_to(HEAD));
                    self.at = ShimPosition::Passing(head.length);
                } else {
                    return self.header_frame(head).unwrap_or_else(|doubt| {
                        self.handle_doubt(doubt);
                        true
                    });
                }
            }
        }
        true
    }

    /// Handles one frame of a header block; false if the frame is incomplete.
    fn header_frame(&mut self, head: FrameHead) -> Result<bool, AuthorityRefusal> {
        let (so_far, frames) = match &self.open {
            None if head.kind == HEADERS => (0, 0),
            Some(open) if head.kind == CONTINUATION && head.stream == open.stream => {
                (open.block.len(), open.frames)
            }
            _ => return Err(AuthorityRefusal::Order),
        };
        if so_far + head.length > LARGEST || frames == FRAMES {
            return Err(AuthorityRefusal::Length);
        }
        if self.input.len() < HEAD + head.length {
            return Ok(false);
        }
        let frame = self.input.split_to(HEAD + head.length).freeze();
        let open = self.open.get_or_insert_with(|| OpenHeaderBlock::new(head));
        open.frames += 1;
        if self.course == ShimState::Undecided {
            open.raw.extend_from_slice(&frame);
        }
        let payload = frame.slice(HEAD..);
        let fragment = if head.kind == HEADERS { open.begin(head, payload)? } else { payload };
        open.block.extend_from_slice(&fragment);
        if head.flags & END_HEADERS != 0
            && let Some(open) = self.open.take()
        {
            self.complete_block(open)?;
        }
        Ok(true)
    }

    /// Handles a complete header block.
    fn complete_block(&mut self, open: OpenHeaderBlock) -> Result<(), AuthorityRefusal> {
        let fields = match self.table.read(&open.block, self.largest_list) {
            Err(_) if self.course == ShimState::Undecided => Vec::new(),
            read => read?,
        };
        if self.course == ShimState::Undecided {
            if !fields.iter().any(HpackField::is_odd_authority) {
                self.pass_unchanged(&open.raw);
                return Ok(());
            }
            self.course = ShimState::Odd;
        }
        let begins = open.stream > self.highest_stream;
        self.highest_stream = self.highest_stream.max(open.stream);
        let authorities = fields.iter().filter(|field| field.is_authority()).count();
        if authorities != usize::from(begins) {
            return Err(AuthorityRefusal::Authority);
        }
        let block = header_block::encode_block(&fields, AUTHORITY.as_bytes());
        open.write(&block, &mut self.output);
        Ok(())
    }

    /// Passes every byte unchanged from now on, beginning with `raw`.
    fn pass_unchanged(&mut self, raw: &[u8]) {
        self.course = ShimState::Ordinary;
        self.output.extend_from_slice(raw);
    }

    /// Handles a doubt: an undecided connection passes unchanged and h2 judges; a rewritten connection ends.
    fn handle_doubt(&mut self, doubt: AuthorityRefusal) {
        let open = self.open.take();
        if self.course == ShimState::Undecided {
            self.pass_unchanged(&open.map_or_else(BytesMut::new, |open| open.raw));
        } else {
            self.course = ShimState::Refused(doubt);
            self.output.extend_from_slice(&OFFENCE);
        }
    }
}

impl FrameHead {
    /// RFC 9113, section 4.1.
    fn read(bytes: &[u8]) -> Option<Self> {
        let &[high, middle, low, kind, flags, a, b, c, d] = bytes.first_chunk::<HEAD>()?;
        let length = usize::from(high) << 16 | usize::from(middle) << 8 | usize::from(low);
        Some(Self { length, kind, flags, stream: u32::from_be_bytes([a, b, c, d]) & !(1 << 31) })
    }

    fn write(self, output: &mut BytesMut) {
        output.put_uint(self.length as u64, 3);
        output.put_u8(self.kind);
        output.put_u8(self.flags);
        output.put_u32(self.stream);
    }
}

impl OpenHeaderBlock {
    fn new(head: FrameHead) -> Self {
        Self {
            stream: head.stream,
            flags: head.flags & (END_STREAM | PRIORITY),
            priority: Bytes::new(),
            block: BytesMut::new(),
            raw: BytesMut::new(),
            frames: 0,
        }
    }

    /// The first fragment of the block: a HEADERS payload without padding and priority (RFC 9113, section
    /// 6.2).
    fn begin(&mut self, head: FrameHead, mut payload: Bytes) -> Result<Bytes, AuthorityRefusal> {
        if head.flags & PADDED != 0 {
            let padding = usize::from(*payload.first().ok_or(AuthorityRefusal::Padding)?);
            let whole = payload.len() - 1;
            payload = payload.slice(1..=whole.checked_sub(padding).ok_or(AuthorityRefusal::Padding)?);
        }
        if head.flags & PRIORITY != 0 {
            if payload.len() < 5 {
                return Err(AuthorityRefusal::Padding);
            }
            self.priority = payload.split_to(5);
        }
        Ok(payload)
    }

    /// Writes the block with new bytes, in one frame. A list within `LARGEST_LIST` fits: each field counts
    /// 32 bytes beside name and value, and takes at most 7 to encode.
    fn write(&self, block: &[u8], output: &mut BytesMut) {
        let length = self.priority.len() + block.len();
        FrameHead { length, kind: HEADERS, flags: self.flags | END_HEADERS, stream: self.stream }
            .write(output);
        output.extend_from_slice(&self.priority);
        output.extend_from_slice(block);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `:method POST`, `:scheme http`, `:path /` by index, and the authority as a literal with indexing.
    fn request(authority: &[u8]) -> Vec<u8> {
        let length = u8::try_from(authority.len()).expect("short");
        [&[0x83, 0x86, 0x84, 0x41, length], authority].concat()
    }

    fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
        let mut bytes = BytesMut::new();
        FrameHead { length: payload.len(), kind, flags, stream }.write(&mut bytes);
        [&bytes, payload].concat()
    }

    fn preface() -> Vec<u8> {
        [&b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"[..], &frame(4, 0, 0, &[])].concat()
    }

    fn through(shim: &mut AuthorityShim, bytes: &[u8]) -> Vec<u8> {
        let mut made = Vec::new();
        for byte in bytes {
            shim.push(&[*byte]);
            made.extend_from_slice(&shim.output().split());
        }
        made
    }

    /// The fields of each header block, with the never-indexed flag.
    fn read(bytes: &[u8]) -> Vec<Vec<(String, String, bool)>> {
        let (mut shim, mut rest) = (HpackTable::new(), BytesMut::from(bytes));
        let mut blocks = Vec::new();
        while let Some(head) = FrameHead::read(&rest) {
            let frame = rest.split_to(HEAD + head.length);
            if head.kind == HEADERS {
                let fields = shim.read(&frame[HEAD..], usize::MAX).expect("a block");
                let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).expect("text");
                let told = |field: &HpackField| (text(&field.name), text(&field.value), field.never_indexed);
                blocks.push(fields.iter().map(told).collect());
            }
        }
        blocks
    }

    #[test]
    fn an_ordinary_connection_passes_byte_by_byte_and_is_out_of_our_hands() {
        for authority in ["etcd:2379", "[::1]:2379", "keyward.sock", "127.0.0.1"] {
            let mut shim = AuthorityShim::new(1 << 16);
            let bytes = [preface(), frame(HEADERS, END_HEADERS, 1, &request(authority.as_bytes()))].concat();
            assert_eq!(through(&mut shim, &bytes), bytes);
            assert_eq!((shim.course(), shim.buffered_bytes()), (ShimState::Ordinary, 0), "{authority}");
        }
    }

    #[test]
    fn an_odd_connection_has_its_authority_replaced_for_good_and_nothing_else() {
        for authority in
            ["#initially=[127.0.0.1:2379;127.0.0.1:3379]", "/run/keyward.sock", "run%2Fkeyward.sock", ""]
        {
            let mut shim = AuthorityShim::new(1 << 16);
            // A never-indexed token, then all fields by index; a body; trailers.
            let token = [&request(authority.as_bytes())[..], b"\x10\x05token\x03abc"].concat();
            let again = [0x83, 0x86, 0x84, 0xbe];
            let bytes = [
                preface(),
                frame(HEADERS, END_HEADERS, 1, &token),
                frame(0, 0, 1, b"body"),
                frame(HEADERS, END_HEADERS | END_STREAM, 1, b"\0\x01t\x01u"),
                frame(HEADERS, END_HEADERS, 3, &again),
            ]
            .concat();
            let made = through(&mut shim, &bytes);
            assert_eq!((shim.course(), shim.buffered_bytes()), (ShimState::Odd, 0), "{authority}");
            assert_eq!(made[..preface().len()], preface()[..]);
            let owned = |name: &str, value: &str, never| (name.to_owned(), value.to_owned(), never);
            let head = [
                owned(":method", "POST", false),
                owned(":scheme", "http", false),
                owned(":path", "/", false),
            ];
            let begun = [&head[..], &[owned(":authority", AUTHORITY, false)]].concat();
            let first = [&begun[..], &[owned("token", "abc", true)]].concat();
            assert_eq!(read(&made[24..]), [first, vec![owned("t", "u", false)], begun]);
            assert!(made.windows(4).any(|part| part == b"body"));
        }
    }

    #[test]
    fn padding_goes_and_priority_stays() {
        let mut shim = AuthorityShim::odd(1 << 16);
        let priority = [0x80, 0, 0, 0, 7];
        let payload = [&[3][..], &priority, &request(b"/x"), &[9, 9, 9]].concat();
        let bytes = frame(HEADERS, END_HEADERS | PADDED | PRIORITY, 1, &payload);
        let made = through(&mut shim, &[preface(), bytes].concat()).split_off(preface().len());
        let head = FrameHead::read(&made).expect("a frame");
        assert_eq!((head.flags, head.length), (END_HEADERS | PRIORITY, made.len() - HEAD));
        assert_eq!(made[HEAD..HEAD + 5], priority);
    }

    #[test]
    fn whatever_is_in_doubt_ends_an_odd_connection_and_passes_on_another() {
        let odd = || request(b"/x");
        let authority = |times: usize| [&[0x83, 0x86, 0x84][..], &b"\x41\x02/x".repeat(times)].concat();
        let parts = |count: usize| {
            let mut frames = frame(HEADERS, 0, 1, &odd());
            (1..count).for_each(|_| frames.extend(frame(CONTINUATION, 0, 1, &[])));
            frames.extend(frame(CONTINUATION, END_HEADERS, 1, &[]));
            frames
        };
        // Each indexed byte refers to the largest table entry.
        let bomb = [&odd()[..], b"\x40\x01n\x7f\xa1\x1e", &[b'v'; 4000], &[0xbe; 100]].concat();
        let cases = [
            (AuthorityRefusal::Order, [frame(HEADERS, 0, 1, &odd()), frame(0, 0, 1, b"")].concat()),
            (
                AuthorityRefusal::Order,
                [frame(HEADERS, 0, 1, &odd()), frame(CONTINUATION, 4, 3, b"")].concat(),
            ),
            (AuthorityRefusal::Order, frame(CONTINUATION, END_HEADERS, 1, &odd())),
            (AuthorityRefusal::Length, frame(HEADERS, END_HEADERS, 1, &[0x83; LARGEST + 1])),
            (AuthorityRefusal::Length, parts(FRAMES)),
            (AuthorityRefusal::Padding, frame(HEADERS, END_HEADERS | PADDED, 1, &[5, 0x83])),
            (AuthorityRefusal::Padding, frame(HEADERS, END_HEADERS | PADDED, 1, &[])),
            (AuthorityRefusal::Padding, frame(HEADERS, END_HEADERS | PRIORITY, 1, &[0; 4])),
            (AuthorityRefusal::Compression, frame(HEADERS, END_HEADERS, 1, &[0xff])),
            (AuthorityRefusal::Compression, frame(HEADERS, END_HEADERS, 1, &[0xbf])),
            (AuthorityRefusal::Compression, frame(HEADERS, END_HEADERS, 1, &[0x40])),
            (AuthorityRefusal::Compression, frame(HEADERS, END_HEADERS, 1, &[0x00, 0x01])),
            // A table size of 4097 bytes, and a table size change after a field.
            (
                AuthorityRefusal::Compression,
                frame(HEADERS, END_HEADERS, 1, &[&[0x3f, 0xe2, 0x1f][..], &odd()].concat()),
            ),
            (AuthorityRefusal::Compression, frame(HEADERS, END_HEADERS, 1, &[&odd()[..], &[0x20]].concat())),
            (AuthorityRefusal::Fields, frame(HEADERS, END_HEADERS, 1, &bomb)),
            (AuthorityRefusal::Authority, frame(HEADERS, END_HEADERS, 1, &authority(0))),
            (AuthorityRefusal::Authority, frame(HEADERS, END_HEADERS, 1, &authority(2))),
            (AuthorityRefusal::Authority, frame(HEADERS, END_HEADERS, 1, &odd()).repeat(2)),
        ];
        for (doubt, bytes) in cases {
            let mut shim = AuthorityShim::odd(1 << 16);
            let made = through(&mut shim, &[preface(), bytes.clone()].concat());
            assert_eq!(shim.course(), ShimState::Refused(doubt), "{bytes:x?}");
            assert!(made.ends_with(&OFFENCE));
            let mut shim = AuthorityShim::new(1 << 16);
            let ordinary = [preface(), frame(HEADERS, END_HEADERS, 1, &request(b"etcd")), bytes].concat();
            assert_eq!(through(&mut shim, &ordinary), ordinary);
        }
        let mut shim = AuthorityShim::odd(1 << 16);
        through(&mut shim, &[preface(), parts(FRAMES - 1)].concat());
        assert_eq!(shim.course(), ShimState::Odd, "as many frames as may be");
    }

    /// The limit on a list is below the limit on a frame, for any fields.
    #[test]
    fn the_largest_list_is_written_in_one_frame() {
        let largest_value = LARGEST_LIST - 300;
        // 16,084 in HPACK's integer encoding.
        let length = [0x7f, 0xd5, 0x7c];
        let block = [&request(b"/x")[..], b"\x40\x01n", &length, &vec![b'v'; largest_value]].concat();
        let payload = [&[0; 5], &block[..]].concat();
        let mut shim = AuthorityShim::odd(1 << 16);
        let made =
            through(&mut shim, &[preface(), frame(HEADERS, END_HEADERS | PRIORITY, 1, &payload)].concat());
        let head = FrameHead::read(&made[preface().len()..]).expect("a frame");
        assert_eq!(head.length, made.len() - preface().len() - HEAD);
        assert!((LARGEST_LIST - 400..=16 * 1024).contains(&head.length), "{}", head.length);
    }

    /// A block of a few bytes referring to table entries: the output is bounded, and is written only as it is
    /// read.
    #[test]
    fn what_is_made_of_one_block_is_bounded_and_nothing_is_made_before_it_is_read() {
        let field = [b"\x40\x01n\x7f\xe1\x06", &[b'v'; 992][..]].concat();
        let first = frame(HEADERS, END_HEADERS, 1, &[&request(b"/x")[..], &field].concat());
        let block = |fields: usize| [&[0x83, 0x86, 0x84, 0xbf][..], &vec![0xbe; fields]].concat();
        let mut shim = AuthorityShim::odd(1 << 16);
        through(&mut shim, &[preface(), first].concat());
        let second = |stream| frame(HEADERS, END_HEADERS, stream, &block(15));
        let largest = through(&mut shim, &second(3)).len();
        assert!((15 * 1000..=LARGEST_LIST).contains(&largest), "{largest}");
        let all: Vec<u8> = (2..200).flat_map(|nth| second(2 * nth + 1)).collect();
        shim.push(&all);
        assert!(shim.output().len() < WAITING + largest, "not more than one block beyond what may wait");
        let mut made = 0;
        while let length @ 1.. = shim.output().split().len() {
            made += length;
        }
        assert_eq!((made, shim.course()), (198 * largest, ShimState::Odd));
        let made = through(&mut shim, &frame(HEADERS, END_HEADERS, 999, &block(16)));
        assert_eq!(
            (shim.course(), made.len()),
            (ShimState::Refused(AuthorityRefusal::Fields), OFFENCE.len())
        );
    }
}
