/* Windows: memory of one rank that other ranks put to, get from and accumulate into. */
#include <stdlib.h>

#include "check.h"

/* Length in bytes of the part of each rank in a window. */
static size_t part_bytes(void)
{
    return quick ? 20000 : 200000;
}

/* Whether all ranks have created their windows. Some MPIs have none for some transports and
 * thread levels. */
static int there(int code)
{
    int worst = 0, class = 0;
    MUST(MPI_Error_class(code, &class));
    MUST(MPI_Allreduce(&class, &worst, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD));
    if (worst != MPI_SUCCESS && worst != MPI_ERR_WIN)
        MUST(code);
    if (worst == MPI_ERR_WIN)
        note("left out: this MPI offers no windows here");
    return worst == MPI_SUCCESS;
}

/* Puts to all ranks, and gets from the next one, in phases that fences separate. */
void one_sided_fence(void)
{
    size_t part = part_bytes();
    struct buffer memory = buffer_of(part * (size_t)ranks), out = buffer_of(part);
    struct buffer in = buffer_of(part);
    MPI_Win window;
    if (!there(MPI_Win_create(memory.bytes, (MPI_Aint)memory.length, 1, MPI_INFO_NULL,
                              MPI_COMM_WORLD, &window)))
        return;
    static const size_t lengths[] = {1, 8, 49, 4097, 16385, 20000, 200000};
    for (size_t index = 0; index < sizeof lengths / sizeof lengths[0]; index++) {
        size_t bytes = lengths[index] > part ? part : lengths[index];
        spoil(memory.bytes, memory.length);
        MUST(MPI_Win_fence(0, window));
        /* Each rank writes its part of every window. */
        fill(out.bytes, bytes, seed_of(self, 70, (long)bytes));
        for (int to = 0; to < ranks; to++)
            MUST(MPI_Put(out.bytes, (int)bytes, MPI_BYTE, to, (MPI_Aint)((size_t)self * part),
                         (int)bytes, MPI_BYTE, window));
        MUST(MPI_Win_fence(0, window));
        for (int from = 0; from < ranks; from++) {
            uint8_t *place = memory.bytes + (size_t)from * part;
            check_pattern(place, bytes, seed_of(from, 70, (long)bytes), "a put");
            check_spoiled(place + bytes, part - bytes, "behind a put");
        }
        MUST(MPI_Win_fence(0, window));
        /* Each rank reads what the previous rank has put to the next one. */
        MUST(MPI_Get(in.bytes, (int)bytes, MPI_BYTE, next_rank(),
                     (MPI_Aint)((size_t)previous_rank() * part), (int)bytes, MPI_BYTE, window));
        MUST(MPI_Win_fence(0, window));
        check_pattern(in.bytes, bytes, seed_of(previous_rank(), 70, (long)bytes), "a get");
        MUST(MPI_Barrier(MPI_COMM_WORLD));
    }
    MUST(MPI_Win_free(&window));
    buffer_done(&memory);
    buffer_done(&out);
    buffer_done(&in);
}

