//! Shares large copies and fills with helper threads, for `memferry run --copies`.
//!
//! One copy is shared at a time; another that begins meanwhile is executed by the C library, so that
//! nobody waits for anybody. While a copy is shared its thread takes no signals: no handler can leave
//! it while helpers still write. A helper has no thread-local storage of the program, so that no handler
//! of the program may run on it: copies are shared only while faults have no handler.

use std::mem::{offset_of, size_of};
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering};

use memferry_sys::copy::stream::Streaming;

use super::device;
use super::helpers::{self, MAX_HELPERS};
use super::real;
use super::system;

/// The variable with the sizes and the kernel, as `memferry run --copies` has measured them.
pub(super) const VARIABLE: &str = "MEMFERRY_COPIES";

/// No chunk of the current copy can be claimed.
const CLOSED: u32 = u32::MAX;
const PAGE: usize = 4096;
/// Smaller chunks are not worth a claim.
const MIN_CHUNK: usize = 64 << 10;
/// How many KiB are not shared after helpers were of no use: many small copies, or one large one.
const PENALTY_KIB: u32 = 16 << 10;
/// How long a helper that sleeps, or is only being started, may take to arrive.
const ARRIVAL_TICKS: u64 = 600_000;
/// How often the caller polls for the last chunk of a helper before it sleeps.
const POLLS: u32 = 20_000;

/// What threads share. In a forked child all of it is zero again.
#[repr(C)]
pub(super) struct Pool {
    /// The process that owns it; 0 in a child that was made without handlers.
    process: AtomicU32,
    /// 1 while a copy is shared.
    is_busy: AtomicU32,
    /// KiB of large copies that are not to be shared, because others use the cores.
    penalty: AtomicU32,
    /// Changes with every shared copy. Helpers sleep on it.
    pub(super) bell: AtomicU32,
    /// Helpers that sleep, or are about to.
    pub(super) sleepers: AtomicU32,
    /// The number of the copy in the upper half, of its next chunk in the lower one.
    claim: AtomicU64,
    /// Finished chunks. The caller sleeps on it.
    done: AtomicU32,
    /// 1 while the caller sleeps.
    is_waiting: AtomicU32,
    kind: AtomicU32,
    chunks: AtomicU32,
    target: AtomicUsize,
    source: AtomicUsize,
    bytes: AtomicUsize,
    chunk_bytes: AtomicUsize,
    /// 1 while helpers are to end.
    pub(super) is_ending: AtomicU32,
    /// 1 for a helper that is there. The kernel clears it.
    pub(super) running: [AtomicU32; MAX_HELPERS],
    /// The numbers of the threads that are or were helpers.
    pub(super) threads: [AtomicU32; MAX_HELPERS],
    /// The memory of the helpers' stacks.
    pub(super) areas: [AtomicUsize; MAX_HELPERS],
}

const _: () = assert!(size_of::<Pool>() <= PAGE && offset_of!(Pool, claim) % 8 == 0);

const COPY: u32 = 0;
const STREAMED_COPY: u32 = 1;
const FILL: u32 = 2;
const STREAMED_FILL: u32 = 3;

static POOL: AtomicPtr<Pool> = AtomicPtr::new(ptr::null_mut());
static HELPERS: AtomicUsize = AtomicUsize::new(0);
static CHUNK_BYTES: AtomicUsize = AtomicUsize::new(0);
static STREAM_BYTES: AtomicUsize = AtomicUsize::new(usize::MAX);
/// The position of the kernel in the list of all.
static KERNEL: AtomicU8 = AtomicU8::new(0);

