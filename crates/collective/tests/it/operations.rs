//! Every operation gives the right result, at all sizes, roots and types, on all paths.

use crate::support::{small_tuning, threads};
use memferry_collective::{
    Element, ElementType, Error, NoProgress, ReduceOp, Reduction, Team, Tuning,
};
use memferry_testing::HangGuard;

const COUNTS: [usize; 9] = [0, 1, 3, 7, 62, 63, 300, 2500, 20_001];

/// All kinds of paths.
fn tunings() -> [Tuning; 3] {
    [small_tuning(true), small_tuning(false), Tuning::default()]
}

fn element(rank: usize, index: usize) -> i32 {
    (rank as i32 * 1000 + index as i32 * 7) % 10_007
}

fn elements(rank: usize, count: usize) -> Vec<i32> {
    (0..count).map(|index| element(rank, index)).collect()
}

fn on_all_teams(run: impl Fn(&mut Team) + Sync) {
    let _guard = HangGuard::new("a team");
    for tuning in tunings() {
        for size in [1, 2, 3, 5, 8] {
            threads(size, tuning, &run);
        }
    }
}

#[test]
fn a_broadcast_reaches_all_ranks_from_every_root() {
    on_all_teams(|team| {
        for count in COUNTS {
            for root in 0..team.size() {
                let mut buffer = match team.rank() == root {
                    true => elements(root, count),
                    false => vec![-1; count],
                };
                team.broadcast(&mut buffer, root, &mut NoProgress).unwrap();
                assert_eq!(buffer, elements(root, count));
            }
        }
    });
}

#[test]
fn an_allreduce_adds_the_elements_of_all_ranks_on_all_ranks() {
    on_all_teams(|team| {
        for count in COUNTS {
            let sum = |index| (0..team.size()).map(|rank| element(rank, index)).sum();
            let expected: Vec<i32> = (0..count).map(sum).collect();
            let send = elements(team.rank(), count);
            let mut recv = vec![-1; count];
            team.allreduce(&send, &mut recv, ReduceOp::Sum, &mut NoProgress).unwrap();
            assert_eq!(recv, expected);
            let mut buffer = send.clone();
            team.allreduce_in_place(&mut buffer, ReduceOp::Sum, &mut NoProgress).unwrap();
            assert_eq!(buffer, expected);
        }
    });
}

#[test]
fn a_reduce_gives_the_result_to_its_root_alone() {
    on_all_teams(|team| {
        let size = team.size();
        for count in COUNTS {
            for root in 0..size {
                let max = |index| (0..size).map(|rank| element(rank, index)).max().unwrap();
                let send = elements(team.rank(), count);
                let mut recv = vec![-1; count];
                team.reduce(&send, &mut recv, ReduceOp::Max, root, &mut NoProgress).unwrap();
                match team.rank() == root {
                    true => assert_eq!(recv, (0..count).map(max).collect::<Vec<_>>()),
                    false => assert!(recv.iter().all(|number| *number == -1)),
                }
            }
        }
    });
}

#[test]
fn a_gather_and_an_allgather_keep_the_order_of_the_ranks() {
    on_all_teams(|team| {
        for count in COUNTS {
            let send = elements(team.rank(), count);
            let all: Vec<_> = (0..team.size()).flat_map(|rank| elements(rank, count)).collect();
            let mut recv = vec![-1; all.len()];
            team.allgather(&send, &mut recv, &mut NoProgress).unwrap();
            assert_eq!(recv, all);
            for root in 0..team.size() {
                let is_root = team.rank() == root;
                let mut recv = vec![-1; if is_root { all.len() } else { 0 }];
                team.gather(&send, &mut recv, root, &mut NoProgress).unwrap();
                assert!(!is_root || recv == all);
            }
        }
    });
}

