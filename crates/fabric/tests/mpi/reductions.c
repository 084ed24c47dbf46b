/* Reductions over all ranks, and nonblocking collectives. */
#include <stdlib.h>
#include <string.h>

#include "check.h"

static int full_counts[] = {1, 7, 1000, 5000, 40000, 200000};
static int few_counts[] = {1, 100, 20000};

static int count_of_counts(void)
{
    return quick ? 3 : 6;
}

static int count_at(int index)
{
    return quick ? few_counts[index] : full_counts[index];
}

static long value_of(int rank, int place)
{
    return (long)(mixed((uint64_t)rank * 1000003u + (uint64_t)place) % 1000) - 300;
}

static long sum_until(int last, int place)
{
    long sum = 0;
    for (int rank = 0; rank <= last; rank++)
        sum += value_of(rank, place);
    return sum;
}

static long largest(int place)
{
    long most = value_of(0, place);
    for (int rank = 1; rank < ranks; rank++)
        most = value_of(rank, place) > most ? value_of(rank, place) : most;
    return most;
}

/* Affine maps a*x + b modulo a prime, composed in order: the operation does not commute. */
struct map {
    long a, b;
};
enum { PRIME = 10007 };

static struct map map_of(int rank, int place)
{
    return (struct map){1 + (rank * 31 + place) % (PRIME - 1), (rank * 17 + place * 3) % PRIME};
}

static struct map then(struct map first, struct map second)
{
    return (struct map){first.a * second.a % PRIME, (second.a * first.b + second.b) % PRIME};
}

static void combine(void *in, void *inout, int *count, MPI_Datatype *type)
{
    struct map *left = in, *right = inout;
    (void)type;
    for (int place = 0; place < *count; place++)
        right[place] = then(left[place], right[place]);
}

static void own_operation(int count)
{
    MPI_Datatype type;
    MPI_Op operation;
    MUST(MPI_Type_contiguous(2, MPI_LONG, &type));
    MUST(MPI_Type_commit(&type));
    MUST(MPI_Op_create(combine, 0, &operation));
    struct map *mine = malloc((size_t)count * sizeof *mine);
    struct map *all = malloc((size_t)count * sizeof *all);
    for (int place = 0; place < count; place++)
        mine[place] = map_of(self, place);
    MUST(MPI_Allreduce(mine, all, count, type, operation, MPI_COMM_WORLD));
    for (int place = 0; place < count; place++) {
        struct map expected = map_of(0, place);
        for (int rank = 1; rank < ranks; rank++)
            expected = then(expected, map_of(rank, place));
        check_equal(expected.a, all[place].a, "the factor of an own operation");
        check_equal(expected.b, all[place].b, "the rest of an own operation");
    }
    free(mine);
    free(all);
    MUST(MPI_Op_free(&operation));
    MUST(MPI_Type_free(&type));
}

static void sums(int count, long *mine, long *all)
{
    int root = count % ranks;
    MUST(MPI_Reduce(mine, all, count, MPI_LONG, MPI_SUM, root, MPI_COMM_WORLD));
    for (int place = 0; place < count && self == root; place++)
        check_equal(sum_until(ranks - 1, place), all[place], "a sum at the root");
    MUST(MPI_Allreduce(mine, all, count, MPI_LONG, MPI_MAX, MPI_COMM_WORLD));
    for (int place = 0; place < count; place++)
        check_equal(largest(place), all[place], "the largest of all");
    memcpy(all, mine, (size_t)count * sizeof *all);
    MUST(MPI_Allreduce(MPI_IN_PLACE, all, count, MPI_LONG, MPI_SUM, MPI_COMM_WORLD));
    for (int place = 0; place < count; place++)
        check_equal(sum_until(ranks - 1, place), all[place], "a sum in place");
    MUST(MPI_Scan(mine, all, count, MPI_LONG, MPI_SUM, MPI_COMM_WORLD));
    for (int place = 0; place < count; place++)
        check_equal(sum_until(self, place), all[place], "a running sum");
    MUST(MPI_Exscan(mine, all, count, MPI_LONG, MPI_SUM, MPI_COMM_WORLD));
    for (int place = 0; place < count && self > 0; place++)
        check_equal(sum_until(self - 1, place), all[place], "a running sum without one's own");
}

static void scattered_sums(int count)
{
    int *counts = malloc((size_t)ranks * sizeof *counts), before = 0, total = 0;
    for (int rank = 0; rank < ranks; rank++) {
        counts[rank] = count / ranks + rank % 2;
        before += rank < self ? counts[rank] : 0;
        total += counts[rank];
    }
    int even = count / ranks + 1;
    size_t room = (size_t)(total > even * ranks ? total : even * ranks);
    long *mine = malloc(room * sizeof *mine), *part = malloc(room * sizeof *part);
    for (size_t place = 0; place < room; place++)
        mine[place] = value_of(self, (int)place);
    MUST(MPI_Reduce_scatter(mine, part, counts, MPI_LONG, MPI_SUM, MPI_COMM_WORLD));
    for (int place = 0; place < counts[self]; place++)
        check_equal(sum_until(ranks - 1, before + place), part[place], "a scattered sum");
    MUST(MPI_Reduce_scatter_block(mine, part, even, MPI_LONG, MPI_SUM, MPI_COMM_WORLD));
    for (int place = 0; place < even; place++)
        check_equal(sum_until(ranks - 1, self * even + place), part[place],
                    "an evenly scattered sum");
    free(mine);
    free(part);
    free(counts);
}

