//! `pingpong`: the time of a message from one process to another, from 0 bytes to 64 MiB, against
//! the other message libraries of this machine.

use std::time::Instant;

use crate::Progress;
use crate::group::{BenchEnvironment, GroupTask, UCX};
use crate::harness::set;
use crate::harness::{Budget, Sample, Samples};
use crate::results::outcome::Outcome;
use crate::results::series::{
    LOWER_BOUND, MEMFERRY, OPEN_MPI, OPEN_MPI_OVER_MEMFERRY, SHAREABLE, SINGLE_LINE, is_reference,
};
use crate::results::size;
use crate::{Bench, Effort};

pub(crate) static BENCH: Bench = Bench::new(
    "pingpong",
    "Messages between two processes, to and fro, against MPI, UCX, iceoryx2 and ipc-channel",
    run,
)
.with_screen(run_for_screen);

/// A message that fits into a cache line.
const SMALL: u64 = 8;
/// Sizes of the summary keys, at which every candidate runs even in a short run.
const REFERENCE_SIZES: [u64; 5] = [SMALL, 64 << 10, 1 << 20, 4 << 20, 64 << 20];
/// Sizes of the keys about MPI over Memferry.
const MPI_OVER_MEMFERRY_SIZES: [u64; 4] = [SMALL, 64 << 10, 4 << 20, 64 << 20];
/// Sizes of MPICH over Memferry in a short run. MPICH over Memferry has no keys.
const MPICH_OVER_MEMFERRY_SIZES: [u64; 2] = [64 << 10, 4 << 20];

fn run(outcome: Outcome, effort: Effort, progress: &dyn Progress) -> anyhow::Result<Outcome> {
    measure(outcome, &PingpongPlan::of(effort), progress)
}

fn run_for_screen(
    outcome: Outcome,
    until: Instant,
    progress: &dyn Progress,
) -> anyhow::Result<Outcome> {
    measure(outcome, &PingpongPlan::for_screen(until), progress)
}

/// What a run measures.
struct PingpongPlan {
    effort: Effort,
    sizes: Vec<u64>,
    /// Whether MPI over Memferry is measured next to MPI's own transport.
    has_references: bool,
    /// Only the first size may start after this time.
    until: Option<Instant>,
}

impl PingpongPlan {
    fn of(effort: Effort) -> Self {
        Self { effort, sizes: sizes(effort), has_references: true, until: None }
    }

    /// The plan of the screen: first the sizes of its lines, then the other points of the curve.
    fn for_screen(until: Instant) -> Self {
        let sizes = vec![SMALL, 4 << 20, 64 << 10, 1 << 20, 256 << 10, 16 << 10, 16 << 20];
        Self { effort: Effort::Brief, sizes, has_references: false, until: Some(until) }
    }

    fn takes_part(&self, series: &str, bytes: u64) -> bool {
        let is_full = self.effort == Effort::Full;
        match series {
            LOWER_BOUND | SINGLE_LINE => bytes == SMALL,
            // Each measurement of UCX starts two processes.
            UCX => is_full || REFERENCE_SIZES.contains(&bytes),
            OPEN_MPI_OVER_MEMFERRY => is_full || MPI_OVER_MEMFERRY_SIZES.contains(&bytes),
            aside if is_reference(aside) => is_full || MPICH_OVER_MEMFERRY_SIZES.contains(&bytes),
            _ => true,
        }
    }

    fn is_late(&self) -> bool {
        self.until.is_some_and(|until| Instant::now() >= until)
    }
}

fn measure(
    mut outcome: Outcome,
    plan: &PingpongPlan,
    progress: &dyn Progress,
) -> anyhow::Result<Outcome> {
    progress.start(plan.sizes.len() as u64 + 2, &outcome.bench);
    progress.step("compiling the peers");
    let mut camp = BenchEnvironment::discover()?;
    if plan.has_references {
        camp.discover_mpi_over_memferry();
    }
    progress.step("starting the groups");
    let mut field = camp.pair_candidates();
    let mut worst = f64::INFINITY;
    for (index, &bytes) in plan.sizes.iter().enumerate() {
        progress.step(&size::format(bytes));
        if index > 0 && plan.is_late() {
            break;
        }
        let rounds = field.interleave(
            GroupTask::Pingpong { bytes },
            Budget::of_groups(plan.effort),
            |series| plan.takes_part(series, bytes),
        );
        add_rows(&mut outcome, &rounds, bytes);
        let ratio = rounds.ratio_to_best_peer(MEMFERRY);
        worst = if rounds.has(MEMFERRY) { ratio.min(worst) } else { f64::NEG_INFINITY };
        add_keys(&mut outcome, &rounds, bytes, ratio);
    }
    drop(field);
    if worst.is_finite() {
        set(&mut outcome.summary, "worst_vs_best", worst);
    }
    camp.finish(&mut outcome);
    outcome.notes.extend(notes().map(String::from));
    Ok(outcome)
}

