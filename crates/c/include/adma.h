/*
 * adma.h - asynchronous memory copies, fills, compares and checksums; messages between two processes from memory
 * to memory; windows into the memory of another process: start one, compute, check whether it is
 * complete; and collective operations of many processes. Copies, fills and compares take memory of a GPU too, if one is in use (adma_use_gpu). Part
 * of Memferry. Link with -ladma.
 *
 * Memory. A call that starts an operation and returns at once (adma_icopy, adma_icopy_notify,
 * adma_icopy_many, adma_ifill_many, adma_icopy_crc, adma_icrc, adma_idualcast, adma_ideliver, adma_ideliver_notify, adma_iread, adma_iwrite, adma_iput, adma_iput_notify, adma_iget)
 * uses its memory until the operation is complete; the caller keeps it valid until then, and the memory
 * of a window until it is withdrawn. All other calls use memory only until they return. The library
 * frees none of the caller's memory, and allocates none for the caller but memory of a GPU. A length of
 * 0 is always valid, also with a null pointer.
 *
 * Cookies. Check those of copies with adma_check_copy and adma_wait_copy, those of reads, writes, puts
 * and gets with adma_check and adma_wait. No cookie and no number of a window is ever issued twice, and
 * none is both.
 *
 * Errors. Calls return a negative code, one of ADMA_E..., which is the negative of the closest Linux
 * errno. adma_strerror returns the meaning of a code, adma_last_error describes the last error in
 * detail. No call ends the program. An access to memory that is not mapped is a fault, as in memcpy.
 *
 * Threads. Every call may be made on every thread at any time. None may be made in a signal handler.
 *
 * Fork. A forked child may make every call: its first one opens the library again, with channels of
 * its own, and without the GPU of its parent. Cookies, links and windows from before the fork belong to
 * the parent, and are ADMA_ECHILD in the child, where the contents of the memory of those cookies are
 * undefined. Nothing changes in the parent; but a name that it closes stays in use until its children
 * have closed their copies of the descriptors too, by exec or by exiting.
 *
 * Settings come from the environment (MEMFERRY_CHANNELS and others) when the library, a link or a
 * listener opens. While one is invalid, every call that would open it returns ADMA_EDOM.
 */

#ifndef ADMA_H
#define ADMA_H

/* Generated from src/code.rs, src/lib.rs and the files of calls: edit those; see tests/header.rs. */

#include <stddef.h>
#include <stdint.h>

/**
 * The peer belongs to a user that is not allowed to connect.
 */
#define ADMA_EPERM -1

/**
 * The cookie or window is a number that was not issued yet.
 */
#define ADMA_ENOENT -2

/**
 * The engine failed, and the processor could not finish the rest.
 */
#define ADMA_EIO -5

/**
 * The memory cannot be accessed: is it still mapped?
 */
#define ADMA_ENXIO -6

/**
 * Neither a cookie nor a window: it is negative; often an error code that was not checked. Or not
 * the descriptor of an open link or listener.
 */
#define ADMA_EBADF -9

/**
 * The cookie, window or descriptor is from before a fork: only the parent process can use it.
 */
#define ADMA_ECHILD -10

/**
 * The system refused a thread, memory or another resource; may work later.
 */
#define ADMA_EAGAIN -11

/**
 * The GPU has no memory left, or the machine none that could be registered with it.
 */
#define ADMA_ENOMEM -12

/**
 * The profile of the machine (`MEMFERRY_PROFILE`) cannot be read or written, the name of a link is
 * a path that this user may not use, or the owner of a window does not permit this access.
 */
#define ADMA_EACCES -13

/**
 * A null pointer with a length above zero, or for a notification variable.
 */
#define ADMA_EFAULT -14

/**
 * The peer is stopped in the middle of an access to a window, whose memory must stay valid. Or an
 * engine has no free channel.
 */
#define ADMA_EBUSY -16

/**
 * The handle is not that of a window of this link's peer.
 */
#define ADMA_EXDEV -18

/**
 * No GPU is in use, or no GPU has this number, or it cannot be used.
 */
#define ADMA_ENODEV -19

/**
 * Another invalid argument, such as a notification variable that is not aligned to 8 bytes, an
 * empty name, empty rights, the cookie of a copy in place of that of a read or write, or a window
 * of the wrong side.
 */
#define ADMA_EINVAL -22

/**
 * Too many descriptors, links or windows are open.
 */
#define ADMA_EMFILE -24

/**
 * All cookies or numbers of windows are used up: call `adma_fini`, or close the link and open
 * another.
 */
#define ADMA_ENOSPC -28

/**
 * The peer has disconnected: its process has exited, or it closed the link.
 */
#define ADMA_EPIPE -32

/**
 * A variable in the environment (`MEMFERRY_CHANNELS` and so on) holds a value that is not valid.
 */
#define ADMA_EDOM -33

/**
 * A range outside its memory or its window.
 */
#define ADMA_ERANGE -34

/**
 * No message to read.
 */
#define ADMA_ENOMSG -42

/**
 * The cookie's copy, read or write ended so long ago that its result is no longer stored.
 */
#define ADMA_EIDRM -43

/**
 * Not started, because what it was ordered after failed.
 */
#define ADMA_ENOLINK -67

/**
 * The peer violates the protocol, or has another version of it.
 */
#define ADMA_EPROTO -71

/**
 * The profile of the machine (`MEMFERRY_PROFILE`) is not a profile, or the bytes are not the
 * handle of a window.
 */
#define ADMA_EBADMSG -74

/**
 * A range that runs past the end of the address space.
 */
#define ADMA_EOVERFLOW -75

/**
 * The process has opened and closed the library too often for cookies to stay unique.
 */
#define ADMA_EUSERS -87

