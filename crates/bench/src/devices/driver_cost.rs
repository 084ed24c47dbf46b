//! What the driver and the waiting thread add to the time of a device: measured over a model of the
//! copy engine that takes a set time for every descriptor.

use std::panic::resume_unwind;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::ensure;
use memferry::engine::contract::DescriptorLeases;
use memferry::engine::ioat::{IoatEngine, registers};
use memferry::engine::testing::ioat_model::IoatModel;
use memferry::engine::{Channel, ChannelOptions, Descriptor, Engine, Opcode};
use memferry_memory::pin_cache::{InvalidationMode, PinCache, PinCacheLimits};
use memferry_memory::pinning::Access;
use memferry_sys::Pages;
use memferry_sys::affinity;
use memferry_sys::device::DmaDevice;

use super::memory::EngineFixture;
use super::syscalls::SyscallCounter;
use crate::Effort;
use crate::group::cores::MemberCores;
use crate::results::outcome::{Outcome, Row};

const FIGURE: &str = "I/OAT model: time beside the device";
const COPY_BYTES: usize = 4096;
/// The time of the model for a descriptor of a round trip.
const SERVICE: Duration = Duration::from_micros(2);
/// The same while submits are measured: the model does not end meanwhile.
const LONG_SERVICE: Duration = Duration::from_micros(200);
const BATCH: usize = 64;

/// Measures round trips, submits and system calls, and sets the keys.
pub(super) fn measure(outcome: &mut Outcome, effort: Effort) -> anyhow::Result<()> {
    let rounds = if effort == Effort::Brief { 5 } else { 21 };
    let cores = Cores(MemberCores::of_this_machine());
    round_trips(outcome, rounds, &cores)?;
    system_calls(outcome, rounds, &cores)?;
    submits(outcome, rounds, &cores)
}

/// The cores of the caller and of the model. A device needs no core of the program that uses it, so the
/// model gets another one than the caller, if there are several.
struct Cores(MemberCores);

impl Cores {
    const CALLER: usize = 0;
    const MODEL: usize = 1;

    /// Builds a model that takes a time for each descriptor, with its thread on its core.
    fn model(&self, service: Duration) -> Arc<IoatModel> {
        self.bound(Self::MODEL, || IoatModel::builder().contiguous(true).service(service).build())
    }

    /// Measures from the caller's core. What is built before may use every core.
    fn caller<R: Send>(&self, work: impl FnOnce() -> R + Send) -> R {
        self.bound(Self::CALLER, work)
    }

    /// Runs `work` on a thread that is bound to a core, and so are the threads that it starts.
    fn bound<R: Send>(&self, rank: usize, work: impl FnOnce() -> R + Send) -> R {
        let run = || {
            if self.0.physical_count() > 1 {
                // Otherwise the system decides where it runs.
                let _ = affinity::bind_to_core(self.0.of_member(rank));
            }
            work()
        };
        let ended = thread::scope(|scope| scope.spawn(run).join());
        ended.unwrap_or_else(|panic| resume_unwind(panic))
    }
}

fn row(series: &str, unit: &str, rounds: &[f64]) -> Row {
    Row::of_rounds(FIGURE, series, COPY_BYTES as u64, unit, rounds)
}

/// The median; the rounds are not empty.
fn median(rounds: &[f64]) -> f64 {
    let mut sorted = rounds.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[sorted.len() / 2]
}

/// Copies by a ferry, one after the other, each waited for.
fn round_trips(outcome: &mut Outcome, rounds: usize, cores: &Cores) -> anyhow::Result<()> {
    const COPIES: u32 = 200;
    let model = cores.model(SERVICE);
    let engine = Arc::new(IoatEngine::over_model(model.clone())?);
    let mut fixture = EngineFixture::new(engine, COPY_BYTES)?;
    let (mut driver, mut handover) = (Vec::new(), Vec::new());
    fixture.copy_unverified(COPY_BYTES, false)?;
    cores.caller(|| {
        for _ in 0..rounds {
            let before = model.all_counters();
            let start = Instant::now();
            for _ in 0..COPIES {
                fixture.copy_unverified(COPY_BYTES, false)?;
            }
            let each = start.elapsed().as_nanos() as f64 / f64::from(COPIES);
            let after = model.all_counters();
            let device = (after.turnaround_ns - before.turnaround_ns) as f64 / f64::from(COPIES);
            driver.push(each - SERVICE.as_nanos() as f64);
            handover.push(device - SERVICE.as_nanos() as f64);
        }
        anyhow::Ok(())
    })?;
    fixture.verify(COPY_BYTES)?;
    outcome.rows.push(row("round trip", "ns", &driver));
    outcome.rows.push(row("of it the model's own thread", "ns", &handover));
    outcome.summary.set("device_roundtrip_ns", median(&driver));
    Ok(())
}

