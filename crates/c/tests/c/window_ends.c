/* Errors of windows: invalid numbers, handles, rights and ranges, the end of a window, of a link
 * or of a process at any time, processes that are stopped, and forks. */

#define _GNU_SOURCE

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>

#include "descriptors.h"
#include "window.h"

enum { LARGE = 16 * 1024 * 1024, SMALL = 4096, BOTH = ADMA_READ | ADMA_WRITE };

static unsigned char bytes[SMALL];
static _Alignas(8) unsigned char small[SMALL];

/* An owner of a small window that stays until the peer is done. */
static void own_small(struct side *side) {
    int64_t window = expose_and_send(side, small, SMALL, BOTH);
    CHECK_IS(hear(side), 'e');
    CHECK_IS(adma_withdraw(window), 0);
}

/* The result of a put that is started, or the error of the start. */
static int start_and_wait(int64_t remote, const void *memory, size_t length) {
    int64_t cookie = adma_iput(remote, 0, memory, length);
    return cookie < 0 ? (int)cookie : adma_wait(cookie);
}

static void refused_by_every_access(int64_t remote, int code) {
    CHECK_IS(adma_put(remote, 0, bytes, 8), code);
    CHECK_IS(adma_get(remote, 0, bytes, 8), code);
    CHECK_IS(adma_put_notify(remote, 0, bytes, 8, 8, 1), code);
    CHECK_IS(adma_iput(remote, 0, bytes, 8), code);
    CHECK_IS(adma_iget(remote, 0, bytes, 8), code);
    CHECK_IS(adma_iput_notify(remote, 0, bytes, 8, 8, 1), code);
    CHECK_IS(adma_fence(remote), code);
    CHECK_IS(adma_detach(remote), code);
}

static void refused_by_every_call_of_the_owner(int64_t window, int code) {
    CHECK_IS(adma_wait_value(window, 0, 0, 0, NULL), code);
    CHECK_IS(adma_withdraw(window), code);
}

static void numbers_that_are_none(struct side *side) {
    int64_t remote = attach_sent(side), cookie = adma_iput(remote, 0, bytes, 1);
    unsigned char a = 1, b;
    int64_t copy = adma_icopy(&a, &b, 1);
    CHECK(cookie >= 0 && copy >= 0);
    int64_t strangers[] = {0, 1, copy, cookie, INT64_MAX, remote - 1000000, remote + 1000000, -1,
                           ADMA_EPIPE, INT64_MIN};
    int codes[] = {ADMA_EINVAL, ADMA_EINVAL, ADMA_EINVAL, ADMA_EINVAL, ADMA_EINVAL, ADMA_EINVAL,
                   ADMA_ENOENT, ADMA_EBADF, ADMA_EBADF, ADMA_EBADF};
    for (unsigned n = 0; n < sizeof codes / sizeof codes[0]; n++) {
        refused_by_every_access(strangers[n], codes[n]);
        refused_by_every_call_of_the_owner(strangers[n], codes[n]);
        CHECK_IS(adma_window_length(strangers[n]), codes[n]);
    }
    CHECK_SAYS("is it the error code of an earlier call?");
    /* A number of a window is no cookie. */
    CHECK_IS(adma_check(remote), ADMA_EINVAL);
    CHECK_IS(adma_wait(remote), ADMA_EINVAL);
    CHECK(adma_wait_copy(remote) < 0);

    /* Exposed and attached windows are not interchangeable. */
    struct adma_window handle;
    int64_t own = adma_expose(side->fd, bytes, SMALL, BOTH, &handle);
    CHECK(own >= 0 && own != remote);
    refused_by_every_access(own, ADMA_EINVAL);
    CHECK_SAYS("one of this process");
    refused_by_every_call_of_the_owner(remote, ADMA_EINVAL);
    CHECK_SAYS("one of the peer");

    /* A withdrawn window stays withdrawn, and no number is reused. */
    CHECK_IS(adma_detach(remote), 0);
    refused_by_every_access(remote, ADMA_ESTALE);
    CHECK_IS(adma_withdraw(own), 0);
    refused_by_every_call_of_the_owner(own, ADMA_ESTALE);
    CHECK_IS(adma_window_length(own), ADMA_ESTALE);
    int64_t next = adma_expose(side->fd, bytes, SMALL, BOTH, &handle);
    CHECK(next > own && next > remote);
    CHECK_IS(adma_wait_copy(copy), 0);
    CHECK_IS(adma_wait(cookie), 0);
    tell(side, 'e');
}

