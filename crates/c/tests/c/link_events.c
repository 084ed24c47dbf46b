/* Links and listeners in event loops: their descriptors are readable exactly while there is a
 * reason to call. */

#define _POSIX_C_SOURCE 200809L

#include <poll.h>
#include <sys/epoll.h>

#include "pair.h"

enum { LARGE = 5 * 1024 * 1024 + 11, PATIENCE_MS = 60000 };

static const size_t SIZES[] = {0, 1, 49, 9000, 70000, 1024 * 1024 + 3, LARGE};
enum { SIZE_COUNT = sizeof SIZES / sizeof SIZES[0] };

static int is_readable(int fd, int timeout_ms) {
    struct pollfd entry = {.fd = fd, .events = POLLIN};
    int ready = poll(&entry, 1, timeout_ms);
    CHECK(ready == 0 || (ready == 1 && entry.revents == POLLIN));
    return ready;
}

/* Checks until nothing is found; then the descriptor becomes unreadable. It may stay readable
 * for a short time: a wakeup arrives late, or a thread of the library has not consumed it yet. */
static void becomes_quiet(int fd) {
    for (int tries = 0; tries < 2000; tries++) {
        CHECK_IS(adma_peek(fd), ADMA_ENOMSG);
        if (!is_readable(fd, 20)) return;
        nap_ms(1);
    }
    CHECK(!"it stays readable without a reason");
}

/* Sleeps on the descriptor and checks, until a cookie is complete; neither hangs nor spins. */
static void finish_by_poll(int fd, int64_t cookie) {
    CHECK(cookie >= 0);
    int turns = 0, state;
    while ((state = adma_check(cookie)) == 0) {
        CHECK(is_readable(fd, PATIENCE_MS));
        CHECK(++turns < 100000);
    }
    CHECK_IS(state, 1);
}

/* An unread message makes the descriptor readable, and its length can be queried. */
static void notice_what_comes(struct side *side) {
    unsigned char *bytes = take(LARGE);
    becomes_quiet(side->fd);
    for (unsigned n = 0; n < SIZE_COUNT; n++) {
        tell(side, 'w');
        int64_t found;
        while ((found = adma_peek(side->fd)) == ADMA_ENOMSG) CHECK(is_readable(side->fd, PATIENCE_MS));
        CHECK_IS(found, SIZES[n]);
        CHECK_IS(adma_peek(side->fd), SIZES[n]);
        CHECK(is_readable(side->fd, PATIENCE_MS));
        CHECK_IS(adma_read(side->fd, bytes, LARGE), SIZES[n]);
        CHECK(is_painted(bytes, SIZES[n], n));
        becomes_quiet(side->fd);
        tell(side, 'r');
    }
    free(bytes);
}

static void write_when_told(struct side *side) {
    unsigned char *bytes = take(LARGE);
    for (unsigned n = 0; n < SIZE_COUNT; n++) {
        CHECK_IS(hear(side), 'w');
        nap_ms(n % 2 ? 100 : 0);
        paint(bytes, SIZES[n], n);
        CHECK_IS(adma_write(side->fd, bytes, SIZES[n]), 0);
        CHECK_IS(hear(side), 'r');
    }
    free(bytes);
}

/* Posted reads and writes complete while the program only sleeps in poll and checks. */
static void exchange_by_poll(struct side *side) {
    unsigned char *out = take(LARGE), *in = take(LARGE);
    for (unsigned round = 0; round < 4 * SIZE_COUNT; round++) {
        size_t len = SIZES[round % SIZE_COUNT];
        paint(out, len, round);
        int64_t read = adma_iread(side->fd, in, LARGE);
        nap_ms(round % 5 == 3 ? 20 : 0);
        int64_t write = adma_iwrite(side->fd, out, len);
        if (round % 2) {
            finish_by_poll(side->fd, write);
            finish_by_poll(side->fd, read);
        } else {
            finish_by_poll(side->fd, read);
            finish_by_poll(side->fd, write);
        }
        CHECK_IS(adma_result(read), len);
        CHECK(is_painted(in, len, round));
    }
    /* Neither side exits before the other has everything. */
    tell(side, 'd');
    CHECK_IS(hear(side), 'd');
    free(out);
    free(in);
}