/// Copies of pinned memory by a channel, each waited for, and whether they make system calls.
fn system_calls(outcome: &mut Outcome, rounds: usize, cores: &Cores) -> anyhow::Result<()> {
    const COPIES: u32 = 200;
    const TIMEOUT: Duration = Duration::from_secs(30);
    let engine = IoatEngine::over_model(cores.model(SERVICE))?;
    let (source, target) = (Pages::new(BATCH * COPY_BYTES)?, Pages::new(BATCH * COPY_BYTES)?);
    let leases = pin(&engine, &source, &target)?;
    // Dropped before the memory: the drop waits for everything in flight.
    let channel = engine.open_channel(&ChannelOptions::default())?;
    let (from, to) = (source.as_ptr() as u64, target.as_ptr() as u64);
    let copy = || {
        // SAFETY: inside memory that outlives the channel, and that nothing else uses.
        let copy = unsafe { Descriptor::new(Opcode::Copy, from, to, COPY_BYTES as u64) };
        let sequence = channel.submit_one(copy.pinned_by(leases.clone())).ok()?;
        channel.park(sequence, TIMEOUT).then_some(())
    };
    let calls = cores.caller(|| {
        // Counts the calls of this thread.
        let Some(counter) = SyscallCounter::new() else { return Ok(None) };
        let mut calls = Vec::new();
        for _ in 0..rounds {
            let mut with_calls = 0;
            for _ in 0..COPIES {
                let (is_copied, has_called) = counter.watch(copy);
                ensure!(is_copied.is_some(), "the model does not end");
                with_calls += u32::from(has_called);
            }
            calls.push(f64::from(with_calls) / f64::from(COPIES));
        }
        anyhow::Ok(Some(calls))
    })?;
    let Some(calls) = calls else { return Ok(()) };
    ensure!(channel.statistics().failed == 0, "the processor executed descriptors");
    outcome.rows.push(row("copies with a system call", "share", &calls));
    outcome.summary.set("device_syscalls_per_copy", median(&calls));
    Ok(())
}

