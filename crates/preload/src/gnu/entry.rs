//! The functions that programs call in place of those of the C library. One compare decides whether a
//! call is special; others are executed here if they are tiny, and else by the C library.
//! For `memferry run --profile` all calls are special, and tiny ones are counted here.
//!
//! All symbols are without a version, so that the loader binds references to every version to them:
//! `memcpy` of glibc 2.2.5, which allows overlapping ranges, as well as that of 2.14.

use std::arch::naked_asm;

use memferry_sys::call_profile::TINY_SIZES;

use super::profile::{self, Counted};
use super::real::{MEMCMP, MEMCPY, MEMMOVE, MEMPCPY, MEMSET};

/// Moves at most 128 bytes, or continues in the C library. All bytes are loaded before the first is stored, so
/// that overlapping ranges are right. `$result` computes what is returned. `$beside` is code that is jumped to.
macro_rules! move_tiny {
    ($result:literal, $beside:literal) => {
        concat!(
            $result,
            "\n cmp rdx, 16
             jb 3f
             cmp rdx, 32
             ja 4f
             movups xmm0, xmmword ptr [rsi]
             movups xmm1, xmmword ptr [rsi + rdx - 16]
             movups xmmword ptr [rdi], xmm0
             movups xmmword ptr [rdi + rdx - 16], xmm1
             ret\n",
            $beside,
            "\n .p2align 5
             3:
             cmp edx, 4
             jb 6f
             cmp edx, 8
             jb 5f
             mov rcx, qword ptr [rsi]
             mov r8, qword ptr [rsi + rdx - 8]
             mov qword ptr [rdi], rcx
             mov qword ptr [rdi + rdx - 8], r8
             ret
             .p2align 5
             4:
             cmp rdx, 64
             ja 4f
             movups xmm0, xmmword ptr [rsi]
             movups xmm1, xmmword ptr [rsi + 16]
             movups xmm2, xmmword ptr [rsi + rdx - 32]
             movups xmm3, xmmword ptr [rsi + rdx - 16]
             movups xmmword ptr [rdi], xmm0
             movups xmmword ptr [rdi + 16], xmm1
             movups xmmword ptr [rdi + rdx - 32], xmm2
             movups xmmword ptr [rdi + rdx - 16], xmm3
             ret
             .p2align 5
             5:
             mov ecx, dword ptr [rsi]
             mov r8d, dword ptr [rsi + rdx - 4]
             mov dword ptr [rdi], ecx
             mov dword ptr [rdi + rdx - 4], r8d
             ret
             .p2align 5
             6:
             test edx, edx
             je 7f
             mov ecx, edx
             shr ecx\n",
            // One, two or three bytes: the first, the middle and the last, which may be the same.
            "movzx r8d, byte ptr [rsi]
             movzx r9d, byte ptr [rsi + rcx]
             movzx r10d, byte ptr [rsi + rdx - 1]
             mov byte ptr [rdi], r8b
             mov byte ptr [rdi + rcx], r9b
             mov byte ptr [rdi + rdx - 1], r10b
             7:
             ret
             .p2align 5
             4:
             cmp rdx, 128
             ja 4f
             movups xmm0, xmmword ptr [rsi]
             movups xmm1, xmmword ptr [rsi + 16]
             movups xmm2, xmmword ptr [rsi + 32]
             movups xmm3, xmmword ptr [rsi + 48]
             movups xmm4, xmmword ptr [rsi + rdx - 64]
             movups xmm5, xmmword ptr [rsi + rdx - 48]
             movups xmm6, xmmword ptr [rsi + rdx - 32]
             movups xmm7, xmmword ptr [rsi + rdx - 16]
             movups xmmword ptr [rdi], xmm0
             movups xmmword ptr [rdi + 16], xmm1
             movups xmmword ptr [rdi + 32], xmm2
             movups xmmword ptr [rdi + 48], xmm3
             movups xmmword ptr [rdi + rdx - 64], xmm4
             movups xmmword ptr [rdi + rdx - 48], xmm5
             movups xmmword ptr [rdi + rdx - 32], xmm6
             movups xmmword ptr [rdi + rdx - 16], xmm7
             ret
             .p2align 5
             4:
             jmp qword ptr [rip + {entry} + 16]"
        )
    };
}

/// Fills at most 64 bytes, or continues in the C library. `$beside` as above.
macro_rules! fill_tiny {
    ($beside:literal) => {
        concat!(
            "mov rax, rdi
             cmp rdx, 64
             ja 4f
             cmp edx, 16
             jb 3f
             movd xmm0, esi
             punpcklbw xmm0, xmm0
             pshuflw xmm0, xmm0, 0
             punpcklqdq xmm0, xmm0
             cmp edx, 32
             ja 5f
             movups xmmword ptr [rdi], xmm0
             movups xmmword ptr [rdi + rdx - 16], xmm0
             ret
             5:
             movups xmmword ptr [rdi], xmm0
             movups xmmword ptr [rdi + 16], xmm0
             movups xmmword ptr [rdi + rdx - 32], xmm0
             movups xmmword ptr [rdi + rdx - 16], xmm0
             ret\n",
            $beside,
            "\n .p2align 5
             3:
             movzx ecx, sil
             movabs r8, 0x0101010101010101
             imul rcx, r8
             cmp rdx, 8
             jb 5f
             mov qword ptr [rdi], rcx
             mov qword ptr [rdi + rdx - 8], rcx
             ret
             .p2align 5
             5:
             cmp edx, 4
             jb 6f
             mov dword ptr [rdi], ecx
             mov dword ptr [rdi + rdx - 4], ecx
             ret
             .p2align 5
             6:
             cmp edx, 1
             jb 7f
             mov byte ptr [rdi + rdx - 1], cl
             je 7f
             mov word ptr [rdi], cx
             7:
             ret
             .p2align 5
             4:
             jmp qword ptr [rip + {entry} + 16]"
        )
    };
}

