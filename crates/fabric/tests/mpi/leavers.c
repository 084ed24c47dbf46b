/* Every rank but 0 sends small messages and finalizes; rank 0 receives them after the others
 * have exited. All messages that were sent before MPI_Finalize must arrive, in order.
 *
 *     mpirun -n 5 ./mpi-leavers
 *
 * Prints "all messages of N ranks arrived" on success. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { MESSAGES = 50 };

/* Time in microseconds after which the other ranks have most likely exited. If they have not,
 * the test passes without checking this case. */
static const useconds_t WAIT = 200 * 1000;

static long long value_of(int rank, int message)
{
    return 1000LL * rank + message;
}

static void take(int from, int tag, int rank, int *next)
{
    long long value;
    MPI_Status status;
    MPI_Recv(&value, 1, MPI_LONG_LONG, from, tag, MPI_COMM_WORLD, &status);
    if (rank >= 0 && status.MPI_SOURCE != rank) {
        fprintf(stderr, "a message came from %d and not from %d\n", status.MPI_SOURCE, rank);
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
    int message = next[status.MPI_SOURCE]++;
    if (value != value_of(status.MPI_SOURCE, message)) {
        fprintf(stderr, "message %d of rank %d has the value %lld\n", message,
                status.MPI_SOURCE, value);
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
}

int main(int count, char **words)
{
    int rank, ranks;
    MPI_Init(&count, &words);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    /* With an argument all ranks are connected to rank 0 first; without one, none has connected
     * yet. */
    if (count > 1)
        MPI_Barrier(MPI_COMM_WORLD);
    if (rank != 0) {
        for (int message = 0; message < MESSAGES; message++) {
            long long value = value_of(rank, message);
            MPI_Send(&value, 1, MPI_LONG_LONG, 0, message, MPI_COMM_WORLD);
        }
    } else {
        int *next = calloc((size_t)ranks, sizeof *next);
        usleep(WAIT);
        /* Receives the first half from each rank in order, the second half from any source. */
        for (int from = 1; from < ranks; from++)
            for (int message = 0; message < MESSAGES / 2; message++)
                take(from, message, from, next);
        for (int message = 0; message < (ranks - 1) * (MESSAGES / 2); message++)
            take(MPI_ANY_SOURCE, MPI_ANY_TAG, -1, next);
        free(next);
        printf("all messages of %d ranks arrived\n", ranks);
        fflush(stdout);
    }
    MPI_Finalize();
    return 0;
}
