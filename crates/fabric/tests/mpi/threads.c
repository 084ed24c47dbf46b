/* Threads that call MPI concurrently: each with tags of its own, all in one communicator. */
#include <pthread.h>
#include <stdlib.h>

#include "check.h"

enum { THREADS = 4 };

static void *exchange(void *number)
{
    int tag = 5000 + (int)(intptr_t)number, to = next_rank(), from = previous_rank();
    int turns = quick ? 5 : 20;
    for (int turn = 0; turn < turns; turn++)
        for (int index = 0; index < size_count; index++) {
            size_t bytes = sizes[index] % 300000;
            struct buffer out = buffer_of(bytes), in = buffer_of(bytes);
            MPI_Status status;
            MPI_Request send;
            fill(out.bytes, bytes, seed_of(self, tag, turn));
            MUST(MPI_Isend(out.bytes, (int)bytes, MPI_BYTE, to, tag, MPI_COMM_WORLD, &send));
            MUST(MPI_Recv(in.bytes, (int)bytes, MPI_BYTE, turn % 2 ? MPI_ANY_SOURCE : from, tag,
                          MPI_COMM_WORLD, &status));
            MUST(MPI_Wait(&send, MPI_STATUS_IGNORE));
            check_status(&status, from, tag, bytes, "a message of a thread");
            check_pattern(in.bytes, bytes, seed_of(from, tag, turn), "a message of a thread");
            buffer_done(&out);
            buffer_done(&in);
        }
    return NULL;
}

void threads(void)
{
    if (thread_level < MPI_THREAD_MULTIPLE) {
        note("threads: MPI_THREAD_MULTIPLE was not asked for (--threads), or is not provided");
        return;
    }
    pthread_t team[THREADS];
    for (intptr_t number = 0; number < THREADS; number++)
        check_equal(0, pthread_create(&team[number], NULL, exchange, (void *)number),
                    "the start of a thread");
    for (int number = 0; number < THREADS; number++)
        check_equal(0, pthread_join(team[number], NULL), "the end of a thread");
}
