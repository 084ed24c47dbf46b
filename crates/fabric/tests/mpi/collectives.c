/* Collectives of all ranks: with a root, and from each rank to each rank. */
#include <stdlib.h>

#include "check.h"

static const size_t full_lengths[] = {0, 1, 3, 8, 100, 1000, 4097, 20000, 70000, 300001};
static const size_t few_lengths[] = {0, 1, 8, 1000, 70000};

static int length_count(void)
{
    return quick ? sizeof few_lengths / sizeof few_lengths[0]
                 : sizeof full_lengths / sizeof full_lengths[0];
}

static size_t length_at(int index)
{
    return quick ? few_lengths[index] : full_lengths[index];
}

/* Number of bytes of a rank in the collectives with a count for each rank. */
static int share_of(int rank, size_t bytes)
{
    return (int)(bytes * (size_t)(rank + 1) / (size_t)ranks) + rank % 3;
}

struct layout {
    int *counts, *offsets;
    size_t total;
};

/* The shares of all ranks in order, with a gap of three bytes between them. */
static struct layout layout_of(size_t bytes)
{
    struct layout layout = {calloc((size_t)ranks, sizeof(int)), calloc((size_t)ranks, sizeof(int)),
                            0};
    for (int rank = 0; rank < ranks; rank++) {
        layout.counts[rank] = share_of(rank, bytes);
        layout.offsets[rank] = (int)layout.total;
        layout.total += (size_t)layout.counts[rank] + 3;
    }
    return layout;
}

static void layout_done(struct layout *layout)
{
    free(layout->counts);
    free(layout->offsets);
}

static void broadcast_gather_scatter(size_t bytes, int root)
{
    struct buffer mine = buffer_of(bytes), all = buffer_of(bytes * (size_t)ranks);
    if (self == root)
        fill(mine.bytes, bytes, seed_of(root, 1, (long)bytes));
    MUST(MPI_Bcast(mine.bytes, (int)bytes, MPI_BYTE, root, MPI_COMM_WORLD));
    check_pattern(mine.bytes, bytes, seed_of(root, 1, (long)bytes), "a broadcast");

    fill(mine.bytes, bytes, seed_of(self, 2, root));
    spoil(all.bytes, all.length);
    MUST(MPI_Gather(mine.bytes, (int)bytes, MPI_BYTE, all.bytes, (int)bytes, MPI_BYTE, root,
                    MPI_COMM_WORLD));
    for (int rank = 0; rank < ranks && self == root; rank++)
        check_pattern(all.bytes + (size_t)rank * bytes, bytes, seed_of(rank, 2, root), "a gather");

    for (int rank = 0; rank < ranks; rank++)
        fill(all.bytes + (size_t)rank * bytes, bytes, seed_of(rank, 3, root));
    spoil(mine.bytes, bytes);
    MUST(MPI_Scatter(all.bytes, (int)bytes, MPI_BYTE, mine.bytes, (int)bytes, MPI_BYTE, root,
                     MPI_COMM_WORLD));
    check_pattern(mine.bytes, bytes, seed_of(self, 3, root), "a scatter");
    buffer_done(&mine);
    buffer_done(&all);
}

static void uneven_gather_scatter(size_t bytes, int root)
{
    struct layout layout = layout_of(bytes);
    struct buffer mine = buffer_of((size_t)layout.counts[self]), all = buffer_of(layout.total);
    fill(mine.bytes, mine.length, seed_of(self, 4, root));
    spoil(all.bytes, all.length);
    MUST(MPI_Gatherv(mine.bytes, (int)mine.length, MPI_BYTE, all.bytes, layout.counts,
                     layout.offsets, MPI_BYTE, root, MPI_COMM_WORLD));
    for (int rank = 0; rank < ranks && self == root; rank++) {
        uint8_t *place = all.bytes + layout.offsets[rank];
        check_pattern(place, (size_t)layout.counts[rank], seed_of(rank, 4, root),
                      "an uneven gather");
        check_spoiled(place + layout.counts[rank], 3, "between two shares");
    }
    for (int rank = 0; rank < ranks; rank++)
        fill(all.bytes + layout.offsets[rank], (size_t)layout.counts[rank],
             seed_of(rank, 5, root));
    spoil(mine.bytes, mine.length);
    MUST(MPI_Scatterv(all.bytes, layout.counts, layout.offsets, MPI_BYTE, mine.bytes,
                      (int)mine.length, MPI_BYTE, root, MPI_COMM_WORLD));
    check_pattern(mine.bytes, mine.length, seed_of(self, 5, root), "an uneven scatter");
    buffer_done(&mine);
    buffer_done(&all);
    layout_done(&layout);
}

