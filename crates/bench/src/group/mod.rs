//! Groups of processes that execute tasks together on command: the candidates of the message
//! benches. An idle group sleeps, so several groups can exist at the same time and be measured
//! interleaved, round by round. `environment.rs` collects the candidates, `candidate.rs`
//! gives them to the harness, and `worker.rs` implements members made of this program.

mod candidate;
pub(crate) mod command;
pub(crate) mod cores;
mod environment;
pub(crate) mod exchange;
#[cfg(test)]
pub(crate) mod faulty_link;
mod lineup;
pub(crate) mod plain;
pub(crate) mod process_group;
pub mod worker;
mod worker_pool;
pub(crate) mod workspace;

pub(crate) use candidate::TaskRunner;
pub(crate) use command::GroupTask;
pub(crate) use environment::{BenchEnvironment, StartedGroup};
pub(crate) use lineup::{
    CROSS_MEMORY, FIRST_TOUCH, LOOPBACK, PACKETS, RECEIVE_AHEAD, RECEIVE_NAIVE, TWO_COPIES, UCX,
};
pub(crate) use plain::{Plain, bytes_of, bytes_of_mut, splitmix64};
pub(crate) use worker_pool::WorkerPool;
