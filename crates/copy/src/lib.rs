//! The copy core: a request becomes a plan, the plan becomes descriptors on channels, and their
//! completion comes back to the caller as a cookie, a future, an eventfd or a notification.
//!
//! [`Ferry`] is the way in. [`plan`] decides, as pure functions; [`policy`] spreads work over
//! channels; [`transfer`] holds the handles for each way of handing over memory.

// The model checker runs the driver alone: `tests/loom` includes it.
#![cfg(not(loom))]

mod builder;
mod carry;
mod cookie;
mod deliver;
mod device;
mod driver;
mod error;
mod ferry;
mod parts;
pub mod plan;
pub mod policy;
mod registration;
mod request;
mod statistics;
pub mod transfer;

pub use builder::{Builder, EngineChoice, Gpu, PciDevices};
pub use cookie::Cookie;
pub use deliver::Piece;
pub use device::Region;
pub use error::{BuildError, CookieError, Error, ValidationError};
pub use ferry::Ferry;
pub use request::{Options, Request, Temperature};
pub use statistics::{PinStatistics, Statistics};
pub use transfer::{
    Buffer, Failed, OwnedSource, OwnedTarget, OwnedTransfer, Scope, ScopedTransfer, Transfer,
};

pub use memferry_engine::completion::{Finish, Notification};
pub use memferry_engine::cuda::{CudaEngine, DeviceMemory};
pub use memferry_memory::pin_cache::Limits as PinLimits;
