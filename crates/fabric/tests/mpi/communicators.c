/* Communicators other than the world: split, duplicated, created from groups, and between two
 * groups. A message in one of them never matches a receive with the same tag in another. */
#include <stdlib.h>

#include "check.h"

/* A message around the ring of a communicator; its size depends on the communicator. */
static void ring(MPI_Comm comm, int tag, size_t bytes, long sequence)
{
    int rank, count;
    MUST(MPI_Comm_rank(comm, &rank));
    MUST(MPI_Comm_size(comm, &count));
    int to = (rank + 1) % count, from = (rank + count - 1) % count;
    struct buffer out = buffer_of(bytes), in = buffer_of(bytes);
    MPI_Status status;
    fill(out.bytes, bytes, seed_of(rank, tag, sequence));
    MUST(MPI_Sendrecv(out.bytes, (int)bytes, MPI_BYTE, to, tag, in.bytes, (int)bytes, MPI_BYTE, from,
                      tag, comm, &status));
    check_status(&status, from, tag, bytes, "a message in a communicator");
    check_pattern(in.bytes, bytes, seed_of(from, tag, sequence), "a message in a communicator");
    buffer_done(&out);
    buffer_done(&in);
}

void splits(void)
{
    for (int colours = 1; colours <= 3; colours++) {
        MPI_Comm part;
        int rank, count, sum = 0;
        /* The ranks are in reverse order. */
        MUST(MPI_Comm_split(MPI_COMM_WORLD, self % colours, ranks - self, &part));
        MUST(MPI_Comm_rank(part, &rank));
        MUST(MPI_Comm_size(part, &count));
        check_equal((ranks - 1 - self % colours) / colours + 1, count, "the ranks of a part");
        check_equal((ranks - 1 - self) / colours, rank, "the rank in a part");
        for (int index = 0; index < size_count; index++)
            ring(part, 60, sizes[index] % 100000, colours);
        MUST(MPI_Allreduce(&self, &sum, 1, MPI_INT, MPI_SUM, part));
        int expected = 0;
        for (int other = self % colours; other < ranks; other += colours)
            expected += other;
        check_equal(expected, sum, "the sum of a part");
        MUST(MPI_Comm_free(&part));
    }
    MPI_Comm none;
    MUST(MPI_Comm_split(MPI_COMM_WORLD, self == 0 ? 0 : MPI_UNDEFINED, 0, &none));
    check_true((none == MPI_COMM_NULL) == (self != 0), "who has no colour is in no part");
    if (none != MPI_COMM_NULL)
        MUST(MPI_Comm_free(&none));
    MPI_Comm near;
    MUST(MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &near));
    ring(near, 61, 5000, 9);
    MUST(MPI_Comm_free(&near));
}

/* The same messages in several communicators, received in reverse order. */
static void apart(void)
{
    enum { COPIES = 6 };
    MPI_Comm copies[COPIES];
    MPI_Request sends[COPIES];
    struct buffer out[COPIES], in[COPIES];
    int to = next_rank(), from = previous_rank();
    for (int index = 0; index < size_count; index++) {
        size_t bytes = sizes[index] % 100000;
        for (int copy = 0; copy < COPIES; copy++) {
            if (index == 0)
                MUST(MPI_Comm_dup(MPI_COMM_WORLD, &copies[copy]));
            out[copy] = buffer_of(bytes);
            in[copy] = buffer_of(bytes);
            fill(out[copy].bytes, bytes, seed_of(self, 62, copy));
            MUST(MPI_Isend(out[copy].bytes, (int)bytes, MPI_BYTE, to, 62, copies[copy],
                           &sends[copy]));
        }
        for (int copy = COPIES - 1; copy >= 0; copy--) {
            MUST(MPI_Recv(in[copy].bytes, (int)bytes, MPI_BYTE, copy % 2 ? MPI_ANY_SOURCE : from,
                          copy % 3 ? MPI_ANY_TAG : 62, copies[copy], MPI_STATUS_IGNORE));
            check_pattern(in[copy].bytes, bytes, seed_of(from, 62, copy), "a copied communicator");
        }
        MUST(MPI_Waitall(COPIES, sends, MPI_STATUSES_IGNORE));
        for (int copy = 0; copy < COPIES; copy++) {
            buffer_done(&out[copy]);
            buffer_done(&in[copy]);
        }
    }
    for (int copy = 0; copy < COPIES; copy++)
        MUST(MPI_Comm_free(&copies[copy]));
}

