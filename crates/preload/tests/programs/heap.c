/* Allocates in every way, and checks where the memory lies, that nothing overlaps, that children see a
 * snapshot and nothing of theirs comes back, and that freed memory goes back to the system. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <malloc.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

enum { LARGE = 64 << 10, BLOCKS = 40 };

static int (*shared_heap)(uintptr_t *, size_t *);

static void fail(const char *what, size_t number)
{
    printf("%s is wrong: %zu\n", what, number);
    fflush(stdout);
    _exit(1);
}

static int is_shared(const void *address)
{
    uintptr_t base;
    size_t bytes;
    int file = shared_heap(&base, &bytes);
    return file >= 0 && (uintptr_t)address - base < bytes;
}

static void fill(uint8_t *block, size_t bytes, uint8_t value)
{
    for (size_t place = 0; place < bytes; place++)
        ((volatile uint8_t *)block)[place] = (uint8_t)(value + place / 4096);
}

static void expect(const uint8_t *block, size_t bytes, uint8_t value, const char *what)
{
    for (size_t place = 0; place < bytes; place++)
        if (((volatile const uint8_t *)block)[place] != (uint8_t)(value + place / 4096))
            fail(what, place);
}

static uint8_t *allocate(unsigned way, size_t bytes)
{
    void *block = NULL;
    size_t alignment = (size_t)64 << way % 14;
    switch (way % 5) {
    case 0: return malloc(bytes);
    case 1:
        block = calloc(bytes, 1);
        for (size_t place = 0; place < bytes; place++)
            if (((volatile uint8_t *)block)[place] != 0)
                fail("calloc", place);
        return block;
    case 2: block = memalign(alignment, bytes); break;
    case 3: block = aligned_alloc(alignment, bytes); break;
    case 4:
        if (posix_memalign(&block, alignment, bytes) != 0)
            fail("posix_memalign", bytes);
        break;
    }
    if ((uintptr_t)block % alignment != 0)
        fail("an alignment", alignment);
    return block;
}

/* A random sequence; every block has contents of its own. */
static void *exercise(void *seed)
{
    uint8_t *blocks[BLOCKS] = {0};
    size_t sizes[BLOCKS];
    unsigned random = (unsigned)(uintptr_t)seed;
    for (int turn = 0; turn < 1500; turn++) {
        random = random * 1103515245 + 12345;
        unsigned index = random >> 16 & 31, value = (random >> 8) % 200;
        size_t bytes = random % 3 ? random % 300000 : random % 2000;
        if (blocks[index] != NULL)
            expect(blocks[index], sizes[index], (uint8_t)index, "a block");
        if (blocks[index] != NULL && value % 2) {
            uint8_t *moved = realloc(blocks[index], bytes + 1);
            expect(moved, sizes[index] < bytes ? sizes[index] : bytes, (uint8_t)index, "a moved block");
            blocks[index] = moved;
        } else {
            free(blocks[index]);
            blocks[index] = allocate(value, bytes + 1);
        }
        sizes[index] = bytes + 1;
        if (malloc_usable_size(blocks[index]) < sizes[index])
            fail("malloc_usable_size", sizes[index]);
        fill(blocks[index], malloc_usable_size(blocks[index]) < 400000 ? sizes[index] : sizes[index], (uint8_t)index);
    }
    for (int index = 0; index < BLOCKS; index++)
        free(blocks[index]);
    return NULL;
}

static void check_family(void)
{
    free(NULL);
    uint8_t *small = malloc(1000), *large = malloc(LARGE), *grown = realloc(NULL, 2 * LARGE);
    if (is_shared(small) || !is_shared(large) || !is_shared(grown))
        fail("a place", 0);
    fill(small, 1000, 3);
    small = realloc(small, 3 * LARGE);
    expect(small, 1000, 3, "a block that grew into the heap");
    small = realloc(small, 500);
    expect(small, 500, 3, "a block that shrank out of it");
    if (is_shared(small))
        fail("a small block", 0);
    errno = 0;
    volatile size_t too_much = SIZE_MAX / 2;
    if (malloc(too_much) != NULL || errno != ENOMEM || calloc(too_much, 3) != NULL)
        fail("too much", 0);
    if (realloc(large, too_much) != NULL || malloc_usable_size(large) < LARGE)
        fail("a realloc that fails", 0);
    void *bad = NULL;
    if (posix_memalign(&bad, 24, LARGE) != EINVAL)
        fail("a bad alignment", 24);
    free(small), free(large), free(grown);
    pthread_t threads[4];
    for (uintptr_t index = 0; index < 4; index++)
        pthread_create(&threads[index], NULL, exercise, (void *)(index * 77 + 1));
    for (int index = 0; index < 4; index++)
        pthread_join(threads[index], NULL);
}