/// Prepares sharing, if the value is one of `memferry run`: the size from which copies are shared, the
/// largest chunk, the size from which stores bypass the caches, the number of helpers, and the kernel.
pub(super) fn start(value: &str) {
    let mut words = value.split(',');
    let mut number = || words.next().and_then(|word| word.parse::<usize>().ok());
    let numbers = [number(), number(), number(), number()];
    let kernel = words.next().and_then(Streaming::from_name).filter(|it| it.is_supported());
    let ([Some(limit), Some(chunk), Some(stream), Some(count)], Some(kernel)) = (numbers, kernel)
    else {
        return system::report(&[VARIABLE, " is for `memferry run --copies`, which sets it"]);
    };
    let position = Streaming::ALL.iter().position(|known| *known == kernel).unwrap_or(0);
    KERNEL.store(position as u8, Ordering::Relaxed);
    CHUNK_BYTES.store(chunk.max(MIN_CHUNK), Ordering::Relaxed);
    STREAM_BYTES.store(stream, Ordering::Relaxed);
    HELPERS.store(count.min(MAX_HELPERS), Ordering::Relaxed);
    if count == 0 || !map_pool() {
        return;
    }
    let limit = limit.max(2 * MIN_CHUNK);
    for entry in [&real::MEMCPY, &real::MEMMOVE] {
        entry.divert(shared_move as *const (), limit);
    }
    real::MEMPCPY.divert(shared_move_to_end as *const (), limit);
    real::MEMSET.divert(shared_fill as *const (), limit);
}

/// Maps the page, which the kernel clears in children.
fn map_pool() -> bool {
    let access = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: a fresh mapping, which stays.
    unsafe {
        let page = libc::mmap(ptr::null_mut(), PAGE, access, flags, -1, 0);
        if page == libc::MAP_FAILED || libc::madvise(page, PAGE, libc::MADV_WIPEONFORK) != 0 {
            return false;
        }
        POOL.store(page.cast(), Ordering::Release);
        forked();
        libc::pthread_atfork(None, None, Some(forked)) == 0
    }
}

unsafe extern "C" fn shared_move(target: usize, source: usize, bytes: usize) -> usize {
    let overlaps = target.wrapping_sub(source) < bytes || source.wrapping_sub(target) < bytes;
    // SAFETY: the arguments are those of the program's own call.
    unsafe {
        let is_done = !overlaps
            && (device::execute(false, target, source, bytes)
                || share(COPY, target, source, bytes));
        if !is_done {
            return real::MEMMOVE.real()(target, source, bytes);
        }
    }
    target
}

unsafe extern "C" fn shared_move_to_end(target: usize, source: usize, bytes: usize) -> usize {
    // SAFETY: as above.
    unsafe { shared_move(target, source, bytes) + bytes }
}

unsafe extern "C" fn shared_fill(target: usize, byte: usize, bytes: usize) -> usize {
    // SAFETY: as above.
    unsafe {
        let is_done =
            device::execute(true, target, byte, bytes) || share(FILL, target, byte, bytes);
        if !is_done {
            return real::MEMSET.real()(target, byte, bytes);
        }
    }
    target
}

/// Shares a copy or fill, and returns when it is done. Returns false if it cannot be shared now; then
/// nothing was written.
///
/// # Safety
/// As for the call of the program; the ranges must not overlap.
unsafe fn share(kind: u32, target: usize, source: usize, bytes: usize) -> bool {
    // SAFETY: null, or the page, which stays.
    let Some(pool) = (unsafe { POOL.load(Ordering::Acquire).as_ref() }) else { return false };
    if pool.is_busy.load(Ordering::Relaxed) != 0 || is_penalised(pool, bytes) || !is_owner(pool) {
        return false;
    }
    if has_fault_handler() {
        return false;
    }
    let signals = block_signals();
    let is_ours = pool.is_busy.compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed).is_ok();
    let is_shared = is_ours && helpers::ensure(pool, HELPERS.load(Ordering::Relaxed));
    if is_shared {
        // SAFETY: the caller guarantees the ranges, and this thread has the pool alone.
        unsafe { run(pool, kind, target, source, bytes) };
    }
    if is_ours {
        pool.is_busy.store(0, Ordering::Release);
    }
    restore_signals(signals);
    is_shared
}

/// Makes a call for which the process must have no helpers. If a thread shares a copy meanwhile, the
/// process has threads of its own.
pub(super) fn without_helpers<R>(call: impl FnOnce() -> R) -> R {
    // SAFETY: null, or the page, which stays.
    let pool = unsafe { POOL.load(Ordering::Acquire).as_ref() };
    let Some(pool) = pool.filter(|pool| is_owner(pool)) else { return call() };
    let signals = block_signals();
    let is_ours = pool.is_busy.compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed).is_ok();
    if is_ours {
        helpers::end_all(pool);
    }
    let result = call();
    if is_ours {
        pool.is_busy.store(0, Ordering::Release);
    }
    restore_signals(signals);
    result
}

