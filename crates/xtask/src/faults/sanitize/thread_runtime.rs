//! What ThreadSanitizer does not see by itself, told to it. The standard library comes compiled, without its
//! instructions: the slow paths of its locks, which are no generics, order threads behind its back. And fences
//! order nothing for it. `sanitize.rs` compiles this file to an object and has the linker put each `wrapped_*` in
//! the place of the function that it is named after, which is `real_*` here.
//!
//! Each function tells of an order that is really there, so no race is hidden but in one way: where an order is
//! told in a wider form than the one that is there. These are marked "wider".

use std::cell::Cell;
use std::ffi::c_void;
use std::sync::OnceState;

type Order = i32;

/// The numbers of memory orders, as compilers hand them over.
const ACQUIRE_FROM: [Order; 4] = [1, 2, 4, 5];

unsafe extern "C" {
    fn __tsan_acquire(address: *mut c_void);
    fn __tsan_release(address: *mut c_void);
    fn real_fence(order: Order);
}

/// Says that everything before the releases of a place came before what follows.
fn acquire(place: *const u8) {
    // SAFETY: the runtime looks the place up, and touches nothing at it.
    unsafe { __tsan_acquire(place.cast_mut().cast()) };
}

/// Says that everything until now comes before what follows an acquire of the place.
fn release(place: *const u8) {
    // SAFETY: as for `acquire`.
    unsafe { __tsan_release(place.cast_mut().cast()) };
}

/// The same for each word of something whose fields have no promised order. Wider, by the other fields.
fn for_words(place: *const u8, bytes: usize, tell: impl Fn(*const u8)) {
    (0..bytes).step_by(4).for_each(|offset| tell(place.wrapping_add(offset)));
}

// ---- Fences.

/// As many places as a thread may have read without an order before a fence orders the reads.
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

/// An acquire fence is an acquire of what was read before it: that is how the last owner of an `Arc` learns what
/// the others did. Wider: releases between the read and the fence count too.
#[unsafe(no_mangle)]
extern "C" fn wrapped_fence(order: Order) {
    if ACQUIRE_FROM.contains(&order) {
        for place in PLACES.replace([0; REMEMBERED]).into_iter().filter(|place| *place != 0) {
            acquire(std::ptr::without_provenance(place));
        }
    }
    // SAFETY: the function that this one stands for, with its own argument.
    unsafe { real_fence(order) };
}

/// Functions that read with an order that a fence may strengthen later.
macro_rules! reads {
    ($type:ty: $($wrapped:ident $real:ident ($($name:ident: $argument:ty),*)),* $(,)?) => { $(
        unsafe extern "C" {
            fn $real(place: *mut $type, $($name: $argument,)* order: Order) -> $type;
        }

        #[unsafe(no_mangle)]
        unsafe extern "C" fn $wrapped(place: *mut $type, $($name: $argument,)* order: Order) -> $type {
            remember(place, order);
            // SAFETY: the function that this one stands for, with its own arguments.
            unsafe { $real(place, $($name,)* order) }
        }
    )* };
}

/// The same for exchanges that may fail, with an order for each case.
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
            // SAFETY: the function that this one stands for, with its own arguments.
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

// ---- The slow paths of locks. Their quick paths and their unlocking are generics or inlined: these are seen.

macro_rules! contended {
    ($($wrapped:ident $real:ident),*) => { $(
        unsafe extern "Rust" {
            fn $real(lock: *const u8);
        }

        /// A lock that was waited for: everything before it was unlocked came before. Wider: a `RwLock` has two words.
        #[unsafe(no_mangle)]
        unsafe fn $wrapped(lock: *const u8) {
            // SAFETY: the function that this one stands for, with its own argument.
            unsafe { $real(lock) };
            for_words(lock, LOCK_BYTES, acquire);
        }
    )* };
}

/// The words of a `RwLock`, and of the smaller `Mutex` together with the flag behind it.
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

/// Waiting unlocks the mutex, and locks it again.
#[unsafe(no_mangle)]
unsafe fn wrapped_wait(condvar: *const u8, mutex: *const u8) {
    release(mutex);
    // SAFETY: the function that this one stands for, with its own arguments.
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
    // SAFETY: the function that this one stands for, with its own arguments.
    let is_notified = unsafe { real_wait_timeout(condvar, mutex, timeout) };
    acquire(mutex);
    is_notified
}

/// What is done once comes before everything behind it.
#[unsafe(no_mangle)]
unsafe fn wrapped_once(once: *const u8, ignores_poison: bool, f: &mut dyn FnMut(&OnceState)) {
    let mut told = |state: &OnceState| {
        f(state);
        release(once);
    };
    // SAFETY: the function that this one stands for, with its own arguments.
    unsafe { real_once(once, ignores_poison, &mut told) };
    acquire(once);
}

/// The end of a thread comes before the end of its scope, which is a generic and acquires. Wider, by the other
/// fields of a scope.
#[unsafe(no_mangle)]
unsafe fn wrapped_scope_end(scope: *const u8, is_panicking: bool) {
    for_words(scope, 24, release);
    // SAFETY: the function that this one stands for, with its own arguments.
    unsafe { real_scope_end(scope, is_panicking) };
}

/// What happens before any thread waits at a barrier comes before all that follows in each of them. Wider: a
/// barrier orders only threads of one round.
#[unsafe(no_mangle)]
unsafe fn wrapped_barrier(barrier: *const u8) -> bool {
    release(barrier);
    // SAFETY: the function that this one stands for, with its own argument.
    let is_leader = unsafe { real_barrier(barrier) };
    acquire(barrier);
    is_leader
}
