"""Golden values of single operations for the tests, computed by PyTorch on the CPU.

    python3 make_op_golden.py [op_golden.h]

writes one C header (default: op_golden.h in the current folder) and needs PyTorch 1.13 or newer, nothing else.

Inputs are rounded to fp32; results are computed in fp64 and rounded once, when printed, except where bits are meant to
match (permutations, sampler lists, conversions). `dy` is the incoming gradient of a backward pass.

    op_layernorm_*    (6,10), eps 1e-5: x, w, b, dy -> y, dx, dw, db
    op_gelu_*         31 values, tanh form: x, dy -> y, dx
    op_ce_*           cross entropy of (5,7) logits and targets, mean, without ignored rows -> loss, row_loss, dlogits;
                      op_ce_ignore_*: the same with target -100 in rows 1 and 3, which count for nothing
    op_sdpa_*         causal attention, (B,H,T,D) = (2,2,5,4), scale 1/sqrt(D): q, k, v, dy -> y, dq, dk, dv
    op_opt_*          optimizers on 8 values w: op_opt_grad holds the gradients of the 5 steps, (5,8); every result is the
                      parameter after each step, (5,8). sgd: lr 0.1, momentum 0.9, weight decay 0.01 (added to the gradient);
                      sgd_nesterov: the same with nesterov; adamw: lr 1e-2, betas 0.9 0.95, eps 1e-8, weight decay 0.1
    op_lion_*         Lion (Chen et al., 2023, algorithm 2) on the same w and gradients: lr 0.02, betas 0.9 0.99, weight decay
                      0.1, -> parameter after each step, (5,8)
    op_muon_*         Muon as its authors' code has it (https://github.com/KellerJordan/Muon), in fp64: lr 0.02, momentum 0.95,
                      Nesterov, weight decay 0.1; w, gradients of 3 steps and the parameter after each of them for matrices
                      (6,4), (4,6), (5,5), and for (3,2,2,2), which counts as (3,8)
    op_lr_*           factors that schedules put on the learning rate at steps 0 .. 23, stepped by torch's LambdaLR
    op_randperm[]     torch.randperm(n) after torch.manual_seed(seed)
    op_sampler[]      DistributedSampler(n items, R replicas, shuffle=True, seed, drop_last) after set_epoch(epoch): the index
                      lists of ranks 0 .. R-1, one after the other, `per` indices each
    op_batch_norm_*   (12,4), eps 1e-5, momentum 0.1, y = relu(batch_norm(x) + residual): x, w, b, residual, dy ->
                      y, dx, dw, db, dresidual; running mean and var after it; inferred: batch_norm(x) with those
    op_to_half[]      fp32 bits -> bf16 bits and fp16 bits, round to nearest, ties to even. A NaN has no golden bits
                      (versions of torch differ): 0x7fc0 and 0x7e00 stand for any NaN there
"""
import math
import struct
import sys

import torch
import torch.nn.functional as F
from torch.utils.data import DistributedSampler

out = []


def c_float(x):
    """The shortest C literal that reads back as the fp32 value nearest to x: at most 9 digits."""
    def fp32(value):
        return struct.unpack("<f", struct.pack("<f", value))[0]

    if x == 0.0:
        return "0.0f"
    if x == -float("inf"):
        return "-INFINITY"
    text = next(t for t in ("%.*g" % (digits, fp32(x)) for digits in range(1, 10)) if fp32(float(t)) == fp32(x))
    return text + ("f" if "." in text or "e" in text else ".0f")


def c_array(ctype, name, items):
    rows = ["    " + ", ".join(items[i:i + 8]) for i in range(0, len(items), 8)]
    out.append(f"static const {ctype} {name}[{len(items)}] = {{\n" + ",\n".join(rows) + "\n};\n")


def floats(name, tensor):
    c_array("float", name, [c_float(x) for x in tensor.detach().reshape(-1).tolist()])


def ints(name, values):
    c_array("int32_t", name, [str(x) for x in values])


def comment(text):
    out.append(f"/* {text} */\n")


class Random:
    """Numerical Recipes' 64-bit linear congruential generator; the top 32 bits are used."""

    def __init__(self, seed):
        self.state = seed

    def bits(self):
        self.state = (self.state * 6364136223846793005 + 1442695040888963407) % 2**64
        return self.state >> 32

    def normal(self, *shape, scale=1.0):
        """fp64 tensor, values exact in fp32."""
        def one():
            u, v = (self.bits() + 0.5) / 2**32, (self.bits() + 0.5) / 2**32
            return scale * math.sqrt(-2.0 * math.log(u)) * math.cos(2.0 * math.pi * v)
        return torch.tensor([one() for _ in range(math.prod(shape))]).float().double().view(*shape)


