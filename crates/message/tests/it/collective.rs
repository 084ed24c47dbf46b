//! Collective operations of jobs: results, messages that move meanwhile, and ranks that die.

use std::time::Duration;

use memferry_message::{CollectiveError, Error, Job, ReduceOp, TAG_ALL};
use memferry_testing::HangGuard;
use memferry_testing::message::patient;
use memferry_testing::message::process::{self, Child, role, setting};

fn unique(name: &str) -> String {
    format!("{name}-{}", std::process::id())
}

/// Runs a function for each rank of a job, on a thread each.
fn run_ranks<R: Send>(name: &str, size: usize, run: impl Fn(&Job) -> R + Sync) -> Vec<R> {
    let name = unique(name);
    std::thread::scope(|scope| {
        let (run, name) = (&run, &name);
        let start = |rank| scope.spawn(move || run(&patient().join(name, rank, size).unwrap()));
        let threads: Vec<_> = (0..size).map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn the_ranks_of_a_job_have_all_operations() {
    let _guard = HangGuard::new("a job");
    for size in [1, 2, 5] {
        run_ranks(&format!("operations-{size}"), size, |job| {
            let rank = job.rank();
            for count in [1, 100, 50_000] {
                job.barrier().unwrap();
                let send = vec![rank as u64 + 1; count];
                let sum = (size * (size + 1) / 2) as u64;
                let mut recv = vec![0; count];
                job.allreduce(&send, &mut recv, ReduceOp::Sum).unwrap();
                assert_eq!(recv, vec![sum; count]);
                let mut buffer = send.clone();
                job.allreduce_in_place(&mut buffer, ReduceOp::Max).unwrap();
                assert_eq!(buffer, vec![size as u64; count]);
                let mut buffer = send.clone();
                let first = |_: &mut [u64], _: &[u64]| {};
                job.allreduce_with(&mut buffer, first).unwrap();
                assert_eq!(buffer, vec![1; count], "that of rank 0");
                let root = size - 1;
                let mut recv = vec![0; count];
                job.reduce(&send, &mut recv, ReduceOp::Product, root).unwrap();
                job.reduce_with(&send, &mut recv, first, 0).unwrap();
                assert!(rank != 0 || recv == vec![1; count]);
                let mut buffer = send.clone();
                job.broadcast(&mut buffer, root).unwrap();
                assert_eq!(buffer, vec![size as u64; count]);
                let all: Vec<_> =
                    (1..=size as u64).flat_map(|number| vec![number; count]).collect();
                let mut recv = vec![0; size * count];
                job.allgather(&send, &mut recv).unwrap();
                assert_eq!(recv, all);
                let mut recv = vec![0; size * count];
                job.gather(&send, &mut recv, root).unwrap();
                assert!(rank != root || recv == all);
                let mut recv = vec![0; size * count];
                job.alltoall(&vec![rank as u64 + 1; size * count], &mut recv).unwrap();
                assert_eq!(recv, all);
            }
        });
    }
}

#[test]
fn a_large_message_is_received_while_its_sender_waits_in_a_barrier() {
    let _guard = HangGuard::new("a job");
    const BYTES: usize = 4 << 20;
    run_ranks("barrier-messages", 3, |job| {
        for round in 0..20u8 {
            let next = job.peer((job.rank() + 1) % 3);
            let before = job.peer((job.rank() + 2) % 3);
            let send = job.endpoint().isend(next, 7, vec![round; BYTES]).unwrap();
            if job.rank() == 1 {
                job.barrier().unwrap();
            }
            let mut buffer = vec![0; BYTES];
            job.endpoint().recv(before, 7, TAG_ALL, &mut buffer).unwrap();
            assert!(buffer.iter().all(|byte| *byte == round));
            if job.rank() != 1 {
                job.barrier().unwrap();
            }
            send.wait().unwrap();
        }
    });
}

const SIZE: usize = 5;

/// Other processes start here.
#[test]
fn other_processes_begin_here() {
    let Some(role) = role() else { return };
    let (victim, rounds) = role.split_once(' ').unwrap();
    let (victim, rounds): (usize, u32) = (victim.parse().unwrap(), rounds.parse().unwrap());
    let rank = setting("MEMFERRY_TEST_RANK").parse().unwrap();
    let job = patient().join(&setting("MEMFERRY_TEST_JOB"), rank, SIZE).unwrap();
    std::process::exit(i32::from(!is_victim_named(&job, victim, rounds)));
}

/// Calls barriers until one fails, and dies before that as the victim. Returns whether the error names the victim.
fn is_victim_named(job: &Job, victim: usize, rounds: u32) -> bool {
    for round in 0.. {
        if round == rounds && job.rank() == victim {
            // SAFETY: a signal to this process itself.
            unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
        }
        match job.barrier() {
            Ok(()) => {}
            Err(Error::Collective(CollectiveError::RankDied(rank))) => return rank == victim,
            Err(_) => return false,
        }
    }
    false
}

#[test]
fn a_rank_that_dies_before_or_after_the_first_operation_is_named_by_all() {
    let _guard = HangGuard::new("a job");
    for (victim, rounds) in [(1, 0), (3, 0), (4, 0), (2, 1), (4, 100)] {
        let name = unique(&format!("dying-{victim}-{rounds}"));
        let start = |rank: usize| {
            let mut command = process::command(&format!("{victim} {rounds}"));
            command.env("MEMFERRY_TEST_JOB", &name).env("MEMFERRY_TEST_RANK", rank.to_string());
            Child::spawn(&mut command)
        };
        let mut children: Vec<_> = (1..SIZE).map(start).collect();
        let job = patient().join(&name, 0, SIZE).unwrap();
        assert!(is_victim_named(&job, victim, rounds), "rank {victim}, {rounds} rounds");
        for (index, child) in children.iter_mut().enumerate() {
            let status = child.end();
            assert!(index + 1 == victim || status.success(), "rank {}: {status}", index + 1);
        }
    }
}

#[test]
fn the_other_ranks_do_not_wait_for_one_that_closed_its_job() {
    let _guard = HangGuard::new("a job");
    let errors = run_ranks("closing", 4, |job| {
        if job.rank() == 3 {
            return None;
        }
        std::thread::sleep(Duration::from_millis(20 * job.rank() as u64));
        Some(job.barrier().unwrap_err())
    });
    for error in errors.into_iter().flatten() {
        assert!(matches!(error, Error::Collective(_)), "{error}");
    }
}
