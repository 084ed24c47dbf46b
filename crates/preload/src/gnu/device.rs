//! Hands large copies and fills to a ferry with the devices that the environment names (`MEMFERRY_GPU`,
//! `MEMFERRY_DSA`, `MEMFERRY_IOAT`, `MEMFERRY_NIC`), if `memferry run --copies` was asked for one.
//!
//! The ferry is that of `libadma.so`, which one thread of this library loads and calls: neither may happen inside
//! a call of `memcpy`, whose thread may hold locks of the loader or of an allocator. The thread loads the library
//! when the first large copy has been seen; until the ferry is open, copies are executed as without it. One
//! copy is handed over at a time. A ferry that fails leaves the copy to the processor.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::mem::{size_of, transmute};
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicUsize, Ordering};

use super::copies::{
    block_signals, block_signals_for_a_thread, has_fault_handler, restore_signals,
};
use super::system;

/// The variable with the path of the library.
pub(super) const VARIABLE: &str = "MEMFERRY_COPY_LIBRARY";

/// Smaller copies are not worth a change of threads.
const MIN_BYTES: usize = 1 << 20;
const PAGE: usize = 4096;

/// States of the ferry.
const CLOSED: u32 = 0;
const WANTED: u32 = 1;
const OPEN: u32 = 2;
const FAILED: u32 = 3;

/// States of the request.
const NONE: u32 = 0;
const ASKED: u32 = 1;
const DONE: u32 = 2;
const REFUSED: u32 = 3;

/// What the thread and its callers share. In a forked child all of it is zero again, and there is no thread.
#[repr(C)]
struct Desk {
    /// The process that has the thread; 0 in a child.
    process: AtomicU32,
    state: AtomicU32,
    /// 1 while a thread has the desk.
    is_busy: AtomicU32,
    request: AtomicU32,
    /// 1 for a fill, whose byte is the source.
    is_fill: AtomicU32,
    target: AtomicUsize,
    source: AtomicUsize,
    bytes: AtomicUsize,
}

const _: () = assert!(size_of::<Desk>() <= PAGE);

static DESK: AtomicPtr<Desk> = AtomicPtr::new(ptr::null_mut());
static PATH: AtomicPtr<c_char> = AtomicPtr::new(ptr::null_mut());

/// Starts the thread, which sleeps until a large copy is seen. The path must stay.
pub(super) fn start(path: &'static CStr) {
    let access = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    PATH.store(path.as_ptr().cast_mut(), Ordering::Relaxed);
    // SAFETY: a fresh mapping, which stays. The thread starts with all signals blocked, and executes a function
    // of this library, which stays too.
    let is_started = unsafe {
        let page = libc::mmap(ptr::null_mut(), PAGE, access, flags, -1, 0);
        if page == libc::MAP_FAILED || libc::madvise(page, PAGE, libc::MADV_WIPEONFORK) != 0 {
            return;
        }
        let desk = &*page.cast::<Desk>();
        desk.process.store(system::process_id(), Ordering::Relaxed);
        DESK.store(page.cast(), Ordering::Release);
        let mut thread = 0;
        let signals = block_signals_for_a_thread();
        let result = libc::pthread_create(&mut thread, ptr::null(), serve, page);
        restore_signals(signals);
        result == 0 && libc::pthread_detach(thread) == 0
    };
    if !is_started {
        DESK.store(ptr::null_mut(), Ordering::Release);
        system::report(&["no thread for devices: copies are executed by the processor"]);
    }
}

/// Executes a copy or fill by the ferry. Returns false if it cannot; the target may have been written then, and
/// the source is unchanged.
///
/// # Safety
/// As for the call of the program; the ranges must not overlap.
pub(super) unsafe fn execute(is_fill: bool, target: usize, source: usize, bytes: usize) -> bool {
    // SAFETY: null, or the page, which stays.
    let Some(desk) = (unsafe { DESK.load(Ordering::Acquire).as_ref() }) else { return false };
    if bytes < MIN_BYTES || desk.process.load(Ordering::Relaxed) != system::process_id() {
        return false;
    }
    let state = desk.state.load(Ordering::Acquire);
    if state != OPEN {
        let wish = (CLOSED, WANTED, Ordering::Relaxed, Ordering::Relaxed);
        if state == CLOSED && desk.state.compare_exchange(wish.0, wish.1, wish.2, wish.3).is_ok() {
            system::wake(&desk.state, 1);
        }
        return false;
    }
    if has_fault_handler() {
        return false;
    }
    // No handler may leave the call while others still write.
    let signals = block_signals();
    let is_ours = desk.is_busy.compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed).is_ok();
    let is_done = is_ours && ask(desk, is_fill, target, source, bytes);
    if is_ours {
        desk.is_busy.store(0, Ordering::Release);
    }
    restore_signals(signals);
    is_done
}

