/* Errors of links: invalid names, descriptors and cookies, a peer that disconnects at any time,
 * misuse of close, and forks. */

#define _GNU_SOURCE

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/stat.h>

#include "descriptors.h"
#include "pair.h"

enum { LARGE = 5 * 1024 * 1024 };

static unsigned char bytes[4096];

/* Runs `work` in a process of its own, which has not used the library. */
static void alone(void (*work)(void)) {
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        bound_time();
        work();
        exit(0);
    }
    CHECK_IS(ending_of(child), 0);
}

/* A link of a process with itself: one thread accepts, another connects. */
struct both {
    int listener, accepted, connected;
};

static void *accept_one(void *argument) {
    struct both *both = argument;
    both->accepted = adma_accept(both->listener);
    return NULL;
}

static struct both link_to_myself(void) {
    const char *name = fresh_name();
    struct both both = {.listener = adma_listen(name)};
    pthread_t thread;
    CHECK(both.listener >= 0);
    CHECK_IS(pthread_create(&thread, NULL, accept_one, &both), 0);
    both.connected = adma_connect(name);
    CHECK_IS(pthread_join(thread, NULL), 0);
    CHECK(both.accepted >= 0 && both.connected >= 0 && both.accepted != both.connected);
    return both;
}

static void close_both(const struct both *both) {
    CHECK_IS(adma_close(both->connected), 0);
    CHECK_IS(adma_close(both->accepted), 0);
    CHECK_IS(adma_close(both->listener), 0);
}

static void exchange(const struct both *both) {
    unsigned char in[100];
    int64_t read = adma_iread(both->accepted, in, 100);
    CHECK(read >= 0);
    paint(bytes, 100, 1);
    CHECK_IS(adma_write(both->connected, bytes, 100), 0);
    CHECK_IS(adma_wait(read), 0);
    CHECK(is_painted(in, 100, 1));
}

static void names(void) {
    const char *name = fresh_name();
    char longest[300], nowhere[] = "/tmp/adma-no-such-folder/name";
    memset(longest, 'n', sizeof longest);
    longest[sizeof longest - 1] = 0;
    CHECK_IS(adma_connect(name), ADMA_ECONNREFUSED);
    CHECK_SAYS("adma_connect: no process listens on adma-test-");
    int listener = adma_listen(name);
    CHECK(listener >= 0);
    CHECK_IS(adma_listen(name), ADMA_EADDRINUSE);
    CHECK_SAYS("is in use");
    CHECK_IS(adma_close(listener), 0);
    CHECK_IS(adma_connect(name), ADMA_ECONNREFUSED);
    listener = adma_listen(name);
    CHECK(listener >= 0);
    CHECK_IS(adma_close(listener), 0);

    CHECK_IS(adma_listen(NULL), ADMA_EFAULT);
    CHECK_IS(adma_connect(NULL), ADMA_EFAULT);
    CHECK_SAYS("adma_connect: the name is a null pointer");
    CHECK_IS(adma_listen(""), ADMA_EINVAL);
    CHECK_IS(adma_connect(""), ADMA_EINVAL);
    CHECK_IS(adma_listen("\xff\xfe"), ADMA_EINVAL);
    CHECK_IS(adma_listen(longest), ADMA_EADDRNOTAVAIL);
    CHECK_IS(adma_connect(longest), ADMA_EADDRNOTAVAIL);
    CHECK_IS(adma_listen(nowhere), ADMA_EADDRNOTAVAIL);
    CHECK_IS(adma_connect(nowhere), ADMA_ECONNREFUSED);
}

static void a_name_with_a_slash_is_a_file(void) {
    char path[64];
    struct stat found;
    snprintf(path, sizeof path, "/tmp/adma-test-%d", (int)getpid());
    int listener = adma_listen(path);
    CHECK(listener >= 0);
    CHECK_IS(stat(path, &found), 0);
    CHECK(S_ISSOCK(found.st_mode));
    CHECK_IS(adma_listen(path), ADMA_EADDRINUSE);
    CHECK_IS(adma_close(listener), 0);
    CHECK_IS(stat(path, &found), -1);
    CHECK_IS(adma_connect(path), ADMA_ECONNREFUSED);
}

