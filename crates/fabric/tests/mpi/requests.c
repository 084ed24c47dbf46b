/* Requests: persistent ones, cancelled ones, many at once, and ones that fail. */
#include <stdlib.h>

#include "check.h"

/* Persistent requests, which are created once and started many times, one by one and all
 * together. */
void persistent(void)
{
    int to = next_rank(), from = previous_rank();
    for (int index = 0; index < size_count; index++) {
        size_t bytes = sizes[index];
        struct buffer out[3], in[3];
        MPI_Request requests[6];
        for (int number = 0; number < 3; number++) {
            out[number] = buffer_of(bytes);
            in[number] = buffer_of(bytes);
            MUST(MPI_Recv_init(in[number].bytes, (int)bytes, MPI_BYTE, from, 600 + number,
                               MPI_COMM_WORLD, &requests[number]));
        }
        MUST(MPI_Send_init(out[0].bytes, (int)bytes, MPI_BYTE, to, 600, MPI_COMM_WORLD,
                           &requests[3]));
        MUST(MPI_Ssend_init(out[1].bytes, (int)bytes, MPI_BYTE, to, 601, MPI_COMM_WORLD,
                            &requests[4]));
        MUST(MPI_Send_init(out[2].bytes, (int)bytes, MPI_BYTE, to, 602, MPI_COMM_WORLD,
                           &requests[5]));
        for (int turn = 0; turn < 4; turn++) {
            for (int number = 0; number < 3; number++) {
                fill(out[number].bytes, bytes, seed_of(self, 600 + number, turn));
                spoil(in[number].bytes, bytes);
            }
            if (turn % 2 == 0) {
                MUST(MPI_Startall(6, requests));
            } else {
                /* Starts the sends first. */
                for (int number = 5; number >= 0; number--)
                    MUST(MPI_Start(&requests[number]));
            }
            MPI_Status statuses[6];
            MUST(MPI_Waitall(6, requests, statuses));
            for (int number = 0; number < 3; number++) {
                check_status(&statuses[number], from, 600 + number, bytes, "a kept request");
                check_pattern(in[number].bytes, bytes, seed_of(from, 600 + number, turn),
                              "a kept request");
            }
        }
        for (int number = 0; number < 6; number++)
            MUST(MPI_Request_free(&requests[number]));
        for (int number = 0; number < 3; number++) {
            buffer_done(&out[number]);
            buffer_done(&in[number]);
        }
    }
}

/* A rank sends to itself: before and after the receive is posted, also with any source. */
void to_self(void)
{
    for (int index = 0; index < size_count; index++)
        for (int way = 0; way < 4; way++) {
            size_t bytes = sizes[index];
            int source = way & 2 ? MPI_ANY_SOURCE : self;
            struct buffer out = buffer_of(bytes), in = buffer_of(bytes);
            MPI_Request send, receive;
            MPI_Status status;
            fill(out.bytes, bytes, seed_of(self, 700, way));
            if (way & 1)
                MUST(MPI_Irecv(in.bytes, (int)bytes, MPI_BYTE, source, 700, MPI_COMM_WORLD,
                               &receive));
            MUST(MPI_Isend(out.bytes, (int)bytes, MPI_BYTE, self, 700, MPI_COMM_WORLD, &send));
            if (!(way & 1))
                MUST(MPI_Irecv(in.bytes, (int)bytes, MPI_BYTE, source, 700, MPI_COMM_WORLD,
                               &receive));
            MUST(MPI_Wait(&receive, &status));
            MUST(MPI_Wait(&send, MPI_STATUS_IGNORE));
            check_status(&status, self, 700, bytes, "a message to oneself");
            check_pattern(in.bytes, bytes, seed_of(self, 700, way), "a message to oneself");
            buffer_done(&out);
            buffer_done(&in);
        }
    /* A communicator of one rank. */
    int out = self * 7 + 1, in = 0;
    MUST(MPI_Sendrecv(&out, 1, MPI_INT, 0, 1, &in, 1, MPI_INT, 0, 1, MPI_COMM_SELF,
                      MPI_STATUS_IGNORE));
    check_equal(out, in, "a message in the communicator of one");
}

