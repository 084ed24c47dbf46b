//! The Python package `memferry`: what its Python modules call.
//!
//! | Python | file |
//! |---|---|
//! | memory of any object: buffer protocol, DLPack, array interfaces | `memory.rs`, `element.rs`, `dlpack.rs`, `array_interface.rs` |
//! | buffers that are given back when no engine uses them | `release.rs` |
//! | `copy`, `icopy`, `icopy_many`, `fill`, `ifill_many`, `compare`, `register`, statistics | `copies.rs`, `transfer.rs` |
//! | `crc`, `copy_crc`, `dualcast` | `checksums.rs` |
//! | completions for event loops | `reactor.rs` |
//! | `Endpoint`, `Job`, operations, windows, `ShareableBuffer` | `endpoint.rs`, `operation.rs`, `window.rs`, `shareable.rs` |
//! | `Loader` and headers of safetensors files | `load.rs` |
//!
//! Nothing here runs Python code on a thread of Memferry: completions go to an eventfd, and
//! references to Python objects are given back by the interpreter's main thread, or by the next
//! call of a copy or a message.
#![allow(
    clippy::result_large_err,
    reason = "a failed operation gives back its memory, which stays with the interpreter anyway"
)]

mod array_interface;
mod checksums;
mod collective;
mod copies;
mod dlpack;
mod element;
mod endpoint;
mod error;
mod load;
mod memory;
mod operation;
mod reactor;
mod release;
mod shareable;
mod transfer;
mod window;

use pyo3::prelude::*;

/// The compiled part of the package.
#[pymodule]
fn _memferry(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    error::add(module)?;
    copies::add(module)?;
    module.add_class::<transfer::Transfer>()?;
    module.add_class::<reactor::Reactor>()?;
    module.add_class::<endpoint::Endpoint>()?;
    module.add_class::<endpoint::Job>()?;
    module.add_class::<endpoint::Peer>()?;
    module.add_class::<operation::Operation>()?;
    module.add_class::<operation::Status>()?;
    module.add_class::<window::Window>()?;
    module.add_class::<window::RemoteWindow>()?;
    module.add_class::<shareable::ShareableBuffer>()?;
    load::add(module)?;
    module.add_function(wrap_pyfunction!(release::release_buffers, module)?)?;
    module.add_function(wrap_pyfunction!(release::stop, module)?)?;
    Ok(())
}