/// Passes a request to the thread and waits for its end.
fn ask(desk: &Desk, is_fill: bool, target: usize, source: usize, bytes: usize) -> bool {
    desk.is_fill.store(u32::from(is_fill), Ordering::Relaxed);
    desk.target.store(target, Ordering::Relaxed);
    desk.source.store(source, Ordering::Relaxed);
    desk.bytes.store(bytes, Ordering::Relaxed);
    desk.request.store(ASKED, Ordering::Release);
    system::wake(&desk.request, 1);
    while desk.request.load(Ordering::Acquire) == ASKED {
        system::wait(&desk.request, ASKED, None);
    }
    desk.request.swap(NONE, Ordering::Relaxed) == DONE
}

type Init = unsafe extern "C" fn() -> c_int;
type Copy = unsafe extern "C" fn(*const c_void, *mut c_void, usize) -> c_int;
type Fill = unsafe extern "C" fn(*mut c_void, c_int, usize) -> c_int;

/// The functions of `libadma.so`.
#[derive(Debug)]
struct Ferry {
    copy: Copy,
    fill: Fill,
}

/// The life of the thread.
extern "C" fn serve(page: *mut c_void) -> *mut c_void {
    // SAFETY: the page of the desk stays.
    let desk = unsafe { &*page.cast::<Desk>() };
    while desk.state.load(Ordering::Acquire) == CLOSED {
        system::wait(&desk.state, CLOSED, None);
    }
    let Some(ferry) = open() else {
        desk.state.store(FAILED, Ordering::Release);
        return ptr::null_mut();
    };
    desk.state.store(OPEN, Ordering::Release);
    loop {
        let request = desk.request.load(Ordering::Acquire);
        if request != ASKED {
            system::wait(&desk.request, request, None);
            continue;
        }
        let target = desk.target.load(Ordering::Relaxed) as *mut c_void;
        let source = desk.source.load(Ordering::Relaxed);
        let bytes = desk.bytes.load(Ordering::Relaxed);
        // SAFETY: the ranges are those of a call of the program that waits for this one.
        let result = unsafe {
            match desk.is_fill.load(Ordering::Relaxed) {
                0 => (ferry.copy)(source as *const c_void, target, bytes),
                _ => (ferry.fill)(target, source as c_int, bytes),
            }
        };
        desk.request.store(if result == 0 { DONE } else { REFUSED }, Ordering::Release);
        system::wake(&desk.request, 1);
    }
}

/// Loads the library and opens its ferry.
fn open() -> Option<Ferry> {
    let path = PATH.load(Ordering::Relaxed);
    // SAFETY: the path is a string that stays. The functions have the signatures of the header of the library.
    unsafe {
        let library = libc::dlopen(path, libc::RTLD_NOW | libc::RTLD_LOCAL);
        let find = |name: &CStr| {
            let found = (!library.is_null()).then(|| libc::dlsym(library, name.as_ptr()))?;
            (!found.is_null()).then_some(found)
        };
        let (Some(init), Some(copy), Some(fill)) =
            (find(c"adma_init"), find(c"adma_copy"), find(c"adma_fill"))
        else {
            let name = CStr::from_ptr(path).to_str().unwrap_or_default();
            system::report(&["no device for copies: ", name, " cannot be loaded"]);
            return None;
        };
        let init = transmute::<*mut c_void, Init>(init);
        if init() < 0 {
            system::report(&[
                "no device for copies: the ferry cannot be opened; `memferry doctor` says why",
            ]);
            return None;
        }
        let copy = transmute::<*mut c_void, Copy>(copy);
        Some(Ferry { copy, fill: transmute::<*mut c_void, Fill>(fill) })
    }
}
