//! Counts calls for `memferry run --profile`. Every call is counted, in a block of the calling thread
//! and without a lock. Some are sampled: their caller is looked up, and their time is taken.
//!
//! Which calls are sampled depends on their weight, their bytes and a constant. So large copies are
//! nearly always sampled, tiny ones once in some thousands, and the estimates that are made from the
//! samples are right on average for both calls and bytes. Tiny calls have a countdown for each size,
//! which is what counts them too (`entry`); all others have one countdown of weight.

use std::arch::{asm, global_asm, naked_asm};
use std::ffi::{CStr, c_void};
use std::mem::offset_of;
use std::ptr;
use std::sync::atomic::{
    AtomicI32, AtomicPtr, AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering,
};

use memferry_sys::call_profile::{
    Block, CALLERS, CLASSES, CallProfile, Caller, Count, MODULES, OPERATIONS, PATH_BYTES,
    TINY_SIZES, VERSION, class_of,
};

use super::lookup::{self, LinkMap};
use super::real::{self, Call, Entry};
use super::system;

/// The weight between two samples, on average.
const SAMPLE_WEIGHT: i64 = 256 << 10;
/// The largest weight between two samples: a call of more bytes is always a sample.
const MAX_INTERVAL: i64 = SAMPLE_WEIGHT / 2 + SAMPLE_WEIGHT;
/// The weight of a call without bytes.
const CALL_WEIGHT: usize = 64;

/// The block of threads that have no other yet. Nothing is left in it, so that their first call is a sample, which
/// claims one.
static UNCLAIMED: Block = Block::new();

// The address of the thread's block, first that of `UNCLAIMED`. Storage of the initial-exec model: it exists before
// the first instruction of the thread, and an access is one load.
global_asm!(
    ".pushsection .tdata.memferry_preload_block,\"awT\",@progbits",
    ".globl memferry_preload_block",
    ".hidden memferry_preload_block",
    ".type memferry_preload_block,@tls_object",
    ".size memferry_preload_block,8",
    ".p2align 3",
    "memferry_preload_block:",
    ".quad {unclaimed}",
    ".popsection",
    unclaimed = sym UNCLAIMED,
);

/// The offset of the word from the thread pointer.
fn block_offset() -> usize {
    let offset: usize;
    // SAFETY: loads a constant of the loader.
    unsafe {
        asm!(
            "mov {}, qword ptr [rip + memferry_preload_block@GOTTPOFF]",
            out(reg) offset,
            options(nostack, preserves_flags, readonly)
        );
    }
    offset
}

fn own_block() -> *const Block {
    let block: *const Block;
    // SAFETY: loads the word of this thread.
    unsafe {
        asm!(
            "mov {}, qword ptr fs:[{}]",
            out(reg) block,
            in(reg) block_offset(),
            options(nostack, preserves_flags, readonly)
        );
    }
    block
}

fn set_own_block(block: *const Block) {
    // SAFETY: stores the word of this thread.
    unsafe {
        asm!(
            "mov qword ptr fs:[{}], {}",
            in(reg) block_offset(),
            in(reg) block,
            options(nostack, preserves_flags)
        );
    }
}

/// A counted function. The numbers are passed by assembly.
#[derive(Debug, Clone, Copy)]
pub(super) enum Counted {
    Memcpy,
    Memmove,
    Memset,
    Memcmp,
    /// Counts as `memcpy`.
    Mempcpy,
}

/// The functions in the order of [`Counted`].
static ENTRIES: [&Entry; 5] =
    [&real::MEMCPY, &real::MEMMOVE, &real::MEMSET, &real::MEMCMP, &real::MEMPCPY];

impl Counted {
    /// The place among [`OPERATIONS`].
    const fn operation(self) -> usize {
        match self {
            Self::Mempcpy => 0,
            other => other as usize,
        }
    }

    /// Where the numbers of tiny calls begin in a block.
    pub(super) const fn tiny_left(self) -> usize {
        offset_of!(Block, tiny_left) + self.operation() * TINY_SIZES * size_of::<AtomicI32>()
    }

