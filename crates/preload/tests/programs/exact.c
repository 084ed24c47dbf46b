/* Calls each counted function with every length up to 600, as often as the first word says. */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

static uint8_t source[1024], target[1024];

int main(int count, char **words)
{
    long times = count > 1 ? atol(words[1]) : 0;
    for (long turn = 0; turn < times; turn++)
        for (size_t bytes = 0; bytes <= 600; bytes++) {
            memcpy(target, source, bytes);
            mempcpy(target, source, bytes);
            memmove(target + 1, target, bytes);
            memset(target, 0, bytes);
            if (memcmp(source, target, bytes) != 0)
                return 1;
        }
    return 0;
}
