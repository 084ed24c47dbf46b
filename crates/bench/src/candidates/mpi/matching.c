/* Messages with many others waiting: rank 0 receives, rank 1 sends. matching.rs does the same steps in
 * the same order. */
#include <stdlib.h>

#include "member.h"

enum order { IN_ORDER, REVERSE, MIXED, ANY };
enum { MARK = 0 };

static uint64_t *words;
static MPI_Request *requests;
static long held;

static int hold(long depth)
{
    if (held < depth) {
        free(words);
        free(requests);
        words = calloc((size_t)depth, sizeof *words);
        requests = calloc((size_t)depth, sizeof *requests);
        held = words != NULL && requests != NULL ? depth : 0;
    }
    return held >= depth;
}

static int tag_at(enum order order, long place, long depth)
{
    switch (order) {
    case REVERSE: return (int)(1 + depth - 1 - place);
    case MIXED: return (int)(1 + place * 7919 % depth);
    default: return (int)(1 + place);
    }
}

static int source_of(enum order order, int tag)
{
    return order == ANY || (order == MIXED && tag % 2 == 0) ? MPI_ANY_SOURCE : 1;
}

static void send_all(enum order order, long depth)
{
    for (long place = 0; place < depth; place++) {
        int tag = tag_at(order, place, depth);
        uint64_t word = (uint64_t)tag;
        MPI_Send(&word, 1, MPI_UINT64_T, 0, tag, MPI_COMM_WORLD);
    }
}

static double receive_posted(enum order order, long depth, int *right)
{
    for (long place = 0; place < depth; place++) {
        int tag = (int)(1 + place);
        words[place] = 0;
        MPI_Irecv(&words[place], 1, MPI_UINT64_T, source_of(order, tag), tag, MPI_COMM_WORLD,
                  &requests[place]);
    }
    MPI_Send(NULL, 0, MPI_BYTE, 1, MARK, MPI_COMM_WORLD);
    double begin = now_ns();
    MPI_Waitall((int)depth, requests, MPI_STATUSES_IGNORE);
    double ns = now_ns() - begin;
    for (long place = 0; place < depth; place++)
        *right &= words[place] == (uint64_t)(1 + place);
    return ns;
}

static double receive_unexpected(enum order order, long depth, int *right)
{
    MPI_Recv(NULL, 0, MPI_BYTE, 1, MARK, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    double begin = now_ns();
    for (long place = 0; place < depth; place++) {
        int tag = tag_at(order, place, depth);
        uint64_t word = 0;
        MPI_Recv(&word, 1, MPI_UINT64_T, source_of(order, tag), order == ANY ? MPI_ANY_TAG : tag,
                 MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        *right &= word == (uint64_t)tag;
    }
    double ns = now_ns() - begin;
    MPI_Send(NULL, 0, MPI_BYTE, 1, MARK, MPI_COMM_WORLD);
    return ns;
}

static const char *match(int posted, enum order order, long depth, long iterations,
                         struct timing *timing)
{
    if (ranks != 2)
        return "matching needs two ranks";
    if (depth < 1 || !all_agree(hold(depth)))
        return "no memory for the messages";
    double total_ns = 0;
    int right = 1;
    for (long turn = -warm_up_of(iterations); turn < iterations; turn++) {
        double ns = 0;
        if (rank_of_self == 0) {
            ns = posted ? receive_posted(order, depth, &right)
                        : receive_unexpected(order, depth, &right);
        } else if (posted) {
            MPI_Recv(NULL, 0, MPI_BYTE, 0, MARK, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
            send_all(order, depth);
        } else {
            send_all(IN_ORDER, depth);
            MPI_Send(NULL, 0, MPI_BYTE, 0, MARK, MPI_COMM_WORLD);
            MPI_Recv(NULL, 0, MPI_BYTE, 0, MARK, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        }
        if (turn >= 0)
            total_ns += ns;
    }
    timing->total_ns = timing->messages_ns = total_ns;
    return all_agree(right) ? NULL : "a message was matched by another receive";
}

/* A task for each case. */
#define TASK(name, posted, order)                                                                  \
    const char *name(long depth, long iterations, struct timing *timing)                           \
    {                                                                                              \
        return match(posted, order, depth, iterations, timing);                                    \
    }

TASK(match_posted, 1, IN_ORDER)
TASK(match_posted_reverse, 1, REVERSE)
TASK(match_posted_mixed, 1, MIXED)
TASK(match_unexpected, 0, IN_ORDER)
TASK(match_unexpected_reverse, 0, REVERSE)
TASK(match_unexpected_mixed, 0, MIXED)
TASK(match_unexpected_any, 0, ANY)