static void arguments_that_are_none(struct side *side) {
    struct adma_window handle = receive_handle(side), own;
    void *last = (void *)(UINTPTR_MAX - 15);
    int rights[] = {0, 4, -1, 7, INT32_MIN};
    for (unsigned n = 0; n < sizeof rights / sizeof rights[0]; n++) {
        CHECK_IS(adma_expose(side->fd, bytes, 1, rights[n], &own), ADMA_EINVAL);
        CHECK_SAYS("is not ADMA_READ, ADMA_WRITE");
    }
    CHECK_IS(adma_expose(side->fd, bytes, 1, BOTH, NULL), ADMA_EFAULT);
    CHECK_IS(adma_expose(side->fd, NULL, 1, BOTH, &own), ADMA_EFAULT);
    CHECK_IS(adma_expose(side->fd, last, 64, BOTH, &own), ADMA_EOVERFLOW);
    CHECK_IS(adma_expose(-1, bytes, 1, BOTH, &own), ADMA_EBADF);
    CHECK_IS(adma_expose(side->to, bytes, 1, BOTH, &own), ADMA_EBADF);
    CHECK_IS(adma_attach(side->fd, NULL), ADMA_EFAULT);
    CHECK_IS(adma_attach(side->to, &handle), ADMA_EBADF);

    int64_t remote = adma_attach(side->fd, &handle);
    CHECK(remote >= 0);
    CHECK_IS(adma_put(remote, 0, NULL, 1), ADMA_EFAULT);
    CHECK_IS(adma_get(remote, 0, NULL, 1), ADMA_EFAULT);
    CHECK_IS(adma_iput(remote, 0, NULL, 1), ADMA_EFAULT);
    CHECK_IS(adma_iget(remote, 0, NULL, 1), ADMA_EFAULT);
    CHECK_IS(adma_put(remote, 0, last, 64), ADMA_EOVERFLOW);
    CHECK_IS(adma_iget(remote, 0, last, 64), ADMA_EOVERFLOW);

    /* A window of zero bytes is valid. */
    int64_t nothing = adma_expose(side->fd, NULL, 0, ADMA_READ, &own);
    CHECK(nothing >= 0);
    CHECK_IS(adma_window_length(nothing), 0);
    CHECK_IS(adma_wait_value(nothing, 0, 0, 0, NULL), ADMA_ERANGE);
    CHECK_IS(adma_withdraw(nothing), 0);

    int64_t window = adma_expose(side->fd, small + 1, 64, BOTH, &own);
    uint64_t value = 7, *odd = (uint64_t *)(void *)(bytes + 1);
    CHECK(window >= 0);
    CHECK_IS(adma_wait_value(window, 0, 0, 0, &value), ADMA_EINVAL);
    CHECK_SAYS("boundary of eight");
    CHECK_IS(adma_wait_value(window, 63, 0, 0, &value), ADMA_ERANGE);
    CHECK_IS(adma_wait_value(window, UINT64_MAX, 0, 0, &value), ADMA_ERANGE);
    CHECK_IS(adma_wait_value(window, 7, 0, 0, odd), ADMA_EFAULT);
    CHECK(value == 7);
    CHECK_IS(adma_wait_value(window, 7, 0, 0, &value), 0);
    CHECK(value == 0);
    CHECK_IS(adma_withdraw(window), 0);
    tell(side, 'e');
}

