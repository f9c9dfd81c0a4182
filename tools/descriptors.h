/* descriptors.h: what a program does first: nothing that it opens is descriptor 0, 1 or 2. */
#ifndef DESCRIPTORS_H
#define DESCRIPTORS_H

#include <fcntl.h>
#include <unistd.h>

/* Open /dev/null in place of each of the descriptors 0, 1 and 2 that is closed: otherwise a file that is opened
 * later, also by fopen or by another library, would get its number, and what is printed would go into it. */
static inline void take_descriptors(void)
{
    int file;
    while ((file = open("/dev/null", O_RDWR)) >= 0 && file <= 2) continue;
    if (file > 2) close(file);
}

#endif /* DESCRIPTORS_H */
