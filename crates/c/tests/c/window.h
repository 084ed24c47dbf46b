/* Windows between two processes: the owner sends the handle over the link, the peer attaches it. */

#ifndef WINDOW_H
#define WINDOW_H

#include "pair.h"

/* One second, for waits that are expected to return earlier. */
#define SECOND_NS INT64_C(1000000000)

static inline int64_t expose_and_send(struct side *side, void *memory, size_t length, int rights) {
    struct adma_window handle;
    int64_t window = adma_expose(side->fd, memory, length, rights, &handle);
    CHECK(window >= 0);
    CHECK_IS(adma_window_length(window), length);
    CHECK_IS(adma_write(side->fd, &handle, sizeof handle), 0);
    return window;
}

static inline struct adma_window receive_handle(struct side *side) {
    struct adma_window handle;
    CHECK_IS(adma_read(side->fd, &handle, sizeof handle), sizeof handle);
    return handle;
}

static inline int64_t attach_sent(struct side *side) {
    struct adma_window handle = receive_handle(side);
    int64_t remote = adma_attach(side->fd, &handle);
    CHECK(remote >= 0);
    return remote;
}

#endif
