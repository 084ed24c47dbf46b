/* Copies and fills until a device has taken part, or for a second; checks every byte, also in a child. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { BYTES = 3 << 20 };

static uint8_t *source, *target;

static void check(int turn)
{
    for (int place = 0; place < BYTES; place++)
        source[place] = (uint8_t)(place * 3 + (place >> 11) + turn);
    void *result = memcpy(target, source, BYTES);
    if (result != target || memcmp(target, source, BYTES) != 0)
        _exit(1);
    memset(target + 5, turn, BYTES - 5);
    for (int place = 5; place < BYTES; place++)
        if (target[place] != (uint8_t)turn)
            _exit(2);
}

int main(void)
{
    source = malloc(BYTES);
    target = malloc(BYTES);
    int is_used = 0;
    for (int turn = 0; turn < 60 && is_used < 3; turn++) {
        check(turn);
        is_used += access(getenv("ENGINE_FILE"), F_OK) == 0;
        usleep(10000);
    }
    int status;
    pid_t child = fork();
    if (child == 0) {
        check(7);
        _exit(0);
    }
    if (waitpid(child, &status, 0) != child || status != 0)
        return 3;
    puts(is_used ? "by a device" : "by the processor");
    return 0;
}
