/* The number of open descriptors of this process. */

#ifndef DESCRIPTORS_H
#define DESCRIPTORS_H

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "pair.h"

static inline int count_descriptors(void) {
    int count = 0;
    DIR *folder = opendir("/proc/self/fd");
    CHECK(folder != NULL);
    while (readdir(folder) != NULL) count++;
    closedir(folder);
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
