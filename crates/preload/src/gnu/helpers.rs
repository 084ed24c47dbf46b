//! Threads that help with large copies. They are made by the `clone` system call itself: the C library's
//! way allocates and takes locks, which a call of `memcpy` in a signal handler or in an allocator must
//! not do. They execute nothing but the loops of this library, take no signals, and end when there has
//! been nothing to do for a second, or when the program needs to be without them.

use std::arch::asm;
use std::ptr;
use std::sync::atomic::{AtomicU32, Ordering};

use super::copies::{Pool, claim_chunks};
use super::system;

/// The most helpers of a process.
pub(super) const MAX_HELPERS: usize = 7;

const STACK_BYTES: usize = 64 << 10;
const PAGE: usize = 4096;
/// How long a helper polls for the next copy before it sleeps.
const POLL_TICKS: u64 = 100_000;
/// How long it sleeps before it ends.
const IDLE_SECONDS: i64 = 1;
/// How often, and with which pause, a thread that ends is looked for: for about a second.
const EXIT_CHECKS: usize = 10_000;
const EXIT_PAUSE_NS: i64 = 100_000;

/// Starts the helpers that are missing. Returns whether there is any.
pub(super) fn ensure(pool: &Pool, count: usize) -> bool {
    let mut is_any = false;
    for (slot, running) in pool.running[..count.min(MAX_HELPERS)].iter().enumerate() {
        if running.load(Ordering::Acquire) == 1 {
            is_any = true;
        } else if allowed_cores() > 1 {
            running.store(1, Ordering::Relaxed);
            if start(pool, slot) {
                is_any = true;
            } else {
                running.store(0, Ordering::Relaxed);
            }
        }
    }
    is_any
}

/// Ends all helpers, and returns when the kernel counts them no more. The caller must have the pool.
pub(super) fn end_all(pool: &Pool) {
    pool.is_ending.store(1, Ordering::SeqCst);
    pool.bell.fetch_add(1, Ordering::SeqCst);
    system::wake(&pool.bell, MAX_HELPERS as u32);
    let mut was_any = false;
    for (running, thread) in pool.running.iter().zip(&pool.threads) {
        let thread = thread.swap(0, Ordering::Relaxed);
        let mut checks = 0;
        // A helper that has ended by itself long ago may have left its number to a thread of the program.
        while thread != 0 && checks < EXIT_CHECKS && system::has_thread(thread) {
            system::pause(EXIT_PAUSE_NS);
            checks += usize::from(running.load(Ordering::Relaxed) == 0);
        }
        was_any |= thread != 0;
    }
    if was_any {
        // A thread loses its number a moment before the kernel takes it off the list that it counts,
        // with a lock held that this query takes.
        system::look_for_children();
    }
    pool.is_ending.store(0, Ordering::Relaxed);
}

/// The cores that this thread, and so a helper that it starts, may run on.
fn allowed_cores() -> u32 {
    let mut mask = [0u64; 128];
    let arguments = [0, size_of_val(&mask), mask.as_mut_ptr() as usize, 0, 0, 0];
    // SAFETY: the kernel writes at most as many bytes as the mask has.
    unsafe { system::call(libc::SYS_sched_getaffinity, arguments) };
    mask.iter().map(|word| word.count_ones()).sum()
}

/// Starts a helper on the memory of its slot, which it maps at first.
fn start(pool: &Pool, slot: usize) -> bool {
    let mut area = pool.areas[slot].load(Ordering::Relaxed);
    if area == 0 {
        let Some(mapped) = map(PAGE + STACK_BYTES + 2 * PAGE) else {
            return false;
        };
        area = mapped;
        pool.areas[slot].store(area, Ordering::Relaxed);
    }
    let stack_end = area + PAGE + STACK_BYTES;
    // Nothing that a helper executes uses it; it is only not that of another thread.
    let thread_pointer = stack_end + PAGE;
    // SAFETY: the addresses lie in the mapping. The thread pointer is found at the thread pointer.
    unsafe {
        (thread_pointer as *mut usize).write(thread_pointer);
        ((thread_pointer + 16) as *mut usize).write(thread_pointer);
        clone_helper(stack_end, thread_pointer, pool, slot) > 0
    }
}

