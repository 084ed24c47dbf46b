/* Messages over a link between two processes: all sizes, in the three orders in which reads and
 * writes can match, many in flight, from several threads. */

#define _POSIX_C_SOURCE 200809L

#include <pthread.h>

#include "pair.h"

enum { LARGE = 5 * 1024 * 1024 + 11 };

static const size_t SIZES[] = {0, 1, 48, 49, 4096, 70000, 1024 * 1024 + 3, LARGE};
enum { SIZE_COUNT = sizeof SIZES / sizeof SIZES[0] };

static unsigned char *memory;

/* Reads into memory with a margin that must stay unchanged. */
static void check_read(size_t len, unsigned seed) {
    CHECK(is_painted(memory, len, seed));
    CHECK_IS(memory[len], 0xee);
}

static void prepare_to_read(size_t len) {
    memory = take(LARGE + 1);
    memset(memory, 0, len);
    memory[len] = 0xee;
}

static void prepare_to_write(size_t len, unsigned seed) {
    memory = take(LARGE);
    paint(memory, len, seed);
}

/* One side writes and waits; the other reads later. */
static void write_first(struct side *side) {
    for (unsigned n = 0; n < SIZE_COUNT; n++) {
        prepare_to_write(SIZES[n], n);
        int64_t cookie = adma_iwrite(side->fd, memory, SIZES[n]);
        CHECK(cookie >= 0);
        tell(side, 'w');
        CHECK_IS(adma_wait(cookie), 0);
        CHECK_IS(adma_check(cookie), 1);
        CHECK_IS(adma_result(cookie), SIZES[n]);
        CHECK_IS(hear(side), 'r');
        free(memory);
    }
}

static void read_second(struct side *side) {
    for (unsigned n = 0; n < SIZE_COUNT; n++) {
        prepare_to_read(SIZES[n]);
        CHECK_IS(hear(side), 'w');
        nap_ms(30);
        int64_t cookie = adma_iread(side->fd, memory, SIZES[n]);
        CHECK(cookie >= 0);
        CHECK_IS(adma_wait(cookie), 0);
        CHECK_IS(adma_result(cookie), SIZES[n]);
        check_read(SIZES[n], n);
        tell(side, 'r');
        free(memory);
    }
}

/* One side reads and waits; the other writes later. */
static void read_first(struct side *side) {
    for (unsigned n = 0; n < SIZE_COUNT; n++) {
        prepare_to_read(SIZES[n]);
        int64_t cookie = adma_iread(side->fd, memory, SIZES[n]);
        CHECK(cookie >= 0);
        CHECK_IS(adma_check(cookie), 0);
        CHECK_IS(adma_result(cookie), ADMA_EINPROGRESS);
        tell(side, 'r');
        CHECK_IS(adma_wait(cookie), 0);
        for (int again = 0; again < 3; again++) {
            CHECK_IS(adma_wait(cookie), 0);
            CHECK_IS(adma_check(cookie), 1);
            CHECK_IS(adma_result(cookie), SIZES[n]);
        }
        check_read(SIZES[n], n);
        free(memory);
    }
}

static void write_second(struct side *side) {
    for (unsigned n = 0; n < SIZE_COUNT; n++) {
        prepare_to_write(SIZES[n], n);
        CHECK_IS(hear(side), 'r');
        nap_ms(30);
        CHECK_IS(adma_wait(adma_iwrite(side->fd, memory, SIZES[n])), 0);
        free(memory);
    }
}

/* Both have posted before either waits. */
static void write_before_both_wait(struct side *side) {
    for (unsigned n = 0; n < SIZE_COUNT; n++) {
        prepare_to_write(SIZES[n], n);
        int64_t cookie = adma_iwrite(side->fd, memory, SIZES[n]);
        CHECK(cookie >= 0);
        tell(side, 'w');
        CHECK_IS(hear(side), 'r');
        CHECK_IS(adma_wait(cookie), 0);
        free(memory);
    }
}

static void read_before_both_wait(struct side *side) {
    for (unsigned n = 0; n < SIZE_COUNT; n++) {
        prepare_to_read(SIZES[n]);
        int64_t cookie = adma_iread(side->fd, memory, SIZES[n]);
        CHECK(cookie >= 0);
        tell(side, 'r');
        CHECK_IS(hear(side), 'w');
        CHECK_IS(adma_wait(cookie), 0);
        check_read(SIZES[n], n);
        free(memory);
    }
}

