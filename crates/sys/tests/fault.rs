//! The calls that tests let fail. Alone in its program: what goes wrong is the whole process's.

use memferry_sys::fault::{Call, Plan, arm, call, disarm, has_fired};
use rustix::io::Errno;

fn ask() -> Result<u8, Errno> {
    call(Call::Mincore, || Ok(7))
}

#[test]
fn the_call_that_was_named_fails_and_no_other() {
    let plan = |lasts| Plan::Fail { call: Call::Mincore, nth: 2, error: libc::ENOMEM, lasts };
    arm(plan(false));
    assert_eq!((ask(), has_fired(), ask(), ask()), (Ok(7), false, Err(Errno::NOMEM), Ok(7)));
    let account = disarm();
    assert_eq!((account.calls[&Call::Mincore], account.total), (3, 3));
    assert!(account.fired.is_some_and(|place| place.file() == file!()));
    assert_eq!(ask(), Ok(7));

    arm(plan(true));
    assert_eq!((ask(), ask(), ask()), (Ok(7), Err(Errno::NOMEM), Err(Errno::NOMEM)));
    assert!(call(Call::Poll, || Ok::<_, Errno>(())).is_ok());
    // Who only waits takes no step.
    assert_eq!(disarm().total, 3);
}
