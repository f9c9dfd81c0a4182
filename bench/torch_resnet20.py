"""ResNet-20 for CIFAR-10 in PyTorch, channels last, for bench_resnet: one training step after another.

THREADS=2 BATCH=128 PRECISION=fp32 STEPS=12 python3 bench/torch_resnet20.py

PRECISION is fp32 or bf16 (autocast). The model of examples/resnet_cifar.c (1 x 1 convolutions as shortcuts), SGD with
momentum, random images. Prints the median over the steps after the first two, and losses.
"""
import contextlib
import os
import statistics
import time

import torch
from torch import nn
from torch.nn import functional as F

threads, batch, steps = (int(os.environ[name]) for name in ("THREADS", "BATCH", "STEPS"))
half = os.environ.get("PRECISION", "fp32") == "bf16"
torch.set_num_threads(threads)
torch.manual_seed(1)


def conv_norm(inputs, outputs, size, stride):
    conv = nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs))


class Block(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.first, self.second = conv_norm(inputs, outputs, 3, stride), conv_norm(outputs, outputs, 3, 1)
        self.shortcut = conv_norm(inputs, outputs, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x):
        return F.relu(self.second(F.relu(self.first(x))) + self.shortcut(x))


widths = [16] * 4 + [32] * 3 + [64] * 3
blocks = [Block(i, o, 2 if o > i else 1) for i, o in zip(widths, widths[1:])]
net = nn.Sequential(conv_norm(3, 16, 3, 1), nn.ReLU(), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
net = net.to(memory_format=torch.channels_last)
images = torch.randn(batch, 3, 32, 32).to(memory_format=torch.channels_last)
labels = torch.randint(0, 10, (batch,))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
times, losses = [], []
for _ in range(steps):
    start = time.perf_counter()
    with torch.autocast("cpu", torch.bfloat16) if half else contextlib.nullcontext():
        loss = F.cross_entropy(net(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    times.append(time.perf_counter() - start)
print(f"torch {torch.__version__} first_loss {losses[0]:.4f} last_loss {losses[-1]:.4f}")
print(f"images_per_second {batch / statistics.median(times[2:]):.2f}")
