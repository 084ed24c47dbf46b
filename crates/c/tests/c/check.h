/* Shared by the test programs: checks that print where they failed, and a timeout. */

#ifndef CHECK_H
#define CHECK_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "adma.h"

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s:%d: not so: %s (last error: \"%s\")\n", __FILE__, __LINE__,        \
                    #condition, adma_last_error());                                                \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

#define CHECK_IS(expression, wanted)                                                               \
    do {                                                                                           \
        long long found_ = (expression), wanted_ = (wanted);                                       \
        if (found_ != wanted_) {                                                                   \
            fprintf(stderr, "%s:%d: %s is %lld, not %lld (last error: \"%s\")\n", __FILE__,        \
                    __LINE__, #expression, found_, wanted_, adma_last_error());                    \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

/* The last error of this thread contains the name of the call and this text. */
#define CHECK_SAYS(text) CHECK(strstr(adma_last_error(), text) != NULL)

/* A signal ends a test that hangs; the Rust side reports it. */
static inline void bound_time(void) { alarm(500); }

static inline void *take(size_t bytes) {
    void *memory = malloc(bytes);
    if (memory == NULL) {
        fprintf(stderr, "no memory for the test: %zu bytes\n", bytes);
        exit(1);
    }
    return memory;
}

/* Bytes that differ with the position and with the seed. */
static inline unsigned char byte_at(size_t place, unsigned seed) {
    return (unsigned char)((place * 131 + place / 251 + seed * 29) & 0xff);
}

static inline void paint(unsigned char *bytes, size_t length, unsigned seed) {
    for (size_t i = 0; i < length; i++) bytes[i] = byte_at(i, seed);
}

static inline int is_painted(const unsigned char *bytes, size_t length, unsigned seed) {
    for (size_t i = 0; i < length; i++)
        if (bytes[i] != byte_at(i, seed)) return 0;
    return 1;
}

#endif
