//! Clients whose `:authority` is none: Go's clientv3 3.5.0 sends `#initially=[host:port]`, clients on unix sockets their path.
//! HTTP/2's library refuses the first as a malformed request, and would refuse all that follow.
//!
//! Owns: where frames begin and end on the way from such a client, and what becomes of its header blocks. Must not know:
//! sockets, what a request asks for. It is without I/O: bytes in, bytes out.
//! Invariants (rules 33): the first header block of a connection decides, once; where its authority is one, or where it cannot be
//! read, every byte passes as it came, and the library judges. Else each block of that connection is written anew with
//! [`AUTHORITY`] and no other change of what it says; all other frames pass. Whatever is in doubt then ends the connection with
//! a GOAWAY. What is held is bounded: one block as it came, its fields, and what was made of it.

mod block;

use bytes::{BufMut, Bytes, BytesMut};

use block::{Field, Table};

pub use block::TABLE;

/// What every request of such a client has for its authority from then on. Nobody reads it.
pub const AUTHORITY: &str = "keyward";
/// A header block as it came, in all of its frames together.
pub const LARGEST: usize = 16 * 1024;
/// How many frames it may come in.
pub const FRAMES: usize = 8;
/// Its header list, as RFC 9113 counts it (6.5.2), where the connection's own limit is not lower. What is written has no table, so that many
/// bytes are made of a block of a few that refers to what came before: the list is refused before anything of it is written.
pub const LARGEST_LIST: usize = 16 * 1024;
/// How much may wait to be read before more is made.
pub const WAITING: usize = 16 * 1024;

/// "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n": passes, and is the library's to judge.
const PREFACE: usize = 24;
const HEAD: usize = 9;
const HEADERS: u8 = 0x1;
const CONTINUATION: u8 = 0x9;
const END_STREAM: u8 = 0x1;
const END_HEADERS: u8 = 0x4;
const PADDED: u8 = 0x8;
const PRIORITY: u8 = 0x20;
/// A frame that no stream may have (DATA on stream 0): the library ends the connection with GOAWAY (`PROTOCOL_ERROR`) for it, in
/// order with all that it has said.
const OFFENCE: [u8; HEAD] = [0; HEAD];

/// Why a connection is ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Doubt {
    /// A block that another frame interrupts, or that goes on without having begun.
    Order,
    /// Longer than [`LARGEST`], or in more than [`FRAMES`] frames.
    Length,
    /// More padding than payload.
    Padding,
    /// It cannot be decompressed.
    Compression,
    /// Its fields are larger than a header list may be.
    Fields,
    /// A request with no authority, or several; or one after the end of the body.
    Authority,
}

impl Doubt {
    /// In metrics and logs.
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

/// What became of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Course {
    /// No header block has come.
    Undecided,
    /// Every byte passes.
    Ordinary,
    /// Header blocks are written anew.
    Odd,
    /// It ends.
    Refused(Doubt),
}

/// One connection's way from the client.
pub struct Shim {
    course: Course,
    at: At,
    /// What came and was not looked at.
    input: BytesMut,
    /// What is to be read.
    output: BytesMut,
    open: Option<Open>,
    /// The highest stream that has begun.
    last: u32,
    table: Table,
    /// Of a header list, as the library counts it.
    largest_list: usize,
}

/// Where in the bytes we are.
enum At {
    Passing(usize),
    Frame,
}

/// A header block that has begun.
struct Open {
    stream: u32,
    flags: u8,
    priority: Bytes,
    block: BytesMut,
    /// The frames as they came, while it may turn out that they pass.
    raw: BytesMut,
    frames: usize,
}

/// The head of a frame.
#[derive(Clone, Copy)]
struct Head {
    length: usize,
    kind: u8,
    flags: u8,
    stream: u32,
}

impl Shim {
    /// Before the first byte. A header list that is larger than `limit`, or than [`LARGEST_LIST`], is in doubt.
    #[must_use]
    pub fn new(limit: usize) -> Self {
        Self {
            course: Course::Undecided,
            at: At::Passing(PREFACE),
            input: BytesMut::new(),
            output: BytesMut::new(),
            open: None,
            last: 0,
            table: Table::new(),
            largest_list: limit.min(LARGEST_LIST),
        }
    }

    /// The same where it is known that the connection is of this kind.
    #[must_use]
    pub fn odd(limit: usize) -> Self {
        Self { course: Course::Odd, ..Self::new(limit) }
    }

    /// What has become of the connection.
    #[must_use]
    pub fn course(&self) -> Course {
        self.course
    }

    /// More that came.
    pub fn push(&mut self, bytes: &[u8]) {
        self.input.extend_from_slice(bytes);
    }

