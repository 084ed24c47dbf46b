/* Messages between two ranks in every mode, with receives that are posted before the message and
 * receives that are posted after it. */
#include <stdio.h>
#include <stdlib.h>

#include "check.h"

typedef int (*blocking_send)(const void *, int, MPI_Datatype, int, int, MPI_Comm);
typedef int (*starting_send)(const void *, int, MPI_Datatype, int, int, MPI_Comm, MPI_Request *);

static const struct {
    const char *name;
    blocking_send send;
    starting_send start;
} every_mode[] = {
    {"standard", MPI_Send, MPI_Isend},
    {"buffered", MPI_Bsend, MPI_Ibsend},
    {"synchronous", MPI_Ssend, MPI_Issend},
    {"ready", MPI_Rsend, MPI_Irsend},
};
enum { MODES = sizeof every_mode / sizeof every_mode[0] };

enum { BUFFERED = 1 };

static void *attached;

/* Attaches memory for one buffered send of `bytes` bytes. */
static void attach(size_t bytes)
{
    int room = (int)bytes + MPI_BSEND_OVERHEAD;
    attached = malloc((size_t)room);
    check_true(attached != NULL, "there is memory for buffered sends");
    MUST(MPI_Buffer_attach(attached, room));
}

/* Waits until the buffered message is sent, and detaches the memory. */
static void detach(void)
{
    void *memory;
    int room;
    MUST(MPI_Buffer_detach(&memory, &room));
    check_true(memory == attached, "the memory of buffered sends comes back");
    free(attached);
}

/* One message around the ring, into a receive that is posted before. */
static void around(int mode, size_t bytes, size_t offset, int begin_only)
{
    int tag = 10 + mode, to = next_rank(), from = previous_rank();
    char what[80];
    snprintf(what, sizeof what, "%s %s of %zu bytes", every_mode[mode].name,
             begin_only ? "start" : "send", bytes);
    struct buffer out = buffer_at(bytes, offset), in = buffer_at(bytes, offset ? 3 : 0);
    fill(out.bytes, bytes, seed_of(self, tag, (long)bytes));
    spoil(in.bytes, bytes);
    MPI_Request receive, send;
    MPI_Status status;
    MUST(MPI_Irecv(in.bytes, (int)bytes, MPI_BYTE, from, tag, MPI_COMM_WORLD, &receive));
    /* A ready send needs a posted receive. */
    MUST(MPI_Barrier(MPI_COMM_WORLD));
    if (mode == BUFFERED)
        attach(bytes);
    if (begin_only) {
        MUST(every_mode[mode].start(out.bytes, (int)bytes, MPI_BYTE, to, tag, MPI_COMM_WORLD,
                                    &send));
        MUST(MPI_Wait(&send, MPI_STATUS_IGNORE));
    } else {
        MUST(every_mode[mode].send(out.bytes, (int)bytes, MPI_BYTE, to, tag, MPI_COMM_WORLD));
    }
    MUST(MPI_Wait(&receive, &status));
    if (mode == BUFFERED)
        detach();
    check_status(&status, from, tag, bytes, what);
    check_pattern(in.bytes, bytes, seed_of(from, tag, (long)bytes), what);
    check_pattern(out.bytes, bytes, seed_of(self, tag, (long)bytes), "what was sent");
    buffer_done(&out);
    buffer_done(&in);
}

void modes(void)
{
    for (int mode = 0; mode < MODES; mode++)
        for (int index = 0; index < size_count; index++)
            for (int begin_only = 0; begin_only < 2; begin_only++)
                for (size_t offset = 0; offset < 2; offset++)
                    around(mode, sizes[index], offset, begin_only);
}

/* One message that arrives before its receive; the receive has space for more bytes. */
static void unexpected(int mode, size_t bytes, int spare)
{
    int tag = 20 + mode, to = next_rank(), from = previous_rank();
    struct buffer out = buffer_of(bytes), in = buffer_of(bytes + (size_t)spare);
    fill(out.bytes, bytes, seed_of(self, tag, (long)bytes));
    spoil(in.bytes, in.length);
    MPI_Request send;
    MPI_Status status;
    if (mode == BUFFERED)
        attach(bytes);
    MUST(every_mode[mode].start(out.bytes, (int)bytes, MPI_BYTE, to, tag, MPI_COMM_WORLD, &send));
    MUST(MPI_Barrier(MPI_COMM_WORLD));
    MUST(MPI_Recv(in.bytes, (int)in.length, MPI_BYTE, from, tag, MPI_COMM_WORLD, &status));
    MUST(MPI_Wait(&send, MPI_STATUS_IGNORE));
    if (mode == BUFFERED)
        detach();
    check_status(&status, from, tag, bytes, "a late receive");
    check_pattern(in.bytes, bytes, seed_of(from, tag, (long)bytes), "a late receive");
    check_spoiled(in.bytes + bytes, (size_t)spare, "behind a shorter message");
    buffer_done(&out);
    buffer_done(&in);
}