    /// Where the counts begin in a block.
    const fn counts(self) -> usize {
        offset_of!(Block, counts) + self.operation() * CLASSES * size_of::<Count>()
    }
}

/// A function that counts a call that is not tiny and continues with the C library's, unless the call is sampled.
macro_rules! counting {
    ($($name:ident, $entry:ident, $counted:expr;)*) => {$(
        #[unsafe(naked)]
        unsafe extern "C" fn $name(target: usize, other: usize, bytes: usize) -> usize {
            naked_asm!(
                "mov r11, qword ptr [rip + memferry_preload_block@GOTTPOFF]",
                "mov r10, qword ptr fs:[r11]",
                "lea rax, [rdx + {weight}]",
                "sub qword ptr [r10 + {countdown}], rax",
                "js 2f",
                "bsr rax, rdx",
                "shl eax, 4",
                "inc qword ptr [r10 + rax + {counts}]",
                "add qword ptr [r10 + rax + {counts} + 8], rdx",
                "jmp qword ptr [rip + {entry} + 16]",
                "2:",
                "mov ecx, {code}",
                "mov r8, qword ptr [rsp]",
                "jmp {sampled}",
                weight = const CALL_WEIGHT,
                countdown = const offset_of!(Block, countdown),
                counts = const $counted.counts(),
                code = const $counted as usize,
                entry = sym real::$entry,
                sampled = sym sampled,
            )
        }
    )*};
}

counting! {
    count_memcpy, MEMCPY, Counted::Memcpy;
    count_memmove, MEMMOVE, Counted::Memmove;
    count_memset, MEMSET, Counted::Memset;
    count_memcmp, MEMCMP, Counted::Memcmp;
    count_mempcpy, MEMPCPY, Counted::Mempcpy;
}

/// The file, once it is mapped.
static FILE: AtomicPtr<CallProfile> = AtomicPtr::new(ptr::null_mut());
/// `_dl_find_object` of the C library, which takes no lock; 0 before glibc 2.35.
static FIND_OBJECT: AtomicUsize = AtomicUsize::new(0);
/// The key whose destructor frees the block of a thread that ends; the greatest number for none.
static THREAD_KEY: AtomicU32 = AtomicU32::new(u32::MAX);
/// The path of the program, for the object without a name.
static PROGRAM: [AtomicU8; PATH_BYTES] = [const { AtomicU8::new(0) }; PATH_BYTES];

/// Maps the file and diverts all calls. A file that is not ours is left alone.
pub(super) fn start(path: &CStr) {
    let Some(file) = map(path) else {
        return system::report(&["the profile of `memferry run` cannot be opened: not counting"]);
    };
    file.processes.fetch_add(1, Ordering::Relaxed);
    FILE.store(ptr::from_ref(file).cast_mut(), Ordering::Release);
    // SAFETY: the initialiser runs before the program can load objects.
    let find = unsafe { lookup::next_definition(c"_dl_find_object") };
    FIND_OBJECT.store(find.unwrap_or(0), Ordering::Relaxed);
    let mut name = [0u8; PATH_BYTES - 1];
    // SAFETY: the buffer is valid for writes of its length.
    let length =
        unsafe { libc::readlink(c"/proc/self/exe".as_ptr(), name.as_mut_ptr().cast(), name.len()) };
    for (place, byte) in PROGRAM.iter().zip(&name[..usize::try_from(length).unwrap_or(0)]) {
        place.store(*byte, Ordering::Relaxed);
    }
    let mut key = 0;
    // SAFETY: the key is a local variable. Keys below 32 need no memory for their values.
    if unsafe { libc::pthread_key_create(&mut key, Some(thread_ended)) } == 0 && key < 32 {
        THREAD_KEY.store(key, Ordering::Relaxed);
    }
    // SAFETY: the handler stores one word.
    unsafe { libc::pthread_atfork(None, None, Some(forked)) };
    if file.timer_ticks.load(Ordering::Relaxed) == 0 {
        let shortest = (0..64).map(|_| ticks().wrapping_sub(ticks()).wrapping_neg()).min();
        file.timer_ticks.store(shortest.unwrap_or(0), Ordering::Relaxed);
    }
    real::MEMCPY.divert(count_memcpy as *const (), 0);
    real::MEMMOVE.divert(count_memmove as *const (), 0);
    real::MEMSET.divert(count_memset as *const (), 0);
    real::MEMCMP.divert(count_memcmp as *const (), 0);
    real::MEMPCPY.divert(count_mempcpy as *const (), 0);
}