random = Random(2024)


def layernorm():
    comment("layer normalisation over the last dimension: (6,10); row 4 is constant, row 5 has a large mean")
    x, w, b, dy = random.normal(6, 10), random.normal(10), random.normal(10), random.normal(6, 10)
    x[4] = 0.5
    x[5] = (x[5] + 100.0).float().double()
    for t in (x, w, b):
        t.requires_grad_()
    y = F.layer_norm(x, (10,), w, b, 1e-5)
    y.backward(dy)
    for name, t in (("x", x), ("w", w), ("b", b), ("dy", dy), ("y", y), ("dx", x.grad), ("dw", w.grad), ("db", b.grad)):
        floats("op_layernorm_" + name, t)


def gelu():
    comment("GELU, tanh form")
    x = torch.tensor([-40.0, -10.0, -6.0, -4.0, -3.0, -2.0, -1.5, -1.0, -0.75, -0.5, -0.25, -0.1, -1e-3, -1e-6, -1e-20, 0.0,
                      1e-20, 1e-6, 1e-3, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 10.0, 40.0]).double()
    dy = random.normal(len(x))
    x.requires_grad_()
    y = 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))
    y.backward(dy)
    for name, t in (("x", x), ("dy", dy), ("y", y), ("dx", x.grad)):
        floats("op_gelu_" + name, t)


def cross_entropy():
    comment("cross entropy: (5,7); row 2 has logits around 80, where exp overflows unless the maximum is taken off")
    logits = random.normal(5, 7, scale=2.0)
    logits[2] = (logits[2] + 80.0).float().double()
    targets = torch.tensor([3, 0, 6, 2, 5])
    floats("op_ce_logits", logits)
    for name, t in (("op_ce_", targets), ("op_ce_ignore_", torch.tensor([3, -100, 6, -100, 5]))):
        z = logits.clone().requires_grad_()
        loss = F.cross_entropy(z, t)
        loss.backward()
        ints(name + "targets", t.tolist())
        floats(name + "row_loss", F.cross_entropy(logits, t, reduction="none"))
        floats(name + "loss", loss)
        floats(name + "dlogits", z.grad)


def attention():
    comment("causal scaled dot product attention: (B,H,T,D) = (2,2,5,4)")
    q, k, v, dy = (random.normal(2, 2, 5, 4) for _ in range(4))
    for t in (q, k, v):
        t.requires_grad_()
    scores = (q @ k.transpose(-2, -1) / math.sqrt(4)).masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(1), -math.inf)
    y = scores.softmax(-1) @ v
    if hasattr(F, "scaled_dot_product_attention"):
        assert torch.allclose(y, F.scaled_dot_product_attention(q, k, v, is_causal=True), rtol=1e-12, atol=1e-12)
    y.backward(dy)
    for name, t in (("q", q), ("k", k), ("v", v), ("dy", dy), ("y", y), ("dq", q.grad), ("dk", k.grad), ("dv", v.grad)):
        floats("op_sdpa_" + name, t)


def optimizers():
    comment("optimizers: parameters after each of 5 steps with the gradients of op_opt_grad; (5,8)")
    global opt_w, opt_grads
    w, grads = opt_w, opt_grads = random.normal(8), random.normal(5, 8)
    grads[:, 7] = 0.0                                   # only the weight decay moves the last value
    floats("op_opt_w", w)
    floats("op_opt_grad", grads)
    for name, make in (
            ("sgd_plain", lambda p: torch.optim.SGD(p, lr=0.1)),
            ("sgd", lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01)),
            ("sgd_nesterov", lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True)),
            ("adamw", lambda p: torch.optim.AdamW(p, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1))):
        p = w.clone().requires_grad_()
        optimizer, after = make([p]), []
        for g in grads:
            p.grad = g.clone()
            optimizer.step()
            after.append(p.detach().clone())
        floats("op_opt_" + name, torch.stack(after))


def lion():
    comment("Lion: parameters after each of 5 steps with op_opt_w and op_opt_grad; (5,8)")
    w, m, after = opt_w.clone(), torch.zeros(8, dtype=torch.float64), []
    for g in opt_grads:
        w = w * (1 - 0.02 * 0.1) - 0.02 * torch.sign(0.9 * m + 0.1 * g)
        m = 0.99 * m + 0.01 * g
        after.append(w)
    floats("op_lion", torch.stack(after))


