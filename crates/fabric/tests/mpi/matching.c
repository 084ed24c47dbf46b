/* Matching of messages and receives: probes, any source, any tag, order, and large numbers of
 * unexpected messages. */
#include <stdlib.h>

#include "check.h"

/* Every kind of probe before a receive. */
static void look(int way, size_t bytes, int from, int tag, struct buffer *in)
{
    MPI_Status status;
    MPI_Message message;
    int there = 0, any = way >= 4;
    int source = any ? MPI_ANY_SOURCE : from, asked = any ? MPI_ANY_TAG : tag;
    switch (way % 4) {
    case 0:
        MUST(MPI_Probe(source, asked, MPI_COMM_WORLD, &status));
        break;
    case 1:
        while (!there)
            MUST(MPI_Iprobe(source, asked, MPI_COMM_WORLD, &there, &status));
        break;
    case 2:
        MUST(MPI_Mprobe(source, asked, MPI_COMM_WORLD, &message, &status));
        break;
    default:
        while (!there)
            MUST(MPI_Improbe(source, asked, MPI_COMM_WORLD, &there, &message, &status));
    }
    check_status(&status, from, tag, bytes, "a probe");
    if (way % 4 < 2) {
        MUST(MPI_Recv(in->bytes, (int)bytes, MPI_BYTE, status.MPI_SOURCE, status.MPI_TAG,
                      MPI_COMM_WORLD, &status));
    } else if (way % 4 == 2) {
        MUST(MPI_Mrecv(in->bytes, (int)bytes, MPI_BYTE, &message, &status));
        check_true(message == MPI_MESSAGE_NULL, "a received message is gone");
    } else {
        MPI_Request request;
        MUST(MPI_Imrecv(in->bytes, (int)bytes, MPI_BYTE, &message, &request));
        MUST(MPI_Wait(&request, &status));
    }
    check_status(&status, from, tag, bytes, "a receive behind a probe");
}

void probes(void)
{
    int to = next_rank(), from = previous_rank();
    for (int way = 0; way < 8; way++)
        for (int index = 0; index < size_count; index++) {
            size_t bytes = sizes[index];
            int tag = 100 + way;
            struct buffer out = buffer_of(bytes), in = buffer_of(bytes);
            MPI_Request send;
            int there;
            MUST(MPI_Iprobe(from, tag + 50, MPI_COMM_WORLD, &there, MPI_STATUS_IGNORE));
            check_equal(0, there, "a probe for what was never sent");
            fill(out.bytes, bytes, seed_of(self, tag, (long)bytes));
            MUST(MPI_Isend(out.bytes, (int)bytes, MPI_BYTE, to, tag, MPI_COMM_WORLD, &send));
            look(way, bytes, from, tag, &in);
            check_pattern(in.bytes, bytes, seed_of(from, tag, (long)bytes), "a probed message");
            MUST(MPI_Wait(&send, MPI_STATUS_IGNORE));
            /* The barrier keeps the next message of a rank out of another rank's probe for any
             * source. */
            MUST(MPI_Barrier(MPI_COMM_WORLD));
            buffer_done(&out);
            buffer_done(&in);
        }
    /* Two messages with one tag: the matched probe takes the first, the receive gets the second. */
    for (int index = 0; index < size_count; index++) {
        size_t bytes = sizes[index];
        struct buffer out[2] = {buffer_of(bytes), buffer_of(bytes)}, in = buffer_of(bytes);
        MPI_Request send[2];
        MPI_Message message;
        for (int turn = 0; turn < 2; turn++) {
            fill(out[turn].bytes, bytes, seed_of(self, 120, turn));
            MUST(MPI_Isend(out[turn].bytes, (int)bytes, MPI_BYTE, to, 120, MPI_COMM_WORLD,
                           &send[turn]));
        }
        MUST(MPI_Mprobe(from, 120, MPI_COMM_WORLD, &message, MPI_STATUS_IGNORE));
        MUST(MPI_Recv(in.bytes, (int)bytes, MPI_BYTE, from, 120, MPI_COMM_WORLD,
                      MPI_STATUS_IGNORE));
        check_pattern(in.bytes, bytes, seed_of(from, 120, 1), "the message behind a matched one");
        MUST(MPI_Mrecv(in.bytes, (int)bytes, MPI_BYTE, &message, MPI_STATUS_IGNORE));
        check_pattern(in.bytes, bytes, seed_of(from, 120, 0), "a matched message");
        MUST(MPI_Waitall(2, send, MPI_STATUSES_IGNORE));
        buffer_done(&out[0]);
        buffer_done(&out[1]);
        buffer_done(&in);
    }
}

