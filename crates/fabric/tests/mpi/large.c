/* Messages of many megabytes, counted in elements of large types. */
#include <stdlib.h>

#include "check.h"

/* A message of `blocks` blocks of 1 MiB and a few more bytes, from rank 0 to the last rank and
 * back. */
static void carry_blocks(int blocks, size_t more)
{
    size_t bytes = ((size_t)blocks << 20) + more;
    int other = ranks - 1;
    MPI_Datatype block, type;
    int lengths[2] = {blocks, (int)more};
    MPI_Aint offsets[2] = {0, (MPI_Aint)((size_t)blocks << 20)};
    MPI_Datatype parts[2];
    MUST(MPI_Type_contiguous(1 << 20, MPI_BYTE, &block));
    parts[0] = block;
    parts[1] = MPI_BYTE;
    MUST(MPI_Type_create_struct(2, lengths, offsets, parts, &type));
    MUST(MPI_Type_commit(&type));
    if (self == 0 || self == other) {
        struct buffer out = buffer_of(bytes), in = buffer_of(bytes);
        MPI_Request send;
        MPI_Status status;
        MPI_Count elements = 0;
        int partner = self == 0 ? other : 0;
        fill(out.bytes, bytes, seed_of(self, 80, blocks));
        MUST(MPI_Isend(out.bytes, 1, type, partner, 80, MPI_COMM_WORLD, &send));
        MUST(MPI_Recv(in.bytes, 1, type, partner, 80, MPI_COMM_WORLD, &status));
        MUST(MPI_Wait(&send, MPI_STATUS_IGNORE));
        MUST(MPI_Get_elements_x(&status, type, &elements));
        check_equal((long long)bytes, (long long)elements, "the bytes of a large message");
        check_pattern(in.bytes, bytes, seed_of(partner, 80, blocks), "a large message");
        buffer_done(&out);
        buffer_done(&in);
    }
    MUST(MPI_Type_free(&type));
    MUST(MPI_Type_free(&block));
}

void large(void)
{
    carry_blocks(3, 5);
    carry_blocks(quick ? 20 : 64, 0);
    carry_blocks(quick ? 33 : 200, 4097);
}

/* A message of more bytes than a signed 32-bit number can count. */
void huge(void)
{
    carry_blocks(2048, 17);
}
