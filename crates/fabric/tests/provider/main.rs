//! The provider by its tables, as libfabric's core would use it, but without the core: both sides of
//! every message are in this process.

mod hints;
mod looks;
mod memory;
mod messages;
mod objects;
mod queues;
mod world;
