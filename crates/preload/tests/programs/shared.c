/* Makes large copies, and tells whether another thread has helped and has ended afterwards. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { BYTES = 8 << 20 };
static char *source, *target;

static int threads(void)
{
    int count = 0;
    DIR *folder = opendir("/proc/self/task");
    for (struct dirent *entry; (entry = readdir(folder)) != NULL;)
        count += entry->d_name[0] != '.';
    closedir(folder);
    return count;
}

static void on_fault(int number)
{
    _exit(number);
}

static void require(int is_right, const char *what)
{
    if (!is_right) {
        printf("%s: %s\n", what, strerror(errno));
        fflush(stdout);
        _exit(1);
    }
}

static int status_of(pid_t child)
{
    int status = -1;
    waitpid(child, &status, 0);
    return status;
}

/* Shares a copy, in a process that has shared none. Returns whether a helper is there still. */
static int share(void)
{
    memcpy(target, source, BYTES);
    return threads() > 1;
}

/* Enters namespaces, which the kernel permits a process with one thread only, at once after shared copies. */
static void enter_namespaces(void)
{
    enum { TURNS = 20, HELPED = 3 };
    pid_t child = fork();
    if (child == 0)
        _exit(unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0);
    if (status_of(child) != 0) {
        puts("no namespaces");
        return;
    }
    int helped = 0;
    for (int turn = 0; turn < TURNS; turn++) {
        child = fork();
        if (child == 0) {
            int is_helped = share();
            require(unshare(CLONE_NEWUSER | CLONE_NEWNS) == 0, "unshare");
            require(threads() == 1, "the helpers after unshare");
            child = fork();
            if (child == 0) {
                is_helped &= share();
                require(setns(open("/proc/self/ns/mnt", O_RDONLY), CLONE_NEWNS) == 0, "setns");
                require(threads() == 1, "the helpers after setns");
                errno = 0;
                require(setns(-1, 0) == -1 && errno == EBADF, "the error of setns");
                _exit(is_helped ? HELPED : 0);
            }
            _exit(WEXITSTATUS(status_of(child)));
        }
        int status = WEXITSTATUS(status_of(child));
        if (status != 0 && status != HELPED)
            exit(status);
        helped += status == HELPED;
    }
    puts(helped > 0 ? "entered" : "no helper was ever there");
}

int main(int count, char **words)
{
    const char *way = count > 1 ? words[1] : "plain";
    source = malloc(BYTES);
    target = malloc(BYTES);
    memset(source, 1, 100);
    if (strcmp(way, "handler") == 0)
        signal(SIGSEGV, on_fault);
    if (strcmp(way, "bound") == 0) {
        cpu_set_t one;
        CPU_ZERO(&one);
        CPU_SET(sched_getcpu(), &one);
        sched_setaffinity(0, sizeof one, &one);
    }
    if (strcmp(way, "namespaces") == 0) {
        enter_namespaces();
        return 0;
    }
    if (strcmp(way, "vfork") == 0) {
        pid_t child = vfork();
        if (child == 0) {
            memcpy(target, source, BYTES);
            _exit(threads() > 1);
        }
        puts(status_of(child) == 0 && threads() == 1 ? "not helped" : "helped");
        return 0;
    }
    memcpy(target, source, BYTES);
    if (threads() == 1) {
        puts("not helped");
        return 0;
    }
    /* A hang, if it never ends. */
    while (threads() > 1)
        usleep(20000);
    puts("helped, alone again");
    return 0;
}