/* Blocking calls in both directions. */
static void send_and_get_back(struct side *side) {
    for (unsigned n = 0; n < SIZE_COUNT; n++) {
        prepare_to_write(SIZES[n], n);
        CHECK_IS(adma_write(side->fd, memory, SIZES[n]), 0);
        free(memory);
        prepare_to_read(SIZES[n]);
        CHECK_IS(adma_read(side->fd, memory, SIZES[n]), SIZES[n]);
        check_read(SIZES[n], n);
        free(memory);
    }
}

static void send_back(struct side *side) {
    memory = take(LARGE + 1000);
    for (unsigned n = 0; n < SIZE_COUNT; n++) {
        CHECK_IS(adma_read(side->fd, memory, LARGE + 1000), SIZES[n]);
        CHECK_IS(adma_write(side->fd, memory, SIZES[n]), 0);
    }
    free(memory);
}

/* A side that waits for a long time sleeps, whichever side it is. */
static void wait_for_a_late_partner(struct side *side) {
    prepare_to_write(LARGE, 1);
    unsigned char *incoming = take(LARGE);
    for (int reads = 0; reads < 2; reads++) {
        int64_t cookie = reads ? adma_iread(side->fd, incoming, LARGE)
                               : adma_iwrite(side->fd, memory, LARGE);
        CHECK(cookie >= 0);
        tell(side, 'g');
        double burnt = burnt_ms(), began = now_ms(CLOCK_MONOTONIC);
        CHECK_IS(adma_wait(cookie), 0);
        burnt = burnt_ms() - burnt;
        if (burnt > 300 && burnt > (now_ms(CLOCK_MONOTONIC) - began) / 2) {
            fprintf(stderr, "waiting took %f ms of the processor\n", burnt);
            exit(1);
        }
    }
    CHECK(is_painted(incoming, LARGE, 2));
}

static void come_late(struct side *side) {
    unsigned char *incoming = take(LARGE);
    prepare_to_write(LARGE, 2);
    CHECK_IS(hear(side), 'g');
    nap_ms(600);
    CHECK_IS(adma_read(side->fd, incoming, LARGE), LARGE);
    CHECK(is_painted(incoming, LARGE, 1));
    CHECK_IS(hear(side), 'g');
    nap_ms(600);
    CHECK_IS(adma_write(side->fd, memory, LARGE), 0);
}

/* A buffer that is too short receives what fits, and both lengths can be queried. */
static void write_too_much(struct side *side) {
    for (unsigned n = 1; n < SIZE_COUNT; n++) {
        for (int blocking = 0; blocking < 2; blocking++) {
            prepare_to_write(SIZES[n], n);
            CHECK_IS(adma_write(side->fd, memory, SIZES[n]), 0);
            free(memory);
        }
    }
    CHECK_IS(hear(side), 'd');
}

static void read_too_little(struct side *side) {
    for (unsigned n = 1; n < SIZE_COUNT; n++) {
        size_t half = SIZES[n] / 2;
        uint64_t message = 7, buffer = 7;
        prepare_to_read(half);
        int64_t cookie = adma_iread(side->fd, memory, half);
        CHECK_IS(adma_wait(cookie), ADMA_EMSGSIZE);
        CHECK_SAYS("the message was truncated");
        CHECK_IS(adma_check(cookie), ADMA_EMSGSIZE);
        CHECK_IS(adma_result(cookie), ADMA_EMSGSIZE);
        CHECK_IS(adma_lengths(cookie, &message, &buffer), 0);
        CHECK(message == SIZES[n] && buffer == half);
        CHECK_IS(adma_lengths(cookie, NULL, &buffer), 0);
        CHECK_IS(adma_lengths(cookie, &message, NULL), 0);
        check_read(half, n);
        free(memory);
        prepare_to_read(half);
        CHECK_IS(adma_read(side->fd, memory, half), ADMA_EMSGSIZE);
        check_read(half, n);
        free(memory);
    }
    tell(side, 'd');
}

/* Errors are stored for a long time, but not for ever. */
enum { FAILURES = 9000, KNOWN = 4096 };

static void write_in_vain(struct side *side) {
    for (unsigned n = 0; n < FAILURES; n++) CHECK_IS(adma_write(side->fd, "ab", 2), 0);
    CHECK_IS(hear(side), 'd');
}