/**
 * The message is longer than the buffer for it, which holds what fits.
 */
#define ADMA_EMSGSIZE -90

/**
 * No engine can do this operation on this memory.
 */
#define ADMA_EOPNOTSUPP -95

/**
 * Another listener has this name.
 */
#define ADMA_EADDRINUSE -98

/**
 * The name cannot be used: it is too long, or a path in a folder that does not exist.
 */
#define ADMA_EADDRNOTAVAIL -99

/**
 * Too many reads, writes, puts and gets of the link are in flight: wait for some of them first.
 */
#define ADMA_ENOBUFS -105

/**
 * The timeout passed before the notification variable held the value, or before the peer accepted
 * the connection.
 */
#define ADMA_ETIMEDOUT -110

/**
 * No process listens on this name, or the listener refused the connection.
 */
#define ADMA_ECONNREFUSED -111

/**
 * The system does not permit this process to access the memory of the window.
 */
#define ADMA_EHOSTUNREACH -113

/**
 * The library is open already, without this GPU.
 */
#define ADMA_EALREADY -114

/**
 * The read or write is not complete yet.
 */
#define ADMA_EINPROGRESS -115

/**
 * The cookie or window is from before an `adma_fini` or of a closed link, or was never issued; or
 * the window was withdrawn.
 */
#define ADMA_ESTALE -116

/**
 * Cancelled: this process closed the link or listener meanwhile.
 */
#define ADMA_ECANCELED -125

/**
 * An internal error of the library. The effect of the call is undefined.
 */
#define ADMA_ENOTRECOVERABLE -131

/**
 * Elements of one byte with a sign, for `adma_allreduce` and `adma_reduce`.
 */
#define ADMA_INT8 0

/**
 * Elements of two bytes with a sign.
 */
#define ADMA_INT16 1

/**
 * Elements of four bytes with a sign.
 */
#define ADMA_INT32 2

/**
 * Elements of eight bytes with a sign.
 */
#define ADMA_INT64 3

/**
 * Elements of one byte without a sign.
 */
#define ADMA_UINT8 4

/**
 * Elements of two bytes without a sign.
 */
#define ADMA_UINT16 5

/**
 * Elements of four bytes without a sign.
 */
#define ADMA_UINT32 6

/**
 * Elements of eight bytes without a sign.
 */
#define ADMA_UINT64 7

/**
 * Floating-point numbers of four bytes.
 */
#define ADMA_FLOAT 8

/**
 * Floating-point numbers of eight bytes.
 */
#define ADMA_DOUBLE 9

/**
 * The sum. Integers wrap around.
 */
#define ADMA_SUM 0

/**
 * The product. Integers wrap around.
 */
#define ADMA_PRODUCT 1

/**
 * The minimum. A NaN is kept if rank 0 has it, and ignored otherwise.
 */
#define ADMA_MIN 2

/**
 * The maximum, with a NaN as in the minimum.
 */
#define ADMA_MAX 3

/**
 * And, bit by bit; for integers only.
 */
#define ADMA_BIT_AND 4

/**
 * Or, bit by bit; for integers only.
 */
#define ADMA_BIT_OR 5

/**
 * Exclusive or, bit by bit; for integers only.
 */
#define ADMA_BIT_XOR 6

/**
 * 1 if all elements are other than 0, else 0.
 */
#define ADMA_LOGICAL_AND 7

/**
 * 1 if an element is other than 0, else 0.
 */
#define ADMA_LOGICAL_OR 8

/**
 * 1 if an odd number of elements is other than 0, else 0.
 */
#define ADMA_LOGICAL_XOR 9

/**
 * For `adma_expose`: the peer may get from the window.
 */
#define ADMA_READ 1

/**
 * For `adma_expose`: the peer may put to the window.
 */
#define ADMA_WRITE 2

/**
 * A copy of a batch: `len` bytes from `src` to `dst`.
 */
typedef struct adma_copy_item {
    /**
     * Address of the first byte to read.
     */
    const void *src;
    /**
     * Address of the first byte to write.
     */
    void *dst;
    /**
     * Length in bytes.
     */
    size_t len;
} adma_copy_item;

/**
 * A fill of a batch: `len` bytes at `dst` become `value`, converted to `unsigned char`.
 */
typedef struct adma_fill_item {
    /**
     * Address of the first byte to write.
     */
    void *dst;
    /**
     * Length in bytes.
     */
    size_t len;
    /**
     * The byte to write.
     */
    int value;
} adma_fill_item;

/**
 * A segment of a gather copy: `len` bytes at `addr`.
 */
typedef struct adma_piece {
    /**
     * Address of the first byte.
     */
    const void *addr;
    /**
     * Length in bytes.
     */
    size_t len;
} adma_piece;

/**
 * The handle of a window: 16 bytes, to be sent unchanged to the peer by any means.
 */
typedef struct adma_window {
    /**
     * Opaque.
     */
    uint8_t bytes[16];
} adma_window;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/**
 * Opens the library: loads or measures the profile of the machine, and starts the channels.
 *
 * Optional: the first call that moves or compares memory opens the library too. Call it to choose
 * when, or to detect an invalid setting in the environment early. Does nothing when the library is
 * open.
 *
 * Returns 0 or a negative code.
 */
int adma_init(void);

/**
 * Closes the library: leaves all teams, closes all links and listeners as `adma_close` does, waits for running calls
 * of other threads and for all copies in flight, then stops the channels. Calls that start
 * meanwhile wait, then open the library again.
 *
 * Optional: a program may end without it. Afterwards the library accesses no memory of the caller
 * any more, all windows are withdrawn and detached, all memory of a GPU is freed, and nothing
 * stays registered. Earlier cookies and windows are refused with `ADMA_ESTALE`. Does nothing when
 * the library is not open.
 *
 * Returns 0 or a negative code. `ADMA_EBUSY`: everything is closed, but a stopped process may
 * still write to the memory of a link that was closed now or earlier: see `adma_close`, and call
 * this again later.
 */
