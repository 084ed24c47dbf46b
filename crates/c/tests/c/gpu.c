/* Memory of a GPU in every copy call; without a GPU, the codes of the calls, and that everything
 * else works. The argument: "call" opens the GPU by adma_use_gpu, "environment" by
 * MEMFERRY_GPU=auto. */

#define _POSIX_C_SOURCE 200809L

#include "check.h"

enum { LARGE = 20 * 1024 * 1024 + 17 };

static const size_t SIZES[] = {1, 64, 4097, 70000, 524288, 3000017, LARGE};
enum { SIZE_COUNT = sizeof SIZES / sizeof SIZES[0] };

static unsigned char *take_of_gpu(size_t bytes) {
    void *memory = NULL;
    CHECK_IS(adma_device_alloc(bytes, &memory), 0);
    CHECK(memory != NULL);
    return memory;
}

static void ordinary_copies_work(void) {
    unsigned char *src = take(LARGE), *dst = take(LARGE);
    for (unsigned n = 0; n < SIZE_COUNT; n++) {
        size_t len = SIZES[n], at = 0;
        paint(src, len, n);
        memset(dst, 0xee, len);
        CHECK_IS(adma_copy(src, dst, len), 0);
        CHECK(is_painted(dst, len, n));
        CHECK_IS(adma_fill(dst, 0x1ff, len), 0);
        CHECK_IS(dst[len - 1], 0xff);
        CHECK_IS(adma_wait_copy(adma_icopy(src, dst, len)), 0);
        CHECK_IS(adma_compare(src, dst, len, &at), 0);
        dst[len - 1]++;
        CHECK_IS(adma_compare(src, dst, len, &at), 1);
        CHECK_IS(at, len - 1);
    }
    CHECK_IS(adma_copy(NULL, dst, 1), ADMA_EFAULT);
    CHECK_IS(adma_copy(NULL, NULL, 0), 0);
    free(src);
    free(dst);
}

static void what_was_never_given_cannot_be_given_back(void) {
    unsigned char byte = 0;
    CHECK_IS(adma_device_free(NULL), 0);
    CHECK_IS(adma_device_free(&byte), ADMA_EINVAL);
    CHECK_SAYS("adma_device_alloc");
    CHECK_IS(adma_unregister(&byte), ADMA_EINVAL);
    CHECK_SAYS("adma_register");
    CHECK_IS(adma_device_alloc(1, NULL), ADMA_EFAULT);
    CHECK_IS(adma_register(NULL, 1), ADMA_EFAULT);
    CHECK_IS(adma_register((void *)(UINTPTR_MAX - 15), 64), ADMA_EOVERFLOW);
}

static void without_a_gpu_the_calls_say_so(void) {
    unsigned char byte = 0;
    void *memory = &byte;
    CHECK_IS(adma_device_alloc(1, &memory), ADMA_ENODEV);
    CHECK_SAYS("adma_device_alloc: no GPU is in use");
    CHECK_SAYS("MEMFERRY_GPU");
    CHECK(memory == &byte);
    CHECK_IS(adma_register(&byte, 1), ADMA_ENODEV);
    CHECK_SAYS("adma_register: no GPU is in use");
}

/* The library is open by now, with or without a GPU. */
static void a_gpu_is_chosen_before_all_else_or_not_at_all(int is_used) {
    CHECK_IS(adma_use_gpu(-1), ADMA_EINVAL);
    CHECK_IS(adma_use_gpu(4000), ADMA_EALREADY);
    CHECK_SAYS("before all other calls");
    CHECK_IS(adma_use_gpu(0), is_used ? 0 : ADMA_EALREADY);
    CHECK_IS(adma_fini(), 0);
    CHECK_IS(adma_use_gpu(4000), ADMA_ENODEV);
    CHECK_SAYS("adma_use_gpu: ");
    CHECK_IS(adma_use_gpu(0), is_used ? 0 : ADMA_ENODEV);
    CHECK_IS(adma_fini(), 0);
}

