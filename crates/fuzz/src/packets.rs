//! Packets from other hosts to the provider, while it sends, fetches and accesses memory.

use std::cell::RefCell;

use memferry_fi::fuzz::FuzzedTransport;
use memferry_testing::{Requirement, skip};

use crate::script::Script;

const LENGTHS: [usize; 6] = [0, 1, 900, 16_000, 70_000, 200_000];
/// After this many inputs everything is created again: undelivered packets use memory.
const MAX_INPUTS: u32 = 100;

thread_local! {
    static PREY: RefCell<(Option<FuzzedTransport>, u32)> = const { RefCell::new((None, 0)) };
}

pub(crate) fn run(bytes: &[u8]) {
    PREY.with_borrow_mut(|(prey, inputs)| {
        if *inputs % MAX_INPUTS == 0 {
            *prey = FuzzedTransport::new();
        }
        *inputs += 1;
        match prey {
            Some(prey) => play(prey, Script::new(bytes)),
            None => {
                skip(
                    Requirement::Libfabric,
                    "the library is not installed: apt install libfabric1",
                );
            }
        }
    });
}

fn play(prey: &mut FuzzedTransport, mut script: Script<'_>) {
    prey.replace_peers(2);
    while !script.is_empty() {
        let what = script.byte();
        let peer = usize::from(what >> 7);
        match what % 8 {
            0..3 => {
                let (kind, flags) = (script.byte() % 11, script.byte() % 9);
                let numbers = [0; 5].map(|_: u64| script.number());
                let length = script.pick(&[0, 0, 1, 100, 4000]);
                prey.inject_packet(peer, kind, flags, numbers, script.bytes(length));
            }
            3 => prey.send(peer, script.pick(&LENGTHS), script.flag()),
            4 => prey.fetch(script.byte().into(), script.pick(&LENGTHS)),
            5 => {
                let place = (script.number(), script.number());
                prey.access(peer, script.flag(), place, script.pick(&LENGTHS));
            }
            6 => {
                let length = script.byte().into();
                prey.inject_bytes(script.bytes(length));
            }
            _ => {}
        }
        prey.poll();
    }
    prey.close_peers();
}