int adma_fini(void);

/**
 * Returns a text for every code, also for one that does not exist. It is constant and always
 * valid.
 */
const char *adma_strerror(int code);

/**
 * Describes the last failed call of the calling thread, and what to do about it; empty if no call
 * failed. Never null. Valid until the next call that fails on this thread, or until the thread
 * exits.
 */
const char *adma_last_error(void);

/**
 * Returns the version of the library, such as "0.1.0". It is constant and always valid.
 */
const char *adma_version(void);

/**
 * Starts `count` copies and returns at once: as `adma_icopy` for each of them, but they are
 * submitted together, which costs a fraction of that. The copies are not ordered: none may read or
 * write what another one writes. `src` and `dst` of one copy may overlap. All memory is ordinary
 * memory, not memory of a GPU.
 *
 * If `cookies` is null, returns one cookie (0 or above), of all copies: it is complete when all of
 * them are. Otherwise writes the cookie of each copy to `cookies` and returns 0. Cookies are for
 * `adma_check_copy` and `adma_wait_copy`, as that of `adma_icopy`. On an error, returns a negative
 * code, and then nothing is in flight: `ADMA_EFAULT` if `copies` is null and `count` is not 0, or
 * an address is null and its length is not 0; `ADMA_EINVAL` if `src` and `dst` of a copy overlap, with one
 * cookie for more than 1 GiB; `ADMA_EOPNOTSUPP` if any of the memory is that of a GPU.
 *
 * # Safety
 * `copies` must be valid for reading and `cookies`, if not null, for writing of `count` entries
 * until this returns. The memory of each copy is as for `adma_icopy`.
 */
int64_t adma_icopy_many(const struct adma_copy_item *copies,
                        size_t count,
                        int64_t *cookies);

/**
 * Starts `count` fills and returns at once, as `adma_icopy_many` does with copies.
 *
 * Returns a cookie, 0 or a negative code, as `adma_icopy_many`.
 *
 * # Safety
 * As for `adma_icopy_many`.
 */
int64_t adma_ifill_many(const struct adma_fill_item *fills, size_t count, int64_t *cookies);

/**
 * Copies `len` bytes from `src` to `dst` and returns when it is complete. Ranges that overlap give
 * the result of `memmove`.
 *
 * Returns 0 or a negative code; with a code, the contents of `dst` are undefined.
 *
 * # Safety
 * Until this returns, `src` must be valid for reading and `dst` for writing of `len` bytes, and
 * no other thread and no other copy may write to `src` or use `dst`.
 */
int adma_copy(const void *src, void *dst, size_t len);

/**
 * Starts copying `len` bytes from `src` to `dst` and returns at once; small copies may be complete
 * already. Ranges that overlap give the result of `memmove`. Copies in flight at the same time are
 * not ordered.
 *
 * Returns a cookie (0 or above) for `adma_check_copy` and `adma_wait_copy`, which any thread may
 * call, any number of times or never; or a negative code, and then nothing is in flight.
 *
 * # Safety
 * Until the copy is complete, `src` must stay valid for reading and `dst` for writing of `len`
 * bytes, and no thread may write to `src`, use `dst` or free either. It is complete when a check
 * returns 1, a wait returns 0, either returns the code of its failure, or `adma_fini` returns.
 */
int64_t adma_icopy(const void *src, void *dst, size_t len);

/**
 * As `adma_icopy`; and when all data is visible, `*variable` becomes `value`.
 *
 * To read the variable, use an atomic load with acquire order (`atomic_load` of `stdatomic.h`, or
 * `__atomic_load_n(variable, __ATOMIC_ACQUIRE)`), or `adma_wait_notify`: once it holds `value`,
 * the bytes at `dst` may be read. A copy that fails sets nothing. Several copies may set one
 * variable; each stores its own value, so the last to complete wins.
 *
 * Returns a cookie or a negative code, as `adma_icopy`. A null variable is `ADMA_EFAULT`, one that
 * is not aligned to 8 bytes `ADMA_EINVAL`.
 *
 * # Safety
 * As for `adma_icopy`; and `variable` must stay valid until the copy is complete, and meanwhile be
 * used with atomic loads and stores only. The value may be visible shortly before the cookie
 * reports that the copy is complete: before freeing the variable, wait for the cookie.
 */
int64_t adma_icopy_notify(const void *src,
                          void *dst,
                          size_t len,
                          uint64_t *variable,
                          uint64_t value);

/**
 * Checks whether the copy of a cookie is complete. Does not wait and does not open the library.
 *
 * Returns 1 if it is complete, and then its data is visible to the calling thread; 0 if not yet;
 * or a negative code: the error of the copy, or of the cookie. A second check of a complete copy
 * returns the same. In a forked child, the cookies of the parent are `ADMA_ECHILD`.
 */
int adma_check_copy(int64_t cookie);

/**
 * Waits until the copy of a cookie is complete, and copies chunks of it meanwhile. Does not open
 * the library.
 *
 * Returns 0 when it is complete, and then its data is visible to the calling thread; or a negative
 * code: the error of the copy, or of the cookie. A second wait for a complete copy returns the
 * same. In a forked child, the cookies of the parent are `ADMA_ECHILD`.
 */
int adma_wait_copy(int64_t cookie);

