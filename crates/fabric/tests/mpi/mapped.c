/* Proves that large messages between allocations need no system call for the memory of another process: after
 * the first exchange, each of two ranks is killed if it executes one.
 *
 *     mpirun -n 2 ./mpi-mapped [static|fork]
 *
 * With "static" the messages are in arrays that are no allocations: such a call is necessary then. With
 * "fork" every rank has children meanwhile, which check that their memory does not change. */
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <malloc.h>
#include <mpi.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

enum { LARGEST = 8 << 20, KINDS = 5, CHILDREN = 4 };

static const int sizes[] = {192 << 10, 1000003, 2 << 20, LARGEST};
static uint8_t array[2][LARGEST];
static int rank;

static void fail(const char *what)
{
    fprintf(stderr, "rank %d: %s\n", rank, what);
    MPI_Abort(MPI_COMM_WORLD, 1);
}

static void forbid_cross_memory(void)
{
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_process_vm_readv, 1, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_process_vm_writev, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {sizeof filter / sizeof filter[0], filter};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 ||
        syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &program) != 0)
        fail("no filter of system calls");
}

static uint8_t *allocate(int kind, size_t bytes)
{
    void *block = NULL;
    switch (kind) {
    case 0: return malloc(bytes);
    case 1: return calloc(bytes, 1);
    case 2: return realloc(malloc(bytes / 2), bytes);
    case 3: return memalign(4096, bytes);
    default: return posix_memalign(&block, 64, bytes) == 0 ? block : NULL;
    }
}

static uint8_t byte_of(int sender, int turn, size_t place)
{
    return (uint8_t)(place * 7 + (place >> 12) + (size_t)(sender * 64 + turn));
}

/* Both ranks send and receive at the same time. */
static void exchange(uint8_t *out, uint8_t *in, int bytes, int turn)
{
    int other = 1 - rank;
    for (int place = 0; place < bytes; place++)
        out[place] = byte_of(rank, turn, (size_t)place);
    MPI_Sendrecv(out, bytes, MPI_BYTE, other, turn, in, bytes, MPI_BYTE, other, turn,
                 MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    for (int place = 0; place < bytes; place++)
        if (in[place] != byte_of(other, turn, (size_t)place))
            fail("a byte is wrong");
}

/* A child that looks at a block until its parent has changed it, and a little longer. */
static pid_t watch(const uint8_t *block, int bytes, int turn)
{
    pid_t child = fork();
    if (child != 0)
        return child;
    for (int look = 0; look < 20; look++) {
        for (int place = 0; place < bytes; place++)
            if (((volatile const uint8_t *)block)[place] != byte_of(rank, turn, (size_t)place))
                _exit(1);
        usleep(2000);
    }
    _exit(0);
}

static void exchange_all(const char *word)
{
    int is_static = strcmp(word, "static") == 0, is_forking = strcmp(word, "fork") == 0, turn = 0;
    pid_t children[CHILDREN];
    int started = 0;
    for (int kind = 0; kind < KINDS; kind++) {
        for (size_t index = 0; index < sizeof sizes / sizeof sizes[0]; index++) {
            int bytes = sizes[index];
            uint8_t *out = is_static ? array[0] : allocate(kind, (size_t)bytes);
            uint8_t *in = is_static ? array[1] : allocate(KINDS - 1 - kind, (size_t)bytes);
            if (out == NULL || in == NULL)
                fail("no memory");
            exchange(out, in, bytes, ++turn);
            if (is_forking && started < CHILDREN && index == 2) {
                children[started++] = watch(out, bytes, turn);
                exchange(out, in, bytes, ++turn);
            }
            if (!is_static) {
                free(out);
                free(in);
            }
        }
    }
    for (int child = 0; child < started; child++) {
        int status;
        if (waitpid(children[child], &status, 0) != children[child] || status != 0)
            fail("a child saw memory change");
    }
}

int main(int count, char **words)
{
    MPI_Init(&count, &words);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    uint8_t *out = malloc(LARGEST), *in = malloc(LARGEST);
    if (out == NULL || in == NULL)
        fail("no memory");
    /* Connects the ranks, which try such calls then, and passes what can be mapped. */
    exchange(out, in, LARGEST, 0);
    free(out);
    free(in);
    MPI_Barrier(MPI_COMM_WORLD);
    forbid_cross_memory();
    exchange_all(count > 1 ? words[1] : "");
    MPI_Barrier(MPI_COMM_WORLD);
    if (rank == 0)
        printf("all messages were mapped\n");
    MPI_Finalize();
    return 0;
}
