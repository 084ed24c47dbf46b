/*
 * adma.h - asynchronous memory copies, fills and compares: start one, compute on, ask whether it is
 * done. Part of Memferry. Link with -ladma.
 *
 * Memory. A call that returns at once (adma_icopy, adma_icopy_notify) leaves its memory to the copy
 * until that is over; the caller keeps it valid until then. All other calls use memory only until
 * they return. The library frees nothing that it is given, and gives out nothing to be freed.
 * Lengths of 0 are always fine, also with null pointers.
 *
 * Errors. Calls return a negative code, one of ADMA_E..., which is the negative of the Linux errno
 * that comes nearest. adma_strerror tells what a code means, adma_last_error what exactly went
 * wrong. No call ends the program. Memory that is not mapped is a fault here as in memcpy.
 *
 * Threads. Every call may be made on every thread at any time. None may be made in a signal handler.
 *
 * Fork. A forked child may make every call: its first one opens the library anew, with channels of
 * its own. Cookies from before the fork are the parent's, and ADMA_ECHILD in the child, where
 * nothing is known of what their dst holds. In the parent nothing changes.
 *
 * Settings come from the environment (MEMFERRY_CHANNELS and others) when the library opens. While
 * one is not valid, every call that would open the library returns ADMA_EDOM.
 */

#ifndef ADMA_H
#define ADMA_H

/* Generated from src/code.rs and src/lib.rs: edit those, then see tests/header.rs. */

#include <stddef.h>
#include <stdint.h>

/**
 * The cookie is a number that was not given out yet.
 */
#define ADMA_ENOENT -2

/**
 * The engine failed, and nobody could finish the rest.
 */
#define ADMA_EIO -5

/**
 * The memory cannot be reached: is it still mapped?
 */
#define ADMA_ENXIO -6

/**
 * Not a cookie: it is negative. Often the error code of a call that was not looked at.
 */
#define ADMA_EBADF -9

/**
 * The cookie is from before a fork: only the parent process can ask about this copy.
 */
#define ADMA_ECHILD -10

/**
 * The system refused a thread or other means that a channel needs; may work later.
 */
#define ADMA_EAGAIN -11

/**
 * The profile of the machine (`MEMFERRY_PROFILE`) cannot be read or written.
 */
#define ADMA_EACCES -13

/**
 * A null pointer with a length above zero, or for a notification variable.
 */
#define ADMA_EFAULT -14

/**
 * An engine has no more channels to give.
 */
#define ADMA_EBUSY -16

/**
 * An argument that makes no sense, such as a notification variable that is not aligned to 8 bytes.
 */
#define ADMA_EINVAL -22

/**
 * All cookies are used up: call `adma_fini` to begin anew.
 */
#define ADMA_ENOSPC -28

/**
 * A variable in the environment (`MEMFERRY_CHANNELS` and so on) holds a value that is not valid.
 */
#define ADMA_EDOM -33

/**
 * A range that does not lie inside its memory.
 */
#define ADMA_ERANGE -34

/**
 * The cookie's copy failed so long ago that the reason is no longer known.
 */
#define ADMA_EIDRM -43

/**
 * Not begun, because what it was ordered after did not succeed.
 */
#define ADMA_ENOLINK -67

/**
 * The profile of the machine (`MEMFERRY_PROFILE`) is not a profile.
 */
#define ADMA_EBADMSG -74

/**
 * A range that runs past the end of the address space.
 */
#define ADMA_EOVERFLOW -75

/**
 * The process has opened and closed the library too often for cookies to be told apart.
 */
#define ADMA_EUSERS -87

/**
 * No engine can do this operation on this memory.
 */
#define ADMA_EOPNOTSUPP -95

/**
 * The time was over before the notification variable held the value.
 */
#define ADMA_ETIMEDOUT -110

/**
 * The cookie is from before an `adma_fini`, or never was one.
 */
#define ADMA_ESTALE -116

/**
 * Cancelled.
 */
#define ADMA_ECANCELED -125

/**
 * A mistake inside the library. Nothing is known of what the call has done.
 */
#define ADMA_ENOTRECOVERABLE -131

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/**
 * Opens the library: measures or looks up what the machine can do, and starts the channels.
 *
 * Optional: every call that moves or compares memory does this when it is the first. Call it to
 * choose the moment, or to learn early that a setting in the environment is wrong. Does nothing
 * when the library is open.
 *
 * Returns 0 or a negative code.
 */
int adma_init(void);

/**
 * Closes the library: waits for calls under way on other threads and for all copies in flight,
 * then ends the channels. Calls that begin meanwhile wait, then open the library anew.
 *
 * Optional: a program may end without it. All memory of all copies is the caller's again
 * afterwards. Cookies from before are refused with `ADMA_ESTALE` from then on. Does nothing when
 * the library is not open.
 *
 * Returns 0 or a negative code.
 */
int adma_fini(void);

/**
 * Copies `len` bytes from `src` to `dst` and returns when it is done. Ranges that overlap give
 * the result of `memmove`.
 *
 * Returns 0 or a negative code; with a code, nothing is known of what `dst` holds.
 *
 * # Safety
 * Until this returns, `src` must be valid for reading and `dst` for writing of `len` bytes, and
 * no other thread and no other copy may write to `src` or use `dst`.
 */
