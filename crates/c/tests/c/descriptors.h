/* The number of open descriptors of this process, without that of the page of counters, which the library keeps open
 * for as long as the process lives, so that memferry top finds it. There is at most one. */

#ifndef DESCRIPTORS_H
#define DESCRIPTORS_H

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "pair.h"

static inline int count_descriptors(void) {
    int count = 0, pages = 0;
    DIR *folder = opendir("/proc/self/fd");
    CHECK(folder != NULL);
    for (struct dirent *entry; (entry = readdir(folder)) != NULL;) {
        char target[256];
        ssize_t length = readlinkat(dirfd(folder), entry->d_name, target, sizeof target - 1);
        target[length < 0 ? 0 : length] = 0;
        int is_page = strncmp(target, "/memfd:memferry-stats ", 22) == 0;
        pages += is_page;
        count += !is_page;
    }
    closedir(folder);
    CHECK(pages <= 1);
    return count;
}

static inline void list_descriptors(void) {
    for (int number = 0; number < 1024; number++) {
        char path[64], target[256];
        snprintf(path, sizeof path, "/proc/self/fd/%d", number);
        ssize_t length = readlink(path, target, sizeof target - 1);
        if (length >= 0) fprintf(stderr, "%d: %.*s\n", number, (int)length, target);
    }
}

/* A thread of the library that is exiting may still hold one for a short time. ThreadSanitizer may have started
 * its symbolizer, which holds two pipes: it does so for suppressed reports too. */
static inline void expect_descriptors_at_most(int most) {
    if (getenv("TSAN_OPTIONS") != NULL) most += 2;
    for (int tries = 0; tries < 60000 && count_descriptors() > most; tries++) nap_ms(1);
    if (count_descriptors() > most) list_descriptors();
    CHECK(count_descriptors() <= most);
}

#endif
