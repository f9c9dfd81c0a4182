"""One GPT-2 training step after another in PyTorch, for bench_train.

THREADS=2 BATCH=4 SEQ=64 LAYERS=12 HEADS=12 CHANNELS=768 VOCAB=50257 STEPS=12 python3 bench/torch_peer.py [MODE]
MODE is torch.compile's on a GPU: default, max-autotune-no-cudagraphs, ...
DEVICE is cpu (default) or cuda, PRECISION fp32 (default) or, on a GPU, tf32 or bf16.

The model of tools/train_gpt/train_gpt.c (tied embeddings, tanh GELU, biases), fused AdamW, clipping to 1.
On a GPU it is compiled (torch.compile), with autocast for bf16 and TF32 products for tf32; attention
is scaled_dot_product_attention with the backend PyTorch chooses, and the vocabulary is padded to a
multiple of 128, as ours is. Prints that backend, and the medians over the steps after the first two; those compile.
"""
import contextlib
import os
import statistics
import sys
import time

import torch
from torch import nn
from torch.nn import functional as F

names = "THREADS BATCH SEQ LAYERS HEADS CHANNELS VOCAB STEPS"
threads, batch, seq, layers, heads, channels, vocab, steps = (int(os.environ[n]) for n in names.split())
device = os.environ.get("DEVICE", "cpu")
precision = os.environ.get("PRECISION", "fp32")
on_gpu = device == "cuda"
if precision not in (("fp32", "tf32", "bf16") if on_gpu else ("fp32",)):
    sys.exit(f"torch_peer.py: no {precision} on {device}")
if not on_gpu:
    torch.set_num_threads(threads)
if on_gpu:
    vocab = (vocab + 127) // 128 * 128
torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")
torch.manual_seed(1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(channels), nn.LayerNorm(channels)
        self.qkv, self.proj = nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)
        self.fc, self.out = nn.Linear(channels, 4 * channels), nn.Linear(4 * channels, channels)

    def forward(self, x):
        shape = (batch, seq, heads, channels // heads)
        q, k, v = (p.view(shape).transpose(1, 2) for p in self.qkv(self.norm1(x)).split(channels, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(batch, seq, channels))
        return x + self.out(F.gelu(self.fc(self.norm2(x)), approximate="tanh"))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, channels), nn.Embedding(seq, channels)
        self.blocks = nn.Sequential(*(Block() for _ in range(layers)))
        self.norm = nn.LayerNorm(channels)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, 0, 0.02)

    def forward(self, inputs, targets):
        x = self.norm(self.blocks(self.tokens(inputs) + self.positions.weight))
        return F.cross_entropy((x @ self.tokens.weight.t()).view(-1, vocab), targets.view(-1))


def autocast():
    if precision == "bf16":
        return torch.autocast("cuda", dtype=torch.bfloat16)
    return contextlib.nullcontext()


def attention_backend():
    """The backend of scaled_dot_product_attention for these shapes."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    q = torch.zeros(batch, heads, seq, channels // heads, device=device, dtype=dtype, requires_grad=True)
    try:
        return torch.nn.attention.SDPBackend(torch._fused_sdp_choice(q, q, q, is_causal=True)).name
    except (AttributeError, TypeError, RuntimeError, ValueError):
        return "unknown"


def now():
    if on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter()


model = Model().to(device)
try:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
except (TypeError, RuntimeError):
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
mode = sys.argv[1] if len(sys.argv) > 1 else "default"
run = torch.compile(model, mode=mode) if on_gpu else model
stream = torch.randint(0, vocab, (batch, seq + 1), device=device)
inputs, targets = stream[:, :-1].contiguous(), stream[:, 1:].contiguous()
times = []
for _ in range(steps):
    start = now()
    with autocast():
        loss = run(inputs, targets)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    times.append(now() - start)
middle = statistics.median(times[2:])
how = f", torch.compile {mode}, attention {attention_backend()}" if on_gpu else ""
print(f"torch {torch.__version__}{how}, loss {loss.item():.4f}")
print(f"step_ms {1e3 * middle:.3f}")
print(f"tokens_per_second {batch * seq / middle:.1f}")
