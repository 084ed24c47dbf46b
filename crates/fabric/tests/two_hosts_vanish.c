/* Rank 0 waits for a message of rank 1, whose host becomes unreachable: the receive must fail.
 *
 *     program READY ENDED
 *
 * Rank 0 creates the file READY when the host may become unreachable, and writes the result of
 * the receive into the file ENDED. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static void write_file(const char *path, const char *text)
{
    char unfinished[4096];
    snprintf(unfinished, sizeof unfinished, "%s.new", path);
    FILE *file = fopen(unfinished, "w");
    if (file == NULL || fputs(text, file) < 0 || fclose(file) != 0 || rename(unfinished, path) != 0) {
        perror(path);
        exit(1);
    }
}

int main(int count, char **words)
{
    int rank, value = 0;
    MPI_Init(&count, &words);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    /* The ranks are connected, and nothing is in flight. */
    MPI_Barrier(MPI_COMM_WORLD);
    if (rank == 1) {
        MPI_Send(&value, 1, MPI_INT, 0, 0, MPI_COMM_WORLD);
        /* This rank never sends the second message. */
        MPI_Recv(&value, 1, MPI_INT, 0, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    } else if (rank == 0) {
        MPI_Recv(&value, 1, MPI_INT, 1, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        write_file(words[1], "ready\n");
        int code = MPI_Recv(&value, 1, MPI_INT, 1, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        write_file(words[2], code == MPI_SUCCESS ? "it received\n" : "the receive failed\n");
    }
    /* No other rank can finalize. */
    _exit(0);
}
