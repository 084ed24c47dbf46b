//! The functions of the `malloc` family. Small allocations, and everything while there is no shared heap,
//! are the business of the allocator behind this library: the C library's, or another that the program is
//! linked with. An address tells which of the two has allocated it.

use std::arch::naked_asm;
use std::ffi::{CStr, c_int};
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use super::{BYTES, EXTENTS, LIMIT, allocate, free as free_offset, offset_of, wrong_pointer};
use crate::gnu::{lookup, real};

/// A function of the allocator behind this library. Before it is found, the first call finds it.
macro_rules! behind {
    ($($name:ident, $first:ident, $symbol:literal;)*) => {
        $(
            static $name: AtomicPtr<()> = AtomicPtr::new($first as *mut ());

            #[unsafe(naked)]
            unsafe extern "C" fn $first() {
                naked_asm!(
                    "push rdi",
                    "push rsi",
                    "push rdx",
                    "call {find}",
                    "pop rdx",
                    "pop rsi",
                    "pop rdi",
                    "jmp qword ptr [rip + {function}]",
                    find = sym find_allocator,
                    function = sym $name,
                )
            }
        )*

        /// Finds the allocator behind this library. A program may allocate before the initialiser runs.
        pub(in crate::gnu) extern "C" fn find_allocator() {
            $(find(&$name, $first as *mut (), $symbol);)*
        }
    };
}

behind! {
    MALLOC, first_malloc, c"malloc";
    CALLOC, first_calloc, c"calloc";
    REALLOC, first_realloc, c"realloc";
    FREE, first_free, c"free";
    MEMALIGN, first_memalign, c"memalign";
    ALIGNED_ALLOC, first_aligned_alloc, c"aligned_alloc";
    POSIX_MEMALIGN, first_posix_memalign, c"posix_memalign";
    USABLE_SIZE, first_usable_size, c"malloc_usable_size";
}

fn find(function: &AtomicPtr<()>, first: *mut (), name: &CStr) {
    if function.load(Ordering::Relaxed) != first {
        return;
    }
    // SAFETY: the first allocation of a program comes before it loads further objects.
    let found = unsafe { lookup::next_definition(name) };
    // An allocator may lack the rarer ones, and none lacks the others.
    let found = found.map_or(missing as *mut (), |found| found as *mut ());
    function.store(found, Ordering::Relaxed);
}

/// In place of a function that the allocator does not have: fails.
extern "C" fn missing() -> usize {
    0
}

/// Whether programs call another `malloc` than that of this library: one in the program itself.
pub(in crate::gnu) fn has_own_allocator() -> bool {
    // SAFETY: the initialiser runs before the program loads further objects.
    unsafe { !lookup::is_first_here(c"malloc") }
}

type Malloc = unsafe extern "C" fn(usize) -> *mut u8;
type Calloc = unsafe extern "C" fn(usize, usize) -> *mut u8;
type Realloc = unsafe extern "C" fn(*mut u8, usize) -> *mut u8;
type Free = unsafe extern "C" fn(*mut u8);
type PosixMemalign = unsafe extern "C" fn(*mut *mut u8, usize, usize) -> c_int;

/// Calls a function behind this library.
macro_rules! call {
    ($function:ident as $type:ty, $($argument:expr),*) => {
        // SAFETY: the function has the signature of its name in the C library.
        unsafe {
            std::mem::transmute::<*mut (), $type>($function.load(Ordering::Relaxed))($($argument),*)
        }
    };
}

/// Whether an allocation of this size belongs into the heap.
fn is_ours(bytes: usize) -> bool {
    bytes >= LIMIT.load(Ordering::Relaxed) && bytes <= BYTES.load(Ordering::Relaxed)
}

/// `malloc` of at least the limit.
extern "C" fn large_malloc(bytes: usize) -> *mut u8 {
    let found = if is_ours(bytes) { allocate(bytes, 16, false) } else { ptr::null_mut() };
    if found.is_null() { call!(MALLOC as Malloc, bytes) } else { found }
}