/// Continues in the C library. `$beside` as above. The jump would be the last byte of 32 in one place.
macro_rules! no_tiny {
    ($beside:literal) => {
        concat!(".p2align 5,, 1\n jmp qword ptr [rip + {entry} + 16]\n", $beside)
    };
}

/// A function with the body `$tiny` for tiny calls. Calls from the limit on are special. While calls are counted the
/// limit is 0, and tiny ones are counted and executed here: a jump to another function costs more than both.
///
/// Processors of the Skylake family keep no decoded instructions of 32 bytes in which a jump, with the comparison
/// before it, crosses or touches the end. So parts begin where 32 bytes begin: a test looks at every jump.
macro_rules! entry_point {
    (
        $(#[$attribute:meta])* $visibility:vis $name:ident, $entry:ident, $counted:expr,
        $tiny:ident!($($result:literal)?)
    ) => {
        $(#[$attribute])*
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        $visibility unsafe extern "C" fn $name(target: usize, other: usize, bytes: usize) -> usize {
            naked_asm!(
                "cmp rdx, qword ptr [rip + {entry}]",
                "jae 9f",
                $tiny!($($result,)? ""),
                ".p2align 5",
                "9:",
                "mov r11, qword ptr [rip + memferry_preload_block@GOTTPOFF]",
                "mov r10, qword ptr fs:[r11]",
                "cmp rdx, {tiny_sizes}",
                "jae 9f",
                "sub dword ptr [r10 + 4 * rdx + {tiny_left}], 1",
                "js 2f",
                $tiny!(
                    $($result,)?
                    "2:
                     mov ecx, {code}
                     mov r8, qword ptr [rsp]
                     jmp {sampled}"
                ),
                ".p2align 5",
                "9:",
                "jmp qword ptr [rip + {entry} + 8]",
                // Also aligns the section, and with it the first instruction.
                ".p2align 6",
                entry = sym $entry,
                tiny_sizes = const TINY_SIZES,
                tiny_left = const $counted.tiny_left(),
                code = const $counted as usize,
                sampled = sym profile::sampled,
            )
        }
    };
}

entry_point!(
    /// As in the C library, in both of its versions.
    pub(super) memcpy, MEMCPY, Counted::Memcpy, move_tiny!("mov rax, rdi")
);
entry_point!(
    /// As in the C library.
    pub(super) memmove, MEMMOVE, Counted::Memmove, move_tiny!("mov rax, rdi")
);
entry_point!(
    /// As in the C library.
    pub(super) mempcpy, MEMPCPY, Counted::Mempcpy, move_tiny!("{{disp8}} lea rax, [rdi + rdx]")
);
entry_point!(
    /// Another name of `mempcpy`.
    pub(super) __mempcpy, MEMPCPY, Counted::Mempcpy, move_tiny!("{{disp8}} lea rax, [rdi + rdx]")
);
entry_point!(
    /// As in the C library.
    pub(super) memset, MEMSET, Counted::Memset, fill_tiny!()
);
entry_point!(
    /// As in the C library. Only counted here.
    memcmp, MEMCMP, Counted::Memcmp, no_tiny!()
);
entry_point!(
    /// As in the C library. Only counted here.
    bcmp, MEMCMP, Counted::Memcmp, no_tiny!()
);

/// As in the C library: `memmove` with its first arguments exchanged.
#[unsafe(no_mangle)]
#[unsafe(naked)]
unsafe extern "C" fn bcopy(source: usize, target: usize, bytes: usize) {
    naked_asm!("xchg rdi, rsi", "jmp {memmove}", memmove = sym memmove)
}

/// A function that first compares the length with that of the target, as programs call it that are
/// compiled with `_FORTIFY_SOURCE`. Too long a call ends the program, by the C library.
macro_rules! checked {
    ($($name:ident, $function:ident;)*) => {$(
        /// As in the C library.
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        unsafe extern "C" fn $name(target: usize, other: usize, bytes: usize, room: usize) -> usize {
            naked_asm!(
                "cmp rcx, rdx",
                "jb 2f",
                "jmp {function}",
                "2:",
                "sub rsp, 8",
                "call {fail}",
                "ud2",
                function = sym $function,
                fail = sym __chk_fail,
            )
        }
    )*};
}

unsafe extern "C" {
    /// Ends the program with a message about an overflow.
    fn __chk_fail() -> !;
}

checked! {
    __memcpy_chk, memcpy;
    __memmove_chk, memmove;
    __mempcpy_chk, mempcpy;
    __memset_chk, memset;
}
