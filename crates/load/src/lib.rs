//! Loads files to memory and to GPUs at the speed of the storage or of the bus.
//!
//! A [`Loader`] has a few reader threads and a ring of pinned staging buffers. Each thread reads a
//! block of the file into a buffer of its own and starts its copy to the device, and reads the next
//! block while the device copies. Blocks in the page cache are copied from there; blocks that are
//! not are read past it (`O_DIRECT`) or through it, whichever is faster. The memory in use is that of the ring,
//! whatever the size of the file.
//!
//! | step | file |
//! |---|---|
//! | validate the header of a safetensors file | `safetensors_file.rs`, `sharded.rs` |
//! | cut what is wanted into blocks | `blocks.rs` |
//! | read a block: from the page cache, or past it | `block_reader.rs` |
//! | pinned buffers, and their copies to the device | `staging_ring.rs`, `staged_copies.rs` |
//! | the threads, progress, cancelling, errors | `loading.rs` |

mod block_reader;
mod blocks;
mod error;
mod loader;
mod loading;
mod safetensors_file;
mod sharded;
mod staged_copies;
mod staging_ring;

pub use block_reader::{FileSource, ReadMode};
pub use blocks::Placement;
pub use error::LoadError;
pub use loader::{DeviceTensors, Loader, LoaderBuilder};
pub use loading::{LoadReport, Loading};
pub use safetensors::Dtype;
pub use safetensors_file::{SafetensorsFile, Tensor};
pub use sharded::ShardedFiles;
