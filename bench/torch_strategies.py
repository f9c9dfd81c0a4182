"""Training steps in PyTorch over gloo, for bench_strategies: DDP, or FSDP2 (fully_shard) with a unit for each block.

    python3 bench/torch_strategies.py --probe     what this PyTorch has: "torch 2.15.0 ddp fsdp2"
    python3 bench/torch_strategies.py --model gpt --strategy ddp --ranks 2 --steps 4 --data dtrain.h
    python3 bench/torch_strategies.py --model resnet20 --strategy ddp --ranks 2 --steps 4 --batch 8

The models and recipes are those of tools/train_gpt (AdamW, clipping to 1) and examples/resnet_cifar.c (SGD with
momentum; without --data, noise as images). Ranks are forked, so that they share PyTorch's own pages as dtrain's ranks
share theirs. Prints medians over the steps after the first two, the loss of the last step, what rank 0 keeps of
parameters, gradients and optimizer state, its process' memory at the end (proportional set size) and at its peak, and MiB that a rank sent in a step, as counted by the loopback interface:
whatever else uses that interface meanwhile is counted, too.
"""
import argparse
import os
import statistics
import sys
import time

try:
    import numpy
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn import functional as F
except ImportError as error:
    sys.exit(f"torch_strategies.py: {error}")
try:
    from torch.distributed.fsdp import fully_shard
except Exception:  # not there, or, in PyTorch 1.13 under Python 3.11, not importable
    fully_shard = None


def attend(q, k, v):
    """Causal attention; PyTorch 1.13 has no fused one."""
    if hasattr(F, "scaled_dot_product_attention"):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(future, float("-inf")).softmax(-1) @ v


class GptBlock(nn.Module):
    def __init__(self, heads, channels):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(channels), nn.LayerNorm(channels)
        self.qkv, self.proj = nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)
        self.fc, self.out = nn.Linear(channels, 4 * channels), nn.Linear(4 * channels, channels)

    def forward(self, x):
        shape = (x.shape[0], x.shape[1], self.heads, x.shape[2] // self.heads)
        q, k, v = (p.view(shape).transpose(1, 2) for p in self.qkv(self.norm1(x)).split(x.shape[2], 2))
        y = attend(q, k, v)
        x = x + self.proj(y.transpose(1, 2).reshape(x.shape))
        return x + self.out(F.gelu(self.fc(self.norm2(x)), approximate="tanh"))


class Gpt(nn.Module):
    def __init__(self, layers, heads, channels, seq, vocab):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, channels), nn.Embedding(seq, channels)
        self.blocks = nn.Sequential(*(GptBlock(heads, channels) for _ in range(layers)))
        self.norm = nn.LayerNorm(channels)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, 0, 0.02)

    def forward(self, inputs, targets):
        x = self.norm(self.blocks(self.tokens(inputs) + self.positions.weight))
        return F.cross_entropy((x @ self.tokens.weight.t()).flatten(0, 1), targets.flatten())


class Classifier(nn.Module):
    def __init__(self, channels_last):
        super().__init__()
        from torch_cifar import ResNet20
        self.net = ResNet20()
        if channels_last:  # the faster layout; FSDP2 takes contiguous weights alone
            self.net = self.net.to(memory_format=torch.channels_last)
        self.blocks = self.net.blocks

    def forward(self, images, labels):
        return F.cross_entropy(self.net(images), labels)


def gpt_batches(flags):
    text = torch.from_numpy(numpy.fromfile(flags.data, numpy.uint8).astype(numpy.int64))
    while True:
        starts = torch.randint(0, len(text) - flags.seq, (flags.batch,)).tolist()
        windows = torch.stack([text[s : s + flags.seq + 1] for s in starts])
        yield windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def image_batches(flags):
    from torch_cifar import augment, read
    if flags.data:
        images, labels = read(flags.data, [f"data_batch_{i}.bin" for i in range(1, 6)])
    else:
        images, labels = torch.randn(500, 3, 32, 32), torch.randint(0, 10, (500,))
    while True:
        chosen = torch.randint(0, len(labels), (flags.batch,))
        yield augment(images[chosen]).contiguous(memory_format=torch.channels_last), labels[chosen]


