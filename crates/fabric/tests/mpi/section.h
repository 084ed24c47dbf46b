/* The interface between the sections and the program that runs them. */
#ifndef MEMFERRY_MPI_SECTION_H
#define MEMFERRY_MPI_SECTION_H

/* The name of the running section, for error messages. */
const char *section_now(void);

#endif