#[test]
fn a_gather_in_place_leaves_the_own_block_where_it_is() {
    on_all_teams(|team| {
        for count in COUNTS {
            let all: Vec<_> = (0..team.size()).flat_map(|rank| elements(rank, count)).collect();
            let mut recv = vec![-1; all.len()];
            let own = team.rank() * count..(team.rank() + 1) * count;
            recv[own.clone()].copy_from_slice(&elements(team.rank(), count));
            let memory = recv.as_mut_ptr();
            // SAFETY: the vector has a block for each rank, and the own one is in its place.
            unsafe {
                let send = memory.add(own.start).cast_const();
                team.allgather_raw(send.cast(), memory.cast(), 4 * count, &mut NoProgress).unwrap();
            }
            assert_eq!(recv, all);
        }
    });
}

#[test]
fn an_alltoall_transposes_the_blocks_also_in_place() {
    on_all_teams(|team| {
        for count in COUNTS {
            let (rank, size) = (team.rank(), team.size());
            let block = |from: usize, to: usize| elements(100 * from + to, count);
            let send: Vec<_> = (0..size).flat_map(|to| block(rank, to)).collect();
            let expected: Vec<_> = (0..size).flat_map(|from| block(from, rank)).collect();
            let mut recv = vec![-1; send.len()];
            team.alltoall(&send, &mut recv, &mut NoProgress).unwrap();
            assert_eq!(recv, expected);
            let mut buffer = send.clone();
            let memory = buffer.as_mut_ptr().cast::<u8>();
            // SAFETY: the vector has a block for each rank.
            unsafe { team.alltoall_raw(memory, memory, 4 * count, &mut NoProgress).unwrap() };
            assert_eq!(buffer, expected);
        }
    });
}

/// What a reduction of all types must give, computed one by one.
fn reduced<T: Element + std::fmt::Debug + PartialEq>(
    team: &mut Team,
    operation: ReduceOp,
    value: impl Fn(usize, usize) -> T,
    combine: impl Fn(T, T) -> T,
) {
    for count in [5, 70, 3000] {
        let expected: Vec<_> = (0..count)
            .map(|index| {
                let values = (0..team.size()).map(|rank| value(rank, index));
                values.reduce(&combine).unwrap()
            })
            .collect();
        let send: Vec<_> = (0..count).map(|index| value(team.rank(), index)).collect();
        let mut recv = send.clone();
        team.allreduce(&send, &mut recv, operation, &mut NoProgress).unwrap();
        assert_eq!(recv, expected, "{operation:?} of {:?}", T::TYPE);
    }
}

macro_rules! reduce_all {
    ($team:ident, $($element:ident),*) => {
        $(
            let value = |rank: usize, index: usize| ((rank * 37 + index * 11) % 101) as $element;
            reduced($team, ReduceOp::Min, value, |a, b| if b < a { b } else { a });
            reduced($team, ReduceOp::Max, value, |a, b| if b > a { b } else { a });
            let zero = 0 as $element;
            let logical = |is: bool| u8::from(is) as $element;
            reduced($team, ReduceOp::LogicalAnd, value, |a, b| logical((a != zero) & (b != zero)));
            reduced($team, ReduceOp::LogicalOr, value, |a, b| logical((a != zero) | (b != zero)));
            reduced($team, ReduceOp::LogicalXor, value, |a, b| logical((a != zero) ^ (b != zero)));
        )*
    };
}

macro_rules! reduce_integers {
    ($team:ident, $($element:ident),*) => {
        $(
            let value = |rank: usize, index: usize| (rank * 3737 + index * 1111 + 1) as $element;
            reduced($team, ReduceOp::Sum, value, $element::wrapping_add);
            reduced($team, ReduceOp::Product, value, $element::wrapping_mul);
            reduced($team, ReduceOp::BitAnd, value, |a, b| a & b);
            reduced($team, ReduceOp::BitOr, value, |a, b| a | b);
            reduced($team, ReduceOp::BitXor, value, |a, b| a ^ b);
        )*
    };
}