    /// What is to be read next; nothing where more must come first.
    pub fn made(&mut self) -> &mut BytesMut {
        while self.output.len() < WAITING && self.turn() {}
        &mut self.output
    }

    /// How many bytes it holds.
    #[must_use]
    pub fn held(&self) -> usize {
        let open = self.open.as_ref().map_or(0, |open| open.block.len() + open.raw.len());
        self.input.len() + self.output.len() + open
    }

    /// One step; false where it needs more.
    fn turn(&mut self) -> bool {
        if self.input.is_empty() {
            return false;
        }
        match (self.course, &mut self.at) {
            (Course::Refused(_), _) => self.input.clear(),
            (Course::Ordinary, _) => self.output.unsplit(self.input.split()),
            (_, At::Passing(left)) => {
                let passes = self.input.split_to((*left).min(self.input.len()));
                *left -= passes.len();
                self.output.unsplit(passes);
                if *left == 0 {
                    self.at = At::Frame;
                }
            }
            (_, At::Frame) => {
                let Some(head) = Head::read(&self.input) else { return false };
                if self.open.is_none() && head.kind != HEADERS && head.kind != CONTINUATION {
                    self.output.unsplit(self.input.split_to(HEAD));
                    self.at = At::Passing(head.length);
                } else {
                    return self.header_frame(head).unwrap_or_else(|doubt| {
                        self.doubtful(doubt);
                        true
                    });
                }
            }
        }
        true
    }

    /// A frame of a header block; false where it is not whole yet.
    fn header_frame(&mut self, head: Head) -> Result<bool, Doubt> {
        let (so_far, frames) = match &self.open {
            None if head.kind == HEADERS => (0, 0),
            Some(open) if head.kind == CONTINUATION && head.stream == open.stream => {
                (open.block.len(), open.frames)
            }
            _ => return Err(Doubt::Order),
        };
        if so_far + head.length > LARGEST || frames == FRAMES {
            return Err(Doubt::Length);
        }
        if self.input.len() < HEAD + head.length {
            return Ok(false);
        }
        let frame = self.input.split_to(HEAD + head.length).freeze();
        let open = self.open.get_or_insert_with(|| Open::new(head));
        open.frames += 1;
        if self.course == Course::Undecided {
            open.raw.extend_from_slice(&frame);
        }
        let payload = frame.slice(HEAD..);
        let fragment = if head.kind == HEADERS { open.begin(head, payload)? } else { payload };
        open.block.extend_from_slice(&fragment);
        if head.flags & END_HEADERS != 0
            && let Some(open) = self.open.take()
        {
            self.whole(open)?;
        }
        Ok(true)
    }

    /// A whole header block.
    fn whole(&mut self, open: Open) -> Result<(), Doubt> {
        let fields = match self.table.read(&open.block, self.largest_list) {
            Err(_) if self.course == Course::Undecided => Vec::new(),
            read => read?,
        };
        if self.course == Course::Undecided {
            if !fields.iter().any(Field::is_odd_authority) {
                self.passes(&open.raw);
                return Ok(());
            }
            self.course = Course::Odd;
        }
        let begins = open.stream > self.last;
        self.last = self.last.max(open.stream);
        let authorities = fields.iter().filter(|field| field.is_authority()).count();
        if authorities != usize::from(begins) {
            return Err(Doubt::Authority);
        }
        let block = block::written(&fields, AUTHORITY.as_bytes());
        open.write(&block, &mut self.output);
        Ok(())
    }

    /// From here on every byte passes, beginning with these.
    fn passes(&mut self, raw: &[u8]) {
        self.course = Course::Ordinary;
        self.output.extend_from_slice(raw);
    }

    /// Where it is not known to be odd, the library judges what came; else the connection ends.
    fn doubtful(&mut self, doubt: Doubt) {
        let open = self.open.take();
        if self.course == Course::Undecided {
            self.passes(&open.map_or_else(BytesMut::new, |open| open.raw));
        } else {
            self.course = Course::Refused(doubt);
            self.output.extend_from_slice(&OFFENCE);
        }
    }
}

impl Head {
    /// RFC 9113, 4.1.
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

impl Open {
    fn new(head: Head) -> Self {
        Self {
            stream: head.stream,
            flags: head.flags & (END_STREAM | PRIORITY),
            priority: Bytes::new(),
            block: BytesMut::new(),
            raw: BytesMut::new(),
            frames: 0,
        }
    }

    /// The first fragment of the block: the payload without what else a HEADERS frame has (RFC 9113, 6.2).
    fn begin(&mut self, head: Head, mut payload: Bytes) -> Result<Bytes, Doubt> {
        if head.flags & PADDED != 0 {
            let padding = usize::from(*payload.first().ok_or(Doubt::Padding)?);
            let whole = payload.len() - 1;
            payload = payload.slice(1..=whole.checked_sub(padding).ok_or(Doubt::Padding)?);
        }
        if head.flags & PRIORITY != 0 {
            if payload.len() < 5 {
                return Err(Doubt::Padding);
            }
            self.priority = payload.split_to(5);
        }
        Ok(payload)
    }