static void ranges_outside(struct side *side) {
    int64_t remote = attach_sent(side);
    struct {
        uint64_t offset;
        size_t length;
    } ranges[] = {{SMALL, 1}, {SMALL - 1, 2}, {SMALL + 1, 0}, {0, SMALL + 1}, {UINT64_MAX, 1},
                  {UINT64_MAX, 0}, {UINT64_MAX - 3, 8}, {UINT64_C(1) << 63, 8}};
    unsigned char *memory = take(2 * SMALL);
    memset(memory, 1, 2 * SMALL);
    for (unsigned n = 0; n < sizeof ranges / sizeof ranges[0]; n++) {
        uint64_t offset = ranges[n].offset;
        size_t length = ranges[n].length;
        CHECK_IS(adma_put(remote, offset, memory, length), ADMA_ERANGE);
        CHECK_SAYS("outside the window");
        CHECK_IS(adma_get(remote, offset, memory, length), ADMA_ERANGE);
        CHECK_IS(adma_iput(remote, offset, memory, length), ADMA_ERANGE);
        CHECK_IS(adma_iget(remote, offset, memory, length), ADMA_ERANGE);
        if (offset == 0) continue;
        CHECK_IS(adma_put_notify(remote, 0, memory, 8, offset, 1), ADMA_ERANGE);
        CHECK_IS(adma_iput_notify(remote, 0, memory, 8, offset, 1), ADMA_ERANGE);
    }
    CHECK_IS(adma_put_notify(remote, 0, memory, 8, SMALL - 7, 1), ADMA_ERANGE);
    CHECK_IS(adma_put_notify(remote, 0, memory, 8, 4, 1), ADMA_EINVAL);
    CHECK_SAYS("boundary of eight");
    CHECK_IS(adma_put_notify(remote, 0, memory, 8, SMALL - 8, 1), 0);
    /* None of it was written. */
    memset(memory, 1, SMALL);
    CHECK_IS(adma_get(remote, 8, memory, SMALL - 16), 0);
    for (int n = 0; n < SMALL - 16; n++) CHECK(memory[n] == 0);
    free(memory);
    tell(side, 'e');
}

/* Rights. */
static void own_two(struct side *side) {
    int64_t one = expose_and_send(side, small, SMALL, ADMA_READ);
    int64_t other = expose_and_send(side, bytes, SMALL, ADMA_WRITE);
    CHECK_IS(hear(side), 'e');
    CHECK_IS(adma_withdraw(one), 0);
    CHECK_IS(adma_withdraw(other), 0);
    for (int n = 0; n < SMALL; n++) CHECK(small[n] == 0);
    CHECK(bytes[0] == 9);
}

static void try_what_is_not_permitted(struct side *side) {
    unsigned char nine = 9;
    int64_t for_reading = attach_sent(side), for_writing = attach_sent(side);
    CHECK_IS(adma_put(for_reading, 0, &nine, 1), ADMA_EACCES);
    CHECK_SAYS("open for read, not for write");
    CHECK_IS(adma_iput(for_reading, 0, &nine, 1), ADMA_EACCES);
    CHECK_IS(adma_put_notify(for_reading, 0, NULL, 0, 8, 9), ADMA_EACCES);
    CHECK_IS(adma_get(for_reading, 0, &nine, 1), 0);
    CHECK(nine == 0);
    nine = 9;
    CHECK_IS(adma_get(for_writing, 0, &nine, 1), ADMA_EACCES);
    CHECK_IS(adma_iget(for_writing, 0, &nine, 1), ADMA_EACCES);
    CHECK(nine == 9);
    CHECK_IS(adma_put(for_writing, 0, &nine, 1), 0);
    tell(side, 'e');
}

/* Invalid handles. */
static void try_every_handle(struct side *side) {
    struct adma_window good = receive_handle(side), bad, own;
    for (unsigned n = 0; n < sizeof good.bytes; n++) {
        for (unsigned flip = 1; flip < 256; flip++) {
            bad = good;
            bad.bytes[n] ^= (unsigned char)flip;
            CHECK_IS(adma_attach(side->fd, &bad), ADMA_EBADMSG);
        }
    }
    CHECK_SAYS("no handle of a window");
    memset(&bad, 0, sizeof bad);
    CHECK_IS(adma_attach(side->fd, &bad), ADMA_EBADMSG);
    memset(&bad, 0xff, sizeof bad);
    CHECK_IS(adma_attach(side->fd, &bad), ADMA_EBADMSG);
    /* A window of this process is not one of the peer. */
    int64_t window = adma_expose(side->fd, bytes, SMALL, BOTH, &own);
    CHECK(window >= 0);
    CHECK_IS(adma_attach(side->fd, &own), ADMA_EXDEV);
    CHECK_SAYS("another process");
    /* The valid one stays valid, any number of times. */
    int64_t first = adma_attach(side->fd, &good), second = adma_attach(side->fd, &good);
    CHECK(first >= 0 && second >= 0 && first != second);
    CHECK_IS(adma_detach(first), 0);
    CHECK_IS(adma_put(second, 0, bytes, SMALL), 0);
    tell(side, 'e');
}

