//! Copy core of Memferry. The planner turns a request into a plan, the submit path turns the plan
//! into descriptors on channels, and the caller gets the completion as a cookie, a future, an
//! eventfd or a notification variable.
//!
//! [`Ferry`] is the entry point. [`plan`] contains the planner, which consists of pure functions;
//! [`policy`] distributes transfers over channels; [`transfer`] contains the handles, one kind for
//! each ownership model of memory.

// The loom model checks the poll thread alone: `tests/loom` includes its source.
#![cfg(not(loom))]

mod batch;
mod builder;
mod cookie;
mod deliver;
mod device;
mod error;
mod ferry;
mod learned;
mod list;
mod parts;
pub mod plan;
pub mod policy;
mod poller;
mod registration;
mod request;
mod statistics;
mod submit;
pub mod transfer;

pub use batch::BatchItem;
pub use builder::FerryBuilder;
pub use cookie::Cookie;
pub use deliver::Segment;
pub use device::Region;
pub use error::{BuildError, CookieError, Error, ValidationError};
pub use ferry::Ferry;
pub use learned::{LearnedDelivery, LearnedShare, LearnedValues};
pub use request::{CacheHint, Options, Request};
pub use statistics::Statistics;
pub use transfer::{
    Buffer, CrcTransfer, Dependency, FailedTransfer, OwnedSlice, OwnedSource, OwnedTarget,
    OwnedTransfer, ScopedTransfer, Transfer, TransferScope,
};

pub use bytemuck::Pod;

pub use memferry_engine::DeviceBuffer;
pub use memferry_engine::completion::{Notification, TransferOutput};
pub use memferry_engine::contract::{
    DeviceAllocError, DeviceAllocator, EngineChoice, EngineSelection,
};
pub use memferry_memory::pin_cache::PinCacheLimits as PinLimits;
pub use memferry_memory::registration::RegistrationStatistics;
