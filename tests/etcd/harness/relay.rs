//! A TCP relay in front of a member: where a test cuts what Keyward and the member say to each other.
//!
//! Owns: its address and the connections through it. Must not know what is said. Invariants: a closed relay refuses and has no
//! connection; a cut comes after exactly so many bytes of the member's as were asked for.

use std::cell::{Cell, RefCell};
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use keyward::tasks::{TaskHandle, Tasks};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until};

use super::{ports, wait};

/// For clients that lost their connection to come again.
const LIMIT: Duration = Duration::from_secs(60);

/// A relay; closed at first.
pub(crate) struct Relay {
    /// Where it listens.
    pub(crate) address: SocketAddr,
    state: Rc<State>,
    _accepting: TaskHandle,
}

struct State {
    targets: RefCell<Vec<SocketAddr>>,
    /// Which of them is next.
    next: Cell<usize>,
    /// What it says to the target before anything of the client's.
    introduction: RefCell<Vec<u8>>,
    /// How much later the member is heard.
    delay: Cell<Duration>,
    /// Bytes of the member's that still pass before a cut, where one is wanted.
    left: Cell<Option<usize>>,
    cuts: Cell<usize>,
    accepted: Cell<usize>,
    /// Held by each connection while it lives.
    live: Rc<()>,
    connections: RefCell<Vec<TaskHandle>>,
}

impl Relay {
    /// A relay on a port of its own.
    pub(crate) async fn start(tasks: &Tasks) -> Relay {
        Relay::at(ports::free(), tasks).await
    }

    /// A relay at this address, which nobody else listens on.
    pub(crate) async fn at(address: SocketAddr, tasks: &Tasks) -> Relay {
        let listener = TcpListener::bind(address).await.expect("a free port");
        let state = Rc::new(State {
            targets: RefCell::default(),
            next: Cell::default(),
            introduction: RefCell::default(),
            delay: Cell::default(),
            left: Cell::default(),
            cuts: Cell::default(),
            accepted: Cell::default(),
            live: Rc::default(),
            connections: RefCell::default(),
        });
        let (this, pumps) = (Rc::clone(&state), tasks.clone());
        let accept = async move {
            while let Ok((near, _)) = listener.accept().await {
                let targets = this.in_turn();
                if targets.is_empty() {
                    continue;
                }
                let (pump, live) = (pump(Rc::clone(&this), near, targets), Rc::clone(&this.live));
                let pump = async move {
                    pump.await;
                    drop(live);
                };
                this.accepted.set(this.accepted.get() + 1);
                this.connections.borrow_mut().push(pumps.spawn("relay", pump));
            }
        };
        Relay { address, state, _accepting: tasks.spawn("relay accepts", accept) }
    }

    /// Lets connections through from now on.
    pub(crate) fn open(&self, target: SocketAddr) {
        self.open_all(&[target]);
    }

    /// The same to one of these, each in turn, as a balancer does; one that refuses is passed over.
    pub(crate) fn open_all(&self, targets: &[SocketAddr]) {
        self.state.targets.replace(targets.to_vec());
    }

    /// Says this to the target first, on each connection from now on, as a balancer does.
    pub(crate) fn introduce(&self, header: Vec<u8>) {
        self.state.introduction.replace(header);
    }

    /// What the member says from now on comes so much later, in its order.
    pub(crate) fn delay(&self, delay: Duration) {
        self.state.delay.set(delay);
    }

    /// Cuts every connection; later ones go to `target`: a name that leads elsewhere from now on.
    pub(crate) fn turn_to(&self, target: SocketAddr) {
        self.open(target);
        self.state.cut();
    }

    /// The same, to one of these each, and returns when as many connections as were cut have come anew: what was in flight
    /// has ended by then.
    pub(crate) async fn turn_all_to(&self, targets: &[SocketAddr]) {
        let wanted = self.state.accepted.get() + Rc::strong_count(&self.state.live) - 1;
        self.open_all(targets);
        self.state.cut();
        let all = async || (self.state.accepted.get() >= wanted).then_some(());
        wait::until(LIMIT, "the connections come anew", all).await;
    }

    /// Cuts every connection once this many more bytes came from the member; later ones pass.
    pub(crate) fn cut_after(&self, bytes: usize) {
        self.state.left.set(Some(bytes));
    }

    /// How many connections there are.
    pub(crate) fn live(&self) -> usize {
        Rc::strong_count(&self.state.live) - 1
    }

    /// How many connections it has let through.
    pub(crate) fn accepted(&self) -> usize {
        self.state.accepted.get()
    }

    /// How many cuts there were.
    pub(crate) fn cuts(&self) -> usize {
        self.state.cuts.get()
    }
}

impl State {
    /// The targets, beginning with the one whose turn it is.
    fn in_turn(&self) -> Vec<SocketAddr> {
        let mut targets = self.targets.borrow().clone();
        let turn = self.next.replace(self.next.get().wrapping_add(1));
        let first = turn.checked_rem(targets.len()).unwrap_or(0);
        targets.rotate_left(first);
        targets
    }

    /// How many of these bytes still pass.
    fn pass(&self, bytes: usize) -> usize {
        let Some(left) = self.left.get() else { return bytes };
        self.left.set(Some(left - bytes.min(left)));
        bytes.min(left)
    }

    fn cut(&self) {
        self.left.set(None);
        self.cuts.set(self.cuts.get() + 1);
        self.connections.borrow_mut().clear();
    }
}

async fn pump(state: Rc<State>, near: TcpStream, targets: Vec<SocketAddr>) {
    let Some(mut far) = reached(targets).await else { return };
    let introduction = state.introduction.borrow().clone();
    if far.write_all(&introduction).await.is_err() {
        return;
    }
    near.set_nodelay(true).and(far.set_nodelay(true)).expect("TCP takes nodelay");
    let ((mut from_near, to_near), (from_far, mut to_far)) = (near.into_split(), far.into_split());
    tokio::select! {
        _ = tokio::io::copy(&mut from_near, &mut to_far) => {}
        () = down(&state, from_far, to_near) => {}
    }
}

async fn reached(targets: Vec<SocketAddr>) -> Option<TcpStream> {
    for target in targets {
        if let Ok(far) = TcpStream::connect(target).await {
            return Some(far);
        }
    }
    None
}

/// What is on its way may pile up so far.
const ON_ITS_WAY: usize = 1024;

async fn down(state: &State, mut from: OwnedReadHalf, mut to: OwnedWriteHalf) {
    let (enter, mut leave) = mpsc::channel::<(Instant, Vec<u8>)>(ON_ITS_WAY);
    let read = async move {
        let mut buffer = vec![0; 64 * 1024];
        while let Ok(read) = from.read(&mut buffer).await {
            if read == 0
                || enter.send((Instant::now() + state.delay.get(), buffer[..read].to_vec())).await.is_err()
            {
                return;
            }
        }
    };
    let write = async {
        while let Some((at, bytes)) = leave.recv().await {
            if at > Instant::now() {
                sleep_until(at).await;
            }
            let passed = state.pass(bytes.len());
            if to.write_all(&bytes[..passed]).await.is_err() {
                return;
            }
            if state.left.get() == Some(0) {
                // Ends this one too, at its next wait.
                return state.cut();
            }
        }
    };
    // What was read is still written when the member has said its last.
    tokio::select! {
        _ = async { tokio::join!(read, std::future::pending::<()>()) } => {}
        () = write => {}
    }
}
