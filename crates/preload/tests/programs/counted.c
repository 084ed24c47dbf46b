/* Makes a known number of calls of unusual sizes, in threads and in children that end in several ways. */
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static uint8_t memory[1 << 21];

__attribute__((noinline)) void copy_often(long times)
{
    for (long turn = 0; turn < times; turn++)
        memcpy(memory + (1 << 20), memory + turn % 7, 700000);
}

__attribute__((noinline)) void fill_often(long times)
{
    for (long turn = 0; turn < times; turn++)
        memset(memory, (int)turn, 20);
}

static void *in_thread(void *nothing)
{
    copy_often(50);
    fill_often(100000);
    return nothing;
}

int main(int count, char **words)
{
    pthread_t threads[4];
    for (int index = 0; index < 4; index++)
        pthread_create(&threads[index], NULL, in_thread, NULL);
    for (int index = 0; index < 4; index++)
        pthread_join(threads[index], NULL);
    for (int index = 0; index < 3; index++) {
        pid_t child = fork();
        if (child == 0) {
            copy_often(50);
            fill_often(100000);
            if (index == 0)
                _exit(0);
            if (index == 1)
                raise(SIGKILL);
            exit(0);
        }
        waitpid(child, NULL, 0);
    }
    copy_often(50);
    fill_often(100000);
    return count > 1 ? atoi(words[1]) : 0;
}