/* All ranks accumulate into the numbers of all ranks, under shared and exclusive locks. */
void one_sided_lock(void)
{
    int count = quick ? 50 : 500, turns = quick ? 5 : 20;
    long *memory, *ones = malloc((size_t)count * sizeof *ones);
    long *seen = malloc((size_t)count * sizeof *seen);
    MPI_Win window;
    if (!there(MPI_Win_allocate((MPI_Aint)((size_t)count * sizeof *memory), sizeof *memory,
                                MPI_INFO_NULL, MPI_COMM_WORLD, &memory, &window)))
        return;
    MUST(MPI_Win_lock(MPI_LOCK_EXCLUSIVE, self, 0, window));
    for (int place = 0; place < count; place++)
        memory[place] = 0, ones[place] = place + 1;
    MUST(MPI_Win_unlock(self, window));
    MUST(MPI_Barrier(MPI_COMM_WORLD));
    for (int turn = 0; turn < turns; turn++)
        for (int number = 0; number < ranks; number++) {
            int to = (self + number) % ranks;
            MUST(MPI_Win_lock(turn % 2 ? MPI_LOCK_SHARED : MPI_LOCK_EXCLUSIVE, to, 0, window));
            MUST(MPI_Accumulate(ones, count, MPI_LONG, to, 0, count, MPI_LONG, MPI_SUM, window));
            MUST(MPI_Win_unlock(to, window));
        }
    MUST(MPI_Barrier(MPI_COMM_WORLD));
    for (int from = 0; from < ranks; from++) {
        MUST(MPI_Win_lock(MPI_LOCK_SHARED, from, 0, window));
        MUST(MPI_Get(seen, count, MPI_LONG, from, 0, count, MPI_LONG, window));
        MUST(MPI_Win_unlock(from, window));
        for (int place = 0; place < count; place++)
            check_equal((long)turns * ranks * (place + 1), seen[place], "an accumulated number");
    }
    MUST(MPI_Barrier(MPI_COMM_WORLD));
    /* Each rank takes tickets by fetch-and-add under a lock of all windows. */
    long one = 1, ticket = -1, *tickets = calloc((size_t)(ranks * turns), sizeof *tickets);
    long *mine = calloc((size_t)turns, sizeof *mine);
    MUST(MPI_Win_lock_all(0, window));
    for (int turn = 0; turn < turns; turn++) {
        MUST(MPI_Fetch_and_op(&one, &ticket, MPI_LONG, 0, 0, MPI_SUM, window));
        MUST(MPI_Win_flush(0, window));
        mine[turn] = ticket - (long)turns * ranks;
    }
    MUST(MPI_Win_unlock_all(window));
    MUST(MPI_Allgather(mine, turns, MPI_LONG, tickets, turns, MPI_LONG, MPI_COMM_WORLD));
    char *taken = calloc((size_t)(ranks * turns), 1);
    for (int number = 0; number < ranks * turns; number++) {
        check_true(tickets[number] >= 0 && tickets[number] < (long)ranks * turns,
                   "a ticket is one of those given out");
        check_equal(0, taken[tickets[number]]++, "how often a ticket was given before");
    }
    free(taken);
    free(tickets);
    free(mine);
    free(ones);
    free(seen);
    MUST(MPI_Win_free(&window));
}

/* Access that only two neighbours synchronize (post, start, complete, wait). */
void one_sided_post(void)
{
    size_t part = part_bytes();
    struct buffer memory = buffer_of(part), out = buffer_of(part);
    MPI_Group world, sources, targets;
    MPI_Win window;
    int from = previous_rank(), to = next_rank();
    MUST(MPI_Comm_group(MPI_COMM_WORLD, &world));
    MUST(MPI_Group_incl(world, 1, &from, &sources));
    MUST(MPI_Group_incl(world, 1, &to, &targets));
    if (!there(MPI_Win_create(memory.bytes, (MPI_Aint)part, 1, MPI_INFO_NULL, MPI_COMM_WORLD,
                              &window)))
        return;
    for (int turn = 0; turn < 5; turn++) {
        fill(out.bytes, part, seed_of(self, 71, turn));
        MUST(MPI_Win_post(sources, 0, window));
        MUST(MPI_Win_start(targets, 0, window));
        MUST(MPI_Put(out.bytes, (int)part, MPI_BYTE, to, 0, (int)part, MPI_BYTE, window));
        MUST(MPI_Win_complete(window));
        MUST(MPI_Win_wait(window));
        check_pattern(memory.bytes, part, seed_of(from, 71, turn), "a put between neighbours");
    }
    MUST(MPI_Win_free(&window));
    MUST(MPI_Group_free(&sources));
    MUST(MPI_Group_free(&targets));
    MUST(MPI_Group_free(&world));
    buffer_done(&memory);
    buffer_done(&out);
}
