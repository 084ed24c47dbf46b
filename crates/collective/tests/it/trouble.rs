//! Ranks that die, leave, disagree or lie: every other rank gets an error, and none hangs.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crate::support::{TIMEOUT, crash, join, processes, small_tuning, threads};
use memferry_collective::{Error, Invitation, NoProgress, ReduceOp, Reduction, Stop, Team, Tuning};
use memferry_testing::message::process::{Child, role};
use memferry_testing::{HangGuard, until};

/// Calls an operation of each kind in turn.
fn call(team: &mut Team, round: usize, count: usize) -> Result<(), Error> {
    let (size, progress) = (team.size(), &mut NoProgress);
    let send = vec![round as u64; count];
    let mut recv = vec![0u64; count];
    match round % 6 {
        0 => team.barrier(progress),
        1 => team.allreduce(&send, &mut recv, ReduceOp::Sum, progress),
        2 => team.broadcast(&mut recv, round % size, progress),
        3 => team.reduce(&send, &mut recv, ReduceOp::Max, round % size, progress),
        4 => team.allgather(&send, &mut vec![0; size * count], progress),
        _ => team.alltoall(&vec![1u64; size * count], &mut vec![0; size * count], progress),
    }
}

/// The length of the data of a round: all paths in turn.
fn length(round: usize) -> usize {
    [1, 40, 300, 5000][round / 6 % 4]
}

const VICTIM: usize = 2;

/// Other processes start here.
#[test]
fn other_processes_begin_here() {
    let Some(role) = role() else { return };
    let mut team = join();
    let (what, when) = role.split_once(' ').unwrap_or((&role, "0"));
    let when: usize = when.parse().unwrap();
    for round in 0.. {
        if team.rank() == VICTIM && round == when {
            match what {
                "dies" => crash(),
                "leaves" => return,
                "stops" => {
                    let error = team.barrier(&mut || -> Result<Duration, Stop> { Err(Stop) });
                    assert!(matches!(error, Err(Error::Stopped(VICTIM))), "{error:?}");
                    return;
                }
                _ => {}
            }
        }
        if let Err(error) = call(&mut team, round, length(round)) {
            let is_right = match what {
                "dies" => matches!(error, Error::RankDied(VICTIM)),
                "leaves" => matches!(error, Error::RankLeft(VICTIM)),
                "stops" => matches!(error, Error::Stopped(VICTIM) | Error::Mismatch(_)),
                "continues" => matches!(error, Error::RankLeft(0)),
                _ => false,
            };
            assert!(is_right, "rank {}: {error}", team.rank());
            assert!(team.barrier(&mut NoProgress).is_err(), "a broken team stays broken");
            return;
        }
    }
}

/// Runs rounds until one fails.
fn first_error(team: &mut Team) -> Error {
    (0..).find_map(|round| call(team, round, length(round)).err()).expect("a round fails")
}

#[test]
fn a_rank_that_is_killed_is_named_by_all_others() {
    let _guard = HangGuard::new("a team");
    for direct in [true, false] {
        for when in [0, 1, 2, 3, 4, 5, 14, 19, 20, 21, 22, 23] {
            let (children, mut team) = processes(&format!("dies {when}"), 4, small_tuning(direct));
            let error = first_error(&mut team);
            assert!(matches!(error, Error::RankDied(VICTIM)), "round {when}: {error}");
            let ended = children.into_iter().enumerate().filter(|(index, _)| index + 1 != VICTIM);
            ended.for_each(|(_, child)| child.finish());
        }
    }
}

#[test]
fn a_rank_that_leaves_is_named_by_all_others() {
    let _guard = HangGuard::new("a team");
    for when in [0, 3, 20] {
        let (children, mut team) = processes(&format!("leaves {when}"), 4, small_tuning(true));
        let error = first_error(&mut team);
        assert!(matches!(error, Error::RankLeft(VICTIM)), "{error}");
        children.into_iter().for_each(Child::finish);
    }
}

#[test]
fn a_rank_that_stops_ends_the_operation_of_all() {
    let _guard = HangGuard::new("a team");
    let (children, mut team) = processes("stops 4", 4, Tuning::default());
    let error = first_error(&mut team);
    assert!(matches!(error, Error::Stopped(VICTIM) | Error::Mismatch(_)), "{error}");
    children.into_iter().for_each(Child::finish);
}

