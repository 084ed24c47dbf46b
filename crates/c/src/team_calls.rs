//! The calls for teams: collective operations of many processes. As in `lib.rs`, comments here are those of the
//! header.

use std::ffi::{c_char, c_int, c_void};

use memferry::message::Reduction;

use crate::code::{ADMA_EFAULT, CallError};
use crate::global::teams;
use crate::guard::guarded;
use crate::memory;
use crate::teams::{check, reduction};

/// Elements of one byte with a sign, for `adma_allreduce` and `adma_reduce`.
pub const ADMA_INT8: c_int = 0;
/// Elements of two bytes with a sign.
pub const ADMA_INT16: c_int = 1;
/// Elements of four bytes with a sign.
pub const ADMA_INT32: c_int = 2;
/// Elements of eight bytes with a sign.
pub const ADMA_INT64: c_int = 3;
/// Elements of one byte without a sign.
pub const ADMA_UINT8: c_int = 4;
/// Elements of two bytes without a sign.
pub const ADMA_UINT16: c_int = 5;
/// Elements of four bytes without a sign.
pub const ADMA_UINT32: c_int = 6;
/// Elements of eight bytes without a sign.
pub const ADMA_UINT64: c_int = 7;
/// Floating-point numbers of four bytes.
pub const ADMA_FLOAT: c_int = 8;
/// Floating-point numbers of eight bytes.
pub const ADMA_DOUBLE: c_int = 9;

/// The sum. Integers wrap around.
pub const ADMA_SUM: c_int = 0;
/// The product. Integers wrap around.
pub const ADMA_PRODUCT: c_int = 1;
/// The minimum. A NaN is kept if rank 0 has it, and ignored otherwise.
pub const ADMA_MIN: c_int = 2;
/// The maximum, with a NaN as in the minimum.
pub const ADMA_MAX: c_int = 3;
/// And, bit by bit; for integers only.
pub const ADMA_BIT_AND: c_int = 4;
/// Or, bit by bit; for integers only.
pub const ADMA_BIT_OR: c_int = 5;
/// Exclusive or, bit by bit; for integers only.
pub const ADMA_BIT_XOR: c_int = 6;
/// 1 if all elements are other than 0, else 0.
pub const ADMA_LOGICAL_AND: c_int = 7;
/// 1 if an element is other than 0, else 0.
pub const ADMA_LOGICAL_OR: c_int = 8;
/// 1 if an odd number of elements is other than 0, else 0.
pub const ADMA_LOGICAL_XOR: c_int = 9;

/// Joins a team of `size` processes of one user on this machine, with a rank from 0 to `size - 1`. Waits until all
/// have joined, for at most 10 seconds.
///
/// All processes of a team call the same collective operations, in the same order and with the same lengths. When a
/// process of the team exits or leaves, the operations of all others fail with `ADMA_EPIPE`, and
/// `adma_last_error` names the rank. While one thread is in an operation of a team, others wait.
///
/// Returns the number of the team (0 or above), or a negative code: `ADMA_ETIMEDOUT` if a rank is missing.
///
/// # Safety
/// `name` must be null or a string that ends with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn adma_team_join(name: *const c_char, rank: usize, size: usize) -> c_int {
    guarded("adma_team_join", || {
        // SAFETY: the caller guarantees it.
        teams().join(unsafe { memory::text(name) }?, rank, size)
    })
}

/// Leaves a team.
///
/// Returns 0, or `ADMA_EBADF` if there is no such team.
#[unsafe(no_mangle)]
pub extern "C" fn adma_team_leave(team: c_int) -> c_int {
    guarded("adma_team_leave", || teams().leave(team).map(|()| 0))
}

/// Waits until all ranks of a team have called it.
///
/// Returns 0 or a negative code, as all collective operations: `ADMA_EPIPE` if a rank has exited or left,
/// `ADMA_EPROTO` if a rank has called something else.
#[unsafe(no_mangle)]
pub extern "C" fn adma_barrier(team: c_int) -> c_int {
    guarded("adma_barrier", || Ok(teams().get(team)?.barrier().map(|()| 0)?))
}

/// Copies `len` bytes at `addr` from rank `root` to all other ranks.
///
/// Returns 0 or a negative code.
///
/// # Safety
/// Until this returns, `addr` must be valid for `len` bytes, for reading at the root and for writing elsewhere, and no
/// other thread may use it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn adma_broadcast(
    team: c_int,
    addr: *mut c_void,
    len: usize,
    root: usize,
) -> c_int {
    guarded("adma_broadcast", || {
        let team = teams().get(team)?;
        check(addr, len, 1)?;
        // SAFETY: the caller guarantees the memory until this returns.
        unsafe { team.broadcast_raw(addr.cast(), len, root)? };
        Ok(0)
    })
}

/// Reduces `count` elements of a type at `src` of all ranks by an operation, element by element and in the order of
/// the ranks, to `dst` of all ranks. `src` and `dst` may be equal.
///
/// Returns 0 or a negative code.
///
/// # Safety
/// Until this returns, `src` must be valid for reading and `dst` for writing of `count` elements, and no other thread
/// may use them. If they are not equal, they must not overlap.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn adma_allreduce(
    team: c_int,
    src: *const c_void,
    dst: *mut c_void,
    count: usize,
    element_type: c_int,
    operation: c_int,
) -> c_int {
    guarded("adma_allreduce", || {
        let team = teams().get(team)?;
        let (mut reduction, bytes) = reduction(element_type, operation)?;
        check(src, bytes, count)?;
        check(dst, bytes, count)?;
        // SAFETY: the caller guarantees the memory until this returns.
        unsafe { team.allreduce_raw(&mut reduction, src.cast(), dst.cast(), count)? };
        Ok(0)
    })
}

