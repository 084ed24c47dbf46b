/* Calls every function that moves, fills or compares memory, at all small sizes and some large ones, at
 * many alignments and overlaps, and compares with plain loops. */
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

enum { ROOM = 3 << 20 };

void *memcpy_of_2_2_5(void *, const void *, size_t);
__asm__(".symver memcpy_of_2_2_5, memcpy@GLIBC_2.2.5");
void *__memcpy_chk(void *, const void *, size_t, size_t);
void *__memmove_chk(void *, const void *, size_t, size_t);
void *__mempcpy_chk(void *, const void *, size_t, size_t);
void *__memset_chk(void *, int, size_t, size_t);
void *mempcpy(void *, const void *, size_t);

static uint8_t *memory, *expected;

/* A loop that no compiler turns into a call. */
static void plain_move(uint8_t *target, const uint8_t *source, size_t bytes)
{
    volatile uint8_t *to = target;
    const volatile uint8_t *from = source;
    if (target < source)
        for (size_t place = 0; place < bytes; place++)
            to[place] = from[place];
    else
        for (size_t place = bytes; place-- > 0;)
            to[place] = from[place];
}

static void fail(const char *what, size_t to, size_t from, size_t bytes)
{
    printf("%s is wrong: to %zu from %zu, %zu bytes\n", what, to, from, bytes);
    exit(1);
}

static int differs(size_t bytes)
{
    for (size_t place = 0; place <= bytes / 8; place++)
        if (((volatile uint64_t *)memory)[place] != ((volatile uint64_t *)expected)[place])
            return 1;
    return 0;
}

static void refill(size_t bytes)
{
    static uint64_t seed;
    seed++;
    for (size_t place = 0; place <= bytes / 8; place++)
        ((volatile uint64_t *)memory)[place] = ((volatile uint64_t *)expected)[place] =
            (place + seed * 1000003) * 0x9E3779B97F4A7C15;
}

/* Executes a move by each function that allows it. `used` is the end of what it touches. */
static void check_move(size_t to, size_t from, size_t bytes, size_t used)
{
    static const char *const names[] = {"memmove",       "memcpy@2.2.5",  "bcopy",        "__memmove_chk",
                                        "memcpy",        "mempcpy",       "__memcpy_chk", "__mempcpy_chk"};
    int overlap = to < from + bytes && from < to + bytes;
    for (int which = 0; which < (overlap ? 4 : 8); which++) {
        refill(used);
        plain_move(expected + to, expected + from, bytes);
        uint8_t *target = memory + to, *result = target;
        const uint8_t *source = memory + from;
        switch (which) {
        case 0: result = memmove(target, source, bytes); break;
        case 1: result = memcpy_of_2_2_5(target, source, bytes); break;
        case 2: bcopy(source, target, bytes); break;
        case 3: result = __memmove_chk(target, source, bytes, bytes); break;
        case 4: result = memcpy(target, source, bytes); break;
        case 5: result = mempcpy(target, source, bytes); break;
        case 6: result = __memcpy_chk(target, source, bytes, bytes + 1); break;
        case 7: result = __mempcpy_chk(target, source, bytes, bytes); break;
        }
        if (which == 5 || which == 7)
            result -= bytes;
        if (result != target || differs(used))
            fail(names[which], to, from, bytes);
    }
}

static void check_fill(size_t to, size_t bytes, size_t used)
{
    for (int which = 0; which < 2; which++) {
        refill(used);
        for (size_t place = 0; place < bytes; place++)
            ((volatile uint8_t *)expected)[to + place] = 0xA5;
        void *result = which ? __memset_chk(memory + to, 0x7FA5, bytes, bytes) : memset(memory + to, 0xA5, bytes);
        if (result != memory + to || differs(used))
            fail("memset", to, to, bytes);
    }
}

static void check_compare(size_t bytes)
{
    refill(bytes + 1);
    if (memcmp(memory, expected, bytes) != 0)
        fail("memcmp of equal memory", 0, 0, bytes);
    for (size_t place = 0; place < bytes; place += 1 + bytes / 7) {
        memory[place]++;
        int order = memcmp(memory, expected, bytes), is_greater = memory[place] > expected[place];
        if (order == 0 || (order > 0) != is_greater || bcmp(memory, expected, bytes) == 0)
            fail("memcmp", place, 0, bytes);
        memory[place]--;
    }
}

/* A handler may call all of them, whatever the program is doing. */
static uint8_t *handler_memory;
static volatile long handled;
static void on_signal(int number)
{
    (void)number;
    size_t bytes = handled % 3 ? 40 : 1 << 20;
    memset(handler_memory, (int)handled, bytes);
    memcpy(handler_memory + (1 << 20), handler_memory, bytes);
    if (memcmp(handler_memory, handler_memory + (1 << 20), bytes) != 0)
        _exit(9);
    handled++;
}

static void check_signals(void)
{
    handler_memory = malloc(2 << 20);
    struct sigaction action = {.sa_handler = on_signal};
    sigaction(SIGALRM, &action, NULL);
    struct itimerval every = {{0, 2000}, {0, 2000}};
    setitimer(ITIMER_REAL, &every, NULL);
    while (handled < 50)
        for (size_t bytes = 1; bytes <= 1 << 20; bytes = bytes * 5 + 3)
            check_move(bytes + 5, 0, bytes, 2 * bytes + 10);
    struct itimerval never = {{0, 0}, {0, 0}};
    setitimer(ITIMER_REAL, &never, NULL);
}

/* A child has none of its parent's other threads. */
static void check_children(void)
{
    for (int round = 0; round < 10; round++) {
        pid_t child = fork();
        if (child == 0) {
            check_move(1 << 20, 0, 1 << 20, 2 << 20);
            check_fill(100, 1 << 20, 2 << 20);
            _exit(round & 1 ? 0 : (exit(0), 0));
        }
        check_move(100, 2 << 20, 900 << 10, 3 << 20);
        int status = -1;
        if (waitpid(child, &status, 0) != child || status != 0)
            fail("a child", 0, 0, (size_t)status);
    }
}

static uint8_t early[64], early_copy[64];
__attribute__((constructor)) static void before_main(void)
{
    memset(early, 7, sizeof early);
    memcpy(early_copy, early, sizeof early);
}

int main(void)
{
    if (memcmp(early, early_copy, sizeof early) != 0 || early[63] != 7)
        fail("a constructor", 0, 0, sizeof early);
    memory = malloc(ROOM + 64);
    expected = malloc(ROOM + 64);
    for (size_t bytes = 0; bytes <= 140; bytes++) {
        for (size_t to = 0; to <= 70; to += 3)
            check_move(to, 35, bytes, 320);
        check_move(160, 7, bytes, 320);
        check_fill(bytes % 9, bytes, 320);
        check_compare(bytes);
    }
    for (size_t bytes = 100; bytes <= 1 << 20; bytes = bytes * 3 + 17) {
        check_move(bytes + 11, 3, bytes, 2 * bytes + 20);
        check_move(3, bytes + 11, bytes, 2 * bytes + 20);
        check_move(bytes / 2, 0, bytes, 2 * bytes);
        check_move(0, bytes / 3, bytes, 2 * bytes);
        check_move(8, 0, bytes, bytes + 20);
        check_fill(5, bytes, bytes + 10);
        check_compare(bytes);
    }
    check_signals();
    check_children();
    puts("all right");
    return 0;
}