/* A cancelled receive gets nothing, and the message matches the next receive. */
void cancelled(void)
{
    int to = next_rank(), from = previous_rank();
    for (int index = 0; index < size_count; index++)
        for (int any = 0; any < 2; any++) {
            size_t bytes = sizes[index];
            int source = any ? MPI_ANY_SOURCE : from, gone = 0;
            struct buffer out = buffer_of(bytes), in = buffer_of(bytes), other = buffer_of(bytes);
            MPI_Request receive, second, send;
            MPI_Status status;
            spoil(in.bytes, bytes);
            MUST(MPI_Irecv(in.bytes, (int)bytes, MPI_BYTE, source, 800, MPI_COMM_WORLD, &receive));
            MUST(MPI_Irecv(other.bytes, (int)bytes, MPI_BYTE, source, 800, MPI_COMM_WORLD,
                           &second));
            MUST(MPI_Cancel(&receive));
            MUST(MPI_Wait(&receive, &status));
            MUST(MPI_Test_cancelled(&status, &gone));
            check_equal(1, gone, "whether the receive was cancelled");
            MUST(MPI_Barrier(MPI_COMM_WORLD));
            fill(out.bytes, bytes, seed_of(self, 800, (long)bytes));
            MUST(MPI_Isend(out.bytes, (int)bytes, MPI_BYTE, to, 800, MPI_COMM_WORLD, &send));
            MUST(MPI_Wait(&second, &status));
            MUST(MPI_Wait(&send, MPI_STATUS_IGNORE));
            check_status(&status, from, 800, bytes, "the receive behind a cancelled one");
            check_pattern(other.bytes, bytes, seed_of(from, 800, (long)bytes),
                          "the receive behind a cancelled one");
            check_spoiled(in.bytes, bytes, "a cancelled receive");
            MUST(MPI_Barrier(MPI_COMM_WORLD));
            buffer_done(&out);
            buffer_done(&in);
            buffer_done(&other);
        }
}

/* A message that is too long fails its receive, writes nothing beyond the buffer, and the next
 * one arrives. */
void truncated(void)
{
    int to = next_rank(), from = previous_rank();
    for (int index = 0; index < size_count; index++)
        for (int early = 0; early < 2; early++) {
            size_t bytes = sizes[index], room = bytes / 2;
            if (bytes == 0)
                continue;
            struct buffer out = buffer_of(bytes), in = buffer_of(room), whole = buffer_of(bytes);
            MPI_Request receive, sends[2];
            int code, class = 0;
            fill(out.bytes, bytes, seed_of(self, 900, (long)bytes));
            if (early)
                MUST(MPI_Irecv(in.bytes, (int)room, MPI_BYTE, from, 900, MPI_COMM_WORLD,
                               &receive));
            MUST(MPI_Barrier(MPI_COMM_WORLD));
            for (int number = 0; number < 2; number++)
                MUST(MPI_Isend(out.bytes, (int)bytes, MPI_BYTE, to, 900, MPI_COMM_WORLD,
                               &sends[number]));
            MUST(MPI_Barrier(MPI_COMM_WORLD));
            if (early)
                code = MPI_Wait(&receive, MPI_STATUS_IGNORE);
            else
                code = MPI_Recv(in.bytes, (int)room, MPI_BYTE, from, 900, MPI_COMM_WORLD,
                                MPI_STATUS_IGNORE);
            MUST(MPI_Error_class(code, &class));
            check_equal(MPI_ERR_TRUNCATE, class, "the error of too long a message");
            check_guards(&in);
            MUST(MPI_Recv(whole.bytes, (int)bytes, MPI_BYTE, from, 900, MPI_COMM_WORLD,
                          MPI_STATUS_IGNORE));
            check_pattern(whole.bytes, bytes, seed_of(from, 900, (long)bytes),
                          "the message behind a truncated one");
            MUST(MPI_Waitall(2, sends, MPI_STATUSES_IGNORE));
            buffer_done(&out);
            buffer_done(&in);
            buffer_done(&whole);
        }
}

