/* about.h: what every program answers in place of doing something: --help, also -h, and --version. Include it after
 * dtrain.h. */
#ifndef ABOUT_H
#define ABOUT_H

#include <stdbool.h>
#include <stdio.h>
#include <string.h>

/* Answer --help or --version if one of the words asks for it; then the program ends with status 0. */
static inline bool about(const char *program, int count, char **words, void (*help)(void))
{
    for (int i = 0; i < count; i++) {
        if (strcmp(words[i], "--help") == 0 || strcmp(words[i], "-h") == 0) {
            help();
            printf("\n--help prints this, --version the release\n");
            return true;
        }
        if (strcmp(words[i], "--version") == 0) {
            printf("%s of dtrain %s\n", program, DTRAIN_VERSION_STRING);
            return true;
        }
    }
    return false;
}

#endif /* ABOUT_H */