#[test]
fn the_end_of_the_process_with_rank_zero_is_noticed() {
    let _guard = HangGuard::new("a team");
    let (children, mut team) = processes("continues 1000000", 4, Tuning::default());
    (0..30).for_each(|round| call(&mut team, round, length(round)).unwrap());
    drop(team);
    children.into_iter().for_each(Child::finish);
}

#[test]
fn ranks_that_call_different_operations_get_an_error() {
    let _guard = HangGuard::new("a team");
    for size in [2, 3, 17] {
        let errors = threads(size, Tuning::default(), |team| match team.rank() {
            1 => team.allreduce_in_place(&mut [1u8], ReduceOp::Sum, &mut NoProgress).unwrap_err(),
            _ => team.barrier(&mut NoProgress).unwrap_err(),
        });
        assert!(errors.iter().all(|error| matches!(error, Error::Mismatch(_))), "{errors:?}");
    }
    let errors = threads(2, Tuning::default(), |team| {
        let mut buffer = vec![0u8; 1000 + team.rank()];
        let broadcast = team.broadcast(&mut buffer, 0, &mut NoProgress);
        broadcast.and_then(|()| team.barrier(&mut NoProgress)).unwrap_err()
    });
    assert!(errors.iter().all(|error| matches!(error, Error::Mismatch(_))), "{errors:?}");
}

#[test]
fn a_team_whose_ranks_do_not_come_is_not_waited_for_forever() {
    let _guard = HangGuard::new("a team");
    // A rank that comes before the timeout of rank 0 learns which rank is missing. A busy machine needs a longer one.
    let timeouts = (0..).map(|doubling| Duration::from_millis(200 << doubling));
    let has_learned = timeouts.take_while(|timeout| *timeout < TIMEOUT).any(|timeout| {
        let invitation = Invitation::new(3).unwrap();
        let bytes = *invitation.bytes();
        let learned = std::thread::scope(|scope| {
            let early = scope.spawn(move || Team::join(&bytes, 2, &mut NoProgress, TIMEOUT));
            let error = invitation.accept(&mut NoProgress, timeout).unwrap_err();
            assert!(matches!(error, Error::RankMissing(1)), "{error}");
            early.join().unwrap().unwrap_err()
        });
        let error = Team::join(&bytes, 1, &mut NoProgress, TIMEOUT).unwrap_err();
        assert!(matches!(error, Error::RankDied(0)), "{error}");
        let came = matches!(learned, Error::RankMissing(1) | Error::RankLeft(0));
        assert!(came || matches!(learned, Error::RankDied(0)), "{learned}");
        came
    });
    assert!(has_learned, "no rank learned which one is missing");
}

#[test]
fn an_invitation_is_for_its_ranks_alone() {
    let invitation = Invitation::new(2).unwrap();
    let mut bytes = *invitation.bytes();
    for (place, rank) in [(&bytes[..], 0), (&bytes[..], 2), (&bytes[1..], 1), (&[], 1)] {
        let error = Team::join(place, rank, &mut NoProgress, TIMEOUT).unwrap_err();
        assert!(matches!(error, Error::Argument(_)), "{error}");
    }
    // With the name of the socket and another token.
    bytes[3 * 8] ^= 1;
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let error = Team::join(&bytes, 1, &mut NoProgress, TIMEOUT).unwrap_err();
            assert!(matches!(error, Error::RankDied(0)), "{error}");
        });
        let error = invitation.accept(&mut NoProgress, Duration::from_millis(200)).unwrap_err();
        assert!(matches!(error, Error::RankMissing(1)), "{error}");
    });
}

#[test]
fn a_waiting_rank_makes_progress() {
    let _guard = HangGuard::new("a team");
    let polls = AtomicUsize::new(0);
    threads(2, Tuning::default(), |team| {
        if team.rank() == 1 {
            until("the other rank has made progress", || polls.load(Ordering::Relaxed) > 5);
        }
        // Rank 1 does not wait before the sixth poll, so all of these are of rank 0.
        let mut progress = || {
            polls.fetch_add(1, Ordering::Relaxed);
            Ok::<_, Stop>(Duration::from_millis(1))
        };
        team.barrier(&mut progress).unwrap();
    });
}

