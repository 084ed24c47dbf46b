//! Threads of the library.

use std::io;

use crate::fault::{Call, call};
use crate::sync::thread::{Builder, JoinHandle};

/// Starts a thread with a name. An error where the process or its user may have no more of them.
pub fn spawn<T: Send + 'static>(
    name: impl Into<String>,
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    call(Call::Clone, || Builder::new().name(name.into()).spawn(work))
}
