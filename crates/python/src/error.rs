//! Exceptions.

use memferry::load::LoadError as LoadFailure;
use memferry::message;
use pyo3::exceptions::{PyOSError, PyRuntimeError, PyTimeoutError, PyValueError};
use pyo3::prelude::*;

pyo3::create_exception!(
    memferry,
    Error,
    PyRuntimeError,
    "An error of Memferry: the base of PeerDisconnected, Cancelled and LoadError."
);
pyo3::create_exception!(
    memferry,
    PeerDisconnected,
    Error,
    "The peer has exited, was killed or has closed the connection."
);
pyo3::create_exception!(memferry, Cancelled, Error, "The operation was cancelled.");
pyo3::create_exception!(memferry, LoadError, Error, "A file could not be loaded.");

/// Adds the exceptions to the module.
pub(crate) fn add(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = module.py();
    module.add("Error", py.get_type::<Error>())?;
    module.add("PeerDisconnected", py.get_type::<PeerDisconnected>())?;
    module.add("Cancelled", py.get_type::<Cancelled>())?;
    module.add("LoadError", py.get_type::<LoadError>())
}

/// The sentence of an error and of all its causes.
fn text(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}

/// An error of a copy.
pub(crate) fn copy_error(error: &memferry::Error) -> PyErr {
    match error {
        memferry::Error::Validation(_) => PyValueError::new_err(text(error)),
        memferry::Error::Execution(memferry::ExecutionError::Cancelled { .. }) => {
            Cancelled::new_err(text(error))
        }
        _ => Error::new_err(text(error)),
    }
}

/// An error of opening engines.
pub(crate) fn build_error(error: &memferry::BuildError) -> PyErr {
    Error::new_err(text(error))
}

/// An error of a message or a window.
pub(crate) fn message_error(error: &message::Error) -> PyErr {
    use message::CollectiveError::{Argument, RankDied, RankLeft};
    match error {
        message::Error::Validation(_) | message::Error::Collective(Argument(_)) => {
            PyValueError::new_err(text(error))
        }
        message::Error::PeerDisconnected(_)
        | message::Error::Collective(RankDied(_) | RankLeft(_)) => {
            PeerDisconnected::new_err(text(error))
        }
        message::Error::Cancelled(_) => Cancelled::new_err(text(error)),
        _ => Error::new_err(text(error)),
    }
}

/// An error of a load.
pub(crate) fn load_error(error: &LoadFailure) -> PyErr {
    match error {
        LoadFailure::Open { source, .. } if source.raw_os_error().is_some() => {
            let number = source.raw_os_error();
            PyOSError::new_err((number, text(error)))
        }
        LoadFailure::Cancelled => Cancelled::new_err(text(error)),
        _ => LoadError::new_err(text(error)),
    }
}

/// An error of the system.
pub(crate) fn system_error(what: &str, error: &std::io::Error) -> PyErr {
    PyOSError::new_err((error.raw_os_error(), format!("{what}: {error}")))
}

/// The timeout of a wait has passed.
pub(crate) fn timeout_error(what: impl std::fmt::Display, timeout: Option<f64>) -> PyErr {
    let seconds = timeout.unwrap_or_default();
    PyTimeoutError::new_err(format!("the {what} is not complete after {seconds} s: wait longer"))
}
