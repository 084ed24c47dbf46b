/*
 * adma.h - asynchronous memory copies, fills and compares, messages between two processes that go
 * from memory to memory, and windows, into the memory of another process: start one, compute on, ask
 * whether it is done. Copies, fills and compares take memory of a GPU too, if one is in use
 * (adma_use_gpu). Part of Memferry. Link with -ladma.
 *
 * Memory. A call that returns at once (adma_icopy, adma_icopy_notify, adma_ideliver,
 * adma_ideliver_notify, adma_iread, adma_iwrite, adma_iput, adma_iput_notify, adma_iget) leaves its
 * memory to the copy, read, write, put or get until that is over; the caller keeps it valid until then, and the memory of a window until that is
 * withdrawn. All other calls use memory only until they return. The library frees nothing that it is
 * given, and gives out nothing to be freed but memory of a GPU. Lengths of 0 are always fine, also with
 * null pointers.
 *
 * Cookies. Those of copies are asked about with adma_check_copy and adma_wait_copy, those of reads,
 * writes, puts and gets with adma_check and adma_wait. No cookie, and no number of a window, is ever
 * given out twice, nor is any both.
 *
 * Errors. Calls return a negative code, one of ADMA_E..., which is the negative of the Linux errno
 * that comes nearest. adma_strerror tells what a code means, adma_last_error what exactly went
 * wrong. No call ends the program. Memory that is not mapped is a fault here as in memcpy.
 *
 * Threads. Every call may be made on every thread at any time. None may be made in a signal handler.
 *
 * Fork. A forked child may make every call: its first one opens the library anew, with channels of
 * its own, and without the GPU of its parent. Cookies, links and windows from before the fork are the
 * parent's, and ADMA_ECHILD in the child, where nothing is known of what the memory of those cookies
 * holds. In the parent nothing changes; but what it closes is gone for good only when its children have
 * closed their copies of the descriptors too, by exec or by ending: until then a name stays in use.
 *
 * Settings come from the environment (MEMFERRY_CHANNELS and others) when the library, a link or a
 * listener opens. While one is not valid, every call that would open it returns ADMA_EDOM.
 */

#ifndef ADMA_H
#define ADMA_H

/* Generated from src/code.rs, src/lib.rs and the files of calls: edit those; see tests/header.rs. */

#include <stddef.h>
#include <stdint.h>

/**
 * The process at the other end belongs to a user that is not allowed here.
 */
#define ADMA_EPERM -1

/**
 * The cookie or window is a number that was not given out yet.
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
 * Neither a cookie nor a window: it is negative; often the error code of a call that was not looked
 * at. Or not the descriptor of an open link or listener.
 */
#define ADMA_EBADF -9

/**
 * The cookie, window or descriptor is from before a fork: only the parent process can use it.
 */
#define ADMA_ECHILD -10

/**
 * The system refused a thread, memory or other means; may work later.
 */
#define ADMA_EAGAIN -11

/**
 * The GPU has no memory left, or the machine none that could be registered with it.
 */
#define ADMA_ENOMEM -12

/**
 * The profile of the machine (`MEMFERRY_PROFILE`) cannot be read or written, the name of a link is a
 * path that this user may not use, or the owner of a window has not opened it for such an access.
 */
#define ADMA_EACCES -13

/**
 * A null pointer with a length above zero, or for a notification variable.
 */
#define ADMA_EFAULT -14

/**
 * The other side is stopped in the middle of an access to a window, whose memory must stay valid. Or
 * an engine has no more channels to give.
 */
#define ADMA_EBUSY -16

/**
 * The handle is not of a window of the process at the other end of this link.
 */
#define ADMA_EXDEV -18

/**
 * No GPU is in use, or there is none of this number, or it cannot be used.
 */
#define ADMA_ENODEV -19

/**
 * An argument that makes no sense, such as a notification variable that is not aligned to 8 bytes,
 * a name that is empty, rights that are none, the cookie of a copy where that of a read or write is
 * asked for, or a window of the wrong side.
 */
#define ADMA_EINVAL -22

/**
 * Too many descriptors, links or windows are open.
 */
#define ADMA_EMFILE -24

/**
 * All cookies or numbers of windows are used up: call `adma_fini`, or open the link anew.
 */
#define ADMA_ENOSPC -28

/**
 * The other side of the link is gone: its process has ended, or it closed the link.
 */