def sent_bytes():
    with open("/proc/self/net/dev") as file:
        return next(int(line.split()[9]) for line in file if line.strip().startswith("lo:"))


def memory_mib():
    """Proportional set size now and the largest resident set size of this process."""
    def field(path, name):
        with open(path) as file:
            return next(int(line.split()[1]) for line in file if line.startswith(name)) / 1024
    return field("/proc/self/smaps_rollup", "Pss:"), field("/proc/self/status", "VmHWM:")


def tensors_mib(tensors):
    """What this rank keeps of tensors, which may be sharded."""
    local = (t.to_local() if hasattr(t, "to_local") else t for t in tensors if t is not None)
    return sum(t.numel() * t.element_size() for t in local) / 2**20


def train(rank, flags):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(flags.port), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(flags.threads)
    dist.init_process_group("gloo", rank=rank, world_size=flags.ranks)
    torch.manual_seed(1)
    gpt = flags.model == "gpt"
    model = Gpt(flags.layers, flags.heads, flags.channels, flags.seq, flags.vocab) if gpt else Classifier(flags.strategy == "ddp")
    parameters = sum(p.numel() for p in model.parameters())
    if flags.strategy == "ddp":
        run = nn.parallel.DistributedDataParallel(model)
    else:
        mesh = dist.device_mesh.init_device_mesh("cpu", (flags.ranks,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        run = fully_shard(model, mesh=mesh)
    if gpt:
        optimizer = torch.optim.AdamW(run.parameters(), lr=3e-4, betas=(0.9, 0.99), weight_decay=0.1)
    else:
        optimizer = torch.optim.SGD(run.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    torch.manual_seed(100 + rank)
    batches, times, before = (gpt_batches if gpt else image_batches)(flags), [], 0
    for step in range(flags.steps):
        if step == 2:
            dist.barrier()
            before = sent_bytes()
        start = time.perf_counter()
        loss = run(*next(batches))
        optimizer.zero_grad()
        loss.backward()
        if gpt:
            nn.utils.clip_grad_norm_(run.parameters(), 1.0)
        optimizer.step()
        times.append(time.perf_counter() - start)
    dist.barrier()
    sent = (sent_bytes() - before) / flags.ranks / (flags.steps - 2) / 2**20
    loss = loss.detach()
    dist.all_reduce(loss)
    if rank == 0:
        middle, (held, peak) = statistics.median(times[2:]), memory_mib()
        state = [t for of in optimizer.state.values() for t in of.values() if torch.is_tensor(t)]
        print(f"parameters {parameters}\nloss {loss.item() / flags.ranks:.6f}\nstep_ms {1e3 * middle:.3f}\n"
              f"samples_per_second {flags.batch * flags.ranks / middle:.3f}\nsent_mib {sent:.3f}\n"
              f"params_mib {tensors_mib(run.parameters()):.3f}\noptimizer_mib {tensors_mib(state):.3f}\n"
              f"grads_mib {tensors_mib(p.grad for p in run.parameters()):.3f}\n"
              f"held_mib {held:.1f}\npeak_mib {peak:.1f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main():
    flags = argparse.ArgumentParser()
    flags.add_argument("--probe", action="store_true")
    flags.add_argument("--model", choices=("gpt", "resnet20"))
    flags.add_argument("--strategy", choices=("ddp", "fsdp2"))
    flags.add_argument("--data")
    for name, usual in (("ranks", 2), ("threads", 1), ("steps", 8), ("batch", 2), ("port", 29533), ("layers", 4),
                        ("heads", 4), ("channels", 128), ("seq", 64), ("vocab", 256)):
        flags.add_argument("--" + name, type=int, default=usual)
    flags = flags.parse_args()
    if not dist.is_available() or not dist.is_gloo_available():
        sys.exit("torch_strategies.py: this PyTorch has no gloo")
    if flags.probe:
        print(f"torch {torch.__version__} ddp{' fsdp2' if fully_shard else ''}")
        return
    if flags.strategy == "fsdp2" and not fully_shard:
        sys.exit(f"torch_strategies.py: torch {torch.__version__} has no fully_shard")
    torch.multiprocessing.start_processes(train, (flags,), flags.ranks, start_method="fork")


if __name__ == "__main__":
    main()
