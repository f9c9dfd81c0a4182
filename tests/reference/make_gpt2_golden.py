"""Golden values of a small GPT-2 for the tests, computed by PyTorch on the CPU.

    python3 make_gpt2_golden.py [gpt2_golden.h]

writes one C header (default: gpt2_golden.h in the current folder) and needs PyTorch 1.13 or newer, nothing else.

Model: 2 layers, 2 heads, 16 channels, vocabulary 37, 8 positions; pre-LayerNorm with eps 1e-5, biases everywhere, causal
attention scaled by 1/sqrt(head dimension), GELU in its tanh form, output head tied to wte. Weights of linear layers
are (out, in). Batch: 3 sequences of 8 tokens. Loss: mean cross entropy over all 24 positions.

The header holds
    golden_wte, golden_wpe, golden_h0_ln1_w ...    every initial parameter, exact in fp32
    golden_inputs, golden_targets, golden_logits, golden_loss
    golden_wte_grad ...                            gradients of that loss, before clipping
    golden_step_loss[10], golden_step_norm[10]     ten AdamW steps on the same batch: the loss before each step and the
                                                   gradient norm before clipping
    golden_final_loss, golden_wte_final ...        loss and parameters after the tenth step
    golden_params[]                                name, shape (dim1 = 0 for vectors), initial value, gradient, final value

AdamW: lr 1e-3, betas 0.9 / 0.95, eps 1e-8, weight decay 0.1 for tensors of two dimensions and none for vectors, gradients
clipped to a global norm of 1 by torch.nn.utils.clip_grad_norm_.

The initial values are rounded to fp32; everything after that is computed in fp64 and rounded once, when printed, so the
header is a reference for fp32 code and no bit pattern to be matched. The gradient of the key biases (elements C .. 2C-1
of qkv_b) is 0 in exact arithmetic, because softmax does not see a shift; in fp32 it is noise, which Adam scales up: in a
test their final values need a tolerance of steps x lr, while nothing else depends on them. Everything else agrees with
PyTorch in fp32 to 1e-6.

Initial values come from a small generator written out below, not from torch's: PyTorch 1.13 and 2.15 write the same header.
"""
import math
import struct
import sys

import torch
import torch.nn.functional as F

LAYERS, HEADS, CHANNELS, VOCAB, POSITIONS, BATCH = 2, 2, 16, 37, 8, 3
STEPS, LR, BETAS, EPS, DECAY, CLIP = 10, 1e-3, (0.9, 0.95), 1e-8, 0.1, 1.0


class Random:
    """Numerical Recipes' 64-bit linear congruential generator; the top 32 bits are used."""

    def __init__(self, seed):
        self.state = seed

    def bits(self):
        self.state = (self.state * 6364136223846793005 + 1442695040888963407) % 2**64
        return self.state >> 32

    def uniform(self):
        return (self.bits() + 0.5) / 2**32

    def normal(self):
        return math.sqrt(-2.0 * math.log(self.uniform())) * math.cos(2.0 * math.pi * self.uniform())


def initial_parameters(random):
    """Ordered name -> fp64 tensor whose values are exact in fp32: those nearest to three decimals, for a short header.
    Vectors are not left at 0 or 1: a swapped or forgotten bias has to show. The deviation of 0.15 gives gradients of
    ordinary size at 16 channels."""
    params = {}

    def add(name, *shape, mean=0.0, deviation=0.15):
        values = [round(mean + deviation * random.normal(), 3) for _ in range(math.prod(shape))]
        params[name] = torch.tensor(values, dtype=torch.float32).double().view(*shape).requires_grad_()

    channels = CHANNELS
    add("wte", VOCAB, channels)
    add("wpe", POSITIONS, channels)
    for layer in range(LAYERS):
        h = f"h{layer}_"
        add(h + "ln1_w", channels, mean=1.0, deviation=0.1)
        add(h + "ln1_b", channels, deviation=0.1)
        add(h + "qkv_w", 3 * channels, channels)
        add(h + "qkv_b", 3 * channels, deviation=0.1)
        add(h + "attproj_w", channels, channels)
        add(h + "attproj_b", channels, deviation=0.1)
        add(h + "ln2_w", channels, mean=1.0, deviation=0.1)
        add(h + "ln2_b", channels, deviation=0.1)
        add(h + "fc_w", 4 * channels, channels)
        add(h + "fc_b", 4 * channels, deviation=0.1)
        add(h + "fcproj_w", channels, 4 * channels)
        add(h + "fcproj_b", channels, deviation=0.1)
    add("lnf_w", channels, mean=1.0, deviation=0.1)
    add("lnf_b", channels, deviation=0.1)
    return params


def layer_norm(x, weight, bias):
    return F.layer_norm(x, (CHANNELS,), weight, bias, 1e-5)


def gelu(x):
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


def attention(x, p, h):
    batch, length, channels = x.shape
    size = channels // HEADS
    qkv = F.linear(x, p[h + "qkv_w"], p[h + "qkv_b"])                       # (B, T, 3C): queries, keys, values
    q, k, v = (t.view(batch, length, HEADS, size).transpose(1, 2) for t in qkv.split(channels, dim=2))
    scores = q @ k.transpose(-2, -1) / math.sqrt(size)                      # (B, H, T, T)
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    mixed = scores.masked_fill(future, -math.inf).softmax(-1) @ v           # (B, H, T, size)
    mixed = mixed.transpose(1, 2).reshape(batch, length, channels)
    return F.linear(mixed, p[h + "attproj_w"], p[h + "attproj_b"])