/// `calloc` of at least the limit.
extern "C" fn large_calloc(count: usize, each: usize) -> *mut u8 {
    let bytes = count.checked_mul(each).filter(|bytes| is_ours(*bytes));
    let found = bytes.map_or(ptr::null_mut(), |bytes| allocate(bytes, 16, true));
    if found.is_null() { call!(CALLOC as Calloc, count, each) } else { found }
}

/// `realloc` of an allocation of the heap, or to at least the limit.
extern "C" fn large_realloc(address: *mut u8, bytes: usize) -> *mut u8 {
    match offset_of(address) {
        Some(offset) => reallocate(address, offset, bytes),
        None if address.is_null() && is_ours(bytes) => large_malloc(bytes),
        None if is_ours(bytes) => move_in(address, bytes),
        None => call!(REALLOC as Realloc, address, bytes),
    }
}

/// Changes the size of an allocation of the heap.
fn reallocate(address: *mut u8, offset: usize, bytes: usize) -> *mut u8 {
    if bytes == 0 {
        free_offset(offset);
        return ptr::null_mut();
    }
    let mut extents = EXTENTS.lock();
    let Some(before) = extents.usable(offset) else { wrong_pointer() };
    if is_ours(bytes) && extents.resize(offset, bytes) {
        return address;
    }
    drop(extents);
    // A block that grows once grows again: space behind it spares the next copy.
    let room = if bytes > before { bytes.saturating_mul(2) } else { bytes };
    let mut new = if is_ours(room) { allocate(room, 16, false) } else { ptr::null_mut() };
    if let Some(offset) = offset_of(new).filter(|_| !new.is_null()) {
        EXTENTS.lock().resize(offset, bytes);
    } else {
        new = large_malloc(bytes);
    }
    if !new.is_null() {
        // SAFETY: both have as many bytes, and are different allocations.
        unsafe { real::MEMMOVE.real()(new as usize, address as usize, before.min(bytes)) };
        free_offset(offset);
    }
    new
}

/// Moves a small allocation of the allocator behind into the heap, as it grows.
fn move_in(address: *mut u8, bytes: usize) -> *mut u8 {
    let before = call!(USABLE_SIZE as unsafe extern "C" fn(*mut u8) -> usize, address);
    let new = if before == 0 { ptr::null_mut() } else { allocate(bytes, 16, false) };
    if new.is_null() {
        return call!(REALLOC as Realloc, address, bytes);
    }
    // SAFETY: the allocation has as many usable bytes, and the new one at least the smaller number.
    unsafe { real::MEMMOVE.real()(new as usize, address as usize, before.min(bytes)) };
    call!(FREE as Free, address);
    new
}

/// `free` of an allocation of the heap.
extern "C" fn heap_free(address: *mut u8) {
    if let Some(offset) = offset_of(address) {
        free_offset(offset);
    }
}

/// Allocates in the heap, if the size is one for it. What is no alignment is left to the allocator behind.
fn allocate_aligned(alignment: usize, bytes: usize) -> *mut u8 {
    if is_ours(bytes) && alignment.is_power_of_two() {
        allocate(bytes, alignment, false)
    } else {
        ptr::null_mut()
    }
}

/// `memalign` of at least the limit.
extern "C" fn large_memalign(alignment: usize, bytes: usize) -> *mut u8 {
    let found = allocate_aligned(alignment, bytes);
    if found.is_null() { call!(MEMALIGN as Calloc, alignment, bytes) } else { found }
}

/// `aligned_alloc` of at least the limit.
extern "C" fn large_aligned_alloc(alignment: usize, bytes: usize) -> *mut u8 {
    let found = allocate_aligned(alignment, bytes);
    if found.is_null() { call!(ALIGNED_ALLOC as Calloc, alignment, bytes) } else { found }
}