/* Parent and child write the same addresses, each after the other has begun. */
static void check_fork(void)
{
    enum { BYTES = 700000 };
    uint8_t *block = malloc(BYTES), *untouched = calloc(1, BYTES);
    for (int round = 0; round < 6; round++) {
        uint8_t value = (uint8_t)(round * 5);
        fill(block, BYTES, value);
        int to_child[2], to_parent[2];
        char word = 0;
        if (pipe(to_child) || pipe(to_parent))
            fail("a pipe", 0);
        pid_t child = fork();
        if (child == 0) {
            /* The parent has written by now. */
            if (read(to_child[0], &word, 1) != 1)
                _exit(2);
            expect(block, BYTES, value, "the snapshot of a child");
            if (untouched[BYTES - 1] != 0)
                fail("untouched memory", 0);
            fill(block, BYTES, (uint8_t)(value + 2));
            if (write(to_parent[1], "x", 1) != 1)
                _exit(3);
            pid_t grandchild = fork();
            if (grandchild == 0) {
                expect(block, BYTES, (uint8_t)(value + 2), "the snapshot of a grandchild");
                fill(block, BYTES, 99);
                free(block);
                exercise((void *)5);
                _exit(0);
            }
            int status = -1;
            waitpid(grandchild, &status, 0);
            expect(block, BYTES, (uint8_t)(value + 2), "the memory of a child");
            block = realloc(block, 2 * BYTES);
            expect(block, BYTES, (uint8_t)(value + 2), "the moved memory of a child");
            free(block);
            exercise((void *)9);
            _exit(status);
        }
        fill(block, BYTES, (uint8_t)(value + 1));
        if (write(to_child[1], "x", 1) != 1 || read(to_parent[0], &word, 1) != 1)
            fail("a child", 1);
        expect(block, BYTES, (uint8_t)(value + 1), "the memory of a parent");
        int status = -1;
        waitpid(child, &status, 0);
        if (status != 0)
            fail("the status of a child", (size_t)status);
        expect(block, BYTES, (uint8_t)(value + 1), "the memory of a parent afterwards");
        close(to_child[0]), close(to_child[1]), close(to_parent[0]), close(to_parent[1]);
    }
    free(block), free(untouched);
}

static atomic_int stop;
static void *allocate_on(void *seed)
{
    while (!stop)
        exercise(seed);
    return NULL;
}

/* Other threads hold the lock of the heap as often as not. */
static void check_busy_fork(void)
{
    pthread_t threads[2];
    for (uintptr_t index = 0; index < 2; index++)
        pthread_create(&threads[index], NULL, allocate_on, (void *)(index + 3));
    for (int round = 0; round < 40; round++) {
        pid_t child = fork();
        if (child == 0) {
            free(malloc(2 * LARGE));
            execl("/bin/true", "true", NULL);
            _exit(5);
        }
        int status = -1;
        waitpid(child, &status, 0);
        if (status != 0)
            fail("a child of a busy program", (size_t)status);
    }
    stop = 1;
    for (int index = 0; index < 2; index++)
        pthread_join(threads[index], NULL);
    if (system("test $(echo right) = right") != 0)
        fail("system", 0);
}

static size_t held_bytes(void)
{
    uintptr_t base;
    size_t bytes;
    struct stat found;
    fstat(shared_heap(&base, &bytes), &found);
    return (size_t)found.st_blocks * 512;
}