fn map(path: &CStr) -> Option<&'static CallProfile> {
    let bytes = size_of::<CallProfile>();
    // SAFETY: the descriptor is closed once. The mapping is fresh, and is never unmapped.
    let mapped = unsafe {
        let descriptor = libc::open(path.as_ptr(), libc::O_RDWR | libc::O_CLOEXEC);
        if descriptor < 0 {
            return None;
        }
        let mut found: libc::stat = std::mem::zeroed();
        let fits = libc::fstat(descriptor, &mut found) == 0 && found.st_size as usize >= bytes;
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let mapped = libc::mmap(ptr::null_mut(), bytes, access, libc::MAP_SHARED, descriptor, 0);
        libc::close(descriptor);
        (fits && mapped != libc::MAP_FAILED).then_some(mapped)
    };
    // SAFETY: the mapping is as long as the structure, and all its fields are atomics.
    let file = unsafe { &*mapped?.cast::<CallProfile>() };
    (file.version.load(Ordering::Acquire) == VERSION).then_some(file)
}

/// In a child, the block belongs to the parent.
extern "C" fn forked() {
    set_own_block(&UNCLAIMED);
    if let Some(file) = file() {
        file.processes.fetch_add(1, Ordering::Relaxed);
    }
}

extern "C" fn thread_ended(block: *mut c_void) {
    set_own_block(&UNCLAIMED);
    // SAFETY: the value of the key is the block that this thread has claimed.
    unsafe { &*block.cast::<Block>() }.owner.store(0, Ordering::Release);
}

fn file() -> Option<&'static CallProfile> {
    // SAFETY: null, or the mapping, which stays.
    unsafe { FILE.load(Ordering::Acquire).as_ref() }
}

/// A call that is sampled, or the first of its thread.
pub(super) unsafe extern "C" fn sampled(
    a: usize,
    b: usize,
    bytes: usize,
    code: usize,
    caller: usize,
) -> usize {
    let call: Call = ENTRIES[code].real();
    // `mempcpy`, the last one, counts as the first.
    let operation = code % OPERATIONS.len();
    let Some(file) = file() else {
        // SAFETY: the arguments are those of the program's own call.
        return unsafe { call(a, b, bytes) };
    };
    let (block, is_new) = claimed_block(file);
    let is_sample = if bytes < TINY_SIZES {
        count_tiny(block, operation, bytes, is_new)
    } else {
        // First of all, so that a signal handler that interrupts this counts as usual.
        block.countdown.store(next_interval(block), Ordering::Relaxed);
        let count = &block.counts[operation][class_of(bytes)];
        count.calls.fetch_add(1, Ordering::Relaxed);
        count.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        // The first call of a thread says nothing about others, unless it is one of those that all are samples.
        !is_new || bytes as i64 >= MAX_INTERVAL
    };
    if !is_sample {
        // SAFETY: as above.
        return unsafe { call(a, b, bytes) };
    }
    let begin = ticks();
    // SAFETY: as above.
    let result = unsafe { call(a, b, bytes) };
    let took = ticks().wrapping_sub(begin);
    let took = took.saturating_sub(file.timer_ticks.load(Ordering::Relaxed));
    let time = &file.times[operation][class_of(bytes)];
    time.calls.fetch_add(1, Ordering::Relaxed);
    time.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    time.ticks.fetch_add(took, Ordering::Relaxed);
    record_caller(file, operation, bytes, took, caller);
    result
}