static void fail_often(struct side *side) {
    unsigned char byte;
    uint64_t message, buffer;
    int64_t first = -1, last = -1;
    for (unsigned n = 0; n < FAILURES; n++) {
        last = adma_iread(side->fd, &byte, 1);
        CHECK(last >= 0);
        CHECK_IS(adma_wait(last), ADMA_EMSGSIZE);
        if (n == 0) first = last;
    }
    for (int64_t cookie = last; cookie > last - 2 * KNOWN; cookie -= 100) {
        CHECK_IS(adma_check(cookie), ADMA_EMSGSIZE);
        CHECK_IS(adma_lengths(cookie, &message, &buffer), 0);
        CHECK(message == 2 && buffer == 1);
    }
    CHECK_IS(adma_check(first), ADMA_EIDRM);
    CHECK_IS(adma_wait(first), ADMA_EIDRM);
    CHECK_SAYS("too long ago");
    tell(side, 'd');
}

/* Thousands of messages of random sizes, several in flight at a time. */
enum { MESSAGES = 5000, WINDOW = 16, MOST = 300000 };

static uint32_t next_random(uint32_t *state) {
    *state ^= *state << 13;
    *state ^= *state >> 17;
    return *state ^= *state << 5;
}

/* Mostly small ones, sometimes a large one. */
static size_t random_size(uint32_t *state) {
    static const uint32_t BOUNDS[] = {49, 200, 9000, 9000, 70000, MOST};
    return next_random(state) % BOUNDS[next_random(state) % 6];
}

static void write_many(struct side *side) {
    unsigned char *slots[WINDOW];
    int64_t cookies[WINDOW];
    uint32_t state = 4711;
    for (int n = 0; n < WINDOW; n++) slots[n] = take(MOST);
    for (unsigned n = 0; n < MESSAGES; n++) {
        unsigned slot = n % WINDOW;
        size_t len = random_size(&state);
        if (n >= WINDOW) CHECK_IS(adma_wait(cookies[slot]), 0);
        paint(slots[slot], len, n);
        cookies[slot] = adma_iwrite(side->fd, slots[slot], len);
        CHECK(cookies[slot] >= 0);
    }
    for (unsigned n = MESSAGES; n < MESSAGES + WINDOW; n++)
        CHECK_IS(adma_wait(cookies[n % WINDOW]), 0);
    for (int n = 0; n < WINDOW; n++) free(slots[n]);
}

static void read_many(struct side *side) {
    unsigned char *slots[WINDOW];
    int64_t cookies[WINDOW];
    uint32_t state = 4711;
    for (int n = 0; n < WINDOW; n++) {
        slots[n] = take(MOST);
        cookies[n] = adma_iread(side->fd, slots[n], MOST);
        CHECK(cookies[n] >= 0);
    }
    for (unsigned n = 0; n < MESSAGES; n++) {
        unsigned slot = n % WINDOW;
        size_t len = random_size(&state);
        CHECK_IS(adma_wait(cookies[slot]), 0);
        CHECK_IS(adma_result(cookies[slot]), len);
        CHECK(is_painted(slots[slot], len, n));
        if (n + WINDOW < MESSAGES) cookies[slot] = adma_iread(side->fd, slots[slot], MOST);
    }
    for (int n = 0; n < WINDOW; n++) free(slots[n]);
}

/* Two threads, each with a link of its own, and both directions at once. */
struct worker {
    pthread_t thread;
    int fd;
    unsigned seed;
};

enum { ROUNDS = 60 };

static void *exchange(void *argument) {
    struct worker *worker = argument;
    unsigned char *out = take(LARGE), *in = take(LARGE);
    for (unsigned round = 0; round < ROUNDS; round++) {
        size_t len = SIZES[round % (SIZE_COUNT - 1)];
        paint(out, len, worker->seed + round);
        int64_t write = adma_iwrite(worker->fd, out, len);
        int64_t read = adma_iread(worker->fd, in, LARGE);
        CHECK(write >= 0 && read >= 0);
        CHECK_IS(adma_wait(read), 0);
        CHECK_IS(adma_wait(write), 0);
        CHECK_IS(adma_result(read), len);
        CHECK(is_painted(in, len, worker->seed + round));
    }
    free(out);
    free(in);
    return NULL;
}

static void exchange_over_two(int one, int other) {
    struct worker workers[2] = {{.fd = one, .seed = 1}, {.fd = other, .seed = 100}};
    for (int n = 0; n < 2; n++)
        CHECK_IS(pthread_create(&workers[n].thread, NULL, exchange, &workers[n]), 0);
    for (int n = 0; n < 2; n++) CHECK_IS(pthread_join(workers[n].thread, NULL), 0);
}

