/* Stands in for libadma.so with a model of a device: counts what it copies in a file that the environment names. "ENGINE_FAILS"
 * makes it fail in the middle of every copy, "ENGINE_CLOSED" at its start. */
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <unistd.h>

static int finish(uint8_t *target, size_t bytes)
{
    int file = open(getenv("ENGINE_FILE"), O_WRONLY | O_CREAT | O_APPEND, 0600);
    if (file < 0 || write(file, "copied\n", 7) != 7)
        _exit(99);
    close(file);
    if (getenv("ENGINE_FAILS") == NULL)
        return 0;
    target[bytes / 2] ^= 1;
    return -5;
}

int adma_init(void)
{
    return getenv("ENGINE_CLOSED") == NULL ? 0 : -19;
}

int adma_copy(const void *source, void *target, size_t bytes)
{
    for (size_t place = 0; place < bytes; place++)
        ((volatile uint8_t *)target)[place] = ((const uint8_t *)source)[place];
    return finish(target, bytes);
}

int adma_fill(void *target, int value, size_t bytes)
{
    for (size_t place = 0; place < bytes; place++)
        ((volatile uint8_t *)target)[place] = (uint8_t)value;
    return finish(target, bytes);
}
