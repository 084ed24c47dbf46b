/* The MPI candidate of the message benches. Rank 0 reads one command per line from standard input,
 * all ranks execute it together, and rank 0 replies with one line: nanoseconds, or an error.
 * Between commands every rank sleeps, so that other candidates can be measured. */
#define _GNU_SOURCE
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#include "member.h"

int rank_of_self;
int ranks;

/* Signal that wakes a sleeping rank for a command. MPI could wait for a message only by polling. */
#define WAKE SIGUSR2

struct command {
    const char *word;
    const char *(*carry_out)(long, long, struct timing *);
};

static const struct command commands[] = {
    {"pingpong", pingpong},
    {"alltoall", alltoall},
    {"coll-barrier", collective_barrier},
    {"coll-bcast", collective_broadcast},
    {"coll-allreduce", collective_allreduce},
    {"coll-alltoall", collective_alltoall},
    {"ring", ring},
    {"neighbours", neighbours},
    {"idle", idle},
    {"is", integer_sort},
    {"ft", fourier},
    {"match-posted", match_posted},
    {"match-posted-reverse", match_posted_reverse},
    {"match-posted-mixed", match_posted_mixed},
    {"match-unexpected", match_unexpected},
    {"match-unexpected-reverse", match_unexpected_reverse},
    {"match-unexpected-mixed", match_unexpected_mixed},
    {"match-unexpected-any", match_unexpected_any},
};
enum { COMMANDS = sizeof commands / sizeof commands[0], QUIT = COMMANDS };

static pid_t launcher;

/* Whether buffers come from malloc, as in most programs. */
static int is_malloc;

double now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e9 + (double)now.tv_nsec;
}

long warm_up_of(long iterations)
{
    return 1 + iterations / 10;
}

void *touched_pages(size_t bytes)
{
    size_t length = bytes > 0 ? bytes : 1;
    if (is_malloc) {
        void *block = malloc(length);
        return block == NULL ? NULL : memset(block, 0x5A, length);
    }
    void *start =
        mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (start == MAP_FAILED)
        return NULL;
    memset(start, 0x5A, length);
    return start;
}

void release_pages(void *start, size_t bytes)
{
    if (is_malloc)
        free(start);
    else if (start != NULL)
        munmap(start, bytes > 0 ? bytes : 1);
}

int all_agree(int yes)
{
    int all = 0;
    MPI_Allreduce(&yes, &all, 1, MPI_INT, MPI_LAND, MPI_COMM_WORLD);
    return all;
}

/* Exits if the launcher has exited: a rank whose launcher was killed would otherwise poll forever. */
static void look_for_launcher(int signal_number)
{
    (void)signal_number;
    if (getppid() != launcher)
        _exit(1);
}

static void watch_launcher(void)
{
    struct sigaction action = {.sa_handler = look_for_launcher, .sa_flags = SA_RESTART};
    struct itimerval second = {{1, 0}, {1, 0}};
    launcher = getppid();
    sigaction(SIGALRM, &action, NULL);
    setitimer(ITIMER_REAL, &second, NULL);
}

/* Reads the next command on rank 0: its index and two numbers. The end of the input means quit. */
static void read_command(long command[3])
{
    char line[256], word[32] = "";
    command[0] = QUIT;
    command[1] = command[2] = 0;
    if (fgets(line, sizeof line, stdin) == NULL)
        return;
    if (sscanf(line, "%31s %ld %ld", word, &command[1], &command[2]) < 1)
        return;
    for (int index = 0; index < COMMANDS; index++)
        if (strcmp(word, commands[index].word) == 0)
            command[0] = index;
}

static void answer(const char *error, const struct timing *timing)
{
    if (error != NULL)
        printf("error %s\n", error);
    else
        printf("%.0f %.0f\n", timing->total_ns, timing->messages_ns);
    fflush(stdout);
}

static void serve(const pid_t *members, const sigset_t *wake)
{
    for (;;) {
        long command[3];
        if (rank_of_self == 0) {
            read_command(command);
            for (int rank = 1; rank < ranks; rank++)
                kill(members[rank], WAKE);
        } else {
            int received;
            sigwait(wake, &received);
        }
        MPI_Bcast(command, 3, MPI_LONG, 0, MPI_COMM_WORLD);
        if (command[0] == QUIT)
            return;
        struct timing timing = {0, 0};
        const char *error = commands[command[0]].carry_out(command[1], command[2], &timing);
        if (rank_of_self == 0)
            answer(error, &timing);
    }
}

int main(int argc, char **argv)
{
    sigset_t wake;
    sigemptyset(&wake);
    sigaddset(&wake, WAKE);
    /* Blocked before MPI starts its threads, so that they do not receive the signal. */
    sigprocmask(SIG_BLOCK, &wake, NULL);
    watch_launcher();
    is_malloc = argc > 1 && strcmp(argv[1], "malloc") == 0;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank_of_self);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    pid_t self = getpid();
    pid_t *members = calloc((size_t)ranks, sizeof *members);
    if (!all_agree(members != NULL))
        MPI_Abort(MPI_COMM_WORLD, 1);
    MPI_Gather(&self, sizeof self, MPI_BYTE, members, sizeof self, MPI_BYTE, 0, MPI_COMM_WORLD);
    if (rank_of_self == 0) {
        printf("ready\n");
        fflush(stdout);
    }
    serve(members, &wake);
    free(members);
    MPI_Finalize();
    return 0;
}
