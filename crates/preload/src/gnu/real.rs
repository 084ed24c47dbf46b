//! The functions behind the entry points: those of the C library, and until they are found, plain
//! loops.

use std::arch::naked_asm;
use std::ffi::CStr;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

use super::lookup;

/// Where an entry point goes. Read by assembly, at these offsets.
#[repr(C)]
#[derive(Debug)]
pub(super) struct Entry {
    /// Calls of at least this many bytes are special. The greatest number if there are none; 0 if all calls are
    /// counted, and else not less than `TINY_SIZES`: smaller special calls are counted by the entry point, and
    /// others go to `special`.
    pub(super) limit: AtomicUsize,
    pub(super) special: AtomicPtr<()>,
    pub(super) real: AtomicPtr<()>,
}

impl Entry {
    const fn new(first: *mut ()) -> Self {
        let (special, real) = (AtomicPtr::new(first), AtomicPtr::new(first));
        Self { limit: AtomicUsize::new(usize::MAX), special, real }
    }

    /// Lets calls of at least `limit` bytes go to another function.
    pub(super) fn divert(&self, special: *const (), limit: usize) {
        self.special.store(special.cast_mut(), Ordering::Relaxed);
        self.limit.store(limit, Ordering::Release);
    }

    fn find(&self, name: &CStr) {
        // SAFETY: called by the initialiser, when all objects are relocated.
        if let Some(found) = unsafe { lookup::next_definition(name) } {
            self.real.store(found as *mut (), Ordering::Relaxed);
            self.special.store(found as *mut (), Ordering::Relaxed);
        }
    }
}

pub(super) static MEMCPY: Entry = Entry::new(plain_move as *mut ());
pub(super) static MEMMOVE: Entry = Entry::new(plain_move as *mut ());
pub(super) static MEMPCPY: Entry = Entry::new(plain_move_to_end as *mut ());
pub(super) static MEMSET: Entry = Entry::new(plain_set as *mut ());
pub(super) static MEMCMP: Entry = Entry::new(plain_compare as *mut ());

/// The signature of `memcpy` and its relatives, with a byte or a pointer as the second argument.
pub(super) type Call = unsafe extern "C" fn(usize, usize, usize) -> usize;

impl Entry {
    /// The function of the C library.
    pub(super) fn real(&self) -> Call {
        let real = self.real.load(Ordering::Relaxed);
        // SAFETY: the pointer is one of the functions of this file or of the C library, which all
        // have this signature.
        unsafe { std::mem::transmute::<*mut (), Call>(real) }
    }
}

/// Finds the functions of the C library.
pub(super) fn find() {
    // The older version of `memcpy` allows overlapping ranges, and both arrive here.
    MEMCPY.find(c"memmove");
    MEMMOVE.find(c"memmove");
    MEMPCPY.find(c"mempcpy");
    // The C library's `mempcpy` does not allow overlapping ranges. Nor does anybody expect it to.
    MEMSET.find(c"memset");
    MEMCMP.find(c"memcmp");
}

/// `memmove` without the C library.
#[unsafe(naked)]
unsafe extern "C" fn plain_move(target: usize, source: usize, bytes: usize) -> usize {
    naked_asm!(
        "mov rax, rdi",
        "mov rcx, rdx",
        "mov r8, rdi",
        "sub r8, rsi",
        // Backwards only if the target begins inside the source.
        "cmp r8, rdx",
        "jb 2f",
        "rep movsb",
        "ret",
        "2:",
        "lea rdi, [rdi + rdx - 1]",
        "lea rsi, [rsi + rdx - 1]",
        "std",
        "rep movsb",
        "cld",
        "ret",
    )
}

/// `mempcpy` without the C library.
#[unsafe(naked)]
unsafe extern "C" fn plain_move_to_end(target: usize, source: usize, bytes: usize) -> usize {
    naked_asm!("mov rcx, rdx", "rep movsb", "mov rax, rdi", "ret")
}

/// `memset` without the C library.
#[unsafe(naked)]
unsafe extern "C" fn plain_set(target: usize, byte: usize, bytes: usize) -> usize {
    naked_asm!("mov r8, rdi", "mov eax, esi", "mov rcx, rdx", "rep stosb", "mov rax, r8", "ret")
}

/// `memcmp` without the C library.
#[unsafe(naked)]
unsafe extern "C" fn plain_compare(left: usize, right: usize, bytes: usize) -> usize {
    naked_asm!(
        "xor ecx, ecx",
        "2:",
        "cmp rcx, rdx",
        "je 3f",
        "movzx eax, byte ptr [rdi + rcx]",
        "movzx r8d, byte ptr [rsi + rcx]",
        "inc rcx",
        "sub eax, r8d",
        "jz 2b",
        "ret",
        "3:",
        "xor eax, eax",
        "ret",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Calls a function and returns what it returned, and the 12 bytes after the call.
    fn on_bytes(call: Call, target: usize, source: usize, bytes: usize) -> (usize, [u8; 12]) {
        let mut memory = *b"abcdefghijkl";
        let start = memory.as_mut_ptr() as usize;
        // SAFETY: the tests below stay inside the twelve bytes.
        let result = unsafe { call(start + target, start + source, bytes) };
        (result - start, memory)
    }

    #[test]
    fn plain_moves_handle_every_overlap() {
        for target in 0..=8 {
            for source in 0..=8 {
                let mut expected = *b"abcdefghijkl";
                expected.copy_within(source..source + 4, target);
                let found = on_bytes(plain_move, target, source, 4);
                assert_eq!(found, (target, expected), "{source} to {target}");
            }
        }
        assert_eq!(on_bytes(plain_move, 3, 3, 0), (3, *b"abcdefghijkl"));
        assert_eq!(on_bytes(plain_move_to_end, 0, 8, 3), (3, *b"ijkdefghijkl"));
    }

    #[test]
    fn plain_fills_and_compares_are_right() {
        let mut memory = *b"abcdefgh";
        let start = memory.as_mut_ptr() as usize;
        // SAFETY: the ranges lie inside the eight bytes.
        unsafe {
            assert_eq!(plain_set(start + 2, 0x4141_4178, 3), start + 2);
            assert_eq!(&memory, b"abxxxfgh");
            let compare = |left: &[u8; 3], right: &[u8; 3]| {
                plain_compare(left.as_ptr() as usize, right.as_ptr() as usize, 3) as i32
            };
            assert_eq!(compare(b"abc", b"abc"), 0);
            assert!(compare(b"abc", b"ab\xFF") < 0 && compare(b"b\0\0", b"abc") > 0);
        }
    }

    #[test]
    fn the_functions_of_the_c_library_take_the_place_of_the_plain_ones() {
        let before = MEMSET.real.load(Ordering::Relaxed);
        find();
        assert_ne!(MEMSET.real.load(Ordering::Relaxed), before);
        assert_eq!(on_bytes(MEMMOVE.real(), 1, 0, 8), (1, *b"aabcdefghjkl"));
    }
}
