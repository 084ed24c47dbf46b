//! The floor under every message: cache lines handed to and fro by two threads of this process, each
//! bound to the core that a member of a group has. Processes share a line in the same way.
//!
//! A message needs a line for each direction: its sender may send again before there is an answer. A
//! single line that both write is quicker on processors that notice it and pass it on for writing at
//! once; it is shown too, but no messages can be made of it.

use std::hint::spin_loop;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use memferry::sys::affinity;

use super::Contender;
use super::cores::Cores;
use super::order::{Order, Timing, warm_up_of};

/// What no message can beat.
pub(in crate::bench) const FLOOR: &str = "floor: a cache line each way";
/// What a single line would take.
pub(in crate::bench) const SINGLE_LINE: &str = "one cache line to and fro";

/// Two threads and their lines, made anew for every order.
#[derive(Debug)]
pub(super) struct Floor {
    cores: [usize; 2],
    single_line: bool,
}

#[derive(Default)]
#[repr(align(128))]
struct Line(AtomicU64);

impl Floor {
    /// There is no floor on a single core.
    pub(super) fn between(cores: &Cores, single_line: bool) -> Result<Self, String> {
        if cores.whole() < 2 {
            return Err("needs two cores".into());
        }
        Ok(Self { cores: [cores.of_member(0), cores.of_member(1)], single_line })
    }
}

/// Waits for every second value on one line, and hands the next one over on another.
fn bounce(from: &Line, to: &Line, first: u64, times: u64) {
    for value in (first..).step_by(2).take(times as usize) {
        wait_for(from, value);
        to.0.store(value + 1, Ordering::Release);
    }
}

fn wait_for(line: &Line, value: u64) {
    // As endpoints wait: a pause takes longer than a look.
    for look in 1u32.. {
        if line.0.load(Ordering::Acquire) == value {
            break;
        }
        if look.is_multiple_of(8) {
            spin_loop();
        }
    }
}

impl Contender for Floor {
    fn carry_out(&mut self, order: Order) -> Result<Timing, String> {
        let (lines, [near, far]) = ([Line::default(), Line::default()], self.cores);
        let (forth, back) = (&lines[0], &lines[usize::from(!self.single_line)]);
        let (warm_up, times) = (warm_up_of(order.iterations), order.iterations);
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
        Ok(Timing::of_messages(total_ns))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::group::Task;

    #[test]
    fn the_line_comes_back_as_often_as_it_was_sent() {
        let order = Order { task: Task::Pingpong { bytes: 8 }, iterations: 100 };
        for single_line in [false, true] {
            let floor = Floor::between(&Cores::of_this_machine(), single_line);
            let Ok(mut floor) = floor else { return };
            assert!(floor.carry_out(order).unwrap().total_ns > 0.0);
        }
    }
}
