//! The engine of a network card: the conformance suite, and what only this engine does.
//!
//! Where `MEMFERRY_NIC` names a card that was handed over (`auto`: the first), all of it runs over that
//! card; elsewhere over a model. `cargo xtask qemu` runs it over the card of a virtual machine.
#![cfg(not(loom))]
#![allow(clippy::print_stderr)]

mod card;
mod copies;
mod faults;
mod in_a_row;
mod killed;
mod late;
mod notices;
mod rig;
mod spoiled;

use memferry_engine::ChannelOptions;
use memferry_engine::conformance::Subject;
use memferry_engine::conformance_tests;
use memferry_engine::nic::Settings;
use memferry_engine::nic::model::Faults;

fn tiny() -> ChannelOptions {
    ChannelOptions { capacity: Some(2), spin_ns: Some(0), ..ChannelOptions::default() }
}

fn checked() -> Settings {
    Settings { checks: true }
}

conformance_tests!(nic_engine, Subject::new(card::engine));
conformance_tests!(nic_engine_with_a_tiny_ring, Subject::new(card::engine).options(tiny()));
conformance_tests!(
    nic_engine_that_loses_frames,
    Subject::new(|| {
        let faults = Faults { lose_every: Some(11), ..Faults::default() };
        card::faulty_engine(Settings::default(), faults)
    })
    .injects_faults()
);
conformance_tests!(
    nic_engine_that_damages_frames,
    Subject::new(|| {
        let faults = Faults { damage_every: Some(5), ..Faults::default() };
        card::faulty_engine(checked(), faults)
    })
    .injects_faults()
);
