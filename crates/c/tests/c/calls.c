/* Every call, with good arguments and bad ones, on one thread. */

#define _POSIX_C_SOURCE 200809L

#include "check.h"

enum { LARGE = 3 * 1024 * 1024 + 17 };

static const size_t SIZES[] = {1, 7, 8, 63, 64, 65, 4095, 4096, 4097, 70000, 524288, LARGE};
enum { SIZE_COUNT = sizeof SIZES / sizeof SIZES[0] };

/* A range that starts inside the address space and ends outside. */
static void *near_the_end(void) { return (void *)(UINTPTR_MAX - 15); }

static void a_copy_moves_all_bytes_and_no_others(void) {
    unsigned char *src = take(LARGE + 64), *dst = take(LARGE + 64);
    for (unsigned n = 0; n < SIZE_COUNT; n++) {
        for (size_t offset = 0; offset < 3; offset++) {
            size_t len = SIZES[n];
            paint(src, LARGE + 64, n);
            memset(dst, 0xee, LARGE + 64);
            CHECK_IS(adma_copy(src, dst + 8 + offset, len), 0);
            CHECK(is_painted(dst + 8 + offset, len, n));
            CHECK_IS(dst[7 + offset], 0xee);
            CHECK_IS(dst[8 + offset + len], 0xee);

            memset(dst, 0xee, LARGE + 64);
            int64_t cookie = adma_icopy(src, dst + 8 + offset, len);
            CHECK(cookie >= 0);
            CHECK_IS(adma_wait_copy(cookie), 0);
            CHECK(is_painted(dst + 8 + offset, len, n));
            CHECK_IS(dst[7 + offset], 0xee);
            CHECK_IS(dst[8 + offset + len], 0xee);
        }
    }
    free(src);
    free(dst);
}

static void overlapping_ranges_give_the_result_of_memmove(void) {
    static const size_t SHIFTS[] = {1, 64, 4096, 1000000};
    unsigned char *ours = take(LARGE + 1000000), *theirs = take(LARGE + 1000000);
    for (unsigned n = 0; n < SIZE_COUNT; n++) {
        for (unsigned s = 0; s < 4; s++) {
            size_t len = SIZES[n], shift = SHIFTS[s], all = len + shift;
            for (int up = 0; up < 2; up++) {
                for (int waits = 0; waits < 2; waits++) {
                    unsigned char *from = up ? ours : ours + shift;
                    unsigned char *to = up ? ours + shift : ours;
                    paint(ours, all, n);
                    memcpy(theirs, ours, all);
                    memmove(theirs + (to - ours), theirs + (from - ours), len);
                    if (waits) CHECK_IS(adma_copy(from, to, len), 0);
                    else CHECK_IS(adma_wait_copy(adma_icopy(from, to, len)), 0);
                    CHECK(memcmp(ours, theirs, all) == 0);
                }
            }
        }
    }
    CHECK_IS(adma_copy(ours, ours, LARGE), 0);
    CHECK_IS(adma_wait_copy(adma_icopy(ours, ours, LARGE)), 0);
    free(ours);
    free(theirs);
}

static void a_check_tells_the_end_and_can_be_asked_again(void) {
    unsigned char *src = take(LARGE), *dst = take(LARGE);
    paint(src, LARGE, 5);
    int64_t cookie = adma_icopy(src, dst, LARGE);
    int state;
    while ((state = adma_check_copy(cookie)) == 0) {
    }
    CHECK_IS(state, 1);
    CHECK(is_painted(dst, LARGE, 5));
    for (int again = 0; again < 3; again++) {
        CHECK_IS(adma_wait_copy(cookie), 0);
        CHECK_IS(adma_check_copy(cookie), 1);
    }
    /* Thousands of copies later the result is the same. */
    for (int n = 0; n < 5000; n++) CHECK(adma_icopy(src, dst, 100 + n % 20000) >= 0);
    CHECK_IS(adma_wait_copy(cookie), 0);
    CHECK_IS(adma_check_copy(cookie), 1);
    CHECK_IS(adma_fini(), 0);
    free(src);
    free(dst);
}

