"""Ranges of Unicode's letters and numbers, as tools/train_gpt/tokenizer.h wants them.

    python3 make_unicode_classes.py [unicode_classes.h]

writes one C header (default: tools/train_gpt/unicode_classes.h) from Python's unicodedata, and needs nothing else. Unicode
grows: a letter that is newer than the version in the header counts as a symbol.
"""
import sys
import unicodedata


def ranges(kind):
    """Closed ranges of the code points whose general category begins with `kind`."""
    found = []
    for code in range(0x110000):
        if unicodedata.category(chr(code))[0] != kind:
            continue
        if found and found[-1][1] == code - 1:
            found[-1][1] = code
        else:
            found.append([code, code])
    return found


def table(name, kind):
    """One C array, as many ranges in a line as fit."""
    lines, line = [], ""
    for first, last in ranges(kind):
        entry = "{%s, %s}," % (hex(first), hex(last))
        if len(line) + 1 + len(entry) > 96:
            lines.append(line)
            line = ""
        line += (" " if line else "") + entry
    lines.append(line.rstrip(","))
    return "static const uint32_t %s[][2] = {\n    %s};\n" % (name, "\n    ".join(lines))


text = """/* unicode_classes.h: the letters (L) and numbers (N) of Unicode %s, as closed ranges of code points.
 * Made by tests/reference/make_unicode_classes.py. */
#ifndef UNICODE_CLASSES_H
#define UNICODE_CLASSES_H

#include <stdint.h>

/* clang-format off */
%s
%s/* clang-format on */

#endif /* UNICODE_CLASSES_H */
""" % (unicodedata.unidata_version, table("unicode_letters", "L"), table("unicode_numbers", "N"))
with open(sys.argv[1] if len(sys.argv) > 1 else "tools/train_gpt/unicode_classes.h", "w") as file:
    file.write(text)