/**
 * Sleeps until `*variable` is `value`, for at most `timeout_ns` nanoseconds; without a limit if it
 * is negative. Does not open the library, and `adma_fini` does not wait for it.
 *
 * The copy that sets the value wakes the caller at once; a value that the program stores itself is
 * noticed within a fraction of a second. A failed copy sets nothing: if that is possible, give a
 * timeout and then check the cookie.
 *
 * Returns 0 when the variable holds the value, `ADMA_ETIMEDOUT` after the timeout, or another
 * negative code.
 *
 * # Safety
 * Until this returns, `variable` must stay valid, and be used with atomic loads and stores only.
 */
int adma_wait_notify(uint64_t *variable, uint64_t value, int64_t timeout_ns);

/**
 * Sets `len` bytes at `dst` to `value`, converted to `unsigned char`, and returns when it is
 * complete.
 *
 * Returns 0 or a negative code; with a code, the contents of `dst` are undefined.
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
 * byte that differs, unless the pointer is null; or a negative code. It is written only if 1 is
 * returned.
 *
 * # Safety
 * Until this returns, `a` and `b` must be valid for reading of `len` bytes, and no other thread
 * and no copy may write to them. `first_difference` must be null or valid for writing.
 */
int adma_compare(const void *a, const void *b, size_t len, size_t *first_difference);

/**
 * Computes the CRC-32C of `len` bytes at `src`, the checksum of iSCSI and ext4, and returns when it is
 * in `*crc`. That of "123456789" is 0xE3069283, that of no bytes 0. Memory of a GPU is
 * `ADMA_EOPNOTSUPP`.
 *
 * Returns 0 or a negative code, and then `*crc` is unchanged. A null `crc` is `ADMA_EFAULT`, one that
 * is not aligned to 4 bytes `ADMA_EINVAL`.
 *
 * # Safety
 * Until this returns, `src` must be valid for reading of `len` bytes, and no other thread and no copy
 * may write to it. `crc` must be null or valid for writing.
 */
int adma_crc(const void *src,
             size_t len,
             uint32_t *crc);

/**
 * As `adma_copy`, but source and target must not overlap (`ADMA_EINVAL`); `*crc` becomes the CRC-32C
 * of the data, as by `adma_crc`, and each byte is read from memory once.
 *
 * Returns 0 or a negative code, as `adma_copy`; with a code, `*crc` is unchanged.
 *
 * # Safety
 * As for `adma_copy`; and `crc` must be null or valid for writing, and not lie in `dst`.
 */
int adma_copy_crc(const void *src,
                  void *dst,
                  size_t len,
                  uint32_t *crc);

/**
 * As `adma_crc`, but returns at once. `*crc` is written before the computation is complete; one that
 * fails does not write it.
 *
 * Returns a cookie (0 or above) for `adma_check_copy` and `adma_wait_copy`, as `adma_icopy`; or a
 * negative code, and then nothing is in flight.
 *
 * # Safety
 * As for `adma_crc`, until the computation is complete; see `adma_icopy` for when it is. `*crc` must
 * not be used until then.
 */
int64_t adma_icrc(const void *src,
                  size_t len,
                  uint32_t *crc);

/**
 * As `adma_copy_crc`, but returns at once. `*crc` is written before the copy is complete; a copy that
 * fails does not write it.
 *
 * Returns a cookie or a negative code, as `adma_icopy`.
 *
 * # Safety
 * As for `adma_icopy`; and `crc` must stay valid until the copy is complete, not lie in `src` or
 * `dst`, and not be used until then.
 */
int64_t adma_icopy_crc(const void *src,
                       void *dst,
                       size_t len,
                       uint32_t *crc);

/**
 * Starts copying `count` segments to consecutive bytes at `dst`, and returns at once: a message
 * that arrived in packets is copied to its target as one copy. Single segments are not reported.
 * No segment may overlap the bytes at `dst`. Segments and `dst` are ordinary memory, not memory of
 * a GPU.
 *
 * Returns a cookie (0 or above) for `adma_check_copy` and `adma_wait_copy`, as `adma_icopy`; or a
 * negative code, and then nothing is in flight: `ADMA_EFAULT` if `pieces`, `dst` or a segment is
 * null and not empty, `ADMA_EINVAL` if a segment overlaps the bytes at `dst`, `ADMA_EOPNOTSUPP` if
 * any of the memory is that of a GPU.
 *
 * # Safety
 * `pieces` must be valid for reading of `count` entries until this returns; the list may be freed
 * afterwards. Until the copy is complete, the segments must stay valid for reading, and `dst` for
 * writing of their total length; no thread may write to the segments, use `dst` or free either.
 * `adma_icopy` defines when a copy is complete.
 */
int64_t adma_ideliver(const struct adma_piece *pieces, size_t count, void *dst);

/**
 * As `adma_ideliver`; and when the data of all segments is visible, `*variable` becomes `value`,
 * as in `adma_icopy_notify`.
 *
 * Returns a cookie or a negative code, as `adma_ideliver`. A null variable is `ADMA_EFAULT`, one that
 * is not aligned to 8 bytes `ADMA_EINVAL`.
 *
 * # Safety
 * As for `adma_ideliver`, and for the variable as for `adma_icopy_notify`.
 */
int64_t adma_ideliver_notify(const struct adma_piece *pieces,
                             size_t count,
                             void *dst,
                             uint64_t *variable,
                             uint64_t value);

/**
 * Copies `len` bytes from `src` to both `dst1` and `dst2`, and returns when both copies are complete.
 * Each byte is read from memory once. None of the three ranges may overlap another: that is
 * `ADMA_EINVAL`, and nothing is copied. Memory of a GPU is `ADMA_EOPNOTSUPP`.
 *
 * Returns 0 or a negative code; with a code, the contents of `dst1` and `dst2` are undefined.
 *
 * # Safety
 * Until this returns, `src` must be valid for reading, and `dst1` and `dst2` for writing of `len`
 * bytes, and no other thread and no other copy may write to `src` or use `dst1` or `dst2`.
 */