/// Counts the next calls of this size ahead, if none is left. Returns whether that is so: the call is a sample.
fn count_tiny(block: &Block, operation: usize, bytes: usize, is_new: bool) -> bool {
    let left = &block.tiny_left[operation][bytes];
    // The entry point has subtracted it from `UNCLAIMED`.
    if is_new && left.fetch_sub(1, Ordering::Relaxed) > 0 {
        return false;
    }
    let next = tiny_interval(bytes) / 2 + random_below(block, tiny_interval(bytes));
    let count = &block.counts[operation][class_of(bytes)];
    count.calls.fetch_add(u64::from(next), Ordering::Relaxed);
    count.bytes.fetch_add(u64::from(next) * bytes as u64, Ordering::Relaxed);
    left.fetch_add(next as i32, Ordering::Relaxed);
    true
}

/// Tiny calls between two samples, on average.
fn tiny_interval(bytes: usize) -> u32 {
    (SAMPLE_WEIGHT as usize / (bytes + CALL_WEIGHT)) as u32
}

/// A random weight around the average, so that samples do not follow the rhythm of a loop.
fn next_interval(block: &Block) -> i64 {
    SAMPLE_WEIGHT / 2 + i64::from(random_below(block, SAMPLE_WEIGHT as u32))
}

fn random_below(block: &Block, end: u32) -> u32 {
    let mut random = block.random.load(Ordering::Relaxed);
    random ^= random << 13;
    random ^= random >> 7;
    random ^= random << 17;
    block.random.store(random, Ordering::Relaxed);
    (((random >> 32) * u64::from(end)) >> 32) as u32
}

/// The block of this thread, and whether it was claimed just now.
fn claimed_block(file: &'static CallProfile) -> (&'static Block, bool) {
    let own = own_block();
    if !ptr::eq(own, &UNCLAIMED) {
        // SAFETY: the word is the address of a block in the mapping.
        return (unsafe { &*own }, false);
    }
    let number = claim(file, system::process_id());
    let block = &file.blocks[number];
    let first = block.random.compare_exchange(0, ticks() | 1, Ordering::Relaxed, Ordering::Relaxed);
    if first.is_ok() {
        count_ahead(block);
        file.used_blocks.fetch_max(number as u64 + 1, Ordering::Release);
    }
    set_own_block(block);
    let key = THREAD_KEY.load(Ordering::Relaxed);
    if key != u32::MAX && number != 0 {
        // SAFETY: the key exists, and its value is inside the thread's own descriptor.
        unsafe { libc::pthread_setspecific(key, ptr::from_ref(block).cast()) };
    }
    (block, true)
}

/// Counts tiny calls ahead in a block that was never used: of each size as many as are left until its first sample,
/// which comes anywhere in the interval.
fn count_ahead(block: &Block) {
    for (left, counts) in block.tiny_left.iter().zip(&block.counts) {
        for (bytes, left) in left.iter().enumerate() {
            let next = random_below(block, tiny_interval(bytes));
            left.store(next as i32, Ordering::Relaxed);
            let count = &counts[class_of(bytes)];
            add(&count.calls, u64::from(next));
            add(&count.bytes, u64::from(next) * bytes as u64);
        }
    }
}

/// Adds to a counter that only this thread writes.
fn add(counter: &AtomicU64, more: u64) {
    counter.store(counter.load(Ordering::Relaxed).wrapping_add(more), Ordering::Relaxed);
}

