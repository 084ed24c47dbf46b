/* The peer is stopped while it writes to memory of a link that is closed: the memory stays in
 * use until the peer continues or exits, and nothing leaks. */

#define _GNU_SOURCE

#include <signal.h>
#include <sys/epoll.h>

#include "descriptors.h"
#include "window.h"

enum { LARGE = 16 * 1024 * 1024, ROUNDS = 6 };

/* Stops a process and waits until it is stopped. */
static void stop(pid_t child) {
    int status;
    CHECK_IS(kill(child, SIGSTOP), 0);
    CHECK_IS(waitpid(child, &status, WUNTRACED), child);
    CHECK(WIFSTOPPED(status));
}

/* Closes a link that an event loop watches. The library may keep a copy of the descriptor while
 * the peer accesses the memory, and the loop watches it until the last copy is closed: it must
 * not be readable. */
static int close_watched(int fd) {
    struct epoll_event interest = {.events = EPOLLIN}, event;
    int loop = epoll_create1(EPOLL_CLOEXEC);
    CHECK(loop >= 0);
    CHECK_IS(epoll_ctl(loop, EPOLL_CTL_ADD, fd, &interest), 0);
    int code = adma_close(fd);
    CHECK_IS(epoll_wait(loop, &event, 1, 0), 0);
    close(loop);
    return code;
}

static void expect_unchanged(unsigned char *memory) {
    for (int n = 0; n < LARGE; n++) CHECK(memory[n] == 5);
}

/* A process that connects and runs, until a byte arrives or for ever. */
static pid_t start_child(const char *name, void (*work)(int fd, int to), int *from) {
    int pipes[2];
    CHECK_IS(pipe(pipes), 0);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        bound_time();
        close(pipes[0]);
        int fd = connect_patiently(name);
        CHECK(fd >= 0);
        work(fd, pipes[1]);
        exit(0);
    }
    close(pipes[1]);
    *from = pipes[0];
    return child;
}

static void write_for_ever(int fd, int to) {
    unsigned char *memory = take(LARGE);
    memset(memory, 1, LARGE);
    while (adma_write(fd, memory, LARGE) == 0) {}
    CHECK_IS(write(to, "w", 1), 1);
}

/* The number of closes that found the peer in the middle of a chunk. */
static int reads_of_a_stopped_one(void) {
    int busy = 0, before = 0, listener;
    char word;
    unsigned char *memory = take(LARGE);
    const char *name = fresh_name();
    listener = adma_listen(name);
    CHECK(listener >= 0);
    for (int round = 0; round < ROUNDS; round++) {
        int from;
        pid_t child = start_child(name, write_for_ever, &from);
        int fd = adma_accept(listener);
        CHECK(fd >= 0);
        memset(memory, 0, LARGE);
        while (adma_peek(fd) == ADMA_ENOMSG) nap_ms(1);
        /* The read matches the message and copies nothing: the writer starts, from the end. */
        int64_t cookie = adma_iread(fd, memory, LARGE);
        CHECK(cookie >= 0);
        while (*(volatile unsigned char *)(memory + LARGE - 1) == 0) {}
        stop(child);
        int code = close_watched(fd), kills = round % 2;
        CHECK(code == 0 || code == ADMA_EBUSY);
        if (code == ADMA_EBUSY) {
            busy++;
            CHECK_SAYS("stopped");
            CHECK_IS(adma_check(cookie), 0);
            /* Both links count, and links closed before. */
            CHECK_IS(adma_fini(), ADMA_EBUSY);
            CHECK_IS(adma_fini(), ADMA_EBUSY);
            CHECK_IS(kill(child, kills ? SIGKILL : SIGCONT), 0);
            while (adma_check(cookie) == 0) nap_ms(1);
            CHECK_IS(adma_check(cookie), ADMA_ESTALE);
            CHECK_IS(adma_fini(), 0);
            /* The child inherited a copy of the old socket. */
            name = fresh_name();
            listener = adma_listen(name);
            CHECK(listener >= 0);
        } else {
            CHECK_IS(adma_check(cookie), ADMA_ESTALE);
        }
        memset(memory, 5, LARGE);
        kill(child, SIGCONT);
        if (code == 0 || !kills) CHECK_IS(read(from, &word, 1), 1);
        kill(child, SIGKILL);
        ending_of(child);
        close(from);
        expect_unchanged(memory);
        if (round == 0) before = count_descriptors();
        expect_descriptors_at_most(before);
    }
    CHECK_IS(adma_close(listener), 0);
    free(memory);
    return busy;
}

static void put_for_ever(int fd, int to) {
    unsigned char *memory = take(LARGE);
    struct adma_window handle;
    memset(memory, 1, LARGE);
    CHECK_IS(adma_read(fd, &handle, sizeof handle), sizeof handle);
    int64_t remote = adma_attach(fd, &handle);
    CHECK(remote >= 0);
    CHECK_IS(write(to, "p", 1), 1);
    while (adma_put(remote, 0, memory, LARGE) == 0) {}
}

/* Links whose close returned busy are released by the next call after the other process has
 * exited. */
static int windows_of_a_killed_one(void) {
    int busy = 0, before = 0, listener;
    char word;
    const char *name = fresh_name();
    listener = adma_listen(name);
    CHECK(listener >= 0);
    unsigned char *memory = take(LARGE);
    for (int round = 0; round < ROUNDS; round++) {
        int from;
        struct adma_window handle;
        pid_t child = start_child(name, put_for_ever, &from);
        int fd = adma_accept(listener);
        CHECK(fd >= 0);
        if (round == 1) before = count_descriptors();
        if (round > 1) expect_descriptors_at_most(before);
        int64_t window = adma_expose(fd, memory, LARGE, ADMA_READ | ADMA_WRITE, &handle);
        CHECK(window >= 0);
        CHECK_IS(adma_write(fd, &handle, sizeof handle), 0);
        CHECK_IS(read(from, &word, 1), 1);
        nap_ms(1 + round % 3);
        stop(child);
        int code = close_watched(fd);
        CHECK(code == 0 || code == ADMA_EBUSY);
        CHECK_IS(kill(child, SIGKILL), 0);
        ending_of(child);
        close(from);
        if (code == ADMA_EBUSY) {
            busy++;
            if (round % 2) CHECK_IS(adma_withdraw(window), 0);
        }
    }
    CHECK_IS(adma_fini(), 0);
    /* At most the first descriptor is the listener's. */
    expect_descriptors_at_most(before - 1);
    free(memory);
    return busy;
}

int main(void) {
    bound_time();
    int reads = reads_of_a_stopped_one(), windows = windows_of_a_killed_one();
    printf("busy: %d of %d reads, %d of %d windows\n", reads, ROUNDS, windows, ROUNDS);
    return 0;
}
