"""Training steps of PyTorch's DistributedDataParallel over gloo, beside dtrain's in libtorch (bench/libtorch.sh).

RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python3 bench/torch_ddp.py FILE WIDTH LAYERS BATCH STEPS [view]
python3 bench/torch_ddp.py --write FILE WIDTH LAYERS BATCH

--write makes FILE: the initial values of the model, then the inputs and targets of 4 batches of all ranks (BATCH is that
of all ranks), as raw fp32. The model is LAYERS linear layers of WIDTH with a ReLU after each but the last; the loss is
the mean square. One thread; torch's SGD with momentum. `view`: gradients are views of DDP's buckets.
Rank 0 prints the loss of each step (mean over ranks), the scheduler, then the median time of a step without the first
ones. Where the system lets it, a run is real-time (SCHED_RR): what else the machine does, would decide.
"""
import os
import statistics
import sys
import time

import torch
from torch import distributed, nn

BATCHES, WARM_UP = 4, 5
writes = sys.argv[1] == "--write"
path, (width, layers, batch) = sys.argv[1 + writes], (int(a) for a in sys.argv[2 + writes:5 + writes])
torch.set_num_threads(1)
torch.manual_seed(1)
modules = [m for _ in range(layers) for m in (nn.Linear(width, width), nn.ReLU())][:-1]
model = nn.Sequential(*modules)
if writes:
    data = [p.detach() for p in model.parameters()] + [torch.randn(BATCHES, 2, batch, width)]
    with open(path, "wb") as file:
        for tensor in data:
            file.write(tensor.contiguous().numpy().tobytes())
    sys.exit()

steps = int(sys.argv[5])
values = torch.frombuffer(bytearray(open(path, "rb").read()), dtype=torch.float32)
with torch.no_grad():
    for p in model.parameters():
        p.copy_(values[:p.numel()].view_as(p))
        values = values[p.numel():]
try:
    os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))  # threads that start later have it too
    scheduler = "real-time"
except OSError:
    scheduler = "normal"
distributed.init_process_group("gloo")
rank, size = distributed.get_rank(), distributed.get_world_size()
data = values.view(BATCHES, 2, size, batch // size, width)[:, :, rank].contiguous()
ddp = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view="view" in sys.argv)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
losses, times = torch.zeros(steps), []
for step in range(steps):
    start = time.perf_counter()
    inputs, targets = data[step % BATCHES]
    loss = nn.functional.mse_loss(ddp(inputs), targets)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    times.append(time.perf_counter() - start)
    losses[step] = loss.detach()
distributed.all_reduce(losses)
if rank == 0:
    print("\n".join(f"loss {loss:.9f}" for loss in (losses / size).tolist()))
    print(f"scheduler {scheduler}")
    print(f"step_ms {1e3 * statistics.median(times[WARM_UP:]):.4f}")
