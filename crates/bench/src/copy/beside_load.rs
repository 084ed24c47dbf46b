//! Busy loops beside copies: programs that use the cores that the channels' threads need.

use std::process::{Child, Command, Stdio};

use anyhow::Context;

use crate::Effort;
use crate::harness::Budget;
use crate::host::process;

/// Numbers of busy loops.
pub(super) const LOOPS: [usize; 2] = [1, 2];

/// Sizes of copies in bytes.
pub(super) fn sizes(effort: Effort) -> Vec<u64> {
    match effort {
        Effort::Brief | Effort::Quick => vec![64 << 10, 1 << 20, 4 << 20, 64 << 20],
        Effort::Full => (8..=28).step_by(2).map(|shift| 1 << shift).collect(),
    }
}

/// Budget of a comparison. A run is longer than several time slices of the scheduler, so that each has its
/// share of interruptions.
pub(super) fn budget(effort: Effort) -> Budget {
    match effort {
        Effort::Brief => Budget::equal(8, 25, 600),
        Effort::Quick => Budget::equal(16, 25, 900),
        Effort::Full => Budget::equal(48, 25, 4000),
    }
}

/// Programs that compute without end. They end when this is dropped, and with this process.
pub(super) struct BusyLoops(Vec<Child>);

impl BusyLoops {
    pub(super) fn start(count: usize) -> anyhow::Result<Self> {
        let mut started = Self(Vec::new());
        for _ in 0..count {
            let group = started.0.first().map_or(0, |leader| leader.id() as i32);
            let mut command = Command::new("sh");
            command.args(["-c", "while :; do :; done"]).stdin(Stdio::null()).stdout(Stdio::null());
            let child = process::die_with_parent(&mut command, group).spawn();
            started.0.push(child.context("a busy loop cannot be started by `sh`")?);
        }
        Ok(started)
    }
}

impl Drop for BusyLoops {
    fn drop(&mut self) {
        process::terminate(&mut self.0, false);
    }
}

#[cfg(test)]
mod tests {
    use rustix::process::{Pid, test_kill_process};

    use super::*;

    #[test]
    fn busy_loops_run_until_they_are_dropped() {
        let loops = BusyLoops::start(2).unwrap();
        let pids: Vec<_> = loops.0.iter().map(Pid::from_child).collect();
        assert!(pids.iter().all(|&pid| test_kill_process(pid).is_ok()));
        drop(loops);
        assert!(pids.iter().all(|&pid| test_kill_process(pid).is_err()));
    }
}
