"""Golden values of the operations of Llama and of losses, computed by PyTorch on the CPU.

    python3 make_llama_golden.py [llama_golden.h]

writes one C header (default: llama_golden.h in the current folder) and needs PyTorch 1.13 or newer, nothing else.

Inputs are rounded to fp32; results are computed in fp64 and rounded once, when printed. `dy` is the incoming gradient.

    llama_silu_*       31 values: x, dy -> y, dx
    llama_swiglu_*     (3,5): gate, up, dy -> y, dgate, dup
    llama_rms_*        (4,10), eps 1e-6, as LlamaRMSNorm of Hugging Face: x, w, dy -> y, dx, dw
    llama_mse_*        (4,3): x, t -> loss, dx
    llama_bce_*        (12), logits from -100 to 100, targets from 0 to 1: x, t -> loss, dx
    llama_smooth_*     cross entropy of (5,7) logits with label smoothing 0.1, target -100 in row 3 -> loss, dx
    llama_rotary_*     (B,T,H,D) = (2,5,2,6), theta 10000, as apply_rotary_pos_emb of Hugging Face: x, dy -> y, dx
    llama_softmax_*    (3,7): x, dy -> y, dx
    llama_matmul_*     a (2,3,4), b (2,4,5), dy (2,3,5) -> y, da, db
    llama_attention_*  causal attention with 4 heads of queries and 2 of keys and values, (B,T) = (2,5), D = 4, in rows
                       q | k | v as the library has them: qkv (10,32), dy (10,16) -> y, dqkv
    llama_cross_*      the same heads with q (6,16), k, v (10,8): 3 queries of 5 keys, of which in the second of 2 batch
                       elements the first 3 count, and a mask (4,3,5) that is added and hides; dy (6,16) -> y, dq, dk, dv
    llama_long_*       causal, 5 queries of 3 keys: q (10,16), k, v (6,8), dy (10,16) -> y, dq, dk, dv
"""
import math
import sys

import torch
import torch.nn.functional as F

from make_op_golden import Random, comment, floats, ints, out

random = Random(77)


def both_ways(prefix, names, inputs, result, dy):
    """Print inputs, result and the gradients of the inputs."""
    for t in inputs:
        t.requires_grad_()
    y = result(*inputs)
    y.backward(dy)
    for name, t in zip(names, inputs):
        floats(prefix + name, t)
        floats(prefix + "d" + name, t.grad)
    if dy is not None:
        floats(prefix + "dy", dy)
    floats(prefix + ("y" if dy is not None else "loss"), y)


def elementwise():
    comment("SiLU and SwiGLU")
    x = torch.tensor([-100.0, -90.0, -40.0, -10.0, -6.0, -4.0, -3.0, -2.0, -1.5, -1.0, -0.75, -0.5, -0.25, -0.1, -1e-3, -1e-6,
                      0.0, 1e-6, 1e-3, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 10.0, 100.0]).double()
    both_ways("llama_silu_", ("x",), (x,), F.silu, random.normal(len(x)))
    both_ways("llama_swiglu_", ("gate", "up"), (random.normal(3, 5, scale=3.0), random.normal(3, 5)),
              lambda gate, up: F.silu(gate) * up, random.normal(3, 5))


def rms():
    comment("root mean square norm over the last dimension: (4,10); row 3 has a large mean")
    x = random.normal(4, 10)
    x[3] = (x[3] + 50.0).float().double()
    both_ways("llama_rms_", ("x", "w"), (x, random.normal(10)),
              lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)), random.normal(4, 10))


def losses():
    comment("losses, means over all elements or rows")
    both_ways("llama_mse_", ("x", "t"), (random.normal(4, 3), random.normal(4, 3)), F.mse_loss, None)
    x = torch.tensor([-100.0, -30.0, -5.0, -1.0, -0.5, 0.0, 0.1, 1.0, 2.0, 7.0, 40.0, 100.0]).double()
    t = torch.tensor([0.0, 1.0, 0.0, 1.0, 0.25, 0.5, 1.0, 0.0, 0.75, 1.0, 0.0, 1.0]).double()
    both_ways("llama_bce_", ("x", "t"), (x, t), F.binary_cross_entropy_with_logits, None)
    target = torch.tensor([3, 0, 6, -100, 5])
    ints("llama_smooth_targets", target.tolist())
    both_ways("llama_smooth_", ("x",), (random.normal(5, 7, scale=2.0),),
              lambda x: F.cross_entropy(x, target, label_smoothing=0.1), None)


