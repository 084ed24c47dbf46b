//! A peer that is stopped while it writes to the memory of a receive: the endpoint reports that it is busy
//! until the peer can no longer write to the memory.

use std::fmt::Write;

use crate::provider::world::{Side, World, close, move_all_on};
use memferry_fi::abi::FI_EBUSY;
use memferry_testing::message::process;
use memferry_testing::message::stopping::{self, BYTES, StoppedPeer};
use memferry_testing::until;

#[test]
fn other_processes_begin_here() {
    if process::role().as_deref() == Some("claimer") {
        stopping::claimer();
    }
}

/// The name on which an endpoint listens: its identifier, which follows the first word of its address.
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

/// Closes an endpoint while a stopped peer has claimed a chunk of its receive; with `ends` the peer is then
/// killed, else it continues. Returns `false` if the receiver copied everything before the peer could claim a
/// chunk.
fn closes_when_the_peer_is_out(ends: bool) -> bool {
    let world = World::new();
    let side = world.side();
    let mut memory = vec![0u8; BYTES];
    assert_eq!(side.trecv(&mut memory, 1, 0, 7), 0);
    let mut child = StoppedPeer::spawn("claimer", &listening_name(&side), false);
    // The peer is killed when the thread that started it ends, so this thread has started it.
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
        // The endpoint is closed by the first call that succeeds.
        until("it is closed", || close(side.ep.cast()) == 0);
        assert_eq!(close(side.queue.cast()), 0);
        assert_eq!(close(side.vector.cast()), 0);
        std::mem::forget(side);
    }
    was_stopped
}
