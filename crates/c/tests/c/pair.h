/* Two processes with a link between them, both forked before the library was ever used. */

#ifndef PAIR_H
#define PAIR_H

#include <signal.h>
#include <sys/wait.h>
#include <time.h>

#include "check.h"

/* One side: the link, and pipes for synchronisation outside of it. */
struct side {
    int fd;
    int to, from;
};

typedef void deed(struct side *side);

static inline void nap_ms(long ms) {
    struct timespec time = {.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000};
    nanosleep(&time, NULL);
}

static inline double now_ms(clockid_t clock) {
    struct timespec time;
    CHECK_IS(clock_gettime(clock, &time), 0);
    return (double)time.tv_sec * 1e3 + (double)time.tv_nsec / 1e6;
}

/* The processor time of this process, to detect spinning. */
static inline double burnt_ms(void) { return now_ms(CLOCK_PROCESS_CPUTIME_ID); }

static inline void tell(struct side *side, char what) {
    CHECK_IS(write(side->to, &what, 1), 1);
}

static inline char hear(struct side *side) {
    char what = 0;
    CHECK_IS(read(side->from, &what, 1), 1);
    return what;
}

/* A unique name. */
static inline const char *fresh_name(void) {
    static char name[64];
    static int count;
    snprintf(name, sizeof name, "adma-test-%d-%d", (int)getpid(), count++);
    return name;
}

/* Withdraws a window that a running peer may be accessing. On a busy machine, the peer may not run
 * for longer than one call waits. */
static inline int withdraw_patiently(int64_t window) {
    int code;
    while ((code = adma_withdraw(window)) == ADMA_EBUSY) {}
    return code;
}

/* Connects as soon as the peer listens. */
static inline int connect_patiently(const char *name) {
    for (int tries = 0; tries < 24000; tries++) {
        int fd = adma_connect(name);
        if (fd != ADMA_ECONNREFUSED) return fd;
        nap_ms(5);
    }
    return ADMA_ETIMEDOUT;
}

static inline pid_t start(deed *work, struct side side, const char *name, int listens,
                          const int *others) {
    pid_t child = fork();
    CHECK(child >= 0);
    if (child > 0) return child;
    bound_time();
    close(others[0]);
    close(others[1]);
    if (listens) {
        int listener = adma_listen(name);
        CHECK(listener >= 0);
        side.fd = adma_accept(listener);
        CHECK_IS(adma_close(listener), 0);
    } else {
        side.fd = connect_patiently(name);
    }
    CHECK(side.fd >= 0);
    work(&side);
    exit(0);
}

static inline int ending_of(pid_t child) {
    int status = -1;
    CHECK_IS(waitpid(child, &status, 0), child);
    return status;
}

/* Runs both, each in a process of its own, and returns the status of `there`; `here` must
 * succeed. */
static inline int between_ending(deed *here, deed *there) {
    int up[2], down[2];
    const char *name = fresh_name();
    CHECK(pipe(up) == 0 && pipe(down) == 0);
    struct side first = {.to = down[1], .from = up[0]}, second = {.to = up[1], .from = down[0]};
    pid_t one = start(here, first, name, 1, (int[]){down[0], up[1]});
    pid_t two = start(there, second, name, 0, (int[]){up[0], down[1]});
    for (int n = 0; n < 2; n++) {
        close(up[n]);
        close(down[n]);
    }
    /* One that fails leaves the other waiting for it. */
    int status = 0, others_status = 0;
    pid_t first_to_end = waitpid(-1, &status, 0), other = first_to_end == one ? two : one;
    int fails = WIFEXITED(status) && WEXITSTATUS(status) != 0;
    CHECK(first_to_end == one || first_to_end == two);
    if (fails) kill(other, SIGKILL);
    others_status = ending_of(other);
    CHECK(!fails);
    CHECK_IS(first_to_end == one ? status : others_status, 0);
    return first_to_end == one ? others_status : status;
}

static inline void between(deed *here, deed *there) { CHECK_IS(between_ending(here, there), 0); }

/* The same with the sides swapped. */
static inline void both_ways(deed *one, deed *other) {
    between(one, other);
    between(other, one);
}

#endif