/* A window is withdrawn, and others use its slot. */
static void withdraw_and_expose_again(struct side *side) {
    int64_t window = expose_and_send(side, small, SMALL, BOTH);
    CHECK_IS(hear(side), 'a');
    CHECK_IS(adma_withdraw(window), 0);
    CHECK_IS(adma_withdraw(window), ADMA_ESTALE);
    memset(small, 5, SMALL);
    tell(side, 'w');
    CHECK_IS(hear(side), 'a');
    window = expose_and_send(side, small, SMALL, BOTH);
    CHECK_IS(hear(side), 'e');
    for (int n = 0; n < SMALL; n++) CHECK(small[n] == 5);
    CHECK_IS(adma_withdraw(window), 0);
}

static void use_what_was_withdrawn(struct side *side) {
    struct adma_window handle = receive_handle(side);
    int64_t remote = adma_attach(side->fd, &handle);
    CHECK(remote >= 0);
    CHECK_IS(adma_put(remote, 0, bytes, 1), 0);
    tell(side, 'a');
    CHECK_IS(hear(side), 'w');
    for (int turn = 0; turn < 2; turn++) {
        int64_t cookie = adma_iput(remote, 0, bytes, SMALL);
        CHECK(cookie >= 0);
        CHECK_IS(adma_wait(cookie), ADMA_ESTALE);
        CHECK_IS(adma_check(cookie), ADMA_ESTALE);
        CHECK_IS(adma_put(remote, 0, bytes, SMALL), ADMA_ESTALE);
        CHECK_SAYS("was withdrawn");
        CHECK_IS(adma_get(remote, 0, bytes, SMALL), ADMA_ESTALE);
        CHECK_IS(adma_put_notify(remote, 0, NULL, 0, 8, 1), ADMA_ESTALE);
        CHECK_IS(adma_attach(side->fd, &handle), ADMA_ESTALE);
        CHECK_IS(adma_fence(remote), 0);
        if (turn == 1) break;
        /* The same memory as another window: handles of the first one do not attach it. */
        tell(side, 'a');
        CHECK(attach_sent(side) >= 0);
    }
    CHECK_IS(adma_detach(remote), 0);
    tell(side, 'e');
}

/* A window is withdrawn in the middle of an access: not a byte is written after that. */
static void withdraw_in_the_middle(struct side *side) {
    unsigned char *memory = take(LARGE);
    for (int turn = 0; turn < 20; turn++) {
        memset(memory, 0, LARGE);
        int64_t window = expose_and_send(side, memory, LARGE, BOTH);
        CHECK_IS(hear(side), 'p');
        nap_ms(turn % 5);
        CHECK_IS(withdraw_patiently(window), 0);
        memset(memory, 5, LARGE);
        tell(side, 'w');
        CHECK_IS(hear(side), 'e');
        for (int n = 0; n < LARGE; n++) CHECK(memory[n] == 5);
    }
    free(memory);
}

static void put_until_it_is_withdrawn(struct side *side) {
    unsigned char *memory = take(LARGE);
    memset(memory, 1, LARGE);
    for (int turn = 0; turn < 20; turn++) {
        int64_t remote = attach_sent(side);
        tell(side, 'p');
        int code = 0;
        while (code == 0) {
            code = turn % 2 ? adma_put(remote, 0, memory, LARGE)
                            : start_and_wait(remote, memory, LARGE);
        }
        CHECK_IS(code, ADMA_ESTALE);
        CHECK_IS(hear(side), 'w');
        CHECK_IS(adma_put(remote, 0, memory, LARGE), ADMA_ESTALE);
        tell(side, 'e');
    }
    free(memory);
}