static void every_call_takes_memory_of_the_gpu(void) {
    unsigned char *src = take(LARGE), *dst = take(LARGE);
    unsigned char *one = take_of_gpu(LARGE), *two = take_of_gpu(LARGE);
    for (unsigned n = 0; n < SIZE_COUNT; n++) {
        for (int waits = 0; waits < 2; waits++) {
            size_t len = SIZES[n] - (size_t)waits, at = 0;
            uint64_t variable = 0;
            paint(src, len, n);
            memset(dst, 0xee, len);
            if (waits) {
                CHECK_IS(adma_copy(src, one, len), 0);
                CHECK_IS(adma_copy(one, two, len), 0);
                CHECK_IS(adma_copy(two, dst, len), 0);
            } else {
                CHECK_IS(adma_wait_copy(adma_icopy(src, one, len)), 0);
                int64_t cookie = adma_icopy_notify(one, two, len, &variable, 9);
                CHECK(cookie >= 0);
                CHECK_IS(adma_wait_notify(&variable, 9, 60000000000), 0);
                CHECK_IS(adma_wait_copy(cookie), 0);
                CHECK_IS(adma_wait_copy(adma_icopy(two, dst, len)), 0);
            }
            CHECK(is_painted(dst, len, n));
            CHECK_IS(adma_compare(two, src, len, &at), 0);
            CHECK_IS(adma_compare(one, two, len, &at), 0);
            if (len == 0) continue;
            CHECK_IS(adma_fill(two + len - 1, (unsigned char)~byte_at(len - 1, n), 1), 0);
            CHECK_IS(adma_compare(src, two, len, &at), 1);
            CHECK_IS(at, len - 1);
            CHECK_IS(adma_fill(two, 7, len), 0);
            CHECK_IS(adma_copy(two, dst, len), 0);
            CHECK(dst[0] == 7 && memcmp(dst, dst + 1, len - 1) == 0);
        }
    }
    /* Ranges inside an allocation, and ranges that overlap. */
    paint(src, LARGE, 3);
    CHECK_IS(adma_copy(src, one, LARGE), 0);
    CHECK_IS(adma_copy(one, one + 1000, LARGE - 1000), 0);
    CHECK_IS(adma_compare(src, one + 1000, LARGE - 1000, NULL), 0);
    CHECK_IS(adma_device_free(one + 1000), ADMA_EINVAL);
    CHECK_IS(adma_device_free(one), 0);
    CHECK_IS(adma_device_free(one), ADMA_EINVAL);
    CHECK_IS(adma_device_free(two), 0);
    free(src);
    free(dst);
}

static void registered_memory_is_copied_like_any_other(void) {
    unsigned char *src = take(LARGE), *inside = take_of_gpu(LARGE), *dst = take(LARGE);
    paint(src, LARGE, 4);
    CHECK_IS(adma_register(src, LARGE), 0);
    CHECK_IS(adma_register(src, LARGE), 0);
    CHECK_IS(adma_register(dst, 0), 0);
    CHECK_IS(adma_copy(src, inside, LARGE), 0);
    CHECK_IS(adma_unregister(src), 0);
    CHECK_IS(adma_wait_copy(adma_icopy(inside, dst, LARGE)), 0);
    CHECK(is_painted(dst, LARGE, 4));
    CHECK_IS(adma_unregister(src), 0);
    CHECK_IS(adma_unregister(src), ADMA_EINVAL);
    CHECK_IS(adma_unregister(dst), 0);
    CHECK_IS(adma_device_free(inside), 0);
    free(src);
    free(dst);
}

static void too_much_memory_is_refused(void) {
    unsigned char byte = 0;
    void *memory = &byte;
    CHECK_IS(adma_device_alloc((size_t)1 << 46, &memory), ADMA_ENOMEM);
    CHECK(memory == &byte);
    CHECK_IS(adma_device_alloc(0, &memory), 0);
    CHECK(memory == NULL);
}

static void closing_gives_everything_back(void) {
    unsigned char *src = take(4096), *inside = take_of_gpu(4096);
    CHECK_IS(adma_register(src, 4096), 0);
    int64_t cookie = adma_icopy(src, inside, 4096);
    CHECK(cookie >= 0);
    CHECK_IS(adma_fini(), 0);
    CHECK_IS(adma_device_free(inside), ADMA_EINVAL);
    CHECK_IS(adma_unregister(src), ADMA_EINVAL);
    CHECK_IS(adma_wait_copy(cookie), ADMA_ESTALE);
    /* The same GPU is in use again from the next call on. */
    inside = take_of_gpu(4096);
    CHECK_IS(adma_copy(src, inside, 4096), 0);
    CHECK_IS(adma_device_free(inside), 0);
    free(src);
}

int main(int count, char **arguments) {
    bound_time();
    CHECK_IS(count, 2);
    int by_call = strcmp(arguments[1], "call") == 0, has_gpu = 0;
    void *probe = NULL;
    if (by_call) {
        int answer = adma_use_gpu(0);
        has_gpu = answer == 0;
        if (!has_gpu) {
            CHECK_IS(answer, ADMA_ENODEV);
            CHECK_SAYS("adma_use_gpu: ");
        }
    } else {
        has_gpu = adma_device_alloc(0, &probe) == 0;
    }
    ordinary_copies_work();
    what_was_never_given_cannot_be_given_back();
    if (has_gpu) {
        every_call_takes_memory_of_the_gpu();
        registered_memory_is_copied_like_any_other();
        too_much_memory_is_refused();
        closing_gives_everything_back();
        ordinary_copies_work();
    } else {
        without_a_gpu_the_calls_say_so();
        puts("skipped: no GPU");
    }
    a_gpu_is_chosen_before_all_else_or_not_at_all(has_gpu);
    ordinary_copies_work();
    return 0;
}
