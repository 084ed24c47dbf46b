/* Tasks of many ranks: a message around all of them, messages to random neighbours, and ranks that
 * wait. */
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "member.h"

/* Passes a number around all ranks, each of which adds 1. Returns whether rank 0 gets the right one. */
static int lap(uint64_t number)
{
    int next = (rank_of_self + 1) % ranks, previous = (rank_of_self + ranks - 1) % ranks;
    uint64_t token = number;
    if (rank_of_self == 0) {
        MPI_Send(&token, sizeof token, MPI_BYTE, next, 0, MPI_COMM_WORLD);
        MPI_Recv(&token, sizeof token, MPI_BYTE, previous, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        return token == number + (uint64_t)ranks - 1;
    }
    MPI_Recv(&token, sizeof token, MPI_BYTE, previous, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    token++;
    MPI_Send(&token, sizeof token, MPI_BYTE, next, 0, MPI_COMM_WORLD);
    return 1;
}

const char *ring(long bytes, long iterations, struct timing *timing)
{
    (void)bytes;
    if (ranks < 2)
        return "a ring needs two ranks";
    int right = 1;
    for (long turn = warm_up_of(iterations); turn > 0; turn--)
        right &= lap((uint64_t)turn);
    MPI_Barrier(MPI_COMM_WORLD);
    double begin = now_ns();
    for (long turn = 0; turn < iterations; turn++)
        right &= lap((uint64_t)turn);
    timing->total_ns = timing->messages_ns = now_ns() - begin;
    return all_agree(right) ? NULL : "a number came around changed";
}

/* Ranks that this one sends to and receives from: a random cycle through all ranks for each neighbour,
 * the same as in the other candidates. */
static int find_neighbours(int count, int *targets, int *sources)
{
    int *cycle = malloc((size_t)ranks * sizeof *cycle);
    if (cycle == NULL)
        return 0;
    for (int neighbour = 0; neighbour < count; neighbour++) {
        for (int rank = 0; rank < ranks; rank++)
            cycle[rank] = rank;
        for (int place = ranks - 1; place > 0; place--) {
            uint64_t random = mixed(((uint64_t)neighbour << 32) + (uint64_t)place);
            int other = (int)(random % (uint64_t)place), kept = cycle[place];
            cycle[place] = cycle[other];
            cycle[other] = kept;
        }
        targets[neighbour] = cycle[rank_of_self];
        for (int rank = 0; rank < ranks; rank++)
            if (cycle[rank] == rank_of_self)
                sources[neighbour] = rank;
    }
    free(cycle);
    return 1;
}

enum { MAX_NEIGHBOURS = 64 };

static int talk(int count, const int *targets, const int *sources)
{
    MPI_Request requests[2 * MAX_NEIGHBOURS];
    uint64_t sent = (uint64_t)rank_of_self, received[MAX_NEIGHBOURS];
    for (int index = 0; index < count; index++)
        MPI_Irecv(&received[index], sizeof sent, MPI_BYTE, sources[index], index, MPI_COMM_WORLD,
                  &requests[index]);
    for (int index = 0; index < count; index++)
        MPI_Isend(&sent, sizeof sent, MPI_BYTE, targets[index], index, MPI_COMM_WORLD,
                  &requests[count + index]);
    MPI_Waitall(2 * count, requests, MPI_STATUSES_IGNORE);
    int right = 1;
    for (int index = 0; index < count; index++)
        right &= received[index] == (uint64_t)sources[index];
    return right;
}

const char *neighbours(long count, long iterations, struct timing *timing)
{
    int targets[MAX_NEIGHBOURS], sources[MAX_NEIGHBOURS];
    if (ranks < 2 || count > MAX_NEIGHBOURS)
        return "too few ranks or too many neighbours";
    if (!all_agree(find_neighbours((int)count, targets, sources)))
        return "no memory for the neighbours";
    int right = 1;
    for (long turn = warm_up_of(iterations); turn > 0; turn--)
        right &= talk((int)count, targets, sources);
    MPI_Barrier(MPI_COMM_WORLD);
    double begin = now_ns();
    for (long turn = 0; turn < iterations; turn++)
        right &= talk((int)count, targets, sources);
    MPI_Barrier(MPI_COMM_WORLD);
    timing->total_ns = timing->messages_ns = now_ns() - begin;
    return all_agree(right) ? NULL : "a neighbour sent something else";
}

/* Every rank but the first waits in a receive, for this number of milliseconds. */
const char *idle(long unused, long milliseconds, struct timing *timing)
{
    (void)unused;
    char word = 1;
    MPI_Barrier(MPI_COMM_WORLD);
    double begin = now_ns();
    if (rank_of_self == 0) {
        struct timespec left = {milliseconds / 1000, milliseconds % 1000 * 1000000};
        /* The timer that watches the launcher interrupts it. */
        while (nanosleep(&left, &left) != 0)
            ;
        for (int rank = 1; rank < ranks; rank++)
            MPI_Send(&word, 1, MPI_BYTE, rank, 1, MPI_COMM_WORLD);
    } else {
        MPI_Recv(&word, 1, MPI_BYTE, MPI_ANY_SOURCE, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    }
    timing->total_ns = timing->messages_ns = now_ns() - begin;
    return NULL;
}
