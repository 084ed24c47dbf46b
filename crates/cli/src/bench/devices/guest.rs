//! The program inside the virtual machine: it drives the card that the machine has.

use std::sync::Arc;

use anyhow::Context;
use memferry::engine::ChannelOptions;
use memferry::engine::conformance::Subject;
use memferry::engine::device::ready;
use memferry::engine::nic::{NicEngine, Settings};
use memferry_sys::vfio::VfioDevice;
use memferry_sys::vfio::pci::E1000E;

use super::super::Effort;
use super::report::Report;
use super::{card, suite};
use crate::outcome::Machine;
use crate::show;

/// What the card is called.
pub(super) const CARD: &str = "emulated card";

/// How often the suite is run over the card.
pub(super) fn suites(effort: Effort) -> u64 {
    if effort == Effort::Full { 2 } else { 1 }
}

/// Tries the card and tells of it.
pub(crate) fn run(is_quick: bool) -> anyhow::Result<()> {
    let effort = if is_quick { Effort::Quick } else { Effort::Full };
    let device = open()?;
    // SAFETY: the only card of the virtual machine, which runs no other program; it is read from here,
    // and written by the engine alone.
    let engine = unsafe { NicEngine::over(device.clone(), Settings::default()) };
    let engine = Arc::new(engine.context("the card does not work")?);
    let subject = Subject::new(keep(&engine));
    let mut tallies = vec![tally("nic over the emulated card", &engine, &subject)];
    if suites(effort) > 1 {
        let tiny =
            ChannelOptions { capacity: Some(2), spin_ns: Some(0), ..ChannelOptions::default() };
        let subject = Subject::new(keep(&engine)).options(tiny);
        tallies.push(tally("nic over the emulated card, with a tiny ring", &engine, &subject));
    }
    let mut report = Report {
        kernel: Machine::look().kernel,
        suites: tallies,
        share: None,
        rows: Vec::new(),
        trouble: None,
    };
    // After a case that failed the card may be in no state to go on; the cases are still told.
    let on_figure = |figure: &str| say(&format!("{CARD}: {figure}"));
    match card::measure(engine, Some(&*device), CARD, effort, on_figure) {
        Ok(found) => (report.share, report.rows) = (Some(found.share), found.rows),
        Err(error) => report.trouble = Some(format!("{error:#}")),
    }
    say(&report.line()?);
    Ok(())
}

/// The card of the machine, for all cases: to open it takes long.
fn open() -> anyhow::Result<Arc<VfioDevice>> {
    let address = ready(E1000E).into_iter().next();
    let address = address.context("there is no card that was handed over to programs")?;
    let device = VfioDevice::open(&address);
    Ok(Arc::new(device.with_context(|| format!("the card {address} cannot be had"))?))
}

fn keep(engine: &Arc<NicEngine>) -> impl Fn() -> Arc<NicEngine> + Send + Sync + 'static {
    let engine = engine.clone();
    move || engine.clone()
}

/// Runs the suite, and looks whether it was the card that did the work.
fn tally(name: &str, engine: &NicEngine, subject: &Subject) -> suite::Tally {
    let before = engine.counters();
    let mut tally = suite::run(name, subject, |case| say(&format!("{name}: {case}")));
    let done = card::since(&before, &engine.counters());
    tally.require_skips(&card::SKIPS);
    tally.require(done.bytes_by_card > 0, || "the card moved nothing".into());
    let times = done.given_up;
    tally.require(times == 0, || format!("the card gave up {times} times"));
    tally
}

/// A line for those who wait. Whoever does not read it does not matter.
fn say(line: &str) {
    let _ = show::print(&format!("{line}\n"));
}
