//! Starting of threads.

use std::io;

use crate::fault::{Call, call};
use crate::sync::thread::{Builder, JoinHandle};

/// Starts a named thread. Fails if the process or user has reached its limit of threads.
pub fn spawn<T: Send + 'static>(
    name: impl Into<String>,
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    call(Call::Clone, || Builder::new().name(name.into()).spawn(work))
}