/// As `adma_allreduce`, to `dst` of rank `root` alone; the other ranks may pass null.
///
/// Returns 0 or a negative code.
///
/// # Safety
/// As `adma_allreduce`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn adma_reduce(
    team: c_int,
    src: *const c_void,
    dst: *mut c_void,
    count: usize,
    element_type: c_int,
    operation: c_int,
    root: usize,
) -> c_int {
    guarded("adma_reduce", || {
        let team = teams().get(team)?;
        let (mut reduction, bytes) = reduction(element_type, operation)?;
        check(src, bytes, count)?;
        if team.rank() == root {
            check(dst, bytes, count)?;
        }
        // SAFETY: the caller guarantees the memory until this returns.
        unsafe { team.reduce_raw(&mut reduction, src.cast(), dst.cast(), count, root)? };
        Ok(0)
    })
}

/// As `adma_allreduce`, with a function and elements of `element_len` bytes. The function combines `count` elements at
/// `into`, of some ranks, with those at `from`, of the next rank, and writes the result to `into`. It is called in the
/// order of the ranks, several times, each time for other elements. It must make no calls for this team.
///
/// Returns 0 or a negative code.
///
/// # Safety
/// As `adma_allreduce`; the function must be valid with this argument.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn adma_allreduce_by(
    team: c_int,
    src: *const c_void,
    dst: *mut c_void,
    count: usize,
    element_len: usize,
    combine: Option<
        unsafe extern "C" fn(
            into: *mut c_void,
            from: *const c_void,
            count: usize,
            arg: *mut c_void,
        ),
    >,
    arg: *mut c_void,
) -> c_int {
    guarded("adma_allreduce_by", || {
        let team = teams().get(team)?;
        let combine =
            combine.ok_or_else(|| CallError::new(ADMA_EFAULT, "the function is a null pointer"))?;
        check(src, element_len, count)?;
        check(dst, element_len, count)?;
        let combine = &mut |into: *mut u8, from: *const u8, count| {
            // SAFETY: the caller guarantees the function, and the team the memory.
            unsafe { combine(into.cast(), from.cast(), count, arg) };
            Ok(())
        };
        let reduction = &mut Reduction::Function { element_bytes: element_len, combine };
        // SAFETY: the caller guarantees the memory until this returns.
        unsafe { team.allreduce_raw(reduction, src.cast(), dst.cast(), count)? };
        Ok(0)
    })
}

/// Copies `len` bytes at `src` of each rank to `dst` of rank `root`, in the order of the ranks: `len` bytes for each.
/// At the root, `src` may be the place of its own bytes in `dst`. The other ranks may pass null for `dst`.
///
/// Returns 0 or a negative code.
///
/// # Safety
/// Until this returns, `src` must be valid for reading of `len` bytes, and `dst` at the root for writing of `len` bytes
/// for each rank, and no other thread may use them.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn adma_gather(
    team: c_int,
    src: *const c_void,
    dst: *mut c_void,
    len: usize,
    root: usize,
) -> c_int {
    guarded("adma_gather", || {
        let team = teams().get(team)?;
        check(src, len, 1)?;
        if team.rank() == root {
            check(dst, len, team.size())?;
        }
        // SAFETY: the caller guarantees the memory until this returns.
        unsafe { team.gather_raw(src.cast(), dst.cast(), len, root)? };
        Ok(0)
    })
}

/// As `adma_gather`, to all ranks.
///
/// Returns 0 or a negative code.
///
/// # Safety
/// As `adma_gather`, where every rank is a root.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn adma_allgather(
    team: c_int,
    src: *const c_void,
    dst: *mut c_void,
    len: usize,
) -> c_int {
    guarded("adma_allgather", || {
        let team = teams().get(team)?;
        check(src, len, 1)?;
        check(dst, len, team.size())?;
        // SAFETY: the caller guarantees the memory until this returns.
        unsafe { team.allgather_raw(src.cast(), dst.cast(), len)? };
        Ok(0)
    })
}

/// Copies the first `len` bytes at `src` of each rank to rank 0, the next `len` bytes to rank 1, and so on; `dst` gets
/// `len` bytes of each rank, in the order of the ranks. `src` and `dst` may be equal.
///
/// Returns 0 or a negative code.
///
/// # Safety
/// Until this returns, `src` must be valid for reading and `dst` for writing of `len` bytes for each rank, and no other
/// thread may use them. If they are not equal, they must not overlap.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn adma_alltoall(
    team: c_int,
    src: *const c_void,
    dst: *mut c_void,
    len: usize,
) -> c_int {
    guarded("adma_alltoall", || {
        let team = teams().get(team)?;
        check(src, len, team.size())?;
        check(dst, len, team.size())?;
        // SAFETY: the caller guarantees the memory until this returns.
        unsafe { team.alltoall_raw(src.cast(), dst.cast(), len)? };
        Ok(0)
    })
}
