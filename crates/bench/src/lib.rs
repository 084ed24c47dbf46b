//! The benches of Memferry. A bench measures candidates with one harness and returns an outcome; it
//! prints nothing. The program `memferry` finds benches here by name and shows their outcomes.
//!
//! Without the feature `run` there are no benches: only the format of results, replays of lookup
//! traces, and what is known about the machine and its MPIs.

pub mod host;
pub mod replay;
pub mod results;

#[cfg(feature = "run")]
mod apps;
#[cfg(feature = "run")]
mod candidates;
#[cfg(feature = "run")]
mod copy;
#[cfg(feature = "run")]
mod devices;
#[cfg(feature = "run")]
mod gpu;
#[cfg(feature = "run")]
mod group;
#[cfg(feature = "run")]
mod harness;
#[cfg(feature = "run")]
mod load;
#[cfg(feature = "run")]
mod memory;
#[cfg(feature = "run")]
mod message;
#[cfg(feature = "run")]
mod registry;
#[cfg(feature = "run")]
mod reply;
#[cfg(feature = "run")]
mod run;
#[cfg(feature = "run")]
mod screen;
#[cfg(feature = "run")]
mod unmodified;

#[cfg(feature = "run")]
pub use devices::guest;
#[cfg(feature = "run")]
pub use group::worker;
#[cfg(feature = "run")]
pub use registry::{Bench, Effort, Progress, all, find};
#[cfg(feature = "run")]
pub use run::measure;
#[cfg(feature = "run")]
pub use screen::Screen;
