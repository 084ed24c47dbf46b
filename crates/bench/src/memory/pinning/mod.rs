//! `pinning`: the cost of pinning or populating memory for a copy, and how much of it is hidden or
//! saved (figures 10 and 11 of the paper on overlapped pinning). One half measures copies by an
//! engine that accesses only pinned memory, the other half messages into memory that is not
//! resident.

mod candidate;
mod device;

use std::sync::Arc;

use memferry_memory::pinning::{ChunkSchedule, IoUringPinner, MlockPinner, Pinner, PopulatePinner};

use crate::Progress;
use crate::group::{BenchEnvironment, FIRST_TOUCH, GroupTask};
use crate::harness::{Budget, Failure, Sample, set};
use crate::results::outcome::Outcome;
use crate::results::size;
use crate::{Bench, Effort};
use candidate::{PinBufferState, interleave};
use device::{PinMethod, PinningDevice};

pub(crate) static BENCH: Bench = Bench::new(
    "pinning",
    "Pinned memory for engines and fresh memory for messages: whole, overlapped, cached",
    run,
);

/// Size of the summary keys: long enough for every chunk schedule, short enough for the caches.
const REFERENCE_BYTES: u64 = 4 << 20;

const WHOLE: &str = "whole, no cache";
const PROGRESSIVE: &str = "memferry, 1 to 1024 pages";
const CACHE: &str = "memferry, pin cache";

