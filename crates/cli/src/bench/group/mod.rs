//! Groups of processes that do one thing together on command: the contestants of the benches about
//! messages. Every group sleeps while it has nothing to do, so that many can live side by side and
//! be measured in turn, round by round. `field.rs` gathers the contestants, `contest.rs` lets them
//! run against each other, `worker.rs` is what a member made of this very program does.

mod carried;
mod carrier;
mod contest;
mod cores;
mod crew;
mod exchange;
mod field;
mod floor;
mod fourier;
#[cfg(test)]
mod fragile;
#[cfg(feature = "peers")]
mod iceoryx;
mod integer_sort;
#[cfg(feature = "peers")]
mod ipc_channel;
mod landing;
mod members;
mod messages;
mod mpi;
mod order;
mod ours;
mod plain;
mod receiver;
mod scratch;
mod stream;
mod ucx;
pub(crate) mod worker;

pub(super) use carried::{OPEN_MPI_CARRIED, is_aside};
pub(super) use contest::{Patience, Rounds};
pub(super) use crew::Crew;
pub(super) use field::{
    CROSS_MEMORY, Camp, LANDINGS, LOOPBACK, MEMFERRY, PACKETS, RECEIVE_AHEAD, RECEIVE_NAIVE,
    SHAREABLE, TWO_COPIES, UCX,
};
pub(super) use floor::{FLOOR, SINGLE_LINE};
pub(super) use fourier::{Complex, cell_at, transform_rows};
pub(super) use mpi::OPEN_MPI;
pub(super) use order::{Order, Task, Timing};
pub(super) use plain::{Plain, bytes_of, bytes_of_mut, mixed};
pub(super) use stream::window_of;

/// Something that carries out orders and says how long they took.
pub(super) trait Contender {
    /// Carries out an order. After an error it is not asked again.
    fn carry_out(&mut self, order: Order) -> Result<Timing, String>;

    /// How often it can do a task in a slice of time, found out by trying.
    fn fit(&mut self, task: Task, slice_ns: f64) -> Result<Fit, String> {
        let mut iterations = 1;
        loop {
            let took_ns = self.carry_out(Order { task, iterations })?.total_ns;
            let once_ns = took_ns / iterations as f64;
            // What took long enough is a fair measure of the rest.
            if took_ns * 4.0 >= slice_ns || iterations >= MOST_ITERATIONS {
                return Ok(Fit::into(slice_ns, once_ns));
            }
            let halfway = (slice_ns / once_ns / 2.0) as u64;
            iterations = halfway.clamp(2 * iterations, 64 * iterations);
        }
    }
}

/// How often something can be done in a slice of time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Fit {
    iterations: u64,
    once_ns: f64,
}

impl Fit {
    /// As often as it fits, but at least once.
    fn into(slice_ns: f64, once_ns: f64) -> Self {
        Self { iterations: ((slice_ns / once_ns) as u64).clamp(1, MOST_ITERATIONS), once_ns }
    }

    /// The same, with more iterations if they are so few.
    fn at_least(self, iterations: u64) -> Self {
        Self { iterations: self.iterations.max(iterations), ..self }
    }

    /// What a turn will take: the iterations and those that warm up.
    fn turn_ns(self) -> f64 {
        (self.iterations + order::warm_up_of(self.iterations)) as f64 * self.once_ns
    }
}

const MOST_ITERATIONS: u64 = 100_000;

/// What a contestant stands for in a comparison.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    /// Memferry.
    Ours,
    /// What ours is compared with.
    Peer,
    /// What is compared with a series that it names, and is no peer of ours.
    Aside,
    /// What nobody can beat.
    Floor,
}
