//! A libfabric provider named "memferry": programs of libfabric's, MPI above all, exchange messages
//! over Memferry's endpoints without being changed.
//!
//! libfabric's core loads this library and asks [`fi_prov_ini`] for the provider. From there on
//! everything goes through tables of functions ([`abi`]): `info` says what there is, a `fabric` opens
//! domains and event queues, a `domain` opens address vectors, queues, counters and endpoints. An
//! `endpoint` hands its messages to a station, which owns the Memferry endpoint; what has ended is
//! collected there when a program reads its queues (`queue`). Peers on other hosts are reached through
//! another provider of libfabric's (`remote`).

#[doc(hidden)]
pub mod abi;
mod address;
mod complaint;
mod core;
mod domain;
mod endpoint;
mod fabric;
mod guard;
mod info;
mod memory;
mod object;
mod queue;
mod regions;
mod remote;

#[cfg(feature = "fuzz")]
#[doc(hidden)]
pub use remote::fuzz;

use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicUsize, Ordering};

use abi::Provider;

/// What programs call the provider.
const NAME: &std::ffi::CStr = c"memferry";

/// The description that the core keeps.
struct Description(UnsafeCell<Provider>);

// SAFETY: only the core writes to it, after `fi_prov_ini`, which the core calls once.
unsafe impl Sync for Description {}

static PROVIDER: Description = Description(UnsafeCell::new(Provider {
    version: 0,
    fi_version: 0,
    context: [std::ptr::null_mut(); 4],
    name: NAME.as_ptr(),
    getinfo: info::getinfo,
    fabric: fabric::open,
    cleanup,
}));

/// The entry point of a provider, which the core calls when it has loaded the library.
#[unsafe(no_mangle)]
pub extern "C" fn fi_prov_ini() -> *mut Provider {
    LOADED.fetch_add(1, Ordering::AcqRel);
    let _ = guard::protected(|| {
        // A program's version must not be newer than this one: what the core knows, it may ask for.
        let version = core::core().version();
        // SAFETY: the core calls this once, before it looks at the description.
        unsafe {
            (*PROVIDER.0.get()).version = version;
            (*PROVIDER.0.get()).fi_version = version;
        }
        Ok(())
    });
    PROVIDER.0.get()
}

/// How often the core has the provider: it gives one back at once that it has already.
static LOADED: AtomicUsize = AtomicUsize::new(0);

/// Programs close their objects themselves; but threads of ours may still be inside of providers that
/// are about to be unloaded as well.
extern "C" fn cleanup() {
    if LOADED.fetch_sub(1, Ordering::AcqRel) == 1 {
        remote::GATE.close();
    }
}
