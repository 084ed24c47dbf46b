/* A rank dies while the others are in a collective. The others get an error and do not wait for ever. */
#include <mpi.h>
#include <signal.h>
#include <stdio.h>
#include <unistd.h>

int main(int argc, char **argv)
{
    int rank, sum = 0, class = 0;
    alarm(300);
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    MPI_Allreduce(&rank, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
    if (rank == 1) {
        fprintf(stderr, "rank 1 kills itself\n");
        kill(getpid(), SIGKILL);
    }
    for (int turn = 0; turn < 2; turn++) {
        int code = MPI_Allreduce(&rank, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
        if (code != MPI_SUCCESS)
            MPI_Error_class(code, &class);
        fprintf(stderr, "rank %d: call %d %s\n", rank, turn,
                code != MPI_SUCCESS && class == MPI_ERR_OTHER ? "fails as it should" : "is wrong");
    }
    fflush(stderr);
    _exit(3);
}
