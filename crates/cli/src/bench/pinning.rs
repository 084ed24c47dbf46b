//! `pinning`: what it costs to have memory where a copy needs it, and what hides or saves that cost
//! (figures 10 and 11 of the paper on overlapped pinning). One half are copies by an engine that may
//! only touch pinned memory, the other messages into memory that is not there.

mod device;
mod rounds;

use std::sync::Arc;

use memferry_memory::pinning::{ChunkSchedule, Lock, Pinner, Populate, Registered};

use super::group::{Camp, LANDINGS, Patience, Task, Timing};
use super::measure::set;
use super::{Bench, Effort};
use crate::outcome::Outcome;
use crate::show::Progress;
use crate::size;
use device::{Device, Way};
use rounds::{Buffers, contest};

pub(super) struct Pinning;

/// Where the keys are taken from: long enough for every schedule, short enough for caches.
const TELLING: u64 = 4 << 20;

const WHOLE: &str = "whole, no cache";
const PROGRESSIVE: &str = "memferry, 1 to 1024 pages";
const CACHE: &str = "memferry, pin-down cache";

/// How a device's memory is pinned, by series.
fn ways() -> [(&'static str, Way); 7] {
    let fixed = |pages| Way::EachTime(ChunkSchedule::Fixed { pages });
    [
        (WHOLE, Way::EachTime(ChunkSchedule::Whole)),
        ("chunks of 1 page", fixed(1)),
        ("chunks of 16 pages", fixed(16)),
        ("chunks of 256 pages", fixed(256)),
        ("chunks of 1024 pages", fixed(1024)),
        (PROGRESSIVE, Way::EachTime(ChunkSchedule::default())),
        (CACHE, Way::Cached),
    ]
}

impl Bench for Pinning {
    fn name(&self) -> &'static str {
        "pinning"
    }

    fn about(&self) -> &'static str {
        "Pinned memory for engines and fresh memory for messages: whole, overlapped, cached"
    }

    fn run(&self, effort: Effort, progress: &Progress) -> anyhow::Result<Outcome> {
        let (pinners, refused) = pinners(effort);
        let sizes = message_sizes(effort);
        let steps: usize = pinners.iter().map(|(_, sizes)| 2 * sizes.len()).sum();
        progress.start((steps + 2 * sizes.len()) as u64 + 1, self.name());
        let mut outcome = Outcome::new(self.name());
        outcome.missing.extend(refused);
        let mut worst = f64::INFINITY;
        for (at, (pinner, sizes)) in pinners.into_iter().enumerate() {
            let device = Device::new(pinner)?;
            for &bytes in &sizes {
                for buffers in [Buffers::Fresh, Buffers::Reused] {
                    let name = device.pinner().name();
                    progress.step(&format!("{name}, {buffers}, {}", size::format(bytes)));
                    let ratio = devices(&mut outcome, &device, bytes, buffers, effort)?;
                    // The first is what devices do.
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
}

/// A pinner, and the sizes that are measured with it.
type Candidate = (Arc<dyn Pinner>, Vec<u64>);

/// The pinners that this machine permits, each with its sizes, and those that it does not permit.
fn pinners(effort: Effort) -> (Vec<Candidate>, Vec<String>) {
    let (mut found, mut refused) = (Vec::<Arc<dyn Pinner>>::new(), Vec::new());
    match Registered::new() {
        Ok(registered) => found.push(Arc::new(registered)),
        Err(error) => refused.push(format!("registered buffers ({error})")),
    }
    // Where that is forbidden, locks stand in for devices.
    found.push(Arc::new(Lock::new()));
    found.push(Arc::new(Populate));
    let sizes = |first: bool| match (effort, first) {
        (Effort::Brief, true) => vec![TELLING],
        (Effort::Brief, false) => vec![],
        (Effort::Quick, true) => vec![64 << 10, 512 << 10, TELLING, 16 << 20, 64 << 20],
        (Effort::Quick, false) => vec![64 << 10, TELLING],
        (Effort::Full, _) => (16..=26).map(|shift| 1 << shift).collect(),
    };
    let mut first = true;
    let with_sizes = found.into_iter().map(|pinner| (pinner, sizes(std::mem::take(&mut first))));
    (with_sizes.collect(), refused)
}

fn message_sizes(effort: Effort) -> Vec<u64> {
    match effort {
        Effort::Brief => vec![256 << 10, TELLING],
        Effort::Quick => {
            vec![64 << 10, 256 << 10, 512 << 10, 1 << 20, TELLING, 16 << 20, 64 << 20]
        }
        Effort::Full => {
            let shifts = [14, 15, 16, 17, 18, 19, 20, 21, 22, 24, 26];
            shifts.into_iter().map(|shift| 1 << shift).collect()
        }
    }
}

/// Copies of one size by one device. Returns how the usual policy compares with none.
fn devices(
    outcome: &mut Outcome,
    device: &Device,
    bytes: u64,
    buffers: Buffers,
    effort: Effort,
) -> anyhow::Result<f64> {
    let rounds = contest(device, &ways(), bytes as usize, buffers, effort)?;
    let pinner = device.pinner().name();
    let figure = format!("copies by a device, {buffers} buffers, pinned by {pinner}");
    outcome.rows.extend(rounds.rows(&figure, bytes));
    for (series, error) in &rounds.failed {
        outcome.missing.push(format!("{pinner}, {series}, {} ({error})", size::format(bytes)));
    }
    let is_device = outcome.summary.is_empty() || pinner == "registered";
    if bytes == TELLING && is_device {
        let summary = &mut outcome.summary;
        match buffers {
            Buffers::Fresh => {
                let ratio = rounds.times_longer(WHOLE, PROGRESSIVE);
                set(summary, "overlapped_vs_whole_fresh", ratio);
            }
            Buffers::Reused => {
                set(summary, "cache_vs_none_reused", rounds.times_longer(WHOLE, CACHE));
            }
        }
    }
    let ratio = rounds.times_longer(WHOLE, CACHE);
    Ok(if ratio.is_finite() { ratio } else { f64::INFINITY })
}

/// Messages of all sizes. Returns how the usual policy compares with none at worst.
fn messages(
    outcome: &mut Outcome,
    sizes: &[u64],
    effort: Effort,
    progress: &Progress,
) -> anyhow::Result<f64> {
    let mut camp = Camp::pitch_for_own()?;
    let mut field = camp.field_of_landings();
    let mut worst = f64::INFINITY;
    for fresh in [true, false] {
        let buffers = if fresh { Buffers::Fresh } else { Buffers::Reused };
        for &bytes in sizes {
            progress.step(&format!("messages, {buffers}, {}", size::format(bytes)));
            let rounds = field.contest(Task::Land { bytes, fresh }, patience(effort), |_| true);
            let speed = |timing: &Timing| bytes as f64 / timing.total_ns;
            let figure = format!("messages into {buffers} buffers");
            outcome.rows.extend(rounds.rows(&figure, bytes, "GB/s", speed));
            for [plain, ours] in LANDINGS {
                let ratio = rounds.times_longer(plain, ours);
                worst = if ratio.is_finite() { worst.min(ratio) } else { f64::NEG_INFINITY };
            }
        }
    }
    drop(field);
    camp.strike(outcome);
    Ok(worst)
}

/// Many short turns: what is compared differs little, and the worst of many sizes counts.
fn patience(effort: Effort) -> Patience {
    match effort {
        Effort::Brief => Patience { rounds: 31, slice_ns: 1e6, contest_ns: 0.4e9 },
        Effort::Quick => Patience { rounds: 51, slice_ns: 1e6, contest_ns: 0.8e9 },
        Effort::Full => Patience { rounds: 101, slice_ns: 2e6, contest_ns: 2.5e9 },
    }
}

fn notes() -> [String; 3] {
    [
        "The device is a channel of the copy core on another core that gets nothing but pinned \
         memory. Timed are pinning source and target, handing over, the copy and unpinning; with \
         the pin-down cache, finding the two in it. Mapping and unmapping are not timed. Chunks are \
         pinned while the device copies those before. Fresh targets are mapped anew for every copy; \
         sources are always there."
            .into(),
        "Pinned by `registered` means buffers registered with io_uring, whose page frames are held \
         as drivers hold them; `lock` is mlock, `populate` makes pages present and no more. The keys \
         on devices are of the first of these that is permitted, at 4 MiB."
            .into(),
        "Messages go from one process to another, each bound to a core of its own, into a buffer \
         that was never touched or has been used before. Timed are the message and an answer of one \
         byte, by the sender. Plain is MEMFERRY_PINNING=off. `never_slower` is the worst over \
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
            assert!(pinners[0].1.contains(&TELLING), "{effort:?}");
            assert!(message_sizes(effort).is_sorted());
        }
    }

    #[test]
    fn the_keys_compare_series_that_are_measured() {
        for needed in [WHOLE, PROGRESSIVE, CACHE] {
            assert!(ways().iter().any(|(series, _)| *series == needed), "{needed}");
        }
    }
}
