/*
 * Two processes exchange large arrays over a link while both compute.
 *
 * From the root of the repository:
 *
 *   cargo build --release -p memferry-c
 *   cc -std=c11 -O2 -Icrates/c/include crates/c/examples-c/link.c \
 *      -Ltarget/release -Wl,-rpath,$PWD/target/release -ladma -o /tmp/link
 *   /tmp/link
 */

#define _POSIX_C_SOURCE 200809L

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "adma.h"

enum { BYTES = 32 << 20 };

/* Stands for the program's own work, on memory that no message is using. */
static double compute(void) {
    double sum = 0;
    for (int n = 1; n < 20000000; n++) sum += 1.0 / ((double)n * n);
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

/* Sends an array full of `own` and receives one full of `others`, computing meanwhile. Returns
 * whether all of it arrived. */
static int exchange(const char *who, int link, int own, int others) {
    unsigned char *outgoing = malloc(BYTES), *incoming = malloc(BYTES), *wanted = malloc(BYTES);
    if (outgoing == NULL || incoming == NULL || wanted == NULL) exit(1);
    memset(outgoing, own, BYTES);
    memset(wanted, others, BYTES);

    /* Post both. From here on `outgoing` must not be written and `incoming` not be touched ... */
    int64_t write = expect("write", adma_iwrite(link, outgoing, BYTES));
    int64_t read = expect("read", adma_iread(link, incoming, BYTES));
    double sum = compute();
    int was_over = expect("check", adma_check(write)) == 1 && expect("check", adma_check(read)) == 1;
    /* ... until both are complete. Which side posted first does not matter. */
    expect("wait", adma_wait(write));
    expect("wait", adma_wait(read));

    int is_equal = expect("result", adma_result(read)) == BYTES &&
                   expect("compare", adma_compare(incoming, wanted, BYTES, NULL)) == 0;
    printf("%s: %d MiB out and in beside %.6f, over when that was: %s\n", who, BYTES >> 20, sum,
           was_over ? "yes" : "no");
    fflush(stdout);
    free(outgoing);
    free(incoming);
    free(wanted);
    return is_equal;
}

static int run_child(const char *name) {
    /* The parent may not listen yet. */
    int link;
    while ((link = adma_connect(name)) == ADMA_ECONNREFUSED) {
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    }
    expect("connect", link);
    int is_equal = exchange("child", link, 2, 1);
    /* A small message, with blocking calls: the parent sends its result. */
    expect("report", adma_write(link, &is_equal, sizeof is_equal));
    expect("close", adma_close(link));
    return !is_equal;
}

static int run_parent(const char *name) {
    int listener = (int)expect("listen", adma_listen(name));
    int link = (int)expect("accept", adma_accept(listener));
    expect("close", adma_close(listener));
    int is_equal = exchange("parent", link, 1, 2), theirs = 0;
    expect("report", adma_read(link, &theirs, sizeof theirs));
    expect("close", adma_close(link));
    printf("adma %s: %d MiB each way: %s\n", adma_version(), BYTES >> 20,
           is_equal && theirs ? "equal" : "different");
    return !(is_equal && theirs);
}

int main(void) {
    char name[64];
    snprintf(name, sizeof name, "adma-example-%d", (int)getpid());
    /* Without this, messages make progress only while one of the two is inside a call. */
    setenv("MEMFERRY_BACKGROUND", "on", 0);
    pid_t child = fork();
    if (child < 0) return 1;
    if (child == 0) return run_child(name);
    int failed = run_parent(name), status = -1;
    return waitpid(child, &status, 0) == child && status == 0 ? failed : 1;
}
