/* Declarations that the files of the MPI candidate share. One process of the group is one rank. */
#ifndef MEMFERRY_BENCH_MEMBER_H
#define MEMFERRY_BENCH_MEMBER_H

#include <mpi.h>
#include <stddef.h>
#include <stdint.h>

/* Times of a command: total, and the part spent inside MPI. */
struct timing {
    double total_ns;
    double messages_ns;
};

extern int rank_of_self;
extern int ranks;

/* Nanoseconds of a monotonic clock. */
double now_ns(void);

/* Number of iterations before the clock starts; the other candidates use the same rule. */
long warm_up_of(long iterations);

/* Page-aligned, resident memory from the kernel, or memory of malloc if the program was started so; NULL if the allocation fails. */
void *touched_pages(size_t bytes);
void release_pages(void *start, size_t bytes);

/* Byte that depends on its position and on a seed, to verify that data arrived at the right position. */
static inline uint8_t pattern_byte(size_t place, unsigned seed)
{
    return (uint8_t)(place * 31 + (place >> 8) * 7 + (place >> 16) * 3 + seed);
}

/* Mixes all bits of a number (the finaliser of splitmix64). */
static inline uint64_t mixed(uint64_t value)
{
    value += 0x9E3779B97F4A7C15u;
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9u;
    value = (value ^ (value >> 27)) * 0x94D049BB133111EBu;
    return value ^ (value >> 31);
}

/* Returns whether the argument is true at all ranks. */
int all_agree(int yes);

/* The tasks. All ranks call a task together; it returns NULL, or the reason why it failed. */
const char *pingpong(long bytes, long iterations, struct timing *timing);
const char *alltoall(long bytes, long iterations, struct timing *timing);
const char *collective_barrier(long bytes, long iterations, struct timing *timing);
const char *collective_broadcast(long bytes, long iterations, struct timing *timing);
const char *collective_allreduce(long bytes, long iterations, struct timing *timing);
const char *collective_alltoall(long bytes, long iterations, struct timing *timing);
const char *ring(long bytes, long iterations, struct timing *timing);
const char *neighbours(long count, long iterations, struct timing *timing);
const char *idle(long unused, long milliseconds, struct timing *timing);
const char *integer_sort(long keys_log2, long iterations, struct timing *timing);
const char *fourier(long points, long iterations, struct timing *timing);
const char *match_posted(long depth, long iterations, struct timing *timing);
const char *match_posted_reverse(long depth, long iterations, struct timing *timing);
const char *match_posted_mixed(long depth, long iterations, struct timing *timing);
const char *match_unexpected(long depth, long iterations, struct timing *timing);
const char *match_unexpected_reverse(long depth, long iterations, struct timing *timing);
const char *match_unexpected_mixed(long depth, long iterations, struct timing *timing);
const char *match_unexpected_any(long depth, long iterations, struct timing *timing);

#endif
