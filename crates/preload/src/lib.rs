//! A library for `LD_PRELOAD` that stands in front of the C library's functions for moving memory.
//! `memferry run` puts it in, and switches its parts on by variables of the environment.
//!
//! It runs in programs that know nothing of it, in every context in which they call `memcpy`: before
//! their constructors, in signal handlers, after `fork`, inside allocators. So nothing here allocates,
//! takes a lock of another library, or needs thread-local storage that the loader creates on demand.
//! The entry points are assembly, so that the compiler cannot turn them into calls of themselves.
//!
//! `entry` has the functions that programs call, `real` finds those of the C library behind them,
//! `start` reads the environment. `profile` counts; `copies` and `helpers` share large copies with spare cores, `device`
//! hands them to a ferry with devices; `heap` has large allocations in memory that peers can map.
//! `namespaces` ends helpers for calls that need a process with one thread.

#[cfg(all(target_arch = "x86_64", target_env = "gnu"))]
mod gnu {
    #![cfg_attr(test, allow(dead_code))]

    #[cfg(not(test))]
    mod copies;
    #[cfg(not(test))]
    mod device;
    #[cfg(not(test))]
    mod entry;
    mod heap;
    #[cfg(not(test))]
    mod helpers;
    mod lookup;
    #[cfg(not(test))]
    mod namespaces;
    #[cfg(not(test))]
    mod profile;
    mod real;
    #[cfg(not(test))]
    mod start;
    mod system;
}