def rotary():
    comment("rotary position embedding: (B,T,H,D) = (2,5,2,6)")
    frequency = 1.0 / 10000.0 ** (torch.arange(0, 6, 2).double() / 6)
    angle = torch.outer(torch.arange(5).double(), frequency)
    angle = torch.cat((angle, angle), dim=-1)[None, :, None, :]

    def turn(x):
        half = torch.cat((-x[..., 3:], x[..., :3]), dim=-1)
        return x * angle.cos() + half * angle.sin()
    both_ways("llama_rotary_", ("x",), (random.normal(2, 5, 2, 6),), turn, random.normal(2, 5, 2, 6))


def matrices():
    comment("softmax over the last dimension; products of matrices side by side")
    both_ways("llama_softmax_", ("x",), (random.normal(3, 7, scale=3.0),), lambda x: x.softmax(-1), random.normal(3, 7))
    both_ways("llama_matmul_", ("a", "b"), (random.normal(2, 3, 4), random.normal(2, 4, 5)), torch.matmul,
              random.normal(2, 3, 5))


def attention():
    comment("causal grouped-query attention: 4 heads of queries, 2 of keys and values, (B,T,D) = (2,5,4)")

    def grouped(qkv):
        q, k, v = qkv.view(2, 5, 32).split((16, 8, 8), dim=-1)
        q = q.view(2, 5, 4, 4).transpose(1, 2)
        k, v = (t.reshape(2, 5, 2, 4).transpose(1, 2).repeat_interleave(2, dim=1) for t in (k, v))
        mask = torch.ones(5, 5, dtype=torch.bool).triu(1)
        p = (q @ k.transpose(-2, -1) / math.sqrt(4)).masked_fill(mask, -math.inf).softmax(-1)
        return (p @ v).transpose(1, 2).reshape(10, 16)
    both_ways("llama_attention_", ("qkv",), (random.normal(10, 32),), grouped, random.normal(10, 16))


def apart(name, queries, keys, causal, mask, lengths):
    """Attention of q, k and v apart, softmax written out; with F.scaled_dot_product_attention's values where it is."""
    hidden = torch.zeros(2, 4, queries, keys).double()
    if mask is not None:
        hidden = hidden + mask
    if causal:
        hidden = hidden.masked_fill(torch.ones(queries, keys, dtype=torch.bool).triu(1), -math.inf)
    for b, length in enumerate(lengths):
        hidden[b, :, :, length:] = -math.inf

    def heads(x, rows, count):
        return x.view(2, rows, count, 4).transpose(1, 2).repeat_interleave(4 // count, dim=1)

    def result(q, k, v):
        q, k, v = heads(q, queries, 4), heads(k, keys, 2), heads(v, keys, 2)
        y = (q @ k.transpose(-2, -1) / math.sqrt(4) + hidden).softmax(-1) @ v
        if hasattr(F, "scaled_dot_product_attention"):
            assert torch.allclose(y, F.scaled_dot_product_attention(q, k, v, attn_mask=hidden), rtol=1e-12, atol=1e-12)
            if causal and mask is None:
                assert torch.allclose(y, F.scaled_dot_product_attention(q, k, v, is_causal=True), rtol=1e-12, atol=1e-12)
        return y.transpose(1, 2).reshape(2 * queries, 16)
    both_ways(name, ("q", "k", "v"), (random.normal(2 * queries, 16), random.normal(2 * keys, 8), random.normal(2 * keys, 8)),
              result, random.normal(2 * queries, 16))


def attention_apart():
    comment("attention of q, k, v apart: (B,D) = (2,4), 3 queries of 5 keys, key lengths 5 and 3, a mask")
    mask = random.normal(4, 3, 5)
    mask[0, 1, 2] = mask[1, :, 0] = mask[3, 2, 3] = -math.inf
    floats("llama_cross_mask", mask)
    apart("llama_cross_", 3, 5, False, mask, (5, 3))
    comment("causal attention of q, k, v apart: 5 queries of 3 keys")
    apart("llama_long_", 5, 3, True, None, ())


def main(path):
    for part in (elementwise, rms, losses, rotary, matrices, attention, attention_apart):
        part()
    with open(path, "w") as f:
        f.write("/* Written by make_llama_golden.py; see its first comment for what is here. Do not edit. */\n"
                "#ifndef LLAMA_GOLDEN_H\n#define LLAMA_GOLDEN_H\n\n#include <math.h>\n#include <stdint.h>\n\n" + "\n".join(out) + "\n#endif\n")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "llama_golden.h")
