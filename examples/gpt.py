"""A small GPT by the hand-written loop. It learns to write Python, character by character.

    python examples/gpt.py                                      one process
    resile run examples/gpt.py --workers 4                      four workers
    resile run examples/gpt.py --workers 4 -- --size medium     a larger model

The first two end with the same parameters, bit for bit. The text is the source of the standard library of this Python:
another version of Python has another.
"""

import argparse
import math
import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import resile.training
from resile.training import ElasticLoop

MODULES = """
    argparse ast calendar cmd codecs configparser copy csv dataclasses datetime difflib doctest enum fractions functools
    heapq inspect ipaddress mailbox optparse os pdb pickle platform pprint random shutil socket statistics string
    subprocess tarfile tempfile textwrap threading tokenize traceback turtle typing uuid warnings zipfile
"""
SIZES = {"small": (2, 64, 64), "medium": (4, 192, 128)}  # layers, width, block
CHARACTERS = 128


class SourceCode(Dataset[tuple[Tensor, Tensor]]):
    """Pieces of ``block`` characters of the standard library's source, each with the characters that follow."""

    def __init__(self, *, block: int, kilobytes: int) -> None:
        library = Path(sysconfig.get_paths()["stdlib"])
        files = (library / f"{name}.py" for name in MODULES.split())
        text = b"".join(file.read_text("utf-8").encode("ascii", "replace") for file in files if file.exists())
        self.tokens = torch.frombuffer(bytearray(text[: kilobytes * 1000]), dtype=torch.uint8).long()
        self.block = block

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.block

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        piece = self.tokens[index * self.block : (index + 1) * self.block + 1]
        return piece[:-1], piece[1:]


class Block(nn.Module):
    def __init__(self, *, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attend, self.mix = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.attend(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attention = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attention.transpose(1, 2).reshape(batch, length, width))
        mixed: Tensor = self.mlp(self.mix(x))
        return x + mixed


class GPT(nn.Module):
    def __init__(self, *, layers: int, width: int, block: int) -> None:
        super().__init__()
        self.token = nn.Embedding(CHARACTERS, width)
        self.position = nn.Parameter(torch.empty(block, width))
        self.blocks = nn.Sequential(*(Block(width=width, heads=width // 32) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.token.weight, std=0.1)
        nn.init.normal_(self.position, std=0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position[: tokens.shape[1]]
        x = self.norm(self.blocks(x))
        return F.linear(x, self.token.weight)  # one matrix reads and writes characters


@torch.no_grad()
def write(model: GPT, prompt: str, *, length: int, seed: int) -> str:
    """Continue ``prompt`` by ``length`` characters."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.tensor([list(prompt.encode("ascii"))])
    for _ in range(length):
        logits = model(tokens[:, -len(model.position) :])[0, -1] / 0.7
        tokens = torch.cat([tokens, torch.multinomial(logits.softmax(dim=0), 1, generator=generator)[None]], dim=1)
    return bytes(tokens[0].tolist()).decode("ascii")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small GPT on Python's own source code.")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--layers", type=int, help="instead of the size's")
    parser.add_argument("--width", type=int, help="a multiple of 32, instead of the size's")
    parser.add_argument("--block", type=int, help="characters the model sees at once, instead of the size's")
    parser.add_argument("--kilobytes", type=int, default=600, help="how much text; there are about 2300")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=32, help="pieces of text in an iteration, over all workers")
    parser.add_argument("--num-shards", type=int, default=8, help="parts of a batch: at most so many workers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=1e-2)
    args = parser.parse_args()
    layers, width, block = (
        given or usual for given, usual in zip((args.layers, args.width, args.block), SIZES[args.size], strict=True)
    )

    resile.training.seed(args.seed)
    dataset = SourceCode(block=block, kilobytes=args.kilobytes)
    model = GPT(layers=layers, width=width, block=block)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    iterations = args.epochs * math.ceil(len(dataset) / args.batch_size)
    warm_up = min(20, iterations // 5)

    def rate(step: int) -> float:
        """A linear warm-up, then half a cosine down to a tenth."""
        return (step + 1) / (warm_up + 1) if step < warm_up else 0.55 + 0.45 * math.cos(math.pi * step / iterations)

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    loop = ElasticLoop(
        model,
        optimizer,
        dataset,
        epochs=args.epochs,
        batch_size=args.batch_size,
        num_shards=args.num_shards,
        seed=args.seed,
        state={"schedule": schedule},
        checkpoint_every="20 s",
    )
    for iteration in loop:
        for inputs, targets in iteration.shards():
            iteration.backward(F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()))
        if not iteration.exchange():
            continue
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if loop.is_lowest_rank and iteration.number % 20 == 0:
            print(f"iteration {iteration.number:4d}  loss {iteration.loss:.3f}", flush=True)
    if loop.is_lowest_rank:
        print(write(model, "def ", length=240, seed=args.seed))


if __name__ == "__main__":
    main()
