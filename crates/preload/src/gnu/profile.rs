//! Counts calls for `memferry run --profile`. Every call is counted, in a block of the calling thread
//! and without a lock. Some are sampled: their caller is looked up, and their time is taken.
//!
//! Which calls are sampled depends on a countdown of weight, a call's bytes and a constant. So large
//! copies are nearly always sampled, tiny ones once in some thousands, and the estimates that are made
//! from the samples are right on average for both calls and bytes.

use std::arch::{asm, global_asm, naked_asm};
use std::ffi::{CStr, c_void};
use std::mem::offset_of;
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU8, AtomicU32, AtomicUsize, Ordering};

use memferry_sys::call_profile::{
    BLOCKS, Block, CALLERS, CLASSES, CallProfile, Caller, Count, MODULES, PATH_BYTES, VERSION,
    class_of,
};

use super::lookup::{self, LinkMap};
use super::real::{self, Call, Entry};
use super::system;

/// The weight between two samples, on average.
const SAMPLE_WEIGHT: i64 = 256 << 10;
/// The weight of a call without bytes.
const CALL_WEIGHT: usize = 64;

const COUNTDOWN: usize = offset_of!(Block, countdown);
const OPERATION_BYTES: usize = CLASSES * size_of::<Count>();

// The address of the thread's block. Storage of the initial-exec model: it exists before the first
// instruction of the thread, and an access is one load.
global_asm!(
    ".pushsection .tbss.memferry_preload_block,\"awT\",@nobits",
    ".globl memferry_preload_block",
    ".hidden memferry_preload_block",
    ".type memferry_preload_block,@tls_object",
    ".size memferry_preload_block,8",
    ".p2align 3",
    "memferry_preload_block:",
    ".zero 8",
    ".popsection",
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

/// A function that counts a call and continues with the C library's, unless the call is sampled.
macro_rules! counting {
    ($($name:ident, $entry:ident, $operation:literal, $code:literal;)*) => {$(
        #[unsafe(naked)]
        unsafe extern "C" fn $name(target: usize, other: usize, bytes: usize) -> usize {
            naked_asm!(
                "mov r11, qword ptr [rip + memferry_preload_block@GOTTPOFF]",
                "mov r10, qword ptr fs:[r11]",
                "test r10, r10",
                "jz 2f",
                "lea rax, [rdx + {weight}]",
                "sub qword ptr [r10 + {countdown}], rax",
                "js 2f",
                "mov rax, rdx",
                "or rax, 1",
                "bsr rax, rax",
                "shl eax, 4",
                "inc qword ptr [r10 + rax + {counts}]",
                "add qword ptr [r10 + rax + {counts} + 8], rdx",
                "jmp qword ptr [rip + {entry} + 16]",
                "2:",
                "mov ecx, {code}",
                "mov r8, qword ptr [rsp]",
                "jmp {sampled}",
                weight = const CALL_WEIGHT,
                countdown = const COUNTDOWN,
                counts = const $operation * OPERATION_BYTES,
                code = const $code,
                entry = sym real::$entry,
                sampled = sym sampled,
            )
        }
    )*};
}

counting! {
    count_memcpy, MEMCPY, 0, 0;
    count_memmove, MEMMOVE, 1, 1;
    count_memset, MEMSET, 2, 2;
    count_memcmp, MEMCMP, 3, 3;
    count_mempcpy, MEMPCPY, 0, 4;
}

/// The functions by the code that `counting` passes, and the operation that they count as.
static BY_CODE: [(&Entry, usize); 5] = [
    (&real::MEMCPY, 0),
    (&real::MEMMOVE, 1),
    (&real::MEMSET, 2),
    (&real::MEMCMP, 3),
    (&real::MEMPCPY, 0),
];

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
    set_own_block(ptr::null());
    if let Some(file) = file() {
        file.processes.fetch_add(1, Ordering::Relaxed);
    }
}

extern "C" fn thread_ended(block: *mut c_void) {
    set_own_block(ptr::null());
    // SAFETY: the value of the key is the block that this thread has claimed.
    unsafe { &*block.cast::<Block>() }.owner.store(0, Ordering::Release);
}

fn file() -> Option<&'static CallProfile> {
    // SAFETY: null, or the mapping, which stays.
    unsafe { FILE.load(Ordering::Acquire).as_ref() }
}

/// A call that is sampled, or the first of its thread.
unsafe extern "C" fn sampled(
    a: usize,
    b: usize,
    bytes: usize,
    code: usize,
    caller: usize,
) -> usize {
    let (entry, operation) = BY_CODE[code];
    let call: Call = entry.real();
    let Some(file) = file() else {
        // SAFETY: the arguments are those of the program's own call.
        return unsafe { call(a, b, bytes) };
    };
    let (block, is_new) = claimed_block(file);
    // First of all, so that a signal handler that interrupts this counts as usual.
    block.countdown.store(next_interval(block), Ordering::Relaxed);
    let class = class_of(bytes);
    add(&block.counts[operation][class].calls, 1);
    add(&block.counts[operation][class].bytes, bytes as u64);
    if is_new {
        // SAFETY: as above.
        return unsafe { call(a, b, bytes) };
    }
    let begin = ticks();
    // SAFETY: as above.
    let result = unsafe { call(a, b, bytes) };
    let took = ticks().wrapping_sub(begin);
    let took = took.saturating_sub(file.timer_ticks.load(Ordering::Relaxed));
    let time = &file.times[operation][class];
    time.calls.fetch_add(1, Ordering::Relaxed);
    time.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    time.ticks.fetch_add(took, Ordering::Relaxed);
    record_caller(file, operation, bytes, took, caller);
    result
}

/// Adds to a counter that only this thread writes.
fn add(counter: &std::sync::atomic::AtomicU64, more: u64) {
    counter.store(counter.load(Ordering::Relaxed).wrapping_add(more), Ordering::Relaxed);
}

/// A random weight around the average, so that samples do not follow the rhythm of a loop.
fn next_interval(block: &Block) -> i64 {
    let mut random = block.random.load(Ordering::Relaxed);
    random ^= random << 13;
    random ^= random >> 7;
    random ^= random << 17;
    block.random.store(random, Ordering::Relaxed);
    SAMPLE_WEIGHT / 2 + (random % SAMPLE_WEIGHT as u64) as i64
}

/// The block of this thread, and whether it was claimed just now.
fn claimed_block(file: &'static CallProfile) -> (&'static Block, bool) {
    // SAFETY: the word is null or the address of a block in the mapping.
    if let Some(block) = unsafe { own_block().as_ref() } {
        return (block, false);
    }
    let block = claim(file, system::process_id());
    block.random.store(ticks() | 1, Ordering::Relaxed);
    set_own_block(block);
    let key = THREAD_KEY.load(Ordering::Relaxed);
    let is_shared = ptr::eq(block, &file.blocks[0]);
    if key != u32::MAX && !is_shared {
        // SAFETY: the key exists, and its value is inside the thread's own descriptor.
        unsafe { libc::pthread_setspecific(key, ptr::from_ref(block).cast()) };
    }
    (block, true)
}

/// Claims a free block, or one whose process has ended. Without one, block 0, which threads share.
fn claim(file: &'static CallProfile, process: u32) -> &'static Block {
    for block in &file.blocks[1..BLOCKS] {
        let owner = block.owner.load(Ordering::Relaxed);
        let own = u64::from(process);
        let is_free = owner == 0 || (owner != own && !has_process(owner as usize));
        if is_free
            && block.owner.compare_exchange(owner, own, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        {
            return block;
        }
    }
    &file.blocks[0]
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
