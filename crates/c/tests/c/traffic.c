/* Traffic with kills: randomly linked processes send each other messages of 0 to 8 MiB and access each
 * other's windows, while one after the other is killed and restarted. Every byte is from a seeded
 * generator, and every message is checked against its number: no byte is wrong, no message follows a
 * lost one, and the process that survives the run has no more resources at the end than at the start.
 *
 * Some processes may lie: they write random bytes over the memory that they share with others. A link
 * with one of them is expected only to return from its calls; all other links must work. A lying
 * process may be corrupted itself: its peers write to the addresses that it sends.
 *
 *     traffic [KILLS [SEED [PROCESSES [LIARS]]]]
 */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/uio.h>

#include "descriptors.h"

enum {
    MOST_PROCESSES = 16,
    MOST_LINKS = 6,
    MOST_OPERATIONS = 4,
    WINDOW_BYTES = 192 << 10,
    SLACK = 64,
};

/* Shared by all processes of a run. */
struct common {
    _Atomic int generation[MOST_PROCESSES];
    _Atomic int is_over;
    struct counts {
        _Atomic uint64_t messages, bytes, accesses, ends, links, scribbles, slowest_ns;
    } counts[MOST_PROCESSES];
};

static struct common *common;
static struct counts *counts;
static int own, processes, liars, run;
static uint64_t state;
/* Calls for links with lying processes have no time limit. */
static int is_timed = 1;

/* The last ones lie. */
static int is_liar(int process) { return process >= processes - liars; }

static uint64_t mix(uint64_t bits) {
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9u;
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EBu;
    return bits ^ (bits >> 31);
}

static uint64_t chance(uint64_t below) { return mix(state += 0x9E3779B97F4A7C15u) % below; }

/* The bytes of a seed, from an offset that is a multiple of eight. */
static void generate(unsigned char *bytes, size_t length, uint64_t seed) {
    for (size_t at = 0; at < length; at += 8) {
        uint64_t word = mix(seed + at);
        memcpy(bytes + at, &word, length - at < 8 ? length - at : 8);
    }
}

static int is_generated(const unsigned char *bytes, size_t length, uint64_t seed) {
    for (size_t at = 0; at < length; at += 8) {
        uint64_t word = mix(seed + at);
        if (memcmp(bytes + at, &word, length - at < 8 ? length - at : 8) != 0) return 0;
    }
    return 1;
}

/* The message of a direction of a link with a number: both sides compute it. */
static uint64_t message_seed(uint64_t link, int from_dialer, uint64_t number) {
    return mix(link ^ mix(number * 2 + (uint64_t)from_dialer));
}

static size_t message_length(uint64_t seed) {
    static const size_t most[8] = {64, 64, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 8 << 20};
    uint64_t bits = mix(seed ^ 1);
    return (size_t)((bits >> 8) % (most[bits & 7] + 1));
}

/* A signal ends the process if a call hangs. A run may take longer than any call. */
static void bound_calls(void) { alarm(300); }

static uint64_t now_ns(void) { return (uint64_t)(now_ms(CLOCK_MONOTONIC) * 1e6); }

/* A call, and how long it took. */
#define TIMED(into, call)                                                                          \
    do {                                                                                           \
        uint64_t began_ = now_ns();                                                                \
        (into) = (call);                                                                           \
        uint64_t took_ = now_ns() - began_;                                                        \
        if (is_timed && took_ > counts->slowest_ns) counts->slowest_ns = took_;                                \
    } while (0)

struct operation {
    int64_t cookie;
    unsigned char *memory, *start;
    size_t length, room;
    uint64_t number;
    int is_read, is_open;
};

struct link {
    int fd, is_dialer, peer, generation, is_lying;
    /* 0 until it is known. */
    uint64_t seed;
    uint64_t sent, received;
    /* A read has failed: no read that is started later may succeed. */
    int is_cut;
    struct operation operations[MOST_OPERATIONS];
    unsigned char *window;
    int64_t exposed, remote;
    struct adma_window handle, other_handle;
    uint64_t puts;
    int is_gone;
};

