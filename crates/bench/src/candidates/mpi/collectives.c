/* Collectives. The data changes from operation to operation, and the operations rotate over several
 * buffers, so that no rank finds the data of others in its caches. */
#include <string.h>

#include "member.h"

/* Sets of buffers; two if they are large. */
enum { MAX_SETS = 4, FEW_SETS = 2 };
/* Buffers with more bytes are large. */
#define LARGE_BYTES (4u << 20)
/* Up to this size operations that synchronise all ranks follow each other without a pause. */
#define BACK_TO_BACK_BYTES 1024

/* A collective: changes its data for a turn, runs, and checks what arrived. */
struct collective {
    void (*change)(int set, long turn);
    void (*run)(int set, long turn);
    int (*is_right)(int set, long turn);
    /* Whether no rank can leave an operation before all have entered it. */
    int synchronises;
    /* Blocks in a buffer: one, or one for every rank. */
    int blocks_per_rank;
};

static uint64_t *sent[MAX_SETS], *received[MAX_SETS];
static size_t block_bytes, buffer_bytes;
static int sets;
/* The collective and the size whose result was checked last. */
static const struct collective *checked;
static size_t checked_bytes;
/* Operations so far. It is the same at all ranks. */
static long turns;

static void release(void)
{
    for (int set = 0; set < sets; set++) {
        release_pages(sent[set], buffer_bytes);
        release_pages(received[set], buffer_bytes);
        sent[set] = received[set] = NULL;
    }
    sets = 0;
}

static int hold(const struct collective *it, size_t bytes)
{
    size_t needed = bytes * (it->blocks_per_rank ? (size_t)ranks : 1);
    block_bytes = bytes;
    if (sets > 0 && buffer_bytes == needed)
        return 1;
    release();
    checked = NULL;
    buffer_bytes = needed;
    int complete = 1;
    for (sets = 0; sets < (needed > LARGE_BYTES ? FEW_SETS : MAX_SETS); sets++) {
        sent[sets] = touched_pages(needed);
        received[sets] = touched_pages(needed);
        complete &= sent[sets] != NULL && received[sets] != NULL;
    }
    return complete;
}

static uint64_t first_word(int from, int to, long turn)
{
    return mixed((uint64_t)turn * 4096 + (uint64_t)from * 64 + (uint64_t)to);
}

static void fill(uint64_t *words, size_t bytes, uint64_t first)
{
    for (size_t place = 0; place < bytes / 8; place++)
        words[place] = first + place * 0x9E3779B97F4A7C15u;
}

static int is_filled(const uint64_t *words, size_t bytes, uint64_t first)
{
    int right = 1;
    for (size_t place = 0; place < bytes / 8; place++)
        right &= words[place] == first + place * 0x9E3779B97F4A7C15u;
    return right;
}

static void change_nothing(int set, long turn)
{
    (void)set;
    (void)turn;
}

static void run_barrier(int set, long turn)
{
    (void)set;
    (void)turn;
    MPI_Barrier(MPI_COMM_WORLD);
}

static int is_always_right(int set, long turn)
{
    (void)set;
    (void)turn;
    return 1;
}

static void change_broadcast(int set, long turn)
{
    int root = (int)(turn % ranks);
    if (rank_of_self == root)
        fill(sent[set], block_bytes, first_word(root, 0, turn));
}

static void run_broadcast(int set, long turn)
{
    int root = (int)(turn % ranks);
    void *buffer = rank_of_self == root ? sent[set] : received[set];
    MPI_Bcast(buffer, (int)block_bytes, MPI_BYTE, root, MPI_COMM_WORLD);
}

static int is_broadcast_right(int set, long turn)
{
    int root = (int)(turn % ranks);
    const uint64_t *buffer = rank_of_self == root ? sent[set] : received[set];
    return is_filled(buffer, block_bytes, first_word(root, 0, turn));
}

/* Small whole numbers, whose sums are exact. */
static double summand(int rank, long turn, size_t place)
{
    return (double)(rank * 1000 + (int)(turn % 1000)) + (double)(place & 255);
}

static void change_allreduce(int set, long turn)
{
    double *values = (double *)sent[set], first = summand(rank_of_self, turn, 0);
    for (size_t place = 0; place < block_bytes / 8; place++)
        values[place] = first + (double)(place & 255);
}

