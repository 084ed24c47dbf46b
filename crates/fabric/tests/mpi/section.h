/* Between the sections and the program that runs them. */
#ifndef MEMFERRY_MPI_SECTION_H
#define MEMFERRY_MPI_SECTION_H

/* The name of the section that runs, for complaints. */
const char *section_now(void);

#endif
