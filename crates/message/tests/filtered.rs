//! System calls that a filter (seccomp) denies: everything that is possible without them works, and
//! the error of the rest names the filter.

mod support;

use memferry_message::{Endpoint, EndpointBuilder};
use support::filter::refuse;
use support::{unique, until};

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
    run_in_thread(|| {
        let here = EndpointBuilder::new();
        let there = Endpoint::open(&unique("there")).unwrap();
        let name = there.name().to_owned();
        let caller = std::thread::spawn(move || here.open(&unique("here")).unwrap().connect(&name));
        // Without its seals, the memory might be truncated.
        refuse(&[libc::SYS_fcntl], libc::EPERM);
        until("the caller has its reply", || {
            there.progress();
            caller.is_finished()
        });
        let text = caller.join().unwrap().unwrap_err().to_string();
        assert!(text.contains("seccomp"), "{text}");
    });
}
