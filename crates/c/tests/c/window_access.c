/* Windows without errors: puts and gets of every size, their order, and notifications. */

#define _GNU_SOURCE

#include <poll.h>
#include <pthread.h>

#include "window.h"

enum { LARGE = 5 * 1024 * 1024 + 123, BOTH = ADMA_READ | ADMA_WRITE };
enum { VARIABLE = 8, PATIENCE_MS = 60000 };

static const size_t sizes[] = {0, 1, 7, 8, 100, 4096, 4097, 65537, 1 << 20, 3000001};
enum { SIZES = sizeof sizes / sizeof sizes[0] };

/* The owner only checks its memory when the peer requests it. */
static void own_and_look(struct side *side) {
    unsigned char *memory = take(LARGE), *ready = take(LARGE);
    paint(memory, LARGE, 1);
    paint(ready, LARGE, 1);
    int64_t window = expose_and_send(side, memory, LARGE, BOTH);
    for (unsigned n = 0; n < SIZES; n++) {
        CHECK_IS(hear(side), 'p');
        size_t at = n * 1001;
        paint(ready + at, sizes[n], n + 2);
        CHECK(memcmp(memory, ready, LARGE) == 0);
        tell(side, 'l');
    }
    CHECK_IS(hear(side), 'e');
    CHECK_IS(adma_withdraw(window), 0);
    free(memory);
    free(ready);
}

static void put_and_get(struct side *side) {
    unsigned char *memory = take(LARGE), *back = take(LARGE);
    int64_t remote = attach_sent(side);
    CHECK_IS(adma_window_length(remote), LARGE);
    CHECK_IS(adma_get(remote, 0, back, LARGE), 0);
    CHECK(is_painted(back, LARGE, 1));
    for (unsigned n = 0; n < SIZES; n++) {
        size_t at = n * 1001;
        paint(memory, sizes[n], n + 2);
        CHECK_IS(adma_put(remote, at, memory, sizes[n]), 0);
        tell(side, 'p');
        CHECK_IS(hear(side), 'l');
        memset(back, 0, sizes[n]);
        CHECK_IS(adma_get(remote, at, back, sizes[n]), 0);
        CHECK(is_painted(back, sizes[n], n + 2));
    }
    /* The last bytes, and nothing after them. */
    CHECK_IS(adma_put(remote, LARGE - 3, memory, 3), 0);
    CHECK_IS(adma_put(remote, LARGE, memory, 0), 0);
    CHECK_IS(adma_put(remote, LARGE, NULL, 0), 0);
    CHECK_IS(adma_detach(remote), 0);
    tell(side, 'e');
    CHECK_IS(adma_read(side->fd, memory, 1), ADMA_EPIPE);
    free(memory);
    free(back);
}

/* A notification: the data has arrived when the variable is set, however the owner waits. */
enum { ROUNDS = 300 };

static void wait_for_data(struct side *side) {
    unsigned char *memory = take(LARGE);
    memset(memory, 0, LARGE);
    int64_t window = expose_and_send(side, memory, LARGE, ADMA_WRITE);
    uint64_t value = 0;
    for (unsigned n = 1; n <= ROUNDS; n++) {
        int64_t patience = n % 3 == 0 ? 100 * SECOND_NS : -1;
        CHECK_IS(adma_wait_value(window, VARIABLE, n, patience, n % 2 ? &value : NULL), 0);
        CHECK(n % 2 == 0 || value == n);
        CHECK(is_painted(memory + 100, sizes[n % SIZES], n));
        tell(side, 'o');
    }
    CHECK_IS(adma_wait_value(window, VARIABLE, 1, 0, &value), 0);
    CHECK(value == ROUNDS);
    CHECK_IS(adma_wait_value(window, VARIABLE, ROUNDS + 1, 0, &value), ADMA_ETIMEDOUT);
    CHECK_IS(adma_wait_value(window, VARIABLE, ROUNDS + 1, SECOND_NS / 10, &value), ADMA_ETIMEDOUT);
    CHECK_SAYS("did not become 301 in time");
    tell(side, 'o');
    /* All 64 bits of a value arrive. */
    CHECK_IS(adma_wait_value(window, VARIABLE, UINT64_MAX, -1, &value), 0);
    CHECK(value == UINT64_MAX);
    /* The process that sets the value is still inside its call. */
    CHECK_IS(hear(side), 'e');
    CHECK_IS(adma_withdraw(window), 0);
    free(memory);
}

