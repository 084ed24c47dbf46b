//! The heap of a program that was started by `memferry run --shared-heap`: the preloaded library has put
//! large allocations into one memfd, and tells where it is.

use std::ffi::c_int;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};

use memferry_sys::cross_memory::CrossMemoryDenied;
use memferry_sys::fork::{ForkSafe, OwnerProcess};
use memferry_sys::peer_process::Credentials;
use memferry_sys::settings;
use memferry_sys::shared_memory::{Mapping, SealedMemory};

use super::{SharedAllocation, insert, next_id};
use crate::connect::access_probe::PeerAccess;

/// The function of the preloaded library: writes address and length, and returns the memfd or -1.
type SharedHeap = unsafe extern "C" fn(*mut usize, *mut usize) -> c_int;

/// Whether this process has a heap.
static IS_ADOPTED: AtomicBool = AtomicBool::new(false);

/// Makes the heap of this process a region, if there is one.
pub(crate) fn adopt() {
    static ADOPTED: ForkSafe<()> = ForkSafe::new();
    ADOPTED.get_or_init(|| {
        // SAFETY: a query of the loader.
        let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"memferry_shared_heap".as_ptr()) };
        if let Some(found) = NonNull::new(found) {
            // SAFETY: the preloaded library defines the function with this signature.
            let query = unsafe { std::mem::transmute::<NonNull<_>, SharedHeap>(found) };
            if let Err(error) = adopt_heap(query) {
                tracing::warn!("the shared heap of this program cannot be used: {error}");
            }
        }
    });
}

fn adopt_heap(query: SharedHeap) -> std::io::Result<()> {
    let (mut address, mut length) = (0, 0);
    // SAFETY: both places are local variables.
    let descriptor = unsafe { query(&mut address, &mut length) };
    let Some(start) = NonNull::new(address as *mut u8).filter(|_| descriptor >= 0) else {
        return Ok(());
    };
    // SAFETY: the heap keeps its descriptor open.
    let descriptor = unsafe { BorrowedFd::borrow_raw(descriptor) }.try_clone_to_owned()?;
    let memory = SealedMemory::from_untrusted_fd(descriptor, length)?;
    // SAFETY: the heap stays until the process ends, and so does the region, which nobody removes.
    let mapping = unsafe { Mapping::from_raw(start, length) };
    let id = match next_id() {
        Ok(id) => id,
        Err(error) => {
            // It is not ours to unmap.
            std::mem::forget(mapping);
            return Err(error);
        }
    };
    let heap_owner = Some(OwnerProcess::current());
    std::mem::forget(insert(SharedAllocation { id, memory, mapping, heap_owner }));
    IS_ADOPTED.store(true, Ordering::Relaxed);
    Ok(())
}

/// The variable that names the peers that may have the heap, and its valid values.
pub(crate) const PEERS_VARIABLE: &str = "MEMFERRY_SHARED_HEAP_PEERS";
pub(crate) const PEERS_EXPECTED: &str = "access or user";

/// Reads a value of the variable: whether all peers of the user may have the heap.
pub(crate) fn all_from_setting(text: &str) -> Option<bool> {
    match text {
        "access" => Some(false),
        "user" => Some(true),
        _ => None,
    }
}

/// Returns whether a peer may have the heap. It contains more than what is sent, and the peer can write all of
/// it: so only a process gets it that has written memory of this one through the kernel. What the peer
/// reports of its access does not count.
///
/// Where nothing but a filter or Yama's ptrace scope keeps processes of a user from each other, as in containers,
/// a setting gives it to them.
pub(crate) fn is_for(peer: Credentials, access: &PeerAccess, has_written: bool) -> bool {
    static IS_FOR_ALL: ForkSafe<bool> = ForkSafe::new();
    let is_for_all = || {
        let value = settings::read_variable(PEERS_VARIABLE, all_from_setting);
        value.ok().flatten().unwrap_or(false)
    };
    let is_other = matches!(
        access.denied,
        Some(
            CrossMemoryDenied::OtherUser
                | CrossMemoryDenied::LessPrivileged
                | CrossMemoryDenied::UserNamespace
                | CrossMemoryDenied::NotDumpable
                | CrossMemoryDenied::PidNamespace
                | CrossMemoryDenied::Unknown
        )
    );
    peer.uid == rustix::process::geteuid().as_raw()
        && (has_written || !is_other && *IS_FOR_ALL.get_or_init(is_for_all))
}

/// Reports, once, that a peer does not get the heap of this process.
#[cold]
pub(crate) fn report_refusal(peer: Credentials) {
    static IS_REPORTED: AtomicBool = AtomicBool::new(false);
    if IS_ADOPTED.load(Ordering::Relaxed) && !IS_REPORTED.swap(true, Ordering::Relaxed) {
        tracing::warn!(
            pid = peer.pid,
            "the shared heap is not passed to a peer that cannot write the memory of this \
             process: `memferry doctor --verbose` says why; {PEERS_VARIABLE}=user passes it to \
             all peers of the user"
        );
    }
}
