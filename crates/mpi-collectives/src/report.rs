//! Errors: lines for the user on the standard error output, and MPI's error handlers.

use std::ffi::c_int;

use crate::communicator::Context;

/// Writes a line with one system call, so that lines of several ranks do not mix.
pub(crate) fn line(text: &str) {
    let line = format!("memferry: {text}\n");
    // SAFETY: the bytes are valid for reads. A closed output is no error.
    let _ = unsafe { libc::write(libc::STDERR_FILENO, line.as_ptr().cast(), line.len()) };
}

/// Reports an error of a collective as the error handler of its communicator says, and returns the code
/// of MPI for it. By default the handler ends the program.
#[cold]
pub(crate) fn fail(context: &Context, text: &str) -> c_int {
    let code = context.handles.error_other;
    line(&format!("rank {}: {text}", context.communicator.rank));
    // SAFETY: MPI is active, and the communicator is valid.
    unsafe { (context.library.functions.comm_call_errhandler)(context.communicator.handle, code) };
    code
}
