//! `pingpong`: how long a message takes from one process to another, from nothing to 64 MiB, against
//! everybody else who carries messages on this machine.

use super::group::{
    Camp, FLOOR, MEMFERRY, OPEN_MPI, OPEN_MPI_CARRIED, Patience, Rounds, SHAREABLE, SINGLE_LINE,
    Task, Timing, UCX, is_aside,
};
use super::measure::set;
use super::{Bench, Effort};
use crate::outcome::Outcome;
use crate::show::Progress;
use crate::size;

pub(super) struct Pingpong;

/// The size at which a message is little more than a cache line.
const SMALL: u64 = 8;
/// The sizes of the keys, at which everybody takes part even when time is short.
const TELLING: [u64; 5] = [SMALL, 64 << 10, 1 << 20, 4 << 20, 64 << 20];
/// The sizes of the keys about MPI over Memferry.
const CARRIED: [u64; 4] = [SMALL, 64 << 10, 4 << 20, 64 << 20];
/// The sizes at which MPICH is measured over Memferry where time is short: it has no keys.
const CARRIED_BESIDES: [u64; 2] = [64 << 10, 4 << 20];

impl Bench for Pingpong {
    fn name(&self) -> &'static str {
        "pingpong"
    }

    fn about(&self) -> &'static str {
        "Messages between two processes, to and fro, against MPI, UCX, iceoryx2 and ipc-channel"
    }

    fn run(&self, effort: Effort, progress: &Progress) -> anyhow::Result<Outcome> {
        let sizes = sizes(effort);
        progress.start(sizes.len() as u64 + 2, self.name());
        progress.step("compiling the peers");
        let mut outcome = Outcome::new(self.name());
        let mut camp = Camp::pitch()?;
        camp.invite_mpi_over_memferry();
        progress.step("starting the groups");
        let mut field = camp.field_of_pairs();
        let mut worst = f64::INFINITY;
        for bytes in sizes {
            progress.step(&size::format(bytes));
            let rounds = field.contest(Task::Pingpong { bytes }, Patience::of(effort), |series| {
                match series {
                    FLOOR | SINGLE_LINE => bytes == SMALL,
                    // Each of its measurements starts two processes.
                    UCX => effort == Effort::Full || TELLING.contains(&bytes),
                    OPEN_MPI_CARRIED => effort == Effort::Full || CARRIED.contains(&bytes),
                    aside if is_aside(aside) => {
                        effort == Effort::Full || CARRIED_BESIDES.contains(&bytes)
                    }
                    _ => true,
                }
            });
            add_rows(&mut outcome, &rounds, bytes);
            let ratio = rounds.against_best(MEMFERRY);
            worst = if rounds.has(MEMFERRY) { ratio.min(worst) } else { f64::NEG_INFINITY };
            add_keys(&mut outcome, &rounds, bytes, ratio);
        }
        drop(field);
        if worst.is_finite() {
            set(&mut outcome.summary, "worst_vs_best", worst);
        }
        camp.strike(&mut outcome);
        outcome.notes.push(
            "Half of a round trip between two processes, each bound to a core of its own; data goes \
             from ordinary memory of the one to ordinary memory of the other, and is checked before \
             it is timed. The best is the peer with the best median; a key is the \
             median of the ratios of single rounds, not the ratio of two medians. The floor is two cache \
             lines, one for each direction, handed over by two threads of this process on the same \
             two cores."
                .into(),
        );
        outcome.notes.push(
            "An MPI over memferry is the same program with the same library, over Memferry's libfabric \
             provider; its partner is that library with its own transport, in the same rounds. Such \
             rows are never the best peer."
                .into(),
        );
        outcome.notes.push(
            "memferry (shareable) sends from and receives into memory that the other side maps. \
             iceoryx2 and ipc-channel pay for the copies into and out of their own memory. UCX is \
             ucx_perftest tag_lat, started anew for every measurement."
                .into(),
        );
        Ok(outcome)
    }
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

fn add_rows(outcome: &mut Outcome, rounds: &Rounds, bytes: u64) {
    let half = |timing: &Timing| timing.total_ns / 2.0;
    if bytes == 0 {
        // Without a size it has no place among the others.
        outcome.rows.extend(rounds.rows("half round trip of an empty message", 0, "ns", half));
        return;
    }
    outcome.rows.extend(rounds.rows("half round trip", bytes, "ns", half));
    let bandwidth = rounds.rows("bandwidth", bytes, "GB/s", |timing| bytes as f64 / half(timing));
    outcome.rows.extend(
        bandwidth.into_iter().filter(|row| ![FLOOR, SINGLE_LINE].contains(&row.series.as_str())),
    );
}

fn add_keys(outcome: &mut Outcome, rounds: &Rounds, bytes: u64, ratio: f64) {
    let summary = &mut outcome.summary;
    if bytes == SMALL {
        set(summary, "floor_ns", rounds.median_ns(FLOOR) / 2.0);
        set(summary, "8b_vs_floor", rounds.times_longer(MEMFERRY, FLOOR));
    }
    if bytes == 4 << 20 {
        set(summary, "4m_shareable_vs_best", rounds.against_best(SHAREABLE));
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
        set(summary, key, rounds.times_longer(OPEN_MPI, OPEN_MPI_CARRIED));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_effort_measures_what_the_keys_need() {
        for effort in [Effort::Brief, Effort::Quick, Effort::Full] {
            let sizes = sizes(effort);
            for needed in TELLING.into_iter().chain(CARRIED) {
                assert!(sizes.contains(&needed), "{effort:?} {needed}");
            }
            assert!(sizes.is_sorted());
        }
    }
}