int adma_dualcast(const void *src,
                  void *dst1,
                  void *dst2,
                  size_t len);

/**
 * As `adma_dualcast`, but returns at once.
 *
 * Returns a cookie (0 or above) for `adma_check_copy` and `adma_wait_copy`, as `adma_icopy`; or a
 * negative code, and then nothing is in flight.
 *
 * # Safety
 * As for `adma_icopy`, with two targets.
 */
int64_t adma_idualcast(const void *src, void *dst1, void *dst2, size_t len);

/**
 * Opens the library with a GPU as an engine; `ordinal` is 0 for the first one. Needs only the
 * GPU's driver, which is loaded now. Takes about half a second.
 *
 * From now on every copy, fill and compare also takes pointers to memory of the GPU, from
 * `adma_device_alloc` or from CUDA itself, on either side, and detects the kind of memory itself.
 * The same happens without this call if `MEMFERRY_GPU` in the environment is `auto` or the number
 * of a GPU. Messages and windows take ordinary memory only.
 *
 * Other libraries of the program may use CUDA too: only memory passed to `adma_register` is
 * registered with it, unless `MEMFERRY_CUDA_SOLE_USER` in the environment is 1.
 *
 * Must be called before any call that opens the library: a copy, or `adma_init`. After an
 * `adma_fini` the library opens with the same GPU again, unless this is called first with another.
 * A forked child starts without it, and cannot use a GPU that its parent used.
 *
 * Returns 0, also if the library is open with this GPU already; or a negative code:
 * `ADMA_EALREADY` if it is open without it, `ADMA_ENODEV` if there is no such GPU or it cannot be
 * used, and then the library stays closed and can be used without one.
 */
int adma_use_gpu(int ordinal);

/**
 * Allocates `bytes` of memory of the GPU in use, and sets `*pointer` to it. Only the GPU, and the
 * copies, fills and compares of this library, can access it. Its contents are undefined. For 0
 * bytes the pointer is null.
 *
 * Free it with `adma_device_free`. `adma_fini` frees the rest.
 *
 * Returns 0; or a negative code, and then `*pointer` is unchanged: `ADMA_ENODEV` if no GPU is in
 * use, `ADMA_ENOMEM` if it has no memory left.
 *
 * # Safety
 * `pointer` must be null or valid for writing.
 */
int adma_device_alloc(size_t bytes, void **pointer);

/**
 * Frees memory of `adma_device_alloc`. A null pointer is permitted.
 *
 * Returns 0, or a negative code: `ADMA_EINVAL` if it is not such memory, or was freed before.
 *
 * # Safety
 * No copy in flight may use it.
 */
int adma_device_free(void *pointer);

/**
 * Registers `len` bytes of ordinary memory with the GPU in use, until `adma_unregister`: copies
 * between them and the GPU are as fast as possible from the first one on. For memory that is
 * copied repeatedly.
 *
 * Exactly these bytes are registered with CUDA, as one range. Other users of CUDA can copy them,
 * or a part of them; CUDA rejects a copy of theirs that crosses the boundary. So register what is
 * copied together as one range, best on pages of its own. The same range may be registered several
 * times, ranges may share a page, and one may contain another; any other overlap is refused.
 * Memory that CUDA has pinned already is used as it is.
 *
 * Returns 0; or a negative code, and then copies work as before: `ADMA_ENODEV` if no GPU is in
 * use, `ADMA_ENXIO` if the memory is not mapped, `ADMA_EOPNOTSUPP` if a part of it is registered,
 * or if it is of a kind that the GPU cannot reach, such as some mapped files, `ADMA_ENOMEM` if
 * there is not enough memory.
 *
 * # Safety
 * The memory must stay mapped until it is unregistered, by `adma_unregister` as often or by `adma_fini`.
 */
int adma_register(const void *addr,
                  size_t len);

/**
 * Undoes one `adma_register` of a range that starts at `addr`. Copies in flight are not affected.
 *
 * Returns 0, or a negative code: `ADMA_EINVAL` if no registered range starts there.
 */
int adma_unregister(const void *addr);

/**
 * Listens on a name that other processes connect to. A name with a slash in it is a path in the
 * file system, which `adma_close` removes; any other is valid on the whole machine and ends with
 * the process. Processes of other users are refused.
 *
 * Returns a descriptor (0 or above) for `adma_accept`, which `poll` and `epoll` report as readable
 * when a process has connected; or a negative code, such as `ADMA_EADDRINUSE`.
 *
 * # Safety
 * `name` must be null or a string that ends with a zero byte.
 */
int adma_listen(const char *name);

/**
 * Waits until a process connects to the name of a listener.
 *
 * Returns the descriptor of a link (0 or above), or a negative code; `ADMA_ECANCELED` if the
 * listener is closed meanwhile.
 */
int adma_accept(int listen_fd);

/**
 * Connects to a name that a process of the same user listens on. That process replies without a
 * call of its own, even before it calls `adma_accept`; this call waits for the reply, for at most 10
 * seconds.
 *
 * Returns the descriptor of a link (0 or above), or a negative code: `ADMA_ECONNREFUSED` if no
 * process listens, `ADMA_ETIMEDOUT` if there is no reply: it is stopped, or 64 links wait
 * for `adma_accept` already.
 *
 * A link has messages in both directions: the first write of one side matches the first read of
 * the other, the second the second, whichever comes first. Its descriptor is for the calls of this
 * header, and for `poll` and level-triggered `epoll`, which report it as readable while there is a
 * reason to call: a read or write is complete and its cookie was not checked, a message is unread
 * or has steps left, or the peer has disconnected. Call `adma_check` for every open cookie, or
 * `adma_peek` if there are none: a call that finds nothing makes the descriptor unreadable.
 *
 * Messages make progress while either side is inside a call; with `MEMFERRY_BACKGROUND=on` in the
 * environment, also while both compute. Close the descriptor with `adma_close`. `exec` closes it.
 *
 * # Safety
 * `name` must be null or a string that ends with a zero byte.
 */
