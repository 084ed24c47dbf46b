//! The calls for a GPU. As in `lib.rs`, comments here are those of the header.

use std::ffi::{c_int, c_void};

use crate::code::{ADMA_EFAULT, ADMA_EINVAL, CallError};
use crate::guard::guarded;
use crate::open::{not_of_the_gpu, not_registered};
use crate::{global, memory};

/// Opens the library with a GPU that copies take part in; `ordinal` is 0 for the first one. Nothing but
/// its driver is needed, which is looked for now. Takes about half a second.
///
/// From now on every copy, fill and compare also takes pointers to memory of the GPU, from
/// `adma_device_alloc` or from CUDA itself, on either side, and finds out by itself which memory is
/// where. The same happens without this call if `MEMFERRY_GPU` in the environment is `auto` or the
/// number of a GPU. Messages and windows take ordinary memory only.
///
/// Others in the program may use CUDA too: no memory is registered with it but what `adma_register` is
/// given, unless `MEMFERRY_CUDA_SOLE_USER` in the environment is 1.
///
/// Must come before all calls that open the library: a copy, or `adma_init`. After an `adma_fini` the
/// library opens with the same GPU again, unless this is called first with another. A forked child
/// begins without it, and cannot use a GPU that its parent used.
///
/// Returns 0, also if the library is open with this GPU already; or a negative code:
/// `ADMA_EALREADY` if it is open without it, `ADMA_ENODEV` if there is no such GPU or it cannot be
/// used, and then the library stays closed and can be used without one.
#[unsafe(no_mangle)]
pub extern "C" fn adma_use_gpu(ordinal: c_int) -> c_int {
    guarded("adma_use_gpu", || {
        let Ok(ordinal) = usize::try_from(ordinal) else {
            let text = format!("there is no GPU {ordinal}: they are counted from 0");
            return Err(CallError::new(ADMA_EINVAL, text));
        };
        global::use_gpu(ordinal).map(|()| 0)
    })
}

/// Takes `bytes` of memory of the GPU in use, and sets `*pointer` to it. Only the GPU can use it, and
/// the copies, fills and compares of this library. Its contents are not known. For 0 bytes the pointer
/// is null.
///
/// Give it back with `adma_device_free`. What is left is given back by `adma_fini`.
///
/// Returns 0; or a negative code, and then `*pointer` is left alone: `ADMA_ENODEV` if no GPU is in use,
/// `ADMA_ENOMEM` if it has no memory left.
///
/// # Safety
/// `pointer` must be null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn adma_device_alloc(bytes: usize, pointer: *mut *mut c_void) -> c_int {
    guarded("adma_device_alloc", || {
        // SAFETY: the caller vouches that it is null or valid.
        let Some(pointer) = (unsafe { pointer.as_mut() }) else {
            return Err(CallError::new(ADMA_EFAULT, "the place for the address is a null pointer"));
        };
        *pointer = global::with(|open| open.allocate(bytes))??.cast();
        Ok(0)
    })
}

/// Gives back memory that `adma_device_alloc` took. A null pointer is fine.
///
/// Returns 0, or a negative code: `ADMA_EINVAL` if it is not such memory, or was given back before.
///
/// # Safety
/// No copy may use it any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn adma_device_free(pointer: *mut c_void) -> c_int {
    guarded("adma_device_free", || {
        if pointer.is_null() {
            return Ok(0);
        }
        let address = pointer.cast_const().cast();
        let freed = global::with_open(|open| open.free(address));
        freed.unwrap_or_else(|| Err(not_of_the_gpu(address))).map(|()| 0)
    })
}

/// Registers `len` bytes of ordinary memory with the GPU in use, until `adma_unregister`: copies between
/// them and the GPU are as quick as they can be from the first one on. For memory that is copied again
/// and again.
///
/// CUDA is given exactly these bytes, in one piece. Others who use CUDA can copy them, or a part of them;
/// a copy of theirs that reaches over the edge is refused by CUDA. So register what is copied together as
/// one range, best on pages of its own. The same range may be registered several times, ranges may share
/// a page, and one may lie inside another; a range that overlaps another otherwise is refused. Memory that
/// CUDA has pinned already is used as it is.
///
/// Returns 0; or a negative code, and then copies work as they did: `ADMA_ENODEV` if no GPU is in use,
/// `ADMA_ENXIO` if the memory is not mapped, `ADMA_EOPNOTSUPP` if a part of it is registered, or if it is
/// of a kind that the GPU cannot reach, such as some mapped files, `ADMA_ENOMEM` if there is not enough
/// memory.
///
/// # Safety
/// The memory must stay mapped until it is unregistered, by `adma_unregister` as often or by `adma_fini`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn adma_register(addr: *const c_void, len: usize) -> c_int {
    guarded("adma_register", || {
        memory::check(addr.cast(), len)?;
        global::with(|open| open.register(addr.cast(), len))??;
        Ok(0)
    })
}

/// Undoes one `adma_register` that began at `addr`. Copies under way are not disturbed.
///
/// Returns 0, or a negative code: `ADMA_EINVAL` if nothing that begins there is registered.
#[unsafe(no_mangle)]
pub extern "C" fn adma_unregister(addr: *const c_void) -> c_int {
    guarded("adma_unregister", || {
        let undone = global::with_open(|open| open.unregister(addr.cast()));
        undone.unwrap_or_else(|| Err(not_registered(addr.cast()))).map(|()| 0)
    })
}