/* The owner is killed while the peer puts. */
static void put_until_the_owner_is_gone(struct side *side) {
    unsigned char *memory = take(LARGE);
    int64_t remote = attach_sent(side);
    int code = 0;
    tell(side, 'p');
    for (int turn = 0; code == 0; turn++) {
        size_t length = (size_t)1 << turn % 24;
        code = turn % 2 ? adma_put(remote, 0, memory, length)
                        : start_and_wait(remote, memory, length);
    }
    CHECK_IS(code, ADMA_EPIPE);
    CHECK_SAYS("disconnected: its process has exited");
    CHECK_IS(adma_get(remote, 0, memory, 1), ADMA_EPIPE);
    CHECK_IS(start_and_wait(remote, memory, LARGE), ADMA_EPIPE);
    /* A fence copies nothing: it detects the exit when the system reports it, shortly
     * afterwards. */
    while ((code = adma_fence(remote)) == 0) nap_ms(1);
    CHECK_IS(code, ADMA_EPIPE);
    CHECK_IS(adma_detach(remote), 0);
    CHECK_IS(adma_close(side->fd), 0);
    free(memory);
}

static void be_killed_as_owner(struct side *side) {
    expose_and_send(side, take(LARGE), LARGE, BOTH);
    CHECK_IS(hear(side), 'p');
    nap_ms(getpid() % 7);
    raise(SIGKILL);
}

/* The peer is killed while it puts. */
static void own_what_a_killed_one_puts(struct side *side) {
    unsigned char *memory = take(LARGE);
    memset(memory, 0, LARGE);
    int64_t window = expose_and_send(side, memory, LARGE, BOTH);
    uint64_t value = 0;
    /* It never sets the variable: the wait returns when it exits. */
    CHECK_IS(adma_wait_value(window, LARGE - 8, 1, -1, &value), ADMA_EPIPE);
    CHECK_IS(withdraw_patiently(window), 0);
    for (int n = 0; n < LARGE; n++) CHECK(memory[n] <= 1);
    CHECK_IS(adma_close(side->fd), 0);
    free(memory);
}

static void *kill_soon(void *argument) {
    nap_ms(20 + (long)getpid() % 7);
    raise(SIGKILL);
    return argument;
}

static void be_killed_in_a_put(struct side *side) {
    unsigned char *memory = take(LARGE);
    pthread_t thread;
    memset(memory, 1, LARGE);
    int64_t remote = attach_sent(side);
    /* An unread message: the owner detects the exit all the same. */
    if (getpid() % 2) CHECK_IS(adma_write(side->fd, memory, 100), 0);
    CHECK_IS(pthread_create(&thread, NULL, kill_soon, NULL), 0);
    for (;;) CHECK_IS(adma_put(remote, 0, memory, LARGE - 8), 0);
}

/* The peer is stopped in the middle of a put: the memory stays in use until it continues. */
static int by_close, by_fini;
enum { WAS_BUSY = 77 };

static void own_what_a_stopped_one_puts(struct side *side) {
    unsigned char *memory = take(LARGE);
    pid_t visitor = 0;
    CHECK_IS(adma_read(side->fd, &visitor, sizeof visitor), sizeof visitor);
    int busy = 0;
    for (int turn = 0; turn < 200 && !busy; turn++) {
        int64_t window = expose_and_send(side, memory, LARGE, BOTH);
        CHECK_IS(hear(side), 'p');
        /* Usually long enough for the first put to be in flight. */
        nap_ms(1 + (turn + getpid()) % 3);
        CHECK_IS(kill(visitor, SIGSTOP), 0);
        int code = by_fini ? adma_fini() : by_close ? adma_close(side->fd) : adma_withdraw(window);
        CHECK(code == 0 || code == ADMA_EBUSY);
        if (code == ADMA_EBUSY) {
            busy = 1;
            CHECK_SAYS("stopped in the middle of an access");
            CHECK_IS(adma_wait_value(window, 0, 0, -1, NULL), ADMA_ESTALE);
            CHECK_IS(adma_withdraw(window), ADMA_EBUSY);
            CHECK_IS(kill(visitor, SIGCONT), 0);
            /* It has a fragment to finish, for which a withdrawal waits. */
            CHECK_IS(withdraw_patiently(window), 0);
        }
        CHECK_IS(adma_withdraw(window), ADMA_ESTALE);
        CHECK_IS(kill(visitor, SIGCONT), 0);
        memset(memory, 5, LARGE);
        CHECK_IS(hear(side), 'w');
        for (int n = 0; n < LARGE; n++) CHECK(memory[n] == 5);
        if (by_close || by_fini) break;
        tell(side, busy ? 'e' : 'n');
    }
    /* After a close there is no second try: then main repeats the test. */
    exit(busy ? WAS_BUSY : 0);
}