/* An operation that was complete at once makes the descriptor readable until it is checked. */
static void write_small_ones(struct side *side) {
    unsigned char byte = 7;
    for (int n = 0; n < 20; n++) {
        becomes_quiet(side->fd);
        int64_t first = adma_iwrite(side->fd, &byte, 1), second = adma_iwrite(side->fd, &byte, 1);
        CHECK(first >= 0 && second >= 0);
        CHECK(is_readable(side->fd, 0));
        CHECK_IS(adma_wait(first), 0);
        CHECK_IS(adma_peek(side->fd), ADMA_ENOMSG);
        CHECK(is_readable(side->fd, 0));
        CHECK_IS(adma_check(second), 1);
    }
    becomes_quiet(side->fd);
    tell(side, 'd');
}

static void read_small_ones(struct side *side) {
    unsigned char byte = 0;
    for (int n = 0; n < 40; n++) {
        CHECK_IS(adma_read(side->fd, &byte, 1), 1);
        CHECK_IS(byte, 7);
    }
    CHECK_IS(hear(side), 'd');
}

/* A process that sleeps in poll, or in a read, uses no processor time; also while another result
 * is unchecked. */
static void sleep_and_be_woken(struct side *side) {
    unsigned char bytes[100];
    double burnt = burnt_ms(), began = now_ms(CLOCK_MONOTONIC);
    tell(side, 'g');
    while (adma_peek(side->fd) == ADMA_ENOMSG) CHECK(is_readable(side->fd, PATIENCE_MS));
    CHECK_IS(adma_read(side->fd, bytes, 100), 100);
    int64_t unasked = adma_iread(side->fd, bytes, 50), also = adma_iwrite(side->fd, bytes, 8);
    CHECK(unasked >= 0 && also >= 0);
    tell(side, 'g');
    CHECK_IS(adma_read(side->fd, bytes + 50, 50), 50);
    burnt = burnt_ms() - burnt;
    if (burnt > 400 && burnt > (now_ms(CLOCK_MONOTONIC) - began) / 4) {
        fprintf(stderr, "sleeping took %f ms of the processor\n", burnt);
        exit(1);
    }
    CHECK_IS(adma_wait(unasked), 0);
    CHECK_IS(adma_wait(also), 0);
}

static void write_late(struct side *side) {
    unsigned char bytes[100] = {0};
    CHECK_IS(hear(side), 'g');
    nap_ms(700);
    CHECK_IS(adma_write(side->fd, bytes, 100), 0);
    CHECK_IS(hear(side), 'g');
    CHECK_IS(adma_write(side->fd, bytes, 50), 0);
    nap_ms(700);
    CHECK_IS(adma_write(side->fd, bytes, 50), 0);
    CHECK_IS(adma_read(side->fd, bytes, 100), 8);
}

/* A disconnected peer is a reason too, and stays one. */
static void notice_the_end(struct side *side) {
    unsigned char byte;
    becomes_quiet(side->fd);
    tell(side, 'e');
    while (adma_peek(side->fd) == ADMA_ENOMSG) CHECK(is_readable(side->fd, PATIENCE_MS));
    for (int again = 0; again < 3; again++) {
        CHECK_IS(adma_peek(side->fd), ADMA_EPIPE);
        CHECK(is_readable(side->fd, PATIENCE_MS));
        CHECK_IS(adma_read(side->fd, &byte, 1), ADMA_EPIPE);
        CHECK(is_readable(side->fd, PATIENCE_MS));
    }
}

static void notice_the_end_of_a_read(struct side *side) {
    unsigned char bytes[100];
    int64_t cookie = adma_iread(side->fd, bytes, 100);
    CHECK(cookie >= 0);
    CHECK_IS(adma_check(cookie), 0);
    tell(side, 'e');
    int state;
    while ((state = adma_check(cookie)) == 0) CHECK(is_readable(side->fd, PATIENCE_MS));
    CHECK_IS(state, ADMA_EPIPE);
    CHECK(is_readable(side->fd, PATIENCE_MS));
}

static void end(struct side *side) {
    CHECK_IS(hear(side), 'e');
    nap_ms(100);
}

static void close_and_stay(struct side *side) {
    CHECK_IS(hear(side), 'e');
    nap_ms(100);
    CHECK_IS(adma_close(side->fd), 0);
    nap_ms(300);
}

/* One loop over a listener and many links, which blocks only in epoll. */
enum { CLIENTS = 6, ECHOES = 120 };

