/* process_memory.h: the memory of this process, as the operating system counts it. */
#ifndef TOOLS_PROCESS_MEMORY_H
#define TOOLS_PROCESS_MEMORY_H

#include <stdint.h>
#include <stdio.h>
#include <string.h>

/* The number of KiB after `key` in a file of /proc/self, in bytes; 0 where it is unknown. */
static uint64_t process_bytes(const char *path, const char *key)
{
    char line[256];
    unsigned long long kib = 0;
    FILE *file = fopen(path, "r");
    while (file && fgets(line, sizeof line, file))
        if (strncmp(line, key, strlen(key)) == 0) (void)sscanf(line + strlen(key), "%llu", &kib);
    if (file) fclose(file);
    return (uint64_t)kib * 1024;
}

/* The proportional set size now, and the high-water mark of the resident set size; NULL: not
 * asked. */
static void process_memory(uint64_t *now_bytes, uint64_t *peak_bytes)
{
    if (now_bytes) *now_bytes = process_bytes("/proc/self/smaps_rollup", "Pss:");
    if (peak_bytes) *peak_bytes = process_bytes("/proc/self/status", "VmHWM:");
}

#endif /* TOOLS_PROCESS_MEMORY_H */
