/* Opening and closing, and many threads at once. */

#define _POSIX_C_SOURCE 200809L

#include <pthread.h>
#include <sched.h>

#include "check.h"

enum { LARGE = 8 * 1024 * 1024, COPIES = 12, THREADS = 4, ROUNDS = 60 };

static void cookies_mean_nothing_while_the_library_is_closed(void) {
    CHECK_IS(adma_check_copy(0), ADMA_ESTALE);
    CHECK_IS(adma_wait_copy(1), ADMA_ESTALE);
    CHECK_IS(adma_wait_copy(-1), ADMA_EBADF);
    CHECK_IS(adma_fini(), 0);
    CHECK_IS(adma_fini(), 0);
}

static void closing_waits_for_what_is_in_flight(void) {
    unsigned char *src = take(LARGE), *dst[COPIES];
    int64_t cookies[COPIES];
    uint64_t variables[COPIES] = {0};
    paint(src, LARGE, 1);
    CHECK_IS(adma_init(), 0);
    CHECK_IS(adma_init(), 0);
    for (int n = 0; n < COPIES; n++) {
        dst[n] = take(LARGE);
        cookies[n] = adma_icopy_notify(src, dst[n], LARGE, &variables[n], 77);
        CHECK(cookies[n] >= 0);
    }
    CHECK_IS(adma_fini(), 0);
    for (int n = 0; n < COPIES; n++) {
        CHECK_IS(variables[n], 77);
        CHECK(is_painted(dst[n], LARGE, 1));
        CHECK_IS(adma_check_copy(cookies[n]), ADMA_ESTALE);
    }
    /* Earlier cookies stay invalid when the library is open again. */
    int64_t cookie = adma_icopy(src, dst[0], LARGE);
    CHECK(cookie >= 0);
    for (int n = 0; n < COPIES; n++) {
        CHECK(cookies[n] != cookie);
        CHECK_IS(adma_wait_copy(cookies[n]), ADMA_ESTALE);
        CHECK_SAYS("adma_wait_copy: cookie");
    }
    CHECK_IS(adma_wait_copy(cookie), 0);
    for (int n = 0; n < COPIES; n++) free(dst[n]);
    free(src);
}

/* The memory of one thread, and a copy that another thread waits for. */
struct part {
    pthread_t thread;
    unsigned number;
    unsigned char *src, *dst;
    int64_t cookie;
};

static size_t length_of(unsigned number, unsigned round) {
    static const size_t LENGTHS[] = {10, 3000, 20000, 300000, 2000000};
    return LENGTHS[(number + round) % 5];
}

static void *copy_and_leave_the_last_copy_to_others(void *argument) {
    struct part *part = argument;
    CHECK(strcmp(adma_last_error(), "") == 0);
    CHECK_IS(adma_copy(NULL, part->dst, part->number + 1), ADMA_EFAULT);
    for (unsigned round = 0; round < ROUNDS; round++) {
        size_t len = length_of(part->number, round);
        paint(part->src, len, round);
        memset(part->dst, 0, len);
        int64_t cookie = adma_icopy(part->src, part->dst, len);
        CHECK(cookie >= 0);
        CHECK_IS(adma_wait_copy(cookie), 0);
        CHECK(is_painted(part->dst, len, round));
    }
    CHECK_SAYS("adma_copy: the source");
    paint(part->src, LARGE, part->number);
    part->cookie = adma_icopy(part->src, part->dst, LARGE);
    return NULL;
}

static void threads_copy_at_once_and_wait_for_each_other(void) {
    struct part parts[THREADS];
    for (unsigned n = 0; n < THREADS; n++) {
        parts[n] = (struct part){.number = n, .src = take(LARGE), .dst = take(LARGE)};
        CHECK_IS(pthread_create(&parts[n].thread, NULL, copy_and_leave_the_last_copy_to_others,
                                &parts[n]), 0);
    }
    for (unsigned n = 0; n < THREADS; n++) {
        CHECK_IS(pthread_join(parts[n].thread, NULL), 0);
        CHECK_IS(adma_wait_copy(parts[n].cookie), 0);
        CHECK(is_painted(parts[n].dst, LARGE, n));
        free(parts[n].src);
        free(parts[n].dst);
    }
}

static int stopping;

static void *copy_whatever_happens(void *argument) {
    struct part *part = argument;
    for (unsigned round = 0; !__atomic_load_n(&stopping, __ATOMIC_RELAXED); round++) {
        size_t len = length_of(part->number, round);
        paint(part->src, len, round);
        memset(part->dst, 0, len);
        if (round % 2 == 0) {
            CHECK_IS(adma_copy(part->src, part->dst, len), 0);
        } else {
            /* If the library was closed in between, the copy is complete and its cookie stale. */
            int64_t cookie = adma_icopy(part->src, part->dst, len);
            CHECK(cookie >= 0);
            sched_yield();
            int outcome = adma_wait_copy(cookie);
            CHECK(outcome == 0 || outcome == ADMA_ESTALE);
        }
        CHECK(is_painted(part->dst, len, round));
    }
    return NULL;
}

static void closing_under_the_feet_of_other_threads_harms_nobody(void) {
    struct part parts[THREADS];
    for (unsigned n = 0; n < THREADS; n++) {
        parts[n] = (struct part){.number = n, .src = take(LARGE), .dst = take(LARGE)};
        CHECK_IS(pthread_create(&parts[n].thread, NULL, copy_whatever_happens, &parts[n]), 0);
    }
    for (int n = 0; n < 100; n++) {
        CHECK_IS(adma_fini(), 0);
        if (n % 3 == 0) CHECK_IS(adma_init(), 0);
    }
    __atomic_store_n(&stopping, 1, __ATOMIC_RELAXED);
    for (unsigned n = 0; n < THREADS; n++) {
        CHECK_IS(pthread_join(parts[n].thread, NULL), 0);
        free(parts[n].src);
        free(parts[n].dst);
    }
}

static uint64_t shared_variable;

static void *sleep_on_the_variable(void *argument) {
    (void)argument;
    CHECK_IS(adma_wait_notify(&shared_variable, 5, -1), 0);
    return NULL;
}

static void a_copy_wakes_all_who_sleep_on_its_variable(void) {
    pthread_t threads[THREADS];
    unsigned char *src = take(LARGE), *dst = take(LARGE);
    for (int n = 0; n < THREADS; n++)
        CHECK_IS(pthread_create(&threads[n], NULL, sleep_on_the_variable, NULL), 0);
    /* Neither threads that sleep on a variable nor their copies prevent a close of the library. */
    CHECK_IS(adma_fini(), 0);
    int64_t cookie = adma_icopy_notify(src, dst, LARGE, &shared_variable, 5);
    CHECK(cookie >= 0);
    for (int n = 0; n < THREADS; n++) CHECK_IS(pthread_join(threads[n], NULL), 0);
    CHECK_IS(adma_wait_copy(cookie), 0);
    free(src);
    free(dst);
}

int main(void) {
    bound_time();
    cookies_mean_nothing_while_the_library_is_closed();
    closing_waits_for_what_is_in_flight();
    threads_copy_at_once_and_wait_for_each_other();
    closing_under_the_feet_of_other_threads_harms_nobody();
    a_copy_wakes_all_who_sleep_on_its_variable();
    return 0;
}