static void check_return(void)
{
    enum { MANY = 100 };
    static uint8_t *blocks[MANY];
    for (int index = 0; index < MANY; index++) {
        blocks[index] = malloc(2 << 20);
        memset(blocks[index], 1, 2 << 20);
    }
    if (held_bytes() < (size_t)200 << 20)
        fail("the memory that is held", held_bytes());
    for (int index = 0; index < MANY; index++)
        free(blocks[index]);
    uint8_t *huge = malloc((size_t)100 << 20);
    memset(huge, 1, (size_t)100 << 20);
    free(huge);
    if (held_bytes() > (size_t)70 << 20)
        fail("the memory that is still held", held_bytes());
}

/* A child has a snapshot, and the file that the program has put at a number. */
static void check_child(uint8_t *block, const uint8_t *untouched, size_t bytes, int number, int file)
{
    fill(block, bytes, 7);
    pid_t child = fork();
    if (child == 0) {
        struct stat wanted, found;
        expect(block, bytes, 7, "the snapshot of a child");
        if (untouched[bytes - 1] != 0)
            fail("untouched memory of a child", 0);
        if (number >= 0 && (fstat(file, &wanted) || fstat(number, &found) || found.st_ino != wanted.st_ino))
            fail("a file of the program in a child", (size_t)number);
        fill(block, bytes, 9);
        free(block);
        exercise((void *)3);
        _exit(0);
    }
    int status = -1;
    waitpid(child, &status, 0);
    if (status != 0)
        fail("the status of a child", (size_t)status);
    expect(block, bytes, 7, "the memory of a parent");
}

/* The program uses the number of the heap's descriptor for itself, or closes it. */
static void check_descriptor(void)
{
    enum { BYTES = 1 << 20 };
    uintptr_t base;
    size_t bytes;
    uint8_t *block = malloc(BYTES), *untouched = calloc(1, BYTES);
    int number = shared_heap(&base, &bytes), file = open("/proc/self/exe", O_RDONLY);
    /* Scripts lock with this one. */
    if (fcntl(200, F_GETFD) != -1)
        fail("a number that is taken", 200);
    check_child(block, untouched, BYTES, dup2(file, 200), file);
    check_child(block, untouched, BYTES, dup2(file, number), file);
    if (shared_heap(&base, &bytes) != -1)
        fail("a descriptor that is not the heap's", (size_t)number);
    if (fcntl(number, F_GETFD) == -1 || fcntl(200, F_GETFD) == -1)
        fail("a file of the program", (size_t)number);
    close(number);
    check_child(block, untouched, BYTES, -1, file);
    free(block), free(untouched);
    exercise((void *)7);
}

static void check_alignment(void)
{
    for (size_t alignment = (size_t)4 << 20; alignment <= (size_t)1 << 30; alignment *= 2) {
        for (size_t bytes = LARGE; bytes <= (size_t)3 << 20; bytes += (size_t)2 << 20) {
            void *blocks[3] = {memalign(alignment, bytes), aligned_alloc(alignment, bytes), NULL};
            if (posix_memalign(&blocks[2], alignment, bytes) != 0)
                fail("posix_memalign", alignment);
            for (int way = 0; way < 3; way++) {
                if ((uintptr_t)blocks[way] % alignment != 0)
                    fail("an alignment", alignment);
                fill(blocks[way], bytes, (uint8_t)way);
            }
            for (int way = 0; way < 3; way++) {
                expect(blocks[way], bytes, (uint8_t)way, "an aligned block");
                free(blocks[way]);
            }
        }
    }
    /* A whole page more than the heap's own alignment is possible at any place of the heap. */
    void *aligned = aligned_alloc((size_t)4 << 20, LARGE);
    if (!is_shared(aligned))
        fail("the place of an aligned block", 0);
    free(aligned);
    errno = 0;
    volatile size_t odd = 3 * (size_t)LARGE;
    void *bad = NULL;
    if (posix_memalign(&bad, odd, LARGE) != EINVAL || (aligned_alloc((size_t)1 << 62, LARGE) != NULL))
        fail("an alignment that is not possible", odd);
}

static void expect_advised(uint8_t *block, size_t bytes, size_t from, size_t to, const char *what)
{
    for (size_t place = 0; place < bytes; place++) {
        uint8_t wanted = place >= from && place < to ? 0 : (uint8_t)(7 + place / 4096);
        if (((volatile uint8_t *)block)[place] != wanted)
            fail(what, place);
    }
}

