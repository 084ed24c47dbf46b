//! Everything in Memferry that talks to the kernel or to the processor directly.
//!
//! Higher crates hold policy; this one holds the few calls and instructions that policy is made
//! of: futexes, fences, descriptors of event loops, page mappings, processor facts, and the inner
//! loops that move bytes. It keeps no state of its own apart from facts that are read once.

pub mod affinity;
pub mod clock;
pub mod contention;
pub mod copy;
pub mod cpu;
pub mod cross_memory;
#[cfg(not(loom))]
pub mod cuda;
pub mod device;
pub mod event;
pub mod fault;
pub mod fence;
pub mod file_size;
pub mod folder_lock;
pub mod fork;
pub mod packet_socket;
pub mod pages;
pub mod peer_process;
pub mod readiness;
pub mod registered_buffers;
pub mod residency;
pub mod shared_memory;
pub mod sync;
pub mod thread;
pub mod throttle;
pub mod user;
pub mod userfault;
#[cfg(not(loom))]
pub mod vfio;
pub mod wait_word;

pub use event::EventFd;
pub use pages::Pages;
pub use wait_word::WaitWord;