static void be_stopped_in_a_put(struct side *side) {
    unsigned char *memory = take(LARGE);
    pid_t own = getpid();
    memset(memory, 1, LARGE);
    CHECK_IS(adma_write(side->fd, &own, sizeof own), 0);
    do {
        int64_t remote = attach_sent(side);
        tell(side, 'p');
        int code = 0;
        while (code == 0) code = adma_put(remote, 0, memory, LARGE);
        CHECK_IS(code, by_close || by_fini ? ADMA_EPIPE : ADMA_ESTALE);
        tell(side, 'w');
    } while (!by_close && !by_fini && hear(side) == 'n');
    free(memory);
}

/* Closing a link withdraws and detaches its windows, and ends the waits for their values. */
static int64_t waited_for;
static int wanted_end;

static void *wait_for_ever(void *argument) {
    int code = adma_wait_value(waited_for, 0, 1, -1, NULL);
    /* A late thread finds no window. */
    CHECK(code == wanted_end || code == ADMA_ESTALE);
    return argument;
}

static void close_with_windows(struct side *side) {
    pthread_t threads[3];
    struct adma_window handle;
    memset(small, 0, SMALL);
    for (int turn = 0; turn < 3; turn++) {
        waited_for = expose_and_send(side, small, SMALL, BOTH);
        int64_t other = adma_expose(side->fd, bytes, SMALL, BOTH, &handle);
        int64_t remote = attach_sent(side);
        CHECK(other >= 0);
        wanted_end = turn == 0 ? ADMA_ESTALE : ADMA_ECANCELED;
        for (int n = 0; n < 3; n++)
            CHECK_IS(pthread_create(&threads[n], NULL, wait_for_ever, NULL), 0);
        CHECK_IS(hear(side), 'a');
        nap_ms(turn == 1 ? 0 : 150);
        if (turn == 0) CHECK_IS(adma_withdraw(waited_for), 0);
        if (turn == 1) CHECK_IS(adma_close(side->fd), 0);
        if (turn == 2) CHECK_IS(adma_fini(), 0);
        for (int n = 0; n < 3; n++) CHECK_IS(pthread_join(threads[n], NULL), 0);
        memset(small, 0, SMALL);
        tell(side, 'c');
        if (turn > 0) {
            refused_by_every_call_of_the_owner(waited_for, ADMA_ESTALE);
            refused_by_every_call_of_the_owner(other, ADMA_ESTALE);
            refused_by_every_access(remote, ADMA_ESTALE);
            CHECK_IS(adma_expose(side->fd, bytes, SMALL, BOTH, &handle), ADMA_EBADF);
        }
        CHECK_IS(hear(side), 'd');
        for (int n = 0; n < SMALL; n++) CHECK(small[n] == 0);
        if (turn != 1) continue;
        /* Another link with the same process. */
        char name[64];
        snprintf(name, sizeof name, "adma-again-%d", (int)getpid());
        int listener = adma_listen(name);
        CHECK(listener >= 0);
        CHECK_IS(write(side->to, name, sizeof name), sizeof name);
        side->fd = adma_accept(listener);
        CHECK(side->fd >= 0);
        CHECK_IS(adma_close(listener), 0);
    }
}

