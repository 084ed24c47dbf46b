//! `gpu`: copies by the copy engines of a GPU, from host to host, to the device and back, against
//! memcpy, the driver's own copies, and memory that the driver pinned.

mod cases;
mod fixture;
mod memory;
mod overlap;
mod peer;
mod route;

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use memferry::engine::contract::ReuseHint;
use memferry::plan::{CopyQuery, CopyStrategy};
use memferry::{CudaEngine, EngineSelection, Ferry};
use memferry_sys::cuda::{Cuda, CudaDriver};
use memferry_sys::residency;

use super::{Bench, Effort};
use crate::Progress;
use crate::copy::overlap::calibrate_compute;
use crate::harness::{Failure, Sample, Samples, median, set};
use crate::results::outcome::{Outcome, Row, Summary};
use crate::results::size;
use cases::{
    CALLER_HELPS, CALLER_SLEEPS, Case, DRIVER, GpuCopyDirection, MEMCPY, MEMFERRY, PINNED,
    PageSize, REFERENCE_BYTES, REFERENCE_OVERLAP_BYTES,
};
use fixture::GpuFixture;
use peer::DriverPeer;

pub(crate) static BENCH: Bench = Bench::new(
    "gpu",
    "Copies by a GPU: between ordinary memory, to the device and back, against its driver",
    run,
);

/// Ordinal of the GPU.
const ORDINAL: usize = 0;

/// What a run measures, and its time limit.
struct GpuBenchPlan {
    effort: Effort,
    cases: Vec<Case>,
    overlap_sizes: Vec<usize>,
    /// After this time the run measures only the cases of the summary keys.
    max_time: Duration,
}

impl GpuBenchPlan {
    fn of(effort: Effort) -> Self {
        let seconds = match effort {
            Effort::Brief | Effort::Quick => 17,
            Effort::Full => 200,
        };
        let overlap_sizes = cases::overlap_sizes(effort).to_vec();
        let most_time = Duration::from_secs(seconds);
        Self { effort, cases: cases::cases(effort), overlap_sizes, max_time: most_time }
    }

    fn max_bytes(&self) -> usize {
        let sizes = self.cases.iter().map(|case| case.bytes);
        sizes.chain(self.overlap_sizes.iter().copied()).max().unwrap_or(0)
    }
}

fn run(mut outcome: Outcome, effort: Effort, progress: &dyn Progress) -> anyhow::Result<Outcome> {
    let plan = GpuBenchPlan::of(effort);
    progress.start((plan.cases.len() + plan.overlap_sizes.len() + 2) as u64, &outcome.bench);
    progress.step("looking for a GPU");
    let cuda = match Cuda::open(ORDINAL) {
        Ok(cuda) => Arc::new(cuda),
        Err(reason) => {
            outcome.missing.push("a GPU".into());
            outcome.notes.push(format!("Nothing was measured: {reason}."));
            return Ok(outcome);
        }
    };
    progress.step("opening the GPU");
    let facts = cuda.info();
    let version = (facts.driver_version / 1000, facts.driver_version % 1000 / 10);
    let version = format!("with a driver for CUDA {}.{}", version.0, version.1);
    outcome.versions.insert(facts.name.clone(), version);
    let ferry = Ferry::builder().gpu(EngineSelection::device(ORDINAL)).build()?;
    let gpu = ferry.engine_as::<CudaEngine>().context("the ferry has no GPU")?;
    let peer = DriverPeer::new(cuda.clone(), Some(cuda), plan.max_bytes())?;
    let mut rig = GpuFixture::new(ferry, &gpu, peer, plan.max_bytes())?;
    measure(&mut outcome, &mut rig, &plan, progress)?;
    Ok(outcome)
}

fn measure(
    outcome: &mut Outcome,
    rig: &mut GpuFixture,
    plan: &GpuBenchPlan,
    progress: &dyn Progress,
) -> anyhow::Result<()> {
    let begun = Instant::now();
    let mut left_out = 0;
    for case in &plan.cases {
        progress.step(&format!("{}, {}", case.figure(), size::format(case.bytes as u64)));
        if begun.elapsed() > plan.max_time && !case.is_reference() {
            left_out += 1;
            continue;
        }
        let rounds = route::interleave(rig, case, plan.effort)?;
        record_samples(outcome, case, &rounds);
    }
    let steps_per_ns = calibrate_compute();
    for &bytes in &plan.overlap_sizes {
        progress.step(&format!("overlap, {}", size::format(bytes as u64)));
        if begun.elapsed() > plan.max_time && bytes != REFERENCE_OVERLAP_BYTES {
            left_out += 1;
            continue;
        }
        let rounds = overlap::measure(rig, bytes, plan.effort, steps_per_ns)?;
        let figure = "overlap with computation, host to host, registered memory of 4 KiB pages";
        let row = Row::of_rounds(figure, CALLER_SLEEPS, bytes as u64, "overlap", &rounds);
        if bytes == REFERENCE_OVERLAP_BYTES {
            set(&mut outcome.summary, "overlap_64m", row.value.clamp(0.0, 1.0));
        }
        outcome.rows.push(row);
    }
    outcome.notes.extend(notes());
    outcome.notes.extend(warnings(rig));
    if left_out > 0 {
        outcome.notes.push(format!(
            "{left_out} points were left out, the last ones of each list: with them the run would have \
             taken too long. None of them decides a key."
        ));
    }
    Ok(())
}