int adma_copy(const void *src, void *dst, size_t len);

/**
 * Starts copying `len` bytes from `src` to `dst` and returns at once; small copies may be done
 * already. Ranges that overlap give the result of `memmove`. Copies in flight together have no
 * order among each other.
 *
 * Returns a cookie (0 or above) for `adma_check_copy` and `adma_wait_copy`, which any thread may
 * call, any number of times or never; or a negative code, and then nothing is in flight.
 *
 * # Safety
 * Until the copy is over, `src` must stay valid for reading and `dst` for writing of `len` bytes,
 * and nobody may write to `src` or use `dst`, nor free either. It is over when a check returns
 * 1, a wait returns 0, or `adma_fini` returns; also when either returns the code of its failure.
 */
int64_t adma_icopy(const void *src, void *dst, size_t len);

/**
 * As `adma_icopy`; and when all data is visible, `*variable` becomes `value`.
 *
 * To look at the variable, use an atomic load with acquire order (`atomic_load` of `stdatomic.h`,
 * or `__atomic_load_n(variable, __ATOMIC_ACQUIRE)`), or `adma_wait_notify`: once it holds `value`,
 * the bytes at `dst` may be read. A copy that fails sets nothing. Several copies may set one
 * variable; each stores its own value, so the last to end wins.
 *
 * Returns a cookie or a negative code, as `adma_icopy`. A null variable is `ADMA_EFAULT`, one that
 * is not aligned to 8 bytes `ADMA_EINVAL`.
 *
 * # Safety
 * As for `adma_icopy`; and `variable` must stay valid until the copy is over, and meanwhile be
 * used with atomic loads and stores only. The value may be seen an instant before the cookie says
 * that the copy is over: before freeing the variable, wait for the cookie.
 */
int64_t adma_icopy_notify(const void *src,
                          void *dst,
                          size_t len,
                          uint64_t *variable,
                          uint64_t value);

/**
 * Asks whether the copy of a cookie is over. Does not wait and does not open the library.
 *
 * Returns 1 if it is over, and then its data is visible to the calling thread; 0 if not yet; or a
 * negative code: what the copy failed with, or what is wrong with the cookie. Asking again about a
 * copy that is over gives the same answer. In a forked child, the cookies of the parent are
 * `ADMA_ECHILD`.
 */
int adma_check_copy(int64_t cookie);

/**
 * Waits until the copy of a cookie is over, working along on it meanwhile. Does not open the
 * library.
 *
 * Returns 0 when it is over, and then its data is visible to the calling thread; or a negative
 * code: what the copy failed with, or what is wrong with the cookie. Waiting again for a copy that
 * is over gives the same answer. In a forked child, the cookies of the parent are `ADMA_ECHILD`.
 */
int adma_wait_copy(int64_t cookie);

/**
 * Sleeps until `*variable` is `value`, for at most `timeout_ns` nanoseconds; for as long as it
 * takes if that is negative. Does not open the library and does not keep `adma_fini` waiting.
 *
 * Woken at once by the copy that sets the value; a value that the program stores by itself is seen
 * within a fraction of a second. A copy that fails sets nothing: where that may be, give a time
 * limit and then ask about the cookie.
 *
 * Returns 0 when the variable holds the value, `ADMA_ETIMEDOUT` when the time is over, or another
 * negative code.
 *
 * # Safety
 * Until this returns, `variable` must stay valid, and be used with atomic loads and stores only.
 */
int adma_wait_notify(uint64_t *variable, uint64_t value, int64_t timeout_ns);

/**
 * Sets `len` bytes at `dst` to `value`, converted to `unsigned char`, and returns when it is done.
 *
 * Returns 0 or a negative code; with a code, nothing is known of what `dst` holds.
 *
 * # Safety
 * Until this returns, `dst` must be valid for writing of `len` bytes, and no other thread and no
 * copy may use it.
 */
int adma_fill(void *dst, int value, size_t len);

/**
 * Compares `len` bytes at `a` and `b`.
 *
 * Returns 0 if they are equal; 1 if not, and then `*first_difference` is the offset of the first
 * byte that differs, unless the pointer is null; or a negative code. What it points to is left
 * alone unless 1 is returned.
 *
 * # Safety
 * Until this returns, `a` and `b` must be valid for reading of `len` bytes, and no other thread
 * and no copy may write to them. `first_difference` must be null or valid for writing.
 */
int adma_compare(const void *a, const void *b, size_t len, size_t *first_difference);

/**
 * What a code means: a text for every code, also for one that does not exist. It is constant and
 * valid for ever.
 */
const char *adma_strerror(int code);

/**
 * What exactly went wrong in the last call that failed on the calling thread, and what to do about
 * it; an empty text if none did. Never null. Valid until the next call that fails on this thread,
 * or the thread's end.
 */
const char *adma_last_error(void);

/**
 * The version of the library, such as "0.1.0". It is constant and valid for ever.
 */
const char *adma_version(void);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* ADMA_H */