#define ADMA_EPIPE -32

/**
 * A variable in the environment (`MEMFERRY_CHANNELS` and so on) holds a value that is not valid.
 */
#define ADMA_EDOM -33

/**
 * A range that does not lie inside its memory, or inside its window.
 */
#define ADMA_ERANGE -34

/**
 * No message waits to be read.
 */
#define ADMA_ENOMSG -42

/**
 * The cookie's copy, read or write ended so long ago that what is asked is no longer known.
 */
#define ADMA_EIDRM -43

/**
 * Not begun, because what it was ordered after did not succeed.
 */
#define ADMA_ENOLINK -67

/**
 * The other side of the link does not keep to the protocol, or has another version of it.
 */
#define ADMA_EPROTO -71

/**
 * The profile of the machine (`MEMFERRY_PROFILE`) is not a profile, or bytes are not the handle of a
 * window.
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
 * The message is longer than the buffer for it, which holds as much as fits.
 */
#define ADMA_EMSGSIZE -90

/**
 * No engine can do this operation on this memory.
 */
#define ADMA_EOPNOTSUPP -95

/**
 * Somebody listens on this name already.
 */
#define ADMA_EADDRINUSE -98

/**
 * Nobody can listen on this name: it is too long, or a path in a folder that does not exist.
 */
#define ADMA_EADDRNOTAVAIL -99

/**
 * So many reads, writes, puts and gets of the link are under way that some must be waited for first.
 */
#define ADMA_ENOBUFS -105

/**
 * The time was over before the notification variable held the value, or before the other side of a
 * link answered.
 */
#define ADMA_ETIMEDOUT -110

/**
 * Nobody listens on this name, or who does refused.
 */
#define ADMA_ECONNREFUSED -111

/**
 * The system does not let this process reach the memory of the window.
 */
#define ADMA_EHOSTUNREACH -113

/**
 * The library is open already, without this GPU.
 */
#define ADMA_EALREADY -114

/**
 * The read or write is not over yet.
 */
#define ADMA_EINPROGRESS -115

/**
 * The cookie or window is from before an `adma_fini` or of a link that was closed, or never was one;
 * or the window was withdrawn.
 */
#define ADMA_ESTALE -116

/**
 * Cancelled: this side closed the link or listener meanwhile.
 */
#define ADMA_ECANCELED -125

/**
 * A mistake inside the library. Nothing is known of what the call has done.
 */
#define ADMA_ENOTRECOVERABLE -131

/**
 * For `adma_expose`: the other side may get from the window.
 */
#define ADMA_READ 1

/**
 * For `adma_expose`: the other side may put to the window.
 */
#define ADMA_WRITE 2

/**
 * A piece of memory that is delivered: `len` bytes at `addr`.
 */
typedef struct adma_piece {
    /**
     * Where it begins.
     */
    const void *addr;
    /**
     * How long it is.
     */
    size_t len;
} adma_piece;

/**
 * The name of a window, 16 bytes, to be sent to the other side, as they are, in any way.
 */
typedef struct adma_window {
    /**
     * Not for the program.
     */
    uint8_t bytes[16];
} adma_window;

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
 * Closes the library: closes all links and listeners as `adma_close` does, waits for calls under
 * way on other threads and for all copies in flight, then ends the channels. Calls that begin
 * meanwhile wait, then open the library anew.
 *
 * Optional: a program may end without it. All memory of all copies, reads and writes is the
 * caller's again afterwards, all windows are withdrawn and detached, memory of a GPU that the program
 * still has is given back, and nothing stays registered. Cookies and windows from before are refused
 * with `ADMA_ESTALE` from then on. Does nothing when the library is not open.
 *
 * Returns 0 or a negative code. `ADMA_EBUSY`: all is closed, but another process is stopped while it
 * writes to memory of a link, closed now or before: see `adma_close`, and call this again later.
 */
