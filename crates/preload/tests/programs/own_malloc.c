/* A program that brings its own malloc. */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

static uint8_t memory[64 << 20];
static size_t used;

void *malloc(size_t bytes)
{
    size_t *head = (size_t *)(memory + used);
    used += (bytes + 31) & ~(size_t)15;
    *head = bytes;
    return used < sizeof memory ? (uint8_t *)head + 16 : NULL;
}

void free(void *block)
{
    (void)block;
}

void *calloc(size_t count, size_t each)
{
    return malloc(count * each);
}

void *realloc(void *block, size_t bytes)
{
    void *moved = malloc(bytes);
    if (block != NULL && moved != NULL)
        memcpy(moved, block, *(size_t *)((uint8_t *)block - 16));
    return moved;
}

int main(void)
{
    uint8_t *block = malloc(1 << 20);
    block = realloc(block, 2 << 20);
    puts(block > memory && block < memory + sizeof memory ? "its own" : "another");
    return 0;
}