int adma_connect(const char *name);

/**
 * Starts reading the next message of a link into `len` bytes at `addr`, and returns at once.
 *
 * Returns a cookie (0 or above) for `adma_check`, `adma_wait`, `adma_result` and `adma_lengths`,
 * which any thread may call, any number of times or never; or a negative code, and then nothing is
 * in flight.
 *
 * # Safety
 * Until the read is complete, `addr` must stay valid for writing of `len` bytes, and no thread may
 * use it. It is complete when a check returns 1 or the code of its failure, when a wait returns,
 * or when `adma_close` of its link or `adma_fini` returns 0.
 */
int64_t adma_iread(int fd, void *addr, size_t len);

/**
 * Starts writing `len` bytes at `addr` as one message to a link, and returns at once; small
 * messages may be sent already.
 *
 * Returns a cookie or a negative code, as `adma_iread`. A complete write means that its memory may
 * be used again: a small message may still be unread at the peer.
 *
 * # Safety
 * Until the write is complete, `addr` must stay valid for reading of `len` bytes, and no thread
 * may write to it. `adma_iread` defines when it is complete.
 */
int64_t adma_iwrite(int fd, const void *addr, size_t len);

/**
 * Reads the next message of a link into `len` bytes at `addr`, and returns when it has arrived.
 * Sleeps while there is nothing to do.
 *
 * Returns the length of the message (0 or above), or a negative code. A message that is longer
 * than `len` is `ADMA_EMSGSIZE`: then `addr` holds what fits, and the rest is lost.
 *
 * # Safety
 * Until this returns, `addr` must be valid for writing of `len` bytes, and no other thread may use
 * it.
 */
int64_t adma_read(int fd, void *addr, size_t len);

/**
 * Writes `len` bytes at `addr` as one message to a link, and returns when the memory may be used
 * again: at once for small messages, and when the peer has read them for large ones. Sleeps while
 * there is nothing to do.
 *
 * Returns 0 or a negative code. A read of the peer that was too short is not reported here.
 *
 * # Safety
 * Until this returns, `addr` must be valid for reading of `len` bytes, and no thread may write to
 * it.
 */
int adma_write(int fd, const void *addr, size_t len);

/**
 * Checks whether the read, write, put or get of a cookie is complete. Makes progress on the
 * messages of its link, and does not wait.
 *
 * Returns 1 if it is complete; 0 if not yet; or a negative code: its error, or that of the cookie.
 * `ADMA_EMSGSIZE` is a complete read of a longer message, with what fits: see `adma_lengths`. A
 * second check of a complete one returns the same until its link is closed: then it is
 * `ADMA_ESTALE`. Only a limited number of errors is stored; older ones become `ADMA_EIDRM`. In a
 * forked child, the cookies of the parent are `ADMA_ECHILD`.
 */
int adma_check(int64_t cookie);

/**
 * Waits until the read, write, put or get of a cookie is complete. Makes progress on the messages
 * of its link, and sleeps while there is nothing to do.
 *
 * Returns 0 when it is complete; or a negative code, as `adma_check`; or `ADMA_ECANCELED` if this
 * process closes the link meanwhile.
 */
int adma_wait(int64_t cookie);

/**
 * Returns the length of the message that the read of a cookie received, or that its write sent, or
 * of the data of its put or get. Does not wait.
 *
 * Returns the length (0 or above); `ADMA_EINPROGRESS` if it is not complete yet; or another
 * negative code, as `adma_check`. Stored for the last 4096 operations of a link, afterwards it is
 * `ADMA_EIDRM`.
 */
int64_t adma_result(int64_t cookie);

/**
 * As `adma_result`, but also for a read that was too short: `*message` becomes the length of the
 * message and `*buffer` that of the memory for it. Either pointer may be null.
 *
 * Returns 0; or a negative code, as `adma_result`, and then nothing is set.
 *
 * # Safety
 * `message` and `buffer` must be null or valid for writing.
 */
int adma_lengths(int64_t cookie, uint64_t *message, uint64_t *buffer);

/**
 * Returns the length of the message that the next read of a link will receive. Makes progress on
 * messages, receives none, and does not wait.
 *
 * Returns the length (0 or above); `ADMA_ENOMSG` if there is no message; or another negative code,
 * such as `ADMA_EPIPE` if there is none and the peer has disconnected.
 */
int64_t adma_peek(int fd);

/**
 * Closes a link or listener and its descriptor. The peer of a link is notified, and can still read
 * messages whose writes are complete. Reads, writes, puts and gets of this side that are not
 * complete fail with `ADMA_ECANCELED`, also those of calls on other threads; the windows of the
 * link are withdrawn and detached. Afterwards the cookies and windows of the link are
 * `ADMA_ESTALE`, and the link accesses no memory any more: if the peer is copying into it, the
 * call waits for that, up to a second.
 *
 * Returns 0, or `ADMA_EBADF` if it is not the descriptor of an open link or listener.
 * `ADMA_EBUSY`: it is closed, but the peer is stopped in the middle of a copy. The memory of reads
 * for whose cookies `adma_check` returns 0 must stay valid until it returns something else; that
 * of a window, until an `adma_withdraw` of it returns 0. Both happen when the peer continues or
 * exits. A descriptor that the program has closed with `close` is detected at the next call with
 * it, and its link is closed then.
 */
