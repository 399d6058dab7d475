//! A client that begins gets and resets them at once makes neither Keyward nor a member hold more than its streams are worth, and is told
//! to calm down; one that cancels much, as clients do, is not.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use keyward::members::membership::AuthSetting;
use keyward::refusal::Code;
use keyward::rpc::frame::encode;
use keyward::tasks::Tasks;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream, WriteHalf};
use tokio::runtime::Handle;

use crate::client::Stream;
use crate::member::Member;
use crate::rig::{Keyward, paused, settled, watching};
use crate::words::{RANGE, range, ranged};

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const GOAWAY: u8 = 7;
const CANCEL: u32 = 8;
const ENHANCE_YOUR_CALM: u32 = 11;

/// Streams that one connection may have open in these tests.
const STREAMS: usize = 256;
/// Past this many resets there is no allowance left, whatever is restored.
const FLOOD: u32 = 20_000;
/// Streams in one write.
const BATCH: u32 = 100;

/// A client that writes frames by hand.
struct Raw {
    write: WriteHalf<DuplexStream>,
    /// Why Keyward said goodbye, if it did.
    goodbye: Rc<Cell<Option<u32>>>,
    closed: Rc<Cell<bool>>,
    next: u32,
}

impl Raw {
    async fn connect(keyward: &Keyward) -> Self {
        let (mut read, mut write) = tokio::io::split(keyward.connect());
        let (goodbye, closed) = (Rc::<Cell<_>>::default(), Rc::<Cell<_>>::default());
        let told = (Rc::clone(&goodbye), Rc::clone(&closed));
        let listen = async move {
            loop {
                let mut head = [0; 9];
                if read.read_exact(&mut head).await.is_err() {
                    return told.1.set(true);
                }
                let mut payload = vec![0; u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize];
                if read.read_exact(&mut payload).await.is_err() {
                    return told.1.set(true);
                }
                if head[3] == GOAWAY {
                    told.0.set(payload[4..8].try_into().ok().map(u32::from_be_bytes));
                }
            }
        };
        keyward.tasks.spawn("a raw client", listen).detach();
        write.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await.expect("taken");
        write.write_all(&frame(SETTINGS, 0, 0, &[])).await.expect("taken");
        Self { write, goodbye, closed, next: 1 }
    }

    /// Begins gets and resets each at once. False when the connection is closed.
    async fn flood(&mut self) -> bool {
        let mut frames = Vec::new();
        for _ in 0..BATCH {
            frames.extend(get(self.next));
            frames.extend(frame(RST_STREAM, 0, self.next, &CANCEL.to_be_bytes()));
            self.next += 2;
        }
        self.write.write_all(&frames).await.is_ok() && !self.closed.get()
    }

    /// Begins gets; returns their streams.
    async fn begin(&mut self, count: u32) -> Vec<u32> {
        let streams: Vec<u32> = (0..count).map(|nth| self.next + 2 * nth).collect();
        self.next += 2 * count;
        let frames: Vec<u8> = streams.iter().flat_map(|stream| get(*stream)).collect();
        self.write.write_all(&frames).await.expect("taken");
        streams
    }

    async fn reset(&mut self, streams: &[u32]) -> bool {
        let resets = streams.iter().flat_map(|stream| frame(RST_STREAM, 0, *stream, &CANCEL.to_be_bytes()));
        let frames: Vec<u8> = resets.collect();
        self.write.write_all(&frames).await.is_ok()
    }
}

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).expect("small").to_be_bytes();
    let mut frame = vec![length[1], length[2], length[3], kind, flags];
    frame.extend(stream.to_be_bytes());
    frame.extend(payload);
    frame
}

/// A whole get: HEADERS and DATA.
fn get(stream: u32) -> Vec<u8> {
    let text = |text: &str| [&[u8::try_from(text.len()).expect("short")], text.as_bytes()].concat();
    // POST and http by their places in HPACK's static table; :path, :authority and content-type by the names there.
    let mut block = vec![0x83, 0x86, 0x04];
    block.extend(text(RANGE));
    block.push(0x01);
    block.extend(text("keyward.test"));
    block.extend([0x0f, 0x10]);
    block.extend(text("application/grpc"));
    block.push(0x00);
    block.extend(text("te"));
    block.extend(text("trailers"));
    let mut frames = frame(HEADERS, 4, stream, &block);
    frames.extend(frame(DATA, 1, stream, &encode(&range("flood"))));
    frames
}

/// A member that answers gets, but those of the flood.
struct Site {
    keyward: Keyward,
    floods: Rc<Cell<usize>>,
    waiting: Rc<RefCell<Vec<crate::member::Call>>>,
}

impl Site {
    fn new(lines: &str) -> Self {
        Self::with_streams(STREAMS, lines)
    }

