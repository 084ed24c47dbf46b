/* Copies of a few bytes, in sizes as programs have them. Executes orders of the form "tiny COUNT", with
 * sizes in a row that repeats, and "random COUNT", and replies with nanoseconds. */
#include <stdio.h>
#include <string.h>
#include <time.h>

#define RANDOM_SIZES 65536

static const unsigned char sizes[16] = {8, 16, 3, 24, 8, 40, 5, 16, 32, 1, 12, 64, 8, 20, 6, 96};
static unsigned char random_sizes[RANDOM_SIZES];
static unsigned char source[256], target[256];

static double now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e9 + (double)now.tv_nsec;
}

static void copy(long count)
{
    for (long turn = 0; turn < count; turn++)
        memcpy(target + (turn & 63), source + (turn & 31), sizes[turn & 15]);
}

static void copy_random(long count)
{
    for (long turn = 0; turn < count; turn++)
        memcpy(target + (turn & 63), source + (turn & 31), random_sizes[turn & (RANDOM_SIZES - 1)]);
}

int main(void)
{
    char word[32];
    long count;
    unsigned state = 1;
    for (int place = 0; place < RANDOM_SIZES; place++) {
        state = state * 1664525u + 1013904223u;
        random_sizes[place] = sizes[state >> 28];
    }
    for (int place = 0; place < 256; place++)
        source[place] = (unsigned char)(place * 7);
    puts("ready");
    fflush(stdout);
    while (scanf("%31s", word) == 1 && strcmp(word, "quit") != 0 && scanf("%ld", &count) == 1) {
        void (*run)(long) = strcmp(word, "random") == 0 ? copy_random : copy;
        run(count / 10);
        double begin = now_ns();
        run(count);
        printf("%.0f\n", now_ns() - begin);
        fflush(stdout);
    }
    return 0;
}
