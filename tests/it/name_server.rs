//! A name server on loopback whose answers a test scripts, over UDP and TCP.
//!
//! Owns: its sockets, the bytes of a DNS message (RFC 1035, section 4). Must not know: who asks.

use std::cell::Cell;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::rc::Rc;
use std::time::Duration;

use keyward::tasks::{TaskHandle, Tasks};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, UdpSocket};
use tokio::sync::Semaphore;

pub(crate) const A: u16 = 1;
pub(crate) const AAAA: u16 = 28;
const CNAME: u16 = 5;
const OPT: u16 = 41;

/// A question, as the server sees it.
#[derive(Clone, Debug)]
pub(crate) struct Question {
    pub(crate) name: String,
    pub(crate) kind: u16,
    /// Counts the packets of this kind that came to this server, from 1: the questions for both families come
    /// in any order.
    pub(crate) of_kind: usize,
    pub(crate) over_tcp: bool,
    /// True with an OPT record (RFC 6891).
    pub(crate) extended: bool,
}

/// What the server does with a question.
#[derive(Clone, Debug)]
pub(crate) enum Reaction {
    Silence,
    /// A response code without records.
    Code(u8),
    /// These addresses, as far as they are of the asked family.
    Addresses(Vec<IpAddr>),
    /// The same below a chain of names, with a TTL of 0.
    Chain(Vec<IpAddr>),
    /// Nothing but the bit by which the rest is to be had over TCP.
    Truncated,
    /// The servers of another zone.
    Referral,
    Late(Duration, Box<Reaction>),
    /// As the other reaction, once the gate is closed for good, as a semaphore is.
    Held(Rc<Semaphore>, Box<Reaction>),
}

pub(crate) const FORMERR: u8 = 1;
pub(crate) const SERVFAIL: u8 = 2;
pub(crate) const NXDOMAIN: u8 = 3;
pub(crate) const NOTIMP: u8 = 4;
pub(crate) const REFUSED: u8 = 5;

pub(crate) type Script = Rc<dyn Fn(&Question) -> Reaction>;

/// A running name server.
pub(crate) struct NameServer {
    pub(crate) address: SocketAddr,
    script: Rc<std::cell::RefCell<Script>>,
    pub(crate) questions: Rc<Cell<usize>>,
    _serving: [TaskHandle; 2],
}

impl NameServer {
    /// At any port of an address; at `port`, if one is given. `None` if the port is taken.
    pub(crate) async fn start(tasks: &Tasks, at: (Ipv4Addr, u16), script: Script) -> Option<Self> {
        let datagrams = Rc::new(UdpSocket::bind(at).await.ok()?);
        let address = datagrams.local_addr().expect("it is bound");
        let listener = TcpListener::bind(address).await.ok()?;
        let (script, questions) = (Rc::new(std::cell::RefCell::new(script)), Rc::new(Cell::new(0)));
        let react = {
            let (script, questions) = (Rc::clone(&script), Rc::clone(&questions));
            let kinds = std::cell::RefCell::new(std::collections::HashMap::<u16, usize>::new());
            Rc::new(move |packet: &[u8], over_tcp| {
                questions.set(questions.get() + 1);
                let mut question = Question { over_tcp, ..read(packet)? };
                let mut kinds = kinds.borrow_mut();
                let of_kind = kinds.entry(question.kind).or_default();
                *of_kind += 1;
                question.of_kind = *of_kind;
                let reaction = script.borrow()(&question);
                Some((question, reaction))
            })
        };
        let (own, reacting, sockets) = (tasks.clone(), Rc::clone(&react), Rc::clone(&datagrams));
        let udp = async move {
            let mut buffer = [0; 1500];
            while let Ok((length, peer)) = sockets.recv_from(&mut buffer).await {
                let packet = buffer[..length].to_vec();
                let Some((question, reaction)) = reacting(&packet, false) else { continue };
                let socket = Rc::clone(&sockets);
                let answer = async move {
                    if let Some(answer) = answer(&packet, &question, reaction).await {
                        drop(socket.send_to(&answer, peer).await);
                    }
                };
                own.spawn("answer", answer).detach();
            }
        };
        let tcp = async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let Ok(length) = stream.read_u16().await else { continue };
                let mut packet = vec![0; usize::from(length)];
                if stream.read_exact(&mut packet).await.is_err() {
                    continue;
                }
                let Some((question, reaction)) = react(&packet, true) else { continue };
                if let Some(answer) = answer(&packet, &question, reaction).await {
                    let length = u16::try_from(answer.len()).expect("a short answer");
                    drop(stream.write_all(&[&length.to_be_bytes()[..], &answer].concat()).await);
                }
            }
        };
        let serving = [tasks.spawn("name server", udp), tasks.spawn("name server over TCP", tcp)];
        Some(Self { address, script, questions, _serving: serving })
    }

    /// From now on the server does this.
    pub(crate) fn does(&self, script: Script) {
        self.script.replace(script);
    }
}

