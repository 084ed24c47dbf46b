//! The provider, called through its function tables as libfabric's core does, but without the core. Both
//! sides of every message are in this process.

mod atomics;
mod hints;
mod memory;
mod messages;
mod objects;
mod peek;
mod queues;
pub(crate) mod world;
mod written;