int adma_fini(void);

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
 * Starts copying `count` pieces, one behind the other, to `dst`, and returns at once: a message that
 * has arrived in packets goes where it is wanted, as one copy. Nothing is told of single pieces. No
 * piece may overlap the bytes at `dst`. Pieces and `dst` are ordinary memory, not that of a GPU.
 *
 * Returns a cookie (0 or above) for `adma_check_copy` and `adma_wait_copy`, as `adma_icopy`; or a
 * negative code, and then nothing is in flight: `ADMA_EFAULT` if `pieces`, `dst` or a piece is null and
 * not empty, `ADMA_EINVAL` if a piece overlaps the bytes at `dst`, `ADMA_EOPNOTSUPP` if memory is that
 * of a GPU.
 *
 * # Safety
 * `pieces` must be valid for reading of `count` pieces until this returns, and need not be longer.
 * Until the copy is over, all that they name must stay valid for reading, and `dst` for writing of as
 * many bytes as they have together; nobody may write to the former or use the latter, nor free either.
 * It is over when a copy would be, see `adma_icopy`.
 */
int64_t adma_ideliver(const struct adma_piece *pieces,
                      size_t count,
                      void *dst);

/**
 * As `adma_ideliver`; and when the data of all pieces is visible, `*variable` becomes `value`, as in
 * `adma_icopy_notify`.
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
 * Opens the library with a GPU that copies take part in; `ordinal` is 0 for the first one. Nothing but
 * its driver is needed, which is looked for now. Takes about half a second.
 *
 * From now on every copy, fill and compare also takes pointers to memory of the GPU, from
 * `adma_device_alloc` or from CUDA itself, on either side, and finds out by itself which memory is
 * where. The same happens without this call if `MEMFERRY_GPU` in the environment is `auto` or the
 * number of a GPU. Messages and windows take ordinary memory only.
 *
 * Others in the program may use CUDA too: no memory is registered with it but what `adma_register` is
 * given, unless `MEMFERRY_CUDA_SOLE_USER` in the environment is 1.
 *
 * Must come before all calls that open the library: a copy, or `adma_init`. After an `adma_fini` the
 * library opens with the same GPU again, unless this is called first with another. A forked child
 * begins without it, and cannot use a GPU that its parent used.
 *
 * Returns 0, also if the library is open with this GPU already; or a negative code:
 * `ADMA_EALREADY` if it is open without it, `ADMA_ENODEV` if there is no such GPU or it cannot be
 * used, and then the library stays closed and can be used without one.
 */
int adma_use_gpu(int ordinal);

/**
 * Takes `bytes` of memory of the GPU in use, and sets `*pointer` to it. Only the GPU can use it, and
 * the copies, fills and compares of this library. Its contents are not known. For 0 bytes the pointer
 * is null.
 *
 * Give it back with `adma_device_free`. What is left is given back by `adma_fini`.
 *
 * Returns 0; or a negative code, and then `*pointer` is left alone: `ADMA_ENODEV` if no GPU is in use,
 * `ADMA_ENOMEM` if it has no memory left.
 *
 * # Safety
 * `pointer` must be null or valid for writing.
 */
int adma_device_alloc(size_t bytes,
                      void **pointer);

/**
 * Gives back memory that `adma_device_alloc` took. A null pointer is fine.
 *
 * Returns 0, or a negative code: `ADMA_EINVAL` if it is not such memory, or was given back before.
 *
 * # Safety
 * No copy may use it any more.
 */
int adma_device_free(void *pointer);

/**
 * Registers `len` bytes of ordinary memory with the GPU in use, until `adma_unregister`: copies between
 * them and the GPU are as quick as they can be from the first one on. For memory that is copied again
 * and again.
 *
 * CUDA is given exactly these bytes, in one piece. Others who use CUDA can copy them, or a part of them;
 * a copy of theirs that reaches over the edge is refused by CUDA. So register what is copied together as
 * one range, best on pages of its own. The same range may be registered several times, ranges may share
 * a page, and one may lie inside another; a range that overlaps another otherwise is refused. Memory that
 * CUDA has pinned already is used as it is.
 *
 * Returns 0; or a negative code, and then copies work as they did: `ADMA_ENODEV` if no GPU is in use,
 * `ADMA_ENXIO` if the memory is not mapped, `ADMA_EOPNOTSUPP` if a part of it is registered, or if it is
 * of a kind that the GPU cannot reach, such as some mapped files, `ADMA_ENOMEM` if there is not enough
 * memory.
 *
 * # Safety
 * The memory must stay mapped until it is unregistered, by `adma_unregister` as often or by `adma_fini`.
 */
int adma_register(const void *addr,
                  size_t len);

/**
 * Undoes one `adma_register` that began at `addr`. Copies under way are not disturbed.
 *
 * Returns 0, or a negative code: `ADMA_EINVAL` if nothing that begins there is registered.
 */
int adma_unregister(const void *addr);

