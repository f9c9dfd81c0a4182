"""torch.save and torch.distributed.checkpoint of a model with AdamW, for bench_checkpoint.

python3 bench/torch_checkpoint.py /tmp 1 2

Arguments: a directory, million parameters, repetitions. Values and two moments in fp32, in 96 matrices, and fsync of what
was written: the bytes that dtrain writes. Prints the medians. Before PyTorch 2.1 torch.distributed.checkpoint has
another name and another call; where it cannot be imported (1.13 with Python 3.11) it is left out.
"""
import os
import shutil
import statistics
import sys
import time

import torch

folder, params, reps = os.path.join(sys.argv[1], "torch"), int(sys.argv[2]), int(sys.argv[3])
rows = max(1, params * 1000000 // 96 // 1024)
state = {f"{kind}.{i}": torch.rand(rows, 1024) for kind in ("value", "exp_avg", "exp_avg_sq") for i in range(96)}


def sync(path):
    for root, _, names in os.walk(path):
        for name in names:
            file = os.open(os.path.join(root, name), os.O_RDONLY)
            os.fsync(file)
            os.close(file)


def median_of(save):
    times = []
    for _ in range(reps):
        shutil.rmtree(folder, ignore_errors=True)
        os.makedirs(folder)
        start = time.perf_counter()
        save()
        sync(folder)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def distributed_save():
    """Return what saves by torch.distributed.checkpoint, or None."""
    try:
        import torch.distributed.checkpoint as dcp

        return lambda: dcp.save(state, checkpoint_id=folder)
    except ImportError:
        pass
    try:
        from torch.distributed._shard import checkpoint as dcp

        return lambda: dcp.save_state_dict(state, dcp.FileSystemWriter(folder), no_dist=True)
    except (ImportError, ValueError):
        return None


print("torch_save_s", median_of(lambda: torch.save(state, os.path.join(folder, "state.pt"))))
distributed = distributed_save()
if distributed:
    print("dcp_save_s", median_of(distributed))
shutil.rmtree(folder, ignore_errors=True)