static void a_setting_that_is_none_is_refused(void) {
    CHECK_IS(setenv("MEMFERRY_BACKGROUND", "perhaps", 1), 0);
    CHECK_IS(adma_listen(fresh_name()), ADMA_EDOM);
    CHECK_SAYS("adma_listen: MEMFERRY_BACKGROUND=\"perhaps\" is not valid");
    CHECK_IS(adma_connect(fresh_name()), ADMA_EDOM);
    CHECK_IS(unsetenv("MEMFERRY_BACKGROUND"), 0);
    struct both both = link_to_myself();
    exchange(&both);
    close_both(&both);
}

static void descriptors_that_are_none(void) {
    int pipes[2], set = epoll_create1(0);
    CHECK(pipe(pipes) == 0 && set >= 0);
    int strangers[] = {-1, 0, 9999, pipes[0], pipes[1], set, INT32_MIN, INT32_MAX, ADMA_EPIPE};
    for (unsigned n = 0; n < sizeof strangers / sizeof strangers[0]; n++) {
        int fd = strangers[n];
        CHECK_IS(adma_accept(fd), ADMA_EBADF);
        CHECK_IS(adma_iread(fd, bytes, 1), ADMA_EBADF);
        CHECK_IS(adma_iwrite(fd, bytes, 1), ADMA_EBADF);
        CHECK_IS(adma_read(fd, bytes, 1), ADMA_EBADF);
        CHECK_IS(adma_write(fd, bytes, 1), ADMA_EBADF);
        CHECK_IS(adma_peek(fd), ADMA_EBADF);
        CHECK_IS(adma_close(fd), ADMA_EBADF);
        CHECK_SAYS("adma_close: descriptor");
    }
    struct both both = link_to_myself();
    CHECK_IS(adma_accept(both.connected), ADMA_EBADF);
    CHECK_SAYS("it is a link");
    CHECK_IS(adma_read(both.listener, bytes, 1), ADMA_EBADF);
    CHECK_SAYS("it is a listener");
    int copy = dup(both.connected);
    CHECK_IS(adma_write(copy, bytes, 1), ADMA_EBADF);
    exchange(&both);
    CHECK(fcntl(both.connected, F_GETFD) & FD_CLOEXEC);
    CHECK(fcntl(both.listener, F_GETFD) & FD_CLOEXEC);
    close_both(&both);
    for (int again = 0; again < 2; again++) {
        CHECK_IS(adma_close(both.accepted), ADMA_EBADF);
        CHECK_IS(adma_close(both.listener), ADMA_EBADF);
        CHECK_IS(adma_read(both.connected, bytes, 1), ADMA_EBADF);
        CHECK_IS(adma_accept(both.listener), ADMA_EBADF);
    }
    CHECK_IS(fcntl(both.connected, F_GETFD), -1);
    CHECK_IS(fcntl(pipes[0], F_GETFD), 0);
}

static void memory_that_is_none(void) {
    struct both both = link_to_myself();
    void *last = (void *)(UINTPTR_MAX - 15);
    CHECK_IS(adma_iread(both.connected, NULL, 1), ADMA_EFAULT);
    CHECK_IS(adma_read(both.connected, NULL, 1), ADMA_EFAULT);
    CHECK_IS(adma_iwrite(both.connected, NULL, 1), ADMA_EFAULT);
    CHECK_IS(adma_write(both.connected, NULL, 1), ADMA_EFAULT);
    CHECK_SAYS("adma_write: the memory is a null pointer");
    CHECK_IS(adma_iread(both.connected, last, 64), ADMA_EOVERFLOW);
    CHECK_IS(adma_read(both.connected, last, 64), ADMA_EOVERFLOW);
    CHECK_IS(adma_iwrite(both.connected, last, 64), ADMA_EOVERFLOW);
    CHECK_IS(adma_write(both.connected, bytes, SIZE_MAX), ADMA_EOVERFLOW);
    /* Zero bytes are valid everywhere, and are a message like any other. */
    CHECK_IS(adma_write(both.connected, NULL, 0), 0);
    CHECK_IS(adma_wait(adma_iwrite(both.connected, last, 0)), 0);
    CHECK_IS(adma_read(both.accepted, NULL, 0), 0);
    CHECK_IS(adma_wait(adma_iread(both.accepted, last, 0)), 0);
    exchange(&both);
    close_both(&both);
}