/* Programs rely on the zeros that `MADV_DONTNEED` leaves in private memory. */
static void check_advice(void)
{
    enum { BYTES = 4 << 20, FROM = 3 * 4096, TO = FROM + (2 << 20) };
    uint8_t *block = aligned_alloc(4096, BYTES);
    fill(block, BYTES, 7);
    size_t before = held_bytes();
    if (madvise(block + FROM, TO - FROM, MADV_DONTNEED) != 0)
        fail("MADV_DONTNEED", (size_t)errno);
    if (held_bytes() > before - (1 << 20))
        fail("the memory that is held after MADV_DONTNEED", held_bytes());
    expect_advised(block, BYTES, FROM, TO, "memory after MADV_DONTNEED");
    fill(block, BYTES, 7);
    if (madvise(block + FROM, TO - FROM, MADV_FREE) != 0)
        fail("MADV_FREE", (size_t)errno);
    fill(block + FROM, TO - FROM, 7 + FROM / 4096);
    expect(block, BYTES, 7, "memory that is written after MADV_FREE");
    errno = 0;
    if (madvise(block + 1, 4096, MADV_DONTNEED) != -1 || errno != EINVAL)
        fail("the error of an address that is no page", (size_t)errno);
    if (madvise(block, 4096, -7) != -1 || madvise(block, BYTES, MADV_WILLNEED) != 0)
        fail("other advice", 0);
    expect(block, BYTES, 7, "memory after other advice");
    pid_t child = fork();
    if (child == 0) {
        if (madvise(block + FROM, TO - FROM, MADV_DONTNEED) != 0)
            fail("MADV_DONTNEED in a child", (size_t)errno);
        expect_advised(block, BYTES, FROM, TO, "memory of a child after MADV_DONTNEED");
        _exit(0);
    }
    int status = -1;
    waitpid(child, &status, 0);
    if (status != 0)
        fail("the status of a child", (size_t)status);
    expect(block, BYTES, 7, "memory after MADV_DONTNEED in a child");
    free(block);
}

/* A fork copies blocks in which the program has forbidden access to a page. */
static void check_guard(void)
{
    enum { BYTES = 1 << 20, GUARD = 5 * 4096 };
    uintptr_t base;
    size_t bytes;
    uint8_t *block = aligned_alloc(4096, BYTES);
    fill(block, BYTES, 7);
    for (int turn = 0; turn < 2; turn++) {
        if (mprotect(block + GUARD, 4096, PROT_NONE) != 0)
            fail("mprotect", (size_t)errno);
        pid_t child = fork();
        if (child == 0) {
            expect(block, GUARD, 7, "memory in front of a guard");
            expect(block + GUARD + 4096, BYTES - GUARD - 4096, 7 + GUARD / 4096 + 1, "memory behind a guard");
            _exit(0);
        }
        int status = -1;
        waitpid(child, &status, 0);
        if (status != 0)
            fail("the status of a child", (size_t)status);
        mprotect(block + GUARD, 4096, PROT_READ | PROT_WRITE);
        expect(block, BYTES, 7, "a block with a guard");
        /* Once more without the descriptor. */
        close(shared_heap(&base, &bytes));
    }
}

int main(int count, char **words)
{
    shared_heap = (int (*)(uintptr_t *, size_t *))dlsym(RTLD_DEFAULT, "memferry_shared_heap");
    if (shared_heap == NULL)
        fail("the library", 0);
    const char *part = count > 1 ? words[1] : "";
    if (strcmp(part, "family") == 0)
        check_family();
    else if (strcmp(part, "fork") == 0)
        check_fork();
    else if (strcmp(part, "busy") == 0)
        check_busy_fork();
    else if (strcmp(part, "return") == 0)
        check_return();
    else if (strcmp(part, "descriptor") == 0)
        check_descriptor();
    else if (strcmp(part, "alignment") == 0)
        check_alignment();
    else if (strcmp(part, "advice") == 0)
        check_advice();
    else if (strcmp(part, "guard") == 0)
        check_guard();
    else {
        uint8_t *large = malloc(LARGE);
        puts(is_shared(large) ? "shared" : "ordinary");
        free(large);
        return 0;
    }
    puts("all right");
    return 0;
}