/* Every rank sends to every rank; messages are received in the order of their arrival. */
void any_source(void)
{
    int turns = quick ? 2 : 5;
    int *seen = calloc((size_t)ranks, sizeof *seen);
    MPI_Request *sends = calloc((size_t)ranks, sizeof *sends);
    struct buffer *out = calloc((size_t)ranks, sizeof *out);
    for (int index = 0; index < size_count; index++) {
        size_t bytes = sizes[index];
        struct buffer in = buffer_of(bytes);
        for (int turn = 0; turn < turns; turn++) {
            int tag = 200 + turn;
            for (int to = 0; to < ranks; to++) {
                out[to] = buffer_of(bytes);
                fill(out[to].bytes, bytes, seed_of(self, tag, to));
                MUST(MPI_Isend(out[to].bytes, (int)bytes, MPI_BYTE, to, tag, MPI_COMM_WORLD,
                               &sends[to]));
                seen[to] = 0;
            }
            for (int number = 0; number < ranks; number++) {
                MPI_Status status;
                spoil(in.bytes, bytes);
                MUST(MPI_Recv(in.bytes, (int)bytes, MPI_BYTE, MPI_ANY_SOURCE, tag, MPI_COMM_WORLD,
                              &status));
                int from = status.MPI_SOURCE;
                check_true(from >= 0 && from < ranks, "the source is a rank");
                check_equal(0, seen[from]++, "messages of this source before");
                check_status(&status, from, tag, bytes, "any source");
                check_pattern(in.bytes, bytes, seed_of(from, tag, self), "any source");
            }
            MUST(MPI_Waitall(ranks, sends, MPI_STATUSES_IGNORE));
            for (int to = 0; to < ranks; to++)
                buffer_done(&out[to]);
        }
        buffer_done(&in);
    }
    free(seen);
    free(sends);
    free(out);
}

/* Messages of one source with many tags: any tag matches them in order, a tag matches its own. */
void any_tag(void)
{
    enum { COUNT = 24 };
    int to = next_rank(), from = previous_rank();
    for (int early = 0; early < 2; early++) {
        MPI_Request sends[COUNT], receives[COUNT];
        struct buffer out[COUNT], in[COUNT];
        for (int number = 0; number < COUNT; number++) {
            in[number] = buffer_of(largest_size > 70000 ? 70000 : largest_size);
            if (early)
                MUST(MPI_Irecv(in[number].bytes, (int)in[number].length, MPI_BYTE, from,
                               MPI_ANY_TAG, MPI_COMM_WORLD, &receives[number]));
        }
        MUST(MPI_Barrier(MPI_COMM_WORLD));
        for (int number = 0; number < COUNT; number++) {
            size_t bytes = sizes[number % size_count] % 70000;
            out[number] = buffer_of(bytes);
            fill(out[number].bytes, bytes, seed_of(self, 300 + number, number));
            MUST(MPI_Isend(out[number].bytes, (int)bytes, MPI_BYTE, to, 300 + number,
                           MPI_COMM_WORLD, &sends[number]));
        }
        MUST(MPI_Barrier(MPI_COMM_WORLD));
        for (int turn = 0; turn < COUNT; turn++) {
            /* Receives that are posted late take the second half in reverse order, by their
             * tags. */
            int number = early || turn < COUNT / 2 ? turn : COUNT - 1 - (turn - COUNT / 2);
            size_t bytes = sizes[number % size_count] % 70000;
            MPI_Status status;
            if (early)
                MUST(MPI_Wait(&receives[number], &status));
            else
                MUST(MPI_Recv(in[number].bytes, (int)in[number].length, MPI_BYTE, from,
                              turn < COUNT / 2 ? MPI_ANY_TAG : 300 + number, MPI_COMM_WORLD,
                              &status));
            check_status(&status, from, 300 + number, bytes, "any tag");
            check_pattern(in[number].bytes, bytes, seed_of(from, 300 + number, number), "any tag");
        }
        MUST(MPI_Waitall(COUNT, sends, MPI_STATUSES_IGNORE));
        for (int number = 0; number < COUNT; number++) {
            buffer_done(&out[number]);
            buffer_done(&in[number]);
        }
    }
}