static void cookies_that_are_none(void) {
    unsigned char a = 1, b;
    uint64_t message = 3, buffer = 4;
    struct both both = link_to_myself();
    int64_t copy = adma_icopy(&a, &b, 1), write = adma_iwrite(both.connected, bytes, 10);
    CHECK(copy >= 0 && write >= 0 && copy != write);
    CHECK_IS(adma_check(copy), ADMA_EINVAL);
    CHECK_IS(adma_wait(copy), ADMA_EINVAL);
    CHECK_SAYS("for a copy, use adma_check_copy");
    CHECK_IS(adma_check_copy(write), ADMA_EINVAL);
    CHECK_IS(adma_wait_copy(write), ADMA_EINVAL);
    CHECK_SAYS("use adma_check or adma_wait");
    CHECK_IS(adma_wait_copy(copy), 0);
    CHECK_IS(adma_wait(write), 0);
    CHECK_IS(adma_check(write + 1), ADMA_ENOENT);
    CHECK_IS(adma_wait(write + 1000), ADMA_ENOENT);
    CHECK_IS(adma_result(write + 1), ADMA_ENOENT);
    CHECK_IS(adma_lengths(write + 1, &message, &buffer), ADMA_ENOENT);
    CHECK_IS(adma_check(INT64_MAX), ADMA_ESTALE);
    CHECK_IS(adma_wait(0), ADMA_EINVAL);
    CHECK_IS(adma_check(42), ADMA_EINVAL);
    CHECK_IS(adma_check(-1), ADMA_EBADF);
    CHECK_IS(adma_wait(adma_iread(-1, bytes, 1)), ADMA_EBADF);
    CHECK_IS(adma_result(INT64_MIN), ADMA_EBADF);
    CHECK(message == 3 && buffer == 4);

    /* A read that is in flight, then complete, then of a closed link. */
    int64_t read = adma_iread(both.connected, bytes, 20);
    CHECK_IS(adma_result(read), ADMA_EINPROGRESS);
    CHECK_IS(adma_lengths(read, &message, &buffer), ADMA_EINPROGRESS);
    CHECK_IS(adma_write(both.accepted, bytes, 15), 0);
    CHECK_IS(adma_wait(read), 0);
    CHECK_IS(adma_lengths(read, &message, &buffer), 0);
    CHECK(message == 15 && buffer == 20);
    CHECK_IS(adma_lengths(write, &message, &buffer), 0);
    CHECK(message == 10 && buffer == 10);
    int64_t pending = adma_iread(both.connected, bytes, 20);
    close_both(&both);
    for (int again = 0; again < 2; again++) {
        CHECK_IS(adma_check(read), ADMA_ESTALE);
        CHECK_IS(adma_wait(write), ADMA_ESTALE);
        CHECK_IS(adma_wait(pending), ADMA_ESTALE);
        CHECK_IS(adma_result(read), ADMA_ESTALE);
        CHECK_SAYS("was closed");
        /* The next link does not accept them. */
        both = link_to_myself();
        exchange(&both);
        CHECK_IS(adma_check(read), ADMA_ESTALE);
        CHECK_IS(adma_check(pending), ADMA_ESTALE);
        int64_t next = adma_iwrite(both.connected, bytes, 1);
        CHECK(next != read && next != write && next != pending);
        close_both(&both);
    }
}

static void a_descriptor_closed_by_mistake_is_noticed(void) {
    for (int what = 0; what < 4; what++) {
        struct both both = link_to_myself();
        int64_t cookie = adma_iwrite(both.connected, bytes, 1);
        int64_t waiting = adma_iread(both.accepted, bytes + 1, 1);
        int fd = both.connected, other = -1;
        CHECK_IS(adma_wait(waiting), 0);
        CHECK_IS(close(fd), 0);
        if (what == 1) other = dup2(STDERR_FILENO, fd);
        if (what == 2) CHECK_IS(dup2(epoll_create1(0), fd), fd);
        if (what == 3) CHECK_IS(dup2(both.accepted, fd), fd);
        CHECK(what != 1 || other == fd);
        /* Neither the closed link nor the new owner of its number is accessed. */
        CHECK_IS(adma_write(fd, bytes, 1), ADMA_EBADF);
        CHECK_SAYS("closed outside of this library");
        CHECK_IS(adma_iread(fd, bytes, 1), ADMA_EBADF);
        CHECK_IS(adma_close(fd), ADMA_EBADF);
        CHECK_IS(adma_check(cookie), ADMA_ESTALE);
        CHECK_IS(adma_read(both.accepted, bytes, 1), ADMA_EPIPE);
        CHECK_IS(adma_close(both.accepted), 0);
        if (what > 0) CHECK_IS(close(fd), 0);

        /* The same for the listener. */
        CHECK_IS(close(both.listener), 0);
        CHECK_IS(adma_accept(both.listener), ADMA_EBADF);
    }
}

