/* Batches: many copies or fills that one call starts. */

#define _POSIX_C_SOURCE 200809L

#include "check.h"

enum { MOST = 1500, STRIDE = 3000 };

static unsigned char *sources, *targets;
static struct adma_copy_item copies[MOST];
static struct adma_fill_item fills[MOST];
static int64_t cookies[MOST];

/* Lengths on all sides of what the library treats differently, 0 among them. */
static size_t length_of(size_t n) { return n * 37 % STRIDE; }

static void lay_out(size_t count, unsigned seed) {
    for (size_t n = 0; n < count; n++) {
        paint(sources + n * STRIDE, length_of(n), seed + (unsigned)n);
        copies[n].src = sources + n * STRIDE;
        copies[n].dst = targets + (count - 1 - n) * STRIDE;
        copies[n].len = length_of(n);
    }
    memset(targets, 0xee, (size_t)MOST * STRIDE);
}

static void check_copied(size_t count, unsigned seed) {
    for (size_t n = 0; n < count; n++) {
        const unsigned char *target = targets + (count - 1 - n) * STRIDE;
        CHECK(is_painted(target, length_of(n), seed + (unsigned)n));
        CHECK_IS(target[length_of(n)], 0xee);
    }
}

static void one_cookie_stands_for_all_copies(void) {
    static const size_t COUNTS[] = {1, 2, 64, 700, MOST};
    for (unsigned n = 0; n < sizeof COUNTS / sizeof COUNTS[0]; n++) {
        size_t count = COUNTS[n];
        lay_out(count, n);
        int64_t cookie = adma_icopy_many(copies, count, NULL);
        CHECK(cookie >= 0);
        /* The list may be freed now. */
        memset(copies, 0xff, sizeof copies);
        CHECK_IS(adma_wait_copy(cookie), 0);
        CHECK_IS(adma_check_copy(cookie), 1);
        check_copied(count, n);
    }
}

static void every_copy_has_a_cookie_if_there_is_space_for_them(void) {
    static const size_t COUNTS[] = {1, 64, MOST};
    for (unsigned n = 0; n < sizeof COUNTS / sizeof COUNTS[0]; n++) {
        size_t count = COUNTS[n];
        lay_out(count, n);
        memset(cookies, 0xff, sizeof cookies);
        CHECK_IS(adma_icopy_many(copies, count, cookies), 0);
        for (size_t i = count; i-- > 0;) {
            CHECK(cookies[i] >= 0);
            CHECK_IS(adma_wait_copy(cookies[i]), 0);
            CHECK(is_painted(copies[i].dst, copies[i].len, n + (unsigned)i));
        }
        check_copied(count, n);
        CHECK(count == MOST || cookies[count] == -1);
    }
}

static void fills_are_batches_too(void) {
    for (int each = 0; each < 2; each++) {
        memset(targets, 0, (size_t)MOST * STRIDE);
        for (size_t n = 0; n < MOST; n++) {
            fills[n].dst = targets + n * STRIDE;
            fills[n].len = length_of(n);
            fills[n].value = (int)n + 256;
        }
        int64_t cookie = adma_ifill_many(fills, MOST, each ? cookies : NULL);
        CHECK(cookie >= 0);
        CHECK_IS(adma_wait_copy(each ? cookies[MOST - 1] : cookie), 0);
        for (size_t n = 0; each && n < MOST; n++) CHECK_IS(adma_wait_copy(cookies[n]), 0);
        for (size_t n = 0; n < MOST; n++) {
            for (size_t i = 0; i < length_of(n); i++)
                CHECK_IS(targets[n * STRIDE + i], n & 0xff);
            CHECK_IS(targets[n * STRIDE + length_of(n)], 0);
        }
    }
}

static void ranges_of_one_copy_may_overlap(void) {
    for (size_t n = 0; n < 8; n++) {
        paint(targets + n * STRIDE, 2000, (unsigned)n);
        copies[n].src = targets + n * STRIDE;
        copies[n].dst = targets + n * STRIDE + 10 * n + 1;
        copies[n].len = 2000;
    }
    CHECK_IS(adma_wait_copy(adma_icopy_many(copies, 8, NULL)), 0);
    for (size_t n = 0; n < 8; n++)
        CHECK(is_painted(targets + n * STRIDE + 10 * n + 1, 2000, (unsigned)n));
}

static void what_makes_no_sense_starts_nothing(void) {
    lay_out(2, 1);
    copies[1] = copies[0];
    copies[0].len = copies[1].len = 16;
    copies[1].dst = (unsigned char *)copies[0].dst + 100;
    CHECK_IS(adma_wait_copy(adma_icopy_many(NULL, 0, NULL)), 0);
    CHECK_IS(adma_icopy_many(NULL, 0, cookies), 0);
    CHECK_IS(adma_icopy_many(NULL, 2, NULL), ADMA_EFAULT);
    CHECK_SAYS("adma_icopy_many: the list of 2 copies is a null pointer");
    CHECK_IS(adma_ifill_many(NULL, 2, cookies), ADMA_EFAULT);
    CHECK_SAYS("adma_ifill_many: the list of 2 fills is a null pointer");
    CHECK_IS(adma_icopy_many(copies, SIZE_MAX, NULL), ADMA_EOVERFLOW);
    copies[1].src = NULL;
    CHECK_IS(adma_icopy_many(copies, 2, NULL), ADMA_EFAULT);
    CHECK_IS(adma_icopy_many(copies, 2, cookies), ADMA_EFAULT);
    CHECK_SAYS("the source is a null pointer");
    copies[1].src = (void *)(UINTPTR_MAX - 7);
    CHECK_IS(adma_icopy_many(copies, 2, cookies), ADMA_EOVERFLOW);
    CHECK_IS(*(unsigned char *)copies[0].dst, 0xee);
}

int main(void) {
    bound_time();
    sources = take((size_t)MOST * STRIDE);
    targets = take((size_t)MOST * STRIDE);
    one_cookie_stands_for_all_copies();
    every_copy_has_a_cookie_if_there_is_space_for_them();
    fills_are_batches_too();
    ranges_of_one_copy_may_overlap();
    what_makes_no_sense_starts_nothing();
    free(sources);
    free(targets);
    return 0;
}