/// Descriptors of pinned memory, submitted to a channel one by one and in a batch.
fn submits(outcome: &mut Outcome, rounds: usize, cores: &Cores) -> anyhow::Result<()> {
    const TIMEOUT: Duration = Duration::from_secs(30);
    let model = cores.model(LONG_SERVICE);
    let engine = IoatEngine::over_model(model.clone())?;
    let (source, target) = (Pages::new(BATCH * COPY_BYTES)?, Pages::new(BATCH * COPY_BYTES)?);
    let leases = pin(&engine, &source, &target)?;
    // Dropped before the memory: the drop waits for everything in flight.
    let channel = engine
        .open_channel(&ChannelOptions { capacity: Some(4 * BATCH), ..ChannelOptions::default() })?;
    let descriptor = |number: usize| {
        let at = (number * COPY_BYTES) as u64;
        let (from, to) = (source.as_ptr() as u64 + at, target.as_ptr() as u64 + at);
        // SAFETY: inside memory that outlives the channel, and that nothing else uses.
        let copy = unsafe { Descriptor::new(Opcode::Copy, from, to, COPY_BYTES as u64) };
        copy.pinned_by(leases.clone())
    };
    let (mut single, mut batched) = (Vec::new(), Vec::new());
    let (mut doorbell, mut after_pause) = (Vec::new(), Vec::new());
    let finish = |channel: &dyn Channel| {
        let submitted = channel.statistics().submitted;
        ensure!(channel.park(submitted, TIMEOUT), "the model does not end");
        ensure!(channel.statistics().failed == 0, "the processor executed descriptors");
        anyhow::Ok(())
    };
    // The driver's code and data are in no cache after a wait of milliseconds: the first submit fetches
    // them.
    let submit_first = || {
        let first = descriptor(0);
        let start = Instant::now();
        ensure!(channel.submit_one(first).is_ok(), "the channel is full");
        anyhow::Ok(start.elapsed().as_nanos() as f64)
    };
    cores.caller(|| {
        for _ in 0..rounds {
            let prepared: Vec<_> = (0..BATCH).map(descriptor).collect();
            after_pause.push(submit_first()?);
            let start = Instant::now();
            for copy in prepared {
                ensure!(channel.submit_one(copy).is_ok(), "the channel is full");
            }
            single.push(start.elapsed().as_nanos() as f64 / BATCH as f64);
            doorbell.push(doorbell_ns(&model));
            finish(&*channel)?;
            let mut prepared: Vec<_> = (0..BATCH).map(|number| Some(descriptor(number))).collect();
            submit_first()?;
            let start = Instant::now();
            let accepted = channel.submit(&mut prepared)?;
            batched.push(start.elapsed().as_nanos() as f64 / BATCH as f64);
            ensure!(accepted.count == BATCH, "the channel is full");
            finish(&*channel)?;
        }
        anyhow::Ok(())
    })?;
    outcome.rows.push(row("submit of one", "ns", &single));
    outcome.rows.push(row("of it the model's register write", "ns", &doorbell));
    outcome.rows.push(row("submit of one, after a pause of 13 ms", "ns", &after_pause));
    outcome.rows.push(row("submit in a batch of 64, each", "ns", &batched));
    outcome.summary.set("device_submit_ns", median(&single));
    outcome.summary.set("device_batch_submit_ns", median(&batched));
    Ok(())
}

/// The time of a doorbell of the model: two stores and a clock, where a device takes a posted write.
fn doorbell_ns(model: &IoatModel) -> f64 {
    let at = registers::channel_base(0) + registers::DMACOUNT;
    let count = model.read16(at);
    let start = Instant::now();
    for _ in 0..BATCH {
        // SAFETY: nobody submits meanwhile, and the channel knows this count already.
        unsafe { model.write16(at, count) };
    }
    start.elapsed().as_nanos() as f64 / BATCH as f64
}

fn pin(
    engine: &IoatEngine,
    source: &Pages,
    target: &Pages,
) -> anyhow::Result<Arc<DescriptorLeases>> {
    let pinner = engine.pinner().expect("the engine needs pinned memory");
    let cache = PinCache::new(pinner, PinCacheLimits::default(), InvalidationMode::Explicit)?;
    let lease = |pages: &Pages, access| {
        cache.acquire(pages.as_ptr() as usize, BATCH * COPY_BYTES, access).map(Arc::new)
    };
    Ok(Arc::new(DescriptorLeases {
        source: Some(lease(source, Access::Read)?),
        target: Some(lease(target, Access::Write)?),
        second: None,
        variable: None,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::sample;

    #[test]
    fn a_waiter_of_an_awake_device_makes_no_system_call() {
        // While other programs have the cores, the model is not awake, and the waiter sleeps.
        memferry_testing::until("copies without system calls", || {
            let mut outcome = sample::empty("devices");
            let cores = Cores(MemberCores::of_this_machine());
            system_calls(&mut outcome, 5, &cores).unwrap();
            outcome.summary.get("device_syscalls_per_copy").is_none_or(|calls| calls < 0.5)
        });
    }

    #[test]
    fn round_trips_and_submits_set_their_keys() {
        let mut outcome = sample::empty("devices");
        measure(&mut outcome, Effort::Brief).unwrap();
        for key in ["device_roundtrip_ns", "device_submit_ns", "device_batch_submit_ns"] {
            assert!(outcome.summary.get(key).is_some_and(|value| value > 0.0), "{key}");
        }
    }
}