/* The system reuses a wrongly closed number for another link; the test finds out how many lower
 * numbers must be free for that. */
static void a_number_that_a_new_link_gets_is_that_link(void) {
    enum { HELD = 40 };
    int hits = 0;
    for (int freed = 0; freed < HELD && hits < 2; freed++) {
        int held[HELD];
        for (int n = 0; n < HELD; n++) held[n] = dup(STDERR_FILENO);
        struct both first = link_to_myself();
        exchange(&first);
        CHECK_IS(close(first.connected), 0);
        for (int n = 0; n < freed; n++) close(held[n]);
        struct both second = link_to_myself();
        int hit = second.connected == first.connected || second.accepted == first.connected;
        exchange(&second);
        exchange(&second);
        hits += hit;
        CHECK_IS(hit ? adma_peek(first.accepted) : ADMA_EPIPE, ADMA_EPIPE);
        close_both(&second);
        CHECK_IS(adma_close(first.connected), ADMA_EBADF);
        CHECK_IS(adma_read(first.accepted, bytes, 1), ADMA_EPIPE);
        CHECK_IS(adma_close(first.accepted), 0);
        CHECK_IS(adma_close(first.listener), 0);
        for (int n = freed; n < HELD; n++) close(held[n]);
    }
    CHECK(hits > 0);
}

static void nothing_is_left_behind(void) {
    int before = -1;
    for (int n = 0; n < 40; n++) {
        struct both both = link_to_myself();
        exchange(&both);
        CHECK(adma_iread(both.connected, bytes, 10) >= 0);
        if (n % 2) close_both(&both);
        else CHECK_IS(adma_fini(), 0);
        CHECK_IS(adma_close(both.listener), ADMA_EBADF);
        CHECK_IS(adma_write(both.connected, bytes, 1), ADMA_EBADF);
        if (n == 3) before = count_descriptors();
    }
    expect_descriptors_at_most(before);
}

/* Closing ends the waits of other threads. When everything is closed at once, the peer may be
 * first. A late thread finds no link. */
static struct both shared;
static int by_fini;

static int is_ended(int64_t outcome) {
    return outcome == ADMA_ECANCELED || outcome == ADMA_EBADF || (by_fini && outcome == ADMA_EPIPE);
}

static void *wait_in_read(void *argument) {
    (void)argument;
    unsigned char byte;
    CHECK(is_ended(adma_read(shared.connected, &byte, 1)));
    return NULL;
}

static void *wait_in_wait(void *argument) {
    unsigned char byte;
    int64_t cookie = adma_iread(shared.connected, &byte, 1);
    CHECK(cookie >= 0 || is_ended(cookie));
    CHECK(cookie < 0 || is_ended(adma_wait(cookie)));
    (void)argument;
    return NULL;
}

static void *wait_in_accept(void *argument) {
    (void)argument;
    CHECK(is_ended(adma_accept(shared.listener)));
    return NULL;
}

static void closing_ends_what_others_wait_for(void) {
    void *(*deeds[])(void *) = {wait_in_read, wait_in_wait, wait_in_accept};
    for (by_fini = 0; by_fini < 2; by_fini++) {
        for (long nap = 20; nap < 250; nap += 200) {
            pthread_t threads[3];
            shared = link_to_myself();
            for (int n = 0; n < 3; n++)
                CHECK_IS(pthread_create(&threads[n], NULL, deeds[n], NULL), 0);
            nap_ms(nap);
            if (by_fini) CHECK_IS(adma_fini(), 0);
            else close_both(&shared);
            for (int n = 0; n < 3; n++) CHECK_IS(pthread_join(threads[n], NULL), 0);
            CHECK_IS(adma_close(shared.connected), ADMA_EBADF);
        }
    }
}

