//! Messages and windows with a peer that writes arbitrary bytes into all shared memory. Every
//! operation with it ends in time; no byte is written outside the given memory; an honest peer is
//! still served.

use std::cell::RefCell;

use memferry_message::{
    Endpoint, EndpointBuilder, Operation, OwnedOperation, Peer, RemoteWindow, Rights, Source,
    TAG_ALL, TAG_ANY, Window, WindowHandle,
};

use crate::attacker::Attacker;
use crate::script::Script;
use memferry_testing::message::memory::GuardedBuffer;
use memferry_testing::message::{Pair, pair, until};
use memferry_testing::pattern::{fill, first_wrong};

/// The tag of messages with the honest peer.
const HONEST: u64 = 0x1234_5678_9ABC_DEF0;
/// Maximum number of operations in flight.
const MAX_IN_FLIGHT: usize = 12;
const LENGTHS: [usize; 8] = [0, 8, 48, 3000, 20_000, 100_000, 600_000, 2 << 20];

struct RingFixture {
    pair: Pair,
    attacker: Attacker,
}

thread_local! {
    static FIXTURES: RefCell<Vec<RingFixture>> = const { RefCell::new(Vec::new()) };
}

pub(crate) fn run(bytes: &[u8]) {
    FIXTURES.with_borrow_mut(|settings| {
        if settings.is_empty() {
            let builders = [EndpointBuilder::new(), EndpointBuilder::new().background(true), {
                EndpointBuilder::new().cross_memory(false)
            }];
            let start = |builder| RingFixture { pair: pair(builder), attacker: Attacker::start() };
            settings.extend(builders.iter().map(start));
        }
        let mut script = Script::new(bytes);
        let at = script.below(settings.len());
        settings[at].play(script);
    });
}

/// A send or a receive with the attacker, and its memory.
struct Message {
    operation: Operation,
    memory: GuardedBuffer,
    /// The seed of the sent bytes.
    sent: Option<u64>,
}

/// The operations in flight with an attacker.
#[derive(Default)]
struct Activity {
    messages: Vec<Message>,
    attached: Vec<RemoteWindow>,
    accesses: Vec<OwnedOperation<Vec<u8>>>,
    exposed: Vec<Window<Vec<u8>>>,
}

impl RingFixture {
    fn play(&mut self, mut script: Script<'_>) {
        let prey = self.pair.here.clone();
        if !self.attacker.connect(&prey) {
            self.attacker = Attacker::start();
            assert!(self.attacker.connect(&prey), "a new process can connect");
        }
        let mut peers = prey.peers().into_iter();
        let peer = peers.find(|peer| *peer != self.pair.to_there).expect("it has connected");
        let mut dealings = Activity::default();
        while !script.is_empty() {
            if script.flag() {
                let length = usize::from(script.byte() % 80);
                if !self.attacker.attack(&prey, script.bytes(length)) {
                    break;
                }
            } else {
                dealings.step(&prey, peer, &mut script);
            }
            prey.progress();
        }
        if !self.attacker.disconnect(&prey) {
            self.attacker = Attacker::start();
        }
        dealings.finish(&prey);
        until("the attacker is forgotten", || {
            prey.progress();
            prey.peers().len() == 1
        });
        discard_unexpected(&prey);
        self.exchange(script.byte().into());
    }

    /// A message to the honest peer and back.
    fn exchange(&self, seed: u64) {
        let length = LENGTHS[seed as usize % 6];
        for (from, to, source) in [
            (&self.pair.here, &self.pair.there, self.pair.to_here),
            (&self.pair.there, &self.pair.here, self.pair.to_there),
        ] {
            let target =
                if source == self.pair.to_here { self.pair.to_there } else { self.pair.to_here };
            let mut bytes = vec![0; length];
            fill(&mut bytes, seed);
            let mut send = from.isend(target, HONEST, bytes).expect("the honest peer is there");
            let mut receive =
                to.irecv(source, HONEST, TAG_ALL, vec![0; length]).expect("it is there");
            until("the honest peer is served", || {
                from.progress();
                to.progress();
                send.is_done() && receive.is_done()
            });
            drop(send.wait().expect("it is sent"));
            let (_, bytes) = receive.wait().expect("it is received");
            assert_eq!(first_wrong(&bytes, seed), None);
        }
    }
}

