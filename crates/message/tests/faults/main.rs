//! Every system call fails once, and a process ends at every step: of connecting, of each path of a message,
//! of exposing, attaching, putting, getting and withdrawing, of closing.
//!
//! A flow is walked by two processes: the subject, to which something happens, and the survivor, which is the
//! test itself. The fault is at the first place, then at the second, and so on until the flow passes without
//! one. Each time the outcome is right or an error, nothing is left, and the next try works.
//!
//! `cargo test -p memferry-message --features faults --test faults`

#[path = "../support/mod.rs"]
mod support;

mod crowd;
mod deaths;
mod failures;
mod flows;
mod subject;

#[test]
fn other_processes_begin_here() {
    match support::process::role().as_deref() {
        Some("subject") => subject::serve(),
        Some("victim") => subject::walk_once(),
        Some("starter") => crowd::start_up(),
        _ => {}
    }
}
