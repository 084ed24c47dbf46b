/* How many descriptors this process has open. */

#ifndef DESCRIPTORS_H
#define DESCRIPTORS_H

#include <dirent.h>

#include "pair.h"

static inline int count_descriptors(void) {
    int count = 0;
    DIR *folder = opendir("/proc/self/fd");
    CHECK(folder != NULL);
    while (readdir(folder) != NULL) count++;
    closedir(folder);
    return count;
}

/* A thread of the library that is about to end may hold on to one for a moment. */
static inline void expect_descriptors_at_most(int most) {
    for (int tries = 0; tries < 60000 && count_descriptors() > most; tries++) nap_ms(1);
    CHECK(count_descriptors() <= most);
}

#endif