static void use_what_is_closed(struct side *side) {
    struct adma_window handle;
    for (int turn = 0; turn < 3; turn++) {
        int code = turn == 0 ? ADMA_ESTALE : ADMA_EPIPE;
        int64_t window = adma_expose(side->fd, bytes, SMALL, BOTH, &handle);
        CHECK(window >= 0);
        CHECK_IS(adma_write(side->fd, &handle, sizeof handle), 0);
        int64_t remote = attach_sent(side);
        CHECK_IS(adma_put(remote, 8, bytes, 8), 0);
        tell(side, 'a');
        CHECK_IS(hear(side), 'c');
        CHECK_IS(adma_put(remote, 0, bytes, SMALL), code);
        CHECK_IS(adma_get(remote, 0, bytes, SMALL), code);
        tell(side, 'd');
        if (turn == 0) {
            CHECK_IS(adma_withdraw(window), 0);
            continue;
        }
        CHECK_IS(adma_wait_value(window, 0, 1, -1, NULL), ADMA_EPIPE);
        CHECK_IS(adma_withdraw(window), 0);
        CHECK_IS(adma_close(side->fd), 0);
        CHECK_IS(adma_put(remote, 0, bytes, SMALL), ADMA_ESTALE);
        if (turn == 2) break;
        char name[64];
        CHECK_IS(read(side->from, name, sizeof name), sizeof name);
        side->fd = connect_patiently(name);
        CHECK(side->fd >= 0);
    }
}

/* A link is closed by its own side while other threads put over it. */
static void *put_for_ever(void *argument) {
    unsigned char *memory = take(LARGE);
    int code = 0;
    while (code == 0) code = adma_put(*(int64_t *)argument, 0, memory, LARGE);
    CHECK(code == ADMA_ECANCELED || code == ADMA_ESTALE);
    free(memory);
    return NULL;
}

static void *begin_for_ever(void *argument) {
    unsigned char *memory = take(LARGE);
    int code = 0;
    while (code == 0) code = start_and_wait(*(int64_t *)argument, memory, LARGE);
    CHECK(code == ADMA_ECANCELED || code == ADMA_ESTALE);
    free(memory);
    return NULL;
}

static void close_while_others_put(struct side *side) {
    pthread_t threads[2];
    int64_t remote = attach_sent(side);
    CHECK_IS(pthread_create(&threads[0], NULL, put_for_ever, &remote), 0);
    CHECK_IS(pthread_create(&threads[1], NULL, begin_for_ever, &remote), 0);
    nap_ms(30);
    CHECK_IS(adma_close(side->fd), 0);
    for (int n = 0; n < 2; n++) CHECK_IS(pthread_join(threads[n], NULL), 0);
}

static void own_until_the_other_closes(struct side *side) {
    unsigned char *memory = take(LARGE);
    int64_t window = expose_and_send(side, memory, LARGE, BOTH);
    CHECK_IS(adma_read(side->fd, bytes, 1), ADMA_EPIPE);
    CHECK_IS(withdraw_patiently(window), 0);
    free(memory);
}

/* A forked child has neither its parent's windows nor what it has attached. */
static void fork_with_windows(struct side *side) {
    struct adma_window handle, sent;
    int64_t window = adma_expose(side->fd, small, SMALL, BOTH, &handle);
    sent = receive_handle(side);
    int64_t remote = adma_attach(side->fd, &sent);
    CHECK(window >= 0 && remote >= 0);
    CHECK_IS(adma_write(side->fd, &handle, sizeof handle), 0);
    CHECK_IS(adma_put(remote, 0, bytes, 8), 0);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        bound_time();
        for (int again = 0; again < 2; again++) {
            refused_by_every_access(remote, ADMA_ECHILD);
            refused_by_every_call_of_the_owner(window, ADMA_ECHILD);
            CHECK_IS(adma_window_length(remote), ADMA_ECHILD);
            CHECK_SAYS("before a fork");
            CHECK_IS(adma_expose(side->fd, small, SMALL, BOTH, &handle), ADMA_ECHILD);
            CHECK_IS(adma_attach(side->fd, &sent), ADMA_ECHILD);
            CHECK_IS(adma_fini(), 0);
        }
        exit(0);
    }
    CHECK_IS(ending_of(child), 0);
    /* Nothing has changed in the parent. */
    CHECK_IS(adma_put(remote, 0, bytes, 8), 0);
    tell(side, 'f');
    CHECK_IS(adma_wait_value(window, 8, 3, -1, NULL), 0);
    CHECK_IS(adma_withdraw(window), 0);
    tell(side, 'e');
}