int adma_close(int fd);

/**
 * Joins a team of `size` processes of one user on this machine, with a rank from 0 to `size - 1`. Waits until all
 * have joined, for at most 10 seconds.
 *
 * All processes of a team call the same collective operations, in the same order and with the same lengths. When a
 * process of the team exits or leaves, the operations of all others fail with `ADMA_EPIPE`, and
 * `adma_last_error` names the rank. While one thread is in an operation of a team, others wait.
 *
 * Returns the number of the team (0 or above), or a negative code: `ADMA_ETIMEDOUT` if a rank is missing.
 *
 * # Safety
 * `name` must be null or a string that ends with a zero byte.
 */
int adma_team_join(const char *name,
                   size_t rank,
                   size_t size);

/**
 * Leaves a team.
 *
 * Returns 0, or `ADMA_EBADF` if there is no such team.
 */
int adma_team_leave(int team);

/**
 * Waits until all ranks of a team have called it.
 *
 * Returns 0 or a negative code, as all collective operations: `ADMA_EPIPE` if a rank has exited or left,
 * `ADMA_EPROTO` if a rank has called something else.
 */
int adma_barrier(int team);

/**
 * Copies `len` bytes at `addr` from rank `root` to all other ranks.
 *
 * Returns 0 or a negative code.
 *
 * # Safety
 * Until this returns, `addr` must be valid for `len` bytes, for reading at the root and for writing elsewhere, and no
 * other thread may use it.
 */
int adma_broadcast(int team,
                   void *addr,
                   size_t len,
                   size_t root);

/**
 * Reduces `count` elements of a type at `src` of all ranks by an operation, element by element and in the order of
 * the ranks, to `dst` of all ranks. `src` and `dst` may be equal.
 *
 * Returns 0 or a negative code.
 *
 * # Safety
 * Until this returns, `src` must be valid for reading and `dst` for writing of `count` elements, and no other thread
 * may use them. If they are not equal, they must not overlap.
 */
int adma_allreduce(int team,
                   const void *src,
                   void *dst,
                   size_t count,
                   int element_type,
                   int operation);

/**
 * As `adma_allreduce`, to `dst` of rank `root` alone; the other ranks may pass null.
 *
 * Returns 0 or a negative code.
 *
 * # Safety
 * As `adma_allreduce`.
 */
int adma_reduce(int team,
                const void *src,
                void *dst,
                size_t count,
                int element_type,
                int operation,
                size_t root);

/**
 * As `adma_allreduce`, with a function and elements of `element_len` bytes. The function combines `count` elements at
 * `into`, of some ranks, with those at `from`, of the next rank, and writes the result to `into`. It is called in the
 * order of the ranks, several times, each time for other elements. It must make no calls for this team.
 *
 * Returns 0 or a negative code.
 *
 * # Safety
 * As `adma_allreduce`; the function must be valid with this argument.
 */
int adma_allreduce_by(int team,
                      const void *src,
                      void *dst,
                      size_t count,
                      size_t element_len,
                      void (*combine)(void *into, const void *from, size_t count, void *arg),
                      void *arg);

/**
 * Copies `len` bytes at `src` of each rank to `dst` of rank `root`, in the order of the ranks: `len` bytes for each.
 * At the root, `src` may be the place of its own bytes in `dst`. The other ranks may pass null for `dst`.
 *
 * Returns 0 or a negative code.
 *
 * # Safety
 * Until this returns, `src` must be valid for reading of `len` bytes, and `dst` at the root for writing of `len` bytes
 * for each rank, and no other thread may use them.
 */
int adma_gather(int team,
                const void *src,
                void *dst,
                size_t len,
                size_t root);

/**
 * As `adma_gather`, to all ranks.
 *
 * Returns 0 or a negative code.
 *
 * # Safety
 * As `adma_gather`, where every rank is a root.
 */
int adma_allgather(int team, const void *src, void *dst, size_t len);

/**
 * Copies the first `len` bytes at `src` of each rank to rank 0, the next `len` bytes to rank 1, and so on; `dst` gets
 * `len` bytes of each rank, in the order of the ranks. `src` and `dst` may be equal.
 *
 * Returns 0 or a negative code.
 *
 * # Safety
 * Until this returns, `src` must be valid for reading and `dst` for writing of `len` bytes for each rank, and no other
 * thread may use them. If they are not equal, they must not overlap.
 */
int adma_alltoall(int team,
                  const void *src,
                  void *dst,
                  size_t len);

/**
 * Exposes `len` bytes at `addr` to the peer of a link, which then puts to them (`ADMA_WRITE`) or
 * gets from them (`ADMA_READ`, or both combined by `|`) without a call of this process. `*handle`
 * becomes the handle of the window: send it to the peer, which attaches it. It is of no use to any
 * other process.
 *
 * Returns the number of the window (0 or above) for `adma_wait_value` and `adma_withdraw`, or a
 * negative code.
 *
 * # Safety
 * Until the window is withdrawn, `addr` must stay valid for reading and writing of `len` bytes.
 * The peer may access it at any time meanwhile. It is withdrawn when `adma_withdraw`, `adma_close`
 * of the link or `adma_fini` returns 0. `handle` must be valid for writing.
 */
int64_t adma_expose(int fd, void *addr, size_t len, int rights, struct adma_window *handle);

/**
 * Withdraws a window of this process. The peer cannot start another access; the call waits for the
 * fragment that the peer is copying, after which the peer finds the window withdrawn. Calls of
 * other threads that wait for a value of the window return `ADMA_ESTALE`.
 *
 * Returns 0, and then the peer accesses the memory no more; or a negative code. `ADMA_EBUSY`: the
 * peer is stopped in the middle of a copy and did not finish it within a second. Then the memory
 * must stay valid: continue or end the other process, and call this again.
 */
