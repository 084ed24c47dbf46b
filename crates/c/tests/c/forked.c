/* Forked children copy, check and close on their own; the parent is not affected. */

#define _POSIX_C_SOURCE 200809L

#include <pthread.h>
#include <sys/wait.h>

#include "check.h"

enum { LARGE = 8 * 1024 * 1024, COPIES = 10 };

static unsigned char *src, *dst[COPIES];
static int64_t cookies[COPIES];

/* Runs `deed` in a child and expects it to succeed. */
static void in_a_child(void (*deed)(void)) {
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        bound_time();
        deed();
        _exit(0);
    }
    int status = -1;
    CHECK_IS(waitpid(child, &status, 0), child);
    CHECK_IS(status, 0);
}

/* Every call works, whatever was called before. */
static void all_calls_work(void) {
    unsigned char *from = take(LARGE), *to = take(LARGE);
    size_t lengths[] = {100, 100000, LARGE}, at;
    uint64_t variable = 0;
    for (unsigned n = 0; n < 3; n++) {
        size_t len = lengths[n];
        paint(from, len, n);
        CHECK_IS(adma_copy(from, to, len), 0);
        CHECK(is_painted(to, len, n));
        CHECK_IS(adma_fill(to, 0, len), 0);
        CHECK_IS(adma_compare(from, to, len, &at), 1);
        int64_t cookie = adma_icopy(from, to, len);
        CHECK(cookie >= 0);
        int state;
        while ((state = adma_check_copy(cookie)) == 0) {
        }
        CHECK_IS(state, 1);
        CHECK_IS(adma_compare(from, to, len, &at), 0);
        cookie = adma_icopy_notify(from, to, len, &variable, n + 1);
        CHECK(cookie >= 0);
        CHECK_IS(adma_wait_notify(&variable, n + 1, -1), 0);
        CHECK_IS(adma_wait_copy(cookie), 0);
    }
    free(from);
    free(to);
}

static void cookies_of_the_parent_are_refused(void) {
    for (int n = 0; n < COPIES; n++) {
        CHECK_IS(adma_check_copy(cookies[n]), ADMA_ECHILD);
        CHECK_IS(adma_wait_copy(cookies[n]), ADMA_ECHILD);
        CHECK_SAYS("before a fork");
    }
    CHECK_IS(adma_check_copy(-1), ADMA_EBADF);
}

static void a_grandchild(void) {
    cookies_of_the_parent_are_refused();
    all_calls_work();
    CHECK_IS(adma_fini(), 0);
}

static void a_child(void) {
    cookies_of_the_parent_are_refused();
    all_calls_work();
    cookies_of_the_parent_are_refused();
    unsigned char a = 1, b = 0;
    int64_t own = adma_icopy(&a, &b, 1);
    CHECK_IS(adma_wait_copy(own), 0);
    CHECK_IS(adma_wait_copy(own + 1), ADMA_ENOENT);
    in_a_child(a_grandchild);
    CHECK_IS(adma_wait_copy(own), 0);
    CHECK_IS(adma_fini(), 0);
    CHECK_IS(adma_wait_copy(own), ADMA_ESTALE);
    cookies_of_the_parent_are_refused();
    all_calls_work();
    CHECK_IS(adma_wait_copy(own), ADMA_ESTALE);
}

static void a_child_that_closes_first(void) {
    CHECK_IS(adma_fini(), 0);
    cookies_of_the_parent_are_refused();
    all_calls_work();
}

static void a_child_with_a_bad_environment(void) {
    unsigned char a = 1, b = 0;
    CHECK_IS(adma_fini(), 0);
    CHECK_IS(setenv("MEMFERRY_CHANNELS", "plenty", 1), 0);
    CHECK_IS(adma_init(), ADMA_EDOM);
    CHECK_SAYS("adma_init: MEMFERRY_CHANNELS=\"plenty\"");
    CHECK_IS(adma_copy(&a, &b, 1), ADMA_EDOM);
    CHECK_IS(adma_icopy(&a, &b, 1), ADMA_EDOM);
    CHECK_IS(unsetenv("MEMFERRY_CHANNELS"), 0);
    all_calls_work();
}

static int stopping;

static void *keep_calling(void *argument) {
    unsigned char *to = argument;
    while (!__atomic_load_n(&stopping, __ATOMIC_RELAXED)) {
        int64_t cookie = adma_icopy(src, to, 20000);
        CHECK(cookie >= 0);
        int outcome = adma_wait_copy(cookie);
        CHECK(outcome == 0 || outcome == ADMA_ESTALE);
        CHECK_IS(adma_copy(src, to, 1000000), 0);
    }
    return NULL;
}

/* Other threads are inside calls, and closing and opening the library, when it forks. */
static void *keep_closing(void *argument) {
    (void)argument;
    while (!__atomic_load_n(&stopping, __ATOMIC_RELAXED)) {
        CHECK_IS(adma_fini(), 0);
        CHECK_IS(adma_init(), 0);
    }
    return NULL;
}

static void a_child_of_a_busy_parent(void) {
    all_calls_work();
    CHECK_IS(adma_fini(), 0);
}

static void children_of_a_busy_parent_work(void) {
    pthread_t threads[3];
    CHECK_IS(pthread_create(&threads[0], NULL, keep_calling, dst[0]), 0);
    CHECK_IS(pthread_create(&threads[1], NULL, keep_calling, dst[1]), 0);
    CHECK_IS(pthread_create(&threads[2], NULL, keep_closing, NULL), 0);
    for (int n = 0; n < 30; n++) in_a_child(a_child_of_a_busy_parent);
    __atomic_store_n(&stopping, 1, __ATOMIC_RELAXED);
    for (int n = 0; n < 3; n++) CHECK_IS(pthread_join(threads[n], NULL), 0);
}

int main(void) {
    bound_time();
    /* A child may make the first call: then it opens the library itself. */
    in_a_child(all_calls_work);
    src = take(LARGE);
    paint(src, LARGE, 3);
    void (*deeds[])(void) = {a_child, a_child_that_closes_first, a_child_with_a_bad_environment};
    for (unsigned deed = 0; deed < 3; deed++) {
        for (int n = 0; n < COPIES; n++) {
            dst[n] = take(LARGE);
            cookies[n] = adma_icopy(src, dst[n], LARGE);
            CHECK(cookies[n] >= 0);
        }
        in_a_child(deeds[deed]);
        for (int n = 0; n < COPIES; n++) {
            CHECK_IS(adma_wait_copy(cookies[n]), 0);
            CHECK(is_painted(dst[n], LARGE, 3));
            if (deed < 2) free(dst[n]);
        }
    }
    children_of_a_busy_parent_work();
    return 0;
}