/// Receives unexpected messages.
fn discard_unexpected(prey: &Endpoint) {
    while let Ok(Some(gift)) = prey.iprobe(Source::Any, 0, TAG_ANY) {
        if gift.tag == HONEST || prey.recv(gift.source, gift.tag, TAG_ALL, &mut [0; 100]).is_err() {
            break;
        }
    }
}

impl Activity {
    /// Starts an operation with the attacker, or makes progress on those in flight.
    fn step(&mut self, prey: &Endpoint, peer: Peer, script: &mut Script<'_>) {
        match script.byte() % 8 {
            0 | 1 if self.messages.len() < MAX_IN_FLIGHT => self.start_message(prey, peer, script),
            2 if !self.messages.is_empty() => {
                let at = script.below(self.messages.len());
                self.messages[at].operation.cancel();
            }
            3 => self.attach(prey, peer, script),
            4 | 5 if !self.attached.is_empty() && self.accesses.len() < MAX_IN_FLIGHT => {
                let window = &self.attached[script.below(self.attached.len())];
                let (offset, bytes) = (script.number(), vec![3; script.pick(&LENGTHS)]);
                let begun = if script.flag() {
                    window.iput(offset, bytes).ok()
                } else {
                    window.iget(offset, bytes).ok()
                };
                self.accesses.extend(begun);
            }
            6 if self.exposed.len() < MAX_IN_FLIGHT => {
                let exposed = prey.expose(vec![1; script.pick(&LENGTHS)], Rights::READ_WRITE);
                self.exposed.extend(exposed.ok());
            }
            7 if !self.exposed.is_empty() => {
                drop(self.exposed.swap_remove(script.below(self.exposed.len())).withdraw());
            }
            _ => drop(prey.iprobe(peer, 0, TAG_ANY)),
        }
        self.poll();
    }

    fn start_message(&mut self, prey: &Endpoint, peer: Peer, script: &mut Script<'_>) {
        let (length, tag) = (script.pick(&LENGTHS), u64::from(script.byte() % 4));
        let mut memory = GuardedBuffer::new(length, script.flag());
        let at = memory.address();
        let sent = script.flag().then_some(tag);
        // SAFETY: the memory is kept until the operation is complete.
        let begun = unsafe {
            if sent.is_some() {
                fill(memory.bytes_mut(), tag);
                prey.isend_raw(peer, tag, at, length)
            } else {
                prey.irecv_raw(peer, tag, script.pick(&[0, 1, TAG_ALL]), at, length)
            }
        };
        if let Ok(operation) = begun {
            self.messages.push(Message { operation, memory, sent });
        }
    }

    /// Attaches a window that the attacker may or may not publish.
    fn attach(&mut self, prey: &Endpoint, peer: Peer, script: &mut Script<'_>) {
        let mut bytes = [0; WindowHandle::BYTES];
        let given = script.bytes(WindowHandle::BYTES);
        bytes[..given.len()].copy_from_slice(given);
        if let Ok(handle) = WindowHandle::from_bytes(bytes) {
            self.attached.extend(prey.attach(peer, handle).ok());
        }
    }

    /// Checks complete operations.
    fn poll(&mut self) {
        for at in (0..self.messages.len()).rev() {
            if self.messages[at].operation.test().is_none() {
                continue;
            }
            let Message { memory, sent, .. } = self.messages.swap_remove(at);
            memory.check_guards();
            if let Some(seed) = sent {
                assert_eq!(first_wrong(memory.bytes(), seed), None, "what was sent has changed");
            }
        }
        for at in (0..self.accesses.len()).rev() {
            if self.accesses[at].is_done() {
                drop(self.accesses.swap_remove(at).wait());
            }
        }
    }

    /// Waits until everything is complete: the attacker has disconnected.
    fn finish(mut self, prey: &Endpoint) {
        until("everything with the attacker has ended", || {
            prey.progress();
            self.poll();
            self.messages.is_empty() && self.accesses.is_empty()
        });
        self.exposed.drain(..).for_each(|window| drop(window.withdraw()));
    }
}