struct customer {
    int fd;
    int64_t cookie;
    int is_reading;
    unsigned char *bytes;
};

static void watch(int set, int fd, void *whom) {
    struct epoll_event interest = {.events = EPOLLIN, .data.ptr = whom};
    CHECK_IS(epoll_ctl(set, EPOLL_CTL_ADD, fd, &interest), 0);
}

/* Reads and writes back while it can without blocking. Returns 0 when the client has
 * disconnected. */
static int serve_one(struct customer *customer) {
    for (;;) {
        int state = adma_check(customer->cookie);
        if (state == 0) return 1;
        if (state == ADMA_EPIPE) return 0;
        CHECK_IS(state, 1);
        if (customer->is_reading) {
            int64_t len = adma_result(customer->cookie);
            CHECK(len >= 0);
            customer->cookie = adma_iwrite(customer->fd, customer->bytes, (size_t)len);
        } else {
            customer->cookie = adma_iread(customer->fd, customer->bytes, LARGE);
        }
        customer->is_reading = !customer->is_reading;
        if (customer->cookie == ADMA_EPIPE) return 0;
        CHECK(customer->cookie >= 0);
    }
}

static void serve(const char *name) {
    struct customer customers[CLIENTS];
    int listener = adma_listen(name), set = epoll_create1(0), came = 0, left = 0;
    CHECK(listener >= 0 && set >= 0);
    watch(set, listener, NULL);
    while (left < CLIENTS) {
        struct epoll_event events[4];
        int count = epoll_wait(set, events, 4, PATIENCE_MS);
        CHECK(count > 0);
        for (int n = 0; n < count; n++) {
            struct customer *customer = events[n].data.ptr;
            if (customer == NULL) {
                CHECK(came < CLIENTS);
                customer = &customers[came++];
                customer->fd = adma_accept(listener);
                customer->bytes = take(LARGE);
                customer->is_reading = 1;
                CHECK(customer->fd >= 0);
                customer->cookie = adma_iread(customer->fd, customer->bytes, LARGE);
                CHECK(customer->cookie >= 0);
                watch(set, customer->fd, customer);
            }
            if (!serve_one(customer)) {
                CHECK_IS(adma_close(customer->fd), 0);
                free(customer->bytes);
                left++;
            }
        }
    }
    CHECK_IS(came, CLIENTS);
    CHECK_IS(adma_close(listener), 0);
    close(set);
}

static void be_a_client(const char *name, unsigned seed) {
    unsigned char *out = take(LARGE), *in = take(LARGE);
    int fd = connect_patiently(name);
    CHECK(fd >= 0);
    for (unsigned round = 0; round < ECHOES; round++) {
        size_t len = SIZES[(seed + round) % (round % 20 ? SIZE_COUNT - 2 : SIZE_COUNT)];
        paint(out, len, seed + round);
        int64_t cookie = adma_iwrite(fd, out, len);
        CHECK(cookie >= 0);
        CHECK_IS(adma_read(fd, in, LARGE), len);
        CHECK_IS(adma_wait(cookie), 0);
        CHECK(is_painted(in, len, seed + round));
    }
    if (seed % 2) CHECK_IS(adma_close(fd), 0);
    free(out);
    free(in);
}

static void one_loop_serves_many(void) {
    const char *name = fresh_name();
    pid_t children[CLIENTS + 1];
    for (unsigned n = 0; n <= CLIENTS; n++) {
        children[n] = fork();
        CHECK(children[n] >= 0);
        if (children[n] == 0) {
            bound_time();
            if (n == 0) serve(name);
            else be_a_client(name, n);
            exit(0);
        }
    }
    for (unsigned n = 0; n <= CLIENTS; n++) CHECK_IS(ending_of(children[n]), 0);
}

int main(void) {
    bound_time();
    both_ways(notice_what_comes, write_when_told);
    between(exchange_by_poll, exchange_by_poll);
    both_ways(write_small_ones, read_small_ones);
    both_ways(sleep_and_be_woken, write_late);
    both_ways(notice_the_end, end);
    both_ways(notice_the_end, close_and_stay);
    both_ways(notice_the_end_of_a_read, end);
    both_ways(notice_the_end_of_a_read, close_and_stay);
    one_loop_serves_many();
    return 0;
}