/* The peer is killed in the middle of messages. */
static void wait_for_the_killed(struct side *side) {
    CHECK_IS(hear(side), 'k');
    unsigned char *large = take(LARGE);
    int64_t read = adma_iread(side->fd, large, LARGE), write = adma_iwrite(side->fd, large, LARGE);
    CHECK(read == ADMA_EPIPE || adma_wait(read) == ADMA_EPIPE);
    CHECK_SAYS("disconnected: its process has exited");
    /* It may have been read before. */
    int written = write >= 0 ? adma_wait(write) : (int)write;
    CHECK(written == 0 || written == ADMA_EPIPE);
    CHECK_IS(adma_write(side->fd, large, 1), ADMA_EPIPE);
    CHECK_IS(adma_read(side->fd, large, 1), ADMA_EPIPE);
    CHECK_IS(adma_iwrite(side->fd, large, LARGE), ADMA_EPIPE);
    if (read >= 0) CHECK_IS(adma_check(read), ADMA_EPIPE);
    CHECK_IS(adma_close(side->fd), 0);
    free(large);
}

static void be_killed(struct side *side) {
    tell(side, 'k');
    nap_ms(50);
    raise(SIGKILL);
}

static void be_killed_in_a_read(struct side *side) {
    unsigned char *large = take(LARGE);
    /* A message that was fetched in part is not complete at the peer. */
    CHECK(adma_iread(side->fd, large, LARGE) >= 0);
    tell(side, 'k');
    nap_ms(50);
    raise(SIGKILL);
}

/* Large messages are in flight in both directions when the peer disconnects. */
static void stream_until_the_end(struct side *side) {
    enum { WINDOW = 4 };
    unsigned char *out = take(LARGE), *in = take(LARGE);
    int64_t cookies[2 * WINDOW] = {0};
    int gone = 0;
    for (unsigned n = 0; !gone; n = (n + 1) % WINDOW) {
        for (int which = 0; which < 2; which++) {
            int64_t *cookie = &cookies[2 * n + (unsigned)which];
            int state = *cookie > 0 ? adma_wait(*cookie) : 0;
            CHECK(state == 0 || state == ADMA_EPIPE);
            *cookie = which ? adma_iread(side->fd, in, LARGE) : adma_iwrite(side->fd, out, LARGE);
            gone |= state == ADMA_EPIPE || *cookie == ADMA_EPIPE;
            CHECK(*cookie >= 0 || *cookie == ADMA_EPIPE);
        }
    }
    for (int n = 0; n < 2 * WINDOW; n++) {
        int state = cookies[n] > 0 ? adma_wait(cookies[n]) : 0;
        CHECK(state == 0 || state == ADMA_EPIPE);
    }
    CHECK_IS(adma_close(side->fd), 0);
    free(out);
    free(in);
}

static void *kill_soon(void *argument) {
    nap_ms(40 + (long)getpid() % 7);
    raise(SIGKILL);
    return argument;
}

static void stream_and_be_killed(struct side *side) {
    pthread_t thread;
    CHECK_IS(pthread_create(&thread, NULL, kill_soon, NULL), 0);
    stream_until_the_end(side);
}

/* What was written before the peer disconnected can be read afterwards. */
static void read_what_was_left(struct side *side) {
    CHECK_IS(hear(side), 'c');
    nap_ms(100);
    for (unsigned n = 0; n < 10; n++) {
        CHECK_IS(adma_read(side->fd, bytes, sizeof bytes), 100 * n);
        CHECK(is_painted(bytes, 100 * n, n));
    }
    CHECK_IS(adma_read(side->fd, bytes, sizeof bytes), ADMA_EPIPE);
}

static void write_and_leave(struct side *side) {
    for (unsigned n = 0; n < 10; n++) {
        paint(bytes, 100 * n, n);
        CHECK_IS(adma_write(side->fd, bytes, 100 * n), 0);
    }
    tell(side, 'c');
}

static void write_and_close(struct side *side) {
    write_and_leave(side);
    CHECK_IS(adma_close(side->fd), 0);
    nap_ms(300);
}