static struct link links[MOST_LINKS];

/* A name to connect to: lying processes have names of their own. */
static struct door {
    int listener, for_liars;
} doors[2];

/* The process that connected through it. */
struct arrival {
    int fd, is_lying;
};
static int accepted[2];

/* The codes that a call may return after the peer was killed; any code, if the peer lies. */
static int is_an_end(const struct link *link, int64_t code) {
    if (link->is_lying) return code < 0 && code != ADMA_ENOTRECOVERABLE;
    return code == ADMA_EPIPE || code == ADMA_ESTALE || code == ADMA_ENXIO || code == ADMA_ECANCELED;
}

/* Checks that hold only for links between processes that do not lie. */
#define CHECK_LINK(link, condition) CHECK((link)->is_lying || (condition))

/* A lying process may have overwritten the flag that it still writes to memory: such memory is
 * quarantined for some time. */
static void give_back(const struct link *link, unsigned char *memory) {
    static unsigned char *kept[64];
    static unsigned at;
    if (link->is_lying) {
        unsigned char *newest = memory;
        memory = kept[at];
        kept[at] = newest;
        at = (at + 1) % 64;
    }
    free(memory);
}

static void name_of(char *name, size_t room, int process, int generation, int for_liars) {
    snprintf(name, room, "adma-traffic-%d-%d-%d%s", run, process, generation, for_liars ? "-liars" : "");
}

static uint64_t window_seed(const struct link *link, int of_dialer) {
    return mix(link->seed ^ (of_dialer ? 0xD1A1 : 0xACCE));
}

/* The peer has disconnected, or this process exits: everything of the link is closed. */
static void end_link(struct link *link) {
    int code;
    if (link->is_cut && !link->is_lying) {
        static unsigned char byte[64];
        int64_t length;
        TIMED(length, adma_read(link->fd, byte, sizeof byte));
        CHECK(is_an_end(link, length));
    }
    if (link->exposed >= 0) {
        /* Busy: the peer was not scheduled for a second, in the middle of a put. */
        do TIMED(code, adma_withdraw(link->exposed));
        while (code == ADMA_EBUSY);
        CHECK(code == 0 || is_an_end(link, code));
        CHECK_LINK(link, is_generated(link->window, WINDOW_BYTES / 2, window_seed(link, link->is_dialer)));
        memset(link->window, 0x55, WINDOW_BYTES);
    }
    TIMED(code, adma_close(link->fd));
    CHECK(code == 0 || code == ADMA_EBUSY || is_an_end(link, code));
    for (int n = 0; code == ADMA_EBUSY && n < MOST_OPERATIONS; n++)
        while (link->operations[n].is_open && adma_check(link->operations[n].cookie) == 0) nap_ms(1);
    for (size_t at = 0; link->exposed >= 0 && at < WINDOW_BYTES; at++) CHECK_LINK(link, link->window[at] == 0x55);
    for (int n = 0; n < MOST_OPERATIONS; n++)
        if (link->operations[n].is_open) give_back(link, link->operations[n].memory);
    give_back(link, link->window);
    link->fd = -1;
    counts->ends++;
}

static struct link *open_link(int fd, int is_dialer, int is_lying) {
    for (int n = 0; n < MOST_LINKS; n++) {
        struct link *link = &links[n];
        if (link->fd >= 0) continue;
        memset(link, 0, sizeof *link);
        link->fd = fd;
        link->is_dialer = is_dialer;
        link->peer = -1;
        link->is_lying = is_lying;
        link->exposed = link->remote = -1;
        counts->links++;
        return link;
    }
    int code = adma_close(fd);
    CHECK(code == 0 || is_lying);
    return NULL;
}

