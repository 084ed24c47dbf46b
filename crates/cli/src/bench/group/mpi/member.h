/* What the parts of the MPI contestant share. One process of the group is one rank. */
#ifndef MEMFERRY_BENCH_MEMBER_H
#define MEMFERRY_BENCH_MEMBER_H

#include <mpi.h>
#include <stddef.h>
#include <stdint.h>

/* What a command took: in all, and the part of it spent inside MPI. */
struct timing {
    double total_ns;
    double messages_ns;
};

extern int rank_of_self;
extern int ranks;

/* Nanoseconds of a clock that only moves forward. */
double now_ns(void);

/* Rounds that are run before the clock starts; the same rule as in the other contestants. */
long warm_up_of(long iterations);

/* Page-aligned memory straight from the kernel, touched; NULL when there is none. */
void *touched_pages(size_t bytes);
void release_pages(void *start, size_t bytes);

/* A byte that depends on its place and on a seed, to see that data arrived where it belongs. */
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

/* Whether all ranks say yes. */
int all_agree(int yes);

/* The commands. Each is called by all ranks together and returns NULL, or why it failed. */
const char *pingpong(long bytes, long iterations, struct timing *timing);
const char *alltoall(long bytes, long iterations, struct timing *timing);
const char *integer_sort(long keys_log2, long iterations, struct timing *timing);
const char *fourier(long points, long iterations, struct timing *timing);

#endif
