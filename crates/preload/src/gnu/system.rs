//! System calls without the C library: its wrappers write `errno`, which the caller of `memcpy` may
//! be about to read.

use std::arch::asm;
use std::ffi::c_int;
use std::sync::atomic::AtomicU32;

/// Makes a system call. Returns its result, or a negative error number.
///
/// # Safety
/// As for the system call.
pub(super) unsafe fn call(number: i64, arguments: [usize; 6]) -> isize {
    let result: isize;
    let [a, b, c, d, e, f] = arguments;
    // SAFETY: the kernel changes rax, rcx and r11 alone; the caller guarantees the rest.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") number as isize => result,
            in("rdi") a, in("rsi") b, in("rdx") c, in("r10") d, in("r8") e, in("r9") f,
            lateout("rcx") _, lateout("r11") _,
            options(nostack)
        );
    }
    result
}

/// The same with the result of the C library's wrappers: -1 and `errno`.
///
/// # Safety
/// As for the system call.
pub(super) unsafe fn call_as_c(number: i64, arguments: [usize; 6]) -> c_int {
    // SAFETY: the caller guarantees the call; each thread has its own `errno`.
    unsafe {
        let result = call(number, arguments);
        if result < 0 {
            *libc::__errno_location() = -result as c_int;
            return -1;
        }
        result as c_int
    }
}

/// Closes a descriptor. Unlike the C library's function it is no place where a thread is cancelled.
pub(super) fn close(descriptor: c_int) {
    // SAFETY: the callers own the descriptor.
    unsafe { call(libc::SYS_close, [descriptor as usize, 0, 0, 0, 0, 0]) };
}

/// The number of this process, as the kernel has it now.
pub(super) fn process_id() -> u32 {
    // SAFETY: the call has no argument and cannot fail.
    unsafe { call(libc::SYS_getpid, [0; 6]) as u32 }
}

/// Whether this process has a thread with a number, which may be one that is ending.
pub(super) fn has_thread(thread: u32) -> bool {
    let arguments = [process_id() as usize, thread as usize, 0, 0, 0, 0];
    // SAFETY: signal 0 is not sent.
    unsafe { call(libc::SYS_tgkill, arguments) == 0 }
}

/// Sleeps.
pub(super) fn pause(nanoseconds: i64) {
    let time = libc::timespec { tv_sec: 0, tv_nsec: nanoseconds };
    // SAFETY: the time lives until the call returns.
    unsafe { call(libc::SYS_nanosleep, [&raw const time as usize, 0, 0, 0, 0, 0]) };
}

/// Looks for children that have ended, and leaves them as they are.
pub(super) fn look_for_children() {
    let options = (libc::WEXITED | libc::WNOHANG | libc::WNOWAIT) as usize;
    // SAFETY: a query without a place for the result.
    unsafe { call(libc::SYS_waitid, [libc::P_ALL as usize, 0, 0, options, 0, 0]) };
}

/// Writes a line to the standard error output. A closed output is no error.
pub(super) fn report(parts: &[&str]) {
    let mut line = [0u8; 512];
    let mut length = 0;
    for part in ["memferry: "].iter().chain(parts).chain(&["\n"]) {
        for byte in part.bytes().take(line.len() - length) {
            line[length] = byte;
            length += 1;
        }
    }
    // SAFETY: the bytes are valid for reads.
    unsafe { call(libc::SYS_write, [2, line.as_ptr() as usize, length, 0, 0, 0]) };
}

/// Sleeps while a word has a value, for at most so many seconds. May return earlier.
pub(super) fn wait(word: &AtomicU32, value: u32, seconds: Option<i64>) {
    let time = libc::timespec { tv_sec: seconds.unwrap_or(0), tv_nsec: 0 };
    let limit = seconds.map_or(0, |_| &raw const time as usize);
    let operation = (libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG) as usize;
    let arguments = [word.as_ptr() as usize, operation, value as usize, limit, 0, 0];
    // SAFETY: the word and the time live until the call returns.
    unsafe { call(libc::SYS_futex, arguments) };
}

/// Wakes threads that sleep on a word.
pub(super) fn wake(word: &AtomicU32, count: u32) {
    let operation = (libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG) as usize;
    let arguments = [word.as_ptr() as usize, operation, count as usize, 0, 0, 0];
    // SAFETY: the kernel only compares addresses of sleepers.
    unsafe { call(libc::SYS_futex, arguments) };
}