/* Both sides know the seed: the first message of each is the handle of a window. */
static void greet(struct link *link) {
    link->window = take(WINDOW_BYTES);
    generate(link->window, WINDOW_BYTES, window_seed(link, link->is_dialer));
    int rights = link->is_lying ? ADMA_READ : ADMA_READ | ADMA_WRITE;
    link->exposed = adma_expose(link->fd, link->window, WINDOW_BYTES, rights, &link->handle);
    CHECK(link->exposed >= 0 || is_an_end(link, link->exposed));
    link->is_gone = link->exposed < 0;
}

static void dial(void) {
    int peer = (int)chance((uint64_t)processes), generation = common->generation[peer];
    char name[96];
    int64_t fd;
    if (peer == own) return;
    int is_lying = is_liar(own) || is_liar(peer);
    is_timed = !is_lying;
    name_of(name, sizeof name, peer, generation, is_liar(own));
    TIMED(fd, adma_connect(name));
    if (fd < 0) return;
    struct link *link = open_link((int)fd, 1, is_lying);
    if (link == NULL) return;
    link->peer = peer;
    link->generation = generation;
    link->seed = mix(state ^ (uint64_t)(own * 1000003 + common->generation[own])) | 1;
    int code;
    TIMED(code, adma_write(link->fd, &link->seed, sizeof link->seed));
    CHECK(code == 0 || is_an_end(link, code));
    if (code != 0) link->is_gone = 1;
    else greet(link);
}

static void begin(struct link *link, int is_read) {
    struct operation *operation = NULL;
    for (int n = 0; n < MOST_OPERATIONS && operation == NULL; n++)
        if (!link->operations[n].is_open) operation = &link->operations[n];
    if (operation == NULL) return;
    uint64_t number = is_read ? link->received : link->sent;
    uint64_t seed = message_seed(link->seed, link->is_dialer != is_read, number);
    size_t length = number == 0 ? sizeof(struct adma_window) : message_length(seed);
    size_t offset = (size_t)chance(SLACK), room = length;
    if (is_read && chance(4) == 0) room += (size_t)chance(SLACK);
    *operation = (struct operation){.length = length, .room = room, .number = number, .is_read = is_read};
    operation->memory = take(room + 2 * SLACK);
    operation->start = operation->memory + offset;
    if (is_read) {
        memset(operation->memory, 0xA5, room + 2 * SLACK);
        TIMED(operation->cookie, adma_iread(link->fd, operation->start, room));
    } else {
        if (number == 0) memcpy(operation->start, &link->handle, length);
        else generate(operation->start, length, seed);
        TIMED(operation->cookie, adma_iwrite(link->fd, operation->start, length));
    }
    if (operation->cookie < 0) {
        CHECK(is_an_end(link, operation->cookie));
        link->is_gone = 1;
        give_back(link, operation->memory);
        return;
    }
    operation->is_open = 1;
    if (is_read) link->received++;
    else link->sent++;
}

/* A read or write is complete: with the expected data, or because the peer has disconnected. */
static void settle(struct link *link, struct operation *operation, int code) {
    uint64_t seed = message_seed(link->seed, link->is_dialer != operation->is_read, operation->number);
    operation->is_open = 0;
    if (code < 0) {
        CHECK(is_an_end(link, code));
        link->is_gone = 1;
        link->is_cut |= operation->is_read;
    } else if (operation->is_read) {
        CHECK_LINK(link, adma_result(operation->cookie) == (int64_t)operation->length);
        if (operation->number == 0) memcpy(&link->other_handle, operation->start, operation->length);
        else CHECK_LINK(link, is_generated(operation->start, operation->length, seed));
        for (unsigned char *at = operation->memory; at < operation->start; at++) CHECK(*at == 0xA5);
        /* No byte after the memory is written, whatever the peer claims. */
        size_t end = operation->memory + operation->room + 2 * SLACK - operation->start;
        for (size_t at = link->is_lying ? operation->room : operation->length; at < end; at++)
            CHECK(operation->start[at] == 0xA5);
        counts->messages++;
        counts->bytes += operation->length;
        if (operation->number == 0) {
            TIMED(link->remote, adma_attach(link->fd, &link->other_handle));
            /* Not accessible: MEMFERRY_CMA=off. */
            CHECK(link->remote >= 0 || is_an_end(link, link->remote) || link->remote == ADMA_EHOSTUNREACH);
        }
    } else if (operation->number != 0) {
        CHECK(is_liar(own) || is_generated(operation->start, operation->length, seed));
    }
    give_back(link, operation->memory);
}

