/* Integer bucket sort after the IS kernel of the NAS benchmarks: count the keys by bucket, assign the
 * buckets to ranks, exchange the keys, rank them. integer_sort.rs does the same steps in the same
 * order. */
#include <string.h>

#include "member.h"

enum { BUCKETS_LOG2 = 10, BUCKETS = 1 << BUCKETS_LOG2 };

struct sort {
    size_t keys; /* number of keys of this rank */
    size_t all_keys;
    unsigned range_log2; /* keys are below 2^range_log2 */
    uint32_t *unsorted, *by_bucket, *arrived, *sorted;
    int *places; /* per value, the number of this rank's keys that are at most this value */
    int counts[BUCKETS], totals[BUCKETS], starts[BUCKETS];
    uint32_t lowest, beyond; /* this rank ranks the values from lowest to beyond - 1 */
    size_t arrived_keys;
    double messages_ns;
};

/* Approximately normally distributed key, as in IS: the mean of four numbers. */
static uint32_t key_at(uint64_t place, unsigned range_log2)
{
    uint64_t first = mixed(2 * place), second = mixed(2 * place + 1);
    uint64_t sum = (first >> 32) + (first & 0xFFFFFFFFu) + (second >> 32) + (second & 0xFFFFFFFFu);
    return (uint32_t)((sum << range_log2) >> 34);
}

static void count_buckets(struct sort *sort, unsigned shift)
{
    memset(sort->counts, 0, sizeof sort->counts);
    for (size_t key = 0; key < sort->keys; key++)
        sort->counts[sort->unsorted[key] >> shift]++;
}

/* Assigns consecutive buckets to a rank until it has its share. Fills in the number of keys for each
 * rank. */
static void deal_buckets(struct sort *sort, unsigned shift, int *outgoing)
{
    size_t dealt = 0;
    int owner = 0;
    memset(outgoing, 0, (size_t)ranks * sizeof *outgoing);
    sort->lowest = 0;
    sort->beyond = 0;
    for (int bucket = 0; bucket < BUCKETS; bucket++) {
        while (owner < ranks - 1 && dealt * (size_t)ranks >= sort->all_keys * (size_t)(owner + 1))
            owner++;
        if (owner < rank_of_self)
            sort->lowest = (uint32_t)(bucket + 1) << shift;
        if (owner <= rank_of_self)
            sort->beyond = (uint32_t)(bucket + 1) << shift;
        outgoing[owner] += sort->counts[bucket];
        dealt += (size_t)sort->totals[bucket];
    }
}

static void scatter_to_buckets(struct sort *sort, unsigned shift)
{
    int start = 0;
    for (int bucket = 0; bucket < BUCKETS; bucket++) {
        sort->starts[bucket] = start;
        start += sort->counts[bucket];
    }
    for (size_t key = 0; key < sort->keys; key++) {
        uint32_t value = sort->unsorted[key];
        sort->by_bucket[sort->starts[value >> shift]++] = value;
    }
}

static void rank_keys(struct sort *sort)
{
    size_t values = sort->beyond - sort->lowest;
    memset(sort->places, 0, (values + 1) * sizeof *sort->places);
    for (size_t key = 0; key < sort->arrived_keys; key++)
        sort->places[sort->arrived[key] - sort->lowest]++;
    for (size_t value = 1; value < values; value++)
        sort->places[value] += sort->places[value - 1];
}

