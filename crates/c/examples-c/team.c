/* Four processes compute pi together: each sums its part of a series, and an allreduce adds the parts. Then each
 * sends every other one a number, and all gather what they got.
 *
 *   cargo build --release -p memferry-c
 *   cc -Icrates/c/include crates/c/examples-c/team.c -Ltarget/release \
 *      -Wl,-rpath,$PWD/target/release -ladma -o team && ./team
 */

#define _POSIX_C_SOURCE 200809L

#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "adma.h"

enum { RANKS = 4, TERMS = 4000000 };

static void check(int code, const char *what) {
    if (code < 0) {
        fprintf(stderr, "%s: %s\n", what, adma_last_error());
        exit(1);
    }
}

static double work(const char *name, size_t rank) {
    int team = adma_team_join(name, rank, RANKS);
    check(team, "joining");

    /* pi = 4 (1 - 1/3 + 1/5 - ...): the terms rank, rank + 4, rank + 8, ... */
    double part = 0, pi = 0;
    for (size_t term = rank; term < TERMS; term += RANKS) {
        part += (term % 2 ? -4.0 : 4.0) / (2.0 * (double)term + 1.0);
    }
    check(adma_allreduce(team, &part, &pi, 1, ADMA_DOUBLE, ADMA_SUM), "adding");

    uint64_t sent[RANKS], received[RANKS];
    for (size_t to = 0; to < RANKS; to++) sent[to] = 10 * rank + to;
    check(adma_alltoall(team, sent, received, sizeof sent[0]), "exchanging");
    for (size_t from = 0; from < RANKS; from++) {
        if (received[from] != 10 * from + rank) {
            fprintf(stderr, "rank %zu got %llu\n", rank, (unsigned long long)received[from]);
            exit(1);
        }
    }
    check(adma_barrier(team), "waiting");
    check(adma_team_leave(team), "leaving");
    return pi;
}

int main(void) {
    char name[64];
    snprintf(name, sizeof name, "team-example-%d", (int)getpid());
    for (size_t rank = 1; rank < RANKS; rank++) {
        pid_t child = fork();
        if (child < 0) {
            perror("fork");
            return 1;
        }
        if (child == 0) {
            work(name, rank);
            return 0;
        }
    }
    double pi = work(name, 0);
    int status = 0, is_good = pi > 3.14159 && pi < 3.14160;
    while (wait(&status) > 0) is_good &= status == 0;
    printf("pi is %.6f, and what was sent and what was received are: %s\n", pi,
           is_good ? "equal" : "DIFFERENT");
    return is_good ? 0 : 1;
}
