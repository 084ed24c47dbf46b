/* Makes large copies, and tells whether another thread has helped and has ended afterwards. */
#define _GNU_SOURCE
#include <dirent.h>
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
    if (strcmp(way, "vfork") == 0) {
        pid_t child = vfork();
        if (child == 0) {
            memcpy(target, source, BYTES);
            _exit(threads() > 1);
        }
        int status;
        waitpid(child, &status, 0);
        puts(status == 0 && threads() == 1 ? "not helped" : "helped");
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