def forward(p, inputs):
    x = p["wte"][inputs] + p["wpe"]                                         # (B, T, C)
    for layer in range(LAYERS):
        h = f"h{layer}_"
        x = x + attention(layer_norm(x, p[h + "ln1_w"], p[h + "ln1_b"]), p, h)
        y = F.linear(layer_norm(x, p[h + "ln2_w"], p[h + "ln2_b"]), p[h + "fc_w"], p[h + "fc_b"])
        x = x + F.linear(gelu(y), p[h + "fcproj_w"], p[h + "fcproj_b"])
    return layer_norm(x, p["lnf_w"], p["lnf_b"]) @ p["wte"].T               # (B, T, V)


def mean_loss(logits, targets):
    return F.cross_entropy(logits.view(-1, VOCAB), targets.reshape(-1))


def c_float(x):
    """The shortest C literal that reads back as the fp32 value nearest to x: at most 9 digits. What is 0 but for rounding is
    written as 0."""
    def fp32(value):
        return struct.unpack("<f", struct.pack("<f", value))[0]

    if abs(x) < 1e-14:
        return "0.0f"
    text = next(t for t in ("%.*g" % (digits, fp32(x)) for digits in range(1, 10)) if fp32(float(t)) == fp32(x))
    return text + ("f" if "." in text or "e" in text else ".0f")


def c_array(ctype, name, items):
    rows = ["    " + ",".join(items[i:i + 8]) for i in range(0, len(items), 8)]
    return f"static const {ctype} {name}[{len(items)}] = {{\n" + ",\n".join(rows) + "\n};\n"


def c_floats(name, tensor):
    return c_array("float", name, [c_float(x) for x in tensor.detach().reshape(-1).tolist()])


def c_ints(name, tensor):
    return c_array("int32_t", name, [str(x) for x in tensor.reshape(-1).tolist()])


def main(path):
    random = Random(1337)
    params = initial_parameters(random)
    tokens = torch.tensor([random.bits() % VOCAB for _ in range(BATCH * (POSITIONS + 1))]).view(BATCH, POSITIONS + 1)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]

    out = [c_floats("golden_" + name, p) for name, p in params.items()]
    logits = forward(params, inputs)
    loss = mean_loss(logits, targets)
    loss.backward()
    out += [c_ints("golden_inputs", inputs), c_ints("golden_targets", targets), c_floats("golden_logits", logits),
            f"static const float golden_loss = {c_float(loss.item())};\n"]
    out += [c_floats(f"golden_{name}_grad", p.grad) for name, p in params.items()]

    matrices = [p for p in params.values() if p.dim() >= 2]
    vectors = [p for p in params.values() if p.dim() < 2]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}],
                                  lr=LR, betas=BETAS, eps=EPS)
    losses, norms = [], []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = mean_loss(forward(params, inputs), targets)
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(list(params.values()), CLIP).item())
        optimizer.step()
        losses.append(loss.item())
    final_loss = mean_loss(forward(params, inputs), targets).item()
    out += [c_array("float", "golden_step_loss", [c_float(x) for x in losses]),
            c_array("float", "golden_step_norm", [c_float(x) for x in norms]),
            f"static const float golden_final_loss = {c_float(final_loss)};\n"]
    out += [c_floats(f"golden_{name}_final", p) for name, p in params.items()]

    rows = []
    for name, p in params.items():
        dim1 = p.shape[1] if p.dim() > 1 else 0
        rows.append(f'    {{ "{name}", {p.shape[0]}, {dim1}, golden_{name}, golden_{name}_grad, golden_{name}_final }}')
    out.append("static const struct {\n    const char *name;\n    int64_t dim0, dim1; /* dim1 = 0: a vector */\n"
               f"    const float *value, *grad, *final;\n}} golden_params[{len(rows)}] = {{\n" + ",\n".join(rows) + "\n};\n")

    sizes = [("LAYERS", LAYERS), ("HEADS", HEADS), ("CHANNELS", CHANNELS), ("VOCAB", VOCAB), ("POSITIONS", POSITIONS),
             ("BATCH", BATCH), ("STEPS", STEPS), ("PARAM_TENSORS", len(params)),
             ("PARAM_COUNT", sum(p.numel() for p in params.values()))]
    head = ("/* Written by make_gpt2_golden.py; see its first comment for what is here. Do not edit. */\n"
            "#ifndef GPT2_GOLDEN_H\n#define GPT2_GOLDEN_H\n\n#include <stdint.h>\n\n"
            f"/* lr {LR:g}, betas {BETAS[0]:g} {BETAS[1]:g}, eps {EPS:g}, weight decay {DECAY:g} (matrices only), "
            f"clip norm {CLIP:g} */\n"
            "enum {\n" + ",\n".join(f"    GOLDEN_{n} = {v}" for n, v in sizes) + "\n};\n\n")
    with open(path, "w") as f:
        f.write(head + "\n".join(out) + "\n#endif\n")
    print(f"{path}: loss {losses[0]:.6f} -> {final_loss:.6f}, norms {norms[0]:.4f} .. {norms[-1]:.4f}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "gpt2_golden.h")
