//! Two ports of one process, and what happens to one of them when the other ends at a chosen moment.

use std::sync::mpsc;
use std::time::Duration;

use super::wait::{LOOKS, SLICES};
use super::{Begun, Peer, Port, State};
use crate::endpoint::Endpoint;
use crate::error::{Error, Gone};
use crate::pieces::Piece;

/// Only a hang takes longer.
const PATIENCE: Duration = Duration::from_secs(60);

/// Two connected endpoints. Nothing moves unless a test moves it.
struct Pair {
    here: Endpoint,
    there: Endpoint,
    /// `there`, as `here` knows it.
    peer: Peer,
}

impl Pair {
    fn new(name: &str) -> Self {
        let name = |side: &str| format!("{name}-{side}-{}", std::process::id());
        let here = Endpoint::open(&name("here")).unwrap();
        let there = Endpoint::open(&name("there")).unwrap();
        let peer = std::thread::scope(|scope| {
            let connecting = scope.spawn(|| here.connect(there.name()).unwrap());
            while there.peers().is_empty() {
                std::thread::yield_now();
            }
            connecting.join().unwrap()
        });
        Self { here, there, peer }
    }

    fn port(&self) -> &Port {
        self.here.port()
    }
}

/// Ends all connections of an endpoint as the death of its process would: without a word.
fn die(endpoint: &Endpoint) {
    for slot in &mut endpoint.port().enter().peers {
        slot.connection = None;
    }
}

/// Runs `f` in a thread of its own. Fails if it does not end.
fn ends<T: Send + 'static>(f: impl FnOnce() -> T + Send + 'static) -> T {
    let (done, wait) = mpsc::channel();
    std::thread::spawn(move || done.send(f()));
    wait.recv_timeout(PATIENCE).expect("a call that never returns")
}

#[test]
fn a_wait_ends_whenever_the_end_of_the_peer_is_noticed() {
    // Polls before each short sleep, and in the last round before the long one.
    let rounds = (0..=SLICES).map(|round| 1 + round * (LOOKS + 1));
    for moment in rounds.flat_map(|first| [first, first + LOOKS / 2, first + LOOKS]) {
        let outcome = ends(move || {
            let pair = Pair::new(&format!("wait-{moment}"));
            let mut target = [0u8; 8];
            let pieces = [Piece::target(target.as_mut_ptr(), target.len())];
            // SAFETY: the target lives until the receive is over.
            let begun =
                unsafe { pair.port().begin_receive(pair.peer.into(), 0, 0, &pieces) }.unwrap();
            let Begun::Underway(number) = begun else { panic!("nothing was sent") };
            pair.port().enter().is_crowded = false;
            let mut polls = 0;
            pair.port().block(false, None, |state: &mut State| {
                polls += 1;
                if polls == moment {
                    die(&pair.there);
                    // As if the last liveness check were long ago: the next one is due at once.
                    state.last_checked_ns = 0;
                }
                state.operations.take_outcome(number)
            })
        });
        assert_eq!(outcome, Some(Err(Error::PeerGone(Gone::Ended))), "at poll {moment}");
    }
}

#[test]
fn a_probe_that_sleeps_deeply_ends_when_another_thread_notices_the_end_of_the_peer() {
    ends(|| {
        let pair = Pair::new("probe");
        let probing = {
            let (here, peer) = (pair.here.clone(), pair.peer);
            std::thread::spawn(move || here.probe(peer, 0, 0))
        };
        while !pair.port().enter().sleeps_deeply {
            std::thread::sleep(Duration::from_millis(1));
        }
        // With the lock held from the end on, this thread is the one that notices it.
        let mut state = pair.port().enter();
        die(&pair.there);
        assert!(state.check_peers(true));
        drop(state);
        assert_eq!(probing.join().unwrap(), Err(Error::PeerGone(Gone::Ended)));
    });
}
