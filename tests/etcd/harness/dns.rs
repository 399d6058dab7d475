//! A name server on loopback that says what a test has it say.
//!
//! Owns: its socket, its records, the bytes of a DNS message (RFC 1035, section 4; SRV: RFC 2782). Must not know who asks.

use std::cell::{Cell, RefCell};
use std::net::{Ipv4Addr, SocketAddr};
use std::rc::Rc;

use keyward::tasks::{TaskHandle, Tasks};
use tokio::net::UdpSocket;

/// What a name leads to.
#[derive(Clone, Debug)]
pub(crate) enum Record {
    A(Ipv4Addr),
    /// Port and target.
    Srv(u16, String),
}

const A: u16 = 1;
const SRV: u16 = 33;
/// Seconds.
const TTL: u32 = 1;

/// A running name server; every other name does not exist.
pub(crate) struct Dns {
    pub(crate) address: SocketAddr,
    records: Rc<RefCell<Vec<(String, Record)>>>,
    fails: Rc<Cell<bool>>,
    questions: Rc<Cell<usize>>,
    _serving: TaskHandle,
}

impl Dns {
    pub(crate) async fn start(tasks: &Tasks) -> Dns {
        let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a free port");
        let address = socket.local_addr().expect("it is bound");
        let records: Rc<RefCell<Vec<(String, Record)>>> = Rc::default();
        let (fails, questions) = (Rc::<Cell<bool>>::default(), Rc::<Cell<usize>>::default());
        let (known, broken, count) = (Rc::clone(&records), Rc::clone(&fails), Rc::clone(&questions));
        let serve = async move {
            let mut buffer = [0; 1500];
            while let Ok((length, peer)) = socket.recv_from(&mut buffer).await {
                count.set(count.get() + 1);
                let answer = answer(&buffer[..length], &known.borrow(), broken.get());
                if let Some(answer) = answer {
                    drop(socket.send_to(&answer, peer).await);
                }
            }
        };
        Dns { address, records, fails, questions, _serving: tasks.spawn("name server", serve) }
    }

    /// From now on this and nothing else.
    pub(crate) fn says(&self, records: Vec<(&str, Record)>) {
        self.records.replace(records.into_iter().map(|(name, record)| (name.to_owned(), record)).collect());
    }

    /// Whether it answers every question with a failure.
    pub(crate) fn fails(&self, fails: bool) {
        self.fails.set(fails);
    }

    /// How often it was asked.
    pub(crate) fn questions(&self) -> usize {
        self.questions.get()
    }
}

fn answer(question: &[u8], records: &[(String, Record)], fails: bool) -> Option<Vec<u8>> {
    let (name, end) = name(question, 12)?;
    let kind = u16::from_be_bytes(question.get(end..end + 2)?.try_into().ok()?);
    let known: Vec<&Record> =
        records.iter().filter(|(of, _)| of.eq_ignore_ascii_case(&name)).map(|(_, record)| record).collect();
    let data: Vec<Vec<u8>> = known
        .iter()
        .filter_map(|record| match (record, kind) {
            (Record::A(address), A) => Some(address.octets().to_vec()),
            (Record::Srv(port, target), SRV) => {
                Some([&[0, 1, 0, 1][..], &port.to_be_bytes(), &written(target)].concat())
            }
            _ => None,
        })
        .collect();
    // Answer, authoritative, recursion desired and available; then what is wrong: 2 is a failure, 3 that there is no such name.
    let code: u8 = if fails {
        2
    } else if known.is_empty() {
        3
    } else {
        0
    };
    let count = if fails { 0 } else { u16::try_from(data.len()).ok()? };
    let mut answer = question.get(..2)?.to_vec();
    answer.extend([0x85, 0x80 | code, 0, 1]);
    answer.extend(count.to_be_bytes());
    answer.extend([0, 0, 0, 0]);
    answer.extend(question.get(12..end + 4)?);
    for data in data.iter().take(usize::from(count)) {
        answer.extend([0xc0, 12]);
        answer.extend(kind.to_be_bytes());
        answer.extend([0, 1]);
        answer.extend(TTL.to_be_bytes());
        answer.extend(u16::try_from(data.len()).ok()?.to_be_bytes());
        answer.extend(data);
    }
    Some(answer)
}

/// The name that begins at `at`, and where it ends.
fn name(message: &[u8], mut at: usize) -> Option<(String, usize)> {
    let mut labels = Vec::new();
    loop {
        let length = usize::from(*message.get(at)?);
        at += 1;
        if length == 0 {
            return Some((labels.join("."), at));
        }
        labels.push(String::from_utf8_lossy(message.get(at..at + length)?).into_owned());
        at += length;
    }
}

fn written(name: &str) -> Vec<u8> {
    let label =
        |label: &str| [&[u8::try_from(label.len()).expect("a short label")], label.as_bytes()].concat();
    let mut bytes: Vec<u8> = name.split('.').flat_map(label).collect();
    bytes.push(0);
    bytes
}
