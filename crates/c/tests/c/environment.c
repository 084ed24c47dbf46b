/* What every call returns when the library cannot be opened. Arguments: the expected code, a
 * part of the text, and, so that no thread can be started, a limit in MiB on the memory that may
 * still be mapped. */

#define _XOPEN_SOURCE 700

#include <sys/resource.h>

#include "check.h"

static rlim_t mapped_bytes(void) {
    unsigned long pages = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    CHECK(file != NULL);
    CHECK_IS(fscanf(file, "%lu", &pages), 1);
    fclose(file);
    return (rlim_t)pages * (rlim_t)sysconf(_SC_PAGESIZE);
}

int main(int count, char **arguments) {
    bound_time();
    CHECK(count >= 3);
    int code = atoi(arguments[1]);
    const char *text = arguments[2];
    struct rlimit usual;
    CHECK_IS(getrlimit(RLIMIT_AS, &usual), 0);
    if (count > 3) {
        rlim_t more = (rlim_t)atoi(arguments[3]) << 20;
        struct rlimit tight = {.rlim_cur = mapped_bytes() + more, .rlim_max = usual.rlim_max};
        CHECK_IS(setrlimit(RLIMIT_AS, &tight), 0);
        /* Large stacks, so that these run out before the memory of anything else does. */
        setenv("RUST_MIN_STACK", "16777216", 1);
    }

    unsigned char a[8] = {1}, b[8] = {2};
    uint64_t variable = 4;
    size_t at = 7;
    for (int again = 0; again < 2; again++) {
        CHECK_IS(adma_init(), code);
        CHECK_SAYS(text);
        CHECK_IS(adma_copy(a, b, 8), code);
        CHECK_SAYS(text);
        CHECK_IS(adma_copy(NULL, NULL, 0), code);
        CHECK_IS(adma_icopy(a, b, 8), code);
        CHECK_SAYS("adma_icopy: ");
        CHECK_SAYS(text);
        CHECK_IS(adma_icopy_notify(a, b, 8, &variable, 5), code);
        CHECK_IS(adma_fill(b, 0, 8), code);
        CHECK_IS(adma_compare(a, b, 8, &at), code);
        void *memory = a;
        CHECK_IS(adma_device_alloc(8, &memory), code);
        CHECK_SAYS(text);
        CHECK(memory == a);
        CHECK_IS(adma_register(a, 8), code);
        CHECK_IS(adma_check_copy(0), ADMA_ESTALE);
        CHECK_IS(adma_wait_copy(0), ADMA_ESTALE);
        CHECK_IS(adma_fini(), 0);
    }
    CHECK(b[0] == 2 && variable == 4 && at == 7);

    /* After the setting is corrected, the same process works. */
    CHECK_IS(setrlimit(RLIMIT_AS, &usual), 0);
    unsetenv("MEMFERRY_CHANNELS");
    unsetenv("MEMFERRY_POLICY");
    unsetenv("MEMFERRY_GPU");
    unsetenv("MEMFERRY_CUDA_SOLE_USER");
    setenv("MEMFERRY_PROFILE", "off", 1);
    CHECK_IS(adma_copy(a, b, 8), 0);
    CHECK_IS(b[0], 1);
    return 0;
}