static void be_with_one_that_forks(struct side *side) {
    int64_t window = expose_and_send(side, small, SMALL, BOTH), remote = attach_sent(side);
    CHECK_IS(hear(side), 'f');
    CHECK_IS(adma_put_notify(remote, 0, NULL, 0, 8, 3), 0);
    CHECK_IS(hear(side), 'e');
    CHECK_IS(adma_withdraw(window), 0);
}

/* Nothing leaks, however many windows there were. The number of descriptors varies a little. */
static void own_many(struct side *side) {
    int before = -1;
    for (int turn = 0; turn < 500; turn++) {
        int64_t window = expose_and_send(side, small + turn % 8, 64, BOTH);
        CHECK_IS(hear(side), 'p');
        CHECK_IS(adma_withdraw(window), 0);
        if (turn == 10) before = count_descriptors();
    }
    CHECK(count_descriptors() < before + 50);
}

static void attach_many(struct side *side) {
    int before = -1;
    for (int turn = 0; turn < 500; turn++) {
        int64_t remote = attach_sent(side);
        CHECK_IS(adma_put(remote, 0, bytes, 64), 0);
        CHECK_IS(adma_detach(remote), 0);
        tell(side, 'p');
        if (turn == 10) before = count_descriptors();
    }
    CHECK(count_descriptors() < before + 50);
}

/* Where the system does not permit access, the calls report it. */
static void own_what_cannot_be_reached(struct side *side) {
    int64_t window = expose_and_send(side, small, SMALL, BOTH);
    CHECK_IS(hear(side), 'e');
    CHECK_IS(adma_withdraw(window), 0);
}

static void try_to_reach(struct side *side) {
    struct adma_window handle = receive_handle(side);
    CHECK_IS(adma_attach(side->fd, &handle), ADMA_EHOSTUNREACH);
    CHECK_SAYS("cannot be accessed");
    tell(side, 'e');
}

/* A process is stopped at an unknown point: so the test tries it often. */
static int was_busy(int attempts) {
    for (int n = 0; n < attempts; n++) {
        int up[2], down[2];
        const char *name = fresh_name();
        CHECK(pipe(up) == 0 && pipe(down) == 0);
        struct side first = {.to = down[1], .from = up[0]}, second = {.to = up[1], .from = down[0]};
        pid_t owner = start(own_what_a_stopped_one_puts, first, name, 1, (int[]){down[0], up[1]});
        pid_t visitor = start(be_stopped_in_a_put, second, name, 0, (int[]){up[0], down[1]});
        for (int which = 0; which < 2; which++) {
            close(up[which]);
            close(down[which]);
        }
        int status = ending_of(owner);
        CHECK_IS(ending_of(visitor), 0);
        CHECK(WIFEXITED(status) && (WEXITSTATUS(status) == WAS_BUSY || WEXITSTATUS(status) == 0));
        if (WEXITSTATUS(status) == WAS_BUSY) return 1;
    }
    return 0;
}

int main(void) {
    bound_time();
    between(own_small, numbers_that_are_none);
    between(own_small, arguments_that_are_none);
    both_ways(own_small, ranges_outside);
    between(own_two, try_what_is_not_permitted);
    between(own_small, try_every_handle);
    both_ways(withdraw_and_expose_again, use_what_was_withdrawn);
    between(withdraw_in_the_middle, put_until_it_is_withdrawn);
    between(own_until_the_other_closes, close_while_others_put);
    between(close_with_windows, use_what_is_closed);
    between(fork_with_windows, be_with_one_that_forks);
    between(own_many, attach_many);
    for (int n = 0; n < 4; n++) {
        CHECK_IS(between_ending(put_until_the_owner_is_gone, be_killed_as_owner), SIGKILL);
        CHECK_IS(between_ending(own_what_a_killed_one_puts, be_killed_in_a_put), SIGKILL);
    }
    CHECK(was_busy(1));
    by_close = 1;
    CHECK(was_busy(30));
    by_close = 0;
    by_fini = 1;
    CHECK(was_busy(30));
    setenv("MEMFERRY_CMA", "off", 1);
    between(own_what_cannot_be_reached, try_to_reach);
    return 0;
}