/* Thousands of small unexpected messages, received in order and by their tags. */
void flood(void)
{
    int count = quick ? 1500 : 6000, to = next_rank(), from = previous_rank();
    enum { ROOM = 112, TAGS = 7 };
    MPI_Request *sends = malloc((size_t)count * sizeof *sends);
    struct buffer out = buffer_of((size_t)count * ROOM), in = buffer_of(ROOM);
    for (int turn = 0; turn < 2; turn++) {
        for (int number = 0; number < count; number++) {
            uint8_t *place = out.bytes + (size_t)number * ROOM;
            int bytes = number * 13 % ROOM, tag = 400 + number % TAGS;
            fill(place, (size_t)bytes, seed_of(self, tag, number));
            MUST(MPI_Isend(place, bytes, MPI_BYTE, to, tag, MPI_COMM_WORLD, &sends[number]));
        }
        MUST(MPI_Barrier(MPI_COMM_WORLD));
        for (int taken = 0; taken < count; taken++) {
            /* First in order, then all messages of one tag after those of another. */
            int number = taken;
            if (turn == 1) {
                int whole = count / TAGS * TAGS, each = count / TAGS;
                number = taken < whole ? taken % each * TAGS + (TAGS - 1 - taken / each) : taken;
            }
            int bytes = number * 13 % ROOM, tag = 400 + number % TAGS;
            MPI_Status status;
            MUST(MPI_Recv(in.bytes, ROOM, MPI_BYTE, from, tag, MPI_COMM_WORLD, &status));
            check_status(&status, from, tag, (size_t)bytes, "a message of a flood");
            check_pattern(in.bytes, (size_t)bytes, seed_of(from, tag, number),
                          "a message of a flood");
        }
        MUST(MPI_Waitall(count, sends, MPI_STATUSES_IGNORE));
    }
    /* All ranks send many messages to rank 0 at once. */
    if (self != 0) {
        for (int number = 0; number < count; number++) {
            uint8_t *place = out.bytes + (size_t)number * ROOM;
            fill(place, ROOM, seed_of(self, 420, number));
            MUST(MPI_Isend(place, ROOM, MPI_BYTE, 0, 420, MPI_COMM_WORLD, &sends[number]));
        }
        MUST(MPI_Waitall(count, sends, MPI_STATUSES_IGNORE));
    } else {
        int *numbers = calloc((size_t)ranks, sizeof *numbers);
        for (int taken = 0; taken < count * (ranks - 1); taken++) {
            MPI_Status status;
            MUST(MPI_Recv(in.bytes, ROOM, MPI_BYTE, MPI_ANY_SOURCE, 420, MPI_COMM_WORLD, &status));
            int number = numbers[status.MPI_SOURCE]++;
            check_pattern(in.bytes, ROOM, seed_of(status.MPI_SOURCE, 420, number),
                          "a message of many floods");
        }
        free(numbers);
    }
    free(sends);
    buffer_done(&out);
    buffer_done(&in);
}

/* Messages of one pair of ranks with one tag stay in order, whatever their sizes. */
void ordering(void)
{
    int count = quick ? 60 : 200, to = next_rank(), from = previous_rank();
    MPI_Request *sends = malloc((size_t)count * sizeof *sends);
    MPI_Request *receives = malloc((size_t)count * sizeof *receives);
    struct buffer *out = calloc((size_t)count, sizeof *out);
    struct buffer *in = calloc((size_t)count, sizeof *in);
    for (int early = 0; early < 2; early++) {
        for (int number = 0; number < count; number++) {
            in[number] = buffer_of(300000);
            if (early)
                MUST(MPI_Irecv(in[number].bytes, 300000, MPI_BYTE, from, 500, MPI_COMM_WORLD,
                               &receives[number]));
        }
        for (int number = 0; number < count; number++) {
            size_t bytes = sizes[mixed((uint64_t)number) % (uint64_t)size_count] % 300000;
            out[number] = buffer_of(bytes);
            fill(out[number].bytes, bytes, seed_of(self, 500, number));
            MUST(MPI_Isend(out[number].bytes, (int)bytes, MPI_BYTE, to, 500, MPI_COMM_WORLD,
                           &sends[number]));
        }
        for (int number = 0; number < count && !early; number++)
            MUST(MPI_Irecv(in[number].bytes, 300000, MPI_BYTE, from, 500, MPI_COMM_WORLD,
                           &receives[number]));
        for (int number = 0; number < count; number++) {
            size_t bytes = sizes[mixed((uint64_t)number) % (uint64_t)size_count] % 300000;
            MPI_Status status;
            MUST(MPI_Wait(&receives[number], &status));
            check_status(&status, from, 500, bytes, "a message in order");
            check_pattern(in[number].bytes, bytes, seed_of(from, 500, number),
                          "a message in order");
        }
        MUST(MPI_Waitall(count, sends, MPI_STATUSES_IGNORE));
        for (int number = 0; number < count; number++) {
            buffer_done(&in[number]);
            buffer_done(&out[number]);
        }
    }
    free(sends);
    free(receives);
    free(out);
    free(in);
}