def muon():
    def orthogonal(g):
        x = g.T if g.size(0) > g.size(1) else g
        x = x / (x.norm() + 1e-7)
        for _ in range(5):
            a = x @ x.T
            b = -4.7750 * a + 2.0315 * a @ a
            x = 3.4445 * x + b @ x
        return x.T if g.size(0) > g.size(1) else x

    comment("Muon: w, gradients (3, ...), parameters after each step (3, ...)")
    for name, shape in (("tall", (6, 4)), ("wide", (4, 6)), ("square", (5, 5)), ("filters", (3, 2, 2, 2))):
        w, grads = random.normal(*shape), random.normal(3, *shape)
        momentum, after = torch.zeros(shape, dtype=torch.float64), []
        floats(f"op_muon_{name}_w", w)
        floats(f"op_muon_{name}_grad", grads)
        for g in grads:
            momentum = momentum.lerp(g, 1 - 0.95)
            update = orthogonal(g.lerp(momentum, 0.95).reshape(shape[0], -1))
            update = update * max(1, update.size(0) / update.size(1)) ** 0.5
            w = w * (1 - 0.02 * 0.1) - 0.02 * update.reshape(shape)
            after.append(w)
        floats(f"op_muon_{name}", torch.stack(after))


def schedules():
    warmup, total, floor, base = 4, 20, 0.1, 3e-4
    comment(f"learning rate with linear warm-up and cosine decay, base lr {base:g}, warm-up W = {warmup}, total N = {total},\n"
            f"   floor f = {floor:g}, steps s = 0 .. 23:\n"
            "   s < W: lr (s+1)/W;  s < N: lr (f + (1-f) (1 + cos(pi (s-W)/(N-W)))/2);  from N on: lr f.\n"
            "   op_lr_linear: the same with f + (1-f) (N-s)/(N-W) between W and N. op_lr_step: lr 0.5^(s/6), whole quotient")

    def decayed(shape):
        def factor(s):
            if s < warmup:
                return (s + 1) / warmup
            return floor + (1 - floor) * shape((s - warmup) / (total - warmup)) if s < total else floor
        return factor

    for name, factor in (("cosine", decayed(lambda t: (1 + math.cos(math.pi * t)) / 2)), ("linear", decayed(lambda t: 1 - t)),
                         ("step", lambda s: 0.5 ** (s // 6))):
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=base)
        schedule, values = torch.optim.lr_scheduler.LambdaLR(optimizer, factor), []
        for _ in range(24):
            values.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()
        floats("op_lr_" + name, torch.tensor(values, dtype=torch.float64))


def permutations():
    rows = []
    for n in (10, 23, 100):
        for seed in (0, 5, 3):
            g = torch.Generator()
            g.manual_seed(seed)
            ints(f"op_randperm_{n}_{seed}", torch.randperm(n, generator=g).tolist())
            rows.append(f"    {{ {n}, {seed}, op_randperm_{n}_{seed} }}")
    out.append(f"static const struct {{ int64_t n; uint64_t seed; const int32_t *order; }} op_randperm[{len(rows)}] = {{\n"
               + ",\n".join(rows) + "\n};\n")


def samplers():
    rows = []
    cases = [(10, 4, 3, 2), (10, 5, 0, 0), (23, 4, 5, 1), (16, 2, 7, 9), (7, 1, 3, 0),      # n, replicas, seed, epoch
             (3, 4, 1, 0), (2, 5, 0, 3), (1, 3, 11, 4)]
    for shuffle in (True, False):
        for n, replicas, seed, epoch in cases if shuffle else cases[:1] + cases[-2:]:
            for drop_last in (False, True):
                lists = []
                for rank in range(replicas):
                    s = DistributedSampler(range(n), replicas, rank, shuffle=shuffle, seed=seed, drop_last=drop_last)
                    s.set_epoch(epoch)
                    lists.append(list(s))
                per, name = len(lists[0]), f"op_sampler_{len(rows)}"
                assert all(len(x) == per for x in lists)
                ints(name, sum(lists, []) or [-1])      # C has no empty arrays
                rows.append(f"    {{ {n}, {replicas}, {seed}, {epoch}, {int(shuffle)}, {int(drop_last)}, {per}, {name} }}")
    out.append("static const struct {\n    int64_t n;\n    int32_t replicas;\n    uint64_t seed, epoch;\n"
               "    int32_t shuffle, drop_last;\n    int64_t per;          /* indices of one rank */\n"
               f"    const int32_t *order; /* [replicas][per]; one -1 when per is 0 */\n}} op_sampler[{len(rows)}] = {{\n"
               + ",\n".join(rows) + "\n};\n")


def conversions():
    def bits(x):
        return struct.unpack("<I", struct.pack("<f", x))[0]

    values = [0x00000000, 0x00000001, 0x00007fff, 0x00008000, 0x00008001, 0x00010000, 0x00018000, 0x00400000, 0x007fffff,
              0x007f8000, 0x007f7fff, 0x00800000, 0x00800001, 0x00ffffff,                        # fp32 denormals, least normals
              0x7f7f0000, 0x7f7f7fff, 0x7f7f8000, 0x7f7fffff, 0x7f800000,                        # bf16 overflow, infinity
              0x7fc00000, 0x7f800001, 0x7f808000, 0x7fbfffff, 0x7fffffff, 0x7fff8000, 0x7fffffef]  # NaN, quiet, signalling
    values += [bits(x) for x in (1.0, 2.0, 0.5, 1.0 / 3.0, 0.1, 3.14159274, 65504.0, 65519.0, 65519.996, 65520.0, 65535.0,
                                 65536.0, 1e5, 1e10, 1e30, 1e-5, 1e-8, 1e-10, 1e-30, 1e-40, 255.5, 256.5, 257.0, 2049.0,
                                 2051.0)]
    for exponent in (-140, -127, -126, -25, -24, -15, -14, -1, 0, 1, 7, 15, 100):
        base = bits(2.0 ** exponent)
        for low in (0x0fff, 0x1000, 0x1001, 0x3000, 0x7fff, 0x8000, 0x8001, 0x18000):    # ties of fp16 (2^12), bf16 (2^15)
            values.append(base | low)
    for k in (1, 3, 5, 1021, 1023, 2047):    # ties among fp16 denormals
        tie = bits(k * 2.0 ** -25)
        values += [tie - 1, tie, tie + 1]
    while len(values) < 200:
        values.append(random.bits() & 0x7fffffff)
    values = list(dict.fromkeys(values))
    values = [v | (0x80000000 if i % 3 == 2 else 0) for i, v in enumerate(values)]               # every third one negative
    values += [0x80000000, 0xff800000, 0xffc00000]
    x = torch.tensor([v - 2**32 if v >= 2**31 else v for v in values], dtype=torch.int32).view(torch.float32)
    b, h = (x.to(t).view(torch.int16).tolist() for t in (torch.bfloat16, torch.float16))
    b = [0x7fc0 if math.isnan(v) else p for v, p in zip(x.tolist(), b)]
    h = [0x7e00 if math.isnan(v) else q for v, q in zip(x.tolist(), h)]
    rows = ["{ 0x%08xu, 0x%04x, 0x%04x }" % (v, p & 0xffff, q & 0xffff) for v, p, q in zip(values, b, h)]
    out.append(f"static const struct {{ uint32_t f32; uint16_t bf16, f16; }} op_to_half[{len(rows)}] = {{\n    "
               + ",\n    ".join(", ".join(rows[i:i + 4]) for i in range(0, len(rows), 4)) + "\n};\n")


def batch_norm():
    comment("batch normalisation of (12,4), with a residual and ReLU behind it; running averages after the step")
    x, w, b, residual, dy = (random.normal(*shape) for shape in ((12, 4), (4,), (4,), (12, 4), (12, 4)))
    x[:, 1] = (x[:, 1] + 50.0).float().double()
    for t in (x, w, b, residual):
        t.requires_grad_()
    mean, var = torch.zeros(4).double(), torch.ones(4).double()
    y = F.relu(F.batch_norm(x, mean, var, w, b, training=True, momentum=0.1, eps=1e-5) + residual)
    y.backward(dy)
    inferred = F.batch_norm(x, mean, var, w, b, training=False, eps=1e-5)
    for name, t in (("x", x), ("w", w), ("b", b), ("residual", residual), ("dy", dy), ("y", y), ("dx", x.grad), ("dw", w.grad),
                    ("db", b.grad), ("dresidual", residual.grad), ("mean", mean), ("var", var), ("inferred", inferred)):
        floats("op_batch_norm_" + name, t)


def main(path):
    for part in (layernorm, gelu, cross_entropy, attention, optimizers, schedules, permutations, samplers, conversions,
                 batch_norm, lion, muon):
        part()
    with open(path, "w") as f:
        f.write("/* Written by make_op_golden.py; see its first comment for what is here. Do not edit. */\n"
                "#ifndef OP_GOLDEN_H\n#define OP_GOLDEN_H\n\n#include <stdint.h>\n\n" + "\n".join(out) + "\n#endif\n")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "op_golden.h")
