/* Declarations that the sections share: ranks, patterned buffers with guards, and checks that
 * print the expected and the found value. The first check that fails ends the whole program. */
#ifndef MEMFERRY_MPI_CHECK_H
#define MEMFERRY_MPI_CHECK_H

#include <mpi.h>
#include <stddef.h>
#include <stdint.h>

extern int self;
extern int ranks;
/* Run with fewer sizes and fewer messages. */
extern int quick;
/* The thread level that MPI has granted. */
extern int thread_level;

/* The neighbours in a ring of all ranks; with one rank both are the rank itself. */
int next_rank(void);
int previous_rank(void);

/* Sizes around every threshold that a transport is likely to have. */
extern const size_t *sizes;
extern int size_count;
extern size_t largest_size;

/* Memory for a message, with guard bytes before and after it. */
struct buffer {
    uint8_t *bytes;
    size_t length;
    uint8_t *block;
};

/* Allocates a buffer at an address that is `offset` bytes past an aligned one. */
struct buffer buffer_at(size_t length, size_t offset);
struct buffer buffer_of(size_t length);
/* Checks the guards and frees the memory. */
void buffer_done(struct buffer *buffer);
void check_guards(const struct buffer *buffer);

/* The seed of a message's pattern: every byte depends on its position and on these three values. */
uint64_t seed_of(int source, int tag, long sequence);
void fill(void *memory, size_t length, uint64_t seed);
/* Overwrites memory with bytes that are not the pattern of any message. */
void spoil(void *memory, size_t length);
/* Checks that every byte has the pattern. */
void check_pattern(const void *memory, size_t length, uint64_t seed, const char *what);
/* Checks that memory is as `spoil` left it. */
void check_spoiled(const void *memory, size_t length, const char *what);

void check_equal(long long expected, long long found, const char *what);
void check_true(int condition, const char *what);
/* Checks source, tag and length of a received message. */
void check_status(const MPI_Status *status, int source, int tag, size_t length, const char *what);
/* Checks that a call succeeded. */
void check_call(int code, const char *call);
#define MUST(call) check_call((call), #call)

/* Prints the cause and ends the program. */
void fail(const char *format, ...) __attribute__((format(printf, 1, 2), noreturn));

/* Number of checks that this rank has made. */
extern long long checks_made;

/* Prints, on rank 0, why a section was skipped in part. */
void note(const char *text);

/* Mixes a value into a pseudo-random number, which is the same on every rank. */
uint64_t mixed(uint64_t value);

/* The sections. All ranks call them together. */
void modes(void);
void late_receivers(void);
void synchronous(void);
void exchanges(void);
void probes(void);
void any_source(void);
void any_tag(void);
void persistent(void);
void to_self(void);
void cancelled(void);
void truncated(void);
void flood(void);
void ordering(void);
void reversed(void);
void waiting(void);
void vectors(void);
void indexed(void);
void structs(void);
void subarrays(void);
void packed(void);
void rooted(void);
void all_to_all(void);
void reductions(void);
void nonblocking(void);
void storm(void);
void splits(void);
void groups(void);
void intercommunicators(void);
void one_sided_fence(void);
void one_sided_lock(void);
void one_sided_post(void);
void threads(void);
void large(void);
void huge(void);

#endif