static void a_notification_arrives_after_the_data(void) {
    unsigned char *src = take(LARGE), *dst = take(LARGE);
    uint64_t variable = 0, value = 0x100000000u;
    for (unsigned n = 0; n < SIZE_COUNT; n++) {
        size_t len = SIZES[n];
        paint(src, len, n);
        memset(dst, 0, len);
        value++;
        int64_t cookie = adma_icopy_notify(src, dst, len, &variable, value);
        CHECK(cookie >= 0);
        while (__atomic_load_n(&variable, __ATOMIC_ACQUIRE) != value) {
        }
        CHECK(is_painted(dst, len, n));
        CHECK_IS(adma_wait_copy(cookie), 0);

        memset(dst, 0, len);
        value++;
        cookie = adma_icopy_notify(src, dst, len, &variable, value);
        CHECK(cookie >= 0);
        CHECK_IS(adma_wait_notify(&variable, value, -1), 0);
        CHECK(is_painted(dst, len, n));
        CHECK_IS(adma_wait_notify(&variable, value, 0), 0);
        CHECK_IS(adma_wait_copy(cookie), 0);
    }
    free(src);
    free(dst);
}

static void a_bad_notification_variable_starts_nothing(void) {
    unsigned char src[64], dst[64] = {0};
    uint64_t words[2] = {3, 3};
    uint64_t *crooked = (uint64_t *)(void *)((char *)words + 4);
    paint(src, 64, 9);
    CHECK_IS(adma_icopy_notify(src, dst, 64, NULL, 1), ADMA_EFAULT);
    CHECK_SAYS("adma_icopy_notify: the notification variable is a null pointer");
    CHECK_IS(adma_icopy_notify(src, dst, 64, crooked, 1), ADMA_EINVAL);
    CHECK_SAYS("aligned to 8 bytes");
    CHECK_IS(adma_icopy_notify(NULL, dst, 64, words, 1), ADMA_EFAULT);
    CHECK_IS(adma_icopy_notify(src, near_the_end(), 64, words, 1), ADMA_EOVERFLOW);
    CHECK(words[0] == 3 && words[1] == 3);
    CHECK_IS(dst[0], 0);
    CHECK_IS(adma_wait_notify(NULL, 1, 0), ADMA_EFAULT);
    CHECK_IS(adma_wait_notify(crooked, 1, 0), ADMA_EINVAL);
    CHECK_IS(adma_wait_notify(words, 1, 0), ADMA_ETIMEDOUT);
    CHECK_IS(adma_wait_notify(words, 1, 1000000), ADMA_ETIMEDOUT);
    CHECK_SAYS("adma_wait_notify: the variable did not become 1 within 1000000 ns");
}

static void a_fill_sets_all_bytes_and_no_others(void) {
    unsigned char *dst = take(LARGE + 2);
    for (unsigned n = 0; n < SIZE_COUNT; n++) {
        size_t len = SIZES[n];
        memset(dst, 0, LARGE + 2);
        CHECK_IS(adma_fill(dst + 1, 0x1a5, len), 0);
        for (size_t i = 0; i < len; i++) CHECK(dst[1 + i] == 0xa5);
        CHECK_IS(dst[0], 0);
        CHECK_IS(dst[1 + len], 0);
    }
    free(dst);
}

static void a_compare_finds_the_first_difference(void) {
    unsigned char *a = take(LARGE), *b = take(LARGE);
    for (unsigned n = 0; n < SIZE_COUNT; n++) {
        size_t len = SIZES[n], at = 12345;
        paint(a, len, 1);
        paint(b, len, 1);
        CHECK_IS(adma_compare(a, b, len, &at), 0);
        CHECK_IS(at, 12345);
        b[len - 1] ^= 1;
        CHECK_IS(adma_compare(a, b, len, &at), 1);
        CHECK_IS(at, len - 1);
        b[len / 2] ^= 1;
        CHECK_IS(adma_compare(a, b, len, NULL), len == 1 ? 0 : 1);
        b[0] ^= 128;
        CHECK_IS(adma_compare(a, b, len, &at), 1);
        CHECK_IS(at, 0);
    }
    free(a);
    free(b);
}

