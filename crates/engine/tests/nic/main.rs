//! The engine of a network card: the conformance suite, and the behaviour of this engine alone.
//!
//! If `MEMFERRY_NIC` names a card that is bound to vfio-pci (`auto`: the first), all tests run over
//! that card; otherwise over a model. `cargo xtask qemu` runs them over the card of a virtual
//! machine.
#![cfg(not(loom))]
#![allow(clippy::print_stderr)]

mod card;
mod copies;
mod faults;
mod faulty_device;
mod in_a_row;
mod interrupts;
mod killed;
mod late;
mod notifications;
mod rig;

use memferry_engine::ChannelOptions;
use memferry_engine::conformance_tests;
use memferry_engine::nic::NicConfig;
use memferry_engine::testing::conformance::EngineUnderTest;
use memferry_engine::testing::nic_model::NicFaults;

fn tiny() -> ChannelOptions {
    ChannelOptions { capacity: Some(2), spin_ns: Some(0), ..ChannelOptions::default() }
}

fn checked() -> NicConfig {
    NicConfig { verify_checksums: true }
}

conformance_tests!(nic_engine, EngineUnderTest::new(card::engine));
conformance_tests!(nic_engine_with_a_tiny_ring, EngineUnderTest::new(card::engine).options(tiny()));
conformance_tests!(
    nic_engine_that_loses_frames,
    EngineUnderTest::new(|| {
        let faults = NicFaults { lose_every: Some(11), ..NicFaults::default() };
        card::faulty_engine(NicConfig::default(), faults)
    })
    .injects_faults()
);
conformance_tests!(
    nic_engine_that_damages_frames,
    EngineUnderTest::new(|| {
        let faults = NicFaults { damage_every: Some(5), ..NicFaults::default() };
        card::faulty_engine(checked(), faults)
    })
    .injects_faults()
);
