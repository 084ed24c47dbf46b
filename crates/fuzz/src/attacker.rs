//! A process that attacks an endpoint by command. It is a process of its own because an endpoint
//! may write to any address that its peer sends, which then corrupts only the peer.

use std::io::{ErrorKind, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use memferry_message::Endpoint;
use memferry_message::ring::cells::CellWords;
use memferry_message::ring::claims::SenderProgress;
use memferry_sys::seqpacket::SeqPacketSocket;
use memferry_sys::shared_memory::{Protection, SealedMemory};

use crate::script::Script;
use memferry_testing::message::raw_peer::{self, RawPeer, first};
use memferry_testing::message::{TIMEOUT, unique, until};

/// The variable that makes a process an attacker: the socket of its commands.
const COMMANDS: &str = "MEMFERRY_FUZZ_ORDERS";

/// The variable that shows its error output, to debug the attacker itself.
const LOUD: &str = "MEMFERRY_FUZZ_LOUD";

/// The first byte of a command; the name of an endpoint follows the first two.
const CONNECT: u8 = 1;
const SEND_HELLO: u8 = 2;
const ATTACK: u8 = 3;
const DISCONNECT: u8 = 4;

/// The replies.
const DONE: u8 = 1;
const REFUSED: u8 = 2;

/// Runs the attacker and exits, if this process is to be one.
pub fn run_if_attacker() {
    let Ok(name) = std::env::var(COMMANDS) else { return };
    let address = SocketAddr::from_abstract_name(name).expect("a name");
    let orders = UnixStream::connect_addr(&address).expect("whoever gives orders listens");
    run_commands(orders);
    std::process::exit(0);
}

fn address(name: &str) -> SocketAddr {
    SocketAddr::from_abstract_name(name).expect("a name")
}

/// The attacker's process, as its parent sees it.
#[derive(Debug)]
pub(crate) struct Attacker {
    child: Child,
    commands: UnixStream,
}

impl Drop for Attacker {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Attacker {
    pub(crate) fn start() -> Self {
        let name = unique("memferry-fuzz");
        let listener = UnixListener::bind_addr(&address(&name)).expect("a name of its own");
        let program = std::env::current_exe().expect("this program");
        // Where this program is a test, it runs the test that becomes the attacker. The output of
        // an attacker is dropped: it may well crash.
        let said = if std::env::var_os(LOUD).is_some() { Stdio::inherit } else { Stdio::null };
        let child = Command::new(program)
            .args(["an_attacker_begins_here", "--exact"])
            .env(COMMANDS, &name)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(said())
            .spawn()
            .expect("the attacker starts");
        listener.set_nonblocking(true).expect("a socket");
        let mut orders = None;
        until("the attacker comes", || {
            orders = listener.accept().ok();
            orders.is_some()
        });
        let (orders, _) = orders.expect("it has come");
        orders.set_nonblocking(true).expect("a socket");
        Self { child, commands: orders }
    }

    /// Makes it connect to an endpoint properly. Returns `false` if it crashed; fails if it is
    /// refused.
    pub(crate) fn connect(&mut self, prey: &Endpoint) -> bool {
        match self.request(prey, CONNECT, &[prey.name().as_bytes()]) {
            Some(DONE) => true,
            Some(_) => panic!("the endpoint refuses who says what it should"),
            None => false,
        }
    }

    /// Makes it send something in place of a connect request.
    pub(crate) fn send_hello(&mut self, prey: &Endpoint, script: &[u8]) -> bool {
        let name = prey.name().as_bytes();
        self.command(prey, SEND_HELLO, &[&[name.len() as u8], name, script])
    }

    /// Makes it modify the memory that it shares with the endpoint.
    pub(crate) fn attack(&mut self, prey: &Endpoint, script: &[u8]) -> bool {
        self.command(prey, ATTACK, &[script])
    }

    pub(crate) fn disconnect(&mut self, prey: &Endpoint) -> bool {
        self.command(prey, DISCONNECT, &[])
    }

    /// Sends a command and drives the endpoint until it was executed. Returns `false` if the
    /// attacker crashed.
    fn command(&mut self, prey: &Endpoint, what: u8, parts: &[&[u8]]) -> bool {
        self.request(prey, what, parts).is_some()
    }

    fn request(&mut self, prey: &Endpoint, what: u8, parts: &[&[u8]]) -> Option<u8> {
        let order = [&[what], parts.concat().as_slice()].concat();
        let head = (order.len() as u32).to_le_bytes();
        self.commands.write_all(&[&head, order.as_slice()].concat()).ok()?;
        let deadline = Instant::now() + TIMEOUT;
        loop {
            prey.progress();
            let mut answer = [0];
            match self.commands.read(&mut answer) {
                Ok(count) => return (count == 1).then_some(answer[0]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(_) => return None,
            }
            assert!(Instant::now() < deadline, "the attacker waits for an answer in vain");
        }
    }
}

/// The state of an attacker.
#[derive(Default)]
struct AttackerState {
    peer: Option<RawPeer>,
    board: Option<SealedMemory>,
    connections: Vec<SeqPacketSocket>,
    /// Memory of its own, whose address it may send.
    memory: Vec<u8>,
    /// Cells that the endpoint has written.
    seen: Vec<CellWords>,
}

fn run_commands(mut orders: UnixStream) {
    let mut state = AttackerState { memory: vec![7; 4 << 20], ..AttackerState::default() };
    loop {
        let mut head = [0; 4];
        if orders.read_exact(&mut head).is_err() {
            return;
        }
        let mut order = vec![0; u32::from_le_bytes(head) as usize];
        if orders.read_exact(&mut order).is_err() {
            return;
        }
        let answer = if state.execute(order[0], &order[1..]) { DONE } else { REFUSED };
        if orders.write_all(&[answer]).is_err() {
            return;
        }
    }
}

impl AttackerState {
    /// Returns whether it was possible.
    fn execute(&mut self, what: u8, order: &[u8]) -> bool {
        match what {
            CONNECT => {
                let name = std::str::from_utf8(order).expect("a name");
                let board = raw_peer::board();
                self.peer = RawPeer::connect_with(name, raw_peer::identity(), "", &board);
                (self.board, self.seen) = (Some(board), Vec::new());
                return self.peer.is_some();
            }
            SEND_HELLO => {
                let mut script = Script::new(order);
                let length = script.byte().into();
                let name = std::str::from_utf8(script.bytes(length)).expect("a name").to_owned();
                self.send_hello(&name, script);
            }
            ATTACK => self.attack(Script::new(order)),
            _ => {
                self.peer = None;
                self.connections.clear();
            }
        }
        true
    }

    /// Something like a connect request, with some descriptors.
    fn send_hello(&mut self, name: &str, mut script: Script<'_>) {
        let choice = script.byte();
        let descriptors: Vec<OwnedFd> = (0..choice % 4)
            .filter_map(|_| {
                let length = script.pick(&[
                    memferry_message::ring::layout::CONNECTION_BYTES,
                    64 << 10,
                    8192,
                ]);
                let kinds = raw_peer::bad_memory(length);
                let at = script.below(kinds.len() + 2);
                let good =
                    || SealedMemory::new("good", length).ok()?.as_fd().try_clone_to_owned().ok();
                kinds.into_iter().nth(at).map(|kind| kind.1).or_else(good)
            })
            .collect();
        let probe = (self.memory.as_ptr() as u64, u64::from_le_bytes([7; 8]));
        let mut packet = raw_peer::hello(script.u64().into(), probe, "");
        // Truncated, or changed at one offset, or entirely different.
        let rest = script.bytes(400);
        match choice / 4 % 4 {
            0 => packet = rest.to_vec(),
            1 => packet.truncate(rest.len()),
            2 => packet.extend_from_slice(rest),
            _ => rest.chunks_exact(2).for_each(|change| {
                let at = usize::from(change[0]) % packet.len();
                packet[at] = change[1];
            }),
        }
        let socket = raw_peer::call(name);
        let borrowed: Vec<BorrowedFd<'_>> = descriptors.iter().map(AsFd::as_fd).collect();
        let _ = socket.send(&packet, &borrowed);
        self.connections.push(socket);
    }

    fn attack(&mut self, mut script: Script<'_>) {
        let Some(mut peer) = self.peer.take() else { return };
        while let Some(words) = peer.peek() {
            self.seen.push(words);
            peer.consumer.advance();
        }
        match script.byte() % 8 {
            0 | 1 => drop(peer.write(&self.cell(&mut script))),
            2 => {
                let words = [0; 8].map(|_: u64| script.u64());
                peer.write(&words);
            }
            3 => scribble(peer.bytes.as_ptr(), peer.bytes.len(), &mut script),
            4 => {
                if let Some(Ok(board)) =
                    self.board.as_ref().map(|board| board.map(Protection::ReadWrite))
                {
                    scribble(board.as_ptr(), board.len().min(4096), &mut script);
                }
            }
            5 => corrupt_claims(&peer, &mut script),
            6 => {
                if let Ok(memory) = SealedMemory::new("region", script.pick(&[4096, 1 << 20, 1])) {
                    peer.send_region(script.u32() % 4, memory.as_fd());
                }
            }
            _ => drop(peer.socket.send(script.bytes(9), &[])),
        }
        if script.flag() {
            peer.consumer.publish();
        }
        peer.wake();
        self.peer = Some(peer);
    }

    /// A cell that is valid, or nearly.
    fn cell(&self, script: &mut Script<'_>) -> CellWords {
        let mut words = [0; 8].map(|_: u64| self.number(script));
        words[0] = first(script.byte() % 14, script.byte(), script.u16());
        words
    }

    fn number(&self, script: &mut Script<'_>) -> u64 {
        match script.byte() % 6 {
            0 => self.memory.as_ptr() as u64 + u64::from(script.u16()),
            // An offset inside the bounce ring, or outside.
            1 => u64::from(script.u32() % (600 << 10)) << 32 | u64::from(script.u16()),
            2 if !self.seen.is_empty() => {
                let cell = self.seen[self.seen.len() - 1 - script.below(self.seen.len())];
                cell[script.below(8)]
            }
            3 => 1 << (script.byte() % 64),
            _ => script.number(),
        }
    }
}

/// Writes words of the script over a range of shared memory.
fn scribble(start: *mut u8, length: usize, script: &mut Script<'_>) {
    let words = length / 8;
    let at = script.below(words);
    let count = script.pick(&[1, 1, 2, 8, 64, 1024]);
    let (value, step) = (script.number(), u64::from(script.byte() % 3));
    for index in at..(at + count).min(words) {
        let value = value.wrapping_add(step.wrapping_mul(index as u64));
        // SAFETY: inside the mapping; races with the endpoint are intended.
        unsafe { start.cast::<u64>().add(index).write_volatile(value) };
    }
}

/// Opens, claims and finishes chunks, which need not exist.
fn corrupt_claims(peer: &RawPeer, script: &mut Script<'_>) {
    let claims = peer.memory.claims(script.flag(), script.below(32));
    let (generation, chunks) = (u16::from(script.byte() % 4), u64::from(script.byte() % 20));
    match script.byte() % 4 {
        0 => claims.open(generation),
        1 => drop(claims.close(generation, chunks)),
        2 => drop(claims.claim_back(generation, chunks)),
        _ => {
            let returned = script.flag().then_some(u64::from(script.byte() % 20));
            claims.publish(generation, SenderProgress { chunks, returned });
        }
    }
}