/* The definition, bit by bit. */
static uint32_t crc_of(const unsigned char *bytes, size_t len) {
    uint32_t crc = 0xffffffffu;
    for (size_t i = 0; i < len; i++) {
        crc ^= bytes[i];
        for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? 0x82f63b78u : 0);
    }
    return ~crc;
}

static void a_crc_is_that_of_the_standard_with_and_without_a_copy(void) {
    unsigned char *src = take(LARGE), *dst = take(LARGE);
    uint32_t crc = 7;
    CHECK_IS(adma_crc("123456789", 9, &crc), 0);
    CHECK_IS(crc, 0xe3069283u);
    CHECK_IS(adma_crc(NULL, 0, &crc), 0);
    CHECK_IS(crc, 0);
    for (unsigned n = 0; n < SIZE_COUNT; n++) {
        size_t len = SIZES[n];
        paint(src, len, n);
        uint32_t expected = crc_of(src, len), found[4] = {7, 7, 7, 7};
        CHECK_IS(adma_crc(src, len, &found[0]), 0);
        CHECK_IS(adma_copy_crc(src, dst, len, &found[1]), 0);
        CHECK(is_painted(dst, len, n));
        memset(dst, 0, len);
        int64_t first = adma_icrc(src, len, &found[2]);
        int64_t second = adma_icopy_crc(src, dst, len, &found[3]);
        CHECK(first >= 0 && second >= 0);
        CHECK_IS(adma_wait_copy(second), 0);
        CHECK_IS(adma_wait_copy(first), 0);
        CHECK(is_painted(dst, len, n));
        for (unsigned i = 0; i < 4; i++) CHECK_IS(found[i], expected);
    }
    crc = 7;
    CHECK_IS(adma_copy_crc(src, src + 1, 100, &crc), ADMA_EINVAL);
    CHECK_SAYS("adma_copy_crc: the source overlaps the target");
    CHECK_IS(adma_icopy_crc(src, dst, 100, NULL), ADMA_EFAULT);
    CHECK_SAYS("adma_icopy_crc: the variable for the CRC is a null pointer");
    CHECK_IS(adma_crc(src, 100, (uint32_t *)(void *)((char *)&crc + 1)), ADMA_EINVAL);
    CHECK_IS(adma_crc(NULL, 1, &crc), ADMA_EFAULT);
    CHECK_IS(adma_icrc(near_the_end(), 64, &crc), ADMA_EOVERFLOW);
    CHECK_IS(crc, 7);
    free(src);
    free(dst);
}

static void a_dualcast_fills_both_targets_and_refuses_what_overlaps(void) {
    unsigned char *src = take(LARGE), *one = take(LARGE + 1), *two = take(LARGE + 1);
    for (unsigned n = 0; n < SIZE_COUNT; n++) {
        size_t len = SIZES[n];
        paint(src, len, n);
        memset(one, 0xee, LARGE + 1);
        memset(two, 0xee, LARGE + 1);
        CHECK_IS(adma_dualcast(src, one, two + 1, len), 0);
        CHECK(is_painted(one, len, n) && is_painted(two + 1, len, n));
        CHECK(one[len] == 0xee && two[0] == 0xee);
        memset(one, 0, len);
        memset(two, 0, len);
        int64_t cookie = adma_idualcast(src, two, one, len);
        CHECK(cookie >= 0);
        CHECK_IS(adma_wait_copy(cookie), 0);
        CHECK(is_painted(one, len, n) && is_painted(two, len, n));
    }
    memset(one, 0, 300);
    CHECK_IS(adma_dualcast(src, one, one + 99, 100), ADMA_EINVAL);
    CHECK_SAYS("adma_dualcast: the target overlaps the second target");
    CHECK_IS(adma_dualcast(one, one + 99, two, 100), ADMA_EINVAL);
    CHECK_IS(adma_idualcast(one, two, one + 1, 100), ADMA_EINVAL);
    CHECK_SAYS("adma_idualcast: the source overlaps the second target");
    CHECK_IS(adma_idualcast(src, one, NULL, 100), ADMA_EFAULT);
    CHECK_SAYS("the second target is a null pointer");
    for (unsigned i = 0; i < 300; i++) CHECK_IS(one[i], 0);
    CHECK_IS(adma_dualcast(NULL, NULL, NULL, 0), 0);
    free(src);
    free(one);
    free(two);
}