/**
 * Takes a name that other processes connect to. A name with a slash in it is a path in the file
 * system, and goes with `adma_close`; any other is known on the whole machine and vanishes with the
 * process. Processes of other users are refused.
 *
 * Returns a descriptor (0 or above) for `adma_accept`, which `poll` and `epoll` find readable when
 * somebody has connected; or a negative code, such as `ADMA_EADDRINUSE`.
 *
 * # Safety
 * `name` must be null or a text that ends with a zero byte.
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
 * Connects to a name that a process of the same user listens on, and waits until that process
 * accepts, for at most 10 seconds.
 *
 * Returns the descriptor of a link (0 or above), or a negative code: `ADMA_ECONNREFUSED` if nobody
 * listens, `ADMA_ETIMEDOUT` if nobody accepts.
 *
 * A link takes messages in both directions: the first write of one side meets the first read of the
 * other, the second the second, whichever comes first. Its descriptor is for the calls of this
 * header, and for `poll` and `epoll`, level-triggered, which find it readable while there is a
 * reason to make such a call: a read or write has ended and nobody has asked about its cookie, a
 * message waits to be read or wants to be moved on, or the other side is gone. Call `adma_check` for
 * the cookies that are open, or `adma_peek` if there are none: what they find nothing about, they
 * make unreadable.
 *
 * Messages move while either side is inside a call; with `MEMFERRY_BACKGROUND=on` in the
 * environment, also while both compute. Close the descriptor with `adma_close`. It is closed by
 * `exec`.
 *
 * # Safety
 * `name` must be null or a text that ends with a zero byte.
 */
int adma_connect(const char *name);

/**
 * Starts reading the next message of a link into `len` bytes at `addr`, and returns at once.
 *
 * Returns a cookie (0 or above) for `adma_check`, `adma_wait`, `adma_result` and `adma_lengths`,
 * which any thread may call, any number of times or never; or a negative code, and then nothing is
 * under way.
 *
 * # Safety
 * Until the read is over, `addr` must stay valid for writing of `len` bytes, and nobody may use it.
 * It is over when a check returns 1 or a code of its failure, when a wait returns, or when
 * `adma_close` of its link or `adma_fini` returns 0.
 */
int64_t adma_iread(int fd, void *addr, size_t len);

/**
 * Starts writing `len` bytes at `addr` as one message to a link, and returns at once; small messages
 * may be on their way already.
 *
 * Returns a cookie or a negative code, as `adma_iread`. That a write is over means that its memory
 * may be used again: a small message may still wait on the other side to be read.
 *
 * # Safety
 * Until the write is over, `addr` must stay valid for reading of `len` bytes, and nobody may write
 * to it. It is over when a read would be, see `adma_iread`.
 */
int64_t adma_iwrite(int fd,
                    const void *addr,
                    size_t len);

/**
 * Reads the next message of a link into `len` bytes at `addr`, and returns when it is there. Sleeps
 * while there is nothing to do.
 *
 * Returns the length of the message (0 or above), or a negative code. A message that is longer than
 * `len` is `ADMA_EMSGSIZE`: then `addr` holds as much of it as fits, and the rest is lost.
 *
 * # Safety
 * Until this returns, `addr` must be valid for writing of `len` bytes, and nobody may use it.
 */
int64_t adma_read(int fd, void *addr, size_t len);

/**
 * Writes `len` bytes at `addr` as one message to a link, and returns when the memory may be used
 * again: at once for small messages, and when the other side has read them for large ones. Sleeps
 * while there is nothing to do.
 *
 * Returns 0 or a negative code. That a read on the other side was too short does not show here.
 *
 * # Safety
 * Until this returns, `addr` must be valid for reading of `len` bytes, and nobody may write to it.
 */
int adma_write(int fd, const void *addr, size_t len);

/**
 * Asks whether the read, write, put or get of a cookie is over. Moves messages of its link on, and
 * does not wait.
 *
 * Returns 1 if it is over; 0 if not yet; or a negative code: what it failed with, or what is wrong
 * with the cookie. `ADMA_EMSGSIZE` is a read that is over with as much of a longer message as fits:
 * see `adma_lengths`. Asking again about one that is over gives the same answer, until its link is
 * closed: then it is `ADMA_ESTALE`. The reasons of only so many failures are known, the older ones
 * are then `ADMA_EIDRM`. In a forked child, the cookies of the parent are `ADMA_ECHILD`.
 */
