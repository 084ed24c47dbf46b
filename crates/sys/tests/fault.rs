//! Fault injection. This test has a program of its own, because the injected fault is process-wide.

use memferry_sys::fault::{Call, FaultPlan, arm, call, disarm, has_fired};
use rustix::io::Errno;

fn faulty_call() -> Result<u8, Errno> {
    call(Call::Mincore, || Ok(7))
}

#[test]
fn the_call_that_was_named_fails_and_no_other() {
    let plan = |is_persistent| FaultPlan::Fail {
        call: Call::Mincore,
        nth: 2,
        error: libc::ENOMEM,
        is_persistent,
    };
    arm(plan(false));
    assert_eq!(
        (faulty_call(), has_fired(), faulty_call(), faulty_call()),
        (Ok(7), false, Err(Errno::NOMEM), Ok(7))
    );
    let counts = disarm();
    assert_eq!((counts.calls[&Call::Mincore], counts.total), (3, 3));
    assert!(counts.fired_at.is_some_and(|location| location.file() == file!()));
    assert_eq!(faulty_call(), Ok(7));

    arm(plan(true));
    assert_eq!(
        (faulty_call(), faulty_call(), faulty_call()),
        (Ok(7), Err(Errno::NOMEM), Err(Errno::NOMEM))
    );
    assert!(call(Call::Poll, || Ok::<_, Errno>(())).is_ok());
    // A wait is not counted as a step.
    assert_eq!(disarm().total, 3);
}