/// `posix_memalign` of at least the limit.
extern "C" fn large_posix_memalign(place: *mut *mut u8, alignment: usize, bytes: usize) -> c_int {
    let is_valid = alignment.is_multiple_of(size_of::<usize>());
    let found = if is_valid { allocate_aligned(alignment, bytes) } else { ptr::null_mut() };
    if found.is_null() {
        return call!(POSIX_MEMALIGN as PosixMemalign, place, alignment, bytes);
    }
    // SAFETY: the caller of the function passes a place for the address.
    unsafe { place.write(found) };
    0
}

/// `malloc_usable_size` of an allocation of the heap.
extern "C" fn heap_usable_size(address: *const u8) -> usize {
    offset_of(address).and_then(|offset| EXTENTS.lock().usable(offset)).unwrap_or(0)
}

#[cfg(not(test))]
mod exports {
    use super::super::BASE;
    use super::*;

    /// A function whose size is in a register: large ones are for the heap.
    macro_rules! by_size {
        ($($name:ident, $size:literal, $large:ident, $function:ident;)*) => {$(
            /// As in the C library.
            #[unsafe(no_mangle)]
            #[unsafe(naked)]
            pub(super) unsafe extern "C" fn $name() {
                naked_asm!(
                    concat!("cmp ", $size, ", qword ptr [rip + {limit}]"),
                    "jae 2f",
                    "jmp qword ptr [rip + {function}]",
                    "2:",
                    "jmp {large}",
                    limit = sym LIMIT,
                    function = sym $function,
                    large = sym $large,
                )
            }
        )*};
    }

    by_size! {
        malloc, "rdi", large_malloc, MALLOC;
        memalign, "rsi", large_memalign, MEMALIGN;
        aligned_alloc, "rsi", large_aligned_alloc, ALIGNED_ALLOC;
        posix_memalign, "rdx", large_posix_memalign, POSIX_MEMALIGN;
    }

    /// A function of an address: those in the heap are for the heap.
    macro_rules! by_address {
        ($($name:ident, $ours:ident, $function:ident;)*) => {$(
            /// As in the C library.
            #[unsafe(no_mangle)]
            #[unsafe(naked)]
            pub(super) unsafe extern "C" fn $name() {
                naked_asm!(
                    "mov rax, rdi",
                    "sub rax, qword ptr [rip + {base}]",
                    "cmp rax, qword ptr [rip + {bytes}]",
                    "jb 2f",
                    "jmp qword ptr [rip + {function}]",
                    "2:",
                    "jmp {ours}",
                    base = sym BASE,
                    bytes = sym BYTES,
                    function = sym $function,
                    ours = sym $ours,
                )
            }
        )*};
    }

    by_address! {
        free, heap_free, FREE;
        malloc_usable_size, heap_usable_size, USABLE_SIZE;
    }

    /// As in the C library.
    #[unsafe(no_mangle)]
    #[unsafe(naked)]
    unsafe extern "C" fn realloc() {
        naked_asm!(
            "cmp rsi, qword ptr [rip + {limit}]",
            "jae 2f",
            "mov rax, rdi",
            "sub rax, qword ptr [rip + {base}]",
            "cmp rax, qword ptr [rip + {bytes}]",
            "jb 2f",
            "jmp qword ptr [rip + {function}]",
            "2:",
            "jmp {large}",
            limit = sym LIMIT,
            base = sym BASE,
            bytes = sym BYTES,
            function = sym REALLOC,
            large = sym large_realloc,
        )
    }

    /// As in the C library. A product that overflows is for the other function, which fails.
    #[unsafe(no_mangle)]
    #[unsafe(naked)]
    unsafe extern "C" fn calloc() {
        naked_asm!(
            "mov rax, rdi",
            "mul rsi",
            "jo 2f",
            "cmp rax, qword ptr [rip + {limit}]",
            "jae 2f",
            "jmp qword ptr [rip + {function}]",
            "2:",
            "jmp {large}",
            limit = sym LIMIT,
            function = sym CALLOC,
            large = sym large_calloc,
        )
    }
}