static void put_with_notification(struct side *side) {
    unsigned char *memory = take(LARGE);
    int64_t remote = attach_sent(side);
    for (unsigned n = 1; n <= ROUNDS; n++) {
        size_t length = sizes[n % SIZES];
        paint(memory, length, n);
        /* Sometimes the owner sleeps already, on a futex or a descriptor. */
        if (n % 50 == 0) nap_ms(n);
        if (n % 2) {
            CHECK_IS(adma_put_notify(remote, 100, memory, length, VARIABLE, n), 0);
        } else {
            int64_t cookie = adma_iput_notify(remote, 100, memory, length, VARIABLE, n);
            CHECK(cookie >= 0);
            CHECK_IS(hear(side), 'o');
            CHECK_IS(adma_wait(cookie), 0);
            CHECK_IS(adma_result(cookie), length);
            continue;
        }
        CHECK_IS(hear(side), 'o');
    }
    CHECK_IS(hear(side), 'o');
    CHECK_IS(adma_put_notify(remote, 0, NULL, 0, VARIABLE, UINT64_MAX), 0);
    tell(side, 'e');
    CHECK_IS(adma_read(side->fd, memory, 1), ADMA_EPIPE);
    free(memory);
}

/* Many accesses in flight complete in the order in which they were started. */
enum { MANY = 200, PART = 100 * 1024 };

static void own_and_compare(struct side *side) {
    unsigned char *memory = take(LARGE);
    memset(memory, 0, LARGE);
    int64_t window = expose_and_send(side, memory, LARGE, BOTH);
    for (int turn = 0; turn < 2; turn++) {
        CHECK_IS(hear(side), 'f');
        CHECK(is_painted(memory, PART, MANY - 1));
        memset(memory, 0, PART);
        tell(side, 'c');
    }
    CHECK_IS(hear(side), 'e');
    CHECK_IS(adma_withdraw(window), 0);
    free(memory);
}

static void begin_many(struct side *side) {
    unsigned char *parts[MANY], *back = take(PART);
    int64_t cookies[MANY], remote = attach_sent(side);
    for (unsigned n = 0; n < MANY; n++) {
        parts[n] = take(PART);
        paint(parts[n], PART, n);
    }
    for (unsigned n = 0; n < MANY; n++) {
        /* Small ones between large ones. */
        cookies[n] = adma_iput(remote, 0, parts[n], n % 3 || n == MANY - 1 ? PART : 5);
        CHECK(cookies[n] >= 0);
    }
    CHECK_IS(adma_fence(remote), 0);
    tell(side, 'f');
    for (unsigned n = 0; n < MANY; n++) CHECK_IS(adma_wait(cookies[n]), 0);
    CHECK_IS(hear(side), 'c');

    /* A get sees the put before it, and a blocking call is executed after those started before. */
    for (unsigned n = 0; n < MANY; n++) {
        cookies[n] = adma_iput(remote, 0, parts[n], PART);
        CHECK(cookies[n] >= 0);
        if (n % 20 == 7) {
            int64_t get = adma_iget(remote, 0, back, PART);
            CHECK(get >= 0);
            CHECK_IS(adma_wait(get), 0);
            CHECK_IS(adma_wait(get), 0);
            CHECK_IS(adma_result(get), PART);
            CHECK(is_painted(back, PART, n));
            CHECK_IS(adma_wait(cookies[n]), 0);
        }
        if (n % 20 == 15) {
            CHECK_IS(adma_get(remote, 0, back, PART), 0);
            CHECK(is_painted(back, PART, n));
        }
    }
    for (unsigned n = 0; n < MANY; n++) CHECK_IS(adma_wait(cookies[n]), 0);
    tell(side, 'f');
    CHECK_IS(hear(side), 'c');
    CHECK_IS(adma_fence(remote), 0);
    CHECK_IS(adma_detach(remote), 0);
    tell(side, 'e');
    CHECK_IS(adma_read(side->fd, back, 1), ADMA_EPIPE);
    for (unsigned n = 0; n < MANY; n++) free(parts[n]);
    free(back);
}