    /// The same block with other bytes, in one frame: a list of [`LARGEST_LIST`] is no longer, since each of its fields counts 32 bytes
    /// beside its name and value, and takes at most 7 to be written.
    fn write(&self, block: &[u8], output: &mut BytesMut) {
        let length = self.priority.len() + block.len();
        Head { length, kind: HEADERS, flags: self.flags | END_HEADERS, stream: self.stream }.write(output);
        output.extend_from_slice(&self.priority);
        output.extend_from_slice(block);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `:method POST`, `:scheme http`, `:path /` by index, and this authority as a literal that goes into the table.
    fn request(authority: &[u8]) -> Vec<u8> {
        let length = u8::try_from(authority.len()).expect("short");
        [&[0x83, 0x86, 0x84, 0x41, length], authority].concat()
    }

    fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
        let mut bytes = BytesMut::new();
        Head { length: payload.len(), kind, flags, stream }.write(&mut bytes);
        [&bytes, payload].concat()
    }

    fn preface() -> Vec<u8> {
        [&b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"[..], &frame(4, 0, 0, &[])].concat()
    }

    fn through(shim: &mut Shim, bytes: &[u8]) -> Vec<u8> {
        let mut made = Vec::new();
        for byte in bytes {
            shim.push(&[*byte]);
            made.extend_from_slice(&shim.made().split());
        }
        made
    }

    /// The fields of each header block, with whether it must never be indexed.
    fn read(bytes: &[u8]) -> Vec<Vec<(String, String, bool)>> {
        let (mut shim, mut rest) = (Table::new(), BytesMut::from(bytes));
        let mut blocks = Vec::new();
        while let Some(head) = Head::read(&rest) {
            let frame = rest.split_to(HEAD + head.length);
            if head.kind == HEADERS {
                let fields = shim.read(&frame[HEAD..], usize::MAX).expect("a block");
                let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).expect("text");
                let told = |field: &Field| (text(&field.name), text(&field.value), field.never_indexed);
                blocks.push(fields.iter().map(told).collect());
            }
        }
        blocks
    }

    #[test]
    fn an_ordinary_connection_passes_byte_by_byte_and_is_out_of_our_hands() {
        for authority in ["etcd:2379", "[::1]:2379", "keyward.sock", "127.0.0.1"] {
            let mut shim = Shim::new(1 << 16);
            let bytes = [preface(), frame(HEADERS, END_HEADERS, 1, &request(authority.as_bytes()))].concat();
            assert_eq!(through(&mut shim, &bytes), bytes);
            assert_eq!((shim.course(), shim.held()), (Course::Ordinary, 0), "{authority}");
        }
    }

