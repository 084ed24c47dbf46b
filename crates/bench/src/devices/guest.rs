//! The program inside the virtual machine, which drives the card of the machine.

use std::sync::Arc;

use anyhow::Context;
use memferry::engine::ChannelOptions;
use memferry::engine::nic::{NicConfig, NicEngine};
use memferry::engine::pci::available_devices;
use memferry::engine::testing::conformance::EngineUnderTest;
use memferry_sys::vfio::VfioDevice;
use memferry_sys::vfio::pci::E1000E;

use super::report::GuestReport;
use super::{card, suite};
use crate::Effort;
use crate::reply::write_line;
use crate::results::outcome::Machine;

pub use memferry_vm::guest::run_if_init;

/// Name of the card.
pub(super) const CARD: &str = "emulated card";

/// Number of runs of the suite over the card.
pub(super) fn suites(effort: Effort) -> u64 {
    if effort == Effort::Full { 2 } else { 1 }
}

/// Runs the suite and the measurements over the card, and prints the report.
pub fn run(is_quick: bool) -> anyhow::Result<()> {
    let effort = if is_quick { Effort::Quick } else { Effort::Full };
    let device = open_card()?;
    // SAFETY: the only card of the virtual machine, which runs no other program; this function
    // reads it, and only the engine writes it.
    let engine = unsafe { NicEngine::over(device.clone(), NicConfig::default()) };
    let engine = Arc::new(engine.context("the card does not work")?);
    let subject = EngineUnderTest::new(shared_engine(&engine));
    let mut tallies = vec![run_suite("nic over the emulated card", &engine, &subject)];
    if suites(effort) > 1 {
        let tiny =
            ChannelOptions { capacity: Some(2), spin_ns: Some(0), ..ChannelOptions::default() };
        let subject = EngineUnderTest::new(shared_engine(&engine)).options(tiny);
        tallies.push(run_suite("nic over the emulated card, with a tiny ring", &engine, &subject));
    }
    let mut report = GuestReport {
        kernel: Machine::detect().kernel,
        suites: tallies,
        share: None,
        rows: Vec::new(),
        trouble: None,
    };
    // After a failed case the card may be unusable for the figures; the cases are reported anyway.
    let on_figure = |figure: &str| print_step(&format!("{CARD}: {figure}"));
    match card::measure(engine, Some(&*device), CARD, effort, on_figure) {
        Ok(found) => (report.share, report.rows) = (Some(found.share), found.rows),
        Err(error) => report.trouble = Some(format!("{error:#}")),
    }
    print_step(&report.line()?);
    Ok(())
}

/// Opens the card of the machine once for all cases, because opening it takes long.
fn open_card() -> anyhow::Result<Arc<VfioDevice>> {
    let address = available_devices(E1000E).into_iter().next();
    let address = address.context("there is no card that was handed over to programs")?;
    let device = VfioDevice::open(&address);
    Ok(Arc::new(device.with_context(|| format!("the card {address} cannot be had"))?))
}

fn shared_engine(engine: &Arc<NicEngine>) -> impl Fn() -> Arc<NicEngine> + Send + Sync + 'static {
    let engine = engine.clone();
    move || engine.clone()
}

/// Runs the suite, and checks that the card did the work.
fn run_suite(name: &str, engine: &NicEngine, subject: &EngineUnderTest) -> suite::SuiteResult {
    let before = engine.counters();
    let mut tally = suite::run(name, subject, |case| print_step(&format!("{name}: {case}")));
    let done = card::counters_between(&before, &engine.counters());
    tally.require_skips(&card::skips());
    tally.require(done.bytes_by_card > 0, || "the card moved nothing".into());
    let times = done.cpu_fallbacks;
    tally.require(times == 0, || format!("the card gave up {times} times"));
    tally
}

/// Prints a progress line. A closed output is ignored.
fn print_step(line: &str) {
    let _ = write_line(line);
}
