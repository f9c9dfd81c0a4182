"""Golden values of convolution and pooling for the tests, computed by PyTorch on the CPU.

    python3 make_conv_golden.py [conv_golden.h]

writes one C header (default: conv_golden.h in the current folder) and needs PyTorch 1.13 or newer, nothing else.

Inputs are numbers of a fixed sequence, exact in fp32; results are computed in fp64 and rounded once, when printed. Images are
printed with channels last, weights as PyTorch has them. `dy` is the incoming gradient of a backward pass.

    conv_plain_*     x (2,5,6,3), w (4,3,3,3), b (4): stride 1, padding 1 -> y, dx, dw, db
    conv_groups_*    x (1,7,6,4), w (6,2,3,2), b (6): stride (2,1), padding (1,0), dilation (1,2), 2 groups
    conv_depth_*     x (2,5,5,5), w (5,1,3,3), b (5): stride 2, padding 1, 5 groups
    conv_max_*       x (2,6,7,3) of small integers, so that maxima are equal, with NaN in a window of its own: kernel 3 x 2,
                     stride 2 x 1, padding 1 -> y, dx
    conv_avg_*       the same windows over numbers without NaN; padding counts
    conv_global_*    mean over an image, (2,6,7,3) -> (2,3)
"""
import struct
import sys

import torch
import torch.nn.functional as F

out = []


def c_float(x):
    """The shortest C literal that reads back as the fp32 value nearest to x: at most 9 digits."""
    def fp32(value):
        return struct.unpack("<f", struct.pack("<f", value))[0]

    if x != x:
        return "NAN"
    if x == 0.0:
        return "0.0f"
    text = next(t for t in ("%.*g" % (digits, fp32(x)) for digits in range(1, 10)) if fp32(float(t)) == fp32(x))
    return text + ("f" if "." in text or "e" in text else ".0f")


def floats(name, tensor):
    items = [c_float(x) for x in tensor.detach().reshape(-1).tolist()]
    rows = ["    " + ", ".join(items[i:i + 8]) for i in range(0, len(items), 8)]
    out.append(f"static const float {name}[{len(items)}] = {{\n" + ",\n".join(rows) + "\n};\n")


def last(image):
    """(batch, channels, height, width) -> (batch, height, width, channels)"""
    return image.permute(0, 2, 3, 1)


class Random:
    """Numerical Recipes' 64-bit linear congruential generator: multiples of 1/1024 between -2 and 2."""

    def __init__(self, seed):
        self.state = seed

    def below(self, n):
        self.state = (self.state * 6364136223846793005 + 1442695040888963407) % 2**64
        return (self.state >> 33) % n

    def tensor(self, *shape):
        count = torch.Size(shape).numel()
        return torch.tensor([(self.below(4096) - 2048) / 1024 for _ in range(count)], dtype=torch.float64).view(*shape)


random = Random(7)


def convolution(name, x_shape, w_shape, **options):
    x, w, b = random.tensor(*x_shape), random.tensor(*w_shape), random.tensor(w_shape[0])
    for t in (x, w, b):
        t.requires_grad_()
    y = F.conv2d(x, w, b, **options)
    dy = random.tensor(*y.shape)
    y.backward(dy)
    for part, t in (("x", last(x)), ("w", w), ("b", b), ("dy", last(dy)), ("y", last(y)), ("dx", last(x.grad)), ("dw", w.grad),
                    ("db", b.grad)):
        floats(f"conv_{name}_{part}", t)


def pool(name, x, run):
    x.requires_grad_()
    y = run(x)
    dy = random.tensor(*y.shape)
    y.backward(dy)
    for part, t in (("x", last(x)), ("dy", dy if dy.dim() == 2 else last(dy)), ("y", y if y.dim() == 2 else last(y)),
                    ("dx", last(x.grad))):
        floats(f"conv_{name}_{part}", t)


def main(path):
    convolution("plain", (2, 3, 5, 6), (4, 3, 3, 3), padding=1)
    convolution("groups", (1, 4, 7, 6), (6, 2, 3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2), groups=2)
    convolution("depth", (2, 5, 5, 5), (5, 1, 3, 3), stride=2, padding=1, groups=5)
    integers = torch.tensor([float(random.below(4)) for _ in range(2 * 3 * 6 * 7)], dtype=torch.float64).view(2, 3, 6, 7)
    integers[0, 1, 2, 3] = integers[1, 2, 5, 6] = integers[1, 2, 4, 6] = float("nan")
    pool("max", integers, lambda x: F.max_pool2d(x, (3, 2), stride=(2, 1), padding=1))
    pool("avg", random.tensor(2, 3, 6, 7), lambda x: F.avg_pool2d(x, (3, 2), stride=(2, 1), padding=1))
    pool("global", random.tensor(2, 3, 6, 7), lambda x: x.mean((2, 3)))
    with open(path, "w") as f:
        f.write("/* Written by make_conv_golden.py; see its first comment for what is here. Do not edit. */\n"
                "#ifndef CONV_GOLDEN_H\n#define CONV_GOLDEN_H\n\n#include <math.h>\n\n" + "\n".join(out) + "\n#endif\n")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "conv_golden.h")