/* Checks one operation, or waits for it where it must complete soon. */
static void look(struct link *link, struct operation *operation) {
    int is_dead = link->peer >= 0 && common->generation[link->peer] != link->generation;
    int code;
    if (is_dead && chance(2) == 0) {
        TIMED(code, adma_wait(operation->cookie));
        settle(link, operation, code == 0 ? 1 : code);
        return;
    }
    TIMED(code, adma_check(operation->cookie));
    if (code == 0) return;
    if (code == 1 && chance(4) == 0) CHECK_IS(adma_wait(operation->cookie), 0);
    settle(link, operation, code);
}

/* Accesses the window of the peer. Its first half is never written, the second by this side
 * alone. */
static void reach(struct link *link) {
    static unsigned char memory[WINDOW_BYTES / 2];
    int code;
    if (link->remote < 0) return;
    if (chance(2) == 0) {
        TIMED(code, adma_get(link->remote, 0, memory, sizeof memory));
        if (code == 0) CHECK_LINK(link, is_generated(memory, sizeof memory, window_seed(link, !link->is_dialer)));
    } else {
        uint64_t seed = mix(link->seed ^ ++link->puts);
        generate(memory, sizeof memory, seed);
        TIMED(code, adma_put(link->remote, sizeof memory, memory, sizeof memory));
        if (code == 0) TIMED(code, adma_get(link->remote, sizeof memory, memory, sizeof memory));
        if (code == 0) CHECK_LINK(link, is_generated(memory, sizeof memory, seed));
    }
    CHECK(code == 0 || is_an_end(link, code));
    if (code != 0) link->is_gone = 1;
    counts->accesses++;
}

/* One step of a link. */
static void turn(struct link *link) {
    struct operation *operations = link->operations;
    is_timed = !link->is_lying;
    /* A wait for something that never arrives is bounded. */
    if (link->is_lying && chance(512) == 0) link->is_gone = 1;
    if (link->seed == 0) {
        /* The first eight bytes of the connected process. */
        uint64_t seed;
        int64_t length;
        TIMED(length, adma_peek(link->fd));
        if (length == ADMA_ENOMSG && !link->is_gone) return;
        if (length >= 0) TIMED(length, adma_read(link->fd, &seed, sizeof seed));
        if (length < 0) {
            CHECK(is_an_end(link, length));
            end_link(link);
            return;
        }
        CHECK_LINK(link, length == (int64_t)sizeof seed);
        link->seed = seed | 1;
        greet(link);
        return;
    }
    for (int n = 0; n < MOST_OPERATIONS; n++)
        if (operations[n].is_open) look(link, &operations[n]);
    int is_open = 0;
    for (int n = 0; n < MOST_OPERATIONS; n++) is_open |= operations[n].is_open;
    if (link->is_gone || common->is_over || (link->sent > 40 && chance(64) == 0)) {
        /* Either after everything is complete, or in the middle of it. */
        if (!is_open || link->is_gone || common->is_over || chance(8) == 0) end_link(link);
        return;
    }
    int reads = 0, writes = 0;
    for (int n = 0; n < MOST_OPERATIONS; n++)
        if (operations[n].is_open) *(operations[n].is_read ? &reads : &writes) += 1;
    if (reads < MOST_OPERATIONS / 2) begin(link, 1);
    if (writes < MOST_OPERATIONS / 2 && !link->is_gone) begin(link, 0);
    if (!link->is_gone && chance(8) == 0) reach(link);
}