int adma_check(int64_t cookie);

/**
 * Waits until the read, write, put or get of a cookie is over. Moves messages of its link on, and
 * sleeps while there is nothing to do.
 *
 * Returns 0 when it is over; or a negative code, as `adma_check`; or `ADMA_ECANCELED` if this side
 * closes the link meanwhile.
 */
int adma_wait(int64_t cookie);

/**
 * The length of the message that the read of a cookie got, or that its write wrote, or of the data
 * of its put or get. Does not wait.
 *
 * Returns it (0 or above); `ADMA_EINPROGRESS` if it is not over yet; or another negative code, as
 * `adma_check`. Known for the last 4096 operations of a link, afterwards it is `ADMA_EIDRM`.
 */
int64_t adma_result(int64_t cookie);

/**
 * As `adma_result`, but of a read that was too short as well: `*message` becomes the length of the
 * message and `*buffer` that of the memory that was given for it. Either pointer may be null.
 *
 * Returns 0; or a negative code, as `adma_result`, and then nothing is set.
 *
 * # Safety
 * `message` and `buffer` must be null or valid for writing.
 */
int adma_lengths(int64_t cookie, uint64_t *message, uint64_t *buffer);

/**
 * The length of the message that the next read of a link will get. Moves messages on, takes none,
 * and does not wait.
 *
 * Returns it (0 or above); `ADMA_ENOMSG` if no message waits; or another negative code, such as
 * `ADMA_EPIPE` if no message waits and none will come.
 */
int64_t adma_peek(int fd);

/**
 * Closes a link or listener and its descriptor. The other side of a link is told; what was written
 * and is over can still be read there. Reads, writes, puts and gets of this side that are not over
 * end without success, also those of calls on other threads, with `ADMA_ECANCELED`; the windows of
 * the link are withdrawn and detached. Afterwards the cookies and windows of the link are
 * `ADMA_ESTALE`, and all memory is the caller's again: if the other side is copying into it at this
 * moment, that is waited for, for a second.
 *
 * Returns 0, or `ADMA_EBADF` if it is not the descriptor of an open link or listener. `ADMA_EBUSY`:
 * it is closed, but the other process is stopped while it writes. The memory of reads whose cookies
 * `adma_check` calls not yet over (0) must stay valid until it does not; that of a window, until an
 * `adma_withdraw` of it returns 0. Both end when the other process goes on or ends. A descriptor that
 * the program has closed with `close` is noticed at the next call for it, and its link closed then.
 */
int adma_close(int fd);

/**
 * Exposes `len` bytes at `addr` to the other side of a link, which then puts to them (`ADMA_WRITE`)
 * or gets from them (`ADMA_READ`, or both with `|` between) without a word from this process.
 * `*handle` becomes the name of the window: send it to the other side, which attaches it. Knowing it
 * is no use to any other process.
 *
 * Returns the number of the window (0 or above) for `adma_wait_value` and `adma_withdraw`, or a
 * negative code.
 *
 * # Safety
 * Until the window is withdrawn, `addr` must stay valid for reading and writing of `len` bytes.
 * Whoever uses it meanwhile must expect that the other side does so too. It is withdrawn when
 * `adma_withdraw`, `adma_close` of the link or `adma_fini` returns 0. `handle` must be valid for
 * writing.
 */
int64_t adma_expose(int fd,
                    void *addr,
                    size_t len,
                    int rights,
                    struct adma_window *handle);

/**
 * Takes a window of this side back. The other side cannot begin another access; what it copies at
 * this moment, a piece of an access, is waited for, and it finds the window withdrawn after that.
 * Calls of other threads that wait for a value of the window end with `ADMA_ESTALE`.
 *
 * Returns 0, and then the memory is the caller's alone; or a negative code. `ADMA_EBUSY`: the other
 * side was stopped in the middle of a copy and did not finish it within a second. Then the memory
 * must stay valid: let the other process go on or end it, and call this again.
 */
int adma_withdraw(int64_t window);

