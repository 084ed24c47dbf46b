/*
 * Copies while it computes, twice: once with a cookie, once with a notification variable.
 *
 * From the root of the repository:
 *
 *   cargo build --release -p memferry-c
 *   cc -std=c11 -O2 -Icrates/c/include crates/c/examples-c/overlap.c \
 *      -Ltarget/release -Wl,-rpath,$PWD/target/release -ladma -o /tmp/overlap
 *   /tmp/overlap
 */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "adma.h"

enum { BYTES = 32 << 20 };

/* Stands for the program's own work, on memory that no copy is using. */
static double compute(void) {
    double sum = 0;
    for (int n = 1; n < 2000000; n++) sum += 1.0 / ((double)n * n);
    return sum;
}

/* Every call returns 0 or more on success, and a negative code otherwise. */
static int64_t expect(const char *step, int64_t result) {
    if (result < 0) {
        fprintf(stderr, "%s: %s (%s)\n", step, adma_last_error(), adma_strerror((int)result));
        exit(1);
    }
    return result;
}

int main(void) {
    unsigned char *src = malloc(BYTES), *dst = malloc(BYTES);
    if (src == NULL || dst == NULL) return 1;
    memset(src, 42, BYTES);

    /* Start the copy. From here on src must not be written and dst not be touched ... */
    int64_t cookie = expect("start", adma_icopy(src, dst, BYTES));
    double first = compute();
    printf("done when the computation was: %s\n",
           expect("check", adma_check_copy(cookie)) ? "yes" : "no");
    /* ... until the copy is complete. A waiting caller copies chunks of it too. */
    expect("wait", adma_wait_copy(cookie));

    /* The same, but completion sets a variable, which any thread may poll. It must live until
     * the copy is complete; the value is set only after all data is visible. */
    uint64_t arrived = 0;
    memset(src, 43, BYTES);
    cookie = expect("start", adma_icopy_notify(src, dst, BYTES, &arrived, 1));
    double second = compute();
    if (__atomic_load_n(&arrived, __ATOMIC_ACQUIRE) != 1) {
        /* Sleep until it is set, without a limit (-1), or for a timeout in nanoseconds. */
        expect("wait for the variable", adma_wait_notify(&arrived, 1, -1));
    }
    expect("wait", adma_wait_copy(cookie));

    int different = (int)expect("compare", adma_compare(src, dst, BYTES, NULL));
    printf("adma %s: copied %d MiB twice beside %.6f and %.6f: %s\n", adma_version(), BYTES >> 20,
           first, second, different ? "different" : "equal");
    free(src);
    free(dst);
    return different;
}
