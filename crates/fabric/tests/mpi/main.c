/* Exercises an MPI library and the transport below it, and checks every byte that arrives.
 *
 *     mpirun -n 4 ./mpi-check [--quick] [--threads] [--patience SECONDS] [--list]
 *                            [--without SECTION]... [SECTION]...
 *
 * Without names all sections run except `huge`, which transfers more than 2 GiB at once and runs
 * only by name. With --threads the program requests MPI_THREAD_MULTIPLE. A section that exceeds
 * the timeout of --patience ends the program, and every rank prints its section. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "check.h"
#include "section.h"

int self, ranks, quick, thread_level;

static const size_t all_sizes[] = {
    0,    1,     7,     8,     40,    41,    48,    49,      200,           201,     1000,
    4095, 4096,  4097,  8191,  8192,  8193,  16383, 16384,   16385,         65535,   65536,
    65537, 131073, 262144, (1 << 20) + 3, 8 << 20,
};
static const size_t few_sizes[] = {
    0, 1, 8, 41, 49, 200, 4096, 4097, 16385, 65536, 65537, (1 << 20) + 3,
};
const size_t *sizes = all_sizes;
int size_count = sizeof all_sizes / sizeof all_sizes[0];
size_t largest_size;

struct section {
    const char *name;
    void (*run)(void);
};

static const struct section sections[] = {
    {"modes", modes},
    {"late-receivers", late_receivers},
    {"synchronous", synchronous},
    {"exchanges", exchanges},
    {"probes", probes},
    {"any-source", any_source},
    {"any-tag", any_tag},
    {"persistent", persistent},
    {"to-self", to_self},
    {"cancelled", cancelled},
    {"truncated", truncated},
    {"flood", flood},
    {"ordering", ordering},
    {"reversed", reversed},
    {"waiting", waiting},
    {"vectors", vectors},
    {"indexed", indexed},
    {"structs", structs},
    {"subarrays", subarrays},
    {"packed", packed},
    {"rooted", rooted},
    {"all-to-all", all_to_all},
    {"reductions", reductions},
    {"nonblocking", nonblocking},
    {"storm", storm},
    {"splits", splits},
    {"groups", groups},
    {"intercommunicators", intercommunicators},
    {"one-sided-fence", one_sided_fence},
    {"one-sided-lock", one_sided_lock},
    {"one-sided-post", one_sided_post},
    {"threads", threads},
    {"large", large},
    {"huge", huge},
};
enum { SECTIONS = sizeof sections / sizeof sections[0] };

static int wanted[SECTIONS];
static int threads_wanted;
static unsigned patience = 300;
static const char *volatile running = "start";

const char *section_now(void)
{
    return running;
}

void note(const char *text)
{
    if (self == 0)
        printf("  %s\n", text);
}

/* Prints the section of a rank that exceeds the timeout, and exits. */
static void out_of_patience(int number)
{
    char text[160];
    (void)number;
    int length = snprintf(text, sizeof text, "rank %d of %d, section %s: expected its end within %u "
                          "s, found it unfinished\n", self, ranks, running, patience);
    if (write(STDERR_FILENO, text, (size_t)length) < 0)
        _exit(2);
    /* The other ranks get one second to print theirs. */
    sleep(1);
    _exit(1);
}

static int index_of(const char *name)
{
    for (int index = 0; index < SECTIONS; index++)
        if (strcmp(sections[index].name, name) == 0)
            return index;
    return -1;
}

static void list(void)
{
    for (int index = 0; index < SECTIONS; index++)
        printf("%s\n", sections[index].name);
}

static void refuse(const char *word)
{
    fprintf(stderr, "mpi-check: `%s` is neither an option nor a section; --list prints those\n",
            word);
    exit(2);
}

static void read_arguments(int count, char **words)
{
    int named = 0, unwanted[SECTIONS] = {0};
    for (int at = 1; at < count; at++) {
        int index = index_of(words[at]);
        if (index >= 0)
            wanted[index] = named = 1;
        else if (strcmp(words[at], "--quick") == 0)
            quick = 1;
        else if (strcmp(words[at], "--threads") == 0)
            threads_wanted = 1;
        else if (strcmp(words[at], "--patience") == 0 && at + 1 < count)
            patience = (unsigned)atoi(words[++at]);
        else if (strcmp(words[at], "--without") == 0 && at + 1 < count &&
                 (index = index_of(words[at + 1])) >= 0)
            unwanted[index] = 1, at++;
        else if (strcmp(words[at], "--list") == 0) {
            list();
            exit(0);
        } else
            refuse(words[at]);
    }
    for (int index = 0; index < SECTIONS; index++) {
        if (!named)
            wanted[index] = strcmp(sections[index].name, "huge") != 0;
        wanted[index] &= !unwanted[index];
    }
}

static void run_section(const struct section *section)
{
    running = section->name;
    alarm(patience);
    double begin = MPI_Wtime();
    long long before = checks_made, mine, all = 0;
    section->run();
    mine = checks_made - before;
    MUST(MPI_Reduce(&mine, &all, 1, MPI_LONG_LONG, MPI_SUM, 0, MPI_COMM_WORLD));
    MUST(MPI_Barrier(MPI_COMM_WORLD));
    if (self == 0) {
        printf("%-20s %8lld checks %8.2f s\n", section->name, all, MPI_Wtime() - begin);
        fflush(stdout);
    }
}

int main(int count, char **words)
{
    read_arguments(count, words);
    signal(SIGALRM, out_of_patience);
    alarm(patience);
    int asked = threads_wanted ? MPI_THREAD_MULTIPLE : MPI_THREAD_SINGLE;
    MPI_Init_thread(&count, &words, asked, &thread_level);
    MPI_Comm_rank(MPI_COMM_WORLD, &self);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    /* Errors are returned to the caller, which reports them with section and call. */
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    if (quick) {
        sizes = few_sizes;
        size_count = sizeof few_sizes / sizeof few_sizes[0];
    }
    largest_size = sizes[size_count - 1];
    for (int index = 0; index < SECTIONS; index++)
        if (wanted[index])
            run_section(&sections[index]);
    running = "end";
    long long all = 0;
    MUST(MPI_Reduce(&checks_made, &all, 1, MPI_LONG_LONG, MPI_SUM, 0, MPI_COMM_WORLD));
    if (self == 0) {
        printf("all %lld checks passed\n", all);
        fflush(stdout);
    }
    alarm(patience);
    MPI_Finalize();
    return 0;
}
