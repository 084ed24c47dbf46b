//! A member that works through a stream of tasks, each a message and a computation on it, and the
//! member that sends them: how much of the receiver's time receiving takes away from computing, with
//! each way to write its loop. After the benchmark of Ciaccio's paper on a self-connected network
//! card as copy engine.

mod form;
mod region;
mod work;

use std::collections::VecDeque;
use std::io;
use std::ops::Range;

use anyhow::{bail, ensure};
use memferry::message::{Endpoint, Job, Operation, Peer};
use memferry::sys::affinity;
use rustix::thread::{CpuSet, sched_setaffinity};

pub(super) use form::Form;

use super::order::{Order, Task, Timing, warm_up_of};
use super::worker::{Member, WorkerArgs};
use crate::bench::measure::Walk;
use region::Region;
use work::{Clocks, steps_of, work};

const TAG: u64 = 1;
/// Sends that the sender keeps open, so that the next task is always ready.
const WINDOW: usize = 8;
/// Tasks behind the last timed one, so that those in flight are as many at the end as at the start.
const TAIL: u64 = 2;
/// Tasks whose every byte is looked at before any are timed: the hot places more than once.
const CHECKED: u64 = 7;

/// One of the two members. The job comes first: it ends what is under way before the memory goes.
struct Member2 {
    job: Job,
    form: Form,
    places: Option<Places>,
}

/// Where messages of one size go, or come from. Both members walk over the same places in step.
struct Places {
    bytes: usize,
    cold: bool,
    walk: Walk,
    region: Region,
}