void late_receivers(void)
{
    for (int mode = 0; mode < MODES - 1; mode++)
        for (int index = 0; index < size_count; index++) {
            unexpected(mode, sizes[index], 0);
            unexpected(mode, sizes[index], 100);
        }
}

/* A synchronous send does not complete before its receive is posted. */
void synchronous(void)
{
    int tag = 30, to = next_rank(), from = previous_rank();
    for (int index = 0; index < size_count; index++) {
        size_t bytes = sizes[index];
        struct buffer out = buffer_of(bytes), in = buffer_of(bytes);
        fill(out.bytes, bytes, seed_of(self, tag, (long)bytes));
        MPI_Request send;
        int over = 0;
        MUST(MPI_Issend(out.bytes, (int)bytes, MPI_BYTE, to, tag, MPI_COMM_WORLD, &send));
        for (int look = 0; look < 20; look++) {
            MUST(MPI_Test(&send, &over, MPI_STATUS_IGNORE));
            check_equal(0, over, "the end of a synchronous send without a receive");
        }
        MUST(MPI_Barrier(MPI_COMM_WORLD));
        MUST(MPI_Recv(in.bytes, (int)bytes, MPI_BYTE, from, tag, MPI_COMM_WORLD,
                      MPI_STATUS_IGNORE));
        MUST(MPI_Wait(&send, MPI_STATUS_IGNORE));
        check_pattern(in.bytes, bytes, seed_of(from, tag, (long)bytes), "a synchronous send");
        buffer_done(&out);
        buffer_done(&in);
    }
}

/* Sends and receives that depend on each other, and both in one call. */
void exchanges(void)
{
    int tag = 40, to = next_rank(), from = previous_rank();
    for (int index = 0; index < size_count; index++) {
        size_t bytes = sizes[index];
        struct buffer out = buffer_of(bytes), in = buffer_of(bytes);
        MPI_Status status;
        fill(out.bytes, bytes, seed_of(self, tag, (long)bytes));
        spoil(in.bytes, bytes);
        MUST(MPI_Sendrecv(out.bytes, (int)bytes, MPI_BYTE, to, tag, in.bytes, (int)bytes, MPI_BYTE,
                          from, tag, MPI_COMM_WORLD, &status));
        check_status(&status, from, tag, bytes, "an exchange");
        check_pattern(in.bytes, bytes, seed_of(from, tag, (long)bytes), "an exchange");
        MUST(MPI_Sendrecv_replace(out.bytes, (int)bytes, MPI_BYTE, to, tag + 1, from, tag + 1,
                                  MPI_COMM_WORLD, &status));
        check_status(&status, from, tag + 1, bytes, "an exchange in place");
        check_pattern(out.bytes, bytes, seed_of(from, tag, (long)bytes), "an exchange in place");
        if (ranks > 1) {
            fill(out.bytes, bytes, seed_of(self, tag + 2, (long)bytes));
            /* Odd ranks receive first, so the chain of blocking sends ends. */
            if (self % 2 == 0)
                MUST(MPI_Send(out.bytes, (int)bytes, MPI_BYTE, to, tag + 2, MPI_COMM_WORLD));
            MUST(MPI_Recv(in.bytes, (int)bytes, MPI_BYTE, from, tag + 2, MPI_COMM_WORLD, &status));
            if (self % 2 == 1)
                MUST(MPI_Send(out.bytes, (int)bytes, MPI_BYTE, to, tag + 2, MPI_COMM_WORLD));
            check_status(&status, from, tag + 2, bytes, "a blocking chain");
            check_pattern(in.bytes, bytes, seed_of(from, tag + 2, (long)bytes),
                          "a blocking chain");
        }
        buffer_done(&out);
        buffer_done(&in);
    }
    MUST(MPI_Sendrecv(NULL, 0, MPI_BYTE, MPI_PROC_NULL, 0, NULL, 0, MPI_BYTE, MPI_PROC_NULL, 0,
                      MPI_COMM_WORLD, MPI_STATUS_IGNORE));
}
