/* Every rank exchanges messages of many lengths with every other rank, and rank 0 also receives
 * from any source. All bytes are checked. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static unsigned char byte_of(int from, int to, size_t length, size_t at)
{
    return (unsigned char)(at * 31 + at / 251 + (size_t)from * 7 + (size_t)to * 13 + length);
}

static void fill(unsigned char *bytes, int from, int to, size_t length)
{
    for (size_t at = 0; at < length; at++)
        bytes[at] = byte_of(from, to, length, at);
}

static void check(const unsigned char *bytes, int from, int to, size_t length)
{
    for (size_t at = 0; at < length; at++)
        if (bytes[at] != byte_of(from, to, length, at)) {
            fprintf(stderr, "byte %zu of %zu from %d to %d is wrong\n", at, length, from, to);
            MPI_Abort(MPI_COMM_WORLD, 1);
        }
}

static const size_t lengths[] = {0, 1, 100, 8192, 16264, 16265, 65536, 1000003, 4 << 20};
enum { LENGTHS = sizeof lengths / sizeof lengths[0], MOST = 4 << 20, ROUNDS = 200 };

int main(int count, char **arguments)
{
    int self, ranks;
    MPI_Init(&count, &arguments);
    MPI_Comm_rank(MPI_COMM_WORLD, &self);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    unsigned char *out = malloc(MOST), *in = malloc(MOST);
    for (int step = 1; step < ranks; step++)
        for (int n = 0; n < LENGTHS; n++) {
            int to = (self + step) % ranks, from = (self + ranks - step) % ranks;
            MPI_Status status;
            int came;
            fill(out, self, to, lengths[n]);
            memset(in, 0, lengths[n]);
            MPI_Sendrecv(out, (int)lengths[n], MPI_BYTE, to, n, in, MOST, MPI_BYTE, from, n,
                         MPI_COMM_WORLD, &status);
            MPI_Get_count(&status, MPI_BYTE, &came);
            if ((size_t)came != lengths[n])
                MPI_Abort(MPI_COMM_WORLD, 1);
            check(in, from, self, lengths[n]);
        }
    if (self == 0) {
        int *next = calloc((size_t)ranks, sizeof *next);
        for (int n = 0; n < ROUNDS * (ranks - 1); n++) {
            MPI_Status status;
            int length;
            MPI_Recv(in, MOST, MPI_BYTE, MPI_ANY_SOURCE, MPI_ANY_TAG, MPI_COMM_WORLD, &status);
            MPI_Get_count(&status, MPI_BYTE, &length);
            if (status.MPI_TAG != next[status.MPI_SOURCE]++) {
                fprintf(stderr, "a message from %d overtook another\n", status.MPI_SOURCE);
                MPI_Abort(MPI_COMM_WORLD, 1);
            }
            check(in, status.MPI_SOURCE, 0, (size_t)length);
        }
        free(next);
    } else {
        for (int n = 0; n < ROUNDS; n++) {
            size_t length = n % 3 == 0 ? 50000 : n % 3 == 1 ? 9000 : 10;
            fill(out, self, 0, length);
            MPI_Send(out, (int)length, MPI_BYTE, 0, n, MPI_COMM_WORLD);
        }
    }
    MPI_Barrier(MPI_COMM_WORLD);
    if (self == 0)
        printf("all bytes of %d ranks arrived\n", ranks);
    free(out);
    free(in);
    MPI_Finalize();
    return 0;
}