/* The completion of a put makes the descriptor readable, and a check makes it unreadable. */
static void lend(struct side *side) {
    unsigned char *memory = take(LARGE);
    int64_t window = expose_and_send(side, memory, LARGE, BOTH);
    CHECK_IS(hear(side), 'e');
    CHECK_IS(adma_withdraw(window), 0);
    free(memory);
}

static int is_readable(int fd, int ms) {
    struct pollfd one = {.fd = fd, .events = POLLIN};
    return poll(&one, 1, ms) == 1;
}

/* It may stay readable for a short time: a wakeup arrives late, or a thread of the library has
 * not consumed it yet. */
static void becomes_quiet(int fd) {
    for (int tries = 0; tries < 2000; tries++) {
        CHECK_IS(adma_peek(fd), ADMA_ENOMSG);
        if (!is_readable(fd, 20)) return;
        nap_ms(1);
    }
    CHECK(!"it stays readable without a reason");
}

static void sleep_until_it_is_over(struct side *side) {
    unsigned char *memory = take(LARGE);
    memset(memory, 3, LARGE);
    int64_t remote = attach_sent(side);
    becomes_quiet(side->fd);
    for (int n = 0; n < 20; n++) {
        size_t length = n % 2 ? LARGE : 50;
        int64_t cookie = adma_iput(remote, 0, memory, length);
        CHECK(cookie >= 0);
        int state = 0;
        /* Early wakeups are permitted, a missing one is not. */
        while ((state = adma_check(cookie)) == 0) CHECK(is_readable(side->fd, PATIENCE_MS));
        CHECK_IS(state, 1);
        CHECK_IS(adma_result(cookie), length);
        becomes_quiet(side->fd);
    }
    tell(side, 'e');
    CHECK_IS(adma_read(side->fd, memory, 1), ADMA_EPIPE);
    free(memory);
}

/* Both expose, both put, on many threads at once. */
enum { THREADS = 4, SHARE = 1 << 20 };

struct task {
    int64_t remote;
    unsigned number;
};

static void *put_share(void *argument) {
    struct task *task = argument;
    unsigned char *memory = take(SHARE), *back = take(SHARE);
    for (unsigned n = 0; n < 20; n++) {
        size_t length = sizes[n % SIZES] < SHARE ? sizes[n % SIZES] : SHARE;
        uint64_t at = (uint64_t)task->number * SHARE;
        paint(memory, length, n + task->number);
        CHECK_IS(adma_put(task->remote, at, memory, length), 0);
        CHECK_IS(adma_get(task->remote, at, back, length), 0);
        CHECK(is_painted(back, length, n + task->number));
    }
    paint(memory, SHARE, task->number);
    CHECK_IS(adma_put(task->remote, (uint64_t)task->number * SHARE, memory, SHARE), 0);
    free(memory);
    free(back);
    return NULL;
}

static void put_on_both_sides(struct side *side) {
    unsigned char *memory = take(THREADS * SHARE);
    struct task tasks[THREADS];
    pthread_t threads[THREADS];
    int64_t window = expose_and_send(side, memory, THREADS * SHARE, BOTH);
    int64_t remote = attach_sent(side);
    for (unsigned n = 0; n < THREADS; n++) {
        tasks[n] = (struct task){.remote = remote, .number = n};
        CHECK_IS(pthread_create(&threads[n], NULL, put_share, &tasks[n]), 0);
    }
    for (int n = 0; n < THREADS; n++) CHECK_IS(pthread_join(threads[n], NULL), 0);
    tell(side, 'd');
    CHECK_IS(hear(side), 'd');
    CHECK_IS(adma_withdraw(window), 0);
    for (unsigned n = 0; n < THREADS; n++) CHECK(is_painted(memory + n * SHARE, SHARE, n));
    free(memory);
    tell(side, 'd');
    CHECK_IS(hear(side), 'd');
}

int main(void) {
    bound_time();
    both_ways(own_and_look, put_and_get);
    both_ways(wait_for_data, put_with_notification);
    both_ways(own_and_compare, begin_many);
    both_ways(lend, sleep_until_it_is_over);
    between(put_on_both_sides, put_on_both_sides);
    return 0;
}
