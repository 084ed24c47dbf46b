//! Random sequences of operations give what a simple model gives, on all paths; and a rank that scribbles over the
//! shared memory harms nobody's memory and hangs nobody for longer than it lives.

use std::time::{Duration, Instant};

use crate::support::{join, processes, small_tuning, threads};
use memferry_collective::{Error, NoProgress, ReduceOp, Stop, Team};
use memferry_testing::HangGuard;
use memferry_testing::message::process::role;
use proptest::prelude::*;

#[derive(Debug, Clone, Copy)]
enum Call {
    Barrier,
    Broadcast(usize),
    Allreduce,
    Reduce(usize),
    Gather(usize),
    Allgather,
    Alltoall,
}

fn calls() -> impl Strategy<Value = Vec<(Call, usize)>> {
    let call = prop_oneof![
        Just(Call::Barrier),
        any::<usize>().prop_map(Call::Broadcast),
        Just(Call::Allreduce),
        any::<usize>().prop_map(Call::Reduce),
        any::<usize>().prop_map(Call::Gather),
        Just(Call::Allgather),
        Just(Call::Alltoall),
    ];
    let length = prop_oneof![0..4usize, 0..200usize, 0..6000usize];
    prop::collection::vec((call, length), 1..30)
}

/// The elements of a rank in a step.
fn data(rank: usize, step: usize, count: usize) -> Vec<u32> {
    (0..count).map(|at| (at * 31 + rank * 1009 + step * 7) as u32).collect()
}

/// Makes a call, and checks its result.
fn check(team: &mut Team, step: usize, call: Call, count: usize) {
    let (rank, size, progress) = (team.rank(), team.size(), &mut NoProgress);
    let send = data(rank, step, count);
    let mut recv = vec![0; count];
    let all: Vec<_> = (0..size).flat_map(|rank| data(rank, step, count)).collect();
    let sum =
        |at: usize| (0..size).fold(0u32, |sum, rank| sum.wrapping_add(data(rank, step, count)[at]));
    match call {
        Call::Barrier => team.barrier(progress).unwrap(),
        Call::Broadcast(root) => {
            let mut buffer = send;
            team.broadcast(&mut buffer, root % size, progress).unwrap();
            assert_eq!(buffer, data(root % size, step, count));
        }
        Call::Allreduce => {
            team.allreduce(&send, &mut recv, ReduceOp::Sum, progress).unwrap();
            assert!((0..count).step_by(97).all(|at| recv[at] == sum(at)));
        }
        Call::Reduce(root) => {
            team.reduce(&send, &mut recv, ReduceOp::Sum, root % size, progress).unwrap();
            assert!(root % size != rank || (0..count).step_by(97).all(|at| recv[at] == sum(at)));
        }
        Call::Gather(root) => {
            let mut recv = vec![0; size * count];
            team.gather(&send, &mut recv, root % size, progress).unwrap();
            assert!(root % size != rank || recv == all);
        }
        Call::Allgather => {
            let mut recv = vec![0; size * count];
            team.allgather(&send, &mut recv, progress).unwrap();
            assert_eq!(recv, all);
        }
        Call::Alltoall => {
            let blocks = |from: usize| (0..size).map(move |to| data(from * size + to, step, count));
            let send: Vec<_> = blocks(rank).flatten().collect();
            let expected: Vec<_> =
                (0..size).flat_map(|from| data(from * size + rank, step, count)).collect();
            let mut recv = vec![0; size * count];
            team.alltoall(&send, &mut recv, progress).unwrap();
            assert_eq!(recv, expected);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn sequences_of_operations_give_what_the_model_gives(
        size in 1..6usize, direct in any::<bool>(), calls in calls(),
    ) {
        let _guard = HangGuard::new("random operations");
        threads(size, small_tuning(direct), |team| {
            for (step, (call, count)) in calls.iter().enumerate() {
                // Ranks that come late find others ahead of them.
                if step % 5 == team.rank() {
                    std::thread::yield_now();
                }
                check(team, step, *call, *count);
            }
        });
    }
}

/// Finds the mapping of the team's memory in this process.
fn team_memory() -> (usize, usize) {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let line = maps.lines().find(|line| line.contains("memferry-team")).unwrap();
    let (start, end) = line.split(' ').next().unwrap().split_once('-').unwrap();
    let address = |text| usize::from_str_radix(text, 16).unwrap();
    (address(start), address(end) - address(start))
}

/// Writes random words over the lines and the staging of all ranks, for a while.
fn scribble(seed: u64) {
    let (start, length) = team_memory();
    let mut random = seed | 1;
    let deadline = Instant::now() + Duration::from_millis(200);
    while Instant::now() < deadline {
        for _ in 0..1000 {
            random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            // Half of the words are in the lines.
            let range = if random >> 63 == 0 { length.min(20_000) } else { length };
            let at = (random >> 16) as usize % (range / 8) * 8;
            let value = if random & 1 == 0 { random >> 40 } else { random };
            // SAFETY: the address is in the mapping, aligned; only this process depends on what it writes there.
            unsafe { ((start + at) as *mut u64).write_volatile(value) };
        }
    }
}

/// Other processes start here.
#[test]
fn other_processes_begin_here() {
    let Some(role) = role() else { return };
    let mut team = join();
    if team.rank() == 2 {
        // All have joined when it returns.
        team.barrier(&mut NoProgress).unwrap();
        scribble(role.parse().unwrap());
        crate::support::crash();
    }
    run_until_it_fails(&mut team);
}

/// Calls operations until one fails, as it must when a liar has died.
fn run_until_it_fails(team: &mut Team) -> Error {
    let deadline = Instant::now() + Duration::from_secs(200);
    // A test that takes so long has ranks that wait for each other without an end.
    let mut progress = || match Instant::now() < deadline {
        true => Ok(Duration::from_millis(5)),
        false => Err(Stop),
    };
    for step in 0usize.. {
        let count = [1, 50, 700, 5000][step % 4];
        let (send, mut recv) = (vec![1u32; 3 * count], vec![0u32; 3 * count]);
        let called = match step % 5 {
            0 => team.barrier(&mut progress),
            1 => team.allreduce(&send, &mut recv, ReduceOp::Sum, &mut progress),
            2 => team.broadcast(&mut recv, step % 3, &mut progress),
            3 => team.alltoall(&send, &mut recv, &mut progress),
            _ => team.allgather(&send[..count], &mut recv, &mut progress),
        };
        if let Err(error) = called {
            return error;
        }
    }
    unreachable!("one fails")
}

#[test]
fn a_rank_that_scribbles_hangs_nobody_after_its_death() {
    let _guard = HangGuard::new("a scribbler");
    for seed in [1, 77, 4242] {
        let (mut children, mut team) = processes(&seed.to_string(), 3, small_tuning(seed != 77));
        let error = run_until_it_fails(&mut team);
        assert!(!matches!(error, Error::Argument(_) | Error::System(_)), "{error}");
        drop(team);
        // Rank 1 ended with an error too, and without a crash.
        assert!(children[0].end().success());
    }
}