fn is_penalised(pool: &Pool, bytes: usize) -> bool {
    let left = pool.penalty.load(Ordering::Relaxed);
    if left > 0 {
        let kib = u32::try_from(bytes >> 10).unwrap_or(u32::MAX);
        pool.penalty.store(left.saturating_sub(kib), Ordering::Relaxed);
    }
    left > 0
}

/// Whether the pool belongs to this process. A child of `vfork` runs in the memory of its parent, and
/// may not use the parent's helpers: it can be killed at any time.
fn is_owner(pool: &Pool) -> bool {
    pool.process.load(Ordering::Relaxed) == system::process_id()
}

/// Makes the page, which the kernel has cleared, that of a child. Children that are made without this
/// handler share nothing.
extern "C" fn forked() {
    // SAFETY: null, or the page, which stays.
    if let Some(pool) = unsafe { POOL.load(Ordering::Acquire).as_ref() } {
        pool.process.store(system::process_id(), Ordering::Relaxed);
    }
}

/// Publishes the copy, executes chunks of it, and waits for the rest.
///
/// # Safety
/// As for `share`; the pool must be this thread's alone.
unsafe fn run(pool: &Pool, kind: u32, target: usize, source: usize, bytes: usize) {
    let threads = HELPERS.load(Ordering::Relaxed) + 1;
    let most = CHUNK_BYTES.load(Ordering::Relaxed);
    let chunk_bytes = (bytes / (4 * threads)).clamp(MIN_CHUNK, most).next_multiple_of(PAGE);
    // A claim counts chunks in 32 bits.
    let chunk_bytes = chunk_bytes.max((bytes >> 31).next_multiple_of(PAGE));
    let chunks = bytes.div_ceil(chunk_bytes) as u32;
    let is_streamed = bytes >= STREAM_BYTES.load(Ordering::Relaxed);
    let kind = match (kind, is_streamed) {
        (FILL, true) => STREAMED_FILL,
        (FILL, false) => FILL,
        (_, true) => STREAMED_COPY,
        (_, false) => COPY,
    };
    pool.kind.store(kind, Ordering::Relaxed);
    pool.target.store(target, Ordering::Relaxed);
    pool.source.store(source, Ordering::Relaxed);
    pool.bytes.store(bytes, Ordering::Relaxed);
    pool.chunk_bytes.store(chunk_bytes, Ordering::Relaxed);
    pool.chunks.store(chunks, Ordering::Relaxed);
    pool.done.store(0, Ordering::Relaxed);
    let number = (pool.claim.load(Ordering::Relaxed) >> 32) + 1;
    pool.claim.store(number << 32, Ordering::Release);
    pool.bell.fetch_add(1, Ordering::SeqCst);
    if pool.sleepers.load(Ordering::SeqCst) > 0 {
        system::wake(&pool.bell, threads as u32 - 1);
    }
    let begin = ticks();
    let own = claim_chunks(pool);
    let worked = ticks();
    wait_for_all(pool, chunks);
    let waited = ticks().wrapping_sub(worked);
    pool.claim.store((number << 32) | u64::from(CLOSED), Ordering::Relaxed);
    // Helpers that take no chunk, or whose last one takes long, have no core to run on.
    let worked = worked.wrapping_sub(begin);
    if (own == chunks && worked > ARRIVAL_TICKS) || waited > worked.max(ARRIVAL_TICKS) {
        pool.penalty.store(PENALTY_KIB, Ordering::Relaxed);
    }
}

fn wait_for_all(pool: &Pool, chunks: u32) {
    for _ in 0..POLLS {
        if pool.done.load(Ordering::Acquire) == chunks {
            return;
        }
        std::hint::spin_loop();
    }
    pool.is_waiting.store(1, Ordering::SeqCst);
    loop {
        let done = pool.done.load(Ordering::SeqCst);
        if done == chunks {
            break;
        }
        system::wait(&pool.done, done, None);
    }
    pool.is_waiting.store(0, Ordering::Relaxed);
}

