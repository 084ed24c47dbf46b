//! Groups of processes that execute tasks together on command: the candidates of the message
//! benches. An idle group sleeps, so several groups can exist at the same time and be measured
//! interleaved, round by round. `environment.rs` collects the candidates, `harness.rs` compares
//! them, and `worker.rs` implements members made of this program.

pub(crate) mod command;
pub(crate) mod cores;
mod environment;
pub(crate) mod exchange;
#[cfg(test)]
pub(crate) mod faulty_link;
mod harness;
pub(crate) mod plain;
pub(crate) mod process_group;
pub mod worker;
mod worker_pool;
mod workspace;

pub(crate) use command::{GroupTask, Sample, WorkerCommand};
pub(crate) use environment::{
    BenchEnvironment, CROSS_MEMORY, FIRST_TOUCH, LOOPBACK, PACKETS, RECEIVE_AHEAD, RECEIVE_NAIVE,
    TWO_COPIES, UCX,
};
pub(crate) use harness::{GroupBudget, GroupSamples};
pub(crate) use plain::{Plain, bytes_of, bytes_of_mut, splitmix64};
pub(crate) use worker_pool::WorkerPool;

/// Something that executes commands and measures their times.
pub(crate) trait Candidate {
    /// Executes a command. It is not called again after an error.
    fn run(&mut self, order: WorkerCommand) -> Result<Sample, String>;

    /// Determines by trial how many iterations of a task fit into a time slice.
    fn calibrate(&mut self, task: GroupTask, slice_ns: f64) -> Result<Calibration, String> {
        let mut iterations = 1;
        loop {
            let took_ns = self.run(WorkerCommand { task, iterations })?.total_ns;
            let once_ns = took_ns / iterations as f64;
            // A run of a quarter of the slice is long enough to extrapolate.
            if took_ns * 4.0 >= slice_ns || iterations >= MAX_ITERATIONS {
                return Ok(Calibration::for_slice(slice_ns, once_ns));
            }
            let halfway = (slice_ns / once_ns / 2.0) as u64;
            iterations = halfway.clamp(2 * iterations, 64 * iterations);
        }
    }
}

/// Number of iterations that fit into a time slice.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Calibration {
    pub(crate) iterations: u64,
    pub(crate) once_ns: f64,
}

impl Calibration {
    /// Number of iterations that fit into `slice_ns`, at least 1.
    pub(crate) fn for_slice(slice_ns: f64, once_ns: f64) -> Self {
        Self { iterations: ((slice_ns / once_ns) as u64).clamp(1, MAX_ITERATIONS), once_ns }
    }

    /// Raises the number of iterations to a minimum.
    pub(crate) fn at_least(self, iterations: u64) -> Self {
        Self { iterations: self.iterations.max(iterations), ..self }
    }

    /// Expected time of a run, including its warm-up iterations.
    pub(crate) fn run_ns(self) -> f64 {
        (self.iterations + command::warm_up_iterations(self.iterations)) as f64 * self.once_ns
    }
}

pub(crate) const MAX_ITERATIONS: u64 = 100_000;

/// Role of a candidate in a comparison.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    /// Memferry.
    Memferry,
    /// A candidate that Memferry is compared with.
    Peer,
    /// A candidate that is compared with one named series, and is not a peer of Memferry.
    Reference,
    /// The lower bound of every candidate.
    LowerBound,
}
