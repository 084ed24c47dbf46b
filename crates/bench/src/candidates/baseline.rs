//! Lower bound of every message: cache lines that two threads of this process exchange, each bound
//! to the core of a member of a group. Processes share a cache line in the same manner.
//!
//! A message needs a line for each direction, because its sender may send again before it gets a
//! reply. A single line that both threads write is faster on processors that detect the pattern and
//! transfer the line in exclusive state; it is measured too, but no message protocol can be built
//! on it.

use std::hint::spin_loop;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use memferry::sys::affinity;

use crate::group::TaskRunner;
use crate::group::command::WorkerCommand;
use crate::group::cores::MemberCores;
use crate::harness::{Sample, warm_up_iterations};

/// Two threads and their lines, created for every command.
#[derive(Debug)]
pub(crate) struct CacheLineBaseline {
    cores: [usize; 2],
    single_line: bool,
}

#[derive(Default)]
#[repr(align(128))]
struct PaddedCounter(AtomicU64);

impl CacheLineBaseline {
    /// Returns an error on a machine with a single core, which has no lower bound.
    pub(crate) fn new(cores: &MemberCores, single_line: bool) -> Result<Self, String> {
        if cores.physical_count() < 2 {
            return Err("needs two cores".into());
        }
        Ok(Self { cores: [cores.of_member(0), cores.of_member(1)], single_line })
    }
}

/// Waits for every second value on one line, and stores the next value to another line.
fn bounce(from: &PaddedCounter, to: &PaddedCounter, first: u64, times: u64) {
    for value in (first..).step_by(2).take(times as usize) {
        wait_for(from, value);
        to.0.store(value + 1, Ordering::Release);
    }
}

fn wait_for(line: &PaddedCounter, value: u64) {
    // Same wait as in endpoints: one pause after every 8 polls, because a pause takes longer than a
    // poll.
    for look in 1u32.. {
        if line.0.load(Ordering::Acquire) == value {
            break;
        }
        if look.is_multiple_of(8) {
            spin_loop();
        }
    }
}

impl TaskRunner for CacheLineBaseline {
    fn run(&mut self, order: WorkerCommand) -> Result<Sample, String> {
        let (lines, [near, far]) =
            ([PaddedCounter::default(), PaddedCounter::default()], self.cores);
        let (forth, back) = (&lines[0], &lines[usize::from(!self.single_line)]);
        let (warm_up, times) = (warm_up_iterations(order.iterations), order.iterations);
        let total_ns = std::thread::scope(|scope| {
            let answering = scope.spawn(move || {
                let bound = affinity::bind_to_core(far);
                bounce(forth, back, 1, warm_up + times);
                bound
            });
            let asking = scope.spawn(move || {
                let bound = affinity::bind_to_core(near);
                bounce(back, forth, 0, warm_up);
                let begin = Instant::now();
                bounce(back, forth, 2 * warm_up, times);
                wait_for(back, 2 * (warm_up + times));
                let took = begin.elapsed().as_nanos() as f64;
                bound.map(|()| took)
            });
            let bound = answering.join().map_err(|_| "a thread failed")?;
            let took = asking.join().map_err(|_| "a thread failed")?;
            bound.and(took).map_err(|error| format!("a thread cannot be bound: {error}"))
        })?;
        Ok(Sample::of_messages(total_ns))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::group::GroupTask;

    #[test]
    fn the_line_comes_back_as_often_as_it_was_sent() {
        let order = WorkerCommand { task: GroupTask::Pingpong { bytes: 8 }, iterations: 100 };
        for single_line in [false, true] {
            let floor = CacheLineBaseline::new(&MemberCores::of_this_machine(), single_line);
            let Ok(mut floor) = floor else { return };
            assert!(floor.run(order).unwrap().total_ns > 0.0);
        }
    }
}