#[test]
fn all_types_have_all_operations() {
    let _guard = HangGuard::new("a team");
    threads(3, small_tuning(true), |team| {
        reduce_all!(team, i8, i16, i32, i64, u8, u16, u32, u64, f32, f64, isize, usize);
        reduce_integers!(team, i8, i16, i32, i64, u8, u16, u32, u64, isize, usize);
        // In the order of the ranks, so that even sums of floating-point numbers are the same bit by bit.
        let value = |rank: usize, index: usize| 1.0 / (1 + rank + index) as f32;
        reduced(team, ReduceOp::Sum, value, |a, b| a + b);
        reduced(team, ReduceOp::Product, value, |a, b| a * b);
        let value = |rank: usize, index: usize| 1.0 / (1 + rank + index) as f64;
        reduced(team, ReduceOp::Sum, value, |a, b| a + b);
        reduced(team, ReduceOp::Product, value, |a, b| a * b);
    });
}

#[test]
fn bit_operations_on_floating_point_numbers_are_refused_before_anything_is_done() {
    threads(2, Tuning::default(), |team| {
        for operation in [ReduceOp::BitAnd, ReduceOp::BitOr, ReduceOp::BitXor] {
            let error = team.allreduce_in_place(&mut [1.0f32], operation, &mut NoProgress);
            assert!(matches!(error, Err(Error::Argument(_))));
        }
        let mut buffer = [team.rank()];
        assert!(matches!(team.broadcast(&mut buffer, 2, &mut NoProgress), Err(Error::Argument(_))));
        assert!(matches!(
            team.alltoall(&[0u8; 3], &mut [0; 3], &mut NoProgress),
            Err(Error::Argument(_))
        ));
        team.allreduce_in_place(&mut buffer, ReduceOp::Sum, &mut NoProgress).unwrap();
        assert_eq!(buffer, [1]);
    });
}

#[test]
fn a_function_is_applied_in_the_order_of_the_ranks() {
    on_all_teams(|team| {
        // The product of 2×2 matrices modulo 2^32: it does not commute.
        type Matrix = [u32; 4];
        let product = |a: Matrix, b: Matrix| -> Matrix {
            let cell = |row: usize, column: usize| {
                let first = a[2 * row].wrapping_mul(b[column]);
                first.wrapping_add(a[2 * row + 1].wrapping_mul(b[2 + column]))
            };
            [cell(0, 0), cell(0, 1), cell(1, 0), cell(1, 1)]
        };
        let matrix = |rank: usize, index: usize| {
            let seed = (rank * 31 + index * 7) as u32;
            [seed + 1, seed * 3, 5, seed + 2]
        };
        for count in [1, 9, 100, 1500] {
            let send: Vec<Matrix> = (0..count).map(|index| matrix(team.rank(), index)).collect();
            let expected: Vec<Matrix> = (0..count)
                .map(|index| {
                    let all = (0..team.size()).map(|rank| matrix(rank, index));
                    all.reduce(product).unwrap()
                })
                .collect();
            let mut combine = |into: *mut u8, from: *const u8, count: usize| {
                for at in 0..count {
                    // SAFETY: both have `count` matrices, aligned to eight bytes.
                    unsafe {
                        let (into, from) = (into.cast::<Matrix>().add(at), from.cast::<Matrix>());
                        into.write(product(into.read(), from.add(at).read()));
                    }
                }
                Ok(())
            };
            let reduction = &mut Reduction::Function { element_bytes: 16, combine: &mut combine };
            let mut recv = vec![[0u32; 4]; count];
            let (from, into) = (send.as_ptr().cast(), recv.as_mut_ptr().cast());
            // SAFETY: both vectors have `count` matrices.
            unsafe { team.allreduce_raw(reduction, from, into, count, &mut NoProgress).unwrap() };
            assert_eq!(recv, expected);
            let root = count % team.size();
            let numbers: Vec<u64> = (0..count as u64).map(|at| at + team.rank() as u64).collect();
            let mut recv = vec![0u64; count];
            let last = |into: &mut [u64], from: &[u64]| into.copy_from_slice(from);
            team.reduce_with(&numbers, &mut recv, last, root, &mut NoProgress).unwrap();
            let of_last = |at: u64| at + team.size() as u64 - 1;
            let expected: Vec<_> = (0..count as u64).map(of_last).collect();
            assert!(team.rank() != root || recv == expected);
            let mut numbers = numbers;
            team.allreduce_with(&mut numbers, last, &mut NoProgress).unwrap();
            assert_eq!(numbers, expected);
        }
    });
}

