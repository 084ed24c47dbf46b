//! Wrappers that report to ThreadSanitizer the synchronization that it does not see. The standard
//! library is precompiled without instrumentation, so the sanitizer misses the slow paths of its
//! locks, which are not generic. It also ignores fences. `sanitize.rs` compiles this file to an
//! object, and the linker replaces each wrapped function by its `wrapped_*` here; `real_*` is the
//! original.
//!
//! Each wrapper reports an order that really exists. A wrapper can hide a race only if it reports a
//! wider order than the real one; such wrappers are marked "wider".

use std::cell::Cell;
use std::ffi::c_void;
use std::sync::OnceState;

type Order = i32;

/// The memory orders that include an acquire, in the compiler's numbering.
const ACQUIRE_FROM: [Order; 4] = [1, 2, 4, 5];

unsafe extern "C" {
    fn __tsan_acquire(address: *mut c_void);
    fn __tsan_release(address: *mut c_void);
    fn real_fence(order: Order);
}

/// Reports an acquire of an address: everything before its earlier releases happens before the code
/// that follows.
fn acquire(place: *const u8) {
    // SAFETY: the runtime only looks the address up, and does not access the memory there.
    unsafe { __tsan_acquire(place.cast_mut().cast()) };
}

/// Reports a release of an address: everything before it happens before the code after a later
/// acquire of the address.
fn release(place: *const u8) {
    // SAFETY: as for `acquire`.
    unsafe { __tsan_release(place.cast_mut().cast()) };
}

/// Calls `tell` for each 4-byte word of an object whose field order is unspecified. Wider, by the
/// other fields.
fn for_words(place: *const u8, bytes: usize, tell: impl Fn(*const u8)) {
    (0..bytes).step_by(4).for_each(|offset| tell(place.wrapping_add(offset)));
}

// ---- Fences.

/// The number of unordered reads that are remembered per thread, until a fence orders them.
const REMEMBERED: usize = 8;

thread_local! {
    static PLACES: Cell<[usize; REMEMBERED]> = const { Cell::new([0; REMEMBERED]) };
    static NEXT: Cell<usize> = const { Cell::new(0) };
}

fn remember<T>(place: *const T, order: Order) {
    if ACQUIRE_FROM.contains(&order) {
        return;
    }
    let (mut places, next) = (PLACES.get(), NEXT.get());
    places[next % REMEMBERED] = place.addr();
    PLACES.set(places);
    NEXT.set((next + 1) % REMEMBERED);
}

/// An acquire fence acquires every address that the thread read before it. The last owner of an
/// `Arc` synchronizes with the other owners in this way. Wider: releases between the read and the
/// fence count too.
#[unsafe(no_mangle)]
extern "C" fn wrapped_fence(order: Order) {
    if ACQUIRE_FROM.contains(&order) {
        for place in PLACES.replace([0; REMEMBERED]).into_iter().filter(|place| *place != 0) {
            acquire(std::ptr::without_provenance(place));
        }
    }
    // SAFETY: calls the function that this one replaces, with the same argument.
    unsafe { real_fence(order) };
}

/// Wrappers of functions that read with an order which a later fence may strengthen.
macro_rules! reads {
    ($type:ty: $($wrapped:ident $real:ident ($($name:ident: $argument:ty),*)),* $(,)?) => { $(
        unsafe extern "C" {
            fn $real(place: *mut $type, $($name: $argument,)* order: Order) -> $type;
        }

        #[unsafe(no_mangle)]
        unsafe extern "C" fn $wrapped(place: *mut $type, $($name: $argument,)* order: Order) -> $type {
            remember(place, order);
            // SAFETY: calls the function that this one replaces, with the same arguments.
            unsafe { $real(place, $($name,)* order) }
        }
    )* };
}

/// Wrappers of compare-exchange functions, which have an order for success and one for failure.
macro_rules! exchanges {
    ($type:ty: $wrapped:ident $real:ident) => {
        unsafe extern "C" {
            fn $real(
                place: *mut $type,
                old: $type,
                new: $type,
                order: Order,
                failed: Order,
            ) -> $type;
        }

        #[unsafe(no_mangle)]
        unsafe extern "C" fn $wrapped(
            place: *mut $type,
            old: $type,
            new: $type,
            order: Order,
            failed: Order,
        ) -> $type {
            remember(place, if ACQUIRE_FROM.contains(&order) { failed } else { order });
            // SAFETY: calls the function that this one replaces, with the same arguments.
            unsafe { $real(place, old, new, order, failed) }
        }
    };
}

