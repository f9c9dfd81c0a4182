"""net.py: a network in numpy, trained by one process, without dtrain.

8 inputs -> 32 tanh -> 1, a backward written by hand, SGD on 960 samples. It is saved after every 100 steps, and a run
continues from there.

    python3 net.py 400 saved.npz    # up to step 400
"""
import os
import sys

import numpy as np


def train(steps, path):
    random = np.random.default_rng(1)
    x = random.standard_normal((960, 8))
    y = np.sin(x @ random.standard_normal((8, 1)))
    w1, b1, w2 = random.standard_normal((8, 32)) / 4, np.zeros(32), random.standard_normal((32, 1)) / 8
    d1, db, d2 = np.empty_like(w1), np.empty_like(b1), np.empty_like(w2)
    first = 0
    if os.path.exists(path):
        saved = np.load(path)
        first, w1, b1, w2 = int(saved["step"]), saved["w1"], saved["b1"], saved["w2"]
    for step in range(first + 1, steps + 1):
        h = np.tanh(x @ w1 + b1)
        e = h @ w2 - y
        loss = np.mean(e * e)
        e *= 2 / len(x)
        np.matmul(h.T, e, out=d2)
        dh = e @ w2.T * (1 - h * h)
        np.matmul(x.T, dh, out=d1)
        np.sum(dh, 0, out=db)
        for value, gradient in (w1, d1), (b1, db), (w2, d2):
            value -= 0.1 * gradient
        if step % 100 == 0:
            print(f"step {step} loss {loss:.15e}", flush=True)
            np.savez(path, step=step, w1=w1, b1=b1, w2=w2)


if __name__ == "__main__":
    train(int(sys.argv[1]), sys.argv[2])