static void *accept_all(void *door_pointer) {
    const struct door *door = door_pointer;
    for (;;) {
        struct arrival arrival = {adma_accept(door->listener), door->for_liars || is_liar(own)};
        if (arrival.fd == ADMA_ECANCELED || arrival.fd == ADMA_EBADF) return NULL;
        if (arrival.fd >= 0) CHECK_IS(write(accepted[1], &arrival, sizeof arrival), sizeof arrival);
    }
}

/* Writes over a part of the memory that this process shares with another. It may be unmapped
 * meanwhile: then the kernel writes nothing. */
static void scribble(void) {
    FILE *maps = fopen("/proc/self/maps", "r");
    char line[512];
    unsigned long long from, to, start = 0, length = 0;
    uint64_t found = 0;
    CHECK(maps != NULL);
    while (fgets(line, sizeof line, maps) != NULL) {
        if (strstr(line, "memfd:memferry-connection") == NULL || sscanf(line, "%llx-%llx", &from, &to) != 2) continue;
        if (chance(++found) == 0) start = from, length = to - from;
    }
    fclose(maps);
    if (found == 0) return;
    static uint64_t words[1024];
    size_t place = chance(length / 8) * 8, bytes = (size_t)8 << chance(11);
    /* Not beyond its end. */
    if (bytes > length - place) bytes = length - place;
    for (size_t at = 0; at < bytes / 8; at++) words[at] = chance(3) == 0 ? chance(64) : mix(state + at);
    struct iovec source = {words, bytes};
    struct iovec target = {(void *)(start + place), bytes};
    if (process_vm_writev(getpid(), &source, 1, &target, 1, 0) > 0) counts->scribbles++;
}

/* Under a sanitizer: its reports about a lying process are of no interest. */
extern void __sanitizer_set_report_path(const char *path) __attribute__((weak));

/* The life of one process. */
static void work(int generation) {
    pthread_t acceptors[2];
    char name[96];
    struct arrival arrival;
    int before = count_descriptors();
    if (is_liar(own) && __sanitizer_set_report_path != NULL) __sanitizer_set_report_path("/dev/null");
    for (int n = 0; n < MOST_LINKS; n++) links[n].fd = -1;
    CHECK(pipe2(accepted, O_NONBLOCK | O_CLOEXEC) == 0);
    for (int n = 0; n < 2; n++) {
        name_of(name, sizeof name, own, generation, n);
        doors[n] = (struct door){adma_listen(name), n};
        CHECK(doors[n].listener >= 0);
        CHECK_IS(pthread_create(&acceptors[n], NULL, accept_all, &doors[n]), 0);
    }
    while (!common->is_over) {
        bound_calls();
        while (read(accepted[0], &arrival, sizeof arrival) == (ssize_t)sizeof arrival)
            open_link(arrival.fd, 0, arrival.is_lying);
        if (chance(32) == 0) dial();
        int count = 0;
        for (int n = 0; n < MOST_LINKS; n++) {
            if (links[n].fd < 0) continue;
            turn(&links[n]);
            count++;
        }
        if (is_liar(own) && chance(16) == 0) scribble();
        if (count == 0) nap_ms(1);
        /* Exits with the process that would kill it. */
        if (getppid() != run) exit(0);
    }
    /* Others wait until it has exited. */
    if (is_liar(own)) _exit(0);
    bound_calls();
    for (int n = 0; n < 2; n++) {
        CHECK_IS(adma_close(doors[n].listener), 0);
        CHECK_IS(pthread_join(acceptors[n], NULL), 0);
    }
    while (read(accepted[0], &arrival, sizeof arrival) == (ssize_t)sizeof arrival) {
        int code = adma_close(arrival.fd);
        CHECK(code == 0 || arrival.is_lying);
    }
    for (int n = 0; n < MOST_LINKS; n++)
        if (links[n].fd >= 0) end_link(&links[n]);
    close(accepted[0]);
    close(accepted[1]);
    int code;
    while ((code = adma_fini()) == ADMA_EBUSY) nap_ms(1);
    CHECK_IS(code, 0);
    expect_descriptors_at_most(before);
    exit(0);
}

