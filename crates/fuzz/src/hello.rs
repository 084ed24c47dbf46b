//! A process that says something else than hello to an endpoint that listens. The endpoint answers, or hangs up,
//! or waits; it holds nothing of the caller afterwards and welcomes the next.

use std::cell::RefCell;
use std::path::PathBuf;

use memferry_message::Endpoint;

use crate::attacker::Attacker;
use crate::script::Script;
use crate::support::{unique, until};

/// How many sockets, events and shared memories this process has. The fuzzer has pipes and files of its own, and
/// more of them when it wants to know the names of functions.
fn descriptors() -> usize {
    let folder = std::fs::read_dir("/proc/self/fd").expect("it can be read");
    let targets = folder.filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok());
    let is_counted = |target: &PathBuf| {
        let name = target.to_string_lossy();
        ["socket:", "anon_inode:", "/memfd:"].iter().any(|kind| name.starts_with(kind))
    };
    targets.filter(is_counted).count()
}

/// An endpoint, who is sent to it, and the descriptors of this process when nobody else was there.
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
        // The first caller makes an endpoint get what it keeps.
        scene.check_next();
        scene.descriptors = descriptors();
        scene
    }

    /// One that says what it should is welcome, and nothing is left of anybody.
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