#[test]
fn a_rank_does_not_trust_memory_that_its_owner_may_have_changed() {
    const BYTES: usize = 64 << 20;
    let _guard = HangGuard::new("a team");
    let reader = AtomicUsize::new(0);
    let results = threads(2, Tuning::default(), |team| {
        let mut buffer = vec![u8::from(team.rank() == 0); BYTES];
        if team.rank() == 1 {
            reader.store(buffer.as_ptr() as usize, Ordering::Release);
            let result = team.broadcast(&mut buffer, 0, &mut NoProgress);
            let is_right = result.is_err() || buffer == vec![1; BYTES];
            // The root looks at this memory until it stops.
            return (is_right, buffer);
        }
        // Stops when the other rank has read a part.
        let mut progress = || {
            let first = reader.load(Ordering::Acquire) as *const u8;
            // SAFETY: the memory of the other rank exists until all threads have ended.
            let has_begun = !first.is_null() && unsafe { first.read_volatile() } == 1;
            if has_begun { Err(Stop) } else { Ok(Duration::ZERO) }
        };
        let result = team.broadcast(&mut buffer, 0, &mut progress);
        let (front, back) = buffer.split_at_mut(BYTES / 2);
        back.fill(2);
        front.fill(2);
        assert!(matches!(result, Ok(()) | Err(Error::Stopped(0))), "{result:?}");
        (true, buffer)
    });
    for (rank, (is_right, _)) in results.iter().enumerate() {
        assert!(is_right, "rank {rank} got other data without an error");
    }
}

#[test]
fn a_stop_does_not_undo_what_is_complete() {
    let _guard = HangGuard::new("a team");
    let has_left = AtomicUsize::new(0);
    threads(2, Tuning::default(), |team| {
        if team.rank() == 1 {
            std::thread::sleep(Duration::from_millis(20));
            team.reduce(&[2u64], &mut [], ReduceOp::Sum, 0, &mut NoProgress).unwrap();
            has_left.store(1, Ordering::Release);
            return;
        }
        // Returns only when the other rank has done all that it had to do.
        let mut progress = || {
            while has_left.load(Ordering::Acquire) == 0 {
                std::thread::yield_now();
            }
            Err(Stop)
        };
        let mut sum = [0u64];
        team.reduce(&[1u64], &mut sum, ReduceOp::Sum, 0, &mut progress).unwrap();
        assert_eq!(sum, [3]);
    });
}

#[test]
fn ranks_that_reduce_by_different_operations_or_types_get_an_error() {
    let _guard = HangGuard::new("a team");
    for size in [2, 17] {
        for count in [1, 40, 300, 5000] {
            let errors = threads(size, small_tuning(true), |team| {
                let operation = if team.rank() == 1 { ReduceOp::Max } else { ReduceOp::Sum };
                team.allreduce_in_place(&mut vec![1u64; count], operation, &mut NoProgress)
                    .unwrap_err()
            });
            assert!(errors.iter().all(|error| matches!(error, Error::Mismatch(_))), "{errors:?}");
        }
    }
    let errors = threads(2, Tuning::default(), |team| {
        let (sum, progress) = (ReduceOp::Sum, &mut NoProgress);
        match team.rank() {
            1 => team.allreduce_in_place(&mut [1u64], sum, progress).unwrap_err(),
            _ => team.allreduce_in_place(&mut [1.0f64], sum, progress).unwrap_err(),
        }
    });
    assert!(errors.iter().all(|error| matches!(error, Error::Mismatch(_))), "{errors:?}");
}

#[test]
fn a_rank_that_cannot_take_part_stops_the_others() {
    let _guard = HangGuard::new("a team");
    let errors = threads(3, Tuning::default(), |team| {
        if team.rank() == VICTIM {
            team.stop();
        }
        team.barrier(&mut NoProgress).unwrap_err()
    });
    assert!(errors.iter().all(|error| matches!(error, Error::Stopped(VICTIM))), "{errors:?}");
}