static void sort_once(struct sort *sort)
{
    unsigned shift = sort->range_log2 - BUCKETS_LOG2;
    int outgoing[ranks], incoming[ranks], outgoing_at[ranks], incoming_at[ranks];
    count_buckets(sort, shift);
    double begin = now_ns();
    MPI_Allreduce(sort->counts, sort->totals, BUCKETS, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
    sort->messages_ns += now_ns() - begin;
    deal_buckets(sort, shift, outgoing);
    scatter_to_buckets(sort, shift);
    begin = now_ns();
    MPI_Alltoall(outgoing, 1, MPI_INT, incoming, 1, MPI_INT, MPI_COMM_WORLD);
    int sum_out = 0, sum_in = 0;
    for (int rank = 0; rank < ranks; rank++) {
        outgoing_at[rank] = sum_out;
        incoming_at[rank] = sum_in;
        sum_out += outgoing[rank];
        sum_in += incoming[rank];
    }
    sort->arrived_keys = (size_t)sum_in;
    MPI_Alltoallv(sort->by_bucket, outgoing, outgoing_at, MPI_UINT32_T, sort->arrived, incoming,
                  incoming_at, MPI_UINT32_T, MPI_COMM_WORLD);
    sort->messages_ns += now_ns() - begin;
    rank_keys(sort);
}

static uint64_t checksum(const uint32_t *keys, size_t count)
{
    uint64_t sum = 0;
    for (size_t key = 0; key < count; key++)
        sum += mixed(keys[key]);
    return sum;
}

/* Moves every key to its sorted position, and returns whether no key is lost and the keys are in order
 * over all ranks. */
static int is_sorted(struct sort *sort)
{
    for (size_t key = 0; key < sort->arrived_keys; key++) {
        uint32_t value = sort->arrived[key];
        if (value < sort->lowest || value >= sort->beyond)
            return 0;
        sort->sorted[--sort->places[value - sort->lowest]] = value;
    }
    for (size_t key = 1; key < sort->arrived_keys; key++)
        if (sort->sorted[key - 1] > sort->sorted[key])
            return 0;
    return 1;
}

static int result_is_right(struct sort *sort)
{
    int right = is_sorted(sort);
    uint64_t own[3] = {sort->arrived_keys, checksum(sort->sorted, right ? sort->arrived_keys : 0),
                       checksum(sort->unsorted, sort->keys)};
    uint64_t all[3];
    MPI_Allreduce(own, all, 3, MPI_UINT64_T, MPI_SUM, MPI_COMM_WORLD);
    right &= all[0] == sort->all_keys && all[1] == all[2];
    uint32_t range[2] = {sort->lowest, sort->beyond}, ranges[2 * ranks];
    MPI_Allgather(range, 2, MPI_UINT32_T, ranges, 2, MPI_UINT32_T, MPI_COMM_WORLD);
    for (int rank = 1; rank < ranks; rank++)
        right &= ranges[2 * rank - 1] <= ranges[2 * rank];
    return all_agree(right);
}

const char *integer_sort(long keys_log2, long iterations, struct timing *timing)
{
    static struct sort sort;
    size_t all_keys = (size_t)1 << keys_log2;
    if (keys_log2 < BUCKETS_LOG2 + 4 || keys_log2 > 30 || all_keys % (size_t)ranks != 0)
        return "the keys cannot be dealt to the ranks";
    unsigned range_log2 = (unsigned)keys_log2 - 4;
    size_t keys = all_keys / (size_t)ranks, values = ((size_t)1 << range_log2) + 1;
    sort = (struct sort){.keys = keys, .all_keys = all_keys, .range_log2 = range_log2};
    sort.unsorted = touched_pages(keys * sizeof *sort.unsorted);
    sort.by_bucket = touched_pages(keys * sizeof *sort.by_bucket);
    sort.arrived = touched_pages(all_keys * sizeof *sort.arrived);
    sort.sorted = touched_pages(all_keys * sizeof *sort.sorted);
    sort.places = touched_pages(values * sizeof *sort.places);
    const char *error = NULL;
    if (!all_agree(sort.unsorted && sort.by_bucket && sort.arrived && sort.sorted && sort.places)) {
        error = "no memory for the keys";
    } else {
        for (size_t key = 0; key < keys; key++)
            sort.unsorted[key] = key_at((uint64_t)rank_of_self * keys + key, range_log2);
        for (long turn = warm_up_of(iterations); turn > 0; turn--)
            sort_once(&sort);
        MPI_Barrier(MPI_COMM_WORLD);
        sort.messages_ns = 0;
        double begin = now_ns();
        for (long turn = 0; turn < iterations; turn++)
            sort_once(&sort);
        timing->total_ns = now_ns() - begin;
        timing->messages_ns = sort.messages_ns;
        if (!result_is_right(&sort))
            error = "the keys are not sorted, or some were lost";
    }
    release_pages(sort.unsorted, keys * sizeof *sort.unsorted);
    release_pages(sort.by_bucket, keys * sizeof *sort.by_bucket);
    release_pages(sort.arrived, all_keys * sizeof *sort.arrived);
    release_pages(sort.sorted, all_keys * sizeof *sort.sorted);
    release_pages(sort.places, values * sizeof *sort.places);
    return error;
}
