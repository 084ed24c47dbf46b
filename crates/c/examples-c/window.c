/*
 * Two processes and a window: the child puts results into the parent's memory while the parent
 * computes, and gets the parent's settings from it.
 *
 * From the root of the repository:
 *
 *   cargo build --release -p memferry-c
 *   cc -std=c11 -O2 -Icrates/c/include crates/c/examples-c/window.c \
 *      -Ltarget/release -Wl,-rpath,$PWD/target/release -ladma -o /tmp/window
 *   /tmp/window
 */

#define _POSIX_C_SOURCE 200809L

#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "adma.h"

enum { RESULTS = 1 << 20, ROUNDS = 8 };

/* The memory that the parent exposes. Both processes know its layout. */
struct board {
    /* The number of rounds of results that have arrived. Only notifications write it. */
    uint64_t rounds;
    double factor;
    double results[ROUNDS][RESULTS];
};

/* Every call returns 0 or more on success, and a negative code otherwise. */
static int64_t expect(const char *step, int64_t result) {
    if (result < 0) {
        fprintf(stderr, "%s: %s (%s)\n", step, adma_last_error(), adma_strerror((int)result));
        exit(1);
    }
    return result;
}

static int run_child(const char *name) {
    /* The parent may not listen yet. */
    int link;
    while ((link = adma_connect(name)) == ADMA_ECONNREFUSED) {
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    }
    expect("connect", link);
    struct adma_window handle;
    expect("handle", adma_read(link, &handle, sizeof handle));
    int64_t remote = expect("attach", adma_attach(link, &handle));

    double factor = 0, *results = malloc(ROUNDS * RESULTS * sizeof *results);
    if (results == NULL) return 1;
    expect("get", adma_get(remote, offsetof(struct board, factor), &factor, sizeof factor));
    for (int round = 0; round < ROUNDS; round++) {
        double *own = results + (size_t)round * RESULTS;
        for (int n = 0; n < RESULTS; n++) own[n] = factor * (round + n);
        /* Starts the put; the next round is computed meanwhile. When the data has arrived, the
         * parent's variable is set. */
        uint64_t at = offsetof(struct board, results) + (uint64_t)round * sizeof(double) * RESULTS;
        expect("put", adma_iput_notify(remote, at, own, RESULTS * sizeof *own,
                                       offsetof(struct board, rounds), (uint64_t)round + 1));
    }
    /* Everything has arrived; from here on the memory may be changed again. */
    expect("fence", adma_fence(remote));
    free(results);
    /* A close cancels what the peer has in flight: so the parent waits for this message. */
    expect("goodbye", adma_write(link, NULL, 0));
    expect("close", adma_close(link));
    return 0;
}

static int run_parent(const char *name) {
    struct board *board = calloc(1, sizeof *board);
    if (board == NULL) return 1;
    board->factor = 0.5;
    int listener = (int)expect("listen", adma_listen(name));
    int link = (int)expect("accept", adma_accept(listener));
    expect("close", adma_close(listener));
    struct adma_window handle;
    int64_t window = expect("expose", adma_expose(link, board, sizeof *board,
                                                  ADMA_READ | ADMA_WRITE, &handle));
    expect("send", adma_write(link, &handle, sizeof handle));

    /* From here on the parent only sleeps until there is something to use. */
    int is_equal = 1;
    uint64_t rounds = 0;
    for (uint64_t used = 0; used < ROUNDS; used++) {
        if (rounds <= used) expect("wait", adma_wait_value(window, 0, used + 1, -1, &rounds));
        for (uint64_t n = 0; n < RESULTS; n++)
            is_equal &= board->results[used][n] == 0.5 * (double)(used + n);
    }
    expect("goodbye", adma_read(link, NULL, 0));
    /* From here on no other process accesses the memory. */
    expect("withdraw", adma_withdraw(window));
    expect("close", adma_close(link));
    free(board);
    printf("adma %s: %d rounds of %zu MiB put by the other process: %s\n", adma_version(), ROUNDS,
           RESULTS * sizeof(double) >> 20, is_equal ? "equal" : "different");
    return !is_equal;
}

int main(void) {
    char name[64];
    snprintf(name, sizeof name, "adma-example-%d", (int)getpid());
    pid_t child = fork();
    if (child < 0) return 1;
    if (child == 0) return run_child(name);
    int failed = run_parent(name), status = -1;
    return waitpid(child, &status, 0) == child && status == 0 ? failed : 1;
}
