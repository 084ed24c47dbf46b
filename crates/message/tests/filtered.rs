//! System calls that a filter (seccomp) refuses: what can be done without them is done, and what
//! cannot names the gate.

mod support;

use memferry_message::{Builder, Endpoint};
use support::filter::refuse;
use support::{unique, until};

/// Runs a test on a thread of its own, which takes its filter with it when it ends.
fn apart(test: impl FnOnce() + Send) {
    std::thread::scope(|scope| scope.spawn(test).join()).unwrap();
}

#[test]
fn shared_memory_is_accepted_where_fstatfs_is_refused() {
    for error in [libc::EPERM, libc::ENOSYS] {
        apart(move || {
            refuse(&[libc::SYS_fstatfs], error);
            let here = Endpoint::open(&unique("here")).unwrap();
            let there = Endpoint::open(&unique("there")).unwrap();
            // Nobody else moves them, and both are on this thread, where the filter is.
            let peer = here.know(there.name()).unwrap();
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
    apart(|| {
        let here = Builder::new();
        let there = Endpoint::open(&unique("there")).unwrap();
        let name = there.name().to_owned();
        let caller = std::thread::spawn(move || here.open(&unique("here")).unwrap().connect(&name));
        // Without its seals nobody knows whether memory can be taken away.
        refuse(&[libc::SYS_fcntl], libc::EPERM);
        until("the caller has its answer", || {
            there.progress();
            caller.is_finished()
        });
        let text = caller.join().unwrap().unwrap_err().to_string();
        assert!(text.contains("seccomp"), "{text}");
    });
}
