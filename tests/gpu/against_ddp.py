"""An iteration of a GPT on all GPUs: Resile's, by that of DistributedDataParallel on NCCL. Prints one line."""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor, nn

BATCH, LENGTH, WIDTH, WARM_UP, COUNTED = 8, 512, 1024, 10, 30


class Gpt(nn.Module):
    """About 110 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 16, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.embed = nn.Embedding(8192, WIDTH)
        self.layers = nn.TransformerEncoder(layer, 7, enable_nested_tensor=False)
        self.out = nn.Linear(WIDTH, 8192)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.layers(self.embed(tokens))).transpose(1, 2)  # type: ignore[no-any-return]


def dataset(size: int) -> torch.utils.data.TensorDataset:
    tokens = torch.randint(0, 8192, (BATCH * size * (WARM_UP + COUNTED), LENGTH))
    return torch.utils.data.TensorDataset(tokens, tokens)


def train_with_ddp() -> None:
    """One rank, started by torchrun."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("nccl")
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(Gpt().cuda())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = dataset(size).tensors[0].chunk(size)[rank].cuda()
    times = []
    for batch in tokens.split(BATCH):
        begun = time.perf_counter()
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = nn.functional.cross_entropy(model(batch), batch)
        loss.backward()
        optimizer.step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begun)
    if rank == 0:
        print(statistics.median(times[WARM_UP:]))
    torch.distributed.destroy_process_group()


def train_with_resile(size: int, out: Path) -> None:
    """One worker, started by `resile run`."""
    from resile.training import Callback, ElasticModel, seed

    class Clock(Callback):
        def __init__(self) -> None:
            self.times: list[float] = []
            self.last = time.perf_counter()

        def on_iteration(self, loop: object, iteration: object) -> None:
            torch.cuda.synchronize()
            now = time.perf_counter()
            self.times.append(now - self.last)
            self.last = now
            if len(self.times) == WARM_UP + COUNTED - 1:
                out.write_text(str(statistics.median(self.times[WARM_UP:])))

    seed(0)
    model = Gpt().cuda()
    ElasticModel(
        model,
        lambda: (dataset(size), None),
        nn.functional.cross_entropy,
        torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True),
        autocast=torch.bfloat16,
        callbacks=[Clock()],
    ).train(epochs=1, batch_size=BATCH * size, num_shards=size, checkpoint_every=10_000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=int, required=True)
    parser.add_argument("--side", choices=["ddp", "resile"])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.side == "ddp":
        train_with_ddp()
    elif args.side == "resile":
        train_with_resile(args.gpus, args.out)
    else:
        print(compare(args.gpus))


def compare(gpus: int) -> str:
    """Train by both, one after the other, each alone on the machine."""
    own = [__file__, "--gpus", str(gpus)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus)]
    ddp = float(subprocess.run([*torchrun, *own, "--side", "ddp"], capture_output=True, text=True, check=True).stdout)
    with tempfile.TemporaryDirectory() as home:
        out = Path(home) / "median"
        command = [sys.executable, "-m", "resile", "run", __file__, "--workers", str(gpus), "--home", home]
        options = ["--", "--gpus", str(gpus), "--side", "resile", "--out", str(out)]
        subprocess.run([*command, *options], check=True, capture_output=True)
        resile = float(out.read_text())
    return f"{resile * 1e3:.1f} ms, by {ddp * 1e3:.1f} ms of DDP: {resile / ddp:.2f} (two medians, {gpus} GPUs)"


if __name__ == "__main__":
    main()