int adma_withdraw(int64_t window);

/**
 * Waits until the variable at an offset of a window of this process is `at_least` or more, for at
 * most `timeout_ns` nanoseconds; without a limit if it is negative. The variable has 8 bytes and
 * is aligned to 8 in this process. Polls first, then sleeps; a notification of the peer wakes it.
 * A timeout of 0 checks without waiting.
 *
 * Returns 0, and then `*value`, unless the pointer is null, is what the variable holds, and the
 * data that was put before it is visible to the calling thread; or a negative code:
 * `ADMA_ETIMEDOUT` after the timeout, `ADMA_EPIPE` if the peer has disconnected, `ADMA_ESTALE` if
 * another thread withdraws the window, `ADMA_ECANCELED` if another thread closes the link.
 *
 * # Safety
 * `value` must be null or valid for writing.
 */
int adma_wait_value(int64_t window,
                    uint64_t offset,
                    uint64_t at_least,
                    int64_t timeout_ns,
                    uint64_t *value);

/**
 * Attaches a window of the peer of a link by its handle. The bytes are checked: those that are no
 * handle are `ADMA_EBADMSG`, the handle of a withdrawn window is `ADMA_ESTALE`, and a handle of
 * another process than the peer is `ADMA_EXDEV`.
 *
 * Returns the number of the window here (0 or above) for puts and gets, or a negative code.
 *
 * # Safety
 * `handle` must be null or valid for reading.
 */
int64_t adma_attach(int fd, const struct adma_window *handle);

/**
 * Detaches a window of the peer. Puts and gets in flight continue.
 *
 * Returns 0 or a negative code.
 */
int adma_detach(int64_t remote);

/**
 * Returns the length of a window in bytes, of one of this process or of an attached one.
 *
 * Returns the length (0 or above), or a negative code.
 */
int64_t adma_window_length(int64_t window);

/**
 * Copies `len` bytes at `src` to an offset of a window of the peer, and returns when they have
 * arrived. The peer need not call anything.
 *
 * Puts and gets of one link are executed in the order in which they were started, blocking or not.
 * After a failure the contents of its target are undefined.
 *
 * Returns 0 or a negative code: `ADMA_ERANGE` if it does not fit into the window, `ADMA_EACCES` if
 * the window's rights do not permit it, `ADMA_ESTALE` if the window was withdrawn, `ADMA_EPIPE` if
 * the peer has disconnected, `ADMA_EHOSTUNREACH` if the system does not permit access to that
 * memory, `ADMA_ENXIO` if it is no longer mapped in the peer.
 *
 * # Safety
 * Until this returns, `src` must be valid for reading of `len` bytes, and no thread may write to
 * it.
 */
int adma_put(int64_t remote, uint64_t offset, const void *src, size_t len);

/**
 * As `adma_put`; and when all data has arrived, the variable at `notify_offset` of the same window
 * becomes `value`, and the owner is woken if it waits for it: see `adma_wait_value`. The variable
 * has 8 bytes and is aligned to 8 in the owner's memory, otherwise it is `ADMA_EINVAL`. A failed
 * put sets nothing.
 *
 * Returns 0 or a negative code, as `adma_put`.
 *
 * # Safety
 * As for `adma_put`.
 */
int adma_put_notify(int64_t remote,
                    uint64_t offset,
                    const void *src,
                    size_t len,
                    uint64_t notify_offset,
                    uint64_t value);

/**
 * Copies `len` bytes at an offset of a window of the peer to `dst`, and returns when they have
 * arrived. Ordered with puts and other gets, see `adma_put`.
 *
 * Returns 0 or a negative code, as `adma_put`.
 *
 * # Safety
 * Until this returns, `dst` must be valid for writing of `len` bytes, and no other thread may use
 * it.
 */
int adma_get(int64_t remote, uint64_t offset, void *dst, size_t len);

/**
 * Starts a put, and returns at once; small ones may be complete already. A thread of the library,
 * or a thread that waits for it, executes it.
 *
 * Returns a cookie (0 or above) for `adma_check`, `adma_wait` and `adma_result`, as `adma_iread`;
 * or a negative code, and then nothing is in flight. A put is complete when its data is in the
 * window.
 *
 * # Safety
 * Until the put is complete, `src` must stay valid for reading of `len` bytes, and no thread may
 * write to it. `adma_iread` defines when it is complete; it also is when an `adma_fence` that was
 * called after it returns 0.
 */
int64_t adma_iput(int64_t remote, uint64_t offset, const void *src, size_t len);

/**
 * Starts a put with a notification, see `adma_put_notify`, and returns at once.
 *
 * Returns a cookie or a negative code, as `adma_iput`.
 *
 * # Safety
 * As for `adma_iput`.
 */
int64_t adma_iput_notify(int64_t remote,
                         uint64_t offset,
                         const void *src,
                         size_t len,
                         uint64_t notify_offset,
                         uint64_t value);

/**
 * Starts a get, and returns at once; small ones may be complete already.
 *
 * Returns a cookie or a negative code, as `adma_iput`.
 *
 * # Safety
 * Until the get is complete, `dst` must stay valid for writing of `len` bytes, and no other thread
 * may use it. `adma_iput` defines when it is complete.
 */
int64_t adma_iget(int64_t remote, uint64_t offset, void *dst, size_t len);

/**
 * Waits until every put and get that was started before, on any window of the same link, is
 * complete: its memory may be used. Its cookie reports the result shortly afterwards.
 *
 * Returns 0 or a negative code, such as `ADMA_EPIPE` if the peer has disconnected.
 */
int adma_fence(int64_t remote);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* ADMA_H */
