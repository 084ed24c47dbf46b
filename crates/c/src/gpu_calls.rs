//! The calls for a GPU. As in `lib.rs`, comments here are those of the header.

use std::ffi::{c_int, c_void};

use crate::code::{ADMA_EFAULT, ADMA_EINVAL, CallError};
use crate::guard::guarded;
use crate::open::{not_of_the_gpu, not_registered};
use crate::{global, memory};

/// Opens the library with a GPU as an engine; `ordinal` is 0 for the first one. Needs only the
/// GPU's driver, which is loaded now. Takes about half a second.
///
/// From now on every copy, fill and compare also takes pointers to memory of the GPU, from
/// `adma_device_alloc` or from CUDA itself, on either side, and detects the kind of memory itself.
/// The same happens without this call if `MEMFERRY_GPU` in the environment is `auto` or the number
/// of a GPU. Messages and windows take ordinary memory only.
///
/// Other libraries of the program may use CUDA too: only memory passed to `adma_register` is
/// registered with it, unless `MEMFERRY_CUDA_SOLE_USER` in the environment is 1.
///
/// Must be called before any call that opens the library: a copy, or `adma_init`. After an
/// `adma_fini` the library opens with the same GPU again, unless this is called first with another.
/// A forked child starts without it, and cannot use a GPU that its parent used.
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

/// Allocates `bytes` of memory of the GPU in use, and sets `*pointer` to it. Only the GPU, and the
/// copies, fills and compares of this library, can access it. Its contents are undefined. For 0
/// bytes the pointer is null.
///
/// Free it with `adma_device_free`. `adma_fini` frees the rest.
///
/// Returns 0; or a negative code, and then `*pointer` is unchanged: `ADMA_ENODEV` if no GPU is in
/// use, `ADMA_ENOMEM` if it has no memory left.
///
/// # Safety
/// `pointer` must be null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn adma_device_alloc(bytes: usize, pointer: *mut *mut c_void) -> c_int {
    guarded("adma_device_alloc", || {
        // SAFETY: the caller guarantees that it is null or valid.
        let Some(pointer) = (unsafe { pointer.as_mut() }) else {
            return Err(CallError::new(ADMA_EFAULT, "the place for the address is a null pointer"));
        };
        *pointer = global::with(|open| open.allocate(bytes))??.cast();
        Ok(0)
    })
}

/// Frees memory of `adma_device_alloc`. A null pointer is permitted.
///
/// Returns 0, or a negative code: `ADMA_EINVAL` if it is not such memory, or was freed before.
///
/// # Safety
/// No copy in flight may use it.
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

/// Registers `len` bytes of ordinary memory with the GPU in use, until `adma_unregister`: copies
/// between them and the GPU are as fast as possible from the first one on. For memory that is
/// copied repeatedly.
///
/// Exactly these bytes are registered with CUDA, as one range. Other users of CUDA can copy them,
/// or a part of them; CUDA rejects a copy of theirs that crosses the boundary. So register what is
/// copied together as one range, best on pages of its own. The same range may be registered several
/// times, ranges may share a page, and one may contain another; any other overlap is refused.
/// Memory that CUDA has pinned already is used as it is.
///
/// Returns 0; or a negative code, and then copies work as before: `ADMA_ENODEV` if no GPU is in
/// use, `ADMA_ENXIO` if the memory is not mapped, `ADMA_EOPNOTSUPP` if a part of it is registered,
/// or if it is of a kind that the GPU cannot reach, such as some mapped files, `ADMA_ENOMEM` if
/// there is not enough memory.
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

/// Undoes one `adma_register` of a range that starts at `addr`. Copies in flight are not affected.
///
/// Returns 0, or a negative code: `ADMA_EINVAL` if no registered range starts there.
#[unsafe(no_mangle)]
pub extern "C" fn adma_unregister(addr: *const c_void) -> c_int {
    guarded("adma_unregister", || {
        let undone = global::with_open(|open| open.unregister(addr.cast()));
        undone.unwrap_or_else(|| Err(not_registered(addr.cast()))).map(|()| 0)
    })
}
