//! The heap of a program that was started by `memferry run --shared-heap`: the preloaded library has put
//! large allocations into one memfd, and tells where it is.

use std::ffi::c_int;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::Once;

use memferry_sys::cross_memory::CrossMemoryDenied;
use memferry_sys::fork::OwnerProcess;
use memferry_sys::peer_process::Credentials;
use memferry_sys::shared_memory::{Mapping, SealedMemory};

use super::{SharedAllocation, insert, next_id};
use crate::connect::access_probe::PeerAccess;

/// The function of the preloaded library: writes address and length, and returns the memfd or -1.
type SharedHeap = unsafe extern "C" fn(*mut usize, *mut usize) -> c_int;

/// Makes the heap of this process a region, if there is one.
pub(crate) fn adopt() {
    static ADOPTED: Once = Once::new();
    ADOPTED.call_once(|| {
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
    Ok(())
}

/// Returns whether a peer may have the heap. It contains more than what is sent, so only a process gets it
/// that the kernel would let read and write all memory of this one, or forbids that for reasons that have
/// nothing to do with its user.
pub(crate) fn is_for(peer: Credentials, access: &PeerAccess) -> bool {
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
    !is_other && peer.uid == rustix::process::geteuid().as_raw()
}