void rooted(void)
{
    MUST(MPI_Barrier(MPI_COMM_WORLD));
    for (int index = 0; index < length_count(); index++)
        for (int root = 0; root < ranks; root += quick ? (ranks > 2 ? ranks - 1 : 1) : 1) {
            broadcast_gather_scatter(length_at(index), root);
            uneven_gather_scatter(length_at(index), root);
        }
}

static void gather_to_all(size_t bytes)
{
    struct layout layout = layout_of(bytes);
    struct buffer all = buffer_of(layout.total), even = buffer_of(bytes * (size_t)ranks);
    struct buffer mine = buffer_of(bytes + 3);
    fill(mine.bytes, bytes, seed_of(self, 6, (long)bytes));
    spoil(even.bytes, even.length);
    MUST(MPI_Allgather(mine.bytes, (int)bytes, MPI_BYTE, even.bytes, (int)bytes, MPI_BYTE,
                       MPI_COMM_WORLD));
    for (int rank = 0; rank < ranks; rank++)
        check_pattern(even.bytes + (size_t)rank * bytes, bytes, seed_of(rank, 6, (long)bytes),
                      "a gather to all");
    spoil(all.bytes, all.length);
    fill(all.bytes + layout.offsets[self], (size_t)layout.counts[self],
         seed_of(self, 7, (long)bytes));
    MUST(MPI_Allgatherv(MPI_IN_PLACE, 0, MPI_BYTE, all.bytes, layout.counts, layout.offsets,
                        MPI_BYTE, MPI_COMM_WORLD));
    for (int rank = 0; rank < ranks; rank++) {
        uint8_t *place = all.bytes + layout.offsets[rank];
        check_pattern(place, (size_t)layout.counts[rank], seed_of(rank, 7, (long)bytes),
                      "an uneven gather to all");
        check_spoiled(place + layout.counts[rank], 3, "between two shares");
    }
    buffer_done(&mine);
    buffer_done(&even);
    buffer_done(&all);
    layout_done(&layout);
}

static void even_exchange(size_t bytes)
{
    struct buffer out = buffer_of(bytes * (size_t)ranks), in = buffer_of(bytes * (size_t)ranks);
    for (int to = 0; to < ranks; to++)
        fill(out.bytes + (size_t)to * bytes, bytes, seed_of(self, 8, to));
    spoil(in.bytes, in.length);
    MUST(MPI_Alltoall(out.bytes, (int)bytes, MPI_BYTE, in.bytes, (int)bytes, MPI_BYTE,
                      MPI_COMM_WORLD));
    for (int from = 0; from < ranks; from++)
        check_pattern(in.bytes + (size_t)from * bytes, bytes, seed_of(from, 8, self),
                      "an exchange of all");
    buffer_done(&out);
    buffer_done(&in);
}

/* Each rank sends to each rank as many bytes as the receiver's share, by bytes and by types. */
static void uneven_exchange(size_t bytes)
{
    struct layout sent = layout_of(bytes);
    int mine = sent.counts[self];
    int *counts = calloc((size_t)ranks, sizeof *counts);
    int *offsets = calloc((size_t)ranks, sizeof *offsets);
    MPI_Datatype *types = calloc((size_t)ranks, sizeof *types);
    for (int rank = 0; rank < ranks; rank++) {
        counts[rank] = mine;
        offsets[rank] = rank * (mine + 5);
        types[rank] = MPI_BYTE;
    }
    struct buffer out = buffer_of(sent.total), in = buffer_of((size_t)(ranks * (mine + 5)));
    for (int way = 0; way < 2; way++) {
        for (int to = 0; to < ranks; to++)
            fill(out.bytes + sent.offsets[to], (size_t)sent.counts[to], seed_of(self, 9 + way, to));
        spoil(in.bytes, in.length);
        if (way == 0)
            MUST(MPI_Alltoallv(out.bytes, sent.counts, sent.offsets, MPI_BYTE, in.bytes, counts,
                               offsets, MPI_BYTE, MPI_COMM_WORLD));
        else
            MUST(MPI_Alltoallw(out.bytes, sent.counts, sent.offsets, types, in.bytes, counts,
                               offsets, types, MPI_COMM_WORLD));
        for (int from = 0; from < ranks; from++) {
            check_pattern(in.bytes + offsets[from], (size_t)mine, seed_of(from, 9 + way, self),
                          "an uneven exchange of all");
            check_spoiled(in.bytes + offsets[from] + mine, 5, "between two messages");
        }
    }
    buffer_done(&out);
    buffer_done(&in);
    free(counts);
    free(offsets);
    free(types);
    layout_done(&sent);
}

void all_to_all(void)
{
    for (int index = 0; index < length_count(); index++) {
        gather_to_all(length_at(index));
        even_exchange(length_at(index));
        uneven_exchange(length_at(index));
    }
}
