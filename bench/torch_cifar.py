"""ResNet-20 on CIFAR-10 in PyTorch with the recipe of examples/resnet_cifar.c: a table and a JSON line for each epoch.

    python3 bench/torch_cifar.py --data FOLDER --epochs 1 --batch 250

FOLDER holds data_batch_1.bin to _5.bin and test_batch.bin; --help lists the flags (20 epochs and batches of 128 without
them). The recipe is that of He et al. ("Deep Residual Learning", 2016), shortened to the epochs asked for: crops of
images padded by 4, flips, batch normalisation, SGD with momentum 0.9 and weight decay 1e-4, a rate of 0.1 that falls
tenfold after half and after three quarters of the steps. Images left over at the end of an epoch wait for another one.
Initial weights have the distributions of the C program, not its values; so have the order of images, crops and flips.
"""
import argparse
import json
import time

import numpy
import torch
from torch import nn
from torch.nn import functional as F

MEAN, DEVIATION = (125.3, 123.0, 113.9), (63.0, 62.1, 66.7)


class Block(nn.Module):
    def __init__(self, inside, out, stride):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inside, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)
        self.conv2, self.bn2 = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)
        self.down = nn.Identity()
        if stride != 1:
            self.down = nn.Sequential(nn.Conv2d(inside, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x):
        return F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))) + self.down(x))


class ResNet20(nn.Module):
    def __init__(self):
        super().__init__()
        shapes = [(16, 16, 1)] * 3 + [(16, 32, 2)] + [(32, 32, 1)] * 2 + [(32, 64, 2)] + [(64, 64, 1)] * 2
        self.conv, self.bn = nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16)
        self.blocks = nn.Sequential(*(Block(*shape) for shape in shapes))
        self.fc = nn.Linear(64, 10)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
        nn.init.uniform_(self.fc.weight, -0.125, 0.125)
        nn.init.zeros_(self.fc.bias)

    def forward(self, x):
        return self.fc(self.blocks(F.relu(self.bn(self.conv(x)))).mean((2, 3)))


def read(folder, names):
    """Labels and normalised images (count, 3, 32, 32) of CIFAR-10's binary files."""
    records = numpy.concatenate([numpy.fromfile(f"{folder}/{name}", numpy.uint8).reshape(-1, 3073) for name in names])
    images = torch.from_numpy(records[:, 1:].copy()).view(-1, 3, 32, 32).float()
    mean, deviation = (torch.tensor(v).view(1, 3, 1, 1) for v in (MEAN, DEVIATION))
    return (images - mean) / deviation, torch.from_numpy(records[:, 0].astype(numpy.int64))


def augment(images):
    """Shift each image by up to 4 pixels, the mean coming in, and flip half of them."""
    padded, out = F.pad(images, (4, 4, 4, 4)), torch.empty_like(images)
    shifts, flips = torch.randint(0, 9, (len(images), 2)).tolist(), (torch.rand(len(images)) < 0.5).tolist()
    for i, ((y, x), flip) in enumerate(zip(shifts, flips)):
        crop = padded[i, :, y : y + 32, x : x + 32]
        out[i] = crop.flip(2) if flip else crop
    return out


def accuracy(model, images, labels, batch):
    model.eval()
    with torch.no_grad():
        right = sum((model(x.contiguous(memory_format=torch.channels_last)).argmax(1) == y).sum().item()
                    for x, y in zip(images.split(batch), labels.split(batch)))
    model.train()
    return 100 * right / len(labels)


def main():
    flags = argparse.ArgumentParser()
    flags.add_argument("--data", required=True)
    flags.add_argument("--log")
    for name, usual in (("epochs", 20), ("batch", 128), ("threads", 2), ("seed", 0)):
        flags.add_argument("--" + name, type=int, default=usual)
    flags = flags.parse_args()
    torch.set_num_threads(flags.threads)
    torch.manual_seed(flags.seed)
    images, labels = read(flags.data, [f"data_batch_{i}.bin" for i in range(1, 6)])
    tests = read(flags.data, ["test_batch.bin"])
    per_epoch = len(labels) // flags.batch
    total = per_epoch * flags.epochs
    model = ResNet20().to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [total // 2, total * 3 // 4])
    print(f"torch {torch.__version__}: {len(labels)} training images, {len(tests[1])} for the test; {flags.batch} images a step\n"
          "epoch   steps      lr  training loss  test accuracy  images/s")
    for epoch in range(flags.epochs):
        order, losses, begun = torch.randperm(len(labels)), 0.0, time.perf_counter()
        for step in range(per_epoch):
            chosen = order[step * flags.batch : (step + 1) * flags.batch]
            batch = augment(images[chosen]).contiguous(memory_format=torch.channels_last)
            loss = F.cross_entropy(model(batch), labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            rate = optimizer.param_groups[0]["lr"]
            schedule.step()
            losses += loss.item()
        row = {"bench": "torch_cifar", "epoch": epoch + 1, "steps": (epoch + 1) * per_epoch, "lr": rate,
               "loss": losses / per_epoch, "rate": per_epoch * flags.batch / (time.perf_counter() - begun),
               "accuracy": accuracy(model, *tests, flags.batch)}
        print("{epoch:5d} {steps:7d}  {lr:6.4f}  {loss:13.4f}  {accuracy:11.1f} %  {rate:8.0f}".format(**row), flush=True)
        if flags.log:
            with open(flags.log, "a") as log:
                log.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