reads! { u8:
    wrapped_load8 real_load8(),
    wrapped_swap8 real_swap8(value: u8),
    wrapped_add8 real_add8(value: u8),
    wrapped_sub8 real_sub8(value: u8),
    wrapped_and8 real_and8(value: u8),
    wrapped_or8 real_or8(value: u8),
}
reads! { u32:
    wrapped_load32 real_load32(),
    wrapped_swap32 real_swap32(value: u32),
    wrapped_add32 real_add32(value: u32),
    wrapped_sub32 real_sub32(value: u32),
    wrapped_and32 real_and32(value: u32),
    wrapped_or32 real_or32(value: u32),
}
reads! { u64:
    wrapped_load64 real_load64(),
    wrapped_swap64 real_swap64(value: u64),
    wrapped_add64 real_add64(value: u64),
    wrapped_sub64 real_sub64(value: u64),
    wrapped_and64 real_and64(value: u64),
    wrapped_or64 real_or64(value: u64),
}
exchanges! { u8: wrapped_exchange8 real_exchange8 }
exchanges! { u32: wrapped_exchange32 real_exchange32 }
exchanges! { u64: wrapped_exchange64 real_exchange64 }

// ---- The slow paths of locks. The fast paths and the unlocking are generic or inlined, so they
// are instrumented.

macro_rules! contended {
    ($($wrapped:ident $real:ident),*) => { $(
        unsafe extern "Rust" {
            fn $real(lock: *const u8);
        }

        /// Locking after a wait acquires the lock: everything before the unlock happens before it.
        /// Wider: a `RwLock` has two words.
        #[unsafe(no_mangle)]
        unsafe fn $wrapped(lock: *const u8) {
            // SAFETY: calls the function that this one replaces, with the same argument.
            unsafe { $real(lock) };
            for_words(lock, LOCK_BYTES, acquire);
        }
    )* };
}

/// The size of a `RwLock` in bytes. It also covers the smaller `Mutex` and the flag after it.
const LOCK_BYTES: usize = 8;

contended! { wrapped_mutex_lock real_mutex_lock, wrapped_read_lock real_read_lock, wrapped_write_lock real_write_lock }

unsafe extern "Rust" {
    fn real_wait(condvar: *const u8, mutex: *const u8);
    fn real_wait_timeout(
        condvar: *const u8,
        mutex: *const u8,
        timeout: std::time::Duration,
    ) -> bool;
    fn real_once(once: *const u8, ignores_poison: bool, f: &mut dyn FnMut(&OnceState));
    fn real_scope_end(scope: *const u8, is_panicking: bool);
    fn real_barrier(barrier: *const u8) -> bool;
}

/// Waiting unlocks the mutex and locks it again.
#[unsafe(no_mangle)]
unsafe fn wrapped_wait(condvar: *const u8, mutex: *const u8) {
    release(mutex);
    // SAFETY: calls the function that this one replaces, with the same arguments.
    unsafe { real_wait(condvar, mutex) };
    acquire(mutex);
}

#[unsafe(no_mangle)]
unsafe fn wrapped_wait_timeout(
    condvar: *const u8,
    mutex: *const u8,
    timeout: std::time::Duration,
) -> bool {
    release(mutex);
    // SAFETY: calls the function that this one replaces, with the same arguments.
    let is_notified = unsafe { real_wait_timeout(condvar, mutex, timeout) };
    acquire(mutex);
    is_notified
}

/// The closure of a `Once` happens before everything after the call.
#[unsafe(no_mangle)]
unsafe fn wrapped_once(once: *const u8, ignores_poison: bool, f: &mut dyn FnMut(&OnceState)) {
    let mut told = |state: &OnceState| {
        f(state);
        release(once);
    };
    // SAFETY: calls the function that this one replaces, with the same arguments.
    unsafe { real_once(once, ignores_poison, &mut told) };
    acquire(once);
}

/// The end of a thread happens before the end of its scope, which is generic and so acquires
/// visibly. Wider, by the other fields of a scope.
#[unsafe(no_mangle)]
unsafe fn wrapped_scope_end(scope: *const u8, is_panicking: bool) {
    for_words(scope, 24, release);
    // SAFETY: calls the function that this one replaces, with the same arguments.
    unsafe { real_scope_end(scope, is_panicking) };
}

/// Everything before a barrier happens before everything after it, in all threads. Wider: a barrier
/// orders only the threads of one round.
#[unsafe(no_mangle)]
unsafe fn wrapped_barrier(barrier: *const u8) -> bool {
    release(barrier);
    // SAFETY: calls the function that this one replaces, with the same argument.
    let is_leader = unsafe { real_barrier(barrier) };
    acquire(barrier);
    is_leader
}