static void a_null_pointer_is_refused(void) {
    unsigned char bytes[16] = {0};
    size_t at = 7, sizes[] = {1, 16, LARGE, SIZE_MAX};
    for (unsigned n = 0; n < 4; n++) {
        size_t len = sizes[n];
        CHECK_IS(adma_copy(NULL, bytes, len), ADMA_EFAULT);
        CHECK_SAYS("adma_copy: the source is a null pointer");
        CHECK_IS(adma_icopy(NULL, bytes, len), ADMA_EFAULT);
        CHECK_IS(adma_fill(NULL, 1, len), ADMA_EFAULT);
        CHECK_IS(adma_compare(NULL, bytes, len, &at), ADMA_EFAULT);
    }
    CHECK_IS(adma_copy(bytes, NULL, 16), ADMA_EFAULT);
    CHECK_SAYS("adma_copy: the target is a null pointer");
    CHECK_IS(adma_icopy(bytes, NULL, 16), ADMA_EFAULT);
    CHECK_IS(adma_compare(bytes, NULL, 16, &at), ADMA_EFAULT);
    CHECK_IS(at, 7);
}

static void a_range_that_wraps_is_refused(void) {
    unsigned char bytes[64] = {0};
    size_t at = 7;
    CHECK_IS(adma_copy(near_the_end(), bytes, 64), ADMA_EOVERFLOW);
    CHECK_SAYS("past the end of the address space");
    CHECK_IS(adma_copy(bytes, near_the_end(), 64), ADMA_EOVERFLOW);
    CHECK_IS(adma_copy(bytes, bytes + 1, SIZE_MAX), ADMA_EOVERFLOW);
    CHECK_IS(adma_icopy(near_the_end(), bytes, 64), ADMA_EOVERFLOW);
    CHECK_IS(adma_icopy(bytes, near_the_end(), SIZE_MAX), ADMA_EOVERFLOW);
    CHECK_IS(adma_fill(near_the_end(), 1, 64), ADMA_EOVERFLOW);
    CHECK_IS(adma_compare(near_the_end(), bytes, 64, &at), ADMA_EOVERFLOW);
    CHECK_IS(adma_compare(bytes, near_the_end(), 64, &at), ADMA_EOVERFLOW);
    CHECK_IS(at, 7);
}

static void a_length_of_zero_is_fine_with_any_pointer(void) {
    void *pointers[] = {NULL, near_the_end(), &pointers};
    uint64_t variable = 0;
    size_t at = 7;
    for (unsigned n = 0; n < 3; n++) {
        void *any = pointers[n];
        CHECK_IS(adma_copy(any, any, 0), 0);
        int64_t cookie = adma_icopy(any, any, 0);
        CHECK(cookie >= 0);
        CHECK_IS(adma_check_copy(cookie), 1);
        CHECK_IS(adma_wait_copy(cookie), 0);
        cookie = adma_icopy_notify(any, any, 0, &variable, n + 1);
        CHECK_IS(adma_wait_copy(cookie), 0);
        CHECK_IS(variable, n + 1);
        CHECK_IS(adma_fill(any, 1, 0), 0);
        CHECK_IS(adma_compare(any, any, 0, &at), 0);
        CHECK_IS(at, 7);
    }
    CHECK_IS(adma_icopy_notify(NULL, NULL, 0, NULL, 1), ADMA_EFAULT);
}