/// Maps memory with a guard page in front, which children do not have.
fn map(bytes: usize) -> Option<usize> {
    let access = (libc::PROT_READ | libc::PROT_WRITE) as usize;
    let flags = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE) as usize;
    // SAFETY: a fresh mapping at an address of the kernel's choice.
    unsafe {
        let area = system::call(libc::SYS_mmap, [0, bytes, access, flags, usize::MAX, 0]);
        if area < 0 {
            return None;
        }
        let area = area as usize;
        let none = libc::PROT_NONE as usize;
        system::call(libc::SYS_mprotect, [area, PAGE, none, 0, 0, 0]);
        system::call(libc::SYS_madvise, [area, bytes, libc::MADV_DONTFORK as usize, 0, 0, 0]);
        Some(area)
    }
}

/// # Safety
/// The stack and the thread pointer must be the helper's own, and stay.
unsafe fn clone_helper(stack_end: usize, thread_pointer: usize, pool: &Pool, slot: usize) -> isize {
    let flags = libc::CLONE_VM
        | libc::CLONE_FS
        | libc::CLONE_FILES
        | libc::CLONE_SIGHAND
        | libc::CLONE_THREAD
        | libc::CLONE_SYSVSEM
        | libc::CLONE_SETTLS
        | libc::CLONE_PARENT_SETTID
        | libc::CLONE_CHILD_CLEARTID;
    let result: isize;
    // SAFETY: the new thread starts behind the system call with the registers of this one, on its own
    // stack, and calls a function that does not return. Signals are blocked, and remain so in it. The
    // kernel writes its number, and clears its mark when it no longer uses the stack.
    unsafe {
        asm!(
            "syscall",
            "test rax, rax",
            "jnz 2f",
            "xor ebp, ebp",
            "mov rdi, r12",
            "call {main}",
            "ud2",
            "2:",
            inlateout("rax") libc::SYS_clone as isize => result,
            in("rdi") flags as usize,
            in("rsi") stack_end,
            in("rdx") pool.threads[slot].as_ptr(),
            in("r10") pool.running[slot].as_ptr(),
            in("r8") thread_pointer,
            in("r12") ptr::from_ref(pool),
            lateout("rcx") _,
            lateout("r11") _,
            main = sym helper_main,
        );
    }
    result
}

/// The life of a helper.
unsafe extern "C" fn helper_main(pool: *const Pool) -> ! {
    // SAFETY: the page of the pool stays.
    let pool = unsafe { &*pool };
    loop {
        let heard = pool.bell.load(Ordering::SeqCst);
        if pool.is_ending.load(Ordering::SeqCst) != 0 {
            end();
        }
        claim_chunks(pool);
        if is_rung_soon(&pool.bell, heard) {
            continue;
        }
        pool.sleepers.fetch_add(1, Ordering::SeqCst);
        system::wait(&pool.bell, heard, Some(IDLE_SECONDS));
        pool.sleepers.fetch_sub(1, Ordering::SeqCst);
        if pool.bell.load(Ordering::SeqCst) == heard {
            end();
        }
    }
}

fn is_rung_soon(bell: &AtomicU32, heard: u32) -> bool {
    // SAFETY: every x86-64 has the instruction.
    let ticks = || unsafe { std::arch::x86_64::_rdtsc() };
    let begin = ticks();
    while ticks().wrapping_sub(begin) < POLL_TICKS {
        if bell.load(Ordering::Acquire) != heard {
            return true;
        }
        std::hint::spin_loop();
    }
    false
}

/// Ends this thread. The kernel frees its slot.
fn end() -> ! {
    // SAFETY: the call does not return, and helpers own nothing.
    unsafe {
        asm!("syscall", "ud2", in("rax") libc::SYS_exit, in("rdi") 0, options(noreturn, nostack))
    }
}
