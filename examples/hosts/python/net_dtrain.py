"""net_dtrain.py: net.py on several processes, data-parallel: the losses are those of one process, to rounding.

8 inputs -> 32 tanh -> 1, a backward written by hand, SGD on 960 samples. It is saved after every 100 steps, and a run
continues from there.
This program forks the ranks, which meet through shared memory. When a rank dies the others get an exception.

    make lib bindings
    PYTHONPATH=build python3 net_dtrain.py 400 saved 2    # up to step 400, on 2 ranks
"""
import mmap
import multiprocessing
import os
import sys
from ctypes import memmove, string_at

import numpy as np

from dtrain import *


def train(steps, path, rank, ranks, room, barrier):
    @dtrain_host_gather_fn
    def gather(user, mine, all, size):  # the all-gather by which the ranks find each other
        room[rank * size:(rank + 1) * size] = string_at(mine, size)
        barrier.wait(60)
        memmove(all, room[:ranks * size], ranks * size)
        barrier.wait(60)

    random = np.random.default_rng(1)
    x = random.standard_normal((960, 8))
    y = np.sin(x @ random.standard_normal((8, 1)))
    x, y = x[rank::ranks], y[rank::ranks]
    w1, b1, w2 = random.standard_normal((8, 32)) / 4, np.zeros(32), random.standard_normal((32, 1)) / 8
    d1, db, d2 = np.empty_like(w1), np.empty_like(b1), np.empty_like(w2)
    world = dtrain_world_join(dtrain_join_desc(rank=rank, size=ranks, all_gather=gather))
    params = (dtrain_param * 3)()
    for param, name, value, gradient in zip(params, (b"w1", b"b1", b"w2"), (w1, b1, w2), (d1, db, d2)):
        param.name, param.count, param.dtype = name, value.size, DTRAIN_DTYPE_F64
        param.typed_value, param.typed_grad = dtrain_address(value), dtrain_address(gradient)
    ddp = dtrain_strategy_create(world, params, 3, None)
    state = dtrain_state_create(world, dtrain_state_desc(strategy=ddp))
    info = dtrain_load_info()
    if os.path.exists(path + "/latest"):
        dtrain_checkpoint_load(state, path, None, info)
    checkpoint = dtrain_checkpoint_open(world, desc := dtrain_checkpoint_desc(directory=path.encode(), state=state))
    for step in range(info.step + 1, steps + 1):
        h = np.tanh(x @ w1 + b1)
        e = h @ w2 - y
        loss = np.mean(e * e)
        e *= 2 / len(x)
        np.matmul(h.T, e, out=d2)
        dtrain_strategy_ready(ddp, 2)
        dh = e @ w2.T * (1 - h * h)
        np.matmul(x.T, dh, out=d1)
        np.sum(dh, 0, out=db)
        dtrain_strategy_ready(ddp, 1)
        dtrain_strategy_ready(ddp, 0)
        dtrain_strategy_finish(ddp)
        for value, gradient in (w1, d1), (b1, db), (w2, d2):
            value -= 0.1 * gradient
        if step % 100 == 0:
            loss = np.array(loss)
            dtrain_all_reduce(dtrain_world_comm(world), loss, loss, 1, DTRAIN_DTYPE_F64, DTRAIN_REDUCE_MEAN)
            if rank == 0:
                print(f"step {step} loss {loss:.15e}", flush=True)
            dtrain_checkpoint_save(checkpoint, step, loss)
    dtrain_checkpoint_close(checkpoint)
    dtrain_state_destroy(state)
    dtrain_strategy_destroy(ddp)
    dtrain_world_leave(world)


if __name__ == "__main__":
    ranks = int(sys.argv[3])
    room, barrier = mmap.mmap(-1, 8192 * ranks), multiprocessing.Barrier(ranks)
    rank = next((r for r in range(1, ranks) if os.fork() == 0), 0)
    train(int(sys.argv[1]), sys.argv[2], rank, ranks, room, barrier)
    sys.exit(rank == 0 and any(os.wait()[1] for _ in range(ranks - 1)))
