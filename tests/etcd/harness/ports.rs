//! Free ports, never the same one twice, neither within this process nor among the test processes of one machine.
//!
//! Owns: the blocks of ports that this process holds. Must not know who listens on them. Invariants: a port lies below the
//! kernel's ephemeral range, so no outgoing connection takes it while a killed member is down; the first port of a block stays
//! bound as long as the process lives, which is how other test processes see that the block is taken.

use std::{
    net::{Ipv4Addr, SocketAddr, TcpListener},
    ops::Range,
    process,
    sync::Mutex,
};

const BLOCK: u16 = 32;
const LOWEST: u16 = 10_000;

static HELD: Mutex<Held> = Mutex::new(Held { marks: Vec::new(), unused: 0..0 });

struct Held {
    marks: Vec<TcpListener>,
    unused: Range<u16>,
}

/// An address on loopback that nobody listens on and that no later call hands out again.
pub(crate) fn free() -> SocketAddr {
    let mut held = HELD.lock().expect("no holder panics");
    loop {
        match held.unused.next() {
            Some(port) if bind(port).is_some() => return SocketAddr::from((Ipv4Addr::LOCALHOST, port)),
            Some(_) => {}
            None => held.claim(),
        }
    }
}

impl Held {
    fn claim(&mut self) {
        let blocks = (ephemeral_start() - LOWEST) / BLOCK;
        let first = u16::try_from(process::id() % u32::from(blocks)).expect("less than a u16");
        let (base, mark) = (0..blocks)
            .map(|step| LOWEST + (first + step) % blocks * BLOCK)
            .find_map(|base| bind(base).map(|mark| (base, mark)))
            .expect("a block of ports is free");
        self.marks.push(mark);
        self.unused = base + 1..base + BLOCK;
    }
}

fn bind(port: u16) -> Option<TcpListener> {
    TcpListener::bind((Ipv4Addr::LOCALHOST, port)).ok()
}

/// Where the kernel starts to take ports for outgoing connections; a usable number where it does not say.
fn ephemeral_start() -> u16 {
    std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range")
        .ok()
        .and_then(|text| text.split_whitespace().next()?.parse().ok())
        .filter(|start| *start >= LOWEST + 100 * BLOCK)
        .unwrap_or(32_768)
}