    #[test]
    fn an_odd_connection_has_its_authority_replaced_for_good_and_nothing_else() {
        for authority in
            ["#initially=[127.0.0.1:2379;127.0.0.1:3379]", "/run/keyward.sock", "run%2Fkeyward.sock", ""]
        {
            let mut shim = Shim::new(1 << 16);
            // A token that must never be indexed, then everything by index; a body; trailers.
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
            assert_eq!((shim.course(), shim.held()), (Course::Odd, 0), "{authority}");
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
        let mut shim = Shim::odd(1 << 16);
        let priority = [0x80, 0, 0, 0, 7];
        let payload = [&[3][..], &priority, &request(b"/x"), &[9, 9, 9]].concat();
        let bytes = frame(HEADERS, END_HEADERS | PADDED | PRIORITY, 1, &payload);
        let made = through(&mut shim, &[preface(), bytes].concat()).split_off(preface().len());
        let head = Head::read(&made).expect("a frame");
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
        // Each time the whole table again.
        let bomb = [&odd()[..], b"\x40\x01n\x7f\xa1\x1e", &[b'v'; 4000], &[0xbe; 100]].concat();
        let cases = [
            (Doubt::Order, [frame(HEADERS, 0, 1, &odd()), frame(0, 0, 1, b"")].concat()),
            (Doubt::Order, [frame(HEADERS, 0, 1, &odd()), frame(CONTINUATION, 4, 3, b"")].concat()),
            (Doubt::Order, frame(CONTINUATION, END_HEADERS, 1, &odd())),
            (Doubt::Length, frame(HEADERS, END_HEADERS, 1, &[0x83; LARGEST + 1])),
            (Doubt::Length, parts(FRAMES)),
            (Doubt::Padding, frame(HEADERS, END_HEADERS | PADDED, 1, &[5, 0x83])),
            (Doubt::Padding, frame(HEADERS, END_HEADERS | PADDED, 1, &[])),
            (Doubt::Padding, frame(HEADERS, END_HEADERS | PRIORITY, 1, &[0; 4])),
            (Doubt::Compression, frame(HEADERS, END_HEADERS, 1, &[0xff])),
            (Doubt::Compression, frame(HEADERS, END_HEADERS, 1, &[0xbf])),
            (Doubt::Compression, frame(HEADERS, END_HEADERS, 1, &[0x40])),
            (Doubt::Compression, frame(HEADERS, END_HEADERS, 1, &[0x00, 0x01])),
            // A table of 4097 bytes, and one of another size after a field.
            (Doubt::Compression, frame(HEADERS, END_HEADERS, 1, &[&[0x3f, 0xe2, 0x1f][..], &odd()].concat())),
            (Doubt::Compression, frame(HEADERS, END_HEADERS, 1, &[&odd()[..], &[0x20]].concat())),
            (Doubt::Fields, frame(HEADERS, END_HEADERS, 1, &bomb)),
            (Doubt::Authority, frame(HEADERS, END_HEADERS, 1, &authority(0))),
            (Doubt::Authority, frame(HEADERS, END_HEADERS, 1, &authority(2))),
            (Doubt::Authority, frame(HEADERS, END_HEADERS, 1, &odd()).repeat(2)),
        ];
        for (doubt, bytes) in cases {
            let mut shim = Shim::odd(1 << 16);
            let made = through(&mut shim, &[preface(), bytes.clone()].concat());
            assert_eq!(shim.course(), Course::Refused(doubt), "{bytes:x?}");
            assert!(made.ends_with(&OFFENCE));
            let mut shim = Shim::new(1 << 16);
            let ordinary = [preface(), frame(HEADERS, END_HEADERS, 1, &request(b"etcd")), bytes].concat();
            assert_eq!(through(&mut shim, &ordinary), ordinary);
        }
        let mut shim = Shim::odd(1 << 16);
        through(&mut shim, &[preface(), parts(FRAMES - 1)].concat());
        assert_eq!(shim.course(), Course::Odd, "as many frames as may be");
    }

    /// The limit of a list is below that of a frame, whatever its fields are.
    #[test]
    fn the_largest_list_is_written_in_one_frame() {
        let largest_value = LARGEST_LIST - 300;
        // 16,084 as HPACK writes it.
        let length = [0x7f, 0xd5, 0x7c];
        let block = [&request(b"/x")[..], b"\x40\x01n", &length, &vec![b'v'; largest_value]].concat();
        let payload = [&[0; 5], &block[..]].concat();
        let mut shim = Shim::odd(1 << 16);
        let made =
            through(&mut shim, &[preface(), frame(HEADERS, END_HEADERS | PRIORITY, 1, &payload)].concat());
        let head = Head::read(&made[preface().len()..]).expect("a frame");
        assert_eq!(head.length, made.len() - preface().len() - HEAD);
        assert!((LARGEST_LIST - 400..=16 * 1024).contains(&head.length), "{}", head.length);
    }

    /// A block of a few bytes that refers to what the table has: what is made of it is bounded, and is made as it is read.
    #[test]
    fn what_is_made_of_one_block_is_bounded_and_nothing_is_made_before_it_is_read() {
        let field = [b"\x40\x01n\x7f\xe1\x06", &[b'v'; 992][..]].concat();
        let first = frame(HEADERS, END_HEADERS, 1, &[&request(b"/x")[..], &field].concat());
        let block = |fields: usize| [&[0x83, 0x86, 0x84, 0xbf][..], &vec![0xbe; fields]].concat();
        let mut shim = Shim::odd(1 << 16);
        through(&mut shim, &[preface(), first].concat());
        let second = |stream| frame(HEADERS, END_HEADERS, stream, &block(15));
        let largest = through(&mut shim, &second(3)).len();
        assert!((15 * 1000..=LARGEST_LIST).contains(&largest), "{largest}");
        let all: Vec<u8> = (2..200).flat_map(|nth| second(2 * nth + 1)).collect();
        shim.push(&all);
        assert!(shim.made().len() < WAITING + largest, "not more than one block beyond what may wait");
        let mut made = 0;
        while let length @ 1.. = shim.made().split().len() {
            made += length;
        }
        assert_eq!((made, shim.course()), (198 * largest, Course::Odd));
        let made = through(&mut shim, &frame(HEADERS, END_HEADERS, 999, &block(16)));
        assert_eq!((shim.course(), made.len()), (Course::Refused(Doubt::Fields), OFFENCE.len()));
    }
}
