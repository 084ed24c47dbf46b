//! `alltoall`: every process sends a message to every process, against MPI. The groups have as many
//! processes as cores, fewer, or more.

use crate::Progress;
use crate::group::{BenchEnvironment, GroupTask};
use crate::harness::set;
use crate::harness::{Budget, Sample};
use crate::host::machine::memory_bytes;
use crate::results::outcome::Outcome;
use crate::results::series::{MEMFERRY, OPEN_MPI, OPEN_MPI_OVER_MEMFERRY, is_reference};
use crate::results::size;
use crate::{Bench, Effort};

pub(crate) static BENCH: Bench = Bench::new(
    "alltoall",
    "A message from each process to each, 2 to 8 processes, against MPI",
    run,
);

/// Upper bound on the candidates that hold buffers at the same time: two of Memferry, two of MPI,
/// and three for MPI over Memferry.
const CANDIDATES: u64 = 7;

fn run(mut outcome: Outcome, effort: Effort, progress: &dyn Progress) -> anyhow::Result<Outcome> {
    let (groups, sizes) = points(effort);
    progress.start((groups.len() * (sizes.len() + 1)) as u64 + 1, &outcome.bench);
    progress.step("compiling the peers");
    let mut camp = BenchEnvironment::discover()?;
    camp.discover_mpi_over_memferry();
    let cores = camp.cores();
    for members in groups {
        progress.step(&format!("starting groups of {members}"));
        let carried =
            |bytes| effort == Effort::Full || mpi_over_memferry_key(members, bytes).is_some();
        let mut field = match sizes.iter().any(|&bytes| carried(bytes)) {
            true => camp.candidates_with_references(members as usize),
            false => camp.candidates(members as usize),
        };
        for &bytes in &sizes {
            progress.step(&format!("{members} × {}", size::format(bytes)));
            if !fits(members, bytes, memory_bytes("MemAvailable")) {
                outcome.notes.push(format!(
                    "{} from each to each of {members} was left out: too little memory.",
                    size::format(bytes)
                ));
                continue;
            }
            let task = GroupTask::Alltoall { bytes };
            let rounds = field.interleave(task, Budget::of_groups(effort), |series| {
                !is_reference(series) || carried(bytes)
            });
            let figure = format!("{members} processes");
            let total = |timing: &Sample| timing.total_ns;
            outcome.rows.extend(rounds.rows(&figure, bytes, "ns", total));
            if let Some(key) = key(members, bytes) {
                set(&mut outcome.summary, key, rounds.ratio_to_best_peer(MEMFERRY));
            }
            if let Some(key) = mpi_over_memferry_key(members, bytes) {
                let ratio = rounds.ratio(OPEN_MPI_OVER_MEMFERRY, OPEN_MPI);
                set(&mut outcome.summary, key, ratio);
            }
        }
    }
    camp.finish(&mut outcome);
    outcome.notes.push(format!(
        "The time of one exchange, over the bytes for each receiver; data is checked before it is \
         timed. This machine has {cores} cores: members are bound to them, and with more \
         processes than that they share. A key is the median of the ratios of single rounds, not \
         the ratio of two medians. An MPI over memferry is the same program with the same library, \
         over Memferry's libfabric provider, and never the best peer; the keys `mpi_…_vs_own` \
         compare Open MPI over memferry with Open MPI's own transport."
    ));
    Ok(outcome)
}

/// Group sizes, and bytes from each member to each member.
fn points(effort: Effort) -> (Vec<u64>, Vec<u64>) {
    match effort {
        Effort::Brief => (vec![2, 4], vec![64 << 10, 1 << 20]),
        Effort::Quick => (vec![2, 4, 8], vec![1 << 10, 64 << 10, 1 << 20]),
        Effort::Full => (vec![2, 4, 8], (10..=22).step_by(2).map(|shift| 1 << shift).collect()),
    }
}

/// Returns whether the buffers of all candidates need at most half of the available memory.
fn fits(members: u64, bytes: u64, available: Option<u64>) -> bool {
    let needed = 2 * members * members * bytes * CANDIDATES;
    available.is_none_or(|available| needed <= available / 2)
}

fn key(members: u64, bytes: u64) -> Option<&'static str> {
    match (members, bytes) {
        (2, 0x1_0000) => Some("np2_64k_vs_best"),
        (2, 0x10_0000) => Some("np2_1m_vs_best"),
        (4, 0x1_0000) => Some("np4_64k_vs_best"),
        (4, 0x10_0000) => Some("np4_1m_vs_best"),
        _ => None,
    }
}

/// Summary key of the comparison of Open MPI over Memferry with Open MPI's own transport.
fn mpi_over_memferry_key(members: u64, bytes: u64) -> Option<&'static str> {
    match (members, bytes) {
        (2, 0x10_0000) => Some("mpi_np2_1m_vs_own"),
        (4, 0x1_0000) => Some("mpi_np4_64k_vs_own"),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_effort_measures_what_the_keys_need() {
        for effort in [Effort::Brief, Effort::Quick, Effort::Full] {
            let (groups, sizes) = points(effort);
            let keys = groups
                .iter()
                .flat_map(|&members| sizes.iter().filter_map(move |&bytes| key(members, bytes)));
            assert_eq!(keys.count(), 4, "{effort:?}");
            let carried = groups.iter().flat_map(|&members| {
                sizes.iter().filter_map(move |&bytes| mpi_over_memferry_key(members, bytes))
            });
            assert_eq!(carried.count(), 2, "{effort:?}");
        }
    }

    #[test]
    fn what_would_fill_the_memory_is_left_out() {
        assert!(fits(8, 1 << 20, Some(8 << 30)));
        assert!(!fits(8, 4 << 20, Some(2 << 30)));
        assert!(fits(8, 4 << 20, None));
    }
}
