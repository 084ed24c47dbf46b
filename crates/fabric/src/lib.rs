//! A libfabric provider named "memferry": programs that use libfabric, above all MPI, exchange
//! messages over Memferry's endpoints without being changed.
//!
//! libfabric's core loads this library and gets the provider from [`fi_prov_ini`]. From then on all
//! calls go through tables of functions ([`abi`]): `info` lists the capabilities, a `fabric` opens
//! domains and event queues, a `domain` opens address vectors, queues, counters and endpoints. An
//! `endpoint` passes its messages to an endpoint core, which owns the Memferry endpoint;
//! completions are collected there when a program reads its queues (`queue`). Peers on other hosts
//! are reached through another libfabric provider (`remote`).

#[doc(hidden)]
pub mod abi;
mod address;
mod atomic;
mod core;
mod domain;
mod endpoint;
mod fabric;
mod guard;
mod info;
mod mr;
mod mr_table;
mod object;
mod queue;
mod remote;
mod warn_once;

#[cfg(feature = "fuzz")]
#[doc(hidden)]
pub use remote::fuzz;

use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicUsize, Ordering};

use abi::Provider;
use memferry_sys::fork::ForkSafe;

/// The name of the provider.
const NAME: &std::ffi::CStr = c"memferry";

/// The provider structure that the core holds.
struct ProviderCell(UnsafeCell<Provider>);

// SAFETY: `fi_prov_ini` writes to it once, before any call of it returns; after that, only the core does.
unsafe impl Sync for ProviderCell {}

static PROVIDER: ProviderCell = ProviderCell(UnsafeCell::new(Provider {
    version: 0,
    fi_version: 0,
    context: [std::ptr::null_mut(); 4],
    name: NAME.as_ptr(),
    getinfo: info::getinfo,
    fabric: fabric::open,
    cleanup,
}));

/// The entry point of the provider, which the core calls after it has loaded the library.
#[unsafe(no_mangle)]
pub extern "C" fn fi_prov_ini() -> *mut Provider {
    LOADED.fetch_add(1, Ordering::AcqRel);
    let written = guard::protected(|| {
        // Several threads may load it at the same time, and the core may have the structure already.
        VERSION.get_or_init(|| {
            // The program's version must not be newer than this one, so this is the core's version.
            let version = core::core().version();
            // SAFETY: this runs once, and nobody has the address before it has run.
            unsafe {
                (*PROVIDER.0.get()).version = version;
                (*PROVIDER.0.get()).fi_version = version;
            }
            version
        });
        Ok(())
    });
    // Without a version the core has no provider: it refuses what is not there.
    if written.is_err() { std::ptr::null_mut() } else { PROVIDER.0.get() }
}

/// The version in the structure, once it is written.
static VERSION: ForkSafe<u32> = ForkSafe::new();

/// The number of times that the core has loaded the provider: it unloads a duplicate at once.
static LOADED: AtomicUsize = AtomicUsize::new(0);

/// Called when the core unloads the provider. Programs close their objects themselves; but threads
/// of this library may still be in providers that are unloaded too.
extern "C" fn cleanup() {
    if LOADED.fetch_sub(1, Ordering::AcqRel) == 1 {
        remote::UNLOAD_GATE.close();
    }
}
