//! The cores that this process may use, and binding of a thread to one of them.

use std::io;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::fault::{Call, call};
use crate::fork::ForkSafe;

/// The cores that the calling thread may run on, in ascending order.
pub fn allowed_cores() -> Vec<usize> {
    match call(Call::SchedGetaffinity, || sched_getaffinity(None)) {
        Ok(set) => (0..CpuSet::MAX_CPU).filter(|&core| set.is_set(core)).collect(),
        // `CpuSet` is too small for this kernel's number of cores: assume that all counted cores
        // are allowed.
        Err(_) => (0..std::thread::available_parallelism().map_or(1, usize::from)).collect(),
    }
}

/// The number of online cores of the machine, including those that this process may not use.
pub fn online_cores() -> usize {
    static ONLINE: ForkSafe<usize> = ForkSafe::new();
    *ONLINE.get_or_init(|| {
        // SAFETY: `sysconf` takes no pointer.
        usize::try_from(unsafe { libc::sysconf(libc::_SC_NPROCESSORS_ONLN) }).unwrap_or(1).max(1)
    })
}

/// The core that the calling thread currently runs on.
pub fn current_core() -> usize {
    // `sched_getcpu` reads rseq or the vDSO; a system call would cost as much as a small copy.
    // SAFETY: the call takes no arguments.
    usize::try_from(unsafe { libc::sched_getcpu() }).unwrap_or(0)
}

/// Binds the calling thread to one core.
pub fn bind_to_core(core: usize) -> io::Result<()> {
    if core >= CpuSet::MAX_CPU {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let mut set = CpuSet::new();
    set.set(core);
    Ok(call(Call::SchedSetaffinity, || sched_setaffinity(None, &set))?)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_thread_bound_to_a_core_sees_only_that_core() {
        let last = *allowed_cores().last().unwrap();
        std::thread::spawn(move || {
            bind_to_core(last).unwrap();
            assert_eq!(allowed_cores(), [last]);
        })
        .join()
        .unwrap();
    }

    #[test]
    fn a_core_that_does_not_exist_is_refused() {
        assert!(bind_to_core(CpuSet::MAX_CPU + 7).is_err());
    }
}