void groups(void)
{
    apart();
    MPI_Group world, half;
    MPI_Comm comm;
    int range[1][3] = {{ranks - 1, 0, -2}};
    int member = (ranks - 1 - self) % 2 == 0;
    MUST(MPI_Comm_group(MPI_COMM_WORLD, &world));
    MUST(MPI_Group_range_incl(world, 1, range, &half));
    /* Only the members of the group call this function. */
    if (member) {
        MUST(MPI_Comm_create_group(MPI_COMM_WORLD, half, 63, &comm));
        ring(comm, 64, 70000, 1);
        MUST(MPI_Barrier(comm));
        MUST(MPI_Comm_free(&comm));
    }
    /* All ranks call this function. */
    MUST(MPI_Comm_create(MPI_COMM_WORLD, half, &comm));
    check_true((comm != MPI_COMM_NULL) == member, "only members get the communicator");
    if (member) {
        ring(comm, 65, 3000, 2);
        MUST(MPI_Comm_free(&comm));
    }
    MUST(MPI_Group_free(&half));
    MUST(MPI_Group_free(&world));
    /* Many communicators are created and freed. */
    for (int turn = 0; turn < (quick ? 10 : 60); turn++) {
        MUST(MPI_Comm_dup(MPI_COMM_WORLD, &comm));
        ring(comm, 66, (size_t)turn * 10, turn);
        MUST(MPI_Comm_free(&comm));
    }
}

/* An intercommunicator with the even ranks on one side and the odd ranks on the other. */
void intercommunicators(void)
{
    if (ranks < 2) {
        note("needs two ranks");
        return;
    }
    MPI_Comm part, between, merged;
    int side = self % 2, there, rank, merged_rank;
    MUST(MPI_Comm_split(MPI_COMM_WORLD, side, self, &part));
    MUST(MPI_Comm_rank(part, &rank));
    MUST(MPI_Intercomm_create(part, 0, MPI_COMM_WORLD, 1 - side, 67, &between));
    MUST(MPI_Comm_remote_size(between, &there));
    check_equal(side ? (ranks + 1) / 2 : ranks / 2, there, "the ranks of the other side");
    if (rank < there && rank < ranks / 2) {
        for (int index = 0; index < size_count; index++) {
            size_t bytes = sizes[index] % 300000;
            struct buffer out = buffer_of(bytes), in = buffer_of(bytes);
            MPI_Status status;
            fill(out.bytes, bytes, seed_of(self, 68, (long)bytes));
            MUST(MPI_Sendrecv(out.bytes, (int)bytes, MPI_BYTE, rank, 68, in.bytes, (int)bytes,
                              MPI_BYTE, rank, 68, between, &status));
            check_status(&status, rank, 68, bytes, "a message to the other side");
            check_pattern(in.bytes, bytes, seed_of(self ^ 1, 68, (long)bytes),
                          "a message to the other side");
            buffer_done(&out);
            buffer_done(&in);
        }
    }
    int sum = 0, expected = 0;
    MUST(MPI_Allreduce(&self, &sum, 1, MPI_INT, MPI_SUM, between));
    for (int other = 1 - side; other < ranks; other += 2)
        expected += other;
    check_equal(expected, sum, "the sum of the other side");
    MUST(MPI_Intercomm_merge(between, side, &merged));
    MUST(MPI_Comm_rank(merged, &merged_rank));
    check_equal(side ? (ranks + 1) / 2 + rank : rank, merged_rank, "the rank after a merge");
    ring(merged, 69, 20000, 3);
    MUST(MPI_Comm_free(&merged));
    MUST(MPI_Comm_free(&between));
    MUST(MPI_Comm_free(&part));
}
