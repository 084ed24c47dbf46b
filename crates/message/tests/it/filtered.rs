//! System calls that a filter (seccomp) denies: everything that is possible without them works, and
//! the error of the rest names the filter.

use std::io::{BufRead, BufReader, Write};
use std::process::Stdio;

use memferry_message::Endpoint;
use memferry_testing::message::filter::{refuse, refuse_in_process};
use memferry_testing::message::process::{self, Child, setting};
use memferry_testing::message::{unique, until};

/// Runs a test on a thread of its own, whose filter ends with the thread.
fn run_in_thread(test: impl FnOnce() + Send) {
    std::thread::scope(|scope| scope.spawn(test).join()).unwrap();
}

#[test]
fn shared_memory_is_accepted_where_fstatfs_is_refused() {
    for error in [libc::EPERM, libc::ENOSYS] {
        run_in_thread(move || {
            refuse(&[libc::SYS_fstatfs], error);
            let here = Endpoint::open(&unique("here")).unwrap();
            let there = Endpoint::open(&unique("there")).unwrap();
            // No other thread makes progress, and both endpoints are on this thread, where the
            // filter is.
            let peer = here.add_peer(there.name()).unwrap();
            let connected = |from: &Endpoint, to| from.is_connected(to).unwrap();
            until("they are connected", || {
                here.progress();
                there.progress();
                connected(&here, peer) && there.peers().len() == 1
            });
        });
    }
}

#[test]
fn a_call_that_is_refused_at_the_acceptor_is_named_to_the_caller() {
    let name = unique("there");
    let mut command = process::command("refused acceptor");
    command.env("MEMFERRY_TEST_NAME", &name).stdin(Stdio::piped()).stderr(Stdio::piped());
    let mut acceptor = Child::spawn(&mut command);
    let mut line = String::new();
    BufReader::new(acceptor.take_errors()).read_line(&mut line).unwrap();
    assert_eq!(line, "filtered\n");
    let error = Endpoint::open(&unique("here")).unwrap().connect(&name).unwrap_err();
    assert!(error.to_string().contains("seccomp"), "{error}");
}

/// A process that accepts connections, in which the file control call is refused.
fn refused_acceptor() {
    let _endpoint = Endpoint::open(&setting("MEMFERRY_TEST_NAME")).unwrap();
    // Without its seals, the memory might be truncated.
    refuse_in_process(&[libc::SYS_fcntl], libc::EPERM);
    std::io::stderr().write_all(b"filtered\n").unwrap();
    std::io::stdin().read_line(&mut String::new()).unwrap();
}

#[test]
fn other_processes_begin_here() {
    if process::role().is_some() {
        refused_acceptor();
    }
}
