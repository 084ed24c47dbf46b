/* Tasks that only send messages: one between two ranks and back, and one from each rank to each. */
#include <string.h>

#include "member.h"

/* Buffers of the size of the last command. They are allocated, and their messages are verified, once
 * per size. */
static uint8_t *sent, *received;
static size_t held_bytes;
static long checked_pingpong = -1, checked_alltoall = -1;

static int hold(size_t bytes)
{
    if (sent != NULL && held_bytes == bytes)
        return 1;
    release_pages(sent, held_bytes);
    release_pages(received, held_bytes);
    sent = touched_pages(bytes);
    received = touched_pages(bytes);
    held_bytes = bytes;
    checked_pingpong = checked_alltoall = -1;
    return sent != NULL && received != NULL;
}

static void bounce(int bytes)
{
    if (rank_of_self == 0) {
        MPI_Send(sent, bytes, MPI_BYTE, 1, 0, MPI_COMM_WORLD);
        MPI_Recv(received, bytes, MPI_BYTE, 1, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    } else if (rank_of_self == 1) {
        MPI_Recv(received, bytes, MPI_BYTE, 0, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        MPI_Send(sent, bytes, MPI_BYTE, 0, 0, MPI_COMM_WORLD);
    }
}

/* Verifies that every byte arrives in both directions: rank 1 returns what it received, rank 0
 * compares. */
static int bounces_right(int bytes)
{
    int right = 1;
    if (rank_of_self == 0) {
        for (int place = 0; place < bytes; place++)
            sent[place] = pattern_byte((size_t)place, (unsigned)bytes);
        memset(received, 0, (size_t)bytes);
        bounce(bytes);
        right = memcmp(sent, received, (size_t)bytes) == 0;
    } else if (rank_of_self == 1) {
        memset(received, 0, (size_t)bytes);
        MPI_Recv(received, bytes, MPI_BYTE, 0, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        memcpy(sent, received, (size_t)bytes);
        MPI_Send(sent, bytes, MPI_BYTE, 0, 0, MPI_COMM_WORLD);
    }
    return all_agree(right);
}

const char *pingpong(long bytes, long iterations, struct timing *timing)
{
    if (ranks < 2)
        return "a pingpong needs two ranks";
    if (!all_agree(hold((size_t)bytes)))
        return "no memory for the buffers";
    if (checked_pingpong != bytes && !bounces_right((int)bytes))
        return "a byte got lost on its way there and back";
    checked_pingpong = bytes;
    for (long turn = warm_up_of(iterations); turn > 0; turn--)
        bounce((int)bytes);
    double begin = now_ns();
    for (long turn = 0; turn < iterations; turn++)
        bounce((int)bytes);
    timing->total_ns = timing->messages_ns = now_ns() - begin;
    return NULL;
}

static void exchange(int bytes)
{
    MPI_Alltoall(sent, bytes, MPI_BYTE, received, bytes, MPI_BYTE, MPI_COMM_WORLD);
}

static unsigned seed_of(int from, int to)
{
    return (unsigned)(from * 16 + to * 5 + 1);
}

static int exchanges_right(int bytes)
{
    for (int to = 0; to < ranks; to++)
        for (int place = 0; place < bytes; place++)
            sent[(size_t)to * (size_t)bytes + (size_t)place] =
                pattern_byte((size_t)place, seed_of(rank_of_self, to));
    memset(received, 0, held_bytes);
    exchange(bytes);
    int right = 1;
    for (int from = 0; from < ranks; from++)
        for (int place = 0; place < bytes; place++)
            right &= received[(size_t)from * (size_t)bytes + (size_t)place] ==
                     pattern_byte((size_t)place, seed_of(from, rank_of_self));
    return all_agree(right);
}

const char *alltoall(long bytes, long iterations, struct timing *timing)
{
    if (!all_agree(hold((size_t)bytes * (size_t)ranks)))
        return "no memory for the buffers";
    if (checked_alltoall != bytes && !exchanges_right((int)bytes))
        return "a byte of another rank did not arrive in its place";
    checked_alltoall = bytes;
    for (long turn = warm_up_of(iterations); turn > 0; turn--)
        exchange((int)bytes);
    MPI_Barrier(MPI_COMM_WORLD);
    double begin = now_ns();
    for (long turn = 0; turn < iterations; turn++)
        exchange((int)bytes);
    timing->total_ns = timing->messages_ns = now_ns() - begin;
    return NULL;
}
