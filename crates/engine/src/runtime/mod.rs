//! What channels of several engines are made of: the submission ring, parking, the channel with a
//! worker thread, execution on the processor, and stored profiles.

pub(crate) mod execute;
#[cfg(not(loom))]
pub(crate) mod group;
#[cfg(not(loom))]
mod measured_kernel;
#[doc(hidden)]
pub mod park;
#[cfg(not(loom))]
pub mod profile_store;
#[doc(hidden)]
pub mod ring;
mod support;
#[cfg(not(loom))]
pub(crate) mod threaded;
#[cfg(not(loom))]
pub(crate) mod window;

#[cfg(not(loom))]
pub(crate) use support::try_collect;
pub use support::{FailureLog, as_engine_thread, enter_engine_thread, is_engine_thread};