/// Claims and executes chunks until there are none. Returns how many.
///
/// What is read of a copy is of that copy if the claim behind it succeeds: the caller closes the copy
/// before it changes anything, and no number comes twice.
pub(super) fn claim_chunks(pool: &Pool) -> u32 {
    let mut executed = 0;
    loop {
        let claim = pool.claim.load(Ordering::Acquire);
        let chunk = claim as u32;
        let chunks = pool.chunks.load(Ordering::Relaxed);
        if chunk == CLOSED || chunk >= chunks {
            return executed;
        }
        let (kind, bytes) = (pool.kind.load(Ordering::Relaxed), pool.bytes.load(Ordering::Relaxed));
        let (target, source) =
            (pool.target.load(Ordering::Relaxed), pool.source.load(Ordering::Relaxed));
        let chunk_bytes = pool.chunk_bytes.load(Ordering::Relaxed);
        let is_claimed = pool
            .claim
            .compare_exchange(claim, claim + 1, Ordering::AcqRel, Ordering::Relaxed)
            .is_ok();
        if !is_claimed {
            continue;
        }
        let start = chunk as usize * chunk_bytes;
        let length = chunk_bytes.min(bytes - start);
        // SAFETY: the chunk lies inside the ranges of a call that does not return before the chunk is
        // counted as done, and nobody else has claimed it.
        unsafe { execute(kind, target + start, source, start, length) };
        executed += 1;
        pool.done.fetch_add(1, Ordering::SeqCst);
        if pool.is_waiting.load(Ordering::SeqCst) != 0 {
            system::wake(&pool.done, 1);
        }
    }
}

/// # Safety
/// The target must be valid for writes, and the source, if there is one, for reads from its offset.
unsafe fn execute(kind: u32, target: usize, source: usize, offset: usize, bytes: usize) {
    let kernel = Streaming::ALL[KERNEL.load(Ordering::Relaxed) as usize % Streaming::ALL.len()];
    // SAFETY: the caller guarantees the ranges; the processor supports the kernel.
    unsafe {
        match kind {
            COPY => _ = real::MEMMOVE.real()(target, source + offset, bytes),
            STREAMED_COPY => {
                kernel.copy(target as *mut u8, (source + offset) as *const u8, bytes);
            }
            FILL => _ = real::MEMSET.real()(target, source, bytes),
            _ => kernel.fill(target as *mut u8, source as u8, bytes),
        }
    }
}

/// What the kernel has of an action for a signal.
#[repr(C)]
struct SignalAction {
    handler: usize,
    flags: u64,
    restorer: usize,
    mask: u64,
}

/// Whether the program has a handler for faults, which must not run in a thread of this library.
pub(super) fn has_fault_handler() -> bool {
    has_handler(libc::SIGSEGV) || has_handler(libc::SIGBUS)
}

fn has_handler(signal: i32) -> bool {
    let mut action = SignalAction { handler: 0, flags: 0, restorer: 0, mask: 0 };
    let place = &raw mut action as usize;
    // SAFETY: the kernel writes a structure of this layout.
    let result =
        unsafe { system::call(libc::SYS_rt_sigaction, [signal as usize, 0, place, 8, 0, 0]) };
    result != 0 || action.handler != libc::SIG_DFL
}

/// Blocks all signals and returns those that were blocked.
pub(super) fn block_signals() -> u64 {
    let mut before = 0;
    change_signals(&u64::MAX, &mut before);
    before
}

/// The same for the start of a thread. It must not block the signals 32 and 33, by which the C library tells all
/// threads to end or to change their user: `setuid` would wait for ever.
pub(super) fn block_signals_for_a_thread() -> u64 {
    let mut before = 0;
    change_signals(&!(0b11 << 31), &mut before);
    before
}

pub(super) fn restore_signals(before: u64) {
    let mut nothing = 0;
    change_signals(&before, &mut nothing);
}

fn change_signals(to: &u64, before: &mut u64) {
    let (to, before) = (&raw const *to as usize, &raw mut *before as usize);
    let how = libc::SIG_SETMASK as usize;
    // SAFETY: both are sets of 64 signals, as the kernel has them.
    unsafe { system::call(libc::SYS_rt_sigprocmask, [how, to, before, 8, 0, 0]) };
}

fn ticks() -> u64 {
    // SAFETY: every x86-64 has the instruction.
    unsafe { std::arch::x86_64::_rdtsc() }
}