/* Many requests are in flight, and the last one is waited for first. */
void reversed(void)
{
    int count = quick ? 200 : 800, to = next_rank(), from = previous_rank();
    MPI_Request *sends = malloc((size_t)count * sizeof *sends);
    MPI_Request *receives = malloc((size_t)count * sizeof *receives);
    struct buffer *out = calloc((size_t)count, sizeof *out);
    struct buffer *in = calloc((size_t)count, sizeof *in);
    for (int number = 0; number < count; number++) {
        size_t bytes = sizes[number % size_count] % 100000;
        in[number] = buffer_of(bytes);
        out[number] = buffer_of(bytes);
        MUST(MPI_Irecv(in[number].bytes, (int)bytes, MPI_BYTE, from, 1000 + number, MPI_COMM_WORLD,
                       &receives[number]));
    }
    for (int number = count - 1; number >= 0; number--) {
        fill(out[number].bytes, out[number].length, seed_of(self, 1000 + number, number));
        MUST(MPI_Isend(out[number].bytes, (int)out[number].length, MPI_BYTE, to, 1000 + number,
                       MPI_COMM_WORLD, &sends[number]));
    }
    for (int number = count - 1; number >= 0; number--) {
        MPI_Status status;
        MUST(MPI_Wait(&receives[number], &status));
        check_status(&status, from, 1000 + number, in[number].length, "one of many");
        check_pattern(in[number].bytes, in[number].length, seed_of(from, 1000 + number, number),
                      "one of many");
    }
    for (int number = count - 1; number >= 0; number--) {
        MUST(MPI_Wait(&sends[number], MPI_STATUS_IGNORE));
        buffer_done(&in[number]);
        buffer_done(&out[number]);
    }
    free(sends);
    free(receives);
    free(out);
    free(in);
}

/* Every call that waits or tests: any, some, all. */
void waiting(void)
{
    enum { COUNT = 12 };
    int to = next_rank(), from = previous_rank();
    for (int way = 0; way < 6; way++) {
        MPI_Request requests[2 * COUNT];
        MPI_Status statuses[2 * COUNT];
        struct buffer out[COUNT], in[COUNT];
        int done = 0, places[2 * COUNT];
        for (int number = 0; number < COUNT; number++) {
            size_t bytes = sizes[number % size_count];
            in[number] = buffer_of(bytes);
            out[number] = buffer_of(bytes);
            fill(out[number].bytes, bytes, seed_of(self, 2000 + number, way));
            MUST(MPI_Irecv(in[number].bytes, (int)bytes, MPI_BYTE, from, 2000 + number,
                           MPI_COMM_WORLD, &requests[number]));
        }
        for (int number = 0; number < COUNT; number++)
            MUST(MPI_Isend(out[number].bytes, (int)out[number].length, MPI_BYTE, to, 2000 + number,
                           MPI_COMM_WORLD, &requests[COUNT + number]));
        while (done < 2 * COUNT) {
            int some = 0, place = MPI_UNDEFINED, flag = 0;
            switch (way) {
            case 0:
                MUST(MPI_Waitany(2 * COUNT, requests, &place, MPI_STATUS_IGNORE));
                some = place != MPI_UNDEFINED;
                break;
            case 1:
                MUST(MPI_Testany(2 * COUNT, requests, &place, &flag, MPI_STATUS_IGNORE));
                some = flag && place != MPI_UNDEFINED;
                break;
            case 2:
                MUST(MPI_Waitsome(2 * COUNT, requests, &some, places, statuses));
                break;
            case 3:
                MUST(MPI_Testsome(2 * COUNT, requests, &some, places, statuses));
                break;
            case 4:
                MUST(MPI_Testall(2 * COUNT, requests, &flag, statuses));
                some = flag ? 2 * COUNT : 0;
                break;
            default:
                MUST(MPI_Waitall(2 * COUNT, requests, statuses));
                some = 2 * COUNT;
            }
            check_true(some >= 0, "as many requests are done as were started");
            done += some;
        }
        for (int number = 0; number < COUNT; number++) {
            check_true(requests[number] == MPI_REQUEST_NULL, "a request is gone when it is over");
            check_pattern(in[number].bytes, in[number].length, seed_of(from, 2000 + number, way),
                          "a message that was waited for");
            buffer_done(&in[number]);
            buffer_done(&out[number]);
        }
    }
}
