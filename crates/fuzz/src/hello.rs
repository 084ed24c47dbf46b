//! A process that says something else than hello to an endpoint that listens. The endpoint answers, or hangs up,
//! or waits; it holds nothing of the caller afterwards and welcomes the next.

use std::cell::RefCell;

use memferry_message::Endpoint;

use crate::attacker::Attacker;
use crate::script::Script;
use crate::support::{unique, until};

thread_local! {
    static STATE: RefCell<Option<(Endpoint, Attacker)>> = const { RefCell::new(None) };
}

pub(crate) fn run(bytes: &[u8]) {
    STATE.with_borrow_mut(|state| {
        let open = || (Endpoint::open(&unique("prey")).expect("an endpoint"), Attacker::start());
        let (prey, attacker) = state.get_or_insert_with(open);
        let mut script = Script::new(bytes);
        while !script.is_over() {
            let length = usize::from(script.byte()) + 1;
            if !attacker.say_hello(prey, script.bytes(length)) {
                *attacker = Attacker::start();
            }
            prey.progress();
        }
        // One that says what it should is welcome beside all of them.
        assert!(
            attacker.connect(prey) || {
                *attacker = Attacker::start();
                attacker.connect(prey)
            }
        );
        attacker.hang_up(prey);
        until("nothing is left of the callers", || {
            prey.progress();
            prey.peers().is_empty()
        });
    });
}