/// Reads a question; `None` for anything else.
fn read(packet: &[u8]) -> Option<Question> {
    let (mut at, mut labels) = (12, Vec::new());
    while *packet.get(at)? != 0 {
        let length = usize::from(packet[at]);
        labels.push(String::from_utf8_lossy(packet.get(at + 1..at + 1 + length)?).into_owned());
        at += 1 + length;
    }
    let number = |at: usize| Some(u16::from_be_bytes(packet.get(at..at + 2)?.try_into().ok()?));
    let kind = number(at + 1)?;
    let extended = number(10)? > 0 && number(at + 6)? == OPT;
    Some(Question { name: labels.join("."), kind, of_kind: 0, over_tcp: false, extended })
}

async fn answer(packet: &[u8], question: &Question, mut reaction: Reaction) -> Option<Vec<u8>> {
    loop {
        reaction = match reaction {
            Reaction::Late(time, then) => {
                tokio::time::sleep(time).await;
                *then
            }
            Reaction::Held(gate, then) => {
                gate.acquire().await.expect_err("the gate has no permits");
                *then
            }
            _ => break,
        };
    }
    let end = 12 + question.name.len() + 2 + 4;
    let record = |owner: &[u8], kind: u16, ttl: u32, data: &[u8]| {
        let length = u16::try_from(data.len()).expect("short data");
        [owner, &kind.to_be_bytes(), &[0, 1], &ttl.to_be_bytes(), &length.to_be_bytes(), data].concat()
    };
    let written = |addresses: &[IpAddr], owner: &[u8], ttl| {
        let data = addresses.iter().filter_map(|address| match (address, question.kind) {
            (IpAddr::V4(address), A) => Some(address.octets().to_vec()),
            (IpAddr::V6(address), AAAA) => Some(address.octets().to_vec()),
            _ => None,
        });
        data.map(|data| record(owner, question.kind, ttl, &data)).collect::<Vec<_>>()
    };
    const ASKED: &[u8] = &[0xc0, 12];
    let (mut code, mut truncated, mut authority) = (0, 0, Vec::new());
    let answers = match reaction {
        Reaction::Silence | Reaction::Late(..) | Reaction::Held(..) => return None,
        Reaction::Code(other) => {
            code = other;
            Vec::new()
        }
        Reaction::Truncated => {
            truncated = 2;
            Vec::new()
        }
        Reaction::Addresses(addresses) => written(&addresses, ASKED, 60),
        Reaction::Chain(addresses) => {
            let (one, two) = (b"\x03one\x07example\x00", b"\x03two\x07example\x00");
            let chain = [record(ASKED, CNAME, 0, one), record(one, CNAME, 0, two)];
            chain.into_iter().chain(written(&addresses, two, 0)).collect()
        }
        Reaction::Referral => {
            authority = record(b"\x07example\x00", 2, 60, b"\x02ns\x07example\x00");
            Vec::new()
        }
    };
    let mut message = packet.get(..2)?.to_vec();
    message.extend([0x81 | truncated, 0x80 | code, 0, 1]);
    message.extend(u16::try_from(answers.len()).expect("few answers").to_be_bytes());
    message.extend([0, u8::from(!authority.is_empty()), 0, 0]);
    message.extend(packet.get(12..end)?);
    message.extend(answers.concat());
    message.extend(authority);
    Some(message)
}

pub(crate) fn v4(last: u8) -> IpAddr {
    Ipv4Addr::new(10, 0, 0, last).into()
}

pub(crate) fn v6(last: u16) -> IpAddr {
    Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, last).into()
}