fn notes() -> [&'static str; 3] {
    [
        "Half of a round trip between two processes, each bound to a core of its own; data goes \
         from ordinary memory of the one to ordinary memory of the other, and is checked before \
         it is timed. The best is the peer with the best median; a key is the \
         median of the ratios of single rounds, not the ratio of two medians. The floor is two cache \
         lines, one for each direction, handed over by two threads of this process on the same \
         two cores.",
        "An MPI over memferry is the same program with the same library, over Memferry's libfabric \
         provider; its partner is that library with its own transport, in the same rounds. Such \
         rows are never the best peer.",
        "memferry (shareable) sends from and receives into memory that the other side maps. \
         iceoryx2 and ipc-channel pay for the copies into and out of their own memory. UCX is \
         ucx_perftest tag_lat, started anew for every measurement.",
    ]
}

fn sizes(effort: Effort) -> Vec<u64> {
    let powers = |from: u32, to: u32, step: usize| {
        (from..=to).step_by(step).map(|shift| 1u64 << shift).collect::<Vec<_>>()
    };
    match effort {
        Effort::Brief => vec![SMALL, 1 << 10, 64 << 10, 1 << 20, 4 << 20, 64 << 20],
        Effort::Quick => [vec![0, SMALL, 256], powers(10, 22, 2), vec![64 << 20]].concat(),
        Effort::Full => [vec![0, 1, SMALL, 64, 256], powers(10, 26, 1)].concat(),
    }
}

fn add_rows(outcome: &mut Outcome, rounds: &Samples, bytes: u64) {
    let half = |timing: &Sample| timing.total_ns / 2.0;
    if bytes == 0 {
        // An empty message has no position on the size axis, so it gets a figure of its own.
        outcome.rows.extend(rounds.rows("half round trip of an empty message", 0, "ns", half));
        return;
    }
    outcome.rows.extend(rounds.rows("half round trip", bytes, "ns", half));
    let bandwidth = rounds.rows("bandwidth", bytes, "GB/s", |timing| bytes as f64 / half(timing));
    outcome.rows.extend(
        bandwidth
            .into_iter()
            .filter(|row| ![LOWER_BOUND, SINGLE_LINE].contains(&row.series.as_str())),
    );
}

fn add_keys(outcome: &mut Outcome, rounds: &Samples, bytes: u64, ratio: f64) {
    let summary = &mut outcome.summary;
    if bytes == SMALL {
        set(summary, "floor_ns", rounds.median_ns(LOWER_BOUND) / 2.0);
        set(summary, "8b_vs_floor", rounds.ratio(LOWER_BOUND, MEMFERRY));
    }
    if bytes == 4 << 20 {
        set(summary, "4m_shareable_vs_best", rounds.ratio_to_best_peer(SHAREABLE));
    }
    let (key, carried_key) = match bytes {
        SMALL => ("8b_vs_best", Some("mpi_8b_vs_own")),
        0x1_0000 => ("64k_vs_best", Some("mpi_64k_vs_own")),
        0x10_0000 => ("1m_vs_best", None),
        0x40_0000 => ("4m_vs_best", Some("mpi_4m_vs_own")),
        0x400_0000 => ("64m_vs_best", Some("mpi_64m_vs_own")),
        _ => return,
    };
    set(summary, key, ratio);
    if let Some(key) = carried_key {
        set(summary, key, rounds.ratio(OPEN_MPI_OVER_MEMFERRY, OPEN_MPI));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_screen_measures_the_sizes_of_its_lines_first() {
        let plan = PingpongPlan::for_screen(Instant::now());
        assert_eq!(plan.sizes[..3], [SMALL, 4 << 20, 64 << 10]);
        assert!(plan.is_late() && !PingpongPlan::of(Effort::Full).is_late());
    }

    #[test]
    fn every_effort_measures_what_the_keys_need() {
        for effort in [Effort::Brief, Effort::Quick, Effort::Full] {
            let sizes = sizes(effort);
            for needed in REFERENCE_SIZES.into_iter().chain(MPI_OVER_MEMFERRY_SIZES) {
                assert!(sizes.contains(&needed), "{effort:?} {needed}");
            }
            assert!(sizes.is_sorted());
        }
    }
}
