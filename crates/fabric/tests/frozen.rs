//! A peer that is stopped while it writes to the memory of a receive: the endpoint says that it is busy
//! for as long as the memory is not the program's alone.

#![allow(dead_code, reason = "other tests use the rest of what this shares with them")]

#[path = "../../message/tests/support/memory.rs"]
mod memory;
#[path = "../../message/tests/support/process.rs"]
mod process;
#[path = "../../message/tests/support/raw_peer.rs"]
mod raw_peer;
#[path = "../../message/tests/support/stopping.rs"]
mod stopping;
#[path = "provider/world.rs"]
mod world;

use std::fmt::Write;
use std::time::{Duration, Instant};

use memferry_fi::abi::FI_EBUSY;
use stopping::{BYTES, Stopping};
use world::{Side, World, close, move_all_on};

/// Long enough for anything that ends at all, on a busy machine too.
const PATIENCE: Duration = Duration::from_secs(60);

/// Asks until it is so; fails if it never is.
fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < deadline, "waited in vain until {what}");
        std::thread::yield_now();
    }
}

/// A name that no other process uses.
fn unique(name: &str) -> String {
    format!("{name}-{}", std::process::id())
}

#[test]
fn other_processes_begin_here() {
    if process::role().as_deref() == Some("claimer") {
        stopping::claimer();
    }
}

/// The name under which an endpoint listens: its identifier, which follows the first word of its address.
fn listening_name(side: &Side) -> String {
    side.name()[4..20].iter().fold("fi:".to_owned(), |mut name, byte| {
        write!(name, "{byte:02x}").unwrap();
        name
    })
}

#[test]
fn an_endpoint_is_busy_while_a_stopped_peer_may_write_to_memory_of_a_receive() {
    for ends in [false, true] {
        until("a chunk was left", || closes_when_the_peer_is_out(ends));
    }
}

/// `false` if the receiver was faster than its peer.
fn closes_when_the_peer_is_out(ends: bool) -> bool {
    let world = World::new();
    let side = world.side();
    let mut memory = vec![0u8; BYTES];
    assert_eq!(side.trecv(&mut memory, 1, 0, 7), 0);
    let mut child = Stopping::spawn("claimer", &listening_name(&side), false);
    // Its end is that of the thread that started it.
    let was_stopped = std::thread::scope(|scope| {
        let claiming = scope.spawn(|| child.has_claimed());
        until("it has claimed, or nothing is left", || {
            move_all_on();
            claiming.is_finished()
        });
        claiming.join().unwrap()
    });
    if was_stopped {
        for _ in 0..2 {
            assert_eq!(close(side.ep.cast()), -FI_EBUSY, "a peer may still write to the memory");
        }
        assert_eq!(close(side.queue.cast()), -FI_EBUSY, "the endpoint is still there");
        if ends {
            child.child.kill();
        } else {
            child.signal(libc::SIGCONT);
            assert_eq!(child.hear(), b'w');
        }
        // The last of these closes it.
        until("it is closed", || close(side.ep.cast()) == 0);
        assert_eq!(close(side.queue.cast()), 0);
        assert_eq!(close(side.vector.cast()), 0);
        std::mem::forget(side);
    }
    was_stopped
}