void reductions(void)
{
    for (int index = 0; index < count_of_counts(); index++) {
        int count = count_at(index);
        long *mine = malloc((size_t)count * sizeof *mine), *all = malloc((size_t)count * sizeof *all);
        for (int place = 0; place < count; place++)
            mine[place] = value_of(self, place);
        sums(count, mine, all);
        scattered_sums(count);
        own_operation(count);
        free(mine);
        free(all);
    }
    struct {
        double value;
        int rank;
    } mine = {(double)((self * 7 + 3) % ranks), self}, most;
    MUST(MPI_Allreduce(&mine, &most, 1, MPI_DOUBLE_INT, MPI_MAXLOC, MPI_COMM_WORLD));
    check_equal(most.rank >= 0 && most.rank < ranks ? (most.rank * 7 + 3) % ranks : -1,
                (long long)most.value, "the rank of the largest");
}

/* Several collectives at once, with concurrent messages between two ranks, completed in another
 * order. */
void nonblocking(void)
{
    for (int index = 0; index < count_of_counts(); index++) {
        int count = count_at(index), to = next_rank(), from = previous_rank();
        size_t bytes = (size_t)count, all_bytes = bytes * (size_t)ranks;
        struct buffer broadcast = buffer_of(bytes), out = buffer_of(all_bytes);
        struct buffer in = buffer_of(all_bytes), gathered = buffer_of(all_bytes);
        struct buffer mine = buffer_of(bytes), sent = buffer_of(bytes), got = buffer_of(bytes);
        long *values = malloc(bytes * sizeof *values), *sum = malloc(bytes * sizeof *sum);
        MPI_Request requests[7];
        for (int place = 0; place < count; place++)
            values[place] = value_of(self, place);
        if (self == ranks - 1)
            fill(broadcast.bytes, bytes, seed_of(self, 50, count));
        for (int rank = 0; rank < ranks; rank++)
            fill(out.bytes + (size_t)rank * bytes, bytes, seed_of(self, 51, rank));
        fill(mine.bytes, bytes, seed_of(self, 52, count));
        fill(sent.bytes, bytes, seed_of(self, 53, count));
        MUST(MPI_Ibarrier(MPI_COMM_WORLD, &requests[0]));
        MUST(MPI_Ibcast(broadcast.bytes, count, MPI_BYTE, ranks - 1, MPI_COMM_WORLD, &requests[1]));
        MUST(MPI_Ialltoall(out.bytes, count, MPI_BYTE, in.bytes, count, MPI_BYTE, MPI_COMM_WORLD,
                           &requests[2]));
        MUST(MPI_Iallreduce(values, sum, count, MPI_LONG, MPI_SUM, MPI_COMM_WORLD, &requests[3]));
        MUST(MPI_Iallgather(mine.bytes, count, MPI_BYTE, gathered.bytes, count, MPI_BYTE,
                            MPI_COMM_WORLD, &requests[4]));
        MUST(MPI_Irecv(got.bytes, count, MPI_BYTE, from, 53, MPI_COMM_WORLD, &requests[5]));
        MUST(MPI_Isend(sent.bytes, count, MPI_BYTE, to, 53, MPI_COMM_WORLD, &requests[6]));
        for (int number = 6; number >= 0; number--)
            MUST(MPI_Wait(&requests[number], MPI_STATUS_IGNORE));
        check_pattern(broadcast.bytes, bytes, seed_of(ranks - 1, 50, count), "a begun broadcast");
        check_pattern(got.bytes, bytes, seed_of(from, 53, count), "a message between collectives");
        for (int rank = 0; rank < ranks; rank++) {
            check_pattern(in.bytes + (size_t)rank * bytes, bytes, seed_of(rank, 51, self),
                          "a begun exchange of all");
            check_pattern(gathered.bytes + (size_t)rank * bytes, bytes, seed_of(rank, 52, count),
                          "a begun gather to all");
        }
        for (int place = 0; place < count; place++)
            check_equal(sum_until(ranks - 1, place), sum[place], "a begun sum");
        free(values);
        free(sum);
        struct buffer *every[] = {&broadcast, &out, &in, &gathered, &mine, &sent, &got};
        for (size_t number = 0; number < sizeof every / sizeof every[0]; number++)
            buffer_done(every[number]);
    }
}

/* Many consecutive small collectives, so that fast ranks run ahead of slow ones. */
void storm(void)
{
    int turns = quick ? 200 : 1500;
    for (int turn = 0; turn < turns; turn++) {
        long mine = value_of(self, turn), sum = 0, word = turn * 3;
        int root = turn % ranks;
        MUST(MPI_Allreduce(&mine, &sum, 1, MPI_LONG, MPI_SUM, MPI_COMM_WORLD));
        check_equal(sum_until(ranks - 1, turn), sum, "a sum in a storm");
        if (self != root)
            word = -1;
        MUST(MPI_Bcast(&word, 1, MPI_LONG, root, MPI_COMM_WORLD));
        check_equal(turn * 3, word, "a word in a storm");
        if (turn % 10 == 0)
            MUST(MPI_Barrier(MPI_COMM_WORLD));
    }
}