/// Adds the rows and keys of a case, and the candidates that failed.
fn record_samples(outcome: &mut Outcome, case: &Case, rounds: &Samples) {
    let figure = case.figure();
    outcome.rows.extend(rounds.bandwidth_rows(&figure, case.bytes as u64, case.bytes as u64));
    let busy = format!("processors busy, {figure}");
    outcome.rows.extend(rounds.rows(&busy, case.bytes as u64, "cores", cores));
    for Failure { series, reason, .. } in rounds.failures() {
        let missing = format!("{series}, {} ({reason})", case.direction);
        if !outcome.missing.contains(&missing) {
            outcome.missing.push(missing);
        }
    }
    if case.is_reference() {
        set_keys(&mut outcome.summary, case.direction, rounds);
    }
}

/// Number of cores that the process kept busy.
fn cores(sample: &Sample) -> f64 {
    sample.cpu_ns / sample.total_ns
}

fn set_keys(summary: &mut Summary, direction: GpuCopyDirection, rounds: &Samples) {
    match direction {
        GpuCopyDirection::HostToHost => {
            set(summary, "host_to_host_vs_memcpy", rounds.ratio(CALLER_SLEEPS, MEMCPY));
            set(summary, "host_to_host_cpu_share", median(rounds.values(CALLER_SLEEPS, cores)));
            set(summary, "split_vs_gpu_alone", rounds.ratio(CALLER_HELPS, CALLER_SLEEPS));
        }
        GpuCopyDirection::ToDevice => {
            set(summary, "pageable_to_device_vs_driver", rounds.ratio(MEMFERRY, DRIVER));
            set(summary, "pageable_to_device_vs_pinned", rounds.ratio(MEMFERRY, PINNED));
        }
        GpuCopyDirection::FromDevice => {
            set(summary, "device_to_pageable_vs_driver", rounds.ratio(MEMFERRY, DRIVER));
        }
    }
}

fn notes() -> [String; 3] {
    [
        "Fresh memory is mapped and written anew for every copy, which is not timed; no engine has \
         seen it before, and it is not registered. Reused memory was used at least three times, and \
         the ferry's is registered (`Ferry::register`). Between ordinary memory, everybody uses the same \
         registered memory; to the device and back, the driver's copies have pageable memory of their \
         own. After each contest every way has to show that it moves \
         every byte."
            .into(),
        format!(
            "`{CALLER_SLEEPS}`: nobody but the engine works on the copy; `{CALLER_HELPS}`: an ordinary blocking \
             copy, which the GPU, channels of processors and the caller share. `{DRIVER}` is \
             cuMemcpyHtoD or cuMemcpyDtoH; `{PINNED}` one asynchronous copy of memory from \
             cuMemHostAlloc, waited for by asking for an event: the limit. cuMemcpyHtoD may return \
             before its last bytes have moved, which is to its advantage. Processors busy is the \
             processor time of the whole process, driver included, over the time: the driver copies \
             with one thread, ours with up to ten where memory passes through rings. Fresh memory \
             between ordinary memory, and small copies, are left to processors by the planner."
        ),
        format!(
            "Overlap = (T_copy + T_compute - T_total) / T_copy, each the median of interleaved \
             measurements; the computation is {} times T_copy, on the caller's core. The keys are \
             for 256 MiB and 4 KiB pages, overlap_64m for 64 MiB.",
            overlap::COMPUTE_PER_COPY
        ),
    ]
}

/// Warnings about conditions that affect the results.
fn warnings(rig: &GpuFixture) -> Vec<String> {
    let mut warnings = Vec::new();
    let ferry = &rig.ferry;
    let question = CopyQuery {
        no_caller_assist: true,
        reuse: ReuseHint::Reused,
        ..CopyQuery::copy(REFERENCE_BYTES as u64, true)
    };
    if let Some(plan) = ferry.explain(&question) {
        let by_gpu = match plan.strategy {
            CopyStrategy::WorkSharing { engine, .. }
            | CopyStrategy::HybridWorkSharing { engine, .. }
            | CopyStrategy::SingleDescriptor { engine } => {
                ferry.plan_context().engines[engine].name == "cuda"
            }
            CopyStrategy::Inline | CopyStrategy::FixedParts { .. } => false,
        };
        if !by_gpu {
            warnings.push(format!(
                "Copies between registered memory are not given to the GPU here, even if they are \
                 to spare the caller: {}.",
                plan.reason
            ));
        }
    }
    if let Some(pinning) = ferry.statistics().pinning("cuda")
        && let Some(error) = &pinning.last_error
    {
        let refused = pinning.failures;
        warnings.push(format!("Memory was refused {refused} times, the last time: {error}."));
    }
    let huge = rig.fresh_buffers(
        GpuCopyDirection::ToDevice,
        PageSize::Huge,
        rig.max_bytes().min(64 << 20),
    );
    let is_huge = |host: memory::HostBuffers| {
        host.all().all(|pages| residency::is_huge(pages.as_ptr() as usize, pages.len()))
    };
    if !huge.is_ok_and(is_huge) {
        warnings.push(
            "Memory of huge pages is memory for which the kernel was asked for them: here it does \
             not say that it gave them."
                .into(),
        );
    }
    warnings
}

#[cfg(test)]
mod tests;