/* A forked child has its parent's descriptors, but not its links. */
static void a_child_cannot_use_the_links_of_its_parent(void) {
    struct both both = link_to_myself();
    unsigned char in[10];
    exchange(&both);
    int64_t cookie = adma_iread(both.accepted, in, 10);
    CHECK(cookie >= 0);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        bound_time();
        for (int again = 0; again < 2; again++) {
            CHECK_IS(adma_check(cookie), ADMA_ECHILD);
            CHECK_IS(adma_wait(cookie), ADMA_ECHILD);
            CHECK_IS(adma_result(cookie), ADMA_ECHILD);
            CHECK_IS(adma_read(both.connected, bytes, 1), ADMA_ECHILD);
            CHECK_IS(adma_iwrite(both.connected, bytes, 1), ADMA_ECHILD);
            CHECK_IS(adma_accept(both.listener), ADMA_ECHILD);
            CHECK_IS(adma_close(both.connected), ADMA_ECHILD);
            CHECK_SAYS("before a fork");
            /* It may open links of its own. */
            struct both own = link_to_myself();
            exchange(&own);
            int64_t next = adma_iwrite(own.connected, bytes, 1);
            CHECK(next >= 0 && next != cookie);
            CHECK_IS(adma_wait(next), 0);
            close_both(&own);
            CHECK_IS(adma_wait(next), ADMA_ESTALE);
            CHECK_IS(adma_fini(), 0);
        }
        CHECK_IS(close(both.connected), 0);
        CHECK_IS(adma_close(both.connected), ADMA_EBADF);
        exit(0);
    }
    CHECK_IS(ending_of(child), 0);
    CHECK_IS(adma_check(cookie), 0);
    CHECK_IS(adma_write(both.connected, bytes, 10), 0);
    CHECK_IS(adma_wait(cookie), 0);
    exchange(&both);
    close_both(&both);
}

/* Opening and closing on many threads at once. */
static void *keep_linking(void *argument) {
    for (int n = 0; n < 15; n++) {
        char name[64];
        snprintf(name, sizeof name, "adma-%d-%ld-%d", (int)getpid(), (long)(intptr_t)argument, n);
        struct both both = {.listener = adma_listen(name)};
        pthread_t thread;
        CHECK(both.listener >= 0);
        CHECK_IS(pthread_create(&thread, NULL, accept_one, &both), 0);
        both.connected = adma_connect(name);
        CHECK_IS(pthread_join(thread, NULL), 0);
        CHECK(both.accepted >= 0 && both.connected >= 0);
        unsigned char in[9], out[9] = "abcdefgh";
        CHECK_IS(adma_write(both.connected, out, 9), 0);
        CHECK_IS(adma_read(both.accepted, in, 9), 9);
        CHECK(memcmp(in, out, 9) == 0);
        close_both(&both);
    }
    return NULL;
}

static void many_threads_open_and_close_links(void) {
    enum { THREADS = 4 };
    pthread_t threads[THREADS];
    for (long n = 0; n < THREADS; n++)
        CHECK_IS(pthread_create(&threads[n], NULL, keep_linking, (void *)(intptr_t)n), 0);
    for (int n = 0; n < THREADS; n++) CHECK_IS(pthread_join(threads[n], NULL), 0);
}

int main(void) {
    bound_time();
    alone(names);
    alone(a_name_with_a_slash_is_a_file);
    alone(a_setting_that_is_none_is_refused);
    alone(descriptors_that_are_none);
    alone(memory_that_is_none);
    alone(cookies_that_are_none);
    alone(a_descriptor_closed_by_mistake_is_noticed);
    alone(a_number_that_a_new_link_gets_is_that_link);
    alone(nothing_is_left_behind);
    alone(closing_ends_what_others_wait_for);
    alone(a_child_cannot_use_the_links_of_its_parent);
    alone(many_threads_open_and_close_links);
    for (int n = 0; n < 3; n++) {
        CHECK_IS(between_ending(wait_for_the_killed, be_killed), SIGKILL);
        CHECK_IS(between_ending(wait_for_the_killed, be_killed_in_a_read), SIGKILL);
        CHECK_IS(between_ending(stream_until_the_end, stream_and_be_killed), SIGKILL);
    }
    both_ways(read_what_was_left, write_and_leave);
    both_ways(read_what_was_left, write_and_close);
    return 0;
}