#[test]
fn large_teams_reduce_and_meet_in_a_tree() {
    let _guard = HangGuard::new("a team");
    threads(19, small_tuning(true), |team| {
        for round in 0..20u64 {
            team.barrier(&mut NoProgress).unwrap();
            for count in [1, 20, 62, 63, 200, 3000] {
                let mut buffer: Vec<u64> =
                    (0..count).map(|at| at + team.rank() as u64 + round).collect();
                team.allreduce_in_place(&mut buffer, ReduceOp::Sum, &mut NoProgress).unwrap();
                let sum = |at: u64| 19 * (at + round) + 19 * 18 / 2;
                assert_eq!(buffer, (0..count).map(sum).collect::<Vec<_>>());
            }
        }
    });
}

#[test]
fn all_types_are_named_once() {
    for (index, element) in ElementType::ALL.iter().enumerate() {
        assert!(!ElementType::ALL[..index].contains(element));
    }
}

#[test]
fn several_mebibytes_are_right_with_the_sizes_of_every_day() {
    const COUNT: usize = (6 << 20) / 4 + 5;
    let _guard = HangGuard::new("a team");
    threads(3, Tuning::default(), |team| {
        let (rank, size) = (team.rank(), team.size());
        let mut buffer = elements(rank, COUNT);
        team.broadcast(&mut buffer, 1, &mut NoProgress).unwrap();
        assert_eq!(buffer, elements(1, COUNT));
        let mut buffer = elements(rank, COUNT);
        team.allreduce_in_place(&mut buffer, ReduceOp::Sum, &mut NoProgress).unwrap();
        let sum = |at| (0..size).map(|rank| element(rank, at)).sum::<i32>();
        assert!((0..COUNT).all(|at| buffer[at] == sum(at)));
        let send: Vec<_> = (0..size).flat_map(|to| elements(100 * rank + to, COUNT)).collect();
        let mut recv = vec![-1; send.len()];
        team.alltoall(&send, &mut recv, &mut NoProgress).unwrap();
        let expected = (0..size).flat_map(|from| elements(100 * from + rank, COUNT));
        assert!(recv.into_iter().eq(expected));
        let mut all = vec![-1; if rank == 2 { size * COUNT } else { 0 }];
        team.gather(&elements(rank, COUNT), &mut all, 2, &mut NoProgress).unwrap();
        assert!(rank != 2 || all.into_iter().eq((0..size).flat_map(|from| elements(from, COUNT))));
    });
}

#[test]
fn an_alltoall_may_be_in_place_at_some_ranks_only() {
    on_all_teams(|team| {
        let (rank, size) = (team.rank(), team.size());
        for count in COUNTS {
            let send: Vec<i32> = (0..size)
                .flat_map(|to| (0..count).map(move |index| element(rank * size + to, index)))
                .collect();
            let expected: Vec<i32> = (0..size)
                .flat_map(|from| (0..count).map(move |index| element(from * size + rank, index)))
                .collect();
            let mut recv = if rank == 0 { send.clone() } else { vec![-1; size * count] };
            let into = recv.as_mut_ptr().cast::<u8>();
            let from = if rank == 0 { into.cast_const() } else { send.as_ptr().cast() };
            // SAFETY: both have a block for each rank, and are equal or do not overlap.
            unsafe { team.alltoall_raw(from, into, 4 * count, &mut NoProgress).unwrap() };
            assert_eq!(recv, expected);
        }
    });
}
