//! The lookup through its public interface: single-threaded behaviour, concurrency, model and
//! traces.
mod behaviour;
mod classes;
mod concurrency;
mod model;
mod support;
mod traces;
