//! System calls, processor instructions and synchronisation primitives of Memferry.
//!
//! Policy is in the crates above. This one provides futexes, fences, event descriptors, page
//! mappings, processor information, device access and the inner copy loops. Apart from values that
//! are read once, it has no state.

pub mod affinity;
pub mod biased_mutex;
pub mod call_profile;
pub mod clock;
pub mod contention;
pub mod copy;
pub mod cpu;
pub mod crc;
pub mod cross_memory;
#[cfg(not(loom))]
pub mod cuda;
pub mod descriptor_cell;
pub mod device;
pub mod dir_lock;
pub mod epoll;
pub mod event;
pub mod fault;
pub mod fence;
pub mod file_lock;
pub mod file_size;
pub mod fork;
pub mod futex;
#[cfg(not(loom))]
pub mod idxd;
pub mod open_files;
pub mod pages;
pub mod peer_process;
pub mod portal;
pub mod probes;
pub mod registered_buffers;
pub mod residency;
pub mod seqpacket;
pub mod settings;
pub mod shared_memory;
pub mod stats;
pub mod sync;
pub mod thread;
pub mod throttle;
pub mod topology;
pub mod user;
pub mod user_wait;
pub mod userfault;
#[cfg(not(loom))]
pub mod vfio;

pub use event::EventFd;
pub use futex::Futex;
pub use pages::Pages;