static pid_t spawn(int process, uint64_t seed) {
    int generation = ++common->generation[process];
    pid_t child = fork();
    CHECK(child >= 0);
    if (child > 0) return child;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != run) exit(0);
    own = process;
    counts = &common->counts[process];
    state = mix(seed ^ (uint64_t)(process * 1000003 + generation));
    work(generation);
    return 0;
}

int main(int count, char **arguments) {
    uint64_t kills = count > 1 ? strtoull(arguments[1], NULL, 10) : 200;
    uint64_t seed = count > 2 ? strtoull(arguments[2], NULL, 10) : now_ns();
    processes = count > 3 ? atoi(arguments[3]) : 4;
    liars = count > 4 ? atoi(arguments[4]) : 0;
    CHECK(processes > 1 && processes <= MOST_PROCESSES && liars < processes);
    run = getpid();
    state = seed;
    fprintf(stderr, "seed %llu\n", (unsigned long long)seed);
    common = mmap(NULL, sizeof *common, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(common != MAP_FAILED);
    pid_t children[MOST_PROCESSES];
    for (int n = 0; n < processes; n++) children[n] = spawn(n, seed);
    for (uint64_t kill_number = 1; kill_number <= kills; kill_number++) {
        bound_calls();
        nap_ms((long)(20 + chance(181)));
        /* The first one stays alive, and sees all others exit. */
        int victim = 1 + (int)chance((uint64_t)processes - 1), status;
        for (int n = 0; n < processes; n++) {
            pid_t ended = waitpid(children[n], &status, WNOHANG);
            /* Peers write to the address that a lying process sends: it may be its own heap. */
            if (ended != 0 && is_liar(n)) children[n] = spawn(n, seed);
            else CHECK_IS(ended, 0);
        }
        CHECK_IS(kill(children[victim], SIGKILL), 0);
        int ending = ending_of(children[victim]);
        CHECK(ending == SIGKILL || is_liar(victim));
        children[victim] = spawn(victim, seed);
        if (kill_number % 100 == 0) {
            printf("%llu kills\n", (unsigned long long)kill_number);
            fflush(stdout);
        }
    }
    bound_calls();
    common->is_over = 1;
    for (int n = 0; n < processes; n++) {
        int ending = ending_of(children[n]);
        CHECK(ending == 0 || is_liar(n));
    }
    uint64_t messages = 0, bytes = 0, accesses = 0, slowest = 0, ends = 0, scribbles = 0;
    for (int n = 0; n < processes; n++) {
        struct counts *of = &common->counts[n];
        messages += of->messages;
        bytes += of->bytes;
        accesses += of->accesses;
        ends += of->ends;
        scribbles += of->scribbles;
        if (of->slowest_ns > slowest) slowest = of->slowest_ns;
    }
    printf("row\tkills in traffic\t%llu\t%llu messages, %llu MB, %llu accesses, %llu ends of links; the slowest call "
           "took %.1f ms\n",
           (unsigned long long)kills, (unsigned long long)messages, (unsigned long long)(bytes / 1000000),
           (unsigned long long)accesses, (unsigned long long)ends, (double)slowest / 1e6);
    CHECK(liars == 0 || scribbles > 0);
    if (liars > 0) printf("row\tscribbles over rings in traffic\t%llu\t\n", (unsigned long long)scribbles);
    return 0;
}
