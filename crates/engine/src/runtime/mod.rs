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
#[doc(hidden)]
pub mod wake_chain;
#[cfg(not(loom))]
pub(crate) mod window;

#[cfg(not(loom))]
pub(crate) use support::try_collect;
/// Limits of channels, for the table of fixed limits.
#[cfg(not(loom))]
#[doc(hidden)]
pub mod limits {
    pub use super::group::{GROUP, GROUPED_LENGTHS};
    pub use super::measured_kernel::{MEASURE_ONE_IN, PERIOD, TRIED};
    pub use super::ring::{MAX_RUN, QUEUED_PER_RUN};
    pub use super::wake_chain::{PASSED_ON, STALL_WAKES};
    pub use super::window::MIN_AHEAD_BYTES;
}

pub use support::{FailureLog, as_engine_thread, enter_engine_thread, is_engine_thread};