static void accept_a_second_link(struct side *side) {
    char name[64];
    snprintf(name, sizeof name, "adma-second-%d", (int)getppid());
    int listener = adma_listen(name);
    CHECK(listener >= 0);
    tell(side, 'l');
    int second = adma_accept(listener);
    CHECK(second >= 0 && second != side->fd);
    exchange_over_two(side->fd, second);
    CHECK_IS(adma_close(listener), 0);
    CHECK_IS(adma_close(second), 0);
    CHECK_IS(adma_close(side->fd), 0);
}

static void connect_a_second_link(struct side *side) {
    char name[64];
    snprintf(name, sizeof name, "adma-second-%d", (int)getppid());
    CHECK_IS(hear(side), 'l');
    int second = adma_connect(name);
    CHECK(second >= 0);
    exchange_over_two(side->fd, second);
}

/* One thread waits for a cookie that others check too, and all get the same result. */
static int64_t shared_cookie;

static void *wait_for_the_shared_cookie(void *argument) {
    (void)argument;
    CHECK_IS(adma_wait(shared_cookie), 0);
    CHECK_IS(adma_result(shared_cookie), 1000);
    return NULL;
}

static void read_with_many_waiting(struct side *side) {
    enum { THREADS = 4 };
    pthread_t threads[THREADS];
    unsigned char bytes[1000];
    shared_cookie = adma_iread(side->fd, bytes, sizeof bytes);
    CHECK(shared_cookie >= 0);
    for (int n = 0; n < THREADS; n++)
        CHECK_IS(pthread_create(&threads[n], NULL, wait_for_the_shared_cookie, NULL), 0);
    nap_ms(50);
    CHECK_IS(adma_check(shared_cookie), 0);
    tell(side, 'g');
    int state;
    while ((state = adma_check(shared_cookie)) == 0) {
    }
    CHECK_IS(state, 1);
    for (int n = 0; n < THREADS; n++) CHECK_IS(pthread_join(threads[n], NULL), 0);
    CHECK(is_painted(bytes, sizeof bytes, 3));
}

static void write_when_told(struct side *side) {
    unsigned char bytes[1000];
    paint(bytes, sizeof bytes, 3);
    CHECK_IS(hear(side), 'g');
    CHECK_IS(adma_write(side->fd, bytes, sizeof bytes), 0);
}

/* Checking is optional: tens of thousands of unchecked writes and reads do no harm. */
enum { FORGOTTEN = 150000 };

static void write_and_forget(struct side *side) {
    static unsigned char bytes[100];
    int64_t first = -1, last = -1;
    for (unsigned n = 0; n < FORGOTTEN; n++) {
        while ((last = adma_iwrite(side->fd, bytes, n % 100)) == ADMA_ENOBUFS) nap_ms(1);
        CHECK(last >= 0);
        if (n == 0) first = last;
    }
    CHECK_IS(adma_wait(last), 0);
    /* Long ago: it is complete, and its length is no longer stored. */
    CHECK_IS(adma_check(first), 1);
    CHECK_IS(adma_wait(first), 0);
    CHECK_IS(adma_result(first), ADMA_EIDRM);
    CHECK_IS(last, first + FORGOTTEN - 1);
    CHECK_IS(adma_result(last), (FORGOTTEN - 1) % 100);
    CHECK_IS(adma_check(first + FORGOTTEN), ADMA_ENOENT);
}

static void read_and_forget(struct side *side) {
    static unsigned char bytes[100];
    int64_t last = -1;
    for (unsigned n = 0; n < FORGOTTEN; n++) {
        last = adma_iread(side->fd, bytes, 100);
        CHECK(last >= 0);
        if (n % 1000 == 999) CHECK_IS(adma_wait(last), 0);
    }
    CHECK_IS(adma_wait(last), 0);
    CHECK_IS(adma_result(last), (FORGOTTEN - 1) % 100);
}

int main(void) {
    bound_time();
    both_ways(write_first, read_second);
    both_ways(read_first, write_second);
    both_ways(write_before_both_wait, read_before_both_wait);
    both_ways(send_and_get_back, send_back);
    both_ways(wait_for_a_late_partner, come_late);
    both_ways(write_too_much, read_too_little);
    between(write_in_vain, fail_often);
    both_ways(write_many, read_many);
    between(accept_a_second_link, connect_a_second_link);
    between(read_with_many_waiting, write_when_told);
    between(write_and_forget, read_and_forget);
    return 0;
}
