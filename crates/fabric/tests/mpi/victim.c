/* Rank 1 kills itself during a large exchange. The other ranks must not hang: either their calls
 * fail, or the launcher ends them.
 *
 *     mpirun -n 3 ./mpi-victim
 *
 * A rank whose call fails prints that and exits with status 3. A rank that waits for longer than
 * a minute prints that it hangs. */
#include <mpi.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { BYTES = 64 << 20, TURNS = 1000, LAST_TURN = 3, VICTIM = 1 };

static void killed(int signal_number)
{
    (void)signal_number;
    kill(getpid(), SIGKILL);
}

static void hangs(int signal_number)
{
    static const char text[] = "a rank hangs: it has waited for a minute\n";
    (void)signal_number;
    if (write(STDOUT_FILENO, text, sizeof text - 1) < 0)
        _exit(5);
    _exit(4);
}

int main(int count, char **words)
{
    int rank, ranks;
    MPI_Init(&count, &words);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    if (ranks < 2) {
        fprintf(stderr, "mpi-victim: needs two ranks or more\n");
        MPI_Finalize();
        return 2;
    }
    char *out = malloc(BYTES), *in = malloc(BYTES);
    if (out == NULL || in == NULL)
        MPI_Abort(MPI_COMM_WORLD, 2);
    memset(out, rank, BYTES);
    memset(in, 0, BYTES);
    signal(SIGALRM, hangs);
    alarm(300);
    int to = (rank + 1) % ranks, from = (rank + ranks - 1) % ranks;
    for (int turn = 0; turn < TURNS; turn++) {
        if (rank == VICTIM && turn == LAST_TURN) {
            printf("rank %d kills itself\n", rank);
            fflush(stdout);
            signal(SIGALRM, killed);
            /* The alarm arrives 3 ms into the exchange. */
            ualarm(3000, 0);
        }
        int code = MPI_Sendrecv(out, BYTES, MPI_BYTE, to, turn, in, BYTES, MPI_BYTE, from, turn,
                                MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        if (code != MPI_SUCCESS) {
            char text[MPI_MAX_ERROR_STRING] = "";
            int length = 0;
            MPI_Error_string(code, text, &length);
            printf("rank %d was told in turn %d: %s\n", rank, turn, text);
            fflush(stdout);
            _exit(3);
        }
    }
    printf("rank %d saw no failure in %d turns\n", rank, TURNS);
    MPI_Finalize();
    return 0;
}
