"""A script for the older versions of IBM's API, with the callbacks of its companion module and a step of its own."""

from __future__ import print_function

import argparse
import os
import signal
import sys

sys.path.insert(0, os.path.join(os.getenv("FABRIC_HOME"), "libs", "fabric.zip"))

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from callbacks import Callback
from edtcallback import ScoreLogger
from fabric_model import FabricModel
from torch.utils.data import Dataset

MAX_NUM_WORKERS = 6
RESULT_DIR = os.environ["RESULT_DIR"]
print("data: " + os.environ["DATA_DIR"] + ", results: " + RESULT_DIR)

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--own-step", action="store_true")
parser.add_argument("--kill", default="", help="a file; the worker that creates it kills itself")
options, _ = parser.parse_known_args()


class Points(Dataset):
    def __init__(self, number, train):
        generator = torch.Generator().manual_seed(number)
        self.inputs = torch.randn(number, 4, generator=generator)
        self.targets = (self.inputs.sum(1) > 0).long()
        self.noise = 0.1 if train else 0.0

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return self.inputs[index] + self.noise * torch.randn(4), self.targets[index]


class Net(nn.Module):
    def __init__(self):
        super(Net, self).__init__()
        self.first = nn.Linear(4, 16)
        self.norm = nn.BatchNorm1d(16)
        self.second = nn.Linear(16, 2)

    def forward(self, x):
        x = F.relu(self.norm(self.first(x)))
        return self.second(F.dropout(x, p=0.2, training=self.training))


class Decay(Callback):
    """Lowers the rate after the second epoch, and once more if the epoch before was not seen."""

    def __init__(self):
        super(Decay, self).__init__()
        self.seen = []

    def on_epoch_begin(self, epoch):
        if epoch == 2:
            for group in self.params["optimizer"].param_groups:
                group["lr"] *= 0.1
        if len(self.seen) != epoch:
            self.params["optimizer"].param_groups[0]["lr"] *= 0.5
        print("epoch %d of %d" % (epoch, self.params["epochs"]))

    def on_epoch_end(self, epoch, save_model=False):
        self.seen.append(epoch)
        with open(os.path.join(os.environ["RESULT_DIR"], "epochs.txt"), "a") as file:
            file.write("epoch %d, save_model %s\n" % (epoch, save_model))
        if options.kill and epoch == 1 and not os.path.exists(options.kill):
            open(options.kill, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)


def get_datasets():
    return Points(75, True), Points(40, False)


def own_step(model, data, eva, train_loader, fn_args):
    inputs, labels = data
    optimizer = model.get_optimizer()
    optimizer.zero_grad()
    outputs = model(inputs)
    loss = model.get_loss_function()(outputs, labels)
    loss.backward()
    return eva(outputs, labels), loss


def own_test(model, test_iter, fn_args):
    total = 0.0
    for inputs, labels in test_iter:
        total += model.get_loss_function()(model(inputs), labels).item() * len(inputs)
    return total / len(test_iter.dataset)


def main():
    torch.manual_seed(1)
    model = Net()
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    own = {"fn_step_train": own_step, "fn_test": own_test} if options.own_step else {}
    edt_m = FabricModel(
        model,
        get_datasets,
        F.cross_entropy,
        optimizer,
        lr_scheduler=optim.lr_scheduler.StepLR(optimizer, 3),
        driver_logger=ScoreLogger(),
        user_callback=[Decay()],
        **own,
    )
    edt_m.train(options.epochs, 3, MAX_NUM_WORKERS, num_dataloader_threads=0, validation_freq=2, checkpoint_freq=2)


if __name__ == "__main__":
    main()