static void a_cookie_that_is_none_is_refused(void) {
    unsigned char a = 1, b;
    int64_t cookie = adma_icopy(&a, &b, 1);
    CHECK(cookie > 0);
    CHECK_IS(adma_wait_copy(cookie + 1), ADMA_ENOENT);
    CHECK_IS(adma_check_copy(cookie + 1000000), ADMA_ENOENT);
    CHECK_SAYS("never issued");
    int64_t next = adma_icopy(&a, &b, 1);
    CHECK(next != cookie);
    CHECK_IS(adma_wait_copy(next), 0);
    int64_t strangers[] = {0, 1, 42, INT64_MAX};
    for (unsigned n = 0; n < 4; n++) {
        CHECK_IS(adma_check_copy(strangers[n]), ADMA_ESTALE);
        CHECK_IS(adma_wait_copy(strangers[n]), ADMA_ESTALE);
    }
    CHECK_IS(adma_wait_copy(adma_icopy(NULL, &b, 1)), ADMA_EBADF);
    CHECK_IS(adma_check_copy(-1), ADMA_EBADF);
    CHECK_IS(adma_check_copy(INT64_MIN), ADMA_EBADF);
}

static void every_code_has_a_text(void) {
    static const int CODES[] = {
        ADMA_EPERM,     ADMA_ENOENT,       ADMA_EIO,        ADMA_ENXIO,
        ADMA_EBADF,     ADMA_ECHILD,       ADMA_EAGAIN,     ADMA_EACCES,
        ADMA_EFAULT,    ADMA_EBUSY,        ADMA_EINVAL,     ADMA_EMFILE,
        ADMA_ENOSPC,    ADMA_EPIPE,        ADMA_EDOM,       ADMA_ERANGE,
        ADMA_ENOMSG,    ADMA_EIDRM,        ADMA_ENOLINK,    ADMA_EPROTO,
        ADMA_EBADMSG,   ADMA_EOVERFLOW,    ADMA_EUSERS,     ADMA_EMSGSIZE,
        ADMA_EOPNOTSUPP, ADMA_EADDRINUSE,  ADMA_EADDRNOTAVAIL, ADMA_ENOBUFS,
        ADMA_ETIMEDOUT, ADMA_ECONNREFUSED, ADMA_EINPROGRESS, ADMA_ESTALE,
        ADMA_ECANCELED, ADMA_ENOTRECOVERABLE, ADMA_EXDEV,   ADMA_EHOSTUNREACH,
        ADMA_ENOMEM,    ADMA_ENODEV,       ADMA_EALREADY,
    };
    enum { COUNT = sizeof CODES / sizeof CODES[0] };
    for (int n = 0; n < COUNT; n++) {
        CHECK(CODES[n] < 0);
        CHECK(strlen(adma_strerror(CODES[n])) > 3);
        CHECK(strcmp(adma_strerror(CODES[n]), adma_strerror(-9999)) != 0);
        for (int m = 0; m < n; m++) {
            CHECK(CODES[m] != CODES[n]);
            CHECK(strcmp(adma_strerror(CODES[m]), adma_strerror(CODES[n])) != 0);
        }
    }
    CHECK(strcmp(adma_strerror(0), "success") == 0);
    CHECK(strcmp(adma_strerror(-9999), "unknown error code") == 0);
    CHECK(strlen(adma_strerror(INT32_MIN)) > 3);
    CHECK(strlen(adma_strerror(INT32_MAX)) > 3);
}

int main(void) {
    bound_time();
    CHECK(strcmp(adma_last_error(), "") == 0);
    CHECK(adma_version()[0] >= '0' && adma_version()[0] <= '9');
    a_copy_moves_all_bytes_and_no_others();
    overlapping_ranges_give_the_result_of_memmove();
    a_check_tells_the_end_and_can_be_asked_again();
    a_notification_arrives_after_the_data();
    a_bad_notification_variable_starts_nothing();
    a_fill_sets_all_bytes_and_no_others();
    a_compare_finds_the_first_difference();
    a_crc_is_that_of_the_standard_with_and_without_a_copy();
    a_dualcast_fills_both_targets_and_refuses_what_overlaps();
    a_null_pointer_is_refused();
    a_range_that_wraps_is_refused();
    a_length_of_zero_is_fine_with_any_pointer();
    a_cookie_that_is_none_is_refused();
    every_code_has_a_text();
    return 0;
}
