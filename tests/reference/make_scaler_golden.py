"""Loss scales of torch.amp.GradScaler for the tests, recorded on the CPU.

    python3 make_scaler_golden.py [scaler_golden.h]

writes one C header (default: scaler_golden.h in the current folder) and needs PyTorch 2.3 or newer: the scaler of older
versions works on GPUs only, and then this ends with exit code 77.

    scaler_golden[]   recorded runs: settings, and `count` steps. In each step a parameter gets a gradient, finite or,
                      where found_inf is 1, with inf, -inf or NaN in one place; then unscale_, step of an SGD, update.
                      steps[i]: found_inf, and afterwards the growth tracker and the scale that the next step will use.
                      The parameter moved exactly where found_inf is 0
"""
import struct
import sys

import torch

INFINITE = (float("inf"), float("-inf"), float("nan"))


def c_float(x):
    """Hexadecimal: every fp32 number, to the bit."""
    assert struct.unpack("<f", struct.pack("<f", x))[0] == x
    digits, exponent = x.hex().split("p")
    return digits.rstrip("0").rstrip(".") + "p" + exponent + "f"


class Random:
    """Numerical Recipes' 64-bit linear congruential generator; the top 32 bits are used."""

    def __init__(self, seed):
        self.state = seed

    def below(self, n):
        self.state = (self.state * 6364136223846793005 + 1442695040888963407) % 2**64
        return (self.state >> 32) % n


def record(initial, interval, pattern):
    scaler = torch.amp.GradScaler("cpu", init_scale=initial, growth_interval=interval)
    w = torch.nn.Parameter(torch.zeros(3))
    sgd = torch.optim.SGD([w], lr=0.5)
    rows = []
    for step, bad in enumerate(pattern):
        scaler.scale(torch.zeros(()))           # the scale is made at its first use
        before = w.detach().clone()
        w.grad = torch.ones(3)
        if bad:
            w.grad[step % 3] = INFINITE[step % 3]
        scaler.unscale_(sgd)
        if not bad:
            w.grad[0] = 1.0                     # a step that can be seen, however large the scale
        scaler.step(sgd)
        scaler.update()
        assert torch.equal(before, w.detach()) == bool(bad)
        rows.append("{%d, %d, %s}" % (bad, scaler._get_growth_tracker(), c_float(scaler.get_scale())))
    return rows


def cases():
    random = Random(14016802753645532771)
    yield "the defaults, a few overflows", 65536.0, 2000, [0, 0, 1, 0, 1, 1, 0, 0]
    yield "growth at the interval", 1024.0, 3, [0] * 10
    yield "an overflow starts the count anew", 1024.0, 3, [0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 1, 0, 0, 0]
    yield "growth in every step", 4.0, 1, [0, 0, 1, 0, 1, 1, 0, 0, 0]
    yield "one overflow after the other", 2.0**30, 2000, [1] * 24
    yield "growth to infinity", 2.0**124, 2, [0] * 12 + [1, 0, 0, 0, 0]
    yield "rare overflows", 65536.0, 5, [random.below(12) == 0 for _ in range(120)]


def main(path):
    out, table = [], []
    for number, (name, initial, interval, pattern) in enumerate(cases()):
        rows = record(initial, interval, pattern)
        lines = ["    " + ", ".join(rows[i:i + 4]) for i in range(0, len(rows), 4)]
        out.append(f"static const scaler_step scaler_steps_{number}[{len(rows)}] = {{\n" + ",\n".join(lines) + "\n};\n")
        table.append(f'    {{"{name}", {c_float(initial)}, {interval}, {len(rows)}, scaler_steps_{number}}}')
    with open(path, "w") as f:
        f.write("/* Written by make_scaler_golden.py; see its first comment for what is here. Do not edit. */\n"
                "#ifndef SCALER_GOLDEN_H\n#define SCALER_GOLDEN_H\n\n#include <stdint.h>\n\n"
                "typedef struct scaler_step {\n    int found_inf;\n    uint32_t growth_tracker;\n"
                "    float scale;\n} scaler_step;\n\n" + "\n".join(out) +
                "\nstatic const struct {\n    const char *name;\n"
                "    float initial_scale;\n    uint32_t growth_interval;\n    int count;\n    const scaler_step *steps;\n"
                f"}} scaler_golden[{len(table)}] = {{\n" + ",\n".join(table) + "\n};\n\n#endif\n")


if __name__ == "__main__":
    if not hasattr(torch, "amp") or not hasattr(torch.amp, "GradScaler"):
        print(f"torch {torch.__version__} has no GradScaler for the CPU, 2.3 has")
        sys.exit(77)
    main(sys.argv[1] if len(sys.argv) > 1 else "scaler_golden.h")