/// Methods to pin a device's memory, by series.
fn pin_methods() -> [(&'static str, PinMethod); 7] {
    let fixed = |pages| PinMethod::EachTime(ChunkSchedule::Fixed { pages });
    [
        (WHOLE, PinMethod::EachTime(ChunkSchedule::Whole)),
        ("chunks of 1 page", fixed(1)),
        ("chunks of 16 pages", fixed(16)),
        ("chunks of 256 pages", fixed(256)),
        ("chunks of 1024 pages", fixed(1024)),
        (PROGRESSIVE, PinMethod::EachTime(ChunkSchedule::default())),
        (CACHE, PinMethod::Cached),
    ]
}

fn run(mut outcome: Outcome, effort: Effort, progress: &dyn Progress) -> anyhow::Result<Outcome> {
    let (pinners, refused) = pinners(effort);
    let sizes = message_sizes(effort);
    let steps: usize = pinners.iter().map(|(_, sizes)| 2 * sizes.len()).sum();
    progress.start((steps + 2 * sizes.len()) as u64 + 1, &outcome.bench);
    outcome.missing.extend(refused);
    let mut worst = f64::INFINITY;
    for (at, (pinner, sizes)) in pinners.into_iter().enumerate() {
        let device = PinningDevice::new(pinner)?;
        for &bytes in &sizes {
            for buffers in [PinBufferState::Fresh, PinBufferState::Reused] {
                let name = device.pinner().name();
                progress.step(&format!("{name}, {buffers}, {}", size::format(bytes)));
                let ratio = devices(&mut outcome, &device, bytes, buffers, effort)?;
                // Only the first pinner represents the pinning of devices.
                worst = if at == 0 { worst.min(ratio) } else { worst };
            }
        }
    }
    progress.step("starting the processes");
    worst = worst.min(messages(&mut outcome, &sizes, effort, progress)?);
    set(&mut outcome.summary, "never_slower", worst);
    outcome.notes.extend(notes());
    Ok(outcome)
}

/// A pinner, and the sizes that are measured with it.
type PinnerSizes = (Arc<dyn Pinner>, Vec<u64>);

/// Pinners that this machine permits, each with its sizes, and the reasons why others are refused.
fn pinners(effort: Effort) -> (Vec<PinnerSizes>, Vec<String>) {
    let (mut found, mut refused) = (Vec::<Arc<dyn Pinner>>::new(), Vec::new());
    match IoUringPinner::new() {
        Ok(registered) => found.push(Arc::new(registered)),
        Err(error) => refused.push(format!("registered buffers ({error})")),
    }
    // If io_uring registration is refused, mlock comes first and represents the pinning of devices.
    found.push(Arc::new(MlockPinner::new()));
    found.push(Arc::new(PopulatePinner));
    let sizes = |first: bool| match (effort, first) {
        (Effort::Brief, true) => vec![REFERENCE_BYTES],
        (Effort::Brief, false) => vec![],
        (Effort::Quick, true) => vec![64 << 10, 512 << 10, REFERENCE_BYTES, 16 << 20, 64 << 20],
        (Effort::Quick, false) => vec![64 << 10, REFERENCE_BYTES],
        (Effort::Full, _) => (16..=26).map(|shift| 1 << shift).collect(),
    };
    let mut first = true;
    let with_sizes = found.into_iter().map(|pinner| (pinner, sizes(std::mem::take(&mut first))));
    (with_sizes.collect(), refused)
}

fn message_sizes(effort: Effort) -> Vec<u64> {
    match effort {
        Effort::Brief => vec![256 << 10, REFERENCE_BYTES],
        Effort::Quick => {
            vec![64 << 10, 256 << 10, 512 << 10, 1 << 20, REFERENCE_BYTES, 16 << 20, 64 << 20]
        }
        Effort::Full => {
            let shifts = [14, 15, 16, 17, 18, 19, 20, 21, 22, 24, 26];
            shifts.into_iter().map(|shift| 1 << shift).collect()
        }
    }
}

/// Measures copies of one size by one device. Returns how many times longer a copy takes without
/// the pin cache than with it.
fn devices(
    outcome: &mut Outcome,
    device: &PinningDevice,
    bytes: u64,
    buffers: PinBufferState,
    effort: Effort,
) -> anyhow::Result<f64> {
    let rounds = interleave(device, &pin_methods(), bytes as usize, buffers, effort)?;
    let pinner = device.pinner().name();
    let figure = format!("copies by a device, {buffers} buffers, pinned by {pinner}");
    outcome.rows.extend(rounds.bandwidth_rows(&figure, bytes, bytes));
    for Failure { series, reason, .. } in rounds.failures() {
        outcome.missing.push(format!("{pinner}, {series}, {} ({reason})", size::format(bytes)));
    }
    let is_device = outcome.summary.is_empty() || pinner == "registered";
    if bytes == REFERENCE_BYTES && is_device {
        let summary = &mut outcome.summary;
        match buffers {
            PinBufferState::Fresh => {
                let ratio = rounds.ratio(PROGRESSIVE, WHOLE);
                set(summary, "overlapped_vs_whole_fresh", ratio);
            }
            PinBufferState::Reused => {
                set(summary, "cache_vs_none_reused", rounds.ratio(CACHE, WHOLE));
            }
        }
    }
    let ratio = rounds.ratio(CACHE, WHOLE);
    Ok(if ratio.is_finite() { ratio } else { f64::INFINITY })
}

/// Measures messages of all sizes. Returns the minimum, over all sizes and kinds of memory, of how
/// many times longer a message takes without prefaulting than by default.
fn messages(
    outcome: &mut Outcome,
    sizes: &[u64],
    effort: Effort,
    progress: &dyn Progress,
) -> anyhow::Result<f64> {
    let mut camp = BenchEnvironment::in_process()?;
    let mut field = camp.first_touch_candidates();
    let mut worst = f64::INFINITY;
    for fresh in [true, false] {
        let buffers = if fresh { PinBufferState::Fresh } else { PinBufferState::Reused };
        for &bytes in sizes {
            progress.step(&format!("messages, {buffers}, {}", size::format(bytes)));
            let rounds =
                field.interleave(GroupTask::FirstTouch { bytes, fresh }, budget(effort), |_| true);
            let speed = |timing: &Sample| bytes as f64 / timing.total_ns;
            let figure = format!("messages into {buffers} buffers");
            outcome.rows.extend(rounds.rows(&figure, bytes, "GB/s", speed));
            for [plain, ours] in FIRST_TOUCH {
                let ratio = rounds.ratio(ours, plain);
                worst = if ratio.is_finite() { worst.min(ratio) } else { f64::NEG_INFINITY };
            }
        }
    }
    drop(field);
    camp.finish(outcome);
    Ok(worst)
}

/// Many short measurements: the differences are small, and the key is the worst of many sizes. Of equal
/// length: each has new memory, whose first messages take longer.
fn budget(effort: Effort) -> Budget {
    match effort {
        Effort::Brief => Budget::equal(31, 1, 400),
        Effort::Quick => Budget::equal(51, 1, 800),
        Effort::Full => Budget::equal(101, 2, 2500),
    }
}

fn notes() -> [String; 3] {
    [
        "The device is a channel of the copy core on another core that gets nothing but pinned \
         memory. Timed are pinning source and target, handing over, the copy and unpinning; with \
         the pin cache, finding the two in it. Mapping and unmapping are not timed. Chunks are \
         pinned while the device copies those before. Fresh targets are mapped anew for every copy; \
         sources are always there."
            .into(),
        "Pinned by `registered` means buffers registered with io_uring, whose page frames are held \
         as drivers hold them; `lock` is mlock, `populate` makes pages present and no more. The keys \
         on devices are of the first of these that is permitted, at 4 MiB."
            .into(),
        "Messages go from one process to another, each bound to a core of its own, into a buffer \
         that was never touched or has been used before. Timed are the message and an answer of one \
         byte, by the sender. Plain is the policy `off`, by the same two processes with the same \
         memory, which change the policy from message to message: two pairs of processes with the \
         same policy differ by up to 7 %. `never_slower` is the worst over \
         all sizes of the median ratio of messages, plain against usual, and of device copies, \
         without the cache against with it."
            .into(),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_effort_measures_what_the_keys_need() {
        for effort in [Effort::Brief, Effort::Quick, Effort::Full] {
            let (pinners, _) = pinners(effort);
            assert!(pinners[0].1.contains(&REFERENCE_BYTES), "{effort:?}");
            assert!(message_sizes(effort).is_sorted());
        }
    }

    #[test]
    fn the_keys_compare_series_that_are_measured() {
        for needed in [WHOLE, PROGRESSIVE, CACHE] {
            assert!(pin_methods().iter().any(|(series, _)| *series == needed), "{needed}");
        }
    }
}
