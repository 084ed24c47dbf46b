//! Every system call fails once, and a process is killed at every step: of connecting, of each path
//! of a message, of exposing, attaching, putting, getting and withdrawing, of closing.
//!
//! Two processes run a flow: the subject, in which the fault is injected, and the survivor, which
//! is the test itself. The fault is injected at the first call, then at the second, and so on until
//! the flow passes without one. Each time the result is correct or an error, nothing is left
//! behind, and the next attempt works.
//!
//! A process also forks while one of its threads is at any of these steps.
//!
//! `cargo test -p memferry-message --features faults --test faults`

mod crowd;
mod deaths;
mod failures;
mod flows;
mod forks;
mod subject;

#[test]
fn other_processes_begin_here() {
    match memferry_testing::message::process::role().as_deref() {
        Some("subject") => subject::serve(),
        Some("victim") => subject::walk_once(),
        Some("starter") => crowd::start_up(),
        Some("forker") => forks::fork_at_step(),
        _ => {}
    }
}