    fn with_streams(streams: usize, lines: &str) -> Self {
        let tasks = Tasks::default();
        let member = Rc::new(Member::new(1, &tasks));
        let limits = format!("[limits]\nstreams_per_connection = {streams}\n{lines}[runtime]\nshards = 1\n");
        let keyward = Keyward::configured(&[&member], AuthSetting::Off, &limits);
        let floods = Rc::<Cell<usize>>::default();
        let waiting = Rc::<RefCell<Vec<_>>>::default();
        let (counted, kept, answering) = (Rc::clone(&floods), Rc::clone(&waiting), tasks.clone());
        let serve = async move {
            loop {
                let mut call = member.call().await;
                let (counted, kept) = (Rc::clone(&counted), Rc::clone(&kept));
                let answer = async move {
                    match call.messages.next().await {
                        Ok(message) if message[..] != range("flood")[..] => call.reply(&ranged(1)).await,
                        _ => {
                            counted.set(counted.get() + 1);
                            kept.borrow_mut().push(call);
                        }
                    }
                };
                answering.spawn("a scripted answer", answer).detach();
            }
        };
        tasks.spawn("a scripted member", serve).detach();
        Self { keyward, floods, waiting }
    }

    async fn others_are_served(&self) {
        let client = self.keyward.client().await;
        assert_eq!(client.call(RANGE, range("k")).await.end.code(), Some(Code::Ok));
    }
}

#[test]
fn gets_that_are_reset_at_once_pile_up_nowhere_and_their_client_is_told_to_calm_down() {
    paused(async {
        let site = Site::new("");
        site.others_are_served().await;
        let before = Handle::current().metrics().num_alive_tasks();
        let mut raw = Raw::connect(&site.keyward).await;
        let mut most = 0;
        while raw.next < 2 * FLOOD && raw.flood().await {
            most = most.max(Handle::current().metrics().num_alive_tasks());
            if raw.next % 1000 == 1 {
                site.others_are_served().await;
            }
        }
        // It is told why, and has a moment to read that.
        tokio::time::sleep(std::time::Duration::from_secs(1)).await;
        assert!(raw.closed.get(), "the connection was ended, after {} streams", raw.next / 2);
        assert_eq!(raw.goodbye.get(), Some(ENHANCE_YOUR_CALM));
        assert!(most - before <= 2 * STREAMS, "{most} tasks, {before} before");
        assert!(site.floods.get() <= STREAMS, "{} reached the member", site.floods.get());
        assert_eq!(site.keyward.metrics.connections_flooded.get(), 1);
        site.others_are_served().await;
        settled().await;
        assert_eq!(site.keyward.metrics.calls_open.get(), 0);
        let after = Handle::current().metrics().num_alive_tasks();
        assert!(after <= before + 16, "{after} tasks, {before} before");
    });
}

/// Counts, not times: of all that one client has sent already, little is served before another's single get.
#[test]
fn a_client_that_sends_much_at_once_is_served_in_turns_with_the_others() {
    const GETS: u32 = 1_500;
    paused(async {
        let site = Site::with_streams(4096, "");
        let client = site.keyward.client().await;
        assert_eq!(client.call(RANGE, range("k")).await.end.code(), Some(Code::Ok));
        let mut raw = Raw::connect(&site.keyward).await;
        settled().await;
        raw.begin(GETS).await;
        assert_eq!(client.call(RANGE, range("k")).await.end.code(), Some(Code::Ok));
        let before = site.floods.get();
        settled().await;
        assert_eq!(site.floods.get(), GETS as usize, "then the others are served");
        assert!((1..GETS as usize / 10).contains(&before), "{before} of {GETS} were served before");
    });
}

#[test]
fn gets_that_are_reset_while_a_member_has_them_are_taken_back_there() {
    paused(async {
        let site = Site::new("member_in_flight = 100\n");
        let mut raw = Raw::connect(&site.keyward).await;
        let mut rounds = 0;
        while raw.goodbye.get().is_none() && rounds < 1000 {
            let streams = raw.begin(BATCH).await;
            settled().await;
            raw.reset(&streams).await;
            settled().await;
            for mut call in site.waiting.take() {
                call.canceled().await;
            }
            site.others_are_served().await;
            rounds += 1;
        }
        assert_eq!(raw.goodbye.get(), Some(ENHANCE_YOUR_CALM), "after {rounds} rounds");
        assert!(rounds >= 2 * STREAMS / BATCH as usize, "not before two bursts of all streams: {rounds}");
        assert_eq!(site.floods.get(), rounds * BATCH as usize, "each reached the member, and no other did");
    });
}

/// Watches are answered at once, so cancelling them is no flood, however many there are.
#[test]
fn cancelled_watches_end_no_connection() {
    paused(async {
        let tasks = Tasks::default();
        let member = Member::new(1, &tasks);
        let limits = format!("[limits]\nstreams_per_connection = {STREAMS}\n");
        let keyward = Keyward::configured(&[&member], AuthSetting::Off, &limits);
        let client = keyward.client().await;
        for _ in 0..6 {
            let mut watches = Vec::new();
            // As many as a connection may have.
            for _ in 0..STREAMS - STREAMS / 8 {
                watches.push(watching(&client, &member).await);
            }
            let (streams, calls): (Vec<_>, Vec<_>) = watches.into_iter().unzip();
            streams.into_iter().for_each(Stream::cancel);
            settled().await;
            drop(calls);
        }
        assert!(!client.is_closed());
        assert_eq!(keyward.metrics.connections_flooded.get(), 0);
    });
}
