//! A process that sends something else than a connect request to a listening endpoint. The endpoint
//! replies, closes the socket, or waits; afterwards it holds no resource of that process and
//! accepts the next.

use std::cell::RefCell;
use std::path::PathBuf;

use memferry_message::Endpoint;

use crate::attacker::Attacker;
use crate::script::Script;
use memferry_testing::message::{unique, until};

/// The number of sockets, events and shared memories of this process. The fuzzer has pipes and
/// files of its own, and opens more to resolve symbols.
fn descriptors() -> usize {
    let folder = std::fs::read_dir("/proc/self/fd").expect("it can be read");
    let targets = folder.filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok());
    let is_counted = |target: &PathBuf| {
        let name = target.to_string_lossy();
        ["socket:", "anon_inode:", "/memfd:"].iter().any(|kind| name.starts_with(kind))
    };
    targets.filter(is_counted).count()
}

/// An endpoint, its attacker, and the descriptors of this process before any connection.
struct HelloFixture {
    prey: Endpoint,
    attacker: Attacker,
    descriptors: usize,
}

thread_local! {
    static SCENE: RefCell<Option<HelloFixture>> = const { RefCell::new(None) };
}

impl HelloFixture {
    fn new() -> Self {
        let prey = Endpoint::open(&unique("prey")).expect("an endpoint");
        let mut scene = Self { prey, attacker: Attacker::start(), descriptors: usize::MAX };
        // The first connection makes the endpoint allocate what it keeps.
        scene.check_next();
        scene.descriptors = descriptors();
        scene
    }

    /// A proper connect request is accepted, and nothing is left of the others.
    fn check_next(&mut self) {
        if !self.attacker.connect(&self.prey) {
            self.attacker = Attacker::start();
            assert!(self.attacker.connect(&self.prey), "a new process can connect");
        }
        self.attacker.disconnect(&self.prey);
        until("nothing is left of the callers", || {
            self.prey.progress();
            self.prey.peers().is_empty() && descriptors() <= self.descriptors
        });
    }
}

pub(crate) fn run(bytes: &[u8]) {
    SCENE.with_borrow_mut(|scene| {
        let scene = scene.get_or_insert_with(HelloFixture::new);
        let mut script = Script::new(bytes);
        while !script.is_empty() {
            let length = usize::from(script.byte()) + 1;
            if !scene.attacker.send_hello(&scene.prey, script.bytes(length)) {
                scene.attacker = Attacker::start();
            }
            scene.prey.progress();
        }
        scene.check_next();
    });
}