/**
 * Waits until the variable at an offset of a window of this side is `at_least` or more, for at most
 * `timeout_ns` nanoseconds; for as long as it takes if that is negative. The variable is 8 bytes, on
 * a boundary of 8 in this process. Looks for a while, then sleeps; a notification of the other side
 * wakes it. To look without waiting, ask with a time of 0.
 *
 * Returns 0, and then `*value`, unless the pointer is null, is what the variable holds, and the data
 * that was put before it is visible to the calling thread; or a negative code: `ADMA_ETIMEDOUT` when
 * the time is over, `ADMA_EPIPE` if the other side is gone, `ADMA_ESTALE` if another thread withdraws
 * the window, `ADMA_ECANCELED` if another thread closes the link.
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
 * Attaches a window of the other side of a link by the handle that came from there. Any bytes may be
 * tried: those that are no handle are `ADMA_EBADMSG`, the handle of a window that was withdrawn is
 * `ADMA_ESTALE`, and one that is not of the process at the other end is `ADMA_EXDEV`.
 *
 * Returns the number of the window here (0 or above) for puts and gets, or a negative code.
 *
 * # Safety
 * `handle` must be null or valid for reading.
 */
int64_t adma_attach(int fd,
                    const struct adma_window *handle);

/**
 * Forgets a window of the other side. Puts and gets under way go on.
 *
 * Returns 0 or a negative code.
 */
int adma_detach(int64_t remote);

/**
 * The length of a window in bytes, of one of this side's or of one that is attached.
 *
 * Returns it (0 or above), or a negative code.
 */
int64_t adma_window_length(int64_t window);

/**
 * Copies `len` bytes at `src` to an offset of a window of the other side, and returns when they are
 * there. The other process need not call anything.
 *
 * Puts and gets of one link are carried out in the order in which they were begun, those that are
 * waited for and those that are not. One that fails leaves nothing known of the bytes that it was to
 * write.
 *
 * Returns 0 or a negative code: `ADMA_ERANGE` if it does not fit into the window, `ADMA_EACCES` if
 * the window is not open for it, `ADMA_ESTALE` if the window was withdrawn, `ADMA_EPIPE` if the other
 * side is gone, `ADMA_EHOSTUNREACH` if the system lets nobody reach that memory, `ADMA_ENXIO` if it
 * is no longer mapped there.
 *
 * # Safety
 * Until this returns, `src` must be valid for reading of `len` bytes, and nobody may write to it.
 */
int adma_put(int64_t remote,
             uint64_t offset,
             const void *src,
             size_t len);

/**
 * As `adma_put`; and when all data is there, the variable at `notify_offset` of the same window
 * becomes `value`, and the owner is woken if it waits for that: see `adma_wait_value`. The variable
 * is 8 bytes, on a boundary of 8 in the owner's memory, and otherwise `ADMA_EINVAL`. A put that fails
 * sets nothing.
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
 * Copies `len` bytes at an offset of a window of the other side to `dst`, and returns when they are
 * here. In order with puts and other gets, see `adma_put`.
 *
 * Returns 0 or a negative code, as `adma_put`.
 *
 * # Safety
 * Until this returns, `dst` must be valid for writing of `len` bytes, and nobody may use it.
 */
int adma_get(int64_t remote, uint64_t offset, void *dst, size_t len);

/**
 * Starts a put, and returns at once; small ones may be done already. A thread of the library carries
 * it out, or whoever waits for it.
 *
 * Returns a cookie (0 or above) for `adma_check`, `adma_wait` and `adma_result`, as `adma_iread`; or
 * a negative code, and then nothing is under way. That a put is over means that its data is in the
 * window.
 *
 * # Safety
 * Until the put is over, `src` must stay valid for reading of `len` bytes, and nobody may write to
 * it. It is over when a read would be, see `adma_iread`, or when an `adma_fence` that was called
 * after it returns 0.
 */
int64_t adma_iput(int64_t remote,
                  uint64_t offset,
                  const void *src,
                  size_t len);

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
 * Starts a get, and returns at once; small ones may be done already.
 *
 * Returns a cookie or a negative code, as `adma_iput`.
 *
 * # Safety
 * Until the get is over, `dst` must stay valid for writing of `len` bytes, and nobody may use it. It
 * is over when a put would be, see `adma_iput`.
 */
int64_t adma_iget(int64_t remote,
                  uint64_t offset,
                  void *dst,
                  size_t len);

/**
 * Waits until every put and get that was begun before, on any window of the same link, is over: its
 * memory may be used. How each of them ended, its cookie says, an instant later.
 *
 * Returns 0 or a negative code, such as `ADMA_EPIPE` if the other side is gone.
 */
int adma_fence(int64_t remote);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* ADMA_H */
