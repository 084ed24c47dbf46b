//! The calls that start many copies or fills at once. As in `lib.rs`, comments here are those of the
//! header.

use std::ffi::{c_int, c_void};

use memferry::{BatchItem, Options};

use crate::code::{ADMA_EFAULT, CallError};
use crate::global;
use crate::guard::guarded;

/// A copy of a batch: `len` bytes from `src` to `dst`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct AdmaCopyItem {
    /// Address of the first byte to read.
    pub src: *const c_void,
    /// Address of the first byte to write.
    pub dst: *mut c_void,
    /// Length in bytes.
    pub len: usize,
}

/// A fill of a batch: `len` bytes at `dst` become `value`, converted to `unsigned char`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct AdmaFillItem {
    /// Address of the first byte to write.
    pub dst: *mut c_void,
    /// Length in bytes.
    pub len: usize,
    /// The byte to write.
    pub value: c_int,
}

/// Starts `count` copies and returns at once: as `adma_icopy` for each of them, but they are
/// submitted together, which costs a fraction of that. The copies are not ordered: none may read or
/// write what another one writes. `src` and `dst` of one copy may overlap. All memory is ordinary
/// memory, not memory of a GPU.
///
/// If `cookies` is null, returns one cookie (0 or above), of all copies: it is complete when all of
/// them are. Otherwise writes the cookie of each copy to `cookies` and returns 0. Cookies are for
/// `adma_check_copy` and `adma_wait_copy`, as that of `adma_icopy`. On an error, returns a negative
/// code, and then nothing is in flight: `ADMA_EFAULT` if `copies` is null and `count` is not 0, or
/// an address is null and its length is not 0; `ADMA_EINVAL` if `src` and `dst` of a copy overlap, with one
/// cookie for more than 1 GiB; `ADMA_EOPNOTSUPP` if any of the memory is that of a GPU.
///
/// # Safety
/// `copies` must be valid for reading and `cookies`, if not null, for writing of `count` entries
/// until this returns. The memory of each copy is as for `adma_icopy`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn adma_icopy_many(
    copies: *const AdmaCopyItem,
    count: usize,
    cookies: *mut i64,
) -> i64 {
    guarded("adma_icopy_many", || {
        // SAFETY: the caller guarantees the list until this returns.
        let copies = unsafe { list(copies, count, "copies") }?;
        let item =
            |copy: &AdmaCopyItem| BatchItem::copy(copy.src.cast(), copy.dst.cast(), copy.len);
        let addresses = copies.iter().flat_map(|copy| [copy.src, copy.dst.cast_const()]);
        // SAFETY: the caller guarantees the memory until the copies are complete.
        unsafe { start(copies.iter().map(item).collect(), addresses, cookies) }
    })
}

/// Starts `count` fills and returns at once, as `adma_icopy_many` does with copies.
///
/// Returns a cookie, 0 or a negative code, as `adma_icopy_many`.
///
/// # Safety
/// As for `adma_icopy_many`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn adma_ifill_many(
    fills: *const AdmaFillItem,
    count: usize,
    cookies: *mut i64,
) -> i64 {
    guarded("adma_ifill_many", || {
        // SAFETY: the caller guarantees the list until this returns.
        let fills = unsafe { list(fills, count, "fills") }?;
        let item =
            |fill: &AdmaFillItem| BatchItem::fill(fill.dst.cast(), fill.value as u8, fill.len);
        let addresses = fills.iter().map(|fill| fill.dst.cast_const());
        // SAFETY: the caller guarantees the memory until the fills are complete.
        unsafe { start(fills.iter().map(item).collect(), addresses, cookies) }
    })
}

/// # Safety
/// As for `adma_icopy_many`.
unsafe fn start(
    items: Vec<BatchItem>,
    addresses: impl Iterator<Item = *const c_void>,
    cookies: *mut i64,
) -> Result<i64, CallError> {
    let started = global::with(|open| {
        open.refuse_device_memory(addresses.map(<*const c_void>::cast))?;
        let ferry = open.ferry();
        if cookies.is_null() {
            // SAFETY: the caller guarantees the memory.
            let cookie = unsafe { ferry.start_many_cookie_raw(&items, Options::new()) }?;
            return Ok::<_, CallError>(cookie.to_raw());
        }
        // SAFETY: the caller guarantees the memory.
        let started = unsafe { ferry.start_each_cookie_raw(&items) }?;
        for (index, cookie) in started.into_iter().enumerate() {
            // SAFETY: the caller guarantees as many entries as items.
            unsafe { cookies.add(index).write_unaligned(cookie.to_raw()) };
        }
        Ok(0)
    });
    started?
}

/// # Safety
/// It must be valid for reading of `count` entries, unless the length is impossible.
pub(crate) unsafe fn list<'a, T>(
    entries: *const T,
    count: usize,
    name: &str,
) -> Result<&'a [T], CallError> {
    if count == 0 {
        return Ok(&[]);
    }
    if entries.is_null() {
        let text = format!("the list of {count} {name} is a null pointer");
        return Err(CallError::new(ADMA_EFAULT, text));
    }
    crate::memory::check(entries.cast(), count.saturating_mul(size_of::<T>()))?;
    // SAFETY: neither null nor too long; the caller guarantees the rest.
    Ok(unsafe { std::slice::from_raw_parts(entries, count) })
}