/// The number of a free block that is claimed, or of one whose process has ended. Without one, block 0, which threads share.
fn claim(file: &CallProfile, process: u32) -> usize {
    for (number, block) in file.blocks.iter().enumerate().skip(1) {
        let owner = block.owner.load(Ordering::Relaxed);
        let own = u64::from(process);
        let is_free = owner == 0 || (owner != own && !has_process(owner as usize));
        if is_free
            && block.owner.compare_exchange(owner, own, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        {
            return number;
        }
    }
    0
}

fn has_process(process: usize) -> bool {
    // SAFETY: signal 0 only asks whether the process exists.
    unsafe { system::call(libc::SYS_kill, [process, 0, 0, 0, 0, 0]) != -(libc::ESRCH as isize) }
}

/// Adds a sample to the place that has called.
fn record_caller(file: &CallProfile, operation: usize, bytes: usize, took: u64, caller: usize) {
    let Some((module, offset)) = place_of(file, caller) else { return };
    let key = Caller::key(module, operation, offset);
    let weight = bytes.saturating_add(CALL_WEIGHT) as u64;
    // How many calls like this one a sample stands for, in 1024ths.
    let calls = ((SAMPLE_WEIGHT as u64) << 10).checked_div(weight).unwrap_or(0).max(1 << 10);
    let first = (key ^ (key >> 29)).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40;
    for probe in 0..32 {
        let place = &file.callers[(first as usize + probe) % CALLERS];
        let known = place.key.load(Ordering::Relaxed);
        let is_ours = known == key
            || (known == 0
                && match place.key.compare_exchange(0, key, Ordering::Relaxed, Ordering::Relaxed) {
                    Ok(_) => true,
                    Err(other) => other == key,
                });
        if is_ours {
            place.samples.fetch_add(1, Ordering::Relaxed);
            place.calls.fetch_add(calls >> 10, Ordering::Relaxed);
            place.bytes.fetch_add((bytes as u64).saturating_mul(calls) >> 10, Ordering::Relaxed);
            place.ticks.fetch_add(took.saturating_mul(calls) >> 10, Ordering::Relaxed);
            return;
        }
    }
}

/// What `_dl_find_object` writes, and more room than it has grown to.
#[repr(C)]
struct FoundObject {
    flags: u64,
    start: usize,
    end: usize,
    object: *const LinkMap,
    rest: [u64; 28],
}

/// The module and the offset in it of an address of code.
fn place_of(file: &CallProfile, address: usize) -> Option<(usize, usize)> {
    let find = FIND_OBJECT.load(Ordering::Relaxed);
    if find == 0 {
        return None;
    }
    // SAFETY: the function has this signature since it exists, and takes no lock.
    let find = unsafe {
        std::mem::transmute::<usize, unsafe extern "C" fn(usize, *mut FoundObject) -> i32>(find)
    };
    let mut found = FoundObject { flags: 0, start: 0, end: 0, object: ptr::null(), rest: [0; 28] };
    // SAFETY: the structure is valid for writes. The object stays while its code is running.
    let object = unsafe {
        if find(address, &mut found) != 0 {
            return None;
        }
        found.object.as_ref()?
    };
    // SAFETY: the name of a loaded object is null or ends with a zero.
    let name = unsafe { object.name.as_ref().map(|name| CStr::from_ptr(name)) };
    let module = match name.map(CStr::to_bytes).filter(|name| !name.is_empty()) {
        Some(name) => module_number(file, name.len(), |index| name[index]),
        None => {
            let length = PROGRAM.iter().position(|byte| byte.load(Ordering::Relaxed) == 0);
            module_number(file, length?, |index| PROGRAM[index].load(Ordering::Relaxed))
        }
    };
    Some((module?, address.wrapping_sub(object.bias)))
}

/// The number of a module, which is written into the table if it is new.
fn module_number(file: &CallProfile, length: usize, byte: impl Fn(usize) -> u8) -> Option<usize> {
    if length >= PATH_BYTES {
        return None;
    }
    let step = |hash: u32, index| (hash ^ u32::from(byte(index))).wrapping_mul(0x0100_0193);
    let hash = (0..length).fold(0x811C_9DC5, step);
    for probe in 0..MODULES {
        let number = (hash as usize + probe) % MODULES;
        let module = &file.modules[number];
        let is_same = || {
            module.hash.load(Ordering::Relaxed) == hash
                && (0..length)
                    .all(|index| module.path[index].load(Ordering::Relaxed) == byte(index))
                && module.path[length].load(Ordering::Relaxed) == 0
        };
        match module.state.compare_exchange(0, 1, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => {
                for index in 0..length {
                    module.path[index].store(byte(index), Ordering::Relaxed);
                }
                module.hash.store(hash, Ordering::Relaxed);
                module.state.store(2, Ordering::Release);
                return Some(number);
            }
            Err(2) if is_same() => return Some(number),
            // Another thread is writing it: perhaps the same one. This sample has no caller.
            Err(1) => return None,
            Err(_) => {}
        }
    }
    None
}

fn ticks() -> u64 {
    // SAFETY: every x86-64 has the instruction.
    unsafe { std::arch::x86_64::_rdtsc() }
}
