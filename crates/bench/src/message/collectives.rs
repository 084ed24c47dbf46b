//! `collectives`: barrier, broadcast, sum and exchange of 2, 4 and 16 processes, against MPI.

use crate::Progress;
use crate::group::{BenchEnvironment, GroupTask};
use crate::harness::{Budget, set};
use crate::host::machine::memory_bytes;
use crate::message::collective_task::{CollectiveKind, set_count};
use crate::results::outcome::Outcome;
use crate::results::series::MEMFERRY;
use crate::results::size;
use crate::{Bench, Effort};

pub(crate) static BENCH: Bench = Bench::new(
    "collectives",
    "Barrier, broadcast, sum and exchange of 2 to 16 processes, against MPI",
    run,
);

/// Upper bound on the candidates that hold buffers at the same time: Memferry, MPI over Memferry, Open
/// MPI with three components, and MPICH.
const CANDIDATES: u64 = 6;
/// Members of the largest groups, which only run where each has a core.
const MANY: u64 = 16;

fn run(mut outcome: Outcome, effort: Effort, progress: &dyn Progress) -> anyhow::Result<Outcome> {
    let mut environment = BenchEnvironment::discover()?;
    let cores = environment.cores();
    let groups = groups(effort, cores);
    let points: Vec<_> =
        CollectiveKind::ALL.into_iter().flat_map(|kind| points(kind, effort)).collect();
    progress.start((groups.len() * (points.len() + 1)) as u64, &outcome.bench);
    environment.discover_collectives();
    for members in groups {
        progress.step(&format!("starting groups of {members}"));
        let mut field = environment.collective_candidates(members as usize);
        for &(kind, bytes) in &points {
            let name = kind.word();
            progress.step(&format!("{name}, {members} × {}", size::format(bytes)));
            if !fits(kind, members, bytes, memory_bytes("MemAvailable")) {
                outcome.notes.push(format!(
                    "{name} of {} by {members} processes was left out: too little memory.",
                    size::format(bytes)
                ));
                continue;
            }
            let task = GroupTask::Collective { kind, bytes };
            let rounds = field.interleave(task, Budget::of_groups(effort), |_| true);
            let figure = format!("{name}, {members} processes");
            outcome.rows.extend(rounds.time_rows(&figure, bytes));
            if let Some(key) = key(kind, members, bytes) {
                set(&mut outcome.summary, &key, rounds.ratio_to_best_peer(MEMFERRY));
            }
        }
    }
    environment.finish(&mut outcome);
    outcome.notes.push(format!(
        "The average time of one operation at the slowest process; results are checked before and \
         after they are timed. Every process writes its data anew before each operation, and \
         operations rotate over several buffers, so that nobody has the data of others in its caches. \
         Writing is not timed: a barrier of the same library follows it, except that a barrier, and \
         sums and exchanges of up to 1 KiB, follow each other without a pause. The root of a broadcast \
         changes each time. This machine has {cores} cores: members are bound to them, and with more \
         processes than that they share. An Open MPI with a name in brackets prefers that component. \
         Open MPI over memferry is `memferry mpirun --collectives`, and never the best peer."
    ));
    Ok(outcome)
}

/// Sizes of groups.
fn groups(effort: Effort, cores: usize) -> Vec<u64> {
    let few: &[u64] = if effort == Effort::Full { &[2, 4] } else { &[4] };
    let many = (cores as u64 >= MANY).then_some(MANY);
    few.iter().copied().chain(many).collect()
}

/// Bytes of a block of a collective.
fn points(kind: CollectiveKind, effort: Effort) -> Vec<(CollectiveKind, u64)> {
    let all: &[u64] = &[8, 64, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20];
    let sizes: Vec<u64> = match kind {
        CollectiveKind::Barrier => vec![0],
        _ if effort == Effort::Full => all.to_vec(),
        _ => all.iter().copied().filter(|&bytes| key(kind, 4, bytes).is_some()).collect(),
    };
    sizes.into_iter().map(|bytes| (kind, bytes)).collect()
}

/// Returns whether the buffers of all candidates need at most half of the available memory.
fn fits(kind: CollectiveKind, members: u64, bytes: u64, available: Option<u64>) -> bool {
    let buffer = kind.buffer_bytes(bytes as usize, members as usize);
    let needed = 2 * set_count(buffer) as u64 * buffer as u64 * members * CANDIDATES;
    available.is_none_or(|available| needed <= available / 2)
}

fn key(kind: CollectiveKind, members: u64, bytes: u64) -> Option<String> {
    let name = match (kind, bytes) {
        (CollectiveKind::Barrier, _) => "barrier",
        (CollectiveKind::Allreduce, 8) => "allreduce_8b",
        (CollectiveKind::Allreduce, 0x10_0000) => "allreduce_1m",
        (CollectiveKind::Broadcast, 0x10_0000) => "bcast_1m",
        (CollectiveKind::Alltoall, 0x1_0000) => "alltoall_64k",
        _ => return None,
    };
    [4, MANY].contains(&members).then(|| format!("{name}_np{members}_vs_best"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::summary_keys::KEYS;

    #[test]
    fn every_effort_measures_the_known_keys() {
        for effort in [Effort::Brief, Effort::Quick, Effort::Full] {
            let mut keys = Vec::new();
            for members in groups(effort, 16) {
                for (kind, bytes) in
                    CollectiveKind::ALL.into_iter().flat_map(|it| points(it, effort))
                {
                    keys.extend(key(kind, members, bytes));
                }
            }
            let known = KEYS.iter().filter(|known| known.bench == BENCH.name);
            assert_eq!(keys.len(), known.clone().count(), "{effort:?}");
            assert!(known.clone().all(|known| keys.iter().any(|key| key == known.key)));
        }
        assert_eq!(groups(Effort::Full, 8), [2, 4]);
        assert_eq!(groups(Effort::Quick, 2), [4]);
    }

    #[test]
    fn what_would_fill_the_memory_is_left_out() {
        assert!(fits(CollectiveKind::Alltoall, 4, 1 << 20, Some(8 << 30)));
        assert!(!fits(CollectiveKind::Alltoall, 16, 4 << 20, Some(8 << 30)));
        assert!(fits(CollectiveKind::Broadcast, 16, 4 << 20, None));
    }
}