static void run_allreduce(int set, long turn)
{
    (void)turn;
    MPI_Allreduce(sent[set], received[set], (int)(block_bytes / 8), MPI_DOUBLE, MPI_SUM,
                  MPI_COMM_WORLD);
}

static int is_allreduce_right(int set, long turn)
{
    const double *values = (const double *)received[set];
    double first = 0;
    for (int rank = 0; rank < ranks; rank++)
        first += summand(rank, turn, 0);
    int right = 1;
    for (size_t place = 0; place < block_bytes / 8; place++)
        right &= values[place] == first + (double)ranks * (double)(place & 255);
    return right;
}

static void change_alltoall(int set, long turn)
{
    for (int to = 0; to < ranks; to++)
        fill(sent[set] + (size_t)to * block_bytes / 8, block_bytes,
             first_word(rank_of_self, to, turn));
}

static void run_alltoall(int set, long turn)
{
    (void)turn;
    MPI_Alltoall(sent[set], (int)block_bytes, MPI_BYTE, received[set], (int)block_bytes, MPI_BYTE,
                 MPI_COMM_WORLD);
}

static int is_alltoall_right(int set, long turn)
{
    int right = 1;
    for (int from = 0; from < ranks; from++)
        right &= is_filled(received[set] + (size_t)from * block_bytes / 8, block_bytes,
                           first_word(from, rank_of_self, turn));
    return right;
}

static const struct collective barrier = {change_nothing, run_barrier, is_always_right, 1, 0};
static const struct collective broadcast = {change_broadcast, run_broadcast, is_broadcast_right, 0,
                                            0};
static const struct collective allreduce = {change_allreduce, run_allreduce, is_allreduce_right, 1,
                                            0};
static const struct collective exchange = {change_alltoall, run_alltoall, is_alltoall_right, 1, 1};

/* Verifies one operation for each root. */
static int results_are_right(const struct collective *it)
{
    int right = 1;
    for (int count = 0; count < ranks; count++, turns++) {
        int set = (int)(turns % sets);
        it->change(set, turns);
        memset(received[set], 0, buffer_bytes);
        it->run(set, turns);
        right &= it->is_right(set, turns);
    }
    return all_agree(right);
}

/* Runs one operation and returns its time. */
static double timed_turn(const struct collective *it)
{
    int set = (int)(turns % sets);
    it->change(set, turns);
    MPI_Barrier(MPI_COMM_WORLD);
    double begin = now_ns();
    it->run(set, turns);
    return now_ns() - begin;
}

static double run_turns(const struct collective *it, long iterations)
{
    double total = 0;
    if (it->synchronises && buffer_bytes <= BACK_TO_BACK_BYTES) {
        MPI_Barrier(MPI_COMM_WORLD);
        double begin = now_ns();
        for (long count = 0; count < iterations; count++, turns++) {
            int set = (int)(turns % sets);
            it->change(set, turns);
            it->run(set, turns);
        }
        return now_ns() - begin;
    }
    for (long count = 0; count < iterations; count++, turns++)
        total += timed_turn(it);
    return total;
}

static const char *run(const struct collective *it, long bytes, long iterations,
                       struct timing *timing)
{
    if (!all_agree(hold(it, (size_t)bytes)))
        return "no memory for the buffers";
    if ((checked != it || checked_bytes != (size_t)bytes) && !results_are_right(it))
        return "the result of a collective is wrong";
    checked = it;
    checked_bytes = (size_t)bytes;
    run_turns(it, warm_up_of(iterations));
    double total = run_turns(it, iterations), longest = 0;
    if (!all_agree(it->is_right((int)((turns - 1) % sets), turns - 1)))
        return "the result of a timed collective is wrong";
    /* The slowest rank counts. */
    MPI_Allreduce(&total, &longest, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    timing->total_ns = timing->messages_ns = longest;
    return NULL;
}

const char *collective_barrier(long bytes, long iterations, struct timing *timing)
{
    return run(&barrier, bytes, iterations, timing);
}

const char *collective_broadcast(long bytes, long iterations, struct timing *timing)
{
    return run(&broadcast, bytes, iterations, timing);
}

const char *collective_allreduce(long bytes, long iterations, struct timing *timing)
{
    return run(&allreduce, bytes, iterations, timing);
}

const char *collective_alltoall(long bytes, long iterations, struct timing *timing)
{
    return run(&exchange, bytes, iterations, timing);
}