/// Sums by a function, which `trouble` ends on its rank. Returns whether the sum is there and right.
fn sum_with_trouble(
    team: &mut Team,
    count: usize,
    mut trouble: impl FnMut(usize) -> Result<(), Stop>,
) -> Result<bool, Error> {
    let (rank, size) = (team.rank(), team.size());
    let mut combine = |into: *mut u8, from: *const u8, count: usize| {
        trouble(rank)?;
        for at in 0..count {
            // SAFETY: the team passes `count` elements at both, aligned to eight bytes.
            let (into, from) =
                unsafe { (&mut *into.cast::<u64>().add(at), *from.cast::<u64>().add(at)) };
            // Once a rank has failed, this may combine what no rank has published; the call fails then.
            *into = into.wrapping_add(from);
        }
        Ok(())
    };
    let reduction = &mut Reduction::Function { element_bytes: 8, combine: &mut combine };
    let (send, mut recv) = (vec![1u64; count], vec![0u64; count]);
    let (from, into) = (send.as_ptr().cast(), recv.as_mut_ptr().cast());
    // SAFETY: both vectors have `count` elements.
    unsafe { team.allreduce_raw(reduction, from, into, count, &mut NoProgress)? };
    Ok(recv == vec![size as u64; count])
}

/// A rank that has trouble in its function, of teams that use all paths.
fn on_each_path(run: impl Fn(&mut Team, usize, usize) + Sync) {
    let _guard = HangGuard::new("a team");
    for (size, victim) in [(3, 1), (17, 0), (17, 4)] {
        for direct in [true, false] {
            for count in [1, 40, 300, 5000] {
                threads(size, small_tuning(direct), |team| run(team, victim, count));
            }
        }
    }
}

/// What the other ranks see: the right sum, or the error; and the error from then on.
fn is_sum_or_stopped(team: &mut Team, outcome: Result<bool, Error>, victim: usize) {
    match outcome {
        Ok(is_right) => assert!(is_right, "rank {}: a wrong sum without an error", team.rank()),
        Err(error) => assert_eq!(error, Error::Stopped(victim)),
    }
    assert_eq!(team.barrier(&mut NoProgress), Err(Error::Stopped(victim)));
}

#[test]
fn a_function_that_fails_on_one_rank_leaves_no_rank_with_a_wrong_result() {
    on_each_path(|team, victim, count| {
        let stops = |rank| if rank == victim { Err(Stop) } else { Ok(()) };
        let outcome = sum_with_trouble(team, count, stops);
        assert!(team.rank() != victim || outcome == Err(Error::Stopped(victim)));
        is_sum_or_stopped(team, outcome, victim);
    });
}

#[test]
fn a_function_that_panics_on_one_rank_lets_no_rank_wait() {
    on_each_path(|team, victim, count| {
        let call = || {
            sum_with_trouble(team, count, |rank| match rank == victim {
                true => std::panic::resume_unwind(Box::new("a function that panics, on purpose")),
                false => Ok(()),
            })
        };
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(call));
        assert_eq!(outcome.is_err(), team.rank() == victim);
        is_sum_or_stopped(team, outcome.unwrap_or(Err(Error::Stopped(victim))), victim);
    });
}

#[test]
fn progress_that_panics_on_one_rank_lets_no_rank_wait() {
    let _guard = HangGuard::new("a team");
    let was_polled = AtomicUsize::new(0);
    threads(3, Tuning::default(), |team| {
        let (rank, stopped) = (team.rank(), Err(Error::Stopped(VICTIM)));
        // The others come when the root has waited for them.
        if rank != VICTIM {
            until("the poll", || was_polled.load(Ordering::Acquire) > 0);
        }
        let mut progress = || -> Result<Duration, Stop> {
            was_polled.store(1, Ordering::Release);
            std::panic::resume_unwind(Box::new("progress that panics, on purpose"))
        };
        let reduce = || team.reduce(&[1u8], &mut [0], ReduceOp::Sum, VICTIM, &mut progress);
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(reduce));
        match outcome {
            Ok(outcome) => assert!(rank != VICTIM && (outcome.is_ok() || outcome == stopped)),
            Err(_) => assert_eq!(rank, VICTIM),
        }
        assert_eq!(team.barrier(&mut NoProgress), stopped);
    });
}
