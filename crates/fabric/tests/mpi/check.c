/* Buffers, patterns and checks. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "check.h"
#include "section.h"

enum { GUARD = 64, GUARD_BYTE = 0xA5, SPOILED_BYTE = 0x6E };

long long checks_made;

/* Several threads may count checks. */
static void count_check(void)
{
    __atomic_fetch_add(&checks_made, 1, __ATOMIC_RELAXED);
}

uint64_t mixed(uint64_t value)
{
    value += 0x9E3779B97F4A7C15u;
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9u;
    value = (value ^ (value >> 27)) * 0x94D049BB133111EBu;
    return value ^ (value >> 31);
}

void fail(const char *format, ...)
{
    char text[1024];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    fprintf(stderr, "rank %d of %d, section %s: %s\n", self, ranks, section_now(), text);
    fflush(stderr);
    fflush(stdout);
    MPI_Abort(MPI_COMM_WORLD, 1);
    _exit(1);
}

void check_call(int code, const char *call)
{
    if (code != MPI_SUCCESS) {
        char text[MPI_MAX_ERROR_STRING] = "";
        int length = 0;
        MPI_Error_string(code, text, &length);
        fail("expected success of %s, found error %d: %s", call, code, text);
    }
}

void check_equal(long long expected, long long found, const char *what)
{
    count_check();
    if (expected != found)
        fail("%s: expected %lld, found %lld", what, expected, found);
}

void check_true(int condition, const char *what)
{
    count_check();
    if (!condition)
        fail("expected that %s, found that it is not so", what);
}

struct buffer buffer_at(size_t length, size_t offset)
{
    struct buffer buffer = {NULL, length, malloc(length + offset + 2 * GUARD)};
    if (buffer.block == NULL)
        fail("expected %zu bytes of memory, found none", length);
    buffer.bytes = buffer.block + GUARD + offset;
    memset(buffer.bytes - GUARD, GUARD_BYTE, GUARD);
    memset(buffer.bytes + length, GUARD_BYTE, GUARD);
    return buffer;
}

struct buffer buffer_of(size_t length)
{
    return buffer_at(length, 0);
}

void check_guards(const struct buffer *buffer)
{
    count_check();
    for (int place = 0; place < GUARD; place++) {
        uint8_t before = buffer->bytes[place - GUARD];
        uint8_t behind = buffer->bytes[buffer->length + (size_t)place];
        if (before != GUARD_BYTE)
            fail("expected the guard %#x at %d bytes before a buffer of %zu, found %#x", GUARD_BYTE,
                 GUARD - place, buffer->length, before);
        if (behind != GUARD_BYTE)
            fail("expected the guard %#x at %d bytes behind a buffer of %zu, found %#x", GUARD_BYTE,
                 place, buffer->length, behind);
    }
}

void buffer_done(struct buffer *buffer)
{
    check_guards(buffer);
    free(buffer->block);
    buffer->block = buffer->bytes = NULL;
}

uint64_t seed_of(int source, int tag, long sequence)
{
    return mixed(mixed(mixed((uint64_t)source) + (uint64_t)tag) + (uint64_t)sequence);
}

static uint64_t word_of(uint64_t seed, size_t number)
{
    uint64_t word = (seed + number) * 0x9E3779B97F4A7C15u;
    return word ^ (word >> 29);
}

void fill(void *memory, size_t length, uint64_t seed)
{
    uint8_t *bytes = memory;
    for (size_t place = 0; place < length; place += 8) {
        uint64_t word = word_of(seed, place / 8);
        size_t left = length - place;
        memcpy(bytes + place, &word, left < 8 ? left : 8);
    }
}

void spoil(void *memory, size_t length)
{
    memset(memory, SPOILED_BYTE, length);
}

void check_pattern(const void *memory, size_t length, uint64_t seed, const char *what)
{
    const uint8_t *bytes = memory;
    count_check();
    for (size_t place = 0; place < length; place += 8) {
        uint64_t word = word_of(seed, place / 8);
        size_t part = length - place < 8 ? length - place : 8;
        if (memcmp(bytes + place, &word, part) == 0)
            continue;
        uint8_t expected[8];
        memcpy(expected, &word, sizeof expected);
        size_t wrong = 0;
        while (bytes[place + wrong] == expected[wrong])
            wrong++;
        fail("%s: byte %zu of %zu: expected %#x, found %#x%s", what, place + wrong, length,
             expected[wrong], bytes[place + wrong],
             bytes[place + wrong] == SPOILED_BYTE ? " (as it was before)" : "");
    }
}

void check_spoiled(const void *memory, size_t length, const char *what)
{
    const uint8_t *bytes = memory;
    count_check();
    for (size_t place = 0; place < length; place++)
        if (bytes[place] != SPOILED_BYTE)
            fail("%s: expected byte %zu untouched, found %#x", what, place, bytes[place]);
}

void check_status(const MPI_Status *status, int source, int tag, size_t length, const char *what)
{
    int count = -1;
    MUST(MPI_Get_count(status, MPI_BYTE, &count));
    count_check();
    if (status->MPI_SOURCE != source || status->MPI_TAG != tag || (size_t)count != length)
        fail("%s: expected %zu bytes from %d with tag %d, found %d from %d with tag %d", what,
             length, source, tag, count, status->MPI_SOURCE, status->MPI_TAG);
}

int next_rank(void)
{
    return (self + 1) % ranks;
}

int previous_rank(void)
{
    return (self + ranks - 1) % ranks;
}
