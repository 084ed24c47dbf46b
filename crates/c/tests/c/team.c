/* Teams of processes: every collective operation at all sizes, wrong arguments, and a rank that dies. */

#define _POSIX_C_SOURCE 200809L

#include <signal.h>
#include <sys/wait.h>

#include "check.h"

enum { RANKS = 3, LARGEST = 300000 };

static const size_t COUNTS[] = {0, 1, 7, 100, 3000, LARGEST};
enum { COUNT_COUNT = sizeof COUNTS / sizeof COUNTS[0] };

static int32_t value(size_t rank, size_t at) { return (int32_t)(rank * 1000 + at % 777); }

static void multiply(void *into, const void *from, size_t count, void *arg) {
    int32_t *product = into;
    const int32_t *factor = from;
    for (size_t at = 0; at < count; at++) product[at] *= factor[at];
    ++*(int *)arg;
}

static void all_operations(int team, size_t rank) {
    int32_t *mine = take(RANKS * LARGEST * sizeof *mine), *got = take(RANKS * LARGEST * sizeof *got);
    for (unsigned n = 0; n < COUNT_COUNT; n++) {
        size_t count = COUNTS[n], bytes = count * sizeof *mine, root = n % RANKS;
        for (size_t at = 0; at < RANKS * count; at++) mine[at] = value(rank, at);
        CHECK_IS(adma_barrier(team), 0);

        CHECK_IS(adma_allreduce(team, mine, got, count, ADMA_INT32, ADMA_SUM), 0);
        for (size_t at = 0; at < count; at++) {
            CHECK_IS(got[at], value(0, at) + value(1, at) + value(2, at));
        }
        memset(got, 0, bytes);
        CHECK_IS(adma_reduce(team, mine, rank == root ? got : NULL, count, ADMA_INT32, ADMA_MAX, root), 0);
        for (size_t at = 0; at < count; at++) CHECK_IS(got[at], rank == root ? value(2, at) : 0);

        int calls = 0;
        for (size_t at = 0; at < count; at++) got[at] = (int32_t)rank + 1;
        CHECK_IS(adma_allreduce_by(team, got, got, count, sizeof *got, multiply, &calls), 0);
        for (size_t at = 0; at < count; at++) CHECK_IS(got[at], 6);

        memcpy(got, mine, bytes);
        CHECK_IS(adma_broadcast(team, got, bytes, root), 0);
        for (size_t at = 0; at < count; at++) CHECK_IS(got[at], value(root, at));

        CHECK_IS(adma_allgather(team, mine, got, bytes), 0);
        for (size_t at = 0; at < RANKS * count; at++) CHECK_IS(got[at], value(at / count, at % count));
        memset(got, 0, RANKS * bytes);
        CHECK_IS(adma_gather(team, mine, got, bytes, root), 0);
        for (size_t at = 0; rank == root && at < RANKS * count; at++) {
            CHECK_IS(got[at], value(at / count, at % count));
        }

        CHECK_IS(adma_alltoall(team, mine, got, bytes), 0);
        for (size_t at = 0; at < RANKS * count; at++) {
            CHECK_IS(got[at], value(at / count, rank * count + at % count));
        }
        CHECK_IS(adma_alltoall(team, mine, mine, bytes), 0);
        CHECK_IS(memcmp(mine, got, RANKS * bytes), 0);
    }
    free(mine);
    free(got);
}

static void wrong_arguments(int team) {
    double number = 1;
    CHECK_IS(adma_barrier(-1), ADMA_EBADF);
    CHECK_IS(adma_barrier(team + 1), ADMA_EBADF);
    CHECK_IS(adma_team_leave(team + 1), ADMA_EBADF);
    CHECK_IS(adma_team_join(NULL, 0, 1), ADMA_EFAULT);
    CHECK_IS(adma_team_join("team", 1, 1), ADMA_EINVAL);
    CHECK_IS(adma_broadcast(team, NULL, 8, 0), ADMA_EFAULT);
    CHECK_IS(adma_broadcast(team, &number, 8, RANKS), ADMA_EINVAL);
    CHECK_IS(adma_allreduce(team, &number, &number, 1, 10, ADMA_SUM), ADMA_EINVAL);
    CHECK_IS(adma_allreduce(team, &number, &number, 1, ADMA_DOUBLE, 10), ADMA_EINVAL);
    CHECK_IS(adma_allreduce(team, &number, &number, 1, ADMA_DOUBLE, ADMA_BIT_OR), ADMA_EINVAL);
    CHECK_SAYS("integers only");
    CHECK_IS(adma_allreduce_by(team, &number, &number, 1, 8, NULL, NULL), ADMA_EFAULT);
    CHECK_IS(adma_allreduce(team, &number, &number, 1, ADMA_DOUBLE, ADMA_SUM), 0);
    CHECK(number == RANKS);
}

static void member(const char *name, size_t rank) {
    bound_time();
    int team = adma_team_join(name, rank, RANKS);
    CHECK(team >= 0);
    all_operations(team, rank);
    wrong_arguments(team);
    if (rank == 2) raise(SIGKILL);
    CHECK_IS(adma_barrier(team), ADMA_EPIPE);
    CHECK_SAYS("rank 2");
    CHECK_IS(adma_barrier(team), ADMA_EPIPE);
    CHECK_IS(adma_team_leave(team), 0);
    CHECK_IS(adma_fini(), 0);
    exit(0);
}

int main(void) {
    char name[64];
    snprintf(name, sizeof name, "adma-team-%d", (int)getpid());
    pid_t children[RANKS];
    for (size_t rank = 0; rank < RANKS; rank++) {
        children[rank] = fork();
        CHECK(children[rank] >= 0);
        if (children[rank] == 0) member(name, rank);
    }
    for (size_t rank = 0; rank < RANKS; rank++) {
        int status = 0;
        CHECK_IS(waitpid(children[rank], &status, 0), children[rank]);
        CHECK(rank == 2 ? WIFSIGNALED(status) : status == 0);
    }
    return 0;
}
