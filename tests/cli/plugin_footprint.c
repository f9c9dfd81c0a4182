/* plugin_footprint.c: examples/hosts/plugin/host.c several times, and what the process holds before
 * the second time and after the last. The first time loads what then stays: libraries, stacks and
 * arenas of the C library. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1
#endif
#include "footprint.h"

#define main host_main
#include "../../examples/hosts/plugin/host.c"
#undef main

int main(int argc, char **argv)
{
    static struct footprint before, after;
    char why[700];
    if (argc != 2) return fprintf(stderr, "usage: plugin_footprint PLUGIN\n"), 2;
    for (int times = 0; times < 4; times++) {
        if (times == 1) footprint_take(&before);
        if (host_main(2, argv) != 0) return 1;
    }
    footprint_take(&after);
    if (footprint_differs(&before, &after, why, sizeof why))
        return fprintf(stderr, "plugin_footprint: %s\n", why), 1;
    printf("the footprint is as before\n");
    return 0;
}
